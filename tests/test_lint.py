"""What lint finds, what it leaves alone, and that it changes nothing."""

import copy
import importlib.util
import json
import pickle
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper, Sampler
from torch.utils.data.datapipes.map import SequenceWrapper

from nodes import Numbers
from tokenpipe.adapters.ahead import PinMemory, Prefetch, ToDevice
from tokenpipe.adapters.timeout import Timeout
from tokenpipe.cli.main import main
from tokenpipe.datapipes import (
    Finding,
    IndexedDataPipe,
    StreamingDataPipe,
    TokenFileWriter,
    TokenReader,
    Topology,
    lint,
)
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, LoaderWarning
from tokenpipe.datapipes.linting import serious_findings
from tokenpipe.datapipes.linting.documents import document_lengths, rank_correlation
from tokenpipe.datapipes.names import named_nodes, node_names
from tokenpipe.reading_services import DataLoader2

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported")

ROOT = Path(__file__).parent.parent


def same(item: Any) -> Any:
    return item


def place(rank: int = 0, size: int = 4) -> Topology:
    return Topology(dp_rank=rank, dp_size=size)


def source(name: str = "a", samples: int = 1000) -> IndexedDataPipe:
    return Numbers(name, samples).permute(seed=7)


def blend(*weights: float, **options: Any) -> IndexedDataPipe:
    first, *others = (source(chr(97 + i)) for i in range(len(weights)))
    return first.blend(*others, weights=list(weights), **options)


def stream(items: int = 9) -> IterDataPipe:
    return IterableWrapper(range(items))


class Mine(StreamingDataPipe):
    """A node of a user's, with a state, that says nothing of ranks."""

    def __init__(self, datapipe: Any = None, **attributes: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.__dict__.update(attributes)

    def __iter__(self) -> Any:
        yield from self.datapipe


class MyShuffler(Mine):
    """A user's node that shuffles, and says so in its name alone."""


class MyShard(Mine):
    def apply_sharding(self, num_of_instances: int, instance_id: int) -> None:
        """As torch asks for it."""


class OnTop(Mine):
    in_main_process = True


def prefetched(node: Any) -> Any:
    return Prefetch(2)(node)


def pinned(node: Any) -> Any:
    return PinMemory()(node)


def on_cpu(node: Any) -> Any:
    return ToDevice("cpu")(node)


def documents(path: Path, lengths: Any, name: str = "docs") -> TokenReader:
    with TokenFileWriter(path, vocab_size=100) as writer:
        for length in lengths:
            writer.write(np.full(length, 7))
    return TokenReader(path, name=name)


def increasing(folder: Path, sequence_length: int = 16) -> IndexedDataPipe:
    return documents(folder / "sorted.tok", np.arange(1, 200)).slice_sequences(sequence_length)


def mixed(folder: Path) -> IndexedDataPipe:
    return documents(folder / "mixed.tok", np.random.default_rng(3).permutation(np.arange(1, 200))).slice_sequences(16)


def order_file(folder: Path) -> Path:
    np.save(folder / "order.npy", np.arange(5)[::-1].astype(np.int64))
    return folder / "order.npy"


# (rule, what the finding's node is, a graph in which it is, near misses in which it is not) ---------------------

Case = tuple[str, str, Any, dict[str, Any]]

CASES: "dict[str, Case]" = {
    "a stream that is shuffled behind its shard": (
        "shard-before-shuffle",
        "sharding_filter",
        lambda f: stream().sharding_filter().shuffle().batch(2),
        {
            "shuffled before": lambda f: stream().shuffle().sharding_filter().batch(2),
            "shuffled before and behind": lambda f: stream().shuffle().sharding_filter().shuffle().batch(2),
            "with the shuffle turned off": lambda f: stream().sharding_filter().shuffle().set_shuffle(False),
        },
    ),
    "a user's shard below a user's shuffle": (
        "shard-before-shuffle",
        "zip.1.myshard",
        lambda f: stream().shuffle().sharding_filter().zip(MyShuffler(MyShard(stream()))),
        {"the other way round": lambda f: MyShard(MyShuffler(stream()))},
    ),
    "a permute above shard_ranks": (
        "shard-before-shuffle",
        "shard_ranks",
        lambda f: source().shard_ranks(place()).permute(seed=1).batch_samples(2),
        {"below": lambda f: source().permute(seed=1).shard_ranks(place()).batch_samples(2)},
    ),
    "an indexed graph without a shard": (
        "no-shard",
        "numbers",
        lambda f: source().batch_samples(2),
        {"with one": lambda f: source().shard_ranks(place()).batch_samples(2)},
    ),
    "a branch of a stream without a shard": (
        "no-shard",
        "zip.1.iterablewrapper",
        lambda f: stream().shuffle().sharding_filter().zip(stream().shuffle()),
        {
            "above the branches": lambda f: stream().shuffle().zip(stream().shuffle()).sharding_filter(),
            "in each branch": lambda f: stream().shuffle().sharding_filter().zip(MyShard(MyShuffler(stream()))),
        },
    ),
    "a stream that is sharded twice": (
        "two-shards",
        "sharding_filter#2",
        lambda f: stream().shuffle().sharding_filter().map(same).sharding_filter(),
        {"once in each branch": lambda f: stream().sharding_filter().zip(stream().sharding_filter())},
    ),
    "an indexed graph that is sharded twice": (
        "two-shards",
        "shard_ranks#2",
        lambda f: source().shard_ranks(place()).permute(seed=1).shard_ranks(place()),
        {"once": lambda f: source().shard_ranks(place())},
    ),
    "four fifths in step with five ranks": (
        "blend-in-step",
        "shard_ranks",
        lambda f: blend(0.8, 0.2).shard_ranks(place(size=4)).batch_samples(2),  # linted as five ranks
        {
            "turned by a seed": lambda f: blend(0.8, 0.2).shard_ranks(place(), seed=7),
            "another rhythm": lambda f: blend(0.77, 0.23).shard_ranks(place()),
            "one pass for evaluation": lambda f: source("a").blend(source("b")).once().shard_ranks(place()),
            "a single source": lambda f: source().shard_ranks(place()),
        },
    ),
    "an inner blend in step": (
        "blend-in-step",
        "shard_ranks",
        lambda f: blend(0.8, 0.2, name="in").skip(3).map(same).shard_ranks(place()),
        {"a permute of it": lambda f: blend(0.8, 0.2).permute(seed=3).shard_ranks(place())},
    ),
    "weights that come to be in step": (
        "blend-in-step",
        "shard_ranks",
        lambda f: blend(0.77, 0.23, schedule=[(100_000, [0.8, 0.2])]).shard_ranks(place()),
        {"and those that do not": lambda f: blend(0.77, 0.23, schedule=[(9000, [0.73, 0.27])]).shard_ranks(place())},
    ),
    "a source that nothing shuffles": (
        "no-shuffle",
        "blend.1.numbers",
        lambda f: source("a").blend(Numbers("b", 9), weights=[1, 1]),
        {
            "permuted": lambda f: source("a").blend(source("b"), weights=[1, 1]),
            "an order from a file": lambda f: Numbers("a", 9).reorder(order_file(f)),
            "Nanoset's order": lambda f: Numbers("a", 9).order_nanoset(num_samples=9),
            "once": lambda f: Numbers("a", 9).once().shard_ranks(place()),
        },
    ),
    "a stream that nothing shuffles": (
        "no-shuffle",
        "iterablewrapper",
        lambda f: stream().map(same).batch(2),
        {
            "shuffled": lambda f: stream().shuffle().batch(2),
            "by a user's node": lambda f: MyShuffler(stream()),
            "turned off on purpose": lambda f: stream().shuffle().set_shuffle(False),
            "by a sampler": lambda f: Sampler(range(9), RandomSampler),
        },
    ),
    "a map-style graph in order": (
        "no-shuffle",
        "sequencewrapper",
        lambda f: SequenceWrapper([1, 2, 3]).map(same),
        {"shuffled": lambda f: SequenceWrapper([1, 2, 3]).map(same).shuffle()},
    ),
    "a permute above a blend": (
        "permute-above-blend",
        "permute",
        lambda f: blend(1, 1).map(same).permute(seed=3),
        {"below": lambda f: blend(1, 1)},
    ),
    "a lock in a node": (
        "cannot-pickle",
        "zip.1.mine",
        lambda f: stream().zip(Mine(stream(), settings_={"key": [1, 2, threading.Lock()]})),
        {"a function by its name": lambda f: stream().map(same).zip(Mine(stream(), settings_={"key": [1, same]}))},
    ),
    "a node without a state": (
        "no-state",
        "shuffle",
        lambda f: stream().shuffle().batch(2),
        {"with one": lambda f: Mine(stream()).map(same).batch(2), "an indexed graph": lambda f: source()},
    ),
    "a node drawn from twice": (
        "no-state",
        "zip",
        lambda f: (lambda shared: shared.map(same).zip(shared))(stream()),
        {"one branch": lambda f: stream().map(same)},
    ),
    "single samples from thread to thread": (
        "prefetch-below-batch",
        "map#2",
        lambda f: prefetched(stream().map(same)).batch(2).map(same),
        {
            "the batch itself": lambda f: prefetched(stream().map(same).batch(2)),
            "above the batch": lambda f: prefetched(stream().batch(2).map(same)),
            "no batch at all": lambda f: prefetched(stream().map(same)).map(same),
            "what is batched once more": lambda f: prefetched(stream().batch(2)).batch(2),
            "what is unbatched above": lambda f: prefetched(stream().map(same)).unbatch(),
            "batches of batches": lambda f: prefetched(stream().batch(2).map(same)).batch(2),
            "another adapter": lambda f: Timeout(9)(stream().map(same)).batch(2),
        },
    ),
    "single windows from thread to thread": (
        "prefetch-below-batch",
        "map",
        lambda f: prefetched(source().map(same, seeded=False)).batch_samples(2),
        {"above": lambda f: prefetched(source().batch_samples(2).map(same, seeded=False))},
    ),
    "pinned below a map": (
        "pin-in-worker",
        "batch",
        lambda f: pinned(stream().batch(2)).map(same),
        {
            "at the top": lambda f: pinned(stream().batch(2).map(same)),
            "below what runs in the main process": lambda f: OnTop(pinned(stream().batch(2))),
        },
    ),
    "on the device below a map": (
        "pin-in-worker",
        "batch_samples",
        lambda f: on_cpu(source().batch_samples(2)).map(same),
        {"at the top": lambda f: on_cpu(source().batch_samples(2))},
    ),
    "windows of many short documents": (
        "short-documents",
        "slice_sequences",
        lambda f: documents(f / "a.tok", [3] * 100).slice_sequences(64).permute(seed=1),
        {
            "of sixteen": lambda f: documents(f / "b.tok", [4] * 100).slice_sequences(64).permute(seed=1),
            "of files that do not say": lambda f: TokenReader(raw(f), dtype="uint16").slice_sequences(64),
            "of the long ones": lambda f: (
                documents(f / "c.tok", [1, 60] * 100).select_documents(score="length", at_least=9).slice_sequences(64)
            ),
        },
    ),
    "chosen documents that are short": (
        "short-documents",
        "slice_sequences",
        lambda f: documents(f / "a.tok", [1, 60] * 100).select_documents(score="length", below=9).slice_sequences(64),
        {"all of them": lambda f: documents(f / "b.tok", [1, 60] * 100).slice_sequences(64)},
    ),
    "a sorted file in order": (
        "neighbouring-windows",
        "slice_sequences",
        lambda f: increasing(f).batch_samples(4),
        {
            "permuted": lambda f: increasing(f).permute(seed=7).batch_samples(4),
            "in units": lambda f: increasing(f, 16).datapipe.slice_sequences(16, unit=32).permute(seed=7),
            "resized": lambda f: (
                increasing(f).datapipe.slice_sequences(16, unit=32).permute(seed=7).resize_sequences(32, after=3)
            ),
            "for evaluation": lambda f: increasing(f).once(),
            "in no order": lambda f: mixed(f).batch_samples(4),
            "all of one length": lambda f: documents(f / "one.tok", [9] * 200).slice_sequences(16),
        },
    ),
    "a sorted file in small windows": (
        "neighbouring-windows",
        "blend.1.slice_sequences",
        lambda f: source().blend(increasing(f, 8).permute(seed=7, window=100), weights=[1, 1]),
        {
            "in large ones": lambda f: increasing(f).permute(seed=7, window=400),
            "and once more": lambda f: increasing(f).permute(seed=7, window=100).permute(seed=8),
            "of documents in no order": lambda f: mixed(f).permute(seed=7, window=100),
        },
    ),
    "windows within one long document": (
        "neighbouring-windows",
        "slice_sequences",
        lambda f: documents(f / "a.tok", [4000] * 9).slice_sequences(16).permute(seed=7, window=32),
        {
            "over many": lambda f: documents(f / "b.tok", [4000] * 90).slice_sequences(16).permute(seed=7, window=1024),
            "over all": lambda f: documents(f / "c.tok", [4000] * 9).slice_sequences(16).permute(seed=7),
        },
    ),
}


def raw(folder: Path) -> Path:
    np.arange(1000, dtype="<u2").tofile(folder / "raw.bin")
    return folder / "raw.bin"


def rules(graph: Any, dp_size: int = 5) -> "dict[str, str]":
    """{rule: node} of what is found."""
    return {finding.rule: finding.node for finding in lint(graph, dp_size=dp_size)}


def only(graph: Any, rule: str, dp_size: "int | None" = 5) -> Finding:
    (found,) = [finding for finding in lint(graph, dp_size=dp_size) if finding.rule == rule]
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_found_at_its_node(case, tmp_path):
    rule, node, graph, _ = CASES[case]
    found = rules(graph(tmp_path))
    assert found.get(rule) == node, found
    assert "not-checked" not in found


@pytest.mark.parametrize(
    ("case", "miss"), [(case, miss) for case, (_, _, _, misses) in CASES.items() for miss in misses]
)
def test_a_near_miss_is_not_found(case, miss, tmp_path):
    rule, _, _, misses = CASES[case]
    found = rules(misses[miss](tmp_path))
    assert rule not in found
    assert "not-checked" not in found


def test_every_rule_has_a_case_and_a_line_in_the_table():
    said = set(re.findall(r"^\| ([a-z-]+) \|", sys.modules[lint.__module__].__doc__, re.MULTILINE)) - {"rule"}
    assert said == {rule for rule, *_ in CASES.values()}


# What findings say --------------------------------------------------------------------------------------------


def test_a_finding_is_a_line_and_the_change_to_make():
    finding = only(source().batch_samples(2), "no-shard")
    first, second = str(finding).splitlines()
    assert first.startswith("numbers: dp_size is 5, and nothing between numbers and the top of the graph")
    assert first.endswith("[no-shard, serious]")
    assert second.startswith("    shard_ranks(Topology(dp_rank, dp_size)")
    with pytest.raises(AttributeError):
        finding.serious = False


def test_a_blend_in_step_says_which_rank_gets_what_and_what_turns_it():
    finding = only(blend(0.8, 0.2).shard_ranks(place(size=5)), "blend-in-step", None)
    assert "gets 100.0% of its samples from 'b', all ranks together 20.0%" in finding.message
    numbers = np.arange(1000) * 5
    for rank, share in enumerate(re.findall(r"(\d+)%[,)]", finding.message)):
        real = blend(0.8, 0.2).route(numbers + rank)[0].mean()
        assert int(share) == round(real * 100)
    assert "seed=" in finding.change
    assert finding.serious


def test_the_measured_shares_belong_to_the_ranks_wherever_a_stretch_begins():
    for begin in (0, 3, 100_003):
        graph = blend(0.5, 0.5, schedule=[(begin, [0.8, 0.2])] if begin else [(0, [0.8, 0.2])])
        finding = only(graph.shard_ranks(place(size=5)), "blend-in-step", None)
        rank = int(re.search(r"rank (\d)", finding.message)[1])
        first = -(-begin // 5) * 5
        assert graph.route(first + rank + 5 * np.arange(600))[0].mean() == 1.0


def test_after_a_resume_the_shares_are_those_of_the_rest():
    graph = blend(0.8, 0.2)
    finding = only(graph.skip(3).shard_ranks(place(size=5)), "blend-in-step", None)
    rank = int(re.search(r"from sample 3 on rank (\d)", finding.message)[1])
    assert graph.route(3 + rank + 5 * np.arange(600))[0].mean() == 1.0


def test_a_little_out_of_step_is_said_but_is_not_serious():
    finding = only(blend(0.7, 0.3).shard_ranks(place(size=2)), "blend-in-step", None)
    assert "(by rank: 40%, 20%)" in finding.message
    assert not finding.serious


def test_a_value_that_cannot_be_pickled_is_named_by_its_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "dill", None)
    graph = stream().zip(Mine(stream(), things={"key": [1, 2, lambda x: x]}))
    finding = only(graph, "cannot-pickle")
    assert "zip.1.mine.things['key'][2] is " in finding.message
    assert "<lambda> (test_lint.py:" in finding.message
    assert "or install dill" in finding.change


@pytest.mark.skipif(importlib.util.find_spec("dill") is None, reason="needs dill")
def test_with_dill_a_lambda_is_fine_and_a_lock_beside_it_is_named():
    assert "cannot-pickle" not in rules(stream().map(lambda x: x))
    finding = only(Mine(stream(), fn=lambda x: x, guard=threading.Lock()), "cannot-pickle")
    assert finding.message.startswith("mine.guard is <unlocked")


def test_documents_are_told_in_figures(tmp_path):
    finding = only(CASES["windows of many short documents"][2](tmp_path), "short-documents")
    assert "a window of 64 tokens holds 21 documents of 'docs' (median 3 tokens, mean 3)" in finding.message
    assert "a sequence_length up to 48" in finding.change
    finding = only(increasing(tmp_path).batch_samples(4), "neighbouring-windows")
    assert "rank correlation +1.00; median 10 tokens in the first tenth, 190 in the last" in finding.message


def test_of_many_documents_a_sample_is_read_that_is_the_same_each_time(tmp_path):
    lengths = np.random.default_rng(5).integers(1, 5, 100_000)
    paths = []
    for i, part in enumerate(np.split(lengths, [30_000])):
        paths.append(tmp_path / f"{i}.tok")
        documents(paths[-1], part)
    windows = TokenReader(paths, name="many").slice_sequences(8)
    found = document_lengths(windows)
    starts = np.linspace(0, 100_000 - 1024, 64).astype(int)
    assert found.tolist() == np.concatenate([lengths[a : a + 1024] for a in starts]).tolist()
    assert np.array_equal(found, document_lengths(windows))
    few = windows.datapipe.select_documents(score="length", at_least=3).slice_sequences(8)
    assert document_lengths(few).tolist() == found[found >= 3].tolist()
    part = windows.datapipe.part(1).slice_sequences(8)
    assert document_lengths(part)[:1024].tolist() == lengths[30_000:31_024].tolist()


def test_rank_correlation_is_spearmans():
    assert rank_correlation(np.array([1, 2, 3, 9])) == pytest.approx(1)
    assert rank_correlation(np.array([9, 8, 8, 1])) == pytest.approx(-0.9486833)  # ties share their mean rank
    assert rank_correlation(np.array([3, 3, 3])) == 0


# How many ranks -----------------------------------------------------------------------------------------------


def test_dp_size_is_what_was_given_then_the_sharders_then_the_environments(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    graph = blend(0.8, 0.2).shard_ranks(place(size=7))
    assert [finding.rule for finding in lint(graph)] == []
    assert [finding.rule for finding in lint(graph, dp_size=5)] == ["blend-in-step"]
    assert "dp_size is 3" in only(source(), "no-shard", None).message
    assert "no-shard" not in {finding.rule for finding in lint(source(), dp_size=1)}
    for said in ("", "many", "0"):
        monkeypatch.setenv("WORLD_SIZE", said)
        assert lint(source()) == []


def test_what_is_no_graph_and_no_count_is_refused():
    with pytest.raises(ArgumentTypeError, match="got int"):
        lint(3)
    with pytest.raises(ConfigurationError, match="dp_size must be at least 1"):
        lint(source(), dp_size=0)


def test_ranks_that_all_evaluate_everything_lose_nothing():
    assert only(source().batch_samples(2), "no-shard").serious
    assert not only(source().once().batch_samples(2), "no-shard").serious


# Nothing is found where nothing is wrong ------------------------------------------------------------------------


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_graph_of_the_readme_has_no_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(8 * 2049, dtype="<u2").tofile("prose.bin")
    for i in range(2):
        documents(tmp_path / f"code-{i}.tok", np.random.default_rng(i).integers(50, 4000, 60))
    text = re.search(r"```python\n(.*?)print\(graph", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names: dict[str, Any] = {}
    exec(text, names)
    assert lint(names["graph"]) == []


def test_the_graphs_of_the_pretraining_example_have_no_finding(tmp_path):
    pytest.importorskip("tokenizers")
    example = load_example("pretrain")
    draw = np.random.default_rng(7)
    for corpus in ("prose", "code"):
        for part in ("train", "eval"):  # lengths like those of the real files
            documents(tmp_path / f"{corpus}.{part}.tok", draw.lognormal(6.5, 1.2, 80).astype(int) + 1)
    settings = example.Settings(out=str(tmp_path), vocab_size=100)
    assert lint(example.training_graph(settings, 4)) == []
    assert lint(example.evaluation_graph(settings)) == []


# Any graph --------------------------------------------------------------------------------------------------


class Broken(IndexedDataPipe):
    """A user's node that cannot say where it begins."""

    functional_name = "broken"

    @property
    def first_sample(self) -> int:
        raise ZeroDivisionError("no beginning")


def test_a_node_that_raises_is_a_finding_and_the_other_rules_hold():
    found = lint(Broken(Numbers("a", 9)).shard_ranks(place()))
    assert [finding.rule for finding in found] == ["not-checked", "no-shuffle"]
    assert found[0].message == "blend-in-step could not be looked for: ZeroDivisionError: no beginning"


def test_files_that_are_gone_are_a_finding_and_the_other_rules_hold(tmp_path):
    graph = increasing(tmp_path).permute(seed=7)
    (tmp_path / "sorted.tok").unlink()
    found = lint(graph, dp_size=2)
    assert [finding.rule for finding in found] == ["no-shard", "not-checked"]
    assert "window-beside-documents could not be looked for: TokenFileError" in found[1].message


STREAM_STEPS = {
    "map": lambda dp: dp.map(same),
    "lambda": lambda dp: dp.map(lambda x: x),
    "batch": lambda dp: dp.batch(2),
    "unbatch": lambda dp: dp.batch(2).unbatch(),
    "shuffle": lambda dp: dp.shuffle(),
    "off": lambda dp: dp.shuffle().set_shuffle(False),
    "shard": lambda dp: dp.sharding_filter(),
    "zip": lambda dp: dp.zip(stream()),
    "shared": lambda dp: dp.map(same).zip(dp),
    "fork": lambda dp: dp.fork(2)[0].concat(dp),
    "demux": lambda dp: dp.demux(2, same)[1],
    "mine": lambda dp: Mine(dp, lock=threading.Lock()),
    "prefetch": lambda dp: prefetched(dp.map(same)),
    "pin": lambda dp: pinned(dp.map(same)),
    "sync": lambda dp: dp.fullsync(),
}
INDEXED_STEPS = {
    "map": lambda dp: dp.map(same, seeded=False),
    "permute": lambda dp: dp.permute(seed=3),
    "window": lambda dp: dp.permute(seed=3, window=5),
    "blend": lambda dp: dp.blend(source("b"), weights=[0.8, 0.2], name="c"),
    "union": lambda dp: dp.blend(source("b"), name="d"),
    "concat": lambda dp: dp.concat(source("b"), name="e"),
    "zip": lambda dp: dp.zip(source("b")),
    "skip": lambda dp: dp.skip(7),
    "limit": lambda dp: dp.limit(samples=500),
    "once": lambda dp: dp.once(),
    "shard": lambda dp: dp.shard_ranks(place(1, 5)),
    "batch": lambda dp: dp.batch_samples(2),
    "prefetch": lambda dp: prefetched(dp.map(same, seeded=False)),
}


def built(graph: Any, steps: "dict[str, Any]", chosen: "list[str]") -> Any:
    for step in chosen:
        try:
            graph = steps[step](graph)
        except (ConfigurationError, ArgumentTypeError, AttributeError):  # it does not fit there
            continue
    return graph


def looks_of(graph: Any) -> Any:
    """What of a graph must stay: its pickle, or where it has none all its attributes."""
    try:
        return pickle.dumps(graph)
    except (TypeError, AttributeError, pickle.PicklingError):
        return {id(node): copy.copy(vars(node)) for node, _ in named_nodes(graph)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STREAM_STEPS)), max_size=7), st.sampled_from([1, 2, 5]))
def test_any_stream_can_be_linted_and_stays_as_it_is(steps, dp_size):
    check_lint(built(stream(), STREAM_STEPS, steps), dp_size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(INDEXED_STEPS)), max_size=7), st.sampled_from([1, 2, 5]))
def test_any_indexed_graph_can_be_linted_and_stays_as_it_is(steps, dp_size):
    check_lint(built(source(), INDEXED_STEPS, steps), dp_size)


def check_lint(graph: Any, dp_size: int) -> None:
    before = looks_of(graph)
    found = lint(graph, dp_size=dp_size)
    assert looks_of(graph) == before
    assert found == lint(graph, dp_size=dp_size)
    assert "not-checked" not in {finding.rule for finding in found}
    names = {finding.node for finding in found}
    assert names <= set(node_names(graph).values())
    if dp_size == 1:
        assert {finding.rule for finding in found if finding.serious} <= {"two-shards"}


# The loader -------------------------------------------------------------------------------------------------


def told(graph: Any, **arguments: Any) -> "list[str]":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader2(graph, **arguments).shutdown()
    return [str(w.message) for w in caught if issubclass(w.category, LoaderWarning)]


def test_a_loader_warns_of_what_is_serious_alone(monkeypatch):
    (warning,) = told(blend(0.8, 0.2).shard_ranks(place(size=5)))
    assert warning.startswith("lint: shard_ranks: the blend's rhythm is in step with dp_size 5")
    assert told(stream().sharding_filter().shuffle().map(lambda x: x)) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "shuffle before" not in told(stream().shuffle().sharding_filter())
    (warning,) = told(stream().sharding_filter().shuffle())
    assert "[shard-before-shuffle, serious]" in warning
    (warning,) = told(stream().shuffle())
    assert "[no-shard, serious]" in warning


def test_a_loader_lints_what_its_adapters_have_made_and_warns_on_rank_zero(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert told(stream().shuffle(), datapipe_adapter_fn=lambda graph: graph.sharding_filter()) == []
    monkeypatch.setenv("RANK", "1")
    assert told(stream().shuffle()) == []


def test_what_the_loader_asks_reads_no_file_and_pickles_nothing(tmp_path, monkeypatch):
    graph = increasing(tmp_path).batch_samples(2)
    (tmp_path / "sorted.tok").unlink()
    monkeypatch.setattr(pickle, "Pickler", None)
    assert serious_findings(graph) == []
    assert serious_findings(Mine(stream(), lock=threading.Lock())) == []


# The command ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from torch.utils.data.datapipes.iter import IterableWrapper
from tokenpipe.datapipes import StreamingDataPipe
from tokenpipe.reading_services import DataLoader2
import beside

def double(item):
    return item * 2

class Counter(StreamingDataPipe):
    def __iter__(self):
        yield 1

print("imported")
bad = Counter().sharding_filter().shuffle().map(double).batch(2)
good = beside.Shuffled(Counter()).sharding_filter().map(double).batch(2)

def make(seed=3):
    print("made")
    return DataLoader2(good, datapipe_adapter_fn=lambda graph: bad)

def fails():
    raise ValueError("not\\nhere")

def needs(path):
    return good

if __name__ == "__main__":
    sys.exit("the training began")
"""
BESIDE = """
from tokenpipe.datapipes import StreamingDataPipe

class Shuffled(StreamingDataPipe):
    functional_name = "shuffled"
    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    (tmp_path / "train_it.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("train_it", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path / "train_it.py"
    for name in [name for name in sys.modules if name in ("beside", "train_it") or name.startswith("linted_")]:
        del sys.modules[name]


def test_the_command_ends_a_ci_job_that_has_findings(script):
    program = "import sys; from tokenpipe.cli.main import main; sys.exit(main())"

    def lint_it(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-W", "ignore", "-c", program, "lint", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=script.parent, check=False)

    found = lint_it("train_it.py:bad", "--dp", "4")
    assert found.returncode == 1
    assert "[shard-before-shuffle, serious]" in found.stdout
    assert found.stdout.endswith("2 findings, 1 serious\n")
    assert "imported" not in found.stdout
    assert "the training began" not in found.stderr
    clean = lint_it("train_it:good", "--dp", "4")  # as a module, from the folder that one stands in
    assert (clean.returncode, clean.stdout) == (0, "nothing found\n")


def test_only_serious_findings_as_json(script, capsys):
    assert main(["lint", f"{script}:bad", "--serious"]) == 0
    assert capsys.readouterr().out == "nothing found\n"
    assert main(["lint", f"{script}:make", "--json", "--serious", "--dp", "2"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert record.keys() == {"node", "rule", "message", "change", "serious"}
    assert (record["rule"], record["serious"]) == ("shard-before-shuffle", True)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("SCRIPT:fails", "ValueError: not ("),
        ("SCRIPT:fails", "train_it.py, line 24)"),
        ("SCRIPT:needs", "needs arguments (path)"),
        ("SCRIPT:other", "has no 'other'; its graphs are bad, good"),
        ("SCRIPT:sys", "is no graph and no loader, but module"),
        ("SCRIPT", "names no object"),
        ("no_such_script.py:graph", "there is no such script"),
        ("no.such.module:graph", "ModuleNotFoundError: No module named 'no'"),
        ("no_such.yaml", "No such file"),
    ],
)
def test_what_cannot_be_linted_is_a_line_and_another_exit_status(script, capsys, what, said):
    assert main(["lint", what.replace("SCRIPT", str(script))]) == 2
    error = capsys.readouterr().err.removeprefix("imported\n")
    assert error.startswith("tokenpipe lint: ")
    assert len(error.splitlines()) == 1
    assert said in error


def test_a_recipe_is_linted_as_so_many_ranks_share_it(tmp_path, capsys):
    for name in ("a", "b"):
        np.arange(900, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    first, second = (
        TokenReader(tmp_path / f"{name}.bin", dtype="uint16").slice_sequences(8).permute(seed=7) for name in "ab"
    )
    graph = first.blend(second, weights=[0.8, 0.2]).shard_ranks(Topology()).batch_samples(2)
    (tmp_path / "run.yaml").write_text(graph.recipe(tmp_path))
    assert main(["lint", str(tmp_path / "run.yaml")]) == 0
    assert main(["lint", str(tmp_path / "run.yaml"), "--dp", "5"]) == 1
    assert "dp_size 5" in capsys.readouterr().out
    assert main(["lint", str(tmp_path / "run.yaml"), "--dp", "0"]) == 2
    (tmp_path / "run.yaml").write_text(graph.datapipe.batch_samples(2, global_batch_size=4).recipe(tmp_path))
    capsys.readouterr()
    assert main(["lint", str(tmp_path / "run.yaml"), "--dp", "3"]) == 2
    assert "is not divisible by dp_size × micro-batch = 6" in capsys.readouterr().err
