"""Which documents of a source are read: by a keyed hash, a score beside the files, or a list.

    file   │ doc 0 │ doc 1 │ doc 2 │ doc 3 │ doc 4 │        chosen: 0, 1, 3
    pieces │ ───────────── │       │ ───── │                neighbours are one piece; windows are cut from the
    space  │ 0 … tokens of 0 and 1 │ … of 3 │               pieces end to end, so every input *and* every label
                                                            is a token of a chosen document

The rules are evaluated once, when the graph is built, a million documents at a time: O(documents) time, and memory of
two int64 a piece (never more than documents). Measured on one core of an AMD EPYC, with document ends in the page
cache: 10^6 documents take TIME6 and MEM6, 10^7 take TIME7 and MEM7 (a share of one half, the worst case).
"""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._torch import functional_datapipe
from .core import IndexedDataPipe, Int64s, Unpickled, as_count, as_numbers
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenFileError
from .fingerprint import file_digest
from .formats import TokenLayout
from .permute import derive_key, mix64
from .read import Pieces, TokenReader, TokenSpace, as_name

__all__ = ["DocumentSelector", "Overlap", "overlap", "split_by_score"]

CHUNK = 1 << 20  # documents looked at in one go
BY = ("number", "id")
_SCORE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ODD = np.uint64(0x9E3779B97F4A7C15)


@functional_datapipe("select_documents")
class DocumentSelector(TokenSpace):
    """The token space of chosen documents, in the source's order (functional: `select_documents`). Before the slice.

    One of three rules; for several at once, one selector over another:

        share=(lo, hi), seed=, by=    a keyed hash of each document, as a fraction in [0, 1), is in [lo, hi). So
                                      (0, 0.1) and (0.1, 1) have no document in common. By its number in the source
                                      (then the source's name is part of the key), or by its id: an id has one fate
                                      in all sources, whatever they are called.
        score=, at_least=, below=     its score is in [at_least, below); one bound may be left out. "length" is its
                                      number of tokens; any other name is that of a sidecar "<token file>.<score>.npy":
                                      1-D, a number a document. Compared exactly, as real numbers.
        documents=                    its number in the source is in this list.

    Numbers of documents and tokens are the source's, also above another selector and in a `part` of a reader.

    Args:
        datapipe: a TokenReader or another selector, over files that store document ends.
        share: (lo, hi), or hi alone. seed: 0 … 2**63 − 2. by: "number" or "id" (from the ids beside the files).
        name: what a blend calls this source; left out, as below. Two sources of one blend need two names.

    Raises ConfigurationError for a rule that cannot be used, files without document ends, or where no document is
    chosen; TokenFileError for a sidecar that is missing, damaged, not of one number a document, or not a number
    somewhere (nan); OutOfRangeError for a document number that the source does not have.
    """

    functional_name = "select_documents"

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        share: "float | tuple[float, float] | Sequence[float] | None" = None,
        seed: "int | None" = None,
        by: str = "number",
        score: "str | None" = None,
        at_least: "float | None" = None,
        below: "float | None" = None,
        documents: "Sequence[int] | np.ndarray | None" = None,
        name: str = "",
    ) -> None:
        super().__init__(datapipe)
        self.given_name = as_name(name) if name else ""
        given = [
            what for what, value in (("share", share), ("score", score), ("documents", documents)) if value is not None
        ]
        if len(given) != 1:
            raise ConfigurationError(
                f"select_documents takes one of share=, score= or documents=, got {' and '.join(given) or 'none'}; "
                "for several rules at once put one selector over another"
            )
        if seed is not None and share is None:
            raise ConfigurationError("seed= belongs to share=")
        if (at_least is not None or below is not None) and score is None:
            raise ConfigurationError("at_least= and below= belong to score=")
        if by not in BY or (by != "number" and share is None):
            raise ConfigurationError(f"by is {by!r}; with share= one of {', '.join(BY)} would do")
        self.by = by
        self.share = None if share is None else _as_share(share)
        self.seed = None if share is None else as_count("seed", seed, 0)
        self.score, self.at_least, self.below = score, at_least, below
        if score is not None:
            _check_score(score, at_least, below)
        self.documents = None if documents is None else np.unique(as_numbers(documents))
        self._found, self._gather = Unpickled(), Unpickled()
        self._digest = ""
        self.check()

    def check(self) -> None:
        if not isinstance(self.datapipe, TokenSpace):
            raise ArgumentTypeError(
                f"select_documents takes a TokenReader or another selector, got {type(self.datapipe).__name__}: "
                "documents are chosen before windows are cut"
            )
        if self._found.value is None or self._found.value[0] is not self.datapipe:
            self._found, self._gather = Unpickled(), Unpickled()
            pieces, self.documents_chosen, self.documents_below = self._select()
            self._tokens, self._digest = int(pieces.first[-1]), _digest(pieces)
            self._found.value = self.datapipe, pieces

    # What it is -----------------------------------------------------------------------------------------

    @property
    def origin(self) -> TokenReader:
        return self.datapipe.origin

    @property
    def name(self) -> str:
        return self.given_name or self.datapipe.name

    @property
    def settings(self) -> dict[str, Any]:
        given = {
            "share": None if self.share is None else list(self.share),
            "seed": self.seed,
            "by": self.by if self.by != "number" else None,
            "score": self.score,
            "at_least": self.at_least,
            "below": self.below,
            "documents": None if self.documents is None else self.documents.tolist(),
            "name": self.given_name or None,
        }
        return {key: value for key, value in given.items() if value is not None}

    @property
    def order_settings(self) -> dict[str, Any]:
        """With what was chosen, so that another sidecar, other ids or other document ends are another order."""
        settings = self.settings
        settings.pop("documents", None)
        return {**settings, "chosen": self._digest}

    @property
    def notes(self) -> str:
        return f"{self.documents_chosen:,} of {self.documents_below:,} documents: {self._tokens:,} tokens"

    @property
    def samples_per_pass(self) -> int:
        return self._tokens

    @property
    def pieces(self) -> Pieces:
        if self._found.value is None:  # in another process
            pieces, _, _ = self._select()
            if _digest(pieces) != self._digest:
                raise TokenFileError(
                    f"source {self.name!r}: other documents would be chosen now than when the graph was built; its "
                    "scores, ids or document ends were written to"
                )
            self._found.value = self.datapipe, pieces
        return self._found.value[1]

    def route(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        space: Any = self.datapipe
        return np.zeros(numbers.size, np.int64), space.places_of(self.source_numbers(numbers))

    def unroute(self, source: int, numbers: Int64s) -> Int64s:
        space: Any = self.datapipe
        return self.places_of(space.source_numbers(numbers))

    def source_bound(self, source: int, hi: int) -> int:
        return int(self.route(np.array([min(hi, self.end) - 1], np.int64))[1][0]) + 1 if hi > 0 else 0

    # The choice -----------------------------------------------------------------------------------------

    def _select(self) -> tuple[Pieces, int, int]:
        """(the pieces, documents chosen, documents that the space below has)."""
        rules: list[DocumentSelector] = []
        node: Any = self
        while isinstance(node, DocumentSelector):
            rules.append(node)
            node = node.datapipe
        reader: TokenReader = node
        starts, stops = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        chosen = below = 0
        number = reader.first_document
        for file, first in zip(reader.files, reader.first_tokens.tolist(), strict=False):
            if not file.documents:
                raise ConfigurationError(
                    f"{file.path}: stores no document ends, so documents of source {reader.name!r} cannot be chosen; "
                    "a file from TokenFileWriter or `tokenpipe tokenize` has them"
                )
            sidecars = [rule._sidecar(file) for rule in rules]
            for at, ends in _document_ends(file):
                documents = np.arange(number + at, number + at + ends.size - 1, dtype=np.int64)
                lengths, part = np.diff(ends), slice(at, at + ends.size - 1)
                masks = [
                    rule._mask(file, documents, lengths, None if beside is None else beside[part])
                    for rule, beside in zip(rules, sidecars, strict=True)
                ]
                lower = np.logical_and.reduce(masks[1:]) if len(masks) > 1 else np.ones(documents.size, np.bool_)
                mask = masks[0] & lower
                chosen, below = chosen + int(mask.sum()), below + int(lower.sum())
                edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
                starts.append(first + ends[edges[::2]])
                stops.append(first + ends[edges[1::2]])
            number += file.documents
        self._check_documents(reader, number)
        pieces = _merged(np.concatenate(starts), np.concatenate(stops), reader.first_tokens)
        if not pieces.source.size:
            raise ConfigurationError(
                f"{self!r}: chooses none of the {below:,} documents of source {self.datapipe.name!r}, or only "
                "empty ones"
            )
        return pieces, chosen, below

    def _check_documents(self, reader: TokenReader, stop: int) -> None:
        if self.documents is not None and self.documents.size:
            for wrong in (int(self.documents[0]), int(self.documents[-1])):
                if not 0 <= wrong < stop:
                    raise OutOfRangeError(
                        f"source {reader.name!r} has documents 0 … {stop - 1}; {wrong} is not one of them"
                    )

    def _sidecar(self, file: TokenLayout) -> Any:
        """What lies beside the file that the rule asks: an array by document, or None."""
        if self.score is None or self.score == "length":
            return None
        return _scores(file, self.score)

    def _mask(self, file: TokenLayout, documents: Int64s, lengths: Int64s, beside: Any) -> np.ndarray:
        """bool (n,): which of these documents the rule chooses. `beside`: their part of the sidecar."""
        if self.documents is not None:
            at = np.minimum(np.searchsorted(self.documents, documents), self.documents.size - 1)
            return self.documents[at] == documents if self.documents.size else np.zeros(documents.size, np.bool_)
        if self.score is not None:
            values = lengths if beside is None else np.asarray(beside)
            if values.dtype.kind == "f" and (bad := np.flatnonzero(np.isnan(values))).size:
                raise TokenFileError(
                    f"{_score_path(file, self.score)}: the score of document {documents[bad[0]]} is nan, which "
                    "no bound places"
                )
            return _within(values, self.at_least, self.below)
        assert self.share is not None  # one of the three rules is given
        key = np.uint64(derive_key(self.seed or 0, "select documents by number", self.origin.name))
        with np.errstate(over="ignore"):
            hashes = mix64(mix64(documents.astype(np.uint64) * _ODD + key) ^ key)
        low, high = (int(Fraction(bound) * 2**64) for bound in self.share)
        mask = np.ones(hashes.size, np.bool_) if low == 0 else hashes >= np.uint64(low)
        return mask if high == 2**64 else mask & (hashes < np.uint64(high))


def _as_share(share: Any) -> tuple[float, float]:
    pair = (
        (0.0, share)
        if isinstance(share, (int, float, np.number))
        else tuple(share)
        if isinstance(share, Sequence)
        else ()
    )
    if len(pair) != 2 or not all(_is_number(bound) for bound in pair) or not 0 <= pair[0] < pair[1] <= 1:
        raise ConfigurationError(f"share is {share!r}; (lo, hi) with 0 <= lo < hi <= 1 would do, as (0, 0.01)")
    return float(pair[0]), float(pair[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_score(score: Any, at_least: Any, below: Any) -> None:
    if not isinstance(score, str) or not _SCORE.fullmatch(score):
        raise ConfigurationError(f"a score's name has up to 64 letters, digits, '_' and '-', got {score!r}")
    bounds = [bound for bound in (at_least, below) if bound is not None]
    if not bounds or not all(_is_number(bound) for bound in bounds) or (len(bounds) == 2 and not at_least < below):
        raise ConfigurationError(
            f"score {score!r} takes at_least= or below= or both, finite and in this order; got at_least={at_least!r}, "
            f"below={below!r}"
        )


# Document ends and scores -----------------------------------------------------------------------------------


def _document_ends(file: TokenLayout) -> Any:
    """(first document, its begin and then the ends of up to CHUNK documents) of a file, checked."""
    stored, last = file.document_ends(), 0
    for at in range(0, file.documents, CHUNK):
        ends = np.concatenate([np.array([last], np.int64), stored[at : at + CHUNK].astype(np.int64)])
        if (np.diff(ends) < 0).any() or ends[-1] > file.tokens:
            raise TokenFileError(f"{file.path}: its document ends are damaged near document {at}: they must increase")
        last = int(ends[-1])
        yield at, ends
    if last != file.tokens:
        raise TokenFileError(f"{file.path}: its document ends stop at token {last} of {file.tokens}")


def _score_path(file: TokenLayout, score: str) -> Path:
    return Path(f"{file.local}.{score}.npy")


def _scores(file: TokenLayout, score: str) -> np.ndarray:
    """(documents,) numbers, mapped. Raises TokenFileError."""
    path = _score_path(file, score)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot read the scores: {error.strerror or error}", str(path)) from error
    except Exception as error:  # a hostile header makes NumPy's parser raise almost anything
        raise TokenFileError(f"{path}: no .npy file of scores: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iuf" or found.shape != (file.documents,):
        raise TokenFileError(
            f"{path}: holds {getattr(found, 'dtype', type(found).__name__)} {getattr(found, 'shape', '')}; one number "
            f"for each of the {file.documents} documents of {file.path} would do"
        )
    return found


def _within(values: np.ndarray, at_least: "float | None", below: "float | None") -> np.ndarray:
    """bool (n,): at_least <= value < below, as real numbers: nothing is rounded on the way."""
    mask = np.ones(values.size, np.bool_)
    if values.dtype.kind == "f":
        if values.dtype.itemsize < 8:
            values = values.astype(np.float64)
        if at_least is not None:
            mask &= values >= float(at_least)
        return mask if below is None else mask & (values < float(below))
    limits = np.iinfo(values.dtype)
    if at_least is not None and (low := math.ceil(at_least)) > limits.min:
        mask &= values >= values.dtype.type(low) if low <= limits.max else False
    if below is not None and (high := math.ceil(below)) <= limits.max:
        mask &= values < values.dtype.type(high) if high > limits.min else False
    return mask


def _merged(starts: Int64s, stops: Int64s, borders: Int64s) -> Pieces:
    """Pieces from stretches in order: neighbours in one file are one, empty ones none."""
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    if starts.size:
        at = np.searchsorted(borders, starts[1:])
        apart = (starts[1:] != stops[:-1]) | (borders[at] == starts[1:])
        starts, stops = starts[np.append(True, apart)], stops[np.append(apart, True)]
    return Pieces(np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)]), starts)


def _digest(pieces: Pieces) -> str:
    found = hashlib.blake2b(digest_size=8)
    for array in pieces:
        found.update(array.data)
    return found.hexdigest()


# Partitions -------------------------------------------------------------------------------------------------


def split_by_score(
    space: TokenSpace, by: str, bins: "Sequence[float]", names: "Sequence[str] | None" = None
) -> "dict[str, DocumentSelector]":
    """What `TokenSpace.partition` says."""
    if not isinstance(bins, Sequence) or not bins or not all(_is_number(bound) for bound in bins):
        raise ConfigurationError(f"bins are finite, increasing bounds, at least one; got {bins!r}")
    if list(bins) != sorted(set(bins)):
        raise ConfigurationError(f"bins must increase, got {list(bins)}")
    bounds = [None, *bins, None]
    pairs = list(itertools.pairwise(bounds))
    if names is None:
        names = [
            f"{space.name}/"
            + (f"{by}<{high}" if low is None else f"{by}>={low}" if high is None else f"{low}<={by}<{high}")
            for low, high in pairs
        ]
    if isinstance(names, str) or len(names) != len(pairs) or len(set(names)) != len(names):
        raise ConfigurationError(f"{len(bins)} bins make {len(pairs)} sub-sources, each with its name; got {names!r}")
    return {
        name: DocumentSelector(space, score=by, at_least=low, below=high, name=as_name(name))
        for name, (low, high) in zip(names, pairs, strict=True)
    }


# Overlap ----------------------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """Two sources that share tokens: how many, and the first of them (path as given for `source`, place in it)."""

    source: str
    other: str
    tokens: int
    file: str
    file_token: int


def overlap(graph: IndexedDataPipe, other: IndexedDataPipe) -> list[Overlap]:
    """What the token spaces of two graphs have in common; empty: no token of one is ever read by the other.

    A record for each pair of sources (of `graph`, of `other`) that share tokens. Files are the same if they are one
    file on disk, or have the same contents by fingerprint (64 blocks of each that may be are read), wherever they lie.
    Texts that stand in two different files are not seen: choose documents by="id" for that.
    """
    digests: dict[str, bytes] = {}
    found = []
    for a in _spaces(graph):
        for b in _spaces(other):
            tokens, place = 0, None
            alike: dict[tuple[int, str], list[int]] = {}
            for g, file in enumerate(b.files):
                alike.setdefault((file.tokens, file.dtype.name), []).append(g)
            for f, file in enumerate(a.files):
                for g in alike.get((file.tokens, file.dtype.name), []):
                    if _same_file(file, b.files[g], digests):
                        shared, first = _shared(_in_file(a, f), _in_file(b, g))
                        tokens += shared
                        place = place or (shared and (file.path, first)) or None
            if place:
                found.append(Overlap(a.name, b.name, tokens, *place))
    return found


def _spaces(graph: IndexedDataPipe) -> list[TokenSpace]:
    """The topmost token spaces of a graph, each once."""
    if isinstance(graph, TokenSpace):
        return [graph]
    found = [space for child in graph.children for space in _spaces(child)]
    return list({id(space): space for space in found}.values())


def _same_file(a: TokenLayout, b: TokenLayout, digests: "dict[str, bytes]") -> bool:
    paths = [os.path.realpath(file.local) for file in (a, b)]
    if paths[0] == paths[1]:
        return True
    for path, file in zip(paths, (a, b), strict=True):
        if path not in digests:
            digests[path] = file_digest(file)
    return digests[paths[0]] == digests[paths[1]]


def _in_file(space: TokenSpace, file: int) -> tuple[Int64s, Int64s]:
    """(begins, stops) of the space's pieces in one file, as places in it."""
    first, source = space.pieces
    low, high = np.searchsorted(source, space.first_tokens[file : file + 2])
    starts = source[low:high] - space.first_tokens[file]
    return starts, starts + np.diff(first[low : high + 1])


def _shared(a: tuple[Int64s, Int64s], b: tuple[Int64s, Int64s]) -> tuple[int, int]:
    """(tokens in pieces of both, the first of them)."""
    starts, stops = b
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])

    def covered(places: Int64s) -> Int64s:
        """How many tokens of b lie before each place."""
        piece = np.searchsorted(starts, places, side="right")
        beyond = np.maximum(stops[np.maximum(piece - 1, 0)] - places, 0) if starts.size else 0
        return before[piece] - np.where(piece > 0, beyond, 0)

    shared = covered(a[1]) - covered(a[0])
    if not shared.any():
        return 0, 0
    begin = a[0][np.flatnonzero(shared)[0]]
    piece = int(np.searchsorted(stops, begin, side="right"))  # the first of b that goes on beyond it
    return int(shared.sum()), int(max(begin, starts[piece]))
