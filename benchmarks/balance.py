"""How even is the ranks' work in a step, dealt by stride and by `balance_ranks`, and what does the dealing cost?

What is isolated: who takes which row. Work is what attention costs, Σ over a row's documents of (tokens)², and nothing
else: no token is read and no model runs. One file of documents whose lengths are log-normal as those of web text
(median 500 tokens, mean 1,150, the longest beyond 100,000), cut into rows and shuffled.

    greatest/least    the rank with the most work of a step by the one with the least: the median over the steps
    greatest/mean     the same by the mean of all ranks: by so much the step is longer than it need be, where attention
                      is all of the work; 1 is the best that any dealing can do
    a step, ms        what a rank computes for a step: the costs of all its rows, and the deal; one process, one core

With one row a micro-batch the ranks can only be evened out over a step's micro-batches: with few of them (64 × 1, 256
has four) one long document is still felt.

Who does not gain: a model whose attention is not masked at documents (its cost is the same for all rows), short rows
(below some 4,096 tokens the linear layers are most of the work, which is even by itself). A run whose ranks wait for
one another at every micro-batch (sharded parameters) gains by what one micro-batch of all ranks holds: it gives that
number of rows as global_batch_size; 64 × 4, 256 is such a case, 64 × 1, 64 would be as a stride.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from report import machine, table

from tokenpipe.datapipes import IndexedDataPipe, TokenFileWriter, TokenReader, Topology
from tokenpipe.datapipes.fetch.routes import plan_of
from tokenpipe.datapipes.row_documents import RowDocuments

SHAPES = [
    (8, 1, 256),
    (8, 4, 256),
    (64, 1, 256),
    (64, 4, 256),
    (8, 1, 1024),
    (8, 4, 1024),
    (64, 1, 1024),
    (64, 4, 1024),
]
"""Data-parallel ranks, micro-batch, global batch."""


def write_documents(path: Path, tokens: int) -> None:
    """A token file of so many zeros, in documents of lengths from a fixed seed."""
    chance = np.random.default_rng(11)
    with TokenFileWriter(path, dtype="uint16") as writer:
        while tokens > 0:
            length = min(tokens, max(1, int(chance.lognormal(6.2, 1.3))))
            writer.write(np.zeros(length, np.uint16))
            tokens -= length


def measure(order: IndexedDataPipe, dp: int, rows: int, size: int, steps: int) -> "list[list[str]]":
    samples = np.arange(steps * size, dtype=np.int64)
    plan = plan_of(order)
    assert plan.gather is not None
    costs = RowDocuments(plan.gather).cost(plan.starts(samples)[1], plan.width)
    shown = []
    for kind in ("shard_ranks", "**balance_ranks**"):
        topology = Topology(dp - 1, dp)
        node = order.shard_ranks(topology) if kind == "shard_ranks" else order.balance_ranks(topology, rows, size)
        node.route(samples[:rows])  # what is loaded once
        began = time.perf_counter()
        node.route(samples[: samples.size // dp])
        took = (time.perf_counter() - began) / steps * 1e3
        rank, _ = node.dealt(samples, 0)
        sums = np.bincount(samples // size * dp + rank, costs, steps * dp).reshape(steps, dp)
        least = statistics.median((sums.max(1) / sums.min(1)).tolist())
        mean = statistics.median((sums.max(1) / sums.mean(1)).tolist())
        shown.append([f"{dp} × {rows}, {size:,}, {kind}", f"{least:.3f}", f"{mean:.3f}", f"{took:.3f}"])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Evenness of the ranks' work in a step, and what it costs.")
    parser.add_argument("--tokens", type=int, default=400_000_000, help="of the file (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of each shape (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="sequence_length (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a small file, few steps: a smoke test")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.steps = 3_000_000, 3
    if options.tokens <= options.length or options.steps < 1:
        parser.error("--tokens must be more than --length, --steps at least 1")
    print(f"## Ranks' work in a step, rows of {options.length:,} tokens (ranks × micro-batch, global batch)\n")
    print(machine("torch", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_documents(Path(folder) / "web.tok", options.tokens)
        order = TokenReader(Path(folder) / "web.tok").slice_sequences(options.length).permute(seed=7)
        rows = [row for shape in SHAPES for row in measure(order, *shape, options.steps)]
    print(table(["", "greatest/least", "greatest/mean", "a step, ms"], rows))


if __name__ == "__main__":
    main()
