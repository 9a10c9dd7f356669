"""The loader: a graph, adapted, run by a reading service, with a place that can be saved."""

import copy
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ..datapipes.audit import ledger
from ..datapipes.audit.ledger import ContentsRecord, RowDocument, WhenRecord
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import (
    ArgumentTypeError,
    IteratorInvalidatedError,
    LoaderError,
    LoaderShutdownError,
    LoaderWarning,
)
from ..datapipes.journal import Journal
from ..datapipes.plan import Plan, plan
from ..datapipes.plan.counts import SourceCounts
from ..datapipes.rank_zero import warn
from .changes import Moment
from .in_process import InProcessReadingService
from .interface import ReadingServiceInterface
from .metrics import Waits, run_metrics
from .run import IndexedRun
from .seeds import SeedGenerator

__all__ = ["DataLoader2", "DataLoader2Iterator"]

GraphPass = Callable[[DataPipe], DataPipe]


class DataLoader2Iterator:
    """What `iter(loader)` gives. A newer one, a seek or a loaded state invalidates it.

    Attributes other than these are those of the graph's own iterator.
    """

    def __init__(self, loader: "DataLoader2", number: int) -> None:
        self._loader, self._number = loader, number
        self._limit: int | None = None
        self._left = 0
        self._ended = False

    def __iter__(self) -> "DataLoader2Iterator":
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._number != loader._iterator_number:
            loader._refuse()
        if self._limit is not None:
            if self._left <= 0:
                raise StopIteration
            self._left -= 1
        try:
            if loader._interrupted:
                loader._begin_again()
            began = perf_counter()
            item = next(loader._items)
            loader._waits.add(perf_counter() - began)
            if loader._run is not None:
                loader._run.delivered += 1
            return item
        except StopIteration:
            if not self._ended:
                self._ended = True
                loader._at_end()
            raise
        except Exception:
            loader.shutdown()
            raise
        except BaseException:  # Ctrl-C: what was not counted was not delivered, and is made again
            loader._interrupted = True
            raise

    def limit(self, num_batches: "int | None") -> None:
        """Stops after this many more items (None: no limit); `resume()` then allows as many again."""
        self._limit = None if num_batches is None else as_count("num_batches", num_batches, 0)
        self._left = self._limit or 0

    def resume(self) -> None:
        """Goes on after a limit was reached."""
        self._left = self._limit or 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader._items, name)


class DataLoader2:
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
        adapters = [] if datapipe_adapter_fn is None else datapipe_adapter_fn
        for adapter in adapters if isinstance(adapters, Sequence) else [adapters]:
            if not callable(adapter):
                raise ArgumentTypeError(f"an adapter is a function from graph to graph, got {adapter!r}")
            graph = adapter(graph)
            if not isinstance(graph, (IterDataPipe, MapDataPipe)):
                raise ArgumentTypeError(f"adapter {adapter!r} gave back no graph but {graph!r}")
        self.datapipe = graph
        self.reading_service: ReadingServiceInterface = reading_service or InProcessReadingService()
        self._run = IndexedRun(graph) if isinstance(graph, IndexedDataPipe) else None
        self._iterator_number = 0
        self._invalid_because = "a newer one was made"
        self._items: Iterator[Any] = iter(())
        self._iterating = self._interrupted = False
        self._reset: GraphPass | None = None
        self._initialized = False
        self._generator, self._seeded = SeedGenerator(0), False
        self._waits = Waits()
        self._counts: SourceCounts | None = None
        self._terminated = False

    # Iterating ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Items of one nominal pass of the graph (TypeError where a stream has no length)."""
        return len(self.datapipe)

    def __iter__(self) -> DataLoader2Iterator:
        if self._terminated:
            raise LoaderShutdownError("this loader was shut down; make another one to iterate")
        self._drop_items("a newer one was made")
        if not self._initialized:
            self._initialize()
        service, run = self.reading_service, self._run
        if not self._seeded:
            # indexed graphs never touch torch's generator: their orders have seeds of their own
            self._generator = SeedGenerator(0 if run is not None else None)
        reset = service.initialize_iteration(self._generator)
        if run is None:
            if reset is not None:
                self.datapipe = reset(self.datapipe)
            self._items = service.iterate(self.datapipe)
        else:
            run.begin()
            self._reset = reset
            self._items = self._indexed_items()
        self._iterating, self._interrupted = True, False
        return DataLoader2Iterator(self, self._iterator_number)

    def _initialize(self) -> None:
        graph = self.reading_service.initialize(self.datapipe if self._run is None else self._run.built)
        if self._run is not None:
            if not isinstance(graph, IndexedDataPipe):
                raise LoaderError(
                    f"{type(self.reading_service).__name__}.initialize made a stream of an indexed graph, which has "
                    "no place to resume from"
                )
            if graph is not self._run.built:
                run = IndexedRun(graph)
                run.move(self._run.consumed_samples, self._run.journal)
                run.placed, self._run = self._run.placed, run
        self.datapipe = graph
        self._initialized = True

    def _indexed_items(self) -> Iterator[Any]:
        run = self._run
        assert run is not None
        graph = run.graph if self._reset is None else self._reset(run.graph)
        return self.reading_service.iterate(graph)

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

    # Where an indexed run stands ------------------------------------------------------------------------

    def _indexed(self, what: str) -> IndexedRun:
        if self._run is None:
            raise LoaderError(f"{what} needs an indexed graph; {type(self.datapipe).__name__} is a stream")
        return self._run

    def state_dict(self, step: "int | None" = None) -> "dict[str, Any]":
        """Where the run stands: JSON-able, below 64 KiB, the same on every rank.

        Args:
            step: the state when this many steps are done, whatever was handed out; left out: now.
        """
        return self._indexed("state_dict").state_dict(step)

    def load_state_dict(self, state: Any, amend: bool = False) -> None:
        """Goes on where a state says, on this graph's ranks and micro-batches. Invalidates the iterator.

        Args:
            state: what `state_dict` gave, or that as JSON text. The journal is that state's from here on.
            amend: where this graph's blend has other weights or sources, or its sources have more files, that is
                a change of the run from the next step on, and no error. A source with other files or settings
                under its old name counts as another source.

        Raises StateError for what is no state, StateMismatchError (with every difference) for one of another
        order, BatchSizeError for one from inside a step whose rest dp_size × micro-batch does not divide.
        """
        self._indexed("load_state_dict").load_state_dict(state, amend)
        self._drop_items("a state was loaded")

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

    def seek(self, step: int) -> None:
        """Goes on at a step's first sample, backwards or forwards; the journal stays. Invalidates the iterator."""
        self._indexed("seek").seek(step)
        self._drop_items(f"the loader was moved to step {step}")

    def restart(self) -> None:
        """From the run's first sample on: seek(0), or what a `skip` in the graph begins with."""
        self._indexed("restart").restart()
        self._drop_items("the loader was restarted")

    # Changes of the run: from the first step on of which nothing was delivered ---------------------------
    #
    # Every rank must make the same ones at the same step. The iterator stays valid; what was read ahead is
    # dropped. A resume is exact afterwards: nothing seen comes again, nothing unseen is lost but what was named.

    def update_weights(
        self, weights: Any = None, temperature: "float | None" = None, blend: "str | None" = None
    ) -> None:
        """New weights of a blend.

        Args:
            weights: {source: weight} or a list in the order of the sources; left out, their lengths.
            temperature: share ** (1 / temperature), as in `blend`.
            blend: the name of one of several blends; left out, the one that has these sources, else the topmost.

        Raises WeightsError, JournalError (no blend, a permute above it, a change before a recorded one, a blend
        below others that is through).
        """
        self._change("update_weights", lambda moment: moment.weights(weights, temperature, blend))

    def add_source(
        self,
        source: IndexedDataPipe,
        weights: Any = None,
        temperature: "float | None" = None,
        blend: "str | None" = None,
    ) -> None:
        """One more source for a blend; one that was dropped goes on where it stopped. A graph for a later resume
        has it too.

        Args:
            source: as the blend's others: sliced and permuted, with a name of its own.
            weights: of all sources from now on; of an exact union left out, their lengths.

        Raises JournalError, WeightsError, ConfigurationError.
        """
        self._change("add_source", lambda moment: moment.add(source, weights, temperature, blend))

    def drop_source(self, source: str, weights: Any = None, blend: "str | None" = None) -> None:
        """A source is drawn no more. Its files may go, and a graph for a later resume may leave it out: earlier
        steps then show its name without text.

        Args:
            weights: of the others from now on; left out, they keep their ratio.

        Raises JournalError, WeightsError.
        """
        self._change("drop_source", lambda moment: moment.drop(source, weights, blend))

    def grow_source(self, source: str, paths: Any, dtype: object = None) -> None:
        """More files for a source, behind those it has. The unseen rest of its epoch and the new files are mixed
        evenly; nothing seen comes again before all of it is through. A later graph lists the files in this order.

        Args:
            paths, dtype: as in TokenReader.

        Raises JournalError for a source that cannot grow, TokenFileError.
        """
        self._change("grow_source", lambda moment: moment.grow(source, paths, dtype))

    def update_global_batch_size(self, global_batch_size: "int | Sequence[tuple[int, int]]") -> None:
        """Another number of samples a step, or a schedule of (step, size). Raises BatchSizeError."""
        self._change("update_global_batch_size", lambda moment: moment.batch_size(global_batch_size))

    def jump(self, steps: int) -> None:
        """Leaves out the data of the next `steps` steps; the step counter goes on. Raises OutOfRangeError."""
        self._change("jump", lambda moment: moment.jump(steps))

    def exclude(
        self,
        source: str,
        tokens: "Sequence[tuple[int, int]] | None" = None,
        documents: "Sequence[int | str] | int | str | None" = None,
    ) -> None:
        """Masks every label of the rows that hold these tokens; they keep their places, as all others do.

        Args:
            tokens: [(first, stop), …] of the source, stop exclusive.
            documents: their numbers in the source, or their ids.

        Raises ConfigurationError, OutOfRangeError.
        """
        self._change("exclude", lambda moment: moment.exclude(source, tokens, documents))

    def _change(self, what: str, make: "Callable[[Moment], tuple[IndexedDataPipe, Journal]]") -> None:
        run = self._indexed(what)
        run.record(make(run.moment))
        if self._iterating:
            _close(self._items)
            self._items = self._indexed_items()

    @property
    def consumed_samples(self) -> int:
        """The run's samples that are done, over all ranks."""
        return self._indexed("consumed_samples").consumed_samples

    @property
    def consumed_by_source(self) -> "dict[str, int]":
        """How many samples each source has given so far, repeats counted."""
        run = self._indexed("consumed_by_source")
        return ledger.consumed_by_source(run.graph, run.consumed_samples)

    @property
    def step(self) -> int:
        """The step that the next item belongs to."""
        run = self._indexed("step")
        return run.steps.step_of(run.consumed_samples)

    def micro_batches(self, step: int) -> int:
        """How many items of this rank make up a step."""
        steps = self._indexed("micro_batches").steps
        return steps.size(as_count("step", step, 0)) // steps.unit

    def tokens(self, step: int, rows: "Sequence[int] | None" = None) -> "npt.NDArray[np.int64]":
        """The tokens of a step: int64 (n, sequence_length + 1), a row for each record of `contents`, or for
        those at these indices alone.
        """
        return ledger.tokens(self._indexed("tokens").graph, step, rows)

    def documents(self, step: int) -> "list[list[RowDocument]]":
        """The documents of a step's rows: for each record of `contents` the stretches that make it up, in order."""
        return ledger.documents(self._indexed("documents").graph, step)

    def contents(self, step: int) -> "list[ContentsRecord]":
        """What a step holds: a record for each row of the whole step, all ranks, by sample number."""
        return ledger.contents(self._indexed("contents").graph, step)

    def when(self, source: str, token: "int | range", steps: range) -> "list[WhenRecord]":
        """Which rows of these steps have the source's token, or one of a range of its tokens, as a label."""
        return ledger.when(self._indexed("when").graph, source, token, steps)

    def plan(
        self,
        steps: int,
        holdouts: "Sequence[IndexedDataPipe]" = (),
        dp_size: "int | None" = None,
        micro_batch_size: "int | None" = None,
    ) -> Plan:
        """What the next `steps` steps will take of each source, and what of it will surprise: print it, draw it.

        From the step on that the next item belongs to (all of it, also what was delivered), journal included.

        Args:
            holdouts: evaluation graphs of which nothing may be trained on.
            dp_size, micro_batch_size: a layout for which the batch sizes shall be checked, other than the graph's.
        """
        return plan(self._indexed("plan").unskipped(), steps, self.step, holdouts, dp_size, micro_batch_size)

    def metrics(self) -> "dict[str, int | float]":
        """Flat numbers for any logger: {"data/step": 500, "data/share/prose": 0.8, …}; looking changes nothing.

        consumed_samples, consumed_tokens, step: the run's, over all ranks. share/NAME: of what was consumed so far.
        epoch/NAME: how far the source is, 1.37. phase: how many changes of weights are in force. wait/mean_ms,
        wait/p99_ms: of the last 1,024 `next()` calls of this rank; wait/total_s: of all. On a stream only the waits.
        """
        waits = self._waits.metrics()
        if self._run is None:
            return waits
        if self._counts is None or self._counts.graph is not self._run.graph:
            self._counts = SourceCounts(self._run.graph)
        return run_metrics(self._run, self._counts) | waits

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
