"""Megatron's pair: `X.bin` holds tokens alone, `X.idx` what they are.

    byte  0   9   magic  b"MMIDIDX\\0\\0"
          9   u64 version, 1
         17   u8  dtype code (1 uint8, 4 int32, 5 int64, 8 uint16; 2 int8, 3 int16, 6 float64, 7 float32 are no ids)
         18   u64 N sequences
         26   u64 M: documents + 1
         34   i32 × N: tokens of each sequence
              i64 × N: the byte in `X.bin` where each begins
              i64 × M: the sequence that each document begins with, then N
              i8  × N: modes, of multimodal data alone, which are refused

A `.bin` is Megatron's where there is an `.idx` beside it. The whole of `.bin` is read as it stands, so an index that
picks or re-orders sequences is refused: they must lie end to end. At open that is looked at in all of an index of up to
65,536 sequences, else in stretches of it; in the whole when its document ends are first asked for, which are worked out
once and kept (cache.py).
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigurationError, TokenFileError
from ..remote import fetch
from .layout import DTYPES, TokenLayout
from .places import beside, exists, local_path
from .writer import DocumentWriter, chosen_dtype

__all__ = ["MegatronWriter", "check_index", "data_path", "document_ends"]

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
_NO_IDS = {2: "int8", 3: "int16", 6: "float64", 7: "float32"}
_LOOKED_AT, _STRETCHES = 1 << 16, 16
_CHUNK = 1 << 18  # sequences looked at in one go

Sequences = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def data_path(path: str) -> str:
    """The `.bin` of a pair, from its path, the index's, or the prefix that both have; any other path as it is."""
    if str(path).endswith(".idx"):
        return beside(path, ".bin", instead_of=".idx")
    if not str(path).endswith(".bin") and not exists(path) and exists(beside(path, ".idx")):
        return beside(path, ".bin")
    return path


def _index_path(path: str) -> str:
    return beside(path, ".idx", instead_of=".bin")


def recognises(path: str, head: bytes) -> bool:
    return str(path).endswith(".bin") and exists(_index_path(path))


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    index = _index_path(path)
    try:
        with local_path(index).open("rb") as file:
            found = _checked(path, index, file, size)
            stretches = [(0, found.sequences)]
            if found.sequences > _LOOKED_AT:
                step = _LOOKED_AT // _STRETCHES
                begins = np.linspace(0, found.sequences - step, _STRETCHES).astype(np.int64).tolist()
                stretches = [(begin, begin + step) for begin in begins]
            for begin, stop in stretches:
                _end_to_end(found, begin, _sequences(file, found.sequences, begin, stop))
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the index: {error.strerror or error}", index) from error
    return found if found.stored_documents else replace(found, sequences=0, ends_path="", ends_size=0)


def _checked(path: str, index: str, file: "IO[bytes]", size: int) -> TokenLayout:
    """What the header says, checked against the sizes of both files and the ends of the tables."""
    head, total = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise TokenFileError(
            f"{index}: begins with {head[:9]!r}, not as an index of Megatron's: it is damaged or another tool's. To "
            f"read {path} as raw tokens, move it away from there"
        )
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        raise TokenFileError(f"{index}: version {version} of Megatron's index; version 1 is read")
    if code not in _CODES:
        name = _NO_IDS.get(code, f"dtype code {code}")
        raise TokenFileError(f"{index}: says that {path} holds {name}; token ids are {', '.join(_CODES.values())}")
    expected = _HEADER.size + 12 * sequences + 8 * borders
    if total == expected + sequences and sequences:
        raise TokenFileError(f"{index}: has modes of multimodal data, which are not read; text alone is")
    if total != expected:
        raise TokenFileError(
            f"{index}: {sequences} sequences and {borders} borders of documents make {expected} bytes, but the file "
            f"has {total}: it was cut or appended to"
        )
    if not sequences or not borders:
        raise TokenFileError(f"{index}: says that {path}, of {size} bytes, holds no sequence")
    stored = DTYPES[_CODES[code]]
    lengths, offsets = _sequences(file, sequences, sequences - 1, sequences)
    last_byte = int(offsets[0]) + int(lengths[0]) * stored.itemsize
    if last_byte != size:
        raise TokenFileError(
            f"{path}: has {size} bytes, but the last sequence of {index} ends at byte {last_byte}: one of them was "
            "cut, or belongs to another file"
        )
    if size % stored.itemsize:
        raise TokenFileError(f"{path}: {size} bytes are no whole number of {stored.name} tokens")
    at = _HEADER.size + 12 * sequences
    (first,), (last,) = _read(file, at, "<i8", 1), _read(file, expected - 8, "<i8", 1)
    documents = borders - 1
    if first != 0 or (documents and last != sequences):
        raise TokenFileError(f"{index}: its documents are sequences {first} … {last}, not 0 … {sequences}")
    return TokenLayout(
        path, stored, 0, size // stored.itemsize, size, documents, at, kind="megatron", ends_path=index,
        ends_size=total, sequences=sequences,
    )  # fmt: skip


def _read(file: "IO[bytes]", at: int, dtype: str, count: int) -> "npt.NDArray[np.int64]":
    file.seek(at)
    data = file.read(count * np.dtype(dtype).itemsize)
    if len(data) < count * np.dtype(dtype).itemsize:
        raise TokenFileError(f"{file.name}: was cut while it was read")
    return np.frombuffer(data, dtype).astype(np.int64)


def _sequences(file: "IO[bytes]", count: int, begin: int, stop: int) -> Sequences:
    """((n,) tokens, (n,) first bytes) of the sequences [begin, stop) of `count`."""
    lengths = _read(file, _HEADER.size + 4 * begin, "<i4", stop - begin)
    return lengths, _read(file, _HEADER.size + 4 * count + 8 * begin, "<i8", stop - begin)


def _end_to_end(file: TokenLayout, begin: int, sequences: Sequences) -> None:
    """Raises TokenFileError unless each of these sequences begins where the one before it ends."""
    lengths, offsets = sequences
    size = file.dtype.itemsize
    follow = np.append(offsets[1:], offsets[-1] + size * lengths[-1])
    wrong = (lengths < 0) | (offsets + size * lengths != follow) | (offsets < 0) | (offsets > file.size)
    if begin == 0 and offsets[0] != 0:
        wrong[0] = True
    if wrong.any():
        at = begin + int(np.flatnonzero(wrong)[0])
        raise TokenFileError(
            f"{file.ends_path}: its sequences do not lie end to end in {file.path} (sequence {at} has "
            f"{lengths[at - begin]} tokens from byte {offsets[at - begin]} on): it picks or re-orders them, or is "
            "damaged; a pair whose index lists all of it in order would do"
        )


def document_ends(file: TokenLayout) -> "Iterator[npt.NDArray[np.int64]]":
    """Cumulative document ends in tokens, some at a time; on the way all of the index is checked. TokenFileError."""
    index = file.ends_path
    try:
        with (local_path(index) if file.ends_remote is None else fetch(file.ends_remote)).open("rb") as handle:
            if os.fstat(handle.fileno()).st_size != file.ends_size:
                raise TokenFileError(f"{index}: was cut or written to after the graph was built")
            borders = np.memmap(handle, np.dtype("<i8"), "r", file.ends_offset, (file.stored_documents + 1,))
            at, last, tokens = 1, 0, 0  # the document looked at, the border before it, the tokens so far
            for begin in range(0, file.sequences, _CHUNK):
                stop = min(begin + _CHUNK, file.sequences)
                lengths, offsets = _sequences(handle, file.sequences, begin, stop)
                _end_to_end(file, begin, (lengths, offsets))
                if offsets[0] != tokens * file.dtype.itemsize:
                    raise TokenFileError(
                        f"{index}: its sequences do not lie end to end in {file.path}: sequence {begin} begins at byte "
                        f"{offsets[0]}, the one before it ends at {tokens * file.dtype.itemsize}"
                    )
                ends = tokens + np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
                while at < borders.size:
                    some = np.asarray(borders[at : at + _CHUNK], np.int64)
                    here = some[: np.argmax(some > stop)] if (some > stop).any() else some
                    if here.size and ((np.diff(here, prepend=last) < 0).any() or here[0] < begin):
                        raise TokenFileError(f"{index}: its documents are damaged near {at - 1}: they must increase")
                    if here.size:
                        yield ends[here - begin]
                        at, last = at + here.size, int(here[-1])
                    if here.size < some.size:
                        break
                tokens = int(ends[-1])
            if at != borders.size:
                raise TokenFileError(f"{index}: its documents are damaged near {at - 1}: they must increase")
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the index: {error.strerror or error}", index) from error


def check_index(file: TokenLayout) -> None:
    """Raises TokenFileError unless all of a pair's index is sound, also where its sequences make up no documents."""
    index = _index_path(file.path)
    try:
        with local_path(index).open("rb") as handle:
            found = _checked(file.path, index, handle, file.size)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the index: {error.strerror or error}", str(index)) from error
    for _ in document_ends(found):
        pass


class MegatronWriter(DocumentWriter):
    """Writes the pair `X.bin`, `X.idx`, a sequence a document, as Megatron's preprocessing does; see TokenFileWriter.

    Args:
        path: the prefix X, or either file's name.
        vocab_size: ids must be below it; uint16 below 65,500, else int32, as in Megatron.
        dtype: "uint8", "uint16", "int32" or "int64", instead of that choice.
    """

    def __init__(self, path: "str | os.PathLike[str]", vocab_size: "int | None" = None, dtype: object = None) -> None:
        by = "uint16" if (vocab_size or 0) < 65500 else "int32"
        stored = chosen_dtype(path, vocab_size, dtype, "Megatron", _CODES.values(), by)
        prefix = os.fspath(path).removesuffix(".bin").removesuffix(".idx")
        super().__init__(f"{prefix}.bin", vocab_size, stored)

    def write_many(self, tokens: np.ndarray, ends: np.ndarray, loss: Any = None) -> None:
        if np.size(ends) and int(np.diff(np.asarray(ends).astype(np.int64), prepend=0).max()) >= 1 << 31:
            raise ConfigurationError(
                f"{self.path}: a document of 2^31 tokens or more, which Megatron's index cannot say"
            )
        super().write_many(tokens, ends, loss)

    def finish(self) -> None:
        index = self.beside(Path(_index_path(str(self.path))))
        code = {name: code for code, name in _CODES.items()}[self.dtype.name]
        index.write(_HEADER.pack(MAGIC, 1, code, self.documents, self.documents + 1))
        last = 0
        for ends in self.ends():
            index.write(np.diff(ends.astype(np.int64), prepend=last).astype("<i4").tobytes())
            last = int(ends[-1])
        last = 0
        for ends in self.ends():
            starts = np.append(np.int64(last), ends[:-1].astype(np.int64))
            index.write((starts * self.dtype.itemsize).astype("<i8").tobytes())
            last = int(ends[-1])
        for first in range(0, self.documents + 1, _CHUNK):
            index.write(np.arange(first, min(first + _CHUNK, self.documents + 1)).astype("<i8").tobytes())
