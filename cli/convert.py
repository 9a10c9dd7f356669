"""Make a token file of one kind from token files of any.

    tokenpipe convert corpus/*.ds --output corpus.tok
    tokenpipe convert "old/*.npy" --output corpus --to megatron --end-of-text 50256

An INPUT is a file, a folder or a quoted pattern, of any kinds that tokenpipe reads. Tokens, document ends, loss masks
and ids, tokenizer, vocabulary size and end-of-text id are kept where both kinds can hold them; what is not is said on
stderr, a line each. Nothing stands under the output's name before it is whole; killed, run the same again.
"""

import argparse
import sys

from .progress import add_progress, shown
from .tables import escaped

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, patterns; taken in this order")
    parser.add_argument("--output", required=True, metavar="X", help="the new file; one that is there is replaced")
    parser.add_argument(
        "--to",
        choices=("own", "datatrove", "megatron", "llmc"),
        help="its kind (default: by its name, .tok own, .ds datatrove, .idx megatron)",
    )
    parser.add_argument("--dtype", help="of raw inputs: uint8, uint16, uint32, int32 or int64")
    parser.add_argument("--output-dtype", metavar="DTYPE", help="of the new file (default: by vocabulary, or inputs)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below it (default: as headers say)")
    parser.add_argument(
        "--end-of-text", type=int, metavar="ID", help="closes documents of inputs without stored document ends"
    )
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes import convert_token_files

    summary = convert_token_files(
        arguments.inputs,
        arguments.output,
        to=arguments.to,
        dtype=arguments.dtype,
        output_dtype=arguments.output_dtype,
        vocab_size=arguments.vocab_size,
        end_of_text=arguments.end_of_text,
        progress=shown(arguments),
    )
    for note in summary.notes:
        print(f"tokenpipe convert: {escaped(note)}", file=sys.stderr)
    print(summary)
    return 0
