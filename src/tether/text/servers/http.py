"""HTTP requests to a server with JSON in both directions; another thread can shut down the connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit


class ServerGone(Exception):
    """No complete response: the server is dead, hangs, dropped the connection, or failed internally (HTTP 5xx)."""


class MachineLost(ServerGone):
    """The machine of the server is gone, so that it cannot be restarted."""


class ServerSilent(ServerGone):
    """No response arrived in time."""


class ServerFailed(ServerGone):
    """The server reported an internal failure (HTTP 5xx)."""


class ConnectionLost(ServerGone):
    """The connection for weights between the server's workers and this process broke; both may be healthy."""


class NoSuchHost(ServerGone):
    """The host name has no address."""


class ServerRefuses(ValueError):
    """The server understood the request and refuses it (HTTP 4xx), or does not implement it (501)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[ServerRefuses], tuple[str, int]]:
        return type(self), (str(self), self.status)


class Connections:
    """Requests to one address. `cut` aborts all of them; messages name the `node`, if it has a name."""

    def __init__(self, url: str, node: str = "") -> None:
        address = urlsplit(url)
        assert address.hostname, url
        self.url, self.host, self.port = f"{node}: {url}" if node else url, address.hostname, address.port or 80
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def get(self, path: str, timeout: float) -> Any:
        """Return the response to a GET request; errors are those of `post`."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """Return the response to a POST request: parsed JSON, or text if it is not JSON.

        Raises:
            ServerGone: no complete response within `timeout` seconds, or a failure of the server itself
                (`ServerFailed`).
            ServerRefuses: the request is refused.
        """
        return self._request("POST", path, json.dumps(body if body is not None else {}).encode(), timeout)

    def cut(self) -> None:
        """Shut down the connections of all pending requests."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            text, status = response.read().decode(errors="replace"), response.status
        except socket.gaierror as error:
            raise NoSuchHost(f"{self.url}: {error.strerror} ({self.host})") from None
        except (OSError, http.client.HTTPException) as error:
            kind = ServerSilent if isinstance(error, TimeoutError) else ServerGone
            raise kind(f"{self.url}{path}: {type(error).__name__}: {error}") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED:
            raise ServerFailed(f"{self.url}{path}: HTTP {status}: {_message(text)}")
        if status >= 400:
            raise ServerRefuses(f"{self.url}{path}: HTTP {status}: {_message(text)}", status)
        return _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(text: str) -> str:
    """Return the text of an error in the format of OpenAI or FastAPI, or the raw response."""
    error = _parsed(text)
    if isinstance(error, dict):
        inner = error.get("error", error.get("detail", error))
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    words = str(error)
    return "a page of HTML" if words.lstrip().startswith("<") else words[:600]
