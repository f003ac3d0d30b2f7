"""From the configuration of an embodied run to its parts."""

from __future__ import annotations

import importlib
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tether.config import LoadedConfig, RunConfig
from tether.config.schema.env import EvalEnvConfig, TrainEnvConfig
from tether.envs.protocol import DiscreteActions, VectorEnv
from tether.execution.machine import set_threads, usable_cores
from tether.models.control.policy import ControlPolicy, PolicySpec, load_policy
from tether.rollout.env import EnvCollector
from tether.trainer.build.learners import build_optimizer
from tether.trainer.build.off_policy import build_critic_warmup
from tether.trainer.build.run import build_run_loggers
from tether.trainer.control import ControlEvaluation, ControlTrainer
from tether.trainer.control_persistence import POLICY, ControlPersistence
from tether.trainer.control_samples import RewardScaler, SampleOptions
from tether.trainer.persistence import check_identity, seed_rng
from tether.trainer.trainer import Schedule
from tether.training.checkpoint import CheckpointStore, load_state
from tether.training.control import ControlLearner, ControlLoss, ControlPlan


@dataclass(frozen=True)
class ControlRun:
    """A trainer, and what has to be closed after it."""

    trainer: ControlTrainer
    envs: ExitStack
    directory: Path
    """Checkpoints and logs."""
    resumed_from: Path | None

    def close(self) -> None:
        """End the environments and write what the loggers hold back."""
        self.envs.close()
        self.trainer.loggers.close()


def build_control_run(loaded: LoadedConfig) -> ControlRun:
    """Build everything that an embodied run needs, and go on from a checkpoint where there is one.

    Raises:
        ValueError: the environments cannot be made, no policy fits them, or a checkpoint is of other ones.
    """
    config = loaded.config
    trainer_config = config.trainer
    set_threads(trainer_config.num_threads)
    seed_rng(trainer_config.seed)
    directory = Path(trainer_config.default_local_dir)
    store = CheckpointStore(directory, keep=trainer_config.max_actor_ckpt_to_keep)
    resume_path = trainer_config.resume_from_path
    checkpoint = store.resolve(trainer_config.resume_mode, Path(resume_path) if resume_path else None)
    identity = {"env.train.id": str(config.env.train.id), "policy": repr(config.policy)}
    if checkpoint:
        check_identity(checkpoint, identity)
    with ExitStack() as envs:
        env = make_env(config.env.train, "env.train")
        envs.callback(env.close)
        policy = load_policy(checkpoint / POLICY) if checkpoint else _policy(config, env)
        schedule = _schedule(config)
        scaler = None
        if config.policy.normalize_rewards:
            scaler = RewardScaler(env.num_envs, config.algorithm.gamma, config.policy.clip_rewards)
        trainer = ControlTrainer(
            policy=policy,
            collector=_collector(config, env),
            learner=_learner(config, policy, schedule.total_steps),
            scaler=scaler,
            options=SampleOptions(
                gamma=config.algorithm.gamma,
                lam=config.algorithm.lam,
                reward_coef=config.env.train.reward_coef,
                normalize_advantages=config.algorithm.normalize_advantages,
                logprob_level=config.algorithm.logprob_type,
            ),
            critic_warmup=build_critic_warmup(trainer_config),
            evaluation=build_evaluation(config, envs) if trainer_config.test_freq > 0 else None,
            schedule=schedule,
            persistence=ControlPersistence(store, identity, loaded.to_yaml()),
            loggers=build_run_loggers(loaded, directory, schedule, checkpoint),
            seed=trainer_config.seed,
            env_seed=config.env.train.seed,
            log_freq=trainer_config.log_freq,
        )
        if checkpoint:
            trainer.learner.load_state_dict(load_state(checkpoint / "training" / "learner.pt"))
            trainer.load_state(load_state(checkpoint / "training" / "trainer.pt"))
        return ControlRun(trainer, envs.pop_all(), directory, checkpoint)


def build_evaluation(config: RunConfig, envs: ExitStack) -> ControlEvaluation:
    """The test of an embodied configuration; `envs` closes its environments."""
    test = config.env.eval
    env = make_env(test, "env.eval")
    envs.callback(env.close)
    return ControlEvaluation(env, test.num_episodes, test.seed, test.confidence)


def make_env(section: TrainEnvConfig | EvalEnvConfig, role: str) -> VectorEnv:
    """The environments of a section.

    Raises:
        ValueError: see `tether.envs.make.make_vector_env`; or Gymnasium is not installed.
    """
    try:
        envs = importlib.import_module("tether.envs.make")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{role}.id: environments need the package {error.name}, which is not installed. "
            "Run: pip install 'tether[gymnasium]'"
        ) from error
    options = envs.EnvOptions(
        id=section.id,
        num_envs=section.total_num_envs,
        env_type=section.env_type,
        vectorization=section.vectorization,
        autoreset_mode=section.autoreset_mode if isinstance(section, TrainEnvConfig) else "same_step",
        num_workers=section.num_workers or usable_cores(),
        max_episode_steps=section.max_episode_steps,
        ignore_terminations=section.ignore_terminations,
        init_params=section.init_params,
        role=role,
    )
    made: VectorEnv = envs.make_vector_env(options)
    return made


def _policy(config: RunConfig, env: VectorEnv) -> ControlPolicy:
    policy, actions = config.policy, env.actions
    spec = PolicySpec(
        obs_dim=env.obs_dim,
        choices=actions.choices if isinstance(actions, DiscreteActions) else None,
        action_width=actions.width,
        hidden_dim=policy.hidden_dim,
        num_layers=policy.num_layers,
        activation=policy.activation,
        init_logstd=policy.init_logstd,
        normalize_observations=policy.normalize_observations,
        clip_observations=policy.clip_observations,
    )
    return ControlPolicy(spec, config.trainer.seed)


def _collector(config: RunConfig, env: VectorEnv) -> EnvCollector:
    return EnvCollector(
        env,
        config.env.train.max_steps_per_rollout_epoch,
        bootstrap_terminations=config.algorithm.bootstrap_type == "always",
    )


def _learner(config: RunConfig, policy: ControlPolicy, total_steps: int) -> ControlLearner:
    actor, critic, algorithm = config.actor_rollout_ref.actor, config.critic, config.algorithm
    loss = ControlLoss(
        name=actor.policy_loss.loss_mode,
        options={
            "clip_ratio_low": actor.clip_ratio_low,
            "clip_ratio_high": actor.clip_ratio_high,
            "clip_ratio_c": actor.clip_ratio_c,
            "tau_pos": actor.tau_pos,
            "tau_neg": actor.tau_neg,
        },
        entropy_coeff=actor.entropy_coeff,
        value_coeff=critic.loss_coef,
        cliprange_value=critic.cliprange_value,
        huber_delta=critic.huber_delta,
        logprob_level=algorithm.logprob_type,
        entropy_level=algorithm.entropy_type,
    )
    plan = ControlPlan(
        actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, actor.optim.clip_grad, actor.target_kl
    )
    return ControlLearner(policy, loss, plan, build_optimizer(actor.optim, total_steps), critic.optim.lr)


def _schedule(config: RunConfig) -> Schedule:
    trainer, train = config.trainer, config.env.train
    steps = trainer.total_training_steps
    if steps is None:
        assert trainer.total_env_steps is not None
        steps = math.ceil(trainer.total_env_steps / (train.total_num_envs * train.max_steps_per_rollout_epoch))
    return Schedule(steps, trainer.save_freq, trainer.test_freq)
