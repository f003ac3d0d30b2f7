"""Collects T steps of N environments into preallocated buffers, and splits them into episodes.

A decision chooses a chunk of K actions, so a rollout has C = T / K decisions. The E rollouts of a training step are
concatenated to M = E N rows. Buffers are [M, T] or [M, C]: a row is the time axis of one environment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tether.batch import EnvBatch, Episode
from tether.config.schema import AlgorithmConfig
from tether.control.envs.config import TrainEnvConfig
from tether.control.envs.protocol import (
    NO_SEED,
    DiscreteActions,
    EnvStep,
    Flags,
    Floats,
    GroupSteppedEnv,
    PolicyArrays,
    Rollout,
    RolloutRows,
    VectorEnv,
    choices_of,
)
from tether.control.policies.config import PolicyConfig
from tether.control.policies.networks import Act, Actor
from tether.observations import ACTION_MASK, Array, Observation, copied
from tether.types import StateDict


class EpisodeTracker:
    """Splits sequences of steps into episodes, which may span several rollouts.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._reward = np.zeros(num_envs)
        self._length = np.zeros(num_envs, dtype=np.int64)
        self._success = np.zeros(num_envs, dtype=np.bool_)

    @property
    def solved(self) -> NDArray[np.bool_]:
        """[N]: whether each unfinished episode has solved its task so far."""
        return self._success.copy()

    def state_dict(self) -> StateDict:
        return {name: torch.from_numpy(column) for name, column in vars(self).items()}

    def load_state_dict(self, state: StateDict) -> None:
        for name, column in state.items():
            setattr(self, name, column.numpy().copy())

    def add(
        self,
        rewards: NDArray[np.float32],
        ended: NDArray[np.bool_],
        valid: NDArray[np.bool_],
        success: NDArray[np.bool_] | None,
        reported: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> tuple[Episode, ...]:
        """Add T steps of N environments, [N, T] each, and return the episodes that ended in them.

        `reported` has the columns of `EnvStep.info_values`. Episodes whose last step is not valid were lost with their
        process and are not returned.
        """
        reward_so_far = np.cumsum(np.where(valid, rewards, 0.0), axis=1, dtype=np.float64) + self._reward[:, None]
        length_so_far = np.cumsum(valid, axis=1) + self._length[:, None]
        reward_before, length_before = np.zeros_like(self._reward), np.zeros_like(self._length)
        first = np.zeros_like(self._length)
        episodes = []
        for t, n in np.argwhere(ended.T).tolist():
            once = at_end = None
            if success is not None:
                once = bool(success[n, first[n] : t + 1].any() or self._success[n])
                at_end = bool(success[n, t])
            reward = float(reward_so_far[n, t] - reward_before[n])
            if valid[n, t]:
                info = {name: float(column[n, t]) for name, column in (reported or {}).items()}
                episodes.append(Episode(reward, int(length_so_far[n, t] - length_before[n]), once, at_end, info))
            reward_before[n], length_before[n] = reward_so_far[n, t], length_so_far[n, t]
            first[n], self._success[n] = t + 1, False
        self._reward = reward_so_far[:, -1] - reward_before
        self._length = length_so_far[:, -1] - length_before
        if success is not None:
            self._success |= np.array([success[n, first[n] :].any() for n in range(len(first))])
        return tuple(episodes)


class env_error_context:  # a class, because a generator would take as long as a step of a cheap environment
    """Context manager that adds a note to exceptions with the id of the environments and the step."""

    def __init__(self, env_id: str, step: int) -> None:
        self._where = env_id, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"raised by {self._where[0]} at step {self._where[1]} of its environments")


def invalid_data_message(env_id: str, what: str, index: int, step: int) -> str:
    """Return the error message for invalid data of environment `index`; step 0 is the first reset."""
    fix = "Fix the environment, or end its episodes before that."
    return f"{env_id}: {what} in environment {index} at step {step}. {fix}"


NOTHING_ALLOWED = f"{ACTION_MASK} allows none of the alternatives of a choice"


def forbids_all_actions(mask: Array, choices: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each mask [..., sum(choices)] whether it forbids all alternatives of any choice, [...]."""
    some = np.logical_or.reduceat(mask, np.cumsum((0, *choices[:-1])), axis=-1)
    return np.logical_not(some.all(axis=-1, keepdims=True))[..., 0]


def episode_metrics(episodes: Sequence[Episode], prefix: str, confidence: float | None = None) -> dict[str, float]:
    """Return means over episodes, under RLinf's metric names; empty without episodes.

    Args:
        episodes: finished episodes.
        prefix: ``env`` or ``eval``.
        confidence: level of confidence intervals to add, which use the standard error for means and Wilson's formula
            (1927) for success rates. None: no intervals.
    """
    if not episodes:
        return {}
    columns = {
        "return": [episode.reward for episode in episodes],
        "episode_len": [float(episode.length) for episode in episodes],
        "reward": [episode.reward / episode.length for episode in episodes],
    }
    for name in ("success_once", "success_at_end"):
        values = [float(getattr(episode, name)) for episode in episodes if getattr(episode, name) is not None]
        if values:
            columns[name] = values
    for name in episodes[0].info:
        columns[f"info/{name}"] = [episode.info[name] for episode in episodes if name in episode.info]
    metrics = {f"{prefix}/{name}": fmean(values) for name, values in columns.items()}
    metrics[f"{prefix}/num_trajectories"] = float(len(episodes))
    if confidence is not None:
        for name, values in columns.items():
            interval = _share_interval if name.startswith("success") else _mean_interval
            low, high = interval(values, NormalDist().inv_cdf(0.5 + confidence / 2))
            metrics |= {f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    return metrics


def _mean_interval(values: list[float], z: float) -> tuple[float, float]:
    mean = fmean(values)
    half = z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean - half, mean + half


def _share_interval(values: list[float], z: float) -> tuple[float, float]:
    share, count = fmean(values), len(values)
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


Finals = list[tuple[int, int, Observation]]
"""(row, step, last observation of the episode that ended there)."""


@dataclass
class _Rows:
    """Rows of the buffers, [M, T, ...] or [M, C, ...] each."""

    obs: Observation
    actions: Array
    rewards: Floats
    terminated: Flags
    truncated: Flags
    valid: Flags
    starts: Flags
    success: Flags
    seeds: NDArray[np.int64]

    def select_rows(self, rows: slice) -> _Rows:
        others = {name: buffer[rows] for name, buffer in vars(self).items() if name != "obs"}
        return _Rows(obs={name: field[rows] for name, field in self.obs.items()}, **others)


class EnvCollector:
    """Steps environments with a policy; each rollout continues where the last one ended.

    Args:
        env: the environments.
        steps: T.
        chunk: K.
        epochs: E.
        bootstrap_terminations: bootstrap terminated episodes, too, so that their last observations are also stored.
        state_width: S, the width of the policy's recurrent state.
    """

    def __init__(
        self,
        env: VectorEnv,
        steps: int,
        *,
        chunk: int = 1,
        epochs: int = 1,
        bootstrap_terminations: bool = False,
        state_width: int = 0,
    ) -> None:
        assert steps % chunk == 0, (steps, chunk)
        self.env = env
        self.steps = steps
        self.chunk = chunk
        self.epochs = epochs
        self._bootstrap_terminations = bootstrap_terminations
        columns = epochs * env.num_envs
        shape = (columns, steps)
        decisions = (columns, steps // chunk, chunk * env.actions.width)
        is_discrete = isinstance(env.actions, DiscreteActions)
        buffers = {field.name: torch.from_numpy(field.zeros(columns, steps + 1)) for field in env.layout}
        self._obs = TensorDict(buffers, batch_size=[columns, steps + 1])
        self._shown = self._obs[:, ::chunk]
        self._actions = torch.zeros(decisions, dtype=torch.int64 if is_discrete else torch.float32)
        self._rewards = torch.zeros(shape)
        self._terminated = torch.zeros(shape, dtype=torch.bool)
        self._truncated = torch.zeros(shape, dtype=torch.bool)
        self._valid = torch.ones(shape, dtype=torch.bool)
        self._starts = torch.zeros(columns, steps // chunk + 1, dtype=torch.bool)
        self._states = torch.zeros(columns, state_width)
        self._rows = _Rows(
            {name: buffer.numpy() for name, buffer in buffers.items()},
            self._actions.numpy(),
            self._rewards.numpy(),
            self._terminated.numpy(),
            self._truncated.numpy(),
            self._valid.numpy(),
            self._starts.numpy(),
            np.zeros(shape, dtype=np.bool_),
            np.full((columns, steps // chunk), NO_SEED, dtype=np.int64),
        )
        self._reports_success = self._has_reported_success = False
        self._reported: dict[str, Floats] = {}
        """Columns [N, T] of `EnvStep.info_values` in the current epoch."""
        self._now: Observation = {field.name: field.zeros(env.num_envs) for field in env.layout}
        self._state: Floats = np.zeros((env.num_envs, state_width), dtype=np.float32)
        self._fresh: Flags = np.ones(env.num_envs, dtype=np.bool_)
        """[N]: whether the next executed decision begins an episode."""
        self._seeds: NDArray[np.int64] | None = getattr(env, "seeds", None)
        """`ManualResetEnv.seeds`; None if the environments are reset together."""
        self._tracker = EpisodeTracker(env.num_envs)
        self._checked_rollout = False
        self._done = 0
        self.env_seconds = 0.0
        """Total seconds that the policy waited for environments, over all rollouts so far."""

    @classmethod
    def from_config(
        cls, env: VectorEnv, state_width: int, train: TrainEnvConfig, policy: PolicyConfig, algorithm: AlgorithmConfig
    ) -> EnvCollector:
        """Return the configured collector of these environments; `state_width` is the width of the recurrent state."""
        return cls(
            env,
            train.max_steps_per_rollout_epoch,
            chunk=policy.num_action_chunks,
            epochs=train.rollout_epoch,
            bootstrap_terminations=algorithm.bootstrap_type == "always",
            state_width=state_width,
        )

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """(E, C, N): leading dimensions of the noise of `collect`; the head's dimensions follow."""
        return self.epochs, self.steps // self.chunk, self.env.num_envs

    @property
    def nbytes(self) -> int:
        flags = self._terminated.nbytes + self._truncated.nbytes + self._valid.nbytes
        return int(self._obs.bytes() + self._actions.nbytes + self._rewards.nbytes + flags)

    def restart(self, seed: int) -> None:
        """Begin new episodes in all environments; unfinished episodes are dropped and the recurrent state is reset."""
        with env_error_context(self.env.id, self._done):
            self._now = copied(self.env.reset(seed))
        self._state.fill(0)
        self._fresh.fill(True)
        self._tracker = EpisodeTracker(self.env.num_envs)

    def state_dict(self) -> StateDict:
        """Return the state from which the next rollout continues, without the environments' state."""
        return {
            "now": {name: torch.from_numpy(field.copy()) for name, field in self._now.items()},
            "memory": torch.from_numpy(self._state.copy()),
            "fresh": torch.from_numpy(self._fresh.copy()),
            "episodes": self._tracker.state_dict(),
        } | ({} if self._seeds is None else {"seeds": torch.from_numpy(self._seeds.copy())})

    def load_state_dict(self, state: StateDict) -> None:
        """Load what `state_dict` returned; the state of the environments is restored separately."""
        self._now = {name: field.numpy().copy() for name, field in state["now"].items()}
        self._state[:], self._fresh[:] = state["memory"].numpy(), state["fresh"].numpy()
        self._tracker.load_state_dict(state["episodes"])
        if self._seeds is not None and "seeds" in state:
            self._seeds[:] = state["seeds"].numpy()

    def collect(self, act: Act, noise: Tensor, seeds: Sequence[int] = ()) -> EnvBatch:
        """Step every environment T times in each of E epochs.

        Args:
            act: the policy.
            noise: [E, C, N, ...] noise with which `act` samples.
            seeds: one seed per epoch, with which new episodes begin; empty: episodes continue.

        Raises:
            ValueError: an observation or a reward is not finite, or a mask allows nothing; the message names
                environment and step.
        """
        episodes: list[Episode] = []
        finals: Finals = []
        for epoch in range(self.epochs):
            if seeds:
                self.restart(seeds[epoch])
            new_finals, ended = self._collect_epoch(act, noise[epoch], epoch)
            finals += new_finals
            episodes += ended
            self._has_reported_success |= self._reports_success
        return EnvBatch(
            obs=self._shown,
            actions=self._actions,
            token_level_scores=self._rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            valid=self._valid,
            starts=self._starts,
            state=self._states,
            final_obs=self._final_obs(finals),
            final_at=(torch.tensor([n for n, _, _ in finals]).long(), torch.tensor([t for _, t, _ in finals]).long()),
            episodes=tuple(episodes),
            success=torch.from_numpy(self._rows.success) if self._has_reported_success else None,
            seeds=None if self._seeds is None else torch.from_numpy(self._rows.seeds),
        )

    def _collect_epoch(self, act: Act, noise: Tensor, epoch: int) -> tuple[Finals, tuple[Episode, ...]]:
        """Fill the rows of one epoch; return the final observations to bootstrap and the episodes that ended."""
        envs = self.env.num_envs
        columns = slice(epoch * envs, (epoch + 1) * envs)
        rows = self._rows.select_rows(columns)
        for name, field in self._now.items():
            rows.obs[name][:, 0] = field
        self._states.numpy()[columns] = self._state
        rows.valid.fill(True)
        rows.success.fill(False)
        self._reports_success, self._reported = False, {}
        in_groups: Any = self.env if self.chunk == 1 and len(getattr(self.env, "groups", ())) > 1 else None
        rollout: Rollout | None = getattr(self.env, "rollout", None)
        arrays = act.arrays() if rollout is not None and self.chunk == 1 and isinstance(act, Actor) else None
        try:
            if rollout is not None and arrays is not None:
                finals = self._play_in_one_call(rollout, arrays, noise.numpy(), rows)
            elif in_groups is None:
                finals = self._play(act, noise.numpy(), rows)
            else:
                finals = self._play_by_group(in_groups, act, noise.numpy(), rows)
        except ValueError:  # of a non-finite action; report a non-finite observation instead if it is the cause
            if arrays is None:
                self._refuse(_not_finite(rows, []))
            raise
        rows.starts[:, -1] = self._fresh
        self._refuse(_not_finite(rows, finals) + self._fully_masked(rows))
        if arrays is not None and not self._checked_rollout:
            self._check_actions(act, noise.numpy(), rows)
            self._checked_rollout = True
        self._done += self.steps
        success = rows.success if self._reports_success else None
        ended = rows.terminated | rows.truncated
        solved_before = self._tracker.solved
        episodes = self._tracker.add(rows.rewards, ended, rows.valid, success, self._reported)
        rows.success[:, 0] |= solved_before
        return [(columns.start + n, t, row) for n, t, row in finals], episodes

    def _play(self, act: Act, noise: Floats, rows: _Rows) -> Finals:
        """Fill the rows of one epoch step by step; return the final observations to bootstrap."""
        width, state, fresh, seeds = self.env.actions.width, self._state, self._fresh, self._seeds
        finals: Finals = []
        obs = self._now
        for t in range(self.steps):
            decision, k = divmod(t, self.chunk)
            if k == 0:
                rows.starts[:, decision] = fresh
                if seeds is not None:
                    rows.seeds[:, decision] = seeds
                state[fresh] = 0.0
                rows.actions[:, decision], state[:] = act(obs, noise[decision], state)
            step = self._step(rows.actions[:, decision, k * width : (k + 1) * width], t)
            obs = step.obs
            finals += self._write(step, rows, t, slice(0, self.env.num_envs))
        self._now = copied(obs)
        return finals

    def _play_in_one_call(self, rollout: Rollout, policy: PolicyArrays, noise: Floats, rows: _Rows) -> Finals:
        """Fill the rows of one epoch in one call of the environments' ``rollout``.

        Buffers are filled with NaN first, so that entries that the call does not write are noticed.
        """
        ((name, obs),) = rows.obs.items()
        last = np.full_like(obs[:, 1:], np.nan)
        obs[:, 1:] = rows.rewards[:] = np.nan
        start = time.perf_counter()
        with env_error_context(self.env.id, self._done + 1):
            flags = rows.terminated, rows.truncated
            try:
                rollout(policy, noise, RolloutRows(obs, rows.actions, rows.rewards, *flags, last))
            except Exception as error:
                error.add_note(f"rollout() writes obs[:, 1:], {obs[:, 1:].shape}, rewards, {rows.rewards.shape}, ...")
                raise
        self.env_seconds += time.perf_counter() - start
        ended = rows.terminated | rows.truncated
        rows.starts[:, 0], rows.starts[:, 1:-1] = self._fresh, ended[:, :-1]
        self._fresh[:], self._now = ended[:, -1], {name: obs[:, -1].copy()}
        bootstrapped = ended if self._bootstrap_terminations else rows.truncated & ~rows.terminated
        return [(n, t, {name: last[n, t].copy()}) for t, n in np.argwhere(bootstrapped.T).tolist()]

    def _check_actions(self, act: Act, noise: Floats, rows: _Rows) -> None:
        """Refuse a rollout whose actions differ from the policy's; up to 1% of them may, because of rounding."""
        ((name, obs),) = rows.obs.items()
        flat = np.swapaxes(noise, 0, 1).reshape(-1, noise.shape[-1])
        chosen, _ = act({name: obs[:, :-1].reshape(len(flat), -1)}, flat, np.zeros((len(flat), 0), np.float32))
        expected = chosen.reshape(rows.actions.shape)
        differs = ~np.isclose(rows.actions, expected, rtol=1e-2, atol=1e-3).all(axis=-1)
        if differs.mean() > 0.01:
            n, t = np.argwhere(differs)[0].tolist()
            raise ValueError(
                f"{self.env.id}: rollout() wrote the action {rows.actions[n, t].tolist()} for environment {n} at step "
                f"{self._done + t + 1}, and the policy chooses {expected[n, t].tolist()} there. Write the actions of "
                "tether.control.envs.compiled.choose_actions for the observations and the noise of the step."
            )

    def _play_by_group(self, env: GroupSteppedEnv, act: Act, noise: Floats, rows: _Rows) -> Finals:
        """Fill the rows of one epoch as `_play` does, for groups of environments that step independently.

        The policy acts for the groups that have finished their step. Before that, it waits for further groups for as
        long as its last call took, so that an expensive policy acts for many together. It always computes actions of
        all environments, and those of other groups are ignored, so results are bitwise equal to those of `_play` in
        whatever order groups finish.
        """
        groups, state, fresh, seeds = env.groups, self._state, self._fresh, self._seeds
        obs, everyone = copied(self._now), np.arange(env.num_envs)
        now = np.zeros(env.num_envs, dtype=np.int64)  # steps that each environment has finished
        finals: Finals = []
        ready, stepping = list(range(len(groups))), set[int]()
        while ready or stepping:
            begun = time.perf_counter()
            if ready:
                for which in (groups[group] for group in ready):
                    rows.starts[which, now[which.start]] = fresh[which]
                    if seeds is not None:
                        rows.seeds[which, now[which.start]] = seeds[which]
                    state[which][fresh[which]] = 0.0
                chosen, after = act(obs, noise[np.minimum(now, self.steps - 1), everyone], state)
            for group in ready:
                which, t = groups[group], int(now[groups[group].start])
                rows.actions[which, t], state[which] = chosen[which], after[which]
                with env_error_context(env.id, self._done + t + 1):
                    env.send_step(group, rows.actions[which, t])
            stepping |= set(ready)
            ready = []
            for group, step in self._receive_groups(env, stepping, time.perf_counter() - begun, int(now.min())):
                which = groups[group]
                stepping.remove(group)
                finals += self._write(step, rows, int(now[which.start]), which)
                for name, field in step.obs.items():
                    obs[name][which] = field
                now[which] += 1
                if now[which.start] < self.steps:
                    ready.append(group)
            ready.sort()
        self._now = obs
        return sorted(finals, key=lambda final: (final[1], final[0]))

    def _receive_groups(
        self, env: GroupSteppedEnv, stepping: Collection[int], extra_seconds: float, t: int
    ) -> list[tuple[int, EnvStep]]:
        """Return the groups that finish first, and those that finish up to `extra_seconds` seconds later."""
        waiting, finished, deadline = set(stepping), list[tuple[int, EnvStep]](), math.inf
        while waiting and (now := time.perf_counter()) < deadline:
            with env_error_context(env.id, self._done + t + 1):
                answers = env.receive_steps(waiting, deadline - now)
            self.env_seconds += time.perf_counter() - now
            finished += answers
            waiting -= {group for group, _ in answers}
            if answers and deadline == math.inf:
                deadline = time.perf_counter() + extra_seconds
        return finished

    def _write(self, step: EnvStep, rows: _Rows, t: int, which: slice) -> Finals:
        """Write a step of the environments `which` into their rows; return the final observations to bootstrap."""
        for name, field in step.obs.items():
            rows.obs[name][which, t + 1] = field
        rows.rewards[which, t] = step.reward
        rows.terminated[which, t], rows.truncated[which, t] = step.terminated, step.truncated
        if step.valid is not None:
            rows.valid[which, t] = step.valid
        self._fresh[which] = (self._fresh[which] & ~rows.valid[which, t]) | step.terminated | step.truncated
        if step.success is not None:
            self._reports_success, rows.success[which, t] = True, step.success
        for name, column in (step.info_values or {}).items():
            self._reported.setdefault(name, np.zeros_like(rows.rewards))[which, t] = column
        if step.final_obs is None:
            return []
        return [(which.start + n, t, _row(step.final_obs, n)) for n in self._bootstrapped(step)]

    def _step(self, actions: Array, t: int) -> EnvStep:
        start = time.perf_counter()
        with env_error_context(self.env.id, self._done + t + 1):
            step = self.env.step(actions)
        self.env_seconds += time.perf_counter() - start
        return step

    def _bootstrapped(self, step: EnvStep) -> list[int]:
        """Return the environments whose episode ended and is bootstrapped."""
        cut = step.truncated & ~step.terminated
        if self._bootstrap_terminations:
            cut = step.truncated | step.terminated
        if step.valid is not None:
            cut = cut & step.valid
        return np.flatnonzero(cut).tolist()

    def _final_obs(self, finals: Finals) -> TensorDict:
        fields = {field.name: field.zeros(len(finals)) for field in self.env.layout}
        for index, (_, _, obs) in enumerate(finals):
            for name, field in obs.items():
                fields[name][index] = field
        return TensorDict({name: torch.from_numpy(field) for name, field in fields.items()}, batch_size=[len(finals)])

    def _fully_masked(self, rows: _Rows) -> list[tuple[int, int, str]]:
        """Return step, environment and description of decisions whose mask allowed nothing."""
        choices = choices_of(self.env.actions)
        if ACTION_MASK not in rows.obs or not choices:
            return []
        nothing = forbids_all_actions(rows.obs[ACTION_MASK][:, :-1], choices) & rows.valid
        return [(t, n, NOTHING_ALLOWED) for n, t in np.argwhere(nothing).tolist()]

    def _refuse(self, bad: list[tuple[int, int, str]]) -> None:
        if bad:
            t, n, what = min(bad)
            raise ValueError(invalid_data_message(self.env.id, what, n, self._done + t))


def _not_finite(rows: _Rows, finals: Finals) -> list[tuple[int, int, str]]:
    """Return step, environment and description of non-finite values; steps that were not reached have values of an
    earlier rollout."""
    bad = [
        (t, n, f"entry {i} of the observation ({name}) is {field[n, t, i]}")
        for name, field in rows.obs.items()
        if field.dtype.kind == "f"
        for n, t, i in _non_finite_indices(field)
    ]
    bad += [(t + 1, n, f"the reward is {rows.rewards[n, t]}") for n, t in _non_finite_indices(rows.rewards)]
    bad += [
        (t + 1, n, f"entry {i} of the last observation ({name}) is {field[i]}")
        for n, t, row in finals
        for name, field in row.items()
        if field.dtype.kind == "f"
        for (i,) in _non_finite_indices(field)
    ]
    return bad


def _row(obs: Observation, n: int) -> Observation:
    """Return one observation."""
    return {name: field[n].copy() for name, field in obs.items()}


def _non_finite_indices(values: Array) -> list[list[int]]:
    """Return the indices of non-finite values."""
    fine = np.isfinite(values)
    return [] if fine.all() else np.argwhere(~fine).tolist()  # argwhere alone takes ten times as long
