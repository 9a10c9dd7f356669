"""Whole remote files on this machine: downloaded once by many processes, evicted under readers, left by killed ones."""

import errno
import mmap
import multiprocessing
import os
import random
import resource
import signal
import stat
import threading
import time
from pathlib import Path

import fsspec
import pytest

from fault_server import Fault, FaultServer
from processes import scaled, wait_for
from tokenpipe.datapipes import remote
from tokenpipe.datapipes.errors import ConfigurationError, RemoteFileError
from tokenpipe.datapipes.remote import attempts, shard_cache

FORK = multiprocessing.get_context("fork")
GIB = 1 << 30


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.001)
    with FaultServer() as started:
        yield started


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """cache(bytes): an empty shard cache with such a limit, and its folder."""

    def begin(limit: int = GIB) -> Path:
        monkeypatch.setenv("TOKENPIPE_SHARDS", str(tmp_path / "shards"))
        monkeypatch.setenv("TOKENPIPE_SHARDS_GIB", repr(limit / GIB))
        return tmp_path / "shards"

    return begin


def body_of(k: int, size: int = 1000) -> bytes:
    return random.Random(k).randbytes(size)


def shards(server: FaultServer, count: int, size: int = 1000) -> "list[remote.RemoteFile]":
    return [remote.look_up(server.put(f"/{k}.bin", body_of(k, size))) for k in range(count)]


def kept(folder: Path) -> "list[str]":
    return sorted(path.name for path in folder.iterdir())


def run(function, *arguments) -> "multiprocessing.process.BaseProcess":
    child = FORK.Process(target=function, args=arguments, daemon=True)
    child.start()
    return child


# Once a machine -----------------------------------------------------------------------------------------------------


def _fetch_all(files, seed: int, wrong) -> None:
    order = random.Random(seed).sample(range(len(files)), len(files))
    for k in order:
        if remote.fetch(files[k]).read_bytes() != body_of(k):
            wrong.put(k)
    wrong.put("done")


def test_sixteen_processes_download_each_of_two_hundred_shards_once(server, cache):
    folder, count = cache(), 200
    files = shards(server, count)
    server.forget()
    said = FORK.SimpleQueue()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    children = [run(_fetch_all, files, seed + k if k % 2 else seed, said) for k in range(16)]
    answers = [said.get() for _ in range(16)]
    for child in children:
        child.join()
    assert answers == ["done"] * 16
    assert server.counts() == {f"/{k}.bin": 1 for k in range(count)}
    assert len(kept(folder)) == count
    assert all(name.endswith(".shard") and len(name) == 70 for name in kept(folder)), "a lock or a temp is left"


def test_threads_download_a_shard_once(server, cache):
    cache()
    (file,) = shards(server, 1)
    server.forget()
    server.script("/0.bin", Fault(slow=0.2))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(remote.fetch(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and server.count() == 1


def test_what_is_there_is_not_asked_for_again_and_another_version_is(server, cache):
    cache()
    (file,) = shards(server, 1)
    assert remote.claim(file, 0) is None
    path = remote.fetch(file)
    assert remote.claim(file, 0) == path == remote.fetch(file)
    server.put("/0.bin", body_of(1))
    newer = remote.look_up(file.url)
    assert remote.fetch(newer) != path
    assert (path.read_bytes(), remote.fetch(newer).read_bytes()) == (body_of(0), body_of(1))
    assert server.count() == 2


# Killed, stopped, forked --------------------------------------------------------------------------------------------


def _fetch_one(file) -> None:
    remote.fetch(file)


def _downloading(folder: Path) -> bool:
    return folder.exists() and any(name.startswith(".") for name in kept(folder))


@pytest.mark.parametrize("count", [scaled(30, 4)])
def test_what_a_killed_process_leaves_is_harmless(server, cache, count):
    folder = cache(3500)  # room for what is left and no more, so it must go
    for k, file in enumerate(shards(server, count, 3000)):
        server.script(f"/{k}.bin", Fault(stall=30.0))
        child = run(_fetch_one, file)
        assert wait_for(lambda path=f"/{k}.bin": server.count(path) and _downloading(folder))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert _downloading(folder)
        if k % 2:  # the next one wants another file: the room that is taken is freed for it
            file = remote.look_up(server.put(f"/other{k}.bin", body_of(k, 3000)))
        begun = time.monotonic()
        assert remote.fetch(file).read_bytes() == body_of(k, 3000)
        assert time.monotonic() - begun < 20.0  # not the minutes that a living one is waited for
        assert [name[-6:] for name in kept(folder)] == [".shard"]


def test_a_stopped_process_is_waited_for_and_then_not(server, cache, monkeypatch):
    folder = cache()
    (file,) = shards(server, 1)
    server.script("/0.bin", Fault(slow=1.5))
    child = run(_fetch_one, file)
    assert wait_for(lambda: server.count() and _downloading(folder))
    os.kill(child.pid, signal.SIGSTOP)
    monkeypatch.setenv("TOKENPIPE_RETRY_SECONDS", "0.2")
    monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "0.2")
    assert remote.fetch(file).read_bytes() == body_of(0)
    os.kill(child.pid, signal.SIGCONT)
    child.join()
    assert child.exitcode == 0
    assert remote.fetch(file).read_bytes() == body_of(0)
    assert len(kept(folder)) == 1


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(server, cache):
    folder = cache()
    (file,) = shards(server, 1)
    server.script("/0.bin", Fault(stall=30.0))
    middle = run(_fetch_and_fork, file, folder)
    assert wait_for(lambda: server.count() and (folder.parent / "pid").exists())
    pid = int((folder.parent / "pid").read_text())
    try:
        os.kill(middle.pid, signal.SIGKILL)
        middle.join()
        begun = time.monotonic()
        assert remote.fetch(file).read_bytes() == body_of(0)
        assert time.monotonic() - begun < 20.0
    finally:
        os.kill(pid, signal.SIGKILL)


def _fetch_and_fork(file, folder: Path) -> None:
    threading.Thread(target=remote.fetch, args=(file,), daemon=True).start()
    wait_for(lambda: _downloading(folder))
    if not (pid := os.fork()):
        time.sleep(120)
        os._exit(0)
    (folder.parent / "pid.new").write_text(str(pid))
    (folder.parent / "pid.new").rename(folder.parent / "pid")
    time.sleep(120)


def test_a_lock_on_a_file_that_its_holder_has_removed_is_none(tmp_path, monkeypatch):
    import fcntl

    right, path, first = fcntl.flock, tmp_path / "lock", [True]

    def flock(handle: int, how: int) -> None:
        if first.pop() if first else False:
            path.unlink()  # between the opening and the lock
        right(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert shard_cache._lock(path) is None
    handle = shard_cache._lock(path)
    assert handle is not None and shard_cache._lock(path) is None
    shard_cache._unlock(path, handle)
    assert not path.exists()


# Room ---------------------------------------------------------------------------------------------------------------


def test_what_comes_back_last_is_evicted_first(server, cache):
    folder = cache(5000)
    files = shards(server, 7)
    for k, distance in enumerate([0, 500, 100, 900, 300]):
        remote.fetch(files[k], distance)
    remote.fetch(files[5], 0)
    assert [remote.claim(file, 10_000) is not None for file in files] == [True, True, True, False, True, True, False]
    remote.claim(files[1], 0)
    remote.claim(files[1], 700)  # a time that has been said is not taken back
    remote.fetch(files[6])
    assert [remote.claim(file, 10_000) is not None for file in files] == [True, True, True, False, False, True, True]
    assert len(kept(folder)) == 5


def test_nothing_else_in_the_folder_is_touched(server, cache):
    folder = cache(2000)
    folder.mkdir(0o700)
    mine = {"a.bin": b"1" * 5000, ".0.shard.x": b"2", "0" * 64: b"3", "f" * 63 + ".shard": b"4", "notes.txt": b""}
    for name, body in mine.items():
        (folder / name).write_bytes(body)
        os.utime(folder / name, (0, 0))
    (folder / ("e" * 64 + ".shard")).symlink_to(folder / "a.bin")
    for file in shards(server, 6):
        remote.fetch(file)
    assert {name: (folder / name).read_bytes() for name in mine} == mine
    assert len([name for name in kept(folder) if name.endswith(".shard") and not (folder / name).is_symlink()]) == 3


def _read_on(files, seed: int, said, rounds: int) -> None:
    draw = random.Random(seed)
    held: list[tuple[int, mmap.mmap]] = []
    try:
        for _ in range(rounds):
            k = draw.randrange(len(files))
            while True:
                try:
                    with remote.fetch(files[k], draw.randrange(100)).open("rb") as file:
                        held.append((k, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
                    break
                except FileNotFoundError:  # evicted before it was opened
                    continue
            held = held[-6:]
            for number, body in held:
                assert body[:] == body_of(number), number
        said.put("")
    except BaseException as error:
        said.put(repr(error))


def test_readers_keep_what_is_evicted_under_them(server, cache):
    folder = cache(4500)
    files = shards(server, 12)
    said = FORK.SimpleQueue()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    readers = [run(_read_on, files, seed + k, said, scaled(1000, 60)) for k in range(4)]
    assert [said.get() for _ in readers] == [""] * 4
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4500
    assert server.count() > 12


def _size(path: Path) -> "int | None":
    try:
        return path.stat().st_size
    except OSError:
        return None


def test_what_is_being_downloaded_counts(server, cache):
    folder = cache(2500)
    files = shards(server, 3)
    for k in (0, 1):
        server.script(f"/{k}.bin", Fault(slow=0.3))
    threads = [threading.Thread(target=remote.fetch, args=(file,)) for file in files[:2]]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: folder.exists() and sum(name.startswith(".") for name in kept(folder)) == 2)
    remote.fetch(files[2])  # once one of these two is there, and can go
    assert sum(_size(path) or 0 for path in folder.iterdir()) <= 2500
    for thread in threads:
        thread.join()
    assert len(kept(folder)) == 2


def test_a_file_larger_than_the_cache_is_refused_with_both_numbers(server, cache):
    folder = cache(2000)
    (file,) = shards(server, 1, 2001)
    with pytest.raises(ConfigurationError, match=r"2001 bytes.*\(2000\)"):
        remote.fetch(file)
    assert not folder.exists() or not kept(folder)


def test_no_room_beside_other_downloads_is_said(server, cache, monkeypatch):
    cache(1500)
    files = shards(server, 2)
    server.script("/0.bin", Fault(stall=30.0))
    child = run(_fetch_one, files[0])
    assert wait_for(lambda: _downloading(Path(os.environ["TOKENPIPE_SHARDS"])))
    monkeypatch.setenv("TOKENPIPE_RETRY_SECONDS", "0.2")
    monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "0.2")
    with pytest.raises(RemoteFileError, match="no room for its 1000 bytes") as raised:
        remote.fetch(files[1])
    assert raised.value.errno == errno.ENOSPC
    child.kill()
    child.join()


def _fetch_on_a_full_disk(file, said) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    try:
        remote.fetch(file)
    except RemoteFileError as error:
        said.put(str(error))


def test_a_full_disk_is_named_and_leaves_nothing(server, cache):
    folder = cache()
    (file,) = shards(server, 1)
    said = FORK.SimpleQueue()
    run(_fetch_on_a_full_disk, file, said).join()
    assert "cannot be kept there" in (text := said.get()) and "TOKENPIPE_SHARDS" in text
    assert kept(folder) == []


@pytest.mark.parametrize("fault", [Fault(status=404), Fault(zeros=True), Fault(short=1), Fault(etag='"other"')])
def test_a_download_that_fails_leaves_nothing(server, cache, monkeypatch, fault):
    monkeypatch.setenv("TOKENPIPE_RETRIES", "1")
    folder = cache()
    file = remote.look_up(server.put("/a.bin", body_of(0), md5=True))
    server.script("/a.bin", always=fault)
    with pytest.raises(RemoteFileError):
        remote.fetch(file)
    assert kept(folder) == []
    server.script("/a.bin")
    assert remote.fetch(file).read_bytes() == body_of(0)


# Whose folder -------------------------------------------------------------------------------------------------------


def test_links_are_never_followed(server, cache, tmp_path):
    folder = cache()
    (file,) = shards(server, 1)
    path = remote.fetch(file)
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 1000)  # as long as the shard
    os.utime(victim, (1, 1))
    path.unlink()
    path.symlink_to(victim)
    assert remote.claim(file, 0) is None
    assert remote.fetch(file).read_bytes() == body_of(0)
    assert not path.is_symlink() and (victim.read_bytes(), victim.stat().st_mtime) == (b"v" * 1000, 1)
    path.unlink()
    path.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(RemoteFileError, match="cannot be kept"):
        remote.fetch(file)
    assert victim.read_bytes() == b"v" * 1000
    assert kept(folder) == [path.with_suffix(".lock").name]


def test_the_folder_is_this_users_alone(server, cache, tmp_path, monkeypatch):
    folder = cache()
    (file,) = shards(server, 1)
    remote.fetch(file)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "a file").write_bytes(b"")
    for wrong in (open_to_all, tmp_path / "a file", tmp_path / "a file" / "below"):
        monkeypatch.setenv("TOKENPIPE_SHARDS", str(wrong))
        with pytest.raises(ConfigurationError, match="TOKENPIPE_SHARDS"):
            remote.fetch(file)
    monkeypatch.setenv("TOKENPIPE_SHARDS", str(open_to_all / "own"))
    assert remote.fetch(file).parent == open_to_all / "own"
    monkeypatch.delenv("TOKENPIPE_SHARDS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert remote.fetch(file).parent == tmp_path / "users" / "tokenpipe" / "shards"


def test_a_deleted_folder_is_made_again(server, cache):
    folder = cache()
    (file,) = shards(server, 1)
    remote.fetch(file).unlink()
    folder.rmdir()
    assert remote.fetch(file).read_bytes() == body_of(0)


def test_names_are_of_hexadecimal_digits_whatever_the_url(cache):
    folder = cache()
    memory = fsspec.filesystem("memory")
    for k, name in enumerate(["../../etc/passwd", "a b\n", "é", "x" * 5000, "%2e%2e/%2e"]):
        memory.pipe(f"/odd/{name}", body_of(k))
        path = remote.fetch(remote.look_up(f"memory://odd/{name}"))
        assert path.parent == folder and path.read_bytes() == body_of(k)
    assert all(len(name) == 70 and set(name[:64]) <= set("0123456789abcdef") for name in kept(folder))


def test_the_cache_is_not_where_files_come_from(cache, tmp_path, monkeypatch):
    source = tmp_path / "source" / "deep"
    source.mkdir(parents=True)
    (source / "a.bin").write_bytes(body_of(0))
    file = remote.look_up(f"file://{source}/a.bin")
    for folder in (source, source / "in it", source.parent):
        monkeypatch.setenv("TOKENPIPE_SHARDS", str(folder))
        with pytest.raises(ConfigurationError, match="must not be, hold or be inside"):
            remote.fetch(file)
    cache()
    assert remote.fetch(file).read_bytes() == body_of(0)


@pytest.mark.parametrize("value", ["", "much", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(server, cache, monkeypatch, value):
    cache()
    (file,) = shards(server, 1)
    monkeypatch.setenv("TOKENPIPE_SHARDS_GIB", value)
    with pytest.raises(ConfigurationError, match="TOKENPIPE_SHARDS_GIB"):
        remote.fetch(file)
