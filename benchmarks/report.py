"""What the benchmarks share: a description of the machine and a markdown table."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["machine", "run_child", "table"]


def machine(*packages: str) -> str:
    """One line: the date, the versions of Python and of these packages, the processor."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return f"{datetime.date.today()}; {', '.join(versions)}; {os.cpu_count()} × {_processor()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def run_child(script: str, job: Any, what: str, environment: "Mapping[str, str] | None" = None) -> Any:
    """What `script --child` prints as JSON, given a job as JSON, in a process of its own."""
    command = [sys.executable, str(Path(script).resolve()), "--child"]
    done = subprocess.run(command, input=json.dumps(job), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the process {what} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table, its columns aligned; all but the first to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = "|".join(["", *(f"{'-' * (w + 1)}{'-' if i == 0 else ':'}" for i, w in enumerate(widths)), ""])
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])
