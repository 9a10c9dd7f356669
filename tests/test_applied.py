"""An adapter on a loader that runs: put on between two items and taken off again, the items are the same as without."""

import gc
import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapted import ADAPTERS, GRAPHS, Cleans, graphs, ignored, loader_of, negated, place_of
from contract import all_same
from faulty import Runs
from processes import descendants, gone, prefetching_threads, scaled
from tokenpipe.adapters import (
    Adapter,
    Exclude,
    Limit,
    PinMemory,
    Placement,
    Prefetch,
    Profile,
    ResumeSkip,
    Retry,
    Seed,
    Shuffle,
    Tap,
    Threads,
    Timeout,
    ToDevice,
    applied,
)
from tokenpipe.datapipes.errors import GraphError, IteratorInvalidatedError, LoaderError, LoaderShutdownError
from tokenpipe.datapipes.wrapped import wrappers_of
from tokenpipe.reading_services import DataLoader2, ReadingServiceInterface

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forks of a process with threads, by torch
    pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning"),
    pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted"),
]


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def firsts(items: Any, n: int = 10**9) -> "list[int]":
    return [int(batch["sample_numbers"][0]) for batch in islice(items, n)]


class Raises(Adapter):
    """Cannot be put on."""

    keeps_items = True

    def __call__(self, datapipe: Any) -> Any:
        raise GraphError("this graph is none of mine")


class RaisesTheThirdTime(Adapter):
    """Can be put on, to try and for an epoch."""

    keeps_items = True
    calls = 0

    def __call__(self, datapipe: Any) -> Any:
        self.calls += 1
        if self.calls > 2:
            raise GraphError("twice was enough")
        return datapipe


class PutsOn:
    """Adapters put on and taken off a loader by a list of actions, one before each item: name, "" or "-"."""

    def __init__(self, loader: DataLoader2) -> None:
        self.loader = loader
        self.on: list[Any] = []

    def act(self, what: str, draw: random.Random) -> None:
        if what == "-" and self.on:
            self.on.pop(draw.randrange(len(self.on))).__exit__(None, None, None)  # in any order
        elif what in ADAPTERS:
            context = applied(ADAPTERS[what](), self.loader)
            try:
                context.__enter__()
            except GraphError:
                return
            self.on.append(context)


# The law ------------------------------------------------------------------------------------------------------


def check(folder: Any, name: str, actions: "list[str]", service: str, seed: int, epochs: int = 2) -> None:
    with loader_of(graphs(folder)[name](), service) as loader:
        expected = [(item, place_of(loader)) for _ in range(epochs) for item in loader]
    draw = random.Random(seed)
    with loader_of(graphs(folder)[name](), service) as loader:
        putting, waiting, found = PutsOn(loader), list(actions), []
        for _ in range(epochs):
            if draw.random() < 0.5 and waiting:
                putting.act(waiting.pop(), draw)
            for item in loader:
                found.append((item, place_of(loader)))
                for _ in range(draw.choice([0, 1, 1, 3])):
                    if waiting:
                        putting.act(waiting.pop(), draw)
                        assert place_of(loader) == found[-1][1], "its place is the same"
        while putting.on:
            putting.act("-", draw)
    assert all_same([item for item, _ in found], [item for item, _ in expected])
    for (_, place), (_, other) in zip(found, expected, strict=True):
        assert _moved(place) == _moved(other)


def _moved(place: Any) -> Any:
    """A place by what is delivered: nodes' states may lie further back where items are made ahead."""
    if place.get("format") != "tokenpipe.stream" or place["service"] is None:
        return place
    return {**place, "service": [shard["items"] for shard in place["service"]["shards"]]}


ACTIONS = st.lists(st.sampled_from([*ADAPTERS, *["-"] * 8]), min_size=1, max_size=12)


@settings(max_examples=scaled(500, 25))
@given(st.sampled_from(GRAPHS), ACTIONS, st.sampled_from(["in process", "reading ahead"]), st.integers(0, 999))
def test_adapters_put_on_and_off_a_running_loader_change_no_item(tmp_path, name, actions, service, seed):
    check(tmp_path, name, actions, service, seed)


@pytest.mark.parametrize("service", ["in process", "reading ahead", "workers"])
def test_what_was_begun_is_cleaned_up_before_the_stream_goes_on(service, tmp_path):
    """torch's demux forgets its buffers when an iterator of it ends, however late that is."""
    source = Cleans(str(tmp_path / "said"), 40)
    loader = loader_of(source.map(negated), service)
    with loader:
        for adapter in (Tap(ignored), Prefetch(3), Timeout(60), Placement({"map": Threads(2)})):
            items = iter(loader)
            next(items)
            with applied(adapter, loader):
                next(items)
                next(items)
            next(items)
    for said in source.said().values():
        assert said[: 2 * (len(said) // 2)] == ["begins", "ends"] * (len(said) // 2)
        assert len(said) >= 8


@settings(max_examples=scaled(60, 4))
@given(st.sampled_from(GRAPHS), ACTIONS.map(lambda found: found[:5]), st.integers(0, 999))
def test_adapters_put_on_and_off_a_loader_with_workers_change_no_item(tmp_path, name, actions, seed):
    before = descendants()
    check(tmp_path, name, actions, "workers", seed)
    assert gone(descendants() - before, 10)


@pytest.mark.parametrize("name", GRAPHS)
def test_each_adapter_goes_on_and_off_after_every_item(name, tmp_path):
    expected = list(loader_of(graphs(tmp_path)[name]()))
    for adapter in ADAPTERS:
        loader = loader_of(graphs(tmp_path)[name]())
        items, found = iter(loader), []
        while True:
            try:
                with applied(ADAPTERS[adapter](), loader):
                    found.extend(islice(items, 1))
            except GraphError:
                assert adapter in ("Placement", "SkipErrors", "Prefetch")
            taken = list(islice(items, 1))
            found += taken
            if not taken:
                break
        assert all_same(found, expected), adapter


# Where it is put on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["in process", "reading ahead", "workers"])
@pytest.mark.parametrize("name", ["indexed", "torch, shuffled", "torch, forked", "ours"])
def test_before_the_first_iter_in_the_middle_and_at_the_end(name, service, tmp_path):
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        expected = [list(loader) for _ in range(3)]
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        seen: list[Any] = []
        with applied(Tap(seen.append), loader) as tap:
            assert isinstance(tap, Tap)
            assert all_same(loader, expected[0])
        with applied(Tap(seen.append), loader):  # between two epochs
            pass
        if service == "in process":
            assert all_same(seen, expected[0])
        items = iter(loader)
        found = list(islice(items, 3))
        count = len(seen)
        with applied(Tap(seen.append), loader):
            found += islice(items, 2)
        if service == "in process":
            assert all_same(seen[-2:], expected[1][3:5])
            if name not in ("torch, shuffled", "torch, forked"):  # these are gone through again
                assert len(seen) == count + 2
        found += items
        with applied(Tap(seen.append), loader):  # at the end
            assert list(items) == []
        assert list(items) == []
        assert all_same(found, expected[1])
        assert all_same(loader, expected[2])


def test_it_stays_on_over_epochs_and_new_iterators(tmp_path):
    for name in ("indexed", "torch, shuffled"):
        expected = [item for loader in [loader_of(graphs(tmp_path)[name]())] for _ in range(3) for item in loader]
        seen: list[Any] = []
        loader = loader_of(graphs(tmp_path)[name]())
        found = list(loader)
        with applied(Tap(seen.append), loader):
            found += loader
            assert all_same(seen, expected[len(expected) // 3 : len(expected) * 2 // 3])
        count = len(seen)
        found += loader
        assert len(seen) == count, "it is off"
        assert all_same(found, expected)


def test_during_a_limit_and_a_pause(tmp_path):
    for name in ("indexed", "torch, shuffled", "map style"):
        expected = list(loader_of(graphs(tmp_path)[name]()))
        loader = loader_of(graphs(tmp_path)[name]())
        items = iter(loader)
        items.limit(3)
        found = list(islice(items, 2))
        with applied(Timeout(60), loader):
            found += items
            assert len(found) == 3, "the limit holds"
            items.resume()
            found += islice(items, 1)
            items.pause()
            assert list(items) == []
        assert list(items) == []
        items.resume()
        with applied(Profile(), loader):
            assert len(found) == 4
        items.limit(None)
        found += items
        assert all_same(found, expected)


def test_an_exception_inside_takes_it_off_and_the_loader_goes_on(tmp_path):
    for name in ("indexed", "torch, shuffled"):
        expected = list(loader_of(graphs(tmp_path)[name]()))
        loader = loader_of(graphs(tmp_path)[name]())
        items, seen = iter(loader), []
        found = list(islice(items, 2))
        with pytest.raises(ZeroDivisionError), applied(Tap(seen.append), loader):
            found += islice(items, 2)
            raise ZeroDivisionError
        found += items
        assert all_same(found, expected)
        assert all_same(seen[-2:], expected[2:4])


def test_one_whose_tap_raises_ends_the_loader_as_a_node_would(tmp_path):
    loader = loader_of(graphs(tmp_path)["indexed"]())
    items = iter(loader)
    next(items)
    with pytest.raises(ZeroDivisionError), applied(Tap(lambda item: 1 // 0), loader):
        next(items)
    with pytest.raises(LoaderShutdownError):
        iter(loader)
    assert loader.state_dict()["consumed_samples"] == 4


def test_a_shutdown_inside(tmp_path):
    for name in ("indexed", "torch, shuffled"):
        for service in ("in process", "workers"):
            profile = Profile()
            loader = loader_of(graphs(tmp_path)[name](), service)
            items = iter(loader)
            next(items)
            with applied(profile, loader):
                list(islice(items, 3))
                loader.shutdown()
            assert "Slowest" in profile.report()
            with pytest.raises(LoaderShutdownError), applied(Profile(), loader):
                pass
            assert loader.state_dict()


def test_moves_and_changes_inside(runs):
    graph = runs.training
    plain, loader = DataLoader2(graph), DataLoader2(graph)

    def both(act: Any) -> None:
        results = [act(one) for one in (plain, loader)]
        assert results[0] == results[1]
        assert place_of(plain) == place_of(loader)

    seen: list[Any] = []
    both(lambda one: firsts(one, 3))
    with applied(Tap(seen.append), loader), applied(Profile(), loader):
        both(lambda one: one.seek(10))
        both(lambda one: firsts(one, 3))
        both(lambda one: one.update_weights([0.5, 0.5]))
        both(lambda one: firsts(one, 5))
        both(lambda one: one.update_global_batch_size(16))
        both(lambda one: firsts(one, 5))
        state = plain.state_dict(step=4)
        both(lambda one: one.load_state_dict(state))
        both(lambda one: [batch["input_ids"].tolist() for batch in islice(one, 4)])
        both(lambda one: one.restart())
        both(lambda one: [batch["input_ids"].tolist() for batch in islice(one, 4)])
        assert len(seen) == 3 + 5 + 5 + 4 + 4
        both(lambda one: one.contents(1))
        both(lambda one: one.seek(12))
    both(lambda one: [batch["input_ids"].tolist() for batch in islice(one, 9)])
    both(lambda one: one.recipe())
    assert len(seen) == 21
    assert not wrappers_of(loader._run.graph)


def test_changes_keep_the_iterator_inside_and_seeks_do_not(runs):
    loader = DataLoader2(runs.training)
    items = iter(loader)
    assert firsts(items, 2) == [0, 4]
    with applied(Timeout(60), loader):
        loader.update_weights([0.5, 0.5])
        assert firsts(items, 2) == [8, 12]
        loader.seek(1)
        with pytest.raises(IteratorInvalidatedError):
            next(items)
    with pytest.raises(IteratorInvalidatedError):
        next(items)
    assert firsts(loader, 2) == [8, 12]


def test_a_state_of_a_stream_loaded_inside(tmp_path):
    for name in ("torch, shuffled", "ours", "torch, placed"):
        loader = loader_of(graphs(tmp_path)[name]())
        expected, places = [], []
        for item in loader:
            expected.append(item)
            places.append(place_of(loader))
        loader = loader_of(graphs(tmp_path)[name]())
        list(islice(loader, 4))
        seen: list[Any] = []
        with applied(Tap(seen.append), loader):
            loader.load_state_dict(places[1])
            items = iter(loader)
            found = list(islice(items, 2))
        assert all_same(seen[-2:], expected[2:4])
        assert all_same([*found, *items], expected[2:])
        loader.load_state_dict(places[2])
        with applied(Tap(ignored), loader):  # before the iter that goes on from it
            pass
        assert all_same(loader, expected[3:])


@pytest.mark.parametrize("service", ["in process", "workers"])
@pytest.mark.parametrize("name", ["indexed", "torch, shuffled"])
def test_nested_and_taken_off_in_either_order(name, service, tmp_path):
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        expected = list(loader)
    for first_out in (0, 1):
        with loader_of(graphs(tmp_path)[name](), service) as loader:
            items = iter(loader)
            found = list(islice(items, 1))
            contexts = [applied(adapter, loader) for adapter in (Profile(), Timeout(60))]
            for context in contexts:
                context.__enter__()
                found += islice(items, 1)
            contexts[first_out].__exit__(None, None, None)
            found += islice(items, 1)
            contexts[1 - first_out].__exit__(None, None, None)
            found += items
            assert all_same(found, expected)


def test_the_same_adapter_twice_at_once_is_put_on_twice(tmp_path):
    loader = loader_of(graphs(tmp_path)["indexed"]())
    expected = list(loader_of(graphs(tmp_path)["indexed"]()))
    items, seen = iter(loader), []
    tap = Tap(seen.append)
    with applied(tap, loader):
        with applied(tap, loader):
            found = list(islice(items, 2))
            assert len(seen) == 4
        found += islice(items, 2)
        assert len(seen) == 6, "the outer one is still on"
    found += items
    assert len(seen) == 6
    assert all_same(found, expected)


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["indexed", "torch, shuffled"])
def test_adapters_that_change_items_are_refused_and_the_loader_goes_on(name, tmp_path):
    expected = list(loader_of(graphs(tmp_path)[name]()))
    loader = loader_of(graphs(tmp_path)[name]())
    items = iter(loader)
    found = list(islice(items, 2))
    changing: list[Any] = [
        Shuffle(),
        Seed(3),
        Limit(4),
        Exclude(tokens={"prose": [(0, 9)]}),
        ResumeSkip(4),
        lambda graph: graph,
    ]
    for adapter in changing:
        with pytest.raises(GraphError, match="may change the items"), applied(adapter, loader):
            raise AssertionError("it was put on")
        found += islice(items, 1)
    found += items
    assert all_same(found, expected)


@pytest.mark.parametrize("service", ["in process", "reading ahead", "workers"])
@pytest.mark.parametrize("name", ["indexed", "torch, shuffled", "torch, forked"])
def test_one_that_cannot_be_put_on_leaves_the_loader_as_it_was(name, service, tmp_path):
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        expected = [list(loader) for _ in range(2)]
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        items, found = iter(loader), []
        for _ in range(3):
            place = place_of(loader)
            with pytest.raises(GraphError, match="none of mine"), applied(Raises(), loader):
                raise AssertionError("it was put on")
            assert place_of(loader) == place
            found += islice(items, 1)
        found += items
        assert all_same(found, expected[0])
        assert all_same(loader, expected[1])


def test_one_that_cannot_be_put_on_again_is_an_error_at_the_new_epoch_and_no_half(tmp_path):
    loader = loader_of(graphs(tmp_path)["torch, shuffled"]())
    expected = list(loader_of(graphs(tmp_path)["torch, shuffled"]()))
    with applied(RaisesTheThirdTime(), loader):
        assert all_same(loader, expected)
        with pytest.raises(GraphError, match="twice was enough"):
            iter(loader)
        with pytest.raises(GraphError, match="twice was enough"):
            iter(loader)
    assert sorted(loader) == sorted(expected)


class Placeless(ReadingServiceInterface):
    """A service that knows no place."""

    def initialize(self, datapipe: Any) -> Any:
        return datapipe

    def iterate(self, datapipe: Any) -> Any:
        return iter(datapipe)


def test_a_stream_without_a_place_refuses_and_goes_on(tmp_path):
    loader = DataLoader2(graphs(tmp_path)["torch, placed"](), reading_service=Placeless())
    items = iter(loader)
    found = list(islice(items, 2))
    with pytest.raises(LoaderError), applied(Tap(ignored), loader):
        raise AssertionError("it was put on")
    found += items
    assert all_same(found, list(graphs(tmp_path)["torch, placed"]()))


# What it does meanwhile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["in process", "workers"])
@pytest.mark.parametrize("name", ["indexed", "torch, placed"])
def test_a_profile_measures_what_was_made_meanwhile(name, service, tmp_path):
    profile = Profile()
    with loader_of(graphs(tmp_path)[name](), service) as loader:
        items = iter(loader)
        next(items)
        with applied(profile, loader):
            next(items)
            next(items)
        list(items)
    last = profile.nodes[0]
    assert last.calls == 2 if service == "in process" else last.calls >= 2
    assert last.own > 0
    assert "Slowest" in profile.report()


def test_a_retry_on_a_running_loader_counts_in_its_state_and_metrics(tmp_path):
    failures = iter([OSError, None, OSError])

    def fails(item: Any) -> None:
        error = next(failures, None)
        if error:
            raise error("now and then")

    expected = list(loader_of(graphs(tmp_path)["indexed, mapped"]()))
    loader = loader_of(graphs(tmp_path)["indexed, mapped"]())
    items, retry = iter(loader), Retry(OSError, wait=0)
    found = list(islice(items, 1))
    with applied(Tap(fails), loader), applied(retry, loader):
        found += islice(items, 4)
        assert retry.count == 2
        assert loader.state_dict()["noted"] == {"retry": {"count": 2}}
        assert loader.metrics()["data/retried"] == 2
    assert "data/retried" not in loader.metrics()
    found += items
    assert all_same(found, expected)


def test_it_holds_neither_threads_nor_graphs_afterwards(runs):
    loader = DataLoader2(runs.finite())
    items = iter(loader)
    for _ in range(3):
        with applied(Prefetch(2), loader), applied(ToDevice("cpu"), loader), applied(PinMemory(), loader):
            next(items)
    gc.collect()
    assert not wrappers_of(loader._run.graph)
    assert loader._run.worn == []
    assert len(list(items)) == 7
    assert prefetching_threads() == 0
