"""A model sharded over several ranks (FSDP2, ``torch.distributed.fsdp.fully_shard``), and its updates.

Every rank runs the same code on its share of each mini-batch, in the same number of micro-batches. Weights, gradients
and optimizer state are sharded along their first dimension; a layer is gathered while it runs. Gradients are summed
over ranks, never averaged, since the denominators of a loss are those of the whole mini-batch. With `compute_dtype` the
shards stay float32 while layers are gathered in the narrower dtype, and gradients are summed in float32 by default.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tether.batch import TrainBatch, WeightUpdate
from tether.checkpoints import load_state, save_moments, save_state
from tether.loop.engine import (
    Forward,
    LossSpec,
    OptimizerOptions,
    Outputs,
    UpdatePlan,
    UpdateResult,
    load_adamw,
    move_state,
)
from tether.loop.rank_exchange import BackgroundWriter, gather_objects
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.text.learning.engines.copies import empty_copy, to_cpu, tree_to_cpu, with_all_names, with_weights
from tether.text.learning.engines.local import tensors_of
from tether.text.learning.engines.ranks import RanksEngine
from tether.text.learning.engines.shares import writers
from tether.text.learning.packing import MicroBatching, MiniBatch
from tether.text.models.lazy_weights import allocate_weights, read_rows, sources_of
from tether.text.models.packing_check import compare_packing, is_finite, refuse_non_finite
from tether.text.models.ulysses import SequenceRanks
from tether.types import StateDict


@dataclass(frozen=True)
class Sharding:
    """How ranks share a model, and which devices store its shards; this affects memory and speed, never the result."""

    shards: int = -1
    """Number of ranks that share a copy of the model; fewer than all means several copies (HSDP); -1 means all."""
    sequence: int = 1
    """Number of consecutive ranks that get the same rows of packed tokens and split the tokens of each."""
    reshard: bool = True
    """Whether a layer's gathered weights are freed after its forward pass and gathered again for the backward pass."""
    reduce_dtype: torch.dtype | None = None
    """Dtype for summing gradients; None means float32, or the model's dtype if it does not compute in a narrower
    one."""
    on_host: bool = False
    """Whether weights, gradients and optimizer state are in CPU memory, where the optimizer runs."""
    offload_weights: bool = False
    """Whether weights are moved to the CPU while the model does not run."""
    offload_optimizer: bool = False
    """Whether optimizer state is moved to the CPU between updates."""


class FsdpEngine(RanksEngine[Outputs]):
    """The engine of one rank for a model that is sharded over many; every method is collective.

    `infer` and `learn` take the rows of this rank. In a checkpoint each rank writes complete weights of some layers and
    their optimizer state, so that the files do not depend on the number of ranks.

    Args:
        model: a whole policy, critic or reference, in float32 if it is trained. It is sharded in place.
        micro: limits of a rank's forward and backward pass.
        optimizer: None for a model that is not trained.
        sharding: how the ranks share the model.
        compute_dtype: dtype of forward and backward; the default is the model's.
        options: further arguments of `AutogradEngine`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro: MicroBatching,
        optimizer: OptimizerOptions | None = None,
        *,
        sharding: Sharding = Sharding(),
        compute_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self._empty = empty_copy(model)  # for rebuilding the whole model when it is gathered
        self._writers = writers(model, dist.get_world_size())
        self._writing = BackgroundWriter()
        self._compute_dtype = compute_dtype or model.dtype
        self.sharding, self._device = sharding, model.device
        self.output_ranks = range(0, dist.get_world_size(), sharding.sequence)
        self._sequence = _sequence_ranks(model.device, sharding.sequence)
        sources = sources_of(model)
        self._root = _shard_model(model, device_mesh(model.device, sharding.shards), self._compute_dtype, sharding)
        self.bytes_read = read_rows(_rows_of(model, sources))
        super().__init__(model, [p for p in model.parameters() if p.requires_grad], micro, optimizer, **options)

        if any(sources):
            self._check()

    def _check(self) -> None:
        """Check the weights as `prepare_for_packing` does; this was not possible before they were loaded."""
        shards = [(name, _local_tensor(parameter)) for name, parameter in self.model.named_parameters()]
        broken = gather_objects([name for name, shard in shards if not is_finite(shard)])
        refuse_non_finite(self.model, sorted(set(chain.from_iterable(broken))))
        with torch.no_grad(), self._weights_on_device():
            self._root(lambda: compare_packing(self.model, self._compute_dtype))
            self._reshard()

    def frozen(self, micro: MicroBatching, inference_context: Callable[[PreTrainedModel], Any]) -> FsdpEngine[Outputs]:
        """Return an engine with the same weights that is not trained: with LoRA the reference is the policy without its
        adapter."""
        twin = copy.copy(self)
        twin.micro = twin.infer_micro = micro
        twin.optimizer, twin.reference, twin._inference_context = None, None, inference_context
        return twin

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        with self._weights_on_device():
            return super().infer(batch, forward)

    def learn(
        self,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
        plan: UpdatePlan,
        minis: Sequence[MiniBatch],
        step: int,
    ) -> UpdateResult[Outputs]:
        assert self.optimizer
        with self._weights_on_device():
            rests = self.sharding.offload_optimizer and not self.sharding.on_host
            if rests:
                move_state(self.optimizer, self._device)
            updated = super().learn(batch, loss, plan, minis, step)
            if rests:
                move_state(self.optimizer, torch.device("cpu"))
        return updated

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Move the weights to the rank's device within the context, if they are stored on the CPU."""
        rests = self.sharding.offload_weights and not self.sharding.on_host
        if rests:
            self._root.to(self._device)
        yield
        if rests:
            self._root.to("cpu")

    def export(self) -> WeightUpdate:
        """Return the current weights in the dtype of the forward pass, gathered one at a time."""
        return WeightUpdate(self.version, self._gathered())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `export` on the CPU of rank 0; all ranks must iterate together."""
        return self._gathered(on_host=dist.get_rank() == 0)

    def _gathered(self, *, on_host: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole value of each weight; tied weights are gathered once and are adjacent."""
        for names, value in with_all_names(self.model):
            tensor = _full_tensor(value.to(self._compute_dtype) if isinstance(value, DTensor) else value)
            tensor = tensor.cpu() if on_host else tensor
            yield from ((name, tensor) for name in names)

    def begin_saving(self, share: Path, name: str, with_state: bool = True) -> None:
        """Copy what this rank has to write and start writing it; `writing` returns whether it is done.

        Args:
            share: this rank's folder, for its shard of the model in the folder `name`, and of the training state.
            name: the name of the role.
            with_state: whether to save the training state, too.
        """
        assert self._save, "a frozen model is not saved"
        save, model = self._save, self._model_to_write()
        state, moments = self._state_to_write() if with_state else ({}, {})

        def write() -> None:
            save(model, share / name)
            if with_state:
                save_moments(share / "moments.safetensors", moments)
                save_state(share / "state.pt", state)

        self._writing.begin(write)

    def writing(self) -> tuple[bool, BaseException | None]:
        return self._writing.answer()

    def _model_to_write(self) -> PreTrainedModel:
        """Copy the weights that this rank writes to the CPU; all others are on the meta device.

        Rank 0 has all adapters, because it also writes them separately.
        """
        rank, adapts = dist.get_rank(), not all(p.requires_grad for p in self.model.parameters())
        weights = []
        for parameter, writer in zip(self.model.parameters(), self._writers, strict=True):
            tensor = _full_tensor(parameter.detach())
            mine = rank == writer or (rank == 0 and adapts and parameter.requires_grad)
            weights.append(to_cpu(tensor) if mine else tensor.to("meta"))
        return with_weights(self._empty, weights)

    def _state_to_write(self) -> tuple[StateDict, dict[int, dict[str, Tensor]]]:
        """Return all training state except the moments, and the moments of the weights that this rank writes."""
        assert self.optimizer
        state, rank = self.optimizer.state_dict(), dist.get_rank()
        writer = dict(zip(map(id, self.model.parameters()), self._writers, strict=True))
        steps, mine = {}, {}
        for number, moments in state["state"].items():
            sharded = {name: _full_tensor(value) for name, value in moments.items() if isinstance(value, DTensor)}
            steps[number] = {name: value for name, value in moments.items() if name not in sharded}
            if writer[id(self.trained[number])] == rank:
                mine[number] = {name: to_cpu(value) for name, value in sharded.items()}
        return tree_to_cpu(state | {"state": steps, "version": self.version}), mine

    def load_state(self, file: Path) -> int:
        """Load this rank's shards of a state, saved by any engine on any number of ranks, and return its `version`."""
        assert self.optimizer
        with reading(file, ANOTHER_CHECKPOINT):
            state = load_state(file, mapped=True)
            self.version = int(state["version"])
            shards = {
                number: {name: _shard_like(value, self.trained[number]) for name, value in moments.items()}
                for number, moments in state["state"].items()
            }
            load_adamw(self.optimizer, state | {"state": shards})
        return self.version

    def _run(self, forward: Forward[TrainBatch, Outputs], micro: TrainBatch) -> Outputs:
        outputs: Outputs
        shared = [self._sequence] if self._sequence else []
        outputs, _ = self._root(lambda: forward(self.model, micro, self.reference, *shared))
        if not torch.is_grad_enabled():
            self._reshard()  # otherwise a forward pass after an optimizer step could use the old weights
        return outputs

    def _reshard(self) -> None:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip_gradients(self, limit: float) -> float:
        return float(_full_tensor(torch.nn.utils.clip_grad_norm_(self.trained, limit)))

    def whole_model(self) -> PreTrainedModel | None:
        weights = [_on_first_rank(parameter) for parameter in self.model.parameters()]
        return with_weights(self._empty, weights) if dist.get_rank() == 0 else None


def device_mesh(device: torch.device, shards: int = -1) -> DeviceMesh:
    """Create a mesh of all ranks of the process group.

    With `shards` (``fsdp_size``) fewer than ranks, the model has several copies, each sharded over `shards` ranks.
    """
    ranks = dist.get_world_size()
    if not 0 < shards < ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def _sequence_ranks(device: torch.device, sequence: int) -> SequenceRanks | None:
    if sequence == 1:
        return None
    groups = (dist.get_world_size() // sequence, sequence)
    mesh = init_device_mesh(device.type, groups, mesh_dim_names=("rows", "sequence"))
    return SequenceRanks(mesh.get_group("sequence"))


class _Root(nn.Module):
    """A root module that gathers the weights outside of the layers, for forward passes that call components of the
    model directly."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """Return the outputs, and those of their tensors where the backward pass starts, which must not be views."""
        outputs = run()
        if outputs is None:
            return None, []
        outputs = outputs.clone()
        return outputs, tensors_of(outputs)


def _shard_model(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, sharding: Sharding) -> Any:
    """Shard a model in place, layer by layer, and return the root, which runs forward passes."""
    reduce = sharding.reduce_dtype
    wide = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce or torch.float32, cast_forward_inputs=False)
    policy = wide if dtype == model.dtype else narrow
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(module: nn.Module, mp_policy: MixedPrecisionPolicy) -> None:
        allocate_weights(module)  # one layer at a time
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=sharding.reshard,
            mp_policy=mp_policy,
            offload_policy=on_host if sharding.on_host else OffloadPolicy(),
        )

    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            shard(module, mp_policy=policy)
    if model.get_output_embeddings() is None:  # a critic, whose head keeps its dtype: bfloat16 would round its values
        shard(model.base_model, mp_policy=policy)
        policy = wide
    root = _Root(model)
    shard(root, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale while it sums
    return root


def _rows_of(
    model: PreTrainedModel, sources: Sequence[tuple[Path, str] | None]
) -> Iterator[tuple[tuple[Path, str], int, Tensor]]:
    """Yield the shards of this rank, for `read_rows` to read."""
    for parameter, source in zip(model.parameters(), sources, strict=True):
        if source is not None:
            assert isinstance(parameter, DTensor)
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            yield source, offset[0], _local_tensor(parameter)


def _local_tensor(parameter: Tensor) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def _full_tensor(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    on_device: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]  # it may be on the CPU
    return on_device.full_tensor()


def _on_first_rank(value: Tensor) -> Tensor:
    """Return the whole tensor on the CPU of rank 0; other ranks must not use the result."""
    tensor = _full_tensor(value.detach())
    return tensor.cpu() if dist.get_rank() == 0 else value


def _shard_like(value: Any, parameter: nn.Parameter) -> Any:
    """Return this rank's shard of a tensor with the parameter's shape; other values are unchanged."""
    assert isinstance(parameter, DTensor)
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
