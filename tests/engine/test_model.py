"""Models by name: tiny ones, directories, GGUF files; and the fingerprints that tell them apart."""

from __future__ import annotations

from pathlib import Path

import attrs
import mlx.core as mx
import pytest

from pdplane.engine.fingerprint import fingerprint
from pdplane.engine.model import Model, load_model
from pdplane.engine.options import EngineOptions
from pdplane.engine.reference import single_process
from pdplane.engine.tiny import FAMILIES, build_tiny
from pdplane.engine.untyped import parameters
from pdplane.errors import ConfigError
from tests.engine.files import save_directory, save_gguf
from tests.engine.pair import options

PROMPT = [5, 9, 200, 31]


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(model: Model) -> list[tuple[int, float]]:
    return [(t.id, t.logprob) for t in single_process(model, PROMPT, 4, options(model.name))]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tiny_models_depend_on_the_seed_only(family: str) -> None:
    mx.random.seed(1)
    first = dict(parameters(build_tiny(family, seed=3).network))
    mx.random.seed(2)
    again = dict(parameters(build_tiny(family, seed=3).network))
    other = dict(parameters(build_tiny(family, seed=4).network))
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not all(mx.array_equal(first[name], other[name]) for name in first)


def test_a_directory(tmp_path: Path) -> None:
    tiny = save_directory(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert answer(loaded) == answer(tiny)
    assert loaded.context_length == 4096
    assert loaded.vocab_size == 320
    assert loaded.tokenizer.eos_ids == {1}
    assert loaded.tokenizer.encode("the fox") == tiny.tokenizer.encode("the fox")


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache_folder: Path) -> None:
    tiny = save_gguf(tmp_path / "tiny.gguf")
    told: list[str] = []
    loaded = load_model(str(tmp_path / "tiny.gguf"), progress=lambda name, _done, _total: told.append(name))
    assert "convert weights" in told
    assert answer(loaded) == answer(tiny)
    assert loaded.tokenizer.encode("the quick fox é") == tiny.tokenizer.encode("the quick fox é")
    assert loaded.tokenizer.apply_chat([{"role": "user", "content": "x"}])
    (folder,) = [path for path in cache_folder.iterdir() if path.is_dir()]
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    told.clear()
    assert answer(load_model(str(tmp_path / "tiny.gguf"), progress=lambda *facts: told.append(facts[0]))) == answer(
        tiny
    )
    assert "convert weights" not in told
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiny:llama-q2", "unknown tiny weights 'q2'; known: f32, bf16, q4"),
        ("tiny:deepseek_v3-q4", "cannot be quantised"),
        ("no-such-model", "is no directory"),
        ("/no/such/folder", "is no directory"),
        ("/no/such/file.gguf", "no such file: /no/such/file.gguf"),
        ("a/b/c", "is no directory"),
    ],
)
def test_names_that_mean_nothing(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(name)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot download model 'nobody/nothing' from the hub"):
        load_model("nobody/nothing")


def test_damaged_files(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"bad\.gguf"):
        load_model(str(tmp_path / "bad.gguf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot load model"):
        load_model(str(tmp_path / "empty"))
    assert not [path for path in cache_folder.iterdir() if path.is_dir()]


def test_other_architectures_are_refused(tmp_path: Path, cache_folder: Path) -> None:
    mx.save_gguf(str(tmp_path / "other.gguf"), {"a": mx.zeros((2, 2))}, {"general.architecture": "whisper"})
    with pytest.raises(ConfigError, match="'whisper' model; only Llama-family"):
        load_model(str(tmp_path / "other.gguf"))
    assert cache_folder.is_dir()


def test_fingerprints_name_what_differs(tmp_path: Path) -> None:
    def facts(model: Model, **changes: object) -> dict[str, str]:
        return dict(fingerprint(model, attrs.evolve(EngineOptions("x"), **changes)).required)

    tiny = load_model("tiny:llama")
    base = facts(tiny)
    assert base == facts(load_model("tiny:llama"))
    assert base["dtype"] == "float32"

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name, text in base.items() if other[name] != text}

    assert differing(facts(tiny, prefill_step_size=512)) == {"prefill_step_size"}
    assert differing(facts(tiny, kv_bits=8)) == {"kv_bits", "kv_group_size"}
    assert differing(facts(load_model("tiny:llama", seed=1))) == {"config", "weights"}
    assert differing(facts(load_model("tiny:llama-bf16"))) == {"config", "weights", "dtype"}
    save_directory(tmp_path / "one")
    save_directory(tmp_path / "two")
    assert facts(load_model(str(tmp_path / "one"))) == facts(load_model(str(tmp_path / "two")))
    assert dict(fingerprint(tiny, EngineOptions("x")).advisory).keys() == {"backend", "blas", "tp_size"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"prefill_step_size": -1}, "prefill_step_size must be at least 1"),
        ({"kv_bits": 5}, "kv_bits must be one of 2, 3, 4, 6, 8, not 5"),
        ({"kv_group_size": 48}, "kv_group_size must be one of 32, 64, 128, not 48"),
    ],
)
def test_options_that_cannot_work(change: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        attrs.evolve(EngineOptions("x"), **change)
