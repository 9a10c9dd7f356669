"""How far the tokenising is: a bar by bytes of input, and what the summary says of the work."""

import time
from types import TracebackType
from typing import Any

from .pieces import Piece

__all__ = ["Progress"]


class Progress:
    """The bar; called with (bytes, tokens) as they are done.

    Args:
        total: bytes of input. shown: None: where stderr is a terminal.
    """

    def __init__(self, total: int, shown: "bool | None") -> None:
        from tqdm import tqdm

        disable = None if shown is None else not shown  # None: no bar where stderr is no terminal
        how: Any = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "disable": disable}
        self.total = total
        self.bar = tqdm(total=total, desc="tokenising", **how)
        self.began = time.perf_counter()
        self.tokens = self.kept = self.pieces = self.empty = self.text_bytes = 0

    def __call__(self, done: int, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens / (time.perf_counter() - self.began):,.0f} tokens/s", refresh=False)
        self.bar.update(done)

    def keep(self, size: int) -> None:
        """What is there already: done, but not by this run, so it is no speed."""
        self.kept += 1
        if not self.bar.disable:
            self.bar.initial += size
        self.bar.update(size)

    def count(self, piece: Piece) -> None:
        self.pieces += 1
        self.empty += piece.empty
        self.text_bytes += piece.text_bytes

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if kind is None:
            self.bar.update(self.total - self.bar.n)  # what makes no document: blank lines
        self.bar.close()
