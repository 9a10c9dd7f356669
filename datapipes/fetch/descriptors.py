"""Token files that are read through descriptors (`TokenReader(..., io="pread")`) and not mapped.

For file systems with a quota of maps, and for files that may be cut while they are open: that is a short read then, and
an error, where a map ends the process. Of all gathers of a process a bounded number of files is open (gather.py keeps
it), each with a descriptor that no child inherits through exec and that a fork's child gives back at once.
"""

import contextlib
import functools
import os

import numpy as np

from ..errors import TokenFileError
from ..filemap import open_checked
from ..formats import TokenLayout

try:
    import resource
except ImportError:  # not on this system
    resource = None  # type: ignore[assignment]

__all__ = ["CLOSED", "MAPPED", "OpenFile", "most_descriptors"]

MAPPED, CLOSED = -1, -2
"""What the gather's table of descriptors has for files that are mapped, and for those that are not open now."""


@functools.cache
def most_descriptors() -> int:
    """Token files that are open at a time in this process: 256, or a quarter of what the process may have."""
    if resource is None:
        return 256
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 256 if soft == resource.RLIM_INFINITY else max(1, min(256, soft // 4))


class OpenFile:
    """A token file that is open, from `handle` on, until close(). `file[a:b]` reads its tokens [a, b).

    Raises TokenFileError.
    """

    def __init__(self, file: TokenLayout) -> None:
        self.handle = -1
        self._file = file
        self.path, self.handle = file.opened(lambda path: (path, open_checked(path, file.size, since=file.known_since)))
        if hasattr(os, "posix_fadvise"):  # as maps are: windows are asked for as they are
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_RANDOM)

    def __getitem__(self, part: slice) -> np.ndarray:
        """The tokens [a, b), of the file's dtype."""
        dtype = self._file.dtype
        begin = self._file.offset + part.start * dtype.itemsize
        return self.bytes(begin, begin + (part.stop - part.start) * dtype.itemsize).view(dtype)

    def bytes(self, begin: int, stop: int) -> np.ndarray:
        """uint8: the bytes [begin, stop); what comes in parts, or after a signal, is read on."""
        file = self._file
        tokens = np.empty(stop - begin, np.uint8)
        into, at = tokens.data, begin
        while into.nbytes:
            try:
                count = os.preadv(self.handle, [into], at)
            except OSError as error:
                raise TokenFileError(
                    error.errno, f"cannot be read at byte {at}: {error.strerror}", file.path
                ) from error
            if not count:
                raise TokenFileError(
                    f"{file.path}: {at - begin} bytes from byte {begin} on, where {tokens.nbytes} were when "
                    f"{file.known_since}: it was cut while it was open"
                )
            into, at = into[count:], at + count
        return tokens

    def ask_for(self, begin: int, count: int) -> None:
        """Asks the kernel for `count` bytes from byte `begin` on, without waiting for them; a hint."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.handle, begin, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Closes the file; calling it again does nothing."""
        if self.handle >= 0:
            handle, self.handle = self.handle, -1
            os.close(handle)

    def __del__(self) -> None:
        self.close()
