"""The server and the exported file, without a browser."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.view.hostile import PAYLOADS, write_hostile
from tether.commands.cli import app
from tether.view.export import MAX_BYTES, write_page
from tether.view.run import RunFolder
from tether.view.server import make_app


def client_of(folders: list[Path]):
    pytest.importorskip("starlette")
    pytest.importorskip("httpx")
    from starlette.testclient import TestClient

    return TestClient(make_app(folders, "token"), base_url="http://127.0.0.1")


def test_only_the_address_with_the_token_answers(planted: Path) -> None:
    client = client_of([planted / "fell"])
    page = client.get("/token/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert client.get("/token/ask/overview", params={"run": "0"}).json()["kind"] == "text"
    for path in (
        "/",
        "/other/",
        "/other/ask/runs",
        "/token/../server.py",
        "/token/ask/nothing",
        "/token/%2e%2e%2fserver.py",
    ):
        assert client.get(path).status_code in (400, 404), path
    assert client.get("/token/", headers={"Host": "evil.example"}).status_code == 400
    assert client.post("/token/ask/runs").status_code == 405
    wrong = client.get("/token/ask/samples", params={"step": "7", "where": "lenght>1"})
    assert wrong.status_code == 400
    assert "Did you mean length?" in wrong.json()["error"]


def test_the_address_is_printed_at_once_and_answers(planted: Path) -> None:
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "tether", "view", str(planted / "fell")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            address = process.stdout.readline().split()[0]
            cpu = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
            assert sum(map(int, cpu)) < 150, "hundredths of a second; a third of it on a quiet machine"
            import httpx

            for _ in range(100):
                try:
                    assert httpx.get(f"{address}ask/runs").json()["names"] == ["fell"]
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            else:
                pytest.fail("no answer")
        finally:
            process.terminate()


def test_an_exported_page_is_one_file_without_a_network(planted: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["view", str(planted / "fell"), "--export", str(file)])
    assert done.exit_code == 0
    page = file.read_text()
    assert len(page.encode()) < MAX_BYTES
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|url\(|@import""", page)
    assert "default-src 'none'" in page
    small = write_page([RunFolder(planted / "fell")], file, 300_000)
    assert file.stat().st_size < 300_000
    assert "are left out" in small
    with pytest.raises(ValueError, match="cannot be written"):
        write_page([RunFolder(planted / "fell")], tmp_path / "none" / "page.html")


def test_hostile_text_is_data(tmp_path: Path) -> None:
    """1,000 payloads come out as they went in, and none ends the element that an exported page keeps them in."""
    run = write_hostile(tmp_path / "hostile")
    rows = client_of([run]).get("/token/ask/samples", params={"step": "1", "limit": "500"}).json()["rows"]
    assert [row["response"] for row in rows] == PAYLOADS[:500]
    write_page([RunFolder(run)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 2
    data = re.search(r'id="answers">(.*?)</script>', page, re.DOTALL)
    assert data
    shown = json.loads(data[1])["samples?run=0&step=1"]["rows"]
    assert [row["response"] for row in shown] == PAYLOADS[:100]
