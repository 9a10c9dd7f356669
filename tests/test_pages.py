"""Pages of mapped files: read ahead and let go of, with the same batches; and the kernels' cache folder."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology, cache, kernels
from tokenpipe.datapipes.errors import ConfigurationError, SourceExhaustedError, TokenFileError
from tokenpipe.datapipes.fetch import pages
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.fetch.held_files import all_held, let_go


@pytest.fixture
def asked(monkeypatch):
    """What is asked for ahead, as a list of arrays of places, in the order of the calls; and what is gathered."""
    found: list[tuple[str, np.ndarray]] = []
    ask_for, rows = TokenGather.ask_for, TokenGather.rows

    def noted_ask(self, places, counts):
        found.append(("asked", places.copy()))
        ask_for(self, places, counts)

    def noted_rows(self, starts, *arguments):
        found.append(("gathered", starts.copy()))
        return rows(self, starts, *arguments)

    monkeypatch.setattr(TokenGather, "ask_for", noted_ask)
    monkeypatch.setattr(TokenGather, "rows", noted_rows)
    return found


def documents(folder: Path, name: str, count: int) -> TokenReader:
    paths = [folder / f"{name}-{i}.tok" for i in range(3)]
    for i, path in enumerate(paths):
        with TokenFileWriter(path, vocab_size=60_000) as writer:
            for n in range(count):
                writer.write((np.arange(n % 13 + 1) * 7 + n + i * 1000) % 60_000)
    return TokenReader(paths, name=name)


def graphs(folder: Path) -> dict:
    prose = documents(folder, "prose", 400)
    train, held_out = prose.hold_out(0.3, seed=7)
    windows = train.slice_sequences(16).permute(7)
    blend = windows.blend(held_out.slice_sequences(16).permute(7), weights=[3, 1])
    return {
        "a blend of chosen documents": blend.shard_ranks(Topology(1, 2), seed=7).batch_samples(3),
        "many small windows": prose.slice_sequences(2).permute(7).batch_samples(64),
        "padding": windows.once(tail="pad").shard_ranks(Topology(2, 3)).batch_samples(4),
        "an uneven tail": windows.once(tail="uneven").shard_ranks(Topology(2, 3)).batch_samples(4),
        "a limit inside a step": windows.limit(samples=101).batch_samples(2, global_batch_size=8),
        "a skip": blend.skip(40).batch_samples(4),
    }


def rows_of(graph, count=400):
    return [(r.tokens.tolist(), r.sample_numbers.tolist()) for r, _ in zip(graph.iterate(), range(count), strict=False)]


def test_batches_are_the_same_with_read_ahead(tmp_path, request, subtests):
    expected = {name: rows_of(graph) for name, graph in graphs(tmp_path).items()}
    request.getfixturevalue("slow_disk")
    for name, graph in graphs(tmp_path).items():
        with subtests.test(name):
            assert rows_of(graph) == expected[name]
            assert [r.tokens.tolist() for r in graph.fetch(range(5))] == [row for row, _ in expected[name][:5]]
    assert pages.WATCH.reading


def test_every_row_is_asked_for_before_it_is_gathered_and_some_batches_ahead(tmp_path, slow_disk, asked):
    graph = documents(tmp_path, "prose", 400).slice_sequences(4).permute(7).batch_samples(2)
    list(zip(graph.iterate(), range(600), strict=False))
    del asked[: next(i for i, (what, _) in enumerate(asked) if what == "asked")]
    waiting: set[int] = set()
    ahead = []
    for what, starts in asked:
        places = set(starts.tolist())
        if what == "asked":
            waiting |= places
        else:
            assert places <= waiting, "a row was gathered that nobody had asked for"
            waiting -= places
            ahead.append(len(waiting) // 2)
    assert max(ahead) <= 2 * pages.READ_AHEAD_BATCHES, "bounded"
    assert min(ahead[40:-40]) >= pages.READ_AHEAD_BATCHES // 2, "also where a block of numbers ends"


def test_read_ahead_is_bounded_in_bytes_and_can_be_turned_off(tmp_path, monkeypatch, slow_disk, asked):
    graph = documents(tmp_path, "prose", 400).slice_sequences(64).permute(7).batch_samples(4)
    monkeypatch.setattr(pages, "read_ahead_bytes", lambda: 5 * 4 * 65 * 4)
    list(zip(graph.iterate(), range(60), strict=False))
    most = max(starts.size for what, starts in asked if what == "asked")
    assert most <= 5 * 4
    asked.clear()
    monkeypatch.setattr(pages, "read_ahead_bytes", lambda: 0)
    list(zip(graph.iterate(), range(60), strict=False))
    assert {what for what, _ in asked[-50:]} == {"gathered"}


def test_nothing_is_asked_for_while_nothing_comes_from_disk(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(pages, "_disk_counters", lambda: (3, 4))
    for _ in range(2):
        pages.WATCH.look(1, lambda share: None)
    graph = documents(tmp_path, "prose", 400).slice_sequences(4).permute(7).batch_samples(2)
    list(zip(graph.iterate(), range(300), strict=False))
    assert {what for what, _ in asked} == {"gathered"}


def test_an_error_comes_at_its_own_batch_also_with_read_ahead(tmp_path, slow_disk):
    a, b = [documents(tmp_path, name, 100).slice_sequences(8).permute(7) for name in ("a", "b")]
    capped = a.blend(b, weights=[1, 1], max_epochs={"a": 1}, on_exhausted="error").batch_samples(2)
    through = capped.datapipe.phases.end // 2
    items = capped.iterate()
    assert len([next(items) for _ in range(through)]) == through
    with pytest.raises(SourceExhaustedError):
        next(items)


def test_a_file_that_is_gone_is_an_error_of_the_batch_that_needs_it(tmp_path, slow_disk):
    reader = documents(tmp_path, "prose", 100)
    graph = reader.slice_sequences(8).batch_samples(1)
    last = int(reader.first_tokens[2])
    Path(reader.files[2].path).unlink()
    seen = 0
    with pytest.raises(TokenFileError, match="prose-2"):
        for _ in graph.iterate():
            seen += 1
    assert seen == (last - 9) // 8 + 1, "all windows that lie before the file were delivered"


# What is resident -------------------------------------------------------------------------------------------

WALK = """
import sys
from pathlib import Path
import numpy as np
from tokenpipe.datapipes import TokenReader

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) >> 10

tiny, *paths = sys.argv[1:]
TokenReader(tiny, dtype="uint16").slice_sequences(2048).permute(7).fetch([0])  # loads the kernels
reader = TokenReader(paths, dtype="uint16")
graph = reader.slice_sequences(2048).permute(7).batch_samples(1)
before, most, total = resident(), 0, 0
for n, batch in zip(range(len(graph)), graph.iterate()):
    total += int(batch.tokens[:, :-1].sum())
    if n % 4 == 0:
        most = max(most, resident() - before)
print(most, total)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not say what is resident")
def test_a_walk_through_files_larger_than_the_bound_stays_below_it(tmp_path):
    paths, total = [], 0
    for i in range(3):
        tokens = (np.arange(16 << 20, dtype=np.uint32) * 40_503 + i).astype(np.uint16)
        tokens.tofile(tmp_path / f"{i}.bin")
        paths.append(str(tmp_path / f"{i}.bin"))
        total += int(tokens.sum(dtype=np.int64))
    rest = int(tokens[-2048:].sum(dtype=np.int64))  # the last token has no window that begins with it
    tokens[:4096].tofile(tmp_path / "tiny.bin")
    environment = {**os.environ, "TOKENPIPE_RESIDENT_MIB": "40"}
    command = [sys.executable, "-W", "ignore", "-c", WALK, str(tmp_path / "tiny.bin"), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    most, found = map(int, done.stdout.split())
    assert found == total - rest, "the same tokens, all of them"
    assert most <= 40, "of 96 MiB"


@pytest.mark.parametrize("value", ["", "-1", "1.5", "many", "1e3", "9" * 30, "١"])
@pytest.mark.parametrize("variable", ["TOKENPIPE_READ_AHEAD_MIB", "TOKENPIPE_RESIDENT_MIB"])
def test_a_setting_that_is_no_number_is_refused_with_what_would_do(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{variable} is .*would do"):
        pages._mib(variable, 16)


# The kernels' cache -----------------------------------------------------------------------------------------


def test_a_cache_folder_is_taken_only_if_nobody_else_can_write_there(tmp_path, monkeypatch):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(scratch))
    first = kernels._cache_folder()
    assert first is not None
    assert home in first.parents
    first.chmod(0o777)
    second = kernels._cache_folder()
    assert second is not None
    assert scratch in second.parents
    top = scratch / f"tokenpipe-{os.getuid()}"
    top.rename(scratch / "elsewhere")
    top.symlink_to(scratch / "elsewhere")
    assert kernels._cache_folder() is None, "a link that somebody may have put there"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setenv("TMPDIR", "/dev/null/nowhere")
    assert kernels._cache_folder() is None


def test_a_kernel_is_compiled_also_while_a_process_that_holds_its_lock_is_stopped(tmp_path):
    first, second, nowhere = tmp_path / "a.lock", tmp_path / "a.lock", tmp_path / "b" / "c"
    with cache.alone(first, 0.1), cache.alone(second, 0.1), cache.alone(nowhere, 0.1):
        assert (tmp_path / "a.lock").exists()


def test_every_gather_lets_go_and_reads_the_same_again(tmp_path):
    files = []
    for name in ("prose", "code"):
        files.append(tmp_path / f"{name}.npy")
        np.save(files[-1], np.arange(40_000, dtype=np.uint16))
    graph = TokenReader(files[0]).slice_sequences(32)
    before = graph.fetch(range(500)).tolist()
    unread = TokenGather([TokenReader(files[1])])  # it has mapped nothing yet
    assert unread.held in all_held()
    for share in (0.01, 0.5, 1.0):
        let_go(share)
        assert graph.fetch(range(500)).tolist() == before
