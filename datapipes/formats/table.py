"""Layouts of many files as columns: 100,000 of them are made, pickled and added up without a Python object a file."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from ..remote import RemoteFile, is_remote
from .layout import DTYPES, BlockSums, TokenLayout
from .places import as_place

__all__ = [
    "WEB",
    "FileList",
    "LayoutTable",
    "distinct",
    "document_counts",
    "has_remote",
    "integers",
    "itemcodes",
    "joined_paths",
    "numbered_files",
    "parts_of",
]

WEB = ("http://", "https://")  # whose URLs may end in a query
_AT_URLS = (("path", "remote", "size", "version"), ("ends_path", "ends_remote", "ends_size", "ends_version"))


class LayoutTable(Sequence[TokenLayout]):
    """The files of one manifest, or a stretch of them, as layouts that are made when they are looked at.

    columns: {field of TokenLayout: a value a file, or one for all}. files: how many. folder: where relative paths
    begin. sums: (the manifest, the byte where its sums begin, bytes a block, the manifest's CRC).
    """

    def __init__(
        self, columns: "dict[str, list[Any]]", files: int, folder: str, sums: "tuple[str, int, int, int]"
    ) -> None:
        self._columns, self._files, self._folder, self._sums = columns, files, folder, sums
        self._start, self._count = 0, files
        self._made: dict[int, TokenLayout] = {}

    def __getstate__(self) -> "dict[str, Any]":
        return {**self.__dict__, "_made": {}, "_firsts": None}

    def __len__(self) -> int:
        return self._count

    @property
    def key(self) -> "tuple[int, int, int]":
        """The same for tables of the same files."""
        return id(self._columns), self._start, self._count

    @property
    def path(self) -> str:
        """The manifest's."""
        return self._sums[0]

    @overload
    def __getitem__(self, at: int) -> TokenLayout: ...
    @overload
    def __getitem__(self, at: slice) -> "LayoutTable": ...
    def __getitem__(self, at: "int | slice") -> "TokenLayout | LayoutTable":
        picked = range(self._start, self._start + self._count)[at]
        if isinstance(picked, int):
            found = self._made.get(picked)
            return self._layout(picked) if found is None else found
        if picked.step != 1:
            raise ValueError("a stretch of files has no step")
        part = object.__new__(LayoutTable)
        part.__dict__ = {**self.__dict__, "_start": picked.start, "_count": len(picked)}
        return part

    def __iter__(self) -> Iterator[TokenLayout]:
        return map(self.__getitem__, range(self._count))

    @property
    def makes_ends(self) -> bool:
        """Whether the document ends of some are worked out once, and kept: nothing stores them."""
        return any(self.column("sequences")) or any(one is not None for one in self.column("end_of_text"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(TokenLayout.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def with_field(self, name: str, value: Any) -> "LayoutTable":
        """The same files with one value of a field for all."""
        other = object.__new__(LayoutTable)
        other.__dict__ = {**self.__dict__, "_columns": {**self._columns, name: [value]}, "_made": {}}
        return other

    def column(self, name: str) -> "list[Any]":
        """A field of each file, or of all of them in a list of one."""
        column = self._columns[name]
        if name in ("path", "ends_path"):
            column = joined_paths(self._folder, column)
        return column if len(column) == 1 else column[self._start : self._start + self._count]

    def _layout(self, at: int) -> TokenLayout:
        fields = {name: column[at if len(column) > 1 else 0] for name, column in self._columns.items()}
        for name in ("path", "ends_path"):
            fields[name] = joined_paths(self._folder, [fields[name]])[0]
        fields["dtype"] = DTYPES[fields["dtype"]]
        path, begin, block, mark = self._sums
        crc = fields.pop("sums_crc")
        first, stop = (int(before) for before in self._blocks_before()[at : at + 2])
        blocks = BlockSums(path, begin + 4 * first, stop - first, block, crc, mark)
        for name, found, size, version in _AT_URLS:
            version = fields.pop(version)
            if is_remote(fields[name]):
                content = "" if version else str(fields["digest" if name == "path" else "ends_digest"])
                fields[found] = RemoteFile(fields[name], fields[size], version, content)
                fields[name] = as_place(fields[name])
        if not fields["ends_path"] and "remote" in fields:
            fields["ends_remote"] = fields["remote"]
        # two threads that make it at once take the same one
        return self._made.setdefault(at, TokenLayout(**fields, blocks=blocks))

    def _blocks_before(self) -> npt.NDArray[np.int64]:
        """(files + 1,): how many blocks the files before each have."""
        firsts = self.__dict__.get("_firsts")
        if firsts is None:
            size = np.broadcast_to(np.array(self._columns["size"], np.int64), (self._files,))
            self._firsts = firsts = np.concatenate(([0], np.cumsum(-(-size // self._sums[2]))))
        return firsts


def joined_paths(folder: str, paths: "list[str]") -> "list[str]":
    """Paths from a folder on, a URL's query behind them; those that are absolute, URLs or empty as they are."""
    web = folder.startswith(WEB)
    base, mark, query = folder.partition("?") if web else (folder, "", "")
    before = f"{base.rstrip('/')}/" if folder else ""
    return [
        path
        if path[:1] in ("/", "") or "://" in path
        else f"{before}{quote(path)}{mark}{query}"
        if web
        else before + path
        for path in paths
    ]


def integers(files: "Sequence[TokenLayout]", name: str) -> npt.NDArray[np.int64]:
    """int64 (files,): a field of each."""
    if isinstance(files, LayoutTable):
        return np.array(np.broadcast_to(np.array(files.column(name), np.int64), (len(files),)))
    return np.fromiter((getattr(file, name) for file in files), np.int64, len(files))


def distinct(files: "Sequence[TokenLayout]", name: str) -> "set[Any]":
    """Which values a field has; a dtype by its name."""
    if isinstance(files, LayoutTable):
        return set(files.column(name))
    found = {getattr(file, name) for file in files}
    return {dtype.name for dtype in found} if name == "dtype" else found


def has_remote(files: "Sequence[TokenLayout]") -> bool:
    """Whether any of them is at a URL."""
    if isinstance(files, LayoutTable):
        return any(map(is_remote, files.column("path")))
    return any(file.remote is not None for file in files)


def itemcodes(files: "Sequence[TokenLayout]") -> npt.NDArray[np.int64]:
    """int64 (files,): the kernels' code for each one's dtype."""
    if not isinstance(files, LayoutTable):
        return integers(files, "itemcode")
    names = files.column("dtype")
    code = {name: files[names.index(name)].itemcode for name in set(names)}
    return np.array(np.broadcast_to(np.array([code[name] for name in names], np.int64), (len(files),)))


def document_counts(files: "Sequence[TokenLayout]") -> npt.NDArray[np.int64]:
    """int64 (files,): how many documents each has, 0 where nobody knows; those of no table are asked one by one."""
    counts = [np.empty(0, np.int64)]
    for part in parts_of(files):
        if isinstance(part, LayoutTable):
            known = np.array([count or 0 for count in part.column("known_documents")], np.int64)
            counts.append(np.broadcast_to(known, (len(part),)))
        else:
            counts.append(np.fromiter((file.documents for file in part), np.int64, len(part)))
    return np.concatenate(counts)


def parts_of(files: "Sequence[TokenLayout]") -> "list[Sequence[TokenLayout]]":
    """The tables and other sequences that these files are made of."""
    return list(files.parts) if isinstance(files, FileList) else [files]


class FileList(Sequence[TokenLayout]):
    """Sequences of files, end to end, none of which is copied."""

    def __init__(self, parts: "Iterable[Sequence[TokenLayout]]") -> None:
        self.parts = [part for part in parts if len(part)]
        self._stops = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._stops[-1]) if self.parts else 0

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        at = range(len(self))[at]
        part = int(np.searchsorted(self._stops, at, side="right"))
        return self.parts[part][at - (int(self._stops[part - 1]) if part else 0)]

    def __iter__(self) -> Iterator[TokenLayout]:
        return (file for part in self.parts for file in part)


def numbered_files(lists: "list[Sequence[TokenLayout]]") -> "tuple[FileList, npt.NDArray[np.int64]]":
    """(all files, each once; (entries,) the number of each of these in that)."""
    known: dict[Any, int] = {}
    parts: list[Sequence[TokenLayout]] = []
    numbers, count = [np.empty(0, np.int64)], 0
    for files in lists:
        if isinstance(files, LayoutTable):
            first = known.setdefault(files.key, count)
            new: Sequence[TokenLayout] = files if first == count else ()
            numbers.append(np.arange(first, first + len(files)))
        else:
            new = [file for file in {id(file): file for file in files}.values() if id(file) not in known]
            known |= {id(file): count + i for i, file in enumerate(new)}
            numbers.append(np.array([known[id(file)] for file in files], np.int64))
        parts.append(new)
        count += len(new)
    return FileList(parts), np.concatenate(numbers)
