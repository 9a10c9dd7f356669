"""Graphs over real ranks: torchrun, gloo, processes that are killed. What the ranks do: ranks.py."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import ranks
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, LoaderError, StateError
from tokenpipe.datapipes.rank_group import ranks_text
from tokenpipe.reading_services import (
    DataLoader2,
    DistributedReadingService,
    InProcessReadingService,
    SeedGenerator,
    SequentialReadingService,
    set_graph_random_seed,
)

SCRIPT = Path(__file__).parent / "ranks.py"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENPIPE_KERNELS": "numpy",  # the same bits, and a process less slow to start
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MASTER_ADDR": "127.0.0.1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a second rendezvous finds addresses of the first in its store
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
WAIT = 70
"""Seconds after which a test gives up on its processes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return with_token_files(tmp_path_factory.mktemp("ranks"))


def with_token_files(folder: Path) -> Path:
    for salt, (name, tokens) in enumerate({"prose": 805, "code": 409}.items()):
        ((np.arange(tokens) * 7 + salt) % 50_000).astype("<u2").tofile(folder / f"{name}.bin")
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finished(processes: "list[subprocess.Popen[Any]]", log: Path) -> "list[int]":
    """Their exit codes; all are gone afterwards."""
    deadline = time.monotonic() + WAIT
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        sys.stdout.write(log.read_text()[-6000:])  # shown where the test fails


def results(folder: Path, scenario: str, world: int) -> "list[Any]":
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def four(folder) -> Path:
    """The folder, after torchrun ran four ranks over it."""
    log = folder / "four.log"
    with log.open("w") as out:
        command = [*TORCHRUN, "--standalone", "--nproc-per-node=4", str(SCRIPT), str(folder)]
        scenarios = ["indexed", "disagreeing", "streams", "signalled", "silent"]
        run = subprocess.Popen([*command, *scenarios], env=ENVIRONMENT, stdout=out, stderr=out)
    assert finished([run], log) == [0]
    return folder


@pytest.fixture(scope="module")
def two(four) -> Path:
    """The folder, after two ranks went on from what the four saved, ran workers, and one of them was killed."""
    log, port = four / "two.log", str(free_port())
    with log.open("w") as out:
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(four), "resumed", "workers", "resuming", "gone"],
                env={**ENVIRONMENT, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=out,
                stderr=out,
            )
            for rank in range(2)
        ]
    assert finished(processes, log) == [0, -signal.SIGKILL]
    return four


def in_one_process(folder: Path, steps: int, change_at: "int | None" = None) -> "dict[int, list[list[int]]]":
    """{step: its rows by sample number}, as one process has them."""
    with DataLoader2(ranks.graph(folder, micro=4)) as loader:
        seen = {} if change_at is None else ranks.steps_of(loader, change_at)
        if change_at is not None:
            ranks.change(loader)
        return {step: sorted(rows) for step, rows in (seen | ranks.steps_of(loader, steps)).items()}


def over_ranks(found: "list[dict[str, list[list[int]]]]") -> "dict[int, list[list[int]]]":
    steps = sorted({int(step) for seen in found for step in seen})
    return {step: sorted(row for seen in found for row in seen.get(str(step), [])) for step in steps}


# Indexed graphs -----------------------------------------------------------------------------------------


def test_over_four_ranks_each_step_is_what_one_process_has(four):
    assert over_ranks(results(four, "indexed", 4)) == in_one_process(four, 5, change_at=1)


def test_a_state_saved_on_four_ranks_inside_a_step_goes_on_with_two(four, two):
    whole = in_one_process(four, 5, change_at=1)
    rest = {step: [row for row in whole[step] if row[0] >= ranks.SAVED] for step in (2, 3, 4)}
    assert [len(rows) for rows in rest.values()] == [8, 12, 12]
    assert over_ranks(results(two, "resumed", 2)) == rest


def test_each_of_two_ranks_has_two_workers_and_a_killed_one_is_not_missed(four, two):
    assert over_ranks(results(two, "workers", 2)) == in_one_process(four, 5, change_at=1)


def test_ranks_that_do_not_stand_at_one_place_are_named_on_all_ranks(four, subtests):
    expected = {
        "place": ["consumed_samples: 0 on ranks 0–1, 3, 36 on rank 2", "step: 0 on ranks 0–1, 3, 3 on rank 2"],
        "weights": ['journal.weights: [] on ranks 0, 2, [[0, 0, "", [2147483648, 2147483648]]] on ranks 1, 3'],
        "seed": ['order.permute:*: {"seed":7} on ranks 0–2, {"seed":8} on rank 3'],
        "loaded": ["consumed_samples: 36 on ranks 1–3, 24 on rank 0", "step: 3 on ranks 1–3, 2 on rank 0"],
    }
    for found in results(four, "disagreeing", 4):
        for name, lines in expected.items():
            with subtests.test(name):
                kind, text = found[name]
                assert kind == "StateMismatchError"
                assert text.splitlines()[1:] == [f"  {line}" for line in lines]
        kind, text = found["micro-batch"]
        assert kind == "StateMismatchError"
        assert '"micro_batch_size": 3}' in text and "on ranks 1–3" in text
        assert found["all is well"] == ["nothing", ""]
    loaded_alike = [found["loaded alike"][0] for found in results(four, "disagreeing", 4)]
    assert sorted(loaded_alike) == [24, 25, 26, 27]


def test_a_rank_that_cannot_say_where_it_stands_lets_no_other_wait(four):
    found = [result["a file is gone"] for result in results(four, "disagreeing", 4)]
    assert found[1][0] == "TokenFileError"
    for rank in (0, 2, 3):
        assert found[rank][0] == "StateMismatchError"
        assert found[rank][1].startswith("rank 1 could not say where it stands: TokenFileError")


def test_topologies_that_do_not_fit_the_processes_are_refused_on_all_ranks(four, subtests):
    expected = {
        "no sharder": "the graph deals nothing to its 4 ranks",
        "too few": "is one of 2 processes, and torch.distributed has 4",
        "one place twice": "ranks 2–3 have one place in the topology (dp_rank 2,",
        "axes": "[[2, 2, 1, 1]] on ranks 0–1, [[2, 1, 1, 2]] on ranks 2–3",
    }
    for found in results(four, "disagreeing", 4):
        for name, part in expected.items():
            with subtests.test(name):
                assert found[name][0] == "TopologyError"
                assert part in found[name][1]


# Streams --------------------------------------------------------------------------------------------------


def test_a_stream_of_uneven_length_ends_on_all_ranks_together(four):
    for name in ("alone", "read ahead", "a user's"):
        found = [result[name] for result in results(four, "streams", 4)]
        for epoch in range(2):
            parts = [epochs[epoch] for epochs, _, _ in found]
            assert [len(part) for part in parts] == [5, 5, 5, 5]  # of 23: three ranks had a sixth
            assert len({*itertools.chain(*parts)}) == 20
        assert [len(limited) for _, limited, _ in found] == [5, 5, 5, 5]
    assert [result["by hand"] for result in results(four, "streams", 4)] == [[0, 1, 2, 3, 4]] * 4


def test_ranks_share_the_seed_of_rank_0_and_shuffle_their_own_part_by_their_own(four):
    found = results(four, "streams", 4)
    seeds = SeedGenerator(0)  # the others were given 1, 2, 3
    for epoch in range(2):
        seeds.join(seeds.generate_shared_seed(), 0)
        numbers = list(
            set_graph_random_seed(IterableWrapper(range(23)).shuffle(buffer_size=23).sharding_filter(), seeds)
        )
        assert [result["alone"][0][epoch] for result in found] == [numbers[rank:20:4] for rank in range(4)]
    own = [result["shuffled after sharding"] for result in found]
    assert all(sorted(part) == list(range(16)) for part in own)
    assert len({*map(tuple, own)}) == 4


def test_a_sharding_filter_knows_which_rank_of_how_many_it_is(four):
    found = [result["read ahead"][2] for result in results(four, "streams", 4)]
    assert found == [[4, 0], [4, 1], [4, 2], [4, 3]]


@pytest.mark.parametrize("name", ranks.STREAMS)
def test_a_stream_goes_on_at_each_ranks_own_place(two, name):
    for rank, result in enumerate(results(two, "resuming", 2)):
        delivered, (begun, ended), again, ought = result[name]
        assert begun[:2] == ended[:2] == [rank, 2]
        assert begun[2] is not None
        assert ended[2] is None  # also on rank 0, which had a twelfth item
        assert again == ought
        assert delivered == (23 if name == "by hand" else 11)


def test_ranks_refuse_places_of_other_ranks_and_places_that_are_not_one(two):
    for rank, found in enumerate(results(two, "resuming", 2)):
        kind, text = found["another rank's"]
        assert kind == "StateMismatchError"
        assert f"rank: saved {1 - rank}, here {rank}" in text
        kind, text = found["of four"]
        assert kind == "StateMismatchError"
        assert "ranks: saved 4, here 2" in text
        kind, text = found["three and two"]
        assert kind == "StateMismatchError"
        assert text.splitlines()[1:] == ["  saved.items: 3 on rank 0, 2 on rank 1"]
        kind, text = found["one begins"]
        assert kind == "StateMismatchError"
        assert "from a state: false on rank 0, true on rank 1" in text
        assert "saved.items: 0 on rank 0, 3 on rank 1" in text
        assert found["none"] == ["nothing", ""]


def test_signal_handlers_run_while_a_rank_waits_for_others(four):
    assert results(four, "signalled", 4) == [["nothing", ""]] * 4


def test_ranks_that_do_not_answer_in_time_are_named(four):
    *waited, late = results(four, "silent", 4)
    for kind, text, *_ in waited:
        assert kind == "RankError"
        assert text.startswith("rank 3 of 4 did not answer within 3 s")
    for _, _, kind, text in waited[:2]:  # a loader that only ranks 0 and 1 made
        assert kind == "RankError"
        assert text.startswith("ranks 2–3 of 4 did not answer within 3 s")
    assert late[0] == "RankError"
    assert "later than within 3 s" in late[1]


def test_a_rank_that_was_killed_is_named_at_once_and_not_after_the_timeout(two):
    kind, text, place = json.loads((two / "gone-0.json").read_text())
    assert kind == "RankError"
    assert text.startswith("rank 1 of 2 did not answer")
    assert not (two / "gone-1.json").exists()
    assert place["items"] == place["place"]["shards"][0]["items"] == 1  # the second was taken, and is still to come


# A rank dies, and fewer go on ----------------------------------------------------------------------------


def test_after_the_death_of_a_rank_fewer_go_on_at_the_right_sample(tmp_path):
    folder, log, port = with_token_files(tmp_path), tmp_path / "elastic.log", free_port()
    conf = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    command = [*TORCHRUN, "--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=9", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic", "--monitor-interval=0.1"]
    agents = []
    try:
        with log.open("w") as out:
            for number in range(4):
                host = f"--rdzv-conf={conf}{str(number == 0).lower()}"
                arguments = [host, str(SCRIPT), str(folder), "training"]
                agents.append(subprocess.Popen([*command, *arguments], env=ENVIRONMENT, stdout=out, stderr=out))
        state = folder / "state.json"
        until(lambda: saved(state)["loader"]["step"] == 5 and saved(state)["world"] == 4, log)
        pids = [path.read_text().split() for path in folder.glob("pid-*-of-4")]
        worker, agent = next((int(a), int(b)) for a, b, _ in pids if int(b) != agents[0].pid)  # 0 keeps the rendezvous
        os.kill(agent, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        (folder / "killed").touch()
        codes = dict(zip([process.pid for process in agents], finished(agents, log), strict=True))
    finally:
        for process in agents:
            process.kill()
            process.wait()
    assert codes.pop(agent) == -signal.SIGKILL
    assert {*codes.values()} == {0}
    whole = in_one_process(folder, 12)
    made: dict[tuple[int, str, int], list[Any]] = {}
    for path in folder.glob("step-*.json"):
        _, step, met, _rank, _, world = path.stem.split("-")
        made.setdefault((int(step), met, int(world)), []).extend(json.loads(path.read_text()))
    complete = {(step, world) for (step, _, world), rows in made.items() if sorted(rows) == whole[step]}
    assert (4, 4) in complete  # the four saved what came before step 5
    assert {step for step, world in complete if world < 4} >= set(range(5, 12))
    assert {step for step, _ in complete} == set(range(12))
    began = [path for path in folder.glob("pid-*") if path.stat().st_mtime > (folder / "killed").stat().st_mtime]
    assert min(int(path.read_text().split()[2]) for path in began) == 5
    with DataLoader2(ranks.graph(folder)) as loader:
        assert saved(state)["loader"] == loader.state_dict(step=12)


def until(happened: Any, log: Path) -> None:
    deadline = time.monotonic() + WAIT
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited for {WAIT} s; {log.read_text()[-6000:]}")
        time.sleep(0.05)


def saved(state: Path) -> "dict[str, Any]":
    return json.loads(state.read_text()) if state.exists() else {"loader": {"step": -1}, "world": 0}


def test_a_checkpoint_that_merges_dicts_cannot_lose_a_part_of_the_journal_unnoticed(folder, tmp_path):
    loader = DataLoader2(ranks.graph(folder))
    loader.jump(steps=2)
    import torch.distributed.checkpoint as dcp

    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "dict", no_dist=True)
    with pytest.raises(StateError, match=r"lost on the way.*json\.dumps\(state\)"):
        dcp.load({"loader": DataLoader2(ranks.graph(folder))}, checkpoint_id=tmp_path / "dict", no_dist=True)
    dcp.save({"loader": json.dumps(loader.state_dict())}, checkpoint_id=tmp_path / "text", no_dist=True)
    saved = {"loader": ""}
    dcp.load(saved, checkpoint_id=tmp_path / "text", no_dist=True)
    assert DataLoader2.from_state(saved["loader"], ranks.graph(folder)).journal == loader.journal


# Without a process group --------------------------------------------------------------------------------


def test_without_a_process_group_the_error_says_what_would_do(folder):
    for graph in (ranks.graph(folder), IterableWrapper(range(3))):
        loader = DataLoader2(graph, reading_service=DistributedReadingService())
        with pytest.raises(LoaderError, match=r"init_process_group\(\.\.\.\) before the first"):
            iter(loader)
    with pytest.raises(LoaderError, match="init_process_group"):
        next(iter(IterableWrapper(range(3)).fullsync()))


def test_without_a_process_group_a_stream_has_no_state_as_its_rank_is_not_known():
    stream = IterableWrapper(range(3))
    for graph, service in (
        (stream, DistributedReadingService()),
        (stream, SequentialReadingService(DistributedReadingService(), InProcessReadingService())),
        (stream.fullsync(), InProcessReadingService()),
    ):
        loader = DataLoader2(graph, reading_service=service)
        state = DataLoader2(stream).state_dict()
        for call in (loader.state_dict, lambda loader=loader, state=state: loader.load_state_dict(state)):
            with pytest.raises(LoaderError, match="init_process_group"):
                call()


def test_fullsync_stands_over_streams_only(folder):
    with pytest.raises(AttributeError, match="no attribute 'fullsync'"):
        ranks.graph(folder).fullsync()


def test_a_timeout_is_a_number_of_seconds():
    for wrong, error in {0: ConfigurationError, float("inf"): ConfigurationError, "1": ArgumentTypeError}.items():
        with pytest.raises(error, match="timeout must be"):
            DistributedReadingService(timeout=wrong)
        with pytest.raises(error, match="timeout must be"):
            IterableWrapper(range(3)).fullsync(timeout=wrong)


def test_ranks_are_told_in_spans():
    assert [ranks_text([3]), ranks_text([0, 1, 2, 5])] == ["rank 3", "ranks 0–2, 5"]
