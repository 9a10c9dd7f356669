"""Sources that changed while the run ran: one that grew by files, and one whose files are gone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .blend import Blender
from .combine import Mapper
from .core import IndexedDataPipe, Int64s
from .documents import DocumentSelector
from .errors import JournalError, SourceGoneError
from .pack import DocumentPacker
from .permute import Permuter
from .phases import WeightChange
from .read import TokenReader
from .slice import SequenceSlicer, TokenWindows
from .weights import weight_tree

__all__ = ["Generations", "GoneSource", "part_of_source", "reader_of", "with_reader"]


class Generations(Blender):
    """One source in generations of files; nothing seen comes again before all of it is through.

    When files come, the unseen rest of the epoch and the new files are mixed evenly until both are through;
    from then on an epoch is one of everything. That is a blend whose weights are counts of samples:

        (n, 0) ──after c samples──▶ (rest of n, m) ──when those are through──▶ (n, m), (n, m), …

    Args:
        parts: the source over each generation's files alone, first to last.
        after: how many samples the source had given when each generation but the first came, ascending.
    """

    functional_name = "generations"

    def __init__(self, parts: Sequence[IndexedDataPipe], after: Sequence[int]) -> None:
        IndexedDataPipe.__init__(self, *parts)
        lengths = [len(part) for part in parts]
        self.given_name = parts[0].name
        self.sources = tuple(f"{self.given_name}[{i}]" for i in range(len(parts)))
        self.on_exhausted, self.exact, self.temperature = "stop", True, None
        self.schedule: tuple[WeightChange, ...] = ()
        self.weights = (lengths[0], *(0 for _ in parts[1:]))
        self.given_caps: tuple[int | None, ...] = (None,) * len(parts)
        self._after = tuple(after)
        changes: list[WeightChange] = []
        weights, began, seen = self.weights, 0, False  # of the phase; seen: all of it had been given before
        for generation, came in enumerate(after, 1):
            if came >= began + sum(weights):
                began, weights, seen = began + sum(weights), self._everything(lengths[:generation]), True
            within = (came - began) % sum(weights)
            given = weights if seen and not within else weight_tree(weights).counts(within)
            rest = [weight - count for weight, count in zip(weights, given, strict=True)]
            rest[generation] = lengths[generation]
            weights, began, seen = tuple(rest), came, False
            through = WeightChange(came + sum(rest), self._everything(lengths[: generation + 1]))
            changes = [*(c for c in changes if c.number < came), WeightChange(came, weights), through]
        self.changes = tuple(changes)
        _ = self.phases

    def _everything(self, lengths: "list[int]") -> tuple[int, ...]:
        return (*lengths, *(0 for _ in range(len(self.children) - len(lengths))))

    @property
    def samples_per_pass(self) -> int:
        return sum(len(part) for part in self.children)

    @property
    def settings(self) -> dict[str, Any]:
        return {"after": list(self._after)}

    @property
    def notes(self) -> str:
        return f"{len(self.children)} generations of files"


class GoneSource(TokenWindows):
    """Stands for a source that was dropped and is no longer there: its samples have numbers, but no tokens.

    Args:
        name: the source's name. length: samples of an epoch, 0 where that is not known. sequence_length: tokens a row.
        content: the fingerprint of what it was.
    """

    functional_name = "gone"
    decides_order = False

    def __init__(self, name: str, length: int, sequence_length: int, content: str) -> None:
        super().__init__()
        self._name, self._samples, self._length, self._content = name, length, sequence_length, content

    @property
    def name(self) -> str:
        return self._name

    @property
    def content(self) -> str:
        return self._content

    @property
    def notes(self) -> str:
        return "dropped, and not there any more"

    @property
    def sequence_length(self) -> int:
        return self._length

    @property
    def samples_per_pass(self) -> int:
        return max(self._samples, 1)

    def starts(self, numbers: Int64s) -> Int64s:
        raise SourceGoneError(
            f"source {self.name!r} was dropped from the run and is not in this graph, so its tokens cannot be read; "
            "with the source as it was in the graph, they can"
        )

    def epoch_of(self, numbers: Int64s) -> Int64s:
        """−1 where the length of an epoch is not known."""
        return numbers // self._samples if self._samples else np.full(numbers.size, -1, np.int64)


def reader_of(source: IndexedDataPipe) -> TokenReader:
    """The reader at the end of a source that can grow. Raises JournalError for one that cannot."""
    node = source
    while not isinstance(node, TokenReader):
        if not isinstance(node, (DocumentPacker, DocumentSelector, SequenceSlicer, Permuter, Mapper)):
            raise JournalError(
                f"source {source.name!r} cannot grow through {type(node).__name__}; one of select_documents, "
                "slice_sequences, pack_documents, permute and map alone can"
            )
        node = node.datapipe
    return node


def with_reader(source: IndexedDataPipe, reader: TokenReader) -> IndexedDataPipe:
    """The same source over another reader."""
    return reader if isinstance(source, TokenReader) else source.with_children(with_reader(source.datapipe, reader))


def part_of_source(source: IndexedDataPipe, start: int, stop: int) -> IndexedDataPipe:
    """The same source over some of its files alone."""
    reader = reader_of(source)
    if not 0 <= start < stop <= len(reader.files):
        raise JournalError(
            f"source {source.name!r} grew to {stop} files in the journal and has {len(reader.files)} in this graph"
        )
    return with_reader(source, reader.part(start, stop))
