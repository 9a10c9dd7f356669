"""In which rows of a run a document or token was seen as a label, or will be.

    tokenpipe when run.yaml --state state.json --document https://example.org/page
    tokenpipe when run.yaml --steps 0:100000 --token prose:123456

Worked out backwards from the files to the steps, not looked up in a log. Of a document each row that has any of its
tokens as a label; --steps looks at other steps than those up to the state's place, at ones to come too.
A document is named by its id, where ids were kept beside the token files, else by its number in the source.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from ..datapipes.audit.ledger import origin_of
from ..datapipes.errors import ConfigurationError
from ..reading_services import DataLoader2
from .runs import add_run_arguments, as_steps, open_run, seen_steps, spaces_in
from .tables import Table, escaped, print_json

__all__ = ["add_arguments", "run"]

HEAD = ("step", "rank", "micro-batch", "row", "source", "document", "")
MOST_NAMED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--document", metavar="ID", help="a document's id, or its number in --source")
    what.add_argument("--token", metavar="SOURCE:N", help="a token's place in its source (`token` of contents)")
    parser.add_argument("--source", metavar="S", help="where the document is; left out, wherever its id is found")
    parser.add_argument("--steps", metavar="A:B", help="look at these steps; left out: those up to the state's place")
    parser.add_argument("--jsonl", action="store_true", help="a JSON object a row instead of the table")


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps is None and arguments.state is None:
        raise ConfigurationError("without --state nothing was seen yet: say which --steps A:B to look at")
    asked = None if arguments.steps is None else as_steps(arguments.steps)
    loader = open_run(arguments)
    if arguments.token is not None:
        wanted = [_token(arguments.token, arguments.source)]
    else:
        wanted = list(_documents(loader, arguments.document, arguments.source))
    steps = seen_steps(loader) if asked is None else asked
    table = Table(HEAD, HEAD[:4])
    rows, found = 0, set()
    for source, tokens, document in wanted:
        records = loader.when(source, tokens, steps)
        rows += len(records)
        found |= {record.step for record in records}
        if arguments.jsonl:
            for record in records:
                print_json({**record._asdict(), "source": source, "document": document})
        elif records:
            name = "" if document is None else f"#{document}"
            table.print(((*record[:4], source, name, "masked" if record.masked else ""), ()) for record in records)
    print(f"{rows} row(s) in {len(found)} of the steps {steps.start} … {steps.stop - 1}", file=sys.stderr)
    return 0


Wanted = tuple[str, Any, "int | None"]
"""(source, its token or tokens, the document's number)"""


def _token(text: str, source: "str | None") -> Wanted:
    name, _, number = text.rpartition(":")
    name = name or source or ""
    if not name or not number.isdecimal():
        raise ConfigurationError(f"--token is SOURCE:N, the token's place in the source, got {text!r}")
    return name, int(number), None


def _documents(loader: DataLoader2, wanted: str, source: "str | None") -> Iterator[Wanted]:
    """The documents of this id or number. Raises ConfigurationError where there is none, OutOfRangeError."""
    spaces = spaces_in(loader)
    readers = {several[0].origin.name: several[0].origin for several in spaces.values()}
    names = ", ".join(map(repr, list(readers)[:MOST_NAMED])) + (" …" if len(readers) > MOST_NAMED else "")
    if source is not None:
        readers = {source: origin_of(spaces, source)}
    found = {(name, document) for name, reader in readers.items() for document in reader.find_documents(wanted)}
    if not found and wanted.isdecimal():
        if len(readers) > 1:
            raise ConfigurationError(f"document {wanted} of which source? Say --source: {names}")
        found = {(name, int(wanted)) for name in readers}
    if not found:
        without = [name for name, reader in readers.items() if not any(reader.document_ids())]
        raise ConfigurationError(
            f"no document has the id {wanted!r}"
            + (f"; no ids were kept of {', '.join(map(repr, without[:MOST_NAMED]))}" if without else "")
        )
    for name, document in sorted(found):
        tokens = range(*readers[name].document_range(document))
        known = readers[name].document_id(document)
        print(
            f"document #{document} of {escaped(name)}: tokens {tokens.start} … {tokens.stop - 1}"
            + (f", id {escaped(known)}" if known is not None else ""),
            file=sys.stderr,
        )
        yield name, tokens, document
