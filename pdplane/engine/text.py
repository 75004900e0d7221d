"""Text in, token ids out, and back again piece by piece; usable from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from pdplane.engine.untyped import HuggingFaceTokenizer
from pdplane.errors import ConfigError

_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are no whole character yet


class MlxTokenizer:
    """A Hugging Face tokenizer behind a lock: its Rust core refuses to be borrowed by two threads at once."""

    def __init__(self, hugging_face: HuggingFaceTokenizer, eos_ids: Iterable[int]) -> None:
        self._inner = hugging_face
        self._lock = threading.Lock()
        self.eos_ids: frozenset[int] = frozenset(eos_ids)

    @property
    def vocab_size(self) -> int:
        return len(self._inner)

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's own BOS rule unless `special_tokens` is off."""
        with self._lock:
            return [int(token) for token in self._inner.encode(text, add_special_tokens=special_tokens)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some token ids, without special tokens."""
        with self._lock:
            return str(self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def apply_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins.

        Raises ConfigError when the model has no chat template.
        """
        if not self.has_chat_template:
            raise ConfigError("this model has no chat template; send plain text")
        with self._lock:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
            return [int(token) for token in self._inner.encode(str(text), add_special_tokens=False)]

    def detokenizer(self) -> MlxDetokenizer:
        """A fresh incremental decoder for one sequence."""
        return MlxDetokenizer(self)


class MlxDetokenizer:
    """Turns one sequence of tokens into pieces of text whose concatenation is the decoded whole.

    A piece is held back while it ends inside a character. Each decoding starts a few tokens early, since some
    tokenizers treat the first token of a text in another way.
    """

    def __init__(self, tokenizer: MlxTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here
        self._told = 0  # the text of the tokens before this one has been returned

    def add(self, token: int) -> str:
        """The text that this token completes; often empty in the middle of a character."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return piece

    def finish(self) -> str:
        """What is left at the end of the sequence, incomplete characters as U+FFFD."""
        piece = self._pending()
        self._context = self._told = len(self._tokens)
        return piece

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._told])
        whole = self._tokenizer.decode(self._tokens[self._context :])
        return whole[len(before) :]
