"""Send both requests of a pair at the same time, and answer with decode's: OpenAI's API in front of two vLLM servers.

python proxy.py PREFILL DECODE RENDEZVOUS [PORT]     e.g. http://127.0.0.1:8100 http://127.0.0.1:8200 127.0.0.1:8998
"""

import asyncio
import sys

from aiohttp import ClientSession, web

from pdplane import new_room

PREFILL, DECODE, RENDEZVOUS = sys.argv[1:4]


async def pair(request: web.Request) -> web.StreamResponse:
    body, room = await request.json(), new_room()
    ours = {"do_remote_decode": True, "room": room}
    theirs = {"do_remote_prefill": True, "room": room, "prefill": RENDEZVOUS}
    one = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "stream_options": None}
    async with ClientSession() as session:
        begun = session.post(PREFILL + request.path, json=body | one | {"kv_transfer_params": ours})
        prefill = asyncio.ensure_future(begun)
        prefill.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # decode's answer tells of it
        try:
            async with session.post(DECODE + request.path, json=body | {"kv_transfer_params": theirs}) as answer:
                response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response
        finally:
            prefill.cancel()  # what is not over by now is of no use to anybody


app = web.Application()
app.add_routes([web.post("/v1/completions", pair), web.post("/v1/chat/completions", pair)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[4]) if len(sys.argv) > 4 else 8000, handler_cancellation=True)
