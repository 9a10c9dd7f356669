"""Running a graph: loaders, the services that run a graph for them, seeds and states.

data_loader2.py is the loader; run.py is where an indexed run stands and what can be asked of it; state.py
is what a checkpoint holds of it, stream_state.py what it holds of a stream; metrics.py is what is logged;
interface.py and in_process.py are the services,
multi_processing.py is the one over worker processes (workers/), distributed.py the one over ranks, sequential.py makes
one of several; seeds.py seeds streams. torch_nodes.py, imported by itself, is a source of torchdata.nodes.
"""

from ..datapipes.streaming.shard import StreamShard
from .data_loader2 import DataLoader2, DataLoader2Iterator
from .distributed import DistributedReadingService
from .in_process import InProcessReadingService
from .interface import CheckpointableReadingServiceInterface, PauseIteration, ReadingServiceInterface, WorkerInfo
from .multi_processing import MultiProcessingReadingService
from .seeds import SeedGenerator, set_datapipes_seed, set_graph_random_seed
from .sequential import SequentialReadingService

__all__ = [
    "CheckpointableReadingServiceInterface",
    "DataLoader2",
    "DataLoader2Iterator",
    "DistributedReadingService",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "PauseIteration",
    "ReadingServiceInterface",
    "SeedGenerator",
    "SequentialReadingService",
    "StreamShard",
    "WorkerInfo",
    "set_datapipes_seed",
    "set_graph_random_seed",
]
