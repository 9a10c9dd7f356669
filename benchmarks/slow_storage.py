"""Stalls of an hour of training over slow storage, simulated: what reading ahead saves, by loader and by how far.

What is isolated: waiting. A read takes 50 ms, one in a hundred 2 s; a step of training takes 500 ms; an hour has 7,200
steps. All of that is scaled down by the same factor (`--scale`, 10), and the printed figures scaled up again; what a
loader itself takes for a batch is not storage's, and so appears ten times as large as it is. Reads are a map function
that sleeps, by a hash of the rows it is given, so all contenders have the same slow reads at the same steps, wherever
they run. Two tables: one read a batch, and a read for each of its eight rows, one after another, which is more than
one reader can do: 556 ms a batch on average.

A stall is a next() that takes more than 100 ms. All contenders of a table run at the same time, each in a process of
its own: they sleep nearly always, and meet the same disturbances of the machine.

    in process              tokenpipe without workers, and with a thread that reads ahead (prefetch_cnt)
    StatefulDataLoader      torchdata's over the same graph with four workers; prefetch_factor, batches a worker
    four workers, (w, m)    tokenpipe's with worker_prefetch_cnt=w, main_prefetch_cnt=m: at most 4 w + m ahead

What the start costs is not counted: ten batches are taken before the first step.

Who does not gain: whose files are in the page cache or on a local disk; and nobody gains from more batches ahead than
the longest read takes steps, here 4, or a little over it where slow reads come together.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, table

READ, SLOW, SLOW_IN, STEP, STALL = 0.05, 2.0, 100, 0.5, 0.1  # s, s, reads, s, s
HOUR = 7200  # steps
B, WORKERS, BEFORE = 8, 4, 10

CONTENDERS: "dict[str, dict[str, Any]]" = {
    "in process": {"prefetch": 0},
    "in process, prefetch_cnt=10": {"prefetch": 10},
    "StatefulDataLoader, prefetch_factor=2": {"factor": 2},
    "StatefulDataLoader, prefetch_factor=10": {"factor": 10},
    "tokenpipe, four workers, (1, 0)": {"ahead": (1, 0)},
    "tokenpipe, four workers, (2, 0)": {"ahead": (2, 0)},
    "tokenpipe, four workers, (2, 8)": {"ahead": (2, 8)},
    "**tokenpipe, four workers, (10, 10)**": {"ahead": (10, 10)},
}
QUICK = ["in process", "StatefulDataLoader, prefetch_factor=2", "**tokenpipe, four workers, (10, 10)**"]


def read_slowly(batch: "dict[str, Any]", scale: float, reads: int) -> "dict[str, Any]":
    """Sleeps for as long as the reads of these rows take."""
    rows = batch["input_ids"][:reads].contiguous().numpy()
    slow = sum(zlib.crc32(row) % SLOW_IN == 0 for row in rows)
    time.sleep((slow * SLOW + (reads - slow) * READ) / scale)
    return batch


def batches(job: "dict[str, Any]") -> "tuple[Any, Iterator[Any]]":
    """(what is to be shut down, an iterator)."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tokenpipe.datapipes import TokenReader
    from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

    way = job["way"]
    graph = TokenReader(job["path"], dtype="uint16").slice_sequences(256).permute(seed=7).batch_samples(B)
    graph = graph.collate_causal_lm()
    graph = graph.map_items(functools.partial(read_slowly, scale=job["scale"], reads=job["reads"]), seeded=False)
    if "factor" in way:
        graph = graph.limit(passes=(job["steps"] + BEFORE) // len(graph) + 1)
        loader = StatefulDataLoader(graph, batch_size=None, num_workers=WORKERS, prefetch_factor=way["factor"])
        return None, iter(loader)
    if "ahead" in way:
        most, main = way["ahead"]
        service = MultiProcessingReadingService(WORKERS, worker_prefetch_cnt=most, main_prefetch_cnt=main)
        ours = DataLoader2(graph, reading_service=service)
    else:
        ours = DataLoader2(graph, reading_service=InProcessReadingService(prefetch_cnt=way["prefetch"]))
    return ours, iter(ours)


def child() -> None:
    """Takes its steps once it is told to; prints what each next() took, in seconds of the hour."""
    job = json.loads(sys.stdin.readline())
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's, of torch
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they sleep
    loader, items = batches(job)
    for _ in range(BEFORE):
        batch = next(items)
    print("ready", flush=True)
    sys.stdin.readline()
    took = []
    for _ in range(job["steps"]):
        time.sleep(STEP / job["scale"])
        began = time.perf_counter()
        batch = next(items)
        took.append((time.perf_counter() - began) * job["scale"])
    del batch
    print(json.dumps(took), flush=True)
    if loader is not None:
        loader.shutdown()


def measure(
    contenders: "dict[str, dict[str, Any]]", path: Path, scale: float, steps: int, reads: int
) -> "dict[str, list[float]]":
    """What each next() took, for all contenders, who run at once."""
    running: dict[str, subprocess.Popen[str]] = {}
    pipe = subprocess.PIPE
    try:
        for name, way in contenders.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--child"]
            process = running[name] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            job = {"way": way, "path": str(path), "scale": scale, "steps": steps, "reads": reads}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        for process in running.values():
            process.stdout.readline()
        for process in running.values():
            process.stdin.write("\n")
            process.stdin.flush()
        return {name: json.loads(process.communicate()[0] or "[]") for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()  # does nothing to those that have ended


def report(found: "dict[str, list[float]]", steps: int, reads: int) -> str:
    rows = []
    for name, took in found.items():
        if len(took) != steps:
            raise SystemExit(f"{name} has failed")
        stalls = sum(each > STALL for each in took)
        lost = sum(took) / (steps * STEP)
        rows.append([name, f"{stalls:,}", f"{max(took):.2f}", f"{np.median(took) * 1000:.1f}", f"{lost:.1%}"])
    each = "one read a batch" if reads == 1 else f"{reads} reads a batch"
    return table([each, "stalls > 100 ms", "longest, s", "median next(), ms", "time added to the steps"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stalls in an hour of steps over storage that is slow at times.")
    parser.add_argument("--steps", type=int, default=HOUR, help="of training (default: %(default)s: an hour)")
    parser.add_argument("--scale", type=float, default=10, help="how much faster than real (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a smoke test, no figures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    chosen = CONTENDERS
    if options.quick:
        options.steps, options.scale = 20, 50
        chosen = {name: CONTENDERS[name] for name in QUICK}
    if options.steps < 1 or not options.scale >= 1:
        parser.error("--steps and --scale must be at least 1")
    what = f"a read of {READ * 1000:.0f} ms, one in {SLOW_IN} of {SLOW:.0f} s"
    print(f"## Slow storage: {what}; steps of {STEP * 1000:.0f} ms\n")
    print(machine("torch", "torchdata", "numpy", "numba"))
    print(f"\n{options.steps:,} steps, {options.scale:g} times as fast as real (figures as if it were real):\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(7).integers(0, 50_000, 20_000_000, np.uint16).tofile(path)
        for reads in (1, B):
            found = measure(chosen, path, options.scale, options.steps, reads)
            print(report(found, options.steps, reads), flush=True)
            print()


if __name__ == "__main__":
    main()
