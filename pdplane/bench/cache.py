"""`pdplane bench cache`: whether to hand a worker a prefix's cache or its tokens.

A worker runs in a process of its own on loopback. For each prefix length it continues once from the tokens (run_text)
and once from the saved cache (run_cache); the ids must be those of one mlx-lm process. The break-even link rate is the
rate at which sending the cache takes as long as computing it again: on a faster link the cache wins.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs

from pdplane.bench.tables import print_table
from pdplane.bench.worker_process import worker_processes
from pdplane.errors import ConfigError, InternalError
from pdplane.workers.cache import codecs
from pdplane.workers.cache.wp30 import Wp30Client, Wp30Reply, expect

_LENGTHS = (128, 256, 512, 1024, 2048)
_QUERY = 16
_LINKS_MBIT = (100, 1_000, 10_000)


@attrs.frozen
class CacheCase:
    """One prefix length, the fastest of its rounds; times in ms."""

    prefix_tokens: int
    text_bytes: int
    cache_bytes: int
    text_prefill_ms: float
    text_ttft_ms: float
    cache_send_ms: float
    cache_load_ms: float
    cache_ttft_ms: float
    saved_ms: float
    break_even_mbit_s: float | None


@attrs.frozen
class CodecCase:
    """One codec on the longest prefix's cache; rates in 10**6 bytes of cache a second, None where nothing is done."""

    codec: str
    nbytes: int
    ratio: float
    encode_mb_s: float | None
    decode_mb_s: float | None
    ttft_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to measure."""
    parser.add_argument(
        "--model", default="tiny:llama-bf16", help="the model: a directory, hub id or smollm2 (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=_LENGTHS,
        metavar="N,...",
        help="tokens of the prefixes (default: 128,256,512,1024,2048)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=int,
        default=128,
        metavar="N",
        help="tokens of one chunk of the prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16, metavar="N", help="tokens to continue with (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="rounds, of which the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures (default: none)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="file for a drawing; needs the extra plot (default: none)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError and SessionLost."""
    step = str(args.prefill_step_size)
    command = ["cache-worker", "--model", args.model, "--port", "0", "--prefill-step-size", step, "--blas", args.blas]
    with worker_processes(command) as (worker,), Wp30Client(worker) as client:
        bench = Bench(client, args.max_tokens, args.rounds)
        found = [bench.measure(length) for length in args.lengths]
        table = bench.measure_codecs(max(args.lengths))
    _check_ids(args, bench)
    _print(args, found, table)
    if args.json is not None:
        figures = {
            "model": args.model,
            "cases": list(map(attrs.asdict, found)),
            "codecs": list(map(attrs.asdict, table)),
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot is not None:
        _plot(args.plot, found)
    return 0


class Bench:
    """The calls of one client, and the ids of every prefix."""

    def __init__(self, client: Wp30Client, max_tokens: int, rounds: int) -> None:
        self._client, self._max_tokens, self._rounds = client, max_tokens, rounds
        self.ids: dict[int, object] = {}

    def measure(self, length: int) -> CacheCase:
        """Measure one prefix length both ways. Raises InternalError when they do not give the same ids."""
        prefix, query = tokens_of(length), tokens_of(_QUERY)
        text = self._fastest(lambda: self._client.run_text([*prefix, *query], self._max_tokens))
        saved = _good(self._client.prefill_cache(prefix))
        cache = self._fastest(lambda: self._client.run_cache(saved.payload, query, self._max_tokens))
        if expect(text, "output_tokens") != expect(cache, "output_tokens"):
            raise InternalError(f"the cache of {length} tokens continues with other ids than the tokens themselves")
        self.ids[length] = expect(text, "output_tokens")
        saved_ms = _first_ms(text) - _first_ms(cache)
        more = cache.request_bytes - text.request_bytes
        return CacheCase(
            length, text.request_bytes, cache.request_bytes, _number(text, "prefill_ms"), _first_ms(text),
            cache.send_ms, _number(cache, "load_ms"), _first_ms(cache), saved_ms,
            more * 8 / saved_ms / 1000 if saved_ms > 0 else None,
        )  # fmt: skip

    def measure_codecs(self, length: int) -> list[CodecCase]:
        """Measure every installed codec on one cache."""
        saved = _good(self._client.prefill_cache(tokens_of(length)))
        return [self._measure_codec(codec, saved.payload) for codec in codecs.LOSSLESS if codecs.is_installed(codec)]

    def _measure_codec(self, codec: str, cache: memoryview) -> CodecCase:
        packed, encode_s = _timed(partial(codecs.encode, codec, cache, 2))
        plain, decode_s = _timed(partial(codecs.decode, codec, packed, len(cache)))
        if bytes(plain) != bytes(cache):
            raise InternalError(f"codec {codec} does not give back what it got")
        query = tokens_of(_QUERY)
        reply = self._fastest(partial(self._client.run_cache, packed, query, self._max_tokens, codec=codec))
        rates = [None if codec == "none" else len(cache) / seconds / 1e6 for seconds in (encode_s, decode_s)]
        return CodecCase(codec, len(packed), len(cache) / len(packed), rates[0], rates[1], _first_ms(reply))

    def _fastest(self, call: Callable[[], Wp30Reply]) -> Wp30Reply:
        return min((_good(call()) for _ in range(self._rounds)), key=_first_ms)


def _first_ms(reply: Wp30Reply) -> float:
    """Return the worker's time to the first token, that of putting a cache in place included."""
    return _number(reply, "ttft_ms") + (_number(reply, "load_ms") if "load_ms" in reply.header else 0.0)


def tokens_of(count: int) -> list[int]:
    """Return token ids that any vocabulary has."""
    return [(7 * number) % 300 + 2 for number in range(count)]


def _check_ids(args: argparse.Namespace, bench: Bench) -> None:
    """Compare with one mlx-lm process, which stops where the worker stopped."""
    from pdplane.engine.model import load_model
    from pdplane.engine.options import EngineOptions
    from pdplane.engine.reference import single_process
    from pdplane.engine.thread import EngineThread

    thread = EngineThread()
    thread.start()
    try:
        options = EngineOptions(args.model, prefill_step_size=args.prefill_step_size)
        model = thread.call(lambda: load_model(args.model))
        for length, ids in bench.ids.items():
            prompt = [*tokens_of(length), *tokens_of(_QUERY)]
            wanted = thread.call(
                partial(single_process, model, prompt, args.max_tokens, options, stop_ids=model.tokenizer.eos_ids)
            )
            if [token.id for token in wanted] != ids:
                raise InternalError(f"after {length} tokens the worker's ids are not those of one mlx-lm process")
    finally:
        thread.close()


def _print(args: argparse.Namespace, found: Sequence[CacheCase], table: Sequence[CodecCase]) -> None:
    print(f"{args.model}: {_QUERY} query tokens after the prefix; all ids equal to one mlx-lm process")
    print_table(
        "tokens or cache (ms, bytes of the request)",
        ("prefix", "text bytes", "cache bytes", "text prefill", "text ttft", "send", "load", "cache ttft", "saved",
         "break-even Mbit/s"),
        [
            (f"{c.prefix_tokens}", c.text_bytes, c.cache_bytes, c.text_prefill_ms, c.text_ttft_ms, c.cache_send_ms,
             c.cache_load_ms, c.cache_ttft_ms, c.saved_ms,
             "never" if c.break_even_mbit_s is None else c.break_even_mbit_s)
            for c in found
        ],
    )  # fmt: skip
    print_table(
        f"codecs on the cache of {max(args.lengths)} tokens (10**6 bytes/s)",
        ("codec", "bytes", "ratio", "encode", "decode", "ttft ms"),
        [(c.codec, c.nbytes, c.ratio, c.encode_mb_s, c.decode_mb_s, c.ttft_ms) for c in table],
    )


def _plot(file: Path, found: Sequence[CacheCase]) -> None:
    try:
        import matplotlib as mpl
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'pdplane[plot]'") from error
    mpl.use("Agg")
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = [case.prefix_tokens for case in found]
    axes.plot(lengths, [case.text_ttft_ms for case in found], "o-", label="tokens (computed again)")
    for link in _LINKS_MBIT:
        total = [case.cache_bytes * 8 / link / 1000 + case.cache_ttft_ms for case in found]
        axes.plot(lengths, total, "s--", label=f"cache over {link:,} Mbit/s")
    axes.set(xlabel="prefix tokens", ylabel="ms to the first token", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(file)


def _good(reply: Wp30Reply) -> Wp30Reply:
    if reply.failure is not None:
        raise ConfigError(f"{reply.header.get('cmd')}: {reply.failure}")
    return reply


def _number(reply: Wp30Reply, key: str) -> float:
    found = expect(reply, key)
    if not isinstance(found, int | float):
        raise InternalError(f"{key} is no number")
    return float(found)


def _timed(function: Callable[[], codecs.Buffer]) -> tuple[codecs.Buffer, float]:
    began = time.perf_counter()
    found = function()
    return found, time.perf_counter() - began


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths like 128,512")
    return tuple(int(part) for part in parts)
