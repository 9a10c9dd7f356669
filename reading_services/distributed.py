"""The service for a graph that runs on all ranks of torch.distributed.

An indexed graph is dealt by its own `shard_ranks`, so here it is only checked: that its topology is that of the
processes, and before each first item that all ranks stand at the same place of the same run. A stream is sharded,
shares rank 0's seed, and ends on all ranks together (`fullsync`). Of a stream each rank saves its own place:

    {"seed": 5, "items": 1000, "place": {"shards": [{"items": 1000, …}]}}

seed: the epoch's, which all ranks have from rank 0; null: none has begun. items: how many every rank has delivered of
it. place: where the stream stands on this rank; null: another service runs it, and knows.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ..adapters.surgery import list_dps, traverse_dps
from ..datapipes._torch import DataPipe, IterDataPipe, MapDataPipe, apply_sharding
from ..datapipes.collate import CausalLMCollator
from ..datapipes.core import IndexedDataPipe, nodes_of
from ..datapipes.deadline import as_seconds
from ..datapipes.errors import LoaderError, LoaderWarning, StateError, StateMismatchError, TopologyError
from ..datapipes.full_sync import FullSync
from ..datapipes.items import items_of
from ..datapipes.names import named_nodes
from ..datapipes.rank_group import RankGroup, rank_and_ranks, ranks_text
from ..datapipes.rank_zero import warn
from ..datapipes.shard import RankSharder
from ..datapipes.topology import AXES, Topology
from .in_process import Counted, InProcessReadingService
from .interface import CheckpointableReadingServiceInterface
from .parse import check_keys, check_number, parse_json
from .seeds import SeedGenerator, set_graph_random_seed
from .stream_state import MOST_BYTES, canonical

__all__ = ["DistributedReadingService"]

MOST_SHOWN = 4
"""Different answers that a message lists, a field."""


class DistributedReadingService(CheckpointableReadingServiceInterface):
    """Runs the graph in each rank's main process, or hands on what a later member of a SequentialReadingService makes.

    Every rank iterates, loads states and shuts down alike. The ranks talk over a gloo group of their own. A stream goes
    on from a state on the same number of ranks, each with its own.

    Args:
        timeout: seconds after which a rank that does not answer is an error.

    Raises, at the first iteration: LoaderError without an initialised process group, TopologyError on all ranks
    where a topology does not fit the processes or an indexed graph has no `shard_ranks`; at each `iter()`
    StateMismatchError on all ranks where they do not stand at the same place of the same run; RankError, naming
    them, where ranks do not answer.
    """

    def __init__(self, timeout: float = 1800) -> None:
        self.timeout = as_seconds("timeout", timeout)
        self._ranks: RankGroup | None = None
        self._was: tuple[int, int] | None = None  # rank and ranks, also after the end
        self._set_up(None)

    def _set_up(self, stream: "FullSync | None") -> None:
        self._stream = stream
        self._runner: InProcessReadingService | None = None  # of a stream that no other member runs
        self._loaded: dict[str, Any] | None = None  # where the next iteration goes on
        self._seed: int | None = None
        self._items = Counted(iter(()))

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank. Raises LoaderError without an initialised process group."""
        return self._where()[0]

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """How many there are. Raises LoaderError without an initialised process group."""
        return self._where()[1]

    def _where(self) -> "tuple[int, int]":
        if self._was is None or (self._ranks is None and dist.is_initialized()):  # of a loader that is still to begin
            return rank_and_ranks()
        return self._was

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        self.finalize()  # of a loader before this one
        self._set_up(None)
        ranks = self._ranks = RankGroup(self.timeout)
        self._was = ranks.rank, ranks.size
        if isinstance(datapipe, IndexedDataPipe):
            _check_topologies(datapipe, ranks)
            return datapipe
        graph = traverse_dps(datapipe)
        if ranks.size > 1 and not any(hasattr(node, "apply_sharding") for node in list_dps(graph)):
            warn(
                "this stream has no sharding_filter, so each rank delivers all of its items; "
                ".sharding_filter() behind what is shuffled would share them out",
                LoaderWarning,
                stacklevel=2,
            )
        apply_sharding(datapipe, ranks.size, ranks.rank, SHARDING_PRIORITIES.DISTRIBUTED)
        synced = datapipe if isinstance(datapipe, FullSync) else FullSync(datapipe, self.timeout)
        self._set_up(synced.over(ranks))
        return synced

    def initialize_iteration(
        self,
        seed_generator: SeedGenerator,
        iter_reset_fn: "Callable[[DataPipe], DataPipe] | None" = None,
    ) -> "Callable[[DataPipe], DataPipe] | None":
        if self._stream is not None:
            ranks = self._group()
            self._seed = ranks.gather(seed_generator.generate_shared_seed())[0]
            seed_generator.join(self._seed, ranks.rank)
            set_graph_random_seed(self._stream, seed_generator)  # a service below, if there is one, seeds again
        return iter_reset_fn

    def agree(self, standing: "Callable[[], dict[str, Any]]") -> None:
        ranks = self._group()
        problem: Exception | None = None
        fields: dict[str, str] = {}
        try:
            loaded = self._loaded or {"items": 0, "seed": "of a new epoch"}
            place = {} if self._stream is None else {"saved": {name: loaded[name] for name in ("items", "seed")}}
            fields = _fields(standing() | place)
        except Exception as error:  # the others must not wait for an answer
            problem = error
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
        answers = ranks.gather([digest, "" if problem is None else f"{type(problem).__name__}: {problem}"])
        if problem is not None:
            raise problem
        for rank, (_, failed) in enumerate(answers):
            if failed:
                raise StateMismatchError(f"rank {rank} could not say where it stands: {failed}")
        if any(other != digest for other, _ in answers):
            differ = _differences(ranks.gather(fields))
            raise StateMismatchError(
                "the ranks do not stand at the same place of the same run, so their items would not make up its "
                "steps; the same graph, state and changes on all of them would do:\n  " + "\n  ".join(differ)
            )

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        if self._stream is None:
            return items_of(datapipe)
        place = self._loaded
        if not isinstance(datapipe, (IterDataPipe, MapDataPipe)):  # what another member makes of it
            self._runner, items = None, items_of(datapipe)
        else:
            if place is not None and place["items"] and place["place"] is None:
                raise StateMismatchError(
                    "this state was saved where another member of the SequentialReadingService ran the stream; the "
                    "same members would do"
                )
            runner = self._runner = self._runner or InProcessReadingService()
            if place is not None and place["place"] is not None:
                runner.restore(datapipe, canonical(place["place"]))
            items = runner.iterate(datapipe)
        self._items, self._loaded = Counted(items), None
        self._items.delivered = 0 if place is None else place["items"]
        return self._items

    def finalize_iteration(self) -> None:
        if self._runner is not None:
            self._runner.finalize_iteration()

    def finalize(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def checkpoint(self) -> bytes:
        """Of a stream this rank's place. Of an indexed graph nothing: where it stands is the loader's to save, and
        does not depend on the ranks.
        """
        if self._stream is None:
            return b""
        place = self._loaded
        if place is None:
            where = None if self._runner is None else json.loads(self._runner.checkpoint())
            place = {"seed": self._seed, "items": self._items.delivered, "place": where}
        return canonical(place)

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        if self._ranks is None or all(node is not self._stream for node, _ in named_nodes(datapipe)):
            datapipe = self.initialize(datapipe)
        if self._stream is not None:
            self._loaded = _parse_place(serialized_state)
        return datapipe

    def _group(self) -> RankGroup:
        if self._ranks is None:
            raise LoaderError("DistributedReadingService was not initialized, or was finalized")
        return self._ranks


def _parse_place(serialized_state: bytes) -> "dict[str, Any]":
    place = parse_json(serialized_state, MOST_BYTES, floats=True)
    if not isinstance(place, dict):
        raise StateError("the place of a stream on a rank is an object")
    check_keys("the place of a stream on a rank", place, {"seed", "items", "place"})
    check_number("items", place["items"])
    if place["seed"] is not None:
        check_number("seed", place["seed"])
    return place


# Topologies ----------------------------------------------------------------------------------------------


def _check_topologies(graph: IndexedDataPipe, ranks: RankGroup) -> None:
    """Raises TopologyError, on all ranks, unless each has a place of its own in one topology of all of them."""
    topologies = _topologies(graph)
    places = [[[getattr(t, f"{axis}_{what}") for axis in AXES] for what in ("size", "rank")] for t in topologies]
    answers = ranks.gather([places, _misfit(topologies, ranks.size)])
    wrong = [rank for rank, (_, misfit) in enumerate(answers) if misfit]
    if wrong:
        raise TopologyError(f"{ranks_text(wrong)}: {answers[wrong[0]][1]}")
    if not topologies:
        return
    layouts = [json.dumps([sizes for sizes, _ in found]) for found, _ in answers]
    if len({*layouts}) > 1:
        raise TopologyError(
            f"the ranks have different topologies (sizes of {', '.join(AXES)}): {_by_value(layouts)}; the same on all "
            "of them would do"
        )
    held: dict[str, list[int]] = {}
    for rank, (found, _) in enumerate(answers):
        held.setdefault(json.dumps(found), []).append(rank)
    for where, holders in held.items():
        if len(holders) > 1:
            place = ", ".join(f"{axis}_rank {at}" for axis, at in zip(AXES, json.loads(where)[0][1], strict=True))
            raise TopologyError(f"{ranks_text(holders)} have one place in the topology ({place}); each needs its own")


def _topologies(graph: IndexedDataPipe) -> "list[Topology]":
    """What the graph says of this process's place: its collators where they are told, else its sharders."""
    found: list[Topology] = []
    told: set[int] = set()
    for node in nodes_of(graph):  # what is above comes first
        if isinstance(node, CausalLMCollator) and node.given_topology is not None:
            found.append(node.given_topology)
            told |= {id(below) for below in nodes_of(node)}
        elif isinstance(node, RankSharder) and id(node) not in told:
            found.append(node.topology)
    return found


def _misfit(topologies: "list[Topology]", world: int) -> str:
    """Why these topologies cannot be those of so many processes; empty where they can."""
    if not topologies and world > 1:
        return (
            f"the graph deals nothing to its {world} ranks, so each would deliver every sample; "
            f".shard_ranks(Topology(dp_rank=dist.get_rank(), dp_size={world})) before batch_samples would do, or "
            f"Topology(tp_rank=dist.get_rank(), tp_size={world}) where all shall see the same samples"
        )
    for topology in topologies:
        if topology.processes != world:
            return (
                f"the topology ({topology}) is one of {topology.processes} processes, and torch.distributed has "
                f"{world}; sizes of {', '.join(AXES)} whose product is {world} would do"
            )
    return ""


# Where the ranks stand -----------------------------------------------------------------------------------


def _fields(standing: "dict[str, Any]") -> "dict[str, str]":
    """{"journal.weights": "[[…]]"}: what stands at each name of the first two levels; long values by a digest."""
    out = {}
    for name, value in standing.items():
        inner = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        for key, said in inner.items():
            text = said if isinstance(said, str) else json.dumps(said, sort_keys=True)
            if len(text) > 120:
                text = f"{text[:90]} … #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
            out[key] = text
    return out


def _differences(fields: "list[dict[str, str]]") -> "list[str]":
    """A line for each field that is not the same on all ranks."""
    names = sorted({name for found in fields for name in found})
    said = {name: [found.get(name, "not there") for found in fields] for name in names}
    return [f"{name}: {_by_value(values)}" for name, values in said.items() if len({*values}) > 1]


def _by_value(values: "list[str]") -> str:
    """ "64 on ranks 0–2, 128 on rank 3", the commonest first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    commonest = sorted(ranks.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    shown = [f"{value} on {ranks_text(where)}" for value, where in commonest[:MOST_SHOWN]]
    return ", ".join([*shown, *([f"… {len(ranks)} in all"] if len(ranks) > MOST_SHOWN else [])])
