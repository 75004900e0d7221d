"""The parts of a chat's answer as it grows: content, thoughts and calls of tools.

mlx-lm knows each model's marks and how its calls are written; here they are applied to the text of one answer.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from mlx_lm.generate import TextStateMachine, make_text_state_machine

from pdplane.api import Said, ToolCall, join_said
from pdplane.engine.untyped import Wrapper

logger = logging.getLogger(__name__)

Tools: TypeAlias = Sequence[Mapping[str, object]]

_machine: Any = TextStateMachine
_make_machine: Callable[[Any], Any] = make_text_state_machine
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, SyntaxError, RecursionError, MemoryError)
"""The errors of mlx-lm's parsers for a call that a model wrote wrongly."""


@attrs.frozen
class _WithoutTools:
    """A tokenizer wrapper as `make_text_state_machine` sees it, for an answer that may call no tool."""

    wrapper: Wrapper
    has_tool_calling: bool = False

    @property
    def response_transitions(self) -> dict[str, list[tuple[str, str]]]:
        """The format's transitions, except those that lead to a call."""
        found = self.wrapper.response_transitions
        return {state: [edge for edge in edges if edge[1] != "tool"] for state, edges in found.items()}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (the wrapper's own)
        return getattr(self.wrapper, name)


class MlxSpeech:
    """Splits the text of one answer; the end of `prompt` shows whether it begins with a thought."""

    def __init__(self, wrapper: Wrapper, prompt: Sequence[int], tools: Tools | None) -> None:
        self._wrapper, self._tools = wrapper, tools
        machine = _make_machine(wrapper if tools else _WithoutTools(wrapper))
        self._state = machine.make_state(_first_state(wrapper, prompt))
        self._call: str | None = None  # the text of a call that is being written
        self._numbers: set[str] = set()

    def add(self, text: str) -> Said:
        """Take a piece of the text; return the parts that are certain by now."""
        self._state, segments = _machine.split(self._state, text)
        return join_said(self._sort(segments))

    def finish(self) -> Said:
        """Return the parts that were held back; a call without its closing mark counts when it can be read."""
        self._state, text, state = _machine.flush(self._state)
        said = list(self._sort([(state, text)]))
        if self._call is not None:
            said.append(self._end_call(""))
        return join_said(said)

    def _sort(self, segments: Iterable[tuple[str | None, str]]) -> Iterator[Said]:
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            if self._call is not None:
                yield self._end_call(self._wrapper.tool_call_end)
            if state == "reasoning":
                yield Said(reasoning=text)
            elif state == "normal":
                yield Said(content=text)

    def _end_call(self, end: str) -> Said:
        text, self._call = self._call or "", None
        try:
            found = self._wrapper.tool_parser(text, self._tools)
            calls = tuple(self._checked(call) for call in (found if isinstance(found, list) else [found]))
        except _UNREADABLE as error:
            logger.warning("a tool call of %s characters cannot be read (%s): it stays text", len(text), error)
            return Said(content=f"{self._wrapper.tool_call_start}{text}{end}")
        return Said(calls=calls)

    def _checked(self, call: Mapping[str, Any]) -> ToolCall:
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str):
            raise TypeError("a call without a name")
        number = call.get("id")
        if not isinstance(number, str) or number in self._numbers:
            number = f"call_{uuid.uuid4().hex}"
        self._numbers.add(number)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(number, name, written)


def _first_state(wrapper: Wrapper, prompt: Sequence[int]) -> str:
    """Return whether the prompt ends inside a thought, by the rule of mlx-lm's server."""
    if wrapper.response_initial_state:
        return str(wrapper.response_initial_state)
    if wrapper.has_thinking and wrapper.rfind_think_start(prompt) > wrapper.rfind_think_end(prompt):
        return "reasoning"
    return "normal"
