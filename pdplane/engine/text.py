"""Text in, token ids out, and back again piece by piece; usable from any thread."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pdplane.engine.speech import MlxSpeech
from pdplane.engine.untyped import Wrapper, encode_chat, plain_chat, render_chat, special_tokens, spelling
from pdplane.errors import ConfigError

_INCOMPLETE = "\ufffd"  # what a decoder prints for bytes that are no whole character yet
_NO_SETTINGS = {
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of the renderer itself, which are no variables of the template."""


class MlxTokenizer:
    """mlx-lm's wrapper of a Hugging Face tokenizer. One written in Python makes tokens for one thread at a time."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper, self._inner = wrapper, wrapper._tokenizer
        has_core = getattr(self._inner, "backend_tokenizer", None) is not None
        self._turn: AbstractContextManager[object] = nullcontext() if has_core else threading.Lock()
        self.eos_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)
        marks, special = tuple(_marks(wrapper)), special_tokens(self._inner)
        self._special = frozenset(special)
        self._unmarked = frozenset(token for token, text in special.items() if not any(text in mark for mark in marks))
        self._spelling = spelling(self._inner)
        self.longest_token = max(len(self._spelling(token)) for token in range(len(self._inner)))
        self.encode("")  # the first call may change the core, so it comes before other threads read it

    @property
    def vocab_size(self) -> int:
        return len(self._inner)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a model's folder."""
        self._inner.save_pretrained(folder)

    def fingerprint(self) -> str:
        """Return SHA-256 over what makes tokens of a text or a conversation and what ends an answer, as hex digits."""
        core = getattr(self._inner, "backend_tokenizer", None)
        rules = core.to_str() if core is not None else json.dumps(self._inner.get_vocab(), sort_keys=True)
        template = self._template if self.has_chat_template else None
        told = json.dumps([hashlib.sha256(rules.encode()).hexdigest(), template, sorted(self.eos_ids)])
        return hashlib.sha256(told.encode()).hexdigest()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return token ids of a text, with the model's own BOS rule unless `special_tokens` is off.

        As in mlx-lm, a text that begins with the BOS token's text gets no second one. Raises ConfigError for a text
        that is no Unicode: half of a surrogate pair has no bytes.
        """
        bos = self._inner.bos_token
        special = special_tokens and not (bos and text.startswith(bos))
        return self._tokens(lambda whole: self._inner.encode(whole, add_special_tokens=special), text)

    def _tokens(self, make: Callable[[str], Sequence[int]], text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text has half of a surrogate pair at character {error.start}") from error
        with self._turn:
            return [int(token) for token in make(text)]

    def decode(self, tokens: Sequence[int], *, marks: bool = False) -> str:
        """Return the text of some token ids without special tokens; `marks` keeps those that a `Speech` looks for."""
        hidden = self._unmarked if marks else self._special
        shown = [token for token in tokens if token not in hidden]
        return str(self._inner.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        check: Callable[[str], None] = lambda _text: None,
    ) -> list[int]:
        """Return token ids of a conversation, ending where the assistant's answer begins.

        A model without a chat template gets mlx-lm's plain form, with `roles` in place of its names. `check` may refuse
        the whole text before it becomes tokens. Raises ConfigError for what the template refuses or would not read.
        """
        settings = settings or {}
        if not self.has_chat_template:
            if tools or settings:
                raise ConfigError("this model has no chat template, so it takes no tools and no chat_template_kwargs")
            text = plain_chat(messages, roles)
            check(text)
            return self.encode(text)
        if roles is not None:
            raise ConfigError("role_mapping is for models without a chat template; this one has its own")
        template = self._template
        if tools and template and "tools" not in template:
            raise ConfigError("tools: this model's chat template does not read them")
        for name in settings:
            if name in _NO_SETTINGS:
                raise ConfigError(f"chat_template_kwargs.{name} cannot be set by a request")
        shown = [_as_known(message, template) for message in messages]
        text = render_chat(self._wrapper, shown, tools, settings)
        check(text)
        return self._tokens(partial(encode_chat, self._wrapper), text)

    def detokenizer(self, *, marks: bool = False) -> MlxDetokenizer:
        """Return an incremental decoder for one new sequence."""
        return MlxDetokenizer(partial(self.decode, marks=marks))

    def spell(self, token: int) -> bytes:
        """Return the bytes that a token stands for, special ones by their names."""
        return self._spelling(token)

    def speech(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None) -> MlxSpeech:
        """Return what takes the answer to this prompt apart; it may call these tools only."""
        return MlxSpeech(self._wrapper, prompt, tools)

    @property
    def _template(self) -> str:
        """The template's text; empty when a program replaces it."""
        return str(self._inner.chat_template or "") if self._wrapper._chat_template is None else ""


def _marks(wrapper: Wrapper) -> Iterator[str]:
    """Yield every text by which a model says that it thinks or calls a tool."""
    for mark in (wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end):
        if mark:
            yield mark
    yield from wrapper.structural_markers
    for edges in wrapper.response_transitions.values():
        yield from (mark for mark, _state in edges)


def _as_known(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return the message under a role that the template knows: few know OpenAI's newer name for the system."""
    if message.get("role") == "developer" and template and "developer" not in template:
        return {**message, "role": "system"}
    return dict(message)


class MlxDetokenizer:
    """Turns one sequence of tokens into pieces of text whose concatenation is the decoded whole.

    A piece is held back while it ends inside a character. Each decoding starts a few tokens early, since some
    tokenizers treat the first token of a text in another way.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here
        self._told = 0  # the text of the tokens before this one has been returned

    def add(self, token: int) -> str:
        """Return the text that this token completes; often empty in the middle of a character."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return piece

    def finish(self) -> str:
        """Return the text that is left at the end of the sequence, incomplete characters as U+FFFD."""
        piece = self._pending()
        self._context = self._told = len(self._tokens)
        return piece

    def _pending(self) -> str:
        before = self._decode(self._tokens[self._context : self._told])
        whole = self._decode(self._tokens[self._context :])
        return whole[len(before) :]
