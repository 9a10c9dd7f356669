"""Nodes that take too long are named, and not waited for."""

import _thread
import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ..datapipes import deadline
from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.core import IndexedDataPipe, Unpickled
from ..datapipes.deadline import as_seconds
from ..datapipes.errors import ConfigurationError, NodeTimeoutError
from ..datapipes.names import Way, node_names, ways, where_in_frames
from ..datapipes.wrapped import Wrapper
from .around import as_chosen, nodes_with_items, put_around
from .base import Adapter
from .surgery import copied, mapped

__all__ = ["CacheTimeout", "Timeout", "TimeoutWrapper"]

MOMENT = 1.0  # s that an error, which is on its way, may take


class _Helper:
    """A thread that makes calls for another one, which waits no longer than it wants to.

    Not one of the threading module: the interpreter ends without it, wherever it is.
    """

    def __init__(self) -> None:
        self._asked, self._done = _thread.allocate_lock(), _thread.allocate_lock()
        self._asked.acquire()
        self._done.acquire()
        self._function: Callable[[], Any] | None = None
        self._found: tuple[bool, Any] = (True, None)
        self.busy = False
        self.thread = _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            function = self._function
            if function is None:
                return
            try:
                self._found = (True, function())
            except BaseException as error:  # raised where it was asked for
                self._found = (False, error)
            function = self._function = None  # an iterator that it holds may end with it
            self._done.release()

    def call(self, function: "Callable[[], Any]", seconds: float) -> Any:
        """What the function gives or raises. Raises TimeoutError; then this thread is lost."""
        self._function, self.busy = function, True
        self._asked.release()
        return self.wait(seconds)

    def wait(self, seconds: float) -> Any:
        """Waits (longer) for what was asked for. Raises TimeoutError."""
        if not self._done.acquire(timeout=seconds):
            raise TimeoutError
        self.busy = False
        (well, value), self._found = self._found, (True, None)
        if well:
            return value
        raise value

    def close(self) -> None:
        """Ends the thread, once it has nothing to do; nobody waits for it."""
        if not self.busy:
            self._function = None
            self.busy = True
            self._asked.release()


class TimeoutWrapper(Wrapper):
    """Waits so long for each item of the node."""

    kind = "timeout"

    def __init__(self, seconds: float, name: str, way: Way) -> None:
        self.seconds, self.name, self._way = seconds, name, way
        self._helper = Unpickled()

    @property
    def label(self) -> str:
        return f"timeout {self.seconds:g} s"

    def _in_time(self, node: DataPipe, function: "Callable[[], Any]") -> Any:
        if deadline.in_worker():
            with deadline.noted(self.name, self.seconds):
                return function()
        helper: _Helper = self._helper.value
        if helper is None or helper.busy:  # an interrupted call is another thread's from there on
            helper = self._helper.value = _Helper()
        try:
            return helper.call(function, self.seconds)
        except TimeoutError:
            if not helper.busy:  # the node's own
                raise
            frames = sys._current_frames()
            frame = frames.get(helper.thread)
            if frame is None or frame.f_code is _Helper._run.__code__ or self._one_below_is_to_say(frame):
                try:
                    return helper.wait(MOMENT)
                except TimeoutError:
                    if not helper.busy:
                        raise
            while frame is not None and frame.f_code is _Helper.wait.__code__:  # a node below has a time of its own
                frame = frames.get(frame.f_locals["self"].thread)
            inner, stack = where_in_frames(frame, node_names(node, self._way))
            where = f" It is in node {inner}." if inner and inner != self.name else ""
            raise NodeTimeoutError(
                f"{self.name} has not given an item within {self.seconds:g} s.{where} It is here:\n{stack}"
            ) from None

    def _one_below_is_to_say(self, frame: "FrameType | None") -> bool:
        """Whether a node below has no more time, and so will say itself that it is stuck."""
        while frame is not None:
            if frame.f_code is TimeoutWrapper._in_time.__code__ and frame.f_locals["self"].seconds <= self.seconds:
                return True
            frame = frame.f_back
        return False

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        items = self._in_time(node, begin)
        end = object()
        try:
            while (item := self._in_time(node, lambda: next(items, end))) is not end:
                yield item
        finally:
            helper: _Helper = self._helper.value
            if helper is not None:
                helper.close()
                self._helper.value = None
            with contextlib.suppress(ValueError):  # where it is stuck, it cannot be closed
                if hasattr(items, "close"):
                    items.close()

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        return self._in_time(node, lambda: fetch(numbers))

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self._in_time(node, lambda: get(index))


class Timeout(Adapter):
    """A node that does not give an item in time is named, with what it is doing: NodeTimeoutError.

    Under worker processes the worker is replaced, and the item made again, once, before the error is raised. In process
    a thread makes the items, and neither shutdown nor the interpreter's end waits for it. It costs two changes of
    threads an item (some 50 µs), in workers 3 µs.

    Args:
        seconds: what one item may take, with all that is below. A first one that opens files or compiles takes longer.
        nodes: names, classes or nodes; left out, the last node: what inside it is stuck is named all the same.

    Raises GraphError for a node that has no items.
    """

    keeps_items = True

    def __init__(self, seconds: float, nodes: Any = None) -> None:
        self.seconds, self.nodes = as_seconds("seconds", seconds), as_chosen(nodes)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        names, places = node_names(datapipe), ways(datapipe)
        return put_around(
            datapipe,
            nodes_with_items(datapipe, self.nodes, "waited for"),
            lambda node: TimeoutWrapper(self.seconds, names[id(node)], places[id(node)]),
        )


class CacheTimeout(Adapter):
    """Sets how long nodes that wait for a cache, which another process fills, may wait, as torchdata's did: all that
    have a `set_timeout(seconds)`.

    Raises ValueError without a timeout.
    """

    keeps_items = True

    def __init__(self, timeout: "int | None" = None) -> None:
        if timeout is None:
            raise ConfigurationError("CacheTimeout needs its timeout, in seconds")
        self.timeout = as_seconds("timeout", timeout)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        def set_timeout(node: Any, original: DataPipe) -> "DataPipe | None":
            if not callable(getattr(type(node), "set_timeout", None)):
                return None
            made: Any = copied(node)
            made.set_timeout(self.timeout)
            return made

        return mapped(datapipe, set_timeout)
