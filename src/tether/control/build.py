"""Builds a control run from its configuration; `build_control_run` calls the functions below it in this order.

1. `fit_defaults`: defaults that depend on the environment.
2. `_schedule`: when to save, evaluate and stop.
3. `build_components`: environments (`make_env`), policy (`policy_of`), `FlatEngine` and `EnvCollector`.
4. `build_evaluation`: environments for evaluation.
5. The trainer: `build_learner`, whose learner minimises `ControlLoss`; `EnvRewards`, `ControlAdvantages` and
   `LearnedDecisions`.
6. `_preflight`: the checks before the first step.

Each component is created by its `from_config`, which takes only the sections of the configuration that it reads.

`build_agent` builds an agent that acts with a saved policy.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tether.batch import EnvBatch, Episode
from tether.config import LoadedConfig, RunConfig, changes_since, for_environment
from tether.config.schema import ActorConfig
from tether.control.build_policies import env_for_policy, get_action_code, spaces_of, start_policy, value_width
from tether.control.collecting.collector import EnvCollector
from tether.control.envs.config import EnvConfig, EvalEnvConfig, TrainEnvConfig
from tether.control.envs.protocol import DiscreteActions, VectorEnv, choices_of
from tether.control.learning.advantages import ControlAdvantages, EnvRewards, LearnedDecisions
from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import ControlLoss, RolloutForward, RolloutOutputs, loss_spec
from tether.control.learning.preflight import ENVIRONMENTS, sample_steps
from tether.control.learning.recording import EpisodeRecorder
from tether.control.learning.rollouts import POLICY, ControlEvaluation, EnvRollouts, OpenVideo, StartStates
from tether.control.policies.config import PolicyConfig
from tether.control.policies.mlp_policy import ControlPolicy, Policy, load_policy
from tether.loop.ahead import SamplingAhead, SourceAhead
from tether.loop.checkpoint import check_identity
from tether.loop.config import TrainerConfig
from tether.loop.engine import Engine, Learner, UpdatePlan
from tether.loop.loop import Schedule, Trainer
from tether.loop.preflight import MemoryNeed, Preflight, preflight
from tether.loop.run import (
    Run,
    begin_run,
    build_profiler,
    build_recorder,
    find_start,
    ranks_line,
    scheduled_loss,
    with_rollback_learning_rate,
)
from tether.observations import describe
from tether.runtime.global_rng import seed_rng
from tether.runtime.install import pip_install
from tether.runtime.machine import resolve_device, set_threads
from tether.runtime.run_lock import RunLock
from tether.runtime.threads import num_threads, usable_cores

ADDED_POLICY_KEYS = ("dtype", "relative_actions", "discrete_state_input")
"""Keys of `policy` that are missing from checkpoints of earlier releases."""
DRAW = ("env.train.", "policy.", "algorithm.", "trainer.async_mode", "trainer.seed")
"""Prefixes of the keys that determine a rollout. A rollout that a checkpoint stores is discarded if one changes."""

if TYPE_CHECKING:
    from tether.control.collecting.agent import EnvAgent
    from tether.control.envs.gymnasium_types import Env
    from tether.control.envs.make import EnvOptions
    from tether.distributed.groups import RankGroups


def build_control_run(loaded: LoadedConfig) -> Run:
    """Build everything that a control run needs, and resume from a checkpoint if there is one.

    Raises:
        ValueError: the environments cannot be made, no policy fits them, or the checkpoint does not fit them.
    """
    directory = Path(loaded.config.trainer.default_local_dir)
    with ExitStack() as resources:
        resources.enter_context(RunLock(directory))
        loaded = fit_defaults(loaded)  # first, because checkpoints are saved with these defaults
        store, checkpoint = find_start(loaded)
        loaded = with_rollback_learning_rate(loaded, store, checkpoint)
        config = loaded.config
        trainer_config, train = config.trainer, config.env.train
        set_threads(trainer_config.num_threads)
        seed_rng(trainer_config.seed)
        identity = identity_of(config)
        if checkpoint:
            check_identity(checkpoint, identity)
        schedule = _schedule(trainer_config, train)
        components, groups = build_components(config, checkpoint, schedule.total_steps, directory / "ranks", resources)
        policy = components.policy
        evaluation = None
        if trainer_config.test_freq > 0 or (trainer_config.val_before_train and not checkpoint):
            evaluation = build_evaluation(config.env, config.policy, policy, video_folder(config), resources)
        profiler = build_profiler(trainer_config, schedule, groups.all_ranks if groups else None)
        parts = begin_run(loaded, store, identity, schedule, checkpoint, resources)
        source = StartStates.from_config(train)
        mode = trainer_config.async_mode
        rollouts = EnvRollouts(
            policy=policy if mode == "off" else deepcopy(policy),
            sampled_ahead=None if mode == "off" else RolloutForward(config.algorithm.logprob_type),
            collector=components.collector,
            evaluation=evaluation,
            seed=trainer_config.seed,
            env_seed=train.seed,
            warn=lambda message: parts["loggers"].warn(message),
            ranks=trainer_config.devices,
            transfers=groups.all_ranks.transfers.take if groups else dict,
            trust_pickles=trainer_config.trust_checkpoint_pickle,
        )
        actor = build_learner(config, components, schedule.total_steps)
        ahead = SamplingAhead.from_async_mode(
            mode,
            config.actor_rollout_ref.rollout.max_staleness,
            source,
            rollouts,
            actor.engine.export,
            total_steps=schedule.total_steps,
            is_compatible=lambda path: not changes_since(path / "run.yaml", loaded, among=DRAW),
            classes=(EnvBatch, Episode),
        )
        if ahead:
            resources.callback(ahead.close)
        trainer = Trainer(
            source=SourceAhead(ahead) if ahead else source,
            rollouts=ahead or rollouts,
            actor=actor,
            critic=None,
            reference=None,
            reward_transforms=[EnvRewards.from_config(train, config.policy, config.algorithm)],
            estimate_advantages=ControlAdvantages.from_config(config.algorithm, train),
            select_rows=LearnedDecisions.from_config(config.actor_rollout_ref.actor, train, policy),
            profiler=profiler,
            recorder=EpisodeRecorder(build_recorder(trainer_config, checkpoint), components.collector.env.layout),
            **parts,
        )
        if checkpoint:
            trainer.resume(checkpoint)
        env = components.env
        about = [f"{env.id}: {env.num_envs} environments, observations {describe(env.layout)}, actions {env.actions}"]
        about += [ranks_line(config)] if groups else []
        about += [preprocessing_line(config.env)] if evaluation else []
        few_envs = partial(_few_envs, train, config.policy, policy)
        check = _preflight(few_envs, source, rollouts, trainer.actor)
        return Run(loaded, trainer, directory, checkpoint, resources.pop_all(), tuple(about), check)


def fit_defaults(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration with defaults for the environment's kind of actions and observations.

    If the id does not determine the kind, one environment is made to read its spaces.

    Raises:
        ValueError: the environment cannot be made.
    """
    if loaded.undecided is None:
        return loaded
    config = loaded.config
    train = config.env.train
    one = train
    if not _is_vector_only(train, config.policy):
        vectorization = "auto" if train.vectorization == "vector" else train.vectorization
        one = train.model_copy(
            update={"total_num_envs": train.group_size, "num_workers": 1, "vectorization": vectorization}
        )
    with closing(
        make_env(one, "env.train", reset_policy_fields(train, config.policy), observation_fields(train))
    ) as env:
        continuous = not isinstance(env.actions, DiscreteActions)
        pictures = all(entry.kind == "image" for entry in env.layout if entry.width)
    if not continuous and not pictures:
        return replace(loaded, undecided=None)
    return for_environment(loaded, continuous=continuous, pictures=pictures)


def _is_vector_only(train: TrainEnvConfig, policy: PolicyConfig) -> bool:
    """Whether environments of ``env.train`` can only be made as a vector, possibly of a fixed size."""
    options = env_options(train, "env.train", reset_policy_fields(train, policy), observation_fields(train))
    alone: bool = importlib.import_module("tether.control.envs.make").is_vector_only(options)
    return alone


def identity_of(config: RunConfig) -> dict[str, str]:
    """Return fingerprints that must not change when a checkpoint is resumed."""
    # A checkpoint from before a key was added used the key's default.
    defaults = {name: PolicyConfig.model_fields[name].default for name in ADDED_POLICY_KEYS}
    values = [f"{name}={value!r}" for name, value in config.policy if (name, value) not in defaults.items()]
    return {"env.train.id": str(config.env.train.id), "policy": f"PolicyConfig({', '.join(values)})"}


def training_steps(trainer: TrainerConfig, train: TrainEnvConfig) -> int:
    """Return the number of training steps of a run."""
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    assert trainer.total_env_steps is not None
    rollout = train.total_num_envs * train.max_steps_per_rollout_epoch * train.rollout_epoch
    return math.ceil(trainer.total_env_steps / rollout)


def _schedule(trainer: TrainerConfig, train: TrainEnvConfig) -> Schedule:
    return replace(Schedule.from_config(trainer, training_steps(trainer, train)), log_freq=trainer.log_freq)


@dataclass(frozen=True)
class ControlComponents:
    """The environments, policy, engine and learner of a run."""

    env: VectorEnv
    """The environments before any conversion for the policy."""
    policy: Policy
    """The policy, with the weights of the last update."""
    engine: Engine[Any, RolloutOutputs]
    collector: EnvCollector


def build_components(
    config: RunConfig, checkpoint: Path | None, total_steps: int, logs: Path, resources: ExitStack
) -> tuple[ControlComponents, RankGroups | None]:
    """Build the components in this process, or on several devices; then also return the groups of processes."""
    if config.trainer.devices > 1:
        ranks = importlib.import_module("tether.control.ranks")
        components_and_groups: tuple[ControlComponents, RankGroups] = ranks.build_components_on_ranks(
            config, checkpoint, total_steps, logs, resources
        )
        return components_and_groups
    train, actor = config.env.train, config.actor_rollout_ref.actor
    env = make_env(train, "env.train", reset_policy_fields(train, config.policy), observation_fields(train))
    resources.callback(env.close)
    policy = policy_of(config, checkpoint, env)
    collector = EnvCollector.from_config(
        env_for_policy(env, policy), policy.state_width, train, config.policy, config.algorithm
    )
    engine = FlatEngine.from_config(policy, actor.optim, config.critic.optim, total_steps, incidents_folder(config))
    return ControlComponents(env, policy, engine, collector), None


def incidents_folder(config: RunConfig) -> Path:
    """Return the folder for mini-batches whose update was skipped because of a non-finite gradient."""
    return Path(config.trainer.default_local_dir) / "incidents" / "actor"


def make_env(
    section: TrainEnvConfig | EvalEnvConfig,
    role: str,
    reset_policy: Mapping[str, object],
    view: Mapping[str, object],
    *,
    render: bool = False,
    first: int = 0,
) -> VectorEnv:
    """Make the environments of a section.

    Args:
        section: section of the configuration.
        role: name of the section, for messages.
        reset_policy: fields of `tether.control.envs.make.ResetPolicy`.
        view: fields of `tether.control.envs.make.ObservationOptions`.
        render: whether the environments must support rendering.
        first: index of the first environment, if a run's environments are divided among ranks.

    Raises:
        ValueError: as in `tether.control.envs.make.make_vector_env`, or Gymnasium is not installed.
    """
    options = replace(env_options(section, role, reset_policy, view, render=render), first=first)
    made: VectorEnv = importlib.import_module("tether.control.envs.make").make_vector_env(options)
    return made


def env_options(
    section: TrainEnvConfig | EvalEnvConfig,
    role: str,
    reset_policy: Mapping[str, object],
    view: Mapping[str, object],
    *,
    render: bool = False,
) -> EnvOptions:
    """Return the `tether.control.envs.make.EnvOptions` of a section; the arguments are those of `make_env`.

    Raises:
        ValueError: Gymnasium is not installed.
    """
    try:
        envs = importlib.import_module("tether.control.envs.make")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{role}.id: environments need the package {error.name}, which is not installed. "
            f"Run: {pip_install('gymnasium')}"
        ) from error
    return envs.EnvOptions(
        id=section.id,
        num_envs=section.total_num_envs,
        env_type=section.env_type,
        vectorization="sync" if render and section.vectorization == "auto" else section.vectorization,
        num_workers=section.num_workers or (num_threads() if section.env_type == "envpool" else usable_cores()),
        timeout=section.timeout,
        max_episode_steps=section.max_episode_steps,
        ignore_terminations=section.ignore_terminations,
        init_params={**section.init_params, **({"render_mode": "rgb_array"} if render else {})},
        wrappers=section.wrappers,
        view=envs.ObservationOptions(**view),
        reset_policy=envs.ResetPolicy(**reset_policy),
        role=role,
    )


def reset_policy_fields(train: TrainEnvConfig, policy: PolicyConfig) -> dict[str, object]:
    """Return the fields of `tether.control.envs.make.ResetPolicy`."""
    return {
        "chunk": policy.num_action_chunks,
        "auto_reset": train.auto_reset,
        "group_size": train.group_size,
        "fixed_seed": train.seed if train.use_fixed_reset_state_ids else None,
    }


def observation_fields(train: TrainEnvConfig) -> dict[str, object]:
    """Return the fields of `tether.control.envs.make.ObservationOptions`."""
    return {
        "drop": train.drop_observations,
        "frame_stack": train.frame_stack,
        "action_masks": train.action_masks,
        "info_metrics": train.info_metrics,
    }


def policy_of(config: RunConfig, checkpoint: Path | None, env: VectorEnv) -> Policy:
    """Return the policy of a checkpoint, or the initial policy of a new run, on its device.

    Raises:
        ValueError: no policy fits the environments.
    """
    if checkpoint:
        policy = load_policy(checkpoint / POLICY)
    else:
        values = value_width(config.algorithm, config.policy)
        policy = start_policy(config.policy, config.actor_rollout_ref.model, env, values, config.trainer.seed)
    policy.spaces = spaces_of(env)
    if config.trainer.device != "auto":  # auto means the CPU, since only large networks are faster on a GPU
        policy.to(resolve_device(config.trainer.device))
    actor = config.actor_rollout_ref.actor
    if not isinstance(policy, ControlPolicy) or actor.ppo_micro_batch_size_per_gpu < actor.ppo_mini_batch_size:
        policy.micro_batch = actor.ppo_micro_batch_size_per_gpu
    return policy


def build_evaluation(
    section: EnvConfig, policy_config: PolicyConfig, policy: Policy, videos: Path, envs: ExitStack
) -> ControlEvaluation:
    """Build the evaluation of a policy in the environments of ``env.eval``, which `envs` closes.

    Raises:
        ValueError: as in `make_env`, or the policy does not fit them, or a package for videos is missing.
    """
    test, video = section.eval, section.eval.video_cfg
    reset_policy = {"chunk": policy_config.num_action_chunks}
    env = make_env(test, "env.eval", reset_policy, observation_fields(section.train), render=video.save_video)
    envs.callback(env.close)
    acted = env_for_policy(env, policy)
    _check_fit(acted, policy.spec)
    opened = _open_video(env, videos, video.fps) if video.save_video else None
    return ControlEvaluation(acted, test.num_episodes, test.seed, test.confidence, opened)


def preprocessing_line(section: EnvConfig) -> str:
    """Return a line that describes the observations and rewards of evaluations."""
    options = env_options(section.eval, "env.eval", {}, observation_fields(section.train))
    described: str = importlib.import_module("tether.control.envs.make").describe_preprocessing(options)
    return f"evaluated in {options.id} with the preprocessing: {described}"


def _check_fit(env: VectorEnv, spec: Any) -> None:
    """Refuse to evaluate a policy in environments that do not fit it."""
    choices = choices_of(env.actions) or None
    if (env.layout, choices, env.actions.width) == (spec.parts, spec.choices, spec.action_width):
        return
    acts = f"chooses among {spec.choices}" if spec.choices else f"gives {spec.action_width} numbers"
    raise ValueError(
        f"env.eval.id: {env.id} shows {describe(env.layout)} and takes {env.actions}; the policy reads "
        f"{describe(spec.parts)} and {acts}. Name an environment like the one that it was trained in."
    )


def video_folder(config: RunConfig) -> Path:
    """Return the folder of evaluation videos."""
    folder = config.env.eval.video_cfg.video_base_dir
    return Path(config.trainer.default_local_dir) / "video" if folder is None else Path(folder)


def _open_video(env: VectorEnv, folder: Path, fps: int) -> OpenVideo:
    try:
        videos = importlib.import_module("tether.control.collecting.video")
        importlib.import_module("imageio_ffmpeg")  # imageio would report it only at the first picture
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env.eval.video_cfg.save_video: videos need the package {error.name}. Run: {pip_install('video')}"
        ) from error
    return lambda name: videos.open_video(env, folder / f"{name}.mp4", fps)


def build_learner(config: RunConfig, components: ControlComponents, total_steps: int) -> Learner[Any, RolloutOutputs]:
    """Return the learner of a policy and its critic, which share a model."""
    actor = config.actor_rollout_ref.actor
    plan = UpdatePlan(
        actor.ppo_mini_batch_size,
        actor.ppo_epochs,
        actor.shuffle,
        config.trainer.seed,
        target_kl=actor.target_kl,
        adapts_lr=actor.target_kl_control == "lr",
    )
    forward = RolloutForward(config.algorithm.logprob_type)

    def build_loss(actor: ActorConfig) -> ControlLoss:
        return ControlLoss.from_config(actor, config.critic, config.algorithm, auto_reset=config.env.train.auto_reset)

    loss = build_loss(actor)
    return Learner(
        components.engine,
        forward,
        loss_spec(loss, forward),
        plan,
        critic_loss=loss_spec(replace(loss, critic_only=True), forward) if components.policy.spec.value_width else None,
        loss_at=scheduled_loss(actor, total_steps, lambda actor: loss_spec(build_loss(actor), forward)),
    )


def _preflight(
    few_envs: Callable[[], VectorEnv], source: StartStates, rollouts: EnvRollouts, actor: Learner[Any, RolloutOutputs]
) -> Callable[[], Preflight]:
    # Twice, because collected steps are copied once, into the rows of the training batch.
    rows = MemoryNeed("a rollout, and the samples of it", torch.device("cpu"), 2 * rollouts.collector.nbytes)
    return partial(preflight, partial(sample_steps, few_envs, source, rollouts), [actor], [rows])


def _few_envs(train: TrainEnvConfig, policy_config: PolicyConfig, policy: Policy) -> VectorEnv:
    """Return a few environments for the preflight, in complete groups."""
    count = min(train.total_num_envs, train.group_size * max(1, ENVIRONMENTS // train.group_size))
    if train.vectorization == "vector" or _is_vector_only(train, policy_config):
        count = train.total_num_envs
    few = train.model_copy(
        update={"total_num_envs": count, "num_workers": min(train.num_workers or usable_cores(), count)}
    )
    return env_for_policy(
        make_env(few, "env.train", reset_policy_fields(train, policy_config), observation_fields(train)), policy
    )


def build_agent(config: RunConfig, checkpoint: Path, seed: int) -> tuple[EnvAgent, Callable[[], Env]]:
    """Build the `tether.control.collecting.agent.EnvAgent` of a checkpoint, and a function that makes an environment
    of ``env.eval``.

    Raises:
        ValueError: the checkpoint has no spaces and the environment cannot be made, or a package is missing.
    """
    set_threads(config.trainer.num_threads)
    section = config.env.eval
    options = env_options(section, "env.eval", {}, observation_fields(config.env.train))
    make = importlib.import_module("tether.control.envs.make")
    policy = load_policy(checkpoint / POLICY)
    if policy.spaces is None:  # saved by a version that did not save them
        spaces = make.spaces_of(options)
    else:
        spaces = importlib.import_module("tether.control.envs.spaces").spaces_from_json(policy.spaces)
    code = get_action_code(policy)
    decode = None if code is None else code.decode
    agent_type = importlib.import_module("tether.control.collecting.agent").EnvAgent
    return agent_type(policy, *spaces, options.id, decode, seed), partial(make.make_one, options)
