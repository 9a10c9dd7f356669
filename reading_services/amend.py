"""A state and a graph that is not quite the saved one: what differs, as entries of the journal from here on."""

import json
from dataclasses import replace
from typing import Any

from ..adapters.journal import with_rosters
from ..datapipes.audit.ledger import sources_of
from ..datapipes.blend import Blender
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import JournalError, StateError, StateMismatchError, TokenpipeError
from ..datapipes.fingerprint import (
    brief_names,
    identity_from,
    order_of,
    place_of,
    prefix_fingerprints,
    source_identity,
    source_lines,
)
from ..datapipes.grow import part_of_source, reader_of
from ..datapipes.journal import GrownEntry, Journal, Roster, RosterRow, WeightsEntry, path_to_blend
from ..datapipes.weights import quantise
from .parse import check_roster, parse_line
from .state import State, check_same_order, identity_of, is_known, mismatches, other_mixtures, said_mixture

__all__ = ["amended", "nothing_changed"]

UNKNOWN = "?"
"""The identity of a source that a state says too little of: no source that is there has it."""


def amended(state: State, graph: IndexedDataPipe, same_sources: bool = False) -> Journal:
    """The state's journal, and from the next step on what this graph has otherwise: weights, sources that came
    or went, or have more files. A source with other files or settings under its old name counts as another one.

    same_sources: where a source is another one, that is an error at once (and no file is read again).

    Raises StateMismatchError where anything else differs, or a state says too little (more than 32 sources).
    """
    step = state.steps.next_step(state.consumed_samples)
    sample = state.steps.start(step)
    journal = state.journal
    journal.check_from(step, sample)
    try:
        blend = path_to_blend(graph)[-1][0]
    except JournalError:
        if same_sources:
            raise
        return _grown_alone(state, graph, step, sample)
    assert isinstance(blend, Blender)
    roster = journal.roster("") or _roster_of(state, blend, graph)
    present = dict(zip(blend.sources, blend.children, strict=True))
    here = said_mixture(blend, roster)
    new_mixture = not is_known(here, journal, roster)
    came_or_went = False
    for row in roster.rows:
        child = present.get(row.source)
        saved = _saved_identity(state, row.source, child)
        if row.dropped:
            if child is None or not (new_mixture and here[row.source]):
                continue
            if source_identity(child) == row.dropped:
                roster = roster.changed(row.source, dropped="")
            else:
                roster, journal = _replaced(roster, journal, row.source, step, row.dropped, child)
            came_or_went = True
        elif child is None:
            roster, came_or_went = roster.changed(row.source, dropped=saved), True
        elif saved == UNKNOWN:
            raise _refused(state, graph, f"it says too little of source {row.source!r} to tell whether that changed")
        elif source_identity(child) != saved and same_sources:
            raise JournalError(f"source {row.source!r} is another one")
        elif source_identity(child) != saved:
            if (had := _files_before(child, saved)) is not None:
                reader = reader_of(child)
                cap = blend.given_caps[blend.sources.index(row.source)] or 0
                if journal.roster("") is None:  # only the state's own words so far, and they hold no lengths
                    roster = roster.changed(row.source, length=len(part_of_source(child, 0, had)))
                journal = journal.with_grown(GrownEntry(step, sample, row.source, had, len(reader.files), cap))
            elif len(sources_of(child)) != 1:
                raise _refused(state, graph, f"{row.source!r} has several sources of its own; change it in the loader")
            else:
                _check_length(state, row.source, child, graph)
                roster, journal = _replaced(roster, journal, row.source, step, saved, child)
                came_or_went = True
    for source, child in present.items():
        if source not in roster.sources:
            roster = roster._replace(rows=(*roster.rows, RosterRow(source, 0, 0, len(child), "")))
            came_or_went = True
    journal = journal.with_roster(roster)
    if came_or_went or (new_mixture and not (blend.exact and roster.exact)):
        shares = [float(here[source]) for source in roster.live]
        stored = dict(zip(roster.live, quantise(roster.live, shares), strict=True))
        order = tuple(stored.get(source, 0) for source in roster.sources)
        journal = journal.with_weights(WeightsEntry(step, sample, "", order))
    if found := other_mixtures(journal, graph):  # caps, say
        raise StateMismatchError("this state cannot be amended:\n  " + "\n  ".join(found))
    _check_rest(state, graph, journal)
    _check_plan(state, roster, blend, sample + sum(jump.samples for jump in journal.jumps if jump.sample < sample))
    return journal


def nothing_changed(state: State, graph: IndexedDataPipe) -> Journal:
    """The state's journal, for a graph that says the weights which the journal changed them to.

    Raises StateMismatchError for any other that is not the saved one, with all that differs.
    """
    if not state.journal.weights:
        check_same_order(state, graph)  # raises, with what differs
    try:
        journal = amended(state, graph, same_sources=True)
    except (StateError, JournalError):
        journal = state.journal
    if journal.entries != state.journal.entries or mismatches(replace(state, journal=journal), graph):
        check_same_order(state, graph)
    return journal


def _grown_alone(state: State, graph: IndexedDataPipe, step: int, sample: int) -> Journal:
    """The state's journal with more files of the one source of a graph without a blend."""
    source = order_of(graph)
    had = _files_before(source, identity_from(state.order, state.sources))
    if had is None:
        raise _refused(state, graph, "of a graph without a blend at its top only the files of its source can grow")
    return state.journal.with_grown(GrownEntry(step, sample, source.name, had, len(reader_of(source).files), 0))


def _refused(state: State, graph: IndexedDataPipe, why: str) -> StateMismatchError:
    differences = "\n  ".join(mismatches(state, graph))
    return StateMismatchError(f"this state cannot be amended: {why}. What differs:\n  {differences}")


def _roster_of(state: State, blend: Blender, graph: IndexedDataPipe) -> Roster:
    """What the run began with, from the state's own words."""
    try:
        settings = parse_line(state, "blend")
        names = list(state.sources)
        if len(settings["weights"]) > 1:
            said = settings["sources"]  # the names, or where those are many or long, a digest of them
            names = next(list(n) for n in (said, names, blend.sources) if brief_names(list(n)) == said)
        weights = settings["weights"]
        caps = settings.get("caps") or [0] * len(weights)
        lengths = dict(zip(blend.sources, map(len, blend.children), strict=True))
        exact = int(bool(settings["exact"]))
        rows = tuple(
            RosterRow(name, weight + 0, cap + 0, weight if exact else lengths.get(name, 0), "")
            for name, weight, cap in zip(names, weights, caps, strict=True)
        )
        roster = Roster("", exact, rows)
        check_roster(roster)
        if not all(type(name) is str for name in names):
            raise ValueError(names)
    except (StateError, KeyError, ValueError, TypeError, StopIteration):
        raise _refused(
            state,
            graph,
            "it does not say what its blend began with (more than 32 sources, or blends in blends); load it with the "
            "graph it was saved from, and change the running loader",
        ) from None
    return roster


def _saved_identity(state: State, source: str, child: "IndexedDataPipe | None") -> str:
    """What `source_identity` gave for a source when the state was saved; `child` is what it is now, if it is."""
    place = place_of(source)
    here = {source: ""} if child is None else source_lines(child)
    lines: dict[str, str] = {}
    for key, value in state.order.items():
        kind, at, where = key.partition("@")
        if at and where == place:
            lines[kind] = value
        elif at and where.startswith(f"{place}/"):
            lines[f"{kind}@{where[len(place) + 1 :]}"] = value
        elif key.endswith(":*"):
            kind = key[:-2]
            lines |= dict.fromkeys([line for line in here if line.partition("@")[0] == kind] or [kind], value)
    names = {source} if child is None else {space.origin.name for _, space in sources_of(child)}
    if any(name.startswith("#") for name in state.order) or not names <= state.sources.keys():
        return UNKNOWN
    return identity_from(lines, {name: state.sources[name] for name in names})


def _files_before(source: IndexedDataPipe, saved: str) -> "int | None":
    """How many of the source's first files are the saved source, if some are."""
    try:
        reader = reader_of(source)
    except JournalError:
        return None
    lines, name = source_lines(source), reader.name
    if not lines.keys() - {"permute", "slice_sequences"}:  # the files alone decide: each is read once
        identities = [identity_from(lines, {name: content}) for content in prefix_fingerprints(reader.files)[:-1]]
    else:
        identities = []
        for count in range(1, len(reader.files)):
            try:
                identities.append(source_identity(part_of_source(source, 0, count)))
            except TokenpipeError:  # too few documents for one window, say
                identities.append("")
    return identities.index(saved) + 1 if saved in identities else None


def _check_length(state: State, source: str, child: IndexedDataPipe, graph: IndexedDataPipe) -> None:
    place = place_of(source)
    key = next((k for k in (f"slice_sequences@{place}", "slice_sequences:*") if k in state.order), "")
    if key and parse_line(state, key).get("sequence_length") != child.sequence_length:
        raise _refused(state, graph, "another sequence length goes by resize_sequences(S2, after=...)")


def _replaced(
    roster: Roster, journal: Journal, source: str, step: int, saved: str, child: IndexedDataPipe
) -> tuple[Roster, Journal]:
    """The old source under another name, dropped, and the new one under the old name."""
    past = f"{source} (until step {step})"
    while past in roster.sources:
        past += "'"
    rows = [row._replace(source=past, dropped=saved) if row.source == source else row for row in roster.rows]
    roster = roster._replace(rows=(*rows, RosterRow(source, 0, 0, len(child), "")))

    def renamed(entries: Any) -> Any:
        return tuple(e._replace(source=past) if e.source == source else e for e in entries)

    return roster, replace(journal, grown=renamed(journal.grown), excluded=renamed(journal.excluded))


def _check_rest(state: State, graph: IndexedDataPipe, journal: Journal) -> None:
    """Raises unless all that is no source's own is as it was."""

    def rest(order: dict[str, str]) -> dict[str, str]:
        return {key: value for key, value in order.items() if "@" not in key and not key.endswith(":*")}

    here = rest(identity_of(with_rosters(graph, journal, identity=True))[0])
    saved = rest(state.order)
    ends = json.loads(here.get("blend", "{}")).get("on_exhausted"), parse_line(state, "blend").get("on_exhausted")
    if {**here, "blend": ""} != {**saved, "blend": ""} or ends[0] != ends[1]:
        raise _refused(state, graph, "weights, sources and files of sources can change, nothing else")


def _check_plan(state: State, roster: Roster, blend: Blender, number: int) -> None:
    """Raises unless the blend's schedule is the saved one up to `number`; what was planned for later may change."""
    planned = [[n, dict(zip(blend.sources, weights or (), strict=True))] for n, weights, _ in blend.schedule]
    try:
        line = parse_line(state, "blend")
        saved = [[n + 0, dict(zip(roster.sources, weights, strict=False))] for n, weights in line.get("schedule", [])]
    except (TypeError, ValueError):
        raise StateError("order: the blend's schedule is no list of numbers and weights") from None

    def before(plan: "list[Any]") -> "list[Any]":
        return [[n, {s: w for s, w in weights.items() if w}] for n, weights in plan if n < number]

    if before(planned) != before(saved):
        raise StateMismatchError(
            f"the blend's schedule is not the saved one before its sample {number}, which is done; what is planned for "
            "later may change"
        )
