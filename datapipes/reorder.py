"""Orders that are brought along: any list of sample numbers in a file, and Nanoset's own order."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import IndexedDataPipe, Int64s, Unpickled, as_count
from .errors import ConfigurationError, OutOfRangeError, TokenFileError
from .fingerprint import files_fingerprint
from .formats import TokenLayout, read_layout
from .kernels import kernel
from .weights import as_shares

__all__ = ["NanosetOrder", "Reorderer"]

CHUNK = 1 << 20  # numbers looked at in one go


@functional_datapipe("reorder")
class Reorderer(IndexedDataPipe):
    """Delivers the child's samples in the order that a file lists (functional: `reorder`).

    Args:
        file: a 1-D int64 `.npy` file of the child's numbers; memory-mapped, fingerprinted, never loaded.
            A number may stand in it more than once.

    Ends with the list: len == end == how many numbers it holds. `unroute` scans the file.
    Raises TokenFileError, and OutOfRangeError for a number that the child does not have, when it is read.
    """

    functional_name = "reorder"
    in_order = False

    def __init__(self, datapipe: IndexedDataPipe, file: "str | os.PathLike[str]") -> None:
        super().__init__(datapipe)
        self.file: TokenLayout = read_layout(file)
        if self.file.dtype != np.dtype("<i8") or self.file.documents:
            raise TokenFileError(f"{self.file.path}: an order is a .npy file of int64, got {self.file.dtype.name}")
        self._content: str | None = None  # read once, not at every save
        self._map = Unpickled()

    @property
    def settings(self) -> dict[str, Any]:
        if self._content is None:
            self._content = files_fingerprint((self.file,))
        return {"order": self._content}

    @property
    def notes(self) -> str:
        return f"{self.file.path}: {self.end:,} numbers"

    @property
    def order(self) -> Int64s:
        """int64 (len,), mapped."""
        if self._map.value is None:
            self._map.value = np.memmap(self.file.local, self.file.dtype, "r", self.file.offset, (self.file.tokens,))
        return self._map.value

    @property
    def samples_per_pass(self) -> int:
        return self.file.tokens

    @property
    def end(self) -> int:
        return self.file.tokens

    @property
    def finite(self) -> bool:
        return True

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        child = np.asarray(self.order[numbers], np.int64)
        if child.size and not (child.min() >= 0 and child.max() < self.datapipe.end):
            at = int(np.flatnonzero((child < 0) | (child >= self.datapipe.end))[0])
            raise OutOfRangeError(
                f"{self.file.path}: entry {numbers[at]} is {child[at]}, but {type(self.datapipe).__name__} has "
                f"numbers 0 … {self.datapipe.end - 1}"
            )
        return np.zeros(numbers.size, np.int64), child

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        which, found = self.places(source, numbers)
        out = np.full(numbers.size, -1, np.int64)
        out[which[::-1]] = found[::-1]  # the first place of each
        return out

    def places(self, source: int, numbers: Int64s) -> tuple[Int64s, Int64s]:
        sort = np.argsort(numbers, kind="stable")
        wanted = numbers[sort]
        which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start in range(0, self.end, CHUNK):
            piece = np.asarray(self.order[start : start + CHUNK])
            low = np.searchsorted(wanted, piece, side="left")
            count = np.searchsorted(wanted, piece, side="right") - low
            for hit in np.flatnonzero(count):
                which.append(sort[low[hit] : low[hit] + count[hit]])
                found.append(np.full(count[hit], start + hit, np.int64))
        return np.concatenate(which), np.concatenate(found)

    def source_bound(self, source: int, hi: int) -> int:
        top = 0
        for start in range(0, min(hi, self.end), CHUNK):
            top = max(top, int(self.order[start : min(start + CHUNK, hi)].max()) + 1)
        return top


@functional_datapipe("order_nanoset")
class NanosetOrder(IndexedDataPipe):
    """Nanoset's order, bit for bit (functional: `order_nanoset`): for runs that began in Nanotron.

    One epoch of E = Σ len samples is dealt greedily by weight, shuffled once by a legacy RandomState, and
    repeated as it is until `num_samples`. It costs what it costs there: O(E) time at start and 16 bytes a
    sample of the epoch; every epoch has the same order; sources repeat within an epoch. `blend` does
    none of that.

    Args:
        datapipe, *others: the sources, unshuffled (`slice_sequences`), in Nanoset's order of data sets.
        num_samples: samples of the run: its len and end.
        weights: as in Nanoset, normalised by their sum; None: by the sources' lengths.
        seed: Nanoset's own default is 1234.
    """

    functional_name = "order_nanoset"
    in_order = False

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        *others: IndexedDataPipe,
        num_samples: int,
        weights: "Sequence[float] | dict[str, float] | None" = None,
        seed: int = 1234,
    ) -> None:
        super().__init__(datapipe, *others)
        self.num_samples = as_count("num_samples", num_samples)
        self.seed = as_count("seed", seed, 0)
        if self.seed >= 1 << 32:
            raise ConfigurationError(f"Nanoset's seed is below 2**32, got {self.seed}")
        self.sources = [child.name for child in self.children]
        self._lengths = np.array([len(child) for child in self.children], np.int64)
        shares = as_shares(self.sources, weights) if weights is not None else [float(n) for n in self._lengths]
        self._weights = np.array(shares, np.float64)
        self._weights = self._weights / np.sum(self._weights)
        self._tables = Unpickled()
        _ = self.sequence_length  # one length for all, or an error here

    @property
    def settings(self) -> dict[str, Any]:
        weights = [float(w).hex() for w in self._weights]
        return {"weights": weights, "seed": self.seed, "lengths": self._lengths.tolist()}

    @property
    def notes(self) -> str:
        return f"{self.epoch:,} samples an epoch in memory, the same order in each"

    @property
    def epoch(self) -> int:
        """E, samples an epoch."""
        return int(self._lengths.sum())

    @property
    def samples_per_pass(self) -> int:
        return self.num_samples

    @property
    def end(self) -> int:
        return self.num_samples

    @property
    def finite(self) -> bool:
        return True

    @property
    def tables(self) -> "tuple[Int64s, Int64s, Int64s]":
        """One epoch: (E,) sources, (E,) how many of the source came before in unshuffled order, and
        (sources,) how many each gives.
        """
        if self._tables.value is None:
            source, count = np.empty(self.epoch, np.int64), np.empty(self.epoch, np.int64)
            function, _ = kernel("nanoset_counts")
            function(self._weights, self._lengths, source, count)
            given = np.bincount(source, minlength=len(self.children)).astype(np.int64)
            for array in (source, count):
                np.random.RandomState(self.seed).shuffle(array)
            self._tables.value = source, count, given
        return self._tables.value

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        sources, counts, given = self.tables
        copy, within = np.divmod(numbers, self.epoch)
        source, count = sources[within], counts[within]
        length = self._lengths[source]
        turn, sample = np.divmod(count, length)
        # the sample's how-manieth delivery this is, so that its epoch tells how often it was seen
        per_copy = (given[source] - sample + length - 1) // length
        return source, sample + length * (copy * per_copy + turn)

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        sources, counts, given = self.tables
        length = int(self._lengths[source])
        delivery, sample = np.divmod(numbers, length)
        per_copy = (given[source] - sample + length - 1) // length
        copy, turn = np.divmod(delivery, np.maximum(per_copy, 1))
        where = np.empty(int(given[source]), np.int64)
        at = np.flatnonzero(sources == source)
        where[counts[at]] = at
        count = sample + turn * length
        known = (per_copy > 0) & (count < given[source])
        found = copy * self.epoch + where[np.where(known, count, 0)] if where.size else np.zeros_like(numbers)
        return np.where(known & (found < self.end), found, -1)

    def share(self, source: int) -> float:
        """The share of a source that was asked for."""
        return float(self._weights[source])

    def counts(self, hi: int) -> list[int]:
        """How many samples of each source the numbers [0, hi) hold."""
        sources, _, given = self.tables
        copies, within = divmod(min(hi, self.end), self.epoch)
        return (copies * given + np.bincount(sources[:within], minlength=len(self.children))).tolist()

    def source_bound(self, source: int, hi: int) -> int:
        length = int(self._lengths[source])
        deliveries = -(-int(self.tables[2][source]) // length)  # of its most frequent sample in one copy
        return -(-hi // self.epoch) * deliveries * length
