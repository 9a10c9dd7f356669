"""Processes and threads as the system sees them: whose they are, whether they live; mains that are run to be ended."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from typing import Any

from tokenpipe.datapipes.items import ReadAhead

MARK = "TOKENPIPE_TESTS_MARK"
HERE = Path(__file__).resolve().parent
PATIENCE = 60.0
"""Seconds for what must happen, on a machine that has much else to do."""
METHODS = ["fork", "spawn", "forkserver"]
SOAK = bool(os.environ.get("TOKENPIPE_SOAK"))


def scaled(full: int, short: int) -> int:
    """A count: the full one when soaking."""
    return full if SOAK else short


def state_of(pid: int) -> str:
    """One letter: R running, S sleeping, T stopped, Z dead and not yet reaped; "" for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def pids() -> "list[int]":
    return [int(name.name) for name in Path("/proc").iterdir() if name.name.isdigit()]


def children(pid: "int | None" = None) -> "set[int]":
    """The living direct children of a process (of this one)."""
    pid = os.getpid() if pid is None else pid
    return {child for child in pids() if parent_of(child) == pid and alive(child)}


def descendants(pid: "int | None" = None) -> "set[int]":
    found: set[int] = set()
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def is_server(pid: int) -> bool:
    """multiprocessing's own helpers, which live as long as we do: children of ours, not the workers they start."""
    return pid in children() and any(name in command(pid) for name in ("resource_tracker", "forkserver"))


def marked(mark: str) -> "dict[int, str]":
    """The living processes that were started, however indirectly, with this mark: pid → command line."""
    found = {}
    for pid in pids():
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and alive(pid):
                found[pid] = command(pid)
    return found


def wait_for(condition: "Callable[[], Any]", seconds: float = PATIENCE, pause: float = 0.01) -> Any:
    """What `condition` gives once that is true; at the latest after so many seconds what it gives then."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return found


def gone(these: Any, seconds: float = PATIENCE) -> bool:
    """Whether all of these processes end within so many seconds."""
    return bool(wait_for(lambda: not any(alive(pid) for pid in these), seconds))


def held_files() -> "set[str]":
    """Paths below /dev/shm that a living process has open or mapped."""
    held = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            held |= {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        with contextlib.suppress(OSError):
            held |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return held


def in_shm() -> "set[str]":
    return {str(path) for path in Path("/dev/shm").iterdir()}


def left_in_shm(before: "set[str]") -> "set[str]":
    """What has come to /dev/shm since, and belongs to nobody any more."""
    new = in_shm() - before
    return new - held_files() if new else new


def switches(pid: int) -> int:
    """How often a process has gone to sleep of its own will, all its threads together."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def environment(mark: str = "") -> "dict[str, str]":
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: mark}


def prefetching_threads() -> int:
    """How many threads are inside a ReadAhead. One that has just let its reader go gets a second to return."""
    deadline = time.monotonic() + 1.0
    while True:
        stacks = [[frame.f_code for frame, _ in walk_stack(top)] for top in sys._current_frames().values()]
        count = sum(ReadAhead._run.__code__ in stack for stack in stacks)
        if count == 0 or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


class Main:
    """A function of mains.py as the main process of its own; ends with all that it started, at the latest here."""

    def __init__(self, function: str, *arguments: Any, cwd: Path, group: bool = True) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = cwd / f"{self.mark}.out", cwd / f"{self.mark}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "mains.py"), function, *map(str, arguments)],
                env=environment(self.mark),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=group,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> "list[str]":
        return self.out.read_text().splitlines()

    def told(self) -> str:
        """All that it wrote, for an assertion's message."""
        return f"stdout:\n{self.out.read_text()[-3000:]}\nstderr:\n{self.err.read_text()[-5000:]}"

    def line(self, start: str, seconds: float = PATIENCE) -> str:
        """The rest of the first line that starts so, once it has been written."""

        def found() -> str:
            lines = [line for line in self.out.read_text().split("\n")[:-1] if line.startswith(start)]
            return lines[0] if lines else ""

        line = wait_for(lambda: found() or self.process.poll() is not None, seconds, 0.005) and found()
        assert line, f"no line {start!r}: {self.told()}"
        return line[len(start) :].strip()

    def wait(self, seconds: float = PATIENCE) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"main has not ended in {seconds} s: {self.told()}") from None

    def others(self) -> "dict[int, str]":
        """The living processes that came of it, itself left out."""
        return {pid: line for pid, line in marked(self.mark).items() if pid != self.pid}

    def left(self, seconds: float = 2.0) -> "dict[int, str]":
        """What still lives of it so many seconds after it ended."""
        wait_for(lambda: not self.others(), seconds)
        return self.others()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_a_child(work: "Callable[[], Any]") -> int:
    """Runs `work()` in a process of its own, for which 0 is returned at its end; its process id."""
    child = os.fork()
    if child == 0:
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is shared by processes: a killed one would keep it
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


@contextlib.contextmanager
def main(function: str, *arguments: Any, cwd: Path) -> "Iterator[Main]":
    started = Main(function, *arguments, cwd=cwd)
    try:
        yield started
    finally:
        started.end()
