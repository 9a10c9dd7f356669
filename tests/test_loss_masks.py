"""Loss masks beside token files: written with them, checked against them, gathered from the same places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpipe.datapipes import TokenFileWriter, TokenReader
from tokenpipe.datapipes.errors import ArgumentTypeError, TokenFileError, TokenIdError
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.loss_masks import as_loss_mask, has_loss_masks, loss_layouts, loss_path

documents = st.lists(
    st.lists(st.integers(0, 99), min_size=1, max_size=9).flatmap(
        lambda tokens: st.tuples(
            st.just(tokens), st.one_of(st.none(), st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        )
    ),
    min_size=1,
    max_size=8,
)


@given(documents=documents)
def test_a_mask_says_of_each_token_what_was_said_when_it_was_written(tmp_path, documents):
    path = tmp_path / "chat.tok"
    with TokenFileWriter(path, vocab_size=100) as writer:
        for tokens, loss in documents:
            writer.write(tokens, loss)
    reader = TokenReader(path)
    assert has_loss_masks(reader.files) == any(loss is not None for _, loss in documents)
    if not has_loss_masks(reader.files):
        return
    (mask,) = loss_layouts(reader.files)
    expected = [said for tokens, loss in documents for said in (loss if loss is not None else [True] * len(tokens))]
    stored = np.fromfile(mask.path, np.uint8)
    assert as_loss_mask(stored).tolist() == expected
    assert (mask.tokens, mask.offset, mask.dtype) == (len(reader), 0, np.uint8)


def test_masks_are_gathered_from_the_same_places_as_the_tokens(tmp_path):
    rng = np.random.default_rng(7)
    for name in ("a", "b"):
        with TokenFileWriter(tmp_path / f"{name}.tok", vocab_size=2) as writer:
            for _ in range(20):
                tokens = rng.integers(0, 2, 7)
                writer.write(tokens, tokens.astype(np.bool_))
    reader = TokenReader([tmp_path / "a.tok", tmp_path / "b.tok"])
    space = reader.select_documents(share=0.5, seed=3)
    starts = np.arange(0, len(space) - 8, 3)
    tokens = TokenGather([space]).rows(starts, 8)
    assert tokens.any()
    assert TokenGather([space], files=loss_layouts).rows(starts, 8).tolist() == tokens.tolist()


def test_a_mask_that_is_missing_cut_or_damaged_is_refused_by_name(tmp_path):
    path = tmp_path / "prose.bin"
    np.arange(10, dtype=np.uint16).tofile(path)
    files = TokenReader(path, dtype="uint16").files
    with pytest.raises(TokenFileError, match=r"prose\.bin\.loss"):
        loss_layouts(files)
    loss_path(path).write_bytes(b"\1" * 9)
    with pytest.raises(TokenFileError, match=r"prose\.bin\.loss: 9 bytes .* 10 tokens"):
        loss_layouts(files)
    with pytest.raises(TokenFileError, match=r"prose.*byte 7"):
        as_loss_mask(np.array([[1, 0], [7, 1]]), "prose")
    with pytest.raises(TokenFileError, match="byte -1"):
        as_loss_mask(np.array([-1]))


def test_no_token_file_is_ever_beside_the_mask_of_another(tmp_path):
    path = tmp_path / "chat.tok"
    with TokenFileWriter(path, vocab_size=100) as writer:
        writer.write([1, 2], [True, False])
    with TokenFileWriter(path, vocab_size=100) as writer:
        writer.write([3, 4])
    assert not loss_path(path).exists()


def test_what_is_thrown_away_leaves_no_mask(tmp_path):
    path = tmp_path / "chat.tok"
    with pytest.raises(TokenIdError), TokenFileWriter(path, vocab_size=10) as writer:
        writer.write([1, 2], [True, False])
        assert not loss_path(path).exists(), "not before the file is whole"
        writer.write([11], [True])
    assert not list(tmp_path.iterdir())


def test_a_mask_of_another_length_or_of_numbers_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "chat.tok", vocab_size=10) as writer:
        for wrong in ([True], [1, 0], np.ones((1, 2), np.bool_), [0.5, 1.0]):
            with pytest.raises(ArgumentTypeError, match="bool"):
                writer.write([1, 2], wrong)
        writer.write([1, 2], np.array([True, False]))
        writer.write([], [])
        writer.write_many(np.array([3, 4, 5]), np.array([1, 3]), np.array([False, True, False]))
        with pytest.raises(ArgumentTypeError):
            writer.write_many(np.array([3]), np.array([1]), np.array([1]))
    assert loss_path(tmp_path / "chat.tok").read_bytes() == b"\1\0\0\1\0"
