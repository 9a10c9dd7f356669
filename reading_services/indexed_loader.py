"""What a loader can be asked and told where its graph is indexed: where the run stands, what it held and will hold, and
its changes while it runs.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..datapipes._torch import DataPipe
from ..datapipes.audit import ContentsRecord, RowDocument, WhenRecord, ledger
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import LoaderError
from ..datapipes.journal import Journal
from ..datapipes.notes import Ledger
from ..datapipes.plan import Plan, plan
from ..datapipes.plan.counts import SourceCounts
from .changes import Moment, document_range
from .interface import ReadingServiceInterface
from .metrics import Waits, run_metrics
from .run import IndexedRun

__all__ = ["IndexedLoader"]


class IndexedLoader(ABC):
    """The part of DataLoader2 that needs an indexed graph; on a stream each of these raises LoaderError."""

    datapipe: DataPipe
    reading_service: ReadingServiceInterface
    _run: "IndexedRun | None"
    _waits: Waits
    _counts: "SourceCounts | None"
    _ledgers: "list[Ledger]"

    @abstractmethod
    def _drop_items(self, reason: str) -> None:
        """Invalidates the iterator that is out, and drops what was read ahead for it."""

    @abstractmethod
    def _remake_items(self) -> None:
        """Makes the items of the iterator that is out anew, from the first that was not delivered."""

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
        self._remake_items()

    @property
    def consumed_samples(self) -> int:
        """The run's samples that are done, over all ranks."""
        return self._indexed("consumed_samples").consumed_samples

    @property
    def consumed_by_source(self) -> "dict[str, int]":
        """How far each source is, in samples; repeats count, and so does what a jump left out."""
        run = self._indexed("consumed_by_source")
        return ledger.consumed_by_source(run.graph, run.consumed_samples)

    @property
    def step(self) -> int:
        """The step that the next item belongs to."""
        run = self._indexed("step")
        return run.steps.step_of(run.consumed_samples)

    def recipe(self, folder: "str | os.PathLike[str] | None" = None) -> str:
        """The graph as a later resume wants it, as YAML: with all files and sources that came while it ran.

        Its weights are those that the run began with; the state's journal says what they are now. Raises RecipeError.
        """
        return self._indexed("recipe").built.recipe(folder)

    @property
    def journal(self) -> "list[str]":
        """What was changed while the run ran, a line a change, in order."""
        run = self._indexed("journal")
        return run.journal.told(run.built)

    def document_range(self, source: str, document: "int | str") -> tuple[int, int]:
        """Which of a source's tokens make up a document, by its number or id: (first, stop).

        Raises ConfigurationError, OutOfRangeError.
        """
        return document_range(self._indexed("document_range").built, source, document)

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
        wait/p99_ms: of the last 1,024 `next()` calls of this rank; wait/total_s: of all. workers/running,
        workers/replaced: of a service that has any. retried, skipped: by adapters. A stream has only what
        comes after phase.
        """
        waits = self._waits.metrics() | self.reading_service.metrics()
        for book in self._ledgers:
            waits |= book.metrics()
        if self._run is None:
            return waits
        if self._counts is None or self._counts.graph is not self._run.graph:
            self._counts = SourceCounts(self._run.graph)
        return run_metrics(self._run, self._counts) | waits
