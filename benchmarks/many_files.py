"""What 100,000 token files cost beside one file of the same tokens, with and without a manifest.

What is isolated: the number of files, by the same tokens in one and in many. Three questions, each answered in fresh
processes over small files on a disk (all of it in the page cache):

    start-up       from `TokenReader(...)` to the first batch of 8 × 2048: imports, and a first batch of another file
                   that loads compiled code, come before
    throughput     `next()` of a shuffled order, once every file was read once: rounds over one file and over the many
                   take turns in one process, so that both meet the same machine. And the pass before, in which files
                   are opened: that is start-up, spread over the first batches
    ranks          how often 512 ranks call open and stat until their graph stands, over 10,000 files. Ranks are graphs
                   that one process builds one after the other; without a manifest some of them, as all do the same

"one rank reads" is `TokenReader(read_manifest(path))` under torch.distributed: the others get its bytes by broadcast.

Files of 4 KiB are the worst case: each row of 2,049 tokens lies in two of them. As Linux allows a process 65,530 maps
by default, of 100,000 files not all can be mapped at once: small ones are copied into memory instead, up to 512 MiB.
Who does not gain: runs over a few large files, which open as soon without a manifest.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, run_child, table

TOKENS = 2048  # a file
B, S = 8, 2048


def write_files(folder: Path, files: int) -> None:
    """`files` raw files of a few contents, and a file beside the folder with the same tokens."""
    folder.mkdir()
    contents = [
        block.tobytes() for block in np.random.default_rng(7).integers(0, 50_000, (64, TOKENS)).astype(np.uint16)
    ]
    with Path(f"{folder}.bin").open("wb") as one:
        for i in range(files):
            Path(folder, f"{i:06}.bin").write_bytes(contents[i % 64])
            one.write(contents[i % 64])


# In a process of its own ------------------------------------------------------------------------------------


def graph(reader: Any, ranks: int = 1, rank: int = 0) -> Any:
    from tokenpipe.datapipes import Topology

    rows = reader.slice_sequences(S).permute(seed=7)
    if ranks > 1:
        rows = rows.blend().shard_ranks(Topology(rank, ranks), seed=7)
    return rows.batch_samples(B).collate_causal_lm()


def reader(job: "dict[str, Any]") -> Any:
    from tokenpipe.datapipes import TokenReader

    return TokenReader(job["paths"], dtype="uint16", name="many")


def start_up(job: "dict[str, Any]") -> "dict[str, Any]":
    from tokenpipe.datapipes import TokenReader
    from tokenpipe.reading_services import DataLoader2

    next(iter(DataLoader2(graph(TokenReader(job["tiny"], dtype="uint16")))))
    began = time.perf_counter()
    with DataLoader2(graph(reader(job))) as loader:
        next(iter(loader))
        seconds = time.perf_counter() - began
    content = time.perf_counter()
    loader.datapipe.fingerprint()
    return {"seconds": seconds, "fingerprint": time.perf_counter() - content}


def throughput(job: "dict[str, Any]") -> "dict[str, Any]":
    from tokenpipe.datapipes import TokenReader
    from tokenpipe.reading_services import DataLoader2

    next(iter(DataLoader2(graph(TokenReader(job["tiny"], dtype="uint16")))))  # loads compiled code
    graphs = {"one": graph(TokenReader(job["one"], dtype="uint16", name="many")), "many": graph(reader(job))}
    found: dict[str, Any] = {name: [] for name in graphs}
    items = {name: iter(DataLoader2(each)) for name, each in graphs.items()}
    for name, each in items.items():
        began, batches = time.perf_counter(), len(graphs[name])
        for _ in range(batches):
            next(each)
        found[f"first {name}"] = (time.perf_counter() - began) / batches * 1e6
    for _ in range(job["rounds"]):
        for name, each in items.items():
            began = time.perf_counter()
            for _ in range(job["batches"]):
                next(each)
            found[name].append((time.perf_counter() - began) / job["batches"] * 1e6)
    return found


def ranks(job: "dict[str, Any]") -> "dict[str, Any]":
    """Calls a rank, seconds a rank; `built` ranks are."""
    from tokenpipe.datapipes import TokenReader, read_manifest

    graph(TokenReader(job["tiny"], dtype="uint16"), 2)
    count = {"open": 0, "stat": 0}
    folder = job["folder"]

    def opened(event: str, given: Any) -> None:
        if event in ("open", "os.scandir", "os.listdir") and str(given[0]).startswith(folder):
            count["open"] += 1

    def noting(real: Any) -> Any:
        def stat(path: Any, *more: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(folder):
                count["stat"] += 1
            return real(path, *more, **options)

        return stat

    sys.addaudithook(opened)
    os.stat, os.lstat = noting(os.stat), noting(os.lstat)
    shared = read_manifest(job["paths"]) if job["shared"] else None  # what a broadcast brings
    began = time.perf_counter()
    for rank in range(job["built"]):
        whole = graph(reader({"paths": shared or job["paths"]}), job["ranks"], rank)
        whole.fingerprint()
    return {**count, "seconds": (time.perf_counter() - began) / job["built"]}


# Here -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Many token files beside one of the same tokens.")
    parser.add_argument("--files", type=int, default=100_000, help="of start-up and throughput (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=512, help="that start over a tenth of them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="of throughput, one of each (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=300, help="of a round (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    parser.add_argument(
        "--quick", "--short", action="store_true", help="seconds instead of minutes: a smoke test, no figures"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job = json.load(sys.stdin)
        print(json.dumps({"start": start_up, "throughput": throughput, "ranks": ranks}[job["what"]](job)))
        return
    if options.quick:
        options.files, options.ranks, options.rounds, options.batches = 2000, 8, 3, 20
    if min(options.files // 1000, options.ranks, options.rounds, options.batches) < 1:
        parser.error("--files must be at least 1000, the others at least 1")
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(options, scratch)
    finally:
        shutil.rmtree(scratch)


def measure(options: argparse.Namespace, scratch: Path) -> None:
    from tokenpipe.datapipes import make_manifest

    many, few, tiny = scratch / "many", scratch / "few", scratch / "tiny.bin"
    write_files(many, options.files)
    write_files(few, options.files // 10)
    (np.arange(1 << 16) % 50_000).astype(np.uint16).tofile(tiny)
    print(f"## {options.files:,} token files of {2 * TOKENS:,} bytes\n")
    print(machine("torch", "numpy", "numba"), flush=True)
    began = time.perf_counter()
    all_of = {
        folder: make_manifest(folder, f"{folder}.manifest", dtype="uint16", progress=False).path
        for folder in (many, few)
    }
    made = time.perf_counter() - began
    size = Path(all_of[many]).stat().st_size
    print(f"\nThe manifests were made in {made:.1f} s; that of {options.files:,} files has {size / 1e6:.1f} MB.\n")

    rows = []
    for name, paths in (("one file", f"{many}.bin"), ("a manifest", all_of[many]), ("a folder", str(many))):
        found = run_child(__file__, {"what": "start", "paths": paths, "tiny": str(tiny)}, "start-up")
        rows.append([name, f"{found['seconds']:.2f}", f"{found['fingerprint']:.2f}"])
    print(table(["start-up, s", "to the first batch", "and its fingerprint"], rows), flush=True)

    job = {"what": "throughput", "one": f"{many}.bin", "paths": all_of[many], "tiny": str(tiny)}
    found = run_child(__file__, {**job, "rounds": options.rounds, "batches": options.batches}, "throughput")
    one, all_ = np.median(found["one"]), np.median(found["many"])
    ratio = np.median(np.array(found["many"]) / np.array(found["one"]))
    rows = [
        ["one file", f"{found['first one']:.1f}", f"{one:.1f}", ""],
        [f"{options.files:,} files", f"{found['first many']:.1f}", f"{all_:.1f}", f"{ratio - 1:+.0%}"],
    ]
    print(f"\n{table([f'{B} × {S}, µs a batch', 'first pass', 'from then on (median)', ''], rows)}\n", flush=True)

    rows = []
    for name, paths, shared, built in (
        ("a folder", str(few), False, min(4, options.ranks)),
        ("a manifest, each rank for itself", all_of[few], False, options.ranks),
        ("a manifest, one rank reads", all_of[few], True, options.ranks),
    ):
        job = {"what": "ranks", "paths": paths, "shared": shared, "built": built, "ranks": options.ranks}
        found = run_child(__file__, {**job, "folder": str(few), "tiny": str(tiny)}, "ranks")
        calls = [f"{found[call] * (options.ranks // built):,}" for call in ("open", "stat")]
        rows.append([name, *calls, f"{found['seconds']:.2f}"])
    head = [f"{options.ranks} ranks, {options.files // 10:,} files", "open", "stat", "s a rank"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
