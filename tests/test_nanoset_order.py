"""Nanoset's order, bit for bit, against golden vectors and an independent Nanoset in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes import Numbers
from tokenpipe.datapipes import NanosetOrder, Topology, read_tokens
from tokenpipe.datapipes.errors import ConfigurationError, OutOfRangeError, WeightsError
from tokenpipe.reading_services import DataLoader2

MAX_NUMBER = 2**63 - 1


def order_of(lengths, num_samples, weights=None, seed=1234):
    sources = [Numbers(f"s{i}", length) for i, length in enumerate(lengths)]
    return NanosetOrder(*sources, num_samples=num_samples, weights=weights, seed=seed)


def plain_nanoset(lengths, num_samples, weights=None, seed=1234):
    """(data sets, samples) of a run, as Nanoset makes them, in plain Python but for RandomState."""
    if weights is None:
        weights = [length / sum(lengths) for length in lengths]
    else:
        weights = [weight / float(np.sum(np.array(weights))) for weight in weights]
    epoch = sum(lengths)
    chosen, samples, counts = [], [], [0] * len(lengths)
    for i in range(epoch):
        x = max(float(i), 1.0)
        errors = [weight * x - count for weight, count in zip(weights, counts, strict=True)]
        d = errors.index(max(errors))
        chosen.append(d)
        samples.append(counts[d] % lengths[d])
        counts[d] += 1
    shuffled = []
    for values in (chosen, samples):
        array = np.array(values)
        np.random.RandomState(seed).shuffle(array)
        shuffled.append(array.tolist() * (num_samples // epoch + 1))
    return shuffled[0][:num_samples], shuffled[1][:num_samples]


def ours(order, numbers=None):
    source, number = order.route(np.arange(order.end) if numbers is None else np.asarray(numbers, np.int64))
    lengths = np.array([len(child) for child in order.children])
    return source.tolist(), (number % lengths[source]).tolist()


@st.composite
def runs(draw):
    n = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    one = st.one_of(st.floats(0.001, 10), st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]))
    weights = draw(st.one_of(st.none(), st.lists(one, min_size=n, max_size=n).filter(any)))
    return lengths, draw(st.integers(1, 400)), weights, draw(st.integers(0, 2**32 - 1))


def test_the_golden_vectors_come_out():
    order = order_of([8, 2, 5, 5], 20, [0.1, 0.5, 0.3, 0.1])
    source, sample = ours(order)
    assert source == [1, 1, 0, 2, 3, 1, 3, 1, 2, 2, 1, 2, 1, 1, 1, 2, 1, 0, 2, 1]
    assert sample == [1, 0, 0, 4, 1, 0, 0, 0, 2, 0, 0, 3, 1, 0, 1, 0, 1, 1, 1, 1]


def test_the_golden_vectors_before_the_shuffle_come_out():
    order = order_of([8, 2, 5, 5], 20, [0.1, 0.5, 0.3, 0.1])
    source, count, given_by = order.tables
    unshuffled = np.arange(20)
    np.random.RandomState(1234).shuffle(unshuffled)
    places = np.empty(20, np.int64)
    places[unshuffled] = np.arange(20)
    lengths = np.array([8, 2, 5, 5])
    assert source[places].tolist() == [1, 2, 0, 1, 3, 1, 2, 1, 2, 1, 1, 2, 0, 1, 3, 1, 2, 1, 2, 1]
    assert (count % lengths[source])[places].tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 2, 0, 1, 3, 1, 0, 1, 1, 4, 0, 0, 1]
    assert given_by.tolist() == np.bincount(source).tolist()


@given(runs())
def test_any_run_has_the_order_of_a_plain_nanoset(run):
    lengths, num_samples, weights, seed = run
    assert ours(order_of(*run)) == plain_nanoset(lengths, num_samples, weights, seed)


@given(runs())
def test_unroute_finds_where_each_sample_was_delivered_and_nothing_else(run):
    order = order_of(*run)
    source, number = order.route(np.arange(order.end))
    assert len({*zip(source.tolist(), number.tolist(), strict=True)}) == order.end
    for s in range(len(order.children)):
        mine = np.flatnonzero(source == s)
        assert order.unroute(s, number[mine]).tolist() == mine.tolist()
        every = np.arange(int(number[mine].max(initial=0)) + 2 * len(order.children[s]))
        found = order.unroute(s, every)
        where = dict(zip(number[mine].tolist(), mine.tolist(), strict=True))
        assert found.tolist() == [where.get(n, -1) for n in every.tolist()]


@given(runs(), st.integers(1, 4))
def test_the_epochs_of_a_sample_count_its_deliveries_over_whole_copies(run, copies):
    lengths, _, weights, seed = run
    order = order_of(lengths, copies * sum(lengths), weights, seed)
    epochs: dict[tuple[int, int], list[int]] = {}
    source, number = order.route(np.arange(order.end))
    for s, n in zip(source.tolist(), number.tolist(), strict=True):
        epochs.setdefault((s, n % lengths[s]), []).append(n // lengths[s])
    for found in epochs.values():
        assert sorted(found) == list(range(len(found)))


@given(runs(), st.integers(0, 400))
def test_the_source_bound_covers_what_was_delivered(run, hi):
    order = order_of(*run)
    hi = min(hi, order.end)
    source, number = order.route(np.arange(hi))
    for s in range(len(order.children)):
        mine = number[source == s]
        assert order.source_bound(s, hi) > mine.max(initial=-1)


def test_it_ends_with_num_samples(token_file):
    order = order_of([8, 2, 5, 5], 33, [0.1, 0.5, 0.3, 0.1])
    assert len(order) == order.end == 33
    assert order.finite
    with pytest.raises(OutOfRangeError, match="33"):
        order.checked([33])


# From files -------------------------------------------------------------------------------------------------


def spec_of(token_file):
    return {token_file("a.bin", 8 * 8 + 1): 0.1, token_file("b.bin", 8 * 2 + 1, 1): 0.5,
            token_file("c.bin", 8 * 5 + 4, 2): 0.3, token_file("d.bin", 8 * 5 + 1, 3): 0.1}  # fmt: skip


def read(spec, num_samples, seed=1234, **options):
    return read_tokens(spec, 8, seed, dtype="uint16", order="nanoset", num_samples=num_samples, **options)


def expected_rows(num_samples):
    chosen, samples = plain_nanoset([8, 2, 5, 5], num_samples, [0.1, 0.5, 0.3, 0.1])
    return [
        [((sample * 8 + i) * 7 + salt) % 50_000 for i in range(9)] for salt, sample in zip(chosen, samples, strict=True)
    ]


def test_read_tokens_gives_nanosets_rows(token_file):
    assert read(spec_of(token_file), 47).fetch(range(47)).tolist() == expected_rows(47)


def test_a_path_and_a_list_of_paths_are_blended_by_length_as_in_nanoset(token_file):
    a, b = token_file("a.bin", 81), token_file("b.bin", 41, 1)
    chosen, samples = plain_nanoset([10, 5], 40)
    assert ours(read([a, b], 40)) == (chosen, samples)
    assert ours(read(a, 25)) == plain_nanoset([10], 25)


def test_num_samples_is_required_for_nanosets_order(token_file):
    with pytest.raises(ConfigurationError, match="num_samples"):
        read(spec_of(token_file), None)
    with pytest.raises(ConfigurationError, match="nanosett"):
        read_tokens(token_file("a.bin", 81), 8, 7, dtype="uint16", order="nanosett")


def test_weights_and_seeds_that_nanoset_could_not_take_are_refused():
    with pytest.raises(WeightsError):
        order_of([3, 4], 5, [0, 0])
    with pytest.raises(WeightsError):
        order_of([3, 4], 5, [1, float("nan")])
    with pytest.raises(ConfigurationError, match="2\\*\\*32"):
        order_of([3, 4], 5, seed=2**32)


# Ranks and resume -------------------------------------------------------------------------------------------


def rank_loader(spec, rank, size, micro_batch=1, num_samples=200):
    graph = read(spec, num_samples).shard_ranks(Topology(rank, size)).batch_samples(micro_batch, 4)
    return DataLoader2(graph.collate_causal_lm(sample_numbers=True))


def test_rank_2_of_4_goes_on_with_index_70_after_68_consumed_samples(token_file):
    spec, rows = spec_of(token_file), expected_rows(200)
    with rank_loader(spec, 2, 4) as loader:
        items = iter(loader)
        delivered = [next(items) for _ in range(68 // 4)]
        assert [int(batch["sample_numbers"][0]) for batch in delivered] == list(range(2, 70, 4))
        state = loader.state_dict()
    assert state["consumed_samples"] == 68
    with rank_loader(spec, 2, 4) as resumed:
        resumed.load_state_dict(state)
        batch = next(iter(resumed))
    assert batch["sample_numbers"].tolist() == [70]
    assert batch["input_ids"].tolist() == [rows[70][:8]]


@pytest.mark.parametrize("consumed", [0, 4, 20, 68, 100])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_resume_drops_consumed_over_dp_indices_on_each_rank(token_file, consumed, size):
    spec, rows = spec_of(token_file), expected_rows(200)
    for rank in range(size):
        with rank_loader(spec, rank, size) as loader:
            loader.seek(consumed // 4)
            found = [batch["input_ids"][0].tolist() for batch in loader]
        nanotrons = list(range(rank, 200, size))[consumed // size :]
        assert found == [rows[i][:8] for i in nanotrons]


@pytest.mark.parametrize("steps", [range(50), range(40, 50), range(3, 7)])
def test_when_finds_every_row_of_every_copy_of_the_epoch(token_file, steps):
    with rank_loader(spec_of(token_file), 0, 1) as loader:
        records = [record for step in steps for record in loader.contents(step)]
        for source in "abcd":
            for sample in range({"a": 8, "b": 2, "c": 5, "d": 5}[source]):
                expected = [
                    (r.step, r.rank, r.micro_batch, r.row, False)
                    for r in records
                    if r.source == source and r.token == sample * 8
                ]
                assert loader.when(source, sample * 8 + 3, steps) == expected, (source, sample)
