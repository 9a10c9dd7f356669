"""What changed while the run ran. The order is a pure function of (graph, journal, sample number)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .blend import Blender
from .bound import Once
from .core import IndexedDataPipe
from .errors import JournalError
from .steps import Breakpoint

__all__ = ["Journal", "WeightsEntry", "blend_to_change", "path_to_blend"]


class WeightsEntry(NamedTuple):
    """From `step` on, whose first sample number is `sample`, the blend has these integer weights."""

    step: int
    sample: int
    blend: str
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Journal:
    """The run's changes in order, and its step breakpoints (None: as the graph's schedule says)."""

    weights: tuple[WeightsEntry, ...] = ()
    breakpoints: "tuple[Breakpoint, ...] | None" = None

    def with_weights(self, entry: WeightsEntry) -> "Journal":
        """This journal and one more change; one at the same sample replaces the earlier one.

        Raises JournalError for a change before one that is already recorded.
        """
        kept = [e for e in self.weights if (e.sample, e.blend) != (entry.sample, entry.blend)]
        if kept and kept[-1].sample > entry.sample:
            raise JournalError(
                f"the journal has a change at step {kept[-1].step} (sample {kept[-1].sample}); a new one at step "
                f"{entry.step} would rewrite what came after it; seek to step {kept[-1].step} or later first"
            )
        return replace(self, weights=(*kept, entry))


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
