"""Finished pieces to a token file: as they come, or all documents permuted."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..atomic import sync_folder
from ..errors import ArgumentTypeError, ConfigurationError
from ..formats.ids import DocumentIdsWriter, ids_path
from ..formats.own import TokenFileWriter, token_dtype
from ..formats.places import loss_path
from ..permute import permute_numbers
from .documents import Span
from .pieces import ASSEMBLED, Content, Piece, PieceReader, Task, piece_name, read_piece
from .tokenizers import ByteTokenizer, TextTokenizer, load_tokenizer

__all__ = ["Job", "assemble", "prepare", "put_in_place"]

SHUFFLED = 1 << 16  # documents looked up in one go
BLOCK_BYTES = 1 << 22  # bytes gathered in one go
VERSION = 1  # of what a piece holds; another is never taken up


class Job(NamedTuple):
    """What decides the bits of a token file besides its documents: settings, JSON-able, as they are hashed."""

    tokenizer: TextTokenizer
    tokenizer_path: str
    settings: "dict[str, Any]"

    @property
    def for_workers(self) -> "dict[str, Any]":
        """What worker.py is told."""
        return {
            "settings": self.settings,
            "tokenizer": self.tokenizer_path,
            "end_of_text_name": self.tokenizer.end_of_text_name or None,
        }

    @property
    def ids(self) -> bool:
        return self.settings["ids"] is not None

    @property
    def end_of_text_name(self) -> str:
        """What closes documents; "" for nothing."""
        return self.tokenizer.end_of_text_name if self.settings["end_of_text"] is not None else ""

    def spec(self, key: "int | None", pieces: "list[list[Span]]") -> str:
        """The same for the same bits of a file that is made of these."""
        text = json.dumps([self.settings, key, pieces], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def task(self, folder: Path, spans: "list[Span]") -> "Task | Piece":
        """What is to be done for a piece, or the piece where an earlier run has finished it."""
        itemsize = np.dtype(self.settings["dtype"]).itemsize
        piece = read_piece(folder / piece_name(self.settings, spans), itemsize, self.ids)
        return Task(str(folder), spans) if piece is None else piece


def prepare(
    tokenizer: "str | os.PathLike[str]", column: str, ids: "str | None", end_of_text: "str | bool", dtype: object
) -> Job:
    """Checks what `tokenize_files` is told. Raises ConfigurationError, ArgumentTypeError, TokenFileError."""
    if (
        not isinstance(column, str)
        or not isinstance(ids, (str, type(None)))
        or not isinstance(end_of_text, (str, bool))
    ):
        raise ArgumentTypeError(f"column, ids and end_of_text are names, got {column!r}, {ids!r}, {end_of_text!r}")
    found = load_tokenizer(tokenizer, end_of_text if isinstance(end_of_text, str) else None)
    if end_of_text is not False and found.end_of_text is None:
        raise ConfigurationError(
            f"{found.name}: no token of its vocabulary is known to close documents; name it by end_of_text=, or say "
            "end_of_text=False (--end-of-text NAME, --no-end-of-text)"
        )
    settings = {
        "version": VERSION,
        "tokenizer": found.hash.hex(),
        "package": "" if isinstance(found, ByteTokenizer) else version("tokenizers"),
        "end_of_text": None if end_of_text is False else found.end_of_text,
        "column": column,
        "ids": ids,
        "dtype": token_dtype(found.vocab_size, dtype).name,
    }
    return Job(found, os.fspath(tokenizer), settings)


def assemble(folder: Path, pieces: Iterator[Piece], job: Job, key: "int | None") -> "TokenFileWriter | None":
    """`assembled.tok` in the work folder, and its ids, whole and closed; None where no document has a token.

    Args:
        key: of the documents' permutation; None: as they come.
    """
    with contextlib.ExitStack() as stack:
        writer = TokenFileWriter(
            folder / ASSEMBLED,
            job.tokenizer.vocab_size,
            job.settings["dtype"],
            job.tokenizer.name,
            job.tokenizer.hash,
            job.settings["end_of_text"],
        )
        stack.enter_context(writer)
        names: DocumentIdsWriter | None = None
        if job.ids:
            names = DocumentIdsWriter(ids_path(writer.path))
            stack.enter_context(names)
        reader = stack.enter_context(contextlib.closing(PieceReader(writer.dtype, names is not None)))
        for tokens, ends, text, id_ends in _content(reader, pieces, key):
            writer.write_many(tokens, ends)
            if names is not None:
                names.write_many(text, id_ends)
        if not writer.tokens:
            writer.abort()
            if names is not None:
                names.abort()
            return None
        writer.close()
        if names is not None:
            names.bind(writer.path)
            names.close()
    return writer


def _content(reader: PieceReader, pieces: Iterator[Piece], key: "int | None") -> "Iterator[Content]":
    """What stands in the file, in blocks: the pieces as they come, or all documents permuted."""
    if key is None:
        yield from reader.in_blocks(pieces, BLOCK_BYTES)
        return
    done = list(pieces)
    total = sum(piece.documents for piece in done)
    numbers = (
        permute_numbers(np.arange(k, min(k + SHUFFLED, total), dtype=np.int64), total, total, total, key)
        for k in range(0, total, SHUFFLED)
    )
    yield from reader.gathered(done, numbers, BLOCK_BYTES)


def put_in_place(made: Path, target: Path, with_ids: bool) -> None:
    """Gives the finished files their names, the token file last: it is what says that all is done."""
    if target.exists():
        made.chmod(target.stat().st_mode & 0o777)
    if with_ids:
        ids_path(made).replace(ids_path(target))
    else:
        ids_path(target).unlink(missing_ok=True)  # those of the file that stood here before
    loss_path(target).unlink(missing_ok=True)
    made.replace(target)
    sync_folder(target.parent)
