"""The parallel layout of a model over processes: the sizes of Megatron's kinds of parallelism, and their
constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tether.config.schema.engine import MegatronConfig, RefMegatronConfig

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes of the process groups; data parallelism uses the remaining factor of the ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    """Chunks of the model per pipeline rank, interleaved over ranks."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of a layer."""
    expert_tensor: int | None = None
    """Ranks that share each expert; None: as `tensor`."""
    sequence_parallel: bool = False
    """Whether each rank has only a slice of the tokens between tensor-parallel layers; effective with `tensor` > 1."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share each expert."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def splits_tokens(self) -> bool:
        """Whether each tensor-parallel rank has only a slice of the tokens."""
        return self.sequence_parallel and self.tensor > 1

    def data(self, ranks: int) -> int:
        """Return the number of data-parallel replicas among `ranks` ranks."""
        return ranks // (self.tensor * self.pipeline * self.context)

    def layers_by_stage(self, layers: int) -> list[int]:
        """Return the number of layers of each pipeline rank.

        Raises:
            ValueError: the layers cannot be distributed; the message says why, without the key.
        """
        first, last, middle = self.first_stage_layers, self.last_stage_layers, self.pipeline
        remaining = layers
        for edge in (first, last):
            if edge is not None:
                remaining, middle = remaining - edge, middle - 1
        if (
            middle < 0
            or remaining < 0
            or (middle == 0) != (remaining == 0)
            or (middle and (remaining % middle or remaining == 0))
        ):
            raise ValueError(f"{remaining} layers over {middle} pipeline ranks")
        per_stage = [remaining // middle] * middle if middle else []
        stages = [*([first] if first is not None else []), *per_stage, *([last] if last is not None else [])]
        if any(count % (self.virtual_pipeline or 1) for count in stages):
            raise ValueError(f"{stages} layers a rank over {self.virtual_pipeline} virtual stages")
        return stages


def layout_of(sizes: MegatronConfig | RefMegatronConfig, section: str) -> MegatronLayout:
    """Return the parallel layout of a model; `section` is the path of the section with these sizes."""
    overrides, virtual_stages = sizes.override_transformer_config, sizes.virtual_pipeline_model_parallel_size
    return MegatronLayout(
        tensor=sizes.tensor_model_parallel_size,
        pipeline=sizes.pipeline_model_parallel_size,
        virtual_pipeline=virtual_stages if virtual_stages != 1 else None,
        context=sizes.context_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        first_stage_layers=_layers(overrides, FIRST, section),
        last_stage_layers=_layers(overrides, LAST, section),
    )


def _layers(overrides: dict[str, Any], name: str, section: str) -> int | None:
    value = overrides.get(name)
    if value is not None and (type(value) is not int or value < 1):
        key = f"{section}.megatron.override_transformer_config.{name}"
        raise ValueError(f"{key}={value!r}: is not a whole number above 0. Give the layers of that pipeline stage.")
    return value


def check(layout: MegatronLayout, hf_config: Any, ranks: int, key_prefix: str) -> None:
    """Refuse a layout that does not fit the model or the number of ranks.

    Args:
        layout: the layout.
        hf_config: the model's config of transformers.
        ranks: number of processes of the model.
        key_prefix: prefix of verl's keys, such as ``actor_rollout_ref.actor.megatron.``.

    Raises:
        ValueError: the message names the key, what it cannot split, and the nearest size that works.
    """
    _check_sizes(layout, key_prefix)
    _check_ranks(layout, ranks, key_prefix)
    heads, kv_heads = hf_config.num_attention_heads, getattr(hf_config, "num_key_value_heads", None)
    kv_heads = heads if kv_heads is None or getattr(hf_config, "kv_lora_rank", None) else kv_heads
    key = f"{key_prefix}tensor_model_parallel_size"
    divided = [(heads, "attention heads"), (hf_config.vocab_size, "tokens of the vocabulary")]
    for number, name in [*divided, *_widths(hf_config)]:
        if number % layout.tensor:
            works = _shared_divisors(number for number, _ in [*divided, *_widths(hf_config)])
            works = [size for size in works if not kv_heads % size or not size % kv_heads]
            raise ValueError(_refusal(key, layout.tensor, number, name, works))
    if kv_heads % layout.tensor and layout.tensor % kv_heads:
        works = [size for size in _divisors(heads) if not kv_heads % size or not size % kv_heads]
        raise ValueError(_refusal(key, layout.tensor, kv_heads, "key and value heads", works))
    _check_layers(layout, hf_config.num_hidden_layers, key_prefix)
    _check_experts(layout, hf_config, key_prefix)


def check_adapters(rank: int, hf_config: Any, section: str) -> None:
    """Refuse LoRA adapters for a model that is not dense, whatever its layout is.

    Args:
        rank: rank of the adapters; 0: the model has none.
        hf_config: the model's config of transformers.
        section: the section of the model, ``actor_rollout_ref.model`` or ``critic.model``.

    Raises:
        ValueError: the model has experts or latent attention.
    """
    kinds = {"experts": experts_of(hf_config), "latent attention": getattr(hf_config, "kv_lora_rank", None)}
    if rank and (present := [kind for kind, size in kinds.items() if size]):
        raise ValueError(
            f"{section}.lora_rank={rank}: Megatron trains adapters of dense models only, and {section}.path has "
            f"{' and '.join(present)}. Leave lora_rank out, or set actor_rollout_ref.actor.strategy=fsdp."
        )


def experts_of(hf_config: Any) -> int | None:
    """Return the number of routed experts per layer; None for a dense model."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if getattr(hf_config, name, None):
            return int(getattr(hf_config, name))
    return None


def shared_expert_width(hf_config: Any) -> int | None:
    """Return the width of the shared expert; None if there is none."""
    if getattr(hf_config, "n_shared_experts", None):
        return int(hf_config.n_shared_experts * hf_config.moe_intermediate_size)
    width = getattr(hf_config, "shared_expert_intermediate_size", None)
    return int(width) if width else None


def _check_sizes(layout: MegatronLayout, prefix: str) -> None:
    sizes = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_ranks,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{prefix}{name}={size}: a number of ranks is at least 1.")
    if layout.virtual_pipeline is not None and layout.virtual_pipeline > 1 and layout.pipeline < 2:
        raise ValueError(
            f"{prefix}virtual_pipeline_model_parallel_size={layout.virtual_pipeline}: acts on a pipeline of several "
            "ranks only. Leave it out, or set pipeline_model_parallel_size to 2 or more."
        )


def _check_ranks(layout: MegatronLayout, ranks: int, prefix: str) -> None:
    model = layout.tensor * layout.pipeline * layout.context
    if ranks % model:
        raise ValueError(
            f"{prefix}tensor_model_parallel_size={layout.tensor} x pipeline_model_parallel_size={layout.pipeline} x "
            f"context_parallel_size={layout.context} = {model} does not divide the {ranks} ranks. Start a multiple of "
            f"{model} ranks, or choose sizes whose product is one of {_divisors(ranks)}."
        )
    experts = layout.expert_ranks * layout.expert * layout.pipeline
    if ranks % experts:
        works = [e for e in _divisors(ranks) if not ranks % (layout.expert_ranks * layout.pipeline * e)]
        raise ValueError(
            f"{prefix}expert_model_parallel_size={layout.expert} x expert_tensor_parallel_size={layout.expert_ranks} x "
            f"pipeline_model_parallel_size={layout.pipeline} = {experts} does not divide the {ranks} ranks."
            + (f" expert_model_parallel_size={_nearest(layout.expert, works)} does." if works else "")
        )


def _check_layers(layout: MegatronLayout, layers: int, prefix: str) -> None:
    try:
        layout.layers_by_stage(layers)
    except ValueError as error:
        chunks, stages = layout.virtual_pipeline, _stages(layout, layers)
        if chunks and stages:
            raise ValueError(
                f"{prefix}virtual_pipeline_model_parallel_size={chunks}: cannot distribute {error}. It must divide the "
                f"layers of each rank; the nearest that works is {_nearest(chunks, _divisors(gcd(*stages)))}."
            ) from None
        raise ValueError(
            f"{prefix}pipeline_model_parallel_size={layout.pipeline}: cannot distribute {error} of a model with "
            f"{layers} layers. Evenly, pipeline_model_parallel_size={_nearest(layout.pipeline, _divisors(layers))} "
            "works; or set override_transformer_config.num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage so that the remaining layers are even."
        ) from None


def _stages(layout: MegatronLayout, layers: int) -> list[int]:
    """Return the layers of each pipeline rank, ignoring virtual stages; empty if they cannot be distributed."""
    try:
        return replace(layout, virtual_pipeline=None).layers_by_stage(layers)
    except ValueError:
        return []


def _check_experts(layout: MegatronLayout, hf_config: Any, prefix: str) -> None:
    experts = experts_of(hf_config)
    if experts is None:
        if layout.expert > 1:
            raise ValueError(
                f"{prefix}expert_model_parallel_size={layout.expert}: {type(hf_config).__name__} has no experts. "
                "Set it to 1; a critic on the actor's devices has the actor's layout."
            )
        return
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"{prefix}sequence_parallel=False: Megatron trains experts beside tensor parallelism with sequence "
            f"parallelism only. Set it to True, or {prefix}tensor_model_parallel_size to 1."
        )
    key = f"{prefix}expert_model_parallel_size"
    if experts % layout.expert:
        raise ValueError(_refusal(key, layout.expert, experts, "experts", _divisors(experts)))
    width = int(hf_config.moe_intermediate_size)
    if width % layout.expert_ranks:
        key = f"{prefix}expert_tensor_parallel_size"
        raise ValueError(_refusal(key, layout.expert_ranks, width, "columns of an expert", _divisors(width)))


def _widths(hf_config: Any) -> list[tuple[int, str]]:
    """Return further sizes that tensor parallelism must divide, with their names."""
    widths = [(int(hf_config.intermediate_size), "columns of the MLP")]
    if getattr(hf_config, "q_lora_rank", None):
        widths.append((int(hf_config.q_lora_rank), "columns of q_lora_rank"))
    if shared := shared_expert_width(hf_config):
        widths.append((shared, "columns of the shared expert"))
    return widths


def _refusal(key: str, size: int, number: int, name: str, works: Sequence[int]) -> str:
    return f"{key}={size} cannot split {number} {name}. The nearest that works is {_nearest(size, works)}."


def _nearest(size: int, works: Sequence[int]) -> int:
    return min(works, key=lambda candidate: (abs(candidate - size), candidate))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _shared_divisors(numbers: Any) -> list[int]:
    first, *others = numbers
    return [size for size in _divisors(first) if not any(other % size for other in others)]
