"""The commands of an audit: what a step held, when a document was seen, and where two runs differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenpipe.cli.main import main
from tokenpipe.datapipes import (
    Certificate,
    IndexedDataPipe,
    TokenFileWriter,
    TokenReader,
    Topology,
    certify,
    load_recipe,
)
from tokenpipe.datapipes.errors import StateMismatchError
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path
from tokenpipe.datapipes.tokenize import load_tokenizer
from tokenpipe.reading_services import DataLoader2

SEQUENCE, BATCH, STEPS = 32, 8, 40
BYTES = load_tokenizer("byte")


def text_of(source: str, document: int) -> str:
    return f"{source} {document}: caf\u00e9 \x1b[31mred\x1b[0m \\ \u202eback\n" * (1 + document % 5)


def token_file(path: Path, documents: "list[str]", ids: bool) -> Path:
    with TokenFileWriter(
        path, 257, tokenizer="byte", tokenizer_hash=BYTES.hash, end_of_text=BYTES.end_of_text
    ) as writer:
        for text in documents:
            writer.write([*BYTES.encode_batch([text])[0], BYTES.end_of_text])
    if ids:
        with DocumentIdsWriter(ids_path(path)) as names:
            names.bind(path)
            names.write_ids([f"https://x.org/{path.stem}/{i}" for i in range(len(documents))])
    return path


def graph_in(folder: Path, rank=0, dp=1, micro_batch=2, seed=7):
    prose = TokenReader([folder / "prose.tok", folder / "more.tok"], name="prose").slice_sequences(SEQUENCE)
    code = TokenReader(folder / "code.tok", name="code").slice_sequences(SEQUENCE)
    blend = prose.permute(seed).blend(code.permute(seed), weights={"prose": 3, "code": 1})
    dealt = blend.shard_ranks(Topology(rank, dp), seed=3)
    return dealt.batch_samples(micro_batch, global_batch_size=BATCH).collate_causal_lm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two sources (prose of two files, with ids), a recipe, and states at step 20 and inside step 10."""
    path = tmp_path_factory.mktemp("run")
    token_file(path / "prose.tok", [text_of("prose", i) for i in range(30)], ids=True)
    token_file(path / "more.tok", [text_of("more", i) for i in range(9)], ids=True)
    token_file(path / "code.tok", [text_of("code", i) for i in range(20)], ids=False)
    (path / "run.yaml").write_text(graph_in(path).recipe(path))
    loader = DataLoader2(graph_in(path))
    loader.seek(12)
    loader.update_weights({"prose": 1, "code": 1})
    loader.seek(20)
    (path / "state.json").write_text(json.dumps(loader.state_dict()))
    inside = DataLoader2(graph_in(path))
    for _ in zip(range(10 * 4 + 1), inside, strict=False):
        pass
    (path / "inside.json").write_text(json.dumps(inside.state_dict(), indent=4))
    return path


@pytest.fixture
def told(folder, capsys):
    """told(*arguments) → (exit status, stdout, stderr); "run.yaml" and states are those of `folder`."""

    def call(*arguments) -> "tuple[int, str, str]":
        there = [str(folder / a) if (folder / str(a)).is_file() else str(a) for a in arguments]
        capsys.readouterr()
        status = main(there)
        return status, *capsys.readouterr()

    return call


def objects(text: str) -> "list[dict]":
    return [json.loads(line) for line in text.splitlines()]


def loader_at(folder, state="state.json", **layout) -> DataLoader2:
    return DataLoader2.from_state((folder / state).read_text(), graph_in(folder, **layout))


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 2), (2, 2), (4, 1)])
def test_contents_says_what_the_loader_says_on_the_layout_that_is_asked_for(told, folder, dp, micro_batch):
    status, out, _ = told(
        *("contents", "run.yaml", "--state", "state.json", "--step", "10:14", "--jsonl"),
        *("--dp", dp, "--micro-batch", micro_batch),
    )
    loader = loader_at(folder, dp=dp, micro_batch=micro_batch)
    expected = [record for step in range(10, 14) for record in loader.contents(step)]
    found = objects(out)
    assert status == 0 and len(found) == 4 * BATCH
    assert [{k: v for k, v in row.items() if k != "documents"} for row in found] == [r._asdict() for r in expected]


def test_without_a_state_it_is_the_recipe_as_it_stands(told, folder):
    _, as_planned, _ = told("contents", "run.yaml", "--step", "13", "--jsonl")
    _, as_it_went, _ = told("contents", "run.yaml", "--state", "state.json", "--step", "13", "--jsonl")
    assert as_planned != as_it_went
    sources = [row["source"] for row in objects(as_planned)]
    assert sources == [record.source for record in DataLoader2(graph_in(folder)).contents(13)]


def test_a_table_has_a_line_for_each_row_under_its_head(told, folder):
    status, out, _ = told("contents", "run.yaml", "--step", "3:5")
    head, *lines = out.splitlines()
    assert status == 0 and len(lines) == 2 * BATCH
    assert head.split()[:7] == ["step", "rank", "micro-batch", "row", "sample", "source", "epoch"]
    for line, record in zip(lines, DataLoader2(graph_in(folder)).contents(3), strict=False):
        cells = line.split()
        assert cells[:8] == [str(v) for v in record[:8]]
        assert cells[-2:] == [record.file, str(record.file_token)]


def test_text_shows_each_document_of_a_row_and_nothing_that_acts_on_a_terminal(told, folder):
    status, out, _ = told("contents", "run.yaml", "--step", "0:12", "--text")
    assert status == 0
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "\\x1b[31mred\\x1b[0m \\\\ \\u202eback\\n" in out and "café" in out
    assert "    https://x.org/prose/" in out and "    #" in out  # ids where there are, numbers elsewhere
    _, lines, _ = told("contents", "run.yaml", "--step", "0:12", "--text", "--jsonl")
    assert lines.isascii()
    several = 0
    for row in objects(lines):
        stems = ["code"] if row["source"] == "code" else ["prose", "more"]
        whole = "".join(text_of(stem, i) for stem in stems for i in range(30))
        several += len(row["documents"]) > 1
        for part in row["documents"]:
            text = part["text"].removesuffix("<|endoftext|>").strip("\ufffd")
            assert text in whole
        assert row["documents"][0]["first"] == 0 and row["documents"][-1]["stop"] == SEQUENCE + 1
    assert several > 10


def test_the_documents_of_a_row_are_those_that_its_tokens_belong_to(folder):
    loader = loader_at(folder)
    readers = {"prose": [folder / "prose.tok", folder / "more.tok"], "code": [folder / "code.tok"]}
    owner = {}
    for name, paths in readers.items():
        ends = TokenReader(paths, name=name).document_ends()
        owner[name] = np.searchsorted(ends, np.arange(int(ends[-1])), side="right").tolist()
    for step in range(0, STEPS, 3):
        for record, parts in zip(loader.contents(step), loader.documents(step), strict=True):
            said = [part.document for part in parts for _ in range(part.first, part.stop)]
            assert said == owner[record.source][record.token : record.token + SEQUENCE + 1]
            for part in parts:
                stem = "prose" if part.document < 30 else "more"
                number = part.document - (0 if stem == "prose" else 30)
                assert part.id == (f"https://x.org/{stem}/{number}" if record.source == "prose" else None)


def test_a_document_is_masked_in_whichever_sub_source_it_was_put(folder):
    reader = TokenReader([folder / "prose.tok", folder / "more.tok"], name="prose")
    parts = [part.slice_sequences(SEQUENCE).permute(7) for part in reader.partition(by="length", bins=[100]).values()]
    loader = DataLoader2(parts[0].blend(*parts[1:]).batch_samples(4).collate_causal_lm())
    loader.exclude("prose", documents=[0, 4, "https://x.org/more/2"])
    masked = 0
    for step in range(len(loader.datapipe)):
        for record, parts in zip(loader.contents(step), loader.documents(step), strict=True):
            assert record.masked == any(part.document in (0, 4, 32) for part in parts)
            masked += record.masked
    assert masked > 8


def rows_with(loader: DataLoader2, source: str, tokens: range, steps: range) -> "list[tuple]":
    return [
        tuple(record[:4])
        for step in steps
        for record in loader.contents(step)
        if record.source == source and record.token + 1 < tokens.stop and tokens.start <= record.token + SEQUENCE
    ]


def places(out: str) -> "list[tuple]":
    return [(row["step"], row["rank"], row["micro_batch"], row["row"]) for row in objects(out)]


def test_when_of_a_document_finds_the_rows_that_hold_any_of_its_tokens_as_labels(told, folder):
    loader = loader_at(folder, dp=2)
    reader = TokenReader([folder / "prose.tok", folder / "more.tok"], name="prose")
    seen = 0
    for document in range(0, 39, 4):
        name = f"https://x.org/{'prose' if document < 30 else 'more'}/{document % 30}"
        expected = rows_with(loader, "prose", range(*reader.document_range(document)), range(20))
        for wanted in ([name], [document, "--source", "prose"]):
            status, out, err = told(
                *("when", "run.yaml", "--state", "state.json", "--dp", 2, "--jsonl", "--document", *wanted)
            )
            assert (status, places(out)) == (0, expected)
            assert f"document #{document} of prose" in err and name in err
        seen += len(expected)
    assert seen > 20


def test_when_looks_ahead_where_steps_say_so_and_by_default_at_what_was_delivered(told, folder):
    for state, delivered in (("state.json", 20), ("inside.json", 11)):
        _, default, _ = told("when", "run.yaml", "--state", state, "--token", "code:50", "--jsonl")
        loader = loader_at(folder, state)
        assert places(default) == rows_with(loader, "code", range(50, 51), range(delivered)) != []
        _, ahead, _ = told("when", "run.yaml", "--state", state, "--token", "code:50", "--steps", "5:90", "--jsonl")
        assert places(ahead) == rows_with(loader, "code", range(50, 51), range(5, 90))


def test_when_prints_a_table_and_counts_the_rows(told, folder):
    status, out, err = told("when", "run.yaml", "--steps", f"0:{STEPS}", "--document", "https://x.org/prose/7")
    assert status == 0
    head, *lines = out.splitlines()
    assert head.split() == ["step", "rank", "micro-batch", "row", "source", "document"]
    assert f"{len(lines)} row(s)" in err and all(line.split()[4:] == ["prose", "#7"] for line in lines)


def test_certify_says_what_the_graph_says_on_any_layout_and_compare_names_the_first_difference(told, folder, tmp_path):
    for dp, name in ((1, "a"), (4, "b")):
        status, out, _ = told(
            *("certify", "run.yaml", "--steps", "0:20", "--output", tmp_path / name, "--dp", dp, "--micro-batch", 2)
        )
        assert status == 0 and "20 step(s)" in out
    expected = certify(graph_in(folder), range(20))
    assert Certificate.load(tmp_path / "a").hashes.tolist() == expected.hashes.tolist()
    status, out, _ = told("certify", "--compare", tmp_path / "a", tmp_path / "b")
    assert status == 0 and "the same in all 20 steps" in out
    told("certify", "run.yaml", "--state", "state.json", "--output", tmp_path / "c")  # up to the state's place
    assert Certificate.load(tmp_path / "c").steps == range(20)
    status, out, _ = told("certify", "--compare", tmp_path / "a", tmp_path / "c")
    assert status == 1 and "first step that differs: 12" in out


WRONG = [
    (["contents", "run.yaml", "--step", "5:3"], "5:3"),
    (["contents", "run.yaml", "--step", "-1"], "-1"),
    (["contents", "run.yaml", "--step", "x"], "'x'"),
    (["contents", "run.yaml", "--step", "4:99999999999999999999"], "99999999999999999999"),
    (["contents", "none.yaml", "--step", "1"], "none.yaml"),
    (["contents", "run.yaml", "--step", "1", "--state", "none.json"], "none.json"),
    (["contents", "run.yaml", "--step", "1", "--state", "code.tok"], "JSON"),
    (["contents", "run.yaml", "--step", "1", "--dp", "0"], "dp_size is 0"),
    (["contents", "run.yaml", "--step", "1", "--dp", "3"], "divisible by dp_size"),
    (["contents", "run.yaml", "--step", "1", "--micro-batch", "5"], "divisible"),
    (["contents", "run.yaml", "--step", "1", "--tokenizer", "byte"], "--text"),
    (["contents", "run.yaml", "--step", "1", "--text", "--tokenizer", "none.json"], "none.json"),
    (["when", "run.yaml", "--token", "prose:5"], "--steps"),
    (["when", "run.yaml", "--token", "5", "--steps", "0:3"], "SOURCE:N"),
    (["when", "run.yaml", "--token", "prose:x", "--steps", "0:3"], "prose:x"),
    (["when", "run.yaml", "--token", "verse:5", "--steps", "0:3"], "verse"),
    (["when", "run.yaml", "--token", "prose:99999999", "--steps", "0:3"], "99999999"),
    (["when", "run.yaml", "--document", "https://x.org/prose/99", "--steps", "0:3"], "prose/99"),
    (["when", "run.yaml", "--document", "5", "--steps", "0:3"], "--source"),
    (["when", "run.yaml", "--document", "5", "--source", "verse", "--steps", "0:3"], "verse"),
    (["when", "run.yaml", "--document", "77", "--source", "code", "--steps", "0:3"], "77"),
    (["certify", "run.yaml", "--steps", "0:3"], "--output"),
    (["certify", "run.yaml", "--output", "x.cert"], "--steps"),
    (["certify", "--compare", "run.yaml", "run.yaml"], "certificate"),
    (["certify", "--compare", "none.cert", "none.cert"], "none.cert"),
    (["certify", "run.yaml", "--compare", "a", "b"], "--compare"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_what_is_wrong_is_one_line_and_status_1(told, arguments, said):
    status, out, err = told(*arguments)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1 and err.startswith(f"tokenpipe {arguments[0]}: ") and said in err


def test_a_checkpoint_of_torch_is_refused_with_what_would_do(told, tmp_path):
    for way in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save({"step": 3}, tmp_path / "model.pt", **way)
        status, _, err = told("contents", "run.yaml", "--step", "1", "--state", tmp_path / "model.pt")
        assert status == 1 and "json.dumps(loader.state_dict())" in err
    (tmp_path / "large.json").write_text("[" * (1 << 21))
    status, _, err = told("contents", "run.yaml", "--step", "1", "--state", tmp_path / "large.json")
    assert status == 1 and "which no state has" in err


def test_a_state_of_another_run_is_refused(told, folder, tmp_path):
    other = DataLoader2(graph_in(folder, seed=8))
    (tmp_path / "other.json").write_text(json.dumps(other.state_dict()))
    status, _, err = told("contents", "run.yaml", "--step", "1", "--state", tmp_path / "other.json")
    assert status == 1 and "seed" in err


def test_a_state_of_before_the_first_step_says_that_nothing_was_seen(told, folder, tmp_path):
    (tmp_path / "new.json").write_text(json.dumps(DataLoader2(graph_in(folder)).state_dict()))
    for arguments in (["when", "run.yaml", "--token", "code:5"], ["certify", "run.yaml", "--output", "x.cert"]):
        status, _, err = told(*arguments, "--state", tmp_path / "new.json")
        assert status == 1 and "before the first step" in err


def test_text_without_a_tokenizer_asks_for_one_where_the_files_do_not_say(capsys, tmp_path, folder):
    tokens = np.fromfile(folder / "code.tok", "<u2", 500, offset=256)
    tokens.tofile(tmp_path / "raw.bin")
    graph = TokenReader(tmp_path / "raw.bin", "uint16").slice_sequences(SEQUENCE).permute(1).batch_samples(4)
    (tmp_path / "raw.yaml").write_text(graph.recipe())
    assert main(["contents", str(tmp_path / "raw.yaml"), "--step", "0", "--text"]) == 1
    assert "--tokenizer" in capsys.readouterr().err
    assert main(["contents", str(tmp_path / "raw.yaml"), "--step", "0", "--text", "--tokenizer", "byte"]) == 0
    assert '    – "' in capsys.readouterr().out  # no document ends are stored


PROGRAM = "import sys; from tokenpipe.cli.main import main; sys.exit(main())"


def test_the_command_ends_quietly_where_its_reader_has_seen_enough(folder):
    command = [sys.executable, "-c", PROGRAM, "contents", str(folder / "run.yaml"), "--step", "0:400"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"step")
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_the_command_fits_a_terminal_that_knows_ascii_alone(folder):
    command = [sys.executable, "-c", PROGRAM, "contents", str(folder / "run.yaml"), "--step", "0", "--text"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"caf\\xe9" in done.stdout


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A run that was changed on its way: rows masked, a source grown, one dropped and its files gone."""
    path = tmp_path_factory.mktemp("changed")
    for name, documents in (("prose", 30), ("more", 9), ("code", 20), ("late", 12)):
        token_file(path / f"{name}.tok", [text_of(name, i) for i in range(documents)], ids=name != "code")
    loader = DataLoader2(graph_in(path))
    loader.seek(3)
    loader.exclude("prose", documents=["https://x.org/prose/4", 7])
    loader.seek(6)
    loader.grow_source("prose", path / "late.tok")
    loader.seek(9)
    loader.jump(2)
    loader.seek(12)
    loader.drop_source("code")
    loader.seek(30)
    (path / "state.json").write_text(json.dumps(loader.state_dict()))
    (path / "before.json").write_text(json.dumps([r._asdict() for s in range(30) for r in loader.contents(s)]))
    graph = grown_graph(path)
    (path / "run.yaml").write_text(graph.recipe(path))
    (path / "code.tok").unlink()
    return path


def grown_graph(path: Path):
    files = [path / f"{name}.tok" for name in ("prose", "more", "late")]
    prose = TokenReader(files, name="prose").slice_sequences(SEQUENCE).permute(7)
    dealt = prose.blend(weights={"prose": 1}).shard_ranks(Topology(), seed=3)
    return dealt.batch_samples(2, global_batch_size=BATCH).collate_causal_lm()


def test_after_changes_old_steps_show_what_they_held_and_what_is_gone_by_name(changed, capsys):
    arguments = [str(changed / "run.yaml"), "--state", str(changed / "state.json")]
    assert main(["contents", *arguments, "--step", "0:30", "--jsonl", "--text"]) == 0
    found = objects(capsys.readouterr().out)
    before = json.loads((changed / "before.json").read_text())
    assert len(found) == len(before) == 30 * BATCH
    gone = masked = late = 0
    for row, was in zip(found, before, strict=True):
        assert (row["step"], row["sample_number"], row["source"]) == (was["step"], was["sample_number"], was["source"])
        if row["source"] == "code":
            assert (row["token"], row["file"], row["documents"]) == (-1, "", [])
            gone += 1
            continue
        assert {k: v for k, v in row.items() if k != "documents"} == was
        assert row["masked"] == (row["step"] >= 3 and any(part["document"] in (4, 7) for part in row["documents"]))
        assert all(part["text"] and part["id"].startswith("https://x.org/") for part in row["documents"])
        masked += row["masked"]
        late += row["file"].endswith("late.tok")
    assert gone > 5 and masked > 5 and late > 5
    assert main(["contents", *arguments, "--step", "0:12", "--text"]) == 0
    out = capsys.readouterr().out
    assert out.count("(files gone)") == gone and " masked\n" in out


def test_after_changes_when_finds_documents_old_and_new_and_says_which_rows_are_masked(changed, capsys):
    arguments = ["when", str(changed / "run.yaml"), "--state", str(changed / "state.json"), "--jsonl", "--document"]
    loader = DataLoader2.from_state((changed / "state.json").read_text(), grown_graph(changed))
    for number, name in ((4, "prose/4"), (12, "prose/12"), (33, "more/3"), (41, "late/2")):
        assert main([*arguments, f"https://x.org/{name}"]) == 0
        rows = objects(capsys.readouterr().out)
        reader = TokenReader([changed / f"{n}.tok" for n in ("prose", "more", "late")], name="prose")
        tokens = range(*reader.document_range(number))
        assert [tuple(row[k] for k in ("step", "rank", "micro_batch", "row")) for row in rows] == rows_with(
            loader, "prose", tokens, range(30)
        )
        assert rows and all(row["document"] == number for row in rows)
        assert all(row["masked"] == (row["step"] >= 3) for row in rows if number == 4)


def test_when_of_a_source_whose_files_are_gone_says_so(changed, capsys):
    arguments = [str(changed / "run.yaml"), "--state", str(changed / "state.json")]
    assert main(["when", *arguments, "--token", "code:5"]) == 1
    assert "'code' was dropped" in capsys.readouterr().err


def test_a_certificate_cannot_be_had_of_steps_whose_files_are_gone(changed, tmp_path, capsys):
    arguments = ["certify", str(changed / "run.yaml"), "--state", str(changed / "state.json")]
    assert main([*arguments, "--steps", "12:30", "--output", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert main([*arguments, "--output", str(tmp_path / "d")]) == 1
    assert "'code' was dropped" in capsys.readouterr().err and not (tmp_path / "d").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_work_and_by_its_own_name(folder, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    for output in (tmp_path / "nowhere" / "x.cert", tmp_path / "there"):
        # so many steps that working them out first would not end
        command = ["certify", str(folder / "run.yaml"), "--steps", "0:1000000000000", "--output", str(output)]
        assert main(command) == 1
        assert f"{str(output)!r}\n" in capsys.readouterr().err
    command = ["plan", str(folder / "run.yaml"), "--steps", "3", "--picture", str(tmp_path / "nowhere" / "x.png")]
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert not out and "nowhere/x.png'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_a_file_that_is_missing_is_told_with_its_place_in_the_recipe(folder, tmp_path, capsys):
    recipe = tmp_path / "run.yaml"
    recipe.write_text("tokenpipe: 1\ngraph:\n  - read: {paths: gone.tok}\n  - slice_sequences: {sequence_length: 8}\n")
    assert main(["plan", str(recipe), "--steps", "3"]) == 1
    err = capsys.readouterr().err
    assert "gone.tok'" in err and "run.yaml, line 3: graph[0].read" in err


def test_the_weights_that_a_refusal_tells_are_accepted(folder):
    def graph(weights: str) -> IndexedDataPipe:
        sources = "{prose: {paths: prose.tok}, more: {paths: more.tok}, code: {paths: code.tok}}"
        each = "[{slice_sequences: {sequence_length: 32}}, {permute: {seed: 7}}]"
        blend = f"{{blend: {{sources: {sources}, each: {each}, weights: {weights}}}}}"
        return load_recipe(f"tokenpipe: 1\ngraph: [{blend}, {{batch_samples: {{micro_batch_size: 4}}}}]", folder=folder)

    loader = DataLoader2(graph("{prose: 3, more: 6, code: 1}"))
    loader.seek(3)
    loader.drop_source("code")
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match="now has prose") as refused:
        DataLoader2.from_state(state, graph("{prose: 0.3333, more: 0.6667, code: 0}"))
    now = str(refused.value).partition("now has ")[2].splitlines()[0]
    told = ", ".join(part.replace(" ", ": ") for part in now.split(", "))
    assert DataLoader2.from_state(state, graph(f"{{{told}, code: 0}}")).step == 3
