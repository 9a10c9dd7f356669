"""The kinds of token file, one module each; adding a kind is adding a module and its name in KINDS.

A format module has `recognises(path, head) -> bool`, given the file's first 256 bytes and its name (for kinds whose
mark is a file beside it), and `layout(path, head, size, dtype) -> TokenLayout`, which checks what it says against the
sizes of all files before anything is mapped. Where a kind can be written, it also has a DocumentWriter (writer.py).
Raw comes last: it has no mark, so its dtype must come from the caller.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError, TokenpipeError
from . import datatrove, ids, llmc, megatron, npy, own, raw
from .ids import DocumentIds
from .layout import DTYPES, TokenLayout, as_dtype
from .listing import list_token_files
from .places import Url, as_place, find, looking, opened, together

__all__ = ["DTYPES", "DocumentIds", "TokenLayout", "as_dtype", "list_token_files", "read_layout", "read_layouts"]

HEAD = 256
KINDS = (datatrove, megatron, npy, ids, own, llmc, raw)


def read_layout(path: "str | os.PathLike[str]", dtype: object = None) -> TokenLayout:
    """What a token file holds and where. Reads its first 256 bytes and its size, and of what
    stands beside it as much as its kind needs to check that.

    Raises TokenFileError for a file that is missing, empty, cut, or not what its header says;
    ConfigurationError for a dtype that is missing, unknown, or not the file's.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"a path must be a str or PathLike, got {path!r}")
    with looking():
        return _read_layout(megatron.data_path(as_place(path)), dtype)


def read_layouts(paths: "Sequence[str | os.PathLike[str]]", dtype: object = None) -> "tuple[TokenLayout, ...]":
    """What several token files hold, in order: remote ones are looked at several at once. Raises as read_layout."""
    return tuple(together(lambda path: read_layout(path, dtype), paths, [os.fspath(path) for path in paths]))


def _read_layout(text: str, dtype: object) -> TokenLayout:
    try:
        with opened(text) as (size, read):
            head = read(0, HEAD)
    except ValueError as error:  # a NUL in the path
        if isinstance(error, TokenpipeError):
            raise
        raise TokenFileError(f"{text!r} is no path of a token file: {error}") from error
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot open the token file: {error.strerror or error}", text) from error
    if size == 0:
        raise TokenFileError(f"{text}: the token file is empty; a source needs at least one token")
    asked = None if dtype is None else as_dtype(dtype)
    for kind in KINDS:
        if kind.recognises(text, head):
            layout = kind.layout(text, head, size, asked)
            if asked is not None and asked != layout.dtype:
                raise ConfigurationError(
                    f"{text}: dtype={asked.name!r} was given, but its header says {layout.dtype.name!r}; "
                    "leave dtype out for files that say what they hold"
                )
            if isinstance(text, Url):
                return replace(layout, remote=find(text), ends_remote=find(layout.ends_path or text))
            return layout
    raise TokenFileError(f"{text}: no known kind of token file")  # unreachable: raw takes all
