"""Show what a token file holds: header, counts, document lengths, samples.

    tokenpipe inspect prose.tok --tokenizer tokenizer.json
    tokenpipe inspect old.bin --dtype uint16

Works for every kind of token file that tokenpipe reads, and says what a kind does not store. Without
--tokenizer the samples are token ids. --verify reads the whole file, as `tokenpipe verify` does.
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .tables import escaped

if TYPE_CHECKING:
    import numpy as np

    from ..datapipes import TokenReader

__all__ = ["add_arguments", "run"]

BAR = 40  # characters of the longest bar
BLOCK = 1 << 20  # document ends looked at in one go
NOT_STORED = "not stored in this kind of file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--dtype", help="of a raw file: uint8, uint16, uint32, int32 or int64")
    parser.add_argument("--tokenizer", metavar="T", help="a tokenizer file or byte: samples as text")
    parser.add_argument("--samples", type=int, default=3, help="documents shown (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each, from its beginning (default: %(default)s)")
    parser.add_argument("--verify", action="store_true", help="read the whole file, and what lies beside it")


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes import TokenReader, verify_token_file
    from ..datapipes.core import as_count
    from ..datapipes.errors import ConfigurationError
    from ..datapipes.formats.places import as_place

    as_count("--samples", arguments.samples, 0)
    as_count("--tokens", arguments.tokens)
    reader = TokenReader(arguments.file, dtype=arguments.dtype)
    if len(reader.files) > 1:
        raise ConfigurationError(
            f"{as_place(arguments.file)}: names {len(reader.files)} token files, and one is shown at a time, as "
            f"{reader.files[0].path}"
        )
    tokenizer: Any = None
    if arguments.tokenizer:
        from ..datapipes.tokenize import load_tokenizer

        tokenizer = load_tokenizer(arguments.tokenizer)
    for name, value in header(reader, tokenizer):
        print(f"{name:<12}  {value}")
    if reader.files[0].documents:
        print("\ndocument lengths, in tokens")
        for line in histogram(reader.files[0].document_ends()):
            print(line)
    print()
    for line in samples(reader, tokenizer, arguments.samples, arguments.tokens):
        print(line)
    if arguments.verify:
        found = verify_token_file(reader.files[0].path, arguments.dtype)
        hashed = "the contents have the hash that the header says" if found.hashed else "this kind of file has no hash"
        print(f"\nverified: {found}; {hashed}")
    return 0


def header(reader: "TokenReader", tokenizer: Any) -> Iterator[tuple[str, str]]:
    """(name, value) of each line of the header."""
    from ..datapipes.formats.datatrove import read_metadata
    from ..datapipes.formats.own import read_header

    file = reader.files[0]
    own = read_header(file)
    said = read_metadata(file.path) if file.kind == "datatrove" else None
    ids = reader.document_ids()[0]
    yield "file", f"{file.path}: {file.size:,} bytes"
    yield "kind", f"{file.kind}{f', with {file.ends_path}' if file.ends_path else ''}"
    yield "tokens", f"{file.tokens:,} {file.dtype.name}, from byte {file.offset}"
    mean = f", {file.tokens / file.documents:,.1f} tokens each" if file.documents else ""
    yield "documents", f"{file.documents:,}{mean}" if file.documents else f"ends {NOT_STORED}"
    yield "vocabulary", NOT_STORED if file.vocab_size is None else f"{file.vocab_size:,}"
    yield "largest id", NOT_STORED if file.max_token_id is None else f"{file.max_token_id:,}"
    if own is None:
        yield "tokenizer", NOT_STORED if said is None else escaped(said[0])
        yield "end of text", NOT_STORED
    else:
        same = tokenizer is None or own.tokenizer_hash == tokenizer.hash.ljust(32, b"\0")
        other = "" if same else f"; the given one, {tokenizer.name}, is ANOTHER ({tokenizer.hash.hex()[:16]}…)"
        kept = own.tokenizer or own.tokenizer_hash.strip(b"\0")
        yield "tokenizer", f"{own.tokenizer} ({own.tokenizer_hash.hex()[:16]}…){other}" if kept else "not said"
        yield "end of text", "not said" if own.end_of_text is None else f"id {own.end_of_text}"
    yield "document ids", f"{ids.path}: {len(ids):,}" if ids is not None else f"none: no {file.path}.ids"


def histogram(ends: "np.ndarray") -> list[str]:
    """A line a power of two of the documents' lengths; reads the ends in blocks."""
    import numpy as np

    counts = np.zeros(65, np.int64)
    shortest, longest, last = None, 0, 0
    for start in range(0, ends.size, BLOCK):
        block = np.asarray(ends[start : start + BLOCK]).astype(np.int64)
        lengths = np.diff(block, prepend=last)
        last = int(block[-1])
        counts += np.bincount(np.frexp(lengths.clip(0))[1], minlength=65)[:65]  # 2^(e-1) … 2^e - 1 → e
        shortest = int(lengths.min()) if shortest is None else min(shortest, int(lengths.min()))
        longest = max(longest, int(lengths.max()))
    used = np.flatnonzero(counts)
    lines = []
    for power in range(used[0], used[-1] + 1):
        low, high = (1 << power >> 1), (1 << power) - 1
        bar = "█" * int(-(-counts[power] * BAR // counts.max()))
        lines.append(f"{low:>13,} … {high:>13,}  {counts[power]:>13,}  {counts[power] / ends.size:>6.1%}  {bar}")
    return [*lines, f"shortest {shortest:,}, longest {longest:,}"]


def samples(reader: "TokenReader", tokenizer: Any, count: int, tokens: int) -> Iterator[str]:
    """The first tokens of some documents, spread evenly over the file, as text or as ids."""
    import numpy as np

    file = reader.files[0]
    ends = file.document_ends()
    several = file.documents or max(1, file.tokens // max(1, tokens))
    for k in range(min(count, several)):
        document = k * (several - 1) // max(1, min(count, several) - 1)
        if file.documents:
            start = int(ends[document - 1]) if document else 0
            stop = int(ends[document])
            name = reader.document_id(document)
            what = f"document {document:,}{f' ({escaped(name)})' if name is not None else ''}, {stop - start:,} tokens"
        else:
            start, stop = document * tokens, file.tokens
            what = f"from token {start:,} on"
        ids = reader.fetch(np.arange(start, min(stop, start + tokens), dtype=np.int64)).tolist()
        cut = " …" if stop - start > tokens else ""
        yield f"{what}:"
        yield f"    {' '.join(map(str, ids)) if tokenizer is None else escaped(tokenizer.decode(ids))}{cut}"
