"""Rules about the order and the ranks. They look at nodes and numbers alone, and cost some hundred µs: the loader asks
those that find what is serious.
"""

from collections.abc import Iterator

from .._torch import DataPipe
from ..blend import Blender
from ..bound import Once
from ..core import IndexedDataPipe
from ..fingerprint import order_of
from ..permute import Permuter
from ..rhythm import uneven_shares
from ..shard import RankSharder
from .findings import Finding, Look, is_shard, is_shuffle

__all__ = ["blend_in_step", "no_shard", "no_shuffle", "permute_above_blend", "shard_before_shuffle", "two_shards"]

MOST_NAMES = 4
MOST_RANKS = 8  # whose shares a message lists
STRETCHES = 8
"""Of an order with planned changes of weights; each is looked at from its beginning."""


def shard_before_shuffle(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        shuffles = (
            [above for above in look.above(node) if is_shuffle(above) and _is_on(above)] if is_shard(node) else []
        )
        if not shuffles:
            continue
        if isinstance(node, RankSharder):
            yield Finding(
                look.name(node),
                "shard-before-shuffle",
                f"{look.name(shuffles[0])} permutes what is left of the order on one of {node.topology.dp_size} "
                "rank(s): batches then count as those of one rank, and other ranks would be another order",
                "permute(seed) before shard_ranks: one permute a source, below the blend",
                look.dp_size > 1,
            )
        elif not any(is_shuffle(below) for below in look.below(node)):
            yield Finding(
                look.name(node),
                "shard-before-shuffle",
                f"{look.name(shuffles[0])} shuffles what {look.name(node)} has left: each of {look.dp_size} rank(s), "
                "and each worker, sees the same part of the data in every epoch",
                f"shuffle() before {look.name(node)}",
                look.dp_size > 1,
            )


def _is_on(shuffle: DataPipe) -> bool:
    return bool(vars(shuffle).get("_enabled", True))  # torch's set_shuffle(False)


def no_shard(look: Look) -> Iterator[Finding]:
    sources = look.without(is_shard) if look.dp_size > 1 else []
    if not sources:
        return
    once = any(isinstance(node, Once) for node in look.nodes)
    indexed = isinstance(look.graph, IndexedDataPipe)
    yield Finding(
        look.name(sources[0]),
        "no-shard",
        f"dp_size is {look.dp_size}, and nothing between {_names(look, sources)} and the top of the graph gives a rank "
        f"its part: every rank gets the same samples, each {look.dp_size} times in all",
        "shard_ranks(Topology(dp_rank, dp_size), seed=...) before batch_samples; dp_size=1 if these ranks are meant to "
        "see the same"
        if indexed
        else "sharding_filter() behind the source (and its shuffle), or a node with apply_sharding; dp_size=1 if these "
        "ranks are meant to see the same",
        not once,  # every rank then evaluates all of it: no sample is lost
    )


def two_shards(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        above = [shard for shard in look.above(node) if is_shard(shard)] if is_shard(node) else []
        if above:
            left = (
                "" if look.dp_size == 1 else f": 1 of {look.dp_size**2} samples is left to each of {look.dp_size} ranks"
            )
            yield Finding(
                look.name(node),
                "two-shards",
                f"{look.name(above[0])} above takes a part of what is a part already{left}",
                f"leave out one of {look.name(above[0])} and {look.name(node)}",
                True,
            )


def no_shuffle(look: Look) -> Iterator[Finding]:
    if any(isinstance(node, Once) for node in look.nodes):
        return
    if sources := look.without(is_shuffle):
        indexed = isinstance(look.graph, IndexedDataPipe)
        yield Finding(
            look.name(sources[0]),
            "no-shuffle",
            f"nothing between {_names(look, sources)} and the top of the graph shuffles: samples come in the order of "
            "the files, neighbours in one batch",
            "permute(seed=...) behind slice_sequences; once() for evaluation"
            if indexed
            else "shuffle() behind the source, before it is sharded",
        )


def permute_above_blend(look: Look) -> Iterator[Finding]:
    for node in look.nodes:
        if isinstance(node, Permuter):
            for blend in look.below(node):
                if isinstance(blend, Blender):
                    yield Finding(
                        look.name(node),
                        "permute-above-blend",
                        f"it permutes samples of {look.name(blend)}, so what was consumed is no beginning of the "
                        "blend, and update_weights is refused",
                        f"a permute(seed={node.seed}) on each source below the blend instead",
                    )
                    break


# Blends in step with the ranks -----------------------------------------------------------------------------


def blend_in_step(look: Look) -> Iterator[Finding]:
    if look.dp_size < 2 or any(isinstance(node, Once) for node in look.nodes):
        return
    for node in look.nodes:
        if not isinstance(node, RankSharder) or not node.strided:
            continue
        below, dp = node.datapipe, look.dp_size
        looked = ((start, uneven_shares(below, start, dp, start % dp)) for start in _stretches(below))
        if found := [(start + below.first_sample, uneven) for start, uneven in looked if uneven]:
            sample, worst = next((pair for pair in found if pair[1].much), found[0])
            by_rank = ", ".join(f"{share:.0%}" for share in worst.shares.tolist()) if dp <= MOST_RANKS else ""
            yield Finding(
                look.name(node),
                "blend-in-step",
                f"the blend's rhythm is in step with dp_size {dp}: from sample {sample:,} on rank "
                f"{worst.rank} gets {worst.shares[worst.rank]:.1%} of its samples from {worst.source!r}, all ranks "
                f"together {worst.shares.mean():.1%}" + (f" (by rank: {by_rank})" if by_rank else ""),
                "shard_ranks(topology, seed=...): each round of samples is then turned by another amount",
                worst.much,
            )


def _stretches(order: IndexedDataPipe) -> "list[int]":
    """Numbers from which on the weights stay the same."""
    blend = order_of(order)
    changes = blend.all_changes() if isinstance(blend, Blender) else []
    skipped = order.first_sample
    return sorted({max(0, change.number - skipped) for change in changes} | {0})[:STRETCHES]


def _names(look: Look, nodes: "list[DataPipe]") -> str:
    shown = ", ".join(look.name(node) for node in nodes[:MOST_NAMES])
    return shown + (f" … {len(nodes)} in all" if len(nodes) > MOST_NAMES else "")
