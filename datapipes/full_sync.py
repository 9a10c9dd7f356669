"""Streams of uneven length over the ranks end together: at the first item that some rank does not have.

rank 0   a0  a1  a2  a3 │          all ranks ask each other before each item: has everyone one?
rank 1   b0  b1 ✗       │          rank 1 has no third, so no rank delivers its third: two each
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from ._torch import DataPipe, IterDataPipe, MapDataPipe, functional_datapipe
from .core import IndexedDataPipe, Unpickled
from .deadline import as_seconds
from .errors import ArgumentTypeError
from .rank_group import RankGroup

__all__ = ["FullSync"]


@functional_datapipe("fullsync")
class FullSync(IterDataPipe):
    """Delivers an item only where every rank has one (functional: `fullsync`); so no rank waits for ever for
    another in the training step.

    Always the topmost node, since it runs in the main process: a service with worker processes, or with a thread,
    takes it off and hands what those make to `synced`. One short exchange an item, none ahead: what was taken
    from below and not delivered is at most one item, at the end.

    Args:
        timeout: seconds after which a rank that does not answer is a RankError which names it.

    Raises LoaderError, when it is iterated, without an initialised process group.
    """

    in_main_process = True

    def __init__(self, datapipe: DataPipe, timeout: float = 1800) -> None:
        if isinstance(datapipe, IndexedDataPipe) or not isinstance(datapipe, (IterDataPipe, MapDataPipe)):
            raise ArgumentTypeError(
                f"fullsync stands over a stream, got {type(datapipe).__name__}; the ranks of an indexed graph have "
                "equally many items by themselves (shard_ranks)"
            )
        self.datapipe = datapipe
        self.timeout = as_seconds("timeout", timeout)
        self._ranks = Unpickled()

    def over(self, ranks: RankGroup) -> "FullSync":
        """Exchanges over this group rather than one of its own."""
        self._ranks.value = ranks
        return self

    def __iter__(self) -> Iterator[Any]:
        below = self.datapipe
        if isinstance(below, MapDataPipe):
            return self.synced(below[i] for i in range(len(below)))
        return self.synced(below)

    def synced(self, items: "Iterable[Any]") -> Iterator[Any]:
        """The items, as long as every rank has one; an iterator that must be used on all ranks alike."""
        ranks = self._ranks.value
        if ranks is None:
            ranks = self._ranks.value = RankGroup(self.timeout)
        iterator = iter(items)
        try:
            for item in iterator:
                if not ranks.all(True):
                    return
                yield item
            ranks.all(False)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def __len__(self) -> int:
        """Items of this rank, of which fewer come where another rank has fewer."""
        if isinstance(self.datapipe, Sized):
            return len(self.datapipe)
        raise TypeError(f"{type(self.datapipe).__name__} has no length")
