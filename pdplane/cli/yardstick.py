"""The demo's yardstick: one plain mlx-lm process (or one toy) that answers the same prompt.

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
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from pdplane.api import Tokenizer
from pdplane.cli.daemon import mlx_needed
from pdplane.cli.flags import TOY
from pdplane.cli.process import exit_with_parent
from pdplane.errors import ConfigError
from pdplane.net import JsonLines

_TERMINATED = 128 + signal.SIGTERM

Loaded: TypeAlias = tuple[list[int], Callable[[], list[tuple[int, float]]]]
"""The prompt's tokens, and what computes the answer: (token, logprob) pairs."""


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
    tokens, answer = _load_toy(asked) if asked.model == TOY else _load(asked, speaker)
    speaker.say(tokens=tokens)
    word.wait()
    found = answer()
    speaker.say(ids=[token for token, _logprob in found], logprobs=[logprob for _token, logprob in found])


def _load_toy(asked: Question) -> Loaded:
    from pdplane.toy.engine import ToyTokenizer
    from pdplane.toy.model import ToyOptions, toy_answer

    tokenizer = ToyTokenizer()
    tokens, stop_ids = tokenizer.encode(asked.prompt), _stop_ids(asked, tokenizer)
    return tokens, lambda: toy_answer(ToyOptions(), tokens, asked.max_tokens, stop_ids)


def _load(asked: Question, speaker: _Speaker) -> Loaded:
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
    stop_ids = _stop_ids(asked, tokenizer)

    def answer() -> list[tuple[int, float]]:
        found = single_process(model, tokens, asked.max_tokens, options, stop_ids=stop_ids)
        return [(token.id, token.logprob) for token in found]

    return tokens, answer


def _stop_ids(asked: Question, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset() if asked.ignore_eos else tokenizer.eos_ids


if __name__ == "__main__":
    sys.exit(main())
