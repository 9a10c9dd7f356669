"""Pretrain a small GPT on real text, kill it, resume it on other micro-batches: the same tokens, the same loss.

    pip install -e '.[examples]' && python examples/pretrain.py          # about 3 minutes on 2 cores, no network

1.  Two corpora that every Python has: prose (the language reference and the standard library's docstrings)
    and code (its source files). A hash of a document's name decides whether it is held out for evaluation.
2.  A byte-level BPE is trained, and tokenize_files makes token files of JSON lines: document ends, ids in sidecars.
3.  The graph: read → slice_sequences → permute → blend 0.8/0.2 → shard_ranks → batch_samples → collate_causal_lm.
4.  The script starts itself as child processes and trains:
        uninterrupted   from the first step to the last
        killed          the same; SIGKILL hits it between two checkpoints
        resumed         a new process, from the last checkpoint, with another micro-batch size
5.  It compares: each step's tokens, by hash, must be the same in all three; the losses must agree.
6.  It asks the loader what one step held, and when a token of it is trained on, and draws the runs.

Printed: the corpora, the graph's tree, what was compared and how far it agreed, rows of one step as text.
Written to --out: token files, a tokenizer, a log for each run, the checkpoint, pretrain.png.
The exit status is 0 only if every comparison held.
"""

import argparse
import ast
import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from tokenpipe.datapipes import CausalLMCollator, TokenReader, Topology, tokenize_files
from tokenpipe.reading_services import DataLoader2

SHARES = {"prose": 0.8, "code": 0.2}
GLOBAL_BATCH_SIZE = 16
MICRO_BATCH_SIZE, RESUMED_MICRO_BATCH_SIZE = 4, 8
RUNS = ("uninterrupted", "killed", "resumed")
LOSS_TOLERANCE = 1e-3  # another micro-batch size adds the same numbers in another order
HELD_OUT = 0.02  # share of the documents
END_OF_TEXT = "<|endoftext|>"
NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides a run, in the parent and in its children."""

    out: str
    seed: int = 7
    steps: int = 300
    documents: float = 0.5  # share of the documents that is used
    vocab_size: int = 4096
    sequence_length: int = 128
    layers: int = 4
    width: int = 128
    learning_rate: float = 3e-3

    @property
    def every(self) -> int:
        """Steps between two checkpoints, and between two evaluations."""
        return self.steps // 12


SHORT = {"steps": 120, "documents": 0.2, "vocab_size": 2048, "layers": 2, "width": 64}  # for CI


# 1. Documents ---------------------------------------------------------------------------------------------


def documents(share: float) -> Iterator[tuple[str, str, str, str]]:
    """(corpus, part, name, text) of every document, in one order on every machine with this Python.

    A module's docstrings and its source have one name, so they fall on the same side of the split.
    """
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        if part := part_of(f"topics/{topic}", share):
            yield "prose", part, topic, text
    library = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        part = None if NOT_CORPUS & set(name.parts) else part_of(name.as_posix(), share)
        if part and (text := file.read_text(encoding="utf-8", errors="replace")):
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
            if docstrings := [found for node in nodes if (found := ast.get_docstring(node))]:
                yield "prose", part, name.as_posix(), "\n\n".join(docstrings)
            yield "code", part, name.as_posix(), text


def part_of(name: str, share: float) -> str | None:
    """Which part a document belongs to: decided by its name alone, so documents added later move none."""
    digest = hashlib.blake2b(name.encode(), key=b"held out", digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64  # in [0, 1)
    return "eval" if place < HELD_OUT else "train" if place < share else None


# 2. Token files -------------------------------------------------------------------------------------------


def write_token_files(s: Settings) -> None:
    """tokenizer.json, {prose,code}.{train,eval}.jsonl, and of these .tok: each document closed by <|endoftext|>."""
    texts: dict[tuple[str, str], list[str]] = {(c, part): [] for c in SHARES for part in ("train", "eval")}
    names: dict[tuple[str, str], list[str]] = {key: [] for key in texts}
    for corpus, part, name, text in documents(s.documents):
        texts[corpus, part].append(text)
        names[corpus, part].append(name)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=s.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts["prose", "train"] + texts["code", "train"], trainer)
    tokenizer.save(f"{s.out}/tokenizer.json")

    for (corpus, part), found in texts.items():
        lines, path = (Path(s.out, f"{corpus}.{part}.{kind}") for kind in ("jsonl", "tok"))
        rows = zip(found, names[corpus, part], strict=True)
        lines.write_text("".join(json.dumps({"text": text, "name": name}) + "\n" for text, name in rows))
        made = tokenize_files(lines, path, f"{s.out}/tokenizer.json", ids="name")
        size = made.text_bytes / 1e6
        print(f"  {path.name:<15}  {made.documents:>3} documents, {size:4.2f} MB, {made.tokens:>9,} tokens")


# 3. The graphs --------------------------------------------------------------------------------------------


def source(s: Settings, corpus: str, part: str) -> Any:
    """One corpus as shuffled windows of sequence_length tokens and the label token after them."""
    reader = TokenReader(Path(s.out, f"{corpus}.{part}.tok"), name=corpus, vocab_size=s.vocab_size)
    return reader.slice_sequences(s.sequence_length).permute(seed=s.seed)


def training_graph(s: Settings, micro_batch_size: int) -> CausalLMCollator:
    prose, code = (source(s, corpus, "train") for corpus in SHARES)
    return (
        prose.blend(code, weights=SHARES)
        .shard_ranks(Topology(dp_rank=0, dp_size=1), seed=s.seed)  # one process here; a rank each elsewhere
        .batch_samples(micro_batch_size, global_batch_size=GLOBAL_BATCH_SIZE)
        .collate_causal_lm(source_ids=True, sample_numbers=True)
    )


def evaluation_graph(s: Settings) -> CausalLMCollator:
    """All held-out samples once, in micro-batches of 16: the last is padded, its padding masked."""
    prose, code = (source(s, corpus, "eval") for corpus in SHARES)
    return prose.blend(code).once(tail="pad").shard_ranks(Topology()).batch_samples(16).collate_causal_lm()


# 4. Model and training: what each child process runs -----------------------------------------------------


class GPT(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(s.vocab_size, s.width), nn.Embedding(s.sequence_length, s.width)
        how: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(s.width, s.width // 32, 4 * s.width, **how) for _ in range(s.layers)]
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(s.width)
        self.mask = nn.Transformer.generate_square_subsequent_mask(s.sequence_length)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:  # (b, s) → (b, s, vocab_size)
        x = self.token(input_ids) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.norm(x) @ self.token.weight.T


def loss_of(model: GPT, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    logits = model(batch["input_ids"])  # label_ids are shifted already, and −100 where a row is padding
    return F.cross_entropy(logits.flatten(0, 1), batch["label_ids"].flatten(), reduction=reduction)


def step_hash(sample_numbers: np.ndarray, rows: np.ndarray) -> str:
    """A hash of a step's samples and tokens, whatever micro-batches they came in. rows: (n, sequence_length + 1)"""
    order = np.argsort(sample_numbers)
    numbers, tokens = sample_numbers[order].astype("<i8"), rows[order].astype("<i8")
    return hashlib.sha256(numbers.tobytes() + tokens.tobytes()).hexdigest()


def train(s: Settings, run: str, micro_batch_size: int, save: bool = False, resume: bool = False) -> None:
    """One process of one run: a line in {run}.jsonl a step, checkpoint.pt every so many steps."""
    torch.manual_seed(s.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 2) // 2)))  # two runs share the machine
    model = GPT(s)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    evaluation = DataLoader2(evaluation_graph(s))
    with DataLoader2(training_graph(s, micro_batch_size)) as loader, Path(s.out, f"{run}.jsonl").open("w") as log:
        if resume:
            checkpoint = torch.load(Path(s.out, "checkpoint.pt"), weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            loader.load_state_dict(checkpoint["loader"])
        batches = iter(loader)
        for step in range(loader.step, s.steps):
            began = time.perf_counter()
            micro_batches = [next(batches) for _ in range(loader.micro_batches(step))]
            mean_loss = 0.0
            for batch in micro_batches:
                loss = loss_of(model, batch) / len(micro_batches)
                loss.backward()
                mean_loss += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:  # warm-up, then a cosine down to a tenth
                cosine = 0.55 + 0.45 * math.cos(math.pi * step / s.steps)
                group["lr"] = s.learning_rate * min(1.0, (step + 1) / 20) * cosine
            optimizer.step()
            optimizer.zero_grad()

            whole = {key: torch.cat([batch[key] for batch in micro_batches]) for key in micro_batches[0]}
            rows = torch.cat([whole["input_ids"], whole["label_ids"][:, -1:]], dim=1)  # (n, s + 1)
            record: dict[str, Any] = {
                "step": step,
                "loss": mean_loss,
                "hash": step_hash(whole["sample_numbers"].numpy(), rows.numpy()),
                "rows": torch.bincount(whole["source_ids"], minlength=len(SHARES)).tolist(),
                "tokens_per_second": whole["label_ids"].numel() / (time.perf_counter() - began),
            }
            if (step + 1) % s.every == 0:
                record["evaluation_loss"] = evaluate(model, evaluation)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if save and (step + 1) % s.every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint(Path(s.out, "checkpoint.pt"), {**state, "loader": loader.state_dict()})


@torch.no_grad()
def evaluate(model: GPT, loader: DataLoader2) -> float:
    """Mean loss over the held-out labels; the padding of the last micro-batch does not count."""
    total, labels = 0.0, 0
    for batch in loader:
        total += loss_of(model, batch, reduction="sum").item()
        labels += int(batch["row_valid"].sum()) * batch["label_ids"].shape[1]
    return total / labels


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Whole or not at all: after a kill during the write, the checkpoint before it is still there."""
    with path.with_suffix(".tmp").open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)


# 5. The parent: run, kill, resume, compare ----------------------------------------------------------------


def read_log(s: Settings, run: str) -> list[dict[str, Any]]:
    """The records of a run, a step each; a line that is not whole yet does not count."""
    path = Path(s.out, f"{run}.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Child:
    """A run in a process of its own, and a progress bar that follows its log. Its errors go to our stderr."""

    def __init__(self, s: Settings, line: int, first: int = 0, **arguments: Any) -> None:
        self.settings, self.run = s, arguments["run"]
        task = json.dumps({"settings": dataclasses.asdict(s), **arguments})
        self.process = subprocess.Popen([sys.executable, __file__, "--child", task])
        how: Any = {"unit": "step", "ncols": 110, "disable": None}  # no bar where stderr is no terminal
        self.bar = tqdm(desc=f"  {self.run:<13}", total=s.steps, initial=first, position=line, **how)

    def follow(self) -> int:
        """Moves the bar to the end of the log; gives the steps that are done."""
        if self.process.poll():
            raise SystemExit(f"the {self.run} run failed with exit status {self.process.returncode}")
        if not (log := read_log(self.settings, self.run)):
            return 0
        self.bar.set_postfix_str(f"loss {log[-1]['loss']:.3f}, {log[-1]['tokens_per_second']:,.0f} tokens/s", False)
        self.bar.update(log[-1]["step"] + 1 - self.bar.n)
        return log[-1]["step"] + 1

    def kill(self) -> None:
        self.process.kill()  # SIGKILL: nothing in that process gets to run any more
        self.process.wait()


def run_all(s: Settings) -> None:
    """Two runs side by side; SIGKILL hits one between two checkpoints; a third goes on from the last one."""
    for run in RUNS:
        Path(s.out, f"{run}.jsonl").unlink(missing_ok=True)
    Path(s.out, "checkpoint.pt").unlink(missing_ok=True)
    saved = s.steps // 2 // s.every * s.every
    uninterrupted = Child(s, 0, run="uninterrupted", micro_batch_size=MICRO_BATCH_SIZE)
    killed = Child(s, 1, run="killed", micro_batch_size=MICRO_BATCH_SIZE, save=True)
    children = [uninterrupted, killed]
    try:
        while killed.follow() < saved + s.every // 2:
            uninterrupted.follow()
            time.sleep(0.02)
        killed.kill()
        killed.bar.set_postfix_str("killed")
        resumed = Child(s, 2, saved, run="resumed", micro_batch_size=RESUMED_MICRO_BATCH_SIZE, resume=True)
        children.append(resumed)
        while min(uninterrupted.follow(), resumed.follow()) < s.steps:
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.bar.close()


def compare(s: Settings) -> bool:
    """Prints how far the runs agree; True if not one token differs and the losses are within the tolerance."""
    whole, killed, resumed = (read_log(s, run) for run in RUNS)
    first, last = resumed[0]["step"], killed[-1]["step"]
    print(f"  killed after step {last}, resumed at step {first} with {RESUMED_MICRO_BATCH_SIZE} samples a micro-batch")
    complete = 0 < first <= last + 1 < s.steps  # the kill came in the middle, after a checkpoint
    for log, steps in ((whole, range(s.steps)), (killed, range(last + 1)), (resumed, range(first, s.steps))):
        complete &= [r["step"] for r in log] == list(steps) and all(math.isfinite(r["loss"]) for r in log)

    differ = sum(r["hash"] != whole[r["step"]]["hash"] for r in killed + resumed)
    tokens = s.sequence_length * sum(sum(r["rows"]) for r in whole)
    print(f"  {differ} of {len(killed + resumed)} steps differ in a token; the hash of all {tokens:,} tokens:")
    for name, log in (("uninterrupted", whole), ("killed and resumed", killed[:first] + resumed)):
        print(f"    {hashlib.sha256(''.join(r['hash'] for r in log).encode()).hexdigest()}  {name}")
    largest = 0.0
    for run, log in (("killed", killed), ("resumed", resumed)):
        for key in ("loss", "evaluation_loss"):
            found = max(abs(r[key] - whole[r["step"]][key]) for r in log if key in r)
            print(f"  {run + ' run, ' + key.replace('_', ' '):<28} at most {found:.1e} off")
            largest = max(largest, found)
    good = complete and not differ and largest <= LOSS_TOLERANCE
    print(f"  → the runs {'agree' if good else 'DO NOT AGREE'} (tolerance: {LOSS_TOLERANCE} of loss, no token)")
    return good


# 6. Questions to the order, and the picture ---------------------------------------------------------------


def ask(s: Settings, step: int) -> bool:
    """Prints what a step holds and when a token comes; True if that is what the run was trained on."""
    tokenizer = Tokenizer.from_file(f"{s.out}/tokenizer.json")
    loader = DataLoader2(training_graph(s, MICRO_BATCH_SIZE))
    records = loader.contents(step=step)
    rows = loader.tokens(step=step)  # (samples, sequence_length + 1), in the order of the records
    print(f"  loader.contents(step={step}): {len(records)} records, of which")
    print("  sample  micro-batch  row  source  epoch    token  file             text")
    for r, row in list(zip(records, rows, strict=True))[:6]:
        place = f"{r.sample_number:>8}  {r.micro_batch:>11}  {r.row:>3}  {r.source:<6}  {r.epoch:>5}  {r.token:>7}"
        print(f"{place}  {Path(r.file).name:<15}  {tokenizer.decode(row.tolist())[:40]!r}")
    numbers = np.array([r.sample_number for r in records])
    same = step_hash(numbers, rows) == read_log(s, "uninterrupted")[step]["hash"]
    print(f"  → all {len(rows)} together have {'the' if same else 'NOT the'} hash that the run logged at step {step}")

    asked, row, middle = records[2], rows[2], s.sequence_length // 2
    token, text = asked.token + middle, tokenizer.decode(row[middle - 8 : middle + 1].tolist())
    print(f"  loader.when(source={asked.source!r}, token={token}, steps=range({s.steps})), which ends {text!r}:")
    found = loader.when(source=asked.source, token=token, steps=range(s.steps))
    for place in found:
        print(f"  → step {place.step}, rank {place.rank}, micro-batch {place.micro_batch}, row {place.row}")
    there = any(row[:4] == (asked.step, asked.rank, asked.micro_batch, asked.row) for row in found)
    if not there:
        print("  → the row that was asked for is not among them")
    return same and there


def draw(s: Settings) -> Path:
    """pretrain.png: the losses of all runs, and each source's share, over tokens."""
    logs = {run: read_log(s, run) for run in RUNS}
    step_tokens = GLOBAL_BATCH_SIZE * s.sequence_length / 1000

    def over_tokens(run: str, key: str) -> tuple[list[float], list[float]]:
        found = [r for r in logs[run] if key in r]
        return [(r["step"] + 1) * step_tokens for r in found], [r[key] for r in found]

    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    looks = {"uninterrupted": ("#b8c4d6", 6), "resumed": ("#0b7a53", 2.2), "killed": ("#e0670c", 1)}
    for run, (color, width) in looks.items():
        top.plot(*over_tokens(run, "loss"), color=color, lw=width, label=run)
    top.plot(*over_tokens("uninterrupted", "evaluation_loss"), "o", color="black", mfc="none", ms=8, label="evaluation")
    top.plot(*over_tokens("resumed", "evaluation_loss"), ".", color="#0b7a53", ms=7, label="evaluation, resumed")
    saved, killed = logs["resumed"][0]["step"] * step_tokens, (logs["killed"][-1]["step"] + 1) * step_tokens
    top.axvspan(saved, killed, color="#e0670c", alpha=0.15, lw=0, label="lost with the kill, done again")
    where: Any = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
    top.annotate("checkpoint → SIGKILL ", (saved, 0.98), color="#e0670c", **where)
    top.set(ylabel="loss", title="Killed and resumed: the same tokens, the same loss")
    top.legend(frameon=False, ncols=2, loc="upper right")

    rows = np.array([r["rows"] for r in logs["uninterrupted"]])
    tokens, _ = over_tokens("uninterrupted", "loss")
    for i, (name, color) in enumerate(zip(SHARES, ("#3b6fb6", "#a04a9c"), strict=True)):
        bottom.plot(tokens, rows[:, i] / rows.sum(1), ".", color=color, alpha=0.3, ms=4, label=f"{name}, each step")
        bottom.plot(tokens, rows[:, i].cumsum() / rows.sum(1).cumsum(), color=color, lw=2, label=f"{name}, so far")
        bottom.axhline(SHARES[name], color="black", lw=0.8, ls="--", label="asked for" if i else None)
    bottom.set(xlabel="tokens trained on (thousands)", ylabel="share of the samples", ylim=(0, 1))
    bottom.legend(frameon=False, ncols=3, loc="center")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(s.out, "pretrain.png"), dpi=150)
    return Path(s.out, "pretrain.png")


def main() -> int:
    text, show = (__doc__ or "").partition("Printed:")[0], argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=show)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 300; with --short 120)")
    parser.add_argument("--short", action="store_true", help="a small model and part of the text, below a minute")
    parser.add_argument("--out", default=str(Path(__file__).parent / "out"), help="default: examples/out")
    parser.add_argument("--seed", type=int, default=7, help="of the model and of the order (default: 7)")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what the script starts itself with
    arguments = parser.parse_args()
    if arguments.child:
        task = json.loads(arguments.child)
        train(Settings(**task.pop("settings")), **task)
        return 0
    s = Settings(arguments.out, arguments.seed, **(SHORT if arguments.short else {}))
    s = dataclasses.replace(s, steps=s.steps if arguments.steps is None else arguments.steps)
    if s.steps < 24 or s.seed < 0:
        parser.error("--steps is at least 24, --seed at least 0")

    Path(s.out).mkdir(parents=True, exist_ok=True)
    print("Token files, from this Python's standard library")
    write_token_files(s)
    print("\nThe graph")
    print(training_graph(s, MICRO_BATCH_SIZE).tree().replace(f"{s.out}{os.sep}", ""))
    print(f"\nTraining: {s.steps} steps of {GLOBAL_BATCH_SIZE} samples, three runs", flush=True)
    run_all(s)
    print("\nCompared with the uninterrupted run")
    agree = compare(s)
    print("\nAsked of the order")
    agree &= ask(s, step=s.steps - 1)
    print(f"\nThe picture: {draw(s)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
