"""The shuffle: a keyed permutation of each epoch, computed a number at a time, and invertible."""

import hashlib
from typing import Any

import numpy as np

from ._kernels_numpy import _mix
from ._torch import functional_datapipe
from .core import IndexedDataPipe, Int64s, as_count
from .errors import ConfigurationError
from .kernels import kernel
from .slice import SequenceSlicer

__all__ = ["Permuter", "derive_key", "mix64", "permute_numbers"]


def derive_key(seed: int, role: str, name: str = "") -> int:
    """64 bits from seed, role and source name, so that one seed may serve everywhere."""
    text = f"tokenpipe 1|{role}|{seed}|{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute_numbers(
    numbers: Int64s,
    length: int,
    block: int,
    end: int,
    key: int,
    by_block: bool = False,
    inverse: bool = False,
) -> Int64s:
    """Each epoch of `length` numbers, each block of `block` in it, permuted in itself (n,) → (n,)."""
    out = np.empty(numbers.size, np.int64)
    function, _ = kernel("permute")
    function(np.ascontiguousarray(numbers), out, length, min(block, length), end, np.uint64(key), by_block, inverse)
    return out


def mix64(x: np.ndarray) -> np.ndarray:
    """uint64 (n,) → uint64 (n,): the bit mixer of the permutations (SplitMix64's finaliser)."""
    with np.errstate(over="ignore"):
        return _mix(x)


@functional_datapipe("permute")
class Permuter(IndexedDataPipe):
    """Shuffles each epoch by a keyed permutation of its own (functional: `permute`, also `.shuffle`).

    Nothing is stored: number k's place is eight Feistel rounds over the smallest power of two that holds
    the epoch, walked until the value falls inside it (Luby & Rackoff 1988; Black & Rogaway 2002). So the
    first sample of a trillion costs what the first of a thousand does, and so does the inverse.

    Over `slice_sequences(S, unit=U)` the *units* are permuted, in the same order for every part.

    Args:
        seed: 0 … 2**63 − 2; the key also takes in the source's name, so one seed may serve all sources.
        window: permute only within windows of this many samples (locality on slow storage); below a
            blend, never above it.
    """

    functional_name = "permute"
    in_order = False

    def __init__(self, datapipe: IndexedDataPipe, seed: int, window: "int | None" = None) -> None:
        super().__init__(datapipe)
        self.seed = as_count("seed", seed, 0)
        self.window = None if window is None else as_count("window", window, 2)
        self._key = derive_key(self.seed, "permute", self.name)
        self.check()

    def check(self) -> None:
        child = self.datapipe
        self._length = child.end if child.finite else child.samples_per_pass
        self._end = child.end
        self._block = self.window or self._length
        if isinstance(child, SequenceSlicer) and child.unit != child.sequence_length:
            if self.window:
                raise ConfigurationError("window= and unit= exclude one another: units are permuted whole")
            self._block = child.units

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed": self.seed, **({"window": self.window} if self.window else {})}

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        return np.zeros(numbers.size, np.int64), self._permuted(numbers, inverse=False)

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        return np.where(numbers < self._end, self._permuted(np.minimum(numbers, self._end - 1), inverse=True), -1)

    def source_bound(self, source: int, hi: int) -> int:
        """All of the block that `hi` stands in may be touched."""
        if hi <= 0:
            return 0
        epoch, within = divmod(hi - 1, self._length)
        upto = min((within // self._block + 1) * self._block, self._length)
        return min(epoch * self._length + upto, self._end)

    def source_floor(self, source: int, lo: int) -> int:
        """The block that `lo` stands in, from its beginning."""
        epoch, within = divmod(lo, self._length)
        return epoch * self._length + within // self._block * self._block

    def _permuted(self, numbers: Int64s, inverse: bool) -> Int64s:
        return permute_numbers(
            numbers, self._length, self._block, self._end, self._key, self.window is not None, inverse
        )
