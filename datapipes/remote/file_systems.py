"""fsspec's file systems, made in the process that uses them.

Each process has instances of its own, kept by its pid. A forked child never touches its parent's: they belong to a loop
whose thread did not come along, and to connections that two processes would then read from. Options, endpoints and
credentials are fsspec's own matter: its configuration (FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec), or what the drivers
look for themselves (AWS_*, ~/.aws, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ~/.netrc with trust_env).
"""

import os
import threading
from typing import Any

from ..errors import ConfigurationError
from .attempts import request_seconds
from .urls import protocol_of, shown

__all__ = ["S3", "WEB", "file_system", "path_of"]

WEB = ("http", "https")
S3 = ("s3", "s3a")

_NEEDS = {  # protocol: (package, how it is had)
    **dict.fromkeys(WEB, ("aiohttp", "pip install aiohttp")),
    **dict.fromkeys(S3, ("s3fs", "pip install 'tokenpipe[s3]'")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "pip install 'tokenpipe[gs]'")),
    "hf": ("huggingface_hub", "pip install huggingface_hub"),
}

_DRIVERS = ("AWS_", "GOOGLE_", "HF_")  # what their settings in the environment begin with

_made: "dict[tuple[Any, ...], Any]" = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def file_system(url: str, uploading: bool = False) -> Any:
    """This process's file system of a URL. Raises ConfigurationError: unknown protocol, a package that is missing.

    One that is uploading keeps the driver's own tries: they are of a part, and ours would be of the whole file.
    """
    protocol = protocol_of(url)
    import fsspec
    from fsspec.config import conf

    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package, how = _NEEDS.get(protocol, (str(error), "its documentation says which package"))
        raise ConfigurationError(f"{shown(url)}: {protocol}:// needs the package {package}: {how}") from error
    except ValueError:
        raise ConfigurationError(
            f"{shown(url)}: fsspec knows no file system for {protocol!r}; it knows s3, gs, hf, http and https"
        ) from None
    options = kind._get_kwargs_from_urls(url)
    # another endpoint or other credentials are another file system; in memory they stay, hashed
    given = [options, conf.get(protocol), {name: os.environ[name] for name in os.environ if name.startswith(_DRIVERS)}]
    key = (os.getpid(), protocol, hash(repr(given)), request_seconds(), uploading)
    if (found := _made.get(key)) is None:
        with _lock:
            if (found := _made.get(key)) is None:
                # the parent's are kept as they are in a forked child: closing them would speak on its connections
                found = _made[key] = _new(kind, protocol, options, uploading)
    return found


def _new(kind: Any, protocol: str, options: "dict[str, Any]", uploading: bool) -> Any:
    if protocol in S3:
        from fsspec.config import conf

        seconds = request_seconds()
        ours: dict[str, Any] = {"connect_timeout": seconds, "read_timeout": seconds, "max_pool_connections": 64}
        if not uploading:
            ours["retries"] = {"total_max_attempts": 1}
        given = conf.get(protocol, {}).get("config_kwargs") or {}
        options = {**options, "config_kwargs": {**ours, **given}}
    made = kind(**options, skip_instance_cache=True)
    if protocol in S3 and not uploading:
        made.retries = 1  # ours are the tries; see attempts.py
    return made


def path_of(made: Any, url: str) -> str:
    """The URL as its file system calls it."""
    return str(made._strip_protocol(url))
