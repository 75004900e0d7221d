"""Prometheus metrics: what serving measures itself, and the node's own counts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdplane.api import DecodeHandle, Node, PrefillHandle
from pdplane.errors import Cause, PdplaneError, RoomFailed
from pdplane.serving.answer import TextAnswer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_MILLISECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 60000)
_MEGABYTES = (0.01, 0.1, 1, 4, 16, 64, 256, 1024, 4096, 16384)
_RATES = (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

_Row: TypeAlias = tuple[str, str, tuple[float, ...]]
_ALLOC: _Row = ("kv_transfer_alloc_ms", "Waiting for free blocks of this side.", _MILLISECONDS)
# By role: metric, text and buckets, by the name of the timing of a leg.
_TIMINGS: Mapping[str, Mapping[str, _Row]] = {
    "prefill": {
        "bootstrap_ms": ("kv_transfer_bootstrap_ms", "From the request to decode's offer of blocks.", _MILLISECONDS),
        "alloc_ms": _ALLOC,
        "prefill_ms": ("prefill_compute_ms", "Computing the prompt, turns of others included.", _MILLISECONDS),
        "transfer_ms": ("kv_transfer_latency_ms", "What was left of the transfer after the compute.", _MILLISECONDS),
        "transfer_mb": ("kv_transfer_total_mb", "KV sent for a request, in 10**6 bytes.", _MEGABYTES),
        "transfer_gb_s": ("kv_transfer_speed_gb_s", "KV sent a second since the first push, in 10**9 bytes.", _RATES),
    },
    "decode": {
        "alloc_ms": _ALLOC,
        "transfer_wait_ms": ("kv_transfer_latency_ms", "From the offer of blocks to the delivered KV.", _MILLISECONDS),
        "transfer_mb": ("kv_transfer_total_mb", "KV received for a request, in 10**6 bytes.", _MEGABYTES),
        "assembly_ms": ("kv_assembly_ms", "From the delivered KV to the first step that can run on it.", _MILLISECONDS),
    },
}
# By role: metric, text, and the counts of the node's statistics that it sums up (a missing one is 0).
_QUEUES: Mapping[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "prefill": (
        ("num_prefill_bootstrap_queue_reqs", "Requests that wait for decode's blocks.", ("rooms.opened",)),
        (
            "num_prefill_inflight_queue_reqs",
            "Requests that are computed and pushed.",
            ("rooms.offered", "rooms.finishing"),
        ),
        ("num_queue_reqs", "Requests that wait for blocks of this node.", ("blocks.waiting",)),
    ),
    "decode": (
        (
            "num_decode_prealloc_queue_reqs",
            "Requests that wait for blocks or for their prefill to be found.",
            ("blocks.waiting", "rooms.resolving"),
        ),
        ("num_decode_transfer_queue_reqs", "Requests whose KV is on its way.", ("rooms.waiting",)),
        ("num_queue_reqs", "Requests that wait for blocks of this node.", ("blocks.waiting",)),
    ),
}
# By role: counts of requests that wait for their peer, for blocks or for the cache.
_WAITING: Mapping[str, tuple[str, ...]] = {
    "prefill": ("rooms.opened", "blocks.waiting"),
    "decode": ("blocks.waiting", "rooms.resolving", "rooms.waiting", "running.waiting"),
}


# Causes of a request whose halves never met.
_UNMET = {Cause.UNMATCHED, Cause.UNREACHABLE, Cause.REFUSED}


class Metrics:
    """One application's metrics, in a registry of their own."""

    def __init__(self, node: Node, role: str) -> None:
        self._registry = CollectorRegistry()
        self._counts = _NodeCounts(node, role)
        self._registry.register(self._counts)
        self.running = self._gauge("num_running_reqs", "Requests being answered.")
        self.requests = self._counter("num_requests", "Requests that were let in.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Request to first token.", _SECONDS)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "From token to token.", _SECONDS)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Request to last token.", _SECONDS)
        self._ends = self._counter("ended_reqs", "Requests that ended, refused ones included, by how.", "end")
        self._tokens = self._counter("tokens", "Tokens of answered requests: prompt, cached, generated.", "kind")
        self._bootstrap_failed = self._counter("num_bootstrap_failed_reqs", "Requests that never met their peer.")
        self._transfer_failed = self._counter("num_transfer_failed_reqs", "Requests that failed after they met it.")
        self._timings = {name: self._histogram(*row) for name, row in _TIMINGS[role].items()}

    def answered(self, answer: TextAnswer, handle: PrefillHandle | DecodeHandle) -> None:
        """Count an answer's tokens, and the times and sizes that its leg measured."""
        self.end_to_end.observe(time.monotonic() - answer.began)
        counts = {"prompt": answer.prompt_tokens, "cached": handle.cached_tokens, "generated": len(answer.tokens)}
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        timings = dict(handle.timings)
        for name, histogram in self._timings.items():
            if name in timings:
                histogram.observe(timings[name])

    def ended(self, how: str) -> None:
        """Count a request's end: a finish reason, the cause of its error, or that its client left."""
        self._ends.labels(how).inc()

    def failed_with(self, error: BaseException) -> None:
        """Count a request that the disaggregation failed; refusals of the request itself do not count."""
        if isinstance(error, RoomFailed):
            (self._bootstrap_failed if error.cause in _UNMET else self._transfer_failed).inc()

    def waiting(self) -> int:
        """Return how many requests wait for something of either side; 0 when the node does not answer."""
        return self._counts.waiting()

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pdplane_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdplane_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pdplane_{name}", text, registry=self._registry, buckets=buckets)


class _NodeCounts(Collector):
    """Reads the node's statistics at each scrape."""

    def __init__(self, node: Node, role: str) -> None:
        self._node = node
        self._queues, self._waiting = _QUEUES[role], _WAITING[role]

    def waiting(self) -> int:
        """Return how many requests the node has, but cannot go on with yet."""
        try:
            counts = dict(flatten(self._node.statistics()))
        except PdplaneError:
            return 0
        return int(sum(counts.get(path, 0) for path in self._waiting))

    def collect(self) -> Iterable[Metric]:
        everything = GaugeMetricFamily("pdplane_statistics", "Each count of the node.", labels=["count"])
        try:
            counts = dict(flatten(self._node.statistics()))
        except PdplaneError:
            return  # not started, or not answering: /livez shows which
        for path, value in counts.items():
            everything.add_metric([path], value)
        yield everything
        for name, text, paths in self._queues:
            yield GaugeMetricFamily(f"pdplane_{name}", text, value=sum(counts.get(path, 0) for path in paths))

    def describe(self) -> Iterable[Metric]:
        return ()  # asking the node for names at registration would be too early


def flatten(counts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers of nested dictionaries by dotted path; texts are left out."""
    for name, value in counts.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}.")
        elif isinstance(value, bool | int | float):
            yield path, float(value)
