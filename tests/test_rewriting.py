"""Adapters that rewrite a graph: its beginning and end, masks, shuffle and seed, other nodes, what flows in it."""

import itertools
import os

import numpy as np
import pytest
import torch
from graphs import Counted, Several, items, looks, nodes, shape
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import Batcher, Collator, Grouper, IterableWrapper, ShardingFilter, Shuffler
from torch.utils.data.datapipes.iter import Mapper as TorchMapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.datapipes.map import SequenceWrapper

from contract import all_same, same
from faulty import Runs
from processes import scaled
from tokenpipe.adapters import (
    CacheTimeout,
    Exclude,
    Limit,
    Replace,
    ResumeSkip,
    Seed,
    Shuffle,
    Tap,
    Timeout,
    Trace,
    applied,
)
from tokenpipe.datapipes import (
    IndexedDataPipe,
    Mapper,
    Permuter,
    Skipper,
    StreamingDataPipe,
    StreamLimiter,
    StreamSkipper,
    TokenFileWriter,
    TokenReader,
    Topology,
)
from tokenpipe.datapipes._torch import IterDataPipe, apply_sharding
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    BatchSizeError,
    ConfigurationError,
    GraphError,
    LoaderWarning,
    OutOfRangeError,
)
from tokenpipe.datapipes.names import node_names
from tokenpipe.datapipes.wrapped import wrappers_of
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

LAWS = settings(max_examples=scaled(300, 25))


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def identity(item):
    return item


def plus(item):
    return item + 1


def even(item):
    return item % 2 == 0


def noise(item):
    return item * 100 + int(np.random.randint(100))


def forked(graph, adapters=None, workers=2):
    return DataLoader2(graph, adapters, MultiProcessingReadingService(workers, "fork"))


def batches(loader, n=None):
    with loader:
        return [*itertools.islice(loader, n)]


def firsts(loader, n=None):
    return [int(batch["sample_numbers"][0]) for batch in batches(loader, n)]


def names(graph):
    return [*node_names(graph).values()]


def stream(n=20):
    return IterableWrapper(range(n)).map(plus).sharding_filter().map(identity)


def on_rank(graph, rank, ranks):
    apply_sharding(graph, ranks, rank)
    return [*graph]


# All of them --------------------------------------------------------------------------------------------------

ADAPTERS = {
    "resume": lambda: ResumeSkip(8),
    "replace": lambda: Replace({Mapper: Doubles, TorchMapper: FastMapper}),
    "shuffle": lambda: Shuffle(True),
    "no shuffle": lambda: Shuffle(False),
    "shuffle as it is": lambda: Shuffle(None),
    "seed": lambda: Seed(11),
    "limit": lambda: Limit(2),
    "exclude": lambda: Exclude(tokens={"prose": [(0, 90)]}),
    "cache": lambda: CacheTimeout(3),
    "tap": lambda: Tap(identity),
    "trace": lambda: Trace(to=identity),
}
REFUSED = {("exclude", kind) for kind in ("stream", "forked", "map-style", "indexed stream", "own stream", "own")} | {
    (adapter, "map-style") for adapter in ("resume", "limit", "shuffle")
}


def graph_of(kind, runs):
    left, right = IterableWrapper(range(30)).shuffle().fork(2)
    source = IterableWrapper(range(20))
    return {
        "indexed": lambda: runs.training,
        "finite": lambda: runs.finite(),
        "sharded": lambda: runs.blend().map(identity).shard_ranks(Topology(dp_rank=1, dp_size=2), seed=3),
        "own": lambda: Counted("a", 40).permute(seed=3).map(identity).batch_samples(4),
        "stream": stream,
        "forked": lambda: left.map(identity).concat(right.sharding_filter()),
        "own stream": lambda: Several(source.map(plus), {"a": [source, (source,)]}),
        "indexed stream": lambda: IterableWrapper(Counted("a", 40)).map(plus),
        "map-style": lambda: SequenceWrapper([*range(30)]).map(plus),
    }[kind]()


KINDS = ["indexed", "finite", "sharded", "own", "stream", "forked", "own stream", "indexed stream", "map-style"]


@pytest.mark.filterwarnings("ignore:Shuffle.. found no shuffle", "ignore:Some child DataPipes")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_callers_graph_stays_as_it_was_and_what_cannot_be_done_names_the_node(adapter, kind, runs):
    graph = graph_of(kind, runs)
    before, made = looks(graph), ADAPTERS[adapter]()
    if (adapter, kind) in REFUSED:
        with pytest.raises((GraphError, ConfigurationError)) as error:
            made(graph)
        assert type(graph).__name__ in str(error.value) or "prose" in str(error.value)
        assert looks(graph) == before
        return
    adapted = made(graph)
    assert looks(graph) == before
    wanted = listed(graph_of(kind, runs))
    if made.keeps_items or (adapter, kind) == ("shuffle as it is", kind):
        torch.manual_seed(1)
        wanted = listed(graph_of(kind, runs))
        torch.manual_seed(1)
        assert all_same(listed(adapted), wanted)
        assert shape(adapted) == shape(graph)
    else:
        assert listed(adapted)
    assert len(listed(graph)) == len(wanted)
    again = made(graph)  # an adapter can be used twice
    assert shape(again)[-1:] == shape(adapted)[-1:]
    assert looks(graph)[1:2] == before[1:2]


def listed(graph, n=20):
    if isinstance(graph, IndexedDataPipe):
        return [*itertools.islice(graph.iterate(), n)]
    return [*graph] if isinstance(graph, IterDataPipe) else [graph[i] for i in range(n)]


# ResumeSkip ---------------------------------------------------------------------------------------------------


@LAWS
@given(data=st.data())
def test_a_resumed_indexed_graph_gives_the_rest(data, tmp_path_factory):
    if not hasattr(test_a_resumed_indexed_graph_gives_the_rest, "runs"):
        test_a_resumed_indexed_graph_gives_the_rest.runs = Runs(tmp_path_factory.mktemp("runs"))
    graph = test_a_resumed_indexed_graph_gives_the_rest.runs.training
    consumed = data.draw(st.sampled_from([0, 4, 8, 12, 40, 2**40, 2**62]))
    at = consumed // 4
    wanted = graph.fetch(np.arange(at, at + 5))
    begun = ResumeSkip(consumed)(graph)
    assert all_same(itertools.islice(begun.iterate(), 5), wanted)
    moved = ResumeSkip(consumed)(ResumeSkip(data.draw(st.sampled_from([4, 8, 400])))(graph))
    assert shape(moved) == shape(begun)
    assert all_same(itertools.islice(moved.iterate(), 5), wanted)
    assert begun.fingerprint() == graph.fingerprint()


def test_the_skip_of_an_indexed_graph_stands_in_front_of_the_sharder_once(runs):
    graph = runs.blend().shard_ranks(Topology(dp_rank=1, dp_size=2)).batch_samples(2).collate_causal_lm()
    begun = ResumeSkip(16)(ResumeSkip(4)(graph))
    assert names(begun)[:4] == ["collate_causal_lm", "batch_samples", "shard_ranks", "skip"]
    assert sum(isinstance(node, Skipper) for node in nodes(begun)) == 1
    assert names(ResumeSkip(0)(begun)) == names(graph)
    assert all_same(listed(begun, 5), listed(graph, 9)[4:])


def test_a_place_inside_a_step_or_before_the_graphs_own_beginning_is_refused(runs):
    with pytest.raises(BatchSizeError):
        ResumeSkip(6)(runs.training)
    with pytest.raises(ConfigurationError, match="cannot begin at sample 4: the graph itself skips to 16"):
        ResumeSkip(4)(runs.blend().skip(16).limit(samples=80).batch_samples(4))
    for wrong in (-1, 0.5, None, True):
        with pytest.raises((ValueError, TypeError)):
            ResumeSkip(wrong)


def test_a_resumed_users_source_goes_on_in_workers():
    graph = Counted("a", 40).permute(seed=3).map(noise).batch_samples(4)
    whole = batches(DataLoader2(graph))
    assert all_same(batches(forked(graph, ResumeSkip(12))), whole[3:])


@LAWS
@given(n=st.integers(0, 25), before=st.integers(0, 25), consumed=st.integers(0, 25), ranks=st.integers(1, 4))
def test_a_resumed_stream_shares_out_the_rest(n, before, consumed, ranks):
    whole = [*IterableWrapper(range(n)).map(plus)]
    dealt = [on_rank(ResumeSkip(consumed)(ResumeSkip(before)(stream(n))), rank, ranks) for rank in range(ranks)]
    assert dealt == [whole[consumed:][rank::ranks] for rank in range(ranks)]


def test_the_skip_of_a_stream_stands_in_front_of_each_filter_and_is_moved():
    shared = IterableWrapper(range(12))
    graph = shared.map(plus).sharding_filter().concat(IterableWrapper(range(8)).sharding_filter().map(plus))
    begun = ResumeSkip(3)(graph)
    assert names(begun) == [
        "concat",
        "concat.0.sharding_filter",
        "concat.0.skip",
        "concat.0.map",
        "concat.0.iterablewrapper",
        "concat.1.map",
        "concat.1.sharding_filter",
        "concat.1.skip",
        "concat.1.iterablewrapper",
    ]
    assert [*begun] == [*range(4, 13), *range(4, 9)]
    again = ResumeSkip(5)(begun)
    assert sum(isinstance(node, StreamSkipper) for node in nodes(again)) == 2
    assert [*again] == [*range(6, 13), *range(6, 9)]
    assert names(ResumeSkip(0)(again)) == names(graph)


class OwnFilter(IterDataPipe):
    """A user's own way to share out."""

    def __init__(self, below):
        self.below, self.ranks, self.rank = below, 1, 0

    def apply_sharding(self, num_of_instances, instance_id, sharding_group=None):
        self.ranks, self.rank = num_of_instances, instance_id

    def __iter__(self):
        return itertools.islice(iter(self.below), self.rank, None, self.ranks)


def test_a_users_own_filter_and_a_stream_without_one_are_resumed_too():
    assert on_rank(ResumeSkip(4)(OwnFilter(IterableWrapper(range(10))).map(plus)), 1, 2) == [6, 8, 10]
    graph = IterableWrapper(range(10)).batch(2).map(sum)
    assert names(ResumeSkip(2)(graph))[0] == "skip"
    assert [*ResumeSkip(2)(graph)] == [9, 13, 17]


@pytest.mark.parametrize("consumed", [0, 5])
def test_what_is_around_a_skip_stays_where_it_is_moved(consumed):
    seen = []
    graph = Tap(seen.append)(IterableWrapper(range(10)).shuffle().skip(2))
    with DataLoader2(graph, [Seed(4), ResumeSkip(consumed)]) as loader:
        got = [*loader]
    assert seen == got
    with DataLoader2(IterableWrapper(range(10)).shuffle(), Seed(4)) as loader:
        assert [*loader][consumed:] == got


def test_a_resumed_stream_that_is_dispatched_gives_the_rest_once():
    graph = IterableWrapper(range(12)).map(plus)
    dispatched = graph.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING).map(identity)
    assert batches(forked(dispatched, ResumeSkip(4))) == [*range(5, 13)]
    both = graph.sharding_filter().sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    assert names(ResumeSkip(4)(both))[1:3] == ["sharding_filter", "skip"]
    assert names(ResumeSkip(4)(both)).count("skip") == 1


def test_a_resumed_stream_in_workers_gives_each_item_of_the_rest_once():
    with forked(stream(20), [ResumeSkip(2), ResumeSkip(7)]) as loader:
        assert sorted(loader) == [*range(8, 21)]
        assert sorted(loader) == [*range(8, 21)], "each epoch"


# Replace ------------------------------------------------------------------------------------------------------


class FastMapper(TorchMapper):
    pass


class Tens(IterDataPipe):
    """Another class with some of the same parameters."""

    def __init__(self, datapipe, fn, *, factor=10):
        self.datapipe, self.fn, self.factor = datapipe, fn, factor

    def __iter__(self):
        for item in self.datapipe:
            yield self.fn(item) * self.factor


class Doubles(Mapper):
    pass


class OwnScale(IterDataPipe):
    """A user's own node, which keeps its arguments as they are."""

    def __init__(self, below, factor, *, shift=0, **more):
        self.below, self.factor, self.shift, self.more = below, factor, shift, more

    def __iter__(self):
        for item in self.below:
            yield item * self.factor + self.shift


class FastScale(OwnScale):
    pass


class Forgetful(IterDataPipe):
    """A user's own node, which does not."""

    def __init__(self, below, factor=3):
        self.below, self._times = below, factor

    def __iter__(self):
        for item in self.below:
            yield item * self._times


class FastForgetful(Forgetful):
    pass


def test_every_node_of_a_kind_is_replaced_with_its_arguments():
    base = IterableWrapper([(1, 2), (3, 4)])
    graph = base.map(plus, input_col=1, output_col=0).zip(base.map(identity)).map(identity)
    wanted = [*graph.datapipe.datapipes[0]]
    made = Replace({TorchMapper: FastMapper})(graph)
    assert [type(node).__name__ for node in nodes(made)].count("FastMapper") == 3
    assert [*made.datapipe.datapipes[0]] == wanted == [(3, 2), (5, 4)]
    assert made.datapipe.datapipes[0].datapipe is base


def test_torchs_core_nodes_keep_what_they_were_built_with():
    class FastShuffler(Shuffler):
        pass

    class FastBatcher(Batcher):
        pass

    class FastCollator(Collator):
        pass

    class FastGrouper(Grouper):
        pass

    class FastFilter(ShardingFilter):
        pass

    fast = Replace(
        {
            Shuffler: FastShuffler,
            Batcher: FastBatcher,
            Collator: FastCollator,
            Grouper: FastGrouper,
            ShardingFilter: FastFilter,
        }
    )
    source = IterableWrapper(range(7))
    assert [*fast(source.batch(3, drop_last=True).collate(collate_fn=sum))] == [3, 12]
    assert [*fast(source.batch(3, drop_last=True).collate(sum))] == [3, 12]
    assert [b.tolist() for b in fast(source.batch(3).collate())] == [[0, 1, 2], [3, 4, 5], [6]]
    grouped = fast(source.groupby(even, buffer_size=5, group_size=2, drop_remaining=True))
    assert (grouped.max_buffer_size, grouped.group_size, grouped.drop_remaining) == (5, 2, True)
    shuffled = fast(source.batch(2).shuffle(buffer_size=4, unbatch_level=1).sharding_filter())
    assert sorted(shuffled) == [*range(7)]
    assert shuffled.source_datapipe.buffer_size == 4
    assert sum(type(node).__name__ in ("FastShuffler", "FastFilter") for node in nodes(shuffled)) == 2


def test_another_class_with_the_same_parameters_and_a_function_will_do():
    graph = IterableWrapper([1, 2]).map(plus)
    assert [*Replace({TorchMapper: Tens})(graph)] == [20, 30]
    assert [*Replace({TorchMapper: lambda node: Tens(node.datapipe, node.fn, factor=2)})(graph)] == [4, 6]
    assert [*Replace({TorchMapper: lambda node: node.map(plus)})(graph)] == [3, 4]
    assert [*graph] == [2, 3]


def test_only_the_very_kind_is_replaced_and_what_is_around_it_stays():
    graph = FastMapper(IterableWrapper([1, 2]), plus).map(plus)
    seen = []
    tapped = Tap(seen.append, nodes="map")(graph)
    made = Replace({TorchMapper: FastMapper})(tapped)
    assert [type(node).__name__ for node in nodes(made)][:2] == ["FastMapper", "FastMapper"]
    assert len(wrappers_of(made)) == 1
    assert [*made] == [3, 4]
    assert seen == [3, 4]
    assert [*Replace({Tens: FastMapper})(graph)] == [3, 4]


def test_later_adapters_may_name_nodes_of_the_first_graph():
    seen = []
    graph = IterableWrapper([1, 2]).map(plus).filter(even)
    adapters = [Replace({TorchMapper: FastMapper}), Limit(9), Tap(seen.append, nodes=graph.datapipe)]
    for adapter in adapters:
        graph = adapter(graph)
    assert [*graph] == [2]
    assert seen == [2, 3]


def test_indexed_nodes_are_replaced_with_arguments_order_and_seeds(runs):
    class FastPermuter(Permuter):
        pass

    graph = runs.source("prose").permute(seed=9, window=16).map(identity, seeded=False).batch_samples(4)
    made = Replace({Permuter: FastPermuter, Mapper: Doubles})(graph)
    assert [type(node).__name__ for node in nodes(made)][1:4] == ["Doubles", "FastPermuter", "FastPermuter"]
    assert all_same(listed(made), listed(graph))
    assert made.fingerprint() == graph.fingerprint()
    assert names(made) == names(graph)
    assert not made.datapipe.seeded
    blend = runs.blend()
    fast = Replace({type(blend): type("FastBlender", (type(blend),), {})})(blend)
    assert all_same(listed(fast), listed(blend))


def test_a_users_node_keeps_its_own_arguments_in_workers_too():
    graph = OwnScale(IterableWrapper(range(6)).sharding_filter(), 3, shift=1)
    adapter = Replace({OwnScale: FastScale})
    assert [*adapter(graph)] == [*graph] == [1, 4, 7, 10, 13, 16]
    assert sorted(batches(forked(graph, adapter))) == [1, 4, 7, 10, 13, 16]


def test_an_argument_without_a_place_is_refused_with_the_nodes_name():
    base = IterableWrapper([(1, 2)])
    graph = base.map(plus, input_col=1).zip(base)
    with pytest.raises(GraphError, match=r"^zip\.0\.map: Tens has no place for input_col of Mapper"):
        Replace({TorchMapper: Tens})(graph)

    class Wants(Tens):
        def __init__(self, datapipe, fn, device):
            super().__init__(datapipe, fn)

    with pytest.raises(GraphError, match=r"^map: Wants wants device, which Mapper"):
        Replace({TorchMapper: Wants})(base.map(plus))
    with pytest.raises(GraphError, match=r"^forgetful: Forgetful has no attribute factor, .* function"):
        Replace({Forgetful: FastForgetful})(Forgetful(IterableWrapper([1]), 5))


def test_replace_takes_classes_and_functions_that_give_nodes():
    for wrong in (None, {}, [TorchMapper], {1: FastMapper}, {TorchMapper: 3}):
        with pytest.raises(ArgumentTypeError, match="Replace takes"):
            Replace(wrong)
    with pytest.raises(ArgumentTypeError, match=r"for map, .* gave no datapipe but 3"):
        Replace({TorchMapper: lambda node: 3})(IterableWrapper([1]).map(plus))


# Shuffle ------------------------------------------------------------------------------------------------------


def test_a_streams_shuffle_is_turned_off_and_on_again():
    """As torchdata's: True, False, and None leaves it."""
    graph = IterableWrapper(range(30)).shuffle().sharding_filter().shuffle()
    off = Shuffle(False)(graph)
    assert [*off] == [*range(30)]
    assert [*graph] != [*range(30)]
    on = Shuffle()(off)
    assert names(on) == names(graph)
    assert sorted(on) == [*range(30)] != [*on]
    assert Shuffle(None)(off) is off
    assert [*Shuffle(False)(IterableWrapper(range(3)))] == [0, 1, 2]


def test_a_stream_without_a_shuffle_gets_one_on_top_with_a_warning():
    with pytest.warns(LoaderWarning, match="puts one on top"):
        made = Shuffle(True)(stream(30))
    assert names(made)[:2] == ["shuffle", "map"]
    assert sorted(made) == [*range(1, 31)]
    with pytest.warns(LoaderWarning), forked(stream(30), [Shuffle(True), Seed(3)]) as loader:
        one, other = [*loader], [*loader]
    assert sorted(one) == sorted(other) == [*range(1, 31)]
    assert one != other


class OwnShuffle(IterDataPipe):
    """A user's own shuffling node: the two methods make it one."""

    def __init__(self, below):
        self.below, self.on = below, True

    def set_shuffle(self, shuffle=True):
        self.on = shuffle
        return self

    def set_seed(self, seed):
        return self

    def __iter__(self):
        return iter([*self.below][:: -1 if self.on else 1])


def test_a_users_own_shuffle_is_set_on_a_copy():
    graph = OwnShuffle(IterableWrapper(range(4))).map(identity)
    assert [*Shuffle(False)(graph)] == [0, 1, 2, 3]
    assert [*graph] == [3, 2, 1, 0]
    timed = Shuffle(False)(Timeout(30, nodes="ownshuffle")(graph))
    assert [*timed] == [0, 1, 2, 3]


def test_an_indexed_graph_loses_its_permutes_and_gets_them_below_the_blend(runs):
    graph = runs.training
    off = Shuffle(False)(graph)
    assert not any("permute" in name for name in names(off))
    assert off.fingerprint() != graph.fingerprint()
    on = Shuffle(True, seed=7)(off)
    assert names(on) == names(graph)
    assert on.fingerprint() == graph.fingerprint()
    assert all_same(listed(on), listed(graph))
    assert Shuffle(True, seed=8)(graph) is graph, "it shuffles already"
    assert Shuffle(True, seed=8)(off).fingerprint() != graph.fingerprint()


def test_a_users_own_indexed_source_is_shuffled_below_the_blend_too():
    graph = Counted("a", 20).blend(Counted("b", 20, 100), weights=[1, 1], max_epochs=1).map(identity)
    made = Shuffle(True, seed=3)(graph)
    assert names(made)[2:4] == ["blend.0.permute", "blend.0.counted"]
    assert sorted(items(made)) == sorted(items(graph))
    assert items(made) != items(graph)
    assert all_same(items(Shuffle(False)(made)), items(graph))


def test_what_shuffle_cannot_turn_on_or_read_it_refuses():
    with pytest.raises(GraphError, match="map-style graph shuffles"):
        Shuffle(True)(SequenceWrapper([1, 2]))
    for wrong in (1, "yes", 0.0):
        with pytest.raises(ArgumentTypeError, match="True, False or None"):
            Shuffle(wrong)
    with pytest.raises(ConfigurationError):
        Shuffle(True, seed=-1)


# Seed ---------------------------------------------------------------------------------------------------------


def test_an_indexed_graph_takes_the_seed_as_its_own(runs):
    def built(seed):
        blend = runs.source("prose").datapipe.permute(seed=seed).blend(runs.source("code").datapipe.permute(seed=seed))
        return blend.shard_ranks(Topology(dp_rank=1, dp_size=2), seed=seed).batch_samples(4)

    seeded = Seed(11)(built(5))
    assert seeded.fingerprint() == built(11).fingerprint() != built(5).fingerprint()
    assert all_same(listed(seeded), listed(built(11)))
    assert not all_same(listed(seeded), listed(built(5)))
    assert names(seeded) == names(built(5))
    assert Seed(5)(built(5)).fingerprint() == built(5).fingerprint()
    unturned = runs.blend().shard_ranks(Topology(dp_rank=1, dp_size=2))
    assert next(iter(nodes(Seed(11)(unturned)))).seed is None


class OwnOrder(Counted):
    """A user's own node with a seed."""

    functional_name = "own_order"

    def __init__(self, called, samples, seed):
        super().__init__(called, samples)
        self.seed = seed

    def fetch(self, numbers, columns=None):
        return [item ^ self.seed for item in super().fetch(numbers)]


class HiddenSeed(OwnOrder):
    def __init__(self, called, samples, seed, secret=3):
        super().__init__(called, samples, seed + secret)


def test_other_nodes_with_a_seed_take_it_or_are_named(runs):
    nanoset = runs.source("prose").datapipe.order_nanoset(runs.source("code").datapipe, num_samples=60, seed=3)
    other = runs.source("prose").datapipe.order_nanoset(runs.source("code").datapipe, num_samples=60, seed=9)
    assert Seed(9)(nanoset).fingerprint() == other.fingerprint()
    assert all_same(listed(Seed(9)(nanoset)), listed(other))
    assert items(Seed(9)(OwnOrder("a", 8, 1).map(identity))) == items(OwnOrder("a", 8, 9).map(identity))
    with pytest.raises(GraphError, match=r"^order_nanoset cannot be given another seed: .*below 2\*\*32"):
        Seed(2**40)(nanoset)
    for wrong in (-1, 2**64):
        with pytest.raises(ConfigurationError, match="2\\*\\*64"):
            Seed(wrong)
    with pytest.raises(ArgumentTypeError):
        Seed(1.5)
    own = HiddenSeed("a", 8, 1)
    own._given = None  # as after a change
    with pytest.raises(GraphError, match=r"own_order cannot be given another seed"):
        Seed(9)(own.map(identity))


@pytest.mark.parametrize("where", ["alone", "below others"])
def test_a_stream_with_a_seed_is_one_with_the_loaders_seed(where):
    def graph():
        return IterableWrapper(range(30)).shuffle().sharding_filter().shuffle()

    def epochs(loader, n=3):
        with loader:
            return [[*loader] for _ in range(n)]

    by_loader = DataLoader2(graph())
    by_loader.seed(seed := 2**64 - 41)
    wanted = epochs(by_loader)
    adapters = [Seed(seed)] if where == "alone" else [Seed(7), Seed(seed), Limit(30), Shuffle(True), Tap(identity)]
    torch.manual_seed(3)
    assert epochs(DataLoader2(graph(), adapters)) == wanted
    if where == "below others":
        assert epochs(DataLoader2(Seed(seed)(graph()).map(identity))) == wanted
    with forked(graph(), adapters) as loader:
        loader_epochs = [[*loader] for _ in range(2)]
    again = forked(graph())
    again.seed(seed)
    assert epochs(again, 2) == loader_epochs
    assert loader_epochs[0] != loader_epochs[1]


@pytest.mark.filterwarnings("ignore:a resume of this stream goes through")
def test_a_resumed_epoch_of_a_seeded_stream_and_those_after_it_follow():
    def loader():
        return DataLoader2(Stamped(20).shuffle(buffer_size=6), Seed(13))

    with loader() as whole:
        wanted = [[*whole] for _ in range(3)]
    with loader() as first:
        begun = [*itertools.islice(first, 8)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        rest = [[*second] for _ in range(3)]
    assert [begun + rest[0], rest[1], rest[2]] == wanted


class Stamped(StreamingDataPipe):
    """A user's own stream with a place."""

    initial_state = {"at": 0}  # noqa: RUF012

    def __init__(self, n):
        super().__init__()
        self.n = n

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1


# Limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "batches_left"),
    [({"items": 6}, 6), ({"samples": 16}, 4), ({"samples": 18}, 4), ({"steps": 3}, 6), ({"passes": 1}, 54)],
)
def test_an_indexed_run_ends_where_it_is_limited(limit, batches_left, runs):
    graph = Limit(**limit)(runs.training)
    assert len(graph) == graph.end == batches_left
    assert graph.fingerprint() == runs.training.fingerprint()
    assert all_same(graph.iterate(), runs.training.fetch(np.arange(batches_left)))
    assert firsts(DataLoader2(runs.training, Limit(**limit)), 99) == [4 * i for i in range(batches_left)]
    resumed = ResumeSkip(8)(graph)
    assert len([*resumed.iterate()]) == batches_left - 2, "a resume does not move the end"


def test_items_of_one_rank_are_limited_for_all_alike(runs):
    for rank in range(2):
        topology = Topology(dp_rank=rank, dp_size=2)
        graph = runs.blend().shard_ranks(topology).batch_samples(2, global_batch_size=8)
        assert all_same(Limit(4)(graph).iterate(), graph.fetch(np.arange(4)))
        alone = runs.blend().shard_ranks(topology)
        assert all_same(Limit(5)(alone).iterate(), alone.fetch(np.arange(5)))
    with pytest.raises(BatchSizeError, match=r"3 batches end inside step 1; 2 or 4 are whole steps"):
        Limit(3)(runs.training)
    with pytest.raises(GraphError, match="no steps"):
        Limit(steps=3)(runs.blend())
    assert items(Limit(5)(Counted("a", 9).map(plus))) == [1, 2, 3, 4, 5]


@LAWS
@given(n=st.integers(0, 12), limit=st.integers(1, 14), skip=st.integers(0, 14))
def test_a_limited_stream_gives_its_first_items_and_makes_no_more(n, limit, skip):
    made = []
    graph = IterableWrapper(range(n)).map(lambda item: made.append(item) or item)
    limited = Limit(limit)(graph)
    for _ in range(2):
        made.clear()
        assert [*limited] == [*range(n)][:limit]
        assert made == [*range(n)][:limit]
    assert len(limited) == min(n, limit)
    both = graph.skip(skip).limit(limit)
    assert [*both] == [*range(n)][skip:][:limit]
    assert len(both) == len([*both])
    assert [*graph.limit(limit).skip(skip)] == [*range(n)][:limit][skip:]


def test_a_limited_stream_ends_in_each_worker_and_on_a_users_node():
    assert len(batches(forked(stream(40), Limit(3)))) == 6
    assert [*Limit(2)(OwnScale(IterableWrapper(range(9)), 2))] == [0, 2]


def test_what_a_stream_does_not_have_does_not_limit_it():
    for kind in ("samples", "steps", "passes"):
        with pytest.raises(GraphError, match=r"Mapper.*Limit\(items\)"):
            Limit(**{kind: 3})(stream())
    with pytest.raises(GraphError, match="map-style"):
        Limit(3)(SequenceWrapper([1, 2]).map(plus))
    for wrong in ({}, {"items": 1, "steps": 2}, {"items": 0}, {"steps": -1}):
        with pytest.raises(ConfigurationError):
            Limit(**wrong)
    with pytest.raises(ArgumentTypeError):
        Limit(1.5)


def test_the_bounds_of_a_stream_go_on_inside_and_refuse_what_is_no_stream():
    graph = Stamped(12).skip(3).limit(6)
    running = iter(graph)
    head = [next(running), next(running)]
    states = {type(node): node.state_dict() for node in nodes(graph)}
    assert (states[StreamSkipper], states[StreamLimiter]) == ({"skipped": 3}, {"given": 2})
    other = Stamped(12).skip(3).limit(6)
    for node in nodes(other):
        node.load_state_dict(states[type(node)])
    assert [*head, *other] == [3, 4, 5, 6, 7, 8]
    assert [*other] == [3, 4, 5, 6, 7, 8], "the next epoch begins anew"
    for kind in (StreamSkipper, StreamLimiter):
        with pytest.raises(ArgumentTypeError):
            kind(SequenceWrapper([1]), 2)
        with pytest.raises(ConfigurationError):
            kind(Stamped(3), -1)


# Exclude ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in process", "in workers"])
def test_excluded_tokens_are_masked_and_every_other_sample_is_the_same_bit_for_bit(where, runs):
    bad = range(100, 150)
    adapter = Exclude(tokens={"prose": [(100, 120), (120, 150)]}, from_sample=60)
    load = forked if where == "in workers" else DataLoader2
    plain, masked = batches(DataLoader2(runs.finite(200))), batches(load(runs.finite(200), adapter))
    ids = (np.arange(1000) * 7 + 1000) % 50_000  # of prose
    starts = {int(ids[8 * k]): 8 * k for k in range(124)}
    hit = early = 0
    for one, other in zip(plain, masked, strict=True):
        for row in range(4):
            start = starts.get(int(one["input_ids"][row][0]))
            late = int(one["sample_numbers"][row]) >= 60
            prose = start is not None and np.array_equal(one["input_ids"][row], ids[start : start + 8])
            bad_one = prose and start <= bad[-1] and start + 9 > bad[0]
            early += bad_one and not late
            if bad_one and late:
                hit += 1
                assert (other["label_ids"][row] == -100).all()
                assert same(other["input_ids"][row], one["input_ids"][row])
                continue
            for key in one:
                assert same(one[key][row], other[key][row]), key
    assert hit
    assert early, "before the sample from which on it is masked"
    masked_rows = sum(int((b["label_ids"] == -100).all(dim=1).sum()) for b in masked)
    assert masked_rows == hit


def test_rows_that_a_map_makes_are_masked_too(runs):
    def masked(graph):
        graph = Exclude(tokens={"prose": [(100, 150)]})(graph.batch_samples(4).collate_causal_lm())
        return [(batch["label_ids"] == -100).all(dim=1).tolist() for batch in graph.iterate(0, 40)]

    assert masked(runs.blend().map(np.copy, seeded=False)) == masked(runs.blend())
    assert any(map(any, masked(runs.blend())))


def test_documents_are_excluded_by_number(tmp_path):
    path = tmp_path / "w.tokens"
    with TokenFileWriter(path, dtype="uint16") as writer:
        for first, stop in ((0, 30), (30, 37), (37, 120)):
            writer.write(np.arange(first, stop))
    graph = TokenReader(path, name="w").slice_sequences(8).batch_samples(1).collate_causal_lm()
    assert all_same(
        Exclude(documents={"w": [1]})(graph).iterate(0, 14), Exclude(tokens={"w": [(30, 37)]})(graph).iterate(0, 14)
    )
    masked = [bool((b["label_ids"] == -100).all()) for b in Exclude(documents={"w": [1]})(graph).iterate(0, 14)]
    assert masked == [k in (3, 4) for k in range(14)]
    with pytest.raises((OutOfRangeError, ConfigurationError), match="3"):
        Exclude(documents={"w": [3]})(graph)


def test_exclusions_add_up_in_one_node_and_keep_the_fingerprint(runs):
    graph = runs.training
    one = Exclude(tokens={"prose": [(0, 90)]})(graph)
    both = Exclude(tokens={"code": [(0, 9)]}, from_sample=4)(one)
    assert names(one) == names(both)
    assert names(one).count("exclude") == 1
    assert both.fingerprint() == graph.fingerprint()
    assert len(next(node for node in nodes(both) if hasattr(node, "exclusions")).exclusions) == 2


def test_what_cannot_be_excluded_is_named(runs):
    for graph in (stream(), Stamped(3), SequenceWrapper([1])):
        with pytest.raises(GraphError, match=rf"{type(graph).__name__} is a stream|{type(graph).__name__}"):
            Exclude(tokens={"prose": [(0, 1)]})(graph)
    with pytest.raises(GraphError, match=r"^zip reads batches"):
        Exclude(tokens={"prose": [(0, 1)]})(runs.training.zip(runs.training))
    with pytest.raises(ConfigurationError, match="nothere"):
        Exclude(tokens={"nothere": [(0, 1)]})(runs.training)
    with pytest.raises(OutOfRangeError, match="prose"):
        Exclude(tokens={"prose": [(990, 1001)]})(runs.training)
    for wrong in ({}, {"tokens": {}}, {"tokens": {"prose": [(0, 1)]}, "from_sample": -1}):
        with pytest.raises(ConfigurationError):
            Exclude(**wrong)
    with pytest.raises(ArgumentTypeError):
        Exclude(documents=["prose"])


# CacheTimeout -------------------------------------------------------------------------------------------------


class Waits(IterDataPipe):
    def __init__(self, below):
        self.below, self.seconds = below, 300

    def set_timeout(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        for _ in self.below:
            yield self.seconds


def test_caches_wait_as_long_as_they_are_told_on_a_copy():
    graph = Waits(IterableWrapper([1])).zip(Waits(IterableWrapper([1, 2])))
    assert [*CacheTimeout(7)(graph)] == [(7, 7)]
    assert [*graph] == [(300, 300)]
    assert batches(forked(Waits(IterableWrapper(range(4))), CacheTimeout(7), workers=1)) == [7] * 4
    with pytest.raises(ValueError, match="needs its timeout"):
        CacheTimeout(None)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            CacheTimeout(wrong)
    assert CacheTimeout(3)(other := stream()) is other


# Tap and Trace ------------------------------------------------------------------------------------------------


def test_a_tap_sees_each_item_of_its_edge_once_and_leaves_it():
    seen = []
    graph = IterableWrapper(range(5)).map(plus).filter(even)
    assert [*Tap(seen.append, nodes="map")(graph)] == [2, 4]
    assert seen == [1, 2, 3, 4, 5]
    seen.clear()
    assert [*Tap(seen.append)(graph)] == seen == [2, 4]
    seen.clear()
    twice = Tap(seen.append, nodes=[TorchMapper])(Tap(seen.append, nodes=graph.datapipe)(graph))
    assert [*twice] == [2, 4]
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    seen.clear()
    mapped = Tap(seen.append)(SequenceWrapper([5, 6]).map(plus))
    assert (mapped[1], seen) == (7, [7])


class OwnItems(Counted):
    """A user's own node that makes items in both ways, the one by the other."""

    def iterate(self, start=0, stop=None):
        for number in range(start, self.end if stop is None else min(stop, self.end)):
            yield self.fetch([number])[0]


class OwnBoth(Counted):
    def iterate(self, start=0, stop=None):
        return iter([*range(start, self.end if stop is None else stop)])

    def fetch(self, numbers, columns=None):
        return [item for n in self.checked(numbers) for item in self.iterate(n, n + 1)]


@pytest.mark.parametrize("node", ["tokens", "last", "order", "own", "own last", "own both ways"])
def test_a_tap_on_an_indexed_graph_sees_each_item_once(node, runs):
    seen = []
    graph, chosen = {
        "tokens": (runs.finite(12), "batch_samples"),
        "last": (runs.finite(12), None),
        "order": (runs.blend().limit(samples=9), None),
        "own": (Counted("a", 9).permute(seed=1).map(plus), Counted),
        "own last": (OwnItems("a", 9), None),
        "own both ways": (OwnBoth("a", 9).batch_samples(3), Counted),
    }[node]
    tapped = Tap(seen.append, nodes=chosen)(graph)
    got, wanted = listed(tapped), listed(graph)
    assert all_same(got, wanted)
    assert len(seen) == (9 if node == "own both ways" else len(wanted))
    if node in ("last", "order", "own last"):
        assert all_same(seen, wanted)
    assert batches(forked(runs.finite(12), Tap(identity)))


def test_where_only_numbers_flow_no_item_can_be_tapped_and_the_next_node_is_named(runs):
    for adapter in (Tap(print, nodes="permute"), Trace(nodes="permute")):
        with pytest.raises(
            GraphError, match=r"blend\.0\.permute only re-orders numbers.*items are first made by batch_samples"
        ):
            adapter(runs.training)
    with pytest.raises(GraphError, match=r"no node 'nosuch' in this graph; its nodes are collate_causal_lm"):
        Tap(print, nodes="nosuch")(runs.training)
    for wrong in (None, 3):
        with pytest.raises(ArgumentTypeError):
            Tap(wrong)
    with pytest.raises(ArgumentTypeError):
        Tap(print, nodes=3)


def write_down(item):
    with open(os.environ["TOKENPIPE_TEST_TAP"], "a") as file:  # noqa: PTH123
        file.write(f"{item}\n")


def test_a_tap_runs_in_the_workers(tmp_path, monkeypatch):
    path = tmp_path / "seen"
    monkeypatch.setenv("TOKENPIPE_TEST_TAP", str(path))
    assert sorted(batches(forked(stream(9), Tap(write_down, nodes="sharding_filter")))) == [*range(1, 10)]
    assert sorted(map(int, path.read_text().split())) == [*range(1, 10)]


def test_what_a_tap_raises_ends_the_iteration():
    with DataLoader2(stream(), Tap(lambda item: 1 // (item - 3))) as loader, pytest.raises(ZeroDivisionError):
        list(loader)


def test_a_trace_says_what_flows_over_the_edges(runs, capsys):
    lines = []
    assert len(listed(Trace(items=2, to=lines.append)(runs.finite(12)))) == 3
    assert [line.split(":")[0] for line in lines] == [
        "batch_samples 0",
        "collate_causal_lm 0",
        "batch_samples 1",
        "collate_causal_lm 1",
    ]
    assert "input_ids: int64 (4, 8)" in lines[1]
    lines.clear()
    graph = IterableWrapper([np.zeros((2, 3), np.float32), "text"]).map(identity)
    assert len([*Trace(to=lines.append)(graph)]) == 2
    assert lines == [
        "iterablewrapper 0: float32 (2, 3)",
        "map 0: float32 (2, 3)",
        "iterablewrapper 1: 'text'",
        "map 1: 'text'",
    ]
    assert [*Trace(nodes="iterablewrapper", items=1)(IterableWrapper([7, 8]).map(plus))] == [8, 9]
    assert capsys.readouterr().err == "iterablewrapper 0: 7\n"


@pytest.mark.filterwarnings("ignore:a resume of this stream goes through")
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_tap_on_a_running_loader_sees_what_passes_meanwhile(kind, runs):
    seen = []
    graph = Stamped(30).map(plus) if kind == "stream" else runs.finite(120)
    wanted = batches(DataLoader2(graph))
    with DataLoader2(graph) as loader:
        running = iter(loader)
        got = [next(running) for _ in range(5)]
        with applied(Tap(seen.append), loader):
            got += [next(running) for _ in range(4)]
        got += [*running]
    assert all_same(got, wanted)
    assert all_same(seen, wanted[5:9])
