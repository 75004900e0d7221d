"""The toy engine keeps its promises: tokens follow the bytes, turns can be held, jobs end once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from pdplane.api import DecodeEngine, EngineDecodeRequest, PrefillEngine, Token
from pdplane.errors import InternalError
from pdplane.ids import GroupId
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_needed
from pdplane.toy.engine import ToyDecodeEngine, ToyPrefillEngine
from pdplane.toy.model import EOS, KV, ToyOptions, page, toy_answer

Blocks = dict[GroupId, tuple[int, ...]]
WITH_STATE = ToyOptions(with_state=True)


class Pair:
    """Both engines; `move` copies pages as a transport would."""

    def __init__(self, options: ToyOptions, hold: threading.Event | None = None) -> None:
        self.prefill, self.decode = ToyPrefillEngine(options, hold=hold), ToyDecodeEngine(options)
        self.prefill.start()
        self.decode.start()
        self.pools = Pool(self.prefill.layout), Pool(self.decode.layout)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def blocks(self, prompt: list[int]) -> tuple[Blocks, Blocks]:
        counts = blocks_needed(self.prefill.layout, len(prompt))
        self.pools[1].allocate({KV: 3})  # so that the two sides' ids differ
        return self.pools[0].allocate(counts), self.pools[1].allocate(counts)

    def move(self, source: Blocks, destination: Blocks) -> None:
        for field in self.prefill.layout.fields:
            for ours, theirs in zip(source[field.group_id], destination[field.group_id], strict=True):
                page(self.decode.arena, self.decode.layout, field.field_id, theirs)[:] = page(
                    self.prefill.arena, self.prefill.layout, field.field_id, ours
                )

    def answer(self, prompt: list[int], max_tokens: int, spoil: int | None = None) -> tuple[list[Token], str]:
        source, destination = self.blocks(prompt)
        told: dict[int, list[int]] = {step: [] for step in range(len(self.prefill.layout.steps))}

        def on_step(steps: range, chunk: range) -> None:
            for step in steps:
                told[step].extend(chunk)

        first = self.prefill.prefill(prompt, source, on_step).future.result(10)
        assert told == {step: list(range(len(prompt))) for step in told}
        self.move(source, destination)
        if spoil is not None:
            self.decode.arena.bytes[spoil] ^= 1
        tokens: list[Token] = []
        assembled = threading.Event()
        request = EngineDecodeRequest(tuple(prompt), destination, first, max_tokens, frozenset({EOS}))
        reason = self.decode.decode(request, tokens.append, assembled.set).future.result(10)
        assert assembled.is_set()
        return tokens, reason


@pytest.fixture
def pair() -> Iterator[Pair]:
    engines = Pair(WITH_STATE)
    yield engines
    engines.close()


def test_satisfies_the_protocols_of_a_node(pair: Pair) -> None:
    prefill: PrefillEngine = pair.prefill
    decode: DecodeEngine = pair.decode
    assert prefill.layout == decode.layout


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 33])
def test_moved_bytes_give_the_tokens_of_one_process(pair: Pair, length: int) -> None:
    prompt = list(range(1, length + 1))
    tokens, reason = pair.answer(prompt, 6)
    assert [(token.id, token.logprob) for token in tokens] == toy_answer(WITH_STATE, prompt, 6)
    assert reason == "length"


def test_one_wrong_byte_changes_the_tokens(pair: Pair) -> None:
    prompt = list(range(1, 20))
    _source, destination = pair.blocks(prompt)
    pair.pools[0].release(_source)
    pair.pools[1].release(destination)
    offset = page(pair.decode.arena, pair.decode.layout, pair.decode.layout.fields[0].field_id, destination[KV][-1])
    spoilt = offset.__array_interface__["data"][0] - pair.decode.arena.base
    tokens, _reason = pair.answer(prompt, 6, spoil=spoilt)
    right = toy_answer(WITH_STATE, prompt, 6)
    assert tokens[0].id == right[0][0], "the first token comes from prefill"
    assert [token.id for token in tokens[1:]] != [token for token, _logprob in right[1:]]


def test_a_stop_token_ends_the_answer() -> None:
    pair = Pair(ToyOptions(eos_every=1))
    tokens, reason = pair.answer([7, 8, 9], 6)
    pair.close()
    assert ([token.id for token in tokens], reason) == ([EOS], "stop")
    assert pair.decode.turns == 0


def test_a_held_prefill_can_be_cancelled() -> None:
    hold = threading.Event()
    pair = Pair(ToyOptions(), hold)
    source, _destination = pair.blocks([1] * 100)
    job = pair.prefill.prefill([1] * 100, source, lambda _steps, _chunk: None)
    job.cancel()
    with pytest.raises(CancelledError):
        job.future.result(10)
    waiting = pair.prefill.prefill([1] * 100, source, lambda _steps, _chunk: None)
    pair.close()
    with pytest.raises(CancelledError):
        waiting.future.result(10)
    with pytest.raises(InternalError):
        pair.prefill.prefill([1], source, lambda _steps, _chunk: None)


def test_poison_fails_its_own_job_only() -> None:
    pair = Pair(ToyOptions(poison=13))
    source, _destination = pair.blocks([1] * 20)
    job = pair.prefill.prefill([1] * 10 + [13], source, lambda _steps, _chunk: None)
    with pytest.raises(RuntimeError, match="poison"):
        job.future.result(10)
    assert pair.answer([1, 2], 3)[1] == "length"
    pair.close()


def test_ranks_hold_their_share_and_agree_on_the_tokens() -> None:
    whole = ToyOptions()
    digests = []
    for rank in range(2):
        pair = Pair(ToyOptions(tp_size=2, tp_rank=rank))
        digests.append([(token.id, token.logprob) for token in pair.answer([5, 6, 7, 8, 9], 4)[0]])
        pair.close()
    assert digests == [toy_answer(whole, [5, 6, 7, 8, 9], 4)] * 2


def test_the_tokenizer_goes_both_ways() -> None:
    tokenizer = ToyPrefillEngine().tokenizer
    back = tokenizer.detokenizer()
    assert "".join(back.add(token) for token in tokenizer.encode("na\u00efve \u20ac")) == "na\u00efve \u20ac"
    assert back.add(0xE2) + back.finish() == "\ufffd"
