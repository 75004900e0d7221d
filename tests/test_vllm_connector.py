"""The vLLM connector over real planes, called in vLLM's order: by a small scheduler and a worker without a model."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from pdplane import new_room
from tests.free_ports import free_ports

HERE = Path(__file__).parent
BLOCK, BLOCKS, HEADS, CONTENT = 4, 32, 2, 6
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(12)]
QUICK = {"ping_interval_s": 0.3, "bootstrap_timeout_s": 2}


@pytest.fixture(scope="module")
def connector() -> Iterator[ModuleType]:
    paths = [str(HERE / "fake_vllm"), str(HERE.parent / "examples" / "vllm_connector")]
    sys.path[:0] = paths
    try:
        yield importlib.import_module("pdplane_connector")
    finally:
        sys.path[:] = [path for path in sys.path if path not in paths]
        for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "pdplane_connector")]:
            del sys.modules[name]


def configured(role: str, **settings: Any) -> SimpleNamespace:  # noqa: ANN401
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=settings),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(served_model_name="tiny", get_total_num_kv_heads=lambda: HEADS),
        cache_config=SimpleNamespace(block_size=BLOCK),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )


class FullAttentionSpec:
    """The one kind of cache that is moved."""


GROUPS = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())])


@attrs.define
class Engine:
    """One side: what vLLM's scheduler says to both connectors in a step, and layers that write what a seed tells."""

    module: ModuleType
    config: SimpleNamespace
    seed: int
    caches: dict[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)
    sent: set[str] = attrs.field(factory=set)
    received: set[str] = attrs.field(factory=set)
    failed: set[str] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        roles = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole
        self.caches = {name: np.zeros((BLOCKS, HEADS, BLOCK, CONTENT), np.float32) for name in LAYERS}
        self.scheduler = self.module.PdplaneConnector(self.config, roles.SCHEDULER, GROUPS)
        self.worker = self.module.PdplaneConnector(self.config, roles.WORKER, GROUPS)
        self.worker.register_kv_caches(self.caches)

    scheduler: Any = attrs.field(init=False)
    worker: Any = attrs.field(init=False)

    def step(self, tokens: dict[str, int] | None = None, new: Any = (), preempted: Any = ()) -> None:  # noqa: ANN401
        """Run one step, in which these requests compute so many tokens; new ones come with id, blocks, computed."""
        tokens, begun = tokens or {}, {name for name, _, _ in new}
        running = [name for name in tokens if name not in begun]
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=([*blocks],), num_computed_tokens=computed)
                for name, blocks, computed in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=running, new_block_ids=[None] * len(running), num_computed_tokens=[BLOCK] * len(running)
            ),
            num_scheduled_tokens=tokens,
            preempted_req_ids=set(preempted),
        )
        told = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(told)
        self.worker.bind_connector_metadata(told)
        for number, (name, cache) in enumerate(self.caches.items() if tokens else ()):
            for chunk in told.chunks:
                for block in chunk.blocks:
                    cache[block] = self.seed + 100 * number + block
            self.worker.save_kv_layer(name, cache, None)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        whys = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=whys))
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving

    def begin(self, name: str, prompt: range, blocks: range, computed: int, **params: Any) -> int:  # noqa: ANN401
        """Add a request whose first blocks hold `computed` tokens; return how many tokens are to come from afar."""
        request = SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            prompt_token_ids=[*prompt],
            num_prompt_tokens=len(prompt),
            mm_features=[],
            lora_request=None,
        )
        self.scheduler.on_new_request(request)
        external, later = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert later == (external > 0)
        allocated = SimpleNamespace(get_block_ids=lambda: ([*blocks],))
        self.scheduler.update_state_after_alloc(request, allocated, external)
        return int(external)

    def end(self, name: str, status: str = "FINISHED_LENGTH_CAPPED") -> tuple[bool, dict[str, Any]]:
        request = SimpleNamespace(request_id=name, status=SimpleNamespace(name=status))
        kept, told = self.scheduler.request_finished(request, [])
        return kept, told


@pytest.fixture
def pair(connector: ModuleType) -> Iterator[tuple[Engine, Engine]]:
    prefill = Engine(connector, configured("kv_producer", bootstrap_port=free_ports(1)[0], **QUICK), seed=1000)
    decode = Engine(connector, configured("kv_consumer", **QUICK), seed=5000)
    yield prefill, decode
    prefill.worker.shutdown()
    decode.worker.shutdown()


def run_until(engines: tuple[Engine, Engine], name: str) -> None:
    """Repeat empty steps, as vLLM does, until both sides have reported the request."""
    end = time.monotonic() + 30
    while not all(name in engine.sent | engine.received for engine in engines):
        assert time.monotonic() < end, f"{name} did not end"
        for engine in engines:
            engine.step()


def ask(prefill: Engine, room: int) -> dict[str, Any]:
    port = prefill.config.kv_transfer_config.kv_connector_extra_config["bootstrap_port"]
    return {"do_remote_prefill": True, "room": room, "prefill": f"127.0.0.1:{port}"}


PROMPT = range(14)  # three blocks and a half


def test_a_prompt_in_two_chunks_arrives_where_decode_wants_it(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    room = new_room()
    assert prefill.begin("a", PROMPT, range(3, 7), 0, do_remote_decode=True, room=room) == 0
    assert decode.begin("a", PROMPT, range(10, 14), BLOCK, **ask(prefill, room)) == len(PROMPT) - BLOCK
    decode.step()
    prefill.step({"a": BLOCK}, new=[("a", range(3, 7), 0)])
    prefill.step({"a": 10})
    assert prefill.end("a") == (True, {"room": room})
    run_until(pair, "a")
    assert "a" not in decode.failed
    for ours, theirs in zip(prefill.caches.values(), decode.caches.values(), strict=True):
        assert (theirs[10] == 0).all()  # decode had this one
        assert (theirs[11:14] == ours[4:7]).all()
        assert (theirs[11:14] > 0).all()
        assert (theirs[14:] == 0).all()
    assert decode.end("a") == (False, {"room": room})


def test_a_preempted_prompt_fails_by_name_on_both_sides(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    room = new_room()
    prefill.begin("b", PROMPT, range(3, 7), 0, do_remote_decode=True, room=room)
    decode.begin("b", PROMPT, range(10, 14), 0, **ask(prefill, room))
    decode.step()
    prefill.step({"b": BLOCK}, new=[("b", range(3, 7), 0)])
    prefill.step(preempted=["b"])
    prefill.step({"b": 10})  # it came back, and computes for its own client
    kept, told = prefill.end("b")
    assert kept
    assert (told["cause"], "preempted" in told["text"]) == ("cancelled", True)
    run_until(pair, "b")
    assert "b" in decode.failed
    assert "preempted" in decode.end("b")[1]["text"]


def test_an_abort_of_either_side_ends_both(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    for name, aborts in (("c", decode), ("d", prefill)):
        room = new_room()
        prefill.begin(name, PROMPT, range(3, 7), 0, do_remote_decode=True, room=room)
        decode.begin(name, PROMPT, range(10, 14), 0, **ask(prefill, room))
        decode.step()
        prefill.step({name: BLOCK}, new=[(name, range(3, 7), 0)])
        aborts.end(name, "FINISHED_ABORTED")
        aborts.step()
        if aborts is decode:
            prefill.step({name: 10})
            prefill.end(name)
        run_until(pair, name)
        assert name in decode.failed


def test_an_absent_half_fails_by_name(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    nobody = {"prefill": f"127.0.0.1:{free_ports(1)[0]}"}
    decode.begin("e", PROMPT, range(10, 14), 0, **ask(prefill, new_room()) | nobody)
    prefill.begin("e", PROMPT, range(3, 7), 0, do_remote_decode=True, room=new_room())
    prefill.step({"e": len(PROMPT)}, new=[("e", range(3, 7), 0)])
    prefill.end("e")
    run_until(pair, "e")
    assert "e" in decode.failed
    assert decode.end("e")[1]["cause"] == "unreachable"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"room": "7"}, "room must be a whole number"),
        ({"room": -1}, "room must be a whole number"),
        ({"room": 7, "prefill": 8998}, "prefill must be"),
        ({"room": 2**80, "prefill": "127.0.0.1:1"}, "room is"),
        ({"room": 7, "prefill": "nobody"}, "host:port"),
    ],
)
def test_what_a_client_gets_wrong_is_told_to_it(pair: tuple[Engine, Engine], params: Any, words: str) -> None:  # noqa: ANN401
    _, decode = pair
    if decode.begin("f", PROMPT, range(10, 14), 0, do_remote_prefill=True, **params):
        decode.received.clear()
        decode.step()
        assert "f" in decode.received & decode.failed
    assert words in decode.end("f")[1]["text"]
    decode.step()


class MambaSpec:
    """A kind of cache that is not moved."""


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("kv_transfer_config.kv_role", "kv_both", "kv_role"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size"),
        ("parallel_config.data_parallel_size", 2, "data_parallel_size"),
        ("speculative_config", object(), "speculative decoding"),
        ("groups", [GROUPS.kv_cache_groups[0]] * 2, "2 KV cache groups"),
        ("groups", [SimpleNamespace(kv_cache_spec=MambaSpec())], "MambaSpec"),
    ],
)
def test_what_is_not_moved_is_refused_by_name(connector: ModuleType, place: str, value: object, words: str) -> None:
    config = configured("kv_consumer")
    if place != "groups":
        *path, name = place.split(".")
        setattr(getattr(config, path[0]) if path else config, name, value)
    groups = SimpleNamespace(kv_cache_groups=value) if place == "groups" else GROUPS
    with pytest.raises(ValueError, match=words):
        connector.PdplaneConnector(config, connector.KVConnectorRole.WORKER, groups)


def test_caches_of_another_shape_are_refused_by_name(connector: ModuleType) -> None:
    worker = connector.PdplaneConnector(configured("kv_consumer"), connector.KVConnectorRole.WORKER, GROUPS)
    with pytest.raises(ValueError, match=r"the cache of layer is \(2, 32, 4, 2, 6\)"):
        worker.register_kv_caches({"layer": np.zeros((2, BLOCKS, BLOCK, HEADS, CONTENT), np.float32)})


def test_another_version_of_vllm_is_named(connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.33.1")
    with pytest.raises(ImportError, match=r"knows vLLM 0\.32\.x, this is 0\.33\.1"):
        importlib.reload(connector)
