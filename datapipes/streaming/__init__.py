"""Streams: what has no numbers, because how many items there are is known when they were made.

base.py       what a streaming node is: a place in attributes
read.py       JSON lines files to texts
tokenize.py   texts to token ids
pack.py       token ids to rows of one length
bound.py      where a stream begins and ends
dispatch.py   a part that one process runs for all workers
shard.py      one process's shard of a stream, and the place it has reached

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/a.jsonl"
    >>> _ = open(path, "w").write('{"text": "to be"}\\n{"text": "or not"}\\n')
    >>> stream = JsonLinesReader(path).sharding_filter().tokenize("byte").pack_sequences(6)
    >>> [row.tolist() for row in stream]
    [[116, 111, 32, 98, 101, 256, 111], [111, 114, 32, 110, 111, 116, 256]]

torch's own nodes (map, filter, batch, shuffle, …) stand between them; a graph whose nodes all know their place is
resumed at once, another one by going through its epoch again.
"""

from .base import StreamingDataPipe
from .bound import StreamLimiter, StreamSkipper
from .dispatch import ShardingRoundRobinDispatcher
from .pack import SequencePacker
from .read import JsonLinesReader
from .tokenize import DocumentTokenizer

__all__ = [
    "DocumentTokenizer",
    "JsonLinesReader",
    "SequencePacker",
    "ShardingRoundRobinDispatcher",
    "StreamLimiter",
    "StreamSkipper",
    "StreamingDataPipe",
]
