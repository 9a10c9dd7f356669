"""A look at what flows over an edge, in place."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.wrapped import Wrapper
from .around import as_chosen, gives_items, nodes_with_items, put_around
from .base import Adapter

__all__ = ["Tap", "Trace", "described"]


class TapWrapper(Wrapper):
    """Shows each item to a function."""

    kind = "tap"

    def __init__(self, fn: "Callable[[Any], Any]") -> None:
        self.fn = fn

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        for item in begin():
            self.fn(item)
            yield item

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        found = fetch(numbers)
        for item in found:
            self.fn(item)
        return found

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        found = get(index)
        self.fn(found)
        return found


class Tap(Adapter):
    """Calls a function with each item, which goes on as it is.

    Args:
        fn: what it gives is not used; what it raises ends the iteration. Under workers it runs in them.
        nodes: names, classes or nodes; left out, the last node of the graph.

    Raises GraphError for a node of an indexed graph over which numbers flow and no items.
    """

    keeps_items = True

    def __init__(self, fn: "Callable[[Any], Any]", nodes: Any = None) -> None:
        if not callable(fn):
            raise ArgumentTypeError(f"Tap takes a function, got {fn!r:.80}")
        self.fn, self.nodes = fn, as_chosen(nodes)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return put_around(datapipe, nodes_with_items(datapipe, self.nodes, "tapped"), lambda node: TapWrapper(self.fn))


class Trace(Adapter):
    """Prints what flows over the edges: of each item its node, number, types, shapes.

    Args:
        nodes: as Tap's; left out, all nodes that make items.
        items: how many of each node, in each process that makes some.
        to: what is called with each line; left out, they go to stderr.
    """

    keeps_items = True

    def __init__(self, nodes: Any = None, items: int = 10, to: "Callable[[str], Any] | None" = None) -> None:
        if to is not None and not callable(to):
            raise ArgumentTypeError(f"to must be a function of a line, got {to!r:.80}")
        self.nodes, self.count, self.to = as_chosen(nodes), as_count("items", items), to

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        names = node_names(datapipe)
        if self.nodes is None:
            chosen = [n for n, _ in named_nodes(datapipe) if not isinstance(n, IndexedDataPipe) or gives_items(n)]
        else:
            chosen = nodes_with_items(datapipe, self.nodes, "traced")
        return put_around(
            datapipe, chosen, lambda node: TapWrapper(_Lines(names[id(node)], self.count, self.to or _to_stderr))
        )


class _Lines:
    """Describes the first items of a node."""

    def __init__(self, name: str, count: int, to: "Callable[[str], Any]") -> None:
        self._name, self._count, self._to, self._seen = name, count, to, 0

    def __call__(self, item: Any) -> None:
        if self._seen < self._count:
            self._to(f"{self._name} {self._seen}: {described(item)}")
        self._seen += 1


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def described(item: Any, depth: int = 0) -> str:
    """An item's types, shapes and dtypes, in a line."""
    if isinstance(item, torch.Tensor):
        where = "" if item.device.type == "cpu" else f" on {item.device}"
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}{where}"
    if isinstance(item, np.ndarray):
        return f"{item.dtype} {item.shape}"
    if depth < 3 and isinstance(item, Mapping):
        inside = ", ".join(f"{key}: {described(value, depth + 1)}" for key, value in list(item.items())[:12])
        return f"{{{inside}{', …' if len(item) > 12 else ''}}}"
    if depth < 3 and isinstance(item, (list, tuple)):
        inside = ", ".join(described(value, depth + 1) for value in item[:4])
        more = f", … {len(item)} in all" if len(item) > 4 else ""
        name = type(item).__name__
        return f"[{inside}{more}]" if name == "list" else f"{'' if name == 'tuple' else name}({inside}{more})"
    return f"{item!r:.60}"
