"""A model of hashes: its KV cache is a function of (token, position, layer), its tokens a function of the KV bytes.

One wrong byte in the pages that decode reads changes every token that decode computes, so comparing tokens checks
every byte of the transfer. Only numpy is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.layout import GroupSpec, Layout, Partition
from pdplane.kv.planning import FieldSpec, plan_layout

Bytes = npt.NDArray[np.uint8]

KV = GroupId("kv")
STATE = GroupId("state")
EOS = 0
FIRST_LETTER, LETTERS = 97, 26

_PRIME_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_PRIME_POSITION = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_CELL = np.uint64(0x165667B19E3779F9)


TOY_CONTEXT = 1 << 16


@attrs.frozen
class ToyOptions:
    """Sizes of the toy model and its cache.

    `eos_every`: about one token in so many is EOS (0: never, 1: always). `poison`: a prompt token that makes prefill
    raise; `sleep`: one at which its thread stands still for good. `tp_size` ranks share the `heads` evenly.
    `chunk_tokens` is the length of one prefill turn.
    """

    layers: int = 3
    heads: int = 2
    head_dim: int = 8
    block_tokens: int = 4
    num_lcm_blocks: int = 64
    blocks_per_parent: int = 2
    with_state: bool = False
    state_bytes: int = 48
    chunk_tokens: int = 8
    eos_every: int = 0
    poison: int | None = None
    sleep: int | None = None
    seed: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    context_length: int = TOY_CONTEXT
    concurrency: int = 32

    def __attrs_post_init__(self) -> None:
        if self.tp_size < 1 or self.heads % self.tp_size or not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"{self.heads} heads do not divide over rank {self.tp_rank} of {self.tp_size}")

    @property
    def local_heads(self) -> slice:
        """The heads that this rank holds."""
        share = self.heads // self.tp_size
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)


def toy_layout(options: ToyOptions) -> Layout:
    """Return a layout of one plane, with pages [heads, block_tokens, head_dim] in the history group `kv`.

    The group `state` comes with it if the spec has a state.
    """
    share = options.heads // options.tp_size
    shape = (share, options.block_tokens, options.head_dim)
    specs = [GroupSpec(KV, "full_history", options.block_tokens, 1, None, "history", "full_suffix")]
    fields = [
        FieldSpec(KV, _field(layer, suffix), "arena", shape, "uint8")
        for layer in range(options.layers)
        for suffix in ("k", "v")
    ]
    partitions = [(field.field_id, Partition(0, options.heads)) for field in fields]
    if options.with_state:
        specs.append(
            GroupSpec(STATE, "full_history", None, None, None, "state", "latest_snapshot", options.block_tokens)
        )
        fields.append(FieldSpec(STATE, FieldId("layer.0.state"), "arena", (options.state_bytes,), "uint8"))
    return plan_layout(
        specs,
        fields,
        num_lcm_blocks=options.num_lcm_blocks,
        prefix_granularity=options.block_tokens,
        packing={KV: options.blocks_per_parent, STATE: 1},
        partitions=partitions,
    )


def _field(layer: int, suffix: str) -> FieldId:
    return FieldId(f"layer.{layer}.{suffix}")


def kv_bytes(options: ToyOptions, tokens: Sequence[int], start: int, layer: int, suffix: str) -> Bytes:
    """Return all heads' bytes of some tokens from position `start` on, shape [heads, len(tokens), head_dim]."""
    ids = np.asarray(tokens, dtype=np.uint64).reshape(1, -1, 1)
    positions = np.arange(start, start + len(tokens), dtype=np.uint64).reshape(1, -1, 1)
    cells = np.arange(options.heads * options.head_dim, dtype=np.uint64).reshape(options.heads, 1, options.head_dim)
    salt = np.uint64(1 + options.seed * 4096 + layer * 2 + (suffix == "v"))
    mixed = (ids + salt) * _PRIME_TOKEN + positions * _PRIME_POSITION + (cells + salt) * _PRIME_CELL
    mixed ^= mixed >> np.uint64(29)
    mixed *= _PRIME_TOKEN
    result: Bytes = (mixed >> np.uint64(56)).astype(np.uint8)
    return result


def state_bytes(options: ToyOptions, tokens: Sequence[int]) -> Bytes:
    """Return the state after all tokens of the prompt, shape [state_bytes]."""
    digest = hashlib.shake_128(f"{options.seed}:".encode() + np.asarray(tokens, dtype="<i8").tobytes())
    return np.frombuffer(digest.digest(options.state_bytes), dtype=np.uint8)


def page(arena: Arena, layout: Layout, field_id: FieldId, block: int) -> Bytes:
    """Return a writable view of one block's page, in the field's shape."""
    field = layout.field(field_id)
    offset = int(layout.page_offsets(field_id, np.array([block], dtype=np.uint64))[0])
    return arena.bytes[offset : offset + field.payload_bytes].reshape(field.shape)


def write_kv(
    options: ToyOptions, arena: Arena, layout: Layout, blocks: Sequence[int], tokens: Sequence[int], start: int
) -> None:
    """Put the local heads of some tokens into the pages of the prompt's blocks (slot order)."""
    for layer in range(options.layers):
        for suffix in ("k", "v"):
            rows = kv_bytes(options, tokens, start, layer, suffix)[options.local_heads]
            done = 0
            while done < len(tokens):  # a block at a time
                slot, row = divmod(start + done, options.block_tokens)
                count = min(options.block_tokens - row, len(tokens) - done)
                found = page(arena, layout, _field(layer, suffix), blocks[slot])
                found[:, row : row + count] = rows[:, done : done + count]
                done += count


def write_state(
    options: ToyOptions, arena: Arena, layout: Layout, blocks: Mapping[GroupId, Sequence[int]], tokens: Sequence[int]
) -> None:
    """Put the state after the whole prompt into its one block, if the model has a state."""
    if options.with_state:
        page(arena, layout, FieldId("layer.0.state"), blocks[STATE][-1])[:] = state_bytes(options, tokens)


def digest_of_arena(
    options: ToyOptions, arena: Arena, layout: Layout, blocks: Mapping[GroupId, Sequence[int]], tokens: Sequence[int]
) -> bytes:
    """Return the prompt's digest from the arena's bytes; other ranks' heads are computed, since they are not there."""
    found = hashlib.blake2b()
    slots = -(-len(tokens) // options.block_tokens)
    for layer in range(options.layers):
        for suffix in ("k", "v"):
            whole = kv_bytes(options, tokens, 0, layer, suffix)
            pages = [page(arena, layout, _field(layer, suffix), block) for block in blocks[KV][:slots]]
            whole[options.local_heads] = np.concatenate(pages, axis=1)[:, : len(tokens)]
            found.update(whole.tobytes())
    if options.with_state:
        found.update(page(arena, layout, FieldId("layer.0.state"), blocks[STATE][-1]).tobytes())
    return found.digest()


def digest_of_prompt(options: ToyOptions, tokens: Sequence[int]) -> bytes:
    """Return the digest that right bytes give."""
    found = hashlib.blake2b()
    for layer in range(options.layers):
        for suffix in ("k", "v"):
            found.update(kv_bytes(options, tokens, 0, layer, suffix).tobytes())
    if options.with_state:
        found.update(state_bytes(options, tokens).tobytes())
    return found.digest()


def next_token(options: ToyOptions, digest: bytes, generated: Sequence[int]) -> tuple[int, float]:
    """Return the next token and its logprob after `generated` tokens of an answer."""
    drawn = hashlib.blake2b(digest + np.asarray(generated, dtype="<i8").tobytes(), digest_size=12).digest()
    choice, weight = int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little")
    logprob = -(weight % 8192) / 1024  # exact in a float32, so that it survives any wire
    if options.eos_every and choice % options.eos_every == 0:
        return EOS, logprob
    return FIRST_LETTER + choice // 64 % LETTERS, logprob


def toy_answer(
    options: ToyOptions, tokens: Sequence[int], max_tokens: int, stop_ids: frozenset[int] = frozenset({EOS})
) -> list[tuple[int, float]]:
    """Return what one process that computes everything answers: (token, logprob) pairs, the stop token included."""
    digest, answer = digest_of_prompt(options, tokens), list[tuple[int, float]]()
    while len(answer) < max_tokens:
        answer.append(next_token(options, digest, [token for token, _logprob in answer]))
        if answer[-1][0] in stop_ids:
            break
    return answer
