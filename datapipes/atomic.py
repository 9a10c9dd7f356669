"""Files that are whole or not there: written under another name, then renamed.

What is written is on the disk before it has its name, and the name is before the call returns.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import ConfigurationError

__all__ = ["NewFile", "check_replaceable", "refuse_url", "replacing", "sync_folder"]


def check_replaceable(path: "str | os.PathLike[str]") -> None:
    """Raises OSError, with the path as it was given, where `replacing(path)` cannot begin: to ask before long work;
    ConfigurationError for a URL.
    """
    refuse_url(path)
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has this name; a file was to be written", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no folder to write this file in", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "its folder cannot be written", str(path))


def refuse_url(path: "str | os.PathLike[str]") -> None:
    """Raises ConfigurationError for a URL, whose file no rename could make whole."""
    if "://" in (text := os.fspath(path)):
        from .remote.urls import is_remote, shown  # of a package that writes files

        if is_remote(text) or text.lower().startswith(("file://", "local://")):
            raise ConfigurationError(
                f"{shown(text)}: files are written on this machine alone; a path would do, and `remote.upload` puts "
                "the file there when it is whole"
            )


class NewFile:
    """A file to write, in the folder of `path`: it takes that name at `keep`, or is thrown away at `drop`.

    Whatever was there before stays until then; a file that is replaced passes on its permissions. Raises OSError.
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        check_replaceable(path)
        self.path = Path(path)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        self._temporary = Path(name)
        self.file: IO[bytes] = os.fdopen(handle, "wb")

    def keep(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self._temporary.chmod(self.path.stat().st_mode & 0o777 if self.path.exists() else 0o644)
        self._temporary.replace(self.path)
        sync_folder(self.path.parent)

    def drop(self) -> None:
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk fails again where a buffer is flushed
            self.file.close()


@contextlib.contextmanager
def replacing(path: "str | os.PathLike[str]") -> Iterator[IO[bytes]]:
    """A NewFile that is kept when the block ends, and dropped where it raises."""
    new = NewFile(path)
    try:
        yield new.file
        new.keep()
    except BaseException:
        new.drop()
        raise


def sync_folder(folder: Path) -> None:
    """Puts the folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
