"""Token files of any kind as one token space: number k is token k, files end to end.

Three numberings, all in tokens, all int64:

    place in the space    0 … len − 1: what windows are cut from
    source number         place in the whole source: what records name and `when` takes; the same for all of the
                          source's documents, however they are chosen, and after the source has grown by files
    place in the file     source number − that of the file's first token

A space is a list of *pieces*: stretches of one file that follow one another. A TokenReader's pieces are its files, and
its numbering is the source's (from `first_token` on, where it is a part of the source); see documents.py for others.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arguments import arguments_of, given_with
from .core import IndexedDataPipe, Int64s, Unpickled, as_count, in_blocks
from .document_ends import find_ends
from .errors import ConfigurationError, OutOfRangeError, TokenIdError
from .fetch.checks import as_level, with_verify
from .fingerprint import files_fingerprint
from .formats import DocumentIds, TokenLayout
from .formats.ids import open_document_ids
from .formats.places import as_place
from .formats.table import distinct, integers
from .token_files import as_paths, closed_by, listed_files

if TYPE_CHECKING:
    from .documents import DocumentSelector

__all__ = ["Pieces", "TokenReader", "TokenSpace", "as_name"]


class Pieces(NamedTuple):
    """What a token space is made of, in the order of the source; no piece is empty or crosses a file's border.

    first: int64 (pieces + 1,), the place in the space of each one's first token, then the number of tokens.
    source: int64 (pieces,), that token's source number.
    """

    first: Int64s
    source: Int64s


def as_name(name: Any) -> str:
    """`name`, if a source can be called so. Raises ConfigurationError."""
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise ConfigurationError(f"a source's name has 1 to 200 characters, got {name!r}")
    return name


class TokenSpace(IndexedDataPipe):
    """Tokens of one source, end to end: item k is token k (int64). What `slice_sequences` cuts into windows."""

    table: "TokenSpace | None" = None
    """The space whose stretches this one lays out anew, in an order that is looked up; None: `pieces` say all."""

    def spans(self, places: Int64s, counts: Int64s) -> "tuple[Int64s, Int64s, Int64s]":
        """Of a space that lays out another: (n,) windows [place, place + count) → (m,) which window each stretch is of,
        ascending, (m,) its place in `table`, −1 for padding, (m,) its tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} is a table of pieces")

    @property
    def origin(self) -> "TokenReader":
        """The reader whose files these are; its name is the source's."""
        raise NotImplementedError

    @property
    def pieces(self) -> Pieces:
        raise NotImplementedError

    @property
    def choice(self) -> str:
        """What of its files' tokens the space has, as a digest; "": all."""
        return ""

    @property
    def files(self) -> "Sequence[TokenLayout]":
        return self.origin.files

    @property
    def vocab_size(self) -> "int | None":
        return self.origin.vocab_size

    @property
    def first_tokens(self) -> Int64s:
        """int64 (files + 1,): the source number of each file's first token, then of the first one after them."""
        return self.origin.first_tokens

    @property
    def end(self) -> int:
        return self.samples_per_pass

    @property
    def finite(self) -> bool:
        return True

    def source_numbers(self, tokens: Int64s) -> Int64s:
        """(n,) places in the space → (n,) source numbers."""
        first, source = self.pieces
        piece = np.searchsorted(first, tokens, side="right") - 1
        return source[piece] + (tokens - first[piece])

    def places_of(self, numbers: Int64s) -> Int64s:
        """(n,) source numbers → (n,) places in the space, −1 where it does not have the token."""
        first, source = self.pieces
        piece = np.searchsorted(source, numbers, side="right") - 1
        into = numbers - source[piece]
        return np.where((piece >= 0) & (into < np.diff(first)[piece]), first[piece] + into, -1)

    def places_below(self, numbers: Int64s) -> Int64s:
        """(n,) source numbers → (n,) how many of the space's tokens come before each: so the places of the source's
        tokens [a, b) are those from the first of these counts up to the second.
        """
        first, source = self.pieces
        piece = np.searchsorted(source, numbers, side="right") - 1
        return np.where(piece >= 0, np.minimum(first[piece] + numbers - source[piece], first[piece + 1]), 0)

    def places_among(self, numbers: range, apart: int) -> Int64s:
        """Places of some of the source's tokens `numbers`, such that of `apart` tokens of a row in one piece that hold
        one of `numbers`, one is among them.
        """
        first, stop = self.places_below(np.array([numbers.start, numbers.stop], np.int64)).tolist()
        return np.append(np.arange(first, stop, apart), stop - 1) if first < stop else np.empty(0, np.int64)

    def file_of(self, tokens: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) places in the space → ((n,) index of the file that holds each, (n,) its place in that file)."""
        numbers = self.source_numbers(tokens)
        file = np.searchsorted(self.first_tokens, numbers, side="right") - 1
        return file, numbers - self.first_tokens[file]

    def fetch(self, numbers: Any, columns: Any = None) -> Any:
        from .fetch.gather import TokenGather

        if self._gather.value is None:
            self._gather.value = TokenGather([self])
        gather = self._gather.value
        return gather.rows(self.checked(numbers) + gather.base[id(self)], 1)[:, 0]

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        return in_blocks(self.fetch, start, self.end if stop is None else min(stop, self.end))

    def hold_out(self, share: float, seed: int, by: str = "number") -> "tuple[DocumentSelector, DocumentSelector]":
        """(what is trained on, what is held out): each document is in one of the two, by a keyed hash.

        The first keeps this space's name, so that its order does not depend on the other's being there; the other
        is called "… held out". See `select_documents` for the arguments and what is raised.
        """
        held_out = self.select_documents(share=(0, share), seed=seed, by=by, name=f"{self.name} held out")
        return self.select_documents(share=(share, 1), seed=seed, by=by), held_out

    def partition(
        self, by: str, bins: "Sequence[float]", names: "Sequence[str] | None" = None
    ) -> "dict[str, DocumentSelector]":
        """Named sub-sources by a score, {name: space}: each document is in exactly one of them.

        Args:
            by: "length", or the name of a score beside each token file (see `select_documents`).
            bins: increasing bounds; [0.2, 0.8] makes three: below 0.2, from 0.2 up to below 0.8, from 0.8 on.
            names: of the len(bins) + 1 sub-sources; left out: "prose/quality<0.2", "prose/0.2<=quality<0.8", ….

        Raises ConfigurationError, also where a bin has no document.
        """
        from .documents import split_by_score

        return split_by_score(self, by, bins, names)


class TokenReader(TokenSpace):
    """One source's token files, end to end: item k is token k (int64).

    Files are looked at here (first bytes and size) and mapped, or opened, when a batch first needs them.

    Args:
        paths: one path or several, in order: files, folders (all token files in one, by name) and patterns
            ("data/*.bin", by name), looked for once, here; and manifests ("….manifest", or what `read_manifest`
            gives), whose files are not looked at here. Each may be a URL of any of fsspec's file systems
            ("s3://bucket/corpus/"), with what lies beside its files. All kinds but raw say what they hold.
        dtype: for raw files: "uint8", "uint16", "uint32", "int32" or "int64".
        name: the source's name; left out: the stem of the first path as it was given. It is part of the order (each
            source has permutations of its own), so a source that keeps its name may move to another path.
        vocab_size: ids at or above it raise TokenIdError, in the header or in the batch that reads them.
        end_of_text: the id that closes documents. Files that store no document ends are scanned for it once, when their
            documents are first asked for; what was found is kept (see cache.py).
        io: how tokens are read, which changes no batch: "mmap", or "pread" for file systems with a quota of maps and
            for files that may be cut while they are open, which then is a TokenFileError and does not end the process.
            Loss masks, and document ends where they are stored, are mapped all the same. Both read copies of remote
            files, which are kept on this machine; "ranged" reads of a remote file the bytes of the windows alone.
        verify: how much of what a manifest says is compared in this process, which changes no batch: "size" (and what
            headers say), "open" (each file's fingerprint when it is first opened; so where it is left out), or "read"
            (besides, the CRC-32 of each 64 KiB before a token of it is first read). What differs is a TokenFileError.
            Of remote files with io="ranged" only "size" is possible.

    Raises TokenFileError for a missing, empty, cut or damaged file; ConfigurationError for a dtype that
    is missing or wrong, an end_of_text that cannot be, or is not what a header says, an io or verify that there is
    not, or a file that no manifest is of with verify="open" or "read".
    """

    functional_name = "TokenReader"
    decides_order = False
    vocab_size: "int | None" = None
    files: "Sequence[TokenLayout]" = ()
    given_end_of_text: "int | None" = None
    given_verify: "str | None" = None
    io = "mmap"
    verify = "size"
    first_token = 0
    """The source number of this reader's first token: not 0 where it is a `part` of the source."""
    first_document = 0
    """The number in the source of this reader's first document."""

    def __init__(
        self,
        paths: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
        dtype: object = None,
        name: "str | None" = None,
        vocab_size: "int | None" = None,
        end_of_text: "int | None" = None,
        io: str = "mmap",
        verify: "str | None" = None,
    ) -> None:
        super().__init__()
        several = as_paths(paths)
        self._name = as_name(name) if name is not None else PurePath(str(as_place(several[0]))).stem
        self.vocab_size = None if vocab_size is None else as_count("vocab_size", vocab_size)
        if io not in ("mmap", "pread", "ranged"):
            raise ConfigurationError(f"io is {io!r}; 'mmap' or 'pread' would do, 'ranged' for remote files")
        if io == "pread" and not hasattr(os, "preadv"):
            raise ConfigurationError("io='pread': this system has no preadv(2); io='mmap' would do")
        self.io = io
        files = listed_files(several, dtype)
        largest = max(known or 0 for known in distinct(files, "max_token_id"))
        if self.vocab_size is not None and largest >= self.vocab_size:
            file = next(file for file in files if (file.max_token_id or 0) >= self.vocab_size)
            raise TokenIdError(f"{file.path}: holds token id {file.max_token_id}, vocab_size is {self.vocab_size}")
        self.verify, self.given_verify = as_level(verify, files, io == "ranged"), verify
        if self.verify != "size":
            files = with_verify(files, self.verify)
        self.files, self.given_end_of_text = closed_by(files, end_of_text, self.vocab_size), end_of_text
        self._content: str | None = None
        self._first, self._gather, self._ids = Unpickled(), Unpickled(), Unpickled()

    @property
    def end_of_text(self) -> "int | None":
        """The id that closes documents: the one given, else what headers or a manifest say; None where nobody knows, or
        they say different ones.
        """
        if self.given_end_of_text is not None:
            return self.given_end_of_text
        known = distinct(self.files, "stored_end_of_text") | distinct(self.files, "end_of_text")
        known -= {None}
        return known.pop() if len(known) == 1 else None

    def with_more(self, more: "TokenReader") -> "TokenReader":
        """A reader of the same source with another reader's files behind its own."""
        boxes: dict[str, Any] = {box: Unpickled() for box in ("_first", "_gather", "_ids")}
        files = (*self.files, *more.files)
        # all of a manifest stands as one path
        whole = (file.path if file.remote is None else file.remote.url for file in files)
        paths = [
            path
            for path, _ in itertools.groupby(
                file.blocks.path if file.blocks else url for file, url in zip(files, whole, strict=True)
            )
        ]
        said: dict[str, Any] = {"paths": paths}
        if None not in (self._given, more._given) and arguments_of(self).get("dtype") is None:
            said["dtype"] = arguments_of(more).get("dtype")  # of raw ones
        given = given_with(self, **said)
        return self.changed(files=files, _content=None, _given=given, **boxes)

    def part(self, start: int, stop: "int | None" = None) -> "TokenReader":
        """A reader of the files [start, stop) alone, which knows its place in this one: tokens and documents keep
        their numbers in the source. So a source that grew by files is read generation by generation.

        Raises ConfigurationError for a range that holds no file.
        """
        stop = len(self.files) if stop is None else as_count("stop", stop)
        if not 0 <= as_count("start", start, 0) < stop <= len(self.files):
            raise ConfigurationError(
                f"source {self.name!r} has {len(self.files)} file(s); [{start}, {stop}) is no range of them"
            )
        return self.changed(
            files=self.files[start:stop],
            first_token=int(self.first_tokens[start]),
            first_document=self.first_document + sum(file.documents for file in self.files[:start]),
            _content=None,
            _first=Unpickled(),
            _gather=Unpickled(),
            _ids=Unpickled(),
        )

    @property
    def origin(self) -> "TokenReader":
        return self

    @property
    def name(self) -> str:
        return self._name

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    @property
    def notes(self) -> str:
        kinds = "/".join(sorted(distinct(self.files, "dtype")))
        where = self.files[0].path if len(self.files) == 1 else f"{self.files[0].path} … {len(self.files)} files"
        return f"{where}: {self.samples_per_pass:,} {kinds} tokens"

    @property
    def first_tokens(self) -> Int64s:
        if self._first.value is None:
            first = np.array([self.first_token], np.int64)
            self._first.value = np.cumsum(np.concatenate([first, integers(self.files, "tokens")]))
        return self._first.value

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.first_tokens - self.first_token, self.first_tokens[:-1])

    @property
    def samples_per_pass(self) -> int:
        return int(self.first_tokens[-1]) - self.first_token

    def source_numbers(self, tokens: Int64s) -> Int64s:
        return tokens + self.first_token

    def places_of(self, numbers: Int64s) -> Int64s:
        places = numbers - self.first_token
        return np.where((places >= 0) & (places < self.samples_per_pass), places, -1)

    def document_ends(self) -> Int64s:
        """int64 (documents,): cumulative document ends of all files that have them, as source numbers."""
        find_ends(self.files)
        ends = [
            file.document_ends().astype(np.int64) + first
            for file, first in zip(self.files, self.first_tokens[:-1], strict=True)
        ]
        return np.concatenate(ends)

    def document_ids(self) -> "list[DocumentIds | None]":
        """For each file the ids of its documents, from `FILE.ids` beside it; None where there is no such sidecar.

        Raises TokenFileError for a sidecar that is damaged or of another token file.
        """
        if self._ids.value is None:
            self._ids.value = [open_document_ids(file) for file in self.files]
        return self._ids.value

    def document_id(self, document: int) -> "str | None":
        """The id of a document by its number in the source; None where none is kept.

        Raises OutOfRangeError, TokenFileError.
        """
        file, within = self._located(document)
        ids = self.document_ids()[file]
        return None if ids is None else ids[within]

    def document_range(self, document: "int | str") -> tuple[int, int]:
        """Which of the source's tokens make up a document: (first, stop).

        Args:
            document: its number in the source, or its id.

        Raises OutOfRangeError for a number that is none, ConfigurationError for an id that no document has, or
        several have, TokenFileError.
        """
        if isinstance(document, str):
            found = self.find_documents(document)
            if len(found) != 1:
                raise ConfigurationError(
                    f"source {self.name!r}: {len(found) or 'no'} document(s) have the id {document!r:.200}"
                    + (f"; by their numbers: {', '.join(map(str, found[:8]))}" if found else "")
                )
            document = found[0]
        file, within = self._located(as_count("document", document, 0))
        ends, first = self.files[file].document_ends(), int(self.first_tokens[file])
        return first + (int(ends[within - 1]) if within else 0), first + int(ends[within])

    def _located(self, document: int) -> tuple[int, int]:
        """(index of the file that holds a document, its number in that file). Raises OutOfRangeError."""
        within = document - self.first_document
        for f, file in enumerate(self.files):
            if 0 <= within < file.documents:
                return f, within
            within -= file.documents
        first, stop = self.first_document, self.first_document + sum(file.documents for file in self.files)
        raise OutOfRangeError(
            f"source {self.name!r} has no document {document}: "
            + (
                f"it has {first} … {stop - 1}"
                if stop > first
                else "its files store no document ends; end_of_text=ID finds them"
            )
        )

    def find_documents(self, document_id: str) -> list[int]:
        """The numbers in the source of the documents with this id; scans the sidecars."""
        found, first = [], self.first_document
        for file, ids in zip(self.files, self.document_ids(), strict=True):
            found += [first + document for document in ids.find(document_id)] if ids is not None else []
            first += file.documents
        return found

    @property
    def content(self) -> str:
        """32 hex digits: the fingerprint of the files' contents, never of their paths; read once."""
        if self._content is None:
            self._content = files_fingerprint(self.files)
        return self._content
