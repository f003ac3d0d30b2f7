"""A transformers model in Megatron-core: builds, loads, runs and exports it on all ranks of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state as groups
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from torch import Tensor, nn

from tether.integrations.megatron import cpu, without_te
from tether.integrations.megatron.adapters import MegatronAdapters, insert
from tether.integrations.megatron.attention import (
    Norm,
    PackedAttention,
    PackedTokens,
    Rotary,
    has_fused_attention,
    rotary_of,
)
from tether.integrations.megatron.context import Filled, ZigZag
from tether.integrations.megatron.dist_checkpoint import DistCheckpoint
from tether.integrations.megatron.families import check_family, has_value_bias, transformer_config
from tether.integrations.megatron.head import MegatronValueHead, replace_output_layer
from tether.integrations.megatron.latent import finish_attention
from tether.integrations.megatron.layout import MegatronLayout
from tether.integrations.megatron.router import Router, with_experts
from tether.integrations.megatron.transfer import Placed, export_weights, load_weights
from tether.kernels import AttentionLayout
from tether.text.models.expert_choice import UNKNOWN, ExpertChoice
from tether.text.models.layers import Packed
from tether.text.models.output import LmHead, LogProbs, VocabularyShard, token_log_probs
from tether.text.models.truncation_record import KeptSets

Role = Literal["policy", "critic"]


@dataclass
class MegatronModel:
    """This rank's shard of a model."""

    hf_config: Any
    layout: MegatronLayout
    role: Role
    config: Any
    """Megatron's TransformerConfig, the same object in all chunks."""
    chunks: list[GPTModel]
    """One per virtual stage."""
    adapters: MegatronAdapters | None = None
    """The layers with LoRA adapters. With adapters, all weights except a critic's head are frozen."""

    @property
    def has_head(self) -> bool:
        """Whether this rank is the last pipeline stage, whose last chunk returns the states for `log_probs` or
        `values`."""
        return bool(groups.is_pipeline_last_stage(ignore_virtual=True))

    def run(
        self,
        chunk: nn.Module,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: AttentionLayout,
        *,
        counts: bool = True,
        choice: ExpertChoice | None = None,
    ) -> Tensor:
        """Run the forward pass of one chunk, for the ``forward_step_func`` of Megatron's schedule.

        Megatron's schedule divides a loss by the number of micro-batches and multiplies it by the number of context
        ranks; its DistributedDataParallel averages over data and context ranks. So a loss that is a sum over all tokens
        must be multiplied by the number of micro-batches and the number of data-parallel replicas.

        Args:
            chunk: one of `chunks`, or its wrapper (DistributedDataParallel).
            input_ids: [1, N] tokens, packed end to end.
            position_ids: [1, N] position of each token in its sequence.
            layout: which tokens attend to which.
            counts: whether the router losses include these tokens.
            choice: replays or records the experts of the tokens in the layers of the chunk; -1 where this rank does not
                have them.

        Returns:
            The input of the next stage; on the last stage the hidden states [N, E] before the head.
        """
        tokens = input_ids.shape[1]
        input_ids, position_ids, layout = self._filled(input_ids, position_ids, layout)
        padding = torch.arange(input_ids.shape[1], device=input_ids.device)[None] >= (tokens if counts else 0)
        span = slice(None)  # of this rank's tokens under sequence parallelism
        if self.layout.splits_tokens:
            each, rank = input_ids.shape[1] // self.layout.tensor, groups.get_tensor_model_parallel_rank()
            span = slice(rank * each, (rank + 1) * each)
        packed = PackedTokens(
            qkv_format="sbhd",
            layout=layout,
            positions=position_ids[0],
            padding=padding[:, span],
            choice=None if choice is None else _select_tokens(choice, input_ids.shape[1], span),
        )
        out: Tensor = chunk(input_ids, position_ids, None, packed_seq_params=packed)
        if choice is not None and packed.choice is not None:
            for layer, chosen in packed.choice.chosen.items():
                experts = chosen.new_full((input_ids.shape[1], chosen.shape[1]), UNKNOWN)
                experts[span] = chosen
                choice.chosen[layer] = experts[:tokens]
        return out[0, :tokens] if _is_last(chunk) else out

    def shared(self, packed: Packed) -> ZigZag | None:
        """Return the attention layout of this rank's tokens under context parallelism, or None without it.

        With such a layout, `run` takes the tokens and positions at its `indices`, and returns their states.
        """
        if self.layout.context == 1:
            return None
        group = groups.get_context_parallel_group()
        return ZigZag(packed, groups.get_context_parallel_rank(), self.layout.context, group)

    def log_probs(
        self,
        states: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        candidates: KeptSets | None = None,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> LogProbs:
        """Return the log-probs of targets [M] from the states [M, E] before them, equal on all tensor-parallel ranks.

        No rank computes the logits of the full vocabulary. Arguments as for
        `tether.text.models.output.token_log_probs`.
        """
        chunk = self.chunks[-1]
        weight = chunk.output_layer.weight
        weight = chunk.shared_embedding_or_output_weight() if weight is None else weight
        group = groups.get_tensor_model_parallel_group()
        first = groups.get_tensor_model_parallel_rank() * len(weight)
        return token_log_probs(
            states,
            LmHead(weight),
            targets,
            temperature=temperature,
            candidates=candidates,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            shard=VocabularyShard(first, group) if self.layout.tensor > 1 else None,
        )

    def values(self, states: Tensor) -> Tensor:
        """Return the values [M] of states [M, E], in at least float32, equal on all tensor-parallel ranks."""
        head: MegatronValueHead = self.chunks[-1].output_layer
        return head.values(states)

    def load(self, source: Path | str | DistCheckpoint | Mapping[str, Tensor], *, trained: bool = False) -> None:
        """Load this rank's slices of full tensors.

        Args:
            source: a folder in transformers' layout with safetensors, a Megatron checkpoint, or tensors by name.
            trained: True: load trained parameters only, such as adapters under peft's names; False: all but adapters.

        Raises:
            ValueError: there are no safetensors, or a tensor is missing or has a different shape.
        """
        source = Path(source) if isinstance(source, str) else source
        if trained and self.adapters and isinstance(source, Mapping):
            source = self.adapters.with_zeros(source)
        load_weights(self._placed(), source, trained=trained)

    def export(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors, all or only trained ones, on each rank, with transformers' names and shapes.

        With adapters, names are those of peft. All ranks must iterate to the end, because tensors are gathered.
        """
        exported = export_weights(self._placed(), trained=trained)
        return self.adapters.renamed(exported) if self.adapters else exported

    def insert_adapters(self, adapters: MegatronAdapters) -> None:
        """Insert uninitialised adapters into the frozen layers, and make a critic's head trainable.

        Raises:
            ValueError: a layer does not support an adapter.
        """
        weights = list(self._placed().weights())
        adapters.check(weights)
        for chunk in self.chunks:
            insert(chunk, adapters, weights)
            if self.role == "critic" and chunk.post_process:
                chunk.output_layer.requires_grad_(True)

    def _placed(self) -> Placed:
        return Placed(self.hf_config, self.layout, self.role, self.chunks, self.adapters)

    def _filled(
        self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout
    ) -> tuple[Tensor, Tensor, AttentionLayout]:
        """Pad with zeros if tokens do not split evenly over tensor-parallel ranks, or if there are none."""
        tokens, ranks = input_ids.shape[1], self.layout.tensor if self.layout.splits_tokens else 1
        missing = -tokens % ranks if tokens else ranks
        if not missing:
            return input_ids, position_ids, layout
        input_ids, position_ids = (nn.functional.pad(x, (0, missing)) for x in (input_ids, position_ids))
        return input_ids, position_ids, Filled(layout, tokens)


def build(
    hf_config: Any,
    layout: MegatronLayout,
    *,
    role: Role = "policy",
    dtype: torch.dtype,
    overrides: Mapping[str, object] | None = None,
    trainable: bool = True,
    adapters: MegatronAdapters | None = None,
) -> MegatronModel:
    """Build this rank's shard of a model without loading weights, after `tether.integrations.megatron.groups.start`.

    Args:
        hf_config: transformers' configuration.
        layout: sizes that passed `tether.integrations.megatron.layout.check`.
        role: a policy has the head of a language model, a critic one scalar in float32.
        dtype: dtype of the weights.
        overrides: entries of Megatron's config (``override_transformer_config``).
        trainable: False for a reference model.
        adapters: layers whose adapters are trained instead of the weights.

    Raises:
        ValueError: the model has no mapping, an override does not exist or is set elsewhere, or a layer does not
            support an adapter.
    """
    check_family(hf_config)
    config = transformer_config(hf_config, layout, dtype, overrides or {})
    without_te.correct()
    cpu.install()
    stages = layout.virtual_pipeline or 1
    chunks = [_chunk(hf_config, config, role, stage if stages > 1 else None) for stage in range(stages)]
    cpu.install()  # again, for modules that were imported while building
    for chunk in chunks:
        chunk.requires_grad_(trainable and adapters is None)
        chunk.train(trainable)
    model = MegatronModel(hf_config, layout, role, config, chunks, adapters)
    if adapters:
        model.insert_adapters(adapters)
    return model


def describe(layout: MegatronLayout) -> str:
    """Describe the layers and the attention that run on this rank, for the user."""
    where = "CUDA" if torch.cuda.is_available() else "the CPU"
    fused = has_fused_attention(layout.context)
    attention = "Transformer Engine's fused attention" if fused else "tether's packed attention"
    return f"Megatron-core {version('megatron-core')}: its own layers on {where}, with {attention} and tether's norms"


def _chunk(hf_config: Any, config: Any, role: Role, stage: int | None) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_layers(config, stage),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=groups.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=groups.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=role == "policy" and hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=stage,
    )
    if config.multi_latent_attention:
        for layer in chunk.decoder.layers:
            finish_attention(layer.self_attention, hf_config)
    else:
        chunk.rotary_pos_emb = Rotary(rotary_of(hf_config)[0], latent=False)
    if chunk.pre_process and hf_config.pad_token_id is not None:
        chunk.embedding.word_embeddings.register_forward_hook(_NoGradient(hf_config.pad_token_id))
    if chunk.post_process:
        replace_output_layer(chunk, role, has_value_bias(hf_config))
    for layer in chunk.decoder.layers:
        assert isinstance(getattr(layer.mlp, "router", None), Router | None), "Megatron built a router of its own"
        _mark_experts(layer.mlp)
        layer.register_forward_pre_hook(_mask_padding, with_kwargs=True)
    return chunk


def _mark_experts(mlp: Any) -> None:
    """Make ranks with the same shard of an expert sum its gradients, also without expert parallelism.

    Without expert parallelism, Megatron treats experts as replicated like other weights, which is correct only if the
    expert tensor-parallel size equals the tensor-parallel size.
    """
    for parameter in mlp.experts.parameters() if hasattr(mlp, "experts") else ():
        parameter.allreduce = False


def _mask_padding(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the padding mask to every layer; Megatron passes it on the first pipeline stage only."""
    packed: PackedTokens = kwargs["packed_seq_params"]
    padding, choice, router = packed.padding, packed.choice, getattr(layer.mlp, "router", None)
    if router is not None:
        number = layer.layer_number - 1
        router.record = None
        if choice is not None and choice.records:
            router.record = partial(choice.chosen.__setitem__, number)
        if choice is not None and choice.replayed is not None:
            padding = with_experts(padding, choice.replayed[:, number], router.config.num_moe_experts)
    return args, kwargs | {"padding_mask": padding}


def _select_tokens(choice: ExpertChoice, tokens: int, span: slice) -> ExpertChoice:
    """Return the choice for a span of the tokens after padding them to `tokens`."""
    replayed = choice.replayed
    if replayed is not None:
        missing = tokens - len(replayed)
        replayed = nn.functional.pad(replayed, (0, 0, 0, 0, 0, missing), value=UNKNOWN)[span]
    return ExpertChoice(replayed, choice.records)


@dataclass(frozen=True)
class _NoGradient:
    """Stops the gradient of one token's embedding, as ``padding_idx`` of `torch.nn.Embedding` does."""

    token: int

    def __call__(self, embedding: Any, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        (ids,) = inputs  # [1, N]
        if embedding.reduce_scatter_embeddings:  # embedded is [N / ranks, 1, E]
            ids = ids.T.chunk(groups.get_tensor_model_parallel_world_size())[groups.get_tensor_model_parallel_rank()]
        return torch.where((ids == self.token)[..., None], embedded.detach(), embedded)


def _layers(config: Any, stage: int | None) -> Any:
    """Return Megatron's spec for the layers of a stage, with tether's attention, norms and router."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    block.layer_norm = Norm
    for layer in block.layer_specs:
        submodules, attention = layer.submodules, layer.submodules.self_attention.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = Norm
        attention.core_attention = PackedAttention
        if (experts := _moe_submodules(submodules.mlp)) is not None:
            experts.router = Router
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    return block


def _moe_submodules(mlp: Any) -> MoESubmodules | None:
    """Return the submodules of a mixture of experts: in Megatron 0.18 and later those of a partial, before of a
    spec."""
    submodules = mlp.keywords.get("submodules") if isinstance(mlp, partial) else getattr(mlp, "submodules", None)
    return submodules if isinstance(submodules, MoESubmodules) else None


def _is_last(chunk: Any) -> bool:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return bool(chunk.post_process)
