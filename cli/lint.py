"""What is wrong with a graph before it runs: a finding a node, and the change to make.

    tokenpipe lint train.py:graph                 a variable of a script: a graph, or a DataLoader2
    tokenpipe lint train.py:training_graph        or a function that gives one, without arguments
    tokenpipe lint my.package.data:loader --dp 8  of a module, as 8 ranks share it
    tokenpipe lint run.yaml --serious             a recipe; only what gives ranks wrong data

A script is imported: what stands below `if __name__ == "__main__":` does not run. Exit status: 0 nothing found, 1
something found (with --serious: something serious), 2 wrong usage, or a graph that cannot be had.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ..datapipes import Finding, Topology, lint, load_recipe
from ..datapipes._torch import IterDataPipe, MapDataPipe
from ..datapipes.core import as_count
from ..datapipes.errors import ConfigurationError, TokenpipeError
from ..reading_services import DataLoader2
from .tables import escaped

__all__ = ["add_arguments", "run"]

NOTHING, FOUND, WRONG = 0, 1, 2

RECIPES = (".yaml", ".yml")
LAYERS = ("datapipes", "adapters", "reading_services", "cli")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="SCRIPT_OR_MODULE:OBJECT", help="train.py:graph, my.module:make_graph, or a recipe (run.yaml)"
    )
    parser.add_argument("--dp", type=int, metavar="N", help="ranks that share the data (what the graph says)")
    parser.add_argument("--serious", action="store_true", help="only what gives ranks wrong data")
    parser.add_argument("--json", action="store_true", help="a list of objects: node, rule, message, change, serious")


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.dp is not None:
            as_count("--dp", arguments.dp)
        graph = _graph(arguments.what, arguments.dp)
        findings = lint(graph, dp_size=arguments.dp)
    except (TokenpipeError, OSError) as error:  # 1 says that something was found
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"tokenpipe lint: {error}{notes}", file=sys.stderr)
        return WRONG
    findings = [finding for finding in findings if finding.serious or not arguments.serious]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return FOUND if findings else NOTHING


def _print(findings: "list[Finding]") -> None:
    for finding in findings:
        for line in str(finding).splitlines():
            print("    " * line.startswith(" ") + escaped(line.strip()))
    serious = sum(finding.serious for finding in findings)
    count = f"{len(findings)} finding{'s' * (len(findings) > 1)}" if findings else "nothing found"
    print(count + (f", {serious} serious" if serious else ""))


def _graph(what: str, dp: "int | None") -> Any:
    """The graph that the command line names. Raises ConfigurationError, whatever a recipe raises."""
    if what.endswith(RECIPES):
        return load_recipe(what, Topology(dp_size=dp or 1))
    place, _, name = what.rpartition(":")
    if not place:
        raise ConfigurationError(f"{what!r} names no object: {what}:OBJECT, a graph or a function that gives one")
    module = _imported(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{place} has no {name!r}{_others(module)}")
        found = getattr(found, part)
    if not _is_graph(found) and callable(found):
        if needed := [parameter.name for parameter in _parameters(found) if _is_required(parameter)]:
            raise ConfigurationError(f"{what} needs arguments ({', '.join(needed)}): a function without would do")
        found = _called(found, what)
    if not _is_graph(found):
        raise ConfigurationError(f"{what} is no graph and no loader, but {type(found).__name__}{_others(module)}")
    return found.datapipe if isinstance(found, DataLoader2) else found


def _is_graph(value: Any) -> bool:
    return isinstance(value, (IterDataPipe, MapDataPipe, DataLoader2))


def _parameters(function: Any) -> "list[inspect.Parameter]":
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of compiled code
        return []


def _is_required(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not several


def _others(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if _is_graph(value)]
    return f"; its graphs are {', '.join(names[:8])}" if names else ""


def _imported(place: str) -> ModuleType:
    """A script by its path, or a module by its name, with its folder on the import path as if it were started."""
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return _called(lambda: importlib.import_module(place), place)
    path = Path(place).resolve()
    if not path.is_file():
        raise ConfigurationError(f"{place}: there is no such script")
    name = path.stem if path.stem not in sys.modules else f"linted_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{place}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # its functions are looked for there when they are pickled
    _called(lambda: spec.loader.exec_module(module), place)
    return module


def _called(function: Any, what: str) -> Any:
    """What a function of the user's gives; what it prints goes to stderr.

    Raises ConfigurationError with the exception that it raised, and where.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        told = f"{type(error).__name__}: {said}".splitlines()[0]
        raise ConfigurationError(f"{what}: {told}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """The last place that is the user's own: not of this library, of another one, or of Python."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    library, ours = sysconfig.get_path("stdlib"), Path(__file__).resolve().parent.parent
    foreign = (library, "<frozen", *(f"{ours / layer}{os.sep}" for layer in LAYERS))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = os.path.realpath(frame.filename) if Path(frame.filename).is_file() else frame.filename
        if not file.startswith(foreign) and "site-packages" not in file:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
