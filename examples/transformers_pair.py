"""Hugging Face transformers computes a prompt in one process, and another process makes the tokens.

    python examples/transformers_pair.py [MODEL]        needs torch and transformers; without a model a tiny random one

The cache of transformers grows with each token, and pages have a fixed place: the prompt's keys and values are copied
into an arena by blocks of 16 tokens, and on the other side out of it.
"""

import multiprocessing
import multiprocessing.connection
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from pdplane import (
    Arena,
    DecodeConfig,
    DecodePlane,
    Endpoint,
    FieldId,
    FieldSpec,
    GroupId,
    GroupSpec,
    Layout,
    Pool,
    PrefillConfig,
    PrefillPlane,
    blocks_needed,
    build_manifest,
    hash_prompt,
    new_room,
    plan_layout,
)

KV, BLOCK, BLOCKS, TOKENS = GroupId("kv"), 16, 64, 16
PROMPT = [(position * 7919) % 900 + 3 for position in range(50)]


def load(model: str) -> Any:
    """Load it for one thread: with another number of threads sums may round otherwise."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def random_model(folder: Path) -> str:
    """Write a small Llama with random weights; return its folder."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    transformers.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_arena(model: Any) -> tuple[torch.Tensor, Layout]:
    """Return [layer, k or v, block, head, token, width], and the layout that says so: block 0 is the null block."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page = (config.num_key_value_heads, BLOCK, width)
    memory = torch.zeros(config.num_hidden_layers, 2, BLOCKS + 1, *page)
    names = [FieldId(f"layer.{layer}.{part}") for layer in range(config.num_hidden_layers) for part in "kv"]
    layout = plan_layout(
        [GroupSpec(KV, "full_history", BLOCK, 1, transfer_policy="full_suffix")],
        [FieldSpec(KV, name, name, page, "float32") for name in names],
        num_lcm_blocks=BLOCKS,
        prefix_granularity=BLOCK,
    )
    return memory, layout


def run_prefill(model_name: str, room: int, to_parent: multiprocessing.connection.Connection) -> None:
    model = load(model_name)
    memory, layout = make_arena(model)
    config = PrefillConfig(bootstrap_port=0)
    with PrefillPlane(config, layout=layout, arena=Arena(memory)) as plane, torch.inference_mode():
        to_parent.send(plane.rendezvous)
        work = plane.open(room, prompt_len=len(PROMPT), prompt_hash=hash_prompt(PROMPT))
        found = model(torch.tensor([PROMPT]), use_cache=True)
        blocks = Pool(layout).allocate(blocks_needed(layout, len(PROMPT)))
        for layer, cached in enumerate(found.past_key_values.layers):
            for part, tensor in enumerate((cached.keys, cached.values)):
                for number, block in enumerate(blocks[KV]):
                    tokens = tensor[0, :, number * BLOCK : (number + 1) * BLOCK]
                    memory[layer, part, block, :, : tokens.shape[1]] = tokens
        work.wait_window(60)
        work.push(blocks)
        work.finish(first_token=int(found.logits[0, -1].argmax()))
        work.released.result(60)


def run_decode(model: Any, rendezvous: Endpoint, room: int) -> list[int]:
    """Return the tokens that follow the prompt, of which this process computes nothing."""
    memory, layout = make_arena(model)
    with DecodePlane(DecodeConfig(), layout=layout, arena=Arena(memory)) as plane, torch.inference_mode():
        blocks = Pool(layout).allocate(blocks_needed(layout, len(PROMPT)))
        manifest = build_manifest(layout, blocks, prefix_len=0, prompt_len=len(PROMPT))
        waiting = plane.open(room, prefill=rendezvous, manifest=manifest, prompt_hash=hash_prompt(PROMPT))
        first = waiting.wait(60).first_token
        cache = transformers.DynamicCache(config=model.config)
        for layer in range(len(memory)):
            pages = memory[layer][:, list(blocks[KV])]  # [k or v, block, head, token, width]
            keys, values = pages.transpose(1, 2).flatten(2, 3)[:, None, :, : len(PROMPT)].contiguous()
            cache.update(keys, values, layer)
        assert first is not None  # prefill said one
        tokens = [first]
        while len(tokens) < TOKENS:
            found = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            tokens.append(int(found.logits[0, -1].argmax()))
        return tokens


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        name = sys.argv[1] if len(sys.argv) > 1 else random_model(Path(scratch))
        model, room = load(name), new_room()
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        prefill = spawning.Process(target=run_prefill, args=(name, room, theirs), daemon=True)
        prefill.start()
        pair = run_decode(model, ours.recv(), room)
        prefill.join()
        alone = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        print(f"two processes: {pair}")
        print(f"equal to one:  {pair == alone[0, len(PROMPT) :].tolist()}")


if __name__ == "__main__":
    main()
