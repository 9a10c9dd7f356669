"""Token files at URLs: the bits of local copies, what is asked of servers for them, and what becomes of a run when one
fails, changes a file, or is gone.
"""

import contextlib
import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from contract import all_same
from fault_server import Fault, FaultServer
from tokenpipe.adapters import Retry, SkipErrors
from tokenpipe.datapipes import (
    DatatroveWriter,
    LlmcWriter,
    MegatronWriter,
    TokenFileWriter,
    TokenReader,
    Topology,
    load_recipe,
    write_recipe,
)
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    RemoteFileError,
    StateMismatchError,
    TokenFileError,
)
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path
from tokenpipe.datapipes.remote import cache_folder
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

IOS = ("mmap", "pread", "ranged")
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def shards(tmp_path, monkeypatch) -> Path:
    """A shard cache of the test's own, and no long waits for servers."""
    monkeypatch.setenv("TOKENPIPE_SHARDS", str(tmp_path / "shards"))
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path / "indexes"))
    monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "10")
    return tmp_path / "shards"


@pytest.fixture
def server() -> "Iterator[FaultServer]":
    with FaultServer() as server:
        yield server


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder of token files of all kinds, with what lies beside them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(7)

    def documents(count: int = 60) -> "list[list[int]]":
        return [rng.integers(1, 250, n).tolist() for n in rng.integers(1, 90, count)]

    for i in range(4):
        with TokenFileWriter(folder / f"own-{i}.tok", vocab_size=50_000) as writer:
            for ids in documents():
                writer.write(ids, loss=[n % 3 != 0 for n in ids])
    with DocumentIdsWriter(ids_path(folder / "own-0.tok")) as names:
        names.write_ids([f"https://example.com/{n}" for n in range(60)])
        names.bind(folder / "own-0.tok")
    np.save(folder / "own-0.tok.quality.npy", np.linspace(0, 1, 60))
    with DatatroveWriter(folder / "trove.ds", vocab_size=300) as writer:
        for ids in documents():
            writer.write(ids)
    with MegatronWriter(folder / "mega", vocab_size=300) as writer:
        for ids in documents():
            writer.write(ids)
    with LlmcWriter(folder / "llmc.bin", vocab_size=300) as writer:
        for ids in documents():
            writer.write([0, *ids])
    np.save(folder / "numpy.npy", rng.integers(0, 250, 3000).astype("<u2"))
    rng.integers(0, 250, 40_000).astype("<u4").tofile(folder / "raw.bin")
    return folder


def spawned(workers: int) -> MultiProcessingReadingService:
    """Workers with this test's environment, which a fork server of an earlier one would not give them."""
    return MultiProcessingReadingService(workers, multiprocessing_context="spawn")


def serve(server: FaultServer, folder: Path, at: str = "/c/") -> str:
    """The folder's files behind a server; gives their URL."""
    for path in sorted(folder.iterdir()):
        server.put(f"{at}{path.name}", path.read_bytes())
    return server.url(at)


def in_memory(folder: Path, name: str) -> str:
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe_file(f"/{name}/{path.name}", path.read_bytes())
    return f"memory://{name}/"


def graphs(place: str, io: str, files: "Callable[[str], str] | None" = None) -> dict:
    """Graphs over files of all kinds in a folder; `place` ends in "/"."""
    at = (lambda name: f"{place}{name}") if files is None else files
    own = TokenReader([at(f"own-{i}.tok") for i in range(4)], name="own", io=io)
    trove, mega = TokenReader(at("trove.ds"), io=io), TokenReader(at("mega.idx"), name="mega", io=io)
    llmc = TokenReader(at("llmc.bin"), io=io, end_of_text=0)
    plain = TokenReader(at("numpy.npy"), io=io, end_of_text=249)
    raw = TokenReader(at("raw.bin"), dtype="uint32", io=io, end_of_text=249)
    train, held_out = own.hold_out(0.3, seed=7)
    several = [source.slice_sequences(32).permute(3) for source in (own, trove, mega, llmc, plain, raw)]
    blend = several[0].blend(*several[1:], weights=[3, 1, 1, 1, 1, 2])
    cut = Topology(cp_rank=1, cp_size=2)
    return {
        "all kinds": blend.batch_samples(6),
        "chosen documents": train.slice_sequences(32).permute(3).batch_samples(4),
        "those held out": held_out.slice_sequences(32).batch_samples(2),
        "packed rows": mega.pack_documents(95).permute(1).batch_samples(4).collate_causal_lm(position_ids=True),
        "positions": blend.batch_samples(4).collate_causal_lm(cu_seqlens=True),
        "a part of each row": blend.shard_ranks(cut, seed=7).batch_samples(4).collate_causal_lm(cp="zigzag"),
        "rows cut by document": own.slice_sequences(32)
        .shard_ranks(cut, seed=7)
        .batch_samples(4)
        .collate_causal_lm(cp="document"),
        "labels that count": own.slice_sequences(32)
        .permute(3)
        .batch_samples(4)
        .collate_causal_lm(no_loss_on=["unscored"]),
        "some score": TokenReader(at("own-0.tok"), io=io, name="own")
        .select_documents(score="quality", at_least=0.4)
        .slice_sequences(16)
        .batch_samples(2),
        "a row over many files": own.slice_sequences(6000).batch_samples(1),
        "padding": own.slice_sequences(500).once(tail="pad").shard_ranks(Topology(1, 3)).batch_samples(2),
        "long before": raw.slice_sequences(32).permute(3).skip(300).batch_samples(4),
    }


def batches(graph: "object", start: int = 0, stop: int = 20) -> list:
    return list(graph.iterate(start, min(stop, graph.end)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("io", IOS)
def test_every_batch_is_that_of_local_files_for_every_kind_of_file_and_graph(
    corpus, server, io, subtests, tmp_path, monkeypatch
):
    expected = {name: (graph.fingerprint(), batches(graph)) for name, graph in graphs(f"{corpus}/", "mmap").items()}
    monkeypatch.setenv("TOKENPIPE_CACHE", str(tmp_path / "other-indexes"))  # nothing is found that local files left
    for name, graph in graphs(serve(server, corpus), io).items():
        with subtests.test(name):
            fingerprint, items = expected[name]
            assert all_same(batches(graph), items)
            assert all_same(graph.fetch([len(items) - 1, 0]), [items[-1], items[0]])
            assert graph.fingerprint() == fingerprint


@pytest.mark.parametrize("io", IOS)
def test_local_and_remote_files_go_into_one_blend_and_one_reader(corpus, server, io):
    url = serve(server, corpus)
    expected = graphs(f"{corpus}/", "mmap")["all kinds"]
    names = iter(range(100))
    mixed = graphs("", io, lambda name: f"{url if next(names) % 2 else f'{corpus}/'}{name}")["all kinds"]
    assert all_same(batches(mixed, 0, 40), batches(expected, 0, 40))
    assert mixed.fingerprint() == expected.fingerprint()
    kept = pickle.loads(pickle.dumps(mixed))
    assert all_same(batches(kept, 7, 9), batches(expected, 7, 9))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("io", "start_method"), [("mmap", "fork"), ("mmap", "spawn"), ("ranged", "spawn"), ("ranged", "fork")]
)
def test_workers_give_the_same_bits(corpus, server, io, start_method):
    url = serve(server, corpus)
    expected = batches(graphs(f"{corpus}/", "mmap")["all kinds"], 0, 40)
    graph = graphs(url, io)["all kinds"]
    batches(graph, 0, 2)  # connections, and threads, that a fork must not share
    loader = DataLoader2(graph, reading_service=MultiProcessingReadingService(2, multiprocessing_context=start_method))
    with contextlib.closing(iter(loader)) as items:
        assert all_same([next(items) for _ in range(40)], expected)
    loader.shutdown()


def run(graph, batches: int, state: "object | None" = None, workers: int = 0) -> "tuple[list, dict]":
    """Some batches of a loader, from a state on perhaps; and its state behind them."""
    service = spawned(workers) if workers else None
    loader = DataLoader2(graph, reading_service=service)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for item in loader:
        found.append(item)
        if len(found) == batches:
            break
    state = loader.state_dict()
    loader.shutdown()
    return found, state


def test_a_run_goes_on_wherever_its_files_have_moved(corpus, server):
    local = graphs(f"{corpus}/", "mmap")["all kinds"]
    expected, _ = run(local, 12)
    _, state = run(local, 5)
    elsewhere = {
        "a server": (serve(server, corpus), "mmap"),
        "a bucket that is read by range": (in_memory(corpus, "moved"), "ranged"),
        "the disk again": (f"{corpus}/", "pread"),
    }
    for place, io in elsewhere.values():
        some, state = run(graphs(place, io)["all kinds"], 2, json.loads(json.dumps(state)))
        assert all_same(some, expected[:7][-2:])
        expected = expected[2:]


def own_graph(url: str, io: str = "mmap", **settings):
    return TokenReader(url, name="own", io=io).slice_sequences(32).permute(3).batch_samples(4, **settings)


def test_each_shard_is_fetched_once_for_all_ranks_and_workers_of_a_machine(corpus, server):
    url = serve(server, corpus)
    loaders = []
    for rank in range(2):
        readers = TokenReader([f"{url}own-{i}.tok" for i in range(4)], name="own")
        graph = readers.slice_sequences(32).permute(3).shard_ranks(Topology(rank, 2)).batch_samples(4)
        loaders.append(DataLoader2(graph, reading_service=spawned(2)))
    server.forget()
    iterators = [iter(loader) for loader in loaders]
    for _ in range(20):
        for items in iterators:
            next(items)
    whole = [path for method, path, asked, _ in server.requests if method == "GET" and not asked]
    assert sorted(whole) == [f"/c/own-{i}.tok" for i in range(4)]
    for loader in loaders:
        loader.shutdown()


@pytest.fixture
def large(server, tmp_path) -> str:
    """Four shards of 4 MiB of raw uint16 tokens; a pattern for them."""
    folder = tmp_path / "large"
    folder.mkdir()
    for i in range(4):
        np.random.default_rng(i).integers(0, 60_000, 2 << 20).astype("<u2").tofile(folder / f"{i}.bin")
    serve(server, folder, "/large/")
    return server.url("/large/")


def raw_graph(place: str, io: str):
    reader = TokenReader([f"{place}{i}.bin" for i in range(4)], dtype="uint16", name="raw", io=io)
    return reader.slice_sequences(1024).permute(5).batch_samples(4)


def sizes(server: FaultServer) -> "list[int]":
    """The bytes that each GET asked for."""
    found = []
    for method, path, asked, _ in server.requests:
        if method == "GET":
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            found.append(int(stop) + 1 - int(start) if asked else len(server.body(path)))
    return found


def test_ranged_reads_fetch_little_more_than_the_windows_they_need(server, large, tmp_path):
    expected = batches(raw_graph(f"{tmp_path}/large/", "mmap"), 0, 25)
    graph = raw_graph(large, "ranged")
    server.forget()
    assert all_same(batches(graph, 0, 25), expected)
    needed = 25 * 4 * 1025 * 2
    requests = sizes(server)
    assert sum(requests) <= needed + (100 - len(requests)) * 65_536  # near windows are read by one request
    assert not list((tmp_path / "shards").glob("*.shard"))


def test_fingerprints_take_samples_and_no_whole_files(server, large, tmp_path):
    graph = raw_graph(large, "mmap")
    server.forget()
    assert graph.fingerprint() == raw_graph(f"{tmp_path}/large/", "mmap").fingerprint()
    assert sum(sizes(server)) < 4 * 64 * (4096 + 65536)
    server.forget()
    assert raw_graph(large, "ranged").fingerprint() == graph.fingerprint()
    assert sum(sizes(server)) <= 4 * 65536  # what files begin with: the digests are known on this machine


def test_a_cache_smaller_than_the_data_evicts_and_fetches_again(server, large, tmp_path, monkeypatch):
    expected = batches(raw_graph(f"{tmp_path}/large/", "mmap"), 0, 30)
    monkeypatch.setenv("TOKENPIPE_SHARDS_GIB", str(9 / 1024))
    server.forget()
    graph = raw_graph(large, "mmap")
    for start in (0, 10, 20):  # each time by maps of its own
        assert all_same(batches(pickle.loads(pickle.dumps(graph)), start, start + 10), expected[start : start + 10])
        assert sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.shard")) <= 9 << 20
    assert min(server.counts().values()) > 1


def test_a_shard_that_the_cache_gave_up_is_let_go_of(server, large, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_SHARDS_GIB", str(9 / 1024))
    reader = TokenReader([f"{large}{i}.bin" for i in range(4)], dtype="uint16", name="raw")
    graph = reader.slice_sequences(1024).batch_samples(64)  # shard after shard
    for _ in graph.iterate(0, 2 * len(graph)):
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert sum(".shard" in line for line in maps) <= 3
    assert sum("(deleted)" in line for line in maps) <= 1


def wait_for(condition: "Callable[[], bool]") -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def quiet(server: FaultServer) -> int:
    """The requests that there were once no more have come for a while."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < 0.4:
        if (now := len(server.requests)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)
    return last


def test_shards_of_coming_batches_are_fetched_before_they_are_asked_for(server, large):
    reader = TokenReader([f"{large}{i}.bin" for i in range(4)], dtype="uint16", name="raw")
    items = reader.slice_sequences(1024).batch_samples(4).iterate(0)
    next(items)  # of the first shard alone
    wait_for(lambda: {f"/large/{i}.bin" for i in range(4)} <= server.counts().keys())


def test_no_more_is_fetched_ahead_than_was_set(server, large, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_FETCH_AHEAD_MIB", "9")
    reader = TokenReader([f"{large}{i}.bin" for i in range(4)], dtype="uint16", name="raw")
    server.forget()
    items = reader.slice_sequences(1024).batch_samples(4).iterate(0)
    next(items)
    next(items)  # the first shard is open
    wait_for(lambda: server.count("/large/2.bin") == 1)
    quiet(server)
    assert server.counts().keys() == {"/large/0.bin", "/large/1.bin", "/large/2.bin"}
    for _ in range(520):  # into the second shard
        next(items)
    wait_for(lambda: server.count("/large/3.bin") == 1)


def test_nothing_is_fetched_for_an_iteration_that_was_given_up(server, tmp_path):
    (tmp_path / "many").mkdir()
    for i in range(24):
        np.full(32 << 10, i, "<u2").tofile(tmp_path / "many" / f"{i:02}.bin")
    url = serve(server, tmp_path / "many", "/many/")
    reader = TokenReader([f"{url}{i:02}.bin" for i in range(24)], dtype="uint16", name="many")
    for i in range(24):
        server.script(f"/many/{i:02}.bin", always=Fault(slow=0.2))
    server.forget()
    items = reader.slice_sequences(1024).batch_samples(4).iterate(0, 190)
    next(items)
    items.close()
    quiet(server)
    assert len(server.counts()) <= 12  # those that were being fetched are; four at a time


def test_seeking_fetches_for_where_it_goes_on(server, large, tmp_path):
    expected = raw_graph(f"{tmp_path}/large/", "mmap")
    graph = raw_graph(large, "ranged")
    for start in (100, 3, 50, 51, 0):
        assert all_same(batches(graph, start, start + 5), batches(expected, start, start + 5))


@pytest.mark.parametrize("io", ["mmap", "ranged"])
def test_a_server_that_fails_now_and_then_changes_no_bit(server, corpus, io):
    expected = batches(graphs(f"{corpus}/", "mmap")["all kinds"], 0, 30)
    graph = graphs(serve(server, corpus), io)["all kinds"]
    for i in range(4):
        server.script(f"/c/own-{i}.tok", Fault(status=503, retry_after="0"), Fault(short=100))
    server.script("/c/raw.bin", Fault(reset=10), Fault(status=429, retry_after="0"))
    assert all_same(batches(graph, 0, 30), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("io", "workers"), [("mmap", 2), ("mmap", 0), ("ranged", 2), ("ranged", 0)])
def test_a_server_that_is_down_is_an_error_with_its_batch_and_a_resume_goes_on(server, large, io, workers, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_RETRIES", "1")
    graph = TokenReader([f"{large}{i}.bin" for i in (0, 1)], dtype="uint16", name="raw", io=io)
    graph = graph.slice_sequences(1024).batch_samples(4)
    expected = batches(graph, 505, 516)
    graph.fingerprint()  # as a run that has kept a state knows it
    for path in cache_folder().glob("*.shard"):
        path.unlink()
    graph = pickle.loads(pickle.dumps(graph))
    server.script("/large/1.bin", always=Fault(status=500))
    service = spawned(workers) if workers else None
    loader = DataLoader2(graph, reading_service=service)
    loader.seek(505)
    seen = 0
    with pytest.raises(RemoteFileError) as caught:
        for _ in loader:
            seen += 1
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "/large/1.bin" in said and "500" in said and "2 tries" in said and "2044" in said
    assert seen == 6
    state = loader.state_dict()
    loader.shutdown()
    server.script("/large/1.bin")
    assert all_same(run(graph, 5, state, workers)[0], expected[6:])


@pytest.mark.parametrize("io", IOS)
def test_a_remote_file_that_was_replaced_is_refused_at_resume(server, corpus, io):
    url = serve(server, corpus)
    _, state = run(own_graph(f"{url}own-1.tok", io), 3)
    server.put("/c/own-1.tok", (corpus / "own-2.tok").read_bytes())
    with pytest.raises(StateMismatchError, match="own"):
        run(own_graph(f"{url}own-1.tok", io), 3, state)


def test_a_remote_file_that_changes_while_it_is_read_is_an_error(server, large):
    graph = raw_graph(large, "ranged")
    batches(graph, 0, 2)
    server.put("/large/1.bin", bytes(4 << 20))
    with pytest.raises(RemoteFileError, match="changed"):
        batches(graph, 2, 60)


def test_rows_of_a_file_that_is_gone_can_be_tried_again_and_skipped(server, large, tmp_path):
    expected = raw_graph(f"{tmp_path}/large/", "mmap")
    graph = raw_graph(large, "ranged")
    server.script("/large/2.bin", 404, 404)
    tried = DataLoader2(graph, [Retry(RemoteFileError, tries=6, wait=0.01)])
    assert all_same([item for _, item in zip(range(8), tried, strict=False)], batches(expected, 0, 8))
    server.script("/large/2.bin", always=Fault(status=404))
    some = next(iter(DataLoader2(graph, [SkipErrors(1000, TokenFileError)])))
    (whole,) = expected.fetch([0])
    assert some.masked is not None and 0 < some.masked.sum() < 4
    for row in range(4):
        assert np.array_equal(some.tokens[row], whole.tokens[row]) != some.masked[row]


@pytest.fixture
def bucket(corpus, monkeypatch) -> "Iterator[str]":
    """The corpus in a bucket of a server that speaks S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", SECRET), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    endpoint = f"http://127.0.0.1:{moto._server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="corpora")
    for path in corpus.iterdir():
        client.upload_file(str(path), "corpora", f"c/{path.name}")
    yield "s3://corpora/c/"
    moto.stop()


def test_a_bucket_is_read_as_a_folder_with_the_bits_of_its_files(bucket, corpus):
    local = TokenReader(f"{corpus}/own-*.tok", name="own").slice_sequences(32).permute(3).batch_samples(4)
    expected, state = run(local, 10)
    for io in ("mmap", "ranged"):
        graph = TokenReader(f"{bucket}own-*.tok", name="own", io=io).slice_sequences(32).permute(3).batch_samples(4)
        assert all_same(run(graph, 10)[0], expected)
        assert all_same(run(graph, 3, state)[0], batches(local, 10, 13))
        every = graphs(bucket, io)["labels that count"]
        assert all_same(batches(every), batches(graphs(f"{corpus}/", "mmap")["labels that count"]))


def test_no_secret_of_a_url_is_shown_or_kept(server, corpus):
    url = serve(server, corpus).replace("http://", f"http://me:{SECRET}@")
    files = [f"{url}own-{i}.tok?sig={SECRET}" for i in range(2)]
    reader = TokenReader(files)
    graph = reader.slice_sequences(32).permute(3).batch_samples(4)
    _, state = run(graph, 2)
    shown = [json.dumps(state), repr(graph), reader.notes, reader.name, repr(reader.files), graph.fingerprint()]
    shown += [write_recipe(graph)]
    assert reader.files[0].stored_documents and reader.document_ids()[0] is not None
    server.script("/c/own-1.tok", always=Fault(status=403))
    for path in cache_folder().glob("*.shard"):
        path.unlink()
    with pytest.raises(RemoteFileError) as caught:
        batches(pickle.loads(pickle.dumps(graph)))
    shown += [str(caught.value), repr(caught.value)]
    for wrong in ("none.tok", "mega.bin"):
        server.put("/c/mega.idx", b"no index")
        with pytest.raises(TokenFileError) as caught_too:
            TokenReader(f"{url}{wrong}?sig={SECRET}")
        shown += [str(caught_too.value)]
    assert not [text for text in shown if SECRET in text]
    assert "own-1.tok" in str(caught.value)


@pytest.mark.parametrize("place", ["memory", "http"])
def test_folders_and_patterns_are_those_of_a_local_disk(corpus, server, place):
    for path in [*corpus.glob("raw.bin"), *corpus.glob("llmc.bin")]:
        path.unlink()
    url = in_memory(corpus, "as-listed") if place == "memory" else serve(server, corpus)
    shown = {}
    for where in (f"{corpus}/", url):
        for what in ("", "own-*.tok", "own-[12].tok", "*.idx", "*-0*"):
            files = TokenReader(f"{where}{what}", name="x").files
            shown.setdefault(what, []).append([file.path.rpartition("/")[2] for file in files])
    assert all(local == remote for local, remote in shown.values())
    assert len(shown["own-*.tok"][0]) == 4
    for nothing in ("none-*.tok", "nowhere/"):
        with pytest.raises(TokenFileError):
            TokenReader(f"{url}{nothing}")


def test_a_folder_of_many_shards_is_listed_and_not_asked_for_file_by_file(tmp_path, monkeypatch):
    from tokenpipe.datapipes.remote import drivers

    looks: list[str] = []
    found = drivers.found
    monkeypatch.setattr(drivers, "found", lambda url: looks.append(url) or found(url))
    fs = fsspec.filesystem("memory")
    for i in range(300):
        fs.pipe_file(f"/many/{i:03}.bin", np.arange(50, dtype="<u2").tobytes())
    assert len(TokenReader("memory://many/*.bin", dtype="uint16", name="x").files) == 300
    reader = TokenReader([f"memory://many/{i:03}.bin" for i in range(300)], dtype="uint16", name="x")
    assert reader.samples_per_pass == 15_000 and not looks


def test_a_recipe_reads_the_same_urls(corpus, server):
    graph = own_graph(f"{serve(server, corpus)}own-1.tok", "ranged")
    again = load_recipe(write_recipe(graph))
    assert again.fingerprint() == graph.fingerprint() and all_same(batches(again), batches(graph))


def test_a_page_that_links_elsewhere_and_to_itself_is_a_folder_of_what_is_in_it(corpus, server):
    body = (corpus / "own-1.tok").read_bytes()
    server.put("/c/own-1.tok", body)
    server.put("/about.html", b"")
    links = ["?C=N;O=D", "?C=M;O=A", "/", "/about.html", "../", "own-1.tok"]
    page = "".join(f'<a href="{link}">{link}</a>' for link in links)
    server.put("/c/", page.encode(), Content_Type="text/html")
    for what in ("", "*.tok"):
        assert [file.path for file in TokenReader(server.url(f"/c/{what}"), name="x").files] == [
            server.url("/c/own-1.tok")
        ]


def test_chained_urls_are_refused_without_what_is_secret_in_them():
    for chained in (
        "simplecache::https://me:{0}@host/a.tok?sig={0}",
        "zip://a.tok::s3://b/{0}?x.zip",
        "a::b::s3://c/d",
    ):
        with pytest.raises(ConfigurationError, match="chained URLs are not read") as caught:
            TokenReader(chained.format(SECRET) if "zip" not in chained else chained.format("x"))
        assert SECRET not in str(caught.value)
    with pytest.raises(RemoteFileError, match=r"memory://nowhere/a::b\.tok"):
        TokenReader("memory://nowhere/a::b.tok")
    with pytest.raises(ArgumentTypeError, match=r"got 3$"):
        TokenReader([f"https://host/a.tok?sig={SECRET}", 3])


def test_a_setting_that_is_wrong_is_named_as_what_it_is(corpus, server, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_SHARDS", "/proc/nowhere")
    with pytest.raises(ConfigurationError, match=r"^TOKENPIPE_SHARDS is '/proc/nowhere'"):
        TokenReader(f"{serve(server, corpus)}own-1.tok")
