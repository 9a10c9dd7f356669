"""A token file from texts, in one call: parallel, in bounded memory, and able to go on after a kill.

    inputs ──cut──▶ pieces ──workers──▶ X.pieces/*.piece ──in order, or shuffled──▶ X.pieces/assembled.tok ──▶ X

A piece is named by a hash of all that decides its bits (the settings, the tokenizer, the files' sizes and times,
its bytes of them), so a run that is begun again takes up exactly those that are still right, whatever else lies
there. How the inputs are cut changes nothing in the result: documents have one order, that of the inputs, and
with `shuffle_documents` a keyed permutation of it. The lock on the work folder ends with the process.
"""

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import as_count
from ..document_ends import cores
from ..errors import ConfigurationError
from ..formats.ids import ids_path
from ..permute import derive_key
from .assemble import Job, assemble, prepare, put_in_place
from .documents import InputFile, cut_into_pieces
from .listing import list_inputs
from .locking import clear, full_disk_named, locked
from .opening import shown
from .pieces import ASSEMBLED, Piece, Task, is_ours
from .placing import is_url, upload, work_folder
from .pool import Workers
from .progress import Progress

__all__ = ["TokenizeSummary", "tokenize_files"]

PIECE_BYTES = (1 << 20, 1 << 24)  # the smallest and the largest piece of input
PIECES = 64  # as many at least, where they are not smaller than that: work for that many processes


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
    count = as_count("workers", cores() if workers is None else workers)
    key = derive_key(as_count("seed", seed, 0), "shuffle_documents")
    began = time.perf_counter()
    folder, url = work_folder(output, work), os.fspath(output) if is_url(output) else None
    target = folder / ASSEMBLED if url else Path(output)
    job = prepare(tokenizer, column, ids, end_of_text, dtype)
    files = list_inputs(inputs, kind, (target, ids_path(target), folder), split)
    size = _piece_bytes(files) if piece_bytes is None else as_count("piece_bytes", piece_bytes)
    with locked(folder), full_disk_named(target, folder):
        with (
            Progress(sum(file.size for file in files), progress) as bar,
            contextlib.closing(_finished(files, size, folder, job, count, bar)) as pieces,
        ):
            writer = assemble(folder, pieces, job, key if shuffle_documents else None)
        if writer is None:
            raise ConfigurationError("the inputs hold no text: not one document has a token")
        if url:
            upload(writer.path, url, with_ids=job.ids)
        else:
            put_in_place(writer.path, target, with_ids=job.ids)
        clear(folder, is_ours)
    seconds = time.perf_counter() - began
    return TokenizeSummary(
        path=shown(url) if url else str(target),
        documents=writer.documents,
        empty_documents=bar.empty,
        tokens=writer.tokens,
        text_bytes=bar.text_bytes,
        dtype=writer.dtype.name,
        end_of_text=job.end_of_text_name,
        pieces=bar.pieces,
        kept_pieces=bar.kept,
        seconds=seconds,
        tokens_per_second=bar.tokens / seconds,
    )


def _finished(
    files: "list[InputFile]", size: int, folder: Path, job: Job, count: int, bar: Progress
) -> "Generator[Piece, None, None]":
    """All pieces in order, as soon as each is finished; those of an earlier run are taken as they are."""

    def tasks() -> "Iterator[Task | Piece]":
        for spans in cut_into_pieces(files, size):
            task = job.task(folder, spans)
            if isinstance(task, Piece):
                bar.keep(sum(span.end - span.start for span in spans))
            yield task

    most = max(1, sum(1 for _ in cut_into_pieces(files, size)))
    with contextlib.closing(Workers(min(count, most), job.for_workers)) as workers:
        for piece in workers.run(tasks(), bar):
            bar.count(piece)
            yield piece


def _piece_bytes(files: "list[InputFile]") -> int:
    """A power of two, so that inputs that grow a little keep the pieces they have."""
    share = sum(file.size for file in files) // PIECES
    return min(max(1 << share.bit_length(), PIECE_BYTES[0]), PIECE_BYTES[1])
