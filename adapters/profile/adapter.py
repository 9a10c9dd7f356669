"""Profile: clocks around every node of a graph, and what they have said."""

import os
from typing import Any

from ...datapipes._torch import DataPipe
from ...datapipes.atomic import replacing
from ...datapipes.core import IndexedDataPipe
from ...datapipes.errors import LoaderError
from ...datapipes.names import named_nodes, node_names
from ..around import is_function, put_around
from ..base import Adapter
from .book import GATHER, NodeProfile, Probe, ProfileBook
from .measure import ProfileWrapper
from .report import remedy, report, trace_events

__all__ = ["Profile"]


class Profile(Adapter):
    """Measures every node: own and total time, calls, samples, bytes, waiting, what it keeps; merged over workers.

    It keeps what it measured, also after the loader is shut down, and costs some hundredths of the graph's time.

        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> profile = Profile()
        >>> items = list(profile(IterableWrapper(range(100)).map(str).batch(10)))
        >>> [(node.node, node.calls) for node in profile.nodes]
        [('batch', 10), ('map', 100), ('iterablewrapper', 100)]
        >>> print(profile.report())  # doctest: +ELLIPSIS
        node             share  own s  total s  waits s  ms/call  longest ms  calls  samples   MB  keeps MB
        ...
        Slowest: ...
    """

    keeps_items = True

    def __init__(self) -> None:
        self.ledger = ProfileBook()
        self.graph: DataPipe | None = None
        self.functions: set[str] = set()  # nodes that are functions of each item
        self._below: dict[str, list[str]] = {}  # {node: itself and all nodes below}

    def __call__(self, datapipe: DataPipe) -> DataPipe:
        names = node_names(datapipe)
        graph = put_around(
            datapipe,
            [node for node, _ in named_nodes(datapipe)],
            lambda node: ProfileWrapper(
                names[id(node)], self.ledger, node is datapipe, isinstance(node, IndexedDataPipe)
            ),
            innermost=True,
        )
        self.functions, self._below = set(), {}
        gathers = {id(node) for node, _ in named_nodes(datapipe) if hasattr(type(node), "gathered")}
        for node, name in named_nodes(datapipe):
            if is_function(node) or hasattr(node, "fn"):
                self.functions.add(name)
            below = [below for below, _ in named_nodes(node)]
            self._below[name] = [names[id(n)] for n in below] + [
                names[id(n)] + GATHER for n in below if id(n) in gathers
            ]
            if id(node) in gathers:
                self._below[name + GATHER] = [name + GATHER]
        self.graph = datapipe
        return graph

    # What was measured --------------------------------------------------------------------------------------

    @property
    def nodes(self) -> "list[NodeProfile]":
        """Each node, from the last one down."""
        probes = self.ledger.merged()
        found = []
        for name, below in self._below.items():
            probe = probes.get(name, Probe())
            total = sum(probes[other].own for other in below if other in probes)
            waiting = max(0.0, probe.own - probe.computing)
            found.append(
                NodeProfile(
                    name,
                    round(probe.calls),
                    round(probe.samples),
                    round(probe.bytes),
                    probe.own,
                    total,
                    waiting,
                    probe.longest,
                    probe.held,
                )
            )
        return found

    @property
    def slowest(self) -> "NodeProfile | None":
        """The node that takes most of the time by itself."""
        return max((node for node in self.nodes if node.own), key=lambda node: node.own, default=None)

    @property
    def items(self) -> int:
        """How many items the training loop took."""
        return self.ledger.loop.count if self.ledger.loop is not None else 0

    @property
    def waited(self) -> float:
        """Seconds that the training loop waited for items."""
        return self.ledger.loop.total if self.ledger.loop is not None else 0.0

    @property
    def waited_share(self) -> float:
        """How much of the training loop's time that was."""
        return self.waited / (self.ledger.loop.lasted or 1.0) if self.ledger.loop is not None else 1.0

    @property
    def workers(self) -> int:
        """How many other processes have made items."""
        return len(self.ledger.processes)

    def report(self) -> str:
        """A table of the nodes, with the slowest one named, and what to do about it."""
        return report(self)

    def trace(self, path: "str | os.PathLike[str]") -> None:
        """Writes what ran when (of the calls that were timed, the last 50,000) as a Chrome trace: perfetto.dev,
        chrome://tracing. Raises OSError.
        """
        with replacing(path) as file:
            file.write(trace_events(list(self.ledger.spans), os.getpid()).encode())

    def draw(self, path: "str | os.PathLike[str] | None" = None) -> Any:
        """The graph, its nodes coloured by their own time; see tokenpipe.adapters.draw."""
        from ...datapipes.draw import draw

        if self.graph is None:
            raise LoaderError("this Profile was put on no graph yet")
        found = {node.node: node for node in self.nodes}
        whole = sum(node.own for node in found.values()) or 1.0
        most = max((node.own for node in found.values()), default=0.0) or 1.0
        heat, notes = {}, {}
        for name, node in found.items():
            if not name.endswith(GATHER):
                gather = found.get(name + GATHER)
                own = node.own + (gather.own if gather else 0.0)
                heat[name] = min(1.0, own / most)
                calls = f", {node.calls:,} calls" if node.calls else ""
                notes[name] = f"{own / whole:.1%}: {own:.3g} s{calls}" if own else ""
        if (slowest := self.slowest) is not None:
            notes[slowest.node.removesuffix(GATHER)] += f"\nslowest, {remedy(self)}"
        return draw(self.graph, path, heat=heat, notes=notes)
