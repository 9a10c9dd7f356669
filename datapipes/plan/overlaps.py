"""Whether two graphs read a token in common: the proof that what is held out is never trained on.

Windows are cut inside a token space, so two graphs whose spaces are disjoint share neither an input nor a label.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core import IndexedDataPipe, Int64s
from ..fingerprint import file_digest
from ..formats import TokenLayout
from ..read import TokenSpace

__all__ = ["Overlap", "overlap"]


class Overlap(NamedTuple):
    """Two sources that share tokens: how many, and the first of them (path as given for `source`, place in it)."""

    source: str
    other: str
    tokens: int
    file: str
    file_token: int


def overlap(graph: IndexedDataPipe, other: IndexedDataPipe) -> list[Overlap]:
    """What the token spaces of two graphs have in common; empty: no token of one is ever read by the other.

    A record for each pair of sources (of `graph`, of `other`) that share tokens. Files are the same if they are one
    file on disk, or have the same contents by fingerprint (64 blocks of each that may be are read), wherever they lie.
    Texts that stand in two different files are not seen: choose documents by="id" for that.
    """
    digests: dict[str, bytes] = {}
    found = []
    for a in _spaces(graph):
        for b in _spaces(other):
            tokens, place = 0, None
            same = _SameFiles(b.files, digests)
            for f, file in enumerate(a.files):
                for g in same.as_file(file):
                    shared, first = _shared(_in_file(a, f), _in_file(b, g))
                    tokens += shared
                    place = place or (shared and (file.path, first)) or None
            if place:
                found.append(Overlap(a.name, b.name, tokens, *place))
    return found


def _spaces(graph: IndexedDataPipe) -> list[TokenSpace]:
    """The topmost token spaces of a graph, each once."""
    if isinstance(graph, TokenSpace):
        return [graph]
    found = [space for child in graph.children for space in _spaces(child)]
    return list({id(space): space for space in found}.values())


class _SameFiles:
    """Which of some files are the same as another: few are looked at, though all may have as many tokens."""

    def __init__(self, files: "Sequence[TokenLayout]", digests: "dict[str, bytes]") -> None:
        self._files, self._digests = files, digests
        self._by_path: dict[tuple[int, str], dict[str, list[int]]] = {}
        self._by_digest: dict[tuple[int, str], dict[bytes, list[int]]] = {}
        for g, file in enumerate(files):
            paths = self._by_path.setdefault((file.tokens, file.dtype.name), {})
            paths.setdefault(_place(file), []).append(g)

    def as_file(self, file: TokenLayout) -> "list[int]":
        """The indices of those that are this one on disk, or have its contents."""
        kind, path = (file.tokens, file.dtype.name), _place(file)
        paths = self._by_path.get(kind, {})
        found = set(paths.get(path, ()))
        if len(paths) > (path in paths):
            if kind not in self._by_digest:
                known = self._by_digest[kind] = {}
                for place, same in paths.items():
                    known.setdefault(self._digest(place, self._files[same[0]]), []).extend(same)
            found |= set(self._by_digest[kind].get(self._digest(path, file), ()))
        return sorted(found)

    def _digest(self, path: str, file: TokenLayout) -> bytes:
        if path not in self._digests:
            self._digests[path] = file_digest(file)
        return self._digests[path]


def _place(file: TokenLayout) -> str:
    return os.path.realpath(file.local) if file.remote is None else file.remote.url


def _in_file(space: TokenSpace, file: int) -> tuple[Int64s, Int64s]:
    """(begins, stops) of the space's pieces in one file, as places in it."""
    first, source = space.pieces
    low, high = np.searchsorted(source, space.first_tokens[file : file + 2])
    starts = source[low:high] - space.first_tokens[file]
    return starts, starts + np.diff(first[low : high + 1])


def _shared(a: tuple[Int64s, Int64s], b: tuple[Int64s, Int64s]) -> tuple[int, int]:
    """(tokens in pieces of both, the first of them)."""
    starts, stops = b
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])

    def covered(places: Int64s) -> Int64s:
        """How many tokens of b lie before each place."""
        piece = np.searchsorted(starts, places, side="right")
        beyond = np.maximum(stops[np.maximum(piece - 1, 0)] - places, 0) if starts.size else 0
        return before[piece] - np.where(piece > 0, beyond, 0)

    shared = covered(a[1]) - covered(a[0])
    if not shared.any():
        return 0, 0
    begin = a[0][np.flatnonzero(shared)[0]]
    piece = int(np.searchsorted(stops, begin, side="right"))  # the first of b that goes on beyond it
    return int(shared.sum()), int(max(begin, starts[piece]))
