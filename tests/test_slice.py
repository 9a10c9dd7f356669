"""Windows of tokens, and a sequence length that changes in the middle of an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenReader
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, OutOfRangeError

UNIT = 24
LENGTHS = [n for n in range(1, UNIT + 1) if UNIT % n == 0]


def reader(token_file, tokens, name="prose.bin"):
    return TokenReader(token_file(name, tokens), dtype="uint16")


def ids(first, count):
    return [(first + i) * 7 % 50_000 for i in range(count)]


# Windows ----------------------------------------------------------------------------------------------------


@given(tokens=st.integers(2, 200), length=st.integers(1, 40))
def test_window_k_is_length_plus_one_tokens_from_k_times_length(token_file, tokens, length):
    if tokens <= length:
        with pytest.raises(ConfigurationError, match=f"{tokens} tokens"):
            reader(token_file, tokens).slice_sequences(length)
        return
    node = reader(token_file, tokens).slice_sequences(length)
    assert len(node) == (tokens - 1) // length
    for k, row in enumerate(node.fetch(range(len(node))).tolist()):
        assert row == ids(k * length, length + 1)


def test_numbers_beyond_the_epoch_go_round_again(token_file):
    node = reader(token_file, 101).slice_sequences(10)
    assert node.fetch([3, 13, 10**12 + 3, 2**63 - 2]).tolist() == node.fetch([3, 3, 3, (2**63 - 2) % 10]).tolist()
    assert node.epoch_of(np.array([3, 13, 10**12 + 3])).tolist() == [0, 1, 10**11]
    with pytest.raises(OutOfRangeError, match="10"):
        node[10]


@given(units=st.integers(1, 9), rest=st.integers(0, UNIT - 1), length=st.sampled_from(LENGTHS))
def test_units_are_cut_first_and_numbered_part_by_part(token_file, units, rest, length):
    node = reader(token_file, units * UNIT + 1 + rest).slice_sequences(length, unit=UNIT)
    parts = UNIT // length
    assert len(node) == units * parts
    expected = [unit * UNIT + part * length for part in range(parts) for unit in range(units)]
    if length == UNIT:
        expected = [k * length for k in range(units)]
    assert node.starts(np.arange(2 * len(node))).tolist() == expected * 2
    labels = sorted(start + j for start in expected for j in range(1, length + 1))
    assert labels == list(range(1, units * UNIT + 1))


@given(
    tokens=st.integers(UNIT + 1, 150),
    length=st.sampled_from(LENGTHS),
    unit=st.booleans(),
    hi=st.integers(0, 200),
)
def test_numbers_at_finds_each_window_that_has_a_token_as_a_label(token_file, tokens, length, unit, hi):
    node = reader(token_file, tokens).slice_sequences(length, **({"unit": UNIT} if unit else {}))
    starts = node.starts(np.arange(hi))
    for token in range(tokens):
        expected = np.flatnonzero((starts < token) & (token <= starts + length)).tolist()
        assert node.numbers_at(np.array([token]), hi).tolist() == expected


@pytest.mark.parametrize("length", LENGTHS[:-1])
def test_neighbours_of_a_permuted_epoch_come_from_different_units(token_file, length):
    node = reader(token_file, 11 * UNIT + 1).slice_sequences(length, unit=UNIT).permute(seed=7)
    units = node.datapipe.starts(node.route(np.arange(len(node)))[1]) // UNIT
    for round_ in range(UNIT // length):
        assert sorted(units[round_ * 11 : (round_ + 1) * 11].tolist()) == list(range(11))
        assert units[round_ * 11 : (round_ + 1) * 11].tolist() == units[:11].tolist()


def test_lengths_and_units_that_do_not_fit_are_refused_with_what_would_do(token_file):
    prose = reader(token_file, 100)
    with pytest.raises(ConfigurationError, match="30 would do"):
        prose.slice_sequences(10, unit=25)
    with pytest.raises(ConfigurationError, match="unit=200"):
        prose.slice_sequences(10, unit=200)
    with pytest.raises(ConfigurationError, match="99 would do"):
        prose.slice_sequences(100)
    with pytest.raises(ArgumentTypeError, match="TokenReader"):
        prose.slice_sequences(10).permute(seed=7).slice_sequences(5)


# Another length in the middle of an epoch -------------------------------------------------------------------


class Resized:
    """A run whose sequence length changes at given moments; what it delivers is read off the tokens."""

    def __init__(self, token_file, units, first, changes, seed=7):
        self.slices = reader(token_file, units * UNIT + 1).slice_sequences(first, unit=UNIT)
        self.node = self.slices.permute(seed=seed)
        self.units = units
        self.windows: list[tuple[int, int, int]] = []  # epoch, first token, length
        self.changes: list[tuple[int, int]] = []  # windows before it, new length
        for length, after in changes:
            self.deliver(after)
            self.node = self.node.resize_sequences(length, after)
            self.changes.append((len(self.windows), length))

    def deliver(self, count):
        node = self.node
        if not count:
            return
        rows = node.fetch(np.arange(count)).tolist()
        if hasattr(node, "epoch_of"):
            epochs = node.epoch_of(np.arange(count)).tolist()
        else:
            epochs = self.slices.epoch_of(node.route(np.arange(count))[1]).tolist()
        for row, epoch in zip(rows, epochs, strict=True):
            first = row[0] * 7143 % 50_000  # 7 · 7143 = 1 modulo 50,000
            assert row == ids(first, node.sequence_length + 1)
            self.windows.append((epoch, first, node.sequence_length))

    def labels(self, epoch):
        return [first + j for e, first, length in self.windows if e == epoch for j in range(1, length + 1)]

    def changed_to_in(self, epoch):
        """The lengths that the run changed to inside the epoch."""
        epochs = [e for e, _, _ in self.windows]
        return [
            length
            for at, length in self.changes
            if 0 < at < len(epochs) and (epochs[at - 1] == epoch or epochs[at] == epoch)
        ]


change_of_length = st.tuples(st.sampled_from(LENGTHS), st.integers(0, 60))
changes_of_length = st.lists(change_of_length, max_size=6)
some_changes = st.lists(change_of_length, min_size=1, max_size=6)


@settings(max_examples=200)
@given(units=st.integers(1, 9), first=st.sampled_from(LENGTHS), changes=changes_of_length)
def test_after_any_changes_of_length_no_token_is_a_label_twice_in_an_epoch(token_file, units, first, changes):
    run = Resized(token_file, units, first, changes)
    run.deliver(3 * units * (UNIT // run.node.sequence_length))
    epochs = [epoch for epoch, _, _ in run.windows]
    assert epochs == sorted(epochs)
    assert sorted(set(epochs)) == list(range(max(epochs) + 1))
    for epoch in range(max(epochs) + 1):
        labels = run.labels(epoch)
        assert len(labels) == len(set(labels)), epoch
        assert set(labels) <= set(range(1, units * UNIT + 1))


@settings(max_examples=200)
@given(units=st.integers(1, 9), first=st.sampled_from(LENGTHS), changes=changes_of_length)
def test_a_change_of_length_loses_less_than_one_new_window_of_each_unit(token_file, units, first, changes):
    run = Resized(token_file, units, first, changes)
    run.deliver(3 * units * (UNIT // run.node.sequence_length))
    for epoch in range(run.windows[-1][0]):  # each of them is through
        labels = set(run.labels(epoch))
        lost = sum(length - 1 for length in run.changed_to_in(epoch))
        for unit in range(units):
            own = range(unit * UNIT + 1, (unit + 1) * UNIT + 1)
            missing = [token for token in own if token not in labels]
            assert len(missing) <= lost
            assert missing == list(own)[UNIT - len(missing) :]  # the unit's end, and no hole before it


@settings(max_examples=100)
@given(units=st.integers(1, 9), first=st.sampled_from(LENGTHS), changes=some_changes)
def test_epochs_after_the_changed_one_are_whole_and_in_the_order_of_a_run_that_began_so(
    token_file, units, first, changes
):
    run = Resized(token_file, units, first, changes)
    length = run.node.sequence_length
    an_epoch = units * (UNIT // length)
    numbers = np.arange(5 * an_epoch + units * UNIT)
    epochs = run.node.epoch_of(numbers)
    fresh = run.slices.datapipe.slice_sequences(length, unit=UNIT).permute(seed=7)
    if length == UNIT:
        fresh = run.slices.datapipe.slice_sequences(length).permute(seed=7)
    for epoch in (epochs[0] + 1, epochs[0] + 2):
        own = numbers[epochs == epoch]
        assert own.size == an_epoch
        whole = fresh.fetch(np.arange(epoch * an_epoch, (epoch + 1) * an_epoch))
        assert run.node.fetch(own).tolist() == whole.tolist()


@settings(max_examples=100)
@given(
    units=st.integers(1, 6),
    first=st.sampled_from(LENGTHS),
    changes=some_changes,
    hi=st.integers(0, 250),
)
def test_numbers_at_is_the_inverse_of_starts_after_changes_of_length(token_file, units, first, changes, hi):
    node = Resized(token_file, units, first, changes).node
    starts = node.starts(np.arange(hi))
    for token in range(units * UNIT + 1):
        expected = np.flatnonzero((starts < token) & (token <= starts + node.sequence_length)).tolist()
        assert sorted(node.numbers_at(np.array([token]), hi).tolist()) == expected, token


@pytest.mark.parametrize("moment", range(50))
def test_growing_and_shrinking_is_exact_at_every_moment(token_file, moment):
    run = Resized(token_file, 5, 4, [(8, moment), (2, moment // 3), (12, moment // 2)])
    run.deliver(40)
    for epoch in {e for e, _, _ in run.windows}:
        labels = run.labels(epoch)
        assert len(labels) == len(set(labels))


def test_the_same_length_again_leaves_the_same_windows_to_the_epoch(token_file):
    node = reader(token_file, 7 * UNIT + 1).slice_sequences(6, unit=UNIT).permute(seed=7)
    for after in (0, 1, 6, 7, 8, 27, 28, 29, 100):
        resized = node.resize_sequences(6, after)
        rest = 28 - after % 28
        unseen = sorted(node.fetch(range(after, after + rest)).tolist())
        assert sorted(resized.fetch(range(rest)).tolist()) == unseen
        assert resized.fetch(range(rest, 90)).tolist() == node.fetch(range(after + rest, after + 90)).tolist()
    for after in (0, 7, 21, 28):  # between two rounds the order is the same, too
        resized = node.resize_sequences(6, after)
        assert resized.fetch(range(90)).tolist() == node.fetch(range(after, after + 90)).tolist()


def test_a_length_that_does_not_divide_the_unit_is_refused(token_file):
    node = reader(token_file, 7 * UNIT + 1).slice_sequences(6, unit=UNIT).permute(seed=7)
    with pytest.raises(ConfigurationError, match="5"):
        node.resize_sequences(5, 10)
    with pytest.raises(ConfigurationError, match="5"):
        node.resize_sequences(8, 10).resize_sequences(5, 10)
    with pytest.raises(ArgumentTypeError, match="resize_sequences"):
        node.datapipe.resize_sequences(8, 10)
