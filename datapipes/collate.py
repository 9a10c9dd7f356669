"""Rows of tokens → the tensors that a training step takes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ._torch import functional_datapipe
from .batch import Rows, batcher_of
from .core import IndexedDataPipe
from .errors import ConfigurationError

__all__ = ["IGNORED_LABEL", "CausalLMCollator"]

IGNORED_LABEL = -100
"""The label that torch's cross_entropy ignores."""


@functional_datapipe("collate_causal_lm")
class CausalLMCollator(IndexedDataPipe):
    """Makes inputs and next-token labels (functional: `collate_causal_lm`).

    An item is a dict:
        input_ids: int64 (b, sequence_length)
        label_ids: int64 (b, sequence_length), already shifted: label_ids[r, i] follows input_ids[r, i].
            Both are views of one buffer. Rows that `exclude` masks have labels −100.
            (Hugging Face models shift `labels` themselves: give them input_ids as labels, not these.)
        row_valid: bool (b,), only where `once(tail="pad")` is below; padded rows have labels −100.
        source_ids: int64 (b,), on request: indices into `source_names`, −1 for padding.
        sample_numbers: int64 (b,), on request: places in the run's global order, −1 for padding.
    """

    functional_name = "collate_causal_lm"
    trunk = True

    def __init__(self, datapipe: IndexedDataPipe, source_ids: bool = False, sample_numbers: bool = False) -> None:
        super().__init__(datapipe)
        self.source_ids, self.with_sample_numbers = bool(source_ids), bool(sample_numbers)
        self.check()

    def check(self) -> None:
        if self.datapipe.steps is None:
            raise ConfigurationError("collate_causal_lm takes micro-batches: put batch_samples before it")

    @property
    def settings(self) -> dict[str, Any]:
        return {"source_ids": self.source_ids, "sample_numbers": self.with_sample_numbers}

    @property
    def notes(self) -> str:
        return f"sequence_length {self.sequence_length}"

    @property
    def source_names(self) -> "list[str]":
        """What the indices in `source_ids` stand for."""
        batcher = batcher_of(self)
        assert batcher is not None  # check() saw it
        return batcher.source_names

    def fetch(self, numbers: Any, columns: Any = None) -> "list[dict[str, torch.Tensor]]":
        if columns is not None:
            raise ConfigurationError("columns choose tokens of a row; a collated batch has none left to choose")
        return [self.collate(rows) for rows in self.datapipe.fetch(self.checked(numbers))]

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        return map(self.collate, self.datapipe.iterate(start, stop))

    def collate(self, rows: Rows) -> "dict[str, torch.Tensor]":
        tokens = rows.tokens  # (b, s + 1)
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ConfigurationError(
                "collate_causal_lm takes rows of integer tokens of one length; a map before it made "
                f"{type(tokens[0]).__name__ if isinstance(tokens, list) and tokens else type(tokens).__name__}"
            )
        tokens = np.asarray(tokens, np.int64)
        batch = {}
        hidden = rows.masked
        if rows.valid is not None and not rows.valid.all():
            hidden = ~rows.valid if hidden is None else ~rows.valid | hidden
        if hidden is not None and hidden.any():
            labels = tokens[:, 1:].copy()
            labels[hidden] = IGNORED_LABEL
            batch["input_ids"] = torch.from_numpy(tokens[:, :-1])
            batch["label_ids"] = torch.from_numpy(labels)
        else:
            batch["input_ids"] = torch.from_numpy(tokens[:, :-1])  # (b, s)
            batch["label_ids"] = torch.from_numpy(tokens[:, 1:])  # (b, s)
        if rows.valid is not None:
            batch["row_valid"] = torch.from_numpy(rows.valid)
        if self.source_ids:
            batch["source_ids"] = torch.from_numpy(rows.sources.copy())
        if self.with_sample_numbers:
            batch["sample_numbers"] = torch.from_numpy(rows.sample_numbers.copy())
        return batch
