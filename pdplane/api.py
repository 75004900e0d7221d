"""What serving uses of a node, and what a node needs of an engine and its tokenizer.

Nothing here knows MLX, sockets or HTTP. The two daemons of `node` and the plain-Python nodes of the serving tests
implement the first half; the MLX engine and `pdplane.toy.engine` implement the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import attrs

from pdplane.errors import ConfigError, Why
from pdplane.ids import Endpoint, GroupId, Room
from pdplane.kv.arena import Arena
from pdplane.kv.layout import U64, Layout
from pdplane.messages import MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS
from pdplane.messages import Fingerprint
from pdplane.messages import TopLogprobs as TopLogprobs

T = TypeVar("T")

FinishReason = Literal["stop", "length"]

_LARGEST = 3.0e38  # what a float32 holds
_SAMPLING_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, _LARGEST),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, _LARGEST),
    "repetition_context_size": (0, 2**31 - 1),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "presence_context_size": (0, 2**31 - 1),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "frequency_context_size": (0, 2**31 - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}


@attrs.frozen
class Sampling:
    """How the tokens of one answer are chosen; names and meanings are mlx-lm's. The default is greedy.

    A penalty looks at the last `*_context_size` tokens of prompt and answer, 0: at all of them. With a `seed` the
    tokens are those of one mlx-lm process with that seed; without one they differ each time. Temperature 0 takes the
    likeliest token after biases and penalties, whatever the seed. Raises ConfigError that names the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """0 and 1: no bound."""
    top_k: int = 0
    """0: no bound."""
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    """0 and 1: none."""
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    seed: int | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens are told with each token."""

    def __attrs_post_init__(self) -> None:
        for name, (low, high) in _SAMPLING_BOUNDS.items():
            if not low <= getattr(self, name) <= high:  # NaN is refused too
                raise ConfigError(f"{name} must be within {low:g} and {high:g}, not {getattr(self, name)}")
        for token, bias in self.logit_bias:
            if not -_LARGEST <= bias <= _LARGEST:
                raise ConfigError(f"logit_bias of token {token} must be a finite number, not {bias}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be within 0 and 2**64 - 1, not {self.seed}")


GREEDY = Sampling()


# What serving sees of a node ------------------------------------------------------------------------------------


@attrs.frozen
class FirstToken:
    """The token that prefill computed from the prompt's last position; `logprob` is natural.

    `timings` as in `Finished`: `bootstrap_ms` (to decode's offer), `alloc_ms`, `prefill_ms`, `transfer_ms` (what was
    left of the push after the compute), `transfer_mb`, `transfer_gb_s` (from the first push on: with layerwise
    streaming most of that time is the compute's).
    """

    token: int
    logprob: float
    timings: Mapping[str, float] = attrs.Factory(dict)
    top: TopLogprobs = ()
    """As many as `Sampling.top_logprobs` asks for."""


@attrs.frozen
class Token:
    """One token of the answer and its natural logprob; `top` as in `FirstToken`."""

    id: int
    logprob: float
    top: TopLogprobs = ()


@attrs.frozen
class Finished:
    """How a decode leg ended. `timings` are in the unit of their names; serving passes them on as they are.

    Decode's: `alloc_ms`, `transfer_wait_ms` (from the offer to the delivered cache), `transfer_mb`, `assembly_ms` (from
    there to the first step that can run on it), `first_token_ms`, `decode_ms`. Serving makes metrics of those that
    `serving/metrics.py` names.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Mapping[str, float] = attrs.Factory(dict)


@attrs.frozen
class PrefillRequest:
    """Prefill's leg of one room."""

    room: Room
    tokens: tuple[int, ...]
    sampling: Sampling = GREEDY


@attrs.frozen
class DecodeRequest:
    """Decode's leg of one room; `prefill` is the address of prefill's rendezvous."""

    room: Room
    tokens: tuple[int, ...]
    prefill: Endpoint
    max_tokens: int
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY


class PrefillHandle(Protocol):
    """A running prefill leg."""

    @property
    def done(self) -> Future[FirstToken]:
        """Ends when the room has ended here.

        Errors: RoomFailed, PoolExhausted, ConfigError (a bad request), LocalProtocolError (the room is live).
        """

    @property
    def timings(self) -> Mapping[str, float]:
        """What was measured so far, also of a leg that failed; names as in `FirstToken`."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, as far as is known."""

    def cancel(self, text: str) -> None:
        """End the leg, from any thread; return at once, harmless after the end."""


class DecodeHandle(Protocol):
    """A running decode leg."""

    @property
    def timings(self) -> Mapping[str, float]:
        """What was measured so far, also of a leg that was stopped or failed; names as in `Finished`."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; known when the cache is whole."""

    @property
    def done(self) -> Future[Finished]:
        """Ends after the last call of `on_token`; errors as for prefill."""

    def cancel(self, text: str) -> None:
        """End the leg, from any thread; return at once, harmless after the end."""


class Node(Protocol):
    """What both daemons tell of themselves.

    Keys of `info` that serving relies on, all optional: `model_path`, `tokenizer_path`, `served_model_name`,
    `context_length`, `vocab_size`, `max_running_requests`, `tp_size`, `dp_size`, `bootstrap_host`,
    `bootstrap_port`. Whatever else stands there is shown by /server_info.
    """

    @property
    def ready(self) -> bool:
        """Requests can be served: started, registered, not draining, and no thread of ours has died."""

    @property
    def alive(self) -> bool:
        """Started, not closed, and no thread of ours has died."""

    def trouble(self) -> str | None:
        """Return which thread has ended or hangs; None while all go on, however busy, and before `start`.

        Never blocks.
        """

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""

    def info(self) -> dict[str, Any]:
        """Return addresses and sizes, JSON-able."""

    def statistics(self) -> dict[str, Any]:
        """Return every count, JSON-able; nested dictionaries of numbers.

        Asks the node's threads, so it may block for a moment. Raises LocalProtocolError before `start`, InternalError
        when they do not answer.
        """

    def start(self) -> None:
        """Bind, start the threads and come up. Raises ConfigError."""

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more, wait up to `drain_s` for what runs, end the rest, join every thread; idempotent."""


class PrefillService(Node, Protocol):
    """The prefill daemon."""

    def prefill(self, request: PrefillRequest) -> PrefillHandle:
        """Begin a prefill leg; never blocks. What it refuses decode hears of."""

    def refuse(self, request: PrefillRequest, why: Why) -> None:
        """Tell decode that this half will not be served; never blocks."""


class DecodeService(Node, Protocol):
    """The decode daemon."""

    def decode(self, request: DecodeRequest, on_token: Callable[[Token], None]) -> DecodeHandle:
        """Begin a decode leg; never blocks. What it refuses prefill hears of.

        `on_token` is called in order from one thread at a time.
        """

    def refuse(self, request: DecodeRequest, why: Why) -> None:
        """Tell prefill that this half will not be served; never blocks."""


# What a node needs of an engine ---------------------------------------------------------------------------------


class Detokenizer(Protocol):
    """Tokens of one sequence to text, piece by piece."""

    def add(self, token: int) -> str:
        """Return the text that is final with this token; empty in the middle of a character."""

    def finish(self) -> str:
        """Return the text that was still held back."""


@attrs.frozen
class ToolCall:
    """A tool that an answer calls; `arguments` are JSON."""

    id: str
    name: str
    arguments: str


@attrs.frozen
class Said:
    """A piece of a chat's answer taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def join_said(pieces: Iterable[Said]) -> Said:
    """Return several pieces as one."""
    said = list(pieces)
    return Said(
        "".join(piece.content for piece in said),
        "".join(piece.reasoning for piece in said),
        tuple(call for piece in said for call in piece.calls),
    )


class Speech(Protocol):
    """Takes the text of one answer apart as it grows."""

    def add(self, text: str) -> Said:
        """Take a piece of the text and return what is certain by now."""

    def finish(self) -> Said:
        """Return what was held back."""


class Tokenizer(Protocol):
    """Text to tokens and back; usable from any thread."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def longest_token(self) -> int:
        """Bytes of text that one token can stand for at most."""

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids, with the model's own special tokens."""

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        check: Callable[[str], None] = ...,
    ) -> list[int]:
        """Return token ids of a conversation, up to where the next answer begins.

        `settings` are variables of the chat template; `roles` are texts for the roles of a model without a template.
        `check` is called with the template's whole text before that becomes tokens, and raises for one too long.
        Raises ConfigError for what the template refuses or would not read.
        """

    def detokenizer(self, *, marks: bool = False) -> Detokenizer:
        """Return one for a new sequence; with `marks` its text holds the special tokens that a `Speech` looks for."""

    def spell(self, token: int) -> bytes:
        """Return the bytes that a token stands for, for special ones their names."""

    def speech(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None) -> Speech:
        """Return what takes the answer to this prompt apart; it knows these tools."""


class EngineJob(Protocol[T]):
    """Work on the engine's thread; `future` ends after its last turn, cancelled jobs with CancelledError."""

    @property
    def future(self) -> Future[T]:
        """The job's result or exception."""

    def cancel(self) -> None:
        """End at the next turn; any thread, harmless after the end."""


class EngineAssembly(Protocol):
    """A sequence's caches in the making; nothing of it is used before its request comes. Any thread may call it."""

    def landed(self, offsets: U64, lengths: U64) -> None:
        """Take note that these runs of the arena are final unless the room fails; never blocks."""

    def drop(self) -> None:
        """Give the caches up, since the room failed or its request needs none; harmless at any time."""


class EnginePrefix(Protocol):
    """The first tokens of a prompt whose KV a decode engine has kept, and keeps until `release`."""

    @property
    def tokens(self) -> int:
        """How many; a multiple of the layout's `prefix_granularity`, fewer than the prompt has."""

    def release(self) -> None:
        """Let the engine forget it, since no sequence will begin with it any more; idempotent, any thread."""


@attrs.frozen
class EngineDecodeRequest:
    """A sequence whose prompt's KV, behind `prefix`, lies in the arena; `blocks` are in slot order for each group.

    `max_tokens` counts the first token, which prefill drew; a token of `stop_ids` is reported and ends the sequence.
    `assembly` is what `DecodeEngine.assemble` gave for this prompt and these blocks; without one all is copied now.
    """

    prompt: tuple[int, ...]
    blocks: Mapping[GroupId, Sequence[int]]
    first: Token
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    assembly: EngineAssembly | None = None
    prefix: EnginePrefix | None = None
    key: int = 0
    """The job's name on all ranks of a split model."""


class Engine(Protocol):
    """What both roles' engines have in common. `layout`, `arena` and the rest are known after `start`."""

    @property
    def layout(self) -> Layout:
        """The cache layout of this rank."""

    @property
    def arena(self) -> Arena:
        """The one buffer that the layout describes."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What two engines must share."""

    def facts(self) -> Mapping[str, str | int | None]:
        """Return what /server_info says of the model: its paths, `context_length`, `vocab_size`."""

    @property
    def context_length(self) -> int | None:
        """The model's longest sequence in tokens, None when it has no such limit."""

    def blocks_needed(self, prompt_len: int, prefix_len: int = 0) -> dict[GroupId, int]:
        """Return how many blocks of each group a prompt's cache takes, from `prefix_len` on."""

    def trouble(self) -> str | None:
        """Return why the engine's thread does not go on, which names it; None while it does or is merely busy."""

    def check_prompt_len(self, prompt_len: int) -> None:
        """Raise ConfigError for a prompt that is empty, longer than the context, or larger than the whole arena."""

    def check_token(self, token: int) -> None:
        """Raise ConfigError for a token id outside the vocabulary."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Usable from any thread."""

    def start(self) -> None:
        """Load the model and make the arena; blocks. Raises ConfigError."""

    def close(self) -> None:
        """End every job and join the engine's thread; idempotent."""


OnReused: TypeAlias = Callable[[int], None]
"""Called with the number of the prompt's tokens that come from another prompt's cache."""


class PrefillEngine(Engine, Protocol):
    """Computes a prompt's KV into blocks of its arena."""

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Mapping[GroupId, Sequence[int]],
        on_step: Callable[[range, range], None],
        key: int = 0,
        sampling: Sampling = GREEDY,
        on_reused: OnReused = ...,
    ) -> EngineJob[Token]:
        """Begin a prompt; the future gives the token after it. Raises ConfigError at once for what cannot work.

        `on_step(steps, chunk)`: the pages that these tokens of the prompt complete are in the arena, in the fields of
        these layout steps (`PrefillRoom.push` takes both). All of it is told before the future gives the first token.
        `on_reused` is called once, before. `key` names the job on all ranks of a split model.
        """

    def prompt_caches(self) -> Mapping[str, int]:
        """Return what is kept of prompts for others that begin alike, as counts; empty when nothing ever is."""


class DecodeEngine(Engine, Protocol):
    """Continues from a prompt's KV in its arena."""

    def hold(self, prompt: Sequence[int]) -> EnginePrefix | None:
        """Return the longest beginning of a prompt whose KV is kept, if any; its caller releases it."""

    def prompt_caches(self) -> Mapping[str, int]:
        """Return what is kept of sequences, as in `PrefillEngine`."""

    def assemble(
        self, prompt_len: int, blocks: Mapping[GroupId, Sequence[int]], prefix: EnginePrefix | None = None
    ) -> EngineAssembly:
        """Begin a sequence while its blocks are still being written. Raises ConfigError for what cannot work."""

    @property
    def concurrency(self) -> int:
        """How many sequences may run at once."""

    def cache_nbytes(self, tokens: int) -> int:
        """Return how many bytes the caches of one running sequence take at that many tokens, prompt and answer."""

    def counts(self) -> Mapping[str, int | Mapping[str, int]]:
        """Return how many sequences there are, by how they run; `totals` are since the start."""

    def decode(
        self,
        request: EngineDecodeRequest,
        on_token: Callable[[Token], None],
        on_assembled: Callable[[], None],
    ) -> EngineJob[FinishReason]:
        """Begin a sequence and report each token, the first one included. Raises ConfigError for what cannot work.

        `on_assembled` says that the blocks were copied out and may be freed; a job that ends without it needs them
        no longer either. The future gives the finish reason.
        """
