"""What ranks ask each other: short answers over a gloo group of our own, and who was silent where one fails.

Every call is a collective: all ranks make the same ones in the same order, from the thread that runs the training.
Waiting goes in slices, so that signal handlers run. Answers travel as integers and JSON, never as pickles.
"""

import contextlib
import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import ConfigurationError, LoaderError, RankError, TokenFileError

__all__ = ["RankGroup", "rank_and_ranks", "ranks_text", "shared_bytes"]

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


def shared_bytes(read: "Callable[[], bytes]", group: Any = None, timeout: float = 1800.0) -> bytes:
    """What `read` gives on the first rank of a group of gloo (None: of all ranks), on all of them; a collective call.
    Without an initialised process group it is just called.

    Raises what `read` does, on the others too: TokenFileError as it is, others as a RankError with their text;
    RankError where a rank does not come; ConfigurationError for a group that does not take tensors of the CPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return read()
    ranks = RankGroup(timeout, group)
    try:
        return ranks.from_first(read)
    finally:
        ranks.close()


class RankGroup:
    """All ranks of torch.distributed. Making one is a collective too.

    Args:
        timeout: seconds after which a rank that has not answered is an error.
        group: some of the ranks instead, by a process group that takes tensors of the CPU; its own timeout counts, too.

    Raises LoaderError without an initialised process group; here and in each call RankError where a rank does not
    answer in time or is gone, naming those that are silent.
    """

    def __init__(self, timeout: float, group: Any = None) -> None:
        self.rank, self.size = rank_and_ranks()
        self.timeout = timeout
        self._lost: RankError | None = None
        self._group: Any = group
        self._given, self._first = group is not None, 0
        if group is not None:
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise ConfigurationError("this process is no rank of the group that was given")
            if dist.get_backend(group) == "nccl":
                raise ConfigurationError("group is one of nccl; dist.new_group(ranks, backend='gloo') would do")
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._name, self._first = f"tokenpipe/{group.group_name}", dist.get_global_rank(group, 0)
            return
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

    def from_first(self, read: "Callable[[], bytes]") -> bytes:
        """What `read` gives on the first rank, on all of them; see `shared_bytes`."""
        data = b""
        said: dict[str, Any] = {}
        failed: Exception | None = None
        if self.rank == 0:
            try:
                data = read()
                said = {"bytes": len(data)}
            except Exception as error:  # all ranks raise it
                failed, said = error, {"error": _as_json(error)}
        answer = self.gather(said)[0]
        if failed is not None:
            raise failed
        if "error" in answer:
            known, arguments = answer["error"]
            raise (TokenFileError if known else RankError)(*arguments)
        tensor = torch.empty(answer["bytes"], dtype=torch.uint8)
        if self.rank == 0:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._wait(dist.broadcast, tensor, self._first)
        return data if self.rank == 0 else tensor.numpy().tobytes()

    def close(self) -> None:
        """Gives the group back; it can be closed again."""
        group, self._group = self._group, None
        if group is not None and not self._given and dist.is_initialized():  # else it went with the default group
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


def _as_json(error: Exception) -> "tuple[bool, list[Any]]":
    """(whether it is a TokenFileError, what another rank makes it, or a RankError, of)."""
    if not isinstance(error, TokenFileError):
        return False, [f"the first rank failed: {type(error).__name__}: {error}"]
    if error.filename is not None:
        return True, [error.errno, error.strerror, str(error.filename)]
    return True, [str(error)]
