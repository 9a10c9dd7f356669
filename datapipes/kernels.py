"""Which kernels run: numba's, compiled on first use and cached per user and node, or NumPy's.

`TOKENPIPE_KERNELS=numpy` chooses the NumPy path; it gives the same bits. Where numba is missing or
cannot compile, the NumPy path serves, and says so once.
"""

import functools
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _kernels_numpy

__all__ = ["compiled", "kernel"]


def compiled() -> bool:
    """Whether the compiled kernels are asked for (they may still fail to compile)."""
    return os.environ.get("TOKENPIPE_KERNELS", "numba") != "numpy"


@functools.cache
def kernel(name: str) -> tuple[Callable[..., Any], bool]:
    """The kernel `name`, and whether it is the compiled one. The choice is made once a process."""
    if compiled():
        try:
            return _compile(name), True
        except Exception as error:  # whatever numba or llvmlite raise: the NumPy path is exact
            warnings.warn(  # on every rank: another host may be one that cannot
                f"numba could not compile the kernel {name!r} ({type(error).__name__}: {error}); "
                "the NumPy path gives the same batches, more slowly",
                RuntimeWarning,
                stacklevel=2,
            )
    return getattr(_kernels_numpy, name), False


def _compile(name: str) -> Callable[..., Any]:
    import numba  # 0.2 s and 60 MB: only where a kernel is used

    from . import _kernels_numba

    folder = _cache_folder()
    function, signature = _kernels_numba.KERNELS[name], _kernels_numba.SIGNATURES[name]
    if folder is None:
        return numba.njit(signature, nogil=True)(function)
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = before or str(folder)
    try:
        return numba.njit(signature, nogil=True, cache=True)(function)
    finally:
        config.CACHE_DIR = before


def _cache_folder() -> "Path | None":
    """A folder of this user and node alone, or None: numba's cache holds pickles, so nobody else may
    write there, and a home on a network disk is shared by nodes with other processors.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = base / "tokenpipe" / "kernels" / (platform.node() or "node")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return folder if mine and not status.st_mode & 0o022 and os.access(folder, os.W_OK) else None
