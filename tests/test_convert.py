"""`tokenpipe convert` and `tokenpipe verify`: nothing is lost between the kinds, and the first bad byte is named."""

import os
import re
import signal
import struct
import subprocess
import sys
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
    convert,
    convert_token_files,
    document_ends,
    verify,
    verify_token_file,
)
from tokenpipe.datapipes.errors import ConfigurationError, TokenFileError, TokenIdError
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path
from tokenpipe.datapipes.formats.own import read_header

PROGRAM = [sys.executable, "-c", "import sys; from tokenpipe.cli.main import main; sys.exit(main())"]
WRITERS = {"own": TokenFileWriter, "datatrove": DatatroveWriter, "megatron": MegatronWriter, "llmc": LlmcWriter}
NAMES = {"own": "a.tok", "datatrove": "a.ds", "megatron": "a.bin", "llmc": "a.bin"}
READ = [*WRITERS, "npy", "raw"]
DOCUMENTS = [[1, 2, 0], [40, 0], [600, 5, 6, 0], [7, 8, 9, 10]]
"""0 closes documents; the last one is not closed."""


def write(kind: str, folder: Path, documents: "list[list[int]]" = DOCUMENTS, masked: bool = False) -> Path:
    """A file of the kind, in which even ids are no labels where `masked`."""
    folder.mkdir(exist_ok=True)
    path = folder / NAMES.get(kind, "a.npy")
    tokens = flat(documents)
    if kind in WRITERS:
        with WRITERS[kind](path, vocab_size=1000) as writer:
            for document in documents:
                writer.write(document, [token % 2 == 1 for token in document] if masked else None)
        return path
    if kind == "npy":
        np.save(path, np.array(tokens, np.uint16))
    else:
        path = folder / "raw.bin"
        np.array(tokens, np.uint16).tofile(path)
    if masked:
        Path(f"{path}.loss").write_bytes(bytes(token % 2 for token in tokens))
    return path


def flat(documents: "list[list[int]]") -> list[int]:
    return [token for document in documents for token in document]


def tokens_of(path: Path) -> list[int]:
    reader = TokenReader(path)
    return reader.fetch(np.arange(len(reader))).tolist()


def ends_of(documents: "list[list[int]]") -> list[int]:
    return np.cumsum([len(document) for document in documents if document]).tolist()


def said(capsys, *arguments: object) -> "tuple[int, list[str], list[str]]":
    """(exit status, lines of stdout, lines of stderr)"""
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


# Convert -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("kind", READ)
def test_tokens_ends_and_masks_of_every_kind_come_through_every_kind(tmp_path, kind, to):
    path = write(kind, tmp_path / "in", masked=True)
    output = tmp_path / NAMES[to]
    made = convert_token_files(path, output, to=to, dtype="uint16" if kind == "raw" else None, end_of_text=0)
    assert (made.kind, made.tokens, made.documents, made.dtype) == (to, 13, 4, "uint16")
    assert tokens_of(output) == flat(DOCUMENTS)
    assert Path(f"{output}.loss").read_bytes() == bytes(token % 2 for token in flat(DOCUMENTS))
    assert TokenReader(output, end_of_text=0).document_ends().tolist() == ends_of(DOCUMENTS)
    assert bool(TokenReader(output).files[0].stored_documents) == (to != "llmc")
    back = tmp_path / "back.tok"
    convert_token_files(output, back, end_of_text=0)
    assert tokens_of(back) == flat(DOCUMENTS) and TokenReader(back).document_ends().tolist() == ends_of(DOCUMENTS)
    assert Path(f"{back}.loss").read_bytes() == Path(f"{output}.loss").read_bytes()


@settings(max_examples=30, deadline=None)
@given(
    files=st.lists(
        st.tuples(
            st.sampled_from(["own", "datatrove", "megatron"]),
            st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=7), min_size=1, max_size=6),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    to=st.sampled_from(["own", "datatrove", "megatron"]),
    block=st.integers(1, 9),
)
def test_files_of_any_kinds_lie_end_to_end_whatever_the_blocks_are(tmp_path_factory, files, to, block):
    folder = tmp_path_factory.mktemp("c")
    paths = [write(kind, folder / str(f), documents, masked) for f, (kind, documents, masked) in enumerate(files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "BLOCK", block)
        convert_token_files(paths, folder / NAMES[to], to=to)
    documents = [document for _, some, _ in files for document in some]
    assert tokens_of(folder / NAMES[to]) == flat(documents)
    assert TokenReader(folder / NAMES[to]).document_ends().tolist() == ends_of(documents)
    mask = folder / f"{NAMES[to]}.loss"
    assert mask.exists() == any(masked for _, _, masked in files)
    labels = [token % 2 if masked else 1 for _, some, masked in files for token in flat(some)]
    assert not mask.exists() or list(mask.read_bytes()) == labels


def test_the_bytes_are_those_of_the_writer_itself(tmp_path):
    path = write("own", tmp_path / "in")
    for kind in WRITERS:
        expected = write(kind, tmp_path / f"expected-{kind}")
        (tmp_path / kind).mkdir()
        convert_token_files(path, tmp_path / kind / NAMES[kind], to=kind)
        for file in expected.parent.iterdir():
            assert (tmp_path / kind / file.name).read_bytes() == file.read_bytes(), file


def test_headers_and_ids_are_kept_where_both_kinds_hold_them(tmp_path):
    source = tmp_path / "a.tok"
    with TokenFileWriter(source, 1000, tokenizer="bpe", tokenizer_hash=b"hash", end_of_text=0) as writer:
        for document in DOCUMENTS:
            writer.write(document)
    with DocumentIdsWriter(ids_path(source)) as names:
        names.bind(source)
        names.write_ids(["a", "bc", "d", "e"])
    assert not convert_token_files(source, tmp_path / "b.tok").notes
    for suffix in ("", ".ids"):
        assert (tmp_path / f"b.tok{suffix}").read_bytes() == Path(f"{source}{suffix}").read_bytes()
    notes = convert_token_files(source, tmp_path / "c.ds").notes
    assert [note.split(" is ")[0] for note in notes] == ["the tokenizer's hash", "that id 0"]
    assert [TokenReader(tmp_path / "c.ds").document_id(k) for k in range(4)] == ["a", "bc", "d", "e"]
    assert not convert_token_files(tmp_path / "c.ds", tmp_path / "d.tok", vocab_size=1000).notes
    kept = read_header(tmp_path / "d.tok")
    assert (kept.tokenizer, kept.end_of_text) == ("bpe", None)
    assert TokenReader(tmp_path / "d.tok").files[0].vocab_size == 1000
    assert TokenReader(tmp_path / "d.tok").find_documents("bc") == [1]


def test_empty_documents_are_left_out_with_their_ids(tmp_path):
    np.array([5, 6, 7], "<u2").tofile(tmp_path / "a.ds")
    np.array([0, 2, 2, 3], "<u8").tofile(tmp_path / "a.ds.index")
    with DocumentIdsWriter(tmp_path / "a.ds.ids") as names:
        names.write_ids(["none", "first", "nothing", "last"])
    made = convert_token_files(tmp_path / "a.ds", tmp_path / "b.tok", dtype="uint16")
    assert (made.documents, made.empty_documents) == (2, 2) and "2 empty ones left out" in str(made)
    reader = TokenReader(tmp_path / "b.tok")
    assert reader.document_ends().tolist() == [2, 3]
    assert [reader.document_id(k) for k in range(2)] == ["first", "last"]


@pytest.mark.parametrize(
    ("stored", "to", "expected"),
    [
        ("uint8", "own", "uint8"),
        ("uint8", "llmc", "uint16"),
        ("int32", "megatron", "int32"),
        ("int32", "datatrove", "uint32"),
        ("uint32", "megatron", "int64"),
        ("int64", "own", "int64"),
        ("int64", "datatrove", "uint32"),
    ],
)
def test_a_dtype_is_chosen_that_the_kind_has_and_that_holds_the_ids(tmp_path, stored, to, expected):
    np.save(tmp_path / "in.npy", np.array([1, 100, 7], stored))
    assert convert_token_files(tmp_path / "in.npy", tmp_path / NAMES[to], to=to).dtype == expected
    assert tokens_of(tmp_path / NAMES[to]) == [1, 100, 7]
    asked = convert_token_files(tmp_path / "in.npy", tmp_path / NAMES[to], to=to, output_dtype="uint16")
    assert asked.dtype == "uint16"


def test_what_is_not_kept_is_said_a_line_each(tmp_path, capsys):
    source = write("own", tmp_path / "in")
    np.save(tmp_path / "in" / "a.tok.quality.npy", np.ones(4))
    status, out, err = said(capsys, "convert", source, "--output", tmp_path / "a.bin", "--to", "llmc")
    assert status == 0 and len(out) == 1 and re.search(r"4 documents, 13 uint16 tokens of 1 file", out[0])
    assert [line.split(":")[1] for line in err] == [
        " document ends are not kept",
        " scores beside the inputs are not kept",
    ]
    np.save(tmp_path / "b.npy", np.array([5, 0, 6], np.uint16))
    status, _, err = said(capsys, "convert", source, tmp_path / "b.npy", "--output", tmp_path / "b.tok")
    assert status == 0 and TokenReader(tmp_path / "b.tok").document_ends().tolist() == [*ends_of(DOCUMENTS), 16]
    assert any(
        "1 of 2 file(s) store no document ends and became one document each; --end-of-text" in line for line in err
    )
    status, _, err = said(
        capsys, "convert", source, tmp_path / "b.npy", "--output", tmp_path / "b.tok", "--end-of-text", 0, "--progress"
    )
    assert status == 0 and TokenReader(tmp_path / "b.tok").document_ends().tolist() == [*ends_of(DOCUMENTS), 15, 16]
    assert any("100%" in line for line in err)


def test_an_output_that_cannot_be_is_refused_and_nothing_is_there(tmp_path, capsys):
    source = write("megatron", tmp_path / "in")
    before = sorted(path.read_bytes() for path in source.parent.iterdir())
    for output, to, why in (
        (tmp_path / "a.out", None, "does not say which kind"),
        (tmp_path / "a.ds", "own", "kind datatrove"),
        (tmp_path / "a.tok", "npy", "no kind that can be written"),
        (source, "megatron", "one of the inputs"),
        (source.with_suffix(""), "megatron", "one of the inputs"),
        (source, "llmc", "read as Megatron's"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            convert_token_files(source, output, to=to)
    with pytest.raises(TokenIdError, match="600"):
        convert_token_files(source, tmp_path / "a.tok", vocab_size=600)
    status, out, err = said(capsys, "convert", source, "--output", tmp_path / "a.tok", "--vocab-size", 600)
    assert status == 1 and not out and len(err) == 1 and err[0].startswith("tokenpipe convert: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert sorted(path.read_bytes() for path in source.parent.iterdir()) == before


def test_a_document_longer_than_a_block_is_written_part_by_part(tmp_path, monkeypatch):
    from tokenpipe.datapipes.formats import writer

    monkeypatch.setattr(writer, "_BLOCK", 16)
    monkeypatch.setattr(convert, "BLOCK", 8)
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.npy.loss").write_bytes(bytes(k * k % 7 > 1 for k in range(1000)))
    made = convert_token_files(tmp_path / "a.npy", tmp_path / "a.tok")
    assert made.documents == 1 and tokens_of(tmp_path / "a.tok") == tokens.tolist()
    assert (tmp_path / "a.tok.loss").read_bytes() == (tmp_path / "a.npy.loss").read_bytes()
    verify_token_file(tmp_path / "a.tok")


def test_killed_in_the_middle_nothing_has_the_name_and_a_second_run_gives_the_same_bytes(tmp_path):
    tokens = np.arange(12_000_000, dtype=np.uint16)
    np.save(tmp_path / "in.npy", tokens)
    arguments = ["convert", str(tmp_path / "in.npy"), "--end-of-text", "9"]
    output = tmp_path / "a.tok"
    environment = {**os.environ, "TOKENPIPE_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen([*PROGRAM, *arguments, "--output", str(output)], env=environment) as process:
        while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(".a.tok.*")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not output.exists()
    assert main([*arguments, "--output", str(output)]) == 0
    assert main([*arguments, "--output", str(tmp_path / "b.tok")]) == 0
    assert output.read_bytes() == (tmp_path / "b.tok").read_bytes()
    assert TokenReader(output).document_ends()[:2].tolist() == [10, 65546]


# Verify --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("block", [2, 1 << 20])
def test_a_bad_id_in_any_kind_is_named_by_document_token_and_byte(tmp_path, capsys, monkeypatch, kind, block):
    monkeypatch.setattr(verify, "BLOCK", block)
    monkeypatch.setattr(document_ends, "CHUNK", block)
    path = write(kind, tmp_path)
    raw = ["--dtype", "uint16"] if kind == "raw" else []
    documents = "4 documents, " if kind in ("own", "datatrove", "megatron") else ""
    status, out, err = said(capsys, "verify", path, "--vocab-size", 1000, *raw)
    assert (status, out, err) == (0, [f"{path}: ok, {documents}13 tokens"], [])
    data = bytearray(path.read_bytes())
    byte = data.find(np.array(DOCUMENTS[2], "<u2").tobytes()) + 2
    data[byte : byte + 2] = (60_000).to_bytes(2, "little")
    path.write_bytes(data)
    status, out, err = said(capsys, "verify", path, "--vocab-size", 1000, *raw)
    assert status == 1 and len(out) == 1 and not err
    assert f"token 6 of the file, at byte {byte}: id 60000 is not in 0 …" in out[0]
    assert ("token 1 of document 2," in out[0]) == bool(documents)
    assert out[0].startswith(f"{path}: ")


def test_negative_ids_are_named_with_or_without_a_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([5, -3, 7], np.int32))
    for vocab_size in (None, 100):
        with pytest.raises(TokenIdError, match=r"token 1 of the file, at byte 132: id -3 is not in 0 … "):
            verify_token_file(tmp_path / "a.npy", vocab_size=vocab_size)


def test_every_flipped_bit_of_what_is_stored_is_seen_in_our_own_kind(tmp_path):
    path = write("own", tmp_path)
    data = path.read_bytes()
    for byte in range(len(data)):
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 1 << byte % 8]) + data[byte + 1 :])
        with pytest.raises(TokenFileError, match=re.escape(str(path))):
            verify_token_file(path)


def test_damaged_ends_and_sidecars_are_named_with_their_place(tmp_path):
    own = write("own", tmp_path / "own", masked=True)
    np.save(f"{own}.quality.npy", np.ones(4))
    assert str(verify_token_file(own)) == "ok, 4 documents, 13 tokens, with a.tok.loss, with a.tok.quality.npy"
    np.save(f"{own}.quality.npy", np.ones(3))
    with pytest.raises(TokenFileError, match=r"a\.tok\.quality\.npy: holds float64 \(3,\)"):
        verify_token_file(own)
    mask = bytearray(Path(f"{own}.loss").read_bytes())
    mask[7] = 2
    Path(f"{own}.loss").write_bytes(mask)
    with pytest.raises(TokenFileError, match=r"a\.tok\.loss: byte 7 is damaged"):
        verify_token_file(own)
    Path(f"{own}.loss").write_bytes(mask[:-1])
    with pytest.raises(TokenFileError, match=r"12 bytes of loss mask for the 13 tokens"):
        verify_token_file(own)
    trove = write("datatrove", tmp_path / "trove")
    np.array([3, 9, 5, 13], "<u8").tofile(f"{trove}.index")
    with pytest.raises(TokenFileError, match=r"ends are damaged near document 2: they must increase"):
        verify_token_file(trove)
    pair = write("megatron", tmp_path / "pair")
    index = bytearray(pair.with_suffix(".idx").read_bytes())
    index[34 + 4 * 2] ^= 1
    pair.with_suffix(".idx").write_bytes(index)
    with pytest.raises(TokenFileError, match=r"sequence 2 has 5 tokens"):
        verify_token_file(pair)


@pytest.mark.parametrize("documents", [200_000, 0])
@pytest.mark.parametrize("place", [34 + 4 * 8000, 34 + 4 * 200_000 + 8 * 199_000])
def test_all_of_megatrons_index_is_verified_however_long_it_is(tmp_path, place, documents):
    """When it is opened a long one is looked at in stretches, and these places are between them."""
    count = 200_000
    np.arange(count, dtype="<u2").tofile(tmp_path / "a.bin")
    index = bytearray(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, documents + 1))
    index += np.ones(count, "<i4").tobytes() + np.arange(0, 2 * count, 2, "<i8").tobytes()
    index += np.arange(documents + 1, dtype="<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(index)
    assert verify_token_file(tmp_path / "a.bin").documents == documents
    index[place] ^= 2
    (tmp_path / "a.idx").write_bytes(index)
    if place < 34 + 4 * count:
        TokenReader(tmp_path / "a.bin")
    with pytest.raises(TokenFileError, match=r"a\.idx: its sequences do not lie end to end"):
        verify_token_file(tmp_path / "a.bin")


def test_ids_of_another_file_or_damaged_are_seen(tmp_path):
    path = write("own", tmp_path)
    with DocumentIdsWriter(ids_path(path)) as names:
        names.bind(path)
        names.write_ids(["a", "bc", "d", "e"])
    assert verify_token_file(path).beside == ("a.tok.ids",)
    data = bytearray(ids_path(path).read_bytes())
    data[257] ^= 1
    ids_path(path).write_bytes(data)
    with pytest.raises(TokenFileError, match=r"a\.tok\.ids: its contents are damaged"):
        verify_token_file(path)


def test_it_goes_on_after_a_bad_file_and_says_a_line_for_each(tmp_path, capsys):
    good = [write(kind, tmp_path / kind) for kind in ("own", "datatrove", "megatron")]
    bad = tmp_path / "bad.tok"
    bad.write_bytes(good[0].read_bytes()[:-1])
    missing = tmp_path / "none.tok"
    status, out, _ = said(
        capsys, "verify", bad, tmp_path / "own", missing, tmp_path / "*" / "a.[db]*", "--vocab-size", 700
    )
    assert status == 1 and len(out) == 5
    assert out[0].startswith(f"{bad}: ") and "was cut" in out[0]
    assert out[1] == f"{good[0]}: ok, 4 documents, 13 tokens"
    assert out[2].startswith(f"{missing}: ")
    assert sorted(out[3:]) == sorted(f"{path}: ok, 4 documents, 13 tokens" for path in good[1:])
    assert said(capsys, "verify", *good)[0] == 0
    raw = write("raw", tmp_path / "raw")
    status, out, _ = said(capsys, "verify", *good, raw, "--dtype", "uint32")  # of the raw one alone; the others say it
    assert status == 1 and "no whole number of uint32 tokens" in out[3]
    assert [line.split(": ")[1][:2] for line in out[:3]] == ["ok"] * 3
    assert said(capsys, "verify", *good, "--dtype", "float32")[:2] == (1, [])
    assert said(capsys, "verify", *good, "--vocab-size", 0)[:2] == (1, [])
    assert said(capsys, "verify", tmp_path / "*.nothing")[0] == 1


def test_inspect_verifies_every_kind_the_same_way(tmp_path, capsys):
    path = write("datatrove", tmp_path)
    status, out, _ = said(capsys, "inspect", path, "--verify")
    assert status == 0 and out[-1].startswith("verified: ok, 4 documents, 13 tokens; this kind of file has no hash")
    np.array([3, 9, 5, 13], "<u8").tofile(f"{path}.index")
    assert said(capsys, "inspect", path, "--verify", "--samples", 0)[0] == 1


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_help_says_what_the_command_is_for_and_wrong_usage_is_status_2(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and f"tokenpipe {command} " in out and "--vocab-size N" in out
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 2
