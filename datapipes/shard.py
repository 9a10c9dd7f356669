"""One rank's part of the order: rounds of dp consecutive samples, one sample a rank.

    sample    0   1   2   3 │ 4   5   6   7 │ …        dp = 4, no seed: sample n goes to rank n mod 4
    rank      0   1   2   3 │ 0   1   2   3 │ …
    rank      2   3   0   1 │ 1   2   3   0 │ …        with a seed each round is turned by a keyed amount,
                                                      so that a blend's rhythm cannot meet dp
A step holds whole rounds, so which samples it takes does not depend on the ranks.
"""

from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count
from .errors import ArgumentTypeError, ConfigurationError
from .permute import derive_key, mix64
from .topology import Topology

__all__ = ["RankSharder", "sharder_of"]


@functional_datapipe("shard_ranks")
class RankSharder(IndexedDataPipe):
    """Deals each round of dp consecutive samples to the dp ranks (functional: `shard_ranks`).

    Args:
        topology: this process's place; its dp rank and size count here.
        seed: None: sample n to rank n mod dp. A number: each round turned by a keyed amount.

    The turn is keyed by the sample number that the round begins with, so a resume, whatever was skipped,
    deals the rest as an unbroken run would.
    """

    functional_name = "shard_ranks"
    trunk = True
    in_order = False

    def __init__(self, datapipe: IndexedDataPipe, topology: Topology, seed: "int | None" = None) -> None:
        super().__init__(datapipe)
        if not isinstance(topology, Topology):
            raise ArgumentTypeError(f"{self.functional_name} takes a Topology, got {topology!r}")
        self._topology = topology
        self.seed = None if seed is None else as_count("seed", seed, 0)
        self._key = None if seed is None else derive_key(self.seed or 0, "shard")
        self.check()

    def check(self) -> None:
        if self.datapipe.topology is not None or self.datapipe.steps is not None:
            raise ConfigurationError(
                f"{self.functional_name}: a graph is dealt to the ranks once, before batch_samples"
            )

    def check_batches(self, micro_batch_size: int) -> None:
        """Raises BatchSizeError for micro-batches that the samples are not dealt for."""

    @property
    def strided(self) -> bool:
        """Whether sample n goes to rank n mod dp, so that the rhythm of what is below can meet dp."""
        return self._key is None

    @property
    def settings(self) -> dict[str, Any]:
        return {"topology": str(self._topology), "seed": self.seed}

    @property
    def order_settings(self) -> dict[str, Any]:
        return {"dp_size": self._topology.dp_size, "seed": self.seed}  # the rank never: states are the same on all

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def skipped_items(self) -> int:
        return self.first_sample // self._topology.dp_size

    @property
    def last_sample(self) -> int:
        last, dp = self.datapipe.last_sample, self._topology.dp_size
        return last - (last - self.first_sample) % dp if self.finite and self.tail == "drop" else last

    @property
    def samples_per_pass(self) -> int:
        return self.datapipe.samples_per_pass // self._topology.dp_size

    @property
    def end(self) -> int:
        whole, rest = divmod(self.datapipe.end, self._topology.dp_size)
        if rest and self.tail != "drop" and self.finite:
            local = self.route(np.array([whole], np.int64))[1][0]
            return whole + int(local < self.datapipe.end)
        return whole

    def turns(self, rounds: Int64s) -> Int64s:
        """(n,) first sample numbers of rounds → (n,) how far each is turned."""
        if self._key is None:
            return np.zeros(rounds.size, np.int64)
        mixed = mix64(mix64(rounds.astype(np.uint64) ^ np.uint64(self._key)) + np.uint64(self._key))
        return (mixed % np.uint64(self._topology.dp_size)).astype(np.int64)

    def dealt(self, samples: Int64s, base: "Int64s | int") -> tuple[Int64s, Int64s]:
        """(n,) sample numbers, dealt from sample `base` on (one, or (n,)) → ((n,) the ranks that take them, (n,) as
        which of their own from there on).
        """
        turn, slot = np.divmod(samples - base, self._topology.dp_size)
        return self._topology.rank_of_slot(slot, self.turns(base + turn * self._topology.dp_size)), turn

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        start = numbers * self._topology.dp_size
        slot = self._topology.slot_of_rank(self.turns(start + self.first_sample))
        return np.zeros(numbers.size, np.int64), start + slot

    def deal(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) of the child's numbers → ((n,) the ranks that take them, (n,) as which of their own)."""
        return self.dealt(numbers + self.first_sample, self.first_sample)

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        rank, number = self.deal(numbers)
        return np.where((rank == self._topology.dp_rank) & (number < self.end), number, -1)

    def source_bound(self, source: int, hi: int) -> int:
        return min(hi * self._topology.dp_size, MAX_NUMBER)

    def sample_numbers(self, numbers: Int64s) -> Int64s:
        return self.datapipe.sample_numbers(self.route(numbers)[1])


def sharder_of(graph: IndexedDataPipe) -> "RankSharder | None":
    """The sharder that deals a graph's samples to the ranks, if it has one."""
    while graph.topology is not None and not isinstance(graph, RankSharder):
        graph = graph.datapipe
    return graph if isinstance(graph, RankSharder) else None
