"""Where a resumed run begins."""

from typing import Any

from ..datapipes._torch import DataPipe, IterDataPipe
from ..datapipes.bound import Skipper
from ..datapipes.core import IndexedDataPipe, as_count, sample_node
from ..datapipes.errors import ConfigurationError, GraphError
from ..datapipes.names import inputs_of, named_nodes, node_names
from ..datapipes.streaming.bound import StreamSkipper
from ..datapipes.streaming.dispatch import ShardingRoundRobinDispatcher
from ..datapipes.wrapped import wrappers_of
from .base import Adapter
from .surgery import copied, mapped, rewired, rewritten

__all__ = ["ResumeSkip"]


class ResumeSkip(Adapter):
    """Puts the skip in front of the sharder, or moves it: O(1) on an indexed graph.

    On a stream, whose items have no numbers, each skipped one is made and dropped: those in front of the sharding
    filter or dispatcher (the lowest), or, where there is none, those that the graph gives. (A loader's state goes on
    without that, where the nodes have one.)

    Args:
        consumed_samples: the run's samples that are done, over all ranks.

    Raises BatchSizeError inside a step whose rest dp_size × micro-batch does not divide.
    """

    def __init__(self, consumed_samples: int) -> None:
        self.consumed_samples = as_count("consumed_samples", consumed_samples, 0)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return self.of_indexed(datapipe) if isinstance(datapipe, IndexedDataPipe) else self._of_stream(datapipe)

    def of_indexed(self, datapipe: IndexedDataPipe) -> IndexedDataPipe:
        """The same of an indexed graph."""
        node = sample_node(datapipe)
        order = node.datapipe if isinstance(node, Skipper) else node
        samples = self.consumed_samples - order.first_sample
        if samples < 0:
            raise ConfigurationError(
                f"cannot begin at sample {self.consumed_samples}: the graph itself skips to {order.first_sample}"
            )
        begun = Skipper(order, samples) if samples else order
        return rewritten(datapipe, {id(node): begun})

    def _of_stream(self, datapipe: DataPipe) -> DataPipe:
        if not isinstance(datapipe, IterDataPipe):
            raise GraphError(
                f"{type(datapipe).__name__} is map-style: its items are asked for by index, none comes first"
            )
        sharders = {id(node): node for node, _ in named_nodes(datapipe) if _shards(node)}
        filters = [node for node in sharders.values() if len(sharders.keys() & node_names(node).keys()) == 1]
        if not filters:
            return self._begun(datapipe)

        def begun(node: Any, original: DataPipe) -> "DataPipe | None":
            if not any(original is sharder for sharder in filters):
                return None
            return rewired(node, {id(c): self._begun(c) for c in inputs_of(node) if isinstance(c, IterDataPipe)})

        return mapped(datapipe, begun)

    def _begun(self, node: Any) -> DataPipe:
        if not isinstance(node, StreamSkipper):
            return StreamSkipper(node, self.consumed_samples) if self.consumed_samples else node
        if not self.consumed_samples and not wrappers_of(node):
            return node.source_datapipe
        moved: Any = copied(node)
        moved.items = self.consumed_samples
        return moved


def _shards(node: DataPipe) -> bool:
    """Whether the items above a node are no longer those of all ranks and workers."""
    return isinstance(node, ShardingRoundRobinDispatcher) or callable(getattr(type(node), "apply_sharding", None))
