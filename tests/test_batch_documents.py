"""What a batch says of its documents and of the labels that count, through whole graphs, against plain Python."""

import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from contract import same
from shelf import Shelf, expected
from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology, _kernels_numpy, row_documents
from tokenpipe.datapipes.errors import TokenpipeError

S = 12
ASKED = ("position_ids", "document_ids", "cu_seqlens", "label_mask", "joins")
SOURCES = {"prose": [[5, 1, 1, 40, 12, 12, 3, 24], [1, 30, 2]], "code": [[60, 7, 9, 9], [2, 3, 60]], "short": [[13]]}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Shelf:
    """Documents shorter, longer and as long as a row of 12; one token alone; files that begin inside rows."""
    return Shelf(tmp_path_factory.mktemp("shelf"), SOURCES, scored=True)


def orders(shelf: Shelf) -> "dict[str, Any]":
    prose, code, short = (shelf.reader(name) for name in SOURCES)
    chosen = code.select_documents(documents=[0, 2, 3, 6])
    windows = prose.slice_sequences(S).permute(seed=4)
    return {
        "one source in order": prose.slice_sequences(S),
        "a blend": windows.blend(code.slice_sequences(S).permute(seed=4), short.slice_sequences(S), weights=[5, 4, 1]),
        "chosen documents": chosen.slice_sequences(S).permute(seed=4),
        "a blend with chosen documents": windows.blend(chosen.slice_sequences(S)),
        "units": prose.slice_sequences(S, unit=2 * S).permute(seed=4),
        "longer rows later": prose.slice_sequences(S // 2, unit=2 * S).permute(seed=4).resize_sequences(S, after=3),
        "a part": code.part(1).slice_sequences(S),
        "packed": prose.pack_documents(S).permute(seed=4),
        "packed and windows": code.pack_documents(S).blend(windows),
        "rows that begin with documents": prose.slice_sequences(S, align="document").permute(seed=4),
        "padded": windows.once(tail="pad"),
        "uneven": windows.once(tail="uneven"),
        "excluded": windows.blend(code.slice_sequences(S)).exclude({"prose": [(20, 31)], "code": [(0, 1), (70, 75)]}),
    }


EXCLUDED = {*range(21, 32), 133, *range(203, 208)}  # as ids: prose begins with 1, code with 133


def splits(batch: "dict[str, Any]", count: int) -> "dict[str, Any]":
    """A batch of rows as (count, rows / count, …), by hand."""
    found = {}
    for key, value in batch.items():
        if key != "cu_seqlens":
            found[key] = value if isinstance(value, int) else torch.stack(value.chunk(count))
            continue
        tokens, lines = int(value[-1]) // count, []
        for m in range(count):
            lines.append([int(c) - m * tokens for c in value if m * tokens <= c <= (m + 1) * tokens])
        most = max(map(len, lines))
        found[key] = torch.tensor([line + [tokens] * (most - len(line)) for line in lines], dtype=torch.int32)
    return found


@given(data=st.data())
@settings(max_examples=120)
def test_batches_say_of_their_documents_and_labels_what_plain_python_says(shelf, data):
    order = orders(shelf)
    name = data.draw(st.sampled_from([*order]), "order")
    asked = data.draw(st.sets(st.sampled_from(ASKED)), "asked")
    unscored = data.draw(st.booleans(), "unscored")
    cut = data.draw(st.sampled_from(["zigzag", "contiguous", "document", "whole"]), "cut")
    place = (
        Topology(cp_rank=data.draw(st.integers(0, 1)), cp_size=2) if data.draw(st.booleans(), "cp 2") else Topology()
    )
    count = data.draw(st.sampled_from([None, 2, 4]), "microbatches") if name != "uneven" else None
    layout = data.draw(st.sampled_from(["nanotron", "torchtitan", "megatron", "hf"]), "layout") if count == 4 else None
    count = None if layout else count
    dtype = data.draw(st.sampled_from(["int64", "int32"]), "dtype")
    rules = (["joins"] if "joins" in asked else []) + (["unscored"] if unscored else [])
    batches = order[name].batch_samples(4)
    numbers = data.draw(st.lists(st.integers(0, min(batches.end, 30) - 1), min_size=1, max_size=3), "batches")
    graph = batches.collate_causal_lm(
        topology=place, layout=layout, cp=cut, no_loss_on=rules, microbatches=count, dtype=dtype,
        **dict.fromkeys(asked - {"joins"}, True),
    )  # fmt: skip
    for rows, found in zip(batches.fetch(numbers), graph.fetch(numbers), strict=True):
        hidden = np.zeros(len(rows.tokens), bool) if rows.valid is None else ~rows.valid
        if name == "excluded":
            hidden |= np.isin(rows.tokens, [*EXCLUDED]).any(1)
        wanted = expected(
            shelf, rows.tokens, place, layout, cut, asked, dtype=np.dtype(dtype), hidden=hidden,
            uncounted=rows.tokens[:, 1:] % 3 == 0 if unscored else None,
        )  # fmt: skip
        if name == "padded":
            inputs = wanted[0] if layout == "torchtitan" else wanted
            inputs["row_valid"] = torch.from_numpy(~hidden)
        assert same(found, wanted if count is None else splits(wanted, count)), (found, wanted)


def test_some_of_those_rows_are_excluded_padded_and_inside_one_document(shelf):
    order = orders(shelf)
    rows = order["excluded"].batch_samples(4).fetch(range(6))
    assert 0 < sum(int(batch.masked.sum()) for batch in rows if batch.masked is not None) < 24
    assert not order["padded"].batch_samples(4).fetch([-1 + order["padded"].batch_samples(4).end])[0].valid.all()
    inside = [
        len(shelf.begins(row))
        for batch in order["a blend"].batch_samples(4).fetch(range(6))
        for row in batch.tokens.tolist()
    ]
    assert min(inside) == 1 < max(inside)


def test_the_positions_of_datatrove_through_a_graph(tmp_path):
    shelf = Shelf(tmp_path, {"prose": [[3, 2, 3, 6, 6, 1]]})  # document ends 3, 5, 8, 14, 20
    graph = shelf.reader("prose").slice_sequences(10).batch_samples(2)
    batch = graph.collate_causal_lm(position_ids=True, cu_seqlens=True, label_mask=True, no_loss_on=["joins"]).fetch(
        [0]
    )[0]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8, 10, 14, 20]
    assert batch["max_seqlen"] == 6
    nanotron = graph.collate_causal_lm(layout="nanotron", position_ids=True).fetch([0])[0]
    # as Nanotron's own collator: label_mask = positions[:, 1:] != 0, of positions of S + 1 tokens
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0]])
    for found in (batch, nanotron):
        assert torch.equal(found["label_mask"], positions[:, 1:] != 0)
    assert nanotron["label_ids"].min() > 0, "the mask alone says so"


@pytest.fixture
def closed(tmp_path):
    """A reader of documents that are closed by id 0, which the file's header says; and what it holds."""
    rng = np.random.default_rng(3)
    held = []
    with TokenFileWriter(tmp_path / "closed.tok", vocab_size=50, end_of_text=0) as writer:
        for length in rng.integers(1, 9, 60):
            document = [*rng.integers(1, 50, length).tolist(), 0]
            writer.write(document)
            held += document
    return TokenReader(tmp_path / "closed.tok"), np.array(held)


def test_the_id_that_closes_documents_is_no_label_and_megatrons_mask_is_that_of_joins(closed):
    batches = closed[0].slice_sequences(16).batch_samples(4)
    plain = batches.collate_causal_lm().fetch(range(5))
    without = batches.collate_causal_lm(no_loss_on=["end_of_text"], label_mask=True).fetch(range(5))
    megatron = batches.collate_causal_lm(layout="megatron", no_loss_on=["joins"]).fetch(range(5))
    for whole, marked, masked in zip(plain, without, megatron, strict=True):
        assert torch.equal(marked["label_mask"], whole["label_ids"] != 0)
        assert torch.equal(marked["label_ids"], whole["label_ids"].masked_fill(whole["label_ids"] == 0, -100))
        assert torch.equal(masked["loss_mask"], (whole["input_ids"] != 0).float())  # eod_mask_loss: by the *input*
        assert torch.equal(masked["labels"], whole["label_ids"])


def test_documents_found_by_their_last_id_give_the_same_batches_as_those_that_were_stored(closed, tmp_path):
    reader, held = closed
    held.astype("<u2").tofile(tmp_path / "raw.bin")
    raw = TokenReader(tmp_path / "raw.bin", dtype="uint16", end_of_text=0, name=reader.name)
    asked = {"position_ids": True, "document_ids": True, "cu_seqlens": True, "no_loss_on": ["joins", "end_of_text"]}
    place = Topology(cp_size=2)
    stored, found = (
        node.slice_sequences(16).batch_samples(4).collate_causal_lm(topology=place, cp="document", **asked)
        for node in (reader, raw)
    )
    assert all(same(a, b) for a, b in zip(stored.fetch(range(5)), found.fetch(range(5)), strict=True))


@pytest.mark.parametrize("index", [-1, 0, 49, None])
def test_what_stands_for_labels_that_do_not_count_can_be_chosen(closed, index):
    batches = closed[0].slice_sequences(16).batch_samples(4)
    plain = batches.collate_causal_lm(no_loss_on=["joins"], label_mask=True).fetch([0])[0]
    other = batches.collate_causal_lm(no_loss_on=["joins"], label_mask=True, ignore_index=index).fetch([0])[0]
    tokens = batches.collate_causal_lm().fetch([0])[0]["label_ids"]
    assert torch.equal(plain["label_mask"], other["label_mask"])
    assert torch.equal(other["label_ids"], tokens if index is None else tokens.masked_fill(~plain["label_mask"], index))


def test_batches_may_be_written_to_without_changing_others(shelf):
    graph = orders(shelf)["one source in order"].batch_samples(2)
    graph = graph.collate_causal_lm(position_ids=True, document_ids=True, cu_seqlens=True, label_mask=True)
    before = graph.fetch([0, 1])
    for value in graph.fetch([0])[0].values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    assert all(same(a, b) for a, b in zip(graph.fetch([0, 1]), before, strict=True))


# Both kernels -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys, hashlib
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from shelf import Shelf
from test_batch_documents import digests
from tokenpipe.datapipes import kernels
print(kernels.kernel("gather")[1], *digests(Path(sys.argv[1])))
"""


def digests(folder: Path) -> "list[str]":
    """What a few graphs of each kind give, as hashes."""
    found = []
    order = orders(Shelf(folder, SOURCES, scored=True))
    for cut, rank in (("document", 1), ("zigzag", 0), ("contiguous", 1)):
        for name in order:
            graph = order[name].batch_samples(4).collate_causal_lm(
                topology=Topology(pp_rank=rank, pp_size=2, cp_rank=1, cp_size=2), cp=cut, position_ids=True,
                cu_seqlens=True, document_ids=True, no_loss_on=["joins", "unscored"],
            )  # fmt: skip
            held = hashlib.sha256()
            for batch in graph.fetch(range(min(graph.end, 5))):
                for key in sorted(batch):
                    held.update(f"{key} {torch.as_tensor(batch[key]).tolist()}".encode())
            found.append(held.hexdigest()[:16])
    return found


def test_the_kernels_without_a_compiler_give_the_same_batches(tmp_path):
    ours = digests(tmp_path)
    environment = {**os.environ, "TOKENPIPE_KERNELS": "numpy"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", *ours]


# Damaged files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["zeros", "decreasing", "beyond the file", "beyond 2^63", "in disorder", "noise"])
@pytest.mark.parametrize("cut", ["whole", "document"])
@pytest.mark.parametrize("compiled", [True, False])
def test_document_ends_that_are_damaged_do_no_harm(tmp_path, monkeypatch, wrong, cut, compiled):
    if not compiled:
        monkeypatch.setattr(row_documents, "kernel", lambda name: (getattr(_kernels_numpy, name), False))
    rng = np.random.default_rng(5)
    path = tmp_path / "a.tok"
    with TokenFileWriter(path, vocab_size=9) as writer:
        for length in range(3, 40):
            writer.write(np.full(length, 5))
    data, documents = path.read_bytes(), 37
    ends = np.frombuffer(data[-8 * documents :], "<u8").copy()
    ends = {
        "zeros": ends * 0,
        "decreasing": ends[::-1],
        "beyond the file": ends + 10**9,
        "beyond 2^63": ends | np.uint64(2**63),
        "in disorder": rng.permutation(ends),
        "noise": rng.integers(0, 2**64, documents, dtype=np.uint64),
    }[wrong]
    path.write_bytes(data[: -8 * documents] + ends.astype("<u8").tobytes())
    graph = TokenReader(path).slice_sequences(16).batch_samples(4)
    graph = graph.collate_causal_lm(
        topology=Topology(cp_size=2),
        cp=cut,
        position_ids=True,
        document_ids=True,
        cu_seqlens=True,
        no_loss_on=["joins"],
    )
    try:
        batches = graph.fetch(range(8))
    except TokenpipeError:
        return
    for batch in batches:  # of which the tokens at least are sound
        assert (batch["input_ids"] == 5).all()
        assert batch["cu_seqlens"][-1] == 4 * 16


# Attention --------------------------------------------------------------------------------------------------


def attention_inputs(tokens: torch.Tensor, positions: torch.Tensor) -> "list[torch.Tensor]":
    """Queries, keys and values (b, heads 2, S, 8) of tokens at positions, by fixed weights."""
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(size, 16, generator=generator, dtype=torch.float64) for size in (512, 128)]
    hidden = tables[0][tokens % 512] + tables[1][positions]
    weights = torch.randn(3, 16, 16, generator=generator, dtype=torch.float64)
    return [(hidden @ weight).unflatten(-1, (2, 8)).transpose(1, 2) for weight in weights]


def dense(batch: "dict[str, Any]") -> torch.Tensor:
    """(b, S, 2, 8): each token attends to those before it with its own document number."""
    q, k, v = attention_inputs(batch["input_ids"], batch["position_ids"])
    ids, at = batch["document_ids"], torch.arange(q.shape[2])
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & (at[:, None] >= at)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def flexible(batch: "dict[str, Any]") -> torch.Tensor:
    """The same by torch's flex attention, of a block mask of document numbers."""
    q, k, v = attention_inputs(batch["input_ids"], batch["position_ids"])
    ids, length = batch["document_ids"], q.shape[2]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j])

    blocks = create_block_mask(mask, len(ids), None, length, length, device="cpu", BLOCK_SIZE=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow uncompiled
        return flex_attention(q, k, v, block_mask=blocks).transpose(1, 2)


def varying(batch: "dict[str, Any]") -> torch.Tensor:
    """The same of all rows end to end, cut by cu_seqlens, as calls of variable length do it: causal in each part."""
    parts = [part.transpose(1, 2).flatten(0, 1) for part in attention_inputs(batch["input_ids"], batch["position_ids"])]
    sizes = batch["cu_seqlens"].diff().tolist()
    assert max(sizes) == batch["max_seqlen"]
    done = [
        torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in each), is_causal=True)
        for each in zip(*(part.split(sizes) for part in parts), strict=True)
    ]
    return torch.cat(done, 1).transpose(0, 1).unflatten(0, batch["input_ids"].shape)


def test_no_token_attends_across_documents_in_any_kind_of_attention(shelf):
    graph = orders(shelf)["a blend"].batch_samples(4)
    batch = graph.collate_causal_lm(position_ids=True, document_ids=True, cu_seqlens=True).fetch([2])[0]
    ids = batch["document_ids"]
    assert len(batch["cu_seqlens"]) - 1 == int((ids.max(1).values + 1).sum()) > 4
    row, number = 1, 1 if ids[1].max() else 0
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    of_one = torch.zeros(ids.shape, dtype=torch.bool)
    of_one[row] = ids[row] == number
    changed["input_ids"][of_one] += 77
    for attention in (dense, flexible, varying):
        before, after = attention(batch), attention(changed)
        torch.testing.assert_close(before, dense(batch), rtol=1e-9, atol=1e-9)
        assert torch.equal(before[~of_one], after[~of_one]), attention.__name__
        assert not torch.equal(before[of_one], after[of_one])
