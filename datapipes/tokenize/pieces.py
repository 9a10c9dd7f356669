"""A piece of the work, tokenised: a file that is whole or not there, named by all that decides it.

Little-endian:

    byte  0   8   magic  b"TOKPIEC1"
          8   u64 × 5: documents, empty documents (left out), tokens, UTF-8 bytes of the texts, bytes of ids
         48       tokens, zeros up to a multiple of 8
                  u64 × documents: cumulative document ends, in tokens
                  u64 × documents: cumulative ends of the ids, in bytes; absent without ids
                  the ids, UTF-8, end to end
"""

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..atomic import NewFile
from .documents import Span
from .opening import shown

__all__ = ["ASSEMBLED", "Content", "Piece", "PieceReader", "PieceWriter", "Task", "is_ours", "piece_name", "read_piece"]

MAGIC = b"TOKPIEC1"
_HEADER = struct.Struct("<8s5Q")
OPEN_FILES = 64
LOOKED_UP = 1 << 14  # ends of documents in one go
IDS_BYTES = 1 << 22  # of a piece that is written, in memory
ASSEMBLED = "assembled.tok"

Content = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Documents end to end: tokens (t,), their ends (n,), the bytes of their ids (b,), the ends of those (n,) or (0,)."""


class Task(NamedTuple):
    """A piece to be made: of these spans, in this folder."""

    folder: str
    spans: "list[Span]"


class Piece(NamedTuple):
    """A finished piece and what its header says."""

    path: str
    documents: int
    empty: int
    tokens: int
    text_bytes: int
    id_bytes: int

    def offsets(self, itemsize: int, ids: bool) -> "tuple[int, int, int, int]":
        """Bytes at which the document ends, the ids' ends, the ids and the file end begin."""
        ends = -(-(_HEADER.size + self.tokens * itemsize) // 8) * 8
        id_ends = ends + 8 * self.documents
        first_id = id_ends + (8 * self.documents if ids else 0)
        return ends, id_ends, first_id, first_id + self.id_bytes


def piece_name(settings: "dict[str, Any]", spans: Sequence[Span]) -> str:
    """The same for the same bits: hash of the settings and of each span's file, size, time and bytes."""
    named = [(*span[1:], shown(span.file.path), *span.file[1:]) for span in spans]  # a URL may be signed anew
    text = json.dumps([settings, named], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() + ".piece"


def is_ours(name: str) -> bool:
    """Whether a file of a work folder is one that this package makes there, whole or begun."""
    stem, _, suffix = name.lstrip(".").partition(".")
    piece = len(stem) == 32 and set(stem) <= set("0123456789abcdef") and suffix.startswith("piece")
    return piece or name.lstrip(".").startswith(ASSEMBLED)


class PieceWriter:
    """Writes one piece; `path` appears when it is closed, and never half."""

    def __init__(self, path: Path, dtype: np.dtype, ids: bool) -> None:
        self.path, self.dtype, self.ids = path, dtype, ids
        self.empty = self.tokens = self.text_bytes = 0
        self._ends: list[np.ndarray] = []
        self._id_sizes: list[np.ndarray] = []
        # on the disk where they are many: a packed file is one piece, however large
        self._ids = tempfile.SpooledTemporaryFile(IDS_BYTES, dir=str(path.parent))  # noqa: SIM115
        self._new = NewFile(path)
        self._file = self._new.file
        self._file.write(bytes(_HEADER.size))

    def write(self, tokens: np.ndarray, ends: np.ndarray, ids: Sequence[bytes]) -> None:
        """Appends documents: tokens (t,) of the piece's dtype, ends (n,) in them, and as many ids or none."""
        self._file.write(tokens.tobytes())
        self._ends.append(ends.astype("<u8") + np.uint64(self.tokens))
        self._ids.write(b"".join(ids))
        self._id_sizes.append(np.fromiter(map(len, ids), "<u8", len(ids)))
        self.tokens += tokens.size

    def close(self) -> Piece:
        ends = np.concatenate(self._ends) if self._ends else np.empty(0, "<u8")
        self._file.write(bytes(-self._file.tell() % 8))
        self._file.write(ends.tobytes())
        id_bytes = self._ids.tell()
        if self.ids and self._id_sizes:
            self._file.write(np.cumsum(np.concatenate(self._id_sizes), dtype="<u8").tobytes())
            self._ids.seek(0)
            shutil.copyfileobj(self._ids, self._file, 1 << 20)
        self._ids.close()
        piece = Piece(str(self.path), ends.size, self.empty, self.tokens, self.text_bytes, id_bytes)
        self._file.seek(0)
        self._file.write(_HEADER.pack(MAGIC, *piece[1:]))
        self._new.keep()
        return piece

    def abort(self) -> None:
        self._ids.close()
        self._new.drop()


def read_piece(path: Path, itemsize: int, ids: bool) -> "Piece | None":
    """What a finished piece's header says; None where there is none, or one that the disk lost a part of."""
    try:
        with path.open("rb") as file:
            head, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        return None
    piece = Piece(str(path), *_HEADER.unpack(head)[1:])
    return piece if piece.offsets(itemsize, ids)[-1] == size else None


class PieceReader:
    """Documents of finished pieces; memory and open files are bounded whatever their number."""

    def __init__(self, dtype: np.dtype, ids: bool) -> None:
        self.dtype, self.ids = dtype, ids
        self._open: OrderedDict[str, int] = OrderedDict()

    def in_blocks(self, pieces: "Iterable[Piece]", block_bytes: int) -> Iterator[Content]:
        """All documents of pieces, in blocks of about `block_bytes` of tokens, or of one longer document."""
        eights, width = np.dtype("<u8"), self.dtype.itemsize
        for piece in pieces:
            table, id_table, first_id, _ = piece.offsets(width, self.ids)
            done = low = id_low = 0
            while done < piece.documents:
                ends = self._read(piece, eights, min(LOOKED_UP, piece.documents - done), table + 8 * done)
                count = max(1, int(np.searchsorted(ends, low + block_bytes // width, side="right")))
                ends, high = ends[:count], int(ends[count - 1])
                tokens = self._read(piece, self.dtype, high - low, _HEADER.size + low * width)
                id_ends = self._read(piece, eights, count if self.ids else 0, id_table + 8 * done)
                id_high = int(id_ends[-1]) if self.ids else 0
                text = self._read(piece, np.dtype(np.uint8), id_high - id_low, first_id + id_low)
                yield tokens, ends - np.uint64(low), text, id_ends - np.uint64(id_low)
                done, low, id_low = done + count, high, id_high

    def gathered(self, pieces: Sequence[Piece], numbers: "Iterable[np.ndarray]", block_bytes: int) -> Iterator[Content]:
        """Documents in any order, in blocks of about `block_bytes`.

        Args:
            numbers: int64 arrays (n,) of documents, numbered over all pieces end to end.

        Within a block they are read as they lie on the disk.
        """
        first = np.cumsum([0, *(piece.documents for piece in pieces)], dtype=np.int64)
        width = self.dtype.itemsize
        for asked in numbers:
            which = np.searchsorted(first, asked, side="right") - 1
            places = list(zip(which.tolist(), (asked - first[which]).tolist(), strict=True))
            found = np.zeros((4, asked.size), np.int64)  # first byte and bytes of the tokens, of the id
            for k in np.argsort(asked).tolist():
                piece, document = pieces[places[k][0]], places[k][1]
                found[:2, k] = self._bounds(piece, document)
                if self.ids:
                    found[2:, k] = self._bounds(piece, document, of_id=True)
            taken = np.cumsum(found[1] + found[3])
            start = 0
            while start < asked.size:
                before = int(taken[start - 1]) if start else 0
                stop = max(start + 1, int(np.searchsorted(taken, before + block_bytes, side="right")))
                rows = slice(start, stop)
                here = [pieces[at] for at, _ in places[rows]]
                order = np.argsort(asked[rows]).tolist()
                tokens, ends = self._collected(here, found[0, rows], found[1, rows], order)
                text, id_ends = self._collected(here, found[2, rows], found[3, rows], order if self.ids else [])
                yield tokens.view(self.dtype), ends // width, text, id_ends if self.ids else id_ends[:0]
                start = stop

    def _collected(
        self, pieces: Sequence[Piece], first: np.ndarray, size: np.ndarray, order: "list[int]"
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Bytes of several pieces end to end, and their ends there."""
        ends = np.cumsum(size)
        out = np.empty(int(ends[-1]), np.uint8)
        starts, lows = (ends - size).tolist(), first.tolist()
        for k in order:
            self._read_into(pieces[k], out[starts[k] : int(ends[k])], lows[k])
        return out, ends

    def _bounds(self, piece: Piece, document: int, of_id: bool = False) -> "tuple[int, int]":
        """(first byte, bytes) of a document's tokens in its piece, or of its id."""
        ends, id_ends, first_id, _ = piece.offsets(self.dtype.itemsize, self.ids)
        table, base, width = (id_ends, first_id, 1) if of_id else (ends, _HEADER.size, self.dtype.itemsize)
        first = max(document - 1, 0)
        found = self._read(piece, np.dtype("<u8"), document - first + 1, table + 8 * first)
        low = int(found[0]) if document else 0
        return base + low * width, (int(found[-1]) - low) * width

    def _read_into(self, piece: Piece, out: np.ndarray, offset: int) -> None:
        """Fills `out`, uint8 (n,), from byte `offset` on."""
        handle = self._handle(piece.path)
        while out.size:
            got = os.preadv(handle, [out.data], offset)
            if not got:
                raise OSError(f"{piece.path}: cut while it was read")
            out, offset = out[got:], offset + got

    def _read(self, piece: Piece, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        array = np.empty(count, dtype)
        self._read_into(piece, array.view(np.uint8), offset)
        return array

    def _handle(self, path: str) -> int:
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
