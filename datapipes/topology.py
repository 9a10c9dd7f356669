"""A process's place among the ranks: the only rank arithmetic in the library."""

from dataclasses import dataclass

import numpy as np

from .core import Int64s
from .errors import ArgumentTypeError, TopologyError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Rank and size on each axis: data, tensor, pipeline, context parallel.

    Peers of one dp rank on the other axes see the same samples.
    Raises TopologyError where a rank is not in [0, size).
    """

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            for name, value in (("size", size), ("rank", rank)):
                if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                    raise ArgumentTypeError(f"{axis}_{name} must be an integer, got {value!r}")
            if size < 1:
                raise TopologyError(f"{axis}_size is {size}; 1 or more would do")
            if not 0 <= rank < size:
                raise TopologyError(f"{axis}_rank is {rank}, {axis}_size {size}; a rank of 0 … {size - 1} would do")

    def __str__(self) -> str:
        shown = [axis for axis in ("dp", "tp", "pp", "cp") if axis == "dp" or getattr(self, f"{axis}_size") > 1]
        return ", ".join(f"{a} {getattr(self, f'{a}_rank')} of {getattr(self, f'{a}_size')}" for a in shown)

    def slot_of_rank(self, turn: Int64s) -> Int64s:
        """(n,) how far each round is turned → (n,) this dp rank's slot in the round."""
        return (self.dp_rank + turn) % self.dp_size

    def rank_of_slot(self, slot: Int64s, turn: Int64s) -> Int64s:
        """(n,) slots in rounds turned so far → (n,) the dp ranks that take them."""
        return (slot - turn) % self.dp_size
