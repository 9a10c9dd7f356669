"""What a node was built with, kept as plain values from the moment it is built: what a recipe writes down.

Settings will not do for that: they hold what decides the order (integer weights, caps in samples), not what was
said (0.8, two epochs), and no paths.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RecipeError

if TYPE_CHECKING:
    from .core import IndexedDataPipe

__all__ = ["Given", "Unwritten", "arguments_of", "constructor_of", "given_with", "kept_arguments", "takes_children"]

MOST_ITEMS = 100_000  # of one list: longer ones are data and belong into a file

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Unwritten:
    """The place of an argument that is no plain value: a child, a function, a topology, a large array."""

    what: str


def kept_arguments(args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Given:
    """A constructor's arguments as plain values of their own."""
    return tuple(_plain(value) for value in args), {name: _plain(value) for name, value in kwargs.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.generic):  # np.float64 is a float too
        return value.item()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if depth < 4 and isinstance(value, (Mapping, Sequence, np.ndarray)) and not isinstance(value, (bytes, bytearray)):
        if len(value) > MOST_ITEMS:
            return Unwritten(f"{len(value)} values")
        if isinstance(value, Mapping):
            pairs = {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
            return next((item for item in pairs.values() if isinstance(item, Unwritten)), pairs)
        items = [_plain(item, depth + 1) for item in value]
        return next((item for item in items if isinstance(item, Unwritten)), items)
    return Unwritten(getattr(value, "__qualname__", type(value).__name__))


def constructor_of(kind: "type[IndexedDataPipe]") -> inspect.Signature:
    """The parameters that a class of nodes is built with."""
    signature = inspect.signature(kind.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


def takes_children(kind: "type[IndexedDataPipe]") -> tuple[bool, bool]:
    """(whether the constructor begins with a node, whether others may follow it)."""
    parameters = list(constructor_of(kind).parameters.values())
    first = bool(parameters) and (parameters[0].name == "datapipe" or "DataPipe" in str(parameters[0].annotation))
    return first, first and any(p.kind is p.VAR_POSITIONAL for p in parameters)


def arguments_of(node: "IndexedDataPipe") -> dict[str, Any]:
    """{parameter: value} of what a node was given besides its children and its defaults.

    A value that is not plain stands as `Unwritten`. Raises RecipeError for a node that was changed since.
    """
    if node._given is None:
        raise RecipeError(
            f"{node.functional_name} was changed after it was built (by a journal or an adapter): write the recipe "
            "of the graph as it was built; what the journal changed is in the run's state"
        )
    args, kwargs = node._given
    signature = constructor_of(type(node))
    given = dict(signature.bind(*args, **kwargs).arguments)
    if takes_children(type(node))[0]:
        given.pop(next(iter(signature.parameters)), None)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            given.pop(parameter.name, None)
        elif parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        elif parameter.name in given and given[parameter.name] is parameter.default:
            del given[parameter.name]
    return given


def given_with(node: "IndexedDataPipe", **changes: Any) -> "Given | None":
    """What the node would have been given with these arguments changed; None where that is not known."""
    if node._given is None:
        return None
    first = (Unwritten("datapipe"),) if takes_children(type(node))[0] else ()
    return first, {**arguments_of(node), **changes}
