"""Where finished shards are, and how it is known that they are finished.

    P-00003-of-00064.tok                 the shard, and its ids beside it, under their names since they are whole
    .P.shards/00003-of-00064.done        its marker, written after it: JSON, see Marker
    .P.shards/00003-of-00064/            its work folder: a lock, finished pieces; gone when it is finished
    .P.shards/run                        what this run makes; held by all processes that make the same
    P.manifest                           last of all

A marker counts where it names what would be made now (a hash of all that decides the shard's bits), and the files have
the sizes and hashes that it says. Where P is a URL, the work folders are on this machine, and the rest is uploaded.
"""

import base64
import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..atomic import replacing, sync_folder
from ..errors import ConfigurationError, RemoteFileError, TokenFileError
from ..formats import own
from ..formats.ids import ids_path
from ..formats.layout import TokenLayout
from .assemble import put_in_place
from .locking import NO_LOCKS, Lock, clear
from .opening import shown
from .pieces import ASSEMBLED, is_ours
from .placing import is_url, remove, upload, work_folder

__all__ = ["Marker", "Store"]

_OUTPUT = re.compile(r"(-\d{5}-of-\d{5}\.tok(\.ids|\.loss)?|\.manifest)\Z")  # behind the prefix
LARGEST = 1 << 27  # bytes of a marker: of a shard of a terabyte


@dataclass(frozen=True)
class Marker:
    """That a shard is finished, and what is in it; an empty one has no file.

    spec: a hash of all that decides it. sizes, digests: of its file and of its ids, in bytes, and as their headers say.
    found: what reading the file gave (`FileSums`), for the manifest.
    """

    spec: str
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    text_bytes: int = 0
    sizes: "list[int]" = field(default_factory=list)
    digests: "list[str]" = field(default_factory=list)
    found: "dict[str, Any]" = field(default_factory=dict)

    def encoded(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def parsed(cls, data: bytes) -> "Marker | None":
        """None for what is no marker of this version: then the shard is made anew."""
        try:
            given = json.loads(data)
            if given.pop("version") != 1:
                return None
            marker = cls(**given)
            counts = [marker.documents, marker.empty, marker.tokens, marker.text_bytes, *marker.sizes]
            whole = len(marker.sizes) == len(marker.digests) <= 2 and bool(marker.tokens) == bool(marker.sizes)
            if all(type(count) is int and count >= 0 for count in counts) and whole and isinstance(marker.found, dict):
                return marker
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        return None

    def sums(self) -> Any:
        """`FileSums` of the file. Raises TokenFileError for a marker that somebody has changed."""
        from ..file_sums import FileSums

        try:
            sums = np.frombuffer(base64.b64decode(self.found["sums"], validate=True), "<u4")
            return FileSums(**{**self.found, "sums": sums})
        except (ValueError, TypeError, KeyError) as error:
            raise TokenFileError(f"a shard's marker is damaged ({error}); without it the shard is made anew") from error


class Store:
    """The shards of one prefix.

    Args:
        prefix: where they go: a path without its "-00000-of-…", or a URL.
        work: a folder to work in where that is a URL; None: one in the user's cache folder.

    Raises ConfigurationError.
    """

    def __init__(self, prefix: "str | os.PathLike[str]", work: "str | os.PathLike[str] | None" = None) -> None:
        self.prefix = os.fspath(prefix).removeprefix("file://")
        self.remote = is_url(self.prefix)
        folder, _, self.name = self.prefix.rpartition("/")
        if self.name in ("", ".", "..") or (
            not self.remote and not Path(folder or ("/" if self.prefix[:1] == "/" else ".")).is_dir()
        ):
            raise ConfigurationError(
                f"{shown(self.prefix)!r}: the folder does not exist, or the prefix ends with it; the beginning of a "
                "name in a folder that exists would do, as data/prose for data/prose-00000-of-00064.tok"
            )
        self.markers = f"{self.prefix[: len(self.prefix) - len(self.name)]}.{self.name}.shards"
        self.manifest = f"{self.prefix}.manifest"
        if work is not None and not self.remote:
            raise ConfigurationError(f"work is the folder in which a URL's shards are made; {self.prefix} is no URL")
        self.work = work_folder(self.prefix, work) if self.remote else Path(self.markers)
        self.shared = not self.remote
        """Whether all machines see each other's locks."""
        self.work.mkdir(parents=True, exist_ok=True)
        if not self.remote:
            Path(self.markers).mkdir(exist_ok=True)

    def path(self, name: str) -> str:
        """Of a shard's file, by its name "00003-of-00064"."""
        return f"{self.prefix}-{name}.tok"

    def is_output(self, path: str) -> bool:
        """Whether a file is one that is made here, and no input."""
        if not _OUTPUT.search(path):  # most are none, and asking where a path leads takes long
            return False
        ours = os.path.realpath(self.prefix) if not self.remote else self.prefix
        path = os.path.realpath(path) if not is_url(path) else path
        return path.startswith(ours) and _OUTPUT.fullmatch(path, len(ours)) is not None

    # Reading and writing, here or there ----------------------------------------------------------------------

    def _read(self, path: str, most: int) -> "tuple[bytes, int] | None":
        """The first bytes of a file and its size; None where there is none."""
        if self.remote:
            from ..remote import look_up, read_range

            try:
                file = look_up(path)
            except RemoteFileError as error:
                if error.errno == errno.ENOENT:
                    return None
                raise
            return read_range(file, 0, min(most, file.size)), file.size
        try:
            with Path(path).open("rb") as opened:
                return opened.read(most), os.fstat(opened.fileno()).st_size
        except FileNotFoundError:
            return None

    def finished(self, name: str, spec: str) -> "Marker | None":
        """The marker of a shard that is finished, as it would be made now."""
        data = self._read(f"{self.markers}/{name}.done", LARGEST)
        marker = Marker.parsed(data[0]) if data else None
        if marker is None or marker.spec != spec:
            return None
        for suffix, size, digest in zip(("", ".ids"), marker.sizes, marker.digests, strict=False):
            head, found = self._read(self.path(name) + suffix, own.HEADER) or (b"", -1)
            if found != size or len(head) < own.HEADER or own.parse_header(head).digest.hex() != digest:
                return None
        return marker

    def keep(self, name: str, made: "Path | None", marker: Marker, ids: bool) -> Marker:
        """Gives a finished shard its name, then writes its marker; None: it is empty."""
        from ..file_sums import sum_file

        if made is not None:
            sizes, digests = [], []
            for path in (made, ids_path(made))[: 1 + ids]:
                with path.open("rb") as file:
                    digests.append(own.parse_header(file.read(own.HEADER)).digest.hex())
                    sizes.append(os.fstat(file.fileno()).st_size)
            with made.open("rb") as file:
                layout = own.layout(str(made), file.read(own.HEADER), sizes[0], None)
            found = sum_file(layout)
            kept = {key: value for key, value in vars(found).items() if key != "sums"}
            kept["sums"] = base64.b64encode(found.sums.astype("<u4").tobytes()).decode()
            marker = replace(marker, sizes=sizes, digests=digests, found=kept)
        if made is not None and self.remote:
            upload(made, self.path(name), ids)
        elif made is not None:
            put_in_place(made, Path(self.path(name)), ids)
        elif not self.remote:  # of another run
            for old in (Path(self.path(name)), ids_path(self.path(name))):
                old.unlink(missing_ok=True)
        written = self.work / name / f"{ASSEMBLED}.done"  # there, what a kill leaves of it is cleared away
        with replacing(written) as file:
            file.write(marker.encoded())
        self._put(written, f"{self.markers}/{name}.done")
        return marker

    def _put(self, made: Path, place: str) -> None:
        """Gives a whole file of a work folder its name."""
        if self.remote:
            from ..remote import upload as put

            put(made, place)
            made.unlink()
        else:
            made.replace(place)
            sync_folder(Path(place).parent)

    def withdraw_manifest(self) -> None:
        """Takes away a manifest of shards that are to be replaced."""
        if self.remote:
            remove(self.manifest)
        else:
            Path(self.manifest).unlink(missing_ok=True)

    def write_manifest(self, markers: "Sequence[tuple[str, Marker]]") -> None:
        """Of the shards that have tokens, by name, in order."""
        from ..manifest import write_manifest

        layouts: list[TokenLayout] = []
        for name, _ in markers:
            there = self._read(self.path(name), own.HEADER)
            if there is None:
                raise TokenFileError(errno.ENOENT, "was taken away while the run ended", self.path(name))
            layouts.append(own.layout(self.path(name), *there, None))
        sums = (marker.sums() for _, marker in markers)
        while (lock := self.take("manifest")) is None:  # another process without ranks, at the same
            time.sleep(0.1)
        try:
            if self.remote:
                written = lock.folder / f"{ASSEMBLED}.manifest"
                write_manifest(written, layouts, sums, progress=False)
                self._put(written, self.manifest)
            else:  # in its place, from which its paths go
                for left in Path(self.manifest).parent.glob(f".{glob.escape(self.name)}.manifest.*"):
                    left.unlink()  # of a run that was killed
                write_manifest(self.manifest, layouts, sums, progress=False)
        finally:
            lock.release()

    # Who makes what -----------------------------------------------------------------------------------------

    def take(self, name: str) -> "Lock | None":
        """The work folder of a shard, locked; None where another process has it."""
        return Lock.take(self.work / name)

    def tidy(self, name: str) -> None:
        """Takes the work folder of a finished shard away, where a run was killed before it could."""
        if (self.work / name).exists() and (lock := self.take(name)) is not None:
            clear(lock.folder, is_ours)
            lock.release()

    @contextlib.contextmanager
    def joined(self, plan: str) -> Iterator[None]:
        """Holds that processes on this folder make `plan`, a hash: several of the same, never two that differ.

        Raises ConfigurationError.
        """
        with (self.work / "run").open("a+b", buffering=0) as file:
            self._join(file, plan.encode())
            yield

    def _join(self, file: "IO[bytes]", plan: bytes) -> None:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else is here
                file.truncate(0)
                file.write(plan)
                fcntl.flock(file, fcntl.LOCK_SH)  # for a moment nobody has it: so what it says is read again
            except BlockingIOError:
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.shared = False
                return
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                file.seek(0)
                found = file.read()
                if found == plan:
                    return
                if found:
                    raise ConfigurationError(
                        f"{self.prefix}: another run makes shards of this name now, with other arguments, inputs or "
                        "versions; wait for it, end it, or choose another prefix"
                    )
                fcntl.flock(file, fcntl.LOCK_UN)  # of one that was killed just then
