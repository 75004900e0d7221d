"""The cache worker with real tiny models: a prefix handed over continues as in one mlx-lm process."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

import attrs
import pytest

from pdplane.engine.options import EngineOptions
from pdplane.engine.reference import single_process
from pdplane.errors import SessionLost
from pdplane.ids import Endpoint
from pdplane.messages import hash_prompt
from pdplane.workers.cache.codecs import LOSSLESS, is_installed
from pdplane.workers.cache.file import decode_cache_file, encode_cache_file
from pdplane.workers.cache.model import MlxCacheModel
from pdplane.workers.cache.prefix import PrefixEngine
from pdplane.workers.cache.worker import CacheWorker
from pdplane.workers.cache.wp30 import Wp30Client
from tests.waiting import until
from tests.workers.test_cache_worker import recorded_client
from tests.workers.wp30_cases import SERVER

STEP = 16
PREFIX = [(7 * n) % 300 + 2 for n in range(2 * STEP)]
QUERY = [11, 5, 23, 9, 40]
FAMILIES = ["llama-bf16", "qwen3", "qwen3_moe", "gemma3", "mamba2", "lfm2", "qwen3_next", "deepseek_v3", "falcon_h1"]


class Worker:
    """An engine with a worker over it."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = PrefixEngine(options)
        self.engine.start()
        self.worker = CacheWorker(Endpoint("127.0.0.1", 0), MlxCacheModel(self.engine))
        self.worker.start()

    def close(self) -> None:
        self.engine.close()
        self.worker.close()

    def client(self) -> Wp30Client:
        return Wp30Client(self.worker.endpoint, timeout_s=30)

    def alone(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The same by one mlx-lm run."""
        engine = self.engine
        found = engine.thread.call(
            lambda: single_process(engine.model, tokens, max_tokens, engine.options, stop_ids=engine.tokenizer.eos_ids)
        )
        return [token.id for token in found]


def options(model: str, **changes: int) -> EngineOptions:
    return attrs.evolve(EngineOptions(f"tiny:{model}", prefill_step_size=STEP), **changes)


@pytest.fixture(scope="module")
def llama() -> Iterator[Worker]:
    found = Worker(options("llama"))
    yield found
    found.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefix_continues_on_another_worker(name: str) -> None:
    ours, theirs = Worker(options(name)), Worker(options(name))
    try:
        with ours.client() as near, theirs.client() as far:
            for prefix in (PREFIX, PREFIX[:-3]):  # a whole number of chunks, and not
                saved = near.prefill_cache(prefix, document_id="d", codec="none")
                run = far.run_cache(saved.payload, QUERY, 6, prefix_hash=str(saved.header["prefix_hash"]))
                assert run.header["status"] == "success", run.header
                assert run.header["output_tokens"] == theirs.alone([*prefix, *QUERY], 6)
            whole = far.run_text([*PREFIX, *QUERY], 6)
            assert whole.header["output_tokens"] == theirs.alone([*PREFIX, *QUERY], 6)
    finally:
        theirs.close()
        ours.close()


def test_quantised_caches_continue() -> None:
    worker = Worker(options("llama", kv_bits=8))
    try:
        with worker.client() as client:
            saved = client.prefill_cache(PREFIX)
            assert b"QuantizedKVCache" in bytes(saved.payload[:4000])
            run = client.run_cache(saved.payload, QUERY, 6)
            assert run.header["output_tokens"] == worker.alone([*PREFIX, *QUERY], 6)
    finally:
        worker.close()


@pytest.mark.parametrize("codec", [*filter(is_installed, LOSSLESS), "q8"])
def test_codecs_end_to_end(llama: Worker, codec: str) -> None:
    with llama.client() as client:
        saved = client.prefill_cache(PREFIX, document_id="doc", codec=codec)
        assert saved.failure is None
        run = client.run_cache(saved.payload, QUERY, 6, codec=codec)
        assert run.header["status"] == "success", run.header
        assert len(run.header["output_tokens"]) == 6  # type: ignore[arg-type]
        if codec != "q8":
            assert run.header["output_tokens"] == llama.alone([*PREFIX, *QUERY], 6)
        assert run.header["load_ms"] >= run.header["decompress_ms"]  # type: ignore[operator]
        parts = sum(run.header[name] for name in ("load_ms", "ttft_ms", "decode_ms"))  # type: ignore[misc]
        assert parts <= run.header["server_ms"]  # type: ignore[operator]  # none contains another


def test_lossy_caches_are_taken_only_by_name(llama: Worker) -> None:
    with llama.client() as client:
        for made, asked in (("q8", "none"), ("q4", "q8"), ("none", "q4")):
            saved = client.prefill_cache(PREFIX, codec=made)
            run = client.run_cache(saved.payload, QUERY, codec=asked)
            assert run.header["status"] == "incompatible"
            assert str(run.header["error"]).startswith("lossy differs")


@pytest.mark.parametrize("field", ["model_revision", "config_hash", "weight_hash", "dtype", "mlx", "mlx_lm"])
def test_incompatible_names_the_field(llama: Worker, field: str) -> None:
    with llama.client() as client:
        file = decode_cache_file(client.prefill_cache(PREFIX).payload)
        other = attrs.evolve(file, manifest=attrs.evolve(file.manifest, **{field: "other"}))
        run = client.run_cache(encode_cache_file(other), QUERY)
    assert list(run.header) == ["cmd", "recv_ms", "payload_bytes", "status", "error"]
    assert run.header["status"] == "incompatible"
    assert str(run.header["error"]).startswith(f"{field} differs")


def test_another_prefix_or_another_count_is_incompatible(llama: Worker) -> None:
    with llama.client() as client:
        saved = client.prefill_cache(PREFIX)
        assert saved.header["prefix_hash"] == hash_prompt(PREFIX)
        run = client.run_cache(saved.payload, QUERY, prefix_hash=hash_prompt(PREFIX[:-1]))
        assert str(run.header["error"]).startswith("prefix_hash differs")
        file = decode_cache_file(saved.payload)
        short = attrs.evolve(file, manifest=attrs.evolve(file.manifest, token_count=len(PREFIX) - 1))
        run = client.run_cache(encode_cache_file(short), QUERY)
        assert "layer.0.offset differs" in str(run.header["error"])


def test_another_model_is_incompatible(llama: Worker) -> None:
    other = Worker(options("llama", seed=1))
    try:
        with llama.client() as near, other.client() as far:
            run = far.run_cache(near.prefill_cache(PREFIX).payload, QUERY)
        assert str(run.header["error"]).startswith("model_revision differs")
    finally:
        other.close()


@pytest.mark.parametrize("tokens", [[], [320], [0] * 4097])
def test_tokens_that_cannot_work_are_told(llama: Worker, tokens: list[int]) -> None:
    with llama.client() as client:
        for reply in (client.run_text(tokens), client.prefill_cache(tokens), client.prefill_time(tokens)):
            assert reply.header["status"] == "implementation_error"
            assert str(reply.failure).startswith("ConfigError: ")
        assert client.ping().failure is None


def test_tokens_end_with_the_context_and_with_the_client(llama: Worker) -> None:
    """max_tokens may be any number: a reply ends at the context, and nobody computes for a client that has left."""
    long = (PREFIX * 128)[:4094]  # two tokens below the context
    with llama.client() as client:
        with llama.client() as leaving, pytest.raises(SessionLost):
            leaving.call({"cmd": "run_text", "token_ids": long}, timeout_s=0.05)
        until(lambda: llama.worker.statistics().abandoned_commands == 1, "the command's end")
        assert 1 <= len(client.run_text(long, 2**31 - 1).header["output_tokens"]) <= 3  # type: ignore[arg-type]


def test_many_clients_share_the_model(llama: Worker) -> None:
    wanted = llama.alone(PREFIX, 5)
    found: list[object] = []

    def ask() -> None:
        with llama.client() as client:
            found.extend(client.run_text(PREFIX, 5).header["output_tokens"] for _ in range(2))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 8


def test_the_recorded_framing_gets_the_recorded_keys_and_the_codecs_bytes(llama: Worker) -> None:
    """A client in raw socket calls, as the recorded one: a model behind the worker changes no key and no byte."""
    plain, payloads = {}, {}
    for codec in ("none", "zlib"):
        asked = {"cmd": "prefill_cache", "token_ids": PREFIX, "document_id": "d", "codec": codec}
        plain, payloads[codec] = recorded_client(llama.worker, asked)
    assert payloads["zlib"] == zlib.compress(payloads["none"])
    recorded = {case["name"]: case["reply_key_order"] for case in SERVER if "reply_key_order" in case}
    assert list(plain) == recorded["prefill_cache"]
    ids = {"query_ids": QUERY, "max_tokens": 2}
    for name, header, payload in (
        ("ping", {"cmd": "ping"}, b"abc"),
        ("run_text", {"cmd": "run_text", "token_ids": PREFIX, "max_tokens": 2}, b""),
        ("run_cache", {"cmd": "run_cache", "codec": "zlib", **ids}, payloads["zlib"]),
        ("run_cache_incompatible", {"cmd": "run_cache", "prefix_hash": "other", **ids}, payloads["none"]),
        ("run_cache_missing_query", {"cmd": "run_cache"}, payloads["none"]),
        ("unknown", {"cmd": "nope"}, b""),
    ):
        reply, rest = recorded_client(llama.worker, header, payload)
        assert (list(reply), rest) == (recorded[name], b""), name
        assert reply["payload_bytes"] == len(payload)


def test_reply_fields_of_the_real_model(llama: Worker) -> None:
    with llama.client() as client:
        assert list(client.prefill_time(PREFIX).header) == [
            "cmd", "recv_ms", "payload_bytes", "prefill_ms", "server_ms",
        ]  # fmt: skip
        saved = client.prefill_cache(PREFIX)
        assert list(saved.header) == [
            "cmd", "recv_ms", "payload_bytes", "prefill_ms", "serialize_ms", "prefix_hash",
        ]  # fmt: skip
        run = client.run_cache(saved.payload, QUERY, 2).header
        assert list(run) == [
            "cmd", "recv_ms", "payload_bytes", "status", "text", "decompress_ms", "load_ms", "ttft_ms", "decode_ms",
            "output_tokens", "cache_tensor_bytes", "peak_bytes", "server_ms",
        ]  # fmt: skip
        assert type(run["peak_bytes"]) is int
        assert run["peak_bytes"] > 0
