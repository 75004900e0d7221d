"""MLX nodes in the legacy engines' page layout, over the legacy wire and Mooncake: the ids of one mlx-lm process."""

from __future__ import annotations

import pytest

from pdplane.api import DecodeRequest, PrefillRequest, Token
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.reference import single_process
from pdplane.ids import Room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.testing.legacy_peer import LegacyRendezvous
from tests.engine.pair import prompt_of
from tests.mooncake_engine import needs_engine
from tests.waiting import PATIENCE_S


@needs_engine
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gemma3", "tiny:deepseek_v3"])
def test_two_nodes_that_know_each_other_as_legacy_peers(model: str) -> None:
    """The old rendezvous drops what native peers recognise each other by."""
    options = EngineOptions(
        model, prefill_step_size=24, block_tokens=8, arena_bytes=4 << 20, page_layout="nhd", layerwise_interval=1
    )
    prompt = tuple(prompt_of(77))
    engine = MlxDecodeEngine(options)
    with LegacyRendezvous() as rendezvous:
        prefill = PrefillNode(
            MlxPrefillEngine(options), PrefillConfig(transport="mooncake", rendezvous=rendezvous.endpoint)
        )
        decode = DecodeNode(engine, DecodeConfig(transport="mooncake"))
        try:
            prefill.start()
            decode.start()
            wanted = engine.thread.call(lambda: single_process(engine.opened.model, prompt, 12, options))
            for room in (5, 6):
                got: list[Token] = []
                request = DecodeRequest(Room(room), prompt, rendezvous.endpoint, max_tokens=12)
                decoding = decode.decode(request, got.append)
                prefill.prefill(PrefillRequest(Room(room), prompt)).done.result(PATIENCE_S)
                decoding.done.result(PATIENCE_S)
                assert [token.id for token in got] == [token.id for token in wanted]
        finally:
            decode.close()
            prefill.close()
