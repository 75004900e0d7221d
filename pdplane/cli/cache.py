"""`pdplane cache send|run`: use cache workers from the command line, and see what every stage costs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from pdplane.cli.daemon import mlx_needed
from pdplane.errors import ConfigError, PdplaneError
from pdplane.options import count, duration, endpoint
from pdplane.workers.cache.wp30 import Wp30Client, Wp30Reply, expect

_COUNTS = ("transport_bytes", "send_ms", "roundtrip_ms", "reply_bytes", "request_bytes", "reply_frame_bytes", "wait_ms")


@attrs.frozen(eq=False)
class CacheWorkerRefused(PdplaneError):
    """A worker reported an error."""

    command: str
    reason: str

    def __str__(self) -> str:
        return f"{self.command}: {self.reason}"


def token_ids(text: str) -> list[int]:
    """Return token ids separated by commas."""
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids like 1,2,3")
    return [int(number) for number in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both actions."""
    parser.add_argument(
        "action", choices=("send", "run"),
        help="send: have one worker save the prefix's cache, hand it to another one and continue there; "
        "run: send the tokens of prefix and query instead",
    )  # fmt: skip
    parser.add_argument("--to", type=endpoint, required=True, metavar="HOST:PORT", help="worker that continues")
    parser.add_argument(
        "--from",
        dest="source",
        type=endpoint,
        metavar="HOST:PORT",
        help="worker that saves the cache, for send (default: that of --to)",
    )
    parser.add_argument("--model", help="model whose tokenizer reads the texts (default: none; ids need none)")
    prefix = parser.add_mutually_exclusive_group(required=True)
    prefix.add_argument("--prefix", help="text before the query; @FILE reads it from a file")
    prefix.add_argument("--prefix-ids", type=token_ids, metavar="N,N,...", help="token ids before the query")
    query = parser.add_mutually_exclusive_group(required=True)
    query.add_argument("--query", help="text after the prefix")
    query.add_argument("--query-ids", type=token_ids, metavar="N,N,...", help="token ids after the prefix")
    parser.add_argument("--document-id", default="?", help="name that travels with the cache (default: %(default)s)")
    parser.add_argument(
        "--codec",
        default="none",
        help="packing of the cache: none, zlib, lz4, zstd, bp-zstd, or with loss q8, q4 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=48, metavar="N", help="longest answer in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=duration,
        default="2m",
        metavar="TIME",
        help="longest time for each call (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print everything that was measured")


def run(args: argparse.Namespace) -> int:
    """Call the workers and print; return the exit code. Raises ConfigError and SessionLost."""
    prefix, query = _tokens(args)
    answers = _send(args, prefix, query) if args.action == "send" else {"run_text": _run(args, [*prefix, *query])}
    last = list(answers.values())[-1]
    if args.json:
        print(json.dumps({name: _told(reply) for name, reply in answers.items()}))
    else:
        print(str(expect(last, "text")))
    return 0


def _send(args: argparse.Namespace, prefix: Sequence[int], query: Sequence[int]) -> dict[str, Wp30Reply]:
    with Wp30Client(args.source or args.to, timeout_s=args.timeout) as source:
        saved = _good(source.prefill_cache(prefix, document_id=args.document_id, codec=args.codec))
    prefix_hash = str(expect(saved, "prefix_hash"))
    with Wp30Client(args.to, timeout_s=args.timeout) as target:
        found = target.run_cache(saved.payload, query, args.max_tokens, codec=args.codec, prefix_hash=prefix_hash)
    return {"prefill_cache": saved, "run_cache": _good(found)}


def _run(args: argparse.Namespace, tokens: Sequence[int]) -> Wp30Reply:
    with Wp30Client(args.to, timeout_s=args.timeout) as target:
        return _good(target.run_text(tokens, args.max_tokens))


def _good(reply: Wp30Reply) -> Wp30Reply:
    if reply.failure is not None:
        raise CacheWorkerRefused(str(reply.header.get("cmd")), reply.failure)
    return reply


def _told(reply: Wp30Reply) -> dict[str, Any]:
    return {**reply.header, **{name: getattr(reply, name) for name in _COUNTS}}


def _tokens(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    if args.prefix_ids is not None and args.query_ids is not None:
        return args.prefix_ids, args.query_ids
    if args.model is None:
        raise ConfigError("texts need --model, whose tokenizer reads them; or give --prefix-ids and --query-ids")
    with mlx_needed():
        from pdplane.engine.model import load_tokenizer
        from pdplane.engine.thread import EngineThread
    thread = EngineThread()
    thread.start()
    try:
        tokenizer = thread.call(lambda: load_tokenizer(args.model))
    finally:
        thread.close()
    prefix = args.prefix_ids if args.prefix is None else tokenizer.encode(_text(args.prefix))
    query = args.query_ids if args.query is None else tokenizer.encode(args.query, special_tokens=False)
    return prefix, query


def _text(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {text[1:]}: {error.strerror}") from error
