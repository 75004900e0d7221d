"""One rank of one side with synthetic pages, to put pdplane beside any other implementation on a test bench.

    python -m pdplane.testing.interop_peer prefill|decode|bootstrap --help

Everything that moves is the product: planes, channels, transports, the rendezvous. EventLog are JSON lines on standard
output; the exit code is 0 when every room ended as --expect and, for a decode, no byte is bad or stray.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from pdplane.control.http_thread import HttpThread
from pdplane.control.rendezvous import rendezvous_app
from pdplane.errors import ConfigError, PdplaneError
from pdplane.testing.interop_decode import run_decode
from pdplane.testing.interop_prefill import run_prefill
from pdplane.testing.interop_run import EventLog, InteropOptions, parse
from pdplane.transport.vector import take_turns_often

_TERMINATED = 128 + signal.SIGTERM


def run_bootstrap(options: InteropOptions, events: EventLog) -> bool:
    """Serve the rendezvous alone until a signal ends it; return True."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before any thread starts, so that `sigwait` alone takes them
    http = HttpThread("pdplane-http")
    http.start()
    try:
        events("bootstrap", url=http.serve(rendezvous_app(), options.host, options.bootstrap_port).url("http"))
        signal.sigwait(ends)
    finally:
        http.close()
    events("done", role="bootstrap", rooms={})
    return True


ROLES: Mapping[str, Callable[[InteropOptions, EventLog], bool]] = {
    "prefill": run_prefill,
    "decode": run_decode,
    "bootstrap": run_bootstrap,
}


def main(words: Sequence[str] | None = None) -> int:
    """Play the role; return the exit code."""
    try:
        options = parse(list(sys.argv[1:] if words is None else words))
    except ConfigError as wrong:
        sys.stderr.write(f"interop_peer: {wrong}\n")
        return 2
    take_turns_often()
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # an exception, so that everything is closed
    try:
        return 0 if ROLES[options.role](options, EventLog()) else 1
    except PdplaneError as wrong:
        sys.stderr.write(f"interop_peer {options.role}: {wrong}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
