"""What adapters have noted of a run, as a part of its state:

    "noted": {"retry": {"count": 3}, "skip_errors": {"count": 2, "samples": [81, 4093]}}

It is this rank's own: samples that could not be made, and how often something was tried again. Where nothing is noted,
a state has no such part; what a state has noted of an adapter that is not there any more is left out.
"""

from collections.abc import Mapping
from typing import Any

from ..datapipes._torch import DataPipe
from ..datapipes.batch import SampleBatcher
from ..datapipes.errors import StateError
from ..datapipes.names import named_nodes
from ..datapipes.notes import Ledger
from ..datapipes.wrapped import wrappers_of
from .parse import parse_json

__all__ = ["ledgers_of", "load_noted", "noted"]

MOST_BYTES = 16 * 1024 * 1024


def ledgers_of(datapipe: DataPipe) -> "list[Ledger]":
    """Each ledger of the adapters that were put on a graph, once."""
    found: dict[str, Ledger] = {}
    for node, _ in named_nodes(datapipe):
        holders = [*wrappers_of(node), *([node._skipper] if isinstance(node, SampleBatcher) else [])]
        for ledger in (getattr(holder, "ledger", None) for holder in holders):
            if isinstance(ledger, Ledger):
                found.setdefault(ledger.key, ledger)
    return list(found.values())


def noted(ledgers: "list[Ledger]", consumed: "int | None") -> "dict[str, Any]":
    """The part of a state; empty where nothing is noted."""
    found = {name: said for name, ledger in _named(ledgers).items() if (said := ledger.as_json(consumed))}
    return {"noted": found} if found else {}


def load_noted(ledgers: "list[Ledger]", state: Any) -> None:
    """Goes on from what a state has noted. Raises StateError."""
    if not ledgers:
        return
    if isinstance(state, (str, bytes)):
        state = parse_json(state, MOST_BYTES, floats=True)
    found = state.get("noted", {})
    if not isinstance(found, Mapping) or not all(isinstance(value, Mapping) for value in found.values()):
        raise StateError(f"noted must be an object of objects, got {found!r:.200}")
    for name, ledger in _named(ledgers).items():
        ledger.load(dict(found.get(name, {})))


def _named(ledgers: "list[Ledger]") -> "dict[str, Ledger]":
    names: dict[str, Ledger] = {}
    for ledger in ledgers:
        if ledger.kind:
            same = sum(name.partition("#")[0] == ledger.kind for name in names)
            names[ledger.kind if not same else f"{ledger.kind}#{same + 1}"] = ledger
    return names
