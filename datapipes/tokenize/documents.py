"""Inputs to documents: how files are cut into pieces of work, and the texts of a piece.

A text file is one document. In a file of JSON lines each line is an object, and one of its columns the
text; lines of white space are skipped. In Parquet and Arrow files each row is a document (columns.py). All text is
UTF-8 and nothing else; a byte order mark at a file's beginning is left out. A piece is a list of spans (file, first
byte, end): whole files, and stretches of those that can be cut, to which the lines or row groups that *begin* in them
belong. So documents have one order, that of the inputs, however they are cut. Memory: the largest document, never a
file of lines or rows.
"""

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from ..errors import DocumentError, TokenFileError
from .opening import DamagedArchiveError, InputFile, Unpacked, opened, shown

__all__ = ["Document", "InputFile", "Span", "cut_into_pieces", "line_of", "read_documents"]

FAR = 1 << 26  # bytes of a remote file that are read again to say a line


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    file: InputFile
    start: int
    end: int


class Document(NamedTuple):
    """A text, its id ("" where none is asked for), its file, the byte (of what was unpacked) or the row where it
    begins, and the bytes that it takes of the file as it lies there.
    """

    text: str
    id: str
    file: InputFile
    start: int
    taken: int

    @property
    def where(self) -> str:
        if self.file.kind in ("parquet", "arrow"):
            return f"{shown(self.file.path)}, row {self.start} (counted from 0)"
        return _place(self.file, self.start) if self.file.kind == "jsonl" else shown(self.file.path)


def cut_into_pieces(files: Iterable[InputFile], piece_bytes: int) -> Iterator[list[Span]]:
    """The inputs in order, in pieces of about `piece_bytes`; text files and packed ones are never cut."""
    piece: list[Span] = []
    room = piece_bytes
    for file in files:
        start = 0
        while start < file.size or (start == 0 and (file.whole or file.kind != "jsonl")):
            end = file.size if file.whole else min(file.size, start + room)
            piece.append(Span(file, start, end))
            room -= max(1024, end - start)  # a task names its files: not too many
            start = max(1, end)
            if room <= 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece


def read_documents(span: Span, column: str, ids: "str | None") -> Iterator[Document]:
    """The documents of a span, in order.

    Args:
        column: of JSON lines and rows, the text. ids: of those, the column of ids (strings or integers); a text
            file's id is its path. None: no ids.

    Raises DocumentError for what is no document, naming file and line or row; TokenFileError for a file that cannot
    be read, or that is not what it was when the inputs were listed.
    """
    if span.file.kind in ("parquet", "arrow"):
        from .columns import read_rows

        for row in read_rows(span.file, span.start, span.end, column, ids):
            yield Document(row.text, row.id, span.file, row.number, row.taken)
        return
    with opened(span.file, span.end) as file:
        yield from _lines(span, file, column, ids) if span.file.kind == "jsonl" else _whole(span, file, ids)


def _whole(span: Span, file: "IO[bytes]", ids: "str | None") -> Iterator[Document]:
    path = shown(span.file.path)
    try:
        data = _unpacked(span.file, file).read()
    except DamagedArchiveError as error:
        raise TokenFileError(f"{path}: {error}") from error
    yield Document(_decoded(data, span.file, 0), "" if ids is None else path, span.file, 0, span.end)


def _lines(span: Span, file: "IO[bytes]", column: str, ids: "str | None") -> Iterator[Document]:
    if span.start:  # the line that began before belongs to the span before
        file.seek(span.start - 1)
        file.readline()
    of, start = span.file, file.tell()
    text_of = _unpacked(of, file)
    taken = 0  # of a packed file
    while of.packed or start < span.end:
        try:
            line = text_of.readline()
        except DamagedArchiveError as error:
            raise TokenFileError(f"{_place(of, start)}: {error}") from error
        if not line:
            return
        try:
            text = _decoded(line, of, start)
            row = _object(text, of, start) if text.strip() else None
            if row is not None:
                found = _string(row, column, of, start)
                name = "" if ids is None else _string(row, ids, of, start, is_id=True)
        except DocumentError as error:
            error.end = start + len(line)
            raise
        if row is not None:
            size = len(line)
            if isinstance(text_of, _UnpackedText):
                taken, size = text_of.taken, text_of.taken - taken
            yield Document(found, name, of, start, size)
        start += len(line)


class _UnpackedText(io.BufferedReader):
    """Lines of a packed file."""

    @property
    def taken(self) -> int:
        return self.raw.taken  # type: ignore[attr-defined]


def _unpacked(of: InputFile, file: "IO[bytes]") -> "IO[bytes]":
    return _UnpackedText(Unpacked(file, of.packed), 1 << 17) if of.packed else file


def _decoded(data: bytes, file: InputFile, start: int) -> str:
    try:
        return (data.removeprefix(codecs.BOM_UTF8) if start == 0 else data).decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(error.object)
        where = _place(file, start, data[:at].count(b"\n"))
        raise DocumentError(
            f"{where}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset {start + at}"
        ) from error


def _object(text: str, file: InputFile, start: int) -> "dict[str, Any]":
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{_place(file, start)}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DocumentError(f"{_place(file, start)}: a {type(row).__name__}, not a JSON object")
    return row


def _string(row: "dict[str, Any]", column: str, file: InputFile, start: int, is_id: bool = False) -> str:
    if column not in row:
        has = ", ".join(map(repr, list(row)[:20])) or "none"
        raise DocumentError(f"{_place(file, start)}: no column {column!r}; it has {has}")
    value = row[column]
    if is_id and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DocumentError(
            f"{_place(file, start)}: column {column!r} holds {value!r:.40} ({type(value).__name__}), "
            f"not a string{' or an integer' if is_id else ''}"
        )
    if is_id and not value:
        raise DocumentError(f"{_place(file, start)}: column {column!r} is empty; an id is not")
    return value


def _place(file: InputFile, start: int, lines: int = 0) -> str:
    """The file and the line in which byte `start` is, or one that many lines behind it."""
    path = shown(file.path)
    if file.remote and not file.packed and start > FAR:
        return f"{path}, byte {start}"
    return f"{path}, line {line_of(file, start) + lines}"


def line_of(file: InputFile, start: int) -> int:
    """The line, counted from 1, in which byte `start` of a file (of what was unpacked) is."""
    line = 1
    if start:
        with opened(file, start) as stream:
            text = _unpacked(file, stream)
            while start > 0 and (block := text.read(min(start, 1 << 20))):
                line += block.count(b"\n")
                start -= len(block)
    return line
