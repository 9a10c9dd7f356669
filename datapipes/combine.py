"""A function on each item, and several graphs as one: map, zip, concat, before or after the collator."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ._torch import DataPipe, functional_datapipe
from .core import MAX_NUMBER, IndexedDataPipe, Int64s
from .errors import ArgumentTypeError, ConfigurationError
from .fetch.routes import stacked
from .names import named_nodes
from .permute import derive_key

__all__ = ["Concater", "Mapper", "Zipper", "seeded_map"]


@contextlib.contextmanager
def _derived_seeds(seed: int) -> Iterator[None]:
    """The global random generators seeded for one item, and put back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@functional_datapipe("map_items")
class Mapper(IndexedDataPipe):
    """Applies a function to each item (functional: `map`): to samples before the batcher, to batches after.

    Args:
        fn: item → item. An item stays a pure function of its number: the global random generators (random,
            numpy.random, torch on the CPU) are seeded from its sample number while fn runs, then put back.
        seeded: False, if fn uses none of them, leaves the generators alone (saves about 20 µs an item,
            and allows prefetching in a thread).
    """

    functional_name = "map"
    trunk = True
    decides_order = False

    def __init__(self, datapipe: IndexedDataPipe, fn: Callable[[Any], Any], seeded: bool = True) -> None:
        super().__init__(datapipe)
        if not callable(fn):
            raise ArgumentTypeError(f"map takes a function, got {fn!r}")
        self.fn, self.seeded = fn, bool(seeded)

    @property
    def settings(self) -> dict[str, Any]:
        return {"fn": getattr(self.fn, "__qualname__", type(self.fn).__name__)}

    def fetch(self, numbers: Any, columns: Any = None) -> Any:
        numbers = self.checked(numbers)
        items = self.datapipe.fetch(numbers, columns)
        return stacked([self._apply(n, item) for n, item in zip(numbers.tolist(), items, strict=True)])

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        for number, item in enumerate(self.datapipe.iterate(start, stop), start):
            yield self._apply(number, item)

    def _apply(self, number: int, item: Any) -> Any:
        try:
            if not self.seeded:
                return self.fn(item)
            with _derived_seeds(derive_key(self._place(number), f"map {self._depth()}", self.name)):
                return self.fn(item)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                where = f"source {self.name!r}, " if self.name else ""
                error.add_note(f"in map({self.settings['fn']}), {where}sample number {self._place(number)}")
            raise

    def _place(self, number: int) -> int:
        """The sample number (of a batch's first row): the same after a resume, another one on another rank."""
        return int(self.datapipe.sample_numbers(np.array([number], np.int64))[0])

    def _depth(self) -> int:
        """How many maps stand below in the chain: each draws other numbers."""
        node, depth = self.datapipe, 0
        while len(node.children) == 1:
            depth += isinstance(node, Mapper)
            node = node.datapipe
        return depth


def seeded_map(datapipe: DataPipe) -> "Mapper | None":
    """The first map of a graph, from its last node down, that seeds the process's random generators: no thread may run
    it beside the training loop, whose generators they are.
    """
    return next((node for node, _ in named_nodes(datapipe) if isinstance(node, Mapper) and node.seeded), None)


@functional_datapipe("zip_items")
class Zipper(IndexedDataPipe):
    """Item k is the tuple of the children's items k (functional: `zip`); as long as the shortest."""

    functional_name = "zip"

    def __init__(self, datapipe: IndexedDataPipe, *others: IndexedDataPipe) -> None:
        super().__init__(datapipe, *others)

    @property
    def samples_per_pass(self) -> int:
        return min(len(child) for child in self.children)

    @property
    def end(self) -> int:
        return min(child.end for child in self.children)

    @property
    def name(self) -> str:
        return self.children[0].name

    def fetch(self, numbers: Any, columns: Any = None) -> "list[tuple[Any, ...]]":
        numbers = self.checked(numbers)
        parts = [child.fetch(numbers, columns) for child in self.children]
        return list(zip(*parts, strict=True))

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        stop = self.end if stop is None else min(stop, self.end)
        return zip(*(child.iterate(start, stop) for child in self.children), strict=True)

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        raise ConfigurationError("an item of zip comes from all of its children: contents and when cannot name one")


@functional_datapipe("concat_items")
class Concater(IndexedDataPipe):
    """One pass of each child after the other (functional: `concat`), then each one's next pass.

    Args:
        name: what a blend above calls it (needed there).
    """

    functional_name = "concat"

    def __init__(self, datapipe: IndexedDataPipe, *others: IndexedDataPipe, name: str = "") -> None:
        super().__init__(datapipe, *others)
        self._name = name
        self.check()

    def check(self) -> None:
        self._finite = [child.finite for child in self.children]
        if any(self._finite) and not all(self._finite):
            raise ConfigurationError(
                "concat takes graphs that all end or all go on for ever: add once() or limit() to the others"
            )
        # one pass; batches of a resumed run that ends are counted from where it is
        self._firsts: Int64s = np.cumsum([0, *(len(child) for child in self.children)], dtype=np.int64)
        if self._firsts[-1] < 1:
            raise ConfigurationError("nothing to concat: the graphs have no items")

    @property
    def name(self) -> str:
        return self._name or (self.children[0].name if len(self.children) == 1 else "")

    @property
    def samples_per_pass(self) -> int:
        return int(self._firsts[-1])

    @property
    def end(self) -> int:
        return self.samples_per_pass if self.finite else MAX_NUMBER

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        epoch, within = np.divmod(numbers, self.samples_per_pass)
        source = np.searchsorted(self._firsts, within, side="right") - 1
        return source, epoch * np.diff(self._firsts)[source] + within - self._firsts[source]

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        length = int(self._firsts[source + 1] - self._firsts[source])
        if length == 0:
            return np.full(numbers.size, -1, np.int64)
        epoch, within = np.divmod(numbers, length)
        fits = epoch <= (self.end - 1 - within - self._firsts[source]) // self.samples_per_pass
        found = np.where(fits, epoch, 0) * self.samples_per_pass + within + self._firsts[source]
        return np.where(fits, found, -1)

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        stop = self.end if stop is None else min(stop, self.end)
        while start < stop:
            (source,), (number,) = self.route(np.array([start], np.int64))
            epoch = start // self.samples_per_pass
            here = min(stop, epoch * self.samples_per_pass + int(self._firsts[source + 1])) - start
            yield from self.children[source].iterate(int(number), int(number) + here)
            start += here

    def source_bound(self, source: int, hi: int) -> int:
        first, stop = int(self._firsts[source]), int(self._firsts[source + 1])
        epoch, within = divmod(hi, self.samples_per_pass)
        return epoch * (stop - first) + min(max(within - first, 0), stop - first)
