"""Where an exception can be caught in a graph so that it goes on: again from the same item, or behind it.

A function of each item can be called again, or its item be left out, whatever is below. Other nodes of a stream are
begun anew, so all nodes below have to know their places.
"""

from typing import Any

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.errors import ArgumentTypeError, GraphError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.streaming.shard import COUNTED, nodes_without_state
from ..datapipes.wrapped import AheadWrapper, as_kind, kind_of, wrappers_of
from .around import chosen_nodes, is_function
from .surgery import copied, mapped

__all__ = ["as_exceptions", "check_not_ahead", "failing_nodes", "with_counted"]


def as_exceptions(value: Any) -> "tuple[type[Exception], ...]":
    """Classes of exceptions, one or several. Raises ArgumentTypeError."""
    given = value if isinstance(value, tuple) else (value,)
    if not given or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in given):
        raise ArgumentTypeError(f"exceptions must be a class of exceptions, or a tuple of some, got {value!r:.80}")
    return given


def failing_nodes(datapipe: DataPipe, nodes: "tuple[Any, ...] | None", what: str, topmost: bool) -> "list[DataPipe]":
    """The nodes of a stream that an exception is caught at. Raises GraphError for a chosen one that cannot go on.

    Args:
        topmost: of nodes that go back together, the last one alone (what goes on catches it where it is raised).
    """
    names = node_names(datapipe)
    found: list[DataPipe] = []
    covered: set[int] = set()
    every = nodes is None
    for node in (n for n, _ in named_nodes(datapipe)) if nodes is None else chosen_nodes(datapipe, nodes):
        if is_function(node):
            found.append(node)
        elif isinstance(node, MapDataPipe):
            if topmost:
                found.append(node)
            elif not every:
                raise GraphError(
                    f"no item of {names[id(node)]} can be {what}: it is asked by index, and has to have each"
                )
        elif why := _cannot_go_on(node, names):
            if not every:
                raise GraphError(f"no item of {names[id(node)]} can be {what}: {why}")
        elif not (topmost and every and id(node) in covered):
            found.append(node)
            covered |= {id(below) for below, _ in named_nodes(node)}
    if not found:
        raise GraphError(f"no item of this graph can be {what}: " + _cannot_go_on(datapipe, names))
    return found


def check_not_ahead(node: DataPipe, name: str) -> None:
    """Raises GraphError where something that was put on later takes items ahead, below a node that goes back."""
    names = node_names(node)
    for below, _ in named_nodes(node):
        if below is not node and any(isinstance(w, AheadWrapper) and w.takes_ahead for w in wrappers_of(below)):
            raise GraphError(
                f"{name} goes back where it fails, and {names[id(below)]} below it takes items ahead; "
                f"with nodes= that names {names[id(below)]}, or functions such as maps alone, it would do"
            )


def _cannot_go_on(node: DataPipe, names: "dict[int, str]") -> str:
    """Why a node cannot begin again in the middle; empty: it can."""
    below = {id(n): n for n, _ in named_nodes(node)}
    if any(isinstance(w, AheadWrapper) for n in below.values() for w in wrappers_of(n)):
        return "a thread takes items from below ahead; Prefetch can be put on after this"
    if without := nodes_without_state(node):
        local = {name: key for key, name in node_names(node).items()}
        return f"{names[local[without[0]]]} has no state to go back to; a function, as map's, can be called again"
    return ""


def with_counted(datapipe: DataPipe, chosen: "list[DataPipe]") -> "tuple[DataPipe, list[DataPipe]]":
    """The graph whose nodes of torch's that count items do so by themselves, and the chosen nodes in it."""
    below = {id(n) for node in chosen if not is_function(node) for n, _ in named_nodes(node)}
    now: dict[int, DataPipe] = {}

    def made(node: Any, original: DataPipe) -> DataPipe:
        if id(original) in below and kind_of(node) in COUNTED:
            node = copied(node)
            as_kind(node, COUNTED[kind_of(node)])
        now[id(original)] = node
        return node

    graph = mapped(datapipe, made)
    return graph, chosen if graph is datapipe else [now[id(node)] for node in chosen]
