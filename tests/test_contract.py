"""Every node of the library through the one contract."""

import numpy as np
import pytest
import torch

from contract import check_indexed_node
from tokenpipe import datapipes
from tokenpipe.datapipes import IndexedDataPipe, TokenFileWriter, TokenReader, Topology


@pytest.fixture
def sources(token_file, tmp_path):
    """Two sources of windows of 8: 'prose' (50 samples) in a raw file, 'code' (23) in two of our own."""
    prose = TokenReader(token_file("prose.bin", 405), dtype="uint16")
    paths = []
    for i in range(2):
        paths.append(str(tmp_path / f"code-{i}.tok"))
        with TokenFileWriter(paths[-1], vocab_size=1000) as writer:
            for start in range(3):
                writer.write(np.arange(start, start + 31) + 500 * i)
    return prose, TokenReader(paths, name="code")


def negated(row: np.ndarray) -> np.ndarray:
    return -row


def noisy(batch: dict) -> dict:
    return {**batch, "noise": torch.rand(2)}


def nodes(prose: TokenReader, code: TokenReader, folder) -> dict[str, IndexedDataPipe]:
    """A graph that ends in each kind of node, by the node's class and what is special about it."""
    a, b = prose.slice_sequences(8), code.slice_sequences(8)
    more = TokenReader(prose.files[0].path, dtype="uint16", name="more")
    blend = a.permute(seed=7).blend(b.permute(seed=7), weights=[0.8, 0.2])
    union = a.permute(seed=7).blend(b.permute(seed=7))
    np.save(folder / "order.npy", np.array([3, 1, 4, 1, 5, 9, 2, 6, 49, 60], np.int64))
    batches = blend.shard_ranks(Topology(dp_rank=1, dp_size=2), seed=7).batch_samples(2, global_batch_size=8)
    evaluation = union.once(tail="pad").shard_ranks(Topology(1, 4)).batch_samples(2).collate_causal_lm()
    unit = prose.slice_sequences(8, unit=32).permute(seed=7)
    return {
        "TokenReader": code,
        "TokenReader of a part": code.part(1),
        "DocumentSelector": code.select_documents(documents=[0, 2, 3, 4]),
        "DocumentSelector over another": code.hold_out(0.3, seed=7)[0].select_documents(documents=[1, 2, 4, 5]),
        "SequenceSlicer": a,
        "SequenceSlicer of chosen documents": code.select_documents(documents=[0, 2, 3, 5]).slice_sequences(8),
        "SequenceSlicer aligned to documents": code.slice_sequences(8, align="document"),
        "DocumentPacker": code.pack_documents(12),
        "DocumentPacker of chosen documents": code.select_documents(documents=[0, 2, 3, 5]).pack_documents(40),
        "Permuter of packed rows": code.pack_documents(12).permute(seed=7),
        "Blender of packed rows": code.pack_documents(8).permute(seed=7).blend(a, weights=[1, 2]).batch_samples(2),
        "SequenceSlicer of units": prose.slice_sequences(8, unit=16),
        "SequenceResizer": unit.resize_sequences(16, after=17),
        "SequenceResizer twice": unit.resize_sequences(16, after=17).resize_sequences(4, after=5),
        "Permuter": a.permute(seed=7),
        "Permuter in windows": a.permute(seed=7, window=16),
        "Permuter of units": unit,
        "Blender": blend,
        "Blender of a union": union,
        "Blender that stops": a.blend(b, weights=[1, 1], max_epochs=1.5),
        "Blender of blends": a.blend(b, name="inner").blend(more.slice_sequences(8), weights=[1, 3]),
        "Reorderer": a.reorder(folder / "order.npy"),
        "NanosetOrder": a.order_nanoset(b, num_samples=100, weights=[0.3, 0.7]),
        "Skipper": blend.skip(13),
        "Excluder": blend.exclude({"prose": [(3, 30), (200, 201)]}, from_sample=7),
        "Excluder of batches": blend.exclude({"code": [(0, 40)]}).batch_samples(4).collate_causal_lm(),
        "Limiter": blend.limit(samples=37),
        "Limiter of steps": batches.limit(steps=5),
        "Limiter of passes": batches.collate_causal_lm().limit(passes=2),
        "Once": union.once(),
        "RankSharder": blend.shard_ranks(Topology(dp_rank=2, dp_size=3), seed=7),
        "RankSharder by stride": blend.shard_ranks(Topology(dp_rank=2, dp_size=3)),
        "RankBalancer": b.permute(seed=7).balance_ranks(Topology(dp_rank=2, dp_size=3), 1, 9),
        "RankBalancer of one pass": code.slice_sequences(4)
        .once("uneven")
        .balance_ranks(Topology(1, 3), 2, 18)
        .batch(2),
        "SampleBatcher": batches,
        "SampleBatcher on a schedule": blend.batch_samples(3, global_batch_size=[(0, 3), (4, 6), (6, 9)]),
        "CausalLMCollator": batches.collate_causal_lm(source_ids=True, sample_numbers=True),
        "CausalLMCollator of padding": evaluation,
        "Mapper": a.map(negated, seeded=False),
        "Mapper below the collator": a.map(negated).permute(seed=3).batch_samples(2).collate_causal_lm(),
        "Mapper above the collator": batches.collate_causal_lm().map(noisy),
        "Zipper": a.zip(b),
        "Zipper of batches": batches.collate_causal_lm().zip(batches.collate_causal_lm()),
        "Concater": a.concat(b),
        "Concater of batches": evaluation.concat(evaluation, evaluation),
    }


def test_every_node_keeps_the_contract(sources, tmp_path, subtests):
    for name in nodes(*sources, tmp_path):
        with subtests.test(name):
            check_indexed_node(lambda name=name: nodes(*sources, tmp_path)[name])


def test_no_node_is_missing_from_the_contract(sources, tmp_path):
    exported = {
        name
        for name in datapipes.__all__
        if isinstance(kind := getattr(datapipes, name), type) and issubclass(kind, IndexedDataPipe)
    }
    checked = {type(node).__name__ for node in nodes(*sources, tmp_path).values()}
    assert checked == exported - {"IndexedDataPipe"}
