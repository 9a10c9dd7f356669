"""The shuffle is a bijection of every epoch, whatever its size, and can be asked both ways."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import MAX_NUMBER, TokenReader
from tokenpipe.datapipes.errors import ConfigurationError, OutOfRangeError
from tokenpipe.datapipes.permute import derive_key, permute_numbers

KEY = derive_key(7, "permute", "prose")
BIG = sorted({n + d for n in (2**31, 2**32, 2**53, 10**12, 2**62) for d in (-1, 0, 1)})
LAST = MAX_NUMBER - 1


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def there(places, length, block=None, by_block=False, end=MAX_NUMBER, key=KEY):
    return permute_numbers(np.asarray(places, np.int64), length, block or length, end, key, by_block)


def back(places, length, block=None, by_block=False, end=MAX_NUMBER, key=KEY):
    return permute_numbers(np.asarray(places, np.int64), length, block or length, end, key, by_block, True)


def chi_square(counts, expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


# Bijections ------------------------------------------------------------------------------------------------


def test_every_epoch_is_a_permutation_of_its_samples():
    for n in range(1, 301):
        asked = np.arange(3 * n)
        placed = there(asked, n)
        for epoch in range(3):
            own = slice(epoch * n, (epoch + 1) * n)
            assert sorted(placed[own].tolist()) == asked[own].tolist(), n
        assert back(placed, n).tolist() == asked.tolist(), n


@pytest.mark.parametrize("n", [2, 7, 63, 64, 65, 127, 128, 129, 1000])
def test_the_inverse_undoes_the_permutation_from_both_sides(n):
    asked = np.arange(2 * n)
    assert there(back(asked, n), n).tolist() == asked.tolist()
    assert back(there(asked, n), n).tolist() == asked.tolist()


@given(n=st.integers(1, 400), window=st.integers(2, 90), by_block=st.booleans())
def test_nothing_leaves_its_block_of_the_epoch(n, window, by_block):
    block = min(window, n)
    asked = np.arange(2 * n)
    placed = there(asked, n, block, by_block)
    for epoch in range(2):
        for first in range(epoch * n, (epoch + 1) * n, block):
            own = slice(first, min(first + block, (epoch + 1) * n))
            assert sorted(placed[own].tolist()) == asked[own].tolist()
    assert back(placed, n, block, by_block).tolist() == asked.tolist()


def test_blocks_without_keys_of_their_own_are_all_in_the_same_order():
    placed = there(np.arange(120), 60, 20)
    orders = [(placed[i : i + 20] - i).tolist() for i in range(0, 120, 20)]
    assert orders[0] == orders[1] == orders[2] != orders[3] == orders[4] == orders[5]


def test_blocks_with_keys_of_their_own_are_each_in_another_order():
    placed = there(np.arange(400), 200, 20, by_block=True)
    orders = {tuple((placed[i : i + 20] - i).tolist()) for i in range(0, 400, 20)}
    assert len(orders) == 20


@given(length=st.one_of(st.integers(1, 5000), st.integers(1, 2**62)), end=st.integers(1, MAX_NUMBER))
def test_what_the_end_cuts_off_is_permuted_in_itself(length, end):
    first = (end - 1) // length * length
    asked = numbers(first, first + 1, first + (end - first) // 2, end - 2, end - 1)
    asked = np.unique(np.maximum(asked, first))
    asked = asked[asked < end]
    placed = there(asked, length, end=end)
    assert ((placed >= first) & (placed < end)).all()
    assert back(placed, length, end=end).tolist() == asked.tolist()


def test_the_last_epoch_of_all_holds_each_of_its_numbers_once():
    first = (MAX_NUMBER - 1) // 1000 * 1000
    asked = np.arange(first, MAX_NUMBER, dtype=np.int64)
    assert 1 < asked.size < 1000
    placed = there(asked, 1000)
    assert sorted(placed.tolist()) == asked.tolist()
    assert back(placed, 1000).tolist() == asked.tolist()


# Large numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [*BIG, MAX_NUMBER])
def test_large_epochs_round_trip(length):
    near = [p for p in [0, 1, 2, *BIG, length - 2, length - 1, length, length + 1, LAST] if 0 <= p <= LAST]
    asked = np.unique(numbers(*near))
    placed = there(asked, length)
    assert (placed // length == asked // length).all()
    assert ((placed >= 0) & (placed <= LAST)).all()
    assert np.unique(placed).size == asked.size
    assert back(placed, length).tolist() == asked.tolist()
    assert there(back(asked, length), length).tolist() == asked.tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 999])
def test_small_epochs_round_trip_at_large_numbers(length):
    asked = np.unique(np.concatenate([np.arange(n - 70, min(n + 70, MAX_NUMBER)) for n in [*BIG, LAST]]))
    placed = there(asked, length)
    assert (placed // length == asked // length).all()
    assert back(placed, length).tolist() == asked.tolist()


@given(length=st.integers(1, MAX_NUMBER), asked=st.lists(st.integers(0, LAST), min_size=1, max_size=8))
def test_any_number_of_any_epoch_round_trips(length, asked):
    placed = there(asked, length)
    assert (placed // length == numbers(*asked) // length).all()
    assert back(placed, length).tolist() == asked


@given(length=st.integers(2, 2**62), block=st.integers(2, 2**40), asked=st.integers(0, LAST))
def test_any_number_of_any_window_round_trips(length, block, asked):
    block = min(block, length)
    placed = int(there([asked], length, block, by_block=True)[0])
    assert placed // length == asked // length
    assert placed % length // block == asked % length // block
    assert back([placed], length, block, by_block=True).tolist() == [asked]


def test_the_last_number_is_two_to_the_63_minus_2_and_the_next_one_raises(token_file):
    node = TokenReader(token_file("a.bin", 1000), dtype="uint16").slice_sequences(8).permute(seed=7)
    assert node.end == MAX_NUMBER
    placed = node.route(numbers(LAST))[1]
    assert node.unroute(0, placed).tolist() == [LAST]
    assert node.fetch([LAST]).shape == (1, 9)
    for beyond in (MAX_NUMBER, 2**63, 2**64 - 1, 2**64, np.array([2**63], np.uint64)):
        with pytest.raises(OutOfRangeError):
            node.fetch(beyond if isinstance(beyond, np.ndarray) else [beyond])
    with pytest.raises(OutOfRangeError, match="-1"):
        node.fetch([-1])


# Randomness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [10, 64, 65, 300])
def test_each_epoch_has_another_permutation(n):
    placed = there(np.arange(50 * n), n).reshape(50, n) % n
    assert len({tuple(order) for order in placed.tolist()}) == 50
    same_place = np.mean(placed[1:] == placed[:-1])  # 1 / n is due
    assert same_place < 3 / n


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_frequent(n):
    epochs = 24_000
    orders = Counter(map(tuple, (there(np.arange(epochs * n), n).reshape(-1, n) % n).tolist()))
    every = list(permutations(range(n)))
    freedom = len(every) - 1
    assert chi_square((orders[order] for order in every), epochs / len(every)) < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [7, 33, 63, 64, 65, 100, 257])
def test_every_sample_is_as_likely_at_every_place(n):
    epochs = 20_000 // n * 10
    placed = there(np.arange(epochs * n), n).reshape(-1, n) % n
    counts = np.zeros((n, n), np.int64)
    for place in range(n):
        counts[place] = np.bincount(placed[:, place], minlength=n)
    freedom = (n - 1) ** 2
    assert chi_square(counts.ravel().tolist(), epochs / n) < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [7, 64, 101])
def test_neighbours_are_spread_independently(n):
    epochs = 40_000
    pairs = there((np.arange(epochs)[:, None] * n + np.arange(2)).ravel(), n).reshape(-1, 2) % n
    away = np.bincount((pairs[:, 1] - pairs[:, 0]) % n, minlength=n)
    assert away[0] == 0
    freedom = n - 2
    assert chi_square(away[1:].tolist(), epochs / (n - 1)) < freedom + 5 * (2 * freedom) ** 0.5


# Keys -------------------------------------------------------------------------------------------------------


def test_the_key_depends_on_the_seed_the_role_and_the_name():
    keys = {
        derive_key(seed, role, name)
        for seed in (0, 1, 7, 2**40)
        for role in ("permute", "shard")
        for name in ("", "prose", "code")
    }
    assert len(keys) == 4 * 2 * 3
    assert all(0 <= key < 2**64 for key in keys)


def test_one_seed_gives_each_source_an_order_of_its_own(token_file):
    path = token_file("a.bin", 4001)

    def order(seed, name):
        node = TokenReader(path, dtype="uint16", name=name).slice_sequences(8).permute(seed=seed)
        return node.route(np.arange(len(node)))[1].tolist()

    assert order(7, "prose") == order(7, "prose")
    assert order(7, "prose") != order(7, "code")
    assert order(7, "prose") != order(8, "prose")
    assert sorted(order(7, "prose")) == sorted(order(8, "code")) == list(range(500))


# The node ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"window": 7}, {"window": 1000}, {"unit": 24}])
def test_an_epoch_of_the_node_delivers_each_window_of_tokens_once(token_file, settings):
    unit = {"unit": settings["unit"]} if "unit" in settings else {}
    window = {"window": settings["window"]} if "window" in settings else {}
    slices = TokenReader(token_file("a.bin", 24 * 31 + 1), dtype="uint16").slice_sequences(8, **unit)
    node = slices.permute(seed=7, **window)
    plain = sorted(map(tuple, slices.fetch(np.arange(len(slices))).tolist()))
    assert len(node) == len(slices) == 93
    for epoch in range(3):
        asked = np.arange(epoch * 93, (epoch + 1) * 93)
        rows = list(map(tuple, node.fetch(asked).tolist()))
        assert sorted(rows) == plain
        assert rows != plain
        assert node.unroute(0, node.route(asked)[1]).tolist() == asked.tolist()


@pytest.mark.parametrize("settings", [{}, {"window": 7}, {"window": 31}, {"unit": 24}])
def test_the_source_bound_covers_what_is_touched_and_at_most_the_rest_of_a_block(token_file, settings):
    unit = {"unit": settings["unit"]} if "unit" in settings else {}
    window = {"window": settings["window"]} if "window" in settings else {}
    slices = TokenReader(token_file("a.bin", 24 * 31 + 1), dtype="uint16").slice_sequences(8, **unit)
    node = slices.permute(seed=7, **window)
    block = settings.get("window") or (31 if unit else 93)
    placed = node.route(np.arange(3 * 93))[1]
    assert node.source_bound(0, 0) == 0
    for hi in range(1, 3 * 93 + 1):
        touched = int(placed[:hi].max()) + 1
        bound = node.source_bound(0, hi)
        assert touched <= bound < hi + block
        if (hi % 93) % block == 0:  # whole blocks touch all of it, and nothing else
            assert bound == touched == hi
    assert node.source_bound(0, MAX_NUMBER) == MAX_NUMBER


def test_a_finite_child_is_permuted_as_one_epoch(token_file):
    slices = TokenReader(token_file("a.bin", 1001), dtype="uint16").slice_sequences(8)
    node = slices.limit(samples=300).permute(seed=7)  # more than the 125 of an epoch
    assert len(node) == node.end == 300
    assert sorted(node.route(np.arange(300))[1].tolist()) == list(range(300))
    assert node.unroute(0, numbers(299, 300, 10**9)).tolist()[1:] == [-1, -1]
    with pytest.raises(OutOfRangeError, match="300"):
        node.fetch([300])


def test_a_window_and_a_unit_exclude_one_another(token_file):
    slices = TokenReader(token_file("a.bin", 1001), dtype="uint16").slice_sequences(8, unit=40)
    with pytest.raises(ConfigurationError, match="window"):
        slices.permute(seed=7, window=5)
