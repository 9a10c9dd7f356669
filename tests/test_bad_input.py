"""Bad input: a clear error with the name, the value and what would do, and nothing lost."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import MapDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from tokenpipe.datapipes import (
    Blender,
    CausalLMCollator,
    Concater,
    DocumentPacker,
    DocumentSelector,
    Excluder,
    Limiter,
    Mapper,
    NanosetOrder,
    Once,
    Permuter,
    RankBalancer,
    RankSharder,
    Reorderer,
    SampleBatcher,
    SequenceResizer,
    SequenceSlicer,
    Skipper,
    TokenReader,
    Topology,
    Zipper,
    read_tokens,
)
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    BatchSizeError,
    ConfigurationError,
    JournalError,
    LoaderError,
    OutOfRangeError,
    SourceExhaustedError,
    StateError,
    TokenFileError,
    TokenIdError,
    TokenpipeError,
    TopologyError,
    WeightsError,
)
from tokenpipe.reading_services import DataLoader2, InProcessReadingService

NAN, INF = float("nan"), float("inf")
BUILTIN = {
    ArgumentTypeError: TypeError,
    BatchSizeError: ValueError,
    ConfigurationError: ValueError,
    JournalError: ValueError,
    LoaderError: RuntimeError,
    OutOfRangeError: IndexError,
    SourceExhaustedError: RuntimeError,
    StateError: ValueError,
    TokenFileError: OSError,
    TokenIdError: ValueError,
    TopologyError: ValueError,
    WeightsError: ValueError,
}


class Data:
    """Files of two sources, "prose" (1,000 tokens) and "code" (800), and nodes over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, tokens in (("prose", 1000), ("code", 800), ("one", 1)):
            ((np.arange(tokens) * 7 + tokens) % 50_000).astype("<u2").tofile(folder / f"{name}.bin")
        self.prose_path, self.code_path = folder / "prose.bin", folder / "code.bin"

    def reader(self, source: str = "prose", **settings: Any) -> TokenReader:
        return TokenReader(self.folder / f"{source}.bin", **({"dtype": "uint16"} | settings))

    def closed(self) -> TokenReader:
        return self.reader(end_of_text=1000)  # its first token

    def windows(self, source: str = "prose", length: int = 8) -> SequenceSlicer:
        return self.reader(source).slice_sequences(length)

    @property
    def prose(self) -> Permuter:
        return self.windows("prose").permute(seed=7)

    @property
    def code(self) -> Permuter:
        return self.windows("code").permute(seed=7)

    def blend(self, **settings: Any) -> Blender:
        return self.prose.blend(self.code, **settings)

    @property
    def weighted(self) -> Blender:
        return self.blend(weights={"prose": 0.8, "code": 0.2})

    @property
    def sharded(self) -> RankSharder:
        return self.weighted.shard_ranks(Topology(dp_rank=1, dp_size=3))

    @property
    def batched(self) -> SampleBatcher:
        return self.weighted.batch_samples(4)

    @property
    def graph(self) -> CausalLMCollator:
        return self.weighted.batch_samples(4, global_batch_size=8).collate_causal_lm(sample_numbers=True)

    def order(self, name: str, numbers: Any) -> Path:
        np.save(self.folder / f"{name}.npy", numbers)
        return self.folder / f"{name}.npy"

    stream = property(lambda self: IterableWrapper(range(10)))
    torch_map = property(lambda self: SequenceWrapper(list(range(10))))


@pytest.fixture
def data(tmp_path) -> Data:
    return Data(tmp_path)


@dataclass(frozen=True)
class Bad:
    """A bad argument: what is called, the error, and what its message holds."""

    what: str
    call: Callable[[Data], Any]
    error: type[TokenpipeError]
    says: tuple[str, ...]


def bad(what: str, call: Callable[[Data], Any], error: type[TokenpipeError], *says: str) -> Any:
    return pytest.param(Bad(what, call, error, says), id=what)


def check(case: Bad, data: Any) -> None:
    with pytest.raises(case.error) as caught:
        case.call(data)
    error = caught.value
    builtin = next(BUILTIN[kind] for kind in type(error).__mro__ if kind in BUILTIN)
    assert isinstance(error, builtin)
    for part in case.says:
        assert part in str(error), f"{part!r} is not in {str(error)!r}"


def integers(
    what: str, call: Callable[[Data, Any], Any], name: str, low: str, *values: Any, types: bool = True
) -> list[Any]:
    """Bad values of an argument that is an integer of at least `low`."""

    def bound(value: Any) -> Callable[[Data], Any]:
        return lambda data: call(data, value)

    kinds = (1.5, "3", True, [1]) if types else ()
    return [
        *(bad(f"{what}={v!r}", bound(v), ConfigurationError, name, str(v), low) for v in values),
        *(bad(f"{what}={v!r}", bound(v), ArgumentTypeError, name, repr(v), "integer") for v in kinds),
    ]


READERS = [
    bad("no path", lambda d: TokenReader([]), ConfigurationError, "path"),
    bad("paths=None", lambda d: TokenReader(None), ArgumentTypeError, "path", "None"),
    bad("paths=3", lambda d: TokenReader(3), ArgumentTypeError, "path", "3"),
    bad("paths=[None]", lambda d: TokenReader([None]), ArgumentTypeError, "path", "None"),
    bad("paths=bytes", lambda d: TokenReader(b"x.bin", "uint16"), ArgumentTypeError, "path"),
    bad("a path with a zero byte", lambda d: TokenReader("a\0b", "uint16"), TokenFileError, "a\\x00b"),
    bad("a missing path", lambda d: TokenReader(d.folder / "x", "uint16"), TokenFileError, "/x", "No such file"),
    bad("no dtype", lambda d: TokenReader(d.prose_path), ConfigurationError, "prose.bin", "dtype=", "uint16"),
    bad("an unknown dtype", lambda d: d.reader(dtype="f4"), ConfigurationError, "'f4'", "uint16", "int64"),
    bad("a wrong size", lambda d: d.reader("one", dtype="uint32"), TokenFileError, "one.bin", "2 bytes", "uint32"),
    bad("an empty name", lambda d: d.reader(name=""), ConfigurationError, "name", "''", "200"),
    bad("a long name", lambda d: d.reader(name="x" * 201), ConfigurationError, "name", "200"),
    bad("name=5", lambda d: d.reader(name=5), TokenpipeError, "name", "5"),
    *integers("vocab_size", lambda d, v: d.reader(vocab_size=v), "vocab_size", "1", 0, -1, 2**63),
    *integers("end_of_text", lambda d, v: d.reader(end_of_text=v), "end_of_text", "0", -1, 2**63),
    bad("end_of_text beyond uint16", lambda d: d.reader(end_of_text=65536), ConfigurationError, "65536", "65535"),
]

SLICES = [
    *integers("sequence_length", lambda d, v: d.reader().slice_sequences(v), "sequence_length", "1", 0, -8, 2**63),
    *integers("unit", lambda d, v: d.reader().slice_sequences(8, unit=v), "unit", "1", 0, -8),
    bad(
        "a sequence_length beyond the tokens",
        lambda d: d.reader().slice_sequences(1000),
        ConfigurationError, "prose", "1000", "999",
    ),
    bad("a unit beyond the tokens", lambda d: d.reader().slice_sequences(8, 1000), ConfigurationError, "prose", "1000"),
    bad("a file too short", lambda d: d.windows("one", 1), ConfigurationError, "one", "1 tokens", "2"),
    bad("unit=12 of 8", lambda d: d.reader().slice_sequences(8, unit=12), ConfigurationError, "unit=12", "8", "16"),
    bad("slicing a slice", lambda d: d.windows().slice_sequences(8), ArgumentTypeError, "TokenReader", "Slicer"),
    bad("slicing a stream", lambda d: SequenceSlicer(d.stream, 8), ArgumentTypeError, "IterableWrapper"),
    bad("align=3", lambda d: d.reader().slice_sequences(8, align=3), ConfigurationError, "align", "3", "'document'"),
    bad(
        "align= of a file without document ends",
        lambda d: d.reader().slice_sequences(8, align="document"),
        ConfigurationError, "prose.bin", "end_of_text",
    ),
    *integers("packed", lambda d, v: d.closed().pack_documents(v), "sequence_length", "1", 0, -8, 2**63),
    bad("packed in long rows", lambda d: d.closed().pack_documents(2**25), ConfigurationError, "33554432", "16777216"),
    bad("packing a slice", lambda d: d.windows().pack_documents(8), ArgumentTypeError, "TokenReader", "Slicer"),
    bad("packing a stream", lambda d: DocumentPacker(d.stream, 8), ArgumentTypeError, "IterableWrapper"),
    bad(
        "packing a file without document ends",
        lambda d: d.reader().pack_documents(8),
        ConfigurationError, "prose.bin", "end_of_text",
    ),
]  # fmt: skip

PERMUTES = [
    *integers("permute seed", lambda d, v: d.windows().permute(v), "seed", "0", 2**63, 2**64),
    bad("permute seed=None", lambda d: d.windows().permute(None), ArgumentTypeError, "seed", "None"),
    *integers("window", lambda d, v: d.windows().permute(7, window=v), "window", "2", 0, 1, -4),
    bad(
        "window over units",
        lambda d: d.reader().slice_sequences(8, unit=16).permute(7, window=4),
        ConfigurationError, "window", "unit",
    ),
    bad("permuting a stream", lambda d: Permuter(d.torch_map, 7), ArgumentTypeError, "SequenceWrapper"),
    *integers(
        "resize after", lambda d, v: d.reader().slice_sequences(8, 16).permute(7).resize_sequences(4, v),
        "after", "0", -1,
    ),
    *integers(
        "resize length", lambda d, v: d.reader().slice_sequences(8, 16).permute(7).resize_sequences(v, 4),
        "sequence_length", "1", 0,
    ),
    bad(
        "a resize that does not divide",
        lambda d: d.reader().slice_sequences(8, 16).permute(7).resize_sequences(5, 3),
        ConfigurationError, "sequence_length=5", "16",
    ),
    bad("resizing a blend", lambda d: SequenceResizer(d.weighted, 4, 3), ArgumentTypeError, "Blender", "unit"),
]  # fmt: skip


def weight(what: str, weights: Any, error: type[TokenpipeError], *says: str) -> Any:
    return bad(f"weights {what}", lambda d: d.blend(weights=weights), error, "weight", *says)


BLENDS = [
    weight("NaN", {"prose": NAN, "code": 1}, WeightsError, "'prose'", "nan", "finite"),
    weight("infinite", [1, INF], WeightsError, "'code'", "inf", "finite"),
    weight("negative", [1, -0.5], WeightsError, "'code'", "-0.5", "at least 0"),
    weight("all zero", {"prose": 0, "code": 0.0}, WeightsError, "'prose'", "'code'", "0", "positive"),
    weight("too many", [1, 2, 3], WeightsError, "3", "2 sources", "'prose'", "'code'"),
    weight("too few", [1], WeightsError, "1", "2 sources", "'prose'", "'code'"),
    weight("none", [], WeightsError, "0", "2 sources"),
    weight("of an unknown name", {"prose": 1, "code": 1, "prsoe": 1}, WeightsError, "'prsoe'", "'prose'", "'code'"),
    weight("of a missing name", {"prose": 1}, WeightsError, "'code'", "0 leaves"),
    weight("that round to nothing", [1, 1e-11], WeightsError, "'code'", "1e-11", "at least 2.33e-10", "0"),
    weight("of a wrong type", {"prose": "much", "code": 1}, ArgumentTypeError, "'prose'", "'much'", "number"),
    weight("None for one", {"prose": None, "code": 1}, ArgumentTypeError, "'prose'", "None"),
    weight("True for one", {"prose": True, "code": 1}, ArgumentTypeError, "'prose'", "True"),
    weight("as a string", "prose", ArgumentTypeError, "'prose'", "dict", "list"),
    weight("as a number", 0.5, ArgumentTypeError, "0.5", "dict"),
    weight("NaN in an array", np.array([NAN, 1]), WeightsError, "'prose'", "nan"),
    *(
        bad(f"temperature={t!r}", lambda d, t=t: d.blend(temperature=t), TokenpipeError, "temperature", repr(t), "0")
        for t in (0, -1, NAN, INF, "hot", True)
    ),
    bad("repeats below 0", lambda d: d.blend(repeats={"code": -1}), WeightsError, "repeats", "'code'", "-1"),
    bad("repeats NaN", lambda d: d.blend(repeats={"code": NAN}), WeightsError, "repeats", "'code'", "nan"),
    bad("repeats unknown", lambda d: d.blend(repeats={"cod": 2}), WeightsError, "repeats", "'cod'", "'code'"),
    bad("repeats all 0", lambda d: d.blend(repeats={"code": 0, "prose": 0}), WeightsError, "repeats", "0"),
    bad("repeats of nothing", lambda d: d.blend(repeats={"code": 1e-9}), WeightsError, "'code'", "1e-09"),
    bad("repeats beyond 2**52", lambda d: d.blend(repeats={"code": 1e30}), WeightsError, "2**52"),
    bad("repeats=3", lambda d: d.blend(repeats=3), ArgumentTypeError, "repeats", "3", "dict"),
    bad("repeats and weights", lambda d: d.blend(weights=[1, 1], repeats={}), WeightsError, "repeats", "max_epochs"),
    bad("max_epochs=0", lambda d: d.blend(max_epochs=0), WeightsError, "max_epochs", "0"),
    bad("max_epochs below 0", lambda d: d.blend(max_epochs={"code": -2}), WeightsError, "'code'", "-2"),
    bad("max_epochs NaN", lambda d: d.blend(max_epochs={"code": NAN}), WeightsError, "'code'", "nan"),
    bad("max_epochs unknown", lambda d: d.blend(max_epochs={"cod": 1}), WeightsError, "'cod'", "code"),
    bad("max_epochs of nothing", lambda d: d.blend(max_epochs={"code": 1e-9}), WeightsError, "'code'", "1e-09"),
    bad("max_epochs='two'", lambda d: d.blend(max_epochs="two"), ArgumentTypeError, "max_epochs", "'two'"),
    bad("on_exhausted", lambda d: d.blend(on_exhausted="go"), ConfigurationError, "on_exhausted", "'go'", "stop"),
    bad("two sources of one name", lambda d: d.prose.blend(d.prose), ConfigurationError, "'prose'", "name="),
    bad("a source without a name", lambda d: d.prose.concat(d.code).blend(d.prose), ConfigurationError, "name="),
    bad(
        "two sequence lengths", lambda d: d.prose.blend(d.windows("code", 4)),
        ConfigurationError, "sequence_length", "'prose': 8", "'code': 4",
    ),
    bad("blending a stream", lambda d: d.prose.blend(d.stream), ArgumentTypeError, "Blender", "IterableWrapper"),
    bad("blending None", lambda d: d.prose.blend(None), ArgumentTypeError, "Blender", "NoneType"),
    bad(
        "a source through that may not be",
        lambda d: d.blend(max_epochs={"code": 1}, on_exhausted="error").fetch([10_000]),
        SourceExhaustedError, "'code'", "10000", "renormalise",
    ),
]  # fmt: skip

ORDERS = [
    bad("an order of int32", lambda d: d.prose.reorder(d.order("o", np.arange(3, dtype="<i4"))), TokenFileError,
        "o.npy", "int64", "int32"),
    bad("an order of floats", lambda d: d.prose.reorder(d.order("o", np.zeros(3))), TokenFileError, "o.npy", "<f8"),
    bad("a missing order", lambda d: d.prose.reorder(d.folder / "o.npy"), TokenFileError, "o.npy", "No such file"),
    bad("a raw order", lambda d: d.prose.reorder(d.prose_path), TokenpipeError, "prose.bin"),
    bad("an order that is no path", lambda d: d.prose.reorder(None), ArgumentTypeError, "None"),
    bad("a negative entry", lambda d: d.prose.reorder(d.order("o", np.array([3, -5]))).fetch([0, 1]), OutOfRangeError,
        "o.npy", "entry 1", "-5"),
    bad("an entry beyond the end", lambda d: d.prose.limit(samples=9).reorder(d.order("o", np.array([8, 9])))[1],
        OutOfRangeError, "o.npy", "entry 1", "9", "0 … 8"),
    bad("ordering a stream", lambda d: Reorderer(d.stream, d.order("o", np.arange(3))), ArgumentTypeError, "Iterable"),
    *integers("num_samples", lambda d, v: d.windows().order_nanoset(num_samples=v), "num_samples", "1", 0, -1),
    *integers("nanoset seed", lambda d, v: d.windows().order_nanoset(num_samples=5, seed=v), "seed", "0", -1),
    bad("a nanoset seed of 2**32", lambda d: d.windows().order_nanoset(num_samples=5, seed=2**32), ConfigurationError,
        "seed", "2**32", str(2**32)),
    bad("nanoset weights", lambda d: d.windows().order_nanoset(d.windows("code"), num_samples=5, weights=[1, -1]),
        WeightsError, "'code'", "-1"),
    bad("nanoset lengths", lambda d: d.windows().order_nanoset(d.windows("code", 4), num_samples=5),
        ConfigurationError, "sequence_length", "4", "8"),
    bad("nanoset of a stream", lambda d: NanosetOrder(d.stream, num_samples=5), ArgumentTypeError, "IterableWrapper"),
]  # fmt: skip

BOUNDS = [
    *integers("skip", lambda d, v: d.weighted.skip(v), "samples", "0", -1, 2**63),
    bad("a skip beyond the end", lambda d: d.weighted.limit(samples=3).skip(4), ConfigurationError, "4", "3"),
    *(
        case
        for kind in ("samples", "passes")
        for case in integers(
            f"limit {kind}", lambda d, v, kind=kind: d.weighted.limit(**{kind: v}), kind, "1", 0, -1, 2**63
        )
    ),
    *integers("limit steps", lambda d, v: d.batched.limit(steps=v), "steps", "1", 0, -1, 2**63),
    bad("limit of nothing", lambda d: d.weighted.limit(), ConfigurationError, "samples=", "steps=", "passes="),
    bad("limit of two", lambda d: d.weighted.limit(samples=3, passes=1), ConfigurationError, "samples", "passes"),
    bad("limit(steps) before the batcher", lambda d: d.weighted.limit(steps=3), ConfigurationError, "steps",
        "batch_samples"),
    bad("limit(samples) after the sharder", lambda d: d.sharded.limit(samples=3), ConfigurationError, "samples",
        "before shard_ranks"),
    bad("limit(samples) after the batcher", lambda d: d.batched.limit(samples=3), ConfigurationError, "samples",
        "before"),
    bad("excluding nothing", lambda d: d.weighted.exclude({}), ArgumentTypeError, "ranges", "{}"),
    bad("excluding no dict", lambda d: d.weighted.exclude([(0, 3)]), ArgumentTypeError, "ranges"),
    bad("excluding of an unknown source", lambda d: d.weighted.exclude({"cod": [(0, 3)]}), ConfigurationError, "'cod'",
        "'code'"),
    bad("excluding numbers", lambda d: d.weighted.exclude({"code": [3]}), ArgumentTypeError, "'code'", "[3]"),
    bad("excluding an empty range", lambda d: d.weighted.exclude({"code": [(3, 3)]}), OutOfRangeError, "[3, 3)"),
    bad("excluding too far", lambda d: d.weighted.exclude({"code": [(3, 10**6)]}), OutOfRangeError, "'code'"),
    *integers("exclude", lambda d, v: d.weighted.exclude({"code": [(0, 1)]}, v), "from_sample", "0", -1),
    bad("exclude after the sharder", lambda d: d.sharded.exclude({"code": [(0, 1)]}), ConfigurationError, "exclude",
        "before shard_ranks"),
    bad("excluding from a stream", lambda d: Excluder(d.stream, {"a": [(0, 1)]}), ArgumentTypeError, "IterableWrapper"),
    bad("once over a weighted blend", lambda d: d.weighted.once(), ConfigurationError, "once", "weights"),
    bad("once over a weighted blend below", lambda d: d.weighted.limit(samples=3).once(), ConfigurationError, "once"),
    bad("once after the sharder", lambda d: d.blend().shard_ranks(Topology()).once(), ConfigurationError, "once",
        "before shard_ranks"),
    bad("once after the batcher", lambda d: d.blend().batch_samples(4).once(), ConfigurationError, "once", "before"),
    bad("a tail", lambda d: d.blend().once(tail="cut"), ConfigurationError, "tail", "'cut'", "'drop'", "'pad'"),
    bad("limiting a stream", lambda d: Limiter(d.stream, samples=3), ArgumentTypeError, "IterableWrapper"),
    bad("skipping a stream", lambda d: Skipper(d.stream, 3), ArgumentTypeError, "IterableWrapper"),
    bad("once a stream", lambda d: Once(d.stream), ArgumentTypeError, "IterableWrapper"),
]  # fmt: skip

RANKS = [
    *(
        bad(f"{axis}_rank={rank} of {size}", lambda d, k=f"{axis}_", r=rank, s=size: Topology(**{
            f"{k}rank": r, f"{k}size": s}), TopologyError, f"{axis}_rank", str(rank), "0 … ")
        for axis in ("dp", "tp", "pp", "cp") for rank, size in ((4, 4), (-1, 4), (7, 4), (1, 1))
    ),
    *(bad(f"dp_size={v}", lambda d, v=v: Topology(dp_size=v), ConfigurationError, "dp_size", str(v)) for v in (0, -2)),
    *(
        bad(f"{name}={v!r}", lambda d, n=name, v=v: Topology(**{n: v}), ArgumentTypeError, name, repr(v), "integer")
        for name in ("dp_rank", "cp_size") for v in (1.0, "1", True, None)
    ),
    bad("a topology of integers", lambda d: d.weighted.shard_ranks((0, 2)), ArgumentTypeError, "Topology", "(0, 2)"),
    *integers("shard seed", lambda d, v: d.weighted.shard_ranks(Topology(), seed=v), "seed", "0", 2**63),
    bad("sharding twice", lambda d: d.sharded.shard_ranks(Topology()), ConfigurationError, "shard_ranks", "once"),
    bad("sharding batches", lambda d: d.batched.shard_ranks(Topology()), ConfigurationError, "shard_ranks",
        "before batch_samples"),
    bad("balancing over no topology", lambda d: d.weighted.balance_ranks(2, 4, 8), ArgumentTypeError, "Topology", "2"),
    *integers("balanced micro_batch_size", lambda d, v: d.weighted.balance_ranks(Topology(), v, 8), "micro_batch_size",
              "1", 0, 2**63),
    *integers("balanced global_batch_size", lambda d, v: d.weighted.balance_ranks(Topology(), 1, v),
              "global_batch_size", "1", 0, 2**63),
    bad("a balance that does not divide", lambda d: d.weighted.balance_ranks(Topology(0, 3), 2, 8), BatchSizeError,
        "global_batch_size 8", "6 or 12"),
    bad("a balance by another cost", lambda d: d.weighted.balance_ranks(Topology(), 2, 8, cost="rows"),
        ConfigurationError, "'rows'", "'attention' would do"),
    bad("a balance of unknown documents", lambda d: d.weighted.balance_ranks(Topology(), 2, 8), ConfigurationError,
        "prose.bin", "stores no document ends", "end_of_text"),
    bad("balancing twice", lambda d: d.sharded.balance_ranks(Topology(), 2, 8), ConfigurationError, "balance_ranks",
        "once"),
    bad("balancing a stream", lambda d: RankBalancer(d.stream, Topology(), 2, 8), ArgumentTypeError, "IterableWrapper"),
    bad("sharding a stream", lambda d: RankSharder(d.stream, Topology()), ArgumentTypeError, "IterableWrapper"),
]  # fmt: skip

BATCHES = [
    *integers("micro_batch_size", lambda d, v: d.weighted.batch_samples(v), "micro_batch_size", "1", 0, -4, 2**63),
    *integers(
        "global_batch_size", lambda d, v: d.weighted.batch_samples(4, v), "global_batch_size", "1", 0, -8, types=False
    ),
    *(
        bad(f"global_batch_size={v!r}", lambda d, v=v: d.weighted.batch_samples(4, v), ArgumentTypeError,
            "global_batch_size", repr(v))
        for v in (8.0, "8", True, [8], [(0, 8, 1)], {0: 8})
    ),
    bad("a fraction in a schedule", lambda d: d.weighted.batch_samples(4, [(0, 8), (5, 8.5)]), ArgumentTypeError,
        "global_batch_size", "8.5"),
    bad("a global batch that does not divide", lambda d: d.sharded.batch_samples(4, 32), BatchSizeError,
        "global_batch_size 32", "dp_size", "12", "24 or 36"),
    bad("a global batch below one batch", lambda d: d.sharded.batch_samples(4, 5), BatchSizeError, "5", "12 would do"),
    bad("a later global batch that does not divide", lambda d: d.weighted.batch_samples(4, [(0, 8), (5, 9)]),
        BatchSizeError, "global_batch_size 9", "step 5", "8 or 12"),
    bad("a schedule that begins late", lambda d: d.weighted.batch_samples(4, [(1, 8)]), BatchSizeError, "0", "[1]"),
    bad("a schedule out of order", lambda d: d.weighted.batch_samples(4, [(0, 8), (9, 8), (5, 8)]), BatchSizeError,
        "[0, 9, 5]", "increase"),
    bad("an empty schedule", lambda d: d.weighted.batch_samples(4, []), BatchSizeError, "0", "[]"),
    bad("a run shorter than a step", lambda d: d.weighted.limit(samples=7).batch_samples(4, 8), BatchSizeError, "7",
        "8", "pad"),
    bad("a skip into a step", lambda d: d.weighted.skip(6).batch_samples(4, 8), BatchSizeError, "sample 6", "step 0",
        "step 1", "4"),
    bad("batching twice", lambda d: d.batched.batch_samples(2), ConfigurationError, "batch_samples", "once"),
    bad("batching a stream", lambda d: SampleBatcher(d.stream, 4), ArgumentTypeError, "IterableWrapper"),
    bad("collating samples", lambda d: d.weighted.collate_causal_lm(), ConfigurationError, "batch_samples"),
    bad("collating a stream", lambda d: CausalLMCollator(d.stream), ArgumentTypeError, "IterableWrapper"),
    bad("collating what a map made", lambda d: d.weighted.map(str).batch_samples(4).collate_causal_lm()[0],
        ConfigurationError, "str", "map"),
    bad("mapping no function", lambda d: d.weighted.map(3), ArgumentTypeError, "map", "3"),
    bad("mapping a name", lambda d: d.batched.map("upper"), ArgumentTypeError, "map", "'upper'"),
    bad("mapping a stream", lambda d: Mapper(d.stream, str), ArgumentTypeError, "IterableWrapper"),
    bad("zipping a stream", lambda d: d.prose.zip(d.torch_map), ArgumentTypeError, "SequenceWrapper"),
    bad("zipping onto a stream", lambda d: Zipper(d.stream, d.prose), ArgumentTypeError, "IterableWrapper"),
    bad("concat with a stream", lambda d: d.prose.concat(d.stream), ArgumentTypeError, "IterableWrapper"),
    bad("concat onto a stream", lambda d: Concater(d.stream, d.prose), ArgumentTypeError, "IterableWrapper"),
    bad("concat of one that ends", lambda d: d.prose.concat(d.code.limit(samples=3)), ConfigurationError, "concat",
        "once()", "limit()"),
]  # fmt: skip

READ_TOKENS = [
    *(
        bad(f"spec={v!r}", lambda d, v=v: read_tokens(v, 8, 7, "uint16"), TokenpipeError, *says)
        for v, says in ((None, ("spec", "None")), (3, ("spec", "3")), ([], ("spec",)), ({}, ("spec",)), ([3], ("3",)))
    ),
    bad("a negative weight", lambda d: read_tokens({d.prose_path: 1, d.code_path: -1}, 8, 7, "uint16"), WeightsError,
        "'code'", "-1"),
    bad("one path twice", lambda d: read_tokens([d.prose_path, d.prose_path], 8, 7, "uint16"), ConfigurationError,
        "'prose'", "name"),
    bad("an unknown order", lambda d: read_tokens(d.prose_path, 8, 7, "uint16", order="megatron"), ConfigurationError,
        "order", "'megatron'", "'nanoset'"),
    bad("nanoset without num_samples", lambda d: read_tokens(d.prose_path, 8, 7, "uint16", order="nanoset"),
        ConfigurationError, "num_samples"),
    *integers("sequence_length", lambda d, v: read_tokens(d.prose_path, v, 7, "uint16"), "sequence_length", "1", 0),
    *integers("seed", lambda d, v: read_tokens(d.prose_path, 8, v, "uint16"), "seed", "0", 2**63),
    *integers("num_samples", lambda d, v: read_tokens(d.prose_path, 8, 7, "uint16", None, v), "num_samples", "1", 0),
]  # fmt: skip

CHOICES = [
    bad("no rule", lambda d: d.reader().select_documents(), ConfigurationError, "share=", "score=", "documents="),
    bad("two rules", lambda d: d.reader().select_documents(share=0.5, seed=1, score="s", below=1), ConfigurationError,
        "share and score"),
    *integers("select seed", lambda d, v: d.reader().select_documents(share=0.5, seed=v), "seed", "0", 2**63),
    *(
        bad(f"share={v!r}", lambda d, v=v: d.reader().select_documents(share=v, seed=1), ConfigurationError, "share",
            "0 <= lo < hi <= 1")
        for v in (0, 1.5, NAN, INF, "half", (0.2, 0.1), (0, 0.1, 1), [], True, {})
    ),
    *(
        bad(f"score={v!r}", lambda d, v=v: d.reader().select_documents(score=v, below=1), ConfigurationError, repr(v))
        for v in ("", "../x", "a/b", "a.b", 3, "x" * 65)
    ),
    *(
        bad(f"below={v!r}", lambda d, v=v: d.reader().select_documents(score="s", below=v), ConfigurationError,
            repr(v))
        for v in (NAN, INF, "1", True, None)
    ),
    *(
        bad(f"bins={v!r}", lambda d, v=v: d.reader().partition("length", v), ConfigurationError, "bins")
        for v in ([], 3, None, [NAN], [2, 1], [1, 1], ["1"], "12")
    ),
    bad("documents that are not numbers", lambda d: d.reader().select_documents(documents=["a"]), ArgumentTypeError,
        "'a'"),
    bad("documents of a file without ends", lambda d: d.reader().select_documents(documents=[0]), ConfigurationError,
        "prose.bin", "document ends"),
    bad("documents of windows", lambda d: d.prose.select_documents(documents=[0]), ArgumentTypeError, "Permuter"),
    bad("documents of a stream", lambda d: DocumentSelector(d.stream, documents=[0]), ArgumentTypeError,
        "IterableWrapper"),
    bad("a part beyond the files", lambda d: d.reader().part(1), ConfigurationError, "1 file", "[1, 1)"),
    *integers("part", lambda d, v: d.reader().part(v, 1), "start", "0"),
]  # fmt: skip

ALL = [*READERS, *CHOICES, *SLICES, *PERMUTES, *BLENDS, *ORDERS, *BOUNDS, *RANKS, *BATCHES, *READ_TOKENS]


@pytest.mark.parametrize("case", ALL)
def test_a_bad_argument_is_a_clear_error_and_what_it_was_given_to_works_on(case, data):
    graph = data.graph
    before = graph[3]["input_ids"]
    check(case, data)
    assert torch.equal(graph[3]["input_ids"], before)
    assert torch.equal(data.graph[3]["input_ids"], before)


def test_every_node_takes_part_in_the_table(data):
    nodes = {
        Blender, CausalLMCollator, Concater, DocumentPacker, DocumentSelector, Excluder, Limiter, Mapper,
        NanosetOrder, Once, Permuter, RankBalancer, RankSharder, Reorderer, SampleBatcher, SequenceResizer,
        SequenceSlicer, Skipper, TokenReader, Zipper,
    }  # fmt: skip
    registered = {f for f in MapDataPipe.functions.values() if getattr(f.args[0], "functional_name", None)}
    ours = {f.args[0] for f in registered if f.args[0].__module__.startswith("tokenpipe.")}
    assert len(ours) > 12
    assert ours <= nodes, "a node was added: add its bad arguments to the table"


# A single 0 weight is not bad: the source is never drawn ----------------------------------------------


def test_a_single_zero_weight_leaves_a_source_out(data):
    graph = data.blend(weights={"prose": 1, "code": 0})
    only = data.prose.blend(weights=[1])
    assert np.array_equal(graph.fetch(range(500)), only.fetch(range(500)))


def test_a_source_without_a_sample_is_refused_with_its_weight(data):
    nothing = data.windows("code").limit(samples=3).skip(3)
    with pytest.raises(ConfigurationError, match="'code'"):
        data.prose.blend(nothing, weights=[1, 1])
    with pytest.raises(ConfigurationError, match="'code'"):
        data.prose.blend(nothing)


# Numbers ----------------------------------------------------------------------------------------------

LAST = 2**63 - 2


def nodes_without_end(data: Data) -> dict[str, Any]:
    return {
        "slice_sequences": data.windows(),
        "align": data.closed().slice_sequences(8, align="document"),
        "pack_documents": data.closed().pack_documents(8),
        "permute": data.prose,
        "resize_sequences": data.reader().slice_sequences(8, 16).permute(7).resize_sequences(4, 5),
        "blend": data.weighted,
        "exact union": data.blend(),
        "concat": data.prose.concat(data.code),
        "zip": data.prose.zip(data.code),
        "map": data.weighted.map(np.sum),
        "shard_ranks of one": data.weighted.shard_ranks(Topology(), seed=3),
        "batch_samples of one": data.weighted.batch_samples(1),
        "collate_causal_lm of one": data.weighted.batch_samples(1).collate_causal_lm(),
    }


@pytest.mark.parametrize("node", [
    "slice_sequences", "align", "pack_documents", "permute", "resize_sequences", "blend", "exact union", "concat",
    "zip", "map", "shard_ranks of one", "batch_samples of one", "collate_causal_lm of one",
])  # fmt: skip
@pytest.mark.parametrize("disk", ["page cache", "slow_disk"])
def test_the_last_number_exists_and_the_next_does_not(data, request, disk, node):
    if disk == "slow_disk":  # what is read ahead ends where the numbers do
        request.getfixturevalue("slow_disk")
    graph = nodes_without_end(data)[node]
    assert graph.end == LAST + 1
    assert len(graph.fetch([LAST])) == 1
    assert len(graph.fetch(np.array([LAST, 0], np.uint64))) == 2
    for wrong in (2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63), 2**200):
        with pytest.raises(OutOfRangeError, match=str(wrong)) as caught:
            graph.fetch([wrong])
        assert isinstance(caught.value, IndexError)
    for wrong in (np.array([2**63 - 1], np.uint64), np.array([0, 2**64 - 1], np.uint64)):
        with pytest.raises(OutOfRangeError, match=str(wrong.max())):
            graph.fetch(wrong)
    with pytest.raises(OutOfRangeError):
        graph.fetch([1, 2**63])
    assert len(graph.fetch([LAST, 0])) == 2


@pytest.mark.parametrize(
    "wrong",
    [[1.0], np.array([1.0]), ["1"], [None], [True], "12", [[1]], [[1], [1, 2]], [1, 2.5], None, np.array(3)],
    ids=repr,
)
def test_numbers_that_are_no_integers_are_refused(data, wrong):
    for graph in (data.reader(), data.prose, data.weighted, data.sharded, data.graph):
        with pytest.raises(ArgumentTypeError):
            graph.fetch(wrong)


def test_finite_nodes_end_where_they_say(data):
    finite = {
        "TokenReader": (data.reader(), 1000),
        "limit": (data.weighted.limit(samples=9), 9),
        "once": (data.blend().once(), 223),
        "skip": (data.weighted.limit(samples=9).skip(4), 5),
        "shard_ranks": (data.weighted.limit(samples=9).shard_ranks(Topology(1, 2)), 4),
        "batch_samples": (data.weighted.limit(samples=9).batch_samples(2), 4),
        "limit steps": (data.batched.limit(steps=3), 3),
        "limit passes": (data.batched.limit(passes=2), 111),
        "order": (data.prose.reorder(data.order("o", np.array([5, 3, 5]))), 3),
        "nanoset": (data.windows().order_nanoset(num_samples=7), 7),
        "concat": (data.prose.limit(samples=2).concat(data.code.limit(samples=3)), 5),
    }
    for name, (graph, end) in finite.items():
        assert len(graph) == graph.end == end, name
        assert len(graph.fetch([end - 1, 0])) == 2, name
        for wrong in (end, end + 1, -1, LAST, LAST + 1):
            with pytest.raises(OutOfRangeError, match=f"{wrong}"):
                graph.fetch([0, wrong])
        for wrong in (end, -end - 1, 2**63, 2**70):
            with pytest.raises(OutOfRangeError, match=f"{wrong}.*length {end}"):
                graph[wrong]


@pytest.mark.parametrize("index", [1.0, "1", None, True, slice(0, 2), [0]], ids=repr)
def test_an_index_that_is_no_integer_is_refused(data, index):
    with pytest.raises(ArgumentTypeError, match="index"):
        data.graph[index]


@pytest.mark.parametrize("columns", [[(0, 10)], [(-1, 3)], [(3, 3)], [(5, 2)], [(0, 2), (8, 10)]], ids=str)
def test_columns_beyond_a_row_are_refused(data, columns):
    with pytest.raises(ConfigurationError, match="9 tokens"):
        data.weighted.fetch([0], columns=columns)
    assert data.weighted.fetch([0], columns=[(0, 9)]).shape == (1, 9)


# torch's functional names -----------------------------------------------------------------------------

TORCH_STREAM_NAMES = (
    "filter", "sharding_filter", "unbatch", "fork", "demux", "mux", "groupby", "read_from_stream", "routed_decode",
    "set_length", "to_iter_datapipe", "random_split", "no_such_step",
)  # fmt: skip


@pytest.mark.parametrize("name", TORCH_STREAM_NAMES)
def test_names_that_indexed_nodes_do_not_have_raise_attribute_error(data, name):
    for graph in (data.reader(), data.prose, data.weighted, data.batched, data.graph):
        assert not hasattr(graph, name)
        with pytest.raises(AttributeError, match=name):
            getattr(graph, name)


def test_torchs_own_names_stay_in_the_indexed_world(data):
    assert isinstance(data.windows().shuffle(seed=7), Permuter)
    assert isinstance(data.weighted.map(str), Mapper)
    assert isinstance(data.weighted.batch(4), SampleBatcher)
    assert isinstance(data.prose.zip(data.code), Zipper)
    assert isinstance(data.prose.concat(data.code), Concater)
    for nodes in (data.windows().shuffle(7), data.windows().permute(7)):
        assert nodes[0].tolist() == data.prose[0].tolist()


def test_a_foreign_node_registered_with_torch_raises_attribute_error(data):
    @functional_datapipe("a_step_of_somebody_else")
    class Foreign(MapDataPipe):
        def __init__(self, datapipe: Any) -> None:
            self.datapipe = datapipe

    try:
        assert isinstance(data.torch_map.a_step_of_somebody_else(), Foreign)
        with pytest.raises(AttributeError, match="a_step_of_somebody_else"):
            data.graph.a_step_of_somebody_else()
    finally:
        del MapDataPipe.functions["a_step_of_somebody_else"]


# The loader -------------------------------------------------------------------------------------------


def loaders(what: str, call: Callable[[DataLoader2], Any], error: type[TokenpipeError], *says: str) -> Any:
    return bad(what, call, error, *says)


def loader_integers(what: str, call: Callable[[DataLoader2, Any], Any], name: str, *low: Any) -> list[Any]:
    return integers(what, call, name, "0", *low)


LOADER_CALLS = [
    *loader_integers("seek", lambda x, v: x.seek(v), "step", -1, 2**63),
    *loader_integers("contents", lambda x, v: x.contents(v), "step", -1, 2**63),
    *loader_integers("state_dict", lambda x, v: x.state_dict(step=v), "step", -1, 2**63),
    loaders("seek to a step without samples", lambda x: x.seek(2**62), TokenpipeError, "step", str(2**62)),
    loaders("state of a step without samples", lambda x: x.state_dict(step=2**62), TokenpipeError, str(2**62)),
    loaders("contents of a step without samples", lambda x: x.contents(2**62), OutOfRangeError, "step", str(2**62)),
    loaders("when of an unknown source", lambda x: x.when("cod", 3, range(9)), ConfigurationError, "'cod'", "'code'"),
    loaders("when of a token too far", lambda x: x.when("code", 800, range(9)), OutOfRangeError, "'code'", "800"),
    *loader_integers("when", lambda x, v: x.when("code", v, range(9)), "token", -1),
    *(
        loaders(f"when of steps {v!r}", lambda x, v=v: x.when("code", 3, v), TokenpipeError, "steps", repr(v))
        for v in (range(0, 9, 2), range(-1, 9), range(9, 0, -1), (0, 9), 9, None)
    ),
    loaders("new weights NaN", lambda x: x.update_weights([NAN, 1]), WeightsError, "'prose'", "nan"),
    loaders("new weights negative", lambda x: x.update_weights([1, -1]), WeightsError, "'code'", "-1"),
    loaders("new weights all zero", lambda x: x.update_weights([0, 0]), WeightsError, "0"),
    loaders("new weights of one", lambda x: x.update_weights([1]), WeightsError, "1", "2 sources"),
    loaders("new weights of an unknown", lambda x: x.update_weights({"prose": 1, "cod": 1}), WeightsError, "'cod'"),
    loaders("new weights missing", lambda x: x.update_weights({"prose": 1}), WeightsError, "'code'"),
    loaders("new weights that round away", lambda x: x.update_weights([1, 1e-12]), WeightsError, "'code'", "1e-12"),
    loaders("new weights of a wrong type", lambda x: x.update_weights("all"), ArgumentTypeError, "'all'"),
    loaders("no new weights", lambda x: x.update_weights(), WeightsError, "weights", "temperature"),
    loaders("a new temperature", lambda x: x.update_weights([1, 1], temperature=0), WeightsError, "temperature", "0"),
    loaders("a state that is none", lambda x: x.load_state_dict({"step": 3}), StateError, "format"),
    loaders("a state that is text", lambda x: x.load_state_dict("step 3"), StateError, "JSON"),
    loaders("a state that is None", lambda x: x.load_state_dict(None), StateError, "NoneType"),
    *(
        loaders(f"seed={v!r}", lambda x, v=v: x.seed(v), error, "seed", str(v))
        for v, error in (
            (-1, ConfigurationError), (2**64, ConfigurationError), (1.5, ArgumentTypeError), ("a", ArgumentTypeError),
            (True, ArgumentTypeError), (None, ArgumentTypeError),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("prefetch_cnt", [0, 3])
@pytest.mark.parametrize("case", LOADER_CALLS)
def test_a_bad_call_leaves_the_loader_and_its_iterator_as_they_were(case, data, prefetch_cnt):
    with DataLoader2(data.graph, reading_service=InProcessReadingService(prefetch_cnt)) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        before = copy.deepcopy(loader.state_dict())
        check(case, loader)
        assert loader.state_dict() == before
        assert next(iterator)["sample_numbers"].tolist() == [12, 13, 14, 15]
        assert next(iterator)["sample_numbers"].tolist() == [16, 17, 18, 19]


def not_an_adapter(graph: Any) -> None:
    return None


CONSTRUCTORS = [
    bad("a list for a graph", lambda d: DataLoader2([1, 2]), ArgumentTypeError, "datapipe", "list"),
    bad("None for a graph", lambda d: DataLoader2(None), ArgumentTypeError, "datapipe", "NoneType"),
    bad("a class for a graph", lambda d: DataLoader2(Blender), ArgumentTypeError, "datapipe"),
    bad("a number for an adapter", lambda d: DataLoader2(d.graph, 3), ArgumentTypeError, "adapter", "3"),
    bad("an adapter that gives back nothing", lambda d: DataLoader2(d.graph, not_an_adapter), ArgumentTypeError,
        "not_an_adapter", "None"),
    bad("a bad adapter among good ones", lambda d: DataLoader2(d.graph, [lambda g: g, "lint"]), ArgumentTypeError,
        "adapter", "'lint'"),
    bad("a number for a service", lambda d: DataLoader2(d.graph, None, 3), ArgumentTypeError, "reading_service", "3"),
    bad("a class for a service", lambda d: DataLoader2(d.graph, reading_service=InProcessReadingService),
        ArgumentTypeError, "reading_service", "InProcessReadingService"),
    *integers("prefetch_cnt", lambda d, v: InProcessReadingService(prefetch_cnt=v), "prefetch_cnt", "0", -1),
    bad("init_fn=3", lambda d: next(iter(DataLoader2(d.graph, None, InProcessReadingService(init_fn=3)))),
        ArgumentTypeError, "init_fn", "3"),
    bad("reset_fn=3", lambda d: next(iter(DataLoader2(d.graph, None, InProcessReadingService(reset_fn=3)))),
        ArgumentTypeError, "reset_fn", "3"),
    bad("prefetching a seeded map",
        lambda d: next(iter(DataLoader2(d.graph.map(dict), None, InProcessReadingService(prefetch_cnt=2)))),
        ConfigurationError, "map", "seeded=False", "prefetch_cnt=0"),
    *integers("limit", lambda d, v: iter(DataLoader2(d.graph)).limit(v), "num_batches", "0", -1),
    bad("a loader from no state", lambda d: DataLoader2.from_state({}, d.graph), StateError, "format"),
]  # fmt: skip


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_a_bad_loader_is_a_clear_error(case, data):
    check(case, data)
    assert next(iter(DataLoader2(data.graph)))["sample_numbers"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("what", "build", "says"),
    [
        ("permute", lambda d: d.weighted.permute(seed=3), "Permuter"),
        ("a windowed permute", lambda d: d.weighted.permute(seed=3, window=16), "Permuter"),
        ("reorder", lambda d: d.weighted.reorder(d.order("o", np.arange(500)[::-1].copy())), "Reorderer"),
        ("once", lambda d: d.blend().once(), "nce"),
        ("no blend", lambda d: d.prose, "no blend"),
        ("nanoset", lambda d: d.windows().order_nanoset(d.windows("code"), num_samples=500), "no blend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_cannot_change_are_refused_and_the_run_goes_on(data, what, build, says):
    graph = build(data).batch_samples(4).collate_causal_lm(sample_numbers=True)
    expected = [batch["input_ids"].tolist() for _, batch in zip(range(5), DataLoader2(graph), strict=False)]
    loader = DataLoader2(graph)
    iterator = iter(loader)
    found = [next(iterator)["input_ids"].tolist() for _ in range(2)]
    before = loader.state_dict()
    with pytest.raises(TokenpipeError, match=says) as caught:
        loader.update_weights({"prose": 1, "code": 3})
    assert isinstance(caught.value, JournalError)
    assert loader.state_dict() == before
    found += [next(iterator)["input_ids"].tolist() for _ in range(3)]
    assert found == expected


def test_a_change_of_weights_before_a_recorded_one_is_refused_with_the_step_to_go_to(data):
    loader = DataLoader2(data.graph)
    loader.seek(5)
    loader.update_weights([1, 1])
    loader.seek(2)
    before = loader.state_dict()
    with pytest.raises(JournalError, match="step 5"):
        loader.update_weights([1, 3])
    assert loader.state_dict() == before
    loader.seek(5)
    loader.update_weights([1, 3])
    assert [entry[0] for entry in loader.state_dict()["journal"]["weights"]] == [5]


def test_a_seek_beyond_the_end_of_a_finite_run_is_refused_with_the_end(data):
    graph = data.weighted.limit(samples=40).batch_samples(4).collate_causal_lm(sample_numbers=True)
    loader = DataLoader2(graph)
    iterator = iter(loader)
    next(iterator)
    for call in (loader.seek, loader.contents, lambda step: loader.state_dict(step=step)):
        with pytest.raises(TokenpipeError, match="40"):
            call(11)
    assert next(iterator)["sample_numbers"].tolist() == [4, 5, 6, 7]
    loader.seek(9)
    assert [batch["sample_numbers"].tolist() for batch in loader] == [[36, 37, 38, 39]]


def test_a_stream_is_refused_what_needs_numbers(data):
    loader = DataLoader2(IterableWrapper(range(6)).batch(2))
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    calls = {
        "state_dict": lambda: loader.state_dict(step=1),
        "seek": lambda: loader.seek(1),
        "restart": loader.restart,
        "update_weights": lambda: loader.update_weights([1]),
        "contents": lambda: loader.contents(0),
        "when": lambda: loader.when("a", 0, range(1)),
    }
    for name, call in calls.items():
        with pytest.raises(LoaderError, match=f"{name}.*stream") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
    assert list(iterator) == [[2, 3], [4, 5]]
