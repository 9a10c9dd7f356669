"""datatrove's token file, which Nanotron reads: tokens without a header, and what they are in files beside them.

    X.ds            tokens, uint16 or uint32
    X.ds.metadata   text: "tokenizer|bytes a token" (the tokenizer may hold "|" itself), the number of tokens, the same
                    for humans
    X.ds.index      uint64 × documents: cumulative document ends in tokens; the last is the number of tokens
    X.ds.loss       a byte a token, of any kind of token file (loss_masks.py)

A file is datatrove's where its name ends in `.ds` and there is a metadata or an index beside it. The index knows no
dtype, so without metadata `dtype=` is required.
"""

import os
from pathlib import Path

import numpy as np

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError
from .layout import DTYPES, TokenLayout
from .places import beside, exists, read_part, size_of
from .writer import DocumentWriter, chosen_dtype

__all__ = ["DatatroveWriter", "read_metadata"]

SUFFIX = ".ds"
_DTYPES = {2: "uint16", 4: "uint32"}
_MOST_METADATA = 4096  # bytes; three lines have a hundred


def recognises(path: str, head: bytes) -> bool:
    return str(path).endswith(SUFFIX) and (exists(beside(path, ".metadata")) or exists(beside(path, ".index")))


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    said, index = read_metadata(path), beside(path, ".index")
    stored, counted = (dtype, None) if said is None else (DTYPES[_DTYPES[said[1]]], said[2])
    ends, last = _look_at(index)
    if stored is None:
        raise ConfigurationError(
            f"{path}: there is no {path}.metadata, so dtype= must say what it holds (its {size} bytes are {last} "
            'tokens by its index; "uint16" for vocabularies up to 65,536, else "uint32")'
        )
    tokens, rest = divmod(size, stored.itemsize)
    for what, count in ((".metadata", counted), (".index", last if ends else None)):
        if rest or (count is not None and count != tokens):
            raise TokenFileError(
                f"{path}: {size} bytes are {tokens} {stored.name} tokens{f' and {rest} bytes' if rest else ''}, but "
                f"{path}{what} says {'what they are' if count is None else f'{count} tokens'}: one of them was cut or "
                "belongs to another file"
            )
    return TokenLayout(
        path, stored, 0, tokens, size, ends, kind="datatrove",
        ends_path=index if ends else "", ends_size=8 * ends,
    )  # fmt: skip


def read_metadata(path: str) -> "tuple[str, int, int | None] | None":
    """(tokenizer, bytes a token, tokens or None where it does not say), or None where there is no metadata.

    Raises TokenFileError.
    """
    metadata = beside(path, ".metadata")
    try:
        if not exists(metadata):
            return None
        said = read_part(metadata, 0, _MOST_METADATA + 1)
        if len(said) > _MOST_METADATA:
            raise TokenFileError(f"{metadata}: is no metadata of datatrove's: it has more than {_MOST_METADATA} bytes")
        lines = said.decode().splitlines()
        tokenizer, _, itemsize = lines[0].rpartition("|") if lines else ("", "", "")
        if itemsize.strip() not in ("2", "4"):
            raise ValueError(f"its first line ends in {itemsize[:20]!r}, which is neither 2 nor 4 bytes a token")
        return tokenizer, int(itemsize), int(lines[1]) if len(lines) > 1 else None
    except ValueError as error:  # no UTF-8, no integer
        raise TokenFileError(f"{metadata}: is no metadata of datatrove's: {error}") from error
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the metadata: {error.strerror}", metadata) from error


def _look_at(index: str) -> "tuple[int, int | None]":
    """(documents, the last one's end) of an index; (0, None) where there is none."""
    try:
        if not exists(index):
            return 0, None
        size = size_of(index)
        if size % 8 or not size:
            raise TokenFileError(f"{index}: {size} bytes are no document ends (uint64, of one document or more)")
        return size // 8, int.from_bytes(read_part(index, size - 8, size), "little")
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the index: {error.strerror}", index) from error


class DatatroveWriter(DocumentWriter):
    """Writes `X.ds` with its index and metadata, as datatrove's DocumentTokenizer does; see TokenFileWriter.

    Args:
        path: ends in ".ds".
        vocab_size: ids must be below it; uint16 up to 65,536, else uint32.
        dtype: "uint16" or "uint32", instead of that choice.
        tokenizer: its name or path, in the metadata.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        vocab_size: "int | None" = None,
        dtype: object = None,
        tokenizer: str = "Unknown Tokenizer",
    ) -> None:
        by = "uint16" if (vocab_size or 0) <= 65536 else "uint32"
        stored = chosen_dtype(path, vocab_size, dtype, "a file of datatrove's", _DTYPES.values(), by)
        if not os.fspath(path).endswith(SUFFIX):
            raise ConfigurationError(f"{os.fspath(path)}: the name of a file of datatrove's ends in {SUFFIX}")
        if not isinstance(tokenizer, str):
            raise ArgumentTypeError(f"tokenizer is a name, got {tokenizer!r}")
        if len(tokenizer.splitlines()) > 1 or len(tokenizer.encode()) > _MOST_METADATA // 2:
            raise ConfigurationError(f"tokenizer is a name in one line of at most 2,048 bytes, got {tokenizer!r:.80}")
        self._tokenizer = tokenizer
        super().__init__(path, vocab_size, stored)

    def finish(self) -> None:
        index = self.beside(Path(beside(self.path, ".index")))
        for ends in self.ends():
            index.write(ends.tobytes())
        lines = [f"{self._tokenizer}|{self.dtype.itemsize}", str(self.tokens), f"{_for_humans(self.tokens)}T"]
        # last, since without it and a dtype no one reads the file
        self.beside(Path(beside(self.path, ".metadata"))).write("\n".join(lines).encode())


def _for_humans(count: int) -> str:
    """Three digits and a power of a thousand: 1234567 is "1.23 M"."""
    power = min((len(str(count)) - 1) // 3, 6)
    return f"{count / 1000**power:.{2 - (len(str(count)) - 1) % 3}f} {' kMGTPE'[power].strip()}"
