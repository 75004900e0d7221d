"""`pdplane generate`: the pair of requests of one room, as a gateway sends them, from the command line.

With `--model` instead of the pair's addresses the model runs in this process (pdplane.cli.generate_local).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import attrs
from yarl import URL

from pdplane.cli.experts import add_expert_flags
from pdplane.cli.flags import API_KEY, add_blas_flag
from pdplane.control.lookup import reason_in
from pdplane.errors import ConfigError, PdplaneError
from pdplane.ids import Room, new_room
from pdplane.options import count, duration, room, url

_OTHER_LEG_S = 0.5
"""How long a failure waits for the other leg's reason, which may say more."""
_CONNECT_S = 5.0


@attrs.frozen(eq=False)
class LegFailed(PdplaneError):
    """One leg's answer was an error."""

    role: str
    reason: str

    def __str__(self) -> str:
        return f"{self.role}: {self.reason}"


@attrs.frozen
class Wanted:
    """What to ask of the pair."""

    prefill: str
    decode: str
    prompt: Mapping[str, Any]
    room: Room
    max_tokens: int | None
    timeout_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument("--prefill", type=url, metavar="URL", help="HTTP address of the prefill daemon (default: none)")
    parser.add_argument("--decode", type=url, metavar="URL", help="HTTP address of the decode daemon (default: none)")
    parser.add_argument("--model", help="model to run here instead of asking a pair of daemons (default: none)")
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", help="longest answer in tokens (default: the server's own choice)"
    )
    parser.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    parser.add_argument("--room", type=room, help="number of the room (default: a fresh random one)")
    parser.add_argument(
        "--timeout",
        type=duration,
        default="10m",
        metavar="TIME",
        help="longest time for the whole answer (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    add_blas_flag(parser)
    add_expert_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, print; return the exit code. Raises LegFailed."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.model is not None:
        from pdplane.cli.generate_local import generate_here

        return generate_here(args, text)
    if args.prefill is None or args.decode is None or args.experts:
        raise ConfigError("name the pair with --prefill and --decode, or a --model (which --experts needs) to run here")
    prompt = {"messages": [{"role": "user", "content": text}]} if args.chat else {"text": text}
    number = new_room() if args.room is None else args.room
    wanted = Wanted(args.prefill, args.decode, prompt, number, args.max_tokens, args.timeout)
    printer = Printer(silent=args.json)
    try:
        answer = asyncio.run(ask(wanted, printer))
    finally:
        printer.end()
    if args.json:
        print(json.dumps(answer))
    return 0


_TAME = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters of an answer, which must not reach the terminal."""


class Printer:
    """Shows a growing text piece by piece."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._shown = 0

    def show(self, text: str) -> None:
        """Print what is new in the text."""
        if not self._silent:
            print(text[self._shown :].translate(_TAME), end="", flush=True)
            self._shown = len(text)

    def end(self) -> None:
        """End the line, if one was begun."""
        if self._shown:
            print(flush=True)


async def ask(wanted: Wanted, printer: Printer) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=wanted.timeout_s, connect=_CONNECT_S)
    key = os.environ.get(API_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        body = {**wanted.prompt, **await _bootstrap(session, wanted), "bootstrap_room": wanted.room}
        if wanted.max_tokens is not None:
            body["max_tokens"] = wanted.max_tokens
        legs = {
            asyncio.create_task(_prefill_leg(session, wanted, body), name="prefill"),
            asyncio.create_task(_decode_leg(session, wanted, body, printer), name="decode"),
        }
        try:
            answers = await _both(legs)
        finally:
            for leg in legs:  # closing a leg's connection cancels it in its daemon
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
    return {"room": wanted.room, **answers["decode"], "prefill": answers["prefill"]["meta_info"]}


async def _both(legs: set[asyncio.Task[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    done, _pending = await asyncio.wait(legs, return_when=asyncio.FIRST_EXCEPTION)
    if any(leg.exception() for leg in done):
        done, _pending = await asyncio.wait(legs, timeout=_OTHER_LEG_S)
        raise _joined([error for leg in done if (error := leg.exception()) is not None])
    return {leg.get_name(): leg.result() for leg in legs}


def _joined(errors: list[BaseException]) -> BaseException:
    known = [error for error in errors if isinstance(error, LegFailed)]
    if len(known) < 2:
        return errors[0]
    prefill, decode = sorted(known, key=lambda error: error.role == "decode")
    return LegFailed(prefill.role, f"{prefill.reason}; {decode}")


async def _bootstrap(session: aiohttp.ClientSession, wanted: Wanted) -> dict[str, Any]:
    async with _talking("prefill", wanted.prefill), session.get(f"{wanted.prefill}/server_info") as response:
        text = await response.text()
        if response.status != 200:
            raise LegFailed("prefill", f"{wanted.prefill} answered {response.status}: {reason_in(text)}")
        info = json.loads(text)
    host, port = info.get("bootstrap_host"), info.get("bootstrap_port")
    if not port:
        raise LegFailed("prefill", f"{wanted.prefill} names no bootstrap port; is it a prefill that is ready?")
    return {"bootstrap_host": host or URL(wanted.prefill).host, "bootstrap_port": port}


async def _prefill_leg(session: aiohttp.ClientSession, wanted: Wanted, body: Mapping[str, Any]) -> dict[str, Any]:
    async with _talking("prefill", wanted.prefill), session.post(f"{wanted.prefill}/generate", json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise LegFailed("prefill", reason_in(text))
        return dict(json.loads(text))


async def _decode_leg(
    session: aiohttp.ClientSession, wanted: Wanted, body: Mapping[str, Any], printer: Printer
) -> dict[str, Any]:
    asked = {**body, "stream": True}
    async with _talking("decode", wanted.decode), session.post(f"{wanted.decode}/generate", json=asked) as response:
        if response.status != 200:
            raise LegFailed("decode", reason_in(await response.text()))
        answer: dict[str, Any] = {}
        async for event in _events(response):
            if event == "[DONE]":
                return answer
            answer = json.loads(event)
            if "error" in answer:
                raise LegFailed("decode", answer["error"]["message"])
            printer.show(answer["text"])
    raise LegFailed("decode", "the stream broke off")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    pending = b""
    async for chunk in response.content.iter_any():
        *whole, pending = (pending + chunk).split(b"\n\n")
        for event in whole:
            yield event.decode().removeprefix("data: ")


@asynccontextmanager
async def _talking(role: str, where: str) -> AsyncIterator[None]:
    """Turn every failure of an exchange into LegFailed, which names the daemon."""
    try:
        yield
    except TimeoutError as error:
        raise LegFailed(role, f"{where} did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed(role, f"cannot talk to {where}: {error}") from error
    except ValueError as error:
        raise LegFailed(role, f"{where} does not speak like a daemon of pdplane: {error}") from error
