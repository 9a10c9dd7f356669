"""How many samples a second a loader gives, against what the memory allows and against other loaders.

What is isolated: the loader alone. Every contender makes the same batches of one rank (0 of 8) of a 0.8/0.2
blend of two shuffled uint16 files that lie in the page cache; nothing is done with a batch. A batch is two
int64 tensors, inputs and labels already shifted, b × sequence_length each. Before anything is timed, each
contender's first batches are compared with the bare gather's for the same sample numbers.

    bare gather        one compiled loop that copies precomputed windows from the mapped files into a new
                       int64 buffer, b × (sequence_length + 1): no order, no tensors, no loader. The limit.
    tokenpipe          the graph of the README in DataLoader2, in process: routing, gather, tensors, state.
    tokenpipe, thread  the same with prefetch_cnt=2.
    Nanoset            a plain equivalent: memmap opened for each sample as published, an index worked out
                       beforehand, torch's DataLoader with a batch sampler and a collator, no workers. (The
                       original gives int32 and two masks; here int64 like everyone else, at most 5 %
                       slower than int32, and no masks.)
    …, memmap kept     the same with the two maps opened once.
    StatefulDataLoader torchdata's loader over that, no workers.
    DataLoader(graph)  torch's DataLoader over tokenpipe's graph with two workers: a remark, since it moves
                       every batch through shared memory and asks for one batch at a time.

How: the contenders take turns, round after round, in an order drawn anew for each round, a few hundred batches
a turn, and a ratio is taken within its round; the medians over all rounds are printed. So other load on the
machine disturbs single rounds, not the table. Each contender is some turns ahead of the next one, so that all
read the same samples in total but nobody reads what another has just left in the processor's cache. All maps
are touched before timing: page faults would cost everyone (but Nanoset as published, which always has them) the
same and flatter the ratio. Whoever makes batches ahead is left time to fill its queue before the next turn.

Who does not gain: a training step takes milliseconds to seconds, a batch here takes microseconds; a run on
one GPU that waits 100 ms for its step will not see any of these differences. It shows where one process
feeds many models, in evaluation and statistics passes over a corpus, in resharding, and as processor time
left to the host. Storage slower than the page cache makes all contenders equal.
"""

import argparse
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

import numba
import numpy as np
import torch
from report import machine, table
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.reading_services import DataLoader2, InProcessReadingService

WEIGHTS = {"prose": 0.8, "code": 0.2}
TOPOLOGY = Topology(dp_rank=0, dp_size=8)
GLOBAL_BATCH = 256
SHAPES = ((8, 2048), (4, 8192))  # micro-batch, sequence_length
FAULT_AROUND = 64 * 1024  # bytes that Linux maps at one page fault

Batch = dict[str, torch.Tensor]


# The files and the order ------------------------------------------------------------------------------------


def write_files(folder: Path, tokens: int) -> list[Path]:
    """Two raw uint16 files, four fifths and one fifth of the tokens, from a fixed seed."""
    paths = []
    for name, share in WEIGHTS.items():
        path = folder / f"{name}.bin"
        rng = np.random.default_rng([11, len(paths)])
        with path.open("wb") as file:
            left = round(tokens * share)
            while left:
                part = min(left, 1 << 24)
                rng.integers(0, 50_000, part, dtype=np.uint16).tofile(file)
                left -= part
        paths.append(path)
    return paths


def graph_over(paths: Sequence[Path], micro_batch: int, sequence_length: int) -> IndexedDataPipe:
    """The graph of the README, with this rank's micro-batches."""
    sources = [TokenReader(path, dtype="uint16").slice_sequences(sequence_length).permute(seed=7) for path in paths]
    return (
        sources[0]
        .blend(sources[1], weights=WEIGHTS)
        .shard_ranks(TOPOLOGY, seed=7)
        .batch_samples(micro_batch, global_batch_size=GLOBAL_BATCH)
        .collate_causal_lm()
    )


@dataclass
class Index:
    """The order, worked out beforehand: what the peers and the bare gather are given."""

    sample: np.ndarray  # (rank's samples,) their sample numbers in the run
    source: np.ndarray  # (run's samples,) the file of each sample number
    window: np.ndarray  # (run's samples,) which of the file's windows


def index_of(graph: IndexedDataPipe, samples: int) -> Index:
    """The first samples of the rank, by the graph's own routes."""
    sharder = graph.datapipe.datapipe
    blend = sharder.datapipe
    sample = sharder.sample_numbers(np.arange(samples, dtype=np.int64))
    source, number = blend.route(np.arange(samples * TOPOLOGY.dp_size, dtype=np.int64))
    window = np.empty_like(number)
    for i, permuter in enumerate(blend.children):
        at = source == i
        window[at] = permuter.route(number[at])[1] % permuter.datapipe.samples_per_pass
    return Index(sample, source, window)


# The contenders ---------------------------------------------------------------------------------------------


@numba.njit(nogil=True)
def _copy_windows(first, second, source, start, out):
    width = out.shape[1]
    for row in range(out.shape[0]):
        place = start[row]
        # slice first, then copy: 2.6 times as fast as item by item
        if source[row] == 0:
            tokens = first[place : place + width]
        else:
            tokens = second[place : place + width]
        out[row] = tokens


def bare_gather(
    paths: Sequence[Path], index: Index, micro_batch: int, sequence_length: int, start: int
) -> Iterator[np.ndarray]:
    """New int64 buffers (b, s + 1)."""
    files = [np.asarray(np.memmap(path, np.uint16, "r")) for path in paths]
    source = index.source[index.sample]
    place = index.window[index.sample] * sequence_length
    for row in range(start * micro_batch, source.size - micro_batch + 1, micro_batch):
        out = np.empty((micro_batch, sequence_length + 1), np.int64)
        stop = row + micro_batch
        _copy_windows(files[0], files[1], source[row:stop], place[row:stop], out)
        yield out


class NanosetEquivalent(Dataset):
    """Windows by sample number from an index in memory; the memmap is opened for each sample, or kept."""

    def __init__(self, paths: Sequence[Path], index: Index, sequence_length: int, keep: bool) -> None:
        self.paths, self.sequence_length = [str(path) for path in paths], sequence_length
        self.source, self.window = index.source, index.window
        self.kept = [np.memmap(path, np.uint16, "r") for path in paths] if keep else None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        source = self.source[number]
        if self.kept is not None:
            tokens = self.kept[source]
        else:
            tokens = np.memmap(self.paths[source], np.uint16, "r")
        offset = int(self.window[number]) * self.sequence_length * 2
        row = np.frombuffer(tokens, np.uint16, self.sequence_length + 1, offset)
        return {"input_ids": row.astype(np.int64)}


def collate_rows(rows: list[dict[str, np.ndarray]]) -> Batch:
    tokens = np.vstack([row["input_ids"] for row in rows])  # (b, s + 1)
    return {"input_ids": torch.from_numpy(tokens[:, :-1]), "label_ids": torch.from_numpy(tokens[:, 1:])}


class RankBatches:
    """A batch sampler: the rank's sample numbers, a micro-batch at a time."""

    def __init__(self, index: Index, micro_batch: int, start: int) -> None:
        self.numbers, self.micro_batch, self.start = index.sample.tolist(), micro_batch, start

    def __iter__(self) -> Iterator[list[int]]:
        b = self.micro_batch
        for row in range(self.start * b, len(self.numbers) - b + 1, b):
            yield self.numbers[row : row + b]

    def __len__(self) -> int:
        return len(self.numbers) // self.micro_batch - self.start


@dataclass
class Contender:
    """Something that gives batches; `start` says where to begin, in batches."""

    name: str
    open: Callable[[int], Iterator[Any]]
    share: int = 1  # slow contenders make a share-th of a turn's batches
    ahead: bool = False  # whether something else makes batches in the meantime
    target_bare: "float | None" = None
    target_published: "float | None" = None
    remark: bool = False
    start: int = 0
    items: "Iterator[Any] | None" = None
    rates: list[float] = field(default_factory=list)


def contenders(
    paths: Sequence[Path], index: Index, b: int, s: int, batches: int, loaders: list[DataLoader2]
) -> list[Contender]:
    def tokenpipe(prefetch: int) -> Callable[[int], Iterator[Batch]]:
        def start_at(start: int) -> Iterator[Batch]:
            service = InProcessReadingService(prefetch_cnt=prefetch)
            loader = DataLoader2(graph_over(paths, b, s), reading_service=service)
            loaders.append(loader)
            if start:
                loader.seek(start * b * TOPOLOGY.dp_size // GLOBAL_BATCH)
            return iter(loader)

        return start_at

    def nanoset(keep: bool, loader: type = DataLoader) -> Callable[[int], Iterator[Batch]]:
        def start_at(start: int) -> Iterator[Batch]:
            dataset = NanosetEquivalent(paths, index, s, keep)
            sampler = RankBatches(index, b, start)
            return iter(loader(dataset, batch_sampler=sampler, collate_fn=collate_rows, num_workers=0))

        return start_at

    def workers(start: int) -> Iterator[Batch]:
        graph = graph_over(paths, b, s)
        graph = graph.limit(passes=batches // len(graph) + 1)
        return iter(DataLoader(graph, batch_size=None, num_workers=2))

    published = {2048: 12.0, 8192: 6.0}.get(s)
    return [
        Contender("bare gather", lambda start: bare_gather(paths, index, b, s, start)),
        Contender("tokenpipe", tokenpipe(0), target_bare=0.6, target_published=published),
        Contender("tokenpipe, thread (prefetch_cnt=2)", tokenpipe(2), share=2, ahead=True),
        Contender("Nanoset, memmap kept open", nanoset(True), share=4),
        Contender("StatefulDataLoader over that", nanoset(True, StatefulDataLoader), share=4),
        Contender("Nanoset as published", nanoset(False), share=4),
        Contender("DataLoader(graph), 2 workers", workers, share=16, ahead=True, remark=True),
    ]


# Measuring --------------------------------------------------------------------------------------------------


def check(entrants: Sequence[Contender], count: int) -> None:
    """Each contender's first batches against the bare gather's for the same sample numbers."""
    for contender in entrants[1:]:
        start = 0 if contender.remark else contender.start
        ours = contender.open(start)
        for i, rows in zip(range(count), entrants[0].open(start), strict=False):
            batch = next(ours)
            for key, expected in (("input_ids", rows[:, :-1]), ("label_ids", rows[:, 1:])):
                found = batch[key]
                if found.dtype != torch.int64 or not np.array_equal(found.numpy(), expected):
                    raise SystemExit(f"{contender.name}: batch {start + i} differs from the bare gather in {key}")


def turn(contender: Contender, batches: int) -> float:
    """Seconds for this many batches, each of them kept while the next one is made, as a training loop does."""
    items = contender.items
    assert items is not None
    began = time.perf_counter()
    for _batch in itertools.islice(items, batches):
        pass
    took = time.perf_counter() - began
    if contender.ahead:
        time.sleep(0.02)
    return took


def measure(paths: Sequence[Path], shape: tuple[int, int], tokens: int, rounds: int, batches: int) -> list[Contender]:
    b, s = shape
    touched = 5 * tokens * 2 // FAULT_AROUND  # windows after which (nearly) every map is touched
    warm = -(-touched // (b * batches)) * batches
    total = warm + batches * (rounds + 8)
    index = index_of(graph_over(paths, b, s), total * b)
    loaders: list[DataLoader2] = []
    entrants = contenders(paths, index, b, s, total, loaders)
    ahead = {"tokenpipe": 0, "bare gather": 1}  # tokenpipe from 0 on: no skip in its graph
    for place, contender in enumerate(entrants):
        contender.start = ahead.get(contender.name, place) * batches
    check(entrants, min(batches, 64))
    for contender in entrants:
        contender.items = contender.open(contender.start)
        turn(contender, batches if contender.remark or contender.name == "Nanoset as published" else warm)
    shuffle = random.Random(7).sample
    for _ in range(rounds):
        for contender in shuffle(entrants, len(entrants)):
            count = max(1, batches // contender.share)
            contender.rates.append(count * b / turn(contender, count))
    for contender in entrants:
        contender.items = None
    for loader in loaders:
        loader.shutdown()
    return entrants


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def report(entrants: Sequence[Contender]) -> str:
    bare = entrants[0]
    published = next(c for c in entrants if c.name == "Nanoset as published")
    rows = []
    for c in entrants:
        low, of_bare, high = quartiles([a / b for a, b in zip(c.rates, bare.rates, strict=True)])
        times = statistics.median([a / b for a, b in zip(c.rates, published.rates, strict=True)])
        targets = []
        if c.target_bare:
            targets.append(f"≥ {c.target_bare:.0%}: {'yes' if of_bare >= c.target_bare else 'no'}")
        if c.target_published:
            targets.append(f"≥ {c.target_published:g}×: {'yes' if times >= c.target_published else 'no'}")
        rows.append(
            [
                f"{c.name} (a remark)" if c.remark else c.name,
                f"{statistics.median(c.rates):,.0f}",
                f"{of_bare:.1%}",
                f"{low:.0%}–{high:.0%}",
                f"{times:.2f}×",
                ", ".join(targets),
            ]
        )
    head = ["", "samples/s", "of the bare gather", "quartiles", "Nanoset as published", "target"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Samples a second of tokenpipe, the bare gather and other loaders, in turns.",
        epilog="Compare within one table only: the ratios hold on a busy machine, the samples/s do not.",
    )
    parser.add_argument(
        "--tokens", type=int, default=125_000_000, help="tokens of both files together (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=81, help="turns of each contender (default: %(default)s)")
    parser.add_argument(
        "--batches", type=int, default=512, help="batches of a turn, a multiple of 32 (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a smoke test, no figures")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds, options.batches = 1_000_000, 3, 32
    if options.batches < 32 or options.batches % 32:
        parser.error(f"--batches must be a multiple of 32, got {options.batches}")
    if options.rounds < 1 or options.tokens < 100_000:
        parser.error("--rounds must be at least 1 and --tokens at least 100,000")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's, of torch
    print(f"## Throughput, one process, {options.tokens:,} tokens in the page cache, rank 0 of 8\n")
    print(machine("torch", "torchdata", "numpy", "numba"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = write_files(Path(folder), options.tokens)
        for shape in SHAPES:
            entrants = measure(paths, shape, options.tokens, options.rounds, options.batches)
            print(f"\n{shape[0]} × {shape[1]}, medians of {options.rounds} rounds of {options.batches} batches:\n")
            print(report(entrants), flush=True)


if __name__ == "__main__":
    main()
