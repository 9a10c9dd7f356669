"""A node in threads or processes of its own: the same items in the same order, whatever happens there."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

import faulty
from contract import all_same
from faulty import MICRO, Custom, HoldsALock, KeywordOnly, Runs, tenfold
from processes import PATIENCE, SOAK, alive, children, command, environment, gone, wait_for
from tokenpipe.adapters import Placement, Prefetch, Processes, Retry, SkipErrors, Threads, Timeout
from tokenpipe.adapters.placement import PlacementWrapper
from tokenpipe.datapipes import StreamingDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, NodeTimeoutError, WorkerError
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

PLACES = [Threads(1), Threads(3), Processes(2)]


def take(items: Any, n: int) -> "list[Any]":
    return [item for _, item in zip(range(n), items, strict=False)]


def written(state: Any) -> Any:
    text = json.dumps(state)
    assert json.loads(text) == state
    return json.loads(text)


# What is placed -----------------------------------------------------------------------------------------


def number_of(item: Any) -> int:
    if isinstance(item, dict):
        return int(item["sample_numbers"][0])
    return int(item[0]) if hasattr(item, "__len__") else int(item)


def in_disorder(item: Any) -> Any:
    """Items take turns in being slow."""
    time.sleep(random.Random(number_of(item)).random() * 0.003)
    return item


def odd(item: Any) -> bool:
    time.sleep(random.Random(number_of(item)).random() * 0.003)
    return item % 2 == 1


def as_tensor(item: Any) -> Any:
    return torch.tensor([item])


def add_one(item: Any) -> Any:
    return item + 1


class Raises:
    """item → item; at one number it raises."""

    def __init__(self, at: int, what: str) -> None:
        self.at, self.what = at, what

    def __call__(self, item: Any) -> Any:
        if number_of(item) == self.at:
            raise ERRORS[self.what](self.at)
        return item


ERRORS: "dict[str, Any]" = {
    "ValueError": lambda n: ValueError(f"raised at {n}"),
    "Custom": lambda n: Custom(n, "raised"),
    "StopIteration": lambda n: StopIteration(n),
    "KeywordOnly": lambda n: KeywordOnly(number=n),
    "HoldsALock": lambda n: HoldsALock(n),
}


class Fails:
    """item → item; it raises first, once for each item that is chosen, over all processes."""

    def __init__(self, at: Any, folder: Any, once: bool = True) -> None:
        self.at, self.folder, self.once = frozenset(at), str(folder), once

    def __call__(self, item: Any) -> Any:
        number = number_of(item)
        if number in self.at:
            if self.once:
                try:
                    os.close(os.open(Path(self.folder, f"failed-{number}"), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return item
            raise OSError(f"failed at {number}")
        return item


class Where:
    """Writes down in which process and thread it runs."""

    def __call__(self, item: Any) -> Any:
        return item, os.getpid(), threading.get_ident()


class Dies:
    """item → item; at one number its process ends."""

    def __init__(self, at: int) -> None:
        self.at, self.home = at, os.getpid()

    def __call__(self, item: Any) -> Any:
        if number_of(item) == self.at and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return item


class Count(StreamingDataPipe):
    """0 … end − 1, then perhaps an exception; it knows its place."""

    initial_state = {"at": 0}  # noqa: RUF012
    at: int

    def __init__(self, end: int, raises: bool = False) -> None:
        super().__init__()
        self.end, self.raises = end, raises

    def __iter__(self) -> Any:
        while self.at < self.end:
            self.at += 1
            yield self.at - 1
        if self.raises:
            raise LookupError("the source is broken here")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    (tmp_path / "runs").mkdir()
    return Runs(tmp_path / "runs")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    yield
    gc.collect()
    assert wait_for(lambda: not placed_processes(), 10), placed_processes()


def placed_processes() -> "set[int]":
    """Children of the server, and of this process, that are no servers."""
    servers = {pid for pid in children() if "forkserver" in command(pid)}
    return {child for server in servers for child in children(server)}


def indexed(runs: Runs, below: Any = None, above: Any = None, samples: int = 60) -> Any:
    graph = runs.blend().limit(samples=samples)
    if below is not None:
        graph = graph.map(below, seeded=False)
    graph = graph.batch_samples(MICRO).collate_causal_lm(sample_numbers=True)
    return graph if above is None else graph.map(above, seeded=False)


def streams() -> "dict[str, Any]":
    return {
        "map": Count(25).map(in_disorder).map(add_one),
        "map#2": Count(25).map(add_one).map(in_disorder),
        "filter": Count(25).filter(odd).map(add_one),
        "collate": Count(25).collate(as_tensor).batch(2),
        "map, in a replayed graph": IterableWrapper(range(25)).map(in_disorder).batch(3).unbatch(),
    }


# The same items -----------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("node", ["map", "collate_causal_lm", "batch_samples", "map below"])
@pytest.mark.parametrize("where", [*PLACES[::-1], Threads(2)], ids=str)
def test_an_indexed_graph_gives_the_same_and_goes_on_from_every_step(runs, where, node):
    below, above = (in_disorder, None) if node == "map below" else (None, in_disorder)
    graph, plain = indexed(runs, below, above), list(indexed(runs))
    adapter = Placement({node.split()[0]: where})
    loader = DataLoader2(graph, adapter)
    states, found = [written(loader.state_dict())], []
    for item in loader:
        found.append(item)
        states.append(written(loader.state_dict()))
    assert all_same(found, plain)
    bare = DataLoader2(graph)
    for k, state in list(enumerate(states))[:-1]:
        bare.load_state_dict(state)
        assert all_same(take(bare, 2), plain[k : k + 2])
        loader.load_state_dict(state)
        assert all_same(take(loader, 2), plain[k : k + 2])
    assert all_same(loader.datapipe.fetch([3, 0, 3]), [plain[k] for k in (3, 0, 3)])


@pytest.mark.filterwarnings("ignore:a resume of this stream")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("where", [*PLACES[::-1], Threads(2)], ids=str)
def test_a_stream_gives_the_same_and_goes_on_from_every_step(where, name):
    graph, plain = streams()[name], list(streams()[name])
    adapter = Placement({name.partition(",")[0]: where})
    loader = DataLoader2(graph, adapter)
    for _ in range(2):  # and a second epoch
        states, found = [], []
        for item in loader:
            found.append(item)
            states.append(written(loader.state_dict()))
        assert all_same(found, plain)
    bare = DataLoader2(graph)
    for k, state in enumerate(states, 1):
        bare.load_state_dict(state)
        assert all_same(bare, plain[k:])
    for k in range(1, len(states), 5):
        loader.load_state_dict(states[k - 1])
        assert all_same(loader, plain[k:])
    later = DataLoader2(graph)  # and a state from without goes on with it
    assert all_same(take(later, 3), plain[:3])
    loader.load_state_dict(written(later.state_dict()))
    assert all_same(loader, plain[3:])


def test_it_runs_where_it_was_placed(runs):
    for graph, number in ((indexed(runs, above=Where()), 15), (Count(15).map(Where()), 15))[0 if SOAK else 1 :]:
        here = os.getpid(), threading.get_ident()
        assert {item[1:] for item in DataLoader2(graph)} == {here}
        threads = [item[1:] for item in DataLoader2(graph, Placement({"map": Threads(3)}))]
        assert len(threads) == number
        assert {pid for pid, _ in threads} == {here[0]}
        assert here not in threads
        placed = [item[1] for item in DataLoader2(graph, Placement({"map": Processes(2)}))]
        assert len(placed) == number
        assert here[0] not in placed
        assert 1 <= len(set(placed)) <= 2


def test_threads_that_begin_one_placed_node_at_once_share_its_pool():
    for _ in range(20):
        wrapper, together, found = PlacementWrapper(Threads(2), "map"), threading.Barrier(8), []

        def begin(wrapper=wrapper, together=together, found=found):
            together.wait()
            found.append(wrapper._submit())

        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(submit) for submit in found}) == 1  # of two the calls of one would never be answered


def test_breaks_epochs_and_seeks_of_a_running_loader(runs):
    for where in PLACES[1 : 3 if SOAK else 2]:
        graph = indexed(runs, above=in_disorder)
        plain = list(indexed(runs))
        loader = DataLoader2(graph, Placement({"map": where}))
        for item in loader:
            assert all_same([item], plain[:1])
            break
        assert all_same(loader, plain[1:])
        assert all_same(loader, plain)
        iterator = iter(loader)
        assert all_same(take(iterator, 3), plain[:3])
        loader.seek(9)
        assert all_same(take(loader, 3), plain[9:12])
        loader.seek(0)
        assert all_same(loader, plain)


def test_new_weights_on_a_running_loader_reach_the_placed_node(runs):
    def delivered(adapter: Any) -> "list[Any]":
        loader = DataLoader2(runs.training.map(in_disorder, seeded=False), adapter)
        found = take(loader, 6)
        loader.update_weights({"prose": 0.1, "code": 0.9})
        return found + take(loader, 10)

    expected = delivered(None)
    for where in PLACES[1 : 3 if SOAK else 2]:
        assert all_same(delivered(Placement({"map": where})), expected)


def test_threads_inside_workers_give_the_same(runs):
    service = MultiProcessingReadingService(2, "fork")
    with DataLoader2(indexed(runs, above=in_disorder), Placement({"map": Threads(2)}), service) as loader:
        assert all_same(loader, indexed(runs))
    service = MultiProcessingReadingService(2, "fork")
    graph = Count(25).sharding_filter().map(in_disorder)
    with DataLoader2(graph, Placement({"map": Threads(2)}), service) as loader:
        assert list(loader) == list(range(25))
        assert take(loader, 7) == list(range(7))
        state = written(loader.state_dict())
        loader.load_state_dict(state)
        assert list(loader) == list(range(7, 25))


def test_a_prefetching_service_and_other_adapters_around_give_the_same(runs, tmp_path):
    for where in PLACES if SOAK else PLACES[1:2]:
        for service in (None, InProcessReadingService(prefetch_cnt=3)):
            adapters = [Placement({"map": where}), Prefetch(2), Timeout(60)]
            assert all_same(DataLoader2(indexed(runs, above=in_disorder), adapters, service), indexed(runs))
            assert list(DataLoader2(Count(20).map(tenfold), adapters, service)) == [10 * k for k in range(20)]


# Exceptions ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "where, what",
    [(Processes(1), what) for what in ("Custom", "HoldsALock", "KeywordOnly")]
    + [(Threads(3), what) for what in ERRORS],
    ids=str,
)
def test_an_exception_comes_at_its_own_item_with_its_type(runs, where, what):
    kind = type(ERRORS[what](1))
    kinds: Any = (kind, RuntimeError) if kind is StopIteration else kind
    cases = [(indexed(runs, above=Raises(28, what)), 7, 28), (Count(60).map(Raises(37, what)), 37, 37)]
    if isinstance(where, Processes):  # which take long to start
        cases = cases[what == "Custom" :][:1]
    for graph, at, number in cases:
        loader, found = DataLoader2(graph, Placement({"map": where})), []
        with pytest.raises(kinds) as raised:
            for item in loader:
                found.append(item)
        assert len(found) == at
        if kind is not StopIteration:
            assert kind.__name__ in str(raised.value) or type(raised.value) is kind
            assert str(ERRORS[what](number)) in str(raised.value)


@pytest.mark.parametrize("where", PLACES[1:], ids=str)
def test_an_exception_among_quick_items_comes_at_its_own_one(runs, where):
    """Many quick items are made together."""
    graph = indexed(runs, above=Raises(4 * 150, "ValueError"), samples=4 * 200)
    plain = list(indexed(runs, samples=4 * 200))
    loader, found = DataLoader2(graph, Placement({"map": where})), []
    with pytest.raises(ValueError, match="raised at 600"):
        for item in loader:
            found.append(item)
    assert all_same(found, plain[:150])
    assert loader.state_dict()["consumed_samples"] == 600
    again = DataLoader2(graph, Placement({"map": Threads(2)}))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="raised at 600"):
        next(iter(again))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", PLACES[::-1], ids=str)
def test_an_exception_of_the_input_comes_after_the_items_before_it(where):
    loader, found = DataLoader2(Count(20, raises=True).map(add_one), Placement({"map": where})), []
    with pytest.raises(LookupError, match="broken here"):
        for item in loader:
            found.append(item)
    assert found == list(range(1, 21))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "where, placed_first",
    [(Processes(1), False), (Processes(1), True), (Threads(2), False), (Threads(2), True), (Threads(3), True)],
    ids=str,
)
def test_retries_and_skips_of_the_placed_node_work_and_are_counted(runs, tmp_path, where, placed_first):
    def adapted(graph: Any, guard: Any) -> Any:
        adapters = [Placement({"map": where}), guard]
        return DataLoader2(graph, adapters if placed_first else adapters[::-1])

    retry = Retry(OSError, wait=0, nodes="map")
    loader = adapted(indexed(runs, above=Fails([0, 20, 56], tmp_path)), retry)
    assert all_same(loader, indexed(runs))
    assert 1 <= retry.count == loader.metrics()["data/retried"] <= 3, "what had failed ahead is made again with it"
    for path in tmp_path.glob("failed-*"):
        path.unlink()
    retry = Retry(OSError, wait=0)
    loader = adapted(Count(25).map(Fails([0, 7, 24], tmp_path)), retry)
    assert list(loader) == list(range(25))
    assert retry.count == loader.metrics()["data/retried"] == 3
    skip = SkipErrors(3, nodes="map")
    loader = adapted(Count(25).map(Fails([0, 7, 24], tmp_path, once=False)), skip)
    assert list(loader) == [k for k in range(25) if k not in (0, 7, 24)]
    assert skip.count == loader.metrics()["data/skipped"] == 3


@pytest.mark.parametrize("where", [Processes(1), Threads(2)], ids=str)
def test_samples_that_cannot_be_made_there_are_masked_and_counted_here(runs, tmp_path, where):
    firsts = [number_of(row) for row in runs.blend().fetch([5, 30])]
    skip = SkipErrors(2)
    graph = indexed(runs, below=Fails(firsts, tmp_path, once=False))
    found = list(DataLoader2(graph, [skip, Placement({"collate_causal_lm": where})]))
    plain = list(DataLoader2(graph, SkipErrors(2)))
    assert all_same(found, plain)
    assert [sample for _, sample, _ in skip.skipped] == [5, 30]


# Refusals -----------------------------------------------------------------------------------------------


def test_what_cannot_be_placed_is_named_with_the_reason(runs):
    for nodes, graph, words in (
        ({"permute": Threads(2)}, indexed(runs), "numbers"),
        ({"batch": Threads(2)}, Count(9).batch(2), "function"),
        ({"count": Processes(2)}, Count(9).map(tenfold), "function"),
        ({"nowhere": Threads(2)}, Count(9).map(tenfold), "nowhere"),
        ({"map": Threads(2)}, runs.training.map(tenfold), "seed"),
    ):
        with pytest.raises(GraphError, match=words) as raised:
            DataLoader2(graph, Placement(nodes))
        assert next(iter(nodes)) in str(raised.value)
    for wrong in ({}, None, {"map": 3}, [("map", Threads(2))]):
        with pytest.raises(ArgumentTypeError):
            Placement(wrong)
    for count in (0, -1):
        with pytest.raises(ConfigurationError):
            Threads(count)
        with pytest.raises(ConfigurationError):
            Processes(count)
    for count in (1.5, "2", True):
        with pytest.raises(ArgumentTypeError):
            Threads(count)


def test_processes_inside_worker_processes_are_refused_with_the_reason(runs):
    for graph in (indexed(runs, above=in_disorder), Count(20).sharding_filter().map(tenfold)):
        service = MultiProcessingReadingService(1, "fork")
        with (
            pytest.raises(GraphError, match="worker"),
            DataLoader2(graph, Placement({"map": Processes(2)}), service) as loader,
        ):
            list(loader)


# Processes that end -------------------------------------------------------------------------------------


def test_no_process_stays_when_the_loader_is_gone(runs):
    for graph in (indexed(runs, above=in_disorder), Count(10**6).map(in_disorder))[: 2 if SOAK else 1]:
        loader = DataLoader2(graph, Placement({"map": Processes(2)}))
        iterator = iter(loader)
        take(iterator, 3)
        assert placed_processes()
        loader.shutdown()
        del loader, iterator
        gc.collect()
        assert wait_for(lambda: not placed_processes(), 10)


def test_a_process_that_is_killed_is_an_error_and_no_hang(runs):
    for graph in (indexed(runs, above=Dies(20)), Count(60).map(Dies(20)))[: 2 if SOAK else 1]:
        with pytest.raises(WorkerError, match=r"map.*Processes|map.*process"):
            list(DataLoader2(graph, Placement({"map": Processes(2)})))
    loader = DataLoader2(Count(10**6).map(in_disorder), Placement({"map": Processes(2)}))
    iterator = iter(loader)
    take(iterator, 3)
    for pid in placed_processes():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        take(iterator, 100)


def test_a_node_that_is_stuck_there_is_named_by_its_timeout():
    for where in (Threads(2), Processes(1))[: 2 if SOAK else 1]:
        graph = Count(30).map(sleeps_at_nine)
        found = []
        with pytest.raises(NodeTimeoutError, match="map"):
            for item in DataLoader2(
                graph, [Placement({"map": where}), Timeout(4.0 if isinstance(where, Processes) else 0.5)]
            ):
                found.append(item)
        assert found == list(range(9))
        for pid in placed_processes():  # the thread that waits for it keeps it
            os.kill(pid, signal.SIGKILL)


def sleeps_at_nine(item: Any) -> Any:
    if item == 9:
        faulty.nap_for_ever()
    return item


RUNS = """
    import sys, time
    from test_placement import Count, Placement, Processes, in_disorder, placed_processes, DataLoader2
    import signal, os

    if __name__ == "__main__":
        loader = DataLoader2(Count(10**9).map(in_disorder), Placement({"map": Processes(2)}))
        for k, _ in enumerate(loader):
            if k == 5:
                print(*placed_processes(), flush=True)
                if sys.argv[1] == "exit":
                    sys.exit(3)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_no_process_stays_when_the_main_process_is_gone(tmp_path, how):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(RUNS))
    main = subprocess.Popen(
        [sys.executable, str(script), how],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 2
        if how == "kill":
            assert all(alive(pid) for pid in pids)
            main.send_signal(signal.SIGKILL)
        assert main.wait(PATIENCE) == (3 if how == "exit" else -signal.SIGKILL)
        assert gone(pids), "one that has only begun comes to see it once it has imported what it needs"
    finally:
        main.kill()
        main.wait()
        assert main.stdout is not None
        main.stdout.close()
