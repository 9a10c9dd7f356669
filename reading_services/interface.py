"""What a loader asks of the service that runs its graph (names and calls as in torchdata 0.9)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..datapipes._torch import DataPipe
from ..datapipes.items import items_of
from .seeds import SeedGenerator

__all__ = [
    "CheckpointableReadingServiceInterface",
    "PauseIteration",
    "ReadingServiceInterface",
    "WorkerInfo",
]


class PauseIteration(StopIteration):
    """Raised by a service's iterator in `__next__`: this loop ends, the iteration does not; the next loop goes on."""


class WorkerInfo(NamedTuple):
    """Which worker of how many a function runs in."""

    num_workers: int
    worker_id: int


class ReadingServiceInterface(ABC):
    """Runs a graph for a DataLoader2.

    rank, ranks: which rank's part of a stream this service runs, of how many. num_workers: its worker processes. A
    stream's state is refused where they differ.
    """

    rank: int = 0
    ranks: int = 1
    num_workers: int = 0

    @abstractmethod
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Called once, before the first iteration, with the loader's own graph: returns the one to run."""

    def initialize_iteration(
        self,
        seed_generator: SeedGenerator,
        iter_reset_fn: "Callable[[DataPipe], DataPipe] | None" = None,
    ) -> "Callable[[DataPipe], DataPipe] | None":
        """Called at each `iter()`; a function that it returns rewrites the graph before it is iterated.

        iter_reset_fn: what a service before this one returned; what this one returns stands for both. An override
        may do without it.
        """
        return iter_reset_fn

    def agree(self, standing: "Callable[[], dict[str, Any]]") -> None:
        """Called at each `iter()`, before its first item. `standing` says, JSON-able, what is the same on all
        ranks of a sound run: where an indexed one stands and how it is laid out; of a stream the nodes, the
        epoch's seed, whether it goes on from a state, and the workers a rank. It costs what a state costs.
        """

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        """The items; called at each `iter()`, and again where a change of an indexed run drops what was
        read ahead. The iterator may have a `close()`.
        """
        return items_of(datapipe)

    def metrics(self) -> "dict[str, int | float]":
        """Flat numbers that a logger should have, by names below "data/"."""
        return {}

    def finalize_iteration(self) -> None:
        """Called when an iteration ends, and before `finalize`."""

    def finalize(self) -> None:
        """Called once, when the loader is shut down."""


class CheckpointableReadingServiceInterface(ReadingServiceInterface):
    """A service that saves where it stands.

    On a stream its bytes are part of `DataLoader2.state_dict()`; an indexed graph's state needs no service.
    """

    @abstractmethod
    def checkpoint(self) -> bytes:
        """The place after the item handed out last in this iteration; what was made ahead does not count.

        Also called after `finalize_iteration` and `finalize`, then of the iteration that was broken off.
        """

    @abstractmethod
    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """Takes the place of `initialize` when a state was loaded: the next `iterate` goes on there.

        A loader that has iterated before gives the graph that it ran: nothing is to be set up then, only the place to
        be taken. `initialize_iteration` follows, with the seeds with which the saved iteration began.
        """
