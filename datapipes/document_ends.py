"""Where documents end: stored in the file or beside it, or found by one scan for the id that closes them.

    tokens │ 5 8 0 │ 3 0 │ 7 7 7 │        end of text: 0        ends 3, 5, 8: a rest without the id at the file's end
                                                                is a last document

The scan reads a file once, in threads, some chunks at a time (NumPy compares and collects 5 · 10^9 tokens/s a core, a
kernel of ours was no faster), when its ends are first asked for; cache.py keeps what it found, by the file's
fingerprint and the id: as there, an edit between the sampled blocks goes unseen. Measured on two cores of an AMD EPYC,
with the file in the page cache: 10^8 uint16 tokens 0.1 s, in less than 30 MB; from then on 10 ms a process. The ends of
Megatron's pairs, of which the lengths are stored, are added up and kept the same way.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from .cache import CachedArrays, Made, cached
from .core import Int64s
from .errors import ConfigurationError, TokenFileError
from .formats import TokenLayout
from .formats.megatron import document_ends
from .formats.places import read_parts
from .formats.table import LayoutTable, parts_of

if TYPE_CHECKING:
    from .read import TokenSpace

__all__ = [
    "checked_ends",
    "cores",
    "document_places",
    "ends_identity",
    "find_ends",
    "no_document_ends",
    "scanned",
    "space_identity",
]

CHUNK = 1 << 17  # documents looked at in one go
SCANNED = 1 << 20  # tokens compared in one go
MOST_THREADS = 8


def scanned(file: TokenLayout) -> CachedArrays:
    """The document ends of a file that stores none as such: of Megatron's index, or as its `end_of_text` closes them.

    Of a remote file, also those that it stores.

    One array, int64 (documents,); numbers are (tokens, documents, the id, 0). Raises TokenFileError.
    """
    if file.sequences:
        return cached("ends", [file.ends_content, file.size, file.sequences], lambda: _added_up(file))
    if file.stored_documents:  # of a remote file: they are read without the tokens
        return cached("ends", ["stored", *ends_identity(file), file.stored_documents], lambda: _stored(file))
    return cached("ends", [file.content, file.end_of_text], lambda: _scan(file))


def _added_up(file: TokenLayout) -> Made:
    _check(file)
    return Made([(np.int64, document_ends(file))], lambda: (file.tokens, file.stored_documents, 0))


def _check(file: TokenLayout) -> None:
    if file.verify != "size":
        from .fetch.checks import check_before_scan  # which knows of the kernels, and those of what is kept here

        check_before_scan(file)


def _stored(file: TokenLayout) -> Made:
    def blocks() -> Iterator[np.ndarray]:
        assert file.ends_remote is not None  # ends of local files are mapped where they are
        for first in range(0, file.stored_documents, SCANNED):
            begin, stop = (file.ends_offset + 8 * min(n, file.stored_documents) for n in (first, first + SCANNED))
            yield np.frombuffer(read_parts(file.ends_remote, [(begin, stop)])[0], "<u8").astype(np.int64)

    return Made([(np.int64, blocks())], lambda: (file.tokens, file.stored_documents))


def _scan(file: TokenLayout) -> Made:
    _check(file)
    count = 0

    def blocks() -> Iterator[np.ndarray]:
        nonlocal count
        last = 0
        for ends in _found(file):
            if ends.size:
                count, last = count + ends.size, int(ends[-1])
                yield ends
        if last != file.tokens:
            count += 1
            yield np.array([file.tokens], np.int64)

    return Made([(np.int64, blocks())], lambda: (file.tokens, count, file.end_of_text or 0))


def _found(file: TokenLayout) -> Iterator[Int64s]:
    """The places after each such id, chunk by chunk; a few chunks are read at once."""
    size = file.dtype.itemsize
    try:
        handle = file.opened(lambda path: os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot scan for document ends: {error.strerror}", file.path) from error

    def ends_in(first: int) -> Int64s:
        tokens = np.empty(min(SCANNED, file.tokens - first), file.dtype)
        into, at = tokens.view(np.uint8).data, file.offset + first * size
        while into.nbytes:
            if not (read := os.preadv(handle, [into], at)):
                raise TokenFileError(f"{file.path}: was cut after the graph was built")
            into, at = into[read:], at + read
        return np.flatnonzero(tokens == file.end_of_text) + (first + 1)

    threads = min(MOST_THREADS, cores(), -(-file.tokens // SCANNED))
    pool = ThreadPoolExecutor(threads, "tokenpipe scan")
    waiting: deque[Future[Int64s]] = deque()
    try:
        for first in range(0, file.tokens, SCANNED):
            waiting.append(pool.submit(ends_in, first))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        os.close(handle)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_ends(files: "Sequence[TokenLayout]") -> None:
    """Scans those of the files that must be, several at once: of many small ones, waiting for the disk is most."""
    asked = [part for part in parts_of(files) if not isinstance(part, LayoutTable) or part.makes_ends]
    unknown = [file for part in asked for file in part if file.ends_are_made]
    if len(unknown) > 1:
        with ThreadPoolExecutor(min(MOST_THREADS, len(unknown)), "tokenpipe files") as pool:
            list(pool.map(scanned, unknown))


def checked_ends(file: TokenLayout) -> "Iterator[tuple[int, Int64s]]":
    """(first document, its begin and then the ends of up to CHUNK documents) of a file. Raises TokenFileError."""
    stored, last = file.document_ends(), 0
    for at in range(0, file.documents, CHUNK):
        ends = np.concatenate([np.array([last], np.int64), stored[at : at + CHUNK].astype(np.int64)])
        wrong = (np.diff(ends) < 0) | (ends[1:] > file.tokens)
        if wrong.any():
            at += int(np.flatnonzero(wrong)[0])
            raise TokenFileError(f"{file.path}: its document ends are damaged near document {at}: they must increase")
        last = int(ends[-1])
        yield at, ends
    if last != file.tokens:
        raise TokenFileError(f"{file.path}: its document ends stop at token {last} of {file.tokens}")


def no_document_ends(path: str, why: str) -> ConfigurationError:
    """What is raised for a file that does not say where its documents end, and why that matters."""
    return ConfigurationError(
        f"{path}: stores no document ends, and {why}; a file from TokenFileWriter or `tokenpipe tokenize` has them, "
        "TokenReader(..., end_of_text=ID) finds them by the id that closes documents"
    )


def document_places(space: "TokenSpace", what: str) -> Iterator[Int64s]:
    """The ends of a space's documents as its places, in blocks of int64 (n,), rising: those that are empty, or not
    chosen, are left out; the last of all is the number of its tokens.

    Raises ConfigurationError, naming `what` needs them, where a file does not say; TokenFileError.
    """
    find_ends(space.files)
    last = 0
    for file, first in zip(space.files, space.first_tokens.tolist(), strict=False):
        if not file.documents:
            raise no_document_ends(file.path, f"{what} needs them")
        for _, ends in checked_ends(file):
            places = space.places_below(first + ends[1:])
            places = places[np.diff(places, prepend=last) > 0]
            if places.size:
                last = int(places[-1])
                yield places


def ends_identity(file: TokenLayout) -> "list[str | int | None]":
    """What decides a file's document ends, without reading them: the hash in the header of a file of ours, which is of
    its tokens and ends; else the fingerprint of the tokens, and that of the file that the ends are in, or the id that
    was looked for. Raises TokenFileError.
    """
    if file.ends_path:
        return [file.content, file.tokens, file.ends_content]
    stored = file.stored_hash if file.stored_documents else ""
    return [stored or file.content, file.tokens, file.end_of_text]


def space_identity(space: "TokenSpace") -> "list[Any]":
    """What decides the documents of a space and their places in it. Raises TokenFileError."""
    return [space.samples_per_pass, space.choice, [ends_identity(file) for file in space.files]]
