"""`actor_rollout_ref.rollout`: how responses are sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from tether.config.schema.engine import Dtype
from tether.config.schema.section import (
    ActsIf,
    AliasOf,
    Inherits,
    Limit,
    NonNegative,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Refuses,
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


class RolloutConfig(Section):
    """Sampling: engine, temperature, number of responses, and the forward pass for old log-probs."""

    name: Annotated[EngineName, Refuses(("trtllm",), "tether samples with the native engine")] = "native"
    """Engine that samples; native runs in this process."""
    n: Positive = 1
    """Responses a prompt; they form the group of grpo and rloo."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""
    top_k: Limit = -1
    """Keep the k most likely tokens; -1 keeps all. Training replays the cut."""
    top_p: PositiveFraction = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p. Training replays the cut."""
    prompt_length: Annotated[Positive, Inherits("data.max_prompt_length")]
    """Longest prompt."""
    response_length: Annotated[Positive, Inherits("data.max_response_length")]
    """Most new tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    dtype: Dtype = "auto"
    """Number format while sampling; auto: bfloat16 where the device computes in it, else float32."""
    max_num_seqs: Positive = 256
    """Responses that are sampled at a time."""
    val_kwargs: ValKwargsConfig
    log_prob_micro_batch_size: Annotated[Positive | None, AliasOf(".log_prob_micro_batch_size_per_gpu")] = None
    """verl's older key, over all devices; here the same as log_prob_micro_batch_size_per_gpu, of each device."""
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(False,)),
    ]
    """Rows a forward pass when old log-probs are computed."""
    log_prob_use_dynamic_bsz: Annotated[bool, Inherits("actor_rollout_ref.actor.use_dynamic_bsz")]
    """Fill each such pass up to log_prob_max_token_len_per_gpu tokens."""
    log_prob_max_token_len_per_gpu: Annotated[
        Positive,
        Inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ActsIf(".log_prob_use_dynamic_bsz", on=(True,)),
    ]
    """Tokens a forward pass when log_prob_use_dynamic_bsz is on."""
    max_model_len: Positive | None = None
    """Longest prompt and response together: a response that reaches it is cut; null: no such limit."""
