"""Places among ranks: from meshes and torchrun's environment, and the parts of a row that context parallelism gives."""

import itertools
import warnings

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tokenpipe.datapipes import Topology
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, TopologyError

AXES = ("dp", "tp", "pp", "cp")


@pytest.fixture
def processes():
    """processes(rank, world): this process as that one of so many, which talk to nobody."""

    def become(rank, world=8):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh(**sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def place(topology):
    """{axis: (rank, size)} of the axes of more than one rank."""
    both = {axis: (getattr(topology, f"{axis}_rank"), getattr(topology, f"{axis}_size")) for axis in AXES}
    return {axis: found for axis, found in both.items() if found[1] > 1}


# From a mesh ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp": 2, "pp": 2, "tp": 2}, {"dp": (1, 2), "pp": (0, 2), "tp": (1, 2)}),
        ({"pp": 2, "batch": 2, "cp": 1, "tp": 2}, {"pp": (1, 2), "dp": (0, 2), "tp": (1, 2)}),
        ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}, {"dp": (2, 4), "tp": (1, 2)}),
        ({"dp_shard": 2, "dp_replicate": 4}, {"dp": (3, 8)}),
        ({"dp_shard": 4, "cp": 2}, {"dp": (2, 4), "cp": (1, 2)}),
        ({"fsdp": 4, "tp": 2}, {"dp": (2, 4), "tp": (1, 2)}),
        ({"dp": 8}, {"dp": (5, 8)}),
        ({"batch": 4, "dp": 1, "fsdp": 1, "ep": 1, "tp": 2}, {"dp": (2, 4), "tp": (1, 2)}),
    ],
)
def test_a_mesh_with_the_names_of_torchtitan_and_megatron_is_a_topology(processes, sizes, expected):
    processes(5)
    assert place(Topology.from_mesh(mesh(**sizes))) == expected


@pytest.mark.skipif(not hasattr(DeviceMesh, "_unflatten"), reason="this torch cannot split a dimension of a mesh")
def test_the_meshes_that_torchtitan_splits_off_its_world_mesh_are_topologies(processes):
    processes(5)
    world = mesh(world=8)
    loading = world._unflatten(0, (2, 2, 1, 2), ("pp", "batch", "cp", "tp"))
    dense = world._unflatten(0, (2, 1, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    assert Topology.from_mesh(loading) == Topology.from_mesh(dense) == Topology(0, 2, 1, 2, 1, 2)


def test_batch_comes_before_the_other_names_of_data_parallelism(processes):
    processes(5)
    with pytest.raises(TopologyError, match="dimension 'dp_shard' of the mesh"):
        Topology.from_mesh(mesh(batch=2, dp_shard=4))
    assert place(Topology.from_mesh(mesh(batch=2, dp_shard=4), tp="dp_shard")) == {"dp": (1, 2), "tp": (1, 4)}


def test_dimensions_of_other_names_are_given_and_several_are_flattened_in_that_order(processes):
    processes(5)  # replicas 1, experts 0, model 1
    dims = mesh(replicas=2, experts=2, model=2)
    assert place(Topology.from_mesh(dims, dp=("replicas", "experts"), tp="model")) == {"dp": (2, 4), "tp": (1, 2)}
    assert place(Topology.from_mesh(dims, dp=["experts", "replicas"], cp="model")) == {"dp": (1, 4), "cp": (1, 2)}
    assert place(Topology.from_mesh(dims, tp=("experts", "model"), pp="replicas")) == {"tp": (1, 4), "pp": (1, 2)}


def test_each_rank_of_a_mesh_has_a_place_of_its_own_and_its_peers_share_the_samples(processes):
    found = {}
    for rank in range(8):
        processes(rank)
        found[rank] = Topology.from_mesh(mesh(pp=2, dp=2, tp=2))
    assert len({*found.values()}) == 8
    assert [found[rank].dp_rank for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_dimension_that_belongs_to_no_axis_is_named_with_what_would_do(processes):
    processes(0)
    with pytest.raises(TopologyError) as caught:
        Topology.from_mesh(mesh(dp=2, ep=2, tp=2))
    for part in ("'ep'", "dp 2, ep 2, tp 2", "dp=('dp', 'ep')", "tp=('tp', 'ep')"):
        assert part in str(caught.value)


def test_meshes_that_do_not_say_where_every_process_is_are_refused(processes):
    processes(5)
    whole = mesh(pp=2, dp=2, tp=2)
    with pytest.raises(TopologyError, match=r"\(dp 2, tp 2\) holds 4 of 8 processes"):
        Topology.from_mesh(whole["dp", "tp"])
    with pytest.raises(TopologyError, match=r"this process is not in the mesh \(dp 4\)"):
        Topology.from_mesh(DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)))
    with pytest.raises(TopologyError, match=r"shape \(8,\) has no names .* mesh_dim_names="):
        Topology.from_mesh(init_device_mesh("cpu", (8,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = whole["pp", "dp", "tp"]._flatten("world")
    with pytest.raises(TopologyError, match="dimension 'world' of the mesh"):
        Topology.from_mesh(flat)
    with pytest.raises(TopologyError, match="pp='stage': the mesh has no dimension 'stage', but pp, dp, tp"):
        Topology.from_mesh(whole, pp="stage")
    with pytest.raises(TopologyError, match=r"dimension 'tp' of the mesh .* is given twice"):
        Topology.from_mesh(whole, dp=("dp", "tp"))
    with pytest.raises(ArgumentTypeError, match="takes a torch DeviceMesh, got tuple"):
        Topology.from_mesh((2, 4))


# From the environment ------------------------------------------------------------------------------------


def test_the_environment_and_a_mesh_of_the_same_order_give_the_same_places(processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    for rank in range(16):
        monkeypatch.setenv("RANK", str(rank))
        processes(rank, 16)
        dims = mesh(pp=2, dp=2, cp=2, tp=2)
        assert Topology.from_environment(tp=2, pp=2, cp=2) == Topology.from_mesh(dims)
        other = mesh(dp=4, tp=1, cp=2, pp=2)
        assert Topology.from_environment(pp=2, cp=2, order=("dp", "tp", "cp", "pp")) == Topology.from_mesh(other)


def test_sizes_that_do_not_divide_the_processes_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "10")
    with pytest.raises(TopologyError, match=r"tp 2 · pp 2 · cp 1 = 4 does not divide WORLD_SIZE 10; 8 or 12 processes"):
        Topology.from_environment(tp=2, pp=2)
    with pytest.raises(TopologyError, match="order must name pp, dp, cp and tp"):
        Topology.from_environment(order=("dp", "tp"))
    with pytest.raises(ConfigurationError, match="tp must be at least 1"):
        Topology.from_environment(tp=0)
    monkeypatch.setenv("RANK", "10")
    with pytest.raises(TopologyError, match="RANK is 10, WORLD_SIZE 10; a rank of 0 … 9"):
        Topology.from_environment()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(TopologyError, match="RANK is 'first'"):
        Topology.from_environment()
    monkeypatch.delenv("RANK")
    with pytest.raises(TopologyError, match="RANK is not set: torchrun sets it"):
        Topology.from_environment()


# Parts of a row ------------------------------------------------------------------------------------------


def parts(length, size, how):
    return [Topology(cp_rank=rank, cp_size=size).cp_ranges(length, how) for rank in range(size)]


def test_a_zigzag_is_megatrons():
    assert parts(16, 2, "zigzag") == [[(0, 4), (12, 16)], [(4, 12)]]
    assert parts(16, 4, "zigzag") == [[(0, 2), (14, 16)], [(2, 4), (12, 14)], [(4, 6), (10, 12)], [(6, 10)]]


def test_contiguous_parts_are_nanotrons():
    assert parts(16, 2, "contiguous") == [[(0, 8)], [(8, 16)]]
    assert parts(10, 4, "contiguous") == [[(0, 2)], [(2, 5)], [(5, 7)], [(7, 10)]]


def test_where_rows_are_not_cut_every_rank_has_all_of_them():
    assert parts(16, 2, "whole") == [[(0, 16)]] * 2
    assert [Topology().cp_ranges(15, how) for how in ("zigzag", "contiguous", "whole")] == [[(0, 15)]] * 3


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(["zigzag", "contiguous"]))
def test_the_ranks_parts_are_the_row_and_no_token_is_held_twice(size, times, how):
    length = 2 * size * times
    found = parts(length, size, how)
    tokens = [token for ranges in found for start, stop in ranges for token in range(start, stop)]
    assert sorted(tokens) == [*range(length)]
    assert {sum(stop - start for start, stop in ranges) for ranges in found} == {length // size}
    for ranges in found:
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))


@given(st.integers(1, 9), st.integers(1, 40))
def test_under_a_causal_mask_a_zigzag_gives_every_rank_the_same_work(size, times):
    pairs = [
        sum(token + 1 for start, stop in ranges for token in range(start, stop))
        for ranges in parts(2 * size * times, size, "zigzag")
    ]
    assert len({*pairs}) == 1


def test_a_length_that_does_not_share_out_is_refused_with_the_nearest_that_do():
    four = Topology(cp_size=4)
    with pytest.raises(TopologyError, match=r"length 30 is no multiple of 8: with cp_size 4 .*; 24 or 32 would"):
        four.cp_ranges(30)
    with pytest.raises(TopologyError, match="; 8 would do"):
        four.cp_ranges(6)
    with pytest.raises(TopologyError, match="length 3 leaves some of 4 context-parallel ranks without a token"):
        four.cp_ranges(3, "contiguous")
    with pytest.raises(ConfigurationError, match="cp must be one of zigzag, contiguous, whole, got 'ring'"):
        four.cp_ranges(16, "ring")
