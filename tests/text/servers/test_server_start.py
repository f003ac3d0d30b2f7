"""Servers that are not ready in time, or never will be."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.text.servers.bench import SERVER_APIS
from tether.integrations.sglang import launch_of as launch_sglang
from tether.text.servers import InferenceServer
from tether.text.servers.engine import _Watchdog
from tether.text.servers.vllm_api import launch_of as launch_vllm

EAGER = "actor_rollout_ref.rollout.enforce_eager=True"


@pytest.mark.parametrize(
    ("kind", "options", "offered"),
    [
        ("vllm", {"enforce_eager": False}, True),
        ("vllm", {"enforce_eager": True}, False),
        ("sglang", {"disable_cuda_graph": False}, True),
        ("sglang", {"disable_cuda_graph": True}, False),
    ],
)
def test_one_that_needs_longer_names_both_ways_out(
    tmp_path: Path, kind: str, options: dict[str, object], offered: bool
) -> None:
    slow = tmp_path / "python"
    folder = tmp_path / "folder"
    slow.write_text(f'#!/bin/sh\necho still compiling\necho "$VLLM_RPC_BASE_PATH" > {folder}\nexec sleep 60\n')
    slow.chmod(0o755)
    launch_of = launch_vllm if kind == "vllm" else launch_sglang
    server = InferenceServer(SERVER_APIS[kind], launch_of(slow, tmp_path / "server.log", options, {}), 1.0)
    with pytest.raises(
        ValueError, match=r"no (vLLM|SGLang) server answers within .*server_timeout=1 seconds"
    ) as caught:
        server.wait_ready()
    said = str(caught.value)
    assert "Its process was still at work" in said
    assert "larger actor_rollout_ref.rollout.server_timeout" in said
    assert (EAGER in said) == offered
    assert "still compiling" in said
    sockets = folder.read_text().strip()
    assert bool(sockets) == (kind == "vllm")
    assert not sockets or not Path(sockets).exists()


def test_a_program_that_is_no_server_of_models_is_not_waited_for() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:  # which answers 501 to everything
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = InferenceServer(SERVER_APIS["vllm"], f"http://127.0.0.1:{other.server_port}", 30.0)
        with pytest.raises(ValueError, match=r"/health: HTTP 501: .* This is not a vLLM server that tether can use"):
            server.wait_ready()
        other.shutdown()


@pytest.mark.parametrize("kind", SERVER_APIS)
def test_a_server_that_hangs_is_noticed_when_its_patience_ends(kind: str) -> None:
    """It takes connections, and answers none of the looks at it."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        hangs = InferenceServer(SERVER_APIS[kind], f"http://127.0.0.1:{there.getsockname()[1]}", 60, token_timeout=2)
        begun, watch = time.monotonic(), _Watchdog([hangs])
        while not watch.hanging({hangs}):
            time.sleep(0.05)
        assert 2 <= time.monotonic() - begun < 20
