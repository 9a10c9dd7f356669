"""Where token files and what lies beside them are: on the local disk, or at a URL.

The kinds of token file ask these few functions, so they know nothing of URLs. What is found at URLs while a reader is
built is remembered that long (`looking`): a folder is listed once instead of asking for each of its files.
"""

import contextlib
import contextvars
import errno
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from ..errors import RemoteFileError
from ..remote import RemoteFile, claim, fetch, is_remote, list_files, look_up, read_ranges, shown

__all__ = [
    "Url",
    "as_place",
    "beside",
    "exists",
    "find",
    "list_folder",
    "list_many",
    "local_path",
    "looking",
    "loss_path",
    "opened",
    "read_part",
    "read_parts",
    "size_of",
    "together",
]

MOST_THREADS = 16
SOME = 4  # files of a folder that are asked for one by one rather than by listing it
FAR = 1 << 20  # batches: reading a few bytes of a copy is no reason to keep it
KEPT = 1 << 16  # bytes of a head or a small file that are kept
BEGUN = 1 << 13  # bytes of the local file opened last that are kept: its header, and a sample of its tokens

Given = TypeVar("Given")
Made = TypeVar("Made")


class Url(str):
    """A URL that no message shows the secrets of: str(), format() and repr() leave out user info and query."""

    __slots__ = ()

    @property
    def whole(self) -> str:
        return str.__str__(self)

    def __str__(self) -> str:
        return shown(self.whole)

    def __format__(self, how: str) -> str:
        return format(str(self), how)

    def __repr__(self) -> str:
        return repr(str(self))


class _Looked:
    """What was found while a reader is built: files by URL (None: there is none), folders that are listed."""

    def __init__(self) -> None:
        self.files: dict[str, RemoteFile | None] = {}
        self.folders: set[str] = set()
        self.begun = ("", b"")  # the local file that was opened last, and what it begins with


_LOOKED: "contextvars.ContextVar[_Looked | None]" = contextvars.ContextVar("looked", default=None)


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Remembers what is found at URLs, until the outermost of these ends: files are as they were at one moment."""
    if _LOOKED.get() is not None:
        yield
        return
    token = _LOOKED.set(_Looked())
    try:
        yield
    finally:
        _LOOKED.reset(token)


def as_place(path: "str | os.PathLike[str]") -> str:
    """A path as it is; a URL as one that shows no secrets."""
    text = os.fspath(path)
    return Url(text) if is_remote(text) and not isinstance(text, Url) else text


def find(url: str) -> "RemoteFile | None":
    """What is at a URL; None: nothing. Raises RemoteFileError."""
    looked = _LOOKED.get()
    if looked is not None and (url in looked.files or _folder(url) in looked.folders):
        return looked.files.get(url)
    file = None
    try:
        file = look_up(_whole(url))
    except RemoteFileError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR):
            raise
    if looked is not None:
        looked.files[url] = file
    return file


def exists(path: "str | Path") -> bool:
    """Whether something has this name; a name that none can have, too long with a suffix, is nothing's.

    A store that lists nothing says of what is not there that it may not be read: that is nothing too.
    """
    if isinstance(path, Path) or not is_remote(path):
        return os.path.exists(_on_disk(os.fspath(path)))  # noqa: PTH110 - Path.exists raises for such a name
    try:
        return find(path) is not None
    except RemoteFileError as error:
        if error.errno != errno.EACCES:
            raise
        return False


def beside(path: "str | os.PathLike[str]", suffix: str, instead_of: str = "") -> str:
    """The path or URL of a file beside this one: its own and the suffix, which may take the place of another."""
    text = as_place(path)
    if not isinstance(text, Url):
        local = _on_disk(text.removesuffix(instead_of) + suffix)
        return str(Path(local)) if "//" in local or "/." in local or local[:2] == "./" else local
    base, mark, query = text.partition("?") if text.startswith(("http://", "https://")) else (text[:], "", "")
    return Url(base.removesuffix(instead_of) + suffix + mark + query)


def loss_path(path: "str | os.PathLike[str]") -> Path:
    """Where a local token file's loss mask is, if it has one (loss_masks.py): its own path and `.loss`."""
    return Path(beside(path, ".loss"))


def local_path(path: str) -> Path:
    """Where a path as the caller gave it, a file:// URL perhaps, is on the local disk. What is at another URL is
    fetched into the cache. Raises RemoteFileError.
    """
    return fetch(find(path) or look_up(_whole(path))) if is_remote(path) else Path(path.removeprefix("file://"))


@contextlib.contextmanager
def opened(path: str) -> "Iterator[tuple[int, Callable[[int, int], bytes]]]":
    """(bytes of a file, what reads its bytes [start, stop), fewer where it ends before). Raises OSError."""
    if is_remote(path):
        remote = find(path) or look_up(_whole(path))
        yield remote.size, functools.partial(read_part, remote)
        return
    with open(_on_disk(path), "rb", 0) as file:  # noqa: PTH123 - a Path takes as long as opening it
        if (looked := _LOOKED.get()) is not None:
            looked.begun = path, file.read(BEGUN)
        yield os.fstat(file.fileno()).st_size, functools.partial(_read, file, path)


def size_of(path: str) -> int:
    """Bytes of a file. Raises OSError."""
    return (find(path) or look_up(_whole(path))).size if is_remote(path) else local_path(path).stat().st_size


def read_part(path: "str | RemoteFile", start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer where it ends before; of a remote one nothing else is read. OSError."""
    if isinstance(path, str) and not is_remote(path):
        if (known := _begun(path, start, stop)) is not None:
            return known
        with open(_on_disk(path), "rb") as file:  # noqa: PTH123 - as above
            file.seek(start)
            return file.read(stop - start)
    remote = path if isinstance(path, RemoteFile) else find(path) or look_up(_whole(path))
    if start < KEPT >= remote.size or stop <= KEPT:
        return _head(remote, min(remote.size, KEPT))[start:stop]
    return read_parts(remote, [(start, min(stop, remote.size))])[0] if start < remote.size else b""


@functools.lru_cache(maxsize=64)
def _head(file: RemoteFile, count: int) -> bytes:
    """What a file begins with: its kind, its header and a sample of it are asked for one after the other."""
    return read_parts(file, [(0, count)])[0] if count else b""


def read_parts(file: RemoteFile, ranges: "Sequence[tuple[int, int]]") -> list[bytes]:
    """Bytes [start, stop) of each range of a remote file: of its copy where it is in the cache, or where its server
    gives whole files alone. Raises OSError.
    """
    path = claim(file, FAR)
    if path is None:
        try:
            return read_ranges(file, ranges)
        except RemoteFileError as error:
            if error.errno != errno.ENOTSUP:
                raise
    with contextlib.suppress(FileNotFoundError), (path or fetch(file)).open("rb") as copy:
        return [(copy.seek(start), copy.read(stop - start))[1] for start, stop in ranges]
    return read_ranges(file, ranges)  # it was evicted just now


def list_folder(url: str) -> "list[RemoteFile]":
    """The files of a folder, by URL; from then on they are known while we are `looking`. Raises RemoteFileError."""
    files = list_files(_whole(url).rstrip("/") + "/")
    if (looked := _LOOKED.get()) is not None:
        looked.files.update((file.url, file) for file in files if file.size >= 0)
        if not url.startswith(("http://", "https://")):  # whose listings are pages with some links
            looked.folders |= {url.rstrip("/"), *(_folder(file.url) for file in files)}
    return files


def list_many(urls: "Iterable[str]") -> None:
    """Lists the folders that several of these files are in: one request for many, while we are `looking`."""
    looked = _LOOKED.get()
    for folder, count in Counter(map(_folder, filter(is_remote, urls))).items():
        listed = folder.startswith(("http://", "https://")) or looked is None or folder in looked.folders
        if count >= SOME and not listed:
            with contextlib.suppress(RemoteFileError):  # each file says what it is
                list_folder(folder)


def together(make: "Callable[[Given], Made]", of: "Iterable[Given]", urls: "Iterable[str]") -> "list[Made]":
    """`make` of each, in order; several at once where it asks URLs, whose folders are listed if that is less."""
    of, remote = list(of), [url for url in urls if is_remote(url)]
    if not remote:
        return [make(one) for one in of]
    with looking():
        list_many(remote)
        with ThreadPoolExecutor(min(MOST_THREADS, len(of)), "tokenpipe files") as pool:
            calls = [pool.submit(contextvars.copy_context().run, make, one) for one in of]
            try:
                return [call.result() for call in calls]
            finally:
                for call in calls:
                    call.cancel()


def _whole(url: str) -> str:
    return url.whole if isinstance(url, Url) else url


def _on_disk(path: str) -> str:
    """Where a local path is, as `local_path` says, which takes ten times as long."""
    return path.removeprefix("file://") or "."


def _begun(path: str, start: int, stop: int) -> "bytes | None":
    """Bytes [start, stop) of the local file that was opened last, where they are known."""
    name, begun = ("", b"") if (looked := _LOOKED.get()) is None else looked.begun
    return begun[start:stop] if name == path and (stop <= BEGUN or len(begun) < BEGUN) else None


def _read(file: "IO[bytes]", path: str, start: int, stop: int) -> bytes:
    known = _begun(path, start, stop)
    if known is not None:
        return known
    file.seek(start)
    found = b""
    while len(found) < stop - start and (more := file.read(stop - start - len(found))):  # 2 GiB at a time
        found += more
    return found


def _folder(url: str) -> str:
    return _whole(url).rpartition("/")[0]
