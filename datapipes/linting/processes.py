"""Rules about where a graph's nodes run: what can travel to a worker, be saved, be handed over, be pinned."""

from collections.abc import Iterator

from .._torch import DataPipe
from ..core import IndexedDataPipe
from ..pickled import culprits_in
from ..streaming.shard import nodes_without_state
from ..wrapped import wrappers_of
from .findings import Finding, Look, is_batch

__all__ = ["cannot_pickle", "no_state", "pin_in_worker", "prefetch_below_batch"]

MOST_NAMES = 6
COPIED = "they are copied once more on the way to the training loop"
PLACED = (
    ("pin_memory", "pinned", COPIED),
    ("to_device", "moved to the device", f"{COPIED}, and CUDA cannot be used in a forked process"),
    ("to_jax", "made jax.Arrays", "its devices are those of the training loop's process, and it raises"),
)
"""(kind of what belongs around the topmost node, what it does to items, what comes of it in a worker)"""


def cannot_pickle(look: Look) -> Iterator[Finding]:
    for culprit in culprits_in(look.graph):
        yield Finding(
            culprit.node,
            "cannot-pickle",
            f"{culprit.node}{culprit.way} is {culprit.shown}, which cannot be pickled ({culprit.error}): worker "
            "processes cannot be sent this graph",
            culprit.advice,
        )


def no_state(look: Look) -> Iterator[Finding]:
    if isinstance(look.graph, IndexedDataPipe):
        return
    if names := nodes_without_state(look.graph):
        shown = ", ".join(names[:MOST_NAMES]) + (f", … {len(names)} in all" if len(names) > MOST_NAMES else "")
        yield Finding(
            names[0],
            "no-state",
            f"the place of {shown} cannot be saved (no state_dict, or drawn from by several nodes): a resume goes "
            "through the epoch again from its beginning, and drops what was delivered",
            "StreamingDataPipes have a state, and so has each node with state_dict and load_state_dict",
        )


def prefetch_below_batch(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        if not _has(node, "prefetch") or is_batch(node) or any(map(is_batch, look.below(node))):
            continue
        if batches := [above for above in look.above(node) if is_batch(above)]:
            batch = look.name(batches[0])
            yield Finding(
                look.name(node),
                "prefetch-below-batch",
                f"single samples are handed from thread to thread, below {batch}: each handing over costs more than "
                "the sample",
                f"prefetch {batch}, or a node above it, whose items are whole batches",
            )


def pin_in_worker(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        # what a service takes off the top and runs in the main process leaves the node below it the topmost one
        above = [parent for parent in look.above(node) if not getattr(type(parent), "in_main_process", False)]
        for kind, what, there in PLACED:
            if above and _has(node, kind):
                yield Finding(
                    look.name(node),
                    "pin-in-worker",
                    f"its items are {what} below {look.name(above[0])}, so in a worker process where there are some: "
                    f"{there}",
                    f"put it around the topmost node, {look.name(_topmost(look))}, whose items are the loader's",
                )


def _topmost(look: Look) -> DataPipe:
    """The highest node that is not taken off to run in the main process."""
    return next((node for node in look.nodes if not getattr(type(node), "in_main_process", False)), look.graph)


def _has(node: DataPipe, kind: str) -> bool:
    return any(wrapper.kind == kind for wrapper in wrappers_of(node))
