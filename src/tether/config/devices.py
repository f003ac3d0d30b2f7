"""The devices of each model of a run: all of them, or a subset that the model has alone or shares with other models.

Devices are numbered in this order: those of ``trainer.nnodes``, those that only sample
(``actor_rollout_ref.rollout.nnodes``), those that only score (``reward_model.enable_resource_pool``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tether.config.kl import asks_reference, full_kl_setting, reference_is_policy, reference_runs_with_actor
from tether.config.problems import Problem
from tether.config.schema.root import RunConfig
from tether.runtime.ranks import Pool
from tether.spelling import did_you_mean
from tether.text.sampling.config import SERVERS

PATH = "cluster.component_placement"
MODELS = {
    "actor": "actor",
    "critic": "critic",
    "inference": "reference",
    "rollout": "sampler",
    "reward": "reward_model",
}
"""RLinf's name of a component -> the model of a run."""
NAMES = {model: component for component, model in MODELS.items()}
ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward_model"
LORA = "actor_rollout_ref.model.lora_rank"


def pools(cfg: RunConfig) -> tuple[Pool, ...]:
    """Return the device pools of a run, in the order of device numbers."""
    trainer, rollout, reward = cfg.trainer, cfg.actor_rollout_ref.rollout, cfg.reward_model
    pools_of_run = [Pool(trainer.nnodes, trainer.n_gpus_per_node)]
    if rollout.nnodes:
        pools_of_run.append(Pool(rollout.nnodes, rollout.n_gpus_per_node, ROLLOUT))
    if reward.enable and reward.enable_resource_pool:
        pools_of_run.append(Pool(reward.nnodes, reward.n_gpus_per_node, REWARD))
    return tuple(pools_of_run)


def uses_megatron(config: RunConfig) -> bool:
    """Whether Megatron trains the models of a run."""
    return device_count(config) > 1 and config.actor_rollout_ref.actor.strategy == "megatron"


def device_count(cfg: RunConfig) -> int:
    """Return the number of devices of a run."""
    return sum(pool.size for pool in pools(cfg))


def placed(cfg: RunConfig) -> dict[str, range]:
    """Return the devices of each model of a run.

    Raises:
        ValueError: the placement is invalid; call `misplaced` first to report that.
    """
    devices = _placed(cfg)
    if isinstance(devices, Problem):
        raise ValueError(f"{devices.path}: {devices.what}. {devices.fix}")
    return devices


def devices_of(cfg: RunConfig, model: str) -> range:
    """Return the devices of a model; if the run does not have the model, return the actor's."""
    devices = placed(cfg)
    return devices.get(model, devices["actor"])


def misplaced(cfg: RunConfig) -> Problem | None:
    """Return the problem with an invalid placement, or None if it is valid."""
    devices = _placed(cfg)
    return devices if isinstance(devices, Problem) else _wrongly_separate(cfg, devices)


def models_of(cfg: RunConfig) -> set[str]:
    """Return the models that run on the devices of a run; embodied runs and fine-tuning only have the policy."""
    if cfg.env.train.id is not None or cfg.sft.enable:
        return {"actor"}
    has = {
        "actor": True,
        "critic": cfg.critic.enable,
        "reference": asks_reference(cfg) and not _all_teachers_are_served(cfg),
        "sampler": cfg.actor_rollout_ref.rollout.name not in SERVERS or _places_servers(cfg),
        "reward_model": cfg.reward_model.enable and cfg.reward_model.server.url is None,
    }
    return {name for name, is_used in has.items() if is_used}


def _all_teachers_are_served(cfg: RunConfig) -> bool:
    """Whether all teachers run on servers; an invalid list of teachers is reported separately."""
    teachers = cfg.distillation.teacher_models.values() if cfg.distillation.enabled else ()
    return bool(teachers) and all(isinstance(entry, dict) and entry.get("server_url") for entry in teachers)


def _places_servers(cfg: RunConfig) -> bool:
    """Whether the run starts servers on explicitly placed devices; by default they use all of ``trainer.nnodes``."""
    rollout = cfg.actor_rollout_ref.rollout
    names = ",".join(map(str, cfg.cluster.component_placement)).replace(" ", "").split(",")
    return not rollout.server_urls and (rollout.nnodes > 0 or NAMES["sampler"] in names)


def _placed(cfg: RunConfig) -> dict[str, range] | Problem:
    models, trainer_devices = models_of(cfg), cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    devices = dict.fromkeys(sorted(models), range(trainer_devices))
    if cfg.cluster.component_placement and cfg.env.train.id is None:
        configured = _placement_of_config(cfg, trainer_devices)
        if isinstance(configured, Problem):
            return configured
        devices |= {name: ranks for name, ranks in configured.items() if name in models}
    start = trainer_devices
    for pool, model in zip(pools(cfg)[1:], [m for m, key in _separate_pools(cfg)], strict=True):
        if not pool.size:
            return Problem(f"{pool.section}.nnodes", "0 machines have no device", "set it to 1 or more")
        if model not in models:
            why = f": the servers of {ROLLOUT}.server_urls sample" if pool.section == ROLLOUT else ""
            what = f"{pool.size} devices have nothing to do{why}"
            return Problem(f"{pool.section}.nnodes", what, f"leave {pool.section}.nnodes out")
        devices[model] = range(start, start := start + pool.size)
    return _overlap(devices) or _idle(devices, start) or devices


def _separate_pools(cfg: RunConfig) -> list[tuple[str, str]]:
    """Return the models that have their own device pool, each with the key that configures the pool."""
    keys = {ROLLOUT: ("sampler", f"{ROLLOUT}.nnodes"), REWARD: ("reward_model", f"{REWARD}.enable_resource_pool")}
    return [keys[pool.section] for pool in pools(cfg)[1:]]


def _placement_of_config(cfg: RunConfig, devices: int) -> dict[str, range] | Problem:
    """Return the devices of each model according to ``cluster.component_placement``, or the problem with it."""
    if separate := _separate_pools(cfg):
        return Problem(
            separate[0][1], f"sets separate devices in addition to {PATH}", f"keep one of the two, such as {PATH}"
        )
    devices_by_model: dict[str, range] = {}
    for names, value in cfg.cluster.component_placement.items():
        for name in str(names).replace(" ", "").split(","):
            path, ranks = f"{PATH}.{name}", _ranks(value, devices)
            if name not in MODELS:
                what = f"is no model of a text run.{did_you_mean(name, MODELS)}"
                return Problem(path, what, f"a run has {', '.join(MODELS)}")
            if MODELS[name] in devices_by_model:
                return Problem(path, "is placed twice", "keep one of the two")
            if isinstance(ranks, str):
                return Problem(path, ranks, "write a device or a range of them, such as 0-3, or all")
            devices_by_model[MODELS[name]] = ranks
    return devices_by_model


def _ranks(value: object, devices: int) -> range | str:
    """Return the devices of ``0-3``, ``0`` or ``all``, or a text that says what is wrong with the value."""
    if str(value).strip().lower() == "all":
        return range(devices)
    match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", str(value))
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if last < first:
        return f"{value!r} is no range of devices"
    if last >= devices:
        return f"device {last} does not exist: there are {devices}"
    return range(first, last + 1)


def _overlap(devices_by_model: Mapping[str, range]) -> Problem | None:
    for one, mine in devices_by_model.items():
        for other, theirs in devices_by_model.items():
            shared = sorted({*mine} & {*theirs})
            if shared and mine != theirs:
                what = f"shares devices {shared} of {_shown(mine)} with {NAMES[other]}, which has {_shown(theirs)}"
                fix = "give both the same devices, or disjoint ones; a component that is not named is on all devices"
                return Problem(f"{PATH}.{NAMES[one]}", what, fix)
    return None


def _idle(devices_by_model: Mapping[str, range], devices: int) -> Problem | None:
    idle = sorted({*range(devices)}.difference(*devices_by_model.values()))
    if not idle:
        return None
    return Problem(PATH, f"leaves devices {idle} with nothing to do", "place a model there, or ask for fewer devices")


def _shown(ranks: range) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _wrongly_separate(cfg: RunConfig, devices_by_model: Mapping[str, range]) -> Problem | None:
    """Return the problem of a model that is placed on its own devices but must share the actor's."""
    settings, separate = (
        cfg.actor_rollout_ref,
        {name for name, ranks in devices_by_model.items() if ranks != devices_by_model["actor"]},
    )
    if not separate:
        return None
    if settings.actor.strategy == "megatron" and "sampler" in separate and settings.rollout.name not in SERVERS:
        key = dict(_separate_pools(cfg)).get("sampler", f"{PATH}.{NAMES['sampler']}")
        what = "has separate devices; with actor_rollout_ref.actor.strategy=megatron it shares the actor's"
        return Problem(key, what, "give both the same devices, or sample with vLLM or SGLang")
    if "reference" in separate and reference_is_policy(cfg):
        what = f"is separate from the actor, whose model it shares ({LORA}={settings.model.lora_rank})"
        return Problem(f"{PATH}.inference", what, "give it the devices of the actor")
    if "reference" in separate and reference_runs_with_actor(cfg):
        setting = "=".join(full_kl_setting(cfg))
        what = f"is separate from the actor, which computes the KL on both models together ({setting})"
        return Problem(f"{PATH}.inference", what, "give it the devices of the actor")
    return None
