"""Say what token files are in one file, so that runs begin without opening them: a manifest.

    tokenpipe manifest corpus/ --output corpus/all.manifest
    tokenpipe manifest "raw/*.bin" --dtype uint16 --end-of-text 50256 --output raw/all.manifest

An INPUT is a file, a folder or a quoted pattern, of any kinds that tokenpipe reads. Each is read once, some at a time,
for its layout, fingerprint, hash, and the CRC-32 of every 64 KiB. `TokenReader("corpus/all.manifest")`, and a recipe's
`paths: corpus/all.manifest`, then read the manifest alone; `tokenpipe verify corpus/all.manifest` compares all bytes
with it. Paths below the manifest's folder are relative to it: the folder may be moved as a whole.
"""

import argparse

from .progress import add_progress, shown
from .tables import escaped

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, patterns; taken in this order")
    parser.add_argument("--output", required=True, metavar="X.manifest", help="one that is there is replaced")
    parser.add_argument("--dtype", help="of raw inputs: uint8, uint16, uint32, int32 or int64")
    parser.add_argument(
        "--end-of-text", type=int, metavar="ID", help="closes documents of inputs without stored document ends"
    )
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes import make_manifest
    from ..datapipes.formats.table import integers

    manifest = make_manifest(
        arguments.inputs,
        arguments.output,
        dtype=arguments.dtype,
        end_of_text=arguments.end_of_text,
        progress=shown(arguments),
    )
    tokens, size = (int(integers(manifest.files, name).sum()) for name in ("tokens", "size"))
    print(escaped(f"{manifest.path}: {len(manifest.files):,} files, {tokens:,} tokens, {size:,} bytes"))
    return 0
