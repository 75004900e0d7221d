"""Folders that cannot be served end in one line that names the file or the flag; limits are the model's own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from pdplane.cli.flags import add_model_flags, engine_options
from pdplane.engine.engine import MlxEngine
from pdplane.engine.model import Model, load_model
from pdplane.engine.options import EngineOptions
from pdplane.errors import ConfigError
from tests.engine.files import save_directory
from tests.engine.pair import options


def _write(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()))


def void(_result: object) -> None:
    """Take a result that nobody needs."""


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: "),
    "a config that is no JSON": (_write("config.json", "{"), "config.json: "),
    "a config that is a list": (_write("config.json", "[]"), "config.json: "),
    "a config that is no text": (_write("config.json", b"\xff\xfe\x00"), "config.json: "),
    "an empty config": (_write("config.json", "{}"), "config.json: .*model_type"),
    "no such architecture": (_config(model_type="nothing"), "config.json: Model type nothing not supported"),
    "an architecture that is a path": (_config(model_type="../os"), "config.json: "),
    "an architecture that is a number": (_config(model_type=7), "config.json: "),
    "its own program": (_config(model_file="x.py"), "custom module"),
    "a missing value": (_write("config.json", '{"model_type": "llama"}'), "config.json: .*hidden_size"),
    "heads that do not divide": (_config(num_attention_heads=3), "."),
    "a text for a number": (_config(hidden_size="64"), "."),
    "nothing for a number": (_config(num_hidden_layers=None), "."),
    "layers below nothing": (_config(num_hidden_layers=-1), "."),
    "a rope scaling of no kind": (_config(rope_scaling={"rope_type": "x", "factor": 2}), "."),
    "a rope scaling without a factor": (_config(rope_scaling={"rope_type": "yarn"}), "."),
    "a quantisation of no kind": (_config(quantization=[4]), "."),
    "a foreign quantisation": (_config(quantization_config={"quant_method": "compressed-tensors"}), "safetensors: "),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors: No safetensors found"),
    "weights cut off": (_cut, "safetensors: "),
    "weights that are none": (_write("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      "), "safetensors: Missing"),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")] and None,
        "tokenizer.*json: ",
    ),
    "a tokenizer that is no JSON": (_write("tokenizer.json", "{"), "tokenizer.*json: "),
    "a tokenizer that is another": (_write("tokenizer.json", "{}"), "tokenizer.*json: "),
    "a tokenizer config that is no JSON": (_write("tokenizer_config.json", "["), "tokenizer.*json: "),
    "a template that mlx-lm has not": (
        _write("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template_type": "x"}'),
        "tokenizer.*json: ",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))
    save_directory(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_folder_is_one_line(change: str, folder: Path) -> None:
    damage, reason = BROKEN[change]
    damage(folder)
    with pytest.raises(ConfigError, match=reason) as caught:
        MlxEngine(options(str(folder))).start()
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_command_ends_with_one_line_and_the_trace_at_debug(folder: Path) -> None:
    _config(rope_scaling={"rope_type": "x", "factor": 2})(folder)
    command = [sys.executable, "-m", "pdplane.cli.main", "prefill", "--port", "0", "--bootstrap-port", "0"]
    done = subprocess.run(
        [*command, "--model", str(folder), "--log-level", "debug"], capture_output=True, text=True, check=False
    )
    before, _, last = done.stderr.rstrip().rpartition("\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert last.startswith(f"pdplane prefill: cannot load model '{folder}' from ")
    assert "Traceback" in before
    assert " DEBUG " in before[: before.index("Traceback")].splitlines()[-1]


# ---- Limits


def _model(**config: object) -> Model:
    return attrs.evolve(load_model("tiny:llama"), config=config)


_YARN = {"rope_type": "yarn", "factor": 4.0}

CONTEXTS: Mapping[str, tuple[dict[str, Any], int | None]] = {
    "nothing told": ({}, None),
    "plain": ({"max_position_embeddings": 64}, 64),
    "another name": ({"n_positions": 64}, 64),
    "inside": ({"text_config": {"max_position_embeddings": 64}}, 64),
    "yarn": ({"max_position_embeddings": 64, "rope_scaling": _YARN}, 256),
    "yarn by its older name": ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4}}, 256),
    "yarn, told at its end": (
        {"max_position_embeddings": 256, "rope_scaling": _YARN | {"original_max_position_embeddings": 64}},
        256,
    ),
    "linear": ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.5}}, 160),
    "newer configs": ({"max_position_embeddings": 64, "rope_parameters": _YARN}, 256),
    "newer configs, by layer": ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": _YARN}}, 256),
    "llama3": ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 64),
    "longrope": ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "longrope", "factor": 8}}, 64),
    "gemma3": (
        {"model_type": "gemma3_text", "max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 8}},
        64,
    ),
}


def test_the_context_is_the_one_after_rope_scaling() -> None:
    assert {name: _model(**config).context_length for name, (config, _) in CONTEXTS.items()} == {
        name: length for name, (_, length) in CONTEXTS.items()
    }


def test_a_flag_takes_another_context(folder: Path) -> None:
    _config(max_position_embeddings=64)(folder)
    for asked, most in ((None, 64), (100, 100), (32, 32)):
        with MlxEngine(attrs.evolve(options(str(folder)), context_length=asked)) as engine:
            engine.check_prompt_len(most)
            assert engine.facts()["context_length"] == most
            with pytest.raises(ConfigError, match=f"the model's context {most}"):
                engine.check_prompt_len(most + 1)


def _typed(*words: str) -> EngineOptions:
    """Return what the flags of a command line say."""
    import argparse

    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return attrs.evolve(engine_options(parser.parse_args(words)), exact=True)


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "tiny:llama", "--arena-bytes", "1000"),
        ("--model", "tiny:gemma3", "--arena-bytes", "1000"),
        ("--model", "tiny:llama", "--arena-bytes", "1000", "--page-layout", "nhd", "--block-tokens", "64"),
        ("--model", "tiny:llama", "--arena-bytes", "1000", "--kv-bits", "8"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_the_size_that_an_error_names_works(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        MlxEngine(_typed(*words)).start()
    found = re.search(r"at least (\d+) bytes \((--[a-z-]+)\)", str(caught.value))
    assert found
    with MlxEngine(_typed(*words, found[2], found[1])) as engine:
        engine.check_prompt_len(1)
        longest = engine.options.block_tokens
        with pytest.raises(ConfigError, match=r"--arena-bytes \d+") as refused:
            engine.check_prompt_len(longest * 40)
    larger = re.search(r"--arena-bytes (\d+)", str(refused.value))
    assert larger
    with MlxEngine(_typed(*words, "--arena-bytes", larger[1])) as engine:
        engine.check_prompt_len(longest * 40)
