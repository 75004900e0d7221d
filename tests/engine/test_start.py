"""What an engine refuses to start with, and the layout that it publishes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import attrs
import numpy as np
import pytest

from pdplane.engine.engine import MlxEngine
from pdplane.engine.layout import KV, STATE
from pdplane.engine.options import EngineOptions
from pdplane.errors import ConfigError
from pdplane.wire import decode_layout, encode_layout
from tests.engine.files import save_gguf
from tests.engine.pair import BLOCK_TOKENS, options


def test_the_layout_of_full_layers() -> None:
    with MlxEngine(options("tiny:llama")) as engine:
        layout = engine.layout
        assert [spec.group_id for spec in layout.group_specs] == [KV]
        assert layout.prefix_granularity == BLOCK_TOKENS
        assert {field.field_id: (field.shape, field.dtype) for field in layout.fields} == {
            f"layer.{n}.{name}": ((2, BLOCK_TOKENS, 64), "float32") for n in range(2) for name in "kv"
        }
        assert layout.steps == (("layer.0.k", "layer.0.v"), ("layer.1.k", "layer.1.v"))
        assert engine.blocks_needed(BLOCK_TOKENS) == {KV: 1}
        assert engine.blocks_needed(BLOCK_TOKENS + 1) == {KV: 2}
        assert engine.arena.nbytes == layout.arena_bytes <= engine.options.arena_bytes
        assert decode_layout(encode_layout(layout)) == layout


def test_the_layout_of_sliding_layers() -> None:
    with MlxEngine(options("tiny:gemma3")) as engine:
        fields = {field.field_id: field for field in engine.layout.fields}
        assert [spec.group_id for spec in engine.layout.group_specs] == [KV, STATE]
        assert fields["layer.0.ring_k"].shape == (1, 2, 32, 16)
        assert (fields["layer.0.ring"].shape, fields["layer.0.ring"].dtype) == ((3,), "int64")
        assert fields["layer.1.k"].group_id == KV
        assert engine.blocks_needed(100) == {KV: 13, STATE: 1}


def test_quantised_words_travel_as_int32() -> None:
    with MlxEngine(options("tiny:llama", kv_bits=4)) as engine:
        fields = {field.field_id: field for field in engine.layout.fields if field.field_id.startswith("layer.0.k")}
        assert {name: (field.shape, field.dtype) for name, field in fields.items()} == {
            "layer.0.k_packed": ((2, BLOCK_TOKENS, 8), "int32"),
            "layer.0.k_scales": ((2, BLOCK_TOKENS, 1), "float32"),
            "layer.0.k_biases": ((2, BLOCK_TOKENS, 1), "float32"),
        }


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (options("tiny:llama", arena_bytes=1000), "arena of 1000 bytes is too small .* at least 32768 bytes"),
        (options("tiny:gemma3", kv_bits=8), "layer 0 keeps a RotatingKVCache, which cannot be quantised"),
        (
            options("tiny:qwen3", kv_bits=8),
            "cannot run with --kv-bits 8 --kv-group-size 64: .*divisible by the quantization group",
        ),
        (options("tiny:mixtral-bf16"), "cannot run: .*float32"),
    ],
    ids=["arena", "ring", "group size", "dtype"],
)
def test_what_cannot_start(wish: EngineOptions, reason: str) -> None:
    engine = MlxEngine(wish)
    with pytest.raises(ConfigError, match=reason):
        engine.start()


def test_closing_ends_a_start_at_its_next_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))
    save_gguf(tmp_path / "tiny.gguf")
    engine = MlxEngine(options(str(tmp_path / "tiny.gguf")))
    begun = threading.Event()

    def progress(_name: str, _done: int, _total: int) -> None:
        begun.set()
        while not engine.thread.closing:
            begun.wait(0.001)

    def close() -> None:
        assert begun.wait(60)
        engine.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(CancelledError, match="the engine closes"):
        engine.start(progress)
    closer.join(60)


def test_the_arena_outlives_the_engine() -> None:
    engine = MlxEngine(options("tiny:llama"))
    engine.start()
    arena = engine.arena
    engine.close()
    del engine
    arena.bytes[:] = 3
    assert int(np.count_nonzero(arena.bytes == 3)) == arena.nbytes


def test_block_sizes_change_only_the_history() -> None:
    with MlxEngine(attrs.evolve(options("tiny:gemma3"), block_tokens=32)) as engine:
        shapes = {field.field_id: field.shape for field in engine.layout.fields}
        assert shapes["layer.1.k"] == (2, 32, 16)
        assert shapes["layer.0.ring_k"] == (1, 2, 32, 16)


def test_importing_the_package_loads_no_mlx() -> None:
    code = (
        "import json, sys, pdplane.engine, pdplane.engine.options;"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_process_with_an_engine_exits_cleanly() -> None:
    code = (
        "from pdplane.engine.engine import MlxEngine\nfrom pdplane.engine.options import EngineOptions\n"
        "options = EngineOptions('tiny:llama', arena_bytes=1 << 20)\n"
        "with MlxEngine(options) as engine: print(engine.layout.num_lcm_blocks)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
