"""ToJax: batches as jax.Arrays on a mesh of 8 virtual CPU devices, which processes of their own have."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from processes import environment
from tokenpipe.adapters import ToJax
from tokenpipe.datapipes.errors import ConfigurationError


@pytest.fixture
def started(tmp_path):
    """started(devices, *arguments): a process of its own with so many virtual devices, over a folder with tokens."""
    pytest.importorskip("jax")
    (np.arange(3000) * 7 % 50_000).astype("<u2").tofile(tmp_path / "tokens.bin")
    processes = []

    def start(devices, *arguments):
        variables = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(Path(__file__).with_name("jax_devices.py")), str(tmp_path), *arguments]
        out = subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment() | variables, stdout=out, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def last_line(process):
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return said.splitlines()[-1]


def test_batches_are_arrays_on_a_mesh_and_what_cannot_be_is_refused_by_name(started):
    assert last_line(started(8)) == "all 8 devices"


def test_of_two_processes_each_gives_its_own_rows_to_the_same_arrays(started):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [started(4, port, rank) for rank in "01"]
    assert [last_line(process) for process in both] == ["4 of 8 devices"] * 2


def test_without_jax_the_error_says_what_would_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigurationError, match=r"ToJax needs jax: pip install 'tokenpipe\[jax\]'"):
        ToJax(None)
