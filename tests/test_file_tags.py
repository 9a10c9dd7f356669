"""A file that was replaced between save and resume is refused, and the error says which one it is."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenpipe.datapipes import JsonLinesReader, TokenReader
from tokenpipe.datapipes.errors import StateMismatchError
from tokenpipe.datapipes.file_tags import file_tags, other_files
from tokenpipe.reading_services import DataLoader2, InProcessReadingService, MultiProcessingReadingService


def write(folder: Path, names: "list[str]", tokens: int = 3000) -> "list[Path]":
    """Raw uint16 files of other ids each."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        np.random.default_rng([3, i]).integers(0, 50_000, tokens, np.uint16).tofile(folder / name)
    return [folder / name for name in names]


def replace(path: Path, keeps_size: bool = True, times: bool = True) -> None:
    """Other tokens under the same name; with the times of the old file."""
    before = path.stat()
    size = before.st_size // 2 + (0 if keeps_size else 40)
    np.random.default_rng(99).integers(0, 50_000, size, np.uint16).tofile(path)
    if times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def graph_of(**sources: "list[Path]") -> Any:
    made = [TokenReader(paths, "uint16", name).slice_sequences(8).permute(seed=5) for name, paths in sources.items()]
    order = made[0] if len(made) == 1 else made[0].blend(*made[1:], weights=[1.0] * len(made))
    return order.batch_samples(4).collate_causal_lm()


def saved(graph: Any, workers: int = 0) -> "dict[str, Any]":
    """A state, by way of JSON, after three batches."""
    service = MultiProcessingReadingService(workers) if workers else InProcessReadingService()
    loader = DataLoader2(graph, reading_service=service)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.shutdown()
    return state


def refusal(state: "dict[str, Any]", graph: Any, workers: int = 0) -> str:
    service = MultiProcessingReadingService(workers) if workers else None
    with pytest.raises(StateMismatchError) as caught:
        DataLoader2.from_state(state, graph, reading_service=service)
    return str(caught.value)


# Which file it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_replaced_by_another_of_the_same_size_is_refused_and_named(tmp_path, workers):
    paths = write(tmp_path, ["a.bin", "b.bin", "c.bin"])
    code = write(tmp_path / "code", ["d.bin", "e.bin"])
    state = saved(graph_of(prose=paths, code=code), workers)
    replace(paths[1])
    said = refusal(state, graph_of(prose=paths, code=code), workers)
    assert str(paths[1]) in said
    assert not any(str(path) in said for path in (paths[0], paths[2], *code))
    assert "source 'prose'" in said and "source 'code'" not in said
    assert "amend=True" in said  # what would do


def test_a_replaced_file_that_is_all_of_its_source_is_named(tmp_path):
    paths = write(tmp_path, ["a.bin"])
    state = saved(graph_of(prose=paths))
    replace(paths[0])
    assert str(paths[0]) in refusal(state, graph_of(prose=paths))


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_was_cut_or_has_grown_is_named(tmp_path, grows):
    paths = write(tmp_path, ["a.bin", "b.bin", "c.bin"])
    state = saved(graph_of(prose=paths))
    with paths[2].open("r+b") as file:
        file.truncate(paths[2].stat().st_size + (2 if grows else -2))
    said = refusal(state, graph_of(prose=paths))
    assert f"1 of its 3 files, not as saved: {paths[2]}" in said


def test_files_in_another_order_are_said_to_be_that_with_the_order_that_would_do(tmp_path):
    a, b, c = write(tmp_path, ["a.bin", "b.bin", "c.bin"])
    state = saved(graph_of(prose=[a, b, c]))
    said = refusal(state, graph_of(prose=[c, a, b]))
    assert f"another order; saved: {a}, {b}, {c}" in said


def test_a_file_that_is_missing_or_came_is_said_by_its_number_or_name(tmp_path):
    a, b, c = write(tmp_path, ["a.bin", "b.bin", "c.bin"])
    said = refusal(saved(graph_of(prose=[a, b, c])), graph_of(prose=[a, c]))
    assert "2 files, saved with 3; not here: of the saved ones number 2" in said
    said = refusal(saved(graph_of(prose=[a, b])), graph_of(prose=[c, a, b]))
    assert f"3 files, saved with 2; not among the saved: {c}" in said


def test_a_source_in_another_folder_goes_on_exactly(tmp_path):
    names = ["a.bin", "b.bin", "c.bin"]
    before, after = write(tmp_path / "before", names), [tmp_path / "after" / name for name in names]
    state = saved(graph_of(prose=before))
    expected = iter(DataLoader2.from_state(state, graph_of(prose=before)))
    first = [next(expected)["input_ids"] for _ in range(4)]
    shutil.move(tmp_path / "before", tmp_path / "after")
    loader = DataLoader2.from_state(state, graph_of(prose=after))
    assert loader.state_dict() == state
    assert all((next(batches)["input_ids"] == one).all() for batches in [iter(loader)] for one in first)


def test_of_more_files_than_tags_the_range_is_named_that_the_replaced_one_is_in(tmp_path):
    paths = write(tmp_path, [f"{i:03}.bin" for i in range(200)], tokens=40)
    state = saved(graph_of(prose=paths))
    replace(paths[120])
    said = refusal(state, graph_of(prose=paths))
    found = re.search(r"some of number (\d+) … (\d+) \((\S+) … ([^\s)]+)\)", said)
    assert found is not None, said
    low, high = int(found[1]), int(found[2])
    assert low <= 121 <= high and high - low < 4
    assert (found[3], found[4]) == (str(paths[low - 1]), str(paths[high - 1]))
    said = refusal(state, graph_of(prose=[*paths[:60], *paths[61:120], *paths[121:]]))
    assert "198 files, saved with 200; the first that differs is of number 6" in said


def test_a_source_in_a_bucket_of_many_is_found_by_its_files(tmp_path):
    """Of more than 32 sources a state says no names."""
    sources = {f"s{i}": write(tmp_path / f"s{i}", ["a.bin", "b.bin"], tokens=40 + i) for i in range(36)}
    state = saved(graph_of(**sources))
    assert all(name.startswith("#") for name in state["sources"])
    assert len(json.dumps(state)) < 8192
    replace(sources["s7"][1])
    said = refusal(state, graph_of(**sources))
    assert str(sources["s7"][1]) in said
    assert (
        sum(str(path) in said for paths in sources.values() for path in paths) <= 2
    )  # a pair, where a bucket has many


# What a state holds ---------------------------------------------------------------------------------------


def test_sources_of_one_file_have_no_tags_and_many_sources_few(tmp_path):
    one = {f"s{i}": write(tmp_path / f"s{i}", ["a.bin"]) for i in range(8)}
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in saved(graph_of(**one))["sources"].values())
    digests = [f"{i:064x}" for i in range(500)]
    for sources, tags in ((1, 64), (8, 8), (16, 4), (1000, 4)):
        assert len(file_tags(digests, sources)) == len(" 500 ") + 4 * tags
    assert file_tags(digests[:3], 1) == " 3 " + 3 * "0000"


def test_a_state_from_before_there_were_tags_goes_on_and_names_all_files(tmp_path):
    paths = write(tmp_path, ["a.bin", "b.bin"])
    code = write(tmp_path / "code", ["d.bin", "e.bin"])
    state = saved(graph_of(prose=paths, code=code))
    state["sources"] = {name: text[:16] for name, text in state["sources"].items()}
    DataLoader2.from_state(state, graph_of(prose=paths, code=code))
    replace(paths[0])
    said = refusal(state, graph_of(prose=paths, code=code))
    assert f"{paths[0]}, {paths[1]}" in said and "source 'code'" not in said


@pytest.mark.parametrize(
    "tags", ["2 81f0", "2 81f0zzzz", "999999999 81f0c557", "0 ", "2", " ", "2 81f0c557aaaa", "1 81f0", "2 81F0C557"]
)
def test_tags_that_nobody_wrote_do_no_harm(tmp_path, tags):
    paths = write(tmp_path, ["a.bin", "b.bin"])
    state = saved(graph_of(prose=paths))
    state["sources"]["prose"] = f"{state['sources']['prose'][:16]} {tags}"
    DataLoader2.from_state(state, graph_of(prose=paths))
    replace(paths[0])
    assert "prose" in refusal(state, graph_of(prose=paths))


def test_every_replaced_file_is_among_those_that_are_named():
    """Any numbers of files, of tags, and any ones that are other files now."""
    chance = np.random.default_rng(8)
    for _ in range(300):
        files, sources = int(chance.integers(2, 300)), int(chance.integers(1, 40))
        digests = [chance.bytes(32).hex() for _ in range(files)]
        paths = [f"f{i}" for i in range(files)]
        text = "0" * 16 + file_tags(digests, sources)
        other = int(chance.integers(files))
        changed = [*digests[:other], chance.bytes(32).hex(), *digests[other + 1 :]]
        said = other_files(text, changed, paths)
        ranges = [(int(a), int(b)) for a, b in re.findall(r"number (\d+) … (\d+)", said)]
        assert any(a <= other + 1 <= b for a, b in ranges) or f"f{other}" in re.findall(r"f\d+", said), said


# Streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_text_file_of_a_stream_that_was_replaced_is_named(tmp_path, workers):
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for i, path in enumerate(paths):
        path.write_text("".join(f'{{"text": "{i} {k:04}"}}\n' for k in range(50)))

    def graph() -> Any:
        return JsonLinesReader(paths).sharding_filter()

    state = saved(graph(), workers)
    service = MultiProcessingReadingService(workers) if workers else None
    DataLoader2.from_state(state, graph(), reading_service=service).shutdown()
    paths[2].write_text(paths[2].read_text().replace("2 0017", "9 0017"))
    said = refusal(state, graph(), workers)
    assert f"1 of its 3 files, not as saved: {paths[2]}" in said
    assert str(paths[0]) not in said
