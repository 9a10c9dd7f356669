"""The token files of llm.c and modded-nanogpt (`.bin`): a header of 256 int32, then tokens.

    byte  0   i32 magic: 20240520 for uint16 tokens (version 1), 20240801 for uint32 (version 7)
          4   i32 version
          8   i32 tokens
         12   zeros
       1024   tokens

It stores no document ends: `end_of_text=50256` finds them. llm.c puts that id before a document, not behind it, so
there each document then begins after its own.
"""

import os
import struct

import numpy as np

from ..errors import TokenFileError
from .layout import DTYPES, TokenLayout
from .writer import DocumentWriter, chosen_dtype

__all__ = ["LlmcWriter"]

HEADER = 1024
_HEADER = struct.Struct("<iii")
_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


def recognises(path: str, head: bytes) -> bool:
    return int.from_bytes(head[:4], "little") in _KINDS


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    if size < HEADER:
        raise TokenFileError(f"{path}: cut inside its header: {size} bytes, the header alone has {HEADER}")
    magic, version, tokens = _HEADER.unpack_from(head)
    expected, name = _KINDS[magic]
    if version != expected:
        raise TokenFileError(f"{path}: begins as a token file of llm.c's, of version {version}, not {expected}")
    stored = DTYPES[name]
    if tokens < 0 or size != HEADER + tokens * stored.itemsize:
        raise TokenFileError(
            f"{path}: its header says {tokens} {name} tokens ({HEADER + tokens * stored.itemsize} bytes), but the file "
            f"has {size} bytes"
        )
    if tokens == 0:
        raise TokenFileError(f"{path}: the token file is empty; a source needs at least one token")
    return TokenLayout(path, stored, HEADER, tokens, size, kind="llm.c")


class LlmcWriter(DocumentWriter):
    """Writes one `.bin` of llm.c and modded-nanogpt, which keeps no document ends; see TokenFileWriter.

    Args:
        path: the final name. At most 2^31 − 1 tokens; the tools' own shards have 10^8.
        vocab_size: ids must be below it; uint16 up to 65,536, else uint32.
        dtype: "uint16" or "uint32", instead of that choice.
    """

    header = HEADER
    most_tokens = 2**31 - 1

    def __init__(self, path: "str | os.PathLike[str]", vocab_size: "int | None" = None, dtype: object = None) -> None:
        by = "uint16" if (vocab_size or 0) <= 65536 else "uint32"
        known = [name for _, name in _KINDS.values()]
        super().__init__(path, vocab_size, chosen_dtype(path, vocab_size, dtype, "a file of llm.c's", known, by))

    def finish(self) -> None:
        magic, version = next((magic, version) for magic, (version, name) in _KINDS.items() if name == self.dtype.name)
        self.put_header(_HEADER.pack(magic, version, self.tokens))
