"""`pdplane inspect`: control messages as a person reads them, from hex lines or live from a socket of its own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from pdplane.cli.described import KINDS, Described, Describer
from pdplane.errors import ConfigError
from pdplane.options import count

_FORMAT = """
Hex lines: a message is one line with its frames separated by blanks, or one frame a line with an empty line after the
last one, or a JSON list of texts in a line. An empty frame is written -. A # begins a comment.
Exit code 1 when a message was wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where messages come from, and how they are printed."""
    parser.epilog = _FORMAT
    parser.add_argument("file", nargs="?", default="-", help="hex lines; standard input when absent or -")
    parser.add_argument("--tap", metavar="URL", help="bind a PULL there, such as tcp://127.0.0.1:4000, and listen")
    parser.add_argument("--count", type=count, metavar="N", help="end after so many messages")
    parser.add_argument("--kind", choices=KINDS, help="do not guess")
    parser.add_argument("--json", action="store_true", help="print one JSON object a message")


def run(args: argparse.Namespace) -> int:
    """Print every message; gives the exit code. Raises ConfigError."""
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
    """Messages from text; ConfigError names a line that is no hex."""
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
