"""Graphs as pictures and as trees: what they say, on graphs of every kind, and that no text can break them."""

import itertools
import re
import shutil
import stat
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from nodes import Numbers
from tokenpipe.datapipes import Drawing, JsonLinesReader, StreamingDataPipe, TokenReader, Topology, draw, tree
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.draw import DOT_SECONDS, heat_colour
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, DrawingError
from tokenpipe.datapipes.names import named_nodes, node_names
from tokenpipe.datapipes.wrapped import Wrapper, with_wrapper

ROOT = Path(__file__).parent.parent
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's program `dot` is not installed")


class Labelled(Wrapper):
    def __init__(self, label: str) -> None:
        self._label = label

    @property
    def label(self) -> str:
        return self._label


class Reading(IterDataPipe):
    """A user's own source, which holds what cannot be pickled, and says nothing but what it was built with."""

    def __init__(self, where: str, rows: int = 5) -> None:
        self.where, self.rows, self.cannot_travel = where, rows, (lambda: None)

    def __iter__(self):
        raise AssertionError("a look at a graph reads nothing")

    __len__ = __iter__


class Doubled(StreamingDataPipe):
    def __init__(self, datapipe: IterDataPipe) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self):
        yield from self.datapipe


def node_called(name: str, graph):
    return next(node for node, found in named_nodes(graph) if found == name)


def same(item):
    return item


def boxes(drawing: Drawing) -> dict[str, str]:
    """{key: its text, a line a line} as the Mermaid text has it."""
    found = re.findall(r'^  (\w+)\["(.*)"\]:::\w+$', drawing.mermaid, re.MULTILINE)
    return {key: read_mermaid(text) for key, text in found}


def arrows(drawing: Drawing) -> list[tuple[str, str, str]]:
    """(from, to, label) in the Mermaid text, each box by its node's name, which is its first line if not its last."""
    names = {}
    for key, text in boxes(drawing).items():
        kind, *_, last = text.split("\n") * 2
        names[key] = last if last.endswith((f".{kind.lower()}", f".{kind}")) else kind
    found = re.findall(r'^  (\w+) -->(?:\|"(.*)"\|)? (\w+)$', drawing.mermaid, re.MULTILINE)
    return [(names[start], names[end], read_mermaid(label)) for start, label, end in found]


def read_mermaid(text: str) -> str:
    lines = text.replace("#8288;", "").split("<br/>")
    return "\n".join(re.sub(r"#(\d+);", lambda found: chr(int(found[1])), line) for line in lines)


def read_dot(label: str) -> str:
    """The text of an HTML-like label, which must be sound XML."""
    root = ElementTree.fromstring(f"<label>{label}</label>")
    for end in root.iter("br"):
        end.text = "\n"
    return "".join(root.itertext()).replace("\\\\", "\\")


def main_job(folder: Path):
    """The README's graph."""
    for name, tokens in (("prose.bin", 4_000_000), ("code-0.tok", 500_000), ("code-1.tok", 500_000)):
        np.zeros(tokens, np.uint16).tofile(folder / name)
    prose = TokenReader("prose.bin", dtype="uint16", name="prose").slice_sequences(2048).permute(seed=7)
    code = TokenReader(["code-0.tok", "code-1.tok"], dtype="uint16", name="code").slice_sequences(2048).permute(seed=7)
    return (
        prose.blend(code, weights={"prose": 0.8, "code": 0.2})
        .shard_ranks(Topology(dp_rank=2, dp_size=8), seed=7)
        .batch_samples(4, global_batch_size=256)
        .collate_causal_lm()
    )


def blend_of(sources: int):
    first, *others = [Numbers(f"s{i}", 10).permute(seed=7) for i in range(sources)]
    return first.blend(*others).batch_samples(4)


# What is said ---------------------------------------------------------------------------------------------


def test_the_tree_in_the_readme_is_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"```\n{main_job(tmp_path).tree()}\n```" in (ROOT / "README.md").read_text()


def test_a_picture_says_names_settings_counts_tokens_and_shares_on_the_way_from_files_to_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawing = draw(main_job(tmp_path))
    assert [*boxes(drawing).values()] == [
        "collate_causal_lm\nsequence_length 2048",
        "batch_samples\nmicro_batch_size=4,\nglobal_batch_size=256\n8 micro-batch(es) a step, 76 a pass",
        "shard_ranks\ntopology=dp 2 of 8, seed=7",
        "blend\nweighted",
        "permute\nseed=7\nblend.0.permute",
        "slice_sequences\nsequence_length=2048\n1,953 samples an epoch\nblend.0.slice_sequences",
        "TokenReader\nname=prose\nprose.bin: 4,000,000 uint16 tokens\nblend.0.TokenReader",
        "permute\nseed=7\nblend.1.permute",
        "slice_sequences\nsequence_length=2048\n488 samples an epoch\nblend.1.slice_sequences",
        "TokenReader\nname=code\ncode-0.tok\n… 2 files:\n1,000,000 uint16 tokens\nblend.1.TokenReader",
    ]
    assert ("blend.0.TokenReader", "blend.0.slice_sequences", "") in arrows(drawing)
    assert [label for _, _, label in arrows(drawing) if label] == ["prose 80.00%", "code 20.00%"]


def test_both_languages_say_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = main_job(tmp_path)
    with_wrapper(graph, Labelled("profile"))
    drawing = draw(graph, notes={"collate_causal_lm": "12 ms"})
    labels = dict(re.findall(r"^  (n\d+) \[fillcolor=.*, label=<(.*)>\]$", drawing.dot, re.MULTILINE))
    assert {key: read_dot(label) for key, label in labels.items()} == boxes(drawing)
    pairs = re.findall(r"^  (\w+) -> (\w+)", drawing.dot, re.MULTILINE)
    assert pairs == re.findall(r"^  (\w+) -->(?:\|.*\|)? (\w+)$", drawing.mermaid, re.MULTILINE)
    assert str(drawing) == drawing.mermaid


def test_what_adapters_put_around_nodes_stands_in_tree_and_picture():
    graph = blend_of(2)
    plain = graph.tree()
    for label in ("timeout 5 s", "profile"):
        with_wrapper(node_called("blend.1.permute", graph), Labelled(label))
    assert "permute(seed=7) [timeout 5 s] [profile]" in graph.tree()
    assert graph.tree().replace(" [timeout 5 s] [profile]", "").split() == plain.split()
    assert "permute\nseed=7\n[timeout 5 s] [profile]\nblend.1.permute" in boxes(draw(graph)).values()


def test_a_stream_is_printed_with_its_settings_and_without_its_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "secret words"}\n')
    stream = JsonLinesReader(tmp_path / "a.jsonl").sharding_filter().tokenize("byte").pack_sequences(6)
    assert stream.tree() == (
        "pack_sequences(sequence_length=6)\n"
        "tokenize(tokenizer=byte, end_of_text=<|endoftext|>)\n"
        "sharding_filter()\n"
        "JsonLinesReader(column=text, files=1)"
    )
    assert "secret" not in tree(IterableWrapper(["secret words"]).map(same)) + str(draw(stream))


def test_torchs_nodes_and_a_users_say_what_they_were_built_with():
    graph = Doubled(Reading("s3://there").map(same).shuffle(buffer_size=77)).batch(8, drop_last=True)
    assert tree(graph).splitlines() == [
        "batch(batch_size=8, drop_last=True)",
        "Doubled()",
        "shuffle(buffer_size=77)",
        "map(fn=same)",
        "Reading(where=s3://there)",
    ]
    assert [text.split("\n")[0] for text in boxes(draw(graph)).values()] == [
        *("batch", "Doubled", "shuffle", "map", "Reading"),
    ]
    assert tree(SequenceWrapper([1, 2]).map(same)) == "map(fn=same)\nSequenceWrapper()  2 items"


def test_what_several_nodes_read_is_shown_once_and_has_an_arrow_to_each():
    left, right = IterableWrapper(range(10)).shuffle().fork(2)
    graph = left.map(same).zip(right)
    assert tree(graph).count("shuffle") == 1
    assert tree(graph).splitlines()[-1].endswith("shown above: zip.0.forker")
    found = arrows(draw(graph))
    assert [end for start, end, _ in found if start == "zip.0.forker"] == ["zip.0.child", "zip.1.child"]
    assert len(boxes(draw(graph))) == len(node_names(graph))
    numbers = Numbers("a", 10).permute(seed=7)
    assert [(start, end) for start, end, _ in arrows(draw(numbers.zip(numbers)))].count(("zip.0.permute", "zip")) == 2


def test_a_graph_with_more_ways_than_could_be_counted_is_shown_in_a_moment():
    graph = Numbers("a", 10).permute(seed=7)
    for _ in range(60):
        graph = graph.zip(graph)
    assert len(tree(graph).splitlines()) == 122
    assert len(boxes(draw(graph))) == 62


def test_a_chain_of_thousands_is_no_recursion():
    graph = IterableWrapper(range(3))
    for _ in range(3000):
        graph = graph.map(same)
    assert len(tree(graph).splitlines()) == len(boxes(draw(graph))) == 3001


# Many sources -----------------------------------------------------------------------------------------------


def test_of_many_sources_the_middle_ones_are_one_box_with_their_share():
    drawing = draw(blend_of(1000))
    assert [text for text in boxes(drawing).values() if "more" in text] == ["… 979 more"]
    assert ("… 979 more", "blend", "97.90%") in arrows(drawing)
    assert {start for start, end, _ in arrows(drawing) if end == "blend"} == {
        *(f"blend.{i}.permute" for i in (*range(20), 999)),
        "… 979 more",
    }


def test_the_hottest_node_is_never_folded_away_and_colours_what_stays_folded():
    drawing = draw(blend_of(1000), heat={"blend.500.permute": 0.9, "blend.600.permute": 0.8})
    assert "permute\nseed=7\nblend.500.permute" in boxes(drawing).values()
    (more,) = [key for key, text in boxes(drawing).items() if text == "… 978 more"]
    assert f"  style {more} fill:{heat_colour(0.8)}" in drawing.mermaid.splitlines()


def test_blends_of_blends_fold_until_they_can_be_read():
    groups = []
    for k in range(40):
        first, *others = [Numbers(f"g{k}s{i}", 10).permute(seed=7) for i in range(40)]
        groups.append(first.blend(*others, name=f"g{k}"))
    drawing = draw(groups[0].blend(*groups[1:]))
    assert 20 < len(boxes(drawing)) < 200
    assert len(drawing.mermaid) < 50_000  # beyond which Mermaid renders nothing
    assert any("permute" in text for text in boxes(drawing).values())


def test_a_few_sources_stand_and_many_lie():
    assert draw(blend_of(3)).mermaid.startswith("flowchart TB\n")
    assert "rankdir=LR" in draw(blend_of(9)).dot


# Heat and notes -----------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hotter_is_darker_and_black_can_be_read_on_all_of_it():
    found = [luminance(heat_colour(i / 100)) for i in range(101)]
    assert all(a > b for a, b in itertools.pairwise(found))
    assert (found[-1] + 0.05) / 0.05 > 6.5
    assert found[0] / found[-1] > 3


def test_heat_and_notes_are_shown_where_they_belong():
    drawing = draw(
        blend_of(2), heat={"blend.0.permute": np.float32(1), "blend": 0}, notes={"blend": "own 3 ms\nwaits 4 %"}
    )
    keys = {text.split("\n")[-1]: key for key, text in boxes(drawing).items()}
    assert re.findall(r"style (\w+) fill:(.*)", drawing.mermaid) == [
        (keys["waits 4 %"], heat_colour(0)),
        (keys["blend.0.permute"], heat_colour(1)),
    ]
    assert f'{keys["blend.0.permute"]} [fillcolor="{heat_colour(1)}"' in drawing.dot
    assert "blend\nexact union\nown 3 ms\nwaits 4 %" in boxes(drawing).values()
    for line in drawing.dot.splitlines():
        if line.startswith("  n"):
            assert "fillcolor=" in line or "->" in line or "fontcolor=" in line  # readable on any page


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"heat": {"blender": 1.0}}, ConfigurationError, "'blender', which is no node .* batch_samples, blend,"),
        ({"heat": {"blend": 1.5}}, ConfigurationError, "'blend' is 1.5"),
        ({"heat": {"blend": float("nan")}}, ConfigurationError, "'blend' is nan"),
        ({"heat": {"blend": "hot"}}, ArgumentTypeError, "'hot'"),
        ({"heat": {"blend": True}}, ArgumentTypeError, "True"),
        ({"heat": [1.0]}, ArgumentTypeError, "dict by node name"),
        ({"notes": {"nowhere": "x"}}, ConfigurationError, "'nowhere'"),
        ({"notes": {"blend": 3}}, ArgumentTypeError, "got 3"),
    ],
)
def test_heat_and_notes_that_fit_no_node_are_refused(given, error, said):
    with pytest.raises(error, match=said):
        draw(blend_of(2), **given)


def test_what_is_no_graph_is_refused():
    for look in (draw, tree):
        with pytest.raises(ArgumentTypeError, match=r"got \[1, 2\] \(list\)"):
            look([1, 2])


# Files ----------------------------------------------------------------------------------------------------------


def test_an_ending_that_is_none_is_refused_before_any_work(tmp_path):
    for name in ("graph.jpg", "graph", "graph.svg.bak"):
        with pytest.raises(ConfigurationError, match=r"\.svg, \.png, \.pdf, \.dot, \.gv, \.mmd, \.md would do"):
            draw(None, tmp_path / name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="path is a file's name"):
        draw(blend_of(2), 3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        draw(None, tmp_path / "nowhere" / "graph.mmd")  # type: ignore[arg-type]
    assert [*tmp_path.iterdir()] == []


def test_texts_are_written_as_they_are(tmp_path):
    graph = blend_of(2)
    drawing = draw(graph, tmp_path / "graph.MMD")
    assert (tmp_path / "graph.MMD").read_text() == str(drawing)
    draw(graph, str(tmp_path / "graph.md"))
    assert (tmp_path / "graph.md").read_text() == f"```mermaid\n{drawing}```\n"
    for name in ("graph.dot", "graph.gv"):
        assert draw(graph, tmp_path / name) == drawing
        assert (tmp_path / name).read_text() == drawing.dot


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, dot: "str | None") -> None:
    """A PATH on which there is nothing but a `dot` that does this, or nothing at all."""
    folder.mkdir()
    if dot is not None:
        (folder / "dot").write_text(f"#!/bin/sh\n{dot}\n")
        (folder / "dot").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))


def test_without_graphviz_the_error_says_what_to_install_and_what_needs_nothing(tmp_path, monkeypatch):
    programs(tmp_path / "bin", monkeypatch, None)
    for ending in ("svg", "png", "pdf"):
        with pytest.raises(DrawingError, match=r"apt-get install graphviz.*\.mmd") as raised:
            draw(None, tmp_path / f"graph.{ending}")  # type: ignore[arg-type] # before any work
        assert isinstance(raised.value, RuntimeError)
    draw(blend_of(2), tmp_path / "graph.mmd")
    draw(blend_of(2), tmp_path / "graph.dot")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "graph.dot", "graph.mmd"]


def test_a_dot_that_fails_or_hangs_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "graph.svg"
    path.write_text("before")
    programs(tmp_path / "bin", monkeypatch, "echo no room >&2; exit 3")
    with pytest.raises(DrawingError, match="ended with 3: no room"):
        draw(blend_of(2), path)
    assert DOT_SECONDS >= 10
    programs(tmp_path / "slow", monkeypatch, "exec /bin/sleep 60")
    monkeypatch.setitem(draw.__globals__, "DOT_SECONDS", 0.2)
    with pytest.raises(DrawingError, match=r"longer than 0.2 s.*\.mmd"):
        draw(blend_of(2), path)
    assert path.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bin", "graph.svg", "slow"]


def test_a_notebook_shows_mermaid_where_graphviz_is_missing(tmp_path, monkeypatch):
    programs(tmp_path / "bin", monkeypatch, None)
    drawing = draw(blend_of(2))
    assert drawing._repr_mimebundle_() == {
        "text/markdown": f"```mermaid\n{drawing}```\n",
        "text/plain": str(drawing),
    }
    assert repr(drawing).startswith("<Drawing of 6 boxes")


@needs_dot
def test_graphviz_draws_what_was_said(tmp_path):
    graph = blend_of(3)
    for ending, begins in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        draw(graph, tmp_path / f"graph.{ending}", heat={"blend": 0.5}, notes={"blend": "own 3 ms"})
        assert (tmp_path / f"graph.{ending}").read_bytes().startswith(begins)
    said = texts_of(ElementTree.fromstring((tmp_path / "graph.svg").read_bytes()))
    assert {"blend", "own 3 ms", "s2 33.33%", "blend.2.permute"} <= said
    bundle = draw(graph)._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg")


# Texts of any kind ------------------------------------------------------------------------------------------------


SVG = "{http://www.w3.org/2000/svg}"


def seen(lines: list[str]) -> list[str]:
    """Lines without white space, which graphviz writes in ways of its own, and those that hold nothing else."""
    return [line for line in ("".join(line.split()) for line in lines) if line]


def texts_of(svg: ElementTree.Element) -> set[str]:
    return {(text.text or "").strip().replace("\xa0", " ") for text in svg.iter(f"{SVG}text")}


NASTY = [
    *(
        '"',
        "\\",
        "\\N",
        "\\n",
        "]",
        '"]',
        "&lt;",
        "&",
        "<b>",
        "</table>>",
        ">",
        "#quot;",
        "#35;",
        ";",
        "`",
        "```",
        "{{",
        "|",
    ),
    *(
        "%%{init: {}}%%",
        "%% c",
        "--> x",
        "end",
        "style a:b#c;",
        "classDef x:#1;",
        "click n0 call f()",
        "x\n  n0 --> n0",
    ),
    *(
        "\r\n",
        "\x00",
        "\x1b[31m",
        "\udcff",
        "\ud800",
        "\u202e",
        "\u2028",
        "ﬂ°°60¶ß",
        "1. a",
        "- a",
        "# a",
        "*a*",
        "_a_",
        "$$x$$",
    ),
    *(
        "www.a.b",
        "http://a.b",
        "fa:fa-car",
        "@{ shape: x }",
        "日本",
        "é",
        "😀",
        " ",
        "    x",
        "",
        "<script>alert(1)</script>",
    ),
]
hostile = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=6).map("".join)

LINE = re.compile(
    r"flowchart (TB|LR)"
    r'|  \w+\["[^"\[\]{}<>|`\\$*]*(<br/>[^"\[\]{}<>|`\\$*]*)*"\]:::(source|node|folded)'
    r'|  \w+ -->(\|"[^"\[\]{}<>|`\\$*]+"\|)? \w+'
    r"|  classDef \w+ [\w:#,-]+|  style \w+ fill:#[0-9a-f]{6}"
)


def hostile_graph(where: str, source: str, label: str):
    graph = Numbers(source, 10).blend(Numbers(f"{source}+", 10)).batch_samples(4) if source else blend_of(2)
    with_wrapper(graph, Labelled(label))
    stream = Reading(where).map(same)
    with_wrapper(stream, Labelled(label))
    return graph, stream


@given(hostile, hostile, hostile, hostile)
def test_no_text_breaks_out_of_its_place(where, source, label, note):
    for graph in hostile_graph(where, source, label):
        names = node_names(graph)
        plain = draw(graph)
        drawing = draw(graph, notes=dict.fromkeys(names.values(), note), heat=dict.fromkeys(names.values(), 0.5))
        for line in drawing.mermaid.splitlines():
            assert LINE.fullmatch(line), line
            text = re.sub(r"<br/>|#\d+;", "", line) if '"' in line else ""
            assert not re.search("[#;]", text), line
            assert not re.search(r"(style|classDef).*:\S*#.*;", line), line  # of which Mermaid takes the end away
        assert len(drawing.mermaid.splitlines()) == len(plain.mermaid.splitlines()) + len(names)
        lines = drawing.dot.splitlines()
        assert len(lines) == len(plain.dot.splitlines())
        labels = dict(re.findall(r"^  (n\d+) \[fillcolor=\S+, label=<(.*)>\]$", drawing.dot, re.MULTILINE))
        assert {key: read_dot(label) for key, label in labels.items()} == boxes(drawing)
        drawing.dot.encode(), drawing.mermaid.encode()  # no half of a pair
        for text in (drawing.dot, drawing.mermaid, tree(graph)):
            assert all(line.isprintable() for line in text.split("\n"))
        assert len(tree(graph).split("\n")) == len(names)


@given(st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable() and " " not in text))
def test_what_can_be_seen_is_shown_as_it_was(note):
    (box,) = boxes(draw(IterableWrapper([]), notes={"iterablewrapper": note})).values()
    assert box == f"IterableWrapper\n0 items\n{note}\niterablewrapper"


@needs_dot
@settings(max_examples=25)
@given(hostile, hostile, hostile, hostile)
def test_graphviz_reads_whatever_stands_in_a_label(where, source, label, note):
    for graph in hostile_graph(where, source, label):
        drawing = draw(graph, notes=dict.fromkeys(node_names(graph).values(), note))
        done = subprocess.run(["dot", "-Tsvg"], input=drawing.dot.encode(), capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        svg = ElementTree.fromstring(done.stdout)
        drawn = [group for group in svg.iter(f"{SVG}g") if group.get("class") == "node"]
        lines = {group.findtext(f"{SVG}title"): [t.text or "" for t in group.iter(f"{SVG}text")] for group in drawn}
        said = {
            box.key: [box.title, *box.body, *(f"[{label}]" for label in box.labels), box.name] for box in drawing.boxes
        }
        assert {key: seen(found) for key, found in lines.items()} == {key: seen(found) for key, found in said.items()}
        assert sum(group.get("class") == "edge" for group in svg.iter(f"{SVG}g")) == len(drawing.arrows)
        assert not [*svg.iter(f"{SVG}script")]
