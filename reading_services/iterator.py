"""What `iter(loader)` gives: the items, a limit on them, and what becomes of an exception."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..datapipes.core import as_count
from .interface import PauseIteration

if TYPE_CHECKING:
    from ..datapipes.notes import Ledger
    from .data_loader2 import DataLoader2

__all__ = ["DataLoader2Iterator"]


class DataLoader2Iterator:
    """What `iter(loader)` gives. A newer one, a seek or a loaded state invalidates it.

    Attributes other than these are those of the graph's own iterator.
    """

    def __init__(self, loader: "DataLoader2", number: int) -> None:
        self._loader, self._number = loader, number
        self._limit: int | None = None
        self._left = 0
        self._ended = self._paused = False

    def __iter__(self) -> "DataLoader2Iterator":
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._number != loader._iterator_number:
            loader._refuse()
        if self._paused:
            raise StopIteration
        if self._limit is not None:
            if self._left <= 0:
                raise StopIteration
            self._left -= 1
        try:
            if loader._interrupted:
                loader._begin_again()
            began = perf_counter()
            item = next(loader._items)
            loader._waits.add(began, perf_counter())
            if loader._run is not None:
                loader._run.delivered += 1
            for ledger in loader._ledgers:
                if ledger.full:
                    self._check(ledger)
            return item
        except PauseIteration:
            self._left += 1
            raise StopIteration from None
        except StopIteration:
            if not self._ended:
                self._ended = True
                loader._at_end()
            raise
        except Exception:
            loader.shutdown()
            raise
        except BaseException:  # Ctrl-C: what was not counted was not delivered, and is made again
            loader._interrupted = True
            raise

    def _check(self, ledger: "Ledger") -> None:
        """Raises where what a ledger has noted is too much; the item that came with it is then not delivered."""
        loader = self._loader
        try:
            ledger.check(None if loader._run is None else loader._run.consumed_samples)
        except Exception:
            if loader._run is not None:
                loader._run.delivered -= 1
            elif (take_back := getattr(loader._items, "take_back", None)) is not None:
                take_back()
            raise

    def limit(self, num_batches: "int | None") -> None:
        """Stops after this many more items (None: no limit); `resume()` then allows as many again."""
        self._limit = None if num_batches is None else as_count("num_batches", num_batches, 0)
        self._left = self._limit or 0

    def pause(self) -> None:
        """Gives nothing more until `resume()`; the iteration does not end, and a new `iter()` is not paused."""
        self._paused = True

    def resume(self) -> None:
        """Goes on after a limit was reached, or after `pause()`."""
        self._left, self._paused = self._limit or 0, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader._items, name)
