"""A small proxy for one or more prefill and decode servers: prefill first, then decode, round robin over each.

It forwards ``kv_transfer_params`` as it gets them, as the routers of larger deployments do. A failed prefill is
answered as it came; an offer whose decode never starts ends by its own time to live.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

ASK_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def build(prefill: list[str], decode: list[str]) -> FastAPI:
    """The proxy over these servers, given as ``http://host:port``."""
    prefills, decodes = itertools.cycle(prefill), itertools.cycle(decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=None) as app.state.client:  # noqa: S113 - the client's own bound holds
            yield

    app = FastAPI(lifespan=lifespan)

    async def forward(request: Request, path: str) -> Response:
        body: dict[str, Any] = await request.json()
        client: httpx.AsyncClient = request.app.state.client
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_PREFILL}
        first.pop("stream_options", None)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        prefilled = await client.post(next(prefills) + path, json=first)
        if prefilled.is_error:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        second = body | {"kv_transfer_params": prefilled.json().get("kv_transfer_params")}
        decoding = client.build_request("POST", next(decodes) + path, json=second)
        answer = await client.send(decoding, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # a client that hangs up has the decode aborted

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
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8192)
    arguments = parser.parse_args()
    app = build(arguments.prefill, arguments.decode)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
