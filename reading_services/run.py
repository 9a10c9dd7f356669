"""Where an indexed run stands, and what can be asked of it.

The graph that runs is a pure function of three things: the graph as it was built, the journal, and the
sample number from which it goes on. Every move (a seek, a loaded state, new weights) makes it anew.
"""

from typing import Any

from ..adapters.base import Adapter
from ..adapters.journal import ApplyJournal, gone_blends, with_rosters
from ..adapters.resume import ResumeSkip
from ..datapipes.audit.ledger import consumed_by_source, gone_sources, steps_of
from ..datapipes.batch import SampleBatcher, batcher_of
from ..datapipes.bound import Limiter, Once
from ..datapipes.core import MAX_NUMBER, IndexedDataPipe, as_count, nodes_of
from ..datapipes.errors import GraphError, JournalError, OutOfRangeError, StateMismatchError
from ..datapipes.journal import Journal, blend_to_change
from ..datapipes.shard import RankSharder
from ..datapipes.steps import Schedule, StepTable
from .amend import amended, nothing_changed
from .changes import Moment
from .parse import parse_state
from .state import MOST_BYTES, State, identity_of, mismatches, size_of

__all__ = ["IndexedRun"]


class IndexedRun:
    """One run over an indexed graph.

    graph: what runs now; its item 0 is the first that was not delivered when it was made.
    delivered: items of it that were handed out since.
    """

    def __init__(self, graph: IndexedDataPipe) -> None:
        self.earlier: list[IndexedDataPipe] = []  # as built before sources came: an earlier state may want them
        self.built = graph
        self.journal = Journal()
        self.graph = graph
        self.delivered = 0
        self._begin = graph.first_sample
        self._table, _ = steps_of(graph)
        batcher = batcher_of(graph)
        self._schedule: Schedule = ((0, self._table.unit),) if batcher is None else batcher.schedule
        self.anew_each_time = any(isinstance(node, Once) for node in nodes_of(graph))
        self.worn: list[Adapter] = []  # put on while it runs
        self.placed = False  # a seek or a state said where the next iteration begins
        self.through = False  # the last iteration came to the end

    # Where it stands ------------------------------------------------------------------------------------

    @property
    def steps(self) -> StepTable:
        return self._table

    @property
    def consumed_samples(self) -> int:
        """Samples that are done, over all ranks; what was prefetched but not delivered does not count."""
        if not self.graph.finite:
            return self.graph.first_sample + self.delivered * self._table.unit
        end = self.graph.last_sample
        # at an uneven end some ranks have had an item less; what is through is through on all of them
        return end if self.through else min(self.graph.first_sample + self.delivered * self._table.unit, end)

    def next_step(self) -> int:
        """The first step of which nothing was delivered."""
        return self._table.next_step(self.consumed_samples)

    def move(self, sample: int, journal: "Journal | None" = None, built: "IndexedDataPipe | None" = None) -> None:
        """Goes on from this sample number. Nothing changes where that raises."""
        journal = self.journal if journal is None else journal
        built = self.built if built is None else built
        graph = self._dressed(ResumeSkip(sample).of_indexed(ApplyJournal(journal)(built)))
        if built is not self.built:
            self.earlier = [g for g in (*self.earlier, self.built) if g is not built]
            self.built = built
        self._table, _ = steps_of(graph)
        self.graph, self.journal, self.delivered, self.through = graph, journal, 0, False

    def _dressed(self, graph: IndexedDataPipe) -> IndexedDataPipe:
        for adapter in self.worn:
            dressed = adapter(graph)
            if not isinstance(dressed, IndexedDataPipe):
                raise GraphError(f"{type(adapter).__name__} made a stream of an indexed graph")
            graph = dressed
        return graph

    def wear(self, adapters: "list[Adapter]") -> None:
        """Goes on, where it is, with these adapters put on. Nothing changes where that raises."""
        before, through = self.worn, self.through
        self.worn = adapters
        try:
            self.move(self.consumed_samples)
        except BaseException:
            self.worn = before
            raise
        self.through = through

    def unskipped(self) -> IndexedDataPipe:
        """The graph with its journal, from the run's first sample on, wherever it stands."""
        return ApplyJournal(self.journal)(self.built)

    def begin(self) -> None:
        """What a new `iter()` does: goes on; a pass that is through, or one of `once`, begins anew."""
        if (self.through or self.anew_each_time) and not self.placed:
            self.move(self._begin)
        elif self.delivered:
            self.move(self.consumed_samples)
        self.placed = self.through = False

    def seek(self, step: int) -> None:
        """Goes on at a step's first sample. Raises OutOfRangeError beyond the run's end."""
        self.move(self._sample_of(step))
        self.placed = True

    def _sample_of(self, step: int) -> int:
        """Where a step begins; the end, for the step after the last."""
        step = as_count("step", step, 0)
        sample, last = self._table.start(step), self.graph.last_sample
        if step and self._table.start(step - 1) < last <= sample:
            return last
        if sample > last or sample >= MAX_NUMBER:
            raise OutOfRangeError(f"step {step} would begin at sample {sample}, but the run ends at sample {last}")
        if sample < self._begin:
            raise OutOfRangeError(f"step {step} begins at sample {sample}; this run begins at sample {self._begin}")
        return sample

    def restart(self) -> None:
        """Goes on from the run's first sample: 0, or what the graph itself skips to."""
        self.move(self._begin)
        self.placed = True

    # The journal ----------------------------------------------------------------------------------------

    @property
    def moment(self) -> Moment:
        """Where a change of the run would begin. Raises JournalError before one that is recorded already."""
        step = self.next_step()
        self.journal.check_from(step, self._table.start(step))
        return Moment(self.built, self.graph, self.journal, self._table, step)

    def record(self, changed: "tuple[IndexedDataPipe, Journal]") -> None:
        """Goes on with a changed graph and journal. Nothing changes where that raises."""
        built, journal = changed
        without = State(self.consumed_samples, journal, self._schedule, {}, {}).as_json()
        # a quarter is for what the graph is (which is not read here), an eighth for breakpoints of later resumes
        if size_of(without) > MOST_BYTES * 5 // 8:
            raise JournalError(
                f"the journal is full ({len(self.journal.entries)} changes): a state has at most "
                f"{MOST_BYTES // 1024} KiB"
            )
        consumed, through = self.consumed_samples, self.through
        self.move(consumed, journal, built)
        self.through = through and consumed == self.graph.last_sample  # the change may have moved the end

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self, step: "int | None" = None) -> dict[str, Any]:
        """The state now, or when `step` steps are done, whatever was handed out (as after seek(step))."""
        consumed = self.consumed_samples if step is None else self._sample_of(step)
        identity = identity_of(with_rosters(self.built, self.journal, identity=True))
        return State(consumed, self.journal, self._schedule, *identity).as_json()

    def standing(self) -> dict[str, Any]:
        """What is the same on all ranks of a sound run: the state, and how steps are dealt and where they end."""
        kinds = (RankSharder, SampleBatcher, Limiter, Once)
        layout = [[n.functional_name, n.order_settings] for n in nodes_of(self.built) if isinstance(n, kinds)]
        return self.state_dict() | {"layout": layout}

    def load_state_dict(self, value: Any, amend: bool = False) -> None:
        """Goes on where a state says. Raises StateError, StateMismatchError, JournalError, BatchSizeError."""
        state = parse_state(value)
        # sources that came since the state was saved are no part of it
        built = next((g for g in [self.built, *reversed(self.earlier)] if not mismatches(state, g)), None)
        journal = state.journal
        if built is None:
            built = self.built
            journal = amended(state, built) if amend else nothing_changed(state, built)
        if state.schedule != self._schedule:
            # another global batch size from here on: a breakpoint, so that earlier steps keep their meaning
            step = state.steps.next_step(state.consumed_samples)
            table = state.steps.then(self._schedule, step)
            journal = journal.on_steps(table.breakpoints, table.start)
        for blend in {entry.blend for entry in journal.weights} - gone_blends(built, journal):
            blend_to_change(built, blend=blend)
        if any(row.dropped for roster in journal.rosters for row in roster.rows):
            self._check_there(ApplyJournal(journal)(built), state)
        self.move(state.consumed_samples, journal, built)
        self.placed = True

    def _check_there(self, graph: IndexedDataPipe, state: State) -> None:
        """Raises StateMismatchError where what is left of a step draws from a source that is gone."""
        consumed, step = state.consumed_samples, state.steps.step_of(state.consumed_samples)
        last = min(state.steps.start(step + 1), graph.last_sample)
        before, after = (consumed_by_source(graph, sample) for sample in (consumed, last))
        for source in gone_sources(graph):
            if after.get(source, 0) > before.get(source, 0):
                raise StateMismatchError(
                    f"step {step}, from sample {consumed} on, still draws from source {source!r}, which is not in this "
                    f"graph; with the source in it, or from state_dict(step={step + 1}), it would do"
                )
