"""Nodes that may fail now and then: tried again, or done without."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.datapipes.iter import Filter, Mapper

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.batch import batcher_of
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, NodeTimeoutError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.notes import Ledger
from ..datapipes.salvage import SkipLedger
from ..datapipes.streaming.shard import COUNTED, has_state, nodes_without_state
from ..datapipes.wrapped import AheadWrapper, Wrapper, as_kind, kind_of, wrappers_of
from .around import as_chosen, chosen_nodes, put_around
from .base import Adapter
from .surgery import copied, mapped, rewired
from .tap import nodes_with_items

__all__ = ["Retry", "SkipErrors"]

LONGEST_WAIT = 30.0  # s between two tries


class RetryLedger(Ledger):
    """How often something was tried again."""

    kind = "retry"

    def __init__(self, key: str = "") -> None:
        super().__init__(key)
        self.count = 0
        self.by_node: dict[str, int] = {}

    def write(self, note: Any) -> None:
        self.count += 1
        self.by_node[note] = self.by_node.get(note, 0) + 1

    def as_json(self, consumed: "int | None") -> "dict[str, Any]":
        return {"count": self.count} if self.count else {}

    def load(self, value: "dict[str, Any]") -> None:
        self.count = as_count("retry.count", value.get("count", 0), 0)

    def metrics(self) -> "dict[str, int | float]":
        return {"data/retried": self.count}


class RetryWrapper(Wrapper):
    """Does again what raised."""

    kind = "retry"

    def __init__(self, retry: "Retry", name: str) -> None:
        self.tries, self.exceptions, self.wait, self.ledger = retry.tries, retry.exceptions, retry.wait, retry.ledger
        self.name = name

    @property
    def label(self) -> str:
        return f"retry {self.tries}×"

    def _again(self, tried: int, error: Exception) -> bool:
        """Whether to try once more; waits before it does."""
        if tried >= self.tries or getattr(error, "_tokenpipe_tried", False):
            if tried > 1 and hasattr(error, "add_note"):
                error.add_note(f"in {self.name}, after {tried} tries")
            with contextlib.suppress(Exception):  # a frozen class
                error._tokenpipe_tried = True  # type: ignore[attr-defined]  # what is around a node above need not
            return False
        self.ledger.tell(self.name)
        time.sleep(min(self.wait * 2 ** (tried - 1), LONGEST_WAIT) * random.SystemRandom().uniform(0.5, 1.0))
        return True

    def _call(self, function: "Callable[[], Any]") -> Any:
        tried = 1
        while True:
            try:
                return function()
            except self.exceptions as error:
                if not self._again(tried, error):
                    raise
                tried += 1

    def apply(self, node: DataPipe, function: "Callable[[Any], Any]", item: Any) -> Any:
        return self._call(lambda: function(item))

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        return self._call(lambda: fetch(numbers))

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self._call(lambda: get(index))

    def iterate(
        self, node: IndexedDataPipe, begin: "Callable[[int], Iterator[Any]]", start: int, stop: "int | None"
    ) -> "Iterator[Any]":
        items: Iterator[Any] = iter(())
        tried = 0
        while True:
            try:
                if tried == 0 or tried > 1:
                    items = begin(start)
                tried = max(tried, 1)
                for item in items:
                    start, tried = start + 1, 1
                    yield item
                return
            except self.exceptions as error:
                if not self._again(tried, error):
                    raise
                tried += 1

    def stream(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        if is_function(node):
            yield from begin()
            return
        _check_not_ahead(node, self.name)
        places, items, tried = _Places(node), None, 1
        while True:
            try:
                items = begin() if items is None else items
                for item in items:
                    places.note()
                    tried = 1
                    yield item
                return
            except NodeTimeoutError:
                raise  # the thread that is stuck in these nodes may still change what they say of their place
            except self.exceptions as error:
                if not self._again(tried, error):
                    raise
                tried, items = tried + 1, None
                places.go_back()


class _Places:
    """Where the nodes of a stream were at the item given last."""

    def __init__(self, node: DataPipe) -> None:
        self._nodes: list[Any] = [below for below, _ in named_nodes(node) if has_state(below)]
        # of one that begins anew there is nothing to go back to: it does so again
        self._states = [n.state_dict() if vars(n).get("_loaded", True) else None for n in self._nodes]

    def note(self) -> None:
        self._states = [node.state_dict() for node in self._nodes]

    def go_back(self) -> None:
        for node, state in zip(self._nodes, self._states, strict=True):
            if state is not None:
                node.load_state_dict(state)


class Retry(Adapter):
    """Does again what raised; a last failure is raised as it is, with the number of tries as a note.

    An indexed graph makes the same item again. In a stream, a function of items is called again with the same item
    (torch's map, collate, filter); other nodes go back to the item given last, which those below must be able to.

    Args:
        exceptions: which are tried again: a class, or several.
        tries: how often in all, of one item.
        wait: seconds before the second try (half of that to all of it, at random), doubled each time, up to 30.
        nodes: names, classes or nodes; left out, the whole graph, as far as its nodes can.

    `count` says how often something was tried again, in all workers; it is part of the loader's metrics and state.
    Raises GraphError for a chosen node that cannot go back, with the reason.
    """

    keeps_items = True

    def __init__(
        self,
        exceptions: "type[Exception] | tuple[type[Exception], ...]" = OSError,
        tries: int = 3,
        wait: float = 0.1,
        nodes: Any = None,
    ) -> None:
        self.exceptions, self.tries, self.nodes = as_exceptions(exceptions), as_count("tries", tries), as_chosen(nodes)
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < float("inf"):
            raise ConfigurationError(f"wait must be a number of seconds, got {wait!r:.80}")
        self.wait = wait
        self.ledger = RetryLedger()

    @property
    def count(self) -> int:
        return self.ledger.count

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if isinstance(datapipe, IndexedDataPipe):
            chosen = nodes_with_items(datapipe, self.nodes, "tried again")
        else:
            chosen = _failing_nodes(datapipe, self.nodes, "tried again", topmost=True)
            datapipe, chosen = with_counted(datapipe, chosen)
        names = node_names(datapipe)
        return put_around(datapipe, chosen, lambda node: RetryWrapper(self, names[id(node)]))


class _SKIPPED:
    """Stands for an item that was left out: a class, so that it is itself in every process."""


class SkipWrapper(Wrapper):
    """Does without what raised."""

    kind = "skip_errors"

    def __init__(self, exceptions: "tuple[type[Exception], ...]", name: str, ledger: SkipLedger) -> None:
        self.exceptions, self.name, self.ledger = exceptions, name, ledger

    @property
    def label(self) -> str:
        return f"skip up to {self.ledger.budget} errors"

    def apply(self, node: DataPipe, function: "Callable[[Any], Any]", item: Any) -> Any:
        try:
            return function(item)
        except self.exceptions as error:
            self.ledger.skip(self.name, None, error)
            return (False, item) if isinstance(node, Filter) else _SKIPPED

    def stream(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        if is_function(node):
            yield from (item for item in begin() if item is not _SKIPPED)
            return
        _check_not_ahead(node, self.name)
        stateful: list[Any] = [below for below, _ in named_nodes(node) if has_state(below)]
        while True:
            try:
                yield from begin()
                return
            except NodeTimeoutError:
                raise
            except self.exceptions as error:
                self.ledger.skip(self.name, None, error)
                for below in stateful:  # go on behind what was taken last
                    below.load_state_dict(below.state_dict())


class SkipErrors(Adapter):
    """Does without what raises, so often and no oftener; each time is counted, and part of the loader's state.

    In an indexed graph the samples keep their places, or the ranks would no longer take the same steps: a sample that
    cannot be made is a row of zeros in its batch, with every label masked. In a stream the item is left out.

    Args:
        budget: how many samples (of a stream: items) of the run, on this rank; one more is a SkipBudgetError.
        exceptions: which; a class or several.
        nodes: of a stream, names, classes or nodes; left out, all that can.

    `skipped` says which. Raises GraphError where nothing can be left out, with the reason.
    """

    keeps_items = True

    def __init__(
        self,
        budget: int,
        exceptions: "type[Exception] | tuple[type[Exception], ...]" = Exception,
        nodes: Any = None,
    ) -> None:
        self.budget, self.exceptions = as_count("budget", budget, 0), as_exceptions(exceptions)
        self.nodes = as_chosen(nodes)
        self.ledger = SkipLedger(budget=self.budget)

    @property
    def count(self) -> int:
        return self.ledger.count

    @property
    def skipped(self) -> "list[tuple[str, int | None, str]]":
        """(node, sample number, what was raised) of each, the first 1,000; in a stream the number is None."""
        return list(self.ledger.skipped)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if isinstance(datapipe, IndexedDataPipe):
            batcher = batcher_of(datapipe)
            if batcher is None:
                raise GraphError(
                    f"{type(datapipe).__name__} gives samples, and none may be left out of their order; with "
                    "batch_samples above, a sample that cannot be made is a masked row"
                )
            if self.nodes is not None and chosen_nodes(datapipe, self.nodes) != [batcher]:
                raise GraphError("an indexed graph leaves out samples where they are batched: nodes='batch_samples'")
            return rewired(datapipe, {id(batcher): batcher.skipping_errors(self.exceptions, self.ledger)})
        chosen = _failing_nodes(datapipe, self.nodes, "left out", topmost=False)
        datapipe, chosen = with_counted(datapipe, chosen)
        names = node_names(datapipe)
        return put_around(datapipe, chosen, lambda node: SkipWrapper(self.exceptions, names[id(node)], self.ledger))


def as_exceptions(value: Any) -> "tuple[type[Exception], ...]":
    """Classes of exceptions, one or several. Raises ArgumentTypeError."""
    given = value if isinstance(value, tuple) else (value,)
    if not given or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in given):
        raise ArgumentTypeError(f"exceptions must be a class of exceptions, or a tuple of some, got {value!r:.80}")
    return given


def is_function(node: DataPipe) -> bool:
    """Whether a stream's node is a function of each of its items."""
    return isinstance(node, (Mapper, Filter))


def _failing_nodes(datapipe: DataPipe, nodes: "tuple[Any, ...] | None", what: str, topmost: bool) -> "list[DataPipe]":
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


def _check_not_ahead(node: DataPipe, name: str) -> None:
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
