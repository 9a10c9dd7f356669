"""What runs in a worker: it makes the items whose numbers it is sent, and sends them back.

Messages in: (BEGIN, turn, work: bytes)        a graph to make items of; what was dealt before is forgotten
                                               (None: of none)
             (DEAL, turn, start, stop)         the numbers of items to make, in order
Messages out: (BEGUN, turn)                    the graph is ready
              (ITEM, turn, number, seconds, snapshot, item)
              (END, turn, number)              a stream has no item of this number
              (ERROR, turn, number, RaisedError)  the item cannot be made; −1: nor any other
A turn is one iteration of one graph; what belongs to an earlier one is dropped.
"""

import pickle
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Protocol

from ...datapipes.names import node_names
from .packing import packed
from .process import Lines
from .raised import RaisedError, where_of

__all__ = ["BEGIN", "BEGUN", "DEAL", "END", "ERROR", "ITEM", "Work", "run"]

BEGIN, DEAL, BEGUN, ITEM, END, ERROR = range(6)


class Work(Protocol):
    """What a worker does in one turn."""

    def begin(self, worker: int) -> Any:
        """Makes ready; gives the graph, for its names."""

    def items(self, start: int, stop: int) -> "Iterator[tuple[Any, bytes | None]]":
        """The items of these numbers, each with a snapshot of where the graph stands, if one is due. Ends early
        where there are no more.
        """

    def place(self, number: int) -> str:
        """What an error says of an item: "sample 17"."""


def run(lines: Lines, worker: int) -> None:
    """Serves the main process until it is gone."""
    channel = lines.channel
    turn, work = -1, None
    tasks: deque[tuple[int, int]] = deque()
    process = f"worker process {worker}"
    while True:
        message = channel.receive(wait=not tasks)
        while message is not None:
            kind, turn = message[:2]
            if kind == DEAL:
                tasks.append(message[2:4])
            else:
                tasks.clear()
                work = None  # the old one's maps and files go before the new one's come
                work = _begun(lines, turn, message[2], worker, process)
            message = channel.receive(wait=False)
        if work is None:
            tasks.clear()
        if tasks:
            _make(lines, turn, work, *tasks.popleft(), process)
            lines.computing(-1)


def _begun(lines: Lines, turn: int, work: bytes, worker: int, process: str) -> "Work | None":
    try:
        made: Work | None = pickle.loads(work)
        lines.names = {} if made is None else node_names(made.begin(worker))
    except Exception as error:
        lines.channel.send(ERROR, turn, -1, RaisedError.of(error, process))
        return None
    lines.channel.send(BEGUN, turn)
    return made


def _make(lines: Lines, turn: int, work: Work, start: int, stop: int, process: str) -> None:
    number = start
    try:
        lines.computing(number)
        began = perf_counter()
        for item, snapshot in work.items(start, stop):
            parts = packed(item)
            item = None  # a generator may hold the next one's memory already
            now = perf_counter()
            lines.channel.send_item(parts, ITEM, turn, number, now - began, snapshot)
            began, number = now, number + 1
            lines.computing(number if number < stop else -1)
        if number < stop:
            lines.channel.send(END, turn, number)
    except EOFError:
        raise
    except Exception as error:
        node = where_of(error, lines.names)
        where = process + (f" (node {node}, {work.place(number)})" if node else f" ({work.place(number)})")
        lines.channel.send(ERROR, turn, number, RaisedError.of(error, where))
