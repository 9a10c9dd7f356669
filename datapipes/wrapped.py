"""A node with something around it: what an adapter puts on to measure, guard or hand over its items.

The graph keeps its shape, and the node its class, name, settings and state: it becomes an instance of a subclass of its
own class, made here, whose items pass through the node's *wrappers*, the innermost first:

    iter(map) = timeout.stream(map, begin = lambda: profile.stream(map, begin = lambda: Mapper.__iter__(map)))

An indexed node that re-orders has no items of its own, only numbers: it is entered by `route`, and a wrapper that wants
items is put around the next node above that makes some.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ._torch import DataPipe, IterDataPipe, MapDataPipe
from .core import IndexedDataPipe, Unpickled

__all__ = [
    "AheadWrapper",
    "Wrapper",
    "as_kind",
    "kind_of",
    "split_for_main_process",
    "through",
    "with_wrapper",
    "without_wrapper",
    "wrappers_of",
]


class Wrapper:
    """Something around a node: a subclass overrides what it needs to see. One is made for each node, and pickles.

    `kind` is the adapter's word for it ("profile"); `label` what trees and drawings show.
    """

    kind: str = ""
    in_main_process: bool = False
    """Whether it belongs to the process of the training loop, where workers make the items."""

    @property
    def label(self) -> str:
        return self.kind

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        """The items of an iteration; `begin()` begins the node's own."""
        return begin()

    def stream(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        """The same where the node is one of a stream."""
        return self.items(node, begin)

    def apply(self, node: DataPipe, function: "Callable[[Any], Any]", item: Any) -> Any:
        """One call of a stream's node that is a function of each item (torch's map, collate, filter)."""
        return function(item)

    def iterate(
        self, node: IndexedDataPipe, begin: "Callable[[int], Iterator[Any]]", start: int, stop: "int | None"
    ) -> "Iterator[Any]":
        """The items of an indexed node from number `start` up to `stop`; `begin(n)` begins the node's own at n."""
        return self.items(node, partial(begin, start))

    def fetch(self, node: IndexedDataPipe, fetch: "Callable[[Any], Any]", numbers: Any) -> Any:
        """The items of some numbers of an indexed node."""
        return fetch(numbers)

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        """One item of a map-style node of torch's."""
        return get(index)

    def numbers(self, node: IndexedDataPipe, function: "Callable[..., Any]", *arguments: Any) -> Any:
        """A call that an indexed node answers by numbers (`BY_NUMBERS`: the function's __name__)."""
        return function(*arguments)


class AheadWrapper(Wrapper):
    """One that takes items from its node before they are asked for.

    Of a stream it then knows the places of the nodes below, as they were when the item handed out last was made: what
    keeps the stream's place says how they are read (`read_places`), and reads `delivered`.
    """

    @property
    def takes_ahead(self) -> bool:
        """Whether it does, as it was made."""
        return True

    def __init__(self) -> None:
        self._of_this_process = Unpickled()

    def read_places(self, places: "Callable[[], Any] | None") -> None:
        self._of_this_process.value = [places, None if places is None else places()]

    def places(self) -> Any:
        """The places now."""
        found = self._of_this_process.value
        return None if found is None or found[0] is None else found[0]()

    @property
    def delivered(self) -> Any:
        """The places after the item handed out last."""
        found = self._of_this_process.value
        return None if found is None else found[1]

    @delivered.setter
    def delivered(self, places: Any) -> None:
        if self._of_this_process.value is not None:
            self._of_this_process.value[1] = places

    def exact(self) -> "Wrapper | None":
        """What stands for this one where nothing may be taken ahead; None: nothing."""
        raise NotImplementedError


def wrappers_of(node: DataPipe) -> "tuple[Wrapper, ...]":
    """What is around a node, the innermost first."""
    return vars(node).get("_wrappers", ())


def kind_of(node: DataPipe) -> type:
    """The class that a node was built as."""
    return vars(type(node)).get("_unwrapped", type(node))


def with_wrapper(node: DataPipe, wrapper: Wrapper, innermost: bool = False) -> DataPipe:
    """The same node, which the caller owns, with one more around it."""
    around = wrappers_of(node)
    vars(node)["_wrappers"] = (wrapper, *around) if innermost else (*around, wrapper)
    node.__class__ = _wrapped_class(kind_of(node))
    return node


def without_wrapper(node: DataPipe, unwanted: "Callable[[Wrapper], bool]") -> DataPipe:
    """The same node, which the caller owns, without the wrappers of which `unwanted` is true."""
    kept = tuple(wrapper for wrapper in wrappers_of(node) if not unwanted(wrapper))
    if kept:
        vars(node)["_wrappers"] = kept
    elif vars(node).pop("_wrappers", None):
        node.__class__ = kind_of(node)
    return node


def as_kind(node: DataPipe, kind: type) -> None:
    """Makes a node one of another class, which goes by the same attributes; what is around it stays."""
    node.__class__ = _wrapped_class(kind) if wrappers_of(node) else kind


def split_for_main_process(node: Any) -> "tuple[DataPipe, tuple[Wrapper, ...]]":
    """(the graph that workers run, what is around it in the process of the training loop)."""
    wrappers = wrappers_of(node)
    first = next((i for i, wrapper in enumerate(wrappers) if wrapper.in_main_process), len(wrappers))
    if first == len(wrappers):
        return node, ()
    if isinstance(node, IndexedDataPipe):
        inner: Any = node.changed()
    else:
        inner = object.__new__(type(node))
        vars(inner).update(vars(node))
    return without_wrapper(inner, lambda wrapper: wrapper in wrappers[first:]), wrappers[first:]


def through(wrappers: "tuple[Wrapper, ...]", node: DataPipe, items: "Iterator[Any]") -> "Iterator[Any]":
    """Items of a node through wrappers, where something else than the node itself gives them."""
    for wrapper in wrappers:
        items = wrapper.items(node, partial(iter, items))
    return items


BY_NUMBERS = ("route", "starts", "sample_numbers", "gathered")
"""What an indexed node is asked by numbers, or by places in files."""

_CLASSES: dict[type, type] = {}


def _wrapped_class(kind: type) -> type:
    """The subclass of a node's class whose items pass through the wrappers."""
    if kind not in _CLASSES:
        same = {name: getattr(kind, name) for name in ("__module__", "__name__", "__qualname__", "__doc__")}
        made: Any = type(kind)(kind.__name__, (kind,), {**same, "_unwrapped": kind})
        made.__reduce_ex__ = _reducing(kind)
        # set, not given to torch's metaclass: that would count what is begun below as another iterator of the node
        for name, method in _methods(kind).items():
            setattr(made, name, method)
        _CLASSES[kind] = made
    return _CLASSES[kind]


def _methods(kind: type) -> "dict[str, Any]":
    if issubclass(kind, IndexedDataPipe):
        found = {"iterate": _iterating(kind)}
        # one that only re-orders must not look as if it made items
        if kind.fetch is not IndexedDataPipe.fetch:
            found["fetch"] = _fetching(kind)
        return found | {name: _numbering(kind, name) for name in BY_NUMBERS if hasattr(kind, name)}
    if issubclass(kind, IterDataPipe):
        functions = [name for name in ("_apply_fn", "_returnIfTrue") if hasattr(kind, name)]
        return {"__iter__": _streaming(kind)} | {name: _applying(kind, name) for name in functions}
    return {"__getitem__": _getting(kind)}


def _streaming(kind: Any) -> "Callable[..., Any]":
    def __iter__(self: Any) -> "Iterator[Any]":
        begin: Callable[[], Iterator[Any]] = lambda: iter(kind.__iter__(self))  # noqa: E731
        for wrapper in wrappers_of(self):
            begin = partial(wrapper.stream, self, begin)
        return begin()

    return __iter__


def _applying(kind: Any, name: str) -> "Callable[..., Any]":
    inner = getattr(kind, name)

    def apply(self: Any, item: Any) -> Any:
        function = partial(inner, self)
        for wrapper in wrappers_of(self):
            function = partial(wrapper.apply, self, function)
        return function(item)

    return apply


_INSIDE = threading.local()
"""`node`: whose own iterate or fetch this thread is in."""


def _asks_itself(kind: Any) -> bool:
    """Whether of a class's iterate and fetch one may ask the other, which is then no call from outside; those of this
    package do not."""
    if kind.iterate is IndexedDataPipe.iterate or kind.fetch is IndexedDataPipe.fetch:
        return False
    return not all(method.__module__.startswith(f"{__package__}.") for method in (kind.iterate, kind.fetch))


def _inside(node: Any, function: "Callable[..., Any]", *arguments: Any) -> Any:
    """A call of a node's own, in which the node itself is asked with nothing around it."""
    before, _INSIDE.node = getattr(_INSIDE, "node", None), node
    try:
        return function(*arguments)
    finally:
        _INSIDE.node = before


def _from_inside(node: Any, items: "Iterator[Any]") -> "Iterator[Any]":
    end = object()
    while (item := _inside(node, next, items, end)) is not end:
        yield item


def _iterating(kind: Any) -> "Callable[..., Any]":
    fetches = kind.iterate is IndexedDataPipe.iterate and kind.fetch is not IndexedDataPipe.fetch
    asks_itself = _asks_itself(kind)

    def iterate(self: Any, start: int = 0, stop: "int | None" = None) -> "Iterator[Any]":
        if getattr(_INSIDE, "node", None) is self:
            return kind.iterate(self, start, stop)
        begin: Callable[[int], Iterator[Any]] = lambda at: kind.iterate(self, at, stop)  # noqa: E731
        if asks_itself:
            begin = lambda at: _from_inside(self, iter(kind.iterate(self, at, stop)))  # noqa: E731
        for wrapper in wrappers_of(self):
            if not (fetches and type(wrapper).fetch is not Wrapper.fetch):  # it sees them as they are fetched
                begin = _iterated(wrapper, self, begin, stop)
        return begin(start)

    return iterate


def _iterated(
    wrapper: Wrapper, node: Any, begin: "Callable[[int], Iterator[Any]]", stop: "int | None"
) -> "Callable[[int], Iterator[Any]]":
    return lambda at: wrapper.iterate(node, begin, at, stop)


def _fetching(kind: Any) -> "Callable[..., Any]":
    asks_itself = _asks_itself(kind)

    def fetch(self: Any, numbers: Any, columns: Any = None) -> Any:
        if getattr(_INSIDE, "node", None) is self:
            return kind.fetch(self, numbers, columns)
        function: Callable[[Any], Any] = lambda wanted: kind.fetch(self, wanted, columns)  # noqa: E731
        if asks_itself:
            function = lambda wanted: _inside(self, kind.fetch, self, wanted, columns)  # noqa: E731
        for wrapper in wrappers_of(self):
            function = partial(wrapper.fetch, self, function)
        return function(numbers)

    return fetch


def _numbering(kind: Any, name: str) -> "Callable[..., Any]":
    inner = getattr(kind, name)

    def numbers(self: Any, *arguments: Any) -> Any:
        function: Any = inner.__get__(self)
        wrappers = self._wrappers
        for wrapper in wrappers[:-1]:
            function = partial(wrapper.numbers, self, function)
            function.__name__ = name
        return wrappers[-1].numbers(self, function, *arguments)

    return numbers


def _getting(kind: Any) -> "Callable[..., Any]":
    def __getitem__(self: Any, index: Any) -> Any:
        function = partial(kind.__getitem__, self)
        for wrapper in wrappers_of(self):
            function = partial(wrapper.item, self, function)
        return function(index)

    return __getitem__


def _reducing(kind: Any) -> "Callable[..., Any]":
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made = kind.__reduce_ex__(self, protocol)
        if not isinstance(made, tuple) or getattr(kind, "reduce_ex_hook", None) is not None:
            return made  # torch is looking through the graph
        function, *arguments = (kind if part is type(self) else part for part in (made[0], *made[1]))
        # what is around it is given at once: what a class with a __setstate__ of its own does not know would be lost
        return (_made_again, (wrappers_of(self), function, *arguments), *made[2:])

    return __reduce_ex__


def _made_again(wrappers: "tuple[Wrapper, ...]", function: "Callable[..., Any]", *arguments: Any) -> Any:
    node = function(*arguments)
    vars(node)["_wrappers"] = wrappers
    node.__class__ = _wrapped_class(kind_of(node))
    return node
