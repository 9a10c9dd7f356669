"""A graph is written down and built again as it was; what is not a recipe is refused with its place."""

import copy
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import nodes, sources  # noqa: F401  # sources is a fixture

from contract import all_same
from tokenpipe.datapipes import (
    TokenFileWriter,
    TokenReader,
    Topology,
    linear_ramp,
    load_nanotron,
    load_recipe,
    write_recipe,
)
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    BatchSizeError,
    ConfigurationError,
    RecipeError,
    TokenFileError,
    TokenpipeError,
    WeightsError,
)
from tokenpipe.datapipes.plan import overlap
from tokenpipe.reading_services import DataLoader2

SOAK = bool(os.environ.get("TOKENPIPE_SOAK"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four token files of 200 to 500 windows of 8."""
    path = tmp_path_factory.mktemp("tokens")
    for i, name in enumerate(["prose", "code", "books", "no"]):
        np.save(path / f"{name}.npy", (np.arange(1601 + 800 * i, dtype=np.uint16) * 7 + i) % 5000)
    with TokenFileWriter(path / "web.tok", vocab_size=5000) as writer:
        for document in range(60):
            writer.write((np.arange(40 + document) * 13 + document) % 5000)
    return path


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


# Round trips ------------------------------------------------------------------------------------------------


def test_every_node_writes_a_recipe_that_builds_it_again(sources, tmp_path, subtests):  # noqa: F811
    for name, graph in nodes(*sources, tmp_path).items():
        with subtests.test(name):
            if "Mapper" in name or name == "TokenReader of a part":
                with pytest.raises(RecipeError, match=r"a function|changed after it was built"):
                    graph.recipe()
                continue
            text = graph.recipe()
            again = load_recipe(text, topology_of(graph))
            assert_same_graph(again, graph)
            assert again.recipe() == text
            assert len({id(node) for node in all_nodes(again)}) == len({id(node) for node in all_nodes(graph)})


weight = st.one_of(st.integers(1, 9), st.floats(1e-3, 1e3))


@st.composite
def graphs(draw, folder):
    """Sources of several kinds under blends of blends, and a trunk above."""
    seeds = st.integers(0, 2**63 - 2)

    def reader(stem, name):
        path = folder / f"{stem}.npy"
        paths = draw(st.sampled_from([path, str(path), [path, path]]))
        return TokenReader(paths, draw(st.sampled_from([None, "uint16", np.uint16])), name)

    def source(name):
        if name == "web":
            node = TokenReader(folder / "web.tok", name=draw(st.sampled_from([None, "web", "crawl"])))
            node = node.select_documents(
                share=(0.1, draw(st.floats(0.5, 1))), seed=3, name=draw(st.sampled_from(["", "w"]))
            )
        else:
            node = reader(name, draw(st.sampled_from([None, name])))
        sliced = draw(st.sampled_from([{}, {"unit": 16}]))
        node = node.slice_sequences(8, **sliced)
        window = draw(st.sampled_from([{}, {"window": 16}])) if not sliced else {}
        return node.permute(draw(seeds), **window) if draw(st.booleans()) else node

    def blended(children, name):
        names = [child.name for child in children]
        options = {}
        if draw(st.booleans()):
            shares = [draw(weight) for _ in names]
            options["weights"] = draw(
                st.sampled_from([shares, np.array(shares), dict(zip(names, shares, strict=True))])
            )
            if draw(st.booleans()):
                options["temperature"] = draw(st.floats(1, 4))
        elif draw(st.booleans()):
            options["repeats"] = {names[0]: draw(st.floats(0.5, 3))}
        if draw(st.booleans()):
            options["max_epochs"] = draw(st.sampled_from([3, 2.5, {names[-1]: 2}]))
            options["on_exhausted"] = draw(st.sampled_from(["stop", "renormalise", "error"]))
        if draw(st.booleans()):
            one = [draw(weight) for _ in names]
            options["schedule"] = draw(
                st.sampled_from([[(40, one)], [(0, one), (90, dict(zip(names, one, strict=True)))],
                                 linear_ramp(10, 60, [1] * len(names), one, pieces=5)])
            )  # fmt: skip
        return children[0].blend(*children[1:], name=name, **options)

    names = draw(
        st.lists(st.sampled_from(["prose", "code", "books", "no", "web"]), min_size=1, max_size=5, unique=True)
    )
    children = [source(name) for name in names]
    if len(children) > 2 and draw(st.booleans()):
        inner = [children.pop() for _ in range(2)]
        children.append(blended(inner, "1e3") if draw(st.booleans()) else inner[0].concat(inner[1], name="off"))
    graph = blended(children, draw(st.sampled_from(["", "run"])))
    if draw(st.booleans()):
        graph = graph.limit(samples=draw(st.integers(64, 200)))
    if draw(st.booleans()):
        graph = graph.shard_ranks(Topology(1, 2), seed=draw(st.one_of(st.none(), seeds)))
    return graph.batch_samples(2, global_batch_size=draw(st.sampled_from([4, [(0, 4), (2, 8)]]))).collate_causal_lm()


@given(st.data())
@settings(max_examples=40 if not SOAK else 2000)
def test_any_graph_is_built_again_as_it_was_from_what_it_wrote(folder, data):
    graph = data.draw(graphs(folder))
    near = data.draw(st.booleans())
    text = write_recipe(graph, folder if near else None)
    assert (str(folder) in text) != near
    again = load_recipe(text, topology_of(graph), folder=folder)
    assert_same_graph(again, graph, items=4)
    as_json = json.dumps(yaml.safe_load(text))
    assert load_recipe(as_json, topology_of(graph), folder=folder).recipe(folder if near else None) == text, (
        "JSON is YAML"
    )


def test_a_run_goes_on_from_its_recipe_as_from_its_graph(folder):
    def graph():
        prose = TokenReader(folder / "prose.npy").slice_sequences(8).permute(seed=7)
        code = TokenReader(folder / "code.npy").slice_sequences(8).permute(seed=7)
        blend = prose.blend(code, weights=[3, 1], schedule=linear_ramp(20, 90, [3, 1], [1, 3]))
        return blend.batch_samples(2, global_batch_size=4).collate_causal_lm(sample_numbers=True)

    loader = DataLoader2(graph())
    seen = [batch for batch, _ in zip(loader, range(20), strict=False)]
    first = [batch for batch, _ in zip(DataLoader2(load_recipe(graph().recipe())), range(20), strict=False)]
    assert all_same(seen, first)
    state = loader.state_dict()
    rest = DataLoader2.from_state(state, load_recipe(graph().recipe()))
    assert all_same(
        (b for b, _ in zip(loader, range(9), strict=False)), (b for b, _ in zip(rest, range(9), strict=False))
    )


def test_a_recipe_lies_beside_its_files_and_moves_with_them(sources, tmp_path):  # noqa: F811
    graph = nodes(*sources, tmp_path)["SampleBatcher"]
    text, fingerprint = graph.recipe(folder=tmp_path), graph.fingerprint()
    assert str(tmp_path) not in text
    moved = tmp_path.rename(tmp_path.parent / "moved")
    (moved / "run.yaml").write_text(text)
    assert load_recipe(moved / "run.yaml", Topology(1, 2)).fingerprint() == fingerprint
    moved.rename(tmp_path)


def test_what_two_nodes_share_is_shared_again(folder):
    evaluation = TokenReader(folder / "prose.npy").slice_sequences(8).once().batch_samples(2).collate_causal_lm()
    again = load_recipe(evaluation.zip(evaluation, evaluation).recipe())
    assert again.children[0] is again.children[1] is again.children[2]


def test_two_recipes_of_one_reader_hold_out_what_the_other_trains_on(folder):
    def text(name, share):
        return f"""
tokenpipe: 1
graph:
  - blend:
      sources:
        {name}: [{{read: {{paths: web.tok}}}}, {{select_documents: {{share: {share}, seed: 7}}}}]
      each: [slice_sequences: {{sequence_length: 8}}]
"""

    train = load_recipe(text("crawl", [0.2, 1]), folder=folder)
    held = load_recipe(text("held out", [0, 0.2]), folder=folder)
    assert (train.children[0].name, held.children[0].name) == ("crawl", "held out")
    chosen = [graph.children[0].datapipe for graph in (train, held)]
    assert sum(node.documents_chosen for node in chosen) == 60
    assert not overlap(train, held)


def test_a_graph_that_a_journal_changed_writes_no_recipe_of_something_else(folder):
    def source(name):
        return TokenReader(folder / f"{name}.npy").slice_sequences(8)

    blend = source("prose").blend(source("code"), weights=[1, 1])
    grown = blend.with_sources([*blend.children, source("books")], (*blend.weights, 0), (None,) * 3, False)
    assert load_recipe(blend.with_changes([]).with_children(*blend.children).recipe()).weights == blend.weights
    with pytest.raises(RecipeError, match="changed after it was built"):
        grown.batch_samples(2).recipe()


# What a recipe says --------------------------------------------------------------------------------------------

RUN = """
tokenpipe: 1
graph:
  - blend:
      sources:
        prose: {paths: prose.npy}
        code: {paths: [code.npy]}
        no:
          - read: {paths: no.npy}
      each:
        - slice_sequences: {sequence_length: 8}
        - shuffle: {seed: 7}          # torch's names are aliases here too
      weights: {prose: 0.5, code: 0.5, no: 0}
      schedule:
        - {step: 2, weights: {prose: 1, code: 0, no: 0}}
        - {step: 4, until: 8, weights: {prose: 0, code: 0, no: 1e0}, pieces: 4}
        - {step: 8, until: 10, weights: {prose: 1, code: 0, no: 0}, pieces: 2}
        - {sample: 100, weights: {prose: 1, code: 1, no: 2}}
  - shard_ranks: {seed: 7}
  - batch: {micro_batch_size: 2, global_batch_size: [[0, 4], [4, 8]]}
  - collate_causal_lm:
"""


def test_planned_changes_are_said_by_step_and_hold_by_sample(folder):
    blend = load_recipe(RUN, folder=folder).datapipe.datapipe.datapipe
    assert [change.number for change in blend.schedule] == [8, 16, 24, 32, 40, 48, 56, 64, 100]
    ramp = linear_ramp(16, 48, [1, 0, 0], [0, 0, 1], pieces=4)[:-1] + linear_ramp(
        48, 64, [0, 0, 1], [1, 0, 0], pieces=2
    )
    assert [(c.number, c.weights) for c in blend.schedule[1:-1]] == [(n, blend.integer_weights(w)) for n, w in ramp]
    source, _ = blend.route(np.arange(8, 16))
    assert set(source.tolist()) == {0}
    assert blend.counts(64)[2] - blend.counts(16)[2] == 16 + 8


def test_the_topology_and_the_micro_batch_come_from_the_machine(folder):
    graph = load_recipe(RUN, Topology(1, 2), micro_batch_size=1, folder=folder)
    assert graph.topology == Topology(1, 2)
    assert graph[0]["input_ids"].shape == (1, 8)
    assert graph.fingerprint() == load_recipe(RUN, folder=folder).fingerprint()
    with pytest.raises(BatchSizeError, match=r"line 20: graph\[2\]"):
        load_recipe(RUN, Topology(1, 3), folder=folder)


WRONG = {
    "permutes: {seed: 7}": "did you mean 'permute'",
    "permute: {sed: 7}": "line 9: .*no argument of permute is called 'sed'. did you mean 'seed'",
    "permute: 7": r"permute: \{seed: …\}",
    "permute: {}": "permute needs 'seed'",
    "permute: {seed: 7, seed: 8}": "'seed' stands twice",
    "permute: {seed: !!python/object/apply:os.system ['true']}": "tags",
    "map: {fn: print}": "takes a function",
    "shard_ranks: {topology: {dp_rank: 0}}": "belongs to the machine",
    "skip: {samples: 3}\n        permute: {seed: 3}": "one name; got 2 keys",
    "read: {paths: prose.npy}": "begins a chain",
    "use: nothing": "use begins a chain",
    "blend: {sources: {a: {paths: prose.npy}}}": "begins a chain",
    "blend: {each: [permute]}": "there are none",
    "5": "a step is a node's name",
    "skip: {samples: 1": "no YAML",
    "skip: {samples: " + "9" * 100 + "}": "digits",
    "skip: {samples: 12:30:00}": "'12:30:00'",
    "skip: {samples: 010}": "'010'",
    "skip: {? [a] : 3}": "a key must be",
    "limit: {steps: *gone}": "undefined alias",
    '"\\ud800"': "no Unicode",
    "slice_sequences: {sequence_length: 8}": "TokenReader",
}


@pytest.mark.parametrize("step", WRONG)
def test_a_wrong_step_is_refused_with_its_place_and_what_would_do(folder, step):
    text = (
        "tokenpipe: 1\ngraph:\n  - blend:\n      sources:\n        prose: {paths: prose.npy}\n      each:\n"
        f"      - slice_sequences: {{sequence_length: 8}}\n\n      - {step}\n"
    )
    with pytest.raises((RecipeError, ArgumentTypeError), match=WRONG[step]) as raised:
        load_recipe(text, folder=folder)
    assert re.match("recipe, line [0-9]+: ", str(raised.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "empty"),
        ("\n- a", "a mapping was expected"),
        ("tokenpipe: 2\ngraph: []", "tokenpipe: 1"),
        ("graph: []\n", "tokenpipe: 1"),
        ("tokenpipe: true\ngraph: []", "tokenpipe: 1"),
        ("tokenpipe: 1\n", "'graph' is missing"),
        ("tokenpipe: 1\ngraph: []", "at least one step"),
        ("tokenpipe: 1\ngrahp: []", "did you mean 'graph'"),
        ("tokenpipe: 1\ngraph: {use: a}\nshared: {a: {use: a}}", "uses itself"),
        ("tokenpipe: 1\ngraph: {use: a}\nshared: {b: {use: a}}", "nothing shared"),
        ("tokenpipe: 1\ngraph: {use: a}\nshared: [1]", "mapping of chains"),
        ("tokenpipe: 1\ngraph: [permute: {seed: 1}]", "nothing to take from"),
        ("tokenpipe: 1\ngraph: &a [*a]", "nested"),
        ("tokenpipe: 1\ngraph: " + "[" * 900, "nested too deeply"),
        ("tokenpipe: 1\ngraph: " + "[" * 80 + "]" * 80, "nested more than"),
        ("tokenpipe: 1\na: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)), "alias"),
        ("a: 1\n---\nb: 2\n", "no YAML"),
        ("a: \x00\n", "no YAML"),
        ('a: "\\U00110000"\n', "no YAML"),
        ("# " + "x" * (1 << 20) + "\n", "at most"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(text)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("[{step: 2}]", "an entry has weights"),
        ("[{weights: {prose: 1}}]", "one of step and sample"),
        ("[{step: 2, sample: 3, weights: {prose: 1}}]", "one of step and sample"),
        ("[{step: 2, weight: {prose: 1}}]", "did you mean 'weights'"),
        ("[{step: 2, weights: {prose: 1}, pieces: 3}]", "it has until"),
        ("[{step: 2, weights: {prose: 1}, until: 2}]", "stop must be above"),
        ("[{step: 2, weights: {prose: 1}, until: 3, pieces: 1000000}]", "at most"),
        ("[{step: 2, weights: {prose: 1}}, {step: 1, weights: {prose: 1}}]", "begins at sample 4"),
        ("[{step: 2.5, weights: {prose: 1}}]", "must be an integer"),
        ("[{step: 2, weights: {prosa: 1}}]", "unknown: 'prosa'"),
        ("[[2, [1]]]", "was expected"),
        ("{step: 2}", "a list"),
    ],
)
@pytest.mark.parametrize("above", ["batch_samples: {micro_batch_size: 2, global_batch_size: 4}"])
def test_a_plan_that_cannot_be_followed_is_refused(folder, schedule, message, above):
    text = (
        "tokenpipe: 1\ngraph:\n- blend:\n    sources: {prose: {paths: prose.npy}}\n    each: [slice_sequences: "
        f"{{sequence_length: 8}}]\n    weights: {{prose: 1}}\n    schedule: {schedule}\n- {above}\n"
    )
    with pytest.raises(TokenpipeError, match=message):
        load_recipe(text, folder=folder)


@pytest.mark.parametrize(
    ("above", "message"),
    [
        ("limit: {samples: 5}", "need a batch_samples"),
        ("permute: {seed: 5}", "plan its changes by sample"),
        ("batch_samples: {micro_batch_size: 2}", "need a global_batch_size"),
        ("batch_samples: {micro_batch_size: 2, global_batch_size: [[1, 2]]}", "begin at 0"),
    ],
)
def test_steps_need_batches_that_the_recipe_decides(folder, above, message):
    schedule = "[{step: 2, weights: {prose: 1}}]"
    text = (
        "tokenpipe: 1\ngraph:\n- blend:\n    sources: {prose: {paths: prose.npy}}\n    each: [slice_sequences: "
        f"{{sequence_length: 8}}]\n    weights: {{prose: 1}}\n    schedule: {schedule}\n- {above}\n"
    )
    with pytest.raises(TokenpipeError, match=message):
        load_recipe(text, folder=folder)
    assert load_recipe(text.replace("step: 2", "sample: 2").replace("[[1, 2]]", "4"), folder=folder)


def test_what_the_nodes_refuse_keeps_its_type_and_gets_its_place(folder, tmp_path):
    with pytest.raises(WeightsError, match=r"recipe, line 4: graph\[0\].blend: weights must name each source"):
        load_recipe(RUN.replace("code: 0.5, no: 0}", "code: 0.5, na: 0}"), folder=folder)
    with pytest.raises(TokenFileError):
        load_recipe(RUN, folder=tmp_path)
    with pytest.raises(RecipeError, match="cannot open"):
        load_recipe(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="UTF-8"):
        (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\n")
        load_recipe(tmp_path / "run.yaml")
    with pytest.raises(ArgumentTypeError):
        load_recipe(5)
    with pytest.raises(RecipeError, match="plain values only"):
        load_recipe({"tokenpipe": 1, "graph": [print]})
    with pytest.raises(RecipeError, match="no shard_ranks"):
        load_recipe(RUN.replace("  - shard_ranks: {seed: 7}\n", ""), Topology(0, 2), folder=folder)
    with pytest.raises(RecipeError, match="no batch_samples takes it"):
        load_recipe({"tokenpipe": 1, "graph": {"paths": str(folder / "no.npy")}}, micro_batch_size=2)


def test_a_graph_that_no_recipe_can_hold_is_refused(folder):
    node = TokenReader(folder / "prose.npy").slice_sequences(8)
    with pytest.raises(RecipeError, match="a function"):
        node.map(abs).recipe()
    with pytest.raises(ArgumentTypeError):
        write_recipe([1])


def test_the_recipe_in_the_readme_is_the_graph_in_the_readme(tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    (np.arange(50_000) % 1000).astype("<u2").tofile("prose.bin")
    for i in range(2):
        with TokenFileWriter(f"code-{i}.tok", vocab_size=1000) as writer:
            writer.write(np.arange(10_000) % 1000)
    program = re.search(r"^prose = .*?\n\)\n", text, re.S | re.M).group()
    scope = {"TokenReader": TokenReader, "Topology": Topology}
    exec(program, scope)
    Path("run.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, re.S).group(1))
    graph = load_recipe("run.yaml", Topology(dp_rank=2, dp_size=8))
    assert_same_graph(graph, scope["graph"], items=1)


def test_the_recipes_in_the_manual_load(folder, tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
    monkeypatch.chdir(tmp_path)
    (np.arange(50_000) % 1000).astype("<u2").tofile("prose.bin")
    for name in ("code-0.tok", "code-1.tok"):
        with TokenFileWriter(name, vocab_size=1000) as writer:
            writer.write(np.arange(10_000) % 1000)
    for name in ("web", "code", "math"):
        np.save(f"{name}.npy", np.arange(5_000, dtype=np.uint16))
    first, second = re.findall(r"```yaml\n(.*?)```", text, re.S)
    planned = load_recipe(first).datapipe.datapipe.datapipe
    assert [planned.schedule[i].number for i in (0, 1, -1)] == [2_560_000, 5_120_000, 7_680_000]
    assert load_recipe(second).steps.size(0) == 256


NASTY = [None, True, -1, 0, 2**63, 2**200, 1e999, float("nan"), -0.5, "", "a", "\n", "../..", "/", "1e3", [], [[]], {},
         {"a": {}}, [1, 2, 3], {"paths": "prose.npy"}, "read", "use", {"use": "a"}, "blend", {"blend": None}, "\x00",
         "é" * 300, [None], {"": 0}]  # fmt: skip


ODD = ["", "", "\n", " ", "  - ", ": ", "{", "}", "[", "]", "&a ", "*a", "!!python/name:os.system ", "!x ", "'", '"',
       "#", "|", ">", "%", "@", "\t", "? ", "<<: ", "\x07", "\ud800", "~"]  # fmt: skip


def places_in(value, place=()):
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*place, key))


def mutated_values(source, rng):
    root = [copy.deepcopy(source)]
    for _ in range(rng.randint(1, 3)):
        *above, last = (0, *rng.choice(list(places_in(root[0]))))
        holder = root
        for key in above:
            holder = holder[key]
        kind = rng.random()
        if kind < 0.6:
            holder[last] = copy.deepcopy(rng.choice(NASTY))
        elif kind < 0.8 and isinstance(holder, dict):
            holder[rng.choice(["x", "name", "seed", "sources", last])] = holder.pop(last)
        elif isinstance(holder, list) and holder is not root:
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice([holder[last], *NASTY])))
    return root[0]


def mutated_text(text, rng):
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        new = rng.choice(ODD)
        text = text[:at] + new + text[at + rng.choice([0, 0, 1, 5]) :]
        if not text:
            break
    return text


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happened_to_a_recipe_only_our_own_errors_come_of_it(folder, seed, monkeypatch):
    monkeypatch.chdir(folder)
    rng = random.Random(seed)
    originals = [RUN, yaml.safe_dump(nanotron_config())]
    loaded = 0
    for number in range(1000 if SOAK else 30):
        text = originals[number % 2]
        recipe = mutated_text(text, rng) if rng.random() < 0.5 else mutated_values(yaml.safe_load(text), rng)
        try:
            load_recipe(recipe)
            loaded += 1
        except TokenpipeError as error:
            assert "cannot be built" not in str(error), (seed, number, recipe)
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}: {recipe!r}") from error
    assert loaded, "some mutations leave a recipe"


# Nanotron ------------------------------------------------------------------------------------------------------


def nanotron_config(*datasets, key="dataset_folder", **tokens):
    datasets = datasets or ("prose.npy", ["prose.npy", "code.npy"], {"code.npy": 0.2, "no.npy": 0.8})
    return {
        "general": {"project": "x", "seed": 42},
        "data_stages": [
            {
                "name": f"stage {i}",
                "start_training_step": 1 + 10 * i,
                "data": {"seed": 100 + i, "num_loading_workers": 1, "dataset": {key: dataset}},
            }
            for i, dataset in enumerate(datasets)
        ],
        "parallelism": {"dp": 2, "tp": 4, "pp": 1},
        "tokens": {
            "sequence_length": 8,
            "micro_batch_size": 2,
            "batch_accumulation_per_replica": 4,
            "train_steps": 100,
            **tokens,
        },
    }


@pytest.mark.parametrize("key", ["dataset_folder", "dataset_path"])
def test_nanotrons_stages_are_phases_of_one_blend(folder, key):
    graph = load_nanotron(nanotron_config(key=key), Topology(1, 4), folder=folder)
    assert graph.steps.size(0) == 2 * 4 * 2
    assert graph.topology == Topology(1, 4)
    blend = graph.datapipe.datapipe.datapipe
    assert blend.sources == ("prose", "code", "no")
    assert [change.number for change in blend.schedule] == [160, 320]
    prose, code, _ = [len(child) for child in blend.children]
    counts = np.diff([blend.counts(n) for n in (0, 160, 320, 480)], axis=0)
    assert counts[0].tolist() == [160, 0, 0]
    assert abs(counts[1] - 160 * np.array([prose, code, 0]) / (prose + code)).max() <= 2
    assert abs(counts[2] - 160 * np.array([0, 0.2, 0.8])).max() <= 2


def test_a_source_of_several_stages_goes_on_where_it_was_and_keeps_its_seed(folder):
    graph = load_nanotron(nanotron_config("prose.npy", {"./prose.npy": 1, "code.npy": 1}), folder=folder)
    rows = [(record.source, record.token) for step in range(20) for record in DataLoader2(graph).contents(step=step)]
    prose = [sample for source, sample in rows if source == "prose"]
    assert len(prose) == 240
    assert len(set(prose[:200])) == 200, "nothing comes again before the source is through"
    assert [node.seed for node in all_nodes(graph) if node.functional_name == "permute"] == [100, 101]


def test_one_list_without_weights_is_the_exact_union(folder):
    graph = load_nanotron(nanotron_config(["prose.npy", "code.npy"]), folder=folder)
    blend = graph.datapipe.datapipe.datapipe
    assert blend.exact
    assert not blend.schedule
    weighted = nanotron_config(["prose.npy", "code.npy"])
    weighted["data_stages"][0]["data"]["dataset"]["dataset_weights"] = [0.9, 0.1]
    assert load_nanotron(weighted, folder=folder).datapipe.datapipe.datapipe.share(0) == pytest.approx(0.9)


def test_stages_may_stand_in_any_order_and_a_folder_is_one_source(folder, tmp_path):
    several = tmp_path / "wiki"
    several.mkdir()
    for i in range(2):
        np.save(several / f"{i}.npy", np.arange(500, dtype=np.uint16))
    config = nanotron_config(str(several), str(folder / "prose.npy"))
    expected = load_nanotron(config)
    config["data_stages"].reverse()
    found = load_recipe(yaml.safe_dump(config))
    assert found.fingerprint() == expected.fingerprint()
    assert [len(node.files) for node in all_nodes(found) if isinstance(node, TokenReader)] == [2, 1]
    (several / "notes.txt").write_text("not tokens")
    with pytest.raises(TokenFileError, match=r"data_stages.*'notes\.txt'"):
        load_recipe(config)


def test_raw_files_take_the_token_size_that_the_config_says(token_file):
    config = nanotron_config(token_file("raw_input_ids.npy", 500))
    with pytest.raises(ConfigurationError, match="dtype"):
        load_nanotron(config)
    assert load_nanotron(config, dtype="uint16")
    config["data_stages"][0]["data"]["dataset"]["token_size_in_bytes"] = 2
    assert load_recipe(config).fingerprint() == load_nanotron(config, dtype="uint16").fingerprint()


def test_a_recipe_of_a_nanotron_config_is_the_same_run(folder):
    graph = load_nanotron(nanotron_config(), folder=folder)
    assert_same_graph(load_recipe(graph.recipe()), graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["tokens"].pop("micro_batch_size"), "tokens: the key 'micro_batch_size' is missing"),
        (lambda c: c.pop("tokens"), "tokens: a mapping"),
        (lambda c: c["parallelism"].update(dp=0), "dp must be at least 1"),
        (lambda c: c["data_stages"].clear(), "a list of stages"),
        (lambda c: c["data_stages"][0].update(start_training_step=2), "start_training_step 1"),
        (lambda c: c["data_stages"][0].update(start_training_step=11), "two stages"),
        (lambda c: c["data_stages"][1].update(sequence_length=16), "a graph has one"),
        (lambda c: c["data_stages"][1].update(start_step=16), "did you mean 'start_training_step'"),
        (lambda c: c["data_stages"][1]["data"].update(dataset=None), "token files"),
        (lambda c: c["data_stages"][1]["data"].update(dataset={"hf_dataset_or_datasets": "x"}), "tokenize text first"),
        (lambda c: c["data_stages"][1]["data"]["dataset"].update(dataset_path="x"), "one of"),
        (lambda c: c["data_stages"][1]["data"]["dataset"].update(dataset_max_tokens=[1]), "cannot be followed"),
        (lambda c: c["data_stages"][1]["data"]["dataset"].update(dataset_weights=[1]), "a list of 2 weights"),
        (lambda c: c["data_stages"][2]["data"]["dataset"].update(dataset_weights=[1, 1]), "weights stand here"),
        (lambda c: c["data_stages"][2]["data"]["dataset"]["dataset_folder"].update({"no.npy": -1}), "at least 0"),
        (lambda c: c["data_stages"][1]["data"]["dataset"].update(dataset_folder=["a", "./a"]), "twice"),
        (lambda c: c["data_stages"][1]["data"]["dataset"].update(token_size_in_bytes=3), "2 or 4"),
        (lambda c: c["data_stages"][1]["data"].update(seed=-1), "seed must be at least 0"),
    ],
)
def test_a_nanotron_config_that_cannot_be_followed_is_refused(folder, change, message):
    config = nanotron_config()
    change(config)
    with pytest.raises(TokenpipeError, match=message):
        load_recipe(config, folder=folder)


@pytest.mark.parametrize("weights", [{"prose": 0.7, "web": 0.3}, [0.7, 0.3], None, "tempered"])
def test_a_loader_writes_the_recipe_of_a_changed_run_and_tells_its_changes(folder, tmp_path, weights):
    (np.arange(1500, dtype=np.uint16) % 5000).tofile(tmp_path / "raw.bin")
    (np.arange(500, dtype=np.uint16) % 5000).tofile(tmp_path / "more.bin")
    prose = TokenReader(tmp_path / "raw.bin", dtype="uint16", name="prose").slice_sequences(8).permute(seed=1)
    web = TokenReader(folder / "web.tok").slice_sequences(8).permute(seed=1)
    mixture = {"temperature": 2.0} if weights == "tempered" else {"weights": weights}
    loader = DataLoader2(prose.blend(web, **mixture, max_epochs=9).batch_samples(4).collate_causal_lm())
    items = iter(loader)
    changes = [
        lambda: loader.grow_source("prose", tmp_path / "more.bin", dtype="uint16"),
        lambda: loader.add_source(
            TokenReader(folder / "code.npy").slice_sequences(8).permute(seed=1), {"prose": 2, "web": 1, "code": 1}
        ),
        lambda: loader.exclude("web", documents=3),
        lambda: loader.jump(3),
        lambda: loader.update_global_batch_size(8),
    ]
    for change in changes:
        next(items)
        change()
    (tmp_path / "run.yaml").write_text(loader.recipe(tmp_path))
    again = DataLoader2.from_state(loader.state_dict(), load_recipe(tmp_path / "run.yaml"))
    assert again.state_dict() == loader.state_dict()
    assert all_same(next(iter(again)), next(items))
    first, stop = loader.document_range("web", 3)
    assert loader.journal == again.journal
    assert loader.journal == [
        "step 1: source 'prose' has 2 files, 1 before",
        "step 2: weights prose 50.0%, web 25.0%, code 25.0%",
        f"step 3: rows with tokens {first} … {stop - 1} of source 'web' are masked",
        "step 4: a jump over 12 samples",
        "step 5: steps of 8 samples",
    ]
