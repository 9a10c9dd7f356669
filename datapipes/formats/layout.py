"""What any token file comes down to: where its tokens are, how many, and of which dtype."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..cache import CachedArrays, mapped
from ..errors import ConfigurationError, TokenFileError

__all__ = ["DTYPES", "TokenLayout", "as_dtype", "local_path", "loss_path"]

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


def loss_path(path: "str | os.PathLike[str]") -> Path:
    """Where a token file's loss mask is, if it has one (loss_masks.py): its own path and `.loss`."""
    local = local_path(os.fspath(path))
    return local.with_name(local.name + ".loss")


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of one file are.

    path: as the caller gave it. offset: bytes before the first token. tokens: how many.
    stored_documents: how many document ends are stored from byte `ends_offset` on (uint64, in tokens), or 0.
    max_token_id, vocab_size: what a header promises, or None.
    end_of_text: the id that closes documents, where their ends are not stored but found by a scan (document_ends.py).
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

    @property
    def documents(self) -> int:
        """How many the file has, 0 where nobody knows. The first time, a file without stored ends is scanned."""
        return self.stored_documents or (0 if self.end_of_text is None else self._scanned().numbers[1])

    def document_ends(self) -> npt.NDArray[np.uint64]:
        """Cumulative document ends in tokens, uint64 (documents,), mapped from the file, or from what a scan found.

        Raises TokenFileError.
        """
        if self.stored_documents:
            try:
                return np.memmap(self.local, np.dtype("<u8"), "r", self.ends_offset, (self.stored_documents,))
            except OSError as error:
                what = f"cannot open the document ends: {error.strerror}"
                raise TokenFileError(error.errno, what, self.path) from error
            except ValueError as error:  # shorter than what is to be mapped
                raise TokenFileError(f"{self.path}: was cut after the graph was built") from error
        return np.empty(0, np.uint64) if self.end_of_text is None else mapped(self._scanned()).view(np.uint64)

    def _scanned(self) -> CachedArrays:
        from ..document_ends import scanned  # which knows of layouts

        return scanned(self)
