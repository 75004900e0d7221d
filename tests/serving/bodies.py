"""Request bodies."""

from __future__ import annotations

from typing import Any


def generate(text: str | None = "hello", **changes: object) -> dict[str, Any]:
    """What a gateway sends to either leg."""
    body: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}
    if text is not None:
        body["text"] = text
    return body | changes
