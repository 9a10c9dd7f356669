"""A data pipeline that is slow, hangs and fails: each is found, named and survived, without a change to the pipeline.

    python examples/find_the_bottleneck.py            # half a minute; --short: ten seconds

The graph reads two token files, blends them, makes batches, and has three nodes of the user's own:

    score_documents   asks a service for each batch's scores: it waits some milliseconds (slow)
    check_licences    now and then waits for a file server that does not answer (stuck)
    fetch_masks       now and then loses its connection (raises)

1  Profile finds the slow node and says what to do; Placement does it.
2  Timeout names the stuck node, in process; under workers the worker is replaced, and the batch made again.
3  Retry survives the node that raises, and counts.
At the end the batches are, bit for bit, those of a healthy graph.
"""

import argparse
import hashlib
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tokenpipe.adapters import Placement, Profile, Retry, Threads, Timeout, applied, draw
from tokenpipe.datapipes import IndexedDataPipe, Mapper, TokenReader
from tokenpipe.datapipes.errors import NodeTimeoutError
from tokenpipe.reading_services import DataLoader2, MultiProcessingReadingService

WAITS = 0.004  # s that the scoring service takes


class ScoreDocuments(Mapper):
    """Asks a service for the batch's scores."""

    functional_name = "score_documents"

    def __init__(self, datapipe: IndexedDataPipe) -> None:
        super().__init__(datapipe, _scored, seeded=False)


class CheckLicences(Mapper):
    """Looks the batch's licences up on a file server, which does not answer one time in the run."""

    functional_name = "check_licences"

    def __init__(self, datapipe: IndexedDataPipe, folder: str, stuck: bool) -> None:
        super().__init__(datapipe, _Once(Path(folder) / "stuck", 20, _hang) if stuck else _as_it_is, seeded=False)


class FetchMasks(Mapper):
    """Fetches masks over a connection, which is lost at some batches."""

    functional_name = "fetch_masks"

    def __init__(self, datapipe: IndexedDataPipe, folder: str, fails: bool) -> None:
        super().__init__(datapipe, _Once(Path(folder) / "lost", 7, _lose) if fails else _as_it_is, seeded=False)


def _scored(batch: "dict[str, Any]") -> "dict[str, Any]":
    time.sleep(WAITS)
    return {**batch, "scores": batch["input_ids"].float().mean(1)}


def _as_it_is(batch: "dict[str, Any]") -> "dict[str, Any]":
    return batch


class _Once:
    """Does something to every n-th batch, the first time that it is made."""

    def __init__(self, marks: Path, every: int, what: Any) -> None:
        self.marks, self.every, self.what = marks, every, what

    def __call__(self, batch: "dict[str, Any]") -> "dict[str, Any]":
        number = int(batch["sample_numbers"][0]) // len(batch["sample_numbers"])
        mark = self.marks.with_name(f"{self.marks.name}-{number}")
        if number % self.every == self.every - 1 and not mark.exists():
            mark.touch()
            self.what(number)
        return batch


def _hang(number: int) -> None:
    time.sleep(10_000)


def _lose(number: int) -> None:
    raise ConnectionResetError(f"the connection was lost at batch {number}")


def build(folder: Path, stuck: bool = False, fails: bool = False) -> IndexedDataPipe:
    """The graph, healthy or not."""
    prose, code = (
        TokenReader(folder / f"{name}.npy").slice_sequences(256).permute(seed=7) for name in ("prose", "code")
    )
    batches = prose.blend(code, weights={"prose": 0.7, "code": 0.3}).batch(8).collate_causal_lm(sample_numbers=True)
    return FetchMasks(CheckLicences(ScoreDocuments(batches), str(folder), stuck), str(folder), fails)


def digest(batches: Any) -> "tuple[str, float, int]":
    """(hash of all batches, batches a second, how many)."""
    total, count, began = hashlib.blake2b(digest_size=8), 0, time.perf_counter()
    for batch in batches:
        for tensor in batch.values():
            total.update(tensor.numpy().tobytes())
        count += 1
    return total.hexdigest(), count / (time.perf_counter() - began), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="ten seconds")
    parser.add_argument("--out", type=Path, help="where pictures, traces and token files go (a temporary folder)")
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="find_the_bottleneck-"))
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("stuck-*"), *folder.glob("lost-*")]:
        old.unlink()
    batches = 120 if arguments.short else 600
    rng = np.random.default_rng(0)
    for name, tokens in (("prose", 700_000), ("code", 300_000)):
        np.save(folder / f"{name}.npy", rng.integers(0, 50_000, tokens, dtype=np.uint16))

    build(folder)[0]  # compiled code is loaded, or made, once
    print("1  It is slow. Where does the time go?\n")
    profile = Profile()
    with DataLoader2(build(folder), profile) as loader:
        healthy, before, _ = digest(islice(loader, batches))
    print(profile.report())
    profile.trace(folder / "profile.json")
    profile.draw(folder / "profile.md")
    assert profile.slowest is not None
    slow = profile.slowest.node

    placed = Placement({slow: Threads(8)})
    with DataLoader2(build(folder), placed) as loader:
        same, after, _ = digest(islice(loader, batches))
    print(f"\n{slow} in 8 threads: {before:,.0f} → {after:,.0f} batches/s ({after / before:.1f} ×), the same batches: "
          f"{same == healthy}\n")  # fmt: skip
    check(same == healthy, "the batches are others")
    check(slow == "score_documents", f"the slowest node is score_documents, and {slow} was named")

    print("2  It hangs. Where?\n")
    with DataLoader2(build(folder, stuck=True), Timeout(1.0)) as loader:
        try:
            digest(islice(loader, batches))
            check(False, "nothing was stuck")
        except NodeTimeoutError as error:
            print(f"   {type(error).__name__}: {str(error).partition(' It is here')[0]}\n")
            check("check_licences" in str(error), "the stuck node was not named")
    # each batch is stuck the first time alone, so another worker, or another try, gets through
    timeout = Timeout(1.0, nodes="check_licences")
    with DataLoader2(build(folder, stuck=True), timeout, MultiProcessingReadingService(2)) as loader:
        same, _, count = digest(islice(loader, min(batches, 60)))
        print(f"   under two workers: {loader.reading_service.replaced} replaced, {count} batches came\n")

    print("3  It raises. Again and again?\n")
    retry = Retry(ConnectionError, tries=3, wait=0.001)
    with DataLoader2(build(folder, fails=True), [retry, placed]) as loader:
        with applied(Profile(), loader) as live:  # on the loader as it runs, and off again
            first, _, _ = digest(islice(loader, batches // 2))
        again, _, count = digest(islice(loader, batches // 2))
        print(f"   {retry.count} tries more, {loader.metrics()['data/retried']} in the metrics; {count} batches came")
        print(f"   measured while it ran: {live.slowest.node if live.slowest else 'nothing'} took most of the time\n")
    with DataLoader2(build(folder)) as loader:
        check(digest(islice(loader, batches // 2))[0] == first, "the batches are others")
        check(digest(islice(loader, batches // 2))[0] == again, "the batches are others")
    print(
        f"All batches are those of the healthy graph. Profile: {folder}/profile.md (Mermaid), profile.json (Perfetto)."
    )
    draw(build(folder), folder / "graph.mmd")


def check(well: bool, what: str) -> None:
    if not well:
        raise SystemExit(f"find_the_bottleneck: {what}")


if __name__ == "__main__":
    main()
