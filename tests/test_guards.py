"""Nodes that hang, fail now and then, or cannot make a sample: Timeout, Retry, SkipErrors."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from contract import all_same
from faulty import MICRO, Runs, nap_for_ever
from processes import PATIENCE, environment
from tokenpipe.adapters import Placement, Prefetch, Retry, SkipErrors, Threads, Timeout
from tokenpipe.datapipes import JsonLinesReader, StreamingDataPipe
from tokenpipe.datapipes.collate import IGNORED_LABEL
from tokenpipe.datapipes.errors import (
    DocumentError,
    GraphError,
    NodeTimeoutError,
    SkipBudgetError,
    TokenpipeError,
)
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

pytestmark = [
    pytest.mark.filterwarnings("ignore:a resume of this stream"),
    pytest.mark.filterwarnings("ignore:worker process . was stuck"),
]

SOON = 0.5  # s, for what is stuck for ever
LATE = 60.0  # s, for what is not


def workers(n: int, method: str = "fork") -> Any:
    return MultiProcessingReadingService(n, method) if n else None


def loader_of(graph: Any, adapters: Any = None, n: int = 0, method: str = "fork") -> DataLoader2:
    return DataLoader2(graph, adapters, workers(n, method))


def until_raised(items: Any, kind: "type[BaseException]") -> "tuple[list[Any], BaseException]":
    """What came before the exception, and that."""
    found = []
    with pytest.raises(kind) as raised:
        for item in items:
            found.append(item)
    return found, raised.value


def written(state: Any, as_text: bool = False) -> Any:
    """A state as a checkpoint has it."""
    text = json.dumps(state)
    assert json.loads(text) == state
    return text if as_text else json.loads(text)


# What hangs, and what fails -----------------------------------------------------------------------------


def number_of(item: Any) -> int:
    """An item's own number: of rows of tokens, the first token; of a batch, the first sample number."""
    if isinstance(item, dict):
        return int(item["sample_numbers"][0])
    return int(np.asarray(item).reshape(-1)[0])


class Stuck:
    """item → item; at some numbers it hangs instead, so often over all processes."""

    def __init__(self, at: Any, folder: Any, how: str = "sleep", times: int = 1) -> None:
        self.at, self.folder, self.how, self.times = frozenset(at), str(folder), how, times

    def __call__(self, item: Any) -> Any:
        if number_of(item) in self.at and a_turn(self.folder, f"stuck-{number_of(item)}", self.times):
            if self.how == "read":
                os.read(os.pipe()[0], 1)
            nap_for_ever()
        return item


class Fails:
    """item → item; at some numbers it raises instead, so often over all processes (None: always)."""

    def __init__(self, at: Any, folder: Any, times: "int | None" = 1, kind: Any = OSError) -> None:
        self.at, self.folder, self.times, self.kind = frozenset(at), str(folder), times, kind

    def __call__(self, item: Any) -> Any:
        number = number_of(item)
        if number in self.at and (self.times is None or a_turn(self.folder, f"fails-{number}", self.times)):
            raise self.kind(f"failed at {number}")
        return item


def keeps(item: Any) -> bool:
    return item % 3 != 1


class FailingFilter(Fails):
    def __call__(self, item: Any) -> bool:  # type: ignore[override]
        return keeps(super().__call__(item))


class FailingCollate(Fails):
    def __call__(self, item: Any) -> Any:
        return torch.tensor(super().__call__(item))


def a_turn(folder: str, name: str, times: int) -> bool:
    for k in range(times):
        try:
            os.close(os.open(Path(folder, f"{name}-{k}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return True
    return False


def turns(folder: Any, name: str) -> int:
    return sum(path.name.startswith(f"{name}-") for path in Path(folder).iterdir())


class Count(StreamingDataPipe):
    """0 … end − 1; before some of them it raises, once each."""

    initial_state = {"at": 0}  # noqa: RUF012
    at: int

    def __init__(self, end: int, fails: Any = None) -> None:
        super().__init__()
        self.end, self.fails = end, fails

    def __iter__(self) -> Any:
        while self.at < self.end:
            if self.fails is not None:
                self.fails(self.at)
            self.at += 1
            yield self.at - 1


class CountWithTail(Count):
    """Raises after its last item too."""

    def __iter__(self) -> Any:
        while self.at < self.end:
            self.fails(self.at)
            self.at += 1
            yield self.at - 1
        self.fails(self.end)


class OnTheWay(StreamingDataPipe):
    """Passes items on; takes two for each pair, and raises between the two."""

    initial_state = {"half": None}  # noqa: RUF012

    def __init__(self, datapipe: Any, fails: Any) -> None:
        super().__init__()
        self.datapipe, self.fails = datapipe, fails

    def __iter__(self) -> Any:
        for item in self.datapipe:
            if self.half is None:
                self.half = item
                self.fails(item)
                continue
            half, self.half = self.half, None
            yield [half, item]


class Empty(IterDataPipe):
    def __iter__(self) -> Any:
        return iter(())


class Sleeps(IterDataPipe):
    def __iter__(self) -> Any:
        nap_for_ever()
        yield


def tenfold(item: Any) -> Any:
    return 10 * item


def a_little_slow(item: Any) -> Any:
    time.sleep(0.05)
    return item


def as_item(batch: Any) -> Any:
    return batch


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    (tmp_path / "runs").mkdir()
    made = Runs(tmp_path / "runs")
    made.training.fetch([0])  # what is made once takes its time here
    return made


def indexed(runs: Runs, below: Any = None, above: Any = None, samples: int = 40) -> Any:
    """A finite graph with a map of samples, and one of batches."""
    graph = runs.blend().limit(samples=samples)
    if below is not None:
        graph = graph.map(below, seeded=False)
    graph = graph.batch_samples(MICRO).collate_causal_lm(sample_numbers=True)
    return graph if above is None else graph.map(above, seeded=False)


# Timeout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sleep", "read"])
def test_a_stuck_node_of_an_indexed_graph_is_named_with_what_it_is_doing(runs, tmp_path, how):
    graph = indexed(runs, above=Stuck([8], tmp_path, how))
    found, error = until_raised(loader_of(graph, Timeout(SOON)), NodeTimeoutError)
    assert len(found) == 2
    assert isinstance(error, TimeoutError)
    assert isinstance(error, TokenpipeError)
    assert "map" in str(error)
    assert "test_guards.py" in str(error)
    assert ("os.read" if how == "read" else "sleep") in str(error)


@pytest.mark.parametrize("nodes", ["map", "collate_causal_lm"])
def test_the_chosen_node_and_the_stuck_one_below_it_are_both_named(runs, tmp_path, nodes):
    third = runs.blend().fetch([9])[0]
    graph = indexed(runs, below=Stuck([number_of(third)], tmp_path), above=as_item)
    found, error = until_raised(loader_of(graph, Timeout(SOON, nodes)), NodeTimeoutError)
    assert all_same(found, indexed(runs).fetch([0, 1])), "9 is in the third batch"
    assert "nap_for_ever" in str(error)
    assert "map" in str(error)


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_stuck_node_of_a_stream_is_named(tmp_path, at):
    graph = IterableWrapper(range(10)).map(Stuck([at], tmp_path)).map(tenfold)
    for nodes in (None, "map#2"):
        for path in tmp_path.iterdir():
            path.unlink()
        found, error = until_raised(loader_of(graph, Timeout(SOON, nodes)), NodeTimeoutError)
        assert found == [10 * k for k in range(at)]
        assert "map#2" in str(error), "the node that is stuck, not the last one"
        assert "nap_for_ever" in str(error)


def test_a_stream_that_is_stuck_before_its_first_item_is_named():
    _, error = until_raised(loader_of(Sleeps(), Timeout(SOON)), NodeTimeoutError)
    assert "sleeps" in str(error).lower()


def test_a_map_style_graph_is_waited_for_too(tmp_path):
    found, error = until_raised(
        loader_of(SequenceWrapper(range(6)).map(Stuck([4], tmp_path)), Timeout(SOON)), NodeTimeoutError
    )
    assert found == [0, 1, 2, 3]
    assert "map" in str(error)


@pytest.mark.parametrize("n", [0, 2])
def test_exceptions_of_the_node_itself_pass_with_their_type(runs, tmp_path, n):
    for kind in (KeyError, TimeoutError, ValueError):
        graph = indexed(runs, above=Fails([8], tmp_path, None, kind))
        found, error = until_raised(loader_of(graph, Timeout(LATE), n), kind)
        assert len(found) == 2
        assert type(error) is kind
        stream = IterableWrapper(range(10)).sharding_filter().map(Fails([3], tmp_path, None, kind))
        found, error = until_raised(loader_of(stream, Timeout(LATE), n), kind)
        assert found == [0, 1, 2]
        assert type(error) is kind


@pytest.mark.parametrize("n", [0, 2])
def test_ends_epochs_and_breaks_are_as_without(runs, n):
    for graph, kept in (
        (Empty(), []),
        (IterableWrapper(range(7)).sharding_filter().map(tenfold), [10 * k for k in range(7)]),
    ):
        with loader_of(graph, Timeout(LATE), n) as loader:
            for _ in range(3):
                assert list(loader) == kept
            for item in loader:
                assert item == kept[0]
                break
            iterator = iter(loader)
            assert list(iterator) == kept
            assert list(iterator) == []
    plain = list(indexed(runs))
    with loader_of(indexed(runs), Timeout(LATE), n) as loader:
        assert all_same(loader, plain)
        assert all_same(loader, plain)
        for _ in zip(range(3), loader, strict=False):
            pass
        rest = list(loader)
        assert all_same(rest, plain[3:]) or all_same(rest, plain[4:])


def test_a_slow_node_within_its_time_is_left_alone(runs):
    for n in (0, 2):
        graph = indexed(runs, above=a_little_slow, samples=24)
        with loader_of(graph, Timeout(30.0), n) as loader:
            assert all_same(loader, indexed(runs, samples=24))
            if n:
                assert loader.reading_service.replaced == 0


@pytest.mark.parametrize("inner, outer", [(SOON, LATE), (LATE, SOON)])
@pytest.mark.parametrize("n", [0, 1])
def test_of_nested_timeouts_the_shorter_one_counts(runs, tmp_path, inner, outer, n):
    graph = runs.blend().limit(samples=40).batch_samples(MICRO).collate_causal_lm(sample_numbers=True)
    graph = graph.map(Stuck([8], tmp_path, times=9), seeded=False).map(as_item, seeded=False)
    adapters = [Timeout(inner, "map#2"), Timeout(outer)]
    found, error = until_raised(loader_of(graph, adapters, n), NodeTimeoutError)
    assert len(found) == 2
    assert n or ("map#2 has not" if inner < outer else "map has not") in str(error), str(error)
    assert "map#2" in str(error)
    assert "nap_for_ever" in str(error), "what is stuck, not what waits for it"


@pytest.mark.parametrize("method, n", [("fork", 3), ("forkserver", 1)])
def test_under_workers_the_stuck_one_is_replaced_and_the_item_made_again(runs, tmp_path, method, n):
    stuck = Stuck([8, 20] if method == "fork" else [8], tmp_path)
    with loader_of(indexed(runs, above=stuck), Timeout(1.0 if method == "fork" else 3.0), n, method) as loader:
        assert all_same(loader, indexed(runs))
        assert loader.reading_service.replaced == len(stuck.at)
    assert turns(tmp_path, "stuck") == len(stuck.at)


def test_a_stuck_worker_of_a_stream_is_replaced_too(tmp_path):
    graph = IterableWrapper(range(30)).sharding_filter().map(Stuck([8, 21], tmp_path)).map(tenfold)
    with loader_of(graph, Timeout(1.0), 2) as loader:
        assert list(loader) == [10 * k for k in range(30)]
        assert loader.reading_service.replaced == 2
        assert list(loader) == [10 * k for k in range(30)]


def test_stuck_twice_the_error_names_node_and_item(runs, tmp_path):
    graph = indexed(runs, above=Stuck([8], tmp_path, times=9))
    found, error = until_raised(loader_of(graph, Timeout(SOON), 2), NodeTimeoutError)
    assert len(found) == 2
    assert "map" in str(error)
    assert "sample number 8" in str(error)
    assert "nap_for_ever" in str(error)
    assert turns(tmp_path, "stuck") == 2, "made again once"
    stream = IterableWrapper(range(30)).sharding_filter().map(Stuck([7], tmp_path / "..", times=9))
    for path in tmp_path.parent.glob("stuck-7-*"):
        path.unlink()
    found, error = until_raised(loader_of(stream, Timeout(SOON), 2), NodeTimeoutError)
    assert found == list(range(7))
    assert "map" in str(error)


LEAVES = """
    import sys, time
    from torch.utils.data.datapipes.iter import IterableWrapper
    from test_guards import Runs, Stuck, indexed, SOON
    from tokenpipe.adapters import Timeout
    from tokenpipe.datapipes.errors import NodeTimeoutError
    from tokenpipe.reading_services import DataLoader2

    folder, how, kind = sys.argv[1:]
    graph = (
        IterableWrapper(range(10)).map(Stuck([3], folder, how))
        if kind == "stream"
        else indexed(Runs(folder), above=Stuck([8], folder, how))
    )
    loader = DataLoader2(graph, Timeout(SOON))
    try:
        for _ in loader:
            pass
    except NodeTimeoutError:
        loader.shutdown()
        print("shut down", flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize("how, kind", [("sleep", "stream"), ("read", "indexed")])
def test_neither_shutdown_nor_the_interpreters_end_waits_for_a_stuck_node(tmp_path, how, kind):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES), str(tmp_path), how, kind],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "shut down\n"
    assert "Exception" not in done.stderr, done.stderr


# Retry --------------------------------------------------------------------------------------------------


def retry(**settings: Any) -> Retry:
    return Retry(OSError, **{"tries": 3, "wait": 0, **settings})


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("where", ["below", "above"])
def test_a_transient_failure_of_an_indexed_graph_changes_nothing(runs, tmp_path, n, where):
    at = [0, 8, 36] if where == "above" else [number_of(row) for row in runs.blend().fetch([0, 9, 39])]
    fails = Fails(at, tmp_path, times=2)
    adapter = retry(tries=8 if where == "below" else 3)
    with loader_of(indexed(runs, **{where: fails}), adapter, n) as loader:
        assert all_same(loader, indexed(runs))
        # a block that fails is asked for again one by one, so that an error comes at its own item
        assert 0 < adapter.count <= turns(tmp_path, "fails")
        assert loader.metrics()["data/retried"] == adapter.count
        assert loader.state_dict()["noted"] == {"retry": {"count": adapter.count}}


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_count_of_tries_goes_on_from_a_state_and_items_too(runs, tmp_path, n, after):
    graph = indexed(runs, above=Fails([0, 8, 36], tmp_path, times=1))
    plain = list(indexed(runs))
    with loader_of(graph, retry(), n) as loader:
        for _ in zip(range(after), loader, strict=False):
            pass
        state = written(loader.state_dict(), as_text=True)
    before = json.loads(state).get("noted", {}).get("retry", {}).get("count", 0)
    adapter, happened = retry(), turns(tmp_path, "fails")
    with loader_of(graph, adapter, n) as loader:
        loader.load_state_dict(state)
        assert all_same(loader, plain[after:])
        assert before <= adapter.count <= before + turns(tmp_path, "fails") - happened


STREAMS = {
    "map": lambda fails: IterableWrapper(range(20)).sharding_filter().map(fails).map(tenfold),
    "filter": lambda fails: IterableWrapper(range(20)).sharding_filter().filter(FailingFilter(**vars(fails))),
    "collate": lambda fails: IterableWrapper(range(20)).sharding_filter().collate(FailingCollate(**vars(fails))),
    "below batch": lambda fails: IterableWrapper(range(20)).sharding_filter().map(fails).batch(3),
    "above batch": lambda fails: IterableWrapper(range(20)).sharding_filter().batch(2).map(fails),
    "own source": lambda fails: Count(20, fails).sharding_filter().map(tenfold),
    "own source, batched": lambda fails: Count(20, fails).sharding_filter().batch(3),
    "after the last item": lambda fails: CountWithTail(19, fails).sharding_filter().batch(3),
    "in the middle": lambda fails: OnTheWay(IterableWrapper(range(20)).sharding_filter(), fails),
    "skip and limit": lambda fails: Count(25, fails).skip(2).sharding_filter().limit(15),
    "map-style": lambda fails: SequenceWrapper(range(20)).map(fails),
}


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_a_transient_failure_anywhere_in_a_stream_changes_nothing(tmp_path, name, n):
    plain = list(loader_of(STREAMS[name](Fails([], tmp_path)), None, n))
    fails = Fails([0, 4, 7, 8, 19], tmp_path, times=2)
    adapter = retry(tries=9)  # of one item: several may fail on the way to a batch
    with loader_of(STREAMS[name](fails), adapter, n) as loader:
        assert all_same(loader, plain)
        assert adapter.count == turns(tmp_path, "fails") > 0
        assert loader.metrics()["data/retried"] == adapter.count
        assert all_same(loader, plain), "a second epoch"


@pytest.mark.parametrize("name", STREAMS)
def test_a_state_from_the_middle_of_a_stream_with_failures_goes_on_exactly(tmp_path, name):
    plain = list(DataLoader2(STREAMS[name](Fails([], tmp_path))))
    for after in range(0, len(plain) + 1, 3):
        for path in tmp_path.iterdir():
            path.unlink()
        graph = STREAMS[name](Fails([0, 4, 7, 8, 19], tmp_path, times=2))
        first = DataLoader2(graph, retry(tries=9))
        assert all_same((item for _, item in zip(range(after), first, strict=False)), plain[:after])
        state = written(first.state_dict())
        second = DataLoader2(graph, retry(tries=9))
        second.load_state_dict(state)
        assert all_same(second, plain[after:]), after
        plainly = DataLoader2(graph)
        plainly.load_state_dict(state)
        assert all_same(plainly, plain[after:]), "a graph without the adapter goes on from it too"


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("times", [0, 1])
def test_our_reader_tokenizer_and_packer_go_on_after_a_failure(tmp_path, n, times):
    lines = [json.dumps({"text": f"document {k} " + "x" * (k * 7 % 30)}) for k in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))

    def graph(*at: int) -> Any:
        (tmp_path / "flags").mkdir(exist_ok=True)
        texts = JsonLinesReader(tmp_path / "a.jsonl").sharding_filter()
        return Between(texts.tokenize("byte"), at, tmp_path / "flags", times).pack_sequences(16)

    plain = list(loader_of(graph(), None, n))
    for path in (tmp_path / "flags").iterdir():
        path.unlink()
    adapter = retry()
    assert all_same(loader_of(graph(0, 5, 6, 25), adapter, n), plain)
    assert (adapter.count > 0) == bool(times)


class Between(StreamingDataPipe):
    """Passes items on; has taken an item when it fails."""

    initial_state = {"passed": 0}  # noqa: RUF012

    def __init__(self, datapipe: Any, at: Any, folder: Any, times: int) -> None:
        super().__init__()
        self.datapipe, self.at, self.folder, self.times = datapipe, at, folder, times

    def __iter__(self) -> Any:
        for item in self.datapipe:
            if self.passed in self.at and a_turn(str(self.folder), f"between-{self.passed}", self.times):
                raise OSError(f"failed at {self.passed}")
            self.passed += 1
            yield item


def test_a_token_file_that_fails_once_is_read_again(runs, tmp_path, monkeypatch):
    from tokenpipe.datapipes.batch import SampleBatcher

    plain, real, calls = list(indexed(runs)), SampleBatcher.gathered, []

    def gathered(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in (1, 4, 5):
            raise OSError("the disk")
        return real(self, *arguments)

    monkeypatch.setattr(SampleBatcher, "gathered", gathered)
    adapter = retry()
    assert all_same(DataLoader2(indexed(runs), adapter), plain)
    assert 0 < adapter.count <= 3


@pytest.mark.parametrize("n", [0, 2])
def test_the_last_failure_is_raised_as_itself_with_the_number_of_tries(runs, tmp_path, n):
    for graph, expected in (
        (indexed(runs, above=Fails([8], tmp_path, None)), 2),
        (IterableWrapper(range(9)).sharding_filter().map(Fails([2], tmp_path, None)), 2),
        (Count(9, Fails([2], tmp_path, None)).sharding_filter().batch(1), 2),
    ):
        adapter = retry(tries=4)
        found, error = until_raised(loader_of(graph, adapter, n), OSError)
        assert len(found) == expected
        assert type(error) is OSError
        # told of also where nothing came after it; a source below a filter is read by each worker
        assert adapter.count in (3, 3 * max(1, n))
        notes = "\n".join(getattr(error, "__notes__", [])) + str(error)
        assert "4 tries" in notes, notes


@pytest.mark.parametrize("n", [0, 2])
def test_exceptions_that_are_not_listed_pass_at_once(runs, tmp_path, n):
    for graph in (
        indexed(runs, above=Fails([8], tmp_path, None, KeyError)),
        IterableWrapper(range(9)).sharding_filter().map(Fails([2], tmp_path, None, KeyError)),
        Count(9, Fails([2], tmp_path, None, KeyError)).sharding_filter().batch(1),
    ):
        adapter = retry()
        _, error = until_raised(loader_of(graph, adapter, n), KeyError)
        assert adapter.count == 0
        assert "tries" not in "".join(getattr(error, "__notes__", []))


class Calls:
    """Counts how often it fails."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __deepcopy__(self, memo: Any) -> "Calls":
        return self

    def __call__(self, item: Any) -> Any:
        if number_of(item) == self.at:
            self.count += 1
            raise OSError("always")
        return item


def test_guards_within_guards_do_not_multiply_the_tries(runs):
    for graph_of, nodes in (
        (lambda calls: indexed(runs, above=calls).map(as_item, seeded=False), ["map", "map#2"]),
        (lambda calls: Count(9).map(calls).map(tenfold).batch(1), None),
        (lambda calls: Count(9, calls).sharding_filter().batch(1).map(as_item), None),
        (lambda calls: Count(9, calls).sharding_filter().batch(1), ["count", "sharding_filter", "batch"]),
    ):
        calls = Calls(8)
        until_raised(DataLoader2(graph_of(calls), retry(nodes=nodes)), OSError)
        assert calls.count == 3


def test_nodes_that_cannot_go_back_are_refused_with_the_reason():
    graph = IterableWrapper(range(9)).shuffle().map(tenfold)
    for nodes in ("shuffle", "shuffler"):
        with pytest.raises(GraphError, match=r"(?s)shuffle.*state|there is no node"):
            DataLoader2(graph, retry(nodes=nodes))
    assert sorted(DataLoader2(graph, retry())) == [10 * k for k in range(9)], "as far as its nodes can"
    with pytest.raises(GraphError, match="state"):
        DataLoader2(Empty(), retry())
    with pytest.raises(GraphError, match="ahead"):
        DataLoader2(Count(9).map(tenfold).batch(2), [Prefetch(2, "map"), retry(nodes="batch")])


def test_a_thread_below_a_node_that_goes_back_is_refused_also_when_it_comes_later(tmp_path):
    """Its place is that of what the thread has taken: items would be lost without a word."""
    for later in (Prefetch(2, "map"), Placement({"map": Threads(2)})):
        graph = OnTheWay(Count(20).map(tenfold), Fails([20, 60], tmp_path, None))
        with pytest.raises(GraphError, match="ahead"):
            list(DataLoader2(graph, [retry(nodes="ontheway"), later]))


def test_a_timeout_is_not_tried_again_on_a_stream(tmp_path):
    graph = Count(9, Stuck([4], tmp_path)).batch(1)
    adapter = Retry((OSError, TimeoutError), tries=3, wait=0)
    found, _ = until_raised(DataLoader2(graph, [Timeout(SOON), adapter]), NodeTimeoutError)
    assert found == [[0], [1], [2], [3]]
    assert adapter.count == 0


# SkipErrors ---------------------------------------------------------------------------------------------


def rows_by_number(batches: Any) -> "dict[int, tuple[list[int], list[int]]]":
    return {
        int(number): (ids.tolist(), labels.tolist())
        for batch in batches
        for number, ids, labels in zip(batch["sample_numbers"], batch["input_ids"], batch["label_ids"], strict=True)
    }


def tokens_of(runs: Runs, samples: Any) -> "list[int]":
    """The first tokens of samples, which no other sample has."""
    return [number_of(row) for row in runs.blend().fetch(list(samples))]


def check_skipped(batches: Any, plain: Any, bad: Any) -> None:
    """Everything but the bad rows is bit for bit the same; those are zeros, with every label masked."""
    batches, plain = list(batches), list(plain)
    assert len(batches) == len(plain)
    for batch, clean in zip(batches, plain, strict=True):
        assert batch.keys() == clean.keys()
        wrong = torch.tensor([int(n) in {-1, *bad} for n in clean["sample_numbers"]])  # -1: padding, masked anyway
        for key in clean:
            assert batch[key].dtype == clean[key].dtype
            assert torch.equal(batch[key][~wrong], clean[key][~wrong]), key
        assert torch.equal(batch["sample_numbers"], clean["sample_numbers"])
        assert (batch["label_ids"][wrong] == IGNORED_LABEL).all()
        assert (batch["input_ids"][wrong & (clean["sample_numbers"] >= 0)] == 0).all()


@settings(max_examples=15)
@given(bad=st.sets(st.integers(0, 39)))
def test_samples_that_cannot_be_made_are_masked_rows_and_nothing_else_differs(tmp_path_factory, bad):
    folder = tmp_path_factory.mktemp("bad")
    runs = Runs(folder)
    adapter = SkipErrors(len(bad), OSError)
    loader = DataLoader2(indexed(runs, below=Fails(tokens_of(runs, bad), folder, None)), adapter)
    check_skipped(loader, indexed(runs), bad)
    assert adapter.count == len(bad)
    assert [sample for _, sample, _ in adapter.skipped] == sorted(bad)
    assert loader.state_dict().get("noted", {}) == (
        {"skip_errors": {"count": len(bad), "samples": sorted(bad)}} if bad else {}
    )
    if bad:
        short = DataLoader2(
            indexed(runs, below=Fails(tokens_of(runs, bad), folder, None)), SkipErrors(len(bad) - 1, OSError)
        )
        found, error = until_raised(short, SkipBudgetError)
        assert len(found) == max(bad) // MICRO, "the batch with one too many is not delivered"
        assert str(max(bad)) in str(error)


@pytest.mark.parametrize("n", [2])
def test_workers_that_read_ahead_do_not_spend_the_budget_before_delivery(runs, tmp_path, n):
    bad = [1, 2, 17, 30, 38]
    graph = indexed(runs, below=Fails(tokens_of(runs, bad), tmp_path, None))
    for budget in (5, 2):
        adapter = SkipErrors(budget, OSError)
        with loader_of(graph, adapter, n) as loader:
            iterator = iter(loader)
            for k, clean in enumerate(indexed(runs)):
                if sum(b < MICRO * (k + 1) for b in bad) > budget:
                    with pytest.raises(SkipBudgetError):
                        next(iterator)
                    break
                check_skipped([next(iterator)], [clean], bad)
                done = [b for b in bad if b < MICRO * (k + 1)]
                noted = loader.state_dict()["noted"]["skip_errors"]
                assert noted == {"count": len(done), "samples": done}
                assert loader.metrics()["data/skipped"] >= len(done)
            else:
                assert budget == 5
                assert loader.metrics()["data/skipped"] == adapter.count == 5


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("n", [0, 2])
def test_a_resume_goes_on_with_what_is_left_of_the_budget(runs, tmp_path, n, as_text):
    bad = [1, 2, 17, 30, 38]
    graph, plain = indexed(runs, below=Fails(tokens_of(runs, bad), tmp_path, None)), list(indexed(runs))
    for after in (0, 1, 5, 9):
        with loader_of(graph, SkipErrors(5, OSError), n) as loader:
            for _ in zip(range(after), loader, strict=False):
                pass
            state = written(loader.state_dict(), as_text)
        adapter = SkipErrors(5, OSError)
        with loader_of(graph, adapter, n) as loader:
            loader.load_state_dict(state)
            check_skipped(loader, plain[after:], bad)
            assert adapter.count == 5
            assert loader.state_dict()["noted"]["skip_errors"] == {"count": 5, "samples": bad}
        with loader_of(graph, SkipErrors(4, OSError), n) as loader:
            loader.load_state_dict(state)
            assert len(until_raised(loader, SkipBudgetError)[0]) == 9 - after


@pytest.mark.parametrize("n", [0, 2])
def test_after_the_budget_is_spent_a_larger_one_goes_on_with_the_batch_that_was_not_delivered(runs, tmp_path, n):
    bad = [1, 17, 30]
    graph, plain = indexed(runs, below=Fails(tokens_of(runs, bad), tmp_path, None)), list(indexed(runs))
    loader = loader_of(graph, SkipErrors(1, OSError), n)
    found, _ = until_raised(loader, SkipBudgetError)
    state = written(loader.state_dict())
    assert state["consumed_samples"] == MICRO * len(found) == 16
    with loader_of(graph, SkipErrors(3, OSError), n) as again:
        again.load_state_dict(state)
        check_skipped(again, plain[4:], bad)


@pytest.mark.parametrize("tail", ["pad", "uneven", "drop"])
def test_the_tail_of_an_evaluation_is_skipped_over_too(runs, tmp_path, tail):
    from tokenpipe.datapipes import Topology

    for rank in (0, 1):
        bad = [3, 12, 36, 37]

        def graph(fails: Any = None, rank: int = rank) -> Any:
            node = runs.blend(None).limit(samples=38).once(tail=tail)
            node = node.map(fails, seeded=False) if fails is not None else node
            node = node.shard_ranks(Topology(dp_rank=rank, dp_size=2))
            return node.batch_samples(MICRO).collate_causal_lm(sample_numbers=True)

        plain = list(graph())
        firsts = [number_of(row) for row in runs.blend(None).fetch(bad)]
        check_skipped(DataLoader2(graph(Fails(firsts, tmp_path, None)), SkipErrors(9, OSError)), plain, bad)


def test_excluded_rows_stay_masked_beside_those_that_cannot_be_made(runs, tmp_path):
    def graph(below: Any) -> Any:
        node = runs.source("prose").exclude({"prose": [(0, 300)]}).limit(samples=40).map(below, seeded=False)
        return node.batch_samples(MICRO).collate_causal_lm(sample_numbers=True)

    plain, bad = list(graph(as_item)), [5, 9]
    masked = [n for n, (_, labels) in rows_by_number(plain).items() if set(labels) == {IGNORED_LABEL}]
    assert 0 < len(masked) < 40
    firsts = [number_of(row) for row in runs.source("prose").fetch(bad)]
    found = list(DataLoader2(graph(Fails(firsts, tmp_path, None)), SkipErrors(2)))
    check_skipped(found, plain, bad)
    still = [n for n, (_, labels) in rows_by_number(found).items() if set(labels) == {IGNORED_LABEL}]
    assert still == sorted({*masked, *bad})


def test_all_rows_of_a_batch_may_be_bad(runs, tmp_path):
    graph = indexed(runs, below=Fails(tokens_of(runs, range(40)), tmp_path, None))
    check_skipped(DataLoader2(graph, SkipErrors(40)), indexed(runs), range(40))


def test_samples_that_are_not_batched_cannot_be_left_out(runs):
    with pytest.raises(GraphError, match="batch_samples"):
        DataLoader2(runs.blend(), SkipErrors(3))
    with pytest.raises(GraphError, match="batch"):
        DataLoader2(indexed(runs, below=as_item), SkipErrors(3, nodes="map"))


@pytest.mark.parametrize("n", [0, 2])
@pytest.mark.parametrize("name", ["map", "filter", "collate", "below batch", "above batch", "own source, batched"])
def test_of_a_stream_the_failing_items_are_left_out_and_nothing_else(tmp_path, name, n):
    bad = [0, 5, 8, 13, 19]
    folder = tmp_path / "no"
    folder.mkdir()
    if name == "own source, batched":  # of itself it cannot go on behind what it never gives
        bad = [k for k in bad if k == 99]
    adapter = SkipErrors(5, OSError)
    with loader_of(STREAMS[name](Fails(bad, tmp_path, None)), adapter, n) as loader:
        found = list(loader)
        expected = list(loader_of(left_out(name, bad), None, n))
        assert all_same(found, expected)
        if name == "above batch":
            assert adapter.count == len(list(loader_of(STREAMS[name](Fails([], tmp_path)), None, n))) - len(found)
        else:
            assert adapter.count == len(bad)
        assert loader.metrics()["data/skipped"] == adapter.count


def left_out(name: str, bad: Any) -> Any:
    """The stream of a name, without what comes of some numbers."""
    source = IterableWrapper(range(20)).sharding_filter()
    good = Without(bad)
    return {
        "map": lambda: source.filter(good).map(tenfold),
        "filter": lambda: source.filter(good).filter(keeps),
        "collate": lambda: source.filter(good).collate(torch.tensor),
        "below batch": lambda: source.filter(good).batch(3),
        "above batch": lambda: source.batch(2).filter(good),
        "own source, batched": lambda: Count(20).sharding_filter().batch(3),
    }[name]()


class Without:
    def __init__(self, bad: Any) -> None:
        self.bad = bad

    def __call__(self, item: Any) -> bool:
        return number_of(item) not in self.bad


@pytest.mark.parametrize("n", [0, 2])
def test_a_bad_line_of_json_is_left_out_and_the_lines_after_it_are_read(tmp_path, n):
    lines = [json.dumps({"text": f"{k}"}) for k in range(30)]
    for k in (0, 7, 8, 29):
        lines[k] = '{"text": '
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    graph = JsonLinesReader(tmp_path / "a.jsonl").sharding_filter()
    adapter = SkipErrors(8, DocumentError)
    with loader_of(graph, adapter, n) as loader:
        assert sorted(map(int, loader)) == [k for k in range(30) if k not in (0, 7, 8, 29)]
        assert adapter.count == 4 * max(1, n), "each worker reads each line"
    until_raised(loader_of(graph, SkipErrors(3, DocumentError), n), SkipBudgetError)


@pytest.mark.parametrize("n", [0, 2])
def test_one_item_too_many_is_an_error_and_a_larger_budget_goes_on_where_it_was(tmp_path, n):
    bad = [3, 8, 13]
    graph = IterableWrapper(range(20)).sharding_filter().map(Fails(bad, tmp_path, None))
    loader = loader_of(graph, SkipErrors(2, OSError), n)
    found, error = until_raised(loader, SkipBudgetError)
    everything = list(loader_of(IterableWrapper(range(20)).sharding_filter().filter(Without(bad)), None, n))
    assert found == everything[: len(found)]
    assert len(found) >= 10
    assert "failed at 13" in str(error)
    state = written(loader.state_dict())
    again = loader_of(graph, SkipErrors(9, OSError), n)
    again.load_state_dict(state)
    assert list(again) == everything[len(found) :], "no item is lost to the error"


@pytest.mark.parametrize("n", [0, 2])
def test_the_count_of_a_stream_is_resumed(tmp_path, n):
    bad = [3, 8, 13]
    graph = IterableWrapper(range(20)).sharding_filter().map(Fails(bad, tmp_path, None))
    everything = list(loader_of(graph, SkipErrors(3), n))
    for after in (0, 4, 10, 17):
        with loader_of(graph, SkipErrors(3), n) as loader:
            for _ in zip(range(after), loader, strict=False):
                pass
            state = written(loader.state_dict(), as_text=True)
        adapter = SkipErrors(3)
        with loader_of(graph, adapter, n) as loader:
            loader.load_state_dict(state)
            assert list(loader) == everything[after:]
            assert adapter.count == 3, "none is counted twice, none is forgotten"


def test_ranks_agree_whatever_one_of_them_did_without(runs, tmp_path):
    ledgered = DataLoader2(
        indexed(runs, below=Fails(tokens_of(runs, [1, 2]), tmp_path, None)), [SkipErrors(3), retry()]
    )
    other = DataLoader2(indexed(runs, below=Fails([], tmp_path)), [SkipErrors(3), retry()])
    for _ in zip(range(3), ledgered, other, strict=False):
        pass
    assert ledgered.state_dict() != other.state_dict()
    assert ledgered._run.standing() == other._run.standing()
