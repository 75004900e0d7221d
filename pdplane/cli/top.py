"""`pdplane top`: what daemons, or a `serve`, are doing, in the terminal."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pdplane.options import duration, url

_ASK_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("urls", type=url, nargs="+", metavar="URL", help="daemons, or a serve that names its own")
    parser.add_argument(
        "--every", type=duration, default="1s", metavar="TIME", help="time between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--api-key", metavar="KEY", help="key that the server asks for (default: none)")


def run(args: argparse.Namespace) -> int:
    """Show the table until Ctrl-C; return 0, or with --once 1 when no URL answered."""
    console = Console(highlight=False)
    if args.once:
        daemons = [daemon for where in args.urls for daemon in look(where, args.api_key)]
        console.print(_table(daemons))
        return 0 if any(daemon["reason"] is None for daemon in daemons) else 1
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            daemons = [daemon for where in args.urls for daemon in look(where, args.api_key)]
            live.update(_table(daemons), refresh=True)
            time.sleep(args.every)


def look(where: str, key: str | None = None) -> list[dict[str, Any]]:
    """Return the daemons behind a URL as `/status` of a `serve` lists them; one that does not answer has a reason."""
    silent = {"role": "?", "url": where, "in_flight": None, "statistics": None}
    try:
        status = _get(f"{where}/status", key)
        if status is not None:
            return list(status["daemons"])
        info, found = _get(f"{where}/server_info", key), _get(f"{where}/statistics", key)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [{**silent, "reason": f"does not answer: {error}"}]
    if info is None:
        return [{**silent, "reason": "is no daemon of pdplane"}]
    return [{**silent, "role": info.get("disaggregation_mode", "?"), "reason": None, "statistics": found}]


def _get(address: str, key: str | None) -> Any:  # noqa: ANN401  (JSON)
    """Return the JSON at an address, None where there is nothing."""
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 405):
            return None
        raise


def _table(daemons: list[dict[str, Any]]) -> Table:
    table = Table(
        "daemon", "address", "state", "rooms", "blocks lent", "waiting", "MiB pushed", "GiB/s", box=box.SIMPLE
    )
    for daemon in daemons:
        table.add_row(daemon["role"], daemon["url"], *_cells(daemon))
    return table


def _cells(daemon: Mapping[str, Any]) -> list[str]:
    found: Mapping[str, Any] = daemon["statistics"] or {}
    blocks, totals = found.get("blocks", {}), found.get("data", {}).get("totals", {})
    rooms = ", ".join(f"{state} {count}" for state, count in found.get("rooms", {}).items() if count)
    pushed, seconds = totals.get("pushed_bytes"), totals.get("push_seconds")
    return [
        daemon["reason"] or "ready",
        rooms or "-",
        str(blocks.get("used_blocks", "-")),
        str(blocks.get("waiting", "-")),
        "-" if pushed is None else f"{pushed / 2**20:.1f}",
        "-" if not pushed or not seconds else f"{pushed / 2**30 / seconds:.2f}",
    ]
