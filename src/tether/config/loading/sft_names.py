"""Names of verl's SFT trainer, whose sections `model` and `optim` correspond to those of the policy in PPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tether.config.loading.overrides import Override

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
NAMES: Mapping[str, str] = {
    "data.micro_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.micro_batch_size_per_gpu": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    "data.use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
    "data.max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "data.multiturn.messages_key": "data.messages_key",
    "model.partial_pretrain": f"{MODEL}.path",
    "model.strategy": f"{ACTOR}.strategy",
    "model.fsdp_config": f"{ACTOR}.fsdp_config",
    "model": MODEL,
    "optim.warmup_steps_ratio": f"{ACTOR}.optim.lr_warmup_steps_ratio",
    "optim.lr_scheduler": f"{ACTOR}.optim.lr_scheduler_type",
    "optim": f"{ACTOR}.optim",
    "use_remove_padding": f"{MODEL}.use_remove_padding",
    "ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
}
"""Key or section of verl's SFT trainer -> the key here; longer names come before their prefixes."""


def is_fine_tuning(tree: Mapping[Any, Any], overrides: Sequence[Override]) -> bool:
    """Whether a file or the overrides set `sft.enable`."""
    section = tree.get("sft")
    in_file = isinstance(section, Mapping) and section.get("enable") is True
    return in_file or any(override.path == "sft.enable" and override.value is True for override in overrides)


def full_name(path: str) -> str:
    """Return the key here for a key of verl's SFT trainer; other keys are returned unchanged."""
    for name, full in NAMES.items():
        if path == name or path.startswith(f"{name}."):
            return full + path.removeprefix(name)
    return path


def with_full_names(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the content of a file with its keys renamed by `full_name`."""
    result: dict[Any, Any] = {}
    for path, value in _leaves("", tree):
        *sections, name = full_name(path).split(".")
        section = result
        for section_name in sections:
            if not isinstance(section.get(section_name), dict):  # missing, or null
                section[section_name] = {}
            section = section[section_name]
        if value is not None or name not in section:
            section[name] = value
    return result


def _leaves(prefix: str, tree: Mapping[Any, Any]) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and isinstance(name, str):
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
