"""An item on its way between two processes: one pickle, and its large buffers beside it.

Protocol 5 leaves the memory of NumPy arrays out of the pickle. Here torch's CPU tensors do the same. What overlaps in
memory is copied once and overlaps on the other side too: inputs and labels are views of one buffer.
"""

import copyreg
import ctypes
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Packed", "packed", "unpacked"]

LEAST = 256  # bytes: a smaller buffer is cheaper inside the pickle
ALIGNMENT = 64

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _reduced(tensor: torch.Tensor) -> Any:
    """What to pickle for a tensor: the stretch of memory that its elements lie in, and how they do."""
    if (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        return tensor.__reduce_ex__(5)
    shape, stride, count = tuple(tensor.shape), tensor.stride(), tensor.numel()
    if not count:
        return _tensor, (b"", _NAMES[tensor.dtype], shape, stride)
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if extent > 2 * count:  # a few elements of much memory
        tensor = tensor.contiguous()
        stride, extent = tensor.stride(), count
    # the bytes themselves: NumPy does not know all of torch's dtypes, and views cost more than all else here
    memory: Any = (ctypes.c_ubyte * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    memory.tensor = tensor  # as long as anybody reads them
    return _tensor, (pickle.PickleBuffer(memory), _NAMES[tensor.dtype], shape, stride)


def _address(view: memoryview) -> int:
    if isinstance(view.obj, ctypes.Array) and view.nbytes == ctypes.sizeof(view.obj):
        return ctypes.addressof(view.obj)
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def _tensor(buffer: Any, dtype: str, shape: "tuple[int, ...]", stride: "tuple[int, ...]") -> torch.Tensor:
    if not len(buffer):
        return torch.empty_strided(shape, stride, dtype=_DTYPES[dtype])
    if isinstance(buffer, bytes):  # it came inside the pickle, where it cannot be written to
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=_DTYPES[dtype]).as_strided(shape, stride)


_DISPATCH: "ChainMap[type, Callable[[Any], Any]]" = ChainMap({torch.Tensor: _reduced}, copyreg.dispatch_table)


class Packed(NamedTuple):
    """What travels: the pickle; where each of its buffers begins in the shared bytes, and how long it is; all of those
    bytes as stretches to be copied, [(place, bytes)]; how many they are.
    """

    pickled: bytes
    places: "list[tuple[int, int]]"
    parts: "list[tuple[int, memoryview]]"
    size: int


def packed(item: Any) -> Packed:
    """Takes an item apart. Buffers that overlap in memory overlap at their places too."""
    file, buffers = io.BytesIO(), []

    def found(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LEAST:
            return True
        buffers.append(view)
        return False

    pickler = pickle.Pickler(file, 5, buffer_callback=found)
    pickler.dispatch_table = _DISPATCH
    pickler.dump(item)
    if len(buffers) > 1:
        return Packed(file.getvalue(), *_merged(buffers))
    return Packed(file.getvalue(), [(0, v.nbytes) for v in buffers], [(0, v) for v in buffers], sum(map(len, buffers)))


def _merged(buffers: "list[memoryview]") -> "tuple[list[tuple[int, int]], list[tuple[int, memoryview]], int]":
    address = [_address(view) for view in buffers]
    places: list[tuple[int, int]] = [(0, 0)] * len(buffers)
    parts = []
    size = begin = end = 0  # of the shared bytes, and of the memory that was placed last
    for i in sorted(range(len(buffers)), key=address.__getitem__):
        view, low = buffers[i], address[i]
        high = low + len(view)
        if low >= end:  # apart from what came before
            size += -size % ALIGNMENT
            begin, end = low - size, low
        places[i] = (low - begin, len(view))
        if high > end:
            parts.append((end - begin, view[end - low :]))
            size, end = high - begin, high
    return places, parts, size


def unpacked(pickled: "bytes | memoryview", buffers: "Sequence[Any]") -> Any:
    """The item again; its arrays and tensors lie in the buffers."""
    return pickle.loads(pickled, buffers=buffers)
