"""The commands of the WP30 cache worker: a frame in, the fields that follow the common three out.

The order in which fields are looked at is the reference's: codec, payload, prefix, query. A missing field is a KeyError
whose text is the field's name in quotes, as peers have seen it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import attrs

from pdplane.errors import IncompatibleCache
from pdplane.wire.json_value import Json
from pdplane.workers import codecs
from pdplane.workers.lossy import LOSSY
from pdplane.workers.receiver import Receiver
from pdplane.workers.wp30 import Frame

DEFAULT_MAX_TOKENS = 48
_MAX_TOKEN = 2**31 - 1
_MAX_TEXT = 1024


@attrs.frozen(eq=False)
class Reply:
    """A reply's fields and payload; `timed` asks for `server_ms` at the end."""

    header: dict[str, Json]
    payload: bytes | bytearray | memoryview = b""
    timed: bool = True


class Commands:
    """Answers frames out of a receiver model; used by many threads."""

    def __init__(self, receiver: Receiver, expanded_bytes: int) -> None:
        self._receiver = receiver
        self._expanded_bytes = expanded_bytes
        self._table: Mapping[str, Callable[[Frame], Reply]] = {
            "ping": self._ping,
            "run_text": self._run_text,
            "run_cache": self._run_cache,
            "prefill_cache": self._prefill_cache,
            "prefill_time": self._prefill_time,
            "shutdown": _refuse_shutdown,
        }

    def run(self, frame: Frame) -> Reply:
        """Answer one frame. Raises IncompatibleCache, and ValueError, TypeError, KeyError or a PdplaneError."""
        name = frame.header.get("cmd")
        command = self._table.get(name) if isinstance(name, str) else None
        return Reply({"error": "unknown cmd"}) if command is None else command(frame)

    def _ping(self, _frame: Frame) -> Reply:
        receiver = self._receiver
        return Reply({"model_revision": receiver.model_revision, "config_hash": receiver.config_hash})

    def _run_text(self, frame: Frame) -> Reply:
        run = self._receiver.run_text(_tokens(frame, "token_ids"), _max_tokens(frame))
        return Reply({
            "text": run.text, "prefill_ms": run.prefill_ms, "ttft_ms": run.ttft_ms, "decode_ms": run.decode_ms,
            "output_tokens": list(run.tokens), "peak_bytes": run.peak_bytes,
        })  # fmt: skip

    def _run_cache(self, frame: Frame) -> Reply:
        codec, lossy = _codec(frame)
        began = time.perf_counter()
        data = codecs.decode(codec, frame.payload, self._expanded_bytes)
        decompress_ms = _since(began)
        file = self._receiver.check_cache(data, _prefix_hash(frame), lossy)
        checked_ms = _since(began)
        run = self._receiver.run_cache(file, _tokens(frame, "query_ids"), _max_tokens(frame))
        return Reply({
            "status": "success", "text": run.text, "decompress_ms": decompress_ms, "load_ms": checked_ms + run.load_ms,
            "ttft_ms": checked_ms + run.ttft_ms, "decode_ms": run.decode_ms, "output_tokens": list(run.tokens),
            "cache_tensor_bytes": run.tensor_bytes, "peak_bytes": run.peak_bytes,
        })  # fmt: skip

    def _prefill_cache(self, frame: Frame) -> Reply:
        tokens = _tokens(frame, "token_ids")
        codec, lossy = _codec(frame)
        found = self._receiver.prefill_cache(tokens, _text(frame, "document_id", "?"), lossy)
        began = time.perf_counter()
        payload = codecs.encode(codec, found.data, found.width)
        header: dict[str, Json] = {
            "prefill_ms": found.prefill_ms, "serialize_ms": _since(began), "prefix_hash": found.prefix_hash,
        }  # fmt: skip
        return Reply(header, payload, timed=False)

    def _prefill_time(self, frame: Frame) -> Reply:
        return Reply({"prefill_ms": self._receiver.prefill_time(_tokens(frame, "token_ids"))})


def _refuse_shutdown(_frame: Frame) -> Reply:
    raise ValueError("shutdown is for clients on this machine")


def _codec(frame: Frame) -> tuple[str, str]:
    """The codec of the bytes and the lossy form of the cache inside, `none` for either when it is not asked for."""
    name = frame.header.get("codec", "none")
    if isinstance(name, str) and name in LOSSY:
        return "none", name
    if not isinstance(name, str) or name not in codecs.LOSSLESS:
        raise ValueError(f"codec {name}")
    return name, "none"


def _prefix_hash(frame: Frame) -> str | None:
    found = frame.header.get("prefix_hash")
    if found is not None and not isinstance(found, str):
        raise IncompatibleCache("prefix_hash", "a text", str(found)[:80])
    return found


def _tokens(frame: Frame, key: str) -> tuple[int, ...]:
    found = frame.header[key]
    if not isinstance(found, list):
        raise TypeError(f"{key} must be a list of token ids")
    tokens = tuple(token for token in found if type(token) is int and 0 <= token <= _MAX_TOKEN)
    if len(tokens) != len(found):
        raise TypeError(f"{key} must hold whole numbers of 0..{_MAX_TOKEN} only")
    return tokens


def _max_tokens(frame: Frame) -> int:
    found = frame.header.get("max_tokens")
    if found is None:
        return DEFAULT_MAX_TOKENS
    if type(found) is not int or not 1 <= found <= _MAX_TOKEN:
        raise ValueError("max_tokens must be a whole number above zero")
    return found


def _text(frame: Frame, key: str, default: str) -> str:
    found = frame.header.get(key, default)
    if not isinstance(found, str) or len(found) > _MAX_TEXT:
        raise TypeError(f"{key} must be a text of up to {_MAX_TEXT} characters")
    return found


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
