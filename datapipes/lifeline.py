"""Child processes that end with the process that started them, however that went.

The child holds the reading end of a pipe that nobody writes to. The kernel sends it SIGKILL once the other end is
closed, that is, at the latest when the parent is gone, whatever the child is doing, and even while it is stopped.
"""

import errno
import os
import select
import signal
from multiprocessing import reduction
from typing import Any

__all__ = ["PassedDescriptor", "end_with"]

_F_SETSIG = 10  # fcntl.h on Linux; Python's fcntl has no name for it before 3.13


class PassedDescriptor:
    """A descriptor that a child process is given."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> PassedDescriptor:
    return PassedDescriptor(duplicate.detach())


def end_with(life: int, shared: bool = False) -> None:
    """SIGKILL to this process when the pipe's other end is closed: by the kernel, whatever runs here.

    Args:
        shared: other processes have been passed the same end. Whom the kernel tells belongs to what was opened, not to
            the descriptor, so this process opens the pipe once more, for itself.
    """
    import fcntl

    try:
        own = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK) if shared else life
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError as error:  # not on this system: the side line's thread ends the process then
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.ENOENT):
            raise
    poll = select.poll()
    poll.register(life, 0)
    if poll.poll(0):  # closed before we could say so
        os.kill(os.getpid(), signal.SIGKILL)
