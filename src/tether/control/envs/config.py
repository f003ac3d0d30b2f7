"""`env`: simulators of embodied runs. A config with `env.train.id` trains a control policy and reads no text keys."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.section import (
    ActsIf,
    Fraction,
    Inherits,
    Name,
    Options,
    Positive,
    PositiveFloat,
    Section,
    Seed,
    Strings,
)

EnvType = Literal["gymnasium", "envpool", "jax", "tensors", "metaworld", "maniskill", "libero"]
SELF_RESETTING: tuple[str, ...] = ("envpool", "jax", "tensors")
"""The env_types that begin episodes by themselves."""
Vectorization = Literal["auto", "sync", "subprocess", "vector"]
FILMED = ActsIf(".save_video", on=(True,))


class TrainEnvConfig(Section):
    """`env.train`: the environments that experience is collected in."""

    id: Name | None = None
    """Id in env_type's registry, such as CartPole-v1, or FILE.py:FUNCTION of yours; null: not an embodied run."""
    env_type: EnvType = "gymnasium"
    """Registry of the id: Gymnasium's, envpool's, a simulator's; of jax and tensors the id is FILE.py:FUNCTION."""
    total_num_envs: Positive = 8
    """Environments that are stepped together."""
    max_steps_per_rollout_epoch: Positive = 128
    """Steps of each environment a rollout; a multiple of policy.num_action_chunks."""
    rollout_epoch: Positive = 1
    """Rollouts that are collected one after the other before each training step."""
    max_episode_steps: Positive | None = None
    """Time limit of an episode, which truncates it; null: the environment's own."""
    auto_reset: bool = True
    """Begin a new episode where one ends; false: all begin with the rollout, and what follows an end is masked."""
    ignore_terminations: bool = False
    """Go on after the environment says that the episode has ended, up to the time limit."""
    vectorization: Vectorization = "auto"
    """Step in this process, in subprocesses, or with the environment's own vector code; auto prefers the last."""
    num_workers: Positive | None = None
    """Threads of envpool, or processes of vectorization=subprocess; null: one a core."""
    timeout: PositiveFloat = 300.0
    """Seconds a step, a reset or a constructor may take; C code that keeps the GIL ignores it. (tether's own key.)"""
    group_size: Positive = 1
    """Environments in a row whose episodes begin in the same states: one group of the estimators that compare."""
    use_fixed_reset_state_ids: bool = False
    """Begin every episode of a group in the same state, the whole run long."""
    reward_coef: float = 1.0
    """Factor of every reward."""
    use_rel_reward: bool = False
    """Learn from the change of the environment's reward since the last step instead of the reward."""
    seed: Annotated[Seed, Inherits("trainer.seed")]
    """Seed of start states."""
    init_params: Options
    """Arguments of the environment's constructor."""
    wrappers: Strings = ()
    """Wrappers, the first innermost: module:Class?name=value, or FILE.py:Class?name=value. (tether's own key.)"""
    drop_observations: Strings = ()
    """Parts of a Dict observation that the policy does not see, in tests neither. (tether's own key.)"""
    info_metrics: Strings = ()
    """Numbers in the info of an episode's last step whose means are logged, of tests too. (tether's own key.)"""
    frame_stack: Positive = 1
    """Observations of so many last steps that are seen together, in tests, too. (tether's own key.)"""
    action_masks: bool | None = None
    """Sample only choices that info["action_mask"] allows; null: refuse environments that have it. (Own key.)"""


class VideoConfig(Section):
    """`env.eval.video_cfg`: videos of test episodes, those of the first environment."""

    save_video: bool = False
    """Write a video of each test."""
    video_base_dir: Annotated[str | None, FILMED] = None
    """Folder of the videos; null: video in the run's own."""
    fps: Annotated[Positive, FILMED] = 30
    """Steps a second of the video. (RLinf's key, as are the others here.)"""


class EvalEnvConfig(Section):
    """`env.eval`: the environments that the policy is tested in, without noise in its actions."""

    id: Annotated[Name | None, Inherits("env.train.id")]
    """Id in the registry."""
    env_type: Annotated[EnvType, Inherits("env.train.env_type")]
    """Registry of the id."""
    total_num_envs: Annotated[Positive, Inherits("env.train.total_num_envs")]
    """Environments that are stepped together."""
    num_episodes: Positive = 20
    """Episodes a test. (tether's own key.)"""
    max_episode_steps: Annotated[Positive | None, Inherits("env.train.max_episode_steps")]
    """Time limit of an episode; null: the environment's own."""
    ignore_terminations: bool = False
    """Go on after the environment says that the episode has ended, so that success at the end can be told."""
    vectorization: Annotated[Vectorization, Inherits("env.train.vectorization")]
    """Step in this process, in subprocesses, or with the environment's own vector code."""
    num_workers: Annotated[Positive | None, Inherits("env.train.num_workers")]
    """Threads of envpool, or processes."""
    timeout: Annotated[PositiveFloat, Inherits("env.train.timeout")]
    """Seconds a step or a reset may take."""
    seed: Seed = 10000
    """Seed of start states."""
    confidence: Fraction = 0.95
    """Level of the intervals around means. (tether's own key.)"""
    init_params: Annotated[Options, Inherits("env.train.init_params")]
    """Arguments of the environment's constructor."""
    wrappers: Annotated[Strings, Inherits("env.train.wrappers")]
    """Wrappers around each environment."""
    video_cfg: VideoConfig


class EnvConfig(Section):
    """Simulators of embodied runs."""

    train: TrainEnvConfig
    eval: EvalEnvConfig
