"""Passes that take a graph and give back a graph: see, check, measure, guard, rewrite.

base.py       what an adapter is
surgery.py    how a graph is looked through and cut, without touching the caller's
around.py     how something is put around nodes, which keep what they are (datapipes/wrapped.py)
resume.py     where a run goes on      journal.py    what changed while it ran
bounds.py     its end, its masks       shuffle.py    its shuffling and seed    replace.py   other kinds of nodes
tap.py        a look at what flows     profile/      where the time goes
timeout.py    what takes too long      failing.py    what fails: retry.py, skip_errors.py
ahead.py      threads and devices      to_jax.py    a JAX mesh
placement.py  threads and processes for one node
applied.py    one on a loader that runs              defaults.py  settings for this machine
"""

from ..datapipes import Drawing, Finding, draw, lint, tree
from .ahead import PinMemory, Prefetch, ToDevice
from .applied import applied
from .base import Adapter
from .bounds import Exclude, Limit
from .defaults import Autotune, Defaults
from .journal import ApplyJournal
from .placement import Placement, Processes, Threads
from .profile import NodeProfile, Profile
from .replace import Replace
from .resume import ResumeSkip
from .retry import Retry
from .shuffle import Seed, Shuffle
from .skip_errors import SkipErrors
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
from .tap import Tap, Trace
from .timeout import CacheTimeout, Timeout
from .to_jax import ToJax

__all__ = [
    "Adapter",
    "ApplyJournal",
    "Autotune",
    "CacheTimeout",
    "Defaults",
    "Drawing",
    "Exclude",
    "Finding",
    "Limit",
    "NodeProfile",
    "PinMemory",
    "Placement",
    "Prefetch",
    "Processes",
    "Profile",
    "Replace",
    "ResumeSkip",
    "Retry",
    "Seed",
    "Shuffle",
    "SkipErrors",
    "Tap",
    "Threads",
    "Timeout",
    "ToDevice",
    "ToJax",
    "Trace",
    "applied",
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
