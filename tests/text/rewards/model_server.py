"""Servers that judge and score: OpenAI's chat completions, vLLM's and SGLang's /classify, vLLM's log-probs of a prompt,
and how they misbehave."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-4711"


class ModelServer(ThreadingHTTPServer):
    """The requests that it got, and how it misbehaves."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers, before it works."""
        self.judge: Callable[[str], str] = lambda text: "Score: 1"
        self.score: Callable[[Any], float] = lambda content: float(len(content))
        self.tokens: Callable[[Any], int] = len
        self.log_probs: Callable[[list[int]], list[float]] = lambda ids: [-0.5] * (len(ids) - 1)
        self.finish_reason = "stop"
        self.raw: bytes | None = None
        """Sent instead of an answer."""
        self.misbehaves = ""
        """hang, drip, drip the body, or reset."""
        self.wants_key = False
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.times.append(time.monotonic())
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            failure = self.server.failures.pop(0) if self.server.failures else None
        try:
            self.respond(body, failure)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def respond(self, body: dict[str, Any], failure: tuple[int, dict[str, str]] | None) -> None:
        if failure:
            self.send(failure[0], b'{"error": {"message": "not now"}}', failure[1])
        elif self.server.wants_key and self.headers["Authorization"] != f"Bearer {KEY}":
            sent = str(self.headers["Authorization"]).removeprefix("Bearer ")
            self.send(401, json.dumps({"error": {"message": f"Incorrect API key provided: {sent}"}}).encode())
        elif self.server.misbehaves == "hang":
            time.sleep(30)
        elif self.server.misbehaves == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(600):
                self.wfile.write(b"X-Wait: 1\r\n")
                time.sleep(0.05)
        elif self.server.misbehaves == "drip the body":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n")
            with suppress(OSError):
                for _ in range(600):
                    self.wfile.write(b" ")
                    time.sleep(0.05)
        elif self.server.misbehaves == "reset":
            self.connection.close()
        elif self.server.raw is not None:
            self.send(200, self.server.raw)
        elif self.path == "/v1/chat/completions":
            self.send(200, json.dumps(self.completion(body)).encode())
        elif self.path == "/v1/completions":
            self.send(200, json.dumps(self.prompt_log_probs(body)).encode())
        elif self.path == "/classify":
            self.send(200, json.dumps(self.classified(body)).encode())
        else:
            self.send(404, b'{"detail": "Not Found"}')

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.server.judge(body["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.server.finish_reason}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}

    def prompt_log_probs(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        pairs = zip(ids[1:], self.server.log_probs(ids), strict=True)
        entries = [{str(id_): {"logprob": value, "rank": 1, "decoded_token": "x"}} for id_, value in pairs]
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": [None, *entries]}
        return {"id": "1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice]}

    def classified(self, body: dict[str, Any]) -> dict[str, Any]:
        if "input_ids" in body:  # SGLang
            ids = body["input_ids"]
            return {"embedding": [self.server.score(ids)], "meta_info": {"prompt_tokens": self.server.tokens(ids)}}
        text = body["input"]
        score = {"index": 0, "label": "LABEL_0", "probs": [self.server.score(text)], "num_classes": 1}
        read = self.server.tokens(text)
        usage = {"prompt_tokens": read, "total_tokens": read, "completion_tokens": 0}
        return {"id": "1", "object": "list", "created": 1, "model": body["model"], "data": [score], "usage": usage}

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def served() -> Iterator[ModelServer]:
    """A server that runs until the block ends."""
    with ModelServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
