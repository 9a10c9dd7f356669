"""Files and shared memory mapped without a file descriptor kept.

Python's mmap module keeps a duplicate of the descriptor for each map, so a few hundred files under the
usual limits, or two loaders over the same ones, end in "too many open files". mmap(2) itself needs the
descriptor only for the call.
"""

import ctypes
import mmap
import os
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TokenFileError

__all__ = ["FileCopy", "FileMap", "SharedMap", "advise", "most_maps", "open_checked"]

MOST_COPIED = 1 << 29
"""Bytes of small files that a process holds in memory where there are too many to be mapped (gather.py)."""

SLAB = 1 << 25
"""Bytes of memory that copies are put into, end to end."""


@cache
def most_maps() -> int:
    """Token files that are mapped at a time in this process: half of what Linux allows it, else 32,765."""
    try:
        return max(1024, int(Path("/proc/sys/vm/max_map_count").read_text()) // 2)
    except (OSError, ValueError):
        return 65_530 // 2


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def advise(address: int, length: int, advice: int) -> None:
    """Tells the kernel what will be done with mapped pages (madvise(2)); a hint, so nothing is said if it fails."""
    _libc().madvise(address, length, advice)


def _mapped(handle: int, size: int, protection: int) -> int:
    """The address of a file that is mapped now. Raises OSError."""
    address = _libc().mmap(None, size, protection, mmap.MAP_SHARED, handle, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot be mapped: {os.strerror(code)}")
    return address


def open_checked(path: Path, size: int, purpose: str = "opened", since: str = "the graph was built") -> int:
    """A descriptor of a file that has `size` bytes still; no program that is started inherits it.
    `since`: when it had them, as in "the manifest X was made".

    Raises TokenFileError.
    """
    try:
        # a pipe has no bytes to wait for
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        was = "" if since == "the graph was built" else f"; it was there when {since}"
        raise TokenFileError(error.errno, f"cannot be {purpose}: {error.strerror}{was}", str(path)) from error
    found = os.fstat(handle).st_size
    if found != size:
        os.close(handle)
        raise TokenFileError(f"{path}: {found} bytes now, {size} when {since}: it was cut or written to")
    return handle


class FileMap:
    """The whole of a file of `size` bytes, from `address` on, until close().

    Whoever copies from the address keeps the map alive meanwhile. Raises TokenFileError.
    """

    mapped = 0
    """Bytes that all maps of this process have."""

    def __init__(self, path: Path, size: int, since: str = "the graph was built") -> None:
        self.address, self.size = 0, size
        handle = open_checked(path, size, "mapped", since)
        try:
            try:
                self.address = address = _mapped(handle, size, mmap.PROT_READ)
            except OSError as error:
                raise TokenFileError(error.errno, error.strerror, str(path)) from error
            FileMap.mapped += size
            advise(address, size, mmap.MADV_RANDOM)  # no read-around: windows are asked for as they are (pages.py)
        finally:
            os.close(handle)

    def array(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """(count,) items from byte `offset` on; not to be used after close()."""
        block: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        array = np.frombuffer(block, dtype, count, offset)
        array.flags.writeable = False
        return array

    def let_go(self, begin: int, count: int) -> None:
        """`count` bytes from page border `begin` on are no longer resident; they stay in the page cache."""
        if self.address and count:
            advise(self.address + begin, count, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmaps the file; calling it again does nothing."""
        if self.address:
            _libc().munmap(self.address, self.size)
            self.address = 0
            FileMap.mapped -= self.size

    def __del__(self) -> None:
        self.close()


class FileCopy:
    """The whole of a small file of `size` bytes in this process's memory, as a FileMap is used.

    Raises TokenFileError.
    """

    held = 0
    """Bytes that all copies of this process have."""

    _slab = np.empty(0, np.uint8)  # large ones get large pages
    _used = 0
    _lock = threading.Lock()

    @staticmethod
    def room(size: int) -> bool:
        """Whether another copy of so many bytes may be made."""
        return FileCopy.held + size <= MOST_COPIED

    def __init__(self, path: Path, size: int, since: str = "the graph was built") -> None:
        self.size = 0
        handle = open_checked(path, size, "read", since)
        try:
            with FileCopy._lock:
                if FileCopy._used + size > FileCopy._slab.size:
                    FileCopy._slab, FileCopy._used = np.empty(max(size, SLAB), np.uint8), 0
                self._data = FileCopy._slab[FileCopy._used : FileCopy._used + size]
                FileCopy._used += -(-size // 64) * 64
            got = os.readv(handle, [self._data.data])
        except OSError as error:
            raise TokenFileError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error
        finally:
            os.close(handle)
        if got != size:
            raise TokenFileError(f"{path}: {got} bytes could be read of {size} when {since}")
        self.address, self.size = self._data.__array_interface__["data"][0], size
        FileCopy.held += size

    def array(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        """(count,) items from byte `offset` on."""
        array = np.frombuffer(self._data.data, dtype, count, offset)
        array.flags.writeable = False
        return array

    def close(self) -> None:
        """Its room may be used again; calling it again does nothing."""
        FileCopy.held -= self.size
        self.size = 0

    def __del__(self) -> None:
        self.close()


class SharedMap:
    """Shared memory, to be read and written; unmapped when neither this nor an array over it is left."""

    def __init__(self, handle: int, size: int) -> None:
        self.size = size
        self._block: Any = (ctypes.c_ubyte * size).from_address(_mapped(handle, size, mmap.PROT_READ | mmap.PROT_WRITE))
        weakref.finalize(self._block, _libc().munmap, ctypes.addressof(self._block), size).atexit = False

    def bytes(self) -> np.ndarray:
        """uint8 (size,): all of it, each time an array of its own."""
        return np.frombuffer(self._block, np.uint8)
