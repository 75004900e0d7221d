"""The routes by which gateways learn what a worker is."""

from __future__ import annotations

import pytest

from pdplane.errors import Cause, RoomFailed
from pdplane.ids import Endpoint
from tests.http_client import ask
from tests.serving.bodies import generate
from tests.serving.fake_node import FakeNode, answers, fails


def test_health_follows_the_node(node: FakeNode, decode: Endpoint) -> None:
    assert ask(decode, "GET", "/health").json == {"status": "ok"}
    node.ready = False
    assert ask(decode, "GET", "/health").status == 503


def test_liveness_is_red_only_after_a_death(node: FakeNode, decode: Endpoint) -> None:
    node.alive = node.ready = False
    assert ask(decode, "GET", "/livez").status == 200, "it still loads"
    node.alive = True
    assert ask(decode, "GET", "/livez").status == 200, "busy or without a peer is alive"
    node.alive = False
    assert ask(decode, "GET", "/livez").status == 503


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/livez"])
def test_a_thread_that_hangs_is_named(node: FakeNode, decode: Endpoint, path: str) -> None:
    assert ask(decode, "GET", path).status == 200
    node.hangs = "the thread pdplane-x hangs: no turn for 12 s"
    answer = ask(decode, "GET", path)
    assert (answer.status, answer.json["status"]) == (503, node.hangs)


def test_a_node_without_counts_says_so(node: FakeNode, decode: Endpoint) -> None:
    node.alive = False
    assert ask(decode, "GET", "/statistics").status == 503
    answer = ask(decode, "GET", "/metrics")
    assert answer.status == 200
    assert "pdplane_num_running_reqs 0.0" in answer.body


def test_smg_correlates_only_models_of_sglang(prefill: Endpoint) -> None:
    (model,) = ask(prefill, "GET", "/v1/models").json["data"]
    assert (model["owned_by"], model["id"], model["max_model_len"]) == ("sglang", "/models/toy", 100)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_names_what_a_client_needs(prefill: Endpoint, decode: Endpoint, path: str) -> None:
    info = ask(prefill, "GET", path).json
    assert info["disaggregation_mode"] == "prefill"
    assert info["bootstrap_port"] == 8998
    assert info["model_path"] == info["tokenizer_path"] == info["served_model_name"] == "/models/toy"
    assert {"tp_size", "dp_size", "context_length", "max_running_requests", "version", "ready"} <= info.keys()
    assert ask(decode, "GET", path).json["disaggregation_mode"] == "decode"


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(decode: Endpoint, path: str) -> None:
    info = ask(decode, "GET", path).json
    assert info["is_generation"] is True
    assert info["context_length"] == 100


def test_loads_and_statistics(node: FakeNode, decode: Endpoint) -> None:
    loads = ask(decode, "GET", "/v1/loads").json
    assert loads["dp_rank_count"] == len(loads["loads"]) == 1
    assert loads["timestamp"]
    assert ask(decode, "GET", "/get_load").json == loads["loads"]
    assert (loads["loads"][0]["num_running_reqs"], loads["loads"][0]["num_waiting_reqs"]) == (0, 0)
    assert ask(decode, "GET", "/statistics").json == node.counts


def test_metrics_hold_what_was_measured_and_the_nodes_counts(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("abc", transfer_wait_ms=2.0, transfer_mb=3.5, other=1.0)
    assert ask(decode, "POST", "/generate", generate()).status == 200
    node.script = fails(RoomFailed(7, Cause.UNREACHABLE, "push to the rendezvous http://h: refused"))
    assert ask(decode, "POST", "/generate", generate()).status == 502
    node.script = fails(RoomFailed(7, Cause.TRANSFER, "push to h:1 failed: the rendezvous was cut"))
    assert ask(decode, "POST", "/generate", generate()).status == 502
    answer = ask(decode, "GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    lines = set(answer.body.splitlines())
    assert {
        "pdplane_time_to_first_token_seconds_count 1.0",
        "pdplane_inter_token_latency_seconds_count 2.0",
        "pdplane_e2e_request_latency_seconds_count 1.0",
        "pdplane_num_running_reqs 0.0",
        "pdplane_num_bootstrap_failed_reqs_total 1.0",
        "pdplane_num_transfer_failed_reqs_total 1.0",
        "pdplane_kv_transfer_latency_ms_sum 2.0",
        "pdplane_kv_transfer_total_mb_sum 3.5",
        "pdplane_num_decode_prealloc_queue_reqs 0.0",
        "pdplane_num_decode_transfer_queue_reqs 3.0",
        'pdplane_statistics{count="threads"} 4.0',
    } <= lines


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/generate", 404)])
def test_unknown_paths_and_methods_are_json_too(decode: Endpoint, method: str, path: str, status: int) -> None:
    answer = ask(decode, method, path)
    assert answer.status == status
    assert answer.json["error"]["code"] is None


def test_no_version_route(decode: Endpoint) -> None:
    assert ask(decode, "GET", "/version").status == 404
