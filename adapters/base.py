"""What an adapter is."""

from abc import ABC, abstractmethod

from ..datapipes._torch import DataPipe

__all__ = ["Adapter"]


class Adapter(ABC):
    """A pass over a graph: takes one, gives back one, leaves the one it was given as it was."""

    @abstractmethod
    def __call__(self, datapipe: DataPipe) -> DataPipe:
        """The rewritten graph."""
