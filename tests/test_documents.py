"""Which documents are read: choices by hash, score and list, and that nothing else is ever delivered.

In these files token k of a source is k: so what a row holds says where it came from.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpipe.datapipes import DocumentSelector, TokenFileWriter, TokenReader, Topology, document_ends, overlap
from tokenpipe.datapipes.errors import (
    ArgumentTypeError,
    ConfigurationError,
    OutOfRangeError,
    StateMismatchError,
    TokenFileError,
    TokenpipeError,
)
from tokenpipe.datapipes.formats.ids import DocumentIdsWriter, ids_path
from tokenpipe.reading_services import DataLoader2


@pytest.fixture
def source(tmp_path):
    """source(name, [[lengths of the first file's documents], …], ids=…): a reader whose token k is k."""

    def make(name: str, files: "list[list[int]]", ids: "list[str] | None" = None, **options) -> TokenReader:
        paths, token, document = [], 0, 0
        for i, lengths in enumerate(files):
            paths.append(str(tmp_path / f"{name}-{i}.tok"))
            with TokenFileWriter(paths[-1], dtype="uint32") as writer:
                for length in lengths:
                    writer.write(np.arange(token, token + length))
                    token += length
            if ids is not None:
                with DocumentIdsWriter(ids_path(paths[-1])) as writer:
                    writer.write_ids(ids[document : document + len(lengths)])
            document += len(lengths)
        return TokenReader(paths, name=name, **options)

    return make


def with_scores(reader: TokenReader, score: str, values) -> TokenReader:
    values, first = np.asarray(values), 0
    for file in reader.files:
        np.save(f"{file.path}.{score}.npy", values[first : first + file.documents])
        first += file.documents
    return reader


def tokens_of(space) -> "list[int]":
    return space.fetch(np.arange(len(space))).tolist()


def document_tokens(reader: TokenReader) -> "list[list[int]]":
    """The tokens of each document, by its number."""
    ends = reader.document_ends().tolist()
    return [list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]


def chosen(space) -> "set[int]":
    """The numbers of the documents that the space holds, whole and nothing else, in the source's order."""
    tokens = tokens_of(space)
    found = [n for n, document in enumerate(document_tokens(space.origin)) if document[0] in set(tokens)]
    assert tokens == [token for n in found for token in document_tokens(space.origin)[n]]
    return set(found)


lengths_of_files = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=8), min_size=1, max_size=4)
seeds = st.integers(0, 2**63 - 2)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)

THREE_FILES = [[5, 1, 9, 30, 4], [17, 2, 2, 8], [3, 41, 6, 6, 7, 12]]


# The space of chosen documents ------------------------------------------------------------------------------


@given(files=lengths_of_files, data=st.data())
def test_a_list_of_documents_is_read_end_to_end_and_every_token_knows_its_place(source, files, data):
    reader = source("prose", files)
    wanted = data.draw(st.sets(st.integers(0, sum(map(len, files)) - 1), min_size=1))
    space = reader.select_documents(documents=sorted(wanted, reverse=True))
    assert chosen(space) == wanted
    places = np.arange(len(space))
    numbers = space.source_numbers(places)
    assert numbers.tolist() == tokens_of(space)
    everything = np.arange(len(reader))
    back = space.places_of(everything)
    assert back[numbers].tolist() == places.tolist()
    assert (back[~np.isin(everything, numbers)] == -1).all()
    file, place = space.file_of(places)
    assert (reader.first_tokens[file] + place).tolist() == numbers.tolist()


@given(files=lengths_of_files, seed=seeds, share=shares)
def test_neighbours_of_one_file_are_one_piece(source, files, seed, share):
    try:
        space = source("prose", files).select_documents(share=share, seed=seed)
    except ConfigurationError:
        return
    first, starts = space.pieces
    stops = starts + np.diff(first)
    assert (np.diff(first) > 0).all()
    for stop, start in zip(stops[:-1], starts[1:], strict=True):
        assert stop < start or (stop == start and start in space.first_tokens)


@given(files=lengths_of_files, wanted=st.sets(st.integers(0, 31), min_size=1), chunk=st.integers(1, 5))
def test_how_many_documents_are_looked_at_in_one_go_is_no_matter(source, files, wanted, chunk):
    reader = source("prose", files)
    wanted = sorted(n for n in wanted if n < sum(map(len, files))) or [0]
    whole = reader.select_documents(documents=wanted).pieces
    before, document_ends.CHUNK = document_ends.CHUNK, chunk
    try:
        cut = reader.select_documents(documents=wanted).pieces
    finally:
        document_ends.CHUNK = before
    assert [a.tolist() for a in whole] == [a.tolist() for a in cut]


def test_a_row_of_many_small_documents_of_several_files_and_dtypes(tmp_path):
    tokens, paths = [], []
    for i, dtype in enumerate(("uint8", "uint16", "uint32", "int32", "int64")):
        paths.append(tmp_path / f"{i}.tok")
        with TokenFileWriter(paths[-1], dtype=dtype) as writer:
            for n in range(40):
                writer.write([(n * 7 + i) % 250] * (n % 3 + 1))
                tokens.append([(n * 7 + i) % 250] * (n % 3 + 1))
    space = TokenReader(paths, name="mixed").select_documents(documents=range(0, 200, 2))
    expected = [token for n in range(0, 200, 2) for token in tokens[n]]
    for length in (1, 50, len(expected) - 1):
        windows = space.slice_sequences(length)
        rows = windows.fetch(np.arange(len(windows))[::-1]).tolist()
        assert rows == [expected[k * length : k * length + length + 1] for k in range(len(windows))][::-1]


def test_a_file_that_several_spaces_read_is_mapped_once(source):
    parts = source("prose", THREE_FILES).partition("length", [6, 10])
    graph = [space.slice_sequences(4) for space in parts.values()]
    blend = graph[0].blend(*graph[1:])
    blend.fetch(np.arange(len(blend)))
    gather = blend._plan.value.gather
    assert len(gather.files) == len(gather.held.mapped) == 3


WHOLE_GRAPH = """
import hashlib, sys
from tokenpipe.datapipes import TokenReader, kernels
train, _ = TokenReader(sys.argv[1:], name="prose").hold_out(0.2, seed=7)
short, long = train.partition("length", [6]).values()
graph = short.slice_sequences(4).permute(seed=7).blend(long.slice_sequences(4).permute(seed=7), weights=[1, 2])
print(hashlib.sha256(graph.fetch(range(300)).tobytes()).hexdigest(), kernels.kernel("gather")[1])
"""


def test_chosen_documents_are_the_same_with_the_numpy_kernels(source):
    paths = [file.path for file in source("prose", THREE_FILES).files]
    found = {}
    for choice in ("numpy", "numba"):
        command = [sys.executable, "-W", "ignore", "-c", WHOLE_GRAPH, *paths]
        done = subprocess.run(
            command, env={**os.environ, "TOKENPIPE_KERNELS": choice}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        found[choice] = done.stdout.split()
    assert found["numpy"][1] == "False"
    if found["numba"][1] != "True":
        pytest.skip("the compiled kernels do not run here")
    assert found["numpy"][0] == found["numba"][0]


# Hold-out ---------------------------------------------------------------------------------------------------


@given(files=lengths_of_files, seed=seeds, share=shares, by=st.sampled_from(["number", "id"]))
def test_each_document_is_trained_on_or_held_out_and_never_both(source, files, seed, share, by):
    reader = source("prose", files, ids=[f"id {n}" for n in range(32)])
    try:
        train, held_out = reader.hold_out(share, seed, by)
    except ConfigurationError as error:
        assert "none of the" in str(error)
        return
    assert chosen(train) | chosen(held_out) == set(range(sum(map(len, files))))
    assert not chosen(train) & chosen(held_out)
    assert (train.name, held_out.name) == ("prose", "prose held out")
    assert overlap(train, held_out) == []
    assert [found.tokens for found in overlap(train, reader)] == [len(train)]


@given(
    files=st.lists(st.lists(st.integers(1, 30), min_size=3, max_size=12), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    length=st.integers(1, 9),
)
@settings(max_examples=50)
def test_no_token_of_a_held_out_document_is_an_input_or_a_label(source, files, seed, length):
    reader = source("prose", files)
    try:
        train, held_out = reader.hold_out(0.3, seed)
        graph = train.slice_sequences(length).permute(seed).batch_samples(2).collate_causal_lm()
    except ConfigurationError:
        return
    forbidden = set(tokens_of(held_out))
    batches = list(graph.limit(passes=2)) if len(graph) else []
    for batch in batches:
        assert not forbidden & set(batch["input_ids"].flatten().tolist())
        assert not forbidden & set(batch["label_ids"].flatten().tolist())
    rows = graph.datapipe.datapipe.datapipe
    assert not forbidden & set(rows.fetch(np.arange(len(rows))).flatten().tolist())


def test_a_hold_out_is_about_its_share_of_the_documents(source):
    reader = source("prose", [[1] * 20_000])
    for seed in range(5):
        _, held_out = reader.hold_out(0.01, seed)
        assert 150 < held_out.documents_chosen < 250  # 200 ± 3.5 standard deviations


def test_the_same_seed_holds_out_other_numbers_of_another_source_but_the_same_ids(source):
    ids = [f"https://example.org/{n}" for n in range(200)]
    prose, code = source("prose", [[1] * 200], ids), source("code", [[1] * 50, [2] * 150], ids)
    for by, same in (("number", False), ("id", True)):
        found = [chosen(reader.hold_out(0.3, 7, by)[1]) for reader in (prose, code)]
        assert (found[0] == found[1]) is same
        assert found[0] != chosen(prose.hold_out(0.3, 8, by)[1])


def test_an_id_has_one_fate_also_where_it_stands_twice(source):
    space = source("prose", [[1, 2, 3], [4, 5, 6]], ids=["a", "b", "c", "c", "a", "b"]).select_documents(
        share=0.5, seed=2, by="id"
    )
    assert {("abc" * 2)[n] for n in {0, 1, 2} & chosen(space)} == {"abccab"[n] for n in {3, 4, 5} & chosen(space)}


def test_which_documents_a_seed_chooses_stays_what_it_was(source):
    """Runs that have begun depend on it: if this fails, the change is wrong, not the numbers."""
    reader = source("prose", [[1] * 40], ids=[f"id {n}" for n in range(40)])
    assert sorted(chosen(reader.select_documents(share=0.25, seed=7))) == GOLDEN_BY_NUMBER
    assert sorted(chosen(reader.select_documents(share=0.25, seed=7, by="id"))) == GOLDEN_BY_ID


GOLDEN_BY_NUMBER = [5, 7, 8, 9, 12, 14, 16, 24, 27, 29, 34, 39]
GOLDEN_BY_ID = [2, 6, 14, 17, 20, 28, 35]


# Scores and partitions --------------------------------------------------------------------------------------

scores = st.one_of(
    st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0, -1.0]), st.floats(-2, 2, width=32), st.integers(-3, 3).map(float)
)


@given(
    files=lengths_of_files, data=st.data(), dtype=st.sampled_from(["float16", "float32", "float64", "int8", "int64"])
)
def test_a_partition_has_each_document_exactly_once(source, files, data, dtype):
    total = sum(map(len, files))
    values = np.array(data.draw(st.lists(scores, min_size=total, max_size=total))).astype(dtype)
    bins = data.draw(st.lists(scores, min_size=1, max_size=3, unique=True).map(sorted))
    reader = with_scores(source("prose", files), "quality", values)
    exact = [float(value) for value in values]
    expected = [set() for _ in range(len(bins) + 1)]
    for n, value in enumerate(exact):
        expected[sum(value >= bound for bound in bins)].add(n)
    if not all(expected):
        with pytest.raises(ConfigurationError, match="none of the"):
            reader.partition("quality", bins)
        return
    parts = reader.partition("quality", bins)
    assert [chosen(part) for part in parts.values()] == expected
    assert [part.name for part in parts.values()] == list(parts)


def test_a_partition_names_its_sub_sources(source):
    reader = with_scores(source("prose", [[5] * 6]), "quality", [0.1, 0.2, 0.5, 0.8, 0.9, 0.0])
    assert list(reader.partition("quality", [0.2, 0.8])) == [
        "prose/quality<0.2", "prose/0.2<=quality<0.8", "prose/quality>=0.8",
    ]  # fmt: skip
    easy, hard = reader.partition("quality", [0.5], names=["easy", "hard"]).values()
    blend = easy.slice_sequences(2).permute(7).blend(hard.slice_sequences(2).permute(7), weights={"easy": 3, "hard": 1})
    assert blend.sources == ("easy", "hard")
    assert "3 of 6 documents: 15 tokens" in blend.tree()


def test_the_length_of_a_document_is_a_score_without_a_sidecar(source):
    short, long = source("prose", THREE_FILES).partition("length", [9]).values()
    assert chosen(long) == {2, 3, 5, 10, 14}
    assert chosen(short) == set(range(15)) - chosen(long)


def test_a_curriculum_of_chosen_documents_of_what_is_trained_on(source):
    reader = source("prose", [[n % 7 + 1 for n in range(100)]])
    train, held_out = reader.hold_out(0.2, 7)
    short, long = train.partition("length", [4]).values()
    assert chosen(short) | chosen(long) == chosen(train)
    assert chosen(short) | chosen(long) | chosen(held_out) == set(range(100))
    assert (short.documents_chosen, short.documents_below) == (len(chosen(short)), len(chosen(train)))


@pytest.mark.parametrize(
    ("dtype", "at_least", "below", "expected"),
    [
        ("uint8", 3, None, {1, 2}),
        ("uint8", 2.5, 255, {1}),
        ("uint8", 300, None, set()),
        ("uint8", -4, 256, {0, 1, 2}),
        ("uint8", None, 0, set()),
        ("int64", 2**53 + 1, None, {2}),
        ("int64", None, 2**53 + 1, {0, 1}),
        ("float64", 2.0**53, None, {1, 2}),
    ],
)
def test_scores_are_compared_as_the_numbers_that_they_are(source, dtype, at_least, below, expected):
    values = {"uint8": [0, 3, 255], "int64": [0, 2**53, 2**53 + 1], "float64": [0, 2.0**53, np.inf]}[dtype]
    reader = with_scores(source("prose", [[4, 4, 4]]), "s", np.array(values, dtype))
    if expected:
        assert chosen(reader.select_documents(score="s", at_least=at_least, below=below)) == expected
    else:
        with pytest.raises(ConfigurationError, match="none of the 3"):
            reader.select_documents(score="s", at_least=at_least, below=below)


# Asked both ways --------------------------------------------------------------------------------------------


def rows_by_label(loader, steps):
    """{source token: its rows}, from what is delivered; and every record checked against its row."""
    found: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    for step in range(steps):
        for record, row in zip(loader.contents(step), loader.tokens(step).tolist(), strict=True):
            assert record.token == row[0], "a record says the source number of its first token"
            assert record.file_token == row[0] - FIRST[record.file], "and its place in its file"
            for token in row[1:]:
                found.setdefault((record.source, token), []).append(
                    (record.step, record.rank, record.micro_batch, record.row)
                )
    return found


FIRST: "dict[str, int]" = {}


def remember_files(reader: TokenReader) -> None:
    FIRST.update({file.path: int(first) for file, first in zip(reader.files, reader.first_tokens, strict=False)})


@given(seed=st.integers(0, 99), length=st.integers(1, 6), start=st.integers(0, 2))
@settings(max_examples=10)
def test_contents_and_when_agree_with_the_tokens_through_selectors_and_parts(source, seed, length, start):
    reader = source("prose", THREE_FILES)
    remember_files(reader)
    later = reader.part(start)
    try:
        train, _ = later.hold_out(0.25, seed)
        short, long = train.partition("length", [7]).values()
        _ = [space.slice_sequences(length) for space in (short, long)]
    except ConfigurationError:
        return  # too few documents are left for two sub-sources
    graph = (
        short.slice_sequences(length).permute(seed).blend(long.slice_sequences(length).permute(seed), weights=[1, 2])
    )
    graph = graph.shard_ranks(Topology(1, 2), seed=seed).batch_samples(3, global_batch_size=12).collate_causal_lm()
    with DataLoader2(graph) as loader:
        found = rows_by_label(loader, 6)
        first_kept = int(later.first_tokens[0])
        for token in range(len(reader)):
            for space in (short, long):
                rows = [row[:4] for row in loader.when(space.name, token, range(6))] if token >= first_kept else []
                assert sorted(tuple(row) for row in rows) == sorted(found.get((space.name, token), []))
            either = sorted(row for space in (short, long) for row in found.get((space.name, token), []))
            assert sorted(tuple(row[:4]) for row in loader.when("prose", token, range(6))) == either, (
                "the source as a whole"
            )
        with pytest.raises(OutOfRangeError, match=f"{len(reader)} tokens"):
            loader.when("prose", len(reader), range(6))
        with pytest.raises(ConfigurationError, match="prose/length<7"):
            loader.when("code", 0, range(6))


def test_a_part_of_a_source_goes_on_counting_where_the_files_before_it_end(source):
    whole = source("prose", THREE_FILES, ids=[f"id {n}" for n in range(15)])
    remember_files(whole)
    parts = [whole.part(0, 1), whole.part(1, 3)]
    assert tokens_of(parts[0]) + tokens_of(parts[1]) == tokens_of(whole)
    assert parts[1].document_ends().tolist() == whole.document_ends().tolist()[5:]
    assert parts[1].part(1).first_token == whole.part(2).first_token == int(whole.first_tokens[2])
    assert parts[1].part(1).first_document == whole.part(2).first_document == 9
    assert [part.document_id(n) for part, n in ((parts[0], 4), (parts[1], 5), (parts[1], 14))] == [
        "id 4",
        "id 5",
        "id 14",
    ]
    assert parts[1].find_documents("id 7") == [7]
    for wrong in (4, 15):
        with pytest.raises(OutOfRangeError, match="5 … 14"):
            parts[1].document_id(wrong)
    both = parts[0].slice_sequences(4).concat(parts[1].slice_sequences(4))
    with DataLoader2(both.batch_samples(2).collate_causal_lm()) as loader:
        found = rows_by_label(loader, len(both) // 2)
        for token in range(len(whole)):
            rows = [tuple(row[:4]) for row in loader.when("prose", token, range(len(both) // 2))]
            assert rows == found.get(("prose", token), [])


@given(seed=seeds, by=st.sampled_from(["number", "id", "length"]), cut=st.integers(1, 2))
def test_a_rule_chooses_the_same_documents_of_a_source_before_and_after_it_grew(source, seed, by, cut):
    whole = source("prose", THREE_FILES, ids=[f"id {n}" for n in range(15)])
    rule = {"score": "length", "at_least": 4} if by == "length" else {"share": 0.7, "seed": seed, "by": by}
    try:
        expected = tokens_of(whole.select_documents(**rule))
        found = [tokens_of(part.select_documents(**rule)) for part in (whole.part(0, cut), whole.part(cut))]
    except ConfigurationError:
        return
    assert found[0] + found[1] == expected


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (3, 4), (0, 5), (-1, 2)])
def test_a_part_without_a_file_is_refused(source, start, stop):
    with pytest.raises(ConfigurationError):
        source("prose", THREE_FILES).part(start, stop)


def test_an_overlap_names_its_first_token_wherever_the_files_lie(source, tmp_path):
    reader = source("prose", [[4, 4, 4, 4], [5, 5, 5]])
    copies = []
    for i, file in enumerate(reader.files):
        copies.append(tmp_path / f"copy-{i}.tok")
        copies[-1].write_bytes(Path(file.path).read_bytes())
    copy = TokenReader(copies, name="mirror")
    a = reader.select_documents(documents=[1, 2, 5], name="some").slice_sequences(3).permute(7)
    b = copy.select_documents(documents=[2, 3, 5, 6]).slice_sequences(2)
    c = copy.select_documents(documents=[0, 3, 4, 6]).slice_sequences(2)
    ((name, other, tokens, file, place),) = overlap(a, b)
    assert (name, other, tokens, place) == ("some", "mirror", 4 + 5, 8)
    assert file == reader.files[0].path
    assert overlap(a, c) == [] == overlap(c, a)
    assert overlap(a, c.blend(reader.slice_sequences(2), weights=[1, 1]))[0].tokens == 13
    assert overlap(a, source("other", [[4, 4, 4], [5, 5]]).slice_sequences(3)) == []


@given(files=lengths_of_files, data=st.data())
def test_an_overlap_counts_the_tokens_of_both(source, files, data):
    reader = source("prose", files)
    some = st.sets(st.integers(0, sum(map(len, files)) - 1), min_size=1)
    spaces = [reader.select_documents(documents=sorted(data.draw(some))) for _ in range(2)]
    common = sorted(set(tokens_of(spaces[0])) & set(tokens_of(spaces[1])))
    found = overlap(*spaces)
    assert [record.tokens for record in found] == ([len(common)] if common else [])
    for record in found:
        first = {file.path: int(n) for file, n in zip(reader.files, reader.first_tokens, strict=False)}
        assert first[record.file] + record.file_token == common[0]


# What is part of the order ----------------------------------------------------------------------------------


def graph_of(reader: TokenReader, **rule):
    return reader.select_documents(**rule).slice_sequences(4).permute(seed=7).batch_samples(2).collate_causal_lm()


def test_other_scores_are_another_order_and_a_state_refuses_them(source):
    reader = with_scores(source("prose", THREE_FILES), "quality", np.linspace(0, 1, 15))
    rule = {"score": "quality", "below": 0.5}
    graph = graph_of(reader, **rule)
    with DataLoader2(graph) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    assert DataLoader2.from_state(state, graph_of(reader, **rule)).state_dict() == state
    with_scores(reader, "quality", np.linspace(1, 0, 15))
    other = graph_of(reader, **rule)
    assert other.fingerprint() != graph.fingerprint()
    with pytest.raises(StateMismatchError, match="select_documents"):
        DataLoader2.from_state(state, other)


def test_a_long_list_of_documents_keeps_a_state_small(source):
    reader = source("prose", [[2] * 5000])
    wanted = list(range(0, 5000, 3))
    with DataLoader2(graph_of(reader, documents=wanted)) as loader:
        assert len(json.dumps(loader.state_dict())) < 1024
    assert reader.select_documents(documents=wanted).settings["documents"] == wanted


RULES = [
    {"share": [0.1, 0.7], "seed": 3},
    {"share": 0.5, "seed": 0, "by": "id", "name": "half"},
    {"score": "length", "at_least": 2, "below": 30.5},
    {"documents": [3, 1, 2]},
]


@pytest.mark.parametrize("rule", RULES)
def test_settings_are_plain_values_that_make_the_same_node_again(source, rule):
    reader = source("prose", THREE_FILES, ids=[f"id {n}" for n in range(15)])
    node = reader.select_documents(**rule)
    again = DocumentSelector(reader, **json.loads(json.dumps(node.settings)))
    assert again.settings == node.settings
    assert again.fingerprint() == node.fingerprint()
    assert chosen(again) == chosen(node)


def test_another_process_chooses_again_and_refuses_what_was_written_to_meanwhile(source):
    reader = with_scores(source("prose", THREE_FILES), "quality", np.linspace(0, 1, 15))
    space = reader.select_documents(score="quality", below=0.5)
    expected, sent = tokens_of(space), pickle.dumps(space)
    assert tokens_of(pickle.loads(sent)) == expected
    with_scores(reader, "quality", np.linspace(1, 0, 15))
    with pytest.raises(TokenFileError, match="written to"):
        tokens_of(pickle.loads(sent))
    assert tokens_of(space) == expected


def test_a_selector_over_other_files_chooses_anew(source):
    one, two = source("one", THREE_FILES), source("two", [[3, 3, 3, 3, 3, 3]])
    node = one.select_documents(documents=[1, 4])
    other = node.with_children(two)
    assert (len(node), len(other)) == (5, 6)
    assert tokens_of(other) == [3, 4, 5, 12, 13, 14]
    assert tokens_of(node) == document_tokens(one)[1] + document_tokens(one)[4]


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        ({}, ConfigurationError, "one of share="),
        ({"share": 0.5, "seed": 1, "documents": [1]}, ConfigurationError, "share and documents"),
        ({"share": 0.5}, ArgumentTypeError, "seed"),
        ({"share": (0.5, 0.5), "seed": 1}, ConfigurationError, "lo < hi"),
        ({"share": (0.5, 1.5), "seed": 1}, ConfigurationError, "lo < hi"),
        ({"share": float("nan"), "seed": 1}, ConfigurationError, "lo < hi"),
        ({"share": "half", "seed": 1}, ConfigurationError, "lo < hi"),
        ({"share": (0, 2**-60), "seed": 1}, ConfigurationError, "none of the 15"),
        ({"share": 0.5, "seed": 1, "by": "name"}, ConfigurationError, "number, id"),
        ({"share": 0.5, "seed": 1, "by": "id"}, ConfigurationError, "no ids beside it"),
        ({"documents": [1], "by": "id"}, ConfigurationError, "by is 'id'"),
        ({"documents": [1], "seed": 1}, ConfigurationError, "seed="),
        ({"documents": [1], "below": 1}, ConfigurationError, "score="),
        ({"documents": []}, ConfigurationError, "none of the"),
        ({"documents": [0.5]}, ArgumentTypeError, "integers"),
        ({"documents": [3, 15]}, OutOfRangeError, "0 … 14; 15"),
        ({"documents": [-1]}, OutOfRangeError, "-1 is not"),
        ({"score": "quality"}, ConfigurationError, "at_least= or below="),
        ({"score": "quality", "below": float("inf")}, ConfigurationError, "finite"),
        ({"score": "quality", "at_least": 2, "below": 1}, ConfigurationError, "in this order"),
        ({"score": "../quality", "below": 1}, ConfigurationError, "letters"),
        ({"score": 3, "below": 1}, ConfigurationError, "letters"),
        ({"score": "nothing", "below": 1}, TokenFileError, "nothing.npy"),
        ({"documents": [1], "name": "x" * 201}, ConfigurationError, "200 characters"),
    ],
)
def test_rules_that_cannot_be_used_are_refused_with_what_would_do(source, rule, error, says):
    with pytest.raises(error, match=says) as caught:
        source("prose", THREE_FILES).select_documents(**rule)
    assert isinstance(caught.value, TokenpipeError)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.array([0.5, np.nan] + [0.5] * 13), "document 1 is nan"),
        (np.zeros(14), "15 documents"),
        (np.zeros((15, 1)), "15 documents"),
        (np.zeros(15, np.complex64), "complex64"),
        (np.array(["x"] * 15), "<U1"),
        (np.array([{}] * 15, dtype=object), "no .npy file of scores"),
    ],
)
def test_scores_that_are_not_one_number_a_document_are_refused(source, values, says):
    reader = source("prose", [[2] * 15])
    np.save(f"{reader.files[0].path}.quality.npy", values, allow_pickle=True)
    with pytest.raises(TokenFileError, match=says):
        reader.select_documents(score="quality", below=1)


def test_a_damaged_score_file_is_refused_cut_anywhere(source):
    reader = with_scores(source("prose", [[2] * 15]), "quality", np.linspace(0, 1, 15))
    path = Path(f"{reader.files[0].path}.quality.npy")
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(TokenFileError):
            reader.select_documents(score="quality", below=1)


def test_document_ends_that_do_not_increase_up_to_the_last_token_are_refused(source):
    reader = source("prose", [[2, 3, 4]])
    path = Path(reader.files[0].path)
    data = path.read_bytes()
    for ends in ([5, 2, 9], [2, 5, 8], [2, 5, 10], [2, 2**63, 9]):
        path.write_bytes(data[:-24] + np.array(ends, "<u8").tobytes())
        with pytest.raises(TokenFileError, match="document ends"):
            reader.select_documents(documents=[0])


def test_files_without_document_ends_are_refused(token_file):
    with pytest.raises(ConfigurationError, match="stores no document ends"):
        TokenReader(token_file("prose.bin", 50), dtype="uint16").hold_out(0.1, 7)


def test_documents_are_chosen_before_windows_are_cut(source):
    with pytest.raises(ArgumentTypeError, match="before windows"):
        source("prose", THREE_FILES).slice_sequences(4).select_documents(documents=[1])


@pytest.mark.parametrize(
    ("bins", "names", "says"),
    [
        ([], None, "at least one"),
        ([5, 5], None, "increase"),
        ([float("nan")], None, "finite"),
        (7, None, "bins"),
        ([5], ["one"], "2 sub-sources"),
        ([5], ["one", "one"], "2 sub-sources"),
        ([5], "ab", "2 sub-sources"),
        ([0], None, "none of the"),
    ],
)
def test_partitions_that_cannot_be_made_are_refused(source, bins, names, says):
    with pytest.raises(ConfigurationError, match=says):
        source("prose", THREE_FILES).partition("length", bins, names)
