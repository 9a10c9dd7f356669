"""Eight real ranks as dp × pp × tp and dp × cp × tp: what they are given, put together again, is the global batch.

What the ranks do is `layouts` in ranks.py; they run once for all tests here.
"""

import itertools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_distributed import ENVIRONMENT, SCRIPT, TORCHRUN, finished, results

import ranks
from tokenpipe.datapipes import TokenFileWriter, Topology
from tokenpipe.reading_services import DataLoader2

PIPELINE, CONTEXT = ranks.LAYOUTS
OF_ALL = {"position_ids", "document_ids"}
INPUTS, LABELS = OF_ALL | {"input_ids"}, OF_ALL | {"label_ids", "label_mask"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    rng = np.random.default_rng(5)
    for salt, name in enumerate("ab"):
        with TokenFileWriter(folder / f"{name}.tok", vocab_size=50_000) as writer:
            for document, length in enumerate(rng.integers(3, 31, 60)):
                writer.write(np.arange(length) * 7 + 331 * document + salt)
    return folder


@pytest.fixture(scope="module")
def eight(folder) -> "list[Any]":
    """What each of the eight ranks was given."""
    log = folder / "eight.log"
    with log.open("w") as out:
        command = [*TORCHRUN, "--standalone", "--nproc-per-node=8", str(SCRIPT), str(folder), "layouts"]
        run = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=out)
    assert finished([run], log) == [0]
    return results(folder, "layouts", 8)


@pytest.fixture(scope="module")
def alone(folder) -> "dict[int, dict[str, np.ndarray]]":
    """{sample number: {key: its row}} of the same two steps in one process."""
    with DataLoader2(ranks.laid_out(folder, Topology(), **ranks.ASKED)) as loader:
        rows = by_row({key: value.numpy() for key, value in batch.items()} for batch in itertools.islice(loader, 4))
    assert [*sorted(rows)] == [*range(2 * ranks.GLOBAL_BATCH)]
    return rows


def by_row(batches: Any) -> "dict[int, dict[str, np.ndarray]]":
    found = {}
    for batch in batches:
        for r, number in enumerate(batch["sample_numbers"]):
            assert number not in found, f"sample {number} came twice"
            found[int(number)] = {key: np.asarray(value[r]) for key, value in batch.items() if key != "sample_numbers"}
    return found


def places(eight: "list[Any]", layout: str, cut: str) -> "dict[Topology, dict[int, dict[str, np.ndarray]]]":
    """{place: its rows}; each of the eight ranks has a place of its own."""
    found = {Topology(**said[layout][cut][0]): by_row(said[layout][cut][1]) for said in eight}
    assert len(found) == 8
    return found


def check_same(found: "dict[str, np.ndarray]", expected: "dict[str, np.ndarray]", what: str) -> None:
    assert found.keys() == expected.keys(), what
    for key, value in expected.items():
        assert np.array_equal(found[key], value), f"{what}: {key} {found[key]} instead of {value}"


@pytest.mark.parametrize(("layout", "cut"), [(PIPELINE, "zigzag"), *((CONTEXT, cut) for cut in ranks.CUTS)])
def test_tensor_parallel_peers_are_given_the_same(eight, layout, cut):
    found = places(eight, layout, cut)
    for place, rows in found.items():
        peer = Topology(**{**vars(place), "tp_rank": 1 - place.tp_rank})
        assert rows.keys() == found[peer].keys()
        for number, row in rows.items():
            check_same(row, found[peer][number], f"sample {number} on {place}")


def test_the_stages_of_a_pipeline_have_inputs_and_labels_of_the_same_rows_and_together_all_of_them(eight, alone):
    found = places(eight, PIPELINE, "zigzag")
    first, last = ({p: rows for p, rows in found.items() if p.pp_rank == stage} for stage in (0, 1))
    for place, rows in first.items():
        assert rows.keys() == last[Topology(**{**vars(place), "pp_rank": 1})].keys()
    for stage, keys in ((first, INPUTS), (last, LABELS)):
        rows = {n: row for place, rows in stage.items() if place.tp_rank == 0 for n, row in rows.items()}
        assert rows.keys() == alone.keys(), "the dp ranks have each row once"
        for number, row in rows.items():
            check_same(row, {key: alone[number][key] for key in keys}, f"sample {number}")


def context_parallel_peers(eight: "list[Any]", cut: str) -> "list[dict[int, dict[str, np.ndarray]]]":
    """The rows that each cp rank has of all dp ranks."""
    found = places(eight, CONTEXT, cut)
    return [
        {n: row for place, rows in found.items() if (place.cp_rank, place.tp_rank) == (r, 0) for n, row in rows.items()}
        for r in range(2)
    ]


@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        ("zigzag", ([0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11])),
        ("contiguous", (range(8), range(8, 16))),
        ("whole", (range(16), range(16))),
    ],
)
def test_context_parallel_ranks_have_their_tokens_of_every_row(eight, alone, cut, tokens):
    for rows, mine in zip(context_parallel_peers(eight, cut), tokens, strict=True):
        assert rows.keys() == alone.keys()
        for number, row in rows.items():
            check_same(row, {key: value[[*mine]] for key, value in alone[number].items()}, f"sample {number}")


def test_rows_that_are_cut_document_by_document_say_which_of_their_tokens_each_one_is(eight, alone):
    peers = context_parallel_peers(eight, "document")
    for number, expected in alone.items():
        parts = [rows[number] for rows in peers]
        assert [part["input_ids"].size for part in parts] == [8, 8]
        together = {key: np.concatenate([part[key] for part in parts]) for key in (*expected, "row_places")}
        order = np.argsort(together.pop("row_places"))
        check_same({key: value[order] for key, value in together.items()}, expected, f"sample {number}")
    assert any((np.diff(rows[n]["row_places"]) > 1).sum() > 1 for rows in peers for n in rows), (
        "no row of two documents"
    )
