"""What a loader asks of the service that runs its graph (names and calls as in torchdata 0.9)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..datapipes._torch import DataPipe
from ..datapipes.core import IndexedDataPipe
from .seeds import SeedGenerator

__all__ = ["CheckpointableReadingServiceInterface", "ReadingServiceInterface", "WorkerInfo", "items_of"]


class WorkerInfo(NamedTuple):
    """Which worker of how many a function runs in."""

    num_workers: int
    worker_id: int


def items_of(datapipe: DataPipe) -> Iterator[Any]:
    """The items of a graph of any kind, from its first one on."""
    if isinstance(datapipe, IndexedDataPipe):
        return datapipe.iterate(0)
    if hasattr(datapipe, "__iter__"):
        return iter(datapipe)
    return (datapipe[i] for i in range(len(datapipe)))  # torch's map-style nodes


class ReadingServiceInterface(ABC):
    """Runs a graph for a DataLoader2."""

    @abstractmethod
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Called once, before the first iteration, with the loader's own graph: returns the one to run."""

    def initialize_iteration(
        self,
        seed_generator: SeedGenerator,
        iter_reset_fn: "Callable[[DataPipe], DataPipe] | None" = None,
    ) -> "Callable[[DataPipe], DataPipe] | None":
        """Called at each `iter()`; a function that it returns rewrites the graph before it is iterated."""
        return None

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        """The items; called at each `iter()`, and again where a change of an indexed run drops what was
        read ahead. The iterator may have a `close()`.
        """
        return items_of(datapipe)

    def finalize_iteration(self) -> None:
        """Called when an iteration ends, and before `finalize`."""

    def finalize(self) -> None:
        """Called once, when the loader is shut down."""


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A service that saves where it stands."""

    @abstractmethod
    def checkpoint(self) -> bytes:
        """Where the service stands."""

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Takes the place of `initialize` when a state was loaded."""
