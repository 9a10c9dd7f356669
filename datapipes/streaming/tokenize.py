"""Texts to token ids, as they pass: an item a document."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._torch import IterDataPipe, functional_datapipe
from ..core import Unpickled
from ..errors import ArgumentTypeError, ConfigurationError
from ..tokenize.tokenizers import TextTokenizer, load_tokenizer
from .base import StreamingDataPipe

__all__ = ["DocumentTokenizer"]


@functional_datapipe("tokenize")
class DocumentTokenizer(StreamingDataPipe):
    """The token ids of each text: int64 (t,), closed by the end-of-text token. Holds nothing between its items.

    Args:
        tokenizer: as in `load_tokenizer`; each process loads its own.
        end_of_text: the token that closes documents; True: the tokenizer's own, False: none.

    Raises ConfigurationError where no closing token is known, TokenFileError for a file that is no tokenizer.

    >>> from torch.utils.data.datapipes.iter import IterableWrapper
    >>> [ids.tolist() for ids in DocumentTokenizer(IterableWrapper(["hi"]), "byte")]
    [[104, 105, 256]]
    """

    def __init__(
        self, datapipe: IterDataPipe, tokenizer: "str | os.PathLike[str]", end_of_text: "str | bool" = True
    ) -> None:
        super().__init__()
        if not isinstance(end_of_text, (str, bool)):
            raise ArgumentTypeError(f"end_of_text is a token, True or False, got {end_of_text!r}")
        self.datapipe, self.tokenizer, self.end_of_text = datapipe, tokenizer, end_of_text
        self._tokenizer = Unpickled()
        if end_of_text is not False and self.loaded.end_of_text is None:
            raise ConfigurationError(
                f"{self.loaded.name}: no token of its vocabulary is known to close documents; name it by end_of_text=, "
                "or say end_of_text=False"
            )

    @property
    def loaded(self) -> TextTokenizer:
        """The tokenizer, loaded once a process."""
        if self._tokenizer.value is None:
            self._tokenizer.value = load_tokenizer(
                self.tokenizer, self.end_of_text if isinstance(self.end_of_text, str) else None
            )
        return self._tokenizer.value

    @property
    def settings(self) -> "dict[str, Any]":
        return {"tokenizer": self.loaded.name, "end_of_text": self.end_of_text and self.loaded.end_of_text_name}

    @property
    def content(self) -> str:
        return self.loaded.hash.hex()[:32]

    def __iter__(self) -> "Iterator[np.ndarray]":
        tokenizer = self.loaded
        closing = np.array([] if self.end_of_text is False else [tokenizer.end_of_text], np.int64)
        for text in self.datapipe:
            yield np.concatenate((tokenizer.encode_batch([text])[0].astype(np.int64), closing))
