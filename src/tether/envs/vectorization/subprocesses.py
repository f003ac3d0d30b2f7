"""Gymnasium environments in worker processes, each of which steps a few of them in a loop."""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.envs.protocol import ActionSpec, EnvState, EnvStep, Saved
from tether.envs.spaces.actions import check_finite
from tether.envs.vectorization.loop import SyncVectorEnv
from tether.observations import Array, Observation, ObsLayout
from tether.runtime.channel import Channel
from tether.runtime.global_rng import rng_state, seed_rng, set_rng_state
from tether.runtime.supervised import ProcessEnded, SupervisedProcess
from tether.runtime.user_files import raised_by_tether
from tether.types import StateDict

MakeVector = Callable[[int], SyncVectorEnv]
"""Number of environments -> a loop over so many."""

PATIENCE = 5.0
"""Seconds in which the processes of environments that are closed should end."""


@dataclass
class _Worker:
    process: SupervisedProcess
    rows: slice
    """Its environments."""
    failure: str | None = None
    """The end of the process before this one."""


class WorkerVectorEnv:
    """Steps N environments in processes.

    A process that ends, is not done in time, or whose environment raises, is replaced once: the episodes in it are
    lost, which their steps say by being truncated and not valid. The second time is an error.

    Args:
        id: what error messages call the environment.
        make: makes a loop over some environments, in the worker.
        make_first: the same in the first worker, which says what is wrong with them; nothing is made in this process.
        num_envs: how many in all.
        num_workers: processes, at most one for each environment.
        timeout: seconds that a process may take to make, reset or step its environments.
        holds: the loops wait for `begin` (`HeldEnv`).
        first: number of the first environment for messages, where those of a run are divided.

    Raises:
        ValueError: the environments cannot be made.
        RuntimeError: they are not made in time.
    """

    def __init__(
        self,
        id: str,
        make: MakeVector,
        num_envs: int,
        num_workers: int,
        *,
        make_first: MakeVector | None = None,
        timeout: float = 300.0,
        holds: bool = False,
        first: int = 0,
    ) -> None:
        self.id, self.num_envs, self._first = id, num_envs, first
        self._make, self._timeout, self._holds = make, timeout, holds
        self._seed = 0
        bounds = np.linspace(0, num_envs, min(num_workers, num_envs) + 1).astype(int).tolist()
        one, *others = (slice(begin, end) for begin, end in pairwise(bounds))
        self._workers = [self._start(one, make_first or make, announces=True)]
        try:
            self._workers += map(self._start, others)
            self.actions, self.layout = self._announced()
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int) -> Observation:
        """See `VectorEnv.reset`."""
        self._seed = seed
        return self.begin({n: self._seed + n for n in range(self.num_envs)})

    def begin(self, seeds: Mapping[int, int | None]) -> Observation:
        """See `HeldEnv.begin`.

        Raises:
            ValueError: tether refuses what an environment gave.
            RuntimeError: a process failed for the second time.
        """
        requests = []
        for worker in self._workers:
            first, stop = worker.rows.start, worker.rows.stop
            requests.append(("begin", {n - first: seed for n, seed in seeds.items() if first <= n < stop}))
            self._send(worker, requests[-1])
        answers = []
        for number, request in enumerate(requests):
            while isinstance(answer := self._result(number), str):
                self._replace(number, answer)
                self._send(self._workers[number], request)
            answers.append(answer)
        return _stacked(answers)

    def step(self, actions: Array) -> EnvStep:
        """See `VectorEnv.step` and `HeldEnv.step`.

        Raises:
            ValueError: see `begin`.
            RuntimeError: a process failed for the second time.
        """
        check_finite(actions, self.id)
        for worker in self._workers:
            self._send(worker, ("step", actions[worker.rows]))
        steps = []
        for number in range(len(self._workers)):
            answer = self._result(number)
            steps.append(self._lost(number, answer) if isinstance(answer, str) else answer)
        return _joined(steps)

    def render(self) -> NDArray[np.uint8]:
        """See `Renders.render`.

        Raises:
            RuntimeError: the environment shows nothing.
        """
        self._send(self._workers[0], ("render", None))
        picture: NDArray[np.uint8] | str = self._receive(self._workers[0])
        if isinstance(picture, str):
            raise RuntimeError(f"{self.id}: no picture of environment 0: its process {picture}")
        return picture

    def get_state(self) -> EnvState:
        """See `VectorEnv.get_state`; the global generators of each process are a part of it.

        The state of a process that has ended is left out, so that new episodes begin, which replaces it.
        """
        for worker in self._workers:
            self._send(worker, ("get_state", None))
        states, left_out = list[Saved](), dict[str, None]()
        for worker in self._workers:
            answer = self._receive(worker)
            if isinstance(answer, str):
                states.append(None)
                left_out[f"{self._names(worker)}, whose process {answer}"] = None
            else:
                rng, state = answer
                states.append((rng, state.data))
                left_out |= dict.fromkeys(state.left_out)
        return EnvState((self._seed, states), tuple(left_out))

    def set_state(self, data: Saved) -> None:
        """See `VectorEnv.set_state`.

        Raises:
            RuntimeError: a process died.
        """
        seed, states = data
        if len(states) != len(self._workers):
            raise ValueError(f"saved of {len(states)} processes, now {len(self._workers)}")
        saved = [(worker, state) for worker, state in zip(self._workers, states, strict=True) if state is not None]
        for worker, state in saved:
            self._send(worker, ("set_state", state))
        for worker, _ in saved:
            answer = self._receive(worker)
            if isinstance(answer, str):
                raise RuntimeError(f"{self.id}: the state of {self._names(worker)}: their process {answer}")
            if answer:
                raise answer
        self._seed = seed

    def close(self) -> None:
        """See `VectorEnv.close`."""
        for worker in self._workers:
            worker.process.finish()
        end = time.monotonic() + PATIENCE
        for worker in self._workers:
            worker.process.close(end - time.monotonic())

    def _announced(self) -> tuple[ActionSpec, ObsLayout]:
        """The description that the first worker gives of its environments."""
        first = self._workers[0]
        with contextlib.suppress(ProcessEnded):
            first.process.send(b"", self._timeout + PATIENCE)  # its own deadline, which says more, comes before
        answer = self._result(0)
        if isinstance(answer, str):
            raise ValueError(f"{self.id}: the process of {self._names(first)}, making them, {answer}")
        announced: tuple[ActionSpec, ObsLayout] = answer
        return announced

    def _start(self, rows: slice, make: MakeVector | None = None, *, announces: bool = False) -> _Worker:
        # Each process begins with global generators of its own, which follow from those of the run.
        seed = random.getrandbits(32)
        count = rows.stop - rows.start
        serve = partial(
            _serve, make=make or self._make, count=count, timeout=self._timeout, seed=seed, announces=announces
        )
        return _Worker(SupervisedProcess.fork(serve), rows)

    def _send(self, worker: _Worker, request: object) -> None:
        with contextlib.suppress(ProcessEnded):  # as receiving its answer will say
            worker.process.send(pickle.dumps(request), self._timeout)

    def _receive(self, worker: _Worker) -> Any:
        """A worker's answer; text where it failed: how."""
        try:
            return pickle.loads(worker.process.receive())
        except ProcessEnded as end:
            return end.reason

    def _result(self, number: int) -> Any:
        """As `_receive`.

        Raises:
            ValueError, RuntimeError: by which tether refused an environment there.
        """
        answer = self._receive(self._workers[number])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _replace(self, number: int, how: str) -> None:
        failed = self._workers[number]
        failed.process.close()
        names = f"{self.id}: the process of {self._names(failed)}"
        if failed.failure is not None:
            raise RuntimeError(f"{names} failed twice. First it {failed.failure}. Then it {how}.")
        warnings.warn(f"{names} {how}. It is replaced, and its episodes are lost", RuntimeWarning, stacklevel=4)
        self._workers[number] = self._start(failed.rows)
        self._workers[number].failure = how

    def _names(self, worker: _Worker) -> str:
        return f"environments {self._first + worker.rows.start} to {self._first + worker.rows.stop - 1}"

    def _lost(self, number: int, how: str) -> EnvStep:
        """Replace a process; returns the step in which its episodes were lost."""
        self._replace(number, how)
        worker = self._workers[number]
        count = worker.rows.stop - worker.rows.start
        obs = {part.name: part.zeros(count) for part in self.layout}
        if not self._holds:
            seeds = {i: self._seed + self.num_envs + worker.rows.start + i for i in range(count)}
            self._send(worker, ("begin", seeds))
            obs = self._receive(worker)
            if isinstance(obs, str):
                self._replace(number, obs)
        no = np.zeros(count, dtype=np.bool_)
        return EnvStep(obs, np.zeros(count, dtype=np.float32), no, ~no, final_obs=obs, valid=no)


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
        if field.name == "told":
            counts = [len(step.reward) for step in steps]
            parts = [part or dict.fromkeys(known, np.full(n, np.nan)) for part, n in zip(parts, counts, strict=True)]
            columns["told"] = {name: np.concatenate([part[name] for part in parts]) for name in known}
            continue
        if isinstance(known, dict):  # where no episode ended, the rows of the last observations mean nothing
            columns[field.name] = _stacked([part or step.obs for step, part in zip(steps, parts, strict=True)])
            continue
        columns[field.name] = np.concatenate(
            [
                missing((len(step.reward), *known.shape[1:]), dtype=known.dtype) if part is None else part
                for step, part in zip(steps, parts, strict=True)
            ]
        )
    return EnvStep(**columns)


def _stacked(parts: list[Observation]) -> Observation:
    """The observations of all workers, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _serve(channel: Channel, make: MakeVector, count: int, timeout: float, seed: int, announces: bool) -> None:
    """Answer the requests of the owner until it is gone.

    A worker that announces its environments answers first what they are, or the error by which tether refuses them.
    """

    def answer(what: object) -> None:
        channel.send(pickle.dumps(what))

    def refuse(error: Exception) -> bool:
        refuses = type(error) in (ValueError, RuntimeError) and raised_by_tether(error)
        if refuses:
            answer(error)
        return refuses

    seed_rng(seed)
    try:
        env = make(count)
    except Exception as error:
        if announces and refuse(error):
            return
        # If the first process could make none either, there is no request: its error says all, without a traceback.
        if announces or channel.receive() is not None:
            answer(f"raised {type(error).__name__}: {error}")
            raise
        return
    if announces:
        channel.receive()
        answer((env.actions, env.layout))
    try:
        channel.beat(timeout)
        while (request := channel.receive()) is not None:
            command, argument = pickle.loads(request)
            match command:
                case "begin":
                    answer(env.begin(argument))
                case "step":
                    answer(env.step(argument))
                case "render":
                    answer(env.render())
                case "get_state":
                    state = env.get_state()
                    answer((rng_state(), state))
                case "set_state":
                    answer(_take_over(env, *argument))
        env.close()
    except Exception as error:
        if not refuse(error):
            answer(f"raised {type(error).__name__}: {error}")
            raise


def _take_over(env: SyncVectorEnv, rng: StateDict, data: Saved) -> ValueError | None:
    """Set the state of a process; returns why it does not fit."""
    try:
        env.set_state(data)
    except ValueError as error:
        return error
    set_rng_state(rng)
    return None
