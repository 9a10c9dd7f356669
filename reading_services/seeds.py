"""Seeds for the random nodes of streams: one stream of seeds that ranks share, one of each worker's own.

Indexed graphs need none of this: their seeds are arguments of their nodes.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.iter import ShardingFilter

from ..adapters.surgery import list_dps, traverse_dps
from ..datapipes._torch import DataPipe
from ..datapipes.core import MAX_NUMBER
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, StateError

__all__ = ["SeedGenerator", "set_datapipes_seed", "set_graph_random_seed", "set_process_random_seed"]


class SeedGenerator:
    """Two sequences of 64-bit seeds from one seed: shared by all ranks, and this worker's own.

    Args:
        seed: at most 2**64 − 1; left out, drawn from torch's global generator.
    """

    def __init__(self, seed: "int | None" = None) -> None:
        self.seed(int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed)

    def seed(self, seed: int) -> None:
        """Begins both sequences anew. Raises ConfigurationError (a ValueError) unless 0 ≤ seed < 2**64."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentTypeError(f"seed must be an integer, got {seed!r}")
        if not 0 <= seed < 2**64:
            raise ConfigurationError(f"seed must be at least 0 and below 2**64, got {seed}")
        self._key, self._role, self._shared, self._own = seed, "main", 0, 0

    @property
    def initial_seed(self) -> int:
        """The seed that both sequences began with."""
        return self._key

    def _draw(self, role: str, number: int) -> int:
        text = f"tokenpipe seeds 1|{self._key}|{role}|{number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def generate_shared_seed(self) -> int:
        """The next seed that is the same on all ranks and workers, below 2**63."""
        self._shared += 1
        return self._draw("shared", self._shared)

    def generate_seed(self) -> int:
        """The next seed of this worker alone, below 2**63."""
        self._own += 1
        return self._draw(self._role, self._own)

    def join(self, seed: int, rank: int) -> None:
        """Begins both sequences anew from a seed that all ranks have, with this rank's own ones."""
        self.seed(seed)
        self._role = f"rank {rank}"

    def epoch(self) -> "SeedGenerator":
        """A generator for one epoch, from the next shared seed; this one is then at the next epoch's."""
        child = SeedGenerator(self.generate_shared_seed())
        child._role = self._role
        return child

    def spawn(self, worker_id: int) -> "SeedGenerator":
        """The generator of one worker: the same shared seeds from here on, own ones of its own."""
        child = SeedGenerator(self._key)
        child._shared = self._shared
        child._role = f"{self._role}/{worker_id}/{self._own}"
        return child

    def state_dict(self) -> "dict[str, Any]":
        """Where both sequences are, JSON-able."""
        return {"key": self._key, "role": self._role, "shared": self._shared, "own": self._own}

    @classmethod
    def from_state(cls, state: "Mapping[str, Any]") -> "SeedGenerator":
        """The generator that goes on there. Raises StateError for what is no such state."""
        generator = cls(0)
        fits = isinstance(state, Mapping) and state.keys() == generator.state_dict().keys()
        if not fits or not isinstance(state["role"], str) or len(state["role"]) > 1024:
            raise StateError(f"the state of a seed generator has key, role, shared, own, got {state!r:.200}")
        for name, end in (("key", 2**64), ("shared", MAX_NUMBER), ("own", MAX_NUMBER)):
            if type(state[name]) is not int or not 0 <= state[name] < end:
                raise StateError(f"seeds: {name} must be an integer of 0 … {end - 1}, got {state[name]!r:.40}")
        generator._key, generator._role = state["key"], state["role"]
        generator._shared, generator._own = state["shared"], state["own"]
        return generator


def set_datapipes_seed(
    datapipes: "Sequence[DataPipe]", seed_generator: SeedGenerator, distributed_shared: bool
) -> None:
    """Seeds those of the nodes that are random (have `set_seed`), each with its own seed."""
    for node in datapipes:
        set_seed = getattr(type(node), "set_seed", None)
        if callable(set_seed):
            draw = seed_generator.generate_shared_seed if distributed_shared else seed_generator.generate_seed
            node.set_seed(draw())


def set_graph_random_seed(datapipe: DataPipe, seed_generator: SeedGenerator) -> DataPipe:
    """Seeds a stream's random nodes: those before a sharding filter with shared seeds (all ranks must
    shuffle alike what they then share out), those after it with the worker's own.
    """
    graph = traverse_dps(datapipe)
    filters = [node for node in list_dps(graph) if _shards(node)]
    before = {id(node): node for filter_ in filters for node in list_dps(traverse_dps(filter_))}
    set_datapipes_seed(list(before.values()), seed_generator, distributed_shared=True)
    set_datapipes_seed(list_dps(graph, exclude_dps=filters), seed_generator, distributed_shared=False)
    return datapipe


def set_process_random_seed(datapipe: DataPipe, seed_generator: SeedGenerator) -> None:
    """Seeds a process that runs this stream alone: its global generators (random, numpy, torch), then the graph."""
    seed = seed_generator.generate_seed()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    set_graph_random_seed(datapipe, seed_generator)


def _shards(node: DataPipe) -> bool:
    """Whether torch's `apply_sharding` reaches the node."""
    return isinstance(node, ShardingFilter) or callable(getattr(type(node), "apply_sharding", None))
