"""One kind of node for another, with its arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data.datapipes.iter import Collator, FileLister, Grouper, Shuffler

from ..datapipes._torch import DataPipe, IterDataPipe, MapDataPipe
from ..datapipes.arguments import Unwritten, constructor_of
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError, GraphError
from ..datapipes.names import inputs_of, node_names
from ..datapipes.wrapped import kind_of, with_wrapper, wrappers_of
from .base import Adapter
from .surgery import made_from, mapped

__all__ = ["Replace", "built_like"]


class Replace(Adapter):
    """One kind of node for another, as an accelerated one, wherever it stands; arguments are kept.

    Args:
        kinds: {class: class, or function of the node that gives another over the same inputs}. A class is built with
            what the old one was built with: its arguments are found by their names.

    Raises GraphError, with the node's name, where the new class has no place for an argument, or wants one more.
    """

    def __init__(self, kinds: "Mapping[type, type | Callable[[Any], DataPipe]]") -> None:
        if not isinstance(kinds, Mapping) or not kinds:
            raise ArgumentTypeError(f"Replace takes {{old class: new class}}, got {kinds!r:.80}")
        for old, new in kinds.items():
            if not isinstance(old, type) or not callable(new):
                raise ArgumentTypeError(f"Replace takes {{old class: new class or function}}, got {old!r}: {new!r}")
        self.kinds = dict(kinds)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        names = node_names(datapipe)

        def replaced(node: Any, original: DataPipe) -> "DataPipe | None":
            new = self.kinds.get(kind_of(node))
            if new is None:
                return None
            try:
                made = built_like(node, new) if isinstance(new, type) else new(node)
            except GraphError as error:
                raise GraphError(f"{names[id(original)]}: {error}") from None
            if not isinstance(made, (IterDataPipe, MapDataPipe)):
                raise ArgumentTypeError(f"for {names[id(original)]}, {new!r} gave no datapipe but {made!r:.80}")
            return made if wrappers_of(made) else around_as(made, node)

        return mapped(datapipe, replaced)


def built_like(node: DataPipe, kind: type, **changes: Any) -> Any:
    """A node of this class over the same inputs, built with the arguments of another one, some of them changed. It
    still answers to that one, and has what is around it.

    Raises GraphError for an argument that is not known, or that the class does not take.
    """
    given, unknown = _arguments(node)
    if unknown := [name for name in unknown if name not in changes]:
        raise GraphError(
            f"{type(node).__name__} has no attribute {' nor '.join(unknown)}, so what it was given is not known; "
            "a function of the node in place of the class would do"
        )
    given |= changes
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    inputs = inputs_of(node)
    free = [child for child in inputs if not _holds(given, child)]  # known by no name
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= given
            given = {}
        elif parameter.kind is parameter.VAR_POSITIONAL:
            args += given.pop(name, None) or free
            free = []
        elif name in given:
            value = given.pop(name)
            if parameter.kind is parameter.KEYWORD_ONLY or len(args) != parameters.index(parameter):
                kwargs[name] = value
            else:
                args.append(value)
        elif parameter.default is parameter.empty:
            if not free:
                raise GraphError(f"{kind.__name__} wants {name}, which {type(node).__name__} does not have")
            args.append(free.pop(0))
    unused = {name for name, value in given.items() if not _is_default(node, name, value)}
    if unused:
        raise GraphError(f"{kind.__name__} has no place for {', '.join(sorted(unused))} of {type(node).__name__}")
    return around_as(made_from(kind(*args, **kwargs), node), node)


def around_as(made: DataPipe, node: DataPipe) -> DataPipe:
    """A node that was made in another's place, with what is around that one."""
    for wrapper in wrappers_of(node):
        with_wrapper(made, wrapper)
    return made


_OTHERWISE: "dict[type, dict[str, Callable[[Any], Any]]]" = {
    Collator: {"conversion": lambda node: node.fn, "collate_fn": lambda node: None},
    FileLister: {"root": lambda node: node.datapipe},
    Grouper: {"buffer_size": lambda node: node.max_buffer_size},
    Shuffler: {"unbatch_level": lambda node: 0},  # what it reads from is unbatched already
}
"""Arguments that torch's nodes hold in another way than as attributes of their names."""


def _arguments(node: DataPipe) -> "tuple[dict[str, Any], list[str]]":
    """({parameter: value} of what a node was built with, as far as its attributes say, the parameters they do not)."""
    found: dict[str, Any] = {}
    said = _given(node) if isinstance(node, IndexedDataPipe) else {}
    for kind in reversed(kind_of(node).__mro__):
        found |= {name: value(node) for name, value in _OTHERWISE.get(kind, {}).items()}
    for parameter in _parameters(node):
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if isinstance(values := vars(node).get(name), (list, tuple)):
                found[name] = list(values)
        elif name in said:
            found[name] = said[name]
        elif name in vars(node) or f"_{name}" in vars(node):
            found[name] = vars(node).get(name, vars(node).get(f"_{name}"))
    names = {p.name for p in _parameters(node)}
    found = {name: value for name, value in found.items() if name in names}
    free = sum(not _holds(found, child) for child in inputs_of(node))
    unsaid = [p for p in _parameters(node) if p.name not in found and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    inputs = [p.name for p in unsaid if p.default is p.empty][:free]
    return found, [p.name for p in unsaid if p.name not in inputs]


def _given(node: IndexedDataPipe) -> "dict[str, Any]":
    """What an indexed node was told, where that is a plain value; its attributes may hold something worked out."""
    if node._given is None:
        return {}
    args, kwargs = node._given
    bound = constructor_of(kind_of(node)).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if not isinstance(value, (Unwritten, tuple))}


def _parameters(node: DataPipe) -> "list[inspect.Parameter]":
    return list(inspect.signature(kind_of(node).__init__).parameters.values())[1:]  # type: ignore[misc]


def _is_default(node: DataPipe, name: str, value: Any) -> bool:
    return any(p.name == name and p.default is value for p in _parameters(node))


def _holds(given: "dict[str, Any]", child: DataPipe) -> bool:
    return any(
        value is child or (isinstance(value, list) and any(v is child for v in value)) for value in given.values()
    )
