"""Tokens read through descriptors (io="pread"): the bits of maps, files that are cut, how many are open."""

import contextlib
import errno
import fcntl
import gc
import itertools
import os
import pickle
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from contract import all_same
from tokenpipe.adapters import SkipErrors
from tokenpipe.datapipes import (
    TokenFileWriter,
    TokenReader,
    Topology,
    kernels,
    load_nanotron,
    load_recipe,
    read_tokens,
)
from tokenpipe.datapipes.core import nodes_of
from tokenpipe.datapipes.errors import ConfigurationError, TokenFileError
from tokenpipe.datapipes.fetch import descriptors, gather, held_files
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.fetch.held_files import all_held
from tokenpipe.datapipes.fetch.routes import plan_of
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

pytestmark = pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.TokenFileWarning")
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
LAST = np.arange(200)


@pytest.fixture(params=["numba", "numpy"])
def either_kernels(request, monkeypatch):
    """The compiled kernels, then the others; new gathers choose anew."""
    monkeypatch.setenv("TOKENPIPE_KERNELS", request.param)
    kernels.kernel.cache_clear()
    yield request.param
    kernels.kernel.cache_clear()


@pytest.fixture
def at_most(monkeypatch):
    """at_most(n): no more than n files are open at a time."""

    def bound(files: int) -> None:
        for held in all_held():
            held.close()
        monkeypatch.setattr(held_files, "most_descriptors", lambda: files)

    return bound


def raw(folder: Path, name: str, tokens: int, dtype: str = "uint16", seed: int = 5) -> Path:
    """A raw file of any ids that the dtype holds."""
    path, kind = folder / f"{name}.bin", np.dtype(dtype)
    chance, bounds = np.random.default_rng([seed, tokens]), np.iinfo(kind)
    chance.integers(bounds.min, bounds.max, tokens, kind, endpoint=True).tofile(path)
    return path


def own(folder: Path, name: str, dtype: str = "uint16") -> list[Path]:
    """Three files of documents."""
    paths = [folder / f"{name}-{i}.tok" for i in range(3)]
    for i, path in enumerate(paths):
        with TokenFileWriter(path, dtype=dtype) as writer:
            for n in range(80):
                writer.write((np.arange(n % 13 + 1) * 7 + n + i * 31) % 251)
    return paths


def graphs(folder: Path, io: str, other: str) -> dict:
    """Graphs of all kinds of spaces; those of several sources mix both ways to read where `other` is another."""
    prose = TokenReader(own(folder, "prose"), io=io)
    code = TokenReader(own(folder, "code", "uint32"), io=other)
    train, held_out = prose.hold_out(0.3, seed=7)
    packed = prose.pack_documents(15)
    blend = (
        train.slice_sequences(16).permute(7).blend(held_out.slice_sequences(16).permute(7), weights=[3, 1], name="both")
    )
    blend = blend.blend(code.slice_sequences(16).permute(7), weights=[1, 2])
    place = Topology(cp_rank=1, cp_size=2)
    found = {
        "chosen documents": train.slice_sequences(16).permute(7).batch_samples(4),
        "a part": prose.part(1).slice_sequences(16).permute(7).batch_samples(4),
        "packed rows": packed.permute(7).batch_samples(4),
        "rows cut for a rank": blend.shard_ranks(place, seed=7).batch_samples(4).collate_causal_lm(cp="zigzag"),
        "padding": prose.slice_sequences(16).once(tail="pad").shard_ranks(Topology(1, 3)).batch_samples(4),
    }
    for dtype in DTYPES:
        ways = itertools.cycle([io, other])
        several = [raw(folder, f"{dtype}-{i}", tokens, dtype) for i, tokens in enumerate([1, 50, 3, 70_000, 33])]
        one = TokenReader(several, dtype, name="one", io=next(ways)).slice_sequences(40)
        two = TokenReader(several[::-1], dtype, name="two", io=next(ways)).slice_sequences(40)
        found[f"several files of {dtype}"] = one.blend(two).batch_samples(8)
        found[f"long rows of {dtype}"] = TokenReader(several, dtype, io=io).slice_sequences(69_000).batch_samples(1)
    return found


@pytest.mark.parametrize("other", ["pread", "mmap"])
def test_every_batch_is_the_same_as_with_maps(tmp_path, either_kernels, other, subtests):
    expected = graphs(tmp_path, "mmap", "mmap")
    for name, graph in graphs(tmp_path, "pread", other).items():
        with subtests.test(name):
            numbers = range(min(12, len(graph)))
            assert all_same(graph.fetch(numbers), expected[name].fetch(numbers))
            assert graph.fingerprint() == expected[name].fingerprint()


def test_places_of_documents_and_masks_are_those_of_maps(tmp_path):
    found = []
    for io in ("mmap", "pread"):
        graph = TokenReader(own(tmp_path, "prose"), io=io).slice_sequences(16).batch_samples(4)
        asked = graph.collate_causal_lm(position_ids=True, cu_seqlens=True, no_loss_on=["joins"], label_mask=True)
        found.append(asked.fetch(range(12)))
    assert all_same(*found)


def test_workers_read_what_the_process_reads(tmp_path):
    graph = TokenReader(own(tmp_path, "prose"), io="pread").slice_sequences(16).permute(7).batch_samples(4)
    expected = graph.fetch(range(8))  # this process has files open when it forks
    with DataLoader2(graph, reading_service=MultiProcessingReadingService(2, "fork")) as loader:
        assert all_same(list(itertools.islice(loader, 8)), expected)


# What is open -----------------------------------------------------------------------------------------------


def open_below(folder: Path) -> list[int]:
    """This process's descriptors of files in a folder."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            if link.readlink().is_relative_to(folder):
                found.append(int(link.name))
    return found


def test_no_token_file_is_mapped_and_no_child_inherits_its_descriptor(tmp_path):
    graph = TokenReader(raw(tmp_path, "a", 1000), "uint16", io="pread").slice_sequences(9)
    graph.fetch(range(5))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    (handle,) = open_below(tmp_path)
    assert fcntl.fcntl(handle, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    mapped = TokenReader(tmp_path / "a.bin", "uint16").slice_sequences(9)
    mapped.fetch(range(5))  # else this could not fail
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del graph
    for _ in range(1000):  # a collection that another thread has begun makes this one return at once
        if not open_below(tmp_path):
            break
        gc.collect()
        time.sleep(0.01)
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("rows", [1, 40, 600])
def test_of_600_files_a_few_are_open_at_a_time(tmp_path, either_kernels, at_most, rows):
    paths = [tmp_path / f"{i:03}.bin" for i in range(600)]
    for i, path in enumerate(paths):
        np.full(8, i, "<u2").tofile(path)
    at_most(16)
    reader = TokenReader(paths, "uint16", name="all", io="pread")
    graphs = [reader.slice_sequences(7).permute(seed) for seed in (1, 2)]  # of two gathers
    for first in range(0, min(600, 50 * rows), rows):
        numbers = np.arange(first, first + rows)
        for graph in graphs:
            starts = plan_of(graph).starts(numbers)[1]
            assert (graph.fetch(numbers) == (starts[:, None] + np.arange(8)) // 8).all()
            assert 0 < len(open_below(tmp_path)) <= 16
    whole = reader.slice_sequences(4799).fetch([0])  # one row of all files
    assert (whole == np.arange(4800) // 8).all()
    assert len(open_below(tmp_path)) <= 16


def test_the_bound_is_256_or_a_quarter_of_what_the_process_may_have():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, most in ((soft, min(256, soft // 4)), (200, 50), (3, 1)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert descriptors.most_descriptors.__wrapped__() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_gather_that_is_read_by_another_thread_keeps_its_files(tmp_path, at_most):
    one, two = (TokenReader(raw(tmp_path, name, 100, seed=3), "uint16", io="pread") for name in "ab")
    expected = two.fetch(range(9)).tolist()
    at_most(1)
    one.fetch([0])
    held, done = one._gather.value.held, threading.Event()
    with held.lock:  # as while it reads
        thread = threading.Thread(target=lambda: (two.fetch(range(9)), done.set()))
        thread.start()
        assert done.wait(60)
        assert len(open_below(tmp_path)) == 2
    thread.join()
    assert two.fetch(range(9)).tolist() == expected
    two._gather.value.held.close()
    two.fetch([0])
    assert len(open_below(tmp_path)) == 1


def test_a_forks_child_gives_the_descriptors_back_and_opens_its_own(tmp_path):
    reader = TokenReader(raw(tmp_path, "a", 1000), "uint16", io="pread")
    expected, parents = reader.fetch(LAST).tolist(), open_below(tmp_path)
    child = os.fork()
    if not child:
        good = False
        try:
            good = open_below(tmp_path) == [] and reader.fetch(LAST).tolist() == expected
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(parents) == 1
    assert open_below(tmp_path) == parents
    assert reader.fetch(LAST).tolist() == expected


def test_a_pickled_reader_opens_its_own(tmp_path):
    reader = TokenReader(raw(tmp_path, "a", 1000), "uint16", io="pread")
    expected = reader.fetch(LAST).tolist()
    again = pickle.loads(pickle.dumps(reader))
    assert again.io == "pread"
    assert len(open_below(tmp_path)) == 1
    assert again.fetch(LAST).tolist() == expected
    assert len(open_below(tmp_path)) == 2


def test_what_is_read_ahead_is_asked_for_by_descriptor(tmp_path, monkeypatch, slow_disk):
    asked = []
    monkeypatch.setattr(descriptors.OpenFile, "ask_for", lambda self, *where: asked.append((self._file.path, *where)))
    files = [raw(tmp_path, "a", 100), raw(tmp_path, "b", 100)]
    reader = TokenReader([*files, raw(tmp_path, "c", 100, "uint16")], "uint16", io="pread")
    gathered = TokenGather([reader, TokenReader(files[0], "uint16", name="mapped")])
    gathered.ask_for(np.array([-1, 95, 300]), np.array([10]))
    assert asked == [(str(files[0]), 190, 10), (str(files[1]), 0, 10)]


# Files that are cut -----------------------------------------------------------------------------------------


def test_a_file_that_is_cut_while_it_is_open_is_an_error_that_names_it(tmp_path, either_kernels):
    path = raw(tmp_path, "a", 5000)
    graph = TokenReader(path, "uint16", io="pread").slice_sequences(999)
    expected = graph.fetch(range(4))
    os.truncate(path, 3 * 1998 + 100)
    with pytest.raises(TokenFileError, match=rf"{path}: 100 bytes from byte 5994 on, where 2000 were .*cut while") as e:
        graph.fetch(range(4))
    assert e.value.errno is None
    assert (graph.fetch(range(3)) == expected[:3]).all()  # what is still there can be read
    os.truncate(path, 1000)
    with pytest.raises(TokenFileError, match="0 bytes from byte 1998 on, where 2000 were"):
        graph.fetch([1])
    plan_of(graph).gather.held.close()
    with pytest.raises(TokenFileError, match=f"{path}: 1000 bytes now, 10000 when the graph was built"):
        graph.fetch([0])
    path.unlink()
    with pytest.raises(TokenFileError, match="cannot be opened") as e:
        graph.fetch([0])
    assert e.value.errno == errno.ENOENT


def test_skip_errors_does_without_the_samples_that_were_cut_off(tmp_path):
    path = raw(tmp_path, "a", 1001)
    graph = TokenReader(path, "uint16", io="pread").slice_sequences(10).limit(samples=96)
    batches = graph.batch_samples(8).collate_causal_lm()
    expected = batches.fetch(range(12))
    skip = SkipErrors(100, TokenFileError)
    with DataLoader2(batches, [skip]) as loader:
        os.truncate(path, 1000)
        found = list(itertools.islice(loader, 12))
    lost = [number for _, number, _ in skip.skipped]
    assert lost == list(range(49, 96))  # the label of 49 was cut off
    assert all_same(found[:6], expected[:6])
    assert (found[6]["label_ids"][1:] == -100).all()


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_a_failed_read_keeps_its_errno(tmp_path, either_kernels, kind):
    reader = TokenReader(raw(tmp_path, "a", 1000), "uint16", io="pread")
    reader.fetch([0])
    (handle,) = open_below(tmp_path)
    ends = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(ends[0] if kind == "a pipe" else folder, handle)  # every read fails from here on
    try:
        with pytest.raises(TokenFileError, match=r"cannot be read at byte 10: .*a\.bin") as error:
            reader.fetch([5])
    finally:
        for other in (*ends, folder):
            os.close(other)
    assert error.value.errno == (errno.ESPIPE if kind == "a pipe" else errno.EISDIR)


def test_reads_that_come_in_parts_are_read_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_KERNELS", "numpy")
    kernels.kernel.cache_clear()
    path, preadv = raw(tmp_path, "a", 1000), os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, into, at: preadv(handle, [into[0][:7]], at))
    try:
        found = TokenReader(path, "uint16", io="pread").slice_sequences(499).fetch([0, 1])
    finally:
        kernels.kernel.cache_clear()
    assert (found.reshape(-1)[:500] == np.fromfile(path, "<u2")[:500]).all()


def test_the_compiled_kernel_reads_on_too(tmp_path, monkeypatch):
    symbols = Path("/proc/kallsyms")  # a read of it gives some 4 KiB, from any place
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(symbols.open("rb")).fileno()
        except OSError:
            pytest.skip("there is no file here that is read in parts")
        parts = [os.pread(handle, 1 << 16, 0)]
        while parts[-1] and sum(map(len, parts)) < 200_000:
            parts.append(os.pread(handle, 1 << 16, sum(map(len, parts))))
        if len(parts) < 5 or not kernels.kernel("gather_files")[1]:
            pytest.skip("it is not read in parts here, or no kernel is compiled")
        (tmp_path / "a.bin").write_bytes(expected := b"".join(parts))
        graph = TokenReader(tmp_path / "a.bin", "uint8", io="pread").slice_sequences(len(expected) - 1)
        graph.fetch([0])
        os.dup2(handle, open_below(tmp_path)[0])
        monkeypatch.setattr(gather._kernels_numpy, "gather", None)  # which would help it out
        assert graph.fetch([0])[0].tolist() == list(expected)


# Arguments --------------------------------------------------------------------------------------------------


def test_read_tokens_and_nanotrons_configs_pass_io_on(tmp_path):
    paths = [str(raw(tmp_path, name, 500)) for name in ("a", "b")]
    config = {
        "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": {"dataset_folder": paths}}}],
        "tokens": {"sequence_length": 8, "micro_batch_size": 2, "batch_accumulation_per_replica": 1},
        "parallelism": {"dp": 1},
    }
    for build in (lambda **io: read_tokens(paths, 8, 7, "uint16", **io).batch_samples(2).collate_causal_lm(),
                  lambda **io: load_nanotron(config, dtype="uint16", **io)):  # fmt: skip
        mapped, read = build(), build(io="pread")
        assert {node.io for node in nodes_of(read) if isinstance(node, TokenReader)} == {"pread"}
        assert mapped.fingerprint() == read.fingerprint()
        assert all_same(mapped[3], read[3])
        assert load_recipe(read.recipe()).fingerprint() == read.fingerprint()
    with pytest.raises(ConfigurationError, match="'pread' would do"):
        read_tokens(paths, 8, 7, "uint16", io="aio")


def test_a_recipe_says_how_files_are_read(tmp_path):
    graph = TokenReader(raw(tmp_path, "a", 1000), "uint16", io="pread").slice_sequences(9).permute(7)
    again = load_recipe(graph.recipe())
    assert again.datapipe.datapipe.io == "pread"
    assert all_same(again.fetch(range(9)), graph.fetch(range(9)))
    mapped = TokenReader(tmp_path / "a.bin", "uint16").slice_sequences(9).permute(7)
    assert "pread" not in mapped.recipe()
    assert mapped.fingerprint() == graph.fingerprint()


def test_a_source_that_grows_and_its_parts_are_read_as_the_source_is(tmp_path):
    a, b = raw(tmp_path, "a", 100), raw(tmp_path, "b", 200)
    grown = TokenReader(a, "uint16", io="pread").with_more(TokenReader(b, "uint16"))
    assert grown.io == grown.part(1).io == "pread"
    assert grown.fetch(range(300)).tolist() == [*np.fromfile(a, "<u2"), *np.fromfile(b, "<u2")]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    graph = TokenReader(a, "uint16", io="pread").slice_sequences(9).permute(7).blend().batch_samples(2)
    with DataLoader2(graph) as loader:
        list(itertools.islice(loader, 2))
        loader.grow_source("a", b, "uint16")
        list(itertools.islice(loader, 12))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(open_below(tmp_path)) >= 2


def test_another_way_to_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="io is 'direct'; 'mmap' or 'pread' would do"):
        TokenReader(raw(tmp_path, "a", 10), "uint16", io="direct")
