"""The functional names as typed methods, for checkers and editors; at run time torch's registry serves.

A test holds each signature here to the constructor of its node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from .balance import RankBalancer
    from .batch import SampleBatcher
    from .blend import Blender
    from .bound import Limiter, Once, Skipper
    from .collate import CausalLMCollator
    from .combine import Concater, Mapper, Zipper
    from .core import IndexedDataPipe
    from .documents import DocumentSelector
    from .exclude import Excluder
    from .pack import DocumentPacker
    from .permute import Permuter
    from .reorder import NanosetOrder, Reorderer
    from .resize import SequenceResizer
    from .shard import RankSharder
    from .slice import SequenceSlicer
    from .streaming.bound import StreamLimiter, StreamSkipper
    from .streaming.pack import SequencePacker
    from .streaming.tokenize import DocumentTokenizer
    from .topology import Topology

__all__ = ["ALIASES", "FluentMethods", "FluentStreams"]

ALIASES = {
    "batch": "batch_samples",
    "concat": "concat_items",
    "map": "map_items",
    "shuffle": "permute",
    "zip": "zip_items",
}
"""torch core's names on an indexed node → the registered names of our nodes."""


class FluentMethods:
    """What every indexed node can be followed by."""

    if TYPE_CHECKING:
        # Not IndexedDataPipe's own methods: each builds the node of that functional name over self.

        def select_documents(
            self,
            share: float | tuple[float, float] | Sequence[float] | None = None,
            seed: int | None = None,
            by: str = "number",
            score: str | None = None,
            at_least: float | None = None,
            below: float | None = None,
            documents: Sequence[int] | np.ndarray | None = None,
            name: str = "",
        ) -> DocumentSelector: ...

        def slice_sequences(
            self, sequence_length: int, unit: int | None = None, align: str | None = None
        ) -> SequenceSlicer: ...

        def pack_documents(self, sequence_length: int) -> DocumentPacker: ...

        def permute(self, seed: int, window: int | None = None) -> Permuter: ...

        def resize_sequences(self, sequence_length: int, after: int) -> SequenceResizer: ...

        def blend(
            self,
            *others: IndexedDataPipe,
            weights: Mapping[str, float] | Sequence[float] | None = None,
            temperature: float | None = None,
            repeats: Mapping[str, float] | None = None,
            max_epochs: Mapping[str, float] | float | None = None,
            on_exhausted: str = "stop",
            name: str = "",
            schedule: Sequence[tuple[int, Mapping[str, float] | Sequence[float]]] | None = None,
        ) -> Blender: ...

        def reorder(self, file: str | os.PathLike[str]) -> Reorderer: ...

        def order_nanoset(
            self,
            *others: IndexedDataPipe,
            num_samples: int,
            weights: Sequence[float] | dict[str, float] | None = None,
            seed: int = 1234,
        ) -> NanosetOrder: ...

        def skip(self, samples: int) -> Skipper: ...

        def limit(self, samples: int | None = None, steps: int | None = None, passes: int | None = None) -> Limiter: ...

        def once(self, tail: str = "drop") -> Once: ...

        def exclude(self, ranges: Mapping[str, Sequence[tuple[int, int]]], from_sample: int = 0) -> Excluder: ...

        def shard_ranks(self, topology: Topology, seed: int | None = None) -> RankSharder: ...

        def balance_ranks(
            self, topology: Topology, micro_batch_size: int, global_batch_size: int, cost: str = "attention"
        ) -> RankBalancer: ...

        def batch_samples(
            self,
            micro_batch_size: int,
            global_batch_size: int | Sequence[tuple[int, int]] | None = None,
        ) -> SampleBatcher: ...

        def collate_causal_lm(
            self,
            source_ids: bool = False,
            sample_numbers: bool = False,
            *,
            topology: Topology | None = None,
            layout: str | None = None,
            cp: str | None = None,
            position_ids: bool = False,
            document_ids: bool = False,
            cu_seqlens: bool = False,
            label_mask: bool = False,
            no_loss_on: Sequence[str] = (),
            ignore_index: int | str | None = "layout",
            dtype: str = "int64",
            microbatches: int | None = None,
            input_pp_rank: int = 0,
            output_pp_rank: int = -1,
        ) -> CausalLMCollator: ...

        def map_items(self, fn: Callable[[Any], Any], seeded: bool = True) -> Mapper: ...

        def zip_items(self, *others: IndexedDataPipe) -> Zipper: ...

        def concat_items(self, *others: IndexedDataPipe, name: str = "") -> Concater: ...

        batch = batch_samples
        concat = concat_items
        map = map_items
        shuffle = permute
        zip = zip_items


class FluentStreams:
    """What every streaming node of ours can be followed by, besides torch's own."""

    if TYPE_CHECKING:

        def limit(self, items: int) -> StreamLimiter: ...

        def pack_sequences(self, sequence_length: int) -> SequencePacker: ...

        def skip(self, items: int) -> StreamSkipper: ...

        def tokenize(self, tokenizer: str | os.PathLike[str], end_of_text: str | bool = True) -> DocumentTokenizer: ...
