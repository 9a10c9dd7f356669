"""The service that runs a graph in the main process, with a thread that reads ahead if asked for."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ..adapters.surgery import traverse_dps
from ..datapipes._torch import DataPipe, apply_sharding
from ..datapipes.combine import Mapper
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, ConfigurationError
from .interface import ReadingServiceInterface, WorkerInfo, items_of
from .seeds import SeedGenerator, set_graph_random_seed

__all__ = ["InProcessReadingService"]

_WORKER = WorkerInfo(num_workers=1, worker_id=0)
_END, _ERROR, _ITEM = range(3)


class ReadAhead:
    """An iterator whose items a daemon thread makes, at most `depth` ahead of the reader."""

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._queue: queue.Queue[tuple[int, Any]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="tokenpipe-prefetch", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                self._queue.put((_ITEM, item))
                if self._stopped.is_set():
                    return
            self._queue.put((_END, None))
        except BaseException as error:  # handed to the reader
            self._queue.put((_ERROR, error))

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Any:
        if self._stopped.is_set():
            raise StopIteration
        kind, value = self._queue.get()
        if kind == _ITEM:
            return value
        self._stopped.set()
        if kind == _ERROR:
            raise value
        raise StopIteration

    def close(self) -> None:
        """Ends the thread; what it made is dropped. Does not wait for an item that is stuck."""
        self._stopped.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()  # makes room: the thread then puts its item and sees that it is stopped
        self._thread.join(1.0)


class InProcessReadingService(ReadingServiceInterface):
    """Runs the graph where the training loop runs.

    Args:
        prefetch_cnt: items that a thread makes ahead; 0: none is made before it is asked for. For token
            files on a fast disk 0 is faster (benchmarks/throughput.py), and the kernels hold no GIL.
        init_fn: (datapipe, WorkerInfo) → datapipe, once, before the first iteration.
        reset_fn: (datapipe, WorkerInfo, SeedGenerator) → datapipe, at each iteration.
    """

    def __init__(
        self,
        prefetch_cnt: int = 0,
        init_fn: "Callable[[DataPipe, WorkerInfo], DataPipe] | None" = None,
        reset_fn: "Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe] | None" = None,
    ) -> None:
        self.prefetch_cnt = as_count("prefetch_cnt", prefetch_cnt, 0)
        for name, function in (("init_fn", init_fn), ("reset_fn", reset_fn)):
            if function is not None and not callable(function):
                raise ArgumentTypeError(f"{name} must be a function, got {function!r}")
        self.init_fn, self.reset_fn = init_fn, reset_fn

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        if self.init_fn is not None:
            datapipe = self.init_fn(datapipe, _WORKER)
        if isinstance(datapipe, IndexedDataPipe):
            self._check_prefetch(datapipe)
        else:
            traverse_dps(datapipe)  # says what is wrong where torch would only fail
            apply_sharding(datapipe, 1, 0, SHARDING_PRIORITIES.MULTIPROCESSING)
        return datapipe

    def _check_prefetch(self, node: IndexedDataPipe) -> None:
        if self.prefetch_cnt and isinstance(node, Mapper) and node.seeded:
            raise ConfigurationError(
                f"map({node.settings['fn']}) seeds the process's random generators for each item, which a "
                "prefetching thread may not do beside the training loop; map(fn, seeded=False) or prefetch_cnt=0 "
                "would do"
            )
        for child in node.children:
            self._check_prefetch(child)

    def initialize_iteration(
        self,
        seed_generator: SeedGenerator,
        iter_reset_fn: "Callable[[DataPipe], DataPipe] | None" = None,
    ) -> "Callable[[DataPipe], DataPipe] | None":
        def reset(datapipe: DataPipe) -> DataPipe:
            if iter_reset_fn is not None:
                datapipe = iter_reset_fn(datapipe)
            if not isinstance(datapipe, IndexedDataPipe):
                set_graph_random_seed(datapipe, seed_generator)
            if self.reset_fn is not None:
                datapipe = self.reset_fn(datapipe, _WORKER, seed_generator)
            return datapipe

        return reset

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        items = items_of(datapipe)
        return ReadAhead(items, self.prefetch_cnt) if self.prefetch_cnt else items
