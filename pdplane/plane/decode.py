"""DecodePlane: a decode rank for a program with blocks to be filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from pdplane import wire
from pdplane.control.channels import Curve, Dealers
from pdplane.control.connections import Connections
from pdplane.control.http_thread import HttpThread
from pdplane.control.legacy import LegacyLine, LegacyPrefills, probed
from pdplane.control.lookup import LookUpOptions, PrefillFound, PrefillNotFound, RendezvousClient
from pdplane.control.reactor import Reactor
from pdplane.errors import Cause, ConfigError, LocalProtocolError, ProtocolError, Why, WireError
from pdplane.ids import Endpoint, Life, Room, SessionId
from pdplane.kv.arena import Arena, ArenaMemory
from pdplane.kv.copies import window_runs
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, validate_manifest
from pdplane.machine import actions, events
from pdplane.machine.actions import DecodeSettings
from pdplane.machine.decode import DecodeMachine
from pdplane.messages import Fingerprint, Hello, Landed, Registration, WriterCut
from pdplane.net import as_endpoint
from pdplane.plane import rooms as told
from pdplane.plane.config import DecodeConfig, log_legacy
from pdplane.plane.life import PlaneLife
from pdplane.plane.rooms import DecodeRoom, broken, check_room, settle
from pdplane.transport import reports
from pdplane.transport.fence import Fence, OnLanded
from pdplane.transport.registry import Receiver, is_one_sided, open_receiver


class DecodePlane(PlaneLife[events.DecodeEvent, actions.DecodeAction, DecodeRoom]):
    """Registers the arena with prefill ranks, offers blocks for rooms, and lets exactly those be written.

    `with DecodePlane(config, layout=layout, arena=arena) as plane:` starts it; the constructor opens nothing.
    `arena` is an Arena or anything that `Arena` takes. Thread-safe: everything posts to the reactor. `http` shares an
    HTTP thread; without it the plane has its own. Raises ConfigError for what cannot work.
    """

    role = "decode"

    def __init__(
        self,
        config: DecodeConfig,
        *,
        layout: Layout,
        arena: Arena | ArenaMemory,
        fingerprint: Fingerprint | None = None,
        http: HttpThread | None = None,
    ) -> None:
        super().__init__(config, layout, arena, http)
        self.config = config
        self.session = SessionId("")
        self.legacy_status: Endpoint | None = None
        self._fingerprint = fingerprint or Fingerprint()
        self._fence = Fence(self.arena)
        self._receivers = [self._make_receiver(config.transport, config.data_port)]
        if config.speaks_legacy and config.legacy_transport not in (None, config.transport):
            self._receivers.append(self._make_receiver(config.legacy_transport or "", 0))
        self._receiver = self._receivers[0]
        options = LookUpOptions(config.patience_s, config.unreachable_timeout_s, unproved=config.legacy is True)
        self._look_up = RendezvousClient(self._http, options, config.secret)
        connections, curve = Connections(self._rejected), Curve(config.secret) if config.secret else None
        self._dealers = Dealers(self._rejected, curve, connections, config.unreachable_timeout_s)
        self._legacy = LegacyPrefills(self._rejected, self._probe, connections) if config.speaks_legacy else None

    def _make_receiver(self, scheme: str, port: int) -> Receiver:
        return open_receiver(
            scheme,
            listen=Endpoint(self.config.host, port),
            decode_life=self.life,
            fence=self._fence,
            report=self._hear,
            secret=self.config.secret,
            options=self.config.transport_options,
        )

    def _shut(self, text: str) -> None:
        if self._reactor:
            self._post(events.Closing(text))
            self._reactor.close()
        self._close_receivers()
        self._handles.fail_all(LocalProtocolError(text, Cause.CLOSING))
        self._dealers.close()
        if self._legacy:
            self._legacy.close()
        if self._owns_http:
            self._http.close()

    # ---- rooms

    def open(
        self,
        room: int,
        *,
        prefill: Endpoint | str,
        manifest: Manifest | None,
        prompt_hash: str = "",
        on_landed: OnLanded | None = None,
    ) -> DecodeRoom:
        """Ask the prefill whose rendezvous is at `prefill`, an Endpoint or "host:port", to fill the manifest's blocks.

        The blocks belong to the room until `released`: the caller may not write or reuse them before. Raises WireError
        for a manifest that does not fit the layout and ConfigError for an address that is none. A room that is live
        already ends the handle with LocalProtocolError.

        Without a manifest the room stands in line for blocks: prefill is told, so that its half waits as well, and the
        handle's `offer` goes on with the blocks.

        `on_landed(offsets, lengths)` is called for each run of the arena that is final unless the room fails, while the
        rest is under way: for work ahead that is dropped if the room fails. Transport threads call it, so it must not
        block or raise. One-sided transports never call it.
        """
        self._check_open()
        rendezvous = as_endpoint(prefill, "prefill")
        if manifest is not None:
            self._check_manifest(manifest)
        _check_prompt_hash(prompt_hash)
        number, ticket = check_room(room), self._handles.ticket()

        def cancel(why: Why) -> None:
            self._post(events.RoomCancelled(number, ticket, why))

        def offer(found: Manifest) -> None:
            self._check_manifest(found)
            self._post(events.BlocksGiven(number, ticket, found))

        handle = DecodeRoom(number, ticket, cancel, offer, on_landed)
        self._handles.add(handle)
        self._post(events.DecodeRequested(number, ticket, rendezvous, manifest, prompt_hash))
        return handle

    def decline(
        self, room: int, *, prefill: Endpoint | str, prompt_hash: str, text: str, cause: Cause = Cause.CANCELLED
    ) -> None:
        """Tell prefill that no blocks will come for this room, so that its request ends at once and not by a timeout.

        Best effort: prefill is looked up if it is not known yet, and it ends only a request with the same prompt hash
        (see `hash_prompt`). Does nothing while the room is live here, or on a closed plane.
        """
        _check_prompt_hash(prompt_hash)
        number, ticket = check_room(room), self._handles.ticket()
        rendezvous = as_endpoint(prefill, "prefill")
        if self._state == "open":
            self._post(events.DecodeDeclined(number, ticket, rendezvous, prompt_hash, Why(cause, text)))

    def _check_manifest(self, manifest: Manifest) -> None:
        """Raise WireError for one that does not fit the layout, in the caller's thread."""
        validate_manifest(manifest, self.layout)
        wire.check_manifest(manifest)

    # ---- state

    @property
    def data(self) -> Endpoint:
        """Where prefill ranks connect to push."""
        return self._receiver.endpoint

    def _more_counts(self) -> dict[str, Any]:
        return {"fence": attrs.asdict(self._fence.snapshot()), "receiver": attrs.asdict(self._receiver.snapshot())}

    def _more_trouble(self) -> str | None:
        return next(filter(None, (receiver.trouble() for receiver in self._receivers)), None)

    # ---- the reactor's thread

    def _perform(self, action: actions.DecodeAction) -> Iterable[events.DecodeEvent]:
        match action:
            case actions.Tell() | actions.Offer():
                return self._channels_of(action.channel).send(action)
            case actions.OpenFence(number, generation, manifest, writers):
                handle = self._handles.get(generation)  # a room's ticket is its generation
                runs, on_landed = window_runs(self.layout, manifest), handle.on_landed if handle else None
                self._fence.open(number, generation, *runs, writers=dict(writers), on_landed=on_landed)
                self._handles.record(told.RoomOffered(number, generation))
            case actions.CloseFence(number, generation):
                self._fence.close(number, generation)
            case actions.LookUp(bootstrap, number):
                self._look_up.find(bootstrap, number, lambda found: self._found(number, found))
            case actions.Connect(channel, endpoint):
                return self._channels_of(channel).connect(channel, endpoint, self.session)
            case actions.Disconnect(channel):
                self._channels_of(channel).disconnect(channel)
            case _:
                self._tell(action)
        return ()

    def _tell(self, action: actions.DecodeAction) -> None:
        assert isinstance(action, actions.Deliver | actions.Fail | actions.Release)
        held = isinstance(action, actions.Fail) and action.held
        handle = self._handles.get(action.ticket) if held else self._handles.pop(action.ticket)
        if handle is None:
            return
        match action:
            case actions.Deliver(number, ticket, delivered):
                self._handles.record(told.RoomDelivered(number, ticket, delivered))
                handle.deliver(delivered)
            case actions.Fail(number, ticket, error):
                self._handles.record(told.RoomEnded(number, ticket, error))
                (handle.fail if held else handle.end)(error)
            case actions.Release(number, ticket):
                self._handles.record(told.RoomReleased(number, ticket))
                settle(handle.released, None)

    def _channels_of(self, channel: events.Channel) -> Dealers | LegacyPrefills:
        return self._legacy if self._legacy is not None and channel.is_legacy else self._dealers

    def _broke(self, error: Exception) -> None:
        self._close_receivers()  # before the callers get their blocks back, since the windows stay open
        self._handles.fail_all(broken(error))

    def _close_receivers(self) -> None:
        for receiver in self._receivers:
            receiver.close()

    # ---- reports of other threads

    def _hear(self, report: reports.Report) -> None:
        match report:
            case Landed():  # comes before its acknowledgement, so that the writer's Success wakes us behind it
                self._post(report, wake=False)
            case WriterCut():
                self._post(report)
            case _:
                return

    def _found(self, number: Room, found: PrefillFound | PrefillNotFound) -> None:
        self._post(read_answer(number, found, self.config))

    def _probe(self, line: LegacyLine) -> None:
        channel = line.channel

        def answered(found: Endpoint | None) -> None:
            if event := probed(line, found):
                self._post(event)

        self._look_up.check(channel.bootstrap, channel.dp_group, channel.prefill_rank, answered)

    # ---- start

    def _open(self) -> None:
        config = self.config
        self.session, *others = [receiver.start(config.advertised) for receiver in self._receivers]
        port = self._receiver.endpoint.port
        if self._legacy:
            session = (others or [self.session])[0]
            self.legacy_status = self._legacy.bind(Endpoint(config.host, config.status_port), session)
            port = self.legacy_status.port
        log_legacy(config, "prefill")
        registration = Registration(
            config.advertised,
            port,
            self.session,
            self.arena.base,
            wire.encode_layout(self.layout),
            config.tp_size,
            config.tp_rank,
        )
        self._machine = DecodeMachine(_settings(config), self.layout, self.life, registration, self._fingerprint)
        _check_words(registration, Hello("1", self.life, self._fingerprint))
        reactor = self._reactor = Reactor(
            "pdplane-decode", self._machine, self._perform, self._broke, self._dealers.tend
        )
        self._dealers.open(reactor)
        if self._legacy:
            self._legacy.open(reactor)
        self._http.start()
        reactor.start()


def _check_words(registration: Registration, hello: Hello) -> None:
    """Raise ConfigError for a registration or hello that no peer can read, before anything waits for an answer."""
    try:
        wire.decode_registration(wire.encode_registration(registration))
        wire.encode_notice(hello)
    except ProtocolError as wrong:
        raise ConfigError(f"no prefill can read what this decode says of itself: {wrong}") from wrong


def read_answer(
    number: Room, found: PrefillFound | PrefillNotFound, config: DecodeConfig
) -> events.PeerFound | events.PeerMissing:
    """Return the machine's event for a rendezvous answer; PeerMissing for one that this decode cannot use."""
    if isinstance(found, PrefillNotFound):
        return events.PeerMissing(number, found.bootstrap, Why(Cause.UNREACHABLE, found.cause))
    ranks = []
    for rank in found.ranks:
        if rank.router_port is not None and rank.life is not None:
            ranks.append(events.PeerRank(rank.prefill_rank, Endpoint(rank.host, rank.router_port), rank.life))
        elif config.speaks_legacy and not config.legacy_lacks:
            ranks.append(events.PeerRank(rank.prefill_rank, Endpoint(rank.host, rank.port), Life("")))
        else:
            obstacle = config.legacy_obstacle or "the legacy channel is turned off"
            why = config.legacy_lacks if config.speaks_legacy else f"this decode has none: {obstacle}"
            text = f"prefill at {found.bootstrap} is a legacy peer, and {why}"
            return events.PeerMissing(number, found.bootstrap, Why(Cause.REFUSED, text))
    try:
        layout = wire.decode_layout(found.layout)
    except WireError as wrong:
        text = f"prefill at {found.bootstrap} has a bad layout: {wrong}"
        return events.PeerMissing(number, found.bootstrap, Why(Cause.REFUSED, text))
    return events.PeerFound(number, found.bootstrap, found.dp_group, found.dp_size, layout, tuple(ranks))


def _settings(config: DecodeConfig) -> DecodeSettings:
    return DecodeSettings(
        tp_size=config.tp_size,
        tp_rank=config.tp_rank,
        version="1",
        peer_timeout_s=config.patience_s,
        waiting_timeout_s=config.waiting_timeout_s,
        ping_interval_s=config.ping_interval_s,
        tombstone_s=config.tombstone_s,
        late_bytes_s=min(10.0, config.waiting_timeout_s),
        one_sided=is_one_sided(config.transport),
        quarantine_timeout_s=config.quarantine_timeout_s,
        max_rooms=config.max_rooms,
    )


def _check_prompt_hash(prompt_hash: str) -> None:
    if len(prompt_hash) > 128 or not prompt_hash.isascii():
        raise LocalProtocolError("prompt_hash must be ASCII of at most 128 characters")
