"""From a request's bytes to checked tokens: what both roles do before they ask their node."""

from __future__ import annotations

import asyncio

import attrs
from aiohttp import web

from pdplane.api import Node
from pdplane.errors import ConfigError
from pdplane.serving.generate_request import DEFAULT_BOOTSTRAP_PORT, GenerateRequest, read_generate

DEFAULT_MAX_TOKENS = 128
MAX_BODY = 64 << 20


@attrs.frozen
class Admitted:
    """A checked request, its prompt's tokens, and how many tokens the answer may have."""

    asked: GenerateRequest
    tokens: tuple[int, ...]
    max_tokens: int


async def admit(request: web.Request, node: Node, bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT) -> Admitted:
    """Read, check and tokenise. Raises ConfigError for a bad request."""
    asked = read_generate(await request.read(), bootstrap_port)
    # Long texts take a while to tokenise, and this thread serves everybody.
    tokens = await asyncio.get_running_loop().run_in_executor(None, _tokens, asked, node)
    if not tokens or asked.text == "":
        raise ConfigError("the prompt is empty")
    info = node.info()
    vocab_size, context_length = info.get("vocab_size"), info.get("context_length")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise ConfigError(f"token id {max(tokens)} is not one of the model's {vocab_size}")
    return Admitted(asked, tokens, _max_tokens(asked.max_tokens, len(tokens), context_length))


def _tokens(asked: GenerateRequest, node: Node) -> tuple[int, ...]:
    if asked.input_ids is not None:
        return asked.input_ids
    if asked.messages is not None:
        return tuple(node.tokenizer.apply_chat([dict(message) for message in asked.messages]))
    return tuple(node.tokenizer.encode(asked.text or ""))


def _max_tokens(asked: int | None, prompt_tokens: int, context_length: int | None) -> int:
    if context_length is None:
        return asked or DEFAULT_MAX_TOKENS
    wanted = asked or max(1, min(DEFAULT_MAX_TOKENS, context_length - prompt_tokens))
    if prompt_tokens + wanted > context_length:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and max_tokens {wanted} are more than the context of {context_length}"
        )
    return wanted
