"""Reading over a network that goes wrong: what is tried again, what is not, and what is said."""

import errno
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_server import Fault, FaultServer
from processes import environment
from tokenpipe.datapipes import remote
from tokenpipe.datapipes.errors import ConfigurationError, OutOfRangeError, RemoteFileError, TokenFileError
from tokenpipe.datapipes.remote import attempts, transport, urls

BODY = random.Random(3).randbytes(3000)
PASSING = {
    "500": 500,
    "502": 502,
    "503": 503,
    "504": 504,
    "507": 507,
    "408": 408,
    "425": 425,
    "429": 429,
    "429 with Retry-After": Fault(status=429, retry_after="0"),
    "reset before the answer": Fault(reset=0),
    "reset in the body": Fault(reset=100),
    "short body": Fault(short=1),
    "nothing of the body": Fault(short=3000),
    "Content-Length too large": Fault(length=7),
    "another range": Fault(shifted=True),
    "stalled": Fault(stall=30.0),
    "no answer": Fault(slow=30.0),
    "short without a length": Fault(short=9, no_length=True),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.001)
    with FaultServer() as started:
        yield started


def look_up(server: FaultServer, path: str = "/a.bin") -> remote.RemoteFile:
    return remote.look_up(server.url(path))


# What goes wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(server, monkeypatch, fault):
    server.put("/a.bin", BODY)
    file = look_up(server)
    if silent := isinstance(fault, Fault) and (fault.stall or fault.slow):
        monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "0.25")
    server.script("/a.bin", fault, fault)
    assert remote.read_range(file, 1000, 2000) == BODY[1000:2000]
    assert server.count() == 3 or silent  # so impatient a reader gives a busy machine up, too
    assert remote.fetch(file).read_bytes() == BODY
    server.script("/a.bin", fault, heads=True)
    if isinstance(fault, int) or fault.status or fault.slow or fault.reset == 0:
        assert look_up(server) == file


@pytest.mark.parametrize(
    ("status", "number"),
    [
        (400, errno.EIO),
        (401, errno.EACCES),
        (403, errno.EACCES),
        (404, errno.ENOENT),
        (410, errno.ENOENT),
        (451, errno.EIO),
    ],
)
def test_what_will_be_the_same_is_asked_once(server, status, number):
    server.put("/a.bin", BODY)
    file = look_up(server)
    server.script("/a.bin", always=Fault(status=status), heads=True)
    for call in (lambda: remote.read_range(file, 0, 5), lambda: remote.fetch(file), lambda: look_up(server)):
        server.forget()
        with pytest.raises(RemoteFileError, match=str(status)) as raised:
            call()
        assert (raised.value.errno, raised.value.filename) == (number, file.url)
        assert isinstance(raised.value, TokenFileError) and isinstance(raised.value, OSError)
        assert server.count() + server.count(method="HEAD") <= 2  # a look that HEAD refuses asks with GET


def test_a_missing_file_is_named(server):
    with pytest.raises(RemoteFileError, match=r"127\.0\.0\.1:\d+/none\.bin") as raised:
        look_up(server, "/none.bin")
    assert raised.value.errno == errno.ENOENT


def test_tries_are_counted_and_listed(server, monkeypatch):
    server.put("/a.bin", BODY)
    file = look_up(server)
    monkeypatch.setenv("TOKENPIPE_RETRIES", "3")
    server.script("/a.bin", 503, 500, Fault(short=2), always=Fault(status=429))
    with pytest.raises(RemoteFileError) as raised:
        remote.read_range(file, 0, 2000)
    said = raised.value.attempts
    assert len(said) == 4 == server.count()
    for text, attempt in zip(("503", "500", "1998", "429"), said, strict=True):
        assert text in attempt and attempt.endswith(" s)")
        assert attempt in str(raised.value)
    assert "4 tries" in str(raised.value)


def test_tries_end_with_their_seconds(server, monkeypatch):
    server.put("/a.bin", BODY)
    file = look_up(server)
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.05)
    monkeypatch.setenv("TOKENPIPE_RETRIES", "1000000")
    monkeypatch.setenv("TOKENPIPE_RETRY_SECONDS", "0.3")
    server.script("/a.bin", always=Fault(status=500))
    with pytest.raises(RemoteFileError, match="TOKENPIPE_RETRY_SECONDS"):
        remote.read_range(file, 0, 5)


def test_a_server_is_left_alone_as_long_as_it_asks(server):
    server.put("/a.bin", BODY)
    file = look_up(server)
    server.script("/a.bin", Fault(status=503, retry_after="1"))
    begun = time.monotonic()
    assert remote.read_range(file, 0, 5) == BODY[:5]
    assert time.monotonic() - begun >= 1.0


@pytest.mark.parametrize("after", ["100000", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_server_that_asks_for_longer_than_there_is_is_not_waited_for(server, after):
    server.put("/a.bin", BODY)
    file = look_up(server)
    server.script("/a.bin", always=Fault(status=503, retry_after=after))
    with pytest.raises(RemoteFileError, match=r"the server asks for \d+ s"):
        remote.read_range(file, 0, 5)
    assert server.count() == 1


def test_a_file_that_has_changed_is_not_read(server):
    for version in (BODY[::-1], BODY + b"more", BODY[:500]):
        server.put("/a.bin", BODY)
        file = look_up(server)
        server.put("/a.bin", version)
        server.forget()
        for call in (lambda file=file: remote.read_range(file, 1000, 1005), lambda file=file: remote.fetch(file)):
            with pytest.raises(RemoteFileError, match="changed since it was looked up") as raised:
                call()
            assert raised.value.errno == errno.ESTALE
        assert server.count() == 2


def test_a_file_that_has_changed_is_seen_where_the_server_ignores_conditions(server):
    server.put("/a.bin", BODY)
    weak = remote.RemoteFile(server.url("/a.bin"), len(BODY), 'W/"of yesterday"')  # which no condition may be of
    with pytest.raises(RemoteFileError, match="looked up: ETag"):
        remote.read_range(weak, 0, 5)
    longer = remote.RemoteFile(server.url("/a.bin"), len(BODY) + 5, "")
    with pytest.raises(RemoteFileError, match="3000 bytes instead of 3005"):
        remote.read_range(longer, 0, 5)
    with pytest.raises(RemoteFileError, match="3000 bytes instead of 3005"):
        remote.fetch(longer)
    with pytest.raises(RemoteFileError, match="no bytes"):
        remote.read_range(longer, 3000, 3005)


def test_a_file_system_that_gives_less_than_was_asked_for_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENPIPE_RETRIES", "0")
    fsspec.filesystem("memory").pipe("/short/a.bin", BODY)
    file = remote.look_up("memory://short/a.bin")
    with pytest.raises(RemoteFileError, match="3000 bytes came"):
        remote.read_range(remote.RemoteFile(file.url, 3005, file.version), 0, 3005)
    fsspec.filesystem("memory").pipe("/short/a.bin", BODY[::-1])  # of the same size, and its version says so
    with pytest.raises(RemoteFileError, match="changed since it was looked up"):
        remote.fetch(file)


def test_a_driver_that_hangs_is_left_behind(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    fsspec.filesystem("memory").pipe("/hung/a.bin", BODY)
    file = remote.look_up("memory://hung/a.bin")
    right, calls = MemoryFileSystem.cat_file, []

    def hung(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) < 3:
            time.sleep(5)
        return right(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", hung)
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "0.25")
    assert remote.read_range(file, 0, 9) == BODY[:9]
    assert len(calls) >= 3


def test_zeros_in_the_place_of_a_body_are_seen_by_its_hash(server):
    server.put("/a.bin", BODY, md5=True)
    file = look_up(server)
    server.script("/a.bin", Fault(zeros=True))
    assert remote.fetch(file).read_bytes() == BODY
    assert server.count() == 2
    server.put("/b.bin", BODY, md5=True)
    server.script("/b.bin", always=Fault(zeros=True))
    with pytest.raises(RemoteFileError, match=r"md5 is [0-9a-f]{32}, and [0-9a-f]{32} was announced"):
        remote.fetch(look_up(server, "/b.bin"))
    assert server.count("/b.bin") == 3


def test_googles_hash_is_compared_also_over_parts(server, monkeypatch):
    import base64
    import hashlib

    monkeypatch.setattr(transport, "PART", 500)
    wrong, right = (base64.b64encode(hashlib.md5(body).digest()).decode() for body in (b"", BODY))
    server.put("/a.bin", BODY, x_goog_hash=f"md5={right}")
    assert remote.fetch(look_up(server)).read_bytes() == BODY
    server.put("/b.bin", BODY, x_goog_hash=f"crc32c=AAAAAA==,md5={wrong}")
    with pytest.raises(RemoteFileError, match="md5 is"):
        remote.fetch(look_up(server, "/b.bin"))


def test_a_server_that_ignores_ranges_is_noticed(server, monkeypatch):
    server.put("/a.bin", BODY)
    file = look_up(server)
    server.script("/a.bin", always=Fault(no_range=True))
    with pytest.raises(RemoteFileError, match="200 instead of 206"):
        remote.read_range(file, 5, 10)
    monkeypatch.setattr(transport, "PART", 1000)
    assert remote.fetch(file).read_bytes() == BODY  # by one request of all of it


def test_a_body_that_is_encoded_is_refused(server):
    server.put("/a.bin", BODY, Content_Encoding="gzip")
    with pytest.raises(RemoteFileError, match="encoded"):
        look_up(server)


def test_a_look_that_only_get_answers(server):
    server.put("/a.bin", BODY)
    file = look_up(server)
    for status in (400, 403, 405, 501):
        server.script("/a.bin", status, heads=True)
        assert look_up(server) == file
    server.put("/empty.bin", b"")
    server.script("/empty.bin", 405, heads=True)
    assert look_up(server, "/empty.bin").size == 0
    assert remote.fetch(look_up(server, "/empty.bin")).read_bytes() == b""


def test_redirects_are_followed_and_loops_end(server):
    server.put("/a.bin", BODY)
    server.script("/b.bin", always=Fault(status=302, location="/a.bin"), heads=True)
    assert remote.fetch(look_up(server, "/b.bin")).read_bytes() == BODY
    server.script("/c.bin", always=Fault(status=302, location="/c.bin"), heads=True)
    with pytest.raises(RemoteFileError):
        look_up(server, "/c.bin")
    assert server.count("/c.bin", "HEAD") < 20


def test_nobody_listening_is_tried_again(server, monkeypatch):
    monkeypatch.setenv("TOKENPIPE_RETRIES", "2")
    with FaultServer() as other:
        url = other.put("/a.bin", BODY)
    with pytest.raises(RemoteFileError, match="3 tries"):
        remote.look_up(url)


# What is asked for --------------------------------------------------------------------------------------------------


@given(ranges=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)).map(sorted).map(tuple), max_size=12))
def test_ranges_are_what_slices_are(ranges):
    fsspec.filesystem("memory").pipe("/ranges/a.bin", BODY)
    file = remote.look_up("memory://ranges/a.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "NEAR", 100)
        patch.setattr(transport, "PART", 700)
        assert remote.read_ranges(file, ranges) == [BODY[start:stop] for start, stop in ranges]


def test_near_ranges_are_one_request_and_far_ones_several(server):
    big = random.Random(4).randbytes(400_000)
    server.put("/a.bin", big)
    file = look_up(server)
    wanted = [(300_000, 300_010), (0, 10), (60_000, 60_010), (5, 20), (7, 7)]
    assert remote.read_ranges(file, wanted) == [big[start:stop] for start, stop in wanted]
    assert sorted(server.ranges("/a.bin")) == ["bytes=0-60009", "bytes=300000-300009"]


def test_a_large_file_is_fetched_in_parts_and_a_part_again(server, monkeypatch):
    monkeypatch.setattr(transport, "PART", 100)
    server.put("/a.bin", BODY)
    file = look_up(server)
    server.script("/a.bin", 500, Fault(reset=10), 503)
    assert remote.fetch(file).read_bytes() == BODY
    assert server.count() == 33
    assert len(set(server.ranges("/a.bin"))) == 30


def test_a_range_beyond_the_file_is_refused(server):
    server.put("/a.bin", BODY)
    for start, stop in ((0, 3001), (-1, 5), (7, 6)):
        with pytest.raises(OutOfRangeError, match="3000"):
            remote.read_range(look_up(server), start, stop)


def test_folders_and_patterns_are_listed_in_order():
    memory = fsspec.filesystem("memory")
    for name in ("b.bin", "a.bin", "é.bin", "B.bin", "c.txt", "deep/d.bin"):
        memory.pipe(f"/listed/{name}", name.encode())
    names = ["B.bin", "a.bin", "b.bin", "c.txt", "é.bin"]
    assert remote.list_urls("memory://listed") == [f"memory://listed/{name}" for name in names]
    assert remote.list_urls("memory://listed/*.bin") == [f"memory://listed/{name}" for name in names if "bin" in name]
    assert "memory://listed/deep/d.bin" in remote.list_urls("memory://listed/**/*.bin")
    assert remote.list_urls("memory://listed/*.none") == []
    assert remote.list_urls("memory://listed/a.bin") == ["memory://listed/a.bin"]
    assert remote.list_files("memory://listed") == [remote.look_up(f"memory://listed/{name}") for name in names]
    with pytest.raises(RemoteFileError) as raised:
        remote.list_urls("memory://not-there")
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(RemoteFileError, match="a folder"):
        remote.look_up("memory://listed/deep")


def test_a_page_of_links_is_listed(server):
    for name in ("b.bin", "a.bin"):
        server.put(f"/folder/{name}", BODY)
    assert remote.list_urls(server.url("/folder/")) == [server.url("/folder/a.bin"), server.url("/folder/b.bin")]
    assert [file.size for file in remote.list_files(server.url("/folder/*.bin"))] == [3000, 3000]


def test_an_upload_that_came_short_is_done_again(server, tmp_path):
    local = tmp_path / "a.bin"
    local.write_bytes(BODY)
    server.script("/up.bin", Fault(short=5))
    remote.upload(local, server.url("/up.bin"))
    assert server.body("/up.bin") == BODY
    assert server.count(method="PUT") == 2
    server.script("/up.bin", always=Fault(status=403))
    with pytest.raises(RemoteFileError, match="uploaded: 403"):
        remote.upload(local, server.url("/up.bin"))
    with pytest.raises(TokenFileError, match="none"):
        remote.upload(tmp_path / "none", server.url("/up.bin"))
    with pytest.raises(RemoteFileError, match="folder"):
        remote.upload(local, server.url("/folder/"))
    remote.upload(local, "memory://uploaded/a.bin")
    assert fsspec.filesystem("memory").cat("/uploaded/a.bin") == BODY


# URLs ---------------------------------------------------------------------------------------------------------------


def test_urls_are_shown_without_what_may_be_a_secret():
    for url, text in {
        "https://host/a.bin": "https://host/a.bin",
        "https://user:pass@host:80/a.bin?X-Amz-Signature=abc#x": "https://host:80/a.bin",
        "s3://key:sec/ret@bucket/a.bin": "s3://bucket/a.bin",
        "ftp://u:p@ss@host/a@b": "ftp://host/a@b",
        "https://host:8080/a@b": "https://host:8080/a@b",
        "a.bin": "a.bin",
    }.items():
        assert remote.shown(url) == text
    assert [remote.is_remote(path) for path in ("s3://b/k", "HTTPS://h", "file:///a", "/a/b", "a:b", "")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_signature_does_not_make_another_file_and_an_id_does():
    assert urls.identity("https://u:p@h/f?X-Amz-Signature=1&X-Amz-Date=2") == urls.identity("https://h/f?sig=8")
    assert urls.identity("https://h/f?sv=1&se=2&sig=3&id=1") == urls.identity("https://h/f?id=1")
    for one, other in (("https://h/f?id=1", "https://h/f?id=2"), ("https://h/f?se=1", "https://h/f?se=2")):
        assert urls.identity(one) != urls.identity(other)
    assert len({urls.identity(f"s3://b/k{end}") for end in ("", "#1", "#2", "?sig=1", "?sig=2")}) == 5


def test_no_secret_gets_out(server, monkeypatch, caplog):
    monkeypatch.setenv("TOKENPIPE_RETRIES", "1")
    server.put("/a.bin", BODY)
    url = server.url("/a.bin?X-Amz-Signature=s3cr3t&token=t0ps3cr3t").replace("//", "//name:passw0rd@")
    remote.look_up(url)
    assert "Authorization" in server.headers[0]
    server.script("/b.bin", always=Fault(status=503), heads=True)
    elsewhere = Fault(status=302, location="/b.bin?Signature=0therS3cret")
    for fault in (404, 503, Fault(reset=0), Fault(short=5), Fault(reset=9), elsewhere):
        server.script("/a.bin", always=fault if isinstance(fault, Fault) else Fault(status=fault), heads=True)
        for call in (remote.look_up, remote.list_urls, lambda url: remote.fetch(remote.RemoteFile(url, 3000, ""))):
            try:
                call(url)
            except (RemoteFileError, ConfigurationError) as error:
                chain = [error, error.__cause__, error.__context__]
                told = repr([(e, str(e), vars(e)) for e in chain if e]) + "".join(traceback.format_exception(error))
                told += repr(pickle.dumps(error)) + caplog.text
                assert not any(secret in told for secret in ("passw0rd", "s3cr3t", "t0ps3cr3t", "0therS3cret")), told
    assert "s3cr3t" not in repr(remote.RemoteFile(url, 1, ""))


def test_an_error_travels_between_processes():
    error = RemoteFileError(errno.EIO, "text", "s3://b/k")
    error.attempts = ("one", "two")
    again = pickle.loads(pickle.dumps(error))
    assert (again.args, again.filename, again.attempts) == (error.args, error.filename, error.attempts)


def test_what_cannot_be_opened_is_said_before_anything_is_asked():
    for url, text in {
        "simplecache::s3://bucket/key": "chained",
        "nosuch://bucket/key": "'nosuch'",
    }.items():
        for call in (remote.look_up, remote.list_urls):
            with pytest.raises(ConfigurationError, match=text):
                call(url)
    for name in ("TOKENPIPE_RETRIES", "TOKENPIPE_RETRY_SECONDS", "TOKENPIPE_REQUEST_SECONDS"):
        for value in ("", "many", "-1", "nan", "inf"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(ConfigurationError, match=name):
                    remote.look_up("memory://listed/a.bin")


def test_a_package_that_is_missing_is_named_and_none_is_imported_early(tmp_path):
    script = """
import sys
sys.modules.update(s3fs=None, gcsfs=None, aiohttp=None)
from tokenpipe.datapipes import remote
assert not {"botocore", "google.auth", "fsspec"} & set(sys.modules), sorted(sys.modules)
for url in ("s3://b/k", "gs://b/k", "https://h/f"):
    try:
        remote.look_up(url)
    except ValueError as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    for line, needed in zip(done.stdout.splitlines(), ("tokenpipe[s3]", "tokenpipe[gs]", "aiohttp"), strict=True):
        assert line.startswith("ConfigurationError") and needed in line


# Processes ----------------------------------------------------------------------------------------------------------


def _in_a_child(file: remote.RemoteFile, at: int, answers) -> None:
    try:
        answers.put((os.getpid(), remote.read_range(file, at, at + 10), remote.look_up(file.url) == file))
    except BaseException as error:
        answers.put((os.getpid(), repr(error), False))


def test_a_forked_child_reads_where_its_parent_has_read_before(server):
    server.put("/a.bin", BODY)
    file = look_up(server)
    assert remote.read_range(file, 0, 10) == BODY[:10]  # the loop's thread lives, and a connection is open
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=_in_a_child, args=(file, at, answers)) for at in (100, 200)]
    for child in children:
        child.start()
    for _ in range(20):
        assert remote.read_range(file, 0, 10) == BODY[:10]  # the parent's connections are still its own
    got = {answers.get()[1:] for _ in children}
    for child in children:
        child.join()
    assert got == {(BODY[100:110], True), (BODY[200:210], True)}


def test_a_file_like_system_of_ones_own_is_read(tmp_path):
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Mine(DirFileSystem):
        protocol = "mine"

        def __init__(self, **options):
            super().__init__(path=str(tmp_path), fs=LocalFileSystem(), **options)

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("mine://")

    fsspec.register_implementation("mine", Mine, clobber=True)
    Path(tmp_path, "a.bin").write_bytes(BODY)
    file = remote.look_up("mine://a.bin")
    assert file.size == 3000 and file.version
    assert remote.read_range(file, 3, 8) == BODY[3:8]
    assert remote.fetch(file).read_bytes() == BODY
