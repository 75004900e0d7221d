"""The relay between a node's threads and the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from pdplane.api import Finished, Token
from pdplane.serving.relay import End, Relay


def test_a_token_that_is_put_while_others_are_taken_is_not_lost() -> None:
    first, second = Token(1, -0.5), Token(2, -0.5)
    finished: Future[Finished] = Future()
    finished.set_result(Finished("length", 1, 2))

    async def take() -> list[tuple[list[Token], End | None]]:
        relay = Relay()
        relay.put(first)
        await asyncio.sleep(0)  # it has arrived
        relay.put(second)  # on its way
        taken = [await relay.next()]
        taken.append(await relay.next())
        relay.watch(finished)
        return [*taken, await relay.next()]

    async def bounded() -> list[tuple[list[Token], End | None]]:
        async with asyncio.timeout(10):
            return await take()

    assert asyncio.run(bounded()) == [([first], None), ([second], None), ([], End(finished.result()))]
