"""Requests to a server: JSON in, JSON out, connections that another thread can cut."""

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
    """No whole answer came: the server is dead, hangs, broke off, or failed by itself (HTTP 5xx)."""


class ServerSilent(ServerGone):
    """No answer came in time."""


class ServerFailed(ServerGone):
    """It answers with a failure of its own (HTTP 5xx)."""


class ConnectionLost(ServerGone):
    """The connection by which its workers get weights broke; the server and this process may be well."""


class NoSuchHost(ServerGone):
    """The name of its host has no address."""


class ServerRefuses(ValueError):
    """The server understood the request and refuses it (HTTP 4xx), or never answers such ones (501)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connections:
    """Requests to one address. `cut` ends all of them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname, url
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def get(self, path: str, within: float) -> Any:
        """The answer to a GET; see `post`."""
        return self._ask("GET", path, None, within)

    def post(self, path: str, body: object = None, within: float = 60.0) -> Any:
        """The answer to a POST: parsed JSON, or text where it is none.

        Raises:
            ServerGone: no whole answer within this many seconds, or a failure of the server itself (`ServerFailed`).
            ServerRefuses: the request is refused.
        """
        return self._ask("POST", path, json.dumps(body if body is not None else {}).encode(), within)

    def cut(self) -> None:
        """Break off all requests that wait for an answer."""
        with self._lock:
            waiting = list(self._open)
        for connection in waiting:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: bytes | None, within: float) -> Any:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=within)
        with self._lock:
            self._open.add(connection)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            text, status = answer.read().decode(errors="replace"), answer.status
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
    """The words of an error: of OpenAI's shape, of FastAPI's, or as they came."""
    found = _parsed(text)
    if isinstance(found, dict):
        inner = found.get("error", found.get("detail", found))
        found = inner.get("message", inner) if isinstance(inner, dict) else inner
    words = str(found)
    return "a page of HTML" if words.lstrip().startswith("<") else words[:600]
