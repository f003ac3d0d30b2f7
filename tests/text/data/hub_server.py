"""A Hugging Face hub in miniature, by its HTTP: a listing, and files behind a redirect to where they lie."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "5f0f2c1a9d3e4b7c8d6e0a1b2c3d4e5f60718293"


class HubServer(ThreadingHTTPServer):
    """The files of its only repository; large ones are kept apart, by their hash, as a hub does."""

    daemon_threads = True

    def __init__(self, repository: str, files: dict[str, bytes], large: int = 100, kind: str = "dataset") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.api = f"/api/{kind}s/{repository}"
        self.resolve = f"{'' if kind == 'model' else f'/{kind}s'}/{repository}/resolve/"
        self.repository, self.files, self.large, self.commit = repository, files, large, COMMIT
        self.lies: dict[str, bytes] = {}
        """Bytes that are sent in place of a file."""
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and range of each request."""
        self.cut: int | None = None
        """Bytes of a file after which the connection stands still."""
        self.is_cut, self.goes_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sibling(self, path: str) -> dict[str, object]:
        content = self.files[path]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": blob}
        if len(content) >= self.large:
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 131}
        return entry


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append((self.command, path, self.headers["Range"]))
        api, resolve = self.server.api, self.server.resolve
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.server.commit}"):
            siblings = [self.server.sibling(name) for name in self.server.files]
            self.send(
                200,
                json.dumps({"id": self.server.repository, "sha": self.server.commit, "siblings": siblings}).encode(),
            )
        elif path.startswith(resolve) and (name := path.removeprefix(resolve).partition("/")[2]) in self.server.files:
            content, entry = self.server.files[name], self.server.sibling(name)
            about = {"X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
            if "lfs" in entry:
                digest = hashlib.sha256(content).hexdigest()
                about |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
                self.send(302, b"", about | {"Location": f"{self.server.url}/lfs/{name}"})
            else:
                self.file(content, about | {"ETag": f'"{entry["blobId"]}"'})
        elif path.startswith("/lfs/"):
            name = path.removeprefix("/lfs/")
            self.file(self.server.lies.get(name, self.server.files[name]), {"Accept-Ranges": "bytes"})
        elif path.startswith(f"{api}/revision/"):
            self.send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        else:
            self.send(404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def file(self, content: bytes, headers: dict[str, str]) -> None:
        status, begin = 200, 0
        if wanted := self.headers["Range"]:
            status, begin = 206, int(wanted.removeprefix("bytes=").partition("-")[0])
            if begin >= len(content):
                self.send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        self.send(status, content[begin:], headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut is not None and self.path.startswith("/lfs/"):
            self.wfile.write(body[: self.server.cut])
            self.wfile.flush()
            self.server.is_cut.set()
            self.server.goes_on.wait(60)
            body = body[self.server.cut :]
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an address the hub's."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@contextmanager
def serving(repository: str, files: dict[str, bytes], kind: str = "dataset") -> Iterator[HubServer]:
    server = HubServer(repository, files, kind=kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
