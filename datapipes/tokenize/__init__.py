"""Text to token files: tokenizers, the reading of documents, and the build that survives a kill.

listing.py     which files the inputs name         opening.py      their bytes, remote and packed ones too
documents.py   pieces of work, and their texts     columns.py      rows of Parquet and Arrow files
                                                   tokenizers.py   texts to ids
worker.py      makes pieces (pieces.py)            pool.py         starts workers, deals the work
build.py       tokenize_files: all of it           placing.py      where it is made
shards.py      tokenize_shards: many, by many      assemble.py     pieces to one file
               processes (shard_store.py: where they are, on_ray.py: Ray; locking.py: who makes them)
"""

from .build import TokenizeSummary, tokenize_files
from .shards import ShardsSummary, tokenize_shards
from .tokenizers import ByteTokenizer, TextTokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "ShardsSummary",
    "TextTokenizer",
    "TokenizeSummary",
    "load_tokenizer",
    "tokenize_files",
    "tokenize_shards",
]
