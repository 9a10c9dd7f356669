"""Document ids beside a token file: `prose.tok.ids` names each document of `prose.tok`, by an id or URL.

The layout is that of our token file (own.py) under another magic, b"TOKPIDS\\0": its "tokens" are the UTF-8
bytes of all ids end to end (uint8), its document ends cut them, its tokenizer name is "document ids", and
its tokenizer hash is the BLAKE2b-256 in the header of the token file that it belongs to: a sidecar left from
another version of the file is refused, never believed. No id is empty; two documents may have the same.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentTypeError, ConfigurationError, OutOfRangeError, TokenFileError
from ..filemap import FileMap
from . import own
from .layout import TokenLayout
from .places import as_place, beside, exists, local_path

__all__ = ["DocumentIds", "DocumentIdsWriter", "ids_path", "open_document_ids"]

MAGIC = b"TOKPIDS\0"
NAME = "document ids"
CHUNK = 1 << 20  # documents looked at in one go


def ids_path(path: "str | os.PathLike[str]") -> Path:
    """Where a local token file's ids are, if it has any: its own path and `.ids`."""
    return Path(beside(path, ".ids"))


def recognises(path: str, head: bytes) -> bool:
    return head.startswith(MAGIC)


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    raise TokenFileError(f"{path}: holds document ids, not tokens; the token file is {path.removesuffix('.ids')}")


class DocumentIdsWriter(own.TokenFileWriter):
    """Writes the ids of a token file's documents, in their order; nothing stands under `path` before it is whole.

    Args:
        path: `ids_path(token_file)`.
    """

    magic = MAGIC

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        super().__init__(path, dtype="uint8", tokenizer=NAME)

    def bind(self, token_file: "str | os.PathLike[str]") -> None:
        """Ties the ids to a token file of ours that is whole: they are refused beside any other."""
        header = own.read_header(token_file)
        if header is None:
            raise ConfigurationError(f"{os.fspath(token_file)}: only a token file of tokenpipe's own kind has a hash")
        self._names = (NAME.encode(), header.digest)

    def write_ids(self, ids: Sequence[str]) -> None:
        """Appends ids. Raises ConfigurationError for one that is empty, ArgumentTypeError, OSError."""
        if not all(isinstance(one, str) for one in ids):
            raise ArgumentTypeError(f"ids are strings, got {ids!r:.80}")
        encoded = [one.encode() for one in ids]
        if not all(encoded):
            raise ConfigurationError(f"{self.path}: the id of document {self.documents + encoded.index(b'')} is empty")
        ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
        self.write_many(np.frombuffer(b"".join(encoded), np.uint8), ends)


class DocumentIds:
    """The ids of one token file's documents, mapped: `len(ids)`, `ids[k]`, `ids.find("https://…")`.

    Raises TokenFileError for a file that is missing, cut, or not what its header says.
    """

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        self.path = as_place(path)
        try:
            with local_path(self.path).open("rb") as file:
                head, size = file.read(own.HEADER), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise TokenFileError(error.errno, f"cannot open the document ids: {error.strerror}", self.path) from error
        if not recognises(self.path, head):
            raise TokenFileError(f"{self.path}: no file of document ids")
        self._layout = own.layout(self.path, head, size, None)
        if self._layout.dtype != np.uint8:
            raise TokenFileError(f"{self.path}: ids are stored as uint8, this says {self._layout.dtype.name}")
        self.tokens_hash = own.parse_header(head).tokenizer_hash
        self._mapped: tuple[FileMap, npt.NDArray[np.uint8], npt.NDArray[np.uint64]] | None = None

    def __reduce__(self) -> "tuple[type, tuple[str]]":
        return type(self), (self.path,)

    def __len__(self) -> int:
        return self._layout.documents

    def __getitem__(self, document: int) -> str:
        """The id of a document. Raises OutOfRangeError, TokenFileError where the file is damaged."""
        if not 0 <= document < len(self):
            raise OutOfRangeError(f"{self.path}: no document {document!r}; it has ids of 0 … {len(self) - 1}")
        text, ends = self._arrays()
        start, end = int(ends[document - 1]) if document else 0, int(ends[document])
        try:
            if not start < end <= text.size:
                raise ValueError(f"bytes {start} … {end} of {text.size}")
            return text[start:end].tobytes().decode()
        except ValueError as error:
            raise TokenFileError(f"{self.path}: the id of document {document} is damaged: {error}") from error

    def span(self, start: int, stop: int) -> "tuple[bytes, npt.NDArray[np.int64]]":
        """(the ids of documents [start, stop) end to end, UTF-8; int64 (stop − start + 1,): where each begins in
        that, and where the last ends). Raises TokenFileError where the file is damaged.
        """
        text, stored = self._arrays()
        begin = int(stored[start - 1]) if start else 0
        ends = np.concatenate((np.array([begin], np.int64), stored[start:stop].astype(np.int64)))
        if (np.diff(ends) <= 0).any() or ends[-1] > text.size:
            raise TokenFileError(f"{self.path}: the ids of documents {start} … {stop - 1} are damaged")
        return text[begin : ends[-1]].tobytes(), ends - begin

    def find(self, document_id: str) -> list[int]:
        """The numbers of all documents with this id, rising; reads every end, and no other id whole."""
        wanted = document_id.encode()
        text, ends = self._arrays()
        found: list[int] = []
        for first in range(0, len(self) if wanted else 0, CHUNK):
            high = ends[first : first + CHUNK].astype(np.int64)
            low = np.concatenate(([int(ends[first - 1]) if first else 0], high[:-1]))
            at = np.flatnonzero((high - low == len(wanted)) & (low >= 0) & (high <= text.size))
            for place in range(len(wanted) - 1, -1, -1):  # ids differ in their last letters
                if not at.size:
                    break
                at = at[text[low[at] + place] == wanted[place]]
            found += (at + first).tolist()
        return found

    def verify(self) -> None:
        """Reads the whole file and compares its hash. Raises TokenFileError."""
        with self._layout.local.open("rb") as file:
            expected = own.parse_header(file.read(own.HEADER)).digest
            own.compare_hash(self.path, expected, iter(lambda: file.read(1 << 20), b""))

    def _arrays(self) -> "tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]":
        """All ids' bytes (bytes,), and their cumulative ends (documents,)."""
        if self._mapped is None:
            mapped, shape = FileMap(self._layout.local, self._layout.size), self._layout
            text = mapped.array(np.dtype(np.uint8), shape.offset, shape.tokens)
            self._mapped = mapped, text, mapped.array(np.dtype("<u8"), shape.ends_offset, shape.documents)
        return self._mapped[1], self._mapped[2]


def open_document_ids(file: TokenLayout) -> "DocumentIds | None":
    """The ids beside a token file; None where there are none. Raises TokenFileError if they are another file's."""
    path = beside(file.path, ".ids")
    if not exists(path):
        return None
    ids = DocumentIds(path)
    header = own.read_header(file)
    bound = ids.tokens_hash.strip(b"\0") and header is not None and header.digest != ids.tokens_hash
    if bound or len(ids) != file.documents:
        raise TokenFileError(
            f"{path}: {len(ids)} ids of another token file than {file.path}, which has {file.documents} documents; "
            "remove it, or make both again"
        )
    return ids
