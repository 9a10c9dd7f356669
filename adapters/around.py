"""Which nodes an adapter is for, and how it puts something around them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data.datapipes.iter import Filter, Mapper

from ..datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError, GraphError
from ..datapipes.fetch.routes import makes_items
from ..datapipes.names import functional_name_of, inputs_of, named_nodes, node_names
from ..datapipes.slice import TokenWindows
from ..datapipes.wrapped import Wrapper, with_wrapper, without_wrapper, wrappers_of
from .surgery import copied, is_made_from, map_graph, mapped

__all__ = [
    "as_chosen",
    "chosen_nodes",
    "gives_items",
    "is_function",
    "nodes_with_items",
    "put_around",
    "taken_off",
]


def as_chosen(nodes: Any) -> "tuple[Any, ...] | None":
    """The argument `nodes` of an adapter. Raises ArgumentTypeError."""
    if nodes is None:
        return None
    given = tuple(nodes) if isinstance(nodes, (list, tuple)) else (nodes,)
    for node in given:
        if not isinstance(node, (str, type, IterDataPipe, MapDataPipe)):
            raise ArgumentTypeError(f"nodes are chosen by name, by class or themselves, got {node!r:.80}")
    return given


def chosen_nodes(datapipe: DataPipe, nodes: "Iterable[Any]") -> "list[DataPipe]":
    """The nodes of a graph that are meant, from its last node down.

    Args:
        nodes: names ("blend.0.permute", or "permute" for all of them), classes, or nodes.

    Raises GraphError for one that is not in the graph.
    """
    known = list(named_nodes(datapipe))
    found: dict[int, DataPipe] = {}
    for wanted in nodes:
        matching = [node for node, name in known if _meant(node, name, wanted)]
        if not matching:
            what = repr(wanted) if isinstance(wanted, str) else getattr(wanted, "__name__", type(wanted).__name__)
            names = [name for _, name in known]
            more = f", … {len(names)} in all" if len(names) > 20 else ""
            raise GraphError(f"there is no node {what} in this graph; its nodes are {', '.join(names[:20])}{more}")
        found |= {id(node): node for node in matching}
    return [node for node, _ in known if id(node) in found]


def _meant(node: DataPipe, name: str, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return wanted in (name, functional_name_of(node))
    return isinstance(node, wanted) if isinstance(wanted, type) else is_made_from(node, wanted)


def _makers_above(datapipe: DataPipe, node: DataPipe) -> "list[DataPipe]":
    """Where the items that a node of an indexed graph re-orders are first made: itself, if it makes items."""
    if not isinstance(node, IndexedDataPipe) or gives_items(node):
        return [node]
    above = [parent for parent, _ in named_nodes(datapipe) if any(child is node for child in inputs_of(parent))]
    found = {id(maker): maker for parent in above for maker in _makers_above(datapipe, parent)}
    return list(found.values()) or [node]  # the last node of the graph is asked for items, whatever it does


def gives_items(node: IndexedDataPipe) -> bool:
    """Whether a node makes items, rather than re-ordering its inputs' or naming windows that one gather copies."""
    return makes_items(node) and not isinstance(node, TokenWindows)


def nodes_with_items(datapipe: DataPipe, nodes: "tuple[Any, ...] | None", what: str) -> "list[DataPipe]":
    """The nodes that are meant, each of which gives items. Raises GraphError; `what` is for its message."""
    if nodes is None:
        return [datapipe]
    names = node_names(datapipe)
    for node in (chosen := chosen_nodes(datapipe, nodes)):
        makers = _makers_above(datapipe, node)
        if makers != [node]:
            raise GraphError(
                f"{names[id(node)]} only re-orders numbers, so no item of it can be {what}; items are first made by "
                + ", ".join(names[id(maker)] for maker in makers)
            )
    return chosen


def is_function(node: DataPipe) -> bool:
    """Whether a stream's node is a function of each of its items."""
    return isinstance(node, (Mapper, Filter))


def put_around(
    datapipe: DataPipe,
    nodes: "Iterable[DataPipe]",
    make: "Callable[[DataPipe], Wrapper]",
    innermost: bool = False,
) -> DataPipe:
    """The graph with `make(node)` around each of some nodes; everything else is as it was."""
    wrappers = {id(node): make(node) for node in nodes}

    def around(node: DataPipe, original: DataPipe) -> "DataPipe | None":
        wrapper = wrappers.get(id(original))
        return None if wrapper is None else with_wrapper(copied(node), wrapper, innermost)

    return mapped(datapipe, around)


def taken_off(datapipe: DataPipe, unwanted: "Callable[[Wrapper], bool]") -> DataPipe:
    """The graph without the wrappers of which `unwanted` is true."""

    def without(node: DataPipe) -> "DataPipe | None":
        return without_wrapper(copied(node), unwanted) if any(map(unwanted, wrappers_of(node))) else None

    return map_graph(datapipe, without)
