"""Pages of mapped files: asked for before they are needed, and let go of after.

Read-ahead. Numbers are routed ahead, so the windows of the next batches are known. While files come from disk, the
kernel is asked for the pages of up to READ_AHEAD_BATCHES of them (`madvise(MADV_WILLNEED)`: it begins to read and does
not wait), and each window is read as it is, without the kernel's own read-around (MADV_RANDOM, see filemap.py), which
takes 128 KiB and more from disk for a window of 4 KiB. Whether files come from disk is seen from the process's own
counters of page faults and blocks read, every LOOK gathers: files in the page cache cost nothing but that look.

Letting go. A mapped page that was touched counts as the process's own memory until it is unmapped, and a fault maps
what lies around its page too. When three quarters of `resident_bytes()` have piled up, each look lets go of a share of
the maps (MADV_DONTNEED: the pages stay in the page cache, and only the next touch of each pays for a minor fault) as
large as what has come since the last one; where that does not do, because what was touched lies together, of all. The
kernel's count in /proc/self/statm decides; where there is none, nothing is done. Beyond the bound that costs some 10 µs
a window (200 ns a page, and a fault maps 16 pages, or 2 MiB where the page cache holds large folios: no bound below a
hundred MiB can be kept), so the default is high; files below it cost nothing.

Neither changes a batch, and both belong to the machine, not to the graph or the run; so they are set where the process
is started, and workers inherit them: TOKENPIPE_READ_AHEAD_MIB (default 16 a loader, 0: none) and
TOKENPIPE_RESIDENT_MIB (default 4096, 0: no bound).
"""

import contextlib
import functools
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigurationError, TokenFileError
from ..filemap import FileMap

try:
    import resource
except ImportError:  # not on this system: nothing is known of faults, so nothing is read ahead
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from ..core import Int64s
    from .gather import Columns, TokenGather

__all__ = ["WATCH", "ReadAhead", "read_ahead_bytes", "resident_bytes"]

READ_AHEAD_BATCHES = 32
LOOK = 128  # gathers between two looks, each of which costs some 10 µs
LOOK_NEAR = 32  # the same where files are mapped that may not all stay
MOUTHFUL = 16 << 20  # bytes that are best let go of at once: some 1 ms


@functools.cache
def read_ahead_bytes() -> int:
    """How many bytes of windows are asked for ahead, at most. Raises ConfigurationError."""
    return _mib("TOKENPIPE_READ_AHEAD_MIB", 16)


@functools.cache
def resident_bytes() -> int:
    """How many bytes of mapped files may stay resident; 0: any. Raises ConfigurationError."""
    return _mib("TOKENPIPE_RESIDENT_MIB", 4096)


def _mib(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigurationError(f"{variable} is {text!r}; a number of MiB would do, as {default}")
    return int(text) << 20


class _Watch:
    """What gathers do to this process's memory and disk: looked at once in a while.

    rows_left: rows that may be gathered before the next look. reading: whether files came from disk lately.
    """

    def __init__(self) -> None:
        self.rows_left = 0
        self.reading = False
        self._pause = 1  # gathers until the next look
        self._disk: tuple[int, int] | None = None
        self._others: int | None = None  # resident bytes that are not ours: libraries are mapped files too
        self._ours = 0

    def look(self, rows: int, let_go: "Callable[[float], None]") -> None:
        """After a gather of so many rows; calls `let_go` with a share of the maps where it is time."""
        disk = _disk_counters()
        # the first look finds what was before; only a later one can tell
        self.reading = self._disk not in (None, disk) and read_ahead_bytes() > 0
        self._disk = disk
        bound, grown, most = resident_bytes(), 0, LOOK
        if bound and FileMap.mapped > bound - (bound >> 2):
            grown, most = self._check(bound, let_go), LOOK_NEAR
        # soon after the start, then now and then; sooner where a fault maps much around its page
        self._pause = self._pause // 2 or 1 if grown > min(bound >> 4, MOUTHFUL) else min(self._pause * 2, most)
        self.rows_left = rows * self._pause

    def _check(self, bound: int, let_go: "Callable[[float], None]") -> int:
        """How many bytes have become resident since the last time."""
        held, keep = _shared_bytes(), bound - (bound >> 2)
        if self._others is None:
            self._others = held
        ours = max(0, held - self._others)
        grown = max(0, ours - self._ours)
        if ours > keep:
            excess = ours - keep + grown + (grown >> 1)
            share = 1.0 if ours > bound - (bound >> 3) else min(1.0, excess / ours)
            let_go(share)
            held = _shared_bytes()
            if share == 1.0:
                self._others = held
        self._ours = max(0, held - self._others)
        return grown


def _disk_counters() -> tuple[int, int]:
    """Page faults that waited for a disk, and blocks that this process had read."""
    if resource is None:
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_inblock


def _shared_bytes() -> int:
    """Bytes of files and shared memory that are resident in this process; 0 where nothing says so."""
    try:
        handle = os.open("/proc/self/statm", os.O_RDONLY)  # a few µs; pathlib and open() take five times as long
    except OSError:
        return 0
    try:
        return int(os.read(handle, 256).split()[2]) * mmap.PAGESIZE
    finally:
        os.close(handle)


WATCH = _Watch()


class ReadAhead:
    """Asks for the pages of batches that were routed together, some ahead of the one that is gathered next.

    Args:
        places: int64 (n · rows,), the batches' places in the gather's table.
        columns: what of each row is read.
        more: gives the places of the batches that follow these, at the first need.
    """

    def __init__(
        self,
        gather: "TokenGather",
        places: "Int64s",
        rows: int,
        width: int,
        columns: "Columns | None",
        more: "Callable[[], Int64s]",
    ) -> None:
        self._gather, self._places, self._rows, self._width, self._columns = gather, places, rows, width, columns
        self._more: Callable[[], Int64s] | None = more
        batches = read_ahead_bytes() // (rows * width * 4)
        self._depth = rows * max(1, min(batches, READ_AHEAD_BATCHES))
        self._asked = 0

    def before(self, at: int) -> None:
        """To be called before the batch that begins at row `at` is gathered."""
        if at + self._depth > self._places.size and self._more is not None:
            self._places = np.concatenate([self._places, self._more()])
            self._more = None
        start = max(at, self._asked)
        stop = min(at + self._depth, start + 2 * self._rows)  # grows one by one: no batch waits for many others
        if stop > start:
            self._asked = stop
            with contextlib.suppress(TokenFileError):  # of what says where documents begin: it comes with its own batch
                self._gather.ask_for(*self._gather.stretches(self._places[start:stop], self._width, self._columns))
