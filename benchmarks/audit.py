"""How long does it take to say what a step held, and when a token was seen, and how does that grow with the run?

What is isolated: working out places, by `loader.contents(step)` and `loader.when(source, tokens, steps)`; no token is
read, nothing is looked up in a log. The files are those of startup.py: sparse, a 0.8/0.2 blend of two shuffled
sources, here in steps of 1,024 samples over 8 ranks.

    contents           all rows of a step, one after another of 40 steps spread over the epoch
    …, 32 changes      the same in a run whose weights were changed 32 times on the way
    when, a token      all rows of the whole first epoch that have the token as a label (there is one)
    when, a document   the same of a document of 512 rows' tokens

The median over the 40 calls, and the slowest.

Who does not gain: nobody waits for an audit of one step. It counts where whole runs are walked through (counts by
document, searches for what preceded a spike, a certificate of a million steps), and where no log was kept.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import machine, table
from startup import SEQUENCE_LENGTH, WEIGHTS, write_sparse

STEP, RANKS, MICRO_BATCH = 1024, 8, 4
CHANGES, DOCUMENT = 32, 512 * SEQUENCE_LENGTH
TARGET_MS = 10
ASKED = ["contents", f"contents, {CHANGES} changes", "when, a token", "when, a document"]


def loader_over(paths: dict[str, list[str]]) -> Any:
    from tokenpipe.datapipes import TokenReader, Topology
    from tokenpipe.reading_services import DataLoader2

    sources = [
        TokenReader(files, dtype="uint16", name=name).slice_sequences(SEQUENCE_LENGTH).permute(seed=7)
        for name, files in paths.items()
    ]
    graph = (
        sources[0]
        .blend(sources[1], weights=WEIGHTS)
        .shard_ranks(Topology(dp_rank=0, dp_size=RANKS), seed=7)
        .batch_samples(MICRO_BATCH, global_batch_size=STEP)
        .collate_causal_lm()
    )
    return DataLoader2(graph)


def milliseconds(call: "Callable[[int], Any]", repeats: int) -> list[float]:
    """Of call(0) … call(repeats − 1), after one that loads what is loaded once."""
    call(0)
    took = []
    for i in range(repeats):
        began = time.perf_counter()
        call(i)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def measure(folder: Path, samples: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by what was asked."""
    folder.mkdir()
    steps = samples // STEP
    loader, changed = (loader_over(write_sparse(folder, samples)) for _ in range(2))
    for i in range(CHANGES):
        changed.seek(steps * (i + 1) // (CHANGES + 2))
        changed.update_weights([0.8 - i / 100, 0.2 + i / 100])
    tokens = round(samples * WEIGHTS["prose"]) * SEQUENCE_LENGTH

    def spread(i: int, over: int) -> int:
        return (2 * i + 1) * over // (2 * repeats)

    def when(i: int, length: int) -> None:
        first = spread(i, tokens - 2 * DOCUMENT)
        rows = loader.when("prose", range(first, first + length), range(steps + 1))
        assert rows, "every token of a first epoch is in it"

    calls = [
        lambda i: loader.contents(spread(i, steps)),
        lambda i: changed.contents(spread(i, steps)),
        lambda i: when(i, 1),
        lambda i: when(i, DOCUMENT),
    ]
    return {name: milliseconds(call, repeats) for name, call in zip(ASKED, calls, strict=True)}


def report(results: dict[int, dict[str, list[float]]]) -> str:
    rows = [
        [f"10^{exponent}", *(f"{statistics.median(found[name]):.2f} ({max(found[name]):.1f})" for name in ASKED)]
        for exponent, found in results.items()
    ]
    worst = [max(statistics.median(found[name]) for found in results.values()) for name in ASKED]
    rows.append([f"target: < {TARGET_MS} ms", *("yes" if ms < TARGET_MS else "no" for ms in worst)])
    return table(["N", *(f"{name}, ms" for name in ASKED)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of contents and when, by samples an epoch.")
    parser.add_argument(
        "--exponents",
        type=int,
        nargs="+",
        default=[6, 7, 8, 9, 10, 11],
        metavar="E",
        help="epochs of 10^E samples (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=40, help="calls of each kind (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the sparse files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="10^6 and 10^9 only, few repeats: a smoke test")
    options = parser.parse_args()
    if options.quick:
        options.exponents, options.repeats = [6, 9], 3
    if options.repeats < 1 or not all(5 <= e <= 12 for e in options.exponents):
        parser.error("--repeats must be at least 1, --exponents within 5 … 12")
    print(f"## What was in a step of {STEP:,} rows, when was a token seen: N samples an epoch\n")
    print(machine("torch", "numpy", "numba"), end="\n\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = {e: measure(Path(folder) / str(e), 10**e, options.repeats) for e in options.exponents}
    print(report(results))


if __name__ == "__main__":
    main()
