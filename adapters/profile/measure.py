"""The clocks around the nodes.

Calls nest: what a node takes itself is what it takes less what the nodes below take within. Each thread has a `Clock`
of each Profile, in which a call that ends adds its time to what is "below" for the one around it, with the time that
measuring took.

Quick items are timed now and then alone, so that measuring costs some hundredths of what is measured. An indexed graph
then runs in turns: a stretch of items through the clocks, and a longer one through its twin without them, which gives
the same items. Of a stream, which has no twin, the outermost node of the thread says for each item whether it is timed.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from ...datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ...datapipes.core import IndexedDataPipe, Unpickled
from ...datapipes.kernels import load_kernels
from ...datapipes.wrapped import Wrapper, wrappers_of
from ..around import taken_off
from .book import GATHER, Probe, ProfileBook

__all__ = ["ProfileWrapper", "bytes_of", "samples_of"]

COST = 5e-4  # s: items that take less are timed one in so many
MOST_LEFT_OUT = 64
ALL_TIMED = 16  # the first items of an iteration
STRETCH, CHUNK = 128, 256  # items of an indexed graph that are timed together, and counted together where they are not
MOST_STRETCHES = 256  # that long are the items between two timed ones, at most
MEASURING, SHARE = 50e-6, 0.015  # s that measuring an item takes, at most, and what of all the time it may be
LOOK_EVERY = 0.5  # s between two looks at what a node keeps


class Clock:
    """Where a thread is in its calls."""

    def __init__(self) -> None:
        self.depth = 0
        self.off = False  # the item that is made is not timed
        self.weight = 1  # so many items does the one that is timed stand for
        self.below = self.below_computing = 0.0  # s of calls that have ended within the one that runs


class Pace:
    """Which items of one iteration are timed, where a thread's outermost node is one of a stream."""

    def __init__(self) -> None:
        self.left = 0  # items until the next one is
        self.passed = 0  # items since the last one was
        self.seen = 0  # that were timed

    def weight(self) -> int:
        """So many items does the one stand for that is timed now."""
        weight, self.passed = 1 + self.passed, 0
        return weight

    def after(self, seconds: float) -> None:
        """One was timed that took so long."""
        self.seen += 1
        self.left = min(int(COST / max(seconds, 1e-9)), MOST_LEFT_OUT, max(0, self.seen - ALL_TIMED) // 4)


class ProfileWrapper(Wrapper):
    """Times a node."""

    kind = "profile"

    def __init__(self, name: str, book: ProfileBook, outermost: bool = False, indexed: bool = False) -> None:
        self.name, self.ledger, self.outermost, self.indexed = name, book, outermost, indexed
        self._plain = Unpickled()
        self._pulled = False  # its items are asked for: not where Placement takes what is below, and applies the node
        self._box, self._box_of_gather = Unpickled(), Unpickled()

    @property
    def _probe(self) -> Probe:
        probe = self._box.value
        if probe is None:
            if self.indexed:
                load_kernels()  # once a process, and no node's doing
            probe = self._box.value = self.ledger.probe(self.name)
        return probe

    @property
    def _gather(self) -> Probe:
        probe = self._box_of_gather.value
        if probe is None:
            probe = self._box_of_gather.value = self.ledger.probe(self.name + GATHER)
        return probe

    @property
    def _clock(self) -> Clock:
        """This thread's, of this Profile: several may be on one graph."""
        clocks = self.ledger.clocks
        try:
            return clocks.own
        except AttributeError:
            clocks.own = Clock()
            return clocks.own

    def timed(
        self,
        clock: Clock,
        probe: Probe,
        node: DataPipe,
        function: "Callable[..., Any]",
        *arguments: Any,
        pace: "Pace | None" = None,
    ) -> Any:
        """What the function gives; the call counts."""
        entered = perf_counter()
        below, below_computing = clock.below, clock.below_computing
        clock.below = clock.below_computing = 0.0
        if not clock.depth:
            clock.weight = 1 if pace is None else pace.weight()
        clock.depth += 1
        weight = clock.weight
        began, computed = perf_counter(), thread_time()
        try:
            item = function(*arguments)
        finally:
            computing, ended = thread_time() - computed, perf_counter()
            clock.depth -= 1
            seconds = ended - began
            probe.own += weight * max(0.0, seconds - clock.below)
            probe.computing += weight * max(0.0, computing - clock.below_computing)
            clock.below, clock.below_computing = below + seconds, below_computing + computing
        probe.calls += 1
        probe.longest = max(probe.longest, seconds)
        probe.samples += weight * samples_of(item)
        probe.bytes += weight * bytes_of(item)
        self.ledger.spans.append((self.name, began, seconds, self.ledger._pid, threading.get_ident()))
        if not clock.depth and pace is not None:
            pace.after(seconds)
        if began - probe.looked > LOOK_EVERY:
            probe.looked = began
            probe.held = max(probe.held, held_by(node))
        measuring = perf_counter() - ended + began - entered
        clock.below += measuring
        clock.below_computing += measuring
        return item

    def iterate(
        self, node: IndexedDataPipe, begin: "Callable[[int], Iterator[Any]]", start: int, stop: "int | None"
    ) -> "Iterator[Any]":
        if not self.outermost:
            return self._all_timed(begin(start), node)
        return self._in_turns(node, begin, start, node.end if stop is None else min(stop, node.end))

    def _in_turns(
        self, node: IndexedDataPipe, begin: "Callable[[int], Iterator[Any]]", at: int, end: int
    ) -> "Iterator[Any]":
        turns, twin = self.ledger.turns, None
        _ = self._probe
        if not turns.items:  # what only the first item of a process takes would be taken for what each does
            turns.untimed = 1
        while at < end:
            if turns.untimed <= 0:
                stretch, began = min(STRETCH, end - at), perf_counter()
                away = 0.0  # s that the items were looked at by whoever asked for them
                for item in islice(self._all_timed(begin(at), node), stretch):
                    turns.items += 1
                    turns.timed += 1
                    left = perf_counter()
                    yield item
                    away += perf_counter() - left
                at += stretch
                each = max(MEASURING / 4, (perf_counter() - began - away) / stretch - MEASURING)
                turns.untimed = int(stretch * min(MEASURING / (SHARE * each), MOST_STRETCHES))
            else:
                chunk = min(CHUNK, turns.untimed, end - at)
                turns.items += chunk
                turns.untimed -= chunk
                if twin is None:
                    twin = self._without_clocks(node).iterate(at, end)
                yield from islice(twin, chunk)
                at += chunk
                if turns.untimed <= 0:
                    twin = None

    def _without_clocks(self, node: IndexedDataPipe) -> Any:
        """The same graph without any of this Profile's, and without what is around them: the items still go there."""
        if self._plain.value is None or self._plain.value[0] is not node:
            around = wrappers_of(node)
            outside = around[around.index(self) :]
            self._plain.value = (
                node,
                taken_off(node, lambda w: w in outside or (isinstance(w, ProfileWrapper) and w.ledger is self.ledger)),
            )
        return self._plain.value[1]

    def _all_timed(self, items: "Iterator[Any]", node: DataPipe) -> "Iterator[Any]":
        probe, clock = self._probe, self._clock
        with contextlib.suppress(StopIteration):
            while True:
                yield self.timed(clock, probe, node, items.__next__)

    def apply(self, node: DataPipe, function: "Callable[[Any], Any]", item: Any) -> Any:
        if self._pulled:  # then it is timed there
            return function(item)
        return self.timed(self._clock, self._probe, node, function, item)

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        self._pulled = True
        probe, clock, pace = self._probe, self._clock, Pace()
        try:
            pull = (
                self.timed(clock, Probe(), node, begin).__next__ if isinstance(node, IterDataPipe) else begin().__next__
            )
            while True:
                if clock.off:
                    item = pull()
                    probe.calls += 1
                elif clock.depth or pace.left <= 0:
                    item = self.timed(clock, probe, node, pull, pace=pace)
                else:
                    pace.left -= 1
                    pace.passed += 1
                    clock.off = True
                    try:
                        item = pull()
                    finally:
                        clock.off = False
                    probe.calls += 1
                yield item
        except StopIteration:
            return

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        clock = self._clock
        if clock.off:
            self._probe.calls += 1
            return fetch(numbers)
        return self.timed(clock, self._probe, node, fetch, numbers)

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self.timed(self._clock, self._probe, node, get, index)

    def numbers(self, node: IndexedDataPipe, function: "Callable[..., Any]", *arguments: Any) -> Any:
        clock = self._clock
        if clock.off and function.__name__ == "gathered":
            self._gather.calls += 1
            return function(*arguments)
        if function.__name__ == "gathered":
            return self.timed(clock, self._gather, node, function, *arguments)
        probe, below, below_computing = self._probe, clock.below, clock.below_computing
        clock.below = clock.below_computing = 0.0
        began, computed = perf_counter(), thread_time()
        try:
            return function(*arguments)
        finally:
            computing, seconds = thread_time() - computed, perf_counter() - began
            probe.own += max(0.0, seconds - clock.below)
            probe.computing += max(0.0, computing - clock.below_computing)
            clock.below, clock.below_computing = below + seconds, below_computing + computing


def samples_of(item: Any) -> int:
    """How many samples an item holds: the rows of its first array, the length of a list, else 1."""
    if isinstance(item, Mapping):
        item = next(iter(item.values()), None)
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        item = item[0]
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return int(item.shape[0]) if item.ndim > 1 else 1
    return len(item) if isinstance(item, list) and item and not isinstance(item[0], (int, float)) else 1


def bytes_of(item: Any, depth: int = 0) -> int:
    """Bytes of an item's arrays, tensors and strings; views of one buffer count as they look."""
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.nbytes
    if isinstance(item, (bytes, str, bytearray)):
        return len(item)
    if depth < 3:
        if isinstance(item, Mapping):
            return sum(bytes_of(value, depth + 1) for value in item.values())
        if isinstance(item, (list, tuple)):
            if item and isinstance(item[0], (int, float)):
                return 8 * len(item)
            return sum(bytes_of(value, depth + 1) for value in item)
    return 8


def held_by(node: DataPipe) -> int:
    """Bytes of what a node keeps in its attributes, of what is no datapipe: a shuffle's buffer, a packer's rest.

    Of long lists a part is looked at.
    """
    total = 0
    for name, value in list(vars(node).items()):
        if isinstance(value, (IterDataPipe, MapDataPipe)) or name == "_wrappers" or name == "children":
            continue
        if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
            some = [value[i] for i in range(0, len(value), max(1, len(value) // 100))]
            if any(isinstance(item, (IterDataPipe, MapDataPipe)) for item in some):
                continue
            total += sum(map(bytes_of, some)) * len(value) // max(1, len(some))
        elif isinstance(value, (torch.Tensor, np.ndarray, bytes, bytearray, str)):
            total += bytes_of(value)
    return total
