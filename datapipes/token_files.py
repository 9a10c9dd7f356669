"""From paths, as a caller gives them, to the layouts of token files: files, folders, patterns, manifests."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .core import as_count
from .errors import ArgumentTypeError, ConfigurationError
from .formats import TokenLayout, as_dtype, list_token_files, read_layouts
from .formats.places import list_many, looking
from .formats.table import LayoutTable, distinct
from .manifest import Manifest, is_manifest, read_alone

__all__ = ["as_paths", "closed_by", "listed_files"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def as_paths(paths: "Paths") -> "list[str | os.PathLike[str]]":
    """One path or several as a list. Raises ArgumentTypeError, ConfigurationError."""
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    given = several if isinstance(several, Sequence) else [paths]
    if wrong := [one for one in given if not isinstance(one, (str, os.PathLike))]:  # the others may have secrets
        raise ArgumentTypeError(f"paths must be a str or PathLike, or a list of them, got {wrong[0]!r}")
    if not several:
        raise ConfigurationError("paths names no token file; at least one path would do")
    return list(several)


def listed_files(paths: "Paths", dtype: object = None) -> "Sequence[TokenLayout]":
    """What all files of these paths hold, in order. Those in a manifest are not looked at, all others are opened.

    Raises TokenFileError, ArgumentTypeError; ConfigurationError for a dtype that is missing, or not that of a file.
    """
    several, found = as_paths(paths), list[Sequence[TokenLayout]]()
    with looking():
        list_many([os.fspath(path) for path in several if not isinstance(path, Manifest)])
        listed: Iterator[list[Any]] = (
            [path] if isinstance(path, Manifest) else list_token_files(path) for path in several
        )
        files: list[str | os.PathLike[str]] = list(itertools.chain.from_iterable(listed))
        for known, some in itertools.groupby(files, lambda file: isinstance(file, Manifest) or is_manifest(file)):
            if known:
                manifests = (file if isinstance(file, Manifest) else read_alone(file) for file in some)
                found += [_of_dtype(manifest, dtype) for manifest in manifests]
            else:
                found.append(read_layouts(list(some), dtype))
    return found[0] if len(found) == 1 else tuple(file for files in found for file in files)


def _of_dtype(manifest: Manifest, dtype: object) -> "LayoutTable":
    if dtype is not None and distinct(manifest.files, "dtype") != {(asked := as_dtype(dtype)).name}:
        for file in manifest.files:
            if file.dtype != asked:
                raise ConfigurationError(
                    f"{file.path}: dtype={asked.name!r} was given, but the manifest {manifest.path} says "
                    f"{file.dtype.name!r}; leave dtype out for files of a manifest"
                )
    return manifest.files


def closed_by(
    files: "Sequence[TokenLayout]", end_of_text: "int | None", vocab_size: "int | None" = None
) -> "Sequence[TokenLayout]":
    """The same files; those without document ends get them from the id `end_of_text`, None: as they are.

    Raises ConfigurationError for an id that cannot be, or is not what a header or a manifest says; ArgumentTypeError.
    """
    if end_of_text is None:
        return files
    end_of_text = as_count("end_of_text", end_of_text, 0)
    for file in files:
        if file.stored_end_of_text not in (None, end_of_text):
            raise ConfigurationError(
                f"{file.path}: its header says that id {file.stored_end_of_text} closes documents, and end_of_text is "
                f"{end_of_text}; leave it out for files with a header"
            )
        if file.end_of_text not in (None, end_of_text):
            raise ConfigurationError(
                f"{file.path}: its manifest says that id {file.end_of_text} closes documents, and end_of_text is "
                f"{end_of_text}; leave it out for files of a manifest"
            )
        most = min(int(np.iinfo(file.dtype).max), (vocab_size or 2**63) - 1)
        if end_of_text > most:
            raise ConfigurationError(
                f"{file.path}: end_of_text={end_of_text} is no id of its {file.dtype.name} tokens; they are 0 … {most}"
            )
    if 0 not in distinct(files, "stored_documents") or distinct(files, "end_of_text") == {end_of_text}:
        return files
    return tuple(
        file
        if file.stored_documents or file.end_of_text is not None
        else replace(file, end_of_text=end_of_text, known_documents=None)
        for file in files
    )
