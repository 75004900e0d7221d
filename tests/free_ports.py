"""Ports for daemons that must be told theirs before they start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, closing

_NEVER_GIVEN = 20000, 32000  # Linux gives from 32768 on unless told otherwise, others from 49152


def free_ports(count: int) -> range:
    """As many ports in a row that nobody has now, and that the system gives nobody who asks for any port.

    Until they are bound, which may take seconds, only somebody who wants these very ports can take them.
    """
    while True:
        first = random.randrange(*_NEVER_GIVEN)
        with ExitStack() as stack:
            try:
                for number in range(count):
                    stack.enter_context(closing(socket.socket())).bind(("127.0.0.1", first + number))
            except OSError:
                continue
            return range(first, first + count)
