"""CURVE for the native control sockets: both ends own the one key pair that the secret gives, checked by ZAP.

Source: ZeroMQ RFC 26 (CurveZMQ) and RFC 27 (ZAP).
"""

from __future__ import annotations

import hmac
from typing import Never

import zmq
from zmq.utils import z85

from pdplane.security import Secret

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"pdplane"


class Curve:
    """Puts the key pair on sockets."""

    def __init__(self, secret: Secret) -> None:
        self._private = z85.encode(secret.curve_key())
        self.public = zmq.curve_public(self._private)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only clients that prove to own the pair; needs a `Gatekeeper` in the same context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def join(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)


class Gatekeeper:
    """Answers ZAP requests: the one key may come in. A source of the reactor that causes no events."""

    def __init__(self, curve: Curve) -> None:
        self._key = z85.decode(curve.public)
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None, "bind first"
        return self._socket

    def bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ENDPOINT)

    def receive(self) -> list[Never]:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
            zmq.NOBLOCK
        )
        known = mechanism == b"CURVE" and credentials and hmac.compare_digest(credentials[0], self._key)
        code, text = (b"200", b"OK") if known else (b"400", b"another key")
        self.socket.send_multipart([version, request, code, text, b"", b""], zmq.NOBLOCK)
        return []

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
