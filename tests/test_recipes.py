"""A graph is written down and built again as it was; what is not a recipe is refused with its place."""

import numpy as np
import pytest
from test_contract import nodes, sources  # noqa: F401  # a fixture

from contract import all_same
from tokenpipe.datapipes import Topology, load_recipe
from tokenpipe.datapipes.errors import RecipeError


def all_nodes(graph):
    return [graph, *(node for child in graph.children for node in all_nodes(child))]


def assert_same_graph(found, expected, items=20):
    assert found.fingerprint() == expected.fingerprint()
    assert found.tree() == expected.tree()
    for a, b in zip(all_nodes(found), all_nodes(expected), strict=True):
        assert type(a) is type(b)
        assert a.settings == b.settings
    n = min(len(expected), items)
    assert all_same(found.fetch(np.arange(n)), expected.fetch(np.arange(n)))


def topology_of(graph):
    return next((node.topology for node in all_nodes(graph) if node.topology is not None), None)


def test_every_node_writes_a_recipe_that_builds_it_again(sources, tmp_path, subtests):  # noqa: F811
    for name, graph in nodes(*sources, tmp_path).items():
        with subtests.test(name):
            if "Mapper" in name:
                with pytest.raises(RecipeError, match="a function"):
                    graph.recipe()
                continue
            text = graph.recipe()
            again = load_recipe(text, topology_of(graph))
            assert_same_graph(again, graph)
            assert again.recipe() == text
            assert len({id(node) for node in all_nodes(again)}) == len({id(node) for node in all_nodes(graph)})


def test_a_recipe_lies_beside_its_files_and_moves_with_them(sources, tmp_path):  # noqa: F811
    graph = nodes(*sources, tmp_path)["SampleBatcher"]
    text, fingerprint = graph.recipe(folder=tmp_path), graph.fingerprint()
    assert str(tmp_path) not in text
    moved = tmp_path.rename(tmp_path.parent / "moved")
    (moved / "run.yaml").write_text(text)
    assert load_recipe(moved / "run.yaml", Topology(1, 2)).fingerprint() == fingerprint
    moved.rename(tmp_path)
