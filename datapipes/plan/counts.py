"""How many samples of each source a stretch of the run holds: by counts at its ends, never by walking it.

A stretch [lo, hi) of a node's numbers is one stretch of each child's, from its count at lo to that at hi; below
a node whose numbers skip ahead (a jump) it falls apart where they do. So a question costs O(sources · log),
whatever the stretch's length.

A *source* here is what a share and an epoch can be told of: a child of the topmost blend, or of one further
down that is itself weighted; what an unweighted blend or a concat inside it joins counts as one. Below a
permute or a list of numbers that several sources share nothing can be counted apart: they count as one too.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from ..blend import Blender
from ..core import MAX_NUMBER, IndexedDataPipe, nodes_of
from ..errors import ConfigurationError
from ..fingerprint import order_of
from ..read import TokenReader
from ..slice import TokenWindows

__all__ = ["SourceCounts", "Taken"]

MOST_COUNTED = 512
"""Counts that are kept."""

Stretch = tuple[int, int]
Path = tuple[tuple[IndexedDataPipe, int], ...]
"""((node, index of the child to go to), …) from the order's top down."""


class Taken(NamedTuple):
    """What a stretch of the run takes of one source.

    samples: how many. repeats: those of them that belong to a later epoch than its first. position: samples of
    the source before its next one, what a jump passed over included. epochs: the same in epochs. unseen: samples of
    its first epoch still to come. asked: the share that the weights in force say. bytes_read: of its files.
    """

    samples: int
    repeats: int
    position: int
    epochs: float
    unseen: int
    asked: float
    bytes_read: int


class _Leaf:
    """A node whose numbers are counted but not followed further down: one source's, or a part of it."""

    def __init__(self, node: IndexedDataPipe, path: Path, source: int) -> None:
        self.node, self.path, self.source = node, path, source
        self.length = max(1, len(node))  # samples an epoch
        self.fresh = self.length  # how many of its numbers belong to its first epoch
        self.before = 0  # of its epochs so far, in samples, before its number 0
        if isinstance(node, TokenWindows):
            self._windows(node)
        self.files = [file for below in nodes_of(node) if isinstance(below, TokenReader) for file in below.files]
        self._tokens = sum(file.tokens for file in self.files) or 1
        self.file_bytes = sum(file.tokens * file.dtype.itemsize for file in self.files)

    def _windows(self, node: TokenWindows) -> None:
        """Windows that go on from other ones begin inside an epoch."""

        def epoch(number: int) -> int:
            return int(node.epoch_of(np.array([number], np.int64))[0])

        begun, high = epoch(0), self.length
        if begun < 0:  # of a source that is gone nobody knows
            self.fresh, self.length = MAX_NUMBER, 0
            return
        while epoch(high) == begun:
            high *= 2
        rest = bisect_left(range(high), begun + 1, key=epoch)
        self.fresh = 0 if begun else rest
        self.before = self.length * (begun + 1) - rest

    def bytes_of(self, samples: int) -> int:
        """Of rows of S + 1 tokens, as wide as the files' tokens are on average."""
        return samples * (self.node.sequence_length + 1) * self.file_bytes // self._tokens


class SourceCounts:
    """The sources of a graph, and what any stretch of the run takes of them."""

    def __init__(self, graph: IndexedDataPipe) -> None:
        self.graph, self.order = graph, order_of(graph)
        self.names: list[str] = []
        self.roots: list[list[Path]] = []
        self.leaves: list[_Leaf] = []
        self.blends: list[tuple[Blender, Path]] = []
        """Those whose children are sources, or hold some."""
        self._counted: dict[tuple[int, int], list[int]] = {}
        self._caps: dict[tuple[int, int], tuple[int | None, ...]] = {}
        self._collect(self.order, (), "", ())

    def _collect(self, node: IndexedDataPipe, path: Path, name: str, root: Path) -> None:
        """name, root: of the source that the node is a part of, and where that source begins."""
        if node.steps is not None or node.topology is not None:
            raise ConfigurationError(
                f"{type(node).__name__} joins whole batches, of which no source can be counted; ask each of the graphs "
                "below"
            )
        if _is_leaf(node):
            source = self._source(name or node.name or node.functional_name, root if name else path)
            self.leaves.append(_Leaf(node, path, source))
            return
        opened = not name or node.weighted
        if isinstance(node, Blender) and opened:
            self.blends.append((node, path))
        fork = opened and (len(node.children) > 1 or isinstance(node, Blender))
        for index, child in enumerate(node.children):
            below = (*path, (node, index))
            if fork and child.name:
                self._collect(child, below, child.name, below)
            else:
                self._collect(child, below, name, root)

    def _source(self, name: str, root: Path) -> int:
        if name not in self.names:
            self.names.append(name)
            self.roots.append([])
        source = self.names.index(name)
        if root not in self.roots[source]:
            self.roots[source].append(root)
        return source

    # Counting -------------------------------------------------------------------------------------------

    def taken(self, lo: int, hi: int) -> "list[Taken]":
        """What the samples [lo, hi) of the run take of each source, in the order of `names`."""
        samples, repeats, positions, unseen, rows, lengths, seen = ([0] * len(self.names) for _ in range(7))
        stretches: dict[Path, list[Stretch]] = {}
        asked: dict[Path, float] = {(): 1.0}
        self._walk(self.order, (), [(lo, max(lo, hi))], stretches, asked)
        for leaf in self.leaves:
            found, s = stretches[leaf.path], leaf.source
            count = sum(b - a for a, b in found)
            position = found[-1][1]
            samples[s] += count
            repeats[s] += sum(max(0, b - max(a, leaf.fresh)) for a, b in found)
            positions[s] += position
            unseen[s] += max(0, leaf.fresh - position) if leaf.length else 0
            rows[s] += leaf.bytes_of(count)
            lengths[s] += leaf.length
            seen[s] += position + leaf.before if leaf.length else 0
        return [
            Taken(
                samples[s],
                repeats[s],
                positions[s],
                seen[s] / lengths[s] if lengths[s] else 0.0,
                unseen[s],
                sum(asked.get(root, 0.0) for root in self.roots[s]),
                rows[s],
            )
            for s in range(len(self.names))
        ]

    def samples(self, lo: int, hi: int) -> "list[int]":
        """How many samples of each source the run's [lo, hi) hold."""
        stretches: dict[Path, list[Stretch]] = {}
        self._walk(self.order, (), [(lo, max(lo, hi))], stretches)
        found = [0] * len(self.names)
        for leaf in self.leaves:
            found[leaf.source] += sum(b - a for a, b in stretches[leaf.path])
        return found

    def _walk(
        self,
        node: IndexedDataPipe,
        path: Path,
        found: "list[Stretch]",
        stretches: "dict[Path, list[Stretch]]",
        asked: "dict[Path, float] | None" = None,
    ) -> None:
        """Writes down the stretches of every node above the leaves, and the share that each was asked for."""
        stretches[path] = found
        if _is_leaf(node):
            return
        below = self._below(node, found)
        if asked is not None:
            for index, share in enumerate(_asked(node, found, below)):
                asked[(*path, (node, index))] = asked[path] * share
        for index, child in enumerate(node.children):
            self._walk(child, (*path, (node, index)), below[index], stretches, asked)

    def _below(self, node: IndexedDataPipe, found: "list[Stretch]") -> "list[list[Stretch]]":
        """A node's stretches → those of each child; at least one of each, be it empty."""
        if len(node.children) == 1 and not hasattr(node, "counts"):
            return [[piece for lo, hi in found for piece in node.source_stretches(0, lo, hi)]]
        ends = [(self._counts(node, lo), self._counts(node, hi)) for lo, hi in found]
        return [[(lo[i], hi[i]) for lo, hi in ends] for i in range(len(node.children))]

    # Places -----------------------------------------------------------------------------------------------

    def position(self, path: Path, samples: int) -> int:
        """How many numbers of the node at the path's end the run's first samples have come past."""
        for node, index in path:
            samples = self._counts(node, samples)[index]
        return samples

    def _counts(self, node: IndexedDataPipe, hi: int) -> "list[int]":
        """How many of each child's numbers the node's [0, hi) come past; many ask at the same few places."""
        if (id(node), hi) not in self._counted:
            if len(self._counted) >= MOST_COUNTED:
                self._counted.clear()
            counts = getattr(node, "counts", None)
            bounds = counts(hi) if counts else [node.source_bound(i, hi) for i in range(len(node.children))]
            self._counted[id(node), hi] = bounds
        return self._counted[id(node), hi]

    def sample_of(self, path: Path, number: int, hi: int) -> "int | None":
        """The first sample of [0, hi) by which the run has come past this number of the node at the path's end."""
        if number < 0 or self.position(path, hi) <= number:
            return None
        sample = number
        for node, index in reversed(path):
            if not node.in_order:  # it numbers its children in another way than it deals them
                sample = -1
            if sample >= 0:
                sample = int(node.unroute(index, np.array([sample], np.int64))[0])
        if sample >= 0:
            return sample
        return bisect_left(range(hi), number + 1, key=lambda n: self.position(path, n + 1))  # a jump passed over it

    def exhausted(self, source: int, hi: int) -> "int | None":
        """The sample of [0, hi) that is the last of the source's first epoch: after it, samples repeat.

        Of a source in parts: the last first one of a part before a sample of any part repeats.
        """
        leaves = [leaf for leaf in self.leaves if leaf.source == source]
        lasts = [self.sample_of(leaf.path, leaf.fresh - 1, hi) for leaf in leaves]
        again = [at for leaf in leaves if (at := self.sample_of(leaf.path, leaf.fresh, hi)) is not None]
        if again:
            return max((last for last in lasts if last is not None and last < min(again)), default=None)
        return None if None in lasts else max(last for last in lasts if last is not None)

    def capped(self, source: int, hi: int) -> "int | None":
        """The sample of [0, hi) with which a blend's cap on the source, or on a blend around it, is reached."""
        found = []
        for root in self.roots[source]:
            for depth, (node, index) in enumerate(root):
                if isinstance(node, Blender):
                    place = id(node), self.position(root[:depth], hi)
                    if place not in self._caps:
                        self._caps = {place: node.caps_at(place[1])}
                    cap = self._caps[place][index]
                    found.append(self.sample_of(root[: depth + 1], (cap or 0) - 1, hi))
        return min((sample for sample in found if sample is not None), default=None)

    def changes(self, lo: int, hi: int) -> "list[int]":
        """The samples of [lo, hi) from which a blend has other weights than for the sample before: a change, or a
        source that is through while the others go on.
        """
        found = set()
        for blend, path in self.blends:
            begin, stop = self.position(path, lo), self.position(path, hi)
            for first in blend.phases.first[1:].tolist():
                if begin <= first < stop and (sample := self.sample_of(path, first, hi)) is not None:
                    found.add(sample)
        return sorted(found)

    def changes_in_force(self, samples: int) -> int:
        """How many changes of weights hold for the sample after these."""
        return sum(
            sum(change.number <= self.position(path, samples) for change in blend.all_changes() if change.weights)
            for blend, path in self.blends
        )

    def files(self, source: int) -> tuple[int, int]:
        """(how many files the source has, the bytes of their tokens)."""
        leaves = [leaf for leaf in self.leaves if leaf.source == source]
        return sum(len(leaf.files) for leaf in leaves), sum(leaf.file_bytes for leaf in leaves)


def _is_leaf(node: IndexedDataPipe) -> bool:
    return isinstance(node, TokenWindows) or not node.children or not (node.in_order or hasattr(node, "counts"))


def _asked(node: IndexedDataPipe, found: "list[Stretch]", below: "list[list[Stretch]]") -> "list[float]":
    """The share of each child in these numbers, as the weights say; where there are none, as it is."""
    if isinstance(node, Blender):
        due = np.zeros(len(node.children))
        firsts = node.phases.first.tolist()
        for first, until in zip(firsts, [*firsts[1:], MAX_NUMBER], strict=True):
            weights = np.array(node.weights_at(first), np.float64)
            weights /= weights.sum()
            for lo, hi in found:
                held = min(hi, until) - max(lo, first)
                if held > 0 or (lo == hi and first <= lo < until):
                    due += weights * max(held, 1e-9)
        return (due / due.sum()).tolist() if due.any() else due.tolist()
    if hasattr(node, "share"):
        return [node.share(i) for i in range(len(node.children))]
    counts = [sum(b - a for a, b in child) for child in below]
    return [count / sum(counts) if any(counts) else 0.0 for count in counts]
