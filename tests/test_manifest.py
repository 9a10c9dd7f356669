"""Manifests: what they say is what the files say, nothing is opened for it, and no damaged one is believed."""

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_distributed

from processes import SOAK, scaled
from tokenpipe.cli.main import main
from tokenpipe.datapipes import (
    DatatroveWriter,
    Manifest,
    MegatronWriter,
    TokenFileWriter,
    TokenReader,
    load_recipe,
    make_manifest,
    manifest,
    read_manifest,
    read_tokens,
)
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, TokenFileError
from tokenpipe.datapipes.file_sums import sum_file
from tokenpipe.datapipes.manifest import write_manifest
from tokenpipe.reading_services import DataLoader2

HEADER = struct.Struct("<8sIIQIIQ")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a file of each kind; the raw one has no document ends."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(7)
    print("seed 7")
    with TokenFileWriter(folder / "own.tok", vocab_size=300, end_of_text=0) as writer:
        for _ in range(30):
            tokens = rng.integers(0, 300, 5000)
            writer.write(tokens, tokens % 2 > 0)
    with DatatroveWriter(folder / "trove.ds", vocab_size=300) as writer:
        for length in (10, 20, 3000):
            writer.write(rng.integers(0, 300, length))
    with MegatronWriter(folder / "mega.bin", vocab_size=300) as writer:
        for length in (100, 1, 2000):
            writer.write(rng.integers(0, 300, length))
    np.save(folder / "plain.npy", rng.integers(0, 300, 150_000).astype(np.uint16))
    rng.integers(0, 300, 5000).astype("<u2").tofile(folder / "raw.bin")
    return folder


@pytest.fixture
def made(corpus: Path) -> Manifest:
    return make_manifest(corpus, corpus / "all.manifest", dtype="uint16", end_of_text=0)


def direct(corpus: Path) -> TokenReader:
    return TokenReader(corpus, dtype="uint16", end_of_text=0, name="all")


def opened_while(do: Any, folder: Path) -> "list[str]":
    """The files of the folder that are opened or stat-ed meanwhile, in a process of its own: `do` is its text."""
    script = f"""
import os, sys, json
from pathlib import Path
from tokenpipe.datapipes import *
from tokenpipe.datapipes import filemap
folder = {str(folder)!r}
looked = []
def note(event, given):
    if event in ("open", "os.scandir", "os.listdir") and str(given[0]).startswith(folder):
        looked.append(str(given[0]))
sys.addaudithook(note)
for name in ("stat", "lstat"):
    def noting(path, *more, real=getattr(os, name), **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(folder):
            looked.append("stat " + os.fspath(path))
        return real(path, *more, **options)
    setattr(os, name, noting)
{do}
print(json.dumps(looked))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# What it says -------------------------------------------------------------------------------------------------


def test_a_manifest_says_what_opening_and_reading_the_files_says(corpus, made):
    by_files, by_manifest = direct(corpus), TokenReader(made)
    assert by_manifest.content == by_files.content
    assert by_manifest.name == by_files.name == "all"
    assert by_manifest.document_ends().tolist() == by_files.document_ends().tolist()
    assert [file.documents for file in by_manifest.files] == [file.documents for file in by_files.files]
    assert by_manifest.first_tokens.tolist() == by_files.first_tokens.tolist()
    numbers = np.arange(0, len(by_files), 997)
    assert by_manifest.fetch(numbers).tolist() == by_files.fetch(numbers).tolist()
    for with_it, without in zip(by_manifest.files, by_files.files, strict=True):
        assert with_it.path == without.path
        assert (with_it.dtype, with_it.offset, with_it.tokens, with_it.size, with_it.kind) == (
            without.dtype, without.offset, without.tokens, without.size, without.kind,
        )  # fmt: skip
        assert with_it.digest == without.content
        assert with_it.ends_content == without.ends_content


def test_its_sums_are_those_of_every_64_kib_of_the_whole_file(made):
    for file, whole in zip(made.files, made.hashes, strict=True):
        data = Path(file.path).read_bytes()
        expected = [zlib.crc32(data[begin : begin + 65536]) for begin in range(0, len(data), 65536)]
        assert file.blocks is not None
        assert file.blocks.sums().tolist() == expected
        assert file.blocks.block == 65536
        assert whole == hashlib.blake2b(data, digest_size=32).hexdigest()
    assert [bool(one) for one in made.ends_hashes] == [bool(file.ends_path) for file in made.files]
    assert [bool(one) for one in made.loss_hashes] == [file.path.endswith(".tok") for file in made.files]


def test_documents_of_tokens_that_cross_blocks_are_counted_too(tmp_path):
    ids = np.array([5, 0, 7, 0, 9], "<u4")
    header = b"\x93NUMPY\x01\x00" + (61).to_bytes(2, "little")
    says = b"{'descr': '<u4', 'fortran_order': False, 'shape': (5,), }"
    (tmp_path / "odd.npy").write_bytes(header + says.ljust(60) + b"\n" + ids.tobytes())  # tokens from byte 71 on
    (file,) = make_manifest(tmp_path / "odd.npy", tmp_path / "x.manifest", end_of_text=0).files
    assert (file.offset, file.documents) == (71, 3)


def test_nothing_but_the_manifest_is_opened_or_looked_at_until_tokens_are_read(corpus, made):
    build = """
graph = TokenReader(folder + "/all.manifest").slice_sequences(64).permute(seed=7).batch_samples(2)
graph = graph.collate_causal_lm()
graph.fingerprint(), len(graph), str(graph.tree()), graph.recipe()
"""
    assert set(opened_while(build, corpus)) <= {f"{corpus}/all.manifest", f"stat {corpus}/all.manifest"}
    assert len(opened_while("TokenReader(folder, dtype='uint16').content", corpus)) > 10  # it would be seen


def test_graphs_are_the_same_with_and_without_a_manifest(corpus, made):
    def graph(reader):
        return reader.slice_sequences(64).permute(seed=7).batch_samples(4).collate_causal_lm(sample_numbers=True)

    one, other = graph(direct(corpus)), graph(TokenReader(made))
    assert one.fingerprint() == other.fingerprint()
    with DataLoader2(one) as first, DataLoader2(other) as second:
        for _, a, b in zip(range(50), first, second, strict=False):
            assert a["input_ids"].tolist() == b["input_ids"].tolist()
        second.load_state_dict(first.state_dict())  # the state of a run without one


def test_a_folder_with_its_manifest_may_be_moved(corpus, made, tmp_path):
    content = direct(corpus).content
    corpus.rename(tmp_path / "moved")
    moved = TokenReader(tmp_path / "moved" / "all.manifest")
    assert moved.content == content
    assert moved.fetch([len(moved) - 1]).size == 1
    assert all(file.path.startswith(str(tmp_path / "moved")) for file in moved.files)


def test_files_beside_the_folder_are_named_by_their_whole_path(corpus, tmp_path):
    (tmp_path / "lists").mkdir()
    apart = make_manifest(corpus / "own.tok", tmp_path / "lists" / "x.manifest")
    assert apart.files[0].path == str(corpus / "own.tok")
    (tmp_path / "lists").rename(tmp_path / "elsewhere")
    assert TokenReader(tmp_path / "elsewhere" / "x.manifest").fetch([0]).size == 1


def test_paths_may_hold_anything_that_files_can_be_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.npy", "ä\n'.npy", "x..y.npy", "[1].npy"):
        np.save(tmp_path / name, np.arange(9, dtype=np.uint16))
    assert TokenReader(make_manifest(".", "all.manifest")).content == TokenReader(".").content
    assert TokenReader("all.manifest").fetch([0, 35]).tolist() == [0, 8]


# Where it stands for its files ----------------------------------------------------------------------------------


def test_lists_mix_manifests_with_files(corpus, made, tmp_path):
    np.save(tmp_path / "more.npy", np.arange(100, dtype=np.uint16))
    mixed = TokenReader([made, tmp_path / "more.npy", corpus / "all.manifest"], name="mixed")
    assert len(mixed) == 2 * len(direct(corpus)) + 100
    assert mixed.fetch([len(direct(corpus)) + 7]).tolist() == [7]


def test_folders_and_patterns_leave_manifests_out_and_name_them_where_asked(corpus, made):
    assert TokenReader(corpus, dtype="uint16").content == TokenReader(made).content
    assert TokenReader(f"{corpus}/*.manifest").content == TokenReader(made).content
    assert len(TokenReader(f"{corpus}/o*").files) == 1


def test_recipes_and_read_tokens_take_a_manifest(corpus, made):
    graph = load_recipe(
        "tokenpipe: 1\ngraph:\n  - read: {paths: all.manifest}\n  - slice_sequences: {sequence_length: 8}",
        folder=corpus,
    )
    assert graph.children[0].content == TokenReader(made).content
    again = load_recipe(TokenReader(made).slice_sequences(8).recipe(), folder=corpus)
    assert again.fingerprint() == graph.fingerprint()
    assert read_tokens(made, 8, 7).fingerprint() == read_tokens(corpus / "all.manifest", 8, 7).fingerprint()


def test_what_is_said_again_must_agree(corpus, made):
    assert TokenReader(made, end_of_text=0).content == TokenReader(made).content
    with pytest.raises(ConfigurationError, match="end_of_text is 5"):
        TokenReader(made, end_of_text=5)
    with pytest.raises(ConfigurationError, match=r"dtype='uint32' was given, but the manifest .*all\.manifest says"):
        TokenReader(made, dtype="uint32")
    assert TokenReader(made, dtype="uint16").content == TokenReader(made).content


def test_a_manifest_without_an_end_of_text_takes_one(corpus):
    made = make_manifest(corpus / "plain.npy", corpus / "x.manifest")
    assert made.files[0].documents == 0
    with_ends, plain = TokenReader(made, end_of_text=0), TokenReader(corpus / "plain.npy", end_of_text=0)
    assert with_ends.document_ends().tolist() == plain.document_ends().tolist()


def test_a_part_of_a_source_reads_a_part_of_the_manifest(corpus, made):
    whole, plain = TokenReader(made), direct(corpus)
    part, expected = whole.part(1, 3), plain.part(1, 3)
    assert part.content == expected.content
    assert part.fetch([0, len(part) - 1]).tolist() == expected.fetch([0, len(part) - 1]).tolist()
    assert part.first_document == expected.first_document
    grown = whole.part(0, 2).with_more(whole.part(2))
    assert grown.content == whole.content


def test_a_reader_of_a_manifest_travels_to_workers_as_columns(corpus, made):
    graph = TokenReader(made).slice_sequences(8)
    data = pickle.dumps(graph)
    assert pickle.loads(data).fetch([0, 5]).tolist() == graph.fetch([0, 5]).tolist()
    assert pickle.loads(pickle.dumps(made)).files == made.files


# When the files are not what it says -----------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_missing_file_is_named_with_its_manifest(corpus, made, io):
    (corpus / "raw.bin").unlink()
    reader = TokenReader(made, io=io)
    with pytest.raises(TokenFileError, match=r"raw\.bin.*all\.manifest|all\.manifest.*raw\.bin") as caught:
        reader.fetch([int(reader.first_tokens[[file.kind for file in made.files].index("raw")])])
    assert caught.value.errno == 2


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_file_of_another_size_is_an_error_when_it_is_opened(corpus, made, io):
    with (corpus / "raw.bin").open("ab") as file:
        file.write(b"\0\0")
    reader = TokenReader(made, io=io)
    assert reader.fetch([0]).size == 1
    with pytest.raises(TokenFileError, match=r"raw\.bin: 10002 bytes now, 10000 when the manifest .*all\.manifest"):
        reader.fetch([int(reader.first_tokens[[file.kind for file in made.files].index("raw")])])


def test_verify_names_the_first_bytes_that_differ(corpus, made, capsys):
    assert main(["verify", made.path]) == 0
    assert capsys.readouterr().out.count("as in the manifest") == len(made.files)
    data = bytearray((corpus / "own.tok").read_bytes())
    data[70_000] ^= 1
    (corpus / "own.tok").write_bytes(data)
    (corpus / "raw.bin").unlink()
    np.save(corpus / "plain.npy", np.arange(150_000).astype(np.uint16))
    (corpus / "mega.idx").write_bytes((corpus / "mega.idx").read_bytes()[:-1] + b"\x09")
    with (corpus / "trove.ds").open("ab") as file:
        file.write(b"\0\0")
    assert main(["verify", made.path]) == 1
    lines = {name: line for line in capsys.readouterr().out.splitlines() for name in ALL if f"/{name}" in line}
    assert "bytes 65536 … 131071 are not what they were" in lines["own.tok"]
    assert "1 of 5 block(s)" in lines["own.tok"]
    assert "No such file" in lines["raw.bin"]
    assert "was replaced" in lines["plain.npy"]
    assert "mega.idx: is not what it was" in lines["mega.idx"]
    assert "bytes now" in lines["trove.ds"]


ALL = ("own.tok", "trove.ds", "mega.idx", "plain.npy", "raw.bin")


def test_a_mask_that_is_new_or_gone_is_found(corpus, made, capsys):
    (corpus / "own.tok.loss").unlink()
    assert main(["verify", made.path]) == 1
    assert "own.tok.loss: is gone" in capsys.readouterr().out


# Manifests that are damaged, or lie ------------------------------------------------------------------------------


def test_a_manifest_with_any_byte_flipped_is_an_error(corpus, made):
    path, whole = Path(made.path), Path(made.path).read_bytes()
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    tail = len(whole) - 4 * sum(file.blocks.count for file in made.files)
    most = (
        range(len(whole)) if SOAK else [*range(64), *chance.sample(range(64, len(whole)), 150), *range(tail - 9, tail)]
    )
    for at in most:
        data = bytearray(whole)
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises(TokenFileError):
            for file in read_manifest(path).files:
                file.blocks.sums()
    path.write_bytes(whole)
    assert read_manifest(path).files == made.files


def test_a_manifest_that_was_cut_anywhere_is_an_error(corpus, made):
    path, whole = Path(made.path), Path(made.path).read_bytes()
    for size in range(0, len(whole), scaled(1, 37)):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenFileError):
            read_manifest(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(TokenFileError, match="cut or appended"):
        read_manifest(path)


def forged(path: Path, change: Any) -> Path:
    """The manifest with other columns, and a CRC that fits them."""
    data = path.read_bytes()
    magic, version, _, length, block, zero, sums = HEADER.unpack_from(data)
    columns = json.loads(data[40 : 40 + length])
    text = change(columns)
    text = json.dumps(columns).encode() if text is None else text
    begin = -(-(40 + length) // 8) * 8
    head = HEADER.pack(magic, version, zlib.crc32(text), len(text), block, zero, sums)
    path.write_bytes(head + text + bytes(-(40 + len(text)) % 8) + data[begin:])
    return path


def other(name: str, value: Any, at: int = 0) -> Any:
    def change(columns: "dict[str, Any]") -> None:
        column = columns[name]
        if len(column) == 1:
            columns[name] = column = column * len(columns["paths"])
        column[at] = value

    return change


LIES = [
    *[other(name, -1) for name in manifest.NUMBERS],
    *[other(name, 2**62) for name in manifest.NUMBERS],
    *[other(name, "1") for name in (*manifest.NUMBERS, *manifest.MAYBE)],
    *[other(name, 1.5) for name in (*manifest.NUMBERS, *manifest.MAYBE)],
    *[other(name, True) for name in manifest.NUMBERS],
    *[other(name, "xyz") for name in manifest.HASHES],
    *[other(name, "") for name in ("digest", "hash", "paths")],
    *[other(name, None) for name in (*manifest.NUMBERS, *manifest.TEXTS, *manifest.HASHES)],
    other("tokens", 0),
    other("tokens", 2**40),
    other("offset", 2**40),
    other("size", 2**40),
    other("stored_documents", 2**40),
    other("sequences", 2**40),
    other("dtype", "float32"),
    other("dtype", "object"),
    other("paths", "../own.tok"),
    other("paths", "a\0b"),
    other("ends_path", "x/../../y"),
    lambda columns: columns.pop("tokens"),
    lambda columns: columns.update(more=[1]),
    lambda columns: columns.update(paths=[]),
    lambda columns: columns.update(tokens={"a": 1}),
    lambda columns: columns["paths"].pop(),
    lambda columns: b"[" * 100_000,
    lambda columns: b'{"paths": [], "paths": []}',
    lambda columns: b"NaN",
    lambda columns: b"\xff\xfe",
    lambda columns: b"[1" + b"0" * 10_000 + b"]",
]


@pytest.mark.parametrize("change", LIES)
def test_a_manifest_that_lies_is_an_error_and_not_believed(corpus, made, change):
    def changed(columns: Any) -> Any:
        found = change(columns)
        return found if isinstance(found, bytes) else None

    with pytest.raises(TokenFileError, match=r"all\.manifest"):
        read_manifest(forged(Path(made.path), changed))


def test_a_manifest_that_was_replaced_does_not_give_its_sums_to_the_old_one(corpus, made):
    (corpus / "raw.bin").write_bytes(bytes(10_000))
    make_manifest(corpus / "raw.bin", made.path, dtype="uint16")
    with pytest.raises(TokenFileError, match="was replaced after it was read"):
        made.files[0].blocks.sums()


def test_what_is_no_manifest_is_said(tmp_path):
    (tmp_path / "x.manifest").write_bytes(b"hello" * 100)
    for path in ("x.manifest", "none.manifest"):
        with pytest.raises(TokenFileError, match=path):
            TokenReader(tmp_path / path)
    with pytest.raises(ArgumentTypeError):
        read_manifest(3)  # type: ignore[arg-type]


# Making it ------------------------------------------------------------------------------------------------------


def test_the_command_makes_it_and_says_what_is_in_it(corpus, capsys):
    output = str(corpus / "c.manifest")
    assert main(["manifest", str(corpus), "--dtype", "uint16", "--end-of-text", "0", "--output", output]) == 0
    assert "c.manifest: 5 files, " in capsys.readouterr().out
    assert TokenReader(output).content == direct(corpus).content
    assert main(["manifest", str(corpus / "raw.bin"), "--output", output]) == 1
    assert "dtype" in capsys.readouterr().err
    assert TokenReader(output).content == direct(corpus).content  # the one that was there


def test_an_output_that_cannot_be_is_said_before_anything_is_read(corpus, tmp_path):
    with pytest.raises(ConfigurationError, match=r"ends in \.manifest"):
        make_manifest(corpus / "own.tok", tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        make_manifest(corpus / "own.tok", tmp_path / "none" / "x.manifest")
    with pytest.raises(ArgumentTypeError):
        make_manifest(corpus / "own.tok", 3)  # type: ignore[arg-type]


def test_a_failed_one_leaves_nothing_behind(corpus):
    before = sorted(corpus.iterdir())
    with pytest.raises(TokenFileError):
        make_manifest([corpus / "own.tok", corpus / "none.npy"], corpus / "x.manifest")
    assert sorted(corpus.iterdir()) == before


def test_a_manifest_of_a_manifest_reads_the_files_again(corpus, made):
    data = bytearray((corpus / "raw.bin").read_bytes())
    data[5] ^= 1
    (corpus / "raw.bin").write_bytes(data)
    anew = make_manifest(made, corpus / "anew.manifest")
    assert TokenReader(anew).content == direct(corpus).content != TokenReader(made).content
    assert main(["verify", anew.path]) == 0


def test_who_wrote_the_files_may_say_their_sums(corpus):
    files = direct(corpus).files
    given = write_manifest(corpus / "given.manifest", files, [sum_file(file) for file in files])
    assert (
        Path(given.path).read_bytes()
        == Path(make_manifest(corpus, corpus / "read.manifest", dtype="uint16", end_of_text=0).path).read_bytes()
    )


# Many files, many ranks --------------------------------------------------------------------------------------------


def test_more_files_than_may_be_mapped_are_read_with_few_descriptors_and_the_same_tokens(tmp_path):
    script = """
import gc, resource, sys
import numpy as np
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tokenpipe.datapipes import TokenReader, make_manifest
from tokenpipe.datapipes import filemap
from tokenpipe.datapipes.fetch import held_files
folder = Path(sys.argv[1])
for i in range(600):
    np.arange(i, i + 50, dtype="<u2").tofile(folder / f"{i:04}.bin")
np.zeros(1 << 17, "<u2").tofile(folder / "zz.bin")  # too large to be copied
manifest = make_manifest(folder, folder / "all.manifest", dtype="uint16")
expected = np.concatenate([np.arange(i, i + 50) for i in range(600)] + [np.zeros(1 << 17, np.int64)])
order = np.random.default_rng(7).permutation(31_000)[:6000]
cases = [(10_000, 1 << 20, (601, 0)), (100, 1 << 20, (1, 600)), (100, 20_000, (100, 200)), (100, 0, (100, 0))]
for most, copied, found in cases:
    held_files.most_maps, filemap.MOST_COPIED = lambda: most, copied
    reader = TokenReader(manifest)
    for begin in range(0, order.size, 50):
        numbers = order[begin : begin + 50]
        assert (reader.fetch(numbers) == expected[numbers]).all()
    held = reader._gather.value.held
    assert filemap.FileCopy.held == 100 * len(held.copies)
    assert (len(held.mapped), len(held.copies)) == found, (len(held.mapped), len(held.copies))
    del held, reader
    gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_rank_reads_and_all_have_it_or_all_have_its_error(corpus, made, tmp_path):
    shutil.copy(made.path, corpus / "damaged.manifest")
    data = bytearray((corpus / "damaged.manifest").read_bytes())
    data[60] ^= 1
    (corpus / "damaged.manifest").write_bytes(data)
    expected, log = direct(corpus).content, tmp_path / "ranks.log"
    environment = {**test_distributed.ENVIRONMENT, "WORLD_SIZE": "3", "MASTER_PORT": str(test_distributed.free_port())}
    command = [sys.executable, str(test_distributed.SCRIPT), str(corpus), "manifests"]
    with log.open("w") as out:
        places = [{**environment, "RANK": str(rank)} for rank in range(3)]
        runs = [subprocess.Popen(command, env=place, stdout=out, stderr=out) for place in places]
    assert test_distributed.finished(runs, log) == [0, 0, 0]
    ranks = test_distributed.results(corpus, "manifests", 3)
    for rank, seen in enumerate(ranks):
        for name, reads in (("all", rank == 0), ("again", rank == 0), *([("pair", rank == 1)] if rank else [])):
            content, paths, opened = seen[name]
            assert content == expected
            assert paths == [file.path for file in made.files]
            assert opened == ([str(corpus / "all.manifest")] if reads else [])
        assert seen["missing"] == ranks[0]["missing"]
        assert seen["damaged"] == ranks[0]["damaged"]
    assert ranks[0]["missing"][0] == ranks[0]["damaged"][0] == "TokenFileError"
    assert "none.manifest" in ranks[0]["missing"][1]
    assert "damaged" in ranks[0]["damaged"][1]
    assert ranks[0]["outside"][0] == "ConfigurationError"


def test_without_a_process_group_it_is_just_read(corpus, made):
    assert os.fspath(made) == made.path
    assert read_manifest(made.path).files == made.files  # no process group: no collective
