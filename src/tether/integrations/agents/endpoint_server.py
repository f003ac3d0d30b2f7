"""The HTTP server of `rollout.agent.default_agent_loop=endpoint`, in a thread and on the loopback address only.

The API key of a request identifies its episode; other keys are refused.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from tether.text.rewards.outcome import is_float32
from tether.text.turns.endpoint.episode import AgentEpisode, PendingCall
from tether.text.turns.endpoint.protocol import (
    CallRefused,
    ChatRequest,
    Completion,
    TextRequest,
    chat_chunks,
    chat_completion,
    parse_chat,
    parse_json,
    parse_text,
    text_completion,
)
from tether.types import JsonObject

KEEP_ALIVE_SECONDS = 3600
"""Timeout of idle connections, long enough for a program that works between two calls."""
SHUTDOWN_SECONDS = 1
"""Maximum time for open connections to end when the server stops."""


class EndpointServer:
    """Serves the policy to the programs of open episodes.

    Args:
        episode_of: returns the episode of an API key, or None.
        submit: queues a call for the sampler.
        model: name of the policy.
        max_request_bytes: maximum bytes of a request.
        takes_rewards: whether programs may submit rewards.
    """

    def __init__(
        self,
        episode_of: Callable[[str], AgentEpisode | None],
        submit: Callable[[PendingCall], None],
        *,
        model: str,
        max_request_bytes: int,
        takes_rewards: bool,
    ) -> None:
        self._episode_of, self._submit = episode_of, submit
        self._model, self._max_bytes, self._takes_rewards = model, max_request_bytes, takes_rewards
        self._indices = count()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._answering(self._models)),
                Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route("/v1/completions", self._answering(self._text), methods=["POST"]),
                Route("/v1/reward", self._answering(self._reward), methods=["POST"]),
                Route("/{path:path}", self._answering(_unknown), methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ]
        )

    def _answering(
        self, handle: Callable[[AgentEpisode, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that looks up the episode of a request and returns refusals as errors in OpenAI's
        format."""

        async def endpoint(request: Request) -> Response:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            try:
                if (episode := self._episode_of(key)) is None:
                    raise CallRefused("no running episode has this API key", status=401, code="invalid_api_key")
                return await handle(episode, request)
            except CallRefused as refusal:
                return JSONResponse(refusal.body, refusal.status)
            except ClientDisconnect:
                return Response(status_code=499)

        return endpoint

    async def _models(self, episode: AgentEpisode, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "tether"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, episode: AgentEpisode, request: Request) -> Response:
        episode.count_call()
        body = await self._body(request)
        answer = await self._answer(episode, parse_chat(body, self._model), request)
        index = next(self._indices)
        if not body.get("stream"):
            return JSONResponse(chat_completion(answer, index, self._model))
        with_usage = (body.get("stream_options") or {}).get("include_usage") is True
        return _stream(chat_chunks(answer, index, self._model, with_usage=with_usage))

    async def _text(self, episode: AgentEpisode, request: Request) -> Response:
        episode.count_call()
        body = await self._body(request)
        answer = await self._answer(episode, parse_text(body, self._model), request)
        completion = text_completion(answer, next(self._indices), self._model)
        return _stream(iter([completion])) if body.get("stream") else JSONResponse(completion)

    async def _answer(self, episode: AgentEpisode, parsed: ChatRequest | TextRequest, request: Request) -> Completion:
        """Return the answer to a request whose body was read.

        Raises:
            ClientDisconnect: the client closed its connection before the answer was complete.
        """
        call = PendingCall(episode, parsed)
        self._submit(call)
        answer = asyncio.wrap_future(call.answer)
        disconnect = asyncio.ensure_future(request.receive())  # after the body, this is the only message
        both: list[asyncio.Future[Completion] | asyncio.Task[Message]] = [answer, disconnect]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                call.answer.cancel()  # unless it is being sampled
                call.disconnected.set()
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            disconnect.cancel()

    async def _reward(self, episode: AgentEpisode, request: Request) -> Response:
        if not self._takes_rewards:
            raise CallRefused("the run's reward function scores the episodes (endpoint.reward=function)")
        reward = (await self._body(request)).get("reward")
        if not isinstance(reward, int | float) or not is_float32(reward):
            raise CallRefused(f"reward={reward!r:.80}: it has to be a finite number", param="reward")
        episode.reward = float(reward)
        return JSONResponse({"reward": episode.reward})

    async def _body(self, request: Request) -> JsonObject:
        chunks, size = list[bytes](), 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._max_bytes:
                what = f"the request has more than {self._max_bytes} bytes (endpoint.max_request_bytes)"
                raise CallRefused(what, status=413, code="request_too_large")
            chunks.append(chunk)
        return parse_json(b"".join(chunks))


async def _unknown(episode: AgentEpisode, request: Request) -> Response:
    what = f"{request.method} {request.url.path[:80]} is not supported"
    raise CallRefused(what, status=404, code="unknown_url")


def _stream(events: Iterator[JsonObject]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
