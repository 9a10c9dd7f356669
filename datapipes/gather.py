"""From numbers to items: route down to the nodes that make items, then one gather for all rows.

Where all of those nodes are windows of tokens, every row of a batch, from whatever source and file, is
copied by a single call into compiled code. Else (a mapped sample, zipped graphs, collated batches)
each node makes its own items, and they are put back in order.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from .core import MAX_NUMBER, IndexedDataPipe, Int64s
from .errors import ConfigurationError, TokenIdError
from .filemap import FileMap
from .kernels import kernel
from .read import TokenReader
from .slice import TokenWindows

__all__ = ["Routes", "TokenGather", "fetch_items", "plan_of"]


MOST_MAPS = 32_768
"""Maps of one process; Linux allows 65,530 by default."""

_GATHERS: "weakref.WeakSet[TokenGather]" = weakref.WeakSet()


class TokenGather:
    """The files of some readers as one table, mapped on demand, and the gather over it.

    Maps hold no file descriptors; beyond MOST_MAPS of all gathers they are dropped again, oldest first.
    """

    def __init__(self, readers: Sequence[TokenReader]) -> None:
        unique = list({id(reader): reader for reader in readers}.values())
        self.base: dict[int, int] = {}
        self.files = [file for reader in unique for file in reader.files]
        tokens = 0
        for reader in unique:
            self.base[id(reader)] = tokens
            tokens += reader.samples_per_pass
        limits = [reader.vocab_size or MAX_NUMBER for reader in unique for _ in reader.files]
        self.limit = (
            np.array(limits, np.int64) if min(limits, default=MAX_NUMBER) < MAX_NUMBER else None
        )  # ids must be below it
        self.first: Int64s = np.cumsum([0, *(file.tokens for file in self.files)], dtype=np.int64)
        self.itemcode = np.array([file.itemcode for file in self.files], np.int64)
        self.address = np.zeros(len(self.files), np.uint64)
        self.arrays: list[np.ndarray | None] = [None] * len(self.files)
        self._open: dict[int, FileMap] = {}
        _GATHERS.add(self)
        self._lock = threading.Lock()  # a map may not be dropped while another thread copies from it

    def rows(self, starts: Int64s, width: int, columns: "Sequence[tuple[int, int]] | None" = None) -> Int64s:
        """int64 (n, width): the tokens from each place on; a negative place gives a row of zeros."""
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
                    missing = gather(starts, width, out, column, self.first, self.arrays)
                if missing < 0:
                    return
                self._map(starts, width)

    def _map(self, starts: Int64s, width: int) -> None:
        """Maps every file that these rows touch."""
        starts = starts[starts >= 0]
        low = np.searchsorted(self.first, starts, side="right") - 1
        high = np.searchsorted(self.first, starts + width, side="left")
        needed = {f for a, b in zip(low.tolist(), high.tolist(), strict=True) for f in range(a, b)}
        for f in sorted(needed - self._open.keys()):
            file = self.files[f]
            view = FileMap(file.local, file.size)
            self._open[f] = view
            self.address[f] = view.address + file.offset
            self.arrays[f] = view.array(file.dtype, file.offset, file.tokens)
        over = sum(len(gather._open) for gather in list(_GATHERS)) - MOST_MAPS
        over -= self._drop(over, needed)
        for other in [gather for gather in list(_GATHERS) if gather is not self]:
            if over > 0 and other._lock.acquire(blocking=False):  # one that copies just now keeps its maps
                try:
                    over -= other._drop(over, set())
                finally:
                    other._lock.release()

    def _drop(self, most: int, needed: "set[int]") -> int:
        """Unmaps up to so many files that are not needed, oldest first; gives how many."""
        dropped = [f for f in self._open if f not in needed][: max(0, most)]
        for f in dropped:
            self.address[f], self.arrays[f] = 0, None
            self._open.pop(f).close()
        return len(dropped)

    def _check_ids(self, out: Int64s, starts: Int64s, limit: Int64s) -> None:
        file = np.maximum(np.searchsorted(self.first, starts, side="right") - 1, 0)
        wrong = (out < 0) | (out >= limit[file][:, None])
        if wrong.any():
            row, column = (int(i[0]) for i in np.nonzero(wrong))
            raise TokenIdError(
                f"{self.files[file[row]].path}: token id {out[row, column]} in the row that begins at token "
                f"{starts[row] - self.first[file[row]]} of the file; vocab_size is {limit[file[row]]}"
            )


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
