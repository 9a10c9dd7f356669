"""Which token files a path, a folder or a glob pattern stands for."""

import glob
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import TokenFileError
from .layout import local_path

__all__ = ["SUFFIXES", "list_token_files"]

SUFFIXES = (".bin", ".ds", ".npy", ".tok")
"""What the names of token files in a folder end in; a file that is named itself, or by a pattern, may have any name."""

_BESIDE = (".ds.index", ".ds.metadata", ".ds.loss")  # also without their token file: a merger's total is one
_SIDECARS = (".loss", ".ids", ".index", ".metadata")


def list_token_files(path: "str | os.PathLike[str]") -> list[str]:
    """The token files of a path, in the order of their names (by code point, the same on every machine).

    A folder gives all of its own, not those of folders in it; a pattern ("data/*.bin", "**" for any folders) all that
    it fits. Sidecars, indexes and manifests are left out, a pair of Megatron's is one file. A path that is neither is
    one file.

    Raises TokenFileError for a folder or a pattern without token files, and for a folder with something that is none.
    """
    text = os.fspath(path)
    remote = "://" in text and not text.startswith("file://")
    if remote or not text or "\0" in text:
        return [text]  # whose reading says what is wrong
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
    names = sorted({_data_name(name) for name in found if not _is_beside(name, found.__contains__)})
    odd = [name for name in names if not name.endswith(SUFFIXES) or not found.get(name, True)]
    if not names:
        raise TokenFileError(f"{folder}: the directory holds no token file ({', '.join(SUFFIXES)})")
    if odd:
        raise TokenFileError(
            f"{folder}: holds {odd[0]!r} too, and a folder of token files ({', '.join(SUFFIXES)}) alone was expected; "
            f"a pattern as {f'{folder}/*.bin'!r} says which of its files are meant"
        )
    return [str(Path(folder) / name) for name in names]


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
