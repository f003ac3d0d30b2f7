"""A model of transformers as Megatron-core holds it: built, loaded, run and exported by all ranks of a layout."""

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

from tether.kernels import AttentionLayout
from tether.models.language.expert_choice import UNKNOWN, ExpertChoice
from tether.models.layers import Packed
from tether.models.megatron import cpu, without_te
from tether.models.megatron.attention import (
    Norm,
    PackedAttention,
    PackedTokens,
    Rotary,
    has_fused_attention,
    rotary_of,
)
from tether.models.megatron.context import Filled, ZigZag
from tether.models.megatron.dist_checkpoint import DistCheckpoint
from tether.models.megatron.families import check_family, has_value_bias, transformer_config
from tether.models.megatron.head import ValueHead, replace_output_layer
from tether.models.megatron.latent import finish_attention
from tether.models.megatron.layout import Layout
from tether.models.megatron.router import Router, with_experts
from tether.models.megatron.transfer import Placed, export_weights, load_weights
from tether.models.output import KeptSets, LmHead, LogProbs, VocabularyShard, token_log_probs

Role = Literal["policy", "critic"]


@dataclass
class MegatronModel:
    """The part of a model that is on this rank."""

    hf_config: Any
    layout: Layout
    role: Role
    config: Any
    """Megatron's TransformerConfig, the same object in all chunks."""
    chunks: list[GPTModel]
    """One for each virtual stage."""

    @property
    def has_head(self) -> bool:
        """Whether this rank ends the pipeline; its last chunk then returns states that `log_probs` or `values` take."""
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
        """One chunk's forward pass, as a schedule of Megatron wants it from ``forward_step_func``.

        Megatron's schedule divides a loss by the number of micro-batches and multiplies it by that of context ranks;
        its DistributedDataParallel takes the mean over data and context ranks. So a sum over all tokens, of which each
        rank adds up its own, is to be multiplied by the micro-batches and the data-parallel replicas.

        Args:
            chunk: one of `chunks`, or what a wrapper (DistributedDataParallel) made of it.
            input_ids: [1, N] tokens, packed end to end.
            position_ids: [1, N] each token's position in its own sequence.
            layout: which of them sees which.
            counts: False: no loss of a router, either, is to see these tokens.
            choice: replays or records the experts of the tokens, in the layers of the chunk; what is not known on this
                rank is -1.

        Returns:
            What the next stage gets; at the end of the pipeline the states [N, E] under the head.
        """
        tokens = input_ids.shape[1]
        input_ids, position_ids, layout = self._filled(input_ids, position_ids, layout)
        padding = torch.arange(input_ids.shape[1], device=input_ids.device)[None] >= (tokens if counts else 0)
        part = slice(None)  # of the tokens, between the matrices
        if self.layout.splits_tokens:
            each, rank = input_ids.shape[1] // self.layout.tensor, groups.get_tensor_model_parallel_rank()
            part = slice(rank * each, (rank + 1) * each)
        packed = PackedTokens(
            qkv_format="sbhd",
            layout=layout,
            positions=position_ids[0],
            padding=padding[:, part],
            choice=None if choice is None else _part_of(choice, input_ids.shape[1], part),
        )
        out: Tensor = chunk(input_ids, position_ids, None, packed_seq_params=packed)
        if choice is not None and packed.choice is not None:
            for layer, chosen in packed.choice.chosen.items():
                whole = chosen.new_full((input_ids.shape[1], chosen.shape[1]), UNKNOWN)
                whole[part] = chosen
                choice.chosen[layer] = whole[:tokens]
        return out[0, :tokens] if _ends(chunk) else out

    def shared(self, packed: Packed) -> ZigZag | None:
        """With context parallelism the layout of this rank's tokens, whose `places` among the packed ones it knows.

        `run` then takes the tokens and positions at these places, and returns their states.
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
        kept: KeptSets | None = None,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> LogProbs:
        """Of targets [M], the same on each tensor-parallel rank, from the states [M, E] before them.

        No rank ever has the logits of the whole vocabulary. Arguments as in `tether.models.output.token_log_probs`.
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
            kept=kept,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            shard=VocabularyShard(first, group) if self.layout.tensor > 1 else None,
        )

    def values(self, states: Tensor) -> Tensor:
        """[M, E] -> [M], in at least float32, the same on each tensor-parallel rank."""
        head: ValueHead = self.chunks[-1].output_layer
        return head.values(states)

    def load(self, source: Path | str | DistCheckpoint | Mapping[str, Tensor], *, buffers: bool = True) -> None:
        """Read this rank's slices of the safetensors of a directory that transformers saved, of a checkpoint of
        Megatron, or of whole tensors, of which there may be some for the parameters alone.

        Raises:
            ValueError: no safetensors, a tensor that they lack, or one of another shape.
        """
        load_weights(self._placed(), Path(source) if isinstance(source, str) else source, buffers=buffers)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor under the name and in the shape in which transformers saves it, on each rank.

        All ranks take part and go through it to the end, in step.
        """
        return export_weights(self._placed())

    def _placed(self) -> Placed:
        return Placed(self.hf_config, self.layout, self.role, self.chunks)

    def _filled(
        self, input_ids: Tensor, position_ids: Tensor, layout: AttentionLayout
    ) -> tuple[Tensor, Tensor, AttentionLayout]:
        """With zeros behind, where tensor-parallel ranks hold equal parts of the tokens, or where there are none."""
        tokens, ranks = input_ids.shape[1], self.layout.tensor if self.layout.splits_tokens else 1
        missing = -tokens % ranks if tokens else ranks
        if not missing:
            return input_ids, position_ids, layout
        input_ids, position_ids = (nn.functional.pad(x, (0, missing)) for x in (input_ids, position_ids))
        return input_ids, position_ids, Filled(layout, tokens)


def build(
    hf_config: Any,
    layout: Layout,
    *,
    role: Role = "policy",
    dtype: torch.dtype,
    overrides: Mapping[str, object] | None = None,
    trainable: bool = True,
) -> MegatronModel:
    """This rank's part of a model, with weights yet to be loaded; `tether.models.megatron.groups.start` ran before.

    Args:
        hf_config: of transformers.
        layout: the sizes, which `tether.models.megatron.layout.check` admits.
        role: a policy has the head of a language model, a critic one scalar in float32.
        dtype: of the weights.
        overrides: entries of Megatron's config (``override_transformer_config``).
        trainable: False for a reference.

    Raises:
        ValueError: a model without a mapping, or an entry to override that does not exist or is set elsewhere.
    """
    check_family(hf_config)
    config = transformer_config(hf_config, layout, dtype, overrides or {})
    without_te.correct()
    cpu.install()
    stages = layout.virtual_pipeline or 1
    chunks = [_chunk(hf_config, config, role, stage if stages > 1 else None) for stage in range(stages)]
    cpu.install()  # for what building loaded
    for chunk in chunks:
        chunk.requires_grad_(trainable)
        chunk.train(trainable)
    return MegatronModel(hf_config, layout, role, config, chunks)


def describe(layout: Layout) -> str:
    """Which layers and which attention run on this rank, for the user."""
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
    """Let the ranks that hold the same part of an expert sum its gradients, also where no rank has fewer experts.

    Megatron marks them so with expert parallelism only, and takes them for replicated as all else is. But where as many
    ranks share an expert as share other matrices, both groups are the same.
    """
    for parameter in mlp.experts.parameters() if hasattr(mlp, "experts") else ():
        parameter.allreduce = False


def _mask_padding(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Megatron hands the mask to the layers of the first pipeline stage only."""
    packed: PackedTokens = given["packed_seq_params"]
    padding, choice, router = packed.padding, packed.choice, getattr(layer.mlp, "router", None)
    if router is not None:
        number = layer.layer_number - 1
        router.record = None
        if choice is not None and choice.records:
            router.record = partial(choice.chosen.__setitem__, number)
        if choice is not None and choice.replayed is not None:
            padding = with_experts(padding, choice.replayed[:, number], router.config.num_moe_experts)
    return args, given | {"padding_mask": padding}


def _part_of(choice: ExpertChoice, tokens: int, part: slice) -> ExpertChoice:
    """Of tokens that a rank has, some of which only fill them up."""
    replayed = choice.replayed
    if replayed is not None:
        missing = tokens - len(replayed)
        replayed = nn.functional.pad(replayed, (0, 0, 0, 0, 0, missing), value=UNKNOWN)[part]
    return ExpertChoice(replayed, choice.records)


@dataclass(frozen=True)
class _NoGradient:
    """Keeps the gradient from the embedding of one token, as ``padding_idx`` of `torch.nn.Embedding` does."""

    token: int

    def __call__(self, embedding: Any, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        (ids,) = inputs  # [1, N]
        if embedding.reduce_scatter_embeddings:  # embedded is [N / ranks, 1, E]
            ids = ids.T.chunk(groups.get_tensor_model_parallel_world_size())[groups.get_tensor_model_parallel_rank()]
        return torch.where((ids == self.token)[..., None], embedded.detach(), embedded)


def _layers(config: Any, stage: int | None) -> Any:
    """Megatron's description of the layers of a stage, with our attention and norms."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    block.layer_norm = Norm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        attention.core_attention = PackedAttention
        if (experts := _described(parts.mlp)) is not None:
            experts.router = Router
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    return block


def _described(mlp: Any) -> MoESubmodules | None:
    """The parts of a mixture of experts: since Megatron 0.18 it is described by a partial call, before by a spec."""
    parts = mlp.keywords.get("submodules") if isinstance(mlp, partial) else getattr(mlp, "submodules", None)
    return parts if isinstance(parts, MoESubmodules) else None


def _ends(chunk: Any) -> bool:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return bool(chunk.post_process)
