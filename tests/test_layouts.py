"""What each rank of a layout is given of a batch, and reads for it: against plain Python, torch's and Megatron's ways.

The oracle is `expected` in shelf.py: it knows of each token id where it comes from.
"""

import ctypes
import gc
import itertools
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import all_same, check_indexed_node, same
from shelf import Shelf, expected, held
from tokenpipe.adapters import (
    Placement,
    Prefetch,
    Profile,
    ResumeSkip,
    Retry,
    SkipErrors,
    Threads,
    Timeout,
    ToDevice,
    draw,
    lint,
)
from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology, batch_certificate, load_recipe, write_recipe
from tokenpipe.datapipes.batch import SampleBatcher
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    TokenFileError,
    TokenIdError,
    TopologyError,
)
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

LAYOUTS = (None, "nanotron", "torchtitan", "megatron", "hf")
CUTS = ("zigzag", "contiguous", "document", "whole")
OWN_CUT = {None: "zigzag", "nanotron": "contiguous", "torchtitan": "whole", "megatron": "zigzag", "hf": "zigzag"}
ASKED = ("position_ids", "document_ids", "cu_seqlens", "label_mask")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Shelf:
    """Documents of 1 to 30 tokens over three files, and one of 200 in the middle."""
    rng = np.random.default_rng(11)
    lengths = [rng.integers(1, 31, 40).tolist() for _ in range(3)]
    lengths[1][20:20] = [200]
    return Shelf(tmp_path_factory.mktemp("shelf"), {"prose": lengths[:2], "code": lengths[2:]})


def order(shelf: Shelf, length: int = 16, **settings: Any) -> Any:
    prose, code = (shelf.reader(name).slice_sequences(length).permute(seed=7) for name in ("prose", "code"))
    return prose.blend(code, weights=[0.7, 0.3])


def batched(order: Any, place: Topology = Topology(), rows: int = 4) -> Any:  # noqa: B008 - it is frozen
    return order.shard_ranks(place, seed=3).batch_samples(rows, global_batch_size=8 * place.dp_size)


def switched_on(asked: "set[str]") -> "dict[str, Any]":
    rules = ["joins"] if "joins" in asked else []
    return {**dict.fromkeys(asked - {"joins"}, True), "no_loss_on": rules}


def ranks_of(place: Topology) -> "list[Topology]":
    """All ranks that see the samples of this one's dp rank; tp varies fastest."""
    sizes = {f"{axis}_size": getattr(place, f"{axis}_size") for axis in ("dp", "tp", "pp", "cp")}
    axes = itertools.product(range(place.pp_size), range(place.cp_size), range(place.tp_size))
    return [Topology(dp_rank=place.dp_rank, pp_rank=p, cp_rank=c, tp_rank=t, **sizes) for p, c, t in axes]


# What a rank is given ---------------------------------------------------------------------------------------


@st.composite
def places(draw) -> "tuple[int, Topology, str]":
    """S, a topology (of dp rank 0 or 1) and a cut that fits S."""
    dp, pp, cp, tp = (
        draw(st.integers(1, most), label=axis) for axis, most in (("dp", 2), ("pp", 3), ("cp", 3), ("tp", 2))
    )
    cut = draw(st.sampled_from(CUTS), label="cut")
    length = 2 * cp * draw(st.integers(1, 5)) if cut in ("zigzag", "document") else draw(st.integers(cp, 24))
    dp_rank = draw(st.integers(0, dp - 1))
    return length, Topology(dp_rank=dp_rank, dp_size=dp, tp_size=tp, pp_size=pp, cp_size=cp), cut


@given(
    where=places(),
    layout=st.sampled_from(LAYOUTS),
    asked=st.sets(st.sampled_from([*ASKED, "joins"])),
    ends=st.sampled_from([(0, -1), (0, 0), (-1, 0), (-1, -1)]),
    int32=st.booleans(),
    numbers=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
@settings(max_examples=100)
def test_each_rank_is_given_what_plain_python_says_and_all_ranks_together_the_whole_rows(
    shelf, where, layout, asked, ends, int32, numbers
):
    length, dealt, cut = where
    batches = batched(order(shelf, length), dealt)
    rows = [batch.tokens for batch in batches.fetch(numbers)]
    dtype, told = ("int32", np.int32) if int32 else ("int64", np.int64)
    arguments = {"layout": layout, "cp": cut, "dtype": dtype, "input_pp_rank": ends[0], "output_pp_rank": ends[1]}
    whole = np.zeros((2, len(rows), *rows[0][:, 1:].shape), bool)  # (inputs and labels, batches, b, S): who holds it
    for place in ranks_of(dealt):
        graph = batches.collate_causal_lm(topology=place, **arguments, **switched_on(asked))
        found = graph.fetch(numbers)
        for batch, tokens in zip(found, rows, strict=True):
            wanted = expected(shelf, tokens, place, layout, cut, asked, ends, told)
            assert same(batch, wanted), (place, batch, wanted)
        if layout is None and place.tp_rank == 0:
            for end, key, begin in ((0, "input_ids", 0), (1, "label_ids", 1)):
                for b, batch in enumerate(found):
                    for r, tokens in enumerate(batch.get(key, torch.empty(0)).tolist()):
                        line = rows[b][r].tolist()
                        at = [line.index(token) - begin for token in tokens if token != -100]
                        assert cut == "whole" or not whole[end, b, r, at].any(), "held twice"
                        whole[end, b, r, at] = True
    if layout is None:
        assert whole[0].all()
        assert "joins" in asked or whole[1].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_cuts_rows_as_its_framework_does_unless_told_otherwise(shelf, layout):
    place = Topology(cp_rank=0, cp_size=2)
    graphs = [
        batched(order(shelf)).collate_causal_lm(topology=place, layout=layout, cp=cp) for cp in (None, OWN_CUT[layout])
    ]
    assert all_same(*(graph.fetch([0, 1]) for graph in graphs))


def test_the_topology_is_the_sharders_unless_it_is_given(shelf):
    place = Topology(dp_rank=1, dp_size=2, pp_size=2, cp_rank=1, cp_size=2, tp_rank=1, tp_size=2)
    by_sharder = batched(order(shelf), place).collate_causal_lm()
    given = batched(order(shelf), Topology(dp_rank=1, dp_size=2)).collate_causal_lm(topology=place)
    assert all_same(by_sharder.fetch(range(5)), given.fetch(range(5)))
    assert by_sharder.fetch([0])[0].keys() == {"input_ids"}


def parts(shelf, length, size, **collation):
    """{key: (ranks, b, s / C)} of one batch."""
    found = [
        batched(order(shelf, length))
        .collate_causal_lm(topology=Topology(cp_rank=r, cp_size=size), **collation)
        .fetch([0])[0]
        for r in range(size)
    ]
    return {key: torch.stack([batch[key] for batch in found]) for key in found[0]}


def test_the_zigzag_of_16_tokens_over_two_ranks_and_the_contiguous_one(shelf):
    row = batched(order(shelf)).fetch([0])[0].tokens[0]
    cut = parts(shelf, 16, 2)
    assert cut["input_ids"][0, 0].tolist() == row[[0, 1, 2, 3, 12, 13, 14, 15]].tolist()
    assert cut["label_ids"][0, 0].tolist() == row[[1, 2, 3, 4, 13, 14, 15, 16]].tolist()
    assert cut["input_ids"][1, 0].tolist() == row[4:12].tolist()
    uneven = [
        batched(order(shelf, 10)).collate_causal_lm(topology=Topology(cp_rank=r, cp_size=4), layout="nanotron")
        for r in range(4)
    ]
    assert [graph.fetch([0])[0]["input_ids"].shape[1] for graph in uneven] == [2, 3, 2, 3]  # ⌊(r+1)·10/4⌋ − ⌊r·10/4⌋


def megatrons(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """(b, S) → (b, S / C) as Megatron's trainers slice a batch: view as 2C chunks, two of them by index_select."""
    chunks = tensor.view(tensor.shape[0], 2 * size, tensor.shape[1] // (2 * size))
    return chunks.index_select(1, torch.tensor([rank, 2 * size - rank - 1])).view(tensor.shape[0], -1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_zigzag_is_what_megatron_slices_of_its_batch(shelf, size):
    whole = (
        batched(order(shelf, 24))
        .collate_causal_lm(layout="megatron", position_ids=True, no_loss_on=["joins"])
        .fetch([0])[0]
    )
    cut = parts(shelf, 24, size, layout="megatron", position_ids=True, no_loss_on=["joins"])
    assert whole.keys() == cut.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    for key, tensor in whole.items():
        for rank in range(size):
            assert same(cut[key][rank], megatrons(tensor, rank, size)), (key, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zigzags_are_torchs_head_tail_load_balance(tmp_path, size):
    attention = pytest.importorskip("torch.distributed.tensor.experimental._attention")
    lengths = [2 * size * n for n in (1, 3, 2, 4, 2)]  # documents that share out: torch takes no others
    length, document = sum(lengths), Shelf(tmp_path, {"prose": [[*lengths, 1]]})
    batches = document.reader("prose").slice_sequences(length).batch_samples(1)
    ranks = [Topology(cp_rank=r, cp_size=size) for r in range(size)]
    ours = [batches.collate_causal_lm(topology=place).fetch([0])[0]["input_ids"][0] - 1 for place in ranks]
    plain = attention._HeadTailLoadBalancer(length, size, "cpu")._generate_indices()[0]
    assert torch.cat(ours).tolist() == plain.tolist()
    ours = [
        batches.collate_causal_lm(topology=place, cp="document").fetch([0])[0]["input_ids"][0] - 1 for place in ranks
    ]
    theirs = attention._PerDocumentHeadTailLoadBalancer([lengths], size, "cpu")._generate_indices()[0]
    found = []
    for begin, count in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):  # document by document, as torch
        found += [token for held in ours for token in held.tolist() if begin <= token < begin + count]
    assert found == theirs.tolist()


# The same batches, however they are asked for ------------------------------------------------------------------

STAGES = {
    "one of all": (Topology(dp_size=2), {"position_ids": True, "label_mask": True}),
    "a zigzag": (Topology(cp_rank=1, cp_size=2), {"layout": "megatron"}),
    "documents cut, last stage": (
        Topology(pp_rank=1, pp_size=2, cp_rank=1, cp_size=2),
        {"cp": "document", "document_ids": True, "cu_seqlens": True, "no_loss_on": ["joins"]},
    ),
    "a middle stage": (Topology(pp_rank=1, pp_size=3), {"layout": "nanotron"}),
    "a middle stage that is told of documents": (
        Topology(pp_rank=1, pp_size=3),
        {"cu_seqlens": True, "source_ids": True},
    ),
    "microbatches": (Topology(tp_size=2), {"microbatches": 2, "dtype": "int32", "cu_seqlens": True}),
    "torchtitan": (Topology(pp_size=2), {"layout": "torchtitan", "position_ids": True}),
    "hugging face": (Topology(cp_size=2), {"layout": "hf"}),
}


def staged(shelf: Shelf, stage: str) -> Any:
    place, collation = STAGES[stage]
    return batched(order(shelf), place).collate_causal_lm(**collation)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_keeps_the_contract_of_nodes(shelf, stage):
    check_indexed_node(lambda: staged(shelf, stage), items=9)


@pytest.mark.parametrize("stage", ["documents cut, last stage", "a middle stage", "torchtitan"])
def test_a_worker_process_gives_the_same_batches_and_goes_on_where_a_loader_was(shelf, stage):
    expected = staged(shelf, stage).fetch(range(9))
    with DataLoader2(staged(shelf, stage), reading_service=MultiProcessingReadingService(1, "fork")) as loader:
        assert all_same(itertools.islice(loader, 5), expected[:5])
        state = loader.state_dict()
    with DataLoader2.from_state(state, staged(shelf, stage)) as loader:
        assert all_same(itertools.islice(loader, 4), expected[5:])


def test_the_order_the_state_and_the_contents_are_the_same_on_every_rank_and_in_every_layout(shelf):
    seen = set()
    for stage, layout in itertools.product([None, *STAGES], [None, "hf"]):
        place, collation = STAGES.get(stage, (Topology(), {}))
        rank = Topology(**{**vars(place), "dp_size": 2})
        loader = DataLoader2(batched(order(shelf), rank).collate_causal_lm(**{"layout": layout, **collation}))
        loader.seek(3)
        seen.add((loader.datapipe.fingerprint(), str(loader.state_dict()), str(loader.contents(2))))
    assert len(seen) == 1


@pytest.mark.parametrize("cut", CUTS)
def test_changes_of_a_run_reach_every_rank_alike(shelf, cut):
    def changed(place: Topology, **collation: Any) -> "list[Any]":
        with DataLoader2(batched(order(shelf), place).collate_causal_lm(**collation)) as loader:
            found = [*itertools.islice(loader, 2)]
            loader.update_weights({"prose": 0.1, "code": 0.9})
            found += itertools.islice(loader, 2)
            loader.exclude("code", tokens=[(0, 300)])
            return [*found, *itertools.islice(loader, 8)]

    whole = changed(Topology())
    assert any((batch["label_ids"] == -100).all(1).any() for batch in whole[4:])
    for rank in range(2):
        parts = changed(Topology(cp_rank=rank, cp_size=2), cp=cut)
        for batch, part in zip(whole, parts, strict=True):
            rows = torch.cat([batch["input_ids"], batch["label_ids"][:, -1:]], 1)
            for r, row in enumerate(rows.tolist()):
                at = held(16, Topology(cp_rank=rank, cp_size=2), cut, shelf.begins(row))
                for key in ("input_ids", "label_ids"):
                    assert same(part[key][r], batch[key][r, at])


def test_what_a_step_holds_is_said_of_whole_rows_by_ranks_that_hold_parts_or_nothing(shelf):
    with DataLoader2(batched(order(shelf)).collate_causal_lm()) as loader:
        tokens, documents = loader.tokens(2), loader.documents(2)
    for place in (Topology(cp_rank=1, cp_size=2), Topology(pp_rank=1, pp_size=3)):
        with DataLoader2(batched(order(shelf), place).collate_causal_lm()) as loader:
            next(iter(loader))
            assert loader.tokens(2).tolist() == tokens.tolist()
            assert loader.documents(2) == documents


def test_a_source_whose_documents_nobody_knows_is_no_source_of_a_run_that_asks_for_them(shelf, token_file):
    raw = TokenReader(token_file("raw.bin", 400), dtype="uint16", name="raw").slice_sequences(16).permute(seed=7)
    with DataLoader2(batched(order(shelf)).collate_causal_lm(position_ids=True)) as loader:
        next(iter(loader))
        state = loader.state_dict()
        weights = {"prose": 0.5, "code": 0.3, "raw": 0.2}
        with pytest.raises(ConfigurationError, match=r"raw\.bin: stores no document ends"):
            loader.add_source(raw, weights)
        assert loader.state_dict() == state, "as if nothing had been asked"
        assert all_same(
            itertools.islice(loader, 2), batched(order(shelf)).collate_causal_lm(position_ids=True).fetch([1, 2])
        )


@pytest.mark.parametrize("stage", STAGES)
def test_a_recipe_builds_the_same_batches_again(shelf, tmp_path, stage):
    place, collation = STAGES[stage]
    for ends in ({}, {"input_pp_rank": -1, "output_pp_rank": 0}):
        graph = batched(order(shelf), place).collate_causal_lm(**collation, **ends)
        (tmp_path / "run.yaml").write_text(write_recipe(graph))
        again = load_recipe(tmp_path / "run.yaml", topology=place)
        assert all_same(again.fetch(range(4)), graph.fetch(range(4)))
        assert again.tree() == graph.tree()


# What cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collation", "error", "message"),
    [
        (
            {"layout": "Nanotron"},
            ConfigurationError,
            r"layout is 'Nanotron'; one of hf, megatron, nanotron, torchtitan",
        ),
        ({"layout": ["hf"]}, ConfigurationError, r"layout is \['hf'\]"),
        ({"cp": "ring"}, ConfigurationError, "cp is 'ring'; one of zigzag, contiguous, whole, document would do"),
        ({"cp": ""}, ConfigurationError, "cp is ''"),
        ({"cp": []}, ConfigurationError, r"cp is \[\]"),
        ({"dtype": "int16"}, ConfigurationError, "dtype is 'int16'; int64 or int32 would do"),
        ({"dtype": torch.int32}, ConfigurationError, "dtype is torch.int32"),
        ({"dtype": []}, ConfigurationError, r"dtype is \[\]"),
        (
            {"no_loss_on": "joins"},
            ArgumentTypeError,
            "no_loss_on is a list of joins, end_of_text, unscored, got 'joins'",
        ),
        ({"no_loss_on": ["join"]}, ConfigurationError, "no_loss_on has 'join'; of joins, end_of_text, unscored some"),
        (
            {"no_loss_on": ["end_of_text"]},
            ConfigurationError,
            r"source 'prose': its end-of-text id is not known; Token",
        ),
        ({"no_loss_on": ["unscored"]}, TokenFileError, r"no loss mask of .*prose-0\.tok.*prose-0\.tok\.loss"),
        ({"ignore_index": True}, ArgumentTypeError, "ignore_index must be an integer or None, got True"),
        ({"ignore_index": "none"}, ArgumentTypeError, "ignore_index must be an integer or None, got 'none'"),
        (
            {"ignore_index": 2**31, "dtype": "int32"},
            ConfigurationError,
            "ignore_index is 2147483648, which is no int32",
        ),
        ({"ignore_index": -(2**70)}, ConfigurationError, "which is no int64"),
        (
            {"microbatches": 3},
            ConfigurationError,
            "the micro-batch is 4, no multiple of microbatches=3; 3 or 6 would do",
        ),
        ({"microbatches": 8}, ConfigurationError, "the micro-batch is 4, no multiple of microbatches=8; 8 would do"),
        ({"microbatches": 0}, ConfigurationError, "microbatches must be at least 1"),
        ({"microbatches": 2.0}, ArgumentTypeError, "microbatches must be an integer, got 2.0"),
        (
            {"microbatches": 2, "topology": Topology(pp_size=4)},
            ConfigurationError,
            "microbatches is 2, no multiple of pp_size=4; 4 would do",
        ),
        (
            {"microbatches": 2, "topology": Topology(tp_size=3)},
            ConfigurationError,
            "sequence_length is 16, no multiple of tp_size=3; 15 or 18 would do",
        ),
        (
            {"topology": Topology(cp_size=3)},
            TopologyError,
            "16 is no multiple of 6: .*; 12 or 18 would do, or cp='contig",
        ),
        ({"topology": Topology(cp_size=3), "cp": "document"}, TopologyError, "16 is no multiple of 6"),
        ({"topology": Topology(cp_size=17), "layout": "nanotron"}, TopologyError, "leaves some of 17 context-parallel"),
        ({"topology": Topology(1, 2)}, TopologyError, "is given dp 1 of 2, but the rows below are dealt to dp 0 of 1"),
        ({"topology": 2}, ArgumentTypeError, "takes a Topology, got 2"),
        ({"input_pp_rank": 1}, TopologyError, "input_pp_rank is 1, pp_size 1"),
        ({"output_pp_rank": -2}, TopologyError, "output_pp_rank is -2, pp_size 1"),
        ({"output_pp_rank": "last"}, ArgumentTypeError, "output_pp_rank must be an integer, got 'last'"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_graph_is_built_with_its_value_and_what_would_do(
    shelf, collation, error, message
):
    with pytest.raises(error, match=message):
        batched(order(shelf)).collate_causal_lm(**collation)


OF_DOCUMENTS = [{key: True} for key in ("position_ids", "document_ids", "cu_seqlens")] + [{"no_loss_on": ["joins"]}]


@pytest.mark.parametrize("asked", [*OF_DOCUMENTS, {"cp": "document"}])
def test_documents_are_asked_for_only_where_they_are_known(shelf, token_file, asked):
    place = Topology(cp_size=2)
    raw = TokenReader(token_file("raw.bin", 400), dtype="uint16")
    both = raw.slice_sequences(16).blend(shelf.reader("prose").slice_sequences(16))
    with pytest.raises(ConfigurationError, match=r"raw\.bin: stores no document ends.*end_of_text=ID\) finds them"):
        both.batch_samples(2).collate_causal_lm(topology=place, **asked)
    mapped = order(shelf).map(np.flip, seeded=False).batch_samples(2)
    with pytest.raises(ConfigurationError, match="a map or zip below makes other rows: without"):
        mapped.collate_causal_lm(topology=place, **asked)


def test_a_stage_that_holds_no_labels_needs_no_loss_masks_and_no_joins(token_file):
    raw = TokenReader(token_file("raw.bin", 400), dtype="uint16").slice_sequences(16).batch_samples(2)
    graph = raw.collate_causal_lm(topology=Topology(pp_size=2), no_loss_on=["joins", "end_of_text", "unscored"])
    assert graph.fetch([0])[0].keys() == {"input_ids"}


def test_ids_beyond_int32_are_refused_where_int32_is_asked_for(tmp_path):
    tokens = np.full(100, 3, np.uint32)
    tokens[70] = 2**31
    tokens.tofile(tmp_path / "large.bin")
    graph = TokenReader(tmp_path / "large.bin", dtype="uint32").slice_sequences(8).batch_samples(2)
    narrow = graph.collate_causal_lm(dtype="int32")
    assert narrow.fetch([0])[0]["label_ids"].dtype == torch.int32
    with pytest.raises(TokenIdError, match="token id 2147483648 does not fit dtype='int32'; 'int64' would do"):
        narrow.fetch([4])
    assert 2**31 in graph.collate_causal_lm().fetch([4])[0]["input_ids"]


def test_uneven_batches_have_no_microbatches(shelf):
    run = shelf.reader("prose").slice_sequences(16).once(tail="uneven").batch_samples(4)
    with pytest.raises(ConfigurationError, match=r"microbatches= needs batches of one size; once\(tail='pad'\)"):
        run.collate_causal_lm(microbatches=2)


def test_rows_that_a_map_made_are_cut_too_and_whole_batches_below_a_map_stay_whole(shelf):
    place = Topology(pp_rank=1, pp_size=2, cp_rank=1, cp_size=2)
    plain = batched(order(shelf), place)
    by_samples = order(shelf).map(np.negative, seeded=False).shard_ranks(place, seed=3).batch_samples(4, 8)
    by_batches = plain.map(lambda rows: rows._replace(tokens=-rows.tokens), seeded=False)
    for other in (by_samples, by_batches):
        ours, theirs = plain.collate_causal_lm().fetch([0])[0], other.collate_causal_lm().fetch([0])[0]
        assert same({key: -value for key, value in ours.items()}, theirs)


# What is read -----------------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
ROW = 32 * PAGE // 2
"""Tokens of a row whose inputs are 32 pages of uint16."""


def resident(path: Path) -> "set[int]":
    """The pages of a file that are in the page cache (mincore(2)); mapping it reads none."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(mapped)), pages)
        del view
    assert not failed
    return {page for page, there in enumerate(pages) if there & 1}


def forget(path: Path) -> None:
    """Drops a file from the page cache; the test is skipped where that cannot be."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path):
        pytest.skip("this file system keeps its pages")


def pages_of(rows: "list[int]", columns: "list[tuple[int, int]]") -> "set[int]":
    """The pages in which these tokens of these windows of ROW tokens lie."""
    return {
        page
        for row, (start, stop) in itertools.product(rows, columns)
        for page in range(2 * (row * ROW + start) // PAGE, -(-2 * (row * ROW + stop) // PAGE))
    }


@pytest.fixture
def long_rows(tmp_path, monkeypatch):
    """A file of 24 windows of ROW tokens, and what its batches of two shall be dealt as."""
    monkeypatch.setattr("tokenpipe.datapipes.fetch.pages.WATCH.reading", False)
    monkeypatch.setenv("TOKENPIPE_READ_AHEAD_MIB", "0")
    path = tmp_path / "long.bin"
    (np.arange(24 * ROW + 1) % 50_000).astype("<u2").tofile(path)
    return path


READ = {
    "a stage alone": (Topology(), {}, [(0, ROW + 1)]),
    "the first stage": (Topology(pp_size=3), {}, [(0, ROW)]),
    "a middle stage": (Topology(pp_rank=1, pp_size=3), {}, []),
    "a middle stage that says which samples": (Topology(pp_rank=1, pp_size=3), {"sample_numbers": True}, []),
    "a middle stage of nanotron": (Topology(pp_rank=1, pp_size=3), {"layout": "nanotron"}, []),
    "the last stage": (Topology(pp_rank=2, pp_size=3), {}, [(1, ROW + 1)]),
    "a zigzag": (Topology(cp_size=2), {}, [(0, ROW // 4 + 1), (3 * ROW // 4, ROW + 1)]),
    "a zigzag's middle": (Topology(cp_rank=1, cp_size=2), {}, [(ROW // 4, 3 * ROW // 4 + 1)]),
    "a part": (Topology(cp_rank=1, cp_size=4), {"cp": "contiguous"}, [(ROW // 4, ROW // 2 + 1)]),
    "labels of a zigzag": (
        Topology(pp_rank=1, pp_size=2, cp_size=4),
        {"layout": "megatron"},
        [(1, ROW // 8 + 1), (7 * ROW // 8 + 1, ROW + 1)],
    ),
    "torchtitan's last stage": (Topology(pp_rank=1, pp_size=2, cp_size=2), {"layout": "torchtitan"}, [(1, ROW + 1)]),
}


@pytest.mark.alone
@pytest.mark.parametrize("where", READ)
def test_of_a_file_no_page_is_read_but_those_of_the_tokens_that_the_rank_holds(long_rows, where):
    place, collation, columns = READ[where]
    for _ in range(5):  # the kernel may keep or drop a page of its own accord, where memory is short
        graph = windows = None  # and with them the map: what is mapped is not forgotten
        gc.collect()
        windows = TokenReader(long_rows, dtype="uint16").slice_sequences(ROW).permute(seed=5)
        graph = windows.batch_samples(2).collate_causal_lm(topology=place, **collation)
        rows = windows.route(np.array([6, 7, 14, 15]))[1].tolist()
        forget(long_rows)
        graph.fetch([3])
        next(iter(graph.iterate(7)))
        if (found := resident(long_rows)) == pages_of(rows, columns):
            break
    assert found == pages_of(rows, columns)
    if not columns:
        assert str(long_rows) not in Path("/proc/self/maps").read_text(), "it is not even mapped"
        long_rows.unlink()
        assert len(graph.fetch([0, 5])) == 2


@pytest.mark.parametrize(
    ("place", "cut", "times"),
    [
        (Topology(), "zigzag", 17 / 16),
        (Topology(pp_size=2), "zigzag", 1),
        (Topology(pp_rank=1, pp_size=3), "zigzag", 0),
        (Topology(cp_size=4), "zigzag", 1 / 2),
        (Topology(cp_rank=1, cp_size=2), "document", 1),
        (Topology(pp_rank=1, pp_size=2, cp_rank=1, cp_size=2), "document", 1 / 2),
        (Topology(pp_rank=1, pp_size=3, cp_rank=1, cp_size=2), "document", 0),
    ],
)
def test_the_gather_is_asked_for_as_many_tokens_as_the_rank_holds(shelf, monkeypatch, place, cut, times):
    asked = []
    fill = TokenGather._fill

    def noted(self, places, counts, out):
        asked.append(int(np.broadcast_to(counts, places.shape).sum()))
        fill(self, places, counts, out)

    monkeypatch.setattr(TokenGather, "_fill", noted)
    graph = batched(order(shelf), place).collate_causal_lm(cp=cut, position_ids=True, sample_numbers=True)
    graph.fetch(range(6))
    assert sum(asked) == 6 * 4 * 16 * times


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_middle_stage_does_not_even_ask_which_rows_a_batch_has(shelf, monkeypatch, layout):
    place = Topology(dp_size=2, pp_rank=1, pp_size=3, cp_size=2)
    graph = batched(order(shelf), place).collate_causal_lm(layout=layout)
    expected = graph.fetch([0, 10**9])

    def asked(*_: Any) -> Any:
        raise AssertionError("the rows of a batch were asked for")

    monkeypatch.setattr(SampleBatcher, "_rows", asked)
    assert all_same(graph.fetch([0, 10**9]), expected)
    assert all_same(graph.iterate(4, 6), expected)
    with pytest.raises(AssertionError, match="were asked for"):
        batched(order(shelf)).collate_causal_lm(layout=layout).fetch([0])


# Under adapters ---------------------------------------------------------------------------------------------


def adapters() -> "dict[str, Any]":
    return {
        "profile": Profile(),
        "retry": Retry(wait=0.0),
        "retry of the batcher": Retry(wait=0.0, nodes="batch_samples"),
        "timeout": Timeout(60),
        "timeout of the batcher": Timeout(60, "batch_samples"),
        "skip errors": SkipErrors(3),
        "prefetch": Prefetch(2),
        "prefetch below the collator": Prefetch(2, "batch_samples"),
        "placement": Placement({"collate_causal_lm": Threads(2)}),
        "to a device": ToDevice("cpu"),
        "several": [SkipErrors(3), Retry(wait=0.0), Profile(), Prefetch(2)],
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("adapter", adapters())
def test_adapted_graphs_give_the_same_batches(shelf, stage, adapter):
    expected = staged(shelf, stage).fetch(range(6))
    with DataLoader2(staged(shelf, stage), adapters()[adapter]) as loader:
        assert all_same(itertools.islice(loader, 6), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_stage_goes_on_with_the_same_batches(shelf, stage):
    whole, place = staged(shelf, stage), STAGES[stage][0]
    later = ResumeSkip(3 * 4 * place.dp_size)(whole)
    assert all_same(later.fetch(range(4)), whole.fetch(range(3, 7)))
    assert pickle.loads(pickle.dumps(later)).tree() == later.tree()
    assert "collate_causal_lm" in draw(later).mermaid
    assert not [finding for finding in lint(whole) if finding.level != "info"]


@pytest.mark.parametrize(
    "collation",
    [
        {"position_ids": True, "cu_seqlens": True},
        {"no_loss_on": ["joins"]},
        {"cp": "document", "topology": Topology(cp_rank=1, cp_size=2)},
        {"topology": Topology(pp_rank=1, pp_size=2, cp_rank=1, cp_size=2), "cp": "document", "layout": "megatron"},
        {"no_loss_on": ["unscored"]},
        {"topology": Topology(pp_size=2)},
    ],
)
def test_a_file_that_is_gone_costs_its_rows_and_nothing_else_where_errors_are_skipped(tmp_path, collation):
    for name in ("kept", "gone"):
        with TokenFileWriter(tmp_path / f"{name}.tok", vocab_size=9) as writer:
            for length in range(3, 40):
                writer.write(np.full(length, 5), np.full(length, length % 3 > 0))
    both = TokenReader([tmp_path / "kept.tok", tmp_path / "gone.tok"], name="both").slice_sequences(16)
    graph = both.permute(seed=2).batch_samples(4).collate_causal_lm(sample_numbers=True, **collation)
    sound = graph.fetch(range(8))
    skip = SkipErrors(100)
    fresh = TokenReader([tmp_path / "kept.tok", tmp_path / "gone.tok"], name="both").slice_sequences(16)
    graph = fresh.permute(seed=2).batch_samples(4).collate_causal_lm(sample_numbers=True, **collation)
    (tmp_path / "gone.tok").unlink()
    key = {"layout": "loss_mask"}.get(next((k for k in collation if k == "layout"), ""), "label_ids")
    seen = 0
    with DataLoader2(graph, skip) as loader:
        for batch, before in zip(loader, sound, strict=False):
            kept = (batch["sample_numbers"] == before["sample_numbers"]).all()
            assert kept
            held = next(batch[name] for name in ("input_ids", "labels", "label_ids") if name in batch)
            lost = (held == 0).all(1) if key not in batch or key == "loss_mask" else (batch[key] == -100).all(1)
            if key == "loss_mask":
                assert (batch[key][lost] == 0).all()
            seen += int(lost.sum())
            for name in batch.keys() - {"cu_seqlens", "max_seqlen"}:
                assert torch.equal(batch[name][~lost], before[name][~lost])
    assert 4 < seen < 28


@pytest.mark.parametrize("cut", ["zigzag", "document"])
def test_a_file_that_goes_is_an_error_of_the_batch_that_needs_it_also_with_read_ahead(tmp_path, slow_disk, cut):
    paths = [tmp_path / f"{i}.tok" for i in range(3)]
    for path in paths:
        with TokenFileWriter(path, vocab_size=9) as writer:
            for length in range(3, 40):
                writer.write(np.full(length, 5))
    reader = TokenReader(paths, name="all")
    graph = reader.slice_sequences(16).batch_samples(1).collate_causal_lm(topology=Topology(cp_size=2), cp=cut)
    last = int(reader.first_tokens[2])
    paths[2].unlink()
    seen = 0
    with pytest.raises(TokenFileError, match=r"2\.tok"):
        for _ in graph.iterate():
            seen += 1
    assert seen == (last - 17) // 16 + 1, "all windows that lie before the file were delivered"


def test_document_ends_of_a_file_that_is_gone_or_cut_are_a_token_file_error(tmp_path):
    path = tmp_path / "a.tok"
    with TokenFileWriter(path, vocab_size=9) as writer:
        for length in range(3, 40):
            writer.write(np.full(length, 5))
    (file,) = TokenReader(path).files
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(TokenFileError, match=r"a\.tok: was cut or written to after the graph was built"):
        file.document_ends()
    path.unlink()
    with pytest.raises(TokenFileError, match=r"cannot open the document ends: No such file.*a\.tok"):
        file.document_ends()


# Certificates -----------------------------------------------------------------------------------------------


def test_batches_are_certified_alike_in_every_layout_that_has_our_keys(shelf):
    run = order(shelf).exclude({"prose": [(0, 400)]}).shard_ranks(Topology()).batch_samples(4)
    expected = [batch_certificate(batch) for batch in run.collate_causal_lm().fetch(range(6))]
    others = [
        {"dtype": "int32"},
        {"layout": "nanotron"},
        {"layout": "nanotron", "position_ids": True},
        {"no_loss_on": ["joins"], "cu_seqlens": True},
        {"ignore_index": None, "label_mask": True},
        {"ignore_index": -1, "label_mask": True},
        {"topology": Topology(tp_rank=1, tp_size=2)},
    ]
    for collation in others:
        found = [batch_certificate(batch) for batch in run.collate_causal_lm(**collation).fetch(range(6))]
        assert found == expected, collation


@pytest.mark.parametrize(
    "collation",
    [
        {"layout": "torchtitan"},
        {"layout": "megatron"},
        {"layout": "hf"},
        {"microbatches": 2},
        {"topology": Topology(pp_size=2)},
        {"topology": Topology(pp_rank=1, pp_size=3)},
        {"topology": Topology(pp_size=2), "layout": "nanotron"},
        {"topology": Topology(cp_size=2), "cp": "document"},
    ],
)
def test_a_batch_that_is_not_all_of_its_rows_by_our_keys_has_no_certificate(shelf, collation):
    (batch,) = batched(order(shelf)).collate_causal_lm(**collation).fetch([0])
    with pytest.raises(ArgumentTypeError):
        batch_certificate(batch)


@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
def test_parts_of_rows_have_no_certificate_where_it_is_said_how_long_rows_are(shelf, cut):
    (batch,) = batched(order(shelf)).collate_causal_lm(topology=Topology(cp_size=2), cp=cut).fetch([0])
    with pytest.raises(ArgumentTypeError, match="8 tokens of rows of 16"):
        batch_certificate(batch, sequence_length=16)
    (batch,) = batched(order(shelf)).collate_causal_lm().fetch([0])
    assert batch_certificate(batch, sequence_length=16) == batch_certificate(batch)
