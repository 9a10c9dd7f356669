"""One gather: the tokens of all rows of a batch, from whatever sources and files, by one call into compiled code."""

import contextlib
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _kernels_numpy
from ..core import MAX_NUMBER, Int64s
from ..errors import ConfigurationError, TokenFileError, TokenIdError
from ..filemap import advise
from ..formats import TokenLayout
from ..formats.table import distinct, has_remote, integers, itemcodes, numbered_files, parts_of
from ..kernels import kernel
from ..read import TokenSpace
from .checks import BlockChecks
from .descriptors import CLOSED, MAPPED
from .held_files import HeldFiles, let_go
from .pages import WATCH
from .remote_pieces import RemotePieces

if TYPE_CHECKING:
    from ..row_documents import RowDocuments

__all__ = ["Columns", "TokenGather"]


Columns = Sequence[tuple[int, int]] | Callable[["TokenGather", Int64s, int], tuple[Int64s, Int64s]]
"""Which tokens of rows are read: ranges [start, stop) of each row's; or, where they differ from row to row, a function
(gather, (n,) places, width) → ((m,) places, (m,) tokens) of the stretches to read, as many tokens of each row.
"""


class TokenGather:
    """The pieces of some token spaces as one table, their files opened on demand, and the gather over it.

    The table's entries are the spaces' files in order; an entry's pieces (of a whole reader, one) stand together. A
    file that several spaces read is mapped, or open, once (held_files.py). Behind the table come the places of spaces
    that lay out others anew (`TokenSpace.table`): what stands there is looked up, window by window. Remote files are
    copies that are mapped or open, or are not opened at all (remote_pieces.py).

    Args:
        files: gives files that are read in the place of these; they are mapped.
    """

    def __init__(
        self,
        spaces: Sequence[TokenSpace],
        files: "Callable[[Sequence[TokenLayout]], Sequence[TokenLayout]] | None" = None,
    ) -> None:
        given = list({id(space): space for space in spaces}.values())
        self.spaces = given
        self._laid_out = [space for space in given if space.table is not None]
        unique = list({id(space.table or space): space.table or space for space in given}.values())
        self.base: dict[int, int] = {}
        first, place, bounds, tokens, pieces = [], [], [], 0, 0
        for space in unique:
            self.base[id(space)] = tokens
            source, starts = space.pieces.source, space.first_tokens
            cuts = np.searchsorted(source, starts)
            first.append(space.pieces.first[:-1] + tokens)
            place.append(source - np.repeat(starts[:-1], np.diff(cuts)))
            bounds.append(cuts[:-1] + pieces)
            tokens += space.samples_per_pass
            pieces += source.size
        self._table = tokens
        for space in self._laid_out:
            self.base[id(space)] = tokens
            tokens += space.samples_per_pass
        self.first: Int64s = np.concatenate([*first, np.array([self._table], np.int64)])  # (pieces + 1,)
        self.place: Int64s = np.concatenate([*place, np.empty(0, np.int64)])  # (pieces,) of the first token in its file
        self.bounds: Int64s = np.concatenate([*bounds, np.array([pieces], np.int64)])  # (entries + 1,)
        self.files: Sequence[TokenLayout]
        self.files, self.file = numbered_files(
            [space.files for space in unique]
        )  # (entries,) the number of each one's file
        if files is not None:
            self.files = files(self.files)
        entries = [len(space.files) for space in unique]
        limits = [space.vocab_size or MAX_NUMBER for space in unique]
        checked = files is None and min(limits, default=MAX_NUMBER) < MAX_NUMBER
        self.limit = np.repeat(np.array(limits, np.int64), entries) if checked else None  # ids must be below it
        parts = parts_of(self.files)
        itemcode = np.concatenate([np.empty(0, np.int64), *map(itemcodes, parts)])[self.file]
        self.itemcode: Int64s = np.repeat(itemcode, np.diff(self.bounds))  # (pieces,)
        self.address = np.zeros(pieces, np.uint64)  # 0: not mapped
        self.arrays: list[Any] = [None] * self.file.size  # of each entry: tokens, or what gives them when sliced
        reads = np.zeros(len(self.files), np.bool_)  # which files are read by descriptor
        by_descriptor = [files is None and space.origin.io == "pread" for space in unique]
        reads[self.file] = np.repeat(np.array(by_descriptor, np.bool_), entries)
        self.handle = np.where(reads, CLOSED, MAPPED).astype(np.int32)  # (files,)
        self._reading: tuple[np.ndarray, ...] = ()  # what the kernel takes besides, where there are such files
        if reads.any():
            offsets = np.concatenate([integers(part, "offset") for part in parts])
            self._reading = (self.place, np.repeat(self.file, np.diff(self.bounds)), self.handle, offsets)
        self._checks: BlockChecks | None = None
        if any(distinct(part, "verify") - {"size"} for part in parts):
            self._checks = BlockChecks(self, np.repeat(self.file, np.diff(self.bounds)), self.place)
        self._alike: dict[int, Int64s] = {}
        self._kept_ranges: tuple[Any, Int64s, Int64s] | None = None
        self.held = HeldFiles(self, reads, self._checks)
        self._lock = self.held.lock
        self.remote: RemotePieces | None = None
        if any(map(has_remote, parts)):
            by_window = [files is None and space.origin.io == "ranged" for space in unique]
            ranged = np.zeros(len(self.files), np.bool_)
            ranged[self.file] = np.repeat(np.array(by_window, np.bool_), entries)
            self.remote = RemotePieces(self, ranged & [file.remote is not None for file in self.files])

    @property
    def lays_out(self) -> bool:
        """Whether windows of some spaces are looked up, stretch by stretch; there may be padding between these."""
        return bool(self._laid_out)

    @functools.cached_property
    def documents(self) -> "RowDocuments":
        """Where documents begin in these rows."""
        from ..row_documents import RowDocuments

        return RowDocuments(self)

    def rows(
        self,
        starts: Int64s,
        width: int,
        columns: "Columns | None" = None,
        asked: bool = False,
    ) -> Int64s:
        """int64 (n, L): the tokens from each place on, or those of some columns; a negative place gives zeros."""
        places, counts = self.stretches(starts, width, columns)
        if WATCH.reading and not asked:
            self.ask_for(places, counts)
        shown = width
        if columns is not None:
            shown = int(counts[0] * places.size if counts.size == 1 else counts.sum()) // max(1, starts.size)
        out = np.empty((starts.size, shown), np.int64)
        if self.remote is None:
            with self._lock:
                self._fill(places, counts, out.reshape(-1))
        else:
            here, here_counts, windows = self.remote.split(places, counts)
            with self._lock:
                if self.remote.ahead.evicted:
                    self.remote.ahead.evicted = False
                    self.held.drop_evicted(set())
                self._fill(here, here_counts, out.reshape(-1))
            if windows is not None:
                self.remote.fill(windows, out.reshape(-1))
        WATCH.rows_left = left = WATCH.rows_left - starts.size
        if left < 0:
            WATCH.look(starts.size, let_go)
        if self.limit is not None and out.size:
            self._check_ids(out.reshape(-1), places, counts, self.limit)
        return out

    def stretches(self, starts: Int64s, width: int, columns: "Columns | None" = None) -> "tuple[Int64s, Int64s]":
        """What of these rows is read, end to end: ((m,) places in the table, −1: padding, (m,) tokens; (1,): of each).

        Raises ConfigurationError for columns that a row does not have.
        """
        if columns is None:
            counts = self._alike.get(width)
            if counts is None:
                counts = self._alike[width] = np.array([width], np.int64)
            places = starts
        elif callable(columns):
            places, counts = columns(self, starts, width)
        else:
            begins, counts = self._ranges_of(columns, starts.size, width)
            places = starts + begins if begins.size == 1 else (starts[:, None] + begins).reshape(-1)
            if starts.size and starts.min() < 0:
                places[np.repeat(starts < 0, begins.size)] = -1
        if self._laid_out and places.size and places.max() >= self._table:
            _, places, counts = self.spans(places, counts)
        return places, counts

    def _ranges_of(self, columns: "Sequence[tuple[int, int]]", rows: int, width: int) -> "tuple[Int64s, Int64s]":
        """((k,) where ranges of columns begin, their tokens for all rows), kept for the next batch."""
        kept, asked = self._kept_ranges, (tuple(columns), rows, width)
        if kept is None or kept[0] != asked:
            for start, stop in columns:
                if not 0 <= start < stop <= width:
                    raise ConfigurationError(f"columns [{start}, {stop}) are not within a row of {width} tokens")
            begins, stops = np.array(columns, np.int64).reshape(-1, 2).T.copy()
            counts = stops - begins if len(columns) == 1 else np.tile(stops - begins, rows)
            self._kept_ranges = kept = (asked, begins, counts)
        return kept[1], kept[2]

    def spans(self, places: Int64s, counts: "Int64s | int") -> "tuple[Int64s, Int64s, Int64s]":
        """Windows as stretches that follow one another in the table: (n,) windows → (m,) which window each is of,
        ascending, (m,) its place, −1 for padding, (m,) its tokens.
        """
        counts = np.array(np.broadcast_to(np.asarray(counts, np.int64), places.shape))
        found = []
        for space in self._laid_out:
            base, table = self.base[id(space)], self.base[id(space.table)]
            here = (places >= base) & (places < base + space.samples_per_pass)
            if here.all():
                window, place, count = space.spans(places - base, counts)
                place[place >= 0] += table
                return window, place, count
            if (at := np.flatnonzero(here)).size:
                window, place, count = space.spans(places[at] - base, counts[at])
                place[place >= 0] += table
                found.append((at[window], place, count))
        at = np.flatnonzero(places < self._table)
        window, place, count = (
            np.concatenate(parts) for parts in zip(*found, (at, places[at], counts[at]), strict=True)
        )
        order = np.argsort(window, kind="stable")
        return window[order], place[order], count[order]

    def _fill(self, places: Int64s, counts: Int64s, out: Int64s) -> None:
        """With the lock held."""
        gather, compiled = kernel("gather_files" if self._reading else "gather")
        missing = 0
        while missing != -1:
            if self._checks is not None and not self._checks.all_good(places, counts):
                if not self._open_files(places, counts):
                    self._fill_halves(places, counts, out)
                    return
                self._checks.check(places, counts)
            if compiled:
                missing = gather(places, counts, out, self.first, self.address, self.itemcode, *self._reading)
            if not compiled or missing < -1:  # a read failed: here it is named, or goes on after all
                missing = _kernels_numpy.gather(places, counts, out, self.first, self.bounds, self.place, self.arrays)
            if missing >= 0 and not self._open_files(places, counts):
                self._fill_halves(places, counts, out)
                return

    def _fill_halves(self, places: Int64s, counts: Int64s, out: Int64s) -> None:
        """Stretches in more files than may be open at a time."""
        counts = np.array(np.broadcast_to(counts, places.shape))
        half = places.size // 2
        if half:
            halves = [(places[:half], counts[:half]), (places[half:], counts[half:])]
        else:
            begun = counts // 2
            halves = [(places, begun), (places + begun, counts - begun)]
        at = 0
        for place, count in halves:
            self._fill(place, count, out[at : (at := at + int(count.sum()))])

    def ask_for(self, places: Int64s, counts: Int64s) -> None:
        """Asks the kernel to read the pages of these stretches, without waiting for them."""
        with self._lock:
            which, piece = self.pieces(places, counts)
            if not (ready := self._ready(piece)).all():
                if self.remote is None:  # else opening may be fetching, which fetch_ahead.py sees to
                    with contextlib.suppress(TokenFileError):  # it comes when the rows are read
                        self._open_files(places, counts)
                ready = self._ready(piece)
                which, piece = which[ready], piece[ready]
            if self._checks is not None:
                self._checks.ask_for(places, counts)
            stops = places + counts
            begin = np.maximum(self.first[piece], places[which])
            count = np.minimum(self.first[piece + 1], stops[which]) - begin
            size = np.abs(self.itemcode[piece])
            if self._reading:
                place, file, handle, offset = self._reading
                at = file[piece]
                low = offset[at] + (place[piece] + begin - self.first[piece]) * size
                by_descriptor = handle[at] >= 0
                for f, a, n in zip(*(v[by_descriptor].tolist() for v in (at, low, count * size)), strict=True):
                    self.held.opened[f].ask_for(a, n)
                mapped = ~by_descriptor
                piece, begin, count, size = piece[mapped], begin[mapped], count[mapped], size[mapped]
            low = self.address[piece].astype(np.int64) + (begin - self.first[piece]) * size
            high = low + count * size
            low &= -mmap.PAGESIZE
            if low.size == 0:
                return
            order = np.argsort(low, kind="stable")
            low, high = low[order], np.maximum.accumulate(high[order])
            apart = np.flatnonzero(low[1:] > high[:-1]) + 1  # ranges that touch are one
            for a, b in zip(low[np.append(0, apart)].tolist(), high[np.append(apart - 1, -1)].tolist(), strict=True):
                advise(a, b - a, mmap.MADV_WILLNEED)

    def pieces(self, places: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
        """All that these stretches touch: ((m,) indices into places, (m,) pieces)."""
        which = np.flatnonzero((places >= 0) & (counts > 0))
        low = np.searchsorted(self.first, places[which], side="right") - 1
        count = np.searchsorted(self.first, (places + counts)[which], side="left") - low
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(which, count), np.repeat(low, count) + within

    def _ready(self, pieces: Int64s) -> "np.ndarray":
        """bool (n,): which of these pieces' files are mapped or open."""
        ready = self.address[pieces] > 0
        if self._reading:
            ready |= self.handle[self._reading[1][pieces]] >= 0
        return ready

    def _open_files(self, places: Int64s, counts: Int64s) -> bool:
        """Maps or opens every file that these stretches touch; False: they are more than may be open at a time."""
        _, piece = self.pieces(places, counts)
        return self.held.open(set(self.file[self._entries(piece)].tolist()))

    def _entries(self, pieces: Int64s) -> Int64s:
        """(n,) pieces → (n,) the entries that they belong to."""
        return np.searchsorted(self.bounds, pieces, side="right") - 1

    def _check_ids(self, out: Int64s, places: Int64s, counts: Int64s, limit: Int64s) -> None:
        piece = np.maximum(np.searchsorted(self.first, places, side="right") - 1, 0)
        entry = self._entries(piece)
        counts = np.broadcast_to(counts, places.shape)
        wrong = (out < 0) | (out >= np.repeat(limit[entry], counts))
        if wrong.any():
            at = int(np.argmax(wrong))
            i = int(np.searchsorted(np.cumsum(counts), at, side="right"))
            raise TokenIdError(
                f"{self.files[self.file[entry[i]]].path}: token id {out[at]} in the row that begins at "
                f"token {places[i] - self.first[piece[i]] + self.place[piece[i]]} of the file; vocab_size is "
                f"{limit[entry[i]]}"
            )
