"""What each step held, as 8 bytes a step: kept beside a run, compared with another run's.

A row's hash is the 8-byte BLAKE2b of its input_ids (`sequence_length` tokens as little-endian int64) and one
byte, 1 where all its labels are masked (−100), else 0. A step's hash is the sum of its rows' hashes mod 2^64.
A sum does not ask in which order, micro-batch or rank the rows come, so a step has the same hash on every
layout, whether worked out from the graph (`certify`) or from what was delivered, on each rank for itself:

    total = torch.zeros((), dtype=torch.int64)
    for micro_batch in step:                       # this rank's
        total += batch_certificate(micro_batch)    # wraps around at 2^63, as uint64 does at 2^64
    torch.distributed.all_reduce(total)            # over the data-parallel ranks: one of each tp group
    certificate.record(step_number, int(total))

That takes ranks that hold inputs and labels of whole rows. Parts of rows (context parallelism) and single stages of a
pipeline have no certificate; `certify` says on any rank what they train on.

Equal certificates say that each step trained on the same rows, as many times each. They do not cover the order
of rows within a step, the last label of a row (it is an input of no row), masks of single tokens, nor what
a model does with the rows; and a sum of hashes is no defence against someone who makes rows to collide.

The file, all integers little-endian:

    byte  0   8   magic  b"TOKCERT\\0"
          8   u32 version, 1
         12   u32 CRC-32 of all bytes but these four
         16   u64 the first step
         24   u64 how many steps
         32       u64 × steps: their hashes
"""

import hashlib
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..atomic import replacing
from ..collate import IGNORED_LABEL
from ..combine import Mapper
from ..core import MAX_NUMBER, IndexedDataPipe, Int64s, as_count
from ..errors import ArgumentTypeError, CertificateError, ConfigurationError, OutOfRangeError
from . import ledger

__all__ = ["Certificate", "batch_certificate", "certify"]

MAGIC = b"TOKCERT\0"
_HEADER = struct.Struct("<8sIIQQ")
_CRC = slice(12, 16)
_MODULUS = 1 << 64


class Certificate:
    """The hashes of consecutive steps, `first` the first of them.

    >>> run, other = Certificate(), Certificate()
    >>> for step in range(5):
    ...     run.record(step, step * 17)
    ...     other.record(step, step * 17 + (step == 3))
    >>> run.difference(other), run.difference(run)
    (3, None)

    Args:
        first: the first step's number.
        hashes: what is known so far, uint64 (n,) or integers mod 2^64.
    """

    def __init__(self, first: int = 0, hashes: "Iterable[int]" = ()) -> None:
        self.first = as_count("first", first, 0)
        self._hashes = array("Q", (int(value) % _MODULUS for value in hashes))

    @property
    def hashes(self) -> "npt.NDArray[np.uint64]":
        """uint64 (steps,): a copy."""
        return np.array(self._hashes, np.uint64)

    @property
    def steps(self) -> range:
        """The steps that have a hash."""
        return range(self.first, self.first + len(self._hashes))

    def __len__(self) -> int:
        return len(self._hashes)

    def __repr__(self) -> str:
        return f"Certificate(steps {self.steps.start} … {self.steps.stop - 1})" if len(self) else "Certificate(no step)"

    def record(self, step: int, value: int) -> None:
        """The next step's hash, mod 2^64 (so a signed sum will do). An earlier step takes back what was
        recorded from it on: a run that went on from an earlier checkpoint.

        Raises OutOfRangeError for a step that would leave a gap, or lies before the first.
        """
        step = as_count("step", step, 0)
        if not len(self):
            self.first = step
        if not self.first <= step <= self.steps.stop:
            raise OutOfRangeError(
                f"step {step} does not follow: this certificate has the steps {self.first} … {self.steps.stop - 1}"
            )
        del self._hashes[step - self.first :]
        self._hashes.append(int(value) % _MODULUS)

    def overlap(self, other: "Certificate") -> range:
        """The steps that both have."""
        start = max(self.first, other.first)
        return range(start, max(start, min(self.steps.stop, other.steps.stop)))

    def difference(self, other: "Certificate") -> "int | None":
        """The first step, of those that both have, in which they differ; None where all are equal.

        Raises ConfigurationError where they have no step in common: that is no agreement.
        """
        both = self.overlap(other)
        if not both:
            raise ConfigurationError(f"no step in common: {self!r} and {other!r}")
        mine = self.hashes[both.start - self.first : both.stop - self.first]
        differ = np.flatnonzero(mine != other.hashes[both.start - other.first : both.stop - other.first])
        return both.start + int(differ[0]) if differ.size else None

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes the file; nothing stands under `path` before it is whole. Raises OSError."""
        body = self.hashes.astype("<u8").tobytes()
        head = bytearray(_HEADER.pack(MAGIC, 1, 0, self.first, len(self)))
        head[_CRC] = _crc(head, body).to_bytes(4, "little")
        with replacing(path) as file:
            file.write(head)
            file.write(body)

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Certificate":
        """Reads and checks a file. Raises CertificateError for one that is cut, damaged or none; OSError."""
        data = Path(path).read_bytes()
        if not data.startswith(MAGIC) or len(data) < _HEADER.size:
            raise CertificateError(f"{os.fspath(path)}: not a certificate of tokenpipe ({len(data)} bytes)")
        _, version, crc, first, steps = _HEADER.unpack_from(data)
        if version != 1:
            raise CertificateError(f"{os.fspath(path)}: version {version}: written by a later tokenpipe?")
        if len(data) != (size := _HEADER.size + 8 * steps):
            raise CertificateError(
                f"{os.fspath(path)}: {steps} steps make {size} bytes, but the file has {len(data)}: it was cut or "
                "appended to"
            )
        body = memoryview(data)[_HEADER.size :]
        if crc != _crc(data[: _HEADER.size], body) or first + steps > MAX_NUMBER:
            raise CertificateError(f"{os.fspath(path)}: is damaged (CRC-32 does not match)")
        found = cls(first)
        found._hashes = array("Q", np.frombuffer(body, "<u8").astype(np.uint64).tobytes())
        return found


def _crc(head: "bytes | bytearray", body: Any) -> int:
    return zlib.crc32(body, zlib.crc32(bytes(head[: _CRC.start]) + bytes(head[_CRC.stop :])))


class Auditable(Protocol):
    """What `certify` asks of a loader."""

    datapipe: Any

    def tokens(self, step: int) -> Int64s: ...

    def contents(self, step: int) -> "list[ledger.ContentsRecord]": ...


def certify(run: "IndexedDataPipe | Auditable", steps: range) -> Certificate:
    """The certificate of a run's steps, worked out from its graph: nothing is trained or delivered.

    Args:
        run: a graph, or a DataLoader2 over one (which knows what its journal changed).
        steps: consecutive steps.

    Reads every token of these steps once; hashing takes some 9 ms a million tokens on one core.
    Raises OutOfRangeError beyond the run's end, ConfigurationError where a `map` makes other rows than the
    files': what was delivered is certified by `batch_certificate` alone.
    """
    ledger.check_steps(steps)
    graph = run if isinstance(run, IndexedDataPipe) else run.datapipe
    while graph.trunk and graph.steps is not None:  # what stands above the batcher is given rows, whatever it makes
        graph = graph.datapipe
    while graph.trunk:
        if isinstance(graph, Mapper):
            raise ConfigurationError(
                f"a map of samples ({graph.settings['fn']}) makes other rows than the token files hold: certify what "
                "was delivered, with batch_certificate"
            )
        graph = graph.datapipe
    certificate = Certificate(steps.start)
    for step in steps:
        if isinstance(run, IndexedDataPipe):
            tokens, records = ledger.tokens(run, step), ledger.contents(run, step)
        else:
            tokens, records = run.tokens(step), run.contents(step)
        masked = np.fromiter((record.masked for record in records), np.bool_, len(records))
        certificate.record(step, _sum_of_hashes(tokens[:, :-1], masked))
    return certificate


def batch_certificate(batch: "Mapping[str, Any]", sequence_length: "int | None" = None) -> int:
    """The sum of the hashes of a collated micro-batch's rows, as a signed 64-bit integer: sums of it in a
    torch int64 tensor wrap around as they shall.

    Args:
        batch: what `collate_causal_lm` made: "input_ids", "label_ids" int64 (b, s), perhaps "row_valid"
            (padding is no row of a step) and "label_mask", which then says what −100 says without one. A row of which
            `no_loss_on` leaves no label is as one that `exclude` masks: `certify` does not know of that rule. A tensor
            on another device is copied from it.
        sequence_length: of whole rows; left out, s is taken for it.

    Raises ArgumentTypeError for anything else, and for parts of rows.
    """
    try:
        inputs, labels = (np.asarray(batch[key].cpu()) for key in ("input_ids", "label_ids"))
        valid = batch.get("row_valid")
        kept = np.ones(len(inputs), np.bool_) if valid is None else np.asarray(valid.cpu())
        mask = batch.get("label_mask")
        counts: Any = labels != IGNORED_LABEL if mask is None else np.asarray(mask.cpu())
    except (TypeError, KeyError, AttributeError) as error:
        raise ArgumentTypeError(
            f"a collated batch is a dict with the tensors input_ids and label_ids, got {batch!r:.80} ({error!r})"
        ) from error
    if inputs.ndim != 2 or inputs.shape != labels.shape or inputs.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"input_ids and label_ids must be integers (b, s), got {inputs.dtype} {inputs.shape} and {labels.shape}"
        )
    whole = as_count("sequence_length", inputs.shape[1] if sequence_length is None else sequence_length)
    if inputs.shape[1] != whole or "row_places" in batch:
        raise ArgumentTypeError(
            f"the batch holds {inputs.shape[1]} tokens of rows of {whole if sequence_length else 'more'}; a "
            "certificate is of whole rows: cp='whole', or certify(graph, …) would do"
        )
    masked = ~counts.any(axis=1)
    total = _sum_of_hashes(inputs[kept], masked[kept])
    return total - _MODULUS if total >= _MODULUS // 2 else total


def _sum_of_hashes(rows: Int64s, masked: "npt.NDArray[np.bool_]") -> int:
    """(n, s) tokens and (n,) whether all labels are masked → the sum of the rows' hashes mod 2^64."""
    rows = np.ascontiguousarray(rows, "<i8")
    total = 0
    for row, mask in zip(rows, masked.tolist(), strict=True):
        digest = hashlib.blake2b(row, digest_size=8)
        digest.update(b"\1" if mask else b"\0")
        total += int.from_bytes(digest.digest(), "little")
    return total % _MODULUS
