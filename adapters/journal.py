"""A run's changes, written into its graph."""

import itertools

from ..datapipes._torch import DataPipe
from ..datapipes.audit.ledger import spaces_by_name
from ..datapipes.batch import batcher_of
from ..datapipes.blend import Blender
from ..datapipes.core import MAX_NUMBER, IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError, JournalError
from ..datapipes.exclude import Excluder
from ..datapipes.fingerprint import order_of, source_identity
from ..datapipes.grow import Generations, GoneSource, part_of_source
from ..datapipes.journal import (
    GrownEntry,
    Journal,
    WeightsEntry,
    blends_in,
    number_at,
    path_to_blend,
    path_to_source,
)
from ..datapipes.jump import Jumper
from ..datapipes.phases import WeightChange
from ..datapipes.steps import StepTable
from .base import Adapter
from .surgery import rewritten

__all__ = ["ApplyJournal", "gone_blends", "with_rosters"]


class ApplyJournal(Adapter):
    """The graph as the journal's changes make it: sources that came and went, phases of its blends, jumps,
    masked rows, breakpoints of its steps.

    Apply it to the graph as it was built, without a resume skip. Raises JournalError where the journal
    changes something that the graph does not have.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def __call__(self, datapipe: DataPipe) -> IndexedDataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            raise ArgumentTypeError(f"a stream ({type(datapipe).__name__}) has no journal")
        journal = self.journal
        graph = with_rosters(datapipe, journal)
        if journal.jumps:
            order = order_of(graph)
            graph = rewritten(graph, {id(order): Jumper(order, [(e.sample, e.samples) for e in journal.jumps])})
        names = {entry.blend for entry in journal.weights} | {r.blend for r in journal.rosters}
        paths = {name: path_to_blend(graph, name) for name in names - gone_blends(graph, journal)}
        for name, _ in sorted(paths.items(), key=lambda item: len(item[1])):  # outer blends first
            graph = self._changed(graph, name)
        # what was dropped and is gone has no tokens to place
        there = spaces_by_name(graph).keys()
        for source in dict.fromkeys(entry.source for entry in journal.grown if entry.source in there):
            graph = self._grown(graph, source)
        groups: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for entry in journal.excluded:
            if entry.source in there:
                groups.setdefault((entry.sample, entry.source), []).append((entry.first, entry.stop))
        if groups:
            order = order_of(graph)
            masked: Excluder | None = None
            for (sample, source), pairs in groups.items():
                masked = masked.also({source: pairs}, sample) if masked else Excluder(order, {source: pairs}, sample)
            graph = rewritten(graph, {id(order): masked or order})
        if journal.breakpoints is not None and (batcher := batcher_of(graph)) is not None:
            table = StepTable(journal.breakpoints, batcher.unit)
            graph = rewritten(graph, {id(batcher): batcher.with_steps(table)})
        return graph

    def _changed(self, graph: IndexedDataPipe, name: str) -> IndexedDataPipe:
        path = path_to_blend(graph, name)
        blend = path[-1][0]
        assert isinstance(blend, Blender)
        nested = any(not node.trunk and not isinstance(node, Jumper) for node, _ in path[:-1])
        changes: list[WeightChange] = []
        caps = list(blend.given_caps)
        entries: list[WeightsEntry | GrownEntry] = [e for e in self.journal.weights if e.blend == name]
        entries += [e for e in self.journal.grown if e.source in blend.sources and e.cap]
        for entry in sorted(entries, key=lambda entry: entry.sample):
            number = number_at(path, entry.sample)
            if nested and number >= (end := blend.with_changes(changes).end):
                raise JournalError(
                    f"blend {name!r} is through at its sample {end}: a change from step {entry.step} on "
                    "would change what the nodes above it have taken since"
                )
            number = min(number, MAX_NUMBER - 1)
            if isinstance(entry, GrownEntry):
                caps[blend.sources.index(entry.source)] = entry.cap
                changes.append(WeightChange(number, None, tuple(caps)))
                continue
            later = len(blend.sources) - len(entry.weights)
            if later and (later < 0 or self.journal.roster(name) is None):
                raise JournalError(
                    f"the journal has {len(entry.weights)} weights for blend {name!r} of {len(blend.sources)} sources"
                )
            changes.append(WeightChange(number, entry.weights + (0,) * later))
        return rewritten(graph, {id(blend): blend.with_changes(changes)})

    def _grown(self, graph: IndexedDataPipe, source: str) -> IndexedDataPipe:
        path = path_to_source(graph, source)
        for node, _ in path[:-1]:
            if not node.in_order and not node.trunk:
                raise JournalError(
                    f"{type(node).__name__} stands above source {source!r}: what was consumed is no prefix of the "
                    "source, so it cannot grow"
                )
        whole = path[-1][0]
        entries = [entry for entry in self.journal.grown if entry.source == source]
        after = [number_at(path, entry.sample) for entry in entries]
        cuts = [0, entries[0].had, *(entry.files for entry in entries)]
        parts = [part_of_source(whole, a, b) for a, b in itertools.pairwise(cuts)]
        return rewritten(graph, {id(whole): Generations(parts, after)})


def with_rosters(graph: IndexedDataPipe, journal: Journal, identity: bool = False) -> IndexedDataPipe:
    """The graph with all sources that its blends ever had, as they were when the run began.

    A source that was dropped and is not there any more (or is another by now) is a GoneSource.

    identity: every dropped source is, so that the graph says the same with and without their files.
    Raises JournalError where a source is drawn and not there, or there and not in the journal.
    """
    there = [roster for roster in journal.rosters if roster.blend not in gone_blends(graph, journal)]
    for roster in sorted(there, key=lambda roster: len(path_to_blend(graph, roster.blend))):  # outer blends first
        if roster.blend in gone_blends(graph, journal):  # with a dropped source of the outer one
            continue
        blend = path_to_blend(graph, roster.blend)[-1][0]
        assert isinstance(blend, Blender)
        present = dict(zip(blend.sources, blend.children, strict=True))
        children = []
        for row in roster.rows:
            child = present.pop(row.source, None)
            if child is None and blend.schedule:
                raise JournalError(
                    f"source {row.source!r} is not in this graph, and its blend has a schedule, which then cannot say "
                    "what came before: leave the source and its files there (weight 0 from here on draws nothing of it)"
                )
            if row.dropped and (identity or child is None or source_identity(child) != row.dropped):
                grew = any(entry.source == row.source for entry in journal.grown)  # its epochs have several lengths
                child = GoneSource(row.source, 0 if grew else row.length, blend.sequence_length, row.dropped)
            if child is None:
                raise JournalError(
                    f"source {row.source!r} belongs to the run and is not in this graph; drop_source (or amend=True "
                    "when the state is loaded) leaves it out from then on"
                )
            children.append(child)
        if present:
            raise JournalError(
                f"source {next(iter(present))!r} is in this graph and not in the run; add_source (or amend=True when "
                "the state is loaded) takes it in from then on"
            )
        weights, caps = [row.weight for row in roster.rows], [row.cap or None for row in roster.rows]
        graph = rewritten(graph, {id(blend): blend.with_sources(children, weights, caps, bool(roster.exact))})
    return graph


def gone_blends(graph: IndexedDataPipe, journal: Journal) -> "set[str]":
    """Blends of the journal that are not in the graph; some may be, where sources were dropped."""
    if not any(row.dropped for roster in journal.rosters for row in roster.rows):
        return set()
    named = {roster.blend for roster in journal.rosters} | {entry.blend for entry in journal.weights}
    return named - {name for name, _ in blends_in(graph) if name is not None}
