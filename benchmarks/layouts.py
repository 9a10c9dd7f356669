"""What a rank's batch costs by its place among the ranks: time and bytes, beside Megatron's way.

What is isolated: the loader of one rank. The first table is one process that stands for one rank after the other: of
dp 8 alone, of a stage of four, of one part of each row of two (cp 2); with what a batch can say of its documents; with
the names and masks of other frameworks. In each round all take turns, in an order drawn anew, and the ratio to plain dp
is taken within it; the median is printed. Bytes are those of the tokens that a batch is made of, counted in a pass of
its own.

The second table is two gloo processes, tensor parallel peers, on this machine: Megatron's way (tp rank 0 reads the
whole batch, then broadcasts tokens, labels, loss mask and positions one by one) and ours (each reads what it needs).
Both get their rows from the same graph, and the same tensors come out, which is checked. The time is the slower peer's.

Who does not gain: a training step takes a thousand times as long as a batch of any layout, and on GPUs NCCL broadcasts
faster than gloo does here. It counts where reading is slow (a middle stage then waits for nothing), where many ranks of
a host share its disk or network, and in that no rank waits for another one's data.
"""

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from report import machine, table

from tokenpipe.datapipes import IndexedDataPipe, TokenFileWriter, TokenReader, Topology
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.reading_services import DataLoader2

DP = {"dp_size": 8}
FIRST, MIDDLE, LAST = ({**DP, "pp_rank": rank, "pp_size": 4} for rank in (0, 1, 3))
HALF = {**DP, "cp_size": 2}
LAYOUTS: "dict[str, tuple[dict[str, int], dict[str, Any]]]" = {
    "dp": (DP, {}),
    "first stage": (FIRST, {}),
    "**middle stage**": (MIDDLE, {}),
    "last stage": (LAST, {}),
    "cp 2, zigzag": (HALF, {"cp": "zigzag"}),
    "cp 2, contiguous": (HALF, {"cp": "contiguous"}),
    "cp 2, zigzag in each document": (HALF, {"cp": "document"}),
    "position_ids": (DP, {"position_ids": True}),
    "cu_seqlens": (DP, {"cu_seqlens": True}),
    "document_ids": (DP, {"document_ids": True}),
    "no loss on joins": (DP, {"no_loss_on": ["joins"]}),
    "all of these": (
        DP,
        {"position_ids": True, "cu_seqlens": True, "document_ids": True, "no_loss_on": ["joins"], "label_mask": True},
    ),
    "int32": (DP, {"dtype": "int32"}),
    "(4, b / 4, S)": (DP, {"microbatches": 4}),
    "nanotron": (DP, {"layout": "nanotron"}),
    "torchtitan": (DP, {"layout": "torchtitan"}),
    "megatron": (DP, {"layout": "megatron"}),
    "hf": (DP, {"layout": "hf"}),
}
"""name: (the rank's place, what the collator is asked for)"""


def write_files(folder: Path, tokens: int) -> None:
    """Two files of our own with documents of 20 to 20,000 tokens, of 600 in the middle."""
    for name in "ab":
        rng = np.random.default_rng([11, ord(name)])
        with TokenFileWriter(folder / f"{name}.tok", vocab_size=50_000) as writer:
            left = tokens
            while left > 0:
                length = min(left, int(np.clip(rng.lognormal(np.log(600), 1.2), 20, 20_000)))
                writer.write(rng.integers(0, 50_000, length, dtype=np.uint16))
                left -= length


def graph_over(folder: Path, shape: "tuple[int, int]", place: Any, asked: Any) -> IndexedDataPipe:
    a, b = (TokenReader(folder / f"{name}.tok", name=name).slice_sequences(shape[1]).permute(seed=7) for name in "ab")
    sharded = a.blend(b, weights=[0.8, 0.2]).shard_ranks(Topology(**place), seed=7)
    return sharded.batch_samples(shape[0]).collate_causal_lm(**asked)


def seconds(items: Iterator[Any], batches: int) -> float:
    began = time.perf_counter()
    for _ in islice(items, batches):
        pass
    return time.perf_counter() - began


def bytes_read(graph: IndexedDataPipe, batches: int) -> float:
    """Bytes of token files that a batch takes, those taken twice counted once; uint16 tokens."""
    taken, fill = 0, TokenGather._fill

    def counted(self: Any, places: Any, counts: Any, *rest: Any) -> Any:
        nonlocal taken
        there = np.flatnonzero(places >= 0)
        begins, stops = places[there], (places + counts)[there]
        begins, stops = np.sort(begins), np.sort(stops)
        before = np.concatenate([[0], stops])[: stops.size]
        taken += int(np.maximum(0, stops - np.maximum(begins, before)).sum())
        return fill(self, places, counts, *rest)

    TokenGather._fill = counted  # type: ignore[method-assign]
    try:
        with DataLoader2(graph) as loader:
            seconds(iter(loader), batches)
    finally:
        TokenGather._fill = fill  # type: ignore[method-assign]
    return taken * 2 / batches


def by_place(folder: Path, shape: "tuple[int, int]", rounds: int, batches: int) -> "list[tuple[str, ...]]":
    graphs = {name: graph_over(folder, shape, *layout) for name, layout in LAYOUTS.items()}
    with ExitStack() as open_loaders:
        running = {name: iter(open_loaders.enter_context(DataLoader2(graph))) for name, graph in graphs.items()}
        for items in running.values():
            seconds(items, batches)
        took: dict[str, list[float]] = {name: [] for name in graphs}
        order, draw = list(graphs), random.Random(0)
        for _ in range(rounds):
            draw.shuffle(order)
            for name in order:
                took[name].append(seconds(running[name], batches) / batches)
    read = {name: bytes_read(graph, 16) for name, graph in graphs.items()}
    rows = []
    for name in graphs:
        ratio = statistics.median(mine / plain for mine, plain in zip(took[name], took["dp"], strict=True))
        micro = statistics.median(took[name]) * 1e6
        rows.append(
            (name, f"{micro:.1f}", f"{ratio:.0%}", f"{read[name] / 1024:.1f}", f"{read[name] / read['dp']:.0%}")
        )
    return rows


# Two tensor parallel peers -----------------------------------------------------------------------------------


def broadcast_all(items: Iterator[Any], shape: "tuple[int, int]", first_stage: bool) -> "Iterator[dict[str, Any]]":
    """Megatron's way: rank 0 of the peers reads, the other one receives one tensor after the other."""
    kinds = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
    wanted = ["tokens", "position_ids"] if first_stage else list(kinds)
    while True:
        batch = next(items) if dist.get_rank() == 0 else {key: torch.empty(shape, dtype=kinds[key]) for key in wanted}
        mine = {key: batch[key].contiguous() for key in wanted}
        for tensor in mine.values():
            dist.broadcast(tensor, 0)
        yield mine


def run_peer(rank: int, folder: str, port: int, shape: "tuple[int, int]", rounds: int, batches: int) -> None:
    """Times both ways; rank 0 writes {way: [the slower peer's seconds, bytes that each read, bytes sent]}."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tp = {"tp_rank": rank, "tp_size": 2}
    megatron = {"layout": "megatron"}
    graphs = {
        "one stage": graph_over(Path(folder), shape, {**DP, **tp}, megatron),
        "first stage of 4": graph_over(Path(folder), shape, {**FIRST, **tp}, megatron),
        "middle stage of 4": graph_over(Path(folder), shape, {**MIDDLE, **tp}, megatron),
        "cp 2": graph_over(Path(folder), shape, {**HALF, **tp}, megatron),
    }
    whole = graphs["one stage"]
    ways: dict[str, Callable[[Any], Iterator[Any]]] = {
        "read all, broadcast": lambda new: broadcast_all(new(whole), shape, first_stage=False),
        "read all, broadcast; first stage": lambda new: broadcast_all(new(whole), shape, first_stage=True),
        **{f"tokenpipe: {name}": lambda new, graph=graph: new(graph) for name, graph in graphs.items()},  # type: ignore[misc]
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as loaders:

        def new(graph: IndexedDataPipe) -> "Iterator[Any]":
            return iter(loaders.enter_context(DataLoader2(graph)))

        running = {way: make(new) for way, make in ways.items()}
        one, other = (next(running[way]) for way in ("read all, broadcast", "tokenpipe: one stage"))
        for key in one:
            if not one[key].equal(other[key]):
                raise SystemExit(f"{key} is not the same both ways")
        order, draw = list(ways), random.Random(0)  # the same order on both peers
        for round_ in range(rounds + 1):
            draw.shuffle(order)
            for way in order:
                dist.barrier()
                mine = torch.tensor([seconds(running[way], batches) / batches])
                dist.all_reduce(mine, dist.ReduceOp.MAX)
                if round_:  # the first one warms up
                    took[way].append(float(mine))
        sent = {way: sum(tensor.nbytes for tensor in next(running[way]).values()) for way in list(ways)[:2]}
    read: list[dict[str, float]] = [{}, {}]
    dist.all_gather_object(read, {f"tokenpipe: {name}": bytes_read(graph, 16) for name, graph in graphs.items()})
    for way in sent:
        read[0][way], read[1][way] = read[0]["tokenpipe: one stage"], 0.0  # the other peer's loader is never asked
    if rank == 0:
        said = {way: [took[way], [by[way] for by in read], sent.get(way, 0)] for way in ways}
        (Path(folder) / "peers.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def peers(folder: Path, shape: "tuple[int, int]", rounds: int, batches: int) -> "list[tuple[str, ...]]":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_peer, (str(folder), port, shape, rounds, batches), nprocs=2)
    said = json.loads((folder / "peers.json").read_text())
    base = said["read all, broadcast"][0]
    return [
        (
            way,
            f"{statistics.median(took) * 1e6:.1f}",
            f"{statistics.median(mine / whole for mine, whole in zip(took, base, strict=True)):.1%}",
            ", ".join(f"{one / 1024:.0f}" for one in read),
            f"{sent / 1024:.0f}",
        )
        for way, (took, read, sent) in said.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each of the two files")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, default=256, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="a look, in seconds: the figures are none")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.rounds, arguments.batches = 200_000, 2, 8
    shapes = [(8, 2048)] if arguments.quick else [(8, 2048), (4, 8192)]
    print(machine("torch", "numpy", "numba"))
    print(f"{arguments.rounds} rounds of {arguments.batches} batches a turn")
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), arguments.tokens)
        for shape in shapes:
            rows = by_place(Path(name), shape, arguments.rounds, arguments.batches)
            print(f"\n{shape[0]} × {shape[1]}, one process\n")
            print(table(["a rank of", "µs a batch", "of dp", "KiB read a batch", "of dp"], rows))
            rows = peers(Path(name), shape, arguments.rounds, arguments.batches)
            print(f"\n{shape[0]} × {shape[1]}, two tensor parallel peers\n")
            print(table(["way", "µs a batch", "of broadcast", "KiB read by the peers", "KiB sent"], rows))


if __name__ == "__main__":
    main()
