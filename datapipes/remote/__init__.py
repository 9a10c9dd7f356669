"""Files behind URLs: any file system of fsspec, with retries, checked bodies and a cache of whole files.

    urls.py          which paths are URLs; what may be shown of them; `RemoteFile`
    attempts.py      what is tried again, how often, and the error that lists the tries
    file_systems.py  fsspec's file systems, made in the process that uses them
    drivers.py       single requests: http(s), S3, any other
    transport.py     look_up, list_urls, list_files, read_range, read_ranges, upload
    shard_cache.py   fetch, claim: whole files on this machine, downloaded once

Settings belong to the machine, and are taken from the environment (docs/remote.md).
"""

from .shard_cache import cache_folder, claim, fetch
from .transport import list_files, list_urls, look_up, read_range, read_ranges, upload
from .urls import RemoteFile, is_remote, shown

__all__ = [
    "RemoteFile",
    "cache_folder",
    "claim",
    "fetch",
    "is_remote",
    "list_files",
    "list_urls",
    "look_up",
    "read_range",
    "read_ranges",
    "shown",
    "upload",
]
