"""PrefillPlane: a prefill rank for a program with pages to send."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pdplane import wire
from pdplane.control.channels import Context, Curve, Gatekeeper, Reading, RouterChannel, open_context
from pdplane.control.connections import Connections
from pdplane.control.http_thread import HttpThread
from pdplane.control.legacy import LegacyPrefillChannel
from pdplane.control.lookup import Announcement, Announcer
from pdplane.control.reactor import Reactor
from pdplane.control.rendezvous import rendezvous_app
from pdplane.errors import Cause, ConfigError, LocalProtocolError, Why
from pdplane.ids import Endpoint, SessionId
from pdplane.kv.arena import Arena, ArenaMemory
from pdplane.kv.copies import Copies, dp_group
from pdplane.kv.layout import Layout
from pdplane.machine import actions, events
from pdplane.machine.actions import PrefillSettings
from pdplane.machine.prefill import PrefillMachine
from pdplane.messages import Fingerprint, TopLogprobs, is_legacy
from pdplane.plane import rooms as told
from pdplane.plane.config import PrefillConfig, log_legacy
from pdplane.plane.life import PlaneLife
from pdplane.plane.rooms import PrefillRoom, RoomWindow, broken, check_room, settle
from pdplane.plane.senders import Senders


class PrefillPlane(PlaneLife[events.PrefillEvent, actions.PrefillAction, PrefillRoom]):
    """Registers decode ranks, takes their offers of blocks, and pushes pages into them.

    `with PrefillPlane(config, layout=layout, arena=arena) as plane:` starts it; the constructor opens nothing.
    `arena` is an Arena or anything that `Arena` takes. Thread-safe: everything posts to the reactor. `http` shares an
    HTTP thread; without it the plane has its own. Raises ConfigError for what cannot work.
    """

    role = "prefill"

    def __init__(
        self,
        config: PrefillConfig,
        *,
        layout: Layout,
        arena: Arena | ArenaMemory,
        fingerprint: Fingerprint | None = None,
        http: HttpThread | None = None,
    ) -> None:
        super().__init__(config, layout, arena, http)
        self.config = config
        self._fingerprint = fingerprint or Fingerprint()
        self._senders = Senders(config, self.arena, self.life, self._post)
        curve = Curve(config.secret) if config.secret else None
        self._gate = Gatekeeper(curve) if curve else None
        self._connections = Connections(self._rejected)
        common = self._rejected, self._connections, Reading(self._may_offer, wire.encode_layout(layout))
        self._router = RouterChannel(*common, curve)
        self._legacy = LegacyPrefillChannel(*common, self._do) if config.speaks_legacy else None
        self._context: Context | None = None
        self._announcer: Announcer | None = None
        self._control: Endpoint | None = None
        self._rendezvous: Endpoint | None = None
        self.legacy_control: Endpoint | None = None

    def _shut(self, text: str) -> None:
        if self._announcer:
            self._announcer.stop()
        if self._reactor:
            self._post(events.Closing(text))
            self._reactor.close()
        self._senders.close_all()
        self._handles.fail_all(LocalProtocolError(text, Cause.CLOSING))
        self._router.close()
        if self._legacy:
            self._legacy.close()
        if self._gate:
            self._gate.close()
        if self._context is not None:
            self._context.term()
        if self._owns_http:
            self._http.close()

    # ---- rooms

    def open(self, room: int, *, prompt_len: int | None = None, prompt_hash: str | None = None) -> PrefillRoom:
        """Wait for decode's offer of this room.

        With `prompt_len` and `prompt_hash` (see `hash_prompt`) an offer for another prompt is refused. A room that is
        live already ends the new handle's futures with LocalProtocolError. Raises ConfigError for a room that decode
        ranks will ask of another data-parallel group.
        """
        self._check_open()
        number, config = check_room(room), self.config
        if (group := dp_group(number, config.dp_size)) != config.dp_rank:
            raise ConfigError(f"room {number} belongs to data-parallel group {group}, this is group {config.dp_rank}")
        ticket = self._handles.ticket()

        def push(copies: Mapping[SessionId, Copies]) -> None:
            self._post(events.PushRequested(number, ticket, copies))

        def finish(
            token: int, logprob: float | None, candidates: Sequence[int] | None, cached: int, top: TopLogprobs
        ) -> None:
            bits = None if logprob is None else struct.pack("<d", logprob)
            chosen = tuple(candidates) if candidates else None
            self._post(events.RoomFinished(number, ticket, token, bits, chosen, cached, top))

        def cancel(why: Why) -> None:
            self._post(events.RoomCancelled(number, ticket, why))

        handle = PrefillRoom(number, ticket, self.layout, push, finish, cancel)
        self._handles.add(handle)
        self._post(events.PrefillRequested(number, ticket, prompt_len, prompt_hash))
        return handle

    def drain(self, text: str = "prefill is draining") -> None:
        """Tell decode that no new rooms are taken, so that they fail at once; those that were opened here go on."""
        if self._state == "open":
            self._post(events.Draining(text))

    # ---- state

    @property
    def rendezvous(self) -> Endpoint:
        """Where decode ranks look this one up. Raises LocalProtocolError before `start`."""
        return self._bound(self._rendezvous)

    @property
    def control(self) -> Endpoint:
        """Where native decode ranks connect to. Raises LocalProtocolError before `start`."""
        return self._bound(self._control)

    @property
    def ready(self) -> bool:
        """Whether peers can find and reach this rank."""
        return self.alive and self._announcer is not None and self._announcer.is_registered

    def _more_counts(self) -> dict[str, Any]:
        return {"data_connections": len(self._senders), "data": self._senders.counts()}

    def _more_trouble(self) -> str | None:
        return "the announcer has ended" if self._announcer is not None and self._announcer.has_ended else None

    # ---- the reactor's thread

    def _perform(self, action: actions.PrefillAction) -> Iterable[events.PrefillEvent]:
        match action:
            case actions.Send():
                return self._channel_of(action.identity).send(action)
            case actions.StartPush():
                return self._senders.push(action)
            case actions.OpenData():
                return self._senders.open(action)
            case actions.CloseData(session, life):
                self._senders.close(session, life)
            case actions.CancelPush():
                self._senders.cancel(action)
            case _:
                self._tell(action)
        return ()

    def _channel_of(self, identity: bytes) -> RouterChannel | LegacyPrefillChannel:
        return self._legacy if self._legacy is not None and is_legacy(identity) else self._router

    def _do(self, work: Callable[[], Iterable[events.PrefillEvent]]) -> None:
        if self._reactor is not None:
            self._reactor.do(work)

    def _may_offer(self, identity: bytes, session: SessionId) -> bool:
        assert isinstance(self._machine, PrefillMachine)
        return self._machine.may_offer(identity, session)

    def _tell(self, action: actions.PrefillAction) -> None:
        assert isinstance(action, actions.Offered | actions.Succeed | actions.Release | actions.Fail)
        handle = self._handles.get(action.ticket)
        if handle is None:
            return
        match action:
            case actions.Offered(number, ticket, prefix_len, prompt_len, destinations):
                window = RoomWindow(prefix_len, prompt_len, destinations)
                self._handles.record(told.RoomWindowed(number, ticket, window))
                settle(handle.window, window)
            case actions.Succeed(number, ticket):
                self._handles.record(told.RoomSucceeded(number, ticket))
                settle(handle.done, None)
            case actions.Fail(number, ticket, error):
                self._handles.record(told.RoomEnded(number, ticket, error))
                handle.fail(error)
                if isinstance(error, LocalProtocolError):  # refused before it began: there is nothing to release
                    self._release(handle)
            case actions.Release(number, ticket):
                self._handles.record(told.RoomReleased(number, ticket))
                self._release(handle)

    def _release(self, handle: PrefillRoom) -> None:
        self._handles.pop(handle.ticket)
        settle(handle.released, None)

    def _broke(self, error: Exception) -> None:
        self._senders.close_all()  # before the callers get their source blocks back
        self._handles.fail_all(broken(error))

    # ---- start

    def _open(self) -> None:
        config = self.config
        self._senders.check()
        self._machine = PrefillMachine(_settings(config), self.layout, self.life, self._fingerprint)
        reactor = self._reactor = Reactor(
            "pdplane-prefill", self._machine, self._perform, self._broke, self._connections.tend
        )
        self._context = context = open_context()
        if self._gate:
            self._gate.bind(context)
            reactor.watch(self._gate)
        self._control = self._router.bind(context, Endpoint(config.host, config.control_port))
        reactor.watch(self._router)
        reactor.watch(self._router.comings)
        if self._legacy:
            self.legacy_control = self._legacy.bind(context, Endpoint(config.host, config.legacy_port))
            reactor.watch(self._legacy)
            reactor.watch(self._legacy.comings)
        log_legacy(config, "decode")
        self._http.start()
        self._rendezvous = config.rendezvous or self._serve_rendezvous()
        reactor.start()
        self._announcer = Announcer(self._http, self._rendezvous, self._announcement(), secret=config.secret)
        self._announcer.start()

    def _serve_rendezvous(self) -> Endpoint:
        app = rendezvous_app(secret=self.config.secret, open_reads=self.config.speaks_legacy)
        return self._http.serve(app, self.config.host, self.config.bootstrap_port)

    def _announcement(self) -> Announcement:
        config, control = self.config, self.control
        return Announcement(
            world_rank=config.dp_rank * config.tp_size + config.tp_rank,
            world_size=config.tp_size * config.dp_size,
            dp_size=config.dp_size,
            host=config.advertised,
            port=(self.legacy_control or control).port,
            router_port=control.port,
            life=self.life,
            layout=wire.encode_layout(self.layout),
        )


def _settings(config: PrefillConfig) -> PrefillSettings:
    return PrefillSettings(
        prefill_rank=config.tp_rank,
        tp_size=config.tp_size,
        exact=config.exact,
        peer_timeout_s=config.patience_s,
        bootstrap_timeout_s=config.bootstrap_timeout_s,
        waiting_timeout_s=config.waiting_timeout_s,
        ping_interval_s=config.ping_interval_s,
        tombstone_s=config.tombstone_s,
        max_rooms=config.max_rooms,
    )
