"""One process's shard of a stream, and the place that it has reached.

A place is a *snapshot*, JSON-able, of the item given last:

    {"items": 1000, "skip": 0, "ended": false, "nodes": {"jsonlinesreader": {"file": 2, "offset": 71}, …}}

Where every node of the graph has a state, or holds nothing between its items, `nodes` are those states: a resume sets
them and goes on. Where one does not (a shuffle with a buffer, a node without `state_dict`), `nodes` is None and the
shard is replayed: made again from the epoch's first item on, and `skip` (then all) of its items are dropped.
`skip` is also how a place that lies a few items after a snapshot is said, so that one need not be taken for each item.

A graph is pulled, so all its nodes wait at a `yield` when an item is given. What a node keeps beyond that decides to
which of the three kinds it belongs.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data.datapipes.iter import (
    Batcher,
    Collator,
    FileOpener,
    Filter,
    IterableWrapper,
    Mapper,
    ShardingFilter,
)

from .._torch import DataPipe, MapDataPipe
from ..core import MAX_NUMBER
from ..errors import LoaderError, LoaderWarning, StateError, StateMismatchError, TokenpipeError
from ..items import items_of
from ..names import inputs_of, named_nodes, node_names
from ..notes import made_again
from ..rank_zero import warn
from ..wrapped import AheadWrapper, as_kind, wrappers_of
from ..wrapped import kind_of as built_as
from .base import OUTER, StreamingDataPipe, as_plain
from .dispatch import ShardingRoundRobinDispatcher

__all__ = [
    "BEGINNING",
    "COUNTED",
    "Delivered",
    "StreamShard",
    "has_state",
    "later",
    "nodes_without_state",
    "parse_snapshot",
    "say_replayed",
]

Snapshot = dict[str, Any]

BEGINNING: Snapshot = {"items": 0, "skip": 0, "ended": False, "nodes": None}
"""The place before the first item of any stream."""

HOLDS_NOTHING = (Batcher, Collator, FileOpener, Filter, Mapper, ShardingRoundRobinDispatcher)
"""torch's nodes that keep nothing from one of their items to the next (their source as of torch 2.13):

Mapper, Collator, Filter, FileOpener give at most one item for each that they take; Batcher waits with an empty batch.
Not here: Shuffler, Grouper, UnBatcher, FileLister, StreamReader, Demultiplexer, Multiplexer keep items or a place in
one; Concater and Zipper may have one input twice; a Forker's children share a buffer. MapDataPipes keep nothing: their
items are functions of an index.
"""


class CountedShardingFilter(StreamingDataPipe, ShardingFilter):
    """torch's ShardingFilter, whose place is how many items it has seen."""

    functional_name = "sharding_filter"
    initial_state = {"seen": 0}  # noqa: RUF012 - never changed
    seen: int

    def __iter__(self) -> "Iterator[Any]":
        for item in self.source_datapipe:
            mine = self.seen % self.num_of_instances == self.instance_id
            self.seen += 1
            if mine:
                yield item


class CountedIterableWrapper(StreamingDataPipe, IterableWrapper):
    """torch's IterableWrapper, whose place is how many items it has given."""

    functional_name = "iterablewrapper"
    initial_state = {"given": 0}  # noqa: RUF012 - never changed
    given: int

    def __iter__(self) -> "Iterator[Any]":
        for item in itertools.islice(IterableWrapper.__iter__.__wrapped__(self), self.given, None):  # type: ignore[attr-defined]
            self.given += 1
            yield item


class InOrder(StreamingDataPipe):
    """The items of a MapDataPipe, 0 … len − 1; its place is the next one's index."""

    initial_state = {"index": 0}  # noqa: RUF012 - never changed
    index: int

    def __init__(self, datapipe: MapDataPipe) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> "Iterator[Any]":
        while self.index < len(self.datapipe):
            self.index += 1
            yield self.datapipe[self.index - 1]


COUNTED: "dict[type[DataPipe], type[StreamingDataPipe]]" = {
    IterableWrapper: CountedIterableWrapper,
    ShardingFilter: CountedShardingFilter,
}
"""torch's nodes whose place is a count: they become ours, in the shard's own graph, where every reference stays."""

ORIGINAL: dict[type[Any], type[DataPipe]] = {counted: original for original, counted in COUNTED.items()}


class StreamShard:
    """Iterates a stream that is sharded and seeded already, and knows its place.

    Args:
        datapipe: the graph; it belongs to the shard from here on, and begins anew.
        state: a snapshot of the same epoch of the same graph, after whose item it goes on.

    Raises StateError for what is no snapshot, StateMismatchError for one of another graph, both before the first item.
    """

    def __init__(self, datapipe: DataPipe, state: "Mapping[str, Any] | None" = None) -> None:
        if isinstance(datapipe, MapDataPipe) and not hasattr(datapipe, "__iter__"):
            datapipe = InOrder(datapipe)
        self.datapipe = datapipe
        base = dict(BEGINNING) if state is None else parse_snapshot(state)
        self._stateful: dict[str, Any] = {}
        for node, name in named_nodes(datapipe):
            if built_as(node) in COUNTED:
                as_kind(node, COUNTED[built_as(node)])
            if has_state(node):
                begin = getattr(node, "begin_anew", None) or getattr(node, "reset", None)
                if begin is not None:
                    begin()
                self._stateful[name] = node
        self._without_state = nodes_without_state(datapipe)
        self._ahead: dict[str, list[AheadWrapper]] = {}  # which take items from a node ahead, the outermost first
        if base["nodes"] is not None:
            self._load(base["nodes"])
        self._watch_what_reads_ahead()
        self._base = base  # the last place whose nodes' states are known
        self._items, self._skip, self._ended = base["items"], base["skip"], base["ended"]
        self._astray = False  # a failed next() has moved the nodes beyond the item given last
        self._iterator: Iterator[Any] = items_of(datapipe)
        if base["skip"]:
            self.say_replayed()

    def _load(self, nodes: "dict[str, Any]") -> None:
        if self._without_state or nodes.keys() != self._stateful.keys():
            here = "is replayed" if self._without_state else f"has {_brief(self._stateful)}"
            raise StateMismatchError(f"this state is of another graph: it has {_brief(nodes)}, and this one {here}")
        for name, node in self._stateful.items():
            try:
                node.load_state_dict(nodes[name])
            except TokenpipeError:
                raise
            except Exception as error:
                raise StateError(f"{name} cannot go on from its state: {type(error).__name__}: {error}") from error

    def _watch_what_reads_ahead(self) -> None:
        """Lets each wrapper that takes items ahead note the states that belong to the item it hands out."""
        below: dict[int, tuple[AheadWrapper, int, list[str]]] = {}

        def walk(node: DataPipe, above: "list[AheadWrapper]") -> None:
            own = _ahead_of(node)
            above = [*above, *own]
            for depth, wrapper in enumerate(above):
                name = names[id(node)]
                below.setdefault(id(wrapper), (wrapper, depth, []))[2].extend([name] if name in self._stateful else [])
            if above and names[id(node)] in self._stateful:
                self._ahead[names[id(node)]] = above
            for child in inputs_of(node):
                walk(child, above)

        names = node_names(self.datapipe)
        if any(_ahead_of(node) for node, _ in named_nodes(self.datapipe)):
            walk(self.datapipe, [])
        for wrapper, depth, found in sorted(below.values(), key=lambda part: -part[1]):  # the inner ones first
            wrapper.read_places(None if self._without_state else partial(self._states, found, depth + 1))

    def _states(self, names: "list[str]", depth: int) -> "dict[str, Any]":
        return {name: self._state(name, depth) for name in names}

    def _state(self, name: str, depth: int = 0) -> Any:
        """A node's state, as it was at the item given last to what takes items ahead at this depth."""
        above = self._ahead.get(name, ())
        if len(above) > depth:
            return above[depth].delivered[name]
        return as_plain(f"{name}: its state", self._stateful[name].state_dict(), OUTER)

    def __iter__(self) -> "StreamShard":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._astray:
            raise LoaderError("this stream was broken off by an exception; a new iteration, or a resume, goes on")
        # until all is well: an exception, or a Ctrl-C, in what follows leaves the nodes between two items
        self._astray = True
        try:
            self.catch_up()
            item = next(self._iterator)
        except StopIteration:
            self._ended, self._astray = True, False
            raise
        self._items += 1
        self._astray = False
        return item

    def catch_up(self, each: "Callable[[], None]" = lambda: None) -> None:
        """Makes again what lies between the states of the nodes and the place; `each` is called at each item.

        Raises StateMismatchError where the stream ends before.
        """
        try:
            while self._skip:
                each()
                with made_again():
                    next(self._iterator)
                self._skip -= 1
        except StopIteration:
            raise StateMismatchError(
                f"the stream ends {self._skip} items before the place of its state, {self._items} items: its data are "
                "others"
            ) from None

    def snapshot(self) -> Snapshot:
        """The place of the item given last. Raises StateError where a node's state is no JSON."""
        if self._ended:
            return {"items": self._items, "skip": 0, "ended": True, "nodes": None}
        if self._astray or self._items == self._base["items"]:  # the nodes have moved on, or not yet to it
            return later(self._base, self._items - self._base["items"])
        if self._without_state:
            self.say_replayed()
            return later(BEGINNING, self._items)
        nodes = {name: self._state(name) for name in self._stateful}
        self._base = {"items": self._items, "skip": 0, "ended": False, "nodes": nodes}
        return later(self._base, 0)

    def with_places(self, every: int = 8) -> "Iterator[tuple[Any, Snapshot | None]]":
        """(item, its snapshot, or None for all but one in `every`): what a prefetching thread or worker hands on."""
        for number, item in enumerate(self, 1):
            yield item, None if number % every or self._without_state else self.snapshot()

    def say_replayed(self) -> None:
        """Warns, once a graph, where a resume goes through the epoch again."""
        say_replayed(self.datapipe, self._without_state)

    def close(self) -> None:
        """Ends the iteration; `snapshot` still says the place."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _ahead_of(node: DataPipe) -> "list[AheadWrapper]":
    """What takes items from a node before they are asked for, the outermost first."""
    return [w for w in reversed(wrappers_of(node)) if isinstance(w, AheadWrapper) and w.takes_ahead]


class Delivered:
    """The items of (item, snapshot or None) pairs, and the place of the one handed out last.

    Args:
        pairs: from `StreamShard.with_places`, made ahead. place: that of the shard when it began.
    """

    def __init__(self, pairs: "Iterator[tuple[Any, Snapshot | None]]", place: Snapshot) -> None:
        self._pairs, self._place, self._after = pairs, place, 0

    def __iter__(self) -> "Delivered":
        return self

    def __next__(self) -> Any:
        try:
            item, place = next(self._pairs)
        except StopIteration:
            self._place = {**self.snapshot(), "skip": 0, "ended": True, "nodes": None}
            self._after = 0
            raise
        if place is None:
            self._after += 1
        else:
            self._place, self._after = place, 0
        return item

    def snapshot(self) -> Snapshot:
        """The place of the item handed out last."""
        return later(self._place, self._after)

    def close(self) -> None:
        """Ends what makes the items ahead; `snapshot` still says the place."""
        close = getattr(self._pairs, "close", None)
        if close is not None:
            close()


def later(snapshot: Snapshot, items: int) -> Snapshot:
    """The place this many items after a snapshot."""
    return {**snapshot, "items": snapshot["items"] + items, "skip": snapshot["skip"] + items}


def parse_snapshot(value: Any) -> Snapshot:
    """A snapshot, checked and of its own. Raises StateError for what is none."""
    if not isinstance(value, Mapping) or value.keys() != BEGINNING.keys():
        raise StateError(f"a place in a stream has the fields {list(BEGINNING)}")
    found = as_plain("a place in a stream", dict(value))
    for name in ("items", "skip"):
        if type(found[name]) is not int or not 0 <= found[name] < MAX_NUMBER:
            raise StateError(f"{name} must be an integer of 0 … 2**63 - 2, got {found[name]!r:.40}")
    if type(found["ended"]) is not bool or not (found["nodes"] is None or type(found["nodes"]) is dict):
        raise StateError("ended is true or false, and nodes an object or null")
    if found["skip"] > found["items"] or (found["ended"] and (found["skip"] or found["nodes"] is not None)):
        raise StateError(f"a place of {found['items']} items cannot skip {found['skip']}, nor an end anything")
    if found["nodes"] is None and not found["ended"] and found["skip"] != found["items"]:
        raise StateError("a place without the states of its nodes skips all items before it")
    return found


# Which nodes know their place -----------------------------------------------------------------------------


def has_state(node: DataPipe) -> bool:
    """Whether a node's place can be saved."""
    return callable(getattr(type(node), "state_dict", None)) and callable(getattr(type(node), "load_state_dict", None))


def kind_of(node: DataPipe) -> type:
    """A node's class, torch's where we count for it."""
    return ORIGINAL.get(built_as(node), built_as(node))


def nodes_without_state(datapipe: DataPipe) -> "list[str]":
    """The names of the nodes for which a shard must be replayed: without a state, or drawn from by several."""
    nodes = list(named_nodes(datapipe))
    drawn = Counter(id(child) for node, _ in nodes for child in inputs_of(node))
    return [name for node, name in nodes if drawn[id(node)] > 1 or not _keeps_place(node)]


def _keeps_place(node: DataPipe) -> bool:
    kind = built_as(node)
    if isinstance(node, MapDataPipe):
        return not hasattr(node, "__iter__")
    return has_state(node) or kind in COUNTED or kind in HOLDS_NOTHING


def say_replayed(datapipe: DataPipe, names: "list[str] | None" = None) -> None:
    """Warns, once a graph, where its place is found again by going through its epoch.

    Args:
        names: its nodes without a state, where they are known.
    """
    names = nodes_without_state(datapipe) if names is None else names
    if names and not vars(datapipe).get("_said_replayed"):
        vars(datapipe)["_said_replayed"] = True
        warn(
            "a resume of this stream goes through its epoch again from the beginning, as some of its nodes have no "
            f"state, or stand in it twice: {_brief(names)}. StreamingDataPipes have one, and so has each node with "
            "state_dict and load_state_dict",
            LoaderWarning,
            stacklevel=3,
        )


def _brief(names: Any) -> str:
    found = list(names)
    return ", ".join(found[:12]) + (f", … {len(found)} in all" if len(found) > 12 else "") or "none"
