"""Nanotron's data stages as one graph (placeholder of the next commit)."""

import os
from collections.abc import Mapping
from typing import Any

from ..core import IndexedDataPipe
from ..errors import RecipeError
from ..topology import Topology

__all__ = ["is_nanotron", "load_nanotron"]


def is_nanotron(value: Any) -> bool:
    return isinstance(value, dict) and "data_stages" in value


def load_nanotron(
    config: "str | os.PathLike[str] | Mapping[str, Any]",
    topology: "Topology | None" = None,
    micro_batch_size: "int | None" = None,
    folder: "str | os.PathLike[str] | None" = None,
) -> IndexedDataPipe:
    """Nanotron's data stages as one graph: not read yet."""
    raise RecipeError("data_stages are not read yet")
