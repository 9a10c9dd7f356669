"""The main process's side of a pool of workers: numbers are dealt, items arrive, the dead and the stuck are replaced.

There is no thread here: all of it happens while somebody asks for the next item, which waits in one poll() for all
workers. What a worker has of its own is where it stands in a `Turn`, so a new one can take its seat at any time: it is
sent the same graph, and what the old one had not finished is dealt again. Numbers that are only waiting when a worker
dies do not count against it; the one that it was making does, and with it those that were routed together, so they are
dealt again one by one.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import socket
import warnings
from multiprocessing.context import BaseContext
from time import monotonic
from typing import Any

from ...datapipes.errors import ConfigurationError, LoaderError, LoaderWarning
from ...datapipes.notes import deliver_notes
from .channel import ChannelClosed
from .dispatch import run_dispatcher
from .losses import Losses, Stall
from .process import Process
from .turns import Seat, Turn
from .worker import BEGIN, BEGINNING, BEGUN, DEAL, END, ERROR, ITEMS, run

__all__ = ["Pool"]

NOTHING = pickle.dumps(None)
PATIENCE = 1.0  # s that workers have to end by themselves
GRACE = 0.2  # s that a worker has to say something once somebody waits
START_TIMEOUT = 300.0  # s, for imports and `worker_init_fn`, also where items have less

_live = 0  # workers of this process, in all pools


def _most_workers() -> int:
    text = os.environ.get("TOKENPIPE_MAX_WORKERS", "")
    if not text:
        return max(32, 4 * (os.cpu_count() or 1))
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 20):
        raise ConfigurationError(f"TOKENPIPE_MAX_WORKERS is {text!r}; a number of processes would do, as 32")
    return int(text)


class Pool:
    """Worker processes that live until the pool is closed.

    Args:
        count: how many; fewer where the process's cap (TOKENPIPE_MAX_WORKERS) leaves no more, if `elastic`.
        stall_timeout: seconds that an item may take; None: any time.
        dispatched: whether one process more deals to them. Then all begin again where one ends.
    """

    def __init__(
        self,
        count: int,
        context: BaseContext,
        stall_timeout: "float | None",
        elastic: bool,
        dispatched: bool = False,
    ) -> None:
        global _live
        if multiprocessing.current_process().daemon:
            raise LoaderError(
                "this process is itself a daemonic child, which may start no workers; daemon=False where it is "
                "started, or num_workers=0, would do"
            )
        if elastic:
            count = min(count, max(1, _most_workers() - _live))
        self.elastic, self.dispatched = elastic, dispatched
        self._context, self._stall_timeout = context, stall_timeout
        self.seats = [Seat(number) for number in range(count)]
        self._dispatcher = Seat(-1) if dispatched else None
        self._all = [*self.seats, self._dispatcher] if self._dispatcher else self.seats
        self.replaced = 0
        self.shortest_timeout: float | None = None  # of the nodes that have one
        self._by_descriptor: dict[int, Seat] = {}
        self._poll = select.poll()
        self._turn: Turn | None = None
        self._number = 0  # of the turn
        self._losses = Losses()
        self._pid = os.getpid()
        self._open = True
        _live += len(self._all)
        # multiprocessing ends its daemons with SIGTERM, which ours ignore, and then waits for them: be there before
        self._at_exit = multiprocessing.util.Finalize(self, Pool._close_seats, (self._all,), exitpriority=100)

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def pids(self) -> "tuple[int, ...]":
        return tuple(seat.process.pid for seat in self._all if seat.process is not None)

    @property
    def forked(self) -> bool:
        """Whether the workers are forks of this process."""
        return self._context.get_start_method() == "fork"

    # Turns ------------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        """All workers begin another turn; what was dealt before is forgotten."""
        self._check_process()
        self._forget()
        self._turn = turn
        empty = [seat for seat in self._all if not self._seated(seat)]
        if empty:
            self._start(self._all if self._dispatcher else empty)
        for seat in self._all:
            self._send_work(seat)

    def finish(self, turn: Turn) -> None:
        """Nobody wants more of this turn."""
        if self._turn is turn and self._open and self._pid == os.getpid():
            busy = any(seat.tasks for seat in self.seats)
            self._forget()
            for seat in self._all if busy or self._dispatcher else []:
                self._send(seat, BEGIN, self._number, NOTHING)

    def _forget(self) -> None:
        self._turn = None
        self._number += 1
        self._losses.forget()
        for seat in self.seats:
            seat.tasks.clear()

    def deal(self, worker: int, tasks: "list[tuple[int, int]]") -> None:
        """Has a worker make the items of these stretches, from start to stop."""
        seat, turn = self.seats[worker], self._turn
        if not seat.tasks and seat.begun:
            seat.since = monotonic()
        seat.tasks += [[start, stop] for start, stop in tasks]
        suspects = self._losses.places
        suspect = [bool(suspects) and turn is not None and turn.place(worker, start) in suspects for start, _ in tasks]
        told = [(start, stop, noted) for (start, stop), noted in zip(tasks, suspect, strict=True)]
        self._send(seat, DEAL, self._number, told)

    def receive(self, wait: bool) -> None:
        """Takes what has come; with `wait`, once there is something, or something is wrong. May raise WorkerError."""
        self._check_process()
        began, patience = monotonic(), self._patience() if wait else 0
        events = self._poll.poll(patience)
        for descriptor, _ in events:
            seat = self._by_descriptor.get(descriptor)
            if seat is not None:
                self._read(seat)
        # much later than asked for: this process was stopped itself, and its workers with it
        if wait and not events and patience is not None and monotonic() - began < patience / 1000 + 1:
            self._replace_stuck()

    def _patience(self) -> "float | None":
        """Milliseconds until some worker has taken too long."""
        ends = [end for seat in self._all if (end := self._deadline(seat)) is not None]
        if self.shortest_timeout is not None:  # a node may begin while this process waits
            ends.append(monotonic() + self.shortest_timeout)
        # at least a moment: what has come while nobody looked is not late
        return max(GRACE, min(ends) - monotonic()) * 1000 + 1 if ends else None

    def _deadline(self, seat: Seat) -> "float | None":
        if seat is self._dispatcher or seat.process is None or (seat.begun and not seat.tasks):
            return None
        ends = [end] if (end := seat.process.deadline.end) else []
        if self._stall_timeout is not None:
            ends.append(max(seat.since, seat.looked_at) + self._stall_timeout)
        return min(ends, default=None)

    # Messages ---------------------------------------------------------------------------------------------

    def _read(self, seat: Seat) -> None:
        process = seat.process
        assert process is not None
        try:
            while (message := process.channel.receive(wait=False)) is not None:
                self._take(seat, process, message)
        except ChannelClosed:
            self._died(seat)
        else:
            if not process.alive():  # a child of its own holds the channel open
                self._died(seat)

    def _take(self, seat: Seat, process: Process, message: "tuple[Any, ...]") -> None:
        kind, number_of_turn = message[:2]
        seat.since = monotonic()
        turn = self._turn if number_of_turn == self._number else None
        if kind in (ITEMS, END, ERROR):
            deliver_notes(message[4] if kind != END else message[3])
        if kind == ITEMS:
            number, items, _, descriptors = message[2:]
            for seconds, snapshot, about, notes in items:
                item = process.channel.arrived(about, descriptors)
                if turn is not None:
                    turn.arrived(seat.number, number, (process.channel, item, notes), seconds, snapshot)
                else:
                    process.channel.drop(item)
                number += 1
            if turn is not None:
                task = seat.tasks[0]
                task[0] = number
                if task[0] == task[1]:
                    seat.tasks.popleft()
        elif turn is None:
            return
        elif kind == BEGINNING:
            pass
        elif kind == BEGUN:
            seat.begun, self._losses.failed_starts = True, 0
        elif kind == END:
            seat.tasks.clear()
            turn.ended(seat.number, message[2], message[4])
        else:
            assert kind == ERROR
            number, error = message[2:4]
            if number < 0:  # the graph cannot be begun: there is nothing to go on with
                raise error.error()
            _, stop = seat.tasks.popleft()
            turn.failed(seat.number, number, error)
            if number + 1 < stop:
                turn.lost(seat.number, [(number + 1, stop)])

    def _send(self, seat: Seat, *message: Any) -> None:
        if seat.process is not None:
            try:
                seat.process.channel.send(*message)
            except ChannelClosed:
                pass  # it has died, which the next poll tells
            except BlockingIOError:
                seat.process.kill()  # it does not read what it is sent

    def _send_work(self, seat: Seat) -> None:
        assert self._turn is not None
        seat.begun, seat.since = seat is self._dispatcher, monotonic()
        work = self._turn.dispatch() if seat is self._dispatcher else self._turn.work(seat.number)
        self._send(seat, BEGIN, self._number, pickle.dumps(work, 5))

    # Workers that die or stop -------------------------------------------------------------------------------

    def _start(self, seats: "list[Seat]") -> None:
        """Starts processes for these seats; where there is a dispatcher, for all."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in self.seats if self._dispatcher]
        try:
            for seat in seats:
                self._unseat(seat)
                ends = [] if not pairs else [pairs[seat.number][1]] if seat.number >= 0 else [end for end, _ in pairs]
                if seat is self._dispatcher:
                    seat.process = Process(self._context, run_dispatcher, name="tokenpipe dispatcher", ends=ends)
                else:
                    name = f"tokenpipe worker {seat.number}"
                    seat.process = Process(self._context, run, seat.number, name=name, ends=ends)
                seat.watched = seat.process.watch(self._poll)
                self._by_descriptor.update(dict.fromkeys(seat.watched, seat))
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()

    def _seated(self, seat: Seat) -> bool:
        """Whether a seat has a worker that is heard: a Ctrl-C may come between two lines of its start."""
        heard = bool(seat.watched) and all(descriptor in self._by_descriptor for descriptor in seat.watched)
        return seat.process is not None and heard

    def _unseat(self, seat: Seat) -> None:
        while seat.watched:
            descriptor = seat.watched.pop()
            self._by_descriptor.pop(descriptor, None)
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
        if seat.process is not None:
            seat.process.close()
            seat.process = None

    def _died(self, seat: Seat) -> None:
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher.process is not None and not dispatcher.process.alive():
            seat = dispatcher  # whose end is also that of those who wait for it
        assert seat.process is not None
        how, by_signal = seat.process.death()
        number = seat.process.computing if seat.begun else -1
        if not seat.begun and self._turn is not None and (error := self._losses.failed_start(how, by_signal)):
            self._unseat(seat)
            raise error
        error = None
        if number >= 0 and self._turn is not None:
            error = self._losses.died(self._place(seat, number), how, seat.process.node)
            if error is not None and seat is dispatcher:
                raise error
        self._replace(seat, number, error, how)

    def _place(self, seat: Seat, number: int) -> str:
        assert self._turn is not None
        if seat is self._dispatcher:
            return f"item {number} of the dispatching process"
        return self._turn.place(seat.number, number)

    def _replace_stuck(self) -> None:
        now = monotonic()
        for seat in self.seats:
            end = self._deadline(seat)
            if end is None or now < end:
                continue
            self._read(seat)  # what came just now counts; what comes while it is asked does not
            if seat.process is None or now < (self._deadline(seat) or now + 1):
                continue
            asked, state, deadline = seat.since, seat.process.state(), seat.process.deadline
            limit = deadline if deadline.end and now >= deadline.end else None
            if limit is None and not seat.begun and "stopped" not in state and now < asked + START_TIMEOUT:
                seat.looked_at = now  # imports, or a function of the user's, take what they take
                continue
            number = seat.process.computing if seat.begun else -1
            node, stack = seat.process.where()
            place = ""
            if number >= 0 and self._turn is not None:
                place = self._turn.place(seat.number, number)
            elif not seat.begun and "stopped" not in state:
                place = "the beginning"
            stall = Stall(seat.number, now - asked, node, state, stack, self._told_by_dispatcher)
            error = self._losses.stuck(place, stall, limit, self._stall_timeout)
            if error is not None and number < 0:
                raise error
            stuck = "was stuck" if limit is None else f"was stuck in {node or limit.node}"
            self._replace(seat, number, error, "was stopped by a signal" if "stopped" in state else stuck)

    def _told_by_dispatcher(self) -> str:
        if self._dispatcher is None or self._dispatcher.process is None:
            return ""
        node, stack = self._dispatcher.process.where()
        return f"\nThe dispatching process was in node {node or '?'}:\n{stack}"

    def _replace(self, seat: Seat, number: int, error: "Exception | None", why: str) -> None:
        """Another worker for the seat. What the old one had is dealt again, the item that it made one by one."""
        self.replaced += 1
        if self._turn is not None and error is None and self.replaced & (self.replaced - 1) == 0:  # 1, 2, 4, 8, …
            which = f"worker process {seat.number}" if seat.number >= 0 else "the dispatching process"
            what = f" while it made {self._place(seat, number)}" if number >= 0 else ""
            warnings.warn(  # on every rank: each has workers of its own
                f"{which} {why}{what}; another one has taken its place ({self.replaced} so far)",
                LoaderWarning,
                stacklevel=2,
            )
        together = self._all if self._dispatcher else [seat]
        lost = []
        for other in together:
            self._unseat(other)
            lost.append([(start, stop) for start, stop in other.tasks])
            other.tasks.clear()
        turn = self._turn
        if turn is None:
            return
        self._start(together)
        for other, tasks in zip(together, lost, strict=True):
            if other is seat and tasks and number >= 0:
                start, stop = tasks.pop(0)
                if error is not None:
                    turn.failed(seat.number, number, error)
                tasks = [(n, n + 1) for n in range(start, stop) if n != number or error is None] + tasks
            if other is not self._dispatcher:
                turn.lost(other.number, tasks)
            self._send_work(other)

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all workers; those that are busy at once."""
        if self._open:
            self._open = False
            self._forget()
            if self._pid == os.getpid():
                self._at_exit()

    @staticmethod
    def _close_seats(seats: "list[Seat]") -> None:
        global _live
        _live -= len(seats)
        processes = [seat.process for seat in seats if seat.process is not None]
        for process in processes:
            process.channel.close()
        end = monotonic() + PATIENCE
        for process in processes:
            process.end(max(0.0, end - monotonic()))
        for seat in seats:
            seat.process = None

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LoaderError(
                f"these workers belong to process {self._pid}, this is its child {os.getpid()}: make a loader here"
            )
