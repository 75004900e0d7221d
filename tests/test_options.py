"""Texts of the command line as values, and the logs."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable

import pytest

from pdplane import options
from pdplane.cli.flags import add_model_flags, engine_options
from pdplane.cli.log import JsonFormatter
from pdplane.ids import Endpoint


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("1 kB", 1000),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert options.size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("120", 120), ("1.5s", 1.5), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("0", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert options.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("http://h:1/", "http://h:1"),
        ("https://[::1]:8100", "https://[::1]:8100"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert options.url(text) == url


def test_other_values() -> None:
    assert options.port("0") == 0
    assert options.count("7") == 7
    assert options.whole("0") == 0
    assert options.room(str(2**63 - 1)) == 2**63 - 1
    assert options.endpoint("[::1]:8998") == Endpoint("::1", 8998)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (options.size, "2 apples"), (options.size, "-1"), (options.size, "0"), (options.size, "1e9"),
        (options.size, "99999999TiB"), (options.duration, "soon"), (options.duration, "1d"), (options.port, "70000"),
        (options.port, "-1"), (options.count, "0"), (options.count, "x"), (options.whole, "-1"),
        (options.room, str(2**63)),
        (options.endpoint, "host"), (options.url, "http://h/path"), (options.url, "ftp://h"), (options.url, ""),
    ],
)  # fmt: skip
def test_a_wrong_text_is_named(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse(text)
    assert text in str(caught.value)


def test_json_logs_are_one_object_a_line() -> None:
    record = logging.LogRecord("pdplane.x", logging.WARNING, __file__, 1, "lost %s\nbadly", ("h:1",), None)
    fields = json.loads(JsonFormatter().format(record))
    assert (fields["level"], fields["logger"], fields["message"]) == ("warning", "pdplane.x", "lost h:1\nbadly")
    assert fields["time"].endswith("+00:00")


@pytest.mark.parametrize(("flags", "interval"), [([], 1), (["--layerwise-interval", "0"], 0)])
def test_layerwise_is_on_unless_it_is_turned_off(flags: list[str], interval: int) -> None:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    assert engine_options(parser.parse_args(["--model", "tiny:llama", *flags])).layerwise_interval == interval


@pytest.mark.parametrize(
    ("pattern", "address", "allowed"),
    [
        ("10.0.0.0/24:8998", "10.0.0.7:8998", True),
        ("10.0.0.0/24:8998", "10.0.0.7:8999", False),
        ("10.0.0.0/24:8998", "10.0.1.7:8998", False),
        ("10.0.0.0/24", "10.0.0.7:1", True),
        ("10.0.0.0/24:*", "[::ffff:10.0.0.7]:1", True),
        ("10.0.0.0/24:*", "prefill-0:8998", False),
        ("0.0.0.0/0", "2130706433:8998", False),  # a name to us, and 127.0.0.1 to the resolver
        ("[fd00::/8]:8998", "[fd00::1]:8998", True),
        ("[fd00::/8]:8998", "[fe80::1]:8998", False),
        ("127.0.0.1:8998", "127.0.0.1:8998", True),
        ("127.0.0.1:8998", "localhost:8998", False),
        ("*.prefill.svc:*", "P-0.Prefill.svc:9000", True),
        ("*.prefill.svc:*", "p-0.prefill.svc.evil:9000", False),
        ("*", "169.254.169.254:80", True),
    ],
)
def test_address_patterns(pattern: str, address: str, allowed: bool) -> None:
    assert options.address_pattern(pattern).allows(Endpoint.parse(address)) == allowed


@pytest.mark.parametrize("text", ["", ":8998", "a:b", "10.0.0.0/99:1", "a/b", "[name]:1", "a:99999", "a b:1"])
def test_what_is_no_address_pattern_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.address_pattern(text)
