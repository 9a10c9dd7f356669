"""The shard cache: whole remote files on this machine, each downloaded once by whichever process comes first.

    HASH.shard       a whole file, its length and, where it is known, its hash checked before it got this name
    HASH.lock        held (flock, which dies with its holder) while HASH.shard is downloaded
    .HASH.shard.*    what is being downloaded, as long as it will be: so it counts already
    room.lock        held for the moment in which room is made

HASH is BLAKE2b of the URL without credentials, the file's version and its size: what is there is never out of date, no
name of the network's becomes a path, and nothing else in the folder is ever touched. The folder may be deleted at any
time; it is TOKENPIPE_SHARDS, else `shards` in tokenpipe's own cache folder, and nobody else's to write.

Eviction. A cached file's mtime is when it is needed: now, less the batches until then. Where a download would go beyond
TOKENPIPE_SHARDS_GIB (100), those with the smallest mtime go, which come back last. Who has one open or mapped keeps it.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..atomic import NewFile
from ..cache import own_folder, users_cache
from ..errors import ConfigurationError, RemoteFileError
from . import drivers
from .attempts import longest_seconds, number_set, request_seconds
from .file_systems import S3, WEB
from .transport import in_order, look_up, parts_of, read_part, read_whole
from .urls import RemoteFile, identity, is_remote, protocol_of, shown

__all__ = ["cache_bytes", "cache_folder", "claim", "fetch", "give_up"]

_NAME = re.compile(r"[0-9a-f]{64}\.shard")
_TEMPORARY = re.compile(r"\.([0-9a-f]{64})\.shard\..+")
TRIES = 3
"""Downloads of a file whose hash is another one than was announced."""

LOOK = 0.02
"""Seconds between two looks at a lock or for room."""


# What readers call --------------------------------------------------------------------------------------------------


def fetch(file: RemoteFile, distance: int = 0) -> Path:
    """The whole file on this machine: downloaded, unless it is there. `distance`: batches until it is needed.

    Several threads and processes may ask for the same at once; one downloads. A file may be evicted as soon as this has
    returned, if others need the room sooner: who finds it gone when opening it asks again.

    Raises RemoteFileError: it cannot be had, it has changed, its hash is another (ESTALE, EIO), the disk is full
    (ENOSPC); ConfigurationError: no folder for the cache, or a file larger than all of it.
    """
    path = cache_folder() / _name(file)
    if _there(path, file, distance):
        return path
    _folder.cache_clear()  # it may have been deleted
    path = cache_folder() / _name(file)
    _check_fits(file)
    try:
        with _alone(path.with_suffix(".lock"), _Patience(path)) as held:
            if not _there(path, file, distance):
                _download(path, file, distance, held)
    except OSError as error:
        if isinstance(error, RemoteFileError):
            raise
        full = f"; {shown(file.url)} has {file.size} bytes" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise RemoteFileError(
            error.errno,
            f"cannot be kept there ({error.strerror}{full}); TOKENPIPE_SHARDS=FOLDER takes another place, "
            "TOKENPIPE_SHARDS_GIB bounds what is taken",
            str(path),
        ) from error
    return path


def claim(file: RemoteFile, distance: int) -> "Path | None":
    """Says that this process needs the file in so many batches (0: now). Its path if it is there, else None."""
    path = cache_folder() / _name(file)
    return path if _there(path, file, distance) else None


def give_up(file: RemoteFile) -> bool:
    """Removes the copy of a file that is not what it should be, as somebody has found; whether there was one."""
    try:
        (cache_folder() / _name(file)).unlink()
    except OSError:
        return False
    return True


def cache_bytes() -> int:
    """The bytes that cached files may have together. Raises ConfigurationError."""
    return int(number_set("TOKENPIPE_SHARDS_GIB", 100.0) * (1 << 30))


def cache_folder() -> Path:
    """Where shards are kept. Raises ConfigurationError."""
    return _folder(os.environ.get("TOKENPIPE_SHARDS"), os.getuid() if hasattr(os, "getuid") else -1)


# Names and places ---------------------------------------------------------------------------------------------------


@lru_cache(4096)
def _name(file: RemoteFile) -> str:
    of = repr((identity(file.url), file.version, file.size, *filter(None, [file.content])))
    return hashlib.blake2b(f"tokenpipe shard 1|{of}".encode(), digest_size=32).hexdigest() + ".shard"


@lru_cache(8)
def _folder(given: "str | None", user: int) -> Path:
    if given:
        with contextlib.suppress(OSError):
            path = Path(given).resolve()
            if (folder := own_folder(path, user)) is not None:
                return folder
        raise ConfigurationError(
            f"TOKENPIPE_SHARDS is {given!r}, which is no folder of this user's that nobody else can write, nor could "
            "be made one; a folder inside it that is not there yet would do"
        )
    for base in users_cache(user):
        if (folder := own_folder(base / "shards", user)) is not None:
            return folder.resolve()
    raise ConfigurationError(
        "neither the user's cache folder nor the temporary one can be written, so remote files can be kept nowhere; "
        "TOKENPIPE_SHARDS=FOLDER in the environment says where"
    )


def _check_fits(file: RemoteFile) -> None:
    if file.size > (limit := cache_bytes()):
        raise ConfigurationError(
            f"{shown(file.url)}: has {file.size} bytes, more than all cached files may have ({limit}); "
            f"TOKENPIPE_SHARDS_GIB={-(-file.size // (1 << 29)) / 2:g} would let it in alone"
        )
    if not is_remote(file.url):
        source, cache = Path(file.url.removeprefix("file://")).resolve().parent, cache_folder()
        if source == cache or source in cache.parents or cache in source.parents:
            raise ConfigurationError(
                f"{shown(file.url)}: the shard cache is {cache}, and it must not be, hold or be inside the folder that "
                "files come from; TOKENPIPE_SHARDS=FOLDER takes another"
            )


def _there(path: Path, file: RemoteFile, distance: int) -> bool:
    """Whether the file is there, which says when it is needed; an earlier time stays."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:  # a link, or not ours: never followed
        return False
    if (needed := time.time() - distance) > status.st_mtime + 1.0:
        with contextlib.suppress(OSError):  # evicted just now
            os.utime(path, (needed, needed), follow_symlinks=False)
    return True


def _shards(folder: Path) -> "list[tuple[Path, os.stat_result]]":
    """What the cache has put there, those that are being downloaded included."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((folder / entry.name, status))
    return found


# Locks --------------------------------------------------------------------------------------------------------------


_held: "set[int]" = set()


def _after_fork() -> None:
    """A child must not hold on to what its parent's threads have locked: they may end without it."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _alone(path: Path, patience: "_Patience") -> "Iterator[bool]":
    """Holds a lock, or goes on without it (False) where its holder has stopped doing anything. Raises OSError."""
    while (handle := _lock(path)) is None and not patience.over():
        time.sleep(LOOK)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _unlock(path, handle)


def _lock(path: Path) -> "int | None":
    """A descriptor that holds the lock; None where another process or thread does. Raises OSError (a link there)."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags, 0o600)
    _held.add(handle)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # its holder removes it: a lock on what was removed in the meantime is none
        if os.fstat(handle).st_nlink:
            return handle
    except BlockingIOError:
        pass
    except (ImportError, OSError):
        return handle  # no such locks on this system: each works for itself
    _held.discard(handle)
    os.close(handle)
    return None


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where a child was forked as it was opened
    _held.discard(handle)
    os.close(handle)


class _Patience:
    """How long another process's download is waited for: while bytes come, and then as long as its tries may take."""

    def __init__(self, path: Path) -> None:
        self._path, self._newest = path, 0.0
        self._changed = self._looked = time.monotonic()

    def over(self) -> bool:
        if (now := time.monotonic()) < self._looked + 1.0:
            return False
        self._looked = now
        newest = max((_mtime(left) for left in self._path.parent.glob(f".{self._path.name}.*")), default=0.0)
        if newest != self._newest:
            self._newest, self._changed = newest, now
        return now - self._changed > longest_seconds() + 2 * request_seconds()


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


# Downloads ----------------------------------------------------------------------------------------------------------


def _download(path: Path, file: RemoteFile, distance: int, held: bool) -> None:
    """held: with the file's lock, so what another process has begun is left of one that was killed."""
    for left in path.parent.glob(f".{path.name}.*") if held else ():
        left.unlink(missing_ok=True)
    if path.is_symlink():
        path.unlink()
    new = _room(path, file)
    try:
        for _ in range(TRIES):
            if not (wrong := _fill(new, file)):
                break
        else:
            raise RemoteFileError(errno.EIO, f"cannot be fetched, {TRIES} times: {wrong}", shown(file.url))
        new.file.flush()
        needed = time.time() - distance
        os.utime(new.file.fileno(), (needed, needed))
        new.keep()
    except BaseException:
        new.drop()
        raise


def _fill(new: NewFile, file: RemoteFile) -> str:
    """Writes the whole body. What is wrong with it, or "". Raises RemoteFileError, OSError of the disk."""
    known: drivers.Sum | None = None
    made, count = None, 0
    new.file.seek(0)
    for body in _bodies(file):
        if not count and (known := body.whole) is not None:
            made = new_hash(known.kind)
        if made is not None:
            made.update(body.data)
        new.file.write(body.data)
        count += len(body.data)
    if count != file.size:
        return f"{count} bytes came of {file.size}"
    if known is not None and made is not None:
        if (digest := made.hexdigest()) != known.digest:
            return f"its {known.kind} is {digest}, and {known.digest} was announced"
    elif protocol_of(file.url) not in (*WEB, *S3) and _changed(now := look_up(file.url), file):
        # nothing else has said whether all parts are of one version
        raise RemoteFileError(errno.ESTALE, f"it has changed since it was looked up: now {now!r}", shown(file.url))
    return ""


def _changed(now: RemoteFile, file: RemoteFile) -> bool:
    return now.size != file.size or (file.version != "" and now.version != file.version)


def _bodies(file: RemoteFile) -> "Iterator[drivers.Body]":
    """The file's parts in order, fetched several at once; from a server that knows no ranges, all at once."""

    def part(bounds: "tuple[int, int]", end: threading.Event) -> drivers.Body:
        return read_part(file, *bounds, end)

    try:
        yield from in_order(part, parts_of(0, file.size))
    except RemoteFileError as error:
        if error.errno != errno.ENOTSUP:
            raise
    else:
        return
    yield read_whole(file)


class _Crc32c:
    def __init__(self, made: Any) -> None:
        self._made, self.update = made, made.update

    def hexdigest(self) -> str:
        return str(self._made.digest().hex())


def new_hash(kind: str) -> Any:
    """An object with `update` and `hexdigest`; None where there is no code for it."""
    if kind != "crc32c":
        return hashlib.new(kind, usedforsecurity=False)
    try:
        from google_crc32c import Checksum  # comes with gcsfs
    except ImportError:
        return None
    return _Crc32c(Checksum())


# Room ---------------------------------------------------------------------------------------------------------------


def _room(path: Path, file: RemoteFile) -> NewFile:
    """A new file that is as long as it will be, once there is room for it: waits for other downloads to end."""
    room, until = path.parent / "room.lock", time.monotonic() + longest_seconds()
    while True:
        with _alone(room, _Patience(room)):
            if _make_room(path.parent, file.size, cache_bytes()):
                new = NewFile(path)
                try:
                    os.truncate(new.file.fileno(), file.size)
                except BaseException:
                    new.drop()
                    raise
                return new
        if time.monotonic() > until:
            raise RemoteFileError(
                errno.ENOSPC,
                f"no room for its {file.size} bytes: files that are being downloaded take all of the {cache_bytes()} "
                "that TOKENPIPE_SHARDS_GIB allows",
                shown(file.url),
            )
        time.sleep(LOOK)


def _make_room(folder: Path, size: int, limit: int) -> bool:
    """Evicts until so many bytes fit. With the room's lock held."""
    found = _shards(folder)
    total = sum(status.st_size for _, status in found)
    if total + size <= limit:
        return True
    for path, status in found:
        if (left := _TEMPORARY.fullmatch(path.name)) and (handle := _lock(folder / f"{left[1]}.lock")) is not None:
            # nobody downloads it
            with contextlib.suppress(OSError):
                path.unlink()
                total -= status.st_size
            _unlock(folder / f"{left[1]}.lock", handle)
    whole = sorted((status.st_mtime, path.name, status.st_size) for path, status in found if _NAME.fullmatch(path.name))
    for _, name, freed in whole:
        if total + size <= limit:
            break
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
        total -= freed
    return total + size <= limit
