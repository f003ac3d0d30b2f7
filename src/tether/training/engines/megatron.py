"""A model in tensor, pipeline, expert and context parallel parts (Megatron-core), and how it is updated there.

Ranks that share a replica of the model get the same rows; micro-batches go through the pipeline by Megatron's own
schedules. The loss is computed where the pipeline ends, by all ranks there alike, from log-probabilities over the split
vocabulary. A gradient is summed over micro-batches and replicas, never averaged: the denominators of a loss already are
those of the whole mini-batch. AdamW is that of the other engines (`megatron_shards`), so that a checkpoint has neither
an engine nor a layout.
"""

from __future__ import annotations

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
from tether.models.language.expert_choice import ExpertChoice
from tether.models.language.fused_experts import Unfused, fused
from tether.models.layers import Packed, SequenceRanks
from tether.models.megatron import Layout, groups
from tether.models.megatron.dist_checkpoint import DistCheckpoint
from tether.models.megatron.head import StatesHead
from tether.models.megatron.layout import experts_of
from tether.models.megatron.model import MegatronModel, Role, build, describe
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.runtime.machine import deterministic_kernels
from tether.training.division import MiniBatch
from tether.training.engines.autograd import scattered, tensors_of
from tether.training.engines.copies import kept, kept_tree, with_weights
from tether.training.engines.megatron_shards import Shard, Shards, main_grad
from tether.training.engines.optimizer import OptimizerOptions, move_state
from tether.training.engines.ranks import RanksEngine, from_all
from tether.training.engines.shares import Writing, writers
from tether.training.protocol import Forward, LossSizes, LossSpec, Outputs, Updated, UpdatePlan
from tether.training.text.forward import PolicyForward, ValueForward
from tether.training.text.micro_batches import MicroBatching
from tether.training.text.packing import Experts, TokenRows, padding_row, token_rows
from tether.types import StateDict

MOMENTS = ("exp_avg", "exp_avg_sq")
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class MegatronOptions:
    """How ranks share a model, and where its parts lie: a matter of memory and speed, never of the result."""

    layout: Layout = field(default_factory=Layout)
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Entries of Megatron's TransformerConfig."""
    distributed_optimizer: bool = True
    """Replicas keep a part of the optimizer's state each."""
    weights_rest_on_host: bool = False
    """Weights are moved there while the model does not run."""
    gradients_rest: bool = False
    """Their memory is given back between updates."""
    optimizer_rests_on_host: bool = False
    """Its state is moved there between updates."""


class MegatronEngine(RanksEngine[Outputs]):
    """One rank's share of a model that is run and updated on many; every method is called on all ranks alike.

    `infer` and `learn` take the rows of this rank's replica, and give outputs on the ranks in `speakers`; `save` and
    `state_dict` gather on rank 0 what `LocalEngine` would write.

    Args:
        empty: policy, critic or reference of transformers, on the meta device: its class, config and names.
        micro: limits of a forward and backward pass of a replica.
        optimizer: None for a model that is only run.
        weights: directory of safetensors, checkpoint of Megatron, or tensors by the names of `empty`.
        device: of the rank.
        role: what stands on the backbone.
        options: how ranks share it.
        compute_dtype: dtype of forward and backward.
        rest: of `AutogradEngine`.
    """

    def __init__(
        self,
        empty: PreTrainedModel,
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        weights: Path | DistCheckpoint | Mapping[str, Tensor],
        device: torch.device,
        role: Role = "policy",
        options: MegatronOptions = MegatronOptions(),
        compute_dtype: torch.dtype = torch.float32,
        **rest: Any,
    ) -> None:
        self._empty, self._device, self._options = empty, device, options
        self._names = [name for name, _ in empty.named_parameters()]
        written = zip(self._names, writers(empty, dist.get_world_size()), strict=True)
        self._mine = {name for name, writer in written if writer == dist.get_rank()}
        self._buffers = {name for name, _ in empty.named_buffers()} & set(empty.state_dict())
        self._writing = Writing()
        groups.start(options.layout)
        trains = optimizer is not None
        self.megatron: MegatronModel = build(
            empty.config, options.layout, role=role, dtype=compute_dtype, overrides=options.overrides, trainable=trains
        )
        every = from_all(self.place())
        self.speakers = [[place == (replica, True) for place in every].index(True) for replica in range(_replicas())]
        config = self.megatron.config
        config.calculate_per_token_loss = True  # sums, where Megatron would average over micro-batches and replicas
        config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(chunks)
        self._of_routers = {name: getattr(config, name) for name in ROUTER_LOSSES if getattr(config, name)}
        self._chunks: list[Any] = self.megatron.chunks
        self.shards = Shards([], distributed=False)
        if trains:
            wide = compute_dtype in (torch.bfloat16, torch.float16)
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=wide)
            self._chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in self.megatron.chunks]
            pairs = [(p, _holders(p)) for chunk in self.megatron.chunks for p in chunk.parameters() if p.requires_grad]
            self.shards = Shards(pairs, distributed=options.distributed_optimizer)
        self._split = {p for chunk in self.megatron.chunks for p in split_parameters(chunk)}
        self._read(weights)
        masters = [master for master in self.shards.masters() if len(master)]
        modules: Any = nn.ModuleList(self._chunks)
        super().__init__(modules, masters, micro, optimizer, **rest)
        self._rest()

    def place(self) -> tuple[int, bool]:
        """The replica that this rank shares, and whether it is the one of its ranks that has the outputs."""
        within = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank())
        ends = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return parallel_state.get_data_parallel_rank(), bool(ends and within == (0, 0))

    def described(self) -> str:
        """Which layers and which attention run here, for the user."""
        return describe(self._options.layout)

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        """See `tether.training.protocol.Engine.infer`; nothing where this rank does not speak."""
        with self._here():
            return self._infer(batch, forward, self.infer_micro)  # type: ignore[return-value]

    def learn(
        self,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
        plan: UpdatePlan,
        parts: Sequence[MiniBatch],
        step: int,
    ) -> Updated[Outputs]:
        """See `AutogradEngine.learn`."""
        with self._here(training=True):
            return super().learn(batch, loss, plan, parts, step)

    # --- forward and backward ------------------------------------------------------------------------------------

    def _infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs], micro: MicroBatching) -> Outputs | None:
        self.model.eval()
        sizes = self._row_sizes(batch)

        def attempt(micro: MicroBatching) -> Outputs | None:
            places = [torch.tensor(rows) for rows in micro.split(sizes)]
            found: list[Outputs] = []

            def keep(number: int, _: TrainBatch, outputs: Outputs) -> Tensor:
                if number < len(places):
                    found.append(outputs)
                return torch.zeros((), device=self._device)

            with torch.no_grad(), deterministic_kernels():  # as in the update
                routed = self._pipeline(forward, [batch[rows] for rows in places], keep, forward_only=True)
            for outputs, experts in zip(found, routed, strict=False):
                outputs.routed_experts = experts  # type: ignore[attr-defined]  # where a policy's are recorded
            return scattered(found, places, len(batch)) if found else None

        return self._within_memory(attempt, micro, sizes)

    def _sum_gradients(
        self, mini: TrainBatch, loss: LossSpec[TrainBatch, Outputs], sizes: LossSizes, groups: list[list[int]]
    ) -> tuple[list[dict[str, Metric]], dict[str, Tensor], Outputs | None]:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        places = [torch.tensor(rows) for rows in groups]
        measured: list[dict[str, Metric]] = []
        shares: dict[str, Tensor] = {}
        outputs: list[Outputs] = []

        def lower(number: int, micro: TrainBatch, found: Outputs) -> Tensor:
            if number >= len(places):  # padding, which counts nothing
                return torch.stack([output.sum() for output in tensors_of(found)]).sum()
            term = loss.function(found, micro.to(self._device), sizes)
            outputs.append(found.detach())  # type: ignore[attr-defined]  # tensordict's classes
            measured.append(term.metrics)
            for name, share in term.shares.items():
                shares[name] = shares.get(name, 0.0) + share.detach().double()
            return term.loss

        self._pipeline(loss.forward, [mini[rows] for rows in places], lower, forward_only=False)
        self.shards.take_gradients()
        return measured, shares, scattered(outputs, places, len(mini)) if outputs else None

    def _pipeline(
        self,
        forward: Forward[TrainBatch, Outputs],
        micros: list[TrainBatch],
        on_outputs: Callable[[int, TrainBatch, Outputs], Tensor],
        *,
        forward_only: bool,
    ) -> list[Tensor]:
        """Send micro-batches through all stages, and backwards.

        Args:
            forward: what is computed of each.
            micros: those of this replica.
            on_outputs: called where the pipeline ends with the number of a micro-batch, its rows and outputs; gives the
                loss.
            forward_only: no gradients.

        Returns:
            Of each micro-batch the experts of its rows, where the forward records them.
        """
        experts: Experts = getattr(forward, "experts", "chosen")
        count, rounds = len(micros), self._rounds(len(micros))
        micros = [*micros, *(padding_row() for _ in range(rounds - count))]
        whole = [token_rows(micro, packed=True, experts=experts, merges=False) for micro in micros]
        if self._of_routers and not forward_only:
            self._average_router_losses(sum(rows.input_ids.numel() for rows in whole[:count]))
        laid = [on_device(self._part(rows), self._device) for rows in whole]
        records = experts == "recorded"
        choices = [None if experts == "chosen" else ExpertChoice(rows.experts, records=records) for rows in laid]

        def step(numbers: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            rows, micro = laid[number], micros[number]
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
            seq_length=1,  # each micro-batch has a length of its own, which travels before it
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [self._by_row(rows, choice) for rows, choice in zip(laid[:count], choices, strict=False) if records]

    def _by_row(self, rows: TokenRows, choice: ExpertChoice | None) -> Tensor:
        """[B, W, L, k] experts of rows, of which ranks have some layers, or some tokens, each."""
        assert choice is not None
        config, tokens = self.megatron.config, rows.input_ids.numel()
        here = rows.by_row(choice.recorded(tokens, config.num_layers, config.moe_router_topk, self._device))
        return SequenceRanks(parallel_state.get_model_parallel_group()).max(here)

    def _part(self, rows: TokenRows) -> TokenRows:
        """Of the tokens of a micro-batch those that this rank has."""
        assert isinstance(rows.layout, Packed)
        zig_zag = self.megatron.shared(rows.layout)
        return rows if zig_zag is None else rows.part(zig_zag.places, zig_zag, SequenceRanks(zig_zag.group))

    def _average_router_losses(self, tokens: int) -> None:
        """Divide the losses of routers, which are sums over tokens, by those of the mini-batch on all replicas."""
        total = torch.tensor(tokens, device=self._device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        for name, given in self._of_routers.items():
            averaged = [one / int(total) for one in given] if isinstance(given, list) else given / int(total)
            setattr(self.megatron.config, name, averaged)

    def _outputs(self, forward: Any, batch: TrainBatch, rows: TokenRows, states: Tensor) -> Any:
        """Outputs of a forward, from the states at the end of the pipeline."""
        if isinstance(forward, ValueForward):
            return forward.outputs(batch, rows, states, self.megatron.values)
        assert isinstance(forward, PolicyForward)
        selected = states.index_select(0, rows.predicts)
        log_probs = lambda *targets, **options: self.megatron.log_probs(selected, *targets, **options)  # noqa: E731
        return forward.outputs(batch, rows, log_probs, self._empty.config.vocab_size)

    def _rounds(self, count: int) -> int:
        most, stages = super()._rounds(count), self._options.layout.pipeline
        interleaved = len(self._chunks) > 1
        return -(-most // stages) * stages if interleaved else most

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
        """Whether this rank is the one whose copy of a parameter counts in the gradient's norm."""
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
        """The current weights in the dtype of the forward pass, each put together when its turn comes."""
        return WeightUpdate(self.version, self._exported())

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        with self._here():
            yield from self._gathered()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `export`, on all ranks in step, on rank 0 in the memory of the host."""
        first = dist.get_rank() == 0
        return ((name, value.cpu() if first else value) for name, value in self._exported())

    def begin_saving(self, part: Path, name: str) -> None:
        """Copy what this rank writes, and begin to write it; see `FsdpEngine.begin_saving`."""
        assert self._save, "a frozen model is not saved"
        save, model = self._save, self._model_of(self._named(_master, self._mine | self._buffers))
        moments, state = self._my_moments(), self._my_state()

        def write() -> None:
            save(model, part / name)
            save_moments(part / "moments.safetensors", moments)
            save_state(part / "state.pt", state)

        self._writing.begin(write)

    def writing(self) -> tuple[bool, BaseException | None]:
        """Whether all is written, and how that failed."""
        return self._writing.answer()

    def whole_model(self) -> PreTrainedModel | None:
        """See `RanksEngine.whole_model`."""
        named = self._named(_master, {*self._names, *self._buffers})
        return self._model_of(named) if dist.get_rank() == 0 else None

    def _model_of(self, named: Mapping[str, Tensor]) -> PreTrainedModel:
        model = with_weights(self._empty, [named.get(name, p) for name, p in self._empty.named_parameters()])
        for name in self._buffers:  # of which files have one, such as the correction of DeepSeek's routers
            model.get_buffer(name).copy_(named[name])
        return model

    def _my_moments(self) -> dict[int, dict[str, Tensor]]:
        """Those of the weights that this rank writes, by their numbers in the model of transformers."""
        assert self.optimizer
        if not any(from_all(bool(self.optimizer.state))):
            return {}
        moments = {moment: self._named(partial(self._moment, moment), self._mine) for moment in MOMENTS}
        mine = [(number, name) for number, name in enumerate(self._names) if name in self._mine]
        return {number: {moment: named[name] for moment, named in moments.items()} for number, name in mine}

    def _my_state(self) -> StateDict:
        """All state beside weights and moments."""
        assert self.optimizer
        numbers = list(range(len(self._names)))
        steps = from_all([moments["step"] for moments in list(self.optimizer.state.values())[:1]])
        (step,) = next(filter(None, steps), [None])
        groups = [group | {"params": numbers} for group in self.optimizer.state_dict()["param_groups"]]
        whole = {} if step is None else {number: {"step": step} for number in numbers}
        return kept_tree({"state": whole, "param_groups": groups, "version": self.version})

    def _moment(self, name: str, shard: Shard) -> Tensor:
        assert self.optimizer
        found: Tensor = self.optimizer.state[shard.master][name] if len(shard.master) else shard.master.detach()
        return found

    def _named(self, values: Callable[[Shard], Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Tensors as large as the model's, of a value for each number of each master; copies on the host of some."""
        with self._here():
            whole = self.shards.whole(lambda shard: values(shard).to(self._device))
            with self.shards.holding(whole):
                return {name: kept(value) for name, value in self._gathered() if name in names}

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        return fused(self.megatron.export(), experts_of(self._empty.config) or 0)

    def load_state(self, file: Path) -> int:
        """Take over this rank's parts of a saved state, of any engine and layout; returns `version`."""
        assert self.optimizer
        with reading(file, ANOTHER_CHECKPOINT):
            state = load_state(file, mapped=True)
            self.version = int(state["version"])
            self.optimizer.state.clear()
            if not state["state"]:
                return self.version
            for moment in MOMENTS:
                named = Unfused({name: state["state"][number][moment] for number, name in enumerate(self._names)})
                parts = [torch.empty_like(shard.parameter, dtype=shard.master.dtype) for shard in self.shards]
                with self.shards.holding(parts):
                    self.megatron.load(named, buffers=False)
                for shard, part in zip(self.shards, parts, strict=True):
                    if len(shard.master):
                        self.optimizer.state[shard.master][moment] = shard.part(part).clone()
            for moments in self.optimizer.state.values():
                moments["step"] = state["state"][0]["step"].clone()
            self._rest()
        return self.version

    def _read(self, weights: Path | DistCheckpoint | Mapping[str, Tensor]) -> None:
        """Load the weights, in the masters' format where there are masters."""
        wide = [
            torch.empty_like(shard.parameter, dtype=shard.master.dtype) if shard.is_copy else shard.parameter.data
            for shard in self.shards
        ]
        with self.shards.holding(wide):
            self.megatron.load(Unfused(weights) if isinstance(weights, Mapping) else weights)
        for shard, tensor in zip(self.shards, wide, strict=True):
            if shard.is_copy:
                shard.master.data.copy_(shard.part(tensor))
                shard.parameter.data.copy_(tensor)

    # --- where things lie ----------------------------------------------------------------------------------------

    @contextmanager
    def _here(self, *, training: bool = False) -> Iterator[None]:
        """Weights, and to train gradients and optimizer, on the device of the rank, where they rest elsewhere."""
        self._move(self._device, training=training)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        self._move(torch.device("cpu"), training=True, rest=True)

    def _move(self, device: torch.device, *, training: bool, rest: bool = False) -> None:
        options = self._options
        if options.weights_rest_on_host:
            for chunk in self.megatron.chunks:
                _move_frozen(chunk, device)
            self.shards.move(device, weights=True, copies=False)
        if not training:
            return
        if options.optimizer_rests_on_host and self.optimizer:
            self.shards.move(device, weights=False, copies=True)
            move_state(self.optimizer, device)
        if options.gradients_rest and self.optimizer:
            for chunk in self._chunks:
                for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                    buffer.grad_data.untyped_storage().resize_(0 if rest else buffer.grad_data.nbytes)


def _replicas() -> int:
    return int(parallel_state.get_data_parallel_world_size())


def _is_expert(parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def _holders(parameter: nn.Parameter) -> Any:
    """The ranks that hold the same parameter, and sum its gradients."""
    if _is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def split_parameters(chunk: nn.Module) -> Iterator[nn.Parameter]:
    """Those of which each tensor-parallel rank has a part; the others are the same on all."""
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | StatesHead):
            if module.weight is not None:
                yield module.weight
            if isinstance(module, ColumnParallelLinear) and module.bias is not None:
                yield module.bias


def _master(shard: Shard) -> Tensor:
    return shard.master.detach()


def _move_frozen(chunk: nn.Module, device: torch.device) -> None:
    for parameter in chunk.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(device)
