"""The messages and tools of a chat, checked, in the form that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from pdplane.serving.asked import Served
from pdplane.serving.fields import MAX_TEXT, Fields, check_depth, load, short

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 1 << 10

_ROLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}\Z")
_TEXT_PARTS = {"text", "input_text", "output_text"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send an earlier thought back, and templates look for it."""


@attrs.frozen
class Conversation:
    """What the template is given, and the tools that the answer may call."""

    tokens: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...] | None


def read_conversation(fields: Fields, served: Served) -> Conversation:
    """Take `messages`, `tools`, `tool_choice`, `chat_template_kwargs` and `role_mapping`, and apply the template.

    Raises BadField, and ConfigError when the template refuses the conversation.
    """
    messages = _messages(fields)
    tools = _tools(fields)
    settings = fields.mapping("chat_template_kwargs")
    roles = fields.mapping("role_mapping")
    if roles is not None and not all(isinstance(value, str) for value in roles.values()):
        raise fields.refuse("role_mapping", "is not an object of texts")
    context = served.context_length
    if context is not None and len(messages) > context:
        raise fields.refuse("messages", f"has {len(messages)} entries, more than the context of {context} tokens")
    tokens = served.tokenizer.apply_chat(
        messages, tools=tools, settings=settings, roles=roles, check=lambda text: served.check_text(text, "messages")
    )
    return Conversation(tuple(tokens), tools)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.list("messages")
    if not given or len(given) > MAX_MESSAGES:
        raise fields.refuse("messages", f"is not a list of 1 to {MAX_MESSAGES} messages")
    return [_message(_object(fields, "messages", index, item)) for index, item in enumerate(given)]


def _object(fields: Fields, field: str, index: int, value: object) -> Fields:
    if not isinstance(value, dict):
        raise fields.refuse(f"{field}[{index}]", "is not an object")
    return Fields(value, f"{fields.name(field)}[{index}].")


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.text("role")
    if role is None or not _ROLE.match(role):
        raise fields.refuse("role", "is not the name of a role")
    message: dict[str, Any] = {"role": role, "content": _content(fields, role)}
    calls = _calls(fields)
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if (text := fields.text(name)) is not None:
            message[name] = text
    for name in _THOUGHTS:
        if (text := fields.text(name, 1 << 26)) is not None:
            message[name] = text
            message.setdefault("reasoning_content", text)
    # Fields that clients send back from an earlier answer: empty, or for another server's cache.
    fields.only("refusal", "")
    fields.only("annotations", [])
    fields.ignore("cache_control", "id", "index")
    fields.end()
    return message


def _content(fields: Fields, role: str) -> str:
    content = fields.take("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.refuse("content", "is not a text or a list of text parts")
    return "".join(_part(_object(fields, "content", index, part)) for index, part in enumerate(content))


def _part(fields: Fields) -> str:
    kind = fields.text("type")
    if kind not in _TEXT_PARTS:
        raise fields.refuse(
            "type", f"{short(kind)} is not supported: this model reads text, no images, sounds or files"
        )
    text = fields.text("text", 1 << 26)
    if text is None:
        raise fields.refuse("text", "is missing")
    fields.only("annotations", [])
    fields.ignore("cache_control")
    fields.end()
    return text


def _calls(fields: Fields) -> list[dict[str, Any]]:
    given = fields.list("tool_calls")
    return [_call(_object(fields, "tool_calls", index, call)) for index, call in enumerate(given or ())]


def _call(fields: Fields) -> dict[str, Any]:
    fields.only("type", "function")
    number, asked = fields.text("id"), fields.mapping("function")
    if asked is None:
        raise fields.refuse("function", "is missing")
    fields.ignore("index")
    fields.end()
    function = Fields(asked, fields.name("function") + ".")
    name = function.text("name")
    if not name:
        raise function.refuse("name", "is missing")
    arguments = _arguments(function)
    function.end()
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if number is None else {"id": number, **call}


def _arguments(function: Fields) -> Mapping[str, Any]:
    """Return a call's arguments as the object that templates need; clients send it as JSON in a text."""
    given = function.take("arguments")
    name = function.name("arguments")
    if isinstance(given, str):
        given = load(given.encode("utf-8", "surrogatepass"), name, name) if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise function.refuse("arguments", "is not an object")
    check_depth(name, given)
    return given


def _tools(fields: Fields) -> tuple[Mapping[str, Any], ...] | None:
    given = fields.list("tools") or ()
    if len(given) > MAX_TOOLS:
        raise fields.refuse("tools", f"has more than {MAX_TOOLS} tools")
    for index, tool in enumerate(given):
        _check_tool(_object(fields, "tools", index, tool))
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.refuse("tool_choice", f"{short(choice)} is not supported; it can be auto or none")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if given and not parallel:
        raise fields.refuse("parallel_tool_calls", "false is not supported")
    return tuple(given) if given and choice != "none" else None


def _check_tool(tool: Fields) -> None:
    if (kind := tool.text("type")) != "function":
        raise tool.refuse("type", f"{short(kind)} is not supported; tools are functions")
    asked = tool.mapping("function")
    if asked is None:
        raise tool.refuse("function", "is missing")
    tool.ignore("cache_control")
    tool.end()
    function = Fields(asked, tool.name("function") + ".")
    if not (name := function.text("name")) or len(name) > MAX_TEXT:
        raise function.refuse("name", "is missing")
    function.text("description")
    function.mapping("parameters")
    function.only("strict", False)  # noqa: FBT003  (a value, no argument)
    function.end()
