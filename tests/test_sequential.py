"""Several services in one, and services of a user's own."""

import json
import warnings

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tokenpipe.datapipes.errors import ArgumentTypeError, ConfigurationError, LoaderWarning, StateError
from tokenpipe.reading_services import (
    CheckpointableReadingServiceInterface,
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)


class Doubled(ReadingServiceInterface):
    """As small as a service can be: ten lines with an iteration that takes one argument."""

    def initialize(self, datapipe):
        return datapipe.map(lambda item: 2 * item)

    def initialize_iteration(self, seed_generator):
        self.seed = seed_generator.generate_shared_seed()


class Noting(CheckpointableReadingServiceInterface):
    """Writes down what it is asked."""

    def __init__(self, name, asked, fails=False):
        self.name, self.asked, self.fails = name, asked, fails

    def initialize(self, datapipe):
        self.asked.append(f"{self.name} initialize")
        return datapipe

    def finalize_iteration(self):
        self.asked.append(f"{self.name} finalize_iteration")

    def finalize(self):
        self.asked.append(f"{self.name} finalize")
        if self.fails:
            raise ValueError(self.name)

    def checkpoint(self):
        return b"\x00\xff" + self.name.encode()

    def restore(self, datapipe, serialized_state):
        self.asked.append(f"{self.name} restore {serialized_state!r}")
        return datapipe


class Adding(ReadingServiceInterface):
    """Its reset adds a number on top of what the services before it asked for."""

    def __init__(self, number):
        self.number = number

    def initialize(self, datapipe):
        return datapipe

    def initialize_iteration(self, seed_generator, iter_reset_fn=None):
        def reset(datapipe):
            before = datapipe if iter_reset_fn is None else iter_reset_fn(datapipe)
            return before.map(lambda items: [*items, self.number])

        return reset


class Only(Adding):
    """The same, of a service that knows of no reset before its own."""

    def initialize_iteration(self, seed_generator):
        return super().initialize_iteration(seed_generator)


class Shouting(ReadingServiceInterface):
    """Makes something of the items that the service after it makes."""

    def initialize(self, datapipe):
        return datapipe

    def iterate(self, datapipe):
        return map("{}!".format, super().iterate(datapipe))


def test_a_service_of_ones_own_takes_ten_lines_alone_and_among_others():
    for services in ([Doubled()], [Doubled(), InProcessReadingService()], [InProcessReadingService(), Doubled()]):
        service = SequentialReadingService(*services)
        for epoch in range(2):
            with DataLoader2(IterableWrapper(range(3)), reading_service=service) as loader:
                assert list(loader) == [0, 2, 4], epoch
    with DataLoader2(IterableWrapper(range(3)), reading_service=Doubled()) as loader:
        assert list(loader) == list(loader) == [0, 2, 4]


def test_members_begin_in_order_and_end_in_reverse():
    asked = []
    with DataLoader2(
        IterableWrapper(range(2)), reading_service=SequentialReadingService(Noting("a", asked), Noting("b", asked))
    ) as loader:
        list(loader)
    assert asked == [
        "a initialize",
        "b initialize",
        "b finalize_iteration",
        "a finalize_iteration",
        "b finalize",
        "a finalize",
    ]


def test_a_member_that_fails_at_the_end_lets_the_others_end():
    asked = []
    service = SequentialReadingService(Noting("a", asked), Noting("b", asked, fails=True), Noting("c", asked))
    with pytest.raises(ValueError, match=r"^b$"):
        service.finalize()
    assert asked == ["c finalize", "b finalize", "a finalize"]


def test_resets_of_members_follow_each_other_whatever_they_take():
    datapipe = IterableWrapper([[0], [1]])
    for members in ((Adding(7), Adding(8)), (Adding(7), Only(8)), (Only(7), Adding(8)), (Only(7), Only(8))):
        service = SequentialReadingService(Adding(6), *members)
        with DataLoader2(datapipe, reading_service=service) as loader:
            assert list(loader) == [[0, 6, 7, 8], [1, 6, 7, 8]]
    with DataLoader2(datapipe, reading_service=SequentialReadingService(Adding(6), Plain())) as loader:
        assert list(loader) == [[0, 6], [1, 6]]  # one that says nothing of resets drops none


class Plain(ReadingServiceInterface):
    """Only what every service must have."""

    def initialize(self, datapipe):
        return datapipe


def test_the_innermost_member_makes_the_items_and_those_before_it_get_them():
    numbers = IterableWrapper(range(3))
    ahead = InProcessReadingService(prefetch_cnt=2)
    for services in ([Shouting(), ahead], [Shouting(), Plain()], [Plain(), Shouting()], [Plain(), Shouting(), ahead]):
        with DataLoader2(numbers, reading_service=SequentialReadingService(*services)) as loader:
            assert list(loader) == ["0!", "1!", "2!"]


def test_a_checkpoint_holds_every_member_that_has_one_and_warns_of_the_others():
    asked = []
    service = SequentialReadingService(Noting("a", asked), Plain(), Noting("b", asked))
    with pytest.warns(LoaderWarning, match="Plain cannot say where it stands"):
        state = service.checkpoint()
    assert isinstance(state, bytes)
    datapipe = IterableWrapper(range(2))
    with pytest.warns(LoaderWarning, match="Plain cannot say where it stands"):
        assert service.restore(datapipe, state) is datapipe
    assert asked == ["a restore b'\\x00\\xffa'", "b restore b'\\x00\\xffb'"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within = SequentialReadingService(SequentialReadingService(Noting("a", asked)), Noting("b", asked))
        within.restore(datapipe, within.checkpoint())
    assert asked[2:] == asked[:2]


def test_what_is_no_checkpoint_of_these_members_is_refused():
    service = SequentialReadingService(Noting("a", []), Noting("b", []))
    good = json.loads(service.checkpoint())
    wrong = [b"", b"\x80", b"[]", b"null", b'{"format": 1}', b"[" * 100_000]
    wrong += [
        json.dumps(good | change).encode() for change in ({"version": 2}, {"members": [7, 8]}, {"members": ["*"]})
    ]
    for state in wrong:
        with pytest.raises(StateError, match="not a state of a SequentialReadingService"):
            service.restore(IterableWrapper([]), state)
    with pytest.raises(StateError, match="a state of 2 services, and here are 1"):
        SequentialReadingService(Noting("a", [])).restore(IterableWrapper([]), service.checkpoint())


def test_it_takes_services_and_at_least_one():
    with pytest.raises(ConfigurationError, match="at least one"):
        SequentialReadingService()
    with pytest.raises(ArgumentTypeError, match="ReadingServiceInterface, got 7"):
        SequentialReadingService(Plain(), 7)


def test_ranks_and_workers_are_those_of_the_members():
    class Ranked(Plain):
        rank, ranks, num_workers = 2, 4, 3

    for services in ([Ranked()], [Plain(), Ranked()], [Ranked(), InProcessReadingService()]):
        service = SequentialReadingService(*services)
        assert (service.rank, service.ranks, service.num_workers) == (2, 4, 3)
    service = SequentialReadingService(Plain())
    assert (service.rank, service.ranks, service.num_workers) == (0, 1, 0)
    state = DataLoader2(IterableWrapper([1]), reading_service=SequentialReadingService(Ranked())).state_dict()
    assert [state[name] for name in ("rank", "ranks", "workers")] == [2, 4, 3]


def test_what_runs_a_graph_comes_after_what_is_done_with_its_items():
    for service in (InProcessReadingService(), MultiProcessingReadingService(2)):
        with pytest.raises(ConfigurationError, match=f"Shouting before {type(service).__name__} would do"):
            SequentialReadingService(service, Shouting())


def test_a_loader_that_goes_back_to_a_state_sets_no_member_up_again():
    numbers = IterableWrapper(range(5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoaderWarning)
        service = SequentialReadingService(Doubled(), InProcessReadingService(), Doubled())
        with DataLoader2(numbers, reading_service=service) as loader:
            items = iter(loader)
            first = [next(items), next(items)]
            state = loader.state_dict()
            assert [*first, *items] == [0, 4, 8, 12, 16]
            for _ in range(2):
                loader.load_state_dict(state)
                assert list(loader) == [8, 12, 16]
