"""States as they come from a checkpoint: whatever is not exactly one of ours is refused, and nothing in them is ever
imported, opened or called.
"""

import itertools
import json
from typing import Any

from ..datapipes.core import MAX_NUMBER
from ..datapipes.errors import StateError
from ..datapipes.journal import ExcludedEntry, GrownEntry, Journal, JumpEntry, Roster, RosterRow, WeightsEntry
from ..datapipes.steps import Breakpoint, Schedule
from ..datapipes.weights import LARGEST_TOTAL, SCALE
from .state import FORMAT, MOST_BYTES, State, size_of

__all__ = ["check_keys", "check_number", "check_roster", "parse_json", "parse_line", "parse_state"]


def parse_state(value: Any) -> State:
    """A state from a dict, or from JSON as str or bytes. Raises StateError for anything else."""
    if type(value) in (str, bytes):
        value = parse_json(value)
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
    check_keys(
        "state", value, {"format", "version", "consumed_samples", "step", "journal", "order", "sources"}, {"noted"}
    )
    journal = value["journal"]
    if not isinstance(journal, dict):
        raise StateError("journal must be an object")
    check_keys("journal", journal, {"schedule", "breakpoints", "weights"}, _LATER if version == 2 else set())
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
        check_number("consumed_samples", value["consumed_samples"]),
        whole,
        schedule,
        dict(value["order"]),
        dict(value["sources"]),
    )
    if check_number("step", value["step"]) != state.steps.step_of(state.consumed_samples):
        raise StateError(f"step {value['step']} is not the step of sample {state.consumed_samples}")
    for change in whole.entries:
        if state.steps.start(change.step) != change.sample:
            raise StateError(f"the journal has a change at step {change.step}, which does not begin at {change.sample}")
    if version == 2 and not journal.keys() & _LATER:
        raise StateError(
            "a state of version 2 without what version 2 is for: part of its journal was lost on the way, as where "
            "torch.distributed.checkpoint loads into another dict; saved as json.dumps(state) it stays whole"
        )
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
        check_roster(roster)
    return grown, jumps, excluded, rosters


def check_roster(roster: Roster) -> None:
    """Raises StateError where what a blend began with is no mixture."""
    total = sum(row.weight for row in roster.rows)
    fits = 0 < total < LARGEST_TOTAL if roster.exact == 1 else total == SCALE
    if roster.exact > 1 or not fits or len(set(roster.sources)) != len(roster.rows) or "" in roster.sources:
        raise StateError(f"journal.rosters: what blend {roster.blend!r} began with is no mixture")


def parse_line(state: State, key: str) -> dict[str, Any]:
    """What a line of a state's `order` says: plain integers, strings and lists; {} where it is not there."""
    value = parse_json(state.order.get(key, "{}"))
    _check_plain(value, [MOST_BYTES // 2], 0)
    if not isinstance(value, dict):
        raise StateError(f"order: {key} is no object")
    return value


def parse_json(text: "str | bytes", most: int = MOST_BYTES, floats: bool = False) -> Any:
    """JSON without a field named twice, NaN, or (unless `floats`) any float. Raises StateError."""
    if len(text) > 4 * most:  # room for indentation; the compact form is held to `most`
        raise StateError(f"the state has {len(text)} bytes; no state has more than {most}")

    def no_duplicates(pairs: "list[tuple[str, Any]]") -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise StateError("the state names a field twice")
        return found

    def refuse(constant: str) -> Any:
        raise StateError(f"the state holds {constant}")

    try:
        number = float if floats else refuse
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=refuse, parse_float=number)
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
        check_number("a number", value)
    else:
        raise StateError(f"the state holds a {type(value).__name__}; integers and strings were expected")


def check_number(name: str, value: Any) -> int:
    """`value`, an integer of 0 … 2**63 − 2. Raises StateError."""
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise StateError(f"{name} must be an integer of 0 … 2**63 - 2, got {str(value)[:40]}")
    return value


def check_keys(
    name: str, value: dict[str, Any], expected: set[str], also: "set[str] | frozenset[str]" = frozenset()
) -> None:
    """Raises StateError unless an object has these fields, and perhaps those of `also`."""
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
