"""All that we use of torch's datapipes, reached through this one module.

torch ships the base classes, the registry of functional names and the graph traversal that
torchdata's datapipes were built on; should torch drop them one day, this is the file to fill.
"""

from torch.utils.data.datapipes._decorator import functional_datapipe
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipe, DataPipeGraph, traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

__all__ = [
    "DataPipe",
    "DataPipeGraph",
    "IterDataPipe",
    "MapDataPipe",
    "apply_random_seed",
    "apply_sharding",
    "functional_datapipe",
    "traverse_dps",
]
