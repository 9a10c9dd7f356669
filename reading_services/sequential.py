"""Several services one after another: each gets the graph that the one before it gave back.

SequentialReadingService(DistributedReadingService(), MultiProcessingReadingService(num_workers=2))
                         over the ranks               over the workers of each rank
"""

import base64
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

from ..adapters.surgery import same_graph
from ..datapipes._torch import DataPipe
from ..datapipes.errors import ArgumentTypeError, ConfigurationError, LoaderWarning, StateError
from ..datapipes.items import items_of
from ..datapipes.rank_zero import warn
from .in_process import InProcessReadingService
from .interface import CheckpointableReadingServiceInterface, ReadingServiceInterface
from .seeds import SeedGenerator
from .stream_state import canonical

__all__ = ["SequentialReadingService"]

FORMAT, VERSION = "tokenpipe-services", 1
GraphPass = Callable[[DataPipe], DataPipe]


class Served:
    """What a service makes of a graph, as something that can be iterated: what the service before it gets."""

    def __init__(self, service: ReadingServiceInterface, datapipe: Any) -> None:
        self._service, self._datapipe = service, datapipe

    def __iter__(self) -> Iterator[Any]:
        return self._service.iterate(self._datapipe)


class SequentialReadingService(CheckpointableReadingServiceInterface):
    """Initialises (or restores) its members in order and finalizes them in reverse.

    Args:
        reading_services: the outermost first: over the ranks, then over the processes of each. The last one that
            makes items itself (has an `iterate` of its own) does so; one before it that does too gets those items.

    `checkpoint` is the members' in one. A member that cannot say where it stands has b"" there, with a warning,
    and is initialised rather than restored.
    """

    def __init__(self, *reading_services: ReadingServiceInterface) -> None:
        if not reading_services:
            raise ConfigurationError("SequentialReadingService needs at least one service")
        for service in reading_services:
            if not isinstance(service, ReadingServiceInterface):
                raise ArgumentTypeError(f"a member must be a ReadingServiceInterface, got {service!r}")
        for i, service in enumerate(reading_services):
            later = next((s for s in reading_services[i + 1 :] if _makes_items(s)), None)
            if isinstance(service, InProcessReadingService) and later is not None:
                raise ConfigurationError(
                    f"{type(service).__name__} runs a graph, and {type(later).__name__} behind it would give it items; "
                    f"{type(later).__name__} before {type(service).__name__} would do"
                )
        self.reading_services = reading_services
        self._ran: DataPipe | None = None

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        """Worker processes of the innermost member that has any; 0: none does."""
        return next((n for s in reversed(self.reading_services) if (n := s.num_workers)), 0)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank's number, of the outermost member that has ranks; 0: none does."""
        return next((s.rank for s in self.reading_services if s.ranks > 1), 0)

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """How many ranks the outermost member that has any runs on; 1: none does."""
        return next((n for s in self.reading_services if (n := s.ranks) > 1), 1)

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        for service in self.reading_services:
            datapipe = service.initialize(datapipe)
        self._ran = datapipe
        return datapipe

    def initialize_iteration(
        self, seed_generator: SeedGenerator, iter_reset_fn: "GraphPass | None" = None
    ) -> "GraphPass | None":
        for service in self.reading_services:
            if iter_reset_fn is None:
                iter_reset_fn = service.initialize_iteration(seed_generator)
            elif _takes_two(service):  # what it gives back stands for both
                iter_reset_fn = service.initialize_iteration(seed_generator, iter_reset_fn)
            else:
                iter_reset_fn = _both(iter_reset_fn, service.initialize_iteration(seed_generator))
        return iter_reset_fn

    def agree(self, standing: "Callable[[], dict[str, Any]]") -> None:
        for service in self.reading_services:
            service.agree(standing)

    def iterate(self, datapipe: DataPipe) -> Iterator[Any]:
        graph: Any = datapipe
        self._ran = datapipe
        for service in reversed(self.reading_services):
            if _makes_items(service):
                graph = Served(service, graph)
        return items_of(graph)

    def metrics(self) -> "dict[str, int | float]":
        return {name: value for service in self.reading_services for name, value in service.metrics().items()}

    def finalize_iteration(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # last in, first out; all, also where one raises
            for service in self.reading_services:
                all_of_them.callback(service.finalize_iteration)

    def finalize(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            for service in self.reading_services:
                all_of_them.callback(service.finalize)

    def checkpoint(self) -> bytes:
        states = [
            service.checkpoint() if isinstance(service, CheckpointableReadingServiceInterface) else _without(service)
            for service in self.reading_services
        ]
        members = [base64.b64encode(state).decode() for state in states]
        return canonical({"format": FORMAT, "version": VERSION, "members": members})

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """As `initialize`, each member with its own part. Raises StateError for what is no state of as many members."""
        set_up = same_graph(datapipe, self._ran)
        for service, state in zip(self.reading_services, self._members(serialized_state), strict=True):
            if isinstance(service, CheckpointableReadingServiceInterface):
                datapipe = service.restore(datapipe, state)
            else:
                _without(service)
                datapipe = datapipe if set_up else service.initialize(datapipe)
        self._ran = datapipe
        return datapipe

    def _members(self, serialized_state: bytes) -> "list[bytes]":
        try:
            state = json.loads(serialized_state)
            if (state["format"], state["version"]) != (FORMAT, VERSION):
                raise ValueError(state["format"])
            members = [base64.b64decode(member, validate=True) for member in state["members"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(f"not a state of a SequentialReadingService: {error!r:.80}") from None
        if len(members) != len(self.reading_services):
            raise StateError(f"a state of {len(members)} services, and here are {len(self.reading_services)}")
        return members


def _makes_items(service: ReadingServiceInterface) -> bool:
    return type(service).iterate is not ReadingServiceInterface.iterate


def _takes_two(service: ReadingServiceInterface) -> bool:
    try:
        inspect.signature(service.initialize_iteration).bind(None, None)
    except TypeError:
        return False
    return True


def _both(first: GraphPass, then: "GraphPass | None") -> GraphPass:
    return first if then is None else lambda datapipe: then(first(datapipe))


def _without(service: ReadingServiceInterface) -> bytes:
    warn(
        f"{type(service).__name__} cannot say where it stands (it is no CheckpointableReadingServiceInterface), so a "
        "resume begins it anew",
        LoaderWarning,
        stacklevel=3,
    )
    return b""
