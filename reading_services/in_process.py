"""The service that runs a graph in the main process, with a thread that reads ahead if asked for."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ..adapters.surgery import same_graph, traverse_dps
from ..datapipes._torch import DataPipe, apply_sharding
from ..datapipes.combine import seeded_map
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, LoaderError, StateError
from ..datapipes.full_sync import FullSync
from ..datapipes.items import ReadAhead, items_of
from ..datapipes.streaming.shard import BEGINNING, Delivered, Snapshot, StreamShard, parse_snapshot
from ..datapipes.wrapped import through, wrappers_of
from .interface import CheckpointableReadingServiceInterface, WorkerInfo
from .parse import check_keys, parse_json
from .run import IndexedRun
from .seeds import SeedGenerator, set_graph_random_seed
from .stream_state import MOST_BYTES, canonical

__all__ = ["Counted", "InProcessReadingService", "parse_places"]

_WORKER = WorkerInfo(num_workers=1, worker_id=0)


class Counted:
    """An iterator, how many items it has given, with those before it began, and whether it is through."""

    def __init__(self, items: Iterator[Any], delivered: int = 0) -> None:
        self._items, self.delivered, self.through = items, delivered, False

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            self.through = True
            raise
        self.delivered += 1
        return item

    def __getattr__(self, name: str) -> Any:  # close, and what the graph's iterator has besides
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._items, name)


class InProcessReadingService(CheckpointableReadingServiceInterface):
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
        self._graph: DataPipe | None = None  # what ran last, or will
        self._run: IndexedRun | None = None  # of a restored indexed graph: it has a journal
        self._place = BEGINNING  # of a stream: where the next iteration begins
        self._shard: StreamShard | None = None
        self._items: Counted | StreamShard | Delivered | None = None
        self._ahead: ReadAhead | None = None  # of a stream

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        if self.init_fn is not None:
            datapipe = self.init_fn(datapipe, _WORKER)
        if isinstance(datapipe, IndexedDataPipe):
            self._check_prefetch(datapipe)
        else:
            traverse_dps(datapipe)  # says what is wrong where torch would only fail
            apply_sharding(datapipe, 1, 0, SHARDING_PRIORITIES.MULTIPROCESSING)
        self._graph, self._run, self._items, self._place = datapipe, None, None, BEGINNING
        return datapipe

    def _check_prefetch(self, node: IndexedDataPipe) -> None:
        if self.prefetch_cnt and (seeded := seeded_map(node)) is not None:
            raise ConfigurationError(
                f"map({seeded.settings['fn']}) seeds the process's random generators for each item, which a "
                "prefetching thread may not do beside the training loop; map(fn, seeded=False) or prefetch_cnt=0 "
                "would do"
            )

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
        self._graph = datapipe
        if isinstance(datapipe, IndexedDataPipe):
            items = items_of(datapipe)
            self._items = Counted(ReadAhead(items, self.prefetch_cnt) if self.prefetch_cnt else items)
            return self._items
        synced = datapipe if isinstance(datapipe, FullSync) else None
        self._shard = shard = StreamShard(datapipe if synced is None else synced.datapipe, self._place)
        self._items, self._place = shard, BEGINNING
        if self.prefetch_cnt or synced is not None:
            place, pairs = shard.snapshot(), shard.with_places()
            if self.prefetch_cnt:
                pairs = self._ahead = ReadAhead(pairs, self.prefetch_cnt)
            if synced is not None:  # outside of the thread; an item that the ranks did not agree on is not delivered
                pairs = synced.synced(pairs)
            self._items = Delivered(pairs, place)
        if synced is not None and wrappers_of(synced):
            return through(wrappers_of(synced), synced, self._items)
        return self._items

    def finalize_iteration(self) -> None:
        for items in (self._items, self._ahead, self._shard):
            if (close := getattr(items, "close", None)) is not None:
                with contextlib.suppress(ValueError):  # a thread is stuck in it
                    close()
        self._ahead = None

    def checkpoint(self) -> bytes:
        """A stream's place; of an indexed graph, which a loader keeps the state of, the run as iterated here."""
        if self._graph is None:
            raise LoaderError("checkpoint() before initialize(): this service has no graph yet")
        if isinstance(self._graph, IndexedDataPipe):
            run = self._run if self._run is not None and self._run.graph is self._graph else IndexedRun(self._graph)
            if isinstance(self._items, Counted):
                run.delivered, run.through = self._items.delivered, self._items.through
            return canonical(run.state_dict())
        place = self._place
        if place is BEGINNING and isinstance(self._items, (StreamShard, Delivered)):
            place = self._items.snapshot()
            if self._shard is not None and place["items"]:
                self._shard.say_replayed()
        return canonical({"shards": [place]})

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        if isinstance(datapipe, IndexedDataPipe):
            built = self.initialize(datapipe)
            if not isinstance(built, IndexedDataPipe):
                raise LoaderError("init_fn made a stream of an indexed graph, which has no place to resume from")
            run = IndexedRun(built)
            run.load_state_dict(serialized_state)
            self._run, self._graph = run, run.graph
            return run.graph
        (place,) = parse_places(serialized_state, 1)
        graph = datapipe if same_graph(datapipe, self._graph) else self.initialize(datapipe)
        self._place, self._items = place, None
        return graph


def parse_places(serialized_state: bytes, shards: int) -> "list[Snapshot]":
    """The places of so many shards. Raises StateError for anything else."""
    value = parse_json(serialized_state, MOST_BYTES, floats=True)
    if not isinstance(value, dict):
        raise StateError("the state of this service is an object")
    check_keys("service", value, {"shards"})
    places = value["shards"]
    if not isinstance(places, list) or len(places) != shards:
        found = len(places) if isinstance(places, list) else "none"
        raise StateError(f"service.shards: the places of {shards} shards were expected, and there are {found}")
    return [parse_snapshot(place) for place in places]
