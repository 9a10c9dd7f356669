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


def path_to_blend(graph: IndexedDataPipe, blend: str = "") -> "list[tuple[IndexedDataPipe, int]]":
    """[(node, index of the child to go to), …] from the top to the blend of that name; ("": the topmost).

    The blend itself comes last, with index −1; [] where there is none.
    """
    if isinstance(graph, Blender) and blend in ("", graph.given_name):
        return [(graph, -1)]
    for index, child in enumerate(graph.children):
        if below := path_to_blend(child, blend):
            return [(graph, index), *below]
    return []


def blend_to_change(graph: IndexedDataPipe, sources: "list[str] | None" = None, blend: str = "") -> tuple[Blender, str]:
    """(the blend whose weights shall change, its name in the journal): the one that has these sources, else
    the one of that name, else the topmost. Raises JournalError where its weights cannot change.
    """
    if sources is not None:
        blend = next((name for name, names in _blends(graph) if set(names) == set(sources)), blend)
    path = path_to_blend(graph, blend)
    if not path:
        raise JournalError(
            f"this graph has no blend{f' named {blend!r}' if blend else ''}, so it has no weights to update"
        )
    for node, _ in path[:-1]:
        if isinstance(node, Once):
            raise JournalError("once() is a pass in which each sample comes exactly once; it has no weights to update")
        if not node.in_order and not node.trunk:
            raise JournalError(
                f"{type(node).__name__} stands above the blend: what was consumed is no prefix of the blend, so new "
                "weights would repeat and lose samples; permute each source below the blend instead"
            )
    found = path[-1][0]
    assert isinstance(found, Blender)
    return found, blend


def _blends(graph: IndexedDataPipe, top: bool = True) -> "Iterator[tuple[str, tuple[str, ...]]]":
    if isinstance(graph, Blender):
        yield ("" if top else graph.given_name), graph.sources
        top = False
    for child in graph.children:
        yield from _blends(child, top)
