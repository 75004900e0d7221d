"""What one request asks of a daemon, in any dialect.

Both halves get the same body and read it the same way, so prefill and decode agree on prompts, rooms, seeds and lengths
without a message between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from pdplane.api import Node, Sampling, Tokenizer
from pdplane.ids import Endpoint, Room
from pdplane.serving.fields import BadField
from pdplane.serving.reading import LARGEST_BODY

MAX_ANSWERS = 128
MAX_TOKENS = 1 << 20
DEFAULT_MAX_TOKENS = 512

_UNKNOWN_CONTEXT = 1 << 18
_ID_NBYTES = 12
"""Of a token id in JSON, with what separates it from the next."""
_BESIDE_PROMPT_NBYTES = 1 << 20
_PIECE = 1 << 16
_SLACK = 2
"""Pieces of a text have more tokens than the text, since words are cut; never so many times more."""


@attrs.frozen(kw_only=True)
class Served:
    """The model as a request is read against it, and as answers name it."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int | None
    context_length: int | None
    bootstrap_port: int
    """Port of a rendezvous for which a request names none."""
    go_on: Callable[[], None] = lambda: None
    """Raises when nobody waits for the request that is read."""

    @classmethod
    def of(cls, node: Node, bootstrap_port: int) -> Served:
        """Return the served model, from the node's own info."""
        info = node.info()
        return cls(
            name=str(info.get("served_model_name") or info.get("model_path") or "unknown"),
            tokenizer=node.tokenizer,
            vocab_size=info.get("vocab_size"),
            context_length=info.get("context_length"),
            bootstrap_port=bootstrap_port,
        )

    @property
    def longest_text(self) -> int:
        """Bytes in UTF-8 of which a longer text cannot fit into the context: that many of the longest token."""
        return (self.context_length or _UNKNOWN_CONTEXT) * self.tokenizer.longest_token

    @property
    def longest_body(self) -> int:
        """Bytes of a request: a whole context as JSON writes it, text or ids, and what stands beside the prompt."""
        # Twice the text, since quotes and ends of lines are escaped.
        ids = (self.context_length or _UNKNOWN_CONTEXT) * _ID_NBYTES
        return min(LARGEST_BODY, _BESIDE_PROMPT_NBYTES + 2 * self.longest_text + ids)

    def encode(self, text: str, field: str) -> tuple[int, ...]:
        """Return a text's token ids. Raises BadField naming the field, early, when they are more than the context."""
        self.check_text(text, field)
        return tuple(self.tokenizer.encode(text))

    def check_text(self, text: str, field: str) -> None:
        """Raise BadField for a text that cannot fit; work on a long one ends at the piece that shows it."""
        nbytes = len(text.encode("utf-8", "replace"))
        if nbytes > self.longest_text:
            raise BadField(f"{field} has {nbytes} bytes; a text of more than {self.longest_text} cannot fit", field)
        context, count = self.context_length, 0
        if context is None or len(text) <= max(_PIECE, context):
            return
        for start in range(0, len(text), _PIECE):
            self.go_on()
            count += len(self.tokenizer.encode(text[start : start + _PIECE]))
            if count > _SLACK * context:
                read = min(len(text), start + _PIECE)
                raise BadField(
                    f"{field} does not fit: {read} of its {len(text)} characters are about {count} tokens, "
                    f"the context has {context}",
                    field,
                )


@attrs.frozen
class Meeting:
    """A room, and the rendezvous of its prefill; prefill's own half needs no address."""

    room: Room
    prefill: Endpoint | None


@attrs.frozen(kw_only=True)
class AskedAnswer:
    """One answer: the prompt it continues, where its two halves meet, how its tokens are chosen."""

    prompt: tuple[int, ...]
    meeting: Meeting
    max_tokens: int
    sampling: Sampling


@attrs.frozen(kw_only=True)
class Asked:
    """A whole request. `answers` are in the order of their indices: the first prompt's `n`, then the second's."""

    request_id: str
    answers: tuple[AskedAnswer, ...]
    n: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool = False
    logprobs: bool = False
    spell: bool = False
    """Whether logprobs come with the tokens' texts where the dialect leaves them out."""
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many answers it has."""
        return sum(len(answer.prompt) for answer in self.answers[:: self.n])


def plan(
    served: Served,
    prompts: Sequence[tuple[int, ...]],
    n: int,
    meetings: Sequence[Meeting],
    sampling: Sampling,
    max_tokens: int | None,
) -> tuple[AskedAnswer, ...]:
    """Return one `AskedAnswer` for each prompt and number. Raises BadField for what the model cannot do."""
    count = len(prompts) * n
    if not 1 <= count <= MAX_ANSWERS:
        raise BadField(f"n times prompts is {count}, not 1 to {MAX_ANSWERS}", "n")
    places = spread(meetings, count)
    return tuple(
        AskedAnswer(
            prompt=check_prompt(served, prompt),
            meeting=places[index * n + number],
            max_tokens=_length(served, len(prompt), max_tokens),
            sampling=_sampling_of(sampling, number),
        )
        for index, prompt in enumerate(prompts)
        for number in range(n)
    )


def _sampling_of(sampling: Sampling, number: int) -> Sampling:
    if sampling.seed is None or not number:
        return sampling
    return attrs.evolve(sampling, seed=(sampling.seed + number) % 2**64)  # else all answers would be the same one


def spread(meetings: Sequence[Meeting], count: int) -> list[Meeting]:
    """Return a meeting for each of `count` answers: neighbours share a given one, under rooms derived from it.

    Raises BadField when the given meetings do not divide the answers.
    """
    share, rest = divmod(count, len(meetings)) if meetings else (0, 1)
    if rest or not share:
        raise BadField(f"bootstrap_room: {len(meetings)} rooms do not fit {count} answers", "bootstrap_room")
    return [
        attrs.evolve(meeting, room=derived_room(meeting.room, index)) for meeting in meetings for index in range(share)
    ]


def derived_room(room: Room, index: int) -> Room:
    """Return the room of another answer of the same request: the room itself for index 0.

    Else the first 63 bits of SHA-256 over the room (8 bytes) and the index (4 bytes), both big-endian.
    """
    if index == 0:
        return room
    digest = hashlib.sha256(room.to_bytes(8, "big") + index.to_bytes(4, "big")).digest()
    return Room(int.from_bytes(digest[:8], "big") >> 1)


def check_prompt(served: Served, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the prompt. Raises BadField when it is empty or holds a token outside the vocabulary."""
    if not prompt:
        raise BadField("the prompt is empty", "prompt")
    if served.vocab_size is not None and max(prompt) >= served.vocab_size:
        raise BadField(f"prompt: token id {max(prompt)} is not one of the model's {served.vocab_size}", "prompt")
    return prompt


def _length(served: Served, prompt_tokens: int, asked: int | None) -> int:
    context = served.context_length
    if context is None:
        return asked or DEFAULT_MAX_TOKENS
    wanted = asked or max(1, min(DEFAULT_MAX_TOKENS, context - prompt_tokens))
    if prompt_tokens + wanted > context:
        raise BadField(
            f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the context of {context}",
            "max_tokens",
        )
    return wanted
