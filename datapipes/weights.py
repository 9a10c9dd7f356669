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

from .core import as_count
from .errors import ArgumentTypeError, WeightsError

__all__ = [
    "LARGEST_TOTAL",
    "SCALE",
    "WeightTree",
    "as_shares",
    "linear_ramp",
    "quantise",
    "tempered",
    "weight_tree",
]

SCALE = 1 << 32
"""A weighted blend's integer weights add up to this."""

LARGEST_TOTAL = 1 << 52
"""Above this total the compiled kernels' 104-bit products would no longer be exact."""

MOST_PIECES = 4096
"""Pieces of a ramp, at most: each is a phase, whose offsets and tree are kept."""


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


def linear_ramp(start: int, stop: int, weights_from: Any, weights_to: Any, pieces: int = 64) -> list[tuple[int, Any]]:
    """A straight way from one set of weights to another, as `schedule=` of a blend takes it.

    The numbers [start, stop) are cut into `pieces` equal phases. Each has as weights how many samples of each
    source it shall hold: what the ramp's integral asks for up to its end, less what the pieces before gave.
    So what one piece rounds the next makes good, and the counts keep to the integral however many there are.
    From `stop` on `weights_to` holds.

    Args:
        start, stop: numbers of the blend (as sample numbers, where it is the run's topmost node).
        weights_from, weights_to: {name: weight} or lists, both of one kind; only ratios count.
        pieces: phases; fewer where there are not so many samples.

    Returns: [(number, weights), …], weights of the kind that was given.
    Raises WeightsError, ArgumentTypeError, ConfigurationError.
    """
    start, stop, pieces = as_count("start", start, 0), as_count("stop", stop), as_count("pieces", pieces)
    if stop <= start:
        raise WeightsError(f"a ramp from {start} to {stop} holds no sample; stop must be above start")
    if pieces > MOST_PIECES:
        raise WeightsError(f"a ramp of {pieces} pieces: each is a phase of the blend; at most {MOST_PIECES} would do")
    named = isinstance(weights_from, Mapping)
    names: Sequence[str] = list(weights_from) if named else [str(i) for i in range(len(_listed(weights_from)))]
    first = quantise(names, as_shares(names, weights_from, "weights_from"))
    last = quantise(names, as_shares(names, weights_to if named else _listed(weights_to), "weights_to"))
    span = stop - start
    pieces = min(pieces, span)
    unit = 2 * span * SCALE  # all of what follows is in units of 1 / unit of a sample: integers only
    given = [0] * len(names)
    ramp: list[tuple[int, Any]] = []
    for piece in range(pieces):
        begin, end = span * piece // pieces, span * (piece + 1) // pieces
        owed = [
            2 * span * a * end + (b - a) * end * end - count * unit
            for a, b, count in zip(first, last, given, strict=True)
        ]
        counts = _apportioned(owed, unit, end - begin)
        given = [a + b for a, b in zip(given, counts, strict=True)]
        ramp.append((start + begin, counts))
    ramp.append((stop, list(last)))
    return [(number, dict(zip(names, weights, strict=True)) if named else weights) for number, weights in ramp]


def _listed(weights: Any) -> "Sequence[float]":
    if not isinstance(weights, (list, tuple, np.ndarray)):
        raise ArgumentTypeError(f"a ramp's weights must be two dicts by source name or two lists, got {weights!r:.200}")
    return list(weights)


def _apportioned(owed: "list[int]", unit: int, samples: int) -> "list[int]":
    """`samples` in whole numbers, none below 0, as near to owed / unit (which add up to it) as can be."""
    counts = [max(0, o // unit) for o in owed]
    rest = samples - sum(counts)
    behind = sorted(range(len(owed)), key=lambda s: (counts[s] * unit - owed[s], s))
    for s in behind[: max(rest, 0)]:
        counts[s] += 1
    for _ in range(-rest):  # sources that had too much already give nothing back, so others give less
        s = max((s for s in behind if counts[s]), key=lambda s: counts[s] * unit - owed[s])
        counts[s] -= 1
    return counts
