"""The loader: what iterating, moving, changing, breaking off and shutting down do, on both kinds of graph."""

import copy
import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from processes import prefetching_threads
from tokenpipe.adapters import Adapter, ResumeSkip
from tokenpipe.datapipes import IndexedDataPipe, TokenFileWriter, TokenReader, Topology, read_tokens
from tokenpipe.datapipes.errors import (
    IteratorInvalidatedError,
    LoaderShutdownError,
    LoaderWarning,
)
from tokenpipe.reading_services import (
    DataLoader2,
    DataLoader2Iterator,
    InProcessReadingService,
    ReadingServiceInterface,
    SeedGenerator,
    WorkerInfo,
)


class Runs:
    """Graphs over two raw files of 1,000 and 800 tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, tokens in (("prose", 1000), ("code", 800)):
            ((np.arange(tokens) * 7 + tokens) % 50_000).astype("<u2").tofile(folder / f"{name}.bin")

    def source(self, name: str) -> IndexedDataPipe:
        return TokenReader(self.folder / f"{name}.bin", dtype="uint16").slice_sequences(8).permute(seed=7)

    def blend(self, weights: Any = (0.8, 0.2)) -> IndexedDataPipe:
        return self.source("prose").blend(self.source("code"), weights=weights and list(weights))

    @property
    def training(self) -> IndexedDataPipe:
        """Without an end: micro-batches of 4, two a step."""
        return self.blend().batch_samples(4, global_batch_size=8).collate_causal_lm(sample_numbers=True)

    def finite(self, samples: int = 40) -> IndexedDataPipe:
        return self.blend().limit(samples=samples).batch_samples(4).collate_causal_lm(sample_numbers=True)

    @property
    def evaluation(self) -> IndexedDataPipe:
        return self.blend(None).limit(samples=24).once().batch_samples(4).collate_causal_lm(sample_numbers=True)


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs(tmp_path)


def first(batch: Any) -> int:
    """A batch's first sample number."""
    return batch["sample_numbers"][0].item()


def firsts(items: Any, n: int = 10**9) -> list[int]:
    return [first(batch) for _, batch in zip(range(n), items, strict=False)]


def tokens(items: Any, n: int = 10**9) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for _, batch in zip(range(n), items, strict=False)]


def loader_of(graph: Any, prefetch_cnt: int = 0, **settings: Any) -> DataLoader2:
    return DataLoader2(graph, reading_service=InProcessReadingService(prefetch_cnt, **settings))


# The example --------------------------------------------------------------------------------------------


def test_the_documented_example_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(0, 50_000, 330_000)
    ids[:250_000].astype("<u2").tofile("prose.bin")
    for k, part in enumerate((ids[250_000:300_000], ids[300_000:])):
        with TokenFileWriter(f"code-{k}.tok", vocab_size=50_000) as writer:
            writer.write(part)

    prose = TokenReader("prose.bin", dtype="uint16", name="prose").slice_sequences(2048).permute(seed=7)
    code = TokenReader(["code-0.tok", "code-1.tok"], name="code").slice_sequences(2048).permute(seed=7)
    graph = (
        prose.blend(code, weights={"prose": 0.8, "code": 0.2})
        .shard_ranks(Topology(dp_rank=2, dp_size=8), seed=7)
        .batch_samples(4, global_batch_size=256)
        .collate_causal_lm()
    )
    tree = graph.tree()
    for part in ("prose", "code", "80.00%", "20.00%", "collate_causal_lm", "batch_samples", "shard_ranks", "permute"):
        assert part in tree
    with DataLoader2(graph, reading_service=InProcessReadingService()) as loader:
        for _, batch in zip(range(1000), loader, strict=False):
            assert set(batch) == {"input_ids", "label_ids"}
            assert batch["input_ids"].shape == batch["label_ids"].shape == (4, 2048)
            assert batch["input_ids"].dtype == batch["label_ids"].dtype == torch.int64
            assert torch.equal(batch["input_ids"][:, 1:], batch["label_ids"][:, :-1])
        state = loader.state_dict()
        assert (state["step"], state["consumed_samples"]) == (125, 125 * 256)
        state = loader.state_dict(step=500)
        assert (state["step"], state["consumed_samples"]) == (500, 500 * 256)
        loader.update_weights({"prose": 0.6, "code": 0.4})
        loader.seek(step=81_234)
    records = loader.contents(step=81_234)
    assert [record.sample_number for record in records] == list(range(81_234 * 256, 81_235 * 256))
    assert sum(record.source == "code" for record in records) == pytest.approx(0.4 * 256, abs=4)
    own = [record for record in records if record.rank == 2 and record.micro_batch == 0]
    batch = DataLoader2.from_state(loader.state_dict(), graph)
    rows = next(iter(batch))["input_ids"].tolist()
    whole = {"prose": ids[:250_000], "code": ids[250_000:]}
    places = {"prose.bin": 0, "code-0.tok": 0, "code-1.tok": 50_000}
    assert len(own) == 4
    for record in own:
        assert rows[record.row] == whole[record.source][record.token : record.token + 2048].tolist()
        assert record.token == places[record.file] + record.file_token
    seen = loader.when(source="prose", token=123_456, steps=range(100_000))
    assert len(seen) > 10
    for step, rank, micro_batch, row, _ in seen[::5000]:
        found = [r for r in loader.contents(step) if (r.rank, r.micro_batch, r.row) == (rank, micro_batch, row)]
        assert [(r.source, r.token < 123_456 <= r.token + 2048) for r in found] == [("prose", True)]


@pytest.mark.parametrize("kind", ["path", "list", "weights", "nanoset"])
def test_the_three_forms_of_read_tokens_run(runs, kind):
    prose, code = str(runs.folder / "prose.bin"), runs.folder / "code.bin"
    spec = {"path": prose, "list": [prose, code]}.get(kind, {prose: 3, code: 1})
    graph = read_tokens(spec, 8, 7, dtype="uint16", order="nanoset" if kind == "nanoset" else None, num_samples=60)
    loader = DataLoader2(graph.batch_samples(4).collate_causal_lm(sample_numbers=True))
    assert len(graph) == 60
    assert firsts(loader) == list(range(0, 60, 4))
    if kind == "weights":
        mine = runs.blend((3, 1)).limit(samples=60)
        assert np.array_equal(graph.fetch(range(60)), mine.fetch(range(60)))


# Iterating ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_new_iterator_invalidates_the_old_one_and_goes_on_at_the_first_undelivered_batch(runs, prefetch_cnt):
    with loader_of(runs.training, prefetch_cnt) as loader:
        old = iter(loader)
        assert isinstance(old, DataLoader2Iterator)
        assert iter(old) is old
        assert firsts(old, 3) == [0, 4, 8]
        new = iter(loader)
        with pytest.raises(RuntimeError, match="iterator has been invalidated") as caught:
            next(old)
        assert isinstance(caught.value, IteratorInvalidatedError)
        assert firsts(new, 2) == [12, 16]
        for k in range(5):
            assert firsts(loader, 1) == [20 + 4 * k]
        with pytest.raises(IteratorInvalidatedError):
            next(new)


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_finite_graph_that_is_through_begins_again(runs, prefetch_cnt):
    with loader_of(runs.finite(), prefetch_cnt) as loader:
        whole = tokens(loader)
        assert len(whole) == 10
        assert tokens(loader) == whole
        iterator = iter(loader)
        assert tokens(iterator, 4) == whole[:4]
        assert tokens(loader) == whole[4:]  # broken off: the rest
        assert tokens(loader) == whole
        iterator = iter(loader)
        assert len(tokens(iterator)) == 10
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        assert tokens(loader) == whole


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_an_evaluation_begins_anew_at_every_iterator(runs, prefetch_cnt):
    with loader_of(runs.evaluation, prefetch_cnt) as loader:
        whole = tokens(loader)
        assert len(whole) == 6
        for n in (0, 1, 3, 6):
            assert tokens(loader, n) == whole[:n]
        assert tokens(loader) == whole
        iterator = iter(loader)
        next(iterator)
        assert tokens(iter(loader)) == whole


def test_an_evaluation_is_the_same_whatever_a_training_run_beside_it_does(runs):
    expected = tokens(DataLoader2(runs.evaluation))
    evaluation, training = loader_of(runs.evaluation, 2), loader_of(runs.training, 2)
    steps = iter(training)
    seen = firsts(steps, 3)
    assert tokens(evaluation) == expected
    seen += firsts(steps, 2)
    training.update_weights([1, 1])
    for batch in evaluation:
        next(steps)
        if first(batch) == 8:
            break
    training.seek(0)
    assert tokens(evaluation) == expected
    training.shutdown()
    assert tokens(evaluation) == expected
    assert seen == [0, 4, 8, 12, 16]


def test_several_loaders_over_one_graph_do_not_know_of_each_other(runs):
    graph = runs.training
    loaders = [DataLoader2(graph), loader_of(graph, 3), DataLoader2(graph)]
    expected = tokens(DataLoader2(graph), 12)
    iterators = [iter(loader) for loader in loaders]
    found: list[list[Any]] = [[], [], []]
    order = [k for k in range(3) for _ in range(12)]
    random.Random(1).shuffle(order)
    for k in order:
        found[k] += tokens(iterators[k], 1)
    assert found == [expected] * 3
    loaders[0].update_weights([1, 9])
    loaders[1].seek(0)
    assert tokens(iterators[2], 3) == tokens(DataLoader2(graph), 15)[12:]
    assert loaders[2].state_dict() == DataLoader2(graph).state_dict() | {"consumed_samples": 60, "step": 7}
    assert graph.tree() == runs.training.tree()


@pytest.mark.parametrize("prefetch_cnt", [1, 4, 100])
def test_reading_ahead_gives_the_same_stream(runs, prefetch_cnt):
    expected = tokens(DataLoader2(runs.training), 70)
    with loader_of(runs.training, prefetch_cnt) as loader:
        assert tokens(loader, 70) == expected
    with loader_of(runs.finite(), prefetch_cnt) as loader:
        assert tokens(loader) == tokens(DataLoader2(runs.finite()))


def test_fifty_early_exits_while_reading_ahead_end_without_hanging(runs):
    rng = random.Random(1)
    for k in range(50):
        loader = loader_of(runs.training if k % 2 else runs.finite(), rng.choice((1, 4, 16)))
        assert firsts(loader, k % 7) == list(range(0, 4 * (k % 7), 4))
        if k % 3 == 0:
            loader.shutdown()
        elif k % 3 == 1:
            iter(loader)
            del loader
        else:
            loader.seek(3)
            iter(loader)
            loader.shutdown()
    gc.collect()
    assert not prefetching_threads()


def test_an_abandoned_loader_ends_its_thread(runs):
    loader = loader_of(runs.training, 4)
    iterator = iter(loader)
    next(iterator)
    assert prefetching_threads() == 1
    del loader, iterator
    gc.collect()
    assert not prefetching_threads()


# Limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_limit_stops_and_resume_allows_as_many_again(runs, prefetch_cnt):
    with loader_of(runs.training, prefetch_cnt) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        assert firsts(iterator) == [0, 4, 8]
        assert firsts(iterator) == []
        assert loader.state_dict()["consumed_samples"] == 12
        iterator.resume()
        assert firsts(iterator) == [12, 16, 20]
        iterator.limit(1)
        assert firsts(iterator) == [24]
        iterator.limit(None)
        assert firsts(iterator, 5) == [28, 32, 36, 40, 44]
        iterator.limit(0)
        assert firsts(iterator) == []


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_new_iterator_while_limited_goes_on_without_the_limit(runs, prefetch_cnt):
    with loader_of(runs.training, prefetch_cnt) as loader:
        iterator = iter(loader)
        iterator.limit(2)
        assert firsts(iterator) == [0, 4]
        new = iter(loader)
        assert firsts(new, 4) == [8, 12, 16, 20]
        with pytest.raises(IteratorInvalidatedError):
            next(iterator)
        new.limit(2)
        assert firsts(new) == [24, 28]
        new.resume()
        assert firsts(new, 1) == [32]
        assert firsts(iter(loader), 2) == [36, 40]


def test_a_limit_beyond_the_end_of_a_finite_graph_ends_with_it(runs):
    loader = DataLoader2(runs.finite())
    iterator = iter(loader)
    iterator.limit(10)
    assert len(firsts(iterator)) == 10
    iterator.resume()
    assert firsts(iterator) == []
    assert len(firsts(loader)) == 10


class Counted(InProcessReadingService):
    """Writes down the calls that it gets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def initialize(self, datapipe: Any) -> Any:
        self.calls.append("initialize")
        return super().initialize(datapipe)

    def initialize_iteration(self, *args: Any) -> Any:
        self.calls.append("initialize_iteration")
        return super().initialize_iteration(*args)

    def finalize_iteration(self) -> None:
        self.calls.append("finalize_iteration")

    def finalize(self) -> None:
        self.calls.append("finalize")


def test_a_limit_does_not_finalize_the_iteration_and_the_end_does(runs):
    service = Counted()
    loader = DataLoader2(runs.finite(), reading_service=service)
    assert service.calls == []
    iterator = iter(loader)
    iterator.limit(2)
    assert firsts(iterator) == [0, 4]
    assert service.calls == ["initialize", "initialize_iteration"]
    iterator.limit(None)
    assert len(firsts(iterator)) == 8
    assert service.calls == ["initialize", "initialize_iteration", "finalize_iteration"]
    iter(loader)
    assert service.calls.count("initialize") == 1
    assert service.calls.count("initialize_iteration") == 2
    assert service.calls[-1] == "initialize_iteration"
    loader.shutdown()
    assert service.calls[-2:] == ["finalize_iteration", "finalize"]
    calls = list(service.calls)
    loader.shutdown()
    assert service.calls == calls


# The end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["training", "stream"])
@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_a_loader_that_was_shut_down_cannot_be_iterated(runs, graph, prefetch_cnt):
    graph = runs.training if graph == "training" else IterableWrapper(range(100))
    with loader_of(graph, prefetch_cnt) as loader:
        iterator = iter(loader)
        next(iterator)
    loader.shutdown()
    loader.shutdown()
    for call in (lambda: iter(loader), lambda: next(iterator), lambda: next(iterator)):
        with pytest.raises(RuntimeError, match="shut down") as caught:
            call()
        assert isinstance(caught.value, LoaderShutdownError)
    assert not prefetching_threads()


def test_what_can_be_asked_is_answered_before_the_first_iterator_and_after_the_end(runs):
    loader = DataLoader2(runs.training)
    before = loader.contents(3), loader.when("prose", 17, range(50)), loader.state_dict(step=4)
    assert loader.state_dict()["consumed_samples"] == 0
    firsts(loader, 3)
    loader.shutdown()
    assert loader.state_dict()["consumed_samples"] == 12
    assert (loader.contents(3), loader.when("prose", 17, range(50)), loader.state_dict(step=4)) == before
    assert [record.sample_number for record in before[0]] == list(range(24, 32))
    loader.seek(9)
    assert loader.state_dict()["step"] == 9


def test_a_loader_never_iterated_is_shut_down_quietly(runs):
    service = Counted()
    with DataLoader2(runs.training, reading_service=service):
        pass
    assert service.calls[-1] == "finalize"
    assert "initialize" not in service.calls


class Stop(Exception):
    """An exception of somebody else, which cannot be pickled."""

    def __init__(self, number: int, reason: object) -> None:
        super().__init__(number)
        self.number, self.reason = number, reason


def stop_at(number: int) -> Any:
    def check(batch: Any) -> Any:
        if first(batch) == number:
            raise Stop(number, lambda: None)
        return batch

    return check


@pytest.mark.parametrize("prefetch_cnt", [0, 1, 4])
def test_an_exception_shuts_down_and_is_raised_and_the_state_stands_before_it(runs, prefetch_cnt):
    graph = runs.training.map(stop_at(20), seeded=False)
    loader = loader_of(graph, prefetch_cnt)
    iterator = iter(loader)
    assert firsts(iterator, 5) == [0, 4, 8, 12, 16]
    with pytest.raises(Stop) as caught:
        next(iterator)
    assert (type(caught.value), caught.value.number) == (Stop, 20)
    for call in (lambda: next(iterator), lambda: iter(loader)):
        with pytest.raises(LoaderShutdownError):
            call()
    assert not prefetching_threads()
    state = loader.state_dict()
    assert state["consumed_samples"] == 20
    again = DataLoader2.from_state(state, graph)
    with pytest.raises(Stop):
        next(iter(again))
    assert firsts(DataLoader2.from_state(state, runs.training), 3) == [20, 24, 28]


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_an_exception_in_a_stream_shuts_down_and_is_raised(prefetch_cnt):
    def check(k: int) -> int:
        if k == 3:
            raise Stop(k, None)
        return k

    loader = loader_of(IterableWrapper(range(9)).map(check), prefetch_cnt)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Stop):
        next(iterator)
    with pytest.raises(LoaderShutdownError):
        iter(loader)


def test_an_interrupt_loses_nothing_and_repeats_nothing(runs):
    raised = []

    def interrupt(batch: Any) -> Any:
        if first(batch) == 8 and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return batch

    loader = DataLoader2(runs.training.map(interrupt))
    iterator = iter(loader)
    assert firsts(iterator, 2) == [0, 4]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert loader.state_dict()["consumed_samples"] == 8
    try:
        assert first(next(iterator)) == 8
    except RuntimeError:  # a loader may give the iterator up, but not say that the run is through
        assert firsts(loader, 1) == [8]
    assert firsts(loader, 2) == [12, 16]


# Moving and changing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_seek_restart_and_a_loaded_state_move_the_run_and_invalidate_the_iterator(runs, prefetch_cnt):
    with loader_of(runs.training, prefetch_cnt) as loader:
        state = loader.state_dict(step=7)
        for move, at in (
            (lambda: loader.seek(5), 40),
            (lambda: loader.seek(2), 16),
            (loader.restart, 0),
            (lambda: loader.load_state_dict(state), 56),
            (lambda: loader.seek(10**9), 8 * 10**9),
        ):
            iterator = iter(loader)
            next(iterator)
            move()
            with pytest.raises(IteratorInvalidatedError, match="invalidated"):
                next(iterator)
            assert loader.state_dict()["consumed_samples"] == at
            assert firsts(loader, 3) == [at, at + 4, at + 8]
            assert firsts(loader, 1) == [at + 12]


def test_a_move_made_before_the_first_iterator_counts(runs):
    loader = DataLoader2(runs.evaluation)
    whole = tokens(loader)
    loader.seek(4)
    assert tokens(loader) == whole[4:]
    assert tokens(loader) == whole
    loader = DataLoader2(runs.finite())
    loader.seek(8)
    assert firsts(loader) == [32, 36]
    assert len(firsts(loader)) == 10


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
@pytest.mark.parametrize("delivered", [0, 1, 2, 3, 5])
def test_new_weights_keep_the_iterator_and_hold_from_the_next_step(runs, prefetch_cnt, delivered):
    with loader_of(runs.training, prefetch_cnt) as loader:
        old = tokens(DataLoader2(runs.training), 10)
        iterator = iter(loader)
        found = tokens(iterator, delivered)
        loader.update_weights({"prose": 0.2, "code": 0.8})
        step = -(-delivered // 2)
        assert loader.state_dict()["journal"]["weights"][0][:2] == [step, 8 * step]
        found += tokens(iterator, 12 - delivered)
        assert found[: 2 * step] == old[: 2 * step]
        assert found[2 * step :] != old[2 * step : 12]
        sources = [record.source for k in range(step, 200) for record in loader.contents(k)]
        assert sources.count("code") / len(sources) == pytest.approx(0.8, abs=0.01)
        resumed = DataLoader2.from_state(loader.state_dict(step=step), runs.training)
        assert tokens(resumed, 12 - 2 * step) == found[2 * step :]


def test_new_weights_without_an_iterator_hold_too(runs):
    loader = DataLoader2(runs.training)
    loader.update_weights([0, 1])
    assert {record.source for record in loader.contents(0)} == {"code"}
    iterator = iter(loader)
    assert next(iterator)["input_ids"].tolist() == runs.source("code").fetch(range(4))[:, :8].tolist()
    loader.shutdown()
    loader.update_weights([1, 0])
    assert {record.source for record in loader.contents(1)} == {"prose"}


def test_a_loader_from_a_state_is_of_the_class_that_was_asked(runs):
    class Mine(DataLoader2):
        pass

    service = InProcessReadingService(2)
    with Mine.from_state(DataLoader2(runs.training).state_dict(step=3), runs.training, service) as loader:
        assert type(loader) is Mine
        assert loader.reading_service is service
        assert firsts(loader, 2) == [24, 28]


# Seeds --------------------------------------------------------------------------------------------------


def global_generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
def test_indexed_graphs_never_touch_the_global_generators(runs, prefetch_cnt):
    before = global_generators()
    with loader_of(runs.training, prefetch_cnt) as loader:
        firsts(loader, 5)
        loader.update_weights([1, 1])
        loader.seek(3)
        firsts(loader, 5)
        with pytest.warns(LoaderWarning):
            loader.seed(3)
        firsts(loader, 5)
        loader.contents(4)
    torch.manual_seed(5)
    for value in (tokens(DataLoader2(runs.finite())), tokens(DataLoader2(runs.evaluation))):
        torch.rand(3)
        assert value in (tokens(DataLoader2(runs.finite())), tokens(DataLoader2(runs.evaluation)))
    torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
    assert global_generators() == before


def noisy(batch: Any) -> tuple[Any, ...]:
    noise = random.random(), float(np.random.rand()), float(torch.rand(())), random.getrandbits(40)
    return first(batch), *noise


def test_a_function_gets_seeds_from_the_batch_number_and_leaves_the_generators_alone(runs):
    graph = runs.training.map(noisy)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = global_generators()
    whole = [item for _, item in zip(range(12), DataLoader2(graph), strict=False)]
    assert global_generators() == before
    assert len({item[1:] for item in whole}) == 12
    assert all(len({item[k] for item in whole}) == 12 for k in range(1, 5))
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert graph.fetch([7, 3, 3]) == [whole[7], whole[3], whole[3]]
    for k in (0, 1, 5, 8):
        state = DataLoader2(graph).state_dict(step=k // 2)
        resumed = iter(DataLoader2.from_state(state, graph))
        assert [next(resumed) for _ in range(3)] == whole[k // 2 * 2 : k // 2 * 2 + 3]
    loader = DataLoader2(graph)
    iterator = iter(loader)
    for k in range(6):
        assert next(iter(DataLoader2.from_state(loader.state_dict(), graph))) == whole[k]
        assert next(iterator) == whole[k]
    loader.update_weights([1, 1])
    assert next(iterator)[1:] == whole[6][1:]


def test_an_exception_in_a_seeded_function_puts_the_generators_back(runs):
    def fail(batch: Any) -> None:
        random.random(), torch.rand(3), np.random.rand(3)
        raise Stop(0, None)

    before = global_generators()
    with pytest.raises(Stop):
        next(iter(DataLoader2(runs.training.map(fail))))
    assert global_generators() == before


def test_a_seed_beyond_64_bits_is_a_value_error_and_the_largest_is_not():
    loader = DataLoader2(IterableWrapper(range(9)).shuffle())
    for wrong in (2**64, 2**70, -1):
        with pytest.raises(ValueError, match=str(wrong)):
            loader.seed(wrong)
    loader.seed(2**64 - 1)
    assert sorted(loader) == list(range(9))


def test_a_seed_on_an_indexed_graph_warns_and_changes_nothing(runs):
    expected = tokens(DataLoader2(runs.training), 6)
    loader = DataLoader2(runs.training)
    with pytest.warns(LoaderWarning, match="indexed"):
        loader.seed(17)
    assert tokens(loader, 6) == expected


# Streams ------------------------------------------------------------------------------------------------


def double(k: int) -> int:
    return 2 * k


def shuffled() -> Any:
    return IterableWrapper(range(20)).shuffle().sharding_filter().map(double).batch(3)


@pytest.mark.parametrize("prefetch_cnt", [None, 0, 4])
def test_torchs_streams_iterate_and_take_seeds(prefetch_cnt):
    def loader(seed: int) -> DataLoader2:
        graph = shuffled()
        made = DataLoader2(graph) if prefetch_cnt is None else loader_of(graph, prefetch_cnt)
        made.seed(seed)
        return made

    with loader(5) as one, loader(5) as two, loader(6) as other:
        epochs = [list(one) for _ in range(4)]
        assert [list(two) for _ in range(4)] == epochs
        assert [list(other) for _ in range(4)] != epochs
        for epoch in epochs:
            assert sorted(k for batch in epoch for k in batch) == list(range(0, 40, 2))
        assert len({str(epoch) for epoch in epochs}) == 4
        one.seed(5)
        assert [list(one) for _ in range(4)] == epochs


def test_a_stream_without_a_seed_draws_from_torchs_generator():
    def epochs() -> list[list[Any]]:
        torch.manual_seed(3)
        loader = DataLoader2(shuffled())
        return [list(loader), list(loader)]

    assert epochs() == epochs()
    assert epochs()[0] != epochs()[1]


def test_a_seed_takes_effect_at_the_next_iterator():
    loader = DataLoader2(shuffled())
    loader.seed(5)
    expected = list(loader)
    loader.seed(5)
    iterator = iter(loader)
    found = [next(iterator)]
    loader.seed(99)
    assert [*found, *iterator] == expected
    assert list(loader) != expected


@pytest.mark.parametrize("prefetch_cnt", [0, 4])
def test_a_new_iterator_on_a_stream_is_a_new_epoch_and_invalidates_the_old_one(prefetch_cnt):
    with loader_of(IterableWrapper(range(10)), prefetch_cnt) as loader:
        old = iter(loader)
        assert [next(old) for _ in range(3)] == [0, 1, 2]
        new = iter(loader)
        with pytest.raises(RuntimeError, match="iterator has been invalidated"):
            next(old)
        assert list(new) == list(range(10))
        limited = iter(loader)
        limited.limit(4)
        assert list(limited) == [0, 1, 2, 3]
        limited.resume()
        assert list(limited) == [4, 5, 6, 7]
        assert list(iter(loader)) == list(range(10))  # a new epoch while limited is whole
        limited = iter(loader)
        limited.limit(2)
        list(limited)
        assert list(loader) == list(range(10))


def test_fifty_streams_broken_off_while_reading_ahead_end_without_hanging():
    for k in range(50):
        loader = loader_of(shuffled(), 1 + k % 5)
        for _ in zip(range(k % 8), loader, strict=False):
            pass
        iter(loader)
        loader.shutdown()
    assert not prefetching_threads()


def test_torchs_map_style_graphs_are_accepted():
    assert list(DataLoader2(SequenceWrapper([3, 1, 2]).map(double))) == [6, 2, 4]
    assert list(loader_of(SequenceWrapper([3, 1, 2]).batch(2), 2)) == [[3, 1], [2]]
    loader = DataLoader2(SequenceWrapper(list(range(30))).shuffle())
    loader.seed(3)
    epochs = [list(loader), list(loader)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30))
    assert epochs[0] != epochs[1]
    loader.seed(3)
    assert [list(loader), list(loader)] == epochs


class Counter:
    """An iterator with something to ask."""

    place = 0

    def __iter__(self) -> "Counter":
        return self

    def __next__(self) -> int:
        self.place += 1
        return self.place


class Numbers(IterDataPipe):
    def __iter__(self) -> Counter:
        return Counter()


def test_attributes_of_the_graphs_iterator_are_reached():
    iterator = iter(DataLoader2(Numbers()))
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    assert iterator.place == 3
    with pytest.raises(AttributeError):
        iterator.no_such_attribute  # noqa: B018 - reading it is the test


# Services, adapters, graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_init_fn_runs_once_and_reset_fn_at_each_iterator(runs, stream):
    calls: list[Any] = []

    def init(datapipe: Any, info: WorkerInfo) -> Any:
        calls.append(("init", info))
        return datapipe.map(double) if stream else datapipe.limit(steps=2)

    def reset(datapipe: Any, info: WorkerInfo, generator: SeedGenerator) -> Any:
        calls.append(("reset", info, generator.generate_seed()))
        return datapipe

    graph = IterableWrapper(range(3)) if stream else runs.training
    loader = loader_of(graph, init_fn=init, reset_fn=reset)
    assert calls == []
    for _ in range(3):
        assert list(loader) == [0, 2, 4] if stream else firsts(loader) == [0, 4, 8, 12]
    info = WorkerInfo(num_workers=1, worker_id=0)
    assert [call[:2] for call in calls] == [("init", info), *[("reset", info)] * 3]
    with pytest.raises(AttributeError):
        _ = graph.steps if stream else graph.no_such


def test_reset_fn_may_rewrite_the_graph_of_each_iteration(runs):
    seen = iter([1, 2])

    def reset(datapipe: Any, info: WorkerInfo, generator: SeedGenerator) -> Any:
        n = next(seen)
        return datapipe.map(lambda batch: (n, batch), seeded=False)

    loader = loader_of(runs.finite(8), reset_fn=reset)
    assert [(n, first(batch)) for n, batch in loader] == [(1, 0), (1, 4)]
    assert [(n, first(batch)) for n, batch in loader] == [(2, 0), (2, 4)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_service_whose_initialize_iteration_takes_one_argument_still_works(runs, stream):
    class Plain(ReadingServiceInterface):
        def initialize(self, datapipe: Any) -> Any:
            return datapipe

        def initialize_iteration(self, seed_generator: SeedGenerator) -> None:  # type: ignore[override]
            seeds.append(seed_generator.generate_shared_seed())

    seeds: list[int] = []
    loader = DataLoader2(IterableWrapper(range(5)) if stream else runs.training, reading_service=Plain())
    if stream:
        loader.seed(3)
        assert [list(loader), list(loader)] == [list(range(5))] * 2
        assert len(set(seeds)) == 2
    else:
        assert firsts(loader, 3) == [0, 4, 8]
        assert firsts(loader, 3) == [12, 16, 20]
        loader.update_weights([1, 1])
        assert DataLoader2.from_state(loader.state_dict(), runs.training, Plain()).state_dict() == loader.state_dict()
    assert all(0 <= seed < 2**64 for seed in seeds)


class Appended(Adapter):
    """Adds a map that appends a letter to what went before."""

    def __init__(self, letter: str, log: list[str]) -> None:
        self.letter, self.log = letter, log

    def __call__(self, datapipe: Any) -> Any:
        self.log.append(self.letter)
        return datapipe.map(self.append)

    def append(self, item: Any) -> Any:
        return [*(item if isinstance(item, list) else [item]), self.letter]


@pytest.mark.parametrize("stream", [False, True])
def test_adapters_are_applied_once_in_order_in_the_constructor(runs, stream):
    graph = IterableWrapper(["x"]) if stream else runs.finite(4)
    log: list[str] = []
    adapters = [Appended(letter, log) for letter in "abc"]
    loader = DataLoader2(graph, adapters)
    assert log == ["a", "b", "c"]
    for _ in range(3):
        assert [item[1:] for item in loader] == [["a", "b", "c"]]
    if not stream:
        loader.load_state_dict(loader.state_dict(step=0))
        assert [item[1:] for item in loader] == [["a", "b", "c"]]
    assert log == ["a", "b", "c"]
    assert [item[1:] for item in DataLoader2(graph, Appended("z", log))] == [["z"]]
    assert all(not isinstance(item, list) for item in DataLoader2(graph))


def test_a_function_serves_as_an_adapter_and_the_resume_skip_is_one(runs):
    assert firsts(DataLoader2(runs.training, lambda graph: graph.limit(steps=1))) == [0, 4]
    assert firsts(DataLoader2(runs.training, ResumeSkip(24)), 2) == [24, 28]
    assert firsts(DataLoader2(runs.training, (ResumeSkip(24), ResumeSkip(8))), 2) == [8, 12]


def test_the_callers_stream_goes_on_while_a_loader_runs_and_rewires_its_own(runs):
    def rewire(graph: Any) -> Any:
        graph.batch_size = 5
        return graph

    stream = IterableWrapper(range(10)).batch(2)
    mine = iter(stream)
    assert next(mine) == [0, 1]
    assert list(DataLoader2(stream, rewire)) == [list(range(5)), list(range(5, 10))]
    assert next(mine) == [2, 3]


def test_the_callers_graph_is_not_changed(runs):
    stream = shuffled()
    torch.manual_seed(1)
    before = list(stream)
    loader = DataLoader2(stream, lambda graph: graph.map(str))
    loader.seed(9)
    list(loader)
    torch.manual_seed(1)
    assert list(stream) == before
    graph = runs.training
    tree, fingerprint, children = graph.tree(), graph.fingerprint(), copy.copy(graph.children)
    loader = DataLoader2(graph, lambda graph: graph.limit(steps=9))
    firsts(loader, 3)
    loader.update_weights([1, 1])
    loader.seek(4)
    firsts(loader, 3)
    assert (graph.tree(), graph.fingerprint(), graph.children) == (tree, fingerprint, children)
    assert firsts(DataLoader2(graph), 2) == [0, 4]


# torch's and torchdata's loaders ------------------------------------------------------------------------


def same(batches: Any, expected: list[Any]) -> None:
    batches = list(batches)
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(torch.equal(batch[key], other[key]) for key in batch)


@pytest.mark.parametrize("context", [None, "spawn"])
def test_torchs_data_loader_gives_the_graphs_own_batches(runs, context):
    graph = runs.training
    expected = [graph[k] for k in range(len(graph))]
    assert len(expected) == 55
    graph.fetch([0])  # what was mapped here does not travel
    same(DataLoader(graph, batch_size=None, num_workers=2, multiprocessing_context=context), expected)
    if context is None:
        same(DataLoader(graph, batch_size=None), expected)
        longer = DataLoader(graph.limit(passes=3), batch_size=None, num_workers=1)
        same(longer, graph.fetch(range(166)))  # three passes are 166 batches and a rest: whole steps


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, None), (2, "spawn")])
def test_torchdatas_stateful_loader_gives_the_graphs_own_batches_and_resumes_mid_epoch(runs, workers, context):
    graph = runs.training.limit(passes=1)
    expected = graph.fetch(range(len(graph)))

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(graph, batch_size=None, num_workers=workers, multiprocessing_context=context)

    whole = loader()
    if context is None:
        same(whole, expected)
    iterator = iter(whole)
    same([next(iterator) for _ in range(17)], expected[:17])
    state = whole.state_dict()
    del iterator
    resumed = loader()
    resumed.load_state_dict(state)
    same(resumed, expected[17:])
