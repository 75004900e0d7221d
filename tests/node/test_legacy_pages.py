"""MLX nodes in the legacy engines' page layout, over the legacy wire: ids of one mlx-lm process, whole pages."""

from __future__ import annotations

import contextlib
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from pdplane.api import DecodeRequest, PrefillRequest, Token
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.forward import Forward
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.reference import single_process
from pdplane.ids import Endpoint, FieldId, GroupId, Room
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_behind, blocks_needed, logical_slots
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.testing.legacy_peer import SUCCESS, LegacyDecode, LegacyPrefill, LegacyRendezvous
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


GEMMA = EngineOptions("tiny:gemma3", prefill_step_size=24, block_tokens=16, arena_bytes=4 << 20, page_layout="nhd")
WINDOW, SHARED = 32, 64


class KeepingRing(RotatingKVCache):
    """A ring that also keeps every row it was ever given, as a paged cache does."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.given: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> object:
        self.given.append((keys, values))
        return super().update_and_fetch(keys, values)


def computed(model: Model, prompt: tuple[int, ...]) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """The last token's logits, and of every layer all rows of the prompt by suffix: (tokens, heads, width)."""
    forward = Forward(model, GEMMA)
    forward.caches[:] = [KeepingRing(WINDOW) if isinstance(c, RotatingKVCache) else c for c in forward.caches]
    list(forward.prefill_chunks(prompt))
    logits = forward.step(mx.array(prompt[-1])).read(keep_row=True)
    rows = []
    for cache in forward.caches:
        both = (cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
        if isinstance(cache, KeepingRing):
            both = tuple(mx.concatenate(column, axis=2) for column in zip(*cache.given, strict=True))
        rows.append({name: np.array(part[0]).swapaxes(0, 1) for name, part in zip("kv", both, strict=True)})
    return logits.row, rows


def resumed(model: Model, rows: list[dict[str, np.ndarray]], prompt: tuple[int, ...], done: int) -> np.ndarray:
    """The last token's logits, computed from `done` rows that stand in delivered pages."""
    forward = Forward(model, GEMMA)
    for cache, found in zip(forward.caches, rows, strict=True):
        start = done - WINDOW if isinstance(cache, RotatingKVCache) else 0
        cache.keys, cache.values = (mx.array(found[name][start:done].swapaxes(0, 1))[None] for name in "kv")
        cache.offset = done
        if isinstance(cache, RotatingKVCache):
            cache._idx = done - start
    list(forward.prefill_chunks(prompt, done=done))
    return forward.step(mx.array(prompt[-1])).read(keep_row=True).row


def delivered(decode: LegacyDecode, blocks: dict[GroupId, list[int]], length: int) -> list[dict[str, np.ndarray]]:
    """All rows in the pages of a legacy decode, by layer and suffix, at their tokens; NaN where nothing was sent."""
    layout, rows = decode.layout, []
    for layer in range(len(layout.fields) // 2):
        rows.append({})
        for name in "kv":
            field = layout.field(FieldId(f"layer.{layer}.{name}"))
            spec = next(spec for spec in layout.group_specs if spec.group_id == field.group_id)
            slots, ids = logical_slots(spec, 0, length), np.array(blocks[field.group_id], np.uint64)
            found = np.full((slots.stop, *field.shape), np.nan, np.float32)
            for slot, offset in zip(slots, layout.page_offsets(field.field_id, ids).tolist(), strict=True):
                page = decode.arena.bytes[offset : offset + field.payload_bytes]
                found[slot] = page.view(np.float32).reshape(field.shape)
            rows[-1][name] = found.reshape(-1, *field.shape[1:])
    return rows


def test_a_legacy_decode_gets_whole_pages_and_can_resume_from_them() -> None:
    """A legacy scheduler reuses delivered pages for every prompt that begins alike, rows before the window too."""
    engine = MlxPrefillEngine(GEMMA)
    node = PrefillNode(engine, PrefillConfig(bootstrap_port=0))
    with contextlib.closing(node):
        node.start()
        rendezvous = Endpoint("127.0.0.1", int(node.info()["bootstrap_port"]))
        with LegacyDecode(engine.layout) as decode:
            for length in (20, 33, 50, 70, 73, 74, 75, 97, 121):
                check(engine, node, decode, rendezvous, length)


def check(engine: MlxPrefillEngine, node: PrefillNode, decode: LegacyDecode, rendezvous: Endpoint, length: int) -> None:
    prompt = tuple(prompt_of(length))
    _, wanted = engine.thread.call(lambda: computed(engine.opened.model, prompt))
    blocks = Pool(decode.layout).allocate(blocks_needed(decode.layout, length))
    contact = decode.offer(rendezvous, length, blocks, prompt_len=length)
    leg = node.prefill(PrefillRequest(Room(length), prompt))
    decode.wait(length, contact)
    leg.done.result(PATIENCE_S)
    found = delivered(decode, blocks, length)
    first = max(0, length - WINDOW + 1) // 16 * 16  # the token that a sliding layer's first page begins with
    for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name, rows in ours.items():
            sent = ~np.isnan(rows[:length]).any(axis=(1, 2))
            assert sent[first:].all(), (length, layer, name)
            assert np.array_equal(rows[:length][sent], theirs[name][sent]), (length, layer, name)
    if first <= SHARED - WINDOW and length > SHARED:
        later = (*prompt[:SHARED], *prompt_of(6, seed=5))
        fresh, _ = engine.thread.call(lambda: computed(engine.opened.model, later))
        again = engine.thread.call(lambda: resumed(engine.opened.model, found, later, SHARED))
        assert np.abs(again - fresh).max() < 1e-3, length


def test_a_legacy_prefill_is_asked_only_for_what_decode_lacks() -> None:
    """The old wire has the field: the second turn's offer begins behind what decode has kept."""
    options = EngineOptions("tiny:llama", block_tokens=16, arena_bytes=4 << 20, page_layout="nhd")
    theirs, ours = MlxPrefillEngine(options), MlxDecodeEngine(options)
    with theirs, LegacyRendezvous() as http, LegacyPrefill(theirs.layout, http.endpoint, arena=theirs.arena) as played:
        decode = DecodeNode(ours, DecodeConfig())
        with contextlib.closing(decode):
            decode.start()
            prompt, offered = tuple(prompt_of(130)), []
            for room in (5, 6):
                got: list[Token] = []
                request = DecodeRequest(Room(room), prompt, http.endpoint, 70, ignore_eos=True)
                leg = decode.decode(request, got.append)
                blocks = Pool(theirs.layout).allocate(blocks_needed(theirs.layout, len(prompt)))
                first = theirs.prefill(prompt, blocks, lambda _steps, _chunk: None).result(PATIENCE_S)
                (offer,) = played.wait(room)
                offered.append((offer.prefix_len, sum(map(len, (offer.blocks or {}).values()))))
                played.write(offer, blocks_behind(theirs.layout, blocks, offer.prefix_len, len(prompt)))
                played.report(offer, SUCCESS, first.id)
                leg.done.result(PATIENCE_S)
                wanted = ours.thread.call(partial(single_process, ours.opened.model, prompt, 70, options))
                assert [token.id for token in got] == [token.id for token in wanted]
                prompt += (*(token.id for token in got), 5)
            assert offered == [(0, 9), (192, 1)]  # 201 tokens in blocks of 16, of which 199 have their rows here
