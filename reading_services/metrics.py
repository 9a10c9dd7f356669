"""What a run logs: flat numbers, and how long the training loop waited for its batches."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ..datapipes.plan.counts import SourceCounts

if TYPE_CHECKING:
    from .run import IndexedRun

__all__ = ["Waits", "run_metrics"]

WINDOW = 1024


class Waits:
    """The seconds of each of the last `WINDOW` waits, and of all together: a hundred nanoseconds a wait.

    A window and a total that only grows, rather than "since the last look": looking changes nothing, and any
    number of loggers may look.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.total = 0.0
        self.count = 0
        self._first = self._until = 0.0

    def add(self, began: float, ended: float) -> None:
        """One wait, by time.perf_counter."""
        seconds = ended - began
        self._last.append(seconds)
        self.total += seconds
        self._until = ended
        if not self.count:
            self._first = began
        self.count += 1

    @property
    def lasted(self) -> float:
        """Seconds from the first wait's beginning to the last one's end."""
        return self._until - self._first

    def metrics(self) -> "dict[str, int | float]":
        last = np.array(self._last) * 1e3
        mean, p99 = (float(last.mean()), float(np.percentile(last, 99))) if last.size else (0.0, 0.0)
        return {"data/wait/mean_ms": mean, "data/wait/p99_ms": p99, "data/wait/total_s": self.total}


def run_metrics(run: "IndexedRun", counts: SourceCounts) -> "dict[str, int | float]":
    """Where a run stands, by counts: O(sources), nothing is read."""
    consumed, begin = run.consumed_samples, run.built.first_sample
    taken = counts.taken(begin, consumed)
    total = sum(t.samples for t in taken) or 1
    found: dict[str, int | float] = {
        "data/consumed_samples": consumed,
        "data/consumed_tokens": consumed * counts.order.sequence_length,
        "data/step": run.steps.step_of(consumed),
        "data/phase": counts.changes_in_force(consumed),
    }
    for name, t in zip(counts.names, taken, strict=True):
        found[f"data/share/{name}"] = t.samples / total
        found[f"data/epoch/{name}"] = t.epochs
    return found
