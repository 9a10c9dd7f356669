"""Nodes that may fail now and then: tried again."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.deadline import as_seconds
from ..datapipes.errors import NodeTimeoutError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.notes import Ledger
from ..datapipes.streaming.shard import has_state
from ..datapipes.wrapped import Wrapper
from .around import as_chosen, is_function, nodes_with_items, put_around
from .base import Adapter
from .failing import as_exceptions, check_not_ahead, failing_nodes, with_counted

__all__ = ["Retry"]

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
        check_not_ahead(node, self.name)
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
        self.wait = as_seconds("wait", wait, 0)
        self.ledger = RetryLedger()

    @property
    def count(self) -> int:
        return self.ledger.count

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if isinstance(datapipe, IndexedDataPipe):
            chosen = nodes_with_items(datapipe, self.nodes, "tried again")
        else:
            chosen = failing_nodes(datapipe, self.nodes, "tried again", topmost=True)
            datapipe, chosen = with_counted(datapipe, chosen)
        names = node_names(datapipe)
        return put_around(datapipe, chosen, lambda node: RetryWrapper(self, names[id(node)]))
