"""Many token files from texts, made by any number of processes and machines, with the same bits.

    inputs ──cut──▶ pieces ──runs of them──▶ shard 0 … N − 1 ──whoever is free──▶ P-00000-of-N.tok … ──▶ P.manifest

Which documents a shard has depends on the inputs and N alone. Every process lists the inputs and cuts them for itself,
then takes shards that are not finished, one lock each: on one machine, on several that share a folder, under torchrun.
So a slow process delays one shard, and what a dead one had begun is taken up by the others, or by the next run. Each
begins with those of its rank's number; where locks cannot be had (object storage, some cluster file systems) it makes
these alone. A run has one kind of worker, one pool of them, and pieces of the next shard are dealt before the last
one is whole.
"""

import contextlib
import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core import as_count
from ..document_ends import cores
from ..errors import ConfigurationError
from ..permute import derive_key
from .assemble import Job, assemble, prepare
from .documents import InputFile, Span, cut_into_pieces
from .listing import list_inputs
from .locking import Lock, clear, full_disk_named
from .pieces import Piece, Task, is_ours
from .pool import Workers
from .progress import Progress
from .shard_store import Marker, Store

__all__ = ["Shard", "ShardsSummary", "make_shards", "tokenize_shards"]

SHARD_BYTES = 1 << 30  # of input, at most, where their number is left open
SHARDS, SMALLEST = 64, 1 << 22  # so many at least, where they are not smaller than that
PARTS = 16  # pieces of a shard at least, where they are not smaller than PIECE_BYTES[0]
PIECE_BYTES = (1 << 16, 1 << 24)
MOST_SHARDS = 99_999
WAIT = (0.02, 2.0)  # seconds between two looks at what others do: at first, at most


@dataclass(frozen=True)
class ShardsSummary:
    """What `tokenize_shards` made.

    path: of the manifest. shards: files that it names. empty_shards: that would have had no token: no file is made of
    them. kept_shards: finished before this run. documents … end_of_text: of all shards, as a TokenizeSummary's.
    seconds: of this run. tokens_per_second: of what was tokenised meanwhile, by all processes.
    """

    path: str
    shards: int
    empty_shards: int
    kept_shards: int
    documents: int
    empty_documents: int
    tokens: int
    text_bytes: int
    dtype: str
    end_of_text: str
    seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        empty = f" ({self.empty_documents:,} empty ones left out)" if self.empty_documents else ""
        none = f" ({self.empty_shards:,} empty ones left out)" if self.empty_shards else ""
        close = f", each closed by {self.end_of_text}" if self.end_of_text else ", without an end-of-text token"
        kept = f"; {self.kept_shards:,} shards kept from an earlier run" if self.kept_shards else ""
        return (
            f"{self.path}: {self.shards:,} shards{none}, {self.documents:,} documents{empty}{close}\n"
            f"{self.tokens:,} {self.dtype} tokens of {self.text_bytes:,} bytes of text "
            f"({self.text_bytes / self.tokens:.2f} bytes a token)\n"
            f"{self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s over all processes{kept}"
        )


class Shard(NamedTuple):
    """What one shard is made of. name: "00003-of-00064". key: of its documents' permutation, or None. size: bytes of
    input. spec: a hash of all that decides its bits.
    """

    name: str
    pieces: "list[list[Span]]"
    key: "int | None"
    size: int
    spec: str


def tokenize_shards(
    inputs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]",
    output_prefix: "str | os.PathLike[str]",
    tokenizer: "str | os.PathLike[str]",
    *,
    shards: "int | None" = None,
    column: str = "text",
    ids: "str | None" = None,
    kind: str = "auto",
    end_of_text: "str | bool" = True,
    shuffle_documents: bool = False,
    seed: int = 0,
    workers: "int | None" = None,
    dtype: object = None,
    progress: "bool | None" = None,
    split: str = "train",
    work: "str | os.PathLike[str] | None" = None,
    ray: "bool | str" = False,
) -> ShardsSummary:
    """Writes token files `P-00000-of-00064.tok` … from texts, and `P.manifest`, which `TokenReader` reads them all by.

    Any number of processes on any machines may call this with the same arguments at the same time: they share the work
    by locks in the folder, and each returns when all shards are finished. Under torchrun the first rank writes the
    manifest, last of all. Killed at any moment and called again, with more processes or fewer, it goes on from the
    shards and pieces that were finished, and the files have the same bits.

    Args:
        inputs, tokenizer, column, ids, kind, split, end_of_text, dtype, progress: as `tokenize_files`'; ids are kept in
            `….tok.ids`.
        output_prefix: P: a path in a folder that exists and that all machines see, or a URL (s3://bucket/prose).
        shards: N, how many, each a run of the documents in order; left out: by the bytes of the inputs alone, one for
            each GiB, but at least 64 as long as they have 4 MiB each.
        shuffle_documents: within each shard, by `seed`.
        workers: processes that this one starts; left out: as many as it may use cores, shared by the machine's ranks.
        work: a folder, for the shards of a URL until they are uploaded; left out: one in the user's cache folder.
        ray: a task of Ray for each shard, on the cluster at this address (True: the one that RAY_ADDRESS names, or a
            new one here); this process writes the manifest.

    Raises as `tokenize_files`; ConfigurationError also where others make P with other arguments at the same time;
    RemoteFileError.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"text": "one"}\\n{"text": "three"}\\n{"text": "five"}\\n')
    >>> summary = tokenize_shards(folder / "a.jsonl", folder / "a", "byte", shards=2, workers=1)
    >>> sorted(path.name for path in folder.glob("a-*")), summary.documents
    (['a-00000-of-00002.tok', 'a-00001-of-00002.tok'], 3)
    >>> from tokenpipe.datapipes import TokenReader
    >>> len(TokenReader(summary.path))
    15
    """
    rank, world, here = _ranks()
    count = as_count("workers", max(1, cores() // here) if workers is None else workers)
    as_count("seed", seed, 0)
    began = time.perf_counter()
    job = prepare(tokenizer, column, ids, end_of_text, dtype)
    wanted = None if shards is None else as_count("shards", shards)
    store = Store(output_prefix, work)
    files = [file for file in list_inputs(inputs, kind, split=split) if not store.is_output(file.path)]
    if not files:
        raise ConfigurationError("no input was named but shards of an earlier run")
    wanted = default_shards(sum(file.size for file in files)) if wanted is None else wanted
    if wanted > MOST_SHARDS:
        raise ConfigurationError(f"shards is {wanted}; up to {MOST_SHARDS:,} would do")
    plan = cut_into_shards(files, wanted, job, seed if shuffle_documents else None)
    whole = hashlib.blake2b("".join(shard.spec for shard in plan).encode(), digest_size=32).hexdigest()
    with store.joined(whole), full_disk_named(store.prefix, store.work):
        done = {shard.name: marker for shard in plan if (marker := store.finished(shard.name, shard.spec)) is not None}
        kept = {*done}
        with Progress(sum(shard.size for shard in plan), progress if rank == 0 or progress else False) as bar:
            left = []
            for shard in plan:
                if shard.name in done:
                    bar.keep(shard.size)
                    store.tidy(shard.name)
                else:
                    left.append(shard)
            made: dict[str, Marker] = {}
            if ray is not False:
                from .on_ray import make_on_ray

                made = make_on_ray(left, job, store, work, ray, bar)
            elif left:
                own = [shard for number, shard in enumerate(plan) if number % world == rank and shard.name not in done]
                made = make_shards(left, own, job, store, count, bar)
            done.update(made)
        if rank == 0:
            full = [(shard.name, done[shard.name]) for shard in plan if done[shard.name].tokens]
            if not full:
                raise ConfigurationError("the inputs hold no text: not one document has a token")
            store.write_manifest(full)
    seconds = time.perf_counter() - began
    markers = list(done.values())
    tokens = sum(marker.tokens for marker in markers)
    before = sum(done[name].tokens for name in kept)
    return ShardsSummary(
        path=store.manifest,
        shards=sum(marker.tokens > 0 for marker in markers),
        empty_shards=sum(marker.tokens == 0 for marker in markers),
        kept_shards=len(kept),
        documents=sum(marker.documents for marker in markers),
        empty_documents=sum(marker.empty for marker in markers),
        tokens=tokens,
        text_bytes=sum(marker.text_bytes for marker in markers),
        dtype=job.settings["dtype"],
        end_of_text=job.end_of_text_name,
        seconds=seconds,
        tokens_per_second=(tokens - before) / seconds,
    )


def default_shards(size: int) -> int:
    """How many shards inputs of so many bytes are cut into; nothing else decides it."""
    return max(1, -(-size // SHARD_BYTES), min(SHARDS, -(-size // SMALLEST)))


def cut_into_shards(files: "list[InputFile]", count: int, job: Job, seed: "int | None") -> "list[Shard]":
    """The inputs in order, in `count` shards of about as many bytes; a shard may have none.

    Args:
        seed: of the permutations; None: documents as they come.
    """
    share = -(-sum(file.size for file in files) // count)
    smallest = min(PIECE_BYTES[0], share)
    pieces = list(cut_into_pieces(files, max(1, smallest, min(PIECE_BYTES[1], share // PARTS))))
    sizes = [sum(span.end - span.start for span in spans) for spans in pieces]
    total = max(1, sum(sizes))
    found: list[list[list[Span]]] = [[] for _ in range(count)]
    for spans, size, end in zip(pieces, sizes, itertools.accumulate(sizes), strict=True):
        found[min(count - 1, (end - size) * count // total)].append(spans)
    shards = []
    for number, of in enumerate(found):
        name = f"{number:05d}-of-{count:05d}"
        key = None if seed is None else derive_key(seed, "shuffle_documents", name)
        size = sum(span.end - span.start for spans in of for span in spans)
        shards.append(Shard(name, of, key, size, job.spec(key, of)))
    return shards


def make_shards(
    left: "list[Shard]", own: "list[Shard]", job: Job, store: Store, workers: int, bar: Progress
) -> "dict[str, Marker]":
    """Returns when all shards are finished: those that are free made here, the others waited for.

    Args:
        left: the shards. own: those of them to begin with, and all that are made where there are no locks.
        workers: how many processes. bar: hears of what others finish, too.
    """
    done: dict[str, Marker] = {}
    names = {shard.name for shard in own}
    order = [*own, *(shard for shard in left if shard.name not in names)]
    pause = WAIT[0]
    most = max(1, sum(len(shard.pieces) for shard in order))
    with contextlib.closing(Workers(min(workers, most), job.for_workers)) as pool:
        while order:
            before = len(done)
            for shard, marker in _made(_free(order, names, store, done, bar), job, store, pool, bar):
                done[shard.name] = marker
            order = [shard for shard in order if shard.name not in done]
            if len(done) > before:
                pause = WAIT[0]
            elif order:  # all are others' now
                time.sleep(pause)
                pause = min(WAIT[1], 1.5 * pause)
    return done


def _free(
    order: "list[Shard]", own: "set[str]", store: Store, done: "dict[str, Marker]", bar: Progress
) -> "Iterator[tuple[Shard, Lock]]":
    """Shards to be made that nobody else makes now, with their locks; what is found finished goes to `done`."""
    for shard in order:
        lock = None
        if store.shared or shard.name in own:
            lock = store.take(shard.name)
            if lock is None:
                continue
        try:
            marker = store.finished(shard.name, shard.spec)
            if marker is None and lock is not None:
                # now and not before: while this one is unfinished, and this process's, no other writes a new one
                store.withdraw_manifest()
            if marker is None and lock is not None and not shard.pieces:
                marker = store.keep(shard.name, None, Marker(shard.spec), False)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if marker is not None:
            done[shard.name] = marker
            bar(shard.size, marker.tokens)
            if lock is not None:
                clear(lock.folder, is_ours)
                lock.release()
        elif lock is not None:
            yield shard, lock
        else:
            return  # that one's maker is waited for: the later ones need no look


def _made(
    free: "Iterator[tuple[Shard, Lock]]", job: Job, store: Store, pool: Workers, bar: Progress
) -> "Iterator[tuple[Shard, Marker]]":
    """Makes shards; a shard is taken when the processes have nothing else left to do."""
    taken: deque[tuple[Shard, Lock]] = deque()

    def tasks() -> "Iterator[Task | Piece]":
        for shard, lock in free:
            taken.append((shard, lock))
            for spans in shard.pieces:
                task = job.task(lock.folder, spans)
                if isinstance(task, Piece):
                    bar.keep(sum(span.end - span.start for span in spans))
                yield task

    try:
        pieces = pool.run(tasks(), bar)
        for first in pieces:
            shard, lock = taken[0]
            counts = [0, 0, 0, 0]
            of = itertools.chain([first], itertools.islice(pieces, len(shard.pieces) - 1))
            writer = assemble(lock.folder, _counted(of, counts), job, shard.key)
            made = None if writer is None else writer.path
            documents, empty, tokens, text_bytes = counts
            marker = Marker(shard.spec, documents, empty, tokens, text_bytes)
            marker = store.keep(shard.name, made, marker, job.ids)
            clear(lock.folder, is_ours)
            lock.release()
            taken.popleft()
            yield shard, marker
    finally:
        if taken:
            pool.close()  # before others may have the folders that its processes write to
        for _, lock in taken:
            lock.release()


def _counted(pieces: "Iterable[Piece]", counts: "list[int]") -> "Iterator[Piece]":
    """Adds up documents, empty ones, tokens and bytes of text on the way."""
    for piece in pieces:
        for k, count in enumerate((piece.documents, piece.empty, piece.tokens, piece.text_bytes)):
            counts[k] += count
        yield piece


def _ranks() -> "tuple[int, int, int]":
    """(rank, world size, how many of its ranks are on this machine) as torchrun says; (0, 1, 1) without it."""
    found = []
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        text = os.environ.get(name, "").strip() or str(least)
        if not text.isdigit() or int(text) < least:
            raise ConfigurationError(
                f"{name} is {text!r} in the environment; torchrun sets a number of {least} or more"
            )
        found.append(int(text))
    rank, world, here = found
    if rank >= world:
        raise ConfigurationError(f"RANK is {rank} and WORLD_SIZE {world} in the environment; ranks are below the size")
    return rank, world, here
