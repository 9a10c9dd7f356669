"""What the library shows: its names, exceptions, typed methods, docstrings, and the way its imports run."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenpipe import adapters, cli, datapipes, reading_services
from tokenpipe.datapipes import (
    IndexedDataPipe,
    StreamingDataPipe,
    audit,
    errors,
    formats,
    linting,
    plan,
    recipes,
    streaming,
    tokenize,
)
from tokenpipe.datapipes._torch import IterDataPipe, MapDataPipe
from tokenpipe.datapipes.fluent import ALIASES
from tokenpipe.reading_services import workers

ROOT = Path(__file__).parent.parent
LAYERS = ["datapipes", "adapters", "reading_services", "cli"]
PACKAGES = [datapipes, adapters, reading_services, cli]


def modules() -> list[str]:
    return [
        f"{package.__name__}.{module.name}"
        for package in [*PACKAGES, audit, formats, linting, plan, recipes, streaming, tokenize, workers]
        for module in pkgutil.iter_modules(package.__path__)
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=LAYERS)
def test_public_names_are_sorted_and_there(package):
    names = package.__all__
    assert names == sorted(names, key=lambda name: (name[0].islower(), not name.isupper(), name))
    for name in names:
        assert getattr(package, name).__doc__, f"{name} has no docstring"


def test_every_exception_is_also_the_builtin_that_a_caller_would_catch():
    builtins = (ValueError, TypeError, IndexError, OSError, RuntimeError, UserWarning)
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, builtins) or kind is errors.TokenpipeError
        assert issubclass(kind, errors.TokenpipeError) or issubclass(kind, UserWarning)
        assert name in (errors.__doc__ or ""), f"{name} is missing from the tree at the top of errors.py"


def test_imports_run_one_way():
    for number, layer in enumerate(LAYERS):
        above = LAYERS[number + 1 :]
        for path in (ROOT / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    assert not any(part in above for part in (node.module or "").split(".")), path
                    assert "tokenpipe" not in (node.module or "").split("."), f"{path}: imports are relative"


def stub_arguments(function: ast.FunctionDef) -> list[tuple[str, str]]:
    given = function.args
    positional = [(a.arg, ast.unparse(d) if d else "") for a, d in _with_defaults(given.args[1:], given.defaults)]
    star = [("*" + given.vararg.arg, "")] if given.vararg else []
    keyword = [(a.arg, ast.unparse(d) if d else "") for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return positional + star + keyword


def _with_defaults(arguments, defaults):
    return zip(arguments, [None] * (len(arguments) - len(defaults)) + list(defaults), strict=True)


def test_every_functional_name_has_its_typed_method():
    tree = ast.parse((ROOT / "datapipes/fluent.py").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    aliases = {
        node.targets[0].id: node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name)
    }
    assert aliases == ALIASES
    for written, functions, kind in (
        ("FluentMethods", MapDataPipe.functions, IndexedDataPipe),
        ("FluentStreams", IterDataPipe.functions, StreamingDataPipe),
    ):
        methods = [node for node in ast.walk(classes[written]) if isinstance(node, ast.FunctionDef)]
        stubs = {node.name: stub_arguments(node) for node in methods}
        registered = {
            name: node
            for name, function in functions.items()
            if isinstance(node := function.args[0], type)
            and issubclass(node, kind)
            and node.__module__.startswith("tokenpipe.")
        }
        assert stubs.keys() == registered.keys()
        for name, node in registered.items():
            _, _, *parameters = inspect.signature(node.__init__).parameters.values()
            expected = [
                (
                    f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name,
                    "" if p.default is p.empty else repr(p.default),
                )
                for p in parameters
            ]
            found = [(argument, default.replace('"', "'")) for argument, default in stubs[name]]
            assert found == expected, name


@pytest.mark.parametrize("module", modules())
def test_doctests(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("module", modules())
def test_every_module_says_what_it_is_for(module):
    path = ROOT / module.removeprefix("tokenpipe.").replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert ast.get_docstring(ast.parse(path.read_text())), path


def test_importing_the_library_does_not_import_numba_and_touches_no_random_state():
    program = (
        "import random, numpy, torch, sys\n"
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "import tokenpipe.datapipes, tokenpipe.adapters, tokenpipe.reading_services\n"
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "assert before == after\n"
        "assert not {'numba', 'matplotlib', 'yaml', 'tokenizers', 'torchdata'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "pip install -e '.[examples]' && python examples/pretrain.py" in text
    assert "pip install -e '.[test]' && pytest" in text
