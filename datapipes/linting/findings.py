"""What a rule has found, and what rules look at: a graph with its names, and which nodes stand above which."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.utils.data import SequentialSampler
from torch.utils.data.datapipes.iter import Sampler

from .._torch import DataPipe
from ..core import IndexedDataPipe
from ..names import functional_name_of, inputs_of, named_nodes
from ..shard import RankSharder
from ..wrapped import kind_of

__all__ = ["Finding", "Look", "is_batch", "is_shard", "is_shuffle"]


@dataclass(frozen=True)
class Finding:
    """One thing to change in a graph.

    node: its name. rule: which rule found it. message: what is wrong, with the values. change: what would do.
    serious: whether ranks get wrong data, twice the same, or lose some.
    """

    node: str
    rule: str
    message: str
    change: str
    serious: bool = False

    def __str__(self) -> str:
        return f"{self.node}: {self.message} [{self.rule}{', serious' if self.serious else ''}]\n    {self.change}"


class Look:
    """A graph as the rules see it. Nothing of it is iterated, pickled or changed here.

    Args:
        dp_size: of the run.
    """

    def __init__(self, graph: DataPipe, dp_size: int) -> None:
        self.graph, self.dp_size = graph, dp_size
        named = list(named_nodes(graph))
        self.nodes = [node for node, _ in named]
        self.names = {id(node): name for node, name in named}
        self._inputs = {id(node): inputs_of(node) for node in self.nodes}

    def name(self, node: DataPipe) -> str:
        return self.names[id(node)]

    def inputs(self, node: DataPipe) -> "list[DataPipe]":
        return self._inputs[id(node)]

    def below(self, node: DataPipe) -> "list[DataPipe]":
        """All nodes below one, each once."""
        return list(self._walk(self.inputs(node)))

    @cached_property
    def _outputs(self) -> "dict[int, list[DataPipe]]":
        found: dict[int, list[DataPipe]] = {id(node): [] for node in self.nodes}
        for node in self.nodes:
            for child in self.inputs(node):
                found[id(child)].append(node)
        return found

    def above(self, node: DataPipe) -> "list[DataPipe]":
        """All nodes above one, each once."""
        found: dict[int, DataPipe] = {}
        waiting = [node]
        while waiting:
            for parent in self._outputs[id(waiting.pop())]:
                if id(parent) not in found:
                    found[id(parent)] = parent
                    waiting.append(parent)
        return list(found.values())

    def without(self, passes: "Callable[[DataPipe], bool]") -> "list[DataPipe]":
        """The nodes without inputs to which some way from the top leads by no node of which `passes` is true."""
        return [node for node in self._walk([self.graph], passes) if not self.inputs(node)]

    def _walk(
        self, waiting: "list[DataPipe]", stop: "Callable[[DataPipe], bool]" = lambda node: False
    ) -> "Iterator[DataPipe]":
        waiting, seen = waiting[::-1], set()
        while waiting:
            node = waiting.pop()
            if id(node) not in seen and not stop(node):
                seen.add(id(node))
                yield node
                waiting += self.inputs(node)[::-1]


def _has_method(node: DataPipe, name: str) -> bool:
    return callable(getattr(kind_of(node), name, None))  # of the class: nodes answer for functional names


def is_shard(node: DataPipe) -> bool:
    """Whether a node gives each rank its part."""
    return isinstance(node, RankSharder) or (
        not isinstance(node, IndexedDataPipe) and _has_method(node, "apply_sharding")
    )


def is_shuffle(node: DataPipe) -> bool:
    """Whether a node puts its items into another order."""
    if isinstance(node, IndexedDataPipe):
        return not (node.trunk or node.in_order)
    if isinstance(node, Sampler):
        return not isinstance(vars(node).get("sampler"), SequentialSampler)
    shuffles: Any = _has_method(node, "set_shuffle") and _has_method(node, "set_seed")
    return shuffles or "shuffle" in functional_name_of(node)


def is_batch(node: DataPipe) -> bool:
    """Whether a node makes several samples one item."""
    name = functional_name_of(node)
    return "batch" in name and "unbatch" not in name
