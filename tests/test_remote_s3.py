"""S3 as its drivers speak it: through s3fs to a server of moto's on loopback."""

import errno
import hashlib
import logging
import multiprocessing
import random
from pathlib import Path

import pytest

from fault_server import Fault, FaultServer
from tokenpipe.datapipes import remote
from tokenpipe.datapipes.errors import RemoteFileError
from tokenpipe.datapipes.remote import attempts, drivers, file_systems, transport
from tokenpipe.datapipes.remote.file_systems import file_system

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

BODY = random.Random(5).randbytes(300_000)
BUCKET = "s3://shards"


@pytest.fixture(scope="module")
def endpoint():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        import fsspec.config

        options = {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
        patch.setitem(fsspec.config.conf, "s3", options)
        file_system(BUCKET).mkdir("shards")
        yield options["endpoint_url"]
    server.stop()


@pytest.fixture
def put(endpoint, tmp_path, monkeypatch):
    """put(name, body): its URL. The shard cache is empty."""
    monkeypatch.setenv("TOKENPIPE_SHARDS", str(tmp_path / "shards"))

    def store(name: str, body: bytes = BODY) -> str:
        file_system(BUCKET).pipe_file(f"shards/{name}", body)
        return f"{BUCKET}/{name}"

    return store


def test_a_file_is_looked_up_read_and_fetched(put, monkeypatch):
    file = remote.look_up(put("a/x.bin"))
    assert (file.size, file.version.strip('"')) == (len(BODY), hashlib.md5(BODY).hexdigest())
    ranges = [(0, 10), (200_000, 200_500), (299_999, 300_000), (5, 5)]
    assert remote.read_ranges(file, ranges) == [BODY[start:stop] for start, stop in ranges]
    monkeypatch.setattr(transport, "PART", 70_000)
    assert remote.fetch(file).read_bytes() == BODY


def test_a_listing_says_all_that_a_look_up_does(put, monkeypatch):
    names = [f"listed/{k:02d}.bin" for k in range(12)]
    files = [remote.look_up(put(name, name.encode())) for name in reversed(names)]
    put("listed/deep/x.bin")
    put("listed/notes.txt")
    monkeypatch.setattr(drivers, "found", lambda url: pytest.fail(f"{url} was looked up for itself"))
    assert remote.list_files(f"{BUCKET}/listed/*.bin") == files[::-1]
    assert remote.list_urls(f"{BUCKET}/listed/") == [
        *(f"{BUCKET}/{name}" for name in names),
        f"{BUCKET}/listed/notes.txt",
    ]
    assert f"{BUCKET}/listed/deep/x.bin" in remote.list_urls(f"{BUCKET}/listed/**/*.bin")


def test_a_listing_is_never_of_an_earlier_look(put):
    put("fresh/a.bin", b"1")
    assert len(remote.list_urls(f"{BUCKET}/fresh")) == 1
    put("fresh/b.bin", b"22")
    assert [file.size for file in remote.list_files(f"{BUCKET}/fresh")] == [1, 2]
    put("fresh/a.bin", b"333")
    assert remote.look_up(f"{BUCKET}/fresh/a.bin").size == 3


def test_a_wrong_md5_is_seen(put, monkeypatch):
    file = remote.look_up(put("md5/x.bin"))
    right, bodies = drivers._s3_read, []

    async def zeros(*arguments):
        body = await right(*arguments)
        bodies.append(body)
        return body._replace(data=bytes(len(body.data)))

    monkeypatch.setattr(drivers, "_s3_read", zeros)
    with pytest.raises(RemoteFileError, match=f"and {hashlib.md5(BODY).hexdigest()} was announced"):
        remote.fetch(file)
    assert len(bodies) == 3 and bodies[0].data == BODY


def test_an_etag_that_is_no_md5_is_not_taken_for_one(put, tmp_path):
    fs = file_system(BUCKET)
    upload = fs.call_s3("create_multipart_upload", Bucket="shards", Key="parts.bin")["UploadId"]
    big = BODY * 18  # a part is 5 MiB at least
    parts = []
    for number, body in enumerate((big, BODY), 1):
        done = fs.call_s3(
            "upload_part", Bucket="shards", Key="parts.bin", UploadId=upload, PartNumber=number, Body=body
        )
        parts.append({"ETag": done["ETag"], "PartNumber": number})
    fs.call_s3(
        "complete_multipart_upload", Bucket="shards", Key="parts.bin", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    file = remote.look_up(f"{BUCKET}/parts.bin")
    assert file.version.endswith('-2"')
    assert remote.fetch(file).read_bytes() == big + BODY
    digest = hashlib.md5(BODY).hexdigest()
    assert drivers._s3_sum({"ETag": f'"{digest}"'}, "bucket") == ("md5", digest)
    assert drivers._s3_sum({"ETag": f'"{digest}"', "ServerSideEncryption": "AES256"}, "bucket") == ("md5", digest)
    for keyed in ({"ServerSideEncryption": "aws:kms"}, {"SSECustomerAlgorithm": "AES256"}):
        assert drivers._s3_sum({"ETag": f'"{digest}"', **keyed}, "bucket") is None


def test_a_file_that_has_changed_is_not_read(put):
    file = remote.look_up(put("changed.bin"))
    put("changed.bin", BODY[::-1])
    for call in (lambda: remote.read_range(file, 0, 5), lambda: remote.fetch(file)):
        with pytest.raises(RemoteFileError, match="changed") as raised:
            call()
        assert raised.value.errno == errno.ESTALE


def test_what_is_not_there_is_named_and_not_asked_for_again(put):
    put("there/x.bin")
    for url in (f"{BUCKET}/none.bin", "s3://no-such-bucket/x.bin", f"{BUCKET}/there"):
        with pytest.raises(RemoteFileError, match=url) as raised:
            remote.look_up(url)
        assert raised.value.errno == errno.ENOENT and len(raised.value.attempts) == 1
    with pytest.raises(RemoteFileError, match="bucket"):
        remote.look_up(BUCKET)
    for url in (f"{BUCKET}/nothing/", "s3://no-such-bucket/"):
        with pytest.raises(RemoteFileError) as raised:
            remote.list_urls(url)
        assert raised.value.errno == errno.ENOENT


def test_a_server_that_is_gone_is_asked_as_often_as_is_set(put, endpoint, monkeypatch):
    import fsspec.config

    file = remote.look_up(put("gone.bin"))
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.001)
    monkeypatch.setenv("TOKENPIPE_RETRIES", "2")
    monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "2")  # file systems of their own
    monkeypatch.setitem(fsspec.config.conf, "s3", {**fsspec.config.conf["s3"], "endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(RemoteFileError) as raised:
        remote.read_range(file, 0, 5)
    assert len(raised.value.attempts) == 3


def test_an_upload_is_whole(put, tmp_path):
    local = Path(tmp_path, "up.bin")
    for body in (BODY, b"", BODY[:7]):
        local.write_bytes(body)
        remote.upload(local, f"{BUCKET}/up/x.bin")
        file = remote.look_up(f"{BUCKET}/up/x.bin")
        assert file.size == len(body)
        assert remote.fetch(file).read_bytes() == body


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """A server of faults in the place of S3: for objects, it answers as S3 does."""
    import fsspec.config

    monkeypatch.setenv("TOKENPIPE_SHARDS", str(tmp_path / "shards"))
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.001)
    with FaultServer() as server:
        options = {"endpoint_url": server.url(""), "key": "testing", "secret": "testing"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        monkeypatch.setattr(file_systems, "_made", {})
        yield server


FAULTS = {
    "500": 500,
    "503": 503,
    "429": 429,
    "reset before the answer": Fault(reset=0),
    "reset in the body": Fault(reset=100),
    "short body": Fault(short=1),
    "stalled": Fault(stall=30.0),
    "zeros": Fault(zeros=True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_passes_is_tried_again_as_often_as_it_takes_and_no_more(faulty, monkeypatch, fault):
    faulty.put("/b/x.bin", BODY)
    file = remote.look_up("s3://b/x.bin")
    if silent := isinstance(fault, Fault) and fault.stall:
        monkeypatch.setenv("TOKENPIPE_REQUEST_SECONDS", "0.5")
    faulty.script("/b/x.bin", fault, fault)
    assert remote.fetch(file).read_bytes() == BODY
    assert faulty.count("/b/x.bin") == 3 or silent


def test_an_answer_that_stays_is_asked_for_as_often_as_is_set(faulty, monkeypatch):
    faulty.put("/b/x.bin", BODY)
    file = remote.look_up("s3://b/x.bin")
    monkeypatch.setenv("TOKENPIPE_RETRIES", "2")
    for status, tries, number in ((503, 3, errno.EIO), (403, 1, errno.EACCES), (404, 1, errno.ENOENT)):
        faulty.script("/b/x.bin", always=Fault(status=status))
        faulty.forget()
        with pytest.raises(RemoteFileError, match=str(status)) as raised:
            remote.read_range(file, 5, 10)
        assert (len(raised.value.attempts), faulty.count(), raised.value.errno) == (tries, tries, number)


def test_what_a_busy_store_says_is_tried_again_whatever_its_status():
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    for status, code, again in (
        (400, "RequestTimeout", True),
        (503, "SlowDown", True),
        (400, "InvalidRange", False),
        (400, "ExpiredToken", False),
        (403, "SignatureDoesNotMatch", False),
    ):
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}}}
        error = translate_boto_error(ClientError(answer, "GetObject"))
        assert attempts._Failed(error, "s3://b/k").again is again, code


def _in_a_child(file, said) -> None:
    try:
        said.put((remote.read_range(file, 0, 100), remote.look_up(file.url) == file))
    except BaseException as error:
        said.put(repr(error))


def test_a_forked_child_reads_where_its_parent_has_read_before(put):
    file = remote.look_up(put("forked.bin"))
    assert remote.read_range(file, 0, 10) == BODY[:10]
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    children = [context.Process(target=_in_a_child, args=(file, said)) for _ in range(2)]
    for child in children:
        child.start()
    assert [said.get() for _ in children] == [(BODY[:100], True)] * 2
    for child in children:
        child.join()
    assert remote.read_range(file, 10, 20) == BODY[10:20]
