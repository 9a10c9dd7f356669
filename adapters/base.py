"""What an adapter is."""

from abc import ABC, abstractmethod

from ..datapipes._torch import DataPipe

__all__ = ["Adapter"]


class Adapter(ABC):
    """A pass over a graph: takes one, gives back one, leaves the one it was given as it was."""

    keeps_items: bool = False
    """Whether the graph gives the same items in the same order as before, wherever it gives any. Such an adapter can be
    put on a loader that runs (`applied`)."""

    @abstractmethod
    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """The rewritten graph."""
