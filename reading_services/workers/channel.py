"""The way between two processes: short messages over a socket, bulk in shared memory that no name leads to.

A channel is one end of an AF_UNIX SOCK_SEQPACKET pair: a message arrives whole or not at all, and the end of one
process is an end of file for the other. The sender puts what an item weighs into a slot, anonymous memory (memfd)
whose descriptor travels with the first message that uses it. The receiver maps it and gives out arrays over it
without a copy; once the last of them is gone the slot goes back, with the next message in the other direction.
So nothing lies in /dev/shm or on disk, and nothing is left behind, however the processes end.
"""

import array
import errno
import mmap
import os
import pickle
import socket
import tempfile
import time
import weakref
from typing import Any

from ...datapipes.filemap import SharedMap
from .packing import Packed

__all__ = ["Channel", "ChannelClosed", "Item", "shared_memory"]

MOST_LENT = 64  # slots of one sender that the receiver's arrays may hold; beyond that they are copied
_LONGEST = 32 << 10  # bytes of a message; what is longer lies in a slot
MOST_DESCRIPTORS = 32  # in one message
_DESCRIPTORS = socket.CMSG_SPACE((MOST_DESCRIPTORS + 1) * array.array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def shared_memory(size: int) -> int:
    """A descriptor of so many bytes that only those have who are given it."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("tokenpipe", os.MFD_CLOEXEC)
    else:  # not Linux: a file that has lost its name
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    try:
        os.ftruncate(memory, size)
    except BaseException:
        os.close(memory)
        raise
    return memory


class ChannelClosed(Exception):
    """The process at the other end is gone, or has closed its end."""


class Item:
    """An item that has arrived, still taken apart: `Channel.read` opens it."""

    __slots__ = ("pickled", "places", "size", "slot")

    def __init__(self, pickled: bytes, places: "list[tuple[int, int]]", slot: int, size: int) -> None:
        self.pickled, self.places, self.slot, self.size = pickled, places, slot, size


class Channel:
    """One end. Both ends send and receive, messages and items.

    Raises ChannelClosed where the other end is gone.

    Args:
        patient: whether a message waits until the other end has read earlier ones (some ten fit); else BlockingIOError.
    """

    def __init__(self, sock: socket.socket, patient: bool = True) -> None:
        self._socket = sock
        self._flags = 0 if patient else socket.MSG_DONTWAIT
        self._mine: dict[int, SharedMap] = {}  # slots that this end writes
        self._free: list[int] = []  # of those: not in use by the other end
        self._new: list[int] = []  # descriptors of slots that the other end has not seen
        self._next_slot = 0
        self._theirs: dict[int, SharedMap] = {}  # slots that this end reads
        # slots whose arrays live, and those given up but not told yet: when the last array over a slot is gone, in
        # whatever thread and moment, its reference is appended, by C code alone, as Python would swallow an interrupt
        # that came in a finaliser of ours
        self._lent: dict[int, weakref.KeyedRef[int, Any]] = {}
        self._done: list[int | weakref.KeyedRef[int, Any]] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """The other end finds an end of file. Arrays that were given out stay."""
        self._socket.close()

    # Messages -------------------------------------------------------------------------------------------

    def send(self, *message: Any) -> None:
        """A tuple of plain values. What was read is given back with it, and new slots are introduced."""
        done = []
        while self._done:
            slot = self._done.pop()
            if not isinstance(slot, int):
                slot = slot.key
                self._lent.pop(slot, None)
            done.append(slot)
        introduced, self._new = self._new, []
        try:
            self._send(pickle.dumps((done, *message), 5), introduced)
        finally:
            for descriptor in introduced:
                os.close(descriptor)

    def _send(self, data: bytes, descriptors: "list[int]") -> None:
        if len(data) > _LONGEST:  # the message itself lies in memory of its own
            memory = shared_memory(len(data))
            try:
                with mmap.mmap(memory, len(data)) as view:
                    view[:] = data
                self._send(pickle.dumps((None, len(data)), 5), [*descriptors, memory])
            finally:
                os.close(memory)
            return
        ancillary = []
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        while True:
            try:
                self._socket.sendmsg([data], ancillary, self._flags)
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosed from error
            except OSError as error:
                if error.errno == errno.EBADF:  # this end was closed, at the interpreter's exit
                    raise ChannelClosed from error
                if error.errno != errno.ETOOMANYREFS:
                    raise
                time.sleep(0.01)  # a user's descriptors on their way are limited; the others have to read first

    def receive(self, wait: bool = True) -> "tuple[Any, ...] | None":
        """The next message; None where there is none and `wait` is False. Descriptors are its last element."""
        try:
            flags = _CLOSE_ON_EXEC if wait else _CLOSE_ON_EXEC | socket.MSG_DONTWAIT
            data, ancillary, told, _ = self._socket.recvmsg(_LONGEST * 2, _DESCRIPTORS, flags)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:  # it left messages of ours unread; said once, and then comes what it had sent
            return self.receive(wait)
        if not data:
            raise ChannelClosed
        descriptors = array.array("i")
        for level, kind, found in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(found[: len(found) - len(found) % descriptors.itemsize])
        if told & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(
                errno.EMFILE, "this process has no file descriptors left for what a worker sends; ulimit -n allows more"
            )
        done, *message = pickle.loads(data)
        if done is None:
            memory = descriptors.pop()
            try:
                with mmap.mmap(memory, message[0]) as view:
                    done, *message = pickle.loads(view)
            finally:
                os.close(memory)
        self._free += done
        return *message, list(descriptors)

    # Items ----------------------------------------------------------------------------------------------

    def put(self, item: Packed) -> "tuple[Any, ...]":
        """Puts an item into a slot; gives what `arrived` wants of it, to be sent with the next message."""
        slot, size, is_new, dropped = -1, 0, False, None
        if len(item.pickled) > _LONGEST // 8:  # the pickle too lies in the slot, behind the rest
            place = item.size
            parts = [*item.parts, (place, memoryview(item.pickled))]
            item = Packed(b"", [*item.places, (place, len(item.pickled))], parts, place + len(item.pickled))
        if item.parts:
            slot, is_new, dropped = self._slot(item.size)
            view = self._mine[slot].bytes().data
            for place, part in item.parts:
                view[place : place + part.nbytes] = part
            size = len(view)
        return item.pickled, item.places, slot, size, is_new, dropped

    @property
    def full(self) -> bool:
        """Whether what was put should be sent before more is."""
        return len(self._new) >= MOST_DESCRIPTORS - 1

    def _slot(self, size: int) -> "tuple[int, bool, int | None]":
        """A free slot of this size: (slot, whether it is new, a slot that it takes the place of)."""
        for at in range(len(self._free) - 1, -1, -1):  # the one that came back last is still in the cache
            slot = self._free[at]
            if size <= self._mine[slot].size <= 16 * size + mmap.ALLOCATIONGRANULARITY:
                del self._free[at]
                return slot, False, None
        dropped = self._free.pop(0) if self._free else None  # too small for what comes now
        if dropped is not None:
            del self._mine[dropped]
        size += -size % mmap.ALLOCATIONGRANULARITY
        memory = shared_memory(size)
        try:
            view = SharedMap(memory, size)
        except BaseException:
            os.close(memory)
            raise
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._mine[slot] = view
        self._new.append(memory)
        return slot, True, dropped

    def arrived(self, about: "tuple[Any, ...]", descriptors: "list[int]") -> Item:
        """An item of a message, what `put` has given; takes its descriptor, if it has one, from the list's front."""
        pickled, places, slot, size, is_new, dropped = about
        if dropped is not None:
            self._theirs.pop(dropped, None)
        if is_new:
            memory = descriptors.pop(0)
            try:
                self._theirs[slot] = SharedMap(memory, size)
            finally:
                os.close(memory)
        return Item(pickled, places, slot, size)

    def read(self, item: Item) -> "tuple[bytes | memoryview, list[Any]]":
        """The item's pickle and buffers. They hold its slot until all that was made of them is gone. Once only."""
        slot, item.slot = item.slot, -1  # given back twice, as by a `drop` too, two items would lie in it
        if slot < 0:
            return item.pickled, []
        whole = self._theirs[slot].bytes()  # what is made of it refers to this very array
        if len(self._lent) >= MOST_LENT:
            self._lent = {slot: array for slot, array in self._lent.items() if array() is not None}
        if len(self._lent) < MOST_LENT:
            self._lent[slot] = weakref.KeyedRef(whole, self._done.append, slot)
            buffers: list[Any] = [whole[place : place + size] for place, size in item.places]
        else:
            copy = whole.copy()
            buffers = [copy[place : place + size] for place, size in item.places]
            self._done.append(slot)
        return item.pickled or memoryview(buffers.pop()), buffers

    def drop(self, item: Item) -> None:
        """Gives up an item that nobody wants, unless it was read."""
        slot, item.slot = item.slot, -1
        if slot >= 0:
            self._done.append(slot)
