"""What a streaming node is: its place lies in attributes, and `__iter__` is a thin loop over them.

A stream is pulled: when a graph has delivered an item, each of its nodes waits at the `yield` that led to it. What a
node's attributes say then is its place, so a node sets them *before* it yields:

    class Countdown(StreamingDataPipe):
        initial_state = {"left": 3}

        def __iter__(self):
            while self.left:
                self.left -= 1
                yield self.left + 1

    >>> class Countdown(StreamingDataPipe):
    ...     initial_state = {"left": 3}
    ...     def __iter__(self):
    ...         while self.left:
    ...             self.left -= 1
    ...             yield self.left + 1
    >>> node = Countdown()
    >>> items = iter(node)
    >>> next(items), node.state_dict()
    (3, {'left': 2})
    >>> other = Countdown()
    >>> other.load_state_dict({"left": 2})
    >>> list(other), list(other)
    ([2, 1], [3, 2, 1])
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .._torch import IterDataPipe
from ..errors import StateError
from ..fluent import FluentStreams

if TYPE_CHECKING:
    from ..formats import TokenLayout

__all__ = ["OUTER", "StreamingDataPipe", "as_plain"]

DEEPEST = 16  # levels of a state, of which
OUTER = 8  # may be around that of a node


class StreamingDataPipe(IterDataPipe, FluentStreams):
    """A node of a stream whose place can be saved.

    A subclass names the attributes that are its place in `initial_state`, with the values they begin with, and
    writes `__iter__` over them. They are None, booleans, integers, floats, strings, lists and dicts of these, or 1-D
    int64 arrays, which a state holds as lists. With {} the node holds nothing between its items.

    Three rules: the attributes are set before the `yield`; `__iter__` goes on from what they say; after the last item
    they say that nothing is left. Iteration begins anew, unless a state was loaded: then it goes on from that, once.
    """

    initial_state: ClassVar["Mapping[str, Any]"] = {}

    _loaded = False

    @property
    def settings(self) -> "dict[str, Any]":
        """JSON-able arguments that decide the items; a state is refused where they differ."""
        return {}

    @property
    def content(self) -> str:
        """What the node reads, as a hash; "" where it reads nothing. Computed when a state is saved or loaded."""
        return ""

    @property
    def content_files(self) -> "Sequence[TokenLayout]":
        """The files that `content` is of, so that an error can name those that were replaced."""
        return ()

    def __iter__(self) -> "Iterator[Any]":
        raise NotImplementedError(f"{type(self).__name__} has no __iter__: a loop over the attributes of its state")

    def state_dict(self) -> "dict[str, Any]":
        """The place after the item delivered last: JSON-able, and a copy. Raises StateError for what is no JSON."""
        where, state = type(self).__name__, {}
        for name, begins in self.initial_state.items():
            value = vars(self).get(name, begins)
            if isinstance(begins, np.ndarray):
                if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.ndim != 1:
                    raise StateError(f"{where}.{name} began as an int64 array (n,) and is {value!r:.80} now")
                state[name] = value.tolist()
            else:
                state[name] = as_plain(f"{where}.{name}", value, OUTER + 1)
        return state

    def load_state_dict(self, state: "Mapping[str, Any]") -> None:
        """Goes on from here at the next iteration. Raises StateError for what is no state of such a node."""
        where = type(self).__name__
        if not isinstance(state, Mapping) or state.keys() != self.initial_state.keys():
            found = list(state)[:8] if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"{where}: its state has {list(self.initial_state)}, got {found!r:.200}")
        values: dict[str, Any] = {}
        for name, begins in self.initial_state.items():
            value = as_plain(f"{where}.{name}", state[name])
            kind = list if isinstance(begins, np.ndarray) else type(begins)
            if begins is not None and type(value) is not kind:
                raise StateError(f"{where}.{name}: {kind.__name__} was expected, got {value!r:.80}")
            if isinstance(begins, np.ndarray):
                if not all(type(v) is int and -(2**63) <= v < 2**63 for v in value):
                    raise StateError(f"{where}.{name}: a list of 64-bit integers was expected")
                value = np.array(value, np.int64)
            values[name] = value
        vars(self).update(values, _loaded=True)

    def begin_anew(self) -> None:
        """Sets the attributes as they were first, and forgets a loaded state."""
        self._loaded = False
        self.reset()

    def reset(self) -> None:
        """What torch calls when an iteration begins."""
        if not self._loaded:
            vars(self).update(copy.deepcopy(dict(self.initial_state)))
        self._loaded = False

    def tree(self) -> str:
        """The graph as text, a node a line, from the batches down to the files; see `tree`."""
        from ..tree import tree

        return tree(self)

    def __repr__(self) -> str:
        if IterDataPipe.repr_hook is not None:
            return super().__repr__()
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"

    __str__ = __repr__


def as_plain(name: str, value: Any, depth: int = 0) -> Any:
    """A copy of a value that JSON holds exactly. Raises StateError that names what does not."""
    if value is None or type(value) in (str, bool):
        return value
    if type(value) is int:
        if not -(2**64) < value < 2**64:
            raise StateError(f"{name} is an integer of more than 64 bits")
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise StateError(f"{name} is {value}, which JSON does not have")
        return value
    if depth == DEEPEST:
        raise StateError(f"{name} is nested too deep, by more than {DEEPEST - OUTER} levels in a node")
    if type(value) is list:
        if {*map(type, value)} == {int} and min(value) > -(2**64) and max(value) < 2**64:
            return value[:]  # of left-over tokens, which may be many, and each few items
        return [as_plain(f"{name}[{i}]", v, depth + 1) for i, v in enumerate(value)]
    if type(value) is dict:
        if wrong := [key for key in value if type(key) is not str]:
            raise StateError(f"{name} has the key {wrong[0]!r:.40}, and JSON has strings alone as keys")
        return {key: as_plain(f"{name}[{key!r}]", v, depth + 1) for key, v in value.items()}
    what = "a list would do" if isinstance(value, (tuple, set, frozenset, np.ndarray)) else "int(), float() or a list"
    raise StateError(f"{name} is a {type(value).__name__}, which is no JSON: {what}")
