"""Thousands of seeded damages to token files of every kind, to what lies beside them and to their manifest: each is an
error of ours or does not matter, and never a crash, a wrong token or an unpickling.

The damages happen in a process of their own, which is this file as a script: a crash there is a finding here.
"""

import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenpipe.datapipes import (
    DatatroveWriter,
    LlmcWriter,
    MegatronWriter,
    TokenFileWriter,
    TokenReader,
    make_manifest,
    verify_token_file,
)
from tokenpipe.datapipes.errors import TokenFileError, TokenpipeError
from tokenpipe.datapipes.fetch import checks
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.formats import layout
from tokenpipe.datapipes.loss_masks import loss_layouts

WRITERS = {"own": TokenFileWriter, "datatrove": DatatroveWriter, "megatron": MegatronWriter, "llmc": LlmcWriter}
NAMES = {
    "own": "own.tok", "datatrove": "trove.ds", "megatron": "pair.bin", "llmc": "llmc.bin", "npy": "numpy.npy",
    "raw": "raw.bin",
}  # fmt: skip
OPERATIONS = ("cut", "append", "flip", "edit", "swap", "remove")
DOCUMENTS = 40


def make_shelf(folder: Path, seed: int) -> None:
    """A file of each kind, of more than one block of 64 KiB; of another seed with other ids, and of the same size."""
    chance = np.random.default_rng(seed)
    folder.mkdir()
    for kind, name in NAMES.items():
        documents = [chance.integers(0, 60_000, 900 + 13 * d, np.uint16) for d in range(DOCUMENTS)]
        path = folder / name
        if kind == "npy":
            np.save(path, np.concatenate(documents))
        elif kind == "raw":
            np.concatenate(documents).tofile(path)
        else:
            with WRITERS[kind](path, vocab_size=60_000, **({} if kind == "llmc" else {"dtype": "uint16"})) as writer:
                for ids in documents:
                    writer.write(ids)
        (np.concatenate(documents) % 3 > 0).tofile(f"{path}.loss")


class Shelf:
    """Files as they were, one of which is damaged at a time, and a manifest of them."""

    def __init__(self, folder: Path) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.folder, self.manifest = folder / "shelf", folder / "all.manifest"
        make_shelf(self.folder, 1)
        make_shelf(folder / "other", 2)
        self.data = [str(self.folder / name) for name in NAMES.values()]
        make_manifest(self.data, self.manifest, dtype="uint16", progress=False)
        files = [*sorted(self.folder.iterdir()), self.manifest]
        self.before = {path: path.read_bytes() for path in files}
        self.other = {path: (folder / "other" / path.name).read_bytes() for path in files[:-1]}
        self.plain = TokenReader(self.data, "uint16")  # built when all was well
        self.expected = list(self.contents(TokenReader(self.manifest, verify="read")))

    def contents(self, reader: TokenReader) -> "Iterator[bytes]":
        """All that is read of the files: tokens, document ends, masks."""
        for files in (None, loss_layouts):
            yield TokenGather([reader], files=files).rows(np.array([0]), len(reader)).tobytes()
        yield reader.document_ends().tobytes()

    def damaged(self, chance: np.random.Generator) -> "tuple[Path, str, bytes | None]":
        """(which file, what is done to it, its bytes then) of a damage; never the bytes that were there."""
        while True:
            path = list(self.before)[int(chance.integers(len(self.before)))]
            operation = OPERATIONS[int(chance.choice(6, p=[0.2, 0.15, 0.35, 0.18, 0.1, 0.02]))]
            found = bytearray(self.before[path])
            if operation == "cut":
                del found[int(chance.integers(len(found))) :]
            elif operation == "append":
                found += chance.bytes(int(chance.integers(1, 5000)))
            elif operation == "flip":
                found[int(chance.integers(len(found)))] ^= 1 << int(chance.integers(8))
            elif operation == "edit":  # a number of a header becomes another one
                at, size = int(chance.integers(min(256, len(found) - 8))), int(chance.choice([1, 2, 4, 8]))
                number = [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), int(chance.integers(2 ** (8 * size - 1)))]
                found[at : at + size] = number[int(chance.integers(5))].to_bytes(size, "little")
            elif operation == "swap":
                found[:] = self.other.get(path, found)
            if operation == "remove":
                return path, operation, None
            if found != self.before[path]:
                return path, operation, bytes(found)

    def put(self, path: Path, data: "bytes | None", in_place: bool) -> None:
        """In place, or as who replaces a file does; None: it is gone."""
        if data is None:
            path.unlink()
        elif in_place:
            with path.open("r+b") as file:
                file.truncate(0)
                file.write(data)
        else:
            new = path.with_name("new")
            new.write_bytes(data)
            new.replace(path)

    def read(self, chance: np.random.Generator) -> str:
        """Damages a file, reads all, puts it right again; what of it was wrong, "" where nothing was."""
        path, operation, data = self.damaged(chance)
        io = ("mmap", "pread")[int(chance.integers(2))]
        in_place = data is not None and bool(chance.integers(2))
        checks._FOUND.clear()  # as in a process that begins, and has not mapped the manifest
        layout._mapped_manifest.cache_clear()
        graph = self.plain.part(0)  # was built before
        graph.io = io
        self.put(path, data, in_place)
        resized = data is None or len(data) != len(self.before[path])
        try:
            wrong = self.with_manifest(path, io)
            if not wrong and path != self.manifest:
                wrong = self.without_manifest(graph, path, resized)
        finally:
            self.put(path, self.before[path], False)
        self.counts[operation] += 1
        return wrong and f"{operation} of {path.name}, {io}: {wrong}"

    def with_manifest(self, path: Path, io: str) -> str:
        try:
            found = list(self.contents(TokenReader(self.manifest, io=io, verify="read")))
        except TokenFileError:
            return ""
        if path.suffix != ".metadata":  # which nobody reads who has a manifest
            return "was not seen"
        return "" if found == self.expected else "gave other bytes"

    def without_manifest(self, graph: TokenReader, path: Path, resized: bool) -> str:
        """Sizes alone: of a graph that was built before, and of one that is built now."""
        try:
            # an index of which all was worked out before is not opened again
            if resized and (list(self.contents(graph)) != self.expected or str(path) in self.data):
                return "its size was not seen by the graph"
        except TokenpipeError:
            pass
        name = next(name for name in self.data if path.name.startswith(Path(name).stem))
        try:
            list(self.contents(TokenReader(name, "uint16")))
            verify_token_file(name, "uint16")
        except TokenpipeError:
            return ""
        # of raw files any size could be, and what lost its sidecars may be another kind
        lone = path.suffix == ".metadata" or name.endswith(NAMES["raw"]) or (not path.exists() and str(path) != name)
        return "its size was not seen when it was opened" if resized and not lone else ""


def damage(folder: Path, count: int, seed: int) -> "dict[str, Any]":
    """What went wrong, of so many damages."""
    shelf, wrong, unpickled = Shelf(folder), [], []
    for io in ("mmap", "pread"):  # from here on all kernels are loaded, which numba keeps as pickles of its own
        assert list(shelf.contents(TokenReader(shelf.manifest, io=io, verify="read"))) == shelf.expected
    sys.addaudithook(lambda event, args: unpickled.append(event) if event.startswith("pickle.") else None)
    for number in range(count):
        try:
            if said := shelf.read(np.random.default_rng([seed, number])):
                wrong.append(f"seed [{seed}, {number}]: {said}")
        except Exception as error:
            wrong.append(f"seed [{seed}, {number}]: {type(error).__name__}: {error}")
    assert list(shelf.contents(TokenReader(shelf.manifest, verify="read"))) == shelf.expected  # all is as it was
    return {"wrong": wrong[:20], "many": len(wrong), "unpickled": unpickled[:5], "counts": dict(shelf.counts)}


@pytest.mark.parametrize("seed", [41])
def test_every_damage_is_an_error_of_ours_and_none_a_crash(tmp_path, seed):
    count = 10_000 if os.environ.get("TOKENPIPE_SOAK") else 600
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", __file__, str(tmp_path), str(count), str(seed)]
    cache = tmp_path / "cache"
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TOKENPIPE_CACHE": str(cache)})
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    print(found["counts"])
    assert sum(found["counts"].values()) == count
    assert found["wrong"] == [], f"{found['many']} of {count}"
    assert found["unpickled"] == []


if __name__ == "__main__":
    print(json.dumps(damage(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
