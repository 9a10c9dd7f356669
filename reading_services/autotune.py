"""The service that a graph is run by where its adapters say how: `Defaults` by rule, `Autotune` by trying."""

import copy
from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import torch

from ..adapters.defaults import Autotune, Defaults, Settings, cores
from ..datapipes._torch import DataPipe
from ..datapipes.core import IndexedDataPipe
from ..datapipes.errors import GraphError, LoaderWarning
from ..datapipes.rank_zero import is_rank_zero, warn
from .in_process import InProcessReadingService
from .interface import ReadingServiceInterface
from .multi_processing import MultiProcessingReadingService
from .noted import ledgers_of
from .seeds import SeedGenerator

__all__ = ["service_for"]

ENOUGH = 0.95  # of the best rate


def service_for(
    datapipe: DataPipe, adapters: "Sequence[Any]", given: "ReadingServiceInterface | None"
) -> ReadingServiceInterface:
    """The reading service that was given, or the one that adapters ask for, or InProcessReadingService()."""
    asking = [adapter for adapter in adapters if isinstance(adapter, (Autotune, Defaults))]
    if given is not None:
        if any(isinstance(adapter, Autotune) for adapter in asking):
            warn("Autotune tunes nothing where a reading service is given", LoaderWarning, stacklevel=4)
        return given
    settings: Settings | None = None
    for adapter in asking:
        if isinstance(adapter, Autotune):
            adapter.settings = _tuned(datapipe, adapter)
        settings = adapter.settings
    return InProcessReadingService() if settings is None else _service(settings.num_workers, settings.prefetch)


def _service(workers: int, prefetch: int) -> ReadingServiceInterface:
    return MultiProcessingReadingService(workers) if workers else InProcessReadingService(prefetch)


def _tuned(datapipe: DataPipe, tune: Autotune) -> Settings:
    most = cores()
    candidates = [(0, 0), (0, 2), *((workers, 0) for workers in range(1, most + 1))]
    if len(candidates) > 8:  # few, medium, many
        candidates = [(0, 0), (0, 2), *((w, 0) for w in sorted({1, 2, 4, most // 2, most - 1, most}))]
    say = tune.say if is_rank_zero() else (lambda line: None)
    tune.rates = {}
    for workers, prefetch in candidates:
        try:
            rate = _rate(datapipe, _service(workers, prefetch), tune.seconds / len(candidates))
        except Exception as error:
            if (workers, prefetch) == (0, 0):
                raise  # the graph itself
            say(f"workers {workers}, prefetch {prefetch}: cannot be run so: {type(error).__name__}: {error!s:.200}")
            continue
        tune.rates[workers, prefetch] = rate
        say(f"workers {workers}, prefetch {prefetch}: {rate:,.0f} items/s")
    best = max(tune.rates.values())
    workers, prefetch = next(found for found, rate in tune.rates.items() if rate >= ENOUGH * best)
    say(f"taken: workers {workers}, prefetch {prefetch}")
    return Settings(workers, prefetch, torch.cuda.is_available())


def _rate(datapipe: DataPipe, service: ReadingServiceInterface, seconds: float) -> float:
    """Items a second, of a copy of the graph, from its beginning, without the start of its processes."""
    # what adapters note of it is no part of the run
    own: dict[int, Any] = {id(book): type(book)(**book.settings()) for book in ledgers_of(datapipe)}
    graph = copy.deepcopy(datapipe, own) if own or not isinstance(datapipe, IndexedDataPipe) else datapipe
    try:
        graph = service.initialize(graph)
        items = _endless(graph, service)
        for _ in islice(items, 2):  # what the first ones take is no rate
            pass
        began, count = perf_counter(), 0
        while (now := perf_counter()) - began < seconds or count == 0:
            next(items)
            count += 1
        return count / (now - began)
    finally:
        service.finalize_iteration()
        service.finalize()


def _endless(graph: DataPipe, service: ReadingServiceInterface) -> "Iterator[Any]":
    while True:
        reset = service.initialize_iteration(SeedGenerator(0))
        running = graph if reset is None else reset(graph)
        empty = True
        for item in service.iterate(running):
            empty = False
            yield item
        service.finalize_iteration()
        if empty:
            raise GraphError("there is nothing to measure: the graph gives no item")
