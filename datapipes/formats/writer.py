"""What the writers of all kinds share: ids are checked before they are cast, no name is taken before all is whole.

Tokens go to the file as they come, document ends (uint64, in tokens) to a nameless one beside it, so memory does not
grow. At the end a kind puts its header in its place and makes the files that go with it; they are on the disk when the
first one takes its name: the loss mask, the tokens, then the rest in the order that the kind says. Whatever stood
beside an older file of the name is taken away first, so that no file of one version stands beside another's.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..atomic import NewFile
from ..errors import ArgumentTypeError, ConfigurationError, TokenIdError
from .layout import as_dtype
from .places import loss_path

__all__ = ["DocumentWriter", "check_id_count", "chosen_dtype"]

_BLOCK = 1 << 20


def check_id_count(path: "str | os.PathLike[str]", vocab_size: "int | None", dtype: object) -> None:
    """Raises unless this says how ids are stored: ConfigurationError, ArgumentTypeError."""
    if vocab_size is None:
        if dtype is None:
            raise ConfigurationError(f"{os.fspath(path)}: give vocab_size= or dtype=, to choose how ids are stored")
    elif isinstance(vocab_size, bool) or not isinstance(vocab_size, (int, np.integer)):
        raise ArgumentTypeError(f"vocab_size must be an integer, got {vocab_size!r}")
    elif not 1 <= vocab_size <= 1 << 63:
        raise ConfigurationError(f"vocab_size is {vocab_size}; 1 or more would do")


def chosen_dtype(
    path: "str | os.PathLike[str]", vocab_size: "int | None", dtype: object, kind: str, known: "Iterable[str]", by: str
) -> np.dtype:
    """What ids are stored in: the dtype asked for, if this kind of file knows it, else `by` the vocabulary's size.

    Raises ConfigurationError, ArgumentTypeError.
    """
    check_id_count(path, vocab_size, dtype)
    found, names = as_dtype(by if dtype is None else dtype), list(known)
    if found.name not in names:
        raise ConfigurationError(f"{os.fspath(path)}: {kind} stores {', '.join(names)}, not {found.name}")
    return found


class DocumentWriter:
    """Writes token files, document by document; nothing stands under `path` before all is whole.

    A kind says how many bytes its `header` has, and does the rest in `finish`; both are zeros and nothing in a file
    that holds tokens alone. `tokens`, `documents` and `largest` are what was written so far: counts, and an id.

    Args:
        path: the final name of the file with the tokens; an existing file is replaced.
        vocab_size: ids must be below it. dtype: what they are stored in, one of DTYPES.

    Raises OSError.
    """

    header = 0
    most_tokens = 1 << 63
    """What the kind's header can count."""

    def __init__(self, path: "str | os.PathLike[str]", vocab_size: "int | None", dtype: np.dtype) -> None:
        self.path, self.vocab_size, self.dtype = Path(path), vocab_size, dtype
        limit = int(np.iinfo(dtype).max) + 1
        self._limit = min(limit, vocab_size) if vocab_size is not None else limit
        self.tokens = self.documents = self.largest = 0
        self._new = NewFile(self.path)
        self._file = self._new.file
        self._beside: list[NewFile] = []
        self._loss: NewFile | None = None
        self._ends: IO[bytes] = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - closed in close
        self._file.write(bytes(self.header))

    def write(
        self, document: "Iterable[int] | np.ndarray", loss: "Iterable[bool] | npt.NDArray[np.bool_] | None" = None
    ) -> None:
        """Appends one document (1-D integers, its end-of-text id included if it shall have one).

        loss: a bool a token, whether it counts as a label: then `FILE.loss` stands beside the file (see
        loss_masks.py), in which tokens of documents without one all count.
        """
        if self._file.closed:
            raise ConfigurationError(f"{self.path}: the writer is closed; a token file is written in one go")
        if not isinstance(document, np.ndarray):
            given = list(document) if isinstance(document, Iterable) else None
            if given is None or not all(
                isinstance(n, (int, np.integer)) and n is not True and n is not False for n in given
            ):
                raise ArgumentTypeError(f"a document is a list or 1-D array of integers, got {document!r:.80}")
            ids = np.array(given)
            if ids.dtype.kind not in "iu":  # beyond 64 bits: named below as the ids that do not fit
                ids = np.array(given, dtype=object)
        elif document.ndim != 1 or document.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"a document is a 1-D array of integers, got shape {document.shape}, dtype {document.dtype}"
            )
        else:
            ids = document
        mask = None
        if loss is not None:
            mask = np.asarray(loss if isinstance(loss, np.ndarray) else list(loss))
            if mask.shape != ids.shape or (mask.dtype != np.bool_ and mask.size):
                raise ArgumentTypeError(
                    f"loss is a bool a token, here ({ids.size},); got {mask.dtype} {mask.shape} {loss!r:.80}"
                )
        self.write_many(ids, np.array([ids.size], np.uint64), None if mask is None else mask.astype(np.bool_))

    def write_many(self, tokens: np.ndarray, ends: np.ndarray, loss: "npt.NDArray[np.bool_] | None" = None) -> None:
        """Appends whole documents in one go, with the same bytes as one by one.

        Args:
            tokens: integers (t,), the documents end to end.
            ends: integers (n,), cumulative document ends in `tokens`; the last is t. Empty documents are left out.
            loss: bool (t,), which tokens count as labels; left out, all.
        """
        if self._file.closed:
            raise ConfigurationError(f"{self.path}: the writer is closed; a token file is written in one go")
        ends = np.asarray(ends).astype(np.int64)
        ends = ends[np.diff(ends, prepend=0) != 0]
        if tokens.size != (ends[-1] if ends.size else 0) or np.any(np.diff(ends, prepend=0) < 0):
            raise ConfigurationError(f"document ends must rise up to the {tokens.size} tokens they cut")
        if loss is not None and (loss.dtype != np.bool_ or loss.shape != tokens.shape):
            raise ArgumentTypeError(f"loss is bool ({tokens.size},), got {loss.dtype} {loss.shape}")
        if not tokens.size:
            return
        largest, smallest = int(tokens.max()), int(tokens.min())
        if self.tokens + tokens.size > self.most_tokens:
            raise ConfigurationError(
                f"{self.path}: more than {self.most_tokens:,} tokens, which no file of this kind can count; "
                "begin another one"
            )
        if smallest < 0 or largest >= self._limit:
            wrong = smallest if smallest < 0 else largest
            place = int(np.flatnonzero(tokens == wrong)[0])
            document = self.documents + int(np.searchsorted(ends, place, side="right"))
            raise TokenIdError(
                f"{self.path}: token id {wrong} in document {document} does not fit: ids are "
                f"0 … {self._limit - 1} (dtype {self.dtype.name}, vocab_size {self.vocab_size})"
            )
        self.largest = max(self.largest, largest)
        for first in range(0, tokens.size, _BLOCK):  # a mapped document may be larger than memory
            part = slice(first, min(first + _BLOCK, tokens.size))
            self.put(tokens[part].astype(self.dtype, copy=False).tobytes())
            self._put_loss(part.start, part.stop, loss)
        self._ends.write((ends + self.tokens).astype("<u8").tobytes())
        self.tokens += tokens.size
        self.documents += ends.size

    def _put_loss(self, start: int, stop: int, loss: "npt.NDArray[np.bool_] | None") -> None:
        """The mask of the tokens [start, stop) of those that are written now."""
        if loss is not None and self._loss is None:
            self._loss = NewFile(loss_path(self.path))
            for first in range(0, self.tokens, _BLOCK):  # of the documents that had none so far
                self._loss.file.write(b"\1" * min(_BLOCK, self.tokens - first))
        if self._loss is not None:
            mask = b"\1" * (stop - start) if loss is None else loss[start:stop].astype(np.uint8).tobytes()
            self._loss.file.write(mask)

    def ends(self) -> "Iterator[npt.NDArray[np.uint64]]":
        """The document ends written so far, (n,) at a time, in tokens."""
        self._ends.seek(0)
        while block := self._ends.read(_BLOCK):
            yield np.frombuffer(block, np.dtype("<u8"))
        self._ends.seek(0, os.SEEK_END)

    def put(self, data: bytes) -> None:
        """Appends bytes to the file."""
        self._file.write(data)

    def put_header(self, head: bytes) -> None:
        """Gives the header, which was zeros so far, its bytes."""
        self._file.seek(0)
        self._file.write(head)

    def beside(self, path: Path) -> "IO[bytes]":
        """A file that goes with the tokens, to be written now; the last one made takes its name last."""
        self._beside.append(NewFile(path))
        return self._beside[-1].file

    def finish(self) -> None:
        """Completes the file, and makes those beside it."""

    def close(self) -> None:
        """Completes the files and gives them their names. Raises ConfigurationError if there is no token."""
        if self._file.closed:
            return
        try:
            if not self.tokens:
                raise ConfigurationError(f"{self.path}: no document with a token was written")
            self.finish()
            self._keep()
        except BaseException:
            self.abort()
            raise
        self._ends.close()

    def _keep(self) -> None:
        for new in (self._new, *self._beside):
            new.file.flush()
            os.fsync(new.file.fileno())
        # first the mask, or nobody's mask away: no token file is ever beside another one's
        if self._loss is not None:
            self._loss.keep()
        else:
            loss_path(self.path).unlink(missing_ok=True)
        for new in self._beside:
            new.path.unlink(missing_ok=True)
        for new in (self._new, *self._beside):
            new.keep()

    def abort(self) -> None:
        """Throws away what was written; what stood under the names stays as it was."""
        for new in (self._new, *self._beside, *([] if self._loss is None else [self._loss])):
            new.drop()
        with contextlib.suppress(OSError):  # a full disk fails again where a buffer is flushed
            self._ends.close()

    def __enter__(self) -> "Any":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
