"""What any token file comes down to: where its tokens are, how many, and of which dtype."""

import errno
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..cache import CachedArrays, mapped
from ..errors import ConfigurationError, RemoteFileError, TokenFileError
from ..remote import RemoteFile, fetch
from .places import local_path, size_of

__all__ = ["DTYPES", "BlockSums", "TokenLayout", "as_dtype"]

Opened = TypeVar("Opened")

REFETCHED = 8
"""How often a copy is fetched again that was evicted before it could be opened: the cache is far too small then."""

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


@dataclass(frozen=True)
class BlockSums:
    """Where a manifest (manifest.py) has the CRC-32 of every `block` bytes of one token file.

    path: of the manifest. first: the byte in it of the first of `count` sums. crc: of these sums. mark: the manifest's
    own CRC, by which it is known to be the one that was read.
    """

    path: str
    first: int
    count: int
    block: int
    crc: int
    mark: int

    def sums(self) -> npt.NDArray[np.uint32]:
        """uint32 (count,): a CRC-32 each, mapped. Raises TokenFileError for a manifest that changed or is damaged."""
        data = _mapped_manifest(self.path, self.mark)
        found = data[self.first : self.first + 4 * self.count]
        if found.size != 4 * self.count or zlib.crc32(found.data) != self.crc:
            raise TokenFileError(f"{self.path}: the sums in this manifest are damaged (CRC-32 does not match)")
        return found.view("<u4")


@functools.lru_cache(maxsize=8)
def _mapped_manifest(path: str, mark: int) -> npt.NDArray[np.uint8]:
    """All bytes of a manifest, as long as an array over them is left."""
    try:
        data = np.memmap(local_path(path), np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise TokenFileError(getattr(error, "errno", None), f"cannot map the manifest: {error}", path) from error
    if int.from_bytes(data[12:16].tobytes(), "little") != mark:
        raise TokenFileError(f"{path}: the manifest was replaced after it was read; read it again")
    return data.view(np.ndarray)


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of one file are.

    path: as the caller gave it; a URL is shown without what is secret in it.
    offset: bytes before the first token. tokens: how many.
    stored_documents: how many document ends are stored from byte `ends_offset` on (uint64, in tokens), or 0.
    ends_path, ends_size: the file that they are in and its bytes, where that is another one.
    sequences: of Megatron's index, which stores the lengths of that many instead; the ends are worked out of them.
    max_token_id, vocab_size: what a header promises, or None.
    end_of_text: the id that closes documents, where their ends are not stored but found by a scan (document_ends.py).
    kind: what the file is, for people.
    remote, ends_remote: what was found at the URLs that `path` and `ends_path` are, where they are some.

    stored_hash, stored_end_of_text: what the header of a file of ours says of its contents, and which id closes its
    documents.

    What a manifest knows of the file, so that nothing is opened for it: digest, ends_digest, loss_digest: the
    fingerprints of its contents, of `ends_path` and of its loss mask, 64 hex digits. known_documents: how many it has,
    stored or found. has_loss: whether a loss mask lies beside it; None: nobody looked. blocks: the sums of its bytes.
    ends_hash, loss_hash: BLAKE2b-256 of all bytes, as `whole_hash` of a layout of one of these.
    verify: how much of that this reader compares (fetch/checks.py).
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
    stored_hash: str = ""
    stored_end_of_text: "int | None" = None
    digest: str = ""
    ends_digest: str = ""
    known_documents: "int | None" = None
    has_loss: "bool | None" = None
    blocks: "BlockSums | None" = None
    ends_hash: str = ""
    loss_digest: str = ""
    loss_hash: str = ""
    whole_hash: str = ""
    verify: str = "size"
    remote: "RemoteFile | None" = None
    ends_remote: "RemoteFile | None" = None

    @property
    def local(self) -> Path:
        """Where the file is on the local disk; a remote one is fetched into the cache first. Raises TokenFileError."""
        return local_path(self.path) if self.remote is None else fetch(self.remote)

    def opened(self, open_at: "Callable[[Path], Opened]") -> Opened:
        """What `open_at` gives of the local file; a copy that is evicted meanwhile is fetched again."""
        for _ in range(REFETCHED if self.remote is not None else 0):
            try:
                return open_at(self.local)
            except FileNotFoundError:
                continue
            except TokenFileError as error:
                if error.errno != errno.ENOENT or isinstance(error, RemoteFileError):
                    raise
        return open_at(self.local)

    @property
    def known_since(self) -> str:
        """When it was looked at, for people."""
        return f"the manifest {self.blocks.path} was made" if self.blocks else "the graph was built"

    @property
    def itemcode(self) -> int:
        """The kernels' code for the dtype: bytes an item, negative if signed (int64 is 8)."""
        return {"u": 1, "i": -1}[self.dtype.kind] * self.dtype.itemsize if self.dtype.itemsize < 8 else 8

    @functools.cached_property
    def content(self) -> str:
        """Its fingerprint as a part of names, read once. Raises TokenFileError."""
        from ..fingerprint import file_digest  # which knows of layouts

        return self.digest or file_digest(self).hex()

    @functools.cached_property
    def ends_content(self) -> str:
        """The fingerprint of the file that its document ends are in; "" where that is the file itself, or none."""
        if not self.ends_path:
            return ""
        if self.ends_digest:
            return self.ends_digest
        try:
            size = self.ends_size if self.ends_remote is not None else size_of(self.ends_path)
        except OSError as error:
            raise TokenFileError(error.errno, f"cannot open the index: {error.strerror}", self.ends_path) from error
        if size != self.ends_size:
            raise TokenFileError(f"{self.ends_path}: was cut or written to after {self.known_since}")
        return TokenLayout(self.ends_path, DTYPES["uint8"], 0, size, size, remote=self.ends_remote).content

    @property
    def ends_are_made(self) -> bool:
        """Whether its document ends are worked out, or read, once, and kept: nothing here stores them."""
        if not self.stored_documents:
            return self.end_of_text is not None
        return bool(self.sequences) or self.remote is not None

    @property
    def documents(self) -> int:
        """How many the file has, 0 where nobody knows. The first time, a file without stored ends is scanned."""
        if self.stored_documents or self.end_of_text is None:
            return self.stored_documents
        return self._scanned().numbers[1] if self.known_documents is None else self.known_documents

    def document_ends(self) -> npt.NDArray[np.uint64]:
        """Cumulative document ends in tokens, uint64 (documents,), mapped from the file that stores them, or from
        what was found once.

        Raises TokenFileError.
        """
        if self.verify != "size":
            from ..fetch.checks import check_ends  # which knows of layouts

            check_ends(self)
        if self.ends_are_made:
            ends = mapped(self._scanned()).view(np.uint64)
            if self.known_documents not in (None, ends.size):
                raise TokenFileError(
                    f"{self.path}: {ends.size} document(s) were found, {self.known_documents} when {self.known_since}"
                )
            return ends
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
            raise TokenFileError(f"{path}: was cut or written to after {self.known_since}") from error

    def _scanned(self) -> CachedArrays:
        from ..document_ends import scanned  # which knows of layouts

        return scanned(self)
