"""Rows that begin where documents begin: which places those are, worked out once and kept.

    documents │ a a a │ b b b b b b b b b b b │ c c c c c c │ d d d d │       S = 4, so rows of S + 1 = 5 tokens:
    rows      │ ▒▒▒▒▒▒▒▒▒ · · · · · · · · · · │ ▒▒▒▒▒▒▒▒▒ · │             the rest of b and of c is left out, and d

A row begins at a document's beginning, the first one at or after the last token of the row before (a row's last token
is only a label, so both may have it). Inside a document a row begins only a whole number of S tokens from the beginning
of a row that began with it, where the document has all of the S + 1 tokens. A row goes on with the documents that
follow; what its end cuts off of the last one is left out, as is a document's rest that fills no row: cropped, as in
loaders that align rows to the beginning-of-text token. So rows are plain windows, in rising order, and every token is a
label at most once an epoch.

Measured on one core of an AMD EPYC: 10^7 documents (log-normal, mean 300 tokens) 0.3–0.6 s and 90 MB; 8 bytes a row.
"""

from collections.abc import Iterator

import numpy as np

from .cache import CachedArrays, Made, cached
from .core import Int64s
from .document_ends import document_places, space_identity
from .kernels import kernel
from .read import TokenSpace

__all__ = ["aligned_rows"]


def aligned_rows(space: TokenSpace, length: int) -> CachedArrays:
    """The places where rows of `length` tokens and a label begin: int64 (rows,), rising. numbers: (rows, tokens that
    stand in some row, 0, 0). Raises ConfigurationError for files without document ends, TokenFileError.
    """
    return cached("aligned", [length, space_identity(space)], lambda: _found(space, length))


def _found(space: TokenSpace, length: int) -> Made:
    rows = covered = 0

    def blocks() -> Iterator[Int64s]:
        nonlocal rows, covered
        function, _ = kernel("aligned_starts")
        state, last = np.zeros(2, np.int64), -1 - length
        for ends in document_places(space, "align='document'"):
            out = np.empty((int(ends[-1]) - int(state[0])) // length + 1, np.int64)
            out = out[: function(ends, length, space.samples_per_pass, state, out)]
            if out.size:
                shared = int((np.diff(out, prepend=last) == length).sum())
                rows, covered, last = rows + out.size, covered + out.size * (length + 1) - shared, int(out[-1])
                yield out

    return Made([(np.int64, blocks())], lambda: (rows, covered))
