"""A stretch of the data left out, while the run's own numbers go on."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .core import IndexedDataPipe, Int64s

__all__ = ["Jumper"]


class Jumper(IndexedDataPipe):
    """From number `at` on, the data is `samples` further on. The journal puts it above the order:

        number      0  1  2  3  4  5  6         jumps = [(3, 2)]
        the order's 0  1  2  5  6  7  8         its samples 3 and 4 are never delivered

    Args:
        jumps: (at, samples) in the order of `at`; each adds to those before it.
    """

    functional_name = "jump"

    def __init__(self, datapipe: IndexedDataPipe, jumps: Sequence[tuple[int, int]]) -> None:
        super().__init__(datapipe)
        self._jumps = [(at, samples) for at, samples in jumps]
        self._at = np.array([at for at, _ in jumps], np.int64)
        self._ahead = np.cumsum([0, *(samples for _, samples in jumps)], dtype=np.int64)

    @property
    def settings(self) -> dict[str, Any]:
        return {"jumps": [list(jump) for jump in self._jumps]}

    @property
    def end(self) -> int:
        """Jumps beyond the data's end leave nothing."""
        end, passed = self.datapipe.end, 0
        for (at, _), ahead in zip(self._jumps, self._ahead[1:].tolist(), strict=True):
            if at + passed >= end:
                break
            if at + ahead >= end:
                return at
            passed = ahead
        return max(end - passed, 0)

    def _ahead_of(self, numbers: Int64s) -> Int64s:
        return self._ahead[np.searchsorted(self._at, numbers, side="right")]

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        return np.zeros(numbers.size, np.int64), numbers + self._ahead_of(numbers)

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        landed = np.searchsorted(self._at + self._ahead[1:], numbers, side="right")
        ours = numbers - self._ahead[landed]
        inside = (ours < self.end) & (self._ahead_of(np.maximum(ours, 0)) == self._ahead[landed])
        return np.where(inside & (ours >= 0), ours, -1)

    def source_stretches(self, source: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """One between every two jumps: what was jumped over is no part of any."""
        inside = [at for at in self._at.tolist() if lo < at < hi]
        cuts = list(itertools.pairwise([lo, *inside, max(lo, hi)]))
        ahead = self._ahead_of(np.array([first for first, _ in cuts], np.int64)).tolist()
        return [(first + skipped, stop + skipped) for (first, stop), skipped in zip(cuts, ahead, strict=True)]

    def source_bound(self, source: int, hi: int) -> int:
        return 0 if hi <= 0 else min(hi + int(self._ahead_of(np.array([hi - 1], np.int64))[0]), self.datapipe.end)
