"""The mixture keeps its shares at every prefix, its sources in order, and can be asked both ways."""

import math
import random
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes import Numbers
from tokenpipe.datapipes import MAX_NUMBER, TokenReader, Topology, linear_ramp
from tokenpipe.datapipes.blend import Blender
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    OutOfRangeError,
    SourceExhaustedError,
    WeightsError,
)
from tokenpipe.datapipes.phases import WeightChange
from tokenpipe.datapipes.weights import SCALE, WeightTree, quantise
from tokenpipe.reading_services import DataLoader2

CLOSEST = 2  # samples that a source may be off its share, at any prefix of a phase
LAST = MAX_NUMBER - 1


def sources(*lengths: int) -> "list[Numbers]":
    return [Numbers(f"s{i}", length) for i, length in enumerate(lengths)]


def blended(weights, lengths=None, **options) -> Blender:
    return Blender(*sources(*(lengths or [100] * len(weights))), weights=weights, **options)


def routed(blend, start, stop):
    source, number = blend.route(np.arange(start, stop, dtype=np.int64))
    return source.tolist(), number.tolist()


def by_source(source, number):
    found = defaultdict(list)
    for s, n in zip(source, number, strict=True):
        found[s].append(n)
    return found


def assert_each_source_comes_in_order(blend, start, stop):
    before = blend.counts(start)
    for s, delivered in by_source(*routed(blend, start, stop)).items():
        assert delivered == list(range(before[s], before[s] + len(delivered))), s


def assert_unroute_undoes_route(blend, asked):
    asked = np.asarray(asked, np.int64)
    source, number = blend.route(asked)
    for s in range(len(blend.sources)):
        mine = source == s
        assert blend.unroute(s, number[mine]).tolist() == asked[mine].tolist()


def assert_within_the_bound(blend, weights, first, stop, closest=CLOSEST):
    """At every prefix of the numbers [first, stop), which lie in one phase with these integer weights."""
    total = sum(weights)
    given_so_far = [0] * len(weights)
    for k, s in enumerate(routed(blend, first, stop)[0], 1):
        given_so_far[s] += 1
        for mine, weight in zip(given_so_far, weights, strict=True):
            assert abs(mine * total - k * weight) <= closest * total, (k, given_so_far, weights)


shares = st.lists(st.one_of(st.integers(1, 20), st.floats(1e-4, 1e4)), min_size=1, max_size=12)


def some_positive(weights: "list[int]") -> "list[int]":
    return weights if any(weights) else [1] * len(weights)


@st.composite
def changing_weights(draw, most_changes=8):
    """Weights of one to seven sources, and changes of them: some sources dropped, some taken up again."""
    n = draw(st.integers(1, 7))
    one = st.lists(st.one_of(st.just(0), st.integers(1, 1000)), min_size=n, max_size=n).map(some_positive)
    gaps = draw(st.lists(st.integers(0, 60), max_size=most_changes))
    return n, draw(one), [(gap, draw(one)) for gap in gaps]


def with_phases(n, weights, changes) -> "tuple[Blender, list[int]]":
    blend = blended(weights, [50] * n)
    at, firsts, entries = 0, [0], []
    for gap, later in changes:
        at += gap
        firsts.append(at)
        entries.append(WeightChange(at, blend.integer_weights(later)))
    return blend.with_changes(entries), firsts


# Counts and ordinals ----------------------------------------------------------------------------------------


@given(weights=shares)
def test_each_source_delivers_its_samples_in_order(weights):
    assert_each_source_comes_in_order(blended(weights), 0, 500)


@given(weights=shares, hi=st.integers(0, 400))
def test_the_counts_are_how_often_each_source_was_drawn(weights, hi):
    blend = blended(weights)
    source = routed(blend, 0, hi)[0]
    assert blend.counts(hi) == [source.count(s) for s in range(len(weights))]
    assert [blend.source_bound(s, hi) for s in range(len(weights))] == blend.counts(hi)


@given(weights=shares, asked=st.lists(st.integers(0, LAST), min_size=1, max_size=20))
def test_the_inverse_of_any_number_is_that_number(weights, asked):
    assert_unroute_undoes_route(blended(weights), asked)


@given(weights=shares)
def test_a_number_that_comes_beyond_the_end_is_never_delivered(weights):
    blend = blended(weights)
    counts = blend.counts(MAX_NUMBER)
    assert sum(counts) == MAX_NUMBER
    for s, count in enumerate(counts):
        beyond = [n for n in (count, count + 1, LAST) if count <= n <= LAST]
        assert blend.unroute(s, np.array(beyond, np.int64)).tolist() == [-1] * len(beyond)
        if count:
            place = blend.unroute(s, np.array([count - 1], np.int64))
            assert 0 <= place[0] <= LAST
            assert [v.tolist() for v in blend.route(place)] == [[s], [count - 1]]


def test_a_blend_of_one_source_is_that_source():
    blend = blended([3.0])
    assert routed(blend, 0, 300) == ([0] * 300, list(range(300)))
    assert blend.unroute(0, np.array([0, 5, LAST])).tolist() == [0, 5, LAST]


def test_a_source_with_weight_0_is_never_drawn():
    blend = blended([1, 0, 2])
    assert 1 not in routed(blend, 0, 1000)[0]
    assert blend.counts(10**15)[1] == 0
    assert blend.unroute(1, np.array([0, 1, 10**12])).tolist() == [-1, -1, -1]


# The bound --------------------------------------------------------------------------------------------------


@given(weights=shares)
def test_every_prefix_is_within_two_samples_of_the_stored_shares(weights):
    blend = blended(weights)
    assert_within_the_bound(blend, blend.weights, 0, 600)


@given(weights=shares, ks=st.lists(st.integers(0, MAX_NUMBER), min_size=1, max_size=10))
def test_far_prefixes_are_within_two_samples_of_the_stored_shares(weights, ks):
    blend = blended(weights)
    for k in ks:
        counts = blend.counts(k)
        assert sum(counts) == k
        for mine, weight in zip(counts, blend.weights, strict=True):
            assert abs(mine - Fraction(k * weight, SCALE)) <= CLOSEST


def test_lopsided_blends_of_many_sources_keep_the_bound():
    chance = random.Random(7)
    for _ in range(60):
        n = chance.randint(2, 40)
        weights = [math.exp(chance.uniform(-9, 0)) for _ in range(n)]
        blend = blended(weights)
        for k in [*range(1, 120), *(chance.randrange(1, 10**6) for _ in range(60))]:
            for mine, weight in zip(blend.counts(k), blend.weights, strict=True):
                assert abs(mine * SCALE - k * weight) <= CLOSEST * SCALE


@given(weights=shares)
def test_the_stored_shares_are_the_given_ones_to_32_bits(weights):
    blend = blended(weights)
    assert sum(blend.weights) == SCALE
    for weight, stored in zip(weights, blend.weights, strict=True):
        assert abs(Fraction(weight) / sum(map(Fraction, weights)) - Fraction(stored, SCALE)) <= Fraction(2, SCALE)


def test_a_weight_that_rounds_to_nothing_is_refused_by_name():
    with pytest.raises(WeightsError, match="s1"):
        blended([1.0, 1e-12])


def test_only_ratios_of_weights_count():
    assert blended([0.8, 0.2]).weights == blended([8, 2]).weights == blended([8e300, 2e300]).weights


# Phases -----------------------------------------------------------------------------------------------------


@given(changing_weights())
def test_after_any_changes_each_source_goes_on_where_it_stopped(drawn):
    blend, firsts = with_phases(*drawn)
    stop = firsts[-1] + 200
    source, number = routed(blend, 0, stop)
    for s, delivered in by_source(source, number).items():
        assert delivered == list(range(len(delivered))), s
    for hi in [*firsts, stop]:
        assert blend.counts(hi) == [source[:hi].count(s) for s in range(drawn[0])]


@given(changing_weights())
def test_every_prefix_of_every_phase_keeps_the_bound(drawn):
    blend, firsts = with_phases(*drawn)
    stored = [blend.weights, *(change.weights for change in blend.changes)]
    for first, stop, weights in zip(firsts, [*firsts[1:], firsts[-1] + 300], stored, strict=True):
        assert_within_the_bound(blend, weights, first, stop)


@given(changing_weights())
def test_the_inverse_is_exact_through_all_phases(drawn):
    blend, firsts = with_phases(*drawn)
    stop = firsts[-1] + 150
    assert_unroute_undoes_route(blend, np.arange(stop))
    delivered = by_source(*routed(blend, 0, stop))
    last_weights = blend.changes[-1].weights if blend.changes else blend.weights
    for s in range(drawn[0]):
        beyond = np.arange(len(delivered[s]), len(delivered[s]) + 30)
        places = blend.unroute(s, beyond)
        if last_weights[s]:
            assert (places >= stop).all()
            assert blend.route(places)[1].tolist() == beyond.tolist()
        else:
            assert places.tolist() == [-1] * 30


@given(changing_weights(), st.integers(2**40, 2**61))
def test_phases_at_large_numbers_are_exact_too(drawn, far):
    n, weights, changes = drawn
    blend, firsts = with_phases(n, weights, [(far, weights), *changes])
    assert_unroute_undoes_route(blend, [0, 1, far - 1, far, far + 1, far + 10**9, LAST])
    assert_each_source_comes_in_order(blend, far - 40, firsts[-1] + 100)


def test_a_phase_of_one_source_delivers_nothing_else():
    blend = blended([1, 1, 1])
    alone = [WeightChange(30, blend.integer_weights([0, 1, 0])), WeightChange(50, blend.integer_weights([1, 0, 1]))]
    blend = blend.with_changes(alone)
    source, number = routed(blend, 0, 80)
    assert source[30:50] == [1] * 20
    assert number[30:50] == list(range(10, 30))
    assert 1 not in source[50:]
    assert blend.unroute(1, np.array([29, 30, 31])).tolist() == [49, -1, -1]
    assert_unroute_undoes_route(blend, np.arange(80))


def test_a_change_leaves_what_came_before_it_as_it_was():
    blend = blended([3, 1, 2])
    changed = blend.with_changes([WeightChange(777, blend.integer_weights([1, 5, 0]))])
    assert routed(changed, 0, 777) == routed(blend, 0, 777)
    assert blend.changes == ()


def test_the_last_of_two_changes_at_one_number_holds():
    blend = blended([3, 1])
    twice = [WeightChange(10, blend.integer_weights([0, 1])), WeightChange(10, blend.integer_weights([1, 0]))]
    assert routed(blend.with_changes(twice), 10, 50)[0] == [0] * 40


# The exact union --------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_every_epoch_of_an_unweighted_blend_has_each_sample_once(lengths):
    blend = Blender(*sources(*lengths))
    total = sum(lengths)
    assert len(blend) == total
    for epoch in range(3):
        found = by_source(*routed(blend, epoch * total, (epoch + 1) * total))
        for s, length in enumerate(lengths):
            assert found[s] == list(range(epoch * length, (epoch + 1) * length))
    assert_unroute_undoes_route(blend, np.arange(3 * total))
    assert_within_the_bound(blend, lengths, 0, 2 * total)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=2, max_size=5),
    times=st.lists(st.sampled_from([0, 0.5, 1, 2, 3, 2.5]), min_size=5, max_size=5),
)
def test_repeats_are_how_often_the_union_has_each_sample_an_epoch(lengths, times):
    repeats = {f"s{i}": times[i] for i in range(1, len(lengths))}
    blend = Blender(*sources(*lengths), repeats=repeats)
    asked = [lengths[0], *(round(times[i] * lengths[i]) for i in range(1, len(lengths)))]
    assert len(blend) == sum(asked)
    for epoch in range(4):
        found = by_source(*routed(blend, epoch * len(blend), (epoch + 1) * len(blend)))
        for s, count in enumerate(asked):
            assert found[s] == list(range(epoch * count, (epoch + 1) * count))


def test_a_repeated_source_is_shuffled_anew_each_time(token_file):
    def node(name, tokens):
        return TokenReader(token_file(name, tokens), dtype="uint16").slice_sequences(8).permute(seed=7)

    blend = node("a", 81).blend(node("b", 161), repeats={"a": 3})
    rows = blend.fetch(np.arange(len(blend)))
    source = blend.route(np.arange(len(blend)))[0]
    ours = list(map(tuple, rows[source == 0].tolist()))
    thirds = [ours[i : i + 10] for i in range(0, 30, 10)]
    assert set(thirds[0]) == set(thirds[1]) == set(thirds[2])
    assert len(set(ours)) == 10
    assert thirds[0] != thirds[1] != thirds[2]


@given(
    lengths=st.lists(st.integers(1, 2**48), min_size=1, max_size=7),
    asked=st.lists(st.integers(0, LAST), min_size=1, max_size=10),
    epoch=st.integers(0, 2**10),
)
def test_unions_of_more_than_two_to_the_32_samples_are_exact(lengths, asked, epoch):
    blend = Blender(*sources(*lengths))
    total = sum(lengths)
    near = [epoch * total + d for d in (-1, 0, 1, total // 2)]
    assert_unroute_undoes_route(blend, sorted({*asked, *(n for n in near if 0 <= n <= LAST)}))
    assert blend.counts(epoch * total) == [epoch * length for length in lengths]
    for k in asked:
        counts = blend.counts(k)
        source, number = (int(v[0]) for v in blend.route(np.array([k])))
        after = blend.counts(k + 1)
        assert [b - a for a, b in zip(counts, after, strict=True)] == [int(s == source) for s in range(len(lengths))]
        assert number == counts[source]
        for mine, length in zip(counts, lengths, strict=True):
            assert abs(mine * total - k * length) <= CLOSEST * total


@pytest.mark.parametrize(
    "lengths",
    [
        (2**50, 2**50),
        (2**51, 1),
        (1, 2**51, 2**20),
        (2**51 - 1, 2**50 + 3, 7),
        (2**32, 1),
        (2**32 - 1, 1),
        (2**31, 2**31),
        (2**32 + 1, 2**32 - 1, 2**33),
    ],
)
def test_unions_at_the_edges_of_the_wide_multiplication_are_exact(lengths):
    blend = Blender(*sources(*lengths))
    total = sum(lengths)
    near = {0, 1, total - 2, total - 1, total, total + 1, total // 2, 2**32 - 1, 2**32, 2**53, 2**62, LAST - 1, LAST}
    near |= {MAX_NUMBER // total * total + d for d in (-1, 0)}
    asked = sorted(n for n in near if 0 <= n <= LAST)
    assert_unroute_undoes_route(blend, asked)
    for k in asked:
        source, number = (int(v[0]) for v in blend.route(np.array([k])))
        assert number == blend.counts(k)[source] == blend.counts(k + 1)[source] - 1


def test_unions_too_large_for_exact_arithmetic_are_refused():
    WeightTree((2**52 - 2, 1))
    with pytest.raises(WeightsError, match="2\\*\\*52"):
        _ = Blender(*sources(2**51, 2**51)).phases


# Temperature ------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    temperature=st.floats(0.5, 50),
)
def test_a_temperature_takes_shares_to_the_power_of_its_inverse(weights, temperature):
    blend = blended(weights, temperature=temperature)
    powers = [w ** (1 / temperature) for w in weights]
    for s, power in enumerate(powers):
        assert blend.share(s) == pytest.approx(power / sum(powers), rel=1e-6, abs=1e-8)


def test_a_temperature_without_weights_is_one_of_the_lengths():
    assert blended(None, [100, 300], temperature=1).weights == blended([1, 3]).weights
    flat = blended(None, [100, 400], temperature=2)
    assert flat.weights == blended([1, 2]).weights
    assert not flat.exact
    assert blended([1, 0, 3], temperature=5).weights[1] == 0


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf"), True, "2"])
def test_a_temperature_that_is_no_positive_number_is_refused(temperature):
    with pytest.raises(WeightsError, match="temperature"):
        blended([1, 2], temperature=temperature)


# Caps -------------------------------------------------------------------------------------------------------

capped = st.tuples(
    st.lists(st.integers(1, 50), min_size=2, max_size=5),
    st.lists(st.integers(1, 40), min_size=5, max_size=5),
    st.lists(st.sampled_from([None, 0.5, 1, 1.5, 2]), min_size=5, max_size=5).filter(any),
)


def caps_of(lengths, epochs):
    return [None if e is None else max(1, int(e * n)) for n, e in zip(lengths, epochs, strict=True)]


def blended_with_caps(drawn, on_exhausted):
    weights, lengths, epochs = (list(v)[: len(drawn[0])] for v in drawn)
    if not any(epochs):
        epochs[0] = 1
    lengths = [max(2, n) for n in lengths]
    named = {f"s{i}": e for i, e in enumerate(epochs) if e is not None}
    blend = blended(weights, lengths, max_epochs=named, on_exhausted=on_exhausted)
    return blend, caps_of(lengths, epochs)


@given(capped)
def test_a_blend_stops_before_the_sample_that_a_capped_source_cannot_give(drawn):
    blend, caps = blended_with_caps(drawn, "stop")
    assert len(blend) == blend.end
    counts = blend.counts(blend.end)
    assert sum(counts) == blend.end
    full = [s for s, cap in enumerate(caps) if cap is not None and counts[s] == cap]
    assert full
    assert all(cap is None or count <= cap for count, cap in zip(counts, caps, strict=True))
    uncapped = blended(list(drawn[0]), [max(2, n) for n in drawn[1][: len(drawn[0])]])
    (source,), (number,) = routed(uncapped, blend.end, blend.end + 1)
    assert source in full
    assert number == caps[source]
    assert_within_the_bound(blend, blend.weights, 0, blend.end)
    assert_unroute_undoes_route(blend, np.arange(blend.end))
    for s in full:
        assert blend.unroute(s, np.array([caps[s], caps[s] + 1])).tolist() == [-1, -1]
    with pytest.raises(OutOfRangeError, match=str(blend.end)):
        blend.checked([blend.end])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_a_union_of_sources_that_end_holds_every_sample_once_and_ends(lengths):
    first, *others = (source.limit(samples=n) for source, n in zip(sources(*lengths), lengths, strict=True))
    union = first.blend(*others)
    assert union.end == len(union) == sum(lengths)
    pairs = set(zip(*routed(union, 0, union.end), strict=True))
    assert pairs == {(s, i) for s, n in enumerate(lengths) for i in range(n)}


@given(capped)
def test_renormalised_the_others_go_on_in_their_ratio(drawn):
    blend, caps = blended_with_caps(drawn, "renormalise")
    open_ended = any(cap is None for cap in caps)
    assert blend.finite is not open_ended
    stop = 400 if open_ended else blend.end
    if not open_ended:
        assert blend.end == sum(caps)
    source, number = routed(blend, 0, stop)
    first, given_so_far, weights = 0, [0] * len(caps), list(blend.weights)
    in_phase = [0] * len(caps)
    for k, (s, n) in enumerate(zip(source, number, strict=True), 1):
        assert n == given_so_far[s]
        given_so_far[s] += 1
        in_phase[s] += 1
        assert caps[s] is None or given_so_far[s] <= caps[s]
        for mine, weight in zip(in_phase, weights, strict=True):
            assert abs(mine * sum(weights) - (k - first) * weight) <= CLOSEST * sum(weights)
        if given_so_far[s] == caps[s]:
            weights[s], first, in_phase = 0, k, [0] * len(caps)
    assert_unroute_undoes_route(blend, np.arange(stop))
    for s, cap in enumerate(caps):
        if cap is not None:
            assert blend.unroute(s, np.array([cap, cap + 7])).tolist() == [-1, -1]


@given(capped)
def test_a_cap_that_is_an_error_raises_with_the_source_and_not_before(drawn):
    blend, _ = blended_with_caps(drawn, "error")
    stop = blended_with_caps(drawn, "stop")[0].end
    assert blend.end == MAX_NUMBER
    routed(blend, 0, stop)
    with pytest.raises(SourceExhaustedError, match=f"s[0-9]+.* {stop}"):
        blend.route(np.array([stop], np.int64))


@given(drawn=capped, change=st.integers(0, 60), later=st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_caps_hold_through_changes_of_weights(drawn, change, later):
    blend, caps = blended_with_caps(drawn, "renormalise")
    later = later[: len(caps)]
    later[0] = later[0] or 1
    blend = blend.with_changes([WeightChange(change, blend.integer_weights(later))])
    stop = min(blend.end, 300)
    source, number = routed(blend, 0, stop)
    for s, delivered in by_source(source, number).items():
        assert delivered == list(range(len(delivered)))
        assert caps[s] is None or len(delivered) <= caps[s]
    assert_unroute_undoes_route(blend, np.arange(stop))
    assert blend.counts(stop) == [source.count(s) for s in range(len(caps))]


def test_one_number_caps_every_source():
    blend = blended([1, 1], [10, 20], max_epochs=2, on_exhausted="renormalise")
    assert blend.end == 60
    assert blend.counts(60) == [20, 40]


def test_a_finite_source_is_capped_by_its_own_end():
    first, second = Numbers("a", 10, end=25), Numbers("b", 10)
    stop = Blender(first, second, weights=[1, 1])
    assert stop.counts(stop.end)[0] == 25
    on = Blender(first, second, weights=[1, 1], on_exhausted="renormalise")
    assert not on.finite
    assert on.counts(10**6) == [25, 10**6 - 25]


def test_a_cap_below_one_sample_and_an_unknown_source_are_refused():
    with pytest.raises(WeightsError, match="s0"):
        blended([1, 1], [10, 10], max_epochs={"s0": 0.01})
    with pytest.raises(WeightsError, match="s7"):
        blended([1, 1], max_epochs={"s7": 1})
    with pytest.raises(ConfigurationError, match="renormalise"):
        blended([1, 1], max_epochs=1, on_exhausted="renormalize")


# Blends in blends -------------------------------------------------------------------------------------------


@given(
    outer=st.lists(st.integers(1, 30), min_size=2, max_size=2),
    inner=st.lists(st.integers(1, 30), min_size=2, max_size=4),
)
def test_a_blend_in_a_blend_keeps_both_laws(outer, inner):
    below = Blender(*sources(*[50] * len(inner)), weights=inner, name="inner")
    blend = Blender(below, Numbers("other", 70), weights=outer)
    assert blend.sources == ("inner", "other")
    source, number = routed(blend, 0, 600)
    assert_within_the_bound(blend, blend.weights, 0, 600)
    asked = np.array([n for s, n in zip(source, number, strict=True) if s == 0], np.int64)
    assert asked.tolist() == list(range(asked.size))
    assert_within_the_bound(below, below.weights, 0, max(1, asked.size))


def test_an_inner_blend_without_a_name_and_equal_names_are_refused():
    unnamed = Blender(*sources(10, 10))
    with pytest.raises(ConfigurationError, match="name"):
        Blender(unnamed, Numbers("other", 10))
    with pytest.raises(ConfigurationError, match="'a'"):
        Blender(Numbers("a", 10), Numbers("a", 20))


# Changes while the run runs ---------------------------------------------------------------------------------

SEQUENCE, SAMPLES = 8, {"a": 13, "b": 29, "c": 7}


class Delivered:
    """Which samples of each source a loader handed out, read off the tokens alone."""

    def __init__(self) -> None:
        self.places: dict[int, list[int]] = defaultdict(list)

    def add(self, batch) -> None:
        for source, row in zip(batch["source_ids"].tolist(), batch["input_ids"].tolist(), strict=True):
            place = (row[0] - source) * 7143 % 50_000  # 7 · 7143 = 1 modulo 50,000
            assert row == [((place + i) * 7 + source) % 50_000 for i in range(SEQUENCE)]
            assert place % SEQUENCE == 0
            self.places[source].append(place // SEQUENCE)

    def assert_nothing_repeated_or_lost(self) -> None:
        for source, samples in enumerate(SAMPLES.values()):
            places = self.places[source]
            for first in range(0, len(places), samples):
                epoch = places[first : first + samples]
                assert len(set(epoch)) == len(epoch), (source, first)
                assert set(epoch) <= set(range(samples))
                if len(epoch) == samples:
                    assert set(epoch) == set(range(samples))


def three_sources(token_file):
    return [
        TokenReader(token_file(name, SEQUENCE * samples + 1, salt), dtype="uint16", name=name)
        .slice_sequences(SEQUENCE)
        .permute(seed=7)
        for salt, (name, samples) in enumerate(SAMPLES.items())
    ]


def run_of(token_file, topology=None, micro_batch=4, **options):
    a, b, c = three_sources(token_file)
    graph = a.blend(b, c, **options)
    if topology is not None:
        graph = graph.shard_ranks(topology)
    return graph.batch_samples(micro_batch, global_batch_size=8).collate_causal_lm(source_ids=True)


one_weights = st.lists(st.one_of(st.just(0), st.integers(1, 100)), min_size=3, max_size=3).map(some_positive)


@settings(max_examples=25)
@given(weights=st.lists(one_weights, min_size=1, max_size=25))
def test_new_weights_at_every_step_repeat_nothing_and_lose_nothing(token_file, weights):
    delivered = Delivered()
    with DataLoader2(run_of(token_file, weights=weights[0])) as loader:
        items = iter(loader)
        for step, new in enumerate(weights):
            if step:
                loader.update_weights(new)
            drawn = [0, 0, 0]
            for _ in range(2):  # micro-batches a step
                batch = next(items)
                delivered.add(batch)
                for source in batch["source_ids"].tolist():
                    drawn[source] += 1
            for mine, weight in zip(drawn, new, strict=True):
                assert abs(mine - Fraction(8 * weight, sum(new))) <= CLOSEST + Fraction(1, 10**6)
        state = loader.state_dict()
        rest = [next(items) for _ in range(20)]
    for batch in rest:
        delivered.add(batch)
    delivered.assert_nothing_repeated_or_lost()
    with DataLoader2.from_state(state, run_of(token_file, weights=weights[0])) as resumed:
        for batch, again in zip(rest, resumed, strict=False):
            assert batch["input_ids"].tolist() == again["input_ids"].tolist()


@settings(max_examples=10)
@given(weights=st.lists(one_weights, min_size=2, max_size=8), micro_batch=st.sampled_from([1, 2, 4]))
def test_new_weights_in_the_middle_of_a_step_hold_from_the_next_one(token_file, weights, micro_batch):
    delivered = Delivered()
    with (
        DataLoader2(run_of(token_file, micro_batch=micro_batch)) as loader,
        DataLoader2(run_of(token_file, micro_batch=micro_batch)) as unchanged,
    ):
        items = iter(loader)
        first = next(items)
        delivered.add(first)
        loader.update_weights(weights[0])
        of_the_step = [first, *(next(items) for _ in range(8 // micro_batch - 1))]
        for batch, same in zip(of_the_step, unchanged, strict=False):
            assert batch["input_ids"].tolist() == same["input_ids"].tolist()
        for batch in of_the_step[1:]:
            delivered.add(batch)
        for old, new in pairwise(weights):
            drawn = [0, 0, 0]
            for k in range(8 // micro_batch):
                batch = next(items)
                delivered.add(batch)
                for source in batch["source_ids"].tolist():
                    drawn[source] += 1
                if k == 0:
                    loader.update_weights(new)
            assert all(count == 0 for count, weight in zip(drawn, old, strict=True) if not weight)
        for _ in range(30):
            delivered.add(next(items))
    delivered.assert_nothing_repeated_or_lost()


def test_all_ranks_together_repeat_nothing_when_the_weights_change_at_every_step(token_file):
    chance = random.Random(3)
    delivered = Delivered()
    loaders = [DataLoader2(run_of(token_file, Topology(r, 4), 2, weights=[1, 2, 3])) for r in range(4)]
    running = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(30):
        batches = [next(items) for items in running]
        steps.append(sorted(s for batch in batches for s in batch["source_ids"].tolist()))
        new = [chance.random() for _ in range(3)]
        for loader in loaders:
            loader.update_weights(new)
    records = [record for step in range(30) for record in loaders[0].contents(step)]
    for record in sorted(records, key=lambda record: record.sample_number):
        delivered.places["abc".index(record.source)].append(record.token // SEQUENCE)
    delivered.assert_nothing_repeated_or_lost()
    assert steps == [sorted("abc".index(r.source) for r in loaders[0].contents(step)) for step in range(30)]
    assert len({str(loader.state_dict()) for loader in loaders}) == 1


def test_an_inner_blends_weights_can_change_and_nothing_repeats(token_file):
    a, b, c = three_sources(token_file)
    graph = a.blend(b, weights=[1, 1], name="ab").blend(c, weights=[3, 1])
    graph = graph.batch_samples(4, global_batch_size=8).collate_causal_lm()
    chance = random.Random(5)
    with DataLoader2(graph) as loader:
        items = iter(loader)
        for k in range(20):
            next(items), next(items)
            if k % 3 == 0:
                loader.update_weights({"a": chance.random() + 0.01, "b": chance.random() + 0.01})
            elif k % 3 == 1:
                loader.update_weights({"ab": chance.random() + 0.01, "c": chance.random() + 0.01})
        delivered = Delivered()
        for step in range(30):
            for record in loader.contents(step):
                delivered.places["abc".index(record.source)].append(record.token // SEQUENCE)
    delivered.assert_nothing_repeated_or_lost()


def test_a_skipped_inner_blend_takes_new_weights_where_they_were_asked_for(token_file):
    a, b, c = three_sources(token_file)
    inner = a.blend(b, weights=[1, 1], name="ab").skip(10)
    graph = inner.blend(c, weights=[1, 1]).batch_samples(4, global_batch_size=8).collate_causal_lm()
    with DataLoader2(graph) as loader, DataLoader2(graph) as unchanged:
        items = iter(loader)
        for _ in range(6):
            next(items)
        loader.update_weights({"a": 1, "b": 0})
        for step in range(3):
            assert loader.contents(step) == unchanged.contents(step)
        later = [record.source for step in range(3, 8) for record in loader.contents(step)]
        assert "b" not in later
        assert "a" in later


# A schedule: changes planned from the start --------------------------------------------------------------


@given(changing_weights())
def test_planned_weights_give_the_order_that_the_same_changes_would_have_made(drawn):
    n, weights, changes = drawn
    at, schedule = 0, {}
    for gap, after in changes:
        at += gap
        schedule[at] = after
    planned = blended(weights, [50] * n, schedule=list(schedule.items()))
    made = blended(weights, [50] * n).with_changes(planned.schedule)
    assert routed(planned, 0, at + 50) == routed(made, 0, at + 50)
    assert planned.settings.get("schedule", []) == [[number, list(after)] for number, after, _ in planned.schedule]


def test_a_change_that_the_journal_makes_takes_the_place_of_what_was_planned_after_it():
    planned = blended([1, 1], schedule=[(10, [1, 0]), (20, [0, 1]), (30, [1, 1])])
    changed = planned.with_changes([WeightChange(20, (SCALE // 4, SCALE - SCALE // 4))])
    assert routed(changed, 0, 20) == routed(planned, 0, 20)
    assert_within_the_bound(changed, [1, 3], 20, 200)
    assert_each_source_comes_in_order(changed, 0, 200)
    grown = planned.with_changes([WeightChange(15, None, (50, None))])  # a cap, not weights: the plan goes on
    assert routed(grown, 0, 40) == routed(planned, 0, 40)
    assert planned.weights_at(25) == (0, SCALE)
    assert changed.weights_at(35) == (SCALE // 4, SCALE - SCALE // 4)
    again = changed.with_children(*changed.children).with_changes([])
    assert routed(again, 0, 100) == routed(planned, 0, 100)


def test_a_planned_blend_has_no_pass_in_which_each_sample_comes_once(token_file):
    node = TokenReader(token_file("a.bin", 1000), dtype="uint16").slice_sequences(8)
    assert node.blend().once()
    with pytest.raises(ConfigurationError, match="unweighted"):
        node.blend(schedule=[(0, [1])]).once()


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        ([(5, [1, 1]), (5, [1, 2])], WeightsError),
        ([(5, [1, 1]), (4, [1, 2])], WeightsError),
        ([(-1, [1, 1])], ConfigurationError),
        ([(1.5, [1, 1])], ArgumentTypeError),
        ([(1, [1])], WeightsError),
        ([(1, {"s0": 1, "s9": 1})], WeightsError),
        ({1: [1, 1]}, ArgumentTypeError),
        ([1, 2], ArgumentTypeError),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(schedule, error):
    with pytest.raises(error):
        blended([1, 1], schedule=schedule)


@given(shares, st.data(), st.integers(0, 50), st.integers(1, 600), st.integers(1, 700))
def test_a_ramp_keeps_to_its_integral_however_many_pieces_it_has(before, data, start, span, pieces):
    n = len(before)
    after = data.draw(st.lists(st.floats(1e-4, 1e4), min_size=n, max_size=n))
    ramp = linear_ramp(start, start + span, before, after, pieces)
    names = [f"s{i}" for i in range(n)]
    first, last = quantise(names, before), quantise(names, after)
    blend = blended(before, schedule=ramp)
    begin = blend.counts(start)
    assert [number for number, _ in ramp] == sorted({number for number, _ in ramp})
    for (number, _), (stop, _) in pairwise(ramp):
        for u in {number - start, (number + stop) // 2 - start, stop - start}:
            counts = blend.counts(start + u)
            whole = u in (number - start, stop - start)
            for s in range(n):
                # between two borders of pieces a straight line: shares are constant within a piece
                lo, hi = number - start, stop - start
                at_lo, at_hi = (Fraction(2 * span * first[s] * x + (last[s] - first[s]) * x * x, 2 * span * SCALE)
                                for x in (lo, hi))  # fmt: skip
                ideal = at_lo + (at_hi - at_lo) * Fraction(u - lo, hi - lo)
                assert abs(counts[s] - begin[s] - ideal) < (2 if whole else 4), (u, s)


def test_a_ramp_goes_from_the_one_to_the_other():
    ramp = linear_ramp(1000, 3000, {"a": 1, "b": 0}, {"b": 1, "a": 0}, pieces=4)
    assert ramp == [
        (1000, {"a": 438, "b": 62}),
        (1500, {"a": 312, "b": 188}),
        (2000, {"a": 188, "b": 312}),
        (2500, {"a": 62, "b": 438}),
        (3000, {"a": 0, "b": SCALE}),
    ]


@pytest.mark.parametrize(
    "asked",
    [
        (10, 10, [1, 1], [1, 2]),
        (0, 10, [1, 1], [1]),
        (0, 10, [1, 1], {"a": 1}),
        (0, 10, {"a": 1}, {"b": 1}),
        (0, 10, [0], [1]),
        (0, 10, "ab", "ba"),
        (0, 2**40, [1, 1], [1, 2], 10**9),
        (0, 10, [1, 1], [1, float("nan")]),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(asked):
    with pytest.raises((WeightsError, ArgumentTypeError)):
        linear_ramp(*asked)


def test_a_planned_blend_takes_a_source_in_and_keeps_its_plan_up_to_then(token_file):
    def source(name):
        return TokenReader(token_file(name, 4000), dtype="uint16").slice_sequences(8).permute(seed=1)

    def graph(*names):
        first, *others = map(source, names)
        blend = first.blend(*others, weights=[1.0] * len(names), schedule=[(16, [1] + [0] * (len(names) - 1)),
                                                                         (800, [1] * len(names))])  # fmt: skip
        return blend.batch_samples(2, global_batch_size=8)

    with DataLoader2(graph("a.bin", "b.bin")) as loader:
        before = loader.contents(step=3)
        loader.seek(5)
        loader.add_source(source("c.bin"), weights={"a": 1, "b": 1, "c": 2})
        assert {record.source for record in loader.contents(step=3)} == {"a"}
        assert loader.contents(step=3) == before
        found = [record.source for step in range(5, 105) for record in loader.contents(step=step)]
        assert (found.count("a"), found.count("b"), found.count("c")) == (200, 200, 400)
