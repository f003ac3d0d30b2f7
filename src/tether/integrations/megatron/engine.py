"""The training engine of models with tensor, pipeline, expert and context parallelism (Megatron-core).

All ranks of a replica of the model get the same rows; micro-batches go through the pipeline by Megatron's schedules.
All ranks of the last stage compute the same loss, from log-probs over the sharded vocabulary. Gradients are summed over
micro-batches and replicas, never averaged, because the denominators of a loss are those of the full mini-batch. AdamW
is the same as in other engines (`shards`), so a checkpoint does not depend on engine or layout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.algorithms import Metric
from tether.batch import TrainBatch, WeightUpdate, on_device
from tether.checkpoints import load_state, save_moments, save_state
from tether.integrations.megatron import MegatronLayout, groups
from tether.integrations.megatron.adapters import Adapter, MegatronAdapters, adapters_off
from tether.integrations.megatron.dist_checkpoint import DistCheckpoint
from tether.integrations.megatron.head import StatesHead
from tether.integrations.megatron.layout import experts_of
from tether.integrations.megatron.model import MegatronModel, Role, build, describe
from tether.integrations.megatron.shards import Shard, Shards, main_grad
from tether.loop.engine import (
    Forward,
    LossSizes,
    LossSpec,
    OptimizerOptions,
    Outputs,
    UpdatePlan,
    UpdateResult,
    move_state,
)
from tether.loop.rank_exchange import BackgroundWriter, gather_objects
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.machine import deterministic_kernels
from tether.text.learning.engines.copies import to_cpu, tree_to_cpu, with_weights
from tether.text.learning.engines.local import scattered, tensors_of
from tether.text.learning.engines.ranks import RanksEngine
from tether.text.learning.engines.shares import writers
from tether.text.learning.losses import PolicyForward, ValueForward
from tether.text.learning.packing import Experts, MicroBatching, MiniBatch, TokenRows, padding_row, token_rows
from tether.text.models.expert_choice import ExpertChoice
from tether.text.models.fused_experts import Unfused, fused
from tether.text.models.layers import Packed
from tether.text.models.ulysses import SequenceRanks
from tether.types import StateDict

MOMENTS = ("exp_avg", "exp_avg_sq")
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class MegatronOptions:
    """The parallelism of a model and the devices of its shards, which affect memory and speed, but not the result."""

    layout: MegatronLayout = field(default_factory=MegatronLayout)
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Entries of Megatron's TransformerConfig."""
    distributed_optimizer: bool = True
    """Whether the optimizer's state is split over the replicas."""
    offload_weights: bool = False
    """Whether weights are moved to the CPU while the model does not run."""
    offload_gradients: bool = False
    """Whether the memory of gradients is freed between updates."""
    offload_optimizer: bool = False
    """Whether optimizer state is moved to the CPU between updates."""


class MegatronEngine(RanksEngine[Outputs]):
    """The engine of one rank for a model that is sharded over many; every method is collective.

    `infer` and `learn` take the rows of this rank's replica, and return outputs on the ranks in `output_ranks` only.

    Args:
        empty: the transformers model on the meta device, for its class, config and names.
        micro: limits of a replica's forward and backward pass.
        optimizer: None for a model that is not trained.
        weights: a folder of safetensors, a Megatron checkpoint, or tensors by the names of `empty`.
        adapter: values of the LoRA adapters of `empty`, and of a critic's head if it is saved with them.
        device: the rank's device.
        role: determines the head of the model.
        options: how ranks share the model.
        compute_dtype: dtype of forward and backward pass.
        base_options: further arguments of `AutogradEngine`.
    """

    def __init__(
        self,
        empty: PreTrainedModel,
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        weights: Path | DistCheckpoint | Mapping[str, Tensor],
        adapter: Mapping[str, Tensor] | None = None,
        device: torch.device,
        role: Role = "policy",
        options: MegatronOptions = MegatronOptions(),
        compute_dtype: torch.dtype = torch.float32,
        **base_options: Any,
    ) -> None:
        self._empty, self._device, self._options = empty, device, options
        self._names = [name for name, _ in empty.named_parameters()]
        self._trained_names = [name for name, p in empty.named_parameters() if p.requires_grad]
        written = zip(self._names, writers(empty, dist.get_world_size()), strict=True)
        self._mine = {name for name, writer in written if writer == dist.get_rank()}
        self._buffers = {name for name, _ in empty.named_buffers()} & set(empty.state_dict())
        self._writing = BackgroundWriter()
        groups.start(options.layout)
        trains = optimizer is not None
        self.megatron: MegatronModel = build(
            empty.config,
            options.layout,
            role=role,
            dtype=compute_dtype,
            overrides=options.overrides,
            trainable=trains,
            adapters=MegatronAdapters.of(empty),
        )
        every = gather_objects(self.place())
        self.output_ranks = [
            [place == (replica, True) for place in every].index(True) for replica in range(_replicas())
        ]
        config = self.megatron.config
        config.calculate_per_token_loss = True  # sum instead of averaging over micro-batches and replicas
        config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(chunks)
        self._router_coefficients = {name: getattr(config, name) for name in ROUTER_LOSSES if getattr(config, name)}
        self._chunks: list[Any] = self.megatron.chunks
        self.shards = Shards([], distributed=False)
        if trains:
            wide = compute_dtype in (torch.bfloat16, torch.float16)
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=wide)
            pairs = [(p, _holders(p)) for chunk in self.megatron.chunks for p in chunk.parameters() if p.requires_grad]
            if not all(gather_objects(bool(pairs))):
                raise ValueError(
                    "target_modules and exclude_modules leave a pipeline stage without an adapter, so that it has "
                    "nothing to train. Give a layer of each stage one, or lower pipeline_model_parallel_size."
                )
            self._chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in self.megatron.chunks]
            self.shards = Shards(pairs, distributed=options.distributed_optimizer)
        self._split = {p for chunk in self.megatron.chunks for p in split_parameters(chunk)}
        self._read(weights, adapter)
        masters = [master for master in self.shards.masters() if len(master)]
        modules: Any = nn.ModuleList(self._chunks)
        super().__init__(modules, masters, micro, optimizer, **base_options)
        self._move_to_rest()

    def place(self) -> tuple[int, bool]:
        """Return the replica of this rank, and whether this rank returns the outputs of the replica."""
        shard_ranks = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank())
        ends = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return parallel_state.get_data_parallel_rank(), bool(ends and shard_ranks == (0, 0))

    def frozen(self, micro: MicroBatching) -> MegatronEngine[Outputs]:
        """Return an engine with the same weights that is not trained, for a reference that is the policy without its
        adapters."""
        twin = copy.copy(self)
        twin.micro = twin.infer_micro = micro
        twin.optimizer, twin._inference_context = None, adapters_off
        return twin

    def described(self) -> str:
        """Describe the layers and the attention that run on this rank, for the user."""
        return describe(self._options.layout)

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        """Run a forward pass; return None on ranks that are not in `output_ranks`."""
        with self._on_device():
            return self._infer(batch, forward, self.infer_micro)  # type: ignore[return-value]

    def learn(
        self,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
        plan: UpdatePlan,
        minis: Sequence[MiniBatch],
        step: int,
    ) -> UpdateResult[Outputs]:
        with self._on_device(training=True):
            return super().learn(batch, loss, plan, minis, step)

    # --- forward and backward ------------------------------------------------------------------------------------

    def _infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs], micro: MicroBatching) -> Outputs | None:
        self.model.eval()
        sizes = self._row_sizes(batch)

        def attempt(micro: MicroBatching) -> Outputs | None:
            positions = [torch.tensor(rows) for rows in micro.split(sizes)]
            collected: list[Outputs] = []

            def keep(number: int, _: TrainBatch, outputs: Outputs) -> Tensor:
                if number < len(positions):
                    collected.append(outputs)
                return torch.zeros((), device=self._device)

            with torch.no_grad(), self._inference_context(self.model), deterministic_kernels():  # as in the update
                routed = self._pipeline(forward, [batch[rows] for rows in positions], keep, forward_only=True)
            for outputs, experts in zip(collected, routed, strict=False):
                outputs.routed_experts = experts  # type: ignore[attr-defined]  # if the forward records them
            return scattered(collected, positions, len(batch)) if collected else None

        return self._retry_if_out_of_memory(attempt, micro, sizes)

    def _sum_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], sizes: LossSizes, groups: list[list[int]]
    ) -> tuple[list[dict[str, Metric]], dict[str, Tensor], Outputs | None]:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        positions = [torch.tensor(rows) for rows in groups]
        measured: list[dict[str, Metric]] = []
        shares: dict[str, Tensor] = {}
        outputs: list[Outputs] = []

        def minimise(number: int, micro: TrainBatch, micro_outputs: Outputs) -> Tensor:
            if number >= len(positions):  # padding
                return torch.stack([output.sum() for output in tensors_of(micro_outputs)]).sum()
            term = loss.function(micro_outputs, micro.to(self._device), sizes)
            outputs.append(micro_outputs.detach())  # type: ignore[attr-defined]  # tensordict's classes
            measured.append(term.metrics)
            for name, share in term.shares.items():
                shares[name] = shares.get(name, 0.0) + share.detach().double()
            return term.loss

        self._pipeline(loss.forward, [mini[rows] for rows in positions], minimise, forward_only=False)
        self.shards.take_gradients()
        return measured, shares, scattered(outputs, positions, len(mini)) if outputs else None

    def _pipeline(
        self,
        forward: Forward[TrainBatch, Outputs],
        micros: list[TrainBatch],
        on_outputs: Callable[[int, TrainBatch, Outputs], Tensor],
        *,
        forward_only: bool,
    ) -> list[Tensor]:
        """Run micro-batches through all stages, forward and backward.

        Args:
            forward: computes the outputs of a micro-batch.
            micros: the micro-batches of this replica.
            on_outputs: called on the last stage with a micro-batch's index, rows and outputs; returns the loss.
            forward_only: whether to omit the backward pass.

        Returns:
            The experts of the rows of each micro-batch, if the forward records them.
        """
        experts: Experts = getattr(forward, "experts", "chosen")
        count, rounds = len(micros), self._rounds(len(micros))
        micros = [*micros, *(padding_row() for _ in range(rounds - count))]
        all_rows = [token_rows(micro, packed=True, experts=experts, merges=False) for micro in micros]
        if self._router_coefficients and not forward_only:
            self._average_router_losses(sum(rows.input_ids.numel() for rows in all_rows[:count]))
        local_rows = [on_device(self._local(rows), self._device) for rows in all_rows]
        records = experts == "recorded"
        choices = [None if experts == "chosen" else ExpertChoice(rows.experts, records=records) for rows in local_rows]

        def step(numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            rows, micro = local_rows[number], micros[number]
            states = self.megatron.run(
                chunk, rows.input_ids, rows.position_ids, rows.layout, counts=number < count, choice=choices[number]
            )

            def end(states: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss = on_outputs(number, micro, self._outputs(forward, micro, rows, states))
                return loss, torch.ones((), dtype=torch.int, device=loss.device), {}

            return states, end

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(rounds)) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=rounds,
            seq_length=1,  # Megatron sends each micro-batch's actual length before it
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [
            self._by_row(rows, choice) for rows, choice in zip(local_rows[:count], choices, strict=False) if records
        ]

    def _by_row(self, rows: TokenRows, choice: ExpertChoice | None) -> Tensor:
        """Return the experts [B, W, L, k] of rows, gathered from all ranks, which have some layers or tokens each."""
        assert choice is not None
        config, tokens = self.megatron.config, rows.input_ids.numel()
        local = rows.by_row(choice.recorded(tokens, config.num_layers, config.moe_router_topk, self._device))
        return SequenceRanks(parallel_state.get_model_parallel_group()).max(local)

    def _local(self, rows: TokenRows) -> TokenRows:
        """Return the tokens of a micro-batch that this rank has."""
        assert isinstance(rows.layout, Packed)
        zig_zag = self.megatron.shared(rows.layout)
        return rows if zig_zag is None else rows.select(zig_zag.indices, zig_zag, SequenceRanks(zig_zag.group))

    def _average_router_losses(self, tokens: int) -> None:
        """Divide the coefficients of router losses, which are sums, by the tokens of the mini-batch on all replicas."""
        total = torch.tensor(tokens, device=self._device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        for name, coefficients in self._router_coefficients.items():
            several = isinstance(coefficients, list)
            averaged = [one / int(total) for one in coefficients] if several else coefficients / int(total)
            setattr(self.megatron.config, name, averaged)

    def _outputs(self, forward: Any, batch: TrainBatch, rows: TokenRows, states: Tensor) -> Any:
        """Compute the outputs of a forward from the states of the last stage."""
        if isinstance(forward, ValueForward):
            return forward.outputs(batch, rows, states, self.megatron.values)
        assert isinstance(forward, PolicyForward)
        selected = states.index_select(0, rows.predicts)
        log_probs = lambda *targets, **options: self.megatron.log_probs(selected, *targets, **options)  # noqa: E731
        return forward.outputs(batch, rows, log_probs, self._empty.config.vocab_size)

    def _rounds(self, count: int) -> int:
        rounds, stages = super()._rounds(count), self._options.layout.pipeline
        interleaved = len(self._chunks) > 1
        return -(-rounds // stages) * stages if interleaved else rounds

    def _clip_gradients(self, limit: float) -> float:
        grads = [main_grad(shard.parameter) for shard in self.shards if self._counts(shard.parameter)]
        norms = torch.stack(torch._foreach_norm(grads)).double() if grads else torch.zeros(1).double()
        square = norms.square().sum().to(self._device)
        dist.all_reduce(square)
        norm = float(square.sqrt())
        if math.isfinite(norm) and limit < norm + 1e-6:
            grads = [master.grad for master in self.trained if master.grad is not None]
            torch._foreach_mul_(grads, limit / (norm + 1e-6))
        return norm

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient norm includes this rank's copy of a parameter; replicated ones are counted once."""
        if dist.get_rank(_holders(parameter)) > 0 or not param_is_not_shared(parameter):
            return False
        if parameter in self._split:
            return True
        if _is_expert(parameter):
            return bool(parallel_state.get_expert_tensor_parallel_rank() == 0)
        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def _weights_changed(self) -> None:
        self.shards.give_weights()

    # --- weights and state ---------------------------------------------------------------------------------------

    def export(self) -> WeightUpdate:
        """Return the current weights in the dtype of the forward pass, gathered one at a time."""
        return WeightUpdate(self.version, self._exported())

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device():
            yield from self._gathered()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export`, on the CPU of rank 0; all ranks must iterate together."""
        first = dist.get_rank() == 0
        return ((name, value.cpu() if first else value) for name, value in self._exported())

    def begin_saving(self, share: Path, name: str, with_state: bool = True) -> None:
        """Copy the tensors that this rank writes and start writing them, as `FsdpEngine.begin_saving` does."""
        assert self._save, "a frozen model is not saved"
        save, names = self._save, self._mine | self._buffers
        if self.megatron.adapters and dist.get_rank() == 0:  # rank 0 also writes the adapters separately
            names |= set(self._trained_names)
        model = self._model_of(self._named(_master, names))
        moments, state = (self._moments_to_write(), self._state_to_write()) if with_state else ({}, {})

        def write() -> None:
            save(model, share / name)
            if with_state:
                save_moments(share / "moments.safetensors", moments)
                save_state(share / "state.pt", state)

        self._writing.begin(write)

    def writing(self) -> tuple[bool, BaseException | None]:
        """Return whether writing is done, and the error if it failed."""
        return self._writing.answer()

    def whole_model(self) -> PreTrainedModel | None:
        named = self._named(_master, {*self._names, *self._buffers})
        return self._model_of(named) if dist.get_rank() == 0 else None

    def _model_of(self, named: Mapping[str, Tensor]) -> PreTrainedModel:
        model = with_weights(self._empty, [named.get(name, p) for name, p in self._empty.named_parameters()])
        for name in self._buffers:  # persistent ones, such as the correction bias of DeepSeek's routers
            model.get_buffer(name).copy_(named[name])
        return model

    def _moments_to_write(self) -> dict[int, dict[str, Tensor]]:
        """Return AdamW's moments of the weights that this rank writes, by their index among the trained weights."""
        assert self.optimizer
        if not any(gather_objects(bool(self.optimizer.state))):
            return {}
        mine = [(number, name) for number, name in enumerate(self._trained_names) if name in self._mine]
        names = {name for _, name in mine}
        moments = {moment: self._named(partial(self._moment, moment), names, trained=True) for moment in MOMENTS}
        return {number: {moment: named[name] for moment, named in moments.items()} for number, name in mine}

    def _state_to_write(self) -> StateDict:
        """Return all training state except weights and moments."""
        assert self.optimizer
        numbers = list(range(len(self._trained_names)))
        steps = gather_objects([moments["step"] for moments in list(self.optimizer.state.values())[:1]])
        (step,) = next(filter(None, steps), [None])
        groups = [group | {"params": numbers} for group in self.optimizer.state_dict()["param_groups"]]
        steps_by_parameter = {} if step is None else {number: {"step": step} for number in numbers}
        return tree_to_cpu({"state": steps_by_parameter, "param_groups": groups, "version": self.version})

    def _moment(self, name: str, shard: Shard) -> Tensor:
        assert self.optimizer
        moment: Tensor = self.optimizer.state[shard.master][name] if len(shard.master) else shard.master.detach()
        return moment

    def _named(
        self, values: Callable[[Shard], Tensor], names: Collection[str], *, trained: bool = False
    ) -> dict[str, Tensor]:
        """Return name -> full tensor with one value per element of the master, on the CPU in at least float32.

        Only tensors in `names` are returned; frozen weights have no master.
        """
        with self._on_device():
            tensors = self.shards.full_tensors(lambda shard: values(shard).to(self._device))
            with self.shards.holding(tensors):
                copies = {name: to_cpu(value) for name, value in self._gathered(trained=trained) if name in names}
        return {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in copies.items()}

    def _gathered(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        return fused(self.megatron.export(trained=trained), experts_of(self._empty.config) or 0)

    def load_state(self, file: Path) -> int:
        """Load this rank's shards of a state, which any engine and layout may have saved, and return its `version`."""
        assert self.optimizer
        with reading(file, ANOTHER_CHECKPOINT):
            state = load_state(file, mapped=True)
            self.version = int(state["version"])
            self.optimizer.state.clear()
            if not state["state"]:
                return self.version
            for moment in MOMENTS:
                numbered = enumerate(self._trained_names)
                named = Unfused({name: state["state"][number][moment] for number, name in numbered})
                tensors = [torch.empty_like(shard.parameter, dtype=shard.master.dtype) for shard in self.shards]
                with self.shards.holding(tensors):
                    self.megatron.load(named, trained=True)
                for shard, tensor in zip(self.shards, tensors, strict=True):
                    if len(shard.master):
                        self.optimizer.state[shard.master][moment] = shard.view_of(tensor).clone()
            for moments in self.optimizer.state.values():
                moments["step"] = state["state"][0]["step"].clone()
            self._move_to_rest()
        return self.version

    def _read(
        self, weights: Path | DistCheckpoint | Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the weights, in the dtype of the masters if there are any."""
        wide = [
            torch.empty_like(shard.parameter, dtype=shard.master.dtype) if shard.is_copy else shard.parameter.data
            for shard in self.shards
        ]
        with self.shards.holding(wide):
            self.megatron.load(Unfused(weights) if isinstance(weights, Mapping) else weights)
            if adapter is not None:
                self.megatron.load(adapter, trained=True)
        for shard, tensor in zip(self.shards, wide, strict=True):
            if shard.is_copy:
                shard.master.data.copy_(shard.view_of(tensor))
                shard.parameter.data.copy_(tensor)

    # --- devices ------------------------------------------------------------------------------------------------

    @contextmanager
    def _on_device(self, *, training: bool = False) -> Iterator[None]:
        """Move weights, and for training gradients and optimizer state, to the rank's device inside the context."""
        self._move(self._device, training=training)
        try:
            yield
        finally:
            self._move_to_rest()

    def _move_to_rest(self) -> None:
        self._move(torch.device("cpu"), training=True, release=True)

    def _move(self, device: torch.device, *, training: bool, release: bool = False) -> None:
        options = self._options
        if options.offload_weights:
            for chunk in self.megatron.chunks:
                _move_frozen(chunk, device)
            self.shards.move(device, weights=True, copies=False)
        if not training:
            return
        if options.offload_optimizer and self.optimizer:
            self.shards.move(device, weights=False, copies=True)
            move_state(self.optimizer, device)
        if options.offload_gradients and self.optimizer:
            for chunk in self._chunks:
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                    buffer.grad_data.untyped_storage().resize_(0 if release else buffer.grad_data.nbytes)


def _replicas() -> int:
    return int(parallel_state.get_data_parallel_world_size())


def _is_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _holders(parameter: nn.Parameter) -> Any:
    """Return the ranks that hold the same parameter and sum its gradients."""
    if _is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def split_parameters(chunk: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that are sharded over tensor-parallel ranks; others are replicated."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | StatesHead):
            if module.weight is not None:
                yield module.weight
            if isinstance(module, ColumnParallelLinear) and module.bias is not None:
                yield module.bias
        elif isinstance(module, Adapter):
            yield module.split


def _master(shard: Shard) -> Tensor:
    return shard.master.detach()


def _move_frozen(chunk: nn.Module, device: torch.device) -> None:
    for parameter in chunk.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(device)
