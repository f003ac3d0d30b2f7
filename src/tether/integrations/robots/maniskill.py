"""ManiSkill3: environments stepped one by one on a CPU, or together as one batch of tensors on a GPU."""

from __future__ import annotations

import gymnasium
import mani_skill.envs  # noqa: F401 (registers its ids)
import torch
from mani_skill.utils.registration import REGISTERED_ENVS
from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

from tether.control.envs.batched_simulation import BatchedEnv
from tether.control.envs.gymnasium_types import Arguments, Env, Info
from tether.control.envs.make import EnvOptions, ObservationOptions, ResetPolicy
from tether.spelling import did_you_mean

GPU = ("gpu", "cuda", "physx_cuda")
WITHOUT_PICTURES = ("state", "state_dict")


def make_batch(options: EnvOptions, arguments: Arguments) -> BatchedEnv | None:
    """Make all environments in one GPU simulation; return None if they run on a CPU.

    The GPU is used with ``sim_backend=gpu``, and with ``auto`` if one is available.

    Raises:
        ValueError: there is no such id or no GPU, or an option requires environments that are stepped one by one.
    """
    backend = str(arguments.get("sim_backend", "auto"))
    on_gpu = backend.split(":")[0] in GPU or (backend == "auto" and torch.cuda.is_available())
    if not on_gpu:
        return None
    for key, is_set in {
        "wrappers": bool(options.wrappers),
        "drop_observations, frame_stack or info_metrics": options.view != ObservationOptions(),
        "group_size, auto_reset, use_fixed_reset_state_ids or policy.num_action_chunks": options.reset_policy
        != ResetPolicy(),
        "video_cfg.save_video": "render_mode" in arguments,
        "vectorization": options.vectorization in ("sync", "subprocess"),
    }.items():
        if is_set:
            raise ValueError(
                f"{options.role}.init_params.sim_backend: {backend} simulates all environments at once, which "
                f"{options.role}.{key} does not allow. Set sim_backend=cpu, or leave the other key at its default."
            )
    env = _made(options, {**_simulation(arguments, "gpu"), "num_envs": options.num_envs})
    return BatchedEnv(options.id, env, options.num_envs, ignore_terminations=options.ignore_terminations)


def make_env(options: EnvOptions, arguments: Arguments) -> Env:
    """Make one environment, simulated on a CPU.

    Raises:
        ValueError: there is no such id, or no Vulkan driver.
    """
    env: Env = CPUGymWrapper(_made(options, _simulation(arguments, "cpu")))
    return env


def _made(options: EnvOptions, arguments: Arguments) -> Env:
    try:
        return gymnasium.make(_known(options), **arguments)
    except RuntimeError as error:
        if 'device "cuda"' in str(error):
            raise ValueError(
                f"{options.role}.init_params.sim_backend: {arguments['sim_backend']} simulates on a GPU, and none is "
                f"found. Set {options.role}.init_params.sim_backend=cpu."
            ) from error
        if "rendering device" not in str(error):
            raise
        raise ValueError(
            f"{options.role}.id: {options.id} finds no Vulkan driver, which ManiSkill's tasks need even where nothing "
            "is drawn, for the colours of their objects. Install one; mesa-vulkan-drivers has one for CPUs."
        ) from error


def _simulation(arguments: Arguments, backend: str) -> Info:
    """Return the simulation's arguments; by default observations are the state, and nothing is rendered."""
    chosen = {"obs_mode": "state", "sim_backend": backend, **arguments}
    if chosen["sim_backend"] == "auto":
        chosen["sim_backend"] = backend
    if chosen["obs_mode"] in WITHOUT_PICTURES and "render_mode" not in chosen:
        chosen.setdefault("render_backend", "none")
    return {"disable_env_checker": True, **chosen}


def _known(options: EnvOptions) -> str:
    if options.id in REGISTERED_ENVS:
        return options.id
    fix = did_you_mean(options.id, REGISTERED_ENVS, count=3) or " PickCube-v1 is one that there is."
    raise ValueError(f"{options.role}.id: ManiSkill has no {options.id}.{fix}")
