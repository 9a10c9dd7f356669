"""Which labels of a batch count, and how the others are shown.

A label is the token after an input. It does not count where its row is padding or is masked (`exclude`, SkipErrors),
where it is padding behind packed documents, and where one of these rules says so:

    joins          it is the first token of a document: what came before says nothing of it
    end_of_text    it is that id
    unscored       the byte for it in the `.loss` file beside its token file is 0
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..batch import Rows
from ..core import Int64s
from ..errors import ArgumentTypeError, ConfigurationError
from ..fetch.gather import TokenGather
from ..fetch.routes import Routes
from ..kernels import kernel
from ..loss_masks import as_loss_mask, loss_layouts
from ..row_documents import DocumentFill
from .cut import Cut

__all__ = ["LabelRules", "as_rules", "hidden_rows", "labels_with"]

RULES = ("joins", "end_of_text", "unscored")


def as_rules(rules: Any) -> "tuple[str, ...]":
    """`rules` as a tuple of RULES. Raises ArgumentTypeError, ConfigurationError."""
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ArgumentTypeError(f"no_loss_on is a list of {', '.join(RULES)}, got {rules!r}")
    for rule in rules:
        if rule not in RULES:
            raise ConfigurationError(f"no_loss_on has {rule!r}; of {', '.join(RULES)} some would do")
    return tuple(dict.fromkeys(rules))


class LabelRules:
    """The rules over windows of one plan, with what of it they need.

    Raises ConfigurationError where the end-of-text id of a source is not known, TokenFileError without a `.loss` file.
    """

    def __init__(self, rules: "tuple[str, ...]", plan: Routes) -> None:
        self.rules, self._plan = rules, plan
        gather = plan.gather
        assert gather is not None  # the collator has seen that the rows are windows
        self._gather = gather
        self._ends: Int64s | None = None
        self._scores: TokenGather | None = None
        if "end_of_text" in rules:
            self._ends = np.array([_end_of_text(leaf) for leaf in plan.leaves], np.int64)
        if "unscored" in rules:
            self._scores = TokenGather(gather.spaces, files=loss_layouts)

    def counting(
        self, rows: Rows, labels: np.ndarray, documents: "DocumentFill | None", cut: Cut, where: "Int64s | None"
    ) -> "np.ndarray | None":
        """bool (b, s): which labels that the rank holds count by the rules; None: all."""
        counts: np.ndarray | None = None
        places: Any = rows.places
        if documents is not None and documents.joins is not None:
            counts = ~cut.take(documents.joins, where)
        if self._ends is not None:
            ends = self._ends[rows.sources][:, None]
            counts = labels != ends if counts is None else counts & (labels != ends)
        if self._scores is not None:
            columns = cut.label_columns(self._plan.width - 1, self._gather)
            scored = as_loss_mask(self._scores.rows(places, self._plan.width, columns))
            counts = scored if counts is None else counts & scored
        if self._gather.lays_out and (filled := self._padding(places)) is not None:
            tokens = ~cut.take(filled[:, 1:], where)
            counts = tokens if counts is None else counts & tokens
        return counts

    def _padding(self, places: Int64s) -> "np.ndarray | None":
        """bool (b, S + 1): the padding inside rows; None where there is none."""
        width = self._plan.width
        _, place, count = self._gather.spans(places, width)
        if place.min(initial=0) >= 0:
            return None
        return np.repeat(place < 0, count).reshape(places.size, width)


def _end_of_text(leaf: Any) -> int:
    if not leaf.children:  # of a source that is gone: no row of it is read
        return -1
    end = leaf.reader.origin.end_of_text
    if end is None:
        raise ConfigurationError(
            f"source {leaf.name!r}: its end-of-text id is not known; TokenReader(…, end_of_text=ID) says it"
        )
    return end


def hidden_rows(rows: Rows) -> "np.ndarray | None":
    """bool (b,): rows of which no label counts; None: there is none."""
    hidden = rows.masked
    if rows.valid is not None and not rows.valid.all():
        hidden = ~rows.valid if hidden is None else ~rows.valid | hidden
    return hidden if hidden is not None and hidden.any() else None


def labels_with(labels: np.ndarray, counts: np.ndarray, ignored: int) -> np.ndarray:
    """The labels (b, s), and `ignored` where they do not count: a copy."""
    if labels.dtype != np.int64:
        return np.where(counts, labels, labels.dtype.type(ignored))
    found = np.empty(labels.shape, np.int64)
    kernel("mask_labels")[0](labels, counts, ignored, found)
    return found
