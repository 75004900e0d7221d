"""Remote experts in real tiny models: the bits of the local model, and never a wrong number when workers are lost."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

from pdplane.engine.model import Model, load_model
from pdplane.engine.options import EngineOptions
from pdplane.engine.reference import single_process
from pdplane.engine.thread import EngineThread
from pdplane.engine.tiny import build_tiny
from pdplane.engine.untyped import parameters
from pdplane.errors import ConfigError, SessionLost
from pdplane.ids import Endpoint
from pdplane.workers.experts.remote import LinkOptions, RemoteExperts, RemoteOptions
from pdplane.workers.experts.store import FileStore, open_store
from pdplane.workers.experts.switch import ExpertCall, RemoteSwitch
from pdplane.workers.experts.tx1 import Tx1Limits, Tx1Token
from pdplane.workers.experts.worker import ExpertWorker, ExpertWorkerOptions
from tests.workers.raw_tx1 import TOKEN, RawWorker

MODELS = ["qwen3_moe", "qwen3_moe-q4", "mixtral", "mixtral-q4"]
PROMPT = [(7 * n) % 300 + 2 for n in range(50)]  # two chunks of sorted expert calls, then single tokens
STEP = 32
QUICK = RemoteOptions(LinkOptions(connect_s=2.0, reply_s=2.0), retry_s=60.0)


def worker_for(model: str, options: ExpertWorkerOptions | None = None, token: bytes = TOKEN) -> ExpertWorker:
    found = ExpertWorker(Endpoint("127.0.0.1", 0), lambda: open_store(model), Tx1Token(token), options)
    found.start()
    return found


class Trial:
    """A model on its own MLX thread, run locally and with remote experts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread = EngineThread()
        self.thread.start()
        self.options = EngineOptions(name, prefill_step_size=STEP)

    def close(self) -> None:
        self.thread.close()

    def rows(self, model: Model, max_tokens: int = 5) -> list[np.ndarray]:
        found = single_process(model, PROMPT, max_tokens, self.options)
        return [token.row for token in found]

    def local(self) -> list[np.ndarray]:
        return self.thread.call(lambda: self.rows(load_model(self.name)))

    def remote(self, experts: RemoteExperts, during: Callable[[int], None] | None = None) -> list[np.ndarray]:
        """Rows with remote experts; `during(n)` is called before the n-th expert call."""

        def run() -> list[np.ndarray]:
            model = load_model(self.name, prepare=experts.attach)
            if during is not None:
                _interrupt(model, during)
            return self.rows(model)

        return self.thread.call(run)


class _Counting:
    """Calls `during` before each expert call."""

    def __init__(self, runner: RemoteExperts, during: Callable[[int], None], counter: Iterator[int]) -> None:
        self._runner, self._during, self._counter = runner, during, counter

    def run(self, call: ExpertCall) -> tuple[np.ndarray, str]:
        self._during(next(self._counter))
        return self._runner.run(call)


def _interrupt(model: Model, during: Callable[[int], None]) -> None:
    counter = iter(range(1000))
    for _, module in model.network.named_modules():
        if isinstance(module, RemoteSwitch):
            module._runner = _Counting(module._runner, during, counter)


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)


@pytest.fixture
def trial() -> Iterator[Trial]:
    found = Trial("tiny:qwen3_moe")
    yield found
    found.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_local_model(name: str, count: int) -> None:
    trial = Trial(f"tiny:{name}")
    workers = [worker_for(trial.name) for _ in range(count)]
    experts = RemoteExperts([worker.endpoint for worker in workers], Tx1Token(TOKEN), QUICK)
    try:
        assert equal(trial.remote(experts), trial.local())
        statistics = experts.statistics()
        assert statistics.lost == 0
        assert [worker.statistics().execs for worker in workers] == [t.execs for t in statistics.workers.values()]
        assert all(worker.statistics().pairs > 0 for worker in workers)
        assert statistics.pairs == sum(worker.statistics().pairs for worker in workers)
    finally:
        experts.close()
        for worker in workers:
            worker.close()
        trial.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-q4"])
def test_fewer_slots_than_experts_and_small_frames(name: str) -> None:
    trial = Trial(f"tiny:{name}")
    limits = Tx1Limits(payload_bytes=2048)  # eight pairs of 64 floats a frame
    worker = worker_for(trial.name, ExpertWorkerOptions(capacity=1, limits=limits))
    experts = RemoteExperts([worker.endpoint], Tx1Token(TOKEN), QUICK)
    try:
        assert equal(trial.remote(experts), trial.local())
        assert worker.statistics().evicted > 10
    finally:
        experts.close()
        worker.close()
        trial.close()


@pytest.mark.parametrize("grouped", [False, True])
def test_an_older_worker_is_asked_for_no_more_experts_than_it_holds(trial: Trial, *, grouped: bool) -> None:
    """It loses the connection over a call that names more; ours splits such a call itself."""
    worker = RawWorker(capacity=2)
    experts = RemoteExperts([Endpoint("127.0.0.1", worker.port)], Tx1Token(TOKEN), QUICK)
    width = 64
    rows = np.arange(3 * width, dtype=np.float16).reshape(3, width) / 256
    expert_of = np.array([0, 1, 1, 2, 3, 3, 3] if grouped else [3, 0, 2, 1, 3, 0, 2])
    row_of = np.array([0, 1, 2, 0, 1, 2, 0])
    call = ExpertCall(1, rows.view(np.uint16), "float16", row_of, expert_of, grouped=grouped)

    def run() -> np.ndarray:
        load_model(trial.name, prepare=experts.attach)
        return experts.run(call)[0]

    try:
        bits = trial.thread.call(run)
        assert np.array_equal(bits.view(np.float16), rows[row_of] * np.float16(2))
        asked = [{expert for _, expert in header["pairs"]} for header in worker.requests if "pairs" in header]
        assert asked == [{0, 1}, {2, 3}]
        assert experts.statistics().lost == 0
    finally:
        experts.close()
        worker.close()


def save(name: str, folder: Path, *, single: bool = False) -> None:
    """A tiny model as a model directory, its experts stacked or each by itself."""
    tiny = build_tiny(name)
    weights = dict(parameters(tiny.network))
    if single:
        for key in [key for key in weights if ".switch_mlp." in key]:
            stacked = weights.pop(key)
            for expert in range(stacked.shape[0]):
                weights[_single_name(key, expert)] = stacked[expert]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(dict(tiny.config)))


def _single_name(key: str, expert: int) -> str:
    block, _, rest = key.partition(".switch_mlp.")
    projection, part = rest.split(".")
    old = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"} if "block_sparse_moe" in key else {}
    return f"{block}.experts.{expert}.{old.get(projection, projection)}.{part}"


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral-q4", "mixtral"])
def test_experts_from_files(tmp_path: Path, name: str, single: bool) -> None:
    trial = Trial(f"tiny:{name}")
    trial.thread.call(lambda: save(name, tmp_path, single=single))
    store = FileStore(tmp_path)
    memory = trial.thread.call(lambda: open_store(trial.name))
    try:
        assert store.layers == memory.layers
        for layer in store.layers:
            for expert in (0, 3):
                wanted = trial.thread.call(lambda layer=layer, expert=expert: memory.read(layer, expert))
                found = store.read(layer, expert)
                assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    finally:
        store.close()
        trial.close()


def test_only_the_needed_experts_are_read(tmp_path: Path, trial: Trial) -> None:
    trial.thread.call(lambda: save("qwen3_moe", tmp_path))
    store = FileStore(tmp_path)
    reads: list[tuple[int, int]] = []
    original = store.read
    store.read = lambda layer, expert: reads.append((layer, expert)) or original(layer, expert)  # type: ignore[method-assign,func-returns-value,return-value]
    worker = ExpertWorker(Endpoint("127.0.0.1", 0), lambda: store, Tx1Token(TOKEN))
    worker.start()
    try:
        worker.thread.call(lambda: worker.bank.load(1, [2, 0]))
        assert reads == [(1, 2), (1, 0)]
    finally:
        worker.close()
        store.close()


@pytest.mark.parametrize("when", [0, 1, 5])
def test_a_killed_workers_experts_move_to_the_other(trial: Trial, when: int) -> None:
    workers = [worker_for(trial.name) for _ in range(2)]
    experts = RemoteExperts([worker.endpoint for worker in workers], Tx1Token(TOKEN), QUICK)
    try:
        found = trial.remote(experts, lambda call: workers[0].close() if call == when else None)
        assert equal(found, trial.local())
        assert experts.statistics().live == (str(workers[1].endpoint),)
        assert experts.statistics().lost == 1
    finally:
        experts.close()
        for worker in workers:
            worker.close()


def test_the_last_workers_death_fails_the_request_with_the_cause(trial: Trial) -> None:
    worker = worker_for(trial.name)
    experts = RemoteExperts([worker.endpoint], Tx1Token(TOKEN), QUICK)
    try:
        with pytest.raises(SessionLost, match="no expert worker is left") as lost:
            trial.remote(experts, lambda call: worker.close() if call == 3 else None)
        assert str(worker.endpoint) in str(lost.value)
    finally:
        experts.close()
        worker.close()


def test_experts_run_here_when_that_is_allowed(trial: Trial) -> None:
    worker = worker_for(trial.name)
    allowed = attrs.evolve(QUICK, local=True, local_capacity=2)
    experts = RemoteExperts([worker.endpoint], Tx1Token(TOKEN), allowed)
    try:
        found = trial.remote(experts, lambda call: worker.close() if call == 3 else None)
        assert equal(found, trial.local())
        assert experts.statistics().local_pairs > 0
    finally:
        experts.close()
        worker.close()


def test_a_restarted_worker_is_used_at_once(trial: Trial) -> None:
    workers = [worker_for(trial.name)]
    experts = RemoteExperts([workers[0].endpoint], Tx1Token(TOKEN), QUICK)

    def restart(call: int) -> None:
        if call == 3:
            workers[0].close()
            again = ExpertWorker(workers[0].endpoint, lambda: open_store(trial.name), Tx1Token(TOKEN))
            again.start()
            workers.append(again)

    try:
        assert equal(trial.remote(experts, restart), trial.local())
        assert experts.statistics().lost == 0
        assert workers[1].statistics().execs > 0
    finally:
        experts.close()
        for worker in workers:
            worker.close()


class Liar:
    """Passes a worker's connection on and changes its answers from the n-th expert reply on."""

    def __init__(self, worker: ExpertWorker, spoil: Callable[[bytes], bytes | None], after: int) -> None:
        self._worker, self._spoil, self._left = worker.endpoint, spoil, after
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._server.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads[:1]:
            thread.join()
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads[1:]:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection((self._worker.host, self._worker.port), 5)
            self._sockets += [near, far]
            for source, target, spoils in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pass, args=(source, target, spoils))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, spoils: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                found: bytes | None = data
                if spoils and b"exec_reply" in data:
                    self._left -= 1
                    found = self._spoil(data) if self._left < 0 else data
                if found is None:
                    continue  # the answer is never passed on: a stall
                target.sendall(found)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


SPOILS: dict[str, Callable[[bytes], bytes | None]] = {
    "a flipped bit of the results": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    "garbage": lambda data: b"\xff" * len(data),
    "a stall": lambda data: None,
    "half an answer": lambda data: data[: len(data) // 2],
    "the answer twice": lambda data: data + data,
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_worker_that_lies_or_stalls_never_gives_a_wrong_number(trial: Trial, name: str) -> None:
    workers = [worker_for(trial.name) for _ in range(2)]
    liar = Liar(workers[0], SPOILS[name], after=3)
    quick = attrs.evolve(QUICK, link=LinkOptions(connect_s=2.0, reply_s=0.3))
    experts = RemoteExperts([liar.endpoint, workers[1].endpoint], Tx1Token(TOKEN), quick)
    try:
        assert equal(trial.remote(experts), trial.local())
        assert experts.statistics().lost == 1
        assert experts.statistics().live == (str(workers[1].endpoint),)
    finally:
        experts.close()
        liar.close()
        for worker in workers:
            worker.close()


def test_what_a_worker_must_agree_on() -> None:
    trial = Trial("tiny:qwen3_moe")
    for model, token, cause in (
        ("tiny:qwen3_moe", b"another token of 32 bytes.......", "closed"),
        ("tiny:mixtral", TOKEN, "this worker has a mixtral"),
        ("tiny:qwen3_moe-q4", TOKEN, "other weights"),
    ):
        worker = worker_for(model, token=token)
        experts = RemoteExperts([worker.endpoint], Tx1Token(TOKEN), QUICK)
        with pytest.raises(SessionLost, match=cause):
            trial.remote(experts)
        experts.close()
        worker.close()
    trial.close()


def test_models_without_such_experts_are_refused() -> None:
    trial = Trial("tiny:llama")
    experts = RemoteExperts([Endpoint("127.0.0.1", 9)], Tx1Token(TOKEN))
    with pytest.raises(ConfigError, match="no experts"):
        trial.remote(experts)
    experts.close()
    trial.close()
    for workers in ([], [Endpoint("h", 1)] * 2):
        with pytest.raises(ConfigError, match="at least one"):
            RemoteExperts(workers, Tx1Token(TOKEN))


def test_moved_experts_are_never_read_here(tmp_path: Path) -> None:
    """The coordinator's own copy of the experts is full of NaN: nothing of it may reach the logits."""
    good, spoiled = tmp_path / "good", tmp_path / "spoiled"
    trial = Trial(str(good))
    good.mkdir()
    trial.thread.call(lambda: save("qwen3_moe", good))
    tokenizer = trial.thread.call(lambda: build_tiny("qwen3_moe")).tokenizer
    tokenizer._inner.save_pretrained(str(good))
    shutil.copytree(good, spoiled)
    _spoil_experts(spoiled / "model.safetensors")
    worker = worker_for(str(good))
    experts = RemoteExperts([worker.endpoint], Tx1Token(TOKEN), QUICK)
    try:
        wanted = trial.local()
        trial.name = str(spoiled)
        assert equal(trial.remote(experts), wanted)
        assert not equal(trial.local(), wanted)
    finally:
        experts.close()
        worker.close()
        trial.close()


def _spoil_experts(file: Path) -> None:
    data = bytearray(file.read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    for name, described in json.loads(data[8:body]).items():
        if "switch_mlp" in name:
            start, end = described["data_offsets"]
            data[body + start : body + end] = b"\xff" * (end - start)
    file.write_bytes(data)
