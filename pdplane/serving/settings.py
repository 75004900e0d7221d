"""Fields with the same names in every dialect: sampling, stops, and the rooms that gateways fill in."""

from __future__ import annotations

import re
from typing import Any

from pdplane.api import Sampling
from pdplane.errors import ConfigError
from pdplane.ids import MAX_ROOM, Endpoint, Room
from pdplane.serving.asked import MAX_ANSWERS, Meeting, Served
from pdplane.serving.fields import BadField, Fields, short

MAX_STOPS = 16
MAX_STOP = 4096
MAX_STOP_IDS = 256
MAX_CONTEXT_SIZE = 2**31 - 1

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}\Z")
_TOKEN_ID = re.compile(r"[0-9]{1,10}\Z")


def read_sampling(fields: Fields, served: Served, *, seed: str = "seed", top_logprobs: int = 0) -> Sampling:
    """Return how tokens are chosen; greedily unless the request says otherwise. Raises BadField."""
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0),
        "top_p": _top_p(fields),
        "top_k": _top_k(fields, served),
        "min_p": fields.number("min_p", 0, 1),
        "xtc_probability": fields.number("xtc_probability", 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", 0, 0.5),
        "logit_bias": _logit_bias(fields, served),
        "repetition_penalty": fields.number("repetition_penalty", 0),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "seed": fields.whole(seed, 0, 2**64 - 1),
    }
    for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
        given[name] = fields.whole(name, 0, MAX_CONTEXT_SIZE)
    said = {name: value for name, value in given.items() if value is not None}
    try:
        return Sampling(**said, top_logprobs=top_logprobs)
    except ConfigError as error:
        name = str(error).partition(" ")[0]
        raise BadField(f"{fields.name('')}{error}", fields.name(name)) from error


def read_stops(fields: Fields) -> tuple[tuple[str, ...], frozenset[int], bool]:
    """Stop strings, stop tokens, and whether the model's own end is no end."""
    ids = fields.ids("stop_token_ids") or ()
    if len(ids) > MAX_STOP_IDS:
        raise fields.refuse("stop_token_ids", f"has more than {MAX_STOP_IDS} ids")
    return fields.texts("stop", MAX_STOPS, MAX_STOP), frozenset(ids), fields.flag("ignore_eos")


def read_meetings(fields: Fields, served: Served) -> tuple[Meeting, ...]:
    """Return the rooms, and where their prefill is found: single values, or lists of one length.

    Raises BadField; without any rooms its text explains that one daemon is only half of a pair.
    """
    rooms, hosts, ports = (fields.take(f"bootstrap_{name}") for name in ("room", "host", "port"))
    if rooms is None:
        raise BadField(
            "bootstrap_room is missing: this daemon is one half of a pair, and a gateway names the room in which the "
            "halves meet; `pdplane serve` answers plain clients",
            "bootstrap_room",
        )
    many = rooms if isinstance(rooms, list) else [rooms]
    if not 1 <= len(many) <= MAX_ANSWERS:
        raise fields.refuse("bootstrap_room", f"is not a list of 1 to {MAX_ANSWERS} rooms")
    return tuple(
        Meeting(_room(fields, room), _rendezvous(fields, host, port, served.bootstrap_port))
        for room, host, port in zip(
            many, _each(fields, "host", hosts, len(many)), _each(fields, "port", ports, len(many)), strict=True
        )
    )


def _top_p(fields: Fields) -> float | None:
    value = fields.number("top_p", 0, 1)
    if value == 0:  # greedy to some servers, no bound to others
        raise fields.refuse("top_p", "0 is ambiguous; say temperature 0, or top_p 1")
    return value


def _top_k(fields: Fields, served: Served) -> int | None:
    value = fields.whole("top_k", -1, 2**31 - 1)
    if value is None:
        return None
    bounded = 0 < value < (served.vocab_size or value + 1)
    return value if bounded else 0


def _logit_bias(fields: Fields, served: Served) -> tuple[tuple[int, float], ...] | None:
    given = fields.mapping("logit_bias")
    if given is None:
        return None
    found = Fields(given, fields.name("logit_bias") + ".")
    bias: dict[int, float] = {}
    for key in given:
        if not _TOKEN_ID.match(key) or int(key) >= (served.vocab_size or 2**31):
            raise fields.refuse("logit_bias", f"has the key {key[:40]!r}, which is no token id of this model")
        value = found.number(key, -1e30, 1e30)
        if value is not None:
            bias[int(key)] = value
    return tuple(sorted(bias.items()))


def _each(fields: Fields, name: str, value: object, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise fields.refuse(f"bootstrap_{name}", f"has {len(value)} entries for {count} rooms")
    return value


def _room(fields: Fields, value: object) -> Room:
    if type(value) is not int or not 0 <= value <= MAX_ROOM:
        raise fields.refuse("bootstrap_room", f"{short(value)} is not a whole number from 0 to 2**63-1")
    return Room(value)


def _rendezvous(fields: Fields, host: object, port: object, default_port: int) -> Endpoint | None:
    if host is None:
        return None
    if not isinstance(host, str) or not _HOST.match(bare := host.strip("[]")):
        raise fields.refuse("bootstrap_host", "is not a host name or address")
    if port is None:
        return Endpoint(bare, default_port)
    if type(port) is not int or not 1 <= port <= 65535:
        raise fields.refuse("bootstrap_port", f"{short(port)} is not a port")
    return Endpoint(bare, port)
