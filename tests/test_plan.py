"""The rehearsal against the walk: what a plan says of each source is what the steps then hold."""

import dataclasses
import json
import math
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

from tokenpipe.cli.main import main
from tokenpipe.datapipes import (
    MAX_NUMBER,
    IndexedDataPipe,
    TokenReader,
    Topology,
    linear_ramp,
    load_recipe,
    write_recipe,
)
from tokenpipe.datapipes.errors import (
    ConfigurationError,
    LoaderError,
    OutOfRangeError,
    SourceExhaustedError,
    TokenpipeError,
)
from tokenpipe.datapipes.plan import Plan, plan
from tokenpipe.datapipes.plan.counts import SourceCounts
from tokenpipe.reading_services import DataLoader2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source("a", samples): shuffled windows of 4 tokens of a file of its own."""
    folder = tmp_path_factory.mktemp("sources")

    def make(name: str, samples: int = 50, permuted: bool = True, dtype: str = "uint16") -> IndexedDataPipe:
        path = folder / f"{name}-{samples}-{dtype}.bin"
        if not path.exists():
            np.arange(samples * 4 + 1, dtype=dtype).tofile(path)
        node = TokenReader(path, dtype=dtype, name=name).slice_sequences(4)
        return node.permute(seed=7) if permuted else node

    return make


def walked(loader: DataLoader2, first: int, steps: int) -> "list[list]":
    """contents() of each step from `first` on, until the run's end."""
    found = []
    for step in range(first, first + steps):
        try:
            found.append(loader.contents(step))
        except (OutOfRangeError, SourceExhaustedError):
            break
    return found


def check_against_walk(loader: DataLoader2, steps: int) -> Plan:
    """Every count of the plan, by walking all steps from 0 on."""
    found = loader.plan(steps)
    before = walked(loader, 0, found.first_step)
    here = walked(loader, found.first_step, steps)
    records = [record for step in here for record in step]
    assert (found.steps, found.samples) == (len(here), len(records))
    assert found.tokens == len(records) * 4
    samples = Counter(record.source for record in records)
    assert {s.name: s.samples for s in found.sources if s.samples} == dict(samples)
    lengths = {leaf.node.name: leaf.length for leaf in SourceCounts(loader.datapipe).leaves}
    for s in found.sources:
        repeats = sum(record.epoch > 0 for record in records if record.source == s.name)
        assert s.repeats == repeats, s
        seen: list[int] = []  # (step, …) by sample, from the run's first on
        for step, rows in enumerate([*before, *here]):
            seen += [step] * sum(record.source == s.name for record in rows)
        length = lengths[s.name]
        assert s.exhausted_step == (seen[length - 1] if len(seen) >= length else None), s
        assert math.isclose(s.epochs_after, len(seen) / length), s
        assert math.isclose(s.epochs_before, (len(seen) - s.samples) / length), s
        assert s.unseen == max(0, length - len(seen))
        assert s.share == pytest.approx(s.samples / max(1, len(records)))
    assert sum(b.samples for b in found.batches) == found.samples
    by_size = Counter((len(rows), loader.micro_batches(rows[0].step)) for rows in here)
    if not loader.datapipe.finite or found.steps == found.asked_steps:
        assert sum(b.steps for b in found.batches) == sum(by_size.values())
    for b in found.batches:
        rows = [len(rows) for rows in here if b.first_step <= rows[0].step < b.first_step + b.steps]
        assert sum(rows) == b.samples
        assert set(rows[:-1]) <= {b.global_batch_size}
    if found.steps < steps:
        assert found.end is not None
    assert json.loads(json.dumps(found.as_json())) == found.as_json()
    ends = found.timeline
    for at, step in zip(ends.tokens, ends.step, strict=True):
        upto = Counter(record.source for record in records[: at // 4])
        index = ends.tokens.index(at)
        assert {name: row[index] for name, row in ends.samples.items() if row[index]} == dict(upto)
        assert found.first_step < step <= found.first_step + found.steps
    return found


NAMES = "abcd"
ratios = st.lists(st.sampled_from([0, 1, 2, 3, 7, 0.05]), min_size=4, max_size=4)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shape=st.sampled_from(["weighted", "union", "repeats", "nested", "concat", "grown"]),
    ratio=ratios,
    cap=st.sampled_from([None, 1, 1.5, 3]),
    exhausted=st.sampled_from(["stop", "renormalise", "error"]),
    schedule=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=3),
    dp=st.integers(1, 3),
    limit=st.one_of(st.none(), st.integers(6, 300)),
    changes=st.lists(st.tuples(st.integers(1, 5), ratios), max_size=3),
    skip=st.integers(0, 9),
    steps=st.integers(1, 25),
)
def test_a_plan_is_what_walking_every_step_finds(
    source, lengths, shape, ratio, cap, exhausted, schedule, dp, limit, changes, skip, steps
):
    nodes = [source(name, n) for name, n in zip(NAMES, lengths, strict=False)]
    ratio = ratio[: len(nodes)] if any(ratio[: len(nodes)]) else [1] * len(nodes)
    first, *others = nodes
    if shape == "weighted":
        graph = first.blend(*others, weights=ratio, max_epochs=cap, on_exhausted=exhausted)
    elif shape == "union":
        graph = first.blend(*others)
    elif shape == "repeats":
        graph = first.blend(*others, repeats={first.name: 2})
    elif shape == "nested":
        inner = first.blend(*others, weights=ratio, max_epochs=cap, on_exhausted="renormalise", name="inner")
        graph = inner.blend(source("z", 17), weights=[3, 1])
    elif shape == "concat":
        graph = first.concat(*others)
    else:
        graph = first.blend(source("z", 17), weights=[3, 1])
    if limit is not None and not graph.finite:
        graph = graph.limit(samples=limit)
    sizes = [(0, dp * 2)]
    for step, size in schedule:
        sizes.append((sizes[-1][0] + step, size * dp * 2))
    try:
        loader = DataLoader2(graph.shard_ranks(Topology(0, dp), seed=1).batch_samples(2, global_batch_size=sizes))
    except ConfigurationError:
        return  # a cap so low that there is no step
    step = 0
    for later, new in changes if shape in ("weighted", "nested") else []:
        step += later
        try:
            loader.seek(step)
            names = [s.name for s in nodes]
            new = new[: len(nodes)] if any(new[: len(nodes)]) else [1] * len(nodes)
            loader.update_weights(dict(zip(names, new, strict=True)))
        except (ConfigurationError, OutOfRangeError, ValueError):
            break
    loader.seek(0)
    check_against_walk(loader, steps)
    if (end := loader.plan(10**6).end_step) is None or skip <= end:  # not beyond a sample that is an error
        loader.seek(skip)
        check_against_walk(loader, steps)


# Changes of a running run ---------------------------------------------------------------------------------


@given(data=st.data())
def test_a_plan_of_a_run_that_was_changed_is_what_walking_finds(source, tmp_path_factory, data):
    draw = data.draw
    first = [source(name, draw(st.integers(3, 30))) for name in "ab"]
    cap = draw(st.sampled_from([None, 3]))
    graph = first[0].blend(first[1], weights=[2, 1], max_epochs=cap, on_exhausted="renormalise")
    loader = DataLoader2(graph.batch_samples(2, global_batch_size=4))
    named = {"a", "b"}
    jumped = 0
    grown: set[str] = set()
    for _ in range(draw(st.integers(1, 4))):
        what = draw(st.sampled_from(["weights", "add", "drop", "grow", "size", "jump"]))
        try:
            loader.seek(loader.step + draw(st.integers(1, 6)))
            if what == "weights":
                loader.update_weights({name: draw(st.sampled_from([1, 2, 5])) for name in sorted(named)})
            elif what == "add" and "c" not in named:
                loader.add_source(source("c", 11), weights=dict.fromkeys([*sorted(named), "c"], 1))
                named.add("c")
            elif what == "drop" and len(named) > 1:
                name = draw(st.sampled_from(sorted(named)))
                loader.drop_source(name)
                named.remove(name)
            elif what == "grow":
                name = draw(st.sampled_from(sorted(named)))
                more = tmp_path_factory.mktemp("more") / "more.bin"
                np.arange(9 * 4 + 1, dtype="uint16").tofile(more)
                loader.grow_source(name, more, dtype="uint16")
                grown.add(name)
            elif what == "size":
                loader.update_global_batch_size(draw(st.sampled_from([2, 6, 8])))
            elif what == "jump":
                steps = draw(st.integers(1, 5))
                loader.jump(steps)
                jumped += 1
        except (TokenpipeError, ValueError):
            pass
    begin = draw(st.integers(0, 12))
    if (end := loader.plan(10**6).end_step) is not None and begin > end:
        return
    loader.seek(begin)
    steps = draw(st.integers(1, 20))
    found = loader.plan(steps)
    records = [record for step in walked(loader, begin, steps) for record in step]
    assert found.samples == len(records)
    assert {s.name: s.samples for s in found.sources if s.samples} == dict(Counter(r.source for r in records))
    assert len({s.name for s in found.sources}) == len(found.sources)
    for s in found.sources:
        if s.name not in grown:
            assert s.repeats == sum(record.epoch > 0 for record in records if record.source == s.name), s
    if not jumped:
        seen: Counter = Counter()
        repeated: Counter = Counter()
        first_sample = records[0].sample_number if records else MAX_NUMBER
        for step in [*walked(loader, 0, begin), *walked(loader, begin, steps)]:
            for r in step:
                place = r.source, r.file, r.file_token
                repeated[r.source] += seen[place] > 0 and r.sample_number >= first_sample
                seen[place] += 1
        for s in found.sources:
            assert s.repeats == repeated[s.name], s
            if s.repeats:
                assert s.exhausted_step is not None
            if not s.repeats and s.unseen:
                assert s.exhausted_step is None or s.exhausted_step < begin
    metrics = loader.metrics()
    before = Counter(record.source for step in walked(loader, 0, begin) for record in step)
    for name, count in before.items():
        assert metrics[f"data/share/{name}"] == pytest.approx(count / sum(before.values()))


def test_what_a_jump_passes_over_is_not_counted_and_not_seen(source):
    loader = DataLoader2(source("a", 40).blend(source("b", 400), weights=[1, 1]).batch_samples(4))
    loader.seek(5)
    loader.jump(10)
    loader.seek(0)
    found = check_shares(loader, 10)
    a = found.sources[0]
    assert (a.samples, a.repeats, a.epochs_after) == (20, 0, 1.0)  # 10 samples, 20 passed over, 10 samples
    assert a.exhausted_step == 9
    assert loader.plan(20).sources[0].repeats == 20


def check_shares(loader, steps):
    found = loader.plan(steps)
    walk = Counter(record.source for step in walked(loader, found.first_step, steps) for record in step)
    assert {s.name: s.samples for s in found.sources} == walk
    return found


def test_a_source_that_grew_is_one_source_with_all_its_samples(source, tmp_path):
    loader = DataLoader2(source("a", 40).blend(source("b", 400), weights=[1, 1]).batch_samples(4))
    np.arange(20 * 4 + 1, dtype="uint16").tofile(tmp_path / "more.bin")
    loader.seek(10)
    loader.grow_source("a", tmp_path / "more.bin", dtype="uint16")
    found = check_shares(loader, 20)
    a = found.sources[0]
    assert [s.name for s in found.sources] == ["a", "b"]
    assert (a.files, a.epochs_before, a.epochs_after, a.unseen) == (2, 20 / 60, 1.0, 0)
    assert a.repeats == 0
    assert loader.plan(30).sources[0].repeats == 20


# Windows, orders, and graphs of other shapes --------------------------------------------------------------


def test_the_small_case_is_nanosets_summary_of_its_sources(source):
    graph = source("a", 30, permuted=False).order_nanoset(
        source("b", 10, permuted=False), num_samples=100, weights=[0.5, 0.5], seed=1
    )
    loader = DataLoader2(graph.batch_samples(5))
    for steps in (1, 7, 13, 20, 30):
        found = loader.plan(steps)
        records = [record for step in walked(loader, 0, steps) for record in step]
        assert {s.name: s.samples for s in found.sources} == dict(Counter(r.source for r in records))
        assert [s.asked for s in found.sources] == [0.5, 0.5]
    assert found.steps == 20
    assert [s.epochs_after for s in found.sources] == [50 / 30, 5.0]


def test_windows_that_go_on_with_another_length_begin_inside_their_epoch(source):
    reader = source("a", 60, permuted=False).datapipe
    half = reader.slice_sequences(4, unit=8).permute(seed=7)
    graph = half.resize_sequences(8, after=30)  # every unit has had its first window of two
    found = plan(graph.batch_samples(1), 40)
    (a,) = found.sources
    assert (a.samples, a.epochs_before, a.exhausted_step) == (40, 1.0, None) or a.epochs_before == 0.5
    records = [record for step in walked(DataLoader2(graph.batch_samples(1)), 0, 40) for record in step]
    assert a.repeats == sum(record.epoch > 0 for record in records)


def test_a_permute_above_a_blend_leaves_one_source_to_count(source):
    found = plan(source("a").blend(source("b")).permute(seed=3).batch_samples(4), 5)
    assert [(s.name, s.samples, s.share) for s in found.sources] == [("permute", 20, 1.0)]


def test_joined_batches_have_no_sources_to_count(source):
    batches = source("a").batch_samples(2)
    with pytest.raises(ConfigurationError, match="whole batches"):
        plan(batches.zip(source("b").batch_samples(2)), 5)


def test_bytes_are_whole_rows_as_wide_as_they_are_stored(source):
    graph = source("a", dtype="uint16").blend(source("b", dtype="uint32"), weights=[1, 1])
    a, b = plan(graph.batch_samples(4), 10).sources
    assert (a.bytes_read, b.bytes_read) == (20 * 5 * 2, 20 * 5 * 4)
    assert (a.files, a.file_bytes, b.file_bytes) == (1, 201 * 2, 201 * 4)


def test_ten_million_steps_over_a_thousand_sources_ask_for_few_counts(source, monkeypatch):
    graph = source("a", 10).blend(*(source(f"s{i}", 3 + i) for i in range(99)), weights=list(range(1, 101)))
    routed = []
    monkeypatch.setattr(type(graph), "route", lambda self, numbers: routed.append(numbers.size))
    counted = []
    counts = type(graph).counts
    monkeypatch.setattr(type(graph), "counts", lambda self, hi: counted.append(hi) or counts(self, hi))
    found = plan(graph.batch_samples(4, global_batch_size=1024), 10**7)
    assert (found.steps, found.samples) == (10**7, 10**7 * 1024)
    assert not routed
    assert len(counted) < 1000


def test_a_plan_can_be_made_before_the_first_batch_and_after_shutdown_and_moves_nothing(source):
    loader = DataLoader2(source("a").blend(source("b"), weights=[3, 1]).batch_samples(4, global_batch_size=8))
    before = loader.plan(5)
    iterator = iter(loader)
    next(iterator)
    assert loader.plan(5) == before, "a step that has begun counts whole"
    next(iterator)
    state = loader.state_dict()
    later = loader.plan(5)
    assert later.first_step == 1
    assert loader.state_dict() == state
    next(iterator)
    loader.shutdown()
    assert loader.plan(5) == later
    with pytest.raises(LoaderError, match="plan needs an indexed graph"):
        DataLoader2(IterableWrapper([1, 2, 3])).plan(3)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "7", True])
def test_a_number_of_steps_that_is_none_is_refused(source, steps):
    with pytest.raises((ConfigurationError, TypeError)):
        plan(source("a").batch_samples(4), steps)


def test_a_run_that_is_through_has_an_empty_plan(source):
    loader = DataLoader2(source("a").limit(samples=20).batch_samples(4))
    assert sum(1 for _ in loader) == 5
    found = loader.plan(3)
    assert (found.steps, found.samples, found.batches) == (0, 0, ())
    assert "no step" in str(found)
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        found.draw("none.png")


def test_a_run_on_the_last_numbers_there_are_is_planned(source):
    graph = source("a").blend(source("b")).batch_samples(4, global_batch_size=2**40)
    found = plan(graph, 10**6, from_step=2**22)
    assert found.samples == 10**6 * 2**40
    assert plan(graph, 2**40, from_step=2**22).steps <= (MAX_NUMBER >> 40) + 1 - 2**22


# Warnings -------------------------------------------------------------------------------------------------


def warnings_of(graph, steps, **options):
    return "\n".join(plan(graph, steps, **options).warnings)


def test_a_plan_without_surprises_has_no_warnings(source):
    graph = source("a", 500).blend(source("b", 500), weights=[1, 1]).batch_samples(4)
    assert warnings_of(graph, 100) == ""


def test_a_cap_that_will_be_reached_is_said_with_its_step(source):
    blend = source("a", 10).blend(source("b", 500), weights=[1, 1], max_epochs={"a": 1}, on_exhausted="renormalise")
    assert "reach their cap: 'a' (step 4)" in warnings_of(blend.batch_samples(4), 20)
    assert warnings_of(blend.batch_samples(4), 4) == ""


def test_the_run_that_ends_early_is_said_with_its_reason(source):
    text = "the run ends before step {}, after {} of the 20 steps: {}"
    blend = source("a", 10).blend(source("b", 500), weights=[1, 1], max_epochs=1)
    assert text.format(5, 5, "source 'a' is through") in warnings_of(blend.batch_samples(4), 20)
    limited = source("a", 500).limit(samples=30).batch_samples(4)
    assert text.format(7, 7, "limit(samples=30); 2 samples make no whole step") in warnings_of(limited, 20)
    assert text.format(7, 7, "once; 1 samples") in warnings_of(source("a", 29).once().batch_samples(4), 20)
    assert text.format(6, 6, "limit(steps=6)") in warnings_of(source("a", 500).batch_samples(4).limit(steps=6), 20)
    error = source("a", 10).blend(source("b", 500), weights=[1, 1], max_epochs=1, on_exhausted="error")
    assert text.format(5, 5, "source 'a' is through, which is an error") in warnings_of(error.batch_samples(4), 20)


def test_exhausted_sources_are_said_and_many_repeats_more_strongly(source):
    graph = source("a", 30).blend(source("b", 10), weights=[1, 1]).batch_samples(4)
    text = warnings_of(graph, 20)
    assert "exhausted, so that samples repeat: 'a' (step 14; 1.33 epochs by step 20), 'b' (step 4; 4.00" in text
    assert "Muennighoff" not in text
    assert "'b' (step 4; 4.20 epochs by step 21)" in warnings_of(graph, 21).split("Muennighoff et al. 2023)")[1]


def test_sources_that_give_nothing_are_said(source):
    graph = source("a", 500).blend(source("b"), source("c"), weights={"a": 1, "b": 0, "c": 1e-4}).batch_samples(4)
    text = warnings_of(graph, 20)
    assert "weight 0, so they give no sample: 'b'" in text
    assert "so small that they give no sample: 'c' (0.0001)" in text


def test_batches_that_another_layout_does_not_divide_are_said(source):
    graph = source("a", 5000).batch_samples(4, global_batch_size=[(0, 16), (10, 24)])
    assert warnings_of(graph, 20, dp_size=4) == (
        "the global batch of 24 (from step 10) is not divisible by dp_size × micro-batch = 4 × 4; 16 or 32 would do"
    )
    assert warnings_of(graph, 20, dp_size=2, micro_batch_size=4) == ""
    assert warnings_of(graph, 10, dp_size=4) == ""


def test_a_stride_that_meets_the_blends_rhythm_is_said(source):
    blend = source("a", 5000).blend(source("b", 5000), weights=[0.8, 0.2])

    def batched(dp, seed=None):
        return blend.shard_ranks(Topology(0, dp), seed).batch_samples(2)

    text = warnings_of(batched(5), 200)
    assert "dp_size 5" in text
    loader = DataLoader2(batched(5))
    starved = {r.rank for step in range(50) for r in loader.contents(step) if r.source == "b"}
    assert f"rank {min(starved)} takes 100.0%" in text
    assert warnings_of(batched(5, seed=1), 200) == ""
    assert warnings_of(batched(4), 200) == ""


# How it is shown ------------------------------------------------------------------------------------------


def test_the_table_is_aligned_whatever_the_names(source):
    names = ["a", "x" * 100, "two words", "tab\tand\x1b[31mcolour", "日本語"]
    graph = source("z", 50).blend(*(source(f"n{i}", 50) for i in range(len(names))), weights=[1] * 6)
    found = plan(graph.batch_samples(4), 100)
    renamed = tuple(dataclasses.replace(s, name=n) for s, n in zip(found.sources, ["z", *names], strict=True))
    text = str(dataclasses.replace(found, sources=renamed, warnings=()))
    lines = text.splitlines()[2:9]
    assert all(line.isprintable() for line in lines)
    assert len({len(line) for line in lines}) == 1
    assert all(len(line) < 140 for line in lines)


def test_many_sources_are_shown_with_their_rest_in_one_line(source):
    graph = source("s0", 5).blend(*(source(f"s{i}", 5) for i in range(1, 80))).batch_samples(4)
    text = str(plan(graph, 150))
    assert "… 21 more" in text
    assert "and 72 more" in text


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_written_and_shows_every_source(source, tmp_path, kind):
    loader = DataLoader2(source("a", 500).blend(source("b", 50), source("c", 70), weights=[5, 2, 1]).batch_samples(4))
    loader.seek(30)
    loader.update_weights({"a": 1, "b": 1, "c": 3})
    loader.seek(0)
    found = loader.plan(100)
    assert found.changes == (30,)
    path = tmp_path / f"plan.{kind}"
    found.draw(path)
    if kind == "svg":
        assert path.read_text().startswith("<?xml")
    else:
        from matplotlib.image import imread

        pixels = imread(path)[..., :3]
        colours = Counter(map(tuple, (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()))
        for r, g, b in [(0x44, 0x77, 0xAA), (0xEE, 0x66, 0x77), (0x22, 0x88, 0x33)]:
            assert colours[r, g, b] > 0.02 * pixels.shape[0] * pixels.shape[1]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ConfigurationError, match=r"\.png or \.svg"):
        found.draw(tmp_path / "plan.jpg")


def test_a_picture_without_matplotlib_says_what_would_do(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'tokenpipe\[plot\]'"):
        plan(source("a").batch_samples(4), 5).draw(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())


# On the command line --------------------------------------------------------------------------------------


@pytest.fixture
def recipe(source, tmp_path):
    """run.yaml of two sources of 300 samples each, in steps of 8, later 24."""
    blend = source("a", 300).blend(source("b", 300), weights=[3, 1])
    graph = blend.shard_ranks(Topology(), seed=3).batch_samples(4, global_batch_size=[(0, 8), (10, 24)])
    (tmp_path / "run.yaml").write_text(write_recipe(graph, tmp_path))
    return str(tmp_path / "run.yaml")


def test_the_command_prints_the_plan_that_the_loader_makes(recipe, tmp_path, capsys):
    loader = DataLoader2(load_recipe(recipe))
    assert main(["plan", recipe, "--steps", "20"]) == 0
    assert capsys.readouterr().out == f"{loader.plan(20)}\n"
    loader.seek(5)
    loader.update_weights({"a": 1, "b": 1})
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    picture = tmp_path / "plan.svg"
    state = ["--state", str(tmp_path / "state.json"), "--dp", "2", "--json", "--picture", str(picture)]
    assert main(["plan", recipe, "--steps", "20", *state]) == 0
    assert json.loads(capsys.readouterr().out) == loader.plan(20).as_json()
    assert picture.read_text().startswith("<?xml")


def test_the_command_warns_of_a_layout_that_does_not_divide(recipe, capsys):
    assert main(["plan", recipe, "--steps", "20", "--dp", "4", "--micro-batch", "2"]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["plan", recipe, "--steps", "20", "--dp", "2", "--micro-batch", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the global batch of 8 (from step 0) is not divisible by dp_size × micro-batch = 2 × 8; 16 would do" in shown
    assert "the global batch of 24 (from step 10) is not divisible" in shown


def test_the_command_says_in_one_line_what_is_wrong(recipe, capsys):
    for arguments in (["--steps", "0"], ["--steps", "5", "--picture", "plan.jpg"], ["--steps", "5", "--dp", "0"]):
        assert main(["plan", recipe, *arguments]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_hold_out_in_training_is_said(source, recipe, tmp_path, capsys):
    held = source("a", 300).once().batch_samples(4)
    assert "source 'a' has 1,201 tokens of the held-out 'a'" in warnings_of(
        load_recipe(recipe), 5, holdouts=[source("c", 20), held]
    )
    assert warnings_of(load_recipe(recipe), 5, holdouts=[source("c", 20)]) == ""
    (tmp_path / "evaluation.yaml").write_text(write_recipe(held, tmp_path))
    assert main(["plan", recipe, "--steps", "5", "--holdout", str(tmp_path / "evaluation.yaml")]) == 0
    assert "hold-out in training" in capsys.readouterr().out


def test_no_stretch_of_a_ramps_timeline_is_so_short_that_single_samples_show(source):
    ramp = linear_ramp(2001, 6402, {"a": 1, "b": 9}, {"a": 9, "b": 1})
    blend = source("a", 500).blend(source("b", 500), weights=[1, 9], schedule=ramp)
    found = plan(blend.batch_samples(8), 1000)
    stretches = np.diff([0, *found.timeline.tokens]) // found.sequence_length
    assert stretches.sum() == found.samples == 8000
    counts = np.diff([0, *found.timeline.samples["a"]])
    shares = counts / stretches
    assert np.abs(np.diff(shares)).max() < 0.1
