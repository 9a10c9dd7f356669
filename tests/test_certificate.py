"""Eight bytes a step: the same on every layout and from what was delivered, and a file that is checked."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import Certificate, TokenReader, Topology, batch_certificate, certify
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    CertificateError,
    ConfigurationError,
    OutOfRangeError,
)
from tokenpipe.reading_services import DataLoader2

SEQUENCE, STEPS = 8, range(12)
RAMP = [(0, 24), (5, 48)]
LAYOUTS = [(1, 1), (1, 6), (2, 3), (4, 2), (4, 6)]
HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40)


@pytest.fixture
def paths(token_file) -> dict[str, str]:
    return {"prose": token_file("prose", 60 * SEQUENCE + 3), "code": token_file("code", 23 * SEQUENCE + 1, salt=3)}


def graph_of(paths, rank=0, dp=1, micro_batch=4, seed=5):
    prose, code = (
        TokenReader(path, "uint16", name).slice_sequences(SEQUENCE).permute(7) for name, path in paths.items()
    )
    dealt = prose.blend(code, weights=[3, 1]).shard_ranks(Topology(rank, dp), seed=seed)
    return dealt.batch_samples(micro_batch, global_batch_size=RAMP).collate_causal_lm()


def delivered(paths, dp, micro_batch, steps=STEPS) -> Certificate:
    """What the ranks would record: sums over their micro-batches, reduced."""
    totals = torch.zeros(len(steps), dtype=torch.int64)
    for rank in range(dp):
        loader = DataLoader2(graph_of(paths, rank, dp, micro_batch))
        items = iter(loader)
        for step in steps:
            for _ in range(loader.micro_batches(step)):
                totals[step] += batch_certificate(next(items))
    return Certificate(steps.start, totals.tolist())


@pytest.mark.parametrize(("dp", "micro_batch"), LAYOUTS)
def test_what_all_ranks_delivered_sums_up_to_what_the_graph_says_on_any_layout(paths, dp, micro_batch):
    expected = certify(graph_of(paths), STEPS)
    assert len(set(expected.hashes.tolist())) == len(STEPS)
    for found in (certify(graph_of(paths, 0, dp, micro_batch), STEPS), delivered(paths, dp, micro_batch)):
        assert found.hashes.tolist() == expected.hashes.tolist()
        assert found.steps == expected.steps == STEPS


def test_a_loader_certifies_what_its_journal_says_and_the_steps_that_are_over(paths):
    loader = DataLoader2(graph_of(paths))
    loader.seek(6)
    loader.update_weights([1, 9])
    changed = certify(loader, STEPS)
    assert certify(graph_of(paths), STEPS).difference(changed) == 6
    assert (
        changed.difference(certify(DataLoader2.from_state(loader.state_dict(), graph_of(paths, 0, 4, 6)), STEPS))
        is None
    )


def test_one_changed_token_changes_exactly_the_steps_that_hold_its_row(paths):
    loader = DataLoader2(graph_of(paths))
    before = certify(loader, STEPS)
    token = 17 * SEQUENCE + 3
    rows = loader.when("prose", token, STEPS)
    tokens = np.fromfile(paths["prose"], "<u2")
    tokens[token] += 1
    tokens.tofile(paths["prose"])
    after = certify(graph_of(paths), STEPS)
    assert np.flatnonzero(before.hashes != after.hashes).tolist() == sorted({row.step for row in rows}) != []
    assert before.difference(after) == rows[0].step


def test_a_step_twice_the_same_rows_is_not_the_step_with_other_rows_twice(paths):
    a, b = ({"input_ids": torch.full((2, 4), n), "label_ids": torch.full((2, 4), n)} for n in (1, 2))
    assert batch_certificate(a) != batch_certificate(b) and batch_certificate(a) != 0


def test_masked_rows_count_as_masked_and_padding_does_not_count():
    inputs = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": inputs, "label_ids": inputs + 1}
    masked = {"input_ids": inputs, "label_ids": (inputs + 1).index_fill(0, torch.tensor([1]), -100)}
    partly = {"input_ids": inputs, "label_ids": (inputs + 1).index_fill(1, torch.tensor([1]), -100)}
    assert batch_certificate(masked) != batch_certificate(batch) == batch_certificate(partly)
    padded = {**masked, "row_valid": torch.tensor([True, False, True])}
    rest = {key: value[[0, 2]] for key, value in batch.items()}
    assert batch_certificate(padded) == batch_certificate(rest)
    assert batch_certificate({key: value[[2, 0, 1]] for key, value in batch.items()}) == batch_certificate(batch)


def test_a_padded_evaluation_is_certified_as_its_samples(token_file):
    def graph(dp, micro_batch):
        node = TokenReader(token_file("few", 30 * SEQUENCE + 1), "uint16").slice_sequences(SEQUENCE).once(tail="pad")
        return [node.shard_ranks(Topology(r, dp)).batch_samples(micro_batch, 16).collate_causal_lm() for r in range(dp)]

    total = sum(batch_certificate(batch) for ranked in graph(4, 2) for batch in DataLoader2(ranked))
    hashes = certify(graph(1, 4)[0], range(2)).hashes
    assert total % 2**64 == int(hashes.sum())


def test_the_hash_is_the_one_that_is_written_down(token_file):
    graph = TokenReader(token_file("a", SEQUENCE + 1), "uint16").slice_sequences(SEQUENCE).batch_samples(1)
    row = np.arange(SEQUENCE, dtype="<i8") * 7
    expected = hashlib.blake2b(row.tobytes() + b"\0", digest_size=8).digest()
    assert certify(graph, range(1)).hashes[0] == int.from_bytes(expected, "little")
    assert int(certify(graph, range(1)).hashes[0]) == 4180957454995917563  # pinned: certificates are kept for years


def test_a_map_of_samples_is_refused_and_one_of_batches_is_not(paths):
    order = TokenReader(paths["prose"], "uint16").slice_sequences(SEQUENCE)
    with pytest.raises(ConfigurationError, match="batch_certificate"):
        certify(order.map(len).batch_samples(2), range(1))
    with pytest.raises(ConfigurationError, match="batch_certificate"):
        certify(DataLoader2(order.map(len).batch_samples(2)), range(1))
    plain, mapped = order.batch_samples(2), order.batch_samples(2).collate_causal_lm().map(dict)
    assert certify(plain, range(3)).difference(certify(mapped, range(3))) is None


@pytest.mark.parametrize("batch", [None, {}, {"input_ids": torch.zeros(2, 3)}, {"input_ids": [1], "label_ids": [1]}])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(ArgumentTypeError, match="input_ids"):
        batch_certificate(batch)


def test_batches_of_floats_or_other_shapes_are_refused():
    inputs = torch.zeros(2, 3, dtype=torch.int64)
    for labels, tokens in ((inputs[:1], inputs), (inputs, inputs.float())):
        with pytest.raises(ArgumentTypeError, match="input_ids"):
            batch_certificate({"input_ids": tokens, "label_ids": labels})


def test_steps_beyond_the_end_or_none_are_refused(paths):
    graph = TokenReader(paths["prose"], "uint16").slice_sequences(SEQUENCE).limit(samples=20).batch_samples(2)
    assert len(certify(graph, range(10))) == 10
    with pytest.raises(OutOfRangeError, match="step 10"):
        certify(graph, range(11))
    for steps in (range(0, 9, 2), range(-1, 3), 5, [1, 2]):
        with pytest.raises(ConfigurationError, match="steps"):
            certify(graph, steps)


def test_recording_a_step_again_takes_back_what_followed_and_a_gap_is_refused():
    certificate = Certificate()
    for step in range(7, 12):
        certificate.record(step, -step)
    assert certificate.steps == range(7, 12)
    certificate.record(9, 5)
    assert certificate.hashes.tolist() == [2**64 - 7, 2**64 - 8, 5]
    for step in (6, 11):
        with pytest.raises(OutOfRangeError, match=f"step {step}"):
            certificate.record(step, 0)


@given(first=st.integers(0, 2**62), hashes=HASHES, other_first=st.integers(0, 20), changed=st.integers(0, 39))
def test_the_first_difference_is_named_within_the_steps_that_both_have(first, hashes, other_first, changed):
    one = Certificate(first, hashes)
    cut = hashes[other_first:]
    if not cut:
        with pytest.raises(ConfigurationError, match="no step in common"):
            one.difference(Certificate(first + other_first, cut))
        return
    same = Certificate(first + other_first, cut)
    assert one.difference(same) is same.difference(one) is None
    assert one.overlap(same) == same.steps
    place = changed % len(cut)
    altered = Certificate(first + other_first, [h ^ (i >= place) for i, h in enumerate(cut)])
    assert one.difference(altered) == altered.difference(one) == first + other_first + place


@given(first=st.integers(0, 2**62), hashes=HASHES)
def test_a_certificate_goes_through_its_file(tmp_path, first, hashes):
    path = tmp_path / "run.cert"
    Certificate(first, hashes).save(path)
    assert path.stat().st_size == 32 + 8 * len(hashes)
    found = Certificate.load(path)
    assert (found.first, found.hashes.tolist()) == (first, hashes)
    found.record(found.steps.stop, 3)  # goes on
    assert found.hashes.tolist() == [*hashes, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["run.cert"]


def test_every_cut_and_every_flipped_bit_of_a_file_is_found(tmp_path):
    path = tmp_path / "run.cert"
    Certificate(3, [5, 6, 2**64 - 1]).save(path)
    whole = path.read_bytes()
    damaged = [whole[:n] for n in range(len(whole))] + [whole + b"\0"]
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CertificateError, match=r"run\.cert"):
            Certificate.load(path)
    with pytest.raises(FileNotFoundError):
        Certificate.load(tmp_path / "none")


def test_a_failed_save_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "run.cert"
    Certificate(0, [1]).save(path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Certificate(0, [2]).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.cert"]
    assert Certificate.load(path).hashes.tolist() == [1]


RANK = """
import sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
total = torch.zeros((), dtype=torch.int64)
for value in ((2**63 - 1, 7), (2**63 - 3, 11))[rank]:
    total += value
dist.all_reduce(total)
print(int(total) % 2**64)
dist.destroy_process_group()
"""


def test_a_sum_over_ranks_wraps_as_unsigned_integers_do(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0].split() for process in ranks]
    assert said == [[str((2**63 - 1 + 7 + 2**63 - 3 + 11) % 2**64).encode()]] * 2
