"""The same graph in torchdata.nodes, torchdata's StatefulDataLoader and torch's DataLoader: saved, resumed, exact."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.nodes import (
    BaseNode,
    Batcher,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    StopCriteria,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tokenpipe.adapters import ResumeSkip
from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError, LoaderShutdownError, StateMismatchError
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService
from tokenpipe.reading_services.torch_nodes import GraphNode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of a process with threads, by torch


class Graphs:
    """Graphs over two raw files of 1,000 and 800 tokens."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        for name, tokens in (("prose", 1000), ("code", 800)):
            ((np.arange(tokens) * 7 + tokens) % 50_000).astype("<u2").tofile(folder / f"{name}.bin")

    def source(self, name: str) -> IndexedDataPipe:
        return TokenReader(self.folder / f"{name}.bin", dtype="uint16").slice_sequences(8).permute(seed=7)

    def blend(self, weights: "tuple[float, float]" = (0.8, 0.2)) -> IndexedDataPipe:
        return self.source("prose").blend(self.source("code"), weights=list(weights))

    @property
    def training(self) -> IndexedDataPipe:
        """Without an end."""
        return self.blend().batch_samples(4).collate_causal_lm(sample_numbers=True)

    @property
    def finite(self) -> IndexedDataPipe:
        """Ten batches."""
        return self.blend().limit(samples=40).batch_samples(4).collate_causal_lm(sample_numbers=True)


@pytest.fixture
def graphs(tmp_path) -> Graphs:
    return Graphs(tmp_path)


def plain(batch: Any) -> Any:
    """A batch as plain lists."""
    if isinstance(batch, dict):
        return {name: value.tolist() for name, value in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, list) else batch


def items(found: Any, n: int = 10**9) -> list[Any]:
    return [plain(batch) for _, batch in zip(range(n), found, strict=False)]


def over_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def negated(batch: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {**batch, "label_ids": -batch["label_ids"]}


# torchdata.nodes ------------------------------------------------------------------------------------------

PIPELINES: "dict[str, Callable[[BaseNode[Any]], BaseNode[Any]]]" = {
    "the node alone": lambda node: node,
    "Mapper": lambda node: Mapper(node, negated),
    "Batcher": lambda node: Batcher(node, 3, drop_last=False),
    "Prefetcher": lambda node: Prefetcher(node, prefetch_factor=4),
    "ParallelMapper": lambda node: ParallelMapper(node, negated, num_workers=2, method="thread"),
    "Prefetcher that seldom saves": lambda node: Prefetcher(
        ParallelMapper(node, negated, num_workers=2, method="thread", snapshot_frequency=3), 2, snapshot_frequency=4
    ),
}


@pytest.mark.parametrize("service", [None, InProcessReadingService(2)], ids=["in process", "reading ahead"])
@pytest.mark.parametrize("kind", PIPELINES)
def test_torchdatas_nodes_resume_at_every_step(graphs, kind, service):
    def loader() -> "Loader[Any]":
        return Loader(PIPELINES[kind](GraphNode(graphs.finite, service)))

    first = loader()
    states, whole = [first.state_dict()], []
    for batch in first:
        whole.append(plain(batch))
        states.append(over_json(first.state_dict()))
    assert len(whole) == (4 if kind == "Batcher" else 10)
    if kind == "the node alone":
        assert whole == items(DataLoader2(graphs.finite))
    for done, state in enumerate(states):
        resumed = loader()
        resumed.load_state_dict(state)
        assert items(resumed) == (whole[done:] or whole), f"resumed after {done}"  # one that was through begins anew


def test_nodes_over_worker_processes_resume_and_do_not_hang(graphs):
    whole = items(DataLoader2(graphs.finite))
    node = GraphNode(graphs.finite, MultiProcessingReadingService(2))
    first = Loader(Prefetcher(node, prefetch_factor=3))
    assert items(first, 6) == whole[:6]
    resumed = Loader(Prefetcher(GraphNode(graphs.finite, MultiProcessingReadingService(1)), prefetch_factor=3))
    resumed.load_state_dict(over_json(first.state_dict()))
    assert items(resumed) == whole[6:]
    node.loader.shutdown()
    assert node.loader.reading_service.worker_pids == ()


def test_a_resumed_loader_of_nodes_saves_again_at_once_and_twice(graphs):
    def loader() -> "Loader[Any]":
        return Loader(Prefetcher(GraphNode(graphs.training), prefetch_factor=8))

    whole = items(DataLoader2(graphs.training), 20)
    first = loader()
    assert items(first, 5) == whole[:5]
    state = over_json(first.state_dict())
    for done in range(5, 15, 3):
        resumed = loader()
        resumed.load_state_dict(state)
        assert over_json(resumed.state_dict()) == state == over_json(resumed.state_dict())
        assert items(resumed, 3) == whole[done : done + 3]
        state = over_json(resumed.state_dict())


def test_the_nodes_state_is_ours_and_fits_a_loader_and_other_ranks(graphs):
    node = GraphNode(graphs.training)
    expected = items(DataLoader2(graphs.training), 12)
    assert items(node, 6) == expected[:6]
    state = node.state_dict()
    plain_loader = DataLoader2(graphs.training)
    items(plain_loader, 6)
    assert state == plain_loader.state_dict()
    assert items(DataLoader2.from_state(state, graphs.training), 6) == expected[6:]
    other = GraphNode(graphs.training)
    other.reset(plain_loader.state_dict())
    assert items(other, 6) == expected[6:]
    rows = []
    for rank in range(2):
        graph = graphs.blend().shard_ranks(Topology(rank, 2)).batch_samples(2).collate_causal_lm(sample_numbers=True)
        shard = GraphNode(graph)
        shard.reset(state)
        rows += [n for batch in items(shard, 3) for n in batch["sample_numbers"]]
    assert sorted(rows) == [*range(24, 36)]


def test_a_node_over_a_loader_goes_on_where_that_stands_and_later_passes_begin_anew(graphs):
    whole = items(DataLoader2(graphs.training), 12)
    state = DataLoader2(graphs.training).state_dict(step=5)
    node = GraphNode(DataLoader2.from_state(state, graphs.training))
    loader = Loader(node)
    assert loader.state_dict()["root"] == state
    assert items(loader, 3) == whole[5:8]
    assert items(loader, 3) == whole[:3]
    node.reset(state)
    assert items(node, 2) == whole[5:7]
    finite = Loader(GraphNode(graphs.finite))
    passes = [items(finite) for _ in range(3)]
    assert passes == [items(DataLoader2(graphs.finite))] * 3
    node = GraphNode(graphs.finite)
    assert len(items(node)) == 10
    with pytest.raises(StopIteration):
        next(node)


def test_a_stream_as_a_node_begins_a_new_epoch_with_each_pass():
    node = GraphNode(IterableWrapper(range(5)).shuffle())
    node.loader.seed(3)
    passes = []
    for _ in range(3):
        node.reset()
        passes.append(items(node))
    assert [sorted(found) for found in passes] == [[*range(5)]] * 3
    assert len({*map(tuple, passes)}) > 1


def test_sources_of_several_graphs_are_sampled_and_resumed(graphs):
    def loader() -> "Loader[Any]":
        nodes = {
            "a": GraphNode(graphs.finite),
            "b": GraphNode(graphs.blend((1, 1)).limit(samples=24).batch_samples(4).collate_causal_lm()),
        }
        sampler = MultiNodeWeightedSampler(nodes, {"a": 0.6, "b": 0.4}, StopCriteria.ALL_DATASETS_EXHAUSTED, seed=7)
        return Loader(Prefetcher(sampler, prefetch_factor=2))

    whole = items(loader())
    assert len(whole) == 16
    for done in (1, 7, 13):
        first, second = loader(), loader()
        assert items(first, done) == whole[:done]
        second.load_state_dict(first.state_dict())  # the sampler's generator is a tensor: no JSON
        assert items(second) == whole[done:]


def test_a_state_of_another_graph_is_refused_and_what_makes_no_node_too(graphs):
    node = GraphNode(graphs.training)
    with pytest.raises(StateMismatchError):
        node.reset(DataLoader2(graphs.source("prose").batch_samples(4)).state_dict())
    with pytest.raises(ArgumentTypeError):
        GraphNode([1, 2])
    with pytest.raises(ArgumentTypeError, match="has a reading service already"):
        GraphNode(DataLoader2(graphs.training), InProcessReadingService())
    node.reset()
    node.loader.shutdown()
    with pytest.raises(LoaderShutdownError):
        next(node)


# StatefulDataLoader -----------------------------------------------------------------------------------------


class Counting(IterDataPipe):
    """A stream that says where it stands; its place is its own."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> "Iterator[int]":
        while self.at < self.n:
            self.at += 1
            yield self.at * 10
        self.at = 0

    def state_dict(self) -> "dict[str, int]":
        return {"at": self.at}

    def load_state_dict(self, state: "dict[str, int]") -> None:
        self.at = state["at"]


def stream() -> Any:
    """Not shuffled: with workers torchdata saves another seed of torch's shuffle than they used."""
    return IterableWrapper(range(23)).sharding_filter().map(float)


def stateful(dataset: Any, workers: int) -> "StatefulDataLoader[Any]":
    context = "fork" if workers else None
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)


def resumes_exactly(make: "Callable[[], StatefulDataLoader[Any]]", steps: Any) -> None:
    first = make()
    whole: list[Any] = []
    states = [first.state_dict()]
    for item in first:
        whole.append(plain(item))
        states.append(first.state_dict())
    for done in steps or range(len(whole)):
        resumed = make()
        resumed.load_state_dict(states[done])
        assert items(resumed) == whole[done:], f"resumed after {done}"


@pytest.mark.parametrize(("workers", "steps"), [(0, None), (2, (1, 4, 9))])
def test_stateful_data_loader_resumes_an_indexed_graph(graphs, workers, steps):
    resumes_exactly(lambda: stateful(graphs.finite, workers), steps)
    assert items(stateful(graphs.finite, workers)) == items(DataLoader2(graphs.finite))


@pytest.mark.parametrize(("workers", "steps"), [(0, None), (2, (1, 10, 22))])
@pytest.mark.parametrize("make", [stream, lambda: Counting(23)], ids=["torch's nodes", "one with a state"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stateful_data_loader_resumes_a_stream(make, workers, steps):
    resumes_exactly(lambda: stateful(make(), workers), steps)


# DataLoader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_data_loader_goes_on_from_our_state(graphs, workers):
    def loader(graph: IndexedDataPipe) -> "DataLoader[Any]":
        context = "fork" if workers else None
        return DataLoader(graph, batch_size=None, num_workers=workers, multiprocessing_context=context)

    whole = items(DataLoader2(graphs.training), 12)
    assert items(loader(graphs.training), 12) == whole
    for step in (0, 5) if workers else range(9):
        state = over_json(DataLoader2(graphs.training).state_dict(step))
        assert items(loader(ResumeSkip(state["consumed_samples"])(graphs.training)), 3) == whole[step : step + 3]
        skipped = graphs.blend().skip(4 * step).batch_samples(4).collate_causal_lm(sample_numbers=True)
        assert items(loader(skipped), 3) == whole[step : step + 3]
    rest = loader(ResumeSkip(28)(graphs.finite))
    assert items(rest) == items(DataLoader2(graphs.finite))[7:]
