"""Whole graphs from a few words: recipe files, Nanotron's data stages, Nanoset's three forms of paths.

text.py      YAML ↔ plain values with their places      load.py   values → graph     write.py   graph → values
stages.py    planned changes by step, and ramps         nanotron.py   data_stages    files.py   read_tokens
"""

from .files import read_tokens
from .load import load_recipe
from .nanotron import load_nanotron
from .write import write_recipe

__all__ = ["load_nanotron", "load_recipe", "read_tokens", "write_recipe"]
