"""Token files whose ids say where each token comes from; and in plain Python what a rank shall be given of rows."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenpipe.datapipes import TokenFileWriter, TokenReader, Topology
from tokenpipe.datapipes.collate.layouts import TensorPointer

I64 = np.int64


class Shelf:
    """Sources of several files of documents. Token k of all files, end to end, is the id 1 + k: no id comes twice.

    With `scored` ids that 3 divides do not count, by `.loss` files.
    """

    def __init__(self, folder: Path, sources: "dict[str, list[list[int]]]", scored: bool = False) -> None:
        self.document: dict[int, tuple[str, int, int]] = {}  # {token: (source, file, document)}
        self.paths: dict[str, list[str]] = {}
        token = 1
        for source, files in sources.items():
            for f, lengths in enumerate(files):
                path = folder / f"{source}-{f}.tok"
                with TokenFileWriter(path, vocab_size=60_000) as writer:
                    for d, length in enumerate(lengths):
                        ids = np.arange(token, token + length)
                        writer.write(ids, ids % 3 > 0 if scored else None)
                        self.document |= dict.fromkeys(range(token, token + length), (source, f, d))
                        token += length
                self.paths.setdefault(source, []).append(str(path))

    def reader(self, source: str) -> TokenReader:
        return TokenReader(self.paths[source], name=source)

    def begins(self, row: "Sequence[int]") -> "list[int]":
        """Where the documents of a row of S + 1 tokens begin; zeros are padding, a document of its own."""
        of = self.document.get
        joined = [of(b) == of(a) and (b == a + 1 or b == 0) for a, b in itertools.pairwise(row)]
        return [0, *(i for i, same in enumerate(joined, 1) if not same)]


def zigzag(first: int, length: int, rank: int, size: int) -> "list[int]":
    chunk = length // (2 * size)
    parts = [rank, 2 * size - 1 - rank]
    return [first + part * chunk + i for part in parts for i in range(chunk)]


def held(length: int, place: Topology, cut: str, begins: "Sequence[int]") -> "list[int]":
    """Which of a row's input tokens a rank holds."""
    rank, size = place.cp_rank, place.cp_size
    if cut == "whole" or size == 1:
        return [*range(length)]
    if cut == "contiguous":
        return [*range(rank * length // size, (rank + 1) * length // size)]
    if cut == "zigzag":
        return zigzag(0, length, rank, size)
    found, left = [], []
    starts = [b for b in begins if b < length]
    for begin, stop in zip(starts, [*starts[1:], length], strict=True):
        whole = (stop - begin) // (2 * size) * 2 * size
        found += zigzag(begin, whole, rank, size)
        left += range(begin + whole, stop)
    return sorted(found + [left[i] for i in zigzag(0, len(left), rank, size)])


def documents(shelf: Shelf, rows: np.ndarray) -> "dict[str, np.ndarray]":
    """Of rows (b, S + 1): positions, document numbers, joins (b, S); cu_seqlens, max_seqlen."""
    length = rows.shape[1] - 1
    found: dict[str, list] = {"position_ids": [], "document_ids": [], "joins": []}
    cuts = []
    for r, row in enumerate(rows.tolist()):
        begins = shelf.begins(row)
        at = [max(b for b in begins if b <= i) for i in range(length)]
        found["position_ids"].append([i - b for i, b in enumerate(at)])
        found["document_ids"].append([begins.index(b) for b in at])
        found["joins"].append([i + 1 in begins for i in range(length)])
        cuts += [r * length + b for b in begins if b < length]
    cuts.append(rows.shape[0] * length)
    arrays: dict[str, Any] = {key: np.array(value) for key, value in found.items()}
    return {**arrays, "cu_seqlens": np.array(cuts, np.int32), "max_seqlen": max(np.diff(cuts).tolist())}


def expected(
    shelf: Shelf,
    rows: np.ndarray,
    place: Topology,
    layout: "str | None",
    cut: str,
    asked: "Iterable[str]" = (),
    pp_ranks: "tuple[int, int]" = (0, -1),
    dtype: Any = I64,
    hidden: "np.ndarray | None" = None,
    uncounted: "np.ndarray | None" = None,
) -> Any:
    """What the rank shall be given of rows (b, S + 1).

    asked: of position_ids, document_ids, cu_seqlens, label_mask, joins. hidden: bool (b,); uncounted: bool (b, S).
    """
    asked, length = {*asked}, rows.shape[1] - 1
    first, last = ((rank % place.pp_size) == place.pp_rank for rank in pp_ranks)
    known = documents(shelf, rows)
    places = np.array([held(length, place, cut, shelf.begins(row)) for row in rows.tolist()])

    def mine(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.take_along_axis(array.astype(dtype), places, 1))

    inputs, labels = mine(rows[:, :-1]), mine(rows[:, 1:])
    counts = rows[:, 1:] != 0
    if "joins" in asked or (layout == "nanotron" and "position_ids" in asked):
        counts &= ~known["joins"]
    if uncounted is not None:
        counts &= ~uncounted
    if hidden is not None:
        counts[hidden] = False
    count = mine(counts).bool()
    shown = labels.masked_fill(~count, -100)
    of_documents: dict[str, Any] = {
        key: mine(known[key]) for key in ("position_ids", "document_ids") if key in asked
    }  # fmt: skip
    if "cu_seqlens" in asked:
        of_documents |= {"cu_seqlens": torch.from_numpy(known["cu_seqlens"]), "max_seqlen": known["max_seqlen"]}
    taken = first or last or bool(asked & {"document_ids", "cu_seqlens"})
    if "position_ids" in asked and (first or layout not in ("nanotron", "megatron")):
        taken = True
    if cut == "document" and place.cp_size > 1 and taken:
        of_documents["row_places"] = torch.from_numpy(places)
    mask = {"label_mask": count} if "label_mask" in asked and last else {}
    if layout is None:
        return of_documents | ({"input_ids": inputs} if first else {}) | ({"label_ids": shown} if last else {}) | mask
    if layout == "torchtitan":
        positions = {"positions": of_documents.pop("position_ids")} if "position_ids" in asked else {}
        return of_documents | positions | ({"input": inputs} if first else {}) | mask, shown if last else None
    if layout == "hf":
        out = of_documents | mask
        if "cu_seqlens" in asked:
            cuts, longest = out.pop("cu_seqlens"), out.pop("max_seqlen")
            out |= {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": longest, "max_length_k": longest}
        if first:
            out["input_ids"] = inputs
            if "position_ids" not in asked:
                out["attention_mask"] = torch.ones(inputs.shape, dtype=torch.int64)
        if last and place.cp_size > 1:
            out |= {"labels": inputs, "shift_labels": shown}
        elif last:
            plain = inputs.clone()
            plain[:, 1:] = shown[:, :-1]
            if hidden is not None:
                plain[torch.from_numpy(hidden)] = -100
            out["labels"] = plain
            if mask:
                out["label_mask"] = plain != -100
        return out
    positions = of_documents.pop("position_ids", None)
    if layout == "megatron":
        out = dict(of_documents)
        if first:
            line = np.tile(np.arange(length), (rows.shape[0], 1))
            out |= {"tokens": inputs, "position_ids": mine(line) if positions is None else positions}
        return out | ({"labels": labels, "loss_mask": count.float()} if last else {})
    out = dict(of_documents)
    beside = "input_mask" if positions is None else "position_ids"
    if first:
        out |= {
            "input_ids": inputs,
            beside: torch.ones(inputs.shape, dtype=torch.bool) if positions is None else positions,
        }
    else:
        out |= dict.fromkeys(("input_ids", beside), TensorPointer(pp_ranks[0] % place.pp_size))
    if last:
        return out | {"label_ids": labels, "label_mask": count}
    return out | dict.fromkeys(("label_ids", "label_mask"), TensorPointer(pp_ranks[1] % place.pp_size))
