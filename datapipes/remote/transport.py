"""Looking files up, listing them, reading ranges of them, and putting them there."""

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..errors import OutOfRangeError, RemoteFileError, TokenFileError
from . import drivers
from .attempts import Answer, attempted, longest_seconds
from .file_systems import WEB, file_system, path_of
from .urls import RemoteFile, protocol_of, shown

__all__ = [
    "PART",
    "in_order",
    "list_files",
    "list_urls",
    "look_up",
    "read_range",
    "read_ranges",
    "read_whole",
    "upload",
]

PART = 8 << 20
"""Bytes of one request, at most: what is lost when one fails, and what lies in memory, times AT_ONCE."""

AT_ONCE = 8
"""Requests of one call that run beside each other."""

NEAR = 64 << 10
"""Bytes between two ranges that are read along sooner than asked for separately: a request costs more."""

_RENAMED = {"sftp", "ssh", "ftp", "hdfs", "webhdfs", "smb", "local", "file", "arrow_hdfs", "viewfs", "dbfs"}
"""Where a file that is being written is seen: it gets its name when it is whole."""

T = TypeVar("T")
Item = TypeVar("Item")


def look_up(url: str) -> RemoteFile:
    """The file behind a URL. Raises RemoteFileError (ENOENT where there is none), ConfigurationError."""
    return attempted(lambda: drivers.found(url), url, "looked up")


def list_urls(url: str) -> list[str]:
    """The URLs of a folder's own files, or of those that a pattern fits, in the order of their code points; a file's is
    its own. A pattern that fits nothing gives none.

    Raises RemoteFileError (ENOENT for a folder that is not there), ConfigurationError.
    """
    return [name for name, _ in _listed(url)]


def list_files(url: str) -> list[RemoteFile]:
    """As `list_urls`, each as `look_up` gives it: of the listing itself, where that says sizes.

    Raises RemoteFileError, ConfigurationError.
    """

    listed = _listed(url)
    if protocol_of(url) not in WEB and all(isinstance(info.get("size"), int) for _, info in listed):
        return [drivers.described(info, name) for name, info in listed]
    names = [name for name, _ in listed]
    return list(in_order(lambda name, end: attempted(lambda: drivers.found(name), name, "looked up", end), names))


def _listed(url: str) -> "list[tuple[str, dict[str, Any]]]":
    from glob import has_magic

    fs = file_system(url)
    path = path_of(fs, url)
    web = protocol_of(url) in WEB
    pattern = has_magic(urlsplit(path).path if web else path)  # a host may have brackets, and a query its mark

    def listing() -> "list[dict[str, Any]]":
        fs.invalidate_cache()
        if pattern:
            return list(fs.glob(path, detail=True).values())
        return list(fs.ls(path, detail=True))

    found = attempted(lambda: drivers.in_time(listing, longest_seconds()), url, "listed")
    front = url.rstrip("/").removesuffix(path) if url.rstrip("/").endswith(path) else ""
    named = {}
    for info in found:
        name = str(info["name"])
        if web and (name.partition("?")[0].endswith("/") or not (pattern or name.startswith(f"{url.rstrip('/')}/"))):
            continue  # a page's links to itself in another order, and to what is elsewhere
        if info.get("type") != "directory" and not name.endswith("/"):
            named[name if "://" in name else f"{front}{name}" if front else str(fs.unstrip_protocol(name))] = info
    return sorted(named.items(), key=lambda entry: entry[0])


def read_range(file: RemoteFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file. Raises RemoteFileError, OutOfRangeError."""
    return read_ranges(file, [(start, stop)])[0]


def read_ranges(file: RemoteFile, ranges: "Sequence[tuple[int, int]]") -> list[bytes]:
    """Bytes [start, stop) of each of these ranges, in their order; they may lie as they like, also over each other.

    Raises RemoteFileError (ESTALE: the file has changed since it was looked up), OutOfRangeError.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop <= file.size:
            raise OutOfRangeError(f"{shown(file.url)}: has {file.size} bytes, and [{start}, {stop}) was asked for")
    wanted = sorted({(start, stop) for start, stop in ranges if stop > start})
    merged: list[list[int]] = []
    for start, stop in wanted:
        if merged and start - merged[-1][1] <= NEAR:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    parts = [part for start, stop in merged for part in parts_of(start, stop)]
    bodies = [body.data for body in in_order(lambda part, end: read_part(file, *part, end), parts)]
    if len(bodies) == len(ranges) == 1:
        return bodies
    starts = [start for start, _ in parts]
    return [b"".join(_cut(start, stop, starts, bodies)) for start, stop in ranges]


def _cut(start: int, stop: int, starts: "list[int]", bodies: "list[bytes]") -> "Iterator[bytes]":
    from bisect import bisect_right

    k = bisect_right(starts, start) - 1
    while start < stop:
        piece = bodies[k][start - starts[k] : stop - starts[k]]
        yield piece
        start += len(piece)
        k += 1


def parts_of(start: int, stop: int) -> "list[tuple[int, int]]":
    """A range as requests, of about the same size each."""
    count = max(1, -(-(stop - start) // PART))
    step = -(-(stop - start) // count) if stop > start else 1
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def read_part(file: RemoteFile, start: int, stop: int, end: "threading.Event | None" = None) -> drivers.Body:
    """One request's, tried again. Raises RemoteFileError."""
    return attempted(lambda: drivers.read(file, start, stop), file.url, f"read from byte {start} to {stop}", end)


def read_whole(file: RemoteFile) -> drivers.Body:
    """All of a file by one request, and in memory: of a server that knows no ranges. Raises RemoteFileError."""
    return attempted(lambda: drivers.read(file, 0, file.size, timed=False), file.url, "read")


def in_order(
    call: "Callable[[Item, threading.Event], T]", items: "Sequence[Item]", at_once: int = AT_ONCE
) -> "Iterator[T]":
    """What `call` gives of each item, in their order; several at once in threads, a few ahead of what was taken.

    The event is set when no more is wanted: the caller is gone, or another call has raised. The threads do not keep a
    process from ending.
    """
    stop = threading.Event()
    if len(items) <= 1:
        for item in items:
            yield call(item, stop)
        return
    results: list[Future[T]] = [Future() for _ in items]
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    ahead = threading.Semaphore(at_once)

    def work() -> None:
        while ahead.acquire() and not stop.is_set():
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            try:
                results[number].set_result(call(items[number], stop))
            except BaseException as error:
                results[number].set_exception(error)

    for number in range(len(items)):
        numbers.put(number)
    workers = min(at_once, len(items))
    for _ in range(workers):
        threading.Thread(target=work, name="tokenpipe remote", daemon=True).start()
    try:
        for number in range(len(items)):
            result = results[number].result()
            results[number] = Future()  # which holds nothing
            ahead.release()
            yield result
    finally:
        stop.set()
        ahead.release(workers)


def upload(local: "str | os.PathLike[str]", url: str) -> None:
    """Puts a whole file there, in the place of what is there. Its size is compared afterwards.

    What others see is the old file or the whole new one: object stores see to that, elsewhere it is written beside
    its place and renamed. Raises RemoteFileError, TokenFileError for the local file, ConfigurationError.
    """
    try:
        size = (local := Path(local)).stat().st_size
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot be uploaded: {error.strerror}", str(local)) from error
    fs, protocol = file_system(url, uploading=True), protocol_of(url)
    path = path_of(fs, url)

    def put() -> None:
        if protocol in WEB:
            drivers.web_put(url, local)
        elif protocol in _RENAMED:
            folder, _, name = path.rpartition("/")
            beside = f"{folder}/.{name}.{os.urandom(6).hex()}"
            try:
                fs.put_file(str(local), beside)
                fs.mv(beside, path)
            except BaseException:
                if fs.exists(beside):
                    fs.rm_file(beside)
                raise
        else:
            fs.put_file(str(local), path)
        if (there := look_up(url).size) != size:
            raise Answer(f"{there} bytes are there of {size}", again=True)

    if url.endswith("/"):
        raise RemoteFileError(errno.EISDIR, "the URL of a file was expected, not a folder's", shown(url))
    attempted(put, url, "uploaded", most=2)
