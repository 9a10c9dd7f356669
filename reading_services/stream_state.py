"""What a checkpoint holds of a stream, and how it is read back; StreamRun is where a loader's stream stands.

    {"format": "tokenpipe.stream", "version": 1, "rank": 0, "ranks": 1, "workers": 0,
     "graph": {"pack_sequences": "9f0c…", "tokenize": "77a1…", …},
     "seeds": {"key": 7, "role": "main", "shared": 0, "own": 3}, "seeded": true, "seeds_after": null,
     "service": {"shards": [{"items": 1000, …}]}}

graph: each node by its class, settings, contents and inputs, and a few digits of each of its files (file_tags.py); of
more than 32 nodes one digest, "#". seeds: the seed generator at the beginning of the epoch that goes on, or comes next;
null: a new one, drawn from torch's generator. seeded: whether later epochs go on from it; seeds_after: or from another
one, which `seed()` set in the meantime.
service: what the reading service's `checkpoint()` gave, as JSON where that is what it was, else in base64; null:
the place is between two epochs.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..datapipes._torch import DataPipe
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import LoaderError, StateError, StateMismatchError
from ..datapipes.file_tags import FINGERPRINT, file_tags, other_files
from ..datapipes.formats import TokenLayout
from ..datapipes.full_sync import FullSync
from ..datapipes.names import inputs_of, named_nodes, node_names
from ..datapipes.rank_group import rank_and_ranks
from ..datapipes.streaming.base import StreamingDataPipe, as_plain
from ..datapipes.streaming.shard import kind_of
from .interface import CheckpointableReadingServiceInterface, ReadingServiceInterface
from .parse import check_keys, check_number, parse_json
from .seeds import SeedGenerator

__all__ = ["FORMAT", "MOST_BYTES", "StreamRun", "StreamState", "canonical", "parse_stream_state"]

FORMAT = "tokenpipe.stream"
MOST_BYTES = 16 * 1024 * 1024  # a place may hold what is left of a long document, for each worker
MOST_NAMED = 32


def canonical(value: Any) -> bytes:
    """A value as JSON, always in the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True)
class StreamState:
    """A parsed state; see the top of this file."""

    rank: int
    ranks: int
    workers: int
    graph: "dict[str, str]"
    seeds: "dict[str, Any] | None"
    seeded: bool
    seeds_after: "dict[str, Any] | None"
    service: Any

    def as_json(self) -> "dict[str, Any]":
        """The state as plain dicts, lists and values. Raises StateError where it is too large."""
        state = {"format": FORMAT, "version": 1, **vars(self)}
        if (size := len(canonical(state))) > MOST_BYTES:
            raise StateError(f"the state of this stream has {size} bytes; at most {MOST_BYTES} are saved")
        return state

    @property
    def service_bytes(self) -> "bytes | None":
        """What the service's checkpoint() gave."""
        if self.service is None:
            return None
        return base64.b64decode(self.service) if isinstance(self.service, str) else canonical(self.service)


def parse_stream_state(value: Any) -> StreamState:
    """A state from a dict, or from JSON as str or bytes. Raises StateError for anything else."""
    if type(value) in (str, bytes):
        value = parse_json(value, MOST_BYTES, floats=True)
    value = as_plain("the state", value)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StateError(f"not the state of a stream: its format is not {FORMAT!r}")
    if type(value.get("version")) is not int or value["version"] != 1:
        raise StateError(f"state version {value.get('version')!r:.40}; this tokenpipe reads version 1 of a stream's")
    check_keys("state", value, {"format", "version", *StreamState.__dataclass_fields__}, {"noted"})
    if len(canonical(value)) > MOST_BYTES:
        raise StateError(f"the state has more than {MOST_BYTES} bytes, which no state has")
    state = StreamState(**{name: value[name] for name in StreamState.__dataclass_fields__})
    for name in ("rank", "ranks", "workers"):
        check_number(name, value[name])
    if state.rank >= state.ranks:
        raise StateError(f"there is no rank {state.rank} of {state.ranks}")
    if not isinstance(state.graph, dict) or not all(isinstance(v, str) for v in state.graph.values()):
        raise StateError("graph must be an object of strings")
    if type(state.seeded) is not bool:
        raise StateError("seeded is true or false")
    for seeds in (state.seeds, state.seeds_after):
        if seeds is not None:
            SeedGenerator.from_state(seeds)
    if state.service is not None and not isinstance(state.service, (str, dict)):
        raise StateError("service must be an object, a string or null")
    if state.seeded and state.seeds is None:
        raise StateError("a seeded stream has seeds")
    if state.service is not None and state.seeds is None:
        raise StateError("a place inside an epoch has that epoch's seeds")
    try:
        _ = state.service_bytes
    except ValueError as error:
        raise StateError(f"service is no base64: {error}") from error
    return state


class StreamRun:
    """Where a stream stands, for its loader: which epoch, with which seeds, and what a resume gives its service.

    Args:
        graph: the loader's own, before the service has seen it.
    """

    def __init__(self, graph: DataPipe, service: ReadingServiceInterface) -> None:
        self._graph, self._service = graph, service
        self._nodes: list[tuple[str, DataPipe, list[Any]]] | None = None
        self._generator: SeedGenerator | None = None  # of the epoch that goes on
        self._seeds: dict[str, Any] | None = None  # as that was at the epoch's beginning
        self.pending: bytes | None = None  # the place at which the next iteration goes on
        self.through = True  # the place is between two epochs
        self._mark = object()  # on the service that runs this stream, and no other since

    def look(self) -> None:
        """Takes down what the graph is, before a service rewrites it."""
        if self._nodes is None and isinstance(self._service, CheckpointableReadingServiceInterface):
            names = node_names(self._graph)
            self._nodes = [
                (name, node, [kind_of(node).__name__, [names[id(n)] for n in inputs_of(node)], _plain_settings(node)])
                for node, name in named_nodes(self._graph)
            ]

    def begin(self, generator: SeedGenerator, seeded: bool) -> SeedGenerator:
        """The seed generator of an epoch that begins, or goes on after a resume."""
        if self.pending is not None and self._generator is not None:
            generator = self._generator
        elif not seeded:
            generator = SeedGenerator()
        self._generator, self._seeds = generator, generator.state_dict()
        return generator

    def standing(self, graph: DataPipe) -> "dict[str, Any]":
        """What is the same on all ranks, when an epoch is to begin or to go on: `graph` is what will run."""
        assert self._generator is not None  # begin() was called
        return {
            "nodes": [name for _, name in named_nodes(graph)],
            "seed": self._generator.initial_seed,
            "from a state": self.pending is not None,
            "workers": self._service.num_workers,
        }

    def begun(self) -> None:
        """The epoch's items are there: a loaded place is taken, or a new epoch has begun."""
        self.pending, self.through = None, False
        vars(self._service)["_runs"] = self._mark

    def state_dict(self, generator: SeedGenerator, seeded: bool) -> "dict[str, Any]":
        """The state now; `generator` is the loader's, for the epochs to come."""
        service = self._checkpointable("state_dict")
        seeds, after, place = (generator.state_dict() if seeded else None), None, self.pending
        if place is None and not self.through:
            if vars(service).get("_runs") is not self._mark:
                raise LoaderError("this reading service has run another loader's stream since: give each its own")
            place = service.checkpoint()
            if not isinstance(place, bytes):
                raise LoaderError(f"{type(service).__name__}.checkpoint() gave no bytes but {place!r:.80}")
        if place is not None:
            seeds, after = self._seeds, seeds if generator is not self._generator else None
        return StreamState(*self._layout(), self._identity(), seeds, seeded, after, _embedded(place)).as_json()

    def load_state_dict(self, value: Any) -> "tuple[SeedGenerator, bool]":
        """Takes a state's place; gives the loader's generator and whether it is seeded.

        Raises StateError, StateMismatchError with every difference.
        """
        self._checkpointable("load_state_dict")
        state = parse_stream_state(value)
        found = [
            f"{name}: saved {a}, here {b}"
            for name, a, b in zip(
                ("rank", "ranks", "workers"), (state.rank, state.ranks, state.workers), self._layout(), strict=True
            )
            if a != b
        ]
        if found:
            found.append("(a stream goes on exactly on the same ranks and workers alone)")
        here = self._identity()
        for name in sorted(state.graph.keys() | here.keys()):
            a, b = state.graph.get(name), here.get(name)
            if a is None or b is None:
                found.append(f"node {name}: {'not saved' if a is None else 'not here'}")
            elif a[:FINGERPRINT] != b[:FINGERPRINT]:
                found.append(f"node {name}: other settings or data{self._other_files(name, a, b)}")
        if found:
            raise StateMismatchError("this state belongs to another stream:\n  " + "\n  ".join(found[:40]))
        generator = SeedGenerator(0) if state.seeds is None else SeedGenerator.from_state(state.seeds)
        self.pending = state.service_bytes
        self.through = self.pending is None
        self._generator, self._seeds = generator, state.seeds
        return SeedGenerator.from_state(state.seeds_after) if state.seeds_after else generator, state.seeded

    def _other_files(self, name: str, saved: str, here: str) -> str:
        files = next((self._files_of(node) for known, node, _ in self._nodes or () if known == name), ())
        if not files or (len(files) > 1 and saved[FINGERPRINT:] == here[FINGERPRINT:]):
            return ""
        return f" ({other_files(saved, [file.content for file in files], [file.path for file in files])})"

    @staticmethod
    def _files_of(node: DataPipe) -> "Sequence[TokenLayout]":
        return node.content_files if isinstance(node, StreamingDataPipe) else ()

    def _checkpointable(self, what: str) -> CheckpointableReadingServiceInterface:
        if not isinstance(self._service, CheckpointableReadingServiceInterface):
            raise LoaderError(
                f"{what} of a stream needs a reading service that knows its place "
                f"(CheckpointableReadingServiceInterface), which {type(self._service).__name__} is not"
            )
        return self._service

    def _layout(self) -> "tuple[int, int, int]":
        service, by_hand = self._service, any(isinstance(node, FullSync) for node, _ in named_nodes(self._graph))
        return *(rank_and_ranks() if by_hand else (service.rank, service.ranks)), service.num_workers

    def _identity(self) -> "dict[str, str]":
        self.look()
        found = {}
        for name, node, what in self._nodes or ():
            settings = node.settings if isinstance(node, (StreamingDataPipe, IndexedDataPipe)) else {}
            content = node.content if isinstance(node, StreamingDataPipe) else ""
            found[name] = _digest(json.dumps([*what, settings, content], sort_keys=True, default=str))
        if len(found) > MOST_NAMED:
            return {"#": _digest(canonical(found).decode())}
        files = {name: self._files_of(node) for name, node, _ in self._nodes or ()}
        reading = sum(map(bool, files.values()))
        return {name: found[name] + file_tags([file.content for file in files[name]], reading) for name in found}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT // 2).hexdigest()


def _plain_settings(node: DataPipe) -> "dict[str, Any]":
    """What torch's nodes were built with, as far as it is a number: batch_size, buffer_size, drop_last, …"""
    if not kind_of(node).__module__.startswith("torch."):
        return {}
    place = getattr(type(node), "initial_state", {})
    return {
        name: value
        for name, value in vars(node).items()
        if type(value) in (int, bool) and (name[0] != "_" or name == "_enabled") and name not in place
    }


def _embedded(place: "bytes | None") -> Any:
    if place is None:
        return None
    try:
        value = as_plain("", json.loads(place))
        if isinstance(value, dict) and canonical(value) == place:
            return value
    except (ValueError, RecursionError):
        pass
    return base64.b64encode(place).decode()
