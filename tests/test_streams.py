"""Streams: nodes with a place, shards that go on there, and the loader's state of them."""

import base64
import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from contract import all_same
from tokenpipe.datapipes import (
    DocumentTokenizer,
    JsonLinesReader,
    SequencePacker,
    StreamingDataPipe,
    Topology,
    read_tokens,
)
from tokenpipe.datapipes._torch import DataPipe, IterDataPipe, MapDataPipe, apply_sharding
from tokenpipe.datapipes.errors import (
    ConfigurationError,
    DocumentError,
    LoaderError,
    LoaderWarning,
    StateError,
    StateMismatchError,
)
from tokenpipe.datapipes.items import items_of
from tokenpipe.datapipes.streaming.shard import BEGINNING, Delivered, later, nodes_without_state
from tokenpipe.reading_services import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    PauseIteration,
    ReadingServiceInterface,
    SeedGenerator,
    StreamShard,
)
from tokenpipe.reading_services.stream_state import canonical


@pytest.fixture
def documents(tmp_path):
    """A folder of three JSON lines files: 12 documents of 0 to 30 letters, blank lines, one file without any."""
    for name, lengths in (("a", [5, 0, 17, 3]), ("b", []), ("c", [30, 1, 8, 8, 2, 11, 29, 4])):
        lines = [json.dumps({"text": name * n, "n": n}) + "\n" * (1 + n % 3 // 2) for n in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines) + "\n \n")
    return tmp_path


def negated(k: int) -> int:
    return -k


def is_odd(k: int) -> bool:
    return k % 2 == 1


def fails_at_five(k: int) -> int:
    if k == 5:
        raise ZeroDivisionError("five")
    return k


class Pairs(StreamingDataPipe):
    """Two items from one: its place lies inside an item."""

    initial_state = {"waiting": []}  # noqa: RUF012

    def __init__(self, datapipe: DataPipe) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> Iterator[Any]:
        while self.waiting:
            yield self.waiting.pop()
        for item in self.datapipe:
            self.waiting = [[item, 1], [item, 0]]
            while self.waiting:
                yield self.waiting.pop()


class Chain(StreamingDataPipe):
    """One input after the other: the later ones have not begun yet when a place is asked for."""

    initial_state = {"at": 0}  # noqa: RUF012

    def __init__(self, *datapipes: DataPipe) -> None:
        super().__init__()
        self.datapipes = datapipes

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.datapipes):
            yield from self.datapipes[self.at]
            self.at += 1


class Jitter(StreamingDataPipe):
    """A random node of our own: its generator's state is its place."""

    initial_state = {"drawn": 0}  # noqa: RUF012

    def __init__(self, datapipe: DataPipe) -> None:
        super().__init__()
        self.datapipe, self.seed = datapipe, 0

    def set_seed(self, seed: int) -> "Jitter":
        self.seed = seed
        return self

    def __iter__(self) -> Iterator[Any]:
        for item in self.datapipe:
            self.drawn += 1
            yield item, random.Random(self.seed * 1_000_003 + self.drawn).randrange(1000)


class PlainCounter(IterDataPipe):
    """A node without a state."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        yield from range(self.stop)


class OwnState(IterDataPipe):
    """A node of someone else that has a state."""

    def __init__(self, stop: int) -> None:
        self.stop, self.place, self.loaded = stop, 0, False

    def reset(self) -> None:
        self.place, self.loaded = self.place if self.loaded else 0, False

    def __iter__(self) -> Iterator[int]:
        while self.place < self.stop:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.loaded = state["place"], True


class Nested(StreamingDataPipe):
    initial_state = {"place": []}  # noqa: RUF012

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def __iter__(self) -> Iterator[int]:
        while len(self.place) < 3:
            level: list[Any] = []
            for _ in range(self.levels):
                level = [level]
            self.place = [*self.place, level]
            yield len(self.place)


class Tokens(MapDataPipe):
    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError(index)
        return index * index

    def __len__(self) -> int:
        return 11


def known(folder) -> dict[str, Callable[[], DataPipe]]:
    """Graphs all of whose nodes know their place."""
    return {
        "lines": lambda: JsonLinesReader(folder),
        "tokens": lambda: JsonLinesReader(folder).tokenize("byte"),
        "rows": lambda: JsonLinesReader(folder).sharding_filter().tokenize("byte").pack_sequences(6),
        "long rows": lambda: JsonLinesReader(folder).tokenize("byte", end_of_text=False).pack_sequences(25),
        "batches": lambda: JsonLinesReader(folder).tokenize("byte").pack_sequences(4).batch(3).map(np.stack),
        "torch": lambda: IterableWrapper(range(23)).map(negated).sharding_filter().filter(is_odd).batch(3),
        "batches without a rest": lambda: IterableWrapper(range(11)).batch(3, drop_last=True),
        "inside an item": lambda: Pairs(IterableWrapper(range(5))).batch(3),
        "one after the other": lambda: Chain(IterableWrapper(range(3)), Pairs(IterableWrapper(range(3)))).map(str),
        "random": lambda: Jitter(IterableWrapper(range(9))),
        "someone else's": lambda: OwnState(5).map(negated),
        "a state as deep as may be": lambda: Nested(5),
        "map style": lambda: SequenceWrapper(list(range(7))).map(negated).batch(2),
        "map style below": lambda: IterableWrapper(Tokens()).map(negated),
        "empty": lambda: IterableWrapper([]).map(negated),
        "skipped": lambda: IterableWrapper(range(9)).skip(3).map(negated),
        "limited": lambda: IterableWrapper(range(9)).map(negated).limit(5).batch(2),
        "limited beyond its end": lambda: IterableWrapper(range(4)).limit(7),
    }


def replayed(folder) -> dict[str, Callable[[], DataPipe]]:
    """Graphs with a node that has no state, or that is drawn from by several."""

    def forked() -> DataPipe:
        one, two = IterableWrapper(range(8)).fork(num_instances=2)
        return one.zip(two.map(negated))

    def shared() -> DataPipe:
        numbers = IterableWrapper(range(4))
        return numbers.concat(numbers.map(negated))

    def chained() -> DataPipe:
        numbers = IterableWrapper(range(4))
        return Chain(numbers, numbers.map(negated))  # each knows its place, but not whose turn it is

    return {
        "drawn from twice": chained,
        "shuffle": lambda: JsonLinesReader(folder).shuffle(buffer_size=5).tokenize("byte").pack_sequences(9),
        "map-style shuffle": lambda: SequenceWrapper(list(range(12))).shuffle(),
        "fork": forked,
        "shared": shared,
        "unbatch": lambda: IterableWrapper(range(9)).batch(2).unbatch(),
        "a user's": lambda: PlainCounter(9).map(negated),
        "mux": lambda: IterableWrapper(range(4)).mux(IterableWrapper(range(5, 9))),
    }


GRAPHS = [*known(""), *replayed("")]


def graph_of(name: str, folder) -> DataPipe:
    return {**known(folder), **replayed(folder)}[name]()


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


# Nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known(""))
def test_every_node_of_ours_pickles_prints_and_resumes_at_every_step(name, documents):
    make = known(documents)[name]
    expected = list(items_of(make()))
    assert all_same(items_of(pickle.loads(pickle.dumps(make()))), expected)
    assert repr(make())
    for k in range(len(expected) + 1):
        shard = StreamShard(make())
        assert all_same([next(shard) for _ in range(k)], expected[:k])
        place = through_json(shard.snapshot())
        assert place["skip"] == 0, "its nodes know their places"
        travelled = pickle.loads(pickle.dumps(shard.datapipe))
        assert all_same(items_of(travelled), expected), "a copy begins anew"
        rest = StreamShard(make(), place)
        assert rest.snapshot() == place, "saved right after a resume"
        assert all_same(rest, expected[k:])
        assert all_same(shard, expected[k:]), "looking changed nothing"
        assert rest.snapshot() == shard.snapshot() == {**BEGINNING, "items": len(expected), "ended": True}
        assert list(StreamShard(make(), rest.snapshot())) == []


@pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning")
@pytest.mark.parametrize("name", replayed(""))
def test_a_graph_with_nodes_that_know_no_place_is_replayed(name, documents):
    def make() -> DataPipe:
        graph = replayed(documents)[name]()
        return graph.set_seed(5) if name == "map-style shuffle" else graph

    def seeded() -> DataPipe:
        torch.manual_seed(1)
        return make()

    expected = list(StreamShard(seeded()))
    assert len(expected) >= 3
    for k in range(len(expected) + 1):
        shard = StreamShard(seeded())
        for _ in range(k):
            next(shard)
        place = through_json(shard.snapshot())
        assert place == {"items": k, "skip": k, "ended": False, "nodes": None}
        torch.manual_seed(1)
        assert all_same(StreamShard(make(), place), expected[k:])


def test_that_it_will_be_replayed_is_said_once_a_graph_with_the_nodes_that_know_no_place():
    shard = StreamShard(IterableWrapper(range(9)).shuffle().map(negated))
    next(shard)
    with pytest.warns(LoaderWarning, match=r"shuffle") as said:
        shard.snapshot()
        shard.snapshot()
        again = StreamShard(shard.datapipe)
        next(again)
        again.snapshot()
    assert len(said) == 1
    assert nodes_without_state(IterableWrapper(range(9)).map(negated).batch(2)) == []


def test_nodes_stand_under_their_functional_names_and_show_their_arguments(documents):
    stream = JsonLinesReader(documents / "*.jsonl").tokenize("byte").pack_sequences(8)
    assert isinstance(stream, SequencePacker)
    assert isinstance(stream.datapipe, DocumentTokenizer)
    assert repr(stream) == "SequencePacker(sequence_length=8)"
    assert repr(stream.datapipe) == "DocumentTokenizer(tokenizer='byte', end_of_text='<|endoftext|>')"
    assert repr(stream.datapipe.datapipe) == "JsonLinesReader(column='text', files=3)"


def test_rows_are_those_that_slice_sequences_cuts_from_the_same_tokens(documents):
    stream = JsonLinesReader(documents).tokenize("byte")
    flat = np.concatenate(list(stream))
    assert flat[[5, 6]].tolist() == [256, 256], "an empty document is its end alone"
    rows = list(stream.pack_sequences(7))
    assert len(rows) == (flat.size - 1) // 7
    for k, row in enumerate(rows):
        assert row.dtype == np.int64
        assert row.tolist() == flat[7 * k : 7 * k + 8].tolist()
        row[:] = -1  # a row is its own: the next one does not change


def test_the_packer_refuses_what_are_no_token_ids():
    for wrong in ([0.5], [[1, 2]], ["a"]):
        with pytest.raises(TypeError, match="token ids"):
            list(SequencePacker(IterableWrapper([wrong]), 2))
    with pytest.raises(ConfigurationError):
        SequencePacker(IterableWrapper([]), 0)


def test_a_damaged_line_is_named_and_a_resume_comes_to_it_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": 2}\n')
    shard = StreamShard(JsonLinesReader(path))
    assert next(shard) == "one"
    with pytest.raises(DocumentError, match="line 2"):
        next(shard)
    with pytest.raises(LoaderError, match="broken off"):
        next(shard)
    place = shard.snapshot()
    assert place["items"] == 1
    with pytest.raises(DocumentError, match="line 2"):
        next(StreamShard(JsonLinesReader(path), place))


def test_each_instance_has_its_lines_and_together_they_are_all(documents):
    def shard(instance: int) -> DataPipe:
        return apply_sharding(JsonLinesReader(documents).sharding_filter().tokenize("byte"), 3, instance)

    parts = [[bytes(ids[:-1].astype(np.uint8)).decode() for ids in StreamShard(shard(i))] for i in range(3)]
    whole = list(JsonLinesReader(documents))
    assert [parts[k % 3][k // 3] for k in range(len(whole))] == whole


class Wrong(StreamingDataPipe):
    initial_state = {"place": 0}  # noqa: RUF012

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def __iter__(self) -> Iterator[int]:
        self.place = self.value
        yield 1


@pytest.mark.parametrize(
    "value", [(1, 2), {1}, np.int64(3), float("nan"), {1: 2}, {None: 2}, object(), b"x", 2**64, [[(0,)]], torch.ones(1)]
)
def test_a_state_that_is_no_json_names_the_node_and_the_attribute(value):
    shard = StreamShard(Wrong(value))
    next(shard)
    with pytest.raises(StateError, match=r"Wrong\.place"):
        shard.snapshot()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"file": 0},
        {"file": 0, "offset": 0, "more": 0},
        {"file": "0", "offset": 0},
        {"file": 9, "offset": 0},
        {"file": -1, "offset": 0},
        {"file": 0, "offset": 10**9},
        {"file": True, "offset": 0},
        {"file": None, "offset": 0},
        [],
        None,
        7,
    ],
)
def test_a_node_takes_no_other_nodes_state_nor_a_place_that_does_not_exist(state, documents):
    reader = JsonLinesReader(documents)
    with pytest.raises(StateError, match="JsonLinesReader"):
        reader.load_state_dict(state)
    assert len(list(reader)) == 12, "it begins anew"


@pytest.mark.parametrize("left", ["", [0.5], [2**63], [True], None, {}])
def test_left_over_tokens_are_a_list_of_integers(left):
    with pytest.raises(StateError):
        SequencePacker(IterableWrapper([]), 4).load_state_dict({"left": left})


def test_a_state_that_is_too_deep_is_refused_when_it_is_saved():
    shard = StreamShard(Nested(6))
    next(shard)
    with pytest.raises(StateError, match=r"Nested\.place.*too deep"):
        shard.snapshot()


# Shards -------------------------------------------------------------------------------------------------


def test_the_place_of_another_graph_is_refused(documents):
    shard = StreamShard(JsonLinesReader(documents).tokenize("byte"))
    next(shard)
    place = shard.snapshot()
    for other in (JsonLinesReader(documents), JsonLinesReader(documents).shuffle(), IterableWrapper([1]).map(negated)):
        with pytest.raises(StateMismatchError, match="another graph"):
            StreamShard(other, place)


def test_a_replay_that_comes_to_an_end_too_early_is_an_error():
    with pytest.warns(LoaderWarning):
        shard = StreamShard(PlainCounter(3), later(BEGINNING, 5))
    with pytest.raises(StateMismatchError, match="ends 2 items before"):
        next(shard)


@pytest.mark.parametrize(
    "place",
    [
        None,
        {},
        {**BEGINNING, "more": 1},
        {**BEGINNING, "items": -1},
        {**BEGINNING, "items": True},
        {**BEGINNING, "items": 1},
        {**BEGINNING, "skip": 1},
        {**BEGINNING, "items": 2**63},
        {**BEGINNING, "ended": 0},
        {**BEGINNING, "ended": True, "nodes": {}},
        {**BEGINNING, "nodes": []},
    ],
)
def test_what_is_no_place_is_refused(place):
    with pytest.raises(StateError):
        StreamShard(IterableWrapper([1]), place if place is not None else [])


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_a_place_that_comes_with_every_few_items_is_exact_in_between(every, documents):
    make = known(documents)["rows"]
    expected = list(make())
    for k in range(len(expected) + 1):
        items = Delivered(StreamShard(make()).with_places(every), BEGINNING)
        for _ in range(k):
            next(items)
        assert items.snapshot()["items"] == k
        assert items.snapshot()["skip"] == k % every
        place = through_json(items.snapshot())
        for _ in range(2):  # saved right after the resume, too
            shard = StreamShard(make(), place)
            place = through_json(Delivered(shard.with_places(every), shard.snapshot()).snapshot())
        again = StreamShard(make(), place)
        assert all_same(Delivered(again.with_places(every), place), expected[k:])
        assert all_same(items, expected[k:])
        assert items.snapshot() == {**BEGINNING, "items": len(expected), "ended": True}


def test_an_epoch_begins_anew_whatever_the_nodes_said_at_the_end_of_the_last():
    graph = Pairs(IterableWrapper(range(3)))
    first = StreamShard(graph)
    for _ in range(3):
        next(first)
    second = StreamShard(graph)
    place = second.snapshot()
    assert list(StreamShard(Pairs(IterableWrapper(range(3))), place)) == list(second)
    StreamShard(graph, {**BEGINNING, "items": 2, "nodes": {"pairs": {"waiting": []}, "iterablewrapper": {"given": 1}}})
    assert len(list(StreamShard(graph))) == 6, "a place that nobody went on from is forgotten"


# The loader's state of a stream -------------------------------------------------------------------------


def loader_of(graph: DataPipe, prefetch_cnt: int = 0) -> DataLoader2:
    return DataLoader2(graph, reading_service=InProcessReadingService(prefetch_cnt))


def epochs(loader: DataLoader2, n: int) -> list[list[Any]]:
    return [list(loader) for _ in range(n)]


def same_epochs(a: list[list[Any]], b: list[list[Any]]) -> bool:
    return len(a) == len(b) and all(all_same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning")
@pytest.mark.parametrize("prefetch_cnt", [0, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_run_resumed_at_any_step_goes_on_as_if_never_stopped(name, prefetch_cnt, documents):
    whole = loader_of(graph_of(name, documents), prefetch_cnt)
    whole.seed(7)
    expected = epochs(whole, 3)
    if name == "shuffle":
        assert not all_same(expected[0], expected[1]), "each epoch has its own order"
    for epoch in (0, 1):
        loader = loader_of(graph_of(name, documents), prefetch_cnt)
        loader.seed(7)
        epochs(loader, epoch)
        iterator = iter(loader)
        for k in range(len(expected[epoch]) + 1):
            state = through_json(loader.state_dict())
            assert loader.state_dict() == state, "saved twice in a row"
            resumed = DataLoader2.from_state(state, graph_of(name, documents), InProcessReadingService(prefetch_cnt))
            assert resumed.state_dict() == state, "saved right after a resume"
            mine = iter(resumed)
            assert resumed.state_dict() == state, "and when it iterates"
            assert all_same(mine, expected[epoch][k:])
            assert same_epochs(epochs(resumed, 2 - epoch), expected[epoch + 1 :])
            if k < len(expected[epoch]):
                next(iterator)
        loader.shutdown()
        assert through_json(loader.state_dict()) == state, "after shutdown too"


def test_between_epochs_the_next_one_comes_whole(documents):
    loader = loader_of(graph_of("shuffle", documents))
    loader.seed(3)
    before = through_json(loader.state_dict())
    expected = epochs(loader, 2)
    between = through_json(loader.state_dict())
    third = list(loader)
    assert same_epochs(epochs(DataLoader2.from_state(before, graph_of("shuffle", documents)), 3), [*expected, third])
    assert all_same(DataLoader2.from_state(json.dumps(between), graph_of("shuffle", documents)), third)


@pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning")
def test_an_unseeded_epoch_goes_on_with_its_own_seeds():
    torch.manual_seed(4)
    loader = loader_of(IterableWrapper(range(20)).shuffle())
    items = iter(loader)
    begun = [next(items) for _ in range(6)]
    state = through_json(loader.state_dict())
    rest = list(items)
    torch.manual_seed(99)
    again = DataLoader2.from_state(state, IterableWrapper(range(20)).shuffle())
    assert list(again) == rest
    assert sorted(begun + rest) == list(range(20))
    assert list(again) != begun + rest
    assert DataLoader2(IterableWrapper([1])).state_dict()["seeds"] is None


@pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning")
def test_a_seed_set_in_the_middle_of_an_epoch_holds_from_the_next_one_on_after_a_resume_too():
    loader = loader_of(IterableWrapper(range(12)).shuffle())
    loader.seed(1)
    items = iter(loader)
    next(items)
    loader.seed(2)
    state = through_json(loader.state_dict())
    expected = [list(items), *epochs(loader, 2)]
    resumed = DataLoader2.from_state(state, IterableWrapper(range(12)).shuffle())
    assert through_json(resumed.state_dict()) == state
    assert [list(resumed), *epochs(resumed, 2)] == expected
    changed = DataLoader2.from_state(state, IterableWrapper(range(12)).shuffle())
    changed.seed(3)  # at the next epoch: the one that goes on keeps its order
    assert list(changed) == expected[0]
    assert list(changed) != expected[1]


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_a_running_loader_takes_an_earlier_state_and_is_set_up_once(prefetch_cnt):
    calls = []

    def init(datapipe: Any, info: Any) -> Any:
        calls.append(info)
        return datapipe.map(negated)

    def adapter(graph: Any) -> Any:
        calls.append("adapted")
        return graph.filter(is_odd)

    loader = DataLoader2(IterableWrapper(range(9)), adapter, InProcessReadingService(prefetch_cnt, init_fn=init))
    items = iter(loader)
    assert [next(items), next(items)] == [-1, -3]
    state = loader.state_dict()
    assert list(items) == [-5, -7]
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(items)
    assert list(loader) == [-5, -7]
    assert list(loader) == [-1, -3, -5, -7]
    assert len(calls) == 2


def test_a_state_after_a_limit_and_while_paused_is_that_of_the_items_given():
    loader = loader_of(IterableWrapper(range(10)), 3)
    items = iter(loader)
    items.limit(4)
    assert list(items) == [0, 1, 2, 3]
    assert list(DataLoader2.from_state(loader.state_dict(), IterableWrapper(range(10)))) == [4, 5, 6, 7, 8, 9]
    items.resume()
    assert next(items) == 4
    items.pause()
    assert list(items) == []
    state = loader.state_dict()
    assert list(DataLoader2.from_state(state, IterableWrapper(range(10)))) == [5, 6, 7, 8, 9]
    items.limit(None)
    items.resume()
    assert list(items) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_after_an_exception_the_state_is_good_and_a_resume_raises_at_the_same_item(prefetch_cnt):
    loader = loader_of(IterableWrapper(range(9)).map(fails_at_five).batch(2), prefetch_cnt)
    items = iter(loader)
    assert [next(items), next(items)] == [[0, 1], [2, 3]]
    with pytest.raises(ZeroDivisionError):
        next(items)
    state = loader.state_dict()
    again = iter(DataLoader2.from_state(state, IterableWrapper(range(9)).map(fails_at_five).batch(2)))
    with pytest.raises(ZeroDivisionError):
        next(again)
    mended = DataLoader2.from_state(state, IterableWrapper(range(9)).map(negated).batch(2))
    assert list(mended) == [[-4, -5], [-6, -7], [-8]]


def interrupts_at_five(k: int) -> int:
    if k == 5 and not INTERRUPTED:
        INTERRUPTED.append(k)
        raise KeyboardInterrupt
    return k


INTERRUPTED: list[int] = []


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_after_ctrl_c_the_state_is_that_of_the_items_given(prefetch_cnt):
    INTERRUPTED.clear()
    loader = loader_of(IterableWrapper(range(9)).map(interrupts_at_five).batch(2), prefetch_cnt)
    items = iter(loader)
    assert [next(items), next(items)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyboardInterrupt):
        next(items)
    state = loader.state_dict()
    resumed = DataLoader2.from_state(state, IterableWrapper(range(9)).map(interrupts_at_five).batch(2))
    assert list(resumed) == [[4, 5], [6, 7], [8]]
    loader.load_state_dict(state)
    assert list(loader) == [[4, 5], [6, 7], [8]]


def test_a_resume_reads_nothing_of_what_was_delivered(documents):
    loader = loader_of(JsonLinesReader(documents))
    items = iter(loader)
    for _ in range(6):
        next(items)
    state = loader.state_dict()
    resumed = DataLoader2.from_state(state, JsonLinesReader(documents))
    shard = iter(resumed)
    expected = list(items)
    (documents / "a.jsonl").write_text("no JSON at all")
    assert list(shard) == expected


def altered(state: Any, **changes: Any) -> Any:
    return {**copy.deepcopy(state), **changes}


def saved(documents) -> Any:
    loader = loader_of(graph_of("rows", documents))
    loader.seed(5)
    items = iter(loader)
    next(items)
    return through_json(loader.state_dict())


def test_a_state_of_other_ranks_workers_settings_or_files_is_refused_with_all_differences(documents):
    state = saved(documents)
    graph = graph_of("rows", documents)
    with pytest.raises(StateMismatchError, match=r"(?s)rank: saved 1, here 0.*ranks: saved 4, .*workers: saved 2"):
        DataLoader2.from_state(altered(state, rank=1, ranks=4, workers=2), graph)
    with pytest.raises(StateMismatchError, match="node pack_sequences: other settings"):
        DataLoader2.from_state(state, JsonLinesReader(documents).sharding_filter().tokenize("byte").pack_sequences(7))
    with pytest.raises(StateMismatchError, match=r"(?s)node sharding_filter: not here.*node tokenize: other"):
        DataLoader2.from_state(state, JsonLinesReader(documents).tokenize("byte").pack_sequences(6))
    with pytest.raises(StateMismatchError, match="batch"):
        loader = loader_of(IterableWrapper(range(4)).batch(2))
        DataLoader2.from_state(loader.state_dict(), IterableWrapper(range(4)).batch(3))
    text = (documents / "c.jsonl").read_text()
    (documents / "c.jsonl").write_text(text.replace("c", "d"))  # the same size
    with pytest.raises(StateMismatchError, match="jsonlinesreader: other settings or data"):
        DataLoader2.from_state(state, graph_of("rows", documents))


def test_a_moved_folder_is_no_change(documents, tmp_path_factory):
    state = saved(documents)
    expected = list(DataLoader2.from_state(state, graph_of("rows", documents)))
    moved = documents.rename(tmp_path_factory.mktemp("elsewhere") / "moved")
    assert all_same(DataLoader2.from_state(state, graph_of("rows", moved)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "tokenpipe-state"},
        {"version": 2},
        {"version": True},
        {"more": 1},
        {"rank": -1},
        {"rank": 1},
        {"ranks": 0},
        {"workers": "0"},
        {"graph": []},
        {"graph": {"a": 1}},
        {"seeds": {}},
        {"seeds": {"key": 2**64, "role": "main", "shared": 0, "own": 0}},
        {"seeds": {"key": 1, "role": "main", "shared": 0, "own": -1}},
        {"seeds": None},
        {"seeded": 1},
        {"seeded": True, "seeds": None, "service": None},
        {"seeds_after": 7},
        {"service": []},
        {"service": 7},
        {"service": "not base64"},
        {"service": {"a": float("inf")}},
        {"service": {"a": (1,)}},
        {"service": {"a": "x" * (1 << 24)}},
    ],
)
def test_what_is_no_state_of_a_stream_is_refused(changes, documents):
    state = saved(documents)
    loader = loader_of(graph_of("rows", documents))
    with pytest.raises(StateError):
        loader.load_state_dict(altered(state, **changes))
    assert loader.state_dict()["service"] is None, "nothing has changed"


@pytest.mark.parametrize(
    "service",
    [
        {},
        {"shards": []},
        {"shards": [BEGINNING, BEGINNING]},
        {"shards": {}},
        {"shards": [7]},
        {"shards": [BEGINNING], "more": 1},
        {"shards": [{**BEGINNING, "nodes": {"pairs": {}}}]},
        {"shards": [{**BEGINNING, "nodes": {}}]},
        base64.b64encode(b"\x80\x04.").decode(),
    ],
)
def test_a_place_that_is_none_is_refused_when_it_is_taken_each_time(service, documents):
    loader = loader_of(graph_of("rows", documents))
    loader.load_state_dict(altered(saved(documents), service=service))
    for _ in range(2):
        with pytest.raises(StateError):
            iter(loader)


@given(st.data())
@settings(max_examples=150)
def test_a_damaged_state_is_refused_or_goes_on_within_the_stream(documents, data):
    state = saved(documents)
    text = json.dumps(state)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from('0123456789{}[]",:-etrue \x00')) + text[at + 1 :]
    loader = loader_of(graph_of("rows", documents))
    try:
        loader.load_state_dict(damaged)
        rows = list(loader)
    except (StateError, DocumentError, OverflowError):
        return
    assert all(row.shape == (7,) for row in rows)


def test_text_that_is_no_state_is_refused(documents):
    loader = loader_of(graph_of("rows", documents))
    for text in ("", "[]", "{", b"\xff", '{"format": 1, "format": 2}', '{"a": NaN}', "[" * 100_000, "7"):
        with pytest.raises(StateError):
            loader.load_state_dict(text)


def test_the_state_says_where_a_stream_is_and_nothing_else(documents):
    state = saved(documents)
    assert list(state) == [
        "format", "version", "rank", "ranks", "workers", "graph", "seeds", "seeded", "seeds_after", "service"
    ]  # fmt: skip
    assert list(state["graph"]) == ["pack_sequences", "tokenize", "sharding_filter", "jsonlinesreader"]
    (place,) = state["service"]["shards"]
    second = (documents / "a.jsonl").read_text().index("aaaaaaaaaaaaaaaaa")  # two documents make the first row
    assert place["nodes"]["jsonlinesreader"] == {"file": 0, "offset": second - len('{"text": "')}
    assert place["nodes"]["sharding_filter"] == {"seen": 2}
    assert place["nodes"]["pack_sequences"] == {"left": [256]}
    assert len(json.dumps(state)) < 1024
    assert not [part for part in (str(documents), "tokenpipe.datapipes", "__") if part in json.dumps(state)]


def test_what_only_indexed_graphs_have_is_said_of_streams():
    loader = loader_of(IterableWrapper(range(4)))
    for call in (lambda: loader.state_dict(step=3), lambda: loader.load_state_dict({}, amend=True), loader.restart):
        with pytest.raises(LoaderError, match="stream"):
            call()


# Services -----------------------------------------------------------------------------------------------


class Plain(ReadingServiceInterface):
    def initialize(self, datapipe: DataPipe) -> DataPipe:
        return datapipe


class Bytes(CheckpointableReadingServiceInterface):
    """A service of someone else, whose place is a byte."""

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        self.given = self.first = 0
        return datapipe

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        first, self.first, self.given = self.first, 0, self.first
        for number, item in enumerate(items_of(datapipe)):
            if number >= first:
                self.given += 1
                yield item

    def checkpoint(self) -> bytes:
        return bytes([255, self.given])

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        datapipe = self.initialize(datapipe)
        self.first = serialized_state[1]
        return datapipe


def test_a_service_that_knows_no_place_runs_streams_and_says_that_it_cannot_save():
    loader = DataLoader2(IterableWrapper(range(3)), reading_service=Plain())
    assert list(loader) == [0, 1, 2]
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(LoaderError, match="Plain"):
            call()


def test_a_checkpointable_service_of_someone_else_saves_and_restores_its_bytes():
    loader = DataLoader2(IterableWrapper(range(6)), reading_service=Bytes())
    items = iter(loader)
    assert [next(items), next(items)] == [0, 1]
    state = through_json(loader.state_dict())
    assert base64.b64decode(state["service"]) == b"\xff\x02"
    resumed = DataLoader2.from_state(state, IterableWrapper(range(6)), Bytes())
    assert list(resumed) == [2, 3, 4, 5]
    assert list(resumed) == [0, 1, 2, 3, 4, 5]


def test_a_service_that_two_loaders_share_does_not_mistake_their_places():
    service = InProcessReadingService()
    one = DataLoader2(IterableWrapper(range(6)), reading_service=service)
    two = DataLoader2(IterableWrapper(range(6)), reading_service=service)
    next(iter(one))
    iter(two)
    two.state_dict()
    with pytest.raises(LoaderError, match="another loader"):
        one.state_dict()


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_service_without_a_loader_checkpoints_and_restores_streams(prefetch_cnt, documents):
    def begun(state: "bytes | None" = None) -> tuple[InProcessReadingService, Iterator[Any]]:
        service, graph = InProcessReadingService(prefetch_cnt), graph_of("shuffle", documents)
        graph = service.initialize(graph) if state is None else service.restore(graph, state)
        if state is not None:
            assert service.checkpoint() == state
        reset = service.initialize_iteration(SeedGenerator(3))
        assert reset is not None
        return service, service.iterate(reset(graph))

    _, items = begun()
    expected = list(items)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoaderWarning)
        for k in range(len(expected) + 1):
            service, items = begun()
            for _ in range(k):
                next(items)
            state = service.checkpoint()
            service.finalize_iteration()
            assert service.checkpoint() == state
            assert canonical(json.loads(state)) == state
            assert all_same(begun(state)[1], expected[k:])


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_service_without_a_loader_checkpoints_and_restores_indexed_graphs(prefetch_cnt, token_file):
    files = {token_file("a.bin", 900): 0.7, token_file("b.bin", 500, 3): 0.3}

    def graph() -> Any:
        tokens = read_tokens(files, 8, seed=3, dtype="uint16")
        batches = tokens.shard_ranks(Topology(dp_rank=1, dp_size=2)).batch_samples(2)
        return batches.collate_causal_lm().limit(steps=9)

    loader = DataLoader2(graph())
    expected = [batch["input_ids"] for batch in loader]
    for k in range(len(expected) + 1):
        service = InProcessReadingService(prefetch_cnt)
        items = service.iterate(service.initialize(graph()))
        for _ in range(k):
            next(items)
        state = service.checkpoint()
        service.finalize_iteration()
        assert service.checkpoint() == state
        again = InProcessReadingService(prefetch_cnt)
        restored = again.restore(graph(), state)
        assert json.loads(again.checkpoint()) == json.loads(state)
        found = [batch["input_ids"] for batch in again.iterate(restored)]
        assert all_same(found, expected[k:])
        assert all_same((b["input_ids"] for b in DataLoader2.from_state(state, graph())), expected[k:])


class Pausing(Plain):
    """Ends the loop, not the iteration, after every third item."""

    finalized = 0

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        return Thirds(items_of(datapipe))

    def finalize_iteration(self) -> None:
        self.finalized += 1


class Thirds:
    def __init__(self, items: Iterator[Any]) -> None:
        self.items, self.given = items, 0

    def __iter__(self) -> "Thirds":
        return self

    def __next__(self) -> Any:
        if self.given == 3:
            self.given = 0
            raise PauseIteration
        self.given += 1
        return next(self.items)


def test_a_service_that_pauses_ends_the_loop_and_not_the_iteration():
    service = Pausing()
    loader = DataLoader2(IterableWrapper(range(8)), reading_service=service)
    items = iter(loader)
    assert [list(items) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert service.finalized == 0
    assert list(items) == [6, 7]
    assert service.finalized == 1


# What torchdata had wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_cnt", [None, 0, 3])
def test_a_new_epoch_while_paused_is_whole(prefetch_cnt):
    loader = DataLoader2(IterableWrapper(range(6))) if prefetch_cnt is None else loader_of(IterableWrapper(range(6)), 3)
    items = iter(loader)
    items.limit(2)
    assert list(items) == [0, 1]
    assert list(loader) == list(range(6))
    items = iter(loader)
    next(items)
    items.pause()
    assert list(items) == []
    assert list(loader) == list(range(6))


@pytest.mark.parametrize("prefetch_cnt", [None, 0, 3])
def test_limit_then_resume_then_a_new_iterator(prefetch_cnt):
    loader = DataLoader2(IterableWrapper(range(6))) if prefetch_cnt is None else loader_of(IterableWrapper(range(6)), 3)
    items = iter(loader)
    items.limit(2)
    assert list(items) == [0, 1]
    items.resume()
    assert list(items) == [2, 3]
    assert list(iter(loader)) == list(range(6))
    with pytest.raises(RuntimeError, match="invalidated"):
        next(items)


class Special(DataLoader2):
    pass


def test_a_resume_applies_no_adapter_again_and_keeps_the_subclass():
    loader = Special(IterableWrapper(range(6)), lambda graph: graph.map(negated))
    items = iter(loader)
    next(items)
    state = loader.state_dict()
    again = Special.from_state(state, IterableWrapper(range(6)).map(negated))
    assert type(again) is Special
    assert list(again) == [-1, -2, -3, -4, -5]
    loader.load_state_dict(state)
    loader.load_state_dict(state)
    assert list(loader) == [-1, -2, -3, -4, -5]


def test_seed_and_limit_do_something_without_a_reading_service():
    loader = DataLoader2(IterableWrapper(range(30)).shuffle())
    loader.seed(3)
    first = list(loader)
    second = list(loader)
    assert first != second, "one seed, another order each epoch"
    loader.seed(3)
    items = iter(loader)
    items.limit(4)
    assert list(items) == first[:4]
    loader.seed(3)
    assert epochs(loader, 2) == [first, second]
