"""The rendezvous of the older generation, played: its answers to the letter, its 500s included.

For tests only: it trusts everybody and forgets nothing. Rules: docs/legacy_wire.md section 2.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from pdplane import wire
from pdplane.errors import WireError
from pdplane.ids import Endpoint

_TIMEOUT_S = 10.0
_SYNC = "/route?engine_rank=-1&target_dp_group=-1"
_BROKEN = "500 Internal Server Error\n\nServer got itself in trouble"


class LegacyRendezvous:
    """Serves /health and /route on loopback while its `with` lasts; `ranks` is the table, `(group, rank)` first."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.world_size: int | None = None
        self.dp_size: int | None = None
        self.layout: str | None = None
        self.ranks: dict[tuple[int, int], dict[str, Any]] = {}
        self._address = (host, port)

    def __enter__(self) -> Self:
        self._server = _Server(self._address, partial(_Handler, self))
        self.endpoint = Endpoint(self._address[0], self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="legacy-rendezvous")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def put(self, body: dict[str, Any]) -> None:
        """Register a rank; any exception is the legacy server's 500."""
        world_size, dp_size = body["world_size"], body["dp_size"]
        address = {"rank_ip": body["rank_ip"], "rank_port": int(body["rank_port"])}
        engine_rank, role, text = int(body["engine_rank"]), body["role"], body["cache_layout"]
        layout = wire.encode_layout(wire.decode_layout(text.encode("ascii"))).decode("ascii")
        if self.layout not in (None, layout):
            raise ValueError("another layout")
        self.layout = layout
        self.world_size = world_size if self.world_size is None else self.world_size
        self.dp_size = dp_size if self.dp_size is None else self.dp_size
        tp_size = world_size // dp_size
        if role == "Prefill":
            self.ranks[engine_rank // tp_size, engine_rank % tp_size] = address

    def get(self, engine_rank: int, dp_group: int) -> dict[str, Any]:
        """Return the answer to a question for a rank, or for all at once; any exception is the legacy server's 500."""
        if engine_rank == dp_group == -1:
            return {"prefill_tp_size": self.world_size, "prefill_dp_size": self.dp_size, "cache_layout": self.layout}
        return self.ranks[dp_group, engine_rank]


class _Server(ThreadingHTTPServer):
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing of a client that left before its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # as the server gave it


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, table: LegacyRendezvous, *args: Any) -> None:  # noqa: ANN401  (the server's own three)
        self.table = table
        super().__init__(*args)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/health":
            self._answer(200, "OK")
            return
        if url.path != "/route":
            self._answer(404, "404: Not Found")
            return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if not query.get("engine_rank") or not query.get("target_dp_group"):
            self._answer(400, "Missing inputs for bootstrap server.")
            return
        try:
            found = self.table.get(int(query["engine_rank"]), int(query["target_dp_group"]))
        except (ValueError, KeyError):
            self._answer(500, _BROKEN)
            return
        self._answer(200, json.dumps(found), "application/json; charset=utf-8")

    def do_PUT(self) -> None:
        try:
            self.table.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, WireError):
            self._answer(500, _BROKEN)
            return
        self._answer(200, "OK")

    def do_POST(self) -> None:
        if urlsplit(self.path).path == "/route":
            self._answer(405, "Method not allowed", "application/json; charset=utf-8")
        else:
            self._answer(405, "405: Method Not Allowed")

    do_DELETE = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        """Print nothing on stderr."""

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def put_rank(rendezvous: Endpoint, body: dict[str, Any]) -> tuple[int, str]:
    """PUT a rank's registration as the `requests` library does; return status and text of the answer."""
    headers = {
        "User-Agent": "python-requests/2.32.4",
        "Accept-Encoding": "gzip, deflate",
        "Accept": "*/*",
        "Content-Type": "application/json",
    }
    return _ask(rendezvous, "PUT", "/route", json.dumps(body), headers)


def look_up(rendezvous: Endpoint, room: int) -> tuple[int, int, bytes, list[Endpoint]]:
    """Ask as a legacy decode does; return prefill's tp size, the room's group, the layout, the group's addresses.

    Raises ConnectionError for anything but 200, as a legacy decode fails the room then.
    """
    sync = _json(rendezvous, _SYNC)
    tp_size = sync["prefill_tp_size"] // sync["prefill_dp_size"]
    group = room % sync["prefill_dp_size"]
    found = [_json(rendezvous, f"/route?engine_rank={rank}&target_dp_group={group}") for rank in range(tp_size)]
    addresses = [Endpoint(answer["rank_ip"], int(answer["rank_port"])) for answer in found]
    return tp_size, group, sync["cache_layout"].encode("ascii"), addresses


def _json(rendezvous: Endpoint, path: str) -> dict[str, Any]:
    status, text = _ask(rendezvous, "GET", path, None, {"User-Agent": "python-requests/2.32.4"})
    if status != 200:
        raise ConnectionError(f"{rendezvous} answered {status}: {text}")
    found: dict[str, Any] = json.loads(text)
    return found


def _ask(at: Endpoint, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(at.host, at.port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
