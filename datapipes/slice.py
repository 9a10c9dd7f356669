"""Windows of tokens: item k is `sequence_length` tokens and the label token after them."""

from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError
from .read import TokenSpace

__all__ = ["SequenceSlicer", "TokenWindows"]

MOST_FOUND = 10_000_000
"""Rows that one question is answered with."""


class TokenWindows(IndexedDataPipe):
    """A node that makes rows of tokens: windows of one token space, epoch after epoch without an end."""

    @property
    def reader(self) -> TokenSpace:
        """The tokens that the windows are cut from."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        return MAX_NUMBER

    @property
    def finite(self) -> bool:
        return False

    def starts(self, numbers: Int64s) -> Int64s:
        """(n,) numbers → (n,) the places of their first tokens in the token space."""
        raise NotImplementedError

    def epoch_of(self, numbers: Int64s) -> Int64s:
        """(n,) numbers → (n,) which time round the source each belongs to, from 0."""
        raise NotImplementedError

    def numbers_at(self, tokens: Int64s, hi: int, lo: int = 0) -> Int64s:
        """All numbers from `lo` up to `hi` whose window has one of these tokens as a label (places, as in
        `starts`), in any order, perhaps more than once.
        """
        raise NotImplementedError


@functional_datapipe("slice_sequences")
class SequenceSlicer(TokenWindows):
    """Cuts a token space into windows that overlap by the label token (functional: `slice_sequences`).

    Window k holds tokens [k·S, k·S + S], of which [k·S + 1, k·S + S] are labels: every token but the first
    is a label at most once an epoch. Numbers beyond one epoch go round again.

    With `unit=U` (a multiple of S) the tokens are cut into units of U first, and the windows are numbered
    part by part: the first windows of all units, then the second ones. A `permute` above keeps to that, so
    the unseen rest of every unit stays in one piece, and `resize_sequences` can change S exactly.

    Args:
        datapipe: a TokenReader, or a DocumentSelector.
        sequence_length: S, in tokens.
        unit: U, in tokens; left out, S.

    Raises ConfigurationError if the tokens do not fill one unit, or S does not divide U.
    """

    functional_name = "slice_sequences"

    def __init__(self, datapipe: IndexedDataPipe, sequence_length: int, unit: "int | None" = None) -> None:
        super().__init__(datapipe)
        self._length = as_count("sequence_length", sequence_length)
        self.unit = self._length if unit is None else as_count("unit", unit)
        if self.unit % self._length:
            raise ConfigurationError(
                f"unit={self.unit} is no multiple of sequence_length={self._length}; "
                f"{-(-self.unit // self._length) * self._length} would do"
            )
        self.check()

    def check(self) -> None:
        if not isinstance(self.datapipe, TokenSpace):
            raise ArgumentTypeError(
                f"slice_sequences takes a TokenReader, or documents of one, got {type(self.datapipe).__name__}: "
                "windows are cut before they are re-ordered"
            )
        if self.units < 1:
            tokens = self.reader.samples_per_pass
            raise ConfigurationError(
                f"source {self.name!r} has {tokens} tokens, too short for one window: "
                f"{'sequence_length' if self.unit == self._length else 'unit'}={self.unit} needs {self.unit + 1}"
                + (f"; at most {tokens - 1} would do" if tokens > 1 else "")
            )

    @property
    def reader(self) -> TokenSpace:
        return self.datapipe  # type: ignore[return-value]

    @property
    def sequence_length(self) -> int:
        return self._length

    @property
    def units(self) -> int:
        return (self.reader.samples_per_pass - 1) // self.unit

    @property
    def settings(self) -> dict[str, Any]:
        unit = {} if self.unit == self._length else {"unit": self.unit}
        return {"sequence_length": self._length, **unit}

    @property
    def notes(self) -> str:
        return f"{self.samples_per_pass:,} samples an epoch"

    @property
    def samples_per_pass(self) -> int:
        return self.units * (self.unit // self._length)

    def starts(self, numbers: Int64s) -> Int64s:
        within = numbers % self.samples_per_pass
        if self.unit == self._length:
            return within * self._length
        part, unit = np.divmod(within, self.units)
        return unit * self.unit + part * self._length

    def numbers_at(self, tokens: Int64s, hi: int, lo: int = 0) -> Int64s:
        tokens = tokens[(tokens > 0) & (tokens <= self.units * self.unit)]
        unit, rest = np.divmod(tokens - 1, self.unit)
        within = (rest // self._length) * self.units + unit
        length = self.samples_per_pass
        count = -(-hi // length) - lo // length
        if count * within.size > MOST_FOUND:
            raise OutOfRangeError(
                f"source {self.name!r}: more than {MOST_FOUND:,} of its rows hold what was asked for; ask fewer steps"
            )
        epochs = np.arange(lo // length, -(-hi // length), dtype=np.int64) * length
        found = (epochs[:, None] + within).reshape(-1)
        return found[(found >= lo) & (found < hi)]

    def epoch_of(self, numbers: Int64s) -> Int64s:
        return numbers // self.samples_per_pass
