"""Inputs to documents: which files there are, how they are cut into pieces of work, and the texts of a piece.

A text file is one document. In a file of JSON lines each line is an object, and one of its columns the
text; lines of white space are skipped. All text is UTF-8 and nothing else; a byte order mark at a file's
beginning is left out. A piece is a list of spans (file, first byte, end): whole text files, and stretches of
JSON lines files, to which the lines that *begin* in them belong. So documents have one order, that of the
inputs, however they are cut. Memory: the largest document, never a file of lines.
"""

import codecs
import glob
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import ArgumentTypeError, ConfigurationError, DocumentError, TokenFileError

__all__ = ["Document", "InputFile", "Span", "cut_into_pieces", "line_of", "list_inputs", "read_documents"]

LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".parquet", ".arrow")
KINDS = ("auto", "text", "jsonl")


class InputFile(NamedTuple):
    """A file as it was when the inputs were listed; it must not change until all is read."""

    path: str
    lines: bool
    size: int
    mtime_ns: int


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    file: InputFile
    start: int
    end: int


class Document(NamedTuple):
    """A text, its id ("" where none is asked for), the file and byte where it begins, the bytes it takes there."""

    text: str
    id: str
    path: str
    start: int
    taken: int
    lines: bool

    @property
    def where(self) -> str:
        return f"{self.path}, line {line_of(self.path, self.start)}" if self.lines else self.path


def list_inputs(
    inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    kind: str = "auto",
    leave_out: "Iterable[Path]" = (),
) -> list[InputFile]:
    """The files that paths, folders and glob patterns name, in one order on every machine.

    Args:
        inputs: one or several, taken in order. A folder gives all its files but hidden ones, by name, its
            sub-folders after them; a pattern its matches, by name.
        kind: "text", "jsonl", or "auto": JSON lines where the name ends in .jsonl, .ndjson or .json.
        leave_out: files and folders that are no input wherever they are found.

    Raises ConfigurationError for a name without files, a file named twice, a packed file; TokenFileError.
    """
    several = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(several, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in several):
        raise ArgumentTypeError(f"inputs are paths, got {inputs!r:.80}")
    if kind not in KINDS:
        raise ConfigurationError(f"kind is {kind!r}; one of {', '.join(map(repr, KINDS))} would do")
    ours = {os.path.realpath(path) for path in leave_out}
    files: dict[str, InputFile] = {}
    for one in several:
        given, found = os.fspath(one), False
        for path in _expand(given, ours):
            if path in files:
                raise ConfigurationError(
                    f"{path}: is named twice by the inputs; to repeat a source, weigh it in a blend"
                )
            if path.lower().endswith(PACKED):
                raise ConfigurationError(f"{path}: packed files are not read; unpack it to text or JSON lines first")
            try:
                at = Path(path).stat()
            except (OSError, ValueError) as error:
                raise _unreadable(path, error) from error
            if not stat.S_ISREG(at.st_mode):
                raise ConfigurationError(f"{path}: no regular file")
            lines = path.lower().endswith(LINES) if kind == "auto" else kind == "jsonl"
            files[path], found = InputFile(path, lines, at.st_size, at.st_mtime_ns), True
        if not found:
            raise ConfigurationError(f"{given}: names no file")
    if not files:
        raise ConfigurationError("no input was named")
    return list(files.values())


def _expand(given: str, ours: "set[str]") -> Iterator[str]:
    """The files of one path, folder or pattern, by name."""
    names = [given]
    if not os.path.lexists(given) and glob.has_magic(given):
        names = sorted(glob.glob(given, recursive=True))  # noqa: PTH207 - patterns may be absolute
    for name in names:
        if not Path(name).is_dir():
            if os.path.realpath(name) not in ours:
                yield name
            continue
        if "**" in given and given not in names:
            continue  # such a pattern names the folder's files itself
        for folder, folders, found in os.walk(name):
            folders[:] = sorted(
                one for one in folders if one[0] != "." and os.path.realpath(f"{folder}/{one}") not in ours
            )
            for one in sorted(found):
                path = os.path.join(folder, one)  # noqa: PTH118 - as the caller spelt it
                if one[0] != "." and os.path.realpath(path) not in ours:
                    yield path


def cut_into_pieces(files: Iterable[InputFile], piece_bytes: int) -> Iterator[list[Span]]:
    """The inputs in order, in pieces of about `piece_bytes`; a text file is never cut."""
    piece: list[Span] = []
    room = piece_bytes
    for file in files:
        start = 0
        while start < file.size or (start == 0 and not file.lines):
            end = min(file.size, start + room) if file.lines else file.size
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
        column: of JSON lines, the text. ids: of JSON lines, the column of ids (strings or integers); a text
            file's id is its path. None: no ids.

    Raises DocumentError for what is no document, naming file and line; TokenFileError for a file that cannot
    be read, or that is not what it was when the inputs were listed.
    """
    path = span.file.path
    try:
        with Path(path).open("rb") as file:
            _check_unchanged(span.file, file)
            yield from _lines(span, file, column, ids) if span.file.lines else _whole(span, file, ids)
            _check_unchanged(span.file, file)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise _unreadable(path, error) from error


def _whole(span: Span, file: "IO[bytes]", ids: "str | None") -> Iterator[Document]:
    path = span.file.path
    text = _decoded(file.read(), path, 0)
    yield Document(text, "" if ids is None else path, path, 0, span.end, False)


def _lines(span: Span, file: "IO[bytes]", column: str, ids: "str | None") -> Iterator[Document]:
    path = span.file.path
    if span.start:  # the line that began before belongs to the span before
        file.seek(span.start - 1)
        file.readline()
    start = file.tell()
    while start < span.end and (line := file.readline()):
        try:
            text = _decoded(line, path, start)
            row = _object(text, path, start) if text.strip() else None
            if row is not None:
                found = _string(row, column, path, start)
                name = "" if ids is None else _string(row, ids, path, start, is_id=True)
        except DocumentError as error:
            error.end = start + len(line)
            raise
        if row is not None:
            yield Document(found, name, path, start, len(line), True)
        start += len(line)


def _decoded(data: bytes, path: str, start: int) -> str:
    try:
        return (data.removeprefix(codecs.BOM_UTF8) if start == 0 else data).decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start + len(data) - len(error.object)
        raise DocumentError(
            f"{path}, line {line_of(path, at)}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}"
        ) from error


def _object(text: str, path: str, start: int) -> "dict[str, Any]":
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{path}, line {line_of(path, start)}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DocumentError(f"{path}, line {line_of(path, start)}: a {type(row).__name__}, not a JSON object")
    return row


def _string(row: "dict[str, Any]", column: str, path: str, start: int, is_id: bool = False) -> str:
    if column not in row:
        has = ", ".join(map(repr, list(row)[:20])) or "none"
        raise DocumentError(f"{path}, line {line_of(path, start)}: no column {column!r}; it has {has}")
    value = row[column]
    if is_id and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DocumentError(
            f"{path}, line {line_of(path, start)}: column {column!r} holds {value!r:.40} ({type(value).__name__}), "
            f"not a string{' or an integer' if is_id else ''}"
        )
    if is_id and not value:
        raise DocumentError(f"{path}, line {line_of(path, start)}: column {column!r} is empty; an id is not")
    return value


def line_of(path: str, start: int) -> int:
    """The line, counted from 1, in which byte `start` of a file is."""
    line = 1
    with Path(path).open("rb") as file:
        while start > 0 and (block := file.read(min(start, 1 << 20))):
            line += block.count(b"\n")
            start -= len(block)
    return line


def _check_unchanged(expected: InputFile, file: "IO[bytes]") -> None:
    at = os.fstat(file.fileno())
    if (at.st_size, at.st_mtime_ns) != (expected.size, expected.mtime_ns):
        raise TokenFileError(
            f"{expected.path}: was written to while it was tokenised: {at.st_size} bytes now, {expected.size} when "
            "the inputs were listed; run it again when the inputs stand still"
        )


def _unreadable(path: str, error: "OSError | ValueError") -> TokenFileError:
    if isinstance(error, OSError):
        return TokenFileError(error.errno, f"cannot read the input: {error.strerror}", path)
    return TokenFileError(f"{path!r} is no path of an input: {error}")
