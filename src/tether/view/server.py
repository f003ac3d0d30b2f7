"""The server of `tether view`: read-only, on the loopback address, with a secret token in the address."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.types import JsonObject
from tether.view.alternatives import compute_alternatives, request_of
from tether.view.page import answer
from tether.view.queries import sample
from tether.view.rescoring import prepare
from tether.view.run import RunFolder

if TYPE_CHECKING:
    from starlette.applications import Starlette

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(folders: Sequence[Path], port: int, say: Callable[[str], object], reward: str | None = None) -> None:
    """Print the address, and serve runs there until the process is interrupted.

    Args:
        folders: folders of the runs.
        port: the port; 0 selects a free one.
        say: prints the address.
        reward: ``FILE.py:NAME`` of a function with which samples can be scored, in addition to the reward of their run.

    Raises:
        ValueError: the port is in use.
    """
    token = secrets.token_urlsafe(16)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; take another, or 0 for a free one") from error
        listening.listen()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
        say(f"{address}  (Ctrl-C ends it)")
        sys.stdout.flush()  # before the slow imports; the address responds once they are done

        import uvicorn

        config = uvicorn.Config(make_app(folders, token, reward), log_level="warning", access_log=False)
        uvicorn.Server(config).run([listening])


def make_app(folders: Sequence[Path], token: str, reward: str | None = None) -> Starlette:
    """Return the application that serves runs under ``/TOKEN/`` and nothing else. For `reward` see `serve`."""
    import asyncio

    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    runs = [RunFolder(folder) for folder in folders]

    def respond(content: bytes, kind: str, status: int = 200) -> Response:
        return Response(content, status, HEADERS, kind)

    def as_json(value: Any, status: int = 200) -> Response:
        text = json.dumps(value, default=str, allow_nan=False)
        return respond(text.encode(), "application/json", status)

    # These handlers are coroutines that run one at a time, so runs are read and cached without locks.
    async def page(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        file = STATIC / name
        if not secrets.compare_digest(request.path_params["token"], token) or file not in STATIC.iterdir():
            return respond(b"not found", "text/plain", 404)
        return respond(file.read_bytes(), TYPES[file.suffix])

    async def ask(request: Request) -> Response:
        if not secrets.compare_digest(request.path_params["token"], token):
            return respond(b"not found", "text/plain", 404)
        for run in runs:
            run.refresh()
        try:
            return as_json(answer(runs, request.path_params["question"], dict(request.query_params), reward))
        except (ValueError, KeyError, IndexError) as error:
            return as_json({"error": str(error)}, 400)

    computed: dict[str, JsonObject] = {}
    computing = asyncio.Lock()

    async def alternatives(request: Request) -> Response:
        if not secrets.compare_digest(request.path_params["token"], token):
            return respond(b"not found", "text/plain", 404)
        try:
            index, step, row = (int(request.query_params[name]) for name in ("run", "step", "row"))
            needed = request_of(runs[index], step, row)
            key = json.dumps(needed)
            async with computing:  # one at a time, because each loads a model
                if key not in computed:
                    computed[key] = await run_in_threadpool(compute_alternatives, needed, step)
            return as_json(computed[key])
        except (ValueError, KeyError, IndexError) as error:
            return as_json({"error": str(error)}, 400)

    async def rescored(request: Request) -> Response:
        if not secrets.compare_digest(request.path_params["token"], token):
            return respond(b"not found", "text/plain", 404)
        try:
            index, step, row = (int(request.query_params[name]) for name in ("run", "step", "row"))
            # Requests cannot name a file, so knowing the address does not allow running arbitrary code.
            function = reward if request.query_params.get("by") == "file" else None
            prepared = prepare(runs[index], [sample(runs[index], step, row)], function)
            async with computing:
                outcomes = await run_in_threadpool(prepared.score)
            return as_json(prepared.compare(outcomes))
        except (ValueError, KeyError, IndexError) as error:
            return as_json({"error": str(error)}, 400)

    async def video(request: Request) -> Response:
        index, name = int(request.path_params["run"]), request.path_params["name"]
        if not secrets.compare_digest(request.path_params["token"], token) or index >= len(runs):
            return respond(b"not found", "text/plain", 404)
        videos = {path.name: path for path in (runs[index].folder / "video").glob("*.mp4")}
        return FileResponse(videos[name], headers=HEADERS) if name in videos else respond(b"", "text/plain", 404)

    app = Starlette(
        routes=[
            Route("/{token}/", page),
            Route("/{token}/ask/alternatives", alternatives),
            Route("/{token}/ask/rescored", rescored),
            Route("/{token}/ask/{question}", ask),
            Route("/{token}/video/{run:int}/{name}", video),
            Route("/{token}/{name}", page),
        ]
    )
    # Protects against DNS rebinding: another site whose name resolves to this address cannot read from the server.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "testserver"])
    return app
