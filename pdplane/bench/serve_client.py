"""The client of `pdplane bench serve`: streams from an OpenAI server, with the moment of every piece of text."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import attrs

from pdplane.errors import ConfigError

_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "with",
    "as",
    "by",
    "at",
    "from",
    "his",
    "her",
    "one",
    "had",
    "not",
    "but",
    "all",
    "were",
    "when",
    "we",
    "there",
]
_PATIENCE_S = 600.0
_LOOK_S = 0.005
_LOUD_ANSWERS = 16  # answers' lengths of a stream that the long prompts disturb; it is ended before
_STAGGER_S = 0.02  # mlx_lm.server's queue holds five connections; one more at the same moment would wait a second


@attrs.define(eq=False)
class Heard:
    """One stream: when it was asked for, when each piece of its text came, and what the server counted."""

    began: float
    times: list[float] = attrs.Factory(list)
    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0

    @property
    def first_s(self) -> float:
        """The time to the first token. Raises ConfigError when none came."""
        if not self.times:
            raise ConfigError("a stream ended without a token: take other --tokens or another model")
        return self.times[0] - self.began

    @property
    def last(self) -> float:
        """The moment of the last piece. Raises ConfigError when none came."""
        return max(self.began + self.first_s, self.times[-1])

    def gaps(self, after: float = 0.0, until: float = float("inf")) -> list[float]:
        """Return the waits between two pieces that overlap the window."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [late - early for early, late in pairs if late > after and early < until]


class Speaker:
    """Asks one server; used inside one event loop. `close` ends its connections."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url = name, url.rstrip("/")
        self._model = "default_model"  # what mlx_lm.server calls the one that it was started with
        self._words_a_token = 1.0
        self._session: aiohttp.ClientSession | None = None

    async def open(self, *, named: bool) -> None:
        """Find the model's name if the server wants one, and how long a word is. Raises ConfigError."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_S))
        if named:
            try:
                async with self._session.get(f"{self._url}/v1/models") as answer:
                    self._model = str((await answer.json())["data"][0]["id"])
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{self.name}: {self._url}/v1/models names no model: {error}") from error
        heard = [await self.complete(" ".join(_WORDS * number), 2) for number in (1, 2)]
        tokens = heard[1].prompt_tokens - heard[0].prompt_tokens
        self._words_a_token = len(_WORDS) / tokens if tokens > 0 else 1.0

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def prompt(self, tokens: int, seed: int) -> str:
        """Return a text of about so many tokens, of which no two begin alike."""
        chosen = random.Random(seed)
        return " ".join(chosen.choices(_WORDS, k=max(2, round(tokens * self._words_a_token))))

    async def complete(self, prompt: str, tokens: int, heard: Heard | None = None) -> Heard:
        """Stream a completion into `heard`. Raises ConfigError when the server fails."""
        return await self._ask("completions", {"prompt": prompt}, tokens, heard)

    async def chat(self, messages: Sequence[Mapping[str, str]], tokens: int) -> Heard:
        """Stream the next message of a conversation. Raises ConfigError when the server fails."""
        return await self._ask("chat/completions", {"messages": list(messages)}, tokens, None)

    async def _ask(self, path: str, what: Mapping[str, Any], tokens: int, heard: Heard | None) -> Heard:
        assert self._session is not None, "open first"
        body = {
            "model": self._model, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **what,
        }  # fmt: skip
        heard = heard or Heard(0.0)
        heard.began = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/{path}", json=body) as answer:
                if answer.status != 200:
                    raise ConfigError(f"{self.name}: status {answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    _take(line, heard)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConfigError(f"{self.name}: {str(error) or type(error).__name__}") from error
        return heard


def _take(line: bytes, heard: Heard) -> None:
    """Note one line of the stream."""
    kind, _, data = line.partition(b":")
    if kind != b"data" or data.strip() in (b"", b"[DONE]"):
        return
    now, event = time.perf_counter(), json.loads(data)
    if "error" in event:
        raise ValueError(f"the stream ends with {str(event['error'])[:300]}")
    for choice in event.get("choices") or ():
        if text := choice.get("text") or (choice.get("delta") or {}).get("content"):
            heard.times.append(now)
            heard.text += text
    if usage := event.get("usage"):
        heard.prompt_tokens, heard.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        heard.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@attrs.frozen
class Load:
    """How much is asked."""

    prompt_tokens: int
    short_tokens: int
    tokens: int
    apart_s: float
    requests: int
    rate: float
    bound_first_s: float
    bound_gap_s: float


Numbers = dict[str, list[float]]
"""What one measurement found: samples by name; seconds, or what the name says."""


async def idle(speaker: Speaker, load: Load, seed: int) -> Numbers:
    """Ask one long prompt of an idle server."""
    heard = await speaker.complete(speaker.prompt(load.prompt_tokens, seed), 2)
    return {"first_s": [heard.first_s], "prompt_tokens": [heard.prompt_tokens]}


async def queued(speaker: Speaker, load: Load, seed: int) -> Numbers:
    """Ask three long prompts and a short one, one after the other, without waiting for an answer."""
    prompts = [speaker.prompt(load.prompt_tokens, seed + number) for number in range(3)]
    prompts.append(speaker.prompt(load.short_tokens, seed + 3))
    heard = await _apart(speaker, prompts, load.apart_s, 2)
    firsts = [each.first_s for each in heard]
    return {"mean_long_s": [sum(firsts[:3]) / 3], **{f"long_{n + 1}_s": [firsts[n]] for n in range(3)},
            "short_s": [firsts[3]]}  # fmt: skip


def streams(number: int) -> Measure:
    """Return the measurement of so many streams that nothing disturbs."""

    async def quiet(speaker: Speaker, load: Load, seed: int) -> Numbers:
        prompts = [speaker.prompt(load.short_tokens, seed + each) for each in range(number)]
        heard = await _apart(speaker, prompts, _STAGGER_S, load.tokens)
        took = max(each.last for each in heard) - min(each.began for each in heard)
        return {"gap_s": [gap for each in heard for gap in each.gaps()],
                "tokens_a_s": [sum(each.tokens or len(each.times) for each in heard) / took]}  # fmt: skip

    return quiet


def disturbed(number: int) -> Measure:
    """Return the measurement of so many streams while three long prompts arrive."""

    async def loud(speaker: Speaker, load: Load, seed: int) -> Numbers:
        heard = [Heard(0.0) for _ in range(number)]

        async def stream(each: int) -> Heard:
            await asyncio.sleep(each * _STAGGER_S)
            prompt = speaker.prompt(load.short_tokens, seed + each)
            return await speaker.complete(prompt, _LOUD_ANSWERS * load.tokens, heard[each])

        running = [asyncio.create_task(stream(each)) for each in range(number)]
        try:
            await _all_speak(running, heard)
            began = time.perf_counter()
            prompts = [speaker.prompt(load.prompt_tokens, seed + number + each) for each in range(3)]
            long = await _apart(speaker, prompts, load.apart_s, 2)
            ended = max(each.began + each.first_s for each in long)
            early = [task.result() for task in running if task.done()]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        gaps = [gap for one in heard for gap in one.gaps(began, ended)]
        gaps += [ended - one.times[-1] for one in heard if one not in early and one.times[-1] < ended]  # still waiting
        return {"gap_s": gaps, "mean_long_s": [sum(each.first_s for each in long) / 3], "ended_early": [len(early)]}

    return loud


async def second_turn(speaker: Speaker, load: Load, seed: int) -> Numbers:
    """Ask a long message, and a short one after its answer."""
    talk = [{"role": "user", "content": speaker.prompt(load.prompt_tokens, seed)}]
    first = await speaker.chat(talk, load.tokens)
    talk += [{"role": "assistant", "content": first.text}]
    talk += [{"role": "user", "content": speaker.prompt(load.short_tokens, seed + 1)}]
    second = await speaker.chat(talk, 2)
    return {"first_turn_s": [first.first_s], "second_turn_s": [second.first_s],
            "cached_tokens": [second.cached_tokens], "prompt_tokens": [second.prompt_tokens]}  # fmt: skip


async def goodput(speaker: Speaker, load: Load, seed: int) -> Numbers:
    """Let requests come at random moments, the same for every server; count those within both bounds."""
    moments = random.Random(seed)

    async def one(number: int, pause: float) -> Heard:
        await asyncio.sleep(pause)
        tokens = load.prompt_tokens if number % 4 == 3 else load.short_tokens
        return await speaker.complete(speaker.prompt(tokens, seed + number), load.tokens)

    began, at, waits = time.perf_counter(), 0.0, []
    for _ in range(load.requests):
        waits.append(at)
        at += moments.expovariate(load.rate)
    heard = await asyncio.gather(*(one(number, pause) for number, pause in enumerate(waits)))
    took = time.perf_counter() - began
    good = [each for each in heard
            if each.first_s <= load.bound_first_s and max(each.gaps(), default=0.0) <= load.bound_gap_s]  # fmt: skip
    return {"good_a_s": [len(good) / took], "share_good": [len(good) / len(heard)]}


Measure = Callable[[Speaker, Load, int], Awaitable[Numbers]]


async def _apart(speaker: Speaker, prompts: Sequence[str], apart_s: float, tokens: int) -> list[Heard]:
    async def later(pause: float, prompt: str) -> Heard:
        await asyncio.sleep(pause)
        return await speaker.complete(prompt, tokens)

    return await asyncio.gather(*(later(number * apart_s, prompt) for number, prompt in enumerate(prompts)))


async def _all_speak(running: Sequence[asyncio.Task[Heard]], heard: Sequence[Heard]) -> None:
    """Wait for a second piece of every stream. Raises ConfigError when one ends before."""
    while any(len(each.times) < 2 for each in heard):
        for task in running:
            if task.done():
                task.result()
                raise ConfigError("a stream ended before the long prompts came: give more --tokens")
        await asyncio.sleep(_LOOK_S)
