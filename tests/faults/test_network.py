"""Two hosts, as far as the kernel can tell: a prefill and a decode in network namespaces, and a link of our own.

A namespace has no default route and no name server, so a start there shows that none is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest

from pdplane.toy.model import ToyOptions, toy_answer
from tests.cli.daemons import PATIENCE_S, Daemon

PROMPT = "Once upon a time there was a network"
HERE, THERE = f"pd-p-{os.getpid()}", f"pd-d-{os.getpid()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    if shutil.which("ip") is None:
        return "there is no program `ip`"
    if not os.access("/dev/net/tun", os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(["ip", "netns", "add", HERE], capture_output=True, text=True, check=False, timeout=10)
    if tried.returncode:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    ip("netns", "del", HERE)
    return None


class TwoHosts:
    """The namespaces and the link between them."""

    def __init__(self, prefill: str, decode: str, prefix: int) -> None:
        self._addresses = {HERE: f"{prefill}/{prefix}", THERE: f"{decode}/{prefix}"}

    def __enter__(self) -> Self:
        for host in (HERE, THERE):
            ip("netns", "add", host)
        words = [sys.executable, "-m", "tests.faults.relay", HERE, THERE]
        self._relay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said("up")
        for host, address in self._addresses.items():
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "pd0", "up")
            ip("-n", host, "addr", "add", address, "dev", "pd0", *(["nodad"] if ":" in address else []))
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.communicate("", timeout=10)
        for host in (HERE, THERE):
            ip("netns", "del", host)

    def now(self, **how: Any) -> None:  # noqa: ANN401  (whatever JSON carries)
        """Change the link."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(json.dumps(how) + "\n")
        self._relay.stdin.flush()
        self._said("changed")

    def _said(self, word: str) -> None:
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == f"{word}\n"


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts("10.77.0.1", "10.77.0.2", 24) as found:
        yield found


def at(host: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", host)


def ask(prefill: str, decode: Daemon, prompt: str = PROMPT, tokens: int = 20) -> subprocess.CompletedProcess[str]:
    """A pair of requests, from decode's host."""
    words = [*at(THERE), sys.executable, "-m", "pdplane.cli.main", "generate", "--json", "--prefill", prefill]
    words += ["--decode", decode.url, "--max-tokens", str(tokens), prompt]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)


def is_right(told: subprocess.CompletedProcess[str], prompt: str = PROMPT, tokens: int = 20) -> bool:
    expected = bytes(token for token, _ in toy_answer(ToyOptions(), list(prompt.encode()), tokens)).decode()
    assert told.returncode == 0, told.stderr
    return bool(json.loads(told.stdout)["text"] == expected)


def test_a_link_with_delay_and_loss_costs_time_and_nothing_else(hosts: TwoHosts) -> None:
    hosts.now(delay=0.02, loss=0.02, twice=0.02, jitter=0.01)
    with (
        Daemon("prefill", "--host", "10.77.0.1", "--insecure", before=at(HERE)) as prefill,
        Daemon("decode", "--host", "10.77.0.2", "--insecure", before=at(THERE)) as decode,
    ):
        assert all(is_right(ask(prefill.url, decode, PROMPT * times), PROMPT * times) for times in (1, 12, 3))


def test_hosts_with_ipv6_only() -> None:
    with (
        TwoHosts("fd00:77::1", "fd00:77::2", 64),
        Daemon("prefill", "--host", "fd00:77::1", "--insecure", before=at(HERE)) as prefill,
        Daemon("decode", "--host", "fd00:77::2", "--insecure", before=at(THERE)) as decode,
    ):
        assert "[fd00:77::1]" in prefill.url
        assert is_right(ask(prefill.url, decode))


def test_a_prefill_behind_nat_is_reached_at_the_address_that_it_advertises(hosts: TwoHosts) -> None:
    hosts.now(nat=["192.0.2.10", "10.77.0.1"])
    ip("-n", THERE, "route", "add", "192.0.2.0/24", "dev", "pd0")
    flags = ("--host", "10.77.0.1", "--insecure", "--advertise-host", "192.0.2.10")
    with (
        Daemon("prefill", *flags, before=at(HERE)) as prefill,
        Daemon("decode", "--host", "10.77.0.2", "--insecure", before=at(THERE)) as decode,
    ):
        outside = prefill.url.replace("10.77.0.1", "192.0.2.10")
        assert prefill.ready["bootstrap"].startswith("192.0.2.10:")
        assert is_right(ask(outside, decode))


@pytest.mark.slow
def test_a_partition_in_the_middle_of_a_push_ends_the_room_and_nothing_else(hosts: TwoHosts) -> None:
    long = PROMPT * 12  # 165,888 bytes of cache
    hosts.now(delay=0.005, rate=12_000)
    with (
        Daemon("prefill", "--host", "10.77.0.1", "--insecure", before=at(HERE)) as prefill,
        Daemon("decode", "--host", "10.77.0.2", "--insecure", before=at(THERE)) as decode,
    ):
        assert is_right(ask(prefill.url, decode))
        words = [*at(THERE), sys.executable, "-m", "pdplane.cli.main", "generate", "--prefill", prefill.url]
        words += ["--decode", decode.url, "--max-tokens", "3", long]
        asking = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        bytes_here = _moved()
        while _moved() - bytes_here < 40_000 and asking.poll() is None:
            time.sleep(0.05)
        hosts.now(cut=True)
        began = time.monotonic()
        _out, error = asking.communicate(timeout=PATIENCE_S)
        assert asking.returncode == 1
        assert "decode: " in error
        time.sleep(max(0.0, 15 - (time.monotonic() - began)))
        hosts.now(cut=False, rate=1e9)
        assert is_right(ask(prefill.url, decode, long, 3), long, 3)


@pytest.mark.slow
def test_a_cut_of_three_seconds_ends_no_room(hosts: TwoHosts) -> None:
    """Three pings are six seconds; TCP would try again after as long, had it doubled its pauses meanwhile."""
    long = PROMPT * 12
    hosts.now(delay=0.005, rate=12_000)
    with (
        Daemon("prefill", "--host", "10.77.0.1", "--insecure", before=at(HERE)) as prefill,
        Daemon("decode", "--host", "10.77.0.2", "--insecure", before=at(THERE)) as decode,
    ):
        words = [*at(THERE), sys.executable, "-m", "pdplane.cli.main", "generate", "--json", "--prefill", prefill.url]
        words += ["--decode", decode.url, "--max-tokens", "3", long]
        asking = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        bytes_here = _moved()
        while _moved() - bytes_here < 40_000 and asking.poll() is None:
            time.sleep(0.05)
        hosts.now(cut=True)
        time.sleep(3)
        hosts.now(cut=False, rate=1e9)
        out, error = asking.communicate(timeout=2 * PATIENCE_S)
        assert is_right(subprocess.CompletedProcess(words, asking.returncode, out, error), long, 3)


def _moved() -> int:
    """Bytes that prefill's host has sent."""
    told = subprocess.run(
        [*at(HERE), "cat", "/sys/class/net/pd0/statistics/tx_bytes"], capture_output=True, text=True, check=True
    )
    return int(told.stdout)
