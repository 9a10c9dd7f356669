"""Where a run ends, and what of it is masked."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.audit.ledger import origin_of, spaces_by_name
from ..datapipes.batch import SampleBatcher, batcher_of
from ..datapipes.bound import Limiter
from ..datapipes.core import IndexedDataPipe, as_count, nodes_of, sample_node
from ..datapipes.errors import ArgumentTypeError, BatchSizeError, ConfigurationError, GraphError
from ..datapipes.exclude import Excluder
from ..datapipes.names import node_names
from ..datapipes.streaming.bound import StreamLimiter
from .base import Adapter
from .surgery import insert_after

__all__ = ["Exclude", "Limit"]


class Limit(Adapter):
    """Ends the run early: for a look, a test, an evaluation.

    Args:
        items: how many of what the graph gives, on this rank. samples, steps, passes: of an indexed graph, instead, as
            `limit` takes them; each is put where it has to stand.

    Raises BatchSizeError where so many batches are no whole steps, GraphError for what a stream does not have.
    """

    def __init__(
        self,
        items: "int | None" = None,
        *,
        samples: "int | None" = None,
        steps: "int | None" = None,
        passes: "int | None" = None,
    ) -> None:
        given = {"items": items, "samples": samples, "steps": steps, "passes": passes}
        asked = {key: as_count(key, value) for key, value in given.items() if value is not None}
        if len(asked) != 1:
            raise ConfigurationError(f"Limit takes one of items, samples=, steps=, passes=, got {asked or 'none'}")
        self.kind, self.count = next(iter(asked.items()))

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            if self.kind != "items" or isinstance(datapipe, MapDataPipe):
                raise GraphError(
                    f"{type(datapipe).__name__} is a stream or map-style: Limit(items) ends a stream alone"
                )
            return StreamLimiter(datapipe, self.count)
        if self.kind == "steps":
            return insert_after(datapipe, self._batcher(datapipe), lambda node: Limiter(node, steps=self.count))
        if self.kind == "passes":
            return Limiter(datapipe, passes=self.count)
        samples = self.count if self.kind == "samples" else self._samples_of(datapipe)
        order = sample_node(datapipe)
        return insert_after(datapipe, order, lambda node: Limiter(node, samples=samples))

    def _batcher(self, datapipe: IndexedDataPipe) -> SampleBatcher:
        batcher = batcher_of(datapipe)
        if batcher is None:
            raise GraphError("this graph has no steps, which batch_samples makes; Limit(samples=...) would do")
        return batcher

    def _samples_of(self, datapipe: IndexedDataPipe) -> int:
        batcher = batcher_of(datapipe)
        if batcher is None:
            return self.count * (datapipe.topology.dp_size if datapipe.topology else 1)
        first = datapipe.first_sample
        end, steps = first + self.count * batcher.unit, batcher.steps
        step = steps.step_of(end)
        if steps.start(step) != end:
            near = [(steps.start(s) - first) // batcher.unit for s in (step, step + 1)]
            raise BatchSizeError(
                f"{self.count} batches end inside step {step}; "
                f"{' or '.join(str(n) for n in near if n > 0)} are whole steps"
            )
        return end - first


class Exclude(Adapter):
    """Masks documents or ranges of tokens; every other sample keeps its place (see `exclude`).

    Args:
        tokens: {source: [(first, stop), …]}, stop exclusive. documents: {source: [number or id, …]}.
        from_sample: rows before this sample number of the run stay as they are.

    Raises GraphError for a stream, whose items have no place in a source, and above batches of several graphs.
    """

    def __init__(
        self,
        tokens: "Mapping[str, Sequence[tuple[int, int]]] | None" = None,
        documents: "Mapping[str, Sequence[int | str]] | None" = None,
        from_sample: int = 0,
    ) -> None:
        for name, value in (("tokens", tokens), ("documents", documents)):
            if value is not None and not isinstance(value, Mapping):
                raise ArgumentTypeError(f"{name} must be {{source: [...]}}, got {value!r:.80}")
        if not tokens and not documents:
            raise ConfigurationError("Exclude takes tokens= or documents=, got neither")
        self.tokens, self.documents = dict(tokens or {}), dict(documents or {})
        self.from_sample = as_count("from_sample", from_sample, 0)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            raise GraphError(
                f"{type(datapipe).__name__} is a stream, whose items do not know which tokens of a source they hold; a "
                "filter below the packing leaves documents out"
            )
        order = datapipe  # below maps: what they make says no more which tokens it holds
        while order.trunk and not isinstance(order, Excluder):
            order = order.datapipe
        if any(node.steps is not None for node in nodes_of(order)):
            raise GraphError(
                f"{node_names(datapipe)[id(order)]} reads batches, so no rows of it can be masked: put Exclude on the "
                "graphs that it reads from"
            )
        spaces = spaces_by_name(order)
        ranges: dict[str, list[tuple[int, int]]] = {source: list(pairs) for source, pairs in self.tokens.items()}
        for source, documents in self.documents.items():
            origin = origin_of(spaces, source)
            ranges.setdefault(source, []).extend(origin.document_range(document) for document in documents)
        return insert_after(datapipe, order, lambda node: _masking(node, ranges, self.from_sample))


def _masking(node: Any, ranges: "dict[str, list[tuple[int, int]]]", from_sample: int) -> IndexedDataPipe:
    return node.also(ranges, from_sample) if isinstance(node, Excluder) else Excluder(node, ranges, from_sample)
