"""Shuffling on and off, and the seed of a run."""

from typing import Any

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.arguments import constructor_of
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, LoaderWarning
from ..datapipes.names import named_nodes, node_names
from ..datapipes.permute import Permuter
from ..datapipes.rank_zero import warn
from ..datapipes.read import TokenSpace
from ..datapipes.slice import TokenWindows
from ..datapipes.wrapped import Wrapper, kind_of
from .around import put_around
from .base import Adapter
from .replace import built_like
from .surgery import copied, mapped

__all__ = ["Seed", "SeedWrapper", "Shuffle"]


class Shuffle(Adapter):
    """Turns shuffling on or off, as torchdata's did.

    Of a stream all shuffling nodes are set; where there is none to turn on, one is put on top, with a warning. Of an
    indexed graph the permutes are taken out, or, where there is none, put over each source (its windows, or a user's
    own): below the blend, where a change of its weights stays exact. Each changes the order, and so its fingerprint.

    Args:
        enable: None: as it is. seed: of the permutes that are put in.
    """

    def __init__(self, enable: "bool | None" = True, seed: int = 0) -> None:
        if enable is not None and not isinstance(enable, bool):
            raise ArgumentTypeError(f"enable is True, False or None, got {enable!r}")
        self.enable, self.seed = enable, as_count("seed", seed, 0)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if self.enable is None:
            return datapipe
        if isinstance(datapipe, IndexedDataPipe):
            return self._permuted(datapipe)
        nodes = [node for node, _ in named_nodes(datapipe) if _shuffles(node)]
        if not nodes and self.enable:
            if isinstance(datapipe, MapDataPipe):
                raise GraphError(
                    f"no node of this map-style graph shuffles, and {type(datapipe).__name__} has no order"
                )
            warn(
                "Shuffle() found no shuffle in this graph and puts one on top, whose buffer of 10,000 items may be too "
                "small; a shuffle below the sharding filter and the batches would be better",
                LoaderWarning,
                stacklevel=3,
            )
            datapipe = datapipe.shuffle()
            nodes = [datapipe]

        def set_shuffle(node: Any, original: DataPipe) -> "DataPipe | None":
            if not any(original is chosen for chosen in nodes):
                return None
            made: Any = copied(node)
            made.set_shuffle(self.enable)
            return made

        return mapped(datapipe, set_shuffle)

    def _permuted(self, datapipe: IndexedDataPipe) -> DataPipe:
        there = any(isinstance(node, Permuter) for node, _ in named_nodes(datapipe))

        def changed(node: Any, original: DataPipe) -> "DataPipe | None":
            if not self.enable and isinstance(node, Permuter):
                return node.datapipe
            source = isinstance(node, IndexedDataPipe) and not node.children and not isinstance(node, TokenSpace)
            if self.enable and not there and (source or isinstance(node, TokenWindows)):
                return Permuter(node, seed=self.seed)
            return None

        return mapped(datapipe, changed)


def _shuffles(node: DataPipe) -> bool:
    return all(callable(getattr(type(node), name, None)) for name in ("set_shuffle", "set_seed"))


class SeedWrapper(Wrapper):
    """Says the seed of a stream to the loader that runs it."""

    kind = "seed"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def label(self) -> str:
        return f"seed {self.seed}"


class Seed(Adapter):
    """One seed for all that is random.

    All nodes of an indexed graph that were built with a seed (permutes, sharders, a user's own) take it as theirs:
    another order, with another fingerprint. A stream's loader begins with it, as after `loader.seed(seed)`: its epochs,
    and their resumes, follow from there.

    Raises ConfigurationError unless 0 ≤ seed < 2**64, GraphError for an indexed node that cannot be built with it.
    """

    def __init__(self, seed: int) -> None:
        if type(seed) is int and not 0 <= seed < 2**64:  # as for loader.seed; indexed nodes take half of them
            raise ConfigurationError(f"seed must be at least 0 and below 2**64, got {seed}")
        self.seed = seed if type(seed) is int else as_count("seed", seed, 0)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            return put_around(datapipe, [datapipe], lambda node: SeedWrapper(self.seed))
        names = node_names(datapipe)

        def seeded(node: Any, original: DataPipe) -> "DataPipe | None":
            if not isinstance(node, IndexedDataPipe) or "seed" not in constructor_of(kind_of(node)).parameters:
                return None
            if getattr(node, "seed", -1) in (None, self.seed):  # None: it has no use for one
                return None
            try:
                made = built_like(node, kind_of(node), seed=self.seed)
            except (GraphError, TypeError, ValueError) as error:
                raise GraphError(f"{names[id(original)]} cannot be given another seed: {error}") from error
            return made

        return mapped(datapipe, seeded)
