"""Rows dealt evenly within a step: the same samples in each step, the same on every rank, and even costs."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpipe.adapters import Profile, Timeout
from tokenpipe.datapipes import (
    TokenFileWriter,
    TokenReader,
    Topology,
    _kernels_numpy,
    balance,
    kernels,
    lint,
    load_recipe,
    row_documents,
)
from tokenpipe.datapipes.errors import BatchSizeError, ConfigurationError
from tokenpipe.datapipes.fetch.routes import plan_of
from tokenpipe.datapipes.row_documents import RowDocuments
from tokenpipe.reading_services import DataLoader2

S = 16
I64 = np.int64


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two sources whose documents have lengths from 1 to far more than a row."""
    path, chance = tmp_path_factory.mktemp("documents"), np.random.default_rng(5)
    for name, documents in (("prose", 180), ("code", 60)):
        with TokenFileWriter(path / f"{name}.tok", dtype="uint16") as writer:
            for length in np.maximum(1, chance.lognormal(1.8, 1.2, documents)).astype(int):
                writer.write(chance.integers(0, 50_000, length))
    return path


def order_in(folder, weights=(3, 1)):
    first, second = (
        TokenReader(folder / f"{name}.tok").slice_sequences(S).permute(seed=7) for name in ("prose", "code")
    )
    return first.blend(second, weights=None if weights is None else list(weights))


def graph_of(order, rank, dp, micro_batch, size, steps=None):
    dealt = order.balance_ranks(Topology(rank, dp), micro_batch, size)
    return dealt.batch_samples(micro_batch, global_batch_size=steps or size).collate_causal_lm(sample_numbers=True)


@cache
def costs_in(folder, samples=600):
    """What each sample costs, by its documents as the ledger of another graph names them."""
    order, found = order_in(folder), []
    loader = DataLoader2(order.batch_samples(1).collate_causal_lm())
    for step in range(samples):
        (row,) = loader.documents(step)
        found.append(sum((min(d.stop, S) - d.first) ** 2 for d in row if d.first < S))
    return np.array(found)


def delivered(loaders, batches):
    """[rank][batch] → the sample numbers."""
    return [
        [batch["sample_numbers"].tolist() for batch, _ in zip(loader, range(batches), strict=False)]
        for loader in loaders
    ]


shapes = {"dp": st.integers(1, 5), "rows": st.integers(1, 3), "units": st.integers(1, 4)}


# Kernels --------------------------------------------------------------------------------------------------


@given(
    costs=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**40)), max_size=60),
    ranks=st.integers(1, 7),
    rows=st.integers(1, 4),
    more=st.integers(0, 2),
)
def test_both_deal_alike_each_sample_once_and_as_many_to_each_rank(costs, ranks, rows, more):
    deal, compiled = kernels.kernel("deal_evenly")
    if not compiled:
        pytest.skip("the compiled kernels do not run here")
    unit = ranks * rows
    size = (-(-len(costs) // unit) + more) * unit
    tables = [np.full(size, -1, I64) for _ in range(2)]
    deal(np.array(costs, I64), ranks, rows, tables[0])
    _kernels_numpy.deal_evenly(np.array(costs, I64), ranks, rows, tables[1])
    assert tables[0].tolist() == tables[1].tolist()
    for first, unit_table in zip(range(0, size, unit), tables[0].reshape(-1, ranks, rows), strict=True):
        assert sorted(unit_table.reshape(-1).tolist()) == list(range(first, first + unit))
        own = [[i for i in row.tolist() if i < len(costs)] for row in unit_table]
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert all(row.tolist() == sorted(row.tolist()) for row in unit_table)


def test_the_deal_of_some_costs_stays_what_it_is():
    table = np.empty(16, I64)
    _kernels_numpy.deal_evenly(np.array([9, 1, 1, 2, 2, 8, 3, 2, 5, 5, 5, 5, 0, 7], I64), 2, 2, table)
    assert table.reshape(-1, 2, 2).tolist() == [
        [[0, 2], [1, 3]],
        [[6, 7], [4, 5]],
        [[9, 11], [8, 10]],
        [[12, 14], [13, 15]],
    ]


# The order stays what it is ---------------------------------------------------------------------------------


@settings(max_examples=25)
@given(**shapes, start=st.integers(0, 3))
def test_every_step_and_every_micro_batch_of_all_ranks_has_the_samples_that_it_had(folder, dp, rows, units, start):
    unit = dp * rows
    size, order = unit * units, order_in(folder)
    found = delivered([DataLoader2(graph_of(order, rank, dp, rows, size)) for rank in range(dp)], 3 * units)
    for batch in range(3 * units):
        taken = [numbers for rank in range(dp) for numbers in found[rank][batch]]
        assert sorted(taken) == list(range(batch * unit, (batch + 1) * unit))
        assert all(len(found[rank][batch]) == rows for rank in range(dp))
    some = graph_of(order, dp - 1, dp, rows, size).fetch([start])[0]  # the tokens are those of the numbers
    numbers = some["sample_numbers"].tolist()
    assert some["input_ids"].tolist() == order.fetch(numbers)[:, :-1].tolist()


@settings(max_examples=25)
@given(**shapes, skipped=st.integers(0, 40))
def test_who_takes_a_sample_is_the_inverse_of_what_a_rank_takes(folder, dp, rows, units, skipped):
    order = order_in(folder).skip(skipped)
    for rank in range(dp):
        node = order.balance_ranks(Topology(rank, dp), rows, dp * rows * units)
        numbers = np.arange(3 * rows * units)
        routed = node.route(numbers)[1]
        ranks, own = node.deal(routed)
        assert ranks.tolist() == [rank] * numbers.size
        assert own.tolist() == numbers.tolist()
        assert node.unroute(0, routed).tolist() == numbers.tolist()
        others = node.unroute(0, np.arange(3 * dp * rows * units))
        assert np.count_nonzero(others >= 0) == numbers.size


@settings(max_examples=20)
@given(**shapes, unit=st.integers(0, 11))
def test_a_resume_at_any_unit_goes_on_as_the_unbroken_run(folder, dp, rows, units, unit):
    order, size = order_in(folder), dp * rows * units
    for rank in {0, dp - 1}:
        loader = DataLoader2(graph_of(order, rank, dp, rows, size))
        whole = delivered([loader], 12 + 3)[0]
        loader.restart()
        iterator = iter(loader)
        for _ in range(unit):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = DataLoader2.from_state(state, graph_of(order, rank, dp, rows, size))
        assert delivered([resumed], 15 - unit)[0] == whole[unit:]


@settings(max_examples=20)
@given(
    before=st.integers(1, 9),
    dp=st.integers(1, 4),
    rows=st.integers(1, 2),
    units=st.integers(1, 3),
    again=st.integers(1, 8),
)
def test_a_run_that_goes_on_with_other_sizes_in_the_middle_of_a_unit_does_so_too(
    folder, before, dp, rows, units, again
):
    """From sample 24 · before on with another topology and global batch size, and resumed once more some units on."""
    order, unit = order_in(folder), dp * rows
    consumed, size = 24 * before, unit * units
    first = DataLoader2(graph_of(order, 0, 1, 24, 24))
    state = first.state_dict(step=before)
    once = [DataLoader2(graph_of(order, rank, dp, rows, size)) for rank in range(dp)]
    for loader in once:
        loader.load_state_dict(state)
    found = delivered(once, 12)
    for batch in range(12):
        taken = [n for rank in range(dp) for n in found[rank][batch]]
        assert sorted(taken) == list(range(consumed + batch * unit, consumed + (batch + 1) * unit))
    for rank in range(dp):
        loader = DataLoader2(graph_of(order, rank, dp, rows, size))
        loader.load_state_dict(state)
        iterator = iter(loader)
        for _ in range(again):
            next(iterator)
        twice = DataLoader2.from_state(loader.state_dict(), graph_of(order, rank, dp, rows, size))
        assert delivered([twice], 12 - again)[0] == found[rank][again:]


@settings(max_examples=20)
@given(**shapes, consumed=st.integers(0, 5))
def test_contents_names_the_rank_that_gets_the_row(folder, dp, rows, units, consumed):
    order, size = order_in(folder), dp * rows * units
    state = DataLoader2(graph_of(order, 0, dp, rows, size)).state_dict(step=consumed)
    loaders = [DataLoader2.from_state(state, graph_of(order, rank, dp, rows, size)) for rank in range(dp)]
    found = delivered(loaders, 2 * units)
    for step in (consumed, consumed + 1):
        for record in loaders[0].contents(step):
            batch = (step - consumed) * units + record.micro_batch
            assert found[record.rank][batch][record.row] == record.sample_number
            assert record in loaders[-1].contents(step)
    record = loaders[0].contents(consumed)[-1]
    seen = loaders[0].when(record.source, record.token + 1, range(consumed, consumed + 1))  # a small source comes twice
    assert record[:4] in [found[:4] for found in seen]


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
@pytest.mark.parametrize(("dp", "rows", "units"), [(1, 1, 1), (2, 3, 2), (4, 2, 1), (5, 1, 3), (3, 4, 2)])
def test_one_pass_ends_as_its_tail_says(folder, tail, dp, rows, units):
    order = order_in(folder, weights=None).once(tail=tail)
    samples, size, found, alone = len(order), dp * rows * units, [], []
    for rank in range(dp):
        dealt = order.balance_ranks(Topology(rank, dp), rows, size)
        graph = dealt.batch_samples(rows, size).collate_causal_lm(sample_numbers=True)
        alone += dealt.route(np.arange(dealt.end))[1].tolist()
        batches = list(DataLoader2(graph))
        assert len(batches) == graph.end
        found.append([batch["sample_numbers"].tolist() for batch in batches])
        own = [n for batch in found[-1] for n in batch if n >= 0]
        assert dealt.unroute(0, np.array(own)).tolist() == list(range(len(own)))
        assert len(own) <= dealt.end
    assert sorted(alone) == list(range(samples - (samples % dp if tail == "drop" else 0)))
    everything = sorted(n for own in found for batch in own for n in batch if n >= 0)
    kept = samples if tail != "drop" else samples - samples % size
    assert everything == list(range(kept))
    if tail != "uneven":
        assert len({len(own) for own in found}) == 1
        assert all(len(batch) == rows for own in found for batch in own)
    else:
        counts = [sum(map(len, own)) for own in found]
        assert max(counts) - min(counts) <= 1


def test_a_ramp_shifts_the_windows_and_nothing_else(folder):
    order, ramp, starts = order_in(folder), [(0, 8), (2, 16), (4, 32)], [0, 8, 16, 32, 48, 80, 112]
    loaders = [DataLoader2(graph_of(order, rank, 4, 2, 32, ramp)) for rank in range(4)]
    found = delivered(loaders, 112 // 8)
    for step, (a, b) in enumerate(pairwise(starts)):
        taken = [n for own in found for batch in own[a // 8 : b // 8] for n in batch]
        assert sorted(taken) == list(range(a, b))
        for record in loaders[1].contents(step):
            assert found[record.rank][a // 8 + record.micro_batch][record.row] == record.sample_number


def test_what_is_kept_and_asked_for_at_once_is_no_matter(folder, monkeypatch):
    node = order_in(folder).balance_ranks(Topology(1, 4), 2, 16)
    numbers = np.random.default_rng(3).permutation(400)
    expected = node.route(numbers)[1].tolist()
    monkeypatch.setattr(balance, "KEPT", 32)
    again = order_in(folder).balance_ranks(Topology(1, 4), 2, 16)
    assert again.route(numbers)[1].tolist() == expected
    assert len(again._windows.value._kept) <= 2
    assert [int(again.route(np.array([n]))[1][0]) for n in numbers[:50]] == expected[:50]


def test_the_deal_is_the_same_with_the_numpy_kernels(folder, monkeypatch):
    numbers = np.arange(200)
    expected = order_in(folder).balance_ranks(Topology(1, 4), 2, 16).route(numbers)[1].tolist()
    for module in (balance, row_documents):
        monkeypatch.setattr(module, "kernel", lambda name: (getattr(_kernels_numpy, name), False))
    assert order_in(folder).balance_ranks(Topology(1, 4), 2, 16).route(numbers)[1].tolist() == expected


# Evenness --------------------------------------------------------------------------------------------------


def test_costs_are_those_of_the_rows_documents(folder):
    plan = plan_of(order_in(folder))
    found = RowDocuments(plan.gather).cost(plan.starts(np.arange(600))[1], S + 1)
    assert found.tolist() == costs_in(folder).tolist()


def spread(costs, taken):
    """Greatest by least cost of a rank in a step: a mean over steps. taken: [rank][step] → sample numbers."""
    sums = np.array([[costs[numbers].sum() for numbers in steps] for steps in taken])
    return float((sums.max(0) / sums.min(0)).mean())


@pytest.mark.parametrize(("dp", "rows", "units"), [(2, 1, 8), (4, 4, 2), (8, 1, 4), (4, 2, 8)])
def test_ranks_have_more_even_costs_than_by_a_stride(folder, dp, rows, units):
    order, size = order_in(folder), dp * rows * units
    steps, costs = 600 // size, costs_in(folder)
    numbers = np.arange(steps * rows * units)

    def taken(node_of):
        return [node_of(rank).route(numbers)[1].reshape(steps, -1) for rank in range(dp)]

    even = spread(costs, taken(lambda rank: order.balance_ranks(Topology(rank, dp), rows, size)))
    plain = spread(costs, taken(lambda rank: order.shard_ranks(Topology(rank, dp))))
    assert 1 <= even < 1 + (plain - 1) / 2


# In a graph ------------------------------------------------------------------------------------------------


def test_a_recipe_holds_it_without_the_topology(folder):
    graph = graph_of(order_in(folder), 1, 2, 3, 12)
    text = graph.recipe()
    assert "balance_ranks" in text
    assert "topology" not in text
    again = load_recipe(text, topology=Topology(1, 2))
    assert [b["sample_numbers"].tolist() for b in again.fetch(range(9))] == [
        b["sample_numbers"].tolist() for b in graph.fetch(range(9))
    ]
    assert load_recipe(text, topology=Topology(0, 2), micro_batch_size=1).datapipe.datapipe.micro_batch_size == 1


def test_lint_and_plan_take_it_for_no_stride(folder):
    blend = order_in(folder, weights=(4, 1))
    rules = [finding.rule for finding in lint(graph_of(blend, 0, 5, 1, 5))]
    assert "blend-in-step" not in rules
    assert "no-shard" not in rules
    stride = blend.shard_ranks(Topology(0, 5)).batch_samples(1).collate_causal_lm()
    assert "blend-in-step" in [finding.rule for finding in lint(stride)]
    plan = DataLoader2(graph_of(blend, 0, 5, 1, 5)).plan(10)
    assert not [text for text in plan.warnings if "rhythm" in text]


def test_packed_rows_are_dealt_by_their_documents(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path))
    order = TokenReader(folder / "prose.tok").pack_documents(S).permute(seed=7)
    loaders = [DataLoader2(graph_of(order, rank, 2, 2, 8)) for rank in range(2)]
    found = delivered(loaders, 4)
    assert sorted(n for own in found for batch in own for n in batch) == list(range(16))
    for step in range(2):
        for record in loaders[0].contents(step):
            assert found[record.rank][2 * step + record.micro_batch][record.row] == record.sample_number


def test_adapters_around_its_nodes_change_nothing(folder):
    graph = graph_of(order_in(folder), 1, 2, 2, 8)
    expected = delivered([DataLoader2(graph)], 9)
    assert delivered([DataLoader2(graph, [Profile(), Timeout(30)])], 9) == expected


def test_sizes_that_do_not_divide_are_refused_with_what_would_do(folder):
    order = order_in(folder)
    with pytest.raises(BatchSizeError, match=r"12 or 18 would do"):
        order.balance_ranks(Topology(0, 3), 2, 16)
    with pytest.raises(BatchSizeError, match=r"batch_samples\(2\) would do"):
        DataLoader2(order.balance_ranks(Topology(0, 2), 2, 8).batch_samples(1, 8).collate_causal_lm())
    with pytest.raises(BatchSizeError, match=r"batch_samples\(2\) would do"):
        DataLoader2(order.balance_ranks(Topology(0, 2), 2, 8))
    with pytest.raises(ConfigurationError, match="'attention' would do"):
        order.balance_ranks(Topology(0, 2), 2, 8, cost="tokens")


def test_rows_whose_documents_are_not_known_are_refused(folder, token_file, monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path / "ends"))
    raw = TokenReader(token_file("raw.bin", 2000), dtype="uint16").slice_sequences(S)
    with pytest.raises(
        ConfigurationError, match=r"raw\.bin: stores no document ends.*shard_ranks needs none.*end_of_text=ID"
    ):
        raw.balance_ranks(Topology(0, 2), 2, 8)
    found = TokenReader(token_file("raw.bin", 2000), dtype="uint16", end_of_text=7).slice_sequences(S)
    assert found.balance_ranks(Topology(0, 2), 2, 8).fetch([0]).shape == (1, S + 1)
    with pytest.raises(ConfigurationError, match="map_items below it makes others"):
        order_in(folder).map(np.copy, seeded=False).balance_ranks(Topology(0, 2), 2, 8)
