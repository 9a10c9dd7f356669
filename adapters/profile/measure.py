"""The clocks around the nodes.

Calls nest: what a node takes itself is what it takes less what the nodes below take within. Each thread has a `Clock`,
in which a call that ends adds its time to what is "below" for the one around it.

Quick items are timed now and then alone, so that measuring costs about a hundredth of what is measured; which ones, the
outermost node of the thread decides, so that all below are timed with it. What nodes answer by numbers is done for
hundreds of items at once, and always timed.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from ...datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ...datapipes.core import IndexedDataPipe, Unpickled
from ...datapipes.wrapped import Wrapper
from .book import Probe, ProfileBook

__all__ = ["GATHER", "LOOP", "LoopWrapper", "ProfileWrapper", "bytes_of", "samples_of"]

GATHER = ": gather"  # added to a batcher's name: the reading itself, of all sources at once
LOOP = "the loop"
COST = 5e-4  # s: items that take less are timed one in so many
MOST_LEFT_OUT = 64
LOOK_EVERY = 0.5  # s between two looks at what a node keeps


class Clock:
    """Where a thread is in its calls."""

    def __init__(self) -> None:
        self.depth = 0
        self.off = False  # the item that is made is not timed
        self.left = 0  # items until the next one is
        self.below = self.below_computing = 0.0  # s of calls that have ended within the one that runs


_CLOCKS = threading.local()


def clock_of_thread() -> Clock:
    try:
        return _CLOCKS.clock
    except AttributeError:
        _CLOCKS.clock = Clock()
        return _CLOCKS.clock


class ProfileWrapper(Wrapper):
    """Times a node."""

    kind = "profile"

    def __init__(self, name: str, book: ProfileBook) -> None:
        self.name, self.ledger = name, book
        self._box = Unpickled()

    @property
    def _probe(self) -> Probe:
        probe = self._box.value
        if probe is None:
            probe = self._box.value = self.ledger.probe(self.name)
        return probe

    def timed(self, clock: Clock, probe: Probe, node: DataPipe, function: "Callable[..., Any]", *arguments: Any) -> Any:
        """What the function gives; the call counts."""
        below, below_computing = clock.below, clock.below_computing
        clock.below = clock.below_computing = 0.0
        clock.depth += 1
        began, computed = perf_counter(), thread_time()
        try:
            item = function(*arguments)
        finally:
            computing = thread_time() - computed
            seconds = perf_counter() - began
            clock.depth -= 1
            probe.own += max(0.0, seconds - clock.below)
            probe.computing += max(0.0, computing - clock.below_computing)
            clock.below, clock.below_computing = below + seconds, below_computing + computing
        probe.calls += 1
        probe.timed += 1
        probe.longest = max(probe.longest, seconds)
        probe.samples += samples_of(item)
        probe.bytes += bytes_of(item)
        self.ledger.spans.append((self.name, began, seconds, self.ledger._pid, threading.get_ident()))
        if not clock.depth:
            clock.left = min(int(COST / max(seconds, 1e-9)), MOST_LEFT_OUT)
        if began - vars(probe).get("_looked", 0.0) > LOOK_EVERY:
            vars(probe)["_looked"] = began
            probe.held = max(probe.held, held_by(node))
        return item

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        probe, clock = self._probe, clock_of_thread()
        try:
            pull = (
                self.timed(clock, Probe(), node, begin).__next__ if isinstance(node, IterDataPipe) else begin().__next__
            )
            while True:
                if clock.off:
                    item = pull()
                    probe.calls += 1
                elif clock.depth or clock.left <= 0:
                    item = self.timed(clock, probe, node, pull)
                else:
                    clock.left -= 1
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
        clock = clock_of_thread()
        if clock.off:
            self._probe.calls += 1
            return fetch(numbers)
        return self.timed(clock, self._probe, node, fetch, numbers)

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self.timed(clock_of_thread(), self._probe, node, get, index)

    def numbers(self, node: IndexedDataPipe, function: "Callable[..., Any]", *arguments: Any) -> Any:
        clock = clock_of_thread()
        if function.__name__ == "gathered":
            probe = self.ledger.probe(self.name + GATHER)
            if not clock.off:
                return self.timed(clock, probe, node, function, *arguments)
            probe.calls += 1
            return function(*arguments)
        probe, below, below_computing = self._probe, clock.below, clock.below_computing
        clock.below = clock.below_computing = 0.0
        began, computed = perf_counter(), thread_time()
        try:
            return function(*arguments)
        finally:
            computing, seconds = thread_time() - computed, perf_counter() - began
            probe.numbers += max(0.0, seconds - clock.below)
            probe.numbers_computing += max(0.0, computing - clock.below_computing)
            clock.below, clock.below_computing = below + seconds, below_computing + computing


class LoopWrapper(Wrapper):
    """Measures how long the training loop waits for items, and how long it works on them."""

    kind = "profile"
    in_main_process = True
    label = ""

    def __init__(self, book: ProfileBook) -> None:
        self.ledger = book

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        probe = self.ledger.probe(LOOP)
        items = begin()
        came = perf_counter()
        while True:
            asked = perf_counter()
            probe.own += asked - came  # the loop's own work on the item before
            try:
                item = next(items)
            except StopIteration:
                return
            came = perf_counter()
            probe.numbers += came - asked  # it waited
            probe.calls += 1
            yield item


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
