"""Where a stream begins and ends: skip, limit."""

from collections.abc import Iterator
from typing import Any

from .._torch import IterDataPipe, functional_datapipe
from ..core import as_count
from ..errors import ArgumentTypeError
from .base import StreamingDataPipe

__all__ = ["StreamLimiter", "StreamSkipper"]


class _Bound(StreamingDataPipe):
    """A stream whose first items are counted."""

    items: int

    def __init__(self, source_datapipe: IterDataPipe, items: int) -> None:
        if not isinstance(source_datapipe, IterDataPipe):
            raise ArgumentTypeError(f"{self.functional_name} takes a stream, got {type(source_datapipe).__name__}")
        super().__init__()
        self.source_datapipe = source_datapipe
        self.items = as_count("items", items, 0)

    functional_name = ""

    @property
    def settings(self) -> "dict[str, Any]":
        return {"items": self.items}


@functional_datapipe("skip")
class StreamSkipper(_Bound):
    """Leaves out the first items of a stream (functional: `skip`), each of which is made and dropped.

    Args:
        items: how many; below a `sharding_filter` they are those of all ranks and workers together.
    """

    functional_name = "skip"
    initial_state = {"skipped": 0}  # noqa: RUF012 - never changed
    skipped: int

    def __iter__(self) -> "Iterator[Any]":
        for item in self.source_datapipe:
            if self.skipped < self.items:
                self.skipped += 1
                continue
            yield item

    def __len__(self) -> int:
        return max(0, len(self.source_datapipe) - self.items)


@functional_datapipe("limit")
class StreamLimiter(_Bound):
    """Ends a stream after some items (functional: `limit`); none beyond them is made.

    Args:
        items: how many, of each rank and worker where it stands above a `sharding_filter`.
    """

    functional_name = "limit"
    initial_state = {"given": 0}  # noqa: RUF012 - never changed
    given: int

    def __iter__(self) -> "Iterator[Any]":
        below = iter(self.source_datapipe)
        while self.given < self.items:
            try:
                item = next(below)
            except StopIteration:
                return
            self.given += 1
            yield item

    def __len__(self) -> int:
        return min(len(self.source_datapipe), self.items)
