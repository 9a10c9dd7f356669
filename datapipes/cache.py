"""Arrays that are made once on a machine and mapped from then on: document ends that a scan found, plans of rows.

A cached file is named by what it was made from, so nothing in it is ever out of date; what is damaged or of another
version is made anew, and the whole folder may be deleted at any time. Of processes (and threads) that want the same
file at once one makes it, and the others wait for it. The folder is $TOKENPIPE_CACHE, else tokenpipe/indexes in the
user's cache folder, else one in the temporary folder that is this user's alone.

The file, all integers little-endian:

    byte  0   8   magic  b"TOKINDX\\0"
          8   u32 version, 1
         12   u32 CRC-32 of the header but these four bytes
         16   32  key: BLAKE2b-256 of what it was made from
         48   16  BLAKE2b-128 of what follows the header
         64   u32 CRC-32 of the same, which opening compares (3 GB/s)
         68   u32 how many arrays, up to 4
         72   4 × u64 numbers that the maker wrote beside the arrays
        104   4 × (u64 items, u32 bytes an item: 4 (int32) or 8 (int64), u32 zero)
        168   zeros
        256   the arrays in order, each with zeros up to a multiple of 8
"""

import contextlib
import hashlib
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .atomic import NewFile
from .errors import ConfigurationError, TokenFileError
from .filemap import FileMap

__all__ = [
    "CachedArrays",
    "Made",
    "MappedArrays",
    "alone",
    "cached",
    "index_folder",
    "mapped",
    "own_folder",
    "users_cache",
]

MAGIC = b"TOKINDX\0"
HEADER = 256
_HEADER = struct.Struct("<8sII32s16sII4Q" + "QII" * 4)
_DTYPES: "dict[int, np.dtype]" = {4: np.dtype("<i4"), 8: np.dtype("<i8")}
_BLOCK = 1 << 22

LONGEST_WAIT = 600.0
"""Seconds that a process waits for another one's file, before it makes its own: the other may have been stopped."""


class CachedArrays(NamedTuple):
    """A file that was checked. path: where. digest: 32 hex digits of its arrays. numbers: the maker's four.
    arrays: (dtype, byte offset, items) of each.
    """

    path: Path
    size: int
    digest: str
    numbers: tuple[int, ...]
    arrays: tuple[tuple[np.dtype, int, int], ...]


class Made(NamedTuple):
    """What a maker gives: up to four arrays, each whole or in blocks, which are written as they come; and what it has
    to say beside them once the last block was taken.
    """

    arrays: "Sequence[tuple[Any, Iterable[np.ndarray]]]"
    numbers: "Callable[[], Sequence[int]]"


def cached(kind: str, of: "Sequence[Any]", make: "Callable[[], Made]") -> CachedArrays:
    """The arrays of this kind, made from `of`: strings and integers that say all that decides them.

    Raises ConfigurationError where no folder can be had to keep them in, TokenFileError where the disk is full, what
    `make` raises.
    """
    key = hashlib.blake2b(f"tokenpipe {kind} 1|{list(of)!r}".encode(), digest_size=32).digest()
    path = index_folder() / f"{kind}-{key.hex()[:32]}.idx"
    if (known := _KNOWN.get(path)) is not None and known.path.exists():
        return known
    found = _read(path, key)
    if found is None:
        with alone(path.with_suffix(".lock"), LONGEST_WAIT):
            found = _read(path, key)
            if found is None:
                _clear(path)
                try:
                    _write(path, key, make())
                except OSError as error:
                    if isinstance(error, TokenFileError):  # of what it is made from
                        raise
                    raise TokenFileError(
                        error.errno,
                        f"cannot be kept there ({error.strerror}); TOKENPIPE_CACHE=FOLDER takes another",
                        str(path),
                    ) from error
                found = _read(path, key)
    if found is None:
        raise TokenFileError(
            f"{path}: was damaged as soon as it was written; another folder in TOKENPIPE_CACHE would do"
        )
    _KNOWN[path] = found
    return found


_KNOWN: "dict[Path, CachedArrays]" = {}  # checked once a process


def _read(path: Path, key: bytes) -> "CachedArrays | None":
    """A whole file of this key; None where it is missing, damaged or another's."""
    try:
        with path.open("rb") as file:
            head, size = file.read(HEADER), os.fstat(file.fileno()).st_size
            if len(head) < HEADER or not head.startswith(MAGIC):
                return None
            _, version, head_crc, stored, digest, crc, count, *rest = _HEADER.unpack_from(head)
            if version != 1 or head_crc != _crc(head) or stored != key or count > 4:
                return None
            numbers, shapes = tuple(rest[:4]), [rest[4 + 3 * i : 6 + 3 * i] for i in range(count)]
            arrays: list[tuple[np.dtype, int, int]] = []
            at = HEADER
            for items, itemsize in shapes:
                if itemsize not in _DTYPES:
                    return None
                arrays.append((_DTYPES[itemsize], at, items))
                at += -(-items * itemsize // 8) * 8
            if size != at:
                return None
            found = 0
            while block := file.read(_BLOCK):
                found = zlib.crc32(block, found)
            if found != crc:
                return None
    except OSError:
        return None
    return CachedArrays(path, size, digest.hex(), numbers, tuple(arrays))


def _clear(path: Path) -> None:
    """Removes what processes that were killed left of this file; one that is alive has written to it lately."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LONGEST_WAIT:
                left.unlink()


def _write(path: Path, key: bytes, made: Made) -> None:
    new = NewFile(path)
    try:
        new.file.write(bytes(HEADER))
        digest, crc, shapes = hashlib.blake2b(digest_size=16), 0, []
        for dtype, blocks in made.arrays:
            dtype, items = np.dtype(dtype).newbyteorder("<"), 0
            for block in blocks:
                data = np.ascontiguousarray(block, dtype).view(np.uint8).data
                new.file.write(data)
                digest.update(data)
                crc = zlib.crc32(data, crc)
                items += block.size
            shapes.append((items, dtype.itemsize))
            padding = bytes(-items * dtype.itemsize % 8)
            new.file.write(padding)
            digest.update(padding)
            crc = zlib.crc32(padding, crc)
        numbers = [*made.numbers(), 0, 0, 0, 0][:4]
        flat = [value for i in range(4) for value in (*(shapes[i] if i < len(shapes) else (0, 0)), 0)]
        head = bytearray(HEADER)
        _HEADER.pack_into(head, 0, MAGIC, 1, 0, key, digest.digest(), crc, len(shapes), *numbers, *flat)
        head[12:16] = _crc(head).to_bytes(4, "little")
        new.file.seek(0)
        new.file.write(head)
        new.keep()
    except BaseException:
        new.drop()
        raise


def _crc(head: "bytes | bytearray") -> int:
    return zlib.crc32(head[16:], zlib.crc32(head[:12]))


class MappedArrays:
    """The arrays of a cached file, mapped without a file descriptor; they live as long as this does."""

    def __init__(self, found: CachedArrays) -> None:
        self._map = FileMap(found.path, found.size)
        self.arrays = [self._map.array(dtype, offset, items) for dtype, offset, items in found.arrays]


def mapped(found: CachedArrays, which: int = 0) -> "npt.NDArray[Any]":
    """One of the arrays, mapped anew (a file descriptor as long as the array lives)."""
    dtype, offset, items = found.arrays[which]
    return np.memmap(found.path, dtype, "r", offset, (items,)) if items else np.empty(0, dtype)


# Folders and locks --------------------------------------------------------------------------------------------


def index_folder() -> Path:
    """Where cached files are kept. Raises ConfigurationError where there is no such place."""
    user = os.getuid() if hasattr(os, "getuid") else -1
    if given := os.environ.get("TOKENPIPE_CACHE"):
        path = Path(given)
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # perhaps one that can be read alone, with all that is wanted in it
            return path
        raise ConfigurationError(f"TOKENPIPE_CACHE is {given!r}, which is no folder, nor could be made one")
    for base in users_cache(user):
        if (folder := own_folder(base / "indexes", user)) is not None:
            return folder
    raise ConfigurationError(
        "neither the user's cache folder nor the temporary one can be written, so document ends and plans of rows can "
        "be kept nowhere; TOKENPIPE_CACHE=FOLDER in the environment says where"
    )


def users_cache(user: int) -> "list[Path]":
    """Folders for what this user's processes keep, the best first; they may not be there yet."""
    bases = []
    with contextlib.suppress(RuntimeError):  # no home
        bases = [Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tokenpipe"]
    if user >= 0:
        # a name that others can guess, where they may write: nothing is used there that is not ours
        shared = Path(os.environ.get("TMPDIR") or "/tmp") / f"tokenpipe-{user}"
        bases += [shared] if own_folder(shared, user) else []
    return bases


def own_folder(path: Path, user: int) -> "Path | None":
    """The folder, made if need be, if it is this user's (−1: any) and nobody else may write there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(status.st_mode) and (user < 0 or status.st_uid == user)
    return path if mine and not status.st_mode & 0o022 and os.access(path, os.W_OK) else None


@contextlib.contextmanager
def alone(path: Path, longest: float) -> Iterator[None]:
    """Holds a lock that dies with the process; goes on without it where there is none to be had in `longest` s."""
    handle = None
    try:
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + longest
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)  # flock without LOCK_NB would wait for a stopped process for ever
    except (ImportError, OSError):
        pass  # no such locks on this system: each process works for itself
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
