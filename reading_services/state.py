"""What a checkpoint holds of a run: JSON of integers and short strings, the same on every rank.

    {"format": "tokenpipe-state", "version": 1,
     "consumed_samples": 128000, "step": 500,
     "journal": {"schedule": [[0, 256]], "breakpoints": [], "weights": [[480, 122880, "", [3006477107, …]]]},
     "order": {"blend": "{…}", "permute:*": "{\\"seed\\":7}", …}, "sources": {"prose": "9f0c…", …}}

Version 2 is written where the journal has more: "grown", "jumps", "excluded", "rosters" (see datapipes/journal.py),
each a list of lists of fields.

`order` is what decides the order besides the files, as "node@source", or "node:*" where all sources agree;
`sources` are the files by content, and where a source has several, a few digits of each (file_tags.py), so that errors
name those that were replaced. More than 32 of either are put into 32 buckets, so that a state stays below 64 KiB.
How a state is read back: parse.py.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..adapters.journal import gone_blends, with_rosters
from ..datapipes.blend import Blender
from ..datapipes.core import IndexedDataPipe, nodes_of
from ..datapipes.errors import JournalError, StateMismatchError
from ..datapipes.file_tags import FINGERPRINT, file_tags, other_files
from ..datapipes.fingerprint import describe_order, file_digests, order_of, source_contents
from ..datapipes.formats import TokenLayout
from ..datapipes.journal import (
    Journal,
    Roster,
    path_to_blend,
)
from ..datapipes.read import TokenReader
from ..datapipes.steps import Schedule, StepTable
from ..datapipes.weights import quantise, tempered

__all__ = [
    "FORMAT",
    "MOST_BYTES",
    "State",
    "check_same_order",
    "identity_of",
    "is_known",
    "mismatches",
    "other_mixtures",
    "said_mixture",
    "same_mixture",
    "size_of",
    "weights_in_force",
]

FORMAT = "tokenpipe-state"
MOST_BYTES = 64 * 1024
MOST_NAMED = 32
WOULD_DO = (
    "with the files of the saved run, in their order, in whatever folder, it goes on exactly; with amend=True a source "
    "of a blend that has other files is another one from the next step on"
)


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
    plain = {name: content[:FINGERPRINT] for name, content in source_contents(order_of(graph)).items()}
    sources = _bucketed(plain)
    files = _files(graph, sources)
    tagged = {
        name: content + file_tags([d for part in files.get(name, ()) for d in file_digests(part)], len(sources))
        for name, content in sources.items()
    }
    return _bucketed(_starred(describe_order(graph))), tagged


def _files(graph: IndexedDataPipe, sources: "Mapping[str, str]") -> "dict[str, list[Sequence[TokenLayout]]]":
    """{name: [files of each reader]} of a graph's sources, or of the buckets that they are in."""
    by_name: dict[str, list[Sequence[TokenLayout]]] = {}
    for node in nodes_of(order_of(graph)):
        if isinstance(node, TokenReader):
            by_name.setdefault(node.name, []).append(node.files)
    found: dict[str, list[Sequence[TokenLayout]]] = {}
    for name in sorted(by_name):
        found.setdefault(name if name in sources else _bucket_of(name), []).extend(by_name[name])
    return found


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
        digest = buckets.setdefault(_bucket_of(key), hashlib.blake2b(digest_size=FINGERPRINT // 2))
        digest.update(json.dumps([key, lines[key]]).encode())
    return {bucket: digest.hexdigest() for bucket, digest in sorted(buckets.items())}


def _bucket_of(key: str) -> str:
    return f"#{hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % MOST_NAMED:02}"


def _untagged(sources: "Mapping[str, str]") -> "dict[str, str]":
    return {name: content[:FINGERPRINT] for name, content in sources.items()}


def _setting(order: dict[str, str], key: str) -> "str | None":
    return order.get(key) or order.get(f"{key.partition('@')[0]}:*" if "@" in key else key)


def mismatches(state: State, graph: IndexedDataPipe) -> list[str]:
    """What of a saved state is not so in this graph, a line each; none only where all is the same."""
    if found := other_mixtures(state.journal, graph):
        return found
    try:
        graph = with_rosters(graph, state.journal, identity=True)
    except JournalError as error:
        return [str(error)]
    order, sources = identity_of(graph)
    if order == state.order and _untagged(sources) == _untagged(state.sources):
        return []
    found = []
    singly = {key.partition("@")[0] for key in (*state.order, *order) if "@" in key}
    for key in sorted(state.order.keys() | order.keys()):
        if key.endswith(":*") and key[:-2] in singly:
            continue  # one side says it source by source
        a, b = _setting(state.order, key), _setting(order, key)
        if a != b:
            found.append(f"{key}: saved {_short(a or 'not there')}, here {_short(b or 'not there')}")
    files = _files(graph, sources)
    for name in sorted(state.sources.keys() | sources.keys()):
        a, b = state.sources.get(name), sources.get(name)
        if a is None or b is None:
            found.append(f"source {name!r}: {'not in the saved run' if a is None else 'not in this graph'}")
        elif a[:FINGERPRINT] != b[:FINGERPRINT]:
            here = [file for part in files.get(name, []) for file in part]
            what = other_files(a, [file.content for file in here], [file.path for file in here])
            grew = [entry.files for entry in state.journal.grown if entry.source == name]
            grown = f"; it has grown to {grew[-1]} files, which all belong here, in their order" if grew else ""
            found.append(f"source {name!r}: other contents ({what}){grown}")
    if not found:  # a node that one side has for every source, and the other for some
        found = [
            f"{key}: saved {state.order.get(key)}, here {order.get(key)}" for key in state.order.keys() ^ order.keys()
        ]
    return found


def other_mixtures(journal: Journal, graph: IndexedDataPipe) -> list[str]:
    """What the graph says of its mixtures that is neither how the run began nor how it is now, a line each."""
    gone = gone_blends(graph, journal)
    rosters = [roster for roster in journal.rosters if roster.blend not in gone]
    return [line for roster in rosters for line in _other_mixture(journal, roster, graph)]


def _other_mixture(journal: Journal, roster: Roster, graph: IndexedDataPipe) -> "Iterator[str]":
    """A graph whose sources changed may say the mixture that the run began with, or the one it has now."""
    try:
        blend = path_to_blend(graph, roster.blend)[-1][0]
    except JournalError as error:
        yield str(error)
        return
    assert isinstance(blend, Blender)
    began, now = {row.source: row.weight for row in roster.rows}, weights_in_force(journal, roster)
    here = said_mixture(blend, roster)
    if not ((blend.exact and roster.exact) or is_known(here, journal, roster)):
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


def weights_in_force(journal: Journal, roster: Roster) -> dict[str, int]:
    """The integer weights of a blend after its last change."""
    changes = [entry.weights for entry in journal.weights if entry.blend == roster.blend]
    return dict(zip(roster.sources, changes[-1] if changes else [row.weight for row in roster.rows], strict=False))


def is_known(here: dict[str, int], journal: Journal, roster: Roster) -> bool:
    """Whether a graph's weights are those that the run began with (less what was dropped), or has now."""
    began = {row.source: row.weight for row in roster.rows}
    left = {source: weight for source, weight in began.items() if source in roster.live}
    return any(same_mixture(here, mixture) for mixture in (began, left, weights_in_force(journal, roster)))


def said_mixture(blend: Blender, roster: Roster) -> dict[str, int]:
    """The weights that a graph's blend says; of one by its sources' lengths, by those that the run began with."""
    lengths = {row.source: row.length for row in roster.rows}
    if blend.temperature is None or not all(lengths.get(source) for source in blend.sources):
        return dict(zip(blend.sources, blend.weights, strict=True))
    shares = tempered([float(lengths[source]) for source in blend.sources], blend.temperature)
    return dict(zip(blend.sources, quantise(blend.sources, shares), strict=True))


def same_mixture(a: dict[str, int], b: dict[str, int]) -> bool:
    """Whether the same sources are drawn in the same shares; ties are rounded by the sources' order."""
    drawn = {source for source, weight in a.items() if weight}
    if drawn != {source for source, weight in b.items() if weight}:
        return False
    # an exact union's weights are lengths
    left, right = (quantise(sorted(drawn), [float(mixture[source]) for source in sorted(drawn)]) for mixture in (a, b))
    return all(abs(x - y) <= 1 for x, y in zip(left, right, strict=True))


def _short(text: str) -> str:
    """A long line (of a ramp's weights) by its beginning and its end."""
    return text if len(text) <= 240 else f"{text[:120]} … {text[-80:]}"


def _shares(weights: dict[str, int]) -> str:
    """With digits enough to be copied into a recipe: shares are kept to 2⁻³²."""
    total = sum(weights.values())
    return ", ".join(f"{source} {weight / total:.11g}" for source, weight in weights.items() if weight)


def check_same_order(state: State, graph: IndexedDataPipe) -> None:
    """Raises StateMismatchError with every difference, unless the graph has the state's order."""
    if found := mismatches(state, graph):
        if any(": other contents (" in line for line in found):
            found.append(f"({WOULD_DO})")
        raise StateMismatchError(
            "this state belongs to another order, so its place means nothing here:\n  " + "\n  ".join(found)
        )
