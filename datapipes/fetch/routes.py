"""From numbers to the nodes that make items: every batch's numbers are routed down to them, and back up come its items.

Where all of them are windows of tokens, every row of a batch, from whatever source and file, is copied by a single call
into compiled code (gather.py). Else (a mapped sample, zipped graphs, collated batches) each node makes its own items,
and they are put back in order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import IndexedDataPipe, Int64s
from ..errors import ConfigurationError
from ..slice import TokenWindows
from .gather import TokenGather

__all__ = ["Routes", "fetch_items", "makes_items", "plan_of", "stacked"]


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
