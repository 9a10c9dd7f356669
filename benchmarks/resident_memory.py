"""How much memory of mapped files a run keeps while it walks through files larger than it may keep.

What is isolated: the resident pages of token files. A fresh process for each row takes shuffled batches from several
files until it has read about as many bytes as they hold, and looks at its own RssFile (/proc/self/status, less what it
was before the first batch: libraries are mapped files too) after every few batches. The files have just been written,
so that no disk is measured.

    no bound            TOKENPIPE_RESIDENT_MIB=0: pages pile up until the files are mapped whole
    256 MiB, 1 GiB, …   maps are let go of (MADV_DONTNEED) from three quarters of the bound on; 4096 MiB is
                        the default

The price is in the other columns: pages that were let go of fault again, and letting go takes a moment, once in some
ten thousand windows. All rows give the same batches (checked by a hash).

Who does not gain: files that fit under the bound never come to it. These pages were never memory that others lacked:
the kernel takes mapped pages back under pressure, only later than others. It counts where a job is watched or killed
by its resident memory, and where many processes of a host map the same files.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, run_child, table

LOOK = 8  # batches between two looks at the memory
ROWS, LENGTH, FILES = 8, 2048, 4


def write_file(path: Path, size: int, salt: int) -> None:
    """`size` bytes of uint16 tokens, other ones in each MiB."""
    tokens = np.arange(1 << 19, dtype=np.uint32) * 40_503 + salt
    with path.open("wb") as file:
        for n in range(0, size, 1 << 20):
            (tokens[: min(1 << 20, size - n) // 2] + n // 977).astype(np.uint16).tofile(file)


def resident() -> int:
    """Bytes of files that are resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """The walk of one row, in this process; what it measured."""
    from tokenpipe.datapipes import TokenReader
    from tokenpipe.reading_services import DataLoader2

    def batches(paths: list[str]) -> Any:
        graph = TokenReader(paths, dtype="uint16", name="walk").slice_sequences(LENGTH).permute(seed=7)
        return iter(DataLoader2(graph.batch_samples(ROWS).collate_causal_lm()))

    next(batches([job["tiny"]]))  # imports and kernels
    before, most, seconds = resident(), 0, []
    digest = hashlib.blake2b(digest_size=8)
    items = batches(job["paths"])
    for n in range(job["batches"]):
        began = time.perf_counter()
        batch = next(items)
        seconds.append(time.perf_counter() - began)
        digest.update(batch["input_ids"][:, ::256].contiguous().numpy())
        if n % LOOK == 0:
            most = max(most, resident() - before)
    return {"most": most, "last": resident() - before, "us": [s * 1e6 for s in seconds], "digest": digest.hexdigest()}


def run(job: dict[str, Any], bound: int) -> dict[str, Any]:
    environment = {**os.environ, "TOKENPIPE_RESIDENT_MIB": str(bound)}
    return run_child(__file__, job, f"with {bound} MiB", environment)


def report(results: dict[int, dict[str, Any]]) -> str:
    rows = []
    for bound, result in results.items():
        p50, p99, p999 = np.percentile(result["us"], [50, 99, 99.9])
        reached = "" if not bound else "yes" if result["most"] <= bound << 20 else "no"
        label = f"{bound:,} MiB" if bound else "no bound"
        times = [f"{p50:.0f}", f"{p99:.0f}", f"{p999:.0f}", f"{max(result['us']) / 1e3:.1f}"]
        rows.append([label, f"{result['most'] / 2**20:,.0f}", f"{result['last'] / 2**20:,.0f}", reached, *times])
    head = [
        "bound",
        "most resident, MiB",
        "at the end",
        "below the bound",
        "next(), µs: p50",
        "p99",
        "p99.9",
        "slowest, ms",
    ]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Resident memory while a run walks through large files.")
    parser.add_argument("--mib", type=int, default=2048, help="size of all files together (default: %(default)s)")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 256, 1024, 4096], metavar="MIB", help="rows (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="where the sparse files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute: a smoke test")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return
    if options.quick:
        options.mib, options.bounds = 64, [0, 16]
    if options.mib < FILES or min(options.bounds) < 0:
        parser.error(f"--mib must be at least {FILES}, --bounds at least 0")
    print(f"## Resident memory over {options.mib:,} MiB of files, shuffled, {ROWS} × {LENGTH}\n")
    print(machine("torch", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = [Path(folder, f"{n}.bin") for n in range(FILES)]
        for path in paths:
            write_file(path, (options.mib << 20) // FILES, salt=int(path.stem))
        tiny = Path(folder, "tiny.bin")
        tiny.write_bytes(bytes(1 << 16))
        batches = (options.mib << 20) // (2 * ROWS * LENGTH)
        job = {"paths": [str(path) for path in paths], "tiny": str(tiny), "batches": batches}
        results = {bound: run(job, bound) for bound in options.bounds}
    if len({result["digest"] for result in results.values()}) > 1:
        raise SystemExit("the rows gave different batches")
    print(report(results))


if __name__ == "__main__":
    main()
