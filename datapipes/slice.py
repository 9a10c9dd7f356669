"""Windows of tokens: item k is `sequence_length` tokens and the label token after them."""

from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .align import aligned_rows
from .cache import MappedArrays
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, Unpickled, as_count
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenFileError
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


def in_every_epoch(node: TokenWindows, within: Int64s, hi: int, lo: int) -> Int64s:
    """(n,) of a node's numbers in its epoch 0 → those in every epoch, from `lo` up to `hi`. Raises OutOfRangeError."""
    length = node.samples_per_pass
    count = -(-hi // length) - lo // length
    if count * within.size > MOST_FOUND:
        raise OutOfRangeError(
            f"source {node.name!r}: more than {MOST_FOUND:,} of its rows hold what was asked for; ask fewer steps"
        )
    epochs = np.arange(lo // length, -(-hi // length), dtype=np.int64) * length
    found = (epochs[:, None] + within).reshape(-1)
    return found[(found >= lo) & (found < hi)]


@functional_datapipe("slice_sequences")
class SequenceSlicer(TokenWindows):
    """Cuts a token space into windows that overlap by the label token (functional: `slice_sequences`).

    Window k holds tokens [k·S, k·S + S], of which [k·S + 1, k·S + S] are labels: every token but the first
    is a label at most once an epoch. Numbers beyond one epoch go round again.

    With `unit=U` (a multiple of S) the tokens are cut into units of U first, and the windows are numbered
    part by part: the first windows of all units, then the second ones. A `permute` above keeps to that, so
    the unseen rest of every unit stays in one piece, and `resize_sequences` can change S exactly.

    With `align="document"` every row begins at a document's beginning, or a whole number of S tokens into a document
    that fills the row; what does not fit is left out (align.py says exactly what).

    Args:
        datapipe: a TokenReader, or a DocumentSelector.
        sequence_length: S, in tokens.
        unit: U, in tokens; left out, S.
        align: None, or "document", over files that have document ends.

    Raises ConfigurationError if the tokens do not fill one unit, or S does not divide U; with align, for files without
    document ends.
    """

    functional_name = "slice_sequences"

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        sequence_length: int,
        unit: "int | None" = None,
        align: "str | None" = None,
    ) -> None:
        super().__init__(datapipe)
        if align not in (None, "document"):
            raise ConfigurationError(f"align is {align!r}; None or 'document' would do")
        if align is not None and unit is not None:
            raise ConfigurationError("align= and unit= exclude one another: documents begin inside units")
        self.align = align
        self._found = Unpickled()
        self._digest = ""
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
        if self.align is not None and (self._found.value is None or self._found.value[0] is not self.datapipe):
            self._found = Unpickled()
            found = aligned_rows(self.reader, self._length)
            self._rows, tokens, _, _ = found.numbers
            self._left_out, self._digest = 1 - tokens / self.reader.samples_per_pass, found.digest
            self._found.value = self.datapipe, MappedArrays(found)
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

    def _aligned_starts(self) -> Int64s:
        """int64 (rows,), mapped: where the rows of an epoch begin."""
        if self._found.value is None:  # in another process
            found = aligned_rows(self.reader, self._length)
            if found.digest != self._digest:
                raise TokenFileError(
                    f"source {self.name!r}: its rows would begin elsewhere now than when the graph was built; its "
                    "document ends were written to"
                )
            self._found.value = self.datapipe, MappedArrays(found)
        return self._found.value[1].arrays[0]

    @property
    def sequence_length(self) -> int:
        return self._length

    @property
    def units(self) -> int:
        return (self.reader.samples_per_pass - 1) // self.unit

    @property
    def settings(self) -> dict[str, Any]:
        unit = {} if self.unit == self._length else {"unit": self.unit}
        align = {} if self.align is None else {"align": self.align}
        return {"sequence_length": self._length, **unit, **align}

    @property
    def notes(self) -> str:
        said = f"{self.samples_per_pass:,} samples an epoch"
        return said if self.align is None else f"{said}, {self._left_out:.2%} of the tokens left out"

    @property
    def order_settings(self) -> dict[str, Any]:
        """With where rows begin, so that other document ends are another order."""
        return self.settings if self.align is None else {**self.settings, "starts": self._digest}

    @property
    def samples_per_pass(self) -> int:
        return self.units * (self.unit // self._length) if self.align is None else self._rows

    def starts(self, numbers: Int64s) -> Int64s:
        within = numbers % self.samples_per_pass
        if self.align is not None:
            return self._aligned_starts()[within]
        if self.unit == self._length:
            return within * self._length
        part, unit = np.divmod(within, self.units)
        return unit * self.unit + part * self._length

    def numbers_at(self, tokens: Int64s, hi: int, lo: int = 0) -> Int64s:
        if self.align is not None:
            starts = self._aligned_starts()
            row = np.searchsorted(starts, tokens, side="left") - 1  # the last one that begins before the token
            row = row[(row >= 0) & (tokens <= starts[np.maximum(row, 0)] + self._length)]
            return in_every_epoch(self, np.unique(row), hi, lo)
        tokens = tokens[(tokens > 0) & (tokens <= self.units * self.unit)]
        unit, rest = np.divmod(tokens - 1, self.unit)
        return in_every_epoch(self, (rest // self._length) * self.units + unit, hi, lo)

    def epoch_of(self, numbers: Int64s) -> Int64s:
        return numbers // self.samples_per_pass
