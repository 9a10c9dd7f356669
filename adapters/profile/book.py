"""What was measured: counts and seconds of each node, of this process and of its workers."""

import os
import threading
from collections import deque
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from ...datapipes.notes import Ledger

__all__ = ["GATHER", "NodeProfile", "Probe", "ProfileBook", "Span", "Turns"]

GATHER = ": gather"  # added to a batcher's name: the reading itself, of all sources at once
EVERY = 0.05  # s between two notes of a worker that is at work
MOST_SPANS = 50_000  # kept, the newest
Span = tuple[str, float, float, int, int]
"""(node, when it began by time.perf_counter, seconds, process id, thread id)"""


@dataclass
class Probe:
    """The counts of one node in one process. All but the calls are estimates, from the calls that were timed."""

    calls: int = 0
    own: float = 0.0
    """s in the node itself, without the nodes below."""
    computing: float = 0.0
    """s of those that the thread ran; the rest it waited for a disk, a lock, the network, or its turn."""
    samples: int = 0
    bytes: int = 0
    longest: float = 0.0
    """s of the longest call, with what is below."""
    held: int = 0
    """bytes that the node kept, at most."""
    looked: float = 0.0
    """when that was looked at last"""

    def add(self, other: "Probe", scale: float = 1.0) -> None:
        for field in fields(Probe):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("longest", "held", "looked"):
                setattr(self, field.name, max(mine, theirs))
            else:
                setattr(self, field.name, mine + theirs * scale)


@dataclass
class Turns:
    """How many items an indexed graph has given in one process, and how many of them through the clocks."""

    items: int = 0
    timed: int = 0
    untimed: int = 0  # that are to come before the next one that is

    @property
    def scale(self) -> float:
        """How many items each timed one stands for."""
        return self.items / self.timed if self.timed else 1.0


@dataclass(frozen=True)
class NodeProfile:
    """What one node took, over all processes: estimates from the calls that were timed.

    `calls` is what was counted, but of an indexed graph that gives quick items an estimate too.
    """

    node: str
    calls: int
    samples: int
    bytes: int
    own: float
    total: float
    waiting: float
    longest: float
    held: int

    @property
    def own_ms(self) -> float:
        """Milliseconds a call, in the node itself."""
        return 1e3 * self.own / self.calls if self.calls else 0.0


class ProfileBook(Ledger):
    """Merges what the processes measure."""

    def __init__(self, key: str = "") -> None:
        super().__init__(key)
        self.probes: dict[str, Probe] = {}  # of this process, since the last note
        self.turns = Turns()
        self.loop: Any = None  # the loader's waits
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.processes: dict[int, tuple[dict[str, Probe], Turns]] = {}  # of the others
        self.clocks = threading.local()
        self._told = 0.0
        self._pid = os.getpid()

    def probe(self, name: str) -> Probe:
        return self.probes.setdefault(name, Probe())

    def watch(self, waits: Any) -> None:
        self.loop = waits

    def gathered(self, last: bool) -> Any:
        now = perf_counter()
        if not last and now - self._told < EVERY:
            return None
        self._told = now
        found = {}
        for name, probe in self.probes.items():
            if probe.calls or probe.own:
                found[name] = [getattr(probe, field.name) for field in fields(Probe)]
                looked = probe.looked
                probe.__init__(looked=looked)  # type: ignore[misc]  # the clocks hold it
        spans = [self.spans.popleft() for _ in range(len(self.spans))]
        turns = (self.turns.items, self.turns.timed)
        return (os.getpid(), found, spans[-2000:], turns) if found or turns[0] else None

    def write(self, note: Any) -> None:
        pid, found, spans, turns = note
        probes, _ = self.processes.setdefault(pid, ({}, Turns()))
        for name, values in found.items():
            probes.setdefault(name, Probe()).add(Probe(*values))
        self.processes[pid] = (probes, Turns(*turns))
        self.spans.extend(tuple(span) for span in spans)

    def merged(self) -> "dict[str, Probe]":
        """{node: its counts} of all processes together."""
        found: dict[str, Probe] = {}
        for probes, turns in ((self.probes, self.turns), *self.processes.values()):
            for name, probe in list(probes.items()):
                found.setdefault(name, Probe()).add(probe, turns.scale)
        return found
