"""Rules about a source's documents, where its files say where those end: their lengths beside the window's, and their
order beside the batches'. At most STRETCHES × EACH lengths of a source are read, the same at every look.
"""

from collections.abc import Iterator

import numpy as np

from .._torch import DataPipe
from ..bound import Once
from ..core import Int64s
from ..permute import Permuter
from ..read import TokenSpace
from ..resize import SequenceResizer
from ..slice import TokenWindows
from .findings import Finding, Look, is_shuffle

__all__ = ["document_lengths", "neighbouring_windows", "window_beside_documents"]

STRETCHES, EACH = 64, 1024
MOST_FILES = 128  # of which document ends are read

DOCUMENTS_A_WINDOW = 16
"""More documents than this in a mean window: most of what a token attends to is of other documents."""

FEW = 64  # documents, of which no order is said
SORTED = 0.5
"""Rank correlation of length and place from which on documents count as sorted. Of documents in no order it is
within 5 / sqrt(n) of 0, 0.02 for the 65,536 that are looked at."""

OF_A_PASS = 8
"""A permute in windows of less than 1 / 8 of a pass leaves the order of the file as it is."""

DOCUMENTS_A_BLOCK = 4
"""Fewer documents than this in what a permute(window=) mixes, and batches hold rows of one document."""


def window_beside_documents(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        if not isinstance(node, TokenWindows) or any(isinstance(above, TokenWindows) for above in look.above(node)):
            continue
        lengths, length = document_lengths(node), node.sequence_length
        if lengths.size and length > DOCUMENTS_A_WINDOW * lengths.mean():
            least = max(1, int(DOCUMENTS_A_WINDOW * lengths.mean()))
            yield Finding(
                look.name(node),
                "short-documents",
                f"a window of {length:,} tokens holds {length / lengths.mean():,.0f} documents of {node.name!r} "
                f"({_middle(lengths)}): most of what a token attends to is of other documents",
                f"attention that ends at document ends, or a sequence_length up to {least:,}, or other documents "
                '(select_documents(score="length", at_least=...))',
            )


def neighbouring_windows(look: Look) -> Iterator[Finding]:
    if any(isinstance(node, Once) for node in look.nodes):
        return
    for node, window in _unmixed(look):
        if not window or window * OF_A_PASS < node.samples_per_pass:
            lengths = document_lengths(node)
            if found := _sorted(look, node, window, lengths) or _one_at_a_time(look, node, window, lengths):
                yield found


def _sorted(look: Look, node: TokenWindows, window: int, lengths: Int64s) -> "Finding | None":
    correlation = rank_correlation(lengths)
    if lengths.size < FEW or abs(correlation) < SORTED:
        return None
    tenth = max(1, lengths.size // 10)
    how = f"only permute(window={window}) is above it" if window else "no permute is above it"
    return Finding(
        look.name(node),
        "neighbouring-windows",
        f"the documents of {node.name!r} are sorted by length (rank correlation {correlation:+.2f}; median "
        f"{np.median(lengths[:tenth]):,.0f} tokens in the first tenth, {np.median(lengths[-tenth:]):,.0f} in the "
        f"last), and {how}: batches hold one kind of data at a time",
        "permute(seed=...) without window= over this source",
    )


def _one_at_a_time(look: Look, node: TokenWindows, window: int, lengths: Int64s) -> "Finding | None":
    tokens = window * node.sequence_length
    if not window or not lengths.size or tokens >= DOCUMENTS_A_BLOCK * lengths.mean():
        return None
    enough = int(np.ceil(DOCUMENTS_A_BLOCK * lengths.mean() / node.sequence_length))
    return Finding(
        look.name(node),
        "neighbouring-windows",
        f"permute(window={window}) mixes {tokens:,} tokens of {node.name!r} at a time, in which there are "
        f"{tokens / lengths.mean():.1f} documents ({_middle(lengths)}): batches hold rows of one document",
        f"a window of far more than {enough:,}, or none",
    )


def _middle(lengths: Int64s) -> str:
    return f"median {np.median(lengths):,.0f} tokens, mean {lengths.mean():,.0f}"


def _unmixed(look: Look) -> "Iterator[tuple[TokenWindows, int]]":
    """(windows of tokens, largest permute(window=) above; 0: none) where no full shuffle is above."""
    waiting: list[tuple[DataPipe, int]] = [(look.graph, 0)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        node, window = waiting.pop()
        if (id(node), window) in seen or isinstance(node, SequenceResizer):  # its units are permuted
            continue
        seen.add((id(node), window))
        if isinstance(node, TokenWindows):
            yield node, window
            continue
        if isinstance(node, Permuter) and node.window:
            window = max(window, node.window)
        elif is_shuffle(node):
            continue
        waiting += [(child, window) for child in look.inputs(node)[::-1]]


# Lengths ------------------------------------------------------------------------------------------------------


def document_lengths(node: TokenWindows) -> Int64s:
    """int64 (n,): tokens of the source's documents in its order, of a sample of them spread evenly over the source:
    all, where they are few; empty where its files do not say. Documents that are not chosen are left out.
    """
    space = getattr(node, "reader", None)
    nothing = np.empty(0, np.int64)
    if not isinstance(space, TokenSpace):
        return nothing
    space = space.table or space
    files = [(file, first) for file, first in zip(space.files, space.first_tokens.tolist(), strict=False)]
    files = [(file, first) for file, first in files if file.documents]
    if len(files) > MOST_FILES:
        files = [files[i] for i in np.linspace(0, len(files) - 1, MOST_FILES).astype(np.int64)]
    stops = np.cumsum([0] + [file.documents for file, _ in files])
    total = int(stops[-1])
    if total <= STRETCHES * EACH:
        stretches = [(0, total)]
    else:
        stretches = [(a, a + EACH) for a in np.linspace(0, total - EACH, STRETCHES).astype(np.int64).tolist()]
    found = [nothing]
    for low, high in stretches:
        for (file, first), begin, end in zip(files, stops[:-1].tolist(), stops[1:].tolist(), strict=True):
            a, b = max(low, begin) - begin, min(high, end) - begin
            if a < b:
                stored = file.document_ends()[max(a - 1, 0) : b].astype(np.int64)
                ends = stored if a else np.concatenate([np.zeros(1, np.int64), stored])
                found.append(np.diff(space.places_below(first + ends)))
    lengths = np.concatenate(found)
    return lengths[lengths > 0]


def rank_correlation(values: Int64s) -> float:
    """Spearman's, of (n,) values with their place; equal values share their mean rank. 0 where all are equal."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    if counts.size < 2:
        return 0.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which.reshape(-1)]
    return float(np.corrcoef(np.arange(values.size), ranks)[0, 1])
