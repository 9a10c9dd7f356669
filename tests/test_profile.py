"""Profile: what is counted and timed of each kind of graph, the slow node found, the table, trace and picture."""

import json
import os
import shutil
import threading
import time
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from adapted import GRAPHS, graphs, is_odd, loader_of, negated
from contract import all_same
from faulty import Runs
from processes import descendants, gone, wait_for
from tokenpipe.adapters import NodeProfile, Placement, Prefetch, Processes, Profile, Tap, Threads, Timeout, applied
from tokenpipe.datapipes import IndexedDataPipe
from tokenpipe.datapipes.errors import LoaderError
from tokenpipe.datapipes.names import named_nodes
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forks of a process with threads, by torch
    pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning"),
    pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted"),
]


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def sleepy(item: Any) -> Any:
    time.sleep(0.01)
    return item


def busy(item: Any) -> Any:
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        sum(range(500))
    return item


def fails_at_three(item: Any) -> Any:
    if item == 3:
        raise ZeroDivisionError("three")
    return item


class SlowToBegin(IterDataPipe):
    """A user's source that takes its time before the first item."""

    def __iter__(self) -> Any:
        time.sleep(0.1)
        yield from range(3)


class Own(IterDataPipe):
    """A user's node, which waits for each item."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> Any:
        for item in self.datapipe:
            time.sleep(0.005)
            yield item


class Batches(IndexedDataPipe):
    """A user's indexed node, which computes."""

    functional_name = "batches_of_mine"

    def __init__(self, datapipe: Any) -> None:
        super().__init__(datapipe)

    def fetch(self, numbers: Any, columns: Any = None) -> Any:
        return [busy(item) for item in self.datapipe.fetch(numbers)]


def of(profile: Profile) -> "dict[str, NodeProfile]":
    return {node.node: node for node in profile.nodes}


def measured(graph: Any, n: "int | None" = None, **settings: Any) -> "tuple[Profile, list[Any]]":
    """What a Profile has seen of a graph's first n items."""
    profile = Profile()
    with DataLoader2(graph, profile, InProcessReadingService(**settings)) as loader:
        items = list(islice(loader, n))
    return profile, items


def check_sound(profile: Profile) -> None:
    """Own times and totals nest, and nothing is below nothing."""
    found = of(profile)
    below = {name: set(names) for name, names in profile._below.items()}
    for name, node in found.items():
        assert 0 <= node.own <= node.total + 1e-12
        assert -1e-9 <= node.waiting <= node.own + 1e-9
        assert node.longest <= max(n.total for n in found.values()) + 1e-9 or node.calls != 1
        assert node.calls >= 0
        assert node.samples >= 0
        assert node.bytes >= 0
        for other in below[name]:
            assert found[other].total <= node.total + 1e-9, (name, other)


# Counts ---------------------------------------------------------------------------------------------------------


def test_the_counts_of_a_short_stream_are_exact():
    graph = IterableWrapper(range(60)).shuffle(buffer_size=7).map(negated).filter(is_odd).batch(4)
    profile, items = measured(graph)
    assert len(items) == 8
    assert {name: node.calls for name, node in of(profile).items()} == {
        "batch": 8,
        "filter": 30,
        "map": 60,
        "shuffle": 60,
        "iterablewrapper": 60,
    }
    assert (profile.items, profile.workers) == (8, 0)
    assert (of(profile)["batch"].samples, of(profile)["map"].samples) == (8, 60), "a list of numbers is one sample"
    assert of(profile)["batch"].bytes == 30 * 8
    check_sound(profile)


def test_the_counts_of_a_short_indexed_run_are_exact(runs):
    profile, items = measured(runs.finite(80))
    found = of(profile)
    assert len(items) == profile.items == 20
    for name in ("collate_causal_lm", "batch_samples", "batch_samples: gather"):
        assert found[name].calls == 20
        assert found[name].samples == 80
    assert found["collate_causal_lm"].bytes == sum(t.nbytes for batch in items for t in batch.values())
    assert set(found) == {name for _, name in named_nodes(runs.finite(80))} | {"batch_samples: gather"}
    check_sound(profile)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_kind_of_graph_is_measured(name, tmp_path):
    expected = list(loader_of(graphs(tmp_path)[name]()))
    profile = Profile()
    with loader_of(profile(graphs(tmp_path)[name]())) as loader:
        found = list(loader)
    assert all_same(found, expected)
    check_sound(profile)
    nodes = of(profile)
    assert [n for n in nodes if not n.endswith(": gather")] == [n for _, n in named_nodes(graphs(tmp_path)[name]())]
    top = profile.nodes[0]
    if expected:
        assert profile.slowest is not None
        assert profile.slowest.node in nodes
        assert f"Slowest: {profile.slowest.node}" in profile.report()
        assert top.calls == len(expected) or name == "indexed, samples"
    for line in profile.report().splitlines()[1 : 1 + len(nodes)]:
        assert line.split()[0].rstrip(":") in " ".join(nodes)


@pytest.mark.parametrize("name", ["torch", "indexed"])
def test_the_counts_of_a_long_run_of_quick_items_are_near(name, runs):
    n = 6000
    graph = IterableWrapper(range(n)).map(negated) if name == "torch" else runs.training
    profile, items = measured(graph, n)
    assert len(items) == profile.items == n
    for node in profile.nodes:
        if node.calls:
            assert node.calls == pytest.approx(n, rel=0.2), node
            assert node.samples == pytest.approx(n * (1 if name == "torch" else 4), rel=0.25), node
    check_sound(profile)


def test_what_is_around_a_profiled_graph_sees_each_item_of_a_long_run_once(runs):
    n = 4000
    seen: list[Any] = []
    profiles = [Profile(), Profile()]
    expected = [int(batch["sample_numbers"][0]) for batch in islice(DataLoader2(runs.training), n)]
    adapters = [profiles[0], Timeout(60), Tap(lambda b: seen.append(int(b["sample_numbers"][0]))), profiles[1]]
    found = [int(b["sample_numbers"][0]) for b in islice(DataLoader2(runs.training, adapters), n)]
    assert found == expected == seen
    for profile in profiles:
        assert profile.nodes[0].calls == pytest.approx(n, rel=0.2)


def test_strings_arrays_rows_and_lists_are_counted_as_samples_and_bytes():
    def node(items: "list[Any]") -> NodeProfile:
        return measured(IterableWrapper(items))[0].nodes[0]

    assert (node(["abc", "de"]).samples, node(["abc", "de"]).bytes) == (2, 5)
    rows = node([np.zeros((3, 4), np.int64)] * 2)
    assert (rows.samples, rows.bytes) == (6, 2 * 96)
    batches = node([{"input_ids": torch.zeros(5, 2, dtype=torch.int16), "label_ids": torch.zeros(5, 2)}])
    assert (batches.samples, batches.bytes) == (5, 20 + 40)
    assert node([["a", "b", "c"]]).samples == 3
    assert node([7]).samples == 1


def test_a_shuffles_buffer_is_seen_as_what_it_keeps():
    arrays = [np.zeros(100_000, np.uint8) for _ in range(40)]
    profile = Profile()
    items = iter(profile(IterableWrapper(arrays, deepcopy=False).map(sleepy).shuffle(buffer_size=30)))
    kept = wait_for(lambda: next(items) is None or of(profile)["shuffle"].held, pause=0.3)
    assert 2_000_000 <= kept <= 3_500_000
    assert of(profile)["map"].held < 100_000


# The slow node -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slow", "waits", "remedy"), [(sleepy, True, "Threads"), (busy, False, "Processes")])
def test_a_slow_function_of_a_stream_is_found_with_what_mends_it(slow, waits, remedy):
    graph = IterableWrapper(range(40)).map(negated).map(slow).filter(is_odd).batch(2)
    profile, _ = measured(graph)
    assert profile.slowest is not None
    assert profile.slowest.node == "map"
    assert profile.slowest.calls == 40
    assert 0.4 <= profile.slowest.own <= profile.nodes[0].total
    report = profile.report()
    assert "Slowest: map" in report
    assert ("mostly waiting" in report) == waits
    assert f"Placement({{'map': {remedy}(" in report
    assert "so would worker processes" in report
    Placement({"map": {"Threads": Threads, "Processes": Processes}[remedy](2)})(graph)  # what it says can be done


@pytest.mark.parametrize(("slow", "waits", "remedy"), [(sleepy, True, "Threads"), (busy, False, "Processes")])
def test_a_slow_function_of_an_indexed_graph_is_found_with_what_mends_it(slow, waits, remedy, runs):
    graph = runs.finite(120).map(slow, seeded=False)
    profile, items = measured(graph)
    assert profile.slowest is not None
    assert (profile.slowest.node, profile.slowest.calls) == ("map", len(items))
    report = profile.report()
    assert ("mostly waiting" in report) == waits
    assert f"Placement({{'map': {remedy}(" in report
    Placement({"map": {"Threads": Threads, "Processes": Processes}[remedy](2)})(graph)


def test_a_slow_map_below_the_batches_is_found(runs):
    graph = runs.source("prose").map(sleepy, seeded=False).limit(samples=40).batch_samples(4)
    profile, _ = measured(graph)
    assert profile.slowest is not None
    assert profile.slowest.node == "map"
    check_sound(profile)


def test_a_slow_node_of_a_users_is_found_by_its_name():
    profile, _ = measured(Own(IterableWrapper(range(30)).map(negated)).batch(2))
    assert profile.slowest is not None
    assert profile.slowest.node == "own"
    assert "Slowest: own" in profile.report()
    assert "Prefetch()" in profile.report()


def test_a_slow_indexed_node_of_a_users_is_found_by_its_name(runs):
    profile, _ = measured(Batches(runs.finite(80)))
    assert profile.slowest is not None
    assert profile.slowest.node == "batches_of_mine"
    assert "mostly computing" in profile.report()


def test_a_slow_beginning_counts():
    profile, _ = measured(SlowToBegin().map(negated))
    assert profile.slowest is not None
    assert profile.slowest.node == "slowtobegin"
    assert of(profile)["slowtobegin"].own >= 0.09


def test_one_of_two_nodes_of_a_name_is_told_from_the_other():
    one, two = IterableWrapper(range(20)).map(sleepy), IterableWrapper(range(20)).map(negated)
    profile, _ = measured(one.zip(two))
    assert profile.slowest is not None
    assert profile.slowest.node == "zip.0.map"


def test_the_total_of_the_last_node_is_the_time_of_making():
    profile = Profile()
    items = iter(profile(IterableWrapper(range(40)).map(sleepy).map(busy).batch(4)))
    began = time.perf_counter()
    for _ in items:
        pass
    wall = time.perf_counter() - began
    assert 0.8 * wall <= profile.nodes[0].total <= wall + 0.01
    check_sound(profile)


def test_a_loop_that_hardly_waits_is_told_that_there_is_nothing_to_gain():
    profile = Profile()
    with DataLoader2(IterableWrapper(range(20)).map(negated), profile) as loader:
        for _ in loader:
            time.sleep(0.02)
    assert profile.waited_share < 0.02
    assert "nothing to gain" in profile.report()


def test_a_loop_that_waits_is_told_how_long():
    profile, _ = measured(IterableWrapper(range(30)).map(sleepy))
    assert profile.waited >= 0.3
    assert 0.5 < profile.waited_share <= 1.0
    assert "waited" in profile.report()


# Processes and threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "indexed"])
def test_the_workers_are_merged(kind, runs):
    before = descendants()
    profile = Profile()
    stream = IterableWrapper(range(60)).sharding_filter().map(sleepy)
    graph: Any = stream if kind == "stream" else runs.finite(160).map(sleepy, seeded=False)
    with DataLoader2(graph, profile, MultiProcessingReadingService(2, "fork")) as loader:
        items = list(loader)
        assert wait_for(lambda: of(profile)["map"].calls >= len(items) or list(loader) is None, 1) is not None
    found = of(profile)
    assert profile.workers == 2
    assert profile.items >= len(items)
    assert found["map"].calls == pytest.approx(len(items), rel=0.3)
    assert found["map"].own >= 0.01 * found["map"].calls * 0.9
    assert profile.slowest is not None
    assert profile.slowest.node == "map"
    assert "2 worker process(es)" in profile.report()
    assert len({pid for *_, pid, _ in profile.ledger.spans}) == 2
    check_sound(profile)
    assert gone(descendants() - before, 10)


def test_two_iterators_that_take_turns_in_a_thread_do_not_disturb_each_other():
    quick, slow = Profile(), Profile()
    quick_items = iter(quick(IterableWrapper(range(4000)).map(negated)))
    slow_items = iter(slow(IterableWrapper(range(40)).map(sleepy)))
    for _ in range(40):
        for _ in range(100):
            next(quick_items)
        next(slow_items)
    assert of(slow)["map"].calls == 40
    assert 0.4 <= of(slow)["map"].own < 1.5
    assert of(slow)["map"].samples == 40
    assert of(quick)["map"].samples == pytest.approx(4000, rel=0.1)
    assert of(quick)["map"].own < 0.3


def test_a_thread_below_has_a_clock_of_its_own():
    for adapter in (Prefetch(2, "map"), Timeout(60, "map"), Placement({"map": Threads(2)})):
        graph = IterableWrapper(range(30)).map(sleepy).batch(2)
        profile = Profile()
        items = list(DataLoader2(graph, [adapter, profile]))
        assert len(items) == 15
        assert of(profile)["batch"].calls == 15
        if not isinstance(adapter, Placement):
            assert of(profile)["map"].calls == 30
            assert 0.3 <= of(profile)["map"].own < 3
    assert threading.active_count() < 20


# One Profile, several graphs; several Profiles, one graph -----------------------------------------------------------


def test_one_profile_on_two_graphs_in_turn_says_what_each_took(runs):
    profile = Profile()
    list(DataLoader2(IterableWrapper(range(30)).map(negated), profile))
    assert of(profile)["map"].calls == 30
    list(DataLoader2(runs.finite(80), profile))
    found = of(profile)
    assert "map" not in found
    assert found["collate_causal_lm"].calls == 20
    check_sound(profile)


def test_two_profiles_of_one_graph_agree():
    one, two = Profile(), Profile()
    items = list(DataLoader2(IterableWrapper(range(30)).map(negated).map(sleepy).batch(3), [one, two]))
    assert len(items) == 10
    for profile in (one, two):
        found = of(profile)
        assert {name: node.calls for name, node in found.items()} == {
            "batch": 10,
            "map": 30,
            "map.map": 30,
            "iterablewrapper": 30,
        } or Counter(node.calls for node in found.values()) == {30: 3, 10: 1}
        assert profile.slowest is not None
        assert profile.slowest.node == "map"
        assert 0.3 <= profile.slowest.own < 1.5
        check_sound(profile)


def test_two_profiles_of_one_indexed_graph_agree(runs):
    one, two = Profile(), Profile()
    list(DataLoader2(runs.finite(80).map(sleepy, seeded=False), [one, two]))
    for profile in (one, two):
        assert of(profile)["map"].calls == 20
        assert of(profile)["batch_samples: gather"].calls == 20
        assert 0.2 <= of(profile)["map"].own < 1.5
        check_sound(profile)


def test_several_epochs_add_up():
    profile = Profile()
    loader = DataLoader2(IterableWrapper(range(20)).map(negated), profile)
    for _ in range(3):
        list(loader)
    assert of(profile)["map"].calls == 60


# Exceptions -----------------------------------------------------------------------------------------------------------


def test_an_exception_in_a_node_leaves_the_clocks_sound():
    profile = Profile()
    for _ in range(3):
        graph = profile(IterableWrapper(range(6)).map(fails_at_three).map(sleepy))
        with pytest.raises(ZeroDivisionError):
            list(graph)
    assert of(profile)["map"].calls == 9
    assert profile.ledger.clocks.own.depth == 0
    assert not profile.ledger.clocks.own.off
    list(profile(IterableWrapper(range(3)).map(fails_at_three).map(sleepy)))
    assert of(profile)["map"].calls == 12
    assert of(profile)["map"].own >= 0.12
    check_sound(profile)


def test_an_exception_among_quick_items_leaves_the_clocks_sound():
    profile = Profile()
    with pytest.raises(ZeroDivisionError):
        list(profile(IterableWrapper([1] * 500 + [3]).map(fails_at_three)))
    assert not profile.ledger.clocks.own.off
    list(profile(IterableWrapper([1] * 50).map(sleepy)))
    assert of(profile)["map"].own >= 0.4


def test_an_exception_in_an_indexed_graph_leaves_the_clocks_sound(runs):
    profile = Profile()
    graph = profile(runs.finite(80).map(lambda item: fails_at_three(item["sample_numbers"][0].item() // 4)))
    items = graph.iterate()
    assert len(list(islice(items, 3))) == 3
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert len(list(graph.iterate(4))) == 16
    assert of(profile)["map"].calls == 19
    assert profile.ledger.clocks.own.depth == 0
    check_sound(profile)


def test_a_loop_that_breaks_off_and_begins_again_is_measured():
    profile = Profile()
    loader = DataLoader2(IterableWrapper(range(20)).map(sleepy), profile)
    for _ in range(3):
        assert len(list(islice(loader, 4))) == 4
    assert of(profile)["map"].calls == 12
    assert of(profile)["map"].own >= 0.12


# The report, the trace, the picture -----------------------------------------------------------------------------------


def test_before_any_item_it_says_that_nothing_was_measured(tmp_path):
    profile = Profile()
    assert "nothing was measured" in profile.report()
    assert (profile.nodes, profile.slowest, profile.items, profile.waited) == ([], None, 0, 0.0)
    with pytest.raises(LoaderError, match="no graph"):
        profile.draw(tmp_path / "a.mmd")
    profile(IterableWrapper(range(3)))
    assert "nothing was measured" in profile.report()
    assert len(profile.nodes) == 1
    profile.trace(tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
    profile.draw(tmp_path / "a.mmd")
    assert "iterablewrapper" in (tmp_path / "a.mmd").read_text()


def test_it_reports_after_shutdown_and_when_the_loader_is_gone(runs):
    profile = Profile()
    loader = DataLoader2(runs.finite(), profile)
    list(loader)
    before = profile.report()
    loader.shutdown()
    assert profile.report() == before
    del loader
    assert profile.report().splitlines()[1:] == before.splitlines()[1:]


def test_the_table_has_a_line_a_node_in_columns(runs):
    profile, _ = measured(runs.finite())
    lines = profile.report().splitlines()
    assert lines[0].split()[:2] == ["node", "share"]
    end = lines.index("")
    assert [line.split()[0].rstrip(":") for line in lines[1:end]] == [n.node.split(":")[0] for n in profile.nodes]
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1:end] if "%" in line]
    assert sum(shares) == pytest.approx(100, abs=1)


def spans_of(path: Any) -> "list[dict[str, Any]]":
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("service", ["in process", "reading ahead", "workers"])
def test_the_trace_is_one_that_chrome_reads(service, runs, tmp_path):
    profile = Profile()
    for make in (lambda: IterableWrapper(range(30)).sharding_filter().map(sleepy).batch(2), lambda: runs.finite(80)):
        with loader_of(profile(make()), service) as loader:
            list(loader)
    path = tmp_path / "trace.json"
    profile.trace(path)
    spans = spans_of(path)
    assert spans
    assert {"map", "batch", "collate_causal_lm"} <= {span["name"] for span in spans}
    tracks: dict[Any, list[Any]] = {}
    for span in spans:
        assert isinstance(span["ts"], (int, float))
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert type(span["pid"]) is int
        assert type(span["tid"]) is int
        assert span["tid"] >= 0
        tracks.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for track in tracks.values():
        open_ends: list[float] = []
        for begins, ends in sorted(track, key=lambda part: (part[0], -part[1])):
            while open_ends and begins >= open_ends[-1] - 0.002:
                open_ends.pop()
            assert not open_ends or ends <= open_ends[-1] + 0.002, "a call ends within the one around it"
            open_ends.append(ends)
    pids = {span["pid"] for span in spans}
    assert (os.getpid() in pids) == (service != "workers")
    named = {e["pid"]: e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"}
    assert named.keys() == pids


def test_the_picture_shows_the_times_and_the_slowest_node(tmp_path):
    profile, _ = measured(IterableWrapper(range(20)).map(sleepy).batch(2))
    profile.draw(tmp_path / "graph.mmd")
    text = (tmp_path / "graph.mmd").read_text()
    for word in ("map", "batch", "20 calls", "10 calls", "%"):
        assert word in text
    assert str(profile.draw()), "and without a path"
    if shutil.which("dot") is None:
        pytest.skip("graphviz's dot is not here, which draws SVG")
    profile.draw(tmp_path / "graph.svg")
    svg = (tmp_path / "graph.svg").read_text()
    assert "<svg" in svg
    assert "20 calls" in svg.replace("&#160;", " ")


@pytest.mark.parametrize("write", ["trace", "draw"])
def test_nothing_is_written_half(write, tmp_path):
    profile, _ = measured(IterableWrapper(range(5)).map(negated))
    name = {"trace": "a.json", "draw": "a.mmd"}[write]
    with pytest.raises(OSError):
        getattr(profile, write)(tmp_path / "missing" / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        getattr(profile, write)(tmp_path / "file" / name)
    (tmp_path / name).mkdir()
    with pytest.raises(OSError):
        getattr(profile, write)(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", name])
    assert list((tmp_path / name).iterdir()) == []
    if os.getuid():  # root may write everywhere
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            getattr(profile, write)(closed / name)


def test_a_trace_replaces_an_older_one_whole(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("x" * 100_000)
    profile, _ = measured(IterableWrapper(range(5)).map(negated))
    profile.trace(path)
    assert {span["name"] for span in spans_of(path)} == {"map", "iterablewrapper"}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_profile_put_on_a_running_loader_after_much_else_was_profiled_times_its_first_items():
    list(DataLoader2(IterableWrapper(range(3000)).map(negated), Profile()))
    profile = Profile()
    loader = DataLoader2(SequenceWrapper(list(range(9))).map(sleepy))
    items = iter(loader)
    next(items)
    with applied(profile, loader):
        list(islice(items, 2))
    assert 0.02 <= of(profile)["map"].own < 1
    profile = Profile()
    loader = DataLoader2(IterableWrapper(range(9)).map(sleepy))
    items = iter(loader)
    next(items)
    with applied(profile, loader):
        list(islice(items, 2))
    assert of(profile)["map"].calls == 2
    assert 0.02 <= of(profile)["map"].own < 1
