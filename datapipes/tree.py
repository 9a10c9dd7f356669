"""A graph as text, a node a line, from the batches down to the files; what is said of a node there is drawn, too."""

import enum
import inspect
import json
import numbers
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._torch import DataPipe, IterDataPipe, MapDataPipe
from .core import IndexedDataPipe
from .errors import ArgumentTypeError
from .names import class_name_of, inputs_of, node_names, verb_of
from .streaming.base import StreamingDataPipe
from .wrapped import kind_of, wrappers_of

__all__ = ["MOST_CHILDREN", "About", "Branch", "about", "branches_of", "check_graph", "printable", "tree"]

LONGEST = 64  # characters of settings shown
MOST_CHILDREN = 20  # branches shown of one node, and the last


class About(NamedTuple):
    """What is said of a node; nothing in it is more than a line, nor moves a cursor."""

    kind: str
    """Its functional name, or its class where it has none."""
    settings: str
    notes: str
    """Counts, files."""
    labels: tuple[str, ...]
    """What adapters put around it, the innermost first."""


class Branch(NamedTuple):
    """An input of a node."""

    node: DataPipe
    name: str
    """What a blend calls it, or ""."""
    share: "float | None"
    """Its stored share of a blend, in [0, 1]."""


def tree(graph: DataPipe) -> str:
    """The graph as text, a node a line, from the batches down to the files: settings, shares, counts, and in brackets
    what adapters put around a node.

    Indexed graphs, streams, torch's own datapipes and anyone's. What several nodes read from is shown once.
    Raises ArgumentTypeError for what is no datapipe.

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> a, b = IterableWrapper(range(10)).batch(2).fork(2)
    >>> print(tree(a.map(len).zip(b)))
    zip()
    ├─ map(fn=len)
    │  Child(instance_id=0)
    │  Forker(num_instances=2)
    │  batch(batch_size=2)
    │  IterableWrapper()        10 items
    └─ Child(instance_id=1)
       Forker(num_instances=2)  shown above: zip.0.forker
    """
    names = node_names(check_graph(graph))
    lines: list[tuple[str, str]] = []
    shown: set[int] = set()
    waiting: list[tuple[DataPipe | None, str, str, str]] = [(graph, "", "", "")]
    while waiting:
        node, first, rest, label = waiting.pop()
        if node is None:
            lines.append((first + label, ""))
            continue
        kind, settings, notes, labels = about(node)
        title = "".join((first, label, f"{kind}({settings})", *(f" [{text}]" for text in labels)))
        if id(node) in shown:
            lines.append((title, f"shown above: {printable(names[id(node)])}"))
            continue
        shown.add(id(node))
        lines.append((title, notes))
        waiting += reversed([*_below(node, rest)])
    width = max((len(left) for left, note in lines if note), default=0)
    return "\n".join(f"{left:<{width}}  {note}" if note else left for left, note in lines)


def _below(node: DataPipe, rest: str) -> "Iterator[tuple[DataPipe | None, str, str, str]]":
    """What comes under a node's line: (node or None, beginning of its line, of those below, label)."""
    branches = branches_of(node)
    last = len(branches) - 1
    for i, (child, name, share) in enumerate(branches):
        if MOST_CHILDREN <= i < last:
            if i == MOST_CHILDREN:
                yield None, f"{rest}├─ ", "", f"… {last - i:,} more"
        elif last == 0 and share is None:
            yield child, rest, rest, ""  # a chain goes straight down: only forks indent
        else:
            branch, space = ("└─ ", "   ") if i == last else ("├─ ", "│  ")
            yield child, rest + branch, rest + space, "" if share is None else f"{name} {share:.2%}: "


def check_graph(graph: Any) -> DataPipe:
    """The same graph. Raises ArgumentTypeError for what is none."""
    if not isinstance(graph, (IterDataPipe, MapDataPipe)):
        raise ArgumentTypeError(f"a graph is a datapipe, its last node; got {graph!r:.80} ({type(graph).__name__})")
    return graph


def branches_of(node: DataPipe) -> "list[Branch]":
    """The inputs of a node, in order."""
    shares = getattr(node, "share", None) if isinstance(node, IndexedDataPipe) else None
    if not callable(shares):  # another node's share is something else
        return [Branch(child, "", None) for child in inputs_of(node)]
    assert isinstance(node, IndexedDataPipe)
    return [Branch(child, printable(child.name), shares(i)) for i, child in enumerate(node.children)]


def about(node: DataPipe) -> About:
    """What is said of a node. The data is not looked at, but for the length of what a stream begins with."""
    notes = node.notes if isinstance(node, IndexedDataPipe) else _count(node)
    labels = tuple(printable(around.label) for around in wrappers_of(node) if around.label)
    return About(printable(verb_of(node) or class_name_of(node)), _settings(node), printable(notes), labels)


def _count(node: DataPipe) -> str:
    """How many items torch's wrapper of an iterable holds, if it can tell."""
    data: Any = vars(node).get("iterable", vars(node).get("sequence"))
    try:
        items = len(data) if hasattr(data, "__len__") and not inputs_of(node) else None
    except TypeError:  # a loader over a stream has a length, but does not tell it
        items = None
    return "" if items is None else f"{items:,} item{'s' * (items != 1)}"


def _settings(node: DataPipe) -> str:
    """The node's settings: those that it names, else what its constructor was given, where that is plain."""
    if isinstance(node, (IndexedDataPipe, StreamingDataPipe)) and (settings := node.settings):
        parts = [_setting(key, value) for key, value in settings.items() if _is_said(key, value)]
    else:
        parts = [_setting(key, value) for key, value in _arguments(node)]
    text = printable(", ".join(parts))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _is_said(key: str, value: Any) -> bool:
    unsaid = value is None or value is False or value == ""
    return not unsaid and key not in ("weights", "exact", "caps", "lengths", "schedule")


def _setting(key: str, value: Any) -> str:
    return f"{key}={value}" if isinstance(value, (str, int)) else f"{key}={json.dumps(value, default=str)}"


def _arguments(node: DataPipe) -> "Iterator[tuple[str, Any]]":
    """What a node of another library was built with: numbers, words and functions' names, where they are no default."""
    if isinstance(node, IndexedDataPipe):
        return
    try:
        parameters = dict(inspect.signature(kind_of(node).__init__).parameters)  # type: ignore[misc]
    except (TypeError, ValueError):  # written in C
        parameters = {}
    for name in dict.fromkeys((*parameters, "fn")):
        value = vars(node).get(name, vars(node).get(f"_{name}"))
        default = parameters[name].default if name in parameters else None
        if value is default or value is None or isinstance(value, (IterDataPipe, MapDataPipe)):
            continue
        if isinstance(value, enum.Enum):
            yield name, value.name
        elif isinstance(value, (str, os.PathLike, bool, numbers.Real)):
            if value is not False or default is True:
                yield name, str(value)
        elif callable(value):
            inner = getattr(value, "func", value)  # of a partial
            yield name, getattr(inner, "__qualname__", type(inner).__name__)


def printable(text: str) -> str:
    """The text with an escape in the place of all that is no visible character, such as a line's end or half a pair."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
