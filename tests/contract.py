"""The one check that every indexed node goes through; your own nodes can too.

from contract import check_indexed_node
def test_my_node(): check_indexed_node(lambda: MyNode(...))
"""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tokenpipe.adapters import list_dps, traverse_dps
from tokenpipe.datapipes import MAX_NUMBER, IndexedDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError, OutOfRangeError
from tokenpipe.datapipes.slice import TokenWindows
from tokenpipe.reading_services import DataLoader2


def same(a: Any, b: Any) -> bool:
    """Whether two items are equal, bit for bit and in type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def all_same(a: Any, b: Any) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def check_indexed_node(make: Callable[[], IndexedDataPipe], items: int = 40) -> None:
    """Everything that DESIGN promises of a node, over its first `items` numbers (and its last ones)."""
    node = make()
    n = min(node.end, items)
    expected = [node.fetch([i])[0] for i in range(n)]

    check_length(node)
    check_items(node, expected)
    check_resume_at_every_item(node, expected)
    check_pickle(node, expected)
    check_routes(node, n)
    check_looks(node, make())
    check_loader_resumes_at_every_item(make, expected)
    assert all_same([node.fetch([i])[0] for i in range(n)], expected), "a node has no hidden state"


def check_length(node: IndexedDataPipe) -> None:
    assert 0 < len(node) <= node.end <= MAX_NUMBER
    if node.finite:
        assert len(node) == node.end
    for beyond in (node.end, node.end + 1, -1, 2**63 - 1, 2**63):
        with pytest.raises(OutOfRangeError):
            node.fetch([beyond])
    with pytest.raises(ArgumentTypeError):
        node.fetch([0.5])
    with pytest.raises(IndexError):
        node[len(node)]
    with pytest.raises(IndexError):
        node[-len(node) - 1]
    assert same(node[-1], node[len(node) - 1])


def check_items(node: IndexedDataPipe, expected: list[Any]) -> None:
    n = len(expected)
    for i in range(min(n, len(node))):
        assert same(node[i], expected[i])
    assert all_same(node.fetch(np.arange(n)), expected)
    mixed = np.random.default_rng(n).integers(0, n, 3 * n)
    assert all_same(node.fetch(mixed), [expected[i] for i in mixed]), "any order, repeats too"
    assert all_same(node.fetch(np.array([0, n - 1], np.uint32)), [expected[0], expected[-1]])
    assert len(node.fetch([])) == 0
    last = [node.end - 1, node.end - 2] if node.end > 1 else [0]
    assert all_same(node.fetch(last)[::-1], node.fetch(last[::-1])), "the last numbers exist too"


def check_resume_at_every_item(node: IndexedDataPipe, expected: list[Any]) -> None:
    n = len(expected)
    for k in range(n):
        assert all_same(node.iterate(k, n), expected[k:])


def check_pickle(node: IndexedDataPipe, expected: list[Any]) -> None:
    used = pickle.dumps(node)
    copy = pickle.loads(used)
    assert all_same([copy.fetch([i])[0] for i in range(len(expected))], expected)
    assert len(used) < 100_000, "maps, plans and tables of samples do not travel"
    assert list_dps(traverse_dps(node))[0] is node


def check_routes(node: IndexedDataPipe, n: int) -> None:
    numbers = np.arange(n, dtype=np.int64)
    try:
        source, routed = node.route(numbers)
    except (ValueError, IndexError):  # an item of zip has no single origin; readers have no children
        return
    if not node.children or isinstance(node, TokenWindows) or node.functional_name == "batch_samples":
        return
    assert source.dtype == routed.dtype == np.int64
    assert ((source >= 0) & (source < len(node.children))).all()
    for s, child in enumerate(node.children):
        at = np.flatnonzero(source == s)
        assert (routed[at] >= 0).all()
        assert (routed[at] < child.end).all()
        which, places = node.places(s, routed[at])
        assert {(int(routed[at][w]), int(p)) for w, p in zip(which, places, strict=True)} >= {
            (int(r), int(i)) for r, i in zip(routed[at], at, strict=True)
        }, "unroute is the inverse of route"
        for hi in range(n + 1):
            below = routed[at[at < hi]]
            assert below.size == 0 or below.max() < node.source_bound(s, hi)


def check_looks(node: IndexedDataPipe, again: IndexedDataPipe) -> None:
    lines = node.tree().splitlines()
    assert node.functional_name in lines[0]
    assert len(lines) >= 1 + len(node.children)
    assert type(node).__name__ in repr(node)
    assert node.fingerprint() == again.fingerprint() == pickle.loads(pickle.dumps(node)).fingerprint()
    assert len(node.fingerprint()) == 32
    assert node.with_children(*node.children).fingerprint() == node.fingerprint()


def check_loader_resumes_at_every_item(make: Callable[[], IndexedDataPipe], expected: list[Any]) -> None:
    n = len(expected)
    loader = DataLoader2(make())
    states = [loader.state_dict()]
    for item, _ in zip(loader, range(n), strict=False):
        states.append(loader.state_dict())
        assert same(item, expected[len(states) - 2])
    for k, state in enumerate(states[:n:3]):
        rest = DataLoader2.from_state(state, make())
        assert all_same((item for item, _ in zip(rest, range(n - 3 * k), strict=False)), expected[3 * k :])
