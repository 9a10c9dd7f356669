"""What a user's exception is when it comes from a worker: a table of all kinds of them."""

import builtins
import dataclasses
import errno
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from nodes import Numbers
from tokenpipe.datapipes.errors import TokenFileError, WorkerError
from tokenpipe.datapipes.names import node_names, where_in_frames, where_of
from tokenpipe.datapipes.raised import RaisedError

WHERE = "in worker process 0 (node blend.0.map, sample 17)"
groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")


# Exceptions as users write them ---------------------------------------------------------------------------


class Plain(ValueError):
    pass


class ExtraArgument(Exception):
    """Its own pickle calls __init__ with the message alone, which fails."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Prefixed(Exception):
    """Its own pickle puts the prefix there twice."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class Prints(RuntimeError):
    def __str__(self) -> str:
        return f"<{self.args[0]}>"


class StrRaises(RuntimeError):
    def __str__(self) -> str:
        raise ZeroDivisionError


class ReduceRaises(RuntimeError):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class ReducesToAnother(RuntimeError):
    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class TwoBases(Plain, OSError):
    pass


class NewNeedsMore(Exception):
    def __new__(cls, code: int, message: str) -> "NewNeedsMore":
        return super().__new__(cls, message)

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class StrOfItsOwn(str):
    def __reduce__(self) -> Any:
        raise TypeError


def with_attributes(error: BaseException, **attributes: Any) -> BaseException:
    error.__dict__.update(attributes)
    return error


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def carried(error: BaseException, where: str = WHERE) -> BaseException:
    """The exception as the main process raises it, over the pickle of what the worker says."""
    said = RaisedError.of(raised(error), where)
    assert all(type(value) in (str, bytes) for value in dataclasses.astuple(said))
    return pickle.loads(pickle.dumps(said)).error()


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def from_a_cause() -> BaseException:
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("the effect") from cause
    except ValueError as error:
        return error


def noted() -> BaseException:
    error = ValueError("with a note")
    if sys.version_info >= (3, 11):
        error.add_note("the note")
    return error


def decoding() -> BaseException:
    try:
        b"ab\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def parsing() -> BaseException:
    try:
        json.loads('{"a": ')
    except json.JSONDecodeError as error:
        return error
    raise AssertionError


def importing() -> BaseException:
    try:
        import no_such_module_anywhere  # noqa: F401
    except ImportError as error:
        return error
    raise AssertionError


# Those that print their argument: the text follows it, in str() ---------------------------------------------

PRINT_THEIR_ARGUMENT: "dict[str, tuple[Callable[[], BaseException], str]]" = {
    "ValueError": (lambda: ValueError("that cannot be"), "that cannot be"),
    "nothing said": (lambda: ValueError(), ""),
    "a number": (lambda: ValueError(5), "5"),
    "an own class": (lambda: Plain("that cannot be"), "that cannot be"),
    "required arguments": (lambda: ExtraArgument(7, "that cannot be"), "that cannot be"),
    "required arguments of __new__": (lambda: NewNeedsMore(7, "that cannot be"), "that cannot be"),
    "a prefix": (lambda: Prefixed(7), "code 7"),
    "KeyError": (lambda: KeyError("key\nof two lines"), r"'key\nof two lines'"),
    "IndexError": (lambda: IndexError("list index out of range"), "list index out of range"),
    "OSError without errno": (lambda: OSError("disk on fire"), "disk on fire"),
    "one of ours": (lambda: TokenFileError("a.tok: cut"), "a.tok: cut"),
    "two bases": (lambda: TwoBases("cut"), "cut"),
    "a reduce that raises": (lambda: ReduceRaises("that cannot be"), "that cannot be"),
    "a reduce to another": (lambda: ReducesToAnother("that cannot be"), "that cannot be"),
    "a lock as an attribute": (lambda: with_attributes(Plain("x"), lock=threading.Lock(), code=7), "x"),
    "an argument that does not travel": (lambda: Plain(threading.main_thread), f"{threading.main_thread}"),
    "a cause": (from_a_cause, "the effect"),
    "a note": (noted, "with a note"),
    "a string of another kind": (lambda: Plain(StrOfItsOwn("that cannot be")), "that cannot be"),
    "half a surrogate pair": (lambda: ValueError("\ud800"), "\ud800"),
    "from json": (parsing, "Expecting value: line 1 column 7 (char 6)"),
}


@pytest.mark.parametrize("kind", PRINT_THEIR_ARGUMENT)
def test_its_class_and_text_arrive_with_what_torch_says_behind_it(kind):
    make, message = PRINT_THEIR_ARGUMENT[kind]
    error = carried(make())
    name = type(make()).__name__
    assert type(error) is type(make())
    assert str(error).startswith(
        f"{message}\n\nCaught {name} {WHERE}.\nOriginal " if message else f"Caught {name} {WHERE}."
    )
    assert "Original Traceback (most recent call last):\n" in str(error)
    assert "in raised\n    raise error" in str(error) or "from" in kind or "cause" in kind
    assert len(str(error).split("Caught")) == 2


# Those that print something else: their arguments stay, the text stands beside ------------------------------

PRINT_OTHERWISE: "dict[str, Callable[[], BaseException]]" = {
    "OSError": lambda: FileNotFoundError(errno.ENOENT, "no such file", "a.tok"),
    "UnicodeDecodeError": decoding,
    "ImportError": importing,
    "two arguments": lambda: ValueError("that cannot be", {"code": 5}),
    "a __str__ of its own": lambda: Prints("that cannot be"),
    "a frozen dataclass": lambda: Frozen(7),
    "a process that failed": lambda: subprocess.CalledProcessError(3, ["true"], b"out"),
}


@pytest.mark.parametrize("kind", PRINT_OTHERWISE)
def test_what_it_prints_and_holds_is_unchanged_and_the_text_stands_beside(kind):
    before = PRINT_OTHERWISE[kind]()
    error = carried(PRINT_OTHERWISE[kind]())
    assert type(error) is type(before)
    assert (str(error), error.args) == (str(before), before.args)
    beside = {"__notes__", "__cause__"}
    assert {k: v for k, v in vars(error).items() if k not in beside} == vars(before)
    assert f"Caught {type(before).__name__} {WHERE}.\nOriginal Traceback (most recent" in shown(error)
    if sys.version_info >= (3, 11):
        with pytest.raises(type(before), match=r"Caught .* in worker process 0"):
            raise error


def test_arguments_and_attributes_arrive_as_far_as_they_travel():
    error = carried(with_attributes(Plain("x", 5, threading.Lock()), code=7, lock=threading.Lock()))
    assert error.args[:2] == ("x", 5)
    assert error.args[2].startswith("<unlocked _thread.lock")
    assert (error.code, hasattr(error, "lock")) == (7, False)
    assert carried(ExtraArgument(7, "x")).code == 7
    error = carried(FileNotFoundError(errno.ENOENT, "no such file", "a.tok"))
    assert (error.errno, error.strerror, error.filename) == (errno.ENOENT, "no such file", "a.tok")
    error = carried(with_attributes(PermissionError(errno.EACCES, "no", "a.tok"), lock=threading.Lock()))
    assert (type(error), error.errno, error.filename) == (PermissionError, errno.EACCES, "a.tok")
    assert (carried(parsing()).pos, carried(importing()).name) == (6, "no_such_module_anywhere")
    assert carried(decoding()).object == b"ab\xff"


def test_causes_and_notes_are_in_the_text():
    text = str(carried(from_a_cause()))
    assert text.index("KeyError: 'the cause'") < text.index("direct cause of the following") < text.rindex("the effect")
    if sys.version_info >= (3, 11):
        error = carried(noted())
        assert error.__notes__ == ["the note"]
        assert "the note" in str(error)


def test_a_str_that_raises_still_says_where():
    error = carried(StrRaises("quiet"))
    assert (type(error), error.args) == (StrRaises, ("quiet",))
    assert f"Caught StrRaises {WHERE}." in shown(error)


@groups
def test_a_group_arrives_with_its_exceptions():
    group = builtins.ExceptionGroup
    error = carried(group("several", [ExtraArgument(7, "first"), Prefixed(5), ValueError("third")]))
    assert type(error) is group
    assert [type(part) for part in error.exceptions] == [ExtraArgument, Prefixed, ValueError]
    assert [str(part) for part in error.exceptions] == ["first", "code 5", "third"]
    assert error.exceptions[0].code == 7
    assert "Caught ExceptionGroup" in shown(error)
    assert "ValueError: third" in error.__notes__[0]
    local = type("Local", (ValueError,), {})
    assert type(carried(group("several", [local("x")])).exceptions[0]) is ValueError
    assert str(carried(group("one", [Prefixed(5)])).exceptions[0]) == "code 5"


# Those that cannot be what they were --------------------------------------------------------------------------


def test_a_class_that_cannot_be_imported_becomes_the_nearest_base_that_can():
    class Local(Plain):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    class Below(Local):
        pass

    error = carried(Below(7))
    assert (type(error), error.code) == (Plain, 7)
    assert str(error).startswith(f"code 7\n\nCaught Below {WHERE}. It is raised as Plain: Below cannot be imported")
    assert "<locals>.Below: code 7" in str(error)

    class Mixed(threading.Thread, LookupError):
        pass

    assert type(carried(Mixed())) is LookupError


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), SystemExit("enough"), KeyboardInterrupt(), GeneratorExit(), StopIteration(3), StopAsyncIteration()],
    ids=repr,
)
def test_what_would_end_the_loop_or_the_program_is_a_worker_error(error):
    found = carried(error)
    assert type(found) is WorkerError
    name = type(error).__name__
    assert str(found).startswith(f"{name}: {error}\n\n" if str(error) else f"{name}\n\n")
    assert f"Caught {name} {WHERE}. It is raised as WorkerError: {name} would end the loop.\nOriginal Trace" in str(
        found
    )


def test_what_does_not_come_back_in_the_main_process_is_a_worker_error_with_the_same_text():
    said = RaisedError.of(raised(Plain("x")), WHERE)
    error = dataclasses.replace(said, pickled=said.pickled.replace(b"Plain", b"Nowhe")).error()
    assert type(error) is WorkerError
    assert str(error).startswith(f"Plain: x\n\nCaught Plain {WHERE}.\nOriginal Traceback")


def speaks(connection: Any) -> None:
    for error in (ExtraArgument(7, "from there"), KeyError("k"), Frozen(3)):
        connection.send(RaisedError.of(raised(error), WHERE))


def test_it_crosses_a_real_process_boundary():
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=speaks, args=(theirs,))
    child.start()
    found = [mine.recv().error() for _ in range(3)]
    child.join()
    assert [type(error) for error in found] == [ExtraArgument, KeyError, Frozen]
    assert (found[0].code, found[2].code) == (7, 3)
    assert all(f"Caught {type(error).__name__} {WHERE}" in shown(error) for error in found)


# Where -------------------------------------------------------------------------------------------------------


def fails(item: Any) -> Any:
    raise ValueError(item)


def of_graph(graph: Any, make: "Callable[[], Any]") -> str:
    try:
        make()
    except ValueError as error:
        return where_of(error, node_names(graph))
    raise AssertionError


def test_the_innermost_node_that_an_exception_came_through_is_named():
    good, bad = Numbers("good", 9), Numbers("bad", 9).map(fails)
    graph = good.zip(bad.permute(seed=1))
    assert of_graph(graph, lambda: graph.fetch([0])) == "zip.1.map"
    assert of_graph(graph, lambda: next(iter(graph))) == "zip.1.map"
    assert of_graph(good, lambda: graph.fetch([0])) == ""
    stream = IterableWrapper([1]).map(fails).map(str).shuffle().batch(2)
    assert of_graph(stream, lambda: next(iter(stream))) == "map#2"


def test_the_innermost_node_of_a_running_stack_is_named_with_the_stack():
    found = []

    def looks(item: Any) -> Any:
        found.append(where_in_frames(sys._getframe(), names))
        return item

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a local function
        stream = IterableWrapper([1]).map(looks).batch(2)
    names = node_names(stream)
    next(iter(stream))
    ((node, text),) = found
    assert node == "map"
    assert text.startswith("  File")
    assert "in looks" in text.splitlines()[-2]
    assert where_in_frames(sys._getframe(), names)[0] == ""
    assert where_in_frames(None, names) == ("", "")
