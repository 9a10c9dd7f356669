"""Which kernels run: numba's, compiled on first use and cached per user and node, or NumPy's.

`TOKENPIPE_KERNELS=numpy` chooses the NumPy path; it gives the same bits. Where numba is missing or
cannot compile, the NumPy path serves, and says so once.

The cache is in the user's cache folder, else in the temporary one, else nowhere. Its folder's name takes in the
kernels' source and the versions of Python and numba: numba writes a kernel's index before its code, so after an upgrade
a process could find the new index and still the old code. Of processes that start at once one compiles a kernel, and
the others wait for its lock and load it.
"""

import functools
import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _kernels_numpy
from .cache import alone, own_folder, users_cache

__all__ = ["compiled", "kernel", "load_kernels"]


def compiled() -> bool:
    """Whether the compiled kernels are asked for (they may still fail to compile)."""
    return os.environ.get("TOKENPIPE_KERNELS", "numba") != "numpy"


LONGEST_WAIT = 60.0
"""Seconds that a process waits for another one's kernel (some 1 s of work), before it compiles its own."""


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


def load_kernels() -> None:
    """Loads, or compiles, the kernels that nearly every graph reads with."""
    for name in ("permute", "blend_route", "gather"):
        kernel(name)


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
        with alone(folder / f"{name}.lock", LONGEST_WAIT):
            return numba.njit(signature, nogil=True, cache=True)(function)
    finally:
        config.CACHE_DIR = before


def _cache_folder() -> "Path | None":
    """A folder of this user and node alone, or None: numba's cache holds pickles, so nobody else may
    write there, and a home on a network disk is shared by nodes with other processors.
    """
    user = os.getuid() if hasattr(os, "getuid") else -1
    below = Path(platform.node() or "node", _version())
    bases = (base / "kernels" / below for base in users_cache(user))
    return next((folder for base in bases if (folder := own_folder(base, user))), None)


def _version() -> str:
    """What the compiled code depends on, as a name."""
    import numba

    source = Path(__file__).with_name("_kernels_numba.py").read_bytes()
    text = f"{platform.python_version()} {numba.__version__} ".encode() + source
    return hashlib.blake2b(text, digest_size=8).hexdigest()
