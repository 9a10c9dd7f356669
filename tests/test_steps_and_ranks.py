"""The order belongs to the run: ranks, micro-batches and resumes are views on it."""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenReader, Topology
from tokenpipe.datapipes.errors import BatchSizeError, ConfigurationError, OutOfRangeError
from tokenpipe.reading_services import DataLoader2

SEQUENCE = 4
SAMPLES = {"prose": 60, "code": 23}
SIZES = [1, 2, 3, 4, 6, 8]
RAMP = [(0, 24), (5, 48), (9, 24)]
STEPS = 12
RAMP_STARTS = [0, 24, 48, 72, 96, 120, 168, 216, 264, 312, 336, 360, 384]
MICRO_BATCHES = {1: 4, 2: 6, 3: 2, 4: 3, 6: 2, 8: 3}  # for each dp size one that divides 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokens")
    for salt, (name, samples) in enumerate(SAMPLES.items()):
        ids = (np.arange(samples * SEQUENCE + 3, dtype=np.int64) * 7 + salt) % 50_000
        ids.astype("<u2").tofile(path / name)
    return path


def order_in(folder, weights=(3, 1), **options):
    first, second = (
        TokenReader(folder / name, dtype="uint16").slice_sequences(SEQUENCE).permute(seed=7) for name in SAMPLES
    )
    return first.blend(second, weights=None if weights is None else list(weights), **options)


def graph_of(order, rank=0, dp=1, micro_batch=1, steps=RAMP, seed=5):
    dealt = order.shard_ranks(Topology(rank, dp), seed=seed)
    return dealt.batch_samples(micro_batch, global_batch_size=steps).collate_causal_lm(sample_numbers=True)


def loaders_of(order, dp, micro_batch, steps=RAMP, seed=5, state=None):
    loaders = [DataLoader2(graph_of(order, rank, dp, micro_batch, steps, seed)) for rank in range(dp)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def rows_of(batch):
    """[(sample number, its tokens), …] of a micro-batch."""
    tokens = zip(batch["input_ids"].tolist(), batch["label_ids"].tolist(), strict=True)
    return [(n, (*i, j[-1])) for n, (i, j) in zip(batch["sample_numbers"].tolist(), tokens, strict=True)]


def run_of(loaders, starts, first=0):
    """What the ranks deliver together: the sorted rows of each step, from sample `first` up to the last start."""
    running = [iter(loader) for loader in loaders]
    steps = []
    for a, b in pairwise(starts):
        if b <= first:
            continue
        due, rows = b - max(a, first), []
        while len(rows) < due:
            for items in running:
                rows += rows_of(next(items))
        assert len(rows) == due
        steps.append(sorted(rows))
    return steps


@cache
def whole_run(folder, ramp=True):
    """The run's steps as the order alone says: rows of consecutive sample numbers."""
    order = order_in(folder)
    starts = RAMP_STARTS if ramp else [24 * step for step in range(STEPS + 1)]
    rows = order.fetch(range(starts[-1])).tolist()
    return starts, [[(n, tuple(rows[n])) for n in range(a, b)] for a, b in pairwise(starts)]


def rest_of(steps, consumed):
    kept = [[row for row in rows if row[0] >= consumed] for rows in steps]
    return [rows for rows in kept if rows]


# Every rank of every size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("dp", [*SIZES, 12, 24])
def test_all_ranks_together_take_the_same_set_of_samples_in_each_step(folder, dp, seed):
    starts, steps = whole_run(folder)
    for micro_batch in {1, 24 // dp, MICRO_BATCHES.get(dp, 1)}:
        assert run_of(loaders_of(order_in(folder), dp, micro_batch, seed=seed), starts) == steps


@settings(max_examples=40)
@given(
    dp=st.integers(1, 9),
    micro_batch=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    seed=st.one_of(st.none(), st.integers(0, 100)),
)
def test_any_ramp_gives_each_step_its_samples_on_any_ranks(folder, dp, micro_batch, sizes, gaps, seed):
    unit = dp * micro_batch
    ramp = [(sum(gaps[:i]), size * unit) for i, size in enumerate(sizes)]
    starts = [0]
    for step in range(ramp[-1][0] + 2):
        starts.append(starts[-1] + [size for at, size in ramp if at <= step][-1])
    order = order_in(folder)
    rows = order.fetch(range(starts[-1])).tolist()
    found = run_of(loaders_of(order, dp, micro_batch, ramp, seed), starts)
    for step, (a, b) in enumerate(pairwise(starts)):
        assert found[step] == [(n, tuple(rows[n])) for n in range(a, b)]


def test_without_a_seed_sample_n_goes_to_rank_n_modulo_dp(folder):
    for rank in range(4):
        with DataLoader2(graph_of(order_in(folder), rank, 4, 3, 24, seed=None)) as loader:
            for k, batch in zip(range(20), loader, strict=False):
                assert batch["sample_numbers"].tolist() == [(k * 3 + i) * 4 + rank for i in range(3)]


@pytest.mark.parametrize("dp", [5, 10])
def test_the_seeded_sharder_gives_each_rank_its_part_of_every_source(folder, dp):
    order = order_in(folder, weights=(0.8, 0.2))
    rounds, shares = 20_000, {}
    for rank in range(dp):
        node = order.shard_ranks(Topology(rank, dp), seed=7)
        source = order.route(node.route(np.arange(rounds))[1])[0]
        shares[rank] = float(np.mean(source == 1))
    assert all(0.19 < share < 0.21 for share in shares.values()), shares


def test_without_a_seed_a_blends_rhythm_can_meet_the_ranks(folder):
    order = order_in(folder, weights=(0.8, 0.2))
    shares = []
    for rank in range(5):
        node = order.shard_ranks(Topology(rank, 5))
        shares.append(float(np.mean(order.route(node.route(np.arange(10_000))[1])[0] == 1)))
    assert max(shares) > 0.9  # what the seed is there for


@given(
    dp=st.integers(1, 16),
    seed=st.one_of(st.none(), st.integers(0, 10**6)),
    first=st.integers(0, 2**62),
    skipped=st.one_of(st.just(0), st.integers(1, 1000)),
)
def test_each_round_is_dealt_to_each_rank_once(folder, dp, seed, first, skipped):
    order = order_in(folder)
    order = order.skip(skipped) if skipped else order
    nodes = [order.shard_ranks(Topology(rank, dp), seed=seed) for rank in range(dp)]
    numbers = np.arange(first // dp, first // dp + 20, dtype=np.int64)
    dealt = np.stack([node.route(numbers)[1] for node in nodes])
    for k, number in enumerate(numbers.tolist()):
        assert sorted(dealt[:, k].tolist()) == list(range(number * dp, number * dp + dp))
    for rank, node in enumerate(nodes):
        assert node.unroute(0, dealt[rank]).tolist() == numbers.tolist()
        others = np.delete(dealt, rank, axis=0).ravel()
        assert (node.unroute(0, others) == -1).all()


# Resume at every step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", SIZES)
@pytest.mark.parametrize("ramp", [True, False])
def test_the_state_of_a_step_is_the_same_on_every_rank_of_every_size(folder, dp, ramp):
    schedule = RAMP if ramp else 24
    order = order_in(folder)
    alone = DataLoader2(graph_of(order, steps=schedule))
    loaders = loaders_of(order, dp, MICRO_BATCHES[dp], schedule)
    running = [iter(loader) for loader in loaders]
    starts, _ = whole_run(folder, ramp)
    for step in range(STEPS):
        assert [loader.state_dict() for loader in loaders] == [alone.state_dict(step=step)] * dp
        assert alone.state_dict(step=step)["consumed_samples"] == starts[step]
        for _ in range((starts[step + 1] - starts[step]) // (dp * MICRO_BATCHES[dp])):
            for items in running:
                next(items)


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", SIZES)
def test_a_state_of_every_step_resumes_to_the_same_rest_on_any_ranks(folder, before, after, ramp):
    order, schedule = order_in(folder), RAMP if ramp else 24
    starts, steps = whole_run(folder, ramp)
    running = DataLoader2(graph_of(order, before - 1, before, MICRO_BATCHES[before], schedule))
    items = iter(running)
    for step in range(STEPS):
        state = json.loads(json.dumps(running.state_dict()))
        assert state["consumed_samples"] == starts[step]
        loaders = loaders_of(order, after, MICRO_BATCHES[after], schedule, state=state)
        until = starts[: step + 4] if step % 4 else starts  # the whole rest of some, the next steps of all
        assert run_of(loaders, until, first=starts[step]) == steps[step : len(until) - 1]
        for _ in range((starts[step + 1] - starts[step]) // (before * MICRO_BATCHES[before])):
            next(items)


@pytest.mark.parametrize("dp", SIZES)
def test_on_the_same_ranks_every_batch_after_a_resume_is_that_of_an_unbroken_run(folder, dp):
    order, micro_batch = order_in(folder), MICRO_BATCHES[dp]
    for rank in range(dp):
        graph = graph_of(order, rank, dp, micro_batch)
        batches = 384 // (dp * micro_batch)
        unbroken = [rows_of(batch) for _, batch in zip(range(batches + 5), DataLoader2(graph), strict=False)]
        running = DataLoader2(graph)
        items = iter(running)
        for done in range(batches):
            resumed = DataLoader2.from_state(running.state_dict(), graph)
            assert [rows_of(b) for b, _ in zip(resumed, range(5), strict=False)] == unbroken[done : done + 5]
            next(items)


# Resume at every micro-batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("before", SIZES)
def test_a_state_of_every_micro_batch_resumes_where_the_rest_divides_and_is_refused_elsewhere(folder, before, ramp):
    order, schedule = order_in(folder), RAMP if ramp else 24
    starts, steps = whole_run(folder, ramp)
    running = DataLoader2(graph_of(order, 0, before, 1, schedule))
    items = iter(running)
    resumed = refused = 0
    for consumed in range(0, starts[7], before):
        state = running.state_dict()
        assert state["consumed_samples"] == consumed
        step = max(s for s, start in enumerate(starts) if start <= consumed)
        for after in SIZES:
            for micro_batch in {1, MICRO_BATCHES[after]}:
                left = starts[step + 1] - consumed
                if left % (after * micro_batch):
                    refused += 1
                    assert_refused_with_the_nearest_step(
                        graph_of(order, 0, after, micro_batch, schedule), state, consumed, starts, step
                    )
                elif after in (2, 3, 8):
                    resumed += 1
                    loaders = loaders_of(order, after, micro_batch, schedule, state=state)
                    until = starts[: step + 3]
                    assert run_of(loaders, until, first=consumed) == rest_of(steps[: len(until) - 1], consumed)
                else:
                    resumed += 1
                    DataLoader2.from_state(state, graph_of(order, 0, after, micro_batch, schedule))
        next(items)
    assert resumed
    assert refused


def assert_refused_with_the_nearest_step(graph, state, consumed, starts, step):
    loader = DataLoader2(graph)
    at = loader.state_dict()
    with pytest.raises(BatchSizeError) as refusal:
        loader.load_state_dict(state)
    message = str(refusal.value)
    back, forward = consumed - starts[step], starts[step + 1] - consumed
    named = re.search(r"nearest step boundary is step (\d+) \(sample (\d+)\)", message)
    assert named, message
    nearest = int(named[1])
    assert int(named[2]) == starts[nearest]
    assert abs(starts[nearest] - consumed) == min(back, forward)
    assert str(consumed) in message
    assert loader.state_dict() == at  # nothing moved


def test_the_unseen_samples_of_a_broken_off_step_come_next_and_in_order(folder):
    order = order_in(folder)
    running = DataLoader2(graph_of(order, 1, 4, 1, 24))
    items = iter(running)
    for _ in range(6 + 2):
        next(items)
    state = running.state_dict()
    assert (state["consumed_samples"], state["step"]) == (32, 1)
    for rank in range(2):
        resumed = DataLoader2.from_state(state, graph_of(order, rank, 2, 4, 24, seed=None))
        assert next(iter(resumed))["sample_numbers"].tolist() == [32 + rank, 34 + rank, 36 + rank, 38 + rank]


@pytest.mark.parametrize("step", [2**31, 2**32 + 1, 10**12, (2**53 + 1) // 24, (2**62 + 1) // 24])
def test_a_run_goes_on_at_any_step_on_any_ranks(folder, step):
    order = order_in(folder)
    rows = order.fetch(range(step * 24, step * 24 + 48)).tolist()
    expected = [[(n, tuple(rows[n - step * 24])) for n in range(a, a + 24)] for a in (step * 24, step * 24 + 24)]
    for dp in (1, 3, 8):
        loaders = loaders_of(order, dp, MICRO_BATCHES[dp], 24)
        for loader in loaders:
            loader.seek(step)
        assert run_of(loaders, [step * 24, step * 24 + 24, step * 24 + 48], first=step * 24) == expected
        assert [r.sample_number for r in loaders[0].contents(step)] == [n for n, _ in expected[0]]


# Another global batch size ----------------------------------------------------------------------------------


@pytest.mark.parametrize("consumed_steps", range(0, 12, 3))
@pytest.mark.parametrize("new", [12, 48, [(0, 24), (11, 96)]])
def test_another_global_batch_at_resume_adds_a_breakpoint_and_keeps_earlier_steps(folder, consumed_steps, new):
    order = order_in(folder)
    before = DataLoader2(graph_of(order, 0, 2, 2))
    state = before.state_dict(step=consumed_steps)
    after = DataLoader2.from_state(state, graph_of(order, 0, 4, 3, new))

    def size(step):
        schedule = RAMP if step < consumed_steps else new if isinstance(new, list) else [(0, new)]
        return [g for s, g in schedule if s <= step][-1]

    starts = [0]
    for step in range(20):
        starts.append(starts[-1] + size(step))
    for step in range(20):
        numbers = [record.sample_number for record in after.contents(step)]
        assert numbers == list(range(starts[step], starts[step + 1])), step
    for step in range(consumed_steps):
        old, now = before.contents(step), after.contents(step)
        assert [(r.sample_number, r.source, r.token) for r in old] == [
            (r.sample_number, r.source, r.token) for r in now
        ]
    rows = order.fetch(range(starts[-1])).tolist()
    loaders = [DataLoader2.from_state(state, graph_of(order, rank, 4, 3, new)) for rank in range(4)]
    found = run_of(loaders, starts, first=starts[consumed_steps])
    for step, delivered in enumerate(found, consumed_steps):
        assert delivered == [(n, tuple(rows[n])) for n in range(starts[step], starts[step + 1])]
    again = DataLoader2.from_state(after.state_dict(step=15), graph_of(order, 0, 1, 1, new))
    assert again.state_dict() == after.state_dict(step=15)
    assert again.state_dict()["consumed_samples"] == starts[15]


def test_another_global_batch_in_the_middle_of_a_step_holds_from_the_next_one(folder):
    order = order_in(folder)
    running = DataLoader2(graph_of(order, 0, 2, 2, 24))
    for _ in zip(range(8), running, strict=False):  # one step and 8 samples of the next
        pass
    state = running.state_dict()
    assert state["consumed_samples"] == 32
    loaders = loaders_of(order, 4, 1, 8, state=state)
    assert [len(rows) for rows in run_of(loaders, [0, 24, 48, 56, 64], first=32)] == [16, 8, 8]
    assert [r.sample_number for r in loaders[0].contents(1)] == list(range(24, 48))
    assert [r.sample_number for r in loaders[0].contents(2)] == list(range(48, 56))


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused_with_the_nearest_that_would_do(folder):
    with pytest.raises(BatchSizeError, match="24 or 32 would do"):
        graph_of(order_in(folder), 0, 4, 2, 30)
    with pytest.raises(BatchSizeError, match="from step 5"):
        graph_of(order_in(folder), 0, 4, 2, [(0, 24), (5, 30)])


# Contents and when ------------------------------------------------------------------------------------------


def delivered_records(loaders, table):
    """[(step, rank, micro-batch, row, sample number, tokens), …] as the ranks' batches have them.

    table: [(step, its micro-batches on each rank), …] in the order of the run.
    """
    records = []
    for rank, loader in enumerate(loaders):
        items = iter(loader)
        for step, batches in table:
            for batch in range(batches):
                for row, (number, tokens) in enumerate(rows_of(next(items))):
                    records.append((step, rank, batch, row, number, tokens))
    return sorted(records, key=lambda record: record[4])


def said_records(loader, steps):
    """The same, as contents says, the tokens computed from the place in the file."""
    records = []
    for step in steps:
        for r in loader.contents(step):
            assert Path(r.file).name == r.source
            assert r.file_token == r.token
            salt = list(SAMPLES).index(r.source)
            tokens = tuple(((r.token + i) * 7 + salt) % 50_000 for i in range(SEQUENCE + 1))
            records.append((r.step, r.rank, r.micro_batch, r.row, r.sample_number, tokens))
    return records


@pytest.mark.parametrize("dp", SIZES)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_contents_is_what_every_rank_delivers(folder, dp, seed, weights):
    order, micro_batch = order_in(folder, weights), MICRO_BATCHES[dp]
    loaders = loaders_of(order, dp, micro_batch, seed=seed)
    table = [(s, (b - a) // (dp * micro_batch)) for s, (a, b) in enumerate(pairwise(RAMP_STARTS))]
    delivered = delivered_records(loaders, table)
    for loader in loaders:
        assert said_records(loader, range(STEPS)) == delivered


RESUMES = [
    (before, old, after, new, later, micro_batches)
    for before in SIZES
    for old in range(1, 9)
    if 24 % (before * old) == 0
    for micro_batches in range(48 // (before * old))
    for after in SIZES
    for new in range(1, 9)
    if (24 - micro_batches * before * old % 24) % (after * new) == 0
    for later in (24, 16, 32, 48)
    if later % (after * new) == 0
]
"""Every resume that is allowed in two steps of 24 samples: ranks and micro-batch before and after, the global
batch after, and how many micro-batches were done."""


@settings(max_examples=60)
@given(resume=st.sampled_from(RESUMES), seed=st.sampled_from([None, 5]))
@example(resume=(1, 8, 2, 8, 32, 1), seed=None)
@example(resume=(2, 2, 4, 2, 24, 2), seed=5)
def test_contents_is_what_every_rank_delivers_after_a_resume_inside_a_step(folder, resume, seed):
    before, old, after, new, later, micro_batches = resume
    consumed = micro_batches * before * old
    step = consumed // 24
    rest = 24 * (step + 1) - consumed
    order = order_in(folder)
    running = DataLoader2(graph_of(order, 0, before, old, 24, seed))
    for _ in zip(range(micro_batches), running, strict=False):
        pass
    loaders = loaders_of(order, after, new, later, seed, state=running.state_dict())
    sizes = [rest if rest < 24 or later == 24 else later, later, later]
    table = [(s, size // (after * new)) for s, size in enumerate(sizes, step)]
    delivered = delivered_records(loaders, table)
    for loader in loaders[:2]:
        said = [record for record in said_records(loader, range(step, step + 3)) if record[4] >= consumed]
        # the broken-off step's micro-batches go on from a number that contents chooses
        begun = min(record[2] for record in said if record[0] == step)
        assert begun == 0 or consumed % 24
        said = [(s, rank, m - begun * (s == step), *more) for s, rank, m, *more in said]
        assert said == delivered


@pytest.mark.parametrize("weights", [None, (3, 1)])
@pytest.mark.parametrize("dp", [1, 3, 4])
@settings(max_examples=15)
@given(data=st.data())
def test_when_finds_the_rows_that_contents_names_and_no_others(folder, dp, weights, data):
    loader = DataLoader2(graph_of(order_in(folder, weights), dp - 1, dp, MICRO_BATCHES[dp]))
    first = data.draw(st.integers(0, STEPS - 1))
    steps = range(first, data.draw(st.integers(first, STEPS)))
    records = [record for step in range(STEPS) for record in loader.contents(step)]
    assert max(r.epoch for r in records) >= 3  # several epochs of each source
    source = data.draw(st.sampled_from(sorted(SAMPLES)))
    token = data.draw(st.integers(0, SAMPLES[source] * SEQUENCE + 2))
    expected = [
        (r.step, r.rank, r.micro_batch, r.row, False)
        for r in records
        if r.step in steps and r.source == source and r.token < token <= r.token + SEQUENCE
    ]
    assert loader.when(source, token, steps) == expected


@settings(max_examples=25)
@given(
    step=st.one_of(st.integers(0, 40), st.integers(10**3, 10**15)),
    row=st.integers(0, 23),
    dp=st.sampled_from(SIZES),
    limit=st.booleans(),
)
def test_a_row_is_found_by_each_of_its_labels_and_by_no_token_beside_them(folder, step, row, dp, limit):
    order = order_in(folder)
    graph = graph_of(order.limit(samples=24 * (step + 1)) if limit else order, 0, dp, MICRO_BATCHES[dp], 24)
    loader = DataLoader2(graph)
    record = loader.contents(step)[row]
    place = (record.step, record.rank, record.micro_batch, record.row, False)
    around = range(max(0, step - 1), step + 2)
    for j in range(-2, SEQUENCE + 3):
        token = record.token + j
        if 0 <= token < SAMPLES[record.source] * SEQUENCE + 3:
            assert (place in loader.when(record.source, token, around)) is (1 <= j <= SEQUENCE), j


def test_the_first_token_and_those_after_the_last_window_are_never_labels(folder):
    loader = DataLoader2(graph_of(order_in(folder, None)))
    last = SAMPLES["prose"] * SEQUENCE
    assert loader.when("prose", 0, range(STEPS)) == []
    assert loader.when("prose", last, range(STEPS)) != []
    assert loader.when("prose", last + 1, range(STEPS)) == loader.when("prose", last + 2, range(STEPS)) == []
    with pytest.raises(OutOfRangeError, match=str(last + 3)):
        loader.when("prose", last + 3, range(STEPS))


def test_contents_and_when_stay_inverse_through_changes_of_weights(folder):
    graphs = [graph_of(order_in(folder), rank, 3, 2) for rank in range(3)]
    loaders = [DataLoader2(graph) for graph in graphs]
    running = [iter(loader) for loader in loaders]
    delivered = []
    changes = {2: [1, 0], 4: [1, 5], 6: [0, 1], 8: {"prose": 2, "code": 1}}
    for step, (a, b) in enumerate(pairwise(RAMP_STARTS)):
        if step in changes:
            for loader in loaders:
                loader.update_weights(changes[step])
        for batch in range((b - a) // 6):
            for rank, items in enumerate(running):
                for row, (number, tokens) in enumerate(rows_of(next(items))):
                    delivered.append((step, rank, batch, row, number, tokens))
    delivered.sort(key=lambda record: record[4])
    resumed = DataLoader2.from_state(loaders[0].state_dict(), graphs[1])
    for loader in (*loaders, resumed):
        assert said_records(loader, range(STEPS)) == delivered
    records = [record for step in range(STEPS) for record in resumed.contents(step)]
    for source, samples in SAMPLES.items():
        for token in range(1, samples * SEQUENCE + 1):
            expected = [
                (*r[:4], False) for r in records if r.source == source and r.token < token <= r.token + SEQUENCE
            ]
            assert resumed.when(source, token, range(STEPS)) == expected


@pytest.mark.parametrize("samples", [1, 23, 24, 25, 100, 120, 130])
def test_contents_ends_where_a_limited_run_ends(folder, samples):
    order = order_in(folder).limit(samples=samples)
    if samples < 24:
        with pytest.raises(BatchSizeError, match=str(samples)):
            graph_of(order, 0, 2, 2, 24)
        return
    loader = DataLoader2(graph_of(order, 0, 2, 2, 24))
    assert len(list(loader)) == samples // 24 * 6
    assert len(loader.contents(samples // 24 - 1)) == 24
    with pytest.raises(OutOfRangeError):
        loader.contents(samples // 24)
    every = [r for token in range(1, 100) for r in loader.when("prose", token, range(1000))]
    assert max(r.step for r in every) <= samples // 24 - 1


def test_one_pass_is_asked_both_ways_too(folder):
    graph = order_in(folder, None).once(tail="pad").shard_ranks(Topology(1, 2), seed=3).batch_samples(3, 24)
    loader = DataLoader2(graph.collate_causal_lm(sample_numbers=True))
    total = sum(SAMPLES.values())
    records = [record for step in range(-(-total // 24)) for record in loader.contents(step)]
    assert [record.sample_number for record in records] == list(range(total))
    assert len({(record.source, record.token) for record in records}) == total
    assert {record.epoch for record in records} == {0}
    mine = [n for batch in loader for n in batch["sample_numbers"].tolist() if n >= 0]
    assert sorted(mine) == [record.sample_number for record in records if record.rank == 1]
    for record in records[::7]:
        assert loader.when(record.source, record.token + 1, range(10)) == [(*record[:4], False)]


@settings(max_examples=40)
@given(data=st.data())
def test_when_of_a_range_of_tokens_finds_each_row_with_one_of_them_once(folder, data):
    unit = data.draw(st.sampled_from([None, 3 * SEQUENCE]))
    first, second = (
        TokenReader(folder / name, dtype="uint16").slice_sequences(SEQUENCE, unit=unit).permute(seed=7)
        for name in SAMPLES
    )
    if unit and data.draw(st.booleans()):
        first = first.resize_sequences(6, after=data.draw(st.integers(0, 130)))
        second = second.resize_sequences(6, after=data.draw(st.integers(0, 50)))
    loader = DataLoader2(graph_of(first.blend(second, weights=[3, 1]), 1, 4, 3))
    begin = data.draw(st.integers(0, STEPS - 1))
    steps = range(begin, data.draw(st.integers(begin, STEPS)))
    source = data.draw(st.sampled_from(sorted(SAMPLES)))
    tokens = SAMPLES[source] * SEQUENCE + 3
    start = data.draw(st.integers(0, tokens - 1))
    wanted = range(start, data.draw(st.integers(start + 1, tokens)))
    expected = [
        (*record[:4], False)
        for step in steps
        for record in loader.contents(step)
        if record.source == source
        and record.token + 1 < wanted.stop
        and wanted.start <= record.token + first.sequence_length
    ]
    assert loader.when(source, wanted, steps) == expected


def test_a_range_that_is_none_is_refused(folder):
    loader = DataLoader2(graph_of(order_in(folder)))
    for wrong in (range(5, 5), range(0, 9, 2), range(-1, 3)):
        with pytest.raises(ConfigurationError, match="range of tokens"):
            loader.when("prose", wrong, range(3))
    with pytest.raises(OutOfRangeError, match="token 243"):
        loader.when("prose", range(3, 244), range(3))
