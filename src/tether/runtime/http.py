"""JSON to and from the servers of others, each request with a time limit that nothing on the way can stretch."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_ANSWER = 1 << 24
"""Bytes of the longest answer that is read."""


class NoAnswer(Exception):
    """No whole answer came: nothing listens, the connection broke off, or the time was up."""


@dataclass(frozen=True)
class Answer:
    """A server's answer."""

    status: int
    body: bytes
    retry_after: str | None
    """Its header of this name: seconds, or a date."""
    location: str | None = None
    """Its header of this name, of a redirection."""


def check_address(url: str, key: str) -> None:
    """Refuse what is no address of HTTP.

    Raises:
        ValueError: names the configuration's `key`.
    """
    if why := _no_address(url):
        shown = re.sub(r"//[^/]*@", "//***@", ascii(url)[1:-1])
        raise ValueError(f"{key}: {shown} is no address: {why}")


def _no_address(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        return str(error.__cause__ or error)
    if parts.scheme not in ("http", "https") or not host:
        return "give http://HOST:PORT or https://HOST, with the path in it"
    if "@" in parts.netloc:
        return "it has a user name or password, which would be saved with the run and is never sent; leave it out"
    if not _is_plain(host + parts.path + parts.query) or " " in url:
        return "it has spaces or letters beyond ASCII; write them as in a browser's address, with percent signs"
    return None


def _is_plain(text: str) -> bool:
    """Whether a line of HTTP can carry it."""
    return text.isascii() and text.isprintable()


def check_listening(url: str, key: str, within: float = 10.0) -> None:
    """Refuse an address where nothing listens.

    Raises:
        ValueError: names the configuration's `key`.
    """
    check_address(url, key)
    parts = urlsplit(url)
    assert parts.hostname
    try:
        socket.create_connection((parts.hostname, parts.port or _PORTS[parts.scheme]), within).close()
    except OSError as error:
        raise ValueError(f"{key}: nothing answers at {url} ({error}); start the server, or correct the address") from (
            error
        )


def secret_from(variable: str | None, key: str) -> str | None:
    """The value of an environment variable that the configuration's `key` names; None where it names none.

    Raises:
        ValueError: it is not set, or no header can carry it. The value is not shown, nor is what may be the key itself.
    """
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise ValueError(
            f"{key}: is no name of an environment variable. Put the key into one, such as JUDGE_KEY, and name that here"
        )
    value = os.environ.get(variable)
    if not value:
        raise ValueError(f"{key}={variable}: this environment variable is not set; set it, or leave the key out")
    if not _is_plain(value) or value != value.strip():
        raise ValueError(
            f"{key}={variable}: this environment variable holds what no key has, such as a line break or space at its "
            "end or a letter beyond ASCII; set it again without"
        )
    return value


def post_json(url: str, body: object, headers: Mapping[str, str], within: float) -> Answer:
    """Send JSON, and wait for the whole answer.

    Args:
        url: http or https; redirections are answers.
        body: what JSON can write.
        headers: beside the type of the content.
        within: seconds for all of it. A server that sends a byte now and then does not stretch them.

    Raises:
        NoAnswer: see there.
    """
    if not all(map(_is_plain, headers.values())):
        raise NoAnswer("no request, for one of its headers has a line break or a letter beyond ASCII")
    parts, until = urlsplit(url), time.monotonic() + within
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname
    connection = kind(parts.hostname, parts.port, timeout=within)
    late = threading.Event()
    opened: list[socket.socket] = []  # of which `connection` forgets one that is closed behind the answer
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"

    def cut() -> None:
        late.set()
        for one in opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(within, cut)
    watch.daemon = True
    watch.start()
    try:
        connection.connect()
        opened.append(connection.sock)
        connection.sock.settimeout(max(until - time.monotonic(), 1e-3))
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        content = response.read(MAX_ANSWER + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = (
            f"no answer within {within:.3g} s" if late.is_set() or isinstance(error, TimeoutError) else _words(error)
        )
        raise NoAnswer(reason) from error
    finally:
        watch.cancel()
        connection.close()
    if late.is_set():  # a body without a length ends where the connection was cut
        raise NoAnswer(f"no answer within {within:.3g} s")
    if response.length and len(content) <= MAX_ANSWER:  # reading up to a limit does not say it
        raise NoAnswer(f"IncompleteRead: the connection ended {response.length} bytes before the answer")
    if len(content) > MAX_ANSWER:
        raise NoAnswer(f"an answer of more than {MAX_ANSWER / 2**20:.0f} MiB")
    return Answer(response.status, content, response.headers.get("Retry-After"), response.headers.get("Location"))


_PORTS = {"http": 80, "https": 443}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
