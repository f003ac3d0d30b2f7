"""Gymnasium environments in worker processes, each of which steps some of them in a loop."""

from __future__ import annotations

import contextlib
import pickle
import random
import select
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.control.envs.conversion import check_finite
from tether.control.envs.loop import SyncVectorEnv
from tether.control.envs.protocol import NO_SEED, ActionSpec, EnvState, EnvStep, Saved
from tether.control.envs.spaces import Spaces
from tether.observations import Array, Observation, ObsLayout
from tether.runtime.channel import Channel
from tether.runtime.global_rng import rng_state, seed_rng, set_rng_state
from tether.runtime.supervised import ProcessEnded, SupervisedProcess
from tether.runtime.user_files import raised_by_tether
from tether.types import StateDict

MakeVector = Callable[[int], SyncVectorEnv]
"""Makes a loop over a number of environments."""

MAX_POLL_SECONDS = 1.0
"""Seconds without an answer after which `WorkerVectorEnv` waits for a single process, with its deadline."""
CLOSE_TIMEOUT = 5.0
"""Maximum seconds for the worker processes to end when the environments are closed."""


@dataclass
class _Worker:
    process: SupervisedProcess
    rows: slice
    """Slice of the environments that the worker steps."""
    failure: str | None = None
    """Description of how the worker's previous process failed."""


class WorkerVectorEnv:
    """Steps N environments in processes.

    A process that dies, exceeds the timeout, or whose environment raises, is replaced once. Its episodes are lost:
    their last step is truncated and not valid. The second failure is an error.

    Args:
        id: name of the environment in error messages.
        make: makes a loop over a number of environments, in the worker.
        make_first: replaces `make` in the first worker, which reports errors in the environments, because none is made
            in this process.
        num_envs: total number of environments.
        num_workers: number of processes, at most one per environment.
        timeout: maximum seconds for a process to make, reset or step its environments.
        holds: the loops wait for `begin` (`ManualResetEnv`).
        first: index of the first environment in messages, if those of a run are divided among ranks.

    Raises:
        ValueError: the environments cannot be made.
        RuntimeError: making them exceeds the timeout.
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
        self.seeds = np.full(num_envs, NO_SEED, dtype=np.int64)
        bounds = np.linspace(0, num_envs, min(num_workers, num_envs) + 1).astype(int).tolist()
        one, *others = (slice(begin, end) for begin, end in pairwise(bounds))
        self._workers = [self._start(one, make_first or make, announces=True)]
        try:
            self._workers += map(self._start, others)
            self.actions, self.layout, self.spaces = self._announced()
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int) -> Observation:
        self._seed = seed
        return self.begin({n: self._seed + n for n in range(self.num_envs)})

    def begin(self, seeds: Mapping[int, int | None]) -> Observation:
        for n, seed in seeds.items():
            self.seeds[n] = NO_SEED if seed is None else seed
        requests = []
        for worker in self._workers:
            first, stop = worker.rows.start, worker.rows.stop
            requests.append(("begin", {n - first: seed for n, seed in seeds.items() if first <= n < stop}))
            self._send(worker, requests[-1])
        answers = []
        for index, request in enumerate(requests):
            while isinstance(answer := self._result(index), str):
                self._replace(index, answer)
                self._send(self._workers[index], request)
            answers.append(answer)
        return _stacked(answers)

    def step(self, actions: Array) -> EnvStep:
        check_finite(actions, self.id)
        for worker in self._workers:
            self._send(worker, ("step", actions[worker.rows]))
        steps = []
        for index in range(len(self._workers)):
            steps.append(self._stepped(index, self._result(index)))
        return _joined(steps)

    @property
    def groups(self) -> list[slice]:
        """The environments of each process; `send_step` and `receive_steps` step them independently."""
        return [worker.rows for worker in self._workers]

    def send_step(self, group: int, actions: Array) -> None:
        """Begin a step of a group, the environments of one process, with their actions."""
        worker = self._workers[group]
        check_finite(actions, self.id, worker.rows.start)
        self._send(worker, ("step", actions))

    def receive_steps(self, stepping: Collection[int], seconds: float) -> list[tuple[int, EnvStep]]:
        """Return the finished steps of some processes; empty if none finishes within the time.

        Args:
            stepping: indices of processes that have begun a step.
            seconds: maximum time to wait for the first one, rounded down to milliseconds.
        """
        poll, owners = select.poll(), dict[int, int]()
        done = {group for group in stepping if not self._workers[group].process.descriptors}  # the process has ended
        for group in stepping:
            for descriptor in self._workers[group].process.descriptors:
                owners[descriptor] = group
                poll.register(descriptor, select.POLLIN)
        wait = 0.0 if done else min(seconds, MAX_POLL_SECONDS)
        done |= {owners[descriptor] for descriptor, _ in poll.poll(int(1000 * wait))}
        if not done and seconds > MAX_POLL_SECONDS:
            done = {next(iter(stepping))}  # `receive` checks the deadline of the process, and signals
        answers = [(group, self._result(group)) for group in sorted(done)]
        return [(group, self._stepped(group, answer)) for group, answer in answers]

    def render(self) -> NDArray[np.uint8]:
        self._send(self._workers[0], ("render", None))
        picture: NDArray[np.uint8] | str = self._receive(self._workers[0])
        if isinstance(picture, str):
            raise RuntimeError(f"{self.id}: no picture of environment 0: its process {picture}")
        return picture

    def get_state(self) -> EnvState:
        # The state includes the global generators of each process. The state of a dead process is left out, so that new
        # episodes begin, for which the process is replaced.
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
        self.seeds[:] = NO_SEED

    def close(self) -> None:
        for worker in self._workers:
            worker.process.finish()
        end = time.monotonic() + CLOSE_TIMEOUT
        for worker in self._workers:
            worker.process.close(end - time.monotonic())

    def _announced(self) -> tuple[ActionSpec, ObsLayout, Spaces]:
        """Return the actions, observations and spaces that the first worker announces."""
        first = self._workers[0]
        with contextlib.suppress(ProcessEnded):
            first.process.send(b"", self._timeout + CLOSE_TIMEOUT)  # the worker itself has an earlier deadline
        answer = self._result(0)
        if isinstance(answer, str):
            raise ValueError(f"{self.id}: the process of {self._names(first)}, making them, {answer}")
        announced: tuple[ActionSpec, ObsLayout, Spaces] = answer
        return announced

    def _start(self, rows: slice, make: MakeVector | None = None, *, announces: bool = False) -> _Worker:
        # The global generators of each process are seeded from those of the run.
        seed = random.getrandbits(32)
        count = rows.stop - rows.start
        serve = partial(
            _serve, make=make or self._make, count=count, timeout=self._timeout, seed=seed, announces=announces
        )
        return _Worker(SupervisedProcess.fork(serve), rows)

    def _send(self, worker: _Worker, request: object) -> None:
        with contextlib.suppress(ProcessEnded):  # receiving the answer will report it
            worker.process.send(pickle.dumps(request), self._timeout)

    def _receive(self, worker: _Worker) -> Any:
        """Return a worker's answer, or a description of its failure."""
        try:
            return pickle.loads(worker.process.receive())
        except ProcessEnded as end:
            return end.reason

    def _result(self, index: int) -> Any:
        """Return a worker's answer, as `_receive` does.

        Raises:
            ValueError, RuntimeError: tether refused an environment in the worker.
        """
        answer = self._receive(self._workers[index])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _replace(self, index: int, how: str) -> None:
        failed = self._workers[index]
        failed.process.close()
        names = f"{self.id}: the process of {self._names(failed)}"
        if failed.failure is not None:
            raise RuntimeError(f"{names} failed twice. First it {failed.failure}. Then it {how}.")
        warnings.warn(f"{names} {how}. It is replaced, and its episodes are lost", RuntimeWarning, stacklevel=5)
        self._workers[index] = self._start(failed.rows)
        self._workers[index].failure = how

    def _names(self, worker: _Worker) -> str:
        return f"environments {self._first + worker.rows.start} to {self._first + worker.rows.stop - 1}"

    def _stepped(self, index: int, answer: EnvStep | str) -> EnvStep:
        """Return the step of a process, or the result of `_lost` if it failed."""
        if isinstance(answer, str):
            return self._lost(index, answer)
        if answer.final_obs is not None and not self._holds:  # episodes ended, and the next ones have begun
            self.seeds[self._workers[index].rows][answer.terminated | answer.truncated] = NO_SEED
        return answer

    def _lost(self, index: int, how: str) -> EnvStep:
        """Replace a failed process, and return a step that truncates its episodes and is not valid."""
        self._replace(index, how)
        worker = self._workers[index]
        count = worker.rows.stop - worker.rows.start
        obs = {entry.name: entry.zeros(count) for entry in self.layout}
        if not self._holds:
            seeds = {i: self._seed + self.num_envs + worker.rows.start + i for i in range(count)}
            self.seeds[worker.rows] = list(seeds.values())
            self._send(worker, ("begin", seeds))
            obs = self._receive(worker)
            if isinstance(obs, str):
                self._replace(index, obs)
        no = np.zeros(count, dtype=np.bool_)
        return EnvStep(obs, np.zeros(count, dtype=np.float32), no, ~no, final_obs=obs, valid=no)


def _joined(steps: list[EnvStep]) -> EnvStep:
    """Concatenate the steps of all workers."""
    columns: dict[str, Any] = {}
    for field in fields(EnvStep):
        values = [getattr(step, field.name) for step in steps]
        if all(value is None for value in values):
            columns[field.name] = None
            continue
        missing = np.ones if field.name == "valid" else np.zeros
        example = next(value for value in values if value is not None)
        if field.name == "info_values":
            counts = [len(step.reward) for step in steps]
            values = [
                value or dict.fromkeys(example, np.full(n, np.nan)) for value, n in zip(values, counts, strict=True)
            ]
            columns["info_values"] = {name: np.concatenate([value[name] for value in values]) for name in example}
            continue
        if isinstance(example, dict):  # final_obs, whose rows are undefined where no episode ended
            columns[field.name] = _stacked([value or step.obs for step, value in zip(steps, values, strict=True)])
            continue
        columns[field.name] = np.concatenate(
            [
                missing((len(step.reward), *example.shape[1:]), dtype=example.dtype) if value is None else value
                for step, value in zip(steps, values, strict=True)
            ]
        )
    return EnvStep(**columns)


def _stacked(observations: list[Observation]) -> Observation:
    """Concatenate the observations of all workers."""
    return {name: np.concatenate([obs[name] for obs in observations]) for name in observations[0]}


def _serve(channel: Channel, make: MakeVector, count: int, timeout: float, seed: int, announces: bool) -> None:
    """Answer requests until the owner closes the channel; runs in a worker process.

    With `announces`, the worker first sends the spaces of its environments, or the error with which tether refuses
    them.
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
        if channel.receive() is None:
            return  # the first worker failed, too, and reports the error, so no traceback is needed here
        if announces and refuse(error):
            return
        answer(f"raised {type(error).__name__}: {error}")
        raise
    if announces:
        channel.receive()
        answer((env.actions, env.layout, env.spaces))
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
                    answer(_restore(env, *argument))
        env.close()
    except Exception as error:
        if not refuse(error):
            answer(f"raised {type(error).__name__}: {error}")
            raise


def _restore(env: SyncVectorEnv, rng: StateDict, data: Saved) -> ValueError | None:
    """Restore the state of a process; return the error if it does not fit."""
    try:
        env.set_state(data)
    except ValueError as error:
        return error
    set_rng_state(rng)
    return None
