"""From a request's bytes to checked tokens: what both roles do before they ask their node."""

from __future__ import annotations

import asyncio

import attrs
from aiohttp import web

from pdplane.errors import ConfigError
from pdplane.node.protocols import Node
from pdplane.serving.generate_request import GenerateRequest, read_generate

MAX_BODY = 64 << 20


@attrs.frozen
class Admitted:
    """A checked request and its prompt's tokens."""

    asked: GenerateRequest
    tokens: tuple[int, ...]


async def admit(request: web.Request, node: Node) -> Admitted:
    """Read, check and tokenise. Raises ConfigError for a bad request."""
    asked = read_generate(await request.read())
    # Long texts take a while to tokenise, and this thread serves everybody.
    tokens = await asyncio.get_running_loop().run_in_executor(None, _tokens, asked, node)
    _check_lengths(asked, tokens, node)
    return Admitted(asked, tokens)


def _tokens(asked: GenerateRequest, node: Node) -> tuple[int, ...]:
    if asked.input_ids is not None:
        return asked.input_ids
    if asked.messages is not None:
        return tuple(node.tokenizer.apply_chat([dict(message) for message in asked.messages]))
    return tuple(node.tokenizer.encode(asked.text or ""))


def _check_lengths(asked: GenerateRequest, tokens: tuple[int, ...], node: Node) -> None:
    if not tokens or asked.text == "":
        raise ConfigError("the prompt is empty")
    info = node.info()
    vocab_size, context_length = info.get("vocab_size"), info.get("context_length")
    if vocab_size is not None and max(tokens) >= vocab_size:
        raise ConfigError(f"token id {max(tokens)} is not one of the model's {vocab_size}")
    if context_length is not None and len(tokens) + asked.max_tokens > context_length:
        raise ConfigError(
            f"{len(tokens)} prompt tokens and max_tokens {asked.max_tokens} are longer than "
            f"the context of {context_length}"
        )
