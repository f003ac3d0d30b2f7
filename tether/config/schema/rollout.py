"""`actor_rollout_ref.rollout`: how responses are sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.engine import Dtype, ProfilerConfig
from tether.config.schema.section import (
    AliasOf,
    Fraction,
    Inherits,
    Limit,
    NonNegative,
    Options,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
)

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
    """Sample; off: greedy."""
    n: Positive = 1
    """Responses a held-out prompt."""


class MultiTurnConfig(Section):
    """`rollout.multi_turn`: conversations with tools."""

    enable: bool = False
    """Let the policy answer in several turns."""
    format: str = "hermes"
    """How tool calls are written."""
    max_assistant_turns: int | None = None
    """Most turns of the policy."""
    max_user_turns: int | None = None
    """Most turns of the user."""
    tool_config_path: str | None = None
    """Tools."""
    max_parallel_calls: int = 1
    """Tool calls a turn."""
    max_tool_response_length: int = 256
    """Longest answer of a tool."""
    tool_response_truncate_side: str = "middle"
    """Where a longer one is cut."""
    interaction_config_path: str | None = None
    """Simulated user."""
    use_inference_chat_template: bool = False
    """Template as at inference."""
    tokenization_sanity_check_mode: str = "strict"
    """How token drift between turns is checked."""
    num_repeat_rollouts: int | None = None
    """Repeats of a rollout."""


class CustomServerConfig(Section):
    """`rollout.agent.custom_async_server`: a server class of your own."""

    path: str | None = None
    """Python file."""
    name: str | None = None
    """Class name."""


class AgentConfig(Section):
    """`rollout.agent`: verl's agent loops."""

    num_workers: int = 8
    """Processes that drive conversations."""
    default_agent_loop: str = "single_turn_agent"
    """Loop used where a row names none."""
    agent_loop_config_path: str | None = None
    """Loops of your own."""
    custom_async_server: CustomServerConfig


class TraceConfig(Section):
    """`rollout.trace`: traces of conversations."""

    backend: str | None = None
    """Where traces go."""
    token2text: bool = False
    """Decode tokens in traces."""
    max_samples_per_step_per_worker: int | None = None
    """Most traces a step."""


class PrometheusConfig(Section):
    """`rollout.prometheus`: metrics of the inference server."""

    enable: bool = False
    """Serve metrics."""
    port: int = 9090
    """Port."""
    file: str | None = None
    """Configuration file."""
    served_model_name: str | None = None
    """Name in the metrics."""


class EngineKwargsConfig(Section):
    """`rollout.engine_kwargs`: arguments of one engine."""

    vllm: Options
    """Arguments of vLLM."""
    sglang: Options
    """Arguments of SGLang."""


class RolloutConfig(Section):
    """Sampling: engine, temperature, number of responses, and the forward pass for old log-probs."""

    name: EngineName = "native"
    """Engine that samples; native runs in this process."""
    n: Positive = 1
    """Responses a prompt; they form the group of grpo and rloo."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""
    top_k: Limit = -1
    """Keep the k most likely tokens; -1 keeps all. Training replays the cut."""
    top_p: PositiveFraction = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p. Training replays the cut."""
    do_sample: bool = True
    """Sample. Training needs it."""
    prompt_length: Annotated[Positive, Inherits("data.max_prompt_length")]
    """Longest prompt."""
    response_length: Annotated[Positive, Inherits("data.max_response_length")]
    """Most new tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    dtype: Dtype = "bfloat16"
    """Number format while sampling."""
    max_num_seqs: Positive = 256
    """Responses that are sampled at a time."""
    val_kwargs: ValKwargsConfig
    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; on one device the same as log_prob_micro_batch_size_per_gpu."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive, Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    ]
    """Rows a forward pass when old log-probs are computed."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each such pass up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[Positive, Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")]
    """Tokens a forward pass when log_prob_use_dynamic_bsz is on."""
    mode: Literal["async", "sync"] = "async"
    """How verl drives its inference server."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty on tokens that were already used."""
    over_sample_rate: Fraction = 0.0
    """Sample more than needed and drop the slowest."""
    logprobs_mode: str = "processed_logprobs"
    """Whose log-probs the sampler reports: after temperature, top_k and top_p, or before."""
    calculate_log_probs: bool = False
    """Keep the sampler's log-probs."""
    gpu_memory_utilization: PositiveFraction = 0.5
    """Share of GPU memory for the inference server."""
    tensor_model_parallel_size: Positive = 1
    """GPUs that split each matrix while sampling. (verl: 2.)"""
    data_parallel_size: Positive = 1
    """Copies of the inference server."""
    pipeline_model_parallel_size: Positive = 1
    """GPUs that split the layers while sampling."""
    expert_parallel_size: Positive = 1
    """GPUs that split the experts while sampling."""
    max_num_batched_tokens: int | None = 8192
    """Tokens a step of the inference server."""
    max_model_len: Positive | None = None
    """Longest prompt and response together: a response that reaches it is cut; null: no such limit."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes with a CUDA graph."""
    enable_chunked_prefill: bool = True
    """Read long prompts in pieces."""
    enable_prefix_caching: bool = True
    """Share the cache of equal prompt beginnings."""
    free_cache_engine: bool = True
    """Free the cache while training."""
    multi_stage_wake_up: bool = False
    """SGLang: take memory back in stages."""
    load_format: str = "dummy"
    """How the inference server first loads weights."""
    layered_summon: bool = False
    """Gather weights layer by layer when they are sent."""
    update_weights_bucket_megabytes: Positive = 512
    """Size of a piece when weights are sent."""
    disable_log_stats: bool = True
    """Silence the inference server's statistics."""
    skip_tokenizer_init: bool = True
    """The inference server gets tokens, not text."""
    engine_kwargs: EngineKwargsConfig
    limit_images: int | None = None
    """Images a prompt."""
    quantization: str | None = None
    """Sample with quantized weights."""
    quantization_config_file: str | None = None
    """Options of the quantization."""
    enable_rollout_routing_replay: bool = False
    """Replay the sampler's choice of experts while training."""
    skip_rollout: bool = False
    """Reuse dumped rollouts."""
    skip_dump_dir: str = "/tmp/rollout_dump"
    """Where they are."""
    multi_turn: MultiTurnConfig
    agent: AgentConfig
    trace: TraceConfig
    prometheus: PrometheusConfig
    profiler: ProfilerConfig
