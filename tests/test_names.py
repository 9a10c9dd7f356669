"""Names of nodes: unique, the same in every process, and moved by nothing that changes elsewhere."""

import pickle

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper, Zipper
from torch.utils.data.datapipes.map import SequenceWrapper

from nodes import Numbers
from tokenpipe.datapipes import IndexedDataPipe
from tokenpipe.datapipes._torch import DataPipe, IterDataPipe, traverse_dps
from tokenpipe.datapipes.names import inputs_of, node_names


def same(item):
    return item


def even(item):
    return item % 2


def source(name: str, seed: int = 7) -> IndexedDataPipe:
    return Numbers(name, 100).permute(seed=seed)


def names(graph: DataPipe) -> list[str]:
    return list(node_names(graph).values())


def by_kind(graph: DataPipe) -> dict[int, type]:
    return {key: type(node) for key, node in walk(graph).items()}


def walk(graph: DataPipe) -> dict[int, DataPipe]:
    """Every node as torch finds it, by pickling."""
    found: dict[int, DataPipe] = {}
    waiting = [traverse_dps(graph)]
    while waiting:
        for key, (node, below) in waiting.pop().items():
            found[key] = node
            waiting.append(below)
    return found


def test_a_chain_has_functional_names_and_counts_repeats():
    graph = source("a").map(same).map(same).batch_samples(4).map(same)
    assert names(graph) == ["map", "batch_samples", "map#2", "map#3", "permute", "numbers"]


def test_below_a_node_with_several_inputs_names_say_which_input():
    inner = source("b").blend(source("c"), name="inner")
    graph = source("a").blend(inner, weights=[1, 1]).map(same)
    assert names(graph) == [
        "map",
        "blend",
        "blend.0.permute",
        "blend.0.numbers",
        "blend.1.blend",
        "blend.1.blend.0.permute",
        "blend.1.blend.0.numbers",
        "blend.1.blend.1.permute",
        "blend.1.blend.1.numbers",
    ]


def test_a_change_of_one_source_leaves_the_names_of_the_others():
    a, b = source("a"), source("b")
    before, after = a.blend(b, weights=[1, 1]), a.skip(3).map(same).blend(b, weights=[1, 1]).map(same).map(same)
    for node in (b, b.datapipe):
        assert node_names(before)[id(node)] == node_names(after)[id(node)]
    assert node_names(before)[id(b)] == "blend.1.permute"


def test_a_shared_node_has_the_name_of_the_first_way_to_it():
    shared = Numbers("shared", 10)
    graph = shared.map(same).zip(shared.permute(seed=1), shared)
    assert names(graph) == ["zip", "zip.0.map", "zip.0.numbers", "zip.1.permute"]
    stream = IterableWrapper(range(4))
    assert names(Zipper(stream.map(same), stream)) == ["zip", "zip.0.map", "zip.0.iterablewrapper"]


def test_a_stream_has_torchs_functional_names():
    left, right = IterableWrapper(range(9)).shuffle().sharding_filter().demux(2, even)
    graph = left.map(same).zip(right.map(same).filter(even)).batch(2)
    assert names(graph) == [
        "batch",
        "zip",
        "zip.0.map",
        "zip.0.child",
        "zip.0.demultiplexer",
        "zip.0.sharding_filter",
        "zip.0.shuffle",
        "zip.0.iterablewrapper",
        "zip.1.filter",
        "zip.1.map",
        "zip.1.child",
    ]
    assert names(SequenceWrapper([1, 2]).map(same).batch(2)) == ["batch", "map", "sequencewrapper"]


class Holder(IterDataPipe):
    def __init__(self, **attributes) -> None:
        self.__dict__.update(attributes)

    def __iter__(self):
        return iter(())


def test_inputs_are_found_within_collections_once_each_and_data_is_not_searched():
    a, b, c, d = (IterableWrapper(range(k)) for k in range(4))
    node = Holder(number=3, first=[a], again=a, named={"b": {"deep": (b,)}}, many=[*range(20_000), d], last=c)
    assert [id(child) for child in inputs_of(node)] == [id(a), id(b), id(c)]
    assert names(node) == ["holder", "holder.0.iterablewrapper", "holder.1.iterablewrapper", "holder.2.iterablewrapper"]


def test_a_subclass_goes_by_its_own_class_and_a_node_of_ours_by_its_functional_name():
    class Mine(type(IterableWrapper([]).map(same))):
        pass

    class Named(Holder):
        functional_name = "named_holder"

    class Odd(Numbers):
        pass

    graph = Named(a=Mine(IterableWrapper([]), same), b=Odd("odd", 3))
    assert names(graph) == [
        "named_holder",
        "named_holder.0.mine",
        "named_holder.0.iterablewrapper",
        "named_holder.1.numbers",
    ]


def graphs() -> "dict[str, DataPipe]":
    first, second = IterableWrapper([*range(9)]).shuffle().fork(2)
    return {
        "indexed": source("a").blend(source("b"), weights=[1, 1]).map(same).zip(source("c")),
        "forked": first.map(same).zip(second.filter(even).sharding_filter()).batch(2),
        "concat": IterableWrapper([1]).concat(IterableWrapper([2]), IterableWrapper([3]).map(same)).batch(2),
        "map-style": SequenceWrapper([1, 2]).map(same).zip(SequenceWrapper([3, 4])),
        "a stream over an indexed graph": IterableWrapper(source("a")).map(same),
    }


@pytest.mark.parametrize("kind", graphs())
def test_all_nodes_that_torch_finds_have_a_name_of_their_own_that_travels(kind):
    graph = graphs()[kind]
    assert node_names(graph).keys() == walk(graph).keys()
    assert len(set(names(graph))) == len(walk(graph))
    copy = pickle.loads(pickle.dumps(graph))
    assert names(copy) == names(graph)
    found = node_names(graph), node_names(copy)
    kinds = [{name: by_kind(g)[key] for key, name in n.items()} for n, g in zip(found, (graph, copy), strict=True)]
    assert kinds[0] == kinds[1]


def test_a_graph_that_cannot_be_pickled_is_named_all_the_same():
    graph = Holder(fns=[lambda x: x], below=IterableWrapper(x for x in range(3)))
    assert names(graph) == ["holder", "iterablewrapper"]


def test_many_diamonds_above_each_other_are_named_at_once():
    node = IterableWrapper([1])
    for _ in range(60):
        node = Zipper(node.map(same), node.map(same))
    assert len(set(names(node))) == 1 + 3 * 60


def test_a_very_long_chain_has_names():
    node = IterableWrapper([1])
    for _ in range(5_000):
        node = node.map(same)
    assert names(node)[-2:] == ["map#5000", "iterablewrapper"]
