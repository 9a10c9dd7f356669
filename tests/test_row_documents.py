"""What the documents of rows give: positions, numbers, joins, sequence lengths, costs; from the files' ends alone.

The oracle is plain Python: which document each token of a space belongs to, and boundaries where that changes.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenReader, _kernels_numpy, kernels, row_documents
from tokenpipe.datapipes.core import Unpickled
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.formats import TokenLayout
from tokenpipe.datapipes.row_documents import RowDocuments

I64 = np.int64
pytestmark = pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.TokenFileWarning")


def reader_of(folder: Path, name: str, files: "list[list[int]]", dtypes: "list[str]") -> TokenReader:
    """A reader of files of documents of these lengths, of which some may be empty."""
    layouts = []
    for i, (lengths, dtype) in enumerate(zip(files, dtypes, strict=False)):
        path, kind = folder / f"{name}-{i}.tok", np.dtype(dtype).newbyteorder("<")
        tokens = np.zeros(sum(lengths), kind).tobytes()
        path.write_bytes(tokens + np.cumsum(lengths).astype("<u8").tobytes())
        size = path.stat().st_size
        layouts.append(TokenLayout(str(path), kind, 0, sum(lengths), size, len(lengths), len(tokens)))
    reader = TokenReader([layout.path for layout in layouts], dtype="uint8", name=name)
    return reader.changed(files=tuple(layouts), _first=Unpickled())


def documents_of(gather: TokenGather, spaces) -> "list[tuple]":
    """For each place in the gather's table what is the same for two neighbours only within one document's piece."""
    found = []
    for s, space in enumerate(spaces):
        ends = space.origin.document_ends()
        for token in range(space.samples_per_pass):
            number = int(space.source_numbers(np.array([token]))[0])
            piece = int(np.searchsorted(space.pieces.first, token, side="right"))

            document = int(np.searchsorted(ends, number, side="right"))
            found.append((s, piece, document))
    assert len(found) == gather.first[-1]
    return found


def expected(documents, places, width):
    """(positions of all `width` tokens, document numbers, joins, sequence lengths, the longest, costs)"""
    positions, numbers, joins, sequences, costs = [], [], [], [], []
    for place in places:
        row = [None] * width if place < 0 else documents[place : place + width]
        begins = [i for i in range(width) if i == 0 or row[i] != row[i - 1]]
        where = [max(b for b in begins if b <= i) for i in range(width)]
        positions.append([i - b for i, b in enumerate(where)])
        numbers.append([begins.index(b) for b in where])
        joins.append([i + 1 in begins for i in range(width - 1)])
        shown = [*(b for b in begins if b < width - 1), width - 1]
        lengths = [b - a for a, b in itertools.pairwise(shown)]
        sequences += lengths
        costs.append(sum(n * n for n in lengths))
    return positions, numbers, joins, np.cumsum([0, *sequences]).tolist(), max(sequences, default=0), costs


def check(gather, spaces, places, width):
    documents = documents_of(gather, spaces)
    positions, numbers, joins, sequences, longest, costs = expected(documents, places, width)
    asked, ours = np.array(places, I64), RowDocuments(gather)
    fill = ours.fill(asked, width, position_ids=True, document_ids=True, joins=True, cu_seqlens=True)
    assert ours.positions(asked, width).tolist() == positions
    assert fill.position_ids.tolist() == [row[:-1] for row in positions]
    assert fill.document_ids.tolist() == [row[:-1] for row in numbers]
    assert fill.joins.tolist() == joins
    assert fill.cu_seqlens.tolist() == sequences
    assert fill.max_seqlen == longest
    assert ours.cost(asked, width).tolist() == costs
    assert RowDocuments(gather).cost(asked, width).tolist() == costs  # whatever is mapped meanwhile
    assert [fill.position_ids.dtype, fill.document_ids.dtype, fill.joins.dtype, fill.cu_seqlens.dtype] == [
        I64, I64, np.bool_, np.int32,
    ]  # fmt: skip


@pytest.fixture(params=["numba", "numpy"])
def path(request, monkeypatch):
    """Both ways to do it."""
    if request.param == "numpy":
        monkeypatch.setattr(row_documents, "kernel", lambda name: (getattr(_kernels_numpy, name), False))
    elif not kernels.kernel("row_documents")[1]:
        pytest.skip("the compiled kernels do not run here")
    return request.param


lengths_of_files = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any), min_size=1, max_size=4
)  # 0: an empty document
kinds = st.lists(st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]), min_size=4, max_size=4)


@given(
    sources=st.lists(lengths_of_files, min_size=1, max_size=3),
    dtypes=kinds,
    width=st.integers(2, 24),
    places=st.lists(st.integers(-2, 10**6), max_size=6),
)
@settings(max_examples=60)
def test_rows_of_several_files_and_sources_restart_where_a_document_does(path, sources, dtypes, width, places):
    with tempfile.TemporaryDirectory() as folder:
        spaces = [reader_of(Path(folder), f"s{i}", files, dtypes) for i, files in enumerate(sources)]
        gather = TokenGather(spaces)
        total = int(gather.first[-1])
        width = min(width, total)
        if width > 1:
            check(gather, spaces, [-1 if p < 0 else p % (total - width + 1) for p in places], width)


@given(
    files=lengths_of_files,
    dtypes=kinds,
    width=st.integers(2, 24),
    places=st.lists(st.integers(-2, 10**6), max_size=6),
    share=st.floats(0.2, 0.9),
    cut=st.integers(0, 3),
)
@settings(max_examples=60)
def test_chosen_documents_and_parts_of_a_source_too(path, files, dtypes, width, places, share, cut):
    with tempfile.TemporaryDirectory() as folder:
        whole = reader_of(Path(folder), "s", files, dtypes)
        documents = sum(map(len, files))
        chosen = [d for d in range(documents) if (d * 2654435761 % 97) / 97 < share]
        spaces = [whole.part(min(cut, len(files) - 1))]
        if sum(list(itertools.chain(*files))[d] for d in chosen):
            spaces.append(whole.select_documents(documents=chosen))
        gather = TokenGather(spaces)
        total = int(gather.first[-1])
        width = min(width, total)
        if width > 1:
            check(gather, spaces, [-1 if p < 0 else p % (total - width + 1) for p in places], width)


@given(files=lengths_of_files, width=st.integers(3, 12), chance=st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_packed_rows_and_windows_of_another_source_in_one_batch(path, monkeypatch, files, width, chance):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TOKENPIPE_CACHE", folder)
        reader = reader_of(Path(folder), "packed", files, ["uint16"] * 4)
        plain = reader_of(Path(folder), "plain", [[5, 9, 4]], ["uint32"])
        packed = reader.pack_documents(width - 1)
        gather = TokenGather([packed.reader, plain])
        ends, rows, places = reader.document_ends(), [], []
        for row in np.random.default_rng(chance).permutation(len(packed))[:4].tolist():
            start = int(packed.starts(np.array([row]))[0])
            numbers = packed.reader.source_numbers(np.arange(start, start + width)).tolist()
            # a run of one document's tokens, or of padding, is one
            same = [
                (-1, -1) if n < 0 else (int(np.searchsorted(ends, n, side="right")), n - i)
                for i, n in enumerate(numbers)
            ]
            rows += same
            places.append(start + gather.base[id(packed.reader)])
        borders = np.cumsum([5, 9, 4])
        rows += [(-2, int(np.searchsorted(borders, token, side="right"))) for token in range(2, 2 + width)]
        places.append(2 + gather.base[id(plain)])
        positions, numbers, joins, sequences, longest, costs = expected(rows, range(0, len(rows), width), width)
        documents = RowDocuments(gather)
        fill = documents.fill(np.array(places), width, True, True, True, True)
        assert fill.position_ids.tolist() == [row[:-1] for row in positions]
        assert fill.document_ids.tolist() == [row[:-1] for row in numbers]
        assert fill.joins.tolist() == joins
        assert (fill.cu_seqlens.tolist(), fill.max_seqlen) == (sequences, longest)
        assert documents.cost(np.array(places), width).tolist() == costs


def test_document_ends_that_are_a_part_of_a_map_are_read_from_where_they_are(path, tmp_path, monkeypatch):
    reader = reader_of(tmp_path, "s", [[2, 3, 4]], ["uint16"])
    np.array([7, 7, 2, 5, 9], "<u8").tofile(tmp_path / "ends")
    held = np.memmap(tmp_path / "ends", "<u8", "r", 8)
    monkeypatch.setattr(TokenLayout, "document_ends", lambda self: held[1:])
    assert RowDocuments(TokenGather([reader])).positions(np.array([0]), 9).tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3]]


def test_the_positions_of_datatrove(path, tmp_path):
    reader = reader_of(tmp_path, "golden", [[3, 2, 3, 6, 6]], ["uint16"])  # document ends 3, 5, 8, 14 in rows of 9 + 1
    documents = RowDocuments(TokenGather([reader]))
    assert documents.positions(np.array([0, 10]), 10).tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2, 0, 1],
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 5],
    ]
    fill = documents.fill(np.array([0, 10]), 10, joins=True, cu_seqlens=True, document_ids=True)
    assert fill.position_ids is None
    assert fill.cu_seqlens.tolist() == [0, 3, 5, 8, 9, 13, 18]
    assert fill.max_seqlen == 5
    assert np.flatnonzero(fill.joins[0]).tolist() == [2, 4, 7]
    assert fill.document_ids[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3]


def test_a_document_that_begins_with_the_last_label_or_the_first_input_of_a_row(path, tmp_path):
    reader = reader_of(tmp_path, "edge", [[4, 4, 4]], ["uint16"])
    fill = RowDocuments(TokenGather([reader])).fill(
        np.array([0, 4]), 5, position_ids=True, document_ids=True, joins=True, cu_seqlens=True
    )
    assert fill.joins.tolist() == [[False, False, False, True]] * 2  # the label alone is of the next document
    assert fill.document_ids.tolist() == [[0] * 4] * 2
    assert fill.cu_seqlens.tolist() == [0, 4, 8]


def test_more_documents_than_ever_before_in_a_batch_find_room(path, tmp_path):
    reader = reader_of(tmp_path, "many", [[1] * 3000], ["uint8"])
    fill = RowDocuments(TokenGather([reader])).fill(np.array([0, 1500]), 1001, cu_seqlens=True)
    assert fill.cu_seqlens.tolist() == list(range(2001))
    assert fill.max_seqlen == 1


def test_a_file_without_document_ends_is_one_document_and_is_named(path, token_file, tmp_path):
    raw = token_file("raw.bin", 30)
    with_ends = reader_of(tmp_path, "own", [[2, 3]], ["uint16"])
    reader = with_ends.with_more(TokenReader(raw, dtype="uint16"))
    documents = RowDocuments(TokenGather([reader]))
    assert documents.missing == [raw]
    assert not documents.known
    assert RowDocuments(TokenGather([with_ends])).known
    assert documents.positions(np.array([0]), 9).tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3]]


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_maps_of_document_ends_are_made_when_needed_dropped_and_hold_no_descriptor(path, tmp_path, monkeypatch, small):
    monkeypatch.setattr(row_documents, "SMALL", small)
    monkeypatch.setattr(row_documents, "MOST_MAPS", 3)
    reader = reader_of(tmp_path, "s", [[2, 3]] * 12, ["uint16"] * 12)
    documents = RowDocuments(TokenGather([reader]))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for start in (0, 25, 50, 3, 0):
        asked = np.array([start])
        assert (
            documents.positions(asked, 6).tolist() == RowDocuments(TokenGather([reader])).positions(asked, 6).tolist()
        )
        assert len(documents._maps) <= (0 if small else 3)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
