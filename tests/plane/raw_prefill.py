"""A prefill rank of raw frames behind a scripted rendezvous; its bytes go over the real transport."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from typing import Self

import attrs
from aiohttp import web

from pdplane import wire
from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint, Generation, GroupId, Life, Rank, Room, SessionId, new_life
from pdplane.kv.arena import Arena
from pdplane.kv.copies import plan_copies, plan_route
from pdplane.kv.layout import Layout
from pdplane.messages import Notice, Preallocation, Push, Registered, Status, StatusCode, Window
from pdplane.transport.registry import open_sender
from pdplane.transport.reports import Pushed, Report
from tests.raw_peers import RawRouter
from tests.waiting import PATIENCE_S


@attrs.frozen
class Offer:
    """A window notice and the pre-allocation behind it."""

    window: Window
    preallocation: Preallocation

    @property
    def generation(self) -> Generation:
        return self.window.generation


class RawPrefill:
    """Decode planes find it at `rendezvous`; it answers what a test makes it say."""

    def __init__(self, layout: Layout, *, host: str = "127.0.0.1") -> None:
        self.layout, self.life = layout, Life(new_life())
        self.router = RawRouter()
        self._http = HttpThread("pdplane-http-raw")
        self._http.start()
        app = web.Application()
        app.router.add_get("/route", self._route)
        self.rendezvous = self._http.serve(app, "127.0.0.1", 0)
        self._host = host

    async def _route(self, request: web.Request) -> web.Response:
        if request.query["engine_rank"] == "-1":
            layout = wire.encode_layout(self.layout).decode()
            return web.json_response({"prefill_tp_size": 1, "prefill_dp_size": 1, "cache_layout": layout, "pdplane": 1})
        port = self.router.endpoint.port
        return web.json_response(
            {"rank_ip": self._host, "rank_port": port, "router_port": port, "prefill_life": self.life, "pdplane": 1}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self.router.__exit__()

    def accept(self) -> SessionId:
        """Hear hello and registration, and accept them."""
        self.router.receive_until(b"hello")
        registration = wire.decode_registration(self.router.receive())
        self.say(Registered(registration.session, self.life))
        return registration.session

    def hear_offer(self) -> Offer:
        window = wire.decode_notice(self.router.receive_until(b"window"))
        assert isinstance(window, Window)
        return Offer(window, wire.decode_preallocation(self.router.receive()))

    def say(self, notice: Notice) -> None:
        self.router.answer(wire.encode_notice(notice))

    def report(self, room: Room, code: StatusCode, token: int = -1) -> None:
        self.router.answer(wire.encode_status(Status(room, code, Rank(0), token)))

    def push(self, offer: Offer, arena: Arena, source: Mapping[GroupId, tuple[int, ...]]) -> None:
        """Write the whole window, and wait for the acknowledgement."""
        session, reports = offer.preallocation.session, queue.Queue[Report]()
        manifest = wire.decode_manifest(offer.preallocation.manifest)
        one = {"prefill_tp": 1, "prefill_rank": 0, "decode_tp": 1, "decode_rank": 0}
        route = plan_route(self.layout, self.layout, **one)
        sender = open_sender(
            "tcp",
            peer=Endpoint.parse(session),
            session=session,
            prefill_rank=Rank(0),
            prefill_life=self.life,
            arena=arena,
            report=reports.put,
        )
        sender.start()
        copies = plan_copies(route, self.layout, source, self.layout, manifest, None)
        sender.submit(Push(offer.preallocation.room, offer.generation, 0, copies))
        assert any(isinstance(report, Pushed) for report in _until_push_ends(reports))
        sender.close()


def _until_push_ends(reports: queue.Queue[Report]) -> Iterator[Report]:
    while True:
        report = reports.get(timeout=PATIENCE_S)
        yield report
        if hasattr(report, "push"):
            return
