"""`pdplane inspect`: control messages as a person reads them, from hex lines or live from a socket of its own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import zmq

from pdplane import wire
from pdplane.errors import ConfigError, WireError
from pdplane.ids import SessionId
from pdplane.kv.layout import Field, GroupSpec, Layout
from pdplane.kv.manifest import Manifest, logical_slots, validate_manifest
from pdplane.messages import Notice, Preallocation, Registration, Status
from pdplane.options import count

KINDS = ("registration", "pre-allocation", "status", "notice")


@attrs.frozen
class Described:
    """One message: its kind, a heading with lines below it, its values; `wrong` says why it is none."""

    kind: str
    heading: str
    lines: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Any] = attrs.field(factory=dict)
    wrong: WireError | None = None

    def text(self) -> str:
        """Return the heading, and the lines indented below it."""
        width = max((len(name) for name, _ in self.lines), default=0)
        return "\n".join([self.heading, *(f"  {name:<{width}}  {value}" for name, value in self.lines)])

    def json(self) -> str:
        """Return one line."""
        found: dict[str, Any] = {"kind": self.kind, **self.values}
        if self.wrong is not None:
            found["wrong"] = {"field": self.wrong.field, "reason": self.wrong.reason}
        return json.dumps(found, ensure_ascii=False)


class Describer:
    """Describes messages in their order: a pre-allocation is checked against its session's registered layout."""

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind
        self._layouts: dict[SessionId, Layout] = {}

    def describe(self, frames: Sequence[bytes]) -> Described:
        """Return the description of any frames."""
        kind = self._kind or kind_of(frames)
        try:
            return self._read(kind, frames)
        except WireError as wrong:
            lines = [("why", f"{wrong.field}: {wrong.reason}")]
            lines += [(f"frame {place}", _glimpse(frame)) for place, frame in enumerate(frames[:8])]
            heading = f"no valid {kind} ({len(frames)} frame{'s' if len(frames) != 1 else ''})"
            shown = {"frames": [frame[:64].hex() for frame in frames[:16]]}
            return Described(kind, heading, tuple(lines), shown, wrong)

    def _read(self, kind: str, frames: Sequence[bytes]) -> Described:
        match kind:
            case "registration":
                registration = wire.decode_registration(frames)
                layout = wire.decode_layout(registration.layout)
                self._layouts[registration.session] = layout
                return _registration(registration, layout)
            case "notice":
                return _notice(wire.decode_notice(frames))
            case "pre-allocation":
                return self._preallocation(wire.decode_preallocation(frames))
            case _:
                return _status(wire.decode_status(frames))

    def _preallocation(self, offer: Preallocation) -> Described:
        manifest = wire.decode_manifest(offer.manifest) if offer.manifest else None
        layout = self._layouts.get(offer.session)
        if manifest is not None and layout is not None:
            validate_manifest(manifest, layout)
        return _preallocation(offer, manifest, layout)


def kind_of(frames: Sequence[bytes]) -> str:
    """Return the kind that a message claims; three frames with a session or a manifest are a pre-allocation."""
    if wire.is_registration(frames):
        return "registration"
    if frames and frames[0].startswith(b"pdplane/"):
        return "notice"
    if len(frames) == 3 and (b":" in frames[1] or frames[2].lstrip()[:1] in (b"", b"{")):
        return "pre-allocation"
    return "status"


def _registration(registration: Registration, layout: Layout) -> Described:
    end = registration.arena_base + layout.arena_bytes
    lines = [
        ("statuses to", f"{registration.host}, port {registration.port}"),
        ("decode rank", f"{registration.tp_rank} of {registration.tp_size}"),
        ("arena", f"{layout.arena_bytes:,} bytes at {registration.arena_base:#x} to {end:#x}"),
        ("parents", f"{layout.num_lcm_blocks:,} of {layout.lcm_block_bytes:,} bytes, and the null one"),
        ("prefix granularity", f"{layout.prefix_granularity} tokens"),
        *((f"group {spec.group_id}", _group(layout, spec)) for spec in layout.group_specs),
        *((f"field {field.field_id}", _field(layout, field)) for field in layout.fields),
    ]
    values = {name: value for name, value in attrs.asdict(registration).items() if name != "layout"}
    values["layout"] = json.loads(registration.layout)
    return Described("registration", f"registration of session {registration.session}", tuple(lines), values)


def _group(layout: Layout, spec: GroupSpec) -> str:
    group = layout.group(spec.group_id)
    words = [
        f"{spec.family}, {spec.retention}, {spec.transfer_policy}",
        f"{spec.block_granularity} tokens a block",
        f"{group.page_count - 1:,} blocks, {group.cache_blocks_per_lcm_block} a parent",
    ]
    if spec.sliding_window_tokens is not None:
        words.insert(1, f"window {spec.sliding_window_tokens}")
    return "; ".join(words)


def _field(layout: Layout, field: Field) -> str:
    partition = layout.partition(field.field_id)
    split = "whole on every rank"
    if partition is not None:
        parts = f" in parts {list(partition.global_parts)}" if partition.global_parts else ""
        split = f"axis {partition.axis} of {partition.global_extent}{parts}"
    return f"{field.dtype}{list(field.shape)} in {field.group_id}, plane {field.plane_id}; {split}"


def _preallocation(offer: Preallocation, manifest: Manifest | None, layout: Layout | None) -> Described:
    heading = f"pre-allocation of room {offer.room} by session {offer.session}"
    values: dict[str, Any] = {"room": offer.room, "session": offer.session, "manifest": None}
    if manifest is None:
        return Described("pre-allocation", heading, (("blocks", "none: this rank only joins the vote"),), values)
    values["manifest"] = attrs.asdict(manifest)
    lines = [("prompt", f"{manifest.prompt_len} tokens, of which decode holds {manifest.prefix_len}")]
    for group in manifest.groups:
        slots = ""
        if layout is not None:
            found = logical_slots(layout.spec(group.group_id), manifest.prefix_len, manifest.prompt_len)
            slots = f" for slots {found.start} to {found.stop - 1}" if found else ""
        lines.append((f"group {group.group_id}", f"{len(group.block_ids)} blocks{slots}: {_ids(group.block_ids)}"))
    if layout is None:
        lines.append(("not checked", "no registration of this session was seen"))
    return Described("pre-allocation", heading, tuple(lines), values)


def _status(status: Status) -> Described:
    name = status.code.name.lower().replace("_", " ")
    heading = f"status of room {status.room}: {name}, says prefill rank {status.prefill_rank}"
    lines = [("first token", "none" if status.first_token == -1 else str(status.first_token))]
    if status.first_logprob is not None:
        lines.append(("logprob", f"{status.first_logprob:g}"))
    if status.candidates is not None:
        lines.append(("candidates", _ids(status.candidates)))
    if status.cached_tokens:
        lines.append(("cached tokens", str(status.cached_tokens)))
    values = {**attrs.asdict(status), "code": status.code.name, "logprob": status.first_logprob}
    return Described("status", heading, tuple(lines), values)


def _notice(notice: Notice) -> Described:
    name = type(notice).__name__
    values = attrs.asdict(notice)
    lines = tuple((key.replace("_", " "), _plain(value)) for key, value in values.items())
    return Described("notice", f"notice {name}", lines, {"notice": name, **values})


def _plain(value: object) -> str:
    if isinstance(value, dict):  # a fingerprint: pairs by strictness
        return "; ".join(f"{key} {', '.join(f'{n}={v}' for n, v in pairs)}" for key, pairs in value.items() if pairs)
    return str(value)


def _ids(numbers: Sequence[int]) -> str:
    """Return numbers with runs joined, as many as fit in a line."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:20]]
    return " ".join(words) + (f" and {len(runs) - 20} more runs" if len(runs) > 20 else "")


def _glimpse(frame: bytes) -> str:
    shown = repr(frame[:48])[1:] if frame else "empty"
    return f"{shown}{f' and {len(frame) - 48:,} bytes more' if len(frame) > 48 else ''}"


# ---- The command


_FORMAT = """
Hex lines: a message is one line with its frames separated by blanks, or one frame a line with an empty line after the
last one, or a JSON list of texts in a line. An empty frame is written -. A # begins a comment.
Exit code 1 when a message was wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: where messages come from, and how they are printed."""
    parser.epilog = _FORMAT
    parser.add_argument(
        "file", nargs="?", default="-", help="file of hex lines; - is standard input (default: %(default)s)"
    )
    parser.add_argument(
        "--tap",
        metavar="URL",
        help="address of a PULL to bind, such as tcp://127.0.0.1:4000 (default: none, read the file)",
    )
    parser.add_argument("--count", type=count, metavar="N", help="messages after which it ends (default: no limit)")
    parser.add_argument("--kind", choices=KINDS, help="kind that every message is taken for (default: guessed)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a message")


def run(args: argparse.Namespace) -> int:
    """Print every message; return the exit code. Raises ConfigError."""
    describer, wrong = Describer(args.kind), 0
    with _messages(args) as messages:
        for number, frames in enumerate(messages, 1):
            found = describer.describe(frames)
            wrong += found.wrong is not None
            _print(found, as_json=args.json)
            if number == args.count:
                break
    return 1 if wrong else 0


def _print(found: Described, *, as_json: bool) -> None:
    print(found.json() if as_json else found.text(), flush=True)


@contextmanager
def _messages(args: argparse.Namespace) -> Iterator[Iterable[list[bytes]]]:
    if args.tap:
        with _tap(args.tap) as messages:
            yield messages
    elif args.file == "-":
        yield read_hex(sys.stdin)
    else:
        try:
            with Path(args.file).open() as lines:
                yield read_hex(lines)
        except OSError as error:
            raise ConfigError(f"cannot read {args.file}: {error.strerror or error}") from error


@contextmanager
def _tap(url: str) -> Iterator[Iterator[list[bytes]]]:
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    try:
        try:
            pull.bind(url)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {url}: {zmq.strerror(error.errno or 0)}") from error
        print(f"listening on {pull.getsockopt_string(zmq.LAST_ENDPOINT)}", file=sys.stderr, flush=True)
        yield iter(pull.recv_multipart, None)
    finally:
        pull.close(linger=0)
        context.term()


def read_hex(lines: Iterable[str]) -> Iterator[list[bytes]]:
    """Yield messages from text. Raises ConfigError, which names a line that is no hex."""
    pending: list[bytes] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("#"):
            continue
        words = _listed(text, number) if text.startswith("[") else text.partition("#")[0].replace(",", " ").split()
        frames = [_frame(word, number) for word in words]
        if len(words) == 1 and not text.startswith("["):
            pending += frames
            continue
        if pending:
            yield pending
            pending = []
        if frames:
            yield frames
    if pending:
        yield pending


def _listed(text: str, number: int) -> list[str]:
    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"line {number} is no JSON list of texts")
    return words


def _frame(word: str, number: int) -> bytes:
    if word in ("", "-"):
        return b""
    try:
        return bytes.fromhex(word.removeprefix("0x"))
    except ValueError:
        raise ConfigError(f"line {number} holds {word[:40]!r}, which is no hex") from None
