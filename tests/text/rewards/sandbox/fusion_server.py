"""A SandboxFusion server: its routes, bodies and answers. Python programs run as plain processes, as by its default."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from tempfile import NamedTemporaryFile

FIELDS = {"compile_timeout", "run_timeout", "memory_limit_MB", "code", "stdin", "language", "files", "fetch_files"}


class Server(ThreadingHTTPServer):
    """The requests that it got, and how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.busy = 0
        self.answers: object = None
        """Sent instead of the real ones: a body, its bytes, or a status."""
        self.short = False
        """The connection ends before the body does."""
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/run_code"


class Handler(BaseHTTPRequestHandler):
    """`/run_code`."""

    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            busy, self.server.busy = self.server.busy > 0, max(self.server.busy - 1, 0)
        if busy:
            self.answer(504, {"detail": "busy"})
        elif self.path != "/run_code" or "code" not in body or "language" not in body or not set(body) <= FIELDS:
            self.answer(422, {"detail": [{"loc": ["body"], "msg": "Field required", "type": "missing"}]})
        elif isinstance(self.server.answers, int):
            self.answer(self.server.answers, {"detail": "it failed"})
        else:
            self.answer(200, run(body) if self.server.answers is None else self.server.answers)

    def answer(self, code, value):
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        with self.server.lock:
            self.server.at_once -= self.command == "POST"
        self.send_response(code)
        self.send_header("Content-Length", str(len(text) + self.server.short))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Nothing."""


def run(body):
    """The answer to a program."""
    result = {"status": "Success", "message": "", "compile_result": None, "executor_pod_name": None, "files": {}}
    if body["language"] != "python":  # a compiler that takes nothing
        made = {"status": "Finished", "execution_time": 0.1, "return_code": 1, "stdout": "", "stderr": "error"}
        return result | {"status": "Failed", "compile_result": made, "run_result": None}
    begun = time.monotonic()
    try:
        with NamedTemporaryFile("w", suffix=".py") as file:
            file.write(body["code"])
            file.flush()
            ended = subprocess.run(
                [sys.executable, file.name], input=body["stdin"] or "", capture_output=True, text=True,
                timeout=body["run_timeout"], check=False,
            )  # fmt: skip
        run = {"status": "Finished", "return_code": ended.returncode, "stdout": ended.stdout, "stderr": ended.stderr}
    except subprocess.TimeoutExpired:
        run = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    failed = run["return_code"] != 0
    run["execution_time"] = time.monotonic() - begun
    return result | {"run_result": run, "status": "Failed" if failed else "Success"}


@contextmanager
def served() -> Iterator[Server]:
    """A server that runs until the block ends."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
