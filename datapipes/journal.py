"""What changed while the run ran. The order is a pure function of (graph, journal, sample number).

Each entry holds from a step on, whose first sample number it also carries:

    WeightsEntry   a blend has other weights
    GrownEntry     a source has more files
    JumpEntry      the data is so many samples further on
    ExcludedEntry  rows that hold these tokens are masked

Where sources came or went, or a state was amended, a Roster says what the blend began with and which sources it
ever had, in the order that its weights count them.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .blend import Blender
from .bound import Once
from .core import IndexedDataPipe
from .errors import JournalError
from .jump import Jumper
from .steps import Breakpoint

__all__ = [
    "ExcludedEntry",
    "GrownEntry",
    "Journal",
    "JumpEntry",
    "Path",
    "Roster",
    "RosterRow",
    "WeightsEntry",
    "blend_to_change",
    "blends_in",
    "name_of_blend",
    "number_at",
    "path_to_blend",
    "path_to_source",
]


class WeightsEntry(NamedTuple):
    """The blend has these integer weights, in the order of its sources; sources that came later have 0."""

    step: int
    sample: int
    blend: str
    weights: tuple[int, ...]


class GrownEntry(NamedTuple):
    """The source had its first `had` files, now it has `files`, and can give `cap` samples in all (0: no end)."""

    step: int
    sample: int
    source: str
    had: int
    files: int
    cap: int


class JumpEntry(NamedTuple):
    """The data is `samples` further on."""

    step: int
    sample: int
    samples: int


class ExcludedEntry(NamedTuple):
    """Rows that hold one of the source's tokens [first, stop) have every label masked."""

    step: int
    sample: int
    source: str
    first: int
    stop: int


class RosterRow(NamedTuple):
    """A source of a blend: its weight and cap (0: none) when the run began, its samples an epoch, and where
    it was dropped, the fingerprint of what it was (else "").
    """

    source: str
    weight: int
    cap: int
    length: int
    dropped: str


class Roster(NamedTuple):
    """Every source that a blend ever had. exact: it began as an exact union."""

    blend: str
    exact: int
    rows: tuple[RosterRow, ...]

    @classmethod
    def of(cls, blend: Blender, name: str) -> "Roster":
        """The roster of a blend whose sources never changed."""
        lengths = [len(child) for child in blend.children]
        caps = [cap or 0 for cap in blend.given_caps]
        rows = zip(blend.sources, blend.weights, caps, lengths, strict=True)
        return cls(name, int(blend.exact), tuple(RosterRow(*row, "") for row in rows))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(row.source for row in self.rows)

    @property
    def live(self) -> tuple[str, ...]:
        """The sources that were not dropped."""
        return tuple(row.source for row in self.rows if not row.dropped)

    def changed(self, source: str, **fields: Any) -> "Roster":
        """The same roster with fields of one row replaced."""
        return self._replace(rows=tuple(r._replace(**fields) if r.source == source else r for r in self.rows))


@dataclass(frozen=True)
class Journal:
    """The run's changes, each kind in order, and its step breakpoints (None: as the graph's schedule says)."""

    weights: tuple[WeightsEntry, ...] = ()
    breakpoints: "tuple[Breakpoint, ...] | None" = None
    grown: tuple[GrownEntry, ...] = ()
    jumps: tuple[JumpEntry, ...] = ()
    excluded: tuple[ExcludedEntry, ...] = ()
    rosters: tuple[Roster, ...] = ()

    @property
    def entries(self) -> "tuple[WeightsEntry | GrownEntry | JumpEntry | ExcludedEntry, ...]":
        """All that hold from a step on."""
        return (*self.weights, *self.grown, *self.jumps, *self.excluded)

    def roster(self, blend: str) -> "Roster | None":
        return next((roster for roster in self.rosters if roster.blend == blend), None)

    def check_from(self, step: int, sample: int) -> None:
        """Raises JournalError where something is recorded after this sample: a change here would rewrite it."""
        later = [entry for entry in self.entries if entry.sample > sample]
        if later:
            last = max(later, key=lambda entry: entry.sample)
            raise JournalError(
                f"the journal has a change at step {last.step} (sample {last.sample}); a new one at step {step} would "
                f"rewrite what came after it; seek to step {last.step} or later first"
            )

    def with_weights(self, entry: WeightsEntry) -> "Journal":
        """This journal and one more change; one at the same sample replaces the earlier one."""
        kept = [e for e in self.weights if (e.sample, e.blend) != (entry.sample, entry.blend)]
        return replace(self, weights=(*kept, entry))

    def with_grown(self, entry: GrownEntry) -> "Journal":
        """This journal and a source's new files; those at the same sample come in one go."""
        for same in self.grown:
            if (same.sample, same.source) == (entry.sample, entry.source):
                entry = entry._replace(had=same.had)
        kept = [e for e in self.grown if (e.sample, e.source) != (entry.sample, entry.source)]
        return replace(self, grown=(*kept, entry))

    def with_jump(self, entry: JumpEntry) -> "Journal":
        """This journal and one more jump; two at the same sample are one over both."""
        same = sum(e.samples for e in self.jumps if e.sample == entry.sample)
        kept = [e for e in self.jumps if e.sample != entry.sample]
        return replace(self, jumps=(*kept, entry._replace(samples=entry.samples + same)))

    def with_excluded(self, *entries: ExcludedEntry) -> "Journal":
        return replace(self, excluded=(*self.excluded, *(e for e in entries if e not in self.excluded)))

    def with_roster(self, roster: Roster) -> "Journal":
        kept = [r for r in self.rosters if r.blend != roster.blend]
        return replace(self, rosters=(*kept, roster))

    def told(self, graph: IndexedDataPipe) -> "list[str]":
        """A line a change, by step, for people. `graph` is what was built."""
        lines: list[tuple[int, str]] = []
        for e in self.weights:
            roster = self.roster(e.blend)
            names = roster.sources if roster else path_to_blend(graph, e.blend)[-1][0].sources
            shares = [f"{name} {w / sum(e.weights):.1%}" for name, w in zip(names, e.weights, strict=False) if w]
            lines.append((e.step, f"{f'blend {e.blend!r}: ' if e.blend else ''}weights {', '.join(shares)}"))
        lines += [(g.step, f"source {g.source!r} has {g.files} files, {g.had} before") for g in self.grown]
        lines += [(j.step, f"a jump over {j.samples:,} samples") for j in self.jumps]
        lines += [
            (x.step, f"rows with tokens {x.first:,} … {x.stop - 1:,} of source {x.source!r} are masked")
            for x in self.excluded
        ]
        lines += [(b.step, f"steps of {b.size:,} samples") for b in (self.breakpoints or ())[1:]]
        return [f"step {step:,}: {line}" for step, line in sorted(lines, key=lambda line: line[0])]

    def on_steps(self, breakpoints: "tuple[Breakpoint, ...]", start: Any) -> "Journal":
        """This journal over other breakpoints: changes keep their steps, which begin at start(step)."""

        def moved(entries: Any) -> Any:
            return tuple(entry._replace(sample=start(entry.step)) for entry in entries)

        kinds = {kind: moved(getattr(self, kind)) for kind in ("weights", "grown", "jumps", "excluded")}
        return replace(self, breakpoints=breakpoints, **kinds)


Path = list[tuple[IndexedDataPipe, int]]
"""[(node, index of the child to go to), …] from the top down to a blend, which has index −1."""


def blends_in(graph: IndexedDataPipe, top: bool = True) -> "Iterator[tuple[str | None, Path]]":
    """Every blend of a graph, by its name in the journal: "" is the topmost one of a graph that has just one
    way down to it, the others go by the name they were given, if they were.
    """
    if isinstance(graph, Blender):
        yield ("" if top else graph.given_name or None), [(graph, -1)]
        top = False
    for index, child in enumerate(graph.children):
        for name, path in blends_in(child, top and len(graph.children) == 1):
            yield name, [(graph, index), *path]


def path_to_blend(graph: IndexedDataPipe, blend: str = "") -> Path:
    """The way to the blend of that name in the journal. Raises JournalError where there is none, or two."""
    paths = {id(path[-1][0]): path for name, path in blends_in(graph) if name == blend}
    if len(paths) != 1:
        which = f"blend named {blend!r}" if blend else "blend at its top"
        raise JournalError(
            f"this graph has {'no' if not paths else 'more than one'} {which}, so its weights cannot be changed; name "
            "a blend by its sources ({source: weight}) or its own name (blend=)"
        )
    return next(iter(paths.values()))


def name_of_blend(graph: IndexedDataPipe, blend: IndexedDataPipe) -> str:
    """What the journal calls a blend of the graph. Raises JournalError for an inner one without a name."""
    name = next((name for name, path in blends_in(graph) if path[-1][0] is blend), None)
    if name is None:
        raise JournalError("a blend inside another one changes by its name; give it one (blend(..., name=...))")
    return name


def blend_to_change(graph: IndexedDataPipe, sources: "list[str] | None" = None, blend: str = "") -> tuple[Blender, str]:
    """(the blend whose weights shall change, its name in the journal): the one that has these sources, else
    the one of that name. Raises JournalError where its weights cannot change.
    """
    if sources is not None:
        found = {
            id(path[-1][0]): name
            for name, path in blends_in(graph)
            if isinstance(path[-1][0], Blender) and set(path[-1][0].sources) == set(sources)
        }
        if len(found) > 1 or None in found.values():
            raise JournalError(
                f"{len(found)} blend(s) have the sources {', '.join(map(repr, sources))}: say which, with blend=, by "
                "the name it was given (blend(..., name=...))"
            )
        blend = next(iter(found.values()), blend) or ""
    path = path_to_blend(graph, blend)
    for node, _ in path[:-1]:
        if isinstance(node, Once):
            raise JournalError("once() is a pass in which each sample comes exactly once; it has no weights to update")
        if not node.in_order and not node.trunk:
            raise JournalError(
                f"{type(node).__name__} stands above the blend: what was consumed is no prefix of the blend, so new "
                "weights would repeat and lose samples; permute each source below the blend instead"
            )
    target = path[-1][0]
    assert isinstance(target, Blender)
    return target, blend


def path_to_source(graph: IndexedDataPipe, source: str) -> Path:
    """The way to the top of a source, by its name or its reader's: the highest node from which one way leads down to
    its reader alone.

    Raises JournalError where there is no such source, or it stands in two places.
    """

    def walk(node: IndexedDataPipe, path: Path, top: "Path | None") -> Iterator[Path]:
        runs_own = node.trunk and all(above.trunk for above, _ in path)  # the run's skips, limits, maps
        alone = len(node.children) <= 1 and not isinstance(node, (Blender, Jumper)) and not runs_own
        top = ([*path, (node, -1)] if top is None else top) if alone else None
        if not node.children:
            way = top or [*path, (node, -1)]
            if source in (node.name, way[-1][0].name):
                yield way
        for index, child in enumerate(node.children):
            yield from walk(child, [*path, (node, index)], top)

    paths = list(walk(graph, [], None))
    if len(paths) != 1:
        raise JournalError(
            f"source {source!r} stands in {len(paths)} places of this graph; only one that stands in one can change"
        )
    return paths[0]


def number_at(path: Path, number: int) -> int:
    """How many numbers of the path's last node the run's first `number` samples have taken: what stands above the
    order renumbers nothing.
    """
    for node, index in itertools.dropwhile(lambda place: place[0].trunk, path[:-1]):
        number = node.source_bound(index, number)
    return number
