"""Which subcommand, and how its errors are told: a line on stderr instead of a traceback."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    "tokenize": "make a token file, or many, from text files and JSON lines",
    "convert": "make a token file of one kind from token files of any",
    "inspect": "show what a token file holds",
    "manifest": "say what token files are in one file, so that runs begin without opening them",
    "verify": "are token files what they say: sizes, hashes, document ends, every id",
    "plan": "what the next steps will take of each source, and what will go wrong",
    "contents": "what was in a step: each row's rank, source, epoch, document, file and place, and its text",
    "when": "in which steps a document or token was seen, or will be",
    "lint": "what is wrong with a graph before it runs: node, rule, and the change to make",
    "certify": "8 bytes a step that stand for its rows; and where two runs differ first",
}
"""The subcommands, a module each, with the line that the help shows."""

FAILED, INTERRUPTED = 1, 130


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Runs one subcommand; gives its exit status: 0 done, 1 failed (said on stderr), 2 wrong usage, 130 interrupted."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:  # while the library is imported, too
        return INTERRUPTED


def _main(arguments: "Sequence[str] | None") -> int:
    from ..datapipes.errors import TokenpipeError  # here: this imports torch, which takes seconds

    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="tokenpipe", description="Prepare, rehearse and audit the data of a pretraining run."
    )
    parser.add_argument("--version", action="version", version=f"tokenpipe {version('tokenpipe')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if given[:1] == [name]:  # only the asked one is imported
            module = importlib.import_module(f".{name}", __package__)
            sub.description = module.__doc__
            module.add_arguments(sub)
    parsed = parser.parse_args(given)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what an ASCII terminal cannot show is escaped, not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = module.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough; what is left in the buffer has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TokenpipeError, OSError) as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # the place in a recipe
        print(f"tokenpipe {parsed.command}: {error}{notes}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":  # torchrun -m tokenpipe.cli.main
    sys.exit(main())
