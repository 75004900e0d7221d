"""`pdplane generate --model M`: the whole generation in this process, its experts on remote workers if asked for."""

from __future__ import annotations

import argparse
import json
import sys

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.experts import attaching_experts
from pdplane.engine.options import EngineOptions

_MAX_TOKENS = 128
_TAME = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def generate_here(args: argparse.Namespace, text: str) -> int:
    """Load, generate, print; return the exit code. Raises ConfigError, and SessionLost when the experts are gone."""
    with mlx_needed(args.blas):
        from pdplane.workers.cache.prefix import PrefixEngine
    with attaching_experts(args) as prepare, PrefixEngine(EngineOptions(args.model), prepare) as engine:
        tokenizer = engine.tokenizer
        tokens = tokenizer.apply_chat([{"role": "user", "content": text}]) if args.chat else tokenizer.encode(text)
        pieces = tokenizer.detokenizer()
        limit = args.max_tokens or _MAX_TOKENS
        job = engine.run(tokens, limit, lambda token: _show(pieces.add(token), silent=args.json))
        found = job.result(args.timeout)
        _show(pieces.finish() + "\n", silent=args.json)
    if args.json:
        answer = {"text": tokenizer.decode(found.tokens), "output_ids": list(found.tokens), "ttft_ms": found.ttft_ms,
                  "decode_ms": found.decode_ms, "prompt_tokens": len(tokens)}  # fmt: skip
        print(json.dumps(answer))
    return 0


def _show(text: str, *, silent: bool) -> None:
    if not silent:
        sys.stdout.write(text.translate(_TAME))  # no control characters reach the terminal
        sys.stdout.flush()
