"""Rows of tokens → the tensors that this rank takes in a training step: its stage, its part of each row, its labels.

rows (b, S + 1) ─▶ what the stage and the cut hold, all that is read ─▶ labels that count ─▶ the layout's names
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .._torch import functional_datapipe
from ..batch import Rows, SampleBatcher, batcher_of
from ..combine import Mapper
from ..core import IndexedDataPipe, Int64s, Unpickled, as_count, nodes_of, sample_node
from ..document_ends import no_document_ends
from ..errors import ArgumentTypeError, ConfigurationError, TokenIdError, TopologyError
from ..fetch.gather import Columns, TokenGather
from ..fetch.routes import Routes, plan_of
from ..slice import TokenWindows
from ..topology import Topology
from .cut import cut_for
from .labels import LabelRules, as_rules, hidden_rows, labels_with
from .layouts import IGNORED_LABEL, Parts, in_microbatches, layout_of, roles_of

__all__ = ["IGNORED_LABEL", "CausalLMCollator"]

MOST_INT32 = 2**31 - 1
DTYPES: "dict[str, Any]" = {"int64": np.dtype(np.int64), "int32": np.dtype(np.int32)}


@functional_datapipe("collate_causal_lm")
class CausalLMCollator(IndexedDataPipe):
    """Makes what this rank takes of a micro-batch of b rows of S tokens (functional: `collate_causal_lm`).

    An item is a dict. The first stage of the pipeline has the inputs, the last one the labels, a stage alone both;
    s = S, or what a context-parallel rank holds of it. What the rank does not hold is not there, and not read.
        input_ids: int64 (b, s).
        label_ids: int64 (b, s), already shifted: label_ids[r, i] follows input_ids[r, i]. −100 where it does not count.
        label_mask: bool (b, s), on request: which labels count.
        position_ids: int64 (b, s), on request: from 0 in each document, and in each row.
        document_ids: int64 (b, s), on request: counted from 0 in each row; padding has numbers of its own.
        cu_seqlens, max_seqlen: int32 (documents + 1,) and an int, on request: where documents begin in the b·S input
            tokens of whole rows, end to end, also where a rank holds a part of them.
        row_places: int64 (b, s), where cp="document": which of its row's tokens each one is.
        row_valid: bool (b,), only where `once(tail="pad")` is below; no label of a padded row counts.
        source_ids: int64 (b,), on request: indices into `source_names`, −1 for padding.
        sample_numbers: int64 (b,), on request: places in the run's global order, −1 for padding.
    Inputs and labels are views of one buffer where that can be.

    Args:
        topology: this process's place; left out, the sharder's.
        layout: None, or the keys, masks and shift that a framework expects: "nanotron", "torchtitan", "megatron" or
            "hf" (its models shift labels themselves); see layouts.py for the table.
        cp: how a row is shared out over context-parallel ranks: "zigzag", "contiguous", "document" (a zigzag in each),
            or "whole"; left out, the layout's.
        no_loss_on: labels that do not count beside padding and what `exclude` masks: "joins" (the first token of a
            document), "end_of_text" (that id), "unscored" (by the file's `.loss` sidecar).
        ignore_index: what stands in the labels where they do not count, None: the token; left out, the layout's.
        dtype: "int64" or "int32", of ids and positions.
        microbatches: n gives (n, b / n, s), as JAXformer's shape; cu_seqlens (n, most + 1), filled up with their last.
        input_pp_rank, output_pp_rank: the stages with the embedding and the loss (−1: the last); 0 and 0 for a schedule
            that comes back, as ZBV.

    Raises ConfigurationError for what does not fit together, or documents that no file names; TopologyError where S
    does not share out.
    """

    functional_name = "collate_causal_lm"
    trunk = True

    def __init__(
        self,
        datapipe: IndexedDataPipe,
        source_ids: bool = False,
        sample_numbers: bool = False,
        *,
        topology: "Topology | None" = None,
        layout: "str | None" = None,
        cp: "str | None" = None,
        position_ids: bool = False,
        document_ids: bool = False,
        cu_seqlens: bool = False,
        label_mask: bool = False,
        no_loss_on: "Sequence[str]" = (),
        ignore_index: "int | str | None" = "layout",
        dtype: str = "int64",
        microbatches: "int | None" = None,
        input_pp_rank: int = 0,
        output_pp_rank: int = -1,
    ) -> None:
        super().__init__(datapipe)
        if topology is not None and not isinstance(topology, Topology):
            raise ArgumentTypeError(f"collate_causal_lm takes a Topology, got {topology!r}")
        self.source_ids, self.with_sample_numbers = bool(source_ids), bool(sample_numbers)
        self.position_ids, self.document_ids = bool(position_ids), bool(document_ids)
        self.cu_seqlens, self.label_mask = bool(cu_seqlens), bool(label_mask)
        self.given_topology, self.layout, self.given_cp = topology, layout, cp
        self.ignore_index, self.dtype = ignore_index, dtype
        self.microbatches = None if microbatches is None else as_count("microbatches", microbatches)
        self.pp_ranks = (input_pp_rank, output_pp_rank)
        self._layout = layout_of(layout)
        always = ("joins",) if self._layout.joins_with_positions and position_ids else ()
        self.no_loss_on = as_rules(no_loss_on)
        self._uncounted = tuple(dict.fromkeys((*self.no_loss_on, *always)))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {dtype!r}; int64 or int32 would do")
        self._dtype = DTYPES[dtype]
        if isinstance(ignore_index, str) and ignore_index == "layout":
            self._ignored = self._layout.ignore_index
        elif ignore_index is None or (isinstance(ignore_index, int) and not isinstance(ignore_index, bool)):
            self._ignored = ignore_index
            bounds = np.iinfo(self._dtype)
            if ignore_index is not None and not bounds.min <= ignore_index <= bounds.max:
                raise ConfigurationError(f"ignore_index is {ignore_index}, which is no {dtype}; -100 would do")
        else:
            raise ArgumentTypeError(f"ignore_index must be an integer or None, got {ignore_index!r}")
        self.check()

    # Where it stands --------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.datapipe.steps is None:
            raise ConfigurationError("collate_causal_lm takes micro-batches: put batch_samples before it")
        place = self.place
        self._roles = roles = roles_of(place, *self.pp_ranks, self.position_ids)
        inputs = roles.inputs or (roles.labels and not self._layout.shifted)
        self._cut = cut_for(place, self._layout.cp if self.given_cp is None else self.given_cp, inputs, roles.labels)
        columns: Columns | None = None
        if (place.pp_size > 1 or place.cp_size > 1) and not self._mapped:
            columns = self._cut.columns(self.sequence_length)
        self._columns = columns
        if self._batcher.reads != columns:
            self.children = (_reading(self.datapipe, columns),)
        if self.microbatches is not None:
            self._check_microbatches(self.microbatches)
        self._check_documents()

    @property
    def place(self) -> Topology:
        """This process's place among the ranks."""
        dealt = self.datapipe.topology or Topology()
        given = self.given_topology
        if given is not None and (given.dp_rank, given.dp_size) != (dealt.dp_rank, dealt.dp_size):
            raise TopologyError(
                f"collate_causal_lm is given {given}, but the rows below are dealt to dp {dealt.dp_rank} of "
                f"{dealt.dp_size}; the same Topology for shard_ranks, or none here, would do"
            )
        return dealt if given is None else given

    @property
    def _batcher(self) -> SampleBatcher:
        batcher = batcher_of(self)
        assert batcher is not None  # check() saw it
        return batcher

    @property
    def _mapped(self) -> bool:
        """Whether a function stands between the batcher and here: it is given whole rows."""
        node = self.datapipe
        while not isinstance(node, (Mapper, SampleBatcher)):
            node = node.datapipe
        return isinstance(node, Mapper)

    @property
    def _routes(self) -> Routes:
        return plan_of(sample_node(self))

    @property
    def _windows(self) -> "tuple[TokenGather, LabelRules | None]":
        """Where the rows' windows lie, and what says which labels count; None: nothing but rows that are hidden."""
        if (found := self._found.value) is None:
            gather = self._routes.gather
            assert gather is not None  # check() saw it
            rules = LabelRules(self._uncounted, self._routes) if self._ruled else None
            found = self._found.value = gather, rules
        return found

    def _check_documents(self) -> None:
        roles, cut = self._roles, self._cut
        self._found = Unpickled()
        self._asked = (
            self.position_ids and (roles.inputs or not self._layout.positions_first),
            self.document_ids,
            roles.labels and "joins" in self._uncounted,
            self.cu_seqlens,
        )
        self._asks = any(self._asked) or (cut.by_document and (cut.inputs or cut.labels))
        self._asked = (*self._asked[:3], self.cu_seqlens or cut.by_document)  # a cut by document needs them too
        # routes are worked out with the first batch, but where this is asked already now
        windows = (node for node in nodes_of(self) if isinstance(node, TokenWindows) and node.children)
        packed = any(node.reader.table is not None for node in windows)
        gather = self._routes.gather if self._asks or self._uncounted or packed else None
        self._ruled = roles.labels and bool(self._uncounted or (gather is not None and gather.lays_out))
        self._plain = not (self._asks or self._ruled or self.settings.keys() - {"cp"})
        self._length = self.sequence_length if self._asks or self._layout.positions else 0
        if not (self._asks or self._ruled):
            return
        if gather is None:
            raise ConfigurationError(
                "where documents begin is known of windows of token files alone; a map or zip below makes other rows: "
                "without position_ids, document_ids, cu_seqlens, no_loss_on and cp='document' it would do"
            )
        if self._asks and (missing := gather.documents.missing):
            raise no_document_ends(missing[0], "where documents begin in a row is asked for")
        _ = self._windows  # or it says now what is missing

    def _check_microbatches(self, count: int) -> None:
        for what, number, divisor, by in (
            ("the micro-batch", self._batcher.micro_batch_size, count, "microbatches"),
            ("microbatches", count, self.place.pp_size, "pp_size"),
            ("sequence_length", self.sequence_length, self.place.tp_size, "tp_size"),
        ):
            if number % divisor:
                below = number - number % divisor
                fits = f"{below} or {below + divisor}" if below else f"{divisor}"
                raise ConfigurationError(f"{what} is {number}, no multiple of {by}={divisor}; {fits} would do")
        if self.tail == "uneven":
            raise ConfigurationError("microbatches= needs batches of one size; once(tail='pad') or 'drop' would do")

    @property
    def settings(self) -> dict[str, Any]:
        said = {
            "source_ids": self.source_ids, "sample_numbers": self.with_sample_numbers, "layout": self.layout,
            "cp": self.given_cp, "position_ids": self.position_ids, "document_ids": self.document_ids,
            "cu_seqlens": self.cu_seqlens, "label_mask": self.label_mask, "no_loss_on": list(self.no_loss_on),
            "microbatches": self.microbatches, "dtype": self.dtype if self.dtype != "int64" else None,
        }  # fmt: skip
        said = {key: value for key, value in said.items() if value}
        return said if self.ignore_index == "layout" else {**said, "ignore_index": self.ignore_index}

    @property
    def notes(self) -> str:
        said, place, roles = [f"sequence_length {self.sequence_length}"], self.place, self._roles
        if place.pp_size > 1:
            held = [name for name, there in (("inputs", roles.inputs), ("labels", roles.labels)) if there]
            said.append(f"pp {place.pp_rank} of {place.pp_size}: {' and '.join(held) or 'no tokens'}")
        if place.cp_size > 1:
            said.append(f"cp {place.cp_rank} of {place.cp_size}: {self._cut.how}")
        return ", ".join(said)

    @property
    def source_names(self) -> "list[str]":
        """What the indices in `source_ids` stand for."""
        return self._batcher.source_names

    # Items ------------------------------------------------------------------------------------------------------

    def fetch(self, numbers: Any, columns: Any = None) -> "list[Any]":
        if columns is not None:
            raise ConfigurationError("columns choose tokens of a row; a collated batch has none left to choose")
        numbers = self.checked(numbers)
        if self._nothing:
            return [self._layout.arrange({}, self._roles) for _ in range(numbers.size)]
        return [self.collate(rows) for rows in self.datapipe.fetch(numbers)]

    def iterate(self, start: int = 0, stop: "int | None" = None) -> Iterator[Any]:
        if self._nothing:
            stop = self.end if stop is None else min(stop, self.end)
            return (self._layout.arrange({}, self._roles) for _ in range(start, stop))
        return map(self.collate, self.datapipe.iterate(start, stop))

    @property
    def _nothing(self) -> bool:
        """Whether this stage takes nothing of a batch: then none is routed, and nothing read."""
        asked = self._asks or self.source_ids or self.with_sample_numbers
        return not (self._roles.inputs or self._roles.labels or asked)

    def collate(self, rows: Rows) -> Any:
        """One micro-batch as this rank takes it."""
        if self._plain and rows.valid is None and rows.masked is None:  # nearly every run: half of what follows takes
            inputs, labels = self._held(rows, None)
            batch = {} if inputs is None else {"input_ids": torch.from_numpy(inputs)}
            if labels is not None:
                batch["label_ids"] = torch.from_numpy(labels)
            return batch
        parts, cut, roles, documents, where, rules = Parts(), self._cut, self._roles, None, None, None
        if self._asks or self._ruled:
            gather, rules = self._windows
            assert rows.places is not None  # they are windows
            if self._asks:
                documents = gather.documents.fill(rows.places, self._length + 1, *self._asked)
                where = cut.where(documents, self._length)
        inputs, labels = self._held(rows, where)
        if roles.inputs:
            parts["input_ids"] = inputs
        if labels is not None:
            counts = None if rules is None else rules.counting(rows, labels, documents, cut, where)
            self._label(parts, inputs, labels, counts, hidden_rows(rows))
        if documents is not None:
            if documents.position_ids is not None:
                parts["position_ids"] = cut.take(documents.position_ids, where).astype(self._dtype, copy=False)
            if documents.document_ids is not None:
                parts["document_ids"] = cut.take(documents.document_ids, where).astype(self._dtype, copy=False)
            if documents.cu_seqlens is not None and self.cu_seqlens:
                parts["cu_seqlens"], parts["max_seqlen"] = documents.cu_seqlens, documents.max_seqlen
        if self._layout.positions and roles.inputs and "position_ids" not in parts:
            line = cut.take(np.arange(self._length, dtype=self._dtype)[None], where)
            parts["position_ids"] = np.tile(line, (rows.sample_numbers.size // line.shape[0], 1))
        if where is not None:
            parts["row_places"] = where
        if rows.valid is not None:
            parts["row_valid"] = rows.valid
        if self.source_ids:
            parts["source_ids"] = rows.sources.copy()
        if self.with_sample_numbers:
            parts["sample_numbers"] = rows.sample_numbers.copy()
        if self.microbatches is not None:
            parts = in_microbatches(parts, self.microbatches)
        tensors = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in parts.items()}
        return self._layout.arrange(tensors, roles)

    def _held(self, rows: Rows, where: "Int64s | None") -> "tuple[np.ndarray | None, np.ndarray | None]":
        """The inputs and the labels that this rank holds, each (b, s), None for what it does not."""
        tokens = self._checked_tokens(rows)
        if self._columns is None or rows.places is None:
            return self._cut.whole(tokens, where)
        return self._cut.split(tokens, self._columns)

    def _checked_tokens(self, rows: Rows) -> np.ndarray:
        """What was read of rows (b, L), of our dtype. Raises ConfigurationError, TokenIdError."""
        tokens = rows.tokens
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ConfigurationError(
                "collate_causal_lm takes rows of integer tokens of one length; a map before it made "
                f"{type(tokens[0]).__name__ if isinstance(tokens, list) and tokens else type(tokens).__name__}"
            )
        if self.dtype == "int32" and tokens.size and int(tokens.max()) > MOST_INT32:
            raise TokenIdError(f"token id {tokens.max()} does not fit dtype='int32'; 'int64' would do")
        return tokens if tokens.dtype == self._dtype else tokens.astype(self._dtype)

    def _label(
        self,
        parts: Parts,
        inputs: "np.ndarray | None",
        labels: np.ndarray,
        counts: "np.ndarray | None",
        hidden: "np.ndarray | None",
    ) -> None:
        """Puts in the labels (b, s), and which of them count. counts: bool (b, s); hidden: bool (b,)."""
        if hidden is not None:
            counts = np.ones(labels.shape, np.bool_) if counts is None else counts
            counts[hidden] = False
        if self._ignored is not None and counts is not None:
            labels = labels_with(labels, counts, self._ignored)
        if self._layout.shifted:
            parts["label_ids"] = labels
        elif self._cut.topology.cp_size > 1:  # what follows a rank's last token is another's
            assert inputs is not None  # they are read where labels are
            parts |= {"label_ids": inputs.copy(), "shift_labels": labels}
        else:
            assert inputs is not None
            parts["label_ids"] = np.concatenate([inputs[:, :1], labels[:, :-1]], axis=1)
            if hidden is not None and self._ignored is not None:
                parts["label_ids"][hidden, 0] = self._ignored
            if counts is not None:  # a mask is of the labels that it is given with
                begins = np.ones(len(labels), np.bool_) if hidden is None else ~hidden
                counts = np.concatenate([begins[:, None], counts[:, :-1]], axis=1)
        if self.label_mask or self._layout.masked:
            parts["label_mask"] = np.ones(labels.shape, np.bool_) if counts is None else counts


def _reading(node: IndexedDataPipe, columns: "Columns | None") -> IndexedDataPipe:
    """The same batches of which the batcher reads no more than these columns."""
    if isinstance(node, SampleBatcher):
        return node.reading(columns)
    return node.with_children(_reading(node.datapipe, columns))
