"""The service that runs a graph in worker processes."""

from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pinned
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ..adapters.surgery import same_graph, traverse_dps
from ..adapters.timeout import TimeoutWrapper
from ..datapipes._torch import DataPipe, IterDataPipe, apply_sharding
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.deadline import as_seconds
from ..datapipes.errors import ArgumentTypeError
from ..datapipes.full_sync import FullSync
from ..datapipes.names import named_nodes
from ..datapipes.streaming.shard import BEGINNING, Snapshot, later, say_replayed
from ..datapipes.wrapped import AheadWrapper, Wrapper, split_for_main_process, through, wrappers_of
from .in_process import Counted, InProcessReadingService, parse_places
from .interface import WorkerInfo
from .seeds import SeedGenerator
from .stream_state import canonical
from .workers.dispatch import split, split_bytes
from .workers.numbered import NumberedItems
from .workers.pickled import to_bytes
from .workers.pool import Pool
from .workers.process import context_of
from .workers.streamed import StreamedItems

__all__ = ["MultiProcessingReadingService"]


class MultiProcessingReadingService(InProcessReadingService):
    """Runs the graph in worker processes, which may be killed at any time.

    Args:
        num_workers: how many; 0: in the main process.
        multiprocessing_context: "forkserver" (if left out), "spawn", "fork", or a context. A fork copies the locks of
            the process's threads as they are, and its CUDA, so it is only safe in a process that has neither.
        worker_prefetch_cnt: items that one worker may have to make.
        main_prefetch_cnt: items beyond those that may wait to be asked for.
        worker_init_fn: (datapipe, WorkerInfo) → datapipe, in each worker, with each graph that it gets: one at the
            start, on an indexed graph one more at each `iter()` and change of the run, in a stream's after sharding.
        worker_reset_fn: (datapipe, WorkerInfo, SeedGenerator) → datapipe, in each worker of a stream, at each epoch.
        stall_timeout: seconds that one item may take; its worker is then replaced and the item made again, once.
            None: any time.
        pin_memory: whether the tensors are in page-locked memory; left out, where CUDA is in use.

    Indexed graphs come out in their own order with any number of workers. `num_workers` is for them what is asked
    for: where TOKENPIPE_MAX_WORKERS (all loaders of the process together) leaves fewer, they run on those.
    """

    def __init__(
        self,
        num_workers: int = 0,
        multiprocessing_context: "str | BaseContext | None" = None,
        worker_prefetch_cnt: int = 10,
        main_prefetch_cnt: int = 10,
        worker_init_fn: "Callable[[DataPipe, WorkerInfo], DataPipe] | None" = None,
        worker_reset_fn: "Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe] | None" = None,
        *,
        stall_timeout: "float | None" = 120.0,
        pin_memory: "bool | None" = None,
    ) -> None:
        for name, function in (("worker_init_fn", worker_init_fn), ("worker_reset_fn", worker_reset_fn)):
            if function is not None and not callable(function):
                raise ArgumentTypeError(f"{name} must be a function, got {function!r}")
        super().__init__(0, worker_init_fn, worker_reset_fn)
        self.num_workers = as_count("num_workers", num_workers, 0)
        self.worker_prefetch_cnt = as_count("worker_prefetch_cnt", worker_prefetch_cnt, 0)
        self.main_prefetch_cnt = as_count("main_prefetch_cnt", main_prefetch_cnt, 0)
        self.multiprocessing_context = multiprocessing_context
        self._context = context_of(multiprocessing_context) if self.num_workers else None
        self.worker_init_fn, self.worker_reset_fn = worker_init_fn, worker_reset_fn
        self.stall_timeout = None if stall_timeout is None else as_seconds("stall_timeout", stall_timeout)
        self.pin_memory = pin_memory
        self._pool: Pool | None = None
        self._replaced = 0  # in pools before this one
        self._places: list[Snapshot] = []  # of a stream: where each worker's next iteration begins
        self._seeds: dict[str, Any] = {}
        self._items: Any = None

    @property
    def worker_pids(self) -> "tuple[int, ...]":
        """The process ids of the workers that run."""
        return self._pool.pids if self._pool is not None else ()

    @property
    def replaced(self) -> int:
        """How many workers were replaced so far, because they had ended or were stuck."""
        return self._replaced + (self._pool.replaced if self._pool is not None else 0)

    def metrics(self) -> "dict[str, int | float]":
        return {"data/workers/running": len(self.worker_pids), "data/workers/replaced": self.replaced}

    # What a loader asks ---------------------------------------------------------------------------------------

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        if not self.num_workers:
            return super().initialize(datapipe)
        if not isinstance(datapipe, IndexedDataPipe):
            traverse_dps(datapipe)  # says what is wrong where torch would only fail
            apply_sharding(datapipe, self.num_workers, 0, SHARDING_PRIORITIES.MULTIPROCESSING)  # each worker does again
        self._graph, self._run, self._items = datapipe, None, None
        self._places = [BEGINNING] * self.num_workers
        return datapipe

    def initialize_iteration(
        self,
        seed_generator: SeedGenerator,
        iter_reset_fn: "Callable[[DataPipe], DataPipe] | None" = None,
    ) -> "Callable[[DataPipe], DataPipe] | None":
        if not self.num_workers:
            return super().initialize_iteration(seed_generator, iter_reset_fn)
        if not isinstance(self._graph, IndexedDataPipe):
            self._seeds = seed_generator.epoch().state_dict()
        return iter_reset_fn

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        if not self.num_workers:
            return super().iterate(datapipe)
        if isinstance(datapipe, FullSync):  # the ranks' main processes talk with each other, not their workers
            below = self.iterate(datapipe.datapipe)
            return through(self._exact(wrappers_of(datapipe)), datapipe, _agreed(datapipe, below, self._items))
        graph, around = split_for_main_process(datapipe)
        timeouts = [
            w.seconds for node, _ in named_nodes(graph) for w in wrappers_of(node) if isinstance(w, TimeoutWrapper)
        ]
        self._items = self._streamed(graph) if isinstance(graph, IterDataPipe) else self._numbered(graph)
        assert self._pool is not None
        self._pool.shortest_timeout = min(timeouts, default=None)
        self._places = [BEGINNING] * self.num_workers
        if isinstance(datapipe, IndexedDataPipe):
            self._graph = datapipe
            return through(around, datapipe, self._items)  # its loader counts what is delivered
        return through(self._exact(around), datapipe, self._items)

    def _exact(self, around: "tuple[Wrapper, ...]") -> "tuple[Wrapper, ...]":
        """The wrappers of a stream whose place is that of the item which its workers gave last."""
        found = [wrapper.exact() if isinstance(wrapper, AheadWrapper) else wrapper for wrapper in around]
        return tuple(wrapper for wrapper in found if wrapper is not None)

    def _numbered(self, graph: DataPipe) -> Counted:
        pool = self._pool_for(elastic=True, dispatched=False)
        if isinstance(graph, IndexedDataPipe):
            self._graph, first = graph, 0
        else:
            first = self._places[0]["items"]
        most = max(1, self.worker_prefetch_cnt)
        ahead = most * len(pool) + self.main_prefetch_cnt
        items = NumberedItems(pool, graph, self.worker_init_fn, ahead, most, self._pinned(), first)
        return Counted(items, first)

    def _streamed(self, graph: DataPipe) -> StreamedItems:
        lowest = split(graph)
        pool = self._pool_for(elastic=False, dispatched=lowest is not None)
        functions = {"worker_init_fn": self.worker_init_fn, "worker_reset_fn": self.worker_reset_fn}
        dispatched = None if lowest is None else to_bytes(lowest, forked=pool.forked)
        if lowest is None:
            data = to_bytes(graph, forked=pool.forked, **functions)
        else:
            data = split_bytes(graph, lowest, pool.forked, **functions)
        ahead = max(1, self.worker_prefetch_cnt) + -(-self.main_prefetch_cnt // self.num_workers)
        return StreamedItems(pool, data, self._seeds, self._places, ahead, self._pinned(), dispatched)

    def _pool_for(self, elastic: bool, dispatched: bool) -> Pool:
        if self._pool is not None and (self._pool.elastic, self._pool.dispatched) != (elastic, dispatched):
            self._close_pool()
        if self._pool is None:
            assert self._context is not None
            self._pool = Pool(self.num_workers, self._context, self.stall_timeout, elastic, dispatched)
        return self._pool

    def _pinned(self) -> "Callable[[Any], Any] | None":
        # to ask for page-locked memory before the process has chosen its device would begin CUDA on the first one
        wanted = torch.cuda.is_available() and torch.cuda.is_initialized()
        return pinned if (wanted if self.pin_memory is None else self.pin_memory) else None

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._replaced += self._pool.replaced
            self._pool = None

    def finalize(self) -> None:
        self._close_pool()
        super().finalize()

    # Where a stream stands ------------------------------------------------------------------------------------

    def checkpoint(self) -> bytes:
        if not self.num_workers or self._graph is None or isinstance(self._graph, IndexedDataPipe):
            return super().checkpoint()
        places = self._places
        if isinstance(self._items, StreamedItems):
            places = self._items.snapshots()
            if any(place["items"] for place in places):
                say_replayed(self._graph)
        elif isinstance(self._items, Counted):
            places = [later(BEGINNING, self._items.delivered), *places[1:]]
        return canonical({"shards": places})

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        if not self.num_workers or isinstance(datapipe, IndexedDataPipe):
            return super().restore(datapipe, serialized_state)
        places = parse_places(serialized_state, self.num_workers)
        graph = datapipe if same_graph(datapipe, self._graph) else self.initialize(datapipe)
        self._places, self._items = places, None
        return graph


def _agreed(sync: FullSync, items: Any, made: Any) -> "Iterator[Any]":
    """The items that all ranks have; one on which they could not agree is not delivered."""
    try:
        yield from sync.synced(items)
    except Exception:
        if isinstance(made, StreamedItems):
            made.take_back()
        raise
