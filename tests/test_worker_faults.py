"""Workers and mains that are killed, stopped, stuck, signalled, left: one stream, and nothing stays behind."""

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import faulty
from faulty import ACTS, MICRO, Act, Log, Nap, Runs, first
from processes import (
    METHODS,
    PATIENCE,
    alive,
    children,
    command,
    descendants,
    environment,
    gone,
    in_shm,
    left_in_shm,
    main,
    scaled,
    state_of,
    wait_for,
)
from tokenpipe.datapipes.errors import TokenpipeError, WorkerDiedError, WorkerError, WorkerStalledError
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

pytestmark = [pytest.mark.sampled(1), pytest.mark.alone]  # each case starts processes, and signals them


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def loader_of(graph: Any, workers: int = 2, method: Any = "fork", **settings: Any) -> DataLoader2:
    return DataLoader2(graph, reading_service=MultiProcessingReadingService(workers, method, **settings))


def firsts(items: Any, n: int = 10**9) -> "list[int]":
    return [first(batch) for _, batch in zip(range(n), items, strict=False)]


def numbers(start: int, n: int) -> "list[int]":
    return [MICRO * k for k in range(start, start + n)]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def sha_of(batches: Any) -> str:
    sha = hashlib.sha256()
    for batch in batches:
        sha.update(batch["input_ids"].numpy().tobytes() + batch["sample_numbers"].numpy().tobytes())
    return sha.hexdigest()


def replaced(loader: DataLoader2) -> int:
    return loader.reading_service.replaced


# A worker is killed -------------------------------------------------------------------------------------


class Sender(threading.Thread):
    """Sends a signal to workers of a loader at random moments, from a thread, so also while main is in next()."""

    def __init__(self, loader: DataLoader2, seed: int, times: int, number: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.count = 0  # batches that main has
        self.loader, self.draw, self.times, self.number, self.pause = loader, random.Random(seed), times, number, pause
        self.sent = 0
        self.ended = threading.Event()

    def run(self) -> None:
        sent: set[int] = set()
        while self.sent < self.times and not self.ended.is_set():
            time.sleep(self.draw.random() * self.pause)
            if self.sent % 2:  # some are hit while they start, not all
                enough = self.count + self.draw.randrange(1, 40)
                wait_for(lambda enough=enough: self.count >= enough, 5, 0.001)
            ours = [pid for pid in self.loader.reading_service.worker_pids if pid not in sent and alive(pid)]
            if ours:
                pid = self.draw.choice(ours)
                sent.add(pid)
                os.kill(pid, self.number)
                self.sent += 1
        self.ended.set()


@pytest.mark.parametrize(
    ("method", "kills"), [("fork", scaled(200, 60)), ("forkserver", scaled(200, 40)), ("spawn", scaled(30, 2))]
)
def test_kills_at_random_moments_leave_the_stream_as_it_is(runs, method, kills):
    seed = random.randrange(10**9)
    print("seed", seed)
    graph = runs.training.map(Nap(0.002, every=11), seeded=False)
    with loader_of(graph, 2, method) as loader:
        sender = Sender(loader, seed, kills, signal.SIGKILL, 2.0 if method == "spawn" else 0.04)
        iterator = iter(loader)
        sha, count = hashlib.sha256(), 0
        sender.start()
        draw = random.Random(seed + 1)
        try:
            while not sender.ended.is_set() or count % 100:
                batch = next(iterator)
                sha.update(batch["input_ids"].numpy().tobytes() + batch["sample_numbers"].numpy().tobytes())
                count += 1
                sender.count = count
                if draw.random() < 0.02:
                    time.sleep(0.005)  # the workers are idle then
        finally:
            sender.ended.set()
            sender.join()
        assert sender.sent == kills
        assert kills - 2 <= replaced(loader) <= kills
        assert loader.state_dict()["consumed_samples"] == count * MICRO
    assert sha.hexdigest() == sha_of(itertools.islice(DataLoader2(runs.training), count)), f"seed {seed}"


@pytest.mark.parametrize("what", ["kill", "exit 0", "exit 7", "segfault", "abort"])
def test_a_death_in_the_middle_of_a_batch_once_or_twice_is_not_noticed(runs, what):
    with loader_of(runs.training.map(Act(what, [20, 80], runs.folder, times=2), seeded=False)) as loader:
        assert firsts(loader, 60) == numbers(0, 60)
        assert replaced(loader) == 4
        assert len(loader.reading_service.worker_pids) == 2


NAMED = {"kill": "SIGKILL", "exit 0": "exit", "exit 7": "7", "segfault": "SIGSEGV", "abort": "SIGABRT"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", NAMED)
def test_a_batch_that_kills_three_workers_is_an_error_with_signal_batch_and_node(runs, what, workers):
    act = Act(what, 20, runs.folder, times=None)
    graph = runs.training.map(act, seeded=False)
    before = descendants()
    loader = loader_of(graph, workers)
    iterator = iter(loader)
    assert firsts(iterator, 5) == numbers(0, 5), "all that was before it is delivered"
    with pytest.raises(WorkerDiedError) as caught:
        next(iterator)
    text = str(caught.value)
    assert NAMED[what] in text, text
    assert "map" in text, "the node"
    assert "5" in text, "the batch's number, or"
    assert "20" in text, "its first sample"
    assert act.happened(20) == 3, "three workers died of it, no more"
    assert isinstance(caught.value, WorkerError)
    assert isinstance(caught.value, RuntimeError)
    state = loader.state_dict()
    assert state["consumed_samples"] == 20
    assert gone(descendants() - before, 2)
    with DataLoader2.from_state(state, runs.training, MultiProcessingReadingService(2, "fork")) as again:
        assert firsts(again, 5) == numbers(5, 5), "without what killed it, the run goes on"
    assert firsts(DataLoader2.from_state(state, graph), 3) == numbers(5, 3)


def test_an_error_of_a_batch_ahead_is_raised_in_its_turn_only(runs):
    graph = runs.training.map(Act("kill", 200, runs.folder, times=None), seeded=False)
    with loader_of(graph, 2, worker_prefetch_cnt=40, main_prefetch_cnt=40) as loader:
        assert firsts(loader, 5) == numbers(0, 5)
        time.sleep(0.5)
        assert firsts(loader, 30) == numbers(5, 30)
        loader.seek(100)
        assert firsts(loader, 5) == numbers(200, 5)
        loader.seek(20)  # sample 160
        iterator = iter(loader)
        assert firsts(iterator, 10) == numbers(40, 10)
        with pytest.raises(WorkerDiedError):
            next(iterator)


def test_numbers_that_only_wait_in_a_dead_workers_queue_do_not_count(runs):
    """Twenty batches in a row kill their worker once each; those behind them were dealt to all of the dead."""
    graph = runs.training.map(Act("kill", range(0, 80, 4), runs.folder, times=1), seeded=False)
    with loader_of(graph, 1, worker_prefetch_cnt=40) as loader:
        assert firsts(loader, 60) == numbers(0, 60)
        assert replaced(loader) == 20


def test_a_batch_may_kill_two_workers_each_time_it_is_made(runs):
    """A restart makes it anew: deaths of an earlier making do not count for a later one that went well."""
    act = Act("kill", 8, runs.folder, times=2)
    with loader_of(runs.training.map(act, seeded=False)) as loader:
        assert firsts(loader, 10) == numbers(0, 10)
        for k in range(2, 4):
            loader.restart()
            act_again = Path(runs.folder, "kill-8-1")
            act_again.unlink()  # one more turn
            assert firsts(loader, 10) == numbers(0, 10)
            assert replaced(loader) == k + 1


def test_deaths_of_idle_workers_never_raise(runs):
    with loader_of(runs.training) as loader:
        iterator = iter(loader)
        place = 0
        for k in range(12):
            time.sleep(0.02)  # all that may be made ahead is made
            for pid in loader.reading_service.worker_pids[: 1 + k % 2]:
                os.kill(pid, signal.SIGKILL)
            if k % 3 == 0:
                assert firsts(iterator, 40) == numbers(place, 40)
                place += 40
        assert firsts(iterator, 100) == numbers(place, 100)


def test_idle_workers_killed_many_times_over_before_the_same_batch_never_raise(runs):
    """Main reads one batch, then nothing: each time the workers wait with the same numbers before them."""
    with loader_of(runs.training, 2, worker_prefetch_cnt=2, main_prefetch_cnt=0) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 1) == [0]
        for _ in range(8):
            pids = loader.reading_service.worker_pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert gone(pids)
            loader.state_dict()
        assert firsts(iterator, 30) == numbers(1, 30)


def test_all_workers_killed_at_once_over_and_over(runs):
    with loader_of(runs.training, 3) as loader:
        iterator = iter(loader)
        for k in range(8):
            assert firsts(iterator, 30) == numbers(30 * k, 30)
            for pid in loader.reading_service.worker_pids:
                os.kill(pid, signal.SIGKILL)
        assert firsts(iterator, 30) == numbers(240, 30)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_killed_between_iterations_are_replaced_in_the_next_one(runs, method):
    with loader_of(runs.finite(40), 2, method) as loader:
        for _ in range(4):
            assert firsts(loader) == numbers(0, 10)
            for pid in loader.reading_service.worker_pids:
                os.kill(pid, signal.SIGKILL)
        loader.seek(1)
        for pid in loader.reading_service.worker_pids:
            os.kill(pid, signal.SIGKILL)
        assert len(firsts(loader)) == 9


def test_workers_killed_while_paused_or_changed_or_moved(runs):
    draw = random.Random(5)
    plain = DataLoader2(runs.training)
    with loader_of(runs.training) as loader:
        iterator, other = iter(loader), iter(plain)
        iterator.limit(5)
        other.limit(5)
        for k in range(10):
            assert [b["input_ids"].tolist() for b in iterator] == [b["input_ids"].tolist() for b in other]
            os.kill(draw.choice(loader.reading_service.worker_pids), signal.SIGKILL)
            for each in (loader, plain):
                if k % 3 == 0:
                    each.update_weights([1 + k, 2])
                elif k % 3 == 1:
                    each.jump(k)
            for each in (iterator, other):
                each.resume()
        for each in (loader, plain):
            each.seek(3)
        os.kill(loader.reading_service.worker_pids[0], signal.SIGKILL)
        assert [b["input_ids"].tolist() for _, b in zip(range(30), loader, strict=False)] == [
            b["input_ids"].tolist() for _, b in zip(range(30), plain, strict=False)
        ]


def test_a_worker_killed_during_shutdown_is_no_error(runs):
    for k in range(10):
        loader = loader_of(runs.training)
        firsts(loader, k)
        pids = loader.reading_service.worker_pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL if k % 2 else signal.SIGSTOP)
        loader.shutdown()
        assert gone(pids, 2)


def test_the_server_that_starts_workers_may_be_killed_too(runs):
    with loader_of(runs.training, 2, "forkserver") as loader:
        iterator = iter(loader)
        assert firsts(iterator, 10) == numbers(0, 10)
        workers = loader.reading_service.worker_pids
        servers = {pid for pid in children() if "forkserver" in command(pid)} - {*workers}
        assert servers
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert firsts(iterator, 100) == numbers(10, 100)


def test_what_a_killed_worker_had_made_is_delivered_or_made_again_never_twice(runs):
    log = Log(runs.folder / "made.log")
    with loader_of(runs.training.map(log, seeded=False), 1) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 3) == numbers(0, 3)
        wait_for(lambda: len(log.lines()) > 8, 1)
        os.kill(loader.reading_service.worker_pids[0], signal.SIGKILL)
        assert firsts(iterator, 60) == numbers(3, 60)


# A worker is stopped or stuck ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stopped_workers_hold_up_nothing_and_the_stream_stays_as_it_is(runs, method):
    """Each is replaced, or continued where that is all it takes."""
    seed, stops = random.randrange(10**9), scaled(50, 4)
    print("seed", seed)
    draw = random.Random(seed)
    graph = runs.training.map(Nap(0.001), seeded=False).map(faulty.with_pid, seeded=False)
    with loader_of(graph, 2, method, stall_timeout=0.5) as loader:
        iterator = iter(loader)
        sha, count, at_work = hashlib.sha256(), 0, set()

        def go_on() -> None:
            nonlocal count
            batch, pid = next(iterator)
            at_work.add(pid)
            sha.update(batch["input_ids"].numpy().tobytes() + batch["sample_numbers"].numpy().tobytes())
            count += 1
            assert count < 10**5, "a stopped worker is never missed"

        for _ in range(stops):
            for _ in range(draw.randrange(30)):
                go_on()
            while not (ours := at_work & {*loader.reading_service.worker_pids}):
                go_on()
            stopped = draw.choice(sorted(ours))
            os.kill(stopped, signal.SIGSTOP)
            assert wait_for(lambda pid=stopped: state_of(pid) == "T", 10)
            while state_of(stopped) == "T":
                go_on()
    assert sha.hexdigest() == sha_of(itertools.islice(DataLoader2(runs.training), count)), f"seed {seed}"


def test_all_workers_stopped_at_once_hold_up_nothing(runs):
    with loader_of(runs.training, 2, stall_timeout=0.5) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 5) == numbers(0, 5)
        for pid in loader.reading_service.worker_pids:
            os.kill(pid, signal.SIGSTOP)
        assert firsts(iterator, 100) == numbers(5, 100)


@pytest.mark.parametrize("what", ["nap", "stop", "nap holding the GIL"])
def test_a_function_that_is_stuck_once_is_not_noticed(runs, what):
    with loader_of(runs.training.map(Act(what, 20, runs.folder), seeded=False), 2, stall_timeout=0.5) as loader:
        assert firsts(loader, 60) == numbers(0, 60)
        assert replaced(loader) == 1 or what == "stop"  # that may be continued


@pytest.mark.parametrize("what", ["nap", "nap holding the GIL"])
def test_a_batch_that_stalls_twice_is_an_error_with_batch_node_and_stack(runs, what):
    act = Act(what, 20, runs.folder, times=None)
    before = descendants()
    loader = loader_of(runs.training.map(act, seeded=False), 2, stall_timeout=0.5)
    iterator = iter(loader)
    assert firsts(iterator, 5) == numbers(0, 5)
    with pytest.raises(WorkerStalledError) as caught:
        next(iterator)
    text = str(caught.value)
    assert "map" in text, text
    assert "5" in text
    assert "20" in text
    assert "0.5" in text, "the limit"
    if what == "nap":
        assert "nap_for_ever" in text, f"the stack of what is stuck: {text}"
        assert "faulty.py" in text
    assert isinstance(caught.value, WorkerError)
    assert act.happened(20) == 2, "one replay"
    assert loader.state_dict()["consumed_samples"] == 20
    assert gone(descendants() - before, 2)


@pytest.mark.parametrize("when", ["start", "iter"])
def test_a_worker_that_is_stopped_before_it_has_begun_is_replaced_too(runs, tmp_path, when):
    with main("stopped_before_it_begins", tmp_path, "fork", when, cwd=tmp_path) as started:
        assert started.wait(30) == 0, started.told()
        started.line("all right")


def test_a_limit_is_on_by_default_and_may_be_left_out():
    assert MultiProcessingReadingService(1).stall_timeout == 120.0
    assert MultiProcessingReadingService(1, stall_timeout=None).stall_timeout is None


def test_a_slow_reader_a_long_queue_and_slow_batches_are_no_stalls(runs):
    """What counts is how long a worker is at one batch: not how long that waits, nor how long main does not ask."""
    graph = runs.training.map(Nap(0.25, every=2), seeded=False)
    with loader_of(graph, 1, stall_timeout=0.6, worker_prefetch_cnt=20) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 2) == [0, 4]
        time.sleep(1.5)  # main computes; the worker is then idle, with everything made
        assert firsts(iterator, 6) == numbers(2, 6)
        assert replaced(loader) == 0
    with loader_of(runs.training, 2, stall_timeout=0.5) as loader:
        iterator = iter(loader)
        for k in range(3):
            assert firsts(iterator, 30) == numbers(30 * k, 30)
            time.sleep(0.8)
        assert replaced(loader) == 0


def test_a_worker_stopped_and_continued_in_time_is_left_alone(runs):
    with loader_of(runs.training, 2, stall_timeout=20.0) as loader:
        iterator = iter(loader)
        for k in range(5):
            pid = loader.reading_service.worker_pids[k % 2]
            os.kill(pid, signal.SIGSTOP)
            timer = threading.Timer(0.1, os.kill, (pid, signal.SIGCONT))
            timer.start()
            assert firsts(iterator, 40) == numbers(40 * k, 40)
            timer.join()
        assert replaced(loader) == 0


def test_a_stall_is_seen_where_main_reads_nothing_but_that_batch(runs):
    """One worker, nothing ahead: next() itself must notice, and go on with the one replay."""
    graph = runs.training.map(Act("nap", [0, 8, 12], runs.folder), seeded=False)
    with loader_of(graph, 1, stall_timeout=0.4, worker_prefetch_cnt=0, main_prefetch_cnt=0) as loader:
        assert firsts(loader, 6) == numbers(0, 6)
        assert replaced(loader) == 3


def test_stuck_workers_end_at_shutdown_at_once(runs):
    """torchdata, defect 13: it said to wait 20 s for them, did not, and ended nothing."""
    for what in ("nap", "stop", "nap holding the GIL"):
        folder = runs.folder / what.replace(" ", "-")
        folder.mkdir()
        graph = runs.training.map(Act(what, range(8, 400, 4), folder, times=None), seeded=False)
        loader = loader_of(graph, 2, stall_timeout=None)
        iterator = iter(loader)
        assert firsts(iterator, 2) == [0, 4]
        pids = loader.reading_service.worker_pids
        began = time.monotonic()
        loader.shutdown()
        assert gone(pids, 2)
        assert time.monotonic() - began < 5


def test_a_death_and_a_stall_of_one_batch_go_on(runs):
    graph = runs.training.map(Act("kill", 20, runs.folder), seeded=False).map(Act("nap", 20, runs.folder), seeded=False)
    with loader_of(graph, 2, stall_timeout=0.5) as loader:
        assert firsts(loader, 30) == numbers(0, 30)
        assert replaced(loader) == 2


# The main process is killed -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kills"), [("fork", scaled(30, 6)), ("forkserver", scaled(30, 3)), ("spawn", scaled(30, 3))]
)
def test_two_seconds_after_main_was_killed_nothing_of_it_lives_or_lies_around(runs, tmp_path, method, kills):
    seed = random.randrange(10**9)
    print("seed", seed)
    report = tmp_path / "report"
    with main("many_mains", tmp_path, method, kills, seed, report, cwd=tmp_path) as started:
        assert started.wait(PATIENCE + 15 * kills) == 0, started.told()
        found = json.loads(report.read_text())
        print(found)
        assert [status for status, _, _ in found] == [signal.SIGKILL] * kills, started.told()
        assert all(not lives for _, lives, _ in found), (seed, found)
        assert all(not left for _, _, left in found), (seed, found)
        assert not started.left(), "when all is over too"


@pytest.mark.parametrize("method", METHODS)
def test_a_main_of_its_own_killed_in_the_middle_takes_its_workers_with_it(runs, tmp_path, method):
    """torchdata, defect 5."""
    before = in_shm()
    with main("for_ever", tmp_path, method, 0.001, "stream" if method == "fork" else "", cwd=tmp_path) as started:
        pids = [int(word) for word in started.line("iterates").split()]
        assert len(pids) == 2
        assert {*pids} <= started.others().keys()
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        assert not started.left()
        assert gone(pids, 2)
        assert not left_in_shm(before)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("what", ["nap", "stop", "nap holding the GIL"])
def test_workers_that_are_stuck_or_stopped_end_with_main_too(runs, tmp_path, what, method):
    with main("stuck_for_ever", tmp_path, method, what, cwd=tmp_path) as started:
        pids = [int(word) for word in started.line("iterates").split()]
        if what == "stop":
            assert wait_for(lambda: all(state_of(pid) == "T" for pid in pids), 10)
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        assert not started.left()
        assert gone(pids, 2)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_of_the_users_own_that_outlive_main_do_not_keep_workers_alive(runs, tmp_path, how, method):
    """A forked child has a copy of every descriptor that main had."""
    with main("with_a_child_of_its_own", tmp_path, method, how, cwd=tmp_path) as started:
        pids = [int(word) for word in started.line("iterates").split()]
        child = int(started.line("child"))
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        assert gone(pids, 2), "workers live on while a child of the user's does"
        assert alive(child)


# Signals to the whole group -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_main_can_save_after_the_schedulers_signal_to_the_group(runs, tmp_path, method, number):
    seed = random.randrange(10**9)
    print("seed", seed)
    state = tmp_path / "state.json"
    with main("saves_on_a_signal", tmp_path, method, state, cwd=tmp_path) as started:
        pids = [int(word) for word in started.line("iterates").split()]
        time.sleep(random.Random(seed).random() * 0.1)
        os.killpg(started.pid, number)
        assert started.wait() == 0, started.told()
        count, sha = started.line("saved").split()
        assert not started.left()
        assert gone(pids, 2)
        assert not started.err.read_text(), started.told()
    saved = json.loads(state.read_text())
    assert saved["consumed_samples"] == int(count) * MICRO
    digest = hashlib.sha256()
    plain = DataLoader2(runs.training)
    for batch in itertools.islice(plain, int(count)):
        digest.update(str(batch["input_ids"].tolist()).encode())
    assert digest.hexdigest() == sha
    assert saved == plain.state_dict()
    with DataLoader2.from_state(saved, runs.training, MultiProcessingReadingService(2, method)) as again:
        assert firsts(again, 20) == numbers(int(count), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_run_that_only_saves_at_a_signal_goes_on_and_still_replaces_workers(runs, tmp_path, method, number):
    with main("goes_on_after_a_signal", tmp_path, method, tmp_path / "log", cwd=tmp_path) as started:
        started.line("iterates")
        os.killpg(started.pid, number)
        assert started.wait() == 0, started.told()
        assert int(started.line("went on").split()[1]) >= 3  # the signal may end a fork server, and its start too


def test_a_worker_is_deaf_to_what_is_meant_for_main(runs):
    with loader_of(runs.training) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 5) == numbers(0, 5)
        pids = loader.reading_service.worker_pids
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            for pid in pids:
                os.kill(pid, number)
        assert firsts(iterator, 100) == numbers(5, 100)
        assert loader.reading_service.worker_pids == pids
        assert replaced(loader) == 0


# Ctrl-C -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_script_ends_cleanly_and_the_next_run_works(runs, tmp_path, method):
    seed = random.randrange(10**9)
    print("seed", seed)
    draw = random.Random(seed)
    for k in range(scaled(20, 2)):
        before = in_shm()
        with main("interrupted", tmp_path, method, cwd=tmp_path) as started:
            started.line("iterates")
            time.sleep(draw.random() * 0.1)
            if k % 2:
                os.killpg(started.pid, signal.SIGINT)  # as the terminal does
            else:
                os.kill(started.pid, signal.SIGINT)
            assert started.wait() in (-signal.SIGINT, 130, 1), started.told()
            assert not started.left(), started.told()
            assert started.err.read_text().count("KeyboardInterrupt") == 1, started.told()
            assert started.err.read_text().count("Traceback") == 1, started.told()
            assert not left_in_shm(before)
    with loader_of(runs.training, 2, method) as loader:
        assert firsts(loader, 10) == numbers(0, 10)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ctrl_c_that_the_caller_catches_loses_and_repeats_nothing(runs, tmp_path, method):
    seed, times = random.randrange(10**9), scaled(200, 20)
    print("seed", seed)
    draw = random.Random(seed)
    with main("catches_interrupts", tmp_path, method, times, cwd=tmp_path) as started:
        started.line("iterates")
        for k in range(times):
            time.sleep(draw.random() * 0.05)
            os.killpg(started.pid, signal.SIGINT)
            started.line(f"caught {k + 1}")
        assert started.wait() == 0, f"seed {seed}: {started.told()}"
        started.line("all right")
        assert not started.left()


# Leaving ------------------------------------------------------------------------------------------------

LEFT = [
    "before a batch",
    "end",
    "sys.exit",
    "deleted",
    "kept in a cycle",
    "kept in a module",
    "stuck worker",
    "a thread that goes on",
    "in a thread",
    "os._exit",
    "with",
]


@pytest.mark.parametrize("how", LEFT)
def test_a_main_that_leaves_without_a_shutdown_ends_at_once_and_says_nothing(runs, tmp_path, how):
    method = METHODS[LEFT.index(how) % 3]
    before = in_shm()
    with main("leaves", tmp_path, method, how, cwd=tmp_path) as started:
        if how != "before a batch":
            started.line("leaves")
        assert started.wait(20) == 0, started.told()
        assert not started.left(), started.told()
        assert not left_in_shm(before)
        assert started.err.read_text() == "" or how == "in a thread", started.told()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_exception_in_the_training_loop_ends_main_with_that_alone(runs, tmp_path, method):
    with main("leaves", tmp_path, method, "exception", cwd=tmp_path) as started:
        assert started.wait(20) == 1, started.told()
        assert not started.left()
        text = started.err.read_text()
        assert text.rstrip().endswith("ZeroDivisionError: in the training loop"), text
        assert text.count("Traceback") == 1, text


@pytest.mark.parametrize("how", ["_exit", "exit", "shutdown", "del", "next"])
def test_a_fork_of_main_that_ends_does_no_harm_to_its_workers(runs, tmp_path, how):
    for method in ("fork", "forkserver"):
        with main("forks_itself", tmp_path, method, how, cwd=tmp_path) as started:
            assert started.wait() == 0, started.told()
            started.line("all right")
            assert not started.left()


@pytest.mark.parametrize("method", METHODS)
def test_in_a_daemonic_process_it_works_or_says_why_it_cannot(runs, tmp_path, method):
    with main("in_a_daemon", tmp_path, method, cwd=tmp_path) as started:
        assert started.wait() == 0, started.told()
        assert started.line("ended") == "0", started.told()
        said = " ".join(started.said())
        assert ("raised" in said and "daemonic" in said) or "found" in said, started.told()
        assert not started.left()


@pytest.mark.parametrize("method", METHODS)
def test_an_asynchronous_file_system_may_have_been_used_before(runs, tmp_path, method):
    with main("with_a_file_system", tmp_path, method, cwd=tmp_path) as started:
        assert started.wait() == 0, started.told()
        started.line("all right")


UNGUARDED = """
from faulty import Runs, first
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService
service = MultiProcessingReadingService(2, {method!r})
with DataLoader2(Runs({folder!r}).training, reading_service=service) as loader:
    print([first(batch) for _, batch in zip(range(5), loader)] == [0, 4, 8, 12, 16])
"""


@pytest.mark.parametrize("how", ["file", "stdin", "-c"])
@pytest.mark.parametrize("method", METHODS)
def test_a_script_without_a_guard_works_or_ends_with_an_error_that_says_so(runs, tmp_path, method, how):
    """Children that import the main script again would begin it anew, each with children of its own."""
    text = UNGUARDED.format(method=method, folder=str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(text)
    arguments = {"file": [str(script)], "stdin": ["-"], "-c": ["-c", text]}[how]
    ran = subprocess.run(
        [sys.executable, *arguments],
        input=text if how == "stdin" else "",
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ran.returncode:
        assert how != "-c", ran.stderr  # a child cannot import a main module from stdin
        assert "__main__" in ran.stderr, ran.stderr
        assert ran.stderr.count("Traceback") < 8, ran.stderr
    else:
        assert ran.stdout == "True\n", (ran.stdout, ran.stderr)


# All together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(scaled(20, 3)))
def test_kills_stops_interrupts_moves_and_changes_together(runs, seed):
    """The same calls with and without workers, while workers die and stop."""
    print("seed", seed)
    draw = random.Random(seed)
    plain = DataLoader2(runs.training)
    graph = runs.training.map(Nap(0.001, every=5), seeded=False)
    with loader_of(graph, 1 + seed % 3, stall_timeout=0.5) as loader:
        iterators = [iter(plain), iter(loader)]
        for k in range(40):
            kind, n = draw.randrange(8), draw.randrange(1, 25)
            found = [[b["input_ids"].tolist() for _, b in zip(range(n), i, strict=False)] for i in iterators]
            assert found[0] == found[1], (seed, k)
            assert plain.state_dict() == loader.state_dict(), (seed, k)
            if kind < 3:
                os.kill(draw.choice(loader.reading_service.worker_pids), signal.SIGKILL)
            elif kind == 3 and k % 4 == 0:
                os.kill(draw.choice(loader.reading_service.worker_pids), signal.SIGSTOP)
            elif kind == 4:
                for each in (plain, loader):
                    each.update_weights([n, 3])
            elif kind == 5:
                for each in (plain, loader):
                    each.seek(each.step + n % 3)  # a new entry before a recorded one is refused
                iterators = [iter(plain), iter(loader)]
            elif kind == 6:
                state = plain.state_dict()
                for each in (plain, loader):
                    each.load_state_dict(state)
                iterators = [iter(plain), iter(loader)]
            else:
                iterators = [iter(plain), iter(loader)]


def test_a_killed_run_resumed_from_its_last_save_is_the_run_that_was_not_killed(runs, tmp_path):
    """Workers, main, resume with other workers: one stream."""
    state = tmp_path / "state.json"
    place, parts = 0, []
    for k in range(4):
        saved = json.loads(state.read_text()) if state.exists() else None
        service = MultiProcessingReadingService(k % 3 + 1, "fork")
        graph = runs.training.map(Nap(0.001), seeded=False)
        loader = DataLoader2.from_state(saved, graph, service) if saved else DataLoader2(graph, reading_service=service)
        with loader:
            found = firsts(loader, 13)
            os.kill(service.worker_pids[0], signal.SIGKILL)
            iterator = iter(loader)
            found += firsts(iterator, 7)
            state.write_text(json.dumps(loader.state_dict()))
            firsts(iterator, 5)  # lost with the main process
        parts += found
        place += 20
    assert parts == numbers(0, place)


def test_every_act_of_these_tests_is_one():
    assert {*NAMED} <= ACTS.keys()
    assert issubclass(WorkerError, TokenpipeError)
    assert faulty.MICRO == MICRO
