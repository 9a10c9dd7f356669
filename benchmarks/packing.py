"""What do rows by documents cost: to find where documents end, to plan rows of them, and to read those?

What is isolated: each index is made in a process of its own, once with an empty cache folder ("made") and once with
what that left behind ("found"); files are in the page cache, kernels compiled before. Documents are log-normal in
length (median 148 tokens, mean 300), rows of 2,048 tokens.

    document ends    TokenReader(raw file, end_of_text=ID): one scan of the tokens
    align            slice_sequences(S, align="document")
    **pack**         pack_documents(S)

memory: how far making it raised the process's peak. file: what is kept. rows: how full they are (of align: how much of
the tokens is in some row), and a batch of 8 shuffled rows beside one of plain windows, median of many.

Who does not gain: a corpus whose documents are all far longer than a row: plain windows cut as few of them, and read
from one place a row. A packed row reads from as many places as it holds documents, which a cold disk feels.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import machine, run_child, table

SEQUENCE_LENGTH, ROWS = 2048, 8
MIB = 2**20


def write_files(folder: Path, documents: int, tokens: int) -> None:
    """corpus.tok (uint8, with document ends) and raw.bin (uint16, documents closed by id 0)."""
    import numpy as np

    from tokenpipe.datapipes import TokenFileWriter

    rng = np.random.default_rng(7)
    with TokenFileWriter(folder / "corpus.tok", dtype="uint8") as writer:
        for first in range(0, documents, 100_000):
            lengths = rng.lognormal(5.0, 1.2, min(100_000, documents - first)).astype(np.int64) + 1
            writer.write_many(np.ones(int(lengths.sum()), np.uint8), np.cumsum(lengths))
    raw = rng.integers(1, 50_000, tokens).astype(np.uint16)
    raw[rng.integers(0, tokens, tokens // 300)] = 0
    raw.tofile(folder / "raw.bin")


def child(job: "dict[str, Any]") -> "dict[str, Any]":
    from tokenpipe.datapipes import TokenReader, kernels

    for name in ("gather", "permute", "aligned_starts", "pack_best_fit", "packed_spans"):
        kernels.kernel(name)
    folder = Path(job["folder"])
    before, began = peak(), time.perf_counter()
    if job["what"] == "document ends":
        reader = TokenReader(folder / "raw.bin", dtype="uint16", end_of_text=0)
        found: dict[str, Any] = {"size": len(reader), "items": reader.files[0].documents}
    else:
        reader = TokenReader(folder / "corpus.tok")
        node: Any = (
            reader.slice_sequences(SEQUENCE_LENGTH, align="document")
            if job["what"] == "align"
            else reader.pack_documents(SEQUENCE_LENGTH)
        )
        found = {"size": reader.files[0].documents, "items": len(node)}
    found["seconds"] = time.perf_counter() - began
    found["memory"] = peak() - before
    if job["what"] != "document ends":
        rows = min(len(node), job["batches"] * ROWS)
        found["share"] = _share(node, reader)
        found["batch"], found["plain"] = (
            _batch(shuffled, rows // ROWS)
            for shuffled in (node.permute(seed=7), reader.slice_sequences(SEQUENCE_LENGTH).permute(seed=7))
        )
    return found


def peak() -> int:
    """Bytes of memory that this process has had at most (getrusage would tell of its parent's before exec, too)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _share(node: Any, reader: Any) -> float:
    """Of packed rows, how full they are; of aligned ones, which part of the tokens is in some row."""
    import numpy as np

    if node.reader is not reader:
        return len(reader) / (len(node) * (SEQUENCE_LENGTH + 1))
    starts = node.starts(np.arange(len(node)))
    alone = int((np.diff(starts, append=len(reader)) > SEQUENCE_LENGTH).sum())  # rows whose last token is no other's
    return (SEQUENCE_LENGTH * starts.size + alone) / len(reader)


def _batch(node: Any, batches: int) -> float:
    """Median seconds of a batch, the second time that its rows are read."""
    import numpy as np

    took = []
    for turn in range(2):
        for i in range(batches):
            numbers = np.arange(i * ROWS, (i + 1) * ROWS)
            began = time.perf_counter()
            node.fetch(numbers)
            if turn:
                took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the raw file (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="20,000 documents: that it runs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return
    documents = 20_000 if arguments.quick else arguments.documents
    tokens = 1_000_000 if arguments.quick else arguments.tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, documents, tokens)
        rows = []
        for what in ("document ends", "align", "pack"):
            cache = folder / f"cache {what}"
            environment = {**os.environ, "TOKENPIPE_CACHE": str(cache)}
            job = {"folder": name, "what": what, "batches": 20 if arguments.quick else 200}
            made, found = (run_child(__file__, job, f"that asks for {what}", environment) for _ in range(2))
            kept = sum(path.stat().st_size for path in cache.glob("*.idx"))
            batch = f"{found['batch'] * 1e6:.0f} / {found['plain'] * 1e6:.0f} µs" if "batch" in found else ""
            rows.append(
                [
                    "**pack**" if what == "pack" else what,
                    f"{made['size']:,} {'tokens' if what == 'document ends' else 'documents'}",
                    f"{made['items']:,}",
                    f"{made['seconds']:.2f} s",
                    f"{made['memory'] / MIB:.0f} MiB",
                    f"{kept / MIB:.1f} MiB",
                    f"{found['seconds'] * 1e3:.0f} ms",
                    f"{made['share']:.2%}" if "share" in made else "",
                    batch,
                ]
            )
    print(machine("torch", "numba", "numpy"))
    print()
    print(table(["", "of", "gives", "made", "memory", "file", "found", "rows", "batch / plain"], rows))


if __name__ == "__main__":
    main()
