"""Are token files what they say? Reads all of each, and what lies beside it.

    tokenpipe verify corpus/ --vocab-size 50257
    tokenpipe verify "raw/*.bin" --dtype uint16 --vocab-size 50257
    tokenpipe verify corpus/all.manifest

A FILE is a file of any kind, a folder or a quoted pattern; or a manifest: then all bytes of its files, and of what
lies beside them, are compared with it, and the first ones that differ are named. A line each: "ok" and what is in it,
or what is wrong first, with the document, token and byte where an id is. After a bad file it goes on; the exit status
is 1 if any was. Looked at are sizes and headers, document ends, every id, the hash where the kind has one, loss mask,
ids and scores; of a manifest's files their bytes alone.
"""

import argparse

from .tables import escaped

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="files, folders, patterns, manifests; in this order")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below it (default: a header's own)")
    parser.add_argument("--dtype", help="of those that do not say it: uint8, uint16, uint32, int32 or int64")


def run(arguments: argparse.Namespace) -> int:
    from ..datapipes import verify_token_file
    from ..datapipes.core import as_count
    from ..datapipes.errors import ConfigurationError, TokenpipeError
    from ..datapipes.file_sums import compare_files
    from ..datapipes.formats import as_dtype, list_token_files
    from ..datapipes.formats.places import as_place
    from ..datapipes.manifest import is_manifest, read_alone

    if arguments.vocab_size is not None:  # what is wrong with the command is said once, not for each file
        as_count("--vocab-size", arguments.vocab_size)
    if arguments.dtype is not None:
        as_dtype(arguments.dtype)

    def verified(path: str) -> object:
        try:
            return verify_token_file(path, vocab_size=arguments.vocab_size)
        except ConfigurationError:  # a file that does not say its dtype
            if arguments.dtype is None:
                raise
            return verify_token_file(path, arguments.dtype, arguments.vocab_size)

    bad = False
    for given in map(as_place, arguments.files):
        path = given
        try:
            for path in map(as_place, list_token_files(given)):
                if is_manifest(path):
                    for file, wrong in compare_files(read_alone(path)):
                        bad |= wrong is not None
                        said = f"{file.path}: ok, {file.tokens:,} tokens, as in the manifest"
                        print(escaped(said if wrong is None else _of(file.path, wrong)), flush=True)
                    continue
                try:
                    said = f"{path}: {verified(path)}"
                except (TokenpipeError, OSError) as error:
                    bad, said = True, _of(path, error)
                print(escaped(said), flush=True)
        except (TokenpipeError, OSError) as error:  # a folder that cannot be listed, a pattern that nothing fits
            bad = True
            print(escaped(_of(path, error)), flush=True)
    return 1 if bad else 0


def _of(path: str, error: Exception) -> str:
    """The error in a line that begins with the path."""
    return str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
