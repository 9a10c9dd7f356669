"""What a node of a graph is called where someone has to find it again: in an error, in a stream's state.

    collate_causal_lm
    map                          the second map of the same stretch is map#2
    blend
    ├─ blend.0.permute           a node with several inputs begins a stretch at each of them
    │  blend.0.slice_sequences
    └─ blend.1.permute

A name holds the way from the nearest node above that has several inputs, so what changes beside that way changes no
name on it. A node that several others share has the name of the first way to it.
"""

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ._torch import DataPipe, IterDataPipe, MapDataPipe
from .core import IndexedDataPipe
from .wrapped import kind_of

__all__ = [
    "Way",
    "class_name_of",
    "inputs_of",
    "named_nodes",
    "node_names",
    "verb_of",
    "ways",
    "where_in_frames",
    "where_of",
]

MOST_ITEMS = 10_000  # of one list that inputs are looked for in: longer ones are data


def node_names(datapipe: DataPipe, way: "Way | None" = None) -> dict[int, str]:
    """{id(node): name} of every node of a graph, from its last node down; no two have the same name.

    Nothing is pickled, and each node is looked at once, so that it can be asked where the graph cannot travel.

    Args:
        way: where `datapipe` is only part of a graph, how one comes to it (`ways`): then the names are the graph's.
    """
    return {id(node): name for node, name, _ in _walk(datapipe, way)}


def named_nodes(datapipe: DataPipe) -> "Iterator[tuple[DataPipe, str]]":
    """Every node of a graph with its name, from its last node down."""
    for node, name, _ in _walk(datapipe, None):
        yield node, name


def ways(datapipe: DataPipe) -> "dict[int, Way]":
    """{id(node): how one comes to it} for every node of a graph."""
    return {id(node): way for node, _, way in _walk(datapipe, None, noted=True)}


@dataclass(frozen=True)
class Way:
    """How one comes to a node: the stretch of the graph that it stands in, and the kinds above it there."""

    stretch: str = ""
    above: "tuple[tuple[str, int], ...]" = ()


def _walk(datapipe: DataPipe, start: "Way | None", noted: bool = False) -> "Iterator[tuple[DataPipe, str, Way]]":
    seen: set[int] = set()
    here = start or Way()
    waiting: list[tuple[DataPipe, str, Counter[str]]] = [(datapipe, here.stretch, Counter(dict(here.above)))]
    while waiting:
        node, stretch, kinds = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        way = Way(stretch, tuple(kinds.items())) if noted else here
        kind = functional_name_of(node)
        kinds[kind] += 1
        name = f"{stretch}{kind}" if kinds[kind] == 1 else f"{stretch}{kind}#{kinds[kind]}"
        yield node, name, way
        inputs = inputs_of(node)
        if len(inputs) == 1:
            waiting.append((inputs[0], stretch, kinds))
        else:
            waiting += [(child, f"{name}.{i}.", Counter()) for i, child in reversed([*enumerate(inputs)])]


def inputs_of(node: DataPipe) -> "list[DataPipe]":
    """The nodes that a node reads from, in order: an indexed node's children, of a stream's nodes what stands in
    their attributes, also within lists, tuples, sets and dicts, each once.

    These are the nodes that torch's traverse_dps finds, without the pickling, and without its one way for each of the
    paths to a shared node.
    """
    if isinstance(node, IndexedDataPipe):
        return list(node.children)
    values = list(vars(node).values())  # at once: a thread that iterates the node adds to them
    found = {id(child): child for value in values for child in _datapipes_in(value)}
    found.pop(id(node), None)
    return list(found.values())


def _datapipes_in(value: Any, depth: int = 0) -> Iterator[DataPipe]:
    if isinstance(value, (IterDataPipe, MapDataPipe)):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, Mapping)) and depth < 4 and len(value) <= MOST_ITEMS:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _datapipes_in(item, depth + 1)


def functional_name_of(node: DataPipe) -> str:
    """The verb that makes such a node, or its class in lower case where there is none."""
    return verb_of(node) or class_name_of(node).lower()


def verb_of(node: DataPipe) -> str:
    """The functional name of a node's class, or "" where it has none."""
    kind = kind_of(node)
    if name := vars(kind).get("functional_name") or (
        isinstance(node, IndexedDataPipe) and getattr(kind, "functional_name", "")
    ):
        return str(name)
    for function_of in (IterDataPipe.functions, MapDataPipe.functions):
        for name, function in function_of.items():
            if kind in getattr(function, "args", ()):  # torch registers a partial of the class
                return name
    return ""


def class_name_of(node: DataPipe) -> str:
    """A node's class without the ending that says that it is a datapipe."""
    name = kind_of(node).__name__
    for ending in ("IterDataPipe", "MapDataPipe", "DataPipe"):
        name = name.removesuffix(ending) or name
    return name.strip("_") or "DataPipe"


# Where ----------------------------------------------------------------------------------------------------


def where_of(error: BaseException, names: "Mapping[int, str]") -> str:
    """The innermost node that an exception came through, by its name; "" for none.

    Args:
        names: `node_names` of the graph that ran.
    """
    found, trace = "", error.__traceback__
    while trace is not None:
        found = _node_of(trace.tb_frame, names) or found
        trace = trace.tb_next
    return found


def where_in_frames(frame: "FrameType | None", names: "Mapping[int, str]") -> "tuple[str, str]":
    """(the innermost node in a stack that runs, by its name, or ""; the stack as text, its innermost call last).

    Args:
        frame: the stack's innermost frame, as `sys._current_frames()` gives it.
    """
    text = "" if frame is None else "".join(traceback.format_stack(frame)).rstrip("\n")
    while frame is not None:
        if node := _node_of(frame, names):
            return node, text
        frame = frame.f_back
    return "", text


def _node_of(frame: FrameType, names: "Mapping[int, str]") -> str:
    return names.get(id(frame.f_locals.get("self")), "")
