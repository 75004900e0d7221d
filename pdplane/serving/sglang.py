"""sglang's `POST /generate`: the whole text each time, logprobs as rows, `meta_info`.

`text`, `input_ids` or (ours) `messages`; `sampling_params`; `stream`; `return_logprob`; `rid`; the gateways'
`bootstrap_*`. Ours on top: `max_tokens`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from pdplane.api import MAX_TOP_LOGPROBS, Token
from pdplane.serving.answer import AnswerEnd, Event, Piece, TextAnswer
from pdplane.serving.asked import MAX_ANSWERS, MAX_TOKENS, Asked, Served, plan
from pdplane.serving.conversation import read_conversation
from pdplane.serving.fields import Fields, parse
from pdplane.serving.settings import read_meetings, read_sampling, read_stops

MAX_ID = 4096
_IGNORED = ("model", "log_metrics", "no_logs", "priority", "extra_key", "data_parallel_rank", "custom_labels")


class Sglang:
    """The dialect."""

    paths = ("/generate",)
    marks = False

    def read(self, data: bytes, served: Served) -> Asked:
        """Return a body as a checked value. Raises ConfigError that names the field."""
        body = Fields(parse(data))
        settings = Fields(body.mapping("sampling_params") or {}, "sampling_params.")
        logprobs = body.flag("return_logprob")
        top = body.whole("top_logprobs_num", 0, MAX_TOP_LOGPROBS) or 0
        if top and not logprobs:
            raise body.refuse("top_logprobs_num", "needs return_logprob")
        body.only("logprob_start_len", -1)
        prompt, tools = _prompt(body, served)
        stop, stop_ids, ignore_eos = read_stops(settings)
        n = settings.whole("n", 1, MAX_ANSWERS) or 1
        sampling = read_sampling(settings, served, seed="sampling_seed", top_logprobs=top)
        asked = Asked(
            request_id=body.text("rid", MAX_ID) or uuid.uuid4().hex,
            answers=plan(served, [prompt], n, read_meetings(body, served), sampling, _max_tokens(body, settings)),
            n=n,
            stop=stop,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            stream=body.flag("stream"),
            logprobs=logprobs,
            spell=body.flag("return_text_in_logprobs"),
            tools=tools,
        )
        _refuse_the_rest(body, settings)
        return asked

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> SglangWriter:
        """Return the writer of this request's answers."""
        return SglangWriter(asked, served, answers)


class SglangWriter:
    """The answers hold everything that is written."""

    def __init__(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> None:
        self._asked, self._served, self._answers = asked, served, answers

    def keep(self, piece: Piece) -> None:
        """Do nothing: the answers hold it."""

    def events(self, piece: Piece) -> Sequence[Event]:
        """Return the whole answer so far."""
        return [self._body(self._answers[piece.index])]

    def last(self) -> Sequence[Event]:
        """Return no events: nothing comes after the answers."""
        return ()

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return an object, or a list of them when there are several answers."""
        bodies = [self._body(answer) for answer in self._answers]
        return bodies[0] if len(bodies) == 1 else bodies

    def _body(self, answer: TextAnswer) -> Event:
        meta: dict[str, Any] = {
            "id": self._asked.request_id,
            "finish_reason": _reason(answer.ending, len(answer.tokens)),
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.cached_tokens,
            "e2e_latency": time.monotonic() - answer.began,
            "pdplane": answer.timings,
        }
        if self._asked.logprobs:
            meta["output_token_logprobs"] = [self._row(token.id, token.logprob) for token in answer.tokens]
        if self._asked.answers[0].sampling.top_logprobs:
            meta["output_top_logprobs"] = [self._rows(token) for token in answer.tokens]
        body = {"text": answer.text, "output_ids": [token.id for token in answer.tokens], "meta_info": meta}
        return body if len(self._answers) == 1 else {**body, "index": answer.index}

    def _rows(self, token: Token) -> list[list[float | int | str | None]]:
        return [self._row(number, logprob) for number, logprob in token.top]

    def _row(self, token: int, logprob: float) -> list[float | int | str | None]:
        # JSON has no infinities and no NaN.
        text = self._served.tokenizer.spell(token).decode(errors="replace") if self._asked.spell else None
        return [logprob if math.isfinite(logprob) else None, token, text]


def _prompt(body: Fields, served: Served) -> tuple[tuple[int, ...], Any]:
    given = [name for name in ("text", "input_ids", "messages") if name in body]
    if len(given) != 1:
        raise body.refuse("text", f"or input_ids or messages: give one, not {' and '.join(given) or 'none of them'}")
    if given == ["input_ids"]:
        return body.ids("input_ids") or (), None
    if given == ["messages"]:
        conversation = read_conversation(body, served)
        return conversation.tokens, conversation.tools
    text = body.text("text", 1 << 26)
    return served.encode(text, "text") if text else (), None


def _max_tokens(body: Fields, settings: Fields) -> int | None:
    ours, theirs = body.whole("max_tokens", 1, MAX_TOKENS), settings.whole("max_new_tokens", 1, MAX_TOKENS)
    if None not in (ours, theirs) and ours != theirs:
        raise body.refuse("max_tokens", "and sampling_params.max_new_tokens differ")
    return ours or theirs


def _refuse_the_rest(body: Fields, settings: Fields) -> None:
    settings.only("min_new_tokens", 0)
    settings.only("skip_special_tokens", True)  # noqa: FBT003  (a value, no argument)
    settings.only("no_stop_trim", False)  # noqa: FBT003
    settings.ignore("spaces_between_special_tokens")
    settings.end()
    for name in ("background", "return_bytes", "return_entropy", "return_hidden_states", "echo", "prompt_logprobs"):
        body.only(name, False, 0)  # noqa: FBT003
    body.ignore(*_IGNORED)
    body.end()


def _reason(ending: AnswerEnd | None, count: int) -> Event | None:
    if ending is None:
        return None
    if ending.reason == "length":
        return {"type": "length", "length": count}
    return {"type": "stop", "matched": ending.matched}
