"""Ids of documents: what is written is found again, beside its own token file and no other."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import DocumentIds, TokenFileWriter, TokenReader, verify_token_file
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    OutOfRangeError,
    TokenFileError,
    TokenIdError,
    TokenpipeError,
)
from tokenpipe.datapipes.formats import ids as ids_module
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path

IDS = ["https://a/1", "b", "https://a/1", "née/2", "https://a/2"]


def write_tokens(path, documents=5, first=0):
    with TokenFileWriter(path, vocab_size=1000) as writer:
        for k in range(documents):
            writer.write([first + k, 999])
    return path


def write_ids(token_file, ids, bound=True):
    with DocumentIdsWriter(ids_path(token_file)) as writer:
        writer.write_ids(ids)
        if bound:
            writer.bind(token_file)
    return ids_path(token_file)


@pytest.fixture
def token_file(tmp_path):
    path = write_tokens(tmp_path / "prose.tok")
    write_ids(path, IDS)
    return path


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@given(st.lists(words, min_size=1, max_size=40), words, st.integers(1, 7))
def test_ids_are_read_and_found_as_a_list_of_strings_would_be(tmp_path, ids, other, chunk):
    path = tmp_path / "x.ids"
    with DocumentIdsWriter(path) as writer:
        writer.write_ids(ids[:3])
        writer.write_ids(ids[3:])
    before, ids_module.CHUNK = ids_module.CHUNK, chunk
    try:
        found = DocumentIds(path)
        assert len(found) == len(ids) and list(found) == ids
        for one in {*ids, other, other + "x", ids[0][:-1]}:
            assert found.find(one) == [k for k, of in enumerate(ids) if of == one]
        found.verify()
    finally:
        ids_module.CHUNK = before


def test_a_reader_numbers_documents_over_all_its_files_and_says_none_where_there_is_no_sidecar(tmp_path, token_file):
    bare = write_tokens(tmp_path / "bare.tok", 2)
    reader = TokenReader([token_file, bare, token_file])
    assert [reader.document_id(k) for k in range(12)] == [*IDS, None, None, *IDS]
    assert reader.find_documents("https://a/1") == [0, 2, 7, 9]
    assert reader.find_documents("nowhere") == []
    kept = reader.document_ids()
    assert kept[1] is None and kept[0] is not None and len(kept[0]) == len(IDS)
    for document in (-1, 12):
        with pytest.raises(OutOfRangeError, match=str(document)):
            reader.document_id(document)


def test_a_reader_and_its_ids_pickle_after_they_were_read(token_file):
    reader = TokenReader(token_file)
    assert reader.document_id(3) == "née/2"
    assert pickle.loads(pickle.dumps(reader)).document_id(3) == "née/2"
    assert pickle.loads(pickle.dumps(reader.document_ids()[0])).find("b") == [1]


@pytest.mark.parametrize("document", [-1, len(IDS), 2**63])
def test_a_document_that_is_not_there_is_an_index_error(token_file, document):
    with pytest.raises(OutOfRangeError, match=r"prose\.tok\.ids"):
        DocumentIds(ids_path(token_file))[document]


def test_ids_left_from_another_version_of_the_token_file_are_refused(token_file):
    write_tokens(token_file, first=100)
    with pytest.raises(TokenFileError, match="another token file"):
        TokenReader(token_file).document_id(0)


def test_ids_of_another_number_of_documents_are_refused_even_unbound(token_file):
    write_ids(token_file, IDS[:-1], bound=False)
    with pytest.raises(TokenFileError, match="4 ids"):
        TokenReader(token_file).document_ids()


@pytest.mark.parametrize("wrong", [[""], ["a", ""]])
def test_an_empty_id_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigurationError, match=f"document {len(wrong) - 1} is empty"):
        write_ids(write_tokens(tmp_path / "x.tok"), wrong)
    assert not ids_path(tmp_path / "x.tok").exists()


def test_an_id_is_a_string(tmp_path):
    with pytest.raises(ArgumentTypeError):
        write_ids(write_tokens(tmp_path / "x.tok"), [7])


def test_ids_are_no_tokens_and_tokens_are_no_ids(token_file):
    with pytest.raises(TokenFileError, match="document ids"):
        TokenReader(ids_path(token_file))
    with pytest.raises(TokenFileError, match="document ids"):
        TokenReader(ids_path(token_file), dtype="uint8")
    with pytest.raises(TokenFileError, match="no file of document ids"):
        DocumentIds(token_file)
    with pytest.raises(TokenFileError, match="cannot open"):
        DocumentIds(token_file.with_name("nowhere.ids"))


def test_every_flipped_byte_is_noticed_when_opened_or_when_verified(token_file):
    path = ids_path(token_file)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with pytest.raises(TokenpipeError):
            DocumentIds(path).verify()


def test_every_cut_is_noticed_when_opened(token_file):
    path = ids_path(token_file)
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(TokenFileError):
            DocumentIds(path)


def test_damaged_ends_give_an_error_or_nothing_never_another_files_bytes(token_file):
    path = ids_path(token_file)
    data = bytearray(path.read_bytes())
    for wrong in (b"\xff" * 8, b"\0" * 8):
        data[-8 * len(IDS) : -8 * (len(IDS) - 1)] = wrong  # the first end
        path.write_bytes(data)
        ids = DocumentIds(path)
        with pytest.raises(TokenFileError, match="damaged"):
            ids[0]
        assert ids.find("https://a/2") == [4] and ids.find("x") == []


@given(
    st.lists(st.lists(st.integers(0, 999), max_size=5), min_size=1, max_size=20).filter(any),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_documents_written_many_at_once_make_the_same_bytes_as_one_by_one(tmp_path, documents, cuts):
    with TokenFileWriter(tmp_path / "one.tok", vocab_size=1000) as writer:
        for document in documents:
            writer.write(document)
    with TokenFileWriter(tmp_path / "many.tok", vocab_size=1000) as writer:
        places = [0, *sorted(min(cut, len(documents)) for cut in cuts), len(documents)]
        for low, high in itertools.pairwise(places):
            part = documents[low:high]
            tokens = np.array([i for document in part for i in document], np.int64)
            writer.write_many(tokens, np.cumsum([len(document) for document in part]))
    assert (tmp_path / "many.tok").read_bytes() == (tmp_path / "one.tok").read_bytes()
    verify_token_file(tmp_path / "many.tok")


def test_an_id_that_does_not_fit_names_the_document_among_many(tmp_path):
    with TokenFileWriter(tmp_path / "x.tok", vocab_size=10) as writer:
        writer.write([1])
        with pytest.raises(TokenIdError, match="token id 10 in document 2 "):
            writer.write_many(np.array([1, 2, 10, 3]), np.array([2, 4]))
        for tokens, ends in (([1, 2], [1]), ([1, 2], [1, 3]), ([1, 2, 3], [2, 1, 3])):
            with pytest.raises(ConfigurationError, match="ends"):
                writer.write_many(np.array(tokens), np.array(ends))
    assert TokenReader(tmp_path / "x.tok").document_ends().tolist() == [1]
