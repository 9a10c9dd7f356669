"""The table of a profile, and what to do about the slowest node."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .book import GATHER, NodeProfile, Span

if TYPE_CHECKING:
    from .adapter import Profile

__all__ = ["advice", "remedy", "report", "trace_events"]

QUIET = 0.02  # of the loop's time: so much waiting is nothing to mend


def report(profile: "Profile") -> str:
    """The nodes from the last one down, their times, and a word on the slowest."""
    rows = profile.nodes
    if not any(row.calls for row in rows):
        return "nothing was measured: no item, or only the first, came through the profiled graph"
    whole = sum(row.own for row in rows) or 1.0
    head = "node", "share", "own s", "total s", "waits s", "ms/call", "longest ms", "calls", "samples", "MB", "keeps MB"
    lines = [head, *(_cells(row, whole) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
    where = f"{profile.workers} worker process(es)" if profile.workers else "the process of the loop"
    loop = f"; the loop took {profile.items:,} items and waited {profile.waited:.3f} s for them, "
    loop += f"{profile.waited_share:.0%} of its time"
    text += ["", f"Made in {where}{loop if profile.items else ''}."]
    text.append(advice(profile))
    return "\n".join(text)


def _cells(row: NodeProfile, whole: float) -> "tuple[str, ...]":
    if not row.calls and not row.own:
        return row.node, *[""] * 10
    times = f"{row.own / whole:.1%}", f"{row.own:.3f}", f"{row.total:.3f}", f"{row.waiting:.3f}"
    if not row.calls:  # it is asked for numbers alone
        return row.node, *times, *[""] * 6
    each = f"{row.own_ms:.3f}", f"{1e3 * row.longest:.3f}", f"{row.calls:,}", f"{row.samples:,}"
    return row.node, *times, *each, f"{row.bytes / 1e6:,.1f}", f"{row.held / 1e6:,.1f}"


def advice(profile: "Profile") -> str:
    """The slowest node by name, and what would make it faster."""
    slowest = profile.slowest
    if slowest is None:
        return "Nothing was measured."
    whole = sum(row.own for row in profile.nodes) or 1.0
    each = f", {slowest.own_ms:.3g} ms a call" if slowest.calls else ""
    return f"Slowest: {slowest.node}, {slowest.own / whole:.0%} of the time in the graph{each}, {remedy(profile)}"


def remedy(profile: "Profile") -> str:
    """What to do about the slowest node: "mostly waiting. …"."""
    slowest = profile.slowest
    if slowest is None:
        return ""
    # where cores are scarce, what computes waits for its turn too
    waits = slowest.waiting > 0.7 * slowest.own
    return ("mostly waiting. " if waits else "mostly computing. ") + _remedy(slowest, waits, profile)


def _remedy(slowest: NodeProfile, waits: bool, profile: "Profile") -> str:
    if profile.items > 1 and profile.waited_share < QUIET:
        return "The loop hardly waits: there is nothing to gain."
    function = slowest.node in profile.functions
    others = f"so would more than {profile.workers} workers." if profile.workers else "so would worker processes."
    if slowest.node.endswith(GATHER):
        if waits:
            return "Its files come from a slow disk: a larger TOKENPIPE_READ_AHEAD_MIB, or copies nearby, would help."
        return "It copies tokens at the speed of memory; more processes would not help."
    if waits:
        way = f"Placement({{{slowest.node!r}: Threads(8)}})" if function else "Prefetch()"
        return f"{way} makes items while others are waited for; {others}"
    if function:
        return f"Placement({{{slowest.node!r}: Processes(4)}}) runs it on more cores; {others}"
    return "More workers, as far as there are cores, would help." if profile.workers else "Worker processes would help."


def trace_events(spans: "Sequence[Span]", main: int) -> str:
    """The spans as Chrome's trace-event JSON, which Perfetto reads: microseconds, a track a process and thread."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], int] = {}
    first = min((began for _, began, *_ in spans), default=0.0)
    for node, began, seconds, pid, thread in spans:
        track = threads.setdefault((pid, thread), len(threads))
        events.append(
            {
                "name": node,
                "ph": "X",
                "ts": round((began - first) * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
                "pid": pid,
                "tid": track,
                "cat": "node",
            }
        )
    for pid in {pid for pid, _ in threads}:
        name = "the loop's process" if pid == main else "worker process"
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
