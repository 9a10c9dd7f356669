"""Eight processes that start at once on one host: how long until all of them have their first batch.

What is isolated: what processes that start together do to one another. Each is a rank of one run: it imports torch and
tokenpipe, builds the graph (a shuffled blend of two files) and takes its first batches; they wait for one another at a
gate after the imports. The kernels' cache folder is what differs:

    one process, cached      alone, every kernel in the cache
    cached                   all at once, every kernel in the cache
    cold cache               all at once on a new machine: the folder is empty, each kernel is compiled by one and
                             loaded by the others
    cold, killed             the same; a process that was compiling is killed at some moment just before
    home not writable        no cache folder can be made in it: the one in the temporary folder serves, empty at first
    nothing writable         nor there, and a read-only copy of the package: each process compiles for itself
    no compiled code         TOKENPIPE_KERNELS=numpy

All must deliver their own rank's rows, bit for bit, in every row: checked against a process that read the files alone.

Who does not gain: a run starts once. It counts where jobs are restarted often, for a hundred processes of one host with
a network home, and in containers, whose file systems are read-only or begin empty.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, table

PROCESSES, BATCHES = 8, 20
WAYS = [
    "one process, cached", "cached", "cold cache", "cold, killed", "home not writable", "nothing writable",
    "no compiled code",
]  # fmt: skip
NOWHERE = "/dev/null/nowhere"
"""A folder that nobody can make, root neither."""

RANK = """
import hashlib, sys, time
import torch
from tokenpipe.datapipes import TokenReader, Topology, kernels
from tokenpipe.reading_services import DataLoader2

rank, size, batches, *paths = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
a, b = [TokenReader(path, dtype="uint16").slice_sequences(64).permute(seed=7) for path in paths]
graph = a.blend(b, weights=[0.8, 0.2]).shard_ranks(Topology(int(rank), int(size)), seed=7)
digest = hashlib.blake2b(digest_size=8)
for n, batch in zip(range(int(batches)), DataLoader2(graph.batch_samples(4).collate_causal_lm())):
    if n == 0:
        took = time.perf_counter() - began
    digest.update(batch["input_ids"].contiguous().numpy())
print(took, digest.hexdigest(), kernels.kernel("gather")[1])
"""


def start(rank: int, paths: "list[str]", environment: "dict[str, str]", size: int) -> "subprocess.Popen[str]":
    # -P: the folder of this file must not stand on the path of what is measured
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-W", "ignore", "-c", RANK, str(rank), str(size), str(BATCHES), *paths]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def all_at_once(
    ranks: "list[int]", paths: "list[str]", environment: "dict[str, str]", size: int
) -> "list[tuple[float, str, str]]":
    """(seconds to the first batch, hash of the rows, whether compiled) of each rank."""
    processes = [start(rank, paths, environment, size) for rank in ranks]
    for process in processes:
        assert process.stdout
        process.stdout.readline()
    found = []
    for process in processes:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it says below what was wrong
            process.stdin.write("\n")
            process.stdin.flush()
    for process in processes:
        out, error = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"a process failed:\n{error}")
        seconds, digest, compiled = out.split()
        found.append((float(seconds), digest, compiled))
    return found


def killed(paths: "list[str]", environment: "dict[str, str]", after: float, size: int) -> None:
    """One process that is killed this long after it began to compile."""
    process = start(0, paths, environment, size)
    assert process.stdout
    assert process.stdin
    process.stdout.readline()
    process.stdin.write("\n")
    process.stdin.flush()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def read_only_copy(folder: Path) -> str:
    """A copy of the package that cannot be written to: what stands on PYTHONPATH for it."""
    import tokenpipe.cli
    import tokenpipe.datapipes

    source = Path(tokenpipe.datapipes.__path__[0]).parent
    if not (source / "adapters").is_dir():
        raise SystemExit(f"{source}: the folders of tokenpipe do not lie side by side")
    target = folder / "installed" / "tokenpipe"
    for part in ("datapipes", "adapters", "reading_services", "cli"):
        shutil.copytree(source / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(target.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    target.chmod(0o555)
    return str(target.parent)


def measure(folder: Path, size: int, ways: "list[str]") -> "dict[str, list[tuple[float, str, str]]]":
    chance, paths = np.random.default_rng(7), []
    for name in ("prose", "code"):
        paths.append(str(folder / f"{name}.bin"))
        chance.integers(0, 50_000, 2_000_000, np.uint16).tofile(paths[-1])
    ranks = list(range(size))

    def environment(cache: str, temporary: "Path | None" = None, **more: str) -> "dict[str, str]":
        result = dict(os.environ)
        for name in ("NUMBA_CACHE_DIR", "TOKENPIPE_KERNELS"):
            result.pop(name, None)
        scratch = str(temporary or folder)
        return {**result, "XDG_CACHE_HOME": cache, "HOME": str(folder), "TMPDIR": scratch, **more}

    warm, scratch = environment(str(folder / "warm")), folder / "scratch"
    scratch.mkdir()
    results: dict[str, Any] = {}
    if "cached" in ways:
        all_at_once([0], paths, warm, size)
    for way in ways:
        if way == "one process, cached":
            results[way] = all_at_once([0], paths, warm, size)
        elif way == "cached":
            results[way] = all_at_once(ranks, paths, warm, size)
        elif way == "cold cache":
            results[way] = all_at_once(ranks, paths, environment(str(folder / "cold")), size)
        elif way == "cold, killed":
            for n, after in enumerate((0.5, 2.0)):
                cold = environment(str(folder / f"killed-{n}"))
                killed(paths, cold, after, size)
                results[way] = results.get(way, []) + all_at_once(ranks, paths, cold, size)
        elif way == "home not writable":
            results[way] = all_at_once(ranks, paths, environment(NOWHERE, scratch, HOME=NOWHERE), size)
        elif way == "nothing writable":
            installed = environment(NOWHERE, HOME=NOWHERE, TMPDIR=NOWHERE, PYTHONPATH=read_only_copy(folder))
            results[way] = all_at_once(ranks, paths, {**installed, "PYTHONDONTWRITEBYTECODE": "1"}, size)
        else:
            results[way] = all_at_once(ranks, paths, {**warm, "TOKENPIPE_KERNELS": "numpy"}, size)
    return results


def expected(folder: Path, size: int) -> "list[str]":
    """The hash of each rank's rows, from the files and the order alone."""
    from tokenpipe.datapipes import TokenReader, Topology

    paths = [folder / "prose.bin", folder / "code.bin"]
    a, b = [TokenReader(path, dtype="uint16").slice_sequences(64).permute(seed=7) for path in paths]
    blend, tokens = a.blend(b, weights=[0.8, 0.2]), [np.fromfile(path, np.uint16) for path in paths]
    found = []
    for rank in range(size):
        dealt = blend.shard_ranks(Topology(rank, size), seed=7)
        digest = hashlib.blake2b(digest_size=8)
        numbers = np.arange(4 * BATCHES, dtype=np.int64)
        for source, number in zip(*blend.route(dealt.route(numbers)[1]), strict=True):
            start = int(blend.children[source].route(np.array([number]))[1][0]) * 64
            digest.update(tokens[source][start : start + 64].astype(np.int64))
        found.append(digest.hexdigest())
    return found


def report(results: "dict[str, list[tuple[float, str, str]]]", right: "list[str]") -> str:
    rows = []
    for way, found in results.items():
        seconds = [second for second, _, _ in found]
        good = sum(digest == right[n % len(right)] for n, (_, digest, _) in enumerate(found))
        compiled = sum(compiled == "True" for _, _, compiled in found)
        times = [f"{np.median(seconds):.2f}", f"{max(seconds):.2f}"]
        rows.append([way, str(len(found)), f"{good}", f"{compiled}", *times])
    return table(["", "processes", "right batches", "compiled", "first batch, s: median", "the last"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Processes of one host that start at once.")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of one row (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two processes: a smoke test")
    options = parser.parse_args()
    size, ways = (2, ["cold cache", "nothing writable"]) if options.quick else (options.processes, WAYS)
    if size < 1:
        parser.error("--processes must be at least 1")
    print(f"## First batch of {size} processes that start at once\n")
    print(machine("torch", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), size, ways)
        right = expected(Path(name), size)
        print(report(results, right))
    wrong = {way for way, found in results.items() for n, (_, d, _) in enumerate(found) if d != right[n % size]}
    if wrong:
        raise SystemExit(f"other batches than expected: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
