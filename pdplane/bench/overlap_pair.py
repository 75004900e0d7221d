"""Two prefill daemons, one layer by layer and one not, and a decode daemon behind a slow link, in this process."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.bench.slow_link import TokenBucket, slow_transport
from pdplane.control.http_thread import HttpThread
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, new_room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.transport.registry import TRANSPORTS
from pdplane.transport.reports import TransportOptions

_SCHEME = "slow"
_SEGMENT_BYTES = 1 << 20  # a link's worth of granularity: a whole segment arrives at once
_PATIENCE_S = 1800.0
_MAX_TOKENS = 2  # the second one is made by decode


@attrs.frozen
class Once:
    """One prompt through a pair; times in ms.

    `exposed_ms`: what was left of the transfer when prefill had computed everything. `assembly_ms`: from the whole
    cache to decode's first step.
    """

    prefill_ms: float
    exposed_ms: float
    assembly_ms: float
    nbytes: int


@attrs.frozen(eq=False)
class Daemons:
    """The daemons and the link of a round."""

    prefills: Mapping[bool, PrefillNode]
    """By whether it streams layer by layer."""
    decode: DecodeNode
    bucket: TokenBucket

    def run(self, tokens: tuple[int, ...], *, layerwise: bool) -> Once:
        """Send one prompt, wait until both legs have ended, and return the times. Raises what a leg raised."""
        prefill, room = self.prefills[layerwise], new_room()
        address = Endpoint("127.0.0.1", int(prefill.info()["bootstrap_port"]))
        request = DecodeRequest(room, tokens, address, _MAX_TOKENS, ignore_eos=True)
        decoding = self.decode.decode(request, lambda _token: None)
        first = prefill.prefill(PrefillRequest(room, tokens)).done.result(_PATIENCE_S)
        finished = decoding.done.result(_PATIENCE_S)
        return Once(
            first.timings["prefill_ms"],
            first.timings["transfer_ms"],
            finished.timings["assembly_ms"],
            round(first.timings["transfer_mb"] * 1e6),
        )


@contextlib.contextmanager
def open_daemons(options: EngineOptions) -> Iterator[Daemons]:
    """Load the model three times and connect the daemons; the link has no limit yet. Raises ConfigError."""
    bucket = TokenBucket()
    TRANSPORTS[_SCHEME] = slow_transport(bucket)
    settings: dict[str, Any] = {
        "transport": _SCHEME,
        "transport_options": TransportOptions(segment_bytes=_SEGMENT_BYTES),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(TRANSPORTS.pop, _SCHEME)
        http = HttpThread("pdplane-http")
        stack.callback(http.close)
        prefills = {}
        for layerwise in (False, True):
            engine = MlxPrefillEngine(options if layerwise else attrs.evolve(options, layerwise_interval=0))
            node = PrefillNode(engine, PrefillConfig(bootstrap_port=0, **settings), http=http)
            stack.callback(node.close)
            node.start()
            prefills[layerwise] = node
        decode = DecodeNode(MlxDecodeEngine(options), DecodeConfig(**settings), http=http)
        stack.callback(decode.close)
        decode.start()
        _await_ready(*prefills.values())
        yield Daemons(prefills, decode, bucket)


def random_prompt(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return tokens without special ones, for models whose special tokens come first."""
    source = random.Random(seed)
    return tuple(source.randrange(min(16, vocab_size - 1), vocab_size) for _ in range(length))


def _await_ready(*nodes: PrefillNode) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if all(node.ready for node in nodes):
            return
        pause.wait(0.01)
    raise ConfigError("a prefill did not become ready within 10 s")
