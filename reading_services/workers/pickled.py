"""A graph on its way to a worker process, as bytes; or an error that says what of it cannot travel.

The bytes go over a private pipe from this process to its own child: nothing else is ever unpickled. Functions and
classes travel by name, so they must be where a fresh process can import them; with dill installed (it is optional)
those that are not, such as lambdas, travel as code.
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
from typing import Any

from ...datapipes._torch import DataPipe, IterDataPipe
from ...datapipes.errors import ArgumentTypeError
from ...datapipes.names import named_nodes

__all__ = ["from_bytes", "to_bytes"]

DEEPEST = 30  # how far into an attribute a culprit is looked for


def to_bytes(datapipe: DataPipe, *, forked: bool = False, **beside: Any) -> bytes:
    """A graph, and what goes with it (`worker_init_fn=…`), for a child process.

    Args:
        forked: the child is a fork of this process, and so has what a notebook or a session defined before.

    Raises ArgumentTypeError that names the node, the attribute and the value that cannot travel, and what would do.
    """
    try:
        data = pickle.dumps((datapipe, beside), pickle.HIGHEST_PROTOCOL)
        # bytes that name a __main__ that no child can import are looked at once more
        if forked or b"__main__" not in data or _main_is_a_file() or _refusal((datapipe, beside)) is None:
            return data
    except MemoryError:
        raise
    except Exception as found:  # a node's own __getstate__ may raise anything
        error: BaseException = found
    else:
        error = pickle.PicklingError("it belongs to __main__")
    if importlib.util.find_spec("dill") is not None:
        file = io.BytesIO()
        try:
            _ByValue(file, forked).dump((datapipe, beside))
            return file.getvalue()
        except Exception as found:
            error = found
    raise ArgumentTypeError(_told(datapipe, beside, error, forked)) from error


def from_bytes(data: bytes) -> "tuple[DataPipe, dict[str, Any]]":
    """In the worker: (the graph, what went with it). The bytes must be those that the parent process made.

    Raises ArgumentTypeError for a function or class of `__main__` that is not there.
    """
    try:
        return pickle.loads(data)
    except AttributeError as error:
        if "__main__" not in str(error) and "__mp_main__" not in str(error):
            raise
        raise ArgumentTypeError(
            f"a worker process did not find what the graph uses: {error}. Workers import the program's file without "
            'running what stands below `if __name__ == "__main__"`: define functions and classes above it or in a '
            'module, or use multiprocessing_context="fork"'
        ) from error


# What travels as code -------------------------------------------------------------------------------------


class _ByValue(pickle.Pickler):
    """Functions and classes that cannot be imported go as dill pickles them, all else goes as ever.

    So an open file or a lock, of which dill would make another one there, stays an error.
    """

    def __init__(self, file: Any, forked: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._forked = forked

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (FunctionType, type)) or _refusal(value, (), self._forked) is None:
            return NotImplemented
        import dill  # type: ignore[import-not-found,import-untyped,unused-ignore]

        with contextlib.ExitStack() as put_back:
            for kind in value.__mro__ if isinstance(value, type) else ():
                if issubclass(kind, IterDataPipe) and _refusal(kind, (), self._forked) is not None:
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


class _Trial(pickle.Pickler):
    """Fails where the child would; nodes of the graph count as done."""

    def __init__(self, nodes: Collection[int], forked: bool) -> None:
        super().__init__(_Nowhere(), pickle.HIGHEST_PROTOCOL)
        self._nodes, self._forked = nodes, forked

    def persistent_id(self, value: Any) -> "int | None":
        return id(value) if id(value) in self._nodes else None

    def reducer_override(self, value: Any) -> Any:
        if not self._forked and _is_of_a_session(value):
            raise pickle.PicklingError("it is defined in an interactive session, which no other process can import")
        return NotImplemented


def _refusal(value: Any, nodes: Collection[int] = (), forked: bool = False) -> "Exception | None":
    """Why a value cannot travel; None if it can."""
    try:
        _Trial(nodes, forked).dump(value)
    except Exception as error:
        return error
    return None


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


def _culprit(
    value: Any, nodes: Collection[int], forked: bool, name: str = "", depth: int = 0
) -> "tuple[str, Any, Exception] | None":
    """(how the innermost part that cannot travel is written, that part, why it cannot); None if all can."""
    why = _refusal(value, nodes, forked)
    if why is None:
        return None
    for way, part in _parts_of(value) if depth < DEEPEST else ():
        if found := _culprit(part, nodes, forked, name + way, depth + 1):
            return found
    return name, value, why


def _told(datapipe: DataPipe, beside: "Mapping[str, Any]", error: BaseException, forked: bool) -> str:
    """What cannot travel, where it is, why, and what would do."""
    nodes = {id(node): (node, name) for node, name in named_nodes(datapipe)}
    for node, name in nodes.values():
        if found := _culprit(node, nodes.keys() - {id(node)}, forked):
            way, value, why = found
            return _sentence(f"node {name!r}, attribute {way[1:]}" if way else f"node {name!r}", value, why)
    for name, value in beside.items():
        if found := _culprit(value, nodes, forked):
            way, value, why = found
            return _sentence(name + way, value, why)
    return f"this graph cannot be sent to a worker process: {type(error).__name__}: {error}"


def _sentence(where: str, value: Any, error: BaseException) -> str:
    what = _shown(value)
    if _is_of_a_session(value):
        advice = (
            "it is defined in a notebook or another interactive session, which no worker process can import: put it "
            'into a module (a .py file), install dill, or use multiprocessing_context="fork"'
        )
    elif isinstance(value, (FunctionType, type)):
        advice = (
            "define it at the top of a module (functools.partial brings arguments along), or install dill, with which "
            "it travels as code"
        )
    else:
        advice = (
            "each worker process needs one of its own: make it where it is first used, such as in __iter__ or in "
            "worker_init_fn, and leave it out in __getstate__"
        )
    return f"this graph cannot be sent to a worker process: {where} is {what} ({error}); {advice}"


def _shown(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    short = reprlib.Repr()
    short.maxother = short.maxstring = 80
    return short.repr(value)
