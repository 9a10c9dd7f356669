"""What workers weigh and how long they take to start: one loader, and those of eight ranks on one host.

What is isolated: the processes themselves. Each rank imports torch and tokenpipe, waits at a gate, builds the graph (a
shuffled blend of two files of a few megabytes) and its loader, takes its first batch, which is timed from the gate on,
and 200 more. While it holds the last one, and the workers have theirs ready, the memory of its whole tree of processes
is read: PSS, in which a page that n processes share counts as an n-th of it in each (/proc/PID/smaps_rollup; Linux).

    in process           no workers
    fork, spawn, forkserver   tokenpipe's workers, by start method; the fork server is a process of its own, which
                         has imported everything once, so its workers share that
    StatefulDataLoader   torchdata's over the same graph, by fork as is its default, and by spawn

What a worker adds is what four of them have more than two, halved: the fork server is in neither. All ranks must
deliver the first batch that the loader in process has.

Who does not gain: one rank with two workers on a host of 500 GB. It counts where eight or more ranks of one host each
have several, in containers with a limit, and wherever a run is restarted often.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from report import machine, table

RANKS, WORKERS = 8, 2
TARGET = 40.0  # MB that a worker may add under the fork server
IN_PROCESS, STATEFUL, STATEFUL_SPAWN = "in process", "StatefulDataLoader, fork", "StatefulDataLoader, spawn"
METHODS = ["forkserver", "fork", "spawn"]

RANK = """
import hashlib, itertools, sys, time
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from tokenpipe.datapipes import TokenReader, Topology
from tokenpipe.datapipes.kernels import load_kernels
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

way, rank, size, workers, batches, *paths = sys.argv[1:]
load_kernels()
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
a, b = [TokenReader(path, dtype="uint16").slice_sequences(2048).permute(seed=7) for path in paths]
graph = a.blend(b, weights=[0.8, 0.2]).shard_ranks(Topology(int(rank), int(size)), seed=7)
graph = graph.batch_samples(8).collate_causal_lm()
if way.startswith("Stateful"):
    graph = graph.limit(passes=1000)
    method = way.rpartition(" ")[2]
    loader = StatefulDataLoader(graph, batch_size=None, num_workers=int(workers), multiprocessing_context=method)
else:
    inside = way == "in process"
    loader = DataLoader2(
        graph,
        reading_service=InProcessReadingService() if inside else MultiProcessingReadingService(int(workers), way),
    )
items = iter(loader)
batch = next(items)
took = time.perf_counter() - began
digest = hashlib.blake2b(batch["input_ids"].contiguous().numpy(), digest_size=8).hexdigest()
for batch in itertools.islice(items, int(batches)):
    pass
time.sleep(0.2)  # the queues fill
print(took, digest, flush=True)
sys.stdin.readline()
del items, batch
if not way.startswith("Stateful"):
    loader.shutdown()
"""


@dataclass
class Found:
    """What one start of ranks has shown: seconds to the first batch of each, MB and processes of all."""

    seconds: list[float]
    digests: list[str]
    memory: float
    processes: int


def pss(process: psutil.Process) -> float:
    """MB; 0 for a process that has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def start(way: str, ranks: int, workers: int, batches: int, paths: "list[str]") -> Found:
    """Starts ranks at once; all of them stand still while their memory is read."""
    # -P: the folder of this file must not stand on the path of what is measured
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    pipe, running = subprocess.PIPE, []
    for rank in range(ranks):
        command = [sys.executable, *safe, "-W", "ignore", "-c", RANK]
        command += [way, str(rank), str(ranks), str(workers), str(batches), *paths]
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ)))

    def told(process: "subprocess.Popen[str]") -> str:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a process failed ({way}):\n{process.communicate()[1]}")
        return line

    def go(process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        for process in running:
            told(process)
        for process in running:
            go(process)
        lines = [told(process).split() for process in running]
        trees = []
        for process in running:
            whole = psutil.Process(process.pid)
            trees += [whole, *whole.children(recursive=True)]
        memory = sum(pss(process) for process in trees)
        for process in running:
            go(process)
        for process in running:
            process.communicate(timeout=120)
    finally:
        for process in running:
            process.kill()  # does nothing to those that have ended
    return Found([float(line[0]) for line in lines], [line[1] for line in lines], memory, len(trees))


def one_loader(ways: "list[str]", paths: "list[str]", rounds: int, batches: int) -> str:
    rows = []
    for way in ways:
        counts = [0] if way == IN_PROCESS else [1, 2, 4] if rounds > 1 else [2, 4]
        found = {count: [start(way, 1, count, batches, paths) for _ in range(rounds)] for count in counts}
        seconds = {n: statistics.median(f.seconds[0] for f in each) for n, each in found.items()}
        memory = {n: statistics.median(f.memory for f in each) for n, each in found.items()}
        cells = [f"{seconds[n]:.2f}" if n in seconds else "" for n in (0, 1, 2, 4)]
        cells += [f"{memory[n]:,.0f}" if n in memory else "" for n in (0, 1, 2, 4)]
        added, target = "", ""
        if 4 in memory:
            more = (memory[4] - memory[2]) / 2
            added = f"{more:.1f}"
            target = f"< {TARGET:.0f}: {'yes' if more < TARGET else 'no'}" if way == "forkserver" else ""
        rows.append([way, *cells, added, target])
    seconds_head = ["first batch, s: no workers", "1", "2", "4"]
    return table(["one loader", *seconds_head, "PSS, MB: no workers", "1", "2", "4", "a worker adds", "target"], rows)


def host(ways: "list[str]", ranks: int, workers: int, paths: "list[str]", batches: int) -> str:
    rows, alone = [], start(IN_PROCESS, ranks, 0, batches, paths)
    for way in ways:
        found = alone if way == IN_PROCESS else start(way, ranks, workers, batches, paths)
        if found.digests != alone.digests:
            raise SystemExit(f"{way}: other batches than in process")
        times = [f"{statistics.median(found.seconds):.2f}", f"{max(found.seconds):.2f}"]
        rows.append([way, str(found.processes), *times, f"{found.memory:,.0f}", f"{found.memory / ranks:,.0f}"])
    head = [f"{ranks} ranks, {workers} workers each", "processes", "first batch, s: median", "the last"]
    return table([*head, "PSS, MB: the host", "a rank"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up time and memory of workers, by start method.")
    parser.add_argument("--ranks", type=int, default=RANKS, help="of the host (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a rank of the host (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each single loader (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two ranks, few ways: a smoke test")
    options = parser.parse_args()
    ways, batches = [IN_PROCESS, *METHODS, STATEFUL, STATEFUL_SPAWN], 200
    if options.quick:
        options.ranks, options.workers, options.rounds, ways, batches = 2, 1, 1, [IN_PROCESS, "forkserver"], 5
    if min(options.ranks, options.workers, options.rounds) < 1:
        parser.error("--ranks, --workers and --rounds must be at least 1")
    print(f"## Start-up and memory of workers, {options.ranks} ranks on one host\n")
    print(machine("torch", "torchdata", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        chance, paths = np.random.default_rng(7), []
        for name in ("prose", "code"):
            paths.append(str(Path(folder) / f"{name}.bin"))
            chance.integers(0, 50_000, 2_000_000, np.uint16).tofile(paths[-1])
        start(IN_PROCESS, 1, 0, batches, paths)  # compiles the kernels where there are none
        print(one_loader(ways, paths, options.rounds, batches), flush=True)
        print()
        print(host(ways, options.ranks, options.workers, paths, batches), flush=True)


if __name__ == "__main__":
    main()
