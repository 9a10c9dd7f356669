"""Text to token files: tokenizers, the reading of documents, and the build that survives a kill.

documents.py   inputs, cut into pieces of work     tokenizers.py   texts to ids
worker.py      makes pieces (pieces.py)            pool.py         starts workers, deals the work
build.py       tokenize_files: all of it
"""

from .build import TokenizeSummary, tokenize_files
from .tokenizers import ByteTokenizer, TextTokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "TextTokenizer", "TokenizeSummary", "load_tokenizer", "tokenize_files"]
