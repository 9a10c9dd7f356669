"""Where the documents of rows begin: positions, document numbers and sequence lengths, from the files' own ends.

    file     │ ─ document 4 ─ │ ── document 5 ── │ 6 │ ─ document 7 …
    row            0 1 2 3 4    0 1 2 3 4 5 6 7 8  0 1  0 1 2 …      positions: again from 0 in each document
                   0 0 0 0 0    1 1 1 1 1 1 1 1 1  2 2  3 3 3 …      document numbers: counted in the row
                 │            │                  │   │               sequence lengths: where each of them begins

A boundary is where a row, a span of a row, a piece of a token space or a document begins (so also a file). The files'
document ends are looked up where they are mapped, by address (few of them in a copy): one binary search a span, then a
walk.
"""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .core import Int64s
from .document_ends import find_ends
from .fetch.gather import TokenGather
from .fetch.held_files import SMALL
from .filemap import FileMap
from .formats.table import document_counts
from .kernels import kernel

__all__ = ["DocumentFill", "RowDocuments"]

MOST_MAPS = 8_192
"""Files whose document ends are mapped at one time; Linux allows a process 65,530 maps by default."""

_NO_COSTS = np.empty(0, np.int64)
_NO_NUMBERS = np.empty((0, 0), np.int64)
_NO_JOINS = np.empty((0, 0), np.bool_)
_NO_SEQUENCES = np.empty(0, np.int32)


class DocumentFill(NamedTuple):
    """What a batch of n rows of S input tokens asks of its documents; None where it was not asked for.

    position_ids: int64 (n, S), from 0 in each document. document_ids: int64 (n, S), counted from 0 in each row.
    joins: bool (n, S): label i, that is token i + 1 of the row, is the first one of a document.
    cu_seqlens: int32 (documents + 1,): where each document begins in the n·S input tokens, rows end to end, then n·S.
    max_seqlen: tokens of the longest; always known.
    """

    position_ids: "Int64s | None"
    document_ids: "Int64s | None"
    joins: "np.ndarray | None"
    cu_seqlens: "np.ndarray | None"
    max_seqlen: int


class RowDocuments:
    """The documents of the rows of one gather. May be asked by several threads.

    Padding is a document of its own. A file that stores no document ends is one document: see `missing`.
    """

    def __init__(self, gather: TokenGather) -> None:
        self._gather = gather
        find_ends(gather.files)
        self._documents = documents = document_counts(gather.files)
        self._entries = np.zeros((gather.bounds.size, 3), np.int64)  # bound, address (0: not mapped), documents
        self._entries[:, 0] = gather.bounds
        self._entries[:-1, 2] = documents[gather.file]
        self._tables = gather.first, gather.place, self._entries
        self._addresses = np.array([n for a in self._tables for n in (a.ctypes.data, len(a))], np.int64)
        self._alike: dict[int, Int64s] = {}  # the count of rows that are one span each, by their width
        self._arrays: list[np.ndarray | None] = [None] * gather.file.size
        self._maps: dict[int, Any] = {}
        self._most = 64  # sequences that a batch had so far, about
        self._lock = threading.Lock()  # maps may not be dropped while another thread reads them

    @property
    def missing(self) -> "list[str]":
        """The paths of files that store no document ends."""
        return [self._gather.files[f].path for f in np.flatnonzero(self._documents == 0).tolist()]

    @property
    def known(self) -> bool:
        """Whether every file stores its document ends."""
        return bool(self._documents.all())

    def positions(self, places: Int64s, width: int) -> Int64s:
        """int64 (n, width): each token's place in its document as far as the row has it.

        `places`: (n,) of the rows' first tokens in the gather's table, −1: padding. Raises TokenFileError.
        """
        out = np.empty((places.size, width), np.int64)
        if out.size:
            self._walk(places, width, width, out)
        return out

    def fill(
        self,
        places: Int64s,
        width: int,
        position_ids: bool = False,
        document_ids: bool = False,
        joins: bool = False,
        cu_seqlens: bool = False,
    ) -> DocumentFill:
        """What is asked for of rows of width = S + 1 tokens, in one call into compiled code. Raises TokenFileError."""
        shape = (places.size, width - 1)
        positions = np.empty(shape, np.int64) if position_ids else _NO_NUMBERS
        numbers = np.empty(shape, np.int64) if document_ids else _NO_NUMBERS
        begins = np.zeros(shape, np.bool_) if joins else _NO_JOINS
        while True:
            sequences = np.empty(self._most, np.int32) if cu_seqlens else _NO_SEQUENCES
            found, longest = self._walk(places, width, width - 1, positions, numbers, begins, sequences)
            if not cu_seqlens or found < sequences.size:
                break
            self._most = found + found // 4 + 64
        return DocumentFill(
            positions if position_ids else None,
            numbers if document_ids else None,
            begins if joins else None,
            sequences[: found + 1] if cu_seqlens else None,
            longest,
        )

    def cost(self, places: Int64s, width: int) -> Int64s:
        """int64 (n,): Σ over a row's documents of (its input tokens)², what causal attention costs. No token is read.

        Raises TokenFileError.
        """
        costs = np.zeros(places.size, np.int64)
        self._walk(places, width, width - 1, costs=costs)
        return costs

    def _walk(
        self,
        places: Int64s,
        width: int,
        inputs: int,
        positions: Int64s = _NO_NUMBERS,
        numbers: Int64s = _NO_NUMBERS,
        joins: np.ndarray = _NO_JOINS,
        sequences: np.ndarray = _NO_SEQUENCES,
        costs: Int64s = _NO_COSTS,
    ) -> "tuple[int, int]":
        walk, compiled = kernel("row_documents")
        counts = self._alike.get(width)
        if counts is None:
            places, counts = self._gather.stretches(places, width)
            if not self._gather.lays_out:
                self._alike = {width: counts}  # 0.5 µs less from now on
        rows, outputs = (places, counts, width, inputs), (positions, numbers, joins, sequences, costs)
        with self._lock:
            while True:
                if compiled:
                    found, longest = walk(*rows, self._addresses, *outputs)
                else:
                    found, longest = walk(*rows, *self._tables, *outputs, self._arrays)
                if found >= 0:
                    return found, longest
                self._map(int(self._gather.file[-1 - found]))
                costs[...] = 0  # what else was written is written again

    def _map(self, f: int) -> None:
        """Maps the document ends of a file."""
        if len(self._maps) >= MOST_MAPS:
            self._entries[:, 1] = 0
            self._arrays[:] = [None] * len(self._arrays)  # in place: a walk that begins again holds the list
            self._maps.clear()
        ends: Any = self._gather.files[f].document_ends()
        if isinstance(ends, np.memmap) and ends.nbytes <= SMALL:  # its copy stays: there may be very many such files
            array = np.array(ends, np.dtype("<u8"))
            address = array.ctypes.data
        elif isinstance(ends, np.memmap):  # which keeps a descriptor: a thousand files would be too many
            whole = ends
            while isinstance(whole.base, np.memmap):  # a view of a map says its offset, not its own
                whole = whole.base
            path, count = Path(str(ends.filename)), ends.size
            offset = whole.offset + ends.ctypes.data - whole.ctypes.data
            del ends, whole
            view = FileMap(path, path.stat().st_size)
            self._maps[f] = view
            address, array = view.address + offset, view.array(np.dtype("<u8"), offset, count)
        else:
            array = self._maps[f] = np.ascontiguousarray(ends, np.dtype("<u8"))
            address = array.ctypes.data
        for entry in self._gather.held.entries_of(f):
            self._entries[entry, 1] = address
            self._arrays[entry] = array
