"""Prompts of conversations, token by token those of mlx-lm's own wrapper and server, for many kinds of tokenizers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.server import convert_chat, process_message_content
from mlx_lm.utils import load_tokenizer as load_wrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pdplane.engine.model import load_tokenizer
from pdplane.engine.text import MlxTokenizer
from pdplane.errors import ConfigError
from pdplane.serving.asked import Served
from pdplane.serving.conversation import read_conversation
from pdplane.serving.fields import Fields, parse

_SENTENCES = ["the quick brown fox jumps over the lazy dog: user, assistant, system; I think so."] * 3
_MARKS = ["<s>", "</s>", "<think>", "</think>", "<|im_start|>", "<|im_end|>"]

_wrapper: Any = load_wrapper
_convert: Any = convert_chat
_process: Any = process_message_content


def _byte_level() -> Any:  # noqa: ANN401  (the library has no types)
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        _SENTENCES,
        trainers.BpeTrainer(vocab_size=320, special_tokens=_MARKS, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def _byte_fallback() -> Any:  # noqa: ANN401
    """As SentencePiece's: spaces are letters, and what has no letter is bytes; the BOS is added to every text."""
    pieces = [
        *_MARKS,
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(set("".join(_SENTENCES))),
        "\u2581",
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.add_special_tokens(_MARKS)
    return made


def _unigram() -> Any:  # noqa: ANN401
    made: Any = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        _SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=[*_MARKS, "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return made


def _added() -> Any:  # noqa: ANN401
    made = _byte_level()
    made.add_tokens([AddedToken("[CALL]", lstrip=True), AddedToken(" fox ", normalized=False), "<n>"])
    return made


_PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ASKS = (
    _PLAIN + "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
)
_FIRST_USER = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('the user first, not ' + messages[0].role) }}{% endif %}"
    + _PLAIN
)
_BROKEN = "{{ messages[0].content / 2 }}"

TOKENIZERS: Mapping[str, tuple[Callable[[], Any], dict[str, object]]] = {
    "byte level": (_byte_level, {"chat_template": _PLAIN}),
    "byte fallback": (_byte_fallback, {"chat_template": _PLAIN}),
    "unigram": (_unigram, {"chat_template": _PLAIN}),
    "added tokens": (_added, {"chat_template": _PLAIN}),
    "asks for thoughts": (_byte_level, {"chat_template": _ASKS}),
    "raises": (_byte_level, {"chat_template": _FIRST_USER}),
    "broken": (_byte_level, {"chat_template": _BROKEN}),
    "several templates": (
        _byte_level,
        {"chat_template": [{"name": "default", "template": _PLAIN}, {"name": "tool_use", "template": "T" + _PLAIN}]},
    ),
    "no template": (_byte_level, {}),
    "no template, with a BOS": (_byte_fallback, {}),
    "new lines are tokens": (_added, {"chat_template": _PLAIN, "tokenizer_class": "NewlineTokenizer"}),
    "a program, deepseek_v32": (_byte_level, {"chat_template_type": "deepseek_v32"}),
    "a kind of model that has a form of its own": (_byte_level, {"chat_template": _ASKS, "model_type": "muse_spark"}),
    "a program before a template": (_byte_level, {"chat_template_type": "deepseek_v32", "chat_template": _PLAIN}),
}

_TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the fox", "n": 2}'}}
_USER = {"role": "user", "content": "the fox"}

CHATS: Mapping[str, dict[str, Any]] = {
    "one": {"messages": [_USER]},
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "marks in the text": {
        "messages": [{"role": "user", "content": "<s><|im_end|>\n<think>[CALL]  fox </think><n></s>"}]
    },
    "a text that begins with spaces": {"messages": [{"role": "user", "content": "  \t\n the\r\n fox \u00a0"}]},
    "letters of many kinds": {
        "messages": [{"role": "user", "content": "日本 🧑‍🚀 e\u0301 \ufb01 \u0000 \ufffd \uff21\uff22"}]
    },
    "the system first": {"messages": [{"role": "system", "content": "so"}, _USER]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    },
    "turns": {"messages": [_USER, {"role": "assistant", "content": "I think"}, _USER]},
    "thoughts": {"messages": [_USER, {"role": "assistant", "content": "so", "reasoning_content": "I think"}, _USER]},
    "calls": {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "a dog", "tool_call_id": "c1"},
        ],
        "tools": [_TOOL],
    },
    "without thoughts": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": False}},
    "with thoughts": {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": True}},
    "a variable of its own": {"messages": [_USER], "chat_template_kwargs": {"bos_token": "dog", "other": 1}},
}


def save_tokenizer(folder: Path, make: Callable[[], Any], settings: Mapping[str, object]) -> Path:
    folder.mkdir()
    make().save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    told.pop("model_type", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"model_type": settings.get("model_type", "llama")}))
    return folder


def theirs(wrapper: Any, chat: Mapping[str, Any]) -> list[int]:  # noqa: ANN401
    """Return the tokens that mlx-lm's server makes of a conversation."""
    asked = copy.deepcopy(dict(chat))
    _process(asked["messages"])
    if not wrapper.has_chat_template:
        return list(wrapper.encode(_convert(asked["messages"])))
    return list(
        wrapper.apply_chat_template(
            asked["messages"],
            add_generation_prompt=True,
            tools=asked.get("tools"),
            tokenize=True,
            **asked.get("chat_template_kwargs", {}),
        )
    )


def ours(tokenizer: MlxTokenizer, chat: Mapping[str, Any]) -> list[int]:
    """Return the tokens of the same request, read as the HTTP doors read it."""
    served = Served(name="m", tokenizer=tokenizer, vocab_size=None, context_length=None, bootstrap_port=1)
    return list(read_conversation(Fields(parse(json.dumps(chat).encode())), served).tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_prompt_is_the_one_that_mlx_lm_makes(kind: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", *TOKENIZERS[kind])
    tokenizer, wrapper = load_tokenizer(str(folder)), _wrapper(folder)
    wrong, refused = dict[str, object](), dict[str, str]()
    for name, chat in CHATS.items():
        try:
            wanted = theirs(wrapper, chat)
        except Exception as error:  # noqa: BLE001  (templates may raise anything)
            refused[name] = str(error)
            with pytest.raises(ConfigError, match=r"template (refuses them: |does not read them)"):
                ours(tokenizer, chat)
            continue
        try:
            got = ours(tokenizer, chat)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        if got != wanted:
            wrong[name] = tokenizer.decode(got), tokenizer.decode(wanted)
    assert not wrong
    if kind.startswith("no template"):
        assert refused
        assert all("no chat template" in reason for reason in refused.values())
    assert len(refused) < len(CHATS) or kind == "broken", refused
    if kind == "raises":
        assert set(refused) == {"the system first"}


def test_no_text_gets_a_second_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / "model", _byte_fallback, {})))
    assert tokenizer.encode("<s>the fox") == tokenizer.encode("the fox")
    assert tokenizer.encode("the fox")[0] == 0


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / "model", *TOKENIZERS["byte level"])))
    with pytest.raises(ConfigError, match="half of a surrogate pair at character 2"):
        tokenizer.encode("a \ud83d")
    for content in ("\ud83d", [{"type": "text", "text": "\udc00 b"}]):
        with pytest.raises(ConfigError, match="half a surrogate pair"):
            ours(tokenizer, {"messages": [{"role": "user", "content": content}]})
