"""One request, tried until it is answered: what is tried again, how often, and what is said when that was in vain.

Tried again: 408, 425, 429 and 5xx, connections that are reset, refused or silent, bodies that are short, and what
stores say when they are busy (SlowDown). Not tried again: 403, 404 and every other 4xx, a file that has changed, an
argument that is wrong. Between two tries passes a random part of a time that doubles (full jitter: the ranks of a run,
which were all refused at once, come back one by one), or as long as Retry-After says where that is more. Both how many
tries and how many seconds all of them take are bounded.

A driver's own tries are set to one where they can be (file_systems.py): eight of ours times five of its would be forty.
"""

import contextlib
import email.utils
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import ConfigurationError, RemoteFileError
from .urls import scrubbed, shown

__all__ = ["Answer", "GivenUp", "attempted", "longest_seconds", "number_set", "request_seconds"]

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
_BUSY = {408, 425, 429}
_BUSY_CODES = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "ServiceUnavailable", "InternalError"}
_FINAL = (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, ImportError)
_FINAL_NAMES = {
    "NoCredentialsError",
    "ParamValidationError",
    "PartialCredentialsError",
    "SSLCertVerificationError",
    "TooManyRedirects",
}
_NO_STATUS: "tuple[int, str, Any]" = (0, "", {})
_NOT_THERE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_ERRNO = {
    **dict.fromkeys((401, 403), errno.EACCES),
    **dict.fromkeys((404, 410), errno.ENOENT),
    412: errno.ESTALE,
}
_random = random.SystemRandom()  # a forked process must not draw what its parent draws

T = TypeVar("T")


class Answer(Exception):
    """What a server answered that is no body. status: 0 where it is no status that is wrong but what came with it.

    again: whether another try may do better. retry_after: the header.
    """

    def __init__(self, text: str, status: int = 0, again: bool = False, retry_after: "str | None" = None, no: int = 0):
        super().__init__(text)
        self.status, self.again, self.retry_after, self.errno = status, again, retry_after, no


class GivenUp(Exception):
    """Another request of the same call has failed."""


def number_set(variable: str, default: float, least: float = 0.0) -> float:
    """A number from the environment. Raises ConfigurationError."""
    if (text := os.environ.get(variable)) is None:
        return default
    with contextlib.suppress(ValueError):
        if least <= (number := float(text)) < float("inf"):
            return number
    raise ConfigurationError(f"{variable} is {text!r}; a number from {least:g} on would do, as {default:g}")


def request_seconds() -> float:
    """How long a connection may be silent. Raises ConfigurationError."""
    return number_set("TOKENPIPE_REQUEST_SECONDS", 60.0, 0.01)


def longest_seconds() -> float:
    """How long one request may take that is not silent. Raises ConfigurationError."""
    return max(number_set("TOKENPIPE_RETRY_SECONDS", 300.0), request_seconds())


def attempted(
    request: "Callable[[], T]", url: str, doing: str, stop: "threading.Event | None" = None, most: "int | None" = None
) -> T:
    """What `request` gives, tried until it gives something.

    `stop` ends the pauses early, with GivenUp. Raises RemoteFileError, ConfigurationError.
    """
    retries, seconds = int(number_set("TOKENPIPE_RETRIES", 8)), number_set("TOKENPIPE_RETRY_SECONDS", 300.0)
    retries = retries if most is None else min(retries, most)
    begun, attempts = time.monotonic(), []
    stop = stop or threading.Event()
    while True:
        if stop.is_set():
            raise GivenUp
        failed = None
        try:
            return request()
        except (RemoteFileError, ConfigurationError, GivenUp):
            raise
        except Exception as error:
            failed = _Failed(error, url)
        # outside of the except block: the driver's exception, which shows the URL as it is, is not the error's context
        passed = time.monotonic() - begun
        attempts.append(f"{failed.text} ({passed:.1f} s)")
        pause = _random.uniform(0.0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (len(attempts) - 1)))
        pause = max(pause, failed.retry_after)
        if failed.again and len(attempts) <= retries and passed + pause <= seconds:
            stop.wait(pause)
            continue
        raise _error(failed, url, doing, attempts, pause if failed.again and len(attempts) <= retries else None)


def _error(failed: "_Failed", url: str, doing: str, attempts: "list[str]", pause: "float | None") -> RemoteFileError:
    tries = f" after {len(attempts)} tries" if len(attempts) > 1 else ""
    late = "; the next would be later than TOKENPIPE_RETRY_SECONDS allows" if pause is not None else ""
    if pause is not None and failed.retry_after:
        late += f" (the server asks for {failed.retry_after:.0f} s)"
    error = RemoteFileError(failed.errno, f"cannot be {doing}{tries}: {', '.join(attempts)}{late}", shown(url))
    error.attempts = tuple(attempts)
    return error


class _Failed:
    """An exception of a driver's, understood. text: what happened. again: whether another try may do better."""

    def __init__(self, error: Exception, url: str) -> None:
        chain = list(_chain(error))
        names = {kind.__name__ for e in chain for kind in type(e).__mro__}
        status, code, headers = next(filter(None, map(_status, chain)), _NO_STATUS)
        if "ClientPayloadError" in names:  # a body that is cut: aiohttp's own 400, not the server's
            status = 0
        said = scrubbed(str(error), url)
        self.text = said if isinstance(error, Answer) else f"{type(error).__name__}: {said}".removesuffix(": ")
        self.errno, self.retry_after = _ERRNO.get(status, errno.EIO), 0.0
        if status == 412:
            self.text = "it has changed since it was looked up (412)"
        elif status and not isinstance(error, Answer):
            self.text = f"{status}{f' {code}' if code and not code.isdigit() else ''} ({self.text})"
        if status:
            self.again = status in _BUSY or status >= 500 or code in _BUSY_CODES
        elif isinstance(error, Answer):
            self.again, self.errno = error.again, error.errno or errno.EIO
        elif isinstance(error, _NOT_THERE):
            self.again = False
            self.errno = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES)
        else:
            self.again = not names & _FINAL_NAMES and not isinstance(error, _FINAL)
        if self.again:
            self.retry_after = _seconds(headers.get("Retry-After") or headers.get("retry-after"))


def _chain(error: "BaseException | None") -> "Iterator[BaseException]":
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> "tuple[int, str, Any] | None":
    """HTTP status, a store's own code and the headers, as the drivers that there are keep them."""
    if isinstance(error, Answer):
        return (error.status, "", {"Retry-After": error.retry_after}) if error.status else None
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        meta = response.get("ResponseMetadata", {})
        status, code = meta.get("HTTPStatusCode", 0), str(response.get("Error", {}).get("Code", ""))
        return (int(status), code, meta.get("HTTPHeaders", {})) if status else None
    own = "status" if hasattr(error, "status") else "code"  # which aiohttp warns of
    for status in (getattr(response, "status_code", None), getattr(error, own, None)):
        if isinstance(status, int | str) and str(status).isdigit() and 300 <= int(status) < 600:
            return int(status), "", getattr(response, "headers", None) or getattr(error, "headers", None) or {}
    return None


def _seconds(retry_after: "str | None") -> float:
    """What a Retry-After header says, in seconds from now."""
    if not retry_after:
        return 0.0
    if retry_after.strip().isdigit():
        return float(retry_after)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
