"""The toy model behind both engine protocols of `pdplane.api`, each on a thread of its own."""

from __future__ import annotations

import codecs
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

import attrs

from pdplane.api import GREEDY, EngineDecodeRequest, EnginePrefix, FinishReason, OnReused, Said, Sampling, Token
from pdplane.errors import ConfigError, InternalError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.copies import Arrivals
from pdplane.kv.layout import U64, Layout
from pdplane.kv.manifest import blocks_needed
from pdplane.messages import Fingerprint
from pdplane.toy.model import (
    EOS,
    KV,
    ToyOptions,
    digest_of_arena,
    digest_of_prompt,
    next_token,
    page,
    toy_layout,
    write_kv,
    write_state,
)

VOCABULARY = 256

_SAID = ("role", "content")

_TURN_S = 2.0
"""A turn that takes longer hangs: they take microseconds."""

_LOOK_AGAIN_S = 0.005  # how soon a held engine notices that a job was cancelled

T = TypeVar("T")
Turns = Generator[None, None, T]


class ToyJob(Generic[T]):
    """One generator on the toy thread; a turn is one `next`."""

    def __init__(self, turns: Turns[T]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # only its own thread ends it
        self.cancelled = threading.Event()
        self._turns = turns

    def cancel(self) -> None:
        """End at the next turn."""
        self.cancelled.set()

    def take_turn(self, *, closing: bool) -> bool:
        """Run one turn; return True when another one is needed."""
        if closing or self.cancelled.is_set():
            self._turns.close()
            self.future.set_exception(CancelledError("the engine closes" if closing else "cancelled"))
            return False
        try:
            next(self._turns)
        except StopIteration as end:
            self.future.set_result(end.value)
            return False
        except RuntimeError as error:  # of the poison token, of a page that changed
            self.future.set_exception(error)
            return False
        return True


class ToyThread:
    """Serves jobs round robin. While `hold` is clear no turn begins, except that of a cancelled job."""

    def __init__(self, name: str, hold: threading.Event | None) -> None:
        self._name = name
        self._hold = hold
        self._wake = threading.Condition()
        self._jobs: deque[ToyJob[Any]] = deque()
        self._closing = False
        self._began: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name)
            self._thread.start()

    def submit(self, turns: Turns[T]) -> ToyJob[T]:
        """Queue a job; raise InternalError when the thread is closed."""
        job = ToyJob(turns)
        with self._wake:
            if self._closing or self._thread is None:
                raise InternalError(f"{self._name} is not running")
            self._jobs.append(job)
            self._wake.notify()
        return job

    def trouble(self) -> str | None:
        """Return why no turn comes any more, None while they come."""
        began = self._began
        late_s = 0.0 if began is None else time.monotonic() - began
        return f"the thread {self._name} hangs: one turn takes {late_s:.0f} s" if late_s > _TURN_S else None

    def close(self) -> None:
        """End every job and join; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            self._wait_while_held(job)
            self._began = time.monotonic()
            if job.take_turn(closing=self._closing):
                self._jobs.append(job)
            self._began = None

    def _next_job(self) -> ToyJob[Any] | None:
        with self._wake:
            while not self._jobs:
                if self._closing:
                    return None
                self._wake.wait()
            return self._jobs.popleft()

    def _wait_while_held(self, job: ToyJob[Any]) -> None:
        while self._hold is not None and not self._hold.wait(_LOOK_AGAIN_S):
            if self._closing or job.cancelled.is_set():
                return


class ToyEngine:
    """What both toy engines share. `hold`: an Event that the test clears to stop the engine before its next turn."""

    def __init__(self, options: ToyOptions | None = None, *, hold: threading.Event | None = None) -> None:
        self.options = options or ToyOptions()
        self.tokenizer = ToyTokenizer()
        self.turns = 0
        self._hold = hold
        self._layout: Layout | None = None
        self._arena: Arena | None = None
        self._thread = ToyThread(f"pdplane-{type(self).__name__}", hold)

    @property
    def layout(self) -> Layout:
        return _started(self._layout)

    @property
    def arena(self) -> Arena:
        return _started(self._arena)

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint((("model", f"toy-{self.options.seed}"),), (("toy", "1"),))

    def facts(self) -> Mapping[str, str | int | None]:
        return {"context_length": self.options.context_length, "vocab_size": VOCABULARY}

    @property
    def context_length(self) -> int:
        return self.options.context_length

    def trouble(self) -> str | None:
        """Return why the toy's thread does not go on, None while it does."""
        return self._thread.trouble()

    def blocks_needed(self, prompt_len: int, prefix_len: int = 0) -> dict[GroupId, int]:
        """Return how many blocks of each group a prompt's cache takes, from `prefix_len` on."""
        return blocks_needed(self.layout, prompt_len, prefix_len)

    def check_prompt_len(self, prompt_len: int) -> None:
        """Raise ConfigError for a prompt that is empty, too long, or larger than the arena."""
        if not 1 <= prompt_len <= self.options.context_length:
            raise ConfigError(f"a prompt has 1 to {self.options.context_length} tokens, not {prompt_len}")
        if not Pool(self.layout).fits(self.blocks_needed(prompt_len)):
            raise ConfigError(f"the prompt's {prompt_len} tokens do not fit in the arena")

    def check_token(self, token: int) -> None:
        """Raise ConfigError for a token that is no byte."""
        if not 0 <= token < VOCABULARY:
            raise ConfigError(f"token id {token} is outside the vocabulary 0..{VOCABULARY - 1}")

    def start(self) -> None:
        """Make the arena and start the thread."""
        if self._arena is None:
            self._layout = toy_layout(self.options)
            self._arena = Arena.zeros(self._layout.arena_bytes)
        self._thread.start()

    def close(self) -> None:
        """End every job and join the thread; idempotent."""
        self._thread.close()


class ToyPrefillEngine(ToyEngine):
    """Writes a prompt's KV chunk by chunk and reports it; each layer of the last chunk is reported on its own."""

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Mapping[GroupId, Sequence[int]],
        on_step: Callable[[range, range], None],
        key: int = 0,
        sampling: Sampling = GREEDY,
        on_reused: OnReused = lambda _tokens: None,
    ) -> ToyJob[Token]:
        """Begin a prompt; the future gives the first token, or the poison's RuntimeError."""
        on_reused(0)
        self.check_prompt_len(len(tokens))
        for token in tokens:
            self.check_token(token)
        return self._thread.submit(self._prefill(tuple(tokens), blocks, on_step, sampling))

    def prompt_caches(self) -> dict[str, int]:
        return {}

    def _prefill(
        self,
        tokens: tuple[int, ...],
        blocks: Mapping[GroupId, Sequence[int]],
        on_step: Callable[[range, range], None],
        sampling: Sampling,
    ) -> Turns[Token]:
        options, steps, start = self.options, range(len(self.layout.steps)), 0
        for start in range(0, len(tokens), options.chunk_tokens):
            chunk = tokens[start : start + options.chunk_tokens]
            if options.poison in chunk:
                raise RuntimeError(f"token {options.poison} is poison")
            if options.sleep in chunk:
                threading.Event().wait()
            write_kv(options, self.arena, self.layout, blocks[KV], chunk, start)
            self.turns += 1
            if start + len(chunk) < len(tokens):
                on_step(steps, range(start, start + len(chunk)))
            yield
        write_state(options, self.arena, self.layout, blocks, tokens)
        for step in steps:
            on_step(range(step, step + 1), range(start, len(tokens)))
        return _token(options, digest_of_prompt(options, tokens), (), sampling)


class ToyDecodeEngine(ToyEngine):
    """Reads a prompt's KV from its arena and draws one token a turn.

    A page that changes after it was reported as final makes the request fail.
    """

    def hold(self, prompt: Sequence[int]) -> None:
        """Keep nothing of earlier sequences."""

    def prompt_caches(self) -> dict[str, int]:
        return {}

    def assemble(
        self, prompt_len: int, blocks: Mapping[GroupId, Sequence[int]], prefix: EnginePrefix | None = None
    ) -> ToyAssembly:
        """Begin a sequence while its blocks are still being written."""
        self.check_prompt_len(prompt_len)
        return ToyAssembly(self.layout, self.arena, blocks)

    @property
    def concurrency(self) -> int:
        return self.options.concurrency

    def cache_nbytes(self, tokens: int) -> int:
        """Return the bytes of so many tokens' pages."""
        options = self.options
        return tokens * options.layers * options.heads * options.head_dim * 2

    def counts(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return how many turns there were."""
        return {"totals": {"turns": self.turns}}

    def decode(
        self,
        request: EngineDecodeRequest,
        on_token: Callable[[Token], None],
        on_assembled: Callable[[], None],
    ) -> ToyJob[FinishReason]:
        """Begin a sequence; the future gives "stop" or "length"."""
        self.check_prompt_len(len(request.prompt))
        return self._thread.submit(self._decode(request, on_token, on_assembled))

    def _decode(
        self,
        request: EngineDecodeRequest,
        on_token: Callable[[Token], None],
        on_assembled: Callable[[], None],
    ) -> Turns[FinishReason]:
        if isinstance(request.assembly, ToyAssembly):
            request.assembly.check()
        digest = digest_of_arena(self.options, self.arena, self.layout, request.blocks, request.prompt)
        on_assembled()
        token, answer = request.first, list[int]()
        while True:
            answer.append(token.id)
            on_token(token)
            if (reason := _reason(request, answer)) is not None:
                return reason
            self.turns += 1
            yield
            token = _token(self.options, digest, answer, request.sampling)


class ToyAssembly:
    """Copies each page at the moment when it is whole."""

    def __init__(self, layout: Layout, arena: Arena, blocks: Mapping[GroupId, Sequence[int]]) -> None:
        self._layout, self._arena, self._blocks = layout, arena, blocks[KV]
        self._lock = threading.Lock()
        self._arrivals = Arrivals(layout, [field.field_id for field in layout.fields_of(KV)], blocks[KV])
        self._dropped = False
        self.copies: dict[tuple[FieldId, int], bytes] = {}

    def landed(self, offsets: U64, lengths: U64) -> None:
        """Copy what these runs complete."""
        with self._lock:
            if self._dropped:
                return
            for field, slots in self._arrivals.add(offsets, lengths):
                for block in (self._blocks[slot] for slot in slots):
                    self.copies[field, block] = page(self._arena, self._layout, field, block).tobytes()

    def drop(self) -> None:
        """Forget the copies."""
        with self._lock:
            self._dropped = True
            self.copies.clear()

    def check(self) -> None:
        """Raise RuntimeError when the arena holds other bytes by now."""
        with self._lock:
            for (field, block), copy in self.copies.items():
                if page(self._arena, self._layout, field, block).tobytes() != copy:
                    raise RuntimeError(f"block {block} of {field} changed after it was final")


def _token(options: ToyOptions, digest: bytes, answer: Sequence[int], sampling: Sampling) -> Token:
    """Return the next token; each seed has its own. The likeliest are it and the letters after it."""
    if sampling.temperature > 0 and sampling.seed is not None:
        digest += sampling.seed.to_bytes(8, "little")
    token, logprob = next_token(options, digest, answer)
    likeliest = (((token + n) % VOCABULARY, logprob - n) for n in range(sampling.top_logprobs))
    return Token(id=token, logprob=logprob, top=tuple(likeliest))


def _reason(request: EngineDecodeRequest, answer: Sequence[int]) -> FinishReason | None:
    if answer[-1] in request.stop_ids:
        return "stop"
    return "length" if len(answer) >= request.max_tokens else None


def _started(value: T | None) -> T:
    if value is None:
        raise InternalError("the toy engine was not started")
    return value


@attrs.frozen
class ToyTokenizer:
    """A token is a UTF-8 byte; byte 0 is EOS."""

    eos_ids: frozenset[int] = frozenset({EOS})
    longest_token: int = 1

    def encode(self, text: str) -> list[int]:
        """Return the text's bytes."""
        return list(text.encode())

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        check: Callable[[str], None] = lambda _text: None,
    ) -> list[int]:
        """Return each message's role and content on a line, the rest as JSON, then the assistant's beginning."""
        lines = [
            f"{name}: {json.dumps(value)}\n" for name, value in (("tools", tools), ("settings", settings)) if value
        ]
        for message in messages:
            role = message["role"]
            lines.append(f"{(roles or {}).get(role, role)}: {message['content']}\n")
            lines += [f"{key}: {json.dumps(value)}\n" for key, value in message.items() if key not in _SAID]
        text = "".join(lines) + "assistant: "
        check(text)
        return self.encode(text)

    def detokenizer(self, *, marks: bool = False) -> ToyDetokenizer:
        """Return a detokenizer for one new sequence; it has no marks."""
        return ToyDetokenizer()

    def spell(self, token: int) -> bytes:
        """Return the token's byte."""
        return bytes([token & 0xFF])

    def speech(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None) -> ToySpeech:
        """Return what takes an answer apart: all of it is content."""
        return ToySpeech()


class ToySpeech:
    """A text as it is."""

    def add(self, text: str) -> Said:
        """Return the piece as content."""
        return Said(text)

    def finish(self) -> Said:
        """Return nothing, since nothing was held back."""
        return Said()


class ToyDetokenizer:
    """Holds back the bytes of an unfinished character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that is final with this byte; EOS has none."""
        return "" if token == EOS else self._decoder.decode(bytes([token & 0xFF]))

    def finish(self) -> str:
        """Return the text that was still held back."""
        return self._decoder.decode(b"", final=True)
