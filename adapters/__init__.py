"""Passes that take a graph and give back a graph: see, check, rewrite.

base.py is what an adapter is, surgery.py how a graph is cut without touching the caller's, resume.py the
skip that a resumed run begins with, journal.py the changes of a run written into its graph.
"""

from ..datapipes import Drawing, Finding, draw, lint, tree
from .base import Adapter
from .journal import ApplyJournal
from .resume import ResumeSkip
from .surgery import (
    find_dps,
    insert_after,
    insert_before,
    list_dps,
    map_graph,
    remove_dp,
    replace_dp,
    rewritten,
    traverse_dps,
)

__all__ = [
    "Adapter",
    "ApplyJournal",
    "Drawing",
    "Finding",
    "ResumeSkip",
    "draw",
    "find_dps",
    "insert_after",
    "insert_before",
    "lint",
    "list_dps",
    "map_graph",
    "remove_dp",
    "replace_dp",
    "rewritten",
    "traverse_dps",
    "tree",
]
