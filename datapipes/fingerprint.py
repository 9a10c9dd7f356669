"""What decides the order, as a hash: graphs by their settings, files by their contents.

A file's fingerprint, version 1: BLAKE2b over its token count, its dtype, and 64 blocks of 4 KiB at places
keyed by the count (all of it, where it is smaller). Paths and times are no part of it. An edit between the
sampled blocks goes unseen; a token file of ours carries a whole hash for that (`verify_token_file`).
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .cache import Made, cached, mapped
from .errors import TokenFileError
from .formats import TokenLayout
from .formats.places import read_parts, together
from .formats.table import LayoutTable
from .remote import RemoteFile
from .remote.urls import identity

if TYPE_CHECKING:
    from .core import IndexedDataPipe

__all__ = [
    "brief_names",
    "describe_order",
    "file_digest",
    "file_digests",
    "files_fingerprint",
    "identity_from",
    "opened_digest",
    "order_fingerprint",
    "order_of",
    "place_of",
    "prefix_fingerprints",
    "source_contents",
    "source_identity",
    "source_lines",
]

BLOCKS, BLOCK = 64, 4096


def files_fingerprint(files: Sequence[TokenLayout]) -> str:
    """32 hex digits of the contents of files in order. Raises TokenFileError."""
    return hashlib.blake2b(bytes.fromhex("".join(file_digests(files))), digest_size=16).hexdigest()


def file_digests(files: Sequence[TokenLayout]) -> "list[str]":
    """64 hex digits of the contents of each file; read once. Raises TokenFileError."""
    if isinstance(files, LayoutTable):
        found = files.column("digest")
        return found if len(found) == len(files) else found * len(files)
    return together(lambda file: file.content, files, [file.path for file in files if not file.digest])


def prefix_fingerprints(files: Sequence[TokenLayout]) -> "list[str]":
    """The same for the first file, the first two, … all of them."""
    total, found = hashlib.blake2b(digest_size=16), []
    for digest in file_digests(files):
        total.update(bytes.fromhex(digest))
        found.append(total.hexdigest())
    return found


def file_digest(file: TokenLayout) -> bytes:
    """32 bytes that stand for the contents of one file. Raises TokenFileError."""
    if file.digest:  # a manifest knows it
        return bytes.fromhex(file.digest)
    if file.remote is not None:
        return _remote_digest(file.remote, *_sampled(file))
    try:
        handle = os.open(file.local, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot read for its fingerprint: {error.strerror}", file.path) from error
    try:
        return opened_digest(file, handle)
    finally:
        os.close(handle)


def opened_digest(file: TokenLayout, handle: int) -> bytes:
    """The same, read anew of a file that is open. Raises TokenFileError."""
    head, places = _sampled(file)
    digest = hashlib.blake2b(head, digest_size=32)
    try:
        for place, count in places:
            block = os.pread(handle, count, place)
            if len(block) != count:
                raise TokenFileError(f"{file.path}: was cut after the graph was built")
            digest.update(block)
    except OSError as error:
        if isinstance(error, TokenFileError):
            raise
        raise TokenFileError(error.errno, f"cannot read for its fingerprint: {error.strerror}", file.path) from error
    return digest.digest()


def _sampled(file: TokenLayout) -> "tuple[bytes, list[tuple[int, int]]]":
    """(what its digest begins with, the (byte, bytes) that it takes in)."""
    head = f"tokenpipe file 1|{file.tokens}|{file.dtype.name}".encode()
    length = file.tokens * file.dtype.itemsize
    if length <= BLOCKS * BLOCK:
        return head, [(file.offset, length)]
    keyed = hashlib.shake_128(head).digest(8 * BLOCKS)
    span = length - BLOCK + 1
    places = sorted(int.from_bytes(keyed[i : i + 8], "little") % span for i in range(0, 8 * BLOCKS, 8))
    return head, [(file.offset + place, BLOCK) for place in places]


def _remote_digest(file: RemoteFile, head: bytes, places: "list[tuple[int, int]]") -> bytes:
    """The same of a remote file, of which nothing else is read; kept on this machine where a version names it."""

    def blocks() -> Iterator[np.ndarray]:
        digest = hashlib.blake2b(head, digest_size=32)
        for block in read_parts(file, [(place, place + count) for place, count in places]):
            digest.update(block)
        yield np.frombuffer(digest.digest(), "<i8")

    if not file.version:
        return next(blocks()).tobytes()
    of = [identity(file.url), file.size, file.version, head.hex()]
    return mapped(cached("digest", of, lambda: Made([(np.int64, blocks())], lambda: ()))).tobytes()


def order_of(graph: "IndexedDataPipe") -> "IndexedDataPipe":
    """The part of a graph that decides the order: below sharder, batcher, limits, skips, maps of the run."""
    while graph.trunk:
        graph = graph.datapipe
    return graph


def source_contents(graph: "IndexedDataPipe") -> "dict[str, str]":
    """{source name: fingerprint of its files} of all readers below; reads the files once."""
    if not graph.children:
        return {graph.name: graph.content}
    found: dict[str, str] = {}
    for child in graph.children:
        for name, content in source_contents(child).items():
            # one name, two readers (a graph without a blend): both count
            same = name not in found or found[name] == content
            found[name] = (
                content if same else hashlib.blake2b((found[name] + content).encode(), digest_size=16).hexdigest()
            )
    return found


def brief_names(names: "list[str]") -> "list[str] | str":
    """The names in order where they are few and short, else their digest: states are small."""
    if len(names) <= 8 and sum(map(len, names)) <= 48:
        return names
    return hashlib.blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()


def describe_order(graph: "IndexedDataPipe") -> "dict[str, str]":
    """{"node@source": settings} of what decides the order, without the files' contents.

    A source is its name, in blends of blends a path of names (escaped as in JSON pointers, RFC 6901).
    """
    return source_lines(order_of(graph))


def source_lines(graph: "IndexedDataPipe") -> "dict[str, str]":
    """The same for a source below a blend, where skips and limits decide the order too."""
    lines: dict[str, str] = {}

    def walk(node: "IndexedDataPipe", place: str) -> None:
        if node.decides_order:
            kind = node.functional_name
            while f"{kind}{place}" in lines:
                kind += "'"
            several = len(node.children) > 1
            which = {"sources": brief_names([child.name for child in node.children])} if several else {}
            settings = {**node.order_settings, **which}
            lines[f"{kind}{place}"] = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        for i, child in enumerate(node.children):
            name = place_of(child.name or str(i))
            fork = len(node.children) > 1 or node.functional_name == "blend"
            walk(child, f"{place}{'/' if place else '@'}{name}" if fork else place)

    walk(graph, "")
    return lines


def place_of(source: str) -> str:
    """A source's name as a part of a path of names."""
    return source.replace("~", "~0").replace("/", "~1")


def source_identity(source: "IndexedDataPipe") -> str:
    """16 hex digits of what decides the order of one source of a blend: its nodes' settings, its contents."""
    return identity_from(source_lines(source), source_contents(source))


def identity_from(lines: "dict[str, str]", contents: "dict[str, str]") -> str:
    """The same from {node: settings} and {name: contents}, of which 16 digits count."""
    text = json.dumps([sorted(lines.items()), sorted((name, found[:16]) for name, found in contents.items())])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def order_fingerprint(graph: "IndexedDataPipe") -> str:
    """32 hex digits; see IndexedDataPipe.fingerprint."""
    text = json.dumps([describe_order(graph), source_contents(order_of(graph))], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
