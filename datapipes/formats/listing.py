"""Which token files a path, a folder or a glob pattern stands for."""

import fnmatch
import glob
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import TokenFileError
from ..remote import is_remote, list_files
from .places import as_place, beside, exists, list_folder, local_path

__all__ = ["SUFFIXES", "list_token_files"]

SUFFIXES = (".bin", ".ds", ".npy", ".tok")
"""What the names of token files in a folder end in; a file that is named itself, or by a pattern, may have any name."""

_BESIDE = (".ds.index", ".ds.metadata", ".ds.loss")  # also without their token file: a merger's total is one
_SIDECARS = (".loss", ".ids", ".index", ".metadata")


def list_token_files(path: "str | os.PathLike[str]") -> list[str]:
    """The token files of a path, in the order of their names (by code point, the same on every machine).

    A folder gives all of its own, not those of folders in it; a pattern ("data/*.bin", "**" for any folders) all that
    it fits. Sidecars, indexes and manifests are left out, a pair of Megatron's is one file. A path that is neither is
    one file. At a URL, "*" and "[…]" make a pattern; what a listing says of its files is not asked for again while
    `looking`.

    Raises TokenFileError for a folder or a pattern without token files, and for a folder with something that is none.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        return [text]  # whose reading says what is wrong
    if is_remote(text):
        return _at_url(as_place(text))
    local = str(local_path(text))
    if os.path.isdir(local):  # noqa: PTH112 - False for a name that is too long, too
        return _in_folder(local)
    if not glob.has_magic(local) or os.path.lexists(local) or os.path.lexists(f"{local}.idx"):
        return [text]
    fitting = glob.glob(local, recursive=True)  # noqa: PTH207 - patterns may be absolute
    found = [name for name in fitting if not Path(name).is_dir()]
    if not local.endswith(".manifest"):  # else manifests are what was meant
        found = [name for name in found if not _is_beside(name, os.path.exists)]
    files = sorted({_data_name(name) for name in found})
    if not files:
        raise TokenFileError(f"{text}: no token file fits this pattern, looked for from {Path.cwd()}")
    return files


def _in_folder(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            found = {entry.name: entry.is_file() for entry in entries if not entry.name.startswith(".")}
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot list the folder: {error.strerror}", folder) from error
    before = str(Path(folder) / "x")[:-1]
    return [before + name for name in _token_files(folder, found)]


def _token_files(folder: str, found: "dict[str, bool]") -> list[str]:
    """The token files of {name: whether it is a file} in a folder. Raises TokenFileError."""
    names = sorted({_data_name(name) for name in found if not _is_beside(name, found.__contains__)})
    odd = [name for name in names if not name.endswith(SUFFIXES) or not found.get(name, True)]
    if not names:
        raise TokenFileError(f"{folder}: the directory holds no token file ({', '.join(SUFFIXES)})")
    if odd:
        raise TokenFileError(
            f"{folder}: holds {odd[0]!r} too, and a folder of token files ({', '.join(SUFFIXES)}) alone was expected; "
            f"a pattern as {folder.rstrip('/') + '/*.bin'!r} says which of its files are meant"
        )
    return names


def _at_url(url: str) -> list[str]:
    """The same for a URL: a folder ends in "/", or has no file of its name."""
    pattern = _is_pattern(str(url))
    named = str(url).endswith((*SUFFIXES, ".idx", ".manifest"))
    if not pattern and not url.endswith("/") and (named or exists(url) or exists(beside(url, ".idx"))):
        return [url]
    folder, _, name = url.rpartition("/")
    if pattern and ("**" in name or _is_pattern(folder)):
        found = {file.url: file for file in list_files(url)}
        for parent in {one.rpartition("/")[0] for one in found}:
            list_folder(parent)
        files = sorted({_data_name(one) for one in found if not _is_beside(one, exists)})
    elif pattern:
        fitting = [file.url for file in list_folder(folder) if _fits(file.url.rpartition("/")[2], name)]
        files = sorted({_data_name(one) for one in fitting if not _is_beside(one, exists)})
    else:
        urls = {file.url.rpartition("/")[2]: file.url for file in list_folder(url.rstrip("/"))}
        if not urls and not url.endswith("/"):
            return [url]  # whose reading says that there is nothing
        names = _token_files(str(as_place(url)), {one: True for one in urls if not one.startswith(".")})
        base = next(iter(urls.values())).rpartition("/")[0]
        return [f"{base}/{one}" for one in names]
    if not files:
        raise TokenFileError(f"{as_place(url)}: no token file fits this pattern")
    return files


def _is_pattern(url: str) -> bool:
    return "*" in url or "[" in url  # "?" begins a query


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and (not name.startswith(".") or pattern.startswith("."))


def _data_name(name: str) -> str:
    """Of a pair of Megatron's, the `.bin`."""
    return f"{name.removesuffix('.idx')}.bin" if name.endswith(".idx") else name


def _is_beside(name: str, is_there: "Callable[[str], bool]") -> bool:
    """Whether a file of this name belongs to another one that is there: scores, ids, a loss mask, an index."""
    if name.endswith(_BESIDE) or name.endswith(".manifest"):
        return True
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix in _SIDECARS:
        return is_there(stem)
    file = stem.rpartition(".")[0]
    return suffix == "npy" and bool(Path(file).name) and is_there(file)
