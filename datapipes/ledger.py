"""The order, asked both ways: what does step n hold (`contents`), when is a token seen (`when`)."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .batch import batcher_of
from .core import IndexedDataPipe, Int64s, as_count, sample_node
from .errors import ConfigurationError, OutOfRangeError
from .fingerprint import order_of
from .gather import Routes, makes_items
from .grow import GoneSource
from .read import TokenReader
from .shard import RankSharder
from .slice import TokenWindows
from .steps import StepTable

__all__ = ["ContentsRecord", "WhenRecord", "consumed_by_source", "contents", "steps_of", "tokens", "when"]


class ContentsRecord(NamedTuple):
    """One row of a step.

    sample_number: its place in the run's global order. source, epoch: which source, which time round it.
    token: its first token's place in the source; file: the path as given; file_token: the same token's
    place in that file. The row is `sequence_length` tokens from there, and one more as the last label.
    Of a dropped source that is gone, token and file_token are −1, file is empty, and masked is not known (False).
    masked: every label of the row is masked (see `exclude`).
    """

    step: int
    rank: int
    micro_batch: int
    row: int
    sample_number: int
    source: str
    epoch: int
    token: int
    file: str
    file_token: int
    masked: bool


class WhenRecord(NamedTuple):
    """One row that has the token as a label; masked: every label of the row is masked (see `exclude`)."""

    step: int
    rank: int
    micro_batch: int
    row: int
    masked: bool


class _View:
    """A graph seen as a run: the order, how it is dealt, and its steps, from sample 0 on."""

    def __init__(self, graph: IndexedDataPipe) -> None:
        self.graph = graph
        self.steps, self.micro_batch_size = steps_of(graph)
        self.sharder: RankSharder | None = None
        self.first = graph.first_sample
        self.order = order_of(graph)
        samples = sample_node(graph)
        self.bound = graph.last_sample
        node = graph
        while node is not samples:
            if isinstance(node, RankSharder):
                self.sharder = node
            node = node.datapipe

    def samples_of(self, step: int) -> Int64s:
        """The sample numbers of a step. Raises OutOfRangeError beyond the run's end."""
        step = as_count("step", step, 0)
        start, stop = self.steps.start(step), min(self.steps.start(step + 1), self.bound)
        if start >= stop:
            raise OutOfRangeError(f"step {step} would begin at sample {start}; the run ends at sample {self.bound}")
        return np.arange(start, stop, dtype=np.int64)

    def dealt(self, samples: Int64s) -> "tuple[list[int], ...]":
        """(n,) sample numbers → steps, ranks, micro-batches, rows, whether masked."""
        steps = [self.steps.step_of(sample) for sample in samples.tolist()]
        starts = np.array([self.steps.start(step) for step in steps], np.int64)
        # rounds count from the step's first sample; after a resume in the middle of a step, from there
        base = np.where((starts < self.first) & (samples >= self.first), self.first, starts)
        dp = 1 if self.sharder is None else self.sharder.topology.dp_size
        turn, slot = np.divmod(samples - base, dp)
        rank = slot
        if self.sharder is not None:
            rank = self.sharder.topology.rank_of_slot(slot, self.sharder.turns(base + turn * dp))
        batch, row = np.divmod(turn, self.micro_batch_size)
        batch += -(-(base - starts) // self.steps.unit)
        return steps, rank.tolist(), batch.tolist(), row.tolist(), self.masked(samples).tolist()

    def masked(self, samples: Int64s) -> np.ndarray:
        """bool (n,): which of these samples have every label masked."""
        found = self.graph.masked(samples)
        return np.zeros(samples.size, np.bool_) if found is None else found


def steps_of(graph: IndexedDataPipe) -> tuple[StepTable, int]:
    """A graph's steps and rows a micro-batch; without a batcher an item is one, on each rank."""
    if (batcher := batcher_of(graph)) is not None:
        return batcher.steps, batcher.micro_batch_size
    dp = graph.topology.dp_size if graph.topology else 1
    return StepTable.of(((0, dp),), dp), 1


def consumed_by_source(graph: IndexedDataPipe, samples: int) -> "dict[str, int]":
    """How many samples of each source the run's first `samples` have taken (repeats counted)."""
    found: dict[str, int] = {}

    def walk(node: IndexedDataPipe, consumed: int) -> None:
        if isinstance(node, TokenWindows) or not (node.in_order and node.children):
            found[node.name] = found.get(node.name, 0) + consumed
            return
        for index, child in enumerate(node.children):
            walk(child, node.source_bound(index, consumed))

    walk(order_of(graph), samples)
    return found


def contents(graph: IndexedDataPipe, step: int) -> "list[ContentsRecord]":
    """A record for each row of the whole step, on all ranks, in the order of their sample numbers.

    Raises OutOfRangeError for a step beyond the run's end.
    """
    view = _View(graph)
    samples = view.samples_of(step)
    routes = Routes(view.order)
    leaves, numbers = routes.resolve(samples)
    records: list[ContentsRecord | None] = [None] * samples.size
    dealt = list(zip(*view.dealt(samples), strict=True))
    for index, leaf in enumerate(routes.leaves):
        at = np.flatnonzero(leaves == index)
        node, number = _windows(leaf, numbers[at])
        if isinstance(node, GoneSource):
            for i, epoch in zip(at.tolist(), node.epoch_of(number).tolist(), strict=True):
                at_step, rank, micro_batch, row, masked = dealt[i]
                records[i] = ContentsRecord(
                    at_step, rank, micro_batch, row, int(samples[i]), leaf.name, epoch, -1, "", -1, masked
                )
            continue
        tokens = node.starts(number)
        files, places = node.reader.file_of(tokens)
        epochs = node.epoch_of(number)
        for i, token, file, place, epoch in zip(
            at.tolist(), tokens.tolist(), files.tolist(), places.tolist(), epochs.tolist(), strict=True
        ):
            at_step, rank, micro_batch, row, masked = dealt[i]
            path = node.reader.files[file].path
            records[i] = ContentsRecord(
                at_step, rank, micro_batch, row, int(samples[i]), leaf.name, epoch, token, path, place, masked
            )
    return [record for record in records if record is not None]


def tokens(graph: IndexedDataPipe, step: int) -> Int64s:
    """The tokens of a step: int64 (samples, sequence_length + 1), a row for each record of `contents`."""
    view = _View(graph)
    return view.order.fetch(view.samples_of(step))


def _windows(node: IndexedDataPipe, numbers: Int64s) -> tuple[TokenWindows, Int64s]:
    """Through maps below a blend, down to the windows of tokens."""
    while not isinstance(node, TokenWindows):
        _check_origin(node)
        numbers = node.route(numbers)[1]
        node = node.datapipe
    return node, numbers


def _check_origin(node: IndexedDataPipe) -> None:
    if len(node.children) != 1:
        raise ConfigurationError(f"{type(node).__name__}: its items do not come from one place in one token file")
    if node.steps is not None or node.topology is not None:
        raise ConfigurationError(
            f"{type(node).__name__}: an order of whole batches has no rows to name; ask each of the graphs below"
        )


def when(graph: IndexedDataPipe, source: str, token: "int | range", steps: range) -> "list[WhenRecord]":
    """Each row of these steps that has the source's token as a label, in order; of a range of tokens (a
    document's), each row that has one of them or more.

    A row of `sequence_length` tokens has the tokens after its first one as labels, and one more. So token
    0 of a source is never a label, nor are tokens after its last whole window.
    Raises OutOfRangeError for a token that the source does not have, ConfigurationError for a source
    that the graph does not have.
    """
    tokens = _as_tokens(token)
    if not isinstance(steps, range) or steps.step != 1 or steps.start < 0:
        raise ConfigurationError(f"steps must be a range with step 1 from 0 or later, got {steps!r}")
    view = _View(graph)
    low, high = view.steps.start(steps.start), min(view.steps.start(max(steps.stop, steps.start)), view.bound)
    names: list[str] = []
    found = list(_find(view.order, source, tokens, low, high, names)) if low < high else []
    if not names and source not in (names := _source_names(view.order)):
        raise ConfigurationError(f"no source is named {source!r}; the sources are {', '.join(map(repr, names))}")
    samples = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
    samples = samples[(samples >= low) & (samples < high)]
    return [WhenRecord(*record) for record in zip(*view.dealt(samples), strict=True)]


def _as_tokens(token: "int | range") -> range:
    if isinstance(token, range):
        if token.step != 1 or not token or token.start < 0:
            raise ConfigurationError(f"a range of tokens has step 1, begins at 0 or later and is not empty: {token!r}")
        return token
    token = as_count("token", token, 0)
    return range(token, token + 1)


def _find(node: IndexedDataPipe, source: str, tokens: range, lo: int, hi: int, names: "list[str]") -> Iterator[Int64s]:
    """The node's numbers from `lo` up to `hi` that hold one of the tokens as a label, and perhaps some around
    them: leaf first, then upwards.
    """
    if isinstance(node, TokenWindows):
        if node.name == source:
            names.append(source)
            last, size = tokens[-1], node.reader.samples_per_pass
            if last >= size:
                raise OutOfRangeError(f"source {source!r} has {size} tokens, token {last} is not one of them")
            # a row's labels are sequence_length tokens in one piece: no row slips between tokens so far apart
            for token in {*tokens[:: node.sequence_length], last}:
                yield node.numbers_at(token, hi, lo)
        return
    if makes_items(node):
        _check_origin(node)
    for index, child in enumerate(node.children):
        bounds = node.source_floor(index, lo), node.source_bound(index, hi)
        found = list(_find(child, source, tokens, *bounds, names))
        if found:
            yield node.places(index, np.unique(np.concatenate(found)))[1]


def _source_names(node: IndexedDataPipe) -> "list[str]":
    if isinstance(node, TokenWindows):
        return [node.name]
    return [name for child in node.children for name in _source_names(child)]


def row_spans(leaf: IndexedDataPipe, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Which tokens of their source rows hold, their last label too: (n,) the rows' numbers of one leaf →
    (k,) indices into them, (k,) first tokens, (k,) one past the last ones.
    """
    node, number = _windows(leaf, numbers)
    if isinstance(node, GoneSource):
        return (np.empty(0, np.int64),) * 3
    first = node.starts(number)
    return np.arange(first.size), first, first + node.sequence_length + 1


def spaces_by_name(graph: IndexedDataPipe) -> "dict[str, list[TokenReader]]":
    """The readers of a graph by the names of their sources; a source that grew has several."""
    found: dict[str, list[TokenReader]] = {}

    def walk(node: IndexedDataPipe) -> None:
        if isinstance(node, TokenReader) and node not in found.setdefault(node.name, []):
            found[node.name].append(node)
        for child in node.children:
            walk(child)

    walk(graph)
    return found
