"""`actor_rollout_ref.rollout`: how responses are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from tether.config.schema.engine import Dtype
from tether.config.schema.section import (
    EMBODIED_TOO,
    ActsIf,
    AliasOf,
    Count,
    Inherits,
    Limit,
    NonNegative,
    OffOrEvery,
    Options,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Refuses,
    Section,
    Strings,
)
from tether.text.turns.config import AgentConfig, MultiTurnConfig

_NO_CLIENT = "tether has no client for it: set native, vllm or sglang"


@dataclass(frozen=True)
class ServerOptions:
    """Command-line options of a server that a configuration must not set."""

    address: tuple[str, ...]
    """Options for the address of a server, which the run chooses."""
    sleep: tuple[str, ...]
    """Options that let a server release its memory."""


SERVERS = {
    "vllm": ServerOptions(("host", "port", "served_model_name"), ("enable_sleep_mode",)),
    "sglang": ServerOptions(("host", "port"), ("enable_memory_saver", "enable_weights_cpu_backup")),
}
"""Engines that sample on servers."""
SERVED = ActsIf(".name", on=tuple(SERVERS))
OURS = ActsIf(".server_urls", on=((),))
"""Condition of keys that are options of servers which tether starts."""
LoadFormat = Literal["dummy", "auto", "safetensors", "hf", "dummy_hf", "dummy_dtensor", "dummy_megatron"]
"""The last four are verl's older names of auto and dummy."""
EngineName = Literal["native", "vllm", "sglang", "trtllm", "hf"]


class ValKwargsConfig(Section):
    """`rollout.val_kwargs`: sampling for validation."""

    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_k: Limit = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: PositiveFraction = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    do_sample: bool = False
    """Whether to sample; off: greedy."""
    n: Positive = 1
    """Responses per validation prompt."""


def _our_options(name: str) -> ActsIf:
    ours = ActsIf("actor_rollout_ref.rollout.server_urls", on=((),))
    return ActsIf("actor_rollout_ref.rollout.name", on=(name,), also=ours)


class EngineKwargsConfig(Section):
    """`rollout.engine_kwargs`: options of an engine that have no key here."""

    vllm: Annotated[Options, _our_options("vllm")]
    """Options of vLLM's command line, with underscores; they override what tether sets, except the address."""
    sglang: Annotated[Options, _our_options("sglang")]
    """Options of SGLang's command line, in the same form."""


class RolloutConfig(Section):
    """Sampling: engine, temperature, number of responses, and the forward pass for old log-probs."""

    name: Annotated[EngineName, Refuses(("trtllm",), _NO_CLIENT)] = "native"
    """Engine that samples; native runs in this process, vllm and sglang on servers."""
    n: Positive = 1
    """Responses per prompt; they form the group of grpo and rloo."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits before sampling."""
    top_k: Limit = -1
    """Keep the k most likely tokens; -1 keeps all. Training replays the truncation."""
    top_p: PositiveFraction = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p. Training replays the truncation."""
    prompt_length: Annotated[Positive, Inherits("data.max_prompt_length")]
    """Maximum length of a prompt in tokens."""
    response_length: Annotated[Positive, Inherits("data.max_response_length")]
    """Maximum length of a response in tokens."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    dtype: Dtype = "auto"
    """Dtype of sampling; auto: bfloat16 where the device computes in it, otherwise float32."""
    max_num_seqs: Positive = 256
    """Maximum number of responses that are sampled at the same time."""
    val_kwargs: ValKwargsConfig
    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; in tether the same as log_prob_micro_batch_size_per_gpu, per device."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(False,)),
    ]
    """Rows per forward pass that computes old log-probs."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each of these passes up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(True,)),
    ]
    """Tokens per forward pass if log_prob_use_dynamic_bsz is on."""
    multi_turn: Annotated[MultiTurnConfig, ActsIf("actor_rollout_ref.rollout.multi_turn.enable", on=(True,))]
    agent: AgentConfig
    max_model_len: Positive | None = None
    """Maximum length of prompt and response together; longer responses are truncated; null: no such limit."""
    nnodes: Count = 0
    """Machines whose devices only sample, in addition to trainer.nnodes; 0: the devices that train also sample."""
    n_gpus_per_node: Annotated[Positive, Inherits("trainer.n_gpus_per_node"), ActsIf(".nnodes", off=(0,))]
    """Devices per such machine."""
    max_staleness: Annotated[Positive, ActsIf("trainer.async_mode", on=("fully_async",)), EMBODIED_TOO] = 1
    """Maximum number of updates between the policy that samples a response and the update on it. (tether's own key.)"""
    partial_rollout: Annotated[bool, ActsIf("trainer.async_mode", on=("fully_async",))] = False
    """Change weights within responses: when one of a batch ends, the others continue with new ones. (tether's own.)"""
    enable_rollout_routing_replay: bool = False
    """Record which experts each token is routed to, for actor.router_replay.mode=R3."""
    server_urls: Annotated[Strings, SERVED] = ()
    """Addresses of external servers; empty: tether starts servers."""
    server_timeout: Annotated[PositiveFloat, SERVED] = 600.0
    """Timeout in seconds for a server to start, to load weights, or to sample a token."""
    parity_freq: Annotated[OffOrEvery, SERVED] = 10
    """Steps between comparisons of a server's log-probs with the trainer's; the first weights are always compared."""
    update_weights_bucket_megabytes: Annotated[Positive, SERVED] = 512
    """MiB of weights that are sent to a server at a time."""
    weight_transfer: Annotated[Literal["auto", "disk", "tensor", "distributed", "nccl"], SERVED] = "auto"
    """How weights are sent to servers: files in memory, shared memory, broadcast on host or GPU. (tether's own.)"""
    free_cache_engine: Annotated[bool, OURS] = True
    """Servers release their memory while nothing is sampled; on a CPU they do not support it and keep it."""
    tensor_model_parallel_size: Annotated[Positive, OURS] = 1
    """Devices that share the model of a server."""
    gpu_memory_utilization: Annotated[PositiveFraction, OURS] = 0.5
    """Share of a device's memory that a server may use; on a CPU, of the machine's."""
    max_num_batched_tokens: Annotated[Positive, OURS] = 8192
    """Maximum number of tokens in one forward pass of a server."""
    enforce_eager: Annotated[bool, OURS] = False
    """Disable compilation of the model and CUDA graphs."""
    enable_chunked_prefill: Annotated[bool, OURS] = True
    """Mix chunks of long prompts with decoding."""
    enable_prefix_caching: Annotated[bool, OURS] = True
    """Compute common beginnings of prompts once; the cache is emptied at each update."""
    load_format: Annotated[LoadFormat, OURS] = "dummy"
    """Initial weights of a server, before it receives the policy's: random ones, or the files of model.path."""
    engine_kwargs: EngineKwargsConfig

    @property
    def own_options(self) -> dict[str, object]:
        """Return the options in engine_kwargs of the servers that the run starts; empty if it starts none.

        Names may be written as on the command line (``load-format``), and null leaves an option unset, as in verl.
        """
        if self.name not in SERVERS or self.server_urls:
            return {}
        options: Mapping[str, object] = getattr(self.engine_kwargs, self.name)
        return {name.replace("-", "_"): value for name, value in options.items() if value is not None}
