"""Nanotron's data stages as one graph: which data from which training step on, over the kinds of file read here.

    data_stages:                               tokens: {sequence_length, micro_batch_size,
    - name: first                                       batch_accumulation_per_replica}
      start_training_step: 1                   parallelism: {dp}
      data: {seed: 1, dataset: {dataset_folder: path | [paths] | {path: weight}}}

Nanotron starts a data set anew at each stage, so what two stages share is seen again from its beginning. Here the
stages are planned changes of one blend: a source goes on where it was. Facts from Nanotron's config.py and docs
(Apache-2.0, github.com/huggingface/nanotron, 2024–2025); the rest of its config (model, optimizer, …) is not looked at.
"""

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core import IndexedDataPipe, as_count
from ..errors import ArgumentTypeError
from ..read import TokenReader
from ..topology import Topology
from ..weights import as_shares
from .files import source_names
from .text import Document, Place, parse

__all__ = ["is_nanotron", "load_nanotron"]

DEFAULT_SEED = 42
STAGE = ("name", "start_training_step", "data", "sequence_length")
DATA = ("dataset", "seed", "num_loading_workers")
PATHS = ("dataset_path", "dataset_folder")  # the older and the newer name
IGNORED = (
    "dataset_read_path",
    "return_positions",
    "shuffle_files",
    "skip_in_stream",
    "tokenizer_name",
    "use_old_brrr_dataloader",
    "vocab_size",
)
REFUSED = ("dataset_max_tokens", "pad_samples_to_global_batch_size")
DATASET = (*PATHS, "dataset_weights", "token_size_in_bytes", *IGNORED, *REFUSED)
DTYPES = {2: "uint16", 4: "uint32"}


def is_nanotron(value: Any) -> bool:
    """Whether a recipe's values are a config of Nanotron."""
    return isinstance(value, Mapping) and "data_stages" in value


def load_nanotron(
    config: "str | os.PathLike[str] | Mapping[str, Any]",
    topology: "Topology | None" = None,
    micro_batch_size: "int | None" = None,
    folder: "str | os.PathLike[str] | None" = None,
    dtype: object = None,
    io: str = "mmap",
    verify: "str | None" = None,
) -> IndexedDataPipe:
    """The graph of a Nanotron config with data stages: sources, their blend by stages, ranks, batches, tensors.

    A path is a token file, or a folder of token files (in the order of their names), which is one source. Every
    source is permuted with the seed of the first stage that has it. A stage's weights hold from the first sample of
    its `start_training_step` (1 is the first step); a list without weights means by the sources' lengths. A step is
    micro_batch_size × batch_accumulation_per_replica × dp samples, by the config, whatever the topology here.

    Args:
        config: a path, YAML text, or values.
        topology: this process's place. micro_batch_size: in place of the config's.
        folder: where relative paths begin; left out: the current one, as in Nanotron.
        dtype: of raw files; left out: by the data set's `token_size_in_bytes` (2 or 4).
        io, verify: how the files are read, and how much of what a manifest says of them is compared; see TokenReader.

    Raises RecipeError for what cannot be followed, with its place: text data sets (tokenize them first), datatrove's
    `.ds` folders (not read so far), a sequence_length that changes between stages, dataset_max_tokens.
    """
    document, _ = parse(config)
    if topology is not None and not isinstance(topology, Topology):
        raise ArgumentTypeError(f"topology must be a Topology, got {topology!r}")
    return _Config(document, "" if folder is None else os.fspath(folder), dtype, io, verify).graph(
        topology or Topology(), micro_batch_size
    )


class _Stage:
    """One stage: its first step (from 1), seed, and {path: weight}, or None for weights by length."""

    def __init__(self, start: int, seed: int, paths: "list[str]", weights: "list[float] | None", at: Place) -> None:
        self.start, self.seed, self.paths, self.weights, self.at = start, seed, paths, weights, at
        self.dtype: str | None = None


class _Config:
    def __init__(self, document: Document, folder: str, dtype: object, io: str, verify: "str | None") -> None:
        self.document, self.folder, self.dtype = document, folder, dtype
        self.io, self.verify = io, verify
        self.config = self.document.mapping(document.value, ())

    def graph(self, topology: Topology, micro_batch_size: "int | None") -> IndexedDataPipe:
        tokens = self.document.mapping(self.config.get("tokens"), ("tokens",))
        parallelism = self.document.mapping(self.config.get("parallelism"), ("parallelism",))
        self.sequence_length = self.count(tokens, "sequence_length", ("tokens",))
        micro = self.count(tokens, "micro_batch_size", ("tokens",))
        accumulated = self.count(tokens, "batch_accumulation_per_replica", ("tokens",))
        step = micro * accumulated * self.count(parallelism, "dp", ("parallelism",))
        stages = self.stages()
        sources = self.sources(stages)
        names = [node.name for node in sources.values()]
        by_stage = [self.weights(stage, sources) for stage in stages]
        everything = stages[0].weights is None and set(stages[0].paths) == set(sources)
        changes = [
            ((stage.start - 1) * step, dict(zip(names, weights, strict=True)))
            for stage, weights in zip(stages[1:], by_stage[1:], strict=True)
        ]
        first, *others = sources.values()
        with self.document.placed(()):
            blend = first.blend(
                *others,
                weights=None if everything else dict(zip(names, by_stage[0], strict=True)),
                schedule=changes or None,
            )
            return (
                blend.shard_ranks(topology, seed=stages[0].seed)
                .batch_samples(micro if micro_batch_size is None else micro_batch_size, global_batch_size=step)
                .collate_causal_lm()
            )

    # Stages -------------------------------------------------------------------------------------------

    def stages(self) -> "list[_Stage]":
        found = self.config["data_stages"]
        if not isinstance(found, list) or not found:
            raise self.document.error(("data_stages",), "a list of stages was expected")
        stages = [self.stage(stage, ("data_stages", i)) for i, stage in enumerate(found)]
        stages.sort(key=lambda stage: stage.start)
        for a, b in pairwise(stages):
            if a.start == b.start:
                raise self.document.error(b.at, f"two stages have start_training_step {b.start}")
        if stages[0].start != 1:
            raise self.document.error(stages[0].at, f"the first stage has start_training_step 1, got {stages[0].start}")
        return stages

    def stage(self, value: Any, at: Place) -> _Stage:
        stage = self.document.mapping(value, at, STAGE)
        length = stage.get("sequence_length")
        if length is not None and length != self.sequence_length:
            raise self.document.error(
                (*at, "sequence_length"),
                f"{length!r:.40} is another than tokens.sequence_length={self.sequence_length}: a graph has one, and "
                "resize_sequences changes it",
            )
        data = self.document.mapping(stage.get("data"), (*at, "data"), DATA)
        where = (*at, "data", "dataset")
        dataset = data.get("dataset")
        if not isinstance(dataset, dict) or any(key.startswith("hf_") for key in dataset):
            raise self.document.error(
                where, "a data set of token files was expected (dataset_folder or dataset_path); tokenize text first"
            )
        self.document.mapping(dataset, where, DATASET)
        for key in REFUSED:
            if dataset.get(key):
                raise self.document.error((*where, key), f"{key} cannot be followed: leave it out")
        paths, weights = self.paths(dataset, where)
        seed = DEFAULT_SEED if data.get("seed") is None else self.count(data, "seed", (*at, "data"), 0)
        result = _Stage(self.count(stage, "start_training_step", at), seed, paths, weights, at)
        size = dataset.get("token_size_in_bytes")
        if size is not None:
            if isinstance(size, bool) or size not in (2, 4):
                raise self.document.error((*where, "token_size_in_bytes"), f"2 or 4 bytes a token, got {size!r:.40}")
            result.dtype = DTYPES[size]
        return result

    def paths(self, dataset: "dict[str, Any]", at: Place) -> "tuple[list[str], list[float] | None]":
        """(paths, weights) of a data set in any of the three forms, or with dataset_weights beside a list."""
        given = [key for key in PATHS if dataset.get(key) is not None]
        if len(given) != 1:
            raise self.document.error(at, f"one of dataset_folder and dataset_path was expected, got {given}")
        spec, place = dataset[given[0]], (*at, given[0])
        weights = dataset.get("dataset_weights")
        if isinstance(spec, str):
            paths, weights = [spec], [1.0]
        elif isinstance(spec, dict):
            if weights is not None:
                raise self.document.error(place, "weights stand here and in dataset_weights")
            paths, weights = list(spec), list(spec.values())
        else:
            paths = spec
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
            raise self.document.error(place, "a path, a list of paths, or {path: weight} was expected")
        paths = [os.path.normpath(path) for path in paths]
        if len(set(paths)) < len(paths):
            raise self.document.error(place, "one path stands there twice")
        if weights is not None and (not isinstance(weights, list) or len(weights) != len(paths)):
            raise self.document.error((*at, "dataset_weights"), f"a list of {len(paths)} weights was expected")
        return paths, weights

    # Sources ------------------------------------------------------------------------------------------

    def sources(self, stages: "list[_Stage]") -> "dict[str, IndexedDataPipe]":
        """{path: source} of all stages, in the order in which the run first meets them."""
        first = {path: stage for stage in reversed(stages) for path in stage.paths}
        paths = list(dict.fromkeys(path for stage in stages for path in stage.paths))
        found: dict[str, IndexedDataPipe] = {}
        for path, name in zip(paths, source_names(paths), strict=True):
            stage = first[path]
            dtype = stage.dtype if self.dtype is None else self.dtype
            where = os.path.join(self.folder, path)  # noqa: PTH118  # an URL stays one
            with self.document.placed(stage.at):
                reader = TokenReader(where, dtype, name or Path(path).stem, io=self.io, verify=self.verify)
                found[path] = reader.slice_sequences(self.sequence_length).permute(seed=stage.seed)
        return found

    def weights(self, stage: _Stage, sources: "dict[str, IndexedDataPipe]") -> "list[float]":
        """A weight for each source of the run: 0 for those that are not in this stage."""
        lengths = [float(len(sources[path])) for path in stage.paths]
        with self.document.placed(stage.at):
            shares = lengths if stage.weights is None else as_shares(stage.paths, stage.weights)
        by_path = dict(zip(stage.paths, shares, strict=True))
        return [by_path.get(path, 0.0) for path in sources]

    # Small things -------------------------------------------------------------------------------------

    def count(self, values: "dict[str, Any]", key: str, at: Place, minimum: int = 1) -> int:
        if key not in values:
            raise self.document.error(at, f"the key {key!r} is missing")
        with self.document.placed((*at, key)):
            return as_count(key, values[key], minimum)
