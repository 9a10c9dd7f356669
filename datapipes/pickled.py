"""What of a graph can travel to another process as bytes, and which value at which node cannot.

Functions and classes travel by name, so they must be where a fresh process can import them; with dill installed (it is
optional) those that are not, such as lambdas, travel as code.
"""

import contextlib
import functools
import importlib.util
import io
import pickle
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ._torch import DataPipe, IterDataPipe
from .names import named_nodes

__all__ = ["Culprit", "culprits_in", "pickled"]

DEEPEST = 30  # how far into an attribute a culprit is looked for


def pickled(value: Any, forked: bool = False) -> bytes:
    """A value for a child process. Raises what its pickling raises: a node's own `__getstate__` may raise anything.

    Args:
        forked: the child is a fork of this process, and so has what a notebook or a session defined before.
    """
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        # bytes that name a __main__ that no child can import are looked at once more
        if forked or b"__main__" not in data or _main_is_a_file() or (error := _refusal(value)) is None:
            return data
    except MemoryError:
        raise
    except Exception as found:
        error = found
    if not _has_dill():
        raise error
    file = io.BytesIO()
    _Pickler(file, forked, by_value=True).dump(value)
    return file.getvalue()


class Culprit(NamedTuple):
    """A value that cannot travel: at which node (its name; "": beside the graph), how it is written behind that name,
    and why.
    """

    node: str
    way: str
    value: Any
    error: Exception

    @property
    def shown(self) -> str:
        """The value on a line: of a function, with its file and line."""
        return _shown(self.value)

    @property
    def advice(self) -> str:
        if _is_of_a_session(self.value):
            return (
                "it is defined in a notebook or another interactive session, which no worker process can import: put "
                'it into a module (a .py file), install dill, or use multiprocessing_context="fork"'
            )
        if isinstance(self.value, (FunctionType, type)):
            return (
                "define it at the top of a module (functools.partial brings arguments along), or install dill, with "
                "which it travels as code"
            )
        return (
            "each worker process needs one of its own: make it where it is first used, such as in __iter__ or in "
            "worker_init_fn, and leave it out in __getstate__"
        )


def culprits_in(
    datapipe: DataPipe, beside: "Mapping[str, Any] | None" = None, forked: bool = False
) -> "Iterator[Culprit]":
    """The innermost value of each node that cannot travel, then those of what goes with the graph."""
    nodes = {id(node): (node, name) for node, name in named_nodes(datapipe)}
    looked: list[tuple[str, str, Any, Collection[int]]] = []
    looked += [(name, "", node, nodes.keys() - {id(node)}) for node, name in nodes.values()]
    looked += [("", name, value, nodes.keys()) for name, value in (beside or {}).items()]
    for node, way, value, others in looked:
        if _refusal(value, others, forked) is None:
            continue
        if found := _culprit(value, _Trial(others, forked, by_value=_has_dill()), way):
            yield Culprit(node, *found)


# What travels as code -------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Fails where the child would.

    Args:
        nodes: ids of what counts as done.
        by_value: functions and classes that cannot be imported go as dill pickles them, all else goes as ever. So an
            open file or a lock, of which dill would make another one there, stays an error.
    """

    def __init__(self, file: Any, forked: bool, nodes: Collection[int] = (), by_value: bool = False) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._forked, self._nodes, self._by_value = forked, nodes, by_value

    def persistent_id(self, value: Any) -> "int | None":
        return id(value) if id(value) in self._nodes else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (FunctionType, type)):
            return NotImplemented
        if self._by_value:
            return NotImplemented if _refusal(value, (), self._forked) is None else _as_code(value, self._forked)
        if not self._forked and _is_of_a_session(value):
            raise pickle.PicklingError("it is defined in an interactive session, which no other process can import")
        return NotImplemented


def _has_dill() -> bool:
    return importlib.util.find_spec("dill") is not None


def _as_code(value: Any, forked: bool) -> Any:
    """A function or class, for `reducer_override`."""
    import dill  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with contextlib.ExitStack() as put_back:
        for kind in value.__mro__ if isinstance(value, type) else ():
            if issubclass(kind, IterDataPipe) and _refusal(kind, (), forked) is not None:
                _as_written(kind, put_back)
        return pickle.loads, (dill.dumps(value, recurse=True),)


def _as_written(kind: type, put_back: contextlib.ExitStack) -> None:
    """Gives dill a node's class as its author wrote it: without what torch's metaclass, which makes it there again,
    has put around its `__iter__`, and with its own bases, for which dill takes those that its base was written with.
    """
    own = vars(kind)
    if "__orig_bases__" not in own:
        kind.__orig_bases__ = kind.__bases__  # type: ignore[attr-defined]
        put_back.callback(delattr, kind, "__orig_bases__")
    if (written := getattr(own.get("__iter__"), "__wrapped__", None)) is not None:
        put_back.callback(setattr, kind, "__iter__", own["__iter__"])
        kind.__iter__ = written  # type: ignore[attr-defined]


# Which value it is ------------------------------------------------------------------------------------------


class _Nowhere:
    """Where a pickle goes of which only the error is wanted."""

    def write(self, data: Any) -> int:
        return len(data)


class _Trial(NamedTuple):
    """How a value is tried: as `_Pickler` says."""

    nodes: Collection[int] = ()
    forked: bool = False
    by_value: bool = False

    def refusal(self, value: Any) -> "Exception | None":
        """Why a value cannot travel; None if it can."""
        try:
            _Pickler(_Nowhere(), self.forked, self.nodes, self.by_value).dump(value)
        except Exception as error:
            return error
        return None


def _refusal(value: Any, nodes: Collection[int] = (), forked: bool = False) -> "Exception | None":
    return _Trial(nodes, forked).refusal(value)


def _main_is_a_file() -> bool:
    """Whether a fresh process can import what this one's `__main__` defines: not a notebook's, nor a `-c`."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).is_file()


def _is_of_a_session(value: Any) -> bool:
    named = isinstance(value, (FunctionType, type)) and getattr(value, "__module__", None) == "__main__"
    return named and not _main_is_a_file()


def _parts_of(value: Any) -> "Iterator[tuple[str, Any]]":
    """(how it is written behind the value's own name, part) of all that a pickle of the value holds."""
    if isinstance(value, (FunctionType, type, ModuleType)):
        return
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", item) for name, item in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{reprlib.repr(key)}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> "Iterator[tuple[str, Any]]":
    try:
        _, args, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return
    names = {id(item): f".{name}" for name, item in getattr(value, "__dict__", {}).items()}
    names[id(type(value))] = ".__class__"
    for state in rest[:1]:
        for part in state if isinstance(state, tuple) else (state,):  # (dict, slots), or what __getstate__ gives
            if isinstance(part, dict):
                yield from ((f".{name}", item) for name, item in part.items())
            else:
                yield names.get(id(part), ".__getstate__()"), part
    yield from ((names.get(id(item), ".__reduce__()"), item) for item in args)


def _culprit(value: Any, trial: _Trial, name: str = "", depth: int = 0) -> "tuple[str, Any, Exception] | None":
    """(how the innermost part that cannot travel is written, that part, why it cannot); None if all can."""
    why = trial.refusal(value)
    if why is None:
        return None
    for way, part in _parts_of(value) if depth < DEEPEST else ():
        if found := _culprit(part, trial, name + way, depth + 1):
            return found
    return name, value, why


def _shown(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    short = reprlib.Repr()
    short.maxother = short.maxstring = 80
    return short.repr(value)
