"""What ranks ask each other: short answers over a gloo group of our own, and who was silent where one fails.

Every call is a collective: all ranks make the same ones in the same order, from the thread that runs the training.
Waiting goes in slices, so that signal handlers run. Answers travel as integers and JSON, never as pickles.
"""

import contextlib
import itertools
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import LoaderError, RankError

__all__ = ["RankGroup", "rank_and_ranks", "ranks_text"]

NUMBERS = itertools.count()  # of groups made: alike on all ranks, as making one is a collective
SLICE = timedelta(seconds=1)
LATEST = 10.0
"""Seconds after a failure in which the ranks say that they are there."""


def rank_and_ranks() -> "tuple[int, int]":
    """(this process's rank, how many there are). Raises LoaderError without an initialised process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise LoaderError(
            "no process group of torch.distributed is initialised; init_process_group(...) before the first "
            "iteration, under torchrun, would do"
        )
    return dist.get_rank(), dist.get_world_size()


def ranks_text(ranks: "list[int]") -> str:
    """Sorted rank numbers in words: "rank 3", "ranks 0–2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class RankGroup:
    """All ranks of torch.distributed. Making one is a collective too.

    Args:
        timeout: seconds after which a rank that has not answered is an error.

    Raises LoaderError without an initialised process group; here and in each call RankError where a rank does not
    answer in time or is gone, naming those that are silent.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = rank_and_ranks()
        self.timeout = timeout
        self._lost: RankError | None = None
        self._group: Any = None
        self._name = f"tokenpipe/{next(NUMBERS)}"
        try:
            # of our own even where the default one is gloo: for the timeout, and so that no other collective of the
            # program comes between ours
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RankError(self._who_is_silent(error)) from error

    def gather(self, answer: Any) -> "list[Any]":
        """What each rank has to say, by rank; JSON-able."""
        said = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(dist.all_gather, lengths, torch.tensor([said.numel()]))
        padded = torch.zeros(max(int(n) for n in lengths), dtype=torch.uint8)
        padded[: said.numel()] = said
        texts = [torch.zeros_like(padded) for _ in range(self.size)]
        self._wait(dist.all_gather, texts, padded)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]

    def all(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        answer = torch.tensor([int(mine)])
        if self.size > 1:
            self._wait(dist.all_reduce, answer, dist.ReduceOp.MIN)
        return bool(answer)

    def close(self) -> None:
        """Gives the group back; it can be closed again."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():  # else it went with the default group
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(group)

    def _wait(self, collective: Any, *arguments: Any) -> None:
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            raise LoaderError("this group of ranks was closed")
        error: Exception
        try:
            work = collective(*arguments, group=self._group, async_op=True)
            while True:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError as slept:
                    if work.is_completed():
                        error = slept
                        break
            work.wait()  # raises why it failed, unless it came through just now
            return
        except RuntimeError as failed:
            error = failed
        del work  # or its sockets stay open, and ranks that wait for this one would not hear of it
        self._lost = RankError(self._who_is_silent(error))
        raise self._lost from error

    def _who_is_silent(self, error: Exception) -> str:
        """Every rank that waited fails within moments of the first, as that one closes its connections; each then
        signs a list in the store that the ranks met in, and those that have not are the silent ones.
        """
        self.close()
        reason = str(error).splitlines()[0]
        try:
            store: Any = dist.PrefixStore(self._name, dist.distributed_c10d._get_default_store())
            store.append("there", f"{self.rank},")
            if len(self._signed(store)) == self.size:
                store.set("all", "there")
            with contextlib.suppress(RuntimeError):
                store.wait(["all"], timedelta(seconds=min(LATEST, self.timeout)))
            silent = sorted({*range(self.size)} - self._signed(store))
        except RuntimeError:  # a store that rank 0 serves goes with it
            return f"ranks were lost, and so was the store that could say which: {reason}"
        if not silent:
            return f"a rank answered later than within {self.timeout:g} s; by now all are there ({reason})"
        return (
            f"{ranks_text(silent)} of {self.size} did not answer within {self.timeout:g} s, ended, or came to another "
            f"place of the program ({reason})"
        )

    def _signed(self, store: Any) -> "set[int]":
        return {int(rank) for rank in store.get("there").decode().split(",") if rank}
