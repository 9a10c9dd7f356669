"""Which documents of a source are read: by a keyed hash, a score beside the files, or a list.

    file   │ doc 0 │ doc 1 │ doc 2 │ doc 3 │ doc 4 │        chosen: 0, 1, 3
    pieces │ ───────────── │       │ ───── │                neighbours are one piece; windows are cut from the
    space  │ 0 … tokens of 0 and 1 │ … of 3 │               pieces end to end, so every input *and* every label
                                                            is a token of a chosen document

The rules are evaluated once, when the graph is built, some documents at a time: O(documents) time, and two int64 a
piece of memory (four more where rows are gathered). Measured on one core of an AMD EPYC, with the files in the page
cache, for a share of one half, of which a quarter of the documents begin a piece: 10^6 documents 0.1 s and 40 MB, 10^7
documents 0.5 s by number, 0.3 s by score and 170 MB; by id 11 s (a hash of each id).
"""

import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ._torch import functional_datapipe
from .core import IndexedDataPipe, Int64s, Unpickled, as_count, as_numbers
from .document_ends import checked_ends, find_ends, no_document_ends
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenFileError
from .formats import DocumentIds, TokenLayout
from .formats.ids import open_document_ids
from .permute import derive_key, mix64
from .read import Pieces, TokenReader, TokenSpace, as_name
from .scores import check_score, is_number, read_scores, score_path, within

__all__ = ["DocumentSelector", "split_by_score"]

BY = ("number", "id")
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
        self.share_range = None if share is None else _as_share(share)
        self.seed = None if share is None else as_count("seed", seed, 0)
        self.score, self.at_least, self.below = score, at_least, below
        if score is not None:
            check_score(score, at_least, below)
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
            "share": None if self.share_range is None else list(self.share_range),
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
    def choice(self) -> str:
        return self._digest

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
        find_ends(reader.files)
        for file, first in zip(reader.files, reader.first_tokens.tolist(), strict=False):
            if not file.documents:
                raise no_document_ends(file.path, f"documents of source {reader.name!r} are to be chosen")
            sidecars = [rule._sidecar(file) for rule in rules]
            for at, ends in checked_ends(file):
                asked = _Asked(file, at, number + np.arange(at, at + ends.size - 1), np.diff(ends))
                masks = [rule._mask(asked, beside) for rule, beside in zip(rules, sidecars, strict=True)]
                lower = np.logical_and.reduce(masks[1:]) if len(masks) > 1 else np.ones(ends.size - 1, np.bool_)
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

    def _sidecar(self, file: TokenLayout) -> "DocumentIds | np.ndarray | None":
        """What beside the file the rule asks: ids, scores, or nothing."""
        if self.share_range is not None and self.by == "id":
            if (ids := open_document_ids(file)) is None:
                raise ConfigurationError(
                    f"{file.path}: no ids beside it, so by='id' cannot tell its documents; `tokenpipe tokenize --ids` "
                    "writes them, by='number' needs none"
                )
            return ids
        return read_scores(file, self.score) if self.score not in (None, "length") else None

    def _mask(self, asked: "_Asked", beside: "DocumentIds | np.ndarray | None") -> np.ndarray:
        """bool (n,): which of these documents the rule chooses. `beside`: the file's sidecar."""
        stop = asked.at + asked.numbers.size
        if self.documents is not None:
            return np.isin(asked.numbers, self.documents, assume_unique=True)
        if self.score is not None:
            values = np.asarray(beside[asked.at : stop]) if isinstance(beside, np.ndarray) else asked.lengths
            if values.dtype.kind == "f" and (bad := np.flatnonzero(np.isnan(values))).size:
                raise TokenFileError(
                    f"{score_path(asked.file, self.score)}: the score of document {asked.at + bad[0]} is nan, which "
                    "no bound places"
                )
            return within(values, self.at_least, self.below)
        assert self.share_range is not None  # one of the three rules is given
        if isinstance(beside, DocumentIds):
            hashes = _hashes_of_ids(*beside.span(asked.at, stop), self.seed or 0)
        else:
            hashes = _hashes_of_numbers(asked.numbers, self.seed or 0, self.origin.name)
        low, high = (int(Fraction(bound) * 2**64) for bound in self.share_range)
        mask = np.ones(hashes.size, np.bool_) if low == 0 else hashes >= np.uint64(low)
        return mask if high == 2**64 else mask & (hashes < np.uint64(high))


class _Asked(NamedTuple):
    """Some documents of one file, from its `at`-th on: (n,) their numbers in the source, (n,) tokens of each."""

    file: TokenLayout
    at: int
    numbers: Int64s
    lengths: Int64s


def _hashes_of_numbers(numbers: Int64s, seed: int, source: str) -> np.ndarray:
    """uint64 (n,)."""
    key = np.uint64(derive_key(seed, "select documents by number", source))
    with np.errstate(over="ignore"):
        return mix64(mix64(numbers.astype(np.uint64) * _ODD + key) ^ key)


def _hashes_of_ids(text: bytes, ends: Int64s, seed: int) -> np.ndarray:
    """uint64 (n,): BLAKE2b of each id's UTF-8 bytes, keyed by the seed and by nothing else."""
    key = derive_key(seed, "select documents by id").to_bytes(8, "little")
    pairs = itertools.pairwise(ends.tolist())
    found = b"".join([hashlib.blake2b(text[a:b], digest_size=8, key=key).digest() for a, b in pairs])
    return np.frombuffer(found, np.dtype("<u8")).astype(np.uint64)


def _as_share(share: Any) -> tuple[float, float]:
    pair = (
        (0.0, share)
        if isinstance(share, (int, float, np.number))
        else tuple(share)
        if isinstance(share, Sequence)
        else ()
    )
    if len(pair) != 2 or not all(is_number(bound) for bound in pair) or not 0 <= pair[0] < pair[1] <= 1:
        raise ConfigurationError(f"share is {share!r}; (lo, hi) with 0 <= lo < hi <= 1 would do, as (0, 0.01)")
    return float(pair[0]), float(pair[1])


# Documents and pieces -----------------------------------------------------------------------------------


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
    if not isinstance(bins, Sequence) or not bins or not all(is_number(bound) for bound in bins):
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
