"""A tokenizer with the marks of thoughts and calls, saved as a model's folder has it and loaded by mlx-lm."""

from __future__ import annotations

from pathlib import Path

from pdplane.engine.text import MlxTokenizer
from pdplane.engine.tiny import build_tiny
from pdplane.engine.untyped import load_folder_tokenizer

TEMPLATE = (
    "{% if tools %}tools={{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>{{ tool_call.function.name }}"
    "({{ tool_call.function.arguments | tojson }}){{ tool_call.name }}</tool_call>{% endfor %}\n"
    "{% if message.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def talking_tokenizer(folder: Path) -> MlxTokenizer:
    """Save and load one."""
    inner = build_tiny("llama").tokenizer._inner
    again = type(inner)(tokenizer_object=inner.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    again.add_tokens(["<think>", "</think>", "<tool_call>"], special_tokens=True)
    again.add_tokens(["</tool_call>"])
    again.chat_template = TEMPLATE
    again.save_pretrained(str(folder))
    return MlxTokenizer(load_folder_tokenizer(folder))
