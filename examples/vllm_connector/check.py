"""Check the connector against real vLLM servers: pairs give the ids that one vLLM process gives, and faults end well.

    make vllm-check        or: python check.py FOLDER_OF_SMOLLM2 [PHASE ...]     (transformers, tiny, ranks, smollm2)

The bit rule. A pair gives the same greedy ids as one process. Its logprobs are, bit for bit, those of one process whose
prefix cache holds all of the prompt but the last token: decode computes that token alone, and a product of one row does
not round as one of many. (One process that computes the prompt in one piece differs in the last bits.)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servers import HERE, Server, free_port, pdplane, tiny_llama

from pdplane import new_room

BLOCK, TOKENS = 32, 12
QUICK = {"bootstrap_timeout_s": 8, "ping_interval_s": 1}  # for halves that never come, and peers that fall silent
Answer = dict[str, Any]


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + position * 104729) % 40000 + 100 for position in range(length)]


def ids(answer: Answer) -> list[int] | str:
    """Return the token ids of an answer; of an error its words."""
    return answer["choices"][0]["token_ids"] if "choices" in answer else str(answer)


def logprobs(answer: Answer) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


class Pair:
    """A prefill, a decode, and one process that computes the same alone."""

    def __init__(self, prefill: Server, decode: Server, alone: Server, rendezvous: int) -> None:
        self.prefill, self.decode, self.alone = prefill, decode, alone
        self.address = f"127.0.0.1:{rendezvous}"
        for server in (prefill, decode, alone):
            server.complete(prompt(0, 40), 1)  # a first forward takes seconds

    def ask_prefill(self, tokens: list[int], room: int) -> Answer:
        return self.prefill.complete(tokens, 1, kv_transfer_params={"do_remote_decode": True, "room": room})

    def ask_decode(self, tokens: list[int], room: int, **params: Any) -> Answer:
        asked = {"do_remote_prefill": True, "room": room, "prefill": self.address} | params
        return self.decode.complete(tokens, TOKENS, kv_transfer_params=asked)

    def complete(self, tokens: list[int]) -> Answer:
        room = new_room()
        with ThreadPoolExecutor(1) as pool:
            half = pool.submit(self.ask_prefill, tokens, room)
            answer = self.ask_decode(tokens, room)
            assert "choices" in half.result(), half.result()
        return answer

    def check(self, tokens: list[int], **alone_with: str) -> None:
        both, alone = ids(self.complete(tokens)), ids(self.alone.complete(tokens, TOKENS, **alone_with))
        assert both == alone, f"{len(tokens)} tokens: {both}, alone {alone}"


def counter(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.url("/metrics"), timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.05)


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"ok  {name}  ({time.monotonic() - begun:.1f} s)", flush=True)


# ---- what a pair computes


def check_ids(pair: Pair) -> None:
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1):
        with case(f"{length} tokens"):
            pair.check(prompt(length, length))
    with case("chunked prefill, 600 tokens in chunks of 128 at most"):
        pair.check(prompt(3, 600))
    for where, server in (("prefill", pair.prefill), ("decode", pair.decode)):
        with case(f"a prefix hit on {where}"):
            long = prompt(len(where), 200)
            server.complete(long[:150], 1)
            before = counter(server, "vllm:prefix_cache_hits_total")
            pair.check(long)
            assert counter(server, "vllm:prefix_cache_hits_total") - before >= 4 * BLOCK
    with case("8 at once"), ThreadPoolExecutor(8) as pool:
        list(pool.map(pair.check, [prompt(100 + seed, 40 + 30 * seed) for seed in range(8)]))


def check_bits(pair: Pair) -> None:
    for length in (BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 1):
        with case(f"the bit rule, {length} tokens"):
            tokens = prompt(1000 + length, length)
            pair.alone.complete(tokens, 1)  # fills its prefix cache up to the last token
            alone, both = pair.alone.complete(tokens, TOKENS), pair.complete(tokens)
            assert (ids(both), logprobs(both)) == (ids(alone), logprobs(alone)), length


# ---- what faults do


def hang_up(server: Server, tokens: list[int], **params: Any) -> None:
    """Send a half, wait until the scheduler has it, and close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"model": "model", "prompt": tokens, "max_tokens": 1000, "ignore_eos": True, "kv_transfer_params": params}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_for(lambda: busy(server) > 0, "the start of a request")
    connection.close()
    wait_for(lambda: busy(server) == 0, "the end of an aborted request")


def busy(server: Server) -> float:
    return counter(server, "vllm:num_requests_running") + counter(server, "vllm:num_requests_waiting")


def check_faults(pair: Pair) -> None:
    with case("bad kv_transfer_params: decode computes for itself and says why"):
        answer = pair.ask_decode(prompt(7, 50), -5)
        assert ids(answer) == ids(pair.alone.complete(prompt(7, 50), TOKENS))
        assert answer["kv_transfer_params"]["cause"] == "bad_request", answer
    with case("decode's client hangs up before prefill came"):
        hang_up(pair.decode, prompt(8, 50), do_remote_prefill=True, room=new_room(), prefill=pair.address)
        pair.check(prompt(8, 50))
    with case("prefill's client hangs up while it computes"):
        hang_up(pair.prefill, prompt(9, 1000), do_remote_decode=True, room=new_room())
        pair.check(prompt(9, 50))
    with case("an absent prefill: nobody at the rendezvous"):
        refused(pair, "unreachable", prefill=f"127.0.0.1:{free_port()}")
    with case("an absent prefill: its half never comes"):
        refused(pair, "unmatched")
    with case("an absent decode: prefill's blocks come back"):
        pair.ask_prefill(prompt(10, 100), room := new_room())
        wait_for(lambda: f"room {room}: unmatched" in pair.prefill.log.read_text(), "the end of the wait for decode")
    pair.check(prompt(11, 50))


def refused(pair: Pair, cause: str, **params: Any) -> None:
    """Decode answers with an error of its own or, told to compute again, with the ids; the cause is in its log."""
    tokens, room = prompt(12, 50), new_room()
    answer = pair.ask_decode(tokens, room, **params)
    assert f"room {room}: {cause}" in pair.decode.log.read_text()
    assert "choices" not in answer, answer


def check_killed_prefill(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.ask_decode, prompt(13, 50), room := new_room())
        wait_for(lambda: busy(pair.decode) > 0, "decode's request")
        pair.prefill.kill()
        assert "choices" not in answer.result(), answer.result()
    assert any(f"room {room}: {cause}" in pair.decode.log.read_text() for cause in ("peer_lost", "unreachable"))


# ---- the phases


def run_tiny(folder: Path, smollm2: Path) -> None:
    model, port = tiny_llama(folder, smollm2), free_port()
    settings: dict[str, Any] = {"bootstrap_port": port, **QUICK}
    recompute = pdplane("kv_consumer", **QUICK) | {"kv_load_failure_policy": "recompute"}

    def start_prefill() -> Server:
        return servers.enter_context(
            Server(model, pdplane("kv_producer", **settings), "--max-num-batched-tokens", "128")
        )

    with contextlib.ExitStack() as servers:
        alone = servers.enter_context(Server(model, None))
        prefill, decode = start_prefill(), servers.enter_context(Server(model, pdplane("kv_consumer", **QUICK)))
        pair = Pair(prefill.wait(), decode.wait(), alone.wait(), port)
        check_ids(pair)
        check_bits(pair)
        check_faults(pair)
        with case("prefill is killed while decode waits"):
            check_killed_prefill(pair)
        pair.prefill = start_prefill().wait()
        with case("prefill was started again"):
            pair.check(prompt(14, 50))
        pair.ask_prefill(prompt(15, 100), new_room())  # decode's half will not come
        decode.kill()
        pair.decode = servers.enter_context(Server(model, recompute)).wait()
        with case("decode was started again"):
            pair.check(prompt(16, 50))
        with case("an absent prefill, and decode may compute for itself"):
            answer = pair.ask_decode(prompt(17, 50), new_room(), prefill=f"127.0.0.1:{free_port()}")
            assert ids(answer) == ids(alone.complete(prompt(17, 50), TOKENS))
            assert answer["kv_transfer_params"]["cause"] == "unreachable", answer


def run_ranks(folder: Path, smollm2: Path) -> None:
    """Compare with the side of one rank, which computes the same prompt for itself: the salt keeps the caches apart."""
    model = tiny_llama(folder, smollm2)
    for of_prefill, of_decode in ((1, 2), (2, 1)):
        port, split = free_port(), "--tensor-parallel-size"
        prefill = Server(model, pdplane("kv_producer", bootstrap_port=port), split, str(of_prefill))
        decode = Server(model, pdplane("kv_consumer"), split, str(of_decode))
        with prefill, decode, case(f"tensor parallel {of_prefill} to {of_decode}, with the start of both"):
            pair = Pair(prefill.wait(), decode.wait(), prefill if of_prefill == 1 else decode, port)
            for length in (BLOCK, BLOCK + 1, 200):
                pair.check(prompt(length, length), cache_salt="alone")


def run_smollm2(folder: Path, smollm2: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as servers:
        alone = servers.enter_context(Server(smollm2, None))
        prefill = servers.enter_context(Server(smollm2, pdplane("kv_producer", bootstrap_port=port)))
        decode = servers.enter_context(Server(smollm2, pdplane("kv_consumer")))
        pair = Pair(prefill.wait(), decode.wait(), alone.wait(), port)
        for length in (5, BLOCK, 3 * BLOCK + 1, 300):
            with case(f"SmolLM2, {length} tokens"):
                pair.check(prompt(length, length))
        with case("SmolLM2, 8 at once"), ThreadPoolExecutor(8) as pool:
            list(pool.map(pair.check, [prompt(200 + seed, 30 + 20 * seed) for seed in range(8)]))


def run_transformers(folder: Path, smollm2: Path) -> None:
    """Run the example that needs torch too, which this environment has and the project's own does not."""
    for model in ([], [str(smollm2)]):
        with case("transformers, " + ("SmolLM2" if model else "a tiny model")):
            command = [sys.executable, str(HERE.parent / "transformers_pair.py"), *model]
            told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert told.stdout.endswith("equal to one:  True\n"), told.stdout + told.stderr


PHASES = {"transformers": run_transformers, "tiny": run_tiny, "ranks": run_ranks, "smollm2": run_smollm2}

if __name__ == "__main__":
    for phase in sys.argv[2:] or PHASES:
        with tempfile.TemporaryDirectory() as scratch:
            PHASES[phase](Path(scratch) / "model", Path(sys.argv[1]))
    print("the connector is as it should be")
