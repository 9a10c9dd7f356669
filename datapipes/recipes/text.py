"""Recipes as text: YAML (so JSON too) to plain values with their places, and back.

Only what JSON knows: mappings with string keys, lists, strings, integers, floats, true, false, null. PyYAML is asked
for the tree of the text alone (`compose` with BaseLoader: it constructs nothing); scalars are read here, by JSON's
rules plus bare words. So `no` and `1:30` are strings, `1e-3` is a number, and a tag is an error. PyYAML is imported
when a recipe is first read or written.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentTypeError, RecipeError, TokenpipeError

__all__ = ["Document", "Place", "dump", "nearest", "parse"]

MOST_BYTES = 1 << 20
MOST_VALUES = 200_000
DEEPEST = 60

Place = tuple["str | int", ...]
"""Where a value stands: the keys and indices that lead to it."""

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


@dataclass
class Document:
    """A recipe as plain values, and the line of each where it came from text."""

    value: Any
    name: str = "recipe"
    lines: "dict[Place, int]" = field(default_factory=dict)

    def at(self, place: Place) -> str:
        """ "run.yaml, line 7: graph[0].blend.weights" for a message."""
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        line = next((self.lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in self.lines), None)
        return ": ".join(
            part for part in (self.name if line is None else f"{self.name}, line {line}", f"{path:.200}") if part
        )

    def error(self, place: Place, message: str) -> RecipeError:
        return RecipeError(f"{self.at(place)}: {message}")

    def mapping(
        self, value: Any, place: Place, valid: "Iterable[str] | None" = None, what: str = "key"
    ) -> "dict[str, Any]":
        """`value`, if it is a mapping that has none but the valid keys. Raises RecipeError."""
        if not isinstance(value, dict):
            raise self.error(place, f"a mapping was expected, got {value!r:.80}")
        for key in value:
            if valid is not None and key not in valid:
                raise self.error((*place, key), f"no {what} is called {key!r:.80}. {nearest(key, valid)}")
        return value

    @contextmanager
    def placed(self, place: Place) -> "Iterator[None]":
        """Errors from inside get the place in the recipe, and keep their type."""
        try:
            yield
        except RecipeError:
            raise
        except TokenpipeError as error:
            if len(error.args) == 1 and not str(error.args[0]).startswith(self.name):
                error.args = (f"{self.at(place)}: {error.args[0]}",)
            elif hasattr(error, "add_note"):  # an OSError's number and path stay what they are; Python 3.11
                error.add_note(f"in {self.at(place)}")
            raise
        except Exception as error:  # a node, perhaps not one of ours, that does not check its arguments
            raise self.error(place, f"cannot be built: {error!r:.300}") from error


def nearest(word: str, valid: Iterable[str]) -> str:
    """ "'weights' would do (of: …)": the valid word that looks most like this one, first."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, 1, 0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Valid: {', '.join(names)}"


def parse(recipe: "str | os.PathLike[str] | Mapping[str, Any]") -> "tuple[Document, str]":
    """(the document, the folder it lies in) of a recipe's path, text or values. Raises RecipeError."""
    if isinstance(recipe, Mapping):
        document = Document(None)
        document.value = _copied(recipe, document, (), [MOST_VALUES])
        return document, ""
    if not isinstance(recipe, (str, os.PathLike)):
        raise ArgumentTypeError(f"a recipe is a path, YAML text or a dict, got {type(recipe).__name__}")
    text = os.fspath(recipe)
    if isinstance(recipe, str) and ("\n" in recipe or recipe.lstrip().startswith("{")):
        return _parsed(Document(None), recipe), ""
    path = Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RecipeError(
            f"cannot open the recipe {text!r:.300}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        document = _parsed(Document(None, path.name), data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{text}: a recipe is UTF-8 text: {error}") from error
    return document, os.path.dirname(text)  # noqa: PTH120  # "" beside us, so that paths stay as they are said


def _parsed(document: Document, text: str) -> Document:
    if len(text) > MOST_BYTES:
        raise RecipeError(f"{document.name}: a recipe has at most {MOST_BYTES} bytes; lists of data belong into files")
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{document.name}{line}: no YAML: {error.problem or error.context}") from error
    except RecursionError:
        raise RecipeError(f"{document.name}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: PyYAML, of an escape beyond Unicode
        raise RecipeError(f"{document.name}: no YAML: {error!s:.200}") from error
    if root is None:
        raise RecipeError(f"{document.name}: the recipe is empty")
    document.value = _constructed(root, document, (), [MOST_VALUES])
    return document


def _checked(document: Document, place: Place, budget: "list[int]") -> None:
    budget[0] -= 1
    if len(place) > DEEPEST:
        raise document.error(place[:6], f"nested more than {DEEPEST} deep")
    if budget[0] < 0:
        raise document.error(place, f"more than {MOST_VALUES} values, counting each alias")


def _string(text: str, document: Document, place: Place) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise document.error(place, f"{text!r:.80} is no Unicode text") from None
    return text


def _constructed(node: Any, document: Document, place: Place, budget: "list[int]") -> Any:
    document.lines.setdefault(place, node.start_mark.line + 1)
    _checked(document, place, budget)
    if node.tag not in _TAGS:
        raise document.error(place, f"tags ({node.tag:.80}) have no place in a recipe: plain values only")
    if node.id == "sequence":
        return [_constructed(child, document, (*place, i), budget) for i, child in enumerate(node.value)]
    if node.id == "scalar":
        return _string(node.value, document, place) if node.style else _scalar(node.value, document, place)
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.id != "scalar" or key.tag not in _TAGS:
            raise document.error(place, f"line {key.start_mark.line + 1}: a key must be a plain string")
        name = _string(key.value, document, place)
        if name in found:
            first = document.lines[(*place, name)]
            raise document.error(place, f"the key {name!r:.80} stands twice: lines {first}, {key.start_mark.line + 1}")
        document.lines[(*place, name)] = key.start_mark.line + 1
        found[name] = _constructed(value, document, (*place, name), budget)
    return found


def _scalar(text: str, document: Document, place: Place) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 60:
            raise document.error(place, f"the number {text:.20}… has {len(text)} digits")
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return _string(text, document, place)


def _copied(value: Any, document: Document, place: Place, budget: "list[int]") -> Any:
    """A recipe given as values, checked as text would be."""
    _checked(document, place, budget)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise document.error(place, f"a key must be a string, got {key!r:.80}")
        return {
            _string(key, document, place): _copied(item, document, (*place, key), budget) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copied(item, document, (*place, i), budget) for i, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return _string(value, document, place)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise document.error(place, f"plain values only, got {type(value).__name__}")


def dump(value: Any) -> str:
    """Plain values as YAML that `parse` reads back: innermost lists and mappings on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        """Quotes what `_scalar` would not take for the string that it is."""
        bare = text in _WORDS or _INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if bare else None)

    Dumper.add_representer(str, represent)
    return yaml.dump(value, Dumper=Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=110)
