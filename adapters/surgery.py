"""How graphs are looked through and cut.

The graph as nested dicts is torch's `traverse_dps`: {id: (node, {id of input: …})}. Wherever a graph is taken, its last
node will do too, and what is given back is of the same kind.

Nothing here changes what it is given: the nodes above a cut are made anew, those below and beside it are shared. A node
that was made anew still answers to the one it was made from, so several cuts can be named by nodes of the first graph.
"""

import copy
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..datapipes import _torch
from ..datapipes._torch import DataPipe, DataPipeGraph, IterDataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError, GraphError
from ..datapipes.names import inputs_of, node_names
from ..datapipes.wrapped import kind_of

__all__ = [
    "find_dps",
    "insert_after",
    "insert_before",
    "list_dps",
    "map_graph",
    "remove_dp",
    "replace_dp",
    "rewritten",
    "traverse_dps",
]

Graph = TypeVar("Graph", DataPipe, DataPipeGraph)

_MADE_FROM: "dict[int, tuple[weakref.ref[Any], ...]]" = {}
"""{id of a living node made anew: those it was made from, the last one first}; a dataclass has no hash to go by"""


# Looking ------------------------------------------------------------------------------------------------


def traverse_dps(datapipe: DataPipe) -> DataPipeGraph:
    """The graph below a node, as torch gives it. Raises ArgumentTypeError where a node cannot be pickled."""
    try:
        return _torch.traverse_dps(datapipe)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ArgumentTypeError(
            f"the graph that ends in {type(datapipe).__name__} cannot be looked through, which torch does by pickling "
            f"it: {error}; functions and classes at the top of a module would do, or dill for lambdas"
        ) from error


def list_dps(
    graph: "DataPipe | DataPipeGraph", exclude_dps: "DataPipe | Sequence[DataPipe] | None" = None
) -> "list[DataPipe]":
    """All nodes of a graph, breadth first, each once, without those at or below `exclude_dps`."""
    excluded: list[Any] = []
    if exclude_dps is not None:
        excluded = list(exclude_dps) if isinstance(exclude_dps, (list, tuple)) else [exclude_dps]
    seen = {id(node) for root in excluded for node in list_dps(traverse_dps(root))}
    found: list[DataPipe] = []
    level = [graph if isinstance(graph, dict) else traverse_dps(_root(graph))]
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


def find_dps(graph: "DataPipe | DataPipeGraph", dp_type: "type[DataPipe]") -> "list[DataPipe]":
    """All nodes of exactly this type, breadth first, each once."""
    return [node for node in list_dps(graph) if kind_of(node) is dp_type]


# Cutting ------------------------------------------------------------------------------------------------


def replace_dp(graph: Graph, old_datapipe: DataPipe, new_datapipe: DataPipe) -> Graph:
    """The graph with another node in a node's place, for all that read from it. The new one may stand over the old.

    Raises GraphError where the old one is not in the graph.
    """
    root = _root(graph)
    return _like(graph, rewired(root, {id(_found(root, old_datapipe)): _as_node(new_datapipe)}))


def remove_dp(graph: Graph, datapipe: DataPipe) -> Graph:
    """The graph without a node: what read from it reads from its input.

    Raises GraphError where it is not in the graph, or has no input, or several.
    """
    root = _root(graph)
    node = _found(root, datapipe)
    inputs = inputs_of(node)
    if len(inputs) != 1:
        name = node_names(root)[id(node)]
        many = f"{len(inputs)} inputs, of which none can take its place" if inputs else "no input: it is a source"
        raise GraphError(f"{name} cannot be removed: it has {many}; replace_dp puts another node there")
    return _like(graph, rewired(root, {id(node): inputs[0]}))


def insert_after(graph: Graph, datapipe: DataPipe, make: "Callable[[Any], DataPipe]") -> Graph:
    """The graph with `make(node)` between a node and all that read from it. Raises GraphError."""
    root = _root(graph)
    node = _found(root, datapipe)
    return replace_dp(graph, node, make(node))


def insert_before(graph: Graph, datapipe: DataPipe, make: "Callable[[Any], DataPipe]") -> Graph:
    """The graph with `make(input)` between a node and each of its inputs. Raises GraphError for a source."""
    root = _root(graph)
    node = _found(root, datapipe)
    inputs = inputs_of(node)
    if not inputs:
        raise GraphError(f"nothing can stand before {node_names(root)[id(node)]}: it has no input")
    each = {id(child): child for child in inputs}  # once, where the node reads from one twice
    made = {key: _as_node(make(child)) for key, child in each.items()}
    return _like(graph, rewired(root, {id(node): _over(node, made)}))


def map_graph(graph: Graph, function: "Callable[[DataPipe], DataPipe | None]") -> Graph:
    """The graph with each node as `function(node)` gives it, from the sources up; None: as it is.

    The function sees each node once, over its new inputs, and may change nothing of it: it gives a copy, or a node
    that stands over it.
    """
    root = _root(graph)
    names = node_names(root)

    def made(node: DataPipe, original: DataPipe) -> "DataPipe | None":
        found = function(node)
        if found is not None and not isinstance(found, (IterDataPipe, MapDataPipe)):
            raise ArgumentTypeError(f"for {names[id(original)]} the function gave no datapipe but {found!r:.80}")
        return found

    return _like(graph, mapped(root, made))


def mapped(datapipe: DataPipe, function: "Callable[[Any, Any], DataPipe | None]") -> DataPipe:
    """What `map_graph` does, of `function(node over its new inputs, the node as it was)`."""
    done: dict[int, DataPipe] = {}
    changed = False
    for node in _sources_first(datapipe):
        over = _over(node, done)
        if over is node and _is_dealer(node):  # it counts its children's iterations: copies of them want their own
            over = copied(node)
        made = function(over, node)
        changed |= made is not None and made is not over
        done[id(node)] = over if made is None else made
    return done[id(datapipe)] if changed else datapipe


def rewritten(graph: IndexedDataPipe, change: "dict[int, IndexedDataPipe]") -> IndexedDataPipe:
    """An indexed graph with nodes (by id) replaced, every reference to one. The given graph is unchanged."""
    made = rewired(graph, change)
    assert isinstance(made, IndexedDataPipe)
    return made


def rewired(datapipe: DataPipe, change: "dict[int, Any]") -> DataPipe:
    """A graph with nodes (by id) replaced, every reference to one; what stands in a node's place is taken as it is."""
    done: dict[int, DataPipe] = dict(change)
    for node in _sources_first(datapipe, stop=change.keys()):
        if id(node) not in done:
            done[id(node)] = _over(node, done)
    return done[id(datapipe)]


def copied(node: DataPipe) -> DataPipe:
    """A node of its own over the same inputs. Raises ArgumentTypeError where it cannot be copied."""
    if isinstance(node, IndexedDataPipe):
        return made_from(node.changed(), node)
    return _copied(node, {id(child): child for child in inputs_of(node)})


def is_made_from(node: DataPipe, original: DataPipe) -> bool:
    """Whether a node is `original`, or was made from it by cuts."""
    return node is original or any(reference() is original for reference in _MADE_FROM.get(id(node), ()))


def same_graph(datapipe: DataPipe, other: "DataPipe | None") -> bool:
    """Whether one of two graphs was made from the other by cuts, or is it."""
    return other is not None and (is_made_from(datapipe, other) or is_made_from(other, datapipe))


def _sources_first(datapipe: DataPipe, stop: Any = ()) -> "list[DataPipe]":
    """Every node once, after all its inputs; what only nodes in `stop` (ids) read from is left out."""
    order: list[DataPipe] = []
    state: dict[int, int] = {}  # 1: its inputs are being looked at, 2: done
    waiting = [datapipe]
    while waiting:
        node = waiting[-1]
        if state.get(id(node)) is None and id(node) not in stop:
            state[id(node)] = 1
            for child in reversed(inputs_of(node)):
                if state.get(id(child)) == 1:
                    raise GraphError(f"{type(child).__name__} reads from itself, by way of {type(node).__name__}")
                if state.get(id(child)) is None:
                    waiting.append(child)
            continue
        waiting.pop()
        if state.get(id(node)) != 2:
            state[id(node)] = 2
            order.append(node)
    return order


def _over(node: DataPipe, done: "dict[int, DataPipe]") -> DataPipe:
    """The node over what its inputs have become; the node itself where none has changed."""
    inputs = inputs_of(node)
    if all(done.get(id(child), child) is child for child in inputs):
        return node
    if isinstance(node, IndexedDataPipe):
        children: list[Any] = [done.get(id(child), child) for child in inputs]
        return made_from(node.with_children(*children), node)
    return _copied(node, {id(child): done.get(id(child), child) for child in inputs})


def _copied(node: DataPipe, inputs: "dict[int, DataPipe]") -> DataPipe:
    """A copy of a stream's node over other inputs: where a deep copy comes to one, it takes what is there instead."""
    for child in inputs_of(node):
        if _is_dealer(child) != _is_dealer(new := inputs[id(child)]):
            raise GraphError(
                f"{type(node).__name__} cannot read from {type(new).__name__} in place of {type(child).__name__}: "
                "nothing stands between a fork or demux and its children, nor does another node read from it; put it "
                "below the one or above the others"
            )
    try:
        made = copy.deepcopy(node, dict(inputs))
    except Exception as error:
        raise ArgumentTypeError(
            f"{type(node).__name__} cannot be copied ({type(error).__name__}: {error}), so nothing can be put "
            "around or below it; a node that opens its files in __iter__ can"
        ) from error
    return made_from(made, node)


def _is_dealer(node: DataPipe) -> bool:
    """Whether only torch's children of a fork or demux can read from it."""
    return callable(getattr(type(node), "get_next_element_by_instance", None))


def made_from(made: DataPipe, node: DataPipe) -> DataPipe:
    """The node that was made, which from now on answers to the one it was made from."""
    if made is not node:
        if id(made) not in _MADE_FROM:
            weakref.finalize(made, _MADE_FROM.pop, id(made), None).atexit = False
        _MADE_FROM[id(made)] = (weakref.ref(node), *_MADE_FROM.get(id(node), ()))
    return made


def _root(graph: Any) -> DataPipe:
    if isinstance(graph, (IterDataPipe, MapDataPipe)):
        return graph
    if isinstance(graph, dict) and len(graph) == 1:
        ((node, _),) = graph.values()
        return node
    raise ArgumentTypeError(f"a graph is its last node, or what traverse_dps gives of that, got {type(graph).__name__}")


def _as_node(made: Any) -> DataPipe:
    if not isinstance(made, (IterDataPipe, MapDataPipe)):
        raise ArgumentTypeError(f"a datapipe takes a datapipe's place, got {made!r:.80}")
    return made


def _like(graph: Any, root: DataPipe) -> Any:
    return root if isinstance(graph, (IterDataPipe, MapDataPipe)) else traverse_dps(root)


def _found(root: DataPipe, datapipe: Any) -> DataPipe:
    for node in _sources_first(root):
        if is_made_from(node, datapipe):
            return node
    known = ", ".join(list(node_names(root).values())[:20])
    raise GraphError(f"{type(datapipe).__name__} is not in this graph, which has {known}")
