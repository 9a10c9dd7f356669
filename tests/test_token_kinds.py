"""Token files of other tools: what they write is read exactly, what we write they read, and what is damaged is said."""

import importlib.util
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpipe.cli.main import main
from tokenpipe.datapipes import (
    DatatroveWriter,
    LlmcWriter,
    MegatronWriter,
    TokenFileWriter,
    TokenReader,
    load_recipe,
    write_recipe,
)
from tokenpipe.datapipes.errors import ConfigurationError, TokenFileError, TokenIdError, TokenpipeError
from tokenpipe.datapipes.formats import datatrove, megatron, read_layout

DOCUMENTS = [[1, 2, 3], [40, 5], [600], [7, 8, 9, 10]]
ENDS = [3, 5, 6, 10]
WRITERS = {"datatrove": DatatroveWriter, "megatron": MegatronWriter, "llmc": LlmcWriter, "own": TokenFileWriter}
NAMES = {"datatrove": "a.ds", "megatron": "a.bin", "llmc": "a.bin", "own": "a.tok"}


def write(kind: str, path: Path, documents: "list[list[int]]" = DOCUMENTS, **settings: object) -> Path:
    with WRITERS[kind](path, **(settings or {"vocab_size": 1000})) as writer:
        for document in documents:
            writer.write(document)
    return path


def tokens_of(reader: TokenReader) -> list[int]:
    return reader.fetch(np.arange(len(reader))).tolist()


def flat(documents: "list[list[int]]") -> list[int]:
    return [token for document in documents for token in document]


def index_of(lengths: "list[int]", borders: "list[int]", code: int = 8, itemsize: int = 2, **other: object) -> bytes:
    """Megatron's index, by FORMATS' table alone."""
    starts = other.get("starts") or [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", other.get("version", 1), code, len(lengths), len(borders))
        + np.array(lengths, "<i4").tobytes()
        + np.array(starts, "<i8").tobytes()
        + np.array(borders, "<i8").tobytes()
        + other.get("more", b"")
    )


# What is written is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=25)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=6), min_size=1, max_size=8).filter(any),
    loss=st.booleans(),
)
def test_documents_of_any_lengths_come_back_from_every_kind(tmp_path, kind, documents, loss):
    path = tmp_path / NAMES[kind]
    with WRITERS[kind](path, vocab_size=1000) as writer:
        for document in documents:
            writer.write(document, loss=[token % 2 == 0 for token in document] if loss else None)
    assert (writer.tokens, writer.documents) == (len(flat(documents)), len([d for d in documents if d]))
    reader = TokenReader(path, vocab_size=1000)
    assert tokens_of(reader) == flat(documents)
    if kind != "llmc":
        assert reader.document_ends().tolist() == np.cumsum([len(d) for d in documents if d]).tolist()
    mask = path.with_name(path.name + ".loss")
    assert mask.exists() == loss
    assert not loss or list(mask.read_bytes()) == [token % 2 == 0 for token in flat(documents)]


@pytest.mark.parametrize(
    ("kind", "vocab_size", "dtype"),
    [
        ("datatrove", 65_536, "uint16"),
        ("datatrove", 65_537, "uint32"),
        ("megatron", 65_499, "uint16"),
        ("megatron", 65_500, "int32"),
        ("llmc", 65_536, "uint16"),
        ("llmc", 65_537, "uint32"),
    ],
)
def test_the_vocabulary_chooses_the_dtype_as_the_tool_does(tmp_path, kind, vocab_size, dtype):
    path = write(kind, tmp_path / NAMES[kind], [[0, vocab_size - 1]], vocab_size=vocab_size)
    reader = TokenReader(path)
    assert reader.files[0].dtype.name == dtype
    assert tokens_of(reader) == [0, vocab_size - 1]
    with pytest.raises(TokenIdError, match=f"{vocab_size}"):
        write(kind, path, [[vocab_size]], vocab_size=vocab_size)


@pytest.mark.parametrize(("kind", "dtype"), [("datatrove", "int32"), ("llmc", "uint8"), ("megatron", "uint32")])
def test_a_dtype_that_the_kind_does_not_have_is_refused(tmp_path, kind, dtype):
    with pytest.raises(ConfigurationError, match=dtype):
        WRITERS[kind](tmp_path / NAMES[kind], dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_the_bytes_of_llmc_are_those_of_its_header_rule(tmp_path):
    for dtype, magic, version, code in (("uint16", 20240520, 1, "H"), ("uint32", 20240801, 7, "I")):
        path = write("llmc", tmp_path / "a.bin", dtype=dtype)
        expected = struct.pack("<256i", magic, version, 10, *[0] * 253) + struct.pack(f"<10{code}", *flat(DOCUMENTS))
        assert path.read_bytes() == expected
        assert tokens_of(TokenReader(path)) == flat(DOCUMENTS)
        assert TokenReader(path, end_of_text=600).document_ends().tolist() == [6, 10]


def test_the_bytes_of_datatrove_are_its_tokens_ends_and_three_lines(tmp_path):
    path = write("datatrove", tmp_path / "a.ds", vocab_size=70_000, tokenizer="meta|llama")
    assert path.read_bytes() == struct.pack("<10I", *flat(DOCUMENTS))
    assert Path(f"{path}.index").read_bytes() == struct.pack("<4Q", *ENDS)
    assert Path(f"{path}.metadata").read_text() == "meta|llama|4\n10\n10.0 T"
    assert datatrove.read_metadata(str(path)) == ("meta|llama", 4, 10)


@pytest.mark.parametrize("given_as", ["a", "a.bin", "a.idx"])
def test_a_pair_of_megatrons_is_one_file_by_any_of_its_names(tmp_path, given_as):
    write("megatron", tmp_path / given_as)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert (tmp_path / "a.idx").read_bytes() == index_of([3, 2, 1, 4], [0, 1, 2, 3, 4])
    reader = TokenReader(tmp_path / given_as)
    assert reader.name == "a"
    assert reader.files[0].local == tmp_path / "a.bin"
    assert tokens_of(reader) == flat(DOCUMENTS)
    assert reader.document_ends().tolist() == ENDS


def test_documents_of_several_sequences_and_empty_ones_end_where_the_index_says(tmp_path):
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(index_of([3, 0, 2, 5], [0, 0, 2, 3, 3, 4]))
    assert TokenReader(tmp_path / "a").document_ends().tolist() == [0, 3, 5, 5, 10]
    (tmp_path / "a.idx").write_bytes(index_of([3, 0, 2, 5], [0]))  # a builder whose end_document was never called
    assert TokenReader(tmp_path / "a").files[0].documents == 0
    assert TokenReader(tmp_path / "a", end_of_text=4).document_ends().tolist() == [5, 10]


def test_an_index_in_many_chunks_gives_the_same_ends(tmp_path, monkeypatch):
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 5, 1000).tolist()
    borders = [0, *sorted(rng.integers(0, 1001, 300).tolist()), 1000]
    np.zeros(sum(lengths), "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(index_of(lengths, borders))
    file = read_layout(tmp_path / "a")
    expected = np.cumsum([0, *lengths])[borders[1:]].tolist()
    for chunk in (7, 64, 1000, 5000):
        monkeypatch.setattr(megatron, "_CHUNK", chunk)
        assert np.concatenate(list(megatron.document_ends(file))).tolist() == expected
    starts = np.cumsum([0, *lengths[:-1]]) * 2
    starts[64:] += 2  # a gap where a chunk begins, of an index that was replaced since it was opened
    (tmp_path / "a.idx").write_bytes(index_of(lengths, borders, starts=starts.tolist()))
    monkeypatch.setattr(megatron, "_CHUNK", 64)
    with pytest.raises(TokenFileError, match="end to end"):
        list(megatron.document_ends(file))


def test_positions_and_packing_know_the_documents_of_every_kind(tmp_path):
    kinds = [write(kind, tmp_path / kind / NAMES[kind]) for kind in WRITERS if (tmp_path / kind).mkdir() is None]
    reader = TokenReader(kinds, end_of_text=600, name="all")
    graph = reader.slice_sequences(8).batch_samples(1).collate_causal_lm(position_ids=True)
    batches = [graph.fetch(np.array([b])) for b in range(len(graph))]
    assert batches
    packed = TokenReader([kinds[0], kinds[1], kinds[3]]).pack_documents(4)
    assert packed.samples_per_pass > 0


def test_all_kinds_are_one_token_space_and_one_blend(tmp_path):
    (tmp_path / "raw").mkdir()
    np.array(flat(DOCUMENTS), "<u2").tofile(tmp_path / "raw" / "a.bin")
    np.save(tmp_path / "a.npy", np.array(flat(DOCUMENTS), np.int64))
    paths = [tmp_path / "a.npy", tmp_path / "raw" / "a.bin"]
    for kind in WRITERS:
        (tmp_path / kind).mkdir()
        paths.append(write(kind, tmp_path / kind / NAMES[kind]))
    readers = [
        TokenReader(path, dtype="uint16" if path.parent.name == "raw" else None, name=str(i))
        for i, path in enumerate(paths)
    ]
    assert [reader.files[0].kind for reader in readers] == ["npy", "raw", "datatrove", "megatron", "llm.c", "tokenpipe"]
    mixed = TokenReader([path for path in paths if path.parent.name != "raw"])
    assert tokens_of(mixed) == flat(DOCUMENTS) * 5
    first, *others = [reader.slice_sequences(4).permute(seed=1) for reader in readers]
    blend = first.blend(*others)
    assert {tuple(row) for row in blend.fetch(np.arange(len(blend))).tolist()} == {
        tuple(flat(DOCUMENTS)[i : i + 5]) for i in (0, 4)
    }


def test_negative_ids_of_a_signed_kind_are_beyond_the_vocabulary(tmp_path):
    for code, dtype in ((4, "<i4"), (5, "<i8")):
        np.array([1, -2, 3], dtype).tofile(tmp_path / "a.bin")
        (tmp_path / "a.idx").write_bytes(index_of([3], [0, 1], code, np.dtype(dtype).itemsize))
        with pytest.raises(TokenIdError, match="-2"):
            tokens_of(TokenReader(tmp_path / "a", vocab_size=10))


def test_a_source_has_one_fingerprint_of_tokens_wherever_it_lies_and_documents_know_their_index(tmp_path):
    path = write("datatrove", tmp_path / "a.ds")
    shutil.copytree(tmp_path, tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved") / "a.ds"
    assert TokenReader(path).content == TokenReader(moved).content
    before = TokenReader(path).pack_documents(4).fingerprint()
    assert TokenReader(moved).pack_documents(4).fingerprint() == before
    Path(f"{path}.index").write_bytes(struct.pack("<4Q", 1, 2, 4, 10))
    assert TokenReader(path).document_ends().tolist() == [1, 2, 4, 10], "a new index is no old one's cache"
    assert TokenReader(path).pack_documents(4).fingerprint() != before
    pair = write("megatron", tmp_path / "b.bin")
    assert TokenReader(pair).document_ends().tolist() == ENDS
    (tmp_path / "b.idx").write_bytes(index_of([10], [0, 1]))
    assert TokenReader(pair).document_ends().tolist() == [10]


# Recognised ---------------------------------------------------------------------------------------------------------


def test_a_bin_without_an_index_and_a_ds_without_sidecars_are_raw(tmp_path):
    for name, beside in (("a.bin", [".idx"]), ("a.ds", [".index", ".metadata"])):
        path = write("megatron" if name == "a.bin" else "datatrove", tmp_path / name)
        for suffix in beside:
            path.with_name("a.idx" if suffix == ".idx" else name + suffix).unlink()
        with pytest.raises(ConfigurationError, match="no header"):
            TokenReader(path)
        assert read_layout(path, "uint16").kind == "raw"


def test_an_index_of_datatrove_alone_needs_a_dtype_and_checks_it(tmp_path):
    path = write("datatrove", tmp_path / "a.ds")
    Path(f"{path}.metadata").unlink()
    with pytest.raises(ConfigurationError, match="20 bytes are 10 tokens"):
        TokenReader(path)
    assert TokenReader(path, dtype="uint16").document_ends().tolist() == ENDS
    with pytest.raises(TokenFileError, match="10 tokens"):
        TokenReader(path, dtype="uint32")


def test_metadata_alone_says_the_dtype_and_no_documents(tmp_path):
    path = write("datatrove", tmp_path / "a.ds")
    Path(f"{path}.index").unlink()
    assert tokens_of(TokenReader(path)) == flat(DOCUMENTS)
    assert TokenReader(path).files[0].documents == 0
    with pytest.raises(ConfigurationError, match="uint32"):
        TokenReader(path, dtype="uint32")
    Path(f"{path}.metadata").write_text("a|2")  # an older one, without counts
    assert tokens_of(TokenReader(path)) == flat(DOCUMENTS)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (index_of([3, 2, 5], [0, 3], starts=[4, 0, 10]), "end to end"),
        (index_of([3, 2, 4], [0, 3], starts=[0, 6, 12]), "end to end"),
        (index_of([3, 2, 5], [0, 3], starts=[2, 6, 10]), "end to end"),
        (index_of([2, 5], [0, 2], starts=[6, 10]), "end to end"),
        (index_of([3, -2, 9], [0, 3]), "end to end"),
        (index_of([3, 2, 4], [0, 3]), "ends at byte 18"),
        (index_of([3, 2, 5], [0, 3], more=b"\0\1\0"), "multimodal"),
        (index_of([3, 2, 5], [0, 2]), "documents"),
        (index_of([3, 2, 5], [1, 3]), "documents"),
        (index_of([3, 2, 5], [0, 3], version=2), "version 2"),
        (index_of([3, 2, 5], [0, 3], code=7), "float32"),
        (index_of([3, 2, 5], [0, 3], code=2), "int8"),
        (index_of([3, 2, 5], [0, 3], code=99), "code 99"),
        (index_of([], [0]), "no sequence"),
        (b"TNTIDX\0\0" + bytes(60), "another tool's"),
        (b"", "another tool's"),
    ],
    ids=str,
)
def test_an_index_of_megatrons_that_is_not_all_of_the_file_is_refused_when_opened(tmp_path, index, reason):
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(TokenFileError, match=reason) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenReader(tmp_path / "a.bin")
    assert str(tmp_path) in str(caught.value)


def test_what_is_wrong_between_the_stretches_that_are_looked_at_is_said_with_the_first_documents(tmp_path):
    count = (1 << 16) + 100_000
    np.zeros(2 * count, "<u2").tofile(tmp_path / "a.bin")
    lengths, starts = np.full(count, 2, "<i4"), np.arange(count, dtype="<i8") * 4
    borders = np.arange(count + 1, dtype="<i8")
    for at in (count // 2, 9_000):  # inside a stretch, or between two
        shifted = starts.copy()
        shifted[at] += 2
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        (tmp_path / "a.idx").write_bytes(index + lengths.tobytes() + shifted.tobytes() + borders.tobytes())
        with pytest.raises(TokenFileError, match="end to end"):
            TokenReader(tmp_path / "a").document_ends()
    borders[7] = 9
    (tmp_path / "a.idx").write_bytes(index + lengths.tobytes() + starts.tobytes() + borders.tobytes())
    with pytest.raises(TokenFileError, match="increase"):
        TokenReader(tmp_path / "a").document_ends()


# Damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["datatrove", "megatron", "llmc"])
def test_every_file_that_is_cut_or_extended_is_refused_when_opened(tmp_path, kind):
    path = write(kind, tmp_path / NAMES[kind])
    for file in sorted(tmp_path.iterdir()):
        if file.suffix == ".metadata":
            continue  # what it says for people may be longer
        whole = file.read_bytes()
        for size in sorted({*range(0, len(whole), 1 + len(whole) // 60), *range(len(whole) - 40, len(whole) + 9)}):
            if 0 <= size != len(whole):
                file.write_bytes(whole[:size].ljust(size, b"\1"))
                with pytest.raises(TokenFileError):
                    TokenReader(path)
        file.write_bytes(whole)
    assert tokens_of(TokenReader(path)) == flat(DOCUMENTS)


@pytest.mark.parametrize("kind", ["datatrove", "megatron", "llmc"])
def test_random_damage_is_our_own_error_or_is_read_without_a_crash(tmp_path, kind):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    path = write(kind, tmp_path / NAMES[kind])
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
    refused = 0
    for _ in range(300):
        file = rng.choice([file for file in whole if file != path or kind == "llmc"])
        data = bytearray(whole[file])
        for _ in range(rng.choice([1, 1, 1, 3, 12])):
            data[rng.randrange(min(len(data), 200))] = rng.choice([0, 0xFF, 0x80, rng.randrange(256)])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
        try:
            reader = TokenReader(path, vocab_size=1000)
            assert len(reader) == 10, "every kind's header says how many tokens there are"
            graph = reader.slice_sequences(4).batch_samples(1).collate_causal_lm(position_ids=True)
            graph.fetch(np.arange(2))
            reader.document_ends()
        except TokenpipeError:
            refused += 1
        file.write_bytes(whole[file])
    assert refused > 50
    assert tokens_of(TokenReader(path)) == flat(DOCUMENTS)


@pytest.mark.parametrize(
    "metadata",
    [b"", b"gpt2", b"gpt2|3\n10", b"gpt2|two\n10", b"\xff\xfe|2\n10", b"a|2\nten", b"a|2\n11", b"a|4\n10", b"x" * 5000],
)
def test_metadata_that_is_none_is_refused(tmp_path, metadata):
    path = write("datatrove", tmp_path / "a.ds")
    Path(f"{path}.metadata").write_bytes(metadata)
    with pytest.raises(TokenFileError, match=r"a\.ds\.metadata"):
        TokenReader(path)


@pytest.mark.parametrize("kind", ["datatrove", "megatron"])
@pytest.mark.parametrize("more", [-8, 8])
def test_an_index_that_is_cut_or_grows_after_the_graph_was_built_is_an_error(tmp_path, kind, more):
    path = write(kind, tmp_path / NAMES[kind])
    reader = TokenReader(path)
    index = Path(reader.files[0].ends_path)
    whole = index.read_bytes()
    index.write_bytes((whole + bytes(8))[: len(whole) + more])
    with pytest.raises(TokenFileError, match="after the graph was built"):
        reader.document_ends()


def test_inspect_shows_what_each_kind_is_and_knows(tmp_path, capsys):
    for kind, lines in (
        ("datatrove", ["kind +datatrove, with .*a.ds.index", "documents +4, 2.5", "tokenizer +Unknown Tokenizer"]),
        ("megatron", ["kind +megatron, with .*a.idx", "10 uint16, from byte 0", "documents +4, 2.5"]),
        ("llmc", ["kind +llm.c", "10 uint16, from byte 1024", "documents +ends not stored"]),
    ):
        (tmp_path / kind).mkdir()
        path = write(kind, tmp_path / kind / NAMES[kind])
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        for line in lines:
            assert re.search(line, text), (line, text)
    assert main(["inspect", str(tmp_path / "**" / "a.*")]) == 1
    assert "names 3 token files" in capsys.readouterr().err


# Writers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
def test_a_writer_that_fails_leaves_the_files_as_they_were(tmp_path, kind):
    path = write(kind, tmp_path / NAMES[kind])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TokenIdError), WRITERS[kind](path, vocab_size=1000) as writer:
        writer.write([5, 6, 7])
        writer.write([1000])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["datatrove", "megatron"])
@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_no_file_of_one_version_stands_beside_anothers(tmp_path, kind, renamed, monkeypatch):
    """A writer that ends between its renames leaves what nobody reads without being told how."""
    path = write(kind, tmp_path / NAMES[kind], [[1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    replace, calls = Path.replace, []

    def stop(self: Path, to: Path) -> Path:
        if len(calls) == renamed:
            raise KeyboardInterrupt
        calls.append(to.name)
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", stop)
    if renamed == 2 and kind == "megatron":
        write(kind, path)
        assert calls == ["a.bin", "a.idx"]
        return
    with pytest.raises(KeyboardInterrupt):
        write(kind, path)
    assert calls == (["a.ds", "a.ds.index"] if kind == "datatrove" else ["a.bin"])[:renamed]
    with pytest.raises(ConfigurationError, match="dtype"):
        TokenReader(path)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_file_of_llmc_counts_no_more_than_its_header_can(tmp_path, monkeypatch):
    monkeypatch.setattr(LlmcWriter, "most_tokens", 12)
    with pytest.raises(ConfigurationError, match="12 tokens"):
        write("llmc", tmp_path / "a.bin", [[1] * 10, [2] * 3])


# Folders and patterns -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """corpus/: tokens 0 … 4 in files of five kinds, with all that may lie beside them."""
    path = tmp_path / "corpus"
    path.mkdir()
    with TokenFileWriter(path / "0.tok", vocab_size=10) as writer:
        writer.write([0], loss=[True])
    np.save(path / "0.tok.quality.npy", np.zeros(1))
    write("datatrove", path / "1.ds", [[1]])
    (path / "total.ds.metadata").write_text("gpt2|2\n5\n5")
    write("megatron", path / "2", [[2]])
    np.save(path / "3.npy", np.array([3], np.uint16))
    write("llmc", path / "4.bin", [[4]])
    (path / ".hidden").touch()
    return path


def test_a_folder_is_all_its_token_files_by_name(folder):
    for path in (folder, f"{folder}/"):
        reader = TokenReader(path)
        assert tokens_of(reader) == [0, 1, 2, 3, 4]
        assert reader.name == "corpus"
        assert [Path(file.path).name for file in reader.files] == ["0.tok", "1.ds", "2.bin", "3.npy", "4.bin"]
    assert reader.content == TokenReader([file.path for file in reader.files]).content


def test_patterns_are_what_they_fit_by_name_and_lists_may_hold_all(folder, monkeypatch):
    assert tokens_of(TokenReader(f"{folder}/*")) == [0, 1, 2, 3, 4]
    assert tokens_of(TokenReader(folder / "*.bin", name="bins")) == [2, 4]
    assert tokens_of(TokenReader(folder / "*.i*x")) == [2], "by its index too"
    assert tokens_of(TokenReader(f"{folder.parent}/**/[13].*")) == [1, 3]
    assert tokens_of(TokenReader([folder / "*.npy", folder, folder / "2"])) == [3, 0, 1, 2, 3, 4, 2]
    monkeypatch.chdir(folder)
    assert tokens_of(TokenReader("?.npy")) == [3]


def test_a_name_that_looks_like_a_pattern_is_a_name_where_there_is_such_a_file(tmp_path):
    np.save(tmp_path / "a[1].npy", np.array([7]))
    np.save(tmp_path / "a1.npy", np.array([8]))
    assert tokens_of(TokenReader(tmp_path / "a[1].npy")) == [7]


def test_no_file_is_an_error_that_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenFileError, match=r"data/\*\.bin.*" + str(tmp_path)):
        TokenReader("data/*.bin")
    (tmp_path / "data").mkdir()
    with pytest.raises(TokenFileError, match="data"):
        TokenReader("data")


@pytest.mark.parametrize("wrong", ["", "\0*", "x" * 253 + ".ds", "x" * 300 + "*"])
def test_what_is_no_path_is_said_as_of_a_single_file(wrong):
    with pytest.raises(TokenFileError):
        TokenReader(wrong, dtype="uint16", name="wrong")


def test_a_file_url_may_be_a_pattern_or_a_folder(folder):
    assert tokens_of(TokenReader(f"file://{folder}/*.npy")) == [3]
    assert tokens_of(TokenReader(f"file://{folder}")) == [0, 1, 2, 3, 4]
    assert tokens_of(TokenReader(f"file://{folder}/2")) == [2]


@pytest.mark.parametrize("odd", ["README.md", "more/", "stray.loss"])
def test_a_folder_that_holds_something_else_is_refused_by_its_name(folder, odd):
    (folder / odd).mkdir() if odd.endswith("/") else (folder / odd).touch()
    with pytest.raises(TokenFileError, match=odd.strip("/")):
        TokenReader(folder)


def test_the_files_of_a_folder_are_those_that_were_there_when_the_graph_was_built(folder):
    reader = TokenReader(folder)
    fingerprint = reader.slice_sequences(1).fingerprint()
    np.save(folder / "9.npy", np.array([9], np.uint16))
    assert tokens_of(reader) == [0, 1, 2, 3, 4]
    assert reader.slice_sequences(1).fingerprint() == fingerprint
    assert len(TokenReader(folder)) == 6


def test_a_recipe_says_the_pattern_as_it_was_given(folder):
    graph = TokenReader(f"{folder}/*.bin").slice_sequences(1).permute(seed=3)
    text = write_recipe(graph, folder)
    assert "'*.bin'" in text or "*.bin" in text
    assert load_recipe(text, folder=folder).fingerprint() == graph.fingerprint()


# The tools themselves -----------------------------------------------------------------------------------------------


def needs(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{module} is not installed; pip install 'tokenpipe[test]' brings it on Linux")


def test_datatroves_files_are_read_and_datatrove_reads_ours(tmp_path):
    needs("datatrove")
    from datatrove.io import get_datafolder
    from datatrove.pipeline.tokens.merger import load_doc_ends
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFileDataset, DatatroveFolderDataset

    rng = np.random.default_rng(11)
    for size, top in ((2, 1 << 16), (4, 100_000)):
        folder = tmp_path / str(size)
        folder.mkdir()
        documents = [rng.integers(0, top, n) for n in rng.integers(1, 60, 50)]
        masks = [rng.integers(0, 2, document.size).astype(bool) for document in documents]
        theirs = TokenizedFile(
            get_datafolder(str(folder)), "theirs.ds", save_loss_metadata=True, save_final_metadata=True,
            tokenizer_name_or_path="org/name|odd", token_size=size,
        )  # fmt: skip
        for document, mask in zip(documents, masks, strict=True):
            theirs.write(document.tolist(), mask)
        theirs.close()
        with DatatroveWriter(folder / "ours.ds", vocab_size=top, tokenizer="org/name|odd") as writer:
            for document, mask in zip(documents, masks, strict=True):
                writer.write(document, loss=mask)
        for suffix in ("", ".index", ".loss", ".metadata"):
            assert (folder / f"ours.ds{suffix}").read_bytes() == (folder / f"theirs.ds{suffix}").read_bytes(), suffix
        reader = TokenReader(folder / "theirs.ds")
        assert tokens_of(reader) == np.concatenate(documents).tolist()
        assert reader.document_ends().tolist() == np.cumsum([document.size for document in documents]).tolist()
        with (folder / "ours.ds.index").open("rb") as file:
            assert load_doc_ends(file).tolist() == reader.document_ends().tolist()
        data = DatatroveFileDataset(str(folder / "ours.ds"), 16, token_size=size, return_positions=True)
        rows = reader.fetch(np.arange(len(data) * 17)).reshape(-1, 17)
        for k in range(len(data)):
            assert data[k]["input_ids"].tolist() == rows[k].tolist()
        found = DatatroveFolderDataset(str(folder), 16, token_size=size)
        assert len(found) == 2 * len(data)
        assert len(TokenReader(folder)) == 2 * len(reader)


MEGATRON = """
import sys, warnings
warnings.simplefilter("ignore")
import json, numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
folder = sys.argv[1]
for name in ("uint16", "int32", "int64", "uint8"):
    rng = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(f"{folder}/theirs-{name}.bin", dtype=getattr(np, name))
    for n in range(1, 40):
        document = rng.integers(0, 200, n)
        builder.add_document(torch.from_numpy(document), [n - n // 2, n // 2] if n % 3 == 0 else [n])
    builder.finalize(f"{folder}/theirs-{name}.idx")
builder = IndexedDatasetBuilder(f"{folder}/golden.bin", dtype=np.uint16)
builder.add_document(torch.tensor([1, 2, 3]), [3])
builder.add_document(torch.tensor([40, 5, 600]), [2, 1])
builder.finalize(f"{folder}/golden.idx")
builder = IndexedDatasetBuilder(f"{folder}/modes.bin", dtype=np.uint16, multimodal=True)
builder.add_document(torch.tensor([1, 2, 3]), [1, 2], [0, 1])
builder.finalize(f"{folder}/modes.idx")
found = {}
for name in ("ours-16", "ours-32"):
    data = IndexedDataset(f"{folder}/{name}")
    found[name] = [[row.tolist() for row in data[0 : len(data)]], data.document_indices.tolist(), str(data.index.dtype)]
json.dump(found, open(f"{folder}/found.json", "w"))
"""

GOLDEN_BIN = "010002000300280005005802"  # by IndexedDatasetBuilder of megatron-core 0.16.1, as above
GOLDEN_IDX = (
    "4d4d494449445800000100000000000000080300000000000000030000000000000003000000020000000100000000000000"
    "0000000006000000000000000a00000000000000000000000000000001000000000000000300000000000000"
)


def test_megatrons_pairs_are_read_and_megatron_reads_ours(tmp_path):
    needs("megatron.core")
    write("megatron", tmp_path / "ours-16")
    write("megatron", tmp_path / "ours-32", [[1, 2], [99_999]], vocab_size=100_000)
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ours-16"][:2] == [DOCUMENTS, [0, 1, 2, 3, 4]]
    assert found["ours-32"][:2] == [[[1, 2], [99_999]], [0, 1, 2]]
    assert ["uint16" in found["ours-16"][2], "int32" in found["ours-32"][2]] == [True, True]
    for name in ("uint16", "int32", "int64", "uint8"):
        rng = np.random.default_rng(3)
        documents = [rng.integers(0, 200, n).tolist() for n in range(1, 40)]
        reader = TokenReader(tmp_path / f"theirs-{name}")
        assert reader.files[0].dtype.name == name
        assert tokens_of(reader) == flat(documents)
        assert reader.document_ends().tolist() == np.cumsum([len(document) for document in documents]).tolist()
    with pytest.raises(TokenFileError, match="multimodal"):
        TokenReader(tmp_path / "modes")
    assert (tmp_path / "golden.bin").read_bytes().hex() == GOLDEN_BIN
    assert (tmp_path / "golden.idx").read_bytes().hex() == GOLDEN_IDX


def test_a_pair_that_megatron_wrote_is_read_where_megatron_is_not_installed(tmp_path):
    (tmp_path / "golden.bin").write_bytes(bytes.fromhex(GOLDEN_BIN))
    (tmp_path / "golden.idx").write_bytes(bytes.fromhex(GOLDEN_IDX))
    reader = TokenReader(tmp_path / "golden")
    assert tokens_of(reader) == [1, 2, 3, 40, 5, 600]
    assert reader.document_ends().tolist() == [3, 6]
