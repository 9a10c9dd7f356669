"""NumPy's own `.npy` (KempnerForge, JAXformer): a 1-D little-endian integer array, never pickled."""

import io

import numpy as np

from ..errors import TokenFileError
from .layout import DTYPES, TokenLayout

MAGIC = b"\x93NUMPY"


def recognises(path: str, head: bytes) -> bool:
    return head.startswith(MAGIC)


def layout(path: str, head: bytes, size: int, dtype: "np.dtype | None") -> TokenLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, stored = read[version](file, max_header_size=len(head))
    except Exception as error:  # a hostile header makes NumPy's parser raise almost anything
        # A 1-D integer array's header is 128 bytes: what does not fit in `head` is something else.
        raise TokenFileError(
            f"{path}: not a .npy file of tokens (a 1-D integer array, version 1 or 2): {error}"
        ) from error
    if len(shape) != 1 or stored.name not in DTYPES or stored != DTYPES[stored.name]:
        raise TokenFileError(
            f"{path}: a .npy file of tokens holds a 1-D little-endian array of {', '.join(DTYPES)}; this one "
            f"has shape {shape} and dtype {stored.str}"
        )
    offset, count = file.tell(), shape[0]
    if size != offset + count * stored.itemsize:
        raise TokenFileError(
            f"{path}: its header says {count} {stored.name} tokens ({offset + count * stored.itemsize} bytes), "
            f"but the file has {size} bytes"
        )
    if count == 0:
        raise TokenFileError(f"{path}: the token file is empty; a source needs at least one token")
    return TokenLayout(path, DTYPES[stored.name], offset, count, size, kind="npy")
