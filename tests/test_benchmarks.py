"""The benchmarks run and print their tables; what the figures are is no matter here."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

ROWS = {
    "throughput": [
        "bare gather",
        "tokenpipe",
        "tokenpipe, thread (prefetch_cnt=2)",
        "Nanoset, memmap kept open",
        "StatefulDataLoader over that",
        "Nanoset as published",
        "DataLoader(graph), 2 workers (a remark)",
    ],
    "startup": ["10^6", "10^9", "target: < 10 ms, < 20 MB", "flat: the last N over the first"],
    "cold_files": ["kernel alone", "windows alone (MADV_RANDOM)", "**read-ahead**", "page cache"],
    "resident_memory": ["no bound", "16 MiB"],
    "workers": [
        "in process",
        "**tokenpipe**",
        "tokenpipe, one worker",
        *(["grain, mp_prefetch"] if importlib.util.find_spec("grain") else []),
        "StatefulDataLoader(graph)",
        "StatefulDataLoader, batches by hand",
        "StatefulDataLoader, row by row",
        "**tokenpipe**, asleep",
        "**tokenpipe**, computing",
        "sleeps 2 ms",
        "computes 2 ms",
    ],
    "packing": ["document ends", "align", "**pack**"],
    "slow_storage": ["in process", "StatefulDataLoader, prefetch_factor=2", "**tokenpipe, four workers, (10, 10)**"],
    "remote_shards": [
        "local files",
        "**cached shards, fetched ahead**",
        "**ranged, fetched ahead**",
        "one shard",
        "all",
    ],
    "layouts": ["dp", "**middle stage**", "megatron", "read all, broadcast", "tokenpipe: one stage"],
    "many_files": ["one file", "a manifest", "a folder", "2,000 files", "a manifest, one rank reads"],
    "many_loaders": ["in process", "forkserver"],
    "many_starts": ["cold cache", "nothing writable"],
    "adapters": ["none", "**Profile**", "Timeout", "Placement, 8 threads"],
    "balance": ["8 × 1, 256, shard_ranks", "64 × 4, 1,024, **balance_ranks**"],
    "audit": ["10^6", "10^9", "target: < 10 ms"],
    "tokenizing": ["encode_batch", "encode_batch_fast", "tokenize_files", "tokenize_files, shuffled"],
    "imports": ["import torch", "import torch and tokenpipe", "**tokenpipe over torch**"],
}


def run(name: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_benchmark_prints_its_table_after_the_machine_it_ran_on(name):
    text = run(name, "--quick")
    assert "Python 3." in text and "torch 2." in text and "numba 0." in text
    assert set(ROWS[name]) <= set(first_cells(text))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_benchmark_explains_its_options(name):
    assert "--quick" in run(name, "--help")


def test_every_benchmark_is_run_here_and_says_what_it_isolates_and_who_does_not_gain():
    scripts = {path.stem: path for path in BENCHMARKS.glob("*.py") if path.stem != "report"}
    assert scripts.keys() == ROWS.keys()
    for path in scripts.values():
        text = path.read_text()
        assert "What is isolated:" in text and "Who does not gain:" in text, path
