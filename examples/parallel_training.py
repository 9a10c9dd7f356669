"""A small GPT split over pipeline, data and tensor parallel ranks learns what one process learns from the same graph.

    python examples/parallel_training.py            # pp 2 × dp 2: four processes, < 1 min; --short: 20 s
    python examples/parallel_training.py --tp 2     # pp 2 × dp 2 × tp 2: eight
    torchrun --nproc-per-node 4 examples/parallel_training.py

The model is split by torch's own means: a PipelineStage of half the layers each, run by Schedule1F1B;
parallelize_module for the columns and rows of its matrices; gradients are averaged over dp. All of that is one line of
the loader's graph, `.shard_ranks(Topology.from_mesh(mesh))`: the first stage gets inputs, the last one labels, and tp
peers the same.

Then rank 0 trains the whole model alone on the same steps, and says how far any loss is from that. Everything is
float64, so that what would show is another sample and not another rounding.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.reading_services import DataLoader2, DistributedReadingService

STAGES, REPLICAS = 2, 2
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 4, 64
ROWS = 16  # of a step, all ranks together
CHUNKS = 4  # of a rank's rows, which go through the pipeline one after the other
TOLERANCE = 1e-9


def graph_for(topology: Topology, tokens: str) -> IndexedDataPipe:
    windows = TokenReader(tokens, dtype="uint16", name="python").slice_sequences(LENGTH).permute(seed=7)
    rows = ROWS // topology.dp_size
    return windows.shard_ranks(topology).batch_samples(rows, global_batch_size=ROWS).collate_causal_lm()


# The model -------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_up = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (b, s, width)
        b, s, _ = x.shape
        y = self.norm(x)
        # as many heads as this rank holds: all of them, or those of its columns
        q, k, v = (matrix(y).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(functional.gelu(self.up(self.norm_up(x))))


class Stage(torch.nn.Module):
    """Some of the layers, with the embedding where they are the first, and the head where they are the last."""

    def __init__(self, whole: "torch.nn.ModuleDict", layers: "list[torch.nn.Module]", first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = whole["embedding"] if first else None
        self.places = whole["places"] if first else None
        self.layers = torch.nn.ModuleList(layers)
        self.head = whole["head"] if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None and self.places is not None:
            x = self.embedding(x) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def stage_of_model(stage: int = 0, stages: int = 1) -> Stage:
    """That part of the model; its weights are the same wherever it is made."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
    embedding, places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
    head = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False))
    whole = torch.nn.ModuleDict({"embedding": embedding, "places": places, "layers": layers, "head": head}).double()
    part = list(layers)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
    return Stage(whole, part, first=stage == 0, last=stage == stages - 1)


def loss_of(logits: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), label_ids.flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)  # each of DTensors and tensors


# Training --------------------------------------------------------------------------------------------------


def train_split(mesh: DeviceMesh, tokens: str, steps: int) -> "tuple[list[float], str]":
    """(the losses, the same on all ranks; what this rank was given)."""
    topology = Topology.from_mesh(mesh)
    part = stage_of_model(topology.pp_rank, topology.pp_size)
    if topology.tp_size > 1:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan: Any = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows}
        for layer in part.layers:
            parallelize_module(layer, mesh["tp"], plan)
    stage = PipelineStage(part, topology.pp_rank, topology.pp_size, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_of)
    optimizer, replicas = optimizer_of(part), mesh.get_group("dp")
    found, given = [], ""
    with DataLoader2(graph_for(topology, tokens), reading_service=DistributedReadingService(timeout=120)) as loader:
        for batch in islice(loader, steps):
            given = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in batch.items())
            of_chunks: list[torch.Tensor] = []
            inputs = (batch["input_ids"],) if stage.is_first else ()
            labels = {"target": batch["label_ids"], "losses": of_chunks} if stage.is_last else {}
            schedule.step(*inputs, **labels)
            for weight in part.parameters():
                slope = weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad
                dist.all_reduce(slope, group=replicas)
                slope /= topology.dp_size
            optimizer.step()
            optimizer.zero_grad()
            says = stage.is_last and topology.tp_rank == 0  # one rank of each replica
            loss = torch.stack(of_chunks).mean().detach() if says else torch.zeros((), dtype=torch.float64)
            dist.all_reduce(loss)
            found.append(loss.item() / topology.dp_size)
    return found, f"{topology}: {given}"


def train_alone(tokens: str, steps: int) -> "list[float]":
    """The losses of one process with the whole model."""
    model = stage_of_model()
    optimizer, found = optimizer_of(model), []
    with DataLoader2(graph_for(Topology(), tokens)) as loader:
        for batch in islice(loader, steps):
            loss = loss_of(model(batch["input_ids"]), batch["label_ids"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def run_rank(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS, arguments.tp), mesh_dim_names=("pp", "dp", "tp"))
    with tempfile.TemporaryDirectory() as folder:  # rank 0's; all ranks are on one host here
        paths = [str(write_tokens(Path(folder)))] if dist.get_rank() == 0 else [""]
        dist.broadcast_object_list(paths)
        losses, given = train_split(mesh, paths[0], arguments.steps)
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, given)
        wrong = 0.0
        if dist.get_rank() == 0:
            print(*(f"rank {rank}   {text}" for rank, text in enumerate(said)), sep="\n", end="\n\n")
            alone = train_alone(paths[0], arguments.steps)
            print("step    split      alone      difference")
            for step, (a, b) in enumerate(zip(losses, alone, strict=True)):
                if step % max(1, arguments.steps // 10) == 0 or step == arguments.steps - 1:
                    print(f"{step:>4}    {a:.6f}   {b:.6f}   {abs(a - b):.1e}")
            wrong = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
            well = wrong <= TOLERANCE and losses[-1] < losses[0]
            print(f"\nthe largest difference is {wrong:.1e}: {'the same losses' if well else 'NOT the same losses'}")
            wrong = float(not well)
        verdict = torch.tensor(wrong)
        dist.broadcast(verdict, 0)
    dist.destroy_process_group()
    if verdict:
        raise SystemExit(1)


def write_tokens(folder: Path) -> Path:
    """The bytes of Python's own modules, as uint16 tokens."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-h]*.py")))
    np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / "python.bin")
    return folder / "python.bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2, 4), help="tensor parallel ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--short", action="store_true", help="20 steps")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps = 20
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    world = STAGES * REPLICAS * arguments.tp
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    raise SystemExit(subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
