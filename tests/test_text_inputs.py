"""Where texts come from: packed files, Parquet, Arrow, data sets, remote files; the bits are those of plain lines."""

import bz2
import gzip
import importlib.util
import json
import lzma
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from fault_server import Fault, FaultServer
from tokenpipe.cli.main import main
from tokenpipe.datapipes import JsonLinesReader, TokenReader, tokenize_files
from tokenpipe.datapipes.errors import ConfigurationError, DocumentError, RemoteFileError, TokenFileError
from tokenpipe.datapipes.tokenize import columns, opening
from tokenpipe.datapipes.tokenize.documents import Document, Span, cut_into_pieces, read_documents
from tokenpipe.datapipes.tokenize.listing import list_inputs

PACK: "dict[str, Callable[[bytes], bytes]]" = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lz4.frame.compress,
}
ROWS = 500


@pytest.fixture(scope="module")
def rows() -> "list[dict[str, object]]":
    """Texts and ids, a few texts empty, about 100 KB."""
    rng = random.Random(3)
    words = ["the", "quick", "naïve", "東京", "🙂", "{}\n", "return", "\0", "0.5"]
    return [
        {"id": 7 * k, "text": " ".join(rng.choice(words) for _ in range(rng.choice([0, 1, 5, 80])))}
        for k in range(ROWS)
    ]


@pytest.fixture(scope="module")
def plain(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def lines(tmp_path, plain) -> Path:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(plain)
    return path


def write_parquet(path: Path, rows: "list[dict[str, object]]", group: int = 60, text: object = None) -> Path:
    names = pa.array([row["id"] for row in rows], pa.int64())
    texts = pa.array([row["text"] for row in rows], text or pa.string())
    table = pa.table({"noise": pa.array([[k] for k in range(len(rows))]), "text": texts, "id": names})
    pq.write_table(table, path, row_group_size=group)
    return path


def write_arrow(path: Path, rows: "list[dict[str, object]]", stream: bool = True, text: object = None) -> Path:
    texts = pa.array([row["text"] for row in rows], text or pa.string())
    table = pa.table({"text": texts, "id": [row["id"] for row in rows]})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return path


def made(path: Path) -> bytes:
    return path.read_bytes() + path.with_name(path.name + ".ids").read_bytes()


def build(inputs: object, output: Path, **settings: object) -> bytes:
    how = {"ids": "id", "workers": 1, "piece_bytes": 9000, **settings}
    tokenize_files(inputs, output, "byte", **how)  # type: ignore[arg-type]
    return made(output)


def read(path: Path, piece_bytes: int = 1 << 30, column: str = "text", ids: "str | None" = "id") -> "list[Document]":
    spans = [span for piece in cut_into_pieces(list_inputs(path), piece_bytes) for span in piece]
    return [found for span in spans for found in read_documents(span, column, ids)]


def texts_of(documents: "list[Document]") -> "list[tuple[str, str]]":
    return [(found.text, found.id) for found in documents]


# The same bits however they are packed --------------------------------------------------------------------------


def test_the_same_documents_give_the_same_bits_whatever_they_lie_in(tmp_path, lines, plain, rows):
    datasets = pytest.importorskip("datasets")
    expected = build(lines, tmp_path / "x.tok")
    inputs: dict[str, object] = {}
    for suffix, pack in PACK.items():
        inputs[suffix] = tmp_path / f"a.jsonl.{suffix}"
        Path(str(inputs[suffix])).write_bytes(pack(plain))
    inputs["parquet"] = write_parquet(tmp_path / "a.parquet", rows)
    inputs["two"] = [write_parquet(tmp_path / "b.parquet", rows[:41]), write_arrow(tmp_path / "c.arrow", rows[41:])]
    inputs["arrow file"] = write_arrow(tmp_path / "d.arrow", rows, stream=False)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(str(tmp_path / "both"))
    inputs["data set"], inputs["dict"] = tmp_path / "saved", tmp_path / "both"
    ways = ((2, 9000), (1, 1 << 20))
    for k, (name, one) in enumerate(inputs.items()):
        for workers, size in ways if os.environ.get("TOKENPIPE_SOAK") else ways[k % 2 :][:1]:
            assert build(one, tmp_path / "y.tok", workers=workers, piece_bytes=size) == expected, (name, workers)


def test_load_dataset_is_asked_for_names(tmp_path, lines, rows, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    expected = build(lines, tmp_path / "x.tok")
    folder = tmp_path / "builder"
    folder.mkdir()
    write_parquet(folder / "train-0.parquet", rows[:123])
    write_parquet(folder / "train-1.parquet", rows[123:])
    write_parquet(folder / "test-0.parquet", rows[:5])
    name = f"dataset:{folder}"
    assert build(name, tmp_path / "y.tok", workers=2) == expected
    build(name, tmp_path / "z.tok", split="test")
    assert len(TokenReader(tmp_path / "z.tok").document_ends()) == sum(bool(row["text"]) for row in rows[:5])
    for split, what in (("train[:10%]", "is a part of what lies on the disk"), ("dev", "cannot be loaded.*dev")):
        with pytest.raises(ConfigurationError, match=what):
            list_inputs(name, split=split)
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        list_inputs(f"dataset:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow file"])
def test_every_row_is_read_once_wherever_the_cuts_fall(tmp_path, rows, kind):
    path = tmp_path / f"a.{kind.split()[0]}"
    small = rows[:90]
    write_parquet(path, small, 7) if kind == "parquet" else write_arrow(path, small, kind == "arrow")
    whole = read(path)
    assert texts_of(whole) == [(row["text"], str(row["id"])) for row in small]
    (file,) = list_inputs(path)
    used = 0
    begins = {file.size * first // 90 for first in range(7, 90, 7)}  # of row groups
    if kind != "parquet":
        with pa.memory_map(str(path)) as source:
            begins = {low for _, low, _ in columns._walked(source, file.size)} - {0}
    for cut in sorted({*range(1, file.size, 37), *begins}):
        spans = [Span(file, 0, cut), Span(file, cut, file.size)]
        parts = [list(read_documents(span, "text", "id")) for span in spans]
        assert parts[0] + parts[1] == whole, cut
        used += bool(parts[0] and parts[1])
    assert used > 10 and sum(found.taken for found in whole) <= file.size


def test_a_parquet_file_is_work_for_many(tmp_path, rows):
    path = write_parquet(tmp_path / "a.parquet", rows, 10)
    (file,) = list_inputs(path)
    pieces = list(cut_into_pieces([file], file.size // 8))
    assert len(pieces) >= 8
    assert all(0 < len(list(read_documents(span, "text", "id"))) < ROWS // 4 for (span,) in pieces[:8])


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_over_every_kind_gives_the_same_bits_when_it_was_killed(tmp_path, plain, rows, killed):
    (tmp_path / "in").mkdir()
    for suffix in ("gz", "zst"):
        (tmp_path / "in" / f"a.jsonl.{suffix}").write_bytes(PACK[suffix](plain))
    write_parquet(tmp_path / "in" / "b.parquet", rows)
    write_arrow(tmp_path / "in" / "c.arrow", rows)
    expected = build(tmp_path / "in", tmp_path / "x.tok", workers=2, shuffle_documents=True, seed=5)
    if killed:
        program = (
            "import sys; from tokenpipe.datapipes import tokenize_files\n"
            "tokenize_files(sys.argv[1], sys.argv[2], 'byte', ids='id', workers=2, piece_bytes=9000, "
            "shuffle_documents=True, seed=5)"
        )
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "y.tok")])
        folder = tmp_path / "y.tok.pieces"
        while process.poll() is None and len(list(folder.glob("*.piece")) if folder.exists() else []) < 2:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    summary = tokenize_files(
        tmp_path / "in", tmp_path / "y.tok", "byte", ids="id", piece_bytes=9000, shuffle_documents=True, seed=5
    )
    assert made(tmp_path / "y.tok") == expected
    assert bool(summary.kept_pieces) == killed


# Packed files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
def test_members_one_after_another_are_read_to_the_end(tmp_path, lines, plain, suffix):
    cut = plain.index(b"\n", 20_000) - 7  # inside a line
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(b"".join(map(PACK[suffix], (plain[:cut], b"", plain[cut:]))))
    assert texts_of(read(path)) == texts_of(read(lines))
    if suffix in ("gz", "xz"):  # padding between members and behind them
        path.write_bytes(PACK[suffix](plain[:cut]) + bytes(8) + PACK[suffix](plain[cut:]) + bytes(4))
        assert texts_of(read(path)) == texts_of(read(lines))
    if suffix in ("zst", "lz4"):  # frames that hold no text
        note = struct.pack("<II", 0x184D2A53, 5) + b"12345"
        path.write_bytes(note + PACK[suffix](plain[:cut]) + note + PACK[suffix](plain[cut:]) + note)
        assert texts_of(read(path)) == texts_of(read(lines))


@pytest.mark.parametrize("suffix", PACK)
def test_a_cut_or_damaged_archive_is_an_error_with_its_line_and_never_the_end_of_the_text(tmp_path, plain, suffix):
    rng = random.Random(9)
    path = tmp_path / f"a.jsonl.{suffix}"
    half = plain[: plain.index(b"\n", len(plain) // 2) + 1]
    whole = PACK[suffix](half) + PACK[suffix](plain[len(half) :])
    first = len(PACK[suffix](half))
    for cut in {0, 1, first - 1, first + 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))} - {first}:
        path.write_bytes(whole[:cut])
        with pytest.raises(TokenFileError, match=rf"a\.jsonl\.{suffix}, line \d+: the archive"):
            read(path)
    path.write_bytes(whole[: first + 3])
    with pytest.raises(TokenFileError, match=rf", line {half.count(10) + 1}: the archive ends inside"):
        read(path)
    path.write_bytes(whole + b"garbage behind it")
    with pytest.raises(TokenFileError, match=rf", line {plain.count(10) + 1}: the archive"):
        read(path)
    path.write_bytes(plain)
    with pytest.raises(TokenFileError, match=f"line 1: the archive is damaged, or no {suffix}"):
        read(path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])  # the others have checksums only where they were asked for
def test_a_flipped_bit_of_an_archive_with_checksums_is_an_error_or_changes_no_text(tmp_path, lines, plain, suffix):
    whole, rng, expected = PACK[suffix](plain), random.Random(6), texts_of(read(lines))
    path, refused = tmp_path / f"a.jsonl.{suffix}", 0
    for _ in range(40 if not os.environ.get("TOKENPIPE_SOAK") else 2000):
        wrong = bytearray(whole)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        try:
            assert texts_of(read(path)) == expected
        except (TokenFileError, DocumentError) as error:
            refused += str(path) in str(error)
    assert refused > 30


def test_a_bad_line_of_a_packed_file_is_named_and_a_packed_text_is_a_document(tmp_path, plain):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(plain) + gzip.compress(b'\n{"text": 3}\n'))
    with pytest.raises(DocumentError, match=rf"a\.jsonl\.gz, line {ROWS + 2}: column 'text' holds 3"):
        read(path, ids=None)
    (tmp_path / "b.txt.zst").write_bytes(PACK["zst"]("\ufeffnaïve\n".encode()))
    assert texts_of(read(tmp_path / "b.txt.zst")) == [("naïve\n", str(tmp_path / "b.txt.zst"))]
    (tmp_path / "b.txt.zst").write_bytes(PACK["zst"](b"naive")[:-2])
    with pytest.raises(TokenFileError, match=r"b\.txt\.zst: the archive"):
        read(tmp_path / "b.txt.zst")


@pytest.mark.parametrize("suffix", PACK)
def test_what_unpacks_to_a_thousand_times_its_size_is_read_in_little_memory(tmp_path, suffix):
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(PACK[suffix](line * 30_000))
    (file,) = list_inputs(tmp_path / f"a.jsonl.{suffix}")
    largest = 0
    with opening.opened(file) as stream:
        for block in opening.Unpacked(stream, suffix)._unpack():
            largest = max(largest, len(block))
    assert 0 < largest <= 24_000_000
    found = read_documents(Span(file, 0, file.size), "text", None)
    assert sum(one.taken for one in found) == file.size


def test_what_is_missing_or_not_read_is_named(tmp_path, lines, plain, rows, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(PACK["zst"](plain))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "c.parquet.gz").write_bytes(gzip.compress(plain))
    write_parquet(tmp_path / "d.parquet", rows)
    for name, kind, what in (
        ("b.tar.gz", "auto", "archives of several files"),
        ("c.parquet.gz", "auto", "packed parquet"),
        ("d.parquet", "jsonl", "kind is 'jsonl'"),
        ("a.jsonl.zst", "parquet", "kind is 'parquet'"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            list_inputs(tmp_path / name, kind)
    with pytest.raises(ConfigurationError, match="plain JSON lines"):
        JsonLinesReader(tmp_path / "a.jsonl.zst")
    found = importlib.util.find_spec
    for name, package in (("a.jsonl.zst", "zstandard"), ("d.parquet", "pyarrow")):
        monkeypatch.setattr(
            "tokenpipe.datapipes.tokenize.listing.find_spec", lambda one, p=package: None if one == p else found(one)
        )
        with pytest.raises(ConfigurationError, match=rf"pip install {package}.*tokenpipe\[tokenize\]"):
            list_inputs(tmp_path / name)


# Parquet and Arrow ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_every_type_of_strings_is_text(tmp_path, rows, write, kind):
    text = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    path = write(tmp_path / ("a.parquet" if write is write_parquet else "a.arrow"), rows, text=text)
    assert texts_of(read(path, 5000)) == [(row["text"], str(row["id"])) for row in rows]
    assert texts_of(read(path, ids=None)) == [(row["text"], "") for row in rows]
    assert texts_of(read(write(path, rows[:2], text=text), ids="text")) == [(row["text"],) * 2 for row in rows[:2]]


def table_of(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_a_column_that_is_missing_nested_or_no_text_is_refused_with_those_that_would_do(tmp_path):
    path = table_of(tmp_path / "a.parquet", body=["a"], meta=[{"text": "b"}], n=[1], list=[["x"]])
    for column, ids, what in (
        ("text", None, "no column 'text'; it has 'body', 'meta', 'n', 'list'"),
        ("meta.text", None, "no column 'meta.text'"),
        ("meta", None, "'meta' is struct<.*nested; columns that would do: 'body'"),
        ("list", None, "'list' is list<.*nested"),
        ("n", None, "'n' is int64; columns that would do: 'body'"),
        ("body", "meta", "'meta' is struct.*columns that would do: 'body', 'n'"),
        ("body", "id", "no column 'id'"),
    ):
        with pytest.raises(DocumentError, match=rf"a\.parquet: .*{what}"):
            read(path, column=column, ids=ids)


def test_a_row_without_text_or_id_is_named(tmp_path):
    path = table_of(tmp_path / "a.parquet", text=["a", "b", "c", None], id=["x", "", None, "z"])
    with pytest.raises(DocumentError, match=r"a\.parquet, row 3 \(counted from 0\): column 'text' holds null"):
        read(path, ids=None)
    with pytest.raises(DocumentError, match=r"row 1 .*column 'id' is empty"):
        read(path)
    path = table_of(tmp_path / "b.parquet", text=["a", "b", "c"], id=[1, 2, None])
    with pytest.raises(DocumentError, match=r"row 2 .*column 'id' holds null"):
        read(path)
    bad = pa.Array.from_buffers(pa.string(), 3, pa.array([b"ok", b"\xff", b"a"]).buffers())
    path = table_of(tmp_path / "c.parquet", text=bad)
    with pytest.raises(DocumentError, match=r"row 1 .*not UTF-8"):
        read(path, ids=None)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow file"])
def test_a_damaged_file_of_rows_is_an_error_or_its_own_text_and_never_a_crash(tmp_path, rows, kind):
    path = tmp_path / f"a.{kind.split()[0]}"
    write_parquet(path, rows) if kind == "parquet" else write_arrow(path, rows, kind == "arrow")
    whole, rng = path.read_bytes(), random.Random(4)
    print("seed 4")
    for cut in (0, 1, 8, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(TokenFileError, match=rf"a\.{kind.split()[0]}"):
            read(path)
    for _ in range(30 if not os.environ.get("TOKENPIPE_SOAK") else 2000):
        wrong = bytearray(whole)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        try:
            read(path, 1 << 14)
        except (TokenFileError, DocumentError) as error:
            assert str(path) in str(error)


def test_only_the_named_columns_are_read_and_a_row_group_never_whole(tmp_path):
    rng = np.random.default_rng(2)
    texts = [rng.bytes(6000).hex() for _ in range(4000)]  # 48 MB, in one group
    table = pa.table({"text": texts, "other": [rng.bytes(9000) for _ in texts]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4000, use_dictionary=False, data_page_size=1 << 16)
    del table
    (file,) = list_inputs(tmp_path / "a.parquet")
    before, most = pa.total_allocated_bytes(), 0
    for number, found in enumerate(read_documents(Span(file, 0, file.size), "text", None)):
        assert found.text == texts[number]
        most = max(most, pa.total_allocated_bytes() - before)
    assert number == 3999 and most < 20_000_000, most


# Data sets on the disk ------------------------------------------------------------------------------------------


def test_a_data_set_inside_a_folder_is_taken_as_its_rows_and_a_missing_split_is_named(tmp_path, rows):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": dataset.shuffle(seed=1), "dev": dataset}).save_to_disk(str(tmp_path / "in" / "set"))
    (tmp_path / "in" / "a.txt").write_text("first")
    found = read_all(list_inputs(tmp_path / "in", split="dev"))
    assert found == ["first", *(row["text"] for row in rows)]
    shuffled = read_all(list_inputs(tmp_path / "in" / "set"))
    assert shuffled != found[1:] and sorted(shuffled) == sorted(found[1:])
    with pytest.raises(ConfigurationError, match="no split 'test'; it has 'train', 'dev'"):
        list_inputs(tmp_path / "in", split="test")
    state = tmp_path / "in" / "set" / "dev" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../../a.txt"}]}))
    with pytest.raises(TokenFileError, match="is no Arrow file in its folder"):
        list_inputs(tmp_path / "in" / "set", split="dev")


def read_all(files: "list[opening.InputFile]") -> "list[str]":
    return [one.text for file in files for one in read_documents(Span(file, 0, file.size), "text", None)]


def test_a_file_of_rows_that_changes_is_refused(tmp_path, rows):
    for path in (write_parquet(tmp_path / "a.parquet", rows), write_arrow(tmp_path / "b.arrow", rows)):
        (file,) = list_inputs(path)
        stale = file._replace(mtime_ns=file.mtime_ns - 1)
        with pytest.raises(TokenFileError, match="written to while"):
            list(read_documents(Span(stale, 0, stale.size), "text", None))


# Folders --------------------------------------------------------------------------------------------------------


def test_folders_links_and_hidden_files_are_listed_in_one_order(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a/1.txt", "z.txt", ".hidden", "b/.git/x", "Z.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in" / "link.txt").symlink_to("z.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    names = [os.path.relpath(file.path, tmp_path / "in") for file in list_inputs(tmp_path / "in")]
    assert names == ["Z.txt", "link.txt", "z.txt", "a/1.txt", "b/10.txt", "b/2.txt"]
    out = tmp_path / "in" / "b" / "2.txt"
    names = [os.path.relpath(file.path, tmp_path / "in") for file in list_inputs(tmp_path / "in", leave_out=[out])]
    assert names == ["Z.txt", "link.txt", "z.txt", "a/1.txt", "b/10.txt"]
    (tmp_path / "in" / "gone").symlink_to("nowhere")
    with pytest.raises(TokenFileError, match="gone"):
        list_inputs(tmp_path / "in")


# Remote files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A client of a loopback S3 with the bucket `texts`."""
    import botocore.session
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "a-user"),
            ("AWS_SECRET_ACCESS_KEY", "a-secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache"))),
        ):
            patch.setenv(name, value)
        client = botocore.session.get_session().create_client("s3")
        client.create_bucket(Bucket="texts")
        yield client
    server.stop()


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("TOKENPIPE_RETRY_SECONDS", "20")
    with FaultServer() as server:
        yield server


def got(client, key: str, bucket: str = "texts") -> bytes:
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()


def keys(client, prefix: str) -> "set[str]":
    return {one["Key"] for one in client.list_objects_v2(Bucket="texts", Prefix=prefix)["Contents"]}


def test_remote_inputs_and_a_remote_output_give_the_same_bits(tmp_path, s3, plain, rows):
    half = plain[: plain.index(b"\n", len(plain) // 2) + 1]
    write_parquet(tmp_path / "c.parquet", rows)
    write_arrow(tmp_path / "d.arrow", rows)
    (tmp_path / "a.jsonl").write_bytes(half)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain[len(half) :]))
    local = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.arrow")]
    for path in local:
        s3.put_object(Bucket="texts", Key=f"in/{path.name}", Body=path.read_bytes())
    s3.put_object(Bucket="texts", Key="in/.hidden", Body=b"no text")
    s3.put_object(Bucket="texts", Key="out/x.tok.loss", Body=b"of an older file")
    expected = build(local, tmp_path / "x.tok")
    rest = ["s3://texts/in/c.parquet", "s3://texts/in/d.arrow"]
    for workers, inputs in ((2, ["s3://texts/in/"]), (1, ["s3://texts/in/[ab].jsonl*", *rest])):
        summary = tokenize_files(
            inputs, "s3://texts/out/x.tok", "byte", ids="id", workers=workers, piece_bytes=9000, work=tmp_path
        )
        assert got(s3, "out/x.tok") + got(s3, "out/x.tok.ids") == expected
        assert summary.path == "s3://texts/out/x.tok" and summary.pieces > 8
    assert keys(s3, "out/") == {"out/x.tok", "out/x.tok.ids"} and not list(tmp_path.glob("*.pieces"))
    tokenize_files(rest, "s3://texts/out/x.tok", "byte", workers=1)  # in the user's cache folder, without ids
    assert keys(s3, "out/") == {"out/x.tok"}


def test_a_text_has_its_url_as_its_id_without_what_lets_in(web):
    web.put("/a.txt", b"naive")
    (file,) = list_inputs(web.url("/a.txt") + "?token=secret")
    (found,) = read_documents(Span(file, 0, file.size), "text", "id")
    assert found.text == "naive" and found.id == web.url("/a.txt") == found.where


def test_a_network_that_fails_now_and_then_changes_no_bit_and_one_that_does_not_come_back_is_named(
    tmp_path, web, lines, plain, monkeypatch
):
    expected = build(lines, tmp_path / "x.tok")
    url = web.put("/a.jsonl", plain)
    web.script("/a.jsonl", 503, Fault(reset=100), Fault(short=10), Fault(status=429, retry_after="0"))
    assert build(url, tmp_path / "y.tok", workers=2, piece_bytes=40_000) == expected
    assert web.count("/a.jsonl") > 6
    monkeypatch.setenv("TOKENPIPE_RETRY_SECONDS", "1")
    web.script("/a.jsonl", always=Fault(status=503))
    with pytest.raises(RemoteFileError, match=r"a\.jsonl"):
        build(url, tmp_path / "z.tok")
    assert not (tmp_path / "z.tok").exists()


def test_a_remote_file_that_changes_after_it_was_listed_is_refused(web, plain):
    (file,) = list_inputs(web.put("/a.jsonl", plain))
    assert len(list(read_documents(Span(file, 0, file.size), "text", None))) == ROWS
    web.put("/a.jsonl", plain.replace(b"quick", b"thick"))
    with pytest.raises(TokenFileError, match=r"changed.*a\.jsonl"):
        list(read_documents(Span(file, 0, file.size), "text", None))
    with pytest.raises(TokenFileError, match="nowhere"):
        list_inputs(web.url("/nowhere.jsonl"))


def test_a_remote_file_of_lines_is_read_in_its_parts_and_a_bad_line_is_named(web, plain):
    body = plain * 40  # 4 MB
    (file,) = list_inputs(web.put("/a.jsonl", body))
    spans = [span for piece in cut_into_pieces([file], 1 << 20) for span in piece]
    assert sum(len(list(read_documents(span, "text", "id"))) for span in spans) == 40 * ROWS
    sent = sum(size for method, _, _, size in web.requests if method == "GET")
    assert sent < len(body) + len(spans) * 200_000
    (file,) = list_inputs(web.put("/b.jsonl", plain + b"{}\n"))
    with pytest.raises(DocumentError, match=rf"b\.jsonl, line {ROWS + 1}: no column 'text'"):
        list(read_documents(Span(file, file.size - 2000, file.size), "text", None))


def test_of_a_remote_parquet_file_only_its_columns_are_fetched(tmp_path, web, rows):
    texts = [row["text"] for row in rows]
    table = pa.table({"text": texts, "big": [os.urandom(5000) for _ in rows]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    (file,) = list_inputs(web.put("/a.parquet", (tmp_path / "a.parquet").read_bytes()))
    assert [one.text for one in read_documents(Span(file, 0, file.size), "text", None)] == texts
    assert sum(size for method, _, _, size in web.requests if method == "GET") < file.size // 4


def test_a_run_whose_upload_failed_tokenises_nothing_again(tmp_path, s3, lines):
    expected = build(lines, tmp_path / "x.tok")
    url, how = "s3://not-yet/x.tok", {"ids": "id", "piece_bytes": 9000, "work": tmp_path}
    with pytest.raises(TokenFileError):
        tokenize_files(lines, url, "byte", **how)
    s3.create_bucket(Bucket="not-yet")
    summary = tokenize_files(lines, url, "byte", **how)
    assert summary.kept_pieces == summary.pieces > 8
    assert got(s3, "x.tok", "not-yet") + got(s3, "x.tok.ids", "not-yet") == expected
    assert not list(tmp_path.glob("*.pieces"))


def test_a_remote_output_that_cannot_be_is_refused_before_any_work(tmp_path, lines):
    for output, work, what in (
        ("s3://texts/folder/", tmp_path, "the URL of a file"),
        ("s3://user:secret@texts/x.tok", tmp_path, "without user"),
        ("s3://texts/x.tok", tmp_path / "nowhere", "which is no folder"),
        (tmp_path / "x.tok", tmp_path, "is no URL"),
    ):
        with pytest.raises(ConfigurationError, match=what) as caught:
            tokenize_files(lines, output, "byte", work=work)
        assert "secret" not in str(caught.value)


def test_the_command_takes_urls_a_split_and_a_folder_to_work_in(tmp_path, s3, lines, rows, capsys):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": dataset.select([0]), "dev": dataset}).save_to_disk(str(tmp_path / "both"))
    expected = build(lines, tmp_path / "x.tok")
    command = ["tokenize", str(tmp_path / "both"), "--split", "dev", "--output", "s3://texts/cli/x.tok"]
    assert main([*command, "--tokenizer", "byte", "--ids", "id", "--workers", "1", "--work", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("s3://texts/cli/x.tok: ")
    assert got(s3, "cli/x.tok") + got(s3, "cli/x.tok.ids") == expected
    assert main([*command, "--tokenizer", "byte", "--work", str(tmp_path / "nowhere")]) == 1
    assert "which is no folder" in capsys.readouterr().err
