"""Text to tokens and back, from many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pdplane.engine.text import MlxTokenizer
from pdplane.engine.tiny import EOS_ID, build_tiny
from pdplane.engine.untyped import wrap_tokenizer
from pdplane.errors import ConfigError

TEXTS = ["the quick fox", "", "héllo wörld", "🎉 emoji 🧑‍🚀 done", "  two  spaces\n\tand a tab ", "日本語のテキスト"]


@pytest.fixture(scope="module")
def tokenizer() -> MlxTokenizer:
    return build_tiny("llama").tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(tokenizer: MlxTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == text == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def test_half_a_character_comes_out_at_the_end(tokenizer: MlxTokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token) for token in tokenizer.encode("a🎉")[:-1]]
    assert "".join(pieces) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_have_no_text(tokenizer: MlxTokenizer) -> None:
    assert tokenizer.eos_ids == {EOS_ID}
    assert tokenizer.decode([EOS_ID, *tokenizer.encode("fox")]) == "fox"


def test_chat_ends_where_the_answer_begins(tokenizer: MlxTokenizer) -> None:
    tokens = tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokens) == "user: hi\nassistant: "


def test_a_model_without_a_template_gets_the_plain_form() -> None:
    inner = build_tiny("llama").tokenizer._inner
    bare = MlxTokenizer(wrap_tokenizer(type(inner)(tokenizer_object=inner.backend_tokenizer), [EOS_ID]))
    messages = [{"role": "user", "content": "hi"}]
    assert bare.decode(bare.apply_chat(messages)).endswith("hi\nASSISTANT:")
    roles = {"user": "U ", "assistant": "A", "stop": "|"}
    assert bare.decode(bare.apply_chat(messages, roles=roles)) == "U hi|A"
    with pytest.raises(ConfigError, match="takes no tools"):
        bare.apply_chat(messages, tools=[{"type": "function"}])


def test_threads_share_a_tokenizer(tokenizer: MlxTokenizer) -> None:
    def round_trip(number: int) -> bool:
        text = f"the fox number {number} jumps over {number * 7} dogs"
        detokenizer = tokenizer.detokenizer()
        return "".join(map(detokenizer.add, tokenizer.encode(text))) + detokenizer.finish() == text

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(round_trip, range(80)))


def test_a_conversation_is_bounded_before_it_becomes_tokens(tokenizer: MlxTokenizer) -> None:
    shown = list[str]()
    tokenizer.apply_chat([{"role": "user", "content": "hi"}], check=shown.append)
    assert shown == ["user: hi\nassistant: "]
    with pytest.raises(ConfigError, match="become more than"):
        tokenizer.apply_chat([{"role": "user", "content": "x" * 100_000}] * 400)


def test_no_token_is_longer_than_the_longest(tokenizer: MlxTokenizer) -> None:
    assert tokenizer.longest_token == max(len(tokenizer.spell(token)) for token in range(tokenizer.vocab_size))
