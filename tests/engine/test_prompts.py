"""The line of prompts: whose chunk is next, counted in turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import attrs
import pytest

from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.prompts import MAX_OVERTAKES, PromptLine
from pdplane.engine.reference import single_process
from pdplane.engine.thread import EngineThread, Job, Turns
from pdplane.kv.arena import Pool


@attrs.define(eq=False)
class Prompt:
    """A prompt that counts its chunks down."""

    name: str
    chunks: int
    cancelled: bool = False


def run(line: PromptLine[Prompt], turns: int = 1000) -> str:
    """Serve the line; gives the names in the order of their turns."""
    served = ""
    while turns and (prompt := line.take()) is not None:
        served += prompt.name
        prompt.chunks -= 1
        if prompt.chunks > 0 and not prompt.cancelled:
            line.resume(prompt)
        turns -= 1
    return served


def lined_up(*prompts: Prompt) -> PromptLine[Prompt]:
    line: PromptLine[Prompt] = PromptLine()
    for prompt in prompts:
        line.add(prompt, prompt.chunks)
    return line


def test_each_long_prompt_is_done_after_its_own_chunks() -> None:
    assert run(lined_up(Prompt("A", 3), Prompt("B", 3), Prompt("C", 3))) == "AAABBBCCC"


def test_a_prompt_of_one_chunk_waits_for_one_turn_at_most() -> None:
    line = lined_up(Prompt("A", 3), Prompt("B", 3))
    served = run(line, turns=1)
    line.add(Prompt("x", 1), 1)
    line.add(Prompt("y", 0), 0)  # a prompt of one token has no chunk at all
    assert served + run(line) == "AxyAABBB"


def test_a_stream_of_short_prompts_stops_no_long_one() -> None:
    line = lined_up(Prompt("A", 2), *(Prompt("x", 1) for _ in range(3 * MAX_OVERTAKES)))
    once = "x" * MAX_OVERTAKES
    assert run(line) == f"{once}A{once}A{once}"


def test_a_cancelled_prompt_leaves_at_once() -> None:
    line = lined_up(Prompt("A", 2), Prompt("B", 2), Prompt("C", 2, cancelled=True))
    assert run(line) == "CAABB"


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    found = EngineThread("prompts-under-test")
    found.start()
    yield found
    found.close()


def _opened(gate: threading.Event) -> Turns[None]:
    gate.wait(10)
    yield


def _turns(name: str, chunks: int, log: list[str]) -> Turns[str]:
    for left in reversed(range(chunks)):
        log.append(name)
        if left:
            yield
    if name == "bad":
        raise ValueError(name)
    return name


def test_the_threads_other_jobs_have_their_turns_between_chunks(thread: EngineThread) -> None:
    log: list[str] = []
    everybody = threading.Event()
    thread.submit(lambda: _opened(everybody))
    line: PromptLine[Job[Any]] = PromptLine()
    jobs = [
        thread.submit(lambda: _turns("A", 2, log), line, 2),
        thread.submit(lambda: _turns("bad", 2, log), line, 2),
        thread.submit(lambda: _turns("B", 2, log), line, 2),
        thread.submit(lambda: _turns("-", 3, log)),
        thread.submit(lambda: _turns("x", 1, log), line, 1),
    ]
    everybody.set()
    with pytest.raises(ValueError, match="bad"):
        jobs[1].result(10)
    assert [job.result(10) for job in (*jobs[:1], *jobs[2:])] == ["A", "B", "-", "x"]
    assert log == ["x", "-", "A", "-", "A", "-", "bad", "bad", "B", "B"]


def test_the_threads_close_ends_who_waits_in_line(thread: EngineThread) -> None:
    log: list[str] = []
    closing = threading.Event()
    thread.submit(lambda: _opened(closing))
    line: PromptLine[Job[Any]] = PromptLine()
    jobs = [thread.submit(lambda: _turns("A", 2, log), line, 2) for _ in range(3)]
    ended = threading.Thread(target=thread.close)
    ended.start()
    while not thread.closing:
        pass
    closing.set()
    ended.join(10)
    for job in jobs:
        with pytest.raises(CancelledError):
            job.result(10)
    assert log == []


def test_queued_prompts_of_a_model_end_one_after_the_other() -> None:
    """Three prompts of four chunks and one of one chunk: the order in which they are done."""
    done: list[str] = []
    with MlxPrefillEngine(EngineOptions(model="tiny:llama", prefill_step_size=16, arena_bytes=8 << 20)) as engine:
        loaded = threading.Event()
        engine.thread.submit(lambda: _opened(loaded))
        jobs = []
        for name, length in (("A", 60), ("B", 60), ("C", 60), ("x", 10)):
            blocks = {group: range(1, 1 + count) for group, count in engine.blocks_needed(length).items()}
            job = engine.prefill(range(1, 1 + length), blocks, lambda _steps, _chunk: None)
            job.future.add_done_callback(lambda _, name=name: done.append(name))
            jobs.append(job)
        loaded.set()
        for job in jobs:
            job.result(30)
    assert done == ["x", "A", "B", "C"]


@pytest.mark.parametrize(("exact", "model", "parts"), [(False, "llama", 1), (True, "llama", 2), (False, "gemma3", 2)])
def test_short_ends_are_computed_in_one_step_while_others_wait(exact: bool, model: str, parts: int) -> None:
    """Of three queued prompts the last one has nobody behind it, and is computed as one mlx-lm process does."""
    options = EngineOptions(model=f"tiny:{model}", block_tokens=8, arena_bytes=8 << 20, exact=exact)
    prompts = [[7 * place + token for token in range(1, 20)] for place in range(3)]
    told: list[list[range]] = [[], [], []]
    with MlxPrefillEngine(options) as engine:
        free, loaded = Pool(engine.layout), threading.Event()
        engine.thread.submit(lambda: _opened(loaded))
        jobs = [
            engine.prefill(
                prompt,
                free.allocate(engine.blocks_needed(len(prompt))),
                lambda _steps, chunk, heard=heard: heard.append(chunk),
            )
            for prompt, heard in zip(prompts, told, strict=True)
        ]
        loaded.set()
        found = [job.result(60).id for job in jobs]
        plain = partial(single_process, engine.opened.model, max_tokens=1, options=options)
        alone = [engine.thread.call(partial(plain, prompt))[0].id for prompt in prompts]
    assert found == alone
    assert [len({chunk.stop for chunk in chunks}) for chunks in told] == [parts, parts, 2]
