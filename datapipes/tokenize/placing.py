"""Where a token file is made: beside its place, or on this machine and then uploaded to a URL."""

import errno
import hashlib
import os
from pathlib import Path

from ..cache import own_folder, users_cache
from ..errors import ConfigurationError, TokenFileError
from ..formats.ids import ids_path
from .opening import shown

__all__ = ["is_url", "remove", "upload", "work_folder"]


def is_url(output: "str | os.PathLike[str]") -> bool:
    from ..remote import is_remote

    return is_remote(os.fspath(output))


def work_folder(output: "str | os.PathLike[str]", work: "str | os.PathLike[str] | None") -> Path:
    """The folder of pieces: beside a file on this machine, in `work` or the user's cache for a URL; the same each time.

    Raises ConfigurationError for an output or a folder that cannot be written to.
    """
    if not is_url(output):
        if work is not None:
            raise ConfigurationError(f"work is the folder in which the file of a URL is made; {output} is no URL")
        target = Path(output)
        if target.is_dir() or not target.parent.is_dir():
            wrong = "is a folder" if target.is_dir() else "its folder does not exist"
            raise ConfigurationError(f"{target}: {wrong}; the name of a file in a folder that exists would do")
        return target.with_name(target.name + ".pieces")
    url = shown(os.fspath(output))
    name = url.rpartition("/")[2]
    if not name or url != os.fspath(output):  # its sidecars are named by it, and where is it again?
        raise ConfigurationError(f"{url}: the URL of a file, without user, password and query, would do")
    if work is None:
        user = os.getuid() if hasattr(os, "getuid") else -1
        folder = next(filter(None, (own_folder(base / "tokenize", user) for base in users_cache(user))), None)
        if folder is None:
            raise ConfigurationError("no cache folder can be written; work=FOLDER (--work FOLDER) says where to work")
    else:
        folder = Path(work)
        if not folder.is_dir():
            raise ConfigurationError(f"work is {os.fspath(work)!r}, which is no folder")
    return folder / f"{name}.{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}.pieces"


def upload(made: Path, url: str, with_ids: bool) -> None:
    """Puts the finished files at a URL, the token file last: it is what says that all is done. They stay here."""
    from .. import remote

    for old in (".loss", *([] if with_ids else [".ids"])):  # of the file that stood here before
        remove(url + old)
    if with_ids:
        remote.upload(ids_path(made), url + ".ids")
    remote.upload(made, url)


def remove(url: str) -> None:
    """Takes a file away that may be there; a web server's stays. Raises TokenFileError."""
    from ..remote import look_up
    from ..remote.file_systems import WEB, file_system, path_of
    from ..remote.urls import protocol_of

    if protocol_of(url) in WEB:  # which can put files and nothing else
        return
    try:
        look_up(url)
    except TokenFileError as error:
        if error.errno != errno.ENOENT:
            raise
        return
    system = file_system(url)
    try:
        system.rm_file(path_of(system, url))
    except OSError as error:
        raise TokenFileError(error.errno, "cannot be removed; it belongs to the file there before", url) from error
