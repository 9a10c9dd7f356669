"""The loader: a graph, adapted, run by a reading service, with a place that can be saved."""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from ..adapters.base import Adapter
from ..adapters.shuffle import SeedWrapper
from ..datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import (
    ArgumentTypeError,
    GraphError,
    IteratorInvalidatedError,
    LoaderError,
    LoaderShutdownError,
    LoaderWarning,
)
from ..datapipes.linting import serious_findings
from ..datapipes.names import named_nodes
from ..datapipes.plan.counts import SourceCounts
from ..datapipes.rank_zero import warn
from ..datapipes.wrapped import wrappers_of
from .autotune import service_for
from .indexed_loader import IndexedLoader
from .interface import CheckpointableReadingServiceInterface, ReadingServiceInterface
from .iterator import DataLoader2Iterator
from .metrics import Waits
from .noted import ledgers_of, load_noted, noted
from .run import IndexedRun
from .seeds import SeedGenerator
from .stream_state import StreamRun

__all__ = ["DataLoader2", "DataLoader2Iterator"]

GraphPass = Callable[[DataPipe], DataPipe]


class DataLoader2(IndexedLoader):
    """Iterates a graph, and on an indexed graph knows where the run stands.

    Args:
        datapipe: the graph; the loader works on its own copy.
        datapipe_adapter_fn: one adapter or several, applied in order, here.
        reading_service: left out, an InProcessReadingService().

    A new `iter()` goes on at the first item that was not delivered on an indexed graph (a finite one that
    is through begins again, one with `once` begins anew at every `iter()`), and begins a new epoch on a
    stream. `contents`, `when`, `state_dict` work at any time, after shutdown too.
    """

    def __init__(
        self,
        datapipe: DataPipe,
        datapipe_adapter_fn: "GraphPass | Sequence[GraphPass] | None" = None,
        reading_service: "ReadingServiceInterface | None" = None,
    ) -> None:
        self._terminated = True  # until all is well: __del__ of a half-built loader does nothing
        if not isinstance(datapipe, (IterDataPipe, MapDataPipe)):
            raise ArgumentTypeError(f"datapipe must be a graph of datapipes, got {type(datapipe).__name__}")
        if reading_service is not None and not isinstance(reading_service, ReadingServiceInterface):
            raise ArgumentTypeError(f"reading_service must be a ReadingServiceInterface, got {reading_service!r}")
        graph = datapipe if isinstance(datapipe, IndexedDataPipe) else _copied(datapipe)
        given = [] if datapipe_adapter_fn is None else datapipe_adapter_fn
        adapters = given if isinstance(given, Sequence) else [given]
        for adapter in adapters:
            if not callable(adapter):
                raise ArgumentTypeError(f"an adapter is a function from graph to graph, got {adapter!r}")
            graph = adapter(graph)
            if not isinstance(graph, (IterDataPipe, MapDataPipe)):
                raise ArgumentTypeError(f"adapter {adapter!r} gave back no graph but {graph!r}")
        for finding in serious_findings(graph):
            warn(f"lint: {finding}", LoaderWarning, stacklevel=2)
        self.datapipe = graph
        self.reading_service: ReadingServiceInterface = service_for(graph, adapters, reading_service)
        self._run = IndexedRun(graph) if isinstance(graph, IndexedDataPipe) else None
        self._stream = None if self._run is not None else StreamRun(graph, self.reading_service)
        self._iterator_number = 0
        self._invalid_because = "a newer one was made"
        self._items: Iterator[Any] = iter(())
        self._iterating = self._interrupted = False
        self._reset: GraphPass | None = None
        self._initialized = False
        self._generator, self._seeded = SeedGenerator(0), False
        self._waits = Waits()
        self._counts: SourceCounts | None = None
        self._worn: list[Adapter] = []  # of a stream: put on while it runs
        self._look_for_ledgers(graph)
        for node, _ in reversed([*named_nodes(graph)]):  # what stands on top of a seed came later
            for wrapper in wrappers_of(node):
                if isinstance(wrapper, SeedWrapper):
                    self.seed(wrapper.seed)
        self._terminated = False

    # Iterating ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Items of one nominal pass of the graph (TypeError where a stream has no length)."""
        return len(self.datapipe)

    def __iter__(self) -> DataLoader2Iterator:
        if self._terminated:
            raise LoaderShutdownError("this loader was shut down; make another one to iterate")
        self._drop_items("a newer one was made")
        self._begin()
        return DataLoader2Iterator(self, self._iterator_number)

    def _begin(self) -> None:
        """Begins an iteration, or goes on with one from a state."""
        service, run, stream = self.reading_service, self._run, self._stream
        if not self._initialized or (stream is not None and stream.pending is not None):
            self._initialize()
            run = self._run
        if stream is not None:
            generator = stream.begin(self._generator, self._seeded)
        else:  # never touches torch's generator: indexed graphs have seeds of their own
            generator = self._generator if self._seeded else SeedGenerator(0)
        reset = service.initialize_iteration(generator)
        if run is None:
            if reset is not None:
                self.datapipe = reset(self.datapipe)
            assert stream is not None
            service.agree(lambda: stream.standing(self.datapipe))
            graph = self._dressed(self._worn)
            if self._worn:
                self._look_for_ledgers(graph)
            self._items = service.iterate(graph)
            stream.begun()
        else:
            run.begin()
            self._reset = reset
            service.agree(run.standing)
            self._items = self._indexed_items()
        self._iterating, self._interrupted = True, False

    def _initialize(self) -> None:
        service, place = self.reading_service, None if self._stream is None else self._stream.pending
        if self._stream is not None:
            self._stream.look()
        if place is not None and isinstance(service, CheckpointableReadingServiceInterface):
            graph = service.restore(self.datapipe, place)
        else:
            graph = service.initialize(self.datapipe if self._run is None else self._run.built)
        if self._run is not None:
            if not isinstance(graph, IndexedDataPipe):
                raise LoaderError(
                    f"{type(self.reading_service).__name__}.initialize made a stream of an indexed graph, which has "
                    "no place to resume from"
                )
            if graph is not self._run.built:
                run = IndexedRun(graph)
                run.worn = self._run.worn
                run.move(self._run.consumed_samples, self._run.journal)
                run.placed, self._run = self._run.placed, run
        self.datapipe = graph
        self._initialized = True

    def _indexed_items(self) -> Iterator[Any]:
        run = self._run
        assert run is not None
        graph = run.graph if self._reset is None else self._reset(run.graph)
        return self.reading_service.iterate(graph)

    def _remake_items(self) -> None:
        if self._iterating:
            _close(self._items)
            self._items = self._indexed_items()

    def _drop_items(self, reason: str) -> None:
        """Invalidates the iterator that is out, and drops what was read ahead for it."""
        self._iterator_number += 1
        self._invalid_because = reason
        _close(self._items)
        self._items = iter(())
        if self._iterating:
            self._iterating = False
            self.reading_service.finalize_iteration()

    def _at_end(self) -> None:
        """The iterator that is out came to the end."""
        if self._run is not None:
            self._run.through = True
        if self._stream is not None:
            self._stream.through = True
        self._iterating = False
        self.reading_service.finalize_iteration()

    def _begin_again(self) -> None:
        """Makes the items anew from the first that was not delivered; another Ctrl-C here changes nothing."""
        if self._run is None:
            self._drop_items("it was interrupted")
            self._interrupted = False
            self._refuse()
        else:
            _close(self._items)
            self._run.move(self._run.consumed_samples)
            self._items = self._indexed_items()
            self._interrupted = False

    def _refuse(self) -> None:
        if self._terminated:
            raise LoaderShutdownError("this loader was shut down; make another one to iterate")
        raise IteratorInvalidatedError(
            f"this iterator has been invalidated: {self._invalid_because}; take a new iter(loader)"
        )

    def _look_for_ledgers(self, graph: DataPipe) -> None:
        self._ledgers = ledgers_of(graph)
        for ledger in self._ledgers:
            ledger.watch(self._waits)

    # Adapters on a loader that runs ------------------------------------------------------------------------

    def put_on(self, adapter: Adapter) -> None:
        """Puts an adapter that keeps the items on, between two of them: see `tokenpipe.adapters.applied`."""
        if self._terminated:
            raise LoaderShutdownError("this loader was shut down: nothing can be put on it any more")
        if not isinstance(adapter, Adapter) or not adapter.keeps_items:
            raise GraphError(
                f"{adapter!r:.80} may change the items (it does not say keeps_items), so it cannot be put on a loader "
                "that runs: DataLoader2(graph, adapter) would do"
            )
        self._wear([*(self._worn if self._run is None else self._run.worn), adapter])

    def take_off(self, adapter: Adapter) -> None:
        """Takes it off again, also after the loader was shut down."""
        worn = list(self._worn if self._run is None else self._run.worn)
        del worn[max(i for i, other in enumerate(worn) if other is adapter)]
        self._wear(worn)

    def _dressed(self, adapters: "list[Adapter]") -> DataPipe:
        """The stream that runs with these on."""
        graph = self.datapipe
        for adapter in adapters:
            graph = adapter(graph)
        return graph

    def _wear(self, adapters: "list[Adapter]") -> None:
        if self._run is not None:
            self._run.wear(adapters)
            self._look_for_ledgers(self._run.graph)
            if not self._terminated:
                self._remake_items()
        elif self._terminated:
            self._worn = adapters
        else:
            self._dressed(adapters)  # raises before anything is broken off
            if not self._iterating:
                self._worn = adapters
                return
            assert self._stream is not None
            state = self._stream.state_dict(self._generator, self._seeded)
            self._generator, self._seeded = self._stream.load_state_dict(state)
            _close(self._items)
            self.reading_service.finalize_iteration()
            before, self._worn = self._worn, adapters
            try:
                self._begin()
            except BaseException:
                self._worn = before  # the next iteration goes on from the same place, without
                self._drop_items("an adapter could not be put on it")
                raise

    def seed(self, seed: int) -> None:
        """Seeds the random nodes of a stream, from the next `iter()` on; later epochs go on from there.

        Raises ValueError unless 0 ≤ seed < 2**64. The nodes of indexed graphs have seeds of their own.
        """
        generator = SeedGenerator(0)
        generator.seed(seed)  # None is no seed here
        if self._run is not None and getattr(self.reading_service, "reset_fn", None) is None:
            warn(
                "seed() reaches the random nodes of streams, and this graph has none: indexed nodes take their "
                "seeds as arguments (permute(seed=...), shard_ranks(seed=...))",
                LoaderWarning,
                stacklevel=2,
            )
        self._generator, self._seeded = generator, True

    def state_dict(self, step: "int | None" = None) -> "dict[str, Any]":
        """Where the run stands, JSON-able; what was read ahead does not count.

        Of an indexed graph below 64 KiB and the same on every rank. Of a stream each rank's own; it holds what the
        nodes say of their places. Raises LoaderError for a stream whose service knows no place.

        Args:
            step: the state when this many steps are done, whatever was handed out; left out: now. Indexed graphs only.
        """
        if self._stream is None or step is not None:
            state = super().state_dict(step)
        else:
            state = self._stream.state_dict(self._generator, self._seeded)
        return state | noted(self._ledgers, state.get("consumed_samples"))

    def load_state_dict(self, state: Any, amend: bool = False) -> None:
        """Goes on where a state says; invalidates the iterator. A stream's next `iter()` goes on inside its epoch.

        A stream goes on with the same graph, ranks and workers alone: StateMismatchError says what differs. Of an
        indexed graph: see IndexedLoader.
        """
        if self._stream is None or amend:
            super().load_state_dict(state, amend)
        else:
            generator, seeded = self._stream.load_state_dict(state)
            self._generator, self._seeded = generator, seeded
            self._drop_items("a state was loaded")
        load_noted(self._ledgers, state)

    @classmethod
    def from_state(
        cls,
        state: Any,
        datapipe: DataPipe,
        reading_service: "ReadingServiceInterface | None" = None,
        amend: bool = False,
    ) -> "DataLoader2":
        """A loader over this graph that goes on where the state says (amend: see `load_state_dict`)."""
        loader = cls(datapipe, reading_service=reading_service)
        loader.load_state_dict(state, amend)
        return loader

    # The end ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the service; the loader cannot be iterated afterwards. Calling it again does nothing."""
        if self._terminated:
            return
        self._terminated = True
        self._drop_items("the loader was shut down")
        self.reading_service.finalize()

    def __enter__(self) -> "DataLoader2":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not getattr(self, "_terminated", True):
            self.shutdown()


def _copied(datapipe: DataPipe) -> DataPipe:
    try:
        return copy.deepcopy(datapipe)
    except Exception as error:
        raise ArgumentTypeError(
            f"the graph cannot be copied ({type(error).__name__}: {error}); a node holds something that cannot, such "
            "as an open file: open it in __iter__ instead"
        ) from error


def _close(items: Iterator[Any]) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
