"""Control policies side by side with Stable-Baselines3: the same environments, hyperparameters, seeds and machine.

    python -m benchmarks.control CartPole-v1 --seeds 3
    python -m benchmarks.control HalfCheetah-v5 --seeds 3 --steps 1000000

The runs of both take turns, each in a process of its own. Speed is environment steps of the whole training over its
seconds, without imports and without the test at the end. Stable-Baselines3 is fetched from the package registry into
a folder of its own, without its dependencies, so both use the same torch and the same simulators.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

PEERS = ("stable-baselines3", "cloudpickle", "farama-notifications")
TEST_EPISODES, TEST_SEED = 20, 10_000


@dataclass(frozen=True)
class Task:
    """Hyperparameters of a task, close to those of CleanRL, which both sides take."""

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
    grad_clip: float = 0.5


TASKS = {
    "CartPole-v1": Task(500_000, 8, 128, 256, 4, 2.5e-4, 0.01, normalize=False),
    "Acrobot-v1": Task(500_000, 8, 128, 256, 4, 2.5e-4, 0.01, normalize=False),
    "HalfCheetah-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    "Hopper-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
    "Walker2d-v5": Task(1_000_000, 1, 2048, 64, 10, 3e-4, 0.0, normalize=True),
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
        f"{actor}.optim.clip_grad={task.grad_clip}",
        f"critic.loss_coef={task.value_coeff}",
        f"policy.normalize_observations={task.normalize}",
        f"policy.normalize_rewards={task.normalize}",
        f"trainer.total_env_steps={task.steps}",
        f"trainer.seed={seed}",
        f"trainer.num_threads={threads}",
        "trainer.logger=file",
        "trainer.save_freq=-1",
        f"trainer.test_freq={10**9}",
        f"trainer.default_local_dir={folder}",
    ]


def run_tether(name: str, task: Task, seed: int, threads: int) -> dict[str, Any]:
    """Train and test with tether in this process."""
    import time

    from tether.config import load_config
    from tether.metrics.loggers.jsonl import read_metrics
    from tether.trainer.build.control import build_control_run

    with tempfile.TemporaryDirectory() as scratch:
        run = build_control_run(load_config(None, overrides(name, task, seed, threads, Path(scratch))))
        trainer = run.trainer
        evaluation, trainer.evaluation = trainer.evaluation, None
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        assert evaluation is not None
        tested = evaluation.run(trainer.policy, "test")
        run.close()
        steps = list(read_metrics(Path(scratch)).values())
    parts = {key: fmean(metrics[f"timing_s/{key}"] for metrics in steps) for key in ("step", "gen", "env", "adv")}
    parts["update_actor"] = fmean(metrics["timing_s/update_actor"] for metrics in steps)
    taken = trainer.step_number * trainer.collector.steps * trainer.collector.env.num_envs
    return {"sps": taken / seconds, "return": tested["eval/return"], "parts": parts}


def run_sb3(name: str, task: Task, seed: int, threads: int) -> dict[str, Any]:
    """Train and test with Stable-Baselines3 in this process."""
    import time

    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(threads)
    env = make_vec_env(name, task.num_envs, seed=seed)
    test = make_vec_env(name, task.num_envs, seed=TEST_SEED)
    if task.normalize:
        env = VecNormalize(env, gamma=task.gamma)
        test = VecNormalize(test, training=False, norm_reward=False)
    model = PPO(
        "MlpPolicy", env, n_steps=task.rollout, batch_size=task.mini_batch, n_epochs=task.epochs,
        learning_rate=lambda left: task.lr * left, gamma=task.gamma, gae_lambda=task.lam, clip_range=task.clip,
        ent_coef=task.entropy, vf_coef=task.value_coeff, max_grad_norm=task.grad_clip, seed=seed, device="cpu",
    )  # fmt: skip
    start = time.perf_counter()
    model.learn(task.steps)
    seconds = time.perf_counter() - start
    if task.normalize:
        test.obs_rms = env.obs_rms
    mean, _ = evaluate_policy(model, test, TEST_EPISODES, deterministic=True, warn=False)
    return {"sps": model.num_timesteps / seconds, "return": float(mean)}


SIDES = {"tether": run_tether, "sb3": run_sb3}


def fetch_peers() -> Path:
    """Install the peers, once, into a folder beside this machine's other temporary files."""
    folder = Path(tempfile.gettempdir()) / "tether-benchmark-peers"
    if not (folder / "stable_baselines3").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *PEERS], check=True)
    return folder


def measure(side: str, name: str, task: Task, seed: int, threads: int, peers: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *([str(peers)] if side == "sb3" else [])])
    request = json.dumps({"side": side, "name": name, "task": asdict(task), "seed": seed, "threads": threads})
    command = [sys.executable, "-m", "benchmarks.control", "--one", request]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(name: str, task: Task, results: dict[str, list[dict[str, Any]]]) -> None:
    """Print both tables."""
    console = Console()
    table = Table(title=f"{name}: {task.steps:,} steps, {task.num_envs} environments, same hyperparameters")
    for column in ("", "seeds", "steps a second", "return", "best", "worst"):
        table.add_column(column)
    for side, runs in results.items():
        returns, speeds = [run["return"] for run in runs], [run["sps"] for run in runs]
        spread = f" ± {stdev(returns):.1f}" if len(returns) > 1 else ""
        row = (f"{fmean(speeds):,.0f}", f"{fmean(returns):.1f}{spread}", f"{max(returns):.1f}", f"{min(returns):.1f}")
        table.add_row(side, str(len(runs)), *row)
    console.print(table)
    if len(results) == 2:
        ours, theirs = (fmean(run["sps"] for run in results[side]) for side in ("tether", "sb3"))
        console.print(f"tether / sb3: {ours / theirs:.2f} times the steps a second")
    if "tether" not in results:
        return
    parts = {key: fmean(run["parts"][key] for run in results["tether"]) for key in results["tether"][0]["parts"]}
    rows = {
        "environments": parts["env"],
        "choosing actions": parts["gen"] - parts["env"],
        "values, advantages": parts["adv"],
        "update": parts["update_actor"],
    }
    table = Table(title="where tether's time goes")
    for column in ("", "ms a training step", "share"):
        table.add_column(column)
    for part, seconds in {**rows, "rest": parts["step"] - sum(rows.values()), "all": parts["step"]}.items():
        table.add_row(part, f"{1000 * seconds:.2f}", f"{seconds / parts['step']:.0%}")
    console.print(table)


def main() -> None:
    """Parse the command line and take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--threads", type=int, default=1, help="torch's, on both sides")
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        asked = json.loads(given.one)
        task = Task(**asked["task"])
        print(json.dumps(SIDES[asked["side"]](asked["name"], task, asked["seed"], asked["threads"])))
        return
    task = TASKS[given.task]
    if given.steps:
        task = Task(**(asdict(task) | {"steps": given.steps}))
    sides = [given.only] if given.only else list(SIDES)
    peers = fetch_peers() if "sb3" in sides else Path()
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(1, given.seeds + 1):
        for side in sides:
            results[side].append(measure(side, given.task, task, seed, given.threads, peers))
            print(
                f"seed {seed} {side}: {results[side][-1]['sps']:,.0f} steps/s, return {results[side][-1]['return']:.1f}"
            )
    show(given.task, task, results)


if __name__ == "__main__":
    main()
