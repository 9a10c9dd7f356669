"""The rehearsal: what the next steps will take of each source, and what of it will surprise.

Counts at the ends of stretches say all of it (counts.py), so ten million steps are planned as fast as ten. view.py
shows a plan as a table or a picture.
"""

import dataclasses
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from ..audit.ledger import steps_of
from ..batch import batcher_of
from ..bound import Limiter, Once
from ..core import MAX_NUMBER, IndexedDataPipe, as_count, sample_node
from ..rhythm import uneven_shares
from ..shard import sharder_of
from ..steps import StepTable, nearest_multiples
from .counts import SourceCounts
from .overlaps import overlap

__all__ = ["Plan", "PlannedSource", "PlannedSteps", "Timeline", "plan"]

TIMELINE = 160
"""Stretches of a timeline, besides those that a change of weights begins."""

MOST_EPOCHS = 4
"""Up to here repeated tokens train about as well as new ones (Muennighoff et al. 2023)."""

MOST_NAMED = 8
"""Sources that one warning names."""

MOST_CHANGES = 64
"""Changes of weights that a timeline gives a place of their own."""


@dataclasses.dataclass(frozen=True)
class PlannedSource:
    """One source in the steps of a plan. Steps are the run's own numbers.

    samples, tokens: what the steps take. share: of all their samples; asked: as the weights say (before caps).
    epochs_before, epochs_after: how far the source is when the steps begin and when they are done.
    exhausted_step: the step that ends its first epoch, from which on it repeats (one before the plan counts too).
    cap_step: the step in which a cap of a blend ends it. repeats: samples of the steps that were seen before.
    unseen: samples of the first epoch that are still to come when the steps are done. bytes_read: rows of
    sequence_length + 1 tokens as they are stored. files, file_bytes: what its rows may come from.
    """

    name: str
    samples: int
    tokens: int
    share: float
    asked: float
    epochs_before: float
    epochs_after: float
    exhausted_step: "int | None"
    cap_step: "int | None"
    repeats: int
    unseen: int
    bytes_read: int
    files: int
    file_bytes: int


@dataclasses.dataclass(frozen=True)
class PlannedSteps:
    """Steps of one global batch size."""

    first_step: int
    steps: int
    global_batch_size: int
    samples: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What was taken of each source by the ends of stretches of the plan.

    step, tokens: (n,) where each stretch ends, tokens from the plan's first on. samples: {source: (n,)} cumulative.
    """

    step: tuple[int, ...]
    tokens: tuple[int, ...]
    samples: dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rehearsal of steps [first_step, first_step + steps), in plain values; `str` is a table.

    asked_steps: how many were asked for; the run may end before. sequence_length: tokens a row. end_step, end: the
    step after the run's last one and why it ends, or None. left_over: samples after the last whole step that are
    never delivered. changes: steps in which the weights in force change.
    """

    first_step: int
    steps: int
    asked_steps: int
    samples: int
    tokens: int
    sequence_length: int
    bytes_read: int
    sources: tuple[PlannedSource, ...]
    batches: tuple[PlannedSteps, ...]
    end_step: "int | None"
    end: "str | None"
    left_over: int
    changes: tuple[int, ...]
    warnings: tuple[str, ...]
    timeline: Timeline

    def as_json(self) -> dict[str, Any]:
        """The plan as plain dicts, lists, numbers and strings."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        from .view import render_plan

        return render_plan(self)

    def draw(self, path: Any) -> None:
        """A picture of the shares over the tokens, written to a .png or .svg file.

        Raises ConfigurationError without matplotlib (the extra `plot`), or for another kind of file.
        """
        from .view import draw_plan

        draw_plan(self, path)


def plan(
    graph: IndexedDataPipe,
    steps: int,
    from_step: int = 0,
    holdouts: "Sequence[IndexedDataPipe]" = (),
    dp_size: "int | None" = None,
    micro_batch_size: "int | None" = None,
) -> Plan:
    """What `steps` steps from `from_step` on will take; nothing is read but the files' sizes.

    Args:
        graph: the run's graph; a `skip` of its own moves the first step up to where it begins.
        holdouts: evaluation graphs of which nothing may be trained on.
        dp_size, micro_batch_size: ranks and rows for which the batch sizes shall be checked, other than the graph's.

    Raises ConfigurationError for a graph that joins whole batches.
    """
    steps, from_step = as_count("steps", steps), as_count("from_step", from_step, 0)
    table, micro_batch = steps_of(graph)
    counts = SourceCounts(graph)
    first_step = max(from_step, table.step_of(graph.first_sample))
    last, why = _end(graph, counts, table)
    begin = max(table.start(first_step), graph.first_sample)
    stop = max(begin, min(table.start(first_step + steps), last))
    end_step = None if last >= MAX_NUMBER else table.next_step(last)
    found = 0 if stop == begin else table.next_step(stop) - first_step
    length = counts.order.sequence_length
    before, taken = counts.taken(0, begin), counts.taken(begin, stop)
    total = sum(t.samples for t in taken) or 1
    sources = []
    for s, name in enumerate(counts.names):
        exhausted, capped = counts.exhausted(s, stop), counts.capped(s, stop)
        t = taken[s]
        sources.append(
            PlannedSource(
                name,
                t.samples,
                t.samples * length,
                t.samples / total,
                t.asked,
                before[s].epochs,
                t.epochs,
                None if exhausted is None else table.step_of(exhausted),
                None if capped is None else table.step_of(capped),
                t.repeats,
                t.unseen,
                t.bytes_read,
                *counts.files(s),
            )
        )
    changes = counts.changes(begin + 1, stop)
    at_end = stop >= last and last < MAX_NUMBER
    result = Plan(
        first_step,
        found,
        steps,
        stop - begin,
        (stop - begin) * length,
        length,
        sum(source.bytes_read for source in sources),
        tuple(sources),
        tuple(_segments(table, first_step, begin, stop, length)),
        end_step,
        why,
        _left_over(graph) if at_end else 0,
        tuple(dict.fromkeys(table.step_of(sample) for sample in changes)),
        (),
        _timeline(counts, table, begin, stop, changes[:MOST_CHANGES], length),
    )
    sizes: dict[int, int] = {}
    for batch in result.batches:
        sizes.setdefault(batch.global_batch_size, batch.first_step)
    warnings = [
        *_about_batches(
            sizes, dp_size or (graph.topology.dp_size if graph.topology else 1), micro_batch_size or micro_batch
        ),
        *_about_sources(result),
        *_about_ranks(graph, counts, table, begin, stop, changes),
        *_about_holdouts(graph, holdouts),
    ]
    return dataclasses.replace(result, warnings=tuple(warnings))


def _end(graph: IndexedDataPipe, counts: SourceCounts, table: StepTable) -> "tuple[int, str | None]":
    """The sample at which the run ends, and why; (MAX_NUMBER, None) if it does not."""
    last, why = graph.last_sample, None
    if last < MAX_NUMBER:
        stops = [blend for blend, _ in counts.blends if blend.finite]
        why = "the order is through"
        if stops:
            one = f"source {stops[0].phases.exhausted!r} is through"
            why = one if stops[0].on_exhausted == "stop" else "every source is through"
        node = graph
        while node is not counts.order:
            if isinstance(node, (Limiter, Once)) and node.last_sample < node.datapipe.last_sample:
                why = f"limit({node.kind}={node.count})" if isinstance(node, Limiter) else "once"
                break
            node = node.datapipe
    for blend, path in counts.blends:
        if blend.phases.exhausted is not None and not blend.finite:
            failed = counts.sample_of(path, blend.phases.end, min(last, MAX_NUMBER - 1))
            if failed is not None:
                last = table.start(table.step_of(failed))
                why = f"source {blend.phases.exhausted!r} is through, which is an error here (on_exhausted)"
    return last, why


def _left_over(graph: IndexedDataPipe) -> int:
    """Samples at the run's end that make no whole step."""
    batcher = batcher_of(graph) or graph
    return sample_node(graph).last_sample - graph.last_sample if batcher.last_sample == graph.last_sample else 0


def _segments(table: StepTable, first_step: int, begin: int, stop: int, length: int) -> Iterator[PlannedSteps]:
    following = [b.step for b in table.breakpoints[1:]] + [MAX_NUMBER]
    for b, until in zip(table.breakpoints, following, strict=True):
        low, high = max(b.step, first_step), min(until, table.next_step(stop))
        if low < high and begin < stop:
            samples = min(table.start(high), stop) - max(table.start(low), begin)
            yield PlannedSteps(low, high - low, b.size, samples, samples * length)


def _timeline(
    counts: SourceCounts, table: StepTable, begin: int, stop: int, changes: "list[int]", length: int
) -> Timeline:
    steps = table.next_step(stop) - table.step_of(begin)
    stretches = min(steps, TIMELINE)  # about as many samples in each, and whole steps
    places = [table.next_step(begin + (stop - begin) * i // stretches) for i in range(1, stretches + 1)]
    least = (stop - begin) // (2 * max(1, stretches))  # a shorter stretch would show the rounding of single samples
    ends, last = [stop] if stop > begin else [], begin
    for change in sorted(changes):
        if min(change - last, stop - change) >= max(1, least):
            ends.append(change)
            last = change
    borders = [begin, *sorted(ends)]
    for place in (min(table.start(step), stop) for step in places):
        i = bisect_left(borders, place)
        if i < len(borders) and min(borders[i] - place, place - borders[i - 1]) >= max(1, least):
            ends.append(place)
    ends = sorted({*ends})
    rows = [counts.samples(begin, end) for end in ends]
    return Timeline(
        tuple(table.next_step(end) for end in ends),
        tuple((end - begin) * length for end in ends),
        {name: tuple(row[s] for row in rows) for s, name in enumerate(counts.names)},
    )


# What will surprise ---------------------------------------------------------------------------------------


def _about_batches(sizes: "dict[int, int]", dp_size: int, micro_batch_size: int) -> Iterator[str]:
    unit = as_count("dp_size", dp_size) * as_count("micro_batch_size", micro_batch_size)
    for size, step in sizes.items():
        if size % unit:
            yield (
                f"the global batch of {size:,} (from step {step:,}) is not divisible by dp_size × micro-batch = "
                f"{dp_size} × {micro_batch_size}; {nearest_multiples(size, unit)} would do"
            )


def _about_sources(found: Plan) -> Iterator[str]:
    last = found.first_step + found.steps
    if found.steps < found.asked_steps:
        yield (
            f"the run ends before step {last:,}, after {found.steps:,} of the {found.asked_steps:,} steps: "
            f"{found.end or 'numbers of samples end at 2**63 - 2'}"
            + (f"; {found.left_over:,} samples make no whole step" if found.left_over else "")
        )
    sources = found.sources
    yield from _listed(
        "reach their cap",
        [f"{s.name!r} (step {s.cap_step:,})" for s in sources if s.cap_step is not None],
    )
    for many in (False, True):
        repeated = [s for s in sources if s.repeats and (s.epochs_after > MOST_EPOCHS) is many]
        yield from _listed(
            "are repeated more than 4 times, where repeated tokens are worth much less than new ones "
            "(Muennighoff et al. 2023)"
            if many
            else "are exhausted, so that samples repeat",
            [
                f"{s.name!r} ({'before' if s.exhausted_step is None else f'step {s.exhausted_step:,}'}; "
                f"{s.epochs_after:,.2f} epochs by step {last:,})"
                for s in repeated
            ],
        )
    if found.steps:
        silent = [s for s in sources if not s.samples and s.cap_step is None and not s.epochs_after]
        yield from _listed("have weight 0, so they give no sample", [repr(s.name) for s in silent if not s.asked])
        yield from _listed(
            "have a share so small that they give no sample",
            [f"{s.name!r} ({s.asked:.2g})" for s in silent if s.asked],
        )


def _listed(what: str, names: "list[str]") -> Iterator[str]:
    if names:
        more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
        yield f"sources that {what}: {', '.join(names[:MOST_NAMED])}{more}"


def _about_ranks(
    graph: IndexedDataPipe, counts: SourceCounts, table: StepTable, begin: int, stop: int, changes: "list[int]"
) -> Iterator[str]:
    """Whether a plain stride meets the blend's rhythm, so that a rank hardly sees a source, or little else."""
    sharder = sharder_of(graph)
    if sharder is None or not sharder.strided or sharder.topology.dp_size == 1:
        return
    dp = sharder.topology.dp_size
    for first in [begin, *changes[:8]]:
        uneven = uneven_shares(counts.order, first, dp, (first - begin) % dp, stop)
        if uneven is not None and uneven.much:
            yield (
                f"the blend's rhythm meets dp_size {dp}: from step {table.step_of(first):,} on rank {uneven.rank} "
                f"takes {uneven.shares[uneven.rank]:.1%} of its samples from source {uneven.source!r}, where all ranks "
                f"together take {uneven.shares.mean():.1%}; shard_ranks(seed=...) would even it out"
            )
            return


def _about_holdouts(graph: IndexedDataPipe, holdouts: "Sequence[IndexedDataPipe]") -> Iterator[str]:
    for holdout in holdouts:
        for shared in overlap(graph, holdout):
            yield (
                f"hold-out in training: source {shared.source!r} has {shared.tokens:,} tokens of the held-out "
                f"{shared.other!r}, the first at token {shared.file_token:,} of {shared.file}"
            )
