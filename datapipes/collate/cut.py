"""Which of a row's tokens a context-parallel rank holds: read from files as columns, or taken from arrays (b, S).

S = 16, cp 2, zigzag        rank 0   0 1 2 3 │ 12 13 14 15     the same columns of every row
                            rank 1   4 … 11
per document, of 10 and 6   rank 0   0 1 │ 6 7 │ 10 │ 13 …     the same rule in each document: columns of each row
"""

from dataclasses import dataclass, replace

import numpy as np

from ..core import Int64s
from ..errors import ConfigurationError
from ..fetch.gather import Columns, TokenGather
from ..row_documents import DocumentFill
from ..topology import CUTS, Topology

__all__ = ["Cut", "cut_for"]


@dataclass(frozen=True)
class Cut:
    """The columns that a rank holds of each row of S input tokens, the same of every row.

    inputs, labels: whether it holds the tokens there, and those that follow each of them.
    """

    topology: Topology
    how: str
    inputs: bool
    labels: bool

    @property
    def by_document(self) -> bool:
        return False

    def columns(self, length: int) -> "Columns | None":
        """What to read of rows of S + 1 tokens, so that `split` finds it; None: all."""
        ranges = self.topology.cp_ranges(length, self.how)
        if self.inputs and self.labels and len(ranges) == 1:
            start, stop = ranges[0]
            return None if (start, stop) == (0, length) else [(start, stop + 1)]
        after = [(start + 1, stop + 1) for start, stop in ranges]
        return (ranges if self.inputs else []) + (after if self.labels else [])

    def label_columns(self, length: int, gather: TokenGather) -> Columns:
        """The columns of the labels alone, for what has the same places as `gather`, which knows of documents."""
        return [(start + 1, stop + 1) for start, stop in self.topology.cp_ranges(length, self.how)]

    def split(self, tokens: np.ndarray, columns: Columns) -> "tuple[np.ndarray | None, np.ndarray | None]":
        """What was read of rows, (b, L) → (inputs, labels), each (b, tokens held), None for what is not held."""
        if self.inputs and self.labels and not callable(columns) and len(columns) == 1:
            return tokens[:, :-1], tokens[:, 1:]
        half = tokens.shape[1] // max(1, self.inputs + self.labels)
        return tokens[:, :half] if self.inputs else None, tokens[:, half * self.inputs :] if self.labels else None

    def whole(self, tokens: np.ndarray, where: "Int64s | None") -> "tuple[np.ndarray | None, np.ndarray | None]":
        """The same of whole rows (b, S + 1)."""
        if self.inputs and self.labels and self.topology.cp_size == 1:
            return tokens[:, :-1], tokens[:, 1:]
        inputs = self.take(tokens[:, :-1], where) if self.inputs else None
        return inputs, self.take(tokens[:, 1:], where) if self.labels else None

    def where(self, documents: DocumentFill, length: int) -> "Int64s | None":
        """int64 (b, tokens held): which of its row's tokens each is; None where `take` knows."""
        return None

    def take(self, array: np.ndarray, where: "Int64s | None") -> np.ndarray:
        """Those columns of an array (b, S)."""
        if self.topology.cp_size == 1:
            return array
        parts = [array[:, start:stop] for start, stop in self.topology.cp_ranges(array.shape[1], self.how)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class DocumentCut(Cut):
    """A zigzag in each document by itself, so other columns of each row."""

    @property
    def by_document(self) -> bool:
        return True

    def columns(self, length: int) -> "Columns | None":
        self.topology.cp_ranges(length)  # or it does not share out
        return self if self.inputs or self.labels else []

    def label_columns(self, length: int, gather: TokenGather) -> Columns:
        labels = replace(self, inputs=False, labels=True)
        return lambda _, places, width: labels(gather, places, width)

    def __call__(self, gather: TokenGather, places: Int64s, width: int) -> "tuple[Int64s, Int64s]":
        row, begin, count = self._stretches(gather.documents.fill(places, width, cu_seqlens=True), width - 1)
        starts = np.where(places[row] < 0, -1, places[row] + begin)
        shown = [starts] if self.inputs else []
        if self.labels:
            shown.append(np.where(starts < 0, -1, starts + 1))
        if len(shown) == 1:
            return shown[0], count
        order = np.argsort(np.concatenate([row, row]), kind="stable")  # of each row the inputs, then the labels
        return np.concatenate(shown)[order], np.concatenate([count, count])[order]

    def _stretches(self, documents: DocumentFill, length: int) -> "tuple[Int64s, Int64s, Int64s]":
        assert documents.cu_seqlens is not None  # it was asked for
        return self.topology.cp_stretches(documents.cu_seqlens, length)

    def where(self, documents: DocumentFill, length: int) -> "Int64s | None":
        _, begin, count = self._stretches(documents, length)
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return (np.repeat(begin, count) + within).reshape(-1, length // self.topology.cp_size)

    def take(self, array: np.ndarray, where: "Int64s | None") -> np.ndarray:
        assert where is not None  # documents are known: check() saw it
        return np.take_along_axis(array, where, axis=1)


def cut_for(topology: Topology, how: str, inputs: bool, labels: bool) -> Cut:
    """`how`: as `Topology.cp_ranges`, or "document". Raises ConfigurationError."""
    if not isinstance(how, str) or how not in (*CUTS, "document"):
        raise ConfigurationError(f"cp is {how!r}; one of {', '.join((*CUTS, 'document'))} would do")
    if how == "document" and topology.cp_size > 1:
        return DocumentCut(topology, how, inputs, labels)
    return Cut(topology, "whole" if how == "document" else how, inputs, labels)
