"""Manifests that somebody gave, and what grows, moves and is remote: what they may open, and that nothing is lost."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_manifest import corpus, forged, made, other  # noqa: F401 - fixtures

from fault_server import FaultServer
from tokenpipe.cli.main import main
from tokenpipe.datapipes import TokenFileWriter, TokenReader, load_recipe, make_manifest, overlap, read_manifest
from tokenpipe.datapipes.core import nodes_of
from tokenpipe.datapipes.errors import ConfigurationError, TokenFileError
from tokenpipe.datapipes.fetch.gather import TokenGather
from tokenpipe.datapipes.fetch.held_files import all_held
from tokenpipe.datapipes.loss_masks import has_loss_masks
from tokenpipe.datapipes.plan import overlaps
from tokenpipe.reading_services import DataLoader2


@pytest.fixture
def server():
    with FaultServer() as started:
        yield started


def own(path: Path, seed: int, mask: bool = False) -> Path:
    rng = np.random.default_rng(seed)
    with TokenFileWriter(path, vocab_size=300, end_of_text=0) as writer:
        for length in (100, 50, 300):
            tokens = rng.integers(1, 300, length)
            writer.write(tokens, *([tokens % 2 > 0] if mask else []))
    return path


# What a manifest may open -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("paths", "file:///etc/passwd", "neither a path nor a URL"),
        ("paths", "LOCAL:///etc/passwd", "neither a path nor a URL"),
        ("ends_path", "file:///etc/passwd", "neither a path nor a URL"),
        ("paths", "simplecache::http://127.0.0.1/x", "chained URLs are not read"),
        ("paths", "http://127.0.0.1/../x", "'..'"),
        ("paths", "\ud800.bin", "surrogates"),
        ("documents", 2**57, "documents"),
        ("documents", None, "documents"),
        ("stored_documents", 2**58 - 1, "documents"),
        ("stored_documents", 2**60 - 1, "beyond"),
        ("sequences", 2**60 - 3, "beyond"),
        ("sequences", 2**58 - 1, "sequences"),
        ("end_of_text", 70_000, "end_of_text"),
        ("end_of_text", 2**62, "end_of_text"),
    ],
)
def test_a_manifest_names_nothing_that_making_one_does_not_write(corpus, made, column, value, reason):  # noqa: F811
    at = 1 if column == "documents" else 0  # which stores its document ends
    with pytest.raises(TokenFileError, match=rf"all\.manifest: .*{reason}"):
        read_manifest(forged(Path(made.path), other(column, value, at)))


def test_a_manifest_at_a_url_names_no_file_of_this_machine(server, tmp_path):
    folder, secret = tmp_path / "corpus", own(tmp_path / "secret.tok", 1)
    folder.mkdir()
    make_manifest([own(folder / "a.tok", 2), secret], folder / "all.manifest")
    assert len(TokenReader(folder / "all.manifest").files) == 2  # one on this machine may
    server.put("/all.manifest", (folder / "all.manifest").read_bytes())
    with pytest.raises(TokenFileError, match=r"is at a URL, and names '/.*secret\.tok' on this machine"):
        TokenReader(server.url("/all.manifest"))


def test_a_pipe_in_the_place_of_a_file_is_an_error_and_not_waited_for(tmp_path):
    path = own(tmp_path / "a.tok", 1)
    reader = TokenReader(make_manifest(path, tmp_path / "a.manifest"))
    path.unlink()
    os.mkfifo(path)
    found: list[Any] = []

    def read() -> None:
        with pytest.raises(TokenFileError) as error:
            reader.fetch([0])
        found.append(error.value)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert found
    assert "0 bytes now" in str(found[0])


def test_documents_that_are_not_there_are_an_error_whoever_counted_them(corpus, made):  # noqa: F811
    path = forged(Path(made.path), other("documents", 4000, 3))  # of raw.bin, which stores none
    reader = TokenReader(path)
    assert reader.files[3].path.endswith("raw.bin")
    with pytest.raises(TokenFileError, match=r"raw\.bin: \d+ document\(s\) were found, 4000 when"):
        reader.part(3).document_range(3500)


def test_a_manifest_is_not_written_to_a_url(tmp_path):
    path = own(tmp_path / "a.tok", 1)
    for output in ("s3://bucket/a.manifest", f"file://{tmp_path}/a.manifest"):
        with pytest.raises(ConfigurationError, match="written on this machine alone"):
            make_manifest(path, output)


def test_ids_may_be_as_large_as_their_dtype(tmp_path):
    with TokenFileWriter(tmp_path / "a.tok", dtype="int64") as writer:
        writer.write([5, 2**62])
    manifest = make_manifest(tmp_path / "a.tok", tmp_path / "a.manifest")
    assert manifest.files[0].max_token_id == TokenReader(tmp_path / "a.tok").files[0].max_token_id
    assert TokenReader(manifest).fetch([1]).tolist() == [2**62]


# Remote ones ------------------------------------------------------------------------------------------------------


def test_manifests_of_remote_files_know_their_masks_and_their_document_ends(server, tmp_path):
    path = own(tmp_path / "a.tok", 1, mask=True)
    for name in ("a.tok", "a.tok.loss"):
        server.put(f"/{name}", (tmp_path / name).read_bytes())
    direct, local = TokenReader(server.url("/a.tok")), TokenReader(path)
    reader = TokenReader(make_manifest(server.url("/a.tok"), tmp_path / "all.manifest"), name="a")
    assert has_loss_masks(direct.files) and has_loss_masks(reader.files)
    assert reader.document_ends().tolist() == local.document_ends().tolist()


def test_the_query_of_a_manifests_url_goes_along_to_its_files(server, tmp_path):
    make_manifest(own(tmp_path / "a.tok", 1), tmp_path / "all.manifest")
    for name in ("a.tok", "all.manifest"):
        server.put(f"/{name}", (tmp_path / name).read_bytes())
    reader = TokenReader(server.url("/all.manifest?key=se/cret"))
    assert (reader.fetch(range(450)) == TokenReader(tmp_path / "a.tok").fetch(range(450))).all()
    assert reader.files[0].remote.url == server.url("/a.tok?key=se/cret")
    assert "cret" not in f"{reader.files[0]!r} {reader.files[0].path} {reader.notes}"


# Sources that grow ------------------------------------------------------------------------------------------------


def grown(reader: TokenReader, *more: Any) -> DataLoader2:
    loader = DataLoader2(reader.slice_sequences(20).permute(7).blend().batch_samples(4))
    next(iter(loader))
    loader.grow_source(reader.name, *more)
    return loader


@pytest.mark.parametrize("verify", ["open", "read"])
def test_a_source_that_is_checked_as_was_said_grows_by_files_of_a_manifest_alone(tmp_path, verify):
    first = make_manifest(own(tmp_path / "a.tok", 1), tmp_path / "a.manifest")
    second = make_manifest(own(tmp_path / "b.tok", 2), tmp_path / "b.manifest")
    reader = TokenReader(first, name="x", verify=verify)
    with pytest.raises(ConfigurationError, match=r"b\.tok was given without one"):
        grown(reader, str(tmp_path / "b.tok"))
    with grown(reader, second.path) as loader:
        again = load_recipe(loader.recipe())
    (found,) = (node for node in nodes_of(again) if isinstance(node, TokenReader))
    assert [file.verify for file in found.files] == [verify] * 2
    with grown(TokenReader(first, name="x"), str(tmp_path / "b.tok")) as loader:  # nothing was said
        (found,) = (node for node in nodes_of(load_recipe(loader.recipe())) if isinstance(node, TokenReader))
    assert [file.verify for file in found.files] == ["open", "size"]


def test_the_recipe_of_a_source_that_grew_by_raw_files_says_their_dtype(tmp_path):
    with TokenFileWriter(tmp_path / "a.tok", vocab_size=300, end_of_text=0) as writer:
        writer.write(np.arange(300))
    np.arange(500, dtype="<u2").tofile(tmp_path / "b.bin")
    for first in (tmp_path / "a.tok", make_manifest(tmp_path / "a.tok", tmp_path / "a.manifest")):
        with grown(TokenReader(first, name="x"), str(tmp_path / "b.bin"), "uint16") as loader:
            recipe, state = loader.recipe(), loader.state_dict()
            expected = list(itertools.islice(loader, 3))
        with DataLoader2(load_recipe(recipe)) as loader:
            loader.load_state_dict(state)
            assert str(list(itertools.islice(loader, 3))) == str(expected)


# Held files ---------------------------------------------------------------------------------------------------------


def test_a_gather_that_checks_gives_its_maps_back_when_nobody_has_it(tmp_path):
    reader = TokenReader(make_manifest(own(tmp_path / "a.tok", 1), tmp_path / "a.manifest"), verify="read")
    gather = TokenGather([reader])
    gather.rows(np.array([0]), 5)
    held = gather.held
    before = len(all_held())
    assert len(held) == 1
    del gather
    del held
    assert len(all_held()) == before - 1  # at once: no collector of garbage ran


# The commands -------------------------------------------------------------------------------------------------------


def test_a_pattern_of_manifests_is_verified_as_manifests(tmp_path, capsys):
    path = own(tmp_path / "a.tok", 1)
    make_manifest(path, tmp_path / "a.manifest")
    assert main(["verify", str(tmp_path / "*.manifest")]) == 0
    assert "as in the manifest" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(tmp_path / "*.manifest")]) == 1
    assert "are not what they were" in capsys.readouterr().out


def test_who_gives_up_waits_for_no_file_to_be_read_to_its_end_and_leaves_nothing(tmp_path):
    sparse, output = tmp_path / "a.bin", tmp_path / "all.manifest"
    arguments = ["manifest", str(sparse), "--dtype", "uint16", "--output", str(output)]
    with sparse.open("wb") as file:
        file.truncate(1 << 38)  # which takes minutes to be read
    there = sorted(tmp_path.iterdir())
    script = f"""if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that began this may have it ignored
        from tokenpipe.cli.main import main
        print(1, flush=True)
        sys.exit(main({arguments!r}))
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        try:
            assert run.stdout is not None and run.stderr is not None
            run.stdout.readline()
            while not _has_open(run.pid, sparse):
                assert run.poll() is None, run.stderr.read()
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            assert run.wait(100) != 0
        finally:
            run.kill()
    assert sorted(tmp_path.iterdir()) == there


def _has_open(process: int, path: Path) -> bool:
    links = []
    for link in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(OSError):
            links.append(str(link.readlink()))
    return str(path) in links


def test_files_of_one_length_are_each_compared_once_for_what_two_graphs_share(tmp_path, monkeypatch):
    for i in range(40):
        np.full(50, i, "<u2").tofile(tmp_path / f"{i:02}.bin")
        np.full(50, i + 20, "<u2").tofile(tmp_path / f"{i:02}.copy")
    asked: list[str] = []
    real = overlaps.file_digest
    monkeypatch.setattr(overlaps, "file_digest", lambda file: (asked.append(file.path), real(file))[1])
    readers = [TokenReader(str(tmp_path / f"*.{end}"), "uint16", name=end) for end in ("bin", "copy")]
    (found,) = overlap(*(reader.slice_sequences(9) for reader in readers))
    assert (found.tokens, found.file) == (20 * 50, str(tmp_path / "20.bin"))
    assert len(asked) == len(set(asked)) == 80
    assert overlap(readers[0], readers[0])[0].tokens == 40 * 50
