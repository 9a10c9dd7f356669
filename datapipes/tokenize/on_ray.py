"""Shards as tasks of Ray: one each, on whatever node has a core free, again where a node or a process died.

    driver   lists and cuts the inputs, deals shards, writes the manifest
    task     makes one shard as any other process would: its lock, its pieces, its marker (shards.py)

So a task that is run again goes on from the pieces that the first had finished. What a task raises is raised by the
driver as itself, and is not tried again. All nodes must see inputs, tokenizer and prefix at the same paths, or as URLs.
"""

import contextlib
import functools
import logging
import os
import socket
from typing import Any, NamedTuple

from ..errors import ConfigurationError, TokenpipeError, WorkerError
from .assemble import Job, prepare
from .pool import raise_said
from .progress import Progress
from .shard_store import Marker, Store
from .shards import Shard, make_shards
from .worker import said

__all__ = ["make_on_ray"]

RETRIES = 3  # of one shard, where its node or process died
REACHED = 10.0  # seconds, or nothing is there
AHEAD = 1000  # tasks that Ray knows of at once


class Order(NamedTuple):
    """What a task needs to know besides its shard; the tokenizer is loaded where the task runs."""

    folder: str
    prefix: str
    work: "str | None"
    tokenizer: str
    column: str
    ids: "str | None"
    end_of_text: "str | bool"
    dtype: str


def make_on_ray(
    left: "list[Shard]",
    job: Job,
    store: Store,
    work: "str | os.PathLike[str] | None",
    address: "bool | str",
    bar: Progress,
) -> "dict[str, Marker]":
    """Makes shards on a cluster, and waits for them.

    Raises what a task raised; WorkerError for a shard whose nodes or processes died RETRIES + 1 times, and where the
    cluster cannot be reached; ConfigurationError without Ray.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("ray=True (--ray) needs the package `ray`: pip install 'tokenpipe[ray]'") from error
    begun = not ray.is_initialized()
    if begun:
        named = address if isinstance(address, str) else os.environ.get("RAY_ADDRESS", "")
        try:
            _reach(named)
            ray.init(address if isinstance(address, str) else None, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise WorkerError(f"cannot reach the Ray cluster at {named!r}: {error}") from error
    order = Order(
        os.getcwd(),  # noqa: PTH109 - as a str
        store.prefix,
        None if work is None else os.fspath(work),
        job.tokenizer_path,
        job.settings["column"],
        job.settings["ids"],
        job.end_of_text_name or False,
        job.settings["dtype"],
    )
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_make)
    try:
        return _collected(ray, task, order, left, store, bar)
    finally:
        if begun:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError where nothing listens at a HOST:PORT, for which Ray itself waits minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), REACHED).close()


def _collected(
    ray: Any, task: Any, order: Order, left: "list[Shard]", store: Store, bar: Progress
) -> "dict[str, Marker]":
    done: dict[str, Marker] = {}
    waiting: dict[Any, Shard] = {}
    rest = iter(left)
    try:
        while True:
            while len(waiting) < AHEAD and (shard := next(rest, None)) is not None:
                waiting[task.remote(order, shard)] = shard
            if not waiting:
                return done
            for one in ray.wait(list(waiting), num_returns=1)[0]:
                shard = waiting.pop(one)
                try:
                    answer = ray.get(one)
                except ray.exceptions.RayError as error:
                    raise WorkerError(
                        f"{store.path(shard.name)}: its task on Ray ended without an answer, after {RETRIES} retries: "
                        f"{error}; run the same again: finished shards and pieces are kept"
                    ) from error
                if "error" in answer:
                    raise_said(answer)
                marker = store.finished(shard.name, shard.spec)
                if marker is None:
                    raise ConfigurationError(
                        f"{store.path(shard.name)}: was made by node {answer['node']}, and is not there for this one; "
                        "a folder that all nodes share, or a URL would do for the prefix"
                    )
                done[shard.name] = marker
                bar(shard.size, marker.tokens)
    finally:
        for one in waiting:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.cancel(one, force=True)


@functools.cache
def _prepared(order: Order) -> Job:
    return prepare(order.tokenizer, order.column, order.ids, order.end_of_text, order.dtype)


def _make(order: Order, shard: Shard) -> "dict[str, Any]":
    """The task: makes one shard; gives the node's name, or what went wrong."""
    with contextlib.suppress(OSError):  # paths may be relative to where the driver runs
        os.chdir(order.folder)
    try:
        job, store = _prepared(order), Store(order.prefix, order.work)
        if job.spec(shard.key, shard.pieces) != shard.spec:
            raise ConfigurationError(
                f"{order.tokenizer}: the tokenizer or its package is another one on node {os.uname().nodename} than "
                "where the run was begun"
            )
        with Progress(shard.size, False) as bar:
            make_shards([shard], [shard], job, store, 1, bar)
    except (TokenpipeError, OSError) as error:
        return said(error)
    return {"node": os.uname().nodename}
