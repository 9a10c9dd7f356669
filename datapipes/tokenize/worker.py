"""A tokenising process: tasks come in as JSON lines, finished pieces are named in JSON lines that go out.

It is started by pool.py as a plain child, with nothing pickled and the caller's `__main__` not imported. It
ends when its input does: at once, whatever it was at, also when the parent was killed.

    in    the job (settings), then a task {"number", "folder", "spans"} a line
    out   {"batch": [bytes of input, tokens]}    for the progress bar
          {"done": number, "piece": […]}         the piece has its name
          {"error": class, "message", "errno"}   the process ends
"""

import contextlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from .documents import Document, InputFile, Span, read_documents
from .pieces import PieceWriter, piece_name
from .tokenizers import TextTokenizer, load_tokenizer

__all__ = ["main", "make_piece", "said"]

BATCH = 1 << 20  # characters in one call of the tokenizer; and at most
BATCH_DOCUMENTS = 4096


def main() -> None:
    """The process: reads tasks from file descriptor 0 until its end, answers on what was 1."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints does not meet our answers

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what).encode() + b"\n")

    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    try:
        job = tasks.get()
        tokenizer = load_tokenizer(job["tokenizer"], job["end_of_text_name"])
        if tokenizer.hash.hex() != job["settings"]["tokenizer"]:
            raise errors.TokenFileError(f"{job['tokenizer']}: was written to while it was used")
        while True:
            task = tasks.get()
            spans = [Span(InputFile(*file), start, end) for file, start, end in task["spans"]]
            piece = make_piece(
                tokenizer, spans, Path(task["folder"]), job["settings"], lambda *done: answer(batch=done)
            )
            answer(done=task["number"], piece=piece)
    except BrokenPipeError:  # nobody listens any more
        os._exit(1)
    except BaseException as error:
        with contextlib.suppress(BrokenPipeError):  # the parent ends as well
            answer(**said(error))
        os._exit(1)


def said(error: BaseException) -> "dict[str, Any]":
    """An error as the words that `raise_said` makes one of again in another process."""
    known = isinstance(error, (errors.TokenpipeError, OSError))
    message = str(error) if known else traceback.format_exc()
    of_file = {}
    if isinstance(error, OSError):
        message, of_file = error.strerror or message, {"errno": error.errno, "filename": error.filename}
    return {"error": type(error).__name__, "message": message, **of_file}


def _listen(tasks: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin.buffer:
        tasks.put(json.loads(line))
    os._exit(1)  # the parent closed it, or is no more


def make_piece(
    tokenizer: TextTokenizer, spans: Iterable[Span], folder: Path, settings: "dict[str, Any]", progress: Any
) -> "tuple[Any, ...]":
    """Tokenises the documents of some spans into a piece; `progress(bytes, tokens)` after each batch."""
    spans = list(spans)
    ids, end_of_text = settings["ids"], settings["end_of_text"]
    limit = min(tokenizer.vocab_size, int(np.iinfo(settings["dtype"]).max) + 1)
    writer = PieceWriter(folder / piece_name(settings, spans), np.dtype(settings["dtype"]), ids is not None)
    try:
        for batch in _batches(spans, settings["column"], ids):
            texts = [document.text for document in batch]
            writer.text_bytes += _text_bytes(batch)
            encoded = tokenizer.encode_batch(texts)
            kept = [k for k, found in enumerate(encoded) if found.size]
            writer.empty += len(batch) - len(kept)
            tokens = 0
            if kept:
                flat, ends = _closed([encoded[k] for k in kept], end_of_text)
                if int(flat.max()) >= limit:
                    raise errors.TokenIdError(
                        f"{batch[0].where}: token id {flat.max()} does not fit: ids are 0 … {limit - 1} "
                        f"(dtype {writer.dtype.name}, vocab_size {tokenizer.vocab_size})"
                    )
                names = [] if ids is None else [_utf8(batch[k], batch[k].id) for k in kept]
                writer.write(flat.astype(writer.dtype, copy=False), ends, names)
                tokens = flat.size
            progress(sum(document.taken for document in batch), tokens)
        return writer.close()
    except BaseException:
        writer.abort()
        raise


def _batches(spans: Iterable[Span], column: str, ids: "str | None") -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for span in spans:
        for document in read_documents(span, column, ids):
            batch.append(document)
            size += len(document.text)
            if size >= BATCH or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _text_bytes(batch: "list[Document]") -> int:
    return sum(len(_utf8(document, document.text)) for document in batch)


def _utf8(document: Document, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise errors.DocumentError(
            f"{document.where}: holds half a surrogate pair (U+{ord(text[error.start]):04X}), which is no text"
        ) from error


def _closed(encoded: "list[np.ndarray]", end_of_text: "int | None") -> "tuple[np.ndarray, np.ndarray]":
    """Documents end to end (t,), each closed by end_of_text, and their ends (n,)."""
    close = [] if end_of_text is None else [np.array([end_of_text], np.min_scalar_type(end_of_text))]
    ends = np.cumsum([found.size + len(close) for found in encoded], dtype=np.int64)
    return np.concatenate([part for found in encoded for part in (found, *close)]), ends
