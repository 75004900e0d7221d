"""Request bodies, and the model that they are read against."""

from __future__ import annotations

from typing import Any

from pdplane.serving.asked import Served
from pdplane.toy.engine import ToyTokenizer

TOY = Served(
    name="toy",
    tokenizer=ToyTokenizer(),
    vocab_size=256,
    context_length=100,
    bootstrap_port=8998,
)

_PLACE: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}


def generate(text: str | None = "hello", **changes: object) -> dict[str, Any]:
    """What a gateway sends to either leg of /generate."""
    return _PLACE | ({} if text is None else {"text": text}) | changes


def chat(content: str = "hi", **changes: object) -> dict[str, Any]:
    """What a gateway sends to either leg of /v1/chat/completions."""
    return _PLACE | {"model": "toy", "messages": [{"role": "user", "content": content}]} | changes


def completion(prompt: object = "hi", **changes: object) -> dict[str, Any]:
    """What a gateway sends to either leg of /v1/completions."""
    return _PLACE | {"model": "toy", "prompt": prompt} | changes
