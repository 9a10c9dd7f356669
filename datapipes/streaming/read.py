"""JSON lines files as a stream of texts: the place is a file and a byte in it, so a resume seeks and reads no more."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, ConfigurationError, DocumentError, StateError
from ..fingerprint import files_fingerprint
from ..formats.layout import TokenLayout
from ..tokenize.documents import Span, read_documents
from ..tokenize.listing import list_inputs
from ..tokenize.opening import shown
from .base import StreamingDataPipe

__all__ = ["JsonLinesReader"]


class JsonLinesReader(StreamingDataPipe):
    """The texts of JSON lines files, in order; lines of white space are left out.

    Every rank and worker reads all lines: deal them out with `sharding_filter()` right after it, before the work of
    tokenising.

    Args:
        inputs: files, folders and glob patterns, one or several, taken in order (a folder's files by name). They must
            not change while they are read.
        column: where the text is in a line's object.

    Raises ConfigurationError for a name without files; DocumentError, naming file and line, for what is no document.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/a.jsonl"
    >>> _ = open(path, "w").write('{"text": "one"}\\n{"text": "two"}\\n')
    >>> reader = JsonLinesReader(path)
    >>> texts = iter(reader)
    >>> next(texts), reader.state_dict()
    ('one', {'file': 0, 'offset': 16})
    """

    initial_state = {"file": 0, "offset": 0}  # noqa: RUF012 - never changed
    file: int
    offset: int

    def __init__(
        self, inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]", column: str = "text"
    ) -> None:
        super().__init__()
        if not isinstance(column, str):
            raise ArgumentTypeError(f"column is the name of a column, got {column!r}")
        self.files, self.column = list_inputs(inputs, kind="jsonl"), column
        for file in self.files:
            if file.packed or file.remote or file.kind != "jsonl":
                raise ConfigurationError(
                    f"{shown(file.path)}: a stream goes on at a byte of a file: plain JSON lines on this machine would "
                    "do; tokenize_files reads packed and remote files"
                )

    @property
    def settings(self) -> "dict[str, Any]":
        return {"column": self.column, "files": len(self.files)}

    @functools.cached_property
    def content_files(self) -> "list[TokenLayout]":
        bytes_ = np.dtype(np.uint8)
        return [TokenLayout(file.path, bytes_, 0, file.size, file.size) for file in self.files]

    @functools.cached_property
    def content(self) -> str:
        return files_fingerprint(self.content_files)

    def __iter__(self) -> "Iterator[str]":
        while self.file < len(self.files):
            file = self.files[self.file]
            try:
                for document in read_documents(Span(file, self.offset, file.size), self.column, None):
                    self.offset = document.start + document.taken
                    yield document.text
            except DocumentError as error:
                self.offset = self.offset if error.end is None else error.end  # for who does without it
                raise
            self.file, self.offset = self.file + 1, 0

    def load_state_dict(self, state: "Mapping[str, Any]") -> None:
        super().load_state_dict(state)
        sizes = [*(file.size for file in self.files), 0]
        if not (0 <= self.file < len(sizes) and 0 <= self.offset <= sizes[self.file]):
            place = f"byte {self.offset} of file {self.file}"
            self.begin_anew()
            raise StateError(f"JsonLinesReader: there is no {place}; it reads {len(self.files)} files")
