"""Remote files, fetched before their batches need them.

Numbers are routed ahead, so it is known which shards and which windows the coming batches read. A scout, a thread for
as long as there is something to find out, walks ahead of the batch that is gathered now, and puts what it finds in a
queue that a few threads work off, what is needed first first:

    batch   at │ at + 1 …                                          horizon │ not looked at yet
               └ shards that this process has not open: claimed, or fetched into the cache; up to
                 TOKENPIPE_FETCH_AHEAD_MIB of them, and half of the cache
               └ windows of ranged files: read into memory, up to the same bound

Threads end when there is nothing to do, and a fork's child has none. What fails here is told nobody: it is asked for
again with its batch, and fails there. In a worker, which makes the batches that it is dealt, shards are looked for
among all coming batches (the cache is the machine's), windows among those dealt.
"""

import _thread
import contextlib
import functools
import heapq
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..remote import RemoteFile, claim, fetch, read_ranges
from ..remote.attempts import number_set
from ..remote.shard_cache import cache_bytes

if TYPE_CHECKING:
    from ..batch import SampleBatcher

__all__ = ["FetchAhead", "Window", "serve_others", "side_by_side"]

FARTHEST = 4096  # batches that the scout is ahead, at most
FARTHEST_WINDOWS = 256
LOOKED_AT = 64  # batches routed at once
READ_TOGETHER = 1 << 20  # bytes of windows in one job, about
WAIT = 0.5  # seconds between two looks at whether a read that is waited for was given up


def ahead_bytes() -> int:
    """How many bytes a loader fetches ahead, at most. Raises ConfigurationError."""
    return min(int(number_set("TOKENPIPE_FETCH_AHEAD_MIB", 1024.0) * (1 << 20)), cache_bytes() // 2)


class Window(NamedTuple):
    """Bytes [begin, stop) of one of the gather's files."""

    file: int
    begin: int
    stop: int


class _Read:
    """Windows of one file that are read together; of each the bytes once they are there."""

    __slots__ = ("file", "found", "state", "windows")

    def __init__(self, file: RemoteFile, windows: "list[Window]") -> None:
        self.file, self.windows, self.state = file, windows, QUEUED
        self.found: dict[Window, bytes] = {}


QUEUED, RUNNING, DONE = range(3)  # DONE without bytes: it failed, or was given up


class _Queue:
    """Jobs, the most urgent first, and the threads that do them: made when there is one, gone when there is none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.begin_anew()

    def begin_anew(self) -> None:
        self._lock = threading.RLock()  # the collector of garbage may call drop() anywhere
        self._jobs: list[tuple[int, int, Any, Callable[[], None]]] = []
        self._threads = self._number = 0

    def put(self, urgency: int, owner: Any, job: "Callable[[], None]") -> None:
        with self._lock:
            self._number += 1
            heapq.heappush(self._jobs, (urgency, self._number, owner, job))
            start = self._threads < self.most
            self._threads += start
        if start:
            try:
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # the process ends, or may have no more threads: what is needed is fetched when it is
                with self._lock:
                    self._threads -= 1

    def drop(self, owner: Any) -> None:
        with self._lock:
            self._jobs = [job for job in self._jobs if job[2] is not owner]
            heapq.heapify(self._jobs)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                job = heapq.heappop(self._jobs)[3]
            with contextlib.suppress(Exception):  # it comes with its batch
                job()
            del job


_SHARDS, _WINDOWS = _Queue(4), _Queue(16)
_serving_others = False


def _begin_anew() -> None:
    for queue in (_SHARDS, _WINDOWS):
        queue.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def serve_others() -> None:
    """Says that this process makes some batches of an order, and others beside it the others."""
    global _serving_others
    _serving_others = True


def side_by_side(calls: "Sequence[Callable[[], Any]]") -> "list[Any]":
    """What the calls give, in order; several at once, in threads that nobody waits for once one has failed.

    Raises what the first that failed has raised.
    """
    if len(calls) == 1:
        return [calls[0]()]
    results: list[Any] = [None] * len(calls)
    todo, done, over = iter(range(len(calls))), threading.Semaphore(0), False

    def work() -> None:
        for i in todo:  # next() of a range's iterator is one step, under the GIL
            if over:
                return
            try:
                results[i] = (True, calls[i]())
            except BaseException as error:
                results[i] = (False, error)
            done.release()

    try:
        for _ in range(min(len(calls), _WINDOWS.most)):
            _thread.start_new_thread(work, ())
        finished = 0
        while finished < len(calls):
            finished += done.acquire(timeout=WAIT)
            for result in results:
                if result is not None and not result[0]:
                    raise result[1]
        return [value for _, value in results]
    finally:
        over = True


class FetchAhead:
    """What is fetched ahead for one gather.

    Args:
        files: what is at the URLs of the gather's files; None: a local one.
    """

    def __init__(self, files: "list[RemoteFile | None]") -> None:
        self._files, self._process, self._most = files, os.getpid(), ahead_bytes()
        self._changed = threading.Condition()  # holds all of the following
        self._batcher: Callable[[], SampleBatcher | None] = lambda: None
        self._columns: Any = None
        self._at = self._stop = self._end = 0  # windows are wanted up to `stop`, shards up to `end`
        self._turn = 0  # of what is fetched for an earlier one nothing is wanted
        self.evicted = False  # perhaps: room was made for another shard
        self._scouting = False
        self._shards_from = self._windows_from = 0  # where the scout goes on
        self._shards: dict[int, int] = {}  # the batch that needs each shard that is not open, of those looked at
        self._shard_bytes = 0
        self._full = False  # no other shard has room before one of these is open
        self._reads: dict[Window, _Read] = {}
        self._until: dict[int, list[Window]] = {}  # what is dropped behind each batch
        self._last: dict[Window, int] = {}  # and the batch of which it is needed last
        self._window_bytes = 0

    @contextlib.contextmanager
    def follow(self, batcher: "SampleBatcher", start: int, stop: int, columns: Any) -> "Iterator[FetchAhead]":
        """While the batches from `start` on are gathered, of which those up to `stop` will be."""
        with self._changed:
            same = self._batcher() is batcher and self._columns == columns
            if not (same and self._at <= start <= max(self._shards_from, self._windows_from, self._at + 1)):
                self._forget()
                self._shards_from = self._windows_from = start
            self._batcher, self._columns, self._stop = weakref.ref(batcher), columns, stop
            self._end = batcher.end if _serving_others else stop
            self._pass(start)
        try:
            yield self
        except BaseException:  # an error, or nobody wants more
            self.stop()
            raise
        if self._at + 1 >= stop and not _serving_others:
            self.stop()

    def before(self, batch: int) -> None:
        """To be called before this batch is gathered."""
        with self._changed:
            self._pass(batch)
            if self._scouting or not (self._looks_for_shards() or self._looks_for_windows()):
                return
            self._scouting = True
            turn = self._turn
        _WINDOWS.put(-1, self, lambda: self._scout(turn))

    def _pass(self, batch: int) -> None:
        """What only earlier batches need is dropped; a shard that this one needs will be open. With the lock held."""
        self._at = batch
        for passed in [one for one in self._until if one < batch]:
            for window in self._until.pop(passed):
                if self._last.get(window) == passed:
                    del self._last[window], self._reads[window]
                    self._window_bytes -= window.stop - window.begin
        for file, needed in list(self._shards.items()):
            if needed > batch:
                break  # they are in this order
            self._shard_bytes -= self._size(file)
            del self._shards[file]
            self._full = False

    def stop(self) -> None:
        """Nothing is wanted any more: what is queued is dropped; who is fetching something ends with that."""
        if self._process != os.getpid():
            return  # a fork's child has the parent's locks as they were
        with self._changed:
            self._forget()
            self._batcher = lambda: None
        for queue in (_SHARDS, _WINDOWS):
            queue.drop(self)

    def _forget(self) -> None:
        self._turn += 1
        self._scouting = self._full = False
        self._shards, self._reads, self._until, self._last = {}, {}, {}, {}
        self._shard_bytes = self._window_bytes = 0

    def _size(self, file: int) -> int:
        remote = self._files[file]
        return 0 if remote is None else remote.size

    def _looks_for_shards(self) -> bool:
        return bool(self._most) and not self._full and self._shards_from < min(self._at + FARTHEST // 2, self._end)

    def _looks_for_windows(self) -> bool:
        near = self._windows_from < min(self._at + FARTHEST_WINDOWS // 2, self._stop)
        return near and self._window_bytes < self._most

    # The scout ------------------------------------------------------------------------------------------------

    def _scout(self, turn: int) -> None:
        try:
            while (batcher := self._batcher()) is not None and self._turn == turn:
                remote = batcher.remote_pieces()
                if remote is None:
                    return
                more = remote.has_windows and self._scout_windows(batcher, remote, turn)
                more |= remote.has_shards and self._scout_shards(batcher, remote, turn)
                if not more:
                    return
        finally:
            with self._changed:
                if self._turn == turn:
                    self._scouting = False

    def _routed(self, batcher: "SampleBatcher", remote: Any, first: int, stop: int) -> "tuple[Any, int]":
        """(the parts that batches [first, stop) read, tokens of one batch)."""
        places, counts, tokens = batcher.stretches_of(first, stop, self._columns)
        return remote.parts(places, counts), max(1, tokens)

    def _scout_shards(self, batcher: "SampleBatcher", remote: Any, turn: int) -> bool:
        """Looks at some batches; False: far enough."""
        first = max(self._shards_from, self._at)
        stop = min(first + LOOKED_AT, self._end, self._at + FARTHEST)
        if remote.all_open():
            first = stop = min(self._at + FARTHEST, self._end)
        if stop <= first or self._full:
            with self._changed:
                if self._turn == turn:
                    self._shards_from = max(self._shards_from, first)
            return False
        parts, tokens = self._routed(batcher, remote, first, stop)
        files, at = remote.shards(parts)
        files, where = np.unique(files, return_index=True)
        order = np.argsort(at[where], kind="stable")
        for file, batch in zip(files[order].tolist(), (first + at[where][order] // tokens).tolist(), strict=True):
            if (shard := self._files[file]) is None:
                continue
            with self._changed:
                if self._turn != turn:
                    return False
                if file in self._shards:
                    known = True
                elif self._shard_bytes and self._shard_bytes + shard.size > self._most:
                    self._shards_from, self._full = batch, True
                    return False
                else:
                    known = False
                    self._shards[file] = batch
                    self._shard_bytes += shard.size
            there = claim(shard, max(0, batch - self._at))
            if there is None and not known:
                _SHARDS.put(batch, self, lambda shard=shard, batch=batch: self._fetch(shard, batch, turn))  # type: ignore[misc]
        with self._changed:
            if self._turn == turn:
                self._shards_from = stop
        return True

    def _fetch(self, shard: RemoteFile, batch: int, turn: int) -> None:
        if self._turn == turn:
            fetch(shard, max(0, batch - self._at))
            self.evicted = True

    def _scout_windows(self, batcher: "SampleBatcher", remote: Any, turn: int) -> bool:
        """The same for windows, which are read into memory."""
        first = max(self._windows_from, self._at + 1)  # the one at hand is read by who wants it
        stop = min(first + LOOKED_AT // 4, self._stop, self._at + FARTHEST_WINDOWS)
        if stop <= first or self._window_bytes >= self._most:
            return False
        parts, tokens = self._routed(batcher, remote, first, stop)
        windows = remote.windows(parts)
        jobs: dict[int, list[tuple[int, Window]]] = {}
        for file, begin, end, batch in zip(
            *(v.tolist() for v in (windows.files, windows.begins, windows.stops, first + windows.at // tokens)),
            strict=True,
        ):
            jobs.setdefault(file, []).append((batch, Window(file, begin, end)))
        with self._changed:
            if self._turn != turn:
                return False
            self._windows_from = stop
            for file, found in jobs.items():
                self._queue(self._files[file], found, turn)
        return True

    def _queue(self, file: "RemoteFile | None", found: "list[tuple[int, Window]]", turn: int) -> None:
        """Queues the windows of one file, those of near batches together. With the lock held."""
        assert file is not None  # windows are of remote files
        found = [one for one in found if one[0] > self._at]
        new: list[Window] = []
        size, urgency = 0, 0

        def flush() -> None:
            nonlocal size
            if new:
                read = _Read(file, list(new))
                self._reads.update(dict.fromkeys(new, read))
                _WINDOWS.put(urgency, self, lambda: self._read(read, turn))
            new.clear()
            size = 0

        for batch, window in sorted(found):
            self._until.setdefault(batch, []).append(window)
            known = window in self._last
            self._last[window] = batch
            if known:
                continue
            self._window_bytes += window.stop - window.begin
            if not new:
                urgency = batch
            new.append(window)
            size += window.stop - window.begin
            if size >= READ_TOGETHER:
                flush()
        flush()

    def _read(self, read: _Read, turn: int) -> None:
        with self._changed:
            if read.state != QUEUED or self._turn != turn:
                return
            read.state = RUNNING
        self._finish(read)

    def _finish(self, read: _Read) -> None:
        try:
            found = read_ranges(read.file, [(window.begin, window.stop) for window in read.windows])
            read.found = dict(zip(read.windows, found, strict=True))
        finally:
            with self._changed:
                read.state = DONE
                self._changed.notify_all()

    # What the gather asks for ---------------------------------------------------------------------------------

    def bytes_of(self, windows: "list[Window]") -> "list[bytes]":
        """The bytes of each; what is not there yet is waited for, or read now. Raises TokenFileError."""
        found: dict[Window, bytes] = {}
        with self._changed:
            reads = {id(read): read for window in windows if (read := self._reads.get(window)) is not None}.values()
            ours = [read for read in reads if read.state == QUEUED]
            for read in ours:
                read.state = RUNNING  # here, and now
        missing: dict[int, list[Window]] = {}
        for window in dict.fromkeys(windows):
            if window not in self._reads:
                missing.setdefault(window.file, []).append(window)

        def reading(file: int, wanted: "list[Window]") -> "Callable[[], list[bytes]]":
            remote = self._files[file]
            assert remote is not None  # windows are of remote files
            return lambda: read_ranges(remote, [(window.begin, window.stop) for window in wanted])

        def read_now() -> None:
            calls = [functools.partial(self._finish, read) for read in ours]
            got = side_by_side([*calls, *(reading(*one) for one in missing.items())])[len(calls) :]
            for wanted, some in zip(missing.values(), got, strict=True):
                found.update(zip(wanted, some, strict=True))

        if ours or missing:
            read_now()
        with self._changed:
            for read in reads:
                while read.state == RUNNING:
                    self._changed.wait(WAIT)
                found.update(read.found)
        ours, missing = [], {}
        for window in windows:
            if window not in found:  # reading it ahead failed
                missing.setdefault(window.file, []).append(window)
        if missing:
            read_now()
        return [found[window] for window in windows]
