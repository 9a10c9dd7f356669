"""An order that is brought along in a file."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenReader, reorder
from tokenpipe.datapipes.errors import (
    ConfigurationError,
    JournalError,
    OutOfRangeError,
    StateMismatchError,
    TokenFileError,
)
from tokenpipe.reading_services import DataLoader2

SAMPLES = 30


def slices(token_file, name="prose.bin"):
    return TokenReader(token_file(name, SAMPLES * 8 + 1), dtype="uint16", name="prose").slice_sequences(8)


def saved(tmp_path, order, name="order.npy"):
    path = tmp_path / name
    np.save(path, np.asarray(order, np.int64))
    return path


def reordered(token_file, tmp_path, order):
    return slices(token_file).reorder(saved(tmp_path, order))


orders = st.lists(st.integers(0, 3 * SAMPLES), min_size=1, max_size=60)


@given(order=orders)
def test_sample_k_is_the_one_that_entry_k_names(token_file, tmp_path, order):
    node = reordered(token_file, tmp_path, order)
    assert node.fetch(range(len(order))).tolist() == slices(token_file).fetch(order).tolist()
    assert [row.tolist() for row in node] == slices(token_file).fetch(order).tolist()


@given(order=orders)
def test_the_graph_ends_with_the_list(token_file, tmp_path, order):
    node = reordered(token_file, tmp_path, order)
    assert len(node) == node.end == len(order)
    assert node.finite
    with pytest.raises(OutOfRangeError, match=str(len(order))):
        node.fetch([len(order)])
    with pytest.raises(OutOfRangeError):
        node[len(order)]


@given(order=orders)
def test_unroute_gives_the_first_place_of_a_number_and_minus_1_for_one_that_never_comes(token_file, tmp_path, order):
    node = reordered(token_file, tmp_path, order)
    asked = np.arange(3 * SAMPLES + 5)
    expected = [order.index(n) if n in order else -1 for n in asked.tolist()]
    assert node.unroute(0, asked).tolist() == expected


@given(order=orders, asked=st.lists(st.integers(0, 3 * SAMPLES), max_size=20))
def test_places_gives_every_place_of_every_number(token_file, tmp_path, order, asked):
    node = reordered(token_file, tmp_path, order)
    which, found = node.places(0, np.array(asked, np.int64))
    expected = sorted((i, k) for i, n in enumerate(asked) for k, entry in enumerate(order) if entry == n)
    assert sorted(zip(which.tolist(), found.tolist(), strict=True)) == expected


@given(order=orders, hi=st.integers(0, 70))
def test_the_source_bound_is_exact(token_file, tmp_path, order, hi):
    node = reordered(token_file, tmp_path, order)
    assert node.source_bound(0, hi) == max((n + 1 for n in order[:hi]), default=0)


def test_places_and_bounds_hold_across_pieces_of_the_file(token_file, tmp_path, monkeypatch):
    monkeypatch.setattr(reorder, "CHUNK", 7)
    chance = np.random.default_rng(2)
    order = chance.integers(0, SAMPLES, 100).tolist()
    node = reordered(token_file, tmp_path, order)
    expected = [order.index(n) if n in order else -1 for n in range(SAMPLES)]
    assert node.unroute(0, np.arange(SAMPLES)).tolist() == expected
    which, found = node.places(0, np.array([5, 3, 5]))
    assert sorted(zip(which.tolist(), found.tolist(), strict=True)) == sorted(
        (i, k) for i, n in enumerate([5, 3, 5]) for k, entry in enumerate(order) if entry == n
    )
    for hi in range(101):
        assert node.source_bound(0, hi) == max((n + 1 for n in order[:hi]), default=0)


def test_when_names_every_row_of_a_sample_that_the_list_repeats(token_file, tmp_path):
    order = [4, 9, 4, 4, 0, 9, 4, 29, 4 + SAMPLES, 1]
    graph = reordered(token_file, tmp_path, order).batch_samples(2).collate_causal_lm()
    with DataLoader2(graph) as loader:
        assert [r.step * 2 + r.row for r in loader.when("prose", 4 * 8 + 1, range(5))] == [0, 2, 3, 6, 8]
        assert [r.step * 2 + r.row for r in loader.when("prose", 9 * 8 + 8, range(1, 5))] == [5]
        assert loader.when("prose", 20 * 8 + 1, range(5)) == []
        records = [record for step in range(5) for record in loader.contents(step)]
        assert [record.token // 8 for record in records] == [n % SAMPLES for n in order]
        assert [record.epoch for record in records] == [n // SAMPLES for n in order]


@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**63 - 1])
def test_an_entry_that_the_child_does_not_have_is_named_when_it_is_read(token_file, tmp_path, wrong):
    node = reordered(token_file, tmp_path, [3, 4, wrong, 5])
    assert node.fetch([0, 1, 3]).shape == (3, 9)
    with pytest.raises(OutOfRangeError, match=f"entry 2 is {wrong}"):
        node.fetch([0, 1, 2, 3])


def test_an_entry_beyond_a_finite_child_is_named(token_file, tmp_path):
    node = slices(token_file).limit(samples=10).reorder(saved(tmp_path, [9, 10]))
    with pytest.raises(OutOfRangeError, match="entry 1 is 10"):
        node.fetch([0, 1])


def test_the_list_is_part_of_the_fingerprint_and_its_path_is_not(token_file, tmp_path):
    plain = slices(token_file)
    first = plain.reorder(saved(tmp_path, [3, 1, 2], "a.npy"))
    moved = plain.reorder(saved(tmp_path, [3, 1, 2], "b.npy"))
    other = plain.reorder(saved(tmp_path, [3, 2, 1], "c.npy"))
    longer = plain.reorder(saved(tmp_path, [3, 1, 2, 0], "d.npy"))
    assert first.fingerprint() == moved.fingerprint()
    assert len({node.fingerprint() for node in (plain, first, other, longer)}) == 4


def test_a_state_of_another_list_is_refused(token_file, tmp_path):
    plain = slices(token_file)
    state = DataLoader2(plain.reorder(saved(tmp_path, range(9), "a.npy")).batch_samples(3)).state_dict(step=1)
    same = DataLoader2(plain.reorder(saved(tmp_path, range(9), "b.npy")).batch_samples(3))
    same.load_state_dict(state)
    assert next(iter(same)).sample_numbers.tolist() == [3, 4, 5]
    with pytest.raises(StateMismatchError, match="reorder"):
        DataLoader2(plain.reorder(saved(tmp_path, [*range(8), 0], "c.npy")).batch_samples(3)).load_state_dict(state)


def test_the_list_is_mapped_and_never_loaded(token_file, tmp_path):
    path = tmp_path / "sparse.npy"
    entries = 1 << 34  # 128 GiB, were it loaded
    with path.open("wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (entries,)}
        np.lib.format.write_array_header_1_0(file, header)
        first = file.tell()
        file.truncate(first + 8 * entries)
        file.seek(first + 8 * (entries - 1))
        file.write((7).to_bytes(8, "little"))
    node = slices(token_file).reorder(path)
    assert len(node) == entries
    assert node.route(np.array([0, entries // 2, entries - 1]))[1].tolist() == [0, 0, 7]
    assert node.fetch([entries - 1]).tolist() == slices(token_file).fetch([7]).tolist()
    assert isinstance(node.order, np.memmap)
    assert not node.order.flags.writeable
    assert len(node.fingerprint()) == 32
    assert len(pickle.dumps(node)) < 20_000


def test_a_pickled_node_reads_the_same_order(token_file, tmp_path):
    node = reordered(token_file, tmp_path, [5, 2, 5])
    node.fetch([0])
    assert pickle.loads(pickle.dumps(node)).fetch(range(3)).tolist() == node.fetch(range(3)).tolist()


def test_files_that_are_no_list_of_numbers_are_refused(token_file, tmp_path):
    plain = slices(token_file)
    np.save(tmp_path / "narrow.npy", np.arange(5, dtype=np.int32))
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int64))
    np.save(tmp_path / "floats.npy", np.zeros(4))
    (tmp_path / "cut.npy").write_bytes(saved(tmp_path, range(9)).read_bytes()[:-3])
    np.save(tmp_path / "empty.npy", np.empty(0, np.int64))
    for name in ("narrow", "square", "floats", "cut", "empty", "missing"):
        with pytest.raises(TokenFileError, match=rf"{name}\.npy"):
            plain.reorder(tmp_path / f"{name}.npy")
    with pytest.raises((TokenFileError, ConfigurationError), match=r"raw\.bin"):
        plain.reorder(token_file("raw.bin", 40))


def test_weights_below_a_list_cannot_change(token_file, tmp_path):
    other = TokenReader(token_file("code.bin", 81), dtype="uint16", name="code").slice_sequences(8)
    graph = slices(token_file).blend(other, weights=[1, 1]).reorder(saved(tmp_path, range(20)))
    with pytest.raises(JournalError, match="Reorderer"):
        DataLoader2(graph.batch_samples(2)).update_weights([1, 2])
