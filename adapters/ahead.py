"""Items made ahead by a thread, pinned, and moved to a device."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data._utils.pin_memory import pin_memory

from ..datapipes._torch import DataPipe, MapDataPipe
from ..datapipes.combine import seeded_map
from ..datapipes.core import IndexedDataPipe, as_count
from ..datapipes.errors import ArgumentTypeError, GraphError
from ..datapipes.items import ReadAhead
from ..datapipes.names import node_names
from ..datapipes.wrapped import AheadWrapper, Wrapper
from .around import as_chosen, nodes_with_items, put_around
from .base import Adapter

__all__ = ["PinMemory", "Prefetch", "ToDevice"]


class PrefetchWrapper(AheadWrapper):
    """Lets a thread make the node's items."""

    kind = "prefetch"

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    @property
    def label(self) -> str:
        return f"prefetch {self.depth}"

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        before = self.places()
        pairs = ReadAhead(((item, self.places()) for item in begin()), self.depth)
        try:
            self.delivered = before
            for item, self.delivered in pairs:
                yield item
        finally:
            pairs.close()

    def exact(self) -> None:
        return None  # workers make ahead already


class Prefetch(Adapter):
    """Lets a thread make items ahead.

    Args:
        depth: how many, at most.
        nodes: whose; names, classes or nodes; left out, the last node's. Best above the batches: each item costs a
            change of threads, some 20 µs.

    Raises GraphError for a node whose items nobody pulls one by one, or that may not run in a thread.
    """

    keeps_items = True

    def __init__(self, depth: int = 2, nodes: Any = None) -> None:
        self.depth, self.nodes = as_count("depth", depth), as_chosen(nodes)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        chosen = _pulled_nodes(datapipe, self.nodes, "made ahead")
        names = node_names(datapipe)
        for node in chosen:
            if (seeded := seeded_map(node)) is not None:
                raise GraphError(
                    f"{names[id(seeded)]} seeds the process's random generators for each item, which a thread may "
                    "not do beside the training loop; map(fn, seeded=False) would do"
                )
        return put_around(datapipe, chosen, lambda node: PrefetchWrapper(self.depth))


def _pulled_nodes(datapipe: DataPipe, nodes: "tuple[Any, ...] | None", what: str) -> "list[DataPipe]":
    """The nodes that are meant, whose items are asked for one after the other. Raises GraphError."""
    chosen = nodes_with_items(datapipe, nodes, what)
    names = node_names(datapipe)
    for node in chosen:
        if isinstance(node, IndexedDataPipe):
            if isinstance(datapipe, IndexedDataPipe) and node.steps is None and datapipe.steps is not None:
                raise GraphError(
                    f"no item of {names[id(node)]} can be {what}: batch_samples asks it for several numbers at once, "
                    "in an order of its own; batch_samples, or a node above it, would do"
                )
        elif isinstance(node, MapDataPipe):
            raise GraphError(f"no item of {names[id(node)]} can be {what}: a map-style node is asked by index")
    return chosen


class PinMemoryWrapper(Wrapper):
    """Copies the items' tensors to page-locked memory, where there is CUDA."""

    kind = "pin_memory"
    in_main_process = True

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        wanted = torch.cuda.is_available()
        for item in begin():
            yield pin_memory(item) if wanted else item

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return pin_memory(get(index)) if torch.cuda.is_available() else get(index)


class PinMemory(Adapter):
    """Copies what the graph gives to page-locked memory, in the process of the training loop; without CUDA it changes
    nothing. With worker processes their service does the same by itself (its `pin_memory`).
    """

    keeps_items = True

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return put_around(datapipe, [datapipe], lambda node: PinMemoryWrapper())


class ToDeviceWrapper(AheadWrapper):
    """Moves the items' tensors, on a CUDA stream of its own where the device has such."""

    kind = "to_device"
    in_main_process = True

    def __init__(self, device: torch.device, ahead: int) -> None:
        super().__init__()
        self.device, self.ahead = device, ahead

    @property
    def label(self) -> str:
        return f"to {self.device}"

    @property
    def takes_ahead(self) -> bool:
        return self.device.type == "cuda" and self.ahead > 0

    def exact(self) -> "ToDeviceWrapper":
        return ToDeviceWrapper(self.device, 0)

    def _moved(self, item: Any) -> Any:
        def moved(value: Any) -> Any:
            return value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        if type(item) is dict:  # as batches are: tree_map takes longer than the copy
            return {key: moved(v) if isinstance(v, torch.Tensor) else self._moved(v) for key, v in item.items()}
        return tree_map(moved, item)

    def items(self, node: DataPipe, begin: "Callable[[], Iterator[Any]]") -> "Iterator[Any]":
        if self.device.type == "cuda":
            yield from self._on_stream(begin())
        else:
            for item in begin():
                yield self._moved(item)

    def _on_stream(self, items: "Iterator[Any]") -> "Iterator[Any]":
        """Begins to copy `ahead` items before they are asked for, so that copies run beside what computes."""
        stream = torch.cuda.Stream(self.device)
        copying: deque[tuple[Any, Any, Any, Any]] = deque()
        self.delivered = self.places()

        def taken() -> Any:
            _, item, done, self.delivered = copying.popleft()
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            # the allocator may give this memory to another copy only once what uses it here is done
            tree_map(lambda value: value.record_stream(current) if isinstance(value, torch.Tensor) else None, item)
            return item

        for item in items:
            with torch.cuda.stream(stream):
                there = self._moved(item)
                done = torch.cuda.Event()
                done.record(stream)
            copying.append((item, there, done, self.places()))  # what is copied from stays until it is delivered
            if len(copying) > self.ahead:
                yield taken()
        while copying:
            yield taken()

    def item(self, node: MapDataPipe, get: "Callable[[Any], Any]", index: Any) -> Any:
        return self._moved(get(index))


class ToDevice(Adapter):
    """Moves what the graph gives to a device, in the process of the training loop.

    On CUDA the copies run on a stream of their own, the next item's beside the work on the one before; from page-locked
    memory (PinMemory, put on before this) they keep the CPU free too. Tensors that are used on other streams than the
    current one want a `record_stream` there.

    Args:
        device: as torch.device takes it.
        ahead: items that are copied before they are asked for, on CUDA.
    """

    keeps_items = True

    def __init__(self, device: "str | int | torch.device", ahead: int = 1) -> None:
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentTypeError(f"ToDevice takes a device, got {device!r}: {error}") from error
        self.ahead = as_count("ahead", ahead, 0)

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        return put_around(datapipe, [datapipe], lambda node: ToDeviceWrapper(self.device, self.ahead))
