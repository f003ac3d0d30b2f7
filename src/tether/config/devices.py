"""Which devices of a run each of its models has: all of them, or a part that no other has or that others share.

Devices are numbered over those of ``trainer.nnodes`` first, then those that only sample
(``actor_rollout_ref.rollout.nnodes``), then those that only score (``reward_model.enable_resource_pool``).
"""

from __future__ import annotations

from collections.abc import Mapping

from tether.config.kl import asks_reference, full_kl_in_loss, reference_runs_with_actor
from tether.config.placement import PATH, Placement, parse_placements
from tether.config.problems import Problem
from tether.config.schema.rollout import SERVERS
from tether.config.schema.root import RunConfig
from tether.runtime.ranks import Pool

MODELS = {
    "actor": "actor",
    "critic": "critic",
    "inference": "reference",
    "rollout": "sampler",
    "reward": "reward_model",
}
"""RLinf's component -> the model of a run."""
NAMES = {model: component for component, model in MODELS.items()}
ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward_model"
LORA = "actor_rollout_ref.model.lora_rank"


def pools(cfg: RunConfig) -> tuple[Pool, ...]:
    """The devices of a run, in the order of their numbers."""
    trainer, rollout, reward = cfg.trainer, cfg.actor_rollout_ref.rollout, cfg.reward_model
    found = [Pool(trainer.nnodes, trainer.n_gpus_per_node)]
    if rollout.nnodes:
        found.append(Pool(rollout.nnodes, rollout.n_gpus_per_node, ROLLOUT))
    if reward.enable and reward.enable_resource_pool:
        found.append(Pool(reward.nnodes, reward.n_gpus_per_node, REWARD))
    return tuple(found)


def device_count(cfg: RunConfig) -> int:
    """All devices of a run."""
    return sum(pool.size for pool in pools(cfg))


def placed(cfg: RunConfig) -> dict[str, range]:
    """The devices of each model that a run has.

    Raises:
        ValueError: the placement does not add up, which `misplaced` says before.
    """
    found = _placed(cfg)
    if isinstance(found, Problem):
        raise ValueError(f"{found.path}: {found.what}. {found.fix}")
    return found


def devices_of(cfg: RunConfig, model: str) -> range:
    """Those of one model, or of the actor where there is no such model; see `placed`."""
    found = placed(cfg)
    return found.get(model, found["actor"])


def misplaced(cfg: RunConfig) -> Problem | None:
    """Why the devices of the models do not add up, if they do not."""
    found = _placed(cfg)
    return found if isinstance(found, Problem) else _unfit(cfg, found)


def models_of(cfg: RunConfig) -> set[str]:
    """The models that the devices of a run hold; of an embodied run the policy, with its critic, acts there, too."""
    if cfg.env.train.id is not None:
        return {"actor"}
    has = {
        "actor": True,
        "critic": cfg.critic.enable,
        "reference": asks_reference(cfg),
        "sampler": cfg.actor_rollout_ref.rollout.name not in SERVERS,
        "reward_model": cfg.reward_model.enable and cfg.reward_model.server.url is None,
    }
    return {name for name, is_there in has.items() if is_there}


def _placed(cfg: RunConfig) -> dict[str, range] | Problem:
    there, first = models_of(cfg), cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    found = dict.fromkeys(sorted(there), range(first))
    if cfg.cluster.component_placement and cfg.env.train.id is None:
        given = _given(cfg, first)
        if isinstance(given, Problem):
            return given
        found |= {name: ranks for name, ranks in given.items() if name in there}
    start = first
    for pool, model in zip(pools(cfg)[1:], [m for m, key in _apart(cfg)], strict=True):
        if not pool.size:
            return Problem(f"{pool.section}.nnodes", "0 machines have no device", "set it to 1 or more")
        if model not in there:
            engine = cfg.actor_rollout_ref.rollout.name
            why = f": {engine} samples in servers ({ROLLOUT}.name)" if pool.section == ROLLOUT else ""
            what = f"{pool.size} devices have nothing to do{why}"
            return Problem(f"{pool.section}.nnodes", what, f"leave {pool.section}.nnodes out")
        found[model] = range(start, start := start + pool.size)
    return _overlap(found) or _idle(found, start) or found


def _apart(cfg: RunConfig) -> list[tuple[str, str]]:
    """Models with devices beside those of the trainer, and the key that says so."""
    keys = {ROLLOUT: ("sampler", f"{ROLLOUT}.nnodes"), REWARD: ("reward_model", f"{REWARD}.enable_resource_pool")}
    return [keys[pool.section] for pool in pools(cfg)[1:]]


def _given(cfg: RunConfig, devices: int) -> dict[str, range] | Problem:
    """The devices that ``cluster.component_placement`` gives each model."""
    if twice := _apart(cfg):
        return Problem(twice[0][1], f"says devices of its own beside {PATH}", f"keep one of the two, such as {PATH}")
    placements, problems = parse_placements(cfg.cluster.component_placement, {}, devices)
    if problems:
        return problems[0]
    found = {}
    for placement in placements:
        ranks = _neighbours(placement)
        if isinstance(ranks, Problem):
            return ranks
        found[MODELS[placement.component]] = ranks
    return found


def _neighbours(placement: Placement) -> range | Problem:
    """One process a device, on devices in a row."""
    path, processes = f"{PATH}.{placement.component}", placement.processes
    if placement.component not in MODELS:
        return Problem(path, "is no model of a text run", f"a run has {', '.join(MODELS)}")
    assert processes is not None, "the number of devices is known"
    if len(set(processes)) < len(processes) or any(len(own) > 1 for own in processes):
        return Problem(path, "is not one process a device", "write devices only, such as 0-3")
    devices = [own[0] for own in processes]
    if devices[-1] - devices[0] >= len(devices):
        return Problem(path, f"leaves a gap in {devices}", "use devices in a row")
    return range(devices[0], devices[-1] + 1)


def _overlap(found: Mapping[str, range]) -> Problem | None:
    for one, mine in found.items():
        for other, theirs in found.items():
            shared = sorted({*mine} & {*theirs})
            if shared and mine != theirs:
                what = f"shares devices {shared} of {_words(mine)} with {NAMES[other]}, which has {_words(theirs)}"
                fix = "give both the same devices, or none in common; a component that is not named is on all"
                return Problem(f"{PATH}.{NAMES[one]}", what, fix)
    return None


def _idle(found: Mapping[str, range], devices: int) -> Problem | None:
    idle = sorted({*range(devices)}.difference(*found.values()))
    if not idle:
        return None
    return Problem(PATH, f"leaves devices {idle} with nothing to do", "place a model there, or ask for fewer devices")


def _words(ranks: range) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _unfit(cfg: RunConfig, found: Mapping[str, range]) -> Problem | None:
    """Models that must share devices and do not."""
    settings, apart = cfg.actor_rollout_ref, {name for name, ranks in found.items() if ranks != found["actor"]}
    if not apart:
        return None
    if settings.actor.strategy == "megatron" and "sampler" in apart:
        key = dict(_apart(cfg)).get("sampler", f"{PATH}.{NAMES['sampler']}")
        what = "devices of its own; with actor_rollout_ref.actor.strategy=megatron it samples on the actor's so far"
        return Problem(key, what, "give both the same devices, or sample with vLLM or SGLang")
    if "reference" in apart and settings.model.lora_rank:
        what = f"apart from the actor, of whose model it is a part ({LORA}={settings.model.lora_rank})"
        return Problem(f"{PATH}.inference", what, "give it the devices of the actor")
    if "reference" in apart and reference_runs_with_actor(cfg):
        key = "actor_rollout_ref.actor.kl_loss_type" if full_kl_in_loss(cfg) else "algorithm.kl_penalty"
        what = f"apart from the actor, which runs beside it ({key}=full)"
        return Problem(f"{PATH}.inference", what, "give it the devices of the actor")
    return None
