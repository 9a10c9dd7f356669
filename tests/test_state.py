"""What a checkpoint holds: small, the same on every rank, exact, and refused where it does not belong."""

import copy
import gc
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.datapipes.errors import (
    BatchSizeError,
    JournalError,
    StateError,
    StateMismatchError,
    TokenpipeError,
)
from tokenpipe.reading_services import DataLoader2, InProcessReadingService

MOST_BYTES = 64 * 1024


def size_of(state: Any) -> int:
    return len(json.dumps(state, separators=(",", ":")))


class Corpus:
    """Two raw files in a folder, and the graph over them with one thing changed at a time."""

    def __init__(self, folder: Path, tokens: int = 1200) -> None:
        self.folder = folder
        for name, salt in (("prose", 1), ("code", 2)):
            ((np.arange(tokens + salt) * 7 + salt) % 50_000).astype("<u2").tofile(folder / f"{name}.bin")

    def source(self, name: str, seed: int = 7, length: int = 8, **settings: Any) -> IndexedDataPipe:
        reader = TokenReader(self.folder / f"{settings.pop('file', name)}.bin", dtype="uint16", name=name)
        return reader.slice_sequences(length, settings.pop("unit", None)).permute(seed, **settings)

    def order(self, weights: Any = (0.8, 0.2)) -> IndexedDataPipe:
        return self.source("prose").blend(self.source("code"), weights=weights and list(weights))

    def graph(
        self,
        order: "IndexedDataPipe | None" = None,
        rank: int = 0,
        dp: int = 1,
        micro: int = 4,
        size: Any = 8,
        samples: "int | None" = None,
    ) -> IndexedDataPipe:
        order = self.order() if order is None else order
        order = order if samples is None else order.limit(samples=samples)
        dealt = order.shard_ranks(Topology(rank, dp), seed=3) if dp > 1 else order
        return dealt.batch_samples(micro, global_batch_size=size).collate_causal_lm(sample_numbers=True)

    def loader(self, *args: Any, prefetch_cnt: int = 0, **settings: Any) -> DataLoader2:
        service = InProcessReadingService(prefetch_cnt=prefetch_cnt)
        return DataLoader2(self.graph(*args, **settings), reading_service=service)


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    (tmp_path / "corpus").mkdir()
    return Corpus(tmp_path / "corpus")


def rows(batch: Any) -> list[tuple[int, tuple[int, ...]]]:
    """(sample number, its tokens) of each row of a batch."""
    tokens = zip(batch["sample_numbers"].tolist(), batch["input_ids"].tolist(), strict=True)
    return [(number, tuple(ids)) for number, ids in tokens]


def take(items: Iterator[Any], n: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    return [rows(batch) for _, batch in zip(range(n), items, strict=False)]


# What it is ---------------------------------------------------------------------------------------------


def test_a_state_is_plain_json_and_survives_it(corpus):
    loader = corpus.loader()
    take(iter(loader), 5)
    loader.update_weights({"prose": 1, "code": 1})
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["consumed_samples"], state["step"]) == (20, 2)

    def plain(value: Any) -> bool:
        if type(value) is dict:
            return all(type(key) is str and plain(item) for key, item in value.items())
        return all(map(plain, value)) if type(value) is list else type(value) in (int, str)

    assert plain(state)


def test_a_state_says_nothing_of_paths_ranks_or_times(corpus):
    text = json.dumps(corpus.loader(rank=1, dp=2).state_dict())
    assert str(corpus.folder) not in text
    assert "dp" not in text
    assert ".bin" not in text


def test_the_state_of_eight_sources_without_changes_is_below_one_kib(corpus):
    names = [f"a-source-of-number-{k}" for k in range(8)]
    first, *others = (corpus.source(name, file="prose") for name in names)
    loader = corpus.loader(first.blend(*others, weights=[1 + k / 7 for k in range(8)]))
    loader.seek(10**12)
    assert size_of(loader.state_dict()) < 1024


def many_sources(corpus: Corpus, count: int, name: str = "{}", weights: Any = None) -> IndexedDataPipe:
    first, *others = (corpus.source(name.format(k), file="prose") for k in range(count))
    return first.blend(*others, weights=weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("count", "name"),
    [(32, "{}"), (33, "{}"), (32, "{:02}" + "\N{PILE OF POO}" * 198), (33, "{:02}" + "ü" * 198), (32, "{:x<200}")],
    ids=["32", "33", "32 of 200 emoji", "33 of 200 umlauts", "32 of 200 letters"],
)
def test_a_state_of_many_sources_is_below_64_kib_and_loads(corpus, count, name, weighted):
    weights = [1 + k for k in range(count)] if weighted else None
    graph = corpus.graph(many_sources(corpus, count, name, weights))
    loader = DataLoader2(graph)
    loader.seek(10**15)
    state = loader.state_dict()
    assert size_of(state) <= MOST_BYTES
    DataLoader2(graph).load_state_dict(json.loads(json.dumps(state)))
    DataLoader2(graph).load_state_dict(json.dumps(state))


def test_a_state_of_3000_sources_is_below_64_kib_and_notices_one_that_changed(corpus):
    graph = corpus.graph(many_sources(corpus, 3000))
    state = DataLoader2(graph).state_dict()
    assert size_of(state) <= MOST_BYTES
    DataLoader2(graph).load_state_dict(state)
    last = many_sources(corpus, 2999).children
    renamed = last[0].blend(*last[1:], corpus.source("2999", file="code"))
    with pytest.raises(StateMismatchError):
        DataLoader2(corpus.graph(renamed)).load_state_dict(state)


def test_a_long_schedule_is_refused_when_built_or_its_state_is_below_64_kib_and_loads(corpus):
    for length in (1, 100, 200, 250, 256, 300, 1000, 8000):
        schedule = [(k, 8 * (1 + k % 7)) for k in range(length)]
        try:
            graph = corpus.graph(size=schedule)
        except BatchSizeError as error:
            assert length > 200
            assert str(length) in str(error)
            continue
        state = DataLoader2(graph).state_dict()
        assert size_of(state) <= MOST_BYTES
        DataLoader2(graph).load_state_dict(state)


def test_changes_fill_the_journal_until_it_says_so_and_its_state_still_loads(corpus):
    graph = corpus.graph(many_sources(corpus, 500, weights=[1] * 500))
    loader = DataLoader2(graph)
    made = 0
    with pytest.raises(JournalError, match="full"):
        for k in range(200):
            loader.seek(3 * k)
            loader.update_weights([1 + (i * k) % 50 for i in range(500)])
            made += 1
    assert made > 8
    assert len(loader.state_dict()["journal"]["weights"]) == made
    expected = take(iter(loader), 4)
    for step in (None, 0, 10**15):
        state = loader.state_dict(step=step)
        assert size_of(state) <= MOST_BYTES
        DataLoader2(graph).load_state_dict(state)
        DataLoader2(graph).load_state_dict(json.dumps(state))
        DataLoader2(graph).load_state_dict(json.dumps(state).encode())
    resumed = DataLoader2.from_state(loader.state_dict(step=3 * made), graph)
    assert take(iter(resumed), 4) == expected
    other = corpus.graph(many_sources(corpus, 500, weights=[1] * 500), size=[(0, 8), (10**12, 16)])
    again = DataLoader2.from_state(loader.state_dict(), other)  # adds a breakpoint
    state = again.state_dict(step=10**15)
    assert size_of(state) <= MOST_BYTES
    DataLoader2(other).load_state_dict(state)


def test_a_state_is_the_same_on_every_rank(corpus):
    loaders = [corpus.loader(rank=rank, dp=4, micro=2, size=16) for rank in range(4)]
    iterators = [iter(loader) for loader in loaders]
    for k in range(7):
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        assert states[0]["consumed_samples"] == 8 * k
        for iterator in iterators:
            next(iterator)
    for loader in loaders:
        loader.update_weights([1, 1])
    states = [loader.state_dict() for loader in loaders]
    assert all(json.dumps(state) == json.dumps(states[0]) for state in states)


def test_what_the_caller_does_to_a_state_reaches_no_loader(corpus):
    loader = corpus.loader()
    take(iter(loader), 3)
    loader.update_weights([1, 1])
    state = loader.state_dict()
    before = copy.deepcopy(state)
    other = corpus.loader()
    other.load_state_dict(state)
    state["journal"]["weights"][0][3][0] = 17
    state["journal"]["schedule"].clear()
    state["order"].clear()
    state["sources"]["prose"] = "?"
    assert loader.state_dict() == before
    assert other.state_dict() == before


# Where it is saved --------------------------------------------------------------------------------------


def test_a_state_from_before_the_first_iteration_begins_at_the_beginning(corpus):
    state = corpus.loader().state_dict()
    assert (state["consumed_samples"], state["step"]) == (0, 0)
    assert take(iter(DataLoader2.from_state(state, corpus.graph())), 4) == take(iter(corpus.loader()), 4)


def test_a_state_saved_anywhere_twice_and_right_after_a_resume_is_exact(corpus):
    whole = take(iter(corpus.loader()), 20)
    loader = corpus.loader()
    iterator = iter(loader)
    for k in range(12):
        state = loader.state_dict()
        assert loader.state_dict() == state
        resumed = DataLoader2.from_state(state, corpus.graph())
        assert resumed.state_dict() == state
        again = DataLoader2.from_state(resumed.state_dict(), corpus.graph())
        assert take(iter(again), 5) == whole[k : k + 5]
        assert take(iter(resumed), 5) == whole[k : k + 5]
        assert rows(next(iterator)) == whole[k]


def test_what_was_prefetched_is_not_in_the_state(corpus):
    whole = take(iter(corpus.loader()), 12)
    with corpus.loader(prefetch_cnt=6) as loader:
        iterator = iter(loader)
        for k in range(5):
            assert loader.state_dict()["consumed_samples"] == 4 * k
            assert rows(next(iterator)) == whole[k]
        resumed = DataLoader2.from_state(loader.state_dict(), corpus.graph())
    assert take(iter(resumed), 4) == whole[5:9]
    assert loader.state_dict()["consumed_samples"] == 20


@pytest.mark.parametrize("tail", [None, "drop", "pad", "uneven"])
@pytest.mark.parametrize("samples", [24, 30])
def test_a_state_from_the_end_of_a_finite_graph_has_nothing_left(corpus, tail, samples):
    order = corpus.order(weights=None).limit(samples=samples)
    graph = corpus.graph(order if tail is None else order.once(tail=tail))
    loader = DataLoader2(graph)
    batches = list(loader)
    resumed = DataLoader2.from_state(loader.state_dict(), graph)
    assert list(resumed) == []
    assert len(list(resumed)) == len(batches)  # and then it begins again


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
def test_a_finite_graph_resumes_from_every_batch(corpus, tail):
    graph = corpus.graph(corpus.order(weights=None).limit(samples=30).once(tail=tail))
    whole = [rows(batch) for batch in DataLoader2(graph)]
    loader = DataLoader2(graph)
    iterator = iter(loader)
    for k in range(len(whole)):
        state = loader.state_dict()
        assert [rows(b) for b in DataLoader2.from_state(state, graph)] == whole[k:]
        next(iterator)
    assert len(whole) == {"drop": 6, "pad": 8, "uneven": 8}[tail]


@pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 9, 10, 11, 50, 10**6, 10**15])
def test_the_state_of_any_step_is_the_state_after_seeking_it(corpus, step):
    def loader() -> DataLoader2:
        made = corpus.loader(size=[(0, 8), (4, 16), (10, 24)])
        made.seek(2)
        made.update_weights([1, 1])
        take(iter(made), 3)
        return made

    asked, moved = loader(), loader()
    before = asked.state_dict()
    state = asked.state_dict(step=step)
    moved.seek(step)
    assert state == moved.state_dict()
    assert state["step"] == step
    assert asked.state_dict() == before
    resumed = DataLoader2.from_state(state, corpus.graph(size=[(0, 8), (4, 16), (10, 24)]))
    assert take(iter(resumed), 5) == take(iter(moved), 5)


def test_states_of_steps_that_do_not_exist_are_refused_as_seek_refuses_them(corpus):
    for loader, step in ((corpus.loader(), 2**62), (corpus.loader(samples=24), 4)):
        for call in (loader.seek, lambda n, loader=loader: loader.state_dict(step=n)):
            with pytest.raises(TokenpipeError, match=f"{step}|24"):
                call(step)


def test_changes_of_the_weights_of_an_inner_blend_are_in_the_state(corpus):
    def order() -> IndexedDataPipe:
        inner = corpus.source("a", file="prose").blend(corpus.source("b", file="code"), weights=[1, 3], name="inner")
        return corpus.source("prose").blend(inner, weights=[1, 1])

    loader = corpus.loader(order())
    iterator = iter(loader)
    take(iterator, 3)
    loader.update_weights({"a": 3, "b": 1})
    loader.update_weights({"prose": 1, "inner": 5})
    take(iterator, 5)
    state = loader.state_dict()
    assert sorted(entry[2] for entry in state["journal"]["weights"]) == ["", "inner"]
    resumed = DataLoader2.from_state(json.dumps(state), corpus.graph(order()))
    assert take(iter(resumed), 20) == take(iterator, 20)


# What it refuses ----------------------------------------------------------------------------------------


def others(corpus: Corpus) -> dict[str, tuple[IndexedDataPipe, list[str]]]:
    """Graphs of another order than `corpus.graph()`: what must be named."""
    prose, code = corpus.source("prose"), corpus.source("code")
    weights = [0.8, 0.2]
    np.save(corpus.folder / "order.npy", np.arange(500))
    return {
        "another seed of one": (corpus.source("prose", seed=8).blend(code, weights=weights), ["prose", "permute", "8"]),
        "another seed of all": (
            corpus.source("prose", seed=8).blend(corpus.source("code", seed=8), weights=weights),
            ["permute", "8", "7"],
        ),
        "another weight": (prose.blend(code, weights=[0.7, 0.3]), ["blend", "weights"]),
        "no weights": (prose.blend(code), ["blend", "exact"]),
        "a temperature": (prose.blend(code, weights=weights, temperature=2), ["blend", "weights"]),
        "a cap": (prose.blend(code, weights=weights, max_epochs={"code": 3}), ["blend", "caps"]),
        "another length": (
            corpus.source("prose", length=4).blend(corpus.source("code", length=4), weights=weights),
            ["sequence_length", "8", "4"],
        ),
        "units": (corpus.source("prose", unit=16).blend(code, weights=weights), ["prose", "unit", "16"]),
        "a window": (corpus.source("prose", window=16).blend(code, weights=weights), ["prose", "window", "16"]),
        "a renamed source": (corpus.source("prosa", file="prose").blend(code, weights=weights), ["'prosa'", "'prose'"]),
        "another file": (
            corpus.source("prose", file="code").blend(code, weights=weights),
            ["'prose'", "contents", str(corpus.folder)],
        ),
        "one more source": (prose.blend(code, corpus.source("more", file="prose"), weights=[8, 1, 1]), ["'more'"]),
        "one source less": (prose.blend(weights=[1]), ["'code'"]),
        "sources in another order": (code.blend(prose, weights=[0.2, 0.8]), ["blend"]),
        "a permute above": (prose.blend(code, weights=weights).permute(7), ["permute"]),
        "an order from a file": (
            prose.blend(code, weights=weights).reorder(corpus.folder / "order.npy"), ["reorder"],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("what", [
    "another seed of one", "another seed of all", "another weight", "no weights", "a temperature", "a cap",
    "another length", "units", "a window", "a renamed source", "another file", "one more source",
    "one source less", "sources in another order", "a permute above", "an order from a file",
])  # fmt: skip
def test_a_state_of_another_order_is_refused_with_what_differs(corpus, what):
    loader = corpus.loader()
    take(iter(loader), 3)
    order, says = others(corpus)[what]
    for graph, state in (
        (corpus.graph(order), loader.state_dict()),
        (corpus.graph(), DataLoader2(corpus.graph(order)).state_dict()),
    ):
        other = DataLoader2(graph)
        before = other.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            other.load_state_dict(state)
        assert isinstance(caught.value, ValueError)
        assert other.state_dict() == before
        for part in says:
            assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("place", [0, 1, 1200, 2399])
def test_a_file_of_the_same_size_with_other_contents_is_refused_by_path(corpus, place):
    state = corpus.loader().state_dict()
    path = corpus.folder / "code.bin"
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(bytes(contents))
    with pytest.raises(StateMismatchError, match="'code'") as caught:
        corpus.loader().load_state_dict(state)
    assert str(path) in str(caught.value)
    assert "prose" not in str(caught.value).replace(str(corpus.folder), "")


def test_a_large_file_with_other_contents_is_refused(corpus):
    """Beyond 64 blocks of 4 KiB a fingerprint samples; a file rewritten as a whole never passes."""
    tokens = np.random.default_rng(1).integers(0, 50_000, 400_000).astype("<u2")
    tokens.tofile(corpus.folder / "prose.bin")
    state = corpus.loader().state_dict()
    (tokens + 1).astype("<u2").tofile(corpus.folder / "prose.bin")
    with pytest.raises(StateMismatchError, match="'prose'"):
        corpus.loader().load_state_dict(state)
    tokens.tofile(corpus.folder / "prose.bin")
    corpus.loader().load_state_dict(state)


@pytest.mark.parametrize("names", [("b", "*"), ("*", "b"), ("a", "a/permute"), ("#00", "b"), ("b", ""), ("'", "b'")])
def test_no_name_of_a_source_hides_another_seed(corpus, names):
    first, second = (name or "b" * 200 for name in names)

    def graph(seed: int, other: int) -> IndexedDataPipe:
        sources = corpus.source(first, file="prose", seed=seed), corpus.source(second, file="code", seed=other)
        return corpus.graph(sources[0].blend(sources[1]))

    seeds = [(1, 1), (1, 2), (2, 1), (2, 2)]
    for saved in seeds:
        state = json.loads(json.dumps(DataLoader2(graph(*saved)).state_dict(), sort_keys=True))
        for here in seeds:
            if here == saved:
                DataLoader2(graph(*here)).load_state_dict(state)
            else:
                with pytest.raises(StateMismatchError):
                    DataLoader2(graph(*here)).load_state_dict(state)


@pytest.mark.parametrize("count", [2, 40])
def test_one_changed_seed_among_many_sources_is_refused(corpus, count):
    def graph(seed: int) -> IndexedDataPipe:
        nodes = [corpus.source(f"s{k}", file="prose", seed=seed if k == 1 else 7) for k in range(count)]
        return corpus.graph(nodes[0].blend(*nodes[1:]))

    with pytest.raises(StateMismatchError):
        DataLoader2(graph(8)).load_state_dict(DataLoader2(graph(7)).state_dict())


def test_a_state_of_a_later_version_or_another_format_is_refused_by_its_version(corpus):
    state = corpus.loader().state_dict()
    with pytest.raises(StateError, match="version 3"):
        corpus.loader().load_state_dict(state | {"version": 3})
    with pytest.raises(StateError, match="tokenpipe-state"):
        corpus.loader().load_state_dict(state | {"format": "pickle"})


# What is free to change ---------------------------------------------------------------------------------


def test_the_path_may_change(corpus, tmp_path):
    loader = corpus.loader()
    iterator = iter(loader)
    take(iterator, 5)
    state = loader.state_dict()
    shutil.copytree(corpus.folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "prose.bin").rename(tmp_path / "elsewhere" / "p-0.bin")
    moved = Corpus.__new__(Corpus)
    moved.folder = tmp_path / "elsewhere"
    order = moved.source("prose", file="p-0").blend(moved.source("code"), weights=[0.8, 0.2])
    assert take(iter(DataLoader2.from_state(state, moved.graph(order))), 5) == take(iterator, 5)


def samples_of(loaders: list[DataLoader2], batches: int) -> dict[int, tuple[int, ...]]:
    """What all ranks hold of so many batches each: {sample number: tokens}, each once."""
    found = [row for loader in loaders for batch in take(iter(loader), batches) for row in batch]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 24), (2, 4), (3, 8), (4, 2), (8, 3), (12, 1), (24, 1)])
def test_ranks_and_micro_batches_may_change(corpus, dp, micro):
    loaders = [corpus.loader(rank=rank, dp=2, micro=3, size=24) for rank in range(2)]
    samples_of(loaders, 8)
    state = loaders[0].state_dict()
    assert state["consumed_samples"] == 48
    here = [DataLoader2.from_state(state, corpus.graph(rank=rank, dp=dp, micro=micro, size=24)) for rank in range(dp)]
    assert samples_of(here, 48 // (dp * micro)) == samples_of(loaders, 8)
    assert [loader.state_dict() for loader in here] == [loaders[0].state_dict()] * dp


@pytest.mark.parametrize("size", [4, 8, 12, 16, 40, [(0, 8), (3, 16)], [(0, 4), (100, 8)]], ids=str)
@pytest.mark.parametrize("done", [0, 3, 4, 7])
def test_the_global_batch_size_may_change_and_earlier_steps_keep_their_meaning(corpus, size, done):
    whole = dict(row for batch in take(iter(corpus.loader()), 40) for row in batch)
    loader = corpus.loader()
    take(iter(loader), done)
    state = loader.state_dict()
    resumed = DataLoader2.from_state(state, corpus.graph(size=size))
    found = dict(row for batch in take(iter(resumed), 20) for row in batch)
    assert sorted(found) == list(range(4 * done, 4 * done + 80))
    assert all(whole[number] == tokens for number, tokens in found.items())
    for step in range(-(-done // 2)):
        assert [record.sample_number for record in resumed.contents(step)] == list(range(8 * step, 8 * step + 8))
    again = DataLoader2.from_state(json.dumps(resumed.state_dict()), corpus.graph(size=size))
    assert again.state_dict() == resumed.state_dict()
    assert take(iter(again), 3) == take(iter(resumed), 3)


@pytest.mark.parametrize(
    ("dp", "micro", "size"), [(1, 3, 9), (5, 1, 60), (2, 12, 24), (1, 7, 7), (3, 4, None), (1, 1, 1)]
)
def test_a_resume_on_other_batch_sizes_asks_nothing_of_the_steps_that_are_over(corpus, dp, micro, size):
    whole = dict(row for batch in take(iter(corpus.loader()), 60) for row in batch)
    loader = corpus.loader()
    take(iter(loader), 6)
    state = loader.state_dict()  # step 3 of 8 samples
    here = [DataLoader2.from_state(state, corpus.graph(rank=r, dp=dp, micro=micro, size=size)) for r in range(dp)]
    found = samples_of(here, 4)
    assert sorted(found) == list(range(24, 24 + 4 * dp * micro))
    assert all(whole[number] == tokens for number, tokens in found.items())
    assert [record.sample_number for record in here[0].contents(2)] == list(range(16, 24))
    assert here[0].contents(3)[0].sample_number == 24
    again = DataLoader2.from_state(here[0].state_dict(), corpus.graph(dp=dp, micro=micro, size=size))
    assert take(iter(again), 3) == take(iter(here[0]), 3)


def test_the_prefetch_and_a_limit_may_change(corpus):
    loader = corpus.loader()
    iterator = iter(loader)
    take(iterator, 5)
    state = loader.state_dict()
    expected = take(iterator, 4)
    with corpus.loader(prefetch_cnt=4) as ahead:
        ahead.load_state_dict(state)
        assert take(iter(ahead), 4) == expected
    limited = DataLoader2.from_state(state, corpus.graph(samples=32))
    assert take(iter(limited), 100) == expected[:3]


def test_a_state_from_inside_a_step_wants_ranks_that_divide_its_rest(corpus):
    loader = corpus.loader(micro=2, size=12)
    take(iter(loader), 7)  # 2 of 12 samples of step 1
    state = loader.state_dict()
    for micro, size in ((1, 12), (2, 12), (5, 60), (10, 10)):
        resumed = DataLoader2.from_state(state, corpus.graph(micro=micro, size=size))
        assert rows(next(iter(resumed)))[0][0] == 14
    for micro in (3, 4, 6, 12):
        other = corpus.loader(micro=micro, size=12)
        iterator = iter(other)
        first = rows(next(iterator))
        before = other.state_dict()
        with pytest.raises(BatchSizeError, match="step 1") as caught:
            other.load_state_dict(state)
        assert "14" in str(caught.value)
        assert other.state_dict() == before
        assert rows(next(iterator))[0][0] == first[-1][0] + 1
        other.load_state_dict(loader.state_dict(step=1))
        assert rows(next(iter(other)))[0][0] == 12


# Hostile states -----------------------------------------------------------------------------------------

FORBIDDEN = ("open", "exec", "compile", "import", "subprocess.", "os.", "socket.", "pickle.", "shutil.", "ctypes.")
armed: list[str] = []
watching = False


def watch(event: str, args: Any) -> None:
    if watching and event.startswith(FORBIDDEN):
        armed.append(event)
        raise RuntimeError(f"a state did this: {event} {args!r:.200}")


@pytest.fixture
def watched() -> Iterator[Any]:
    """watched(function, argument): calls it; opening, running or importing anything while it runs fails."""
    if not getattr(sys, "_tokenpipe_watch", False):
        sys.addaudithook(watch)  # hooks cannot be removed: this one sleeps unless asked
        sys._tokenpipe_watch = True  # type: ignore[attr-defined]

    def call(function: Any, argument: Any) -> Any:
        global watching
        watching = True
        try:
            return function(argument)
        finally:
            watching = False

    armed.clear()
    gc.collect()
    gc.disable()  # what other tests left behind may open files as it goes, in the middle of a call
    try:
        yield call
    finally:
        gc.enable()
    assert not armed


class Loud:
    """Fails the test where anything of it is used."""

    def shout(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("code of a state ran")

    __reduce__ = __reduce_ex__ = __len__ = __iter__ = __getitem__ = __eq__ = __hash__ = __int__ = shout
    __index__ = __str__ = __repr__ = __format__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __call__ = shout
    __contains__ = __add__ = __sub__ = __mul__ = __floordiv__ = __mod__ = __getattr__ = shout
    items = keys = values = get = startswith = encode = decode = __float__ = __radd__ = __rsub__ = shout


class LoudDict(Loud, dict):
    pass


class LoudList(Loud, list):
    pass


class LoudInt(Loud, int):
    pass


class LoudStr(Loud, str):
    __slots__ = ()


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def hostile_values() -> list[Any]:
    round_and_round: list[Any] = []
    round_and_round.append(round_and_round)
    itself: dict[str, Any] = {}
    itself["a"] = itself
    return [
        None, True, False, -1, 0, 1, 2, 3, 4, 8, 12, 16, 2**32, 2**32 - 1, 2**53, 2**62, 2**63 - 2, 2**63 - 1, 2**63,
        2**64, -(2**63), 10**400, 0.0, 1.5, 8.0, float("nan"), float("inf"), "", "0", "8", "x" * 5000, "x" * 70_000,
        "\0", "\ud800", "*", "#00", "__import__('os').system('false')", b"8", bytearray(8), [], {}, (), set(), [[]],
        [0, 8], [[0, 8]], [[0, 0]], [[0, 8], [1, 12]], [[0, 8], [0, 8]], [[0, 0, 8]], [[0, 0, 8], [1, 8, 12]],
        [[0, 0, 2**62]], [[0, 2**62], [2**62, 2**62]], [[1, 8, "", [2**31, 2**31]]], [[1, 8, "", [2**32, 0]]],
        [[1, 8, "x", [2**31, 2**31]]], [[1, 8, "", [2**32]]], [[2**60, 2**63 - 2, "", [2**31, 2**31]]],
        {"a": 1}, {"prose": "0" * 16}, {"": ""}, {1: 2}, {None: None}, {"format": "tokenpipe-state"}, nested(5),
        nested(50), nested(5000), nested(50, dict), round_and_round, itself, [0] * 30_000, ["x" * 4000] * 30,
        object(), lambda: 0, int, np.int64(8), np.float64(8), np.array([8]), np.str_("8"), range(3), iter([1]),
        Loud(), LoudDict(), LoudList(), LoudInt(8), LoudStr("8"), Path("/etc/passwd"), 8j, Ellipsis,
    ]  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*here, key)
        yield from places(item, (*here, key))


def mutated(state: Any, rng: random.Random, hostile: list[Any]) -> Any:
    """A copy with one to three things changed."""
    state = copy.deepcopy(state)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(state))
        if not found:
            return state
        *way, key = rng.choice(found)
        holder = state
        for step in way:
            holder = holder[step]
        action = rng.randrange(8)
        value = holder[key]
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(["version ", "Step", "x", "__class__", "*", "prose/", ""])] = holder.pop(key)
        elif action == 2 and isinstance(holder, dict):
            holder[rng.choice(["extra", "__reduce__", "$ref", "path", "z" * 5000])] = rng.choice(hostile)
            return state  # what is in it now may go round and round
        elif action == 3 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(rng.choice([value, *holder])))
        elif action == 4 and type(value) is int:
            holder[key] = value + rng.choice((-1, 1, 4, 8, -8, 2**31, 2**62, -value, value))
        elif action == 5 and isinstance(value, str) and value:
            at = rng.randrange(len(value))
            holder[key] = value[:at] + rng.choice("0af*{\"'é\0") + value[at + 1 :]
        else:
            holder[key] = rng.choice(hostile)
            return state
    return state


def mutated_text(text: str, rng: random.Random) -> "str | bytes":
    """JSON text with one thing changed that a dict cannot hold."""
    action = rng.randrange(12)
    at = rng.randrange(len(text))
    if action == 0:
        return text[:at]
    if action == 1:
        return text[:at] + rng.choice('0123456789{}[],:"\\eE.-+ntf \x00\ud800') + text[at + rng.choice((0, 1)) :]
    if action == 2:  # a field twice
        key = rng.choice(["step", "consumed_samples", "version", "journal", "prose", "blend"])
        return text.replace(f'"{key}":', f'"{key}": 0, "{key}":', 1)
    if action == 3:
        constant = rng.choice(["NaN", "Infinity", "-Infinity", "1e5", "8.0", "-0", "1e999", "0x8", "9" * 5000, "01"])
        return text.replace('"step": ', f'"step": {constant}, "x": ', 1)
    if action == 4:
        constant = rng.choice(["NaN", "1e1", "8.0", "-0", "9" * 5000, "-8", "true", "null"])
        start = text.index('"consumed_samples": ') + len('"consumed_samples": ')
        return text[:start] + constant + text[text.index(",", start) :]
    if action == 5:
        return rng.choice("[{") * rng.choice((10, 1000, 60_000))
    if action == 6:
        return text + rng.choice([text, "{}", " ", "\0", "//", "]"])
    if action == 7:
        return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-le"]))
    if action == 8:
        return text.encode()[:at] + rng.randbytes(3) + text.encode()[at:]
    if action == 9:
        return text + " " * rng.choice((10, 70_000, 300_000))
    if action == 10:
        return rng.randbytes(rng.choice((0, 1, 100, 70_000)))
    return rng.choice(["", "null", "1", '"x"', "[]", "{}", "true", "\ufeff" + text, "(" * 60_000, "'" * 9])


def rich_loader(corpus: Corpus) -> DataLoader2:
    """A run with two changes of weights and a breakpoint, in step 5."""
    loader = corpus.loader()
    loader.seek(2)
    loader.update_weights([1, 3])
    loader = DataLoader2.from_state(loader.state_dict(step=3), corpus.graph(size=16))
    loader.seek(4)
    loader.update_weights([2, 1])
    take(iter(loader), 5)
    return loader


def check_hostile(value: Any, graph: IndexedDataPipe, watched: Any) -> bool:
    """Our own error and nothing changed, or an exact restore. Whether it was accepted."""
    loader = DataLoader2(graph)
    iterator = iter(loader)
    first = next(iterator)["sample_numbers"].tolist()
    before = loader.state_dict()
    try:
        watched(loader.load_state_dict, value)
    except TokenpipeError as error:
        assert isinstance(error, ValueError)
        assert len(str(error)) < 20_000
        assert loader.state_dict() == before
        assert next(iterator)["sample_numbers"].tolist() == [n + 4 for n in first]
        return False
    meant = json.loads(value) if isinstance(value, (str, bytes)) else value
    state = loader.state_dict()
    assert state["consumed_samples"] == meant["consumed_samples"]
    assert state["order"] == before["order"]
    assert state["sources"] == before["sources"]
    weights = [[step, blend, list(integers)] for step, _, blend, integers in meant["journal"]["weights"]]
    assert [[step, blend, integers] for step, _, blend, integers in state["journal"]["weights"]] == weights
    again = DataLoader2.from_state(json.loads(json.dumps(state)), graph)
    assert again.state_dict() == state
    found, same = next(iter(loader), None), next(iter(again), None)
    if found is not None:
        assert found["sample_numbers"].min() == meant["consumed_samples"]
        assert same is not None
        assert rows(found) == rows(same)
    return True


def test_hostile_dicts_are_our_own_error_or_an_exact_restore(corpus, watched):
    rng = random.Random(17)
    hostile = hostile_values()
    cases = ((corpus.graph(), corpus.loader().state_dict()), (corpus.graph(size=16), rich_loader(corpus).state_dict()))
    for graph, state in cases:
        assert check_hostile(state, graph, watched)
    accepted = 0
    for k in range(2000):
        graph, state = cases[k % 2]
        accepted += check_hostile(mutated(state, rng, hostile), graph, watched)
    assert accepted < 400, "the mutations change nothing"


def test_hostile_text_is_our_own_error_or_an_exact_restore(corpus, watched):
    rng = random.Random(23)
    graph, state = corpus.graph(size=16), rich_loader(corpus).state_dict()
    text = json.dumps(state)
    assert check_hostile(text, graph, watched)
    assert check_hostile(text.encode(), graph, watched)
    for _ in range(800):
        check_hostile(mutated_text(text, rng), graph, watched)


@pytest.mark.parametrize(
    "place", [(), ("journal",), ("consumed_samples",), ("journal", "weights"), ("sources", "prose")]
)
def test_every_hostile_value_at_every_kind_of_place_is_refused(corpus, watched, place):
    graph = corpus.graph()
    for value in hostile_values():
        state: Any = copy.deepcopy(DataLoader2(graph).state_dict())
        if place:
            holder = state
            for key in place[:-1]:
                holder = holder[key]
            if type(value) in (int, list, tuple) and place[-1] in ("consumed_samples", "weights"):
                continue  # may be sound; the mutations above judge that
            holder[place[-1]] = value
        elif isinstance(value, LoudStr):
            continue  # text, whoever's class it is
        else:
            state = value
        assert not check_hostile(state, graph, watched), f"{value!r:.100}"


@pytest.mark.parametrize("field", ["format", "consumed_samples", "journal", "weights", "prose", "blend"])
def test_text_that_names_a_field_twice_is_refused(corpus, field):
    text = json.dumps(corpus.loader().state_dict())
    assert f'"{field}":' in text
    with pytest.raises(StateError, match="twice"):
        corpus.loader().load_state_dict(text.replace(f'"{field}":', f'"{field}": 0, "{field}":', 1))


def test_a_dict_with_behaviour_of_its_own_is_refused(corpus, watched):
    class Ordered(dict):
        def get(self, *_: Any) -> Any:
            raise AssertionError("code of a state ran")

    state = corpus.loader().state_dict()
    assert not check_hostile(Ordered(state), corpus.graph(), watched)
    assert not check_hostile(state | {"journal": Ordered(state["journal"])}, corpus.graph(), watched)


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_a_failed_load_leaves_the_loader_and_its_iterator_as_they_were(corpus, prefetch_cnt):
    whole = take(iter(corpus.loader()), 12)
    sound = corpus.loader().state_dict(step=40)
    inside = corpus.loader(micro=1)
    take(iter(inside), 3)
    failing = [
        None, {}, "", "{", sound | {"version": 3}, sound | {"consumed_samples": 7}, sound | {"extra": 1},
        sound | {"sources": {}}, sound | {"journal": {}}, inside.state_dict(),
        DataLoader2(corpus.graph(corpus.order(weights=(1, 1)))).state_dict(),
    ]  # fmt: skip
    with corpus.loader(prefetch_cnt=prefetch_cnt) as loader:
        iterator = iter(loader)
        found = take(iterator, 1)
        for state in failing:
            before = loader.state_dict()
            with pytest.raises(StateError if state is not failing[9] else BatchSizeError):
                loader.load_state_dict(state)
            assert loader.state_dict() == before
            found.append(rows(next(iterator)))
        assert found == whole
        loader.load_state_dict(sound)
        with pytest.raises(RuntimeError, match="invalidated"):
            next(iterator)
        assert rows(next(iter(loader)))[0][0] == 320
