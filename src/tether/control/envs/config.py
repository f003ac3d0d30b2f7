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
"""The env_types whose environments reset themselves."""
Vectorization = Literal["auto", "sync", "subprocess", "vector"]
FILMED = ActsIf(".save_video", on=(True,))


class TrainEnvConfig(Section):
    """`env.train`: the environments in which the policy is trained."""

    id: Name | None = None
    """Environment id, such as CartPole-v1, or your FILE.py:FUNCTION; null: not an embodied run."""
    env_type: EnvType = "gymnasium"
    """Registry of the id: Gymnasium's, envpool's or a simulator's; for jax and tensors the id is FILE.py:FUNCTION."""
    total_num_envs: Positive = 8
    """Number of environments that are stepped together."""
    max_steps_per_rollout_epoch: Positive = 128
    """Steps of each environment per rollout; a multiple of policy.num_action_chunks."""
    rollout_epoch: Positive = 1
    """Number of rollouts that are collected one after the other for each training step."""
    max_episode_steps: Positive | None = None
    """Time limit that truncates an episode, in steps; null: the environment's own."""
    auto_reset: bool = True
    """Begin a new episode when one ends; false: episodes begin with a rollout, and steps after their end are masked."""
    ignore_terminations: bool = False
    """Continue an episode after the environment terminates it, up to the time limit."""
    vectorization: Vectorization = "auto"
    """Step in this process, in subprocesses, or with the environment's vector code, which auto prefers."""
    num_workers: Positive | None = None
    """Number of threads of envpool, or of processes with vectorization=subprocess; null: one per core."""
    timeout: PositiveFloat = 300.0
    """Maximum seconds for a step, reset or constructor; cannot interrupt C code that holds the GIL. (tether's key.)"""
    group_size: Positive = 1
    """Number of adjacent environments whose episodes begin in the same states: a group for estimators such as grpo."""
    use_fixed_reset_state_ids: bool = False
    """Begin all episodes of a group in the same state throughout the run."""
    reward_coef: float = 1.0
    """Factor that multiplies every reward."""
    use_rel_reward: bool = False
    """Replace each reward with its change since the previous step."""
    seed: Annotated[Seed, Inherits("trainer.seed")]
    """Seed of start states."""
    init_params: Options
    """Keyword arguments of the environment's constructor."""
    wrappers: Strings = ()
    """Wrappers, innermost first: module:Class?name=value, or FILE.py:Class?name=value. (tether's own key.)"""
    drop_observations: Strings = ()
    """Entries of a Dict observation to hide from the policy, in training and evaluation. (tether's own key.)"""
    info_metrics: Strings = ()
    """Names of numbers in the info of an episode's last step to log means of, in evaluation too. (tether's own key.)"""
    frame_stack: Positive = 1
    """Number of most recent observations to stack, in training and evaluation. (tether's own key.)"""
    action_masks: bool | None = None
    """Sample only actions that info["action_mask"] allows; null: refuse environments that have masks. (Own key.)"""


class VideoConfig(Section):
    """`env.eval.video_cfg`: videos of the first environment in evaluations."""

    save_video: bool = False
    """Write a video of each evaluation."""
    video_base_dir: Annotated[str | None, FILMED] = None
    """Folder of the videos; null: the folder video of the run."""
    fps: Annotated[Positive, FILMED] = 30
    """Frames per second of the video, one frame per step. (RLinf's key, as are the others here.)"""


class EvalEnvConfig(Section):
    """`env.eval`: the environments in which the policy is evaluated, without noise in its actions."""

    id: Annotated[Name | None, Inherits("env.train.id")]
    """Id in the registry."""
    env_type: Annotated[EnvType, Inherits("env.train.env_type")]
    """Registry of the id."""
    total_num_envs: Annotated[Positive, Inherits("env.train.total_num_envs")]
    """Number of environments that are stepped together."""
    num_episodes: Positive = 20
    """Number of episodes per evaluation. (tether's own key.)"""
    max_episode_steps: Annotated[Positive | None, Inherits("env.train.max_episode_steps")]
    """Time limit of an episode, in steps; null: the environment's own."""
    ignore_terminations: bool = False
    """Continue an episode after the environment terminates it, so that success at its end can be measured."""
    vectorization: Annotated[Vectorization, Inherits("env.train.vectorization")]
    """Step in this process, in subprocesses, or with the environment's vector code."""
    num_workers: Annotated[Positive | None, Inherits("env.train.num_workers")]
    """Number of threads of envpool, or of processes."""
    timeout: Annotated[PositiveFloat, Inherits("env.train.timeout")]
    """Maximum seconds for a step, reset or constructor."""
    seed: Seed = 10000
    """Seed of start states."""
    confidence: Fraction = 0.95
    """Level of the confidence intervals of means. (tether's own key.)"""
    init_params: Annotated[Options, Inherits("env.train.init_params")]
    """Keyword arguments of the environment's constructor."""
    wrappers: Annotated[Strings, Inherits("env.train.wrappers")]
    """Wrappers around each environment."""
    video_cfg: VideoConfig


class EnvConfig(Section):
    """Simulators of embodied runs."""

    train: TrainEnvConfig
    eval: EvalEnvConfig
