"""`pdplane serve`: one port with OpenAI's API, a prefill and a decode daemon behind it.

The daemons are child processes, or running ones named by `--prefill` and `--decode`. A child that dies is started
again, after a pause that doubles while it keeps dying.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import aiohttp

from pdplane.cli.children import Child, ChildFailed
from pdplane.cli.flags import (
    API_KEY,
    add_insecure_flag,
    add_model_flags,
    add_tls_flags,
    api_key,
    check_public,
    tls_files,
)
from pdplane.cli.log import LEVELS
from pdplane.cli.process import END_S, StopSignal, exit_with_parent
from pdplane.control.http_thread import HttpThread
from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint
from pdplane.net import reached
from pdplane.options import count, duration, port, size, size_or_nothing, url
from pdplane.serving.members import ROLES, Member, Members, Role
from pdplane.serving.pair import PairOptions, pair_app

logger = logging.getLogger(__name__)

_READY_S = 600.0
_LOOK_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0  # a child that ran for so long did not die of its start

MODEL_FLAGS = (
    "--model", "--prefill-step-size", "--block-tokens", "--arena-bytes", "--page-layout", "--layerwise-interval",
    "--context-length", "--kv-bits", "--kv-group-size", "--blas", "--seed",
)  # fmt: skip

ROLE_FLAGS: Mapping[Role, tuple[str, ...]] = {
    "prefill": ("--prompt-cache-bytes",),
    "decode": ("--prompt-cache-bytes", "--decode-concurrency", "--decode-cache-bytes"),
}

# What mlx_lm.server knows and a pair of daemons cannot do.
_REFUSED: Mapping[str, str] = {
    "--adapter-path": "adapters are not built; fuse the adapter into the model with mlx_lm.fuse",
    "--trust-remote-code": "code that comes with a model is not run",
    "--chat-template": "the model folder's own template is used",
    "--use-default-chat-template": "the model folder's own template is used",
    "--draft-model": "speculative decoding is not built",
    "--num-draft-tokens": "speculative decoding is not built",
    "--pipeline": "a model is split over ranks by mlx.launch, see docs/operations.md",
    "--quantized-kv-start": "the cache is quantised from its first token on, see --kv-bits",
    "--prompt-cache-size": "caches of prompts are bounded in bytes, see --prompt-cache-bytes",
    "--prompt-concurrency": "prompts are computed one after the other, a chunk a turn",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; those of the model go to the daemons that it starts."""
    add_model_flags(parser, required=False)
    serve = parser.add_argument_group("serving")
    serve.add_argument("--host", default="127.0.0.1", help="address where the API listens (default: 127.0.0.1)")
    serve.add_argument("--port", type=port, default=8080, help="port of the API, 0 for a free one (default: 8080)")
    serve.add_argument(
        "--prefill", type=url, nargs="+", metavar="URL", help="running prefill daemons to use (default: one is started)"
    )
    serve.add_argument(
        "--decode", type=url, nargs="+", metavar="URL", help="running decode daemons to use (default: one is started)"
    )
    serve.add_argument(
        "--api-key", metavar="KEY", help="key that clients must send (default: $PDPLANE_API_KEY, else none)"
    )
    add_insecure_flag(serve, "--api-key")
    add_tls_flags(serve, ca=False)
    serve.add_argument(
        "--prompt-cache-bytes",
        type=size_or_nothing,
        default="1GiB",
        metavar="SIZE",
        help="caches that each daemon keeps for prompts that begin alike, 0 for none (default: %(default)s)",
    )
    serve.add_argument(
        "--decode-concurrency",
        type=count,
        default=32,
        metavar="N",
        help="sequences that decode runs together (default: %(default)s)",
    )
    serve.add_argument(
        "--decode-cache-bytes",
        type=size,
        metavar="SIZE",
        help="bytes that the caches of running sequences may grow to (default: a quarter of the memory)",
    )
    serve.add_argument(
        "--allowed-origins", type=_origins, default=("*",), metavar="ORIGINS",
        help="web pages that may use the API, separated by commas (default: *)",
    )  # fmt: skip
    serve.add_argument(
        "--max-requests",
        type=count,
        default=256,
        metavar="N",
        help="requests that may run at once, more get status 429 (default: 256)",
    )
    serve.add_argument(
        "--drain-timeout",
        type=duration,
        default=10.0,
        metavar="TIME",
        help="longest wait for running requests at the end (default: %(default)s)",
    )
    serve.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input, a pipe from the parent, ends"
    )
    serve.add_argument(
        "--log-level",
        type=str.lower,
        choices=LEVELS,
        default="info",
        help="least level that this process and its daemons log (default: info)",
    )
    serve.add_argument("--log-json", action="store_true", help="log JSON objects instead of lines of text")
    _add_sampling_flags(parser.add_argument_group("defaults of requests"))
    for flag, reason in _REFUSED.items():
        parser.add_argument(flag, nargs="?", action=_Refuse, const=reason, help=argparse.SUPPRESS)


def _add_sampling_flags(defaults: argparse._ArgumentGroup) -> None:
    defaults.add_argument(
        "--temp", type=float, default=0.0, metavar="T", help="temperature, 0 for greedy (default: 0.0)"
    )
    defaults.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="share of the nucleus to draw from, 1 for all (default: 1.0)",
    )
    defaults.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="likeliest tokens to draw from, 0 for all (default: 0)"
    )
    defaults.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="least probability, as a share of the likeliest token's (default: 0.0)",
    )
    defaults.add_argument(
        "--max-tokens", type=count, default=512, metavar="N", help="longest answer in tokens (default: 512)"
    )
    defaults.add_argument(
        "--chat-template-args",
        type=_object,
        default={},
        metavar="JSON",
        help="arguments of the chat template (default: {})",
    )


class _Refuse(argparse.Action):
    """A flag of mlx_lm.server that does nothing here: said by name instead of being ignored."""

    def __call__(
        self, parser: argparse.ArgumentParser, _given: object, _value: object, option_string: str | None = None
    ) -> None:
        parser.error(f"{option_string}: {self.const}")


def _origins(text: str) -> tuple[str, ...]:
    return tuple(origin.strip() for origin in text.split(",") if origin.strip())


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit code. Raises ConfigError and ChildFailed with nothing left open."""
    if bool(args.prefill) != bool(args.decode):
        raise ConfigError("name both --prefill and --decode, or a --model to start a pair of them here")
    if bool(args.prefill) == bool(args.model):
        raise ConfigError("name a --model to start a pair of daemons, or running ones by --prefill and --decode")
    options = _pair_options(args)
    check_public(args.host, "--api-key", has_secret=options.api_key is not None, insecure=args.insecure)
    tls = tls_files(args)
    if options.api_key is not None:
        os.environ[API_KEY] = options.api_key  # the daemons that are started here ask for it too
    stop, http = StopSignal(args.drain_timeout + END_S), HttpThread()
    with stop.listening():
        if args.exit_with_parent:
            exit_with_parent()
        http.start()
        try:
            members, keepers = _members(args, http)
            # Before the daemons load their model: a busy port shows at once, and /health answers 503 meanwhile.
            endpoint = http.serve(
                pair_app(members, options, partial(_session, http, options.api_key)), args.host, args.port, tls
            )
            with _running(keepers):
                return _serve(endpoint, members, keepers, stop)
        finally:
            stop.ends()
            http.close()


def _session(http: HttpThread, key: str | None) -> aiohttp.ClientSession:
    """Return the session that asks the daemons, which know the key that we ask of clients."""
    session = http.session()
    if key is not None:
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def _pair_options(args: argparse.Namespace) -> PairOptions:
    defaults = {
        "temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p,
        "max_tokens": args.max_tokens,
    }  # fmt: skip
    return PairOptions(
        api_key=api_key(args),
        allowed_origins=args.allowed_origins,
        max_requests=args.max_requests,
        defaults=defaults,
        template_arguments=args.chat_template_args,
    )


def _members(args: argparse.Namespace, http: HttpThread) -> tuple[Members, list[Keeper]]:
    if args.prefill:
        named: list[tuple[Role, str]] = [("prefill", one) for one in args.prefill]
        named += [("decode", one) for one in args.decode]
        return Members([Member(role, where) for role, where in named]), []
    made = {role: Member(role, "", f"{role} is starting") for role in ROLES}
    members = Members(made.values())
    grace_s = args.drain_timeout + END_S / 2  # our own end has a limit, and a stopped child must not outlive it
    return members, [Keeper(role, _daemon(role, args), members, made[role], http, grace_s) for role in ROLES]


def _daemon(role: Role, args: argparse.Namespace) -> list[str]:
    """Return the command line of a child: the model's flags as they were given, ports of its own."""
    words = ["pdplane.cli.main", role, "--exit-with-parent", "--port", "0"]
    words += ["--drain-timeout", f"{args.drain_timeout:g}", "--log-level", args.log_level]
    if args.log_json:
        words.append("--log-json")
    if role == "prefill":
        words += ["--bootstrap-port", "0"]
    for flag in (*MODEL_FLAGS, *ROLE_FLAGS[role]):
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            words += [flag, str(value)]
    return words


class Keeper:
    """Keeps one child daemon running, on a thread of its own, and tells where it listens."""

    def __init__(
        self,
        role: Role,
        words: Sequence[str],
        members: Members,
        member: Member,
        http: HttpThread,
        grace_s: float,
    ) -> None:
        self._grace_s = grace_s
        self._role, self._words, self._members, self._member, self._http = role, words, members, member, http
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._keep, name=f"pdplane-keep-{role}", daemon=True)
        self.ready = threading.Event()
        self.failed: ChildFailed | None = None
        """Why the first start came to nothing; later ones are tried again."""

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Ask the child to end and start no other one; return at once."""
        with self._lock:
            self._closing.set()
            if self._child is not None:
                self._child.end()

    def close(self) -> None:
        """Wait for the child's end, and kill what does not end; idempotent."""
        self.end()
        self._thread.join()

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._run_once()
            except ChildFailed as failed:
                if self._closing.is_set():
                    return
                if not self.ready.is_set():
                    self.failed = failed
                    return
                if time.monotonic() - began > _STEADY_S:
                    pause = _FIRST_PAUSE_S
                logger.error("%s; it is started again in %g s", failed, pause)  # noqa: TRY400  (no bug of ours)
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _run_once(self) -> None:
        """Run one child from its start to its end. Raises ChildFailed when it ends by itself."""
        with self._lock:
            if self._closing.is_set():
                return
            child = self._child = Child(self._role, self._words, own_log=False, grace_s=self._grace_s)
        try:
            where = f"http://{child.hear(_READY_S)['http']}"
            self._on_loop(lambda: self._members.moved(self._member, where))
            self.ready.set()
            child.hear()
        finally:
            with self._lock:
                self._child = None
            child.close()
            self._on_loop(lambda: self._member.leave("it has ended", silent=True))

    def _on_loop(self, change: Callable[[], None]) -> None:
        async def on_loop() -> None:
            change()

        with suppress(LocalProtocolError):  # the HTTP thread has ended: nobody is sent there any more
            self._http.run(on_loop())


@contextmanager
def _running(keepers: Sequence[Keeper]) -> Iterator[None]:
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        for keeper in keepers:
            keeper.end()
        for keeper in keepers:
            keeper.close()


def _serve(endpoint: Endpoint, members: Members, keepers: Sequence[Keeper], stop: StopSignal) -> int:
    while keepers and members.complaint() is not None:
        if stop.wait(_LOOK_S):
            return 0
        for keeper in keepers:
            if keeper.failed is not None:
                raise keeper.failed
    where = str(reached(endpoint))
    print(json.dumps({"event": "ready", "role": "serve", "http": where, "pid": os.getpid()}), flush=True)
    while not stop.wait(_LOOK_S):
        pass
    return 0
