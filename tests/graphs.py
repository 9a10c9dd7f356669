"""Graphs as a caller sees them: items, shape, all that shows that one was changed; and nodes of a user's own."""

import pickle

from tokenpipe.datapipes import IndexedDataPipe
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.names import inputs_of, node_names


class Counted(IndexedDataPipe):
    """A user's own source: its item k is k · step."""

    functional_name = "counted"
    sequence_length = 8
    finite = True

    def __init__(self, called: str, samples: int, step: int = 1) -> None:
        super().__init__()
        self.called, self.samples_per_pass, self.end, self.step = called, samples, samples, step

    name = property(lambda self: self.called)
    content = property(lambda self: f"{self.called} {self.end}")
    samples_per_pass = end = 0

    def fetch(self, numbers, columns=None):
        return [int(n) * self.step for n in self.checked(numbers)]


def _flat(value):
    return [one for part in value for one in _flat(part)] if isinstance(value, (list, tuple)) else [value]


class Several(IterDataPipe):
    """A user's own node that gives what all of its inputs give, wherever they lie in its attributes."""

    def __init__(self, first, named, rest=()):
        self.first, self.named, self.rest, self.again = first, named, [*rest], first

    def __iter__(self):
        yield from self.first
        for one in _flat([*self.named.values(), self.rest]):
            yield from one


def items(graph):
    return [graph.fetch([i])[0] for i in range(min(graph.end, 60))] if isinstance(graph, IndexedDataPipe) else [*graph]


def shape(graph):
    """Names, kinds and who reads from whom: what a graph is, without which objects it is made of."""
    names = node_names(graph)
    return [(name, [names[id(c)] for c in inputs_of(node)]) for node, name in nodes(graph).items()]


def nodes(graph):
    names, found, waiting = node_names(graph), {}, [graph]
    while waiting:
        node = waiting.pop(0)
        if node not in found:
            found[node] = names[id(node)]
            waiting += inputs_of(node)
    return found


def looks(graph):
    """All that a caller could notice of a graph that was changed."""
    prints = graph.fingerprint() if isinstance(graph, IndexedDataPipe) else ""
    ids = [(id(node), [id(c) for c in inputs_of(node)]) for node in nodes(graph)]
    return ids, shape(graph), pickle.dumps(graph), prints
