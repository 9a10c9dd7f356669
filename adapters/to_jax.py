"""A graph's tensors as jax.Arrays on a mesh.

An adapter and no node: a sharding names devices and cannot be pickled, which a graph must be, and JAX belongs in the
process of the training loop, where what is around the last node runs, also over worker processes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.core import Unpickled
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, GraphError, TokenIdError
from ..datapipes.wrapped import Wrapper
from .around import put_around
from .base import Adapter

if TYPE_CHECKING:
    import jax

__all__ = ["ToJax"]


class ToJaxWrapper(Wrapper):
    """Makes jax.Arrays of the items' tensors."""

    kind = "to_jax"
    in_main_process = True

    def __init__(self, sharding: Any) -> None:
        self._sharding = Unpickled()
        self._sharding.value = (sharding,)

    def _made(self, item: Any) -> Any:
        if self._sharding.value is None:
            raise GraphError(
                "ToJax runs in the process in which it was made, the one of the training loop; put on last, around the "
                "topmost node, it stays there"
            )
        return _as_arrays(item, self._sharding.value[0], "")

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        return map(self._made, begin())

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self._made(get(index))


class ToJax(Adapter):
    """Makes jax.Arrays of what the graph gives, on the devices of a mesh, in the process of the training loop.

    Each process gives its own rows (`jax.make_array_from_process_local_data`): with as many `dp` ranks as processes,
    `Topology(dp_rank=jax.process_index(), dp_size=jax.process_count())`, the global arrays are the step's rows. int64
    becomes int32 unless jax_enable_x64 is set; a copy is made where JAX or that asks for one.

    Args:
        sharding: a jax.sharding.Sharding for every tensor and NumPy array of an item, or a dict of them by the item's
            keys (or a tuple, for an item that is one). What it does not name, or names with None, stays as it is, and
            so does what is no array. `PartitionSpec("dp")` splits the rows of arrays of any rank.

    Raises ConfigurationError where jax is missing, and at the first item for a key that it does not have and an array
    that cannot be split so; TokenIdError, naming it, for an array whose values do not fit into 32 bits.
    """

    def __init__(self, sharding: "jax.sharding.Sharding | Mapping[str, Any] | tuple[Any, ...]") -> None:
        try:
            import jax
        except ImportError as error:
            raise ConfigurationError("ToJax needs jax: pip install 'tokenpipe[jax]'") from error
        _check(sharding, jax.sharding.Sharding)
        self.sharding = sharding

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return put_around(datapipe, [datapipe], lambda node: ToJaxWrapper(self.sharding))


def _check(sharding: Any, kind: type) -> None:
    if isinstance(sharding, (Mapping, tuple)):
        for inner in sharding.values() if isinstance(sharding, Mapping) else sharding:
            _check(inner, kind)
    elif sharding is not None and not isinstance(sharding, kind):
        raise ArgumentTypeError(f"ToJax takes a jax.sharding.Sharding, or a dict or tuple of them, got {sharding!r}")


def _as_arrays(item: Any, sharding: Any, name: str) -> Any:
    """The item with jax.Arrays in place of the arrays that `sharding` is for; `name`: where it stands in the item."""
    if sharding is None:
        return item
    if isinstance(sharding, Mapping):
        if not isinstance(item, Mapping):
            raise ConfigurationError(f"the sharding{_of(name)} is a dict, and what it is for is {type(item).__name__}")
        if missing := [key for key in sharding if key not in item]:
            raise ConfigurationError(f"the sharding has the key {missing[0]!r}, and an item only {', '.join(item)}")
        return {key: _as_arrays(value, sharding.get(key), _below(name, key)) for key, value in item.items()}
    if isinstance(sharding, tuple):
        if not isinstance(item, (tuple, list)) or len(item) != len(sharding):
            raise ConfigurationError(
                f"the sharding{_of(name)} is a tuple of {len(sharding)}, and what it is for "
                f"{type(item).__name__}{f' of {len(item)}' if isinstance(item, (tuple, list)) else ''}"
            )
        return tuple(_as_arrays(v, s, _below(name, i)) for i, (v, s) in enumerate(zip(item, sharding, strict=True)))
    if isinstance(item, Mapping):
        return {key: _as_arrays(value, sharding, _below(name, key)) for key, value in item.items()}
    if isinstance(item, (tuple, list)):
        made = [_as_arrays(value, sharding, _below(name, i)) for i, value in enumerate(item)]
        return type(item)(*made) if hasattr(item, "_fields") else type(item)(made)
    if isinstance(item, torch.Tensor):
        return _as_array(item.detach().numpy(force=True), sharding, name)
    return _as_array(item, sharding, name) if isinstance(item, np.ndarray) else item


def _as_array(values: "np.ndarray[Any, Any]", sharding: Any, name: str) -> "jax.Array":
    import jax

    kept = jax.dtypes.canonicalize_dtype(values.dtype)
    if kept != values.dtype and kept.kind in "iu":  # JAX itself does not look whether the values fit
        bounds = np.iinfo(kept)
        if values.size and not (bounds.min <= values.min() and values.max() <= bounds.max):
            raise TokenIdError(
                f"the array{_of(name)} has values of {values.min()} … {values.max()}, and JAX takes {values.dtype} as "
                f"{kept}; jax.config.update('jax_enable_x64', True) would do, or a dict of shardings "
                "without it"
            )
        values = values.astype(kept)
    try:
        return jax.make_array_from_process_local_data(sharding, values)
    except ValueError as error:
        raise ConfigurationError(f"the array{_of(name)} of shape {values.shape} cannot be split so: {error}") from error


def _below(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _of(name: str) -> str:
    return f" of {name!r}" if name else ""
