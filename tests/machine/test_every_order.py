"""Every message in every state, and every order of up to four messages: the rules of the witnesses hold.

The slow marker adds every two messages in every state, and messages that come more than once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.machine import said
from tests.machine.witness import DecodeWitness, PrefillWitness
from tests.rows import rows

ON_PREFILL = {**said.PREFILL, **said.PREFILL_RARE}
ON_DECODE = {**said.DECODE, **said.DECODE_RARE}

REGISTERED = ["hello", "registration", "data connected"]
PREFILL_STATES = {
    "fresh": [],
    "introduced": ["hello"],
    "checking": ["hello", "registration"],
    "registered": REGISTERED,
    "raw": ["raw registration"],
    "legacy": ["legacy registration"],
    "legacy windowed": ["legacy registration", "offer of a legacy peer", "request"],
    "early": [*REGISTERED, "offer"],
    "early in line": [*REGISTERED, "queued"],
    "opened in line": [*REGISTERED, "request", "queued"],
    "windowed after the line": [*REGISTERED, "queued", "request", "offer"],
    "draining": [*REGISTERED, "request", "draining"],
    "raw early": ["raw registration", "offer of a raw peer"],
    "opened": [*REGISTERED, "request"],
    "opened for nobody": ["request"],
    "windowed": [*REGISTERED, "request", "offer"],
    "raw windowed": ["raw registration", "offer of a raw peer", "request"],
    "pushing": [*REGISTERED, "request", "offer", "push"],
    "pushed": [*REGISTERED, "request", "offer", "push", "push ended"],
    "finishing": [*REGISTERED, "request", "offer", "push", "finish"],
    "failing": [*REGISTERED, "request", "offer", "push", "cancel"],
    "failing and asked again": [*REGISTERED, "request", "offer", "push", "cancel", "request", "next offer", "push"],
    "succeeded": [*REGISTERED, "request", "offer", "finish"],
    "failed": [*REGISTERED, "request", "offer", "cancel"],
    "failed before the offer": [*REGISTERED, "request", "cancel"],
    "orphan expired": ["raw registration", "offer of a raw peer", "deadline"],
    "closed": [*REGISTERED, "closing"],
}
DECODE_STATES = {
    "fresh": [],
    "resolving": ["request"],
    "joining": ["request", "found"],
    "queued": ["line"],
    "queued and joining": ["line", "found"],
    "queued and told": ["line", "found", "registered"],
    "queued, then waiting": ["line", "found", "registered", "blocks"],
    "given up in line": ["line", "cancel"],
    "waiting": ["request", "found", "registered"],
    "some bytes": ["request", "found", "registered", "landed in part"],
    "all bytes": ["request", "found", "registered", "landed"],
    "all statuses": ["request", "found", "registered", "success"],
    "lost session": ["request", "found", "registered", "unknown session"],
    "suspect": ["request", "found", "registered", "writer cut"],
    "draining": ["request", "found", "registered", "drain"],
    "ready": ["request", "found", "registered", "landed", "success"],
    "failed": ["request", "found", "registered", "failed"],
    "next use": ["request", "found", "registered", "failed", "request"],
    "closed": ["request", "found", "registered", "closing"],
}


@pytest.mark.parametrize("state", PREFILL_STATES)
@rows("message", ON_PREFILL)
def test_every_message_in_every_prefill_state(state: str, message: str) -> None:
    play_prefill([*PREFILL_STATES[state], message])


@pytest.mark.parametrize("state", DECODE_STATES)
@rows("message", ON_DECODE)
def test_every_message_in_every_decode_state(state: str, message: str) -> None:
    play_decode([*DECODE_STATES[state], message])


@pytest.mark.slow
@pytest.mark.parametrize("state", PREFILL_STATES)
def test_every_two_messages_in_every_prefill_state(state: str) -> None:
    for pair in itertools.product(ON_PREFILL, repeat=2):
        play_prefill([*PREFILL_STATES[state], *pair])


@pytest.mark.slow
@pytest.mark.parametrize("state", DECODE_STATES)
def test_every_two_messages_in_every_decode_state(state: str) -> None:
    for pair in itertools.product(ON_DECODE, repeat=2):
        play_decode([*DECODE_STATES[state], *pair])


@pytest.mark.parametrize("first", said.PREFILL)
def test_every_order_of_four_on_prefill(first: str) -> None:
    for rest in _orders(set(said.PREFILL) - {first}):
        play_prefill([*REGISTERED, first, *rest])


@pytest.mark.parametrize("first", said.DECODE)
def test_every_order_of_four_on_decode(first: str) -> None:
    for rest in _orders(set(said.DECODE) - {first}):
        play_decode(["request", "found", first, *rest])


def test_every_order_of_a_room_in_line() -> None:
    """On prefill, on decode, and on decode before its prefill is found."""
    for order in _orders({"queued", "next queued", "offer", "request", "decode cancels", "draining", "undeliverable"}):
        play_prefill([*REGISTERED, *order])
    steps = {"found", "registered", "blocks", "cancel", "missing", "failed", "refused", "unknown session"}
    for start in (["line"], ["line", "found", "registered"]):
        for order in _orders(steps):
            play_decode([*start, *order])


@pytest.mark.slow
@pytest.mark.parametrize("first", said.PREFILL)
def test_every_four_on_prefill(first: str) -> None:
    for start in ([], REGISTERED):
        for rest in itertools.product(said.PREFILL, repeat=3):
            play_prefill([*start, first, *rest])


@pytest.mark.slow
@pytest.mark.parametrize("first", said.DECODE)
def test_every_four_on_decode(first: str) -> None:
    for start in ([], ["request", "found"]):
        for rest in itertools.product(said.DECODE, repeat=3):
            play_decode([*start, first, *rest])


def _orders(messages: set[str]) -> Iterator[tuple[str, ...]]:
    """Every order of up to three of them."""
    return itertools.chain.from_iterable(itertools.permutations(sorted(messages), count) for count in range(4))


def play_prefill(script: list[str]) -> PrefillWitness:
    """Say it all, then let everything end."""
    witness = PrefillWitness()
    for name in script:
        ON_PREFILL[name](witness)
    witness.drain()
    return witness


def play_decode(script: list[str]) -> DecodeWitness:
    """Say it all, then let everything end."""
    witness = DecodeWitness()
    for name in script:
        ON_DECODE[name](witness)
    witness.drain()
    return witness
