"""Integer weights on a binary tree: the arithmetic under `blend`, exact and invertible.

A blend is decided by one positive integer a source. Its sources sit at the leaves of a binary tree; a
node over the total weight n whose left side weighs a gives, of its first k items,

    lefts(k) = floor((k · a + φ) / n),   φ = floor(n / 2)

to the left: item k goes left iff lefts(k + 1) > lefts(k), as item lefts(k) there, else right as item
k − lefts(k). Nothing is stored, nothing drifts: after n items the left side has had exactly a. So the
same tree gives weighted blends (weights are shares of 2³²) and the exact union (weights are the sources'
lengths). docs/blend.md proves that every source stays within 2 samples of its share at every prefix.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import ArgumentTypeError, WeightsError

__all__ = ["LARGEST_TOTAL", "SCALE", "WeightTree", "as_shares", "quantise", "tempered", "weight_tree"]

SCALE = 1 << 32
"""A weighted blend's integer weights add up to this."""

LARGEST_TOTAL = 1 << 52
"""Above this total the compiled kernels' 104-bit products would no longer be exact."""


@functools.lru_cache(maxsize=1024)
def weight_tree(weights: tuple[int, ...]) -> "WeightTree":
    """The tree of these weights; the same ones come back at every rewrite of a graph."""
    return WeightTree(weights)


@dataclass(frozen=True)
class WeightTree:
    """The tree over the sources of positive weight; nodes in arrays, leaves as −1 − source."""

    weights: tuple[int, ...]
    root: int = field(init=False)
    left: tuple[int, ...] = field(init=False)
    right: tuple[int, ...] = field(init=False)
    weight: tuple[int, ...] = field(init=False)
    total: tuple[int, ...] = field(init=False)
    parent: tuple[int, ...] = field(init=False)
    leaf: tuple[int, ...] = field(init=False)
    """A node's left weight and total, its parent (−2: none); a source's parent (−2: none, −1: not drawn)."""

    def __post_init__(self) -> None:
        drawn = sorted((s for s, w in enumerate(self.weights) if w > 0), key=lambda s: (-self.weights[s], s))
        if not drawn:
            raise WeightsError("every weight is 0: no source is left to draw from")
        if sum(self.weights) >= LARGEST_TOTAL:
            raise WeightsError(f"integer weights add up to {sum(self.weights)}; below 2**52 would do")
        left: list[int] = []
        right: list[int] = []
        weight: list[int] = []
        total: list[int] = []
        parent: list[int] = []
        leaf = [-1] * len(self.weights)

        def grow(sources: Sequence[int], above: int) -> int:
            if len(sources) == 1:
                leaf[sources[0]] = above
                return -1 - sources[0]
            sides: tuple[list[int], list[int]] = ([], [])
            sums = [0, 0]
            for s in sources:  # heaviest first, each to the lighter side
                side = int(sums[1] < sums[0])
                sides[side].append(s)
                sums[side] += self.weights[s]
            v = len(left)
            for values, value in (
                (left, 0),
                (right, 0),
                (weight, sums[0]),
                (total, sum(sums)),
                (parent, above),
            ):
                values.append(value)
            left[v], right[v] = grow(sides[0], v), grow(sides[1], v)
            return v

        root = grow(drawn, -2)
        for name, value in (
            ("root", root), ("left", tuple(left)), ("right", tuple(right)), ("weight", tuple(weight)),
            ("total", tuple(total)), ("parent", tuple(parent)), ("leaf", tuple(leaf)),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    def counts(self, k: int) -> list[int]:
        """How many of the first k items each source gives."""
        found = [0] * len(self.weights)
        todo = [(self.root, k)]
        while todo:
            v, k = todo.pop()
            if v < 0:
                found[-1 - v] = k
                continue
            n = self.total[v]
            lefts = (k * self.weight[v] + n // 2) // n
            todo += [(self.left[v], lefts), (self.right[v], k - lefts)]
        return found

    def place(self, source: int, j: int) -> int:
        """Where item j of a source that is drawn stands."""
        k, v, child = j, self.leaf[source], -1 - source
        while v >= 0:
            n = self.total[v]
            if self.left[v] == child:
                w, phi = self.weight[v], n // 2
            else:
                w, phi = n - self.weight[v], n - 1 - n // 2
            k = -((phi - (k + 1) * n) // w) - 1
            child, v = v, self.parent[v]
        return k


def as_shares(names: Sequence[str], weights: Any, what: str = "weights") -> list[float]:
    """Weights by name or in the order of the sources, as floats; raises WeightsError, ArgumentTypeError."""
    if isinstance(weights, Mapping):
        unknown, missing = [n for n in weights if n not in names], [n for n in names if n not in weights]
        if unknown or missing:
            raise WeightsError(
                f"{what} must name each source once; "
                + (f"unknown: {', '.join(map(repr, unknown))}; " if unknown else "")
                + (f"missing: {', '.join(map(repr, missing))} (0 leaves one out); " if missing else "")
                + f"the sources are {', '.join(map(repr, names))}"
            )
        values = [weights[name] for name in names]
    elif isinstance(weights, (list, tuple, np.ndarray)):
        values = list(weights)
        if len(values) != len(names):
            raise WeightsError(
                f"{what} has {len(values)} values for {len(names)} sources ({', '.join(map(repr, names))})"
            )
    else:
        raise ArgumentTypeError(f"{what} must be a dict by source name or a list, got {weights!r}")
    shares = []
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ArgumentTypeError(f"{what} of source {name!r} must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0:
            raise WeightsError(f"{what} of source {name!r} is {value}; a finite number of at least 0 would do")
        shares.append(float(value))
    if not any(shares):
        raise WeightsError(f"{what} are all 0: {', '.join(map(repr, names))}; at least one must be positive")
    return shares


def tempered(shares: Sequence[float], temperature: "float | None") -> list[float]:
    """share ** (1 / temperature): 1 changes nothing, above 1 evens out, below 1 sharpens."""
    if temperature is None:
        return list(shares)
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, (int, float, np.integer, np.floating))
        or not math.isfinite(temperature)
        or temperature <= 0
    ):
        raise WeightsError(f"temperature is {temperature!r}; a finite number above 0 would do")
    top = max(shares)
    return [(share / top) ** (1 / float(temperature)) if share else 0.0 for share in shares]


def quantise(names: Sequence[str], shares: Sequence[float]) -> tuple[int, ...]:
    """Shares as integers that add up to 2**32, by largest remainder; 0 stays 0.

    Raises WeightsError where a positive weight would round to nothing.
    """
    top = max(shares)
    scaled = [share / top for share in shares]
    total = math.fsum(scaled)
    exact = [share / total * SCALE for share in scaled]
    whole = [int(x) for x in exact]
    missing = SCALE - sum(whole)
    by_remainder = sorted((s for s, share in enumerate(shares) if share), key=lambda s: (whole[s] - exact[s], s))
    for i in range(abs(missing)):
        s = by_remainder[i % len(by_remainder)]
        whole[s] += 1 if missing > 0 else -1
    for name, share, w in zip(names, shares, whole, strict=True):
        if share and w < 1:
            raise WeightsError(
                f"the weight of source {name!r} ({share}) is below 2**-32 of the whole and rounds to nothing; "
                f"give it at least {math.fsum(shares) / SCALE:.3g}, or 0 to leave it out"
            )
    return tuple(whole)
