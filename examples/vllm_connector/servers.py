"""Start vLLM servers on this machine, ask them, and stop them: what check.py and measure.py have in common."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
START_S, ANSWER_S = 900, 120  # on a machine that others use too


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def tiny_llama(folder: Path, tokenizer: Path) -> Path:
    """Write a random Llama of two layers with the tokenizer of another model; return its folder."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.3,  # the usual 0.02 makes logits that are nearly equal
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


class Server:
    """One server of vLLM in a session of its own, with its log in a file."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.log = Path(tempfile.mkdtemp(prefix="pdplane-vllm-")) / "log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model"]
        command += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "16"]
        command += ["--enforce-eager", *arguments]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        settings = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=settings | environment, start_new_session=True
            )

    def wait(self) -> Self:
        """Return when the server answers. Raises RuntimeError with the end of its log."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.url("/health"), timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-4000:]}")

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def complete(self, prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the answer of /v1/completions, greedy, with token ids and logprobs; of an error its JSON."""
        body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 1} | more
        request = urllib.request.Request(
            self.url("/v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return found

    def processes(self) -> list[int]:
        """Return the ids of the server's processes: those of its session."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session == self._process.pid:
                found.append(int(path.name))
        return found

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of its processes so far."""
        ticks = 0
        for process in self.processes():
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End every process of the server at once, as a crash of its machine would."""
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def pdplane(role: str, **settings: Any) -> dict[str, Any]:
    """Return what `--kv-transfer-config` says for our connector."""
    return {
        "kv_connector": "PdplaneConnector",
        "kv_connector_module_path": "pdplane_connector",
        "kv_role": role,
        "kv_connector_extra_config": settings,
    }
