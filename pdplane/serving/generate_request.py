"""The body of POST /generate as a checked value.

The shape is sglang's: `text` or `input_ids`, `sampling_params`, `stream`, `return_logprob`, `rid`, `bootstrap_host`,
`bootstrap_port`, `bootstrap_room`. Ours on top: `messages` (a conversation for the model's chat template) and
`max_tokens`. What would change the answer and is not supported is refused, never ignored.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import MAX_ROOM, Endpoint, Room

DEFAULT_BOOTSTRAP_PORT = 8998
MAX_TOKENS_LIMIT = 1 << 20
MAX_STOPS = 16
MAX_ID_LENGTH = 4096

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}\Z")
_Check = Callable[[Any], bool]

_SAMPLING_READ = {"max_new_tokens", "stop", "stop_token_ids", "ignore_eos"}
# Sampling settings that are accepted only with the value under which they do nothing, since decoding is greedy.
_SAMPLING_NEUTRAL: Mapping[str, _Check] = {
    "temperature": lambda value: _is_number(value) and value == 0,
    "n": lambda value: _is_number(value) and value == 1,
    "min_new_tokens": lambda value: _is_number(value) and value == 0,
    "frequency_penalty": lambda value: _is_number(value) and value == 0,
    "presence_penalty": lambda value: _is_number(value) and value == 0,
    "repetition_penalty": lambda value: _is_number(value) and value == 1,
    "skip_special_tokens": lambda value: value is True,
    "spaces_between_special_tokens": lambda value: isinstance(value, bool),
    "no_stop_trim": lambda value: value is False,
    # Greedy decoding takes the likeliest token whatever these say.
    "top_p": lambda value: _is_number(value) and 0 < value <= 1,
    "top_k": lambda value: type(value) is int and (value == -1 or value >= 1),
    "min_p": lambda value: _is_number(value) and 0 <= value <= 1,
    "sampling_seed": lambda value: type(value) is int,
}
_TOP_NEUTRAL: Mapping[str, _Check] = {
    "n": lambda value: _is_number(value) and value == 1,
    "temperature": lambda value: _is_number(value) and value == 0,
    "echo": lambda value: value is False,
    "prompt_logprobs": lambda value: value is False or (_is_number(value) and value == 0),
    "logprob_start_len": lambda value: type(value) is int and value == -1,
    "top_logprobs_num": lambda value: type(value) is int and value == 0,
    "return_hidden_states": lambda value: value is False,
}
_TOP_ABSENT = (
    "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params", "token_ids_logprob",
    "custom_logit_processor", "top_logprobs", "logprobs",
)  # fmt: skip


@attrs.frozen
class GenerateRequest:
    """What a client asks of one leg.

    Exactly one of `text`, `input_ids` and `messages` is set. `max_tokens` is None when the client left it open.
    """

    request_id: str
    room: Room
    bootstrap: Endpoint | None
    text: str | None
    input_ids: tuple[int, ...] | None
    messages: tuple[Mapping[str, str], ...] | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    return_logprob: bool


def read_generate(data: bytes, bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT) -> GenerateRequest:
    """Parse and check a body. Raises ConfigError that names the field.

    `bootstrap_port` stands in where the gateway names none.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError("the body is not JSON") from error
    if not isinstance(body, dict):
        raise ConfigError("the body is not a JSON object")
    sampling = body.get("sampling_params")
    if sampling is None:
        sampling = {}
    if not isinstance(sampling, dict):
        raise ConfigError("sampling_params is not an object: one prompt a request")
    _refuse_what_we_cannot(body, sampling)
    text, input_ids, messages = _prompt(body)
    return GenerateRequest(
        request_id=_request_id(body),
        room=_room(body),
        bootstrap=_bootstrap(body, bootstrap_port),
        text=text,
        input_ids=input_ids,
        messages=messages,
        max_tokens=_max_tokens(body, sampling),
        stop=_stop(sampling),
        stop_ids=frozenset(_ids(sampling, "stop_token_ids") or ()),
        ignore_eos=_flag(sampling, "ignore_eos"),
        stream=_flag(body, "stream"),
        return_logprob=_flag(body, "return_logprob"),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_what_we_cannot(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        if name not in _SAMPLING_READ and name not in _SAMPLING_NEUTRAL and value is not None:
            raise ConfigError(f"sampling_params.{name[:80]} is not supported")
    _check_neutral(sampling, _SAMPLING_NEUTRAL, "sampling_params.")
    _check_neutral(body, _TOP_NEUTRAL, "")
    for name in _TOP_ABSENT:
        if body.get(name) not in (None, False, [], {}, ""):
            raise ConfigError(f"{name} is not supported")


def _check_neutral(given: Mapping[str, Any], checks: Mapping[str, _Check], prefix: str) -> None:
    for name, check in checks.items():
        value = given.get(name)
        if value is not None and not check(value):
            raise ConfigError(
                f"{prefix}{name} {_short(value)} is not supported: decoding is greedy, one answer a request"
            )


def _short(value: object) -> str:
    return json.dumps(value)[:60]


def _prompt(
    body: Mapping[str, Any],
) -> tuple[str | None, tuple[int, ...] | None, tuple[Mapping[str, str], ...] | None]:
    given = [name for name in ("text", "input_ids", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of text, input_ids and messages, not {' and '.join(given) or 'none of them'}")
    if given == ["input_ids"]:
        return None, _ids(body, "input_ids"), None
    if given == ["messages"]:
        return None, None, _messages(body["messages"])
    if not isinstance(body["text"], str):
        raise ConfigError("text is not a string: one prompt a request")
    try:
        body["text"].encode()
    except UnicodeEncodeError as error:
        raise ConfigError("text holds half a surrogate pair") from error
    return body["text"], None, None


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError("messages is not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError("each message has a role and a content, both strings")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _ids(body: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise ConfigError(f"{name} is not a list of token ids: one prompt a request")
    return tuple(value)


def _max_tokens(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> int | None:
    given = [value for value in (sampling.get("max_new_tokens"), body.get("max_tokens")) if value is not None]
    for value in given:
        if type(value) is not int or not 1 <= value <= MAX_TOKENS_LIMIT:
            raise ConfigError(f"max_tokens {_short(value)} is not a whole number from 1 to {MAX_TOKENS_LIMIT}")
    if len(set(given)) > 1:
        raise ConfigError("max_tokens and sampling_params.max_new_tokens differ")
    return given[0] if given else None


def _stop(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    value = sampling.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise ConfigError("stop is not a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"stop has more than {MAX_STOPS} strings")
    return tuple(stops)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is not true or false")
    return bool(value)


def _request_id(body: Mapping[str, Any]) -> str:
    value = body.get("rid")
    if value is None:
        return uuid.uuid4().hex
    if not isinstance(value, str) or len(value) > MAX_ID_LENGTH:
        raise ConfigError(f"rid is not a string of at most {MAX_ID_LENGTH} characters")
    return value


def _room(body: Mapping[str, Any]) -> Room:
    value = body.get("bootstrap_room")
    if value is None:
        raise ConfigError("bootstrap_room is missing: it names the pair of requests")
    if type(value) is not int or not 0 <= value <= MAX_ROOM:
        raise ConfigError(f"bootstrap_room {_short(value)} is not a whole number from 0 to 2**63-1")
    return Room(value)


def _bootstrap(body: Mapping[str, Any], default_port: int) -> Endpoint | None:
    host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
    if host is None:
        return None
    if not isinstance(host, str) or not _HOST.match(bare := host.strip("[]")):
        raise ConfigError("bootstrap_host is not a host name or address")
    if port is None:
        return Endpoint(bare, default_port)
    if type(port) is not int or not 1 <= port <= 65535:
        raise ConfigError(f"bootstrap_port {_short(port)} is not a port")
    return Endpoint(bare, port)
