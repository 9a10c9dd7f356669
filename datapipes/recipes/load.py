"""A recipe's values to a graph: each step is the registered name of a node and its constructor's arguments.

    recipe   {tokenpipe: 1, graph: CHAIN, shared: {name: CHAIN}}
    CHAIN    a list of STEPs from the files upwards; or one STEP; or a reader's arguments {paths: …}
    STEP     name, or {name: {argument: value}}; a chain's first may be {use: name} of a shared one
    a node of several has sources: {name: CHAIN} (or a list), and each: STEPs that end every one of these chains

What a node takes is read off its constructor, so a new node needs nothing here. See docs/recipes.md.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from .._torch import MapDataPipe
from ..arguments import constructor_of, takes_children
from ..core import IndexedDataPipe, as_count
from ..errors import ArgumentTypeError
from ..fluent import ALIASES
from ..read import TokenReader
from ..steps import StepTable, as_schedule
from ..topology import Topology
from .nanotron import is_nanotron, load_nanotron
from .stages import planned_changes
from .text import Document, Place, nearest, parse

__all__ = ["VERSION", "kinds", "load_recipe"]

VERSION = 1
READ = "read"


def load_recipe(
    recipe: "str | os.PathLike[str] | Mapping[str, Any]",
    topology: "Topology | None" = None,
    micro_batch_size: "int | None" = None,
    folder: "str | os.PathLike[str] | None" = None,
) -> IndexedDataPipe:
    """The graph that a recipe describes. See docs/recipes.md for the format.

    Nothing in a recipe is imported or executed, and no file is opened but the token files (and orders, sidecars)
    that its nodes read. Nanotron's configs are understood too: whatever has `data_stages` goes to `load_nanotron`.

    Args:
        recipe: a path; YAML or JSON text (a str with a line break, or that begins with "{"); or its values.
        topology: this process's place, for `shard_ranks`: it belongs to the machine, never to a recipe.
        micro_batch_size: in place of the recipe's.
        folder: where relative paths begin; left out: the recipe's own folder, for text and values the current one.

    Raises RecipeError with the place in the recipe; what nodes raise (WeightsError, TokenFileError, …) has it in front.

        >>> import tempfile, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> np.save(folder + "/prose.npy", np.arange(1000, dtype=np.uint16))
        >>> graph = load_recipe('''
        ... tokenpipe: 1
        ... graph:
        ...   - read: {paths: prose.npy}
        ...   - slice_sequences: {sequence_length: 8}
        ...   - permute: {seed: 7}
        ...   - batch_samples: {micro_batch_size: 4}
        ... ''', folder=folder)
        >>> len(graph)
        31
    """
    document, own_folder = parse(recipe)
    if is_nanotron(document.value):
        return load_nanotron(recipe, topology=topology, micro_batch_size=micro_batch_size, folder=folder)
    start = own_folder if folder is None else os.fspath(folder)
    return _Builder(document, start, topology, micro_batch_size).graph()


def kinds() -> "dict[str, type[IndexedDataPipe]]":
    """The nodes that a recipe can name."""
    found = {
        name: function.args[0]
        for name, function in MapDataPipe.functions.items()
        if isinstance(function, partial)
        and isinstance(function.args[0], type)
        and issubclass(function.args[0], IndexedDataPipe)
    }
    return {READ: TokenReader, **found}


def first_stem(arguments: "dict[str, Any]") -> "str | None":
    """What a reader of these arguments is called where nothing else is said."""
    paths = arguments.get("paths")
    first = paths[0] if isinstance(paths, list) and paths else paths
    return PurePath(first).stem if isinstance(first, str) else None


class _Builder:
    """One recipe on its way to a graph; shared chains are built once, when they are first used."""

    def __init__(
        self, document: Document, folder: str, topology: "Topology | None", micro_batch_size: "int | None"
    ) -> None:
        if topology is not None and not isinstance(topology, Topology):
            raise ArgumentTypeError(f"topology must be a Topology, got {topology!r}")
        self.document, self.folder, self.kinds = document, folder, kinds()
        self.topology, self.dealt = topology, False
        self.micro_batch_size = None if micro_batch_size is None else as_count("micro_batch_size", micro_batch_size)
        self.batched = False
        self.shared: dict[str, Any] = {}
        self.built: dict[str, IndexedDataPipe | None] = {}

    def graph(self) -> IndexedDataPipe:
        value = self.document.mapping(self.document.value, (), ("tokenpipe", "graph", "shared"))
        if value.get("tokenpipe") != VERSION or isinstance(value["tokenpipe"], bool):
            raise self.document.error(
                ("tokenpipe",),
                f"a recipe says 'tokenpipe: {VERSION}', the version of its format, got {value.get('tokenpipe')!r:.80}",
            )
        if "graph" not in value:
            raise self.document.error((), "the key 'graph' is missing: the list of steps from the files to the batches")
        shared = value.get("shared") or {}
        if not isinstance(shared, dict):
            raise self.document.error(("shared",), "a mapping of chains by name was expected")
        self.shared = shared
        graph = self.chain(value["graph"], ("graph",), run=True)
        if self.topology is not None and self.topology.dp_size > 1 and not self.dealt:
            raise self.document.error(
                ("graph",), f"no shard_ranks: each of the {self.topology.dp_size} data ranks would get the same samples"
            )
        if self.micro_batch_size is not None and not self.batched:
            raise self.document.error(("graph",), "micro_batch_size was given, but no batch_samples takes it")
        return graph

    # Chains and steps ---------------------------------------------------------------------------------

    def chain(self, value: Any, place: Place, key: "str | None" = None, each: Any = (), run: bool = False) -> Any:
        """The topmost node of a chain. key: what its blend calls it; run: whether it is the run's own."""
        steps = self.steps(value, place) + list(each)
        if not steps:
            raise self.document.error(place, "a chain has at least one step")
        if key is not None:
            self.name(steps, key)
        node: IndexedDataPipe | None = None
        for i, (name, arguments, at) in enumerate(steps):
            if name == "use":
                if node is not None:
                    raise self.document.error(at, "use begins a chain")
                node = self.used(arguments, at)
                continue
            above = (lambda at=at, i=i: self.step_table(steps[i + 1 :], at)) if run else None
            node = self.node(name, arguments, at, node, above)
        assert node is not None
        if key is not None and node.name != key:
            raise self.document.error(place, f"the source {key!r} is called {node.name!r} by its own chain (name)")
        return node

    def name(self, steps: "list[tuple[str, dict[str, Any], Place]]", key: str) -> None:
        """Gives a chain the name that its blend has for it, where it would be called otherwise: in its last step
        that can have one. A reader below a selector so keeps its own, which decides what the selector chooses.
        """
        name: Any = None
        last = -1
        for i, (step, arguments, at) in enumerate(steps):
            if step == "use" and i == 0:
                name = self.used(arguments, at).name
            elif step != "use" and "name" in self.parameters(step):
                last, name = i, arguments.get("name") or (first_stem(arguments) if step == READ else name)
        if last >= 0 and name != key:
            step, arguments, at = steps[last]
            steps[last] = step, {"name": key, **arguments}, at

    def steps(self, value: Any, place: Place) -> "list[tuple[str, dict[str, Any], Place]]":
        """(name, arguments, place) of each step of a chain in any of its forms."""
        if isinstance(value, dict) and "paths" in value:
            return [(READ, value, place)]
        if not isinstance(value, list):
            return [self.step(value, place)]
        return [self.step(step, (*place, i)) for i, step in enumerate(value)]

    def step(self, value: Any, place: Place) -> "tuple[str, dict[str, Any], Place]":
        if isinstance(value, str):
            value = {value: None}
        if not isinstance(value, dict) or len(value) != 1:
            found = f"{len(value)} keys" if isinstance(value, dict) else f"{value!r:.80}"
            raise self.document.error(
                place, f"a step is a node's name, or {{name: {{argument: value}}}} with one name; got {found}"
            )
        (name, arguments), *_ = value.items()
        place = (*place, name)
        if name == "use":
            return name, arguments, place
        if name not in self.kinds and ALIASES.get(name, name) not in self.kinds:
            hint = nearest(name, {*self.kinds, "use"})
            raise self.document.error(place, f"no node is called {name!r:.80}. {hint}")
        if arguments is not None and not isinstance(arguments, dict):
            first = next(iter(self.parameters(name)), "argument")
            raise self.document.error(place, f"arguments go by name: {name}: {{{first}: …}}, got {arguments!r:.80}")
        return name, arguments or {}, place

    def used(self, name: Any, place: Place) -> IndexedDataPipe:
        if not isinstance(name, str) or name not in self.shared:
            hint = nearest(str(name), self.shared) if self.shared else "the recipe has no 'shared'"
            raise self.document.error(place, f"nothing shared is called {name!r:.80}. {hint}")
        if name not in self.built:
            self.built[name] = None
            self.built[name] = self.chain(self.shared[name], ("shared", name))
        node = self.built[name]
        if node is None:
            raise self.document.error(place, f"{name!r} uses itself")
        return node

    # Nodes --------------------------------------------------------------------------------------------

    def kind(self, name: str) -> "type[IndexedDataPipe]":
        return self.kinds.get(name) or self.kinds[ALIASES[name]]

    def parameters(self, name: str) -> "dict[str, inspect.Parameter]":
        """What a recipe can say of a node, by name: the constructor's parameters without its children."""
        found = list(constructor_of(self.kind(name)).parameters.values())
        named = found[1:] if takes_children(self.kind(name))[0] else found
        return {p.name: p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def node(
        self,
        name: str,
        given: "dict[str, Any]",
        place: Place,
        below: "IndexedDataPipe | None",
        steps: "Callable[[], StepTable] | None",
    ) -> IndexedDataPipe:
        kind, parameters = self.kind(name), self.parameters(name)
        takes_one, takes_several = takes_children(kind)
        children = [] if below is None else [below]
        if any("Callable" in str(p.annotation) for p in parameters.values()):
            raise self.document.error(
                place, f"{name} takes a function, which a recipe cannot hold: put it on the loaded graph"
            )
        forks = ("sources", "each") if takes_several else ()
        self.document.mapping(given, place, (*parameters, *forks), f"argument of {name}")
        arguments = {argument: value for argument, value in given.items() if argument not in forks}
        if takes_several and "sources" in given:
            if below is not None:
                raise self.document.error(place, f"{name} has sources, so it begins a chain; a step stands before it")
            children = self.sources(given, place)
        elif "each" in given:
            raise self.document.error((*place, "each"), f"each belongs to the sources of {name}, and there are none")
        if takes_one and not children:
            what = "sources" if takes_several else f"{READ} first"
            raise self.document.error(place, f"{name} begins its chain, but has nothing to take from: {what}")
        if not takes_one and below is not None:
            raise self.document.error(place, f"{name} takes nothing from below: it begins a chain")
        self.fill(arguments, parameters, place, children, steps)
        for argument, parameter in parameters.items():
            if argument not in arguments and parameter.default is parameter.empty:
                raise self.document.error(place, f"{name} needs {argument!r}")
        with self.document.placed(place):
            return kind(*children, **arguments)

    def fill(
        self,
        arguments: "dict[str, Any]",
        parameters: "dict[str, inspect.Parameter]",
        place: Place,
        children: "list[IndexedDataPipe]",
        steps: "Callable[[], StepTable] | None",
    ) -> None:
        """What a recipe says in its own way: paths from its folder on, planned changes by step; and what it never
        says: the topology.
        """
        if "topology" in parameters:
            if "topology" in arguments:
                raise self.document.error(
                    (*place, "topology"),
                    "the topology belongs to the machine, not to the run: load_recipe(..., topology=)",
                )
            if parameters["topology"].default is inspect.Parameter.empty:  # else it is the sharder's
                arguments["topology"], self.dealt = self.topology or Topology(), True
        if "micro_batch_size" in parameters and self.micro_batch_size is not None:
            arguments["micro_batch_size"], self.batched = self.micro_batch_size, True
        for argument, value in arguments.items():
            if "PathLike" in str(parameters[argument].annotation):
                arguments[argument] = self.path(value)
        if "schedule" in parameters and isinstance(arguments.get("schedule"), list):
            with self.document.placed((*place, "schedule")):
                arguments["schedule"] = planned_changes(
                    arguments, [child.name for child in children], steps, self.document, (*place, "schedule")
                )

    def sources(self, given: "dict[str, Any]", place: Place) -> "list[IndexedDataPipe]":
        sources = given["sources"]
        each = self.steps(given.get("each") or [], (*place, "each"))
        at = (*place, "sources")
        if not isinstance(sources, (dict, list)) or not sources:
            raise self.document.error(at, "a mapping of chains by name, or a list of chains was expected")
        if isinstance(sources, dict):
            return [self.chain(chain, (*at, key), key, each) for key, chain in sources.items()]
        return [self.chain(chain, (*at, i), None, each) for i, chain in enumerate(sources)]

    def step_table(self, above: "list[tuple[str, dict[str, Any], Place]]", place: Place) -> StepTable:
        """The steps of the run, for a blend below these steps. Raises where they do not say."""
        for name, arguments, at in above:
            if name in ("batch_samples", "batch"):
                size = arguments.get("global_batch_size")
                if size is None:
                    raise self.document.error(
                        at, "changes planned by step need a global_batch_size here: without one it is the machine's"
                    )
                with self.document.placed(at):
                    return StepTable.of(as_schedule(size, 1))
            if not self.kind(name).trunk:
                raise self.document.error(
                    at, f"{name} stands between the blend and the batches: plan its changes by sample, not by step"
                )
        raise self.document.error(place, "changes planned by step need a batch_samples above this blend")

    # Small things -------------------------------------------------------------------------------------

    def path(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.path(item) for item in value]
        return os.path.join(self.folder, value) if isinstance(value, str) and "://" not in value else value  # noqa: PTH118
