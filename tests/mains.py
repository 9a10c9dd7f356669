"""Main processes that tests start to be killed, signalled or watched: python mains.py FUNCTION ARGUMENT…

What a test must know they print, a line each, at once.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from faulty import MICRO, Act, Log, Nap, Runs, alike, first, kind_of, megabyte, nap_for_ever
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService


def say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def loader_of(graph: Any, workers: int = 2, method: str = "forkserver", **settings: Any) -> DataLoader2:
    return DataLoader2(graph, reading_service=MultiProcessingReadingService(workers, method, **settings))


def firsts(items: Any, n: int) -> "list[int]":
    return [first(batch) for _, batch in zip(range(n), items, strict=False)]


def expected(n: int, start: int = 0) -> "list[int]":
    return [MICRO * k for k in range(start, start + n)]


# To be killed -------------------------------------------------------------------------------------------


def for_ever(folder: str, method: str, seconds: str = "0.001", stream: str = "") -> None:
    """Iterates, and says once that it does, with its workers' pids."""
    graph: Any = Runs(folder).training.map(Nap(float(seconds)), seeded=False)
    if stream:
        graph = IterableWrapper(range(10**9), deepcopy=False).sharding_filter().map(Nap(float(seconds)))
    say("begins")
    loader = loader_of(graph, 2, method)
    for k, _ in enumerate(loader):
        if k == 0:
            say("iterates", *loader.reading_service.worker_pids)


def stuck_for_ever(folder: str, method: str, what: str) -> None:
    """Its workers are stuck (in what ACTS says), and so is it, after a few batches."""
    graph = Runs(folder).training.map(Act(what, range(8, 400, 4), folder, times=None), seeded=False)
    loader = loader_of(graph, 2, method, stall_timeout=None)
    iterator = iter(loader)
    assert firsts(iterator, 2) == [0, 4]
    say("iterates", *loader.reading_service.worker_pids)
    next(iterator)


def with_a_child_of_its_own(folder: str, method: str, how: str) -> None:
    """Has children beside its workers, which outlive it and know nothing of them."""
    loader = loader_of(Runs(folder).training, 2, method)
    iterator = iter(loader)
    assert firsts(iterator, 3) == [0, 4, 8]
    if how == "fork":
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
    else:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], close_fds=False).pid
    say("child", child)
    say("iterates", *loader.reading_service.worker_pids)
    for _ in iterator:
        pass


def many_mains(folder: str, method: str, kills: str, seed: str, report: str) -> None:
    """Forks a main so many times, kills it at a moment of its own, and writes down who lives two seconds later."""
    from processes import MARK, children, in_shm, left_in_shm, marked, wait_for

    mark, me = os.environ[MARK], os.getpid()
    draw = random.Random(int(seed))
    found = []
    for k in range(int(kills)):
        before = in_shm()
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            try:
                loader = loader_of(Runs(folder).training.map(Nap(0.0005), seeded=False), 2, method)
                for j, _ in enumerate(loader):
                    if j == 0:
                        os.write(write, b"x")
            finally:
                os._exit(9)
        os.close(write)
        if k % 3:  # in the middle of its work; else while it starts
            os.read(read, 1)
        time.sleep(draw.random() * (0.15 if k % 3 else 0.5 if method == "fork" else 3))
        importing = set() if method == "fork" else children(pid)  # a fork server, or workers of spawn: may be
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(read)

        def others() -> "dict[int, str]":
            return {other: line for other, line in marked(mark).items() if other != me}

        wait_for(lambda: not others(), 2)
        lives = {other: line for other, line in others().items() if other not in importing}
        wait_for(lambda: not others(), 30)  # what is still importing does not hear of anything
        wait_for(lambda before=before: not left_in_shm(before), 2)
        found.append([status, lives | others(), sorted(left_in_shm(before))])
        for other in others():
            os.kill(other, signal.SIGKILL)
    Path(report).write_text(json.dumps(found))


# To be signalled ----------------------------------------------------------------------------------------


def saves_on_a_signal(folder: str, method: str, state: str, source: str = "indexed") -> None:
    """Sets a flag in the handler, saves after the batch, and leaves."""
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: told.append(number))
    graph: Any = Runs(folder).training.map(Nap(0.001), seeded=False)
    if source == "stream":
        graph = IterableWrapper(range(10**5)).shuffle().sharding_filter().map(Nap(0.001))
    loader = loader_of(graph, 2, method)
    if source == "stream":
        loader.seed(5)
    sha, count = hashlib.sha256(), 0
    for batch in loader:
        count += 1
        sha.update(str(batch["input_ids"].tolist() if source == "indexed" else batch).encode())
        if count == 1:
            say("iterates", *loader.reading_service.worker_pids)
        if told:
            break
    Path(state).write_text(json.dumps(loader.state_dict()))
    loader.shutdown()
    say("saved", count, sha.hexdigest())


def goes_on_after_a_signal(folder: str, method: str, log: str) -> None:
    """A handler that asks for a save only: the run goes on, and so does the replacing of workers."""
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: told.append(number))
    loader = loader_of(Runs(folder).training.map(Nap(0.001), seeded=False), 2, method)
    iterator = iter(loader)
    found = firsts(iterator, 5)
    say("iterates", *loader.reading_service.worker_pids)
    while not told:
        found += firsts(iterator, 1)
    for _ in range(3):
        os.kill(loader.reading_service.worker_pids[0], signal.SIGKILL)
        found += firsts(iterator, 60)
    assert found == expected(len(found)), found
    say("went on", len(found), loader.reading_service.replaced)
    loader.shutdown()


def interrupted(folder: str, method: str) -> None:
    """Knows nothing of signals."""
    loader = loader_of(Runs(folder).training.map(Nap(0.001), seeded=False), 2, method)
    for k, _ in enumerate(loader):
        if k == 2:
            say("iterates", *loader.reading_service.worker_pids)


def catches_interrupts(folder: str, method: str, times: str) -> None:
    """A notebook: interrupted in the middle of next(), it goes on with the same iterator."""
    loader = loader_of(Runs(folder).training.map(Nap(0.002), seeded=False), 2, method)
    iterator = iter(loader)
    found, caught = firsts(iterator, 1), 0
    say("iterates")
    while caught < int(times):
        try:
            while True:
                found.append(first(next(iterator)))
        except KeyboardInterrupt:
            caught += 1
            done = loader.state_dict()["consumed_samples"] // MICRO
            if len(found) == done - 1:  # it came between next() and append()
                found.append(MICRO * (done - 1))
            say("caught", caught)
    found += firsts(iterator, 50)
    assert found == expected(len(found)), found
    state = loader.state_dict()
    assert state["consumed_samples"] == MICRO * len(found), (state["consumed_samples"], len(found))
    loader.shutdown()
    say("all right", len(found))


def stopped_before_it_begins(folder: str, method: str, when: str) -> None:
    """Its workers are stopped as soon as they are there, or between two iterations."""
    loader = loader_of(Runs(folder).training, 2, method, stall_timeout=0.5)
    iterator = iter(loader)
    if when == "iter":
        assert firsts(iterator, 3) == expected(3)
        os.kill(loader.reading_service.worker_pids[0], signal.SIGSTOP)
        assert firsts(iter(loader), 30) == expected(30, 3)
    else:
        for pid in loader.reading_service.worker_pids:
            os.kill(pid, signal.SIGSTOP)
        assert firsts(iterator, 30) == expected(30)
    loader.shutdown()
    say("all right")


# To leave in many ways ----------------------------------------------------------------------------------


def leaves(folder: str, method: str, how: str) -> None:
    loader = loader_of(Runs(folder).training.map(Nap(0.001), seeded=False), 2, method)
    if how == "before a batch":
        iter(loader)
        return
    for k, batch in enumerate(loader):
        assert first(batch) == MICRO * k
        if k == 5:
            say("leaves", *loader.reading_service.worker_pids)
            if how == "sys.exit":
                sys.exit(0)
            if how == "exception":
                raise ZeroDivisionError("in the training loop")
            if how == "deleted":
                del loader
                gc.collect()
                return
            if how == "kept in a cycle":
                cycle: list[Any] = [loader]
                cycle.append(cycle)
                globals()["kept"] = cycle
                return
            if how == "kept in a module":
                json.kept = loader, batch  # type: ignore[attr-defined]
                return
            if how == "stuck worker":
                os.kill(loader.reading_service.worker_pids[0], signal.SIGSTOP)
                return
            if how == "a thread that goes on":
                threading.Thread(target=nap_for_ever, daemon=True).start()
                return
            if how == "in a thread":
                globals()["kept"] = loader
                threading.Thread(target=lambda: firsts(iter(loader), 10**9), daemon=True).start()
                time.sleep(0.2)
                return
            if how == "os._exit":
                os._exit(0)
            if how == "with":
                with loader:
                    return
            return


def forks_itself(folder: str, method: str, how: str) -> None:
    """A child of the user's, by os.fork in the middle of an epoch, ends in its own way; the workers stay."""
    loader = loader_of(Runs(folder).training.map(Nap(0.001), seeded=False), 2, method)
    iterator = iter(loader)
    found = firsts(iterator, 10)
    workers = loader.reading_service.worker_pids
    child = os.fork()
    if not child:
        if how == "shutdown":
            loader.shutdown()
        if how == "del":
            del loader, iterator
            gc.collect()
        if how == "next":  # whatever this does in the child, the parent must not notice
            with contextlib.suppress(Exception):
                next(iterator)
        if how == "_exit":
            os._exit(0)
        sys.exit(0)
    found += firsts(iterator, 10)
    os.waitpid(child, 0)
    found += firsts(iterator, 40)
    assert found == expected(60), found
    assert loader.reading_service.worker_pids == workers, "the workers were replaced"
    assert loader.reading_service.replaced == 0
    loader.shutdown()
    say("all right")


def in_threads(folder: str, method: str) -> None:
    """Made in a thread that ends, iterated in another, shut down in a third."""
    made: dict[str, Any] = {}

    def run(function: Any) -> None:
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), f"{function} hangs"
        if errors:
            raise errors[0]

    def make() -> None:
        made["loader"] = loader_of(Runs(folder).training, 2, method)
        made["iterator"] = iter(made["loader"])
        made["found"] = firsts(made["iterator"], 5)
        made["pids"] = made["loader"].reading_service.worker_pids

    def go_on() -> None:
        made["found"] += firsts(made["iterator"], 50)

    run(make)
    time.sleep(0.5)  # what is tied to a thread's life ends now
    run(go_on)
    go_on()
    assert made["found"] == expected(105), made["found"]
    assert made["loader"].reading_service.worker_pids == made["pids"]
    assert made["loader"].reading_service.replaced == 0
    os.kill(made["pids"][0], signal.SIGKILL)
    made["found"] = []
    run(lambda: made["found"].extend(firsts(made["iterator"], 50)))
    assert made["found"] == expected(50, 105)
    run(made["loader"].shutdown)
    say("all right")


def in_a_daemon(folder: str, method: str) -> None:
    """A daemonic process of multiprocessing's may have no children."""
    process = multiprocessing.get_context("fork").Process(target=_daemon, args=(folder, method), daemon=True)
    process.start()
    process.join()
    say("ended", process.exitcode)


def _daemon(folder: str, method: str) -> None:
    try:
        found = firsts(loader_of(Runs(folder).training, 2, method), 20)
    except Exception as error:
        say("raised", type(error).__name__, str(error).replace("\n", " "))
    else:
        say("found" if found == expected(20) else "wrong", found)


def with_little_shm(folder: str, method: str) -> None:
    """Large items through workers, and some kept, on a /dev/shm of 4 MiB."""
    size = os.statvfs("/dev/shm")
    assert size.f_blocks * size.f_frsize <= 4 << 20
    with loader_of(Runs(folder).training.map(megabyte, seeded=False), 2, method) as loader:
        kept = [batch for _, batch in zip(range(60), loader, strict=False)]
    for k, batch in enumerate(kept):
        assert batch["n"] == MICRO * k
        assert torch.equal(batch["ids"], torch.full((1 << 18,), MICRO * k, dtype=torch.int32))
    stream = IterableWrapper(range(30)).sharding_filter().map(_large)
    with loader_of(stream, 2, method) as loader:
        assert [(int(a[0]), a.size) for a in loader] == [(k, 500_000) for k in range(30)]
    say("all right")


def _large(k: int) -> Any:
    return np.full(500_000, k)


def capped(folder: str, method: str) -> None:
    """TOKENPIPE_MAX_WORKERS counts what lives, over all loaders."""
    os.environ["TOKENPIPE_MAX_WORKERS"] = "3"
    graph = Runs(folder).training

    def live(loader: DataLoader2) -> int:
        return len(loader.reading_service.worker_pids)

    with loader_of(graph, 2, method) as one:
        assert firsts(one, 10) == expected(10)
        assert live(one) == 2
        with loader_of(graph, 4, method) as two, loader_of(graph, 4, method) as three:
            assert firsts(two, 10) == firsts(three, 10) == expected(10)
            assert (live(two), live(three)) == (1, 1)
            assert firsts(one, 10) == expected(10, 10)
            state = three.state_dict()
    for _ in range(3):  # what was shut down, left or killed gives its place back
        again = loader_of(graph, 5, method)
        again.load_state_dict(state)
        iterator, place = iter(again), 10
        for _ in range(4):
            assert firsts(iterator, 20) == expected(20, place)
            place += 20
            assert live(again) == 3
            os.kill(again.reading_service.worker_pids[-1], signal.SIGKILL)
        del again, iterator
        gc.collect()
    with loader_of(IterableWrapper(range(9)).sharding_filter(), 5, method) as stream:
        try:  # a stream's workers cannot be fewer than were asked for
            assert list(stream) == list(range(9))
        except Exception as error:
            assert "TOKENPIPE_MAX_WORKERS" in str(error), error
    say("all right")


def with_few_descriptors(folder: str, method: str) -> None:
    """Keeps more batches than it may have files open."""
    loader = loader_of(Runs(folder).training.map(kind_of, seeded=False), 2, method)
    iterator = iter(loader)
    next(iterator)
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    kept = [item for _, item in zip(range(600), iterator, strict=False)]
    again = DataLoader2(Runs(folder).training.map(kind_of, seeded=False))
    for (k, item), other in zip(enumerate(kept, 1), list(zip(range(601), again, strict=False))[1:], strict=True):
        assert alike(item, other[1]), k
    loader.shutdown()
    say("all right")


def with_a_file_system(folder: str, method: str) -> None:
    """The loop thread of an asynchronous file system lives in the parent first; then workers use it."""
    import fsspec.asyn

    fsspec.asyn.sync(fsspec.asyn.get_loop(), _soon)
    assert any("fsspec" in thread.name.lower() for thread in threading.enumerate()), threading.enumerate()
    graph = Runs(folder).training.map(_through_a_loop, seeded=False)
    with loader_of(graph, 2, method, stall_timeout=10.0) as loader:
        assert [n for _, n in zip(range(40), loader, strict=False)] == [n + 1 for n in expected(40)]
        assert loader.reading_service.replaced == 0
    say("all right")


async def _soon(value: int = 0) -> int:
    import asyncio

    await asyncio.sleep(0.001)
    return value + 1


def _through_a_loop(batch: Any) -> int:
    import fsspec.asyn

    return fsspec.asyn.sync(fsspec.asyn.get_loop(), _soon, first(batch), timeout=20)


def first_to_be_read(folder: str, method: str) -> None:
    """As a script without a guard around its main part is read again in a child that imports it."""
    logged = Log(Path(folder, "read.log"))
    with loader_of(Runs(folder).training.map(logged, seeded=False), 2, method) as loader:
        assert firsts(loader, 20) == expected(20)
    say("all right")


if __name__ == "__main__":
    # a shell that began the tests in the background has interrupts ignored, and processes inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](*sys.argv[2:])
