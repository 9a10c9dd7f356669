"""The items of a graph of any kind, and a thread that makes them ahead."""

import _thread
import contextlib
from collections.abc import Iterator
from typing import Any

from ._torch import DataPipe
from .core import IndexedDataPipe

__all__ = ["ReadAhead", "items_of"]

_END, _ERROR, _ITEM = range(3)


def items_of(datapipe: DataPipe) -> Iterator[Any]:
    """The items of a graph of any kind, from its first one on."""
    if isinstance(datapipe, IndexedDataPipe):
        return datapipe.iterate(0)
    if hasattr(datapipe, "__iter__"):
        return iter(datapipe)
    return (datapipe[i] for i in range(len(datapipe)))  # torch's map-style nodes


class ReadAhead:
    """An iterator whose items a thread makes, at most `depth` ahead of the reader.

    A ring of slots, each with two bare locks: `free` to be filled, `full` to be read. Bare on purpose: a signal in
    the middle of queue.Queue, a semaphore or threading.Thread.start, which are Python, can leave their inner
    locks held for ever, and one that is handled in SimpleQueue.get can lose a wake-up; a lock's acquire cannot.
    """

    def __init__(self, items: Iterator[Any], depth: int) -> None:
        self._slots: list[Any] = [None] * depth
        self._free = [_thread.allocate_lock() for _ in range(depth)]
        self._full = [_thread.allocate_lock() for _ in range(depth)]
        self._running = _thread.allocate_lock()
        for lock in (*self._full, self._running):
            lock.acquire()
        self._at, self._stopped = 0, False
        _thread.start_new_thread(self._run, (items,))

    def _run(self, items: Iterator[Any]) -> None:
        at = 0
        found: tuple[int, Any] = (_ITEM, None)
        try:
            while found[0] == _ITEM:
                self._free[at % len(self._slots)].acquire()
                if self._stopped:
                    return
                try:
                    found = (_ITEM, next(items))
                except StopIteration:
                    found = (_END, None)
                except BaseException as error:  # handed to the reader
                    found = (_ERROR, error)
                self._slots[at % len(self._slots)] = found
                self._full[at % len(self._slots)].release()
                at += 1
        finally:
            with contextlib.suppress(Exception):
                items.close()  # type: ignore[attr-defined]  # now: what is cleaned up later could meet the next iteration
            self._running.release()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Any:
        if self._stopped:
            raise StopIteration
        at = self._at % len(self._slots)
        self._full[at].acquire()
        kind, value = self._slots[at]
        self._slots[at] = None
        if kind == _ITEM:
            self._at += 1
            self._free[at].release()
            return value
        self._stopped = True
        if kind == _ERROR:
            raise value
        raise StopIteration

    def close(self) -> None:
        """Ends the thread; what it made is dropped. Does not wait for an item that is stuck."""
        self._stopped = True
        for lock in self._free:  # wakes the thread, which sees that it is stopped
            with contextlib.suppress(RuntimeError):  # not locked: nobody waits for this one
                lock.release()
        if self._running.acquire(timeout=1.0):
            self._running.release()
