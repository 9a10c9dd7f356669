"""A graph travels to a worker process, or the error says which value at which node cannot, and what would do."""

import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from nodes import Numbers
from tokenpipe.datapipes import IndexedDataPipe, TokenReader
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.datapipes.errors import ArgumentTypeError
from tokenpipe.reading_services.workers.pickled import from_bytes, to_bytes

with_dill = pytest.mark.skipif(importlib.util.find_spec("dill") is None, reason="needs dill")
NO_DILL = 'import sys; sys.modules["dill"] = None'
"""What a program says that shall find no dill, installed or not."""

pytestmark = pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported")


@pytest.fixture
def without_dill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dill", None)


def same(item: Any) -> Any:
    return item


class Holder(IterDataPipe):
    """A node with any attributes."""

    def __init__(self, datapipe: Any = None, **attributes: Any) -> None:
        self.datapipe = datapipe
        self.__dict__.update(attributes)

    def __iter__(self) -> Any:
        yield from self.datapipe or ()


class Thing:
    """Something that a node holds."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def apply(self, item: Any) -> Any:
        return item


class LeavesOut(Thing):
    def __getstate__(self) -> "dict[str, Any]":
        return {name: value for name, value in vars(self).items() if name != "lock"}


class RaisesInState(Holder):
    def __getstate__(self) -> Any:
        raise KeyError("no state")


class Slotted:
    __slots__ = ("fn",)

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def local_class() -> type:
    class Local:
        pass

    return Local


def blended(left: IndexedDataPipe, right: IndexedDataPipe) -> IndexedDataPipe:
    return left.permute(seed=7).blend(right.permute(seed=7), weights=[1, 1])


def refused(graph: Any, **beside: Any) -> str:
    with pytest.raises(ArgumentTypeError) as caught:
        to_bytes(graph, **beside)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


# What travels -----------------------------------------------------------------------------------------------


def test_a_graph_and_what_goes_with_it_arrive(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(200)))
    graph = TokenReader(path, dtype="uint16").slice_sequences(4).permute(seed=7).batch_samples(2).map(same)
    graph.fetch([0])  # what was mapped here does not travel
    data = to_bytes(graph, worker_init_fn=same, worker_reset_fn=None)
    assert len(data) < 5000
    copy, beside = from_bytes(data)
    assert [rows.tokens.tolist() for rows in copy.fetch([3, 1])] == [
        rows.tokens.tolist() for rows in graph.fetch([3, 1])
    ]
    assert beside == {"worker_init_fn": same, "worker_reset_fn": None}


def test_what_is_shared_stays_shared_and_a_hidden_lock_is_no_matter():
    shared = IterableWrapper([1, 2])
    graph = Holder(shared.map(same), thing=LeavesOut(lock=threading.Lock(), other=shared))
    copy, beside = from_bytes(to_bytes(graph, below=shared))
    assert copy.thing.other is copy.datapipe.datapipe is beside["below"]
    assert not hasattr(copy.thing, "lock")


# What does not ------------------------------------------------------------------------------------------------

CULPRITS: "dict[str, tuple[Callable[[], Any], str]]" = {
    "a lambda at depth 3": (
        lambda: blended(Numbers("a", 9), Numbers("b", 9).map(lambda x: x)).batch_samples(2).map(same),
        "node 'blend.1.map', attribute fn is ",
    ),
    "a lambda in a stream": (
        lambda: IterableWrapper([1]).map(same).filter(lambda x: x).map(same).batch(2),
        "node 'filter', attribute filter_fn is ",
    ),
    "a lambda in a list in a dict": (
        lambda: Holder(fns={"a": [same], "b": [same, lambda x: x]}).map(same),
        "node 'holder', attribute fns['b'][1] is ",
    ),
    "a lambda in a tuple beside a node": (
        lambda: Holder(pairs=[(IterableWrapper([1]), same), (IterableWrapper([2]), lambda x: x)]),
        "node 'holder', attribute pairs[1][1] is ",
    ),
    "a lambda within partials": (
        lambda: IterableWrapper([1]).map(functools.partial(max, key=functools.partial(lambda x: x))),
        "node 'map', attribute fn.keywords['key'].func is ",
    ),
    "a method of an object with a lambda": (
        lambda: IterableWrapper([1]).map(Thing(deep=Thing(fn=lambda x: x)).apply),
        "node 'map', attribute fn.__self__.deep.fn is ",
    ),
    "a lambda in a slot": (
        lambda: Holder(slotted=Slotted(lambda x: x)),
        "node 'holder', attribute slotted.fn is ",
    ),
    "a lambda beside a lock that is left out": (
        lambda: Holder(thing=LeavesOut(lock=threading.Lock(), fn=lambda x: x)),
        "node 'holder', attribute thing.fn is ",
    ),
    "a lambda in a shuffle's buffer": (  # whose state is a tuple
        lambda: Holder(IterableWrapper([1]).shuffle(), other=1).map(lambda x: x),
        "node 'map', attribute fn is ",
    ),
    "a local class": (lambda: Holder(kind=local_class()), "node 'holder', attribute kind is <class '"),
    "an object of a local class": (
        lambda: Holder(thing=local_class()()),
        "node 'holder', attribute thing.__class__ is <class '",
    ),
    "an object of a local class in a wrapped iterable": (
        lambda: IterableWrapper([1, local_class()()], deepcopy=False).batch(2),
        "node 'iterablewrapper', attribute iterable[1].__class__ is <class '",
    ),
}

RESOURCES: "dict[str, tuple[Callable[[], Any], str]]" = {
    "an open file": (
        lambda: Holder(IterableWrapper([1]), file=Path(__file__).open()),  # noqa: SIM115
        "node 'holder', attribute file is <_io.TextIOWrapper",
    ),
    "a lock": (lambda: Holder(guard=threading.Lock()), "node 'holder', attribute guard is <unlocked _thread.lock"),
    "a lock in an object": (
        lambda: Holder(client=Thing(guard=threading.Lock())),
        "node 'holder', attribute client.guard is <unlocked",
    ),
    "a generator": (
        lambda: IterableWrapper((x for x in range(3)), deepcopy=False).map(same),
        "node 'iterablewrapper', attribute iterable is <generator",
    ),
    "a state that raises": (lambda: RaisesInState(), "node 'raisesinstate' is "),
}


@pytest.mark.usefixtures("without_dill")
@pytest.mark.parametrize("kind", CULPRITS)
def test_a_function_or_class_that_cannot_travel_is_named_with_its_place(kind):
    make, where = CULPRITS[kind]
    text = refused(make())
    assert where in text
    assert "define it at the top of a module" in text
    assert "functools.partial" in text
    assert "or install dill" in text
    if "lambda" in kind:
        assert "<lambda> (test_pickled.py:" in text


@pytest.mark.parametrize("kind", RESOURCES)
def test_a_resource_that_cannot_travel_is_named_with_its_place(kind):
    make, where = RESOURCES[kind]
    text = refused(make())
    assert where in text
    assert "make it where it is first used, such as in __iter__ or in worker_init_fn" in text


@pytest.mark.usefixtures("without_dill")
def test_a_function_beside_the_graph_is_named():
    graph = IterableWrapper([1]).map(same)
    assert "worker: worker_init_fn is " not in refused(graph, worker_reset_fn=lambda dp: dp)
    text = refused(graph, worker_init_fn=same, worker_reset_fn=functools.partial(lambda dp: dp, 3))
    assert "process: worker_reset_fn.func is " in text


class Silent:
    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_a_value_that_cannot_even_be_printed_is_named_by_its_class():
    assert "attribute quiet[0] is <Silent instance at 0x" in refused(Holder(quiet=[Silent()]))


@with_dill
@pytest.mark.parametrize("kind", CULPRITS)
def test_with_dill_it_travels_as_code(kind):
    from_bytes(to_bytes(CULPRITS[kind][0]()))


@with_dill
def test_with_dill_a_lambda_computes_the_same_there():
    offset = 5
    graph, beside = from_bytes(to_bytes(IterableWrapper([1, 2]).map(lambda x: x + offset), fn=lambda x: same(x) * 2))
    assert list(graph) == [6, 7]
    assert beside["fn"](4) == 8


# __main__ ---------------------------------------------------------------------------------------------------

SESSION = """
from torch.utils.data.datapipes.iter import IterableWrapper
from tokenpipe.datapipes._torch import IterDataPipe
from tokenpipe.reading_services.workers.pickled import from_bytes, to_bytes

def double(item):
    return item * 2

class Mine(IterDataPipe):
    def __init__(self):
        super().__init__()
        self.number = 1

    def __iter__(self):
        yield double(self.number)

def attempt(graph, **options):
    try:
        found = from_bytes(to_bytes(graph, **options))[0]
        print(found is not graph and list(found) == list(graph))
    except TypeError as error:
        print(error)

attempt(IterableWrapper(["__main__"]).map(str))
attempt(IterableWrapper([1]).map(str).map(double))
attempt(Mine())
attempt(IterableWrapper([1]).map(double), forked=True)
attempt(IterableWrapper([1]).map(double).filter(lambda x: x > 0), forked=True)
"""


def output_of(*command: str) -> "list[str]":
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_a_notebook_or_a_session_defines_is_refused_and_named():
    text, function, node, forked, mixed = output_of("-W", "ignore", "-c", NO_DILL + SESSION)
    assert text == forked == "True"
    assert "node 'filter', attribute filter_fn is <lambda> (" in mixed
    assert "node 'map', attribute fn is double (" in function
    assert "node 'mine', attribute __class__ is <class '__main__.Mine'>" in node
    for refusal in (function, node):
        assert "defined in a notebook or another interactive session" in refusal
        assert 'put it into a module (a .py file), install dill, or use multiprocessing_context="fork"' in refusal


@with_dill
def test_with_dill_what_a_session_defines_travels_as_code():
    assert output_of("-W", "ignore", "-c", SESSION) == ["True"] * 5


SCRIPT = """
import multiprocessing
from torch.utils.data.datapipes.iter import IterableWrapper
from tokenpipe.reading_services.workers.pickled import from_bytes, to_bytes

def double(item):
    return item * 2

def child(*graphs):
    for data in graphs:
        try:
            print(list(from_bytes(data)[0]))
        except TypeError as error:
            print(error)

if __name__ == "__main__":
    def hidden(item):
        return item * 2

    graphs = [to_bytes(IterableWrapper([3]).map(fn)) for fn in (double, hidden)]
    process = multiprocessing.get_context("spawn").Process(target=child, args=graphs)
    process.start()
    process.join()
"""


def test_a_programs_own_functions_travel_unless_they_stand_below_its_main_guard(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    good, bad = output_of(str(path))
    assert good == "[6]"
    assert "did not find what the graph uses" in bad
    assert "hidden" in bad
    assert 'define functions and classes above it or in a module, or use multiprocessing_context="fork"' in bad
