"""How long a run takes to its first batch, and how much memory that costs, by the length of its epoch.

What is isolated: everything between calling the constructors and holding the first batch: opening two token
files, the graph (a shuffled 0.8/0.2 blend, rank 0 of 8, micro-batches of 4), the loader, the order of the
first samples, mapping the files, the gather. Not in it: Python's and torch's start (imports.py) and loading
the kernels, which happens once a process whatever the graph is; a tiny graph does it beforehand.

The epochs have N samples of 8 tokens, N = 10^6 … 10^11. The files are sparse (truncated to their length, no
block written), at most 1.6 TB together; a source is cut into several files where the file system does not take
one so long. What tokens a file holds makes no difference to what is measured, and no disk is: a cold disk adds
the reading of one batch's pages.

    start            constructors → first batch
    resume           constructors → load_state_dict of a state at 90 % of the epoch → first batch. Files are
                     recognised by their content, so this reads 64 blocks of 4 KiB of each, once a process
    …, known files   the same without that reading

A fresh process for each N, which makes the state first; the median of several starts in it (the slowest: the
machine's other load, mostly), and by how much the process's peak of resident memory rose above what it was
before the first of them.

Who does not gain: a run that starts once a week does not feel the minute that an index of 10^8 samples takes
elsewhere. It counts where processes start often: thousands of ranks, evaluation jobs, interactive work on the
mixture, resumes after failures, and where the index would not fit beside the model.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import machine, run_child, table

SEQUENCE_LENGTH, GLOBAL_BATCH = 8, 256
WEIGHTS = {"prose": 0.8, "code": 0.2}
TARGET_MS, TARGET_MB = 10, 20
WAYS = {"start": "start", "resume": "resume at 90 %", "known": "resume, known files"}


# The files --------------------------------------------------------------------------------------------------


def write_sparse(folder: Path, samples: int) -> dict[str, list[str]]:
    """The files of each source, without one block of data: `samples` samples in all."""
    paths: dict[str, list[str]] = {}
    for name, share in WEIGHTS.items():
        size = 2 * (round(samples * share) * SEQUENCE_LENGTH + 1)
        for parts in (1, 2, 4, 8, 16, 64, 256):
            paths[name] = [str(folder / f"{name}-{i}.bin") for i in range(parts)]
            try:
                whole = size // parts // 2 * 2
                for i, path in enumerate(paths[name]):
                    with Path(path).open("wb") as file:
                        file.truncate(whole if i else size - whole * (parts - 1))
                break
            except OSError:  # longer than the file system takes
                for path in paths[name]:
                    Path(path).unlink(missing_ok=True)
        else:
            raise SystemExit(f"{folder}: no sparse file of {size:,} bytes in 256 parts; give another --folder")
    return paths


# In a process of its own ------------------------------------------------------------------------------------


def loader_over(paths: dict[str, list[str]]) -> Any:
    from tokenpipe.datapipes import TokenReader, Topology
    from tokenpipe.reading_services import DataLoader2, InProcessReadingService

    sources = [
        TokenReader(files, dtype="uint16", name=name).slice_sequences(SEQUENCE_LENGTH).permute(seed=7)
        for name, files in paths.items()
    ]
    graph = (
        sources[0]
        .blend(sources[1], weights=WEIGHTS)
        .shard_ranks(Topology(dp_rank=0, dp_size=8), seed=7)
        .batch_samples(4, global_batch_size=GLOBAL_BATCH)
        .collate_causal_lm()
    )
    return DataLoader2(graph, reading_service=InProcessReadingService())


def first_batch(paths: dict[str, list[str]], state: Any, known: bool) -> float:
    """Seconds from the constructors to the first batch."""
    gc.collect()
    began = time.perf_counter()
    loader = loader_over(paths)
    if known:
        aside = time.perf_counter()
        loader.datapipe.fingerprint()
        began += time.perf_counter() - aside
    if state is not None:
        loader.load_state_dict(state)
    batch = next(iter(loader))
    took = time.perf_counter() - began
    assert batch["input_ids"].shape == (4, SEQUENCE_LENGTH)
    loader.shutdown()
    return took


def state_at(paths: dict[str, list[str]], samples: int) -> Any:
    """The state of a run that is this far."""
    return loader_over(paths).state_dict(step=samples // GLOBAL_BATCH)


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """All starts over one set of files, in this process; what it measured."""
    state = state_at(job["paths"], job["samples"] * 9 // 10)
    first_batch(job["tiny"], None, known=False)
    first_batch(job["tiny"], state_at(job["tiny"], 9_000), known=True)
    result: dict[str, Any] = {}
    for way in WAYS:
        gc.collect()
        release_free_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        took = [
            first_batch(job["paths"], None if way == "start" else state, way == "known") for _ in range(job["repeats"])
        ]
        result[way] = {"ms": [t * 1e3 for t in took], "mb": (memory("VmHWM") - before) / 1e6}
    return result


def release_free_memory() -> None:
    """Gives back what malloc keeps, so that a rise is not hidden in it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# Here -------------------------------------------------------------------------------------------------------


def measure(folder: Path, samples: int, repeats: int) -> tuple[dict[str, Any], int]:
    """(what a fresh process measured, how many files)."""
    folder.mkdir()
    paths = write_sparse(folder, samples)
    tiny = folder / "tiny"
    tiny.mkdir()
    job = {"paths": paths, "samples": samples, "tiny": write_sparse(tiny, 10_000), "repeats": repeats}
    return run_child(__file__, job, f"for N = {samples:,}"), sum(len(files) for files in paths.values())


def report(results: dict[int, dict[str, Any]]) -> str:
    head = ["N", *(f"{label}, ms" for label in WAYS.values()), *(f"{label}, MB" for label in WAYS.values())]
    medians = {way: [statistics.median(result[way]["ms"]) for result in results.values()] for way in WAYS}
    rises = {way: [result[way]["mb"] for result in results.values()] for way in WAYS}
    rows = []
    for i, (exponent, result) in enumerate(results.items()):
        times = [f"{medians[way][i]:.2f} ({max(result[way]['ms']):.1f})" for way in WAYS]
        rows.append([f"10^{exponent}", *times, *(f"{rises[way][i]:.1f}" for way in WAYS)])
    rows.append(
        [
            f"target: < {TARGET_MS} ms, < {TARGET_MB} MB",
            *("yes" if max(medians[way]) < TARGET_MS else "no" for way in WAYS),
            *("yes" if max(rises[way]) < TARGET_MB else "no" for way in WAYS),
        ]
    )
    flat = [f"{medians[way][-1] / medians[way][0]:.2f}×" for way in WAYS]
    rows.append(["flat: the last N over the first", *flat, *("" for _ in WAYS)])
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory to a run's first batch, by samples an epoch.")
    parser.add_argument(
        "--exponents",
        type=int,
        nargs="+",
        default=[6, 7, 8, 9, 10, 11],
        metavar="E",
        help="epochs of 10^E samples (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=15, help="starts in each process (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the sparse files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="10^6 and 10^9 only, few repeats: a smoke test")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return
    if options.quick:
        options.exponents, options.repeats = [6, 9], 3
    if options.repeats < 1 or not all(5 <= e <= 12 for e in options.exponents):
        parser.error("--repeats must be at least 1, --exponents within 5 … 12")
    print(f"## First batch of N samples of {SEQUENCE_LENGTH} tokens an epoch\n")
    print(machine("torch", "numpy", "numba"))
    results, files = {}, 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for exponent in options.exponents:
            results[exponent], files = measure(Path(folder) / str(exponent), 10**exponent, options.repeats)
    size = 2 * SEQUENCE_LENGTH * 10 ** options.exponents[-1]
    print(
        f"\nThe last N: {files} sparse files, {size:,} bytes. "
        f"Medians of {options.repeats} starts (the slowest of them); MB: by how much the peak rose.\n"
    )
    print(report(results))


if __name__ == "__main__":
    main()
