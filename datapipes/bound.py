"""Where a run begins and ends: skip, limit, once. None of them is part of the order's fingerprint."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .core import IndexedDataPipe, Int64s, as_count, sample_node
from .errors import ConfigurationError

__all__ = ["Limiter", "Once", "Skipper"]


@functional_datapipe("skip")
class Skipper(IndexedDataPipe):
    """Begins at number `samples` (functional: `skip`): what a resume puts in front of the sharder.

    The samples keep their numbers: item 0 is sample number `samples` of the run.
    """

    trunk = True
    functional_name = "skip"

    def __init__(self, datapipe: IndexedDataPipe, samples: int) -> None:
        super().__init__(datapipe)
        self.samples = as_count("samples", samples, 0)
        self.check()

    def check(self) -> None:
        if self.samples > self.datapipe.end:
            raise ConfigurationError(
                f"cannot skip {self.samples} samples: {type(self.datapipe).__name__} ends at {self.datapipe.end}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return {"samples": self.samples}

    @property
    def end(self) -> int:
        return self.datapipe.end - self.samples

    @property
    def first_sample(self) -> int:
        return self.samples + self.datapipe.first_sample

    @property
    def skipped_items(self) -> int:
        return self.first_sample

    def sample_numbers(self, numbers: Int64s) -> Int64s:
        return self.datapipe.sample_numbers(numbers + self.samples)

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        return np.zeros(numbers.size, np.int64), numbers + self.samples

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        return np.where((numbers >= self.samples) & (numbers < self.datapipe.end), numbers - self.samples, -1)

    def source_bound(self, source: int, hi: int) -> int:
        return hi + self.samples if hi else 0

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        stop = self.end if stop is None else min(stop, self.end)
        return self.datapipe.iterate(start + self.samples, stop + self.samples)


@functional_datapipe("limit")
class Limiter(IndexedDataPipe):
    """Ends the run (functional: `limit`); exactly one of the three is given.

    Args:
        samples: the run's first `samples` samples; stands before `shard_ranks`.
        steps: the run's first `steps` optimizer steps; stands after `batch_samples`.
        passes: this many times the samples of one pass (after the batcher, whole steps of them); anywhere.

    A resume does not move the end: steps and passes count from the run's beginning.
    """

    trunk = True
    functional_name = "limit"

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        samples: "int | None" = None,
        steps: "int | None" = None,
        passes: "int | None" = None,
    ) -> None:
        super().__init__(datapipe)
        given = {"samples": samples, "steps": steps, "passes": passes}
        asked = {key: as_count(key, value) for key, value in given.items() if value is not None}
        if len(asked) != 1:
            raise ConfigurationError(f"limit takes one of samples=, steps=, passes=, got {asked or 'none'}")
        self.kind, self.count = asked.popitem()
        self.check()

    def check(self) -> None:
        child = self.datapipe
        steps, topology = child.steps, child.topology
        if self.kind == "samples":
            if steps is not None or topology is not None:
                raise ConfigurationError("limit(samples=) counts the run's samples: put it before shard_ranks")
            samples = child.first_sample + self.count
        elif self.kind == "steps":
            if steps is None:
                raise ConfigurationError("limit(steps=) counts optimizer steps, so it stands after batch_samples")
            samples = steps.start(self.count)
        else:
            if child.finite and self.count > 1:
                raise ConfigurationError(
                    f"limit(passes={self.count}): the graph below ends after one pass of {len(child)}; leave out its "
                    "own once or limit"
                )
            samples = child.last_sample if child.finite else self.count * sample_node(child).samples_per_pass
            if steps is not None and not child.finite:
                samples = steps.start(steps.step_of(samples))  # whole steps, wherever the run begins
            if not samples:
                raise ConfigurationError(f"limit(passes={self.count}): not one step, so nothing would be delivered")
        self._last = min(samples, child.last_sample)
        unit = steps.unit if steps is not None else topology.dp_size if topology is not None else 1
        self._end = child.end if samples >= child.last_sample else max(0, samples - child.first_sample) // unit

    @property
    def last_sample(self) -> int:
        return self._last

    @property
    def settings(self) -> dict[str, Any]:
        return {self.kind: self.count}

    @property
    def end(self) -> int:
        return self._end

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        return self.datapipe.iterate(start, self.end if stop is None else min(stop, self.end))

    @property
    def finite(self) -> bool:
        return True


@functional_datapipe("once")
class Once(IndexedDataPipe):
    """One finite pass for evaluation (functional: `once`): each sample exactly once, from the beginning
    at every `iter()`. Stands before `shard_ranks`, over an unweighted graph.

    Args:
        tail: what becomes of an incomplete last step: "drop" it, "pad" it with masked rows (labels −100,
            `row_valid` False), or deliver it "uneven" (ranks may differ in batches and rows).
    """

    trunk = True
    functional_name = "once"

    def __init__(self, datapipe: IndexedDataPipe, tail: str = "drop") -> None:
        super().__init__(datapipe)
        if tail not in ("drop", "pad", "uneven"):
            raise ConfigurationError(f"tail is {tail!r}; 'drop', 'pad' or 'uneven' would do")
        self._tail = tail
        self.check()

    def check(self) -> None:
        if self.datapipe.topology is not None or self.datapipe.steps is not None:
            raise ConfigurationError("once stands before shard_ranks: every rank takes its part of the one pass")
        if self.datapipe.weighted:
            raise ConfigurationError(
                "once needs an unweighted graph: a weighted blend has no pass in which each sample comes exactly "
                "once; blend without weights, or evaluate the sources one by one"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return {"tail": self._tail}

    @property
    def tail(self) -> str:
        return self._tail

    @property
    def end(self) -> int:
        return len(self.datapipe)

    @property
    def last_sample(self) -> int:
        return self.first_sample + self.end

    @property
    def finite(self) -> bool:
        return True
