"""Workers that died and stalled: of which items, how often, and when that is an error."""

from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from ...datapipes.deadline import Deadline
from ...datapipes.errors import NodeTimeoutError, WorkerDiedError, WorkerStalledError

__all__ = ["Losses", "Stall"]

OWN_DOING = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
MOST_DEATHS = 3  # of workers that were making the same item
MOST_STALLS = 2
MOST_FAILED_STARTS = 3  # in a row, of workers that exit by themselves before they have begun
MOST_KILLED_STARTS, KILLING_ENDS = 50, 60.0  # in a row, and s: of those that are killed before, unless it ends


class Stall(NamedTuple):
    """What is known of a worker that is stuck."""

    worker: int
    seconds: float
    node: str
    state: str
    """of the process, as the kernel says it"""
    stack: str
    beside: "Callable[[], str]"
    """what else can be told"""


class Losses:
    """The losses of one turn, by the item that was made ("item 17, sample number 136")."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._stalls: Counter[str] = Counter()
        self.failed_starts, self._failing_since = 0, 0.0

    @property
    def places(self) -> "set[str]":
        """The items that workers were lost with."""
        return {*self._deaths, *self._stalls}

    def forget(self) -> None:
        self._deaths.clear()
        self._stalls.clear()

    def died(self, place: str, how: str, node: str) -> "WorkerDiedError | None":
        """A worker has ended while it made an item: the error, if that was one too many."""
        self._deaths[place] += 1
        if self._deaths[place] < MOST_DEATHS:
            return None
        where = f" in node {node}" if node else ""
        return WorkerDiedError(f"{MOST_DEATHS} workers ended while they made {place}; the last one {how}{where}")

    def stuck(
        self, place: str, stall: Stall, limit: "Deadline | None", stall_timeout: "float | None"
    ) -> "NodeTimeoutError | WorkerStalledError | None":
        """A worker has taken too long for an item: the error, if that was one too many.

        Args:
            place: "": none that it could be blamed on. limit: of the node that a Timeout is around.
        """
        self._stalls[place] += 1
        if not place or self._stalls[place] < MOST_STALLS:
            return None
        kind = WorkerStalledError if limit is None else NodeTimeoutError
        allowed = f"(stall_timeout={stall_timeout:g})" if limit is None else f"in {limit.node}"
        longer = stall.seconds if limit is None else limit.seconds
        return kind(
            f"{place} has twice taken longer than {longer:.3g} s {allowed}, in worker process {stall.worker}"
            + (f", node {stall.node}" if stall.node else "")
            + (f"; the process was {stall.state}" if stall.state else "")
            + (f". It was here:\n{stall.stack}" if stall.stack else "; it did not answer where it was")
            + stall.beside()
        )

    def failed_start(self, how: str, by_signal: bool) -> "WorkerDiedError | None":
        """A worker has ended before it had begun: the error, where others will go on to."""
        self.failed_starts += 1
        if self.failed_starts == 1:
            self._failing_since = monotonic()
        if by_signal and not how.endswith(OWN_DOING):
            enough = self.failed_starts >= MOST_KILLED_STARTS and monotonic() > self._failing_since + KILLING_ENDS
            hint = ". Something kills them: memory that runs out would be one cause"
        else:
            enough = self.failed_starts >= MOST_FAILED_STARTS
            hint = '. A script that starts workers needs `if __name__ == "__main__":` around what it does'
        if not enough:
            return None
        return WorkerDiedError(
            f"{self.failed_starts} workers in a row ended before they had begun; the last one {how}{hint}"
        )
