"""Rows that stay in their places, with every label masked: documents found to be bad while the run runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .audit.ledger import row_spans, spaces_by_name, tokens_of
from .core import IndexedDataPipe, Int64s, as_count, sample_node
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError
from .fetch.routes import plan_of

__all__ = ["Excluder", "checked_ranges"]


@functional_datapipe("exclude")
class Excluder(IndexedDataPipe):
    """Masks the rows that hold any of these tokens (functional: `exclude`): their labels become −100.

    Rows keep their places, so every other sample keeps its number, and the order its fingerprint. A row holds
    its sequence_length tokens and the label after them. Stands before `shard_ranks`.

    Args:
        ranges: {source: [(first, stop), …]} in tokens of the whole source, stop exclusive; a source's name stands for
            all sub-sources of chosen documents too.
        from_sample: rows before this sample number of the run stay as they are.

    Raises ConfigurationError for a source that is not there, OutOfRangeError for tokens it does not have.
    """

    functional_name = "exclude"
    trunk = True
    decides_order = False

    def __init__(
        self, datapipe: IndexedDataPipe, ranges: Mapping[str, Sequence[tuple[int, int]]], from_sample: int = 0
    ) -> None:
        super().__init__(datapipe)
        self.exclusions = ((as_count("from_sample", from_sample, 0), checked_ranges(datapipe, ranges)),)
        self.check()

    def check(self) -> None:
        if self.datapipe.topology is not None or self.datapipe.steps is not None:
            raise ConfigurationError("exclude stands before shard_ranks: what is masked belongs to the run")

    def also(self, ranges: Mapping[str, Sequence[tuple[int, int]]], from_sample: int) -> "Excluder":
        """This node with further ranges, from a sample number of their own on."""
        more = (from_sample, checked_ranges(self.datapipe, ranges))
        return self.changed(exclusions=(*self.exclusions, more))

    @property
    def settings(self) -> dict[str, Any]:
        said = [
            {
                "ranges": {source: [list(pair) for pair in pairs] for source, pairs in ranges.items()},
                "from_sample": sample,
            }
            for sample, ranges in self.exclusions
        ]
        return said[0] if len(said) == 1 else {"exclusions": said}

    @property
    def notes(self) -> str:
        tokens = sum(b - a for _, ranges in self.exclusions for pairs in ranges.values() for a, b in pairs)
        sources = dict.fromkeys(source for _, ranges in self.exclusions for source in ranges)
        return f"rows with {tokens:,} tokens of {', '.join(sources)} are masked"

    def masked(self, samples: Int64s) -> np.ndarray:
        below = super().masked(samples)
        out = np.zeros(samples.size, np.bool_) if below is None else below
        late = np.flatnonzero(samples >= min(sample for sample, _ in self.exclusions))
        order = sample_node(self)
        leaves, numbers = plan_of(order).resolve(samples[late] - order.first_sample)
        for index, leaf in enumerate(plan_of(order).leaves):
            at = np.flatnonzero(leaves == index)
            spans = None
            for sample, ranges in self.exclusions:
                for name in spaces_by_name(leaf).keys() & ranges.keys() if at.size else ():
                    spans = row_spans(leaf, numbers[at]) if spans is None else spans
                    hit = _overlaps(spans, at.size, ranges[name])
                    out[late[at]] |= hit & (samples[late[at]] >= sample)
        return out


def _overlaps(spans: "tuple[Int64s, Int64s, Int64s]", rows: int, pairs: "Sequence[tuple[int, int]]") -> np.ndarray:
    """bool (rows,): which of them hold a token of the ranges, which are sorted and apart."""
    row, first, stop = spans
    firsts = np.array([pair[0] for pair in pairs], np.int64)
    stops = np.array([pair[1] for pair in pairs], np.int64)
    # the first range that ends behind the span's beginning: does it begin before the span's end?
    near = np.searchsorted(stops, first, side="right")
    hit = (near < stops.size) & (firsts[np.minimum(near, stops.size - 1)] < stop)
    return np.bincount(row[hit], minlength=rows).astype(np.bool_)


def checked_ranges(
    graph: IndexedDataPipe, ranges: Mapping[str, Sequence[tuple[int, int]]]
) -> "dict[str, tuple[tuple[int, int], ...]]":
    """{source: ranges sorted and merged}, each of which the source has. Raises as Excluder says."""
    if not isinstance(ranges, Mapping) or not ranges:
        raise ArgumentTypeError(f"ranges must be {{source: [(first, stop), …]}}, got {ranges!r:.80}")
    spaces = spaces_by_name(graph)
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for source, pairs in ranges.items():
        tokens = tokens_of(spaces, source)
        if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
            raise ArgumentTypeError(f"ranges of {source!r} must be a list of (first, stop) tokens, got {pairs!r:.80}")
        merged: list[tuple[int, int]] = []
        for first, stop in sorted((as_count("first", a, 0), as_count("stop", b, 0)) for a, b in pairs):
            if not first < stop <= tokens:
                raise OutOfRangeError(
                    f"source {source!r} has tokens 0 … {tokens - 1}; [{first}, {stop}) is no range of them"
                )
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((first, stop))
        found[source] = tuple(merged)
    return found
