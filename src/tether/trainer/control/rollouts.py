"""Rollouts of a control policy in environments, and its tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from tether.batch import EnvBatch, Episode, WeightUpdate
from tether.checkpoints import read_own
from tether.envs import EnvState, VectorEnv
from tether.keyed_random import generator, seed_of
from tether.metrics.timing import Timer
from tether.models.control import Policy
from tether.rollout.env import EnvCollector, episode_metrics, evaluate
from tether.trainer.protocol import EvaluationResult, Experience, Frozen, Progress
from tether.training.control import RolloutOutputs
from tether.types import StateDict

POLICY, ENVIRONMENTS = "actor", "environments.pkl"
"""In a checkpoint."""
RANKS = "ranks"
"""Beside the states of environments there."""
NOT_SAVED = (
    "not all of the environments can be saved: {}. So new episodes begin after each checkpoint; a run that a signal "
    "stops between two of them, or whose environments keep state over reset(seed=...), does not resume exactly. "
    "To change that, give the class get_state() and set_state(state)."
)

OpenVideo = Callable[[str], AbstractContextManager[Callable[[], None]]]
"""Name of a video -> what to call at the start of it and after each step, until it is closed."""


@dataclass(frozen=True)
class ControlEvaluation:
    """Settings of the tests of a policy."""

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


@dataclass(frozen=True)
class StartStates:
    """Seeds of the start states of each rollout; see `tether.trainer.protocol.Source`."""

    seed: int
    epochs: int
    """Rollouts of a step."""
    auto_reset: bool
    """Episodes continue over rollouts; False: each rollout begins new ones."""

    def next(self, step: int) -> list[int]:
        """A seed for each rollout of the step that begins new episodes."""
        if self.auto_reset:
            return []
        return [seed_of(self.seed, step, "start", epoch) for epoch in range(self.epochs)]

    def metrics(self) -> dict[str, float]:
        """See `Source`: there is no end of start states."""
        return {}

    def state_dict(self) -> StateDict:
        """See `Source`: a seed depends on the step alone."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """See `Source`."""


@dataclass(kw_only=True)
class EnvRollouts:
    """Acts in environments; see `tether.trainer.protocol.Rollouts`."""

    policy: Policy
    collector: EnvCollector
    evaluation: ControlEvaluation | None
    seed: int
    """Of noise."""
    env_seed: int
    """Of start states."""
    warn: Callable[[str], None]
    """Shows a message to the user."""
    env_steps: int = 0
    """Steps of all environments together."""
    finished: list[Episode] = field(default_factory=list)
    """Episodes that ended since the last log."""
    episodes_begin: bool = True
    """New episodes begin before the next step."""
    version: int = 0
    """Of the policy's weights."""
    ranks: int = 1
    """Devices that have a part of the environments each."""
    transfers: Callable[[], dict[str, float]] = dict
    """Metrics of what a step moved between them and this process."""
    trusts_pickles: bool = False
    """The state of environments is loaded from a checkpoint that others could have written, too."""
    testing: bool = False
    """A test has begun and not ended: its environments may hang, and are not asked for their state."""

    @property
    def can_evaluate(self) -> bool:
        """See `Rollouts`."""
        return self.evaluation is not None

    def begin(self, step: int) -> None:
        """Begin episodes, unless those of a checkpoint continue; say what of the environments cannot be saved."""
        if self.episodes_begin:
            self._restart(step)
        reasons = dict.fromkeys(reason for state in self._env_states().values() for reason in state.left_out)
        if reasons:
            self.warn(NOT_SAVED.format("; ".join(reasons)))

    def collect(
        self, start_seeds: Sequence[int], step: int, time: Timer, progress: Progress
    ) -> Experience[EnvBatch, None]:
        """See `Rollouts`.

        Raises:
            ValueError: an observation or a reward is not finite; names environment and step.
        """
        waited = self.collector.env_seconds
        with time("gen"):
            noise = self.policy.head.noise(self.collector.noise_shape, generator(self.seed, step, "noise"))
            batch = self.collector.collect(self.policy.acting(), noise, start_seeds)
        batch.policy_version = self.version
        time.seconds["env"] = self.collector.env_seconds - waited
        return Experience(batch, None)

    def record(self, step: int, experience: Experience[EnvBatch, None], time: Timer) -> None:
        """See `Rollouts`: nothing is written down."""

    def metrics(
        self, experience: Experience[EnvBatch, None], outputs: RolloutOutputs | None, time: Timer
    ) -> dict[str, float]:
        """See `Rollouts`."""
        taken, ended = int(experience.batch.valid.sum()), experience.batch.episodes
        self.env_steps += taken
        self.finished += ended
        speed = {"perf/env_steps": float(self.env_steps), "perf/sps": taken / time.seconds["step"]}
        score = {"env/return": fmean(episode.reward for episode in ended)} if ended else {}  # of this step, for alarms
        return speed | score | self.transfers() | time.metrics()

    def metrics_to_log(self) -> dict[str, float]:
        """Metrics of the episodes that ended since the last log."""
        return episode_metrics(self.finished, "env")

    def logged(self) -> None:
        """See `Rollouts`."""
        self.finished.clear()

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `Rollouts`."""
        weights.copy_to(self.policy)
        self.version = weights.version

    def evaluate(self, step: int, progress: Progress) -> EvaluationResult:
        """See `Rollouts`."""
        assert self.evaluation
        self.testing = True
        result = EvaluationResult(self.evaluation.run(self.policy, f"step_{step}", progress))
        self.testing = False
        return result

    def freeze(self, *, in_step: bool) -> Frozen:
        """See `Rollouts`.

        Where the environments do not give all of their state, new episodes begin after a checkpoint, in the run that
        saves as in one that resumes from it. After a step that failed they begin in any case.
        """
        envs = {} if in_step else self._env_states()
        self.episodes_begin = in_step or bool(envs["train"].left_out)
        data = pickle.dumps({name: env.data for name, env in envs.items()} | {RANKS: self.ranks})
        return Frozen({"episodes_begin": self.episodes_begin}, {ENVIRONMENTS: data})

    def saved(self, step: int) -> None:
        """See `Rollouts`: begin new episodes, where those of the checkpoint cannot continue."""
        if self.episodes_begin:
            self._restart(step)

    def restore(self, checkpoint: Path) -> None:
        """Give the environments the state that a checkpoint holds.

        Other environments than those that were saved start afresh, with a warning.

        Raises:
            ValueError: somebody else could have written their state, and no key says that it is trusted.
        """
        path = checkpoint / ENVIRONMENTS
        saved = pickle.loads(self._environments(path)) if path.is_file() else {}
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
                    f"env.{name}: not the environments that {checkpoint} was saved with ({error}); they start afresh"
                )

    def _environments(self, path: Path) -> bytes:
        if self.trusts_pickles:
            return path.read_bytes()
        return read_own(
            path,
            f"If it is what your run saved, chown it to you or run chmod go-w {path.parent} {path}; or resume with "
            "trainer.trust_checkpoint_pickle=True, which loads it as it is",
        )

    def state_dict(self) -> StateDict:
        """See `Rollouts`."""
        return {
            "env_steps": self.env_steps,
            "collector": self.collector.state_dict(),
            "episodes_begin": self.episodes_begin,
            "finished": [vars(episode) for episode in self.finished],
            "version": self.version,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """See `Rollouts`."""
        self.env_steps, self.version = int(state["env_steps"]), int(state["version"])
        self.episodes_begin |= state["episodes_begin"]
        self.finished = [Episode(**episode) for episode in state["finished"]]
        if not self.episodes_begin:
            self.collector.load_state_dict(state["collector"])

    def _envs(self) -> dict[str, VectorEnv]:
        return {"train": self.collector.env} | ({"eval": self.evaluation.env} if self.evaluation else {})

    def _env_states(self) -> dict[str, EnvState]:
        return {name: env.get_state() for name, env in self._envs().items() if name == "train" or not self.testing}

    def _restart(self, step: int) -> None:
        self.collector.restart(seed_of(self.env_seed, step, "start"))
