"""JSON requests to external servers, each with a strict timeout."""

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
"""Maximum bytes of an answer."""


class NoAnswer(Exception):
    """No complete answer arrived: nothing listens, the connection was lost, or the timeout passed."""


@dataclass(frozen=True)
class HttpAnswer:
    """A server's answer."""

    status: int
    body: bytes
    retry_after: str | None
    """The Retry-After header: seconds, or a date."""
    location: str | None = None
    """The Location header of a redirection."""


def check_address(url: str, key: str) -> None:
    """Refuse an invalid HTTP address.

    Raises:
        ValueError: the message names the configuration's `key`.
    """
    if why := _no_address(url):
        shown = re.sub(r"//[^/]*@", "//***@", ascii(url)[1:-1])
        raise ValueError(f"{key}: {shown} is no address: {why}")


def _no_address(url: str) -> str | None:
    try:
        address = urlsplit(url)
        address.port  # noqa: B018 - the property checks it
        host = (address.hostname or "").encode("idna").decode()
    except ValueError as error:
        return str(error.__cause__ or error)
    if address.scheme not in ("http", "https") or not host:
        return "give http://HOST:PORT or https://HOST, with the path in it"
    if "@" in address.netloc:
        return "it has a user name or password, which would be saved with the run and is never sent; leave it out"
    if not _is_plain(host + address.path + address.query) or " " in url:
        return "it has spaces or letters beyond ASCII; write them as in a browser's address, with percent signs"
    return None


def _is_plain(text: str) -> bool:
    """Whether a text is valid in an HTTP header."""
    return text.isascii() and text.isprintable()


def check_listening(url: str, key: str, timeout: float = 10.0) -> None:
    """Refuse an address at which no server listens.

    Raises:
        ValueError: the message names the configuration's `key`.
    """
    check_address(url, key)
    address = urlsplit(url)
    assert address.hostname
    try:
        socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), timeout).close()
    except OSError as error:
        raise ValueError(f"{key}: nothing answers at {url} ({error}); start the server, or correct the address") from (
            error
        )


def read_secret(variable: str | None, key: str) -> str | None:
    """Return the value of the environment variable `variable`, configured by `key`; None if no variable is configured.

    Raises:
        ValueError: the variable is not set, or its value is invalid in a header. The message contains neither the value
            nor the configured name, which might be a secret entered by mistake.
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


def post_json(url: str, body: object, headers: Mapping[str, str], timeout: float) -> HttpAnswer:
    """Send JSON and wait for the complete answer.

    Args:
        url: an http or https address; redirections are not followed.
        body: a value that JSON can represent.
        headers: headers other than the content type.
        timeout: seconds for the complete request, even if the server keeps sending single bytes.

    Raises:
        NoAnswer: no complete answer arrived.
    """
    if not all(map(_is_plain, headers.values())):
        raise NoAnswer("no request, for one of its headers has a line break or a letter beyond ASCII")
    address, deadline = urlsplit(url), time.monotonic() + timeout
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    assert address.hostname
    connection = kind(address.hostname, address.port, timeout=timeout)
    late = threading.Event()
    opened: list[socket.socket] = []  # `connection` drops its socket if the server closes it after the answer
    path = f"{address.path or '/'}{f'?{address.query}' if address.query else ''}"

    def cut() -> None:
        late.set()
        for one in opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(timeout, cut)
    watch.daemon = True
    watch.start()
    try:
        connection.connect()
        opened.append(connection.sock)
        connection.sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        content = response.read(MAX_ANSWER + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = (
            f"no answer within {timeout:.3g} s"
            if late.is_set() or isinstance(error, TimeoutError)
            else _describe_error(error)
        )
        raise NoAnswer(reason) from error
    finally:
        watch.cancel()
        connection.close()
    if late.is_set():  # without a content length, a body looks complete when the connection is cut
        raise NoAnswer(f"no answer within {timeout:.3g} s")
    if response.length and len(content) <= MAX_ANSWER:  # reading with a limit does not raise IncompleteRead
        raise NoAnswer(f"IncompleteRead: the connection ended {response.length} bytes before the answer")
    if len(content) > MAX_ANSWER:
        raise NoAnswer(f"an answer of more than {MAX_ANSWER / 2**20:.0f} MiB")
    return HttpAnswer(response.status, content, response.headers.get("Retry-After"), response.headers.get("Location"))


_PORTS = {"http": 80, "https": 443}


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
