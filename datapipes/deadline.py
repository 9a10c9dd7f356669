"""How long a node may take, as the process that makes the items has it: in a worker it is told to the main process.

A worker cannot interrupt itself where it is stuck. So it notes, in memory that it shares with the main process, until
when its current node has to be done; that one looks at it while it waits, and replaces the worker.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, NamedTuple

from .errors import ArgumentTypeError, ConfigurationError

__all__ = ["Deadline", "as_seconds", "in_worker", "noted", "tell_deadlines"]


def as_seconds(name: str, value: Any, least: float = math.ulp(0.0)) -> float:
    """`value` as a finite number of seconds from `least` on, above 0 unless given. Raises ArgumentTypeError,
    ConfigurationError.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number of seconds, got {value!r:.80}")
    if not (math.isfinite(value) and value >= least):
        raise ConfigurationError(f"{name} must be {'0 or more' if least == 0 else 'above 0'} and finite, got {value}")
    return float(value)


class Deadline(NamedTuple):
    """Until when, by `time.monotonic()`, a node has to be done; `end` 0: no node has to be."""

    end: float
    seconds: float
    node: str


NONE = Deadline(0.0, 0.0, "")
_current = NONE
_tell: "Callable[[Deadline], None] | None" = None


def tell_deadlines(tell: "Callable[[Deadline], None]") -> None:
    """In a worker: how the main process is told."""
    global _tell
    _tell = tell


def in_worker() -> bool:
    """Whether this process is a worker, which can be replaced while it is stuck."""
    return _tell is not None


@contextlib.contextmanager
def noted(node: str, seconds: float) -> "Iterator[None]":
    """In a worker: the node has so long; within another node's time, the shorter one counts."""
    global _current
    assert _tell is not None
    before, end = _current, monotonic() + seconds
    if not before.end or end < before.end:
        _current = Deadline(end, seconds, node)
        _tell(_current)
    try:
        yield
    finally:
        _current = before
        _tell(before)
