"""Pretrain a small GPT on real text, kill it, resume it on other micro-batches: the same tokens, the same loss.

    pip install -e '.[examples]' && python examples/pretrain.py          # some minutes on 2 cores, no network

1.  Two corpora that every Python has: prose (the language reference and all docstrings of the standard library)
    and code (its source files). A hash of a document's name decides whether it is held out for evaluation.
2.  A byte-level BPE is trained, and token files with document ends are written.
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
from tokenpipe.datapipes import CausalLMCollator, TokenFileWriter, TokenReader, Topology
from tokenpipe.reading_services import DataLoader2
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

SHARES = {"prose": 0.8, "code": 0.2}
GLOBAL_BATCH_SIZE = 16
MICRO_BATCH_SIZE, RESUMED_MICRO_BATCH_SIZE = 4, 8
LOSS_TOLERANCE = 0.02  # another micro-batch size adds the same numbers in another order
NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run of the example; `--short` is a small one, for CI."""

    out: Path
    seed: int = 7
    steps: int = 360
    documents: float = 1.0  # share of the documents that is used
    held_out: float = 0.02
    vocab_size: int = 4096
    sequence_length: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4

    @property
    def every(self) -> int:
        """Steps between two checkpoints, and between two evaluations."""
        return max(2, self.steps // 12)


SHORT = {"steps": 120, "documents": 0.25, "vocab_size": 2048, "layers": 2, "width": 64}


# 1. Documents ---------------------------------------------------------------------------------------------


def documents() -> Iterator[tuple[str, str, str]]:
    """(corpus, name, text) of every document, in one order on every machine with this Python."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield "prose", f"topics/{topic}", text
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        if NOT_CORPUS & set(name.parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        docstrings = [found for node in nodes if (found := ast.get_docstring(node))]
        yield "prose", name.as_posix(), "\n\n".join(docstrings)
        yield "code", name.as_posix(), text


def place_of(name: str) -> float:
    """A number in [0, 1) from a document's name alone: adding documents later moves none to the other side."""
    digest = hashlib.blake2b(name.encode(), key=b"held out", digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# 2. Token files -------------------------------------------------------------------------------------------


def write_token_files(s: Settings) -> None:
    """tokenizer.json and {prose,code}.{train,eval}.tok, each document closed by <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts: dict[tuple[str, str], list[str]] = {(c, part): [] for c in SHARES for part in ("train", "eval")}
    for corpus, name, text in documents():
        if text and place_of(name) < s.documents:
            texts[corpus, "eval" if place_of(name) < s.held_out else "train"].append(text)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=s.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts["prose", "train"] + texts["code", "train"], trainer)
    tokenizer.save(str(s.out / "tokenizer.json"))

    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    for (corpus, part), found in texts.items():
        path = s.out / f"{corpus}.{part}.tok"
        with TokenFileWriter(path, vocab_size=s.vocab_size, end_of_text=end_of_text) as writer:
            for encoding in tokenizer.encode_batch(found):
                writer.write([*encoding.ids, end_of_text])
        megabytes = sum(len(text.encode()) for text in found) / 1e6
        print(f"  {path.name:<15} {writer.documents:>4} documents, {megabytes:5.2f} MB, {writer.tokens:>9,} tokens")


# 3. The graphs --------------------------------------------------------------------------------------------


def source(s: Settings, corpus: str, part: str) -> Any:
    """One corpus as shuffled windows of sequence_length tokens and the label token after them."""
    reader = TokenReader(s.out / f"{corpus}.{part}.tok", name=corpus, vocab_size=s.vocab_size)
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


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (b, s, width)
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (b, heads, s, width / heads)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(s.vocab_size, s.width), nn.Embedding(s.sequence_length, s.width)
        self.blocks = nn.Sequential(*(Block(s.width, s.heads) for _ in range(s.layers)))
        self.norm = nn.LayerNorm(s.width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:  # (b, s) → (b, s, vocab_size)
        x = self.token(input_ids) + self.place.weight[: input_ids.shape[1]]
        return self.norm(self.blocks(x)) @ self.token.weight.T


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
    graph = training_graph(s, micro_batch_size)
    first = 0
    with DataLoader2(graph) as loader, (s.out / f"{run}.jsonl").open("w") as log:
        if resume:
            checkpoint = torch.load(s.out / "checkpoint.pt", weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            loader.load_state_dict(checkpoint["loader"])
            first = checkpoint["loader"]["step"]
        batches = iter(loader)
        for step in range(first, s.steps):
            began = time.perf_counter()
            warm, done = min(1.0, (step + 1) / 20), step / s.steps
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * warm * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
            micro_batches = [next(batches) for _ in range(GLOBAL_BATCH_SIZE // micro_batch_size)]
            total = 0.0
            for batch in micro_batches:
                loss = loss_of(model, batch) / len(micro_batches)
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            whole = {key: torch.cat([batch[key] for batch in micro_batches]) for key in micro_batches[0]}
            rows = torch.cat([whole["input_ids"], whole["label_ids"][:, -1:]], dim=1)
            record: dict[str, Any] = {
                "step": step,
                "loss": total,
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
                save_checkpoint(s.out / "checkpoint.pt", {**state, "loader": loader.state_dict()})


@torch.no_grad()
def evaluate(model: GPT, loader: DataLoader2) -> float:
    """Mean loss over the held-out labels; iterating it moves nothing in the training loader."""
    total, labels = 0.0, 0
    for batch in loader:
        total += loss_of(model, batch, reduction="sum").item()
        labels += int((batch["label_ids"] >= 0).sum())
    return total / labels


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Whole or not at all: a kill during the write leaves the checkpoint before it in place."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# 5. The parent: run, kill, resume, compare ----------------------------------------------------------------


def read_log(s: Settings, run: str) -> list[dict[str, Any]]:
    """The whole lines of a run's log: the one that a kill cut off does not count."""
    path = s.out / f"{run}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Child:
    """A run in a process of its own, and a progress bar that follows its log. Errors come through stderr."""

    def __init__(self, s: Settings, line: int, first: int = 0, **arguments: Any) -> None:
        self.settings, self.run = s, arguments["run"]
        what = {"settings": {**dataclasses.asdict(s), "out": str(s.out)}, **arguments}
        self.process = subprocess.Popen([sys.executable, __file__, "--child", json.dumps(what)])
        name, total = f"  {self.run:<13}", s.steps
        self.bar = tqdm(desc=name, total=total, initial=first, position=line, unit="step", ncols=110, disable=None)

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
    for old in (*s.out.glob("*.jsonl"), *s.out.glob("checkpoint.*")):
        old.unlink()
    saved = s.steps // 2 // s.every * s.every
    whole = Child(s, 0, run="uninterrupted", micro_batch_size=MICRO_BATCH_SIZE)
    killed = Child(s, 1, run="killed", micro_batch_size=MICRO_BATCH_SIZE, save=True)
    children = [whole, killed]
    try:
        while killed.follow() < saved + s.every // 2:
            whole.follow()
            time.sleep(0.02)
        killed.kill()
        killed.bar.set_postfix_str("SIGKILL")
        resumed = Child(s, 2, saved, run="resumed", micro_batch_size=RESUMED_MICRO_BATCH_SIZE, resume=True)
        children.append(resumed)
        while min(whole.follow(), resumed.follow()) < s.steps:
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.bar.close()


def compare(s: Settings) -> bool:
    """Prints how far the runs agree; True if not one token differs and the losses are within the tolerance."""
    whole, killed, resumed = (read_log(s, run) for run in ("uninterrupted", "killed", "resumed"))
    first, last = resumed[0]["step"], killed[-1]["step"]
    complete = [[r["step"] for r in log] for log in (whole, killed, resumed)] == [
        list(range(s.steps)), list(range(last + 1)), list(range(first, s.steps)),
    ] and 0 < first <= last + 1 < s.steps  # fmt: skip
    print(f"  killed   steps 0 … {last}, micro-batches of {MICRO_BATCH_SIZE}, last checkpoint after {first} steps")
    print(f"  resumed  steps {first} … {resumed[-1]['step']}, micro-batches of {RESUMED_MICRO_BATCH_SIZE}")
    differ = sum(r["hash"] != whole[r["step"]]["hash"] for r in killed + resumed)
    tokens = s.sequence_length * sum(sum(r["rows"]) for r in whole)
    print(f"  tokens   {differ} of {len(killed + resumed)} steps differ; the hash of all {tokens:,} tokens is")
    for name, log in (("uninterrupted", whole), ("resumed", killed[:first] + resumed)):
        print(f"           {hashlib.sha256(''.join(r['hash'] for r in log).encode()).hexdigest()}  {name}")
    largest = []
    for name, log in (("killed", killed), ("resumed", resumed)):
        for key in ("loss", "evaluation_loss"):
            largest.append(max(abs(r[key] - whole[r["step"]][key]) for r in log if key in r))
            print(f"  {key.replace('_', ' '):<16} {name:<8} differs by at most {largest[-1]:.1e}")
    good = complete and not differ and max(largest) <= LOSS_TOLERANCE
    print(f"  tolerance {LOSS_TOLERANCE}: " + ("the runs agree" if good else "THE RUNS DIFFER"))
    return good


# 6. Questions to the order, and the picture ---------------------------------------------------------------


def ask(s: Settings, step: int) -> bool:
    """Prints what a step holds and when a token comes; True if that is what the run was trained on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(s.out / "tokenizer.json"))
    loader = DataLoader2(training_graph(s, MICRO_BATCH_SIZE))
    records = loader.contents(step=step)
    rows = [TokenReader(r.file).fetch(range(r.file_token, r.file_token + s.sequence_length + 1)) for r in records]
    print(f"  loader.contents(step={step}), the first 6 of {len(rows)} rows:")
    print("  sample  micro-batch  row  source  epoch      token  file            text")
    for r, row in list(zip(records, rows, strict=True))[:6]:
        place = f"{r.sample_number:>8}  {r.micro_batch:>11}  {r.row:>3}  {r.source:<6}  {r.epoch:>5}  {r.token:>9,}"
        print(f"{place}  {Path(r.file).name:<14}  {tokenizer.decode(row.tolist())[:40]!r}")
    numbers = np.array([r.sample_number for r in records])
    same = read_log(s, "uninterrupted")[step]["hash"] == step_hash(numbers, np.stack(rows))
    print(f"  their hash {'is' if same else 'IS NOT'} the one that the run logged for step {step}")

    asked, middle = records[2], s.sequence_length // 2
    token, text = asked.token + middle, tokenizer.decode(rows[2][middle : middle + 1].tolist())
    found = loader.when(source=asked.source, token=token, steps=range(s.steps))
    print(f"  loader.when(source={asked.source!r}, token={token}, steps=range({s.steps})), the token is {text!r}:")
    for place in found:
        print(f"    step {place.step}, rank {place.rank}, micro-batch {place.micro_batch}, row {place.row}")
    return same and asked[:4] in [tuple(place) for place in found]


def draw(s: Settings) -> Path:
    """pretrain.png: the losses of all runs, and each source's share, over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    logs = {run: read_log(s, run) for run in ("uninterrupted", "killed", "resumed")}

    def over_tokens(run: str, key: str) -> tuple[list[float], list[float]]:
        found = [r for r in logs[run] if key in r]
        return [(r["step"] + 1) * GLOBAL_BATCH_SIZE * s.sequence_length / 1000 for r in found], [r[key] for r in found]

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 7), sharex=True, height_ratios=[3, 2], layout="constrained")
    colors = {"uninterrupted": "#b8c4d6", "killed": "#d95f02", "resumed": "#0b7a53"}
    for run, color in colors.items():
        top.plot(*over_tokens(run, "loss"), color=color, lw=5 if run == "uninterrupted" else 1.2, label=run)
    whole, stitched = (over_tokens(run, "evaluation_loss") for run in ("uninterrupted", "resumed"))
    top.plot(*whole, "o", color="black", mfc="none", ms=9, label="evaluation, uninterrupted")
    top.plot(*stitched, ".", color=colors["resumed"], ms=7, label="evaluation, resumed")
    x, y = over_tokens("killed", "loss")
    top.plot(x[-1], y[-1], "X", color=colors["killed"], ms=12, mec="white", zorder=5)
    top.annotate("SIGKILL", (x[-1], y[-1]), (0, 24), textcoords="offset points", ha="center", color=colors["killed"])
    top.set(ylabel="loss", title="Killed and resumed: the same tokens, the same loss")
    top.legend(frameon=False, ncols=2)

    rows = np.array([r["rows"] for r in logs["uninterrupted"]])
    tokens, _ = over_tokens("uninterrupted", "loss")
    for i, (name, color) in enumerate(zip(SHARES, ("#3b6fb6", "#a04a9c"), strict=True)):
        bottom.plot(tokens, rows[:, i] / rows.sum(1), ".", color=color, alpha=0.3, ms=4, label=f"{name}, each step")
        bottom.plot(tokens, rows[:, i].cumsum() / rows.sum(1).cumsum(), color=color, lw=2, label=f"{name}, so far")
        bottom.axhline(SHARES[name], color="black", lw=0.8, ls="--", label="asked for" if i else None)
    bottom.set(xlabel="tokens trained on (thousands)", ylabel="share of the samples", ylim=(0, 1))
    bottom.legend(frameon=False, ncols=3, loc="center")
    figure.savefig(s.out / "pretrain.png", dpi=150)
    return s.out / "pretrain.png"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("Printed:")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 360; with --short 120)")
    parser.add_argument("--short", action="store_true", help="a small model and a part of the text: below a minute")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="default: examples/out")
    parser.add_argument("--seed", type=int, default=7, help="of the model and of the order (default: 7)")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what the script starts itself with
    arguments = parser.parse_args()
    if arguments.child:
        what = json.loads(arguments.child)
        settings = what.pop("settings")
        train(Settings(**{**settings, "out": Path(settings["out"])}), **what)
        return 0
    s = Settings(arguments.out, arguments.seed, **(SHORT if arguments.short else {}))
    if arguments.steps is not None:
        s = dataclasses.replace(s, steps=arguments.steps)
    if s.steps < 24 or s.seed < 0:
        parser.error("--steps is at least 24, --seed at least 0")

    s.out.mkdir(parents=True, exist_ok=True)
    print("Token files, from this Python's standard library")
    write_token_files(s)
    print("\nThe graph")
    graph = training_graph(s, MICRO_BATCH_SIZE)
    print(graph.tree().replace(f"{s.out}{os.sep}", ""))
    print(f"\nTraining, {s.steps} steps of {GLOBAL_BATCH_SIZE} samples", flush=True)
    run_all(s)
    print("\nCompared with the uninterrupted run")
    agree = compare(s)
    print("\nAsked of the order")
    agree &= ask(s, step=read_log(s, "killed")[-1]["step"])
    print(f"\nThe picture: {draw(s)}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
