"""A model in shards on several ranks (FSDP2, ``torch.distributed.fsdp.fully_shard``), and how it is updated there.

Every rank has the same code run on its part of each mini-batch, in the same number of micro-batches. Weights, gradients
and optimizer are cut along their first dimension; a layer is put together while it runs. A gradient is summed over
ranks, never averaged: the denominators of a loss already are those of the whole mini-batch. With `compute_dtype` the
shards stay float32 while layers are gathered in the narrower dtype, and gradients are summed in float32 if not asked
otherwise.
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
from tether.models.language.packing_check import compare_packing, is_finite, refuse_broken
from tether.models.language.unread import give_memory, read_rows, sources_of
from tether.models.layers import SequenceRanks
from tether.runtime.disk import ANOTHER_CHECKPOINT, reading
from tether.training.division import MiniBatch
from tether.training.engines.autograd import tensors_of
from tether.training.engines.copies import empty_copy, kept, kept_tree, with_all_names, with_weights
from tether.training.engines.optimizer import OptimizerOptions, move_state
from tether.training.engines.ranks import RanksEngine, from_all
from tether.training.engines.shares import Writing, writers
from tether.training.protocol import Forward, LossSpec, Outputs, Updated, UpdatePlan
from tether.training.text.micro_batches import MicroBatching
from tether.types import StateDict


@dataclass(frozen=True)
class Sharding:
    """The ranks that share a model, and where its shards lie: a matter of memory and speed, never of the result."""

    shards: int = -1
    """Ranks among which the weights are cut; fewer than there are: so many copies of the model; -1: all (HSDP)."""
    sequence: int = 1
    """Ranks that share each row of packed tokens, and are given the same rows; they follow one another."""
    reshard: bool = True
    """A layer's whole weights are freed after its forward pass, and gathered again for the backward pass."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are summed; None: float32, or the model's where it computes in no narrower dtype."""
    on_host: bool = False
    """Weights, gradients and optimizer lie in the memory of the host, where the optimizer works."""
    weights_rest_on_host: bool = False
    """Weights are moved there while the model does not run."""
    optimizer_rests_on_host: bool = False
    """Its state is moved there between updates."""


class FsdpEngine(RanksEngine[Outputs]):
    """One rank's share of a model that is run and updated on many; every method is called on all ranks alike.

    `infer` and `learn` take the rows of this rank. Each rank writes whole weights of some layers and their part of the
    optimizer's state, so that a checkpoint has no number of ranks.

    Args:
        model: policy, critic or reference, whole; in float32 if it is trained. It is cut in place.
        micro: limits of a forward and backward pass of a rank.
        optimizer: None for a model that is only run.
        sharding: how ranks share it.
        compute_dtype: dtype of forward and backward; None: the model's.
        options: of `AutogradEngine`.
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
        self._empty = empty_copy(model)  # to put the whole model together again
        self._writers = writers(model, dist.get_world_size())
        self._writing = Writing()
        self._compute_dtype = compute_dtype or model.dtype
        self.sharding, self._device = sharding, model.device
        self.speakers = range(0, dist.get_world_size(), sharding.sequence)
        self._sequence = _sequence_ranks(model.device, sharding.sequence)
        sources = sources_of(model)
        self._root = _cut(model, device_mesh(model.device, sharding.shards), self._compute_dtype, sharding)
        self.bytes_read = read_rows(_rows_of(model, sources))
        super().__init__(model, [p for p in model.parameters() if p.requires_grad], micro, optimizer, **options)

        if any(sources):
            self._check()

    def _check(self) -> None:
        """As `prepare_for_packing`, for weights that only now are here."""
        shards = [(name, _shard(parameter)) for name, parameter in self.model.named_parameters()]
        broken = from_all([name for name, shard in shards if not is_finite(shard)])
        refuse_broken(self.model, sorted(set(chain.from_iterable(broken))))
        with torch.no_grad(), self._weights_here():
            self._root(lambda: compare_packing(self.model, self._compute_dtype))
            self._reshard()

    def frozen(self, micro: MicroBatching, during: Callable[[PreTrainedModel], Any]) -> FsdpEngine[Outputs]:
        """The same weights, run only, and in a context: with LoRA the reference is the policy with its adapter off."""
        twin = copy.copy(self)
        twin.micro = twin.infer_micro = micro
        twin.optimizer, twin.reference, twin._during = None, None, during
        return twin

    def infer(self, batch: TrainBatch, forward: Forward[TrainBatch, Outputs]) -> Outputs:
        """See `tether.training.protocol.Engine.infer`."""
        with self._weights_here():
            return super().infer(batch, forward)

    def learn(
        self,
        batch: TrainBatch,
        loss: LossSpec[TrainBatch, Outputs],
        plan: UpdatePlan,
        parts: Sequence[MiniBatch],
        step: int,
    ) -> Updated[Outputs]:
        """See `AutogradEngine.learn`."""
        assert self.optimizer
        with self._weights_here():
            rests = self.sharding.optimizer_rests_on_host and not self.sharding.on_host
            if rests:
                move_state(self.optimizer, self._device)
            updated = super().learn(batch, loss, plan, parts, step)
            if rests:
                move_state(self.optimizer, torch.device("cpu"))
        return updated

    @contextmanager
    def _weights_here(self) -> Iterator[None]:
        """The weights on the device of the rank, where they rest on the host."""
        rests = self.sharding.weights_rest_on_host and not self.sharding.on_host
        if rests:
            self._root.to(self._device)
        yield
        if rests:
            self._root.to("cpu")

    def export(self) -> WeightUpdate:
        """The current weights in the dtype of the forward pass, each put together when its turn comes."""
        return WeightUpdate(self.version, self._gathered())

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `export`, on all ranks in step, on rank 0 in the memory of the host."""
        return self._gathered(on_host=dist.get_rank() == 0)

    def _gathered(self, *, on_host: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value of each weight; tied ones are put together once, and follow each other."""
        for names, value in with_all_names(self.model):
            found = _whole(value.to(self._compute_dtype) if isinstance(value, DTensor) else value)
            found = found.cpu() if on_host else found
            yield from ((name, found) for name in names)

    def begin_saving(self, part: Path, name: str) -> None:
        """Copy what this rank writes, and begin to write it; `writing` says when that is done.

        Args:
            part: of this rank: for the folder `name` with its part of the model, and its part of the training state.
            name: of the role.
        """
        assert self._save, "a frozen model is not saved"
        model, (state, moments) = self._my_model(), self._my_state()
        save = self._save

        def write() -> None:
            save(model, part / name)
            save_moments(part / "moments.safetensors", moments)
            save_state(part / "state.pt", state)

        self._writing.begin(write)

    def writing(self) -> tuple[bool, BaseException | None]:
        """Whether all is written, and how that failed."""
        return self._writing.answer()

    def _my_model(self) -> PreTrainedModel:
        """A copy of the weights that this rank writes, on the CPU; the others are on the meta device.

        Adapters are whole on rank 0, which writes them a second time by themselves.
        """
        rank, adapts = dist.get_rank(), not all(p.requires_grad for p in self.model.parameters())
        weights = []
        for parameter, writer in zip(self.model.parameters(), self._writers, strict=True):
            whole = _whole(parameter.detach())
            mine = rank == writer or (rank == 0 and adapts and parameter.requires_grad)
            weights.append(kept(whole) if mine else whole.to("meta"))
        return with_weights(self._empty, weights)

    def _my_state(self) -> tuple[StateDict, dict[int, dict[str, Tensor]]]:
        """All state beside the weights but for the moments; and those of the weights that this rank writes."""
        assert self.optimizer
        state, rank = self.optimizer.state_dict(), dist.get_rank()
        writer = dict(zip(map(id, self.model.parameters()), self._writers, strict=True))
        steps, mine = {}, {}
        for number, moments in state["state"].items():
            whole = {name: _whole(value) for name, value in moments.items() if isinstance(value, DTensor)}
            steps[number] = {name: value for name, value in moments.items() if name not in whole}
            if writer[id(self.trained[number])] == rank:
                mine[number] = {name: kept(value) for name, value in whole.items()}
        return kept_tree(state | {"state": steps, "version": self.version}), mine

    def load_state(self, file: Path) -> int:
        """Take over this rank's shards of a saved state, of any engine and number of ranks; returns `version`."""
        assert self.optimizer
        with reading(file, ANOTHER_CHECKPOINT):
            state = load_state(file, mapped=True)
            self.version = int(state["version"])
            shards = {
                number: {name: _shard_of(value, self.trained[number]) for name, value in moments.items()}
                for number, moments in state["state"].items()
            }
            self.optimizer.load_state_dict(state | {"state": shards})
        return self.version

    def _run(self, forward: Forward[TrainBatch, Outputs], micro: TrainBatch) -> Outputs:
        outputs: Outputs
        shared = [self._sequence] if self._sequence else []
        outputs, _ = self._root(lambda: forward(self.model, micro, self.reference, *shared))
        if not torch.is_grad_enabled():
            self._reshard()  # else a forward pass after the optimizer's step could find the weights before it
        return outputs

    def _reshard(self) -> None:
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip_gradients(self, limit: float) -> float:
        return float(_whole(torch.nn.utils.clip_grad_norm_(self.trained, limit)))

    def whole_model(self) -> PreTrainedModel | None:
        """See `RanksEngine.whole_model`."""
        weights = [_on_first_rank(parameter) for parameter in self.model.parameters()]
        return with_weights(self._empty, weights) if dist.get_rank() == 0 else None


def device_mesh(device: torch.device, shards: int = -1) -> DeviceMesh:
    """All ranks of the process group; with `shards` (``fsdp_size``) fewer than ranks, as many copies of the model as
    that leaves, each cut among `shards` ranks.
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
    """Puts together what is outside of the layers while a forward runs, which calls parts of the model by itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """The outputs, if any, and those of their tensors on which the backward pass begins; these may be no views."""
        outputs = run()
        if outputs is None:
            return None, []
        outputs = outputs.clone()
        return outputs, tensors_of(outputs)


def _cut(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, sharding: Sharding) -> Any:
    """Cut a model in place, layer by layer; returns the root, which runs forward passes."""
    reduce = sharding.reduce_dtype
    wide = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    narrow = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce or torch.float32, cast_forward_inputs=False)
    policy = wide if dtype == model.dtype else narrow
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def cut(module: nn.Module, mp_policy: MixedPrecisionPolicy) -> None:
        give_memory(module)  # of one layer at a time
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
            cut(module, mp_policy=policy)
    if model.get_output_embeddings() is None:  # a critic, whose head stays wide: bfloat16 would round its values
        cut(model.base_model, mp_policy=policy)
        policy = wide
    root = _Root(model)
    cut(root, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply while it sums
    return root


def _rows_of(
    model: PreTrainedModel, sources: Sequence[tuple[Path, str] | None]
) -> Iterator[tuple[tuple[Path, str], int, Tensor]]:
    """For `read_rows`: the shards of this rank that are to be read."""
    for parameter, source in zip(model.parameters(), sources, strict=True):
        if source is not None:
            assert isinstance(parameter, DTensor)
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            yield source, offset[0], _shard(parameter)


def _shard(parameter: Tensor) -> Tensor:
    found: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def _whole(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    here: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]  # it may rest on the host
    return here.full_tensor()


def _on_first_rank(value: Tensor) -> Tensor:
    """The whole tensor in the memory of rank 0; nothing of use on the others."""
    whole = _whole(value.detach())
    return whole.cpu() if dist.get_rank() == 0 else value


def _shard_of(value: Any, parameter: nn.Parameter) -> Any:
    """This rank's part of a tensor that is as large as a parameter; anything else as it is."""
    assert isinstance(parameter, DTensor)
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
