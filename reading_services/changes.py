"""Changes of a running run, each as (graph as built, journal) → (graph as built, journal).

All hold from the next step's first sample, so nothing that was delivered is another thing afterwards.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..adapters.journal import with_rosters
from ..adapters.surgery import rewritten
from ..datapipes.arguments import arguments_of, given_with
from ..datapipes.audit.ledger import origin_of, spaces_by_name
from ..datapipes.blend import Blender
from ..datapipes.bound import Once
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, JournalError, OutOfRangeError, WeightsError
from ..datapipes.exclude import checked_ranges
from ..datapipes.fingerprint import file_digest, order_of, source_identity
from ..datapipes.formats.table import integers
from ..datapipes.grow import part_of_source, reader_of, with_reader
from ..datapipes.journal import (
    ExcludedEntry,
    GrownEntry,
    Journal,
    JumpEntry,
    Roster,
    RosterRow,
    WeightsEntry,
    blend_to_change,
    blends_in,
    name_of_blend,
    number_at,
    path_to_blend,
    path_to_source,
)
from ..datapipes.read import TokenReader
from ..datapipes.steps import StepTable, as_schedule
from ..datapipes.weights import as_shares, quantise, tempered

__all__ = ["Moment", "document_range"]

Changed = tuple[IndexedDataPipe, Journal]


@dataclass(frozen=True)
class Moment:
    """Where a run stands when it is changed.

    built: its graph without the journal; running: with it. step: the next one of which nothing was delivered.
    """

    built: IndexedDataPipe
    running: IndexedDataPipe
    journal: Journal
    steps: StepTable
    step: int

    @property
    def sample(self) -> int:
        return self.steps.start(self.step)

    # The mixture ----------------------------------------------------------------------------------------

    def weights(self, weights: Any, temperature: "float | None", blend: "str | None") -> Changed:
        """Other weights of a blend; weights=None: by its sources' lengths, with a temperature."""
        names = list(weights) if isinstance(weights, dict) and blend is None else None
        target, name = self._blend(names, blend)
        if weights is None and temperature is None:
            raise WeightsError("update_weights takes weights, a temperature, or both")
        return self.built, self._weighted(self.journal, target, name, weights, temperature)

    def add(self, source: IndexedDataPipe, weights: Any, temperature: "float | None", blend: "str | None") -> Changed:
        """One more source; one that was dropped goes on where it stopped."""
        if not isinstance(source, IndexedDataPipe) or not source.name:
            raise ArgumentTypeError(f"add_source takes an indexed node with a name, got {source!r:.80}")
        target, name = self._blend(None, blend)
        roster = self.journal.roster(name) or Roster.of(target, name)
        if source.name in roster.live:
            raise JournalError(f"source {source.name!r} is in the blend already; grow_source adds files to it")
        if source.sequence_length != target.sequence_length:
            raise ConfigurationError(
                f"source {source.name!r} has sequence_length {source.sequence_length}, the blend's others "
                f"{target.sequence_length}"
            )
        if source.name in roster.sources:
            row = next(row for row in roster.rows if row.source == source.name)
            if row.dropped != source_identity(source):
                raise JournalError(
                    f"source {source.name!r} was dropped from this run with other contents or settings; give the new "
                    "one another name"
                )
            roster = roster.changed(source.name, dropped="")
        else:
            roster = roster._replace(rows=(*roster.rows, RosterRow(source.name, 0, 0, len(source), "")))
        blender = path_to_blend(self.built, name)[-1][0]
        assert isinstance(blender, Blender)
        built = self.built
        if source.name not in blender.sources:
            built = rewritten(built, {id(blender): _with_source(blender, source)})
            for _, path in blends_in(built):
                path[-1][0].check_names()
        journal = self.journal.with_roster(roster)
        now = path_to_blend(with_rosters(built, journal), name)[-1][0]
        assert isinstance(now, Blender)
        if weights is None and temperature is None and not roster.exact:
            raise WeightsError(f"add_source({source.name!r}) needs the weights of all sources from here on")
        return built, self._weighted(journal, now, name, weights, temperature)

    def drop(self, source: str, weights: Any, blend: "str | None") -> Changed:
        """A source is drawn no more; its files may go. weights=None: the others keep their ratio."""
        target, name = self._blend(None, blend)
        roster = self.journal.roster(name) or Roster.of(target, name)
        if source not in roster.live:
            raise JournalError(f"no source {source!r} to drop; the sources are {', '.join(map(repr, roster.live))}")
        if weights is None:
            held = dict(zip(target.sources, self._in_force(target, name), strict=True))
            weights = {live: held[live] for live in roster.live if live != source}
            if not any(weights.values()):
                raise WeightsError(f"without source {source!r} nothing would be drawn; give the others weights")
        built = path_to_blend(self.built, name)[-1][0]
        child = dict(zip(built.sources, built.children, strict=True))[source]
        roster = roster.changed(source, dropped=source_identity(child))
        journal = self.journal.with_roster(roster)
        return self.built, self._weighted(journal, target, name, weights, None)

    def grow(self, source: str, paths: Any, dtype: object) -> Changed:
        """More files at the end of a source's."""
        self._check_no_pass("grow_source")
        path = path_to_source(self.built, source)
        for node, _ in path[:-1]:
            if not (node.trunk or isinstance(node, Blender)):
                raise JournalError(
                    f"{type(node).__name__} stands above source {source!r}, and a longer source would change its order"
                )
        old, source = reader_of(path[-1][0]), path[-1][0].name
        more = TokenReader(paths, dtype, old.name, old.vocab_size, old.given_end_of_text, old.io, old.given_verify)
        counts = set(integers(more.files, "tokens").tolist())  # of other counts none is the same
        had = integers(old.files, "tokens").tolist()
        known = {file_digest(file) for file, tokens in zip(old.files, had, strict=True) if tokens in counts}
        for file in more.files:
            if file_digest(file) in known:
                raise JournalError(
                    f"{file.path}: source {source!r} has these contents already; its rows would come again"
                )
        reader = old.with_more(more)
        whole = with_reader(path[-1][0], reader)
        part_of_source(whole, len(old.files), len(reader.files))  # the new files make a source of their own
        built = rewritten(self.built, {id(path[-1][0]): whole})
        journal, cap = self.journal, 0
        for node, index in path[:-1]:
            if not isinstance(node, Blender):
                continue
            # every blend on the way may count lengths: what they were stands in its roster
            name = name_of_blend(self.built, node)
            journal = journal.with_roster(journal.roster(name) or Roster.of(node, name))
            capped = node.given_caps[index] is not None
            if capped and node.children[index] is not path[-1][0]:
                raise JournalError(
                    f"source {source!r} cannot grow below blend {node.name!r}, which caps {node.sources[index]!r}"
                )
            cap = int(node.max_epochs[source] * len(whole)) if capped else 0  # as many epochs of more
        grown = GrownEntry(self.step, self.sample, source, len(old.files), len(reader.files), cap)
        return built, journal.with_grown(grown)

    def _blend(self, names: "list[str] | None", blend: "str | None") -> "tuple[Blender, str]":
        _, name = blend_to_change(self.built, names, blend or "") if names is None else self._by_sources(names)
        running = path_to_blend(self.running, name)[-1][0]
        assert isinstance(running, Blender)
        return running, name

    def _by_sources(self, names: "list[str]") -> "tuple[Blender, str]":
        """The blend whose live sources these are, else the topmost."""
        for roster in self.journal.rosters:
            if set(roster.live) == set(names):
                return blend_to_change(self.built, blend=roster.blend)
        return blend_to_change(self.built, names)

    def _in_force(self, blend: Blender, name: str) -> tuple[int, ...]:
        """The integer weights that hold at the moment."""
        return blend.weights_at(number_at(path_to_blend(self.running, name), self.sample))

    def _weighted(
        self, journal: Journal, blend: Blender, name: str, weights: Any, temperature: "float | None"
    ) -> Journal:
        roster = journal.roster(name)
        live = blend.sources if roster is None else roster.live
        lengths = {source: float(len(child)) for source, child in zip(blend.sources, blend.children, strict=True)}
        shares = as_shares(live, weights if weights is not None else {source: lengths[source] for source in live})
        stored = dict(zip(live, quantise(live, tempered(shares, temperature)), strict=True))
        order = blend.sources if roster is None else roster.sources
        entry = WeightsEntry(self.step, self.sample, name, tuple(stored.get(source, 0) for source in order))
        return journal.with_weights(entry)

    # Steps and rows -------------------------------------------------------------------------------------

    def batch_size(self, value: Any) -> Changed:
        """Another global batch size, or schedule of them, from here on."""
        table = self.steps.then(as_schedule(value, self.steps.unit), self.step)
        return self.built, replace(self.journal, breakpoints=table.breakpoints)

    def jump(self, steps: int) -> Changed:
        """The data of the next `steps` steps is left out."""
        samples = self.steps.start(self.step + as_count("steps", steps)) - self.sample
        self._check_no_pass("jump")
        left = order_of(self.running).end - self.sample
        if samples >= left:
            raise OutOfRangeError(
                f"a jump over {steps} steps ({samples} samples) from step {self.step} would leave nothing: {left} "
                "samples are left"
            )
        return self.built, self.journal.with_jump(JumpEntry(self.step, self.sample, samples))

    def _check_no_pass(self, what: str) -> None:
        node = self.running
        while node.trunk:
            if isinstance(node, Once):
                raise JournalError(
                    f"once() is a pass in which each sample comes exactly once; {what} would change that"
                )
            node = node.datapipe

    def exclude(self, source: str, tokens: Any, documents: Any) -> Changed:
        """Rows that hold these tokens, or tokens of these documents, are masked."""
        ranges = [] if tokens is None else list(tokens)
        if documents is not None:
            several = [documents] if isinstance(documents, (int, str)) else documents
            ranges += [document_range(self.built, source, document) for document in several]
        if not ranges:
            raise ConfigurationError("exclude takes tokens=[(first, stop), …] or documents=[…] of a source")
        found = checked_ranges(self.built, {source: ranges})
        entries = [ExcludedEntry(self.step, self.sample, source, *pair) for pair in found[source]]
        return self.built, self.journal.with_excluded(*entries)


def document_range(graph: IndexedDataPipe, source: str, document: "int | str") -> tuple[int, int]:
    """Which of a source's tokens make up a document: (first, stop)."""
    return origin_of(spaces_by_name(graph), source).document_range(document)


def _with_source(blend: Blender, source: IndexedDataPipe) -> Blender:
    """The blend with one more source that is not drawn yet, also in its recipe."""
    children = (*blend.children, source)
    grown = blend.with_sources(children, (*blend.weights, 0), (*blend.given_caps, None), blend.exact)
    given = {} if blend._given is None else arguments_of(blend)

    def with_none(weights: Any) -> Any:
        return {**weights, source.name: 0} if isinstance(weights, dict) else [*weights, 0]

    said: dict[str, Any] = {"max_epochs": blend.max_epochs or None}
    if not blend.exact:
        if "weights" not in given:  # by the sources' lengths, which a further source would change
            said["temperature"] = None
        said["weights"] = with_none(given.get("weights") or dict(zip(blend.sources, blend.weights, strict=True)))
    if given.get("schedule"):
        said["schedule"] = [[number, with_none(weights)] for number, weights in given["schedule"]]
    return grown.changed(_given=given_with(blend, **said))
