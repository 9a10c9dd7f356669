"""A graph as a recipe: what each node was given, in the form that `load_recipe` reads."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from ..arguments import Unwritten, arguments_of, constructor_of
from ..core import IndexedDataPipe
from ..errors import ArgumentTypeError, RecipeError
from ..remote import is_remote
from ..remote.urls import identity
from ..wrapped import kind_of
from .load import READ, VERSION, kinds
from .text import dump

__all__ = ["write_recipe"]


def write_recipe(graph: IndexedDataPipe, folder: "str | os.PathLike[str] | None" = None) -> str:
    """A graph as YAML from which `load_recipe` builds it again: same settings, fingerprint and batches.

    Written is what the nodes were built with: not the topology, which belongs to the machine, nor what a run's
    journal changed since, which belongs to its state.

    Args:
        folder: paths below it are written relative to it: where the recipe will lie. Other paths are absolute.

    Raises RecipeError for a graph that no recipe can hold: with a map (a function), or a node that is not registered.
    """
    if not isinstance(graph, IndexedDataPipe):
        raise ArgumentTypeError(f"write_recipe takes an indexed graph, got {type(graph).__name__}")
    writer = _Writer(graph, None if folder is None else Path(os.fspath(folder)).absolute())
    steps = writer.chain(graph)
    shared = {"shared": writer.shared} if writer.shared else {}
    return dump({"tokenpipe": VERSION, **shared, "graph": steps})


class _Writer:
    def __init__(self, graph: IndexedDataPipe, folder: "Path | None") -> None:
        self.folder = folder
        self.kinds = {kind: name for name, kind in kinds().items()}
        self.uses: Counter[int] = Counter()
        self.shared: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self._count(graph)

    def _count(self, node: IndexedDataPipe) -> None:
        """How many nodes take from each: what two take from is shared."""
        for child in node.children:
            self.uses[id(child)] += 1
            if self.uses[id(child)] == 1:
                self._count(child)

    def chain(self, node: IndexedDataPipe, key: "str | None" = None, use: bool = True) -> "list[Any]":
        """The steps from the files up to a node. key: the name under which its blend has it."""
        steps: list[Any] = []
        while True:
            if use and self.uses[id(node)] > 1:
                steps.append({"use": self.use(node)})
                break
            use = True
            if len(node.children) != 1:
                steps.append(self.first(node, key))
                break
            steps.append(self.step(node, arguments_of(node)))
            if "name" in constructor_of(type(node)).parameters:
                key = None  # this node has the name, so the first says its own
            node = node.datapipe
        return steps[::-1]

    def use(self, node: IndexedDataPipe) -> str:
        if id(node) not in self.names:
            name = base = node.name or "graph"
            taken = set(self.names.values())
            for number in range(2, len(taken) + 3):
                if name not in taken:
                    break
                name = f"{base} {number}"
            self.names[id(node)] = name
            self.shared[name] = self.chain(node, use=False)
        return self.names[id(node)]

    def first(self, node: IndexedDataPipe, key: "str | None") -> Any:
        """A chain's first step: a reader, or a node of several; without its name, where the blend's key gives it."""
        arguments = arguments_of(node)
        if key is not None and arguments.get("name") == key:
            del arguments["name"]
        if not node.children:
            return self.step(node, arguments)
        names = [child.name for child in node.children]
        named = all(names) and len(set(names)) == len(names)
        chains = [self.chain(child, name if named else None) for child, name in zip(node.children, names, strict=True)]
        common: list[Any] = []
        while all(len(chain) > 1 for chain in chains) and all(chain[-1] == chains[0][-1] for chain in chains):
            common.insert(0, chains[0][-1])
            for chain in chains:
                del chain[-1]
        short = [_shortened(chain) for chain in chains]
        sources: Any = dict(zip(names, short, strict=True)) if named else short
        return self.step(node, arguments, {"sources": sources, **({"each": common} if common else {})})

    def step(self, node: IndexedDataPipe, given: "dict[str, Any]", forks: "dict[str, Any] | None" = None) -> Any:
        kind = kind_of(node)
        name = self.kinds.get(kind)
        parameters = constructor_of(kind).parameters
        if any("Callable" in str(p.annotation) for p in parameters.values()):
            raise RecipeError(
                f"{node.functional_name} takes a function, which a recipe cannot hold: write the recipe of the graph "
                "below it, and put it on again when that is loaded"
            )
        if name is None:
            raise RecipeError(
                f"{kind.__name__} has no registered name, by which a recipe could call it: @functional_datapipe(...)"
            )
        arguments = dict(forks or {})
        for argument, value in given.items():
            if argument == "topology":
                continue
            if isinstance(value, Unwritten):
                raise RecipeError(f"{argument}= of {name} ({value.what}) cannot be written in a recipe")
            if "PathLike" in str(parameters[argument].annotation):
                value = self.path(value)
            if argument == "schedule" and value is not None:
                value = [{"sample": number, "weights": weights} for number, weights in value]
            arguments[argument] = value
        return {name: arguments} if arguments else name

    def path(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.path(item) for item in value]
        if not isinstance(value, str) or "://" in value:
            return identity(value) if isinstance(value, str) and is_remote(value) else value  # without its secrets
        path = Path(value).absolute()
        return str(path.relative_to(self.folder)) if self.folder and path.is_relative_to(self.folder) else str(path)


def _shortened(chain: "list[Any]") -> Any:
    """A chain of one reader as the reader's arguments."""
    first = chain[0]
    if len(chain) == 1 and isinstance(first, dict) and "paths" in first.get(READ, {}):
        return first[READ]
    return chain
