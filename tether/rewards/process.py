"""The trainer's handle on one reward worker and its guard (see `tether.rewards.worker` for the picture)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Pipe, wait
from typing import Any

from tether.rewards.custom import CustomReward
from tether.rewards.guard import Verdict
from tether.rewards.outcome import RewardOutcome

# The worker imports from where this process imports, whatever the working directory is; nothing of __main__ is run.
_BOOT = "import sys; sys.path[:] = sys.argv[4:]; from tether.rewards.worker import main; main()"
_GUARD_GRACE = 5.0  # seconds in which a guard has ended everything; it needs milliseconds


class WorkerDied(Exception):
    """The worker ended before it answered."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class WorkerProcess:
    """One worker. `stop` may be called from another thread; everything else belongs to one thread."""

    def __init__(self, custom: CustomReward | None, timeout: float) -> None:
        self._channel, remote_channel = Pipe()
        self._control, remote_control = socket.socketpair()
        descriptors = (remote_channel.fileno(), remote_control.fileno())
        search_path = [os.path.abspath(folder) for folder in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, descriptors), str(timeout), *search_path],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is for the trainer
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings have one order in all workers
        )
        remote_channel.close()
        remote_control.close()
        self._channel.send(custom)

    def await_ready(self, startup_timeout: float) -> None:
        """Wait until the reward function is loaded.

        Raises:
            ValueError: it cannot be loaded, or not in time.
        """
        if not wait([self._channel, self._control], startup_timeout):
            raise ValueError(f"loading the reward function took longer than {startup_timeout:g} s")
        try:
            problem: str | None = self._receive()
        except WorkerDied as death:
            raise ValueError(f"loading the reward function failed: {death}") from death
        if problem is not None:
            raise ValueError(problem)

    def run(self, requests: list[bytes]) -> Iterator[tuple[RewardOutcome, float]]:
        """Score pickled requests in order: (outcome, seconds) of each, as soon as it is known.

        Raises:
            WorkerDied: while the first request that was not yet yielded was running.
        """
        try:
            self._channel.send(requests)
        except OSError:
            raise WorkerDied(self._verdict()) from None
        for _ in requests:
            yield self._receive()

    def stop(self) -> None:
        """Tell the guard to end the worker now; a running call ends in `WorkerDied`."""
        with contextlib.suppress(OSError):  # already closed
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the worker with all that it started, and wait for it. Closing twice does no harm."""
        if self._channel.closed:
            return
        self.stop()
        self._control.settimeout(_GUARD_GRACE)
        with contextlib.suppress(TimeoutError):
            self._verdict()
        self._process.kill()  # for a guard that is stuck; the kernel ends the worker with it
        self._process.wait()
        self._control.close()
        self._channel.close()

    def _receive(self) -> Any:
        """The next message, or `WorkerDied`; what the worker sent before it died is read first."""
        wait([self._channel, self._control])
        try:
            if self._channel.poll():
                return self._channel.recv()
        except (EOFError, OSError):
            pass  # it died, perhaps in the middle of a message
        raise WorkerDied(self._verdict())

    def _verdict(self) -> Verdict:
        """What the guard says; it speaks when nothing of the worker is left, and then exits."""
        data = b""
        while part := self._control.recv(4096):
            data += part
        return Verdict.load(data)
