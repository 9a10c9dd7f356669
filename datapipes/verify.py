"""Is a token file what it says? All of it is read once, in blocks: memory does not grow with the file.

sizes, headers    as when it is opened (formats/)
document ends     ascending, within the tokens, the last one at their end; all of Megatron's index
tokens            every id below the vocabulary's size and what the header says is the largest, none negative
hash              of a file of ours
beside it         a loss mask of zeros and ones, ids with their hash, scores: one for each token or document
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import numpy as np

from .core import Int64s, as_count
from .document_ends import checked_ends
from .errors import TokenFileError, TokenIdError
from .formats import TokenLayout, megatron, own, read_layout
from .formats.ids import open_document_ids
from .formats.places import as_place
from .loss_masks import has_loss_masks, loss_layouts
from .scores import list_scores, read_scores, score_path

__all__ = ["VerifiedFile", "verify_token_file"]

BLOCK = 1 << 20  # tokens, or bytes, in one go


@dataclass(frozen=True)
class VerifiedFile:
    """What `verify_token_file` found to be right.

    path, kind: of the file. documents: 0 where their ends are not stored. largest: the largest id in it. hashed:
    whether the kind has a hash, which was compared. beside: names of the files beside it that were checked too.
    """

    path: str
    kind: str
    documents: int
    tokens: int
    largest: int
    hashed: bool
    beside: "tuple[str, ...]"

    def __str__(self) -> str:
        documents = f"{self.documents:,} documents, " if self.documents else ""
        return ", ".join([f"ok, {documents}{self.tokens:,} tokens", *(f"with {name}" for name in self.beside)])


def verify_token_file(
    path: "str | PathLike[str]", dtype: object = None, vocab_size: "int | None" = None
) -> VerifiedFile:
    """Reads a whole token file of any kind, and what lies beside it, and says what is wrong first, and where.

    Args:
        path: one token file. dtype: of a raw one, as for TokenReader.
        vocab_size: ids must be below it, and below the one in the header where there is one.

    Raises TokenFileError for a file that is not what it says, with the document, token and byte of the first id that
    its header does not allow; TokenIdError, with the same, for an id beyond `vocab_size`, or a negative one;
    ConfigurationError, ArgumentTypeError.
    """
    given = None if vocab_size is None else as_count("vocab_size", vocab_size)
    file = read_layout(path, dtype)
    if file.kind == "megatron" and not file.sequences:  # else its document ends are all of the index
        megatron.check_index(file)
    documents = sum(ends.size for ends in _document_ends(file))
    tokens = _Tokens(file, given)
    header = own.read_header(file) if file.kind == "tokenpipe" else None
    if header is not None:
        own.compare_hash(file.path, header.digest, tokens.blocks())
    else:
        for _ in tokens.blocks():
            pass
    beside = tuple(_beside(file))
    return VerifiedFile(as_place(path), file.kind, documents, file.tokens, tokens.largest, header is not None, beside)


def _document_ends(file: TokenLayout) -> Iterator[Int64s]:
    """What the file itself stores, in blocks, never what is kept in a cache. Raises TokenFileError."""
    if file.sequences:
        yield from megatron.document_ends(file)
    elif file.stored_documents:
        yield from (ends[1:] for _, ends in checked_ends(file))


class _Tokens:
    """All ids of a file, looked at on the way past; `largest` of those so far."""

    def __init__(self, file: TokenLayout, vocab_size: "int | None") -> None:
        self.file, self.largest = file, 0
        said = "the file is damaged, or its header is"
        bounds = [  # (ids are below it, why, whether it is the file's own word)
            (file.max_token_id, f"{file.max_token_id} is the largest by its header: {said}", 1),
            (file.vocab_size, f"its header's vocabulary has {file.vocab_size}: {said}", 0),
            (vocab_size, f"vocab_size is {vocab_size}", 0),
        ]
        known = [(bound + more, why) for bound, why, more in bounds if bound is not None]
        known.append((int(np.iinfo(file.dtype).max) + 1, f"{file.dtype.name} ids"))
        self.limit, self.why = min(known, key=lambda one: one[0])  # of equal ones the file's own word
        self.wrong = TokenFileError if said in self.why else TokenIdError

    def blocks(self) -> Iterator[bytes]:
        """All that follows the header, once the ids in it were found right. Raises TokenFileError, TokenIdError."""
        file, place = self.file, 0
        with file.opened(lambda path: path.open("rb")) as handle:
            handle.seek(file.offset)
            while place < file.tokens:
                count = min(BLOCK, file.tokens - place)
                data = handle.read(count * file.dtype.itemsize)
                if len(data) != count * file.dtype.itemsize:
                    raise TokenFileError(f"{file.path}: was cut while it was read")
                ids = np.frombuffer(data, file.dtype)
                largest = int(ids.max())
                if largest >= self.limit or int(ids.min()) < 0:
                    self._name_first(ids, place)
                self.largest = max(self.largest, largest)
                yield data
                place += count
            while rest := handle.read(BLOCK):
                yield rest

    def _name_first(self, ids: np.ndarray, place: int) -> None:
        """Raises for the first bad one of `ids`, the first of which is token `place`."""
        file, at = self.file, int(np.flatnonzero((ids < 0) | (ids >= self.limit))[0])
        place, document, begin = place + at, 0, 0
        for ends in _document_ends(file):
            before = int(np.searchsorted(ends, place, side="right"))
            document, begin = document + before, int(ends[before - 1]) if before else begin
            if before < ends.size:
                break
        within = f"token {place - begin} of document {document}, " if file.stored_documents else ""
        raise self.wrong(
            f"{file.path}: {within}token {place} of the file, at byte {file.offset + place * file.dtype.itemsize}: id "
            f"{int(ids[at])} is not in 0 … {self.limit - 1} ({self.why})"
        )


def _beside(file: TokenLayout) -> Iterator[str]:
    """The names of what was found beside the file, once it was found right. Raises TokenFileError."""
    if has_loss_masks([file]):
        (mask,) = loss_layouts([file])
        with mask.opened(lambda path: path.open("rb")) as handle:
            for first in range(0, mask.size, BLOCK):
                wrong = np.flatnonzero(np.frombuffer(handle.read(BLOCK), np.uint8) > 1)
                if wrong.size:
                    raise TokenFileError(f"{mask.path}: byte {first + int(wrong[0])} is damaged: neither 0 nor 1")
        yield _name(mask.path)
    ids = open_document_ids(file)
    if ids is not None:
        ids.verify()
        yield f"{_name(file.path)}.ids"
    for score in list_scores(file):
        read_scores(file, score)
        yield _name(score_path(file, score))


def _name(path: str) -> str:
    return str(path).rpartition("/")[2]
