"""Text to token files: tokenizers, the reading of documents, and the build that survives a kill.

listing.py     which files the inputs name         opening.py      their bytes, remote and packed ones too
documents.py   pieces of work, and their texts     columns.py      rows of Parquet and Arrow files
                                                   tokenizers.py   texts to ids
worker.py      makes pieces (pieces.py)            pool.py         starts workers, deals the work
build.py       tokenize_files: all of it           placing.py      where it is made
"""

from .build import TokenizeSummary, tokenize_files
from .tokenizers import ByteTokenizer, TextTokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "TextTokenizer", "TokenizeSummary", "load_tokenizer", "tokenize_files"]
