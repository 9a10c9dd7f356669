"""Packed rows and rows aligned to documents: what is in them, by laws; that they resume, and know what they hold.

In these files token k of a source is k + 1, so that a row says where it came from, and 0 is padding.
"""

import os
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import check_indexed_node
from tokenpipe.datapipes import (
    DocumentPacker,
    TokenFileWriter,
    TokenReader,
    Topology,
    _kernels_numpy,
    batch_certificate,
    cache,
    certify,
    document_ends,
    kernels,
    lint,
    load_recipe,
    overlap,
    write_recipe,
)
from tokenpipe.datapipes.audit import ledger
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, StateMismatchError, TokenFileError
from tokenpipe.reading_services import DataLoader2


@pytest.fixture
def source(tmp_path):
    """source([[lengths of the first file's documents], …]): a reader whose token k is k + 1."""

    def make(files: "list[list[int]]", name: str = "prose", first: int = 1, **options) -> TokenReader:
        paths, token = [], first
        for i, lengths in enumerate(files):
            paths.append(str(tmp_path / f"{name}-{i}.tok"))
            with TokenFileWriter(paths[-1], dtype="uint32") as writer:
                for length in lengths:
                    writer.write(np.arange(token, token + length))
                    token += length
        return TokenReader(paths, name=name, **options)

    return make


def edges_of(reader: TokenReader) -> "list[tuple[int, int]]":
    """(first, stop) of each document of the source."""
    ends = reader.document_ends().tolist()
    return list(zip([0, *ends], ends, strict=False))


def both(name):
    """(the compiled kernel, the NumPy one)"""
    function, compiled = kernels.kernel(name)
    if not compiled:
        pytest.skip("the compiled kernels do not run here")
    return function, getattr(_kernels_numpy, name)


lengths_of_files = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=3)
widths = st.integers(1, 20)
MIXED = [[5, 1, 9, 30, 4, 12], [17, 2, 2, 8, 3], [3, 41, 6, 6, 7, 12, 1]]


# Packed rows: what they hold ----------------------------------------------------------------------------------


@given(files=lengths_of_files, length=widths, share=st.sampled_from([None, 0.5]))
def test_every_token_of_every_document_is_in_exactly_one_row(source, files, length, share):
    reader = space = source(files)
    if share is not None:
        try:
            space = reader.select_documents(share=share, seed=5)
        except ConfigurationError:  # none is chosen
            return
    node = space.pack_documents(length)
    rows = node.fetch(np.arange(len(node)))
    assert rows.shape == (len(node), length + 1)
    everything = np.sort(rows[rows > 0])
    assert everything.tolist() == np.sort(space.fetch(np.arange(len(space)))).tolist()
    held: dict[int, set[int]] = {}
    for n, row in enumerate(rows):
        filled = row[: int((row > 0).sum())]
        assert (filled > 0).all(), "padding is at the row's end"
        starts = np.flatnonzero(np.diff(filled, prepend=-1) != 1)
        for first, stop in edges_of(reader):
            inside = filled[(filled > first) & (filled <= stop)]
            if inside.size:
                held.setdefault(first, set()).add(n)
                assert (np.diff(inside) == 1).all(), "in one piece"
                assert inside.size == min(stop - first, length + 1) or stop - first > length + 1
        assert (np.diff(filled[starts]) > 0).all(), "a row's documents are in the source's order"
    for first, stop in edges_of(reader):
        if first in held:
            assert len(held[first]) == -(-(stop - first) // (length + 1)), "a document is cut only where it must be"
    firsts = rows[:, 0]
    whole = [firsts[n] for n in range(len(node))]
    assert whole == sorted(whole), "rows are numbered by their first piece"


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=60), extra=st.integers(0, 8))
def test_each_document_went_where_it_fits_best(lengths, extra):
    """Replayed: of the rows open when its turn came, the row has the least room that holds it."""
    width = max(lengths) + extra
    row_of, first, piece_of = (np.empty(len(lengths) + more, np.int32) for more in (0, 1, 0))
    given = np.array(lengths, np.int32)
    rows = kernels.kernel("pack_best_fit")[0](given, width, row_of, first, piece_of)
    assert first[rows] == len(lengths)
    for r in range(rows):
        assert (row_of[piece_of[first[r] : first[r + 1]]] == r).all()
    room = {}
    for piece in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [left for left in room.values() if left >= lengths[piece]]
        row = int(row_of[piece])
        assert (row in room) == bool(fits)
        assert room.get(row, width) == min(fits, default=width)
        room[row] = room.get(row, width) - lengths[piece]
    assert all(left >= 0 for left in room.values())


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=80), extra=st.integers(0, 30))
def test_both_kernels_pack_alike(lengths, extra):
    width, found = max(lengths) + extra, []
    for function in both("pack_best_fit"):
        arrays = [np.empty(len(lengths) + more, np.int32) for more in (0, 1, 0)]
        rows = function(np.array(lengths, np.int32), width, *arrays)
        found.append((rows, arrays[0].tolist(), arrays[1][: rows + 1].tolist(), arrays[2].tolist()))
    assert found[0] == found[1]


@given(files=lengths_of_files, length=widths, data=st.data())
def test_both_kernels_lay_out_any_windows_of_packed_rows_alike_and_as_the_rows_are(source, files, length, data):
    node = source(files).pack_documents(length)
    space, size = node.reader, node.reader.samples_per_pass
    place = st.integers(0, size - 1)
    places = np.array(data.draw(st.lists(place, min_size=1, max_size=6)), np.int64)
    counts = np.array([data.draw(st.integers(0, min(size - p, 3 * length))) for p in places.tolist()], np.int64)
    flat = node.fetch(np.arange(len(node))).reshape(-1)
    found = []
    for function in both("packed_spans"):
        out = [np.empty(200, np.int64) for _ in range(3)]
        n = function(places, counts, length + 1, space.first, space.piece_of, space.ends, *out)
        found.append([column[:n].tolist() for column in out])
    assert found[0] == found[1]
    assert found[0] == [column.tolist() for column in space.spans(places, counts)]
    laid = [flat[p : p + c].tolist() for p, c in zip(places.tolist(), counts.tolist(), strict=True)]
    built: list[list[int]] = [[] for _ in laid]
    for window, at, count in zip(*found[0], strict=True):
        built[window] += [0] * count if at < 0 else list(range(at + 1, at + 1 + count))
    assert built == laid


def test_a_log_normal_corpus_and_the_files_of_pythons_library_fill_more_than_99_percent(tmp_path):
    rng = np.random.default_rng(7)
    library = Path(sysconfig.get_path("stdlib"))
    corpora = {
        "log-normal": np.maximum(1, rng.lognormal(6.2, 1.2, 50_000)).astype(np.int64),
        "library": np.array([path.stat().st_size for path in sorted(library.glob("*.py"))] * 20),
    }
    for name, lengths in corpora.items():
        lengths = lengths[lengths > 0]
        ends = np.cumsum(lengths)
        with TokenFileWriter(tmp_path / f"{name}.tok", dtype="uint8") as writer:
            writer.write_many(np.ones(int(ends[-1]), np.uint8), ends)
        for length in (1024, 4096):
            node = TokenReader(tmp_path / f"{name}.tok").pack_documents(length)
            assert ends[-1] / (len(node) * (length + 1)) >= 0.99, (name, length)


# What packed rows are asked for -------------------------------------------------------------------------------


def run_of(source, **options):
    packed = source(MIXED).pack_documents(11).permute(seed=7)
    other = source([[9] * 30], name="code", first=1000).slice_sequences(11).permute(seed=7)
    blend = packed.blend(other, weights=[0.7, 0.3])
    return blend.shard_ranks(Topology(**options)).batch_samples(2, global_batch_size=4).collate_causal_lm()


def test_packed_rows_keep_the_contract_below_permute_blend_and_shard(source):
    check_indexed_node(lambda: run_of(source, dp_rank=1, dp_size=2), items=12)


def test_a_batch_of_packed_rows_knows_its_documents_and_masks_padding(source, tmp_path):
    """Of a file whose document ends were found by the id that closes them, with a loss mask beside it."""
    lengths = np.random.default_rng(3).integers(1, 12, 40)
    closed = np.insert(np.arange(1, lengths.sum() + 1), np.cumsum(lengths), 50_000)
    scored = (closed % 3 > 0).astype(np.uint8)
    closed.astype(np.uint16).tofile(tmp_path / "raw.bin")
    scored.tofile(tmp_path / "raw.bin.loss")
    reader = TokenReader(tmp_path / "raw.bin", dtype="uint16", end_of_text=50_000)
    packed = reader.pack_documents(16)
    graph = (
        packed.permute(seed=7)
        .batch_samples(3)
        .collate_causal_lm(
            position_ids=True, document_ids=True, cu_seqlens=True, label_mask=True, no_loss_on=["joins", "unscored"]
        )
    )
    place = {int(token): i for i, token in enumerate(closed) if token != 50_000}
    for batch in graph.limit(passes=1):
        inputs, labels, counts = (batch[key].numpy() for key in ("input_ids", "label_ids", "label_mask"))
        assert ((labels == -100) == ~counts).all()
        begins = np.diff(batch["document_ids"].numpy(), axis=1, prepend=-1) > 0
        assert (begins == (batch["position_ids"].numpy() == 0)).all()
        assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(begins.reshape(-1)).tolist(), inputs.size]
        for row, label, count, begin in zip(inputs, labels, counts, begins, strict=True):
            for i in range(1, row.size):
                assert not begin[i] or row[i - 1] == 50_000 or row[i] == 0, "a document goes on up to its end"
                if row[i] == 0 or begin[i]:
                    assert not count[i - 1], "padding and joins are no labels"
                elif row[i] != 50_000:
                    assert count[i - 1] == bool(scored[place[int(row[i])]])
                    assert not count[i - 1] or label[i - 1] == row[i]


def test_contents_and_documents_say_what_each_row_holds(source):
    graph = run_of(source)
    reader = TokenReader([f.path for f in source(MIXED).files], name="prose")
    edges = edges_of(reader)
    for step in range(12):
        rows = ledger.tokens(graph, step)
        for row, record, documents in zip(
            rows, ledger.contents(graph, step), ledger.documents(graph, step), strict=True
        ):
            base = 1 if record.source == "prose" else 1000
            assert row[0] == record.token + base
            assert documents[-1].stop == (row > 0).sum()
            for part in documents:
                tokens = row[part.first : part.stop] - base
                if record.source == "prose":
                    first, stop = edges[part.document]
                    assert tokens[0] >= first
                    assert tokens[-1] < stop
                    assert (np.diff(tokens) == 1).all()
            if record.source == "prose":
                file = reader.files[[f.path for f in reader.files].index(record.file)]
                assert np.memmap(file.path, "<u4", "r", 256)[record.file_token] == row[0]


@pytest.mark.parametrize("make", [lambda r: r.pack_documents(11), lambda r: r.slice_sequences(11, align="document")])
def test_when_finds_each_row_that_has_a_token_as_a_label_and_no_other(source, make):
    reader = source(MIXED)
    graph = make(reader).permute(seed=3).batch_samples(2)
    steps = range(40)
    rows = {step: ledger.tokens(graph, step) for step in steps}
    for first, stop in [(t, t + 1) for t in range(0, len(reader), 5)] + edges_of(reader) + [(20, 70)]:
        expected = [
            (step, 0, 0, n)
            for step in steps
            for n, row in enumerate(rows[step])
            if ((row[1:] > first) & (row[1:] <= stop)).any()
        ]
        assert [tuple(record[:4]) for record in ledger.when(graph, "prose", range(first, stop), steps)] == expected


def test_places_and_source_numbers_are_each_others_inverse(source):
    reader = source(MIXED)
    for space in (reader, reader.select_documents(documents=[0, 3, 4, 9, 12])):
        packed = space.pack_documents(11).reader
        places = np.arange(packed.samples_per_pass)
        numbers = packed.source_numbers(places)
        assert (numbers >= 0).sum() == len(space)
        filled = places[numbers >= 0]
        assert packed.places_of(numbers[filled]).tolist() == filled.tolist()
        absent = np.setdiff1d(np.arange(len(reader)), numbers)
        assert (packed.places_of(absent) == -1).all()
        assert packed.fetch(filled).tolist() == (numbers[filled] + 1).tolist()
        assert packed.places_of(np.empty(0, np.int64)).size == 0


def test_rows_with_an_excluded_document_are_masked_and_no_others(source):
    graph = source(MIXED).pack_documents(11)
    first, stop = edges_of(graph.reader.origin)[10]
    masked = graph.exclude({"prose": [(first, stop)]}).masked(np.arange(len(graph)))
    rows = graph.fetch(np.arange(len(graph)))
    assert masked.tolist() == ((rows > first) & (rows <= stop)).any(axis=1).tolist()
    assert masked.any()


def test_a_packed_row_of_one_token_has_no_label_and_the_certificate_knows(source):
    graph = source([[12, 12, 1]]).pack_documents(11).batch_samples(3).collate_causal_lm()
    (batch,) = [graph[0]]
    assert (batch["label_ids"][2] == -100).all()
    assert [record.masked for record in ledger.contents(graph, 0)] == [False, False, True]
    assert certify(graph, range(1)).hashes[0] == np.uint64(batch_certificate(batch) % 2**64)


def test_plans_certificates_overlaps_and_lint_take_packed_rows(source):
    graph = run_of(source)
    loader = DataLoader2(graph)
    assert loader.plan(5)
    delivered = [batch for batch, _ in zip(loader, range(4), strict=False)]
    assert len(certify(graph, range(2))) == 2
    assert delivered[0]["input_ids"].shape == (2, 11)
    reader = source(MIXED)
    train, held_out = reader.hold_out(0.4, seed=7)
    assert not overlap(train.pack_documents(11), held_out.pack_documents(11))
    assert overlap(train.pack_documents(11), reader.slice_sequences(8))
    assert any(finding.rule == "short-documents" for finding in lint(source([[2] * 99]).pack_documents(60)))


def test_a_source_of_packed_rows_can_grow(source, tmp_path):
    packed = source(MIXED).pack_documents(11)
    graph = packed.permute(seed=7).blend().batch_samples(2, global_batch_size=2)
    more = source([[8, 9, 10]], name="more", first=5000)
    steps = (len(packed) + len(more.pack_documents(11)) + 1) // 2
    with DataLoader2(graph) as loader:
        seen = [batch.tokens for _, batch in zip(range(3), loader, strict=False)]
        loader.grow_source("prose", [more.files[0].path])
        seen += [batch.tokens for _, batch in zip(range(steps - 3), loader, strict=False)]
        files = [file.path for file in (*packed.reader.files, *more.files)]
        whole = TokenReader(files, name="prose").pack_documents(11).permute(seed=7).blend()
        reopened = DataLoader2.from_state(loader.state_dict(), whole.batch_samples(2, global_batch_size=2))
        assert [r.token for r in reopened.contents(4)] == [r.token for r in loader.contents(4)]
    tokens = set(np.concatenate(seen).reshape(-1).tolist())
    assert tokens >= {*range(1, len(packed.reader.origin) + 1), *range(5000, 5027)}


def test_other_document_ends_are_another_order_and_a_state_of_it_is_refused(source):
    graph = source(MIXED).pack_documents(11).batch_samples(2)
    state = DataLoader2(graph).state_dict()
    again = source(MIXED).pack_documents(11).batch_samples(2)
    assert again.fingerprint() == graph.fingerprint()
    DataLoader2.from_state(state, again)
    tokens = sum(map(sum, MIXED))
    moved = [[6, *MIXED[0][1:]], *MIXED[1:-1], [*MIXED[-1]]]
    moved[0][1:3] = [1, 8]
    assert sum(map(sum, moved)) == tokens
    changed = source(moved).pack_documents(11).batch_samples(2)
    assert changed.fingerprint() != graph.fingerprint()
    with pytest.raises(StateMismatchError):
        DataLoader2.from_state(state, changed)


def test_recipes_hold_packed_and_aligned_rows(source, tmp_path):
    for node in (source(MIXED).pack_documents(11), source(MIXED).slice_sequences(11, align="document")):
        again = load_recipe(write_recipe(node.permute(seed=7), tmp_path), folder=tmp_path)
        assert again.fingerprint() == node.permute(seed=7).fingerprint()


# The plan as a file -------------------------------------------------------------------------------------------


def test_a_plan_is_made_once_mapped_and_found_by_other_processes(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path / "cache"))
    reader = source(MIXED)
    node = reader.pack_documents(11)
    (plan,) = (tmp_path / "cache").glob("packed-*.idx")
    stamp = plan.stat().st_mtime_ns
    assert not node.reader.ends.flags.owndata
    copy = pickle.loads(pickle.dumps(node))
    assert copy.fetch([0, 3]).tolist() == node.fetch([0, 3]).tolist()
    code = (
        "import sys; from tokenpipe.datapipes import TokenReader\n"
        "print(TokenReader(sys.argv[1:], name='prose').pack_documents(11).fingerprint())"
    )
    command = [sys.executable, "-c", code, *(file.path for file in reader.files)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=os.environ).stdout
    assert told.strip() == node.fingerprint()
    assert plan.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("at", [20, 60, 260, -1])
def test_a_damaged_plan_is_made_anew_with_the_same_bits(source, tmp_path, monkeypatch, at):
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path / "cache"))
    expected = source(MIXED).pack_documents(11).fetch(np.arange(9)).tolist()
    (plan,) = (tmp_path / "cache").glob("packed-*.idx")
    good = plan.read_bytes()
    plan.write_bytes(good[:at] + bytes([good[at] ^ 1]) + (good[at + 1 :] if at != -1 else b""))
    cache._KNOWN.clear()
    assert source(MIXED).pack_documents(11).fetch(np.arange(9)).tolist() == expected
    assert plan.read_bytes() == good


def test_a_copy_whose_plan_would_be_another_says_so(source, tmp_path):
    node = source(MIXED).pack_documents(11)
    data = pickle.dumps(node)
    with pytest.raises(TokenFileError, match="document ends"):
        copy = pickle.loads(data)
        copy._digest = "of another plan"
        copy.fetch([0])


def test_what_cannot_be_packed_is_refused_with_a_reason(source, tmp_path):
    np.save(tmp_path / "raw.npy", np.arange(100, dtype=np.uint16))
    for make in (lambda r: r.pack_documents(8), lambda r: r.slice_sequences(8, align="document")):
        with pytest.raises(ConfigurationError, match="end_of_text"):
            make(TokenReader(tmp_path / "raw.npy"))
    assert len(TokenReader(tmp_path / "raw.npy", end_of_text=50).pack_documents(60)) == 2
    reader = source(MIXED)
    with pytest.raises(ArgumentTypeError, match="before"):
        reader.slice_sequences(8).pack_documents(8)
    with pytest.raises(ArgumentTypeError):
        DocumentPacker(reader.pack_documents(8).reader, 8)
    with pytest.raises(ConfigurationError):
        reader.pack_documents(2**25)
    with pytest.raises(ConfigurationError, match="unit"):
        reader.slice_sequences(8, unit=16, align="document")
    with pytest.raises(ConfigurationError, match="align"):
        reader.slice_sequences(8, align="row")
    with pytest.raises(ConfigurationError, match="aligned"):
        reader.slice_sequences(8, align="document").permute(seed=7).resize_sequences(4, after=3)
    with pytest.raises(ConfigurationError, match="too short"):
        source([[3, 3]], name="short").slice_sequences(8, align="document")


# Rows aligned to documents ------------------------------------------------------------------------------------


def aligned_by_hand(ends: "list[int]", length: int, tokens: int) -> "list[int]":
    """The law of align.py, word for word."""
    found, free = [], 0
    for begin, end in zip([0, *ends], ends, strict=False):
        if begin < free or begin + length + 1 > tokens:
            continue
        found.append(begin)
        while found[-1] + length + length + 1 <= end:
            found.append(found[-1] + length)
        free = found[-1] + length
    return found


@given(files=lengths_of_files, length=widths, chunk=st.integers(1, 9))
def test_aligned_rows_begin_where_documents_do(source, files, length, chunk):
    reader = source(files)
    ends = reader.document_ends().tolist()
    expected = aligned_by_hand(ends, length, len(reader))
    before, document_ends.CHUNK = document_ends.CHUNK, chunk
    try:
        for path in Path(os.environ["TOKENPIPE_CACHE"]).glob("aligned-*.idx"):
            path.unlink()
        node = reader.slice_sequences(length, align="document")
    except ConfigurationError:
        assert not expected
        return
    finally:
        document_ends.CHUNK = before
    assert node.starts(np.arange(len(node))).tolist() == expected
    rows = node.fetch(np.arange(len(node)))
    assert rows.tolist() == [list(range(s + 1, s + length + 2)) for s in expected]
    assert node._left_out == pytest.approx(1 - np.unique(rows).size / len(reader))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), length=widths, cut=st.integers(0, 30), more=widths
)
def test_both_kernels_align_alike_in_blocks_too(lengths, length, cut, more):
    ends = np.cumsum(lengths).astype(np.int64)
    tokens = int(ends[-1]) + more - 1
    found = []
    for function in both("aligned_starts"):
        state, starts = np.zeros(2, np.int64), []
        for block in (ends[:cut], ends[cut:]):
            out = np.empty(1000, np.int64)
            starts += out[: function(block, length, tokens, state, out)].tolist()
        found.append(starts)
    assert found[0] == found[1] == aligned_by_hand(ends.tolist(), length, tokens)


def test_aligned_rows_over_chosen_documents_take_their_ends(source):
    reader = source(MIXED)
    chosen = reader.select_documents(documents=[0, 2, 3, 8, 12])
    node = chosen.slice_sequences(6, align="document")
    firsts = {first for first, _ in edges_of(reader)}
    for start, row in zip(node.starts(np.arange(len(node))), node.fetch(np.arange(len(node))), strict=True):
        begins = int(row[0]) - 1
        assert begins in firsts or any(
            a < begins and begins + 6 < b and (begins - a) % 6 == 0 for a, b in edges_of(reader)
        )
        assert row.tolist() == chosen.fetch(np.arange(start, start + 7)).tolist()


def test_the_tree_says_what_is_left_out_and_how_full_rows_are(source):
    assert "of the tokens left out" in source(MIXED).slice_sequences(11, align="document").tree()
    assert "% filled" in source(MIXED).pack_documents(11).tree()
