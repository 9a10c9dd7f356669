"""Part of a stream that one process runs for all workers."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from .._torch import IterDataPipe, functional_datapipe
from ..errors import ArgumentTypeError, ConfigurationError

__all__ = ["ShardingRoundRobinDispatcher"]


@functional_datapipe("sharding_round_robin_dispatch")
class ShardingRoundRobinDispatcher(IterDataPipe):
    """What is below runs once, and its items are dealt to the workers in turn (functional:
    `sharding_round_robin_dispatch`): for what cannot be made by shards, as a socket or a shuffle over everything.

    Under a service with worker processes, everything up to the lowest node that all dispatchers of the graph lead to
    runs in one process more. In process it changes nothing.

    Args:
        sharding_group_filter: SHARDING_PRIORITIES.MULTIPROCESSING, which must be said, as in torchdata.
    """

    def __init__(self, source_datapipe: IterDataPipe, sharding_group_filter: Any = None) -> None:
        if not isinstance(source_datapipe, IterDataPipe):
            raise ArgumentTypeError(f"only streams are dispatched, got {type(source_datapipe).__name__}")
        if sharding_group_filter is not SHARDING_PRIORITIES.MULTIPROCESSING:
            raise ConfigurationError(
                "sharding_round_robin_dispatch deals to worker processes: its sharding_group_filter must be "
                f"SHARDING_PRIORITIES.MULTIPROCESSING, got {sharding_group_filter!r}"
            )
        super().__init__()
        self.source_datapipe = source_datapipe
        self.sharding_group_filter = sharding_group_filter

    def __iter__(self) -> "Iterator[Any]":
        yield from self.source_datapipe

    def __len__(self) -> int:
        return len(self.source_datapipe)
