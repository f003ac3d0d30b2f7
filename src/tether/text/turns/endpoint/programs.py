"""The programs that play episodes: commands or Python functions, in processes that are killed with their children.

A program gets the address of the policy in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. A command
reads the row as JSON from its standard input; a function gets it as its argument. A process in which a function left a
thread or task running plays no other episode, in which it could find the new address and key. This module does not
import torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from tether.integrations import integration
from tether.runtime.channel import Channel
from tether.runtime.event_loop import event_loop, finished
from tether.runtime.guard import end_descendants
from tether.runtime.printable import install_safe_printing, printable
from tether.runtime.user_files import definition, describe_error, error_location
from tether.runtime.worker_pool import Work, WorkerPool
from tether.text.turns.config import ENDPOINT_PROGRAM, VERIFIERS
from tether.types import JsonObject

OWN_FUNCTION = r".+\.py:\w+"
POLICY_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
CLIENT_HINT = (
    "Create the client inside the function, because each episode has another OPENAI_API_KEY; "
    "or give the program as a command, such as 'python agent.py'"
)
MAX_ANSWER = 1 << 16
"""Maximum size in bytes of the report of a process on an episode."""
TAIL_BYTES = 1 << 12
"""Bytes of a command's output that are kept, from its end."""
STARTUP_SECONDS = 300.0
"""Timeout to import the file of a function."""
END_SECONDS = 0.5
"""Time for threads and tasks of an episode to end after it; replacing their process takes longer."""


@dataclass(frozen=True)
class EpisodeResult:
    """How a program ended."""

    reward: float | None = None
    """Return value of a function, or the number in the last line of a command's output."""
    error: str = ""
    """Reason why the program failed."""
    left_running: str = ""
    """Names of threads and asyncio tasks that a function left running, because of which its process is replaced."""


@dataclass(frozen=True)
class EpisodeTask:
    """An episode to play."""

    row: JsonObject
    """The row, of plain Python values."""
    environment: Mapping[str, str]
    """Environment variables with the address of the policy."""


class ProgramPool(WorkerPool[EpisodeResult]):
    """Processes that play episodes, each one at a time.

    Args:
        program: a command, a function FILE.py:NAME, or `verifiers`.
        num_workers: number of processes.
        timeout: maximum seconds of an episode.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(self, program: str, *, num_workers: int, timeout: float) -> None:
        work = Work(
            serve="tether.text.turns.endpoint.programs:serve",
            begin=lambda about: (program, timeout),
            name="program",
            load=_load,
            failed=lambda reason, _: EpisodeResult(error=reason),
            limit=MAX_ANSWER,
            max_heartbeat_seconds=timeout,
            is_last=lambda played: bool(played.left_running),
        )
        super().__init__(work, num_workers=num_workers, timeout=timeout, startup_timeout=STARTUP_SECONDS)

    def start(self, play: EpisodeTask) -> int:
        """Queue an episode and return its index, for which `take` returns how it ended."""
        return self.enqueue(pickle.dumps(play))


def _load(answer: bytes) -> EpisodeResult:
    match json.loads(answer):
        case [float() | int() | None as reward, str(error), str(left_running)]:
            return EpisodeResult(reward, error, left_running)
    raise ValueError("not the report of an episode")


def serve(channel: Channel) -> None:
    """Play episodes until the trainer is gone, or until a function left something running.

    The first message has the program and the timeout of an episode.
    """
    first = channel.receive()
    if first is None:
        return
    program, timeout = pickle.loads(first)
    install_safe_printing()
    _remove_policy_variables()  # the user's own key: clients created by the import would send it the rows
    try:
        is_function = program == VERIFIERS or re.fullmatch(OWN_FUNCTION, program)
        play = _function(program) if is_function else _command(program)
    except ValueError as error:
        channel.send(json.dumps(str(error)).encode())
        return
    channel.send(json.dumps({}).encode())
    while (message := channel.receive()) is not None:
        for payload in pickle.loads(message):
            channel.beat(timeout)  # marks the episode as started, so that it is not repeated if it ends this process
            played = play(pickle.loads(payload))
            channel.send(json.dumps([played.reward, played.error, played.left_running]).encode())
            if played.left_running:
                return


def _remove_policy_variables() -> None:
    for name in POLICY_VARIABLES:
        os.environ.pop(name, None)


def _function(program: str) -> Callable[[EpisodeTask], EpisodeResult]:
    shipped = program == VERIFIERS
    try:
        function = integration("agents", "verifiers_tasks").play if shipped else definition(program, ENDPOINT_PROGRAM)
    except ValueError as error:
        hint = f"\n{CLIENT_HINT}" if any(name in str(error) for name in POLICY_VARIABLES) else ""
        raise ValueError(f"{error}{hint}") from error
    if not callable(function):
        raise ValueError(f"{ENDPOINT_PROGRAM}={program}: is of type {type(function).__name__}, not a function")

    def play(episode: EpisodeTask) -> EpisodeResult:
        process, threads = os.getpid(), {*threading.enumerate()}
        executor = ThreadPoolExecutor(thread_name_prefix="asyncio")  # its idle threads end with the episode
        event_loop().set_default_executor(executor)
        os.environ.update(episode.environment)
        try:
            result = finished(function(episode.row))
            played = EpisodeResult(None if result is None else float(result))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, including SystemExit
            played = EpisodeResult(error=f"the program failed: {describe_error(error)[:500]}{error_location(error)}")
        finally:
            if os.getpid() != process:
                os._exit(0)  # the function forked, and the copy returned from the call
        _remove_policy_variables()
        executor.shutdown(wait=False, cancel_futures=True)
        return replace(played, left_running=_left_running(threads))

    return play


def _left_running(threads: set[threading.Thread]) -> str:
    """Return the names of asyncio tasks and of threads other than `threads` that do not end within `END_SECONDS`."""
    end = time.monotonic() + END_SECONDS
    if tasks := asyncio.all_tasks(event_loop()):
        with suppress(BaseException):  # a task may raise SystemExit
            finished(asyncio.wait(tasks, timeout=END_SECONDS))
    left = [getattr(task.get_coro(), "__qualname__", "task") for task in asyncio.all_tasks(event_loop())]
    while (alive := {*threading.enumerate()} - threads) and time.monotonic() < end:
        time.sleep(0.002)
    return ", ".join(sorted({*left, *(thread.name for thread in alive)}))[:500]


def _command(program: str) -> Callable[[EpisodeTask], EpisodeResult]:
    words = shlex.split(program)

    def play(episode: EpisodeTask) -> EpisodeResult:
        with tempfile.TemporaryFile() as row:
            row.write(json.dumps(episode.row).encode())
            row.seek(0)
            try:
                process = subprocess.Popen(
                    words,
                    stdin=row,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **episode.environment},
                    start_new_session=True,
                )
            except OSError as error:
                return EpisodeResult(error=f"the program cannot be started: {error}")
        output, errors = _Tail(process.stdout), _Tail(process.stderr)
        code = process.wait()
        end_descendants(os.getppid(), excluded=(os.getpid(),))  # processes that the program left running
        if code:
            return EpisodeResult(error=f"the program ended with exit code {code}: {errors.last_line()}")
        try:
            return EpisodeResult(float(output.last_line()))
        except ValueError:
            return EpisodeResult()

    return play


class _Tail:
    """The end of a process's output, read by a thread so that the process never blocks."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._stream, self._content = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while chunk := self._stream.read1(1 << 16):  # type: ignore[attr-defined]
                self._content = (self._content + chunk)[-TAIL_BYTES:]

    def last_line(self) -> str:
        """Return the last line, after all writing processes have ended."""
        self._thread.join()
        lines = self._content.decode("utf-8", "replace").split("\n")
        return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))
