"""What of a gather's table lies in remote files: whole shards that are fetched, or windows that are read alone.

    cached shards     files that are mapped, or open, once they are in the cache: those that a batch lacks are fetched
                      at once, before the gather maps them
    ranged pieces     (`TokenReader(..., io="ranged")`) are taken out of the kernel's call, as padding is, and filled in
                      afterwards from the bytes of their windows

Both are fetched ahead of need as fetch_ahead.py finds out what is needed; what it could not fetch is asked for again
here, so an error comes with its batch.
"""

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core import Int64s
from ..remote import fetch
from .fetch_ahead import FetchAhead, Window, side_by_side

if TYPE_CHECKING:
    from .gather import TokenGather

__all__ = ["RemotePieces", "Windows"]


class Windows(NamedTuple):
    """Stretches of ranged files. files: int64 (m,), which; begins, stops: (m,) of their bytes. at: (m,) where their
    tokens go, in tokens from the first row's begin on.
    """

    files: Int64s
    begins: Int64s
    stops: Int64s
    at: Int64s


class RemotePieces:
    """The remote files of one gather.

    Args:
        ranged: bool (files,): which of the gather's files are read window by window.
    """

    def __init__(self, gather: "TokenGather", ranged: np.ndarray) -> None:
        self._gather = weakref.proxy(gather)  # whose own part this is
        self._ranged = ranged
        self._shards = np.array([file.remote is not None for file in gather.files], np.bool_) & ~ranged
        self._file: Int64s = np.repeat(gather.file, np.diff(gather.bounds))  # (pieces,)
        self._offset = np.array([file.offset for file in gather.files], np.int64)
        self.ahead = FetchAhead([file.remote for file in gather.files])
        weakref.finalize(gather, self.ahead.stop).atexit = False
        self.has_windows, self.has_shards = bool(ranged.any()), bool(self._shards.any())

    def parts(self, places: Int64s, counts: Int64s) -> "tuple[Int64s, Int64s, Int64s, Int64s]":
        """Stretches cut at the borders of pieces, without padding: (m,) pieces, (m,) places of their first tokens in
        the table, (m,) tokens, (m,) where these go.
        """
        which, piece = self._gather.pieces(places, counts)
        first = self._gather.first
        begin = np.maximum(first[piece], places[which])
        count = np.minimum(first[piece + 1], (places + counts)[which]) - begin
        goes = np.broadcast_to(counts, places.shape)
        return piece, begin, count, (np.cumsum(goes) - goes)[which] + begin - places[which]

    def windows(self, parts: "tuple[Int64s, Int64s, Int64s, Int64s]") -> Windows:
        """What of these parts is in ranged files."""
        piece, begin, count, at = (part[self._ranged[self._file[parts[0]]]] for part in parts)
        gather = self._gather
        size = np.abs(gather.itemcode[piece])
        low = self._offset[self._file[piece]] + (gather.place[piece] + begin - gather.first[piece]) * size
        return Windows(self._file[piece], low, low + count * size, at)

    def shards(self, parts: "tuple[Int64s, Int64s, Int64s, Int64s]") -> "tuple[Int64s, Int64s]":
        """What of these parts is in cached files that are not open: (m,) files, (m,) where their tokens go."""
        piece, at = parts[0], parts[3]
        missing = self._shards[self._file[piece]] & ~self._gather._ready(piece)
        return self._file[piece[missing]], at[missing]

    def all_open(self) -> bool:
        """Whether there is no shard left that would have to be fetched."""
        return len(self._gather.held) >= int((~self._ranged).sum())

    def split(self, places: Int64s, counts: Int64s) -> "tuple[Int64s, Int64s, Windows | None]":
        """(places, counts) of what the kernel is to copy, ranged parts as padding, and these. The shards that are
        missing are fetched. Raises TokenFileError.
        """
        parts = self.parts(places, counts)
        if (files := np.unique(self.shards(parts)[0])).size:
            remote = [self._gather.files[f].remote for f in files.tolist()]
            side_by_side([_fetching(file) for file in remote if file is not None])
        piece, begin, count, at = parts
        ranged = self._ranged[self._file[piece]]
        if not ranged.any():
            return places, counts, None
        goes = np.array(np.broadcast_to(counts, places.shape))
        padding = places < 0
        begins = np.concatenate([np.where(ranged, -1, begin), places[padding]])
        order = np.argsort(np.concatenate([at, (np.cumsum(goes) - goes)[padding]]), kind="stable")
        return begins[order], np.concatenate([count, goes[padding]])[order], self.windows(parts)

    def fill(self, windows: Windows, out: Int64s) -> None:
        """Puts the tokens of these windows where they go. Raises TokenFileError."""
        found = self.ahead.bytes_of(
            [
                Window(*key)
                for key in zip(*(v.tolist() for v in (windows.files, windows.begins, windows.stops)), strict=True)
            ]
        )
        for file, at, data in zip(windows.files.tolist(), windows.at.tolist(), found, strict=True):
            tokens = np.frombuffer(data, self._gather.files[file].dtype)
            out[at : at + tokens.size] = tokens


def _fetching(file: "object") -> "Callable[[], object]":
    return lambda: fetch(file)  # type: ignore[arg-type]


def is_gone(path: "os.PathLike[str]") -> bool:
    """Whether the cache has given up a copy: a map alone still holds its bytes on the disk."""
    return not os.path.exists(path)  # noqa: PTH110
