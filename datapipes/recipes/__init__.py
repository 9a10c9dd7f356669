"""Whole graphs from a few words: Nanoset's three forms of paths."""

from .files import read_tokens

__all__ = ["read_tokens"]
