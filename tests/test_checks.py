"""TokenReader(verify=): what is not as the manifest says is an error before a token of it is given."""

import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import all_same
from tokenpipe.datapipes import (
    DatatroveWriter,
    MegatronWriter,
    TokenFileWriter,
    TokenReader,
    kernels,
    load_nanotron,
    load_recipe,
    make_manifest,
    read_tokens,
)
from tokenpipe.datapipes.errors import ConfigurationError, TokenFileError
from tokenpipe.datapipes.fetch import checks, held_files
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.fetch.held_files import all_held
from tokenpipe.datapipes.fingerprint import file_digest
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

BLOCK = 64 * 1024
TOKENS = 500_000
"""Of a raw uint16 file: sixteen blocks, the last one not whole; a quarter of it decides its fingerprint."""


@pytest.fixture(autouse=True)
def a_process_that_begins(monkeypatch):
    """Has checked nothing so far."""
    monkeypatch.setattr(checks, "_FOUND", {})


@pytest.fixture(params=["numba", "numpy"])
def either_kernels(request, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_KERNELS", request.param)
    kernels.kernel.cache_clear()
    yield
    kernels.kernel.cache_clear()


@pytest.fixture
def blocks_read(monkeypatch):
    """The sizes of all blocks of which a CRC was worked out since."""
    found: list[int] = []

    class Counted:
        @staticmethod
        def crc32(data: Any) -> int:
            found.append(len(data))
            return zlib.crc32(data)

    monkeypatch.setattr(checks, "zlib", Counted)
    return found


def raw(folder: Path, names: str = "a", seed: int = 5) -> "list[Path]":
    paths = [folder / f"{name}.bin" for name in names]
    for i, path in enumerate(paths):
        np.random.default_rng([seed, i]).integers(0, 50_000, TOKENS, np.uint16).tofile(path)
    return paths


def manifest_of(paths: Any, **given: Any) -> Path:
    first = Path(paths[0] if isinstance(paths, list) else paths)
    output = first.with_name("all.manifest")
    make_manifest(paths, output, progress=False, **given)
    return output


def flip(path: Path, byte: int, bit: int = 1, keeps_times: bool = False) -> None:
    """Another bit in a file, where it stands."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(byte)
        (old,) = file.read(1)
        file.seek(byte)
        file.write(bytes([old ^ bit]))
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def unsampled(path: Path, byte: int, dtype: str = "uint16") -> int:
    """The first byte from this one on that no fingerprint of the file sees: more of it than that is compared."""
    (file,) = TokenReader(path, None if path.suffix == ".tok" else dtype).files
    before = file_digest(file)
    while True:
        flip(path, byte)
        after = file_digest(file)
        flip(path, byte)
        if after == before:
            return byte
        byte += 509


# What is compared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_flipped_bit_is_named_with_its_block_before_its_tokens_are_given(tmp_path, io, either_kernels):
    (path,) = raw(tmp_path)
    manifest = manifest_of([path], dtype="uint16")
    before = TokenReader(path, "uint16").fetch(range(0, TOKENS, 7))
    byte = unsampled(path, BLOCK + 2000)
    place = byte // 2
    assert BLOCK + 400 < byte < 2 * BLOCK - 400  # the whole row is in the second block
    flip(path, byte)
    rows = TokenReader(manifest, io=io, verify="read").slice_sequences(99)
    window = place // 99
    with pytest.raises(TokenFileError) as caught:
        rows.fetch([window])
    crc = zlib.crc32(path.read_bytes()[BLOCK : 2 * BLOCK])
    for part in (str(path), f"bytes {BLOCK} … {2 * BLOCK - 1}", f"{crc:08x}", str(manifest), "tokenpipe verify"):
        assert part in str(caught.value)
    with pytest.raises(TokenFileError, match="are damaged"):  # and again
        rows.fetch([0, window])
    assert rows.fetch([0, 900, 4000]).shape == (3, 100)  # blocks that are sound
    plain = TokenReader(manifest, io=io).fetch(range(0, TOKENS, 7))
    assert (plain != before).sum() <= 1  # verify="size" is what it was


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_file_replaced_by_another_of_the_same_size_is_refused_when_it_is_opened(tmp_path, io):
    path, other = raw(tmp_path, "ab")
    manifest = manifest_of([path], dtype="uint16")
    other.replace(path)
    for verify in (None, "open", "read"):
        rows = TokenReader(manifest, io=io, verify=verify).slice_sequences(99)  # a graph opens no file
        with pytest.raises(TokenFileError, match=r"a\.bin: is not the file that its manifest is of: its fingerprint"):
            rows.fetch([0])
    TokenReader(manifest, io=io, verify="size").slice_sequences(99).fetch([0])


@pytest.mark.parametrize("kind", ["own", "datatrove", "megatron"])
@pytest.mark.parametrize("verify", ["open", "read"])
def test_document_ends_and_loss_masks_are_compared_when_they_are_opened(tmp_path, kind, verify):
    writer, name, index = {
        "own": (TokenFileWriter, "a.tok", "a.tok"),
        "datatrove": (DatatroveWriter, "a.ds", "a.ds.index"),
        "megatron": (MegatronWriter, "a.bin", "a.idx"),
    }[kind]
    with writer(tmp_path / name, vocab_size=1000) as file:
        for d in range(200):
            file.write(np.arange(d % 7 + 1), np.arange(d % 7 + 1) > 0)
    manifest = manifest_of(tmp_path / name)

    def reader() -> TokenReader:
        checks._FOUND.clear()
        return TokenReader(manifest, verify=verify)

    rows = reader().slice_sequences(16).batch_samples(4).collate_causal_lm(no_loss_on=["unscored"])
    expected, ends = rows[0], reader().document_ends().tolist()
    if kind != "own" or verify == "read":  # its fingerprint is of the tokens alone
        flip(tmp_path / index, (tmp_path / index).stat().st_size - 8 * 100)
        with pytest.raises(TokenFileError, match=rf"{index}: (is not the file that|bytes)"):
            reader().document_ends()
        flip(tmp_path / index, (tmp_path / index).stat().st_size - 8 * 100)
    flip(tmp_path / f"{name}.loss", 5)
    with pytest.raises(TokenFileError, match=r"\.loss: is not the file that its manifest is of"):
        reader().slice_sequences(16).batch_samples(4).collate_causal_lm(no_loss_on=["unscored"])[0]
    flip(tmp_path / f"{name}.loss", 5)
    rows = reader().slice_sequences(16).batch_samples(4).collate_causal_lm(no_loss_on=["unscored"])
    assert all_same(rows[0], expected) and reader().document_ends().tolist() == ends


def test_a_large_mask_is_hashed_whole_with_read_and_by_samples_with_open(tmp_path):
    (path,) = raw(tmp_path)
    mask = tmp_path / "a.bin.loss"
    np.ones(TOKENS, np.uint8).tofile(mask)
    manifest = manifest_of([path], dtype="uint16")

    def opened(verify: str) -> Any:
        checks._FOUND.clear()
        graph = TokenReader(manifest, verify=verify).slice_sequences(16).batch_samples(4)
        return graph.collate_causal_lm(no_loss_on=["unscored"])[0]

    flip(mask, unsampled(mask, 100_000, "uint8"))
    opened("open")
    with pytest.raises(TokenFileError, match=r"\.loss: is not the file that its manifest is of: its BLAKE2b"):
        opened("read")


def test_document_ends_are_not_worked_out_of_damaged_tokens_nor_kept(tmp_path):
    ids = np.random.default_rng(3).integers(0, 40, TOKENS, np.uint16)
    ids.tofile(path := tmp_path / "eot.bin")
    make_manifest(path, tmp_path / "eot.manifest", "uint16", progress=False)
    bytes_ = (2 * np.flatnonzero(ids == 1)).tolist()
    byte = next(b for b in bytes_ if unsampled(path, b) == b)
    flip(path, byte)  # one more id that closes documents
    with pytest.raises(TokenFileError, match=r"are damaged"):
        TokenReader(tmp_path / "eot.manifest", end_of_text=0, verify="read").document_ends()
    flip(path, byte)
    found = TokenReader(tmp_path / "eot.manifest", end_of_text=0, verify="read").document_ends()
    assert found.size == np.count_nonzero(ids == 0) + (ids[-1] != 0)


def test_a_mask_that_came_after_the_manifest_cannot_be_compared(tmp_path):
    (path,) = raw(tmp_path)
    manifest = manifest_of([path], dtype="uint16")
    np.ones(TOKENS, np.uint8).tofile(f"{path}.loss")
    graph = TokenReader(manifest, verify="read").slice_sequences(16).batch_samples(4)
    with pytest.raises(TokenFileError, match=r"\.loss: is not in the manifest"):
        graph.collate_causal_lm(no_loss_on=["unscored"])[0]


# How often ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_each_block_is_checked_once_a_process_whatever_graphs_read_it(tmp_path, io, blocks_read):
    paths = raw(tmp_path, "abc")
    manifest = manifest_of(paths, dtype="uint16")

    def graph() -> Any:
        return TokenReader(manifest, io=io, verify="read").slice_sequences(99)

    first = graph()
    first.fetch([0])
    assert blocks_read == [BLOCK]
    first.fetch([0, 1, 5])
    assert blocks_read == [BLOCK]
    first.fetch([330])  # tokens 32,670 … 32,769, of two blocks of which one is known
    assert blocks_read == [BLOCK] * 2
    for node in (first, graph(), graph()):
        node.fetch(range(len(node)))
    last = 2 * TOKENS % BLOCK
    assert sorted(blocks_read) == [last] * 3 + [BLOCK] * 45


def test_a_file_that_was_changed_is_compared_again_when_it_is_opened_again(tmp_path, monkeypatch):
    paths = raw(tmp_path, "abc")
    rows = TokenReader(manifest_of(paths, dtype="uint16"), io="pread", verify="read").slice_sequences(99)
    for held in all_held():
        held.close()
    monkeypatch.setattr(held_files, "most_descriptors", lambda: 1)
    assert rows.fetch(range(len(rows))).shape == (len(rows), 100)  # in halves: more files than may be open
    os.utime(paths[1], ns=(1, 1))
    flip(paths[1], unsampled(paths[1], 3 * BLOCK))
    rows.fetch([0])
    rows.fetch([TOKENS // 99 * 2 - 5])  # of sound blocks
    with pytest.raises(TokenFileError, match=rf"b\.bin: bytes {3 * BLOCK} …"):
        rows.fetch(range(len(rows)))


def test_rows_longer_than_blocks_and_across_files_are_checked_whole(tmp_path, blocks_read, either_kernels):
    paths = raw(tmp_path, "abc")
    manifest = manifest_of(paths, dtype="uint16")
    rows = TokenReader(manifest, verify="read").slice_sequences(540_000)
    rows.fetch([0])
    assert len(blocks_read) == 16 + 2
    for byte in [unsampled(paths[0], k * BLOCK) for k in (0, 1, 2, 7, 15)]:
        checks._FOUND.clear()
        flip(paths[0], byte)
        with pytest.raises(TokenFileError, match=rf"a\.bin: bytes {byte // BLOCK * BLOCK} …"):
            TokenReader(manifest, verify="read").slice_sequences(540_000).fetch([0])
        flip(paths[0], byte)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 90_000), st.booleans()), min_size=1, max_size=6),
    stretches=st.lists(st.tuples(st.integers(-5, 500_000), st.integers(0, 120_000)), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 80), max_size=6),
    sizes=st.lists(st.sampled_from([1, 2, 4, -4, 8]), min_size=6, max_size=6),
)
def test_both_kernels_see_the_same_blocks(pieces, stretches, bad, sizes):
    """Pieces (its byte in its file, its tokens, whether it is checked) end to end, each in a file of its own."""
    code = np.array(sizes[: len(pieces)], np.int64)
    byte = np.array([b for b, _, _ in pieces], np.int64)
    tokens = np.array([n for _, n, _ in pieces], np.int64)
    first = np.cumsum([0, *tokens], dtype=np.int64)
    blocks = (byte + tokens * np.abs(code) >> 16) + 1
    table = np.where([c for *_, c in pieces], np.cumsum(blocks) - blocks, -1).astype(np.int64)
    good = np.ones(int(blocks.sum()), np.bool_)
    good[[b for b in bad if b < good.size]] = False
    total = int(first[-1])
    starts = np.array([p % total if p >= 0 else -1 for p, _ in stretches], np.int64)
    counts = np.array([min(n, total - max(0, s)) for s, (_, n) in zip(starts, stretches, strict=True)], np.int64)
    expected = True
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        for p in range(len(pieces)):
            a, b = max(start, first[p]), min(start + count, first[p + 1])
            if start >= 0 and a < b and table[p] >= 0:
                low, high = (int(byte[p] + (place - first[p]) * abs(code[p])) for place in (a, b))
                expected &= bool(good[table[p] + low // BLOCK : table[p] + (high - 1) // BLOCK + 1].all())
    for kernel in (kernels._compile("blocks_good"), kernels._kernels_numpy.blocks_good):
        assert kernel(starts, counts, first, code, byte, table, good) is expected


# Every graph -------------------------------------------------------------------------------------------------


GRAPHS = {
    "slices": lambda reader: reader.slice_sequences(64),
    "chosen documents": lambda reader: reader.select_documents(share=(0, 0.5), seed=3).slice_sequences(64),
    "packed": lambda reader: reader.pack_documents(64),
    "from documents' beginnings": lambda reader: reader.slice_sequences(64, align="document"),
}


def documents(folder: Path) -> "list[Path]":
    paths = [folder / f"{name}.tok" for name in "ab"]
    for i, path in enumerate(paths):
        chance = np.random.default_rng(i)
        with TokenFileWriter(path, vocab_size=60_000) as file:
            for d in range(8000):
                file.write(chance.integers(0, 60_000, 20 + d % 60))
    return paths


@pytest.mark.parametrize(
    ("graph", "io"), [*((graph, "mmap") for graph in GRAPHS), ("slices", "pread"), ("chosen documents", "pread")]
)
def test_all_graphs_give_the_same_batches_and_see_every_damage_that_they_read(tmp_path, graph, io):
    paths = documents(tmp_path)
    manifest = manifest_of(paths)
    plain = GRAPHS[graph](TokenReader(paths, name="x")).permute(3)
    checked = GRAPHS[graph](TokenReader(manifest, "uint16", "x", io=io, verify="read")).permute(3)
    assert checked.fingerprint() == plain.fingerprint()
    numbers = range(0, len(plain), 31)
    whole = plain.fetch(numbers)
    assert np.array_equal(checked.fetch(numbers), whole)
    flip(paths[1], unsampled(paths[1], 70_000))
    checks._FOUND.clear()
    touched = GRAPHS[graph](TokenReader(paths, name="x")).permute(3).fetch(numbers)
    anew = GRAPHS[graph](TokenReader(manifest, "uint16", "x", io=io, verify="read")).permute(3)
    given = raised = 0
    for number, expected, damaged in zip(numbers, whole, touched, strict=True):
        try:
            row = anew.fetch([number])
        except TokenFileError as error:
            assert re.search(r"b\.tok: bytes 65536 …", str(error))
            raised += 1
        else:
            given += 1
            assert np.array_equal(row[0], expected) and np.array_equal(row[0], damaged)
    assert raised and given


def test_workers_check_what_they_read_and_a_changed_verify_resumes(tmp_path):
    paths = documents(tmp_path)
    manifest = manifest_of(paths)

    def graph(verify: str) -> Any:
        return TokenReader(manifest, name="x", verify=verify).slice_sequences(64).permute(3).batch_samples(8)

    service = MultiProcessingReadingService(1, "fork")
    loader = DataLoader2(graph("size").collate_causal_lm(), reading_service=service)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = next(batches)
    loader.shutdown()
    service = MultiProcessingReadingService(1, "fork")
    loader = DataLoader2.from_state(state, graph("read").collate_causal_lm(), reading_service=service)
    assert all_same(next(iter(loader)), expected)
    assert loader.state_dict()["sources"] == state["sources"]
    loader.shutdown()
    for path in paths:
        flip(path, 256 + 5000)
    service = MultiProcessingReadingService(1, "fork")
    loader = DataLoader2.from_state(state, graph("read").collate_causal_lm(), reading_service=service)
    with pytest.raises(TokenFileError, match=r"\.tok: (is not the file|bytes \d+ …)"):
        for _ in iter(loader):
            pass
    loader.shutdown()


# Arguments ---------------------------------------------------------------------------------------------------


def test_without_a_manifest_there_is_nothing_to_compare_with(tmp_path):
    (path,) = raw(tmp_path)
    manifest = manifest_of([path], dtype="uint16")
    for verify in ("open", "read"):
        for paths in (path, [manifest, path]):
            with pytest.raises(ConfigurationError, match=rf"verify='{verify}' compares .*a\.bin was given without"):
                TokenReader(paths, "uint16", verify=verify)
    for wrong in ("always", "", False, True, 1, b"read"):
        with pytest.raises(ConfigurationError, match="'size', 'open' or 'read' would do"):
            TokenReader(manifest, verify=wrong)


def test_recipes_read_tokens_and_nanotrons_configs_take_it(tmp_path):
    (path,) = raw(tmp_path)
    manifest = str(manifest_of([path], dtype="uint16"))
    config = {
        "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": {"dataset_folder": manifest}}}],
        "tokens": {"sequence_length": 8, "micro_batch_size": 2, "batch_accumulation_per_replica": 1},
        "parallelism": {"dp": 1},
    }
    flip(path, 5)
    for build in (
        lambda verify: read_tokens(manifest, 8, 7, verify=verify).batch_samples(2).collate_causal_lm(),
        lambda verify: load_nanotron(config, verify=verify),
    ):
        graph = build("read")
        assert graph.fingerprint() == build("size").fingerprint()
        for one in (graph, load_recipe(graph.recipe())):
            with pytest.raises(TokenFileError, match=r"a\.bin: "):
                one.fetch(range(200))


def test_a_source_that_is_checked_blends_with_one_that_no_manifest_is_of(tmp_path):
    checked, plain = raw(tmp_path, "ab")
    manifest = manifest_of([checked], dtype="uint16")
    rows = [TokenReader(path, "uint16", name).slice_sequences(99) for path, name in ((manifest, "a"), (plain, "b"))]
    assert len(rows[0].blend(rows[1]).fetch(range(8))) == 8


def test_a_reader_that_checks_nothing_has_no_checks_to_ask(tmp_path):
    (path,) = raw(tmp_path)
    manifest = manifest_of([path], dtype="uint16")
    assert TokenGather([TokenReader(manifest, verify="size")])._checks is None
    assert TokenGather([TokenReader(manifest, verify="read")])._checks is not None


def test_a_source_grows_by_files_that_are_checked_as_well(tmp_path):
    a, b = raw(tmp_path, "ab")
    first, second = tmp_path / "a.manifest", tmp_path / "b.manifest"
    make_manifest([a], first, "uint16", progress=False)
    make_manifest([b], second, "uint16", progress=False)
    reader = TokenReader(first, name="x", verify="read").with_more(TokenReader(second, name="x", verify="read"))
    rows = reader.slice_sequences(99)
    assert rows.fetch(range(len(rows))).shape[0] == len(rows)
    checks._FOUND.clear()
    flip(b, unsampled(b, 2 * BLOCK))
    rows = reader.part(0).slice_sequences(99)
    rows.fetch([0])
    with pytest.raises(TokenFileError, match=r"b\.bin: "):
        rows.fetch(range(len(rows)))
