"""A graph as a source of torchdata.nodes, with a state that any DataLoader2 over the same graph can load.

    source = GraphNode(graph)                          or GraphNode(loader), any reading service
    node = Prefetcher(ParallelMapper(source, fn, num_workers=4, method="thread"), prefetch_factor=2)
    for batch in (loader := torchdata.nodes.Loader(node)):
        state = loader.state_dict()                    JSON-able; ours is the innermost part of it

Not part of the package's own names: importing torchdata.nodes takes its time.
"""

from typing import Any

from torchdata.nodes import BaseNode

from ..datapipes._torch import DataPipe
from ..datapipes.errors import ArgumentTypeError
from .data_loader2 import DataLoader2, DataLoader2Iterator
from .interface import ReadingServiceInterface

__all__ = ["GraphNode"]


class GraphNode(BaseNode[Any]):
    """The items of a graph, for torchdata's nodes to go on with.

    Args:
        source: a graph, or a DataLoader2 over one; then the node goes on where that stands.
        reading_service: runs a graph; left out, an InProcessReadingService().

    As everywhere in torchdata.nodes, each later pass (`reset()`, a second `iter` of its Loader) begins anew: an
    indexed graph at the run's first sample, a stream with its next epoch. The state of each item is asked for before
    it is handed on (some 50 µs); Prefetcher and ParallelMapper ask less often with a larger `snapshot_frequency`.
    """

    loader: DataLoader2
    """What runs the graph; `shutdown()` ends its workers."""

    def __init__(
        self, source: "DataPipe | DataLoader2", reading_service: "ReadingServiceInterface | None" = None
    ) -> None:
        super().__init__()
        if isinstance(source, DataLoader2) and reading_service is not None:
            raise ArgumentTypeError("a DataLoader2 has a reading service already: give that one to the loader")
        self.loader = source if isinstance(source, DataLoader2) else DataLoader2(source, None, reading_service)
        self._items: DataLoader2Iterator | None = None

    def reset(self, initial_state: "dict[str, Any] | None" = None) -> None:
        """Begins anew, or goes on where a state of this node, or of a DataLoader2, says.

        Raises StateError, StateMismatchError (see DataLoader2.load_state_dict).
        """
        super().reset(initial_state)
        if initial_state is not None:
            self.loader.load_state_dict(initial_state)
        elif self._items is not None and self.loader._run is not None:
            self.loader.restart()
        self._items = iter(self.loader)

    def next(self) -> Any:
        """The next item."""
        assert self._items is not None  # BaseNode resets before the first
        return next(self._items)

    def get_state(self) -> "dict[str, Any]":
        """What `DataLoader2.state_dict()` gives."""
        return self.loader.state_dict()
