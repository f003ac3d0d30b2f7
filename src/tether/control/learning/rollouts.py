"""Rollouts and evaluations of a control policy in environments."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from tether.batch import EnvBatch, Episode, WeightUpdate
from tether.checkpoints import read_own
from tether.control.collecting.collector import EnvCollector, episode_metrics
from tether.control.collecting.evaluation import evaluate
from tether.control.envs.config import TrainEnvConfig
from tether.control.envs.protocol import EnvState, Floats, VectorEnv
from tether.control.learning.losses import RolloutForward, RolloutOutputs
from tether.control.policies.mlp_policy import Policy
from tether.control.policies.networks import Act
from tether.keyed_random import generator, seed_of
from tether.loop.protocol import CheckpointExtras, EvaluationResult, Experience, Progress, Rollouts, Source
from tether.metrics.timing import Timer
from tether.observations import Array, Observation
from tether.types import StateDict

POLICY, ENVIRONMENTS = "actor", "environments.pkl"
"""Folder of the policy and file of the environments in a checkpoint."""
MIN_STEPS_OF_ENDS = 16
"""Minimum number of steps of a rollout for a warning that every step ends an episode."""
RANKS = "ranks"
"""Key of the number of devices in the file of the environments."""
NOT_SAVED = (
    "the state of the environments cannot be saved completely: {}. New episodes therefore begin after each "
    "checkpoint; a run that a signal stops between two checkpoints, or whose environments keep state over "
    "reset(seed=...), does not resume exactly. A class of yours is saved with get_state() and set_state(state)."
)

OpenVideo = Callable[[str], AbstractContextManager[Callable[[], None]]]
"""Opens a video by name. The function in the context is called at the start and after each step."""


@dataclass(frozen=True)
class ControlEvaluation:
    """Evaluates a policy in environments other than those of training."""

    env: VectorEnv
    num_episodes: int
    seed: int
    confidence: float
    open_video: OpenVideo | None = None
    """Opens a video of the first environment; None: no videos."""

    def run(self, policy: Policy, name: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Run episodes without noise and return their metrics.

        Args:
            policy: the policy.
            name: name of the video.
            progress: called with (finished episodes, all episodes).
        """
        chunk = policy.spec.num_action_chunks
        with self.open_video(name) if self.open_video else nullcontext() as watch:
            episodes = evaluate(
                self.env,
                policy.acting(),
                self.num_episodes,
                self.seed,
                progress,
                chunk=chunk,
                watch=watch,
                state_width=policy.state_width,
            )
        return episode_metrics(episodes, "eval", self.confidence)


@dataclass(frozen=True)
class StartStates(Source[list[int]]):
    """Provides the seeds of the start states of each rollout, which depend only on the step."""

    seed: int
    epochs: int
    """Number of rollouts per step."""
    auto_reset: bool
    """Whether episodes continue in the next rollout; otherwise each rollout begins new ones."""

    @classmethod
    def from_config(cls, train: TrainEnvConfig) -> StartStates:
        """Return the start states of ``env.train``."""
        return cls(train.seed, train.rollout_epoch, train.auto_reset)

    def next(self, step: int) -> list[int]:
        """Return one seed for each rollout of the step, if rollouts begin new episodes."""
        if self.auto_reset:
            return []
        return [seed_of(self.seed, step, "start", epoch) for epoch in range(self.epochs)]


@dataclass(kw_only=True)
class EnvRollouts(Rollouts[Sequence[int], EnvBatch, None]):
    """Collects rollouts of a policy in environments."""

    policy: Policy
    collector: EnvCollector
    evaluation: ControlEvaluation | None
    seed: int
    """Seed of the noise of actions."""
    env_seed: int
    """Seed of the start states."""
    warn: Callable[[str], None]
    """Shows a message to the user."""
    env_steps: int = 0
    """Total number of steps of all environments so far."""
    finished: list[Episode] = field(default_factory=list)
    """Episodes that ended since metrics were last logged."""
    episodes_begin: bool = True
    """Whether new episodes begin before the next step."""
    version: int = 0
    """The version of the policy's weights."""
    ranks: int = 1
    """The number of devices over which the environments are distributed."""
    transfers: Callable[[], dict[str, float]] = dict
    """Returns metrics of the transfers between devices and this process during a step."""
    trust_pickles: bool = False
    """Whether to load the state of environments even from a checkpoint that another user could have written."""
    lasting: Tensor | None = None
    """[M]: whether any episode so far in each row of the rollouts has lasted more than one step."""
    warned_of_resets: bool = False
    sampled_ahead: RolloutForward | None = None
    """Computes the log-probs of actions in asynchronous sampling, where a copy of the policy acts. Each rollout then
    begins new episodes, so that no state of the environments is saved. None: the policy that is trained acts."""
    evaluating: bool = False
    """Whether an evaluation is running; its environments may hang, so that their state is not saved."""

    @property
    def can_evaluate(self) -> bool:
        return self.evaluation is not None

    def begin(self, step: int) -> None:
        """Begin new episodes, unless those of a checkpoint continue, and warn about state that cannot be saved."""
        if self.sampled_ahead:
            return
        if self.episodes_begin:
            self._restart(step)
        reasons = dict.fromkeys(reason for state in self._env_states().values() for reason in state.left_out)
        if reasons:
            self.warn(NOT_SAVED.format("; ".join(reasons)))

    def collect(
        self, start_seeds: Sequence[int], step: int, time: Timer, progress: Progress
    ) -> Experience[EnvBatch, None]:
        """Collect the rollouts of a step, one per epoch.

        Raises:
            ValueError: an observation or a reward is not finite; the message names environment and step.
        """
        waited, act = self.collector.env_seconds, self.policy.acting()
        with time("gen"):
            noise = self.policy.head.noise(self.collector.noise_shape, generator(self.seed, step, "noise"))
            if self.sampled_ahead:
                batch = self.collector.collect(self._reporting(act, progress), noise, start_seeds).copied()
                batch.rollout_log_probs = self.sampled_ahead(self.policy, batch).log_probs
            else:
                batch = self.collector.collect(act, noise, start_seeds)
        self._warn_of_missing_resets(batch)
        batch.policy_version = self.version
        time.seconds["env"] = self.collector.env_seconds - waited
        return Experience(batch, None)

    def _reporting(self, act: Act, progress: Progress) -> Act:
        """Return `act` with a progress report at each decision, where a run can be interrupted."""
        epochs, decisions, _ = self.collector.noise_shape
        total, done = epochs * decisions, count()

        def act_and_report(obs: Observation, noise: Floats | None, state: Floats) -> tuple[Array, Floats]:
            progress(min(next(done), total), total)
            return act(obs, noise, state)

        return act_and_report

    def _warn_of_missing_resets(self, batch: EnvBatch) -> None:
        """Warn once if every step of an environment in a rollout ends an episode, although earlier ones were longer."""
        at_once = ((batch.terminated | batch.truncated) & batch.valid).all(dim=1)
        steps, env = batch.valid.shape[1], self.collector.env
        lasting = torch.zeros_like(at_once) if self.lasting is None else self.lasting
        ends = at_once & lasting
        if steps >= MIN_STEPS_OF_ENDS and ends.any() and not self.warned_of_resets:
            self.warned_of_resets = True
            self.warn(
                f"{env.id}: environment {int(ends.int().argmax()) % env.num_envs} ended an episode in each of the last "
                f"{steps} steps, and had longer episodes before. Either it does not reset where an episode ends, or "
                "the policy ends its episodes at once."
            )
        self.lasting = lasting | ~at_once

    def metrics(
        self, experience: Experience[EnvBatch, None], outputs: RolloutOutputs | None, time: Timer
    ) -> dict[str, float]:
        steps, ended = int(experience.batch.valid.sum()), experience.batch.episodes
        self.env_steps += steps
        self.finished += ended
        speed = {"perf/env_steps": float(self.env_steps), "perf/sps": steps / time.seconds["step"]}
        # The score of this step alone, for alarms.
        score = {"env/return": fmean(episode.reward for episode in ended)} if ended else {}
        return speed | score | self.transfers() | time.metrics()

    def metrics_to_log(self) -> dict[str, float]:
        """Return metrics of the episodes that ended since the last log."""
        return episode_metrics(self.finished, "env")

    def logged(self) -> None:
        self.finished.clear()

    def load_weights(self, weights: WeightUpdate) -> None:
        weights.copy_to(self.policy)
        self.version = weights.version

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        assert self.evaluation
        self.evaluating = True
        result = EvaluationResult(self.evaluation.run(self.policy, f"step_{step}", progress))
        self.evaluating = False
        return result

    def checkpoint_extras(self, *, in_step: bool) -> CheckpointExtras:
        # If the state of the environments is incomplete, new episodes begin after the checkpoint, both in this run and
        # in a run that resumes from it. After a failed step new episodes always begin.
        if self.sampled_ahead:
            return CheckpointExtras({"episodes_begin": False})
        envs = {} if in_step else self._env_states()
        self.episodes_begin = in_step or bool(envs["train"].left_out)
        data = pickle.dumps({name: env.data for name, env in envs.items()} | {RANKS: self.ranks})
        return CheckpointExtras({"episodes_begin": self.episodes_begin}, {ENVIRONMENTS: data})

    def checkpoint_saved(self, step: int) -> None:
        """Begin new episodes if the state of the current ones could not be saved."""
        if self.episodes_begin and not self.sampled_ahead:
            self._restart(step)

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Load the state of the environments from a checkpoint.

        Environments that do not match the saved state begin new episodes, with a warning.

        Raises:
            ValueError: another user could have written the state, and the configuration does not trust it.
        """
        path = checkpoint / ENVIRONMENTS
        saved = pickle.loads(self._read_environments(path)) if path.is_file() else {}
        self.episodes_begin = "train" not in saved
        for name, env in self._envs().items():
            try:
                if name == "train" and name in saved and (ranks := saved.get(RANKS, 1)) != self.ranks:
                    raise ValueError(f"saved on {ranks} devices, now {self.ranks}")
                if name in saved:
                    env.set_state(saved[name])
            except ValueError as error:
                self.episodes_begin |= name == "train"
                self.warn(
                    f"env.{name}: not the environments that {checkpoint} was saved with ({error}); new episodes begin"
                )

    def _read_environments(self, path: Path) -> bytes:
        if self.trust_pickles:
            return path.read_bytes()
        return read_own(
            path,
            f"If your run saved it, chown it to you or run chmod go-w {path.parent} {path}; or resume with "
            "trainer.trust_checkpoint_pickle=True, which loads it as it is",
        )

    def state_dict(self) -> StateDict:
        return {
            "env_steps": self.env_steps,
            "collector": {} if self.sampled_ahead else self.collector.state_dict(),
            "episodes_begin": self.episodes_begin,
            "finished": [vars(episode) for episode in self.finished],
            "version": self.version,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.env_steps, self.version = int(state["env_steps"]), int(state["version"])
        self.episodes_begin |= state["episodes_begin"]
        self.finished = [Episode(**episode) for episode in state["finished"]]
        if not self.episodes_begin and not self.sampled_ahead:
            self.collector.load_state_dict(state["collector"])

    def _envs(self) -> dict[str, VectorEnv]:
        return {"train": self.collector.env} | ({"eval": self.evaluation.env} if self.evaluation else {})

    def _env_states(self) -> dict[str, EnvState]:
        return {name: env.get_state() for name, env in self._envs().items() if name == "train" or not self.evaluating}

    def _restart(self, step: int) -> None:
        self.collector.restart(seed_of(self.env_seed, step, "start"))
