"""Removes keys from an RLinf file that apply only to its simulator or policy, if overrides select a different one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tether.config.loading.overrides import Override
from tether.integrations.rlinf.robot_simulators import OF_LIBERO, SUITE_KEY, WRAPPED
from tether.integrations.rlinf.values import section_at
from tether.types import JsonObject

OF_ID = ("id", "gym_id", SUITE_KEY, "init_params")
"""Keys of a section that name a task, or apply only to it."""
OF_SIMULATOR = (*OF_ID, *OF_LIBERO, "reward_mode", "use_rel_reward", "video_cfg", "is_eval")
"""Keys of a section that a simulator's preset sets."""
POLICY_NAMES = ("model_type", "model_name")
"""Keys of `actor.model` that name a policy, in current and in older files."""
SHARED_ARGUMENTS = ("maniskill", *WRAPPED)
"""Simulators whose constructors take the same arguments for all tasks."""
OF_NETWORKS = ("mlp_policy", "cnn_policy")
"""Policies without any of the options in `OF_LARGE_POLICIES`."""
OF_LARGE_POLICIES = (
    "attn_implementation", "center_crop", "gradient_checkpointing", "implement_version", "is_lora", "lora_path",
    "lora_rank", "low_cpu_mem_usage", "max_prompt_length", "openpi", "unnorm_key", "use_film", "use_proprio",
    "use_wrist_image", "value_type", "vh_mode",
)  # fmt: skip
"""Options of `actor.model` that only policies with a language model read."""


def without_old_simulator(
    tree: JsonObject, overrides: Sequence[Override], is_known: Callable[[str], bool]
) -> list[str]:
    """Remove keys that describe a different simulator or task than the overrides select.

    If the overrides set a new ``env.train.env_type``, or one of `WRAPPED`, this removes the settings of the file's
    simulator and the keys that only it reads. If they set a new ``env.train.id``, this removes the old task, also for
    evaluations, and its arguments, unless all tasks of the simulator have the same arguments.

    Args:
        tree: the file, which is changed.
        overrides: overrides in RLinf's keys; keys that they set are not removed.
        is_known: whether a key, or a section of keys, applies to all simulators.

    Returns:
        The removed keys.
    """
    changes = {override.path: override.value for override in overrides if not override.delete}
    train = section_at(tree, "env.train")
    old_type, old_id = train.get("env_type"), _task(train)
    new_type = changes.get("env.train.env_type", old_type)
    new_id = next((changes[key] for key in _names_of("train") if key in changes), old_id)
    replaces_file = new_type in WRAPPED and "env.train.env_type" in changes
    is_new = new_type != old_type or replaces_file
    if is_new:
        dropped: tuple[str, ...] = (*OF_SIMULATOR, "env_type") if replaces_file else OF_SIMULATOR
    elif new_id != old_id:
        dropped = OF_ID if new_type not in SHARED_ARGUMENTS else ("id", "gym_id", SUITE_KEY, "init_params.id")
    else:
        return []
    own_tests = not is_new and any(key in changes for key in _names_of("eval"))
    left_out = []
    for role in ("train",) if own_tests else ("train", "eval"):
        its_own = [name for name in section_at(tree, f"env.{role}") if not is_known(f"env.{role}.{name}")]
        for name in (*dropped, *(its_own if is_new else ())):
            section, _, last = f"env.{role}.{name}".rpartition(".")
            holder = section_at(tree, section)
            if last in holder:
                holder.pop(last)
                left_out.append(f"{section}.{last}")
    return left_out


def without_old_policy(tree: JsonObject, written: JsonObject, is_known: Callable[[str], bool]) -> list[str]:
    """Remove keys that only the file's policy reads, if the overrides select a different one; return these keys.

    Args:
        tree: the file with the overrides, which is changed.
        written: the file without the overrides.
        is_known: whether a key applies to all policies.
    """
    old, new = section_at(written, "actor.model"), section_at(tree, "actor.model")
    if all(old.get(name) == new.get(name) for name in POLICY_NAMES):
        return []
    left_out = []
    of_old = OF_LARGE_POLICIES if new.get("model_type") in OF_NETWORKS else ()
    for section in ("actor.model", "rollout.model"):
        for name in section_at(written, section):
            is_old = name in of_old or not is_known(f"{section}.{name}")
            if is_old and section_at(tree, section).pop(name, None) is not None:
                left_out.append(f"{section}.{name}")
    return left_out


def names_own_simulator(override: Override) -> bool:
    """Whether an override sets a simulator of `WRAPPED`, so that it is in tether's keys, not in RLinf's."""
    is_simulator = override.path in ("env.train.env_type", "env.eval.env_type")
    return is_simulator and not override.delete and override.value in WRAPPED


def names_task(override: Override) -> bool:
    """Whether an override sets a task, which is among the constructor's arguments in RLinf, and a separate key in
    tether."""
    return override.path in (*_names_of("train"), *_names_of("eval"))


def _task(section: JsonObject) -> object:
    in_arguments = section_at(section, "init_params").get("id")
    named = (section.get("id"), section.get("gym_id"), in_arguments, section.get(SUITE_KEY))
    return next((name for name in named if name is not None), None)


def _names_of(role: str) -> tuple[str, ...]:
    return f"env.{role}.id", f"env.{role}.gym_id", f"env.{role}.init_params.id"
