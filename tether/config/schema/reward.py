"""`custom_reward_function`, `reward_model`, `reward_manager`: where scores come from."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.engine import FsdpConfig, MegatronConfig, ProfilerConfig, Strategy
from tether.config.schema.section import (
    Count,
    Fraction,
    Inherits,
    NonNegative,
    Options,
    Positive,
    PositiveFloat,
    Section,
)


class CustomRewardFunctionConfig(Section):
    """A reward function of your own: f(data_source, solution_str, ground_truth, extra_info) -> number or dict."""

    path: str | None = None
    """Python file that defines it; null: the reward is chosen by data_source."""
    name: str = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: Options
    """More keyword arguments of the function."""


class RewardModelModelConfig(Section):
    """`reward_model.model`: a learned reward model."""

    path: str | None = None
    """Reward model."""
    input_tokenizer: Annotated[str | None, Inherits("actor_rollout_ref.model.path")]
    """Tokenizer of the policy, for models that score another chat format."""
    trust_remote_code: bool = False
    """Let the model's repository run its own code."""
    external_lib: Annotated[str | None, Inherits("actor_rollout_ref.model.external_lib")]
    """Module to import before the model."""
    override_config: Options
    """Fields of the model's own config.json to change."""
    use_shm: bool = False
    """Copy weights to shared memory first."""
    use_remove_padding: bool = False
    """Pack rows without padding."""
    use_fused_kernels: Annotated[bool, Inherits("actor_rollout_ref.model.use_fused_kernels")]
    """Fused kernels."""
    fsdp_config: FsdpConfig


class RewardModelRolloutConfig(Section):
    """`reward_model.rollout`: the server of a learned reward model."""

    name: str | None = None
    """Engine."""
    dtype: str = "bfloat16"
    """Number format."""
    prompt_length: Positive = 2048
    """Longest prompt."""
    response_length: Positive = 2048
    """Longest response."""
    gpu_memory_utilization: float = 0.5
    """Share of GPU memory."""
    tensor_model_parallel_size: Positive = 2
    """GPUs that split each matrix."""
    data_parallel_size: Positive = 1
    """Copies."""
    expert_parallel_size: Positive = 1
    """GPUs that split the experts."""
    enforce_eager: bool = True
    """Run without CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes with a CUDA graph."""
    free_cache_engine: bool = True
    """Free the cache while training."""
    max_num_batched_tokens: int | None = 8192
    """Tokens a step."""
    max_model_len: Positive | None = None
    """Longest prompt and response together."""
    max_num_seqs: Positive = 1024
    """Rows at a time."""
    load_format: str = "auto"
    """How weights are loaded."""
    engine_kwargs: Options
    """Arguments of the engine."""
    limit_images: int | None = None
    """Images a prompt."""
    enable_chunked_prefill: bool = True
    """Read long prompts in pieces."""
    enable_prefix_caching: bool = True
    """Share the cache of equal prompt beginnings."""
    disable_log_stats: bool = True
    """Silence statistics."""
    skip_tokenizer_init: bool = False
    """The server gets tokens, not text."""


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion`: a remote service that runs code."""

    url: str | None = None
    """Its address."""
    max_concurrent: Positive = 64
    """Calls at a time."""
    memory_limit_mb: Positive = 1024
    """Memory a call."""


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: DAPO's soft punishment of long responses."""

    enable: bool = False
    """Punish responses that come near data.max_response_length."""
    len: Count = 0
    """Tokens before that limit in which the punishment grows."""
    penalty_factor: NonNegative = 1.0
    """What a response of the full length loses; less within the buffer, in proportion."""
    log: bool = False
    """Log the punishment."""


class RewardModelConfig(Section):
    """How rewards are computed; a learned reward model."""

    num_workers: Positive | None = 1
    """Processes that score responses; null: one a core."""
    timeout: PositiveFloat = 10.0
    """Seconds a reward call may take; then it is stopped and counts as an error. (tether's own key.)"""
    max_error_rate: Fraction = 0.1
    """The run stops when more than this share of a step's rewards are errors. (tether's own key.)"""
    reward_scale: float = 1.0
    """Factor of every score in training, before punishment of length, normalisation and KL. (RLinf's key.)"""
    enable: bool = False
    """Score with a learned reward model."""
    model: RewardModelModelConfig
    rollout: RewardModelRolloutConfig
    enable_resource_pool: bool = False
    """Give the reward model its own GPUs."""
    n_gpus_per_node: int = 8
    """How many, a node."""
    nnodes: int = 0
    """On how many nodes."""
    strategy: Strategy = "fsdp"
    """Engine of the reward model."""
    megatron: MegatronConfig
    micro_batch_size: Positive | None = None
    """Rows a forward pass, over all devices."""
    micro_batch_size_per_gpu: Positive | None = None
    """Rows a forward pass."""
    max_length: Positive | None = None
    """Longest input."""
    use_dynamic_bsz: Annotated[bool, Inherits("critic.use_dynamic_bsz")]
    """Fill each forward pass up to forward_max_token_len_per_gpu tokens."""
    forward_max_token_len_per_gpu: Annotated[int, Inherits("critic.forward_max_token_len_per_gpu")]
    """Tokens a forward pass."""
    ulysses_sequence_parallel_size: Positive = 1
    """Ranks that share one sequence."""
    nccl_timeout: Positive = 600
    """Megatron: seconds until a collective gives up."""
    load_weight: bool = True
    """Megatron: load weights at start."""
    use_reward_loop: bool = True
    """Score each response as soon as it is complete."""
    launch_reward_fn_async: bool = False
    """Score while log-probs are computed."""
    reward_manager: Literal["naive", "dapo", "prime", "batch", "rate_limited", "remote"] = "naive"
    """What stands between responses and the reward function."""
    reward_kwargs: Options
    """Arguments of the reward manager."""
    reward_loop_source: str = "register"
    """Where the reward manager's class comes from."""
    reward_loop_module_path: str | None = None
    """Its file."""
    reward_loop_class_name: str | None = None
    """Its name."""
    overlong_buffer: OverlongBufferConfig
    sandbox_fusion: SandboxFusionConfig
    profiler: ProfilerConfig


class RewardManagerModuleConfig(Section):
    """`reward_manager.module`: a reward manager of your own."""

    path: str | None = None
    """Python file."""
    name: str = "custom_reward_manager"
    """Name in that file."""


class RewardManagerConfig(Section):
    """verl's newer section for the reward manager."""

    source: str = "register"
    """register: by name; importlib: from module."""
    name: Annotated[str, Inherits("reward_model.reward_manager")]
    """Name of the reward manager."""
    module: RewardManagerModuleConfig
