"""Prefetch, PinMemory, ToDevice; Defaults and Autotune: what is made ahead or moved, where, and who says how."""

import gc
import os
import threading
import time
from collections import namedtuple
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from adapted import GRAPHS, Cleans, Plain, graphs, loader_of, negated
from contract import all_same
from faulty import Runs
from processes import descendants, gone, prefetching_threads, wait_for
from tokenpipe.adapters import (
    Autotune,
    Defaults,
    PinMemory,
    Prefetch,
    Profile,
    Retry,
    SkipErrors,
    Tap,
    Timeout,
    ToDevice,
)
from tokenpipe.datapipes.batch import Rows
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, LoaderWarning
from tokenpipe.datapipes.items import items_of
from tokenpipe.datapipes.names import named_nodes
from tokenpipe.datapipes.wrapped import wrappers_of
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forks of a process with threads, by torch
    pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning"),
    pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted"),
]

Pair = namedtuple("Pair", "tokens name")


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def nested(k: int) -> Any:
    one = torch.full((3,), k)
    return {"a": one, "b": [one + 1, (one + 2, "text")], "c": Pair(one + 3, b"x"), "d": np.arange(k), "e": None}


def fails_at_five(k: int) -> int:
    if k == 5:
        raise ZeroDivisionError("five")
    return k


class Where:
    """Writes down in which process and thread it is called."""

    def __init__(self, path: Any) -> None:
        self.path = str(path)

    def __call__(self, item: Any) -> Any:
        with Path(self.path).open("a") as file:
            file.write(f"{os.getpid()} {threading.get_ident()}\n")
        return item

    def said(self) -> "list[tuple[int, int]]":
        return [(int(a), int(b)) for a, b in (line.split() for line in Path(self.path).read_text().splitlines())]


# Prefetch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_a_thread_makes_so_many_items_ahead_and_no_more(depth, tmp_path):
    where = Where(tmp_path / "said")
    items = iter(Prefetch(depth)(IterableWrapper(range(100)).map(where)))
    assert next(items) == 0
    assert wait_for(lambda: len(where.said()) >= 1 + depth, 10)
    time.sleep(0.05)
    assert 1 + depth <= len(where.said()) <= 2 + depth
    assert {thread for _, thread in where.said()}.isdisjoint({threading.get_ident()})
    assert list(items) == list(range(1, 100))


def test_at_any_edge_of_a_stream_the_items_are_the_same():
    def graph() -> Any:
        return IterableWrapper(range(30)).shuffle(buffer_size=4).set_seed(3).map(negated).batch(4)

    expected = list(graph())
    for name in ("batch", "map", "shuffle", "iterablewrapper"):
        dressed = Prefetch(3, name)(graph())
        assert list(dressed) == expected, name
        (at,) = [n for node, n in named_nodes(dressed) if wrappers_of(node)]
        assert at == name
    assert list(Prefetch(2, ["batch", "map"])(Prefetch(5, "shuffle")(graph()))) == expected
    assert prefetching_threads() == 0


def test_at_the_edges_above_the_batches_of_an_indexed_graph(runs):
    graph = runs.finite().map(dict, seeded=False)
    expected = list(items_of(graph))
    for name in ("map", "collate_causal_lm", "batch_samples"):
        dressed = Prefetch(3, name)(graph)
        assert all_same(items_of(dressed), expected), name
        assert all_same(dressed.iterate(4, 7), expected[4:7])
        assert dressed.fingerprint() == graph.fingerprint()
    assert prefetching_threads() == 0


@pytest.mark.parametrize(
    ("name", "node", "why"),
    [
        ("indexed", "blend", "only re-orders|several numbers at once"),
        ("indexed", "blend.0.slice_sequences", "only re-orders|several numbers at once"),
        ("indexed, a map below", "map", "several numbers at once"),
        ("map style", "map", "asked by index"),
        ("indexed", "nobody", "there is no node 'nobody'"),
    ],
)
def test_a_place_where_nothing_can_be_made_ahead_is_named(name, node, why, tmp_path):
    with pytest.raises(GraphError, match=why) as caught:
        Prefetch(2, node)(graphs(tmp_path)[name]())
    assert node in str(caught.value)


def test_a_map_that_seeds_the_process_is_refused_by_name_wherever_it_stands_below(runs):
    seeded = runs.finite().map(dict)
    for graph in (seeded, seeded.map(dict, seeded=False), seeded.zip(seeded)):
        with pytest.raises(GraphError, match=r"map.*seeded=False"):
            Prefetch(2)(graph)
    with pytest.raises(GraphError, match="seeded=False"):
        Prefetch(2, "map")(seeded)
    Prefetch(2, "collate_causal_lm")(seeded)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "two", None, True])
def test_a_depth_is_a_count(wrong):
    with pytest.raises((ArgumentTypeError, ConfigurationError)):
        Prefetch(wrong)


@pytest.mark.parametrize("service", ["in process", "reading ahead"])
@pytest.mark.parametrize("name", ["indexed", "torch, placed", "torch, forked", "ours"])
def test_its_thread_ends_with_the_iteration(name, service, tmp_path):
    graph = Prefetch(3)(graphs(tmp_path)[name]())
    loader = loader_of(graph, service)
    items = iter(loader)
    next(items)
    items = iter(loader)  # a new one
    next(items)
    for _ in loader:
        break
    if name == "indexed":
        loader.seek(3)
        assert prefetching_threads() == 0, "seek"
        next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert prefetching_threads() == 0, "a loaded state"
    list(loader)
    assert prefetching_threads() == 0, "the end"
    next(iter(loader))
    loader.shutdown()
    assert prefetching_threads() == 0, "shutdown"


def test_its_thread_ends_with_a_loader_or_an_iterator_that_nobody_holds(runs):
    next(iter(DataLoader2(runs.training, Prefetch(2))))
    gc.collect()
    assert prefetching_threads() == 0
    items = iter(Prefetch(2)(IterableWrapper(range(100)).map(negated)))
    next(items)
    del items
    gc.collect()
    assert prefetching_threads() == 0


def test_an_exception_comes_where_its_item_would_and_ends_the_thread():
    loader = DataLoader2(IterableWrapper(range(10)).map(fails_at_five), Prefetch(4))
    found = []
    with pytest.raises(ZeroDivisionError, match="five"):
        for item in loader:
            found.append(item)
    assert found == [0, 1, 2, 3, 4]
    assert prefetching_threads() == 0


def test_what_is_below_is_cleaned_up_by_the_time_it_is_closed(tmp_path):
    source = Cleans(str(tmp_path / "said"), 50)
    items = iter(Prefetch(3)(source.map(negated)))
    next(items)
    items.close()
    assert source.said() == {os.getpid(): ["begins", "ends"]}


def test_a_prefetch_under_workers_runs_in_them_or_not_at_all_and_keeps_the_items(tmp_path):
    for name in ("indexed", "torch, placed"):
        for node in (None, "batch_samples" if name == "indexed" else "map"):
            with loader_of(graphs(tmp_path)[name](), "workers") as loader:
                expected = list(loader)
            with loader_of(Prefetch(3, node)(graphs(tmp_path)[name]()), "workers") as loader:
                assert all_same(loader, expected)


# PinMemory and ToDevice --------------------------------------------------------------------------------------------


def devices(item: Any) -> "set[str]":
    found: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.add(value.device.type)
        elif isinstance(value, dict):
            list(map(look, value.values()))
        elif isinstance(value, (list, tuple)):
            list(map(look, value))

    look(item)
    return found


@pytest.mark.parametrize("service", ["in process", "reading ahead", "workers"])
def test_every_tensor_of_an_item_is_moved_and_all_else_is_as_it_was(service):
    expected = [nested(k) for k in range(6)]
    graph = IterableWrapper(range(6)).sharding_filter().map(nested)
    with loader_of(ToDevice("meta")(graph), service) as loader:
        found = list(loader)
    assert len(found) == 6
    for k, item in enumerate(found):
        assert devices(item) == {"meta"}
        assert item["a"].shape == (3,)
        assert type(item["b"][1]) is tuple
        assert item["b"][1][1] == "text"
        assert type(item["c"]) is Pair
        assert item["c"].name == b"x"
        assert np.array_equal(item["d"], np.arange(k))
        assert item["e"] is None
    with loader_of(PinMemory()(ToDevice("cpu")(graph)), service) as loader:
        assert all_same(loader, expected)


def test_batches_and_rows_of_indexed_graphs_are_moved(runs):
    for item in DataLoader2(runs.finite(), ToDevice("meta")):
        assert devices(item) == {"meta"}
        assert item["input_ids"].shape == (4, 8)
    batches = runs.blend().limit(samples=12).batch_samples(4)
    rows = list(DataLoader2(batches, ToDevice("meta")))
    assert all(type(item) is Rows for item in rows)
    assert all_same(DataLoader2(batches, [ToDevice("cpu"), PinMemory()]), list(items_of(batches)))


def test_a_map_style_graph_is_moved_item_by_item():
    graph = ToDevice("meta")(SequenceWrapper(list(range(5))).map(nested))
    assert devices(graph[3]) == {"meta"}
    assert [devices(item) for item in DataLoader2(graph)] == [{"meta"}] * 5


@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_under_workers_it_runs_in_the_process_of_the_loop_and_so_does_what_is_around_it(kind, runs, tmp_path):
    inside, outside = Where(tmp_path / "inside"), Where(tmp_path / "outside")
    stream = IterableWrapper(range(12)).sharding_filter().map(nested)
    graph: Any = stream if kind == "stream" else runs.finite()
    before = descendants()
    adapters = [Tap(inside), ToDevice("meta"), Tap(outside)]
    with DataLoader2(graph, adapters, MultiProcessingReadingService(2, "fork")) as loader:
        items = list(loader)
        assert all(devices(item) == {"meta"} for item in items)
    assert {pid for pid, _ in outside.said()} == {os.getpid()}
    assert len(outside.said()) == len(items)
    assert os.getpid() not in {pid for pid, _ in inside.said()}
    assert len({pid for pid, _ in inside.said()}) == 2
    assert gone(descendants() - before, 10)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("service", ["in process", "workers"])
def test_it_moves_what_comes_through_a_full_sync(service, one_rank, tmp_path):
    outside = Where(tmp_path / "outside")
    graph = IterableWrapper(range(6)).sharding_filter().map(nested).fullsync()
    with loader_of(Tap(outside)(ToDevice("meta")(graph)), service) as loader:
        assert [devices(item) for item in loader] == [{"meta"}] * 6
    assert [pid for pid, _ in outside.said()] == [os.getpid()] * 6


@pytest.mark.parametrize("wrong", ["nowhere", "cuda:x", [], 1.5])
def test_no_device_is_refused(wrong):
    with pytest.raises(ArgumentTypeError, match="ToDevice takes a device"):
        ToDevice(wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
def test_on_cuda_the_items_are_copied_ahead_and_right(runs):
    expected = list(DataLoader2(runs.finite()))
    for ahead in (0, 1, 3):
        loader = DataLoader2(runs.finite(), [PinMemory(), ToDevice("cuda", ahead)])
        found = list(loader)
        assert all(devices(item) == {"cuda"} for item in found)
        assert all_same([{k: v.cpu() for k, v in item.items()} for item in found], expected)


# Defaults ---------------------------------------------------------------------------------------------------------


def said_by(graph: Any, **environment: str) -> "tuple[Defaults, list[str], DataLoader2]":
    lines: list[str] = []
    defaults = Defaults(lines.append)
    return defaults, lines, DataLoader2(graph, defaults)


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", GRAPHS)
def test_defaults_say_three_settings_each_with_a_reason_and_the_loader_takes_them(name, tmp_path, four_cores):
    defaults, lines, loader = said_by(graphs(tmp_path)[name]())
    assert [line.split(":")[0] for line in lines] == ["workers", "prefetch", "pin memory"]
    assert all(len(line.split(": ", 2)[2]) > 10 for line in lines), "a reason"
    settings = defaults.settings
    assert settings is not None
    assert lines[0].startswith(f"workers: {settings.num_workers}:")
    assert lines[1].startswith(f"prefetch: {settings.prefetch}:")
    assert ("yes" in lines[2]) == settings.pin_memory == torch.cuda.is_available()
    assert loader.reading_service.num_workers == settings.num_workers
    if not settings.num_workers:
        assert isinstance(loader.reading_service, InProcessReadingService)
        assert loader.reading_service.prefetch_cnt == settings.prefetch
    loader.shutdown()


def test_token_files_alone_want_neither_workers_nor_threads_and_code_of_the_users_does(runs, four_cores):
    defaults, lines, _ = said_by(runs.finite())
    assert (defaults.settings.num_workers, defaults.settings.prefetch) == (0, 0)
    assert "one gather a batch" in lines[0]
    for graph in (runs.finite().map(dict), IterableWrapper(range(9)).map(negated), Plain(IterableWrapper(range(9)))):
        defaults, lines, loader = said_by(graph)
        assert defaults.settings.num_workers == 3, "four cores, one for the loop"
        assert isinstance(loader.reading_service, MultiProcessingReadingService)
        assert "code of yours" in lines[0]
        assert "4 cores" in lines[0]


def test_a_node_with_the_nodes_cores_shared_by_ranks(four_cores):
    graph = IterableWrapper(range(9)).map(negated)
    for ranks, workers in (("1", 3), ("2", 1), ("4", 0), ("64", 0), ("0", 3), ("many", 3), ("", 3), ("-2", 3)):
        four_cores.setenv("LOCAL_WORLD_SIZE", ranks)
        defaults, lines, _ = said_by(graph)
        assert defaults.settings.num_workers == workers, ranks
        if workers == 0:
            assert "one core" in lines[0]
            assert defaults.settings.prefetch == 2, "a thread instead"


def test_only_rank_zero_says_them(four_cores):
    four_cores.setenv("RANK", "1")
    four_cores.setenv("WORLD_SIZE", "2")
    defaults, lines, _ = said_by(IterableWrapper(range(9)).map(negated))
    assert lines == []
    assert defaults.settings is not None


def test_a_service_that_is_given_is_kept_and_said_nothing_of(runs):
    service = InProcessReadingService(3)
    loader = DataLoader2(runs.finite(), Defaults([].append), service)
    assert loader.reading_service is service
    assert len(list(loader)) == 10


def test_what_says_is_a_function():
    for kind in (Defaults, lambda say: Autotune(1, say)):
        with pytest.raises(ArgumentTypeError, match="say"):
            kind("print")


# Autotune ---------------------------------------------------------------------------------------------------------


def tuned(graph: Any, seconds: float = 0.3) -> "tuple[Autotune, list[str], DataLoader2]":
    lines: list[str] = []
    tune = Autotune(seconds, lines.append)
    return tune, lines, DataLoader2(graph, tune)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_autotune_takes_what_it_says_on_an_indexed_graph(runs, two_cores):
    before = descendants()
    tune, lines, loader = tuned(runs.training)
    settings = tune.settings
    assert settings is not None
    assert lines[-1] == f"taken: workers {settings.num_workers}, prefetch {settings.prefetch}"
    assert all("items/s" in line for line in lines[:-1])
    assert tune.rates.keys() == {(0, 0), (0, 2), (1, 0), (2, 0)}
    assert tune.rates[settings.num_workers, settings.prefetch] >= 0.95 * max(tune.rates.values())
    assert loader.reading_service.num_workers == settings.num_workers
    assert loader.reading_service.prefetch_cnt == settings.prefetch
    assert wait_for(lambda: all("forkserver" in c or "tracker" in c for c in commands(descendants() - before)), 10)
    with loader:
        assert [int(b["sample_numbers"][0]) for b in islice(loader, 5)] == [0, 4, 8, 12, 16], "from the beginning"


def commands(pids: Any) -> "list[str]":
    from processes import command

    return [command(pid) for pid in pids]


def test_a_tiny_finite_stream_is_measured_over_and_over_and_begins_anew(two_cores):
    tune, lines, loader = tuned(IterableWrapper(range(3)).sharding_filter().map(negated), 0.2)
    assert len(lines) == 5
    assert all(rate > 0 for rate in tune.rates.values())
    with loader:
        assert list(loader) == [0, -1, -2]


def test_fewest_workers_within_a_hair_of_the_best_are_taken(two_cores):
    tune, _, loader = tuned(IterableWrapper(range(4000)).sharding_filter().map(slow), 1.2)
    near = [found for found, rate in tune.rates.items() if rate >= 0.95 * max(tune.rates.values())]
    assert (tune.settings.num_workers, tune.settings.prefetch) == near[0]
    loader.shutdown()


def slow(item: Any) -> Any:
    time.sleep(0.002)
    return item


def test_a_setting_that_cannot_be_run_is_said_and_left_out(runs, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    tune, lines, loader = tuned(runs.finite().map(dict), 0.1)  # seeded: no thread may
    assert any("prefetch 2: cannot be run so: ConfigurationError" in line for line in lines)
    assert (0, 2) not in tune.rates
    with loader:
        assert len(list(loader)) == 10


def test_a_graph_without_items_has_nothing_to_measure():
    with pytest.raises(GraphError, match="nothing to measure"):
        DataLoader2(IterableWrapper([]), Autotune(0.1, [].append))


def test_a_graph_that_raises_says_what_it_raises():
    with pytest.raises(ZeroDivisionError, match="five"):
        DataLoader2(IterableWrapper([5]).map(fails_at_five), Autotune(0.1, [].append))


def test_beside_a_service_that_is_given_it_warns_and_tunes_nothing(runs):
    lines: list[str] = []
    service = InProcessReadingService()
    with pytest.warns(LoaderWarning, match="Autotune tunes nothing"):
        loader = DataLoader2(runs.finite(), Autotune(1, lines.append), service)
    assert (loader.reading_service, lines) == (service, [])


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), "5", None, True])
def test_seconds_are_a_number_above_zero(wrong):
    with pytest.raises((ArgumentTypeError, ConfigurationError), match="seconds"):
        Autotune(wrong)


@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_measuring_counts_in_nothing_of_the_run(kind, runs, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    retry, profile, skip = Retry(OSError), Profile(), SkipErrors(1000000, ZeroDivisionError)
    stream = IterableWrapper(range(10)).sharding_filter().map(fails_at_five)
    graph: Any = stream if kind == "stream" else runs.finite()
    with DataLoader2(graph, [retry, skip, profile, Timeout(60), Autotune(0.1, [].append)]) as loader:
        assert "noted" not in loader.state_dict()
        assert (retry.count, skip.count, profile.items) == (0, 0, 0)
        assert [node.calls for node in profile.nodes if node.calls] == []
        found = len(list(loader))
    assert (found, skip.count) == ((9, 1) if kind == "stream" else (10, 0))
    assert profile.nodes[0].calls == 10
