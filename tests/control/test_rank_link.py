"""The connection between ranks: order, who is let in, and how its end is told."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue

import attrs
import pytest

from pdplane.control import ranks as rank_link
from pdplane.control.ranks import Message, RankLink, RankListener, connect_rank
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.net import json_line
from tests.sockets import sends_at_once
from tests.waiting import PATIENCE_S


@attrs.define
class End:
    """One end that listens, and what it was told."""

    link: RankLink
    heard: SimpleQueue[Message] = attrs.field(factory=SimpleQueue)
    lost: Future[str] = attrs.field(factory=Future)

    def __attrs_post_init__(self) -> None:
        self.link.start(self.heard.put, self.lost.set_result)

    def hears(self) -> Message:
        return self.heard.get(timeout=PATIENCE_S)


@pytest.fixture
def ends() -> Iterator[list[End]]:
    """Rank 0's ends to ranks 1 and 2, then theirs."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(RankListener("127.0.0.1")))
        address = Endpoint("127.0.0.1", listener.port)
        with ThreadPoolExecutor(1) as other:
            accepted = other.submit(listener.accept, 3)
            outer = [connect_rank(address, listener.word, rank) for rank in (2, 1)][::-1]
            links = [*accepted.result(PATIENCE_S), *outer]
        for link in links:
            stack.callback(link.close)
        yield [End(link) for link in links]


def test_lines_come_whole_and_in_order(ends: list[End]) -> None:
    to_one, to_two, one, two = ends
    long = "x" * (1 << 20)
    for number in range(100):
        to_one.link.send("turn", number)
        to_two.link.send("request", 2**63 - 1 - number, "ein Wort, ü\n")
    to_one.link.send("request", 1, long)
    assert [one.hears() for _ in range(100)] == [("turn", number, "") for number in range(100)]
    assert one.hears() == ("request", 1, long)
    assert [two.hears() for _ in range(2)] == [("request", 2**63 - 1 - n, "ein Wort, ü\n") for n in range(2)]
    two.link.send("up")
    one.link.send("ready", 7, "mark")
    assert (to_one.hears(), to_two.hears()) == (("ready", 7, "mark"), ("up", 0, ""))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_short_lines_are_not_held_back() -> None:
    with closing(RankListener("127.0.0.1")) as listener, ThreadPoolExecutor(1) as other:
        accepted = other.submit(listener.accept, 2)
        outer = connect_rank(Endpoint("127.0.0.1", listener.port), listener.word, 1)
        with closing(outer), closing(accepted.result(PATIENCE_S)[0]):
            assert set(sends_at_once(listener.port)) == {True}


def test_the_end_of_either_side_is_told_to_the_other_once(ends: list[End]) -> None:
    to_one, to_two, one, two = ends
    one.link.close()
    assert to_one.lost.result(PATIENCE_S) == "rank 1 is gone"
    to_two.link.close()
    assert two.lost.result(PATIENCE_S) == "rank 0 is gone"
    to_one.link.send("turn")  # harmless
    assert not one.lost.done()
    assert not to_two.lost.done()


def test_whoever_parts_is_not_told_that_the_other_is_gone(ends: list[End]) -> None:
    to_one, _, one, _ = ends
    to_one.link.part("bye")
    assert one.hears()[0] == "bye"
    one.link.send("done", 5)
    one.link.close()
    to_one.link.wait_end(PATIENCE_S)
    assert to_one.hears() == ("done", 5, "")
    assert not to_one.lost.done()


def test_whoever_parts_has_said_so_before_the_other_side_can_answer(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    to_one, _, one, _ = ends
    send = to_one.link.send

    def interrupted(word: str) -> None:
        send(word)
        assert one.hears()[0] == word
        one.link.close()
        time.sleep(0.3)  # the reader finds the end meanwhile

    monkeypatch.setattr(to_one.link, "send", interrupted)
    to_one.link.part("bye")
    to_one.link.wait_end(PATIENCE_S)
    assert not to_one.lost.done()


@pytest.mark.parametrize(
    "line",
    [
        "nonsense\n",
        '["word", 1]\n',
        '["é", 1]\n',
        "",
        '["{word}", 0]\n',
        '["{word}", 3]\n',
        '["{word}", "one"]\n',
        "[" * 65,
    ],
)
def test_strangers_are_not_let_in(line: str) -> None:
    with closing(RankListener("127.0.0.1")) as listener, ThreadPoolExecutor(1) as other:
        address = Endpoint("127.0.0.1", listener.port)
        accepted = other.submit(listener.accept, 2)
        with closing(socket.create_connection((address.host, address.port))) as stranger:
            stranger.sendall(line.replace("{word}", listener.word).encode())
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        link = connect_rank(address, listener.word, 1)
        found = accepted.result(PATIENCE_S)
        assert [end.name for end in found] == ["rank 1"]
        for end in (link, *found):
            end.close()


@pytest.fixture
def stuck() -> Iterator[tuple[End, socket.socket]]:
    """Rank 0's end, and a rank 1 that reads nothing, as a stopped process does."""
    with closing(RankListener("127.0.0.1")) as listener, ThreadPoolExecutor(1) as other:
        accepted = other.submit(listener.accept, 2)
        with closing(socket.create_connection(("127.0.0.1", listener.port), PATIENCE_S)) as rank_1:
            rank_1.sendall(json_line([listener.word, 1]))
            (link,) = accepted.result(PATIENCE_S)
            with closing(link):
                yield End(link), rank_1


def test_a_sender_does_not_wait_for_a_stuck_rank(stuck: tuple[End, socket.socket]) -> None:
    """It holds locks that every request needs. Once the rank reads again it gets every line, in order."""
    end, rank_1 = stuck
    lines = [("request", number, "x" * (1 << 20)) for number in range(30)]
    for line in lines:
        end.link.send(*line)  # would block for ever here: nobody reads
    end.link.part("bye")
    with rank_1.makefile() as heard:
        found = [tuple(json.loads(line)) for line in heard]
    assert [line for line in found if line[0] != "beat"] == [*lines, ("bye", 0, "")]
    assert not end.lost.done()


def test_a_rank_that_lets_too_much_wait_is_lost(
    stuck: tuple[End, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "_MAX_BACKLOG", 1 << 20)
    end, _ = stuck
    for number in range(30):
        end.link.send("request", number, "x" * (1 << 20))
    assert end.lost.result(PATIENCE_S) == "rank 1 is gone"
    end.link.send("turn")  # harmless


def test_a_link_closes_at_once_though_much_waits(stuck: tuple[End, socket.socket]) -> None:
    end, _ = stuck
    for number in range(30):
        end.link.send("request", number, "x" * (1 << 20))
    end.link.close()
    assert not end.lost.done()


def test_what_is_no_line_of_ours_ends_the_connection(ends: list[End]) -> None:
    to_one, _, one, _ = ends
    one.link._socket.sendall(b"[1, 2\n")
    assert "no JSON" in to_one.lost.result(PATIENCE_S)


def test_rank_0_that_is_not_there_is_named() -> None:
    with closing(RankListener("127.0.0.1")) as listener:
        address = Endpoint("127.0.0.1", listener.port)
    with pytest.raises(ConfigError, match=f"rank 0 cannot be reached at {address}"):
        connect_rank(address, "word", 1)
