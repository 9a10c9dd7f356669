"""Which kernels run: numba's, compiled on first use and cached per user and node, or NumPy's.

`TOKENPIPE_KERNELS=numpy` chooses the NumPy path; it gives the same bits. Where numba is missing or
cannot compile, the NumPy path serves, and says so once.

The cache is in the user's cache folder, else in the temporary one, else nowhere. Its folder's name takes in the
kernels' source and the versions of Python and numba: numba writes a kernel's index before its code, so after an upgrade
a process could find the new index and still the old code. Of processes that start at once one compiles a kernel, and
the others wait for its lock and load it.
"""

import contextlib
import functools
import hashlib
import os
import platform
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import _kernels_numpy

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
        with _alone(folder / f"{name}.lock"):
            return numba.njit(signature, nogil=True, cache=True)(function)
    finally:
        config.CACHE_DIR = before


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock that dies with the process; goes on without it where there is none to be had in good time."""
    handle = None
    try:
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)  # flock without LOCK_NB would wait for a stopped process for ever
    except (ImportError, OSError):
        pass  # no such locks on this system: each process compiles for itself
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _cache_folder() -> "Path | None":
    """A folder of this user and node alone, or None: numba's cache holds pickles, so nobody else may
    write there, and a home on a network disk is shared by nodes with other processors.
    """
    user, bases = os.getuid() if hasattr(os, "getuid") else -1, []
    with contextlib.suppress(RuntimeError):  # no home
        bases = [Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "tokenpipe" / "kernels"]
    if user >= 0:
        # a name that others can guess, where they may write: nothing is used there that is not ours
        shared = Path(os.environ.get("TMPDIR") or "/tmp") / f"tokenpipe-{user}"
        bases += [shared] if _own_folder(shared, user) else []
    below = Path(platform.node() or "node", _version())
    return next((folder for base in bases if (folder := _own_folder(base / below, user))), None)


def _own_folder(path: Path, user: int) -> "Path | None":
    """The folder, made if need be, if it is this user's (−1: any) and nobody else may write there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(status.st_mode) and (user < 0 or status.st_uid == user)
    return path if mine and not status.st_mode & 0o022 and os.access(path, os.W_OK) else None


def _version() -> str:
    """What the compiled code depends on, as a name."""
    import numba

    source = Path(__file__).with_name("_kernels_numba.py").read_bytes()
    text = f"{platform.python_version()} {numba.__version__} ".encode() + source
    return hashlib.blake2b(text, digest_size=8).hexdigest()
