"""Changes of a running run: whatever is changed, whenever, no sample comes twice and none is lost but those named.

The oracle is a Book of plain lists: what was delivered, in order. It asks the library for one thing only, the order
of one source alone.
"""

import contextlib
import copy
import itertools
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_state import hostile_values, mutated, places, watched  # noqa: F401  (a fixture)

from tokenpipe.datapipes import MAX_NUMBER, IndexedDataPipe, TokenFileWriter, TokenReader, Topology
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    BatchSizeError,
    ConfigurationError,
    JournalError,
    OutOfRangeError,
    SourceGoneError,
    StateError,
    StateMismatchError,
    TokenpipeError,
    WeightsError,
)
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path
from tokenpipe.datapipes.jump import Jumper
from tokenpipe.reading_services import DataLoader2, InProcessReadingService

S = 2  # tokens a row
ROOM = 4000  # token ids a source has: id = ROOM × its number + its place in the source
UNIT = 12  # every batch size is a multiple: each dp × micro-batch below divides it
MOST_BYTES = 64 * 1024
SOAK = 10_000 if os.environ.get("TOKENPIPE_SOAK") else 0

# Sources by their number: (name, rows of its files). Number 4 is another "a".
SHELF = [("a", (17, 5, 11)), ("b", (9, 14)), ("c", (6, 7, 3)), ("d", (13,)), ("a", (15, 8)), ("e", (1, 2))]


class Shelf:
    """The files of all sources, and the order of each one alone."""

    def __init__(self, folder: Path) -> None:
        self.files: list[list[str]] = []
        self.tokens: list[list[int]] = []
        self._orders: dict[Any, list[int]] = {}
        self._nodes: dict[Any, IndexedDataPipe] = {}
        for number, (name, rows) in enumerate(SHELF):
            at, paths = 0, []
            for k, count in enumerate(rows):
                tokens = count * S + (k == 0)
                paths.append(str(folder / f"{number}-{name}-{k}.bin"))
                (np.arange(at, at + tokens) + ROOM * number).astype("<u2").tofile(paths[-1])
                at += tokens
            self.files.append(paths)
            self.tokens.append([count * S + (k == 0) for k, count in enumerate(rows)])

    def source(self, number: int, start: int = 0, stop: int = 1) -> IndexedDataPipe:
        key = (number, start, stop)
        if key not in self._nodes:
            reader = TokenReader(self.files[number][start:stop], dtype="uint16", name=SHELF[number][0])
            self._nodes[key] = reader.slice_sequences(S).permute(seed=7)
        return self._nodes[key]

    def order(self, number: int, start: int, stop: int, epochs: int) -> list[int]:
        """The places of some files' rows, epoch after epoch, as the source over them alone has them."""
        node = self.source(number, start, stop)
        rows = len(node) * epochs
        key = (number, start, stop)
        if len(self._orders.get(key, ())) < rows:
            self._orders[key] = [int(t) - ROOM * number for t in node.fetch(np.arange(rows))[:, 0]]
        return self._orders[key]

    def rows(self, number: int, start: int, stop: int) -> int:
        return len(self.source(number, start, stop))

    def place(self, number: int, token: int) -> tuple[str, int]:
        """(file, place in it) of a token of a source."""
        for path, tokens in zip(self.files[number], self.tokens[number], strict=True):
            if token < tokens:
                return path, token
            token -= tokens
        raise AssertionError("a token beyond the source's files")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


# The oracle ---------------------------------------------------------------------------------------------

Row = tuple[int, int, bool]
"""(number of the source, place of the first token, whether every label is masked)."""


@dataclass
class Book:
    """What was delivered, and what was asked for: lists, walked by `check`."""

    order: list[int]  # every source the run ever had
    files: dict[int, int]  # of each, how many files it has now
    base: dict[int, int]  # weights that the run began with
    exact: bool
    schedule: int
    rows: list[Row] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    now: dict[int, int] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (step, samples a step)
    mixtures: list[tuple[int, dict[int, int]]] = field(default_factory=list)  # (sample, weights)
    growths: list[tuple[int, int, int, int]] = field(default_factory=list)  # (sample, source, had, files)
    jumped: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)  # (sample, rows left out)
    excluded: list[tuple[int, int, int, int]] = field(default_factory=list)  # (sample, source, first, stop)
    roster: bool = False

    def __post_init__(self) -> None:
        self.names = {number: SHELF[number][0] for number in self.order}
        self.now = dict(self.base)
        self.sizes = [(0, self.schedule)]
        self.mixtures = [(0, self.base)]

    @property
    def live(self) -> list[int]:
        return [number for number in self.order if number not in self.dropped]

    @property
    def said(self) -> list[dict[int, int]]:
        """The mixtures that a graph may name: how the run began, that less what was dropped, and how it is now."""
        left = {number: weight for number, weight in self.base.items() if number not in self.dropped}
        return [self.base, *([left] if any(left.values()) else []), self.now]

    def start(self, step: int) -> int:
        sample = 0
        for (at, size), (until, _) in itertools.pairwise([*self.sizes, (step, 0)]):
            sample += max(min(until, step) - at, 0) * size
        return sample

    def step_of(self, sample: int) -> int:
        return next(step for step in itertools.count() if self.start(step + 1) > sample)

    def next_step(self, sample: int) -> int:
        return next(step for step in itertools.count() if self.start(step) >= sample)

    def last_change(self) -> int:
        return max([0, *(s for s, *_ in (*self.mixtures, *self.growths, *self.jumped, *self.excluded))])

    def resized(self, step: int, size: int) -> None:
        before = [(at, old) for at, old in self.sizes if at < step]
        self.sizes = [*before, (step, size)] if not before or before[-1][1] != size else before

    def masked(self, sample: int, number: int, place: int) -> bool:
        return any(
            number == source and sample >= since and place < stop and first < place + S + 1
            for since, source, first, stop in self.excluded
        )

    def stream(self) -> Iterator[tuple[int, "tuple[int, int] | None"]]:
        """(sample, (source, place)) of all that was delivered or jumped over; (sample, None) before each."""
        jumped = dict(self.jumped)
        for sample, (number, place, _) in enumerate(self.rows):
            yield sample, None
            for left_out in jumped.get(sample, ()):
                yield sample, left_out
            yield sample, (number, place)

    def check(self, shelf: Shelf) -> None:
        """The property: each source in its own order, no sample twice before all of its source is through, none
        lost but what a jump names; shares, and the mixing of new files, within the bound; labels masked as asked.
        """
        walks: dict[int, Walk] = {}
        weights: dict[int, int] = {}
        count, total = dict.fromkeys(self.order, 0), 0
        for sample, row in self.stream():
            if row is None:
                if at := [w for s, w in self.mixtures if s == sample]:
                    weights, count, total = at[-1], dict.fromkeys(self.order, 0), 0
                for since, number, had, files in self.growths:
                    if since == sample:
                        if number not in walks:
                            walks[number] = Walk(shelf, number, had)
                        walks[number].grow(files)
                continue
            number, place = row
            if number not in walks:
                first = next((had for _, n, had, _ in self.growths if n == number), self.files[number])
                walks[number] = Walk(shelf, number, first)
            walks[number].take(place)
            count[number], total = count[number] + 1, total + 1
            whole = sum(weights.values())
            for n in self.order:
                share = total * weights.get(n, 0) / whole
                assert abs(count[n] - share) < 3, f"source {n} gave {count[n]} of {total}, {share} were due"
                assert weights.get(n, 0) or not count[n], f"source {n} has weight 0"
        for sample, (number, place, masked) in enumerate(self.rows):
            assert masked == self.masked(sample, number, place), f"labels of sample {sample}"


class Walk:
    """One source, walked row by row: generations of files, each in the order of its own."""

    def __init__(self, shelf: Shelf, number: int, files: int) -> None:
        self.shelf, self.number = shelf, number
        self.cuts = [0, files]
        self.length = [shelf.rows(number, 0, files)]
        self.given = [0]  # by each generation in all
        self.seen = [0]  # by each generation in this pass
        self.mixed = [0]  # since the last growth or the pass's beginning
        self.rest = list(self.length)
        self.firsts = [sum(shelf.tokens[number][:cut]) for cut in self.cuts]

    def grow(self, files: int) -> None:
        self.length.append(self.shelf.rows(self.number, self.cuts[-1], files))
        self.cuts.append(files)
        self.firsts.append(sum(self.shelf.tokens[self.number][:files]))
        self.given.append(0)
        self.seen.append(0)
        self.mixed = [0] * len(self.length)
        self.rest = [n - seen for n, seen in zip(self.length, self.seen, strict=True)]

    def take(self, place: int) -> None:
        if self.seen == self.length:
            self.seen, self.mixed, self.rest = [0] * len(self.seen), [0] * len(self.seen), list(self.length)
        firsts = self.firsts
        g = next(g for g in range(len(self.length)) if firsts[g] <= place < firsts[g + 1])
        where = f"source {self.number}, generation {g}, place {place}"
        assert self.seen[g] < self.length[g], f"{where}: came again before all of the source was through"
        epochs = self.given[g] // self.length[g] + 1
        order = self.shelf.order(self.number, self.cuts[g], self.cuts[g + 1], epochs)
        expected = order[self.given[g]]
        assert place == expected, f"{where}: {expected} was next"
        self.given[g] += 1
        self.seen[g] += 1
        self.mixed[g] += 1
        total, whole = sum(self.mixed), sum(self.rest)
        for n, rest in zip(self.mixed, self.rest, strict=True):
            assert abs(n - total * rest / whole) < 3, f"{where}: new files are not mixed evenly"


# The run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sheet:
    """A graph as a user writes it: its sources in order with so many files, their weights (None: exact)."""

    sources: tuple[tuple[int, int], ...]
    weights: "tuple[int, ...] | None"

    def build(self, shelf: Shelf, rank: int, dp: int, micro: int, size: int) -> IndexedDataPipe:
        first, *others = (shelf.source(number, 0, files) for number, files in self.sources)
        order = first.blend(*others, weights=None if self.weights is None else list(self.weights))
        dealt = order.shard_ranks(Topology(rank, dp), seed=3) if dp > 1 else order
        return dealt.batch_samples(micro, global_batch_size=size).collate_causal_lm(sample_numbers=True)

    def drawn(self) -> "dict[int, int] | None":
        if self.weights is None:
            return None
        return {number: w for (number, _), w in zip(self.sources, self.weights, strict=True) if w}


def same_mixture(a: "dict[int, int]", b: "dict[int, int]") -> bool:
    drawn = [{number: weight for number, weight in mixture.items() if weight} for mixture in (a, b)]
    whole = [sum(mixture.values()) for mixture in drawn]
    return drawn[0].keys() == drawn[1].keys() and all(
        drawn[0][n] * whole[1] == drawn[1][n] * whole[0] for n in drawn[0]
    )


def accepted(book: Book, sheet: Sheet) -> bool:
    """Whether a state of this book loads on this graph without amend."""
    if not book.roster:
        files = tuple((number, book.files[number]) for number in book.order)
        if len(book.mixtures) > 1 and set(sheet.sources) == set(files):  # what began is known from the state
            return sheet.weights is None or any(same_mixture(sheet.drawn() or {}, mixture) for mixture in book.said)
        if sheet.sources != files or (sheet.weights is None) != book.exact:
            return False
        return book.exact or same_mixture(sheet.drawn() or {}, book.base)
    here = dict(sheet.sources)
    if any(here.get(number) != book.files[number] for number in book.live):
        return False
    names = {book.names[number] for number in book.order}
    if any(number not in book.order and SHELF[number][0] not in names for number in here):
        return False
    if sheet.weights is None:
        return book.exact
    return any(same_mixture(sheet.drawn() or {}, mixture) for mixture in book.said)


class Crew:
    """All ranks of a run, made the same changes, and the book of what they deliver together."""

    def __init__(self, shelf: Shelf, book: Book, sheet: Sheet, dp: int, micro: int, ahead: int) -> None:
        self.shelf, self.book, self.dp, self.micro, self.ahead = shelf, book, dp, micro, ahead
        self.sheets = [sheet]  # the one that runs is the last; earlier ones may serve an earlier state
        self.consumed = 0
        self.loaders = [self.loader(rank, sheet, book.schedule) for rank in range(dp)]
        self.iterators: list[Any] | None = None

    def loader(self, rank: int, sheet: Sheet, size: int) -> DataLoader2:
        service = InProcessReadingService(prefetch_cnt=self.ahead)
        return DataLoader2(sheet.build(self.shelf, rank, self.dp, self.micro, size), reading_service=service)

    @classmethod
    def resumed(
        cls,
        shelf: Shelf,
        book: Book,
        consumed: int,
        state: Any,
        sheet: Sheet,
        dp: int,
        micro: int,
        amend: bool = False,
        size: "int | None" = None,
    ) -> "Crew":
        """A new process's run from a state; the book notes another batch size, where one is given."""
        crew = cls.__new__(cls)
        crew.shelf, crew.book, crew.dp, crew.micro, crew.ahead = shelf, book, dp, micro, 0
        crew.sheets, crew.consumed, crew.iterators = [sheet], consumed, None
        crew.loaders = [crew.loader(rank, sheet, size or book.schedule) for rank in range(dp)]
        for loader in crew.loaders:
            loader.load_state_dict(state, amend=amend)
        if size is not None and size != book.schedule:
            book.resized(book.next_step(consumed), size)
            book.schedule = size
        book.roster = "rosters" in crew.state()["journal"]
        return crew

    @property
    def unit(self) -> int:
        return self.dp * self.micro

    @property
    def step(self) -> int:
        """The step from which a change holds."""
        return self.book.next_step(self.consumed)

    @property
    def sample(self) -> int:
        return self.book.start(self.step)

    def each(self, call: Callable[[DataLoader2], Any]) -> None:
        for loader in self.loaders:
            call(loader)

    def state(self, step: "int | None" = None) -> dict[str, Any]:
        first, *others = (loader.state_dict(step) for loader in self.loaders)
        assert all(other == first for other in others), "a state is the same on all ranks"
        return first

    def advance(self, batches: int) -> None:
        """So many micro-batches of every rank go into the book, or are what is there already."""
        self.iterators = self.iterators or [iter(loader) for loader in self.loaders]
        for _ in range(batches):
            found = dict(row for iterator in self.iterators for row in delivered(next(iterator)))
            assert sorted(found) == list(range(self.consumed, self.consumed + self.unit))
            for sample in sorted(found):
                self.write(sample, found[sample])
            self.consumed += self.unit
        for loader in self.loaders:
            assert loader.consumed_samples == self.consumed

    def write(self, sample: int, row: Row) -> None:
        rows = self.book.rows
        if sample == len(rows):
            rows.append(row)
        else:
            assert rows[sample] == row, f"sample {sample} is another one now"

    def look_ahead(self, upto: int) -> None:
        """Rows that nobody takes delivery of, as `contents` names them."""
        while len(self.book.rows) < upto:
            step = self.book.step_of(len(self.book.rows))
            for record in self.loaders[0].contents(step):
                number = next(n for n in self.book.order if self.book.names[n] == record.source)
                assert record.token >= 0
                if len(self.book.rows) <= record.sample_number < upto:
                    self.write(record.sample_number, (number, record.token, record.masked))

    def check_contents(self, step: int) -> None:
        """`contents` and `tokens` of a step tell what was delivered then."""
        loader, book = self.loaders[step % self.dp], self.book
        first, stop = book.start(step), book.start(step + 1)
        records = loader.contents(step)
        assert [r.sample_number for r in records] == list(range(first, stop))
        present = {n for n, files in self.sheets[-1].sources if files == book.files.get(n)}
        gone = False
        for record, (number, place, masked) in zip(records, book.rows[first:stop], strict=False):
            assert record.step == step
            assert record.source == book.names[number]
            if number in present:
                file, within = self.shelf.place(number, place)
                assert (record.token, record.file, record.file_token) == (place, file, within)
                assert record.masked == masked
            else:
                gone = True
                assert (record.token, record.file, record.file_token, record.masked) == (-1, "", -1, False)
        if not gone and stop <= len(book.rows):
            found = loader.tokens(step)[:, 0].tolist()
            assert found == [ROOM * number + place for number, place, _ in book.rows[first:stop]]

    def check_when(self, number: int, token: int) -> None:
        """`when` names the rows of the book that have a token of a source as a label."""
        book, loader = self.book, self.loaders[0]
        steps = range(book.next_step(len(book.rows) + 1) - 1)
        if number not in dict(self.sheets[-1].sources):
            return
        expected = [
            (book.step_of(sample), masked)
            for sample, (n, place, masked) in enumerate(book.rows[: book.start(steps.stop)])
            if n == number and place < token <= place + S
        ]
        assert [(r.step, r.masked) for r in loader.when(book.names[number], token, steps)] == expected


def delivered(batch: Any) -> Iterator[tuple[int, Row]]:
    """(sample number, row) of each row of a batch, whose tokens are checked to be consecutive."""
    columns = (batch[key].tolist() for key in ("sample_numbers", "input_ids", "label_ids"))
    for sample, tokens, labels in zip(*columns, strict=True):
        number, place = divmod(tokens[0], ROOM)
        assert tokens == list(range(tokens[0], tokens[0] + S))
        masked = all(label == -100 for label in labels)
        assert masked or labels == [token + 1 for token in tokens]
        yield sample, (number, place, masked)


# The property -------------------------------------------------------------------------------------------

WEIGHTS = st.integers(0, 5)
LAYOUTS = st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1), (2, 6), (4, 3)])  # dp, micro-batch


class Story:
    """A run to which things are done as hypothesis draws them; each is checked against the book."""

    def __init__(self, shelf: Shelf, data: Any) -> None:
        self.shelf, self.data = shelf, data
        self.saved: list[tuple[Any, Book, int, list[Sheet]]] = []
        numbers = self.draw(st.permutations([0, 1, 2]), "sources")[: self.draw(st.integers(1, 3), "so many")]
        files = {number: self.draw(st.integers(1, len(SHELF[number][1]) - 1), "files") for number in numbers}
        exact = self.draw(st.booleans(), "exact")
        weights = {n: self.shelf.rows(n, 0, files[n]) for n in numbers} if exact else self.weights(numbers)
        book = Book(list(numbers), files, weights, exact, UNIT * self.draw(st.integers(1, 2), "steps of"))
        sheet = Sheet(tuple(files.items()), None if exact else tuple(weights.values()))
        ahead = self.draw(st.sampled_from([0, 0, 0, 3]), "prefetch")
        self.crew = Crew(shelf, book, sheet, *self.draw(LAYOUTS, "layout"), ahead)

    def draw(self, strategy: Any, label: str) -> Any:
        return self.data.draw(strategy, label=label)

    def weights(self, numbers: Any) -> dict[int, int]:
        drawn = {number: self.draw(WEIGHTS, f"weight of {SHELF[number][0]}") for number in numbers}
        return drawn if any(drawn.values()) else dict.fromkeys(drawn, 1)

    @property
    def book(self) -> Book:
        return self.crew.book

    # What can be done ---------------------------------------------------------------------------------

    def go(self) -> None:
        steps = self.draw(st.integers(0, 3), "steps")
        crew = self.crew
        left = self.book.start(crew.step + steps) - crew.consumed
        inside = self.draw(st.integers(0, 3), "more batches")
        crew.advance(left // crew.unit + inside)

    def settle(self, make: "Callable[[], tuple[Callable[[DataLoader2], Any], Callable[[], Any]]]") -> None:
        """A change of all loaders and of the book; refused where one is recorded for later."""
        if self.crew.sample < self.book.last_change():
            before = self.crew.state()
            for loader in self.crew.loaders:
                with pytest.raises(JournalError, match="seek to step"):
                    loader.exclude(self.book.names[self.book.live[0]], [(0, 1)])
            assert self.crew.state() == before
            return
        change, note = make()
        del self.book.rows[self.crew.sample :]  # seen ahead of a seek back: they will be others
        self.crew.look_ahead(self.crew.sample)
        self.crew.each(change)
        note()
        self.name_again()

    def name_again(self) -> None:
        """A change at the step of a jump changes what is left out: what the run without the jump would deliver."""
        crew, book = self.crew, self.book
        for k, (sample, left_out) in enumerate(book.jumped):
            if sample == crew.sample:
                state = crew.state(step=crew.step)
                state["journal"]["jumps"] = [jump for jump in state["journal"]["jumps"] if jump[1] != sample]
                sheet = crew.sheets[-1]
                for mixture in (book.base, book.now) if book.roster else ():
                    weights = None if book.exact else tuple(mixture.get(n, 0) for n, _ in sheet.sources)
                    if accepted(book, Sheet(sheet.sources, weights)):
                        sheet = Sheet(sheet.sources, weights)
                        break
                graph = sheet.build(self.shelf, 0, 1, 1, book.schedule)
                book.jumped[k] = (sample, self.named(DataLoader2.from_state(state, graph), len(left_out)))

    def named(self, loader: DataLoader2, rows: int) -> list[tuple[int, int]]:
        """The next step's rows, and those after it, so many, as `contents` names them."""
        found: list[tuple[int, int]] = []
        for step in itertools.count(self.crew.step):
            if len(found) >= rows:
                return found[:rows]
            for record in loader.contents(step):
                found.append((next(n for n in self.book.order if self.book.names[n] == record.source), record.token))
        raise AssertionError

    def reweigh(self) -> None:
        def make() -> Any:
            book, weights = self.book, self.weights(self.book.live)
            by_name = {book.names[n]: w for n, w in weights.items()}
            given = by_name if self.draw(st.booleans(), "by name") else list(by_name.values())

            def note() -> None:
                book.now = weights
                book.mixtures.append((self.crew.sample, weights))

            return lambda loader: loader.update_weights(given), note

        self.settle(make)

    def add(self) -> None:
        taken = {self.book.names[n] for n in self.book.order}
        fresh = [n for n in range(len(SHELF)) if n not in self.book.order and SHELF[n][0] not in taken]
        again = [n for n in self.book.dropped if self.book.names[n] == SHELF[n][0]]
        if not fresh + again:
            return

        def make() -> Any:
            number = self.draw(st.sampled_from(fresh + again), "source")
            book, sample = self.book, self.crew.sample
            files = (
                book.files[number] if number in book.order else self.draw(st.integers(1, len(SHELF[number][1])), "f")
            )
            order = [*book.order, number] if number in fresh else book.order
            live = [n for n in order if n in book.live or n == number]
            weights = self.weights(live)
            lengths = book.exact and self.draw(st.booleans(), "by length")
            if lengths:
                weights = {n: self.first_rows(n, files if n == number else book.files[n]) for n in live}
            names = {SHELF[number][0] if n == number else book.names[n]: w for n, w in weights.items()}

            def note() -> None:
                book.order, book.files[number], book.now, book.roster = order, files, weights, True
                book.names[number] = SHELF[number][0]
                book.base.setdefault(number, 0)
                book.dropped.discard(number)
                book.mixtures.append((sample, weights))
                sheet = self.crew.sheets[-1]
                if number not in dict(sheet.sources):
                    more = None if sheet.weights is None else (*sheet.weights, 0)
                    self.crew.sheets.append(Sheet((*sheet.sources, (number, files)), more))

            source = self.shelf.source(number, 0, files)
            return lambda loader: loader.add_source(source, None if lengths else names), note

        self.settle(make)

    def first_rows(self, number: int, files: int) -> int:
        return self.shelf.rows(number, 0, files)

    def drop(self) -> None:
        book = self.book
        can = [n for n in book.live if any(w for m, w in book.now.items() if m != n and m in book.live)]
        if not can:
            return

        def make() -> Any:
            number = self.draw(st.sampled_from(can), "source")
            left = [n for n in book.live if n != number]
            weights = self.weights(left) if self.draw(st.booleans(), "with weights") else None
            given = None if weights is None else {book.names[n]: w for n, w in weights.items()}
            name, sample = book.names[number], self.crew.sample

            def note() -> None:
                book.now = weights or {n: book.now.get(n, 0) for n in left}
                book.dropped.add(number)
                book.roster = True
                book.mixtures.append((sample, book.now))

            return lambda loader: loader.drop_source(name, given), note

        self.settle(make)

    def grow(self) -> None:
        book = self.book
        can = [n for n in book.live if book.files[n] < len(self.shelf.files[n])]
        if not can:
            return

        def make() -> Any:
            number = self.draw(st.sampled_from(can), "source")
            had, sample = book.files[number], self.crew.sample
            files = self.draw(st.integers(had + 1, len(self.shelf.files[number])), "files")
            paths = self.shelf.files[number][had:files]

            def note() -> None:
                self.note_growth(number, files, sample)
                sheet = self.crew.sheets[-1]
                sources = tuple((n, files if n == number else has) for n, has in sheet.sources)
                self.crew.sheets.append(Sheet(sources, sheet.weights))

            return lambda loader: loader.grow_source(book.names[number], paths, "uint16"), note

        self.settle(make)

    def note_growth(self, number: int, files: int, sample: int) -> None:
        book = self.book
        had = book.files[number]
        same = [g for g in book.growths if g[:2] == (sample, number)]
        book.growths = [g for g in book.growths if g not in same] + [
            (sample, number, same[0][2] if same else had, files)
        ]
        book.files[number], book.roster = files, True

    def resize(self) -> None:
        def make() -> Any:
            size, step = UNIT * self.draw(st.integers(1, 3), "steps of"), self.crew.step
            return lambda loader: loader.update_global_batch_size(size), lambda: self.book.resized(step, size)

        self.settle(make)

    def jump(self) -> None:
        def make() -> Any:
            crew, book = self.crew, self.book
            steps, step, sample = self.draw(st.integers(1, 3), "steps"), crew.step, crew.sample
            left_out = self.named(crew.loaders[0], book.start(step + steps) - sample)

            def note() -> None:
                before = [rows for s, rows in book.jumped if s == sample]
                book.jumped = [j for j in book.jumped if j[0] != sample]
                book.jumped.append((sample, [*itertools.chain(*before), *left_out]))

            return lambda loader: loader.jump(steps), note

        self.settle(make)

    def exclude(self) -> None:
        def make() -> Any:
            book, sample = self.book, self.crew.sample
            number = self.draw(st.sampled_from(book.live), "source")
            tokens = sum(self.shelf.tokens[number][: book.files[number]])
            cuts = self.draw(st.lists(st.integers(0, tokens), min_size=2, max_size=4, unique=True), "tokens")
            pairs = [(min(pair), max(pair)) for pair in zip(cuts[::2], cuts[1::2], strict=False)]
            note = lambda: book.excluded.extend((sample, number, *pair) for pair in pairs)  # noqa: E731
            return lambda loader: loader.exclude(book.names[number], pairs), note

        self.settle(make)

    def save(self) -> None:
        self.crew.look_ahead(self.crew.sample)
        self.saved.append((self.crew.state(), copy.deepcopy(self.book), self.crew.consumed, []))

    def look_back(self) -> None:
        done = self.book.next_step(len(self.book.rows) + 1) - 1
        if done > 0:
            self.crew.check_contents(self.draw(st.integers(0, done - 1), "step"))
            number = self.draw(st.sampled_from(self.book.order), "source")
            tokens = sum(self.shelf.tokens[number][: self.book.files[number]])
            self.crew.check_when(number, self.draw(st.integers(0, tokens - 1), "token"))

    def seek(self) -> None:
        present = dict(self.crew.sheets[-1].sources)
        gone = [k for k, (number, *_) in enumerate(self.book.rows) if number not in present]
        first = self.book.step_of(gone[-1]) + 1 if gone else 0  # what is gone cannot be read again
        step = self.draw(st.integers(first, self.book.step_of(len(self.book.rows)) + 2), "step")
        self.crew.look_ahead(self.book.start(step))
        self.crew.each(lambda loader: loader.seek(step))
        self.crew.consumed, self.crew.iterators = self.book.start(step), None

    def sheet(self, book: Book) -> Sheet:
        """A graph as a user might write it for a state of this book."""
        if not book.roster:
            return Sheet(
                tuple((n, book.files[n]) for n in book.order), None if book.exact else tuple(book.base.values())
            )
        begun = self.draw(st.booleans(), "weights as it began")
        mixture = book.base if begun else book.now
        kept = [
            n for n in book.order if n in book.live or (book.names[n] == SHELF[n][0] and (begun and mixture.get(n)))
        ]
        if not book.exact and begun and not all(n in kept for n, w in mixture.items() if w):
            mixture, kept = book.now, list(book.live)  # what it began with cannot be said without all of it
        others = [n for n in book.order if n not in kept and book.names[n] == SHELF[n][0]]
        kept += [n for n in others if self.draw(st.booleans(), f"{SHELF[n][0]} is still there")]
        kept = self.draw(st.permutations(kept), "in order")
        exact = book.exact and self.draw(st.booleans(), "exact")
        weights = None if exact else tuple(mixture.get(n, 0) for n in kept)
        return Sheet(tuple((n, book.files[n]) for n in kept), weights)

    def resume(self) -> None:
        """A new process, other ranks, the graph as one would write it then; from now or an earlier checkpoint."""
        if self.saved and self.draw(st.booleans(), "roll back"):
            state, book, consumed, _ = self.draw(st.sampled_from(self.saved), "to")
            book = copy.deepcopy(book)
        else:
            self.crew.look_ahead(self.crew.sample)
            state, book, consumed = self.crew.state(), self.book, self.crew.consumed
        sheet = self.sheet(book)
        assert accepted(book, sheet)
        dp, micro = self.draw(LAYOUTS, "layout")
        if self.torn(book, consumed, sheet):
            with pytest.raises(StateMismatchError, match="still draws from source"):
                Crew.resumed(self.shelf, copy.deepcopy(book), consumed, state, sheet, 1, 1)
            return
        size = UNIT * self.draw(st.integers(1, 2), "steps of") if self.draw(st.booleans(), "another size") else None
        step = book.next_step(consumed)
        if (book.start(step) - consumed) % (dp * micro):
            with pytest.raises(BatchSizeError):
                Crew.resumed(self.shelf, copy.deepcopy(book), consumed, state, sheet, dp, micro)
            return
        if size is not None and book.start(step) < book.last_change():
            size = None
        old, was = book.schedule, book.roster
        book = copy.deepcopy(book)
        text = json.dumps(state) if self.draw(st.booleans(), "as text") else state
        self.crew = Crew.resumed(self.shelf, book, consumed, text, sheet, dp, micro, size=size)
        here = self.crew.state()
        if not was:  # it says what began, where the graph does not
            assert here["journal"].pop("rosters", None) is None or len(book.mixtures) > 1
            here["version"] = state["version"]
        if book.schedule == old:
            assert here == state, "a state comes back unchanged"
        self.predict()

    def torn(self, book: Book, consumed: int, sheet: Sheet) -> bool:
        """Whether the step that is going on, or comes next, draws from a source that the graph does not have."""
        rest = book.rows[consumed : book.start(book.step_of(consumed) + 1)]
        return not {(number, book.files[number]) for number, *_ in rest} <= set(sheet.sources)

    def predict(self) -> None:
        """A fork of the run, from its state: the same steps follow."""
        state, crew = self.crew.state(), self.crew
        fork = DataLoader2.from_state(state, crew.sheets[-1].build(self.shelf, 0, 1, 1, self.book.schedule))
        step = crew.step + 1
        assert fork.contents(step)[0]._replace(rank=0) == crew.loaders[0].contents(step)[0]._replace(rank=0)
        assert (fork.tokens(step) == crew.loaders[0].tokens(step)).all()

    def roll_back(self) -> None:
        """An earlier state in the loaders that run; they find the graph that they had then, or say what differs."""
        if not self.saved:
            return
        state, book, consumed, _ = self.draw(st.sampled_from(self.saved), "to")
        book, crew = copy.deepcopy(book), self.crew
        found = [sheet for sheet in reversed(crew.sheets) if accepted(book, sheet)]
        fits = (book.start(book.next_step(consumed)) - consumed) % crew.unit == 0
        if not found or not fits:
            before = crew.state()
            for loader in crew.loaders:
                with pytest.raises(BatchSizeError if found else StateMismatchError):
                    loader.load_state_dict(state)
            assert crew.state() == before
            return
        if book.schedule != self.book.schedule:
            if book.start(book.next_step(consumed)) < book.last_change():
                return
            book.resized(book.next_step(consumed), self.book.schedule)
            book.schedule = self.book.schedule
        crew.each(lambda loader: loader.load_state_dict(state))
        crew.sheets = [*crew.sheets, found[0]]
        crew.book, crew.consumed, crew.iterators = book, consumed, None

    def can_come(self, number: int) -> bool:
        """Whether a source may be in the graph of an amended run: as a new one, as one that was dropped, or in the
        place of one that is there by its name; but not as one that was replaced, or for one that was dropped.
        """
        book = self.book
        if number in book.order:
            return book.names[number] == SHELF[number][0]
        named = [n for n in book.order if book.names[n] == SHELF[number][0]]
        return not named or named[0] in book.live

    def amend(self) -> None:
        """A resume on a graph with other weights, sources or files."""
        crew, book = self.crew, copy.deepcopy(self.book)
        sample = crew.sample
        if sample < book.last_change():
            return
        crew.look_ahead(sample)
        del self.book.rows[sample:]
        book = copy.deepcopy(self.book)
        kept = [n for n in book.live if self.draw(st.booleans(), f"keep {book.names[n]}")] or book.live[:1]
        files = {n: book.files[n] for n in kept}
        for n in kept:
            if self.draw(st.integers(0, 3), f"more of {book.names[n]}") == 0:
                files[n] = self.draw(st.integers(book.files[n], len(SHELF[n][1])), "files")
        taken = {book.names[n] for n in kept}
        for n in range(len(SHELF)):
            if SHELF[n][0] not in taken and self.can_come(n) and self.draw(st.integers(0, 3), f"bring {n}") == 0:
                files[n] = book.files[n] if n in book.order else self.draw(st.integers(1, len(SHELF[n][1])), "files")
                taken.add(SHELF[n][0])
        order = self.draw(st.permutations(list(files)), "in order")
        weights = self.weights(order)
        sheet = Sheet(tuple((n, files[n]) for n in order), tuple(weights[n] for n in order))
        state = crew.state()
        if not accepted(book, sheet):
            with pytest.raises(StateMismatchError):
                Crew.resumed(self.shelf, copy.deepcopy(book), crew.consumed, state, sheet, crew.dp, crew.micro)
        rest = {number for number, *_ in book.rows[crew.consumed : sample]}
        if not rest <= files.keys():
            with pytest.raises(StateMismatchError, match="still draws from source"):
                Crew.resumed(
                    self.shelf, copy.deepcopy(book), crew.consumed, state, sheet, crew.dp, crew.micro, amend=True
                )
            return
        self.crew = crew = Crew.resumed(self.shelf, book, crew.consumed, state, sheet, crew.dp, crew.micro, amend=True)
        if accepted(self_book := copy.deepcopy(book), sheet):
            assert self_book.now == book.now
            return
        self.note_amended(sheet, weights, sample)

    def note_amended(self, sheet: Sheet, weights: dict[int, int], sample: int) -> None:
        """What the changes come to, in the book."""
        book, step = self.book, self.crew.step

        def by_name(mixture: dict[int, int]) -> Any:
            return {book.names.get(n, SHELF[n][0]): w for n, w in mixture.items()}

        new = not any(same_mixture(by_name(weights), by_name(mixture)) for mixture in book.said)
        moved = False
        for number in list(book.order):
            there = dict(sheet.sources).get(number)
            if number in book.dropped:
                if there is not None and book.names[number] == SHELF[number][0] and new and weights[number]:
                    book.dropped.discard(number)
                    moved = True
            elif there is None:
                book.dropped.add(number)
                moved = True
                if any(SHELF[n][0] == SHELF[number][0] for n, _ in sheet.sources):
                    book.names[number] += f" (until step {step})"
            elif there > book.files[number]:
                self.note_growth(number, there, sample)
        replacing = [n for n, _ in sheet.sources if any(SHELF[m][0] == SHELF[n][0] for m in book.order)]
        for number, files in sorted(sheet.sources, key=lambda source: source[0] not in replacing):
            if number not in book.order:
                book.order.append(number)
                book.files[number], book.names[number] = files, SHELF[number][0]
                book.base.setdefault(number, 0)
                moved = True
        book.roster = True
        if moved or new:
            book.now = {n: weights[n] for n in book.live}
            book.mixtures.append((sample, book.now))
        self.name_again()


DEEDS = [
    "reweigh",
    "add",
    "drop",
    "grow",
    "resize",
    "jump",
    "exclude",
    "save",
    "look_back",
    "seek",
    "resume",
    "roll_back",
    "amend",
]


@settings(max_examples=SOAK // 4 or 60, report_multiple_bugs=False)
@given(data=st.data())
def test_whatever_is_changed_no_sample_comes_twice_and_none_is_lost_but_those_named(shelf, data):
    story = Story(shelf, data)
    for deed in data.draw(st.lists(st.sampled_from(DEEDS), min_size=1, max_size=8), label="deeds"):
        for _ in range(2 if data.draw(st.integers(0, 4), label="twice") == 4 else 1):
            getattr(story, deed)()
        story.go()
    story.crew.advance(2)
    story.book.check(shelf)
    for step in range(story.book.next_step(len(story.book.rows) + 1) - 1):
        story.crew.check_contents(step)


# One thing at a time ------------------------------------------------------------------------------------


def batched(order: IndexedDataPipe, rank: int = 0, dp: int = 1, micro: int = 4, size: Any = 8) -> IndexedDataPipe:
    dealt = order.shard_ranks(Topology(rank, dp), seed=3) if dp > 1 else order
    return dealt.batch_samples(micro, global_batch_size=size).collate_causal_lm(sample_numbers=True)


def blend_of(shelf: Shelf, *numbers: int, **how: Any) -> IndexedDataPipe:
    first, *others = (shelf.source(number) for number in numbers)
    return first.blend(*others, **how)


def growing(shelf: Shelf, number: int, files: int, **how: Any) -> IndexedDataPipe:
    """A source over its first files, blended with the one file of "d"."""
    return shelf.source(number, 0, files).blend(shelf.source(3), **how)


def taken(items: Iterator[Any], batches: int) -> list[tuple[int, Row]]:
    return [row for _, batch in zip(range(batches), items, strict=False) for row in delivered(batch)]


def held(loader: DataLoader2, steps: int) -> list[tuple[str, int, int]]:
    """(source, epoch, first token) of all rows of the first steps."""
    return [(r.source, r.epoch, r.token) for step in range(steps) for r in loader.contents(step)]


def every_change(shelf: Shelf) -> list[Callable[[DataLoader2], None]]:
    """One of each kind, for a graph of "a" and "b"."""
    return [
        lambda loader: loader.update_weights({"a": 1, "b": 4}),
        lambda loader: loader.add_source(shelf.source(2), {"a": 3, "b": 1, "c": 2}),
        lambda loader: loader.grow_source("a", shelf.files[0][1], "uint16"),
        lambda loader: loader.exclude("b", [(0, 5), (9, 11)]),
        lambda loader: loader.update_global_batch_size(16),
        lambda loader: loader.jump(2),
        lambda loader: loader.drop_source("b"),
    ]


def changed_run(shelf: Shelf, prefetch: int = 0) -> DataLoader2:
    """A run of "a" and "b" that was changed in every way, at a step each; it stands in step 9."""
    service = InProcessReadingService(prefetch_cnt=prefetch)
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])), reading_service=service)
    for step, change in enumerate(every_change(shelf), 1):
        loader.seek(step)
        change(loader)
    loader.seek(9)
    return loader


def as_written_now(shelf: Shelf, weights: Any = (3, 2)) -> IndexedDataPipe:
    """The graph of `changed_run` as its user writes it now: without what was dropped."""
    return batched(shelf.source(0, 0, 2).blend(shelf.source(2), weights=list(weights)))


def test_a_run_changed_in_every_way_goes_on_from_its_state_in_a_graph_without_what_was_dropped(shelf):
    loader = changed_run(shelf)
    state = loader.state_dict()
    assert state["version"] == 2
    for graph in (as_written_now(shelf), batched(shelf.source(2).blend(shelf.source(0, 0, 2), weights=[2, 3]))):
        other = DataLoader2.from_state(json.dumps(state), graph)
        assert other.state_dict() == state
        assert taken(iter(other), 9) == taken(iter(DataLoader2.from_state(state, graph)), 9)
    expected, loader = taken(iter(loader), 9), changed_run(shelf)
    assert taken(iter(DataLoader2.from_state(state, as_written_now(shelf))), 9) == expected
    other = DataLoader2.from_state(state, as_written_now(shelf))
    for step in range(9):
        for was, now in zip(loader.contents(step), other.contents(step), strict=True):
            assert now == (was._replace(token=-1, file="", file_token=-1, masked=False) if was.source == "b" else was)
        assert len(other.contents(step)) == (16 if step >= 5 else 8)


def test_a_dropped_source_whose_files_are_gone_has_a_name_and_says_that_it_has_no_text(shelf):
    other = DataLoader2.from_state(changed_run(shelf).state_dict(), as_written_now(shelf))
    assert "b" in {record.source for record in other.contents(0)}
    for ask in (lambda: other.tokens(0), lambda: other.when("b", 3, range(4)), lambda: next(iter(other))):
        other.seek(0)
        with pytest.raises(SourceGoneError, match="'b'"):
            ask()
    with pytest.raises(ConfigurationError, match="'b'"):
        DataLoader2.from_state(changed_run(shelf).state_dict(), as_written_now(shelf)).exclude("b", [(0, 1)])


@pytest.mark.parametrize("grown", [False, True])
def test_the_epochs_of_a_source_that_is_gone_are_told_as_they_were_or_not(shelf, grown):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(1)
    if grown:
        loader.grow_source("a", shelf.files[0][1:], "uint16")
    loader.seek(12)
    loader.drop_source("a")
    other = DataLoader2.from_state(loader.state_dict(), batched(blend_of(shelf, 1, weights=[1])))
    for step in range(12):
        for was, now in zip(loader.contents(step), other.contents(step), strict=True):
            assert now.epoch == was.epoch or (now.source == "a" and now.epoch == -1)


def test_a_source_of_other_contents_does_not_speak_for_one_that_was_dropped(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 1, 0, weights=[3, 1])))
    loader.seek(3)
    loader.drop_source("a")
    other = DataLoader2.from_state(loader.state_dict(), batched(blend_of(shelf, 1, 4, weights=[1, 0])))
    assert other.state_dict() == loader.state_dict()
    told = [record for step in range(3) for record in other.contents(step) if record.source == "a"]
    assert len(told) == 6
    assert {(record.token, record.file) for record in told} == {(-1, "")}
    with pytest.raises(SourceGoneError):
        other.tokens(0)


BAD_CHANGES: dict[str, tuple[Callable[[DataLoader2, Shelf], None], type[TokenpipeError]]] = {
    "weights of nobody": (lambda loader, _: loader.update_weights({"x": 1}), WeightsError),
    "weights of a dropped source": (lambda loader, _: loader.update_weights({"a": 1, "b": 1, "c": 1}), WeightsError),
    "a list with a dropped source": (lambda loader, _: loader.update_weights([1, 1, 1]), WeightsError),
    "no weight": (lambda loader, _: loader.update_weights([0, 0]), WeightsError),
    "nothing": (lambda loader, _: loader.update_weights(), WeightsError),
    "a temperature of 0": (lambda loader, _: loader.update_weights(temperature=0), WeightsError),
    "not a number": (lambda loader, _: loader.update_weights([float("nan"), 1]), WeightsError),
    "another blend": (lambda loader, _: loader.update_weights([1, 1], blend="x"), JournalError),
    "a source that is there": (lambda loader, s: loader.add_source(s.source(0), [1, 1]), JournalError),
    "the dropped one, changed": (
        lambda loader, s: loader.add_source(s.source(1, 0, 2), {"a": 1, "b": 1, "c": 1}), JournalError,
    ),
    "without weights": (lambda loader, s: loader.add_source(s.source(3)), WeightsError),
    "with weights of others": (lambda loader, s: loader.add_source(s.source(3), {"d": 1}), WeightsError),
    "no source": (lambda loader, s: loader.add_source(s.files[0][0], [1, 1, 1]), ArgumentTypeError),  # type: ignore
    "another length": (
        lambda loader, s: loader.add_source(TokenReader(s.files[3], "uint16", "x").slice_sequences(3), [1, 1, 1]),
        ConfigurationError,
    ),
    "dropped again": (lambda loader, _: loader.drop_source("b"), JournalError),
    "dropped and never there": (lambda loader, _: loader.drop_source("x"), JournalError),
    "dropped with bad weights": (lambda loader, _: loader.drop_source("a", {"a": 1}), WeightsError),
    "grown and not there": (lambda loader, s: loader.grow_source("x", s.files[0][2], "uint16"), JournalError),
    "grown by no file": (lambda loader, _: loader.grow_source("a", []), ConfigurationError),
    "grown by a missing file": (lambda loader, _: loader.grow_source("a", "/nowhere.bin", "uint16"), TokenpipeError),
    "grown without a dtype": (lambda loader, s: loader.grow_source("a", s.files[0][2]), ConfigurationError),
    "a batch that ranks cannot share": (lambda loader, _: loader.update_global_batch_size(6), BatchSizeError),
    "no batch": (lambda loader, _: loader.update_global_batch_size(0), TokenpipeError),
    "a jump of nothing": (lambda loader, _: loader.jump(0), ConfigurationError),
    "a jump back": (lambda loader, _: loader.jump(-1), ConfigurationError),
    "half a jump": (lambda loader, _: loader.jump(1.5), ArgumentTypeError),  # type: ignore
    "a jump beyond the numbers": (lambda loader, _: loader.jump(2**60), OutOfRangeError),
    "a jump beyond all": (lambda loader, _: loader.jump(2**70), TokenpipeError),
    "tokens of nobody": (lambda loader, _: loader.exclude("x", [(0, 1)]), ConfigurationError),
    "tokens that are not there": (lambda loader, _: loader.exclude("a", [(0, 10**6)]), OutOfRangeError),
    "tokens from behind": (lambda loader, _: loader.exclude("a", [(5, 3)]), OutOfRangeError),
    "no tokens": (lambda loader, _: loader.exclude("a", [(3, 3)]), OutOfRangeError),
    "nothing excluded": (lambda loader, _: loader.exclude("a"), ConfigurationError),
    "tokens that are none": (lambda loader, _: loader.exclude("a", [1, 2]), ArgumentTypeError),  # type: ignore
    "a document of none": (lambda loader, _: loader.exclude("a", documents=0), TokenpipeError),
    "a document nobody knows": (lambda loader, _: loader.exclude("a", documents="x"), TokenpipeError),
}  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("what", BAD_CHANGES)
def test_a_change_that_fails_leaves_the_run_its_journal_and_its_iterator_as_they_were(shelf, what, prefetch):
    change, error = BAD_CHANGES[what]
    expected = taken(iter(changed_run(shelf)), 9)
    with changed_run(shelf, prefetch) as loader:
        before, iterator = loader.state_dict(), iter(loader)
        with pytest.raises(error):
            change(loader, shelf)
        assert loader.state_dict() == before
        found = taken(iterator, 5)
        state = loader.state_dict()
        with pytest.raises(error):
            change(loader, shelf)
        assert loader.state_dict() == state
        assert found + taken(iterator, 4) == expected
        assert held(loader, 9) == held(changed_run(shelf), 9)


def test_a_load_that_fails_leaves_the_run_its_journal_and_its_iterator_as_they_were(shelf):
    expected = taken(iter(changed_run(shelf)), 9)
    loader = changed_run(shelf)
    other = DataLoader2(batched(blend_of(shelf, 1, 2, weights=[1, 1]))).state_dict()
    early = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1]), micro=1, size=9))
    taken(iter(early), 4)
    state = loader.state_dict()
    bad_journal = copy.deepcopy(state)
    bad_journal["journal"]["jumps"][0][2] = 0
    iterator = iter(loader)
    found = []
    for wrong, amend, error in (
        (other, False, StateMismatchError),
        (bad_journal, False, StateError),
        (bad_journal, True, StateError),
        (early.state_dict(), False, BatchSizeError),
        (early.state_dict(), True, BatchSizeError),
        (state | {"sources": {}}, False, StateMismatchError),
        (state | {"version": 3}, True, StateError),
    ):
        before = loader.state_dict()
        with pytest.raises(error):
            loader.load_state_dict(wrong, amend=amend)
        assert loader.state_dict() == before
        assert held(loader, 9) == held(changed_run(shelf), 9)
        found += taken(iterator, 1)
    assert found + taken(iterator, 2) == expected


def test_a_change_before_one_that_is_recorded_is_refused_live_and_at_a_resume(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(10)
    loader.update_weights([1, 1])
    early = loader.state_dict(step=3)
    loader.seek(3)
    for k, change in enumerate(every_change(shelf)):
        state = loader.state_dict()
        with pytest.raises(JournalError, match="step 10"):
            change(loader)
        assert loader.state_dict() == state, k
    with pytest.raises(JournalError, match="step 10"):
        DataLoader2.from_state(early, batched(blend_of(shelf, 0, 1, weights=[1, 5])), amend=True)
    loader.seek(10)
    loader.update_weights([1, 2])


def test_sizes_that_are_planned_stand_in_no_changes_way(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(2)
    loader.update_global_batch_size([(0, 8), (1000, 16)])
    loader.seek(3)
    loader.update_weights([1, 1])
    loader.exclude("a", [(0, 3)])
    loader.jump(2)
    loader.update_global_batch_size([(0, 8), (5, 12)])
    other = DataLoader2.from_state(loader.state_dict(), batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    assert [len(loader.contents(step)) for step in range(8)] == [8, 8, 8, 8, 8, 12, 12, 12]
    assert held(other, 8) == held(loader, 8)
    assert other.state_dict() == loader.state_dict()


def test_a_graph_may_say_the_weights_that_are_in_force(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(2)
    loader.update_weights([1, 1])
    loader.seek(3)
    loader.update_weights([1, 5])
    state = loader.state_dict()
    assert DataLoader2.from_state(state, batched(blend_of(shelf, 0, 1, weights=[3, 1]))).state_dict() == state
    graph = batched(blend_of(shelf, 0, 1, weights=[1, 5]))
    other = DataLoader2.from_state(state, graph)
    assert held(other, 9) == held(loader, 9)
    begun = other.state_dict()  # which now says what the run began with
    assert begun["journal"].pop("rosters")[0][2] == [["a", 3 * 2**30, 0, 17, ""], ["b", 2**30, 0, 9, ""]]
    assert begun | {"version": 1} == state
    assert DataLoader2.from_state(other.state_dict(), graph).state_dict() == other.state_dict()
    with pytest.raises(StateMismatchError):
        DataLoader2.from_state(state, batched(blend_of(shelf, 0, 1, weights=[1, 1])))


def test_changes_recorded_for_later_keep_their_steps_where_a_resume_has_other_batch_sizes(shelf):
    """A state from before them: they hold from the steps they were made at, however many samples these now have."""

    def graph(size: int) -> IndexedDataPipe:
        return batched(shelf.source(0, 0, 2).blend(shelf.source(1), weights=[3, 1]), size=size)

    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(5)
    loader.grow_source("a", shelf.files[0][1], "uint16")
    for step, change in ((6, lambda: loader.update_weights([0, 1])), (7, lambda: loader.exclude("b", [(0, 19)]))):
        loader.seek(step)
        change()
    loader.seek(8)
    loader.jump(2)
    state = loader.state_dict(step=3)
    loader = DataLoader2.from_state(state, graph(16))
    records = [record for step in range(12) for record in loader.contents(step)]
    assert [record.step for record in records] == [step for step in range(12) for _ in range(8 if step < 3 else 16)]
    assert {record.source for record in records if record.step < 6} == {"a", "b"}
    assert {record.source for record in records if record.step >= 6} == {"b"}
    assert all(record.masked == (record.step >= 7) for record in records if record.source == "b")
    rows = [(0 if record.source == "a" else 1, record.token, False) for record in records]
    first = sum(record.step < 8 for record in records)
    walk_of(shelf, 0, 1, rows, {8 * 3 + 16 * 2: 2})
    given = [place for number, place, _ in rows if number == 1]
    before = sum(number == 1 for number, *_ in rows[:first])
    order = shelf.order(1, 0, 1, 30)
    assert given == order[:before] + order[before + 16 : before + 16 + len(given) - before], "two steps of 8 left out"
    assert DataLoader2.from_state(loader.state_dict(), graph(16)).state_dict() == loader.state_dict()


# Amended ------------------------------------------------------------------------------------------------


AMENDED: dict[str, Callable[[Shelf], IndexedDataPipe]] = {
    "other weights": lambda shelf: blend_of(shelf, 0, 1, weights=[1, 5]),
    "one more source": lambda shelf: blend_of(shelf, 0, 1, 2, weights=[3, 1, 1]),
    "one source less": lambda shelf: blend_of(shelf, 0, weights=[1]),
    "another source": lambda shelf: blend_of(shelf, 0, 2, weights=[3, 1]),
    "other contents": lambda shelf: blend_of(shelf, 4, 1, weights=[3, 1]),
    "more files": lambda shelf: shelf.source(0, 0, 3).blend(shelf.source(1), weights=[3, 1]),
    "all at once": lambda shelf: shelf.source(3).blend(shelf.source(0, 0, 2), shelf.source(2), weights=[1, 2, 3]),
    "an exact union": lambda shelf: blend_of(shelf, 0, 1),
    "another seed": lambda shelf: (
        TokenReader(shelf.files[0][0], "uint16", "a")
        .slice_sequences(S)
        .permute(8)
        .blend(shelf.source(1), weights=[3, 1])
    ),
}


@pytest.mark.parametrize("what", AMENDED)
def test_what_is_otherwise_in_a_graph_is_refused_by_name_or_amended(shelf, what):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    before = taken(iter(loader), 8)
    state = loader.state_dict()
    graph = batched(AMENDED[what](shelf))
    with pytest.raises(StateMismatchError, match=r"'a'|'b'|'c'|blend|permute"):
        DataLoader2.from_state(state, graph)
    other = DataLoader2.from_state(state, graph, amend=True)
    assert [r.sample_number for step in range(4) for r in other.contents(step)] == [number for number, _ in before]
    amended = other.state_dict()
    assert amended["consumed_samples"] == state["consumed_samples"]
    again = DataLoader2.from_state(json.dumps(amended), graph)
    assert again.state_dict() == amended
    assert taken(iter(again), 20) == taken(iter(other), 20)
    assert DataLoader2.from_state(amended, graph, amend=True).state_dict() == amended, "nothing more to amend"


@pytest.mark.parametrize("what", ["another permute above", "another sequence length", "another cap", "on_exhausted"])
def test_what_no_journal_can_say_is_refused_with_amend_too(shelf, what):
    state = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1], max_epochs={"b": 9}))).state_dict()
    reader = TokenReader(shelf.files[0][0], "uint16", "a")
    graph = {
        "another permute above": lambda: blend_of(shelf, 0, 1, weights=[3, 1], max_epochs={"b": 9}).permute(3),
        "another sequence length": lambda: reader.slice_sequences(4).permute(7).blend(
            TokenReader(shelf.files[1][0], "uint16", "b").slice_sequences(4).permute(7), weights=[3, 1]
        ),
        "another cap": lambda: blend_of(shelf, 0, 1, weights=[3, 1], max_epochs={"b": 8}),
        "on_exhausted": lambda: blend_of(
            shelf, 0, 1, weights=[3, 1], max_epochs={"b": 9}, on_exhausted="renormalise"
        ),
    }[what]()  # fmt: skip
    for amend in (False, True):
        with pytest.raises(StateMismatchError):
            DataLoader2.from_state(state, batched(graph), amend=amend)


def test_a_source_replaced_again_and_again_at_one_step_leaves_a_state_that_loads(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    taken(iter(loader), 6)
    state = loader.state_dict()
    for number in (4, 0, 4, 0):
        graph = batched(blend_of(shelf, number, 1, weights=[3, 1]))
        state = DataLoader2.from_state(state, graph, amend=True).state_dict()
        assert DataLoader2.from_state(state, graph).state_dict() == state
    assert len({row[0] for row in state["journal"]["rosters"][0][2]}) == len(state["journal"]["rosters"][0][2])


def test_a_source_of_a_long_name_can_be_replaced(shelf):
    def graph(number: int) -> IndexedDataPipe:
        source = TokenReader(shelf.files[number][0], "uint16", "n" * 200).slice_sequences(S).permute(7)
        return batched(source.blend(shelf.source(1), weights=[3, 1]))

    loader = DataLoader2(graph(0))
    taken(iter(loader), 6)
    state = DataLoader2.from_state(loader.state_dict(), graph(4), amend=True).state_dict()
    assert DataLoader2.from_state(state, graph(4)).state_dict() == state


def test_a_resume_inside_a_step_wants_the_sources_of_its_rest(shelf):
    for amend in (False, True):
        loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[1, 1])))
        taken(iter(loader), 3)
        if not amend:
            loader.drop_source("b")
        graph = batched(blend_of(shelf, 0, weights=[1]))
        with pytest.raises(StateMismatchError, match=r"step 1.*'b'") as caught:
            DataLoader2.from_state(loader.state_dict(), graph, amend=amend)
        assert "state_dict(step=2)" in str(caught.value)
        other = DataLoader2.from_state(loader.state_dict(step=2), graph, amend=amend)
        assert {row[0] for _, row in taken(iter(other), 6)} == {0}


# Rolled back --------------------------------------------------------------------------------------------


def test_a_rollback_has_the_journal_of_its_checkpoint_and_the_run_may_change_otherwise(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    taken(iter(loader), 4)
    early = loader.state_dict()
    loader.add_source(shelf.source(2), [3, 1, 1])
    loader.grow_source("a", shelf.files[0][1], "uint16")
    first = taken(iter(loader), 8)
    late = loader.state_dict()
    loader.load_state_dict(early)
    assert loader.state_dict() == early
    loader.add_source(shelf.source(2, 0, 2), [1, 1, 3])  # "c" of other files
    loader.grow_source("b", shelf.files[1][1], "uint16")
    second = taken(iter(loader), 8)
    assert first != second
    loader.load_state_dict(early)
    assert loader.state_dict() == early
    loader.add_source(shelf.source(2), [3, 1, 1])
    loader.grow_source("a", shelf.files[0][1], "uint16")
    assert taken(iter(loader), 8) == first
    loader.load_state_dict(late)
    assert loader.state_dict() == late
    fresh = shelf.source(0, 0, 2).blend(shelf.source(1), shelf.source(2), weights=[3, 1, 0])
    assert taken(iter(loader), 8) == taken(iter(DataLoader2.from_state(late, batched(fresh))), 8)


# Growth -------------------------------------------------------------------------------------------------


def walk_of(shelf: Shelf, number: int, had: int, rows: "list[Row]", growths: dict[int, int]) -> Walk:
    """The rows of one source, walked; growths: {rows given of all sources: files from there on}."""
    walk = Walk(shelf, number, had)
    for k, (n, place, _) in enumerate(rows):
        if k in growths:
            walk.grow(growths[k])
        if n == number:
            walk.take(place)
    return walk


@pytest.mark.parametrize("mode", ["stop", "renormalise"])
@pytest.mark.parametrize("epochs", [1, 2, 1.55, 0.7])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_grown_source_gives_as_many_epochs_of_all_its_files_as_were_asked(shelf, mode, epochs, step):
    def graph(files: int) -> IndexedDataPipe:
        return batched(growing(shelf, 0, files, weights=[1, 1], max_epochs={"a": epochs}, on_exhausted=mode))

    loader = DataLoader2(graph(1))
    loader.seek(0)
    before = taken(iter(loader), 2 * step)
    if len(before) < 8 * step:
        return  # through by then
    loader.grow_source("a", shelf.files[0][1:], "uint16")
    resumed = DataLoader2.from_state(loader.state_dict(), graph(3))
    assert resumed.state_dict() == loader.state_dict()
    found = [row for _, row in before + taken(iter(loader), 60)]
    assert found[len(before) :] == [row for _, row in taken(iter(resumed), 60)]
    walk_of(shelf, 0, 1, found, {len(before): 3})
    given, cap = sum(number == 0 for number, *_ in found), int(epochs * shelf.rows(0, 0, 3))
    if mode == "renormalise":
        assert given == cap
        assert len(found) == 8 * step + 240
    else:
        assert cap - 4 <= given <= cap  # a last step that cannot be filled is dropped
        assert len(found) < 240


def test_growth_at_the_border_of_an_epoch_begins_with_the_new_files(shelf):
    rows = shelf.rows(2, 0, 1)  # 6
    loader = DataLoader2(shelf.source(2).blend(weights=[1]).batch_samples(1, global_batch_size=rows))
    loader.seek(2)
    loader.grow_source("c", shelf.files[2][1], "uint16")
    new = shelf.rows(2, 1, 2)
    fresh = sorted(shelf.order(2, 1, 2, 1)[:new])
    places = [r.token for step in range(8) for r in loader.contents(step)]
    assert sorted(places[12 : 12 + new]) == sorted(shelf.order(2, 1, 2, 1)[:new]), "nothing seen before the new"
    both = sorted(places[12 + new : 12 + new + rows + new])
    assert both == sorted([*shelf.order(2, 0, 1, 1)[:rows], *fresh]), "then an epoch of all"


@settings(max_examples=SOAK // 4 or 40)
@given(data=st.data())
def test_a_source_without_a_blend_grows_at_any_steps(shelf, data):
    number, size = data.draw(st.sampled_from([0, 1, 2, 5])), data.draw(st.integers(1, 9))
    loader = DataLoader2(shelf.source(number).batch_samples(1, global_batch_size=size))
    growths: dict[int, int] = {}
    step, had = 0, 1
    while had < len(shelf.files[number]):
        step += data.draw(st.integers(0, 12))
        loader.seek(step)
        files = data.draw(st.integers(had + 1, len(shelf.files[number])))
        loader.grow_source(SHELF[number][0], shelf.files[number][had:files], "uint16")
        growths[step * size] = had = files
        resumed = DataLoader2.from_state(
            loader.state_dict(), shelf.source(number, 0, had).batch_samples(1, global_batch_size=size)
        )
        assert resumed.state_dict() == loader.state_dict()
        assert held(resumed, step + 3) == held(loader, step + 3)
    rows = [(number, place, False) for _, _, place in held(loader, step + 20)]
    walk_of(shelf, number, 1, rows, growths)


@pytest.mark.parametrize("name", ["", "sub"])
@pytest.mark.parametrize("how", [{}, {"weights": [1, 1], "max_epochs": {"sub": 2}}, {"weights": [2, 1]}], ids=str)
@pytest.mark.parametrize("chosen", [{"share": 0.8, "seed": 1}, {"score": "length", "at_least": 3}], ids=str)
def test_a_source_of_chosen_documents_grows(shelf, written, chosen, how, name):
    if not name and "max_epochs" in how:
        how = how | {"max_epochs": {"w": 2}}

    def graph(files: int) -> IndexedDataPipe:
        documents = TokenReader(written[:files], name="w").select_documents(**chosen, name=name)
        return batched(documents.slice_sequences(S).permute(7).blend(shelf.source(3), **how), micro=2, size=2)

    loader = DataLoader2(graph(1))
    loader.seek(3)
    early, before = loader.state_dict(), held(loader, 3)
    loader.grow_source(name or "w", written[1])
    assert held(loader, 3) == before
    for other in (
        DataLoader2.from_state(loader.state_dict(), graph(2)),
        DataLoader2.from_state(early, graph(2), amend=True),
    ):
        assert other.state_dict() == loader.state_dict()
        assert held(other, 12) == held(loader, 12)


def test_two_growths_at_one_step_come_in_one_go(shelf):
    def run(*parts: slice) -> DataLoader2:
        loader = DataLoader2(batched(growing(shelf, 0, 1, weights=[1, 1])))
        loader.seek(2)
        for part in parts:
            loader.grow_source("a", shelf.files[0][part], "uint16")
        return loader

    one, two = run(slice(1, 3)), run(slice(1, 2), slice(2, 3))
    assert one.state_dict() == two.state_dict()
    assert held(one, 9) == held(two, 9)


def test_an_exact_union_grows_and_nothing_comes_again_before_its_source_is_through(shelf):
    for step in range(7):
        loader = DataLoader2(batched(growing(shelf, 0, 1)))
        loader.seek(step)
        loader.grow_source("a", shelf.files[0][1], "uint16")
        rows = [(0 if source == "a" else 3, place, False) for source, _, place in held(loader, 16)]
        walk_of(shelf, 0, 1, rows, {8 * step: 2})
        walk_of(shelf, 3, 1, rows, {})
        graph = batched(growing(shelf, 0, 2))
        assert held(DataLoader2.from_state(loader.state_dict(), graph), 16) == held(loader, 16)
        with pytest.raises(StateMismatchError):
            DataLoader2.from_state(loader.state_dict(), batched(growing(shelf, 0, 1)))


def test_weights_by_length_count_all_files_of_a_source_that_grew(shelf):
    loader = DataLoader2(batched(growing(shelf, 0, 1, weights=[1, 1])))
    loader.seek(2)
    loader.grow_source("a", shelf.files[0][1:], "uint16")
    loader.seek(4)
    loader.update_weights(temperature=1)
    a, d = loader.state_dict()["journal"]["weights"][0][3]
    rows = shelf.rows(0, 0, 1) + shelf.rows(0, 1, 3)
    assert abs(a / (a + d) - rows / (rows + shelf.rows(3, 0, 1))) < 1e-6


def test_a_mapped_source_that_grew_tells_its_rows(shelf):
    def graph(files: int) -> IndexedDataPipe:
        mapped = shelf.source(0, 0, files).map(np.copy, seeded=False)
        return batched(mapped.blend(shelf.source(3), weights=[1, 1]))

    loader = DataLoader2(graph(1))
    before = taken(iter(loader), 4)
    loader.grow_source("a", shelf.files[0][1:], "uint16")
    after = taken(iter(loader), 8)
    told = [(SHELF[number][0], place) for _, (number, place, _) in before + after]
    assert [(source, place) for source, _, place in held(loader, 6)] == told
    assert taken(iter(DataLoader2.from_state(loader.state_dict(step=2), graph(3))), 8) == after


def test_new_files_for_a_run_that_ended_by_a_cap_let_it_go_on(shelf):
    def graph(files: int) -> IndexedDataPipe:
        return batched(growing(shelf, 2, files, weights=[1, 1], max_epochs={"c": 2}))

    loader = DataLoader2(graph(1))
    before = [row for batch in loader for row in delivered(batch)]
    loader.grow_source("c", shelf.files[2][1], "uint16")
    assert loader.consumed_samples == len(before)
    assert loader.state_dict()["consumed_samples"] == len(before)
    rest = [row for batch in loader for row in delivered(batch)]
    assert [number for number, _ in before + rest] == list(range(len(before) + len(rest)))
    assert len(rest) >= 8
    walk_of(shelf, 2, 1, [row for _, row in before + rest], {len(before): 2})


def test_a_graph_without_a_blend_is_amended_by_more_files(shelf):
    def graph(files: int) -> IndexedDataPipe:
        return batched(shelf.source(0, 0, files))

    loader = DataLoader2(graph(1))
    taken(iter(loader), 4)
    with pytest.raises(StateMismatchError):
        DataLoader2.from_state(loader.state_dict(), graph(2))
    other = DataLoader2.from_state(loader.state_dict(), graph(2), amend=True)
    loader.grow_source("a", shelf.files[0][1], "uint16")
    assert other.state_dict() == loader.state_dict()
    assert taken(iter(other), 20) == taken(iter(loader), 20)


# Jumps --------------------------------------------------------------------------------------------------


def test_a_jump_leaves_out_what_the_run_would_have_given_and_moves_its_sources_on(shelf):
    graph = batched(blend_of(shelf, 0, 1, weights=[3, 1]))
    loader, plain = DataLoader2(graph), DataLoader2(graph)
    loader.seek(2)
    loader.jump(3)
    assert held(loader, 9) == held(plain, 2) + held(plain, 12)[8 * 5 :]
    loader.seek(4)
    plain.seek(7)
    assert loader.consumed_by_source == plain.consumed_by_source, "how far each source is"


def test_when_finds_every_row_before_between_and_after_jumps_and_none_of_what_they_left_out(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    for step, steps in ((1, 2), (2, 1), (3, 1), (6, 20)):
        loader.seek(step)
        loader.jump(steps)
    rows = [(r.source, r.token, (r.step, r.rank, r.micro_batch, r.row)) for k in range(9) for r in loader.contents(k)]
    for first, stop in ((0, 9), (2, 7), (6, 7), (7, 9)):
        for token in range(35):
            found = [r[:4] for r in loader.when("a", token, range(first, stop))]
            expected = [w for name, t, w in rows if name == "a" and t < token <= t + S and first <= w[0] < stop]
            assert found == expected


@given(
    jumps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=5),
    end=st.sampled_from([0, 12, 40, MAX_NUMBER]),
)
def test_a_jumps_numbers_are_those_that_are_left_in_order(shelf, jumps, end):
    at, pairs = 0, []
    for gap, samples in jumps:
        at += gap + bool(pairs)
        pairs.append((at, samples))
    order = shelf.source(0) if end == MAX_NUMBER else shelf.source(0).limit(samples=end or 1)
    node = Jumper(order, pairs)
    left, number = [], 0
    while number < min(order.end, 200):
        skipped = sum(samples for at, samples in pairs if at == len(left))
        number += skipped
        pairs = [(at, samples) for at, samples in pairs if at != len(left)]
        if number < order.end:
            left.append(number)
        number += 1
    if end != MAX_NUMBER:
        assert node.end == len(left)
    assert node.route(np.arange(len(left)))[1].tolist() == left
    back = {number: k for k, number in enumerate(left)}
    every = np.arange(min(order.end, 150))
    assert node.unroute(0, every).tolist() == [back.get(number, -1) for number in every.tolist()]
    for k in range(len(left) + 1):
        assert node.source_bound(0, k) >= (left[k - 1] + 1 if k else 0)


@pytest.mark.parametrize("limit", [{"samples": 80}, {"steps": 10}])
def test_a_jump_on_a_limited_run_keeps_its_steps(shelf, limit):
    order = blend_of(shelf, 0, 1, weights=[3, 1])
    graph = batched(order.limit(**limit)) if "samples" in limit else batched(order).limit(**limit)
    loader, plain = DataLoader2(graph), DataLoader2(batched(order))
    loader.seek(5)
    loader.jump(8)
    assert held(loader, 10) == held(plain, 5) + held(plain, 18)[8 * 13 :]
    assert len(list(loader)) == 10
    assert [len(list(loader)) for _ in range(2)] == [20, 20]


def test_jumps_and_growth_do_not_change_the_one_pass_of_once(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1).once(tail="pad")))
    taken(iter(loader), 2)
    for change in (lambda: loader.jump(1), lambda: loader.grow_source("a", shelf.files[0][1], "uint16")):
        with pytest.raises(JournalError, match="once"):
            change()


def test_jumps_go_up_to_the_last_number_and_no_further(shelf):
    graph = batched(blend_of(shelf, 0, 1, weights=[3, 1]))
    loader = DataLoader2(graph)
    for step, far in ((2, 2**59), (3, 2**59 - 10), (4, 2**58), (5, 2**57)):
        loader.seek(step)
        with contextlib.suppress(OutOfRangeError):
            loader.jump(far)
        assert all(record.epoch >= 0 for record in loader.contents(step))
        assert min(place for _, place, _ in (row for _, row in taken(iter(loader), 2))) >= 0
        loader.seek(step)
    other = DataLoader2.from_state(loader.state_dict(), graph)
    assert taken(iter(other), 4) == taken(iter(loader), 4)
    left = 2**63 - 1 - sum(samples for _, _, samples in loader.state_dict()["journal"]["jumps"])
    last = left // 8 - 1
    loader.seek(last)
    assert all(record.epoch >= 0 for record in loader.contents(last))
    taken(iter(loader), 2)
    with pytest.raises(TokenpipeError):
        loader.seek(last + 2)


# Excluded documents -------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path) -> list[str]:
    """Two token files of documents of 3, 7, 2 and 12 tokens, and of 5 and 20, with ids doc-0, doc-1, … beside them."""
    paths, token = [], 0
    for k, lengths in enumerate([(3, 7, 2, 12), (5, 20)]):
        paths.append(str(tmp_path / f"w{k}.tokens"))
        with TokenFileWriter(paths[-1], dtype="uint16") as writer:
            for length in lengths:
                writer.write(np.arange(token, token + length))
                token += length
        with DocumentIdsWriter(ids_path(paths[-1])) as ids:
            ids.write_ids([f"doc-{4 * k + document}" for document in range(len(lengths))])
    return paths


def test_documents_are_excluded_by_number_or_id_in_old_and_new_files_of_a_source(shelf, written):
    def graph(files: int) -> IndexedDataPipe:
        source = TokenReader(written[:files], name="w").slice_sequences(S).permute(7)
        return batched(source.blend(shelf.source(3), weights=[1, 1]))

    loader = DataLoader2(graph(1))
    loader.seek(1)
    loader.exclude("w", documents=[1])
    with pytest.raises(TokenpipeError):
        loader.exclude("w", documents="doc-4")
    loader.seek(2)
    loader.grow_source("w", written[1])
    loader.exclude("w", documents="doc-4")
    loader.exclude("w", tokens=[(30, 31)], documents=[0])
    expected = {0: [], 1: [(3, 10)]}
    for run in (loader, DataLoader2.from_state(loader.state_dict(), graph(2))):
        for step in range(8):
            pairs = expected.get(step, [(0, 3), (3, 10), (24, 29), (30, 31)])
            for record in run.contents(step):
                inside = any(record.token < stop and first < record.token + S + 1 for first, stop in pairs)
                assert record.masked == (record.source == "w" and inside)
        run.seek(0)
        told = [(r.sample_number, r.masked) for step in range(8) for r in run.contents(step)]
        assert [(n, bool((batch["label_ids"] == -100).all(1)[k]))
                for _, batch in zip(range(16), run, strict=False)
                for k, n in enumerate(batch["sample_numbers"].tolist())] == told  # fmt: skip


def test_exclusions_of_a_source_that_was_replaced_stay_with_the_old_one(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[3, 1])))
    loader.seek(1)
    loader.exclude("a", [(0, 35)])
    loader.seek(3)
    other = DataLoader2.from_state(loader.state_dict(), batched(blend_of(shelf, 4, 1, weights=[3, 1])), amend=True)
    assert not any(record.masked for step in range(3, 9) for record in other.contents(step))
    other.exclude("a", [(0, 31)])
    assert all(record.masked for step in range(3, 9) for record in other.contents(step) if record.source == "a")
    assert DataLoader2.from_state(other.state_dict(), batched(blend_of(shelf, 4, 1, weights=[3, 1]))).state_dict() == (
        other.state_dict()
    )


def test_a_thousand_excluded_stretches_are_one_mask(shelf):
    loader = DataLoader2(batched(shelf.source(0, 0, 3).blend(shelf.source(1), weights=[3, 1])))
    for step in range(40):
        loader.seek(step)
        loader.exclude("a", [(first, first + 1) for first in range(step % 3, 66, 3)])
    marked = [record for step in range(45) for record in loader.contents(step)]
    assert all(record.masked for record in marked if record.source == "a" and record.step >= 3)
    assert not any(record.masked for record in marked if record.source == "b")


# Nested blends, and graphs that are no plain blend -----------------------------------------------------------


def nest(shelf: Shelf, inner: str = "in") -> IndexedDataPipe:
    """ "d", and a blend of "a" and "b" inside."""
    return shelf.source(3).blend(blend_of(shelf, 0, 1, weights=[3, 1], name=inner), weights=[1, 1])


def test_an_inner_blend_changes_by_its_name_and_nothing_repeats(shelf):
    def graph(*numbers: int, weights: Any = (3, 1), files: int = 1) -> IndexedDataPipe:
        first, *others = (shelf.source(n, 0, files if n == 0 else 1) for n in numbers)
        inner = first.blend(*others, weights=list(weights), name="in")
        return batched(shelf.source(3).blend(inner, weights=[1, 1]))

    loader = DataLoader2(graph(0, 1))
    made: list[int] = []

    def go(steps: int) -> None:
        made.extend(row[0] for _, row in taken(iter(loader), 2 * steps))

    go(1)
    loader.update_weights({"d": 1, "in": 3})
    go(1)
    loader.update_weights({"a": 1, "b": 5})
    go(2)
    loader.add_source(shelf.source(2), {"a": 1, "b": 1, "c": 1}, blend="in")
    go(2)
    loader.grow_source("a", shelf.files[0][1], "uint16")
    go(2)
    loader.drop_source("b", blend="in")
    go(4)
    state = loader.state_dict()
    for again in (graph(0, 1, 2, weights=(3, 1, 0), files=2), graph(2, 0, weights=(1, 1), files=2)):
        other = DataLoader2.from_state(state, again)
        assert other.state_dict() == state
        assert taken(iter(other), 6) == taken(iter(DataLoader2.from_state(state, again)), 6)
        assert [source for source, *_ in held(other, 12)] == [SHELF[number][0] for number in made]
    rows = [(next(n for n in range(4) if SHELF[n][0] == source), place, False) for source, _, place in held(loader, 16)]
    for number in (1, 2, 3):
        walk_of(shelf, number, 1, rows, {})
    walk_of(shelf, 0, 1, rows, {8 * 6: 2})


@pytest.mark.parametrize("how", [{}, {"weights": [1, 1], "max_epochs": {"in": 3}}, {"temperature": 2.0}], ids=str)
@pytest.mark.parametrize("join", ["weighted", "exact", "concat", "a temperature"])
def test_a_source_grows_below_blends_that_count_lengths(shelf, join, how):
    def graph(files: int) -> IndexedDataPipe:
        a, b = shelf.source(0, 0, files), shelf.source(1)
        inner = {
            "weighted": lambda: a.blend(b, weights=[3, 1], name="in"),
            "exact": lambda: a.blend(b, name="in"),
            "concat": lambda: a.concat(b, name="in"),
            "a temperature": lambda: a.blend(b, temperature=2.0, name="in"),
        }[join]()
        return batched(inner.blend(shelf.source(3), **how))

    loader = DataLoader2(graph(1))
    loader.seek(2)
    before = held(loader, 2)
    try:
        loader.grow_source("a", shelf.files[0][1], "uint16")
    except JournalError as error:
        assert len(str(error)) > 20
        assert held(loader, 4) == held(DataLoader2(graph(1)), 4)
        return
    assert held(loader, 2) == before
    other = DataLoader2.from_state(loader.state_dict(), graph(2))
    assert other.state_dict() == loader.state_dict()
    steps = 6 if "max_epochs" in how else 20
    assert held(other, steps) == held(loader, steps)
    seen = held(loader, steps)
    assert len(set(seen)) == len(seen)


def test_an_inner_blend_that_is_another_one_in_the_graph_does_not_begin_its_sources_again(shelf):
    def graph(*weights: int, files: int = 1) -> IndexedDataPipe:
        inner = shelf.source(0, 0, files).blend(shelf.source(1), weights=list(weights), name="in")
        return batched(shelf.source(3).blend(inner, weights=[1, 1]))

    for changed in (graph(1, 1), graph(3, 1, files=2)):
        loader = DataLoader2(graph(3, 1))
        rows = taken(iter(loader), 2)
        try:
            other = DataLoader2.from_state(loader.state_dict(), changed, amend=True)
        except (StateMismatchError, JournalError) as error:
            assert "'in'" in str(error)
            continue
        rows += taken(iter(other), 2)
        inner = [row for _, row in rows if row[0] != 3]
        assert len(set(inner)) == len(inner) == 8, "no epoch is through by then"


def test_an_inner_blend_that_changed_may_be_dropped_and_go(shelf):
    for change in (
        lambda loader: loader.update_weights({"a": 1, "b": 1}),
        lambda loader: loader.add_source(shelf.source(2), [1, 1, 1], blend="in"),
        lambda loader: loader.drop_source("b", blend="in"),
        lambda loader: loader.grow_source("b", shelf.files[1][1], "uint16"),
        lambda loader: loader.exclude("b", [(0, 9)]),
    ):
        loader = DataLoader2(batched(nest(shelf)))
        loader.seek(1)
        change(loader)
        loader.seek(3)
        loader.drop_source("in")
        state = loader.state_dict()
        other = DataLoader2.from_state(state, batched(shelf.source(3).blend(weights=[1])))
        assert other.state_dict() == state
        assert taken(iter(other), 6) == taken(iter(loader), 6)
        assert [r.sample_number for r in other.contents(1)] == list(range(8, 16))
        assert {r.source for r in other.contents(1)} >= {"d"}


def test_one_name_is_one_source_in_all_blends(shelf):
    for number, blend in ((4, None), (1, None), (3, "in")):
        loader = DataLoader2(batched(nest(shelf)))
        before = loader.state_dict()
        with pytest.raises((JournalError, ConfigurationError), match=f"'{SHELF[number][0]}'"):
            other = TokenReader(shelf.files[number][0], "uint16", SHELF[number][0]).slice_sequences(S).permute(7)
            loader.add_source(other, [1, 1, 1], blend=blend)
        assert loader.state_dict() == before


def graphs(shelf: Shelf, folder: Path) -> dict[str, Callable[[], IndexedDataPipe]]:
    a, b, d = shelf.source(0), shelf.source(1), shelf.source(3)
    np.save(folder / "order.npy", np.random.default_rng(5).permutation(120))

    def ab(**how: Any) -> IndexedDataPipe:
        return a.blend(b, **({"weights": [3, 1]} | how))

    def cut(reader: TokenReader) -> IndexedDataPipe:
        return reader.slice_sequences(2 * S, unit=4 * S).permute(7)

    return {
        "one source": lambda: a,
        "weighted": ab,
        "exact": lambda: ab(weights=None),
        "repeats": lambda: a.blend(b, repeats={"b": 2}),
        "caps that stop": lambda: ab(max_epochs=2),
        "caps that renormalise": lambda: ab(max_epochs=2, on_exhausted="renormalise"),
        "caps that are errors": lambda: ab(max_epochs=3, on_exhausted="error"),
        "planned": lambda: ab(schedule=[(20, [1, 1]), (60, [1, 2])]),
        "permuted above": lambda: ab().permute(3),
        "an order from a file": lambda: ab().reorder(folder / "order.npy"),
        "nanoset's order": lambda: a.order_nanoset(b, num_samples=200),
        "limited": lambda: ab().limit(samples=120),
        "limited below": lambda: a.limit(samples=15).blend(b, weights=[3, 1], on_exhausted="renormalise"),
        "skipped": lambda: ab().skip(8),
        "skipped below": lambda: a.skip(3).blend(b, weights=[3, 1]),
        "once": lambda: ab(weights=None).once(tail="drop"),
        "concat": lambda: a.concat(b),
        "a blend in concat": lambda: ab(name="in").concat(d),
        "concat in a blend": lambda: a.concat(b, name="ab").blend(d, weights=[1, 2]),
        "two nameless blends": lambda: ab().concat(d.blend(shelf.source(2), weights=[1, 1])),
        "nested": lambda: d.blend(ab(name="in"), weights=[1, 1]),
        "mapped": lambda: ab().map(np.copy, seeded=False),
        "mapped below": lambda: a.map(np.copy, seeded=False).blend(b, weights=[3, 1]),
        "excluded": lambda: ab().exclude({"a": [(0, 9)]}),
        "resized": lambda: cut(TokenReader(shelf.files[0][0], "uint16", "a")).resize_sequences(S, after=3).blend(
            b, weights=[3, 1]
        ),
        "units": lambda: TokenReader(shelf.files[0][0], "uint16", "a").slice_sequences(S, unit=2 * S).permute(7).blend(
            b, weights=[3, 1]
        ),
        "windows": lambda: TokenReader(shelf.files[0][0], "uint16", "a").slice_sequences(S).permute(7, window=4).blend(
            b, weights=[3, 1]
        ),
    }  # fmt: skip


KINDS = [
    "one source", "weighted", "exact", "repeats", "caps that stop", "caps that renormalise", "caps that are errors",
    "planned", "permuted above", "an order from a file", "nanoset's order", "limited", "limited below", "skipped",
    "skipped below", "once", "concat", "a blend in concat", "concat in a blend", "two nameless blends", "nested",
    "mapped", "mapped below", "excluded", "resized", "units", "windows",
]  # fmt: skip

CALLS: dict[str, Callable[[DataLoader2, Shelf], None]] = {
    "weights": lambda loader, _: loader.update_weights([1, 2]),
    "weights by name": lambda loader, _: loader.update_weights({"a": 1, "b": 5}),
    "no weights": lambda loader, _: loader.update_weights({"a": 0, "b": 5}),
    "temperature": lambda loader, _: loader.update_weights(temperature=2.0),
    "inner": lambda loader, _: loader.update_weights([1, 2], blend="in"),
    "add": lambda loader, shelf: loader.add_source(shelf.source(5), [1, 1, 1]),
    "add to the inner": lambda loader, shelf: loader.add_source(shelf.source(5), [1, 1, 1], blend="in"),
    "add by length": lambda loader, shelf: loader.add_source(shelf.source(5)),
    "add by temperature": lambda loader, shelf: loader.add_source(shelf.source(5), temperature=2.0),
    "drop a": lambda loader, _: loader.drop_source("a"),
    "drop b": lambda loader, _: loader.drop_source("b", {"a": 1}),
    "drop the inner": lambda loader, _: loader.drop_source("in"),
    "drop of the inner": lambda loader, _: loader.drop_source("a", blend="in"),
    "grow a": lambda loader, shelf: loader.grow_source("a", shelf.files[0][1:], "uint16"),
    "grow b": lambda loader, shelf: loader.grow_source("b", shelf.files[1][1], "uint16"),
    "jump": lambda loader, _: loader.jump(2),
    "exclude": lambda loader, _: loader.exclude("a", [(3, 9), (20, 22)]),
    "size": lambda loader, _: loader.update_global_batch_size(16),
    "sizes": lambda loader, _: loader.update_global_batch_size([(0, 8), (4, 16), (6, 4)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_change_of_each_graph_is_exact_or_refused_with_the_reason(shelf, tmp_path, kind):
    assert list(graphs(shelf, tmp_path)) == KINDS
    order = graphs(shelf, tmp_path)[kind]()
    for name, call in CALLS.items():
        graph = batched(order)
        loader = DataLoader2(graph)
        iterator = iter(loader)
        first = taken(iterator, 3)  # inside step 1
        before, was = loader.state_dict(), held(loader, 2)
        try:
            call(loader, shelf)
        except TokenpipeError as error:
            assert loader.state_dict() == before, name
            assert len(str(error)) > 20, name
            assert taken(iterator, 1)[0][0] == first[-1][0] + 1, name
            continue
        assert held(loader, 2) == was, f"{name}: the past is another one"
        state = loader.state_dict()
        try:
            rest = taken(iterator, 9)
        except TokenpipeError as error:
            assert kind == "caps that are errors" or "limited" in kind, f"{kind}, {name}: {error}"
            continue
        assert [number for number, _ in first + rest] == list(range(first[0][0], first[0][0] + len(first + rest))), name
        steps = loader.step
        told = [(r.sample_number, r.token, r.masked) for step in range(steps) for r in loader.contents(step)]
        given = {number: (row[1], row[2]) for number, row in first + rest}
        if kind != "resized":
            assert all((token, masked) == given[n] for n, token, masked in told if n in given), f"{kind}, {name}"
        if name != "jump" and "order" not in kind and kind != "permuted above":
            seen = [record for record in held(loader, steps) if kind != "once" or record]
            assert len(set(seen)) == len(seen), f"{kind}, {name}: a sample comes twice in an epoch"
        if not name.startswith(("add", "grow")):
            other = DataLoader2.from_state(state, graph)
            assert other.state_dict() == state, name
            assert taken(iter(other), 9) == rest, f"{kind}, {name}"


def test_a_permute_or_an_order_above_a_blend_is_named_as_the_reason(shelf, tmp_path):
    for kind, says in (("permuted above", "Permuter"), ("an order from a file", "Reorderer"), ("once", "once")):
        loader = DataLoader2(batched(graphs(shelf, tmp_path)[kind]()))
        for name in ("weights", "add", "drop a", "grow a"):
            with pytest.raises(JournalError, match=says):
                CALLS[name](loader, shelf)


# Weights ------------------------------------------------------------------------------------------------


def test_weights_name_the_sources_that_are_not_dropped_in_any_form(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, 2, weights=[3, 1, 1])))
    loader.seek(1)
    loader.drop_source("b")

    def now() -> list[int]:
        return loader.state_dict()["journal"]["weights"][-1][3]

    half = 2**31
    assert now() == [3 * 2**30, 0, 2**30]
    loader.update_weights({"c": 1, "a": 1})
    assert now() == [half, 0, half]
    loader.update_weights([0, 1])
    assert now() == [0, 0, 2**32]
    loader.update_weights(temperature=1)
    assert now()[1] == 0
    assert abs(now()[0] / 2**32 - 17 / 23) < 1e-6
    for bad in ({"a": 1}, {"a": 1, "b": 0, "c": 1}, [1, 0, 1], [1], {}):
        with pytest.raises(WeightsError):
            loader.update_weights(bad)
    loader.add_source(shelf.source(1), {"a": 1, "b": 2, "c": 1})
    assert now() == [2**30, half, 2**30]


def test_a_source_taken_up_again_goes_on_where_it_stopped(shelf):
    loader = DataLoader2(batched(blend_of(shelf, 0, 1, weights=[1, 1])))
    loader.seek(1)
    loader.drop_source("b")
    loader.seek(3)
    loader.add_source(shelf.source(1), [1, 1])
    loader.seek(4)
    loader.drop_source("b")
    loader.seek(5)
    loader.update_weights([1])
    loader.add_source(shelf.source(1), {"a": 0, "b": 1})
    order = [place for source, _, place in held(loader, 7) if source == "b"]
    assert order == shelf.order(1, 0, 1, 4)[: len(order)]
    assert len(order) > 2 * shelf.rows(1, 0, 1)
    with pytest.raises(JournalError, match="name"):
        loader.drop_source("b", {"a": 1})
        loader.add_source(shelf.source(1, 0, 2), [1, 1])


# Full journals ------------------------------------------------------------------------------------------


FAR = 10**9  # steps from one recorded change to the next

FILLING: dict[str, tuple[Callable[[int], list[Any]], Callable[[DataLoader2, int], None]]] = {
    "excluded": (
        lambda k: [k * FAR, 8 * k * FAR, "a", k % 30, k % 30 + 2],
        lambda loader, k: loader.exclude("a", [(k % 30, k % 30 + 2)]),
    ),
    "jumps": (lambda k: [k * FAR, 8 * k * FAR, 8], lambda loader, _: loader.jump(1)),
    "weights": (
        lambda k: [k * FAR, 8 * k * FAR, "", [k, 2**31 - k, 2**31]],
        lambda loader, k: loader.update_weights([k, 2**31 - k, 2**31]),
    ),
}


@pytest.mark.parametrize("what", FILLING)
def test_changes_are_recorded_until_the_journal_says_that_it_is_full(shelf, what):
    recorded, change = FILLING[what]
    graph = batched(blend_of(shelf, 0, 1, 2, weights=[3, 1, 1]))
    state = DataLoader2(graph).state_dict()
    entries: list[Any] = []
    while len(json.dumps(entries, separators=(",", ":"))) < MOST_BYTES * 39 // 64:  # nearly
        entries.append(recorded(len(entries) + 1))
    state["version"] = 1 if what == "weights" else 2
    state["journal"][what] = entries
    loader = DataLoader2.from_state(state, graph)
    assert loader.state_dict() == state
    assert held(loader, 3) == held(DataLoader2(graph), 3)
    made = len(entries)
    with pytest.raises(JournalError, match="full"):
        while made < 4000:
            loader.seek((made + 1) * FAR)
            change(loader, made + 1)
            made += 1
    assert made > len(entries) + 9
    state = loader.state_dict()
    assert state["journal"][what] == [recorded(k + 1) for k in range(made)], "as if all had been made one by one"
    assert len(json.dumps(state, separators=(",", ":"))) <= MOST_BYTES
    other = DataLoader2.from_state(json.dumps(state), graph)
    assert other.state_dict() == state
    assert taken(iter(other), 4) == taken(iter(loader), 4)


def test_a_journal_of_many_zeros_loads_or_is_full(shelf):
    reader = TokenReader(shelf.files[5][0], "uint16", "x").slice_sequences(S)
    count = 4000
    nodes = [TokenReader(shelf.files[5][0], "uint16", f"{k}").slice_sequences(S) for k in range(count)]
    graph = reader.blend(*nodes, weights=[1] + [0] * count)
    loader = DataLoader2(graph)
    with pytest.raises(JournalError, match="full"):
        for k in range(20):
            loader.seek(k)
            loader.update_weights([0] * (k + 1) + [1] + [0] * (count - k - 1))
    assert DataLoader2.from_state(loader.state_dict(), graph).state_dict() == loader.state_dict()


# Hostile states -----------------------------------------------------------------------------------------


def rich_state(shelf: Shelf) -> tuple[Any, IndexedDataPipe]:
    """A state with everything in its journal, inner blends too, and its graph."""

    def graph(files: int, *numbers: int) -> IndexedDataPipe:
        first, *others = (shelf.source(number, 0, files if number == 0 else 1) for number in numbers)
        inner = first.blend(*others, weights=[3, 1, 0][: len(numbers)], name="in")
        return batched(shelf.source(3).blend(inner, weights=[1, 2], max_epochs={"d": 9}))

    loader = DataLoader2(graph(1, 0, 1))
    for step, change in enumerate(every_change(shelf)[2:6], 1):
        loader.seek(step)
        change(loader)
    loader.update_weights({"d": 1, "in": 1})
    loader.seek(8)
    loader.add_source(shelf.source(2), [1, 1, 1], blend="in")
    loader.drop_source("b", blend="in")
    loader.exclude("d", [(3, 5)])
    loader.seek(9)
    return loader.state_dict(), graph(2, 0, 1, 2)


def check_hostile(state: Any, graph: IndexedDataPipe, load: Any = None) -> bool:
    """Our own error and nothing changed, or an exact restore of all that the state says. Whether it was taken."""
    loader = DataLoader2(graph)
    iterator = iter(loader)
    first = taken(iterator, 1)
    before = loader.state_dict()
    try:
        (load or (lambda function, value: function(value)))(loader.load_state_dict, state)
    except TokenpipeError as error:
        assert len(str(error)) < 20_000
        assert loader.state_dict() == before
        assert taken(iterator, 1)[0][0] == first[-1][0] + 1
        return False
    meant = json.loads(state) if isinstance(state, str) else state
    restored = loader.state_dict()
    assert restored["consumed_samples"] == meant["consumed_samples"]
    if restored["journal"]["schedule"] == [list(pair) for pair in meant["journal"]["schedule"]]:
        kinds = ("weights", "grown", "jumps", "excluded", "rosters", "breakpoints")
        assert all(restored["journal"].get(kind, []) == plain(meant["journal"].get(kind, [])) for kind in kinds)
    again = DataLoader2.from_state(json.loads(json.dumps(restored)), graph)
    assert again.state_dict() == restored
    for ask in (
        lambda which: taken(iter(which), 2),
        lambda which: held(which, 3),
        lambda which: which.contents(which.step),
        lambda which: which.consumed_by_source,
        lambda which: which.when("a", 3, range(3)),
        lambda which: [r.masked for r in which.contents(which.step)],
    ):
        found = []
        for which in (loader, again):
            try:
                found.append(ask(which))
            except TokenpipeError as error:
                found.append(type(error))
        assert found[0] == found[1]
    return True


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_hostile_journals_are_our_own_error_or_an_exact_restore(shelf, watched):  # noqa: F811
    rng = random.Random(41)
    hostile = hostile_values()
    state, graph = rich_state(shelf)
    assert check_hostile(state, graph)
    assert state["journal"].keys() >= {"weights", "grown", "jumps", "excluded", "rosters"}
    accepted = 0
    for k in range(SOAK or 500):
        bad = copy.deepcopy(state)
        if k % 3:  # the journal alone
            bad["journal"] = mutated(bad["journal"], rng, hostile)
        else:
            bad = mutated(bad, rng, hostile)
        try:
            accepted += check_hostile(bad, graph, watched)
        except BaseException:
            print(f"state {k}: {bad!r:.3000}")
            raise
    assert accepted < (SOAK or 500) / 3, "the mutations change nothing"


HUGE = [2**31, 2**32, 2**53, 2**62, 2**63 - 9, 2**63 - 2] if SOAK else [2**31, 2**62, 2**63 - 2]


@pytest.mark.parametrize("kind", ["weights", "grown", "jumps", "excluded", "rosters", "breakpoints"])
def test_huge_numbers_anywhere_in_a_journal_cost_nothing(shelf, kind):
    state, graph = rich_state(shelf)
    rows = state["journal"][kind]
    assert rows
    tracemalloc.start()
    try:
        for way in places(rows):
            for huge in HUGE:
                bad = copy.deepcopy(state)
                holder = bad["journal"][kind]
                for key in way[:-1]:
                    holder = holder[key]
                if type(holder[way[-1]]) is int:
                    holder[way[-1]] = huge
                    check_hostile(bad, graph)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "entries",
    [
        {"jumps": [[k, 8 * k, 8] for k in range(1, 100_000)]},
        {"jumps": [[2, 16, 2**62], [3, 24, 2**62]]},
        {"jumps": [[2, 16, 2**63 - 20]]},
        {"jumps": [[2**60 - 1, 2**63 - 8, 8]]},
        {"jumps": [[3, 24, 8], [2, 16, 8]]},
        {"jumps": [[2, 17, 8]]},
        {"grown": [[2, 16, "a", 1, 2**60, 0]]},
        {"grown": [[2, 16, "a", 1, 2, 2**62], [3, 24, "a", 2, 3, 1]]},
        {"grown": [[2, 16, "a", 2, 1, 0]]},
        {"grown": [[2, 16, "nobody", 1, 2, 0]]},
        {"grown": [[2, 16, "a", 1, 2, 0]] * 2},
        {"excluded": [[2, 16, "a", 0, 2**62]]},
        {"excluded": [[2, 16, "a", 5, 5]]},
        {"excluded": [[2, 16, "nobody", 0, 5]]},
        {"excluded": [[2, 16, "a", k, k + 1] for k in range(2_000)]},
        {"rosters": [["", 0, [["a", 2**32, 0, 17, ""], ["b", 0, 0, 9, ""]]]]},
        {"rosters": [["", 0, [["a", 3 * 2**30, 0, 2**62, ""], ["b", 2**30, 2**62, 2**62, ""]]]]},
        {"rosters": [["", 1, [["a", 2**62, 0, 17, ""], ["b", 2**62, 0, 9, ""]]]]},
        {"rosters": [["", 0, [["a", 3 * 2**30, 0, 17, ""], ["b", 2**30, 0, 9, "x"], ["c", 0, 0, 0, ""]]]]},
        {"rosters": [["", 0, [["a", 3 * 2**30, 0, 17, "0" * 16], ["b", 2**30, 0, 9, "0" * 16]]]]},
        {
            "rosters": [
                ["", 0, [["a", 3 * 2**30, 0, 17, ""], ["b", 2**30, 0, 9, ""]]],
                ["a", 0, [["a", 2**32, 0, 1, ""]]],
            ]
        },
        {"rosters": [["", 0, []]]},
        {"rosters": [["nobody", 0, [["a", 2**32, 0, 17, ""]]]], "weights": [[2, 16, "nobody", [2**32]]]},
        {"weights": [[2, 16, "", [2**32, 0, 0]]]},
        {"weights": [[2, 16, "", [2**32]]]},
        {"weights": [[2, 16, "", []]]},
        {"weights": [[2, 16, "", [2**62, 2**62]]]},
        {"breakpoints": [[0, 0, 8], [2**59, 2**62, 2**62]]},
    ],
    ids=lambda entries: f"{entries!r:.60}",
)
def test_journals_that_nobody_wrote_are_refused_or_restored(shelf, entries):
    graph = batched(blend_of(shelf, 0, 1, weights=[3, 1]))
    state = DataLoader2(graph).state_dict()
    for version in (1, 2):
        tracemalloc.start()
        try:
            check_hostile(state | {"version": version, "journal": state["journal"] | entries}, graph)
            assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"jumps": [[3, 24, 8], [2, 16, 8]]}, "order"),
        ({"weights": [[3, 24, "", [2**31, 2**31]], [2, 16, "", [2**32, 0]]]}, "order"),
        ({"excluded": [[3, 24, "a", 0, 1], [2, 16, "a", 0, 1]]}, "order"),
        ({"jumps": [[2, 17, 8]]}, "17"),
        ({"jumps": [[2, 16, 0]]}, "jumps"),
        ({"jumps": [[2**59, 2**62, 2**62]]}, "jumps"),
        ({"excluded": [[2, 16, "a", 5, 5]]}, "ranges"),
        ({"grown": [[2, 16, "a", 2, 1, 0]]}, "2 to 1"),
        ({"grown": [[2, 16, "a", 0, 1, 0]]}, "0 to 1"),
        ({"grown": [[2, 16, "a", 1, 2, 0], [3, 24, "a", 1, 3, 0]]}, "1 to 3"),
        ({"weights": [[2, 16, "", [2**32 - 1, 2]]]}, "2\\*\\*32"),
        ({"rosters": [["", 0, [["a", 2**32, 0, 17, ""]]]] * 2}, "twice"),
        ({"rosters": [["", 2, [["a", 2**32, 0, 17, ""]]]]}, "mixture"),
        ({"rosters": [["", 0, [["a", 2**32, 0, 17, ""], ["a", 0, 0, 9, ""]]]]}, "mixture"),
        ({"grown": [[2, 16, "a", 1, 2]]}, "int"),
        ({"holes": [[2, 16]]}, "holes"),
    ],
)
def test_a_journal_that_contradicts_itself_is_a_state_error_that_says_what(shelf, entries, says):
    graph = batched(blend_of(shelf, 0, 1, weights=[3, 1]))
    state = DataLoader2(graph).state_dict()
    with pytest.raises(StateError, match=says):
        DataLoader2(graph).load_state_dict(state | {"version": 2, "journal": state["journal"] | entries})
