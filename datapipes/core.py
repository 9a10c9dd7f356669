"""The contract of every indexed node, and the one `fetch` that all of them share.

An indexed node answers "which item is number k?" without hidden state. A graph of them is a function
from numbers to items that can be entered anywhere, asked both ways, and evaluated by any process:

    batch numbers ──route──▶ sample numbers ──route──▶ … ──▶ places in token files ──one gather──▶ rows

Nodes that only re-order say which of their children's numbers each of theirs is (`route`) and back
(`unroute`). Nodes that make items (a slice of tokens, a mapped sample, a collated batch) override
`fetch`. Everything else is written once, here and in `fetch/routes.py`.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ._torch import MapDataPipe
from .arguments import Given, constructor_of, kept_arguments
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError
from .fluent import ALIASES, FluentMethods

if TYPE_CHECKING:
    from .steps import StepTable
    from .topology import Topology

__all__ = ["MAX_NUMBER", "IndexedDataPipe", "Int64s", "as_count", "as_numbers", "nodes_of", "sample_node"]

Int64s = npt.NDArray[np.int64]

Node = TypeVar("Node", bound="IndexedDataPipe")

MAX_NUMBER = 2**63 - 1
"""`end` of a node without a limit: its numbers are 0 … 2**63 - 2."""

ROUTE_AHEAD = 256
"""How many items are routed in one go, at most: it shares out the fixed cost of a block (some 70 µs)."""


FEW = 16
"""So many items are not worth a first one that comes sooner."""


def as_count(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int of at least `minimum`. Raises ArgumentTypeError, ConfigurationError."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if not minimum <= value < MAX_NUMBER:
        raise ConfigurationError(f"{name} must be at least {minimum} and below 2**63 - 1, got {value}")
    return int(value)


def as_numbers(numbers: Any) -> Int64s:
    """Numbers as a contiguous int64 array (n,). Raises ArgumentTypeError, OutOfRangeError."""
    given = numbers
    if not isinstance(numbers, np.ndarray):
        numbers = list(numbers) if isinstance(numbers, Iterable) else [None]
        if any(isinstance(n, (bool, np.bool_)) or not isinstance(n, (int, np.integer)) for n in numbers):
            raise ArgumentTypeError(f"numbers must be a list or array of integers, got {given!r:.80}")
        if any(not -MAX_NUMBER <= n < MAX_NUMBER for n in numbers):
            raise OutOfRangeError(f"numbers go up to 2**63 - 2, got {max(numbers, key=abs)}")
        return np.array([int(n) for n in numbers], np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ArgumentTypeError(f"numbers must be integers (n,), got dtype {numbers.dtype}, shape {numbers.shape}")
    if numbers.dtype.kind == "u" and numbers.size and numbers.max() >= MAX_NUMBER:
        raise OutOfRangeError(f"numbers go up to 2**63 - 2, got {numbers.max()}")
    return np.ascontiguousarray(numbers, dtype=np.int64)


def in_blocks(
    make: "Callable[[Int64s], Iterable[Any]]", start: int, stop: int, ahead: int = ROUTE_AHEAD
) -> Iterator[Any]:
    """The items that `make` gives for the numbers from `start` to `stop`, asked for in growing blocks; a few, at once.

    A block that fails is asked for again one by one: so an error comes at its own item, wherever one began.
    """
    block = stop - start if stop - start <= FEW else 1
    while start < stop:
        numbers = np.arange(start, min(start + block, stop), dtype=np.int64)
        try:
            items = iter(make(numbers))
            first = next(items)
        except Exception:
            if numbers.size == 1:
                raise
            block = 1
            continue
        yield first
        yield from items
        start += block
        block = min(block * 4, ahead)


class Unpickled:
    """A box for what must stay in this process (maps, plans, locks): pickled or forked, it arrives empty."""

    def __init__(self) -> None:
        self._value: Any = None
        self._pid = 0

    @property
    def value(self) -> Any:
        return self._value if self._pid == os.getpid() else None

    @value.setter
    def value(self, value: Any) -> None:
        self._value, self._pid = value, os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())

    def __deepcopy__(self, memo: Any) -> "Unpickled":
        return type(self)()


class IndexedDataPipe(MapDataPipe, FluentMethods):  # type: ignore[misc]  # our map, zip, … replace torch's
    """A node whose items are a pure function of their number.

    A subclass is immutable once built. It sets `children` (its inputs), `samples_per_pass`, and either

    - re-orders: `route`, `unroute`, `source_bound`; or
    - makes items: `fetch` (or is a TokenWindows, whose rows one gather copies).

    `settings` are the arguments that decide the order; they are part of the fingerprint.
    """

    functional_name: str = ""
    trunk: bool = False
    """Whether the node may stand between the order and the batches without changing the order: skip, limit,
    once, map, shard, batch, collate. Such a node has one child."""
    decides_order: bool = True
    """Whether the node is part of the order's fingerprint: not a reader (its contents are), nor a map (it
    decides items, not places)."""
    in_order: bool = True
    """Whether the numbers [0, n) of the node use [0, m) of each child, for some m: false for permutes."""

    _given: "Given | None"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = constructor_of(cls)  # type: ignore[attr-defined]  # which help() shows, not __new__'s

    def __new__(cls, *args: Any, **kwargs: Any) -> "IndexedDataPipe":
        node = super().__new__(cls)
        node._given = kept_arguments(args, kwargs)  # here, so that no node has to think of its recipe
        return node

    def __init__(self, *children: "IndexedDataPipe") -> None:
        self.children: tuple[IndexedDataPipe, ...] = self._as_children(children)
        self._plan = Unpickled()

    def _as_children(self, children: "tuple[IndexedDataPipe, ...]") -> "tuple[IndexedDataPipe, ...]":
        for child in children:
            if not isinstance(child, IndexedDataPipe):
                raise ArgumentTypeError(
                    f"{type(self).__name__} takes indexed nodes, got {type(child).__name__}: a stream has no "
                    "numbers; start from TokenReader, or keep the whole graph a stream"
                )
        return children

    # What a subclass says -----------------------------------------------------------------------------

    @property
    def datapipe(self) -> "IndexedDataPipe":
        """The only child of a node that has one."""
        return self.children[0]

    @property
    def name(self) -> str:
        """What the tokens below are called; a node with several children has no name unless given one."""
        return self.datapipe.name if len(self.children) == 1 else ""

    @property
    def settings(self) -> dict[str, Any]:
        """JSON-able arguments that decide the order of the items."""
        return {}

    @property
    def order_settings(self) -> dict[str, Any]:
        """Those of the settings that decide the order, where the node stands below the run's own trunk."""
        return self.settings

    @property
    def content(self) -> str:
        """32 hex digits of what a node without children reads."""
        raise NotImplementedError(f"{type(self).__name__} reads no files: give it children, or a content property")

    @property
    def weighted(self) -> bool:
        """Whether a pass of the node, or of one below, leaves out samples or repeats some."""
        return any(child.weighted for child in self.children)

    @property
    def notes(self) -> str:
        """What the printed tree says beside the node."""
        return ""

    @property
    def samples_per_pass(self) -> int:
        """How many numbers one nominal pass has (before any finite `end` cuts it)."""
        return self.datapipe.samples_per_pass

    @property
    def end(self) -> int:
        """How many numbers exist: 2**63 - 1 unless a limit below says less."""
        return self.datapipe.end

    @property
    def finite(self) -> bool:
        """Whether a `limit`, `once` or `reorder` below ends the numbers."""
        return any(child.finite for child in self.children)

    @property
    def tail(self) -> str:
        """What becomes of an incomplete last step: "drop", "pad" or "uneven" (see `once`)."""
        return self.datapipe.tail if len(self.children) == 1 else "drop"

    @property
    def first_sample(self) -> int:
        """The sample number of the run's item 0: what a resume skip below has left out."""
        return self.datapipe.first_sample if self.trunk else 0

    @property
    def last_sample(self) -> int:
        """The sample number at which the run ends: 2**63 − 1 if it does not."""
        return self.datapipe.last_sample if self.trunk else self.end

    @property
    def skipped_items(self) -> int:
        """How many items of this node a resume skip below has left out."""
        return self.datapipe.skipped_items if self.trunk else 0

    @property
    def topology(self) -> "Topology | None":
        """The place that a sharder below deals to, if there is one."""
        return self.datapipe.topology if self.trunk else None

    @property
    def steps(self) -> "StepTable | None":
        """The steps that a batcher below makes, if there is one."""
        return self.datapipe.steps if self.trunk else None

    def sample_numbers(self, numbers: Int64s) -> Int64s:
        """(n,) of our numbers → (n,) their places in the run's global order (of a batch, its first row's)."""
        return self.datapipe.sample_numbers(numbers) if self.trunk else numbers

    def masked(self, samples: Int64s) -> "np.ndarray | None":
        """bool (n,): which of these sample numbers of the run have every label masked; None: none has."""
        return self.datapipe.masked(samples) if self.trunk else None

    @property
    def sequence_length(self) -> int:
        """Tokens a row (S); a row also carries the label token after them."""
        lengths = {child.sequence_length for child in self.children}
        if len(lengths) != 1:
            what = f"several: {sorted(lengths)}" if lengths else "none: slice_sequences(S) above the reader gives one"
            raise ConfigurationError(f"{type(self).__name__} has no single sequence_length, but {what}")
        return lengths.pop()

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) numbers → ((n,) indices of children, (n,) the children's numbers)."""
        return np.zeros(numbers.size, np.int64), numbers

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        """The inverse of `route` for one child: (n,) its numbers → (n,) ours, −1 where never delivered."""
        return np.where(numbers < self.end, numbers, -1)

    def places(self, source: int, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """All of our numbers that route to the child's `numbers`: (index into numbers, our number).

        Only an order from a file can deliver one number twice; elsewhere this is `unroute`.
        """
        found = self.unroute(source, numbers)
        which = np.flatnonzero(found >= 0)
        return which, found[which]

    def source_bound(self, source: int, hi: int) -> int:
        """The smallest b such that our numbers [0, hi) touch only [0, b) of the child."""
        return hi

    def source_floor(self, source: int, lo: int) -> int:
        """A number below which our numbers from `lo` on touch nothing of the child."""
        return self.source_bound(source, lo) if self.in_order else 0

    def source_stretches(self, source: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """Stretches of the child that hold all that our numbers [lo, hi) touch of it."""
        return [(self.source_floor(source, lo), self.source_bound(source, hi))]

    def with_children(self: Node, *children: "IndexedDataPipe") -> Node:
        """The same node over other children; the node itself is unchanged."""
        copy = self.changed(children=self._as_children(children))
        copy.check()
        return copy

    def changed(self: Node, **attributes: Any) -> Node:
        """A copy with these attributes and no plan yet, unchecked."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, _plan=Unpickled(), **attributes)
        if "_given" not in attributes and any(n != "children" and not n.startswith("_") for n in attributes):
            copy._given = None  # it is not any more what was built, so no recipe can say what it is
        return copy

    def check(self) -> None:
        """Raises where the node does not fit its children; runs after each rewrite of the graph."""

    # What every node then has -------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.end if self.finite else min(self.samples_per_pass, self.end)

    def __bool__(self) -> bool:
        return True  # a node is one, also where its pass is shorter than the ranks are many

    def __getitem__(self, index: int) -> Any:
        n = len(self)
        if isinstance(index, (bool, np.bool_)) or not isinstance(index, (int, np.integer)):
            raise ArgumentTypeError(f"an index must be an integer, got {index!r} ({type(index).__name__})")
        if not -n <= index < n:
            raise OutOfRangeError(
                f"index {index} is out of range for {type(self).__name__} of length {n}; "
                "fetch() takes any number below end"
            )
        return self.fetch(np.array([index % n], np.int64))[0]

    def __iter__(self) -> Iterator[Any]:
        """One pass: the items 0 … len − 1."""
        return self.iterate(0, len(self))

    def fetch(self, numbers: Any, columns: "Sequence[tuple[int, int]] | None" = None) -> Any:
        """The items of these numbers, at once.

        Args:
            numbers: int64 (n,), each below `end`, in any order.
            columns: only these [start, stop) ranges of each row's sequence_length + 1 tokens, end to end.

        Returns: where the items are rows of tokens, an int64 array (n, L); else a list of n items.
        Raises: OutOfRangeError for a number that does not exist.
        """
        from .fetch.routes import fetch_items

        return fetch_items(self, self.checked(numbers), columns)

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        """The items from number `start` on, up to `stop` (default: `end`), routed in blocks ahead."""
        from .fetch.routes import plan_of

        stop = self.end if stop is None else min(stop, self.end)
        ahead = ROUTE_AHEAD if plan_of(self).gather is not None else 1  # items that are made are made one by one
        return in_blocks(self.fetch, start, stop, ahead)

    def checked(self, numbers: Any) -> Int64s:
        """`numbers` as int64 (n,), each of which exists. Raises ArgumentTypeError, OutOfRangeError."""
        array = as_numbers(numbers)
        if array.size and not (array.min() >= 0 and array.max() < self.end):
            wrong = int(array.min()) if array.min() < 0 else int(array.max())
            raise OutOfRangeError(f"number {wrong} does not exist in {type(self).__name__}: end is {self.end}")
        return array

    def tree(self) -> str:
        """The graph as text, a node a line, from the batches down to the files, with counts; see `tree`."""
        from .tree import tree

        return tree(self)

    def fingerprint(self) -> str:
        """32 hex digits of what decides the order: the graph below the sharder, files by content.

        No part of it: paths, adapters, limits and skips of the run, dtypes, topology, batch size.
        Reads 64 blocks of 4 KiB a file, once. Raises TokenFileError.
        """
        from .fingerprint import order_fingerprint

        return order_fingerprint(self)

    def recipe(self, folder: "str | os.PathLike[str] | None" = None) -> str:
        """The graph as YAML from which `load_recipe` builds it again; see write_recipe."""
        from .recipes import write_recipe

        return write_recipe(self, folder)

    # torch's own names, which must not lead out of the indexed world ------------------------------------

    def __getattr__(self, attribute: str) -> Any:
        function = MapDataPipe.functions.get(ALIASES.get(attribute, attribute))
        if function is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        node = function.args[0] if isinstance(function, functools.partial) else None
        if not (isinstance(node, type) and issubclass(node, IndexedDataPipe)):
            raise AttributeError(
                f"{type(self).__name__}.{attribute}: torch's node would lose the numbers (state, resume, "
                "contents); an indexed graph has no such step"
            )
        return functools.partial(function, self)

    def __repr__(self) -> str:
        text = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{type(self).__name__}({text})"


def nodes_of(graph: IndexedDataPipe) -> Iterator[IndexedDataPipe]:
    """Every node of a graph once, before what is below it."""
    waiting, seen = [graph], set()
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(node.children)


def sample_node(graph: IndexedDataPipe) -> IndexedDataPipe:
    """The topmost node whose items are the run's samples, in its global order: below sharder and batcher.

    Its item 0 is sample number `first_sample`.
    """
    while graph.topology is not None or graph.steps is not None:
        graph = graph.datapipe
    return graph
