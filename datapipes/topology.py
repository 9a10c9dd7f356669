"""A process's place among the ranks: the only rank arithmetic in the library.

Ranks of one `dp_rank` see the same samples. Of those, `pp` says which stage of the pipeline a process is, `cp` which
part of each row it holds, and `tp` peers hold the same:

    torchrun, 8 processes, pp 2 × dp 2 × tp 2     rank   0 1 2 3   4 5 6 7     tp varies fastest, pp slowest
                                                  pp     0 0 0 0   1 1 1 1
                                                  dp     0 0 1 1   0 0 1 1
                                                  tp     0 1 0 1   0 1 0 1
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .core import Int64s, as_count
from .errors import ArgumentTypeError, ConfigurationError, TopologyError
from .kernels import kernel

__all__ = ["Topology"]

AXES = ("dp", "tp", "pp", "cp")
DATA_PARALLEL = (("batch",), ("dp_replicate", "dp_shard"), ("dp",), ("fsdp",))
"""Names of the data-parallel dimensions of a mesh; the first of these that it has counts, torchtitan's first."""
CUTS = ("zigzag", "contiguous", "whole")


@dataclass(frozen=True)
class Topology:
    """Rank and size on each axis: data, tensor, pipeline, context parallel.

    Peers of one dp rank on the other axes see the same samples. By hand, `from_mesh` or `from_environment`.
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
        for axis in AXES:
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            for name, value in (("size", size), ("rank", rank)):
                if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                    raise ArgumentTypeError(f"{axis}_{name} must be an integer, got {value!r}")
            if size < 1:
                raise TopologyError(f"{axis}_size is {size}; 1 or more would do")
            if not 0 <= rank < size:
                raise TopologyError(f"{axis}_rank is {rank}, {axis}_size {size}; a rank of 0 … {size - 1} would do")

    def __str__(self) -> str:
        shown = [axis for axis in AXES if axis == "dp" or getattr(self, f"{axis}_size") > 1]
        return ", ".join(f"{a} {getattr(self, f'{a}_rank')} of {getattr(self, f'{a}_size')}" for a in shown)

    @property
    def processes(self) -> int:
        """How many there are: dp · tp · pp · cp."""
        return math.prod(getattr(self, f"{axis}_size") for axis in AXES)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        dp: "str | Sequence[str] | None" = None,
        tp: "str | Sequence[str] | None" = None,
        pp: "str | Sequence[str] | None" = None,
        cp: "str | Sequence[str] | None" = None,
    ) -> "Topology":
        """This process's place in a torch DeviceMesh of all processes.

        Args:
            mesh: its dimensions have names. Those of torchtitan and Megatron are known: "tp", "pp", "cp", and for the
                data-parallel ranks "batch", else "dp_replicate" and "dp_shard" (flattened in that order), else "dp",
                else "fsdp". A dimension that is not there is 1.
            dp, tp, pp, cp: the dimension of each axis where it has another name; several are flattened in the order
                given, the last varies fastest.

        Raises TopologyError for a mesh without names, one that is not of all processes (a sub-mesh) or that this
        process is not in, a name that it does not have, and a dimension of more than 1 that belongs to no axis.
        """
        if not isinstance(mesh, DeviceMesh):
            raise ArgumentTypeError(f"from_mesh takes a torch DeviceMesh, got {type(mesh).__name__}")
        names, at = mesh.mesh_dim_names, mesh.get_coordinate()
        if not names:
            raise TopologyError(
                f"the mesh of shape {tuple(mesh.shape)} has no names for its dimensions; mesh_dim_names=('pp', 'dp', "
                "'cp', 'tp'), or those of them that it has, would do"
            )
        shape = dict(zip(names, mesh.shape, strict=True))
        shown = ", ".join(f"{name} {size}" for name, size in shape.items())
        if at is None:
            raise TopologyError(
                f"this process is not in the mesh ({shown}); from_mesh on the ranks of the mesh only would do"
            )
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else mesh.size()
        if mesh.size() != world:
            raise TopologyError(
                f"the mesh ({shown}) holds {mesh.size()} of {world} processes, so it does not say where the others "
                "are; the mesh of all of them would do, of which this is a part, or Topology(dp_rank=…, dp_size=…) "
                "by hand"
            )
        known = next((names for names in DATA_PARALLEL if any(name in shape for name in names)), ())
        axes = {
            axis: _named(axis, given, shape, known if axis == "dp" else (axis,))
            for axis, given in {"dp": dp, "tp": tp, "pp": pp, "cp": cp}.items()
        }
        taken = [name for parts in axes.values() for name in parts]
        for name in taken:
            if taken.count(name) > 1:
                raise TopologyError(f"dimension {name!r} of the mesh ({shown}) is given twice; once would do")
        for name, size in shape.items():
            if size > 1 and name not in taken:
                dims = (*axes["dp"], name)
                raise TopologyError(
                    f"dimension {name!r} of the mesh ({shown}) belongs to no axis; dp={dims!r} would do where its "
                    f"ranks see samples of their own, tp={(*axes['tp'], name)!r} where they see the same ones"
                )
        place = dict(zip(names, at, strict=True))
        ranks = {axis: _flattened([(int(place[name]), shape[name]) for name in parts]) for axis, parts in axes.items()}
        return cls(**{f"{axis}_{what}": n for axis, (rank, size) in ranks.items() for what, n in _both(rank, size)})

    @classmethod
    def from_environment(
        cls, tp: int = 1, pp: int = 1, cp: int = 1, order: "Sequence[str]" = ("pp", "dp", "cp", "tp")
    ) -> "Topology":
        """This process's place by torchrun's RANK and WORLD_SIZE; what tp · pp · cp leave over is data parallel.

        Args:
            order: all four axes, the last varies fastest; Megatron's and torchtitan's unless given.

        Raises TopologyError without these variables, and where tp · pp · cp does not divide WORLD_SIZE.
        """
        rank, world = (_from_environment(name) for name in ("RANK", "WORLD_SIZE"))
        sizes = {"tp": as_count("tp", tp), "pp": as_count("pp", pp), "cp": as_count("cp", cp)}
        if isinstance(order, str) or sorted(order) != sorted(AXES):
            raise TopologyError(f"order must name pp, dp, cp and tp, each once, got {order!r}")
        model = math.prod(sizes.values())
        shown = " · ".join(f"{axis} {size}" for axis, size in sizes.items())
        if world < 1 or world % model:
            fits = model * max(1, world // model)
            raise TopologyError(
                f"{shown} = {model} does not divide WORLD_SIZE {world}; {fits} or {fits + model} processes would do, "
                f"or sizes whose product divides {world}"
            )
        if not 0 <= rank < world:
            raise TopologyError(f"RANK is {rank}, WORLD_SIZE {world}; a rank of 0 … {world - 1} would do")
        sizes["dp"] = world // model
        ranks = {}
        for axis in reversed(order):
            rank, ranks[axis] = divmod(rank, sizes[axis])
        return cls(**{f"{axis}_{what}": n for axis in AXES for what, n in _both(ranks[axis], sizes[axis])})

    def cp_ranges(self, sequence_length: int, how: str = "zigzag") -> "list[tuple[int, int]]":
        """The stretches [start, stop) of each row's input tokens that this context-parallel rank holds, in order.

        Args:
            sequence_length: S, tokens of a row; C is cp_size, r this rank.
            how: "zigzag": [r·c, (r+1)·c) and [(2C−1−r)·c, (2C−r)·c) of chunks of c = S / 2C tokens, so that under a
                causal mask all ranks have the same work (Megatron's). "contiguous": [r·S//C, (r+1)·S//C) (Nanotron's).
                "whole": [0, S).

        Stretches that touch are one. Raises TopologyError where S does not share out.
        """
        length, size, rank = as_count("sequence_length", sequence_length), self.cp_size, self.cp_rank
        if how not in CUTS:
            raise ConfigurationError(f"cp must be one of {', '.join(CUTS)}, got {how!r}")
        if size == 1 or how == "whole":
            return [(0, length)]
        if how == "contiguous":
            if length < size:
                raise TopologyError(
                    f"sequence_length {length} leaves some of {size} context-parallel ranks without a token; {size} or "
                    "more would do"
                )
            return [(rank * length // size, (rank + 1) * length // size)]
        if length % (2 * size):
            below = length - length % (2 * size)
            fits = f"{below} or {below + 2 * size}" if below else f"{2 * size}"
            raise TopologyError(
                f"sequence_length {length} is no multiple of {2 * size}: with cp_size {size} a zigzag takes two chunks "
                f"of equal length a rank; {fits} would do, or cp='contiguous'"
            )
        chunk = length // (2 * size)
        first, second = rank * chunk, (2 * size - 1 - rank) * chunk
        if first + chunk == second:
            return [(first, second + chunk)]
        return [(first, first + chunk), (second, second + chunk)]

    def cp_stretches(self, cu_seqlens: np.ndarray, sequence_length: int) -> "tuple[Int64s, Int64s, Int64s]":
        """What this context-parallel rank holds of rows that are cut document by document: a zigzag in each.

        A document of L tokens gives 2C chunks of L // 2C; what is left over of it, fewer than 2C tokens, is dealt by a
        zigzag over what is left over of its whole row. So all ranks hold sequence_length / C tokens of each row.

        Args:
            cu_seqlens: int32 (documents + 1,), where they begin in the rows, end to end; each row begins one.

        Returns (m,) stretches in order: the row, the first token there, the tokens.
        """
        row, begin, count = (np.empty(4 * (cu_seqlens.size - 1), np.int64) for _ in range(3))
        function, _ = kernel("cut_documents")
        n = function(cu_seqlens, sequence_length, self.cp_size, self.cp_rank, row, begin, count)
        return row[:n], begin[:n], count[:n]

    def slot_of_rank(self, turn: Int64s) -> Int64s:
        """(n,) how far each round is turned → (n,) this dp rank's slot in the round."""
        return (self.dp_rank + turn) % self.dp_size

    def rank_of_slot(self, slot: Int64s, turn: Int64s) -> Int64s:
        """(n,) slots in rounds turned so far → (n,) the dp ranks that take them."""
        return (slot - turn) % self.dp_size

    def place_of_row(self, unit: Int64s, row: Int64s, rows: int) -> Int64s:
        """(n,) units, (n,) which of this dp rank's rows of each → (n,) places in a table [unit, rank, rows]."""
        return (unit * self.dp_size + self.dp_rank) * rows + row

    def row_of_place(self, place: Int64s, rows: int) -> "tuple[Int64s, Int64s]":
        """(n,) places in a table [unit, rank, rows] → ((n,) dp ranks, (n,) which of their rows of the unit)."""
        return place // rows % self.dp_size, place % rows


def _named(
    axis: str, given: "str | Sequence[str] | None", shape: "dict[str, int]", known: "Sequence[str]"
) -> "tuple[str, ...]":
    """The dimensions of the mesh that are this axis: those given, else those of the known names that are there."""
    if given is None:
        return tuple(name for name in known if name in shape)
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in shape:
            raise TopologyError(f"{axis}={given!r}: the mesh has no dimension {name!r}, but {', '.join(shape)}")
    return names


def _flattened(parts: "Sequence[tuple[int, int]]") -> "tuple[int, int]":
    """(rank, size) of each dimension, the last varies fastest → (rank, size) of all of them as one."""
    rank, size = 0, 1
    for at, count in parts:
        rank, size = rank * count + at, size * count
    return rank, size


def _both(rank: int, size: int) -> "tuple[tuple[str, int], tuple[str, int]]":
    return ("rank", rank), ("size", size)


def _from_environment(name: str) -> int:
    value: Any = os.environ.get(name)
    if value is None:
        raise TopologyError(f"{name} is not set: torchrun sets it; Topology() would do for one process")
    try:
        return int(value)
    except ValueError:
        raise TopologyError(f"{name} is {value!r}; an integer would do") from None
