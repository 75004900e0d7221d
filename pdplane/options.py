"""Texts of the command line as values; a wrong one raises ArgumentTypeError, which argparse prints."""

from __future__ import annotations

import argparse
import fnmatch
import ipaddress
import re
from collections.abc import Mapping

import attrs

from pdplane.ids import MAX_ROOM, Endpoint, Room

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")
_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_PATTERN = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]\s?]+))(?::(?P<port>[0-9]{1,5}|\*))?\Z")
_SECONDS: Mapping[str, float] = {"": 1, "ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}


def size(text: str) -> int:
    """Return a number of bytes, from `4096`, `512MiB`, `2GiB`, `1.5GB`; K, M, G and T alone are powers of two."""
    found = _SIZE.match(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 512MiB or 2GiB")
    nbytes = round(float(found[1]) * unit)
    if not 1 <= nbytes < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is outside 1 byte to 8 EiB")
    return nbytes


def size_or_nothing(text: str) -> int:
    """Return bytes as `size` does, and 0 from `0`."""
    return 0 if text.strip() == "0" else size(text)


def duration(text: str) -> float:
    """Return seconds, from `120`, `1.5s`, `500ms`, `2m`, `1h`."""
    found = _SIZE.match(text.strip())
    unit = _SECONDS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write it like 30s, 500ms or 2m")
    return float(found[1]) * unit


def port(text: str) -> int:
    """Return a TCP port, 0 to 65535; 0 stands for a free one."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to 65535)")
    return int(text)


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number from 0 on."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def endpoint(text: str) -> Endpoint:
    """Return an address, from `host:port`, IPv6 in brackets."""
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@attrs.frozen
class AddressPattern:
    """Which addresses `HOST:PORT` stands for: a name with `*`, an address or a CIDR range, and a port or `*`."""

    name: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: int | None

    def allows(self, at: Endpoint) -> bool:
        """Return whether the address, as it is written, fits; a name never fits a range."""
        if self.port is not None and self.port != at.port:
            return False
        if self.network is None:
            return fnmatch.fnmatchcase(at.host.lower(), self.name)
        try:
            found = ipaddress.ip_address(at.host)
        except ValueError:
            return False
        plain = getattr(found, "ipv4_mapped", None) or found
        return plain.version == self.network.version and plain in self.network


def address_pattern(text: str) -> AddressPattern:
    """Return a pattern, from `10.0.0.0/24:8998`, `*.prefill.svc:*`, `[fd00::/8]:8998`; without a port any fits."""
    found = _PATTERN.match(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern like 10.0.0.0/24:8998 or *.example:*")
    host, number = found["host"] or found["six"], found["port"]
    where = None if number in (None, "*") else port(number)
    try:
        return AddressPattern(host, ipaddress.ip_network(host, strict=False), where)
    except ValueError:
        if "/" in host or found["six"]:
            raise argparse.ArgumentTypeError(f"{host!r} is no address or range") from None
    return AddressPattern(host.lower(), None, where)


def room(text: str) -> Room:
    """Return a room's number, 0 to 2**63-1."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > MAX_ROOM:
        raise argparse.ArgumentTypeError(f"{text!r} is no room (0 to 2**63-1)")
    return Room(int(text))


def url(text: str) -> str:
    """Return the base URL of a daemon's HTTP, from a URL or `host:port` alone."""
    full = text if "://" in text else f"http://{text}"
    if not re.match(r"https?://[^/?#\s]+\Z", full.rstrip("/")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL like http://127.0.0.1:8100")
    return full.rstrip("/")
