"""The legacy prefill's choice of a transfer queue: all that it reads of a session."""

from __future__ import annotations

from pdplane import wire
from tests.golden import Case, each

# Ours reads the port behind the last colon, so that an IPv6 session has one; the legacy peer, behind the first.
_OTHER_COLON = {"[::1]:5000", "h:1:2"}


@each("legacy/queue_sharding")
def test_golden_queues(case: Case) -> None:
    """Our own data threads need no queues: one a session. Only the reading of the port is ours to check."""
    sessions, queues = case["input"]["sessions"], case["input"]["queues"]
    ports = [wire.session_port(session) for session in sessions]
    if _OTHER_COLON & set(sessions):
        assert ports == [5000 if session == "[::1]:5000" else 2 for session in sessions]
    elif "error" in case["expected"]:
        assert None in ports
    else:
        assert sum(port or 0 for port in ports) % queues == case["expected"]["queue"]
