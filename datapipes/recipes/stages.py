"""Planned changes of a blend's weights as people say them: by step or sample, at once or as a ramp."""

from collections.abc import Callable
from typing import Any

from ..core import as_count
from ..steps import StepTable
from ..weights import as_shares, linear_ramp, tempered
from .text import Document, Place

__all__ = ["planned_changes"]

KEYS = ("step", "sample", "weights", "until", "pieces")


def planned_changes(
    arguments: "dict[str, Any]",
    names: "list[str]",
    steps: "Callable[[], StepTable] | None",
    document: Document,
    place: Place,
) -> "list[Any]":
    """`schedule` as a blend takes it: [(number, weights), …].

    An entry is {step or sample: from when on, weights: …}; with `until` a straight ramp from the weights before to
    these, which hold from there on, in `pieces` phases (default 64). Steps become samples here, once, by the recipe's
    own batch sizes: what is planned belongs to the order, and stays where it is if batches change later.
    """
    changes: list[Any] = []
    before: Any = arguments.get("weights")
    if before is not None and arguments.get("temperature") is not None:
        before = dict(zip(names, tempered(as_shares(names, before), arguments["temperature"]), strict=True))
    for i, entry in enumerate(arguments["schedule"]):
        at = (*place, i)
        if not isinstance(entry, dict):
            raise document.error(at, f"{{step: …, weights: …}} was expected, got {entry!r:.80}")
        document.mapping(entry, at, KEYS)
        if ("step" in entry) == ("sample" in entry) or "weights" not in entry:
            raise document.error(at, "an entry has weights, and one of step and sample")
        unit = "step" if "step" in entry else "sample"
        if unit == "step" and steps is None:
            raise document.error(at, "only the blend that begins the run's own graph knows its steps: say sample")
        first = _number(entry[unit], unit, steps)
        if changes and first < changes[-1][0]:
            raise document.error(at, f"begins at sample {first}, but the change before it ends at {changes[-1][0]}")
        if changes and first == changes[-1][0]:
            changes.pop()  # a ramp's end, or what never held
        if "until" in entry:
            if before is None:
                raise document.error(at, "a ramp begins at the weights before it, and this blend has none")
            stop = _number(entry["until"], unit, steps)
            changes += linear_ramp(first, stop, before, entry["weights"], entry.get("pieces", 64))
        elif "pieces" in entry:
            raise document.error(at, "pieces belongs to a ramp: it has until")
        else:
            changes.append((first, entry["weights"]))
        before = entry["weights"]
    return changes


def _number(value: Any, unit: str, steps: "Callable[[], StepTable] | None") -> int:
    number = as_count(unit, value, 0)
    return steps().start(number) if unit == "step" and steps is not None else number
