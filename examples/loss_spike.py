"""A run's loss spikes: find the document, roll back, mask it or jump over it, go on, and prove what was trained on.

    pip install -e '.[examples]' && python examples/loss_spike.py        # about a minute on 2 cores, no network

1.  Three corpora that every Python has, as JSON lines with an id for each document: docs (docstrings), code (source
    files), manual (the language reference). Into docs slips a PDF that somebody took for text. `tokenize_files`.
2.  The run is written down as a recipe, rehearsed (`plan`), and launched: docs 0.6, code 0.4.
3.  In the morning: the loss has spiked. The script finds the steps from the losses alone, asks the loader what they
    held, and scores it with the model of the last checkpoint before: which document is it?
4.  Rolled back to that checkpoint, the run goes on in two ways:
        jumped      the steps that hold the document are left out (`jump`)
        repaired    the document's rows are masked in their places (`exclude`), all others stay where they were
5.  The repaired run is changed on the way: the manual is added (`add_source`), a fresh loader goes on from
    the recipe and a checkpoint, and the blend is re-weighted (`update_weights`).
6.  The account: each delivered row is looked up in the token files and in its source's own order. How many were
    repeated, lost, masked, moved? Certificates, 8 bytes a step, name the first step in which two runs differ.

Written to --out: token files and ids, recipes, states, certificates, checkpoints, loss_spike.png.
The exit status is 0 only if every comparison held.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from tokenpipe.cli.main import main as tokenpipe_command
from tokenpipe.datapipes import Certificate, TokenReader, batch_certificate, certify, load_recipe
from tokenpipe.datapipes.tokenize import ByteTokenizer, tokenize_files
from tokenpipe.reading_services import DataLoader2

LAUNCHED = {"docs": 0.6, "code": 0.4}
WITH_MANUAL = {"docs": 0.45, "code": 0.3, "manual": 0.25}
REWEIGHTED = {"docs": 0.2, "code": 0.5, "manual": 0.3}
MORNING, ADDED, RESUMED, REWEIGHTED_AT = 10, 11, 14, 16  # after so many of 20 checkpoints
BATCH, SEQUENCE_LENGTH = 16, 128
CALM = 20  # steps whose median loss is what the next one is measured by
SPIKE, LASTING = 1.3, 3  # times that median, for as many steps or more: a spike
TOLERANCE = 1e-3  # of loss, where two runs are given the same rows
NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class Settings:
    out: str
    seed: int = 7
    steps: int = 400
    documents: float = 0.4  # share of the standard library that is used
    width: int = 192

    @property
    def every(self) -> int:
        """Steps between two checkpoints."""
        return self.steps // 20

    def step(self, checkpoint: int) -> int:
        return checkpoint * self.every

    def path(self, name: str) -> str:
        return str(Path(self.out, name))


SHORT = {"steps": 120, "documents": 0.2, "width": 128}  # for CI


# 1. Documents and token files -----------------------------------------------------------------------------


def write_documents(s: Settings) -> None:
    """docs.jsonl, code.jsonl, manual.jsonl: {"id", "text"} a line, docs and code in an order that mixes them."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(library).as_posix(): file for file in library.rglob("*.py")}
    names = [name for name in files if not NOT_CORPUS & set(Path(name).parts)]
    names.sort(key=lambda name: hashlib.blake2b(name.encode()).digest())  # mixed, and the same on every machine
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: dict[str, list[tuple[str, str]]] = {"docs": [], "code": [], "manual": sorted(topics.items())}
    for name in names[: int(s.documents * len(names))]:
        text = files[name].read_text(encoding="utf-8", errors="replace")
        found = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        texts["docs"].append((name, "\n\n".join(filter(None, found))))
        texts["code"].append((name, text))

    # the bad document comes after a third of the run, and is as long as 6 steps' share of the docs
    a_step = int(LAUNCHED["docs"] * BATCH * SEQUENCE_LENGTH)
    before = np.cumsum([len(text.encode()) + 1 for _, text in texts["docs"]])
    noise = "%PDF-1.7\n" + random.Random(s.seed).randbytes(6 * a_step).decode("latin-1")
    place = int(np.searchsorted(before, 0.34 * s.steps * a_step))
    texts["docs"].insert(place, ("mirror/manual.pdf", noise.encode()[: 6 * a_step].decode(errors="ignore")))

    for source, documents in texts.items():
        with Path(s.path(f"{source}.jsonl")).open("w", encoding="utf-8") as file:
            for name, text in documents:
                file.write(json.dumps({"id": name, "text": text}) + "\n")
        made = tokenize_files(s.path(f"{source}.jsonl"), s.path(f"{source}.tok"), "byte", ids="id", workers=1)
        print(f"  {source + '.tok':<11}  {made.documents:>3} documents, {made.tokens:>9,} tokens, ids beside it")


# 2. The run -----------------------------------------------------------------------------------------------


def source(s: Settings, name: str) -> Any:
    """One corpus as windows. docs are read as they lie: their documents were mixed when the file was written."""
    windows = TokenReader(s.path(f"{name}.tok"), name=name).slice_sequences(SEQUENCE_LENGTH)
    return windows if name == "docs" else windows.permute(seed=s.seed)


def write_run(s: Settings, name: str, weights: dict[str, float]) -> str:
    """The run as a recipe: what `load_recipe` and every `tokenpipe` command take."""
    first, *others = (source(s, name) for name in weights)
    order = first.blend(*others, weights=weights)
    graph = order.batch_samples(BATCH, global_batch_size=BATCH).collate_causal_lm(sample_numbers=True)
    Path(s.path(name)).write_text(graph.recipe(folder=s.out))
    return s.path(name)


class Model(nn.Module):
    """A recurrent one over bytes: small enough that the whole story takes a minute."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.token = nn.Embedding(ByteTokenizer.vocab_size, 64)
        self.recurrent = nn.GRU(64, s.width, batch_first=True)
        self.head = nn.Linear(s.width, ByteTokenizer.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:  # (b, s) → (b, s, vocab_size)
        return self.head(self.recurrent(self.token(input_ids))[0])


def losses_of(model: Model, input_ids: Tensor, label_ids: Tensor) -> Tensor:
    """(b, s), (b, s) → (b, s): the loss of each label, 0 where it is masked."""
    losses = F.cross_entropy(model(input_ids).flatten(0, 1), label_ids.flatten(), reduction="none")
    return losses.view_as(label_ids)


class Row(NamedTuple):
    """One row as it was delivered."""

    step: int
    sample_number: int
    source: str
    epoch: int
    token: int
    masked: bool

    @property
    def place(self) -> tuple[int, int]:
        """Which of its source's samples it is. One that comes twice is a repeat."""
        return self.epoch, self.token


class Run:
    """A model in training, and a log of all that it was given."""

    def __init__(self, s: Settings, name: str, color: str) -> None:
        torch.manual_seed(s.seed)
        self.s, self.name, self.color = s, name, color
        self.model = Model(s)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, weight_decay=0.1, betas=(0.9, 0.95))
        self.losses: dict[int, float] = {}
        self.rows: list[Row] = []
        self.certificate = Certificate()
        self.foreign = 0  # rows that are not what the token files hold at their place
        self.files = {name: TokenReader(s.path(f"{name}.tok")) for name in WITH_MANUAL}

    def train(
        self, loader: DataLoader2, until: int, changes: "dict[int, Callable[[], None]] | None" = None
    ) -> dict[str, Any]:
        """From where the loader stands up to a step, with a checkpoint every so many. Gives the loader's state."""
        batches = iter(loader)
        how: Any = {"unit": "step", "ncols": 110, "disable": None}  # no bar where stderr is no terminal
        for step in (bar := tqdm(range(loader.step, until), f"  {self.name:<9}", **how)):
            (changes or {}).get(step, lambda: None)()  # the iterator stays valid
            batch = next(batches)  # one micro-batch a step; with more of them, add up losses and labels
            labels = (batch["label_ids"] >= 0).sum()
            loss = losses_of(self.model, batch["input_ids"], batch["label_ids"]).sum() / labels
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 20)
            self.optimizer.step()
            self.log(step, loss.item(), batch, loader)
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            if (step + 1) % self.s.every == 0:
                state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                self.save(step + 1, state | {"loader": loader.state_dict()})
        state = loader.state_dict()
        Path(self.s.path(f"{self.name}.json")).write_text(json.dumps(state))
        self.certificate.save(self.s.path(f"{self.name}.cert"))
        return state

    def log(self, step: int, loss: float, batch: dict[str, Tensor], loader: DataLoader2) -> None:
        """Where each delivered row comes from, and whether the token file holds just that there."""
        self.losses[step] = loss
        self.certificate.record(step, batch_certificate(batch))
        records = {record.sample_number: record for record in loader.contents(step)}
        delivered = zip(batch["sample_numbers"].tolist(), batch["input_ids"], batch["label_ids"], strict=True)
        for number, inputs, labels in delivered:
            record = records[number]
            masked = bool((labels < 0).all())
            self.rows.append(Row(step, number, record.source, record.epoch, record.token, masked))
            there = self.files[record.source].fetch(np.arange(record.token, record.token + SEQUENCE_LENGTH + 1))
            same = (inputs.numpy() == there[:-1]).all() and (masked or (labels.numpy() == there[1:]).all())
            self.foreign += not same

    def save(self, step: int, checkpoint: dict[str, Any]) -> None:
        """Whole or not at all."""
        path = Path(self.s.path(f"{self.name}-{step}.pt"))
        with path.with_suffix(".tmp").open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)

    def load(self, name: str, step: int) -> Any:
        """Takes up the model and optimizer of a run's checkpoint after `step` steps; gives the loader's state."""
        checkpoint = torch.load(self.s.path(f"{name}-{step}.pt"), weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        return checkpoint["loader"]

    def branch(self, name: str, color: str, step: int) -> "tuple[Run, Any]":
        """(this run as it was after `step` steps, under a new name, the loader's state there)."""
        other = Run(self.s, name, color)
        state = other.load(self.name, step)
        other.losses = {n: loss for n, loss in self.losses.items() if n < step}
        other.rows = [row for row in self.rows if row.step < step]
        other.certificate = Certificate(0, self.certificate.hashes[:step].tolist())
        return other, state


# 3. What happened in the night ----------------------------------------------------------------------------


def find_spike(losses: dict[int, float]) -> range:
    """The worst stretch of steps whose losses stand far above those before; an empty one where there is none."""
    calm: list[float] = []
    high: list[list[int]] = []
    excess: dict[int, float] = {}
    for step, loss in sorted(losses.items()):
        usual = float(np.median(calm[-CALM:])) if len(calm) >= CALM else np.inf
        if loss <= SPIKE * usual:
            calm.append(loss)
            continue
        excess[step] = loss - usual
        if high and high[-1][-1] == step - 1:
            high[-1].append(step)
        else:
            high.append([step])
    lasting = [steps for steps in high if len(steps) >= LASTING]
    worst = max(lasting, key=lambda steps: sum(excess[step] for step in steps), default=[0, -1])
    return range(worst[0], worst[-1] + 1)


class Scored(NamedTuple):
    """A document's part in some steps: the mean loss of its tokens there, and how many they are."""

    loss: float
    labels: int
    source: str
    file: str
    id: str
    text: str


@torch.no_grad()
def score_documents(model: Model, loader: DataLoader2, steps: range) -> list[Scored]:
    """The documents in these steps, by the losses that a model gives their tokens, worst first."""
    losses: dict[tuple[str, str, str], list[Tensor]] = {}
    texts: dict[tuple[str, str, str], str] = {}
    for step in steps:
        rows = torch.from_numpy(loader.tokens(step))  # (n, s + 1), in the order of contents and documents
        found = losses_of(model, rows[:, :-1], rows[:, 1:])  # (n, s): column k is the loss of token k + 1
        for record, parts, row, loss in zip(loader.contents(step), loader.documents(step), rows, found, strict=True):
            for part in parts:
                document = record.source, record.file, str(part.id)
                losses.setdefault(document, []).append(loss[max(0, part.first - 1) : part.stop - 1])
                texts.setdefault(document, ByteTokenizer().decode(row[part.first : part.stop].tolist()))
    scored = [(torch.cat(parts), document) for document, parts in losses.items()]
    return sorted((Scored(x.mean().item(), len(x), *d, texts[d]) for x, d in scored if len(x)), reverse=True)


@dataclasses.dataclass(frozen=True)
class Bad:
    """The document that was found: its tokens in its source, the steps that hold it, the checkpoint before them."""

    source: str
    id: str
    tokens: range
    steps: range
    checkpoint: int


def locate(s: Settings, loader: DataLoader2, document: Scored) -> Bad:
    """Which tokens of its source a document is, and the steps of the launched run that hold one of them."""
    first, stop = TokenReader(s.path(f"{document.source}.tok")).document_range(document.id)
    # `when` speaks of labels; a row that begins with the document's last token has the one after it as a label
    seen = loader.when(source=document.source, token=range(first, stop + 1), steps=range(s.step(MORNING)))
    steps = range(seen[0].step, seen[-1].step + 1)
    return Bad(document.source, document.id, range(first, stop), steps, steps.start // s.every * s.every)


def command(*arguments: str, lines: int, status: int = 0) -> None:
    """Runs a tokenpipe command as in a shell, and shows how its answer begins and ends."""
    print(f"  $ tokenpipe {' '.join(arguments)}")
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        if tokenpipe_command(arguments) != status:
            raise SystemExit(told.getvalue())
    answer = told.getvalue().splitlines()
    shown = answer if len(answer) <= lines else [*answer[: lines - 2], "…", answer[-1]]
    print("\n".join(f"    {line[:106]}{'…' if len(line) > 106 else ''}" for line in shown))


# 6. The account -------------------------------------------------------------------------------------------


class Account:
    """Prints what was compared; remembers whether all of it held."""

    def __init__(self) -> None:
        self.good = True

    def line(self, what: str, found: Any, expected: Any) -> None:
        held = found == expected
        self.good &= held
        found = f"{found:,}" if isinstance(found, int) else found
        print(f"  {what + ':':<68} {found}{'' if held else f'   ✗ EXPECTED {expected}'}")


def count_rows(s: Settings, account: Account, run: Run, loader: DataLoader2, jumped: list[Row]) -> None:
    """Each source's delivered rows against the order that the source has on its own."""
    account.line("rows delivered", len(run.rows), BATCH * len(run.losses))
    account.line("rows that differ from the token file at their place", run.foreign, 0)
    repeated, lost, named, strange = 0, 0, 0, 0
    for name, taken in loader.consumed_by_source.items():
        places = [row.place for row in run.rows if row.source == name]
        alone = DataLoader2(source(s, name).batch_samples(taken)).contents(step=0)
        due = {(record.epoch, record.token) for record in alone}  # the first `taken` samples of the source's own order
        missing = due - set(places)
        repeated += len(places) - len(set(places))
        lost += len(missing)
        named += len(missing & {row.place for row in jumped if row.source == name})
        strange += len(set(places) - due)
    account.line("samples repeated", repeated, 0)
    account.line("samples lost", lost, len(jumped))
    account.line("  of which named by jump", named, lost)
    account.line("samples before their turn", strange, 0)


def compare(
    s: Settings, launched: Run, jumped: Run, repaired: Run, loaders: dict[str, DataLoader2], bad: "Bad"
) -> bool:
    """Prints the account of the runs that count, and what differs between them and the one that spiked."""
    account = Account()
    steps, tokens = bad.steps, bad.tokens
    left_out = [row for row in launched.rows if row.step in steps]
    for run, named in ((repaired, []), (jumped, left_out)):
        print(f"  The {run.name} run, {len(run.losses)} steps")
        count_rows(s, account, run, loaders[run.name], named)
        account.line("spikes", int(len(find_spike(run.losses)) > 0), 0)

    print(f"  Beside the launched run, up to step {s.step(MORNING) - 1}")
    since = [row for row in repaired.rows if row.source == bad.source and row.step >= bad.checkpoint]
    # a row holds sequence_length tokens and the label after them
    holds = {r.sample_number for r in since if r.token < tokens.stop and r.token + SEQUENCE_LENGTH >= tokens.start}
    masked = {row.sample_number for row in repaired.rows if row.masked}
    account.line("repaired: rows masked", len(masked), len(holds))
    account.line("  of which hold the document", len(masked & holds), len(masked))
    before = {row.sample_number: (row.step, row.source, row.place) for row in launched.rows}
    after = {
        row.sample_number: (row.step, row.source, row.place) for row in repaired.rows if row.step < s.step(MORNING)
    }
    moved = sum(before[number] != where for number, where in after.items())
    account.line("  other rows that changed place because of the exclusion", moved, 0)
    for run in (repaired, jumped):
        off = sum(abs(launched.losses[step] - run.losses[step]) > TOLERANCE for step in range(steps.start))
        account.line(f"{run.name}: steps before {steps.start} whose loss is more than {TOLERANCE} off", off, 0)

    print("  Certificates, 8 bytes a step, of what was delivered")
    differs = repaired.certificate.difference(certify(loaders["repaired"], range(s.steps)))
    account.line("repaired, and the order that its state tells: differ in step", differs, None)
    one = launched.certificate.hashes
    for run in (repaired, jumped):
        differs = launched.certificate.difference(run.certificate)
        account.line(f"launched and {run.name}: differ first in step", differs, steps.start)
    same = one[steps.stop : s.step(MORNING)] == repaired.certificate.hashes[steps.stop : s.step(MORNING)]
    account.line(f"repaired: of the {len(same)} steps after the document the same", int(same.sum()), len(same))
    same = one[steps.stop :] == jumped.certificate.hashes[steps.start : -len(steps)]
    account.line(f"jumped: of these the same, {len(steps)} steps earlier", int(same.sum()), len(same))
    print(f"  → {'all of it holds' if account.good else 'NOT ALL OF IT HOLDS'}")
    return account.good


# 4 and 5, in the order of the story, and the picture ------------------------------------------------------


def draw(s: Settings, runs: list[Run], bad: Bad) -> str:
    """loss_spike.png: the losses of the three runs; the repaired run's sources, and what was masked of them."""
    launched, _, repaired = runs
    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    near = top.inset_axes((0.58, 0.36, 0.41, 0.58))  # the same, from the checkpoint to the morning
    for axes in (top, near):
        for run in runs:
            shown = [step for step in run.losses if step >= bad.checkpoint or run is launched]
            axes.plot(shown, [run.losses[step] for step in shown], color=run.color, lw=1.6, label=run.name)
        axes.axvspan(bad.steps.start - 0.5, bad.steps.stop - 0.5, color=launched.color, alpha=0.15, lw=0)
    stretch = range(bad.checkpoint, s.step(MORNING))
    calm = [repaired.losses[step] for step in stretch]
    near.set(xlim=(stretch.start, stretch.stop - 1), ylim=(min(calm) - 0.15, max(calm) + 0.45))
    near.tick_params(labelsize=8)
    top.indicate_inset_zoom(near, edgecolor="black", alpha=0.35)
    highest = max(launched.losses.values())
    top.annotate(f" {bad.id}", (bad.steps.stop, highest), va="top", color=launched.color)
    top.set(ylabel="loss", ylim=(min(repaired.losses.values()) - 0.3, highest + 0.3))
    top.set_title("A bad document: found, masked or jumped over, and the run goes on")
    top.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.04, 1))

    def share(rows: np.ndarray) -> np.ndarray:  # over five steps: the blend's 0.6 / 0.4 has that period
        return np.convolve(rows, np.ones(5), "same") / np.convolve(np.full(s.steps, BATCH), np.ones(5), "same")

    base = np.zeros(s.steps)
    for name, color in zip(WITH_MANUAL, ("#6f9bc8", "#d9c667", "#7db38a"), strict=True):
        rows = np.bincount([row.step for row in repaired.rows if row.source == name], minlength=s.steps)
        bottom.fill_between(range(s.steps), base, base + share(rows), color=color, lw=0, label=name)
        base += share(rows)
    masked = np.bincount([row.step for row in repaired.rows if row.masked], minlength=s.steps) / BATCH
    look: Any = {"facecolor": "white", "edgecolor": "#444444", "hatch": "/////", "lw": 0.5, "label": "masked"}
    bottom.fill_between(range(s.steps), np.minimum(masked, LAUNCHED["docs"]), step="mid", where=masked > 0, **look)
    bottom.set(xlabel="step", ylabel="share of the repaired run's rows", xlim=(0, s.steps - 1), ylim=(0, 1))
    bottom.legend(ncols=4, loc="lower right", framealpha=0.9)
    marks = {bad.checkpoint: "rolled back", s.step(ADDED): "manual added", s.step(RESUMED): "fresh loader"}
    marks[s.step(REWEIGHTED_AT)] = "re-weighted"
    for step, what in marks.items():
        bottom.axvline(step, color="black", lw=0.8, ls=(0, (4, 3)))
        bottom.annotate(what, (step, 1.02), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(s.path("loss_spike.png"), dpi=150)
    return s.path("loss_spike.png")


def tell(s: Settings) -> bool:
    print("Token files, from this Python's standard library")
    write_documents(s)

    recipe = write_run(s, "run.yaml", LAUNCHED)
    loader = DataLoader2(load_recipe(recipe))
    print(f"\nThe rehearsal, as in: tokenpipe plan {recipe} --steps {s.steps}\n")
    print(loader.plan(s.steps))
    print(f"\nThe launch: a checkpoint every {s.every} steps", flush=True)
    launched = Run(s, "launched", "#e0670c")
    launched.train(loader, s.step(MORNING))

    spike = find_spike(launched.losses)
    if not spike:
        raise SystemExit("no spike: nothing to tell")
    usual = np.median([launched.losses[step] for step in range(spike.start - CALM, spike.start)])
    worst = max(spike, key=launched.losses.__getitem__)
    print(f"\nIn the morning: the loss was {usual:.2f}, and in step {worst} it was {launched.losses[worst]:.2f}")
    print(f"  steps {spike.start} … {spike.stop - 1} are more than {SPIKE} times the median before them")
    judge = Run(s, "judge", "")
    judge.load("launched", spike.start // s.every * s.every)
    scored = score_documents(judge.model, loader, spike)
    print(f"  the documents in them, by their loss under the checkpoint before, {len(scored)} in all:")
    for found in scored[:4]:
        print(f"    {found.loss:6.2f}  {found.labels:>6,} tokens of {found.id:<32}  {Path(found.file).name}")
    worst_document = scored[0]
    print(f"  the worst begins {worst_document.text[:60]!r}")
    bad = locate(s, loader, worst_document)
    print(f"  it is in steps {bad.steps.start} … {bad.steps.stop - 1}. The same in a shell:")
    state = s.path("launched.json")
    command("contents", recipe, "--state", state, "--step", f"{worst}", "--text", lines=6)
    command("when", recipe, "--state", state, "--document", bad.id, lines=6)

    print(f"\nRolled back to step {bad.checkpoint}, and on without it", flush=True)
    jumped, saved = launched.branch("jumped", "#aa3377", bad.checkpoint)
    over = DataLoader2.from_state(saved, load_recipe(recipe))
    jumped.train(over, s.step(MORNING), {bad.steps.start: lambda: over.jump(len(bad.steps))})

    repaired, saved = launched.branch("repaired", "#0b7a53", bad.checkpoint)
    first = DataLoader2.from_state(saved, load_recipe(recipe))
    first.exclude(bad.source, documents=[bad.id])
    repaired.train(
        first, s.step(RESUMED), {s.step(ADDED): lambda: first.add_source(source(s, "manual"), weights=WITH_MANUAL)}
    )
    # as in a new process: all that is left is a checkpoint, and a recipe that has the manual too
    saved = repaired.load("repaired", s.step(RESUMED))
    last = DataLoader2.from_state(saved, load_recipe(write_run(s, "run-2.yaml", WITH_MANUAL)))
    repaired.train(last, s.steps, {s.step(REWEIGHTED_AT): lambda: last.update_weights(REWEIGHTED)})

    for run, at in ((jumped, over), (repaired, last)):
        state_now = at.state_dict()
        changes = {kind: state_now["journal"].get(kind, []) for kind in ("jumps", "excluded", "weights")}
        told = [f"{kind} from step {entry[0]}" for kind, entries in changes.items() for entry in entries]
        print(f"  {run.name}: a state of {len(json.dumps(state_now)):,} bytes; its journal: {', '.join(told)}")
    metrics = {key.removeprefix("data/"): value for key, value in last.metrics().items() if "wait" not in key}
    print(f"  metrics: {', '.join(f'{key} {value:,.5g}' for key, value in metrics.items() if '/' in key)}")
    after = range(bad.steps.stop, s.step(MORNING))
    spiked, mended = (np.mean([run.losses[step] for step in after]) for run in (launched, repaired))
    which = f"mean loss of steps {after.start} … {after.stop - 1}, the same rows"
    print(f"  {which}: launched {spiked:.3f}, repaired {mended:.3f}")

    print("\nThe account")
    good = compare(s, launched, jumped, repaired, {"jumped": over, "repaired": last}, bad)
    command("certify", "--compare", s.path("launched.cert"), s.path("repaired.cert"), lines=3, status=1)
    print(f"\nThe picture: {draw(s, [launched, jumped, repaired], bad)}")
    return good


def main() -> int:
    text, show = (__doc__ or "").partition("Written to")[0], argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=show)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 400; with --short 120)")
    parser.add_argument("--short", action="store_true", help="fewer steps of a smaller model, below a minute")
    parser.add_argument("--out", default=os.path.relpath(Path(__file__).parent / "out"), help="default: examples/out")
    parser.add_argument("--seed", type=int, default=7, help="of the model and of the order (default: 7)")
    arguments = parser.parse_args()
    s = Settings(arguments.out, arguments.seed, **(SHORT if arguments.short else {}))
    s = dataclasses.replace(s, steps=s.steps if arguments.steps is None else arguments.steps)
    if s.steps < 100 or s.seed < 0:
        parser.error("--steps is at least 100, --seed at least 0")
    Path(s.out).mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # a model so small gains nothing from more
    return 0 if tell(s) else 1


if __name__ == "__main__":
    sys.exit(main())
