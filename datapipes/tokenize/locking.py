"""Folders of work that is not finished: one process at a time, what was begun cleared away, a full disk named.

The lock is a file in the folder, held by flock: it ends with its process, however that ends, and other machines that
share the folder see it (NFS: unless it is mounted without locks).
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import ConfigurationError, TokenFileError
from .pieces import is_ours

__all__ = ["Lock", "clear", "full_disk_named", "locked", "unfinished"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LOCK = "lock"


class Lock:
    """A work folder that is this process's alone, until `release`; where its disk has no locks, nobody knows."""

    def __init__(self, folder: Path, handle: int) -> None:
        self.folder, self.handle = folder, handle

    @classmethod
    def take(cls, folder: Path) -> "Lock | None":
        """Makes the folder, and clears away what nobody finished; None where another process has it."""
        while True:
            folder.mkdir(exist_ok=True)
            try:
                handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            except FileNotFoundError:  # another run has just ended
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    os.close(handle)
                    if isinstance(error, BlockingIOError):
                        return None
                    raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), (folder / LOCK).stat()):
                    clear(folder, unfinished)
                    return cls(folder, handle)
            os.close(handle)

    def release(self) -> None:
        """Takes the folder away where nothing is left in it: else finished pieces, or a file that is not ours."""
        with contextlib.suppress(OSError):
            clear(self.folder, unfinished)  # of workers that were ended
        with contextlib.suppress(OSError):
            (self.folder / LOCK).unlink()
        os.close(self.handle)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A Lock for the length of a block. Raises ConfigurationError where another process has the folder."""
    lock = Lock.take(folder)
    if lock is None:
        raise ConfigurationError(
            f"{folder}: another run makes {folder.name.removesuffix('.pieces')} now; wait for it or end it"
        )
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def full_disk_named(target: "Path | str", folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise TokenFileError(
            error.errno,
            f"cannot be written: {os.strerror(error.errno)}; make room and run the same again: what is finished is "
            f"kept in {folder}",
            str(target),
        ) from error


def clear(folder: Path, which: "Callable[[str], bool]") -> None:
    for path in list(folder.iterdir()):
        if which(path.name):
            path.unlink(missing_ok=True)


def unfinished(name: str) -> bool:
    """Whether a file of a work folder was not finished, and is of no use."""
    return is_ours(name) and not name.endswith(".piece")
