"""Messages between a process and its owner: bytes behind a head that tells them from stray bytes.

What the bytes mean is up to both ends. What comes from a process that runs a user's code is read as plain data, never
as a pickle: unpickling can run code.
"""

from __future__ import annotations

import socket
import struct

_HEAD = struct.Struct("!8sII")  # tag, number, bytes that follow
_SECONDS = struct.Struct("!d")
_BEAT = 0
_LONGEST_BEAT = 86400.0
_CHUNK = 1 << 16

TAG_BYTES = 8


class Garbled(Exception):
    """The other end sent bytes that are not the next message."""


class Channel:
    """One end of a connection; it belongs to one thread.

    Args:
        connection: a stream socket. Every call here waits if it blocks, and raises BlockingIOError if it does not.
        tag: `TAG_BYTES` random bytes that both ends know. With the tag and a count in front of every message, bytes
            that something else writes to the socket cannot be taken for an answer nor shift the answers by one.
        limit: bytes of the longest message that is received.
    """

    def __init__(self, connection: socket.socket, tag: bytes, limit: int = 2**32 - 1) -> None:
        self.connection = connection
        self._tag, self._limit = tag, limit
        self._sent = self._received = 0
        self._pending = b""  # received, but not yet a whole message
        self._long: bytearray | None = None  # a message longer than a chunk, of which so many bytes are here:
        self._filled = 0

    def frames(self, payload: bytes) -> list[bytes]:
        """The parts to write for the next message; a short one is written at once, a long one is not copied."""
        self._sent += 1
        head = _HEAD.pack(self._tag, self._sent, len(payload))
        return [head + payload] if len(payload) < _CHUNK else [head, payload]

    def send(self, payload: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        for part in self.frames(payload):
            self.connection.sendall(part)

    def beat(self, seconds: float) -> None:
        """Tell the owner that this process is alive, and that its next message or beat comes within `seconds`."""
        self.connection.sendall(_HEAD.pack(self._tag, _BEAT, _SECONDS.size) + _SECONDS.pack(seconds))

    def receive(self) -> bytes | None:
        """The owner's next message; None when the owner is gone."""
        try:
            while (message := self.take()) is None:
                if not self.fill():
                    return None
        except ConnectionError:
            return None
        assert isinstance(message, bytes), "an owner sends no beats"
        return message

    def fill(self) -> bool:
        """Read once from the connection; False at its end."""
        if self._long is None:
            part = self.connection.recv(_CHUNK)
            self._pending += part
            return bool(part)
        count = self.connection.recv_into(memoryview(self._long)[self._filled :])
        self._filled += count
        return count > 0

    def take(self) -> bytes | float | None:
        """The next whole message among what was read, or the seconds of a beat; None if there is none yet.

        Raises:
            Garbled: what was read is not the next message.
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
                raise Garbled
            return seconds
        self._received += 1
        return body

    def _read_head(self) -> bool:
        """Whether a short message is whole; begins a long one."""
        if len(self._pending) < _HEAD.size:
            if not self._tag.startswith(self._pending[:TAG_BYTES]):
                raise Garbled
            return False
        tag, number, length = _HEAD.unpack_from(self._pending)
        is_beat = number == _BEAT and length == _SECONDS.size
        if tag != self._tag or not (is_beat or number == self._received + 1) or length > self._limit:
            raise Garbled
        body = self._pending[_HEAD.size :]
        if len(body) >= length:
            return True
        if length >= _CHUNK:
            self._received += 1
            self._long, self._filled, self._pending = bytearray(length), len(body), b""
            self._long[: len(body)] = body
        return False
