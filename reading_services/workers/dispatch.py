"""The process that runs the part of a stream that is not sharded, and deals its items to the workers in turn.

              ┌─ channel ─▶ worker 0: Dispatched ─▶ the rest of the graph ─▶ main
  dispatcher ─┤
              └─ channel ─▶ worker 1: Dispatched ─▶ the rest of the graph ─▶ main

A worker says how many items it wants, and no more are sent, so nobody's messages pile up. As long as one wants some,
the graph goes on; what falls to another in the meantime waits here, for the workers' own graphs may take unequally
many, and main takes from them in strict turn. Where one of these processes dies all of them begin again, and what was
there is left out.

Messages to the dispatcher: (BEGIN, turn, work) from main; (WANT, turn, count) from a worker, −1: none, ever.
Messages to a worker:       (ITEM, turn, item, notes), (END, turn, notes), (ERROR, turn, RaisedError, notes).
"""

import contextlib
import pickle
import select
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES

from ...datapipes._torch import DataPipe, IterDataPipe, apply_sharding
from ...datapipes.items import items_of
from ...datapipes.names import inputs_of, named_nodes, node_names, where_of
from ...datapipes.notes import forward_notes, take_item_notes, take_notes
from ...datapipes.raised import RaisedError
from ...datapipes.streaming import ShardingRoundRobinDispatcher
from ..seeds import SeedGenerator, set_process_random_seed
from .channel import Channel, ChannelClosed
from .packing import packed, unpacked
from .pickled import from_bytes, to_bytes
from .process import Lines

__all__ = ["DispatchWork", "Dispatched", "attach", "run_dispatcher", "split", "split_bytes"]

WANTED = 8  # items that may be on their way to one worker; with the end, what a socket takes while nobody reads
WANT, ITEM, END, ERROR = range(4)


# In the main process --------------------------------------------------------------------------------------


def split(graph: DataPipe) -> "DataPipe | None":
    """The node up to which a graph runs in the dispatching process; None where it has no dispatchers."""
    nodes = [node for node, _ in named_nodes(graph)]
    dispatchers = {id(node) for node in nodes if isinstance(node, ShardingRoundRobinDispatcher)}
    if not dispatchers:
        return None
    node = graph
    while True:
        leading = [below for below in inputs_of(node) if dispatchers <= {id(n) for n, _ in named_nodes(below)}]
        if len(leading) != 1 or id(node) in dispatchers:
            return node
        node = leading[0]


def split_bytes(graph: DataPipe, lowest: DataPipe, forked: bool, **beside: Any) -> bytes:
    """The workers' part of a graph: all above a node, in whose place there is a `Dispatched`."""

    def reduced(node: DataPipe) -> Any:
        if node is lowest:
            return Dispatched, ()
        raise NotImplementedError  # as ever

    IterDataPipe.set_reduce_ex_hook(reduced)
    try:
        return to_bytes(graph, forked=forked, **beside)
    finally:
        IterDataPipe.set_reduce_ex_hook(None)


# In a worker ----------------------------------------------------------------------------------------------


class Dispatched(IterDataPipe):
    """The items that the dispatching process sends to this worker."""

    channel: "Channel | None" = None  # of the class: a graph is pickled to be looked through
    turn = -1

    def __iter__(self) -> "Iterator[Any]":
        channel, turn = Dispatched.channel, Dispatched.turn
        assert channel is not None
        channel.send(WANT, turn, WANTED)
        taken = 0
        while True:
            message = channel.receive()
            assert message is not None
            kind, of_turn, *rest = message
            if kind == ITEM:
                about, notes, descriptors = rest
                forward_notes(notes)
                item = channel.arrived(about, descriptors)
                if of_turn != turn:
                    channel.drop(item)
                    continue
                taken += 1
                if taken % (WANTED // 2) == 0:
                    channel.send(WANT, turn, WANTED // 2)
                yield unpacked(*channel.read(item))
            elif of_turn != turn:
                continue
            elif kind == END:
                forward_notes(rest[0])
                return
            else:
                forward_notes(rest[1])
                raise rest[0].error()


def attach(lines: Lines, through: bool) -> None:
    """Gives a worker's graph what comes from the dispatching process, unless the worker is through."""
    if lines.passed:
        Dispatched.channel, Dispatched.turn = lines.passed[0], lines.turn
        if through:
            Dispatched.channel.send(WANT, lines.turn, -1)


# In the dispatching process ---------------------------------------------------------------------------------


class DispatchWork:
    """The part of the graph that runs here, in one epoch."""

    def __init__(self, data: bytes, seeds: "dict[str, Any]") -> None:
        self._data, self._seeds = data, seeds

    def begin(self, lines: Lines) -> DataPipe:
        graph, _ = from_bytes(self._data)
        apply_sharding(graph, 1, 0, SHARDING_PRIORITIES.MULTIPROCESSING)
        seeds = SeedGenerator.from_state(self._seeds).spawn(-1)
        set_process_random_seed(graph, seeds)
        lines.names = node_names(graph)
        return graph


class _NewTurn(Exception):
    """The main process has begun another turn."""


class _Dispatcher:
    """Deals the items of one turn after the other."""

    def __init__(self, lines: Lines, workers: "list[Channel]") -> None:
        self._main, self._lines, self._workers = lines.channel, lines, workers
        self._turn, self._work = -1, None
        self._wanted = [0] * len(workers)
        self._asked = [False] * len(workers)  # who has begun this turn, and waits for its end
        self._waiting: list[deque[Any]] = [deque() for _ in workers]
        self._early: list[tuple[int, int, int]] = []  # what workers have said of a turn that is not told here yet
        self._poll = select.poll()
        for channel in (self._main, *workers):
            self._poll.register(channel.fileno(), select.POLLIN)

    def serve(self) -> None:
        while True:
            try:
                work: DispatchWork | None = self._work
                self._work = None
                if work is None:
                    self._wait()
                else:
                    self._deal(work)
            except _NewTurn:
                pass

    def _deal(self, work: DispatchWork) -> None:
        try:
            self._graph = work.begin(self._lines)  # its ledgers live as long: what they have noted is sent at the end
            for number, item in enumerate(items_of(self._graph)):
                worker = number % len(self._workers)
                if self._wanted[worker] >= 0:
                    self._waiting[worker].append(item)
                    self._serve(worker)
                self._lines.computing(-1)
                while not any(w > 0 for w in self._wanted):
                    self._wait()
                self._lines.computing(number + 1)
        except (_NewTurn, ChannelClosed):
            raise
        except Exception as error:
            node = where_of(error, self._lines.names)
            where = "in dispatching process" + (f" (node {node})" if node else "")
            last: tuple[Any, ...] = (ERROR, self._turn, RaisedError.of(error, where))
        else:
            last = (END, self._turn)
        self._lines.computing(-1)
        while True:
            for worker, waiting in enumerate(self._waiting):
                if self._asked[worker] and not waiting:
                    self._asked[worker] = False
                    self._to(worker, *last, [*take_item_notes(), *take_notes(last=True)])
            self._wait()

    def _serve(self, worker: int) -> None:
        """Sends a worker what waits for it, as far as it wants it."""
        channel, waiting = self._workers[worker], self._waiting[worker]
        while waiting and self._wanted[worker] > 0:
            self._wanted[worker] -= 1
            item = channel.put(packed(waiting.popleft()))
            self._to(worker, ITEM, self._turn, item, [*take_item_notes(), *take_notes(last=False)])

    def _wait(self) -> None:
        """Until somebody has said something. Raises _NewTurn, ChannelClosed."""
        for descriptor, _ in self._poll.poll():
            if descriptor == self._main.fileno():
                message = self._main.receive()
                assert message is not None
                for worker, asked in enumerate(self._asked):
                    if asked:  # it may wait for an item that does not come any more
                        self._to(worker, END, self._turn, [])
                self._turn, self._work = message[1], pickle.loads(message[2])
                self._wanted = [0] * len(self._workers)
                self._asked = [False] * len(self._workers)
                self._waiting = [deque() for _ in self._workers]
                early, self._early = self._early, []
                for worker, turn, count in early:
                    if turn == self._turn:
                        self._want(worker, count)
                raise _NewTurn
            worker = next(w for w, c in enumerate(self._workers) if c.fileno() == descriptor)
            try:
                message = self._workers[worker].receive()
            except ChannelClosed:  # the main process will begin again with all of us
                self._poll.unregister(descriptor)
                continue
            assert message is not None
            _, turn, count, _ = message
            if turn == self._turn:
                self._want(worker, count)
            elif turn > self._turn:
                self._early.append((worker, turn, count))
            elif count == WANTED:  # it has only now begun a turn that is over
                self._to(worker, END, turn, [])

    def _want(self, worker: int, count: int) -> None:
        if count < 0:
            self._wanted[worker] = -1
        else:
            self._wanted[worker] += count
            self._asked[worker] = True
            self._serve(worker)

    def _to(self, worker: int, *message: Any) -> None:
        with contextlib.suppress(ChannelClosed):
            self._workers[worker].send(*message)


def run_dispatcher(lines: Lines) -> None:
    """Serves the main process and the workers until the main process is gone."""
    _Dispatcher(lines, lines.passed).serve()
