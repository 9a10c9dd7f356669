"""Many token files from texts: the same bits by any number of processes, killed or not, and one manifest of them."""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec.config
import numpy as np
import pytest

from processes import SOAK, alive, children, in_a_child, wait_for
from tokenpipe.cli.main import main
from tokenpipe.datapipes import TokenReader, remote, tokenize_files, tokenize_shards, verify_token_file
from tokenpipe.datapipes.errors import ConfigurationError, DocumentError, TokenFileError, WorkerError
from tokenpipe.datapipes.manifest import make_manifest, read_manifest
from tokenpipe.datapipes.remote import file_systems
from tokenpipe.datapipes.tokenize import shards
from tokenpipe.datapipes.tokenize.locking import Lock
from tokenpipe.datapipes.tokenize.progress import Progress
from tokenpipe.datapipes.tokenize.shard_store import Marker, Store

WORDS = ["the", "quick", "brown", "fox", "naïve", "東京", "🙂", "{}\n", "0.5"]
SHARDS = 6
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """1500 documents with ids, a few of them empty, as JSON lines and as text files."""
    folder, rng = tmp_path_factory.mktemp("source"), random.Random(17)
    for name in ("a", "b"):
        rows = []
        for _ in range(700):
            text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 1, 5, 40, 300])))
            rows.append(json.dumps({"url": f"https://x/{rng.randrange(300)}", "text": text}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        for k in range(50):
            (folder / f"{name}{k:02}.txt").write_text(f"text file {k}" * rng.randrange(1, 30))
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """The folder of an unbroken run by one process: x-*.tok, x.manifest; and one.tok, all in one file."""
    folder = tmp_path_factory.mktemp("whole")
    make(source, folder / "x", workers=1)
    tokenize_files(source, folder / "one.tok", "byte", ids="url", workers=1)
    return folder


def make(source: Path, prefix: Path, **settings: object):
    return tokenize_shards(source, prefix, "byte", **{"ids": "url", "shards": SHARDS, "workers": 1, **settings})


def bits(folder: Path, prefix: str = "x") -> "dict[str, bytes]":
    """All that stands under a prefix, each token file found whole; the manifest too."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob(f"{prefix}*"))}
    for name in found:
        if name.endswith(".tok"):
            verify_token_file(folder / name)
    return found


def left_over(folder: Path, prefix: str = "x") -> "list[str]":
    """What stands in the hidden folder of a finished run besides its markers."""
    return [path.name for path in (folder / f".{prefix}.shards").iterdir() if path.suffix != ".done"]


def documents_of(path: "Path | str") -> "tuple[list[list[int]], list[str | None]]":
    reader = TokenReader(path)
    tokens, ends = reader.fetch(np.arange(len(reader))).tolist(), reader.document_ends().tolist()
    ids = [reader.document_id(k) for k in range(len(ends))]
    return [tokens[low:high] for low, high in zip([0, *ends], ends, strict=False)], ids


# What stands in the files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_shards_end_to_end_are_the_one_file_with_its_ids(tmp_path, source, whole, count):
    summary = make(source, tmp_path / "x", shards=count, workers=2)
    assert documents_of(summary.path) == documents_of(whole / "one.tok")
    names = sorted(path.name for path in tmp_path.glob("x-*.tok"))
    assert names == [f"x-{k:05}-of-{count:05}.tok" for k in range(count)]
    sizes = [len(TokenReader(tmp_path / name)) for name in names]
    assert max(sizes) < 3 * sum(sizes) / count, "cut by bytes"
    one = tokenize_files(source, tmp_path / "one.tok", "byte", ids="url")
    for field in ("documents", "empty_documents", "tokens", "text_bytes", "dtype", "end_of_text"):
        assert getattr(summary, field) == getattr(one, field), field
    assert (summary.shards, summary.empty_shards, summary.kept_shards) == (count, 0, 0)
    assert left_over(tmp_path) == ["run"]


def test_the_manifest_knows_of_each_shard_what_reading_it_gives(tmp_path, source, whole):
    names = sorted(map(str, whole.glob("x-*.tok")))
    made, read = read_manifest(whole / "x.manifest"), make_manifest(names, whole / "again.manifest")
    assert made.hashes == read.hashes and [file.digest for file in made.files] == [file.digest for file in read.files]
    assert (whole / "x.manifest").read_bytes() == (whole / "again.manifest").read_bytes()
    (whole / "again.manifest").unlink()


def test_shards_without_a_token_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + '{"text": ""}\n' * 50 + '{"text": "two"}\n')
    summary = make(tmp_path / "a.jsonl", tmp_path / "x", ids=None, shards=40)
    assert (summary.shards, summary.empty_shards, summary.documents, summary.empty_documents) == (2, 38, 2, 50)
    assert len(list(tmp_path.glob("x-*.tok"))) == 2
    assert documents_of(summary.path)[0] == [[*b"one", 256], [*b"two", 256]]
    again = make(tmp_path / "a.jsonl", tmp_path / "x", ids=None, shards=40)
    assert again.kept_shards == 40 and again.tokens == summary.tokens
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="no text"):
        make(tmp_path / "b.jsonl", tmp_path / "y", shards=3)


def test_a_shuffle_is_within_each_shard_by_seed_and_shard(tmp_path, source, whole):
    plain, plain_ids = documents_of(whole / "x.manifest")
    for seed in (3, 4):
        make(source, tmp_path / "x", shuffle_documents=True, seed=seed)
        found, ids = documents_of(tmp_path / "x.manifest")
        assert found != plain
        assert sorted(zip(found, map(str, ids), strict=True)) == sorted(zip(plain, map(str, plain_ids), strict=True))
    before = bits(tmp_path)
    make(source, tmp_path / "x", shuffle_documents=True, seed=3)
    assert bits(tmp_path) != before
    for name in ("x-00000-of-00006.tok", "x-00005-of-00006.tok"):
        assert sorted(documents_of(tmp_path / name)[0]) == sorted(documents_of(whole / name)[0])


def test_the_number_of_shards_follows_the_size_of_the_inputs_alone():
    sizes = [1, 1 << 22, (1 << 22) + 1, 1 << 27, 1 << 34, 1 << 40]
    assert [shards.default_shards(size) for size in sizes] == [1, 1, 2, 32, 64, 1024]


def test_outputs_in_the_folder_of_the_inputs_are_no_inputs(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    for _ in range(2):
        assert make(tmp_path, tmp_path / "x", shards=2).documents == 1
    (tmp_path / ".x.shards/00000-of-00002.done").unlink()
    assert make(tmp_path, tmp_path / "x", shards=2).documents == 1
    with pytest.raises(ConfigurationError, match="but shards of an earlier run"):
        make(tmp_path / "x-00000-of-00002.tok", tmp_path / "x", shards=2)


def test_inputs_that_begin_as_the_shards_do_and_lie_beside_them_are_inputs(tmp_path):
    names = ["x-2024.jsonl", "x-00000.jsonl", "x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl", "x-1-of-2.jsonl"]
    for number, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps({"text": f"of {name}", "url": str(number)}) + "\n")
    for _ in range(2):
        summary = make(tmp_path, tmp_path / "x", shards=2)
        assert summary.documents == len(names) and sorted(map(int, documents_of(summary.path)[1])) == [0, 1, 2, 3, 4]


# Going on ---------------------------------------------------------------------------------------------------


def test_a_finished_run_is_kept_and_what_is_missing_of_it_is_made_again(tmp_path, source, whole):
    make(source, tmp_path / "x")
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("x-*")}
    summary = make(source, tmp_path / "x")
    assert summary.kept_shards == SHARDS and summary.tokens_per_second == 0
    assert f"{SHARDS} shards kept" in str(summary) and "over all processes" in str(summary)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("x-*")} == times
    name, markers = "x-00002-of-00006.tok", tmp_path / ".x.shards"
    damage = [
        lambda: (tmp_path / name).unlink(),
        lambda: (tmp_path / f"{name}.ids").unlink(),
        lambda: (tmp_path / name).write_bytes((whole / name).read_bytes()[:-8]),
        lambda: shutil.copy(whole / "x-00003-of-00006.tok", tmp_path / name),
        lambda: (markers / "00002-of-00006.done").unlink(),
        lambda: shutil.copy(markers / "00003-of-00006.done", markers / "00002-of-00006.done"),
        lambda: (tmp_path / "x.manifest").unlink(),
    ]
    for number, change in enumerate(damage):
        change()
        assert make(source, tmp_path / "x").kept_shards == (SHARDS if number == 6 else SHARDS - 1), number
        assert bits(tmp_path) == bits(whole), number


def test_a_marker_with_any_change_is_no_marker_or_the_same(tmp_path, source, whole):
    shutil.copytree(whole, tmp_path / "y")
    store = Store(tmp_path / "y" / "x")
    path = tmp_path / "y/.x.shards/00002-of-00006.done"
    data = path.read_bytes()
    good = Marker.parsed(data)
    assert good is not None and store.finished("00002-of-00006", good.spec) == good
    rng = random.Random(2)
    for _ in range(2000 if SOAK else 300):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 3)):
            changed[rng.randrange(len(data))] = rng.choice(b'0123456789abcdef"[]{}, nul-\xff')
        path.write_bytes(changed[: rng.choice([len(data), rng.randrange(len(data))])])
        found = store.finished("00002-of-00006", good.spec)
        if found is not None:
            with contextlib.suppress(TokenFileError):  # or sums that nothing checks but the manifest's reader
                found.sums()
    for odd in (b"", b"[]", b"7", b'{"version": 1}', b"[" * 100_000, json.dumps({"version": 2}).encode()):
        assert Marker.parsed(odd) is None


def test_shards_of_other_arguments_or_of_an_older_input_are_never_taken(tmp_path, source):
    copied = tmp_path / "in"
    shutil.copytree(source, copied)
    prefix = tmp_path / "x"
    make(copied, prefix)
    for settings in ({"ids": None}, {"end_of_text": False, "dtype": "uint32"}, {"column": "url"}):
        assert make(copied, prefix, **settings).kept_shards == 0, settings
        make(copied, tmp_path / "y", **settings)
        assert [*bits(tmp_path).values()][:-1] == [*bits(tmp_path, "y").values()][:-1], settings
    assert make(copied, prefix, column="url", seed=3).kept_shards == SHARDS, "of a seed that decides nothing"
    make(copied, prefix)
    before = documents_of(tmp_path / "x.manifest")
    text = (copied / "b.jsonl").read_text()
    (copied / "b.jsonl").write_text(text.replace("quick", "QUICK"))
    assert 0 < make(copied, prefix).kept_shards < SHARDS, "shards of what stayed are kept"
    after = documents_of(tmp_path / "x.manifest")
    assert [bytes(ids[:-1]).lower() for ids in after[0]] == [bytes(ids[:-1]).lower() for ids in before[0]]
    assert after != before


def test_a_manifest_of_older_shards_is_gone_before_the_first_is_replaced(tmp_path, source):
    make(source, tmp_path / "x")
    (tmp_path / "bad.jsonl").write_text('{"text": 7}\n')
    with pytest.raises(DocumentError, match=r"bad\.jsonl, line 1"):
        tokenize_shards([source, tmp_path / "bad.jsonl"], tmp_path / "x", "byte", shards=SHARDS, workers=1)
    assert not (tmp_path / "x.manifest").exists()


def test_a_rank_that_is_late_leaves_the_manifest_that_the_first_has_written(tmp_path, source, whole, monkeypatch):
    """It finds shards unfinished, and before it takes one of them the others have made them all."""
    take = Progress.__enter__

    def others_first(self: Progress) -> Progress:
        monkeypatch.undo()
        assert os.waitpid(in_a_child(lambda: make(source, tmp_path / "x")), 0)[1] == 0
        return take(self)

    monkeypatch.setattr(Progress, "__enter__", others_first)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert make(source, tmp_path / "x").kept_shards == 0
    assert bits(tmp_path) == bits(whole)


def test_a_run_that_fails_ends_its_processes_before_their_folders_are_free_for_others(tmp_path, source, monkeypatch):
    before, then, release = children(), [], Lock.release

    def looked(self: Lock) -> None:
        then.append(children() - before)
        release(self)

    monkeypatch.setattr(Lock, "release", looked)
    with pytest.raises(DocumentError, match=r"no column 'nope'"):
        make(source, tmp_path / "x", column="nope", workers=2)
    assert then and not any(then)
    assert left_over(tmp_path) == ["run"]


def kill_and_run_again(run, folder: Path, longest: float, rng: random.Random) -> None:
    """A run in a process group of its own, killed with all of it at some moment, and one that goes on from there."""

    def begin() -> None:
        os.setpgid(0, 0)
        run(folder)

    child = in_a_child(begin)
    time.sleep(rng.uniform(0, longest))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it was no group yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run(folder)


@pytest.mark.parametrize("how", ["one file", "shards"])
def test_killed_at_any_moment_and_run_again_the_bits_are_those_of_an_unbroken_run(tmp_path, source, how):
    """50 kills in all with TOKENPIPE_SOAK=1."""

    def run(folder: Path) -> None:
        if how == "shards":
            make(source, folder / "x", workers=2)
        else:
            tokenize_files(source, folder / "x.tok", "byte", ids="url", workers=2, piece_bytes=50_000)

    (tmp_path / "good").mkdir()
    began = time.perf_counter()
    run(tmp_path / "good")
    took, good = time.perf_counter() - began, bits(tmp_path / "good")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for number in range(25 if SOAK else 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        kill_and_run_again(run, folder, 1.1 * took, rng)
        assert bits(folder) == good, number
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == sorted(good)
        if how == "shards":
            assert left_over(folder) == ["run"]
            assert {path.name for path in folder.glob(".*")} == {".x.shards"}
        shutil.rmtree(folder)


# Several processes ----------------------------------------------------------------------------------------


def test_processes_that_run_the_same_share_the_shards_and_none_is_made_twice(tmp_path, source, whole, monkeypatch):
    made = os.open(tmp_path / "made", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    keep = Store.keep

    def noted(self: Store, name: str, *arguments: object) -> Marker:
        os.write(made, f"{name}\n".encode())
        return keep(self, name, *arguments)

    monkeypatch.setattr(Store, "keep", noted)
    children = [in_a_child(lambda: make(source, tmp_path / "x", workers=1)) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert bits(tmp_path) == bits(whole)
    assert sorted((tmp_path / "made").read_text().split()) == [f"{k:05}-of-00006" for k in range(SHARDS)]
    assert left_over(tmp_path) == ["run"]


def test_what_a_killed_process_had_begun_is_taken_up_by_one_that_waits_for_it(tmp_path, source, whole):
    """A stopped process holds a shard; another makes the rest and waits; the first is killed."""

    def hold() -> None:
        store = Store(tmp_path / "x")
        lock = store.take("00001-of-00006")
        (tmp_path / "held").touch()
        time.sleep(100)
        assert lock

    holder = in_a_child(hold)
    assert wait_for((tmp_path / "held").exists)
    other = in_a_child(lambda: make(source, tmp_path / "x", workers=1))
    try:
        assert wait_for(lambda: len(list(tmp_path.glob("x-*.tok"))) == SHARDS - 1)
        time.sleep(0.1)
        assert alive(other) and not (tmp_path / "x.manifest").exists()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert os.waitpid(other, 0)[1] == 0
    assert bits(tmp_path) == bits(whole)


def test_a_run_with_other_arguments_at_the_same_time_is_refused(tmp_path, source):
    def hold() -> None:
        with Store(tmp_path / "x").joined("another plan"):
            (tmp_path / "held").touch()
            time.sleep(100)

    holder = in_a_child(hold)
    try:
        assert wait_for((tmp_path / "held").exists)
        with pytest.raises(ConfigurationError, match="another run makes shards of this name now, with other arguments"):
            make(source, tmp_path / "x")
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    make(source, tmp_path / "x", workers=1)


def test_without_locks_each_rank_makes_its_own_shards_alone(tmp_path, source, whole):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    def rank(number: int) -> None:
        os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        fcntl.flock = no_locks
        keep = Store.keep

        def own(self: Store, name: str, *arguments: object) -> Marker:
            assert int(name[:5]) % 2 == number, name
            return keep(self, name, *arguments)

        Store.keep = own  # type: ignore[method-assign]
        make(source, tmp_path / "x", workers=1)

    children = [in_a_child(lambda number=number: rank(number)) for number in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert bits(tmp_path) == bits(whole)


@pytest.mark.parametrize("environment", [{"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}])
def test_an_environment_that_no_launcher_makes_is_refused(tmp_path, source, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="in the environment"):
        make(source, tmp_path / "x")


def test_under_torchrun_ranks_share_the_work_one_that_fails_fails_all_and_a_rerun_goes_on(tmp_path, source):
    inputs, last = tmp_path / "in", tmp_path / "in" / "c.jsonl"
    shutil.copytree(source, inputs)
    last.write_text('{"url": "x", "text": ""}\n')
    make(inputs, tmp_path / "good", workers=1)
    good = [*bits(tmp_path, "good").values()][:-1]
    last.write_text('{"url": "x", "text": 17}\n')
    tool = [
        "--nproc-per-node=2",
        "-m",
        "tokenpipe.cli.main",
        "tokenize",
        "--ids",
        "url",
        "--shards",
        str(SHARDS),
        "--split",
        "train",
    ]
    nanotron = ["--column", "text", "--tokenizer-name-or-path", "byte", "--eos-token", "<|endoftext|>"]
    command = [*TORCHRUN, *tool, *nanotron, "--output-prefix", str(tmp_path / "x"), "--input", str(inputs)]
    run = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 60, "check": False}
    alone = [sys.executable, *command[len(TORCHRUN) + 1 :]]  # as torchrun starts the first rank
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    failed = subprocess.run(command if SOAK else alone, **run | {"env": ENVIRONMENT | first})  # type: ignore[call-overload]
    assert failed.returncode != 0 and "c.jsonl, line 1: column 'text' holds 17" in failed.stderr
    assert not (tmp_path / "x.manifest").exists()
    last.write_text('{"url": "x", "text": ""}\n')
    done = subprocess.run(command, **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x.manifest: 6 shards") == 1, "the first rank alone says it"
    assert [*bits(tmp_path).values()][:-1] == good


# The command ----------------------------------------------------------------------------------------------


def test_the_command_makes_what_the_call_makes(tmp_path, source, whole, capsys):
    command = ["tokenize", str(source), "--output-prefix", str(tmp_path / "x"), "--tokenizer", "byte", "--ids", "url"]
    assert main([*command, "--shards", "6", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"x\.manifest: 6 shards, [\d,]+ documents", out) and not err
    assert bits(tmp_path) == bits(whole)
    assert main([*command, "--shards", "6", "--progress"]) == 0
    out, err = capsys.readouterr()
    assert "6 shards kept from an earlier run" in out and "100%" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x.tok", "--shards", "3"], "--shards goes with --output-prefix"),
        (["--output", "x.tok", "--ray"], "--ray goes with --output-prefix"),
        (["--output-prefix", "x", "--shards", "0"], "shards"),
        (["--output-prefix", "x", "--shards", "100000"], "99,999"),
        (["--output-prefix", "nowhere/x"], "does not exist"),
        (["--output-prefix", "x/"], "ends with it"),
        (["--output-prefix", "./."], "ends with it"),
        (["--output-prefix", "x", "--end-of-text", ""], "only token is '<|endoftext|>', got ''"),
        (["--output-prefix", "x", "--work", "."], "no URL"),
        (["--output-prefix", "s3://me:secret@bucket/x"], "without user, password"),
        (["--output-prefix", "s3://me:secret@bucket/"], "'s3://bucket/'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, source, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["tokenize", str(source), "--tokenizer", "byte", *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err and "secret" not in err
    assert not list(tmp_path.iterdir()) or [path.name for path in tmp_path.iterdir()] == [".x.shards"]


def test_a_command_without_an_input_is_told_so(tmp_path, capsys):
    assert main(["tokenize", "--tokenizer", "byte", "--output-prefix", str(tmp_path / "x")]) == 1
    assert "no input was named" in capsys.readouterr().err


# Object storage, and Ray ----------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch):
    """The file system of a server on this machine, with s3://tokenised."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    monkeypatch.setattr(file_systems, "_made", {})  # of other tests' servers
    files = file_systems.file_system("s3://tokenised")
    files.mkdir("tokenised")
    yield files
    files.rm("tokenised", recursive=True)  # what servers of one process hold is one
    server.stop()


def test_shards_go_to_object_storage_are_kept_there_and_made_again_where_one_is_missing(
    tmp_path, source, whole, bucket
):
    how = {"work": tmp_path, "workers": 1}
    summary = make(source, "s3://tokenised/data/x", **how)  # type: ignore[arg-type]
    assert summary.path == "s3://tokenised/data/x.manifest"
    there = {path.rpartition("/")[2]: bucket.cat(path) for path in bucket.find("tokenised/data") if "/.x" not in path}
    expected = bits(whole)
    expected.pop("x.manifest")
    (tmp_path / "there.manifest").write_bytes(there.pop("x.manifest"))
    known, good = read_manifest(tmp_path / "there.manifest"), read_manifest(whole / "x.manifest")
    (tmp_path / "there.manifest").unlink()
    assert [file.path for file in known.files] == [
        f"s3://tokenised/data/{name}" for name in expected if name.endswith(".tok")
    ]
    assert known.hashes == good.hashes and [f.digest for f in known.files] == [f.digest for f in good.files]
    assert there == expected
    assert [len(list(path.iterdir())) for path in tmp_path.iterdir()] == [1], "nothing is left but the lock of the run"
    assert make(source, "s3://tokenised/data/x", **how).kept_shards == SHARDS  # type: ignore[arg-type]
    bucket.rm("tokenised/data/x-00004-of-00006.tok")
    assert make(source, "s3://tokenised/data/x", **how).kept_shards == SHARDS - 1  # type: ignore[arg-type]
    assert bucket.cat("tokenised/data/x-00004-of-00006.tok") == expected["x-00004-of-00006.tok"]


def test_killed_at_any_upload_and_run_again_nothing_is_left_here_and_the_bits_are_the_same(
    tmp_path, source, whole, bucket, monkeypatch
):
    """Of two shards: file, ids, marker each, and the manifest; killed before the upload or behind it."""

    def run(name: str) -> None:
        make(source, f"s3://tokenised/{name}/x", work=tmp_path / "work", shards=2)

    def there(name: str) -> "dict[str, bytes]":
        bucket.invalidate_cache()
        found = {path.partition(f"/{name}/")[2]: bucket.cat(path) for path in bucket.find(f"tokenised/{name}")}
        return {path: data for path, data in found.items() if path.startswith("x-")}

    def begin(name: str, uploads: int) -> None:
        put, done = remote.upload, []

        def killed(local: Path, url: str) -> None:
            if len(done) == uploads // 2 and uploads % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            put(local, url)
            done.append(url)
            if len(done) == uploads // 2 + 1:
                os.kill(os.getpid(), signal.SIGKILL)

        remote.upload = killed
        run(name)

    (tmp_path / "work").mkdir()
    run("good")
    good = there("good")
    assert len(good) == 4
    for uploads in range(14) if SOAK else (4, 12):
        child = in_a_child(lambda uploads=uploads: begin(str(uploads), uploads))
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, uploads
        run(str(uploads))
        assert there(str(uploads)) == good and bucket.exists(f"tokenised/{uploads}/x.manifest"), uploads
        left = {path.name for path in (tmp_path / "work").rglob("*") if path.is_file()}
        assert left == {"run"}, (uploads, left)


def test_an_object_storage_has_no_manifest_while_shards_of_it_are_replaced(tmp_path, source, bucket):
    how = {"work": tmp_path, "shards": 2}
    make(source, "s3://tokenised/x", **how)  # type: ignore[arg-type]
    assert bucket.exists("tokenised/x.manifest")
    (tmp_path / "bad.jsonl").write_text('{"text": 7}\n')
    with pytest.raises(DocumentError, match=r"bad\.jsonl, line 1"):
        make(tmp_path / "bad.jsonl", "s3://tokenised/x", **how)  # type: ignore[arg-type]
    bucket.invalidate_cache()
    assert not bucket.exists("tokenised/x.manifest")


def test_without_ray_its_extra_is_named(tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"tokenpipe\[ray\]"):
        make(source, tmp_path / "x", ray=True)


def test_a_ray_cluster_at_whose_address_nothing_listens_is_named_at_once(tmp_path, source, monkeypatch):
    pytest.importorskip("ray")
    with socket.socket() as taken:  # and no server
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorkerError, match=f"cannot reach the Ray cluster at '{address}': .*refused"):
            make(source, tmp_path / "x", ray=address)
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        with pytest.raises(WorkerError, match=f"'ray://{address}': .*refused"):
            make(source, tmp_path / "x", ray=True)


@pytest.mark.slow
@pytest.mark.alone
def test_a_node_of_a_ray_cluster_that_dies_in_the_middle_changes_no_bit(tmp_path, source):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    lines = (source / "a.jsonl").read_text() * 40
    (tmp_path / "a.jsonl").write_text(lines)
    how = {"shards": 6, "ids": "url"}
    tokenize_shards(tmp_path / "a.jsonl", tmp_path / "good", "byte", workers=1, **how)
    good = [*bits(tmp_path, "good").values()][:-1]
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    died = threading.Event()
    try:
        second = cluster.add_node(**node)

        def kill() -> None:
            """When two shards are being made at once: each node has one core."""
            if wait_for(lambda: died.is_set() or len(list((tmp_path / ".x.shards").glob("*/lock"))) == 2, pause=0.001):
                cluster.remove_node(second, allow_graceful=False)
                died.set()

        killer = threading.Thread(target=kill)
        killer.start()
        summary = tokenize_shards(tmp_path / "a.jsonl", tmp_path / "x", "byte", ray=cluster.address, **how)
        assert died.is_set() and summary.shards == 6
        killer.join()
        with pytest.raises(DocumentError, match=r"bad\.jsonl, line 1"):
            (tmp_path / "bad.jsonl").write_text('{"text": 7}\n')
            tokenize_shards(tmp_path / "bad.jsonl", tmp_path / "y", "byte", ray=cluster.address)
    finally:
        died.set()
        cluster.shutdown()
    assert [*bits(tmp_path).values()][:-1] == good
