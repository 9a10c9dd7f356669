"""What test_to_jax.py runs with virtual devices: jax_devices.py FOLDER; as one of two processes: … FOLDER PORT RANK."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tokenpipe.adapters import PinMemory, Prefetch, ToJax, lint, traverse_dps
from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, TokenIdError
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService


class Pair(NamedTuple):
    tokens: Any
    name: str


def nested(k: int) -> Any:
    return {
        "ids": torch.full((8, 2), k),
        "rest": (np.full(8, k, np.float32), [Pair(torch.ones(8) > 0, "x"), 7]),
        "no": None,
    }


def doubled(batch: Any) -> Any:
    return {**batch, "input_ids": batch["input_ids"] * 2}


def the_graph(folder: Path, place: "Topology | None" = None) -> IndexedDataPipe:
    place = place or Topology()
    windows = TokenReader(folder / "tokens.bin", dtype="uint16").slice_sequences(16).permute(seed=7)
    return windows.shard_ranks(place).batch_samples(8 // place.dp_size, 8).collate_causal_lm(sample_numbers=True)


def held(array: "jax.Array") -> "list[tuple[int, ...]]":
    """The shape that each device holds."""
    return [shard.data.shape for shard in array.addressable_shards]


def whole_batches(graph: IndexedDataPipe, rows: Any) -> None:
    """Rows over dp: every device holds a quarter, and together they hold what torch gets; also over workers."""
    with DataLoader2(graph) as loader:
        plain = list(islice(loader, 6))
        expected = loader.state_dict()
    for service in (InProcessReadingService(), InProcessReadingService(2), MultiProcessingReadingService(1, "spawn")):
        with DataLoader2(graph, [PinMemory(), ToJax(rows), Prefetch(2)], service) as loader:
            found = list(islice(loader, 6))
            state = loader.state_dict()
        for batch, same in zip(found, plain, strict=True):
            assert batch.keys() == same.keys()
            for key, tensor in same.items():
                assert isinstance(batch[key], jax.Array)
                assert batch[key].sharding == rows
                assert batch[key].dtype == np.int32
                assert np.array_equal(batch[key], tensor)
            assert held(batch["input_ids"]) == [(2, 16)] * 8
            assert held(batch["sample_numbers"]) == [(2,)] * 8
        assert state == expected


def by_key(graph: IndexedDataPipe, mesh: Any, rows: Any) -> None:
    columns = NamedSharding(mesh, PartitionSpec("dp", "tp"))
    batch = next(iter(DataLoader2(graph, ToJax({"input_ids": columns, "label_ids": rows}))))
    assert held(batch["input_ids"]) == [(2, 8)] * 8
    assert held(batch["label_ids"]) == [(2, 16)] * 8
    assert isinstance(batch["sample_numbers"], torch.Tensor)
    assert np.array_equal(np.asarray(batch["input_ids"])[:, 1:], np.asarray(batch["label_ids"])[:, :-1])


def of_any_shape(rows: Any) -> None:
    for graph in (IterableWrapper(range(3)).map(nested), SequenceWrapper([0, 1, 2]).map(nested)):
        for k, item in enumerate(DataLoader2(graph, ToJax(rows))):
            assert item["ids"].sharding == rows and int(item["ids"][7, 1]) == k
            floats, (pair, seven) = item["rest"]
            assert floats.dtype == np.float32 and held(floats) == [(1,)] * 8
            assert type(pair) is Pair and pair.tokens.dtype == np.bool_ and pair.name == "x"
            assert seven == 7 and item["no"] is None
        item = next(iter(DataLoader2(graph, ToJax({"rest": (rows, None)}))))
        assert isinstance(item["rest"][0], jax.Array)
        assert isinstance(item["rest"][1][0].tokens, torch.Tensor)
    assert ToJax(rows)(SequenceWrapper([0, 1]).map(nested))[1]["ids"].sharding == rows


def refused(graph: IndexedDataPipe, mesh: Any, rows: Any) -> None:
    def first(sharding: Any, graph: Any = graph) -> Any:
        return next(iter(DataLoader2(graph, ToJax(sharding))))

    long = IterableWrapper([{"tokens": torch.full((8,), 2**31)}])
    with pytest.raises(
        TokenIdError, match=r"'tokens' has values of 2147483648 … 2147483648, and JAX takes int64 as int32"
    ):
        first(rows, long)
    just = IterableWrapper([{"tokens": torch.tensor([-(2**31), 2**31 - 1] * 4)}])
    assert first(rows, just)["tokens"].tolist() == [-(2**31), 2**31 - 1] * 4
    with pytest.raises(
        ConfigurationError, match=r"'input_ids' of shape \(8, 16\) cannot be split so: .* of rank at least 3"
    ):
        first(NamedSharding(mesh, PartitionSpec("dp", None, "tp")))
    with pytest.raises(ConfigurationError, match=r"'ids' of shape \(6, 2\) cannot be split so: .*evenly divide"):
        first(rows, IterableWrapper([{"ids": torch.ones(6, 2)}]))
    with pytest.raises(
        ConfigurationError, match="the sharding has the key 'inputs', and an item only input_ids, label"
    ):
        first({"inputs": rows})
    with pytest.raises(ConfigurationError, match="is a tuple of 2, and what it is for dict"):
        first((rows, rows))
    with pytest.raises(ConfigurationError, match="the sharding of 'input_ids' is a dict, and what it is for is Tensor"):
        first({"input_ids": {"a": rows}})
    with pytest.raises(ArgumentTypeError, match=r"takes a jax\.sharding\.Sharding, .* got 'dp'"):
        ToJax({"input_ids": "dp"})


def below_another_node(graph: IndexedDataPipe, rows: Any) -> None:
    """A worker has no such devices: there it is refused, and in process it works."""
    above = ToJax(rows)(graph).map(doubled, seeded=False)
    assert next(iter(DataLoader2(above)))["input_ids"].sharding == rows
    assert [finding.rule for finding in lint(above) if "jax" in finding.message] == ["pin-in-worker"]
    assert not [finding for finding in lint(ToJax(rows)(graph)) if "jax" in finding.message]
    with (
        DataLoader2(above, reading_service=MultiProcessingReadingService(1, "fork")) as loader,
        pytest.raises(GraphError, match="ToJax runs in the process in which it was made"),
    ):
        next(iter(loader))


def with_x64(rows: Any) -> None:
    jax.config.update("jax_enable_x64", True)
    long = IterableWrapper([{"tokens": torch.full((8,), 2**40)}])
    found = next(iter(DataLoader2(long, ToJax(rows))))["tokens"]
    assert found.dtype == np.int64
    assert found.tolist() == [2**40] * 8


def one_of_two(folder: Path, port: str, rank: str) -> None:
    """Four devices of eight: they hold this process's own rows, and the arrays are those of the whole step."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(rank))
    rows = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp")), PartitionSpec("dp"))
    mine = Topology(dp_rank=jax.process_index(), dp_size=jax.process_count())
    for batch, whole in zip(
        DataLoader2(the_graph(folder, mine), ToJax(rows)), islice(the_graph(folder), 3), strict=False
    ):
        expected = dict(zip(whole["sample_numbers"].tolist(), whole["input_ids"].numpy(), strict=True))
        assert batch["input_ids"].shape == (8, 16)
        assert held(batch["input_ids"]) == [(2, 16)] * 4
        parts = [[part.data for part in batch[key].addressable_shards] for key in ("sample_numbers", "input_ids")]
        for numbers, ids in zip(*parts, strict=True):
            for number, row in zip(np.asarray(numbers).tolist(), np.asarray(ids), strict=True):
                assert number % 2 == mine.dp_rank
                assert np.array_equal(row, expected[number])
    print(f"{len(jax.local_devices())} of {len(jax.devices())} devices")


def main() -> None:
    if sys.argv[2:]:
        one_of_two(Path(sys.argv[1]), *sys.argv[2:])
        return
    graph = the_graph(Path(sys.argv[1]))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))
    rows = NamedSharding(mesh, PartitionSpec("dp"))
    traverse_dps(ToJax(rows)(graph))  # torch looks through a graph by pickling it
    whole_batches(graph, rows)
    by_key(graph, mesh, rows)
    of_any_shape(NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp")))
    refused(graph, mesh, rows)
    below_another_node(graph, rows)
    with_x64(rows)
    print(f"all {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
