"""Nanoset's three ways to name data, as a graph up to and including the blend."""

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ..core import IndexedDataPipe, as_count
from ..errors import ArgumentTypeError, ConfigurationError
from ..read import TokenReader

__all__ = ["read_tokens", "source_names"]


def read_tokens(
    spec: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float]",
    sequence_length: int,
    seed: int,
    dtype: object = None,
    order: "str | None" = None,
    num_samples: "int | None" = None,
    io: str = "mmap",
    verify: "str | None" = None,
) -> IndexedDataPipe:
    """Token files as a shuffled blend: readers, slices, permutes and the blend over them.

    Args:
        spec: a path; a list of paths (each a source, unweighted: every epoch takes all of each); or
            {path: weight}. A source is named by its file's stem, and its folders where stems are alike.
        sequence_length: tokens a row; a row also carries the label token after them.
        seed: of every source's permutation; with order="nanoset", of Nanoset's shuffle.
        dtype: for raw files.
        order: None, or "nanoset": Nanoset's own order, bit for bit, at its costs (see NanosetOrder).
        num_samples: samples of the run; with order="nanoset" required, else `.limit(samples=num_samples)`.
        io, verify: how the files are read, and how much of what a manifest says of them is compared; see TokenReader.

    Raises ConfigurationError, WeightsError, TokenFileError.
    """
    weights: Any = None
    if isinstance(spec, (str, os.PathLike)):
        paths: list[Any] = [spec]
    elif isinstance(spec, Mapping):
        paths, weights = list(spec), list(spec.values())
    elif isinstance(spec, Sequence):
        paths = list(spec)
    else:
        raise ArgumentTypeError(f"spec must be a path, a list of paths, or {{path: weight}}, got {spec!r}")
    if not paths:
        raise ConfigurationError("spec names no token file")
    if order not in (None, "nanoset"):
        raise ConfigurationError(f"order is {order!r}; None (the blend) or 'nanoset' would do")
    readers = [
        TokenReader(path, dtype, name, io=io, verify=verify)
        for path, name in zip(paths, source_names(paths), strict=True)
    ]
    slices = [reader.slice_sequences(sequence_length) for reader in readers]
    if order == "nanoset":
        if num_samples is None:
            raise ConfigurationError(
                "order='nanoset' needs num_samples: Nanoset's order is made for a number of samples "
                "(train steps × global batch size)"
            )
        return slices[0].order_nanoset(*slices[1:], num_samples=num_samples, weights=weights, seed=seed)
    first, *others = [node.permute(seed) for node in slices]
    graph: IndexedDataPipe = first.blend(*others, weights=weights)
    return graph if num_samples is None else graph.limit(samples=as_count("num_samples", num_samples))


def source_names(paths: "list[Any]") -> "list[str | None]":
    """A reader's default name (None: its stem) where that is one source's alone, else with as much of the
    folders as tells them apart: "wiki/tokens" and "code/tokens".
    """
    if not all(isinstance(path, (str, os.PathLike)) for path in paths):
        return [None] * len(paths)  # the readers say what is wrong with them
    plain = [PurePath(os.fspath(path)) for path in paths]
    ways = [(path.with_suffix("") if path.name else path).parts for path in plain]  # "/" has no name
    names: list[str | None] = []
    for way in ways:
        alike = {other for other in ways if other[-1:] == way[-1:]}
        depth = 1
        while depth < len(way) and sum(other[-depth:] == way[-depth:] for other in alike) > 1:
            depth += 1
        names.append("/".join(way[-depth:]) if len(alike) > 1 else None)
    return names
