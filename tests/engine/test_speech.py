"""Chat answers taken apart: thoughts, content, calls; whole and character by character."""

from __future__ import annotations

from typing import Any

import pytest

from pdplane.api import Said, join_said
from pdplane.engine.text import MlxTokenizer
from pdplane.errors import ConfigError
from tests.engine.talking import talking_tokenizer

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> MlxTokenizer:
    return talking_tokenizer(tmp_path_factory.mktemp("talking"))


def said_of(
    tokenizer: MlxTokenizer, text: str, tools: list[dict[str, Any]] | None, *, by: int, thinking: bool = False
) -> Said:
    """What is said when the text comes in pieces of so many characters."""
    prompt = tokenizer.apply_chat([USER], tools=tools, settings={"enable_thinking": thinking})
    speech = tokenizer.speech(prompt, tools)
    pieces = [text[start : start + by] for start in range(0, len(text), by)]
    return join_said([*(speech.add(piece) for piece in pieces), speech.finish()])


@pytest.mark.parametrize("by", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning", "calls"),
    [
        ("hello", False, "hello", "", 0),
        ("<think>so</think>yes", False, "yes", "so", 0),
        ("so</think>yes", True, "yes", "so", 0),
        ("never ends", True, "", "never ends", 0),
        (f"ok {CALL}", False, "ok ", "", 1),
        (f"{CALL}{CALL}", False, "", "", 2),
        (f"<think>a</think>b{CALL}c", False, "bc", "a", 1),
        (CALL.removesuffix("</tool_call>"), False, "", "", 1),
        ("<tool_call>{bad</tool_call>!", False, "<tool_call>{bad</tool_call>!", "", 0),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', False, None, "", 0),
        ("<tool_call>[1, 2]</tool_call>", False, "<tool_call>[1, 2]</tool_call>", "", 0),
        ("a < b <tool", False, "a < b <tool", "", 0),
    ],
)
def test_speech(
    tokenizer: MlxTokenizer, text: str, thinking: bool, content: str | None, reasoning: str, calls: int, by: int
) -> None:
    said = said_of(tokenizer, text, TOOLS, by=by, thinking=thinking)
    assert (said.content, said.reasoning) == (text if content is None else content, reasoning)
    assert [(call.name, call.arguments) for call in said.calls] == [("f", '{"a": "é"}')] * calls
    assert len({call.id for call in said.calls}) == calls


def test_without_tools_a_call_is_text(tokenizer: MlxTokenizer) -> None:
    assert said_of(tokenizer, CALL, None, by=1) == Said(CALL)


def test_only_the_marks_of_special_tokens_are_shown(tokenizer: MlxTokenizer) -> None:
    tokens = tokenizer.encode("<think>so</think>yes</s><tool_call>", special_tokens=False)
    for marks, text in ((True, "<think>so</think>yes<tool_call>"), (False, "soyes")):
        detokenizer = tokenizer.detokenizer(marks=marks)
        assert "".join(map(detokenizer.add, tokens)) + detokenizer.finish() == text


def test_tokens_spell_their_bytes(tokenizer: MlxTokenizer) -> None:
    tokens = tokenizer.encode("aé🎉 <think>", special_tokens=False)
    assert b"".join(map(tokenizer.spell, tokens)).decode() == "aé🎉 <think>"
    assert tokenizer.spell(10**6) == b""


def test_the_template_sees_tools_calls_and_thoughts(tokenizer: MlxTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "developer", "content": "be short"},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
    ]
    tokens = tokenizer.apply_chat(messages, tools=TOOLS)
    text = "".join(tokenizer.spell(token).decode() for token in tokens)
    for words in ("tools=[{", "system: be short", "<think>hm</think>", '<tool_call>f({"a": 1})', "assistant: <think>"):
        assert words in text


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([{"role": "villain", "content": "x"}], {}, "no villains"),
        ([USER], {"settings": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ([USER], {"settings": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ([USER], {"roles": {"user": "U"}}, "role_mapping"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], {}, "chat template refuses"),
    ],
)
def test_what_a_template_refuses_is_a_bad_request(
    tokenizer: MlxTokenizer, messages: list[dict[str, Any]], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tokenizer.apply_chat(messages, **more)
