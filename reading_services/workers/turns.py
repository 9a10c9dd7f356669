"""What a pool and an iteration over its workers' items know of each other: a turn, a worker's seat, and how numbers are
cut into tasks.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ...datapipes.notes import deliver_notes
from ...datapipes.raised import RaisedError
from .channel import Channel, Item
from .packing import unpacked
from .process import Process

__all__ = ["Arrived", "Seat", "Turn", "given_up", "opened", "paced", "task_size", "tasks_for"]

TASK_SECONDS = 1e-3
MOST_TASKS = 5  # of a worker: with two messages more, a socket takes them while nobody reads


Arrived = tuple[Channel, Item, list[Any]]
"""Where an item is, and what was noted while it was made."""


class Turn(Protocol):
    """One iteration over the items of the workers: what the pool tells it."""

    def work(self, worker: int) -> Any:
        """What the worker is to do, to be pickled, from where it stands now."""

    def arrived(self, worker: int, number: int, item: "Arrived", seconds: float, snapshot: Any) -> None:
        """An item has come."""

    def ended(self, worker: int, number: int, notes: Any) -> None:
        """The worker has no item of this number, nor later ones; what was noted while it looked for one."""

    def failed(self, worker: int, number: int, error: Any) -> None:
        """The item cannot be had: a RaisedError, or an exception."""

    def lost(self, worker: int, tasks: "list[tuple[int, int]]") -> None:
        """What was dealt to a worker and will not come: stretches of numbers, to be dealt again."""

    def place(self, worker: int, number: int) -> str:
        """What an error says of an item."""

    def dispatch(self) -> Any:
        """What the dispatching process is to do, where there is one."""


class Seat:
    """One worker's place in a pool, whoever sits there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Process | None = None
        self.watched: list[int] = []
        self.begun = False  # this turn's work
        self.tasks: deque[list[int]] = deque()  # [next, stop] of what was dealt and has not come
        self.since = 0.0  # when it last told something, or was given something to do
        self.looked_at = 0.0  # when it was found to be slow, and left at it


def opened(found: Any, pinned: "Callable[[Any], Any] | None") -> Any:
    """The item of what has arrived; where an error came instead, that is raised."""
    if isinstance(found, Exception):
        raise found
    if isinstance(found, RaisedError):
        raise found.error()
    channel, item, notes = found
    value = unpacked(*channel.read(item))
    deliver_notes(notes)
    return value if pinned is None else pinned(value)


def given_up(found: Any) -> None:
    """Gives back what has arrived and nobody wants."""
    if isinstance(found, tuple):
        channel, item, _ = found
        channel.drop(item)


def paced(pace: float, seconds: float) -> float:
    """What an item takes, in seconds, after one more took so long: down fast, up slowly, past single slow ones."""
    return pace + (seconds - pace) / 2 if seconds < pace else pace + (min(seconds, 4 * pace) - pace) / 8


def task_size(pace: float, most: int) -> int:
    """Of how many numbers a task is: what a millisecond makes."""
    return max(1, min(most, int(TASK_SECONDS / pace)))


def tasks_for(seat: Seat, size: int, start: int, stop: int, most: int, whole: bool) -> "list[tuple[int, int]]":
    """Stretches of the numbers from `start` to `stop` that a worker should have besides what it has.

    Two tasks of `size` numbers, one to make and one that waits, so a message, which may wake up a sleeper, costs little
    of their time, and a slow item holds up little. More that wait, while it has fewer than `most` numbers: they are
    made while the main process does something else. `whole`: no smaller task, for more numbers will come.
    """
    has = sum(task[1] - task[0] for task in seat.tasks)
    tasks: list[tuple[int, int]] = []
    while start < stop and len(seat.tasks) + len(tasks) < (MOST_TASKS if has < most else 2):
        end = min(start + size, stop)
        if whole and end - start < size:
            break
        tasks.append((start, end))
        has, start = has + end - start, end
    return tasks
