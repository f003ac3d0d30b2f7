"""Messages between a process and its owner: bytes with a header that distinguishes them from stray output.

Both ends agree on the meaning of the bytes. Data from a process that runs user code is never unpickled, because
unpickling can run code.
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("!8sII")  # tag, index of the message, length of the body
_SECONDS = struct.Struct("!d")
_BEAT = 0
_LONGEST_BEAT = 86400.0
_CHUNK = 1 << 16

TAG_BYTES = 8


class MalformedMessage(Exception):
    """The other end sent bytes that are not the expected next message."""


class Channel:
    """One end of a connection, for use by one thread.

    Args:
        connection: a stream socket. If it is blocking, calls wait; otherwise they raise BlockingIOError.
        tag: `TAG_BYTES` random bytes known to both ends. The tag and index before every message ensure that bytes which
            other code writes to the socket are not mistaken for an answer.
        limit: maximum bytes of a received message.
    """

    def __init__(self, connection: socket.socket, tag: bytes, limit: int = 2**32 - 1) -> None:
        self.connection = connection
        self._tag, self._limit = tag, limit
        self._sent = self._received = 0
        self._pending = b""  # received bytes of an incomplete message
        self._long: bytearray | None = None  # a message longer than a chunk, and its number of received bytes
        self._filled = 0

    def frames(self, payload: bytes) -> list[bytes]:
        """Return the buffers to write for the next message: one for a short message, two for a long one, to avoid a
        copy.
        """
        self._sent += 1
        head = _HEAD.pack(self._tag, self._sent, len(payload))
        return [head + payload] if len(payload) < _CHUNK else [head, payload]

    def send(self, payload: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        for chunk in self.frames(payload):
            self.connection.sendall(chunk)

    def beat(self, seconds: float) -> None:
        """Send a heartbeat, with the maximum seconds until the next message or heartbeat."""
        self.connection.sendall(_HEAD.pack(self._tag, _BEAT, _SECONDS.size) + _SECONDS.pack(seconds))

    def receive(self) -> bytes | None:
        """Wait for the owner's next message; return None when the owner has closed the connection or died."""
        try:
            while (message := self.take()) is None:
                if not self.fill():
                    return None
        except ConnectionError:
            return None
        assert isinstance(message, bytes), "an owner sends no beats"
        return message

    def fill(self) -> bool:
        """Read once from the connection; return False at its end."""
        if self._long is None:
            chunk = self.connection.recv(_CHUNK)
            self._pending += chunk
            return bool(chunk)
        count = self.connection.recv_into(memoryview(self._long)[self._filled :])
        self._filled += count
        return count > 0

    def take(self) -> bytes | float | None:
        """Return the next complete message, the seconds of a heartbeat, or None if neither has been read yet.

        Raises:
            MalformedMessage: the bytes are not the expected next message.
        """
        if self._long is None and not self._read_head():
            return None
        if self._long is not None:
            if self._filled < len(self._long):
                return None
            message, self._long = bytes(self._long), None
            return message
        _, number, length = _HEAD.unpack_from(self._pending)
        end = _HEAD.size + length
        body, self._pending = self._pending[_HEAD.size : end], self._pending[end:]
        if number == _BEAT:
            seconds: float = _SECONDS.unpack(body)[0]
            if not 0 <= seconds <= _LONGEST_BEAT:
                raise MalformedMessage
            return seconds
        self._received += 1
        return body

    def _read_head(self) -> bool:
        """Return whether a short message is complete; if a long one begins, allocate its buffer."""
        if len(self._pending) < _HEAD.size:
            if not self._tag.startswith(self._pending[:TAG_BYTES]):
                raise MalformedMessage
            return False
        tag, number, length = _HEAD.unpack_from(self._pending)
        is_beat = number == _BEAT and length == _SECONDS.size
        if tag != self._tag or not (is_beat or number == self._received + 1) or length > self._limit:
            raise MalformedMessage
        body = self._pending[_HEAD.size :]
        if len(body) >= length:
            return True
        if length >= _CHUNK:
            self._received += 1
            self._long, self._filled, self._pending = bytearray(length), len(body), b""
            self._long[: len(body)] = body
        return False
