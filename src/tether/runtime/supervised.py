"""A process that answers requests: every wait for it has a deadline, and it never outlives its owner.

Rewards and environments run in these; so can anything else that runs a user's code or somebody's server.
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

from tether.runtime.channel import TAG_BYTES, Channel, Garbled
from tether.runtime.guard import end_descendants, exit_after, supervise
from tether.runtime.interrupt import give_up_if_interrupted

Serve = Callable[[Channel], None]
"""The work of a process: it answers what it receives from the channel, until that is None."""

# The process imports from where this one does, whatever the working directory is; nothing of __main__ is run.
_BOOT = "import sys; sys.path[:] = sys.argv[5:]; from tether.runtime.supervised import main; main()"
_SLICE = 1.0  # seconds between two looks at what may end a wait
_GRACE = 5.0  # seconds in which a guard has ended everything; it needs milliseconds


class ProcessEnded(Exception):
    """The process ended, or was ended, before it answered.

    Args:
        reason: why, as the end of a sentence about the process.
        seconds: since the request, or since the last answer to it.
        begun: the process took up the request; False: it did not live to see it.
    """

    def __init__(self, reason: str, seconds: float = 0.0, *, begun: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.seconds, self.begun = reason, seconds, begun


class SupervisedProcess:
    """A worker process with its guard; `fork` and `spawn` make one.

    Every request has a deadline, up to each of its answers. Answers and beats (`Channel.beat`) set it again. When it
    passes, or the process sends what is no message, the process is killed with everything that it started: one that is
    stopped, or keeps its interpreter lock, or never stops sending, ends like any other.
    `stop` may be called from any thread; everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        guard: int,
        channel: socket.socket,
        control: socket.socket,
        tag: bytes,
        limit: int,
        longest_beat: float = math.inf,
    ) -> None:
        channel.setblocking(False)
        self._longest_beat = longest_beat
        self._guard, self._control = guard, control
        self._channel = Channel(channel, tag, limit)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._within = self._asked = self._due = math.inf
        self._begun = True
        self._is_closed = False
        self._ended = ProcessEnded("was ended by its owner", begun=False)  # raised once it is closed

    @classmethod
    def fork(cls, serve: Serve, *, limit: int = 2**32 - 1) -> SupervisedProcess:
        """A copy of this process that runs `serve`.

        Args:
            serve: see `Serve`.
            limit: bytes of its longest answer.
        """
        channel, its_channel = socket.socketpair()
        control, its_control = socket.socketpair()
        tag, owner = secrets.token_bytes(TAG_BYTES), os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be an object of the user's, or None
                stream.flush()  # else the copy has the same text to write
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
        longest_beat: float = math.inf,
        environment: dict[str, str] | None = None,
    ) -> SupervisedProcess:
        """Run ``module:function`` in a new interpreter.

        Args:
            serve: names a `Serve`.
            limit: bytes of its longest answer.
            longest_beat: seconds for which a beat counts at most. A user's code in the process could send one of a day,
                and then hang.
            environment: variables that differ from those of this process.
        """
        channel, its_channel = socket.socketpair()
        control, its_control = socket.socketpair()
        tag = secrets.token_bytes(TAG_BYTES)
        descriptors = (its_channel.fileno(), its_control.fileno())
        channel.sendall(tag)  # and not as an argument, which any code in the process can read
        search_path = [os.path.abspath(folder) for folder in sys.path]
        guard = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, descriptors), str(os.getpid()), serve, *search_path],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        guard.returncode = 0  # it is reaped here, not by subprocess
        its_channel.close()
        its_control.close()
        return cls(guard.pid, channel, control, tag, limit, longest_beat)

    def send(self, request: bytes, within: float) -> None:
        """Send a request.

        Args:
            request: for `Channel.receive`.
            within: seconds up to its first answer or beat, and from each to the next.

        Raises:
            ProcessEnded: it did not take the request.
        """
        self._within, self._asked, self._begun = within, time.monotonic(), False
        self._due = self._asked + within
        if self._is_closed:
            raise self._ended
        for part in self._channel.frames(request):
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[self._channel.connection.send(rest) :]
                except BlockingIOError:
                    self._wait_for(select.POLLOUT)
                except OSError:
                    raise self._end() from None

    def receive(self) -> bytes:
        """The next answer to the last request.

        Raises:
            ProcessEnded: there is none.
            Interrupted: a signal asks the run to stop, and there was no answer for a while.
        """
        while not self._is_closed:
            try:
                message = self._channel.take()
            except Garbled:
                raise self._end("sent bytes that are no answer, so it was killed") from None
            if message is None:
                self._fill()
                continue
            self._begun, self._asked = True, time.monotonic()
            if isinstance(message, bytes):
                self._due = self._asked + self._within
                return message
            self._due = self._asked + min(message, self._longest_beat)
        raise self._ended

    def stop(self) -> None:
        """Have the process ended now; a wait for its answer ends in `ProcessEnded`."""
        with contextlib.suppress(OSError):  # already closed
            self._control.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        """Whether it ended without being asked to; `close` then says how."""
        return self._is_closed or bool(select.select([self._control], [], [], 0)[0])

    def finish(self) -> None:
        """Send nothing more: `Channel.receive` gives None to the process, which should then end by itself."""
        with contextlib.suppress(OSError):  # closed already
            self._channel.connection.shutdown(socket.SHUT_WR)

    def close(self, patience: float = 0.0) -> str:
        """End the process with all that it started, and wait for that; returns how it ended. Twice does no harm.

        Args:
            patience: seconds in which it may end by itself.
        """
        if self._is_closed:
            return ""
        self._is_closed = True
        if patience > 0:
            select.select([self._control], [], [], patience)
        self.stop()
        self._control.settimeout(_GRACE)
        verdict = b""
        try:
            while part := self._control.recv(4096):
                verdict += part
        except (TimeoutError, ConnectionError):  # the guard itself is stopped or stuck
            end_descendants(self._guard)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._guard, 9)
            os.waitpid(self._guard, 0)
        self._control.close()
        self._channel.connection.close()
        return verdict.decode() or "and its guard were killed or could not start"

    def _fill(self) -> None:
        """Read from the channel what is there, or wait until something is.

        Raises:
            ProcessEnded: the channel is at its end, or nothing came in time.
        """
        try:
            if not self._channel.fill():
                raise self._end()
        except BlockingIOError:
            self._wait_for(select.POLLIN)
        except OSError:
            raise self._end() from None

    def _wait_for(self, event: int) -> None:
        """Wait until the channel can be read or written.

        Raises:
            ProcessEnded: the deadline passed, or the guard reported.
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
            give_up_if_interrupted(self._asked)
            passed = time.monotonic() - begun
            if passed > share + _SLICE:
                self._due += passed  # this process stood still, and others may have, too
            elif begun + share >= self._due:
                raise self._end(f"gave no answer within the deadline of {self._within:g} s, so it was killed")

    def _end(self, reason: str = "") -> ProcessEnded:
        """End the process, and say why it ended: `reason`, or what its guard saw."""
        seconds = time.monotonic() - self._asked
        if not reason and not select.select([self._control], [], [], _SLICE)[0]:
            reason = "closed its connection, so it was killed"
        verdict = self.close()
        self._ended = ProcessEnded(reason or verdict, seconds, begun=self._begun)
        return self._ended


def _fork() -> int:
    """`os.fork`; the copy frees none of what the owner no longer uses: of a simulator, that can crash a copy."""
    collects = gc.isenabled()
    gc.disable()  # already for what Python and libraries run in the copy before `os.fork` returns there
    try:
        process = os.fork()
        if not process:
            gc.freeze()
        return process
    finally:
        if collects:
            gc.enable()


def main() -> None:
    """Be a guard with a worker below it, in a new interpreter; see `SupervisedProcess.spawn` for the arguments."""
    channel, control, owner, serve = sys.argv[1:5]
    os.dup2(2, 1)  # prints of a user's code do not mix with the owner's
    connection = socket.socket(fileno=int(channel))
    tag = connection.recv(TAG_BYTES, socket.MSG_WAITALL)

    def work() -> None:
        module, _, function = serve.partition(":")
        getattr(import_module(module), function)(Channel(connection, tag))

    supervise(work, socket.socket(fileno=int(control)), int(owner))
