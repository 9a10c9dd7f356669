"""Single requests, no retries: http(s) and S3 spoken to directly, so that status, ETag and checksums of each answer are
seen; every other file system through fsspec's common calls.

All give bytes of the length that was asked for, or raise: what the driver raises, or an Answer.
"""

import base64
import errno
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from .attempts import Answer, longest_seconds, request_seconds
from .file_systems import S3, WEB, file_system, path_of
from .urls import RemoteFile, protocol_of

__all__ = ["Body", "Sum", "described", "found", "in_time", "read", "sum_of", "web_put"]


_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "checksum",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)
"""What drivers call a file's version, the best first."""


WHOLE_ALONE = (
    "the server sends whole files when asked for a part (200 instead of 206); io='mmap' or 'pread' takes whole files"
)


class Sum(NamedTuple):
    """What a whole file's hash is known to be. kind: a name in hashlib, or crc32c."""

    kind: str
    digest: str


class Body(NamedTuple):
    data: bytes
    whole: "Sum | None" = None
    """Of the whole file, where this answer says it."""


def found(url: str) -> RemoteFile:
    """One look at a file."""
    fs, protocol = file_system(url), protocol_of(url)
    if protocol in WEB:
        return _run(fs, _web_found, fs, url)
    if protocol in S3:
        return _run(fs, _s3_found, fs, url)

    def look() -> "dict[str, Any]":
        fs.invalidate_cache()
        return fs.info(path_of(fs, url))

    return described(in_time(look), url)


def read(file: RemoteFile, start: int, stop: int, timed: bool = True) -> Body:
    """Bytes [start, stop), by one request. timed: it has `longest_seconds()`, also where bytes trickle in."""
    fs, protocol = file_system(file.url), protocol_of(file.url)
    if protocol in WEB:
        return _run(fs, _web_read, fs, file, start, stop, timed=timed)
    if protocol in S3:
        return _run(fs, _s3_read, fs, file, start, stop)
    data = in_time(lambda: fs.cat_file(path_of(fs, file.url), start=start, end=stop))
    return Body(_measured(bytes(data), start, stop), sum_of(file.version))


def _measured(data: bytes, start: int, stop: int) -> bytes:
    if len(data) != stop - start:
        raise Answer(f"{len(data)} bytes came of [{start}, {stop}), which has {stop - start}", again=True)
    return data


# fsspec's common calls ------------------------------------------------------------------------------------------------


def in_time(call: "Callable[[], Any]", seconds: "float | None" = None) -> Any:
    """What a call of an unknown driver gives; TimeoutError where it hangs, and it is left to itself."""
    seconds = request_seconds() if seconds is None else seconds
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="tokenpipe remote request", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def described(info: "dict[str, Any]", url: str) -> RemoteFile:
    """What a driver says of a file, or of one in a listing."""
    if info.get("type") == "directory":
        raise Answer("it is a folder, not a file", no=errno.EISDIR)
    if not isinstance(size := info.get("size"), int):
        raise Answer("the file system does not say how large it is")
    return RemoteFile(url, size, _version(info))


def _version(info: "dict[str, Any]") -> str:
    if md5 := info.get("md5Hash"):  # Google's
        return f"md5:{base64.b64decode(md5).hex()}"
    if crc := info.get("crc32c"):
        return f"crc32c:{base64.b64decode(crc).hex()}"
    if lfs := info.get("lfs"):  # Hugging Face's
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
        if sha256:
            return f"sha256:{sha256}"
    for name in _VERSIONS:
        if (value := info.get(name)) not in (None, ""):
            # a time is one in a listing and another kind of one in a look
            return repr(value.timestamp()) if isinstance(value, datetime) else str(value)
    return ""


def sum_of(version: str) -> "Sum | None":
    kind, colon, digest = version.partition(":")
    return Sum(kind, digest) if colon and kind in ("md5", "sha256", "crc32c") else None


def _run(fs: Any, coroutine: "Callable[..., Any]", *arguments: Any, timed: bool = True) -> Any:
    """In the loop of this process's file systems."""
    from fsspec.asyn import sync

    return sync(fs.loop, coroutine, *arguments, timeout=longest_seconds() if timed else None)


# http and https -------------------------------------------------------------------------------------------------------


def _web_request(fs: Any, headers: "dict[str, str]") -> "dict[str, Any]":
    import aiohttp

    seconds = request_seconds()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    # a body in another encoding has another length
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity", **headers}
    return {"allow_redirects": True, "timeout": timeout, **fs.kwargs, "headers": headers}


def _refused(answer: Any) -> Answer:
    reason = f"{answer.status} {answer.reason or ''}".strip()
    return Answer(reason, answer.status, retry_after=answer.headers.get("Retry-After"))


async def _web_found(fs: Any, url: str) -> RemoteFile:
    session = await fs.set_session()
    async with session.head(fs.encode_url(url), **_web_request(fs, {})) as answer:
        if answer.status < 300 and "Content-Length" in answer.headers:
            return RemoteFile(url, _length(answer), _web_version(answer))
        if answer.status >= 300 and answer.status not in (400, 401, 403, 405, 501):
            raise _refused(answer)
    # a signed URL is signed for one method; some servers know none but GET
    async with session.get(fs.encode_url(url), **_web_request(fs, {"Range": "bytes=0-0"})) as answer:
        size = re.fullmatch(r"bytes (?:0-0|\*)/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status in (206, 416) and size:
            return RemoteFile(url, int(size[1]), _web_version(answer))
        if answer.status >= 300:
            raise _refused(answer)
        if answer.status == 200 and "Content-Length" in answer.headers:
            answer.close()  # not the rest of it
            return RemoteFile(url, _length(answer), _web_version(answer))
    raise Answer("the server does not say how large it is (no Content-Length)")


def _length(answer: Any) -> int:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise Answer(f"the server sends it encoded ({answer.headers['Content-Encoding']}), though asked not to")
    text = answer.headers["Content-Length"]
    if not (text.isascii() and text.isdigit()):
        raise Answer(f"the server says that its length is {text!r}", again=True)
    return int(text)


def _web_version(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified", ""))


async def _web_read(fs: Any, file: RemoteFile, start: int, stop: int) -> Body:
    session, whole = await fs.set_session(), stop - start == file.size
    headers = {} if whole else {"Range": f"bytes={start}-{stop - 1}"}
    if file.version.startswith('"'):  # a weak one matches nothing
        headers["If-Match"] = file.version
    async with session.get(fs.encode_url(file.url), **_web_request(fs, headers)) as answer:
        if answer.status not in (200, 206):
            if answer.status == 416:
                raise _changed(f"the server has no bytes [{start}, {stop}) of it")
            raise _refused(answer)
        if file.version and (version := _web_version(answer)) and version != file.version:
            raise _changed(f"ETag {version} instead of {file.version}")
        if not whole and answer.status == 200:
            raise Answer(WHOLE_ALONE, no=errno.ENOTSUP)
        if answer.status == 206:
            said = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("Content-Range", ""))
            if not said or (int(said[1]), int(said[2]) + 1) != (start, stop):
                raise Answer(f"Content-Range {answer.headers.get('Content-Range')!r} for [{start}, {stop})", again=True)
            if said[3] not in ("*", str(file.size)):
                raise _changed(f"it has {said[3]} bytes instead of {file.size}")
        if "Content-Length" in answer.headers and (length := _length(answer)) != stop - start:
            raise (
                _changed(f"it has {length} bytes instead of {file.size}")
                if whole
                else Answer(f"{length} bytes came of [{start}, {stop})", again=True)
            )
        pieces, count = [], 0
        async for piece in answer.content.iter_any():
            count += len(piece)
            if count > stop - start:
                raise Answer(f"more than {stop - start} bytes came of [{start}, {stop})", again=True)
            pieces.append(piece)
        if count != stop - start:
            raise Answer(f"{count} bytes came of [{start}, {stop}), which has {stop - start}", again=True)
        return Body(b"".join(pieces), _web_sum(answer, whole))


def web_put(url: str, local: Path) -> None:
    """Uploads a whole file, with its length in front: signed URLs want that."""

    async def put(fs: Any) -> None:
        session = await fs.set_session()
        with local.open("rb") as body:
            async with session.put(fs.encode_url(url), data=body, **_web_request(fs, {})) as answer:
                if answer.status >= 300:
                    raise _refused(answer)

    fs = file_system(url)
    _run(fs, put, fs, timed=False)


def _changed(how: str) -> Answer:
    return Answer(f"it has changed since it was looked up: {how}", no=errno.ESTALE)


def _web_sum(answer: Any, whole: bool) -> "Sum | None":
    sums = dict(
        part.strip().partition("=")[::2] for part in ",".join(answer.headers.getall("x-goog-hash", [])).split(",")
    )
    # of a part, this one is the part's by the standard and the whole file's by some servers
    sums = {**({"md5": answer.headers.get("Content-MD5", "")} if whole else {}), **sums}
    for kind in ("md5", "crc32c"):
        if value := sums.get(kind):
            try:
                return Sum(kind, base64.b64decode(value, validate=True).hex())
            except ValueError:
                return None
    return None


# S3 -------------------------------------------------------------------------------------------------------------------


async def _s3_found(fs: Any, url: str) -> RemoteFile:
    bucket, key, version = fs.split_path(path_of(fs, url))
    if not key:
        raise Answer("it is a bucket, not a file", no=errno.EISDIR)
    answer = await fs._call_s3(
        "head_object", fs.kwargs, Bucket=bucket, Key=key, **({"VersionId": version} if version else {})
    )
    return RemoteFile(url, int(answer["ContentLength"]), str(answer.get("ETag", "")))


async def _s3_read(fs: Any, file: RemoteFile, start: int, stop: int) -> Body:
    bucket, key, version = fs.split_path(path_of(fs, file.url))
    asked = {} if stop - start == file.size else {"Range": f"bytes={start}-{stop - 1}"}
    if file.version:
        asked["IfMatch"] = file.version
    if version:
        asked["VersionId"] = version
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **asked)
    body = answer["Body"]
    try:
        data = await body.read()
    finally:
        body.close()
    if (etag := answer.get("ETag", "")) != file.version and file.version and etag:
        raise _changed(f"ETag {etag} instead of {file.version}")
    return Body(_measured(data, start, stop), _s3_sum(answer, bucket))


def _s3_sum(answer: "dict[str, Any]", bucket: str) -> "Sum | None":
    """The ETag is the MD5 of what was put in one part and not under a key of the user's own."""
    etag = str(answer.get("ETag", "")).strip('"').lower()
    keyed = answer.get("SSECustomerAlgorithm") or str(answer.get("ServerSideEncryption") or "AES256") != "AES256"
    known = re.fullmatch("[0-9a-f]{32}", etag) and not keyed and not bucket.endswith("--x-s3")
    return Sum("md5", etag) if known else None
