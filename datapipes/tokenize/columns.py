"""Rows of Parquet and Arrow files: the columns of texts and ids alone, a stretch of rows in memory at a time.

A span of bytes has the row groups (Parquet) or record batches (Arrow) that begin in it: a group begins at its first
row's share of the file's bytes, a batch of an Arrow stream where it lies.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from ..errors import ConfigurationError, DocumentError, TokenFileError
from .opening import InputFile, needed, opened, shown

__all__ = ["Row", "count_rows", "read_rows"]

ROWS = 1024  # at a time, or
BYTES = 1 << 22  # about these, where the file says how long its texts are
BUFFER = 1 << 20  # bytes of a column that are read as they are decoded
REMOTE_BUFFER = 1 << 23
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Row(NamedTuple):
    """number: in the file, from 0. taken: its share of the file's bytes."""

    text: str
    id: str
    number: int
    taken: int


class _Batch(NamedTuple):
    """Rows end to end: `rows` (a RecordBatch), the number of the first, the bytes [low, high) that they stand for."""

    rows: Any
    first: int
    low: int
    high: int


def read_rows(file: InputFile, start: int, end: int, column: str, ids: "str | None") -> Iterator[Row]:
    """The rows of bytes [start, end) of a file.

    Raises DocumentError for a column or a row that is no text, TokenFileError for a file that is damaged, that cannot
    be read, or that changed; ConfigurationError without pyarrow.
    """
    arrow = _arrow(file.kind)
    batches = _parquet if file.kind == "parquet" else _batches
    columns = [column] if ids in (None, column) else [column, ids]
    with opened(file) as stream:
        try:
            for batch in batches(file, stream, start, end, columns, ids):
                yield from _rows(file, batch, column, ids)
        except (arrow.ArrowException, EOFError, OSError) as error:
            if isinstance(error, TokenFileError):
                raise
            kind = file.kind.capitalize()
            raise TokenFileError(f"{shown(file.path)}: damaged, cut, or no {kind} file: {error}") from error


def count_rows(path: str) -> int:
    """Rows of an Arrow file on this machine. Raises TokenFileError."""
    arrow = _arrow("arrow")
    try:
        with arrow.memory_map(path) as source:
            return sum(batch.num_rows for batch, _, _ in _walked(source, source.size()))
    except (arrow.ArrowException, OSError) as error:
        raise TokenFileError(f"{path}: damaged, cut, or no Arrow file: {error}") from error


def _arrow(kind: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(f"{needed(kind)}: {error}") from error
    return pyarrow


def _parquet(
    file: InputFile, stream: "IO[bytes]", start: int, end: int, columns: "list[str]", ids: "str | None"
) -> Iterator[_Batch]:
    arrow = _arrow("parquet")
    buffer = REMOTE_BUFFER if file.remote else BUFFER
    found = arrow.parquet.ParquetFile(stream, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)
    _check_columns(file, found.schema_arrow, columns, ids)
    total, first = found.metadata.num_rows, 0
    for number in range(found.num_row_groups):
        group = found.metadata.row_group(number)
        if group.num_rows and start <= file.size * first // total < end:
            sizes = (group.column(k) for k in range(group.num_columns))
            size = sum(one.total_uncompressed_size for one in sizes if one.path_in_schema in columns)
            rows = max(1, min(ROWS, BYTES * group.num_rows // max(1, size)))
            at = first
            for batch in found.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False):
                after = at + batch.num_rows
                yield _Batch(batch, at, file.size * at // total, file.size * after // total)
                at = after
            if at != first + group.num_rows:
                raise TokenFileError(
                    f"{shown(file.path)}: row group {number} holds {at - first} rows, its footer says {group.num_rows}"
                )
        first += group.num_rows
    if first != total:
        raise TokenFileError(f"{shown(file.path)}: its row groups hold {first} rows, its footer says {total}")


def _batches(
    file: InputFile, stream: "IO[bytes]", start: int, end: int, columns: "list[str]", ids: "str | None"
) -> Iterator[_Batch]:
    arrow = _arrow("arrow")
    with arrow.PythonFile(stream, "r") if file.remote else arrow.memory_map(file.path) as source:
        first = 0
        schema = None
        for batch, low, high in _walked(source, file.size):
            if schema is None:
                _check_columns(file, schema := batch.schema, columns, ids)
            if low >= end:
                return
            if low >= start and batch.num_rows:
                wanted = batch.select(columns)
                step = max(1, min(ROWS, BYTES * batch.num_rows // max(1, wanted.nbytes)))
                for k in range(0, batch.num_rows, step):
                    rows = wanted.slice(k, step)
                    try:
                        rows.validate(full=True)  # offsets that lead out of it are no text but a crash
                    except arrow.ArrowException as error:
                        raise TokenFileError(f"{_row(file, first + k)} or behind it is damaged: {error}") from error
                    share = [low + (high - low) * at // batch.num_rows for at in (k, k + rows.num_rows)]
                    yield _Batch(rows, first + k, *share)
            first += batch.num_rows


def _walked(source: Any, size: int) -> "Iterator[tuple[Any, int, int]]":
    """(record batch, the bytes that it stands for) of an Arrow stream or file; of a mapped one nothing is read yet."""
    arrow = _arrow("arrow")
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        found = arrow.ipc.open_file(source)
        for k in range(found.num_record_batches):
            low, high = (size * at // found.num_record_batches for at in (k, k + 1))
            yield found.get_batch(k), low, high
        return
    source.seek(max(0, size - len(END_OF_STREAM)))
    if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise arrow.ArrowInvalid("no mark of its end: it was cut, or is still written")
    source.seek(0)
    stream = arrow.ipc.open_stream(source)
    low = 0
    while True:
        try:
            batch = stream.read_next_batch()
        except StopIteration:
            return
        high = source.tell()
        yield batch, low, high
        low = high


def _check_columns(file: InputFile, schema: Any, columns: "list[str]", ids: "str | None") -> None:
    """Raises DocumentError for a column that is not there once, or holds neither texts nor ids."""
    types = _arrow(file.kind).types
    has = {name: schema.field(k).type for k, name in enumerate(schema.names)}
    for name in columns:
        if schema.names.count(name) != 1:
            there = f"{schema.names.count(name)} columns" if name in has else "no column"
            names = ", ".join(map(repr, schema.names[:20])) or "none"
            raise DocumentError(f"{shown(file.path)}: {there} {name!r}; it has {names}")

        def holds(of: Any, name: str = name) -> bool:
            of = of.value_type if types.is_dictionary(of) else of
            text = types.is_string(of) or types.is_large_string(of) or types.is_string_view(of)
            return text or (name == ids and name != columns[0] and types.is_integer(of))

        if not holds(has[name]):
            nested = ", which is nested" if types.is_nested(has[name]) else ""
            good = ", ".join(repr(one) for one, of in has.items() if holds(of)) or "none"
            raise DocumentError(
                f"{shown(file.path)}: column {name!r} is {has[name]!s:.80}{nested}; columns that would do: {good}"
            )


def _rows(file: InputFile, batch: _Batch, column: str, ids: "str | None") -> Iterator[Row]:
    texts = _values(file, batch, column)
    names = None if ids is None else texts if ids == column else _values(file, batch, ids)
    count, low = len(texts), batch.low
    for k, text in enumerate(texts):
        name = "" if names is None else str(names[k])
        if ids is not None and not name:
            raise DocumentError(f"{_row(file, batch.first + k)}: column {ids!r} is empty; an id is not")
        high = batch.low + (batch.high - batch.low) * (k + 1) // count
        yield Row(text, name, batch.first + k, high - low)
        low = high


def _values(file: InputFile, batch: _Batch, column: str) -> "list[Any]":
    array = batch.rows.column(column)
    try:
        values: list[Any] = array.to_pylist()
    except UnicodeDecodeError:
        for k in range(len(array)):
            try:
                array[k].as_py()
            except UnicodeDecodeError as error:
                raise DocumentError(f"{_row(file, batch.first + k)}: column {column!r}: not UTF-8: {error}") from error
        raise
    if None in values:
        raise DocumentError(f"{_row(file, batch.first + values.index(None))}: column {column!r} holds null, no text")
    return values


def _row(file: InputFile, number: int) -> str:
    return f"{shown(file.path)}, row {number} (counted from 0)"
