"""Whether a plain stride over the ranks meets a blend's rhythm, so that ranks get other mixtures: measured.

number    0  1  2  3  4 │ 5  6  7  8  9 │ …        0.8 a, 0.2 b
source    a  a  b  a  a │ a  a  b  a  a │ …        dp = 5: rank 2 gets nothing but b
"""

from typing import Any, NamedTuple

import numpy as np

from . import _kernels_numpy
from .blend import Blender
from .core import IndexedDataPipe, Int64s, nodes_of
from .errors import TokenpipeError

__all__ = ["Uneven", "uneven_shares"]

NUMBERS, ROUNDS = 4096, 64
"""So many numbers are routed, and so many rounds of dp numbers at least."""


class Uneven(NamedTuple):
    """A source, its share of each rank's samples, float64 (dp,), the rank that is off the most, and whether some rank's
    share of some source is off by half of it.
    """

    source: str
    shares: np.ndarray
    rank: int
    much: bool


def uneven_shares(order: IndexedDataPipe, start: int, dp: int, rank: int, stop: "int | None" = None) -> "Uneven | None":
    """What the ranks get of the worst source from number `start` of an order on; None if all are even.

    A rank's share may be off by what dealing at random (as a seed does) would do to it, five standard deviations, and
    by a quarter of itself.

    Args:
        rank: who takes number `start`; the next rank takes the next number.
        stop: numbers from here on do not count.
    """
    end = order.end if stop is None else min(stop, order.end)
    rounds = min(max(ROUNDS, NUMBERS // dp), (end - start) // dp)
    if rounds < ROUNDS:
        return None
    names: list[str] = []
    source = _sources(order, np.arange(start, start + rounds * dp, dtype=np.int64), names)
    if (source < 0).any():
        return None
    slots = np.stack([(source == s).reshape(rounds, dp).mean(axis=0) for s in range(len(names))])  # (sources, dp)
    shares = np.roll(slots, rank, axis=1)
    overall = shares.mean(axis=1, keepdims=True)
    far = np.abs(shares - overall)
    chance = 5 * np.sqrt(overall * (1 - overall) / rounds)
    over = far - np.maximum(chance, overall / 4)
    worst = int(over.max(axis=1).argmax())
    if over[worst].max() <= 0:
        return None
    much = bool((far > np.maximum(chance, overall / 2)).any())
    return Uneven(names[worst], shares[worst], int(far[worst].argmax()), much)


def _sources(node: IndexedDataPipe, numbers: Int64s, names: "list[str]") -> Int64s:
    """(n,) numbers → (n,) which source each comes from, as an index into `names`, which grows; −1: not known.

    No further down than to where nothing forks, by NumPy alone: a loader is made before it is known whether this
    process will ever need compiled kernels.
    """
    if not any(len(below.children) > 1 for below in nodes_of(node)):
        names.append(node.name)
        return np.full(numbers.size, len(names) - 1, np.int64)
    if isinstance(node, Blender):
        p: Any = node.phases
        source, number = np.full(numbers.size, -1, np.int64), np.zeros(numbers.size, np.int64)
        if numbers.size and numbers.max() >= p.end:
            return source
        _kernels_numpy.blend_route(
            numbers, source, number, p.first, p.root, p.offset, p.left, p.right, p.weight, p.total
        )
    else:
        try:
            source, number = node.route(numbers)
        except TokenpipeError:  # a zip's items come from all of its children
            names.append(node.name)
            return np.full(numbers.size, len(names) - 1, np.int64)
    found = np.full(numbers.size, -1, np.int64)
    for s, child in enumerate(node.children):
        at = np.flatnonzero(source == s)
        found[at] = _sources(child, number[at], names)
    return found
