"""ModelScope in miniature, by its HTTP: the files of one repository, a model or a dataset, and each of them."""

import hashlib
import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

LISTS = {"models": "repo/files", "datasets": "repo/tree"}


class ModelScopeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.serve("models", "owner/tiny", {})

    def serve(self, kind: str, repository: str, files: dict[str, bytes]) -> None:
        """Have only these files, and forget what was asked."""
        self.kind, self.repository, self.files = kind, repository, files
        self.lies: dict[str, bytes] = {}
        """Bytes that are sent in place of a file."""
        self.asked: list[tuple[str, str | None]] = []
        """File and range of each download."""
        self.cut: int | None = None
        """Bytes of a file after which the next connection ends."""
        self.lists = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listing(self) -> list[dict[str, object]]:
        folders = {name.rpartition("/")[0] for name in self.files} - {""}
        return [{"Name": name, "Path": name, "Type": "tree", "Size": 0} for name in folders] + [
            {"Name": name.rpartition("/")[2], "Path": name, "Type": "blob", "Size": len(content), "Revision": "abc"}
            | {"Sha256": hashlib.sha256(content).hexdigest()}
            for name, content in self.files.items()
        ]


class Handler(BaseHTTPRequestHandler):
    server: ModelScopeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address, server = urlsplit(self.path), self.server
        root = f"/api/v1/{server.kind}/{server.repository}"
        if address.path == f"{root}/{LISTS[server.kind]}" and server.lists:
            answer = {"Code": 200, "Success": True, "Data": {"Files": server.listing()}}
            self.send(200, json.dumps(answer).encode())
        elif address.path == f"{root}/repo":
            name = parse_qs(address.query)["FilePath"][0]
            server.asked.append((name, self.headers["Range"]))
            self.file(server.lies.get(name, server.files[name]))
        else:
            self.send(404, b'{"Code": 10010205001, "Success": false, "Message": "record not found"}')

    def file(self, content: bytes) -> None:
        if wanted := self.headers["Range"]:
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send(206, content[begin:], {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"})
        else:
            self.send(200, content)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = None
        if "/repo?" in self.path:
            cut, self.server.cut = self.server.cut, None
        self.wfile.write(body[:cut])
        self.close_connection = cut is not None

    def log_message(self, format: str, *args: object) -> None:
        pass


@cache
def modelscope_server() -> ModelScopeServer:
    """The one of this process: the client remembers the first address that it was given."""
    server = ModelScopeServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
