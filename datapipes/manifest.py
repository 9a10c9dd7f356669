"""What some token files are, in one file: a run of 100,000 files begins without opening or stat-ing one of them.

    corpus/a.tok ─┐
    corpus/b.npy ─┼─▶ make_manifest ──▶ corpus/all.manifest ──▶ TokenReader("corpus/all.manifest")
    corpus/… ─────┘   reads each once    layouts, hashes, CRCs   reads this file alone

It says of each file what opening it would (where its tokens are), what reading all of it would (the fingerprint, which
is the same as without a manifest, and a hash of all bytes), and the CRC-32 of every 64 KiB of it. All integers
little-endian:

    byte  0   8   magic  b"TOKMANI\\0"
          8   u32 version, 1
         12   u32 CRC-32 of the JSON
         16   u64 bytes of JSON
         24   u32 bytes a block, 65,536
         28   u32 zero
         32   u64 how many sums
         40       JSON: {column: [a value a file, or one for all of them]}
                  zeros up to a multiple of 8
                  u32 × sums: CRC-32 of each block, files end to end; a file's last block may be shorter

Paths are relative to the manifest's folder where they are below it, so that the folder may be moved; else absolute.
`stored` in a column's name says that a header or sidecar said so. Each file's sums have a CRC in the JSON, which is
compared when they are used, so that nobody has to read them all.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .atomic import check_replaceable, replacing
from .errors import ArgumentTypeError, ConfigurationError, TokenFileError, TokenpipeError
from .formats.layout import DTYPES, BlockSums, TokenLayout
from .formats.places import Url, as_place, local_path, opened
from .formats.table import WEB, LayoutTable
from .rank_group import shared_bytes
from .remote import is_remote
from .remote.urls import identity

if TYPE_CHECKING:
    from .file_sums import FileSums

__all__ = ["SUFFIX", "BlockSums", "Manifest", "is_manifest", "make_manifest", "read_manifest", "write_manifest"]

SUFFIX = ".manifest"
MAGIC = b"TOKMANI\0"
BLOCK = 1 << 16
_HEADER = struct.Struct("<8sIIQIIQ")
_MOST_JSON = 1 << 32
_MOST = 1 << 58  # of any number, so that a few bytes for each stay in int64

TEXTS = ("kind", "dtype", "ends_path", "paths", "version", "ends_version")
HASHES = ("digest", "hash", "ends_digest", "ends_hash", "loss_digest", "loss_hash", "stored_hash")
NUMBERS = (
    "offset", "tokens", "size", "stored_documents", "ends_offset", "ends_size", "sequences", "sums_crc",
)  # fmt: skip
MAYBE = ("documents", "max_token_id", "vocab_size", "end_of_text", "stored_end_of_text")  # numbers, or null
COLUMNS = frozenset([*TEXTS, *HASHES, *NUMBERS, *MAYBE])


@dataclass(frozen=True, eq=False)
class Manifest(os.PathLike[str]):
    """What `read_manifest` found; it stands for its files wherever a path of them does.

    path: of the manifest, as it was given. files: a layout each, with its digest, in order. hashes: BLAKE2b-256 of all
    bytes of each, hex. ends_hashes, loss_hashes: the same of the file that its document ends are in, and of its loss
    mask; "" where there is none.
    """

    path: str
    files: "LayoutTable"
    hashes: "tuple[str, ...]"
    ends_hashes: "tuple[str, ...]"
    loss_hashes: "tuple[str, ...]"

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<Manifest {self.path}: {len(self.files):,} files>"


def is_manifest(path: "str | os.PathLike[str]") -> bool:
    """Whether a path names a manifest, by its name."""
    text = os.fspath(path)
    if is_remote(text):
        return text.partition("?")[0].endswith(SUFFIX)
    return text.endswith(SUFFIX) and not os.path.isdir(local_path(text))  # noqa: PTH112 - False for any odd name


# Reading ------------------------------------------------------------------------------------------------------


def read_manifest(path: "str | os.PathLike[str]", group: Any = None) -> Manifest:
    """A manifest, checked; its files are not looked at.

    Under an initialised process group of torch.distributed this is a collective call: the first rank reads the file,
    and the others get its bytes, so that a thousand ranks are one read to the file system. `TokenReader(path)` never
    talks to other ranks; give it what this returns.

    Args:
        path: as TokenReader's. group: the ranks that call this, a group of gloo; left out: all of them.

    Raises TokenFileError for a file that is missing, cut, damaged or no manifest, the same on all ranks; RankError
    where a rank does not come.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"a manifest's path must be a str or PathLike, got {path!r}")
    place = as_place(path)
    return _parsed(place, shared_bytes(lambda: _head(place), group))


def read_alone(path: "str | os.PathLike[str]") -> Manifest:
    """The same by this process for itself."""
    place = as_place(path)
    return _parsed(place, _head(place))


def _head(path: str) -> bytes:
    """Header and JSON of a file whose size is right. Raises TokenFileError."""
    try:
        with opened(path) as (size, read):
            head = read(0, _HEADER.size)
            if len(head) < _HEADER.size or not head.startswith(MAGIC):
                raise TokenFileError(f"{path}: is no manifest of tokenpipe's, or a damaged one; it has {size} bytes")
            _, version, _, length, block, zero, sums = _HEADER.unpack(head)
            if version != 1:
                raise TokenFileError(f"{path}: version {version} of a manifest; version 1 is read")
            if length > _MOST_JSON or block != BLOCK or zero or size != _sums_begin(length) + 4 * sums:
                raise TokenFileError(
                    f"{path}: its header is damaged, or it was cut or appended to: it has {size} bytes, and the header "
                    f"says {_sums_begin(length) + 4 * sums}"
                )
            text = read(_HEADER.size, _sums_begin(length))
    except ValueError as error:  # a NUL in the path
        if isinstance(error, TokenpipeError):
            raise
        raise TokenFileError(f"{path!r} is no path of a manifest: {error}") from error
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read the manifest: {error.strerror or error}", path) from error
    return head + text


def _sums_begin(length: int) -> int:
    return -(-(_HEADER.size + length) // 8) * 8


def _parsed(path: str, data: bytes) -> Manifest:
    _, _, crc, length, _, _, count = _HEADER.unpack_from(data)
    text = data[_HEADER.size : _HEADER.size + length]
    if len(text) != length or zlib.crc32(text) != crc or data[_HEADER.size + length :].strip(b"\0"):
        raise TokenFileError(f"{path}: the manifest is damaged (CRC-32 does not match)")
    try:
        columns = _columns(json.loads(text, parse_constant=_no_number, object_pairs_hook=_no_twins))
        return _manifest(path, columns, _sums_begin(length), count, crc)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise TokenFileError(f"{path}: the manifest says what cannot be: {error}") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _no_twins(pairs: "list[tuple[str, Any]]") -> "dict[str, Any]":
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _columns(found: Any) -> "dict[str, list[Any]]":
    """Every column with a value a file, or one for all, each of its type. Raises ValueError."""
    if not isinstance(found, dict) or found.keys() != COLUMNS or not all(isinstance(c, list) for c in found.values()):
        raise ValueError(f"its columns are not {', '.join(sorted(COLUMNS))}")
    files = len(found["paths"])
    if not files:
        raise ValueError("it names no file")
    for name, column in found.items():
        types = {str} if name in (*TEXTS, *HASHES) else {int} if name in NUMBERS else {int, type(None)}
        if not set(map(type, column)) <= types or len(column) not in (1, files):
            raise ValueError(f"the column {name!r} has {len(column)} values for {files} files, or one of another type")
        most = 1 << 63 if name in MAYBE else _MOST  # ids of int64 go up to there
        if int in types and any(not 0 <= value < most for value in set(column) if value is not None):
            raise ValueError(f"the column {name!r} has a number beyond 0 … {most - 1}")
        if name in HASHES and (set(map(len, column)) - {0, 64} or "".join(column).strip("0123456789abcdef")):
            raise ValueError(f"the column {name!r} has a value that is no hash of 64 hex digits")
    return found


def _manifest(path: str, columns: "dict[str, list[Any]]", begin: int, count: int, mark: int) -> Manifest:
    """The layouts that these columns say, once every number in them is found possible. Raises ValueError."""
    if wrong := set(columns["dtype"]) - set(DTYPES):
        raise ValueError(f"dtype {sorted(wrong)[0]!r}")
    if not all(columns["digest"]) or not all(columns["hash"]):
        raise ValueError("a file has no hash")
    number = {name: np.array(columns[name], np.int64) for name in NUMBERS}  # (1,) or (files,)
    itemsize = np.array([DTYPES[name].itemsize for name in columns["dtype"]], np.int64)
    documents, beside = number["stored_documents"], np.array([bool(other) for other in columns["ends_path"]])
    ends = number["ends_offset"] + 8 * documents  # of Megatron's: at the last border but one
    lengths = 34 + 12 * number["sequences"]
    known = np.array([-1 if found is None else found for found in columns["documents"]], np.int64)
    largest = np.array([int(np.iinfo(DTYPES[name]).max) for name in columns["dtype"]], np.int64)
    possible = {
        "tokens": (number["tokens"] > 0) & (number["tokens"] <= (number["size"] - number["offset"]) // itemsize),
        "stored_documents": (documents == 0) | (ends <= np.where(beside, number["ends_size"], number["size"])),
        "sequences": (number["sequences"] == 0) | (beside & (lengths <= number["ends_size"])),
        "documents": np.where(documents > 0, known == documents, known <= number["tokens"]),
        "end_of_text": np.array([found or 0 for found in columns["end_of_text"]], np.int64) <= largest,
        "sums_crc": number["sums_crc"] < 1 << 32,
    }
    for name, right in possible.items():
        if not right.all():
            at = int(np.argmin(right))
            raise ValueError(f"{name} of its file {columns['paths'][at]!r:.200}")
    blocks = np.broadcast_to(-(-number["size"] // BLOCK), (len(columns["paths"]),)).sum(dtype=object)
    if blocks != count:
        raise ValueError(f"it has {count} sums, and its files have {blocks} blocks")
    paths = columns["paths"]
    _check_paths([*paths, *columns["ends_path"]], is_remote(path))
    if not all(paths):
        raise ValueError("a path is empty")
    fields = {
        "path": paths,
        "known_documents": columns["documents"],
        "has_loss": [bool(found) for found in columns["loss_digest"]],
        "verify": ["size"],
        **{name: columns[name] for name in ("dtype", "sums_crc", "version", "ends_version", *_KEPT)},
    }
    folder = _folder_of(path)
    table = LayoutTable(fields, len(paths), folder, (path, begin, BLOCK, mark))
    hashes = (columns[name] * (len(paths) // len(columns[name])) for name in ("hash", "ends_hash", "loss_hash"))
    return Manifest(path, table, *map(tuple, hashes))


def _check_paths(paths: "list[str]", from_url: bool) -> None:
    """Raises ValueError for a path that `write_manifest` gives no file: a manifest may be from anybody."""
    together = "/".join(paths)
    os.fsencode(together)  # raises for what no file can be called
    if "\0" in together or (".." in together and ".." in together.split("/")):
        raise ValueError("a path has '..' or a NUL in it")
    if "://" in together and (odd := [path for path in paths if "://" in path and not is_remote(path)]):
        raise ValueError(f"{odd[0]!r:.200} is neither a path nor a URL")
    if from_url and (here := [path for path in paths if path.startswith("/")]):
        raise ValueError(f"it is at a URL, and names {here[0]!r:.200} on this machine")


def _folder_of(path: str) -> str:
    """Where relative paths begin, as the manifest's was given; a URL's query goes along to its files."""
    whole, mark, query = path, "", ""
    if path.startswith(WEB):
        whole, mark, query = (path.whole if isinstance(path, Url) else path).partition("?")
    return os.path.dirname(whole) + mark + query  # noqa: PTH120 - a file:// URL perhaps


_KEPT = (
    "offset", "tokens", "size", "stored_documents", "ends_offset", "max_token_id", "vocab_size", "end_of_text", "kind",
    "ends_path", "ends_size", "sequences", "digest", "ends_digest", "stored_hash", "stored_end_of_text",
    "ends_hash", "loss_digest", "loss_hash",
)  # fmt: skip
"""The columns that are fields of a layout as they stand."""


# Writing ------------------------------------------------------------------------------------------------------


def make_manifest(
    paths: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    output: "str | os.PathLike[str]",
    dtype: object = None,
    end_of_text: "int | None" = None,
    progress: "bool | None" = None,
) -> Manifest:
    """Reads token files once, all of each and what lies beside it, and writes what they are into one file.

    Some files are read at once, in blocks: memory does not grow with them, but for 4 bytes a block of 64 KiB.

    Args:
        paths, dtype, end_of_text: as TokenReader's; what they say is in the manifest, and need not be said again.
        output: the manifest's name, "….manifest"; one that is there is replaced once the new one is whole.
        progress: a bar on stderr; None: where that is a terminal.

    Raises TokenFileError for a file that is missing or damaged, ConfigurationError, ArgumentTypeError, OSError.

    >>> import tempfile, numpy as np
    >>> from tokenpipe.datapipes import TokenReader
    >>> folder = tempfile.mkdtemp()
    >>> np.save(folder + "/a.npy", np.array([5, 7, 0, 9, 0], np.uint16))
    >>> manifest = make_manifest(folder, folder + "/all.manifest", end_of_text=0)
    >>> TokenReader(folder + "/all.manifest").document_ends().tolist()
    [3, 5]
    """
    from .token_files import closed_by, listed_files  # which read manifests too

    check_output(output)
    files = closed_by(listed_files(paths, dtype), end_of_text)
    return write_manifest(output, files, progress=progress)


def check_output(output: "str | os.PathLike[str]") -> None:
    """Raises ArgumentTypeError, ConfigurationError, OSError where no manifest can get this name."""
    if not isinstance(output, (str, os.PathLike)):
        raise ArgumentTypeError(f"output must be a str or PathLike, got {output!r}")
    check_replaceable(output)
    if not os.fspath(output).endswith(SUFFIX):
        raise ConfigurationError(f"{os.fspath(output)}: the name of a manifest ends in {SUFFIX}")


def write_manifest(
    output: "str | os.PathLike[str]",
    files: "Sequence[TokenLayout]",
    found: "Iterable[FileSums] | None" = None,
    progress: "bool | None" = None,
) -> Manifest:
    """Writes the manifest of these files; it has its name once all of it is on the disk.

    Args:
        output, progress: as `make_manifest`'s.
        files: as `read_layout` gives them.
        found: what reading each of them gave (`sum_file`), in their order, for who knows it from writing them; left
            out: they are read here.

    Raises TokenFileError, ConfigurationError, ArgumentTypeError, OSError.
    """
    from .file_sums import sum_files  # which knows of fingerprints, and those of manifests

    check_output(output)
    if not files:
        raise ConfigurationError(f"{os.fspath(output)}: a manifest names at least one file")
    folder = os.path.abspath(os.path.dirname(os.fspath(output)))  # noqa: PTH100, PTH120 - links stay links
    columns: dict[str, list[Any]] = {name: [] for name in sorted(COLUMNS)}
    with tempfile.TemporaryFile(dir=folder) as spool, replacing(output) as new:
        count = 0
        for file, one in zip(files, sum_files(files, progress) if found is None else found, strict=True):
            for name, value in _row(file, one, folder).items():
                columns[name].append(value)
            spool.write(one.sums.astype("<u4").tobytes())
            count += one.sums.size
        short = {
            name: column[:1] if name != "paths" and len(set(column)) == 1 else column
            for name, column in columns.items()
        }
        text = json.dumps(short, separators=(",", ":"), sort_keys=True).encode()
        new.write(_HEADER.pack(MAGIC, 1, zlib.crc32(text), len(text), BLOCK, 0, count))
        new.write(text + bytes(_sums_begin(len(text)) - _HEADER.size - len(text)))
        spool.seek(0)
        while part := spool.read(1 << 20):
            new.write(part)
    return read_alone(output)


def _row(file: TokenLayout, found: "FileSums", folder: str) -> "dict[str, Any]":
    """A file's value in each column."""
    if found.sums.size != -(-file.size // BLOCK):
        raise ConfigurationError(f"{file.path}: {found.sums.size} sums for {file.size} bytes; one a {BLOCK} would do")
    return {
        **{name: getattr(file, name) for name in _KEPT},
        "paths": _from_folder(file.path, folder),
        "ends_path": _from_folder(file.ends_path, folder) if file.ends_path else "",
        "version": "" if file.remote is None else file.remote.version,
        "ends_version": "" if file.ends_remote is None or not file.ends_path else file.ends_remote.version,
        "dtype": file.dtype.name,
        "documents": file.stored_documents or found.documents,
        "digest": found.digest,
        "hash": found.hash,
        "sums_crc": zlib.crc32(found.sums.astype("<u4").tobytes()),
        "ends_digest": found.ends_digest,
        "ends_hash": found.ends_hash,
        "loss_digest": found.loss_digest,
        "loss_hash": found.loss_hash,
    }


def _from_folder(path: str, folder: str) -> str:
    if is_remote(path):
        return identity(path if not isinstance(path, Url) else path.whole)
    full = os.path.abspath(local_path(path))  # noqa: PTH100 - links stay links
    below = f"{folder.rstrip('/')}/"
    return full.removeprefix(below)
