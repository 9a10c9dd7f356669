"""The order, asked both ways: what does step n hold (`contents`), when is a token seen (`when`)."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..batch import batcher_of
from ..core import IndexedDataPipe, Int64s, as_count, as_numbers, nodes_of
from ..errors import ConfigurationError, OutOfRangeError, SourceGoneError
from ..fetch.routes import Routes, makes_items
from ..fingerprint import order_of
from ..grow import GoneSource
from ..read import TokenReader, TokenSpace
from ..shard import sharder_of
from ..slice import TokenWindows
from ..steps import StepTable

__all__ = [
    "ContentsRecord",
    "RowDocument",
    "Spaces",
    "WhenRecord",
    "check_steps",
    "consumed_by_source",
    "contents",
    "documents",
    "gone_sources",
    "origin_of",
    "sources_of",
    "spaces_by_name",
    "steps_of",
    "tokens",
    "tokens_of",
    "when",
]

MOST_NAMED = 8
"""Sources that an error names."""


class ContentsRecord(NamedTuple):
    """One row of a step.

    sample_number: its place in the run's global order. source, epoch: which source, which time round it.
    token: its first token's place in the whole source, however its documents are chosen (its source number, see
    read.py); file: the path as given; file_token: the same token's place in that file. The row is `sequence_length`
    tokens from there, and one more as the last label; between them documents that were not chosen are left out. A
    packed row holds the document that begins there, and others from elsewhere, which `documents` names.
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


class RowDocument(NamedTuple):
    """A stretch of a row that belongs to one document.

    first, stop: which of the row's sequence_length + 1 tokens. document: its number in the source, −1 where the
    file stores no document ends. id: from the ids beside the token file, None where there are none.
    """

    first: int
    stop: int
    document: int
    id: "str | None"


class _View:
    """A graph seen as a run: the order, how it is dealt, and its steps, from sample 0 on."""

    def __init__(self, graph: IndexedDataPipe) -> None:
        self.graph = graph
        self.steps, self.micro_batch_size = steps_of(graph)
        self.sharder = sharder_of(graph)
        self.first, self.bound = graph.first_sample, graph.last_sample
        self.order = order_of(graph)

    def samples_of(self, step: int) -> Int64s:
        """The sample numbers of a step. Raises OutOfRangeError beyond the run's end."""
        step = as_count("step", step, 0)
        start, stop = self.steps.start(step), min(self.steps.start(step + 1), self.bound)
        if start >= stop:
            raise OutOfRangeError(f"step {step} would begin at sample {start}; the run ends at sample {self.bound}")
        return np.arange(start, stop, dtype=np.int64)

    def dealt(self, samples: Int64s) -> "tuple[list[int], ...]":
        """(n,) sample numbers → steps, ranks, micro-batches, rows, whether masked."""
        steps, starts = self.steps.located(samples)
        # rounds count from the step's first sample; after a resume in the middle of a step, from there
        base = np.where((starts < self.first) & (samples >= self.first), self.first, starts)
        rank, turn = np.zeros(samples.size, np.int64), samples - base
        if self.sharder is not None:
            rank, turn = self.sharder.dealt(samples, base)
        batch, row = np.divmod(turn, self.micro_batch_size)
        batch += -(-(base - starts) // self.steps.unit)
        where = (steps, rank, batch, row, self.masked(samples))
        return tuple(column.tolist() for column in where)

    def masked(self, samples: Int64s) -> np.ndarray:
        """bool (n,): which of these samples have every label masked."""
        found = self.graph.masked(samples)
        return np.zeros(samples.size, np.bool_) if found is None else found


def steps_of(graph: IndexedDataPipe) -> tuple[StepTable, int]:
    """A graph's steps and rows a micro-batch; without a batcher an item is one, on each rank.

    Raises BatchSizeError where the samples are dealt for other micro-batches.
    """
    batcher, sharder = batcher_of(graph), sharder_of(graph)
    if sharder is not None:
        sharder.check_batches(1 if batcher is None else batcher.micro_batch_size)
    if batcher is not None:
        return batcher.steps, batcher.micro_batch_size
    dp = graph.topology.dp_size if graph.topology else 1
    return StepTable.of(((0, dp),), dp), 1


def check_steps(steps: range) -> None:
    """Raises ConfigurationError unless these are consecutive steps of a run."""
    if not isinstance(steps, range) or steps.step != 1 or steps.start < 0:
        raise ConfigurationError(f"steps must be a range with step 1 from 0 or later, got {steps!r}")


def consumed_by_source(graph: IndexedDataPipe, samples: int) -> "dict[str, int]":
    """How many samples of each source the run's first `samples` have taken; repeats count, and what jumps left out."""
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
    epochs, tokens, places = (np.full(samples.size, -1, np.int64) for _ in range(3))
    names, paths = np.full((2, samples.size), "", object)
    alone = np.zeros(samples.size, np.bool_)
    for index, leaf in enumerate(routes.leaves):
        at = np.flatnonzero(leaves == index)
        node, number = _windows(leaf, numbers[at])
        names[at] = leaf.name
        epochs[at] = node.epoch_of(number)
        if isinstance(node, GoneSource):
            continue
        starts = node.starts(number)
        if node.reader.table is not None:
            row, place, count = node.reader.spans(starts, np.full(number.size, node.sequence_length + 1))
            alone[at] = np.bincount(row, count * (place >= 0)) < 2  # a row's first token is no label
        files, places[at] = node.reader.file_of(starts)
        tokens[at] = node.reader.source_numbers(starts)
        paths[at] = np.array([file.path for file in node.reader.files], object)[files]
    *where, masked = view.dealt(samples)
    columns = (column.tolist() for column in (samples, names, epochs, tokens, paths, places))
    return list(map(ContentsRecord, *where, *columns, (np.array(masked, np.bool_) | alone).tolist()))


def tokens(graph: IndexedDataPipe, step: int, rows: "Sequence[int] | None" = None) -> Int64s:
    """The tokens of a step: int64 (n, sequence_length + 1), a row for each record of `contents`, or for those
    at these indices alone.
    """
    view = _View(graph)
    samples = view.samples_of(step)
    return view.order.fetch(samples if rows is None else samples[as_numbers(rows)])


def documents(graph: IndexedDataPipe, step: int) -> "list[list[RowDocument]]":
    """The documents of a step's rows: for each record of `contents` the stretches that make it up, in order.

    None of a row whose source is gone. Raises TokenFileError for ids that belong to another token file.
    """
    view = _View(graph)
    routes = Routes(view.order)
    leaves, numbers = routes.resolve(view.samples_of(step))
    found: list[list[RowDocument]] = [[] for _ in range(leaves.size)]
    for index, leaf in enumerate(routes.leaves):
        at = np.flatnonzero(leaves == index)
        row, first, stop = row_spans(leaf, numbers[at])
        if not row.size:
            continue
        reader = _windows(leaf, numbers[:0])[0].reader.origin
        for i, length, document, name in _by_document(reader, at[row], first, stop):
            begin = found[i][-1].stop if found[i] else 0
            found[i].append(RowDocument(begin, begin + length, document, name))
    return found


def row_spans(leaf: IndexedDataPipe, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Which tokens of their source rows hold, their last label too: (n,) the rows' numbers of one leaf →
    (k,) indices into them, ascending, (k,) first tokens, (k,) one past the last ones.
    """
    node, number = _windows(leaf, numbers)
    if isinstance(node, GoneSource):
        return (np.empty(0, np.int64),) * 3
    start, count = node.starts(number), np.full(number.size, node.sequence_length + 1)
    row = np.arange(number.size)
    if node.reader.table is not None:
        row, start, count = node.reader.spans(start, count)
        row, start, count = row[start >= 0], start[start >= 0], count[start >= 0]  # padding is of no source
    first, source = (node.reader.table or node.reader).pieces
    span, piece, begins, stops = _cut(start, start + count, first[1:])
    ahead = source[piece] - first[piece]
    return row[span], begins + ahead, stops + ahead


def _by_document(
    reader: TokenReader, row: Int64s, first: Int64s, stop: Int64s
) -> "Iterator[tuple[int, int, int, str | None]]":
    """Spans of a source's tokens, cut at the ends of files and documents: (row, tokens, document, its id)."""
    span, file, first, stop = _cut(first, stop, reader.first_tokens[1:])
    row = row[span]
    ids = reader.document_ids()
    parts = []
    before = reader.first_document
    for f, layout in enumerate(reader.files):
        at = np.flatnonzero(file == f)
        if at.size and layout.documents:
            base = reader.first_tokens[f]
            cut, document, begins, stops = _cut(first[at] - base, stop[at] - base, layout.document_ends())
            names = [None if (known := ids[f]) is None else known[d] for d in document.tolist()]
            parts.append((at[cut], stops - begins, before + document, names))
        elif at.size:
            parts.append((at, stop[at] - first[at], np.full(at.size, -1), [None] * at.size))
        before += layout.documents
    order = np.argsort(np.concatenate([part[0] for part in parts]), kind="stable").tolist()
    told = [
        piece
        for at, length, document, names in parts
        for piece in zip(row[at].tolist(), length.tolist(), document.tolist(), names, strict=True)
    ]
    for i in order:
        yield told[i]


def _cut(first: Int64s, stop: Int64s, ends: Any) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Spans cut where pieces end: (n,) first and stop, (m,) ascending ends → (k,) indices of the spans, (k,) of the
    pieces, (k,) first and stop of each part.
    """
    low = np.searchsorted(ends, first.astype(ends.dtype), side="right")
    count = np.searchsorted(ends, stop.astype(ends.dtype), side="left") - low + 1
    span = np.repeat(np.arange(first.size), count)
    piece = np.arange(span.size) - np.repeat(np.cumsum(count) - count, count) + low[span]
    begins = np.where(piece > low[span], ends[np.maximum(piece - 1, 0)].astype(np.int64), first[span])
    return span, piece, begins, np.minimum(stop[span], ends[piece].astype(np.int64))


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

    `token` counts in the whole source (as in `contents`), and `source` is its name or that of a sub-source of chosen
    documents; a token that was not chosen is in no row. A row of `sequence_length` tokens has the tokens after its
    first one as labels, and one more. So the first token of a (sub-)source is never a label, nor are tokens after its
    last whole window. Raises OutOfRangeError for a token that the source does not have, ConfigurationError for a source
    that the graph does not have.
    """
    tokens = _as_tokens(token)
    check_steps(steps)
    view = _View(graph)
    low, high = view.steps.start(steps.start), min(view.steps.start(max(steps.stop, steps.start)), view.bound)
    spaces = spaces_by_name(view.order)
    if source not in spaces and source in gone_sources(view.order):
        raise SourceGoneError(
            f"source {source!r} was dropped from the run and is not in this graph, so its tokens cannot be found; "
            "with the source as it was in the graph, they can"
        )
    if tokens[-1] >= (size := tokens_of(spaces, source)):
        raise OutOfRangeError(f"source {source!r} has {size} tokens, token {tokens[-1]} is not one of them")
    found = list(_find(view.order, source, tokens, low, high)) if low < high else []
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


def _find(node: IndexedDataPipe, source: str, tokens: range, lo: int, hi: int) -> Iterator[Int64s]:
    """The node's numbers from `lo` up to `hi` that hold one of the tokens as a label, and perhaps some around
    them: leaf first, then upwards.
    """
    if isinstance(node, TokenWindows):
        if not isinstance(node, GoneSource) and source in (node.name, node.reader.origin.name):
            # a row's labels are sequence_length tokens: no row slips between places so far apart
            places = node.reader.places_among(tokens, node.sequence_length)
            if places.size:
                yield node.numbers_at(places, hi, lo)
        return
    if makes_items(node):
        _check_origin(node)
    for index, child in enumerate(node.children):
        stretches = node.source_stretches(index, lo, hi)
        found = [numbers for bounds in stretches for numbers in _find(child, source, tokens, *bounds)]
        if found:
            yield node.places(index, np.unique(np.concatenate(found)))[1]


def sources_of(node: IndexedDataPipe) -> "list[tuple[str, TokenSpace]]":
    """(name, token space) of each source of windows below a node. The source whose tokens and documents records
    number is `space.origin`: several sub-sources may be chosen from one.
    """
    if isinstance(node, TokenWindows):
        return [] if isinstance(node, GoneSource) else [(node.name, node.reader)]
    return [found for child in node.children for found in sources_of(child)]


Spaces = dict[str, list[TokenSpace]]


def spaces_by_name(node: IndexedDataPipe) -> Spaces:
    """The token spaces below a node by every name that they go by: their own, and that of the source from which
    their documents were chosen.
    """
    found: Spaces = {}
    for name, space in sources_of(node):
        for known in dict.fromkeys((name, space.origin.name)):
            found.setdefault(known, []).append(space)
    return found


def origin_of(spaces: Spaces, source: str) -> TokenReader:
    """The reader that has all of a source's documents. Raises ConfigurationError for a source that is not there."""
    if source not in spaces:
        names = [repr(name) for name in spaces]
        more = " …" if len(names) > MOST_NAMED else ""
        raise ConfigurationError(
            f"no source is named {source!r}; the sources are {', '.join(names[:MOST_NAMED])}{more}"
        )
    return spaces[source][0].origin


def tokens_of(spaces: Spaces, source: str) -> int:
    """How many tokens a source has, in all its generations of files. Raises ConfigurationError as `origin_of`."""
    origin_of(spaces, source)
    return max(int(space.first_tokens[-1]) for space in spaces[source])


def gone_sources(node: IndexedDataPipe) -> "set[str]":
    """The names of sources that were dropped from the run and are not there any more."""
    return {below.name for below in nodes_of(node) if isinstance(below, GoneSource)}
