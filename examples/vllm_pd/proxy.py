"""A small proxy for one or more prefill and decode servers, round robin over each.

``--flow fetch``: prefill first, then decode with the ``kv_transfer_params`` of prefill's answer, unchanged, as the
routers of larger deployments do. ``--flow push``: both at once, under a key that is made up here, so that KV moves
while it is computed. Only a prefill server that is new here comes first once: its answers tell who it is.

A failed prefill is answered as it came; KV that nobody takes ends by its own time to live.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PUSH_FIELD = "kvlink_push"


class Servers:
    """What is asked of the servers for one client's request, and what is known of them."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefills, self._decodes = itertools.cycle(prefill), itertools.cycle(decode)
        self._known: dict[str, dict[str, Any]] = {}
        self.client = httpx.AsyncClient(timeout=None)  # noqa: S113 - the client's own bound holds

    async def fetch(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Prefill, then decode; the answer of decode, whose body is yet to be read, or of a prefill that failed."""
        prefilled = await self._prefill(next(self._prefills), path, body, {})
        if prefilled.is_error:
            return prefilled
        return await self._decode(path, body, prefilled.json().get("kv_transfer_params"))

    async def push(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Both at once."""
        server, key = next(self._prefills), {PUSH_FIELD: str(uuid.uuid4())}
        prefilling = asyncio.create_task(self._prefill(server, path, body, key))
        prefilling.add_done_callback(lambda task: task.cancelled() or task.exception())  # decode hears of it otherwise
        if server not in self._known:
            await prefilling
        answering = asyncio.create_task(self._decode(path, body, self._known.get(server, {}) | key))
        await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and prefilling.exception() is None and prefilling.result().is_error:
            answering.cancel()  # nobody will push
            return prefilling.result()
        return await answering

    async def _prefill(self, server: str, path: str, body: dict[str, Any], params: dict[str, Any]) -> httpx.Response:
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_PREFILL | params}
        first.pop("stream_options", None)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        answer = await self.client.post(server + path, json=first)
        if params and answer.is_success:
            self._known[server] = answer.json()["kv_transfer_params"]
        return answer

    async def _decode(self, path: str, body: dict[str, Any], params: dict[str, Any] | None) -> httpx.Response:
        second = body | {"kv_transfer_params": params}
        return await self.client.send(
            self.client.build_request("POST", next(self._decodes) + path, json=second), stream=True
        )


def build(prefill: list[str], decode: list[str], flow: str = "fetch") -> FastAPI:
    """The proxy over these servers, given as ``http://host:port``."""
    servers = Servers(prefill, decode)
    ask = servers.push if flow == "push" else servers.fetch

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with servers.client:
            yield

    app = FastAPI(lifespan=lifespan)

    async def forward(request: Request, path: str) -> Response:
        answer = await ask(path, await request.json())

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # a client that hangs up has the decode aborted

        if answer.is_closed:
            return Response(answer.content, answer.status_code, media_type="application/json")
        return StreamingResponse(passed_on(), answer.status_code, media_type=answer.headers.get("content-type"))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await forward(request, "/v1/completions")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await forward(request, "/v1/chat/completions")

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"prefill": len(prefill), "decode": len(decode)}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--flow", choices=("fetch", "push"), default="fetch")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8192)
    arguments = parser.parse_args()
    app = build(arguments.prefill, arguments.decode, arguments.flow)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
