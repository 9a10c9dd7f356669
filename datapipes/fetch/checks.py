"""What this process has compared of token files with what their manifest says (`TokenReader(..., verify=)`).

    "size"   nothing here: sizes and headers are looked at by whoever opens a file
    "open"   a file's fingerprint when this process first opens it: 64 blocks of 4 KiB (fingerprint.py); the default
    "read"   besides, the CRC-32 of each block of 64 KiB before a token of it is first copied, and of the header and
             the stored document ends when these are; loss masks, and document ends in a file of their own, are hashed

What was found right stays so for the process, whatever graphs it builds, as long as the file is the same one: device,
inode, size and time are compared each time that it is opened anew.
"""

import contextlib
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core import Int64s
from ..errors import ConfigurationError, TokenFileError
from ..filemap import open_checked
from ..fingerprint import opened_digest
from ..formats import DTYPES, TokenLayout
from ..formats.table import LayoutTable, distinct, has_remote, integers, parts_of
from ..kernels import kernel
from ..remote.shard_cache import give_up

if TYPE_CHECKING:
    from .gather import TokenGather

__all__ = ["LEVELS", "BlockChecks", "as_level", "check_before_scan", "check_ends", "with_verify", "without_copy"]

LEVELS = ("size", "open", "read")
BLOCK_BITS = 16  # of a manifest's blocks of 64 KiB
Blocks = npt.NDArray[np.bool_]


class _Found:
    """Of one file: which file it was, and which of its blocks were right."""

    def __init__(self, identity: "tuple[int, ...]", file: TokenLayout) -> None:
        self.identity = identity
        by_block = file.verify == "read" and file.blocks is not None
        self.sums = file.blocks.sums() if by_block and file.blocks is not None else np.empty(0, np.uint32)
        self.good: Blocks = np.zeros(self.sums.size, np.bool_)


_FOUND: "dict[Any, _Found]" = {}


def as_level(verify: object, files: "Sequence[TokenLayout]", by_window: bool) -> str:
    """`verify`, if these files can be checked so; None: "open" for those that a manifest says something of.

    by_window: whether remote files are read window by window, of which no file and no block can be compared.

    Raises ConfigurationError.
    """
    by_window = by_window and has_remote(files)
    if verify is None:
        known = isinstance(files, LayoutTable) or any(file.blocks is not None for file in files)
        return "open" if known and not by_window else "size"
    if verify not in LEVELS:
        raise ConfigurationError(f"verify is {verify!r}; 'size', 'open' or 'read' would do")
    if verify != "size" and by_window:
        raise ConfigurationError(
            f"io='ranged' reads of remote files no whole blocks that verify={verify!r} could compare; io='mmap', or "
            "verify='size' would do"
        )
    if verify == "size" or isinstance(files, LayoutTable):  # which is of a manifest
        return str(verify)
    without = next((file.path for file in files if not file.digest or file.blocks is None), None)
    if without is not None:
        raise ConfigurationError(
            f"verify={verify!r} compares files with what a manifest says, and {without} was given without one; "
            "`make_manifest` makes it, and TokenReader reads it: TokenReader('all.manifest', verify=…)"
        )
    return str(verify)


def with_verify(files: "Sequence[TokenLayout]", verify: str) -> "Sequence[TokenLayout]":
    """The same files, compared so, as far as they are of a manifest."""
    if isinstance(files, LayoutTable):
        return files.with_field("verify", verify)
    return tuple(file if file.blocks is None else replace(file, verify=verify) for file in files)


# One file -----------------------------------------------------------------------------------------------------


def _look_at(file: TokenLayout) -> _Found:
    """Compares a file that is about to be opened, unless this process did. Raises TokenFileError."""
    handle = file.opened(lambda path: open_checked(path, file.size, since=file.known_since))
    try:
        stat = os.fstat(handle)
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        key = (file.path, file.size, file.digest, file.whole_hash, file.blocks, file.verify)
        found = _FOUND.get(key)
        if found is not None and found.identity == identity:
            return found
        found = _Found(identity, file)
        _compare(file, handle)
    finally:
        os.close(handle)
    if found.sums.size and file.offset:
        _check_range(file, found, 0, file.offset)
    _FOUND[key] = found
    return found


def _compare(file: TokenLayout, handle: int) -> None:
    """The fingerprint, and where it is all that there is, the hash of all bytes. Raises TokenFileError."""
    digest = opened_digest(file, handle).hex()
    expected, what = file.digest, "fingerprint"
    if digest == expected and file.whole_hash and file.verify == "read":
        from ..file_sums import whole_hash  # which reads by this module's layouts

        digest, expected, what = whole_hash(file), file.whole_hash, "BLAKE2b"
    if digest != expected:
        raise TokenFileError(
            f"{file.path}: is not the file that its manifest is of: its {what} is {digest[:16]}…, expected "
            f"{expected[:16]}…; `tokenpipe verify` says what is damaged, and where it was changed on purpose, "
            f"make_manifest makes the manifest anew{without_copy(file)}"
        )


def without_copy(file: TokenLayout) -> str:
    """Gives up the wrong copy of a remote file, which else would stay when the file is right again; for an error."""
    there = file.remote is not None and give_up(file.remote)
    return "; its copy on this machine was removed, and the file is fetched again when it is next opened" * there


def _check_range(file: TokenLayout, found: _Found, begin: int, stop: int) -> None:
    """Checks the blocks that bytes [begin, stop) touch, by reading them. Raises TokenFileError."""
    first, last = begin >> BLOCK_BITS, -(-stop >> BLOCK_BITS)
    todo = first + np.flatnonzero(~found.good[first:last])
    if not todo.size:
        return
    handle = file.opened(lambda path: open_checked(path, file.size, since=file.known_since))
    try:
        for block in todo.tolist():
            _check_block(file, found, block, lambda a, b: os.pread(handle, b - a, a))
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot be read: {error.strerror}", str(file.local)) from error
    finally:
        os.close(handle)


def _check_block(file: TokenLayout, found: _Found, block: int, read: "Callable[[int, int], Any]") -> None:
    begin, stop = block << BLOCK_BITS, min((block + 1) << BLOCK_BITS, file.size)
    crc, expected = zlib.crc32(read(begin, stop)), int(found.sums[block])
    if crc != expected:
        manifest = "" if file.blocks is None else file.blocks.path
        raise TokenFileError(
            f"{file.path}: bytes {begin} … {stop - 1} are damaged: their CRC-32 is {crc:08x}, the manifest {manifest} "
            f"says {expected:08x}; `tokenpipe verify {manifest}` compares all of them, and the file from where it came "
            f"from would do{without_copy(file)}"
        )
    found.good[block] = True


def check_ends(file: TokenLayout) -> None:
    """Compares what a file's stored document ends are read from, unless this process did. Raises TokenFileError."""
    if file.ends_path:
        index = TokenLayout(
            file.ends_path, DTYPES["uint8"], 0, file.ends_size, file.ends_size, kind="document ends",
            remote=file.ends_remote,
        )  # fmt: skip
        _look_at(replace(index, digest=file.ends_digest, whole_hash=file.ends_hash, verify=file.verify))
    elif file.stored_documents:
        found = _look_at(file)
        if found.sums.size:
            _check_range(file, found, file.ends_offset, file.ends_offset + 8 * file.stored_documents)


def check_before_scan(file: TokenLayout) -> None:
    """Compares all that document ends are about to be worked out from: what is found is kept for other processes.

    Raises TokenFileError.
    """
    if file.sequences:
        check_ends(file)
    else:
        found = _look_at(file)
        if found.sums.size:
            _check_range(file, found, 0, file.size)


def _blocks_read(files: "Sequence[TokenLayout]") -> Int64s:
    """int64 (files,): how many blocks of each are checked when they are read."""
    if isinstance(files, LayoutTable):
        return -(-integers(files, "size") >> BLOCK_BITS) * ("read" in distinct(files, "verify"))
    return np.array([0 if f.blocks is None or f.verify != "read" else f.blocks.count for f in files], np.int64)


# The files of a gather ----------------------------------------------------------------------------------------


class BlockChecks:
    """Which blocks of a gather's files this process has found right, as one table, so that one look says of a batch
    whether all that it touches was; with the gather's lock held.

    Args:
        file, place: int64 (pieces,), the file that each of the gather's pieces is in, and its first token there.
    """

    def __init__(self, gather: "TokenGather", file: Int64s, place: Int64s) -> None:
        self._gather = weakref.proxy(gather)  # whose own part this is
        parts = parts_of(gather.files)
        counts = np.concatenate([np.empty(0, np.int64), *map(_blocks_read, parts)])
        self._base = np.where(counts > 0, np.cumsum(counts) - counts, -1)
        self._counts = counts
        self._good = np.zeros(int(counts.sum()), np.bool_)
        self._found: dict[int, _Found] = {}
        offsets = np.concatenate([np.empty(0, np.int64), *(integers(part, "offset") for part in parts)])
        self._file = file
        self._byte: Int64s = offsets[file] + place * np.abs(gather.itemcode)  # in the file, of each piece's first token
        self._table: Int64s = self._base[file]  # (pieces,) of the first block of its file in the table, −1: unchecked

    def opened(self, f: int) -> None:
        """File `f` is about to be opened. Raises TokenFileError."""
        if (file := self._gather.files[f]).verify == "size":
            return
        found = _look_at(file)
        if found.sums.size:
            self._found[f] = found
            self._good[self._base[f] : self._base[f] + self._counts[f]] = found.good

    def all_good(self, places: Int64s, counts: Int64s) -> bool:
        """Whether every block that these stretches touch was found right."""
        gather = self._gather
        return not self._good.size or bool(
            kernel("blocks_good")[0](places, counts, gather.first, gather.itemcode, self._byte, self._table, self._good)
        )

    def ask_for(self, places: Int64s, counts: Int64s) -> None:
        """Asks the kernel for the blocks that will be checked: rows alone are less."""
        for f, block in self._todo(places, counts) if self._good.size else ():
            self._gather.held.ask_for_bytes(f, block << BLOCK_BITS, 1 << BLOCK_BITS)

    def check(self, places: Int64s, counts: Int64s) -> None:
        """Checks every block that these stretches touch; their files are open. Raises TokenFileError."""
        todo = self._todo(places, counts)
        with contextlib.suppress(TokenFileError):
            for f, block in todo if len(todo) > 1 else ():
                self._gather.held.ask_for_bytes(f, block << BLOCK_BITS, 1 << BLOCK_BITS)
        for f, block in todo:
            _check_block(self._gather.files[f], self._found[f], block, self._gather.held.reader_of(f))
            self._good[self._base[f] + block] = True

    def _todo(self, places: Int64s, counts: Int64s) -> "list[tuple[int, int]]":
        """(file, block) of all that these stretches touch and nobody checked, of files that are open, in order."""
        gather = self._gather
        which, piece = gather.pieces(places, counts)
        stops = places + counts
        skip = np.maximum(places[which] - gather.first[piece], 0)
        count = np.minimum(gather.first[piece + 1], stops[which]) - gather.first[piece] - skip
        size = np.abs(gather.itemcode[piece])
        low = self._byte[piece] + skip * size
        table = self._table[piece]
        begin, last = low >> BLOCK_BITS, (low + count * size - 1) >> BLOCK_BITS
        blocks = np.where(table >= 0, last - begin + 1, 0)
        within = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        at = np.unique(np.repeat(table + begin, blocks) + within)
        at = at[~self._good[at]]
        first = np.cumsum(self._counts) - self._counts
        file = np.searchsorted(first + self._counts, at, side="right")
        return [(f, b) for f, b in zip(file.tolist(), (at - first[file]).tolist(), strict=True) if f in self._found]
