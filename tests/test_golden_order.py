"""One order and one state that may never change.

A run that was begun with one version goes on with the next: if a change of the library moved a single
sample, every checkpoint in the world would resume into another order, and would not know. So when a test
here fails, the change is wrong, not the numbers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology, read_tokens
from tokenpipe.datapipes.errors import SourceGoneError
from tokenpipe.datapipes.permute import derive_key, permute_numbers
from tokenpipe.reading_services import DataLoader2

FROZEN = Path(__file__).parent / "data" / "state-1.json"
FROZEN_CHANGED = Path(__file__).parent / "data" / "state-2.json"

GOLDEN_KEY = 18194958416256774053
GOLDEN_PERMUTATION = [0, 7, 10, 1, 8, 6, 2, 4, 3, 5, 11, 9]
GOLDEN_FAR = [1077552792975, 9007165204223420, 4611686013222524905]
GOLDEN_SOURCES = [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
GOLDEN_NUMBERS = [0, 1, 0, 2, 3, 4, 5, 1, 6, 7, 8, 9, 2, 10, 11, 12]
GOLDEN_RUN = "bc2b3cc88e9d1cd5963b295e91cb3c72d0fe00e6fc3585f745aafb622dce4725"
GOLDEN_FINGERPRINT = "0cdd68e6d265a9f4b93925d52c84ec77"
GOLDEN_REST = "558c015d755d26dd481c222bce4f3ae68845f1a971d067e468d1fa24b7026a89"
GOLDEN_CHANGED = "e949141fd3a46fc64c875b45700c400e3c548f23e876495ea3efe91a2c7246b9"
GOLDEN_CHANGED_REST = "a9f1bf442b3e257a6ebdef61ccb5a436f5a6f672c25d589905663bac6e7acdfc"
GOLDEN_FORMS = {
    "path": "c3dce8f5d42a5bfd6d4f3b70e8e6b266fcb63ced0cc3f2091ac3d71fa73f7cc7",
    "list": "a9105a7cefc6b1894888cbaf1a852818e4aa9cb3e78f193a470cfe6429237597",
    "weights": "b5791f9716f4a9e3349b71a47038518efd09b2eebb3ba5a8b1b0c56e1190c8aa",
}


def golden_graph(folder: Path, micro_batch: int = 2, topology: Topology | None = None):
    """Small on purpose, with one of everything that decides an order."""
    prose, code = folder / "prose.npy", folder / "code.tok"
    np.save(prose, (np.arange(5000, dtype=np.uint16) * 31) % 1021)
    with TokenFileWriter(code, vocab_size=1021) as writer:
        for document in range(20):
            writer.write((np.arange(100) * 17 + document) % 1021)
    first = TokenReader(prose).slice_sequences(16).permute(seed=7)
    second = TokenReader(code).slice_sequences(16, unit=32).permute(seed=7)
    blend = first.blend(second, weights={"prose": 0.8, "code": 0.2})
    return (
        blend.shard_ranks(topology or Topology(1, 4), seed=7)
        .batch_samples(micro_batch, global_batch_size=[(0, 16), (5, 32)])
        .collate_causal_lm(sample_numbers=True)
    )


def late_source(folder: Path):
    np.save(folder / "late.npy", (np.arange(900, dtype=np.uint16) * 13) % 1021)
    return TokenReader(folder / "late.npy").slice_sequences(16).permute(seed=7)


def changed_loader(folder: Path) -> DataLoader2:
    """A run after one of every change, 20 steps long."""
    loader = DataLoader2(golden_graph(folder))
    np.save(folder / "more.npy", (np.arange(700, dtype=np.uint16) * 37) % 1021)
    changes = {
        2: lambda: loader.update_weights({"prose": 1, "code": 1}),
        3: lambda: loader.grow_source("prose", folder / "more.npy"),
        5: lambda: loader.jump(2),
        6: lambda: loader.exclude("code", tokens=[(300, 420)]),
        7: lambda: loader.add_source(late_source(folder), weights={"prose": 2, "code": 1, "late": 1}),
        9: lambda: loader.update_global_batch_size(48),
        11: lambda: loader.drop_source("code"),
    }
    items = iter(loader)
    for step in range(20):
        changes.get(step, lambda: None)()
        for _ in range(loader.micro_batches(step)):
            next(items)
    return loader


def graph_after_changes(folder: Path):
    """The same run as a script would have it now, without the source that was dropped."""
    changed_loader(folder)
    prose = TokenReader([folder / "prose.npy", folder / "more.npy"], name="prose").slice_sequences(16).permute(seed=7)
    return (
        prose.blend(late_source(folder), weights={"prose": 2, "late": 1})
        .shard_ranks(Topology(1, 4), seed=7)
        .batch_samples(2, global_batch_size=[(0, 16), (5, 32)])
        .collate_causal_lm(sample_numbers=True)
    )


def digest(loader: DataLoader2, batches: int) -> str:
    found = hashlib.sha256()
    for batch, _ in zip(loader, range(batches), strict=False):
        for key in ("input_ids", "label_ids", "sample_numbers"):
            found.update(batch[key].contiguous().numpy().tobytes())
    return found.hexdigest()


def test_a_permutation_stays_what_it_was():
    key = derive_key(7, "permute", "prose")
    assert key == GOLDEN_KEY
    assert permute_numbers(np.arange(12), 12, 12, 2**63 - 1, key).tolist() == GOLDEN_PERMUTATION
    far = np.array([10**12, 2**53 + 1, 2**62])
    assert permute_numbers(far, 10**11, 10**11, 2**63 - 1, key).tolist() == GOLDEN_FAR


def test_a_blend_stays_what_it_was(tmp_path):
    blend = golden_graph(tmp_path).datapipe.datapipe.datapipe
    source, number = blend.route(np.arange(16))
    assert source.tolist() == GOLDEN_SOURCES
    assert number.tolist() == GOLDEN_NUMBERS


def test_a_run_stays_what_it_was(tmp_path):
    with DataLoader2(golden_graph(tmp_path)) as loader:
        assert digest(loader, 200) == GOLDEN_RUN


def test_fingerprints_stay_what_they_were(tmp_path):
    assert golden_graph(tmp_path).fingerprint() == GOLDEN_FINGERPRINT


def test_the_state_of_version_1_loads_for_ever(tmp_path):
    state = json.loads(FROZEN.read_text())
    loader = DataLoader2.from_state(state, golden_graph(tmp_path))
    assert loader.state_dict() == state, "what was loaded is what would be saved"
    assert digest(loader, 100) == GOLDEN_REST


def untagged(state: "dict[str, Any]") -> "dict[str, Any]":
    """A state without the digits of single files, which older ones do not have."""
    return {**state, "sources": {name: content.split()[0] for name, content in state["sources"].items()}}


def test_a_changed_run_and_its_state_of_version_2_stay_what_they_were(tmp_path):
    state = json.loads(FROZEN_CHANGED.read_text())
    assert untagged(changed_loader(tmp_path).state_dict()) == state
    loader = DataLoader2.from_state(state, graph_after_changes(tmp_path))
    assert untagged(loader.state_dict()) == state, "what was loaded is what would be saved"
    loader.restart()
    with pytest.raises(SourceGoneError, match="code"):
        digest(loader, 20)
    whole = changed_loader(tmp_path)
    whole.restart()
    assert digest(whole, 200) == GOLDEN_CHANGED
    loader = DataLoader2.from_state(state, graph_after_changes(tmp_path))
    assert digest(loader, 100) == GOLDEN_CHANGED_REST


def test_the_state_of_version_1_loads_on_other_ranks(tmp_path):
    state = json.loads(FROZEN.read_text())
    loader = DataLoader2.from_state(state, golden_graph(tmp_path, 1, Topology(0, 2)))
    batch = next(iter(loader))
    assert batch["sample_numbers"].tolist()[0] in range(state["consumed_samples"], state["consumed_samples"] + 2)


@pytest.mark.parametrize("form", ["path", "list", "weights"])
def test_the_three_forms_of_read_tokens_stay_what_they_were(tmp_path, form):
    golden_graph(tmp_path)
    prose, code = str(tmp_path / "prose.npy"), str(tmp_path / "code.tok")
    spec = {"path": prose, "list": [prose, code], "weights": {prose: 3, code: 1}}[form]
    graph = read_tokens(spec, sequence_length=16, seed=7)
    rows = np.ascontiguousarray(graph.fetch(np.arange(500)))
    assert hashlib.sha256(rows.tobytes()).hexdigest() == GOLDEN_FORMS[form]
