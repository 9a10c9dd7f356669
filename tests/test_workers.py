"""Indexed graphs over worker processes: the same batches, states and errors as in process, whatever is called."""

import builtins
import contextlib
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import faulty
from faulty import MICRO, Act, Gate, Log, Nap, Runs, alike, first
from processes import (
    HERE,
    METHODS,
    alive,
    command,
    descendants,
    environment,
    gone,
    is_server,
    main,
    scaled,
    switches,
    wait_for,
)
from tokenpipe.datapipes import IndexedDataPipe, Topology
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    IteratorInvalidatedError,
    LoaderShutdownError,
    TokenpipeError,
)
from tokenpipe.reading_services import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    MultiProcessingReadingService,
    WorkerInfo,
)

pytestmark = pytest.mark.sampled(3)  # each case starts processes


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def loader_of(graph: Any, workers: int = 2, method: Any = None, **settings: Any) -> DataLoader2:
    return DataLoader2(graph, reading_service=MultiProcessingReadingService(workers, method, **settings))


def take(items: Any, n: int) -> "list[Any]":
    iterator = iter(items)
    return [next(iterator) for _ in range(n)]


def firsts(items: Any, n: int = 10**9) -> "list[int]":
    return [first(batch) for _, batch in zip(range(n), items, strict=False)]


def numbers(start: int, n: int) -> "list[int]":
    return [MICRO * k for k in range(start, start + n)]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@contextlib.contextmanager
def no_process_left():
    """All processes below this one that were not there before are gone at the end, but for those that start others."""
    before = descendants()
    yield
    new = descendants() - before
    servers = {pid for pid in new if is_server(pid)}
    assert gone(new - servers, 2), [(pid, command(pid)) for pid in new - servers if alive(pid)]


# The stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_any_number_of_workers_gives_the_stream_of_the_process(runs, workers, mapped):
    graph = runs.training.map(faulty.of_many_sizes, seeded=False) if mapped else runs.training
    expected = take(DataLoader2(graph), 70)
    with no_process_left(), loader_of(graph, workers) as loader:
        assert alike(take(loader, 70), expected)
        assert len(loader.reading_service.worker_pids) == workers
        assert loader.reading_service.replaced == 0


@pytest.mark.parametrize("method", METHODS)
def test_items_of_every_kind_arrive_as_they_left_by_every_start_method(runs, method):
    graph = runs.training.map(faulty.kind_of, seeded=False)
    kinds = len(faulty.KINDS)
    expected = take(DataLoader2(graph), 2 * kinds)
    with no_process_left(), loader_of(graph, 2, method) as loader:
        found = take(loader, 2 * kinds)
        pids = loader.reading_service.worker_pids
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        assert all(alive(pid) for pid in pids)
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert alike(a, b), f"item {k}: {list(faulty.KINDS)[k % kinds]}: {a!r:.300} is not {b!r:.300}"


def test_a_context_object_serves_as_a_start_method(runs):
    context = torch.multiprocessing.get_context("fork")
    with loader_of(runs.training, 2, context) as loader:
        assert firsts(loader, 20) == numbers(0, 20)


@pytest.mark.parametrize("ahead", [(0, 0), (1, 1), (0, 10), (10, 0), (1, 40), (40, 1), (100, 100)])
def test_how_far_is_read_ahead_changes_nothing_but_that(runs, ahead):
    log = Log(runs.folder / "made.log")
    graph = runs.training.map(log, seeded=False)
    worker_ahead, main_ahead = ahead
    settings: Any = {"worker_prefetch_cnt": worker_ahead, "main_prefetch_cnt": main_ahead}
    with loader_of(graph, 2, "fork", **settings) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 8) == numbers(0, 8)
        wait_for(lambda: False, 0.3)
        most = 8 + 2 * max(1, worker_ahead) + main_ahead + 2
        made = [number // MICRO for number, _ in log.lines()]
        assert max(made) <= most, f"more was made ahead than was asked for: {max(made)} > {most}"
        assert firsts(iterator, 150) == numbers(8, 150)
    assert max(np.bincount([number // MICRO for number, _ in log.lines()])) == 1, "a batch was made twice"


def test_map_style_order_holds_where_workers_are_of_different_speed(runs):
    graph = runs.training.map(Nap(0.03, every=7), seeded=False)
    with loader_of(graph, 3, "fork") as loader:
        assert firsts(loader, 120) == numbers(0, 120)


def test_free_workers_take_what_a_slow_one_leaves(runs):
    """Numbers go to whichever worker is free: while next() waits for one batch, the others are made."""
    log, gate = Log(runs.folder / "made.log"), runs.folder / "gate"
    graph = runs.training.map(log, seeded=False).map(Gate(gate, 8), seeded=False)
    with loader_of(graph, 2, "fork", worker_prefetch_cnt=2, main_prefetch_cnt=10) as loader:
        iterator = iter(loader)
        assert firsts(iterator, 2) == [0, 4]
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(firsts(iterator, 1)))
        thread.start()
        made = wait_for(lambda: len({number for number, _ in log.lines()}) >= 9, 20)
        gate.touch()
        thread.join(20)
        assert made, log.lines()
        assert found == [8]
        assert firsts(iterator, 20) == numbers(3, 20)


def test_a_seeded_function_draws_the_same_in_every_process(runs):
    graph = runs.training.map(faulty.with_random)
    expected = take(DataLoader2(graph), 40)
    for workers in (1, 3):
        with loader_of(graph, workers) as loader:
            assert take(loader, 40) == expected


def test_the_global_generators_of_the_main_process_are_not_touched(runs):
    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    with loader_of(runs.training.map(faulty.with_random), 2, "fork") as loader:
        take(loader, 20)
    assert states() == before


def test_a_worker_computes_with_one_thread(runs):
    with loader_of(runs.training.map(faulty.threads_of_torch, seeded=False), 2) as loader:
        assert set(take(loader, 20)) == {1}


def test_the_service_says_that_it_can_be_saved_and_has_workers_only_while_it_runs(runs):
    service = MultiProcessingReadingService(2)
    assert isinstance(service, CheckpointableReadingServiceInterface)
    assert service.worker_pids == ()
    loader = DataLoader2(runs.training, reading_service=service)
    assert service.worker_pids == ()
    take(loader, 3)
    assert len(service.worker_pids) == 2
    pids = service.worker_pids
    take(loader, 3)
    loader.seek(9)
    take(loader, 3)
    assert service.worker_pids == pids, "workers stay from one iteration to the next"
    loader.shutdown()
    assert service.worker_pids == ()
    assert gone(pids, 2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_workers": -1}, ConfigurationError),
        ({"num_workers": 1.5}, ArgumentTypeError),
        ({"num_workers": True}, ArgumentTypeError),
        ({"num_workers": None}, ArgumentTypeError),
        ({"num_workers": 2, "multiprocessing_context": "thread"}, (ConfigurationError, ArgumentTypeError)),
        ({"num_workers": 2, "multiprocessing_context": 3}, (ConfigurationError, ArgumentTypeError)),
        ({"num_workers": 2, "worker_prefetch_cnt": -1}, ConfigurationError),
        ({"num_workers": 2, "main_prefetch_cnt": "x"}, ArgumentTypeError),
        ({"num_workers": 2, "worker_init_fn": 3}, ArgumentTypeError),
        ({"num_workers": 2, "worker_reset_fn": "f"}, ArgumentTypeError),
        ({"num_workers": 2, "stall_timeout": 0}, ConfigurationError),
        ({"num_workers": 2, "stall_timeout": -1.0}, ConfigurationError),
        ({"num_workers": 2, "stall_timeout": float("nan")}, ConfigurationError),
        ({"num_workers": 2, "stall_timeout": "1"}, ArgumentTypeError),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_by_name(settings, error):
    name, value = list(settings.items())[-1]
    with pytest.raises(error, match=name) as caught:
        MultiProcessingReadingService(**settings)
    assert isinstance(caught.value, TokenpipeError)
    assert str(value) in str(caught.value)


def test_the_arguments_stand_in_torchdatas_order(runs):
    service = MultiProcessingReadingService(1, "fork", 2, 3, named, None)
    with DataLoader2(runs.training, reading_service=service) as loader:
        assert firsts(loader, 9) == numbers(0, 9)


def named(datapipe: Any, info: WorkerInfo) -> Any:
    assert info == WorkerInfo(1, 0)
    return datapipe


# Batches that are kept ----------------------------------------------------------------------------------


def test_two_hundred_batches_kept_are_never_written_over(runs):
    graph = runs.training.map(faulty.of_many_sizes, seeded=False)
    expected = take(DataLoader2(graph), 260)
    with loader_of(graph, 2, worker_prefetch_cnt=2, main_prefetch_cnt=2) as loader:
        iterator = iter(loader)
        kept = take(iterator, 200)
        take(iterator, 60)
    assert alike(kept, expected[:200])
    del loader, iterator
    gc.collect()
    assert alike(kept, expected[:200]), "also when the loader is gone"


@pytest.mark.parametrize("seed", range(3))
def test_views_outlive_their_batches_and_changes_in_place_stay_where_they_were_made(runs, seed):
    """Tensors, their views, arrays over them, arrays: kept, changed or dropped at random."""
    print("seed", seed)
    draw = random.Random(seed)
    graph = runs.training.map(faulty.of_many_sizes, seeded=False)
    kept: list[tuple[Any, Any]] = []
    with loader_of(graph, 2, "fork", worker_prefetch_cnt=3, main_prefetch_cnt=2) as loader:
        for _, batch in zip(range(250), loader, strict=False):
            n, ids = batch["n"], batch["ids"]
            assert (ids == n).all(), f"batch {n} came with a change made to another"
            kind = draw.randrange(7)
            if kind == 0:
                ids.fill_(-5)  # and dropped
            elif kind == 1:
                kept.append((ids[1:], n))
            elif kind == 2:
                ids.add_(1)
                kept.append((ids, n + 1))
            elif kind == 3:
                kept.append((ids.numpy()[::2], n))
            elif kind == 4:
                kept.append((ids.view(torch.uint8).reshape(-1, 4)[:, :1].contiguous(), n & 255))
            elif kind == 5:
                kept.append((memoryview(ids.numpy()), n))
            if draw.random() < 0.3 and kept:
                kept.pop(draw.randrange(len(kept)))
            del batch, ids
        for view, value in kept:
            assert (np.asarray(view) == value).all()
    for view, value in kept:
        assert (np.asarray(view) == value).all()


def test_what_arrives_can_be_written_to(runs):
    graph = runs.training.map(faulty.kind_of, seeded=False)
    with loader_of(graph, 2, "fork") as loader:
        for name, item in zip(faulty.KINDS, loader, strict=False):
            for array in arrays_in(item):
                if isinstance(array, np.ndarray):
                    if name not in ("numpy read-only", "numpy views") and array.dtype.kind in "iuf":
                        assert array.flags.writeable, name
                        array += 1
                elif array.layout == torch.strided and not array.requires_grad and name != "torch views":
                    array.zero_()


def arrays_in(item: Any) -> "list[Any]":
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [array for part in item for array in arrays_in(part)] if isinstance(item, (list, tuple)) else []


def test_descriptors_maps_and_memory_do_not_grow_with_the_batches(runs):
    graph = runs.training.map(faulty.of_many_sizes, seeded=False)

    def used(pid: "int | str") -> tuple[int, int]:
        return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(Path(f"/proc/{pid}/maps").read_text().splitlines())

    with loader_of(graph, 2, "fork") as loader:
        iterator = iter(loader)
        for _, batch in zip(range(150), iterator, strict=False):
            kept = batch
        before = [used(pid) for pid in ("self", *loader.reading_service.worker_pids)]
        for _, batch in zip(range(600), iterator, strict=False):
            kept = batch
        after = [used(pid) for pid in ("self", *loader.reading_service.worker_pids)]
        del kept, batch
    for (fds, maps), (more_fds, more_maps) in zip(before, after, strict=True):
        assert more_fds <= fds + 40, (before, after)
        assert more_maps <= maps + 80, (before, after)


def test_more_batches_can_be_kept_than_files_be_open(runs, tmp_path):
    with main("with_few_descriptors", tmp_path, "fork", cwd=tmp_path) as started:
        assert started.wait() == 0, started.told()
        assert started.line("all right") == ""


def test_loaders_that_are_shut_down_leave_no_descriptors(runs):
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with loader_of(runs.training) as loader:
        take(loader, 5)
    del loader
    gc.collect()
    before = descriptors()
    for k in range(12):
        with loader_of(runs.training, 1 + k % 3, METHODS[2 * (k % 2)]) as loader:
            take(loader, k)
    del loader
    gc.collect()
    assert descriptors() <= before


@pytest.mark.parametrize("method", METHODS)
def test_a_shared_memory_of_four_mebibytes_is_enough(runs, tmp_path, method):
    if os.geteuid():
        pytest.skip("only root can mount a small /dev/shm")
    script = f"mount -t tmpfs -o size=4m tmpfs /dev/shm && exec {sys.executable} {HERE / 'mains.py'} with_little_shm"
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{script} {tmp_path} {method}"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"no mount namespaces here: {ran.stderr:.200}")
    assert (ran.returncode, ran.stdout) == (0, "all right\n"), ran.stderr


# State and place ----------------------------------------------------------------------------------------


def states_of(loader: DataLoader2, n: int) -> "list[Any]":
    states = [loader.state_dict()]
    for _, _batch in zip(range(n), loader, strict=False):
        states.append(loader.state_dict())
    return states


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_state_at_every_step_is_the_one_of_the_process(runs, workers):
    expected = states_of(DataLoader2(runs.training), 40)
    with loader_of(runs.training, workers) as loader:
        assert states_of(loader, 40) == expected
        assert loader.state_dict() == expected[-1]
    assert loader.state_dict() == expected[-1], "after shutdown too"
    assert json.loads(json.dumps(expected[-1])) == expected[-1]


def test_a_run_goes_on_from_every_step_with_any_other_number_of_workers(runs):
    states = states_of(DataLoader2(runs.training), 24)
    expected = [batch["input_ids"].tolist() for batch in take(DataLoader2(runs.training), 40)]
    loaders = [loader_of(runs.training, workers) for workers in (0, 1, 2, 3)]
    for k, state in enumerate(states):
        loader = loaders[k % 4]
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.state_dict() == state, "right after the resume"
        assert [batch["input_ids"].tolist() for batch in take(loader, 8)] == expected[k : k + 8]
        assert loader.state_dict()["consumed_samples"] == MICRO * (k + 8)
    for loader in loaders:
        loader.shutdown()


def test_a_loader_made_from_a_state_goes_on_exactly_and_saves_twice_the_same(runs):
    with loader_of(runs.training, 2) as loader:
        assert firsts(loader, 11) == numbers(0, 11)
        state, earlier = loader.state_dict(), loader.state_dict(step=2)
        assert loader.state_dict() == state
    for saved, place in ((state, 11), (earlier, 4)):
        with DataLoader2.from_state(saved, runs.training, MultiProcessingReadingService(3)) as again:
            assert again.state_dict() == saved
            assert firsts(again, 20) == numbers(place, 20)


def test_the_services_own_checkpoint_is_bytes_that_restore_takes(runs):
    service = MultiProcessingReadingService(2)
    with DataLoader2(runs.training, reading_service=service) as loader:
        take(loader, 7)
        saved = service.checkpoint()
        assert isinstance(saved, bytes)
    other = MultiProcessingReadingService(2)
    restored = other.restore(runs.training, saved)
    assert isinstance(restored, IndexedDataPipe)
    other.finalize()


def test_contents_plan_and_metrics_are_those_of_the_process(runs):
    plain = DataLoader2(runs.training)
    with loader_of(runs.training) as loader:
        for each in (plain, loader):
            take(each, 7)
        assert loader.contents(3) == plain.contents(3)
        assert str(loader.plan(20)) == str(plain.plan(20))
        waits = {key for key in loader.metrics() if "wait" in key or "workers" in key}
        assert {k: v for k, v in loader.metrics().items() if k not in waits} == {
            k: v for k, v in plain.metrics().items() if k not in waits
        }
        assert {k for k in loader.metrics() if "workers" not in k} == plain.metrics().keys()
        assert len(loader) == len(plain)


# Whatever is done in the middle -------------------------------------------------------------------------


class Doings:
    """The same calls to a loader in process and to one with workers; all that both give must be equal."""

    def __init__(self, runs: Runs, seed: int) -> None:
        self.runs, self.draw = runs, random.Random(seed)
        graph = runs.training.map(Nap(0.0005, every=3), seeded=False)
        ahead = self.draw.choice([(1, 1), (2, 0), (10, 10), (30, 5)])
        service = MultiProcessingReadingService(self.draw.choice([1, 2, 3]), "fork", *ahead)
        self.loaders = DataLoader2(graph), DataLoader2(graph, reading_service=service)
        self.iterators: list[Any] = [None, None]
        self.states = [self.loaders[0].state_dict()]
        self.told: list[str] = []

    def both(self, what: str, call: Any) -> None:
        self.told.append(what)
        found = []
        for k in range(2):
            try:
                found.append(("gave", call(k)))
            except TokenpipeError as error:
                found.append((type(error), str(error)))
            except StopIteration:
                found.append(("ended", None))
        assert alike(found[0], found[1]), (self.told, found)
        states = [loader.state_dict() for loader in self.loaders]
        assert states[0] == states[1], self.told
        self.states.append(states[0])

    def items(self, n: int) -> None:
        def call(k: int) -> Any:
            if self.iterators[k] is None:
                self.iterators[k] = iter(self.loaders[k])
            return [next(self.iterators[k]) for _ in range(n)]

        self.both(f"{n} items", call)

    def new_iterator(self) -> None:
        def call(k: int) -> None:
            self.iterators[k] = iter(self.loaders[k])

        self.both("iter()", call)

    def move(self, what: str, call: Any) -> None:
        def moved(k: int) -> None:
            call(self.loaders[k])
            self.iterators[k] = None

        self.both(what, moved)

    def change(self, what: str, call: Any) -> None:
        self.both(what, lambda k: call(self.loaders[k]))

    def one(self) -> None:
        draw = self.draw
        kind = draw.choices(range(13), [30, 3, 4, 1, 3, 6, 3, 3, 2, 1, 1, 3, 3])[0]
        n = draw.randrange(1, 20)
        if kind == 0:
            self.items(n)
        elif kind == 1:
            self.new_iterator()
        elif kind == 2:
            self.move(f"seek({n})", lambda loader: loader.seek(n))
        elif kind == 3:
            self.move("restart()", lambda loader: loader.restart())
        elif kind == 4:
            state = draw.choice(self.states)
            self.move(f"state at {state['consumed_samples']}", lambda loader: loader.load_state_dict(state))
        elif kind == 5:
            weights = {"prose": draw.randrange(1, 9), "code": draw.randrange(1, 9)}
            if any("add math" in told for told in self.told) and draw.random() < 0.8:
                weights["math"] = draw.randrange(1, 9)
            self.change(f"weights {weights}", lambda loader: loader.update_weights(weights))
        elif kind == 6:
            self.change(f"jump {n}", lambda loader: loader.jump(n))
        elif kind == 7:
            tokens = [(8 * n, 8 * n + 40)]
            self.change(f"exclude {tokens}", lambda loader: loader.exclude("prose", tokens=tokens))
        elif kind == 8:
            size = draw.choice([4, 8, 16, 12])
            self.change(f"batch size {size}", lambda loader: loader.update_global_batch_size(size))
        elif kind == 9:
            path = self.runs.folder / "more.bin"
            self.change("grow code", lambda loader: loader.grow_source("code", path, dtype="uint16"))
        elif kind == 10:
            weights = {"prose": 5, "code": 2, "math": 3}
            math = self.runs.source("math")
            self.change("add math", lambda loader: loader.add_source(math, weights))
        elif kind == 11:

            def limited(k: int) -> Any:
                self.iterators[k] = iter(self.loaders[k])
                self.iterators[k].limit(n)
                found = list(self.iterators[k])
                self.iterators[k].resume()
                found += list(self.iterators[k])
                self.iterators[k].limit(None)
                return found

            self.both(f"limit {n}, resume", limited)
        else:
            self.both("contents", lambda k: self.loaders[k].contents(n))


@pytest.mark.parametrize("seed", range(scaled(60, 10)))
def test_whatever_is_called_in_the_middle_workers_give_what_the_process_gives(runs, seed):
    print("seed", seed)
    doings = Doings(runs, seed)
    for _ in range(scaled(60, 40)):
        doings.one()
    doings.items(50)
    doings.loaders[1].shutdown()


def test_a_change_in_the_middle_holds_from_the_next_step_whatever_was_made_ahead(runs):
    log = Log(runs.folder / "made.log")
    graph = runs.training.map(log, seeded=False)
    for delivered in range(7):
        plain = DataLoader2(runs.training)
        with loader_of(graph, 2, "fork") as loader:
            iterators = [iter(plain), iter(loader)]
            for iterator in iterators:
                take(iterator, delivered)
            wait_for(lambda n=delivered: len(log.lines()) > n + 8, 10)
            for each in (plain, loader):
                each.update_weights({"prose": 0.1, "code": 0.9})
            assert alike(take(iterators[1], 30), take(iterators[0], 30)), delivered


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_limit_stops_and_resume_allows_as_many_again(runs, workers):
    with loader_of(runs.training, workers) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        assert firsts(iterator) == numbers(0, 3)
        assert firsts(iterator) == []
        assert loader.state_dict()["consumed_samples"] == 3 * MICRO
        iterator.resume()
        assert firsts(iterator) == numbers(3, 3)
        new = iter(loader)
        assert firsts(new, 5) == numbers(6, 5)
        with pytest.raises(IteratorInvalidatedError):
            next(iterator)
        new.limit(2)
        assert firsts(new) == numbers(11, 2)
        assert firsts(loader, 4) == numbers(13, 4)


def test_while_paused_at_a_limit_workers_stay_and_stop_making_more(runs):
    log = Log(runs.folder / "made.log")
    with loader_of(runs.training.map(log, seeded=False), 2, "fork") as loader:
        iterator = iter(loader)
        iterator.limit(5)
        assert firsts(iterator) == numbers(0, 5)
        wait_for(lambda: False, 0.3)
        made = len(log.lines())
        wait_for(lambda: False, 0.3)
        assert len(log.lines()) == made
        assert all(alive(pid) for pid in loader.reading_service.worker_pids)


def test_an_iterator_taken_fifty_times_without_exhausting_one_goes_on_each_time(runs):
    with no_process_left(), loader_of(runs.training, 2) as loader:
        place = 0
        for k in range(50):
            iterator = iter(loader)
            n = k % 4
            assert firsts(iterator, n) == numbers(place, n)
            place += n
        assert len(loader.reading_service.worker_pids) == 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_loaders_left_in_the_middle_end_with_all_their_workers(runs, method):
    with no_process_left():
        for k in range(scaled(50, 12)):
            loader = loader_of(runs.training, 1 + k % 3, method)
            firsts(loader, k % 5)
            if k % 3 == 0:
                loader.shutdown()
                loader.shutdown()
                with pytest.raises(LoaderShutdownError):
                    iter(loader)
            elif k % 3 == 1:
                iterator = iter(loader)  # the iterator outlives the loader's name
                next(iterator)
            del loader
        del iterator
        gc.collect()


def test_a_loader_that_nobody_holds_ends_its_workers_without_a_shutdown(runs):
    loader = loader_of(runs.training, 2)
    firsts(loader, 3)
    pids = loader.reading_service.worker_pids
    assert len(pids) == 2
    del loader
    gc.collect()
    assert gone(pids, 2)


def test_two_loaders_in_one_process_do_not_know_of_each_other(runs):
    evaluation = runs.blend(None).limit(samples=24).once().batch_samples(MICRO).collate_causal_lm(sample_numbers=True)
    with loader_of(runs.training, 2) as one, loader_of(evaluation, 2, "fork") as two:
        iterator, place = iter(one), 0
        for k in range(6):
            assert firsts(iterator, k) == numbers(place, k)
            place += k
            assert firsts(two) == numbers(0, 6)
        mixed = [first(next(iterator)) for _ in zip(range(6), two, strict=False)]
        assert mixed == numbers(place, 6)
        pids = {*one.reading_service.worker_pids, *two.reading_service.worker_pids}
        assert len(pids) == 4
        two.shutdown()
        assert firsts(iterator, 20) == numbers(place + 6, 20)


def test_a_loader_may_be_used_from_several_threads_one_after_another(runs, tmp_path):
    with main("in_threads", tmp_path, "forkserver", cwd=tmp_path) as started:
        assert started.wait() == 0, started.told()
        assert started.line("all right") == ""


# Ends ---------------------------------------------------------------------------------------------------


def graphs_that_end(runs: Runs) -> "dict[str, Any]":
    def ranks(rank: int, size: int, tail: str) -> Any:
        graph = runs.blend(None).limit(samples=26).once(tail=tail).shard_ranks(Topology(dp_rank=rank, dp_size=size))
        return graph.batch_samples(MICRO).collate_causal_lm(sample_numbers=True)

    return {
        "limit": runs.finite(40),
        "limit within a batch": runs.finite(42),
        "one batch": runs.finite(4),
        "once": ranks(0, 1, "drop"),
        "once, uneven": ranks(0, 1, "uneven"),
        "once, padded": ranks(0, 1, "pad"),
        "rank 0 of 3, uneven": ranks(0, 3, "uneven"),
        "rank 2 of 3, uneven": ranks(2, 3, "uneven"),
        "rank 2 of 3, padded": ranks(2, 3, "pad"),
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_graphs_that_end_end_at_the_same_batch_and_begin_again(runs, workers):
    with no_process_left():
        for name, graph in graphs_that_end(runs).items():
            plain = DataLoader2(graph)
            with loader_of(graph, workers, "fork") as loader:
                for epoch in range(3):
                    expected, found = list(plain), list(loader)
                    assert alike(found, expected), (name, epoch, len(found), len(expected))
                    assert loader.state_dict() == plain.state_dict(), (name, epoch)
                iterators = [iter(plain), iter(loader)]
                assert [len(list(items)) for items in iterators] == [len(expected)] * 2
                assert list(iterators[1]) == []
                assert loader.state_dict() == plain.state_dict()


def test_more_workers_than_batches_are_no_trouble(runs):
    with no_process_left(), loader_of(runs.finite(8), 5, "fork") as loader:
        for _ in range(3):
            assert firsts(loader) == [0, 4]


def test_at_the_end_the_state_resumes_to_nothing_and_the_epoch_after_to_all(runs):
    with loader_of(runs.finite(20), 2, "fork") as loader:
        assert len(list(loader)) == 5
        state = loader.state_dict()
    plain = DataLoader2.from_state(state, runs.finite(20))
    with DataLoader2.from_state(state, runs.finite(20), MultiProcessingReadingService(2, "fork")) as again:
        for _ in range(2):
            assert alike(list(again), list(plain))


# Exceptions of the user's function ----------------------------------------------------------------------

RAISED = {
    "Custom": (faulty.Custom, "raised at 20"),
    "ValueError": (ValueError, "raised at 20"),
    "KeyError": (KeyError, "raised at 20"),
    "OSError": (FileNotFoundError, "at 20"),
    "EOFError": (EOFError, "raised at 20"),
    "ConnectionResetError": (ConnectionResetError, "raised at 20"),
    "TimeoutError": (TimeoutError, "raised at 20"),
    "PicklingError": (pickle.PicklingError, "raised at 20"),
    "IndexError": (IndexError, "raised at 20"),
    "RecursionError": (RecursionError, "maximum recursion depth"),
    "KeywordOnly": (faulty.KeywordOnly, "a word"),
    "HoldsALock": (faulty.HoldsALock, "holding a lock at 20"),
    "local": (LookupError, "a local class at 20"),
    "chained": (ValueError, "the outer one at 20"),
    "two lines": (ValueError, "second line"),
    "MemoryError": (MemoryError, ""),
    "UnicodeDecodeError": (UnicodeDecodeError, "invalid start byte"),
    "lone surrogate": (ValueError, ""),
}


if hasattr(builtins, "ExceptionGroup"):  # Python 3.11
    RAISED["ExceptionGroup"] = builtins.ExceptionGroup, "raised at 20"


@pytest.mark.parametrize("what", RAISED)
def test_an_exception_comes_with_its_own_type_the_worker_the_node_and_the_sample(runs, what):
    kind, words = RAISED[what]
    graph = runs.training.map(Act(what, 20, runs.folder, times=None), seeded=False)
    with no_process_left():
        loader = loader_of(graph, 1, "fork")
        iterator = iter(loader)
        assert firsts(iterator, 5) == numbers(0, 5), "all that was before it is delivered"
        with pytest.raises(kind) as caught:
            next(iterator)
        text = text_of(caught.value)
        assert f"Caught {'Local' if what == 'local' else kind.__name__} in worker process 0" in text
        assert "Original Traceback" in text
        assert "faulty.py" in text, "the place in the user's file"
        assert "map(Act)" in text, "the node"
        assert "sample number 20" in text
        assert words in text
        if what == "chained":
            assert "the inner one" in text
        with pytest.raises(LoaderShutdownError):
            next(iterator)
        state = loader.state_dict()
        assert state["consumed_samples"] == 20
    with DataLoader2.from_state(state, graph, MultiProcessingReadingService(2, "fork")) as again:
        with pytest.raises(kind):
            next(iter(again))
        assert again.state_dict()["consumed_samples"] == 20
    assert firsts(DataLoader2.from_state(state, runs.training), 3) == numbers(5, 3)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_exceptions_type_and_attributes_come_by_every_start_method(runs, method):
    graph = runs.training.map(Act("Custom", 8, runs.folder, times=None), seeded=False)
    iterator = iter(loader_of(graph, 1, method))
    assert firsts(iterator, 2) == [0, 4]
    with pytest.raises(faulty.Custom, match="Caught Custom in worker process 0") as caught:
        next(iterator)
    assert (caught.value.number, caught.value.why) == (8, "raised")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_ahead_is_raised_in_its_turn_and_not_at_all_where_it_is_left_out(runs, workers):
    graph = runs.training.map(Act("ValueError", 40, runs.folder, times=None), seeded=False)
    with loader_of(graph, workers, "fork") as loader:
        assert firsts(loader, 5) == numbers(0, 5)
        wait_for(lambda: False, 0.1)
        loader.seek(10)  # sample 80
        assert firsts(loader, 5) == numbers(20, 5)
        loader.restart()
        iterator = iter(loader)
        assert firsts(iterator, 10) == numbers(0, 10)
        with pytest.raises(ValueError, match="raised at 40"):
            next(iterator)


@pytest.mark.parametrize("what", ["sys.exit", "KeyboardInterrupt", "StopIteration"])
def test_what_would_end_a_process_or_a_loop_is_an_error_and_never_a_silent_end(runs, what):
    graph = runs.training.map(Act(what, 20, runs.folder, times=None), seeded=False)
    with no_process_left():
        loader = loader_of(graph, 2, "fork")
        iterator = iter(loader)
        assert firsts(iterator, 5) == numbers(0, 5)
        with pytest.raises(BaseException) as caught:
            next(iterator)
        assert not isinstance(caught.value, (StopIteration, GeneratorExit))
        text = text_of(caught.value)
        assert "map" in text, text
        assert loader.state_dict()["consumed_samples"] == 20
        loader.shutdown()


class Unpicklable:
    def __init__(self, batch: Any) -> None:
        self.batch, self.lock = batch, threading.Lock()


def unpicklable_at_20(batch: Any) -> Any:
    return Unpicklable(batch) if first(batch) == 20 else batch


class Unreadable:
    """Pickled in the worker, an error where it is read."""

    def __reduce__(self) -> Any:
        return _fails, ()


def _fails() -> Any:
    raise ZeroDivisionError("while it was read")


def unreadable_at_20(batch: Any) -> Any:
    return Unreadable() if first(batch) == 20 else batch


@pytest.mark.parametrize(("function", "word"), [(unpicklable_at_20, "pickle"), (unreadable_at_20, "while it was read")])
def test_an_item_that_cannot_travel_is_an_error_at_its_own_batch(runs, function, word):
    with no_process_left():
        loader = loader_of(runs.training.map(function, seeded=False), 2, "fork")
        iterator = iter(loader)
        assert firsts(iterator, 5) == numbers(0, 5)
        with pytest.raises(Exception, match=word):
            next(iterator)
        assert loader.state_dict()["consumed_samples"] == 20
        loader.shutdown()


def test_an_exception_in_worker_init_fn_is_raised_and_nothing_waits(runs):
    """torchdata, defect 4: main waited for ever."""
    for method in ("fork", "forkserver"):
        with no_process_left():
            loader = loader_of(runs.training, 2, method, worker_init_fn=init_that_raises)
            with pytest.raises(faulty.Custom, match="in worker process") as caught:
                take(loader, 3)
            assert "init_that_raises" in text_of(caught.value)
            loader.shutdown()


def init_that_raises(datapipe: Any, info: WorkerInfo) -> Any:
    raise faulty.Custom(info.worker_id, "in the beginning")


def init_that_exits(datapipe: Any, info: WorkerInfo) -> Any:
    os._exit(5)


def reset_that_raises(datapipe: Any, info: WorkerInfo, generator: Any) -> Any:
    raise faulty.Custom(info.worker_id, "at the reset")


def test_workers_that_end_before_they_begin_are_an_error_after_a_while_and_not_made_for_ever(runs):
    with no_process_left():
        loader = loader_of(runs.training, 2, "fork", worker_init_fn=init_that_exits)
        with pytest.raises(RuntimeError, match="5"):
            take(loader, 3)
        loader.shutdown()


class OnlyHere:
    """A function that can be read nowhere but in the process where it was made."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, batch: Any) -> Any:
        return batch

    def __setstate__(self, state: Any) -> None:
        if state["home"] != os.getpid():
            raise ImportError("no module named so")
        self.__dict__.update(state)


def test_a_graph_that_a_worker_cannot_read_is_an_error(runs):
    with no_process_left():
        loader = loader_of(runs.training.map(OnlyHere(), seeded=False), 2, "forkserver")
        with pytest.raises(Exception, match="no module named so"):
            take(loader, 3)
        loader.shutdown()


# Graphs that cannot go to a worker ----------------------------------------------------------------------


class Keeps(IndexedDataPipe):
    """A node of a user's own that keeps something."""

    functional_name = "keeps"
    trunk = True
    decides_order = False

    def __init__(self, datapipe: IndexedDataPipe, what: Any) -> None:
        super().__init__(datapipe)
        self.what = what

    def fetch(self, numbers: Any, columns: Any = None) -> Any:
        return self.datapipe.fetch(numbers, columns)


def unpicklable_things() -> "dict[str, Any]":
    class Local:
        pass

    return {
        "a lambda": lambda x: x,
        "a lambda in a list": [1, [lambda x: x]],
        "a lambda in a dict": {"deep": {"er": (lambda x: x,)}},
        "a lock": threading.Lock(),
        "an open file": Path("/dev/null").open(),
        "a generator": (k for k in range(3)),
        "a local object": Local(),
    }


@pytest.fixture
def without_dill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dill", None)


@pytest.mark.usefixtures("without_dill")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("what", unpicklable_things())
def test_what_cannot_be_pickled_at_depth_three_is_named_before_any_process_starts(runs, what, method):
    kept = Keeps(runs.source("prose"), unpicklable_things()[what])
    graph = kept.blend(runs.source("code"), weights=[1, 1]).batch_samples(MICRO).collate_causal_lm()
    before = descendants()
    loader = loader_of(graph, 2, method)
    with pytest.raises(TokenpipeError) as caught:
        take(loader, 1)
    text = str(caught.value)
    assert "what" in text, "the attribute"
    assert "keeps" in text.lower(), "the node"
    assert "blend" in text, "the node's path"
    assert descendants() <= before, "no process was started"
    loader.shutdown()


@pytest.mark.usefixtures("without_dill")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_lambda_in_a_map_is_told_with_what_would_do(runs, method):
    graph = runs.blend().map(lambda row: row, seeded=False).batch_samples(MICRO).collate_causal_lm()
    loader = loader_of(graph, 2, method)
    with pytest.raises(TokenpipeError, match="lambda") as caught:
        take(loader, 1)
    assert "map" in str(caught.value)
    assert "fn" in str(caught.value)
    assert any(word in str(caught.value) for word in ("def", "module", "dill"))


@pytest.mark.usefixtures("without_dill")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_init_fn_that_cannot_be_pickled_is_named(runs, method):
    with pytest.raises(TokenpipeError, match="worker_init_fn"):
        take(loader_of(runs.training, 2, method, worker_init_fn=lambda datapipe, info: datapipe), 1)


def test_a_lambda_does_where_nothing_is_pickled(runs):
    graph = runs.training.map(lambda batch: first(batch), seeded=False)
    with loader_of(graph, 0) as loader:
        assert take(loader, 5) == numbers(0, 5)


# The cap on workers -------------------------------------------------------------------------------------


def test_the_cap_holds_over_all_loaders_of_the_process_and_each_has_one(runs, tmp_path):
    with main("capped", tmp_path, "fork", cwd=tmp_path) as started:
        assert started.wait() == 0, started.told()
        started.line("all right")


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_cap_that_is_no_number_of_workers_is_refused_by_name(runs, monkeypatch, value):
    monkeypatch.setenv("TOKENPIPE_MAX_WORKERS", value)
    with pytest.raises(ConfigurationError, match="TOKENPIPE_MAX_WORKERS"):
        take(loader_of(runs.training, 2, "fork"), 1)


# What workers are told of themselves --------------------------------------------------------------------


def setting(batch: Any) -> str:
    return os.environ.get("TOKENPIPE_SETTING_OF_A_TEST", "none")


@pytest.mark.parametrize("method", METHODS)
def test_workers_have_the_environment_of_the_moment_when_they_start(runs, monkeypatch, method):
    """A fork server, which starts them, may be older."""
    graph = runs.training.map(setting, seeded=False)
    for value in ("first", "second"):
        monkeypatch.setenv("TOKENPIPE_SETTING_OF_A_TEST", value)
        with loader_of(graph, 1, method) as loader:
            assert take(loader, 1) == [value]
    monkeypatch.delenv("TOKENPIPE_SETTING_OF_A_TEST")
    with loader_of(graph, 1, method) as loader:
        assert take(loader, 1) == ["none"]


class Told:
    """Writes down each call, as worker_init_fn and worker_reset_fn."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, datapipe: Any, info: WorkerInfo, generator: Any = None) -> Any:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{info.num_workers} {info.worker_id} {os.getpid()}\n".encode())
        os.close(fd)
        return datapipe

    def lines(self) -> "list[list[int]]":
        return [[int(word) for word in line.split()] for line in Path(self.path).read_text().splitlines()]


def test_worker_init_fn_runs_in_each_worker_and_in_what_replaces_one(runs):
    told = Told(runs.folder / "told")
    with loader_of(runs.training, 3, "fork", worker_init_fn=told) as loader:
        assert firsts(loader, 60) == numbers(0, 60)
        assert firsts(loader, 60) == numbers(60, 60)
        pids = loader.reading_service.worker_pids
        assert {tuple(line) for line in told.lines()} == {(3, k, pid) for k, pid in enumerate(pids)}
        assert len(told.lines()) <= 6, "once a worker and iteration at most"
        os.kill(pids[1], 9)
        assert firsts(loader, 120) == numbers(120, 120)
        (new,) = {*loader.reading_service.worker_pids} - {*pids}
        assert [3, 1, new] in told.lines()


# No polling ---------------------------------------------------------------------------------------------


def test_nobody_wakes_up_while_nothing_happens(runs):
    """torchdata, defect 12: everyone slept for a tenth to one millisecond, over and over."""
    with loader_of(runs.training, 2, "fork") as loader:
        iterator = iter(loader)
        take(iterator, 5)
        wait_for(lambda: False, 0.3)
        pids = loader.reading_service.worker_pids
        before = [switches(pid) for pid in pids]
        wait_for(lambda: False, 1.0)
        after = [switches(pid) for pid in pids]
        assert all(b - a < 30 for a, b in zip(before, after, strict=True)), (before, after)


def test_main_sleeps_while_it_waits_for_a_slow_batch(runs):
    with loader_of(runs.training.map(Nap(0.5), seeded=False), 1, "fork") as loader:
        iterator = iter(loader)
        take(iterator, 1)
        before = switches(os.getpid()), os.times().user
        take(iterator, 2)
        assert switches(os.getpid()) - before[0] < 60
        assert os.times().user - before[1] < 0.4
