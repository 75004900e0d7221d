"""The hash of a model's weights: what is another model, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers.processors import TemplateProcessing

from pdplane.engine.fingerprint import PIECE_BYTES, SAMPLES, fingerprint, weights_hash
from pdplane.engine.model import load_model
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import parameters
from pdplane.errors import ConfigError
from tests.engine.files import save_directory


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(folder: Path, **files: dict[str, mx.array]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        mx.save_safetensors(str(folder / f"{name}.safetensors"), tensors)
    return folder


def test_two_fine_tunes_of_one_shape_are_two_models(tmp_path: Path) -> None:
    first = save_directory(tmp_path / "first")
    weights = dict(parameters(first.network))
    save_directory(tmp_path / "second")
    save(tmp_path / "second", model={name: weight * 1.01 for name, weight in weights.items()})
    models = [load_model(str(tmp_path / name)) for name in ("first", "second")]
    facts = [dict(fingerprint(model, EngineOptions("x")).required) for model in models]
    assert {name for name, text in facts[0].items() if facts[1][name] != text} == {"weights"}


def test_every_tensor_takes_part_and_shards_do_not(tmp_path: Path) -> None:
    tensors = {"a": mx.arange(8), "b": mx.arange(SAMPLES * PIECE_BYTES, dtype=mx.uint16), "c": mx.ones((3, 4))}
    whole = weights_hash(save(tmp_path / "whole", model=tensors))
    shards = {"model-00001-of-00002": {"c": tensors["c"]}, "model-00002-of-00002": {n: tensors[n] for n in "ab"}}
    assert weights_hash(save(tmp_path / "shards", **shards)) == whole
    others = {
        "small": tensors | {"a": tensors["a"] + 1},
        "large": tensors | {"b": tensors["b"] + 1},
        "last": tensors | {"b": mx.concatenate([tensors["b"][:-1], tensors["b"][:1] + 7])},
        "shape": tensors | {"c": tensors["c"].reshape(4, 3)},
        "dtype": tensors | {"a": tensors["a"].view(mx.uint32)},
        "name": {"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]},
        "fewer": {"a": tensors["a"], "b": tensors["b"]},
    }
    found = {name: weights_hash(save(tmp_path / name, model=other)) for name, other in others.items()}
    assert len({whole, *found.values()}) == 1 + len(others)


def test_the_hash_is_kept_while_the_files_stay(tmp_path: Path, cache_folder: Path) -> None:
    folder = save(tmp_path / "one", model={"a": mx.arange(8)})
    first = weights_hash(folder)
    (kept,) = (cache_folder / "weights").iterdir()
    kept.write_text(kept.read_text().replace(first, "kept"))
    assert weights_hash(folder) == "kept"
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert weights_hash(folder) == first
    kept.write_text("[")
    assert weights_hash(folder) == first


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\2" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": {}}'])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no safetensors file"):
        weights_hash(tmp_path)


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = load_model("tiny:llama").tokenizer
    bos, number = tokenizer._inner.bos_token, tokenizer._inner.bos_token_id
    rule = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    tokenizer._inner.backend_tokenizer.post_processor = rule
    assert tokenizer.encode("hello")[0] == number
    assert tokenizer.encode(f"{bos}hello") == tokenizer.encode("hello")


def test_tokenizers_and_templates_are_told_apart(tmp_path: Path) -> None:
    save_directory(tmp_path / "one")
    first = load_model(str(tmp_path / "one"))
    template = str(first.tokenizer._inner.chat_template)
    (tmp_path / "one" / "chat_template.jinja").write_text(template + "\n{# another #}")
    second = load_model(str(tmp_path / "one"))
    facts = [dict(fingerprint(model, EngineOptions("x")).required) for model in (first, second)]
    assert {name for name, text in facts[0].items() if facts[1][name] != text} == {"tokenizer"}
