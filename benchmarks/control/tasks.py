"""The tasks and their hyperparameters, which all sides take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TEST_EPISODES, TEST_SEED = 20, 10_000
LAST_EPISODES = 100
"""Points of the curves are means over so many episodes."""


@dataclass(frozen=True)
class Task:
    """Hyperparameters of a task, close to those of CleanRL."""

    steps: int
    num_envs: int
    rollout: int
    mini_batch: int
    epochs: int
    lr: float
    entropy: float
    normalize: bool
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    value_coeff: float = 0.5
    """Factor of half the squared error, as in tether and CleanRL."""
    value_clip: float | None = None
    """Clip range of new values around old ones in the value loss. PureJaxRL always clips by `clip`."""
    grad_clip: float = 0.5
    schedule: str = "linear"
    """Of the learning rate: down to 0, or constant."""
    lstm_dim: int | None = None
    """Width of an LSTM after the hidden layers; None: there is none."""
    share_critic: bool = True
    """With an LSTM: actor and critic have one. In Stable-Baselines3 only the actor's gradient reaches a shared one."""
    env_id: str = ""
    """Of the environment, where the task has another name."""
    peers_env_id: str = ""
    """Id of the environment on the other sides, where it differs."""
    env_type: str = "gymnasium"
    """tether's way to make the environment."""
    max_episode_steps: int | None = None
    """Time limit, where the environment has none."""
    wrapper: str = ""
    """Around each environment, as module:Class."""
    pixel_scale: float = 10.0
    """MiniGrid's pictures are divided by it: numbers of objects, up to 10, of colours and of states."""
    dtype: str = "float32"
    """Format in which tether's CNN computes."""
    action_masks: bool = False
    """The environment tells which choices are allowed."""
    policy_of_sb3: str = "MlpPolicy"
    """Stable-Baselines3's name of the policy that tether has by default."""
    test_episodes: int = TEST_EPISODES
    seeds: int | None = None
    """At least so many, where single ones say little."""
    sides: tuple[str, ...] = ("tether", "sb3", "cleanrl")
    """Libraries that have this kind of policy."""


TASKS = {
    "CartPole-v1": Task(500_000, 8, 128, 256, 4, 2.5e-4, 0.01, normalize=False),
    "Acrobot-v1": Task(500_000, 8, 128, 256, 4, 2.5e-4, 0.01, normalize=False),
    "HalfCheetah-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    "Hopper-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    "Walker2d-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    # The defaults of Stable-Baselines3, whose value loss is not halved.
    "InvertedDoublePendulum-v5": Task(
        61_440, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True, value_coeff=1.0, schedule="constant"
    ),
    # Partial views of 7 x 7 cells: a CNN, and a CNN with an LSTM where the task needs a memory. There one object in one
    # cell decides, which numbers of objects hide and one-hot cells show.
    "MiniGrid-DoorKey-6x6-v0": Task(400_000, 16, 128, 256, 4, 1e-3, 0.01, normalize=False, sides=("tether", "sb3")),
    "MiniGrid-MemoryS7-v0": Task(
        393_216,
        32,
        128,
        1024,
        8,
        1e-3,
        0.01,
        normalize=False,
        lstm_dim=128,
        share_critic=False,
        wrapper="minigrid.wrappers:OneHotPartialObsWrapper",
        pixel_scale=1.0,
        sides=("tether", "sb3"),
        test_episodes=200,
    ),
}


def short(*numbers: float, normalize: bool = False, **more: Any) -> Task:
    """Return a task of the comparison of learning: a constant rate, and the weight of the critic that the peer has."""
    options = {"value_coeff": 1.0, "schedule": "constant", "sides": ("tether", "sb3")}
    return Task(*numbers, normalize=normalize, **options | more)  # type: ignore[arg-type]


FLAT = "gymnasium.wrappers:FlattenObservation"
T_MAZE = "benchmarks.control.t_maze:TMaze-v0"
LEARNING = {
    "Pendulum-v1": short(61_440, 4, 1024, 64, 10, 1e-3, 0.0, gamma=0.9),
    "LunarLander-v3": short(61_440, 8, 256, 64, 4, 3e-4, 0.01, gamma=0.999, lam=0.98),
    "Taxi-v4": short(122_880, 8, 128, 256, 4, 1e-3, 0.01, action_masks=True, test_episodes=100),
    "FrozenLake-v1": short(40_960, 8, 128, 256, 4, 1e-3, 0.01, test_episodes=200),
    "CliffWalking-v1": short(  # its returns begin at -1800: rewards that are not normalised teach neither side
        40_960, 8, 128, 256, 4, 1e-3, 0.01, normalize=True, wrapper=FLAT, max_episode_steps=200
    ),
    "Blackjack-v1": short(40_960, 8, 128, 256, 4, 1e-3, 0.01, wrapper=FLAT, test_episodes=400),
    "Reacher-v5": short(61_440, 4, 512, 64, 10, 3e-4, 0.0, normalize=True, test_episodes=100),
    "Swimmer-v5": short(61_440, 4, 512, 256, 10, 6e-4, 0.0, normalize=True, gamma=0.9999, lam=0.98),
    "InvertedPendulum-v5": short(30_720, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    "InvertedDoublePendulum-v5": replace(TASKS["InvertedDoublePendulum-v5"], sides=("tether", "sb3"), seeds=10),
    "Pusher-v5": short(40_960, 4, 512, 64, 10, 3e-4, 0.0, normalize=True),
    # Where memory alone decides: 1.0 is the most with one, 0.5 without.
    "T-maze": short(
        40_960, 8, 128, 256, 4, 1e-3, 0.01, env_id=T_MAZE, lstm_dim=64, share_critic=False, test_episodes=200
    ),
    "MiniGrid-MemoryS7-v0": TASKS["MiniGrid-MemoryS7-v0"],
    "T-maze, no memory": short(40_960, 8, 128, 256, 4, 1e-3, 0.01, env_id=T_MAZE, test_episodes=200),
}
"""The tasks of the table of `benchmarks.control.learning`; hyperparameters close to those of RL Baselines3 Zoo."""
TASKS |= LEARNING


def overrides(name: str, task: Task, seed: int, threads: int, folder: Path) -> list[str]:
    """The task as a configuration of tether."""
    actor = "actor_rollout_ref.actor"
    return [
        f"env.train.id={task.env_id or name}",
        f"env.train.env_type={task.env_type}",
        f"env.train.total_num_envs={task.num_envs}",
        f"env.train.max_steps_per_rollout_epoch={task.rollout}",
        f"env.eval.num_episodes={task.test_episodes}",
        f"env.eval.seed={TEST_SEED}",
        f"algorithm.gamma={task.gamma}",
        f"algorithm.lam={task.lam}",
        f"{actor}.ppo_mini_batch_size={task.mini_batch}",
        f"{actor}.ppo_epochs={task.epochs}",
        f"{actor}.clip_ratio={task.clip}",
        f"{actor}.entropy_coeff={task.entropy}",
        f"{actor}.optim.lr={task.lr}",
        f"{actor}.optim.lr_scheduler_type={task.schedule}",
        f"{actor}.optim.clip_grad={task.grad_clip}",
        f"critic.loss_coef={task.value_coeff}",
        f"critic.cliprange_value={'null' if task.value_clip is None else task.value_clip}",
        f"policy.normalize_observations={task.normalize}",
        f"policy.normalize_rewards={task.normalize}",
        *([f"policy.lstm_dim={task.lstm_dim}", f"policy.share_critic={task.share_critic}"] if task.lstm_dim else []),
        *([f"env.train.max_episode_steps={task.max_episode_steps}"] if task.max_episode_steps else []),
        *([f"env.train.wrappers=[{task.wrapper}]"] if task.wrapper else []),
        *([f"policy.pixel_scale={task.pixel_scale}"] if name.startswith("MiniGrid-") else []),
        *([f"policy.dtype={task.dtype}"] if task.dtype != "float32" else []),
        *(["env.train.action_masks=true"] if task.action_masks else []),
        f"trainer.total_env_steps={task.steps}",
        f"trainer.seed={seed}",
        f"trainer.num_threads={threads}",
        "trainer.logger=file",
        "trainer.log_freq=1",
        "trainer.save_freq=-1",
        f"trainer.test_freq={10**9}",
        f"trainer.default_local_dir={folder}",
    ]
