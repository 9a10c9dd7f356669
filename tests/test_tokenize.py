"""Texts to token files: the documents as they came, and the same bits whatever happened on the way."""

import contextlib
import errno
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from processes import alive, in_a_child
from tokenpipe.datapipes import TokenReader, load_tokenizer, tokenize_files, verify_token_file
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DocumentError,
    TokenFileError,
    TokenIdError,
    TokenpipeError,
    WorkerError,
)
from tokenpipe.datapipes.formats.own import read_header
from tokenpipe.datapipes.tokenize import assemble, build, pool
from tokenpipe.datapipes.tokenize.documents import InputFile, Span, cut_into_pieces, read_documents
from tokenpipe.datapipes.tokenize.listing import list_inputs
from tokenpipe.datapipes.tokenize.locking import locked

END = "<|endoftext|>"
SOAK = bool(os.environ.get("TOKENPIPE_SOAK"))
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "naïve", "東京", "🙂", "{}\n", "def", "return", "0.5"]


def some_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_lines(path: Path, documents: "list[tuple[str, object]]") -> Path:
    """JSON lines with the columns text and url, blank lines among them."""
    rows = [json.dumps({"url": url, "text": text}, ensure_ascii=k % 2 == 0) for k, (text, url) in enumerate(documents)]
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def documents() -> "list[tuple[str, str]]":
    """400 documents and their ids, a few of them empty, about 60 KB."""
    rng = random.Random(5)
    return [(some_text(rng, rng.choice([0, 1, 3, 10, 60])), f"https://x/{rng.randrange(300)}") for _ in range(400)]


@pytest.fixture
def lines(tmp_path, documents) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", documents)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, documents) -> Path:
    """A tokenizer file that would also cut, pad and add a token of its own, if it were let."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for text, _ in documents], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9)
    path = tmp_path_factory.mktemp("bpe") / "small-bpe.json"
    tokenizer.save(str(path))
    return path


def documents_of(path: Path) -> "list[list[int]]":
    reader = TokenReader(path)
    tokens, ends = reader.fetch(np.arange(len(reader))).tolist(), reader.document_ends().tolist()
    return [tokens[low:high] for low, high in zip([0, *ends], ends, strict=False)]


def made(path: Path) -> bytes:
    """All bits of a token file and of its ids."""
    verify_token_file(path)
    ids = path.with_name(path.name + ".ids")
    return path.read_bytes() + (ids.read_bytes() if ids.exists() else b"")


def names_in(folder: Path) -> "list[str]":
    return sorted(path.name for path in folder.iterdir())


def build_it(lines: Path, output: Path, **settings: object):
    return tokenize_files(lines, output, "byte", **{"ids": "url", "workers": 2, "piece_bytes": 5000, **settings})


# What stands in the file --------------------------------------------------------------------------------


def test_documents_come_back_as_they_were_each_closed_and_the_empty_ones_are_counted(tmp_path, lines, documents):
    summary = tokenize_files(lines, tmp_path / "x.tok", "byte", workers=1)
    full = [text for text, _ in documents if text]
    assert documents_of(tmp_path / "x.tok") == [[*text.encode(), 256] for text in full]
    assert load_tokenizer("byte").decode(documents_of(tmp_path / "x.tok")[0]) == full[0] + END
    size = sum(len(text.encode()) for text in full)
    assert (summary.documents, summary.empty_documents) == (len(full), len(documents) - len(full))
    assert (summary.tokens, summary.text_bytes, summary.dtype) == (size + len(full), size, "uint16")
    assert f"{len(full)} documents (" in str(summary) and END in str(summary)
    assert names_in(tmp_path) == ["corpus.jsonl", "x.tok"]


def test_a_tokenizer_file_gives_the_ids_that_the_package_gives_without_cutting_or_adding(
    tmp_path, lines, documents, bpe
):
    tokenize_files(lines, tmp_path / "x.tok", bpe, workers=1)
    own = Tokenizer.from_file(str(bpe))
    own.no_truncation()
    own.no_padding()
    end = own.token_to_id(END)
    expected = [[*own.encode(text, add_special_tokens=False).ids, end] for text, _ in documents if text]
    assert documents_of(tmp_path / "x.tok") == expected
    reader, header = TokenReader(tmp_path / "x.tok"), read_header(tmp_path / "x.tok")
    assert reader.files[0].vocab_size == own.get_vocab_size() and header is not None
    assert (header.tokenizer, header.end_of_text) == ("small-bpe", end)
    assert header.tokenizer_hash == load_tokenizer(bpe).hash
    assert load_tokenizer(bpe).decode(expected[3]) == [text for text, _ in documents if text][3] + END


def test_ids_stand_beside_the_documents_that_have_tokens(tmp_path, lines, documents):
    build_it(lines, tmp_path / "x.tok")
    reader = TokenReader(tmp_path / "x.tok")
    kept = [url for text, url in documents if text]
    assert [reader.document_id(k) for k in range(len(kept))] == kept
    assert len(set(kept)) < len(kept)
    assert reader.find_documents(kept[7]) == [k for k, url in enumerate(kept) if url == kept[7]]


def test_a_shuffle_is_a_permutation_of_the_documents_and_their_ids_move_along(tmp_path, lines, documents):
    orders = []
    for seed in (7, 8):
        build_it(lines, tmp_path / "x.tok", shuffle_documents=True, seed=seed)
        reader = TokenReader(tmp_path / "x.tok")
        found = [
            (bytes(ids[:-1]).decode(), reader.document_id(k)) for k, ids in enumerate(documents_of(tmp_path / "x.tok"))
        ]
        full = [(text, url) for text, url in documents if text]
        assert found != full and sorted(found) == sorted(full)
        orders.append(found)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_the_bits_are_the_same_for_any_workers_and_pieces(tmp_path, lines, bpe, tokenizer, shuffled, monkeypatch):
    bits = set()
    for workers, piece_bytes, block in ((1, None, 1 << 24), (3, 5000, 500), (2, 700, 1)):
        monkeypatch.setattr(assemble, "BLOCK_BYTES", block)
        monkeypatch.setattr(assemble, "SHUFFLED", 1 << 16 if workers == 1 else 37)
        tokenize_files(
            [lines],
            tmp_path / "x.tok",
            bpe if tokenizer == "bpe" else "byte",
            ids="url",
            workers=workers,
            piece_bytes=piece_bytes,
            shuffle_documents=shuffled,
        )
        bits.add(made(tmp_path / "x.tok"))
    assert len(bits) == 1
    assert names_in(tmp_path) == ["corpus.jsonl", "x.tok", "x.tok.ids"]


def test_a_file_made_without_ids_takes_away_those_of_the_file_before_it(tmp_path, lines):
    build_it(lines, tmp_path / "x.tok")
    build_it(lines, tmp_path / "x.tok", ids=None)
    assert names_in(tmp_path) == ["corpus.jsonl", "x.tok"]
    assert TokenReader(tmp_path / "x.tok").document_id(0) is None


def test_documents_may_be_closed_by_another_token_or_by_none(tmp_path, lines, bpe):
    tokenize_files(lines, tmp_path / "x.tok", bpe, end_of_text="<s>", workers=1)
    assert {ids[-1] for ids in documents_of(tmp_path / "x.tok")} == {0}
    tokenize_files(lines, tmp_path / "y.tok", bpe, end_of_text=False, workers=1)
    assert documents_of(tmp_path / "y.tok") == [ids[:-1] for ids in documents_of(tmp_path / "x.tok")]
    header = read_header(tmp_path / "y.tok")
    assert header is not None and header.end_of_text is None


def test_text_files_are_a_document_each_in_the_order_of_their_names_and_their_ids_are_their_paths(tmp_path):
    for name in ("b/2.txt", "b/1.md", "a.py", "b/.hidden", "c/d/e.txt", ".git/x"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"I am {name}\r\n")
    write_lines(tmp_path / "in" / "z.jsonl", [("one", 17), ("two", -3)])
    tokenize_files(tmp_path / "in", tmp_path / "in" / "x.tok", "byte", ids="url", workers=2)
    texts = [bytes(ids[:-1]).decode() for ids in documents_of(tmp_path / "in" / "x.tok")]
    assert texts == ["I am a.py\r\n", "one", "two", "I am b/1.md\r\n", "I am b/2.txt\r\n", "I am c/d/e.txt\r\n"]
    reader = TokenReader(tmp_path / "in" / "x.tok")
    assert [reader.document_id(k) for k in (0, 1, 2)] == [str(tmp_path / "in" / "a.py"), "17", "-3"]
    before = made(tmp_path / "in" / "x.tok")
    tokenize_files(tmp_path / "in", tmp_path / "in" / "x.tok", "byte", ids="url", workers=1)  # x.tok is no input
    assert made(tmp_path / "in" / "x.tok") == before


# Killed, and run again ----------------------------------------------------------------------------------


def children_of(process: int) -> "list[int]":
    found = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_killed_run_leaves_nothing_and_no_worker_and_the_next_gives_the_same_bits(tmp_path, lines, shuffled):
    build_it(lines, tmp_path / "good.tok", shuffle_documents=shuffled)
    good = made(tmp_path / "good.tok")
    output, work = tmp_path / "x.tok", tmp_path / "x.tok.pieces"
    kept = 0
    for finished in [*range(0, 13, 4), *(range(13) if SOAK else ())]:
        child = in_a_child(lambda: build_it(lines, output, shuffle_documents=shuffled, workers=3))
        workers: set[int] = set()
        while not output.exists() and len(list(work.glob("*.piece")) if work.exists() else []) < finished:
            workers |= {*children_of(child)}
            assert alive(child) or output.exists(), "the run failed by itself"
            time.sleep(0.001)
        workers |= {*children_of(child)}
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        until = time.monotonic() + 2
        while any(map(alive, workers)):
            assert time.monotonic() < until, "a worker outlives its parent"
            time.sleep(0.01)
        if output.exists():  # it was quicker than its killer
            assert made(output) == good
        summary = build_it(lines, output, shuffle_documents=shuffled, workers=1)
        kept += summary.kept_pieces
        assert made(output) == good
        for path in (output, output.with_name("x.tok.ids")):
            path.unlink()
        assert not work.exists()
    assert kept > 0


def test_a_run_killed_at_each_of_its_last_steps_is_finished_by_the_next(tmp_path, lines):
    """Each fsync, rename and removal of the main process once, killed just before it."""
    build_it(lines, tmp_path / "good.tok")
    good = made(tmp_path / "good.tok")
    output = tmp_path / "x.tok"

    def killed_at(step: int) -> None:
        left = [step]

        def counted(call):
            def wrapper(*arguments, **settings):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*arguments, **settings)

            return wrapper

        os.fsync, Path.replace, Path.unlink = counted(os.fsync), counted(Path.replace), counted(Path.unlink)
        build_it(lines, output, workers=1, piece_bytes=20_000)

    for step in range(100):
        process = in_a_child(lambda step=step: killed_at(step))
        _, status = os.waitpid(process, 0)
        if output.exists():
            assert made(output) == good
        if os.waitstatus_to_exitcode(status) == 0:
            break
        if SOAK or step % 3 == 0:
            build_it(lines, output, workers=1, piece_bytes=20_000)
            assert made(output) == good
            assert names_in(tmp_path) == ["corpus.jsonl", "good.tok", "good.tok.ids", "x.tok", "x.tok.ids"]
            output.unlink()
    assert step > 8 and made(output) == good


def test_pieces_of_other_arguments_or_of_an_older_input_are_never_used(tmp_path, lines, documents):
    output, work = tmp_path / "x.tok", tmp_path / "x.tok.pieces"
    write_lines(tmp_path / "bad.jsonl", [("x", "y")]).open("a").write("no json\n")
    for settings in ({}, {"ids": None}, {"end_of_text": False}, {"dtype": "uint32"}, {"column": "url"}):
        with pytest.raises(DocumentError):
            build_it([lines, tmp_path / "bad.jsonl"], output, **settings)
    assert len(names_in(work)) > 20
    changed = [(text.upper(), url) for text, url in documents]
    write_lines(lines, changed)
    build_it(lines, tmp_path / "good.tok", workers=1)
    assert build_it(lines, output).kept_pieces == 0
    assert made(output) == made(tmp_path / "good.tok")
    assert not work.exists()


def test_a_killed_worker_is_an_error_and_the_next_run_goes_on(tmp_path, lines):
    output = tmp_path / "x.tok"
    begun = set(children_of(os.getpid()))
    killed = threading.Event()

    def kill() -> None:
        while not killed.is_set():
            for worker in set(children_of(os.getpid())) - begun:
                os.kill(worker, signal.SIGKILL)
                killed.set()
            time.sleep(0.001)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(WorkerError, match="SIGKILL"):
            build_it(lines, output)
    finally:
        killed.set()
        thread.join()
    assert not output.exists()
    build_it(lines, output)
    build_it(lines, tmp_path / "good.tok")
    assert made(output) == made(tmp_path / "good.tok")


def test_a_full_disk_is_a_named_error_leaves_nothing_half_written_and_the_next_run_gives_the_same_bits(tmp_path, lines):
    build_it(lines, tmp_path / "good.tok")
    good = made(tmp_path / "good.tok")
    output = tmp_path / "x.tok"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (100, 3000, 30_000, len(output.name) + (tmp_path / "good.tok").stat().st_size - 50):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(TokenFileError, match=r"x\.tok") as caught:
                    build_it(lines, output)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert caught.value.errno == errno.EFBIG and "run the same again" in str(caught.value)
            assert not output.exists()
            work = tmp_path / "x.tok.pieces"
            assert all(name.endswith(".piece") for name in (names_in(work) if work.exists() else []))
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert build_it(lines, output).kept_pieces > 5
    assert made(output) == good


def test_the_second_of_two_runs_refuses_and_a_lock_ends_with_its_process(tmp_path, lines):
    output, work = tmp_path / "x.tok", tmp_path / "x.tok.pieces"

    def hold() -> None:
        with locked(work):
            (tmp_path / "held").touch()
            time.sleep(60)

    holder = in_a_child(hold)
    while not (tmp_path / "held").exists():
        time.sleep(0.001)
    try:
        with pytest.raises(ConfigurationError, match=r"another run makes x\.tok now"):
            build_it(lines, output)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    build_it(lines, output)
    assert not work.exists()


def test_a_work_folder_with_files_that_are_not_ours_keeps_them(tmp_path, lines):
    (tmp_path / "x.tok.pieces").mkdir()
    (tmp_path / "x.tok.pieces" / "letter.txt").write_text("dear")
    build_it(lines, tmp_path / "x.tok")
    assert names_in(tmp_path / "x.tok.pieces") == ["letter.txt"]


# What is refused ----------------------------------------------------------------------------------------

BAD_LINES = {
    "no JSON": b'{"text": "a"\n',
    "a list, not a JSON object": b'["text"]\n',
    "no column 'text'; it has 'txt', 'url'": b'{"txt": "a", "url": "b"}\n',
    r"column 'text' holds 3 \(int\), not a string": b'{"text": 3, "url": "b"}\n',
    r"column 'text' holds None": b'{"text": null, "url": "b"}\n',
    "no column 'url'": b'{"text": "a"}\n',
    "holds True .bool., not a string or an integer": b'{"text": "a", "url": true}\n',
    "is empty": b'{"text": "a", "url": ""}\n',
    "not UTF-8: byte 0xff at offset 79": b'{"text": "a\xff", "url": "b"}\n',
    "nested|recursion": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, what):
    path = write_lines(tmp_path / "a.jsonl", [("a good one", "x"), ("another", "y")])
    with path.open("ab") as file:
        file.write(BAD_LINES[what])
        file.write(b'{"text": "after it", "url": "z"}\n')
    (file,) = list_inputs(path)
    with pytest.raises(DocumentError, match=rf"a\.jsonl, line 4: .*({what})") as caught:
        for (span,) in cut_into_pieces([file], 60):
            list(read_documents(span, "text", "url"))
    assert isinstance(caught.value, ValueError)


def test_an_error_in_a_worker_keeps_its_class_and_its_words_and_no_file_is_made(tmp_path, lines):
    with lines.open("a") as file:
        file.write('{"text": "half a pair: \\ud83d", "url": "x"}\n')
    number = lines.read_bytes().count(b"\n")
    with pytest.raises(DocumentError, match=rf"corpus\.jsonl, line {number}: .*U\+D83D"):
        build_it(lines, tmp_path / "x.tok")
    assert not (tmp_path / "x.tok").exists()


def test_a_text_file_that_is_no_utf_8_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\nsecond \xe9\n")
    (file,) = list_inputs(tmp_path / "a.txt")
    with pytest.raises(DocumentError, match=r"a\.txt, line 2: not UTF-8: byte 0xe9 at offset 16"):
        list(read_documents(Span(file, 0, file.size), "text", None))


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    tokenize_files([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "x.tok", "byte", workers=1)
    assert documents_of(tmp_path / "x.tok") == [[*b"one", 256], [*b"two", 256]]


def test_every_line_is_read_once_wherever_the_cuts_fall(tmp_path):
    rng = random.Random(11)
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "é" * rng.randrange(9)}) + "\r\n\n" * rng.randrange(1, 3) for _ in range(30))
    )
    (file,) = list_inputs(path)
    whole = list(read_documents(Span(file, 0, file.size), "text", None))
    assert len(whole) == 30
    for cut in range(1, file.size):
        spans = [Span(file, 0, cut), Span(file, cut, file.size)]
        assert [found for span in spans for found in read_documents(span, "text", None)] == whole, cut


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path, lines):
    (file,) = list_inputs(lines)
    for stale in (file._replace(size=file.size - 1), file._replace(mtime_ns=file.mtime_ns - 1)):
        with pytest.raises(TokenFileError, match="written to while"):
            list(read_documents(Span(stale, 0, stale.size), "text", None))
    gone = InputFile(str(tmp_path / "gone"), "text", 3, 0)
    with pytest.raises(TokenFileError, match="gone"):
        list(read_documents(Span(gone, 0, 3), "text", None))


def test_bad_arguments_are_refused_before_any_process_starts(tmp_path, lines, bpe, monkeypatch):
    def no_process(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(build, "Workers", no_process)
    (tmp_path / "packed.tar.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty").mkdir()
    table: list[tuple[type, str, dict[str, object]]] = [
        (TokenFileError, "nowhere", {"inputs": "nowhere.txt"}),
        (ConfigurationError, "names no file", {"inputs": str(tmp_path / "*.nothing")}),
        (ConfigurationError, "names no file", {"inputs": tmp_path / "empty"}),
        (ConfigurationError, "no input", {"inputs": []}),
        (ConfigurationError, "named twice", {"inputs": [lines, lines]}),
        (ConfigurationError, "archives", {"inputs": tmp_path / "packed.tar.gz"}),
        (ConfigurationError, "kind", {"kind": "csv"}),
        (ConfigurationError, "is a folder", {"output": tmp_path}),
        (ConfigurationError, "does not exist", {"output": tmp_path / "no" / "x.tok"}),
        (TokenFileError, "no such tokenizer", {"tokenizer": "./nowhere.json"}),
        (TokenFileError, "no tokenizer", {"tokenizer": lines}),
        (ConfigurationError, "<eos>", {"tokenizer": bpe, "end_of_text": "<eos>"}),
        (ConfigurationError, "only token", {"end_of_text": "</s>"}),
        (ConfigurationError, "workers", {"workers": 0}),
        (ConfigurationError, "seed", {"seed": -1}),
        (ConfigurationError, "dtype", {"dtype": "float32"}),
        (ConfigurationError, "piece_bytes", {"piece_bytes": 0}),
        (ArgumentTypeError, "column", {"column": None}),
        (ArgumentTypeError, "inputs", {"inputs": 7}),
        (ArgumentTypeError, "workers", {"workers": "many"}),
        (ArgumentTypeError, "tokenizer", {"tokenizer": 7}),
    ]
    for kind, message, wrong in table:
        settings: dict[str, object] = {"inputs": lines, "output": tmp_path / "x.tok", "tokenizer": "byte", **wrong}
        with pytest.raises(kind, match=message):
            tokenize_files(**settings)  # type: ignore[arg-type]
        assert names_in(tmp_path) == ["corpus.jsonl", "empty", "packed.tar.gz"], wrong


def test_ids_that_do_not_fit_the_dtype_are_an_error_never_another_id(tmp_path, lines, bpe):
    with pytest.raises(TokenpipeError, match="uint8"):
        tokenize_files(lines, tmp_path / "x.tok", bpe, dtype="uint8", workers=1)
    assert not (tmp_path / "x.tok").exists()


def test_inputs_without_text_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="no text"):
        tokenize_files([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "x.tok", "byte", workers=1)
    assert names_in(tmp_path) == ["a.txt", "b.jsonl"] or not (tmp_path / "x.tok").exists()


# Tokenizers ---------------------------------------------------------------------------------------------


def test_the_end_of_text_is_what_the_configuration_beside_it_says_else_a_common_name_else_none(tmp_path, bpe):
    text = bpe.read_text()
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(text)
    assert load_tokenizer(folder).end_of_text_name == END
    assert load_tokenizer(folder / "tokenizer.json").name == "my-model"
    for token in ('"<s>"', '{"content": "<s>", "lstrip": false}'):
        (folder / "tokenizer_config.json").write_text(f'{{"eos_token": {token}}}')
        assert load_tokenizer(folder).end_of_text == 0
        assert load_tokenizer(folder, end_of_text=END).end_of_text == 1
    (tmp_path / "none.json").write_text(text.replace(END, "<|unheard|>"))
    assert load_tokenizer(tmp_path / "none.json").end_of_text is None
    with pytest.raises(ConfigurationError, match="end_of_text="):
        tokenize_files(bpe, tmp_path / "x.tok", tmp_path / "none.json")


def test_bytes_decode_to_their_text_and_other_ids_are_refused():
    byte = load_tokenizer("byte")
    (ids,) = byte.encode_batch(["naïve 東京 🙂"])
    assert byte.decode(ids) == "naïve 東京 🙂"
    assert byte.decode(ids[:3]) == "na\ufffd"
    for wrong in (257, -1):
        with pytest.raises(TokenIdError, match=str(wrong)):
            byte.decode([0, wrong])


# Processes and memory -----------------------------------------------------------------------------------


def test_a_worker_imports_neither_torch_nor_numba():
    program = pool._START.replace("main()", "print(sorted({'torch', 'numba', 'tqdm'} & {*sys.modules}))")
    here = Path(pool.__file__).parent
    command = [sys.executable, "-c", program, json.dumps(sys.path), str(here.parent), str(here)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"[]\n"


MEMORY = """
import json, sys
from pathlib import Path
from tokenpipe.datapipes import tokenize_files
from tokenpipe.datapipes.tokenize.pool import Workers

def peak(process):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

class Watched(Workers):
    def close(self):  # they are still there, and have nothing more to do
        print(max(peak(process.pid) for process in self._processes))
        super().close()

tokenize_files.__globals__["Workers"] = Watched
how = {"ids": "url", "workers": 1, "shuffle_documents": True, "piece_bytes": 1 << 20}
tokenize_files(sys.argv[1], sys.argv[1] + ".tok", "byte", **how)
print(peak("self"))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])  # cut into pieces; one piece
def test_memory_does_not_grow_with_the_input(tmp_path, suffix):
    peaks = []
    row = json.dumps({"url": "https://example.org/", "text": "x" * 7900}) + "\n"
    for megabytes in (8, 32) if suffix == "jsonl" else (4, 24):
        path = tmp_path / f"{megabytes}.{suffix}"
        with gzip.open(path, "wt") if suffix.endswith("gz") else path.open("w") as file:
            file.write(row * (megabytes * 125))
        done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append([int(line) for line in done.stdout.split()])
    for who, small, large in zip(("the worker", "the run"), *peaks, strict=True):
        assert large - small < 12_000, f"{who}: {small} KiB at the small one, {large} KiB at the large one"
