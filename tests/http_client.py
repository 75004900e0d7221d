"""A blocking HTTP exchange for tests, with nothing of the product in it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import attrs

from pdplane.ids import Endpoint

TIMEOUT_S = 30


@attrs.frozen
class Answer:
    """What a server said."""

    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def json(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The `data:` lines of a stream; JSON ones parsed."""
        found = [line.removeprefix("data: ") for line in self.body.split("\n\n") if line]
        return [text if text == "[DONE]" else json.loads(text) for text in found]


def ask(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: str | bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request; a mapping is sent as JSON."""
    payload = json.dumps(body) if isinstance(body, Mapping) else body
    with closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)) as connection:
        connection.request(method, path, payload, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read().decode())


def stream(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Generator[str, None, None]:
    """POST, and yield each `data:` line as it comes; closing the generator closes the connection."""
    with closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            text = line.decode().strip()
            if text:
                yield text.removeprefix("data: ")
