"""Raw tokens without a header (Nanoset's `*_input_ids.npy`, OLMo's `.npy`, any `.bin`).

Nothing in such a file says what it holds, and a wrong dtype gives no error: so `dtype=` is required,
and a sample of the first tokens is looked at for the marks of the two common mistakes.
"""

import numpy as np

from ..errors import ConfigurationError, TokenFileError, TokenFileWarning
from ..rank_zero import warn
from .layout import TokenLayout
from .places import read_part

SAMPLE = 4096  # tokens looked at


def recognises(path: str, head: bytes) -> bool:
    return True


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    if dtype is None:
        raise ConfigurationError(
            f"{path}: this file has no header, so dtype= must say what it holds "
            '(dtype="uint16" for vocabularies up to 65,536, else usually "uint32" or "int32")'
        )
    if size % dtype.itemsize:
        raise TokenFileError(
            f"{path}: {size} bytes are no whole number of {dtype.name} tokens ({dtype.itemsize} bytes each): "
            "the file was cut, or the dtype is another"
        )
    _look_at(path, dtype)
    return TokenLayout(path, dtype, 0, size // dtype.itemsize, size)


def _look_at(path: str, dtype: np.dtype) -> None:
    sample = read_part(path, 0, SAMPLE * dtype.itemsize)
    tokens = np.frombuffer(sample, dtype, len(sample) // dtype.itemsize)
    if tokens.size < 64:
        return
    odd = tokens[1::2]
    if dtype.itemsize < 8 and not odd.any() and tokens[::2].any():
        wider = {1: "uint16", 2: "uint32", 4: "int64"}[dtype.itemsize]
        warn(
            f"{path}: every second {dtype.name} token of the first {tokens.size} is 0, as if the file held {wider}",
            TokenFileWarning,
            stacklevel=6,
        )
    elif dtype.itemsize >= 4 and float(np.mean((tokens >= 1 << 24) | (tokens < 0))) > 0.5:
        warn(
            f"{path}: most of the first {tokens.size} {dtype.name} tokens are negative or above 16 million, "
            "as if the file held a narrower dtype",
            TokenFileWarning,
            stacklevel=6,
        )
