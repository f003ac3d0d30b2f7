"""Differences between two configurations, for example between a run and the checkpoint from which it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from tether.config.keys import Key, keys, show, values_of
from tether.config.loading.load import LoadedConfig, load_config
from tether.config.loading.overrides import Override
from tether.config.problems import ConfigError
from tether.config.schema.section import Inherits

RESUMING = ("trainer.resume_mode", "trainer.resume_from_path")
"""Keys that control how a run is resumed, and do not change what it computes."""

DRAW = ("data.", "algorithm.", "actor_rollout_ref.rollout.", "reward_model.", "custom_reward_function.",
        "trainer.async_mode", "trainer.seed")  # fmt: skip
"""Prefixes of the keys that determine a batch: its prompts, sampling, scores and selection."""
_SAMPLER_KEYS = (
    "val_kwargs.", "log_prob_", "max_num_", "gpu_memory_utilization", "enforce_eager", "enable_chunked_prefill",
    "enable_prefix_caching", "free_cache_engine", "tensor_model_parallel_size", "load_format", "server_", "parity_freq",
    "update_weights_bucket_megabytes", "weight_transfer", "agent.num_workers", "multi_turn.max_kept_tokens",
    "nnodes", "n_gpus_per_node",
)  # fmt: skip
_REWARD_KEYS = ("num_workers", "micro_batch_size", "use_dynamic_bsz", "forward_max_token_len_per_gpu")
NO_DRAW = (
    "data.val_",
    *(f"actor_rollout_ref.rollout.{key}" for key in _SAMPLER_KEYS),
    *(f"reward_model.{key}" for key in _REWARD_KEYS),
)
"""Prefixes of keys in `DRAW` that do not change a batch: settings of memory, machines and validation."""

_ADAPTED, _OF_ADAPTERS = ("actor_rollout_ref.model", "critic.model"), ("lora_", "target_modules", "exclude_modules")
AT_CONSTRUCTION = ("policy.", *(f"{model}.{key}" for model in _ADAPTED for key in _OF_ADAPTERS))
"""Prefixes of the keys that act when models are built; a resumed run loads its models from the checkpoint."""
NOT_AT_CONSTRUCTION = (
    *(f"policy.{key}" for key in ("normalize_rewards", "clip_rewards", "tokenizer_path")),
    # Validated with the parameters of the network that they define.
    *(f"policy.{key}" for key in ("model_type", "features_extractor")),
)


def saved_values(saved: Path) -> dict[str, object] | None:
    """Return the flat table of a ``run.yaml``, or None if it was written by a version with other keys."""
    try:
        values = _saved_values(saved.resolve(), saved.stat().st_mtime_ns)
    except (ConfigError, OSError):
        return None
    return dict(values)


@lru_cache(maxsize=16)  # a resuming run calls this four times
def _saved_values(saved: Path, _modified: int) -> dict[str, object]:
    return values_of(load_config(saved, []).config)


def changes_since(
    saved: Path, now: LoadedConfig, among: tuple[str, ...] = ("",), without: tuple[str, ...] = ()
) -> list[str]:
    """Return ``key: saved value -> current value`` for every setting that differs from the file.

    A key that inherits its value from another changed key is omitted.

    Args:
        saved: the ``run.yaml`` of a checkpoint.
        now: the configuration of the run that resumes.
        among: prefixes of the keys to compare.
        without: prefixes of keys to omit.
    """
    then = saved_values(saved)
    if then is None:
        return [f"{saved} was written by a version with other keys, so its settings cannot be compared"]
    values = values_of(now.config)
    wanted = [key for key in values if key.startswith(among) and not key.startswith(without)]
    compared = [key for key in wanted if key not in RESUMING]
    different = {key: keys()[key].inherits for key in compared if values[key] != then.get(key)}

    def follows(key: str, source: Inherits | None) -> bool:
        if source is None or source.equals is not None or source.key not in different:
            return False
        return all(table[key] == table[source.key] for table in (then, values))

    listed = [key for key, source in different.items() if not follows(key, source)]
    return [f"{key}: {show(then.get(key))} -> {show(values[key])}" for key in listed]


def check_resumable(saved: Path, now: LoadedConfig) -> None:
    """Check that a resuming run does not change settings of models that already exist.

    Raises:
        ValueError: a key that only acts when models are built has changed, or the checkpoint has no critic.
    """
    then = saved_values(saved)
    if then is None:  # written by a version with other keys
        return
    problems = changes_since(saved, now, among=AT_CONSTRUCTION, without=NOT_AT_CONSTRUCTION)
    if now.config.critic.enable and then["critic.enable"] is False:
        estimator = "algorithm.adv_estimator"
        problems.append(f"{estimator}: {then[estimator]} -> {now.config.algorithm.adv_estimator}, which needs a critic")
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. {saved.parent} was trained with the first value, which a resumed run cannot "
            "change. Set it back, or start a new run in another trainer.default_local_dir, for example from "
            "actor_rollout_ref.model.path=CHECKPOINT/actor."
        )


def minimal_tree(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the settings that a file needs to give the same run again, as nested plain values without secrets."""
    values = values_of(loaded.config)
    needed = [path for path, key in keys().items() if values[path] != key.default and not _follows(values, key)]
    again = values_of(load_config(None, [Override(path, values[path], delete=False) for path in needed]).config)
    # Some kinds of run, such as control runs, have other defaults than the schema.
    needed = [path for path in keys() if path in needed or values[path] != again[path]]
    shown: Any = loaded.shown()
    tree: dict[str, Any] = {}
    for path in needed:
        *parents, name = path.split(".")
        section = reduce(lambda inner, key: inner.setdefault(key, {}), parents, tree)
        section[name] = reduce(getitem, path.split("."), shown)
    return tree


def _follows(values: Mapping[str, object], key: Key) -> bool:
    """Whether a key has the value that it would inherit."""
    inherits = key.inherits
    return inherits is not None and (inherits.equals is not None or values[key.path] == values[inherits.key])
