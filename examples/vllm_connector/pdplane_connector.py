"""A KV connector for vLLM: a prefill server pushes its blocks into a decode server's own KV cache, by pdplane.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdplaneConnector",
        "kv_connector_module_path": "pdplane_connector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"bootstrap_port": 8998}}'

Decode says "kv_consumer". The extra configuration are settings of PrefillConfig or DecodeConfig by their names, with
`secret_file` for the secret. Both requests of a pair carry `kv_transfer_params` and may go out at the same time:
{"do_remote_decode": true, "room": N} to prefill, which makes one token, and {"do_remote_prefill": true, "room": N,
"prefill": "host:port"} to decode. README.md has the rest.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from vllm.version import __version__ as vllm_version

KNOWN = ("0.32.",)  # the interface of connectors changes between minor versions, without notice
if not vllm_version.startswith(KNOWN):
    raise ImportError(f"pdplane_connector knows vLLM {KNOWN[-1]}x, this is {vllm_version}: run its check, extend KNOWN")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: E402

from pdplane import (  # noqa: E402
    Arena,
    Cause,
    DecodeConfig,
    DecodePlane,
    DecodeRoom,
    Endpoint,
    FieldId,
    FieldSpec,
    Fingerprint,
    GroupId,
    GroupSpec,
    Layout,
    Partition,
    PdplaneError,
    Plane,
    PrefillConfig,
    PrefillPlane,
    PrefillRoom,
    Secret,
    Why,
    build_manifest,
    hash_prompt,
    plan_layout,
)

logger = logging.getLogger("vllm.pdplane")
GROUP = GroupId("kv")
IDLE_S = 0.002  # vLLM repeats empty steps without a pause while requests wait for us; a room's news ends the wait


# ---- vLLM's cache as an arena


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError that names what this connector does not move."""
    if vllm_config.kv_transfer_config.kv_role not in ("kv_producer", "kv_consumer"):
        raise ValueError("pdplane: kv_role is kv_producer on prefill and kv_consumer on decode")
    for name in ("pipeline", "data", "decode_context", "prefill_context"):
        if getattr(vllm_config.parallel_config, f"{name}_parallel_size", 1) != 1:
            raise ValueError(f"pdplane: {name}_parallel_size must be 1; tensor parallelism is supported")
    if vllm_config.speculative_config is not None:
        raise ValueError("pdplane: speculative decoding is not supported, the draft's cache would stay behind")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(f"pdplane: this model has {len(groups)} KV cache groups (a hybrid model), one is supported")
    kind = type(groups[0].kv_cache_spec).__name__
    if kind != "FullAttentionSpec":
        raise ValueError(f"pdplane: a cache of the kind {kind} is not supported, FullAttentionSpec is")


def distinct(caches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caches without those of layers that read another layer's."""
    owners: dict[int, str] = {}
    for name, tensor in caches.items():
        owners.setdefault(Arena(tensor).base, name)
    return {name: caches[name] for name in owners.values()}


def plan_cache(caches: Mapping[str, Any], arena: Arena, block_tokens: int, kv_heads: int) -> Layout:
    """Return the layout of the cache as it lies: each layer a plane and a step; vLLM's null block 0 is pdplane's."""
    for name, tensor in caches.items():
        if len(tensor.shape) != 4 or tensor.shape[2] != block_tokens:
            wanted = f"[block, head, {block_tokens} tokens, content]"
            raise ValueError(f"pdplane: the cache of {name} is {tuple(tensor.shape)}, not {wanted}")
    names = [FieldId(name) for name in caches]
    tensors = list(caches.values())
    return plan_layout(
        [GroupSpec(GROUP, "full_history", block_tokens, 1, transfer_policy="full_suffix")],
        [
            FieldSpec(GROUP, FieldId(name), name, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in caches.items()
        ],
        num_lcm_blocks=tensors[0].shape[0] - 1,
        prefix_granularity=block_tokens,
        partitions=[(name, Partition(axis=0, global_extent=kv_heads)) for name in names],
        planes=[
            Plane(name, tensor.nbytes // tensor.shape[0], arena.offset_of(tensor)) for name, tensor in caches.items()
        ],
        steps=[[name] for name in names],
    )


# ---- what the scheduler tells the workers before a step


@attrs.frozen
class Chunk:
    """Tokens of a prompt that this step computes, with all blocks that the request has so far."""

    request: str
    blocks: tuple[int, ...]
    tokens: range


@attrs.frozen
class Opening:
    """A half of a pair that begins here; `prefill` and the blocks to fill are decode's."""

    request: str
    room: int
    prompt_len: int
    prompt_hash: str
    prefill: str = ""
    prefix_len: int = 0
    blocks: tuple[int, ...] = ()


@attrs.define
class Step(KVConnectorMetadata):
    opened: list[Opening] = attrs.field(factory=list)
    chunks: list[Chunk] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    finished: set[str] = attrs.field(factory=set)  # of prefill; vLLM keeps their blocks until we say that they are free
    aborted: set[str] = attrs.field(factory=set)


@attrs.define
class Failures(KVConnectorWorkerMetadata):
    """Why the halves of these requests failed, from the workers to the scheduler."""

    whys: dict[str, Why]

    def aggregate(self, other: Failures) -> Failures:
        return Failures(self.whys | other.whys)


# ---- beside vLLM's scheduler


@attrs.define
class Half:
    """One request's half of a pair, as its `kv_transfer_params` ask for it; a decode half names its prefill."""

    room: int
    prefill: str
    prompt_len: int
    prompt_hash: str
    blocks: list[int] = attrs.field(factory=list)
    opened: bool = False
    why: Why | None = None


def read_half(request: Any, *, producer: bool) -> Half | None:
    """Return what a request asks of us, with `why` set if it cannot be done; None if it asks nothing."""
    params = request.kv_transfer_params or {}
    if not params.get("do_remote_decode" if producer else "do_remote_prefill"):
        return None
    room, prefill = params.get("room"), "" if producer else params.get("prefill")
    half = Half(room if type(room) is int else -1, str(prefill), request.num_prompt_tokens, "")
    if half.room < 0:
        half.why = Why(Cause.BAD_REQUEST, f"kv_transfer_params.room must be a whole number, it is {room!r:.50}")
    elif not producer and not isinstance(prefill, str):
        half.why = Why(Cause.BAD_REQUEST, f'kv_transfer_params.prefill must be "host:port", it is {prefill!r:.50}')
    elif request.prompt_token_ids is None or request.mm_features or request.lora_request:
        half.why = Why(Cause.BAD_REQUEST, "prompts of token ids only: no images, embeddings or LoRA")
    else:
        half.prompt_hash = hash_prompt(request.prompt_token_ids)
    return half


class Scheduling:
    """Knows the block ids of each half; touches no memory and opens no room."""

    def __init__(self, block_tokens: int, *, producer: bool) -> None:
        self._block_tokens, self._producer = block_tokens, producer
        self._halves: dict[str, Half] = {}
        self._step = Step()

    def add(self, request: Any) -> None:
        half = read_half(request, producer=self._producer)
        if half is not None:
            self._halves[request.request_id] = half
            if half.why is not None:
                logger.warning("request %s takes no part in a transfer: %s", request.request_id, half.why.text)

    def missing(self, name: str, computed: int) -> int:
        """Return how many tokens prefill shall send: none after a failure or preemption, decode computes them then."""
        half = self._halves.get(name)
        return half.prompt_len - computed if half and half.prefill and not half.opened and half.why is None else 0

    def allocate(self, name: str, ids: tuple[list[int], ...], external: int) -> None:
        half = self._halves.get(name)
        if half is None or half.opened or half.why is not None:
            return
        opening = Opening(name, half.room, half.prompt_len, half.prompt_hash)
        if not self._producer:
            if external == 0:
                half.why = Why(Cause.CANCELLED, "decode computes this prompt itself")  # prompt_logprobs want all of it
                return
            prefix_len, last = half.prompt_len - external, -(-half.prompt_len // self._block_tokens)
            blocks = tuple(ids[0][prefix_len // self._block_tokens : last])
            opening = attrs.evolve(opening, prefill=half.prefill, prefix_len=prefix_len, blocks=blocks)
        half.opened = True
        self._step.opened.append(opening)

    def plan(self, output: Any) -> Step:
        """Return what the workers have to know of this step."""
        for name in output.preempted_req_ids or ():
            half = self._halves.get(name)
            if half and half.opened and self._producer and half.why is None:
                # Its blocks are another request's from this step on. When it comes back, it computes for itself.
                half.why = Why(Cause.CANCELLED, "vLLM preempted the request on prefill, and took its blocks back")
                self._step.preempted.add(name)
        if self._producer:
            for new in output.scheduled_new_reqs:
                self._chunk(
                    output, new.req_id, new.block_ids, 0, new.num_computed_tokens
                )  # with what a prefix hit gave
            cached = output.scheduled_cached_reqs
            for name, more, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            ):
                self._chunk(output, name, more or ([],), computed, computed)
        step, self._step = self._step, Step()
        return step

    def _chunk(self, output: Any, name: str, more: tuple[list[int], ...], start: int, computed: int) -> None:
        half = self._halves.get(name)
        if half is None or half.why is not None:
            return
        half.blocks += more[0]
        stop = min(half.prompt_len, computed + output.num_scheduled_tokens[name])
        if start < stop:
            self._step.chunks.append(Chunk(name, tuple(half.blocks), range(start, stop)))

    def finish(self, name: str, *, whole: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks are still needed, and what the answer's `kv_transfer_params` say."""
        half = self._halves.pop(name, None)
        if half is None:
            return False, None
        if half.opened:
            # Blocks that are received into are kept by vLLM itself until we say that they are free.
            (self._step.finished if whole and self._producer else self._step.aborted).add(name)
        told: dict[str, Any] = {"room": half.room}
        if half.why is not None:
            told |= {"cause": half.why.cause.value, "text": half.why.text}
        return half.opened and self._producer, told

    def learn(self, whys: Mapping[str, Why]) -> None:
        for name, why in whys.items():
            if half := self._halves.get(name):
                half.why = half.why or why


# ---- in each worker


@contextmanager
def unpinned() -> Iterator[None]:
    """Let threads that begin inside run on every core: vLLM pins its CPU workers, and threads inherit that."""
    pinned = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if pinned is None:
        yield
        return
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)


@attrs.define
class Sending:
    """A prompt that this worker computes and sends; `ready` are steps and tokens that are computed and not pushed."""

    room: PrefillRoom
    prompt_len: int
    layers_left: int
    blocks: tuple[int, ...] = ()
    ready: list[tuple[int, range]] = attrs.field(factory=list)
    finished: bool = False  # `finish` was called
    over: bool = False  # vLLM waits for the blocks
    told: bool = False  # the failure was reported


class Moving:
    """Owns this worker's plane and moves the blocks. Every method is called by the worker's own thread."""

    def __init__(self, vllm_config: Any, caches: Mapping[str, Any]) -> None:
        self._caches = distinct(caches)
        self._arena = Arena.spanning(self._caches.values())  # without a copy; a device's memory is refused
        self._block_tokens: int = vllm_config.cache_config.block_size
        kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        self._layout = plan_cache(self._caches, self._arena, self._block_tokens, kv_heads)
        self._steps = {name: step for step, name in enumerate(self._caches)}
        self._sending: dict[str, Sending] = {}
        self._receiving: dict[str, DecodeRoom] = {}
        self._unopened: set[str] = set()
        self._whys: dict[str, Why] = {}
        self._news = threading.Event()
        self._plane = self._start(vllm_config)

    def _start(self, vllm_config: Any) -> PrefillPlane | DecodePlane:
        transfer, rank = vllm_config.kv_transfer_config, get_tensor_model_parallel_rank()
        settings: dict[str, Any] = {"legacy": False} | dict(transfer.kv_connector_extra_config)
        settings |= {"tp_size": vllm_config.parallel_config.tensor_parallel_size, "tp_rank": rank}
        if path := settings.pop("secret_file", None):
            settings["secret"] = Secret.from_file(path)
        layers = vllm_config.compilation_config.static_forward_context
        order = {getattr(layers.get(name), "isa", "") for name in self._caches}  # of CPU attention within a page
        served = vllm_config.model_config.served_model_name
        model = served[0] if isinstance(served, list) else served
        same = (("engine", "vllm"), ("model", model), ("order in a page", ",".join(sorted(order))))
        shared: dict[str, Any] = {"layout": self._layout, "arena": self._arena, "fingerprint": Fingerprint(same)}
        plane: PrefillPlane | DecodePlane
        if transfer.kv_role == "kv_producer":
            if rank and "rendezvous" not in settings:
                host = settings.get("advertise_host") or settings.get("host", "127.0.0.1")
                settings["rendezvous"] = Endpoint(host, settings.get("bootstrap_port", 8998))
            plane = PrefillPlane(PrefillConfig(**settings), **shared)
        else:
            plane = DecodePlane(DecodeConfig(**settings), **shared)
        with unpinned():
            plane.start()
        logger.info(
            "pdplane: %s, %d layers of %d blocks, %s",
            transfer.kv_role,
            len(self._steps),
            self._layout.num_lcm_blocks,
            dict(same),
        )
        return plane

    def preempt(self, step: Step) -> None:
        """End what reads blocks that this step gives to others; return when nothing reads them any more."""
        for name in step.preempted:
            if sending := self._sending.get(name):
                sending.room.cancel("vLLM preempted the request on prefill, and took its blocks back")
                sending.room.released.result()  # bounded by the connection's own deadline

    def begin(self, step: Step) -> None:
        """Open this step's rooms, before it computes."""
        for opening in step.opened:
            try:
                self._open(opening)
            except PdplaneError as error:
                self._fail(opening.request, opening.room, Why(error.cause, str(error)))
                self._unopened.add(opening.request)
        for name in step.finished | step.aborted:
            if name in self._sending:
                self._sending[name].over = True
            elif isinstance(self._plane, PrefillPlane):
                self._unopened.add(name)
        for name in step.aborted:
            sending, receiving = self._sending.get(name), self._receiving.get(name)
            if room := receiving or (sending and sending.room):
                room.cancel("the request was aborted")

    def _open(self, opening: Opening) -> None:
        room: PrefillRoom | DecodeRoom
        if isinstance(self._plane, PrefillPlane):
            room = self._plane.open(opening.room, prompt_len=opening.prompt_len, prompt_hash=opening.prompt_hash)
            room.window.add_done_callback(lambda _: self._news.set())
            self._sending[opening.request] = Sending(room, opening.prompt_len, len(self._steps))
        else:
            manifest = build_manifest(self._layout, {GROUP: opening.blocks}, opening.prefix_len, opening.prompt_len)
            room = self._plane.open(
                opening.room, prefill=opening.prefill, manifest=manifest, prompt_hash=opening.prompt_hash
            )
            self._receiving[opening.request] = room
        room.released.add_done_callback(lambda _: self._news.set())

    def computed(self, layer: str, chunks: Iterable[Chunk]) -> None:
        """Push what a layer has just computed of these chunks, or keep it until decode's offer is there."""
        number = self._steps.get(layer)
        for chunk in chunks if number is not None else ():
            sending = self._sending.get(chunk.request)
            if sending is None:
                continue
            sending.blocks = chunk.blocks
            sending.ready.append((number or 0, chunk.tokens))
            if chunk.tokens.stop == sending.prompt_len:
                sending.layers_left -= 1
            self._push(sending)

    def _push(self, sending: Sending) -> None:
        room = sending.room
        if sending.finished or room.done.done() or not room.window.done() or room.window.exception() is not None:
            return
        window = room.window.result()
        blocks = sending.blocks[window.prefix_len // self._block_tokens : -(-window.prompt_len // self._block_tokens)]
        try:
            while sending.ready:
                first, tokens = sending.ready.pop(0)
                last = first
                while sending.ready and sending.ready[0] == (last + 1, tokens):  # what had to wait goes in one piece
                    last, _ = sending.ready.pop(0)
                if tokens.stop > window.prefix_len:
                    room.push({GROUP: blocks}, steps=range(first, last + 1), chunk=tokens)
            if sending.layers_left == 0:
                sending.finished = True
                room.finish()  # no first token: vLLM's decode computes the last one of the prompt again, and draws
        except PdplaneError as error:
            room.cancel(str(error), Cause.INTERNAL)

    def results(self, *, idle: bool) -> KVConnectorTransferResults:
        """Return whose blocks are free or filled, after each step; an idle one waits a moment for news."""
        if idle and (self._sending or self._receiving):
            self._news.wait(IDLE_S)
        self._news.clear()
        unopened, self._unopened = self._unopened, set()
        if isinstance(self._plane, PrefillPlane):
            return KVConnectorTransferResults(finished_sending=unopened | self._sent())
        received, failed = self._received()
        return KVConnectorTransferResults(finished_recving=unopened | received, failed_recving=unopened | failed)

    def _sent(self) -> set[str]:
        found = set()
        for name, sending in list(self._sending.items()):
            self._push(sending)
            sending.told = sending.told or self._note(name, sending.room)
            if sending.over and sending.room.released.done():
                del self._sending[name]
                found.add(name)
        return found

    def _received(self) -> tuple[set[str], set[str]]:
        found, failed = set(), set()
        for name, room in list(self._receiving.items()):
            if room.done.done() and room.released.done():
                del self._receiving[name]
                found.add(name)
                if self._note(name, room):
                    failed.add(name)
        return found, failed

    def _note(self, name: str, room: PrefillRoom | DecodeRoom) -> bool:
        error = room.done.exception() if room.done.done() else None
        if error is not None:
            cause = error.cause if isinstance(error, PdplaneError) else Cause.INTERNAL
            self._fail(name, room.room, Why(cause, str(error)))
        return error is not None

    def _fail(self, name: str, room: int, why: Why) -> None:
        self._whys[name] = why
        logger.warning("request %s, room %d: %s: %s", name, room, why.cause.value, why.text)

    def take_failures(self) -> Failures | None:
        whys, self._whys = self._whys, {}
        return Failures(whys) if whys else None

    def close(self) -> None:
        self._plane.close()


class PdplaneConnector(KVConnectorBase_V1):
    """What vLLM loads: one beside the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        self._moving: Moving | None = None
        self._ran = False  # this step had a forward
        if role is KVConnectorRole.SCHEDULER:
            producer = vllm_config.kv_transfer_config.kv_role == "kv_producer"
            self._scheduling = Scheduling(vllm_config.cache_config.block_size, producer=producer)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # save_kv_layer is called layer by layer

    # beside the scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduling.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        missing = self._scheduling.missing(request.request_id, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocate(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduling.plan(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        whole = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        return self._scheduling.finish(request.request_id, whole=whole)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduling.learn(connector_output.kv_connector_worker_meta.whys)

    # in a worker

    @property
    def moving(self) -> Moving:
        if self._moving is None:
            raise RuntimeError("vLLM registered no KV caches")
        return self._moving

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._moving = Moving(self._vllm_config, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        self.moving.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Step) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._ran = False
        self.moving.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: vLLM calls it after the forward, and the rooms are open before it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._ran = True
        self.moving.computed(layer_name, self._get_connector_metadata().chunks)

    def wait_for_save(self) -> None:
        """Nothing: vLLM keeps the blocks of what is sent until it is reported."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.moving.results(idle=not self._ran)

    def build_connector_worker_meta(self) -> Failures | None:
        return self.moving.take_failures()

    def shutdown(self) -> None:
        if self._moving is not None:
            self._moving.close()
