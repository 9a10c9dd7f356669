"""From numbers to items: route down to the nodes that make items, then one gather for all rows.

Where all of those nodes are windows of tokens, every row of a batch, from whatever source and file, is
copied by a single call into compiled code. Else (a mapped sample, zipped graphs, collated batches)
each node makes its own items, and they are put back in order.
"""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .core import MAX_NUMBER, IndexedDataPipe, Int64s
from .errors import ConfigurationError, TokenFileError, TokenIdError
from .filemap import FileMap, advise
from .kernels import kernel
from .pages import WATCH
from .read import TokenSpace
from .slice import TokenWindows

__all__ = ["Routes", "TokenGather", "fetch_items", "plan_of"]


MOST_MAPS = 32_768
"""Maps of one process; Linux allows 65,530 by default."""

_GATHERS: "weakref.WeakSet[TokenGather]" = weakref.WeakSet()
_REGISTERING = threading.Lock()  # a set that grows while another thread walks it raises


def all_gathers() -> "list[TokenGather]":
    """Every gather of this process."""
    with _REGISTERING:
        return list(_GATHERS)


class TokenGather:
    """The pieces of some token spaces as one table, their files mapped on demand, and the gather over it.

    The table's entries are the spaces' files in order; an entry's pieces (of a whole reader, one) stand together. A
    file that several spaces read is mapped once. Maps hold no file descriptors; beyond MOST_MAPS of all gathers they
    are dropped again, oldest first.
    """

    def __init__(self, spaces: Sequence[TokenSpace]) -> None:
        unique = list({id(space): space for space in spaces}.values())
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
        self.first: Int64s = np.concatenate([*first, np.array([tokens], np.int64)])  # (pieces + 1,)
        self.place: Int64s = np.concatenate([*place, np.empty(0, np.int64)])  # (pieces,) of the first token in its file
        self.bounds: Int64s = np.concatenate([*bounds, np.array([pieces], np.int64)])  # (entries + 1,)
        layouts = [file for space in unique for file in space.files]
        self.files = list({id(file): file for file in layouts}.values())
        number = {id(file): f for f, file in enumerate(self.files)}
        self.file: Int64s = np.array([number[id(file)] for file in layouts], np.int64)  # (entries,)
        self._by_file: Int64s = np.argsort(self.file, kind="stable")
        self._cuts: Int64s = np.searchsorted(self.file[self._by_file], np.arange(len(self.files) + 1))
        limits = [space.vocab_size or MAX_NUMBER for space in unique for _ in space.files]
        checked = min(limits, default=MAX_NUMBER) < MAX_NUMBER
        self.limit = np.array(limits, np.int64) if checked else None  # ids must be below it
        itemcode = np.array([file.itemcode for file in layouts], np.int64)
        self.itemcode: Int64s = np.repeat(itemcode, np.diff(self.bounds))  # (pieces,)
        self.address = np.zeros(pieces, np.uint64)  # 0: not mapped
        self.arrays: list[np.ndarray | None] = [None] * len(layouts)
        self._open: dict[int, FileMap] = {}
        self._turn = (0, 0)  # which map, and from which of its bytes on, is let go of next
        with _REGISTERING:
            _GATHERS.add(self)
        self._lock = threading.Lock()  # a map may not be dropped while another thread copies from it

    def rows(
        self,
        starts: Int64s,
        width: int,
        columns: "Sequence[tuple[int, int]] | None" = None,
        asked: bool = False,
    ) -> Int64s:
        """int64 (n, width): the tokens from each place on; a negative place gives a row of zeros."""
        if WATCH.reading and not asked:
            self.ask_for(starts, width)
        if columns is None:
            out = np.empty((starts.size, width), np.int64)
            self._fill(starts, width, out, 0)
        else:
            for start, stop in columns:
                if not 0 <= start < stop <= width:
                    raise ConfigurationError(f"columns [{start}, {stop}) are not within a row of {width} tokens")
            out = np.empty((starts.size, sum(stop - start for start, stop in columns)), np.int64)
            at = 0
            for start, stop in columns:
                self._fill(np.where(starts < 0, -1, starts + start), stop - start, out, at)
                at += stop - start
        WATCH.rows_left = left = WATCH.rows_left - starts.size
        if left < 0:
            WATCH.look(starts.size, let_go)
        if self.limit is not None and out.size:
            self._check_ids(out, starts, self.limit)
        return out

    def _fill(self, starts: Int64s, width: int, out: Int64s, column: int) -> None:
        gather, compiled = kernel("gather")
        with self._lock:
            while True:
                if compiled:
                    missing = gather(starts, width, out, column, self.first, self.address, self.itemcode)
                else:
                    missing = gather(starts, width, out, column, self.first, self.bounds, self.place, self.arrays)
                if missing < 0:
                    return
                self._map(starts, width)

    def ask_for(self, starts: Int64s, width: int) -> None:
        """Asks the kernel to read the pages of these rows, without waiting for them."""
        with self._lock:
            row, piece = self._pieces(starts, width)
            if not self.address[piece].all():
                with contextlib.suppress(TokenFileError):  # it comes when the rows are read
                    self._map(starts, width)
                mapped = self.address[piece] > 0
                row, piece = row[mapped], piece[mapped]
            begin = np.maximum(self.first[piece], starts[row])
            count = np.minimum(self.first[piece + 1], starts[row] + width) - begin
            size = np.abs(self.itemcode[piece])
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

    def let_go(self, share: float) -> None:
        """Gives back the resident pages of this share of all that is mapped, the next in turn."""
        if not self._lock.acquire(blocking=False):  # somebody copies from the maps just now
            return
        try:
            views = list(self._open.values())
            if not views:  # a gather of which no row was read yet
                return
            left = -int(-share * sum(view.size for view in views) // mmap.PAGESIZE) * mmap.PAGESIZE
            for _ in range(len(views) + 1):
                which, begin = self._turn
                which %= len(views)
                count = max(0, min(left, views[which].size - begin))
                views[which].let_go(begin, count)
                left -= count
                self._turn = (which, begin + count) if begin + count < views[which].size else (which + 1, 0)
        finally:
            self._lock.release()

    def _pieces(self, starts: Int64s, width: int) -> tuple[Int64s, Int64s]:
        """All that these rows touch: ((m,) indices into starts, (m,) pieces)."""
        row = np.flatnonzero(starts >= 0)
        low = np.searchsorted(self.first, starts[row], side="right") - 1
        count = np.searchsorted(self.first, starts[row] + width, side="left") - low
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(row, count), np.repeat(low, count) + within

    def _map(self, starts: Int64s, width: int) -> None:
        """Maps every file that these rows touch."""
        _, piece = self._pieces(starts, width)
        needed = set(self.file[self._entries(piece)].tolist())
        for f in sorted(needed - self._open.keys()):
            file = self.files[f]
            view = FileMap(file.local, file.size)
            self._open[f] = view
            array = view.array(file.dtype, file.offset, file.tokens)
            for entry in self._by_file[self._cuts[f] : self._cuts[f + 1]].tolist():
                pieces = slice(self.bounds[entry], self.bounds[entry + 1])
                bytes_before = self.place[pieces] * file.dtype.itemsize + (view.address + file.offset)
                self.address[pieces] = bytes_before.astype(np.uint64)
                self.arrays[entry] = array
        over = sum(len(gather._open) for gather in all_gathers()) - MOST_MAPS
        over -= self._drop(over, needed)
        for other in [gather for gather in all_gathers() if gather is not self]:
            if over > 0 and other._lock.acquire(blocking=False):  # one that copies just now keeps its maps
                try:
                    over -= other._drop(over, set())
                finally:
                    other._lock.release()

    def _drop(self, most: int, needed: "set[int]") -> int:
        """Unmaps up to so many files that are not needed, oldest first; gives how many."""
        dropped = [f for f in self._open if f not in needed][: max(0, most)]
        for f in dropped:
            for entry in self._by_file[self._cuts[f] : self._cuts[f + 1]].tolist():
                self.address[self.bounds[entry] : self.bounds[entry + 1]] = 0
                self.arrays[entry] = None
            self._open.pop(f).close()
        return len(dropped)

    def _entries(self, pieces: Int64s) -> Int64s:
        """(n,) pieces → (n,) the entries that they belong to."""
        return np.searchsorted(self.bounds, pieces, side="right") - 1

    def _check_ids(self, out: Int64s, starts: Int64s, limit: Int64s) -> None:
        piece = np.maximum(np.searchsorted(self.first, starts, side="right") - 1, 0)
        entry = self._entries(piece)
        wrong = (out < 0) | (out >= limit[entry][:, None])
        if wrong.any():
            row, column = (int(i[0]) for i in np.nonzero(wrong))
            raise TokenIdError(
                f"{self.files[self.file[entry[row]]].path}: token id {out[row, column]} in the row that begins at "
                f"token {starts[row] - self.first[piece[row]] + self.place[piece[row]]} of the file; vocab_size is "
                f"{limit[entry[row]]}"
            )


def let_go(share: float) -> None:
    """Gives back the resident pages of this share of what all gathers of this process have mapped."""
    for gather in all_gathers():
        gather.let_go(share)


class Routes:
    """How numbers of a node reach the nodes that make its items (its leaves)."""

    def __init__(self, node: IndexedDataPipe) -> None:
        self.leaves: list[IndexedDataPipe] = []
        self._root = self._grow(node)
        windows = all(isinstance(leaf, TokenWindows) for leaf in self.leaves)
        self.gather: TokenGather | None = None
        if windows and len({leaf.sequence_length for leaf in self.leaves}) == 1:
            self.width = self.leaves[0].sequence_length + 1
            self.gather = TokenGather([leaf.reader for leaf in self.leaves if leaf.children])  # not of gone sources

    def _grow(self, node: IndexedDataPipe) -> Any:
        if makes_items(node):
            self.leaves.append(node)
            return len(self.leaves) - 1
        return node, [self._grow(child) for child in node.children]

    def resolve(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) numbers → ((n,) leaves, (n,) the leaves' numbers)."""
        return self._resolve(self._root, numbers)

    def _resolve(self, branch: Any, numbers: Int64s) -> tuple[Int64s, Int64s]:
        if isinstance(branch, int):
            return np.full(numbers.size, branch, np.int64), numbers
        node, branches = branch
        source, number = node.route(numbers)
        if len(branches) == 1:
            return self._resolve(branches[0], number)
        leaf, out = np.empty(numbers.size, np.int64), np.empty(numbers.size, np.int64)
        order = np.argsort(source, kind="stable")
        cuts = np.searchsorted(source[order], np.arange(len(branches) + 1))
        for s in np.flatnonzero(np.diff(cuts)):
            at = order[cuts[s] : cuts[s + 1]]
            leaf[at], out[at] = self._resolve(branches[s], number[at])
        return leaf, out

    def starts(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) numbers → ((n,) leaves, (n,) places of their first tokens in the gather's table)."""
        if self.gather is None:
            raise ConfigurationError("this graph's items are not windows of tokens of one length")
        leaf, number = self.resolve(numbers)
        places = np.empty(numbers.size, np.int64)  # not in `number`: that may be the caller's own array
        for index, node in enumerate(self.leaves):
            at = slice(None) if len(self.leaves) == 1 else np.flatnonzero(leaf == index)
            if number[at].size:
                places[at] = node.starts(number[at]) + self.gather.base[id(node.reader)]
        return leaf, places


def makes_items(node: IndexedDataPipe) -> bool:
    """Whether a node makes its items itself, rather than routing to its children's."""
    return type(node).fetch is not IndexedDataPipe.fetch or isinstance(node, TokenWindows)


def plan_of(node: IndexedDataPipe) -> Routes:
    """The node's routes, worked out once a process."""
    if node._plan.value is None:
        node._plan.value = Routes(node)
    return node._plan.value


def fetch_items(node: IndexedDataPipe, numbers: Int64s, columns: "Sequence[tuple[int, int]] | None" = None) -> Any:
    """What `IndexedDataPipe.fetch` does for all nodes that re-order and all windows of tokens."""
    plan = plan_of(node)
    if plan.gather is not None:
        return plan.gather.rows(plan.starts(numbers)[1], plan.width, columns)
    leaf, number = plan.resolve(numbers)
    items: list[Any] = [None] * numbers.size
    for index, maker in enumerate(plan.leaves):
        at = np.flatnonzero(leaf == index)
        if at.size:
            made = maker.fetch(number[at], columns)
            for place, item in zip(at.tolist(), made, strict=True):
                items[place] = item
    return stacked(items)


def stacked(items: "list[Any]") -> Any:
    """Rows of one shape and integer dtype as one array (n, …); anything else as the list it is."""
    if items and all(isinstance(item, np.ndarray) for item in items):
        head = items[0]
        if all(item.shape == head.shape and item.dtype == head.dtype for item in items):
            return np.stack(items)
    return items
