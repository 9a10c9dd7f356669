"""Graphs of datapipes: what a run's batches are, as a function of their number.

The files of this package in the order in which a token passes them:

    tokenize/     texts to token files               formats/    the kinds of token file
    read.py       files as one token space           documents.py  chosen documents of it (scores.py)
    slice.py      windows (align.py: by documents; resize.py: other lengths)
    pack.py       rows of whole documents            permute.py  the shuffle
    blend.py      the mixture (weights.py, phases.py)  reorder.py  orders brought along
    bound.py      skip, limit, once                  exclude.py  rows kept, labels masked
    shard.py      one rank's part (topology.py;      batch.py    micro-batches (steps.py: steps)
                  balance.py: of even work)
    collate/      what this rank takes, as tensors   combine.py  map, zip, concat
    streaming/    what has no numbers: JSON lines, tokenised and packed as they pass

before, during and after a run:

    recipes/      graphs from files, and back        plan/       what the next steps will take
    journal.py    what changed (grow.py, jump.py)    audit/      contents, when, certificates

and around them: core.py (the contract of a node), fetch/ (from numbers to the bytes of files), remote/ (files behind
URLs), row_documents.py (where the documents of rows begin), kernels.py, fingerprint.py, tree.py and draw.py (a graph
as text, as a picture), names.py (of nodes), linting/ (what is wrong with a graph), pickled.py (what of it cannot
travel), wrapped.py (what is put around nodes), arguments.py (what a recipe writes down), atomic.py, cache.py (what is
made once on a machine), convert.py (files of one kind to another), verify.py (are they what they say), manifest.py
(what they are, in one file: file_sums.py, token_files.py), document_ends.py, loss_masks.py, rank_zero.py,
rank_group.py (what ranks ask each other; full_sync.py: streams end together), errors.py.

    >>> import tempfile, numpy as np
    >>> path = tempfile.mkdtemp() + "/prose.npy"
    >>> np.save(path, np.arange(1000, dtype=np.uint16))
    >>> graph = TokenReader(path, name="prose").slice_sequences(8).permute(seed=7)
    >>> print(graph.blend().batch_samples(4).collate_causal_lm().tree().replace(path, "prose.npy"))
    collate_causal_lm()                                         sequence_length 8
    batch_samples(micro_batch_size=4, global_batch_size=4)      1 micro-batch(es) a step, 31 a pass
    blend()                                                     exact union
    └─ prose 100.00%: permute(seed=7)
       slice_sequences(sequence_length=8)                       124 samples an epoch
       TokenReader(name=prose)                                  prose.npy: 1,000 uint16 tokens
"""

from .audit import Certificate, ContentsRecord, RowDocument, WhenRecord, batch_certificate, certify
from .balance import RankBalancer
from .batch import Rows, SampleBatcher
from .blend import Blender
from .bound import Limiter, Once, Skipper
from .collate import CausalLMCollator
from .combine import Concater, Mapper, Zipper
from .convert import ConvertSummary, convert_token_files
from .core import MAX_NUMBER, IndexedDataPipe
from .documents import DocumentSelector
from .draw import Drawing, draw
from .exclude import Excluder
from .formats.datatrove import DatatroveWriter
from .formats.ids import DocumentIds
from .formats.llmc import LlmcWriter
from .formats.megatron import MegatronWriter
from .formats.own import TokenFileWriter
from .full_sync import FullSync
from .linting import Finding, lint
from .manifest import Manifest, make_manifest, read_manifest, write_manifest
from .pack import DocumentPacker
from .permute import Permuter
from .plan import Overlap, Plan, overlap
from .read import TokenReader
from .recipes import load_nanotron, load_recipe, read_tokens, write_recipe
from .reorder import NanosetOrder, Reorderer
from .resize import SequenceResizer
from .shard import RankSharder
from .slice import SequenceSlicer
from .streaming import (
    DocumentTokenizer,
    JsonLinesReader,
    SequencePacker,
    StreamingDataPipe,
    StreamLimiter,
    StreamSkipper,
)
from .tokenize import ShardsSummary, TokenizeSummary, load_tokenizer, tokenize_files, tokenize_shards
from .topology import Topology
from .tree import tree
from .verify import VerifiedFile, verify_token_file
from .weights import linear_ramp

__all__ = [
    "MAX_NUMBER",
    "Blender",
    "CausalLMCollator",
    "Certificate",
    "Concater",
    "ContentsRecord",
    "ConvertSummary",
    "DatatroveWriter",
    "DocumentIds",
    "DocumentPacker",
    "DocumentSelector",
    "DocumentTokenizer",
    "Drawing",
    "Excluder",
    "Finding",
    "FullSync",
    "IndexedDataPipe",
    "JsonLinesReader",
    "Limiter",
    "LlmcWriter",
    "Manifest",
    "Mapper",
    "MegatronWriter",
    "NanosetOrder",
    "Once",
    "Overlap",
    "Permuter",
    "Plan",
    "RankBalancer",
    "RankSharder",
    "Reorderer",
    "RowDocument",
    "Rows",
    "SampleBatcher",
    "SequencePacker",
    "SequenceResizer",
    "SequenceSlicer",
    "ShardsSummary",
    "Skipper",
    "StreamLimiter",
    "StreamSkipper",
    "StreamingDataPipe",
    "TokenFileWriter",
    "TokenReader",
    "TokenizeSummary",
    "Topology",
    "VerifiedFile",
    "WhenRecord",
    "Zipper",
    "batch_certificate",
    "certify",
    "convert_token_files",
    "draw",
    "linear_ramp",
    "lint",
    "load_nanotron",
    "load_recipe",
    "load_tokenizer",
    "make_manifest",
    "overlap",
    "read_manifest",
    "read_tokens",
    "tokenize_files",
    "tokenize_shards",
    "tree",
    "verify_token_file",
    "write_manifest",
    "write_recipe",
]
