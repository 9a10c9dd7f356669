"""Batches for Hugging Face models, given to a small one of theirs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology

VOCABULARY = 61


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers.models.llama")  # some seconds
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("tokens") / "prose.tok"
    rng = np.random.default_rng(2)
    with TokenFileWriter(path, vocab_size=VOCABULARY) as writer:
        for length in rng.integers(2, 9, 80):
            writer.write(rng.integers(0, VOCABULARY, length))
    windows = TokenReader(path).slice_sequences(16).permute(seed=1)
    return windows.exclude({"prose": [(40, 44)]}).batch_samples(8)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("rules", [[], ["joins"]])
def test_the_models_own_loss_is_that_of_every_label_but_the_last_one_of_each_row(llama, batches, rules):
    seen = 0
    for number in range(4):
        theirs = batches.collate_causal_lm(layout="hf", no_loss_on=rules).fetch([number])[0]
        ours = batches.collate_causal_lm(no_loss_on=rules).fetch([number])[0]
        with torch.no_grad():
            found, logits = llama(**theirs).loss, llama(input_ids=ours["input_ids"]).logits
            shifted = llama(input_ids=ours["input_ids"], labels=ours["label_ids"]).loss
        wanted = loss(logits[:, :-1], ours["label_ids"][:, :-1])  # the model shifts: row position S has no target in it
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(shifted.double(), loss(logits[:, :-1], ours["label_ids"][:, 1:]), rtol=1e-5, atol=0)
        assert abs(shifted - wanted) > 1e-3, "of labels that are shifted already the model learns the token after next"
        seen += int((ours["label_ids"] == -100).all(1).sum())
    assert seen, "a row is excluded"


def test_a_document_is_given_no_attention_by_the_next_one_where_positions_are(llama, batches):
    batch = batches.collate_causal_lm(layout="hf", position_ids=True).fetch([1])[0]
    plain = batches.collate_causal_lm(layout="hf").fetch([1])[0]
    assert batch.keys() == {"input_ids", "labels", "position_ids"}, "beside an attention_mask the models look for none"
    begins = (batch["position_ids"] == 0).cumsum(1)
    first = begins == 1
    assert not first.all()
    changed = torch.where(first, (batch["input_ids"] + 1) % VOCABULARY, batch["input_ids"])
    with torch.no_grad():
        before, after = (llama(**{**batch, "input_ids": ids}).logits for ids in (batch["input_ids"], changed))
        across = [llama(**{**plain, "input_ids": ids}).logits for ids in (batch["input_ids"], changed)]
    torch.testing.assert_close(before[~first], after[~first], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(before[first], after[first])
    assert not torch.allclose(across[0][~first], across[1][~first]), "without positions they do attend"


@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
def test_what_ranks_of_context_parallelism_lose_together_is_the_loss_of_all_labels(llama, batches, cut):
    whole = batches.collate_causal_lm(no_loss_on=["joins"]).fetch([1])[0]
    with torch.no_grad():
        logits = llama(input_ids=whole["input_ids"]).logits
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rank in range(2):
        place = Topology(cp_rank=rank, cp_size=2)
        batch = batches.collate_causal_lm(topology=place, layout="hf", cp=cut, no_loss_on=["joins"]).fetch([1])[0]
        held = torch.cat([torch.arange(*part) for part in place.cp_ranges(16, cut)])
        mine = int((batch["shift_labels"] != -100).sum())
        lost = llama.loss_function(
            logits=logits[:, held], labels=batch["labels"], vocab_size=VOCABULARY, shift_labels=batch["shift_labels"]
        )
        total, count = total + lost * mine, count + mine
    torch.testing.assert_close(total / count, loss(logits, whole["label_ids"]), rtol=1e-5, atol=0, check_dtype=False)
