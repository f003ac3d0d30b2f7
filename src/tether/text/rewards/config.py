"""`custom_reward_function`, `reward_model`, `reward_manager`: where scores come from."""

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
    # A name such as 1 is parsed as a number; as text it is refused as a name.
    return {str(name): section for name, section in value.items()} if isinstance(value, dict) else value


def _manager(value: object) -> object:
    # dapo is naive with overlong_buffer, which acts with any of them; gdpo is naive, whose estimator finds the parts of
    # a score by itself; prime and remote are naive with processes, as all are here.
    return "naive" if value in _NAIVE_TOO else value


_NAIVE_TOO = ("dapo", "gdpo", "prime", "remote")
RATE_LIMITED = Refuses(
    ("rate_limited",),
    "at most reward_model.num_workers calls of a function run at once, and a judge in reward_model.parts has its "
    "max_concurrent",
)


FUNCTIONS = ActsIf("reward_model.enable", on=(False,), other=ActsIf("reward_model.parts", off=({},)))
"""Read where functions score responses."""
SERVED = ActsIf("reward_model.server.url", off=(None,))


class CustomRewardFunctionConfig(Section):
    """A reward function of your own: f(data_source, solution_str, ground_truth, extra_info) -> number or dict."""

    path: str | None = None
    """Python file that defines it; null: the reward is chosen by data_source."""
    name: Annotated[str, NullIsUnset()] = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: Options
    """More keyword arguments of the function."""


class OverlongBufferConfig(Section):
    """`reward_model.overlong_buffer`: DAPO's soft punishment of long responses."""

    enable: bool = False
    """Punish responses that come near data.max_response_length."""
    len: Count = 0
    """Tokens before that limit in which the punishment grows."""
    penalty_factor: NonNegative = 1.0
    """Penalty of a response of the full length; within the buffer less, in proportion."""


class SandboxConfig(Section):
    """`reward_model.sandbox`: programs in responses, run against the tests of their rows. (tether's own.)"""

    languages: Strings = ("python",)
    """Languages that answers may be in; the first is that of a block of code that names none."""
    max_tests: Positive = 10
    """Tests of a row that count: the first ones."""
    timeout: PositiveFloat = 6.0
    """Seconds of processor time that a program has for a test; by the clock it has twice that."""
    memory_limit_mb: Annotated[Positive, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = 1024
    """MiB that all processes of a program have together."""
    max_processes: Annotated[Positive, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = 64
    """Processes and threads that a program may have at once."""
    unconfined: Annotated[bool, ActsIf("reward_model.sandbox_fusion.url", on=(None,))] = False
    """Run programs with the rights of this process, where the machine cannot confine them. They may do anything."""


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion`: a SandboxFusion server that runs programs instead of this machine."""

    url: str | None = None
    """Its address, http://HOST:PORT/run_code; null: programs run on this machine."""
    max_concurrent: Annotated[Positive, NullIsUnset(), ActsIf("reward_model.sandbox_fusion.url", off=(None,))] = 64
    """Programs at once on the server; reward_model.num_workers processes share them."""
    memory_limit_mb: Annotated[Positive, NullIsUnset(), ActsIf("reward_model.sandbox_fusion.url", off=(None,))] = 1024
    """MiB that a program has there."""


class ScoringModelConfig(Section):
    """`reward_model.model`: a sequence classifier with one output, which scores a prompt with its response."""

    path: str | None = None
    """Its directory or hub id; `tether rm train` makes one. (verl: a model of the hub.)"""
    input_tokenizer: str | None = "${actor_rollout_ref.model.path}"
    """The policy's: responses are decoded, and templated by the reward model's tokenizer. null: ids as they are."""
    trust_remote_code: Annotated[bool, NullIsUnset()] = False
    """Let the model's repository run its own code."""
    fsdp_config: ShardConfig


class ScoringServerConfig(Section):
    """`reward_model.server`: reward_model.model behind vLLM or SGLang, instead of in this process. (tether's own.)"""

    url: Annotated[str | None, ActsIf("reward_model.enable", on=(True,))] = None
    """Its address, http://HOST:PORT, below which /classify is; null: the model runs in this process."""
    api: Annotated[Literal["vllm", "sglang"], SERVED] = "vllm"
    """Kind of the server, whose /classify is called."""
    model: Annotated[str | None, SERVED] = None
    """The model's name on the server; null: reward_model.model.path."""
    api_key_env: Annotated[str | None, SERVED] = None
    """Environment variable that holds the server's key."""
    timeout: Annotated[PositiveFloat, SERVED] = 60.0
    """Seconds that a response may take, all attempts included."""
    attempts: Annotated[Positive, SERVED] = 4
    """Requests for one response, where the server is busy or fails."""
    max_concurrent: Annotated[Positive, SERVED] = 64
    """Requests at once."""


class RewardModelConfig(Section):
    """Computation of rewards: by functions, a learned reward model, judges, or several of them."""

    enable: Annotated[bool, NullIsUnset()] = False
    """Score responses by reward_model.model, in place of rules, or as one of the parts."""
    model: Annotated[ScoringModelConfig, ActsIf("reward_model.enable", on=(True,))]
    enable_resource_pool: Annotated[bool, NullIsUnset(), ActsIf("reward_model.enable", on=(True,))] = False
    """Score on devices of its own, beside those of trainer.nnodes."""
    nnodes: Annotated[Count, NullIsUnset(), ActsIf(".enable_resource_pool", on=(True,))] = 1
    """Machines with such devices. (verl: 0.)"""
    n_gpus_per_node: Annotated[Positive, NullIsUnset(), ActsIf(".enable_resource_pool", on=(True,))] = 1
    """Such devices of each of these machines. (verl: 8.)"""
    server: ScoringServerConfig
    parts: Annotated[Options, BeforeValidator(_named_by_text)]
    """Several rewards by name, whose weighted sum is the score: {correct: {kind: rules, weight: 1.0}, ...}."""
    micro_batch_size: Annotated[Positive | None, AliasOf(".micro_batch_size_per_gpu")] = None
    """verl's older key of micro_batch_size_per_gpu."""
    micro_batch_size_per_gpu: Annotated[
        Positive, Inherits("critic.forward_micro_batch_size_per_gpu"), ActsIf(".use_dynamic_bsz", on=(False,))
    ]
    """Rows a forward pass of the model."""
    use_dynamic_bsz: Annotated[bool, Inherits("critic.use_dynamic_bsz"), ActsIf("reward_model.enable", on=(True,))]
    """Fill each of its micro-batches up to forward_max_token_len_per_gpu tokens, not to a number of rows."""
    forward_max_token_len_per_gpu: Annotated[
        Positive, Inherits("critic.forward_max_token_len_per_gpu"), ActsIf(".use_dynamic_bsz", on=(True,))
    ]
    """Tokens such a pass when use_dynamic_bsz is on."""
    max_length: Annotated[Positive | None, ActsIf("reward_model.enable", on=(True,))] = None
    """Tokens of prompt and response that it scores; more are an error. null: as many as it has positions for."""
    num_workers: Annotated[Positive | None, FUNCTIONS] = 1
    """Processes that score responses; null: one a core."""
    timeout: Annotated[PositiveFloat, FUNCTIONS] = 10.0
    """Seconds a reward call may take; then it is stopped and counts as an error. (tether's own key.)"""
    max_error_rate: Fraction = 0.1
    """The run stops when more than this share of a step's rewards are errors. (tether's own key.)"""
    reward_scale: float = 1.0
    """Factor of every score in training, before punishment of length, normalisation and KL. (RLinf's key.)"""
    reward_manager: Annotated[
        Literal["naive", "batch", "rate_limited"],
        NullIsUnset(),
        BeforeValidator(_manager),
        Says(f"one of naive, batch, {', '.join(_NAIVE_TOO)}"),
        RATE_LIMITED,
        ActsIf("custom_reward_function.path", off=(None,)),
    ] = "naive"
    """batch: the function is called once, with lists of all responses; the others: once for each response."""
    overlong_buffer: Annotated[OverlongBufferConfig, ActsIf("reward_model.overlong_buffer.enable", on=(True,))]
    sandbox: SandboxConfig
    sandbox_fusion: SandboxFusionConfig
