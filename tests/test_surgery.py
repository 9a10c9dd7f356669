"""Cutting graphs: torchdata's names, every reference rewired, the caller's graph as it was; laws on random graphs."""

import copy
import dataclasses
from pathlib import Path

import pytest
from graphs import Counted, Several, items, looks, nodes, shape
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper, ShardingFilter
from torch.utils.data.datapipes.iter import Mapper as TorchMapper
from torch.utils.data.datapipes.map import SequenceWrapper

from contract import all_same
from faulty import Runs
from nodes import Numbers
from processes import scaled
from tokenpipe.adapters import (
    Profile,
    Tap,
    Timeout,
    draw,
    find_dps,
    insert_after,
    insert_before,
    lint,
    list_dps,
    map_graph,
    remove_dp,
    replace_dp,
    traverse_dps,
)
from tokenpipe.datapipes import IndexedDataPipe, Mapper, Permuter, Topology
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError, GraphError, NodeTimeoutError
from tokenpipe.datapipes.names import inputs_of, node_names
from tokenpipe.reading_services import DataLoader2

LAWS = settings(max_examples=scaled(400, 40))


def same(item):
    return item


def plus(item):
    return item + 1


def even(item):
    return item % 2 == 0


# Random graphs ------------------------------------------------------------------------------------------------


@st.composite
def streams(draw):
    """Streams of torch's nodes and of a user's own, with shared and repeated nodes, forks and demuxes."""
    known = [(IterableWrapper(range(draw(st.integers(0, 3)))), 3)]

    def one():
        return draw(st.sampled_from(known[-4:]))

    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["source", "map", "filter", "concat", "several", "fork", "demux", "batch"]))
        a, n = one()
        if kind == "source":
            known.append((IterableWrapper([*range(draw(st.integers(1, 3)))]), 3))
        elif kind == "map":
            known.append((a.map(plus), n))
        elif kind == "filter":
            known.append((a.filter(even), n))
        elif kind == "batch":
            known.append((a.batch(2).unbatch(), n))
        elif n > 200:
            continue
        elif kind == "concat":
            b, m = one()
            known.append((a.concat(b, a), 2 * n + m))
        elif kind == "several":
            (b, m), (c, k) = one(), one()
            known.append((Several(a, {"b": [b, (a,)], "c": (c,)}, [b]), 2 * n + 2 * m + k))
        elif kind == "fork":
            left, right = a.fork(2)
            known.append((left.map(plus).concat(right), 2 * n))
        else:
            left, right = a.demux(2, even)
            known.append((left.concat(right.map(plus)), n))
    return known[-1][0]


@st.composite
def indexed(draw):
    """Indexed graphs of our nodes over a user's own source, with shared and repeated nodes."""
    known = [Counted("a", draw(st.integers(1, 6)))]
    for i in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["source", "map", "permute", "concat", "zip", "blend", "skip"]))
        a, b = (draw(st.sampled_from(known[-4:])) for _ in range(2))
        if a.end > 500 or b.end > 500:
            break
        if kind == "source":
            known.append(Counted(f"source {i}", draw(st.integers(1, 6)), 3))
        elif kind == "map":
            known.append(a.map(same))
        elif kind == "permute":
            known.append(a.permute(seed=i))
        elif kind == "concat":
            known.append(a.concat(b, a, name=f"concat {i}"))
        elif kind == "zip":
            known.append(a.zip(b, a))
        elif kind == "skip":
            known.append(a.skip(draw(st.integers(0, a.end - 1))))
        elif a.name != b.name and a.name and b.name:
            known.append(a.blend(b, weights=[1, 1], max_epochs=1, name=f"blend {i}"))
    return known[-1]


graphs = st.one_of(streams(), indexed())


def same_graphs(one, other):
    a, b = looks(one), looks(other)
    return a[1] == b[1] and a[3] == b[3] and all_same(items(one), items(other))


def chosen(data, graph, without=("_ForkerIterDataPipe", "_DemultiplexerIterDataPipe")):
    """A node of the graph: not a fork, from which only its children read."""
    return data.draw(st.sampled_from([n for n in nodes(graph) if type(n).__name__ not in without]), label="node")


def copy_of(node):
    """Another node over the same inputs."""
    memo = {id(child): child for child in inputs_of(node)}
    return node.changed() if isinstance(node, IndexedDataPipe) else copy.deepcopy(node, memo)


def over(node):
    """The identity over a node, for a node of any kind."""
    return node.map(same)


# Laws ---------------------------------------------------------------------------------------------------------


@LAWS
@given(graph=graphs, data=st.data())
def test_what_is_inserted_and_removed_again_leaves_the_same_graph(graph, data):
    node = chosen(data, graph)
    before = looks(graph)
    made = []
    inserted = insert_after(graph, node, lambda n: made.append(over(n)) or made[-1])
    assert len(nodes(inserted)) == len(nodes(graph)) + 1
    assert all_same(items(copy.deepcopy(inserted)), items(copy.deepcopy(graph)))
    removed = remove_dp(inserted, made[0])
    assert looks(graph) == before
    assert same_graphs(removed, graph)


@LAWS
@given(graph=graphs, data=st.data())
def test_what_is_inserted_before_a_node_stands_in_front_of_each_of_its_inputs_once(graph, data):
    node = chosen(data, graph, without="_ChildDataPipe")
    before, made = looks(graph), []
    inputs = {id(child): child for child in inputs_of(node)}
    if not inputs:
        with pytest.raises(GraphError, match=node_names(graph)[id(node)]):
            insert_before(graph, node, over)
        return
    inserted = insert_before(graph, node, lambda n: made.append(over(n)) or made[-1])
    assert len(made) == len(inputs)
    assert len(nodes(inserted)) == len(nodes(graph)) + len(made)
    for one in made:
        inserted = remove_dp(inserted, one)
    assert looks(graph) == before
    assert same_graphs(inserted, graph)


@LAWS
@given(graph=graphs, data=st.data())
def test_a_node_replaced_by_itself_and_a_map_of_none_are_the_graph_itself(graph, data):
    node = chosen(data, graph)
    before = looks(graph)
    assert replace_dp(graph, node, node) is graph
    assert map_graph(graph, lambda n: None) is graph
    assert map_graph(graph, same) is graph
    assert looks(graph) == before


@LAWS
@given(graph=graphs, data=st.data())
def test_several_cuts_are_named_by_nodes_of_the_first_graph_in_any_order(graph, data):
    one, other = chosen(data, graph), chosen(data, graph)
    before = looks(graph)
    first = insert_after(insert_after(graph, one, over), other, over)
    second = insert_after(insert_after(graph, other, over), one, over)
    assert looks(graph) == before
    assert shape(first) == shape(second)
    wanted = items(copy.deepcopy(graph))
    assert all_same(items(copy.deepcopy(first)), wanted)
    assert all_same(items(copy.deepcopy(second)), wanted)


@LAWS
@given(graph=graphs, data=st.data())
def test_a_node_that_is_replaced_is_gone_from_every_place(graph, data):
    node = chosen(data, graph)
    before = looks(graph)
    new = copy_of(node)
    cut = replace_dp(graph, node, new)
    assert node not in nodes(cut)
    assert new in nodes(cut)
    assert looks(graph) == before
    assert same_graphs(cut, graph)


@LAWS
@given(graph=graphs)
def test_a_map_of_copies_shares_no_node_and_sees_each_once_sources_first(graph):
    before, seen = looks(graph), []

    def copied(node):
        assert all(any(child is made for made in seen) for child in inputs_of(node))
        seen.append(copy_of(node))
        return seen[-1]

    cut = map_graph(graph, copied)
    assert len(seen) == len(nodes(graph))
    assert not {*map(id, nodes(cut))} & {*map(id, nodes(graph))}
    assert looks(graph) == before
    assert same_graphs(cut, graph)


@LAWS
@given(graph=graphs, data=st.data())
def test_the_nested_dicts_of_torch_are_cut_as_the_node_is(graph, data):
    node = chosen(data, graph)
    nested = traverse_dps(graph)
    assert [*nested] == [id(graph)]
    cut = insert_after(nested, node, over)
    (key, (root, _)) = next(iter(cut.items()))
    assert key == id(root)
    assert shape(root) == shape(insert_after(graph, node, over))
    assert {*map(id, list_dps(cut))} == {*map(id, nodes(root))}
    assert {*map(id, list_dps(nested))} == {*map(id, nodes(graph))}
    below = {*map(id, nodes(node))}
    assert {*map(id, list_dps(nested, exclude_dps=node))} == {*map(id, nodes(graph))} - below
    assert [*map(id, list_dps(graph))] == [*map(id, list_dps(nested))], "the last node will do too"


# torchdata's words --------------------------------------------------------------------------------------------


def test_nodes_are_listed_breadth_first_without_those_that_are_left_out():
    shared = IterableWrapper(range(4))
    left, right = shared.map(same), shared.filter(even).batch(2)
    graph = left.zip(right)
    nested = traverse_dps(graph)
    assert list_dps(nested) == [graph, left, right, shared, right.datapipe]
    assert list_dps(nested, exclude_dps=right) == [graph, left]
    assert list_dps(nested, exclude_dps=[left, right]) == [graph]
    assert list_dps(nested, exclude_dps=IterableWrapper([])) == list_dps(nested)
    assert list_dps(nested, exclude_dps=[]) == list_dps(nested)


def test_only_the_very_type_is_found_wrapped_or_not():
    class Mine(TorchMapper):
        pass

    base = IterableWrapper(range(3)).map(same)
    graph = Mine(base, same).map(plus)
    assert find_dps(traverse_dps(graph), TorchMapper) == [graph, base]
    assert find_dps(traverse_dps(graph), ShardingFilter) == []
    assert find_dps(graph, IterableWrapper) == [base.datapipe]
    timed = Timeout(9, nodes="map")(graph)
    assert len(find_dps(traverse_dps(timed), TorchMapper)) == 2


def test_every_reference_to_a_replaced_node_is_rewired():
    """torchdata 0.9 stopped after the first."""
    old = IterableWrapper([1])
    graph = Several(old, {"a": [old, (old,)]}, [old, old])
    cut = replace_dp(graph, old, IterableWrapper([2]))
    assert [*cut] == [2] * 5
    assert [*graph] == [1] * 5
    assert cut.again is cut.first is cut.rest[0] is cut.named["a"][0] is cut.named["a"][1][0]


def test_children_of_a_fork_still_share_it_after_a_cut_below():
    left, right = IterableWrapper(range(4)).map(same).fork(2)
    graph = left.zip(right)
    (below,) = find_dps(traverse_dps(graph), TorchMapper)
    cut = replace_dp(graph, below, below.map(plus))
    assert [*cut] == [(i + 1, i + 1) for i in range(4)]
    assert len(nodes(cut)) == len(nodes(graph)) + 1
    assert [*graph] == [(i, i) for i in range(4)]


def test_a_fork_serves_the_callers_graph_and_one_with_something_around_its_children():
    left, right = IterableWrapper(range(4)).fork(2)
    graph = left.map(same).concat(right)
    for tapped_at in ("child", left, right, [left.main_datapipe]):
        tapped = Tap(same, nodes=tapped_at)(graph)
        for _ in range(2):
            assert [*tapped] == [*graph] == [0, 1, 2, 3] * 2


def test_a_graph_goes_on_being_iterated_after_it_was_cut():
    graph = IterableWrapper(range(6)).map(plus).map(plus)
    running = iter(graph)
    assert [next(running), next(running)] == [2, 3]
    cut = remove_dp(graph, graph.datapipe)
    assert [*running] == [4, 5, 6, 7]
    assert [*cut] == [1, 2, 3, 4, 5, 6]


def test_map_style_graphs_of_torch_are_cut_too():
    source = SequenceWrapper([1, 2, 3])
    graph = source.map(plus).zip(source)
    cut = insert_before(graph, graph, over)
    assert [cut[i] for i in range(3)] == [graph[i] for i in range(3)] == [(2, 1), (3, 2), (4, 3)]
    assert [remove_dp(cut, n) and n for n in nodes(cut) if node_names(cut)[id(n)] == "zip.1.map"]
    assert replace_dp(graph, source, SequenceWrapper([7]))[0] == (8, 7)


def test_a_users_dataclass_is_a_node_like_others():
    @dataclasses.dataclass
    class Repeated(IterDataPipe):
        below: IterDataPipe
        times: int = 2

        def __iter__(self):
            for item in self.below:
                yield from [item] * self.times

    source = IterableWrapper([1, 2])
    graph = Repeated(source).batch(2)
    cut = insert_after(graph, source, lambda n: n.map(plus))
    assert [*cut] == [[2, 2], [3, 3]]
    assert [*insert_after(cut, graph.datapipe, lambda n: n.map(plus))] == [[3, 3], [4, 4]]


# What cannot be cut says so -----------------------------------------------------------------------------------


def test_a_node_that_is_not_in_the_graph_is_refused_with_what_is():
    graph = Numbers("a", 9).permute(seed=1).blend(Numbers("b", 9), weights=[1, 1])
    for cut in (
        lambda node: replace_dp(graph, node, node),
        lambda node: remove_dp(graph, node),
        lambda node: insert_after(graph, node, over),
        lambda node: insert_before(traverse_dps(graph), node, over),
    ):
        with pytest.raises(GraphError, match=r"Numbers is not in this graph, which has blend, blend\.0\.permute"):
            cut(Numbers("a", 9))
    with pytest.raises(GraphError, match="Permuter is not in this graph"):
        remove_dp(remove_dp(graph, graph.children[0]), graph.children[0])


def test_what_has_no_input_or_several_cannot_be_removed_and_is_named():
    graph = Numbers("a", 9).permute(seed=1).blend(Numbers("b", 9), weights=[1, 1]).map(same)
    with pytest.raises(GraphError, match=r"^blend cannot be removed: it has 2 inputs"):
        remove_dp(graph, graph.datapipe)
    with pytest.raises(GraphError, match=r"^blend\.0\.numbers cannot be removed: .* it is a source"):
        remove_dp(graph, graph.datapipe.children[0].datapipe)
    with pytest.raises(GraphError, match=r"nothing can stand before blend\.1\.numbers"):
        insert_before(graph, graph.datapipe.children[1], over)


@pytest.mark.parametrize("made", [None, [1], "map", TorchMapper])
def test_what_is_no_datapipe_takes_no_place_in_a_graph(made):
    for graph in (IterableWrapper([1]).map(same), Counted("a", 3).map(same)):
        for cut in (
            lambda g: insert_after(g, g, lambda n: made),
            lambda g: insert_before(g, g, lambda n: made),
            lambda g: replace_dp(g, g.datapipe, made),
            *([lambda g: map_graph(g, lambda n: made)] if made is not None else []),
        ):
            with pytest.raises(ArgumentTypeError, match="datapipe"):
                cut(graph)


def test_a_stream_takes_no_place_below_an_indexed_node():
    graph = Counted("a", 3).map(same).permute(seed=1)
    with pytest.raises(ArgumentTypeError, match="Permuter"):
        replace_dp(graph, graph.datapipe, IterableWrapper([1]))
    with pytest.raises(ArgumentTypeError, match="Mapper"):
        insert_after(graph, graph.datapipe.datapipe, IterableWrapper)


def test_what_is_no_graph_is_no_graph():
    for wrong in (None, [1], {}, {1: 2, 3: 4}):
        with pytest.raises(ArgumentTypeError, match="a graph is its last node"):
            remove_dp(wrong, IterableWrapper([1]))


def test_a_cut_that_makes_no_sense_to_the_nodes_above_is_refused_and_changes_nothing():
    graph = Counted("a", 8).shard_ranks(Topology(dp_rank=0, dp_size=2)).map(same)
    before = looks(graph)
    with pytest.raises(ValueError, match="dealt to the ranks once"):
        insert_before(graph, graph.datapipe, lambda n: n.shard_ranks(Topology(dp_rank=0, dp_size=2)))
    assert looks(graph) == before


class Opens(IterDataPipe):
    def __init__(self, below):
        self.below, self.handle = below, Path(__file__).open()  # noqa: SIM115

    def __iter__(self):
        return iter(self.below)


def test_a_node_that_cannot_be_copied_is_named_and_stops_only_cuts_below_it():
    source = IterableWrapper([1])
    holder = Opens(source)
    graph = holder.map(plus)
    with holder.handle:
        with pytest.raises(ArgumentTypeError, match=r"Opens cannot be copied .*TypeError"):
            insert_after(graph, source, over)
        assert [*insert_after(graph, holder, over)] == [2]


def test_a_graph_that_reads_from_itself_is_refused():
    graph = IterableWrapper([1]).map(same).map(same)
    graph.datapipe.datapipe = graph
    with pytest.raises(GraphError, match="reads from itself"):
        map_graph(graph, same)


def test_nothing_comes_between_a_fork_and_its_children():
    left, right = IterableWrapper(range(4)).fork(2)
    graph = left.map(same).zip(right)
    fork = left.main_datapipe
    for cut in (
        lambda: insert_after(graph, fork, over),
        lambda: insert_before(graph, right, over),
        lambda: remove_dp(graph, fork),
        lambda: remove_dp(graph, left),
    ):
        with pytest.raises(GraphError, match="nothing stands between a fork or demux and its children"):
            cut()
    assert [*insert_before(graph, fork, lambda n: n.map(plus))] == [(i + 1, i + 1) for i in range(4)]


# Size ---------------------------------------------------------------------------------------------------------


def test_a_long_chain_and_many_diamonds_are_cut_at_the_bottom():
    chain = source = IterableWrapper([1])
    for _ in range(2_000):
        chain = chain.map(plus)
    cut = insert_after(chain, source, over)
    assert len(nodes(cut)) == len(nodes(chain)) + 1
    node = source
    for _ in range(40):
        node = Several(node, {"a": [node]})
    cut = insert_after(node, source, over)
    assert len(nodes(cut)) == len(nodes(node)) + 1
    assert len(nodes(remove_dp(cut, next(n for n in nodes(cut) if isinstance(n, TorchMapper))))) == len(nodes(node))
    deep = Counted("a", 3)
    for _ in range(300):
        deep = deep.zip(deep)
    assert len(nodes(insert_after(deep, [*nodes(deep)][-1], over))) == len(nodes(deep)) + 1


# Names --------------------------------------------------------------------------------------------------------


def stuck(item):
    import time

    time.sleep(3600)


def test_one_name_serves_errors_profiles_timeouts_drawings_and_lints(tmp_path):
    runs = Runs(tmp_path)
    graph = runs.source("prose").map(same).blend(runs.source("code").datapipe, weights=[1, 1]).batch_samples(4)
    names = node_names(graph)
    mapper = next(node for node in nodes(graph) if type(node) is Mapper)
    permute = mapper.datapipe
    assert isinstance(permute, Permuter)
    assert (names[id(mapper)], names[id(permute)]) == ("blend.0.map", "blend.0.permute")
    source = permute.datapipe.datapipe
    with pytest.raises(GraphError, match=r"^blend\.0\.TokenReader cannot be removed") as refused:
        remove_dp(graph, source)
    assert names[id(source)] in str(refused.value)
    with pytest.raises(GraphError, match=r"blend\.0\.permute"):
        Timeout(9, nodes="blend.7.permute")(graph)

    profile = Profile()
    with DataLoader2(graph, profile) as loader:
        for _ in zip(loader, range(20), strict=False):
            pass
    rows = {row.node.partition(":")[0] for row in profile.nodes}
    assert rows <= {*names.values()}
    assert {"blend.0.map", "batch_samples"} <= rows

    slow = replace_dp(graph, mapper, permute.map(stuck))
    with DataLoader2(slow, Timeout(0.3)) as loader, pytest.raises(NodeTimeoutError, match=r"blend\.0\.map"):
        next(iter(loader))
    found = {finding.node for finding in lint(graph)}
    assert [name for name in found if name.startswith("blend.1.")], "the second source is not shuffled"
    assert found <= {*names.values()}
    assert "permute" in draw(graph).mermaid
