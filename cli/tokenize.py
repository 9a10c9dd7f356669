"""Make a token file from texts, JSON lines, Parquet and data sets.

    tokenpipe tokenize corpus/*.jsonl --output prose.tok --tokenizer tokenizer.json --ids url
    tokenpipe tokenize src/ --output code.tok --tokenizer byte --shuffle-documents --seed 7
    tokenpipe tokenize "s3://corpus/*.jsonl.zst" web.parquet --output s3://tokens/web.tok --tokenizer tokenizer.json

An INPUT is a file, a folder (all files in it but hidden ones), a quoted pattern, a URL of these, a folder that
`datasets` wrote, or dataset:NAME[:CONFIG][@REVISION] for its load_dataset. A text file is one document; in a file of
JSON lines (.jsonl, .ndjson, .json) each line is, in Parquet and Arrow files each row. Texts and JSON lines may be
packed (.gz, .zst, .bz2, .xz, .lz4). Each document is closed by the end-of-text token.

Interrupted or killed, the same command goes on from what was finished, and the file has the same bits as that of
an unbroken run, with any number of workers. Finished pieces are kept in OUTPUT.pieces until the file is whole.
"""

import argparse
import sys

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, patterns; taken in this order")
    parser.add_argument("--output", required=True, metavar="X", help="the token file or its URL; one there is replaced")
    parser.add_argument(
        "--tokenizer",
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
        help="where the file of a URL is made, until it is uploaded (default: a cache)",
    )
    close = parser.add_mutually_exclusive_group()
    close.add_argument("--end-of-text", metavar="TOKEN", help="what closes documents (default: the tokenizer's own)")
    close.add_argument("--no-end-of-text", action="store_true", help="close documents by nothing but their ends")
    parser.add_argument("--shuffle-documents", action="store_true", help="in a keyed permutation, not as they come")
    parser.add_argument("--seed", type=int, default=0, help="of that permutation (default: %(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--dtype", help="of the file (default: uint16 up to 65,536 ids, else uint32)")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--progress", action="store_true", help="a bar also where stderr is no terminal")
    show.add_argument("--no-progress", action="store_true", help="no bar")


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes.tokenize import tokenize_files

    try:
        summary = tokenize_files(
            arguments.inputs,
            arguments.output,
            arguments.tokenizer,
            column=arguments.column,
            ids=arguments.ids,
            kind=arguments.kind,
            split=arguments.split,
            work=arguments.work,
            end_of_text=arguments.end_of_text or not arguments.no_end_of_text,
            shuffle_documents=arguments.shuffle_documents,
            seed=arguments.seed,
            workers=arguments.workers,
            dtype=arguments.dtype,
            progress=True if arguments.progress else False if arguments.no_progress else None,
        )
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        raise
    print(summary)
    return 0
