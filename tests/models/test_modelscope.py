"""Models of ModelScope through its own client, from a local endpoint that answers as its API does."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tether.models.language.model_path import resolve_model_path
from tether.runtime.cache import uses_modelscope

pytest.importorskip("modelscope", reason="needs the extra modelscope")

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 40}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lies: bytes | None = None
    """Sent in place of weights."""
    files = "/api/v1/models/owner/tiny/repo/files"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == self.files:
            files = [
                {"Name": name, "Path": name, "Type": "blob", "Size": len(content), "Revision": "abc"}
                | {"Sha256": hashlib.sha256(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self.send(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        elif address.path == "/api/v1/models/owner/tiny/repo":
            name = parse_qs(address.query)["FilePath"][0]
            self.send(200, self.lies if self.lies and name != "config.json" else FILES[name])
        else:
            self.send(404, b'{"Code": 10010205001, "Success": false, "Message": "record not found"}')

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One address for all tests: the client remembers the first that it was given."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(autouse=True)
def _endpoint(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VERL_USE_MODELSCOPE", raising=False)
    monkeypatch.setattr(Handler, "lies", None)


@pytest.mark.parametrize("name", ["modelscope:owner/tiny", "owner/tiny"])
def test_a_model_is_downloaded_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ":" not in name:
        monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert uses_modelscope() == (":" not in name)
    path = Path(resolve_model_path(name, tmp_path / "cache"))
    assert path.is_relative_to(tmp_path / "cache" / "modelscope")
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


def test_looking_for_a_model_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    assert resolve_model_path("modelscope:owner/tiny", cache, fetch=False) == "owner/tiny"
    assert not list(cache.rglob("*.safetensors"))
    with pytest.raises(ValueError, match=r"^owner/none: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/none", cache, fetch=False)
    resolve_model_path("modelscope:owner/tiny", cache)
    monkeypatch.setattr(Handler, "files", "/nowhere")  # it is in the cache, and not asked for again
    assert resolve_model_path("modelscope:owner/tiny", cache, fetch=False) == "owner/tiny"


def test_a_model_that_is_not_there_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^owner/none: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/none", tmp_path / "cache")
    monkeypatch.setattr(Handler, "lies", bytes(len(FILES["model.safetensors"])))
    with pytest.raises(ValueError, match=r"^owner/tiny: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/tiny", tmp_path / "damaged")


def test_a_folder_wins_and_the_hub_of_hugging_face_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / "owner" / "tiny").mkdir(parents=True, exist_ok=True)
        (tmp_path / "owner" / "tiny" / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert resolve_model_path("owner/tiny", tmp_path / "cache") == Path("owner/tiny")
    monkeypatch.delenv("VERL_USE_MODELSCOPE")
    with pytest.raises(ValueError, match="the hub"):
        resolve_model_path("someone/tiny", tmp_path / "cache")
