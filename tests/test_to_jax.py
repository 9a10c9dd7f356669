"""ToJax: batches as jax.Arrays on a mesh of 8 virtual CPU devices, which processes of their own have."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment
from tokenpipe.adapters import ToJax
from tokenpipe.datapipes.errors import ConfigurationError


def test_batches_are_arrays_on_a_mesh_and_what_cannot_be_is_refused_by_name(tmp_path):
    pytest.importorskip("jax")
    variables = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    script = Path(__file__).with_name("jax_devices.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all 8 devices"


def test_without_jax_the_error_says_what_would_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ConfigurationError, match=r"ToJax needs jax: pip install 'tokenpipe\[jax\]'"):
        ToJax(None)
