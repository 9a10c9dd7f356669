"""What adapters put around nodes: the nodes stay what they are, and so do the items and every state."""

import copy
import inspect
import pickle
from typing import Any

import dill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper, Mapper, Shuffler

from adapted import (
    ADAPTERS,
    GRAPHS,
    SERVICES,
    Doubles,
    Iterates,
    graphs,
    ignored,
    loader_of,
    negated,
    place_of,
    putting,
)
from contract import all_same
from processes import SOAK, scaled
from tokenpipe import adapters
from tokenpipe.adapters import (
    Adapter,
    PinMemory,
    Placement,
    Prefetch,
    Profile,
    Tap,
    Threads,
    Timeout,
    ToDevice,
    find_dps,
    list_dps,
    traverse_dps,
)
from tokenpipe.datapipes import IndexedDataPipe
from tokenpipe.datapipes.batch import SampleBatcher
from tokenpipe.datapipes.errors import GraphError
from tokenpipe.datapipes.items import items_of
from tokenpipe.datapipes.names import named_nodes
from tokenpipe.datapipes.wrapped import (
    Wrapper,
    as_kind,
    kind_of,
    split_for_main_process,
    with_wrapper,
    without_wrapper,
    wrappers_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forks of a process with threads, by torch
    pytest.mark.filterwarnings("ignore::tokenpipe.datapipes.errors.LoaderWarning"),
    pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted"),
]

REFUSED = {
    "SkipErrors": {"indexed, samples", "indexed, zipped", "map style"},  # their items are in an order, and no rows
    "Prefetch": {"map style"},
}
"""{adapter: the graphs on which it cannot be put}; "Placement" is for those with a map that may be placed."""
PLACED = {
    "indexed, mapped",
    "indexed, a map below",
    "torch, placed",
    "torch, shuffled",
    "torch, forked",
    "torch, demuxed",
    "a user's",
    "a user's without a state",
    "a user's iterator",
    "empty",
}


class Notes(Wrapper):
    """Writes down when it is begun, and each item that comes through."""

    kind = "notes"

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[Any] = []

    def items(self, node: Any, begin: Any) -> Any:
        self.seen.append(f"{self.name} begins")
        for item in begin():
            self.seen.append(item)
            yield item


class Reduces(IterDataPipe):
    """A user's node that says itself how it is pickled, over its own input."""

    def __init__(self, datapipe: Any, n: int) -> None:
        super().__init__()
        self.datapipe, self.n = datapipe, n

    def __iter__(self) -> Any:
        for item in self.datapipe:
            yield item + self.n

    def __reduce_ex__(self, protocol: Any) -> Any:
        if IterDataPipe.reduce_ex_hook is not None:
            return super().__reduce_ex__(protocol)
        return Reduces, (self.datapipe, self.n)


class ReducesToItself(Reduces):
    """The same by its own class, as subclasses want it."""

    def __reduce__(self) -> Any:
        return self.__class__, (self.datapipe, self.n)

    __reduce_ex__ = IterDataPipe.__reduce_ex__


class HasNewArguments(Reduces):
    """One that is made with arguments."""

    def __new__(cls, *arguments: Any, **more: Any) -> "HasNewArguments":
        assert arguments or more
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"datapipe": None}

    __reduce_ex__ = IterDataPipe.__reduce_ex__


# The law ------------------------------------------------------------------------------------------------------


def delivered(graph: Any, service: str) -> "tuple[list[Any], list[Any]]":
    """The items of an epoch, and the place before each and after the last."""
    with loader_of(graph, service) as loader:
        items, places = [], [place_of(loader)]
        for item in loader:
            items.append(item)
            places.append(place_of(loader))
        return items, [*places, place_of(loader)]


def rest_from(place: Any, graph: Any, service: str) -> "list[Any]":
    with loader_of(graph, service) as loader:
        loader.load_state_dict(place)
        return list(loader)


def check_the_law(folder: Any, name: str, worn: "list[str]", service: str, at: "list[int]") -> None:
    def make() -> Any:
        return graphs(folder)[name]()

    def dressed() -> Any:
        return putting(make(), worn)[0]

    items, places = delivered(make(), service)
    try:
        found, found_places = delivered(dressed(), service)
    except GraphError as error:
        if "goes back where it fails" not in str(error):  # Retry, SkipErrors over what takes items ahead: refused, said
            raise
        return
    assert all_same(found, items)
    assert found_places == places, "each state, too"
    for k in {min(k, len(items)) for k in at}:
        assert all_same(rest_from(found_places[k], make(), service), items[k:]), f"saved with, at {k}"
        assert all_same(rest_from(places[k], dressed(), service), items[k:]), f"loaded with, at {k}"


@pytest.mark.parametrize("name", GRAPHS)
def test_each_adapter_by_itself_keeps_the_items_and_every_state(name, tmp_path):
    for i, adapter in enumerate(ADAPTERS):
        check_the_law(tmp_path, name, [adapter], "in process", [3 * i % 10, 10**6] if SOAK or i % 3 == 0 else [3])


@settings(max_examples=scaled(600, 25))
@given(
    st.sampled_from(GRAPHS),
    st.lists(st.sampled_from(list(ADAPTERS)), min_size=2, max_size=5),
    st.sampled_from(["in process", "in process", "reading ahead"]),
    st.lists(st.integers(0, 20), max_size=2),
)
def test_any_adapters_in_any_order_keep_the_items_and_every_state(tmp_path, name, worn, service, at):
    check_the_law(tmp_path, name, worn, service, at)


@settings(max_examples=scaled(100, 6))
@given(st.sampled_from(GRAPHS), st.lists(st.sampled_from(list(ADAPTERS)), min_size=1, max_size=4), st.integers(0, 40))
def test_any_adapters_keep_the_items_and_every_state_under_workers(tmp_path, name, worn, at):
    check_the_law(tmp_path, name, worn, "workers", [at])


@pytest.mark.parametrize("name", GRAPHS)
def test_each_adapter_goes_on_each_graph_that_it_is_for(name, tmp_path):
    for adapter in ADAPTERS:
        _, worn = putting(graphs(tmp_path)[name](), [adapter])
        expected = name in PLACED if adapter == "Placement" else name not in REFUSED.get(adapter, ())
        assert bool(worn) == expected, adapter


def test_a_placement_around_what_takes_a_streams_items_ahead_itself_is_refused(tmp_path):
    for inner in (Prefetch(2, "map"), Placement({"map": Threads(2)})):
        with pytest.raises(GraphError, match=r"map cannot run .* put on before that would do"):
            Placement({"map": Threads(2)})(inner(graphs(tmp_path)["torch, placed"]()))
    graph = Prefetch(2, "map")(Placement({"map": Threads(2)})(graphs(tmp_path)["torch, placed"]()))
    assert all_same(graph, graphs(tmp_path)["torch, placed"]())


def test_no_adapter_that_keeps_items_is_missing_from_the_law():
    known = [getattr(adapters, name) for name in adapters.__all__]
    keeping = {kind.__name__ for kind in known if inspect.isclass(kind) and issubclass(kind, Adapter)}
    assert {name for name in keeping if getattr(adapters, name).keeps_items} == ADAPTERS.keys()


@pytest.mark.parametrize("name", GRAPHS)
def test_an_epoch_after_another_is_as_without(name, tmp_path):
    for worn in ([], ["Profile", "Timeout", "Prefetch"]):
        loaders = [loader_of(g) for g in (graphs(tmp_path)[name](), putting(graphs(tmp_path)[name](), worn)[0])]
        for _ in range(3):
            plain, dressed = (list(loader) for loader in loaders)
            assert all_same(plain, dressed)


# What a node keeps ------------------------------------------------------------------------------------------------


def everything(graph: Any) -> Any:
    """All of the wrappers that may be put on any node."""
    return Profile()(ToDevice("cpu")(PinMemory()(Timeout(60)(Tap(ignored)(graph)))))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_wrapped_node_keeps_its_class_name_and_settings(name, tmp_path):
    graph = graphs(tmp_path)[name]()
    dressed = everything(graph)
    before, after = list(named_nodes(graph)), list(named_nodes(dressed))
    assert [n for _, n in before] == [n for _, n in after]
    for (plain, _), (node, _) in zip(before, after, strict=True):
        assert wrappers_of(node)
        assert not wrappers_of(plain), "the caller's graph is as it was"
        assert kind_of(node) is type(plain)
        assert isinstance(node, type(plain))
        assert (type(node).__name__, type(node).__module__) == (type(plain).__name__, type(plain).__module__)
        assert type(node).__qualname__ == type(plain).__qualname__
        assert type(node).__doc__ == type(plain).__doc__
        assert node in find_dps(traverse_dps(dressed), type(plain))
        assert hasattr(node, "__len__") == hasattr(plain, "__len__")
    assert len(list_dps(traverse_dps(dressed))) == len(before)
    if isinstance(graph, IndexedDataPipe):
        assert dressed.fingerprint() == graph.fingerprint()
        assert [n.settings for n, _ in after] == [n.settings for n, _ in before]
        assert len(dressed) == len(graph)
        assert all_same(dressed.fetch([2, 0, 1]), graph.fetch([2, 0, 1]))
        assert all_same([dressed[0]], [graph[0]])


def test_a_wrapped_graph_has_the_recipe_of_the_graph(tmp_path):
    graph = graphs(tmp_path)["indexed"]()
    assert everything(graph).recipe() == graph.recipe()


COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "the oldest pickle": lambda value: pickle.loads(pickle.dumps(value, 0)),
    "dill": lambda value: dill.loads(dill.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_wrapped_graph_travels_with_what_is_around_it(name, how, tmp_path):
    graph = graphs(tmp_path)[name]()
    dressed = everything(graph)
    found = COPIES[how](dressed)
    assert [[type(w) for w in wrappers_of(n)] for n, _ in named_nodes(found)] == [
        [type(w) for w in wrappers_of(n)] for n, _ in named_nodes(dressed)
    ]
    assert [kind_of(n) for n, _ in named_nodes(found)] == [kind_of(n) for n, _ in named_nodes(graph)]
    if how != "copy":
        with loader_of(found) as there, loader_of(graph) as here:
            assert all_same(there, here)


def test_torchs_shuffle_which_has_a_setstate_of_its_own_travels_wrapped():
    shuffled = Tap(ignored)(IterableWrapper(range(10)).shuffle(buffer_size=3).set_seed(4))
    for copied in COPIES.values():
        found = copied(shuffled)
        assert kind_of(found) is Shuffler
        assert isinstance(found, Shuffler)
        assert [type(w) for w in wrappers_of(found)] == [type(w) for w in wrappers_of(shuffled)]
        assert sorted(found) == list(range(10))


@pytest.mark.parametrize("how", [how for how in COPIES if how != "copy"])
@pytest.mark.parametrize("kind", [Reduces, ReducesToItself, HasNewArguments])
def test_a_node_with_a_reduce_of_its_own_travels_with_what_is_around_it(kind, how):
    graph = Profile()(kind(IterableWrapper(range(4)), 3).map(negated))
    assert list(graph) == [-3, -4, -5, -6]
    found = COPIES[how](graph)
    assert list(found) == [-3, -4, -5, -6]
    assert [kind_of(n) for n, _ in named_nodes(found)] == [Mapper, kind, IterableWrapper]
    assert [len(wrappers_of(n)) for n, _ in named_nodes(found)] == [1, 1, 1]


def test_a_node_that_is_its_own_iterator_can_be_wrapped():
    seen: list[Any] = []
    graph = Tap(seen.append)(Iterates(IterableWrapper(range(5))))
    assert list(graph) == [100, 101, 102, 103, 104] == seen
    assert list(graph) == [100, 101, 102, 103, 104], "and begun again"


def test_the_innermost_wrapper_sees_an_item_first():
    first, second, third = (Notes(name) for name in "abc")
    log: list[Any] = []
    for wrapper in (first, second, third):
        wrapper.seen = log
    node = with_wrapper(with_wrapper(IterableWrapper([7]).map(negated), second), third)
    with_wrapper(node, first, innermost=True)
    assert wrappers_of(node) == (first, second, third)
    assert list(node) == [-7]
    assert log == ["c begins", "b begins", "a begins", -7, -7, -7]
    without_wrapper(node, lambda wrapper: wrapper is second)
    assert wrappers_of(node) == (first, third)
    without_wrapper(node, lambda wrapper: True)
    assert (type(node), vars(node).get("_wrappers")) == (Mapper, None)


@pytest.mark.parametrize("name", GRAPHS)
def test_with_and_without_is_the_identity(name, tmp_path):
    graph = graphs(tmp_path)[name]()
    nodes = [node for node, _ in named_nodes(graph)]
    before = [(type(node), dict(vars(node))) for node in nodes]
    for node in nodes:
        with_wrapper(node, Notes("a"))
        without_wrapper(node, lambda wrapper: True)
    for node, (kind, attributes) in zip(nodes, before, strict=True):
        assert type(node) is kind
        assert vars(node).keys() == attributes.keys()
        assert all(vars(node)[key] is value for key, value in attributes.items())


def test_taking_off_what_is_not_there_changes_nothing():
    node = IterableWrapper(range(3))
    assert without_wrapper(node, lambda wrapper: True) is node
    assert type(node) is IterableWrapper


def test_a_node_becomes_one_of_another_kind_under_its_wrappers():
    class Tens(IterableWrapper):
        def __iter__(self) -> Any:
            return (10 * item for item in IterableWrapper.__iter__.__wrapped__(self))

    notes = Notes("a")
    node = with_wrapper(IterableWrapper(range(3)), notes)
    as_kind(node, Tens)
    assert (kind_of(node), wrappers_of(node)) == (Tens, (notes,))
    assert list(node) == [0, 10, 20]
    assert notes.seen == ["a begins", 0, 10, 20]


def test_what_is_for_the_training_loop_and_all_around_it_stays_there(tmp_path):
    for make in (graphs(tmp_path)["indexed"], graphs(tmp_path)["torch, placed"]):
        graph = Tap(ignored)(ToDevice("cpu")(Timeout(60)(make())))
        inner, around = split_for_main_process(graph)
        assert [w.kind for w in wrappers_of(inner)] == ["timeout"]
        assert [w.kind for w in around] == ["to_device", "tap"]
        assert [w.kind for w in wrappers_of(graph)] == ["timeout", "to_device", "tap"], "the graph stays whole"
        plain = Timeout(60)(make())
        assert split_for_main_process(plain) == (plain, ())


def test_a_state_of_a_node_goes_through_what_is_around_it():
    node = Tap(ignored, Doubles)(Doubles(IterableWrapper(range(3))).map(negated)).datapipe
    items = iter(node)
    assert [next(items), next(items), next(items)] == [0, 0, 1]
    assert node.state_dict() == {"again": 1}
    node.load_state_dict({"again": 5})
    assert next(iter(node)) == 5


def test_a_node_that_only_reorders_looks_no_more_like_a_maker_than_before(tmp_path):
    graph = graphs(tmp_path)["indexed"]()
    dressed = Profile()(graph)
    assert isinstance(dressed.children[0], SampleBatcher)
    for (plain, _), (node, _) in zip(named_nodes(graph), named_nodes(dressed), strict=True):
        assert (type(node).fetch is IndexedDataPipe.fetch) == (type(plain).fetch is IndexedDataPipe.fetch)
    assert all_same(items_of(dressed), items_of(graph))


def test_every_service_of_the_law_runs():
    assert list(SERVICES) == ["in process", "reading ahead", "workers"]
