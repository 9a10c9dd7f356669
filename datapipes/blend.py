"""The mixture: which source delivers sample number k, and as which of its own samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count, nodes_of
from .errors import ArgumentTypeError, ConfigurationError, SourceExhaustedError, WeightsError
from .kernels import kernel
from .phases import Phases, WeightChange, phases_of
from .weights import LARGEST_TOTAL, as_shares, quantise, tempered

__all__ = ["Blender"]

ON_EXHAUSTED = ("stop", "renormalise", "error")


@functional_datapipe("blend")
class Blender(IndexedDataPipe):
    """Mixes named sources by weight (functional: `blend`), O(log sources) a number, nothing stored.

    At every prefix of a phase (a stretch between changes of the weights) each source is within 2 samples
    of its stored share; each source's samples come in its own order, so nothing repeats before the
    source is through, and a change of weights neither repeats nor loses one. See docs/blend.md.

    Without weights it is the exact union: every `len` numbers hold each sample of every source once.

    Args:
        datapipe, *others: indexed nodes with different names and one sequence_length.
        weights: {name: weight} or a list in the order of the sources; only ratios count, 0 is never drawn.
        temperature: share ** (1 / temperature); without weights, of the sources' lengths.
        repeats: {name: times}, without weights: how often the union holds a source an epoch (fractions too).
        max_epochs: {name: epochs}, or one number for all: a cap on a source.
        on_exhausted: what follows when a source reaches its cap: "stop" (the graph ends before the sample
            that the source cannot give: the default), "renormalise" (the others go on in their ratio),
            "error" (SourceExhaustedError).
        name: what a blend around this one calls it.
        schedule: [(number, weights), …]: changes planned from the start, part of the order: from that number of
            the blend on these weights hold (as they are: temperature is none of theirs); `linear_ramp` makes
            such lists. A change that a run's journal makes takes the place of all that was planned from there on.

    Raises WeightsError, ConfigurationError, ArgumentTypeError.
    """

    functional_name = "blend"

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        *others: IndexedDataPipe,
        weights: "Mapping[str, float] | Sequence[float] | None" = None,
        temperature: "float | None" = None,
        repeats: "Mapping[str, float] | None" = None,
        max_epochs: "Mapping[str, float] | float | None" = None,
        on_exhausted: str = "stop",
        name: str = "",
        schedule: "Sequence[tuple[int, Mapping[str, float] | Sequence[float]]] | None" = None,
    ) -> None:
        super().__init__(datapipe, *others)
        self.given_name = name
        self.sources = tuple(child.name for child in self.children)
        for source in self.sources:
            if not source:
                raise ConfigurationError("a blend's sources have names: give an inner blend or concat name=")
            if self.sources.count(source) > 1:
                raise ConfigurationError(
                    f"two sources are named {source!r}; give one another name: TokenReader(..., name=...)"
                )
        self.check_names()
        if on_exhausted not in ON_EXHAUSTED:
            raise ConfigurationError(f"on_exhausted is {on_exhausted!r}; one of {', '.join(ON_EXHAUSTED)} would do")
        self.on_exhausted = on_exhausted
        self.check()
        lengths = [len(child) for child in self.children]
        self.temperature = temperature if weights is None else None  # of the lengths, which more files change
        self.exact = weights is None and temperature is None
        if self.exact:
            self.weights = tuple(self._repeated(lengths, repeats))
        else:
            if repeats is not None:
                raise WeightsError("repeats belongs to a blend without weights; max_epochs caps a weighted one")
            given = as_shares(self.sources, weights) if weights is not None else [float(n) for n in lengths]
            self.weights = quantise(self.sources, tempered(given, temperature))
        self.given_caps = self._caps(max_epochs, lengths)
        self.schedule = self._planned(schedule)
        self.changes: tuple[WeightChange, ...] = ()
        _ = self.phases  # whatever cannot be blended is refused here

    def check(self) -> None:
        lengths = {name: child.sequence_length for name, child in zip(self.sources, self.children, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(f"the sources of a blend have one sequence_length, got {lengths}")
        for name, child in zip(self.sources, self.children, strict=True):
            if child.finite and len(child) == 0:
                raise ConfigurationError(f"source {name!r} has no samples")
        self.__dict__.pop("phases", None)

    def check_names(self) -> None:
        """Raises ConfigurationError where two sources below have one name."""
        readers = Counter(node.name for node in nodes_of(self) if not node.children)
        for source, times in readers.items():
            if times > 1:
                raise ConfigurationError(
                    f"two sources are named {source!r}, in different blends below this one; give one another name: "
                    "TokenReader(..., name=...)"
                )

    def _repeated(self, lengths: "list[int]", repeats: "Mapping[str, float] | None") -> "list[int]":
        if repeats is None:
            return lengths
        if not isinstance(repeats, Mapping):
            raise ArgumentTypeError(f"repeats must be a dict by source name, got {repeats!r}")
        times = as_shares(self.sources, dict.fromkeys(self.sources, 1) | dict(repeats), "repeats")
        result = [round(t * n) for t, n in zip(times, lengths, strict=True)]
        for name, t, n in zip(self.sources, times, result, strict=True):
            if n >= LARGEST_TOTAL:
                raise WeightsError(f"repeats of source {name!r} is {t}: no union of 2**52 samples can be numbered")
            if t and not n:
                raise WeightsError(f"repeats of source {name!r} is {t}: that is not one sample of it")
        return result

    def _caps(self, max_epochs: Any, lengths: "list[int]") -> "tuple[int | None, ...]":
        """What max_epochs says, in samples of each source."""
        if max_epochs is None:
            given: dict[str, float] = {}
        elif isinstance(max_epochs, Mapping):
            given = dict(max_epochs)
            if unknown := [name for name in given if name not in self.sources]:
                raise WeightsError(f"max_epochs names {unknown[0]!r}; the sources are {', '.join(self.sources)}")
        else:
            given = dict.fromkeys(self.sources, max_epochs)
        self.max_epochs = given
        for name, epochs in given.items():
            if not epochs:
                raise WeightsError(
                    f"max_epochs of source {name!r} is {epochs}: not one sample of it; weight 0 leaves a source out"
                )
            as_shares([name], [epochs], "max_epochs")
        caps: list[int | None] = []
        for name, n in zip(self.sources, lengths, strict=True):
            cap = int(given[name] * n) if name in given else None
            if cap == 0:
                raise WeightsError(f"max_epochs of source {name!r} is {given[name]}: that is not one sample of it")
            caps.append(cap)
        return tuple(caps)

    def _planned(self, schedule: Any) -> tuple[WeightChange, ...]:
        """What schedule says, as changes."""
        if schedule is None:
            return ()
        if not isinstance(schedule, (list, tuple)) or not all(
            isinstance(entry, (list, tuple)) and len(entry) == 2 for entry in schedule
        ):
            raise ArgumentTypeError(f"schedule must be a list of (number, weights), got {schedule!r:.200}")
        numbers = [as_count("a number in schedule", number, 0) for number, _ in schedule]
        if numbers != sorted(set(numbers)):
            at = next(i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1])
            raise WeightsError(f"the numbers of schedule must increase, got {numbers[at]} after {numbers[at - 1]}")
        return tuple(
            WeightChange(n, self.integer_weights(weights)) for n, (_, weights) in zip(numbers, schedule, strict=True)
        )

    @property
    def caps(self) -> "tuple[int | None, ...]":
        """Samples that each source can give, where that has an end: by max_epochs, or its own."""
        return self._ended(self.given_caps)

    def _ended(self, caps: "tuple[int | None, ...]") -> "tuple[int | None, ...]":
        pairs = zip(caps, self.children, strict=True)
        return tuple(min(cap or MAX_NUMBER, child.end) if child.finite else cap for cap, child in pairs)

    # Phases -------------------------------------------------------------------------------------------

    def with_changes(self, changes: "Sequence[WeightChange]") -> "Blender":
        """The same blend with these changes of weights, in order of their numbers; what was planned from the
        first of them on is dropped.
        """
        copy = self.with_children(*self.children)
        copy.changes = tuple(changes)
        return copy

    def with_sources(
        self,
        children: "Sequence[IndexedDataPipe]",
        weights: "Sequence[int]",
        caps: "Sequence[int | None]",
        exact: bool,
    ) -> "Blender":
        """The same blend of other sources, with these integer weights and caps in samples."""
        sources = tuple(child.name for child in children)
        planned = [
            (number, dict(zip(self.sources, weights or (), strict=True))) for number, weights, _ in self.schedule
        ]
        copy = self.changed(
            children=tuple(children),
            schedule=tuple(WeightChange(number, tuple(w.get(s, 0) for s in sources)) for number, w in planned),
            sources=sources,
            weights=tuple(weights),
            given_caps=tuple(caps),
            exact=exact,
        )
        copy.check()
        return copy

    def weights_at(self, number: int) -> tuple[int, ...]:
        """The integer weights that were asked for at one of our numbers, by the last change up to it."""
        asked = [change.weights for change in self.all_changes() if change.number <= number and change.weights]
        return asked[-1] if asked else self.weights

    def all_changes(self) -> "list[WeightChange]":
        """What was planned up to the first other weights, and the changes."""
        unplanned = min((change.number for change in self.changes if change.weights), default=MAX_NUMBER)
        planned = [change for change in self.schedule if change.number < unplanned]
        return sorted([*planned, *self.changes], key=lambda change: change.number)

    def caps_at(self, number: int) -> "tuple[int | None, ...]":
        """Samples that each source can give in all, by the last change up to one of our numbers."""
        given = [change.caps for change in self.changes if change.number <= number and change.caps is not None]
        return self._ended(given[-1] if given else self.given_caps)

    def integer_weights(self, weights: Any, temperature: "float | None" = None) -> tuple[int, ...]:
        """What these weights are stored as. Raises WeightsError, ArgumentTypeError."""
        return quantise(self.sources, tempered(as_shares(self.sources, weights), temperature))

    @cached_property
    def phases(self) -> Phases:
        changes = [
            change if change.caps is None else change._replace(caps=self._ended(change.caps))
            for change in self.all_changes()
        ]
        return phases_of(self.sources, self.weights, changes, self.caps, self.on_exhausted != "renormalise")

    # The contract -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.given_name or (self.children[0].name if len(self.children) == 1 else "")

    @property
    def settings(self) -> dict[str, Any]:
        caps = {"caps": [cap or 0 for cap in self.given_caps]} if any(self.given_caps) else {}
        what = {"on_exhausted": self.on_exhausted} if any(self.caps) else {}
        planned = {"schedule": [[n, list(weights or ())] for n, weights, _ in self.schedule]} if self.schedule else {}
        return {"exact": int(self.exact), "weights": list(self.weights), **caps, **what, **planned}

    @property
    def notes(self) -> str:
        text = "exact union" if self.exact else "weighted"
        if self.phases.exhausted:
            text += f"; {self.phases.exhausted!r} is through at sample {self.phases.end:,}"
        if self.schedule:
            text += f"; {len(self.schedule)} planned change(s) of weights"
        if self.changes:
            text += f"; {len(self.changes)} change(s) of weights"
        return text

    @property
    def weighted(self) -> bool:
        repeated = any(weight != len(child) for weight, child in zip(self.weights, self.children, strict=True))
        return not self.exact or repeated or bool(self.schedule) or super().weighted

    def share(self, source: int) -> float:
        """The stored share of a source before any change."""
        return self.weights[source] / sum(self.weights)

    @property
    def samples_per_pass(self) -> int:
        return sum(self.weights) if self.exact else sum(len(child) for child in self.children)

    @property
    def end(self) -> int:
        return MAX_NUMBER if self.on_exhausted == "error" else self.phases.end

    @property
    def finite(self) -> bool:
        return self.end < MAX_NUMBER

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        p = self.phases
        if numbers.size and numbers.max() >= p.end:
            raise SourceExhaustedError(
                f"source {p.exhausted!r} reaches its cap at sample {p.end}, and sample {numbers.max()} was asked "
                'for; on_exhausted="renormalise" lets the others go on'
            )
        source, number = np.empty(numbers.size, np.int64), np.empty(numbers.size, np.int64)
        function, _ = kernel("blend_route")
        numbers = np.ascontiguousarray(numbers)
        function(numbers, source, number, p.first, p.root, p.offset, p.left, p.right, p.weight, p.total)
        return source, number

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        p = self.phases
        out = np.empty(numbers.size, np.int64)
        function, _ = kernel("blend_unroute")
        numbers = np.ascontiguousarray(numbers)
        function(source, numbers, out, p.first, p.offset, p.leaf, p.parent, p.left, p.weight, p.total, p.end)
        return out

    def source_bound(self, source: int, hi: int) -> int:
        return self.counts(hi)[source]

    def counts(self, hi: int) -> list[int]:
        """How many samples of each source the numbers [0, hi) hold."""
        p = self.phases
        hi = min(hi, p.end)
        i = int(np.searchsorted(p.first, hi, side="right")) - 1
        return [int(a) + b for a, b in zip(p.offset[i], p.trees[i].counts(hi - int(p.first[i])), strict=True)]
