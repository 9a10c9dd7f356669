"""Indexed graphs over workers: numbers are dealt to whoever is free, items come out in order.

The numbers of a task are routed together, and come back in one message.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...datapipes._torch import DataPipe
from ...datapipes.core import IndexedDataPipe
from ...datapipes.fetch.fetch_ahead import serve_others
from ...datapipes.kernels import load_kernels
from ...datapipes.notes import deliver_notes
from ..interface import WorkerInfo
from .pickled import from_bytes, to_bytes
from .pool import Pool
from .process import Lines
from .turns import Arrived, given_up, opened, paced, task_size, tasks_for

__all__ = ["NumberedItems"]

InitFn = Callable[[DataPipe, WorkerInfo], DataPipe]


class NumberedWork:
    """In the worker: the items of an indexed graph, or of one of torch's map-style nodes."""

    def __init__(self, graph: bytes, workers: int) -> None:
        self._graph, self._workers = graph, workers

    def begin(self, lines: Lines, worker: int) -> DataPipe:
        graph, beside = from_bytes(self._graph)
        serve_others()
        if beside["worker_init_fn"] is not None:
            graph = beside["worker_init_fn"](graph, WorkerInfo(self._workers, worker))
        if isinstance(graph, IndexedDataPipe):
            load_kernels()  # here, so that the first item takes no longer than others
        self._made = graph
        return graph

    def items(self, start: int, stop: int) -> "Iterator[tuple[Any, None]]":
        stop = min(stop, end_of(self._made))
        if isinstance(self._made, IndexedDataPipe):
            return ((item, None) for item in self._made.iterate(start, stop))
        return ((self._made[number], None) for number in range(start, stop))

    def place(self, number: int) -> str:
        return place_in(self._made, number)


def end_of(graph: DataPipe) -> int:
    """How many items there are."""
    return graph.end if isinstance(graph, IndexedDataPipe) else len(graph)


def place_in(graph: DataPipe, number: int) -> str:
    """What to call an item: "batch 17 (sample 136)", with the run's own sample number of its first row."""
    if not isinstance(graph, IndexedDataPipe):
        return f"item {number}"
    try:
        sample = int(graph.sample_numbers(np.array([number], np.int64))[0])
    except Exception:  # an error is being told
        return f"item {number}"
    return f"item {number + graph.skipped_items}, sample number {sample}"


class NumberedItems:
    """The items of a graph, in order, made by a pool. A `Turn` of it.

    Args:
        ahead: items that may be dealt or waiting before they are asked for.
        most: of those, in one task.
        pinned: makes an item whose tensors are page-locked.
        first: the number to begin at.
    """

    def __init__(
        self,
        pool: Pool,
        graph: DataPipe,
        init_fn: "InitFn | None",
        ahead: int,
        most: int,
        pinned: "Callable[[Any], Any] | None",
        first: int = 0,
    ) -> None:
        self._pool, self._graph, self._ahead, self._most, self._pinned = pool, graph, ahead, most, pinned
        if pool.forked and isinstance(graph, IndexedDataPipe):
            load_kernels()  # which its workers then have
        self._work = NumberedWork(to_bytes(graph, forked=pool.forked, worker_init_fn=init_fn), len(pool))
        self._next = self._dealt = first
        self._end = end_of(graph)
        self._again: list[tuple[int, int]] = []  # a heap: lost, and to be dealt before others
        self._ready: dict[int, Any] = {}
        self._pace = 1.0  # seconds an item takes
        self._size = 1  # numbers of a task
        pool.begin(self)

    def __iter__(self) -> "NumberedItems":
        return self

    def __next__(self) -> Any:
        if self._next not in self._ready or self._dealt - self._next <= self._ahead - self._size or self._again:
            self._pool.receive(wait=False)
            self._deal()
        while self._next not in self._ready:
            if self._next >= self._end:
                raise StopIteration
            self._pool.receive(wait=True)
            self._deal()
        value = opened(self._ready[self._next], self._pinned)
        del self._ready[self._next]
        self._next += 1
        return value

    def _deal(self) -> None:
        self._size = task_size(self._pace, min(self._most, max(1, self._ahead // 3)))
        limit = min(self._next + self._ahead, self._end)
        for seat in sorted(self._pool.seats, key=lambda seat: len(seat.tasks)):
            if self._again and len(seat.tasks) < 2:
                self._pool.deal(seat.number, [heapq.heappop(self._again)])
            elif self._dealt < limit and not self._again:
                new = tasks_for(seat, self._size, self._dealt, limit, self._most, whole=limit < self._end)
                if new:
                    self._dealt = new[-1][1]
                    self._pool.deal(seat.number, new)

    def close(self) -> None:
        """Drops what was made ahead."""
        for found in self._ready.values():
            given_up(found)
        self._ready.clear()
        self._pool.finish(self)

    # What the pool tells ------------------------------------------------------------------------------------

    def work(self, worker: int) -> NumberedWork:
        return self._work

    def arrived(self, worker: int, number: int, item: Arrived, seconds: float, snapshot: Any) -> None:
        self._pace = paced(self._pace, seconds)
        self._ready[number] = item

    def ended(self, worker: int, number: int, notes: Any) -> None:
        deliver_notes(notes)
        self._end = min(self._end, number)  # worker_init_fn has put an end to the graph

    def failed(self, worker: int, number: int, error: Any) -> None:
        self._ready[number] = error

    def lost(self, worker: int, tasks: "list[tuple[int, int]]") -> None:
        for task in tasks:
            heapq.heappush(self._again, task)

    def place(self, worker: int, number: int) -> str:
        return place_in(self._graph, number)

    def dispatch(self) -> None:
        return None
