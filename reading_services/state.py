"""What a checkpoint holds of a run: JSON of integers and short strings, the same on every rank.

    {"format": "tokenpipe-state", "version": 1,
     "consumed_samples": 128000, "step": 500,
     "journal": {"schedule": [[0, 256]], "breakpoints": [], "weights": [[480, 122880, "", [3006477107, …]]]},
     "order": {"blend": "{…}", "permute:*": "{\\"seed\\":7}", …}, "sources": {"prose": "9f0c…", …}}

Version 2 is written where the journal has more: "grown", "jumps", "excluded", "rosters" (see datapipes/journal.py),
each a list of lists of fields.

`order` is what decides the order besides the files, as "node@source", or "node:*" where all sources agree;
`sources` are the files by content. More than 32 of either are put into 32 buckets, so that a state stays below 64 KiB.
Nothing in a state is ever imported, opened or called; what is not exactly this is refused.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..adapters.journal import with_rosters
from ..datapipes.blend import Blender
from ..datapipes.core import MAX_NUMBER, IndexedDataPipe
from ..datapipes.errors import JournalError, StateError, StateMismatchError
from ..datapipes.fingerprint import describe_order, order_of, source_contents
from ..datapipes.journal import (
    ExcludedEntry,
    GrownEntry,
    Journal,
    JumpEntry,
    Roster,
    RosterRow,
    WeightsEntry,
    path_to_blend,
)
from ..datapipes.read import TokenReader
from ..datapipes.steps import Breakpoint, Schedule, StepTable
from ..datapipes.weights import LARGEST_TOTAL, SCALE

__all__ = ["MOST_BYTES", "State", "identity_of", "mismatches", "parse_state"]

FORMAT = "tokenpipe-state"
MOST_BYTES = 64 * 1024
MOST_NAMED = 32


@dataclass(frozen=True)
class State:
    """A parsed state; `breakpoints` is None where the schedule alone gives the steps."""

    consumed_samples: int
    journal: Journal
    schedule: Schedule
    order: dict[str, str]
    sources: dict[str, str]

    @property
    def steps(self) -> StepTable:
        breakpoints = self.journal.breakpoints
        return StepTable.of(self.schedule) if breakpoints is None else StepTable(breakpoints)

    def as_json(self) -> dict[str, Any]:
        """The state as plain dicts, lists, integers and strings, of the earliest version that can say it."""
        journal = self.journal
        later = {
            "grown": [list(e) for e in journal.grown],
            "jumps": [list(e) for e in journal.jumps],
            "excluded": [list(e) for e in journal.excluded],
            "rosters": [[r.blend, r.exact, [list(row) for row in r.rows]] for r in journal.rosters],
        }
        return {
            "format": FORMAT,
            "version": 2 if any(later.values()) else 1,
            "consumed_samples": self.consumed_samples,
            "step": self.steps.step_of(self.consumed_samples),
            "journal": {
                "schedule": [list(pair) for pair in self.schedule],
                "breakpoints": [list(b) for b in journal.breakpoints or ()],
                "weights": [[e.step, e.sample, e.blend, list(e.weights)] for e in journal.weights],
                **{kind: entries for kind, entries in later.items() if entries},
            },
            "order": dict(self.order),
            "sources": dict(self.sources),
        }


def size_of(state: dict[str, Any]) -> int:
    """Bytes of a state as compact JSON."""
    return len(json.dumps(state, separators=(",", ":")))


# What a graph is, as a state says it ---------------------------------------------------------------------


def identity_of(graph: IndexedDataPipe) -> tuple[dict[str, str], dict[str, str]]:
    """(order, sources) of a graph. Reads 64 blocks of each file the first time."""
    sources = {name: content[:16] for name, content in source_contents(order_of(graph)).items()}
    return _bucketed(_starred(describe_order(graph))), _bucketed(sources)


def _starred(lines: dict[str, str]) -> dict[str, str]:
    """Settings that are the same for every source become one line, "node:*"."""
    kinds: dict[str, dict[str, str]] = {}
    for key, value in lines.items():
        kind, at, place = key.partition("@")
        if at:
            kinds.setdefault(kind, {})[place] = value
    every = max((frozenset(found) for found in kinds.values()), key=len, default=frozenset())
    same = {k for k, found in kinds.items() if len(every) > 1 and every == set(found) and len(set(found.values())) == 1}
    out = {key: value for key, value in lines.items() if key.partition("@")[0] not in same or "@" not in key}
    return out | {f"{kind}:*": next(iter(kinds[kind].values())) for kind in kinds if kind in same}


def _bucketed(lines: dict[str, str]) -> dict[str, str]:
    if len(lines) <= MOST_NAMED and len(json.dumps(lines)) <= MOST_BYTES // 8:
        return lines
    buckets: dict[str, Any] = {}
    for key in sorted(lines):
        bucket = f"#{hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % MOST_NAMED:02}"
        digest = buckets.setdefault(bucket, hashlib.blake2b(digest_size=8))
        digest.update(json.dumps([key, lines[key]]).encode())
    return {bucket: digest.hexdigest() for bucket, digest in sorted(buckets.items())}


def _setting(order: dict[str, str], key: str) -> "str | None":
    return order.get(key) or order.get(f"{key.partition('@')[0]}:*" if "@" in key else key)


def mismatches(state: State, graph: IndexedDataPipe) -> list[str]:
    """What of a saved state is not so in this graph, a line each; none only where all is the same."""
    if found := [line for roster in state.journal.rosters for line in _other_mixture(state.journal, roster, graph)]:
        return found
    try:
        graph = with_rosters(graph, state.journal, identity=True)
    except JournalError as error:
        return [str(error)]
    order, sources = identity_of(graph)
    if (order, sources) == (state.order, state.sources):
        return []
    found = []
    singly = {key.partition("@")[0] for key in (*state.order, *order) if "@" in key}
    for key in sorted(state.order.keys() | order.keys()):
        if key.endswith(":*") and key[:-2] in singly:
            continue  # one side says it source by source
        a, b = _setting(state.order, key), _setting(order, key)
        if a != b:
            found.append(f"{key}: saved {a or 'not there'}, here {b or 'not there'}")
    paths = _paths(order_of(graph))
    for name in sorted(state.sources.keys() | sources.keys()):
        a, b = state.sources.get(name), sources.get(name)
        if a == b:
            continue
        if a is None or b is None:
            found.append(f"source {name!r}: {'not in the saved run' if a is None else 'not in this graph'}")
        else:
            found.append(f"source {name!r}: other contents ({', '.join(paths.get(name, []))})")
    if not found:  # a node that one side has for every source, and the other for some
        found = [
            f"{key}: saved {state.order.get(key)}, here {order.get(key)}" for key in state.order.keys() ^ order.keys()
        ]
    return found


def _other_mixture(journal: Journal, roster: Roster, graph: IndexedDataPipe) -> "Iterator[str]":
    """A graph whose sources changed may say the mixture that the run began with, or the one it has now."""
    try:
        blend = path_to_blend(graph, roster.blend)[-1][0]
    except JournalError as error:
        yield str(error)
        return
    assert isinstance(blend, Blender)
    began = {row.source: row.weight for row in roster.rows}
    changes = [e for e in journal.weights if e.blend == roster.blend]
    now = dict(zip(roster.sources, changes[-1].weights, strict=False)) if changes else began
    here = dict(zip(blend.sources, blend.weights, strict=True))
    if not (blend.exact and roster.exact) and not any(same_mixture(here, mixture) for mixture in (began, now)):
        yield (
            f"blend {roster.blend!r}: weights {_shares(here)} here; the run began with {_shares(began)}"
            f"{' as an exact union (weights=None)' if roster.exact else ''} and now has {_shares(now)}"
        )
    caps = {row.source: {row.cap} for row in roster.rows}
    for entry in journal.grown:
        if entry.source in caps:
            caps[entry.source].add(entry.cap)
    for source, cap in zip(blend.sources, blend.given_caps, strict=True):
        if source in caps and (cap or 0) not in caps[source]:
            yield f"blend {roster.blend!r}: source {source!r} ends after {cap or 'no'} samples here, not {caps[source]}"


def same_mixture(a: dict[str, int], b: dict[str, int]) -> bool:
    """Whether the same sources are drawn with the same integer weights; ties are rounded by the sources' order."""
    drawn = [{source for source, weight in weights.items() if weight} for weights in (a, b)]
    return drawn[0] == drawn[1] and all(abs(a[source] - b[source]) <= 1 for source in drawn[0])


def _shares(weights: dict[str, int]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{source} {weight / total:.4g}" for source, weight in weights.items() if weight)


def _paths(node: IndexedDataPipe) -> dict[str, list[str]]:
    if isinstance(node, TokenReader):
        paths = [file.path for file in node.files]
        return {node.name: [*paths[:4], *([f"… {len(paths)} files"] if len(paths) > 4 else [])]}
    return {name: paths for child in node.children for name, paths in _paths(child).items()}


def check_same_order(state: State, graph: IndexedDataPipe) -> None:
    """Raises StateMismatchError with every difference, unless the graph has the state's order."""
    if found := mismatches(state, graph):
        raise StateMismatchError(
            "this state belongs to another order, so its place means nothing here:\n  " + "\n  ".join(found)
        )


# Reading ----------------------------------------------------------------------------------------------------


def parse_state(value: Any) -> State:
    """A state from a dict, or from JSON as str or bytes. Raises StateError for anything else."""
    if type(value) in (str, bytes):
        value = _parse_json(value)
    _check_plain(value, [MOST_BYTES // 2], 0)  # the shortest value has two bytes: "0,"
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StateError(f"not a tokenpipe state: its format is not {FORMAT!r}")
    version = value.get("version")
    if type(version) is not int or version not in (1, 2):
        raise StateError(
            f"state version {version!r:.40}; this tokenpipe reads versions 1 and 2: was it saved by a later one?"
        )
    if size_of(value) > MOST_BYTES:
        raise StateError(f"the state has more than {MOST_BYTES} bytes, which no state has")
    _keys("state", value, {"format", "version", "consumed_samples", "step", "journal", "order", "sources"})
    journal = value["journal"]
    if not isinstance(journal, dict):
        raise StateError("journal must be an object")
    _keys("journal", journal, {"schedule", "breakpoints", "weights"}, _LATER if version == 2 else set())
    schedule = tuple((step, size) for step, size in _rows("journal.schedule", journal["schedule"], (int, int)))
    breakpoints = tuple(
        Breakpoint(*row) for row in _rows("journal.breakpoints", journal["breakpoints"], (int, int, int))
    )
    _check_steps(schedule, breakpoints)
    entries = tuple(
        WeightsEntry(step, sample, blend, tuple(weights))
        for step, sample, blend, weights in _rows("journal.weights", journal["weights"], (int, int, str, list))
    )
    for entry in entries:
        if not all(type(w) is int for w in entry.weights) or sum(entry.weights) != SCALE:
            raise StateError(f"journal.weights at step {entry.step}: integers that add up to 2**32 were expected")
    whole = Journal(entries, breakpoints or None, *_later_entries(journal))
    for kind in ("weights", "grown", "jumps", "excluded"):
        samples = [entry.sample for entry in getattr(whole, kind)]
        if samples != sorted(samples):
            raise StateError(f"journal.{kind}: its changes are not in order")
    for name in ("order", "sources"):
        found = value[name]
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise StateError(f"{name} must be an object of strings")
    state = State(
        _number("consumed_samples", value["consumed_samples"]),
        whole,
        schedule,
        dict(value["order"]),
        dict(value["sources"]),
    )
    if _number("step", value["step"]) != state.steps.step_of(state.consumed_samples):
        raise StateError(f"step {value['step']} is not the step of sample {state.consumed_samples}")
    for change in whole.entries:
        if state.steps.start(change.step) != change.sample:
            raise StateError(f"the journal has a change at step {change.step}, which does not begin at {change.sample}")
    return state


_LATER = {"grown", "jumps", "excluded", "rosters"}


def _later_entries(journal: dict[str, Any]) -> tuple[Any, ...]:
    """(grown, jumps, excluded, rosters) of a journal of version 2, checked."""

    def entries(kind: str, make: Any, types: tuple[type, ...]) -> tuple[Any, ...]:
        return tuple(make(*row) for row in _rows(f"journal.{kind}", journal.get(kind, []), types))

    grown = entries("grown", GrownEntry, (int, int, str, int, int, int))
    jumps = entries("jumps", JumpEntry, (int, int, int))
    excluded = entries("excluded", ExcludedEntry, (int, int, str, int, int))
    rosters = tuple(
        Roster(
            blend, exact, tuple(RosterRow(*row) for row in _rows("journal.rosters", rows, (str, int, int, int, str)))
        )
        for blend, exact, rows in _rows("journal.rosters", journal.get("rosters", []), (str, int, list))
    )
    had: dict[str, int] = {}
    for entry in grown:
        if not 0 < entry.had < entry.files or entry.had != had.get(entry.source, entry.had):
            raise StateError(
                f"journal.grown: {entry.source!r} cannot have grown from {entry.had} to {entry.files} files"
            )
        had[entry.source] = entry.files
    furthest = max((e.sample for e in jumps), default=0)
    if not all(e.samples for e in jumps) or furthest + sum(e.samples for e in jumps) >= MAX_NUMBER:
        raise StateError("journal.jumps: jumps over 1 to 2**63 - 2 samples in all were expected")
    if not all(e.first < e.stop for e in excluded):
        raise StateError("journal.excluded: ranges of tokens [first, stop) were expected")
    if len({roster.blend for roster in rosters}) != len(rosters):
        raise StateError("journal.rosters: a blend is there twice")
    for roster in rosters:
        total = sum(row.weight for row in roster.rows)
        fits = 0 < total < LARGEST_TOTAL if roster.exact == 1 else total == SCALE
        if roster.exact > 1 or not fits or len(set(roster.sources)) != len(roster.rows) or "" in roster.sources:
            raise StateError(f"journal.rosters: what blend {roster.blend!r} began with is no mixture")
    return grown, jumps, excluded, rosters


def _parse_json(text: "str | bytes") -> Any:
    if len(text) > 4 * MOST_BYTES:  # room for indentation; the compact form is held to MOST_BYTES
        raise StateError(f"the state has {len(text)} bytes; no state has more than {MOST_BYTES}")

    def no_duplicates(pairs: "list[tuple[str, Any]]") -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise StateError("the state names a field twice")
        return found

    def refuse(constant: str) -> Any:
        raise StateError(f"the state holds {constant}")

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=refuse, parse_float=refuse)
    except StateError:
        raise
    except (ValueError, RecursionError) as error:
        raise StateError(f"the state is not JSON: {error}") from error


def _check_plain(value: Any, budget: "list[int]", depth: int) -> None:
    """Only exact dicts, lists, strings and integers, few and shallow: nothing with behaviour of its own."""
    budget[0] -= 1
    if budget[0] < 0 or depth > 6:
        raise StateError("the state is larger or deeper than any state is")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str or len(key) > 4096:
                raise StateError(f"the state has a field that is no short string: {type(key).__name__}")
            _check_plain(item, budget, depth + 1)
    elif type(value) in (list, tuple):
        for item in value:
            _check_plain(item, budget, depth + 1)
    elif type(value) is str:
        if len(value) > 16384:
            raise StateError("the state holds a string longer than any state does")
    elif type(value) is int:
        _number("a number", value)
    else:
        raise StateError(f"the state holds a {type(value).__name__}; integers and strings were expected")


def _number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise StateError(f"{name} must be an integer of 0 … 2**63 - 2, got {str(value)[:40]}")
    return value


def _keys(
    name: str, value: dict[str, Any], expected: set[str], also: "set[str] | frozenset[str]" = frozenset()
) -> None:
    unknown, missing = sorted(value.keys() - expected - also), sorted(expected - value.keys())
    if unknown or missing:
        raise StateError(f"{name}: unknown fields {unknown[:8]!r:.200}, missing fields {missing[:8]}")


def _rows(name: str, value: Any, types: tuple[type, ...]) -> list[Any]:
    good = isinstance(value, (list, tuple)) and all(
        isinstance(row, (list, tuple))
        and len(row) == len(types)
        and all(isinstance(v, (list, tuple)) if t is list else type(v) is t for v, t in zip(row, types, strict=True))
        for row in value
    )
    if not good:
        raise StateError(f"{name}: a list of [{', '.join(t.__name__ for t in types)}] was expected")
    return list(value)


def _check_steps(schedule: Schedule, breakpoints: "tuple[Breakpoint, ...]") -> None:
    steps = [step for step, _ in schedule]
    if not steps or steps[0] != 0 or steps != sorted(set(steps)) or not all(size for _, size in schedule):
        raise StateError("journal.schedule: steps from 0 on and positive sizes were expected")
    if breakpoints and (breakpoints[0][:2] != (0, 0) or not all(b.size for b in breakpoints)):
        raise StateError("journal.breakpoints: the first is [0, 0, size], and sizes are positive")
    for a, b in itertools.pairwise(breakpoints):
        if b.step <= a.step or b.sample != a.sample + (b.step - a.step) * a.size:
            raise StateError(f"journal.breakpoints: step {b.step} does not begin at sample {b.sample}")
