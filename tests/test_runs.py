"""Runs over graphs that are not the plain one: what resumes must be the rest, or be refused."""

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenpipe.datapipes import TokenReader, Topology, read_tokens
from tokenpipe.datapipes.errors import (
    ConfigurationError,
    JournalError,
    OutOfRangeError,
    SourceExhaustedError,
    StateMismatchError,
)
from tokenpipe.reading_services import DataLoader2, InProcessReadingService


@pytest.fixture
def source(token_file):
    """source("a", samples): windows of 8 tokens of a file of its own."""

    def make(name: str, samples: int = 50):
        path = token_file(f"{name}.bin", samples * 8 + 1, salt=sum(map(ord, name)))
        return TokenReader(path, dtype="uint16", name=name).slice_sequences(8)

    return make


def batched(graph, micro=2, size=8, topology=None):
    graph = graph.shard_ranks(topology, seed=3) if topology else graph
    return graph.batch_samples(micro, global_batch_size=size).collate_causal_lm(sample_numbers=True)


def numbers(loader, items=None):
    found = []
    for _, batch in zip(range(items if items is not None else 10**6), loader, strict=False):
        found += batch["sample_numbers"].tolist()
    return found


# What a state must refuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("join", ["union", "weighted", "concat", "zip", "nanoset"])
def test_sources_in_another_order_are_another_order(source, join):
    def graph(first, second):
        return {
            "union": lambda: first.blend(second),
            "weighted": lambda: first.blend(second, weights={"a": 0.5, "b": 0.5}),
            "concat": lambda: first.concat(second),
            "zip": lambda: first.zip(second),
            "nanoset": lambda: first.order_nanoset(second, num_samples=60),
        }[join]()

    a, b = source("a"), source("b")
    assert graph(a, b).fingerprint() != graph(b, a).fingerprint()
    state = DataLoader2(graph(a, b)).state_dict()
    with pytest.raises(StateMismatchError, match="sources"):
        DataLoader2(graph(b, a)).load_state_dict(state)


def test_a_node_that_only_some_sources_have_is_another_order(source):
    def graph(*permuted):
        nodes = [source(n).permute(seed=7) if n in permuted else source(n) for n in "abc"]
        return batched(nodes[0].blend(*nodes[1:], weights=[1, 2, 3]))

    choices = [(), ("a",), ("b",), ("a", "b"), ("a", "b", "c")]
    for saved in choices:
        state = DataLoader2(graph(*saved)).state_dict()
        for here in choices:
            if here == saved:
                DataLoader2(graph(*here)).load_state_dict(state)
            else:
                with pytest.raises(StateMismatchError, match="permute"):
                    DataLoader2(graph(*here)).load_state_dict(state)


@pytest.mark.parametrize("join", ["zip", "concat"])
def test_joined_batches_resume_on_the_same_dp_size_and_refuse_others(source, join):
    def graph(rank, dp):
        parts = [batched(source(n), 2, 24, Topology(rank, dp)) for n in "ab"]
        return parts[0].zip(parts[1]) if join == "zip" else parts[0].concat(parts[1])

    loader = DataLoader2(graph(0, 2))
    for _ in zip(range(5), loader, strict=False):
        pass
    state = loader.state_dict()
    DataLoader2(graph(1, 2)).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="dp_size"):
        DataLoader2(graph(0, 4)).load_state_dict(state)


# Changes of weights ------------------------------------------------------------------------------------------


def test_new_weights_below_joined_batches_leave_the_past_as_it_was(source):
    blend = source("a").blend(source("b"), weights=[1, 1], name="ab")
    graph = batched(blend, 4, 4).zip(batched(source("c"), 4, 4))
    loader = DataLoader2(graph)
    iterator = iter(loader)
    before = [next(iterator)[0]["input_ids"] for _ in range(10)]
    loader.update_weights({"a": 1, "b": 0})
    loader.seek(0)
    again = iter(loader)
    assert all((next(again)[0]["input_ids"] == was).all() for was in before)
    assert all(batch[0]["input_ids"].shape == (4, 8) for batch, _ in zip(again, range(10), strict=False))


def test_a_change_goes_to_the_blend_that_has_the_sources_or_is_refused(source):
    def pair(names, name=""):
        return source(names[0]).blend(source(names[1]), weights=[1, 1], name=name)

    loader = DataLoader2(pair("ab", "p").concat(pair("cd", "q")))
    loader.update_weights({"c": 1, "d": 3})
    assert loader.state_dict()["journal"]["weights"][0][2] == "q"
    for graph in (pair("ab").concat(pair("cd")), pair("ab", "p").concat(pair("ab", "q"))):
        with pytest.raises(JournalError, match="name"):
            DataLoader2(graph).update_weights({"a": 1, "b": 3})


def test_new_weights_at_the_end_of_a_run_hold_for_the_next_one(source):
    loader = DataLoader2(batched(source("a").blend(source("b"), weights=[1, 1])).limit(steps=3))
    assert len(numbers(loader)) == 24
    loader.update_weights({"a": 3, "b": 1})
    assert len(numbers(loader)) == 24


# Ends and beginnings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["steps", "passes"])
def test_a_limit_above_the_batcher_makes_one_batch_at_a_time(source, kind):
    made = []
    graph = batched(source("a", 400)).map(lambda batch: made.append(1) or batch)
    graph = graph.limit(steps=90) if kind == "steps" else graph.limit(passes=2)
    iterator = iter(DataLoader2(graph))
    for n in range(1, 60):
        next(iterator)
        assert len(made) == n


@pytest.mark.parametrize("begun", [0, 3, 50])
def test_a_source_that_is_through_raises_at_its_own_batch_wherever_the_run_began(source, begun):
    graph = source("a", 100).blend(source("b"), weights=[4, 1], max_epochs={"a": 10}, on_exhausted="error")
    end = graph.phases.end
    loader = DataLoader2(batched(graph))
    loader.seek(begun)
    found = []
    with pytest.raises(SourceExhaustedError, match=rf"{end}"):
        for batch in loader:
            found += batch["sample_numbers"].tolist()
    assert found == list(range(8 * begun, end // 2 * 2))


def test_after_an_uneven_pass_every_rank_has_the_same_state(source):
    states = []
    for rank in range(6):
        loader = DataLoader2(batched(source("a", 101).once(tail="uneven"), 3, 18, Topology(rank, 6)))
        assert len(numbers(loader)) in (16, 17)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    assert states[0]["consumed_samples"] == 101


@pytest.mark.parametrize("kind", [{"steps": 3}, {"passes": 1}])
def test_beyond_a_limit_there_is_nothing_to_seek_or_save(source, kind):
    loader = DataLoader2(batched(source("a", 24)).limit(**kind))
    assert loader.state_dict(step=3) == DataLoader2.from_state(loader.state_dict(step=3), loader.datapipe).state_dict()
    for call in (loader.seek, lambda n: loader.state_dict(step=n), loader.contents):
        with pytest.raises(OutOfRangeError, match="24"):
            call(4)


def test_a_run_that_skips_begins_there_again(source):
    for graph in (source("a").skip(16), source("a").skip(16).limit(samples=24), source("a").limit(samples=40).skip(16)):
        loader = DataLoader2(batched(graph))
        assert numbers(loader, 3) == list(range(16, 22))
        loader.restart()
        assert numbers(loader, 3) == list(range(16, 22))
        with pytest.raises(OutOfRangeError, match="begins at sample 16"):
            loader.seek(1)
        loader.seek(3)
        assert numbers(loader, 1) == [24, 25]


def test_several_passes_over_what_ends_after_one_are_refused(source):
    for graph in (source("a").once(), source("a").limit(samples=10)):
        with pytest.raises(ConfigurationError, match="passes=3"):
            graph.limit(passes=3)


# Files -----------------------------------------------------------------------------------------------------


def test_files_with_one_stem_in_several_folders_are_named_by_their_folders(tmp_path):
    paths = []
    for folder in ("wiki/en", "wiki/de", "code"):
        (tmp_path / folder).mkdir(parents=True)
        paths.append(str(tmp_path / folder / "tokens.npy"))
        np.save(paths[-1], np.arange(100, dtype=np.uint16))
    assert read_tokens(paths, 8, 7).sources == ("en/tokens", "de/tokens", "code/tokens")
    assert read_tokens(paths[:1], 8, 7).sources == ("tokens",)


MANY_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tokenpipe.datapipes import TokenReader
from tokenpipe.reading_services import DataLoader2
paths = [f"{sys.argv[1]}/{i}.bin" for i in range(300)]
loaders = []
for salt in (1, 2, 3):
    graph = TokenReader(paths, dtype="uint16", name="all").slice_sequences(8).permute(seed=salt)
    loaders.append(iter(DataLoader2(graph.batch_samples(100).collate_causal_lm())))
for _ in range(12):
    for loader in loaders:
        batch = next(loader)
        assert ((batch["input_ids"][:, 1:] - batch["input_ids"][:, :-1]) % 1000 == 1).all()
"""


def test_several_loaders_over_many_files_need_no_descriptors(tmp_path):
    tokens = np.arange(300 * 40) % 1000
    for i in range(300):
        tokens[i * 40 : (i + 1) * 40].astype("<u2").tofile(tmp_path / f"{i}.bin")
    subprocess.run([sys.executable, "-c", MANY_FILES, str(tmp_path)], check=True)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


def test_maps_go_when_their_graph_goes(source):
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("mapped-once")

    if not Path("/proc/self/maps").exists():
        pytest.skip("counts maps in /proc")
    for _ in range(3):
        graph = source("mapped-once")
        graph.fetch([0, 1])
        assert maps() == 1
        del graph
        gc.collect()  # a node and its routes know each other
        assert maps() == 0


def test_a_thread_that_reads_ahead_delivers_the_same_and_counts_only_what_was_delivered(source):
    graph = batched(source("a").permute(seed=1).blend(source("b").permute(seed=1), weights=[1, 3]))
    plain, ahead = (DataLoader2(graph, reading_service=InProcessReadingService(n)) for n in (0, 5))
    for move in (lambda x: None, lambda x: x.seek(4), lambda x: x.update_weights([1, 1]), lambda x: x.restart()):
        move(plain), move(ahead)
        assert numbers(plain, 7) == numbers(ahead, 7)
        assert plain.state_dict() == ahead.state_dict()
    ahead.shutdown()


# Smaller things -------------------------------------------------------------------------------------------


def test_an_inner_blend_with_a_cap_takes_new_weights_and_the_outer_one_knows_its_new_end(source):
    inner = source("a").blend(source("b"), weights=[9, 1], max_epochs={"b": 1}, name="inner")
    for weights in ([1, 9], [99, 1]):
        outer = inner.blend(source("c"), weights=[1, 1])
        loader = DataLoader2(batched(outer))
        numbers(loader, 6)
        before = len(numbers(DataLoader2(batched(outer))))
        loader.update_weights(dict(zip("ab", weights, strict=True)))
        rest = numbers(loader)
        assert loader._run.graph.finite
        assert (len(rest) + 12 < before) is (weights == [1, 9])


@pytest.mark.parametrize("above", [True, False])
def test_padding_pads_mapped_samples_too(source, above):
    for rank in range(4):
        graph = source("a").limit(samples=5).once(tail="pad")
        graph = graph if above else graph.map(np.negative, seeded=False)
        graph = graph.shard_ranks(Topology(rank, 4))
        graph = (graph.map(np.negative, seeded=False) if above else graph).batch_samples(1, global_batch_size=12)
        batches = list(DataLoader2(graph.collate_causal_lm()))
        assert len(batches) == 3
        assert [bool(batch["row_valid"]) for batch in batches] == [True, rank == 0, False]
        assert (batches[2]["label_ids"] == -100).all()


def test_passes_end_with_a_whole_step_and_a_resume_on_other_ranks_does_not_move_the_end(source):
    def loader(micro, dp):
        graph = source("a", 248).shard_ranks(Topology(0, dp), seed=3).batch_samples(micro, global_batch_size=24)
        return DataLoader2(graph.limit(passes=2))

    for first in (1, 2, 3, 4, 6, 8):
        state = loader(1, first).state_dict(step=7)
        for micro in (1, 2):
            for dp in (1, 2, 3, 4, 6, 12):
                resumed = loader(micro, dp)
                resumed.load_state_dict(state)
                assert sum(1 for _ in resumed) * micro * dp == 20 * 24 - 7 * 24


def fails_at_20(row):
    if row[0] == 160 * 7 % 50_000 + 97:
        raise KeyError("bad sample")
    return row


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
def test_an_error_in_a_map_says_which_map_and_sample(source):
    loader = DataLoader2(batched(source("a").map(fails_at_20)))
    with pytest.raises(KeyError, match="bad sample") as caught:
        list(zip(loader, range(100), strict=False))
    assert any("fails_at_20" in note and "'a'" in note and "20" in note for note in caught.value.__notes__)


def test_a_pass_shorter_than_the_ranks_is_dealt_all_the_same(source):
    graph = batched(source("a", 10), 1, 48, Topology(5, 12))
    records = [r for r in DataLoader2(graph).contents(step=0) if r.rank == 5]
    assert [(r.micro_batch, r.row) for r in records] == [(m, 0) for m in range(4)]
    assert [r.sample_number for r in records] == numbers(DataLoader2(graph), 4)


def test_one_name_for_two_sources_is_refused_in_blends_of_blends_too(source, token_file):
    other = TokenReader(token_file("other.bin", 81), dtype="uint16", name="a").slice_sequences(8)
    with pytest.raises(ConfigurationError, match="'a'"):
        source("a").blend(source("b"), name="x").blend(other)


def test_a_loader_says_how_much_each_source_has_given(source):
    loader = DataLoader2(batched(source("a").permute(seed=1).blend(source("b").permute(seed=1), weights=[3, 1])))
    numbers(loader, 8)
    assert loader.consumed_by_source == {"a": 12, "b": 4}
    assert (loader.step, loader.consumed_samples, loader.micro_batches(0), len(loader)) == (2, 16, 4, 50)


def test_a_blend_that_is_through_below_others_takes_no_new_weights(source):
    def inner():
        return source("a").blend(source("b"), weights=[1, 1], max_epochs={"a": 0.2}, name="p")

    for graph in (
        inner().concat(source("c").limit(samples=50)),
        inner().blend(source("c"), weights=[1, 1], on_exhausted="renormalise"),
    ):
        loader = DataLoader2(batched(graph))
        numbers(loader, 25)
        before, state = loader.contents(3), loader.state_dict()
        with pytest.raises(JournalError, match="through"):
            loader.update_weights({"a": 1, "b": 9})
        assert (loader.contents(3), loader.state_dict()) == (before, state)


def test_one_of_two_blends_of_the_same_sources_is_changed_by_its_name(source):
    first = source("a").blend(source("b"), weights=[1, 1], name="p").limit(samples=40)
    second = source("a").blend(source("b"), weights=[1, 1], name="q")
    loader = DataLoader2(batched(first.concat(second.limit(samples=40))))
    with pytest.raises(JournalError, match="blend="):
        loader.update_weights({"a": 1, "b": 3})
    loader.update_weights([1, 3], blend="q")
    assert [r.source for r in loader.contents(9)].count("b") in (5, 6, 7)
    assert [r.source for r in loader.contents(1)].count("b") == 4


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
def test_a_limit_ends_a_pass_of_any_tail(source, tail):
    graph = batched(source("a", 101).once(tail=tail), 2, 12, Topology(1, 3)).limit(steps=2)
    loader = DataLoader2(graph)
    assert sum(1 for _ in loader) == 4
    assert loader.state_dict()["consumed_samples"] == 24
    for call in (loader.seek, loader.contents):
        with pytest.raises(OutOfRangeError):
            call(3)


INTERRUPTED = """
import signal, sys, threading, time
from tokenpipe.datapipes import TokenReader
from tokenpipe.reading_services import DataLoader2, InProcessReadingService
graph = TokenReader(sys.argv[1], dtype="uint16").slice_sequences(8).permute(seed=1).batch_samples(2)
loader = DataLoader2(graph.collate_causal_lm(), reading_service=InProcessReadingService(3))
count, armed, most = 0, False, int(sys.argv[2])
def handler(*_):
    global armed
    if armed:
        armed = False  # one at a time, and only while the loader runs
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
def interrupt():
    while count < most:
        time.sleep(0.0007)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
thread = threading.Thread(target=interrupt, daemon=True)
thread.start()
iterator = iter(loader)
while count < most:
    try:
        armed = True
        while True:
            next(iterator)
    except KeyboardInterrupt:
        count += 1
thread.join()
loader.shutdown()
print("done")
"""


def test_ctrl_c_never_leaves_a_prefetching_loader_hanging(token_file):
    path = token_file("interrupted.bin", 4001)
    interrupts = "3000" if os.environ.get("TOKENPIPE_SOAK") else "150"
    command = [sys.executable, "-c", INTERRUPTED, path, interrupts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_resume_inside_a_step_leaves_what_contents_says_of_it(source, dp):
    graph = batched(source("a").permute(seed=1), 1, 8, Topology(0, dp))
    loader = DataLoader2(graph)
    numbers(loader, 8 // dp + 1)  # one micro-batch into step 1
    resumed = DataLoader2.from_state(loader.state_dict(), graph)
    assert resumed.consumed_samples == 8 + dp
    assert resumed.contents(1) == loader.contents(1) == DataLoader2(graph).contents(1)
    assert [r.micro_batch for r in resumed.contents(1)] == [i // dp for i in range(8)]
