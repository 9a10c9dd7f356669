"""A batch some of whose rows cannot be made: the others, and rows of zeros with every label masked in their places."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .core import Int64s
from .errors import SkipBudgetError, StateError
from .notes import Ledger

__all__ = ["RowSkipper", "SkipLedger"]

MOST_SHOWN = 1000


class SkipLedger(Ledger):
    """What was done without, and how much more may be."""

    kind = "skip_errors"
    of_items = True

    def __init__(self, key: str = "", budget: int = 0) -> None:
        super().__init__(key)
        self.budget = budget
        self.before = 0  # before the state that this run goes on from
        self._samples: dict[int, tuple[str, str]] = {}  # {sample number: (node, what was raised)}
        self._items: list[tuple[str, str]] = []  # of a stream
        self._many = 0  # items beyond those that are shown
        self._full = False
        self._in_this_process = 0

    def settings(self) -> "dict[str, Any]":
        return {"budget": self.budget}

    @property
    def count(self) -> int:
        return self.before + len(self._samples) + len(self._items) + self._many

    @property
    def skipped(self) -> "list[tuple[str, int | None, str]]":
        found: list[tuple[str, int | None, str]] = [(node, None, text) for node, text in self._items]
        return found + [(node, sample, text) for sample, (node, text) in sorted(self._samples.items())][:MOST_SHOWN]

    def skip(self, node: str, sample: "int | None", error: Exception) -> None:
        """Notes one that was done without; of a stream, raises SkipBudgetError for one too many."""
        self.tell((node, sample, f"{type(error).__name__}: {error}"[:200]))
        if sample is None:
            self._in_this_process += 1  # a worker, which knows no more, must not go on for ever
            if self._in_this_process > self.budget:
                raise SkipBudgetError(
                    f"{self._in_this_process} items cannot be made, and SkipErrors has a budget of {self.budget}; the "
                    f"last one: {type(error).__name__}: {error} (in {node})"
                ) from error
            self.check(None, error)

    def write(self, note: Any) -> None:
        node, sample, text = note
        if sample is not None:
            self._samples[sample] = (node, text)
        elif len(self._items) < MOST_SHOWN:
            self._items.append((node, text))
        else:
            self._many += 1
        self._full = self.count > self.budget

    def _until(self, consumed: "int | None") -> "list[int]":
        return sorted(sample for sample in self._samples if consumed is None or sample < consumed)

    @property
    def full(self) -> bool:
        return self._full

    def check(self, consumed: "int | None", error: "Exception | None" = None) -> None:
        """Raises SkipBudgetError where more was done without, of what is consumed, than may be."""
        samples = self._until(consumed)
        if (count := self.before + len(samples) + len(self._items) + self._many) > self.budget:
            node, text = self._items[-1] if self._items else self._samples[samples[-1]]
            where = "" if self._items else f", sample number {samples[-1]}"
            raise SkipBudgetError(
                f"{count} samples or items cannot be made, and SkipErrors has a budget of {self.budget}; the last one: "
                f"{text} (in {node}{where})"
            ) from error

    def as_json(self, consumed: "int | None") -> "dict[str, Any]":
        samples = self._until(consumed)
        count = self.before + len(samples) + len(self._items) + self._many
        return {"count": count, "samples": samples[-64:]} if count else {}

    def load(self, value: "dict[str, Any]") -> None:
        count, samples = value.get("count", 0), value.get("samples", [])
        good = type(count) is int and isinstance(samples, list) and all(type(s) is int and s >= 0 for s in samples)
        if not good or count < len(samples) or len(samples) > 64:
            raise StateError(f"noted.skip_errors has a count and the last of its samples, got {value!r:.200}")
        self._samples = dict.fromkeys(samples, ("", "before this state was saved"))
        self.before, self._items, self._many = count - len(samples), [], 0
        self._full = self.count > self.budget

    def metrics(self) -> "dict[str, int | float]":
        return {"data/skipped": self.count}


class RowSkipper:
    """What a batcher does with rows that cannot be made."""

    def __init__(self, exceptions: "tuple[type[Exception], ...]", ledger: SkipLedger) -> None:
        self.exceptions, self.ledger = exceptions, ledger

    def rows(self, one: "Callable[[int], Any]", samples: Int64s, width: int) -> "tuple[np.ndarray, np.ndarray]":
        """(int64 (b, width) rows, bool (b,) which of them are masked) of windows, `one(i)` of which makes row i."""
        items, bad = self.items(one, samples, lambda: np.zeros(width, np.int64))
        return np.stack(items), bad

    def items(
        self, one: "Callable[[int], Any]", samples: Int64s, empty: "Callable[[], Any]"
    ) -> "tuple[list[Any], np.ndarray]":
        """The same of items of any kind; `empty()` is what stands for one where no other can."""
        items: list[Any] = [None] * samples.size
        bad = np.zeros(samples.size, np.bool_)
        for i, sample in enumerate(samples.tolist()):
            try:
                items[i] = one(i)
            except self.exceptions as error:
                bad[i] = True
                self.ledger.skip("batch_samples", sample, error)
        good = next((item for item, wrong in zip(items, bad, strict=True) if not wrong), None)
        for i in np.flatnonzero(bad).tolist():
            items[i] = np.zeros_like(good) if isinstance(good, np.ndarray) else empty() if good is None else good
        return items, bad
