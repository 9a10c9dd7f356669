"""What is wrong with a graph before it runs: node, rule, and the change to make. Nothing is iterated or changed.

| rule | finds | serious |
|---|---|---|
| shard-before-shuffle | a shuffle above a shard: each rank shuffles its own part | if dp_size > 1 |
| no-shard | dp_size > 1, and nothing gives a rank its part | without `once` |
| two-shards | a shard of a shard: samples are lost | yes |
| blend-in-step | a blend's rhythm meets a stride over the ranks: ranks get other mixtures (measured) | by half |
| no-shuffle | a source that nothing shuffles; not with `once`, nor an order that was brought along | |
| permute-above-blend | a permute of a blend's samples: weights cannot change | |
| cannot-pickle | a value that no worker process can be sent, with its path | |
| no-state | nodes of a stream whose place cannot be saved: a resume replays | |
| prefetch-below-batch | a thread that hands over single samples | |
| pin-in-worker | items pinned, or moved to a device, below other nodes | |
| short-documents | windows of more than 16 documents | |
| neighbouring-windows | documents sorted by length, or longer than what is mixed, and no permute of the whole | |

A rule that fails on some node says so as a finding, `not-checked`. findings.py is what rules give and see; order.py,
processes.py and documents.py have them.

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> for finding in lint(IterableWrapper(range(9)).sharding_filter().shuffle().batch(2), dp_size=4):
    ...     print(finding.node, finding.rule, finding.serious)
    sharding_filter shard-before-shuffle True
    shuffle no-state False
"""

import os
from collections.abc import Callable, Iterator

from .._torch import DataPipe, IterDataPipe, MapDataPipe
from ..core import as_count
from ..errors import ArgumentTypeError
from ..shard import RankSharder
from .documents import neighbouring_windows, window_beside_documents
from .findings import Finding, Look
from .order import blend_in_step, no_shard, no_shuffle, permute_above_blend, shard_before_shuffle, two_shards
from .processes import cannot_pickle, no_state, pin_in_worker, prefetch_below_batch

__all__ = ["Finding", "lint", "serious_findings"]

Rule = Callable[[Look], Iterator[Finding]]

OF_RANKS: "tuple[Rule, ...]" = (shard_before_shuffle, no_shard, two_shards, blend_in_step)
"""The rules that find what is serious. They read no files, and pickle nothing."""

OTHERS: "tuple[Rule, ...]" = (
    no_shuffle,
    permute_above_blend,
    cannot_pickle,
    no_state,
    prefetch_below_batch,
    pin_in_worker,
    window_beside_documents,
    neighbouring_windows,
)


def lint(graph: DataPipe, *, dp_size: "int | None" = None) -> "list[Finding]":
    """What is wrong with a graph, of indexed nodes, streams, torch's and your own; [] if nothing was found.

    The graph is not changed and not iterated; of token files at most some 65,000 document ends a source are read.

    Args:
        dp_size: how many ranks share the data; left out: what the graph's sharder says, else the world size of
            torch.distributed, else WORLD_SIZE of the environment, else 1.

    Raises ArgumentTypeError for what is no graph, and for a dp_size that is no count.
    """
    return _findings(graph, dp_size, (*OF_RANKS, *OTHERS))


def serious_findings(graph: DataPipe) -> "list[Finding]":
    """Those with which ranks get wrong data; cheap enough to be asked for each loader."""
    return [finding for finding in _findings(graph, None, OF_RANKS) if finding.serious]


def _findings(graph: DataPipe, dp_size: "int | None", rules: "tuple[Rule, ...]") -> "list[Finding]":
    if not isinstance(graph, (IterDataPipe, MapDataPipe)):
        raise ArgumentTypeError(f"lint takes a graph of datapipes, got {type(graph).__name__}")
    given = None if dp_size is None else as_count("dp_size", dp_size)
    try:
        look = Look(graph, 1)
        look.dp_size = given or _dp_size_of(look)
    except Exception as error:
        return [_not_checked(type(graph).__name__, "everything", error)]
    found: list[Finding] = []
    for rule in rules:
        try:
            found += rule(look)
        except Exception as error:  # of a node's own properties, or of files that are gone: the other rules still hold
            found.append(_not_checked(look.name(graph), rule.__name__.replace("_", "-"), error))
    return found


def _not_checked(node: str, what: str, error: Exception) -> Finding:
    return Finding(
        node,
        "not-checked",
        f"{what} could not be looked for: {type(error).__name__}: {error}",
        "a graph whose nodes answer without being run, and whose files are there",
    )


def _dp_size_of(look: Look) -> int:
    for node in look.nodes:
        if isinstance(node, RankSharder):
            return node.topology.dp_size
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    said = os.environ.get("WORLD_SIZE", "").strip()
    return max(1, int(said)) if said.isdecimal() else 1
