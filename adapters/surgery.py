"""How graphs are looked through and cut.

The graph as nested dicts is torch's `traverse_dps`: {id: (node, {id of input: …})}.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from ..datapipes import _torch
from ..datapipes._torch import DataPipe, DataPipeGraph
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError

__all__ = ["find_dps", "list_dps", "rewritten", "traverse_dps"]


def traverse_dps(datapipe: DataPipe) -> DataPipeGraph:
    """The graph below a node, as torch gives it. Raises ArgumentTypeError where a node cannot be pickled."""
    try:
        return _torch.traverse_dps(datapipe)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ArgumentTypeError(
            f"the graph that ends in {type(datapipe).__name__} cannot be looked through, which torch does by pickling "
            f"it: {error}; functions and classes at the top of a module would do, or dill for lambdas"
        ) from error


def list_dps(graph: DataPipeGraph, exclude_dps: "DataPipe | Sequence[DataPipe] | None" = None) -> "list[DataPipe]":
    """All nodes of a graph, breadth first, each once, without those at or below `exclude_dps`."""
    excluded: list[Any] = []
    if exclude_dps is not None:
        excluded = list(exclude_dps) if isinstance(exclude_dps, (list, tuple)) else [exclude_dps]
    seen = {id(node) for root in excluded for node in list_dps(traverse_dps(root))}
    found: list[DataPipe] = []
    level = [graph]
    while level:
        below = []
        for part in level:
            for key, (node, inputs) in part.items():
                if key not in seen:
                    seen.add(key)
                    found.append(node)
                    below.append(inputs)
        level = below
    return found


def find_dps(graph: DataPipeGraph, dp_type: "type[DataPipe]") -> "list[DataPipe]":
    """All nodes of exactly this type, breadth first, each once."""
    return [node for node in list_dps(graph) if type(node) is dp_type]


def rewritten(graph: IndexedDataPipe, change: "dict[int, IndexedDataPipe]") -> IndexedDataPipe:
    """An indexed graph with nodes (by id) replaced, every reference to one. The given graph is unchanged."""
    done = dict(change)

    def walk(node: IndexedDataPipe) -> IndexedDataPipe:
        if id(node) not in done:
            children = [walk(child) for child in node.children]
            same = all(a is b for a, b in zip(children, node.children, strict=True))
            done[id(node)] = node if same else node.with_children(*children)
        return done[id(node)]

    return walk(graph)
