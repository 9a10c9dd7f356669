"""What reading a whole token file gives: a hash of all bytes, a CRC-32 a block, its fingerprint, its documents."""

import contextlib
import hashlib
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .document_ends import MOST_THREADS, cores
from .errors import TokenFileError
from .fetch.checks import without_copy
from .filemap import open_checked
from .fingerprint import file_digest
from .formats import DTYPES, TokenLayout
from .formats.places import beside
from .loss_masks import has_loss_masks, loss_layouts
from .manifest import BLOCK, Manifest
from .remote import RemoteFile, look_up, shown

__all__ = ["FileSums", "compare_files", "sum_file", "sum_files", "whole_hash"]

READ = 16 * BLOCK


@dataclass(frozen=True)
class FileSums:
    """hash: BLAKE2b-256 of all bytes, hex. sums: uint32, the CRC-32 of every 64 KiB. digest: the fingerprint, hex.
    documents: None where nobody knows. The rest: of the file that its document ends are in, and of its loss mask.
    """

    hash: str
    sums: npt.NDArray[np.uint32]
    digest: str
    documents: "int | None" = None
    ends_digest: str = ""
    ends_hash: str = ""
    loss_digest: str = ""
    loss_hash: str = ""


def sum_files(files: "Sequence[TokenLayout]", progress: "bool | None" = None) -> Iterator[FileSums]:
    """The sums of each file, in order; some are read at once. Raises TokenFileError."""
    from tqdm import tqdm

    lock, threads, ended = threading.Lock(), min(MOST_THREADS, cores(), len(files)), threading.Event()
    total = sum(file.size for file in files)
    disable = None if progress is None else not progress  # None: no bar where stderr is no terminal
    waiting: deque[Future[FileSums]] = deque()
    pool = ThreadPoolExecutor(threads, "tokenpipe sums")
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, dynamic_ncols=True, disable=disable) as bar:

        def read(count: int) -> None:
            if ended.is_set():  # nobody waits for the rest of a file of a terabyte
                raise TokenFileError("reading was given up")
            with lock:
                bar.update(count)

        try:
            for file in files:
                waiting.append(pool.submit(sum_file, file, read))
                if len(waiting) > 4 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)


def sum_file(file: TokenLayout, read: "Callable[[int], Any]" = lambda count: None) -> FileSums:
    """Reads a file, and what lies beside it; `read` hears of each count of bytes. Raises TokenFileError."""
    # what a manifest says may be out of date
    file = replace(
        file, digest="", ends_digest="", loss_digest="", loss_hash="", has_loss=None, blocks=None, verify="size"
    )
    counted = _Documents(file)
    digest, sums = hashlib.blake2b(digest_size=32), []
    for data in blocks_of(file):
        digest.update(data)
        sums += [zlib.crc32(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK)]
        counted.look(data)
        read(len(data))
    documents = counted.documents()
    found = FileSums(digest.hexdigest(), np.array(sums, np.uint32), file_digest(file).hex(), documents)
    if file.ends_path:
        index = TokenLayout(file.ends_path, DTYPES["uint8"], 0, file.ends_size, file.ends_size, remote=file.ends_remote)
        found = replace(found, ends_digest=file.ends_content, ends_hash=whole_hash(index))
    if has_loss_masks([file]):
        (mask,) = loss_layouts([file])
        found = replace(found, loss_digest=file_digest(mask).hex(), loss_hash=whole_hash(mask))
    return found


def whole_hash(file: TokenLayout) -> str:
    """BLAKE2b-256 of all bytes of a file, hex. Raises TokenFileError."""
    digest = hashlib.blake2b(digest_size=32)
    for data in blocks_of(file):
        digest.update(data)
    return digest.hexdigest()


def blocks_of(file: TokenLayout) -> "Iterator[memoryview]":
    """All bytes of a file of the size that its layout says, some whole blocks at a time, the same memory each time.

    Raises TokenFileError.
    """
    handle = file.opened(lambda path: open_checked(path, file.size, "read", file.known_since))
    try:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer, left = memoryview(bytearray(min(READ, file.size))), file.size
        while left:
            into = buffer[: min(READ, left)]
            left -= into.nbytes
            yield_this = into
            while into.nbytes:
                if not (count := os.readv(handle, [into])):
                    raise TokenFileError(f"{file.path}: was cut while it was read")
                into = into[count:]
            yield yield_this
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot be read: {error.strerror}", file.path) from error
    finally:
        os.close(handle)


class _Documents:
    """How many documents an id closes, counted on the way past."""

    def __init__(self, file: TokenLayout) -> None:
        self.file, self.at, self.count, self.last = file, 0, 0, -1
        self.counts = not file.stored_documents and file.end_of_text is not None
        self.counts &= file.offset % file.dtype.itemsize == 0  # else tokens cross blocks

    def look(self, data: memoryview) -> None:
        """At the next bytes of the file; all but the last are whole blocks."""
        file, begin = self.file, self.at
        self.at += data.nbytes
        low, high = max(file.offset, begin), min(file.offset + file.tokens * file.dtype.itemsize, self.at)
        if self.counts and low < high:
            tokens = np.frombuffer(data[low - begin : high - begin], file.dtype)
            self.count += int(np.count_nonzero(tokens == file.end_of_text))
            self.last = int(tokens[-1])

    def documents(self) -> "int | None":
        file = self.file
        if not self.counts:
            return file.documents if file.stored_documents or file.end_of_text is not None else None
        return self.count + (self.last != file.end_of_text)


def compare_files(manifest: Manifest) -> "Iterator[tuple[TokenLayout, TokenFileError | None]]":
    """Each file of a manifest in order, with what of it, or beside it, is not as when the manifest was made; reads all
    bytes, some files at once. Raises TokenFileError for a manifest whose sums are damaged.
    """

    ended = threading.Event()

    def read(count: int) -> None:
        if ended.is_set():
            raise TokenFileError("reading was given up")

    def compared(at: int) -> "TokenFileError | None":
        file = manifest.files[at]
        sums = file.blocks.sums() if file.blocks else np.empty(0, np.uint32)
        try:
            for remote in filter(None, {file.remote, file.ends_remote}):
                _look_again(remote, file.known_since)
            found = sum_file(file, read)
            _compare(manifest, at, file, sums, found)
        except TokenFileError as error:
            return error
        return None

    with ThreadPoolExecutor(min(MOST_THREADS, cores(), len(manifest.files)), "tokenpipe sums") as pool:
        waiting: deque[Future[TokenFileError | None]] = deque()
        try:
            for at in range(len(manifest.files)):
                waiting.append(pool.submit(compared, at))
                if len(waiting) > 4 * MOST_THREADS:
                    yield manifest.files[at + 1 - len(waiting)], waiting.popleft().result()
            while waiting:
                yield manifest.files[len(manifest.files) - len(waiting)], waiting.popleft().result()
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)


def _look_again(file: RemoteFile, since: str) -> None:
    """Raises TokenFileError where a file has changed at its URL: a copy of the cache would not show it."""
    now = look_up(file.url)
    if now.size != file.size or (file.version and now.version != file.version):
        raise TokenFileError(
            f"{shown(file.url)}: has {now.size} bytes and version {now.version!r} now, {file.size} and "
            f"{file.version!r} when {since}: it was replaced"
        )


def _compare(manifest: Manifest, at: int, file: TokenLayout, sums: np.ndarray, found: FileSums) -> None:
    """Raises TokenFileError where a file's sums are not those of the manifest."""
    bad = np.flatnonzero(found.sums != sums)
    if bad.size or found.hash != manifest.hashes[at]:
        gone = without_copy(file)
        if not bad.size:
            raise TokenFileError(f"{file.path}: BLAKE2b is {found.hash}, and was another when {file.known_since}{gone}")
        begin, every = int(bad[0]) * BLOCK, bad.size == sums.size > 1
        raise TokenFileError(
            f"{file.path}: bytes {begin} … {min(begin + BLOCK, file.size) - 1} are not what they were when "
            f"{file.known_since}; {bad.size} of {sums.size} block(s) differ"
            + (": it was replaced, or written anew" if every else "")
            + gone
        )
    for what, now, then in (
        (file.ends_path, found.ends_hash, manifest.ends_hashes[at]),
        (beside(file.path, ".loss"), found.loss_hash, manifest.loss_hashes[at]),
    ):
        if now != then:
            how = "is gone" if not now else "is new" if not then else "is not what it was"
            raise TokenFileError(f"{what}: {how}, since {file.known_since}")
