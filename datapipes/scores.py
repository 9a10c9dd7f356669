"""Scores beside a token file: `prose.tok.quality.npy` holds a number for each document of `prose.tok`.

A 1-D .npy array of integers or floats, never pickled, mapped and checked against the file's documents. The score
"length" needs no file: it is a document's number of tokens.
"""

import errno
import glob
import math
import re
from typing import Any

import numpy as np

from .errors import ConfigurationError, RemoteFileError, TokenFileError
from .formats import TokenLayout
from .formats.places import as_place, beside, list_folder, local_path

__all__ = ["check_score", "is_number", "list_scores", "read_scores", "score_path", "within"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def is_number(value: Any) -> bool:
    """Whether it is a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_score(score: Any, at_least: Any, below: Any) -> None:
    """Raises ConfigurationError unless these are a score's name and bounds that documents can be chosen by."""
    if not isinstance(score, str) or not _NAME.fullmatch(score):
        raise ConfigurationError(f"a score's name has up to 64 letters, digits, '_' and '-', got {score!r}")
    bounds = [bound for bound in (at_least, below) if bound is not None]
    if not bounds or not all(is_number(bound) for bound in bounds) or (len(bounds) == 2 and not at_least < below):
        raise ConfigurationError(
            f"score {score!r} takes at_least= or below= or both, finite and in this order; got at_least={at_least!r}, "
            f"below={below!r}"
        )


def score_path(file: TokenLayout, score: str) -> str:
    """Where a token file's scores of this name are: a path or a URL."""
    return beside(file.path, f".{score}.npy")


def list_scores(file: TokenLayout) -> list[str]:
    """The names of the scores beside a token file, sorted."""
    own = file.path if file.remote is not None else str(file.local)
    if file.remote is not None:
        url, paths = file.remote.url, []
        folder = (url.partition("?")[0] if url.startswith(("http://", "https://")) else url).rpartition("/")[0]
        try:
            paths = [str(as_place(one.url)) for one in list_folder(folder)]
        except RemoteFileError as error:  # a server that lists nothing, or not to us: nobody can know of any
            if error.errno not in (errno.ENOENT, errno.EACCES):
                raise
    else:
        paths = glob.glob(f"{glob.escape(own)}.*.npy")  # noqa: PTH207 - Path.glob takes no whole path
    fitting = [path for path in paths if path.startswith(f"{own}.") and path.endswith(".npy")]
    names = sorted(path.removeprefix(f"{own}.").removesuffix(".npy") for path in fitting)
    return [name for name in names if _NAME.fullmatch(name)]


def read_scores(file: TokenLayout, score: str) -> np.ndarray:
    """(documents,) numbers, mapped. Raises TokenFileError."""
    path = score_path(file, score)
    try:
        found = np.load(local_path(path), mmap_mode="r", allow_pickle=False)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the scores: {error.strerror or error}", path) from error
    except Exception as error:  # a hostile header makes NumPy's parser raise almost anything
        raise TokenFileError(f"{path}: no .npy file of scores: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iuf" or found.shape != (file.documents,):
        raise TokenFileError(
            f"{path}: holds {getattr(found, 'dtype', type(found).__name__)} {getattr(found, 'shape', '')}; one number "
            f"for each of the {file.documents} documents of {file.path} would do"
        )
    return found


def within(values: np.ndarray, at_least: "float | None", below: "float | None") -> np.ndarray:
    """bool (n,): at_least <= value < below, as real numbers: nothing is rounded on the way."""
    mask = np.ones(values.size, np.bool_)
    if values.dtype.kind == "f":
        if values.dtype.itemsize < 8:
            values = values.astype(np.float64)
        if at_least is not None:
            mask &= values >= float(at_least)
        return mask if below is None else mask & (values < float(below))
    limits = np.iinfo(values.dtype)
    if at_least is not None and (low := math.ceil(at_least)) > limits.min:
        mask &= values >= values.dtype.type(low) if low <= limits.max else False
    if below is not None and (high := math.ceil(below)) <= limits.max:
        mask &= values < values.dtype.type(high) if high > limits.min else False
    return mask
