"""An input file as a stream of bytes: on this machine or remote, packed or not, and the same file from first to last.

A packed file is read in bounded memory to the end of its last member (`cat a.gz b.gz`, frames of pzstd); one that is
damaged, or that ends inside a member, is an error and never the end of the text.
"""

import bz2
import contextlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, cast

from ..errors import ConfigurationError, TokenFileError

__all__ = ["DamagedArchiveError", "InputFile", "Unpacked", "needed", "opened", "shown", "unreadable"]

BLOCK = 1 << 24  # bytes of a remote file in one request
TAIL = 1 << 16  # and behind the part that was asked for
FEED = 1 << 16  # bytes of a packed file at a time
SMALL = {"gz": 1 << 12, "zst": 1 << 9}  # to those that cannot be told how much to give at most: 4 and 16 MiB come of it
MOST = 1 << 20  # bytes of text from the others


class InputFile(NamedTuple):
    """A file as it was when the inputs were listed; it must not change until all is read.

    path: or a URL. kind: "text", "jsonl", "parquet" or "arrow". size: bytes, as they lie there. mtime_ns: of a file on
    this machine. packed: "gz", "zst", "bz2", "xz", "lz4" or "". version: of a remote file, as its store says it.
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    packed: str = ""
    version: str = ""

    @property
    def remote(self) -> bool:
        if "://" not in self.path:
            return False
        from ..remote import is_remote

        return is_remote(self.path)

    @property
    def whole(self) -> bool:
        """Whether one process has to read all of it: a text is one document, a packed stream has no places."""
        return self.kind == "text" or bool(self.packed) or (self.kind == "arrow" and self.remote)


class DamagedArchiveError(Exception):
    """A packed file that cannot be unpacked; for documents.py, which knows the line."""


def shown(path: str) -> str:
    """A path as it is, a URL without credentials."""
    if "://" not in path:
        return path
    from ..remote import shown as shown_url

    return shown_url(path)


def unreadable(path: str, error: "OSError | ValueError") -> TokenFileError:
    if isinstance(error, OSError):
        return TokenFileError(error.errno, f"cannot read the input: {error.strerror or error}", path)
    return TokenFileError(f"{path!r} is no path of an input: {error}")


@contextlib.contextmanager
def opened(file: InputFile, stop: "int | None" = None) -> Iterator[IO[bytes]]:
    """The bytes of a file as they lie there; TokenFileError where it is not, before or after, what it was when listed.

    Args:
        stop: about this byte reading will end; None: places here and there are read.
    """
    try:
        if file.remote:  # each request is refused where the file is another
            raw = _RemoteBytes(file, stop)
            yield cast("IO[bytes]", raw if stop is None else io.BufferedReader(raw, TAIL))
            return
        # Path.open takes twice as long, and texts may be many and small; what is read whole needs no buffer
        with open(file.path, "rb", 0 if file.kind == "text" else -1) as stream:  # noqa: PTH123
            _check_unchanged(file, stream)
            yield stream
            _check_unchanged(file, stream)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise unreadable(shown(file.path), error) from error


def _check_unchanged(expected: InputFile, file: "IO[bytes]") -> None:
    at = os.fstat(file.fileno())
    if (at.st_size, at.st_mtime_ns) != (expected.size, expected.mtime_ns):
        raise TokenFileError(
            f"{expected.path}: was written to while it was tokenised: {at.st_size} bytes now, {expected.size} when "
            "the inputs were listed; run it again when the inputs stand still"
        )


class _RemoteBytes(io.RawIOBase):
    """A remote file by ranged reads: in large blocks up to `stop`, small ones behind it; without one, as asked."""

    def __init__(self, file: InputFile, stop: "int | None") -> None:
        from ..remote import RemoteFile

        self._file, self._size, self._stop = RemoteFile(file.path, file.size, file.version), file.size, stop
        self._at = self._first = 0
        self._block = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, out: Any) -> int:
        from ..remote import read_range

        view = memoryview(out).cast("B")
        if not self._first <= self._at < self._first + len(self._block):
            if self._at >= self._size or not len(view):
                return 0
            if self._stop is None:
                wanted = len(view)
            else:
                wanted = min(BLOCK, self._stop - self._at) if self._at < self._stop else TAIL
            self._first = self._at
            self._block = read_range(self._file, self._at, min(self._size, self._at + wanted))
        data = self._block[self._at - self._first :][: len(view)]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _decompressors() -> "dict[str, tuple[Callable[[], Any], bool]]":
    """By name: what makes one for a member, and whether it can be told how much to give at most."""

    def zst() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # archives made with --long=31 too

    def lz4() -> Any:
        import lz4.frame

        return lz4.frame.LZ4FrameDecompressor()

    return {
        "gz": (lambda: zlib.decompressobj(wbits=31), False),
        "zst": (zst, False),
        "bz2": (bz2.BZ2Decompressor, True),
        "xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), True),
        "lz4": (lz4, True),
    }


class Unpacked(io.RawIOBase):
    """What a packed file holds, member after member. `taken`: bytes of the packed file that were read so far.

    Raises DamagedArchiveError; ConfigurationError where the package that unpacks it is missing.
    """

    def __init__(self, packed: "IO[bytes]", kind: str) -> None:
        self._packed, self._kind = packed, kind
        self.taken = 0
        self._blocks = self._unpack()
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        while not self._block:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = memoryview(block)
        view = memoryview(out).cast("B")
        data = self._block[: len(view)]
        view[: len(data)] = data
        self._block = self._block[len(data) :]
        return len(data)

    def _unpack(self) -> Iterator[bytes]:
        make, limited = _decompressors()[self._kind]
        step = SMALL.get(self._kind, FEED)
        member: Any = None
        whole = False  # a member has ended
        while feed := self._packed.read(FEED):
            self.taken += len(feed)
            data = feed
            while data:
                if member is None:
                    data = data.lstrip(b"\0") if whole and self._kind in ("gz", "xz") else data  # padding between them
                    if not data:
                        break
                    member = self._called(make)
                here, data = data[:step], data[step:]
                yield self._called(member.decompress, here, *((MOST,) if limited else ()))
                while limited and not (member.eof or member.needs_input):
                    yield self._called(member.decompress, b"", MOST)
                if member.eof:
                    data, member, whole = (member.unused_data or b"") + data, None, True
        if member is not None or not whole:
            raise DamagedArchiveError(f"the archive ends inside its {self._kind} data: it was cut, or is still written")

    def _called(self, what: "Callable[..., Any]", *arguments: Any) -> Any:
        try:
            return what(*arguments)
        except ImportError as error:
            raise ConfigurationError(f"{needed(self._kind)}: {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # each library has its own
            raise DamagedArchiveError(f"the archive is damaged, or no {self._kind}: {error}") from error


def needed(kind: str) -> str:
    """What to install for a kind of file."""
    package = {"zst": "zstandard", "lz4": "lz4"}.get(kind, "pyarrow")
    return f".{kind} files are read with the package {package}: pip install {package}, or tokenpipe[tokenize]"
