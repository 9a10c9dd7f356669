"""What importing tokenpipe costs, and what numba costs when a batch is made for the first time.

What is isolated: the imports alone, each in a fresh process, timed from its first statement on, so that Python's
own start is no part of it. torch is imported either way; what counts is the difference to it.

    torch                 import torch
    … and tokenpipe       import torch, tokenpipe.datapipes, tokenpipe.reading_services
    first batch           the first batch of a tiny graph after that: imports numba and loads the kernels
                          that the graph uses from their cache
    …, nothing cached     the same on a machine that has not compiled the kernels yet
    later first batch     the first batch of another graph in the same process

The processes take turns, a difference is taken within its round, and the medians are printed.

Who does not gain: a training run imports for seconds anyway. It counts for spawned workers, of which each pays it
again, for the tests, and for command lines that only look at a graph (no kernel is loaded before a batch is made).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from report import machine, table

TARGET_SECONDS = 0.6

TORCH = """
import time
began = time.perf_counter()
import torch
print(time.perf_counter() - began)
"""

TOKENPIPE = """
import time
began = time.perf_counter()
import torch
import tokenpipe.datapipes, tokenpipe.reading_services
print(time.perf_counter() - began)
"""

FIRST_BATCH = """
import sys, time
from tokenpipe.datapipes import TokenReader, Topology
from tokenpipe.reading_services import DataLoader2

def seconds():
    began = time.perf_counter()
    a, b = [TokenReader(p, dtype="uint16").slice_sequences(8).permute(seed=7) for p in sys.argv[1:]]
    graph = a.blend(b, weights=[0.8, 0.2]).shard_ranks(Topology(dp_rank=0, dp_size=8), seed=7)
    with DataLoader2(graph.batch_samples(4).collate_causal_lm()) as loader:
        next(iter(loader))
    return time.perf_counter() - began

print(seconds(), seconds())
"""


def seconds(script: str, *arguments: str, cache: "str | None" = None) -> list[float]:
    """What the script prints, run in a fresh process (with another folder for caches)."""
    environment = dict(os.environ)
    if cache is not None:
        environment.pop("NUMBA_CACHE_DIR", None)
        environment["XDG_CACHE_HOME"] = cache
    # -P: the folder of this file must not stand on the path of what is measured
    command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a measured process failed:\n{done.stderr}")
    return [float(text) for text in done.stdout.split()]


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    files = [str(folder / "a.bin"), str(folder / "b.bin")]
    for path in files:
        Path(path).write_bytes(bytes(20_000))
    times: dict[str, list[float]] = {name: [] for name in ("torch", "both", "first", "cold", "later")}
    seconds(FIRST_BATCH, *files)  # the kernels are in their cache, the files of all imports in the page cache
    for n in range(rounds):
        times["torch"] += seconds(TORCH)
        times["both"] += seconds(TOKENPIPE)
        first, later = seconds(FIRST_BATCH, *files)
        times["first"].append(first)
        times["later"].append(later)
        if n < 3:
            times["cold"].append(seconds(FIRST_BATCH, *files, cache=str(folder / f"cache-{n}"))[0])
    return times


def report(times: dict[str, list[float]]) -> str:
    def spread(values: Sequence[float]) -> list[str]:
        return [f"{statistics.median(values):.3f}", f"{min(values):.3f}–{max(values):.3f}"]

    over = [both - torch for both, torch in zip(times["both"], times["torch"], strict=True)]
    reached = "yes" if statistics.median(over) < TARGET_SECONDS else "no"
    rows = [
        ["import torch", *spread(times["torch"]), ""],
        ["import torch and tokenpipe", *spread(times["both"]), ""],
        ["**tokenpipe over torch**", *spread(over), f"< {TARGET_SECONDS} s: {reached}"],
        ["first batch: numba, kernels from their cache", *spread(times["first"]), ""],
        ["first batch on a new machine: kernels compiled", *spread(times["cold"]), ""],
        ["first batch of a later graph", *spread(times["later"]), ""],
    ]
    return table(["", "seconds (median)", "range", "target"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Import time of tokenpipe over torch's, and numba's at first use.")
    parser.add_argument("--rounds", type=int, default=11, help="processes of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round: a smoke test")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    print("## Imports\n")
    print(machine("torch", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        print(report(measure(Path(folder), rounds)))


if __name__ == "__main__":
    main()
