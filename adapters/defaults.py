"""Settings for this machine: by rule, or by trying them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..datapipes._torch import DataPipe, IterDataPipe
from ..datapipes.combine import Mapper, seeded_map
from ..datapipes.core import IndexedDataPipe
from ..datapipes.deadline import as_seconds
from ..datapipes.errors import ArgumentTypeError
from ..datapipes.names import named_nodes, node_names
from ..datapipes.rank_zero import is_rank_zero
from .ahead import PinMemory
from .around import is_function
from .base import Adapter

__all__ = ["Autotune", "Defaults", "Settings", "cores"]

MOST_WORKERS = 8


@dataclass(frozen=True)
class Settings:
    """How a graph is run: worker processes, items that a thread makes ahead where there are none, pinning."""

    num_workers: int
    prefetch: int
    pin_memory: bool


def cores() -> int:
    """Cores that this process may use, shared with the node's other ranks (LOCAL_WORLD_SIZE)."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, here // max(1, int(ranks) if ranks.isdigit() else 1))


class Defaults(Adapter):
    """Sensible settings for this graph on this machine, each said with its reason, on rank 0.

    It puts PinMemory on where there is CUDA. A DataLoader2 without a reading service of its own takes its worker
    processes, or its thread that makes items ahead, from here.

    Args:
        say: what is called with each line.
    """

    keeps_items = True

    def __init__(self, say: "Callable[[str], Any]" = print) -> None:
        if not callable(say):
            raise ArgumentTypeError(f"say must be a function of a line, got {say!r:.80}")
        self.say = say
        self.settings: Settings | None = None

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        available = cores()
        workers, why = _workers_for(datapipe, available)
        prefetch, ahead = _prefetch_for(datapipe, workers)
        pin = torch.cuda.is_available()
        self.settings = Settings(workers, prefetch, pin)
        if is_rank_zero():
            self.say(f"workers: {workers}: {why}")
            self.say(f"prefetch: {prefetch}: {ahead}")
            self.say("pin memory: yes: CUDA is here" if pin else "pin memory: no: there is no CUDA here")
        return PinMemory()(datapipe) if pin else datapipe


def _functions(datapipe: DataPipe) -> "list[str]":
    """The nodes that run code of the user's, or tokenise."""
    found = []
    for node, name in named_nodes(datapipe):
        ours = type(node).__module__.startswith(("tokenpipe.", "torch."))
        if isinstance(node, Mapper) or is_function(node) or not ours or name.endswith("tokenize"):
            found.append(name)
    return found


def _workers_for(datapipe: DataPipe, available: int) -> "tuple[int, str]":
    functions = _functions(datapipe)
    if not functions:
        what = "token files are read by one gather a batch" if isinstance(datapipe, IndexedDataPipe) else "nothing here"
        return 0, f"{what}, and no node runs code of yours, which processes would help"
    if available < 2:
        return 0, f"{functions[0]} runs code of yours, but this rank has one core, which the training loop needs"
    workers = min(available - 1, MOST_WORKERS)
    more = f" and {len(functions) - 1} more" if len(functions) > 1 else ""
    return workers, f"{functions[0]}{more} run(s) code of yours; this rank has {available} cores, one for the loop"


def _prefetch_for(datapipe: DataPipe, workers: int) -> "tuple[int, str]":
    if workers:
        return 0, "the workers make items ahead"
    if (seeded := seeded_map(datapipe)) is not None:
        return (
            0,
            f"{node_names(datapipe)[id(seeded)]} seeds the random generators, which no thread may do beside the loop",
        )
    if isinstance(datapipe, IterDataPipe) and _functions(datapipe):
        return 2, "one thread works while the loop does"
    return 0, "for token files in the page cache a thread costs more than it gains"


class Autotune(Adapter):
    """Measures for some seconds what this graph gives with different numbers of workers, and says what it found.

    A DataLoader2 without a reading service of its own does that when it is made, over copies of the graph, and takes
    the settings: the fewest workers within 5 % of the best rate. (The order of a stream depends on its workers.)

    Args:
        seconds: in all, besides the processes' starts.
        say: what is called with each line.
    """

    keeps_items = True

    def __init__(self, seconds: float = 5.0, say: "Callable[[str], Any]" = print) -> None:
        if not callable(say):
            raise ArgumentTypeError(f"say must be a function of a line, got {say!r:.80}")
        self.seconds, self.say = as_seconds("seconds", seconds), say
        self.settings: Settings | None = None
        self.rates: dict[tuple[int, int], float] = {}  # {(workers, prefetch): items a second}

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return datapipe
