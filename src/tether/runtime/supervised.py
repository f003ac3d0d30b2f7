"""A process that answers requests, each with a timeout, and never outlives its owner.

Rewards, environments and other user code run in such processes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module

from tether.runtime.channel import TAG_BYTES, Channel, MalformedMessage
from tether.runtime.guard import end_descendants, exit_after, supervise
from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.package_warnings import hide_warnings_of_packages, quiet_fork

Serve = Callable[[Channel], None]
"""The work of a process: it answers the messages of the channel until it receives None."""

# The process has the import path of this one, independent of the working directory, and does not run __main__.
_BOOT = "import sys; sys.path[:] = sys.argv[6:]; from tether.runtime.supervised import main; main()"
_SLICE = 1.0  # seconds between checks for conditions that end a wait
_GRACE = 5.0  # timeout for a guard to kill all processes, which usually takes milliseconds


class ProcessEnded(Exception):
    """The process ended or was killed before it answered.

    Args:
        reason: the reason, as the end of a sentence about the process.
        seconds: seconds since the request, or since the last answer to it.
        begun: whether the process had begun the request.
    """

    def __init__(self, reason: str, seconds: float = 0.0, *, begun: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.begun = reason, seconds, begun


class SupervisedProcess:
    """A worker process with its guard; `fork` and `spawn` make one.

    Each request has a deadline for its first answer, which answers and heartbeats (`Channel.beat`) extend. When it
    passes, or if the process sends invalid data, the process and all its descendants are killed, even if it is stopped,
    holds its interpreter lock, or sends without end. `stop` may be called from any thread; everything else from one
    thread at a time.
    """

    def __init__(
        self,
        guard: int,
        channel: socket.socket,
        control: socket.socket,
        tag: bytes,
        limit: int,
        max_heartbeat_seconds: float = math.inf,
    ) -> None:
        channel.setblocking(False)
        self._max_heartbeat_seconds = max_heartbeat_seconds
        self._guard, self._control = guard, control
        self._channel = Channel(channel, tag, limit)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._timeout = self._asked = self._due = math.inf
        self._begun = True
        self._is_closed = False
        self._ended = ProcessEnded("was ended by its owner", begun=False)  # raised after `close`

    @classmethod
    def fork(cls, serve: Serve, *, limit: int = 2**32 - 1) -> SupervisedProcess:
        """Fork this process and run `serve` in the child."""
        channel, its_channel = socket.socketpair()
        control, its_control = socket.socketpair()
        tag, owner = secrets.token_bytes(TAG_BYTES), os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be a user's object, or None
                stream.flush()  # otherwise the child would write the buffered text again
        guard = _fork()
        if not guard:
            channel.close()
            control.close()
            exit_after(lambda: supervise(lambda: serve(Channel(its_channel, tag)), its_control, owner))
        its_channel.close()
        its_control.close()
        return cls(guard, channel, control, tag, limit)

    @classmethod
    def spawn(
        cls,
        serve: str,
        *,
        limit: int = 2**32 - 1,
        max_heartbeat_seconds: float = math.inf,
        environment: dict[str, str] | None = None,
        folder: str = "",
    ) -> SupervisedProcess:
        """Run ``module:function`` in a new interpreter.

        Args:
            serve: name of a `Serve` function.
            limit: maximum bytes of an answer.
            max_heartbeat_seconds: limit of a heartbeat; without it, user code could announce a day and then hang.
            environment: environment variables to change.
            folder: a folder that is removed when the process ends in any way.
        """
        channel, its_channel = socket.socketpair()
        control, its_control = socket.socketpair()
        tag = secrets.token_bytes(TAG_BYTES)
        descriptors = (its_channel.fileno(), its_control.fileno())
        channel.sendall(tag)  # not as an argument, which any code in the process could read
        search_path = [os.path.abspath(path) for path in sys.path]
        guard = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, descriptors), str(os.getpid()), serve, folder, *search_path],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        guard.returncode = 0  # this class reaps it, not subprocess
        its_channel.close()
        its_control.close()
        return cls(guard.pid, channel, control, tag, limit, max_heartbeat_seconds)

    def send(self, request: bytes, timeout: float) -> None:
        """Send a request.

        Args:
            request: the message for `Channel.receive`.
            timeout: maximum seconds until the first answer or heartbeat, and between answers.

        Raises:
            ProcessEnded: the process ended before it received the request.
        """
        self._timeout, self._asked, self._begun = timeout, time.monotonic(), False
        self._due = self._asked + timeout
        if self._is_closed:
            raise self._ended
        for frame in self._channel.frames(request):
            remaining = memoryview(frame)
            while remaining:
                try:
                    remaining = remaining[self._channel.connection.send(remaining) :]
                except BlockingIOError:
                    self._wait_for(select.POLLOUT)
                except OSError:
                    raise self._end() from None

    def receive(self) -> bytes:
        """Wait for the next answer to the last request.

        Raises:
            ProcessEnded: the process ended, or the deadline passed.
            Interrupted: a signal asked the run to stop, and there was no answer for a while.
        """
        while not self._is_closed:
            try:
                message = self._channel.take()
            except MalformedMessage:
                raise self._end("sent bytes that are no answer, so it was killed") from None
            if message is None:
                self._fill()
                continue
            self._begun, self._asked = True, time.monotonic()
            if isinstance(message, bytes):
                self._due = self._asked + self._timeout
                return message
            self._due = self._asked + min(message, self._max_heartbeat_seconds)
        raise self._ended

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors of which one becomes readable when `receive` can return or raise."""
        return () if self._is_closed else (self._channel.connection.fileno(), self._control.fileno())

    def stop(self) -> None:
        """Kill the process now; if another thread waits for its answer, it gets `ProcessEnded`."""
        with contextlib.suppress(OSError):  # closed already
            self._control.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        """Whether the process ended by itself; `close` then returns how it ended."""
        return self._is_closed or bool(select.select([self._control], [], [], 0)[0])

    def finish(self) -> None:
        """Tell the process that there are no more requests: `Channel.receive` returns None, and it should then end."""
        with contextlib.suppress(OSError):  # closed already
            self._channel.connection.shutdown(socket.SHUT_WR)

    def close(self, timeout: float = 0.0) -> str:
        """Kill the process and its descendants, wait, and return how the process ended. It can be called twice.

        Args:
            timeout: seconds to wait first for the process to end by itself.
        """
        if self._is_closed:
            return ""
        self._is_closed = True
        if timeout > 0:
            select.select([self._control], [], [], timeout)
        self.stop()
        self._control.settimeout(_GRACE)
        verdict = b""
        try:
            while chunk := self._control.recv(4096):
                verdict += chunk
        except (TimeoutError, ConnectionError):  # the guard itself does not respond
            end_descendants(self._guard)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._guard, 9)
            os.waitpid(self._guard, 0)
        self._control.close()
        self._channel.connection.close()
        return verdict.decode() or "and its guard were killed or could not start"

    def _fill(self) -> None:
        """Read available data from the channel, waiting if there are none.

        Raises:
            ProcessEnded: the channel was closed, or the deadline passed.
        """
        try:
            if not self._channel.fill():
                raise self._end()
        except BlockingIOError:
            self._wait_for(select.POLLIN)
        except OSError:
            raise self._end() from None

    def _wait_for(self, event: int) -> None:
        """Wait until the channel is readable or writable.

        Raises:
            ProcessEnded: the deadline passed, or the guard reported the end.
        """
        channel = self._channel.connection.fileno()
        self._poll.register(channel, event)
        while True:
            begun = time.monotonic()
            share = max(0.0, min(self._due - begun, _SLICE))
            ready = [descriptor for descriptor, _ in self._poll.poll(math.ceil(1000 * share))]
            if channel in ready:
                return
            if ready:
                raise self._end()
            raise_if_interrupted(self._asked)
            passed = time.monotonic() - begun
            if passed > share + _SLICE:
                self._due += passed  # this process was stopped, and maybe the other one too
            elif begun + share >= self._due:
                raise self._end(f"gave no answer within the deadline of {self._timeout:g} s, so it was killed")

    def _end(self, reason: str = "") -> ProcessEnded:
        """Kill the process and return the error with `reason`, or with the guard's report."""
        seconds = time.monotonic() - self._asked
        if not reason and not select.select([self._control], [], [], _SLICE)[0]:
            reason = "closed its connection, so it was killed"
        verdict = self.close()
        self._ended = ProcessEnded(reason or verdict, seconds, begun=self._begun)
        return self._ended


def _fork() -> int:
    """Fork without garbage collection in the child, where freeing a simulator's objects can crash."""
    collects = gc.isenabled()
    gc.disable()  # before the fork, because hooks run in the child before `os.fork` returns
    try:
        with quiet_fork():
            process = os.fork()
        if not process:
            gc.freeze()
        return process
    finally:
        if collects:
            gc.enable()


def main() -> None:
    """Run as a guard with a worker, in a new interpreter started by `SupervisedProcess.spawn`."""
    channel, control, owner, serve, folder = sys.argv[1:6]
    hide_warnings_of_packages()
    os.dup2(2, 1)  # keeps the output of user code out of the owner's standard output
    connection = socket.socket(fileno=int(channel))
    tag = connection.recv(TAG_BYTES, socket.MSG_WAITALL)

    def work() -> None:
        module, _, function = serve.partition(":")
        getattr(import_module(module), function)(Channel(connection, tag))

    supervise(work, socket.socket(fileno=int(control)), int(owner), folder)
