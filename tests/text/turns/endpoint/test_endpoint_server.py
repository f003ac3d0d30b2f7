"""The HTTP server, and clients that hang up."""

import json
import socket
from collections.abc import Iterator
from queue import SimpleQueue
from urllib.parse import urlsplit

import pytest

from tether.batch import Prompt
from tether.integrations.agents.endpoint_server import EndpointServer
from tether.text.turns.endpoint.episode import AgentEpisode, PendingCall
from tether.text.turns.endpoint.protocol import Completion

EPISODE = AgentEpisode(0, Prompt([1], "game", None), 0, 99, key="key")


@pytest.fixture
def calls() -> SimpleQueue[PendingCall]:
    return SimpleQueue()


@pytest.fixture
def server(calls: SimpleQueue[PendingCall]) -> Iterator[EndpointServer]:
    server = EndpointServer(
        {"key": EPISODE}.get, calls.put, model="policy", max_request_bytes=9999, takes_rewards=False
    )
    yield server
    server.close()


def ask(server: EndpointServer, **body: object) -> socket.socket:
    """Return the connection of a client that has sent a request."""
    address = urlsplit(server.url)
    content = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}], **body}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nConnection: close\r\n"
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_knows_whether_its_client_still_waits(
    server: EndpointServer, calls: SimpleQueue[PendingCall], stream: bool
) -> None:
    with ask(server, stream=stream):
        early = calls.get(timeout=60)
    assert early.disconnected.wait(60)
    assert not early.answer.set_running_or_notify_cancel(), "it is not sampled"
    with ask(server, stream=stream):
        late = calls.get(timeout=60)
        assert late.answer.set_running_or_notify_cancel()
    assert late.disconnected.wait(60), "while it is sampled"
    late.answer.set_result(Completion("7", "stop", 1, 1))
    with ask(server, stream=stream) as connection:
        waits = calls.get(timeout=60)
        assert waits.answer.set_running_or_notify_cancel()
        waits.answer.set_result(Completion("8", "stop", 1, 1))
        with connection.makefile() as answer:
            assert '"content": "8"' in answer.read().replace('":"', '": "')
    assert not waits.disconnected.is_set()
