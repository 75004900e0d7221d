"""What OpenAI's two dialects share: their settings, the frame around choices, usage; and completions.

Where mlx_lm.server and OpenAI differ, this follows OpenAI.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pdplane.api import MAX_TOP_LOGPROBS, Token
from pdplane.serving.answer import Event, Piece, TextAnswer
from pdplane.serving.asked import MAX_ANSWERS, MAX_TOKENS, Asked, Served, plan
from pdplane.serving.fields import Fields, is_ids, parse, short
from pdplane.serving.settings import read_meetings, read_sampling, read_stops

Prompt: TypeAlias = tuple[int, ...]

UNLIKELY = -9999.0
"""OpenAI's number for a logprob that is no number."""
_IGNORED = (
    # About the caller and the bill, not about the answer.
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "priority", "request_id", "rid", "data_parallel_rank", "cache_salt",
    # Guesses that make the same answer come sooner.
    "prediction", "draft_model", "num_draft_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "no_stop_trim": (False,), "include_stop_str_in_output": (False,), "continue_final_message": (False,),
    "add_generation_prompt": (True,), "skip_special_tokens": (True,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "return_hidden_states": (False,), "echo": (False,), "suffix": ("",),
    "min_tokens": (0,), "min_new_tokens": (0,), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "prompt_logprobs": (False, 0), "return_token_ids": (False,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "functions": ([],), "function_call": ("none",),
}  # fmt: skip
"""Fields that are accepted only with their default value."""


def read_settings(
    body: Fields,
    served: Served,
    prompts: Sequence[Prompt],
    *,
    name: str,
    top_logprobs: int | None,
    tools: tuple[Mapping[str, Any], ...] | None = None,
) -> Asked:
    """Return the rest of a body whose prompts were read. Raises BadField for every field that is left."""
    n = body.whole("n", 1, MAX_ANSWERS) or 1
    best_of = body.whole("best_of", 1, MAX_ANSWERS) or n
    if best_of != n:
        raise body.refuse("best_of", f"{best_of} is not supported: it can only be n")
    stop, stop_ids, ignore_eos = read_stops(body)
    stream = body.flag("stream")
    sampling = read_sampling(body, served, top_logprobs=top_logprobs or 0)
    asked = Asked(
        request_id=f"{name}-{uuid.uuid4().hex}",
        answers=plan(served, prompts, n, read_meetings(body, served), sampling, _max_tokens(body)),
        n=n,
        stop=stop,
        stop_ids=stop_ids,
        ignore_eos=ignore_eos,
        stream=stream,
        include_usage=_include_usage(body, stream=stream),
        logprobs=top_logprobs is not None,
        tools=tools,
    )
    for field, values in _NEUTRAL.items():
        body.only(field, *values)
    body.ignore(*_IGNORED)
    body.end()
    return asked


def _max_tokens(body: Fields) -> int | None:
    older, newer = body.whole("max_tokens", 1, MAX_TOKENS), body.whole("max_completion_tokens", 1, MAX_TOKENS)
    if None not in (older, newer) and older != newer:
        raise body.refuse("max_tokens", "and max_completion_tokens differ")
    return newer or older


def _include_usage(body: Fields, *, stream: bool) -> bool:
    given = body.mapping("stream_options")
    if given is None:
        return False
    if not stream:
        raise body.refuse("stream_options", "is for streams")
    options = Fields(given, "stream_options.")
    wanted = options.flag("include_usage")
    options.only("continuous_usage_stats", False)  # noqa: FBT003  (a value, no argument)
    options.ignore("include_obfuscation")
    options.end()
    return wanted


class Envelope:
    """What stands around the choices of one request."""

    def __init__(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> None:
        self.asked, self.served, self.answers = asked, served, answers
        self._created = int(time.time())

    def around(self, kind: str, choices: Sequence[Event], **more: object) -> Event:
        """Return one object with these choices."""
        head = {"id": self.asked.request_id, "object": kind, "created": self._created, "model": self.served.name}
        return {**head, "choices": list(choices), **more}

    def chunk(self, kind: str, choice: Event) -> Event:
        """Return one event of a stream; its usage is null, as at OpenAI, when the last event will have it."""
        return self.around(kind, [choice], **({"usage": None} if self.asked.include_usage else {}))

    def last(self, kind: str) -> Sequence[Event]:
        """Return the event with the usage, when it was asked for."""
        return [self.around(kind, [], usage=self.usage())] if self.asked.include_usage else ()

    def usage(self) -> Event:
        """Count the tokens of all answers; each prompt counts once."""
        prompt, answered = self.asked.prompt_tokens, sum(len(answer.tokens) for answer in self.answers)
        cached = sum(answer.cached_tokens for answer in self.answers[:: self.asked.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answered,
            "total_tokens": prompt + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def spell(self, token: int) -> str:
        """Return a token's text; U+FFFD for parts of a character."""
        return self.served.tokenizer.spell(token).decode(errors="replace")


def told(logprob: float) -> float | None:
    """Return a logprob in a form that JSON can hold; None when it is unknown."""
    if math.isnan(logprob):
        return None
    return logprob if math.isfinite(logprob) else UNLIKELY


class OpenaiCompletions:
    """`POST /v1/completions`."""

    paths = ("/v1/completions",)
    marks = False

    def read(self, data: bytes, served: Served) -> Asked:
        """Return a body as a checked value. Raises ConfigError that names the field."""
        body = Fields(parse(data))
        return read_settings(body, served, _prompts(body, served), name="cmpl", top_logprobs=_completion_logprobs(body))

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> CompletionsWriter:
        """Return the writer of this request's answers."""
        return CompletionsWriter(Envelope(asked, served, answers))


def _prompts(body: Fields, served: Served) -> list[Prompt]:
    given = body.take("prompt")
    if given is None:
        raise body.refuse("prompt", "is missing")
    if isinstance(given, str) or (is_ids(given) and given):
        given = [given]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_ANSWERS:
        raise body.refuse("prompt", f"is not a text, token ids, or a list of 1 to {MAX_ANSWERS} of them")
    return [_prompt(body, index, prompt, served) for index, prompt in enumerate(given)]


def _prompt(body: Fields, index: int, prompt: object, served: Served) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise body.refuse(f"prompt[{index}]", "is empty")
        return served.encode(prompt, body.name(f"prompt[{index}]"))
    if isinstance(prompt, list) and is_ids(prompt):
        return tuple(prompt)
    raise body.refuse(f"prompt[{index}]", "is neither a text nor a list of token ids")


def _completion_logprobs(body: Fields) -> int | None:
    """Return how many likeliest tokens each one comes with; None for no logprobs at all."""
    given, more = body.take("logprobs"), body.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if given is None or given is False:
        if more:
            raise body.refuse("top_logprobs", "needs logprobs")
        return None
    if given is True:  # as mlx_lm.server takes it
        return more or 0
    if type(given) is not int or not 0 <= given <= MAX_TOP_LOGPROBS:
        raise body.refuse("logprobs", f"{short(given)} is not a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return max(given, more or 0)


class CompletionsWriter:
    """Texts, and logprobs in columns."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._told = [0] * len(envelope.answers)  # characters of each answer in earlier events

    def keep(self, piece: Piece) -> None:
        """Do nothing: the answers hold it."""

    def events(self, piece: Piece) -> Sequence[Event]:
        """Return the new text, or nothing without any."""
        if not piece.text and piece.ending is None and not (self._envelope.asked.logprobs and piece.tokens):
            return ()
        offset = self._told[piece.index]
        self._told[piece.index] += len(piece.text)
        return [self._envelope.chunk("text_completion", self._choice(piece, offset))]

    def last(self) -> Sequence[Event]:
        """Return the usage, when it was asked for."""
        return self._envelope.last("text_completion")

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return all choices and the usage."""
        pieces = [Piece(found.index, found.text, tuple(found.tokens), found.ending) for found in self._envelope.answers]
        choices = [self._choice(piece, 0) for piece in pieces]
        return self._envelope.around("text_completion", choices, usage=self._envelope.usage())

    def _choice(self, piece: Piece, offset: int) -> Event:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._columns(piece.tokens, offset) if self._envelope.asked.logprobs else None,
            "finish_reason": piece.ending.reason if piece.ending else None,
        }

    def _columns(self, tokens: Sequence[Token], offset: int) -> Event:
        texts = [self._envelope.spell(token.id) for token in tokens]
        offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [told(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._envelope.spell(number): told(logprob) for number, logprob in token.top} for token in tokens
            ],
            "text_offset": offsets,
        }
