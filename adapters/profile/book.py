"""What was measured: counts and seconds of each node, of this process and of its workers."""

import os
from collections import deque
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

from ...datapipes.notes import Ledger

__all__ = ["NodeProfile", "Probe", "ProfileBook", "Span"]

EVERY = 0.05  # s between two notes of a worker that is at work
MOST_SPANS = 50_000  # kept, the newest
Span = tuple[str, float, float, int, int]
"""(node, when it began by time.perf_counter, seconds, process id, thread id)"""


@dataclass
class Probe:
    """The counts of one node in one process. Seconds are sums over the calls that were timed."""

    calls: int = 0
    timed: int = 0
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
    numbers: float = 0.0
    """s in calls that are answered by numbers, all of which are timed."""
    numbers_computing: float = 0.0

    def add(self, other: "Probe") -> None:
        for field in fields(Probe):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, theirs) if field.name in ("longest", "held") else mine + theirs)


@dataclass(frozen=True)
class NodeProfile:
    """What one node took, over all processes. Seconds and bytes are estimated from the calls that were timed."""

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
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.processes: dict[int, dict[str, Probe]] = {}  # of the others
        self._told = 0.0
        self._pid = os.getpid()

    def probe(self, name: str) -> Probe:
        return self.probes.setdefault(name, Probe())

    def gathered(self, last: bool) -> Any:
        now = perf_counter()
        if not last and now - self._told < EVERY:
            return None
        self._told = now
        found = {}
        for name, probe in self.probes.items():
            if probe.calls or probe.numbers:
                found[name] = [getattr(probe, field.name) for field in fields(Probe)]
                probe.__init__()  # type: ignore[misc]  # the clocks hold it
        spans = [self.spans.popleft() for _ in range(len(self.spans))]
        return (os.getpid(), found, spans[-2000:]) if found else None

    def write(self, note: Any) -> None:
        pid, found, spans = note
        probes = self.processes.setdefault(pid, {})
        for name, values in found.items():
            probes.setdefault(name, Probe()).add(Probe(*values))
        self.spans.extend(tuple(span) for span in spans)

    def merged(self) -> "dict[str, Probe]":
        """{node: its counts} of all processes together."""
        found: dict[str, Probe] = {}
        for probes in ({**self.probes}, *self.processes.values()):
            for name, probe in list(probes.items()):
                found.setdefault(name, Probe()).add(probe)
        return found
