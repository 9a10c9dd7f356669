"""Make a token file, or many, from texts, JSON lines, Parquet and data sets.

    tokenpipe tokenize corpus/*.jsonl --output prose.tok --tokenizer tokenizer.json --ids url
    tokenpipe tokenize src/ --output code.tok --tokenizer byte --shuffle-documents --seed 7
    tokenpipe tokenize "s3://corpus/*.jsonl.zst" web.parquet --output s3://tokens/web.tok --tokenizer tokenizer.json
    tokenpipe tokenize corpus/ --output-prefix data/prose --shards 256 --tokenizer tokenizer.json
    torchrun --nproc-per-node 16 -m tokenpipe.cli.main tokenize --input corpus/ --output-prefix data/prose \\
        --tokenizer-name-or-path tokenizer.json

An INPUT is a file, a folder (all files in it but hidden ones), a quoted pattern, a URL of these, a folder that
`datasets` wrote, or dataset:NAME[:CONFIG][@REVISION] for its load_dataset. A text file is one document; in a file of
JSON lines (.jsonl, .ndjson, .json) each line is, in Parquet and Arrow files each row. Texts and JSON lines may be
packed (.gz, .zst, .bz2, .xz, .lz4). Each document is closed by the end-of-text token.

Interrupted or killed, the same command goes on from what was finished, and the files have the same bits as those of
an unbroken run, with any number of workers. Finished pieces are kept in OUTPUT.pieces until the file is whole.

With --output-prefix P any number of processes and machines may run the same command at once: they share the work by
locks in P's folder. P-00000-of-00256.tok … are the files, P.manifest, written last, is what to read them all by.
"""

import argparse
import os
import sys
from typing import Any

from .progress import add_progress, shown

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="files, folders, patterns; taken in this order")
    parser.add_argument("--input", nargs="+", action="extend", default=[], metavar="INPUT", help="the same, after them")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", metavar="X", help="the token file or its URL; one there is replaced")
    where.add_argument("--output-prefix", metavar="P", help="of many token files: a path or a URL")
    parser.add_argument("--shards", type=int, metavar="N", help="of P: how many (default: by the inputs' size)")
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-name-or-path",
        required=True,
        metavar="T",
        help="a `tokenizers` JSON file, a folder that holds a tokenizer.json, a name on the Hugging Face hub, or "
        "byte: the built-in bytes",
    )
    parser.add_argument("--column", default="text", help="of lines and rows: the text (default: %(default)s)")
    parser.add_argument(
        "--ids", metavar="COLUMN", help="of lines and rows: an id or URL, kept in X.ids; a text file's is its path"
    )
    parser.add_argument(
        "--kind",
        choices=("auto", "text", "jsonl", "parquet", "arrow"),
        default="auto",
        help="what the inputs are (default: %(default)s, by their names)",
    )
    parser.add_argument("--split", default="train", help="of data sets of `datasets` (default: %(default)s)")
    parser.add_argument(
        "--work",
        metavar="FOLDER",
        help="where the files of a URL are made, until they are uploaded (default: a cache)",
    )
    close = parser.add_mutually_exclusive_group()
    close.add_argument(
        "--end-of-text",
        "--eos-token",
        metavar="TOKEN",
        help="what closes documents (default: the tokenizer's own)",
    )
    close.add_argument("--no-end-of-text", action="store_true", help="close documents by nothing but their ends")
    parser.add_argument("--shuffle-documents", action="store_true", help="in a keyed permutation, not as they come")
    parser.add_argument("--seed", type=int, default=0, help="of that permutation (default: %(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--dtype", help="of the file (default: uint16 up to 65,536 ids, else uint32)")
    add_progress(parser)
    parser.add_argument("--ray", action="store_true", help="of P: a task of Ray for each shard")
    parser.add_argument(
        "--ray-address", metavar="A", help="of the Ray cluster (default: RAY_ADDRESS, or a new one here)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes.errors import ConfigurationError

    inputs = arguments.inputs + arguments.input
    if not inputs:
        raise ConfigurationError("no input was named; files, folders or patterns would do")
    settings = {
        "column": arguments.column,
        "ids": arguments.ids,
        "kind": arguments.kind,
        "split": arguments.split,
        "work": arguments.work,
        "end_of_text": not arguments.no_end_of_text if arguments.end_of_text is None else arguments.end_of_text,
        "shuffle_documents": arguments.shuffle_documents,
        "seed": arguments.seed,
        "workers": arguments.workers,
        "dtype": arguments.dtype,
        "progress": shown(arguments),
    }
    of_shards = {
        "shards": arguments.shards,
        "ray": arguments.ray_address or arguments.ray,
    }
    try:
        if arguments.output_prefix is not None:
            summary = _shards(inputs, arguments, {**settings, **of_shards})
        else:
            summary = _file(inputs, arguments, settings, of_shards)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        raise
    if summary is not None:
        print(summary)
    return 0


def _file(
    inputs: "list[str]", arguments: argparse.Namespace, settings: "dict[str, Any]", of_shards: "dict[str, Any]"
) -> object:
    from ..datapipes.errors import ConfigurationError
    from ..datapipes.tokenize import tokenize_files

    given = [f"--{name.replace('_', '-')}" for name, value in of_shards.items() if value]
    if given or os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        why = ", ".join(given) or "torchrun with more than one process"
        raise ConfigurationError(f"--output makes one file; {why} goes with --output-prefix P")
    return tokenize_files(inputs, arguments.output, arguments.tokenizer, **settings)


def _shards(inputs: "list[str]", arguments: argparse.Namespace, settings: "dict[str, Any]") -> object:
    """The summary, on the first rank."""
    from ..datapipes.tokenize import tokenize_shards

    summary = tokenize_shards(inputs, arguments.output_prefix, arguments.tokenizer, **settings)
    return summary if os.environ.get("RANK", "0") in ("", "0") else None
