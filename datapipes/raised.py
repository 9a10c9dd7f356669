"""An exception on its way from a worker process to the loop that asked for the item.

It arrives as what was raised: its class, its arguments and attributes, as far as they can travel (each is tried in the
worker, where there is still time to do without). What it prints is followed by what torch's loaders say:

    that cannot be

    Caught ValueError in worker process 0 (node blend.0.map, sample 17).
    Original Traceback (most recent call last):
      File …

An exception that prints something other than its one argument (an OSError with its errno, a class with a `__str__` of
its own) keeps its arguments, and has these lines as a note (Python 3.10: as its cause).
"""

import contextlib
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import WorkerError

__all__ = ["RaisedError"]


@dataclass(frozen=True)
class RaisedError:
    """What a worker says of an exception: strings and bytes only, so that it always travels."""

    kind: str
    """Its class."""
    message: str
    """What it printed."""
    caught: str
    """The lines from "Caught" on."""
    pickled: bytes
    """The exception, as it was seen to come back; empty: it does not travel as itself."""

    @classmethod
    def of(cls, error: BaseException, where: str) -> "RaisedError":
        """In the worker: `where` goes on after "Caught ValueError", as in "in worker process 0"."""
        kind = _plain(type(error).__name__)
        pickled, arrives_as = _portable(error) or (b"", WorkerError)
        caught = f"Caught {kind} {where}."
        if arrives_as is not type(error):
            why = (
                "would end the loop"
                if _ends_loops(error)
                else "cannot be imported in another process, or rebuilt there"
            )
            caught += f" It is raised as {arrives_as.__name__}: {kind} {why}."
        return cls(kind, _printed(error), f"{caught}\n{_original(error)}", pickled)

    def error(self) -> Exception:
        """In the process that asked for the item: the exception to raise."""
        error = None
        if self.pickled:
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)  # from a child of ours
        if not isinstance(error, Exception):
            said = f"{self.kind}: {self.message}" if self.message else self.kind
            return WorkerError(f"{said}\n\n{self.caught}")
        said = f"{self.message}\n\n{self.caught}" if self.message else self.caught
        if not _said(error, said):
            _note(error, self.caught)
        return error


class _ReadableKey(str):
    """What a KeyError was raised with: it prints its key's repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _said(error: Exception, text: str) -> bool:
    """Whether the exception now prints the text: if it prints its one argument, and nothing else."""
    args = error.args
    if len(args) > 1:
        return False
    try:
        error.args = (_ReadableKey(text) if isinstance(error, KeyError) else text,)
    except Exception:  # a frozen dataclass, say
        return False
    if _printed(error) == text:
        return True
    error.args = args
    return False


def _note(error: Exception, text: str) -> None:
    with contextlib.suppress(Exception):
        if hasattr(error, "add_note"):  # Python 3.11; past the __setattr__ of a frozen class
            object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), text])
        else:
            object.__setattr__(error, "__cause__", WorkerError(text))


# In the worker ------------------------------------------------------------------------------------------


def _ends_loops(error: BaseException) -> bool:
    """Whether raising it where the items are taken would say something else than that one could not be made."""
    return isinstance(error, (StopIteration, StopAsyncIteration)) or not isinstance(error, Exception)


def _portable(error: BaseException) -> "tuple[bytes, type] | None":
    """(its pickle, the class that comes back): its own class, else the nearest base that can be imported."""
    if _ends_loops(error):
        return None
    if not hasattr(error, "exceptions"):  # what a group holds is looked at one by one
        data, back = _round_trip(error)
        if type(back) is type(error) and _printed(back) == _printed(error):
            return data, type(error)
    for kind in type(error).__mro__:
        if issubclass(kind, Exception):
            data, back = _round_trip(_Parts(kind, error))
            if type(back) is kind:
                return data, kind
    return None


def _round_trip(value: Any) -> "tuple[bytes, Any]":
    """A value's pickle, and what comes back; (b"", None) where it does not."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return data, pickle.loads(data)
    except BaseException:  # its own code runs here, and may raise anything
        return b"", None


class _Parts:
    """An exception that is put together without its class's own `__init__`, from what of it can travel."""

    def __init__(self, kind: type[Exception], error: BaseException) -> None:
        self.kind = kind
        base: Any = _builtin_base(type(error))
        _, args, *state = base.__reduce__(error)  # an OSError's file name is among them
        self.args = tuple(_surviving(value) for value in args)
        attributes = state[0] if state and isinstance(state[0], dict) else {}
        self.attributes = {name: value for name, value in attributes.items() if _survives(value)}

    def __reduce__(self) -> "tuple[Callable[..., Any], tuple[Any, ...]]":
        return _put_together, (self.kind, self.args, self.attributes)


def _put_together(kind: type[Exception], args: "tuple[Any, ...]", attributes: "dict[str, Any]") -> Exception:
    base: Any = _builtin_base(kind)
    error: Exception = base.__new__(kind, *args)
    base.__init__(error, *args)
    for name, value in attributes.items():
        with contextlib.suppress(Exception):
            object.__setattr__(error, name, value)
    return error


def _builtin_base(kind: type) -> type:
    """The built-in exception whose memory layout a class has."""
    while kind.__module__ != "builtins":
        kind = kind.__base__  # type: ignore[assignment]  # object is built in
    return kind


def _survives(value: Any) -> bool:
    return bool(_round_trip(value)[0])


def _surviving(value: Any) -> Any:
    """An argument as it can travel: as itself, an exception (of a group) by its parts, else what it prints."""
    if isinstance(value, Exception):
        return _Nested(value)
    if type(value) in (list, tuple) and any(isinstance(item, Exception) for item in value):
        return type(value)(_surviving(item) for item in value)
    return value if _survives(value) else _guarded(repr, value)


class _Nested:
    """An exception within another one."""

    def __init__(self, error: Exception) -> None:
        found = _portable(error)
        self.pickled = found[0] if found else pickle.dumps(WorkerError(f"{type(error).__name__}: {_printed(error)}"))

    def __reduce__(self) -> "tuple[Callable[..., Any], tuple[Any, ...]]":
        return pickle.loads, (self.pickled,)


def _plain(text: str) -> str:
    return "".join((text,))  # of a subclass's instance a string


def _guarded(function: "Callable[[Any], str]", value: Any) -> str:
    try:
        return _plain(function(value))
    except Exception as error:
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"


def _printed(error: Any) -> str:
    return _guarded(str, error)


def _original(error: BaseException) -> str:
    def formatted(error: BaseException) -> str:
        return "".join(traceback.format_exception(error)).rstrip("\n")

    text = _guarded(formatted, error)
    return f"Original {text}" if text.startswith("Traceback") else f"Original Traceback:\n{text}"
