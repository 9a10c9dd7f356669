"""A node in threads or processes of its own."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.pool import ThreadPool
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data.datapipes.iter import Filter

from ..datapipes._torch import DataPipe, IterDataPipe
from ..datapipes.combine import seeded_map
from ..datapipes.core import IndexedDataPipe, Unpickled, as_count
from ..datapipes.errors import ArgumentTypeError, GraphError, WorkerError
from ..datapipes.fetch.routes import stacked
from ..datapipes.lifeline import PassedDescriptor, end_with
from ..datapipes.names import named_nodes, node_names
from ..datapipes.notes import become_worker, deliver_notes, take_item_notes, take_notes
from ..datapipes.raised import RaisedError
from ..datapipes.wrapped import AheadWrapper, as_kind, kind_of, wrappers_of
from .around import chosen_nodes, gives_items, is_function, nodes_with_items, put_around
from .base import Adapter
from .surgery import copied

__all__ = ["Placement", "Processes", "Threads"]

TOGETHER = 1e-3  # s of work that one call should be
MOST_TOGETHER = 64


@dataclass(frozen=True)
class Threads:
    """So many threads: for what waits, or computes without the GIL."""

    count: int

    def __post_init__(self) -> None:
        as_count("Threads", self.count)

    def __str__(self) -> str:
        return f"{self.count} threads"


@dataclass(frozen=True)
class Processes:
    """So many processes: for what computes in Python. What goes there and back is pickled."""

    count: int

    def __post_init__(self) -> None:
        as_count("Processes", self.count)

    def __str__(self) -> str:
        return f"{self.count} processes"


_STARTING = threading.Lock()


class _Executor:
    """Threads or processes that run calls; `submit` gives a function that waits for the result."""

    def __init__(self, where: "Threads | Processes", name: str) -> None:
        if isinstance(where, Threads):
            pool = ThreadPool(where.count)  # its threads are daemons: the interpreter ends without those that are stuck
            self._close: Any = weakref.finalize(self, pool.terminate)
            self.submit: Callable[..., Callable[[], Any]] = lambda f, *a: pool.apply_async(f, a).get
            return
        if multiprocessing.current_process().daemon:
            raise GraphError(
                "Placement cannot start processes inside a worker process, which may have no children: Threads, or "
                "more workers, would do"
            )
        child, life = os.pipe()
        executor = ProcessPoolExecutor(
            where.count, multiprocessing.get_context("forkserver"), end_with_parent, (PassedLater(child),)
        )

        def close() -> None:
            for process in list((getattr(executor, "_processes", None) or {}).values()):
                process.kill()  # what it makes is not wanted any more
            executor.shutdown(wait=True, cancel_futures=True)
            os.close(life)
            os.close(child)

        self._close = weakref.finalize(self, close)

        def submit(function: "Callable[..., Any]", *arguments: Any) -> "Callable[[], Any]":
            with _named(name):
                future = executor.submit(_called, function, *arguments)

            def result() -> Any:
                with _named(name):
                    value, error, notes = future.result()
                deliver_notes(notes)
                if error is not None:
                    raise error.error()
                return value

            return result

        self.submit = submit

    def close(self) -> None:
        self._close()


@contextlib.contextmanager
def _named(name: str) -> "Iterator[None]":
    try:
        yield
    except BrokenExecutor as error:
        raise WorkerError(f"{name}: a process that Placement started for it has ended ({error})") from error


class PassedLater:
    """A descriptor that is passed when a process is started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return PassedDescriptor(self._number).__reduce__()


def end_with_parent(life: Any) -> None:
    """The first thing in a process of Placement's."""
    import torch

    end_with(life.number, shared=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the main process's
    become_worker()
    torch.set_num_threads(1)


class PlacementWrapper(AheadWrapper):
    """Lets others make the node's items, in order."""

    kind = "placement"

    def __init__(self, where: "Threads | Processes", name: str) -> None:
        super().__init__()
        self.where, self.name = where, name
        self._executor = Unpickled()

    @property
    def label(self) -> str:
        return f"in {self.where}"

    def exact(self) -> "PlacementWrapper":
        return self

    def _submit(self) -> "Callable[..., Callable[[], Any]]":
        executor = self._executor.value
        if executor is None:
            with (
                _STARTING
            ):  # threads of a placement above begin at once: of two pools one would be dropped with its calls
                executor = self._executor.value
                if executor is None:
                    executor = self._executor.value = _Executor(self.where, self.name)
        return executor.submit

    # Indexed: stretches of numbers ----------------------------------------------------------------------------

    def iterate(
        self, node: IndexedDataPipe, begin: "Callable[[int], Iterator[Any]]", start: int, stop: "int | None"
    ) -> "Iterator[Any]":
        end = node.end if stop is None else min(stop, node.end)
        submit = self._submit()
        make = partial(_made_here, begin) if isinstance(self.where, Threads) else partial(_made_there, _bytes_of(node))
        waiting: deque[tuple[int, Any]] = deque()
        together = 1
        while start < end or waiting:
            while start < end and len(waiting) < 2 * self.where.count:
                upto = min(start + together, end)
                waiting.append((upto - start, submit(make, start, upto)))
                start = upto
            count, result = waiting.popleft()
            seconds, items, error = result()
            together = max(1, min(MOST_TOGETHER, int(TOGETHER * count / max(seconds, 1e-9))))
            yield from items
            if error is not None:
                raise error.error() if isinstance(error, RaisedError) else error

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        numbers = np.asarray(numbers)
        if numbers.size < 2:
            return fetch(numbers)
        submit = self._submit()
        make = fetch if isinstance(self.where, Threads) else partial(_fetched_there, _bytes_of(node))
        parts = [submit(make, part) for part in np.array_split(numbers, min(self.where.count, numbers.size))]
        return stacked([item for part in parts for item in part()])

    # Streams: a function of each item -------------------------------------------------------------------------

    def stream(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        submit, chooses = self._submit(), isinstance(node, Filter)
        single: Any = node
        apply = single._returnIfTrue if chooses else single._apply_fn
        if isinstance(self.where, Processes):
            apply = partial(_applied_there, _bytes_of(node))
        waiting: deque[tuple[Any, Any]] = deque()
        self.delivered = self.places()

        def taken() -> "Iterator[Any]":
            places, result = waiting.popleft()
            value = result()
            if chooses:
                keep, value = value
                if not keep:
                    return
            self.delivered = places
            yield value

        source, broken, end = iter(single.datapipe), None, object()
        while True:
            try:
                item = next(source, end)
            except Exception as error:  # after the items that came before it
                broken = error
                break
            if item is end:
                break
            waiting.append((self.places(), submit(apply, item)))
            if len(waiting) >= 2 * self.where.count:
                yield from taken()
        while waiting:
            yield from taken()
        if broken is not None:
            raise broken


Made = tuple[float, list[Any], "Exception | RaisedError | None"]
"""(seconds, items, what was raised instead of the next one)."""


def _made_here(begin: "Callable[[int], Iterator[Any]]", start: int, stop: int) -> Made:
    began, items, raised = perf_counter(), [], None
    try:
        for item in islice(begin(start), stop - start):
            items.append(item)
    except Exception as error:
        raised = error
    return perf_counter() - began, items, raised


# In a process of its own ------------------------------------------------------------------------------------

THERE = "in a process of Placement's"


def _bytes_of(node: Any) -> bytes:
    """A node as its process has it: of a stream's, without its input, but with what is around its function."""
    if isinstance(node, IndexedDataPipe):
        return pickle.dumps(plain(node))
    inner: Any = object.__new__(kind_of(node))
    vars(inner).update({name: value for name, value in vars(node).items() if not isinstance(value, IterDataPipe)})
    vars(inner)["_wrappers"] = tuple(w for w in wrappers_of(node) if not isinstance(w, AheadWrapper))
    return pickle.dumps(vars(inner) | {"": kind_of(node)})


def plain(node: Any) -> Any:
    """The node without what is around it."""
    bare = copied(node)
    vars(bare).pop("_wrappers", None)
    bare.__class__ = kind_of(bare)
    return bare


_node: "tuple[bytes, Any]" = (b"", None)


def _there(data: bytes) -> Any:
    global _node
    if _node[0] != data:
        found = pickle.loads(data)  # from the process that started this one
        if isinstance(found, dict):
            kind = found.pop("")
            made = object.__new__(kind)
            vars(made).update(found)
            as_kind(made, kind)
            found = made
        _node = data, found
    return _node[1]


def _called(function: "Callable[..., Any]", *arguments: Any) -> "tuple[Any, RaisedError | None, list[Any]]":
    """(what the function gives, or what it raises, what was noted meanwhile)."""
    value, raised = None, None
    try:
        value = function(*arguments)
    except Exception as error:
        raised = RaisedError.of(error, THERE)
    return value, raised, [*take_notes(last=True), *take_item_notes()]


def _made_there(data: bytes, start: int, stop: int) -> Made:
    seconds, items, error = _made_here(lambda at: _there(data).iterate(at, stop), start, stop)
    return seconds, items, RaisedError.of(error, THERE) if isinstance(error, Exception) else None


def _fetched_there(data: bytes, numbers: Any) -> "list[Any]":
    return list(_there(data).fetch(numbers))


def _applied_there(data: bytes, item: Any) -> Any:
    node = _there(data)
    return node._returnIfTrue(item) if isinstance(node, Filter) else node._apply_fn(item)


class Placement(Adapter):
    """Runs a node in threads or processes of its own; the order of its items stays.

    Of an indexed graph the node makes its items there, with all that is below; of a stream it has to be a function of
    each item (torch's map, collate, filter), to which its input is brought. They live as long as the graph.

    Args:
        nodes: {name, class or node: Threads(n) or Processes(n)}.

    Raises GraphError for a node that cannot be placed, with the reason. In a worker process there can be no Processes.
    """

    keeps_items = True

    def __init__(self, nodes: "Mapping[Any, Threads | Processes]") -> None:
        if not isinstance(nodes, Mapping) or not nodes:
            raise ArgumentTypeError(f"Placement takes {{node: Threads(n) or Processes(n)}}, got {nodes!r:.80}")
        for node, where in nodes.items():
            if not isinstance(where, (Threads, Processes)):
                raise ArgumentTypeError(f"{node!r} can be placed in Threads(n) or Processes(n), got {where!r:.80}")
        self.nodes = dict(nodes)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        where: dict[int, Threads | Processes] = {}
        for wanted, place in self.nodes.items():
            if isinstance(datapipe, IndexedDataPipe):
                chosen = nodes_with_items(datapipe, (wanted,), "placed")
            else:
                chosen = chosen_nodes(datapipe, (wanted,))
            where |= {id(node): place for node in chosen}
        names = node_names(datapipe)
        nodes = [node for node, _ in named_nodes(datapipe) if id(node) in where]
        for node in nodes:
            if why := _cannot_be_placed(node, names):
                raise GraphError(f"{names[id(node)]} cannot run in {where[id(node)]}: {why}")
        # innermost: what else is around the node, put on before or after, sees its items
        return put_around(datapipe, nodes, lambda node: PlacementWrapper(where[id(node)], names[id(node)]), True)


def _cannot_be_placed(node: DataPipe, names: "dict[int, str]") -> str:
    if isinstance(node, IndexedDataPipe):
        if not gives_items(node):
            return "it gives no items of its own"
        seeded = seeded_map(node)
        if seeded is not None:
            return f"{names[id(seeded)]} seeds the process's random generators; map(fn, seeded=False) would do"
        return ""
    if not isinstance(node, IterDataPipe) or not is_function(node):
        return "it is no function of each of its items; Prefetch lets one thread run it, and what is below"
    for wrapper in wrappers_of(node):
        if isinstance(wrapper, AheadWrapper):  # it would not be asked
            return f"it is around the node itself, inside of {wrapper.label}: Placement put on before that would do"
    return ""
