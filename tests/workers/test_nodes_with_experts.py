"""Prefill and decode nodes that both run their experts on the same remote workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, new_room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.workers.cache.prefix import PrefixEngine
from pdplane.workers.experts.remote import RemoteExperts
from pdplane.workers.experts.tx1 import Tx1Token
from pdplane.workers.experts.worker import ExpertWorker
from tests.waiting import until
from tests.workers.raw_tx1 import TOKEN
from tests.workers.test_remote_experts import PROMPT, QUICK, worker_for

OPTIONS = EngineOptions("tiny:qwen3_moe-q4", prefill_step_size=32, arena_bytes=1 << 20)


@contextlib.contextmanager
def pair(workers: list[ExpertWorker]) -> Iterator[tuple[PrefillNode, DecodeNode]]:
    """A prefill and a decode node, each with its own coordinator."""
    experts = [RemoteExperts([worker.endpoint for worker in workers], Tx1Token(TOKEN), QUICK) for _ in range(2)]
    prefill = PrefillNode(MlxPrefillEngine(OPTIONS, experts[0].attach), PrefillConfig(bootstrap_port=0))
    decode = DecodeNode(MlxDecodeEngine(OPTIONS, experts[1].attach), DecodeConfig())
    try:
        prefill.start()
        decode.start()
        yield prefill, decode
    finally:
        decode.close()
        prefill.close()
        for each in experts:
            each.close()


def ask(prefill: PrefillNode, decode: DecodeNode) -> list[int]:
    room = new_room()
    found: list[int] = []
    until(lambda: prefill.ready)
    bootstrap = Endpoint("127.0.0.1", prefill.info()["bootstrap_port"])
    first = prefill.prefill(PrefillRequest(room, tuple(PROMPT)))
    request = DecodeRequest(room, tuple(PROMPT), bootstrap, 6, ignore_eos=True)
    handle = decode.decode(request, lambda token: found.append(token.id))
    first.done.result(20)
    handle.done.result(20)
    return found


def alone() -> list[int]:
    with PrefixEngine(OPTIONS) as engine:
        return list(engine.run(PROMPT, 6).result(20).tokens)


def test_tokens_are_those_of_one_local_process() -> None:
    workers = [worker_for(OPTIONS.model) for _ in range(2)]
    try:
        with pair(workers) as (prefill, decode):
            assert ask(prefill, decode)[: len(alone())] == alone()
            workers[0].close()
            assert ask(prefill, decode)[: len(alone())] == alone()
            workers[1].close()
            with pytest.raises(RoomFailed, match="no expert worker is left"):
                ask(prefill, decode)
    finally:
        for worker in workers:
            worker.close()
