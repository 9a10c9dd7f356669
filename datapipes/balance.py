"""One rank's part of the order, dealt so that all ranks have the same work in each step.

What attention costs grows with the square of a document's length, so rows of equal length differ: one of a single
document of 8192 tokens costs sixteen times one of sixteen. Which samples a step takes stays as it is, and so do the
samples of each micro-batch of all ranks; only which of the ranks takes which of them is chosen here.

    unit       dp · micro_batch_size consecutive samples: every rank takes micro_batch_size of them, so what is
               delivered after each micro-batch is a prefix of the order, as with shard_ranks
    window     the units of global_batch_size consecutive samples: a step; its costs are evened out together

    sample     0   1   2   3 │ 4   5   6   7 │              dp = 2, micro-batch 2, global batch 8
    cost       9   1   1   2 │ 2   8   3   2 │
    rank       0   1   0   1 │ 1   1   0   0 │              the costliest of a unit first, each to the rank that has
    so far          10 : 3   │      15 : 13  │              the least in this window and has room in this unit

(Greedy by descending cost: Graham 1969.) Integers only, and nothing but the sample numbers, the files' document ends
and the sizes decides: so every rank finds the same deal without asking the others. Units and windows are counted in
sample numbers from 0 (from the remainder of a resume's first sample by a unit, where a run goes on in the middle of
one), so a resume at any unit deals as the unbroken run. With a global batch size that changes, windows are not steps
any more: the steps are then less even, and just as right.
"""

from typing import Any

import numpy as np

from ._torch import functional_datapipe
from .combine import Mapper
from .core import MAX_NUMBER, IndexedDataPipe, Int64s, Unpickled, as_count, nodes_of
from .document_ends import find_ends, no_document_ends
from .errors import BatchSizeError, ConfigurationError
from .fetch.routes import Routes, makes_items, plan_of
from .fingerprint import order_of
from .kernels import kernel
from .read import TokenSpace
from .shard import RankSharder
from .slice import TokenWindows
from .steps import nearest_multiples
from .topology import Topology

__all__ = ["RankBalancer"]

KEPT = 1 << 20
"""Samples whose deal is kept, about: 8 bytes each."""

COSTS = ("attention",)


@functional_datapipe("balance_ranks")
class RankBalancer(RankSharder):
    """Deals the samples of each step so that the ranks' costs are even (functional: `balance_ranks`).

    In the place of `shard_ranks`. A sample's cost is Σ over its documents of (their tokens among its S inputs)², from
    the files' document ends; no token is read for it.

    Args:
        topology: this process's place; its dp rank and size count here.
        micro_batch_size: that of `batch_samples` above, or one that divides it.
        global_batch_size: samples of a step over all ranks.
        cost: "attention".

    Raises BatchSizeError where dp_size × micro_batch_size does not divide global_batch_size, ConfigurationError for
    rows that are not cut from token files, or files that store no document ends.
    """

    functional_name = "balance_ranks"

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        topology: Topology,
        micro_batch_size: int,
        global_batch_size: int,
        cost: str = "attention",
    ) -> None:
        self.micro_batch_size = as_count("micro_batch_size", micro_batch_size)
        self.global_batch_size = as_count("global_batch_size", global_batch_size)
        if cost not in COSTS:
            raise ConfigurationError(f"cost is {cost!r}; {' or '.join(map(repr, COSTS))} would do")
        self.cost = cost
        self._windows = Unpickled()
        super().__init__(datapipe, topology)

    def check(self) -> None:
        super().check()
        self._windows = Unpickled()
        self._unit = self._topology.dp_size * self.micro_batch_size
        if self.global_batch_size % self._unit:
            raise BatchSizeError(
                f"global_batch_size {self.global_batch_size} is not divisible by dp_size × micro-batch = {self._unit}; "
                f"{nearest_multiples(self.global_batch_size, self._unit)} would do"
            )
        for node in nodes_of(self.datapipe):
            if makes_items(node) and not isinstance(node, (TokenWindows, TokenSpace)):
                what = "map_items" if isinstance(node, Mapper) else node.functional_name or type(node).__name__
                raise ConfigurationError(
                    f"balance_ranks takes rows that are cut from token files, whose documents are known; {what} below "
                    "it makes others: put it after batch_samples, or deal with shard_ranks"
                )
            if isinstance(node, TokenSpace):
                find_ends(node.files)
                for file in node.files:
                    if not file.documents:
                        raise no_document_ends(file.path, "they say what its rows cost (shard_ranks needs none)")

    def check_batches(self, micro_batch_size: int) -> None:
        if micro_batch_size % self.micro_batch_size:
            raise BatchSizeError(
                f"balance_ranks deals micro-batches of {self.micro_batch_size} to each rank, and those above are of "
                f"{micro_batch_size}; batch_samples({self.micro_batch_size}) would do, or "
                f"balance_ranks(micro_batch_size={micro_batch_size})"
            )

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.global_batch_size}
        return {"topology": str(self._topology), **sizes, "cost": self.cost}

    @property
    def order_settings(self) -> dict[str, Any]:
        settings = self.settings
        del settings["topology"]
        return {"dp_size": self._topology.dp_size, **settings}

    @property
    def strided(self) -> bool:
        return False

    @property
    def end(self) -> int:
        whole, rest = divmod(self.datapipe.end, self._unit)
        begin = whole * self.micro_batch_size
        if not rest or self.tail == "drop" or not self.finite:
            return begin + rest // self._topology.dp_size
        deals = self._deals()
        if deals.end is None:
            numbers = np.arange(begin, begin + self.micro_batch_size, dtype=np.int64)
            deals.end = begin + int((self.route(numbers)[1] < self.datapipe.end).sum())
        return deals.end

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        first = self.first_sample
        unit, row = np.divmod(numbers, self.micro_batch_size)
        start = first + unit * self._unit
        window = self._window_of(start)
        place = self._topology.place_of_row((start - window) // self._unit, row, self.micro_batch_size)
        return np.zeros(numbers.size, np.int64), self._deals().looked_up(window, place, 0) + (window - first)

    def dealt(self, samples: Int64s, base: "Int64s | int") -> tuple[Int64s, Int64s]:
        unit = (samples - base) // self._unit
        window = self._window_of(base + unit * self._unit)
        place = self._deals().looked_up(window, samples - window, 1)
        rank, row = self._topology.row_of_place(place, self.micro_batch_size)
        return rank, unit * self.micro_batch_size + row

    def source_bound(self, source: int, hi: int) -> int:
        return min(-(-hi // self.micro_batch_size) * self._unit, self.datapipe.end, MAX_NUMBER)

    def _window_of(self, start: Int64s) -> Int64s:
        """(n,) first samples of units → (n,) first samples of their windows."""
        return start - (start - start % self._unit) % self.global_batch_size

    def _deals(self) -> "_Deals":
        if self._windows.value is None:
            below = self.datapipe
            stop = min(below.first_sample + below.end, MAX_NUMBER)
            self._windows.value = _Deals(
                plan_of(order_of(below)), stop, self.global_batch_size, self._topology.dp_size, self.micro_batch_size,
                below.finite and below.tail != "drop",
            )  # fmt: skip
        return self._windows.value


class _Deals:
    """Who takes which sample, window by window; the last ones are kept.

    Args:
        stop: the first sample number that does not exist. every: whether rows that do not make a whole round are dealt.
    """

    def __init__(self, plan: Routes, stop: int, size: int, ranks: int, rows: int, every: bool) -> None:
        self._plan, self._stop, self._size, self._ranks, self._rows = plan, stop, size, ranks, rows
        self._every = every
        assert plan.gather is not None  # check() saw that all rows are windows
        self._documents = plan.gather.documents
        self._there = np.array([bool(leaf.children) for leaf in plan.leaves])  # dropped sources may be gone
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.end: int | None = None

    def looked_up(self, window: Int64s, index: Int64s, which: int) -> Int64s:
        """(n,) first samples of windows, (n,) indices → (n,) what stands there in table 0, [unit, rank, row] → sample
        of the window, or 1, its inverse.
        """
        out = np.empty(window.size, np.int64)
        order = np.argsort(window, kind="stable")
        begins = np.flatnonzero(np.diff(window[order], prepend=-1))
        firsts = window[order[begins]].tolist()
        cuts, kept, at_once = [*begins.tolist(), window.size], self._kept, max(1, KEPT // self._size)
        for k, first in enumerate(firsts):
            if k % at_once == 0:
                kept = self._dealt(firsts[k : k + at_once])
            at = order[cuts[k] : cuts[k + 1]]
            out[at] = kept[first][which][index[at]]
        return out

    def _dealt(self, windows: "list[int]") -> "dict[int, tuple[np.ndarray, np.ndarray]]":
        """Both tables of these windows, and perhaps of others; the oldest are forgotten."""
        kept = dict(self._kept)  # other threads look things up in it
        if new := [first for first in windows if first not in kept]:
            deal, _ = kernel("deal_evenly")
            counts = [max(0, min(self._size, self._stop - first)) for first in new]
            spans = list(zip(new, counts, strict=True))
            costs = self._costs(np.concatenate([np.arange(first, first + count) for first, count in spans]))
            at = 0
            for first, count in spans:
                table, inverse = np.empty(self._size, np.int64), np.empty(self._size, np.int32)
                stop = at + count if self._every else at + count - count % self._ranks
                deal(costs[at:stop], self._ranks, self._rows, table)
                inverse[table] = np.arange(self._size, dtype=np.int32)
                kept[first] = table.astype(np.int32), inverse
                at += count
            asked = {first: kept.pop(first) for first in windows}
            over = len(kept) + len(asked) - max(1, KEPT // self._size)
            for first in list(kept)[: max(0, over)]:
                del kept[first]
            self._kept = kept = kept | asked
        return kept

    def _costs(self, samples: Int64s) -> Int64s:
        """(n,) sample numbers → (n,) what they cost; of a source that is gone, as rows of one document."""
        places = np.full(samples.size, -1, np.int64)
        there: Any = slice(None) if self._there.all() else self._there[self._plan.resolve(samples)[0]]
        places[there] = self._plan.starts(samples[there])[1]
        return self._documents.cost(places, self._plan.width)
