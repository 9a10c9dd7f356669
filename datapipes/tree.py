"""A graph as text: a node a line, from the batches down to the files."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import IndexedDataPipe

__all__ = ["render_tree"]

LONGEST = 64  # characters of settings shown
MOST_CHILDREN = 20  # branches shown of one node, and the last


def render_tree(graph: "IndexedDataPipe") -> str:
    """The graph's printed tree: names, settings, shares, counts."""
    lines: list[tuple[str, str]] = []
    _render(graph, "", "", "", lines)
    width = max(len(left) for left, note in lines if note)
    return "\n".join(f"{left:<{width}}  {note}" if note else left for left, note in lines)


def _render(node: "IndexedDataPipe", first: str, rest: str, label: str, lines: "list[tuple[str, str]]") -> None:
    lines.append((f"{first}{label}{node_title(node)}", node.notes))
    last = len(node.children) - 1
    shares = getattr(node, "share", None)
    shares = shares if callable(shares) else None  # another node's share is something else
    for i, child in enumerate(node.children):
        if MOST_CHILDREN <= i < last:
            if i == MOST_CHILDREN:
                lines.append((f"{rest}├─ … {last - i:,} more", ""))
            continue
        what = f"{child.name} {shares(i):.2%}: " if shares else ""
        if len(node.children) == 1 and not shares:
            # a chain goes straight down: only forks indent
            _render(child, rest, rest, "", lines)
        else:
            branch, space = ("└─ ", "   ") if i == last else ("├─ ", "│  ")
            _render(child, rest + branch, rest + space, what, lines)


def node_title(node: "IndexedDataPipe") -> str:
    """The node's functional name with its settings."""
    parts = []
    for key, value in node.settings.items():
        if value is None or value is False or value == "" or key in ("weights", "exact", "caps", "lengths", "schedule"):
            continue
        parts.append(f"{key}={value}" if isinstance(value, (str, int)) else f"{key}={json.dumps(value)}")
    text = ", ".join(parts)
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    return f"{node.functional_name}({text})"
