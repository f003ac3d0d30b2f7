"""The training loop of a control policy.

One step: the policy acts in the environments for a while; the critic values what it saw; rewards become advantages;
actor and critic learn from them. `ControlTrainer.step` is exactly that.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.envs.protocol import EnvState, VectorEnv
from tether.keyed_random import generator, seed_of
from tether.metrics.timing import Timer
from tether.models.control.mlp_policy import Policy, save_policy
from tether.rollout.env.collector import EnvCollector
from tether.rollout.env.episodes import Episode, episode_metrics
from tether.rollout.env.evaluation import evaluate
from tether.trainer.control.rewards import RewardShaping
from tether.trainer.control.samples import SampleOptions, make_samples
from tether.trainer.loop import TrainingLoop
from tether.training.control.learner import ControlLearner, policy_within_memory

POLICY, ENVIRONMENTS = "policy", "environments.pkl"
"""In a checkpoint."""
NOT_SAVED = (
    "not all of the environments can be saved: {}. So new episodes begin after each checkpoint; a run that a signal "
    "stops between two of them, or whose environments keep state over reset(seed=...), does not resume exactly. "
    "To change that, give the class get_state() and set_state(state)."
)

OpenVideo = Callable[[str], AbstractContextManager[Callable[[], None]]]
"""Name of a video -> what to call at the start of it and after each step, until it is closed."""


@dataclass(frozen=True)
class ControlEvaluation:
    """How a policy is tested."""

    env: VectorEnv
    num_episodes: int
    seed: int
    confidence: float
    open_video: OpenVideo | None = None
    """Records the first environment; None: nothing is recorded."""

    def run(self, policy: Policy, name: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Metrics of episodes without noise.

        Args:
            policy: that plays.
            name: of the video.
            progress: called with (episodes done, episodes in all).
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


@dataclass(kw_only=True)
class ControlTrainer(TrainingLoop):
    """All parts of an embodied run; `tether.assembly.control` makes one from a configuration."""

    policy: Policy
    collector: EnvCollector
    learner: ControlLearner
    rewards: RewardShaping
    options: SampleOptions
    evaluation: ControlEvaluation | None
    seed: int
    """Of noise and of the order of samples."""
    env_seed: int
    """Of start states."""
    auto_reset: bool = True
    """Episodes go on over rollouts; False: each rollout begins new ones."""
    env_steps: int = 0
    """Steps of all environments together."""
    finished: list[Episode] = field(default_factory=list)
    """Episodes that ended since the last log."""
    episodes_begin: bool = True
    """New episodes begin before the next step."""

    def step(self) -> dict[str, float]:
        """Do one training step; returns its metrics."""
        number, time = self.step_number + 1, Timer()
        env_seconds = self.collector.env_seconds
        with time("step"):
            with time("gen"):
                noise = self.policy.head.noise(self.collector.noise_shape, generator(self.seed, number, "noise"))
                rollout = self.collector.collect(self.policy.acting(), noise, self._start_seeds(number))
            with time("adv"):
                rewards, rows = self.rewards(rollout), rollout.actions.shape[:2].numel()
                samples, metrics = policy_within_memory(
                    self.policy, lambda: make_samples(rollout, rewards, self.policy, self.options), rows
                )
            with time("update_actor"):
                order = generator(self.seed, number, "order")
                train_policy = self.critic_warmup.is_over(number, metrics.get("critic/vf_explained_var", -math.inf))
                self.weights_change = True
                metrics |= self.learner.update(samples, number - 1, order, train_policy=train_policy)
            # For the next rollout: this one was sampled, and learned from, without.
            self.policy.update_statistics(rollout.obs[rollout.carried_out])
        self.step_number = number
        taken = int(rollout.valid.sum())
        self.env_steps += taken
        self.finished += rollout.episodes
        speed = {"perf/env_steps": float(self.env_steps), "perf/sps": taken / time.seconds["step"]}
        time.seconds["env"] = self.collector.env_seconds - env_seconds
        return metrics | speed | time.metrics() | {"training/global_step": float(number)}

    def advance(self) -> dict[str, float]:
        """See `TrainingLoop.advance`."""
        return self.step()

    @property
    def can_evaluate(self) -> bool:
        """See `TrainingLoop.can_evaluate`."""
        return self.evaluation is not None

    def begin(self) -> None:
        """Begin episodes, unless those of a checkpoint go on; say what of the environments cannot be saved."""
        if self.episodes_begin:
            self._restart()
        reasons = dict.fromkeys(reason for state in self._env_states().values() for reason in state.left_out)
        if reasons:
            self.loggers.warn(NOT_SAVED.format("; ".join(reasons)))

    def log(self, metrics: dict[str, float]) -> dict[str, float]:
        """See `TrainingLoop.log`; with the episodes that ended since the last time."""
        logged = super().log(episode_metrics(self.finished, "env") | metrics)
        self.finished.clear()
        return logged

    def evaluate(self) -> dict[str, float]:
        """Test the current policy; returns its metrics."""
        assert self.evaluation
        time = Timer(on_phase=self.loggers.phase)
        with time("testing"):
            metrics = self.evaluation.run(
                self.policy,
                f"step_{self.step_number}",
                lambda done, total: self.loggers.phase("testing", done, total),
            )
        return metrics | time.metrics()

    def write_checkpoint(self, state: dict[str, Any], *, in_step: bool = False) -> Path:
        """See `TrainingLoop.write_checkpoint`.

        Where the environments do not give all of their state, new episodes begin after a checkpoint, in the run that
        saves as in one that resumes from it. After a step that failed they begin in any case.
        """
        envs = {} if in_step else self._env_states()
        self.episodes_begin = in_step or bool(envs["train"].left_out)
        data = pickle.dumps({name: env.data for name, env in envs.items()})

        def write(folder: Path) -> None:
            save_policy(self.policy, folder / POLICY)
            (folder / ENVIRONMENTS).write_bytes(data)

        states = {"learner": self.learner.state_dict(), "trainer": state | {"episodes_begin": self.episodes_begin}}
        path = self.persistence.save(state["step"], write, states)
        if self.episodes_begin and not in_step:
            self._restart()
        return path

    def state(self) -> dict[str, Any]:
        """See `TrainingLoop.state`."""
        return super().state() | {
            "env_steps": self.env_steps,
            "rewards": self.rewards.state_dict(),
            "collector": self.collector.state_dict(),
            "episodes_begin": self.episodes_begin,
            "finished": [vars(episode) for episode in self.finished],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `TrainingLoop.load_state`."""
        super().load_state(state)
        self.env_steps = state["env_steps"]
        self.episodes_begin |= state["episodes_begin"]
        self.finished = [Episode(**episode) for episode in state["finished"]]
        self.rewards.load_state_dict(state["rewards"])
        if not self.episodes_begin:
            self.collector.load_state_dict(state["collector"])

    def load_environments(self, checkpoint: Path) -> None:
        """Give the environments the state that a checkpoint holds; before `load_state`.

        Other environments than those that were saved start afresh, with a warning.
        """
        path = checkpoint / ENVIRONMENTS
        saved = pickle.loads(path.read_bytes()) if path.is_file() else {}
        self.episodes_begin = "train" not in saved
        for name, env in self._envs().items():
            try:
                if name in saved:
                    env.set_state(saved[name])
            except ValueError as error:
                self.episodes_begin |= name == "train"
                self.loggers.warn(
                    f"env.{name}: not the environments that {checkpoint} was saved with ({error}); they start afresh"
                )

    def _envs(self) -> dict[str, VectorEnv]:
        return {"train": self.collector.env} | ({"eval": self.evaluation.env} if self.evaluation else {})

    def _env_states(self) -> dict[str, EnvState]:
        return {name: env.get_state() for name, env in self._envs().items()}

    def _restart(self) -> None:
        self.collector.restart(seed_of(self.env_seed, self.step_number, "start"))
        self.rewards.restart()

    def _start_seeds(self, number: int) -> list[int]:
        """Seeds of the rollouts of a training step, where each begins new episodes."""
        if self.auto_reset:
            return []
        return [seed_of(self.env_seed, number, "start", epoch) for epoch in range(self.collector.epochs)]
