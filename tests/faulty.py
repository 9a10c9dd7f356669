"""Functions and nodes for graphs that run in workers: what they make, and how they fail. Light to import: children do.

A batch is the dict that `collate_causal_lm(sample_numbers=True)` gives; its number here is its first sample number.
"""

import builtins
import collections
import ctypes
import dataclasses
import faulthandler
import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data.datapipes.datapipe import IterDataPipe

from tokenpipe.datapipes import IndexedDataPipe, TokenReader

MICRO = 4
"""Samples a batch in the graphs of Runs."""


class Runs:
    """Graphs over raw files of 1,000 and 800 tokens, and one of 600 that may come later."""

    def __init__(self, folder: "str | Path") -> None:
        self.folder = Path(folder)
        for name, tokens in (("prose", 1000), ("code", 800), ("math", 600), ("more", 400)):
            path = self.folder / f"{name}.bin"
            if not path.exists():
                ((np.arange(tokens) * 7 + tokens) % 50_000).astype("<u2").tofile(path)

    def source(self, name: str) -> IndexedDataPipe:
        return TokenReader(self.folder / f"{name}.bin", dtype="uint16").slice_sequences(8).permute(seed=7)

    def blend(self, weights: Any = (0.8, 0.2)) -> IndexedDataPipe:
        return self.source("prose").blend(self.source("code"), weights=weights and list(weights))

    @property
    def training(self) -> IndexedDataPipe:
        """Without an end: micro-batches of 4, two a step."""
        return self.blend().batch_samples(MICRO, global_batch_size=8).collate_causal_lm(sample_numbers=True)

    def finite(self, samples: int = 40) -> IndexedDataPipe:
        return self.blend().limit(samples=samples).batch_samples(MICRO).collate_causal_lm(sample_numbers=True)


def first(batch: Any) -> int:
    """A batch's first sample number."""
    return int(batch["sample_numbers"][0])


# What happens in the middle of a batch ------------------------------------------------------------------


class Custom(Exception):
    """An exception with arguments of its own."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{why} at {number}")
        self.number, self.why = number, why


class KeywordOnly(Exception):
    """Its arguments do not make it again: pickled, it cannot be read."""

    def __init__(self, *, number: int) -> None:
        super().__init__("a word", number)
        self.number = number


class HoldsALock(ValueError):
    """Cannot be pickled at all."""

    def __init__(self, number: int) -> None:
        super().__init__(f"holding a lock at {number}")
        self.lock = threading.Lock()


def _local_exception(number: int) -> Exception:
    class Local(LookupError):
        pass

    return Local(f"a local class at {number}")


def _chained(number: int) -> Exception:
    error = ValueError(f"the outer one at {number}")
    error.__cause__ = KeyError("the inner one")
    return error


def nap_for_ever() -> None:
    while True:
        time.sleep(3600)


def nap_holding_the_gil() -> None:
    """Waits for a lock in C that it holds itself: no signal ends that, and no other thread of Python runs."""
    lock = ctypes.create_string_buffer(256)
    library = ctypes.PyDLL(None)
    while True:
        library.pthread_mutex_lock(lock)


def _raise(error: BaseException) -> None:
    raise error


def _recurse(number: int) -> int:
    return 1 + _recurse(number)


ACTS = {
    "kill": lambda n: os.kill(os.getpid(), signal.SIGKILL),
    "exit 0": lambda n: os._exit(0),
    "exit 7": lambda n: os._exit(7),
    "segfault": lambda n: (faulthandler.disable(), ctypes.string_at(0)),
    "abort": lambda n: (faulthandler.disable(), os.abort()),
    "stop": lambda n: os.kill(os.getpid(), signal.SIGSTOP),
    "nap": lambda n: nap_for_ever(),
    "nap holding the GIL": lambda n: nap_holding_the_gil(),
    "sys.exit": lambda n: sys.exit(3),
    "KeyboardInterrupt": lambda n: _raise(KeyboardInterrupt(f"at {n}")),
    "StopIteration": lambda n: _raise(StopIteration(f"at {n}")),
    "Custom": lambda n: _raise(Custom(n, "raised")),
    "ValueError": lambda n: _raise(ValueError(f"raised at {n}")),
    "KeyError": lambda n: _raise(KeyError(f"raised at {n}")),
    "OSError": lambda n: _raise(FileNotFoundError(2, "no such thing", f"at {n}")),
    "EOFError": lambda n: _raise(EOFError(f"raised at {n}")),
    "ConnectionResetError": lambda n: _raise(ConnectionResetError(104, f"raised at {n}")),
    "TimeoutError": lambda n: _raise(TimeoutError(f"raised at {n}")),
    "PicklingError": lambda n: _raise(pickle.PicklingError(f"raised at {n}")),
    "IndexError": lambda n: _raise(IndexError(f"raised at {n}")),
    "RecursionError": lambda n: _recurse(n),
    "ExceptionGroup": lambda n: _raise(builtins.ExceptionGroup(f"raised at {n}", [ValueError("one"), KeyError("two")])),
    "KeywordOnly": lambda n: _raise(KeywordOnly(number=n)),
    "HoldsALock": lambda n: _raise(HoldsALock(n)),
    "local": lambda n: _raise(_local_exception(n)),
    "chained": lambda n: _raise(_chained(n)),
    "two lines": lambda n: _raise(ValueError(f"first line at {n}\nsecond line")),
    "MemoryError": lambda n: _raise(MemoryError()),
    "UnicodeDecodeError": lambda n: b"\xff".decode(),
    "lone surrogate": lambda n: _raise(ValueError("\ud800")),
}


class Act:
    """item → item, and at some numbers something happens first, in any process but the one that built it.

    Args:
        what: a key of ACTS.
        at: first sample numbers of batches (of a stream's items: the items).
        times: how often at each number, over all processes; None: always.
        folder: where it is written down how often it happened.
    """

    def __init__(self, what: str, at: Any, folder: "str | Path", times: "int | None" = 1) -> None:
        self.what, self.times, self.folder = what, times, str(folder)
        self.at = frozenset([at] if isinstance(at, int) else at)
        self.home = os.getpid()

    def __call__(self, item: Any) -> Any:
        number = item if isinstance(item, int) else first(item)
        if number in self.at and os.getpid() != self.home and self._has_a_turn(number):
            ACTS[self.what](number)
        return item

    def _has_a_turn(self, number: int) -> bool:
        for k in range(self.times or 10**6):
            try:
                os.close(os.open(self._mark(number, k), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            return True
        return False

    def _mark(self, number: int, k: int) -> Path:
        return Path(self.folder, f"{self.what.replace(' ', '-')}-{number}-{k}")

    def happened(self, number: int) -> int:
        return sum(self._mark(number, k).exists() for k in range(64))


class Nap:
    """item → item, after so many seconds, at every n-th batch."""

    def __init__(self, seconds: float, every: int = 1) -> None:
        self.seconds, self.every = seconds, every

    def __call__(self, item: Any) -> Any:
        number = item if isinstance(item, int) else first(item) // MICRO
        if number % self.every == 0:
            time.sleep(self.seconds)
        return item


class Gate:
    """item → item, and at one number only once a file is there."""

    def __init__(self, path: "str | Path", at: int) -> None:
        self.path, self.at = Path(path), at

    def __call__(self, item: Any) -> Any:
        while first(item) == self.at and not self.path.exists():
            time.sleep(0.01)
        return item


class Log:
    """item → item; each call adds a line "number pid" to a file."""

    def __init__(self, path: "str | Path") -> None:
        self.path = str(path)

    def __call__(self, item: Any) -> Any:
        number = item if isinstance(item, int) else first(item)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{number} {os.getpid()}\n".encode())
        os.close(fd)
        return item

    def lines(self) -> "list[tuple[int, int]]":
        path = Path(self.path)
        text = path.read_text() if path.exists() else ""
        return [(int(a), int(b)) for a, b in (line.split() for line in text.splitlines())]


def with_pid(item: Any) -> Any:
    return item, os.getpid()


def with_random(item: Any) -> Any:
    """What a seeded map draws: the same in every process."""
    return first(item), random.random(), float(np.random.rand()), float(torch.rand(()))


def threads_of_torch(item: Any) -> Any:
    return torch.get_num_threads()


# Items of every kind ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    name: str
    ids: torch.Tensor


Pair = collections.namedtuple("Pair", "left right")


class Slots:
    """An object of the user's own, with an array inside."""

    __slots__ = ("ids",)

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def __eq__(self, other: Any) -> bool:
        return type(other) is Slots and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]


def _several_views() -> Any:
    base = torch.arange(24).reshape(4, 6)
    return [base, base.T, base[1:3], base[:, ::2], base[2].expand(5, 6), base.flip(0)]


def _numpy_views() -> Any:
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    return [base, base.T, base[::-1], base[:, ::2], np.broadcast_to(base[1], (3, 6)), np.asfortranarray(base)]


def _read_only() -> Any:
    array = np.arange(5000)
    array.flags.writeable = False
    return array


KINDS: "dict[str, Any]" = {
    "none": lambda: None,
    "text": lambda: "naïve \u2603 \ud83d\ude00 text",
    "long text": lambda: "x" * 300_000,
    "bytes": lambda: [b"\0\xff" * 3, bytearray(b"abc"), b"", b"z" * 100_000, bytearray(200_000)],
    "numbers": lambda: [1, -(2**70), 0.1, float("inf"), 1j, True],
    "nested": lambda: {"a": [{"b": (1, [2, {"c": {3, 4}}])}, None], 5: {"": ()}, (1, 2): frozenset("x")},
    "empty": lambda: [[], {}, (), "", set()],
    "numpy scalars": lambda: [np.int64(3), np.float32(0.5), np.bool_(True), np.uint8(255), np.datetime64("2020-01-01")],
    "numpy 0-dim": lambda: np.array(7, np.int16),
    "numpy empty": lambda: [np.empty((0, 5), np.float32), np.empty(0, "U3"), np.empty((3, 0, 2))],
    "numpy small": lambda: np.arange(3, dtype=np.uint16),
    "numpy big": lambda: np.arange(3_000_000, dtype=np.int64),
    "numpy many MB": lambda: {"a": np.arange(2_500_000, dtype=np.int64), "b": np.ones((7, 1_000_001), np.float32)},
    "numpy views": _numpy_views,
    "numpy text": lambda: [np.array(["a", "bcd", "é"]), np.array([b"x", b"yz"])],
    "numpy objects": lambda: np.array([None, "x", [1, 2]], dtype=object),
    "numpy records": lambda: np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "<i4"), ("b", ">f8")]),
    "numpy big-endian": lambda: np.arange(1000, dtype=">i8"),
    "numpy half": lambda: np.linspace(0, 1, 4000, dtype=np.float16),
    "numpy read-only": _read_only,
    "numpy time": lambda: np.arange("2020-01", "2020-12", dtype="datetime64[D]"),
    "numpy masked": lambda: np.ma.masked_array(np.arange(2000), mask=np.arange(2000) % 2 == 0),
    "torch bool": lambda: torch.arange(1000) % 3 == 0,
    "torch bf16": lambda: torch.linspace(0, 1, 5000, dtype=torch.bfloat16),
    "torch half": lambda: torch.linspace(0, 1, 5000).half(),
    "torch float8": lambda: torch.linspace(0, 1, 5000).to(torch.float8_e4m3fn).view(torch.uint8),
    "torch small": lambda: torch.tensor([1, 2, 3], dtype=torch.uint8),
    "torch 0-dim": lambda: [torch.tensor(3), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(True)],
    "torch empty": lambda: [torch.empty(0), torch.empty((3, 0), dtype=torch.int64), torch.empty(0, dtype=torch.bool)],
    "torch complex": lambda: [torch.arange(5000) * 1j, (torch.arange(2000) * 1j).conj(), torch.ones(3000) * -1],
    "torch views": _several_views,
    "torch channels last": lambda: torch.rand(2, 3, 40, 50, generator=seeded(1)).to(memory_format=torch.channels_last),
    "torch sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([3.0, 4.0]), (3, 3)),
    "torch csr": lambda: torch.eye(4).to_sparse_csr(),
    "torch requires grad": lambda: [torch.arange(9.0).requires_grad_(), torch.arange(9000.0).requires_grad_()],
    "torch parameter": lambda: torch.nn.Parameter(torch.arange(4000.0)),
    "torch many MB": lambda: torch.arange(5_000_000, dtype=torch.int32).reshape(1000, 5000),
    "torch small view of much": lambda: torch.arange(2_000_000)[5:8],
    "torch the same twice": lambda: [torch.arange(5000)] * 2,
    "torch things": lambda: [torch.Size((1, 2)), torch.int16, torch.device("cpu")],
    "a dataclass": lambda: Row("r", torch.arange(5000)),
    "a named tuple": lambda: Pair(torch.arange(3), Pair(np.arange(4000), "x")),
    "an object": lambda: Slots(np.arange(4000)),
    "an exception": lambda: ValueError("an item, not raised"),
    "a StopIteration": lambda: StopIteration(5),
    "a class": lambda: [Row, dict, len],
    "a path": lambda: Path("/a/b"),
    "an ordered dict": lambda: collections.OrderedDict(b=1, a=torch.zeros(4000)),
    "a counter": lambda: collections.Counter("hello"),
    "ten thousand tensors": lambda: [torch.tensor([k]) for k in range(2000)],
    "hundred arrays": lambda: [np.full(3000, k) for k in range(100)],
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kind_of(batch: Any) -> Any:
    """Batch k → an item of the k-th kind, round and round."""
    names = list(KINDS)
    return KINDS[names[first(batch) // MICRO % len(names)]]()


def of_many_sizes(batch: Any) -> Any:
    """Batch k → its number, and tokens of a length that differs each time, from nothing to megabytes."""
    number = first(batch)
    draw = random.Random(number)
    size = draw.choice([0, 1, 100, 5000, 70_000, 1_000_000]) * draw.randrange(1, 3)
    return {"n": number, "ids": torch.full((size,), number, dtype=torch.int32), "tail": "x" * (size % 1000)}


def megabyte(batch: Any) -> Any:
    return {"n": first(batch), "ids": torch.full((1 << 18,), first(batch), dtype=torch.int32)}


def alike(a: Any, b: Any) -> bool:
    """Whether two items are equal in type, dtype, shape and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.layout, a.requires_grad) != (b.dtype, b.shape, b.layout, b.requires_grad):
            return False
        return (
            torch.equal(a.detach().to_dense(), b.detach().to_dense())
            if a.layout != torch.strided
            else (torch.equal(a.detach(), b.detach()))
        )
    if isinstance(a, np.ma.MaskedArray):
        return a.dtype == b.dtype and np.array_equal(a.mask, b.mask) and bool((a == b).all())
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.tolist() == b.tolist() if a.dtype.kind == "O" else np.array_equal(a, b)
    if isinstance(a, BaseException):
        return a.args == b.args
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(alike(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


# Streams ------------------------------------------------------------------------------------------------


class Tick(IterDataPipe):
    """A stream node of a user's own, with a place: the numbers from 0 on, each so many seconds late."""

    def __init__(self, end: int, seconds: float = 0.0) -> None:
        super().__init__()
        self.end, self.seconds, self.at, self.loaded = end, seconds, 0, False

    def __iter__(self) -> Any:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        while self.at < self.end:
            if self.seconds:
                time.sleep(self.seconds)
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at, self.loaded = state["at"], True


class Seed(IterDataPipe):
    """Shows the seed that it was given this epoch, then the items."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe, self.seed = datapipe, None

    def set_seed(self, seed: int) -> "Seed":
        self.seed = seed
        return self

    def __iter__(self) -> Any:
        for item in self.datapipe:
            yield item, self.seed


class Globals(IterDataPipe):
    """Draws from the global generators of the process that it runs in."""

    def __init__(self, datapipe: Any) -> None:
        super().__init__()
        self.datapipe = datapipe

    def __iter__(self) -> Any:
        for item in self.datapipe:
            yield item, random.random(), float(np.random.rand()), float(torch.rand(()))


class RaisesAtOnce(IterDataPipe):
    def __iter__(self) -> Any:
        raise Custom(0, "before the first item")
        yield


class Info:
    """worker_init_fn and worker_reset_fn that put a map at the graph's end which shows what they were told."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, datapipe: Any, info: Any, generator: Any = None) -> Any:
        return datapipe.map(Show(self.word, tuple(info), generator and generator.generate_seed()))


class Show:
    def __init__(self, *what: Any) -> None:
        self.what = what

    def __call__(self, item: Any) -> Any:
        return item, self.what, os.getpid()


def only(instance: int, of: int, item: Any) -> bool:
    """Keeps the items of one worker of so many."""
    return item % of == instance


def not_of_worker_one(item: Any) -> bool:
    return item % 2 == 0


def below_seven_or_even(item: Any) -> bool:
    return item < 7 or item % 2 == 0


def nothing(item: Any) -> bool:
    return False


def tenfold(item: Any) -> Any:
    return 10 * item


def as_large(item: Any) -> Any:
    return {"n": item, "ids": torch.full((item * 5000 % 70_001,), item)}
