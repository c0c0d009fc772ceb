"""What makes tokens of texts, and the name by which its results are kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from spartito.errors import UserError


class Tokenizer(Protocol):
    """Makes tokens of texts, in any thread."""

    @property
    def identity(self) -> str:
        """All that its results depend on."""
        ...

    @property
    def eos(self) -> int | None:
        """Its token for the end of a document, where it has one."""
        ...

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """The tokens of each text."""
        ...


@dataclass(frozen=True)
class FastTokenizer:
    """One of the package ``tokenizers``, as Transformers' fast ones have inside.

    Args:
        inner: A `tokenizers.Tokenizer` of our own: it is in use by several threads.
        identity: As `Tokenizer.identity`.
        eos: As `Tokenizer.eos`.
    """

    inner: Any
    identity: str
    eos: int | None

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """As `Tokenizer.encode`."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts))]


@dataclass(frozen=True)
class FunctionTokenizer:
    """A function from a text to its tokens.

    Args:
        function: What is called for each text.
        identity: As `Tokenizer.identity`: the name that its author gave it.
        eos: As `Tokenizer.eos`.
    """

    function: Callable[[str], Sequence[int]]
    identity: str
    eos: int | None = None

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """As `Tokenizer.encode`."""
        return [self.function(text) for text in texts]


def as_tokenizer(given: Any, name: str | None = None) -> Tokenizer:
    """What a user gave as a tokenizer.

    Args:
        given: A tokenizer of Transformers or of ``tokenizers``, or a function.
        name: Of a function.

    Returns:
        It, as one of ours.

    Raises:
        UserError: It is none of these, or a function without a name.
    """
    eos = getattr(given, "eos_token_id", None)
    inner = getattr(given, "backend_tokenizer", given)
    if hasattr(inner, "encode_batch_fast") and hasattr(inner, "to_str"):
        return _fast(inner, eos)
    if not callable(given):
        raise UserError(
            f"tokenizer={type(given).__name__} is no tokenizer",
            "Give one of Transformers or of the package tokenizers, or a function from a text to "
            "its tokens.",
        )
    if not name:
        raise UserError(
            f"tokenizer={getattr(given, '__qualname__', type(given).__name__)} has no name",
            'Its tokens are kept in the cache: say tokenizer_name="gpt2, first try", and another '
            "name once it makes other tokens.",
        )
    if not hasattr(given, "eos_token_id"):
        return FunctionTokenizer(given, name)
    return FunctionTokenizer(lambda text: given(text, verbose=False)["input_ids"], name, eos)


def _fast(inner: Any, eos: int | None) -> FastTokenizer:
    """A copy that neither cuts nor pads, named by all that it does."""
    package: Any = importlib.import_module("tokenizers")
    facts = json.loads(inner.to_str())
    facts.update(truncation=None, padding=None)
    text = json.dumps(facts, sort_keys=True)
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    own = package.Tokenizer.from_str(text)
    own.encode_special_tokens = inner.encode_special_tokens
    special = "as text" if own.encode_special_tokens else "as one"
    identity = f"tokenizers {package.__version__} {digest}, special tokens {special}"
    return FastTokenizer(own, identity, eos)
