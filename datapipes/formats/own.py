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

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError
from .layout import DTYPES, TokenLayout, as_dtype
from .places import as_place, read_part
from .writer import DocumentWriter, check_id_count

__all__ = ["TokenFileHeader", "TokenFileWriter", "read_header", "token_dtype"]

MAGIC = b"TOKPIPE\0"
HEADER = 256
_HEADER = struct.Struct("<8sIIQQQQQ32s64s32s68x")
_CODES = {1: "uint8", 2: "uint16", 3: "uint32", 4: "int32", 5: "int64"}


def recognises(path: str, head: bytes) -> bool:
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
    header = parse_header(head)
    return TokenLayout(
        path, stored, HEADER, tokens, size, documents, ends_offset, largest, vocab_size or None, kind="tokenpipe",
        stored_hash=header.digest.hex(), stored_end_of_text=header.end_of_text,
    )  # fmt: skip


@dataclass(frozen=True)
class TokenFileHeader:
    """What only a header of ours knows. end_of_text: an id, or None. digest: BLAKE2b-256 of what follows it."""

    tokenizer: str
    tokenizer_hash: bytes
    end_of_text: "int | None"
    digest: bytes


def read_header(file: "TokenLayout | str | os.PathLike[str]") -> "TokenFileHeader | None":
    """The header of a token file that `read_layout` takes; None for a kind that is not ours. Raises TokenFileError."""
    remote, path = (file.remote, file.path) if isinstance(file, TokenLayout) else (None, as_place(file))
    try:
        head = read_part(path if remote is None else remote, 0, HEADER)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot open the token file: {error.strerror}", path) from error
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


class TokenFileWriter(DocumentWriter):
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
    header = HEADER

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        vocab_size: "int | None" = None,
        dtype: object = None,
        tokenizer: str = "",
        tokenizer_hash: bytes = b"",
        end_of_text: "int | None" = None,
    ) -> None:
        check_id_count(path, vocab_size, dtype)
        if end_of_text is not None:
            if isinstance(end_of_text, bool) or not isinstance(end_of_text, (int, np.integer)):
                raise ArgumentTypeError(f"end_of_text must be an integer, got {end_of_text!r}")
            if not 0 <= end_of_text < (vocab_size or 1 << 63):
                raise ConfigurationError(f"end_of_text is {end_of_text}; an id below vocab_size would do")
        if not isinstance(tokenizer, str) or not isinstance(tokenizer_hash, bytes):
            raise ArgumentTypeError("tokenizer must be a str, tokenizer_hash bytes")
        name = tokenizer.encode()
        if len(name) > 64 or len(tokenizer_hash) > 32:
            raise ConfigurationError("tokenizer has at most 64 UTF-8 bytes, tokenizer_hash at most 32 bytes")
        self._names = (name, tokenizer_hash)
        self._end_of_text = 0 if end_of_text is None else end_of_text + 1
        self._hash = hashlib.blake2b(digest_size=32)
        super().__init__(path, vocab_size, token_dtype(vocab_size, dtype))

    def put(self, data: bytes) -> None:
        super().put(data)
        self._hash.update(data)

    def finish(self) -> None:
        at = HEADER + self.tokens * self.dtype.itemsize
        self.put(bytes(_aligned(at) - at))
        for ends in self.ends():
            self.put(ends.tobytes())
        code = {name: code for code, name in _CODES.items()}[self.dtype.name]
        name, digest = self._names
        head = _HEADER.pack(
            self.magic, 1, code, self.tokens, self.documents, self.vocab_size or 0, self.largest,
            self._end_of_text, self._hash.digest(), name, digest,
        )  # fmt: skip
        self.put_header(head + zlib.crc32(head).to_bytes(4, "little"))


def compare_hash(path: str, expected: bytes, blocks: "Iterable[bytes]") -> None:
    """Compares the hash in a header with that of what follows it, given in blocks. Raises TokenFileError."""
    digest: Any = hashlib.blake2b(digest_size=32)
    for block in blocks:
        digest.update(block)
    if digest.digest() != expected:
        raise TokenFileError(
            f"{path}: its contents are damaged: BLAKE2b is {digest.hexdigest()}, the header says {expected.hex()}"
        )
