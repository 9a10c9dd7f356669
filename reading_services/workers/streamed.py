"""Streams over workers: each makes its own shard, items are taken from them strictly in turn.

worker 0   a0      a1      a2 │          main:  a0 b0 c0 a1 b1 a2 b2 b3
worker 1       b0      b1  b2  b3 │      one that is through is left out from there on
worker 2          c0 │
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ...datapipes._torch import DataPipe, apply_sharding
from ...datapipes.notes import deliver_notes
from ...datapipes.streaming.shard import Snapshot, StreamShard, later
from ..interface import WorkerInfo
from ..seeds import SeedGenerator, set_process_random_seed
from .dispatch import DispatchWork, attach
from .pickled import from_bytes
from .pool import Pool
from .process import Lines
from .turns import Arrived, given_up, opened, paced, task_size, tasks_for

__all__ = ["StreamedItems", "StreamedWork"]


class _Graph:
    """The worker's graph: kept from epoch to epoch, with what its nodes and `worker_init_fn` have made."""

    data = b""
    graph: DataPipe
    reset_fn: "Callable[..., DataPipe] | None" = None
    shard: "StreamShard | None" = None


class StreamedWork:
    """In the worker: the items of its shard of a stream, in one epoch.

    Args:
        data: the graph with worker_init_fn and worker_reset_fn. seeds: the epoch's generator, as a state.
        place: where the shard goes on.
    """

    def __init__(self, data: bytes, workers: int, seeds: "dict[str, Any]", place: Snapshot) -> None:
        self._data, self._workers, self._seeds, self._place = data, workers, seeds, place

    def begin(self, lines: Lines, worker: int) -> DataPipe:
        info = WorkerInfo(self._workers, worker)
        if _Graph.shard is not None:
            _Graph.shard.close()  # its nodes clean up before they begin again
        if _Graph.data != self._data:
            _Graph.data = b""
            graph, beside = from_bytes(self._data)
            apply_sharding(graph, self._workers, worker, SHARDING_PRIORITIES.MULTIPROCESSING)
            if beside["worker_init_fn"] is not None:
                graph = beside["worker_init_fn"](graph, info)
            _Graph.graph, _Graph.reset_fn, _Graph.data = graph, beside["worker_reset_fn"], self._data
        graph, seeds = _Graph.graph, SeedGenerator.from_state(self._seeds).spawn(worker)
        set_process_random_seed(graph, seeds)
        if _Graph.reset_fn is not None:
            graph = _Graph.graph = _Graph.reset_fn(graph, info, seeds)
        attach(lines, self._place["ended"])
        _Graph.shard = shard = StreamShard(graph, self._place)
        shard.catch_up(lines.still_beginning)
        self._items = shard.with_places()
        return graph

    def items(self, start: int, stop: int) -> "Iterator[tuple[Any, Snapshot | None]]":
        for _ in range(start, stop):
            try:
                yield next(self._items)
            except StopIteration:
                return

    def place(self, number: int) -> str:
        return f"item {number}"


@dataclass(frozen=True)
class End:
    """Where an item would be, had the shard one more."""

    notes: "list[Any]"


class _Shard:
    """What the main process knows of a worker's shard."""

    def __init__(self, place: Snapshot) -> None:
        self.place, self.after = place, 0  # the item handed out last: so many after this place
        self.newest, self.since = place, 0  # the item that has come last
        self.dealt = self.received = self.given = place["items"]
        self.waiting: deque[tuple[Any, Snapshot | None]] = deque()
        self.through = place["ended"]
        self.closed = self.through  # no more is asked of it
        self.pace = 1.0  # seconds an item takes

    def snapshot(self) -> Snapshot:
        if self.through:
            return {"items": self.given, "skip": 0, "ended": True, "nodes": None}
        return later(self.place, self.after)


class StreamedItems:
    """The items of an epoch of a stream, made by a pool. A `Turn` of it.

    Args:
        data, seeds: as in StreamedWork. places: of each worker's shard.
        dispatched: the part of the graph that the dispatching process runs.
        ahead: items that may be dealt or waiting before they are asked for, of each worker.
        pinned: makes an item whose tensors are page-locked.
    """

    def __init__(
        self,
        pool: Pool,
        data: bytes,
        seeds: "dict[str, Any]",
        places: "list[Snapshot]",
        ahead: int,
        pinned: "Callable[[Any], Any] | None",
        dispatched: "bytes | None" = None,
    ) -> None:
        self._pool, self._data, self._seeds, self._ahead, self._pinned = pool, data, seeds, ahead, pinned
        self._dispatched = dispatched
        self._before: tuple[_Shard, Snapshot, int, int] | None = None
        self._shards = [_Shard(place) for place in places]
        least = min((shard.given for shard in self._shards if not shard.through), default=0)
        # whose turn it is: the first of those that have given least
        self._at = next((i for i, s in enumerate(self._shards) if not s.through and s.given == least), 0)
        pool.begin(self)

    def __iter__(self) -> "StreamedItems":
        return self

    def __next__(self) -> Any:
        self._pool.receive(wait=False)
        self._deal()
        while not all(shard.through for shard in self._shards):
            shard = self._shards[self._at]
            while not shard.through and not shard.waiting:
                self._pool.receive(wait=True)
                self._deal()
            if shard.waiting and not shard.through:
                found, snapshot = shard.waiting[0]
                if isinstance(found, End):
                    shard.through = True
                    shard.waiting.clear()
                    deliver_notes(found.notes)
                else:
                    value = opened(found, self._pinned)
                    self._before = (shard, shard.place, shard.after, shard.given)
                    shard.waiting.popleft()
                    shard.given += 1
                    shard.place, shard.after = (shard.place, shard.after + 1) if snapshot is None else (snapshot, 0)
                    self._at = (self._at + 1) % len(self._shards)
                    return value
            self._at = (self._at + 1) % len(self._shards)
        self._before = None
        raise StopIteration

    def _deal(self) -> None:
        for shard, seat in zip(self._shards, self._pool.seats, strict=True):
            if shard.closed:
                continue
            size = task_size(shard.pace, max(1, self._ahead // 3))
            new = tasks_for(seat, size, shard.dealt, shard.given + self._ahead, self._ahead, whole=True)
            if new:
                shard.dealt = new[-1][1]
                self._pool.deal(seat.number, new)

    def take_back(self) -> None:
        """The item handed out last was not delivered after all; there will be no other."""
        if self._before is not None:
            shard, place, after, given = self._before
            shard.place, shard.after, shard.given = place, after, given

    def snapshots(self) -> "list[Snapshot]":
        """Where each worker's shard stands, of the items handed out."""
        return [shard.snapshot() for shard in self._shards]

    def close(self) -> None:
        """Drops what was made ahead."""
        for shard in self._shards:
            for found, _ in shard.waiting:
                given_up(found)
            shard.waiting.clear()
            shard.closed = True
        self._pool.finish(self)

    # What the pool tells ------------------------------------------------------------------------------------

    def work(self, worker: int) -> StreamedWork:
        shard = self._shards[worker]
        place = {**later(shard.newest, shard.since), "ended": shard.closed}
        if shard.closed:
            place |= {"skip": 0, "nodes": None}
        return StreamedWork(self._data, len(self._shards), self._seeds, place)

    def arrived(self, worker: int, number: int, item: Arrived, seconds: float, snapshot: Any) -> None:
        shard = self._shards[worker]
        shard.pace = paced(shard.pace, seconds)
        shard.received = number + 1
        shard.newest, shard.since = (shard.newest, shard.since + 1) if snapshot is None else (snapshot, 0)
        shard.waiting.append((item, snapshot))

    def ended(self, worker: int, number: int, notes: Any) -> None:
        shard = self._shards[worker]
        if not shard.closed:  # each of its tasks ends so
            shard.closed = True
            shard.waiting.append((End(notes), None))

    def failed(self, worker: int, number: int, error: Any) -> None:
        shard = self._shards[worker]
        if not shard.closed:
            shard.closed = True
            shard.waiting.append((error, None))

    def lost(self, worker: int, tasks: "list[tuple[int, int]]") -> None:
        shard = self._shards[worker]
        shard.dealt, shard.pace = shard.received, 1.0  # one by one, until it is known which item it was

    def place(self, worker: int, number: int) -> str:
        return f"item {number} of worker process {worker}"

    def dispatch(self) -> "DispatchWork | None":
        return None if self._dispatched is None else DispatchWork(self._dispatched, self._seeds)
