"""Another sequence length in the middle of an epoch, with nothing seen again and next to nothing lost."""

from bisect import bisect_right
from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count
from .errors import ArgumentTypeError, ConfigurationError
from .permute import Permuter, permute_numbers
from .read import TokenSpace
from .slice import SequenceSlicer, TokenWindows

__all__ = ["SequenceResizer"]


@functional_datapipe("resize_sequences")
class SequenceResizer(TokenWindows):
    """Goes on from a permuted `slice_sequences(S, unit=U)` with another length (functional:
    `resize_sequences`). Item 0 is the first window of what was not seen; later epochs are whole again.

    The units stay in the epoch's order. After `after` samples the first r of them have had one window
    more than the others; each goes on where it stopped:

        units, in order │ u0 ████████──── │ u1 ████████──── │ u2 ████──────── │ u3 ████──────── │
                          seen    unseen                      r = 2

    So what was seen is always a short list of (units in order, tokens seen of each), whatever the lengths
    were, and one more change adds one entry. At most one window a unit is lost to the new grid. The windows
    that are left are numbered anew, round by round from the first unit in order: resized to the length it had, a
    half-done round goes on with other units first.

    Args:
        datapipe: a Permuter over a unit slicer, or a SequenceResizer.
        sequence_length: the new S; it divides the unit.
        after: how many of the datapipe's samples were consumed: of its source, below a blend; see
            DataLoader2.consumed_by_source.
    """

    functional_name = "resize_sequences"

    def __init__(self, datapipe: IndexedDataPipe, sequence_length: int, after: int) -> None:
        super().__init__(datapipe)
        self._length = as_count("sequence_length", sequence_length)
        self.after = as_count("after", after, 0)
        self.check()

    def check(self) -> None:
        below = self.datapipe
        if isinstance(below, Permuter) and isinstance(below.datapipe, SequenceSlicer):
            slicer = below.datapipe
            if slicer.align is not None:
                raise ConfigurationError(
                    "rows that are aligned to documents have no units whose rest could go on with another length: "
                    "resize_sequences takes slice_sequences(S, unit=U)"
                )
            self._slicer, self._permuter = slicer, below
            epoch, consumed = divmod(self.after, slicer.samples_per_pass)
            rounds, into = divmod(consumed, slicer.units)
            spans = [
                (into, (rounds + 1) * slicer.sequence_length),
                (slicer.units, rounds * slicer.sequence_length),
            ]
        elif isinstance(below, SequenceResizer):
            self._slicer, self._permuter = below._slicer, below._permuter
            epoch, spans = below._spans_after(self.after)
        else:
            raise ArgumentTypeError(
                "resize_sequences takes slice_sequences(S, unit=U).permute(seed), or what it gave before; got "
                f"{type(below).__name__}"
            )
        if self._slicer.unit % self._length:
            raise ConfigurationError(
                f"sequence_length={self._length} does not divide the unit of {self._slicer.unit} tokens"
            )
        self._epoch = epoch
        self._spans = [span for i, span in enumerate(spans) if span[0] > (spans[i - 1][0] if i else 0)]
        # rounds of the unfinished epoch: round t takes window t of every unit that still has one
        self._rounds: list[tuple[int, int, int]] = []  # (first number, its units in order: from, to)
        number = 0
        left = [(self._slicer.unit - seen) // self._length for _, seen in self._spans]
        for t in range(max(left, default=0)):
            begin = 0
            for (stop, _), windows in zip(self._spans, left, strict=True):
                if windows > t and stop > begin:
                    self._rounds.append((number, begin, t))
                    number += stop - begin
                begin = stop
        self._rest = number
        self._later = self._slicer.units * (self._slicer.unit // self._length)

    def _spans_after(self, after: int) -> "tuple[int, list[tuple[int, int]]]":
        """(epoch, [(units in order up to, tokens seen of each)]) when `after` samples were consumed."""
        if after >= self._rest:
            epoch, consumed = divmod(after - self._rest, self._later)
            rounds, into = divmod(consumed, self._slicer.units)
            seen = rounds * self._length
            return self._epoch + 1 + epoch, [(into, seen + self._length), (self._slicer.units, seen)]
        spans: list[tuple[int, int]] = []
        begin = 0
        for stop, seen in self._spans:
            windows = [first for first, at, _ in self._rounds if at == begin and first <= after]
            whole = sum(first + stop - begin <= after for first in windows)
            partly = [after - first for first in windows if 0 < after - first < stop - begin]
            seen += whole * self._length
            if partly:
                spans.append((begin + partly[0], seen + self._length))
            spans.append((stop, seen))
            begin = stop
        return self._epoch, spans

    @property
    def reader(self) -> TokenSpace:
        return self._slicer.reader

    @property
    def sequence_length(self) -> int:
        return self._length

    @property
    def settings(self) -> dict[str, Any]:
        return {"sequence_length": self._length, "after": self.after}

    @property
    def notes(self) -> str:
        return f"{self._rest:,} samples left of epoch {self._epoch}, then {self._later:,} an epoch"

    @property
    def samples_per_pass(self) -> int:
        return self._later

    def starts(self, numbers: Int64s) -> Int64s:
        epoch, order, seen = self._located(numbers)
        units = self._slicer.units
        place = permute_numbers(epoch * units + order, units, units, MAX_NUMBER, self._permuter._key)
        return (place - epoch * units) * self._slicer.unit + seen

    def _located(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """(n,) numbers → epochs, units in the epoch's order, tokens of the unit before the window."""
        epoch, order, seen = (np.empty(numbers.size, np.int64) for _ in range(3))
        firsts = [first for first, _, _ in self._rounds]
        stops = [stop for stop, _ in self._spans]
        for i, number in enumerate(numbers.tolist()):
            if number < self._rest:
                first, begin, t = self._rounds[bisect_right(firsts, number) - 1]
                order[i] = begin + number - first
                epoch[i] = self._epoch
                seen[i] = self._spans[bisect_right(stops, int(order[i]))][1] + t * self._length
            else:
                e, within = divmod(number - self._rest, self._later)
                part, order[i] = divmod(within, self._slicer.units)
                epoch[i] = self._epoch + 1 + e
                seen[i] = part * self._length
        return epoch, order, seen

    def epoch_of(self, numbers: Int64s) -> Int64s:
        return self._located(numbers)[0]

    def numbers_at(self, tokens: Int64s, hi: int, lo: int = 0) -> Int64s:
        return np.concatenate([np.empty(0, np.int64), *(self._numbers_at(t, hi, lo) for t in tokens.tolist())])

    def _numbers_at(self, token: int, hi: int, lo: int) -> Int64s:
        unit, rest = divmod(token - 1, self._slicer.unit)
        units = self._slicer.units
        found: list[int] = []
        if token < 1 or unit >= units:
            return np.empty(0, np.int64)
        epoch, first = self._epoch, 0
        if lo >= self._rest:
            later = (lo - self._rest) // self._later
            epoch, first = epoch + 1 + later, self._rest + later * self._later
        while first < hi:
            at = np.array([epoch * units + unit], np.int64)
            order = int(permute_numbers(at, units, units, MAX_NUMBER, self._permuter._key, inverse=True)[0])
            order -= epoch * units
            if epoch == self._epoch:
                stops = [stop for stop, _ in self._spans]
                span = bisect_right(stops, order)
                begin, seen = (stops[span - 1] if span else 0), self._spans[span][1]
                t = (rest - seen) // self._length
                found += [f + order - b for f, b, u in self._rounds if b == begin and u == t and rest >= seen]
                first = self._rest
            else:
                found.append(first + rest // self._length * units + order)
                first += self._later
            epoch += 1
        return np.array([n for n in found if lo <= n < hi], np.int64)
