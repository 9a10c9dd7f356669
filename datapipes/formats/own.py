"""tokenpipe's own token file: header, tokens, document ends; checked before anything is mapped.

All integers little-endian:

    byte  0   8   magic  b"TOKPIPE\\0"
          8   u32 version, 1
         12   u32 dtype code (1 uint8, 2 uint16, 3 uint32, 4 int32, 5 int64)
         16   u64 tokens
         24   u64 documents
         32   u64 vocabulary size, 0 where unknown
         40   u64 the largest token id in the file
         48   u64 end-of-text id + 1, 0 where there is none
         56   32  BLAKE2b-256 of tokens, padding and document ends
         88   64  tokenizer name, UTF-8, zero-padded
        152   32  tokenizer hash
        184   68  zeros
        252   u32 CRC-32 of bytes 0 … 251
        256       tokens
                  zeros up to a multiple of 8
                  u64 × documents: cumulative document ends, in tokens; the last is `tokens`
"""

import contextlib
import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..atomic import NewFile
from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError, TokenIdError
from .layout import DTYPES, TokenLayout, as_dtype, local_path, loss_path

__all__ = ["TokenFileHeader", "TokenFileWriter", "read_header", "token_dtype", "verify_token_file"]

MAGIC = b"TOKPIPE\0"
HEADER = 256
_BLOCK = 1 << 20
_HEADER = struct.Struct("<8sIIQQQQQ32s64s32s68x")
_CODES = {1: "uint8", 2: "uint16", 3: "uint32", 4: "int32", 5: "int64"}


def recognises(head: bytes) -> bool:
    """Also where the magic itself is damaged: the header's CRC still knows it."""
    return head.startswith(MAGIC) or zlib.crc32(MAGIC + head[8:252]) == int.from_bytes(head[252:256], "little")


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    if len(head) < HEADER:
        raise TokenFileError(f"{path}: cut inside its header: {size} bytes, the header alone has {HEADER}")
    if zlib.crc32(head[:252]) != int.from_bytes(head[252:256], "little"):
        raise TokenFileError(f"{path}: its header is damaged (CRC-32 does not match)")
    _, version, code, tokens, documents, vocab_size, largest, _, _, _, _ = _HEADER.unpack(head[:252])
    if version != 1 or code not in _CODES:
        raise TokenFileError(f"{path}: version {version}, dtype code {code}: written by a later tokenpipe?")
    stored = DTYPES[_CODES[code]]
    ends_offset = _aligned(HEADER + tokens * stored.itemsize)
    expected = ends_offset + 8 * documents
    if size != expected:
        raise TokenFileError(
            f"{path}: {tokens} {stored.name} tokens and {documents} document ends make {expected} bytes, but "
            f"the file has {size}: it was cut or appended to"
        )
    if tokens == 0:
        raise TokenFileError(f"{path}: the token file is empty; a source needs at least one token")
    return TokenLayout(path, stored, HEADER, tokens, size, documents, ends_offset, largest, vocab_size or None)


@dataclass(frozen=True)
class TokenFileHeader:
    """What only a header of ours knows. end_of_text: an id, or None. digest: BLAKE2b-256 of what follows it."""

    tokenizer: str
    tokenizer_hash: bytes
    end_of_text: "int | None"
    digest: bytes


def read_header(path: "str | os.PathLike[str]") -> "TokenFileHeader | None":
    """The header of a token file that `read_layout` takes; None for a kind that is not ours. Raises TokenFileError."""
    try:
        with local_path(os.fspath(path)).open("rb") as file:
            head = file.read(HEADER)
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot open the token file: {error.strerror}", os.fspath(path)) from error
    return parse_header(head) if head.startswith(MAGIC) else None


def parse_header(head: bytes) -> TokenFileHeader:
    """Of a header that `layout` has checked; (256,) bytes."""
    *_, end_of_text, digest, name, tokenizer_hash = _HEADER.unpack(head[:252])
    return TokenFileHeader(
        name.rstrip(b"\0").decode("utf-8", "replace"), tokenizer_hash, end_of_text - 1 if end_of_text else None, digest
    )


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def token_dtype(vocab_size: "int | None", dtype: object = None) -> np.dtype:
    """What ids below vocab_size are stored in: the dtype asked for, else uint16 up to 65,536, else uint32."""
    return as_dtype(dtype if dtype is not None else "uint16" if (vocab_size or 0) <= 65536 else "uint32")


class TokenFileWriter:
    """Writes one token file, document by document; nothing stands under `path` before it is whole.

    Memory does not grow with the file. Token ids are checked before they are cast.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "two.tok")
    >>> with TokenFileWriter(path, vocab_size=100) as writer:
    ...     writer.write([1, 2, 3])
    ...     writer.write([4, 5])
    >>> from tokenpipe.datapipes import TokenReader
    >>> TokenReader(path).fetch([0, 4]).tolist()
    [1, 5]

    Args:
        path: the final name; an existing file is replaced.
        vocab_size: ids must be below it; also chooses the dtype (uint16 up to 65,536, else uint32).
        dtype: one of DTYPES, instead of that choice.
        tokenizer: a name of at most 64 UTF-8 bytes. tokenizer_hash: at most 32 bytes.
        end_of_text: the id that closes documents, for readers of the file; not added by the writer.

    Raises ConfigurationError, ArgumentTypeError, TokenIdError (before anything of the document is written), OSError.
    """

    magic = MAGIC

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        vocab_size: "int | None" = None,
        dtype: object = None,
        tokenizer: str = "",
        tokenizer_hash: bytes = b"",
        end_of_text: "int | None" = None,
    ) -> None:
        if vocab_size is None and dtype is None:
            raise ConfigurationError(f"{os.fspath(path)}: give vocab_size= or dtype=, to choose how ids are stored")
        for what, value, most in (
            ("vocab_size", vocab_size, 1 << 63),
            ("end_of_text", end_of_text, vocab_size if isinstance(vocab_size, int) else 1 << 63),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise ArgumentTypeError(f"{what} must be an integer, got {value!r}")
            if value is not None and not int(what == "vocab_size") <= value <= most - int(what != "vocab_size"):
                raise ConfigurationError(
                    f"{what} is {value}; {'1 or more' if what == 'vocab_size' else 'an id below vocab_size'} would do"
                )
        if not isinstance(tokenizer, str) or not isinstance(tokenizer_hash, bytes):
            raise ArgumentTypeError("tokenizer must be a str, tokenizer_hash bytes")
        name = tokenizer.encode()
        if len(name) > 64 or len(tokenizer_hash) > 32:
            raise ConfigurationError("tokenizer has at most 64 UTF-8 bytes, tokenizer_hash at most 32 bytes")
        self.path = Path(path)
        self.dtype = token_dtype(vocab_size, dtype)
        limit = int(np.iinfo(self.dtype).max) + 1
        self.vocab_size = vocab_size
        self._limit = min(limit, vocab_size) if vocab_size is not None else limit
        self._names = (name, tokenizer_hash)
        self._end_of_text = 0 if end_of_text is None else end_of_text + 1
        self._hash = hashlib.blake2b(digest_size=32)
        self.tokens = self.documents = self._largest = 0
        self._new = NewFile(self.path)
        self._file = self._new.file
        self._loss: NewFile | None = None
        self._ends: IO[bytes] = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - closed in close
        self._file.write(bytes(HEADER))

    def write(
        self, document: "Iterable[int] | np.ndarray", loss: "Iterable[bool] | npt.NDArray[np.bool_] | None" = None
    ) -> None:
        """Appends one document (1-D integers, its end-of-text id included if it shall have one).

        loss: a bool a token, whether it counts as a label: then `FILE.loss` stands beside the file (see
        loss_masks.py), in which tokens of documents without one all count.
        """
        if self._file.closed:
            raise ConfigurationError(f"{self.path}: the writer is closed; a token file is written in one go")
        if not isinstance(document, np.ndarray):
            given = list(document) if isinstance(document, Iterable) else None
            if given is None or not all(
                isinstance(n, (int, np.integer)) and n is not True and n is not False for n in given
            ):
                raise ArgumentTypeError(f"a document is a list or 1-D array of integers, got {document!r:.80}")
            ids = np.array(given)
            if ids.dtype.kind not in "iu":  # beyond 64 bits: named below as the ids that do not fit
                ids = np.array(given, dtype=object)
        elif document.ndim != 1 or document.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"a document is a 1-D array of integers, got shape {document.shape}, dtype {document.dtype}"
            )
        else:
            ids = document
        mask = None
        if loss is not None:
            mask = np.asarray(loss if isinstance(loss, np.ndarray) else list(loss))
            if mask.shape != ids.shape or (mask.dtype != np.bool_ and mask.size):
                raise ArgumentTypeError(
                    f"loss is a bool a token, here ({ids.size},); got {mask.dtype} {mask.shape} {loss!r:.80}"
                )
        self.write_many(ids, np.array([ids.size], np.uint64), None if mask is None else mask.astype(np.bool_))

    def write_many(self, tokens: np.ndarray, ends: np.ndarray, loss: "npt.NDArray[np.bool_] | None" = None) -> None:
        """Appends whole documents in one go, with the same bytes as one by one.

        Args:
            tokens: integers (t,), the documents end to end.
            ends: integers (n,), cumulative document ends in `tokens`; the last is t. Empty documents are left out.
            loss: bool (t,), which tokens count as labels; left out, all.
        """
        if self._file.closed:
            raise ConfigurationError(f"{self.path}: the writer is closed; a token file is written in one go")
        ends = np.asarray(ends).astype(np.int64)
        ends = ends[np.diff(ends, prepend=0) != 0]
        if tokens.size != (ends[-1] if ends.size else 0) or np.any(np.diff(ends, prepend=0) < 0):
            raise ConfigurationError(f"document ends must rise up to the {tokens.size} tokens they cut")
        if loss is not None and (loss.dtype != np.bool_ or loss.shape != tokens.shape):
            raise ArgumentTypeError(f"loss is bool ({tokens.size},), got {loss.dtype} {loss.shape}")
        if not tokens.size:
            return
        largest, smallest = int(tokens.max()), int(tokens.min())
        if smallest < 0 or largest >= self._limit:
            wrong = smallest if smallest < 0 else largest
            place = int(np.flatnonzero(tokens == wrong)[0])
            document = self.documents + int(np.searchsorted(ends, place, side="right"))
            raise TokenIdError(
                f"{self.path}: token id {wrong} in document {document} does not fit: ids are "
                f"0 … {self._limit - 1} (dtype {self.dtype.name}, vocab_size {self.vocab_size})"
            )
        self._largest = max(self._largest, largest)
        self._put(tokens.astype(self.dtype, copy=False).tobytes())
        self._put_loss(tokens.size, loss)
        self._ends.write((ends + self.tokens).astype("<u8").tobytes())
        self.tokens += tokens.size
        self.documents += ends.size

    def _put_loss(self, tokens: int, loss: "npt.NDArray[np.bool_] | None") -> None:
        if loss is not None and self._loss is None:
            self._loss = NewFile(loss_path(self.path))
            for first in range(0, self.tokens, _BLOCK):  # of the documents that had none so far
                self._loss.file.write(b"\1" * min(_BLOCK, self.tokens - first))
        if self._loss is not None:
            self._loss.file.write(b"\1" * tokens if loss is None else loss.astype(np.uint8).tobytes())

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def close(self) -> None:
        """Completes the file and gives it its name. Raises ConfigurationError if it has no token."""
        if self._file.closed:
            return
        try:
            if not self.tokens:
                raise ConfigurationError(f"{self.path}: no document with a token was written")
            self._complete()
        except BaseException:
            self.abort()
            raise

    def _complete(self) -> None:
        at = HEADER + self.tokens * self.dtype.itemsize
        self._put(bytes(_aligned(at) - at))
        self._ends.seek(0)
        while block := self._ends.read(1 << 20):
            self._put(block)
        code = {name: code for code, name in _CODES.items()}[self.dtype.name]
        name, digest = self._names
        head = _HEADER.pack(
            self.magic, 1, code, self.tokens, self.documents, self.vocab_size or 0, self._largest,
            self._end_of_text, self._hash.digest(), name, digest,
        )  # fmt: skip
        self._file.seek(0)
        self._file.write(head + zlib.crc32(head).to_bytes(4, "little"))
        # first the mask, or nobody's mask away: no token file is ever beside another one's
        if self._loss is not None:
            self._loss.keep()
        else:
            loss_path(self.path).unlink(missing_ok=True)
        self._new.keep()
        self._ends.close()

    def abort(self) -> None:
        """Throws away what was written; `path` stays as it was."""
        self._new.drop()
        if self._loss is not None:
            self._loss.drop()
        with contextlib.suppress(OSError):  # a full disk fails again where a buffer is flushed
            self._ends.close()

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def verify_token_file(path: "str | os.PathLike[str]") -> None:
    """Reads a whole token file of ours and compares its hash. Raises TokenFileError."""
    from . import read_layout

    if read_header(path) is None:
        raise TokenFileError(f"{os.fspath(path)}: not a tokenpipe token file, so it carries no hash")
    found = read_layout(path)
    with found.local.open("rb") as file:
        compare_hash(os.fspath(path), file.read(HEADER), file)


def compare_hash(path: str, head: bytes, file: "IO[bytes]") -> None:
    """Reads what follows the header `head` to its end and compares the hash. Raises TokenFileError."""
    digest: Any = hashlib.blake2b(digest_size=32)
    while block := file.read(1 << 20):
        digest.update(block)
    expected = _HEADER.unpack(head[:252])[8]
    if digest.digest() != expected:
        raise TokenFileError(
            f"{path}: its contents are damaged: BLAKE2b is {digest.hexdigest()}, the header says {expected.hex()}"
        )
