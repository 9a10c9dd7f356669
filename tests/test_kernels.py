"""The compiled kernels and the NumPy ones give the same bits."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import MAX_NUMBER, _kernels_numpy, kernels
from tokenpipe.datapipes.phases import WeightChange, _arrays
from tokenpipe.datapipes.weights import WeightTree

LAST = MAX_NUMBER - 1
I64 = np.int64


def both(name):
    """(the compiled kernel, the NumPy one)"""
    function, compiled = kernels.kernel(name)
    if not compiled:
        pytest.skip("the compiled kernels do not run here")
    return function, getattr(_kernels_numpy, name)


anywhere = st.one_of(st.integers(0, 2000), st.integers(0, LAST))
many = st.lists(anywhere, max_size=30)


# permute ----------------------------------------------------------------------------------------------------


@given(
    numbers=many,
    length=st.one_of(st.integers(1, 300), st.integers(1, MAX_NUMBER)),
    block=st.one_of(st.integers(1, 300), st.integers(1, MAX_NUMBER)),
    end=st.one_of(st.just(MAX_NUMBER), anywhere.map(lambda n: n + 1)),
    key=st.integers(0, 2**64 - 1),
    by_block=st.booleans(),
    inverse=st.booleans(),
)
def test_both_permute_alike(numbers, length, block, end, key, by_block, inverse):
    asked = np.array([n % end for n in numbers], I64)
    outs = [np.empty(asked.size, I64) for _ in range(2)]
    for kernel, out in zip(both("permute"), outs, strict=True):
        kernel(asked, out, length, min(block, length), end, np.uint64(key), by_block, inverse)
    assert outs[0].tolist() == outs[1].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**62 + 1, LAST])
@pytest.mark.parametrize("inverse", [False, True])
def test_both_permute_alike_at_the_edges_of_the_domains(size, inverse):
    near = [0, 1, size - 1, size, size + 1, 2**32, 2**62, LAST]
    asked = np.array([n for n in near if 0 <= n <= LAST], I64)
    outs = [np.empty(asked.size, I64) for _ in range(2)]
    for kernel, out in zip(both("permute"), outs, strict=True):
        kernel(asked, out, size, size, MAX_NUMBER, np.uint64(2**64 - 1), False, inverse)
    assert outs[0].tolist() == outs[1].tolist()


# blend ------------------------------------------------------------------------------------------------------


@st.composite
def phases(draw):
    """One to four phases over the same sources, as the arrays that the kernels take."""
    n = draw(st.integers(1, 6))
    top = draw(st.sampled_from([3, 1000, 2**32, 2**49]))
    one = st.lists(st.one_of(st.just(0), st.integers(1, top)), min_size=n, max_size=n).map(
        lambda w: w if any(w) else [1] * n
    )
    changes = [WeightChange(0, tuple(draw(one)))]
    for gap in draw(st.lists(st.one_of(st.integers(1, 50), st.integers(1, 2**60)), max_size=3)):
        changes.append(WeightChange(changes[-1].number + gap, tuple(draw(one))))
    trees = [WeightTree(change.weights) for change in changes]
    offsets = [[0] * n]
    for tree, a, b in zip(trees, changes, changes[1:], strict=False):
        offsets.append([x + y for x, y in zip(offsets[-1], tree.counts(b.number - a.number), strict=True)])
    return _arrays([change.number for change in changes], trees, offsets, MAX_NUMBER, None)


@given(p=phases(), numbers=many)
def test_both_route_a_blend_alike(p, numbers):
    near = [int(f) + d for f in p.first for d in (-1, 0, 1)]
    asked = np.array([*numbers, *(n for n in near if 0 <= n <= LAST)], I64)
    found = []
    for kernel in both("blend_route"):
        source, number = np.full(asked.size, -7, I64), np.full(asked.size, -7, I64)
        kernel(asked, source, number, p.first, p.root, p.offset, p.left, p.right, p.weight, p.total)
        found.append((source.tolist(), number.tolist()))
    assert found[0] == found[1]


@given(p=phases(), numbers=many, end=st.one_of(st.just(MAX_NUMBER), anywhere.map(lambda n: n + 1)), data=st.data())
def test_both_unroute_a_blend_alike(p, numbers, end, data):
    source = data.draw(st.integers(0, p.offset.shape[1] - 1))
    near = [int(o) + d for o in p.offset[:, source] for d in (-1, 0, 1)]
    asked = np.array([*numbers, *(n for n in near if 0 <= n <= LAST)], I64)
    found = []
    for kernel in both("blend_unroute"):
        out = np.full(asked.size, -7, I64)
        kernel(source, asked, out, p.first, p.offset, p.leaf, p.parent, p.left, p.weight, p.total, end)
        found.append(out.tolist())
    assert found[0] == found[1]
    assert all(-1 <= place < end for place in found[0])


# gather -----------------------------------------------------------------------------------------------------

DTYPES = [np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i4", "<i8")]
CODES = {"<u1": 1, "|u1": 1, "<u2": 2, "<u4": 4, "<i4": -4, "<i8": 8}


def files_of(sizes, dtypes):
    chance = np.random.default_rng(5)
    return [
        chance.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, size, dtype, endpoint=True)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def gathered(files, starts, width, missing=(), pieces=None):
    """What both kernels return and write, of pieces [(file, place, tokens), …] (left out: whole files) end to end: of
    stretches of one width, or each of its own.
    """
    pieces = [(f, 0, file.size) for f, file in enumerate(files)] if pieces is None else pieces
    first = np.cumsum([0, *(tokens for _, _, tokens in pieces)], dtype=I64)
    place = np.array([at for _, at, _ in pieces], I64)
    code = np.array([CODES[files[f].dtype.str] for f, _, _ in pieces], I64)
    address = np.array([0 if f in missing else files[f][at:].ctypes.data for f, at, _ in pieces], np.uint64)
    arrays = [None if f in missing else file for f, file in enumerate(files)]
    bounds = np.searchsorted([f for f, _, _ in pieces], np.arange(len(files) + 1)).astype(I64)
    compiled, plain = both("gather")
    found = []
    for kernel, arguments in ((compiled, (first, address, code)), (plain, (first, bounds, place, arrays))):
        counts = np.atleast_1d(np.asarray(width, I64))
        out = np.full(int(np.broadcast_to(counts, starts.shape).sum()) + 3, -99, I64)
        found.append((int(kernel(starts, counts, out, *arguments)), out))
    return found


def rows_of(out, width):
    """The rows of one width, after what stands behind them was found untouched."""
    assert out[-3:].tolist() == [-99] * 3
    return out[:-3].reshape(-1, width).tolist()


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    width=st.integers(1, 30),
    places=st.lists(st.integers(0, 10**6), max_size=12),
    padded=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_both_gather_alike_across_files_of_all_dtypes(sizes, dtypes, width, places, padded):
    total = sum(sizes)
    width = min(width, total)
    starts = [-1 - place if pad else place % (total - width + 1) for place, pad in zip(places, padded, strict=False)]
    files = files_of(sizes, dtypes[: len(sizes)])
    (compiled, out), (plain, same) = gathered(files, np.array(starts, I64), width)
    assert compiled == plain == -1
    assert out.tolist() == same.tolist()
    tokens = [token for file in files for token in file.tolist()]
    for row, start in zip(rows_of(out, width), starts, strict=True):
        assert row == ([0] * width if start < 0 else tokens[start : start + width])


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    stretches=st.lists(st.tuples(st.integers(-30, 10**6), st.integers(0, 30)), min_size=2, max_size=12),
)
def test_both_gather_stretches_of_any_lengths_end_to_end(sizes, stretches):
    files, total = files_of(sizes, [DTYPES[1]] * len(sizes)), sum(sizes)
    counts = np.array([min(count, total) for _, count in stretches], I64)
    starts = np.array(
        [max(-1, p) % (total - c + 1) if p >= 0 else -1 for (p, _), c in zip(stretches, counts, strict=True)], I64
    )
    (compiled, out), (plain, same) = gathered(files, starts, counts)
    assert compiled == plain == -1
    assert out.tolist() == same.tolist()
    tokens = [token for file in files for token in file.tolist()]
    expected = [tokens[s : s + c] if s >= 0 else [0] * c for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
    assert out.tolist() == [token for part in expected for token in part] + [-99] * 3


@given(
    files=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=8)), min_size=1, max_size=5),
    width=st.integers(1, 30),
    places=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_both_gather_alike_across_pieces_of_files(files, width, places):
    """Lengths alternate between a piece and the gap behind it; a file may have no piece at all."""
    contents = files_of([sum(lengths) + 1 for _, lengths in files], [dtype for dtype, _ in files])
    pieces = [
        (f, sum(lengths[:i]), lengths[i]) for f, (_, lengths) in enumerate(files) for i in range(0, len(lengths), 2)
    ]
    if not pieces:
        return
    total = sum(tokens for _, _, tokens in pieces)
    width = min(width, total)
    starts = np.array([place % (total - width + 1) for place in places], I64)
    (compiled, out), (plain, same) = gathered(contents, starts, width, pieces=pieces)
    assert compiled == plain == -1
    assert out.tolist() == same.tolist()
    tokens = [token for f, at, count in pieces for token in contents[f][at : at + count].tolist()]
    assert rows_of(out, width) == [tokens[start : start + width] for start in starts.tolist()]


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=70).filter(any),
    before=st.sampled_from([0, 1, 2**31 + 5, 2**62 - 3]),
    asked=st.lists(st.tuples(st.integers(-1, 10**6), st.integers(0, 9)), min_size=1, max_size=50),
    alike=st.booleans(),
)
def test_both_find_stretches_in_tables_of_any_size_with_empty_pieces_and_far_ones(lengths, before, asked, alike):
    """Behind a piece of `before` tokens that nobody has; more stretches than are looked up together."""
    files, total = files_of([1, sum(lengths)], [DTYPES[2], DTYPES[1]]), sum(lengths)
    at = np.cumsum([0, *lengths]).tolist()
    pieces = [(0, 0, before), *((1, place, tokens) for place, tokens in zip(at, lengths, strict=False))]
    counts = [min(asked[0][1] if alike else count, total) for _, count in asked]
    places = [
        place % (total - count + 1) if place >= 0 else -1 for (place, _), count in zip(asked, counts, strict=True)
    ]
    starts = np.array([place + before if place >= 0 else -1 for place in places], I64)
    (compiled, out), (plain, same) = gathered(files, starts, counts[:1] if alike else counts, pieces=pieces)
    assert compiled == plain == -1
    assert out.tolist() == same.tolist()
    tokens = files[1].tolist()
    expected = [tokens[p : p + c] if p >= 0 else [0] * c for p, c in zip(places, counts, strict=True)]
    assert out.tolist() == [token for part in expected for token in part] + [-99] * 3


def test_a_table_without_pieces_has_padding_alone():
    for result, out in gathered([], np.full(40, -1, I64), 2, pieces=[]):
        assert result == -1
        assert out.tolist() == [0] * 80 + [-99] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_extreme_ids_of_each_dtype_come_out_as_they_are(dtype):
    ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1], dtype)
    for result, out in gathered([ends, ends], np.array([0, 4], I64), 4):
        assert result == -1
        assert rows_of(out, 4) == [ends.tolist()] * 2


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    gaps=st.sets(st.integers(0, 5), min_size=1),
    places=st.lists(st.integers(0, 100), min_size=1, max_size=5),
)
def test_both_name_the_same_file_that_is_not_mapped_yet(sizes, gaps, places):
    total, width = sum(sizes), min(4, sum(sizes))
    files = files_of(sizes, [DTYPES[1]] * len(sizes))
    starts = np.array([place % (total - width + 1) for place in places], I64)
    (compiled, out), (plain, same) = gathered(files, starts, width, missing=gaps)
    assert compiled == plain
    if compiled >= 0:
        assert compiled in gaps
    else:
        assert out.tolist() == same.tolist()


# parts of rows --------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=4),
    size=st.integers(2, 5),
)
def test_both_cut_documents_alike_and_the_ranks_share_out_each_row(rows, size):
    length = max(sum(row) for row in rows)
    length += -length % (2 * size)
    rows = [[*row, length - sum(row)] if sum(row) < length else row for row in rows]
    sequences = np.cumsum([0, *(tokens for row in rows for tokens in row)], dtype=np.int32)
    held = np.zeros((len(rows), length), I64)
    for rank in range(size):
        found = []
        for kernel in both("cut_documents"):
            out = [np.full(4 * sequences.size, -9, I64) for _ in range(3)]
            found.append([array[: kernel(sequences, length, size, rank, *out)].tolist() for array in out])
        assert found[0] == found[1]
        row, begin, count = (np.array(part) for part in found[0])
        assert np.bincount(row, count, len(rows)).tolist() == [length / size] * len(rows)
        for r, first, tokens in zip(row, begin, count, strict=True):
            held[r, first : first + tokens] += 1
    assert (held == 1).all()


# Nanoset ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    weights=st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.1, 0.5, 0.25])), min_size=7, max_size=7),
)
def test_both_count_nanosets_choices_alike(sizes, weights):
    shares = np.array(weights[: len(sizes)])
    shares = shares / shares.sum() if shares.sum() > 0 else np.full(len(sizes), 1 / len(sizes))
    found = []
    for kernel in both("nanoset_counts"):
        source, count = np.full(sum(sizes), -7, I64), np.full(sum(sizes), -7, I64)
        kernel(shares, np.array(sizes, I64), source, count)
        found.append((source.tolist(), count.tolist()))
    assert found[0] == found[1]


# The whole graph --------------------------------------------------------------------------------------------

WHOLE_GRAPH = """
import hashlib, sys
from tokenpipe.datapipes import TokenReader, Topology, kernels
from tokenpipe.reading_services import DataLoader2

def source(name, **options):
    unit = {"unit": options.pop("unit")} if "unit" in options else {}
    reader = TokenReader(sys.argv[1].split(";"), dtype="uint16", name=name)
    return reader.slice_sequences(8, **unit).permute(3, **options)

names = [source("a"), source("b", window=11), source("c", unit=24)]
graph = names[0].blend(*names[1:], weights=[5, 3, 1], max_epochs={"b": 0.7}, on_exhausted="renormalise")
graph = graph.shard_ranks(Topology(1, 3), seed=7).batch_samples(2, global_batch_size=[(0, 6), (9, 12)])
graph = graph.collate_causal_lm(source_ids=True, sample_numbers=True)
digest = hashlib.sha256()
with DataLoader2(graph) as loader:
    for k, batch in zip(range(120), loader):
        if k in (20, 60):
            loader.update_weights([1, 2 if k == 20 else 0, 4])
        for key in sorted(batch):
            digest.update(batch[key].contiguous().numpy().tobytes())
    for step in (0, 10, 30):
        digest.update(repr(loader.contents(step)).encode())
    digest.update(repr(loader.when("c", 100, range(0, 60))).encode())
    digest.update(repr(loader.state_dict()).encode())
exact = names[0].blend(*names[1:])
digest.update(exact.fetch([0, 5, 2**40, 2**62 + 1, 2**63 - 2]).tobytes())
old = TokenReader(sys.argv[1].split(";"), dtype="uint16", name="d").slice_sequences(8)
digest.update(old.order_nanoset(names[0].datapipe, num_samples=500, weights=[0.3, 0.7]).fetch(range(500)).tobytes())
print(digest.hexdigest(), kernels.kernel("permute")[1], kernels.kernel("gather")[1])
"""


def test_a_whole_graph_is_the_same_with_the_numpy_kernels(token_file):
    paths = ";".join([token_file("x.bin", 901), token_file("y.bin", 333, 11), token_file("z.bin", 7, 5)])

    def run(choice):
        environment = {**os.environ, "TOKENPIPE_KERNELS": choice}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", WHOLE_GRAPH, paths],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    plain, *with_numpy = run("numpy")
    compiled, *with_numba = run("numba")
    assert with_numpy == ["False", "False"]
    if with_numba != ["True", "True"]:
        pytest.skip("the compiled kernels do not run here")
    assert plain == compiled
