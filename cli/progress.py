"""Whether a subcommand shows a bar: --progress, --no-progress."""

import argparse

__all__ = ["add_progress", "shown"]


def add_progress(parser: argparse.ArgumentParser) -> None:
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--progress", action="store_true", help="a bar also where stderr is no terminal")
    show.add_argument("--no-progress", action="store_true", help="no bar")


def shown(arguments: argparse.Namespace) -> "bool | None":
    """What `progress=` of a call is: None for where stderr is a terminal."""
    return True if arguments.progress else False if arguments.no_progress else None
