"""Document ends of files that store none: found by the id that closes documents, kept, and never wrong for long."""

import os
import pickle
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenFileWriter, TokenReader, cache, document_ends, load_recipe, write_recipe
from tokenpipe.datapipes.audit import ledger
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenFileError

END = 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    found = tmp_path / "cache"
    monkeypatch.setenv("TOKENPIPE_CACHE", str(found))
    return found


@pytest.fixture
def raw(tmp_path):
    """raw(tokens, dtype): a file of these tokens without a header, and a reader of it that knows the id."""

    def make(tokens, dtype: str = "uint16", name: str = "prose.bin", **options) -> TokenReader:
        path = tmp_path / name
        np.asarray(tokens, dtype).tofile(path)
        return TokenReader(path, dtype=dtype, end_of_text=END, **options)

    return make


def ends_of(tokens) -> "list[int]":
    """The oracle: the places after each closing id, and the end of a rest."""
    found = [place + 1 for place, token in enumerate(tokens) if token == END]
    return found if found and found[-1] == len(tokens) else [*found, len(tokens)]


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=60)
dtypes = st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"])


@given(tokens=token_lists, dtype=dtypes, chunk=st.integers(1, 70))
def test_the_id_belongs_to_the_document_it_closes_and_a_rest_is_a_last_one(raw, folder, tokens, dtype, chunk):
    before, document_ends.SCANNED = document_ends.SCANNED, chunk
    try:
        for path in folder.glob("*.idx"):
            path.unlink()
        reader = raw(tokens, dtype)
        assert reader.document_ends().tolist() == ends_of(tokens)
        assert reader.files[0].documents == len(ends_of(tokens))
    finally:
        document_ends.SCANNED = before


def test_tokens_after_a_header_are_scanned_too(tmp_path, folder):
    np.save(tmp_path / "prose.npy", np.array([4, 0, 5, 5, 0, 6], np.int32))
    assert TokenReader(tmp_path / "prose.npy", end_of_text=0).document_ends().tolist() == [2, 5, 6]


def test_all_that_documents_are_asked_for_works_as_for_a_file_that_stores_their_ends(raw, tmp_path):
    documents = [[5, 8, 0], [3, 0], [7, 7, 7, 0], [0], [9, 9]]
    found = raw(np.concatenate(documents), "uint32")
    with TokenFileWriter(tmp_path / "stored.tok", dtype="uint32") as writer:
        for document in documents:
            writer.write(document)
    stored = TokenReader(tmp_path / "stored.tok", name="prose")
    assert found.document_ends().tolist() == stored.document_ends().tolist()
    for n in range(5):
        assert found.document_range(n) == stored.document_range(n)
    with pytest.raises(OutOfRangeError):
        found.document_range(5)
    chosen = [reader.select_documents(share=0.6, seed=3) for reader in (found, stored)]
    assert [a.tolist() for a in chosen[0].pieces] == [a.tolist() for a in chosen[1].pieces]
    assert chosen[0].order_settings == chosen[1].order_settings
    rows = [reader.slice_sequences(4).batch_samples(3) for reader in (found, stored)]
    assert ledger.documents(rows[0], 0) == ledger.documents(rows[1], 0)


def test_a_file_is_scanned_once_on_a_machine_and_not_before_its_documents_are_asked_for(raw, folder, monkeypatch):
    scans = []
    real = document_ends._found
    monkeypatch.setattr(document_ends, "_found", lambda file: scans.append(file.path) or real(file))
    reader = raw([1, 0, 2, 0])
    reader.slice_sequences(2).fetch([0])
    assert not scans
    assert pickle.loads(pickle.dumps(reader)).document_ends().tolist() == [2, 4]
    raw([1, 0, 2, 0], name="copy.bin").document_ends()  # the same contents elsewhere
    cache._KNOWN.clear()  # as another process
    reader.document_ends()
    assert len(scans) == 1
    raw([1, 0, 2, 0], name="prose.bin").document_ends()
    raw([1, 0, 2, 3], name="prose.bin").document_ends()  # other contents at the same path
    assert len(scans) == 2
    assert len(list(folder.glob("ends-*.idx"))) == 2


@pytest.mark.parametrize("at", [0, 9, 13, 17, 50, 66, 73, 80, 108, 256, 263, -1])
def test_a_damaged_index_is_made_anew(raw, folder, at):
    reader = raw([1, 0, 2, 0, 3, 3, 0])
    expected = reader.document_ends().tolist()
    (path,) = folder.glob("*.idx")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    cache._KNOWN.clear()
    assert reader.document_ends().tolist() == expected
    assert path.read_bytes() != data


@pytest.mark.parametrize("size", [0, 5, 255, 256, 260, 279, 281, 5000])
def test_a_cut_or_longer_index_is_made_anew(raw, folder, size):
    reader = raw([1, 0, 2, 0, 3, 3, 0])
    expected = reader.document_ends().tolist()
    (path,) = folder.glob("*.idx")
    path.write_bytes((path.read_bytes() + bytes(5000))[:size])
    cache._KNOWN.clear()
    assert reader.document_ends().tolist() == expected


def test_an_index_of_other_tokens_under_this_name_is_not_believed(raw, folder):
    reader, other = raw([1, 0, 2, 0]), raw([0, 0, 0, 0], name="other.bin")
    paths = [document_ends.scanned(r.files[0]).path for r in (reader, other)]
    paths[1].replace(paths[0])
    cache._KNOWN.clear()
    assert reader.document_ends().tolist() == [2, 4]


def test_a_deleted_index_is_made_anew_while_arrays_of_it_are_in_use(raw, folder):
    reader = raw([1, 0, 2, 0])
    ends = reader.files[0].document_ends()
    for path in folder.iterdir():
        path.unlink()
    assert reader.files[0].document_ends().tolist() == ends.tolist() == [2, 4]


CHILD = """
import sys
from tokenpipe.datapipes import TokenReader, document_ends
real, scans = document_ends._found, []
document_ends._found = lambda file: scans.append(1) or real(file)
reader = TokenReader(sys.argv[1], dtype="uint16", end_of_text=0)
print(reader.document_ends().size, len(scans))
"""


def test_of_processes_at_once_one_scans_and_the_others_wait(tmp_path, folder):
    tokens = np.ones(3_000_000, np.uint16)
    tokens[::1000] = 0
    tokens.tofile(tmp_path / "prose.bin")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "prose.bin")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(3)]
    said = sorted(child.communicate(timeout=60)[0].split() for child in children)
    assert said == [["3001", "0"], ["3001", "0"], ["3001", "1"]]


def test_a_scan_that_fails_leaves_nothing_behind_and_says_why(raw, folder, monkeypatch):
    reader = raw(np.ones(1000))
    os.truncate(reader.files[0].path, 1000)
    with pytest.raises(TokenFileError, match="cut"):
        reader.document_ends()
    assert not list(folder.glob("*.idx"))
    assert not list(folder.glob(".*"))


def test_a_full_disk_is_named_with_what_would_do_and_leaves_nothing(raw, folder):
    reader = raw(np.zeros(1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(TokenFileError, match="TOKENPIPE_CACHE"):
            reader.document_ends()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.suffix for path in folder.iterdir()} == {".lock"}
    assert reader.document_ends().size == 1000


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(raw, folder):
    reader = raw([1, 0, 2, 0])
    reader.document_ends()
    (path,) = folder.glob("*.idx")
    path.unlink()
    old, new = (folder / f".{path.name}.{name}" for name in ("old", "new"))
    for left in (old, new):
        left.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert reader.document_ends().tolist() == [2, 4]
    assert not old.exists()
    assert new.exists()


def test_where_nothing_can_be_kept_the_error_says_what_would_do(raw, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_CACHE", "/dev/null/nowhere")
    with pytest.raises(ConfigurationError, match="TOKENPIPE_CACHE"):
        raw([3, 3, 0, 1]).document_ends()
    monkeypatch.delenv("TOKENPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setenv("TMPDIR", "/dev/null/nowhere")
    with pytest.raises(ConfigurationError, match="TOKENPIPE_CACHE"):
        raw([3, 3, 0, 1]).document_ends()


def test_the_id_is_the_headers_where_a_header_has_one(tmp_path, raw):
    for name, said in (("a", 7), ("b", 8), ("none", None)):
        with TokenFileWriter(tmp_path / f"{name}.tok", vocab_size=9, end_of_text=said) as writer:
            writer.write([1, 2, 7])
    paths = {name: tmp_path / f"{name}.tok" for name in ("a", "b", "none")}
    assert TokenReader(paths["a"]).end_of_text == 7
    assert TokenReader(paths["a"], end_of_text=7).end_of_text == 7
    assert TokenReader(paths["none"]).end_of_text is None
    assert TokenReader(paths["none"], end_of_text=7).document_ends().tolist() == [3], "stored ends stay what they are"
    assert TokenReader([paths["a"], paths["none"]]).end_of_text == 7
    assert TokenReader([paths["a"], paths["b"]]).end_of_text is None
    assert raw([1]).end_of_text == END
    with pytest.raises(ConfigurationError, match=r"a\.tok.* 7 .*8"):
        TokenReader(paths["a"], end_of_text=8)


def test_an_id_that_cannot_be_is_refused(raw, tmp_path):
    path = raw([1, 2]).files[0].path
    for wrong in (-1, 65536):
        with pytest.raises(ConfigurationError):
            TokenReader(path, dtype="uint16", end_of_text=wrong)
    with pytest.raises(ConfigurationError, match="0 … 9"):
        TokenReader(path, dtype="uint16", vocab_size=10, end_of_text=10)
    with pytest.raises(ArgumentTypeError):
        TokenReader(path, dtype="uint16", end_of_text=True)


def test_parts_growth_and_recipes_keep_the_id(raw, tmp_path):
    first, more = raw([1, 0, 2]), raw([0, 3, 0], name="more.bin")
    grown = first.with_more(more)
    assert grown.document_ends().tolist() == [2, 3, 4, 6]
    assert grown.part(1).document_ends().tolist() == [4, 6]
    assert grown.part(1).first_document == 2
    again = load_recipe(write_recipe(first.slice_sequences(2), tmp_path), folder=tmp_path)
    assert again.reader.document_ends().tolist() == [2, 3]
