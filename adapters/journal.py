"""A run's changes, written into its graph."""

from ..datapipes._torch import DataPipe
from ..datapipes.batch import batcher_of
from ..datapipes.blend import Blender, WeightChange
from ..datapipes.core import MAX_NUMBER, IndexedDataPipe
from ..datapipes.errors import ArgumentTypeError, JournalError
from ..datapipes.journal import Journal, path_to_blend
from ..datapipes.steps import StepTable
from .base import Adapter
from .surgery import rewritten

__all__ = ["ApplyJournal"]


class ApplyJournal(Adapter):
    """The graph as the journal's changes make it: phases of its blends, breakpoints of its steps.

    Apply it to the graph as it was built, without a resume skip. Raises JournalError where the journal
    changes something that the graph does not have.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def __call__(self, datapipe: DataPipe) -> IndexedDataPipe:
        if not isinstance(datapipe, IndexedDataPipe):
            raise ArgumentTypeError(f"a stream ({type(datapipe).__name__}) has no journal")
        graph = datapipe
        paths = {name: path_to_blend(graph, name) for name in {entry.blend for entry in self.journal.weights}}
        for name, _ in sorted(paths.items(), key=lambda item: len(item[1])):  # outer blends first
            graph = self._changed(graph, name)
        if self.journal.breakpoints is not None and (batcher := batcher_of(graph)) is not None:
            table = StepTable(self.journal.breakpoints, batcher.unit)
            graph = rewritten(graph, {id(batcher): batcher.with_steps(table)})
        return graph

    def _changed(self, graph: IndexedDataPipe, name: str) -> IndexedDataPipe:
        *above, (blend, _) = path_to_blend(graph, name)
        assert isinstance(blend, Blender)
        while above and above[0][0].trunk:
            del above[0]  # the run's own skips and limits renumber nothing
        changes: list[WeightChange] = []
        for entry in self.journal.weights:
            if entry.blend != name:
                continue
            if len(blend.sources) != len(entry.weights):
                raise JournalError(
                    f"the journal has {len(entry.weights)} weights for blend {name!r} of {len(blend.sources)} sources"
                )
            number = entry.sample  # in the run, then in each node further down
            for node, index in above:
                number = node.source_bound(index, number)
            if above and number >= (end := blend.with_changes(changes).end):
                raise JournalError(
                    f"blend {name!r} is through at its sample {end}: new weights from step {entry.step} on "
                    "would change what the nodes above it have taken since"
                )
            changes.append(WeightChange(min(number, MAX_NUMBER - 1), entry.weights))
        return rewritten(graph, {id(blend): blend.with_changes(changes)})
