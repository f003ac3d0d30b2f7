"""Each side's training run, in this process: speed, returns and the curve."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks.control.tasks import LAST_EPISODES, TEST_SEED, Task, overrides

Result = dict[str, Any]
"""sps: steps a second; cpu_sps: steps a second of its processor's time; return: at the end; curve: [[steps, return]]
while training; parts (tether): seconds."""


def run_tether(name: str, task: Task, seed: int, threads: int) -> Result:
    """Train and test with tether."""
    from tether.config import load_config
    from tether.control.build import build_control_run
    from tether.metrics.loggers.jsonl import read_metrics

    with tempfile.TemporaryDirectory() as scratch:
        run = build_control_run(load_config(None, overrides(name, task, seed, threads, Path(scratch))))
        trainer = run.trainer
        rollouts: Any = trainer.rollouts
        evaluation, rollouts.evaluation = rollouts.evaluation, None
        start, used = time.perf_counter(), cpu_seconds()
        trainer.fit()
        seconds, used = time.perf_counter() - start, cpu_seconds() - used
        assert evaluation is not None
        tested = evaluation.run(rollouts.policy, "test")
        run.close()
        steps = list(read_metrics(Path(scratch)).values())
    keys = ("step", "gen", "env", "adv", "update_actor")
    parts = {key: fmean(metrics[f"timing_s/{key}"] for metrics in steps) for key in keys}
    logged = [m for m in steps if "env/return" in m]
    returns = over_last([(m["env/return"], round(m["env/num_trajectories"])) for m in logged])
    curve = [[m["perf/env_steps"], got] for m, got in zip(logged, returns, strict=True)]
    speeds = {"sps": rollouts.env_steps / seconds, "cpu_sps": rollouts.env_steps / used}
    return {**speeds, "return": tested["eval/return"], "curve": curve, "parts": parts}


def over_last(logged: Sequence[tuple[float, int]]) -> list[float]:
    """Mean returns of the last `LAST_EPISODES` episodes, from (mean return, episodes) of each log so far.

    Of the oldest log that counts, as many as are missing count, at its mean: while a task is learned, the episodes
    before are the shorter and the more numerous ones.
    """
    curve = []
    for end in range(1, len(logged) + 1):
        total = episodes = 0.0
        for mean, count in reversed(logged[:end]):
            taken = min(count, LAST_EPISODES - episodes)
            total, episodes = total + mean * taken, episodes + taken
            if episodes >= LAST_EPISODES:
                break
        curve.append(total / episodes)
    return curve


def run_sb3(name: str, task: Task, seed: int, threads: int) -> Result:
    """Train and test with Stable-Baselines3, or sb3-contrib where the policy has an LSTM."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    curve = []

    class Curve(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.model.ep_info_buffer:
                curve.append([self.num_timesteps, fmean(info["r"] for info in self.model.ep_info_buffer)])

    torch.set_num_threads(threads)
    made = {"env_id": task.env_id or name, "n_envs": task.num_envs, "wrapper_class": sb3_wrapper(name, task)}
    if task.max_episode_steps:
        made["env_kwargs"] = {"max_episode_steps": task.max_episode_steps}
    env, test = make_vec_env(**made, seed=seed), make_vec_env(**made, seed=TEST_SEED)
    if task.normalize:
        env = VecNormalize(env, gamma=task.gamma)
        test = VecNormalize(test, training=False, norm_reward=False)
    algorithm, policy = sb3_policy(name, task)
    model = algorithm(env=env, seed=seed, device="cpu", **policy, **sb3_options(task))
    start, used = time.perf_counter(), cpu_seconds()
    model.learn(task.steps, callback=Curve())
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    if task.normalize:
        test.obs_rms = env.obs_rms
    if task.action_masks:
        from sb3_contrib.common.maskable.evaluation import evaluate_policy
    mean, _ = evaluate_policy(model, test, task.test_episodes, deterministic=True, warn=False)
    steps = model.num_timesteps
    return {"sps": steps / seconds, "cpu_sps": steps / used, "return": float(mean), "curve": curve}


def cpu_seconds() -> float:
    """Seconds that processors have worked for this process and its children that have ended; not those of others."""
    return sum(os.times()[:4])


def sb3_wrapper(name: str, task: Task) -> Any:
    """The wrapper around each environment, if any."""
    if name.startswith("MiniGrid-"):
        import minigrid  # noqa: F401  # registers the environments
        from gymnasium.wrappers import FilterObservation

        inner = _wrapper_of(task) or (lambda env: env)
        return lambda env: FilterObservation(inner(env), filter_keys=["image", "direction"])
    if task.action_masks:
        from sb3_contrib.common.wrappers import ActionMasker

        return partial(ActionMasker, action_mask_fn=lambda env: env.unwrapped.action_mask(env.unwrapped.s))
    return _wrapper_of(task)


def _wrapper_of(task: Task) -> Any:
    module, _, wrapper = task.wrapper.partition(":")
    return getattr(importlib.import_module(module), wrapper) if wrapper else None


def sb3_policy(name: str, task: Task) -> tuple[Any, dict[str, Any]]:
    """The algorithm, and the policy that it is given: for MiniGrid tether's CNN, with actor and critic on one torso."""
    shared = task.share_critic
    memory = {"lstm_hidden_size": task.lstm_dim, "shared_lstm": shared, "enable_critic_lstm": not shared}
    memory["share_features_extractor"] = shared
    if not name.startswith("MiniGrid-"):
        if task.action_masks:
            from sb3_contrib import MaskablePPO

            return MaskablePPO, {"policy": "MlpPolicy"}
        if task.lstm_dim is not None:
            from sb3_contrib import RecurrentPPO

            from benchmarks.control.sb3_networks import Hidden

            layers = {"features_extractor_class": Hidden, "net_arch": []}
            return RecurrentPPO, {"policy": "MlpLstmPolicy", "policy_kwargs": layers | memory}
        from stable_baselines3 import PPO

        return PPO, {"policy": task.policy_of_sb3}
    from benchmarks.control.sb3_networks import Features

    network: dict[str, Any] = {"features_extractor_class": Features, "normalize_images": False, "net_arch": []}
    network["features_extractor_kwargs"] = {"pixel_scale": task.pixel_scale}
    if task.lstm_dim is None:
        from stable_baselines3 import PPO

        return PPO, {"policy": "MultiInputPolicy", "policy_kwargs": network}
    from sb3_contrib import RecurrentPPO

    return RecurrentPPO, {"policy": "MultiInputLstmPolicy", "policy_kwargs": network | memory}


def sb3_options(task: Task) -> dict[str, Any]:
    """A task as arguments of Stable-Baselines3's PPO, whose value loss is the squared error, not half of it."""
    return {
        "n_steps": task.rollout,
        "batch_size": task.mini_batch,
        "n_epochs": task.epochs,
        "learning_rate": task.lr if task.schedule == "constant" else lambda left: task.lr * left,
        "gamma": task.gamma,
        "gae_lambda": task.lam,
        "clip_range": task.clip,
        "ent_coef": task.entropy,
        "vf_coef": task.value_coeff / 2,
        "clip_range_vf": task.value_clip,
        "max_grad_norm": task.grad_clip,
    }


def run_cleanrl(name: str, task: Task, seed: int, threads: int) -> Result:
    """Train with CleanRL's own script, which knows MuJoCo's tasks of version 4; return: of the last 100 episodes."""
    import torch

    torch.set_num_threads(threads)
    script = "cleanrl.ppo_continuous_action" if task.normalize else "cleanrl.ppo"
    batch = task.num_envs * task.rollout
    given = {
        "env-id": name.replace("-v5", "-v4"), "seed": seed, "total-timesteps": task.steps, "num-envs": task.num_envs,
        "num-steps": task.rollout, "num-minibatches": batch // task.mini_batch, "update-epochs": task.epochs,
        "learning-rate": task.lr, "ent-coef": task.entropy, "gamma": task.gamma, "gae-lambda": task.lam,
        "clip-coef": task.clip, "vf-coef": task.value_coeff, "max-grad-norm": task.grad_clip, "cuda": False,
        "anneal-lr": task.schedule == "linear", "clip-vloss": task.value_clip is not None,
    }  # fmt: skip
    sys.argv = [script, *(f"--{key}={value}" for key, value in given.items())]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch), contextlib.redirect_stdout(said):
        runpy.run_module(script, run_name="__main__")
    number = r"\[?\s*(-?[\d.]+(?:e[+-]?\d+)?)"
    curve = [[int(at), float(got)] for at, got in re.findall(rf"step=(\d+), episodic_return={number}", said.getvalue())]
    speed = float(re.findall(r"SPS: (\d+)", said.getvalue())[-1])
    return {"sps": speed, "return": fmean(got for _, got in curve[-LAST_EPISODES:]), "curve": curve}


def run_purejaxrl(name: str, task: Task, seed: int, threads: int) -> Result:
    """Train with the unchanged `ppo.py` of a clone of PureJaxRL, which is on the path; returns are of training.

    Its compilation is timed on its own.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # XLA takes all cores that it sees
    # Its wrappers import simulators that the task does not need.
    unused = ("brax", "brax.envs", "brax.envs.wrappers", "brax.envs.wrappers.training", "navix")
    sys.modules |= dict.fromkeys(unused, MagicMock())
    import jax

    settings: dict[str, Any] = {
        "LR": task.lr, "NUM_ENVS": task.num_envs, "NUM_STEPS": task.rollout, "TOTAL_TIMESTEPS": task.steps,
        "UPDATE_EPOCHS": task.epochs, "NUM_MINIBATCHES": task.num_envs * task.rollout // task.mini_batch,
        "GAMMA": task.gamma, "GAE_LAMBDA": task.lam, "CLIP_EPS": task.clip, "ENT_COEF": task.entropy,
        "VF_COEF": task.value_coeff, "MAX_GRAD_NORM": task.grad_clip, "ACTIVATION": "tanh",
        "ENV_NAME": task.peers_env_id or task.env_id or name, "ANNEAL_LR": task.schedule == "linear",
    }  # fmt: skip
    key, used = jax.random.PRNGKey(seed), cpu_seconds()
    train = jax.jit(importlib.import_module("ppo").make_train(settings)).lower(key).compile()
    compilation = cpu_seconds() - used
    start, used = time.perf_counter(), cpu_seconds()
    metrics = jax.block_until_ready(train(key))["metrics"]
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    a_step = task.num_envs * task.rollout
    ended, returns = (np.asarray(metrics[name]) for name in ("returned_episode", "returned_episode_returns"))
    logged = [
        (a_step * step, float(got[where].mean()), int(where.sum()))
        for step, (got, where) in enumerate(zip(returns, ended, strict=True), start=1)
        if where.any()
    ]
    points = over_last([(mean, count) for _, mean, count in logged])
    curve = [[at, point] for (at, *_), point in zip(logged, points, strict=True)]
    steps = a_step * len(ended)
    speeds = {"sps": steps / seconds, "cpu_sps": steps / used, "cpu_sps_with_compilation": steps / (used + compilation)}
    return {**speeds, "return": points[-1] if points else float("nan"), "curve": curve}


SIDES = {"tether": run_tether, "sb3": run_sb3, "cleanrl": run_cleanrl, "purejaxrl": run_purejaxrl}
PEERS: dict[str, tuple[str, ...]] = {
    "sb3": ("stable-baselines3==2.9.2", "sb3-contrib==2.9.2", "cloudpickle", "farama-notifications"),
    # Its scripts are for the versions of these that were current then.
    "cleanrl": (
        "cleanrl==1.2.0", "gymnasium==0.29.1", "gym==0.23.1", "gym-notices", "numpy==1.26.4", "cloudpickle",
        "farama-notifications", "importlib_metadata", "zipp", "tensorboard", "protobuf",
    ),
    # What its clone imports; the environments that it was written for changed their names with version 1.
    "purejaxrl": ("gymnax==0.0.9", "distrax==0.1.9", "flax==0.12.8", "optax==0.2.8"),
}  # fmt: skip
