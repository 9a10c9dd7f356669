"""The kinds of token file, one module each; adding a kind is adding a module and a line below.

A format module has `recognises(head) -> bool`, given the file's first 256 bytes, and
`layout(path, head, size, dtype) -> TokenLayout`, which checks what it says against the file's size
before anything is mapped. Raw comes last: it has no mark, so its dtype must come from the caller.
"""

import os

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError
from . import ids, npy, own, raw
from .ids import DocumentIds
from .layout import DTYPES, TokenLayout, as_dtype, local_path

__all__ = ["DTYPES", "DocumentIds", "TokenLayout", "as_dtype", "read_layout"]

HEAD = 256


def read_layout(path: "str | os.PathLike[str]", dtype: object = None) -> TokenLayout:
    """What a token file holds and where. Reads its first 256 bytes and its size, nothing else.

    Raises TokenFileError for a file that is missing, empty, cut, or not what its header says;
    ConfigurationError for a dtype that is missing, unknown, or not the file's.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"a path must be a str or PathLike, got {path!r}")
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        raise TokenFileError(f"{text}: only local files can be read so far; copy it to a local disk first")
    try:
        with local_path(text).open("rb") as file:
            head, size = file.read(HEAD), os.fstat(file.fileno()).st_size
    except ValueError as error:  # a NUL in the path
        raise TokenFileError(f"{text!r} is no path of a token file: {error}") from error
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot open the token file: {error.strerror or error}", text) from error
    if size == 0:
        raise TokenFileError(f"{text}: the token file is empty; a source needs at least one token")
    asked = None if dtype is None else as_dtype(dtype)
    for kind in (npy, ids, own, raw):
        if kind.recognises(head):
            layout = kind.layout(text, head, size, asked)
            if asked is not None and asked != layout.dtype:
                raise ConfigurationError(
                    f"{text}: dtype={asked.name!r} was given, but its header says {layout.dtype.name!r}; "
                    "leave dtype out for files with a header"
                )
            return layout
    raise TokenFileError(f"{text}: no known kind of token file")  # unreachable: raw takes all
