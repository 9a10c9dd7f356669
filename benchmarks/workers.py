"""What worker processes cost and what they give: batches through two of them, against other loaders' two.

What is isolated: a batch's way from a worker to the main process. All make batches of the same blend as throughput.py
(0.8/0.2 of two shuffled uint16 files in the page cache, rank 0 of 8, 8 × 2048, two int64 tensors), and nothing is done
with a batch. The first batches of each are compared with the bare gather's; grain shuffles by itself, so its rows
are only looked up in the files.

    in process           tokenpipe's graph in DataLoader2 without workers: what making the batches costs
    tokenpipe            the same graph with MultiProcessingReadingService, its defaults
    grain                MapDataset: shuffle, mix, batch, mp_prefetch; no threads, which is its fastest here
    StatefulDataLoader   torchdata's, with fork, over three data sets: tokenpipe's graph; one whose item is a whole
                         batch that the bare gather's loop makes; a plain equivalent of Nanoset, row by row

Three tables. The rate of batches that are taken at once, from a turn's begin on with full queues behind it (some
batches are taken untimed). The rate where a map function takes 2 ms a batch, asleep or computing, with one worker and
with two. The time in next() where the batches are ready: 2 ms pass between two calls.

How: contenders take turns in an order drawn anew for each round, a ratio is taken within its round, medians over
the rounds are printed. Workers of those whose turn it is not have filled their queues and sleep.

Who does not gain: tokens from a fast disk need no workers at all: "in process" is the fastest row of the first table.
Workers are for map functions that compute or wait, and there a batch's way costs a hundredth of what they do. It
counts where batches are large and many: images or embeddings beside tokens, or many ranks on one host's cores.
"""

import argparse
import functools
import hashlib
import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import machine, table
from throughput import (
    FAULT_AROUND,
    GLOBAL_BATCH,
    TOPOLOGY,
    WEIGHTS,
    Batch,
    Index,
    NanosetEquivalent,
    RankBatches,
    _copy_windows,
    bare_gather,
    graph_over,
    index_of,
    quartiles,
    write_files,
)
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tokenpipe.datapipes import IndexedDataPipe
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

try:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # where jax is installed too, its workers ask for flags of a program that has some
except ImportError:  # its row is left out: pip install -e '.[bench]'
    grain = None

B, S = 8, 2048
WORKERS = 2
PAUSE = 2e-3  # s that a map function takes, and that passes between two calls of next()
UNTIMED = 64  # batches at a turn's begin: more than any queue holds


# The contenders ---------------------------------------------------------------------------------------------


def shared(tokens: np.ndarray) -> Batch:
    """Inputs and labels as views of one tensor, which goes through the shared memory once."""
    whole = torch.from_numpy(tokens)
    return {"input_ids": whole[:, :-1], "label_ids": whole[:, 1:]}


def collate_shared(rows: "list[dict[str, np.ndarray]]") -> Batch:
    return shared(np.vstack([row["input_ids"] for row in rows]))


class GatheredBatches(Dataset):
    """A rank's batches by number, each gathered by the loop of the bare gather."""

    def __init__(self, paths: Sequence[Path], index: Index, start: int) -> None:
        self.files = [np.asarray(np.memmap(path, np.uint16, "r")) for path in paths]
        self.source = index.source[index.sample][start * B :]
        self.place = index.window[index.sample][start * B :] * S

    def __len__(self) -> int:
        return len(self.source) // B

    def __getitem__(self, number: int) -> Batch:
        rows = slice(number * B, number * B + B)
        out = np.empty((B, S + 1), np.int64)
        _copy_windows(*self.files, self.source[rows], self.place[rows], out)
        return shared(out)


class Windows:
    """A source for grain: the windows of one file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // S

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[number * S : number * S + S + 1].astype(np.int64)

    def __getstate__(self) -> "dict[str, Any]":
        return {"path": self.path}  # not the file's contents

    def __setstate__(self, state: "dict[str, Any]") -> None:
        self.__init__(state["path"])  # type: ignore[misc]


def grain_batches(paths: Sequence[Path]) -> Iterator[Batch]:
    sources = [grain.MapDataset.source(Windows(path)).shuffle(seed=7).repeat() for path in paths]
    mixed = grain.MapDataset.mix(sources, weights=list(WEIGHTS.values()))
    batches = mixed[TOPOLOGY.dp_rank :: TOPOLOGY.dp_size].batch(B)
    made = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return map(
        shared, iter(made.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=8)))
    )


@dataclass
class Contender:
    """Something that gives batches; `start` says where to begin, in batches, `share` how many it makes in a turn."""

    name: str
    open: Callable[[int], Iterator[Any]]
    share: int = 1
    target: "float | None" = None  # how many times its rate tokenpipe's two workers shall have
    known: bool = True  # whether its order is ours
    items: "Iterator[Any] | None" = None
    rates: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class Loaders:
    """What opens the contenders, and ends their workers."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.opened: list[DataLoader2] = []

    def ours(self, workers: int, work: "Callable[[Any], Any] | None" = None) -> Callable[[int], Iterator[Batch]]:
        def start_at(start: int) -> Iterator[Batch]:
            graph: IndexedDataPipe = graph_over(self.paths, B, S)
            if work is not None:
                graph = graph.map_items(work, seeded=False)
            service = MultiProcessingReadingService(workers) if workers else InProcessReadingService()
            loader = DataLoader2(graph, reading_service=service)
            self.opened.append(loader)
            if start:
                loader.seek(start * B * TOPOLOGY.dp_size // GLOBAL_BATCH)
            return iter(loader)

        return start_at

    def contenders(self, index: Index, batches: int) -> list[Contender]:
        paths = self.paths
        limited = graph_over(paths, B, S)
        limited = limited.limit(passes=batches // len(limited) + 1)

        def stateful(make: Callable[[int], "dict[str, Any]"]) -> Callable[[int], Iterator[Batch]]:
            return lambda start: iter(StatefulDataLoader(num_workers=WORKERS, **make(start)))

        def by_graph(start: int) -> "dict[str, Any]":
            return {"dataset": limited, "batch_size": None}

        def by_rows(start: int) -> "dict[str, Any]":
            data, sampler = NanosetEquivalent(paths, index, S, keep=True), RankBatches(index, B, start)
            return {"dataset": data, "batch_sampler": sampler, "collate_fn": collate_shared}

        def by_hand(start: int) -> "dict[str, Any]":
            return {"dataset": GatheredBatches(paths, index, start), "batch_size": None}

        theirs = [Contender("grain, mp_prefetch", lambda start: grain_batches(paths), 8, target=10, known=False)]
        return [
            Contender("in process", self.ours(0)),
            Contender("**tokenpipe**", self.ours(WORKERS)),
            Contender("tokenpipe, one worker", self.ours(1)),
            *(theirs if grain else []),
            Contender("StatefulDataLoader(graph)", stateful(by_graph), 32),
            Contender("StatefulDataLoader, batches by hand", stateful(by_hand), 32, target=40),
            Contender("StatefulDataLoader, row by row", stateful(by_rows), 32, target=40),
        ]  # fmt: skip

    def close(self) -> None:
        for loader in self.opened:
            loader.shutdown()
        self.opened.clear()


def check(entrants: Sequence[Contender], paths: Sequence[Path], index: Index, count: int) -> None:
    """The first batches of each, against the bare gather's; of what has another order, that its rows are windows."""
    windows = set()
    for path in paths:
        tokens = np.memmap(path, np.uint16, "r")
        windows |= {tokens[at : at + S + 1].tobytes() for at in range(0, len(tokens) - S, S)}
    for contender in entrants:
        found = contender.open(0)
        for i, rows in zip(range(count), bare_gather(paths, index, B, S, 0), strict=False):
            batch = next(found)
            inputs, labels = batch["input_ids"].numpy(), batch["label_ids"].numpy()
            if contender.known:
                right = np.array_equal(inputs, rows[:, :-1]) and np.array_equal(labels, rows[:, 1:])
            else:
                whole = np.concatenate([inputs, labels[:, -1:]], axis=1).astype(np.uint16)
                right = all(row.tobytes() in windows for row in whole) and np.array_equal(inputs[:, 1:], labels[:, :-1])
            if not right or inputs.dtype != np.int64 or inputs.shape != (B, S):
                raise SystemExit(f"{contender.name}: batch {i} is wrong")


# Measuring --------------------------------------------------------------------------------------------------


def turn(contender: Contender, batches: int) -> float:
    """Batches a second, each kept while the next one is made; what queues held at the begin does not count."""
    assert contender.items is not None
    for _batch in itertools.islice(contender.items, UNTIMED):
        pass
    began = time.perf_counter()
    for _batch in itertools.islice(contender.items, batches):
        pass
    took = time.perf_counter() - began
    time.sleep(0.02)  # the queues fill
    return batches / took


def in_turns(entrants: Sequence[Contender], rounds: int, batches: int) -> None:
    shuffle = random.Random(7).sample
    for _ in range(rounds):
        for contender in shuffle(entrants, len(entrants)):
            contender.rates.append(turn(contender, max(1, batches // contender.share)))


def met(reached: bool) -> str:
    return "yes" if reached else "no"


def measure_rates(
    paths: Sequence[Path], tokens: int, rounds: int, batches: int
) -> "tuple[str, list[Contender], Loaders]":
    """The first table, and its contenders, still open."""
    touched = -(-5 * tokens * 2 // FAULT_AROUND // B)  # batches after which (nearly) every map is touched
    total = WORKERS * touched + (rounds + 9) * (batches + UNTIMED) + 10_000
    index = index_of(graph_over(paths, B, S), total * B)
    loaders = Loaders(paths)
    entrants = loaders.contenders(index, total)
    check(entrants, paths, index, 24)
    loaders.close()
    for place, contender in enumerate(entrants):
        contender.items = contender.open(place * batches if contender.share == 1 else 0)
        turn(contender, WORKERS * touched)
    in_turns(entrants, rounds, batches)
    alone, ours = entrants[0], entrants[1]
    rows = []
    for c in entrants:
        low, of_alone, high = quartiles([a / b for a, b in zip(c.rates, alone.rates, strict=True)])
        times = statistics.median([a / b for a, b in zip(ours.rates, c.rates, strict=True)])
        target = f"≥ {c.target:g}×: {met(times >= c.target)}" if c.target else ""
        if c is ours:
            target = f"≥ 50 % of in process: {met(of_alone >= 0.5)}"
        rate = statistics.median(c.rates) * B
        rows.append([c.name, f"{rate:,.0f}", f"{of_alone:.1%}", f"{low:.1%}–{high:.1%}", f"{times:.3g}×", target])
    head = ["two workers", "samples/s", "of in process", "quartiles", "**tokenpipe** over it", "target"]
    return table(head, rows), entrants, loaders


def asleep(batch: Batch) -> Batch:
    time.sleep(PAUSE)
    return batch


def hashed(batch: Batch, blocks: int) -> Batch:
    """Work of a fixed amount, in compiled code."""
    digest, block = hashlib.sha256(), bytes(1 << 16)
    for _ in range(blocks):
        digest.update(block)
    return batch


def blocks_in(seconds: float) -> int:
    """How much `hashed` does in so many seconds of a processor."""
    took = []
    for _ in range(201):
        began = time.perf_counter()
        hashed({}, 10)
        took.append((time.perf_counter() - began) / 10)
    return max(1, round(seconds / statistics.median(took)))


def measure_maps(paths: Sequence[Path], rounds: int, batches: int) -> str:
    rows = []
    computing = functools.partial(hashed, blocks=blocks_in(PAUSE))
    for name, work, target in (("sleeps 2 ms", asleep, 1.9), ("computes 2 ms", computing, 1.5)):
        loaders = Loaders(paths)
        entrants = [Contender(str(workers), loaders.ours(workers, work)) for workers in (0, 1, WORKERS)]
        for contender in entrants:
            contender.items = contender.open(0)
        in_turns(entrants, rounds, batches)
        loaders.close()
        alone, one, two = (contender.rates for contender in entrants)
        low, times, high = quartiles([b / a for a, b in zip(one, two, strict=True)])
        medians = [f"{statistics.median(rates):,.0f}" for rates in (alone, one, two)]
        quarts = f"{low:.2f}–{high:.2f}"
        rows.append([name, *medians, f"{times:.2f}×", quarts, f"≥ {target}×: {met(times >= target)}"])
    head = ["a map that", "batches/s: in process", "one worker", "two", "two over one", "quartiles", "target"]
    return table(head, rows)


def waits(contender: Contender, between: Callable[[], Any], calls: int) -> list[float]:
    """Seconds in each next(), with something done between two of them."""
    assert contender.items is not None
    found = []
    batch = None
    for _ in range(calls + 5):
        between()
        began = time.perf_counter()
        batch = next(contender.items)  # the batch before goes here, as in a training loop
        found.append(time.perf_counter() - began)
    del batch
    return found[5:]


def measure_waits(entrants: Sequence[Contender], rounds: int, calls: int) -> str:
    rows = []
    computing = functools.partial(hashed, {}, blocks_in(PAUSE))
    shuffle = random.Random(7).sample
    for name, between in (("asleep", functools.partial(time.sleep, PAUSE)), ("computing", computing)):
        for contender in entrants:
            contender.waits.clear()
        for _ in range(rounds):
            for contender in shuffle(entrants, len(entrants)):
                contender.waits += waits(contender, between, calls)
        for contender in entrants:
            half, most, last = (float(np.quantile(contender.waits, q)) * 1e6 for q in (0.5, 0.99, 1.0))
            target = ""
            if contender.name == "**tokenpipe**":
                target = f"< 30, < 200: {met(half < 30)}, {met(most < 200)}"
            rows.append([f"{contender.name}, {name}", f"{half:.1f}", f"{most:.0f}", f"{last:,.0f}", target])
    return table(["2 ms between two calls", "next(), µs: median", "p99", "longest", "target"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Batches through two workers: tokenpipe, grain and torchdata, in turns.",
        epilog="Compare within one table only: the ratios hold on a busy machine, the samples/s do not.",
    )
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens of both files (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4096, help="batches of a turn (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a smoke test, no figures")
    options = parser.parse_args()
    calls = 100
    if options.quick:
        options.tokens, options.rounds, options.batches, calls = 1_000_000, 3, 64, 10
    if options.rounds < 1 or options.batches < 32 or options.tokens < 100_000:
        parser.error("--rounds must be at least 1, --batches 32 and --tokens 100,000")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's, of torch
    print(f"## Two workers, {options.tokens:,} tokens in the page cache, 8 × 2048 int64\n")
    print(machine("torch", "torchdata", *(["grain"] if grain else []), "numpy", "numba"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = write_files(Path(folder), options.tokens)
        text, entrants, loaders = measure_rates(paths, options.tokens, options.rounds, options.batches)
        print(f"\nBatches taken at once, medians of {options.rounds} rounds of {options.batches} batches or a part:\n")
        print(text, flush=True)
        chosen = [entrants[at] for at in (0, 1, 3, 4)]
        text = measure_waits(chosen, max(1, options.rounds // 2), calls)
        print(f"\nBatches that are ready, {max(1, options.rounds // 2) * calls} calls each:\n")
        print(text, flush=True)
        for contender in entrants:
            contender.items = None
        loaders.close()
        text = measure_maps(paths, options.rounds, max(40, options.batches // 40))
        print(f"\nA map that takes time, medians of {options.rounds} rounds:\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
