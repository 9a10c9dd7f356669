"""Text to token ids and back: a Hugging Face `tokenizers` file, or the built-in bytes.

Nothing is added to a text or cut from it: no special tokens of the tokenizer's own template, no truncation,
no padding, whatever its file says. What closes a document is added by `tokenize_files`, once.
The third-party package is imported when a file of it is first loaded: it is an extra, `[tokenize]`.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentTypeError, ConfigurationError, TokenFileError, TokenIdError

__all__ = ["END_OF_TEXT_NAMES", "ByteTokenizer", "HuggingFaceTokenizer", "TextTokenizer", "load_tokenizer"]

END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<\N{FULLWIDTH VERTICAL LINE}end▁of▁sentence\N{FULLWIDTH VERTICAL LINE}>",
    "[EOS]",
)
"""What is taken for the end-of-text token where nothing names it: the first of these in the vocabulary."""


class TextTokenizer(Protocol):
    """What `load_tokenizer` gives.

    vocab_size: ids are below it. end_of_text: the id that closes documents, or None. end_of_text_name: its
    token, or "". name: at most 64 UTF-8 bytes. hash: BLAKE2b-256 of what decides the ids, 32 bytes.
    """

    vocab_size: int
    end_of_text: "int | None"
    end_of_text_name: str
    name: str
    hash: bytes

    def encode_batch(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """For each text its token ids, an unsigned integer array (t,), without any that closes it."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens by their names, undecodable bytes as U+FFFD."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, and 256 as the end of text: needs no file, loses nothing.

    >>> byte = ByteTokenizer()
    >>> [ids.tolist() for ids in byte.encode_batch(["hi", "é"])]
    [[104, 105], [195, 169]]
    >>> byte.decode([104, 105, 256])
    'hi<|endoftext|>'
    """

    vocab_size = 257
    end_of_text: "int | None" = 256
    end_of_text_name = END_OF_TEXT_NAMES[0]
    name = "byte"
    hash = hashlib.blake2b(b"tokenpipe bytes 1", digest_size=32).digest()

    def encode_batch(self, texts: Sequence[str]) -> "list[np.ndarray]":
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        given = [int(i) for i in ids]
        if given and not (min(given) >= 0 and max(given) < self.vocab_size):
            raise TokenIdError(f"the byte tokenizer has ids 0 … 256, got {min(given)} … {max(given)}")
        end = self.end_of_text_name.encode()
        return b"".join(end if i == 256 else i.to_bytes(1, "little") for i in given).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` package; `description` is its JSON, which is hashed."""

    def __init__(self, tokenizer: Any, name: str, description: bytes, end_of_text: "str | None" = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.name = name.encode()[:64].decode(errors="ignore")
        self.hash = hashlib.blake2b(description, digest_size=32).digest()
        if end_of_text is not None and end_of_text not in vocabulary:
            near = get_close_matches(end_of_text, vocabulary, 3, 0.5) or [
                one for one in END_OF_TEXT_NAMES if one in vocabulary
            ]
            raise ConfigurationError(
                f"{name}: the vocabulary has no token {end_of_text!r}"
                + (f"; near it: {', '.join(map(repr, near))}" if near else "")
            )
        found = [end_of_text] if end_of_text is not None else [one for one in END_OF_TEXT_NAMES if one in vocabulary]
        self.end_of_text_name = found[0] if found else ""
        self.end_of_text = vocabulary[found[0]] if found else None
        # the same ids without the work of offsets
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode_batch(self, texts: Sequence[str]) -> "list[np.ndarray]":
        encodings = self._encode(texts, add_special_tokens=False)
        return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(spec: "str | os.PathLike[str]", end_of_text: "str | None" = None) -> TextTokenizer:
    """A tokenizer from its file or name.

    Args:
        spec: "byte"; the path of a `tokenizers` JSON file, or of the folder that holds its tokenizer.json; or a
            name on the Hugging Face hub (anything that is no path here; needs the network).
        end_of_text: the token that closes documents. Left out: what `eos_token` in tokenizer_config.json beside
            the file says, else the first of END_OF_TEXT_NAMES that is in the vocabulary, else none.

    Raises ConfigurationError for a token that is not in the vocabulary, or where the `tokenizers` package is
    missing; TokenFileError for a file that is missing or no tokenizer.

    >>> load_tokenizer("byte").vocab_size
    257
    """
    if not isinstance(spec, (str, os.PathLike)) or not isinstance(end_of_text, (str, type(None))):
        raise ArgumentTypeError(f"a tokenizer is 'byte', a path or a name, its end of text a str, got {spec!r}")
    text = os.fspath(spec)
    if text == "byte":
        if end_of_text not in (None, ByteTokenizer.end_of_text_name):
            raise ConfigurationError(f"the byte tokenizer's only token is '<|endoftext|>', got {end_of_text!r}")
        return ByteTokenizer()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"{text}: tokenizer files need the package `tokenizers`: pip install 'tokenpipe[tokenize]'; "
            "'byte' needs nothing"
        ) from error
    path = Path(text)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists():
            raise TokenFileError(f"{text}: a folder without a tokenizer.json")
    if not path.exists():
        return _from_hub(Tokenizer, text, end_of_text)
    try:
        description = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(description)
    except OSError as error:
        raise TokenFileError(error.errno, f"cannot read the tokenizer: {error.strerror}", str(path)) from error
    except Exception as error:  # the package raises bare Exceptions
        raise TokenFileError(f"{path}: no tokenizer of the `tokenizers` package: {error}") from error
    name = path.stem if path.stem != "tokenizer" else path.resolve().parent.name
    return HuggingFaceTokenizer(tokenizer, name, description, end_of_text or _configured(path))


def _from_hub(tokenizer_class: Any, name: str, end_of_text: "str | None") -> TextTokenizer:
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise TokenFileError(f"{name}: no such tokenizer file")
    try:
        tokenizer = tokenizer_class.from_pretrained(name)
    except Exception as error:  # the package raises bare Exceptions
        raise TokenFileError(
            f"{name}: neither a tokenizer file here nor a tokenizer on the Hugging Face hub: {error}"
        ) from error
    return HuggingFaceTokenizer(tokenizer, name, tokenizer.to_str().encode(), end_of_text)


def _configured(path: Path) -> "str | None":
    """The end-of-text token that tokenizer_config.json beside a tokenizer's file names, if there is one."""
    try:
        configuration = json.loads(path.with_name("tokenizer_config.json").read_bytes())
        token = configuration.get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
