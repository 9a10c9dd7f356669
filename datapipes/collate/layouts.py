"""What training frameworks call the parts of a batch, and what each expects of them.

part            nothing said      nanotron           torchtitan           megatron        hf
inputs          input_ids         input_ids          [0]["input"]         tokens          input_ids
labels          label_ids         label_ids          [1]                  labels          labels (not shifted)
which count     label_mask        label_mask bool    −100 in the labels   loss_mask f32   −100 in the labels
positions       position_ids      position_ids       [0]["positions"]     position_ids    position_ids
not held        left out          TensorPointer      left out, None       left out        left out
cp              zigzag            contiguous         whole (the trainer   zigzag          zigzag
                                                     cuts it)
"""

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ArgumentTypeError, ConfigurationError, TopologyError
from ..topology import Topology

__all__ = ["IGNORED_LABEL", "Layout", "Parts", "Roles", "TensorPointer", "in_microbatches", "layout_of", "roles_of"]

IGNORED_LABEL = -100
"""The label that torch's cross_entropy ignores."""


@dataclass(frozen=True)
class TensorPointer:
    """Stands for a tensor that another rank of the pipeline holds, as in Nanotron (whose own class is taken where it is
    installed). group_rank: that rank.
    """

    group_rank: int


class Roles(NamedTuple):
    """What a stage of the pipeline holds. inputs, labels: whether it does; which ranks do; positions: whether they are
    asked for.
    """

    inputs: bool
    labels: bool
    input_pp_rank: int
    output_pp_rank: int
    positions: bool


def roles_of(place: Topology, input_pp_rank: Any, output_pp_rank: Any, positions: bool) -> Roles:
    """What this process's stage holds; −1 is the last one. Raises ArgumentTypeError, TopologyError."""
    ranks = []
    for name, rank in (("input_pp_rank", input_pp_rank), ("output_pp_rank", output_pp_rank)):
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise ArgumentTypeError(f"{name} must be an integer, got {rank!r}")
        if not -place.pp_size <= rank < place.pp_size:
            raise TopologyError(f"{name} is {rank}, pp_size {place.pp_size}; 0 … {place.pp_size - 1}, or −1, would do")
        ranks.append(int(rank) % place.pp_size)
    return Roles(place.pp_rank == ranks[0], place.pp_rank == ranks[1], ranks[0], ranks[1], positions)


Parts = dict[str, Any]
"""A batch by our own keys (see CausalLMCollator); what the rank does not hold, or was not asked for, is not there."""


def in_microbatches(parts: Parts, count: int) -> Parts:
    """Arrays (b, …) as (count, b / count, …); cu_seqlens (count, most + 1), each counted from its own first token."""
    found: Parts = {}
    for key, array in parts.items():
        if key == "cu_seqlens":
            tokens = int(array[-1]) // count
            cuts = np.searchsorted(array, np.arange(count + 1) * tokens)  # a row begins at each
            lines = [array[a : b + 1] - array[a] for a, b in itertools.pairwise(cuts.tolist())]
            most = max(line.size for line in lines)
            found[key] = np.stack([np.pad(line, (0, most - line.size), "edge") for line in lines])
        else:
            found[key] = array.reshape(count, -1, *array.shape[1:]) if isinstance(array, np.ndarray) else array
    return found


@dataclass(frozen=True)
class Layout:
    """One framework's batch.

    cp: how rows are cut unless that is said. ignore_index: what stands for a label that does not count; None: it stays,
    and the mask alone says so. masked: whether a mask is always given. shifted: whether label i is the token after
    input i; else it is input i, and the model shifts. positions: whether positions are always given.
    joins_with_positions: whether the first token of a document is no label where positions are given. arrange: our
    parts as its own.
    """

    arrange: "Callable[[Parts, Roles], Any]"
    cp: str = "zigzag"
    ignore_index: "int | None" = IGNORED_LABEL
    masked: bool = False
    shifted: bool = True
    positions: bool = False
    positions_first: bool = False
    joins_with_positions: bool = False


def layout_of(name: "str | None") -> Layout:
    """The layout of that name. Raises ConfigurationError."""
    if not (name is None or isinstance(name, str)) or name not in LAYOUTS:
        raise ConfigurationError(f"layout is {name!r}; one of {', '.join(n for n in LAYOUTS if n)} would do, or none")
    return LAYOUTS[name]


def _plain(parts: Parts, roles: Roles) -> Parts:
    return parts


def _nanotron(parts: Parts, roles: Roles) -> Parts:
    """As its DataCollatorForCLM gives them; with positions, as its DataCollatorForCLMWithPositionIds."""
    pointer = _tensor_pointer()
    first: Parts = {}
    beside = "position_ids" if roles.positions else "input_mask"
    if roles.inputs:
        first["input_ids"] = parts.pop("input_ids")
        first[beside] = parts.pop(beside, None)
        if not roles.positions:
            first[beside] = torch.ones_like(first["input_ids"], dtype=torch.bool)
    else:
        first["input_ids"] = first[beside] = pointer(group_rank=roles.input_pp_rank)
    if not roles.labels:
        first["label_ids"] = first["label_mask"] = pointer(group_rank=roles.output_pp_rank)
    return first | parts


def _torchtitan(parts: Parts, roles: Roles) -> "tuple[Parts, torch.Tensor | None]":
    labels = parts.pop("label_ids", None)
    return _renamed(parts, {"input_ids": "input", "position_ids": "positions"}), labels


def _megatron(parts: Parts, roles: Roles) -> Parts:
    if "label_mask" in parts:
        parts["label_mask"] = parts["label_mask"].to(torch.float32)
    return _renamed(parts, {"input_ids": "tokens", "label_ids": "labels", "label_mask": "loss_mask"})


def _hf(parts: Parts, roles: Roles) -> Parts:
    if roles.inputs and "position_ids" not in parts:  # with both, the models would not look for documents
        parts["attention_mask"] = torch.ones_like(parts["input_ids"], dtype=torch.int64)
    if (sequences := parts.pop("cu_seqlens", None)) is not None:
        longest = parts.pop("max_seqlen")
        parts |= {"cu_seq_lens_q": sequences, "cu_seq_lens_k": sequences}
        parts |= {"max_length_q": longest, "max_length_k": longest}
    return _renamed(parts, {"label_ids": "labels"})


def _renamed(parts: Parts, names: "dict[str, str]") -> Parts:
    return {names.get(key, key): value for key, value in parts.items()}


@functools.cache
def _tensor_pointer() -> Any:
    if importlib.util.find_spec("nanotron") is None:
        return TensorPointer
    return importlib.import_module("nanotron.parallel.pipeline_parallel.tensor_pointer").TensorPointer


LAYOUTS: "dict[str | None, Layout]" = {
    None: Layout(_plain),
    "hf": Layout(_hf, shifted=False),
    "megatron": Layout(_megatron, ignore_index=None, masked=True, positions=True, positions_first=True),
    "nanotron": Layout(
        _nanotron, cp="contiguous", ignore_index=None, masked=True, positions_first=True, joins_with_positions=True
    ),
    "torchtitan": Layout(_torchtitan, cp="whole"),
}
