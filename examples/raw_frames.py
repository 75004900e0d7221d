"""Speak raw ZeroMQ frames: play a decode rank, offer blocks that do not exist, print the Failed status that comes back.

python examples/raw_frames.py                    # with a prefill of its own
python examples/raw_frames.py 127.0.0.1:8998     # with a running one: the address of its rendezvous
"""

import json
import sys
import urllib.request

import zmq

from pdplane import Arena, FieldId, FieldSpec, GroupId, GroupSpec, PrefillConfig, PrefillPlane, plan_layout, wire

ROOM, SESSION = b"7", b"127.0.0.1:9"  # the session is where prefill would push to; nothing gets that far here
STATUS = ("room", "status", "prefill rank", "first token", "candidates", "cached tokens", "logprob")


def play_decode(router: str, layout: bytes) -> None:
    group = json.loads(layout)["plan"]["groups"][0]
    manifest = {
        "groups": [{"group_id": group["group_id"], "block_ids": [group["page_count"] + 1]}],  # one past the last
        "prefix_len": 0,
        "prompt_len": 1,
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://{router}")
        # Registration: marker, host, port, session, arena base, cache layout, tp size, tp rank.
        base = (4096).to_bytes(8, sys.byteorder)
        dealer.send_multipart([b"None", b"127.0.0.1", b"9", SESSION, base, layout, b"1", b"0"])
        # Pre-allocation: room, session, manifest.
        dealer.send_multipart([ROOM, SESSION, json.dumps(manifest).encode()])
        if not dealer.poll(10_000):
            raise SystemExit("prefill did not answer within 10 s")
        for name, frame in zip(STATUS, dealer.recv_multipart(), strict=True):
            print(f"{name:13} {frame!r}{'  (0 is Failed)' if name == 'status' else ''}")


def ask(rendezvous: str, rank: int) -> dict[str, str]:
    with urllib.request.urlopen(f"http://{rendezvous}/route?engine_rank={rank}&target_dp_group={rank}") as answer:
        found: dict[str, str] = json.load(answer)
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        peer = ask(sys.argv[1], 0)
        play_decode(f"{peer['rank_ip']}:{peer['router_port']}", ask(sys.argv[1], -1)["cache_layout"].encode())
    else:
        kv = GroupId("kv")
        spec = GroupSpec(kv, "full_history", 16, 1, transfer_policy="full_suffix")
        keys = FieldSpec(kv, FieldId("layer.0.k"), "arena", (1, 16, 8), "float32")
        plan = plan_layout([spec], [keys], num_lcm_blocks=8, prefix_granularity=16)
        with PrefillPlane(PrefillConfig(bootstrap_port=0), layout=plan, arena=Arena.zeros(plan.arena_bytes)) as plane:
            play_decode(str(plane.control), wire.encode_layout(plan))
