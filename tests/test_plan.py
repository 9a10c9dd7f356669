"""The rehearsal against the walk: what a plan says of each source is what the steps then hold."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.datapipes.errors import ConfigurationError, OutOfRangeError, SourceExhaustedError
from tokenpipe.datapipes.plan import Plan
from tokenpipe.datapipes.sources import SourceCounts
from tokenpipe.reading_services import DataLoader2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source("a", samples): shuffled windows of 4 tokens of a file of its own."""
    folder = tmp_path_factory.mktemp("sources")

    def make(name: str, samples: int = 50, permuted: bool = True, dtype: str = "uint16") -> IndexedDataPipe:
        path = folder / f"{name}-{samples}-{dtype}.bin"
        if not path.exists():
            np.arange(samples * 4 + 1, dtype=dtype).tofile(path)
        node = TokenReader(path, dtype=dtype, name=name).slice_sequences(4)
        return node.permute(seed=7) if permuted else node

    return make


def walked(loader: DataLoader2, first: int, steps: int) -> "list[list]":
    """contents() of each step from `first` on, until the run's end."""
    found = []
    for step in range(first, first + steps):
        try:
            found.append(loader.contents(step))
        except (OutOfRangeError, SourceExhaustedError):
            break
    return found


def check_against_walk(loader: DataLoader2, steps: int) -> Plan:
    """Every count of the plan, by walking all steps from 0 on."""
    found = loader.plan(steps)
    before = walked(loader, 0, found.first_step)
    here = walked(loader, found.first_step, steps)
    records = [record for step in here for record in step]
    assert (found.steps, found.samples) == (len(here), len(records))
    assert found.tokens == len(records) * 4
    samples = Counter(record.source for record in records)
    assert {s.name: s.samples for s in found.sources if s.samples} == dict(samples)
    lengths = {leaf.node.name: leaf.length for leaf in SourceCounts(loader.datapipe).leaves}
    for s in found.sources:
        repeats = sum(record.epoch > 0 for record in records if record.source == s.name)
        assert s.repeats == repeats, s
        seen: list[int] = []  # (step, …) by sample, from the run's first on
        for step, rows in enumerate([*before, *here]):
            seen += [step] * sum(record.source == s.name for record in rows)
        length = lengths[s.name]
        assert s.exhausted_step == (seen[length - 1] if len(seen) >= length else None), s
        assert math.isclose(s.epochs_after, len(seen) / length), s
        assert math.isclose(s.epochs_before, (len(seen) - s.samples) / length), s
        assert s.unseen == max(0, length - len(seen))
        assert s.share == pytest.approx(s.samples / max(1, len(records)))
    assert sum(b.samples for b in found.batches) == found.samples
    by_size = Counter((len(rows), loader.micro_batches(rows[0].step)) for rows in here)
    if not loader.datapipe.finite or found.steps == found.asked_steps:
        assert sum(b.steps for b in found.batches) == sum(by_size.values())
    for b in found.batches:
        rows = [len(rows) for rows in here if b.first_step <= rows[0].step < b.first_step + b.steps]
        assert sum(rows) == b.samples
        assert set(rows[:-1]) <= {b.global_batch_size}
    if found.steps < steps:
        assert found.end is not None
    assert json.loads(json.dumps(found.as_json())) == found.as_json()
    ends = found.timeline
    for at, step in zip(ends.tokens, ends.step, strict=True):
        upto = Counter(record.source for record in records[: at // 4])
        index = ends.tokens.index(at)
        assert {name: row[index] for name, row in ends.samples.items() if row[index]} == dict(upto)
        assert found.first_step < step <= found.first_step + found.steps
    return found


NAMES = "abcd"
ratios = st.lists(st.sampled_from([0, 1, 2, 3, 7, 0.05]), min_size=4, max_size=4)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shape=st.sampled_from(["weighted", "union", "repeats", "nested", "concat", "grown"]),
    ratio=ratios,
    cap=st.sampled_from([None, 1, 1.5, 3]),
    exhausted=st.sampled_from(["stop", "renormalise", "error"]),
    schedule=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=3),
    dp=st.integers(1, 3),
    limit=st.one_of(st.none(), st.integers(6, 300)),
    changes=st.lists(st.tuples(st.integers(1, 5), ratios), max_size=3),
    skip=st.integers(0, 9),
    steps=st.integers(1, 25),
)
def test_a_plan_is_what_walking_every_step_finds(
    source, lengths, shape, ratio, cap, exhausted, schedule, dp, limit, changes, skip, steps
):
    nodes = [source(name, n) for name, n in zip(NAMES, lengths, strict=False)]
    ratio = ratio[: len(nodes)] if any(ratio[: len(nodes)]) else [1] * len(nodes)
    first, *others = nodes
    if shape == "weighted":
        graph = first.blend(*others, weights=ratio, max_epochs=cap, on_exhausted=exhausted)
    elif shape == "union":
        graph = first.blend(*others)
    elif shape == "repeats":
        graph = first.blend(*others, repeats={first.name: 2})
    elif shape == "nested":
        inner = first.blend(*others, weights=ratio, max_epochs=cap, on_exhausted="renormalise", name="inner")
        graph = inner.blend(source("z", 17), weights=[3, 1])
    elif shape == "concat":
        graph = first.concat(*others)
    else:
        graph = first.blend(source("z", 17), weights=[3, 1])
    if limit is not None and not graph.finite:
        graph = graph.limit(samples=limit)
    sizes = [(0, dp * 2)]
    for step, size in schedule:
        sizes.append((sizes[-1][0] + step, size * dp * 2))
    try:
        loader = DataLoader2(graph.shard_ranks(Topology(0, dp), seed=1).batch_samples(2, global_batch_size=sizes))
    except ConfigurationError:
        return  # a cap so low that there is no step
    step = 0
    for later, new in changes if shape in ("weighted", "nested") else []:
        step += later
        try:
            loader.seek(step)
            names = [s.name for s in nodes]
            new = new[: len(nodes)] if any(new[: len(nodes)]) else [1] * len(nodes)
            loader.update_weights(dict(zip(names, new, strict=True)))
        except (ConfigurationError, OutOfRangeError, ValueError):
            break
    loader.seek(0)
    check_against_walk(loader, steps)
    if (end := loader.plan(10**6).end_step) is None or skip <= end:  # not beyond a sample that is an error
        loader.seek(skip)
        check_against_walk(loader, steps)
