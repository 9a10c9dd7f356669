"""Which files the inputs name: paths, folders, patterns, URLs, data sets; in one order on every machine."""

import errno
import glob
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError
from ..remote import RemoteFile, is_remote, list_files, look_up
from .opening import InputFile, needed, shown, unreadable

__all__ = ["DATASET", "list_inputs"]

LINES = (".jsonl", ".ndjson", ".json")
COLUMNS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow"}
PACKED = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
REFUSED = (".zip", ".tar", ".tgz", ".txz", ".tbz2", ".7z", ".rar", *(f".tar{one}" for one in PACKED))
PACKAGES = {"zst": "zstandard", "lz4": "lz4", "parquet": "pyarrow", "arrow": "pyarrow"}
KINDS = ("auto", "text", "jsonl", "parquet", "arrow")
DATASET = "dataset:"


def list_inputs(
    inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    kind: str = "auto",
    leave_out: "Iterable[Path]" = (),
    split: str = "train",
) -> list[InputFile]:
    """The files that paths, folders, glob patterns, URLs of these and names of data sets name, in order.

    Args:
        inputs: one or several, taken in order. A folder gives all its files but hidden ones, by name, its
            sub-folders after them; a pattern its matches, by name; a folder that `datasets` wrote (`save_to_disk`)
            its rows; "dataset:NAME[:CONFIG][@REVISION]" what `datasets.load_dataset` gives of the name, which may be
            a folder's.
        kind: "text", "jsonl", "parquet", "arrow", or "auto": by the names, those of packed files without .gz, .zst,
            .bz2, .xz, .lz4; what has no such name is text.
        leave_out: files and folders that are no input wherever they are found.
        split: of data sets of `datasets`.

    Raises ConfigurationError for a name without files, a file named twice, one of a kind that is not read, a package
    that is missing; TokenFileError.
    """
    several = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(several, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in several):
        raise ArgumentTypeError(f"inputs are paths, got {inputs!r:.80}")
    if kind not in KINDS:
        raise ConfigurationError(f"kind is {kind!r}; one of {', '.join(map(repr, KINDS))} would do")
    if not isinstance(split, str):
        raise ArgumentTypeError(f"split is the name of a split, got {split!r}")
    ours = {(at.st_dev, at.st_ino) for at in map(_status, map(str, leave_out)) if at is not None}
    files: dict[str, InputFile] = {}
    for each in several:
        given, found = os.fspath(each), False
        for file in _found(given, kind, split, ours):
            if file.path in files:
                raise ConfigurationError(
                    f"{shown(file.path)}: is named twice by the inputs; to repeat a source, weigh it in a blend"
                )
            files[file.path], found = file, True
        if not found:
            raise ConfigurationError(f"{shown(given)}: names no file")
    if not files:
        raise ConfigurationError("no input was named")
    for one in {file.packed or file.kind: file for file in files.values()}.values():
        package = PACKAGES.get(one.packed or one.kind)
        if package is not None and find_spec(package) is None:
            raise ConfigurationError(f"{shown(one.path)}: {needed(one.packed or one.kind)}")
    return list(files.values())


def _found(given: str, kind: str, split: str, ours: "set[tuple[int, int]]") -> Iterator[InputFile]:
    """The files of one path, folder, pattern, URL or name of a data set."""
    if given.startswith(DATASET):
        for path in _loaded(given, split):
            yield _on_disk(path, "arrow", Path(path).stat())
    elif is_remote(given):
        yield from _remote(given, kind)
    else:
        for path, at, of_dataset in _expand(given.removeprefix("file://"), split, ours):
            yield _on_disk(path, "arrow" if of_dataset else kind, at)


def _on_disk(path: str, kind: str, at: os.stat_result) -> InputFile:
    if not stat.S_ISREG(at.st_mode):
        raise ConfigurationError(f"{path}: no regular file")
    kind, packed = _kind_of(path, path, kind)
    return InputFile(path, kind, at.st_size, at.st_mtime_ns, packed)


def _kind_of(path: str, name: str, kind: str) -> "tuple[str, str]":
    """(kind, how it is packed) of a file by its name. Raises ConfigurationError for what is not read."""
    name = name.lower()
    if name.endswith(REFUSED):
        raise ConfigurationError(f"{path}: archives of several files are not read; unpack it first")
    suffix = os.path.splitext(name)[1]  # noqa: PTH122 - 100,000 Paths take a second
    packed = PACKED.get(suffix, "")
    if packed:
        suffix = os.path.splitext(name.removesuffix(suffix))[1]  # noqa: PTH122
    named = COLUMNS.get(suffix) or ("jsonl" if suffix in LINES else "text")
    rows = named in COLUMNS.values()
    if (rows and packed) or (kind != "auto" and rows != (kind in COLUMNS.values()) and (rows or packed)):
        wrong = f"a packed {named} file" if rows and packed else f"looks like {packed or named}, and kind is {kind!r}"
        raise ConfigurationError(f"{path}: {wrong}; unpack it, or leave kind to the names")
    return named if kind == "auto" else kind, packed


# Folders and patterns of this machine -------------------------------------------------------------------------


def _expand(given: str, split: str, ours: "set[tuple[int, int]]") -> "Iterator[tuple[str, os.stat_result, bool]]":
    """(path, status, whether it is of a data set) of the files of one path, folder or pattern, by name."""
    names = [given]
    if not os.path.lexists(given) and glob.has_magic(given):
        names = sorted(glob.glob(given, recursive=True))  # noqa: PTH207 - patterns may be absolute
    for name in names:
        at = _status(name, must=True)
        assert at is not None
        if not stat.S_ISDIR(at.st_mode):
            if (at.st_dev, at.st_ino) not in ours:
                yield name, at, False
        elif given in names or "**" not in given:  # such a pattern names the folder's files itself
            yield from _walk(name, split, ours)


def _walk(folder: str, split: str, ours: "set[tuple[int, int]]") -> "Iterator[tuple[str, os.stat_result, bool]]":
    """The files of a folder but hidden ones, by name, then those of its sub-folders; links to folders are left."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(folder, error) from error
    names = {entry.name for entry in found}
    if "dataset_dict.json" in names or names >= {"dataset_info.json", "state.json"}:
        for path in _saved(Path(folder), split):
            at = _status(path, must=True)
            assert at is not None
            yield path, at, True
        return
    folders = []
    for entry in found:
        path = os.path.join(folder, entry.name)  # noqa: PTH118 - as the caller spelt it
        try:
            at, is_folder = entry.stat(), entry.is_dir()
        except OSError as error:
            raise unreadable(path, error) from error
        if (at.st_dev, at.st_ino) in ours:
            continue
        if is_folder:
            folders += [] if entry.is_symlink() else [path]
        else:
            yield path, at, False
    for path in folders:
        yield from _walk(path, split, ours)


def _status(path: str, must: bool = False) -> "os.stat_result | None":
    try:
        return os.stat(path)  # noqa: PTH116 - 100,000 Paths take a second
    except (OSError, ValueError) as error:
        if must:
            raise unreadable(path, error) from error
        return None


# Data sets of the package `datasets` --------------------------------------------------------------------------


def _saved(folder: Path, split: str) -> "list[str]":
    """The Arrow files of a data set that `save_to_disk` wrote, in the order of its rows."""
    if (folder / "dataset_dict.json").exists():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or split not in splits:
            has = ", ".join(map(repr, splits)) if isinstance(splits, list) else "none"
            raise ConfigurationError(f"{folder}: no split {split!r}; it has {has}; split= (--split) names one")
        if Path(split).name != split:
            raise TokenFileError(f"{folder}: a split has the name {split!r}, which is no folder's")
        folder = folder / split
    state = _json(folder / "state.json")
    names = [one.get("filename") if isinstance(one, dict) else None for one in state.get("_data_files") or []]
    if state.get("_indices_data_files"):
        raise ConfigurationError(f"{folder}: its rows are picked by indices; save dataset.flatten_indices() instead")
    paths = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".arrow"):
            raise TokenFileError(f"{folder / 'state.json'}: {name!r} is no Arrow file in its folder")
        paths.append(str(folder / name))
    return paths


def _json(path: Path) -> "dict[str, Any]":
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(str(path), error) from error
    except (ValueError, RecursionError) as error:
        raise TokenFileError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenFileError(f"{path}: a {type(found).__name__}, not a JSON object")
    return found


def _loaded(given: str, split: str) -> "list[str]":
    """The Arrow files in which `datasets.load_dataset` keeps the rows of a split, in their order."""
    name = given.removeprefix(DATASET)
    config = revision = None
    if not Path(name).exists():
        name, _, revision = name.partition("@")
        name, _, config = name.partition(":")
    elif (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
        return _saved(Path(name), split)
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(f"{given}: is loaded by the package datasets: pip install datasets") from error
    try:
        found = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:  # of the hub, of files, of arguments: whatever it says
        raise ConfigurationError(f"{given}: cannot be loaded: {type(error).__name__}: {error}") from error
    from .columns import count_rows

    paths = [str(one["filename"]) for one in found.cache_files]
    if sum(map(count_rows, paths)) != len(found):
        raise ConfigurationError(
            f"{given}: split {split!r} is a part of what lies on the disk ({len(found)} rows); name a whole split, or "
            "write it by save_to_disk and name the folder"
        )
    return paths


# Remote files -------------------------------------------------------------------------------------------------


def _remote(given: str, kind: str) -> Iterator[InputFile]:
    """The files of a URL: one file, else a folder's own or a pattern's, but hidden ones."""

    def found(file: RemoteFile) -> InputFile:
        name = shown(file.url)  # without its query
        one, packed = _kind_of(name, name, kind)
        return InputFile(file.url, one, file.size, 0, packed, file.version)

    plain = given.partition("?")[0] if given.startswith("http") else given  # nor a pattern
    if not glob.has_magic(plain) and not plain.endswith("/"):
        try:
            file = look_up(given)
        except TokenFileError as error:
            if error.errno not in (errno.ENOENT, errno.EISDIR):
                raise
        else:
            yield found(file)
            return
    files = [file for file in list_files(given) if not shown(file.url).rpartition("/")[2].startswith(".")]
    if {"state.json", "dataset_info.json"} <= {shown(file.url).rpartition("/")[2] for file in files}:
        raise ConfigurationError(f"{shown(given)}: a data set of `datasets`; copy it here, or name its files")
    yield from map(found, files)
