"""What an adapter costs that changes nothing: the same graph with it and without, in turns.

What is isolated: the adapter. Both loaders run in this process, over the README's blend of two files in the page cache;
in each round both give as many batches, whichever begins, and the table has the median of the rounds' ratios. The
batches must be the same. Profile runs in turns of its own (a stretch through its clocks, a longer one without), so its
figure is that of all rounds together, beside their median.

Also what Placement gains: a map that sleeps 4 ms a batch, in eight threads.

Who does not gain: an adapter is for finding out, and for pipelines that fail; a training step takes a thousand times as
long as a batch.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, table

from tokenpipe.adapters import (
    PinMemory,
    Placement,
    Prefetch,
    Profile,
    Retry,
    SkipErrors,
    Tap,
    Threads,
    Timeout,
    ToDevice,
)
from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.reading_services import DataLoader2

TARGET = 0.05  # that Profile may cost


def graph_over(folder: Path, rows: int, length: int) -> IndexedDataPipe:
    a, b = (TokenReader(folder / f"{name}.npy").slice_sequences(length).permute(seed=7) for name in "ab")
    blend = a.blend(b, weights=[0.8, 0.2])
    return blend.shard_ranks(Topology(0, 8), seed=7).batch_samples(rows).collate_causal_lm()


def seconds(items: Any, batches: int) -> float:
    began = time.perf_counter()
    for _ in islice(items, batches):
        pass
    return time.perf_counter() - began


def ratios(graph: IndexedDataPipe, adapter: Any, rounds: int, batches: int) -> "tuple[float, float, float]":
    """(median of the rounds' ratios, ratio of all rounds together, µs a batch without)."""
    with DataLoader2(graph) as plain, DataLoader2(graph, adapter) as adapted:
        without, beside = iter(plain), iter(adapted)
        for _ in range(16):
            if not next(without)["input_ids"].equal(next(beside)["input_ids"].cpu()):
                raise SystemExit(f"{type(adapter).__name__} has changed the batches")
        found = []
        for number in range(rounds):
            first, then = (without, beside) if number % 2 else (beside, without)
            pair = {id(first): seconds(first, batches), id(then): seconds(then, batches)}
            found.append((pair[id(beside)], pair[id(without)]))
    together = sum(b for b, _ in found) / sum(a for _, a in found)
    each = statistics.median(a for _, a in found) / batches
    return statistics.median(b / a for b, a in found), together, each * 1e6


def asleep(batch: Any) -> Any:
    time.sleep(0.004)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of each of the two files")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, default=1024, help="of a round")
    parser.add_argument("--quick", action="store_true", help="a look, in seconds: the figures are none")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.rounds, arguments.batches = 100_000, 2, 16
    adapters: dict[str, Callable[[], Any]] = {
        "none": list,
        "**Profile**": Profile,
        "SkipErrors": lambda: SkipErrors(10),
        "Retry": Retry,
        "Tap": lambda: Tap(len),
        "ToDevice, PinMemory (no CUDA)": lambda: [PinMemory(), ToDevice("cpu")],
        "Prefetch": lambda: Prefetch(2),
        "Timeout": lambda: Timeout(60),
    }
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(0)
        for file in "ab":
            np.save(folder / f"{file}.npy", rng.integers(0, 50_000, arguments.tokens, dtype=np.uint16))
        graph = graph_over(folder, 8, 2048)
        rows = []
        for label, make in adapters.items():
            median, together, micro = ratios(graph, make(), arguments.rounds, arguments.batches)
            rows.append((label, f"{micro:.1f}", f"{median - 1:+.1%}", f"{together - 1:+.1%}"))
        slow = graph.map(asleep, seeded=False)
        count = max(8, min(200, arguments.batches))
        with DataLoader2(slow) as one, DataLoader2(slow, Placement({"map": Threads(8)})) as eight:
            alone, placed = seconds(one, count), seconds(eight, count)
    print(machine("torch", "numpy", "numba"))
    print(f"8 × 2048, {arguments.rounds} rounds of {arguments.batches} batches; Profile's target: < {TARGET:.0%}\n")
    print(table(["adapter", "µs a batch without", "costs (median round)", "costs (all rounds)"], rows))
    print()
    print(table(["a map that sleeps 4 ms", "batches/s"], [("alone", f"{count / alone:,.0f}"),
          ("Placement, 8 threads", f"{count / placed:,.0f} ({alone / placed:.1f} ×)")]))  # fmt: skip


if __name__ == "__main__":
    main()
