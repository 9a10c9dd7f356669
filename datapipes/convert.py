"""Token files of any kinds as one file of another: tokens, document ends, loss masks, ids, and what a header knows.

    inputs ──TokenReader──▶ blocks of whole documents ──the kind's writer──▶ OUTPUT

A block is about 2^22 tokens, mapped while it is written; a document that is longer is one block, mapped and copied
part by part, so memory does not grow with files or documents. What the writer makes takes its name when it is whole;
ids follow, since they name the file's hash. The same inputs give the same bytes, so a run that was killed is simply run
again. Empty documents are left out, as writers do.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .atomic import refuse_url
from .core import Int64s
from .document_ends import checked_ends, find_ends
from .errors import ArgumentTypeError, ConfigurationError
from .formats import DocumentIds, TokenLayout
from .formats.datatrove import DatatroveWriter, read_metadata
from .formats.ids import DocumentIdsWriter, ids_path
from .formats.llmc import LlmcWriter
from .formats.megatron import MegatronWriter
from .formats.own import TokenFileWriter, read_header
from .formats.writer import DocumentWriter
from .loss_masks import as_loss_mask, has_loss_masks, loss_layouts
from .read import TokenReader
from .scores import list_scores

__all__ = ["ConvertSummary", "convert_token_files"]

KINDS: "dict[str, tuple[Callable[..., DocumentWriter], tuple[str, ...]]]" = {
    "own": (TokenFileWriter, ("uint16", "uint32", "int64", "uint8", "int32")),
    "datatrove": (DatatroveWriter, ("uint16", "uint32")),
    "megatron": (MegatronWriter, ("uint16", "int32", "int64", "uint8")),
    "llmc": (LlmcWriter, ("uint16", "uint32")),
}
"""What can be written: its writer, and its dtypes, the first that holds the ids being the one to take."""

SUFFIXES = {".tok": "own", ".ds": "datatrove", ".idx": "megatron"}
BLOCK = 1 << 22  # tokens
UNKNOWN = "Unknown Tokenizer"  # what datatrove writes where nobody said


@dataclass(frozen=True)
class ConvertSummary:
    """What `convert_token_files` made.

    path, kind, dtype: of the new file. files: read. documents: written. empty_documents: left out. notes: what of the
    inputs the new file does not keep, a line each. seconds: all of it.
    """

    path: str
    kind: str
    dtype: str
    files: int
    documents: int
    empty_documents: int
    tokens: int
    seconds: float
    notes: "tuple[str, ...]"

    def __str__(self) -> str:
        empty = f" ({self.empty_documents:,} empty ones left out)" if self.empty_documents else ""
        return (
            f"{self.path}: {self.documents:,} documents{empty}, {self.tokens:,} {self.dtype} tokens of {self.files:,} "
            f"file(s), {self.seconds:.1f} s"
        )


def convert_token_files(
    inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    output: "str | os.PathLike[str]",
    *,
    to: "str | None" = None,
    dtype: object = None,
    output_dtype: object = None,
    vocab_size: "int | None" = None,
    end_of_text: "int | None" = None,
    progress: "bool | None" = None,
) -> ConvertSummary:
    """Writes token files of any kinds, end to end, as one file of another kind; nothing is under its name before.

    Document ends, loss masks, ids, tokenizer, vocabulary size and end-of-text id are kept where both kinds can hold
    them; `notes` of what is returned say what was not.

    Args:
        inputs: as TokenReader's paths: files, folders, patterns.
        output: the new file; one that is there is replaced. ".tok" is our own kind, ".ds" datatrove's, ".idx"
            Megatron's.
        to: "own", "datatrove", "megatron" or "llmc", where the name does not say.
        dtype: of raw inputs, as TokenReader's.
        output_dtype: of the new file; left out: by the vocabulary's size, else by the inputs' dtypes.
        vocab_size: ids must be below it; left out: what the inputs' headers say, where all do.
        end_of_text: closes documents of inputs that store no ends; without it each of those is one document.
        progress: a bar on stderr; None: where that is a terminal.

    Raises ConfigurationError, ArgumentTypeError; TokenFileError for an input that is damaged; TokenIdError for an id
    that does not fit; OSError.

    >>> import tempfile, numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> np.save(folder + "/a.npy", np.array([5, 7, 0, 9, 0], np.uint16))
    >>> print(convert_token_files(folder + "/a.npy", folder + "/a.ds", end_of_text=0).documents)
    2
    >>> TokenReader(folder + "/a.ds").document_ends().tolist()
    [3, 5]
    """
    if not isinstance(output, (str, os.PathLike)):
        raise ArgumentTypeError(f"output must be a str or PathLike, got {output!r}")
    refuse_url(output)
    began = time.perf_counter()
    kind = _kind(os.fspath(output), to)
    reader = TokenReader(inputs, dtype, vocab_size=vocab_size, end_of_text=end_of_text)
    _check_output(Path(output), kind, reader.files)
    find_ends(reader.files)
    settings, notes = _settings(kind, reader, vocab_size)
    if output_dtype is None and settings["vocab_size"] is None:
        output_dtype = _dtype(kind, reader.files)
    ids = [one for one in reader.document_ids() if one is not None] if kind != "llmc" else []
    documents = 0
    with (
        _bar(reader.samples_per_pass, progress) as bar,
        KINDS[kind][0](output, dtype=output_dtype, **settings) as writer,
    ):
        for file in reader.files:
            for ends, tokens, mask in _blocks(file):
                writer.write_many(tokens, ends, mask)
                documents += ends.size
                bar.update(int(tokens.size))
        ids_path(writer.path).unlink(missing_ok=True)  # of the file that stood here before
    if len(ids) == len(reader.files):
        _copy_ids(reader.files, ids, writer.path, kind)
    return ConvertSummary(
        path=str(writer.path),
        kind=kind,
        dtype=writer.dtype.name,
        files=len(reader.files),
        documents=writer.documents,
        empty_documents=documents - writer.documents,
        tokens=writer.tokens,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _kind(output: str, to: "str | None") -> str:
    by_name = SUFFIXES.get(Path(output).suffix)
    if to is not None and to not in KINDS:
        raise ConfigurationError(f"to={to!r} is no kind that can be written; one of {', '.join(KINDS)} would do")
    if to is None and by_name is None:
        raise ConfigurationError(
            f"{output}: its name does not say which kind it shall be; one in {', '.join(SUFFIXES)} does, or "
            f"to={' | '.join(KINDS)} (--to)"
        )
    if to is not None and by_name not in (None, to):
        raise ConfigurationError(f"{output}: is the name of a file of the kind {by_name}, and to={to!r} was given")
    return to or str(by_name)


def _check_output(output: Path, kind: str, files: "Sequence[TokenLayout]") -> None:
    """Raises ConfigurationError where the new file would replace an input, or be read as another kind."""
    if kind == "megatron":
        output = Path(f"{os.fspath(output).removesuffix('.idx').removesuffix('.bin')}.bin")
    elif output.suffix == ".bin" and output.with_suffix(".idx").exists():
        raise ConfigurationError(
            f"{output}: with {output.with_suffix('.idx')} beside it, it would be read as Megatron's; "
            "another name would do"
        )
    for file in files:
        if file.remote is None and output.exists() and output.samefile(file.local):
            raise ConfigurationError(f"{output}: is one of the inputs; another name would do")


def _settings(kind: str, reader: TokenReader, vocab_size: "int | None") -> "tuple[dict[str, Any], list[str]]":
    """What the kind's writer is given of what the inputs' headers know, and a note on each thing that is not kept."""
    files, notes = reader.files, []
    settings: dict[str, Any] = {"vocab_size": vocab_size}
    if vocab_size is None:
        known = {file.vocab_size for file in files}
        if None not in known:
            settings["vocab_size"] = max(size for size in known if size is not None)
        elif len(known) > 1:
            notes.append("the vocabulary's size is not kept: only some of the inputs say it; --vocab-size does")
    names = {_tokenizer(file) for file in files} - {("", b"")}
    name, digest = next(iter(names)) if len(names) == 1 else ("", b"")
    if len(names) > 1:
        notes.append(f"the tokenizer is not kept: the inputs name different ones ({', '.join(sorted(dict(names)))})")
    elif name and kind in ("megatron", "llmc"):
        notes.append(f"the tokenizer ({name}) is not kept: {kind} stores none")
    elif kind == "own":
        if len(name.encode()) > 64:
            notes.append(f"the tokenizer's name ({name}) is not kept: it has more than 64 bytes")
            name = ""
        settings |= {"tokenizer": name, "tokenizer_hash": digest, "end_of_text": reader.end_of_text}
    elif kind == "datatrove":
        settings |= {"tokenizer": name.splitlines()[0] if name else UNKNOWN}
        if digest:
            notes.append("the tokenizer's hash is not kept: datatrove stores its name alone")
    if kind == "own":
        settings["end_of_text"] = reader.end_of_text
    elif reader.end_of_text is not None:
        notes.append(f"that id {reader.end_of_text} is the end of text is not kept: {kind} does not store it")
    without = sum(not file.documents for file in files)
    if kind == "llmc":
        if any(file.stored_documents for file in files):
            notes.append("document ends are not kept: llmc stores none; an end-of-text id in the tokens finds them")
    elif without:
        notes.append(
            f"{without} of {len(files)} file(s) store no document ends and became one document each; --end-of-text ID "
            "finds the ends"
        )
    with_ids = sum(one is not None for one in reader.document_ids())
    if with_ids and (kind == "llmc" or with_ids < len(files)):
        why = "llmc stores no documents" if kind == "llmc" else f"only {with_ids} of {len(files)} files have them"
        notes.append(f"document ids are not kept: {why}")
    if scores := sorted({score for file in files for score in list_scores(file)}):
        notes.append(f"scores beside the inputs are not kept: {', '.join(scores)}")
    return settings, notes


def _tokenizer(file: TokenLayout) -> "tuple[str, bytes]":
    """(name, hash) as the file says; "" and no bytes where it does not."""
    header = read_header(file)
    if header is not None:
        return header.tokenizer, header.tokenizer_hash.rstrip(b"\0")
    said = read_metadata(file.path) if file.kind == "datatrove" else None
    return ("" if said is None or said[0] == UNKNOWN else said[0]), b""


def _dtype(kind: str, files: "Sequence[TokenLayout]") -> str:
    """The inputs' own dtype if there is one and the kind has it, else the first of the kind's that holds all ids."""
    known, theirs = KINDS[kind][1], {file.dtype.name for file in files}
    if len(theirs) == 1 and theirs <= set(known):
        return theirs.pop()
    largest = max(int(np.iinfo(file.dtype).max) if file.max_token_id is None else file.max_token_id for file in files)
    widest = max(known, key=lambda name: int(np.iinfo(name).max))  # whose writer says which id does not fit
    return next((name for name in known if np.iinfo(name).max >= largest), widest)


def _blocks(file: TokenLayout) -> "Iterator[tuple[Int64s, np.ndarray, np.ndarray | None]]":
    """(int64 (n,) ends of n whole documents in these tokens, (t,) tokens, bool (t,) mask or None) … of a file."""
    mask = loss_layouts([file])[0] if has_loss_masks([file]) else None
    whole = [(0, np.array([0, file.tokens], np.int64))]
    for _, ends in checked_ends(file) if file.documents else whole:
        at = 0  # of the documents of this chunk, those before it are done
        while at < ends.size - 1:
            start = int(ends[at])
            stop = max(at + 1, int(np.searchsorted(ends, start + BLOCK, side="right")) - 1)
            count = int(ends[stop]) - start
            if count:
                where = file.offset + start * file.dtype.itemsize
                tokens = file.opened(functools.partial(_mapped, file.dtype, where, count))
                labels = None if mask is None else _mask(mask, start, count)
                yield ends[at + 1 : stop + 1] - start, tokens, labels
            at = stop


def _mapped(dtype: np.dtype, where: int, count: int, path: Path) -> np.ndarray:
    return np.memmap(path, dtype, "r", where, (count,))


def _mask(mask: TokenLayout, start: int, count: int) -> np.ndarray:
    """bool (count,), mapped. Raises TokenFileError for bytes that are neither 0 nor 1."""
    found = mask.opened(functools.partial(_mapped, mask.dtype, start, count))
    if int(found.max()) > 1:
        as_loss_mask(found, str(mask.path))
    return found.view(np.bool_)


def _copy_ids(files: "Sequence[TokenLayout]", ids: "Sequence[DocumentIds]", output: Path, kind: str) -> None:
    """The ids of all documents that are not empty, beside the new file."""
    with DocumentIdsWriter(ids_path(output)) as names:
        if kind == "own":
            names.bind(output)
        for file, of_file in zip(files, ids, strict=True):
            for first, ends in checked_ends(file):
                kept = np.diff(ends) > 0
                text, cuts = of_file.span(first, first + kept.size)
                if kept.all():
                    names.write_many(np.frombuffer(text, np.uint8), cuts[1:])
                else:
                    names.write_ids([text[cuts[k] : cuts[k + 1]].decode() for k in np.flatnonzero(kept)])


def _bar(total: int, shown: "bool | None") -> Any:
    from tqdm import tqdm

    disable = None if shown is None else not shown  # None: no bar where stderr is no terminal
    return tqdm(total=total, desc="converting", unit="tokens", unit_scale=True, dynamic_ncols=True, disable=disable)
