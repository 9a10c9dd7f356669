"""`tokenpipe tokenize` and `tokenpipe inspect`, as they are typed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tokenpipe.cli.main import main
from tokenpipe.datapipes import TokenFileWriter, TokenReader, tokenize_files

PROGRAM = [sys.executable, "-c", "import sys; from tokenpipe.cli.main import main; sys.exit(main())"]


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"text {k}" * (k % 9), "url": f"https://x/{k}"} for k in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokenize_makes_the_file_that_the_call_makes_and_says_what_it_made(tmp_path, lines, capsys):
    output = tmp_path / "x.tok"
    command = ["tokenize", str(lines), "--output", str(output), "--tokenizer", "byte", "--ids", "url"]
    assert main([*command, "--shuffle-documents", "--seed", "3", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "177 documents (23 empty ones left out)" in out and "tokens/s" in out
    assert not err  # no bar where stderr is no terminal
    tokenize_files(lines, tmp_path / "y.tok", "byte", ids="url", shuffle_documents=True, seed=3, workers=1)
    assert output.read_bytes() == (tmp_path / "y.tok").read_bytes()
    assert main([*command, "--workers", "1", "--progress"]) == 0
    assert "100%" in capsys.readouterr().err
    assert output.read_bytes() != (tmp_path / "y.tok").read_bytes()


def test_an_error_is_one_line_and_an_exit_status(tmp_path, lines, capsys):
    lines.open("a").write("[]\n")
    command = ["tokenize", str(lines), "--output", str(tmp_path / "x.tok"), "--tokenizer", "byte", "--workers", "1"]
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith("tokenpipe tokenize: ") and "a.jsonl, line 201: a list" in err


def test_an_interrupt_ends_all_processes_and_says_how_to_go_on(tmp_path, lines):
    fifo_like = tmp_path / "long.jsonl"
    fifo_like.write_text(lines.read_text() * 3000)
    output = tmp_path / "x.tok"
    command = [*PROGRAM, "tokenize", str(fifo_like), "--output", str(output), "--tokenizer", "byte", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "x.tok.pieces").glob("*.piece")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    if process.returncode == 0:  # it was through
        assert output.exists()
        return
    assert process.returncode == 130 and "goes on from here" in err
    assert "Traceback" not in err and not output.exists()
    assert main(command[3:]) == 0
    assert len(TokenReader(output).document_ends()) == 177 * 3000


def inspect(capsys, *arguments: object) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_inspect_shows_header_counts_lengths_samples_and_ids(tmp_path, lines, capsys):
    tokenize_files(lines, tmp_path / "x.tok", "byte", ids="url", workers=1)
    text = inspect(capsys, tmp_path / "x.tok", "--tokenizer", "byte", "--verify")
    assert re.search(r"documents +177, ", text) and re.search(r"end of text +id 256", text)
    assert re.search(r"tokenizer +byte \([0-9a-f]{16}…\)\n", text)
    assert re.search(r"document ids +.*x\.tok\.ids: 177", text)
    counts = [int(line.split()[3].replace(",", "")) for line in text.splitlines() if re.match(r" +[\d,]+ … ", line)]
    assert sum(counts) == 177 and "shortest 7, longest 65" in text
    assert "document 0 (https://x/1), 7 tokens:\n    text 1<|endoftext|>\n" in text
    assert "document 176 (https://x/199)" in text
    assert "verified" in text


def test_inspect_says_when_the_tokenizer_is_another(tmp_path, capsys):
    with TokenFileWriter(tmp_path / "x.tok", vocab_size=257, tokenizer="theirs", tokenizer_hash=b"other") as writer:
        writer.write(list(b"hi\x1b[31m\n"))
    text = inspect(capsys, tmp_path / "x.tok", "--tokenizer", "byte")
    assert "theirs" in text and "ANOTHER" in text
    assert "\x1b" not in text and "hi\\x1b[31m\\n" in text  # a terminal obeys no token


@pytest.mark.parametrize("kind", ["npy", "raw"])
def test_inspect_works_for_every_kind_and_says_what_it_does_not_store(tmp_path, capsys, kind):
    tokens = np.arange(500, dtype=np.uint16)
    path = tmp_path / ("x.npy" if kind == "npy" else "x.bin")
    if kind == "npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    text = inspect(capsys, path, *(() if kind == "npy" else ("--dtype", "uint16")), "--samples", 2, "--tokens", 4)
    assert re.search(r"tokens +500 uint16", text)
    for line in ("documents", "vocabulary", "tokenizer", "end of text"):
        assert re.search(rf"{line} .*not stored in this kind of file", text)
    assert "from token 0 on:\n    0 1 2 3 …\n" in text and "    496 497 498 499\n" in text


def test_the_histogram_counts_every_length_in_its_power_of_two():
    from tokenpipe.cli import inspect as module

    lengths = [1, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**40, 2**53 - 1]
    before, module.BLOCK = module.BLOCK, 3
    try:
        found = module.histogram(np.cumsum(lengths).astype(np.uint64))
    finally:
        module.BLOCK = before
    table = {}
    for line in found[:-1]:
        low, _, high, count, *_ = line.replace(",", "").split()
        table[int(low), int(high)] = int(count)
    assert {k: n for k, n in table.items() if n} == {
        (low, 2 * low - 1): sum(low <= length < 2 * low for length in lengths)
        for low in (1, 2, 4, 8, 512, 1024, 2**40, 2**52)
    }


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main(["inspect", os.fspath(tmp_path / "none.tok")]) == 1
    assert "none.tok" in capsys.readouterr().err
