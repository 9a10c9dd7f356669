"""Manifests of files at URLs, and manifests that are at one themselves."""
# ruff: noqa: F811 - fixtures of the tests of remote shards

from urllib.parse import quote

import fsspec
import numpy as np
import pytest
from test_remote_shards import IOS, SECRET, batches, corpus, in_memory, serve, server, shards  # noqa: F401

from contract import all_same
from fault_server import Fault
from tokenpipe.cli.main import main
from tokenpipe.datapipes import TokenReader, load_recipe, make_manifest, remote, write_recipe
from tokenpipe.datapipes.errors import TokenFileError


@pytest.fixture
def kinds(corpus):
    """A folder of files that say their dtype, with its manifest, and a name that a URL must quote."""
    for name in ("llmc.bin", "raw.bin"):
        (corpus / name).unlink()
    (corpus / "numpy.npy").rename(corpus / "a 50% part#1?.npy")
    make_manifest(corpus, corpus / "all.manifest", end_of_text=249)
    return corpus


def served(server, folder):
    """The folder's URL; names are in it as browsers send them."""
    url = serve(server, folder)
    for path in folder.iterdir():
        server.put(f"/c/{quote(path.name)}", path.read_bytes())
    return url


def labelled(reader: TokenReader):
    """Batches whose labels leave out what the loss masks do, of the files that have one."""
    own = [i for i, file in enumerate(reader.files) if "own-" in file.path]
    own_files = reader.part(own[0], own[-1] + 1)
    return batches(own_files.slice_sequences(32).batch_samples(4).collate_causal_lm(no_loss_on=["unscored"]))


def windows(reader: TokenReader):
    return reader.slice_sequences(32).permute(3).batch_samples(6)


@pytest.mark.parametrize("place", ["http", "memory"])
def test_a_manifest_of_remote_files_says_what_one_of_local_files_does(kinds, server, tmp_path, place):
    (kinds / "a 50% part#1?.npy").rename(kinds / "a.npy")  # whose URL would have to be quoted by who gives it
    local = make_manifest(kinds, kinds / "all.manifest", end_of_text=249)
    url = serve(server, kinds) if place == "http" else in_memory(kinds, "says")
    found = make_manifest(url, tmp_path / "remote.manifest", end_of_text=249)
    for name in ("hashes", "ends_hashes", "loss_hashes"):
        assert getattr(found, name) == getattr(local, name)
    assert any(found.loss_hashes) and any(found.ends_hashes)
    for name in ("digest", "ends_digest", "loss_digest", "known_documents", "tokens", "kind"):
        assert [getattr(file, name) for file in found.files] == [getattr(file, name) for file in local.files]
    for io in IOS:
        reader = TokenReader(found, name="x", io=io)
        assert reader.document_ends().tolist() == TokenReader(local, name="x").document_ends().tolist()
        assert windows(reader).fingerprint() == windows(TokenReader(local, name="x")).fingerprint()
        assert all_same(labelled(reader), labelled(TokenReader(local)))
    assert main(["verify", str(tmp_path / "remote.manifest")]) == 0


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("place", ["http", "memory"])
def test_a_manifest_at_a_url_reads_the_files_beside_it(kinds, server, place, io):
    url = served(server, kinds) if place == "http" else in_memory(kinds, f"beside-{io}")
    expected = TokenReader(kinds / "all.manifest", name="x")
    for verify in (None, "size") if io == "ranged" else (None, "size", "read"):
        reader = TokenReader(f"{url}all.manifest", name="x", io=io, verify=verify)
        assert all_same(batches(windows(reader)), batches(windows(expected)))
        assert windows(reader).fingerprint() == windows(expected).fingerprint()
        assert reader.document_ends().tolist() == expected.document_ends().tolist()
        assert all_same(labelled(reader), labelled(expected))
        again = load_recipe(write_recipe(windows(reader)))
        assert all_same(batches(again), batches(windows(expected)))


def test_what_lets_somebody_in_goes_along_to_the_files_of_a_manifest_and_is_shown_nowhere(kinds, server, tmp_path):
    url = served(server, kinds)
    server.key = SECRET
    signed = f"{url}all.manifest?X-Amz-Credential=key/day/s3&X-Amz-Signature={SECRET}"
    reader = TokenReader(signed, name="x", verify="read")
    graph = windows(reader)
    assert all_same(batches(graph), batches(windows(TokenReader(kinds / "all.manifest", name="x"))))
    assert all_same(labelled(reader), labelled(TokenReader(kinds / "all.manifest")))
    made = make_manifest(signed, tmp_path / "again.manifest")
    shown = [write_recipe(graph), repr(graph), reader.notes, repr(reader.files[0]), repr(made.files[0]), repr(made)]
    shown += [(tmp_path / "again.manifest").read_bytes().decode("latin-1"), made.files[0].path[:]]
    server.key = "another"
    with pytest.raises(TokenFileError) as caught:
        batches(windows(TokenReader([signed.replace("all.manifest", "own-1.tok")])))
    assert not [text for text in [*shown, str(caught.value)] if SECRET in text]


def test_files_that_came_in_the_place_of_others_with_a_manifest_of_theirs_are_not_taken_for_the_old_ones(tmp_path):
    """Neither says a version: the copies in the cache are of the old ones."""
    fs, found = fsspec.filesystem("memory"), []
    for salt in (1, 2):
        folder = tmp_path / str(salt)
        folder.mkdir()
        np.save(folder / "a.npy", np.full(3000, salt, np.uint16))
        make_manifest(folder, folder / "all.manifest")
        for path in folder.iterdir():
            fs.pipe_file(f"/replaced/{path.name}", path.read_bytes())
        reader = TokenReader("memory://replaced/all.manifest")
        found.append(batches(reader.slice_sequences(32).batch_samples(1), 0, 1)[0].tokens[0, 0])
    assert found == [1, 2]


@pytest.mark.parametrize("command", ["verify", "inspect", "convert", "manifest"])
def test_no_command_shows_what_is_secret_in_a_url(kinds, server, tmp_path, capsys, command):
    (kinds / "a 50% part#1?.npy").unlink()
    url = serve(server, kinds).replace("http://", f"http://me:{SECRET}@")
    outputs = {"convert": tmp_path / "all.tok", "manifest": tmp_path / "all.manifest"}
    for name in ("own-1.tok", "own-*.tok", f"own-1.tok?sig={SECRET}", f"none.tok?sig={SECRET}", "none/", "*.xyz", ""):
        output = ["--output", str(outputs[command])] if command in outputs else []
        main([command, f"{url}{name}", *output])
    if command in outputs:
        for output in (f"{url}x{outputs[command].suffix}", f"{url}x.tok?sig={SECRET}"):
            assert main([command, str(kinds / "own-1.tok"), "--output", output]) == 1
        assert SECRET.encode() not in outputs[command].read_bytes()
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert ("files are written on this machine alone" in said.err) == (command in outputs)
    assert command in outputs or "/c/own-1.tok" in said.out


def test_verify_sees_that_a_file_was_replaced_where_a_copy_of_the_old_one_is_kept(kinds, server, tmp_path, capsys):
    (kinds / "a 50% part#1?.npy").unlink()
    url = serve(server, kinds)
    make_manifest(f"{url}own-*.tok", tmp_path / "all.manifest")
    body = bytearray(server.body("/c/own-2.tok"))
    body[300] ^= 1
    server.put("/c/own-2.tok", bytes(body))
    assert main(["verify", str(tmp_path / "all.manifest")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [": ok" in line for line in lines] == [True, True, False, True] and "it was replaced" in lines[2]


def test_a_manifest_that_is_not_there_is_said_to_be_missing():
    with pytest.raises(TokenFileError, match=r"cannot be looked up.*memory://nowhere/all\.manifest'"):
        TokenReader("memory://nowhere/all.manifest")


def test_a_copy_that_is_not_what_the_manifest_says_is_fetched_again(kinds, server):
    url = served(server, kinds)
    expected = batches(windows(TokenReader(kinds / "all.manifest", name="x")))

    def graph(verify):
        return windows(TokenReader(f"{url}all.manifest", name="x", verify=verify))

    assert all_same(batches(graph("open")), expected)
    for path in remote.cache_folder().glob("*.shard"):
        if path.stat().st_size == (kinds / "own-1.tok").stat().st_size:
            body = bytearray(path.read_bytes())
            body[300] ^= 1
            path.write_bytes(body)
    with pytest.raises(TokenFileError, match=r"own-1.tok: .*is fetched again when"):
        batches(graph("read"))
    assert all_same(batches(graph("read")), expected)
    server.put("/c/own-1.tok", bytes(body))  # and now it is wrong where it comes from, for a while
    for path in remote.cache_folder().glob("*.shard"):
        path.unlink()
    with pytest.raises(TokenFileError, match=r"own-1.tok: is not the file that its manifest is of.*is fetched again"):
        batches(graph("open"))
    served(server, kinds)
    assert all_same(batches(graph("open")), expected)


@pytest.mark.parametrize("status", [403, 404])
def test_a_signed_file_is_verified_and_converted_where_its_folder_is_not_listed(kinds, server, tmp_path, status):
    url = f"{served(server, kinds)}own-1.tok?X-Amz-Credential=key/day/s3&X-Amz-Signature={SECRET}"
    server.key = SECRET
    server.script("/c/", always=Fault(status=status), heads=True)
    assert main(["verify", url]) == 0
    assert main(["convert", url, "--output", str(tmp_path / "own.tok")]) == 0
    assert TokenReader(tmp_path / "own.tok", name="x").content == TokenReader(kinds / "own-1.tok", name="x").content
