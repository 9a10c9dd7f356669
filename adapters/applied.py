"""An adapter on a loader that runs, for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..datapipes._torch import DataPipe
from .base import Adapter

__all__ = ["applied"]


@contextlib.contextmanager
def applied(adapter: "Adapter | Callable[[DataPipe], DataPipe]", loader: Any) -> "Iterator[Any]":
    """Puts an adapter on a loader between two items, and takes it off again: the items are the same as without.

        with applied(Profile(), loader) as profile:
            train(100)
        print(profile.report())

    The iterator that is out stays valid; what was read ahead is made again. A stream goes on from its place: at once
    where its nodes have a state, else by going through its epoch again, which the adapter sees.

    Args:
        adapter: one that keeps the items (Profile, Timeout, Retry, Prefetch, Tap, …).
        loader: a DataLoader2.

    Raises GraphError for an adapter that does not keep the items, or on another graph gives others; LoaderError where
    the loader was shut down, or its stream has no place to go on from.
    """
    loader.put_on(adapter)
    try:
        yield adapter
    finally:
        loader.take_off(adapter)
