"""The demo's yardstick: one plain mlx-lm process that answers the same prompt.

    python -m pdplane.cli.yardstick QUESTION          where QUESTION is the JSON of a `Question`

Prints, one JSON object a line: {"progress": [what, done, total]} while it gets the model, {"tokens": [...]} when it has
it, and after any line on standard input {"ids": [...], "logprobs": [...]}; or {"error": text}. It loads the model
first, so that the daemons find the download in the cache. MLX runs on the main thread.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import attrs

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.process import exit_with_parent
from pdplane.errors import ConfigError
from pdplane.net import JsonLines

_TERMINATED = 128 + signal.SIGTERM


@attrs.frozen
class Question:
    """What to load and what to answer."""

    model: str
    prompt: str
    max_tokens: int
    step_size: int
    ignore_eos: bool
    blas: str


def main() -> int:
    """Load, wait for a line, compute; end early when the parent is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    word = threading.Event()
    exit_with_parent(word.set)
    speaker = _Speaker(JsonLines(writer=sys.stdout))
    sys.stdout = sys.stderr  # so that libraries print nothing among our lines
    try:
        _measure(speaker, word, Question(**json.loads(sys.argv[1])))
    except ConfigError as error:
        speaker.say(error=str(error))
        return 1
    return 0


class _Speaker:
    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def say(self, **said: Any) -> None:  # noqa: ANN401  (whatever JSON holds)
        self._lines.send(said)

    def progress(self, what: str, done: int, total: int) -> None:
        self.say(progress=[what, done, total])


def _measure(speaker: _Speaker, word: threading.Event, asked: Question) -> None:
    with mlx_needed(asked.blas):
        from pdplane.engine.model import TINY, load_model
        from pdplane.engine.options import EngineOptions
        from pdplane.engine.reference import single_process
    options = EngineOptions(model=asked.model, prefill_step_size=asked.step_size)
    model = load_model(asked.model, progress=speaker.progress)
    tokenizer = model.tokenizer
    if tokenizer.has_chat_template and not asked.model.startswith(TINY):
        tokens = tokenizer.apply_chat([{"role": "user", "content": asked.prompt}])
    else:
        tokens = tokenizer.encode(asked.prompt)
    speaker.say(tokens=tokens)
    word.wait()
    stop_ids: frozenset[int] = frozenset() if asked.ignore_eos else tokenizer.eos_ids
    answer = single_process(model, tokens, asked.max_tokens, options, stop_ids=stop_ids)
    speaker.say(ids=[token.id for token in answer], logprobs=[token.logprob for token in answer])


if __name__ == "__main__":
    sys.exit(main())
