"""A graph on its way to a worker process, as bytes; or an error that says what of it cannot travel.

The bytes go over a private pipe from this process to its own child: nothing else is ever unpickled.
"""

import pickle
from typing import Any

from ...datapipes._torch import DataPipe
from ...datapipes.errors import ArgumentTypeError
from ...datapipes.pickled import culprits_in, pickled

__all__ = ["from_bytes", "to_bytes"]


def to_bytes(datapipe: DataPipe, *, forked: bool = False, **beside: Any) -> bytes:
    """A graph, and what goes with it (`worker_init_fn=…`), for a child process.

    Args:
        forked: the child is a fork of this process, and so has what a notebook or a session defined before.

    Raises ArgumentTypeError that names the node, the attribute and the value that cannot travel, and what would do.
    """
    try:
        return pickled((datapipe, beside), forked)
    except MemoryError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        for found in culprits_in(datapipe, beside, forked):
            where = f"node {found.node!r}" + (f", attribute {found.way[1:]}" if found.way else "")
            where = where if found.node else found.way
            why = f"{where} is {found.shown} ({found.error}); {found.advice}"
            break
        raise ArgumentTypeError(f"this graph cannot be sent to a worker process: {why}") from error


def from_bytes(data: bytes) -> "tuple[DataPipe, dict[str, Any]]":
    """In the worker: (the graph, what went with it). The bytes must be those that the parent process made.

    Raises ArgumentTypeError for a function or class of `__main__` that is not there.
    """
    try:
        return pickle.loads(data)
    except AttributeError as error:
        if "__main__" not in str(error) and "__mp_main__" not in str(error):
            raise
        raise ArgumentTypeError(
            f"a worker process did not find what the graph uses: {error}. Workers import the program's file without "
            'running what stands below `if __name__ == "__main__"`: define functions and classes above it or in a '
            'module, or use multiprocessing_context="fork"'
        ) from error
