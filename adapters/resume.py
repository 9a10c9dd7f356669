"""Where a resumed run begins."""

from ..datapipes._torch import DataPipe
from ..datapipes.bound import Skipper
from ..datapipes.core import IndexedDataPipe, as_count, sample_node
from ..datapipes.errors import ArgumentTypeError, ConfigurationError
from .base import Adapter
from .surgery import rewritten

__all__ = ["ResumeSkip"]


class ResumeSkip(Adapter):
    """Puts the skip in front of the sharder, or moves it: O(1) on an indexed graph.

    Args:
        consumed_samples: the run's samples that are done, over all ranks.

    Raises BatchSizeError inside a step whose rest dp_size × micro-batch does not divide.
    """

    def __init__(self, consumed_samples: int) -> None:
        self.consumed_samples = as_count("consumed_samples", consumed_samples, 0)

    def __call__(self, datapipe: DataPipe) -> IndexedDataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            raise ArgumentTypeError(
                f"a stream ({type(datapipe).__name__}) has no sample numbers, so it cannot be skipped to one"
            )
        node = sample_node(datapipe)
        order = node.datapipe if isinstance(node, Skipper) else node
        samples = self.consumed_samples - order.first_sample
        if samples < 0:
            raise ConfigurationError(
                f"cannot begin at sample {self.consumed_samples}: the graph itself skips to {order.first_sample}"
            )
        begun = Skipper(order, samples) if samples else order
        return rewritten(datapipe, {id(node): begun})
