"""Micro-batches of one rank, and the optimizer steps that they make up."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._torch import functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count, in_blocks, sample_node
from .errors import BatchSizeError, ConfigurationError, RemoteFileError
from .fetch.gather import Columns, TokenGather
from .fetch.pages import READ_AHEAD_BATCHES, WATCH, ReadAhead
from .fetch.remote_pieces import RemotePieces
from .fetch.routes import plan_of, stacked
from .salvage import RowSkipper, SkipLedger
from .shard import sharder_of
from .steps import StepTable, as_schedule

__all__ = ["Rows", "SampleBatcher", "batcher_of"]


class Rows(NamedTuple):
    """One micro-batch before collation.

    tokens: int64 (b, sequence_length + 1), or a list of b items where a map made something else; of a batcher that
        `reads` some columns, those.
    sample_numbers: int64 (b,), −1 for padding. sources: int64 (b,), indices into `source_names`.
    valid: bool (b,), False for padding; None unless `once(tail="pad")` is below.
    masked: bool (b,), True where `exclude` masks every label; None unless a row is.
    places: int64 (b,), the rows' places in the gather's table (see `TokenGather`), −1 for padding and for rows that
        cannot be read and were skipped; None where a map made them.
    """

    tokens: Any
    sample_numbers: Int64s
    sources: Int64s
    valid: "np.ndarray | None"
    masked: "np.ndarray | None" = None
    places: "Int64s | None" = None


@functional_datapipe("batch_samples")
class SampleBatcher(IndexedDataPipe):
    """Groups this rank's samples into micro-batches (functional: `batch_samples`, also `.batch`).

    Args:
        micro_batch_size: rows of one item.
        global_batch_size: samples of one optimizer step over all ranks: a number, or a schedule
            [(0, 64), (1000, 128)] of (step, size); left out: dp_size × the micro-batch.

    Raises BatchSizeError where dp_size × micro-batch does not divide a size, with the nearest that it does.
    Items are `Rows`. len: the batches of one pass, rounded down; where the numbers end, what is left of an
    incomplete last step follows the `tail` of `once` (a `limit` drops it).
    """

    functional_name = "batch_samples"
    trunk = True
    in_order = False

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        micro_batch_size: int,
        global_batch_size: "int | Sequence[tuple[int, int]] | None" = None,
    ) -> None:
        super().__init__(datapipe)
        self.micro_batch_size = as_count("micro_batch_size", micro_batch_size)
        dp = datapipe.topology.dp_size if datapipe.topology else 1
        self.unit = dp * self.micro_batch_size
        self.schedule = as_schedule(global_batch_size, self.unit)
        self._steps = StepTable.of(self.schedule, self.unit)
        self._skipper: RowSkipper | None = None
        self._columns: Columns | None = None
        self.check()

    def check(self) -> None:
        child = self.datapipe
        if child.steps is not None:
            raise ConfigurationError("batch_samples stands once in a graph")
        if (sharder := sharder_of(child)) is not None:
            sharder.check_batches(self.micro_batch_size)
        self._bound = sample_node(child).last_sample if child.finite else None
        if self._bound is None or child.first_sample < self._bound:  # the end of a run is a boundary too
            self._steps.check_from(child.first_sample)
        if child.finite and child.first_sample == 0 and self.end == 0:
            raise BatchSizeError(
                f"the run has {self._bound} samples, fewer than one step of {self._steps.size(0)}: nothing would be "
                f"delivered; a global batch of at most {self._bound}, or once(tail='pad') would do"
            )

    def skipping_errors(self, exceptions: "tuple[type[Exception], ...]", ledger: SkipLedger) -> "SampleBatcher":
        """The same batches; a sample that raises one of these is a row of zeros, with every label masked."""
        return self.changed(_skipper=RowSkipper(exceptions, ledger))

    @property
    def reads(self) -> "Columns | None":
        """Which tokens of each row are read from files; None: all. What a map makes is made of whole rows."""
        return self._columns

    def reading(self, columns: "Columns | None") -> "SampleBatcher":
        """The same batches of which no more than these columns is read."""
        return self.changed(_columns=columns)

    def with_steps(self, steps: StepTable) -> "SampleBatcher":
        """The same batches counted by another table of steps (a run's breakpoints).

        Whether its sizes divide is checked when a resume skip says from where on they matter.
        """
        return self.changed(_steps=steps)

    @property
    def settings(self) -> dict[str, Any]:
        size = self.schedule[0][1] if len(self.schedule) == 1 else [list(pair) for pair in self.schedule]
        return {"micro_batch_size": self.micro_batch_size, "global_batch_size": size}

    @property
    def notes(self) -> str:
        size = self._steps.size(0)
        text = f"{size // self.unit:,} micro-batch(es) a step"
        return text + (f", {self.end:,} in all" if self.finite else f", {len(self):,} a pass")

    @property
    def steps(self) -> StepTable:
        return self._steps

    @property
    def skipped_items(self) -> int:
        return self.first_sample // self.unit

    @property
    def samples_per_pass(self) -> int:
        return self.datapipe.samples_per_pass // self.micro_batch_size

    @property
    def end(self) -> int:
        child = self.datapipe
        if self._bound is None:
            return child.end // self.micro_batch_size
        if self.tail == "uneven":
            return -(-child.end // self.micro_batch_size)
        last = self.last_sample
        if self.tail == "pad" and self._steps.start(self._steps.step_of(last)) < last:
            last = self._steps.start(self._steps.step_of(last) + 1)
        return max(0, last - child.first_sample) // self.unit

    @property
    def last_sample(self) -> int:
        if self._bound is None:
            return MAX_NUMBER
        # an incomplete last step is dropped, unless `once` says otherwise
        return self._steps.start(self._steps.step_of(self._bound)) if self.tail == "drop" else self._bound

    def source_bound(self, source: int, hi: int) -> int:
        return min(hi * self.micro_batch_size, MAX_NUMBER)

    def sample_numbers(self, numbers: Int64s) -> Int64s:
        """(n,) batches → (n,) the sample numbers of their first rows."""
        return self.datapipe.sample_numbers(numbers * self.micro_batch_size)

    @property
    def source_names(self) -> "list[str]":
        """What the indices in `Rows.sources` stand for."""
        return [leaf.name for leaf in plan_of(self.datapipe).leaves]

    def fetch(self, numbers: Any, columns: Any = None) -> "list[Rows]":
        return list(self._rows(self.checked(numbers), columns))

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Rows]:
        stop = self.end if stop is None else min(stop, self.end)
        return in_blocks(functools.partial(self._followed, stop), start, stop)

    def _followed(self, stop: int, batches: Int64s) -> Iterator[Rows]:
        """The same of batches after which others come, up to `stop`: what is remote of them is fetched ahead."""
        remote = self.remote_pieces()
        return self._rows(batches) if remote is None else self._fetched(remote, batches, stop)

    def _fetched(self, remote: RemotePieces, batches: Int64s, stop: int) -> Iterator[Rows]:
        rows = self._rows(batches)
        with remote.ahead.follow(self, int(batches[0]), stop, self.reads) as ahead:
            for number in batches.tolist():
                ahead.before(number)
                try:
                    found = next(rows)
                except RemoteFileError as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        sample = int(self.sample_numbers(np.array([number], np.int64))[0])
                        error.add_note(f"in batch {number + self.skipped_items}, sample numbers from {sample} on")
                    raise
                yield found

    def remote_pieces(self) -> "RemotePieces | None":
        """What of the token files is remote; None: nothing, or rows are made of it by a map."""
        gather = plan_of(self.datapipe).gather and plan_of(sample_node(self.datapipe)).gather
        return None if gather is None else gather.remote

    def stretches_of(self, first: int, stop: int, columns: Any) -> "tuple[Int64s, Int64s, int]":
        """What batches [first, stop) read, as `TokenGather.stretches` says, and the tokens of one batch."""
        child, b = self.datapipe, self.micro_batch_size
        order = sample_node(child)
        plan = plan_of(order)
        assert plan.gather is not None  # who asks has found remote pieces
        samples = child.sample_numbers(np.arange(first * b, min(stop * b, child.end), dtype=np.int64))
        starts, real = np.full(samples.size, -1, np.int64), samples < order.last_sample
        starts[real] = plan.starts(samples[real] - order.first_sample)[1]
        places, counts = plan.gather.stretches(starts, plan.width, columns)
        return places, counts, int(np.broadcast_to(counts, places.shape).sum()) // max(1, samples.size) * b

    def _rows(self, batches: Int64s, columns: Any = None) -> Iterator[Rows]:
        """All batches routed at once; each then gathered only when it is asked for."""
        b, child = self.micro_batch_size, self.datapipe
        columns = self.reads if columns is None else columns
        numbers = (batches[:, None] * b + np.arange(b, dtype=np.int64)).reshape(-1)
        samples = child.sample_numbers(numbers)
        valid = None
        if self._bound is not None and (ended := samples >= self._bound).any():
            valid = ~ended
        masked = self._masked(samples, valid)
        if plan_of(child).gather is None:
            yield from self._made_rows(numbers, samples, valid, masked)
            return
        # windows of tokens: from the sample numbers on, so that the sharder is asked only once
        order = sample_node(child)
        plan = plan_of(order)
        if valid is None:
            sources, places = plan.starts(samples - order.first_sample)
        else:
            sources, places = np.full(numbers.size, -1, np.int64), np.full(numbers.size, -1, np.int64)
            sources[valid], places[valid] = plan.starts(samples[valid] - order.first_sample)
            samples = np.where(valid, samples, -1)
        gather, width = plan.gather, plan.width
        assert gather is not None
        pad = self.tail == "pad"
        kept = np.ones(b, np.bool_) if pad else None
        ahead = None
        for at in range(0, numbers.size, b):
            if WATCH.reading:
                if ahead is None:
                    after = functools.partial(self._places_after, int(batches[-1]))
                    ahead = ReadAhead(gather, places, b, width, columns, after)
                ahead.before(at)
            rows: Any = slice(at, at + b)
            if valid is not None and pad:
                kept = valid[rows]
            elif valid is not None:
                rows = np.flatnonzero(valid[rows]) + at
            hidden = None if masked is None else masked[rows]
            where = places[rows]
            try:
                tokens = self.gathered(gather, where, width, columns, ahead is not None)
            except Exception as error:
                tokens, bad = self._salvaged(error, gather, where, samples[rows], width, columns)
                hidden = bad if hidden is None else hidden | bad
                where = np.where(bad, -1, where)  # nothing is asked of a file that cannot be read
            yield Rows(tokens, samples[rows], sources[rows], kept, hidden, where)

    def gathered(self, gather: TokenGather, places: Int64s, width: int, columns: Any, advised: bool) -> np.ndarray:
        """The rows of one batch: the reading of it all."""
        return gather.rows(places, width, columns, advised)

    def _salvaged(
        self, error: Exception, gather: TokenGather, places: Int64s, samples: Int64s, width: int, columns: Any
    ) -> "tuple[np.ndarray, np.ndarray]":
        """((b, width) rows, bool (b,) those that stand for one that cannot be made), or raises the error."""
        if (skipper := self._skipper) is None or not isinstance(error, skipper.exceptions):
            raise error
        counts = gather.stretches(np.full(1, -1, np.int64), width, columns)[1]  # as many of each row, of padding too
        return skipper.rows(lambda i: gather.rows(places[i : i + 1], width, columns)[0], samples, int(counts.sum()))

    def _places_after(self, batch: int) -> Int64s:
        """Places of the batches after this one that may be read ahead; none where they cannot be routed."""
        order, b, end = sample_node(self.datapipe), self.micro_batch_size, self.datapipe.end
        first = min((batch + 1) * b, end)  # there may be no number after this batch, and none above 2^63 - 1
        numbers = np.arange(first, min(first + READ_AHEAD_BATCHES * b, end), dtype=np.int64)
        try:
            samples = self.datapipe.sample_numbers(numbers)
            return plan_of(order).starts(samples[samples < order.last_sample] - order.first_sample)[1]
        except Exception:  # it comes with its own batch
            return numbers[:0]

    def _masked(self, samples: Int64s, valid: "np.ndarray | None") -> "np.ndarray | None":
        """bool (n,): rows that `exclude` masks; None where it masks none of them."""
        masked = self.datapipe.masked(samples if valid is None else samples[valid])
        if masked is None or not masked.any():
            return None
        if valid is None:
            return masked
        out = np.zeros(samples.size, np.bool_)
        out[valid] = masked
        return out

    def _made_rows(
        self,
        numbers: Int64s,
        samples: Int64s,
        valid: "np.ndarray | None",
        masked: "np.ndarray | None",
    ) -> Iterator[Rows]:
        """Items that a map or zip below makes; padding repeats the first of a batch, and is masked later."""
        b, child = self.micro_batch_size, self.datapipe
        leaves = plan_of(child).resolve(numbers if valid is None else numbers[valid])[0]
        sources = np.full(numbers.size, -1, np.int64)
        sources[slice(None) if valid is None else valid] = leaves
        for at in range(0, numbers.size, b):
            kept = np.ones(b, np.bool_) if valid is None else valid[at : at + b]
            rows = np.flatnonzero(kept) + at
            if rows.size == 0:  # padding alone: any item will do, it is masked
                some = child if child.end else sample_node(child)
                number = np.full(b, -1, np.int64)
                yield Rows(stacked([some.fetch([0])[0]] * b), number, number, kept)
                continue
            made, bad = self._made(numbers[rows], samples[rows])
            hidden = None if masked is None else masked[at : at + b]
            if self.tail != "pad":
                hidden = None if masked is None else masked[rows]
                if bad is not None:
                    hidden = bad if hidden is None else hidden | bad
                yield Rows(stacked(list(made)), samples[rows], sources[rows], None, hidden)
                continue
            if bad is not None:
                hidden = np.zeros(b, np.bool_) if hidden is None else hidden.copy()
                hidden[np.flatnonzero(kept)] |= bad
            items = [made[0]] * b
            for place, item in zip(np.flatnonzero(kept).tolist(), made, strict=True):
                items[place] = item
            number = np.where(kept, samples[at : at + b], -1)
            yield Rows(stacked(items), number, sources[at : at + b], kept, hidden)

    def _made(self, numbers: Int64s, samples: Int64s) -> "tuple[Any, np.ndarray | None]":
        """(the items below, bool (n,) of those that stand for one that cannot be made; None: all could be)."""
        child, skipper = self.datapipe, self._skipper
        try:
            return child.fetch(numbers), None
        except Exception as error:
            if skipper is None or not isinstance(error, skipper.exceptions):
                raise

            def empty() -> Any:
                return np.zeros(child.sequence_length + 1, np.int64)

            return skipper.items(lambda i: child.fetch(numbers[i : i + 1])[0], samples, empty)


def batcher_of(graph: IndexedDataPipe) -> "SampleBatcher | None":
    """The batcher that makes the steps of a graph, if it has one."""
    while graph.steps is not None and not isinstance(graph, SampleBatcher):
        graph = graph.datapipe
    return graph if isinstance(graph, SampleBatcher) else None
