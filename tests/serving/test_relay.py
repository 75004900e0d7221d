"""The relay between a node's threads and the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from pdplane.api import Finished, Token
from pdplane.serving.answer import End, News, Relay


def test_a_token_that_is_put_while_others_are_taken_is_not_lost() -> None:
    first, second = Token(1, -0.5), Token(2, -0.5)
    finished: Future[Finished] = Future()
    finished.set_result(Finished("length", 1, 2))

    async def take() -> list[list[News]]:
        relay = Relay()
        relay.put(0, first)
        await asyncio.sleep(0)  # it has arrived
        relay.put(0, second)  # on its way
        taken = [await relay.next()]
        taken.append(await relay.next())
        relay.put(1, first)
        relay.watch(0, finished)
        return [*taken, await relay.next()]

    async def bounded() -> list[list[News]]:
        async with asyncio.timeout(10):
            return await take()

    assert asyncio.run(bounded()) == [
        [News(0, (first,), None)],
        [News(0, (second,), None)],
        [News(0, (), End(finished.result())), News(1, (first,), None)],
    ]
