"""What a rank does in test_distributed.py, under torchrun: ranks.py FOLDER SCENARIO…

Each scenario writes what this rank saw to FOLDER/SCENARIO-RANK.json.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data.datapipes.iter import IterableWrapper

from tokenpipe.datapipes import FullSync, IndexedDataPipe, TokenReader, Topology, rank_group, read_manifest
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.reading_services import (
    DataLoader2,
    DistributedReadingService,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)

GLOBAL_BATCH = 12
SAVED = 2 * GLOBAL_BATCH + 4  # inside step 2
"""The sample at which scenario `indexed` saves."""


def order(folder: Path, seed: int = 7) -> IndexedDataPipe:
    """A blend of two sources; each file holds uint16 tokens."""
    prose = TokenReader(folder / "prose.bin", dtype="uint16", name="prose").slice_sequences(8).permute(seed=seed)
    code = TokenReader(folder / "code.bin", dtype="uint16", name="code").slice_sequences(8).permute(seed=seed)
    return prose.blend(code, weights={"prose": 0.8, "code": 0.2})


def graph(folder: Path, dp_rank: int = 0, dp_size: int = 1, seed: int = 7, micro: int = 1) -> IndexedDataPipe:
    sharded = order(folder, seed).shard_ranks(Topology(dp_rank, dp_size), seed=7)
    return sharded.batch_samples(micro, global_batch_size=GLOBAL_BATCH).collate_causal_lm(sample_numbers=True)


def rows(batch: "dict[str, torch.Tensor]") -> "list[list[int]]":
    """[sample number, its tokens…] of each row."""
    return torch.cat([batch["sample_numbers"][:, None], batch["input_ids"], batch["label_ids"]], 1).tolist()


def steps_of(loader: DataLoader2, steps: int) -> "dict[int, list[list[int]]]":
    """{step: this rank's rows of it} up to step `steps`, from where the loader stands."""
    seen: dict[int, list[list[int]]] = {}
    items = iter(loader)
    while (step := loader.step) < steps:
        seen.setdefault(step, []).extend(rows(next(items)))
    return seen


def caught(do: Any) -> "list[str]":
    """[type, text] of what is raised."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def change(loader: DataLoader2) -> None:
    loader.update_weights({"prose": 0.5, "code": 0.5})


# Scenarios -----------------------------------------------------------------------------------------------


def indexed(folder: Path, rank: int, world: int) -> Any:
    """Three steps with a change after the first, saved in the middle of the third, then on to step 5."""
    with DataLoader2(graph(folder, rank, world), reading_service=DistributedReadingService()) as loader:
        seen = steps_of(loader, 1)
        change(loader)
        seen |= steps_of(loader, 2)
        for batch in itertools.islice(loader, (SAVED - 2 * GLOBAL_BATCH) // world):
            seen.setdefault(2, []).extend(rows(batch))
        assert loader.consumed_samples == SAVED
        import torch.distributed.checkpoint as dcp  # slow to import, and not every scenario needs it

        dcp.save({"loader": json.dumps(loader.state_dict())}, checkpoint_id=folder / "dcp")
        for step, more in steps_of(loader, 5).items():
            seen.setdefault(step, []).extend(more)
        return seen


def resumed(folder: Path, rank: int, world: int) -> Any:
    """Goes on from what `indexed` saved, up to step 5."""
    import torch.distributed.checkpoint as dcp

    saved = {"loader": ""}
    dcp.load(saved, checkpoint_id=folder / "dcp")
    with DataLoader2(graph(folder, rank, world), reading_service=DistributedReadingService()) as loader:
        loader.load_state_dict(saved["loader"])
        return steps_of(loader, 5)


def workers(folder: Path, rank: int, world: int) -> Any:
    """Two worker processes a rank, one of which is killed after the first step."""
    service = MultiProcessingReadingService(num_workers=2)
    both = SequentialReadingService(DistributedReadingService(), service)
    with DataLoader2(graph(folder, rank, world), reading_service=both) as loader:
        seen = steps_of(loader, 1)
        assert both.num_workers == len(service.worker_pids) == 2
        os.kill(service.worker_pids[rank], 9)
        change(loader)
        return seen | steps_of(loader, 5)


def disagreeing(folder: Path, rank: int, world: int) -> Any:
    """Every way in which ranks may not fit each other: what each rank is told."""
    found = {}

    def begin(name: str, graph: IndexedDataPipe, prepare: Any = lambda loader: None) -> None:
        with DataLoader2(graph, reading_service=DistributedReadingService(timeout=60)) as loader:
            prepare(loader)
            found[name] = caught(lambda: next(iter(loader)))

    def at_a_step_of_its_own(loader: DataLoader2) -> None:
        if rank == 2:
            loader.seek(3)

    def unlike_others(loader: DataLoader2) -> None:
        if rank in (1, 3):
            change(loader)

    begin("place", graph(folder, rank, world), at_a_step_of_its_own)
    begin("weights", graph(folder, rank, world), unlike_others)
    begin("seed", graph(folder, rank, world, seed=8 if rank == 3 else 7))
    begin("micro-batch", graph(folder, rank, world, micro=3 if rank == 0 else 1))
    begin("no sharder", order(folder).batch_samples(1))
    begin("too few", graph(folder, rank % 2, 2))
    begin("one place twice", graph(folder, min(rank, 2), world))
    layout = {"tp_rank": rank % 2, "tp_size": 2} if rank < 2 else {"cp_rank": rank % 2, "cp_size": 2}
    begin("axes", order(folder).shard_ranks(Topology(rank // 2, 2, **layout)).batch_samples(1))
    mine = folder / f"copy-{rank}"
    mine.mkdir()
    for file in ("prose.bin", "code.bin"):
        (mine / file).write_bytes((folder / file).read_bytes())

    def without_its_file(loader: DataLoader2) -> None:
        if rank == 1:
            (mine / "code.bin").unlink()

    begin("a file is gone", graph(mine, rank, world), without_its_file)
    begin("all is well", graph(folder, rank, world))
    with DataLoader2(graph(folder, rank, world), reading_service=DistributedReadingService()) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict(step=2 if rank == 0 else 3))
        found["loaded"] = caught(lambda: iter(loader))
        loader.load_state_dict(loader.state_dict(step=2))
        found["loaded alike"] = [rows(next(iter(loader)))[0][0]]
    return found


class Tail(ReadingServiceInterface):
    """A service of a user's own: notes what it is asked, and doubles each item."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def initialize(self, datapipe):
        self.asked.append("initialize")
        return datapipe

    def initialize_iteration(self, seed_generator):
        self.asked.append("iteration")

    def finalize(self):
        self.asked.append("finalize")


def streams(folder: Path, rank: int, world: int) -> Any:
    """23 numbers over the ranks, shuffled: each epoch's, an abandoned epoch, and one with a limit."""
    found: dict[str, Any] = {}
    for name, services in {
        "alone": (DistributedReadingService(),),
        "read ahead": (DistributedReadingService(), InProcessReadingService(prefetch_cnt=2)),
        "a user's": (DistributedReadingService(), Tail()),
    }.items():
        numbers = IterableWrapper(list(range(23))).shuffle(buffer_size=23).sharding_filter()
        with DataLoader2(numbers, reading_service=SequentialReadingService(*services)) as loader:
            loader.seed(rank)  # rank 0's is everybody's
            epochs = [list(loader) for _ in range(2)]
            next(iter(loader))  # left behind
            items = iter(loader)
            items.limit(3)
            limited = list(items)
            items.resume()
            limited += list(items)
            assert isinstance(loader.datapipe, FullSync)
            sharding = loader.datapipe.datapipe
            found[name] = [epochs, limited, [sharding.num_of_instances, sharding.instance_id]]
    ended: list[int] = []
    with DataLoader2(IterableWrapper(range(5 + rank)).fullsync(timeout=60)) as loader:
        ended += loader
    found["by hand"] = ended
    after = IterableWrapper(range(16 * world)).sharding_filter().shuffle(buffer_size=16)
    with DataLoader2(after, reading_service=DistributedReadingService()) as loader:
        loader.seed(3)
        found["shuffled after sharding"] = [number // world for number in loader]
    with DataLoader2(words(), reading_service=DistributedReadingService()) as loader:
        next(iter(loader))
        (folder / f"stream-{rank}-of-{world}.json").write_text(json.dumps(loader.state_dict()))
    return found


def words(shuffled: bool = True) -> IterDataPipe:
    """23 words, which no number of ranks shares out evenly; unshuffled, all nodes know their place."""
    numbers = IterableWrapper(list(range(23)))
    return (numbers.shuffle(buffer_size=23) if shuffled else numbers).sharding_filter().map(str)


STREAMS: "dict[str, tuple[Callable[[], IterDataPipe], Callable[[], ReadingServiceInterface]]]" = {
    "alone": (lambda: words(False), DistributedReadingService),
    "alone, replayed": (words, DistributedReadingService),
    "read ahead": (
        words,
        lambda: SequentialReadingService(DistributedReadingService(), InProcessReadingService(prefetch_cnt=2)),
    ),
    "a user's": (words, lambda: SequentialReadingService(DistributedReadingService(), Tail())),
    "by hand": (lambda: words(False).fullsync(timeout=60), InProcessReadingService),
}
"""name: (a stream, a service to run it)"""


def resuming(folder: Path, rank: int, world: int) -> Any:
    """Streams that are saved and go on: {name: [what comes after each place, what ought to]}, and what is refused."""
    found: dict[str, Any] = {}
    for name, (stream, service) in STREAMS.items():
        with DataLoader2(stream(), reading_service=service()) as loader:
            loader.seed(5 + rank)
            states, first, items = [], [], iter(loader)
            for word in itertools.chain([None], items):
                first += [word][word is None :]
                states.append(json.dumps(loader.state_dict()))
            states.append(json.dumps(loader.state_dict()))
            second, third = list(loader), list(loader)
            seen = [
                [json.loads(state)[key] for key in ("rank", "ranks", "service")] for state in (states[0], states[-1])
            ]
            again = []
            for at in (len(first), 3):  # in the loader that has iterated, and in another one
                loader.load_state_dict(states[at])
                again.append([list(loader), list(loader)])
        for state in (states[0], states[4], states[-1]):
            with DataLoader2.from_state(state, stream(), service()) as other:
                before = json.dumps(other.state_dict()) == state
                again.append([list(other), list(other), before])
        ought = [[[], second], [first[3:], second], [first, second, True], [first[4:], second, True]]
        found[name] = [len(first), seen, again, [*ought, [second, third, True]]]

    def refused(name: str, load: Any) -> None:
        with DataLoader2(words(), reading_service=DistributedReadingService(timeout=60)) as loader:
            found[name] = caught(lambda: (load(loader), iter(loader)))

    def swapped(loader: DataLoader2) -> None:
        states: list[Any] = [None] * world
        dist.all_gather_object(states, loader.state_dict())
        loader.load_state_dict(states[1 - rank])

    with DataLoader2(words(), reading_service=DistributedReadingService()) as loader:
        items = iter(loader)
        places = [json.dumps(loader.state_dict()) for _ in itertools.islice(items, 3)]
    refused("another rank's", swapped)
    refused("of four", lambda loader: loader.load_state_dict((folder / f"stream-{rank}-of-4.json").read_text()))
    refused("three and two", lambda loader: loader.load_state_dict(places[2 - rank]))
    refused("one begins", lambda loader: loader.load_state_dict(places[2]) if rank else None)
    refused("none", lambda loader: loader.load_state_dict(places[0]))
    return found


def signalled(folder: Path, rank: int, world: int) -> Any:
    """Rank 3 answers only after a handler of rank 0 has run, and rank 0 gets its signal while it waits for rank 3."""
    heard = folder / "heard"
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.touch())
    numbers = IterableWrapper(range(8)).sharding_filter()
    with DataLoader2(numbers, reading_service=DistributedReadingService(timeout=60)) as loader:
        items = iter(loader)
        if rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        while rank == 3 and not heard.exists():
            time.sleep(0.05)
        return caught(lambda: next(items))


def silent(folder: Path, rank: int, world: int) -> Any:
    """Rank 3 asks for no second item in time."""
    rank_group.LATEST = 1.0
    numbers = IterableWrapper(range(8)).sharding_filter()
    with DataLoader2(numbers, reading_service=DistributedReadingService(timeout=3)) as loader:
        items = iter(loader)
        next(items)
        if rank == 3:
            dist.barrier()  # with those that gave up
            return caught(lambda: next(items))
        found = caught(lambda: next(items))
        dist.barrier()
    if rank < 2:  # that there is a group at all is news to ranks 2 and 3
        found += caught(lambda: iter(DataLoader2(numbers, reading_service=DistributedReadingService(timeout=3))))
    return found


def gone(folder: Path, rank: int, world: int) -> Any:
    """Rank 1 is killed while rank 0 waits for it."""
    rank_group.LATEST = 1.0
    with DataLoader2(
        IterableWrapper(range(8)).sharding_filter(), reading_service=DistributedReadingService(timeout=300)
    ) as loader:
        items = iter(loader)
        next(items)
        if rank == 1:
            os.kill(os.getpid(), 9)
        error = caught(lambda: next(items))  # it has taken an item, and not delivered it
        return [*error, loader.state_dict()["service"]]


def training(folder: Path, rank: int, world: int) -> Any:
    """A training loop: resumes, and saves after each step; one record a step, rank and rendezvous."""
    met = os.environ["MASTER_PORT"]
    state = folder / "state.json"
    with DataLoader2(graph(folder, rank, world), reading_service=DistributedReadingService(timeout=60)) as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text())["loader"])
        pids = folder / f"pid-{met}-{rank}-of-{world}"
        pids.write_text(f"{os.getpid()} {os.getppid()} {loader.step}")
        items = iter(loader)
        while (step := loader.step) < 12:
            mine = [row for _ in range(loader.micro_batches(step)) for row in rows(next(items))]
            (folder / f"step-{step}-{met}-{rank}-of-{world}.json").write_text(json.dumps(mine))
            dist.all_reduce(torch.ones(1))  # the gradients
            if rank == 0:
                state.with_suffix(".new").write_text(json.dumps({"loader": loader.state_dict(), "world": world}))
                state.with_suffix(".new").replace(state)
            dist.barrier()
            while step == 4 and world == 4 and not (folder / "killed").exists():
                time.sleep(0.05)  # until the test has killed one of these four
    return "done"


LAYOUTS = {"dp2 × pp2 × tp2": ("pp", "dp", "tp"), "dp2 × cp2 × tp2": ("dp", "cp", "tp")}
CUTS = ("zigzag", "contiguous", "document", "whole")
ASKED = {"position_ids": True, "document_ids": True, "label_mask": True, "sample_numbers": True}


def laid_out(folder: Path, place: Topology, **collation: Any) -> IndexedDataPipe:
    """Rows of 16 tokens over documents of 3 to 30, of a file of our own and one that stores their ends beside it."""
    one, two = (TokenReader(folder / f"{name}.tok", name=name).slice_sequences(16).permute(seed=7) for name in "ab")
    dealt = place if collation.get("topology") is None else Topology(place.dp_rank, place.dp_size)
    sharded = one.blend(two, weights={"a": 0.7, "b": 0.3}).shard_ranks(dealt, seed=7)
    micro = GLOBAL_BATCH // place.dp_size // 2
    return sharded.batch_samples(micro, global_batch_size=GLOBAL_BATCH).collate_causal_lm(**collation)


def layouts(folder: Path, rank: int, world: int) -> Any:
    """Two steps of each layout: {layout: {cut: [this rank's place, its batches]}}."""
    found: dict[str, Any] = {}
    for layout, names in LAYOUTS.items():
        topology = Topology.from_mesh(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names))
        for cut in CUTS if topology.cp_size > 1 else CUTS[:1]:
            graph = laid_out(folder, topology, cp=cut, topology=topology if cut == "whole" else None, **ASKED)
            with DataLoader2(graph, reading_service=DistributedReadingService(timeout=60)) as loader:
                batches = [{k: v.tolist() for k, v in batch.items()} for batch in itertools.islice(loader, 4)]
                assert loader.consumed_samples == 2 * GLOBAL_BATCH
            found.setdefault(layout, {})[cut] = [vars(topology), batches]
    return found


def manifests(folder: Path, rank: int, world: int) -> Any:
    """What each rank reads of manifests, and which files it opens for that; errors; a group of two ranks."""
    opened: list[str] = []
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)

    def seen(name: str, group: Any = None) -> Any:
        opened.clear()
        manifest = read_manifest(folder / name, group)
        mine = [path for path in opened if path.startswith(str(folder))]
        return [TokenReader(manifest).content, [file.path for file in manifest.files], mine]

    pair = dist.new_group([1, 2], backend="gloo")
    return {
        "all": seen("all.manifest"),
        "missing": caught(lambda: seen("none.manifest")),
        "damaged": caught(lambda: seen("damaged.manifest")),
        "again": seen("all.manifest"),
        "pair": seen("all.manifest", pair) if rank else None,
        "outside": caught(lambda: seen("all.manifest", pair)) if not rank else None,
    }


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in scenarios:
        dist.barrier()
        result = globals()[name](folder, rank, world)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
    if scenarios[-1] == "gone":
        os._exit(0)  # there is nobody to wait for
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
