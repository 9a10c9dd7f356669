"""A token file from texts, in one call: parallel, in bounded memory, and able to go on after a kill.

    inputs ──cut──▶ pieces ──workers──▶ X.pieces/*.piece ──in order, or shuffled──▶ X.pieces/assembled.tok ──▶ X

A piece is named by a hash of all that decides its bits (the settings, the tokenizer, the files' sizes and times,
its bytes of them), so a run that is begun again takes up exactly those that are still right, whatever else lies
there. How the inputs are cut changes nothing in the result: documents have one order, that of the inputs, and
with `shuffle_documents` a keyed permutation of it. The lock on the work folder ends with the process.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..atomic import sync_folder
from ..core import as_count
from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError
from ..formats.ids import DocumentIdsWriter, ids_path
from ..formats.own import TokenFileWriter, token_dtype
from ..formats.places import loss_path
from ..permute import derive_key, permute_numbers
from .documents import InputFile, Span, cut_into_pieces
from .listing import list_inputs
from .opening import shown
from .pieces import ASSEMBLED, Content, Piece, PieceReader, is_ours, piece_name, read_piece
from .placing import is_url, upload, work_folder
from .pool import Workers
from .tokenizers import ByteTokenizer, TextTokenizer, load_tokenizer

__all__ = ["TokenizeSummary", "tokenize_files"]

PIECE_BYTES = (1 << 20, 1 << 24)  # the smallest and the largest piece of input
PIECES = 64  # as many at least, where they are not smaller than that: work for that many processes
SHUFFLED = 1 << 16  # documents looked up in one go
BLOCK_BYTES = 1 << 22  # bytes gathered in one go
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
VERSION = 1  # of what a piece holds; another is never taken up


@dataclass(frozen=True)
class TokenizeSummary:
    """What `tokenize_files` made.

    documents: in the file. empty_documents: left out, for they had no token. tokens: with those that close the
    documents. text_bytes: UTF-8 bytes of the texts. end_of_text: what closed them, or "". pieces, kept_pieces:
    of the work, and how many of them an earlier run had finished. seconds: of this run. tokens_per_second: of
    what this run tokenised, all its time counted.
    """

    path: str
    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    dtype: str
    end_of_text: str
    pieces: int
    kept_pieces: int
    seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        empty = f" ({self.empty_documents:,} empty ones left out)" if self.empty_documents else ""
        kept = f"; {self.kept_pieces} of {self.pieces} pieces kept from an earlier run" if self.kept_pieces else ""
        close = f", each closed by {self.end_of_text}" if self.end_of_text else ", without an end-of-text token"
        return (
            f"{self.path}: {self.documents:,} documents{empty}{close}\n"
            f"{self.tokens:,} {self.dtype} tokens of {self.text_bytes:,} bytes of text "
            f"({self.text_bytes / self.tokens:.2f} bytes a token)\n"
            f"{self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s{kept}"
        )


def tokenize_files(
    inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    output: "str | os.PathLike[str]",
    tokenizer: "str | os.PathLike[str]",
    *,
    column: str = "text",
    ids: "str | None" = None,
    kind: str = "auto",
    end_of_text: "str | bool" = True,
    shuffle_documents: bool = False,
    seed: int = 0,
    workers: "int | None" = None,
    dtype: object = None,
    piece_bytes: "int | None" = None,
    progress: "bool | None" = None,
    split: str = "train",
    work: "str | os.PathLike[str] | None" = None,
) -> TokenizeSummary:
    """Writes one token file of ours from texts, each document closed by an end-of-text token.

    Killed at any moment and called again with the same arguments it goes on from what was finished, and the
    file has the same bits as that of an unbroken run, with any number of workers. Finished pieces are kept in
    `OUTPUT.pieces` until the file is whole; nothing else ever stands under `output`. Where that is a URL the file is
    made in `work` and uploaded at the end; it stands there until it is uploaded.

    Documents without a token are left out and counted. Text that spells a special token becomes that token, as
    the tokenizer has it; truncation, padding and templates in a tokenizer's file are not applied.

    Args:
        inputs: paths, folders (all files in them but hidden ones), glob patterns, URLs of these, data sets: texts,
            JSON lines (both packed too), Parquet, Arrow; see `listing.list_inputs`.
        output: the token file, a path or a URL; an existing one is replaced at the end.
        tokenizer: "byte", or the path of a `tokenizers` JSON file; see `load_tokenizer`.
        column: of JSON lines and rows: the text. ids: of those: the column whose values (strings, integers) are
            kept in `OUTPUT.ids`, for `TokenReader.document_id`; a text file's id is its path.
        kind: "text", "jsonl", "parquet", "arrow", or "auto": by the files' names.
        end_of_text: the token that closes documents; True: the tokenizer's own, False: none.
        shuffle_documents: the documents in the order of a permutation keyed by `seed`, their ids with them.
        workers: processes, each with one thread; left out: as many as this process may use cores.
        dtype: of the file; left out: uint16 for vocabularies up to 65,536, else uint32.
        piece_bytes: of input, in one piece of the work; it changes no bit of the result.
        progress: a bar on stderr; None: where that is a terminal.
        split: of data sets of `datasets`.
        work: a folder, for the file of a URL; left out: one in the user's cache folder.

    Raises ConfigurationError, ArgumentTypeError; DocumentError for what is no document, naming file and line;
    TokenFileError for a file that cannot be read, and where the disk is full; WorkerError.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"text": "one", "url": "x/1"}\\n{"text": "three", "url": "x/3"}\\n')
    >>> summary = tokenize_files(folder / "a.jsonl", folder / "a.tok", "byte", ids="url", workers=1)
    >>> summary.documents, summary.tokens
    (2, 10)
    >>> from tokenpipe.datapipes import TokenReader
    >>> reader = TokenReader(folder / "a.tok")
    >>> reader.document_id(1), reader.document_ends().tolist()
    ('x/3', [4, 10])
    """
    if (
        not isinstance(column, str)
        or not isinstance(ids, (str, type(None)))
        or not isinstance(end_of_text, (str, bool))
    ):
        raise ArgumentTypeError(f"column, ids and end_of_text are names, got {column!r}, {ids!r}, {end_of_text!r}")
    count = as_count("workers", _cores() if workers is None else workers)
    key = derive_key(as_count("seed", seed, 0), "shuffle_documents")
    began = time.perf_counter()
    folder, url = work_folder(output, work), os.fspath(output) if is_url(output) else None
    target = folder / ASSEMBLED if url else Path(output)
    found = load_tokenizer(tokenizer, end_of_text if isinstance(end_of_text, str) else None)
    if end_of_text is not False and found.end_of_text is None:
        raise ConfigurationError(
            f"{found.name}: no token of its vocabulary is known to close documents; name it by end_of_text=, or say "
            "end_of_text=False (--end-of-text NAME, --no-end-of-text)"
        )
    files = list_inputs(inputs, kind, (target, ids_path(target), folder), split)
    settings = {
        "version": VERSION,
        "tokenizer": found.hash.hex(),
        "package": "" if isinstance(found, ByteTokenizer) else version("tokenizers"),
        "end_of_text": None if end_of_text is False else found.end_of_text,
        "column": column,
        "ids": ids,
        "dtype": token_dtype(found.vocab_size, dtype).name,
    }
    job = {
        "settings": settings,
        "tokenizer": os.fspath(tokenizer),
        "end_of_text_name": found.end_of_text_name or None,
        "folder": str(folder),
    }
    size = _piece_bytes(files) if piece_bytes is None else as_count("piece_bytes", piece_bytes)
    with _locked(folder), _full_disk_named(target, folder):
        with (
            _Progress(sum(file.size for file in files), progress) as bar,
            contextlib.closing(_finished(files, size, job, count, bar)) as pieces,
        ):
            writer = _assemble(folder, pieces, found, settings, key if shuffle_documents else None)
        if url:
            upload(writer.path, url, with_ids=ids is not None)
        else:
            _put_in_place(writer.path, target, with_ids=ids is not None)
        _clear(folder, is_ours)
    seconds = time.perf_counter() - began
    return TokenizeSummary(
        path=shown(url) if url else str(target),
        documents=writer.documents,
        empty_documents=bar.empty,
        tokens=writer.tokens,
        text_bytes=bar.text_bytes,
        dtype=writer.dtype.name,
        end_of_text=found.end_of_text_name if end_of_text is not False else "",
        pieces=bar.pieces,
        kept_pieces=bar.kept,
        seconds=seconds,
        tokens_per_second=bar.tokens / seconds,
    )


def _finished(
    files: "list[InputFile]", size: int, job: "dict[str, Any]", count: int, bar: "_Progress"
) -> "Generator[Piece, None, None]":
    """All pieces in order, as soon as each is finished; those of an earlier run are taken as they are."""
    folder, settings = Path(job["folder"]), job["settings"]
    itemsize, ids = np.dtype(settings["dtype"]).itemsize, settings["ids"] is not None

    def tasks() -> "Iterator[tuple[int, list[Span] | Piece]]":
        for number, spans in enumerate(cut_into_pieces(files, size)):
            piece = read_piece(folder / piece_name(settings, spans), itemsize, ids)
            if piece is not None:
                bar.keep(sum(span.end - span.start for span in spans))
            yield number, spans if piece is None else piece

    most = max(1, sum(1 for _ in cut_into_pieces(files, size)))
    with contextlib.closing(Workers(min(count, most), job)) as workers:
        for piece in workers.run(tasks(), bar):
            bar.count(piece)
            yield piece


def _assemble(
    folder: Path, pieces: Iterator[Piece], tokenizer: TextTokenizer, settings: "dict[str, Any]", key: "int | None"
) -> TokenFileWriter:
    """`assembled.tok` in the work folder, and its ids, whole and closed."""
    with contextlib.ExitStack() as stack:
        writer = TokenFileWriter(
            folder / ASSEMBLED,
            tokenizer.vocab_size,
            settings["dtype"],
            tokenizer.name,
            tokenizer.hash,
            settings["end_of_text"],
        )
        stack.enter_context(writer)
        names: DocumentIdsWriter | None = None
        if settings["ids"] is not None:
            names = DocumentIdsWriter(ids_path(writer.path))
            stack.enter_context(names)
        reader = stack.enter_context(contextlib.closing(PieceReader(writer.dtype, names is not None)))
        for tokens, ends, text, id_ends in _content(reader, pieces, key):
            writer.write_many(tokens, ends)
            if names is not None:
                names.write_many(text, id_ends)
        if not writer.tokens:
            raise ConfigurationError("the inputs hold no text: not one document has a token")
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


class _Progress:
    """The bar, by bytes of input, and what the summary says of the work; called with (bytes, tokens)."""

    def __init__(self, total: int, shown: "bool | None") -> None:
        from tqdm import tqdm

        disable = None if shown is None else not shown  # None: no bar where stderr is no terminal
        how: Any = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "disable": disable}
        self.total = total
        self.bar = tqdm(total=total, desc="tokenising", **how)
        self.began = time.perf_counter()
        self.tokens = self.kept = self.pieces = self.empty = self.text_bytes = 0

    def __call__(self, done: int, tokens: int) -> None:
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens / (time.perf_counter() - self.began):,.0f} tokens/s", refresh=False)
        self.bar.update(done)

    def keep(self, size: int) -> None:
        """A piece is there already: done, but not by this run, so it is no speed."""
        self.kept += 1
        if not self.bar.disable:
            self.bar.initial += size
        self.bar.update(size)

    def count(self, piece: Piece) -> None:
        self.pieces += 1
        self.empty += piece.empty
        self.text_bytes += piece.text_bytes

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if kind is None:
            self.bar.update(self.total - self.bar.n)  # what makes no document: blank lines
        self.bar.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _piece_bytes(files: "list[InputFile]") -> int:
    """A power of two, so that inputs that grow a little keep the pieces they have."""
    share = sum(file.size for file in files) // PIECES
    return min(max(1 << share.bit_length(), PIECE_BYTES[0]), PIECE_BYTES[1])


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the work folder and holds its lock; takes the folder away where nothing is left in it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another run has just ended
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                break
        except BlockingIOError as error:
            os.close(handle)
            raise ConfigurationError(
                f"{folder}: another run makes {folder.name.removesuffix('.pieces')} now; wait for it or end it"
            ) from error
        os.close(handle)
    try:
        _clear(folder, _unfinished)
        yield
    finally:
        with contextlib.suppress(OSError):
            _clear(folder, _unfinished)  # of workers that were ended
        with contextlib.suppress(OSError):  # finished pieces, for the next run, or a file that is not ours
            folder.rmdir()
        os.close(handle)


@contextlib.contextmanager
def _full_disk_named(target: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise TokenFileError(
            error.errno,
            f"cannot be written: {os.strerror(error.errno)}; make room and run the same again: what is finished is "
            f"kept in {folder}",
            str(target),
        ) from error


def _clear(folder: Path, which: "Callable[[str], bool]") -> None:
    for path in list(folder.iterdir()):
        if which(path.name):
            path.unlink(missing_ok=True)


def _unfinished(name: str) -> bool:
    """Whether a file of a work folder was not finished, and is of no use."""
    return is_ours(name) and not name.endswith(".piece")


def _put_in_place(made: Path, target: Path, with_ids: bool) -> None:
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
