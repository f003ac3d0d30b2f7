"""The tasks and their hyperparameters, which all sides take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    grad_clip: float = 0.5
    schedule: str = "linear"
    """Of the learning rate: down to 0, or constant."""
    lstm_dim: int | None = None
    """Width of an LSTM after the hidden layers; None: there is none."""
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
    # Partial views of 7 x 7 cells: a CNN, and a CNN with an LSTM where the task needs a memory.
    "MiniGrid-DoorKey-6x6-v0": Task(400_000, 16, 128, 256, 4, 1e-3, 0.01, normalize=False, sides=("tether", "sb3")),
    "MiniGrid-MemoryS7-v0": Task(
        400_000, 16, 128, 256, 4, 1e-3, 0.01, normalize=False, lstm_dim=128, sides=("tether", "sb3")
    ),
}


def overrides(name: str, task: Task, seed: int, threads: int, folder: Path) -> list[str]:
    """The task as a configuration of tether."""
    actor = "actor_rollout_ref.actor"
    return [
        f"env.train.id={name}",
        f"env.train.total_num_envs={task.num_envs}",
        f"env.train.max_steps_per_rollout_epoch={task.rollout}",
        f"env.eval.num_episodes={TEST_EPISODES}",
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
        f"policy.normalize_observations={task.normalize}",
        f"policy.normalize_rewards={task.normalize}",
        *([f"policy.lstm_dim={task.lstm_dim}"] if task.lstm_dim else []),
        f"trainer.total_env_steps={task.steps}",
        f"trainer.seed={seed}",
        f"trainer.num_threads={threads}",
        "trainer.logger=file",
        "trainer.log_freq=1",
        "trainer.save_freq=-1",
        f"trainer.test_freq={10**9}",
        f"trainer.default_local_dir={folder}",
    ]
