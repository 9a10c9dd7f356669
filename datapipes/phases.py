"""Stretches of a blend with one set of weights, and where each begins: a pure function of its weights and changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .core import MAX_NUMBER, Int64s
from .weights import WeightTree, weight_tree

__all__ = ["Phases", "WeightChange", "phases_of"]


class WeightChange(NamedTuple):
    """From the blend's number `number` on, its sources have these integer weights, and, where they are given,
    these caps.
    """

    number: int
    weights: "tuple[int, ...] | None"
    caps: "tuple[int | None, ...] | None" = None


@dataclass(frozen=True)
class Phases:
    """The blend as arrays: a phase is a stretch of numbers with one set of weights."""

    first: Int64s  # (phases,) the phase's first number
    root: Int64s  # (phases,)
    offset: Int64s  # (phases, sources) what each source has given before the phase
    leaf: Int64s  # (phases, sources)
    parent: Int64s  # (nodes,)
    left: Int64s
    right: Int64s
    weight: Int64s
    total: Int64s
    trees: tuple[WeightTree, ...]
    end: int
    exhausted: "str | None"  # the source whose cap ends the numbers


def phases_of(
    sources: Sequence[str],
    weights: tuple[int, ...],
    changes: Sequence[WeightChange],
    caps: "tuple[int | None, ...]",
    stops: bool,
) -> Phases:
    """The phases of a blend with these weights, changes in the order of their numbers, and caps in samples.

    stops: whether the numbers end where a capped source would be drawn once too often; else the others go on.
    """
    first: list[int] = [0]
    trees: list[WeightTree] = [weight_tree(weights)]
    offsets: list[list[int]] = [[0] * len(sources)]
    pending = list(changes)
    end, exhausted = MAX_NUMBER, None
    asked = weights  # before those of sources that are through became 0
    while True:
        start, tree, offset = first[-1], trees[-1], offsets[-1]
        # where a capped source would be drawn once too often; or, where the others go on, is through
        reached, source = min(
            (
                (start + (tree.place(s, cap - offset[s]) if stops else tree.place(s, cap - offset[s] - 1) + 1), s)
                for s, cap in enumerate(caps)
                if cap is not None and tree.weights[s]
            ),
            default=(MAX_NUMBER, -1),
        )
        change = pending[0].number if pending else MAX_NUMBER
        at = min(change, reached)
        if at >= MAX_NUMBER:
            break
        if stops and reached < change:
            end, exhausted = reached, sources[source]
            break
        weights = tree.weights
        if change <= reached:
            changed = pending.pop(0)
            weights = changed.weights or asked
            asked = weights
            caps = caps if changed.caps is None else changed.caps
        counts = [a + b for a, b in zip(offset, tree.counts(at - start), strict=True)]
        if not stops:
            full = [cap is not None and count >= cap for cap, count in zip(caps, counts, strict=True)]
            weights = tuple(0 if f else w for f, w in zip(full, weights, strict=True))
            if not any(weights):
                end, exhausted = at, sources[max(source, 0)]
                break
        if at == start:
            del first[-1], trees[-1], offsets[-1]
        first.append(at)
        trees.append(weight_tree(weights))
        offsets.append(counts)
    return _arrays(first, trees, offsets, end, exhausted)


def _arrays(
    first: "list[int]",
    trees: "list[WeightTree]",
    offsets: "list[list[int]]",
    end: int,
    exhausted: "str | None",
) -> Phases:
    """All trees in one set of arrays: the node numbers of later trees are shifted."""
    shifts = np.cumsum([0, *(len(tree.left) for tree in trees)])

    def joined(name: str) -> Int64s:
        parts = [
            np.where((part := np.array(getattr(tree, name), np.int64)) >= 0, part + shift, part)
            if name in ("left", "right", "parent")
            else np.array(getattr(tree, name), np.int64)
            for tree, shift in zip(trees, shifts, strict=False)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def shifted(values: "list[Any]") -> Int64s:
        rows = [
            np.where((row := np.atleast_1d(np.array(value, np.int64))) >= 0, row + shift, row)
            for value, shift in zip(values, shifts, strict=False)
        ]
        return np.ascontiguousarray(np.stack(rows))

    return Phases(
        first=np.array(first, np.int64),
        root=shifted([tree.root for tree in trees])[:, 0].copy(),
        offset=np.array(offsets, np.int64).reshape(len(first), -1),
        leaf=shifted([tree.leaf for tree in trees]),
        parent=joined("parent"),
        left=joined("left"),
        right=joined("right"),
        weight=joined("weight"),
        total=joined("total"),
        trees=tuple(trees),
        end=end,
        exhausted=exhausted,
    )
