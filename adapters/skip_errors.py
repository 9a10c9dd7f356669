"""Nodes that may fail now and then: done without."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.datapipes.iter import Filter

from ..datapipes._torch import DataPipe
from ..datapipes.batch import batcher_of
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import GraphError, NodeTimeoutError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.salvage import SkipLedger
from ..datapipes.streaming.shard import has_state
from ..datapipes.wrapped import Wrapper
from .around import as_chosen, chosen_nodes, is_function, put_around
from .base import Adapter
from .failing import as_exceptions, check_not_ahead, failing_nodes, with_counted
from .surgery import rewired

__all__ = ["SkipErrors"]


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
        check_not_ahead(node, self.name)
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
        chosen = failing_nodes(datapipe, self.nodes, "left out", topmost=False)
        datapipe, chosen = with_counted(datapipe, chosen)
        names = node_names(datapipe)
        return put_around(datapipe, chosen, lambda node: SkipWrapper(self.exceptions, names[id(node)], self.ledger))
