"""Rows for a terminal, aligned, and for machines, a JSON object a line."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Table", "escaped", "print_json"]


class Table:
    """Prints rows under a head as they come; a column grows where a later row needs it.

    Args:
        head: the columns' names. right: those that are aligned to the right.
    """

    def __init__(self, head: Sequence[str], right: Iterable[str] = ()) -> None:
        self._head, self._right = list(head), frozenset(right)
        self._widths = [len(name) for name in head]
        self._begun = False

    def print(self, rows: "Iterable[tuple[Sequence[Any], Sequence[str]]]") -> None:
        """Prints (cells, lines below them) …, all of them aligned with one another."""
        block = [([escaped(str(cell)) for cell in cells], below) for cells, below in rows]
        for cells, _ in block:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        if not self._begun:
            self._line(self._head)
            self._begun = True
        for cells, below in block:
            self._line(cells)
            for line in below:
                print(f"    {line}")

    def _line(self, cells: Sequence[str]) -> None:
        aligned = [
            cell.rjust(width) if name in self._right else cell.ljust(width)
            for name, cell, width in zip(self._head, cells, self._widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def escaped(text: str) -> str:
    """Text as a terminal may show it, on one line: control characters, direction marks and backslashes as escapes.

    >>> print(escaped("a\\n\\x1b[31mb é"))
    a\\n\\x1b[31mb é
    """
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def print_json(record: "dict[str, Any]") -> None:
    """One line, ASCII alone, so that nothing in it acts on a terminal."""
    sys.stdout.write(json.dumps(record) + "\n")
