"""The graph that feeds torch feeds a JAX mesh: a tiny language model on 8 virtual CPU devices, dp 4 × tp 2.

    pip install -e '.[jax]' && python examples/jax_mesh.py      # seconds

The rows of each batch are split over `dp`, the model's hidden columns and its vocabulary over `tp`; `ToJax` makes the
jax.Arrays. Of several processes each would read its own rows, with

    Topology(dp_rank=jax.process_index(), dp_size=jax.process_count())

and nothing else would change. At the end: the arrays hold what torch gets of the same graph, the losses are those of
one device, and a loader that resumes from a state saved half-way goes on with them.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tokenpipe.adapters import ToJax
from tokenpipe.datapipes import IndexedDataPipe, TokenReader, Topology
from tokenpipe.reading_services import DataLoader2

VOCABULARY, WIDTH, HIDDEN, LENGTH, ROWS = 256, 32, 64, 64, 8
SPLIT = {  # the dimension of each weight that `tp` splits
    "embedding": PartitionSpec(None, None),
    "up": PartitionSpec(None, "tp"),
    "down": PartitionSpec("tp", None),
    "out": PartitionSpec(None, "tp"),
}


def main() -> None:
    steps = parse().steps
    half = steps // 2
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))
    rows = NamedSharding(mesh, PartitionSpec("dp"))  # of arrays of any rank: (b, s), (b,)
    with tempfile.TemporaryDirectory() as folder:
        graph = the_graph(Path(folder))
        print(graph.tree(), end="\n\n")
        weights = first_weights()
        split = {name: jax.device_put(w, NamedSharding(mesh, SPLIT[name])) for name, w in weights.items()}

        with DataLoader2(graph, ToJax(rows)) as loader:
            split_at_half, first = train(split, islice(loader, half))
            state = loader.state_dict()
            _, second = train(split_at_half, islice(loader, steps - half))
        print(f"8 devices       loss {first[0]:.4f} → {second[-1]:.4f} in {steps} steps")

        with DataLoader2(graph, ToJax(rows)) as loader, DataLoader2(graph) as torch_loader:
            for batch, same in zip(islice(loader, half), torch_loader, strict=False):
                for key, tensor in same.items():
                    check(np.array_equal(batch[key], tensor), f"{key} is not what torch gets")
        shape, part = batch["input_ids"].shape, batch["input_ids"].addressable_shards[0].data.shape
        print(f"                each holds {part} of input_ids {shape}, and all of them what torch gets")

        with DataLoader2(graph, ToJax(SingleDeviceSharding(jax.devices()[0]))) as loader:
            _, alone = train(weights, islice(loader, steps))
        apart = max(abs(a - b) for a, b in zip(first + second, alone, strict=True))
        print(f"1 device        the same losses within {apart:.1e}")

        with DataLoader2.from_state(state, ToJax(rows)(graph)) as loader:
            _, again = train(split_at_half, islice(loader, steps - half))
        print(f"resumed         from step {half}, the same losses: {again == second}")
    check(second[-1] < first[0] - 0.2, "the loss does not fall")
    check(apart < 1e-2, "the losses are not those of one device")
    check(again == second, "the resumed losses are others")


def the_graph(folder: Path) -> IndexedDataPipe:
    """The bytes of Python's own modules, shuffled, in batches of 8 rows."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("[a-h]*.py")))
    np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / "python.bin")
    windows = TokenReader(folder / "python.bin", dtype="uint16").slice_sequences(LENGTH).permute(seed=7)
    return windows.shard_ranks(Topology()).batch_samples(ROWS).collate_causal_lm(sample_numbers=True)


# The model: what comes next, from the last four bytes -------------------------------------------------------


def first_weights() -> "dict[str, jax.Array]":
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "up": (4 * WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "out": (WIDTH, VOCABULARY),
    }
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(shape[0] if name != "embedding" else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(weights: Any, input_ids: jax.Array, label_ids: jax.Array) -> jax.Array:
    seen = weights["embedding"][input_ids]  # (b, s, width)
    before = [jnp.pad(seen, ((0, 0), (back, 0), (0, 0)))[:, : seen.shape[1]] for back in range(4)]
    hidden = jax.nn.relu(jnp.concatenate(before, -1) @ weights["up"])
    logits = (seen + hidden @ weights["down"]) @ weights["out"]
    chances = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chances, label_ids[..., None], -1).mean()


@jax.jit
def stepped(weights: Any, input_ids: jax.Array, label_ids: jax.Array) -> "tuple[Any, jax.Array]":
    loss, slopes = jax.value_and_grad(loss_of)(weights, input_ids, label_ids)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, weights, slopes), loss


def train(weights: Any, batches: Any) -> "tuple[Any, list[float]]":
    """(the weights after these batches, the loss of each)."""
    losses = []
    for batch in batches:
        weights, loss = stepped(weights, batch["input_ids"], batch["label_ids"])
        losses.append(float(loss))
    return weights, losses


def check(well: bool, what: str) -> None:
    if not well:
        raise SystemExit(f"jax_mesh: {what}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--short", action="store_true", help="60 steps")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.steps = 60
    return arguments


if __name__ == "__main__":
    main()
