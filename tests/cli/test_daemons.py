"""Both daemons as processes on the toy engine: ready lines, a pair of requests, signals, busy ports, listeners."""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdplane.ids import Endpoint
from pdplane.toy.model import ToyOptions, toy_answer
from tests.certificates import member
from tests.cli.daemons import PATIENCE_S, Daemon, command
from tests.cli.sleeping_prefill import SLEEP
from tests.http_client import ask

PROMPT = "Once upon a time there was a plane"


def expected(prompt: str, count: int) -> str:
    return bytes(token for token, _logprob in toy_answer(ToyOptions(), list(prompt.encode()), count)).decode()


def generate(prefill: str, decode: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = command("generate", "--prefill", prefill, "--decode", decode, *words)
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Daemon, Daemon]]:
    with Daemon("prefill") as prefill, Daemon("decode") as decode:
        yield prefill, decode


def test_a_pair_answers_as_one_process_would(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    told = generate(prefill.url, decode.url, "--max-tokens", "24", PROMPT)
    assert (told.returncode, told.stdout) == (0, expected(PROMPT, 24) + "\n"), told.stderr
    as_json = generate(prefill.url, decode.url, "--max-tokens", "5", "--json", "--room", "77", PROMPT)
    answer = json.loads(as_json.stdout)
    assert (answer["room"], answer["text"]) == (77, expected(PROMPT, 5))
    assert answer["meta_info"]["completion_tokens"] == 5
    assert answer["prefill"]["prompt_tokens"] == len(PROMPT)
    chat = generate(prefill.url, decode.url, "--max-tokens", "5", "--chat", "hi")
    assert chat.stdout == expected("user: hi\nassistant: ", 5) + "\n"
    for daemon in pair:
        assert ask(daemon.http, "GET", "/health").status == 200
        assert ask(daemon.http, "GET", "/statistics").json["blocks"]["used_blocks"] == 0


def test_ready_lines_name_every_address(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = (daemon.ready for daemon in pair)
    assert (prefill["event"], prefill["role"], decode["role"]) == ("ready", "prefill", "decode")
    assert prefill["control"]
    assert decode["data"]
    info = ask(pair[0].http, "GET", "/server_info").json
    assert prefill["bootstrap"] == f"{info['bootstrap_host']}:{info['bootstrap_port']}"


def test_listeners_are_loopback_only(pair: tuple[Daemon, Daemon]) -> None:
    for daemon in pair:
        addresses = _listening(daemon.process.pid)
        assert addresses
        assert all(address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1") for address in addresses)


def test_refusals_of_either_leg_are_told(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    too_long = generate(prefill.url, decode.url, "--max-tokens", "5", "x" * 5000)
    assert too_long.returncode == 1
    assert "prefill: " in too_long.stderr
    assert "tokens" in too_long.stderr
    swapped = generate(decode.url, prefill.url, "hi")
    assert swapped.returncode == 1
    assert "names no bootstrap port" in swapped.stderr
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    dead = generate(prefill.url, nobody, "hi")
    assert dead.returncode == 1
    assert f"decode: cannot talk to {nobody}" in dead.stderr


def test_decode_names_a_prefill_that_is_not_there(pair: tuple[Daemon, Daemon]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    body = {"text": "hi", "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
    answer = ask(pair[1].http, "POST", "/generate", body)
    assert answer.status == 502
    assert str(port) in answer.json["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_blas_library_that_cannot_be_loaded_ends_it(role: str) -> None:
    daemon = Daemon(role, "--model", "tiny:llama", "--blas", "/nonexistent/libblas.so")
    assert daemon.process.wait(PATIENCE_S) != 0
    code, log = daemon.end()
    assert code == 1
    assert "cannot load '/nonexistent/libblas.so'" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_signal_ends_it_cleanly(role: str, number: signal.Signals) -> None:
    daemon = Daemon(role, "--log-json", "--log-level", "debug")
    daemon.wait_ready()
    code, log = daemon.end(number)
    assert code == 0, log
    assert "Traceback" not in log
    assert all(json.loads(line)["logger"] for line in log.splitlines())


def test_a_signal_while_a_request_runs_drains_it() -> None:
    prefill = Daemon("prefill", "--bootstrap-timeout", "1s")
    prefill.wait_ready()
    body = {"text": "hi", "bootstrap_room": 5, "max_tokens": 3}
    with socket.create_connection((prefill.http.host, prefill.http.port)) as client:
        payload = json.dumps(body)
        client.sendall(
            f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n{payload}".encode()
        )
        assert _legs(prefill) == 1
        prefill.process.send_signal(signal.SIGTERM)
        assert b" 503 " in client.recv(4096).split(b"\r\n")[0]
    assert prefill.process.wait(PATIENCE_S) == 0
    prefill.end()


def test_a_second_signal_ends_it_at_once() -> None:
    daemon = Daemon("prefill", "--drain-timeout", "1h")
    daemon.wait_ready()
    with socket.create_connection((daemon.http.host, daemon.http.port)) as client:
        payload = json.dumps({"text": "hi", "bootstrap_room": 5})
        client.sendall(
            f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n{payload}".encode()
        )
        assert _legs(daemon) == 1
        daemon.process.send_signal(signal.SIGTERM)
        while ask(daemon.http, "GET", "/health").status == 200:
            pass  # until the first signal has been taken
        assert daemon.end(signal.SIGINT)[0] == 130


def test_a_hung_thread_shows_and_cannot_keep_it_alive(pair: tuple[Daemon, Daemon]) -> None:
    with Daemon("prefill", "--drain-timeout", "100ms", module="tests.cli.sleeping_prefill") as prefill:
        rendezvous = Endpoint.parse(prefill.ready["bootstrap"])
        body = {"input_ids": [1, SLEEP, 2], "bootstrap_host": rendezvous.host, "bootstrap_port": rendezvous.port}
        body |= {"bootstrap_room": 9, "stream": True, "max_tokens": 2}
        with ThreadPoolExecutor(2) as clients:
            for daemon in (prefill, pair[1]):
                clients.submit(ask, daemon.http, "POST", "/generate", body)
            deadline_s = time.monotonic() + PATIENCE_S
            while (health := ask(prefill.http, "GET", "/health")).status == 200:
                assert time.monotonic() < deadline_s
            assert "pdplane-ToyPrefillEngine hangs" in health.json["status"]
            assert ask(prefill.http, "GET", "/livez").status == 503
            code, log = prefill.end()
    assert code == 1, log
    assert "Threads that still run: MainThread" in log
    assert "pdplane-ToyPrefillEngine" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("role", "flag"), [("prefill", "--port"), ("prefill", "--bootstrap-port"), ("decode", "--port")]
)
def test_a_busy_port_is_named(role: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hog:
        port = str(hog.getsockname()[1])
        daemon = Daemon(role, flag, port)
        assert daemon.process.wait(PATIENCE_S) != 0
        code, log = daemon.end()
    assert code == 1
    assert f"port {port} on 127.0.0.1 is taken" in log
    assert "Traceback" not in log


def test_a_host_for_everybody_warns() -> None:
    daemon = Daemon("decode", "--host", "0.0.0.0", "--advertise-host", "127.0.0.1", "--insecure")
    daemon.wait_ready()
    for name in ("http", "data"):
        address = Endpoint.parse(daemon.ready[name])
        assert address.host == "127.0.0.1"  # not 0.0.0.0, which is nobody's address
        socket.create_connection((address.host, address.port), PATIENCE_S).close()
    _code, log = daemon.end()
    assert "listening on 0.0.0.0, which other machines can reach, without a secret" in log
    assert "peers are told 127.0.0.1" in log


def test_a_secret_pairs_only_those_who_share_it(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("a secret of more than sixteen bytes\n")
    theirs.write_text("another secret of that same length!\n")
    for file in (ours, theirs):
        file.chmod(0o600)
    with (
        Daemon("prefill", "--secret-file", str(ours)) as prefill,
        Daemon("decode", "--secret-file", str(ours)) as decode,
        Daemon("decode", "--secret-file", str(theirs)) as stranger,
    ):
        assert generate(prefill.url, decode.url, "--max-tokens", "4", "hi").stdout == expected("hi", 4) + "\n"
        refused = generate(prefill.url, stranger.url, "--max-tokens", "4", "hi")
        assert refused.returncode == 1
        assert "does not prove that it knows our secret" in refused.stderr


def test_daemons_talk_tls_and_ask_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = member()
    files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca), "--transport", "tcp")
    with Daemon("prefill", *files, "--api-key", "k") as prefill, Daemon("decode", *files, "--api-key", "k") as decode:
        urls = [f"https://{daemon.ready['http']}" for daemon in (prefill, decode)]
        refused = generate(*urls, "--max-tokens", "4", "hi")
        assert "certificate verify failed" in refused.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
        assert "API key is missing" in generate(*urls, "--max-tokens", "4", "hi").stderr
        monkeypatch.setenv("PDPLANE_API_KEY", "k")
        told = generate(*urls, "--max-tokens", "4", "hi")
        assert told.stdout == expected("hi", 4) + "\n", told.stderr
        context = ssl.create_default_context(cafile=tls.ca)
        statistics = urllib.request.Request(f"{urls[1]}/statistics", headers={"Authorization": "Bearer k"})
        with urllib.request.urlopen(statistics, context=context, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["receiver"]["ways"] == {"tls": 1}
        with urllib.request.urlopen(f"{urls[1]}/health", context=context, timeout=PATIENCE_S) as answer:
            assert answer.status == 200, "nobody needs a key for it"
        with socket.create_connection((decode.http.host, decode.http.port), PATIENCE_S) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(4096)


def _legs(daemon: Daemon) -> int:
    """Wait, bounded by the patience of the HTTP client, for the one request to arrive."""
    for _ in range(1000):
        legs = int(ask(daemon.http, "GET", "/statistics").json["legs"])
        if legs:
            return legs
    return 0


def _listening(pid: int) -> set[str]:
    """Addresses on which a process listens, read from /proc."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = descriptor.readlink().name if descriptor.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(_address(fields[1].split(":")[0], family))
    return found


def _address(text: str, family: socket.AddressFamily) -> str:
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def test_addresses_of_proc_are_read() -> None:
    assert _address("0100007F", socket.AF_INET) == "127.0.0.1"
    assert str(Endpoint(_address("00000000000000000000000001000000", socket.AF_INET6), 1)) == "[::1]:1"


# ---- The dashboard asks for what the daemons have


DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "pdplane.json"


def selectors(query: Any) -> Iterator[Any]:  # noqa: ANN401  (the parser has no common type)
    """Every metric that a parsed query reads, with its matchers."""
    if isinstance(query, promql_parser.VectorSelector):
        yield query
    for name in ("lhs", "rhs", "expr", "args", "vector_selector"):
        found = getattr(query, name, None)
        for part in found if isinstance(found, list) else [found]:
            if part is not None:
                yield from selectors(part)


def has(samples: list[Sample], selector: Any) -> bool:  # noqa: ANN401
    """Whether a sample answers a selector; the label `job` comes from Prometheus."""
    wanted = [matcher for matcher in selector.matchers.matchers if matcher.name != "job"]

    def fits(sample: Sample) -> bool:
        return sample.name == selector.name and all(
            re.fullmatch(matcher.value, sample.labels.get(matcher.name, "")) for matcher in wanted
        )

    return any(map(fits, samples))


def scrape(daemon: Daemon) -> Iterator[Sample]:
    for family in text_string_to_metric_families(ask(daemon.http, "GET", "/metrics").body):
        yield from family.samples


def test_the_dashboard_reads_only_what_a_pair_has(pair: tuple[Daemon, Daemon]) -> None:
    assert generate(pair[0].url, pair[1].url, "--max-tokens", "5", PROMPT).returncode == 0
    of_each = [list(scrape(daemon)) for daemon in pair]
    samples = [sample for found in of_each for sample in found]
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        parsed = promql_parser.parse(query.replace("$__rate_interval", "1m"))
        found = list(selectors(parsed))
        assert found, query
        missing = [str(selector.prettify()) for selector in found if not has(samples, selector)]
        assert not missing, query
    both = {"kv_transfer_latency_ms", "kv_transfer_alloc_ms", "kv_transfer_total_mb"}
    only = ({"kv_transfer_bootstrap_ms", "prefill_compute_ms", "kv_transfer_speed_gb_s"}, {"kv_assembly_ms"})
    for found, own in zip(of_each, only, strict=True):
        filled = {sample.name for sample in found if sample.value > 0}
        assert {f"pdplane_{name}_count" for name in both | own} <= filled
