"""What steps of a run held: a line for each row of the whole step, on all ranks, by sample number.

    tokenpipe contents run.yaml --state state.json --step 81200:81210 --text

Worked out from the recipe and the state, not looked up in a log: no GPU, no torchrun, O(log) a row. Without
--state it is the recipe as it stands. A row is sequence_length tokens and the label after them; `documents`
are those that it holds (+n: and n more), by their ids where they were kept, else their numbers in the source.
Rows that `exclude` masks are marked "masked"; of a source that was dropped and is not there any more, "(files
gone)" stands in place of file and text.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..datapipes import ContentsRecord, RowDocument
from ..datapipes.errors import ConfigurationError
from ..datapipes.formats.own import read_header
from ..datapipes.tokenize import load_tokenizer
from ..reading_services import DataLoader2
from .runs import add_run_arguments, as_steps, open_run, spaces_in
from .tables import Table, escaped, print_json

__all__ = ["add_arguments", "run"]

HEAD = ("step", "rank", "micro-batch", "row", "sample", "source", "epoch", "token", "documents", "file", "at", "")
NUMBERS = frozenset(("step", "rank", "micro-batch", "row", "sample", "epoch", "token", "at"))
GONE = "(files gone)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--step", required=True, metavar="N|A:B", help="a step, or the steps from A up to before B")
    parser.add_argument("--text", action="store_true", help="the decoded rows, a line for each document in them")
    parser.add_argument(
        "--tokenizer", metavar="T", help="for --text: 'byte', a tokenizers file, or a name; left out: what files say"
    )
    parser.add_argument("--jsonl", action="store_true", help="a JSON object a row instead of the table")


def run(arguments: argparse.Namespace) -> int:
    steps = as_steps(arguments.step)
    if arguments.tokenizer is not None and not arguments.text:
        raise ConfigurationError("--tokenizer decodes text: give --text too")
    loader = open_run(arguments)
    decode = _decoder(loader, arguments.tokenizer) if arguments.text else None
    table = Table(HEAD, NUMBERS)
    for step in steps:
        rows = _rows(loader, step, decode)
        if arguments.jsonl:
            for record, documents, texts in rows:
                print_json(_as_json(record, documents, texts))
        else:
            table.print((_cells(record, documents), _lines(documents, texts)) for record, documents, texts in rows)
    return 0


Decode = Callable[[Any], str]
Row = tuple[ContentsRecord, list[RowDocument], "list[str] | None"]


def _rows(loader: DataLoader2, step: int, decode: "Decode | None") -> Iterator[Row]:
    """(record, its documents, their texts if wanted) for each row of a step."""
    records, documents = loader.contents(step), loader.documents(step)
    texts: dict[int, list[str]] = {}
    if decode is not None:
        there = [i for i, record in enumerate(records) if record.token >= 0]
        for i, tokens in zip(there, loader.tokens(step, there), strict=True):
            texts[i] = [decode(tokens[part.first : part.stop]) for part in documents[i]]
    for i, record in enumerate(records):
        yield record, documents[i], texts.get(i)


def _cells(record: ContentsRecord, documents: "list[RowDocument]") -> "list[Any]":
    names = [_name(part) for part in documents]
    shown = names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "") if names else ""
    gone = record.token < 0
    return [
        *(record.step, record.rank, record.micro_batch, record.row, record.sample_number, record.source, record.epoch),
        *(("", "", GONE, "") if gone else (record.token, shown, record.file, record.file_token)),
        "masked" if record.masked else "",
    ]


def _name(part: RowDocument) -> str:
    return part.id if part.id is not None else "–" if part.document < 0 else f"#{part.document}"


def _lines(documents: "list[RowDocument]", texts: "list[str] | None") -> "list[str]":
    """The row's text as lines that a terminal may show."""
    if texts is None:
        return []
    return [f'{escaped(_name(part))} "{escaped(text)}"' for part, text in zip(documents, texts, strict=True)]


def _as_json(record: ContentsRecord, documents: "list[RowDocument]", texts: "list[str] | None") -> "dict[str, Any]":
    parts = [part._asdict() for part in documents]
    for part, text in zip(parts, texts or (), strict=False):
        part["text"] = text
    return {**record._asdict(), "documents": parts}


def _decoder(loader: DataLoader2, spec: "str | None") -> Decode:
    """What decodes the run's tokens. Raises ConfigurationError where nothing says how."""
    headers = [read_header(space.files[0]) for spaces in spaces_in(loader).values() for space in spaces]
    made_by = {header.tokenizer: header.tokenizer_hash for header in headers if header is not None and header.tokenizer}
    if spec is None and set(made_by) != {"byte"}:
        said = f"made with {', '.join(map(repr, made_by))}" if made_by else "of a kind that does not say what made them"
        raise ConfigurationError(f"--text needs --tokenizer T: the token files are {said}")
    tokenizer = load_tokenizer(spec or "byte")
    for name, digest in made_by.items():
        if digest.strip(b"\0") and digest != tokenizer.hash:
            print(f"tokenpipe contents: files made with {name!r}, decoded with another tokenizer", file=sys.stderr)
    return lambda ids: tokenizer.decode(np.asarray(ids).tolist())
