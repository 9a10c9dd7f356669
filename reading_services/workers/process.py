"""A worker's process: how it is started, how it is asked where it is, and how its end is told.

Three ways lead to it. The channel carries work and items. The side line is read by a thread of the worker, which
answers where the worker is just now even while it computes. The life line is a pipe that nobody writes to: the kernel
sends the worker SIGKILL once its other end is closed, that is, at the latest when the main process is gone, whatever
the worker is doing and even while it is stopped.
"""

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from ...datapipes.deadline import Deadline, tell_deadlines
from ...datapipes.errors import ArgumentTypeError, ConfigurationError
from ...datapipes.lifeline import PassedDescriptor, end_with
from ...datapipes.names import where_in_frames
from ...datapipes.notes import become_worker
from .channel import Channel, ChannelClosed, shared_memory

__all__ = ["Lines", "Process", "context_of"]

IGNORED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP") if hasattr(signal, name)
)
"""What a scheduler or a terminal sends to a whole group: the main process decides, workers end with their lines."""

_TELL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 7  # to a worker: write down where you are
_NUMBER = struct.Struct("=q")
_NAME = 256  # bytes of a node's name in the page
_DEADLINE = struct.Struct("=dd")  # when a node has to be done, and how long it had; its name follows


def context_of(context: "str | BaseContext | None") -> BaseContext:
    """The start method: "forkserver" if none is given, for a fork copies threads' locks, file systems and CUDA as they
    are. Raises ConfigurationError, ArgumentTypeError.
    """
    if context is None:
        context = "forkserver"
    if isinstance(context, str):
        methods = multiprocessing.get_all_start_methods()
        if context not in methods:
            raise ConfigurationError(f"multiprocessing_context is {context!r}; one of {', '.join(methods)} would do")
        context = multiprocessing.get_context(context)
    if not isinstance(context, BaseContext):
        raise ArgumentTypeError(f"multiprocessing_context must be a start method or a context, got {context!r}")
    return context


# Ends of lines that belong to the main process alone: a child of whatever kind that held one would keep alive what
# must end with the main process.
_OURS: "weakref.WeakSet[Process]" = weakref.WeakSet()


def _close_in_child() -> None:
    for process in list(_OURS):
        process.forget()


os.register_at_fork(after_in_child=_close_in_child)


class Process:
    """One worker, seen from the main process. Raises what starting a process raises.

    Args:
        run: called in the child with its `Lines` and the arguments; picklable.
        ends: of channels to other processes, which it has as `Lines.passed`.
    """

    def __init__(
        self,
        context: BaseContext,
        run: "Callable[..., None]",
        *arguments: Any,
        name: str,
        ends: "Sequence[socket.socket]" = (),
    ) -> None:
        main, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        side, child_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child_life, life = os.pipe()
        page, self._stack = shared_memory(mmap.PAGESIZE), shared_memory(0)
        self.channel, self._side, self._life = Channel(main, patient=False), side, life
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        self.computing = -1
        self._descriptor, self._questions = -1, 0
        _OURS.add(self)
        lines = (child.fileno(), child_side.fileno(), child_life, page, self._stack, *(end.fileno() for end in ends))
        passed = [PassedDescriptor(line) for line in lines]
        try:
            self._process = context.Process(  # type: ignore[attr-defined]
                target=_begin, args=(run, passed, dict(os.environ), *arguments), daemon=True, name=name
            )
            _start(context, self._process)
            with contextlib.suppress(AttributeError, OSError):  # not Linux, or the process is gone already
                self._descriptor = os.pidfd_open(self._process.pid)
        except BaseException:
            self.close()
            raise
        finally:
            child.close()
            child_side.close()
            os.close(child_life)
            os.close(page)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def computing(self) -> int:
        """The number of the item that it makes just now, as the worker itself has noted; −1: none."""
        return _NUMBER.unpack_from(self._page)[0]

    @computing.setter
    def computing(self, number: int) -> None:
        _NUMBER.pack_into(self._page, 0, number)

    @property
    def node(self) -> str:
        """The node that the worker was in last, where it was told to note that; else empty."""
        return self._page[_NUMBER.size : _NUMBER.size + _NAME].rstrip(b"\0").decode(errors="replace")

    @property
    def deadline(self) -> Deadline:
        """Until when the worker's current node has to be done, where its graph says that."""
        at = _NUMBER.size + _NAME
        end, seconds = _DEADLINE.unpack_from(self._page, at)
        at += _DEADLINE.size
        return Deadline(end, seconds, self._page[at : at + _NAME].rstrip(b"\0").decode(errors="replace"))

    def watch(self, poll: "select.poll") -> "list[int]":
        """Registers what tells of messages and of the end; gives the descriptors."""
        watched = [self.channel.fileno()] + ([self._descriptor] if self._descriptor >= 0 else [])
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        return watched

    def alive(self) -> bool:
        if self._descriptor >= 0:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return not poll.poll(0)
        return self._process.is_alive()

    def where(self, timeout: float = 1.0) -> "tuple[str, str]":
        """What a stuck worker is doing: (the node, the stack as text), each empty where nothing can be said.

        Where its Python cannot run, as code that holds the GIL does not return, the stack is written by a handler
        that needs none, and the node is the one that was noted last.
        """
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGCONT)  # one that was stopped can tell too
        try:
            self._side.settimeout(timeout)
            self._questions += 1  # the answer to an earlier one may come only now
            self._side.send(b"%d" % self._questions)
            asked = ""
            while asked != str(self._questions):
                answer = self._side.recv(1 << 16).decode(errors="replace")
                asked, _, answer = answer.partition("\n")
                node, _, stack = answer.partition("\n")
        except OSError:
            return self.node, self._dumped()
        return node, stack

    def _dumped(self) -> str:
        with contextlib.suppress(OSError):
            os.kill(self.pid, _TELL)
        for _ in range(20):
            time.sleep(0.01)
            if text := os.pread(self._stack, 1 << 15, 0):
                return text.decode(errors="replace")
        return ""

    def state(self) -> str:
        """What the kernel says of the process: "stopped", "waiting for a disk", …; empty where it says nothing."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return ""
        letter = text.rpartition(")")[2].split()[0]
        return {"T": "stopped by a signal", "D": "waiting for a disk or a file server", "R": "running",
                "S": "sleeping", "t": "held by a debugger"}.get(letter, "")  # fmt: skip

    def kill(self) -> None:
        """SIGKILL; the end is seen as any other."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def end(self, timeout: float) -> None:
        """Ends the process: by the end of its channel, after `timeout` seconds by SIGKILL."""
        self.channel.close()
        self._process.join(timeout)
        self.close()

    def close(self) -> None:
        """SIGKILL to what still runs; all lines are closed."""
        _OURS.discard(self)
        process = getattr(self, "_process", None)
        if process is not None and process.pid is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.join(5.0)
        self._close_lines()

    def _close_lines(self) -> None:
        self.channel.close()
        self._side.close()
        for descriptor in (self._life, self._descriptor, self._stack):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._life = self._descriptor = self._stack = -1

    def forget(self) -> None:
        """In a child of the main process: this worker is none of its business."""
        self._close_lines()

    def death(self) -> "tuple[str, bool]":
        """How the process has ended, in words; whether by a signal."""
        self._process.join(5.0)  # longer where memory is dumped
        code = self._process.exitcode
        if code is None or code == 255:  # 255 is also what is known where the fork server is gone
            return ("ended" if code is None else "exited with 255"), code is None
        if code >= 0:
            return f"exited with {code}", False
        try:
            return f"was killed by {signal.Signals(-code).name}", True
        except ValueError:
            return f"was killed by signal {-code}", True


def _start(context: BaseContext, process: Any) -> None:
    """Starts a process in which the signals that workers ignore cannot arrive before they do so."""
    method = context.get_start_method()
    if method == "forkserver":
        from multiprocessing import forkserver

        # before the first worker, so that each then has torch and us in memory that they share
        ours, server = "tokenpipe.reading_services.workers.preload", getattr(forkserver, "_forkserver", None)
        others = getattr(server, "_preload_modules", ["__main__"])  # Python has no name for what was asked for before
        context.set_forkserver_preload([*(name for name in others if name != ours), ours])
        for wait in (0.05, 0.1, 0.2, 0.4, 0.8, None):
            forkserver.ensure_running()  # with the signals as they are: it serves others too
            try:
                _start_unheard(process)
                return
            except ConnectionError:  # one that was killed may still be there for a moment
                if wait is None:
                    raise
                time.sleep(wait)
    if method == "spawn":
        resource_tracker.ensure_running()
    _start_unheard(process)


def _start_unheard(process: Any) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker --------------------------------------------------------------------------------------------


class Lines:
    """What a worker has of the main process."""

    def __init__(self, channel: Channel, side: socket.socket, page: mmap.mmap) -> None:
        self.channel, self._side, self._page = channel, side, page
        self.names: dict[int, str] = {}  # of the nodes, by id
        self.still_beginning: Callable[[], None] = lambda: None  # to be called while the first item takes long
        self.passed: list[Channel] = []  # to other processes
        self.turn = -1

    def computing(self, number: int) -> None:
        """Notes which item is made from now on; −1: none."""
        _NUMBER.pack_into(self._page, 0, number)

    def in_node(self, name: str) -> None:
        """Notes which node runs from now on."""
        self._page[_NUMBER.size : _NUMBER.size + _NAME] = name.encode()[:_NAME].ljust(_NAME, b"\0")

    def has_until(self, deadline: Deadline) -> None:
        """Notes until when the current node has to be done."""
        at = _NUMBER.size + _NAME
        name = deadline.node.encode()[:_NAME].ljust(_NAME, b"\0")
        self._page[at + _DEADLINE.size : at + _DEADLINE.size + _NAME] = name
        _DEADLINE.pack_into(self._page, at, deadline.end, deadline.seconds)

    def answer(self, thread: int) -> None:
        """Answers the side line for the thread that computes; ends the process with the main one."""
        while True:
            try:
                asked = self._side.recv(64)
            except OSError:
                asked = b""
            if not asked:
                os._exit(1)
            frame = sys._current_frames().get(thread)
            node, stack = ("", "") if frame is None else where_in_frames(frame, self.names)
            with contextlib.suppress(OSError):
                self._side.send(f"{asked.decode()}\n{node}\n{stack}".encode(errors="replace")[: 1 << 15])


def _nothing(*_: Any) -> None:
    """What a worker does at a signal; other than to ignore it, this is not passed on to the programs that it starts."""


def _begin(
    run: "Callable[..., None]", passed: "list[PassedDescriptor]", environment: "dict[str, str]", *arguments: Any
) -> None:
    """The first thing that a worker does."""
    if os.environ != environment:  # a fork server has that of the moment when it was started
        os.environ.clear()
        os.environ.update(environment)
    for number in IGNORED:
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    channel, side, life, page, stack, *ends = (each.number for each in passed)
    if hasattr(faulthandler, "register"):
        faulthandler.register(_TELL, file=stack, all_threads=False)
    end_with(life)
    torch.set_num_threads(1)
    _keep_memory()
    lines = Lines(Channel(socket.socket(fileno=channel)), socket.socket(fileno=side), mmap.mmap(page, mmap.PAGESIZE))
    lines.passed = [Channel(socket.socket(fileno=end)) for end in ends]
    os.close(page)
    tell_deadlines(lines.has_until)
    become_worker()
    threading.Thread(target=lines.answer, args=(threading.get_ident(),), daemon=True).start()
    with contextlib.suppress(ChannelClosed):
        run(lines, *arguments)


def _keep_memory() -> None:
    """Keeps freed memory: items are as large as one another, and to give each one's pages back to the kernel and take
    new ones, as glibc does with blocks of 128 KiB and more, costs more than to fill them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for parameter, size in ((-3, 32 << 20), (-1, 256 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(parameter, size)
