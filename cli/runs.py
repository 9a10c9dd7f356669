"""A run as the command line names it: a recipe, perhaps a state, and the layout that it is shown on."""

import argparse
from pathlib import Path

from ..datapipes import IndexedDataPipe, Topology, load_recipe
from ..datapipes.audit.ledger import Spaces, spaces_by_name
from ..datapipes.errors import ConfigurationError, OutOfRangeError, StateError
from ..reading_services import DataLoader2

__all__ = ["add_run_arguments", "as_steps", "open_run", "seen_steps", "spaces_in"]

MOST_STATE_BYTES = 1 << 20
"""Of a state file, white space and all."""


def add_run_arguments(parser: argparse.ArgumentParser, recipe_optional: bool = False) -> None:
    """RECIPE, --state, --amend, --dp, --micro-batch."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if recipe_optional else None, help="the run's recipe")
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="where the run stood, as JSON: json.dumps(loader.state_dict()); its journal says what changed on the way",
    )
    parser.add_argument(
        "--amend",
        action="store_true",
        help="the recipe was edited since: what it has otherwise holds from the state's next step on",
    )
    parser.add_argument(
        "--dp", type=int, default=1, metavar="N", help="show the run as N data-parallel ranks see it (1)"
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="and in micro-batches of N rows (the recipe's)")


def open_run(arguments: argparse.Namespace) -> DataLoader2:
    """The loader of these arguments, at the state's place. Raises TokenpipeError, OSError."""
    topology = Topology(dp_size=arguments.dp)
    graph = load_recipe(arguments.recipe, topology, arguments.micro_batch)
    if arguments.state is None:
        return DataLoader2(graph)
    return DataLoader2.from_state(read_state(arguments.state), graph, amend=arguments.amend)


def read_state(path: str) -> str:
    """The text of a state file. Raises StateError for what is none, OSError."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_STATE_BYTES + 1)
    if data[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise StateError(
            f"{path}: a checkpoint of torch.save, or another pickle, is not read here: save json.dumps("
            "loader.state_dict()) beside the checkpoint"
        )
    if len(data) > MOST_STATE_BYTES:
        raise StateError(f"{path}: has more than {MOST_STATE_BYTES} bytes, which no state has")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StateError(f"{path}: the state is not JSON: {error}") from error


def spaces_in(loader: DataLoader2) -> Spaces:
    """The token spaces of the recipe's sources, by name."""
    graph = loader.datapipe
    assert isinstance(graph, IndexedDataPipe)  # recipes make no streams
    return spaces_by_name(graph)


def as_steps(text: str) -> range:
    """Steps from "N" or "a:b", b not among them. Raises ConfigurationError."""
    first, colon, last = text.partition(":")
    try:
        start = int(first)
        stop = int(last) if colon else start + 1
    except ValueError:
        start = stop = -1
    if not 0 <= start < stop < 1 << 62:
        raise ConfigurationError(f"steps are N, or a:b with 0 <= a < b < 2**62 (b is not among them), got {text!r}")
    return range(start, stop)


def seen_steps(loader: DataLoader2) -> range:
    """The steps of which something was delivered before the loader's place. Raises ConfigurationError for none."""
    step = loader.step
    try:
        begun = loader.contents(step)[0].sample_number < loader.consumed_samples
    except OutOfRangeError:  # the run is through
        begun = False
    if not step + begun:
        raise ConfigurationError("the state is from before the first step: say which --steps A:B to look at")
    return range(step + begun)
