"""How long `next()` waits where token files are not in the page cache, with and without read-ahead.

What is isolated: the wait for the disk. Each row is a fresh process over one token file that the page cache was just
made to forget (`posix_fadvise(POSIX_FADV_DONTNEED)` after fsync, no root needed; `mincore` says whether it did), which
takes batches of a shuffled order one after the other, with a pause between two of them in place of a training step:
a very short one, so that nothing is hidden which a real step would show.

    kernel alone        mapped and nothing said: each fault reads around itself what the disk's `read_ahead_kb` says
    windows alone       MADV_RANDOM: each fault reads its page and no more
    read-ahead          tokenpipe as it is: MADV_RANDOM, and the windows of the batches routed ahead are asked for
                        (MADV_WILLNEED) as soon as files are seen to come from disk
    page cache          the same batches once more, for comparison

All give the same batches (checked by a hash). "read" is what came from disk, by the kernel's count (ru_inblock).

Who does not gain: files that fit into memory are cold once. Where the disk is behind a cache of its own (a virtual
machine's host, an array's memory), differences are smaller than on a bare one, and faults cheaper. A disk that cannot
give as many windows a second as are asked for stays the limit; then the pause is what counts. And the kernel alone
warms the cache sooner where its read-around is large and the file small.
"""

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, run_child, table

SHAPES = [(8, 2048), (4, 8192)]
WAYS = ["kernel alone", "windows alone (MADV_RANDOM)", "**read-ahead**", "page cache"]


# The file ---------------------------------------------------------------------------------------------------


def write_file(path: Path, size: int) -> None:
    """`size` bytes of uint16 tokens, on the disk when this returns."""
    chance = np.random.default_rng(7)
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            chance.integers(0, 50_000, min(1 << 24, size - start) // 2, np.uint16).tofile(file)
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> float:
    """Makes the page cache forget a file; gives the share of it that is still there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return cached(path)


def cached(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        block = np.frombuffer(view, np.uint8)
        found = np.zeros(-(-block.size // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.size), ctypes.c_void_p(found.ctypes.data)
        if libc.mincore(*arguments):
            raise SystemExit(f"{path}: mincore: {os.strerror(ctypes.get_errno())}")
        del block
        return float((found & 1).mean())


# In a process of its own ------------------------------------------------------------------------------------


def child(job: dict[str, Any]) -> dict[str, Any]:
    """All batches of one way, in this process; what it measured."""
    from tokenpipe.datapipes import TokenReader, filemap
    from tokenpipe.reading_services import DataLoader2

    if job["way"] == WAYS[0]:
        filemap.advise = lambda *_: None
    (b, s), path = job["shape"], Path(job["path"])

    def batches(path: "str | Path") -> Any:
        graph = TokenReader(path, dtype="uint16", name="cold").slice_sequences(s).permute(seed=7)
        return iter(DataLoader2(graph.batch_samples(b).collate_causal_lm()))

    tiny = Path(job["tiny"])
    next(batches(tiny))  # imports and kernels
    left = forget(path) if job["way"] != WAYS[3] else cached(path)
    digest, waits = hashlib.blake2b(digest_size=8), []
    before = resource.getrusage(resource.RUSAGE_SELF)
    items = batches(path)
    for _ in range(job["batches"]):
        began = time.perf_counter()
        batch = next(items)
        waits.append(time.perf_counter() - began)
        digest.update(batch["label_ids"].contiguous().numpy())
        time.sleep(job["pause"] / 1e3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "ms": [wait * 1e3 for wait in waits],
        "cached": left,
        "faults": after.ru_majflt - before.ru_majflt,
        "mb": (after.ru_inblock - before.ru_inblock) * 512 / 1e6,
        "digest": digest.hexdigest(),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    environment = dict(os.environ)
    environment.pop("TOKENPIPE_READ_AHEAD_MIB", None)
    if job["way"] in WAYS[:2]:
        environment["TOKENPIPE_READ_AHEAD_MIB"] = "0"
    return run_child(__file__, job, f"for {job['way']}", environment)


# Here -------------------------------------------------------------------------------------------------------


def report(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for way, result in results.items():
        p50, p99, p999 = np.percentile(result["ms"], [50, 99, 99.9])
        cells = [
            f"{p50:.3f}",
            f"{p99:.3f}",
            f"{p999:.2f}",
            f"{max(result['ms']):.1f}",
            f"{sum(result['ms']) / 1e3:.2f}",
        ]
        rows.append([way, *cells, f"{result['faults']:,}", f"{result['mb']:,.0f}"])
    head = ["next(), ms", "p50", "p99", "p99.9", "slowest", "waited in all, s", "faults that waited", "read, MB"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="next() over files that are not in the page cache.")
    parser.add_argument("--mib", type=int, default=2048, help="size of the token file (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=4000, help="batches of each row (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=2.0, help="ms between two batches (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the file goes: a disk (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a smoke test, no figures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return
    if options.quick:
        options.mib, options.batches, options.pause = 8, 60, 0.0
    if options.mib < 1 or options.batches < 1 or options.pause < 0:
        parser.error("--mib and --batches must be at least 1, --pause at least 0")
    print(f"## next() over a cold file of {options.mib:,} MiB, {options.pause:g} ms between two batches\n")
    print(machine("torch", "numpy", "numba"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path, tiny = Path(folder, "cold.bin"), Path(folder, "tiny.bin")
        write_file(path, options.mib << 20)
        write_file(tiny, 1 << 20)
        for shape in SHAPES[:1] if options.quick else SHAPES:
            job = {"path": str(path), "tiny": str(tiny), "shape": shape, "batches": options.batches}
            results = {way: run({**job, "pause": options.pause, "way": way}) for way in WAYS}
            if len({result["digest"] for result in results.values()}) > 1:
                raise SystemExit("the ways gave different batches")
            print(f"\n{shape[0]} × {shape[1]}, {options.batches:,} batches:\n")
            print(report(results))
            if (left := max(results[way]["cached"] for way in WAYS[:3])) > 0.01:
                print(
                    f"\n{left:.0%} of the file stayed in the page cache: these are no cold files. --folder on a disk?"
                )
            print(end="", flush=True)


if __name__ == "__main__":
    main()
