"""Keys and values of verl that tether does not have yet: refused by name, never ignored.

Turning one on is deleting its row, or its name in the row's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.config.keys import Key, keys, show
from tether.config.loading.given import Given
from tether.config.problems import Problem
from tether.config.support.patterns import look_up


@dataclass(frozen=True)
class Refused:
    """Why a key cannot be set."""

    why: str
    values: tuple[Any, ...] | None = None
    """Only these values are refused. None: every value is but the default and `fine`."""
    fine: tuple[Any, ...] = ()
    """Values besides the default that ask for nothing."""


DEVICES = Refused("tether trains on one device so far", fine=(1,))
SEQUENCE_PARALLEL = Refused("sequence parallelism needs several devices, and tether trains on one so far")
ONE_SEED = Refused("one seed serves everything: set trainer.seed")
REPLAY = Refused("replay of expert choices is not supported yet")
PROFILER = Refused("GPU profilers are not supported yet")
VERL_SETS_IT = Refused("verl sets it itself; here it follows from the other keys")
MODEL_CODE = Refused("taking the model's code or config from elsewhere is not supported yet")
ADAPTERS = Refused("only fresh adapters on the policy are supported so far")
MULTI_MODAL = Refused("images and videos are not supported yet")
MULTI_TURN = Refused("rollouts of several turns are not supported yet")
DATA_CLASSES = Refused("samplers and generators of your own are not supported yet")
QUANTIZED = Refused("sampling with quantized weights is not supported yet")
SKIP_ROLLOUT = Refused("reusing dumped rollouts is not supported yet")
REWARD_MANAGER = Refused(
    "only the naive reward manager is supported so far; use custom_reward_function, and reward_model.overlong_buffer"
)
SANDBOX = Refused("running code in a remote sandbox is not supported yet")
TRACE = Refused("traces of conversations are not supported yet")
CLOUD = Refused("tether keeps checkpoints on local disk and does not watch cloud instances")

REFUSED: Mapping[str, Refused] = {
    "algorithm.kl_penalty": Refused(
        "the KL over the whole vocabulary is the same whichever token was sampled, so that a reward of it says nothing "
        "about that token; it belongs in the loss (actor_rollout_ref.actor.kl_loss_type)",
        values=("full", "full+"),
    ),
    "actor_rollout_ref.actor.kl_loss_type": Refused("full already has the exact gradient", values=("full+",)),
    "actor_rollout_ref.actor.freeze_vision_tower": MULTI_MODAL,
    "trainer.nnodes": DEVICES,
    "trainer.n_gpus_per_node": DEVICES,
    "*.ulysses_sequence_parallel_size": SEQUENCE_PARALLEL,
    "*.rollout_n": VERL_SETS_IT,
    "*.forward_only": VERL_SETS_IT,
    "*.fsdp_config.seed": ONE_SEED,
    "*.fsdp_config.model_dtype": Refused("the weights that the optimizer updates are fp32", values=("bf16",)),
    "*.data_loader_seed": ONE_SEED,
    "*.checkpoint.load_contents": Refused("a resumed run loads all of its state"),
    "*.profiler.enable": PROFILER,
    "global_profiler.tool": PROFILER,
    "global_profiler.steps": PROFILER,
    "*.enable_rollout_routing_replay": REPLAY,
    "actor_rollout_ref.hybrid_engine": Refused("training and sampling share one device"),
    "*.model.hf_config_path": MODEL_CODE,
    "*.model.external_lib": MODEL_CODE,
    "*.model.exclude_modules": ADAPTERS,
    "*.model.lora_adapter_path": ADAPTERS,
    "critic.model.lora_rank": ADAPTERS,
    "critic.model.tokenizer_path": Refused("the critic reads the policy's tokens"),
    "data.tokenizer": Refused("the tokenizer is actor_rollout_ref.model.tokenizer_path"),
    "data.tool_config_path": MULTI_TURN,
    "data.image_*": MULTI_MODAL,
    "data.video_key": MULTI_MODAL,
    "data.sampler.*": DATA_CLASSES,
    "data.datagen.*": DATA_CLASSES,
    "actor_rollout_ref.rollout.name": Refused("tether samples with the native engine", values=("trtllm",)),
    "actor_rollout_ref.rollout.mode": Refused("verl itself has removed it", values=("sync",)),
    "actor_rollout_ref.rollout.do_sample": Refused("training learns from samples, not from greedy answers"),
    "actor_rollout_ref.rollout.repetition_penalty": Refused("sampling with a repetition penalty is not supported yet"),
    "actor_rollout_ref.rollout.over_sample_rate": Refused("dropping slow responses is not supported"),
    "actor_rollout_ref.rollout.logprobs_mode": Refused("log-probs are those of the distribution that was sampled from"),
    "actor_rollout_ref.rollout.limit_images": MULTI_MODAL,
    "actor_rollout_ref.rollout.quantization*": QUANTIZED,
    "actor_rollout_ref.rollout.skip_rollout": SKIP_ROLLOUT,
    "actor_rollout_ref.rollout.multi_turn.enable": MULTI_TURN,
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": MULTI_TURN,
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": MULTI_TURN,
    "actor_rollout_ref.rollout.agent.default_agent_loop": MULTI_TURN,
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": MULTI_TURN,
    "actor_rollout_ref.rollout.agent.custom_async_server.*": MULTI_TURN,
    "actor_rollout_ref.rollout.trace.backend": TRACE,
    "reward_model.reward_manager": Refused(REWARD_MANAGER.why, fine=("dapo",)),
    "reward_model.reward_kwargs": REWARD_MANAGER,
    "reward_model.reward_loop_*": REWARD_MANAGER,
    "reward_manager.name": Refused(REWARD_MANAGER.why, fine=("naive", "dapo")),
    "reward_manager.*": REWARD_MANAGER,
    "reward_model.sandbox_fusion.url": SANDBOX,
    "trainer.logger": Refused("this logger comes later", values=("swanlab", "vemlp_wandb", "clearml", "trackio")),
    "trainer.default_hdfs_dir": CLOUD,
    "trainer.esi_redundant_time": CLOUD,
    "trainer.del_local_ckpt_after_load": Refused("a checkpoint that was loaded is never deleted"),
}  # fmt: skip
"""Key, or pattern of keys, -> why it is refused. A key's own row goes before patterns, and earlier patterns first."""


def refusals(given: Given, values: Mapping[str, Any]) -> list[Problem]:
    """A problem for each key that the user gave a refused value; `values` holds every key of the loaded config."""
    problems = (_refusal(key, values) for key in keys().values() if key.path in given)
    return [problem for problem in problems if problem is not None]


def allowed_choices(key: Key) -> tuple[str, ...]:
    """The names that a key may take here; empty where it takes more than names."""
    row = look_up(REFUSED, key.path)
    refused = row.values if row and row.values else ()
    return tuple(choice for choice in key.choices if choice not in refused)


def _refusal(key: Key, values: Mapping[str, Any]) -> Problem | None:
    row, value = look_up(REFUSED, key.path), values[key.path]
    if row is None:
        return None
    if row.values is not None:
        asked = value if isinstance(value, tuple) else (value,)
        if not set(asked) & set(row.values):
            return None
        return Problem(key.path, _what(value, row), "use one of " + ", ".join(allowed_choices(key)))
    default = values[key.inherits.key] if key.inherits else key.default
    fine = (default, *(other for other in row.fine if other != default))
    return None if value in fine else Problem(key.path, _what(value, row), "leave it out, or set " + _either(fine))


def _what(value: Any, row: Refused) -> str:
    return f"{show(value)} is refused: {row.why}"


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(show(value) for value in values)
