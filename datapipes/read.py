"""Token files of any kind as one token space: number k is token k, files end to end."""

import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from .core import IndexedDataPipe, Int64s, Unpickled, as_count, in_blocks
from .errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenIdError
from .fingerprint import files_fingerprint
from .formats import DocumentIds, TokenLayout, read_layout
from .formats.ids import open_document_ids

__all__ = ["TokenReader"]


class TokenReader(IndexedDataPipe):
    """One source's token files, end to end: item k is token k (int64).

    Files are looked at here (first bytes and size) and mapped when a batch first needs them.

    Args:
        paths: one path or several, in order. `.npy` and tokenpipe's own files say what they hold.
        dtype: for raw files: "uint8", "uint16", "uint32", "int32" or "int64".
        name: the source's name; left out: the first file's stem. It is part of the order (each source has
            permutations of its own), so a source that keeps its name may move to another path.
        vocab_size: ids at or above it raise TokenIdError, in the header or in the batch that reads them.

    Raises TokenFileError for a missing, empty, cut or damaged file; ConfigurationError for a dtype that
    is missing or wrong.
    """

    functional_name = "TokenReader"
    decides_order = False

    def __init__(
        self,
        paths: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
        dtype: object = None,
        name: "str | None" = None,
        vocab_size: "int | None" = None,
    ) -> None:
        super().__init__()
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        if not isinstance(several, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in several):
            raise ArgumentTypeError(f"paths must be a str or PathLike, or a list of them, got {paths!r}")
        if not several:
            raise ConfigurationError("TokenReader needs at least one path")
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200):
            raise ConfigurationError(f"a source's name has 1 to 200 characters, got {name!r}")
        self._name = name or PurePath(os.fspath(several[0])).stem
        self.vocab_size = None if vocab_size is None else as_count("vocab_size", vocab_size)
        self.files: tuple[TokenLayout, ...] = tuple(read_layout(path, dtype) for path in several)
        for file in self.files:
            if self.vocab_size is not None and (file.max_token_id or 0) >= self.vocab_size:
                raise TokenIdError(f"{file.path}: holds token id {file.max_token_id}, vocab_size is {self.vocab_size}")
        self._content: str | None = None
        self._first, self._gather, self._ids = Unpickled(), Unpickled(), Unpickled()

    @property
    def name(self) -> str:
        return self._name

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    @property
    def notes(self) -> str:
        kinds = "/".join(sorted({file.dtype.name for file in self.files}))
        where = self.files[0].path if len(self.files) == 1 else f"{self.files[0].path} … {len(self.files)} files"
        return f"{where}: {self.samples_per_pass:,} {kinds} tokens"

    @property
    def first_tokens(self) -> Int64s:
        """int64 (files + 1,): the place of each file's first token, then the number of tokens."""
        if self._first.value is None:
            self._first.value = np.cumsum([0, *(file.tokens for file in self.files)], dtype=np.int64)
        return self._first.value

    @property
    def samples_per_pass(self) -> int:
        return int(self.first_tokens[-1])

    @property
    def end(self) -> int:
        return self.samples_per_pass

    @property
    def finite(self) -> bool:
        return True

    def fetch(self, numbers: Any, columns: Any = None) -> Any:
        from .gather import TokenGather

        if self._gather.value is None:
            self._gather.value = TokenGather([self])
        return self._gather.value.rows(self.checked(numbers), 1)[:, 0]

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        return in_blocks(self.fetch, start, self.end if stop is None else min(stop, self.end))

    def file_of(self, tokens: Int64s) -> tuple[Int64s, Int64s]:
        """(n,) tokens → ((n,) index of the file that holds each, (n,) its place in that file)."""
        file = np.searchsorted(self.first_tokens, tokens, side="right") - 1
        return file, tokens - self.first_tokens[file]

    def document_ends(self) -> Int64s:
        """int64 (documents,): cumulative document ends of all files that store them, in tokens."""
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
        """The id of a document, as numbered in `document_ends()` over all files; None where none is kept.

        Raises OutOfRangeError, TokenFileError.
        """
        left = document
        for file, ids in zip(self.files, self.document_ids(), strict=True):
            if 0 <= left < file.documents:
                return None if ids is None else ids[left]
            left -= file.documents
        raise OutOfRangeError(f"{self.name}: no document {document}; it has {sum(f.documents for f in self.files)}")

    def find_documents(self, document_id: str) -> list[int]:
        """The documents with this id, as numbered in `document_ends()` over all files; scans the sidecars."""
        found, first = [], 0
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
