"""Gymnasium environments in worker processes, each of which steps a few of them in a loop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.envs.protocol import EnvStep, Floats
from tether.envs.spaces import check_finite
from tether.envs.sync import SyncVectorEnv

MakeVector = Callable[[int], SyncVectorEnv]
"""Number of environments -> a loop over so many."""

PATIENCE = 5.0
"""Seconds after which a waiting worker looks whether its parent is alive, and in which a closed one should end."""


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    channel: Connection
    rows: slice
    """Its environments."""
    death: str | None = None
    """How the process before this one ended."""


class WorkerVectorEnv:
    """Steps N environments in processes.

    A process that dies, or whose environment raises, is replaced once: the episodes in it are lost, which their steps
    say by being truncated and not valid. The second time is an error.

    Args:
        id: what error messages call the environment.
        make: makes a loop over some environments, in the worker.
        num_envs: how many in all.
        num_workers: processes, at most one for each environment.
        holds: the loops wait for `begin` (`HeldEnv`).
        first: number of the first environment, where these are a part of more; seeds are counted from it.
    """

    def __init__(
        self, id: str, make: MakeVector, num_envs: int, num_workers: int, *, holds: bool = False, first: int = 0
    ) -> None:
        probe = make(1)  # here, so that what is wrong with the environment is raised here
        probe.close()
        self.id, self.num_envs, self.actions = id, num_envs, probe.actions
        self.obs_dim, self.layout = probe.obs_dim, probe.layout
        self._make, self._holds, self._first = make, holds, first
        self._context: BaseContext = multiprocessing.get_context()
        self._seed = 0
        bounds = np.linspace(0, num_envs, min(num_workers, num_envs) + 1).astype(int).tolist()
        self._workers = [self._start(slice(first, stop)) for first, stop in pairwise(bounds)]

    def reset(self, seed: int) -> Floats:
        """See `VectorEnv.reset`."""
        self._seed = seed + self._first
        return self.begin({n: self._seed + n for n in range(self.num_envs)})

    def begin(self, seeds: Mapping[int, int | None]) -> Floats:
        """See `HeldEnv.begin`.

        Raises:
            RuntimeError: a process died for the second time.
        """
        requests = []
        for worker in self._workers:
            first, stop = worker.rows.start, worker.rows.stop
            requests.append(("begin", {n - first: seed for n, seed in seeds.items() if first <= n < stop}))
            _send(worker, requests[-1])
        answers = []
        for number, request in enumerate(requests):
            while isinstance(answer := _receive(self._workers[number]), str):
                self._replace(number, answer)
                _send(self._workers[number], request)
            answers.append(answer)
        return np.concatenate(answers)

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """See `VectorEnv.step` and `HeldEnv.step`.

        Raises:
            RuntimeError: a process died for the second time.
        """
        check_finite(actions, self.id)
        for worker in self._workers:
            _send(worker, ("step", actions[worker.rows]))
        steps = []
        for number in range(len(self._workers)):
            answer = _receive(self._workers[number])
            steps.append(self._lost(number, answer) if isinstance(answer, str) else answer)
        return _joined(steps)

    def render(self) -> NDArray[np.uint8]:
        """See `Renders.render`.

        Raises:
            RuntimeError: the environment shows nothing.
        """
        _send(self._workers[0], ("render", None))
        picture: NDArray[np.uint8] | str = _receive(self._workers[0])
        if isinstance(picture, str):
            raise RuntimeError(f"{self.id}: no picture of environment 0: {picture or 'its process died'}")
        return picture

    def close(self) -> None:
        """See `VectorEnv.close`."""
        for worker in self._workers:
            _send(worker, None)
        for worker in self._workers:
            worker.process.join(PATIENCE)
            worker.process.kill()
            worker.channel.close()

    def _start(self, rows: slice) -> _Worker:
        channel, remote = self._context.Pipe()
        arguments = (remote, self._make, rows.stop - rows.start, os.getpid())
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        remote.close()  # so that the end of the process closes the channel
        return _Worker(process, channel, rows)

    def _replace(self, number: int, how: str) -> None:
        dead = self._workers[number]
        dead.process.join(PATIENCE)
        dead.process.kill()
        dead.channel.close()
        names = f"{self.id}: the process of environments {dead.rows.start} to {dead.rows.stop - 1}"
        how = how or f"exit code {dead.process.exitcode}"
        if dead.death is not None:
            raise RuntimeError(f"{names} died twice. First: {dead.death}. Then: {how}.")
        warnings.warn(f"{names} died ({how}) and is replaced; its episodes are lost", RuntimeWarning, stacklevel=4)
        self._workers[number] = self._start(dead.rows)
        self._workers[number].death = how

    def _lost(self, number: int, how: str) -> EnvStep:
        """Replace a process; returns the step in which its episodes were lost."""
        self._replace(number, how)
        worker = self._workers[number]
        count = worker.rows.stop - worker.rows.start
        obs = np.zeros((count, self.obs_dim), dtype=np.float32)
        if not self._holds:
            seeds = {i: self._seed + self.num_envs + worker.rows.start + i for i in range(count)}
            _send(worker, ("begin", seeds))
            obs = _receive(worker)
            if isinstance(obs, str):
                self._replace(number, obs)
        no = np.zeros(count, dtype=np.bool_)
        return EnvStep(obs, np.zeros(count, dtype=np.float32), no, ~no, final_obs=obs, valid=no)


def _send(worker: _Worker, request: object) -> None:
    with contextlib.suppress(OSError):  # it died, as receiving its answer will say
        worker.channel.send(request)


def _receive(worker: _Worker) -> Any:
    """A worker's answer; text where it died: what its environment raised, or nothing."""
    try:
        return worker.channel.recv()
    except (EOFError, OSError):
        return ""


def _joined(steps: list[EnvStep]) -> EnvStep:
    """One step of all environments."""
    columns: dict[str, Any] = {}
    for field in fields(EnvStep):
        parts = [getattr(step, field.name) for step in steps]
        if all(part is None for part in parts):
            columns[field.name] = None
            continue
        missing = np.ones if field.name == "valid" else np.zeros
        known = next(part for part in parts if part is not None)
        columns[field.name] = np.concatenate(
            [
                missing((len(step.reward), *known.shape[1:]), dtype=known.dtype) if part is None else part
                for step, part in zip(steps, parts, strict=True)
            ]
        )
    return EnvStep(**columns)


def _serve(channel: Connection, make: MakeVector, count: int, parent: int) -> None:
    """Answer the requests of the parent until it sends None or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    try:
        env = make(count)
        while (request := _next_request(channel, parent)) is not None:
            command, argument = request
            match command:
                case "begin":
                    channel.send(env.begin(argument))
                case "step":
                    channel.send(env.step(argument))
                case "render":
                    channel.send(env.render())
        env.close()
    except Exception as error:
        channel.send(f"{type(error).__name__}: {error}")
        raise


def _next_request(channel: Connection, parent: int) -> Any:
    while not channel.poll(PATIENCE):
        if os.getppid() != parent:  # killed; a closed channel would not tell, since sibling processes hold copies
            return None
    try:
        return channel.recv()
    except EOFError:
        return None
