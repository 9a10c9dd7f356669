"""Documents of any length to rows of one length, without a gap: as `slice_sequences` cuts token files."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._torch import IterDataPipe, functional_datapipe
from ..core import as_count
from ..errors import ArgumentTypeError
from .base import StreamingDataPipe

__all__ = ["SequencePacker"]


@functional_datapipe("pack_sequences")
class SequencePacker(StreamingDataPipe):
    """Rows of sequence_length + 1 tokens, int64, the last of which is the next row's first: its label token.

    Its place is the tokens that are left over: fewer than a row, and what is left of one document. What is left at the
    stream's end makes no row.

    Args:
        datapipe: gives token ids, integers (t,): one document or more an item.
        sequence_length: tokens a row (S).

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> documents = IterableWrapper([np.arange(5), np.arange(5, 8)])
    >>> [row.tolist() for row in SequencePacker(documents, 3)]
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """

    initial_state = {"left": np.zeros(0, np.int64)}  # noqa: RUF012 - never changed
    left: np.ndarray

    def __init__(self, datapipe: IterDataPipe, sequence_length: int) -> None:
        super().__init__()
        self.datapipe, self.sequence_length = datapipe, as_count("sequence_length", sequence_length)

    @property
    def settings(self) -> "dict[str, Any]":
        return {"sequence_length": self.sequence_length}

    def __iter__(self) -> "Iterator[np.ndarray]":
        yield from self._rows()  # of what was left over when the state was saved
        for tokens in self.datapipe:
            tokens = np.asarray(tokens)
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise ArgumentTypeError(
                    f"pack_sequences takes token ids, integers (t,), got {tokens.dtype} {tokens.shape}"
                )
            self.left = np.concatenate((self.left, tokens.astype(np.int64)))
            yield from self._rows()

    def _rows(self) -> "Iterator[np.ndarray]":
        while self.left.size > self.sequence_length:
            row = self.left[: self.sequence_length + 1].copy()
            self.left = self.left[self.sequence_length :]
            yield row
