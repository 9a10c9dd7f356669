"""Graphs of each kind, and the adapters that keep a graph's items, for the tests of what adapters put around nodes."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from faulty import Runs
from tokenpipe.adapters import (
    Adapter,
    Autotune,
    CacheTimeout,
    Defaults,
    PinMemory,
    Placement,
    Prefetch,
    Profile,
    Retry,
    SkipErrors,
    Tap,
    Threads,
    Timeout,
    ToDevice,
    Trace,
)
from tokenpipe.datapipes import JsonLinesReader, StreamingDataPipe, Topology
from tokenpipe.datapipes.errors import GraphError
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService

# Nodes and functions of a user's ------------------------------------------------------------------------


def negated(item: Any) -> Any:
    return -item


def is_odd(item: int) -> bool:
    return item % 2 == 1


def by_three(item: int) -> int:
    return item % 3


def unlabelled(batch: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    return {name: value for name, value in batch.items() if name != "label_ids"}


def ignored(item: Any) -> None:
    """What a tap, or a line of text, is given to."""


class Doubles(StreamingDataPipe):
    """Each item twice; its place may be between the two."""

    initial_state = {"again": None}  # noqa: RUF012
    again: Any

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> "Iterator[Any]":
        if self.again is not None:
            item, self.again = self.again, None
            yield item
        for item in self.datapipe:
            self.again = item
            yield item
            self.again = None
            yield item


class Plain(IterDataPipe):
    """A user's node without a state."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> "Iterator[Any]":
        for item in self.datapipe:
            yield item, item + 1


class Iterates(IterDataPipe):
    """A user's node that is its own iterator."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self._items: Any = None

    def __iter__(self) -> "Iterates":
        self._items = iter(self.datapipe)
        return self

    def __next__(self) -> Any:
        return next(self._items) + 100

    def __getstate__(self) -> Any:
        state = {**vars(self), "_items": None}
        return state if IterDataPipe.getstate_hook is None else IterDataPipe.getstate_hook(state)


class Cleans(IterDataPipe):
    """A user's node that cleans up when its iteration ends, and says when what happened, in a file."""

    def __init__(self, path: Any, n: int) -> None:
        super().__init__()
        self.path, self.n = path, n

    def __iter__(self) -> "Iterator[int]":
        self.say("begins")
        try:
            yield from range(self.n)
        finally:
            time.sleep(0.02)
            self.say("ends")

    def say(self, what: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{os.getpid()} {what}\n")

    def said(self) -> "dict[int, list[str]]":
        """{process: what it said}."""
        found: dict[int, list[str]] = {}
        with Path(self.path).open() as file:
            for line in file:
                found.setdefault(int(line.split()[0]), []).append(line.split()[1])
        return found


# Graphs ---------------------------------------------------------------------------------------------------


def documents(folder: Path) -> str:
    path = folder / "texts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": "ab" * (k % 5) + str(k)}) + "\n" for k in range(12)))
    return str(path)


def _forked(n: int) -> Any:
    one, two = IterableWrapper(range(n)).shuffle().fork(num_instances=2)
    return one.zip(two.map(negated))


def _dealt(n: int) -> Any:
    one, two, three = IterableWrapper(range(n)).demux(3, by_three)
    return one.mux(two.map(negated), three)


def graphs(folder: Any) -> "dict[str, Callable[[], Any]]":
    """What makes a finite graph of each kind, some 8 to 20 items long; folder None: for their names."""
    runs: Any = None if folder is None else Runs(folder)
    return {
        "indexed": lambda: runs.finite(),
        "indexed, mapped": lambda: runs.finite().map(unlabelled, seeded=False),
        "indexed, a map below": lambda: (
            runs.source("prose").map(negated, seeded=False).permute(seed=3).limit(samples=36).batch_samples(4)
        ),
        "indexed, sharded": lambda: (
            runs.blend().shard_ranks(Topology(1, 2), seed=3).batch_samples(2, global_batch_size=8).limit(steps=5)
        ),
        "indexed, zipped": lambda: runs.finite(32).zip(runs.finite(32)),
        "indexed, samples": lambda: runs.blend().limit(samples=11),
        "indexed, once": lambda: runs.blend(None).limit(samples=32).once().batch_samples(4).collate_causal_lm(),
        "ours": lambda: JsonLinesReader(documents(folder)).sharding_filter().tokenize("byte").pack_sequences(6),
        "torch, placed": lambda: IterableWrapper(range(40)).map(negated).sharding_filter().filter(is_odd).batch(2),
        "torch, shuffled": lambda: IterableWrapper(range(20)).shuffle(buffer_size=5).sharding_filter().map(negated),
        "torch, forked": lambda: _forked(12),
        "torch, demuxed": lambda: _dealt(12),
        "map style": lambda: SequenceWrapper(list(range(13))).map(negated),
        "a user's": lambda: Doubles(IterableWrapper(range(7))).map(negated),
        "a user's without a state": lambda: Plain(IterableWrapper(range(9)).map(negated)),
        "a user's iterator": lambda: Iterates(IterableWrapper(range(9))).map(negated),
        "empty": lambda: IterableWrapper([]).map(negated).batch(2),
    }


GRAPHS = list(graphs(None))

ADAPTERS: "dict[str, Callable[[], Adapter]]" = {
    "Autotune": lambda: Autotune(0.1, ignored),
    "CacheTimeout": lambda: CacheTimeout(60),
    "Defaults": lambda: Defaults(ignored),
    "PinMemory": PinMemory,
    "Placement": lambda: Placement({"map": Threads(2)}),
    "Prefetch": lambda: Prefetch(3),
    "Profile": Profile,
    "Retry": lambda: Retry(OSError, wait=0),
    "SkipErrors": lambda: SkipErrors(2, OSError),
    "Tap": lambda: Tap(ignored),
    "Timeout": lambda: Timeout(60),
    "ToDevice": lambda: ToDevice("cpu"),
    "Trace": lambda: Trace(items=1, to=ignored),
}

SERVICES: "dict[str, Callable[[], Any]]" = {
    "in process": InProcessReadingService,
    "reading ahead": lambda: InProcessReadingService(2),
    "workers": lambda: MultiProcessingReadingService(2, "fork"),
}


def putting(graph: Any, names: "list[str]") -> "tuple[Any, list[Adapter]]":
    """The graph with these adapters on, as far as they can be put on it, and those."""
    worn = []
    for name in names:
        adapter = ADAPTERS[name]()
        try:
            graph = adapter(graph)
        except GraphError:
            continue
        worn.append(adapter)
    return graph, worn


def loader_of(graph: Any, service: str = "in process") -> DataLoader2:
    """A loader, seeded where its graph is a stream."""
    loader = DataLoader2(graph, reading_service=SERVICES[service]())
    if loader._run is None:
        loader.seed(5)
    return loader


def place_of(loader: DataLoader2) -> Any:
    """Its state, as a checkpoint has it, without what adapters have noted."""
    state = json.loads(json.dumps(loader.state_dict()))
    state.pop("noted", None)
    return state
