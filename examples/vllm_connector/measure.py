"""Measure the connector beside vLLM's own that run on CPU: the same pairs in turns, in servers that all run.

    pip install nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda; pip install --no-deps nixl==1.5.1
    python measure.py MODEL [PAIRS [TOKENS]] [--with pdplane,nixl,mooncake]

Each connector has a prefill and a decode server. Prompts are new in each pair, so that no prefix is found. Both
requests go out at once, but with NIXL: its decode needs what prefill's answer says. Printed are medians, and the median
of the ratios to pdplane's pair of the same turn.

* handover: from prefill's answer to decode's first token
* pair: from the first request to decode's first token
* cpu: CPU seconds of both servers for a pair
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servers import Server, free_port, pdplane

from pdplane import new_room


class Pdplane:
    """Ours; both halves go out at once."""

    def __init__(self, model: Path) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.prefill = Server(model, pdplane("kv_producer", bootstrap_port=port))
        self.decode = Server(model, pdplane("kv_consumer"))

    def run(self, prompt: list[int]) -> tuple[float, float]:
        """Run a pair; return when prefill answered and when decode's first token came."""
        room = new_room()
        theirs = {"do_remote_prefill": True, "room": room, "prefill": self.address}
        return both(self, prompt, {"do_remote_decode": True, "room": room}, theirs)


class Nixl:
    """vLLM's NixlConnector over UCX: decode reads from prefill when prefill has answered."""

    def __init__(self, model: Path) -> None:
        self.prefill, self.decode = (
            Server(
                model,
                {"kv_connector": "NixlConnector", "kv_role": role},
                VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            )
            for role in ("kv_producer", "kv_consumer")
        )

    def run(self, prompt: list[int]) -> tuple[float, float]:
        answered, told = ask(self.prefill, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        first, _ = ask(self.decode, prompt, 2, told)
        return answered, first


class Mooncake:
    """vLLM's MooncakeConnector over TCP: prefill writes when it has computed and decode has asked."""

    def __init__(self, model: Path) -> None:
        self.bootstrap = free_port()
        self.prefill, self.decode = (
            Server(
                model,
                {
                    "kv_connector": "MooncakeConnector",
                    "kv_role": role,
                    "engine_id": role,
                    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
                },
                VLLM_MOONCAKE_BOOTSTRAP_PORT=str(self.bootstrap if role == "kv_producer" else free_port()),
            )
            for role in ("kv_producer", "kv_consumer")
        )

    def run(self, prompt: list[int]) -> tuple[float, float]:
        transfer = str(uuid.uuid4())
        theirs = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": "kv_producer",
            "remote_bootstrap_addr": f"http://127.0.0.1:{self.bootstrap}",
        }
        return both(self, prompt, {"do_remote_decode": True, "transfer_id": transfer}, theirs)


Kind = Pdplane | Nixl | Mooncake
KINDS: dict[str, type[Kind]] = {"pdplane": Pdplane, "nixl": Nixl, "mooncake": Mooncake}


def ask(server: Server, prompt: list[int], tokens: int, params: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return when the first token came, and the answer's `kv_transfer_params`. Raises RuntimeError for an error."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"kv_transfer_params": params, "stream": tokens > 1}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        line = answer.readline()  # a stream's first event, or all of it
        first, rest = time.monotonic(), answer.read()
    if answer.status != 200 or b'"error"' in line:
        raise RuntimeError(f"{answer.status}: {line!r}; log: {server.log}")
    return first, {} if tokens > 1 else json.loads(line + rest)["kv_transfer_params"] or {}


def both(
    kind: Pdplane | Mooncake, prompt: list[int], ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[float, float]:
    """Ask both at once; return when prefill answered and when decode's first token came."""
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(ask, kind.prefill, prompt, 1, ours)
        first, _ = ask(kind.decode, prompt, 2, theirs)
        return prefill.result()[0], first


def measure(kind: Kind, prompt: list[int]) -> dict[str, float]:
    before, begun = kind.prefill.cpu_s() + kind.decode.cpu_s(), time.monotonic()
    answered, first = kind.run(prompt)
    cpu = kind.prefill.cpu_s() + kind.decode.cpu_s() - before
    return {"handover": first - answered, "pair": first - begun, "cpu": cpu}


def make_prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + place * 104729 + place * place) % 40000 + 100 for place in range(length)]


def runs(name: str, kind: Kind, tokens: int) -> bool:
    """Wait for both servers and run two pairs to warm up; return whether that works, and print why not."""
    try:
        kind.prefill.wait()
        kind.decode.wait()
        for number in range(2):
            kind.run(make_prompt(-number, tokens))
    except (OSError, RuntimeError) as error:
        print(f"{name} does not run here: {error}", flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("pairs", type=int, nargs="?", default=20)
    parser.add_argument("tokens", type=int, nargs="?", default=500)
    parser.add_argument("--with", dest="kinds", default=",".join(KINDS))
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as servers:
        kinds: dict[str, Kind] = {name: KINDS[name](options.model) for name in options.kinds.split(",")}
        for kind in kinds.values():
            servers.enter_context(kind.prefill)
            servers.enter_context(kind.decode)
        kinds = {name: kind for name, kind in kinds.items() if runs(name, kind, options.tokens)}
        for turn in range(options.pairs):
            prompt = make_prompt(turn + 1, options.tokens)
            for name in sorted(kinds, key=lambda name: (turn + list(kinds).index(name)) % len(kinds)):
                found.setdefault(name, []).append(measure(kinds[name], prompt))
    print(f"{options.pairs} pairs of {options.tokens} tokens, load averages {os.getloadavg()}")
    for name in kinds:
        for what in ("handover", "pair", "cpu"):
            values = [entry[what] for entry in found[name]]
            ratios = [entry[what] / ours[what] for entry, ours in zip(found[name], found["pdplane"], strict=True)]
            print(f"{name:9} {what:9} {statistics.median(values):8.4f} s   x{statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
