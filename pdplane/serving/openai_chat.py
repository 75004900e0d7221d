"""OpenAI's `POST /v1/chat/completions`: messages in; content, thoughts and calls of tools out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pdplane.api import MAX_TOP_LOGPROBS, Said, Token, join_said
from pdplane.serving.answer import AnswerEnd, Event, Piece, TextAnswer
from pdplane.serving.asked import Asked, Served
from pdplane.serving.conversation import read_conversation
from pdplane.serving.fields import Fields, parse
from pdplane.serving.openai import Envelope, read_settings, told

_CHUNK = "chat.completion.chunk"


class OpenaiChat:
    """The dialect."""

    paths = ("/v1/chat/completions", "/chat/completions")
    marks = True

    def read(self, data: bytes, served: Served) -> Asked:
        """Return a body as a checked value. Raises ConfigError that names the field."""
        body = Fields(parse(data))
        conversation = read_conversation(body, served)
        logprobs, top = body.flag("logprobs"), body.whole("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
        if top and not logprobs:
            raise body.refuse("top_logprobs", "needs logprobs true")
        return read_settings(
            body,
            served,
            [conversation.tokens],
            name="chatcmpl",
            top_logprobs=top if logprobs else None,
            tools=conversation.tools,
        )

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> ChatWriter:
        """Return the writer of this request's answers."""
        return ChatWriter(Envelope(asked, served, answers))


@attrs.define
class _Message:
    """One choice's message as it grows."""

    said: Said = attrs.Factory(Said)
    begun: bool = False
    calls: int = 0


class ChatWriter:
    """Takes each answer's text apart and writes messages, or deltas of them."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        asked, tokenizer = envelope.asked, envelope.served.tokenizer
        self._speeches = [tokenizer.speech(answer.prompt, asked.tools) for answer in asked.answers]
        self._messages = [_Message() for _answer in asked.answers]

    def keep(self, piece: Piece) -> None:
        """Take the new text apart."""
        message = self._messages[piece.index]
        message.said = join_said([message.said, self._take(piece)])
        message.calls = len(message.said.calls)

    def events(self, piece: Piece) -> Sequence[Event]:
        """Return the delta, and at the end of an answer the reason."""
        message, said = self._messages[piece.index], self._take(piece)
        delta, logprobs = _written(said, first_call=message.calls), self._logprobs(piece.tokens)
        message.calls += len(said.calls)
        events = []
        if delta or logprobs or (piece.ending and not message.begun):
            delta = delta if message.begun else {"role": "assistant", "content": "", **delta}
            message.begun = True
            events.append(self._chunk(piece.index, delta, logprobs, None))
        if piece.ending is not None:
            events.append(self._chunk(piece.index, {}, None, _reason(message, piece.ending)))
        return events

    def _take(self, piece: Piece) -> Said:
        speech = self._speeches[piece.index]
        said = speech.add(piece.text)
        return said if piece.ending is None else join_said([said, speech.finish()])

    def last(self) -> Sequence[Event]:
        """Return the usage, when it was asked for."""
        return self._envelope.last(_CHUNK)

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return all choices and the usage."""
        choices = [self._choice(*pair) for pair in zip(self._envelope.answers, self._messages, strict=True)]
        return self._envelope.around("chat.completion", choices, usage=self._envelope.usage())

    def _choice(self, answer: TextAnswer, message: _Message) -> Event:
        written = _written(message.said)
        content = written.pop("content", None if message.calls else "")
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": content, **written},
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": _reason(message, answer.ending) if answer.ending else None,
        }

    def _chunk(self, index: int, delta: Event, logprobs: Event | None, reason: str | None) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.chunk(_CHUNK, choice)

    def _logprobs(self, tokens: Sequence[Token]) -> Event | None:
        if not self._envelope.asked.logprobs or not tokens:
            return None
        rows = [
            {
                **self._row(token.id, token.logprob),
                "top_logprobs": [self._row(number, logprob) for number, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": rows, "refusal": None}

    def _row(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._envelope.served.tokenizer.spell(token)
        return {"token": spelled.decode(errors="replace"), "logprob": told(logprob), "bytes": list(spelled)}


def _written(said: Said, first_call: int | None = None) -> dict[str, Any]:
    """Return the JSON of a message or a delta; the calls of a delta are numbered from `first_call`."""
    written: dict[str, Any] = {}
    if said.content:
        written["content"] = said.content
    if said.reasoning:  # two names are in use, and clients know one of them
        written |= {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
    if said.calls:
        written["tool_calls"] = [
            {
                **({} if first_call is None else {"index": first_call + place}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(said.calls)
        ]
    return written


def _reason(message: _Message, ending: AnswerEnd) -> str:
    return "tool_calls" if message.calls and ending.reason == "stop" else ending.reason
