"""What all tests share: token files to read, and hypothesis profiles."""

import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tokenpipe.datapipes.fetch import pages

settings.register_profile(
    "default",
    max_examples=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=2000)
settings.load_profile("soak" if os.environ.get("TOKENPIPE_SOAK") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: "list[pytest.Item]") -> None:
    """Of the cases of a function that is marked `sampled(n)`, n run, spread over the list; all with TOKENPIPE_SOAK."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not os.environ.get("TOKENPIPE_SOAK"):
            cases.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(item)
    left_out = set()
    for found in cases.values():
        most = found[0].get_closest_marker("sampled").args[0]
        chosen = {round(i * (len(found) - 1) / max(1, most - 1)) for i in range(most)}
        if most == 1:  # not the first one of each function: that would be the same start method everywhere
            chosen = {zlib.crc32(found[0].name.partition("[")[0].encode()) % len(found)}
        left_out |= {item for i, item in enumerate(found) if i not in chosen}
    if left_out and not any("[" in argument for argument in config.invocation_params.args):  # asked for by name: runs
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def index_cache(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Path]":
    """Where the tests and their processes keep document ends, plans of rows and shards: not where the user does."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("index-cache")
        patch.setenv("TOKENPIPE_CACHE", str(folder))
        patch.setenv("TOKENPIPE_SHARDS", str(folder / "shards"))
        yield folder


@pytest.fixture
def token_file(tmp_path: Path):
    """token_file(name, tokens): a raw uint16 file whose token k is (k * 7 + salt) % 50_000, and its path."""

    def write(name: str, tokens: int, salt: int = 0) -> str:
        path = tmp_path / name
        ids = (np.arange(tokens, dtype=np.int64) * 7 + salt) % 50_000
        ids.astype("<u2").tofile(path)
        return str(path)

    return write


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk from which something has been read at every look: read-ahead stays on."""
    for name, value in (("reading", True), ("rows_left", 0), ("_pause", 1)):  # whatever earlier tests left
        monkeypatch.setattr(pages.WATCH, name, value)
    counts = itertools.count()
    monkeypatch.setattr(pages, "_disk_counters", lambda: (next(counts), 0))
    monkeypatch.setattr(pages, "LOOK", 1)
