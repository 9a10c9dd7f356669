"""What is noted while items are made, for the process of the training loop: retries, skipped samples, times.

A `Ledger` belongs to an adapter and stands, by its key, for the same book in every process. What is told to it in the
main process is written down at once. What is told in a worker waits there in one list, which travels with the next
items (`take_notes`, `deliver_notes`), or in that of the next item alone (`take_item_notes`), and is then written down
when this one is handed out.
"""

import contextlib
import threading
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = [
    "Ledger",
    "become_worker",
    "deliver_notes",
    "forward_notes",
    "made_again",
    "take_item_notes",
    "take_notes",
]

_LEDGERS: "weakref.WeakValueDictionary[str, Ledger]" = weakref.WeakValueDictionary()
_CLOSING = threading.Lock()
_waiting: "list[tuple[str, Any]] | None" = None  # in a worker
_of_next_item: "list[tuple[str, Any]]" = []
_made_again = False


class Ledger:
    """A book that is kept in the main process. Notes are plain values."""

    kind = ""
    """What a state calls it."""
    of_items = False
    """Whether a note belongs to the item that is given next: read ahead it does not count, made again not twice."""

    def __init__(self, key: str = "") -> None:
        self.key = key or uuid.uuid4().hex
        _LEDGERS[self.key] = self

    def __reduce__(self) -> Any:
        return _ledger, (type(self), self.key, self.settings())

    def __deepcopy__(self, memo: Any) -> "Ledger":
        return self

    def settings(self) -> "dict[str, Any]":
        """What one that stands for this in a worker is made with."""
        return {}

    def tell(self, note: Any) -> None:
        """Notes something, from any process."""
        if self.of_items and _made_again:
            return
        if _waiting is None:
            self.write(note)
        else:
            (_of_next_item if self.of_items else _waiting).append((self.key, note))

    def write(self, note: Any) -> None:
        """In the main process: what is done with a note."""
        raise NotImplementedError

    # What the loader that runs the graph does with it: `consumed` is the number of the run's samples that are done,
    # None of a stream.

    @property
    def full(self) -> bool:
        """Whether `check` may raise: asked after each item."""
        return False

    def watch(self, waits: Any) -> None:
        """Tells it how long the loop waits for its items."""

    def check(self, consumed: "int | None") -> None:
        """Raises where what is noted is an error by now."""

    def as_json(self, consumed: "int | None") -> "dict[str, Any]":
        """What a state keeps of it; {}: nothing."""
        return {}

    def load(self, value: "dict[str, Any]") -> None:
        """Goes on from what a state has kept. Raises StateError."""

    def metrics(self) -> "dict[str, int | float]":
        """Flat numbers that a logger should have."""
        return {}

    def gathered(self, last: bool) -> Any:
        """In a worker: a note of what has gathered since the last one; None: none is due. `last`: there is no work."""
        return None


def _ledger(kind: "type[Ledger]", key: str, settings: "dict[str, Any]") -> Ledger:
    found = _LEDGERS.get(key)
    return found if found is not None else kind(key=key, **settings)


def become_worker() -> None:
    """In a worker, before anything else: what is noted waits to be taken."""
    global _waiting
    _waiting = []
    _of_next_item.clear()
    _LEDGERS.clear()  # a fork has those of the main process


@contextlib.contextmanager
def made_again() -> "Iterator[None]":
    """What is made here was made before, and what was noted then stands."""
    global _made_again
    _made_again = True
    try:
        yield
    finally:
        _made_again = False


def take_item_notes() -> "list[tuple[str, Any]]":
    """In a worker: what has been noted since the item before."""
    if not _of_next_item:
        return []
    notes = _of_next_item[:]
    _of_next_item.clear()
    return notes


def take_notes(last: bool) -> "list[tuple[str, Any]]":
    """In a worker: what has been noted since the last time."""
    global _waiting
    if _waiting is None or not (_waiting or _LEDGERS):
        return []
    notes, _waiting = _waiting, []
    for key, ledger in list(_LEDGERS.items()):
        note = ledger.gathered(last)
        if note is not None:
            notes.append((key, note))
    return notes


def forward_notes(notes: "list[tuple[str, Any]]") -> None:
    """In a worker: what the dispatching process has noted goes on with what this one has."""
    if _waiting is not None:
        _waiting.extend(notes)


def deliver_notes(notes: "list[tuple[str, Any]]") -> None:
    """In the main process: writes down what workers have noted; what nobody wants any more is dropped."""
    for key, note in notes:
        ledger = _LEDGERS.get(key)
        if ledger is not None:
            with _CLOSING:
                ledger.write(note)
