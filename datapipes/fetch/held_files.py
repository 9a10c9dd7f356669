"""Which files of a gather are mapped, copied or open just now: as many as there may be, of all gathers of a process.

    mapped     most files: maps hold no descriptor; beyond `most_maps()` the oldest are given up
    copies     small ones of a gather with more files than that, while there is room (FileCopy): they stay
    opened     files of readers with io="pread" (descriptors.py), `most_descriptors()` at a time

A file is brought here when a token of it is first read, and again when it was given up.
"""

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import Int64s
from ..filemap import FileCopy, FileMap, advise, most_maps
from ..formats import TokenLayout
from .checks import BlockChecks
from .descriptors import CLOSED, MAPPED, OpenFile, most_descriptors
from .remote_pieces import is_gone

if TYPE_CHECKING:
    from .gather import TokenGather

__all__ = ["SMALL", "HeldFiles", "all_held", "let_go"]

SMALL = 1 << 16
"""Bytes of a file up to which it is copied, where there are more files than may be mapped."""

_HELD: "weakref.WeakSet[HeldFiles]" = weakref.WeakSet()
_REGISTERING = threading.Lock()  # a set that grows while another thread walks it raises


def all_held() -> "list[HeldFiles]":
    """Those of every gather of this process."""
    with _REGISTERING:
        return list(_HELD)


def let_go(share: float) -> None:
    """Gives back the resident pages of this share of what all gathers of this process have mapped."""
    for held in all_held():
        held.let_go(share)


def _close_in_child() -> None:
    """A fork's child has the descriptors and copies of its parent's gathers, and gathers of its own."""
    for held in list(_HELD):  # there is no other thread here, nor who would let go of the lock
        held.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class HeldFiles:
    """The files that one gather holds, noted in its tables: `address` of each piece, `arrays` of each entry, `handle`
    of each file. Whoever calls a method, but for `let_go`, has the lock.

    Args:
        gather: whose tables are there; they are written in place.
        reads: bool (files,): which files are read by descriptor.
        checks: compares files that are about to be opened; None: nothing is compared.
    """

    def __init__(self, gather: "TokenGather", reads: np.ndarray, checks: "BlockChecks | None") -> None:
        self._files, self._bounds, self._place = gather.files, gather.bounds, gather.place
        self._address, self._arrays, self._handle = gather.address, gather.arrays, gather.handle
        self._reads, self._checks = reads, checks
        self._by_file: Int64s = np.argsort(gather.file, kind="stable")
        self._cuts: Int64s = np.searchsorted(gather.file[self._by_file], np.arange(len(self._files) + 1))
        self.mapped: dict[int, FileMap] = {}
        self.copies: dict[int, FileCopy] = {}
        self.opened: dict[int, OpenFile] = {}
        self._fetched: dict[int, Path] = {}  # where remote files are that are mapped or open
        self._turn = (0, 0)  # which map, and from which of its bytes on, is let go of next
        self.lock = threading.Lock()  # a map may not be dropped while another thread copies from it
        with _REGISTERING:
            _HELD.add(self)

    def __len__(self) -> int:
        return len(self.mapped) + len(self.copies) + len(self.opened)

    def entries_of(self, f: int) -> "list[int]":
        """The entries that a file has in the table."""
        return self._by_file[self._cuts[f] : self._cuts[f + 1]].tolist()

    def open(self, needed: "set[int]") -> bool:
        """Maps or opens these files; False: they are more than may be open at a time. Raises TokenFileError."""
        read = {f for f in needed if self._reads[f]}
        if len(read) > most_descriptors():
            return False
        if closed := sorted(f for f in read if f not in self.opened):
            self._make_room(lambda held: held.opened, most_descriptors() - len(closed), read)
        for f in closed:
            if self._checks is not None:
                self._checks.opened(f)
            file = self._files[f]
            self.opened[f] = opened = OpenFile(file)
            self._handle[f] = opened.handle
            for entry in self.entries_of(f):
                self._arrays[entry] = opened
            self._note_fetched(f, file, opened.path, read)
        here = (read, self.mapped, self.copies)
        if unmapped := sorted(f for f in needed if not any(f in known for known in here)):
            for f in unmapped:
                self._map(f, needed)
            self._make_room(lambda held: held.mapped, most_maps(), needed)
        return True

    def _map(self, f: int, needed: "set[int]") -> None:
        file = self._files[f]
        if self._checks is not None:
            self._checks.opened(f)
        view: FileMap | FileCopy
        if file.size <= SMALL and len(self._files) > most_maps() and FileCopy.room(file.size):
            view = self.copies[f] = file.opened(lambda path: FileCopy(path, file.size, file.known_since))
        else:
            path, view = file.opened(lambda path: (path, FileMap(path, file.size, file.known_since)))
            self.mapped[f] = view
            self._note_fetched(f, file, path, needed)
        array, address = view.array(file.dtype, file.offset, file.tokens), view.address + file.offset
        for entry in self.entries_of(f):
            pieces = slice(self._bounds[entry], self._bounds[entry + 1])
            self._address[pieces] = self._place[pieces] * file.dtype.itemsize + address
            self._arrays[entry] = array

    def _note_fetched(self, f: int, file: TokenLayout, path: Path, needed: "set[int]") -> None:
        """Notes where the copy of a remote file is."""
        if file.remote is not None:
            self.drop_evicted(needed)
            self._fetched[f] = path

    def drop_evicted(self, needed: "set[int]") -> None:
        """Lets go of copies that the cache has given up, for which the disk has no room."""
        if gone := {f for f, copy in self._fetched.items() if f not in needed and is_gone(copy)}:
            for held in (self.mapped, self.opened):
                self._drop(held, len(gone), held.keys() - gone)

    def _make_room(self, of: "Callable[[HeldFiles], dict[int, Any]]", most: int, needed: "set[int]") -> None:
        """Leaves at most so many maps, or open files, of all gathers: the rest is dropped, this one's first."""
        over = sum(len(of(held)) for held in all_held()) - most
        over -= self._drop(of(self), over, needed)
        for other in [held for held in all_held() if held is not self]:
            if over > 0 and other.lock.acquire(blocking=False):  # one that copies just now keeps its own
                try:
                    over -= other._drop(of(other), over, set())
                finally:
                    other.lock.release()

    def _drop(self, held: "dict[int, Any]", most: int, needed: "set[int]") -> int:
        """Unmaps or closes up to so many files that are not needed, oldest first; gives how many."""
        dropped = list(itertools.islice((f for f in held if f not in needed), max(0, most)))
        for f in dropped:
            for entry in self.entries_of(f):
                self._address[self._bounds[entry] : self._bounds[entry + 1]] = 0
                self._arrays[entry] = None
            self._handle[f] = CLOSED if self._reads[f] else MAPPED
            held.pop(f).close()
            self._fetched.pop(f, None)
        return len(dropped)

    def close(self) -> None:
        """Closes what is read by descriptor, and gives back what was copied; it is read again when it is needed."""
        self._drop(self.opened, len(self.opened), set())
        self._drop(self.copies, len(self.copies), set())

    def let_go(self, share: float) -> None:
        """Gives back the resident pages of this share of all that is mapped, the next in turn."""
        if not self.lock.acquire(blocking=False):  # somebody copies from the maps just now
            return
        try:
            views = list(self.mapped.values())
            if not views:  # a gather of which no row was read yet
                return
            left = -int(-share * sum(view.size for view in views) // mmap.PAGESIZE) * mmap.PAGESIZE
            for _ in range(len(views) + 1):
                which, begin = self._turn
                which %= len(views)
                count = max(0, min(left, views[which].size - begin))
                views[which].let_go(begin, count)
                left -= count
                self._turn = (which, begin + count) if begin + count < views[which].size else (which + 1, 0)
        finally:
            self.lock.release()

    def ask_for_bytes(self, f: int, begin: int, count: int) -> None:
        """Asks the kernel for `count` bytes of file `f`, if it is open, from a page's border on, without waiting."""
        if (opened := self.opened.get(f)) is not None:
            opened.ask_for(begin, count)
        elif (view := self.mapped.get(f)) is not None:
            advise(view.address + begin, min(count, view.size - begin), mmap.MADV_WILLNEED)

    def reader_of(self, f: int) -> "Callable[[int, int], Any]":
        """What gives the bytes [a, b) of file `f`, which is open, as a buffer; not to be kept."""
        if (opened := self.opened.get(f)) is not None:
            return opened.bytes
        view = self.mapped[f] if f in self.mapped else self.copies[f]
        return lambda a, b: view.array(np.dtype(np.uint8), a, b - a)
