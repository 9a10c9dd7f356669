"""What any token file comes down to: where its tokens are, how many, and of which dtype."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..cache import CachedArrays, mapped
from ..errors import ConfigurationError, TokenFileError

__all__ = ["DTYPES", "TokenLayout", "as_dtype", "exists", "local_path", "loss_path"]

DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32", "int32", "int64")}
"""The dtypes that tokens are stored in, little-endian."""


def as_dtype(value: object) -> np.dtype:
    """One of DTYPES, from a name or a NumPy dtype. Raises ConfigurationError."""
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        dtype = None
    name = getattr(dtype, "name", "")
    if dtype is None or name not in DTYPES or dtype != DTYPES[name]:  # another byte order is another dtype
        raise ConfigurationError(
            f"dtype {value!r} cannot hold tokens; one of {', '.join(DTYPES)} (little-endian) would do"
        )
    return DTYPES[name]


def local_path(path: str) -> Path:
    """Where a path as the caller gave it, a file:// URL perhaps, is on the local disk."""
    return Path(path.removeprefix("file://"))


def exists(path: Path) -> bool:
    """Whether something has this name; a name that none can have, too long with a suffix, is nothing's."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for such a name


def loss_path(path: "str | os.PathLike[str]") -> Path:
    """Where a token file's loss mask is, if it has one (loss_masks.py): its own path and `.loss`."""
    local = local_path(os.fspath(path))
    return local.with_name(local.name + ".loss")


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of one file are.

    path: as the caller gave it. offset: bytes before the first token. tokens: how many.
    stored_documents: how many document ends are stored from byte `ends_offset` on (uint64, in tokens), or 0.
    ends_path, ends_size: the file that they are in and its bytes, where that is another one.
    sequences: of Megatron's index, which stores the lengths of that many instead; the ends are worked out of them.
    max_token_id, vocab_size: what a header promises, or None.
    end_of_text: the id that closes documents, where their ends are not stored but found by a scan (document_ends.py).
    kind: what the file is, for people.
    """

    path: str
    dtype: np.dtype
    offset: int
    tokens: int
    size: int
    stored_documents: int = 0
    ends_offset: int = 0
    max_token_id: "int | None" = None
    vocab_size: "int | None" = None
    end_of_text: "int | None" = None
    kind: str = "raw"
    ends_path: str = ""
    ends_size: int = 0
    sequences: int = 0

    @property
    def local(self) -> Path:
        return local_path(self.path)

    @property
    def itemcode(self) -> int:
        """The kernels' code for the dtype: bytes an item, negative if signed (int64 is 8)."""
        return {"u": 1, "i": -1}[self.dtype.kind] * self.dtype.itemsize if self.dtype.itemsize < 8 else 8

    @functools.cached_property
    def content(self) -> str:
        """Its fingerprint as a part of names, read once. Raises TokenFileError."""
        from ..fingerprint import file_digest  # which knows of layouts

        return file_digest(self).hex()

    @functools.cached_property
    def ends_content(self) -> str:
        """The fingerprint of the file that its document ends are in; "" where that is the file itself, or none."""
        if not self.ends_path:
            return ""
        try:
            size = local_path(self.ends_path).stat().st_size
        except OSError as error:
            raise TokenFileError(error.errno, f"cannot open the index: {error.strerror}", self.ends_path) from error
        if size != self.ends_size:
            raise TokenFileError(f"{self.ends_path}: was cut or written to after the graph was built")
        return TokenLayout(self.ends_path, DTYPES["uint8"], 0, size, size).content

    @property
    def ends_are_made(self) -> bool:
        """Whether its document ends are worked out once, and kept: nothing stores them."""
        return bool(self.sequences if self.stored_documents else self.end_of_text is not None)

    @property
    def documents(self) -> int:
        """How many the file has, 0 where nobody knows. The first time, a file without stored ends is scanned."""
        return self.stored_documents or (0 if self.end_of_text is None else self._scanned().numbers[1])

    def document_ends(self) -> npt.NDArray[np.uint64]:
        """Cumulative document ends in tokens, uint64 (documents,), mapped from the file that stores them, or from
        what was found once.

        Raises TokenFileError.
        """
        if self.ends_are_made:
            return mapped(self._scanned()).view(np.uint64)
        if not self.stored_documents:
            return np.empty(0, np.uint64)
        path = local_path(self.ends_path or self.path)
        try:
            if self.ends_path and path.stat().st_size != self.ends_size:
                raise ValueError(f"{self.ends_size} bytes")
            return np.memmap(path, np.dtype("<u8"), "r", self.ends_offset, (self.stored_documents,))
        except OSError as error:
            raise TokenFileError(error.errno, f"cannot open the document ends: {error.strerror}", str(path)) from error
        except ValueError as error:  # shorter than what is to be mapped
            raise TokenFileError(f"{path}: was cut or written to after the graph was built") from error

    def _scanned(self) -> CachedArrays:
        from ..document_ends import scanned  # which knows of layouts

        return scanned(self)
