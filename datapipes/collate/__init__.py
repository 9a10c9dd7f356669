"""From rows of tokens to the tensors that one rank takes: which part of each row, which labels count, what a framework
calls them.
"""

from .collator import CausalLMCollator
from .layouts import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "CausalLMCollator"]
