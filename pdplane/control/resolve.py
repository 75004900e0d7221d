"""Host names to addresses, on the HTTP thread.

libzmq would look a name up itself: on the thread that serves all its sockets, where a slow name server stalls them all,
and it would try the first of several addresses only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

_ADDRESSES = 8  # tried at most


async def find_address(host: str, port: int, timeout_s: float) -> str:
    """The name's first address where something listens; what is an address already is given back as it is.

    Raises OSError, after at most `timeout_s` for the name and as much for each address.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return host
    failure = OSError(f"{host} has no address")
    for address in await _addresses(host, port, timeout_s):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout_s)
        except OSError as error:  # a TimeoutError is one
            failure = OSError(f"cannot connect to {host}:{port} at {address}: {error}")
            continue
        writer.close()
        return address
    raise failure


async def _addresses(host: str, port: int, timeout_s: float) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), timeout_s)
    except TimeoutError:
        raise OSError(f"no name server answered for {host} in {timeout_s:g} s") from None
    except (socket.gaierror, ValueError) as error:  # ValueError: a text that no name can be
        raise OSError(f"{host!r} is no known host name: {error}") from None
    return [str(entry[4][0]) for entry in found][:_ADDRESSES]
