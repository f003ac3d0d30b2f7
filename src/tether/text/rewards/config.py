"""`custom_reward_function` and `reward_model`: how responses are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from tether.config.schema.engine import ShardConfig
from tether.config.schema.section import (
    ActsIf,
    AliasOf,
    Count,
    Fraction,
    Inherits,
    NonNegative,
    NullIsUnset,
    Options,
    Positive,
    PositiveFloat,
    Refuses,
    Says,
    Section,
    Strings,
)


def _named_by_text(value: object) -> object:
    # A key such as 1 is parsed as a number; as text it can be refused with the other invalid names.
    return {str(name): section for name, section in value.items()} if isinstance(value, dict) else value


def _manager(value: object) -> object:
    # In tether all of these equal naive: dapo is naive with overlong_buffer, which works with any manager; gdpo is
    # naive, as its estimator extracts the components; prime and remote are naive with processes, which are always used.
    return "naive" if value in _NAIVE_TOO else value


_NAIVE_TOO = ("dapo", "gdpo", "prime", "remote")
RATE_LIMITED = Refuses(
    ("rate_limited",),
    "at most reward_model.num_workers calls of a function run at once, and a judge in reward_model.parts has its "
    "max_concurrent",
)


FUNCTIONS = ActsIf("reward_model.enable", on=(False,), other=ActsIf("reward_model.parts", off=({},)))
"""Condition of keys that apply if functions score responses."""
SERVED = ActsIf("reward_model.server.url", off=(None,))


class CustomRewardFunctionConfig(Section):
    """A user's reward function: f(data_source, solution_str, ground_truth, extra_info) -> number or dict."""

    path: str | None = None
    """Python file that defines it; null: the reward is chosen by data_source."""
    name: Annotated[str, NullIsUnset()] = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: Options
    """Additional keyword arguments of the function."""


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: DAPO's soft penalty for long responses."""

    enable: bool = False
    """Penalise responses that come close to data.max_response_length."""
    len: Count = 0
    """Number of tokens before that limit over which the penalty grows."""
    penalty_factor: NonNegative = 1.0
    """Penalty of a response at the limit; within the buffer it is proportionally smaller."""


class SandboxConfig(Section):
    """`reward_model.sandbox`: runs programs in responses against the tests of their rows. (tether's own.)"""

    languages: Strings = ("python",)
    """Allowed languages of answers; the first one applies to code blocks that name none."""
    max_tests: Positive = 10
    """Maximum number of a row's tests to run; the first ones are used."""
    timeout: PositiveFloat = 6.0
    """Seconds of processor time that a program has for a test; the limit of wall time is twice that."""
    memory_limit_mb: Annotated[Positive, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = 1024
    """MiB of memory for all processes of a program together."""
    max_processes: Annotated[Positive, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = 64
    """Maximum number of processes and threads of a program at the same time."""
    unconfined: Annotated[bool, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = False
    """Run programs with the rights of this process if the machine cannot confine them. They may do anything."""


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion`: a SandboxFusion server that runs programs instead of this machine."""

    url: str | None = None
    """Its address, http://HOST:PORT/run_code; null: programs run on this machine."""
    max_concurrent: Annotated[Positive, NullIsUnset(), ActsIf("reward_model.sandbox_fusion.url", off=(None,))] = 64
    """Maximum number of concurrent programs on the server, shared by reward_model.num_workers processes."""
    memory_limit_mb: Annotated[Positive, NullIsUnset(), ActsIf("reward_model.sandbox_fusion.url", off=(None,))] = 1024
    """MiB of memory for a program on the server."""


class ScoringModelConfig(Section):
    """`reward_model.model`: a sequence classifier with one output, which scores a prompt with its response."""

    path: str | None = None
    """Its directory or hub id; `tether rm train` makes one. (verl: a model of the hub.)"""
    input_tokenizer: str | None = "${actor_rollout_ref.model.path}"
    """The policy's tokenizer, to decode responses for the reward model's chat template; null: pass token ids."""
    trust_remote_code: Annotated[bool, NullIsUnset()] = False
    """Allow the model's repository to run its code."""
    fsdp_config: ShardConfig


class ScoringServerConfig(Section):
    """`reward_model.server`: runs reward_model.model with vLLM or SGLang, not in this process. (tether's own.)"""

    url: Annotated[str | None, ActsIf("reward_model.enable", on=(True,))] = None
    """Its address, http://HOST:PORT, which serves /classify; null: the model runs in this process."""
    api: Annotated[Literal["vllm", "sglang"], SERVED] = "vllm"
    """Kind of server, which determines the requests to /classify."""
    model: Annotated[str | None, SERVED] = None
    """The model's name on the server; null: reward_model.model.path."""
    api_key_env: Annotated[str | None, SERVED] = None
    """Environment variable that holds the server's key."""
    timeout: Annotated[PositiveFloat, SERVED] = 60.0
    """Timeout in seconds for a response, over all attempts."""
    attempts: Annotated[Positive, SERVED] = 4
    """Maximum number of requests for a response, if the server is busy or fails."""
    max_concurrent: Annotated[Positive, SERVED] = 64
    """Maximum number of concurrent requests."""


class RewardModelConfig(Section):
    """How rewards are computed: by functions, a learned reward model, judges, or several of them."""

    enable: Annotated[bool, NullIsUnset()] = False
    """Score responses with reward_model.model, in place of rules or as one of the parts."""
    model: Annotated[ScoringModelConfig, ActsIf("reward_model.enable", on=(True,))]
    enable_resource_pool: Annotated[bool, NullIsUnset(), ActsIf("reward_model.enable", on=(True,))] = False
    """Score on separate devices, in addition to those of trainer.nnodes."""
    nnodes: Annotated[Count, NullIsUnset(), ActsIf(".enable_resource_pool", on=(True,))] = 1
    """Number of machines with such devices. (verl: 0.)"""
    n_gpus_per_node: Annotated[Positive, NullIsUnset(), ActsIf(".enable_resource_pool", on=(True,))] = 1
    """Number of such devices per machine. (verl: 8.)"""
    server: ScoringServerConfig
    parts: Annotated[Options, BeforeValidator(_named_by_text)]
    """Several rewards by name, whose weighted sum is the score: {correct: {kind: rules, weight: 1.0}, ...}."""
    micro_batch_size: Annotated[Positive | None, AliasOf(".micro_batch_size_per_gpu")] = None
    """verl's older key of micro_batch_size_per_gpu."""
    micro_batch_size_per_gpu: Annotated[
        Positive, Inherits("critic.forward_micro_batch_size_per_gpu"), ActsIf(".use_dynamic_bsz", on=(False,))
    ]
    """Rows per forward pass of the model."""
    use_dynamic_bsz: Annotated[bool, Inherits("critic.use_dynamic_bsz"), ActsIf("reward_model.enable", on=(True,))]
    """Fill each micro-batch up to forward_max_token_len_per_gpu tokens, not to a number of rows."""
    forward_max_token_len_per_gpu: Annotated[
        Positive, Inherits("critic.forward_max_token_len_per_gpu"), ActsIf(".use_dynamic_bsz", on=(True,))
    ]
    """Tokens per forward pass if use_dynamic_bsz is on."""
    max_length: Annotated[Positive | None, ActsIf("reward_model.enable", on=(True,))] = None
    """Maximum length of prompt and response; longer ones are errors. null: the number of positions of the model."""
    num_workers: Annotated[Positive | None, FUNCTIONS] = 1
    """Number of processes that score responses; null: one per core."""
    timeout: Annotated[PositiveFloat, FUNCTIONS] = 10.0
    """Timeout of a reward call in seconds; a call that exceeds it counts as an error. (tether's own key.)"""
    max_error_rate: Fraction = 0.1
    """Share of a step's rewards that may be errors; above it the run stops. (tether's own key.)"""
    reward_scale: float = 1.0
    """Factor on every training score, before length penalty, normalisation and KL. (RLinf's key.)"""
    reward_manager: Annotated[
        Literal["naive", "batch", "rate_limited"],
        NullIsUnset(),
        BeforeValidator(_manager),
        Says(f"one of naive, batch, {', '.join(_NAIVE_TOO)}"),
        RATE_LIMITED,
        ActsIf("custom_reward_function.path", off=(None,)),
    ] = "naive"
    """batch: the function is called once, with lists of all responses; otherwise once per response."""
    overlong_buffer: Annotated[OverlongBufferConfig, ActsIf("reward_model.overlong_buffer.enable", on=(True,))]
    sandbox: SandboxConfig
    sandbox_fusion: SandboxFusionConfig
