"""What a run logs, and that it is said once."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tokenpipe.datapipes import TokenReader, Topology
from tokenpipe.reading_services import DataLoader2, InProcessReadingService
from tokenpipe.reading_services.metrics import WINDOW, Waits


@pytest.fixture
def graph(token_file):
    a, b = (
        TokenReader(token_file(f"{name}.bin", samples * 8 + 1), dtype="uint16", name=name)
        .slice_sequences(8)
        .permute(seed=7)
        for name, samples in (("a", 30), ("b", 11))
    )
    return a.blend(b, weights=[3, 1]).shard_ranks(Topology(0, 2), seed=1).batch_samples(2, global_batch_size=8)


def test_the_numbers_are_those_of_walking_the_steps(graph):
    loader = DataLoader2(graph)
    iterator = iter(loader)
    for batches in range(40):
        found = loader.metrics()
        assert found["data/consumed_samples"] == batches * 4
        assert found["data/consumed_tokens"] == batches * 4 * 8
        assert found["data/step"] == batches // 2
        walked = [r for step in range(batches // 2 + 1) for r in loader.contents(step)]
        given = Counter(r.source for r in walked if r.sample_number < batches * 4)
        for name, length in (("a", 30), ("b", 11)):
            assert found[f"data/share/{name}"] == given[name] / max(1, batches * 4)
            assert found[f"data/epoch/{name}"] == pytest.approx(given[name] / length)
        next(iterator)


def test_every_value_is_a_plain_number_and_the_names_stay(graph):
    loader = DataLoader2(graph)
    names = set(loader.metrics())
    for _ in islice(loader, 3):
        pass
    found = loader.metrics()
    assert set(found) == names
    assert all(type(value) in (int, float) for value in found.values())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_phase_counts_the_changes_in_force(graph):
    loader = DataLoader2(graph)
    iterator = iter(loader)
    next(iterator)
    loader.update_weights({"a": 1, "b": 1})
    assert loader.metrics()["data/phase"] == 0, "in force from the next step on"
    next(iterator)
    assert loader.metrics()["data/phase"] == 1
    loader.seek(3)
    loader.update_weights({"a": 1, "b": 2})
    assert loader.metrics()["data/phase"] == 2
    loader.seek(0)
    assert loader.metrics()["data/phase"] == 0


def test_looking_changes_nothing(graph):
    looked, other = DataLoader2(graph), DataLoader2(graph)
    for a, b in zip(islice(looked, 30), islice(other, 30), strict=True):
        looked.metrics()
        assert np.array_equal(a.tokens, b.tokens)
        assert looked.state_dict() == other.state_dict()
    before = looked.metrics()
    assert looked.metrics() == before


def test_the_wait_is_the_time_in_next(graph):
    slow = graph.map(_slow, seeded=False)
    loader = DataLoader2(slow, reading_service=InProcessReadingService())
    assert loader.metrics()["data/wait/total_s"] == 0
    for _ in islice(loader, 20):
        time.sleep(0.002)  # the training step is no wait
    found = loader.metrics()
    assert found["data/wait/total_s"] >= 20 * 0.003
    assert found["data/wait/mean_ms"] >= 3
    assert found["data/wait/p99_ms"] >= found["data/wait/mean_ms"]
    assert found["data/wait/mean_ms"] == pytest.approx(found["data/wait/total_s"] / 20 * 1e3)


def _slow(rows):
    time.sleep(0.003)
    return rows


def test_waits_are_those_of_the_last_ones_in_constant_memory():
    waits = Waits()
    for _ in range(WINDOW):
        waits.add(0.0, 1.0)
    assert waits.metrics() == {"data/wait/mean_ms": 1000, "data/wait/p99_ms": 1000, "data/wait/total_s": WINDOW}
    values = np.random.default_rng(1).permutation(3 * WINDOW) / 1000
    for value in values.tolist():
        waits.add(0.0, value)
    last = values[-WINDOW:] * 1000
    assert waits.metrics()["data/wait/mean_ms"] == pytest.approx(last.mean())
    assert waits.metrics()["data/wait/p99_ms"] == pytest.approx(np.percentile(last, 99))
    assert len(waits._last) == WINDOW


def test_a_stream_tells_its_waits():
    loader = DataLoader2(IterableWrapper([1, 2, 3]))
    assert list(loader) == [1, 2, 3]
    assert set(loader.metrics()) == {"data/wait/mean_ms", "data/wait/p99_ms", "data/wait/total_s"}
    assert loader.metrics()["data/wait/total_s"] > 0


def test_metrics_can_be_asked_after_shutdown(graph):
    loader = DataLoader2(graph)
    for _ in islice(loader, 4):
        pass
    loader.shutdown()
    assert loader.metrics()["data/consumed_samples"] == 16


# Rank 0 says it ------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch.distributed
from tokenpipe.datapipes import TokenReader
from tokenpipe.datapipes.rank_zero import say
from tokenpipe.reading_services import DataLoader2

path, rank, store = sys.argv[1:]
if store:
    torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
graph = TokenReader(path, dtype="uint16").slice_sequences(8)  # looks like uint32: TokenFileWarning
loader = DataLoader2(graph.batch_samples(1))
loader.seed(3)  # LoaderWarning
say(loader.plan(5))
TokenReader(path + ".missing", dtype="uint16")  # an error, on every rank
"""


@pytest.mark.parametrize("how", ["RANK", "torch.distributed"])
def test_warnings_and_summaries_come_from_rank_0_and_errors_from_all(tmp_path, how):
    np.arange(1, 1001, dtype="<u4").tofile(tmp_path / "wide.bin")
    running = []
    for rank in range(2):
        # what torch.distributed says counts, whatever the environment has
        env = os.environ | {"RANK": str(rank if how == "RANK" else 1 - rank)}
        store = str(tmp_path / "store") if how != "RANK" else ""
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "wide.bin"), str(rank), store]
        running.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    results = [process.communicate(timeout=120) for process in running]
    for rank, (out, err) in enumerate(results):
        assert ("TokenFileWarning" in err) is (rank == 0), err
        assert ("LoaderWarning" in err) is (rank == 0), err
        assert ("5 steps, 5 samples" in out) is (rank == 0), out
        assert "TokenFileError" in err
    assert all(process.returncode == 1 for process in running)


def test_a_warning_names_the_line_that_called(token_file):
    graph = TokenReader(token_file("a.bin", 81), dtype="uint16").slice_sequences(8)
    with pytest.warns(UserWarning, match="reaches the random nodes of streams") as caught:
        DataLoader2(graph).seed(3)
    assert caught[0].filename == __file__


def test_without_ranks_this_process_speaks(monkeypatch):
    from tokenpipe.datapipes.rank_zero import is_rank_zero

    monkeypatch.delenv("RANK", raising=False)
    assert is_rank_zero()
    monkeypatch.setenv("RANK", "")
    assert is_rank_zero()
    monkeypatch.setenv("RANK", "3")
    assert not is_rank_zero()
