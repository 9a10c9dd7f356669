"""Tokenising processes and the dealing of tasks to them; finished pieces come back in order.

The workers are plain children that run worker.py. They import neither torch nor the caller's `__main__`, each
encodes on one thread (as many processes as cores, so the tokenizer's own threads would only get in the way), are
in a session of their own (an interrupt from the keyboard reaches the parent alone), and end when the pipe to
the parent does, that is, with the parent, however it ends.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import errors
from .opening import shown
from .pieces import Piece, Task

__all__ = ["Workers", "raise_said"]

AHEAD = 2  # tasks a worker has: one at work, one waiting, so that none waits for the parent

# The __init__ of these packages import torch, which costs a second and 200 MB a process and is not needed here:
# empty modules stand in their places.
_START = """
import json, sys, types
sys.path[:] = json.loads(sys.argv[1])
for name, folder in (("tokenpipe.datapipes", sys.argv[2]), ("tokenpipe.datapipes.tokenize", sys.argv[3])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from tokenpipe.datapipes.tokenize.worker import main
main()
"""


class Workers:
    """Processes that tokenise, until they are closed.

    Args:
        count: how many. job: what worker.py needs to know, JSON-able.
    """

    def __init__(self, count: int, job: "dict[str, Any]") -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._tasks: list[dict[int, Task]] = []  # of each process: those it has not finished
        self._rests: list[bytes] = []  # of each process: the beginning of a line
        self._selector = selectors.DefaultSelector()
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        here = Path(__file__).parent
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(here.parent), str(here)]
        try:
            for number in range(count):
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env={**os.environ, **one_thread},
                    start_new_session=True,
                )
                self._processes.append(process)
                self._tasks.append({})
                self._rests.append(b"")
                assert process.stdout is not None
                self._selector.register(process.stdout, selectors.EVENT_READ, number)
                self._send(number, job)
        except BaseException:
            self.close()
            raise

    def run(self, tasks: "Iterator[Task | Piece]", progress: "Callable[[int, int], None]") -> Iterator[Piece]:
        """The pieces in order.

        Args:
            tasks: what to do, or the piece that was done before; taken as late as the processes allow.
            progress: called with (bytes of input, tokens) as they are done.

        Raises what a worker raised, or WorkerError where one ended.
        """
        done: dict[int, Piece] = {}
        dealt, ahead, last = 0, 0, False
        while True:
            while not last and (free := self._free()) is not None:
                what = next(tasks, None)
                if what is None:
                    last = True
                    break
                number, dealt = dealt, dealt + 1
                if isinstance(what, Piece):
                    done[number] = what
                    break  # so that a thousand of them are not collected first
                self._tasks[free][number] = what
                self._send(free, {"number": number, **what._asdict()})
            while ahead in done:
                yield done.pop(ahead)
                ahead += 1
            busy = any(self._tasks)
            if last and not busy:
                return
            if busy:
                nothing_to_deal = last or self._free() is None
                for key, _ in self._selector.select(None if nothing_to_deal else 0):
                    self._receive(key.data, done, progress)

    def _free(self) -> "int | None":
        """A process that has room for a task, the one with the fewest."""
        best = min(range(len(self._tasks)), key=lambda number: len(self._tasks[number]))
        return best if len(self._tasks[best]) < AHEAD else None

    def _send(self, number: int, what: "dict[str, Any]") -> None:
        pipe = self._processes[number].stdin
        assert pipe is not None
        data = memoryview(json.dumps(what).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # its last words are still to be read
            while data:
                data = data[pipe.write(data) or 0 :]

    def _receive(self, number: int, done: "dict[int, Piece]", progress: "Callable[[int, int], None]") -> None:
        pipe = self._processes[number].stdout
        assert pipe is not None
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._ended(number)
        *lines, self._rests[number] = (self._rests[number] + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "batch" in answer:
                progress(*answer["batch"])
            elif "error" in answer:
                raise_said(answer)
            else:
                del self._tasks[number][answer["done"]]
                done[answer["done"]] = Piece(*answer["piece"])

    def _ended(self, number: int) -> None:
        status = self._processes[number].wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        at = next(iter(self._tasks[number].values()), None)
        first = at.spans[0] if at else None
        where = f" while it tokenised {shown(first.file.path)} from byte {first.start} on" if first else ""
        memory = " (memory ran out?)" if status == -signal.SIGKILL else ""
        raise errors.WorkerError(
            f"a worker process ended by {how}{memory}{where}; run the same again: finished pieces are kept"
        )

    def close(self) -> None:
        """Ends the processes."""
        self._selector.close()
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def raise_said(answer: "dict[str, Any]") -> None:
    """Raises what a worker said: our own errors as such, the system's as OSError, others as WorkerError."""
    kind = getattr(errors, answer["error"], None) if answer["error"] in errors.__all__ else None
    if answer.get("errno") is not None:
        raise (kind or OSError)(answer["errno"], answer["message"], answer["filename"])
    raise (kind or errors.WorkerError)(answer["message"])
