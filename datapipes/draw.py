"""A graph as a picture: by graphviz's program `dot`, where it is installed, or as Mermaid text, which Markdown renders.

Arrows go the way of the data, from the files to the batches. A box is a node:

    permute                   its functional name
    seed=7                    its settings
    1,953 samples an epoch    its notes, and those of the caller
    [timeout 5 s]             what adapters put around it
    blend.0.permute           the name that errors, profiles and states have for it

Texts of the graph (names of files, settings, notes) may hold any characters: they are escaped for each language where
the text is made, and nowhere else.
"""

import math
import numbers
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._torch import DataPipe
from .atomic import check_replaceable, replacing
from .errors import ArgumentTypeError, ConfigurationError, DrawingError
from .names import named_nodes
from .tree import MOST_CHILDREN, about, branches_of, check_graph, printable

__all__ = ["Drawing", "draw"]

BY_DOT = {".svg": "svg", ".png": "png", ".pdf": "pdf"}
AS_TEXT = (".dot", ".gv", ".mmd", ".md")
DOT_SECONDS = 60.0

MOST_NODES = 150  # boxes of a picture, beyond which more branches are folded: what can still be read, and Mermaid takes
MOST_ACROSS = 5  # sources side by side, beyond which a picture lies down
WIDEST = 36  # characters of a line
MOST_LINES = 12  # of one text in a box

# Colours: black on any of them has a contrast of at least 6.5, and each step towards hot is darker, so that it is
# seen without colours too.
HEAT = ((255, 247, 236), (253, 200, 140), (239, 101, 72))
FILLS = {"source": "#e3eefa", "node": "#ffffff", "folded": "#f2f2f2"}
FAINT = "#555555"  # of names
AROUND = "#1f4e8c"  # of adapters' labels
LINES = "#5b6b7b"


@dataclass(frozen=True)
class Box:
    """A node to draw, or several that are not."""

    key: str
    kind: str
    title: str
    body: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    name: str = ""
    heat: "float | None" = None

    @property
    def fill(self) -> str:
        return FILLS[self.kind] if self.heat is None else heat_colour(self.heat)


@dataclass(frozen=True, repr=False)
class Drawing:
    """A graph's picture: `str()` is its Mermaid text, and a notebook shows it."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[str, str, str], ...]
    """(from, to, label): keys of boxes."""
    direction: str
    """TB: from top to bottom, or LR: from left to right."""

    def __repr__(self) -> str:
        return f"<Drawing of {len(self.boxes)} boxes: str() is its Mermaid text, .dot its graphviz source>"

    def __str__(self) -> str:
        return self.mermaid

    @property
    def dot(self) -> str:
        """Source for graphviz."""
        font = 'fontname="Helvetica,Arial,sans-serif"'
        lines = [
            "digraph tokenpipe {",
            f'  graph [rankdir={self.direction}, bgcolor="#ffffff", nodesep=0.25, ordering=in, ranksep=0.4, pad=0.15]',
            f'  node [shape=box, style="rounded,filled", {font}, fontsize=12, fontcolor="#000000", color="{LINES}", '
            'margin="0.16,0.09"]',
            f'  edge [{font}, fontsize=11, fontcolor="#000000", color="{LINES}", arrowsize=0.8]',
        ]
        for box in self.boxes:
            style = ', style="rounded,filled,dashed"' if box.kind == "folded" else ""
            lines.append(f'  {box.key} [fillcolor="{box.fill}"{style}, label=<{_dot_label(box)}>]')
        for start, end, label in self.arrows:
            lines.append(f"  {start} -> {end}" + (f" [label=< {_for_dot(label)} >]" if label else ""))
        return "\n".join([*lines, "}"]) + "\n"

    @property
    def mermaid(self) -> str:
        """Mermaid's flowchart, which Markdown renders on code hosts and in notebooks."""
        lines = [f"flowchart {self.direction}"]
        for box in self.boxes:
            texts = [box.title, *box.body, " ".join(f"[{label}]" for label in box.labels), box.name]
            text = "<br/>".join(_for_mermaid(text) for text in texts if text)
            lines.append(f'  {box.key}["{text}"]:::{box.kind}')
        for start, end, label in self.arrows:
            lines.append(f"  {start} -->" + (f'|"{_for_mermaid(label)}"|' if label else "") + f" {end}")
        for kind, fill in FILLS.items():
            dashed = ",stroke-dasharray:4" if kind == "folded" else ""
            lines.append(f"  classDef {kind} fill:{fill},stroke:{LINES},color:#000000{dashed}")
        lines += [f"  style {box.key} fill:{box.fill}" for box in self.boxes if box.heat is not None]
        return "\n".join(lines) + "\n"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> "dict[str, str]":
        """What a notebook shows: SVG where graphviz is installed, else Mermaid."""
        try:
            svg = _by_dot(self.dot, "svg").decode("utf-8")
        except DrawingError:
            return {"text/markdown": _fenced(self.mermaid), "text/plain": self.mermaid}
        return {"image/svg+xml": svg[svg.index("<svg") :], "text/plain": repr(self)}


def draw(
    graph: DataPipe,
    path: "str | os.PathLike[str] | None" = None,
    *,
    heat: "Mapping[str, float] | None" = None,
    notes: "Mapping[str, str] | None" = None,
) -> Drawing:
    """The graph as a picture: names, settings, counts, shares, and what adapters put around nodes.

    Indexed graphs, streams, torch's own datapipes and anyone's. What several nodes read from is drawn once. Of many
    branches the middle ones are folded into one box, but not the hottest.

    Args:
        path: a file to write: .svg, .png, .pdf (these need graphviz's program `dot`), .dot or .gv (its source), .mmd
            (Mermaid) or .md (Mermaid in a fence).
        heat: {node name: 0.0 … 1.0} colours nodes from pale to hot.
        notes: {node name: text} is said in the node, too; of one line or several.

    Names are those of the tree's references, errors and profiles ("blend.0.permute").

    Raises ConfigurationError for an ending that is none of these, for a name that no node has and for other heat;
    ArgumentTypeError; DrawingError where `dot` is missing or fails; OSError where the file cannot be written.

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> print(draw(IterableWrapper(range(10)).batch(2)))
    flowchart TB
      n0["batch<br/>batch_size=2"]:::node
      n1["IterableWrapper<br/>10 items<br/>iterablewrapper"]:::source
      n1 --> n0
      classDef source fill:#e3eefa,stroke:#5b6b7b,color:#000000
      classDef node fill:#ffffff,stroke:#5b6b7b,color:#000000
      classDef folded fill:#f2f2f2,stroke:#5b6b7b,color:#000000,stroke-dasharray:4
    """
    ending = _checked_ending(path)
    names = {id(node): (node, name) for node, name in named_nodes(check_graph(graph))}
    known = {name for _, name in names.values()}
    drawing = _drawn(graph, names, _checked_heat(heat or {}, known), _checked_notes(notes or {}, known))
    if path is not None:
        if ending in BY_DOT:
            content = _by_dot(drawing.dot, BY_DOT[ending])
        else:
            text = drawing.dot if ending in (".dot", ".gv") else drawing.mermaid
            content = (_fenced(text) if ending == ".md" else text).encode("utf-8")
        with replacing(path) as file:
            file.write(content)
    return drawing


def _checked_ending(path: Any) -> str:
    if path is None:
        return ""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path is a file's name, got {path!r:.80} ({type(path).__name__})")
    ending = Path(path).suffix.lower()
    if ending not in BY_DOT and ending not in AS_TEXT:
        raise ConfigurationError(
            f"path is {os.fspath(path)!r}; names that end in {', '.join((*BY_DOT, *AS_TEXT))} would do"
        )
    check_replaceable(path)
    if ending in BY_DOT:
        _dot_program()
    return ending


def _checked_heat(heat: Any, known: "set[str]") -> "dict[str, float]":
    _check_names("heat", heat, known)
    for name, value in heat.items():
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise ArgumentTypeError(f"heat of {name!r} is a number, got {value!r:.80}")
        if not 0 <= float(value) <= 1:
            raise ConfigurationError(f"heat of {name!r} is {value}; 0.0 (pale) … 1.0 (hot) would do")
    return {name: float(value) for name, value in heat.items()}


def _checked_notes(notes: Any, known: "set[str]") -> "dict[str, str]":
    _check_names("notes", notes, known)
    for name, text in notes.items():
        if not isinstance(text, str):
            raise ArgumentTypeError(f"the note of {name!r} is a text, got {text!r:.80}")
    return dict(notes)


def _check_names(what: str, given: Any, known: "set[str]") -> None:
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"{what} must be a dict by node name, got {given!r:.80}")
    if unknown := [name for name in given if name not in known]:
        some = ", ".join(sorted(known)[:8]) + (", …" if len(known) > 8 else "")
        raise ConfigurationError(f"{what} names {unknown[0]!r:.80}, which is no node of this graph; its nodes: {some}")


# What is drawn --------------------------------------------------------------------------------------------


def _drawn(
    graph: DataPipe, names: "dict[int, tuple[DataPipe, str]]", heat: "dict[str, float]", notes: "dict[str, str]"
) -> Drawing:
    branches = {
        key: [(id(child), name, share) for child, name, share in branches_of(node)] for key, (node, _) in names.items()
    }
    hottest = max(heat, key=lambda name: heat[name], default=None)
    kept = _way_to(next((key for key, (_, name) in names.items() if name == hottest), None), id(graph), branches)
    for most in (MOST_CHILDREN, 10, 6, 3, 1):
        shown = _shown(id(graph), branches, kept, most)
        if len(shown) <= MOST_NODES:
            break
    keys = {key: f"n{i}" for i, key in enumerate(shown)}
    boxes, arrows = [], []
    for key, open_ones in shown.items():
        node, name = names[key]
        boxes.append(_box(keys[key], node, name, heat.get(name), notes.get(name, "")))
        folded = [branch for i, branch in enumerate(branches[key]) if i not in open_ones]
        more = [(f"{keys[key]}_more", keys[key], _share(folded))] if folded else []
        into = [(keys[branches[key][i][0]], keys[key], _share([branches[key][i]])) for i in open_ones]
        arrows += [*into[:-1], *more, *into[-1:]]
        if folded:
            below = [names[k][1] for k in _below([child for child, _, _ in folded], branches) if k not in shown]
            hot = max((heat[n] for n in below if n in heat), default=None)
            boxes.append(Box(f"{keys[key]}_more", "folded", f"… {len(folded):,} more", heat=hot))
    across = sum(not open_ones for open_ones in shown.values())
    return Drawing(tuple(boxes), tuple(arrows), "TB" if across <= MOST_ACROSS else "LR")


Branches = dict[int, "list[tuple[int, str, float | None]]"]


def _share(branches: "list[tuple[int, str, float | None]]") -> str:
    """What stands at an arrow: the source's name, if it is one, and the share."""
    shares = [share for _, _, share in branches if share is not None]
    return f"{branches[0][1] if len(branches) == 1 else ''} {math.fsum(shares):.2%}".strip() if shares else ""


def _way_to(target: "int | None", root: int, branches: Branches) -> "set[tuple[int, int]]":
    """The branches, (node, index), of a way from the root down to a node."""
    above: dict[int, tuple[int, int]] = {}
    waiting = [root]
    while waiting:
        key = waiting.pop()
        for i, (child, _, _) in enumerate(branches[key]):
            if child != root and child not in above:
                above[child] = (key, i)
                waiting.append(child)
    way = set()
    while target in above:
        way.add(above[target])
        target = above[target][0]
    return way


def _shown(root: int, branches: Branches, kept: "set[tuple[int, int]]", most: int) -> "dict[int, list[int]]":
    """{node: indices of its branches} that are drawn, where each shows its first ones, the last, and those kept."""
    shown: dict[int, list[int]] = {}
    waiting = [root]
    while waiting:
        key = waiting.pop()
        if key in shown:
            continue
        last = len(branches[key]) - 1
        shown[key] = [i for i in range(last + 1) if i < most or i == last or (key, i) in kept]
        waiting += [branches[key][i][0] for i in reversed(shown[key])]
    return shown


def _below(keys: "list[int]", branches: Branches) -> "set[int]":
    """These nodes, and all that they read from."""
    found: set[int] = set()
    waiting = [*keys]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += [child for child, _, _ in branches[key]]
    return found


def _box(key: str, node: DataPipe, name: str, heat: "float | None", note: str) -> Box:
    kind, settings, notes, labels = about(node)
    body = [*_wrapped(settings), *_wrapped(notes)]
    for line in note.splitlines()[:MOST_LINES]:
        body += _wrapped(printable(line))
    name = printable(name)
    return Box(
        key=key,
        kind="node" if branches_of(node) else "source",
        title=_shortened(kind),
        body=tuple(body),
        labels=tuple(_shortened(label) for label in labels),
        name="" if name == kind else _shortened(name, 2 * WIDEST),
        heat=heat,
    )


def _wrapped(text: str) -> "list[str]":
    """Lines that fit into a box; of words that do not, paths above all, the end says more than the middle."""
    text = " ".join(_shortened(word) for word in text.split(" "))
    parts = re.split(r"(?<=[:;]) | (?=… )", text) if len(text) > WIDEST else [text]
    lines = [line for part in parts for line in textwrap.wrap(part, WIDEST, break_on_hyphens=False)]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "…"]


def _shortened(text: str, longest: int = WIDEST) -> str:
    return text if len(text) <= longest else f"{text[: longest // 4]}…{text[-(longest - longest // 4 - 1) :]}"


def heat_colour(heat: float) -> str:
    """0.0 … 1.0 as #rrggbb, between the palette's colours in equal steps."""
    place = heat * (len(HEAT) - 1)
    i = min(int(place), len(HEAT) - 2)
    return "#" + "".join(f"{round(a + (b - a) * (place - i)):02x}" for a, b in zip(HEAT[i], HEAT[i + 1], strict=True))


# The two languages ------------------------------------------------------------------------------------------


FOR_ENTITIES = str.maketrans(
    {c: f"&#{ord(c)};" for c in "&<>\"'"}
    | {"\\": "&#92;&#92;"}  # graphviz looks for its own escapes in what XML leaves: \N is the node's key
    | {"]": "&#93;"}  # a line that begins with one is drawn over the next
)


def _for_dot(text: str) -> str:
    """Text in an HTML-like label."""
    return text.translate(FOR_ENTITIES)


def _dot_label(box: Box) -> str:
    around, faint = ("#000000", "#000000") if box.heat is not None else (AROUND, FAINT)
    lines = [f"<b>{_for_dot(box.title)}</b>", *(_for_dot(line) for line in box.body)]
    lines += [f'<font color="{around}">{_for_dot(f"[{label}]")}</font>' for label in box.labels]
    if box.name:
        lines.append(f'<font color="{faint}" point-size="10">{_for_dot(box.name)}</font>')
    return "<br/>".join(lines)


FOR_CODES = re.compile(
    r"[^\w ,.()=/+'…%:-]"  # quotes, brackets, #, ;, {, *, |, ` and whatever else has a meaning somewhere
    r"|(?<![^\W_])_|_(?![^\W_])|(?<=www)\."  # emphasis, links
    r"|^[ +=-]|^\d(?=\d*[.)])"  # a list, a heading, code
    r"|:(?! )",  # Mermaid takes an entity's end away after "style …:…#"
    re.IGNORECASE,
)


TO_PART = re.compile(r"\\(?=n)|\$(?=\$)|:(?=fa-)|ﬂ(?=°)|¶(?=ß)", re.IGNORECASE)
"""A line's end, a formula, an icon, the bounds of a code: what Mermaid looks for again once codes are characters."""


def _for_mermaid(text: str) -> str:
    """Text in a quoted label: all that Mermaid, or the Markdown in it, could take for more becomes an entity code."""
    text = TO_PART.sub("\\g<0>\u2060", text)  # with a word joiner after it, which is not seen
    return FOR_CODES.sub(lambda found: f"#{ord(found[0])};", text)


def _fenced(mermaid: str) -> str:
    return f"```mermaid\n{mermaid}```\n"


# graphviz -----------------------------------------------------------------------------------------------------


def _dot_program() -> str:
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            "graphviz's program `dot` draws this, and is not on the PATH: install graphviz (apt-get install graphviz, "
            "brew install graphviz, conda install graphviz); .mmd and .md (Mermaid) need nothing"
        )
    return program


def _by_dot(source: str, kind: str) -> bytes:
    """The picture in one of dot's formats. Raises DrawingError."""
    command = [_dot_program(), f"-T{kind}", *(["-Gdpi=144"] if kind == "png" else [])]
    try:
        done = subprocess.run(command, input=source.encode("utf-8"), capture_output=True, timeout=DOT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DrawingError(f"`dot` took longer than {DOT_SECONDS:g} s; .mmd (Mermaid) needs no program") from error
    except OSError as error:
        raise DrawingError(f"`dot` cannot be run: {error}; .mmd (Mermaid) needs no program") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "backslashreplace").strip()
        raise DrawingError(f"`dot` ended with {done.returncode}: {said:.500}; .mmd (Mermaid) needs no program")
    return done.stdout
