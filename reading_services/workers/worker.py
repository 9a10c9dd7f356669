"""What runs in a worker: it makes the items whose numbers it is sent, and sends them back.

Messages in: (BEGIN, turn, work: bytes)        a graph to make items of; what was dealt before is forgotten
                                               (None: of none)
             (DEAL, turn, [(start, stop, suspect), …])  the numbers of items to make, in order; whether a worker
                                               has died of the first of them
Messages out: (BEGINNING, turn)                it takes a while
              (BEGUN, turn)                    the graph is ready
              (ITEMS, turn, number, [(seconds, snapshot, item, its notes), …], notes)  from this number on
              (END, turn, number, notes, notes of no item)  a stream has no item of this number
              (ERROR, turn, number, RaisedError, notes)  the item cannot be made; −1: nor any other
A turn is one iteration of one graph; what belongs to an earlier one is dropped.
"""

import contextlib
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Protocol

from ...datapipes.names import node_names, where_of
from ...datapipes.notes import take_item_notes, take_notes
from ...datapipes.raised import RaisedError
from .channel import ChannelClosed
from .packing import packed
from .process import Lines

__all__ = ["BEGIN", "BEGINNING", "BEGUN", "DEAL", "END", "ERROR", "ITEMS", "Work", "run"]

TOGETHER = 1e-3  # seconds that an item may wait for others
MOST_TOGETHER = 16
STILL = 1.0  # seconds between two words of a worker that is about to begin
BEGIN, DEAL, BEGINNING, BEGUN, ITEMS, END, ERROR = range(7)


class Work(Protocol):
    """What a worker does in one turn."""

    def begin(self, lines: Lines, worker: int) -> Any:
        """Makes ready; gives the graph, for its names."""

    def items(self, start: int, stop: int) -> "Iterator[tuple[Any, Any]]":
        """The items of these numbers, each with a snapshot of where the graph stands, if one is due. Ends early
        where there are no more.
        """

    def place(self, number: int) -> str:
        """What an error says of an item: "sample 17"."""


def run(lines: Lines, worker: int) -> None:
    """Serves the main process until it is gone."""
    channel = lines.channel
    turn = -1
    work: Work | None = None
    tasks: deque[tuple[int, int, bool]] = deque()
    process = f"in worker process {worker}"
    while True:
        message = channel.receive(wait=not tasks)
        while message is not None:
            kind, turn = message[:2]
            if kind == DEAL:
                tasks += message[2]
            else:
                tasks.clear()
                work = None  # the old one's maps and files go before the new one's come
                work = _begun(lines, turn, message[2], worker, process)
            message = channel.receive(wait=False)
        if work is None:
            tasks.clear()
        elif tasks:
            start, stop, suspect = tasks.popleft()
            if suspect:
                with _noted(lines):
                    _make(lines, turn, work, start, stop, process)
                lines.in_node("")  # not before: while an exit unwinds it is still to be read
            else:
                _make(lines, turn, work, start, stop, process)
            lines.computing(-1)


class _Beginning:
    """Tells the main process now and then that the worker is about to begin."""

    def __init__(self, lines: Lines, turn: int) -> None:
        self._lines, self._turn, self._told = lines, turn, perf_counter()

    def __call__(self) -> None:
        if perf_counter() - self._told > STILL:
            self._lines.channel.send(BEGINNING, self._turn)
            self._told = perf_counter()


def _begun(lines: Lines, turn: int, work: bytes, worker: int, process: str) -> "Work | None":
    try:
        made: Work | None = pickle.loads(work)
        take_item_notes()  # of items that nobody wants any more
        lines.still_beginning, lines.turn = _Beginning(lines, turn), turn
        lines.names = {} if made is None else node_names(made.begin(lines, worker))
    except Exception as error:
        lines.channel.send(ERROR, turn, -1, RaisedError.of(error, process), [])
        return None
    lines.channel.send(BEGUN, turn)
    return made


def _make(lines: Lines, turn: int, work: Work, start: int, stop: int, process: str) -> None:
    """Makes items and sends them, quick ones together: a message wakes up the main process, which costs as much."""
    channel, number = lines.channel, start
    made: list[tuple[float, Any, tuple[Any, ...], list[Any]]] = []
    first = began = perf_counter()

    def send() -> None:
        if made:
            channel.send(ITEMS, turn, number - len(made), made, take_notes(last=number >= stop))
            made.clear()

    try:
        lines.computing(number)
        for item, snapshot in work.items(start, stop):
            parts = packed(item)
            item = None  # a generator may hold the next one's memory already
            about = channel.put(parts)
            now = perf_counter()
            made.append((now - began, snapshot, about, take_item_notes()))
            began, number = now, number + 1
            lines.computing(number if number < stop else -1)
            if now - first > TOGETHER or channel.full or len(made) >= MOST_TOGETHER:
                send()
                first = began = perf_counter()
        send()
        if number < stop:
            channel.send(END, turn, number, take_notes(last=True), take_item_notes())
    except ChannelClosed:
        raise
    except BaseException as error:  # also sys.exit() in a function of the user's
        send()
        node = where_of(error, lines.names)
        where = process + (f" (node {node}, {work.place(number)})" if node else f" ({work.place(number)})")
        notes = [*take_notes(last=True), *take_item_notes()]
        channel.send(ERROR, turn, number, RaisedError.of(error, where), notes)


@contextlib.contextmanager
def _noted(lines: Lines) -> "Iterator[None]":
    """Notes each node that is entered, for the case that this process does not live to tell."""
    inside, noted = [""], [""]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            node = lines.names.get(id(frame.f_locals.get("self")), "")
            inside.append(node or inside[-1])
            if inside[-1] != noted[0]:
                noted[0] = inside[-1]
                lines.in_node(inside[-1])
        elif event == "return" and len(inside) > 1:
            inside.pop()  # noted with the next call: an exception that ends the process leaves in the same way

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
