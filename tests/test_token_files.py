"""Token files: what is written is read back, and what is damaged is said, never delivered."""

import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tokenpipe.datapipes import TokenFileWriter, TokenReader, verify_token_file
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    TokenFileError,
    TokenFileWarning,
    TokenIdError,
    TokenpipeError,
)

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
HEADER = 256


def edge_tokens(dtype: str) -> np.ndarray:
    """Ids at both ends of what the dtype can hold without being negative, and some between."""
    top = int(np.iinfo(dtype).max)
    middle = np.arange(50, dtype=np.int64) % 100
    return np.array([0, 1, top, top - 1, *middle.tolist(), top // 2, 0], np.dtype(dtype))


def write_own(path: Path, documents: "list[list[int]]", **settings: object) -> Path:
    settings = settings or {"dtype": "uint16"}
    with TokenFileWriter(path, **settings) as writer:
        for document in documents:
            writer.write(document)
    return path


def write_npy(path: Path, tokens: np.ndarray) -> Path:
    np.save(path, tokens)
    return path


def npy_with_header(path: Path, header: "str | bytes", body: bytes = b"", version: int = 1) -> Path:
    """A .npy file whose header is this text, padded as NumPy pads it."""
    text = header.encode() if isinstance(header, str) else header
    width = 2 if version == 1 else 4
    total = -(-(8 + width + len(text) + 1) // 64) * 64
    text = text.ljust(total - 8 - width - 1) + b"\n"
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text + body)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def all_tokens(reader: TokenReader) -> list[int]:
    return reader.fetch(np.arange(len(reader))).tolist()


# Round trips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_tokens_of_every_dtype_are_read_as_they_were_written(tmp_path, dtype):
    tokens = edge_tokens(dtype)
    tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "raw.bin")
    reader = TokenReader(tmp_path / "raw.bin", dtype=dtype)
    assert len(reader) == reader.end == tokens.size
    assert all_tokens(reader) == tokens.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_tokens_of_every_dtype_are_read_as_they_were_written(tmp_path, dtype):
    tokens = edge_tokens(dtype)
    path = write_npy(tmp_path / "tokens.npy", tokens)
    assert all_tokens(TokenReader(path)) == tokens.tolist()
    assert all_tokens(TokenReader(path, dtype=dtype)) == tokens.tolist()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_headers_of_versions_1_and_2_are_read(tmp_path, version):
    path = tmp_path / "tokens.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.arange(10, dtype="<u4"), version=version)
    assert all_tokens(TokenReader(path)) == list(range(10))


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_own_file_of_every_dtype_is_read_as_it_was_written(tmp_path, dtype):
    tokens = edge_tokens(dtype)
    path = write_own(tmp_path / "own.tok", [tokens[:7].tolist(), tokens[7:].tolist()], dtype=dtype)
    reader = TokenReader(path)
    assert all_tokens(reader) == tokens.tolist()
    assert reader.files[0].dtype == np.dtype(dtype)
    assert reader.document_ends().tolist() == [7, tokens.size]
    verify_token_file(path)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 8, 9, 4095, 4096, 4097])
def test_our_own_file_of_every_length_keeps_its_document_ends_aligned(tmp_path, tokens):
    path = write_own(tmp_path / "own.tok", [[k % 251] for k in range(tokens)], dtype="uint8")
    reader = TokenReader(path)
    assert reader.document_ends().tolist() == list(range(1, tokens + 1))
    assert all_tokens(reader) == [k % 251 for k in range(tokens)]
    verify_token_file(path)


def test_a_writer_takes_lists_arrays_and_generators(tmp_path):
    with TokenFileWriter(tmp_path / "own.tok", vocab_size=50_000) as writer:
        writer.write([1, 2, 3])
        writer.write(np.array([4, 5], np.int32))
        writer.write(token for token in (6, 7))
        writer.write(np.array([8], np.uint64))
    reader = TokenReader(tmp_path / "own.tok")
    assert all_tokens(reader) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert reader.document_ends().tolist() == [3, 5, 7, 8]


def test_several_files_of_several_kinds_are_one_token_space(tmp_path):
    parts = [np.arange(n, dtype=np.int64) * 11 % 60_000 + k for k, n in enumerate((100, 1, 37, 5, 250, 2))]
    parts[2].astype("<u2").tofile(tmp_path / "2.bin")
    paths = [
        write_own(tmp_path / "0.tok", [parts[0].tolist()]),
        write_npy(tmp_path / "1.npy", parts[1].astype("<u4")),
        write_npy(tmp_path / "2.npy", parts[2].astype("<i4")),
        write_own(tmp_path / "3.tok", [parts[3].tolist()], dtype="int64"),
        write_npy(tmp_path / "4.npy", parts[4].astype("<i8")),
        write_own(tmp_path / "5.tok", [parts[5].tolist()], dtype="uint32"),
    ]
    reader = TokenReader(paths, name="mixed")
    whole = np.concatenate(parts)
    assert len(reader) == whole.size
    assert all_tokens(reader) == whole.tolist()
    for length in (1, 2, 7, 50, 99, 200):
        windows = reader.slice_sequences(length)
        expected = [whole[k * length : k * length + length + 1].tolist() for k in range(len(windows))]
        assert windows.fetch(np.arange(len(windows))).tolist() == expected


def test_windows_cross_the_borders_of_raw_files(token_file):
    paths = [token_file(f"{k}.bin", n, salt=1000 * k) for k, n in enumerate((10, 3, 1, 1, 20))]
    whole = np.concatenate([np.fromfile(path, "<u2") for path in paths])
    windows = TokenReader(paths, dtype="uint16").slice_sequences(9)
    assert windows[1].tolist() == whole[9:19].tolist()
    assert windows.fetch([2], columns=[(2, 5), (8, 10)]).tolist() == [[*whole[20:23], *whole[26:28]]]


def test_document_ends_of_several_files_count_from_the_first_token_of_the_source(tmp_path):
    first = write_own(tmp_path / "0.tok", [[1, 2], [3]])
    second = write_own(tmp_path / "1.tok", [[4], [5, 6, 7]])
    assert TokenReader([first, second]).document_ends().tolist() == [2, 3, 4, 7]


def test_a_file_url_is_a_path(tmp_path):
    path = write_own(tmp_path / "own.tok", [[1, 2, 3]])
    assert all_tokens(TokenReader(f"file://{path}")) == [1, 2, 3]


def test_a_source_takes_its_name_from_its_first_file(tmp_path):
    path = write_own(tmp_path / "prose.tok", [[1, 2]])
    assert TokenReader(path).name == "prose"
    assert TokenReader([path, path], name="code").name == "code"


# The writer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"dtype": "uint8"}, 255),
        ({"dtype": "uint16"}, 65_535),
        ({"dtype": "uint32"}, 2**32 - 1),
        ({"dtype": "int32"}, 2**31 - 1),
        ({"dtype": "int64"}, 2**63 - 1),
        ({"vocab_size": 65_536}, 65_535),
        ({"vocab_size": 65_537}, 65_536),
        ({"vocab_size": 50_257}, 50_256),
        ({"vocab_size": 300, "dtype": "uint8"}, 255),
        ({"vocab_size": 100, "dtype": "int64"}, 99),
        ({"vocab_size": 1}, 0),
    ],
)
def test_ids_are_checked_before_the_cast(tmp_path, settings, largest):
    path = tmp_path / "own.tok"
    with TokenFileWriter(path, **settings) as writer:
        writer.write([0, largest])
        for wrong in (largest + 1, -1, largest + 70_000):
            with pytest.raises(TokenIdError, match=rf"token id {wrong}\b") as caught:
                writer.write([0, wrong, 0])
            assert isinstance(caught.value, ValueError)
            assert str(largest) in str(caught.value)
            assert str(path) in str(caught.value)
    assert all_tokens(TokenReader(path)) == [0, largest]
    verify_token_file(path)


def test_an_id_of_the_dtype_of_an_array_is_checked_too(tmp_path):
    with TokenFileWriter(tmp_path / "own.tok", dtype="uint16") as writer:
        writer.write(np.array([65_535], np.uint32))
        with pytest.raises(TokenIdError, match="65536"):
            writer.write(np.array([65_536], np.uint32))
        with pytest.raises(TokenIdError, match="-1"):
            writer.write(np.array([-1], np.int8))
    assert all_tokens(TokenReader(tmp_path / "own.tok")) == [65_535]


@pytest.mark.parametrize("wrong", [[1.0], [[1, 2]], [True], ["a"], [None], [1, 2**64], [-1, 2**63]], ids=str)
def test_a_document_of_no_integers_is_refused_and_the_rest_is_kept(tmp_path, wrong):
    with TokenFileWriter(tmp_path / "own.tok", dtype="uint16") as writer:
        writer.write([7])
        with pytest.raises((TokenIdError, ArgumentTypeError)):
            writer.write(wrong)
        writer.write([8])
    reader = TokenReader(tmp_path / "own.tok")
    assert all_tokens(reader) == [7, 8]
    assert reader.document_ends().tolist() == [1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float32"},
        {"dtype": ">u2"},
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"vocab_size": "many"},
        {"vocab_size": 2**70},
        {"vocab_size": 10, "tokenizer": "x" * 65},
        {"vocab_size": 10, "tokenizer_hash": b"x" * 33},
        {"vocab_size": 10, "tokenizer_hash": "abc"},
        {"vocab_size": 10, "end_of_text": -5},
    ],
    ids=str,
)
def test_a_writer_refuses_bad_settings_before_anything_is_written(tmp_path, settings):
    with pytest.raises(TokenpipeError):
        TokenFileWriter(tmp_path / "own.tok", **settings)
    assert not names_in(tmp_path)


def test_a_file_without_a_token_is_not_made(tmp_path):
    with pytest.raises(ConfigurationError, match=r"own\.tok"), TokenFileWriter(tmp_path / "own.tok", 10) as writer:
        writer.write([])
    assert not names_in(tmp_path)


@pytest.mark.parametrize("before", [None, b"what stood here before"])
def test_a_writer_that_fails_leaves_the_folder_as_it_was(tmp_path, before):
    path = tmp_path / "own.tok"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(RuntimeError, match="stop"), TokenFileWriter(path, dtype="uint16") as writer:
        writer.write(range(100_000 % 65_536))
        raise RuntimeError("stop")
    assert names_in(tmp_path) == ([] if before is None else ["own.tok"])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_writer_whose_disk_fails_at_the_end_leaves_the_folder_as_it_was(tmp_path, monkeypatch, call):
    path = tmp_path / "own.tok"
    path.write_bytes(b"what stood here before")
    writer = TokenFileWriter(path, dtype="uint16")
    writer.write([1, 2, 3])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    monkeypatch.undo()
    assert path.read_bytes() == b"what stood here before"
    assert names_in(tmp_path) == ["own.tok"]


def test_a_full_disk_leaves_nothing_at_any_offset_and_a_rerun_writes_the_same_file(tmp_path):
    documents = [list(range(k, k + 700)) for k in range(40)]
    (tmp_path / "good").mkdir()
    good = write_own(tmp_path / "good" / "own.tok", documents).read_bytes()
    folder = tmp_path / "full"
    folder.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in random.Random(3).sample(range(len(good)), 40):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(OSError):
                    write_own(folder / "own.tok", documents)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert names_in(folder) == [], f"left at {limit} bytes"
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert write_own(folder / "own.tok", documents).read_bytes() == good


def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path):
    code = (
        "import sys, time\n"
        "from tokenpipe.datapipes.formats.own import TokenFileWriter\n"
        "writer = TokenFileWriter(sys.argv[1], dtype='uint16')\n"
        "for k in range(200):\n"
        "    writer.write(range(1000))\n"
        "print('written', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "own.tok"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
    finally:
        process.kill()
        process.communicate()
    assert not path.exists()
    write_own(path, [[1, 2]])  # what the killed one left is no obstacle
    assert all_tokens(TokenReader(path)) == [1, 2]


def test_a_writer_over_a_folder_says_so_and_leaves_it(tmp_path):
    (tmp_path / "own.tok").mkdir()
    with pytest.raises(OSError), TokenFileWriter(tmp_path / "own.tok", dtype="uint16") as writer:
        writer.write([1])
    assert names_in(tmp_path) == ["own.tok"]


def test_closing_twice_and_aborting_after_closing_keep_the_file(tmp_path):
    writer = TokenFileWriter(tmp_path / "own.tok", dtype="uint16")
    writer.write([1, 2])
    writer.close()
    writer.close()
    writer.abort()
    assert all_tokens(TokenReader(tmp_path / "own.tok")) == [1, 2]


def test_a_rewritten_file_keeps_its_mode(tmp_path):
    path = write_own(tmp_path / "own.tok", [[1]])
    path.chmod(0o640)
    write_own(path, [[2]])
    assert path.stat().st_mode & 0o777 == 0o640
    assert all_tokens(TokenReader(path)) == [2]


# Damage -----------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """damaged(data): a path that holds these bytes; always the same path."""
    path = tmp_path / "damaged.tok"

    def write(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def own(tmp_path) -> tuple[bytes, list[int]]:
    """A file of ours of 50 tokens (100 bytes, 4 of padding, 3 document ends), and its tokens."""
    tokens = [(k * 997 + 13) % 60_000 for k in range(50)]
    settings = {"vocab_size": 60_000, "tokenizer": "bpe", "tokenizer_hash": b"\1\2", "end_of_text": 0}
    path = write_own(tmp_path / "own.tok", [tokens[:10], tokens[10:11], tokens[11:]], **settings)
    return path.read_bytes(), tokens


def check_damage(path: Path, tokens: list[int], in_header: bool) -> None:
    """Refused when opened, or not in the header: the same tokens, or refused when verified."""
    if in_header:
        with pytest.raises(TokenpipeError):
            TokenReader(path)
        return
    try:
        reader = TokenReader(path)
        same = all_tokens(reader) == tokens and reader.document_ends().tolist() == [10, 11, 50]
    except TokenpipeError:
        return
    if not same:
        with pytest.raises(TokenFileError, match="damaged"):
            verify_token_file(path)


def test_every_flipped_bit_of_our_own_file_is_noticed(own, damaged):
    data, _ = own
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            path = damaged(bytes(flipped))
            with pytest.raises(TokenpipeError):
                TokenReader(path) if place < HEADER else verify_token_file(path)


def test_random_damage_of_our_own_file_is_noticed(own, damaged):
    data, tokens = own
    rng = random.Random(5)
    for _ in range(500):
        broken = bytearray(data)
        start = rng.randrange(len(data))
        piece = rng.randbytes(rng.choice((1, 2, 4, 8, 16)))
        broken[start : start + len(piece)] = piece
        if rng.random() < 0.2:
            del broken[rng.randrange(len(broken))]
        if broken == data:
            continue
        check_damage(damaged(bytes(broken)), tokens, broken[:HEADER] != data[:HEADER])


@pytest.mark.parametrize("place", range(8))
def test_a_file_of_ours_with_a_damaged_magic_is_not_read_as_raw_tokens(own, damaged, place):
    data = bytearray(own[0])
    data[place] ^= 16
    with pytest.raises(TokenpipeError):
        TokenReader(damaged(bytes(data)), dtype="uint16")


def test_our_own_file_cut_anywhere_is_refused_when_opened(own, damaged):
    data, _ = own
    for size in range(len(data)):
        path = damaged(data[:size])
        with pytest.raises(TokenpipeError, match=r"damaged\.tok"):
            TokenReader(path)
        if size >= 8:
            with pytest.raises(TokenFileError):
                TokenReader(path, dtype="uint16")


def test_our_own_file_with_something_appended_is_refused(own, damaged):
    for extra in (1, 2, 8, 4096):
        with pytest.raises(TokenFileError, match="appended"):
            TokenReader(damaged(own[0] + bytes(extra)))


def test_an_npy_file_cut_or_extended_anywhere_is_refused_when_opened(tmp_path, damaged):
    data = write_npy(tmp_path / "tokens.npy", np.arange(60, dtype="<u2")).read_bytes()
    for size in [*range(len(data)), len(data) + 1, len(data) + 2]:
        with pytest.raises(TokenpipeError, match=r"damaged\.tok"):
            TokenReader(damaged((data + bytes(2))[:size]))


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4), ("int32", 4), ("int64", 8)])
def test_a_raw_file_of_no_whole_number_of_tokens_is_refused(damaged, dtype, size):
    for length in range(1, 4 * size):
        path = damaged(bytes(length))
        if length % size:
            with pytest.raises(TokenFileError, match=f"{length} bytes") as caught:
                TokenReader(path, dtype=dtype)
            assert dtype in str(caught.value)
        else:
            assert len(TokenReader(path, dtype=dtype)) == length // size


@pytest.mark.parametrize("dtype", [None, "uint16"])
def test_empty_missing_and_folder_are_errors_that_name_the_path(tmp_path, dtype):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name, reason in (("empty", "empty"), ("missing", "No such file"), ("folder", "directory")):
        with pytest.raises(TokenFileError, match=reason) as caught:
            TokenReader(tmp_path / name, dtype=dtype)
        assert isinstance(caught.value, OSError)
        assert str(tmp_path / name) in str(caught.value)


def test_headers_of_no_tokens_are_empty_files(tmp_path):
    with pytest.raises(TokenFileError, match="empty"):
        TokenReader(write_npy(tmp_path / "none.npy", np.empty(0, "<u2")))


def test_one_bad_file_among_good_ones_is_the_one_that_is_named(tmp_path):
    good = write_own(tmp_path / "good.tok", [[1, 2]])
    bad = write_own(tmp_path / "bad.tok", [[1, 2]])
    bad.write_bytes(bad.read_bytes()[:-1])
    with pytest.raises(TokenFileError, match=r"bad\.tok"):
        TokenReader([good, bad, good])


def test_a_remote_path_is_refused_by_name(tmp_path):
    with pytest.raises(TokenFileError, match=r"s3://bucket/tokens\.bin"):
        TokenReader("s3://bucket/tokens.bin", dtype="uint16")


def test_verify_says_which_files_carry_no_hash(tmp_path):
    found = verify_token_file(write_npy(tmp_path / "tokens.npy", np.arange(4, dtype="<u2")))
    assert (found.kind, found.tokens, found.largest, found.hashed) == ("npy", 4, 3, False)


def test_a_file_cut_after_the_graph_was_built_is_an_error_and_works_again_when_it_is_whole(token_file):
    path = token_file("tokens.bin", 4000)
    whole = Path(path).read_bytes()
    windows = TokenReader(path, dtype="uint16").slice_sequences(16)
    for size in (4000, 2, 0):
        os.truncate(path, size)
        with pytest.raises(TokenFileError, match=r"tokens\.bin"):
            windows.fetch([0])
        with pytest.raises(TokenFileError, match=r"tokens\.bin"):
            windows.fingerprint()
    Path(path).unlink()
    with pytest.raises(TokenFileError, match=r"tokens\.bin"):
        windows.fetch([0])
    Path(path).write_bytes(whole)
    assert windows.fetch([0]).tolist() == [np.frombuffer(whole, "<u2")[:17].tolist()]


def test_a_file_that_has_grown_after_the_graph_was_built_is_an_error(token_file):
    path = token_file("tokens.bin", 400)
    windows = TokenReader(path, dtype="uint16").slice_sequences(16)
    with Path(path).open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(TokenFileError, match="802"):
        windows.fetch([0])


# dtypes -----------------------------------------------------------------------------------------------


def test_a_raw_file_without_a_dtype_is_refused_with_what_to_give(token_file):
    with pytest.raises(ConfigurationError, match="dtype=") as caught:
        TokenReader(token_file("tokens.bin", 100))
    assert "uint16" in str(caught.value)
    assert "tokens.bin" in str(caught.value)


def test_a_dtype_that_is_not_the_headers_is_refused_with_both(tmp_path):
    own = write_own(tmp_path / "own.tok", [[1, 2]], dtype="uint32")
    npy = write_npy(tmp_path / "tokens.npy", np.arange(5, dtype="<u4"))
    for path in (own, npy):
        with pytest.raises(ConfigurationError, match="uint16") as caught:
            TokenReader(path, dtype="uint16")
        assert "uint32" in str(caught.value)
        assert str(path) in str(caught.value)
        assert len(TokenReader(path, dtype="uint32")) > 0


@pytest.mark.parametrize("dtype", [">u2", ">i4", ">i8", np.dtype(">u4")])
def test_a_big_endian_dtype_is_refused_rather_than_read_the_other_way_round(token_file, dtype):
    with pytest.raises(ConfigurationError, match="dtype"):
        TokenReader(token_file("tokens.bin", 400), dtype=dtype)


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "u2,u2", "uint64", "int8", "object", "garbage", 3, {"names": ["a"]}]
)
def test_a_dtype_that_holds_no_tokens_is_refused_with_those_that_do(token_file, dtype):
    with pytest.raises(ConfigurationError, match="uint16"):
        TokenReader(token_file("tokens.bin", 400), dtype=dtype)


@pytest.mark.parametrize("dtype", ["uint16", "<u2", np.uint16, np.dtype("uint16")])
def test_a_dtype_may_be_said_in_numpys_ways(token_file, dtype):
    assert TokenReader(token_file("tokens.bin", 4), dtype=dtype).fetch([1]).tolist() == [7]


@pytest.mark.parametrize(
    ("stored", "read_as"),
    [("<u4", "uint16"), ("<u2", "uint8"), ("<u2", "uint32"), ("<u2", "int32"), ("<i8", "uint16"), ("<i8", "uint32")],
)
def test_a_raw_file_read_as_another_dtype_warns(tmp_path, stored, read_as):
    top = 200 if stored == "<u2" and read_as == "uint8" else 50_000
    ids = np.random.default_rng(1).integers(1, top, 4000).astype(stored)
    ids.tofile(tmp_path / "tokens.bin")
    with pytest.warns(TokenFileWarning, match=r"tokens\.bin"):
        TokenReader(tmp_path / "tokens.bin", dtype=read_as)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_raw_file_read_as_what_it_is_does_not_warn(tmp_path, dtype):
    top = min(150_000, int(np.iinfo(dtype).max))
    ids = np.random.default_rng(1).integers(0, top, 4000).astype(dtype)
    ids.tofile(tmp_path / "tokens.bin")
    np.zeros(4000, dtype).tofile(tmp_path / "zeros.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenReader([tmp_path / "tokens.bin", tmp_path / "zeros.bin"], dtype=dtype)


# The vocabulary ---------------------------------------------------------------------------------------


def test_a_header_whose_largest_id_is_beyond_the_vocabulary_is_refused_when_opened(tmp_path):
    path = write_own(tmp_path / "own.tok", [[1, 99, 5]])
    assert len(TokenReader(path, vocab_size=100)) == 3
    with pytest.raises(TokenIdError, match="99") as caught:
        TokenReader(path, vocab_size=99)
    assert "own.tok" in str(caught.value)


def test_an_id_beyond_the_vocabulary_is_refused_in_the_batch_that_reads_it(tmp_path):
    ids = np.arange(1000) % 90
    ids[605] = 100
    ids.astype("<u2").tofile(tmp_path / "tokens.bin")
    windows = TokenReader(tmp_path / "tokens.bin", dtype="uint16", vocab_size=100).slice_sequences(10)
    assert windows.fetch([0, 59, 61]).shape == (3, 11)
    with pytest.raises(TokenIdError, match="100") as caught:
        windows.fetch([3, 60])
    assert "tokens.bin" in str(caught.value)
    assert "605" in str(caught.value) or "600" in str(caught.value)
    assert windows.fetch([0, 59, 61]).shape == (3, 11)
    large = TokenReader(tmp_path / "tokens.bin", dtype="uint16", vocab_size=101).slice_sequences(10)
    assert large.fetch([60]).max() == 100


def test_a_negative_id_is_beyond_every_vocabulary(tmp_path):
    np.array([1, 2, -3, 4], "<i4").tofile(tmp_path / "tokens.bin")
    windows = TokenReader(tmp_path / "tokens.bin", dtype="int32", vocab_size=100).slice_sequences(3)
    with pytest.raises(TokenIdError, match="-3"):
        windows.fetch([0])


def test_each_source_of_a_blend_is_held_to_its_own_vocabulary(tmp_path):
    (np.arange(200) % 151).astype("<u2").tofile(tmp_path / "high.bin")
    (np.arange(200) % 90).astype("<u2").tofile(tmp_path / "low.bin")

    def windows(name: str, vocab_size: "int | None"):
        path = tmp_path / f"{name}.bin"
        return TokenReader(path, dtype="uint16", vocab_size=vocab_size).slice_sequences(10)

    assert windows("high", 151).blend(windows("low", 100)).fetch(range(38)).max() == 150
    for other in (None, 50_000):
        with pytest.raises(TokenIdError, match=r"high\.bin"):
            windows("high", 150).blend(windows("low", other)).fetch(range(38))
    assert windows("high", None).blend(windows("low", 100)).fetch(range(38)).max() == 150


# Hostile .npy headers ---------------------------------------------------------------------------------


def test_a_pickled_object_array_is_refused_and_its_code_does_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = tmp_path / "objects.npy"
    np.save(path, np.array([Hostile(), 1], object), allow_pickle=True)
    with pytest.raises(TokenFileError, match=r"objects\.npy"):
        TokenReader(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), "<u2"),
        np.zeros((), "<u2"),
        np.zeros((4, 1), "<u2"),
        np.zeros(4, ">u2"),
        np.zeros(4, ">i8"),
        np.zeros(4, "<f4"),
        np.zeros(4, "?"),
        np.zeros(4, "<u8"),
        np.zeros(4, "<c8"),
        np.zeros(4, "<M8[s]"),
        np.zeros(4, "S3"),
        np.zeros(4, [("a", "<u2")]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_npy_file_of_no_flat_little_endian_integers_is_refused(tmp_path, array):
    with pytest.raises(TokenFileError, match=r"tokens\.npy"):
        TokenReader(write_npy(tmp_path / "tokens.npy", array))


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (9223372036854775808,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (10000000000000000000000000000000000000000,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (-4,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (0,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (4.0,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': 4, }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': [4], }",
        "{'descr': '<u2', 'fortran_order': 1, 'shape': (4,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
        "{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (4,), }",
        "{'descr': ('<u2', (4,)), 'fortran_order': False, 'shape': (1,), }",
        "{'descr': None, 'fortran_order': False, 'shape': (4,), }",
        "{'descr': '', 'fortran_order': False, 'shape': (4,), }",
        "{'descr': ',', 'fortran_order': False, 'shape': (4,), }",
        "{'descr': {}, 'fortran_order': False, 'shape': (4,), }",
        "{'descr': [], 'fortran_order': False, 'shape': (4,), }",
        "{'descr': '<u2', 'shape': (4,), }",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (4,), 'more': 1}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (",
        "{[]: 1}",
        "{{}}",
        "[" * 110,
        "(" * 110,
        "-" * 110,
        "1" * 110,
        "()",
        "None",
        "__import__('os').mkdir('ran')",
        "'''",
        "\\",
        "\t\t a\n  b\n c",
        "\0\0\0",
        "\N{PILE OF POO}",
        "",
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_hostile_npy_header_is_refused(tmp_path, header, version):
    path = npy_with_header(tmp_path / "hostile.npy", header, bytes(8), version)
    with pytest.raises(TokenFileError, match=r"hostile\.npy"):
        TokenReader(path)


def test_a_well_formed_header_of_our_making_is_read(tmp_path):
    path = npy_with_header(
        tmp_path / "good.npy",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (4,), }",
        np.arange(4, dtype="<u2").tobytes(),
    )
    assert all_tokens(TokenReader(path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 200, 60_000, 2**32 - 1])
def test_an_npy_header_that_claims_another_length_is_refused(tmp_path, length):
    data = bytearray(write_npy(tmp_path / "tokens.npy", np.arange(4, dtype="<u2")).read_bytes())
    data[6:12] = b"\2\0" + length.to_bytes(4, "little")
    (tmp_path / "tokens.npy").write_bytes(bytes(data))
    with pytest.raises(TokenFileError, match=r"tokens\.npy"):
        TokenReader(tmp_path / "tokens.npy")


def test_random_damage_of_an_npy_header_is_our_own_error_or_a_sound_file(tmp_path, damaged):
    data = write_npy(tmp_path / "tokens.npy", np.arange(60, dtype="<u2")).read_bytes()
    rng = random.Random(11)
    letters = b"'\"{}()[],:<>|=uif0123456789OSUVMm -#\\\n\0\xff"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of Python 2 headers
        for _ in range(1500):
            broken = bytearray(data)
            for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
                broken[rng.randrange(128)] = rng.choice(letters)
            path = damaged(bytes(broken))
            try:
                reader = TokenReader(path)
            except TokenpipeError as error:
                assert "damaged.tok" in str(error)
                continue
            assert len(all_tokens(reader)) == len(reader)
