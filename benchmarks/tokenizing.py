"""Text to a token file: the whole command against `tokenizers`' own encode_batch, on the same text and cores.

What is isolated: what tokenize_files adds to the encoding itself. A byte-level BPE is trained on the Python
standard library's source files (no network); the text is those files as JSON lines, repeated to --megabytes.

    encode_batch     the texts are in memory already, in batches of some MB; the package's own threads, one a
                     core; the encodings are thrown away. This is the limit (encode_batch_fast: without offsets).
    tokenize_files   everything: starting the processes, reading and parsing the lines, encoding, ids as
                     integers of two bytes, document ends, ids in a sidecar, hashing, writing, fsync, the
                     finished file under its name
    …, shuffled      the same with shuffle_documents
    tokenize_shards  the same to eight files, their hashes and a manifest of them
    …, from Parquet, from .jsonl.zst    the same documents, in a file of 256 rows a group, in a packed file a core
    datatrove        its JsonlReader and DocumentTokenizer under a LocalPipelineExecutor, a task and a file of lines a
                     core; its files stay as they are, one a task (to merge them would be another step)

They take turns; a ratio is taken within its round. Before anything is timed the file's tokens are compared with
encode_batch's.

Who does not gain: whoever tokenises once. What is bought for the last per cents is a file that is whole or not
there, and a run of days that a kill does not send back to its beginning.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from report import machine, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenpipe.datapipes import TokenReader, tokenize_files, tokenize_shards

END_OF_TEXT = "<|endoftext|>"
BATCH = 4_000_000  # characters in one call of encode_batch
TARGET = 0.9


def standard_library() -> list[str]:
    """The texts of its source files, in one order."""
    found = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in found if "site-packages" not in path.parts)
    return [text for text in texts if text]


def train_tokenizer(texts: list[str], path: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def in_batches(texts: list[str]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size >= BATCH:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    return batches


def check(tokenizer: Tokenizer, texts: list[str], made: Path) -> int:
    """That the file holds what encode_batch gives, each document closed; its tokens."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    reader = TokenReader(made)
    start = 0
    for batch in in_batches(texts):
        ids = [i for encoding in tokenizer.encode_batch(batch, add_special_tokens=False) for i in (*encoding.ids, end)]
        if reader.fetch(np.arange(start, start + len(ids))).tolist() != ids:
            raise SystemExit(f"{made}: differs from encode_batch after token {start}")
        start += len(ids)
    if start != len(reader):
        raise SystemExit(f"{made}: {len(reader)} tokens, encode_batch gives {start}")
    return start


def write_parts(folder: Path, texts: list[str], suffix: str, parts: int) -> Path:
    """The documents in order in as many files of JSON lines, packed or not."""
    import fsspec

    folder.mkdir()
    for number in range(parts):
        here = texts[len(texts) * number // parts : len(texts) * (number + 1) // parts]
        with fsspec.open(str(folder / f"{number:03}.jsonl{suffix}"), "wt", compression="infer") as file:
            for text in here:
                file.write(json.dumps({"text": text, "id": "x"}) + "\n")
    return folder


def write_parquet(path: Path, texts: list[str]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=256)
    return path


def with_datatrove(lines: Path, tokenizer: Path, folder: Path, tasks: int) -> int:
    """Runs it; the tokens that it wrote."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    LocalPipelineExecutor(
        [
            JsonlReader(str(lines)),
            DocumentTokenizer(
                str(folder / "out"),
                tokenizer_name_or_path=str(tokenizer),
                eos_token=END_OF_TEXT,
                shuffle_documents=False,
            ),
        ],
        tasks=tasks,
        workers=tasks,
        logging_dir=str(folder / "logs"),
    ).run()
    return sum(path.stat().st_size for path in (folder / "out").glob("*.ds")) // 2


def measure(folder: Path, megabytes: float, rounds: int, vocab_size: int) -> tuple[dict[str, list[float]], int, int]:
    """({contender: seconds of each round}, tokens, bytes of text)."""
    library = standard_library()
    if megabytes < 10:
        library = library[:60]
    train_tokenizer(library, folder / "tokenizer.json", vocab_size)
    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        text = library[len(texts) % len(library)]
        texts.append(text)
        size += len(text.encode())
    lines = folder / "library.jsonl"
    with lines.open("w") as file:
        for k, text in enumerate(texts):
            file.write(json.dumps({"text": text, "id": k}) + "\n")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches = in_batches(texts)

    def encode(how: Callable[[list[str]], object]) -> None:
        for batch in batches:
            how(batch)

    def build(shuffled: bool, inputs: Path = lines, ids: "str | None" = "id") -> None:
        made = folder / f"{shuffled}.tok"
        tokenize_files(inputs, made, folder / "tokenizer.json", ids=ids, shuffle_documents=shuffled, progress=False)

    cores = len(os.sched_getaffinity(0))
    parts, packed = (write_parts(folder / f"parts{suffix}", texts, suffix, cores) for suffix in ("", ".zst"))
    rows = write_parquet(folder / "library.parquet", texts)
    runs = itertools.count()
    counted: list[int] = []

    def datatrove() -> None:
        counted.append(with_datatrove(parts, folder / "tokenizer.json", folder / f"datatrove-{next(runs)}", cores))

    def build_shards() -> None:
        prefix, tokenizer = folder / "shards", folder / "tokenizer.json"
        shutil.rmtree(folder / ".shards.shards", ignore_errors=True)  # all anew
        tokenize_shards(lines, prefix, tokenizer, shards=8, ids="id", progress=False)

    contenders: dict[str, Callable[[], None]] = {
        "encode_batch": lambda: encode(tokenizer.encode_batch),
        "encode_batch_fast": lambda: encode(tokenizer.encode_batch_fast),
        "tokenize_files": lambda: build(False),
        "tokenize_files, shuffled": lambda: build(True),
        "tokenize_shards": build_shards,
        "tokenize_files, from Parquet": lambda: build(False, rows, None),
        "tokenize_files, from .jsonl.zst": lambda: build(False, packed),
    }
    if all(find_spec(package) for package in ("datatrove", "orjson")):
        contenders["datatrove"] = datatrove
    build(False)
    tokens = check(tokenizer, texts, folder / "False.tok")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.Random(len(seconds["encode_batch"])).sample(list(contenders), len(contenders)):
            began = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - began)
    if set(counted) - {tokens}:
        raise SystemExit(f"datatrove made {counted} tokens, encode_batch gives {tokens}")
    return seconds, tokens, size


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenising a file over encode_batch of the same text, in turns.")
    parser.add_argument("--megabytes", type=float, default=50.0, help="of text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the tokenizer (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: a smoke test, no figures")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.rounds, options.vocab_size = 1.0, 2, 512
    if options.rounds < 1 or options.megabytes <= 0 or options.vocab_size < 300:
        parser.error("--rounds is at least 1, --megabytes above 0, --vocab-size at least 300")
    os.environ.pop("TOKENIZERS_PARALLELISM", None)  # encode_batch with all its threads
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds, tokens, size = measure(Path(folder), options.megabytes, options.rounds, options.vocab_size)
    cores = len(os.sched_getaffinity(0))
    print(f"## Tokenising {size / 1e6:,.1f} MB of text to {tokens:,} tokens on {cores} cores\n")
    print(machine("tokenizers", "datatrove", "pyarrow", "torch", "numpy", "numba"))
    print(f"\nMedians of {options.rounds} rounds:\n")
    rows = []
    for name, took in seconds.items():
        ratios = [limit / own for limit, own in zip(seconds["encode_batch"], took, strict=True)]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        target = f"≥ {TARGET:.0%}: {'yes' if middle >= TARGET else 'no'}" if name == "tokenize_files" else ""
        speed = statistics.median(tokens / s for s in took)
        rows.append([name, f"{speed:,.0f}", f"{middle:.1%}", f"{low:.0%}–{high:.0%}", target])
    if "datatrove" in seconds:
        pairs = zip(seconds["datatrove"], seconds["tokenize_files"], strict=True)
        print(f"tokenize_files over datatrove: {statistics.median(a / b for a, b in pairs):.1f} ×\n")
    print(table(["", "tokens/s", "of encode_batch", "quartiles", "target"], rows))


if __name__ == "__main__":
    main()
