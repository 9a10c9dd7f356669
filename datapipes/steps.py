"""Steps: which samples the optimizer's step n takes. The order itself knows sample numbers only."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .core import MAX_NUMBER, Int64s, as_count
from .errors import ArgumentTypeError, BatchSizeError

__all__ = ["Breakpoint", "StepTable", "as_schedule"]


class Breakpoint(NamedTuple):
    """From `step` on, whose first sample number is `sample`, a step takes `size` samples."""

    step: int
    sample: int
    size: int


Schedule = tuple[tuple[int, int], ...]

MOST_BREAKPOINTS = 256


def as_schedule(value: Any, unit: int) -> Schedule:
    """((step, global batch size), …) from a number or a list of pairs; each a multiple of `unit`.

    Raises BatchSizeError with the nearest sizes that would do, ArgumentTypeError.
    """
    if value is None:
        value = unit
    if isinstance(value, (int, np.integer)):
        value = [(0, value)]
    if not isinstance(value, (list, tuple)) or not all(isinstance(e, (list, tuple)) and len(e) == 2 for e in value):
        raise ArgumentTypeError(f"global_batch_size must be a number or a list of (step, size) pairs, got {value!r}")
    schedule = tuple((as_count("step", s, 0), as_count("global_batch_size", g)) for s, g in value)
    steps = [step for step, _ in schedule]
    if not steps or steps[0] != 0 or steps != sorted(set(steps)):
        raise BatchSizeError(f"the steps of global_batch_size must begin at 0 and increase, got {steps}")
    if len(schedule) > MOST_BREAKPOINTS:
        raise BatchSizeError(
            f"global_batch_size has {len(schedule)} entries; at most {MOST_BREAKPOINTS} fit a state: a ramp of fewer, "
            "larger jumps would do"
        )
    for step, size in schedule:
        if size % unit:
            raise BatchSizeError(
                f"global_batch_size {size} (from step {step}) is not divisible by dp_size × micro-batch = {unit}; "
                f"{nearest_multiples(size, unit)} would do"
            )
    return schedule


@dataclass(frozen=True)
class StepTable:
    """Breakpoints in order, the first of them (0, 0, size), and the samples of one batch on all ranks."""

    breakpoints: tuple[Breakpoint, ...]
    unit: int = 1

    @classmethod
    def of(cls, schedule: Schedule, unit: int = 1) -> "StepTable":
        return cls((Breakpoint(0, 0, schedule[0][1]),), unit).then(schedule, 0)

    def then(self, schedule: Schedule, step: int) -> "StepTable":
        """This table up to `step`, and from there on as the schedule says."""
        table = [b for b in self.breakpoints if b.step < step] or [self.breakpoints[0]]
        size = [g for s, g in schedule if s <= step][-1]
        for at, g in [(step, size), *((s, g) for s, g in schedule if s > step)]:
            last = table[-1]
            if at == last.step:
                table[-1] = last._replace(size=g)
            elif g != last.size:
                table.append(Breakpoint(at, last.sample + (at - last.step) * last.size, g))
        return StepTable(tuple(table), self.unit)

    def start(self, step: int) -> int:
        """The step's first sample number."""
        b = self._in_force(step)
        return min(b.sample + (step - b.step) * b.size, MAX_NUMBER)

    def size(self, step: int) -> int:
        """How many samples the step takes."""
        return self._in_force(step).size

    def _in_force(self, step: int) -> Breakpoint:
        return self.breakpoints[bisect_right(self.breakpoints, step, key=lambda b: b.step) - 1]

    def step_of(self, sample: int) -> int:
        """The step that takes this sample."""
        b = self.breakpoints[bisect_right(self.breakpoints, sample, key=lambda b: b.sample) - 1]
        return b.step + (sample - b.sample) // b.size

    def located(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) samples → (n,) the steps that take them, (n,) those steps' first samples."""
        step, first, size = (np.array(column, np.int64) for column in zip(*self.breakpoints, strict=True))
        b = np.searchsorted(first, samples, side="right") - 1
        into = (samples - first[b]) // size[b]
        return step[b] + into, first[b] + into * size[b]

    def next_step(self, sample: int) -> int:
        """The first step that begins at this sample or after it."""
        step = self.step_of(sample)
        return step if self.start(step) == sample else step + 1

    def check_from(self, sample: int) -> None:
        """Raises BatchSizeError unless `unit` divides what is left of the step at `sample`, and every later
        step.
        """
        unit, step = self.unit, self.step_of(sample)
        start, stop = self.start(step), self.start(step + 1)
        if sample != start and (stop - sample) % unit:
            low, high = step, step + 1
            nearest = low if sample - start <= stop - sample else high
            raise BatchSizeError(
                f"sample {sample} is inside step {step} ({stop - sample} of its {stop - start} samples are left), "
                f"which dp_size × micro-batch = {unit} does not divide; the nearest step boundary is step {nearest} "
                f"(sample {self.start(nearest)}): state_dict(step={low}) or state_dict(step={high}) would do"
            )
        first = self.next_step(sample)  # from here on every step must divide
        following = [b.step for b in self.breakpoints[1:]] + [MAX_NUMBER]
        for b, until in zip(self.breakpoints, following, strict=True):
            if until > first and b.size % self.unit:
                raise BatchSizeError(
                    f"steps of {b.size} samples (from step {b.step}) are not divisible by dp_size × micro-batch "
                    f"= {self.unit}; {nearest_multiples(b.size, self.unit)} would do"
                )


def nearest_multiples(size: int, unit: int) -> str:
    low = size // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)
