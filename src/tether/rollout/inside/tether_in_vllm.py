"""Inside a vLLM server's processes: takes over the trainer's weights, and puts right what fails on CPUs.

It may import the standard library, vLLM and what vLLM needs.

Naming `Extension` as ``--worker-extension-cls`` imports this module in every worker, which registers the backend
``tether`` of vLLM's weight transfer. Each call of ``/update_weights`` says where some tensors are, as transformers
names them; every tensor-parallel worker reads the whole of each and keeps its share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tether_buffers import Buffer, Placed, gpus
from vllm import envs
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@dataclass
class Init(WeightTransferInitInfo):
    """A process group that is to be joined; see `Buffer.join`."""

    address: str
    port: int
    ranks: int
    group: str
    backend: str
    within: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where some tensors are, in one of three places."""

    tensors: Placed = field(default_factory=list)
    """Places of tensors in a buffer."""
    last: bool = True
    """Nothing is written over them before the update ends."""
    buffer: dict[str, Any] | None = None
    """That the trainer has written; see `Buffer.open`."""
    size: int | None = None
    """Bytes that it broadcasts."""
    path: str | None = None
    """Of a safetensors file, which needs no places."""


class Engine(WeightTransferEngine[Init, Update]):
    """Loads what an update brings, and demands that it brings every parameter of the model."""

    init_info_cls, update_info_cls = Init, Update

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.received = Buffer()

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join the process group of an update."""
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        info = init_info
        self.received.join(info.address, info.port, rank, info.ranks, info.group, info.backend, info.within)

    def start_weight_update(self) -> None:
        """Begin: the layers collect their weights."""
        self.expected = {unwrapped(name) for name, _ in self.model.named_parameters()}
        self.loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors; the base class would synchronize an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Load some tensors.

        Raises:
            ValueError: there is one that the model has not, or they cannot be reached.
        """
        if update_info.path is not None:
            with safe_open(update_info.path, "pt") as file:
                self.load((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            return
        if update_info.buffer is not None:
            self.received.open(update_info.buffer)
        else:
            assert update_info.size is not None
            self.received.receive(update_info.size)
        self.load(self.received.tensors(update_info.tensors).items())
        if not update_info.last:
            self.keep_what_waits()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand tensors to the layers."""
        self.loaded |= {unwrapped(name) for name in self.model.load_weights(tensors)}

    def keep_what_waits(self) -> None:
        """Copy what a layer keeps that waits for the rest of its weights, as the next ones are written over it."""
        for layer in self.model.modules():
            for _, given in get_layerwise_info(layer).loaded_weights:
                for name, value in given.arguments.items():
                    if self.received.holds(value):
                        given.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        """End: pack what is left to pack.

        Raises:
            ValueError: a parameter of the model did not come.
        """
        self.received.leave()
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)
        if missing := sorted(self.expected - self.loaded):
            raise ValueError(f"tether sent no weights for {len(missing)} parameters: {', '.join(missing[:4])}")

    def shutdown(self) -> None:
        """Leave a process group."""
        self.received.leave()


def unwrapped(name: str) -> str:
    """The name of a weight in a checkpoint, also of a layer that takes adapters (``--enable-lora``)."""
    return name.replace(".base_layer.", ".")


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack an output head that shares the embeddings' weight: on a CPU vLLM 0.32 keeps a packed copy of the first
    weights in it, which reloading does not renew.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def give_up_update(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Take back an update that was not finished: a layer has the weights of before, or the new ones if it got all."""
    infos = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
    for info in infos:
        info.load_numel = 0
        info.loaded_weights.clear()
    if infos:
        finalize_layerwise_reload(model, model_config)


class Extension:
    """Methods that ``/collective_rpc`` finds in a worker besides its own."""

    def about(self, sizes: Sequence[str] = ()) -> dict[str, object]:
        """The model that is served, these sizes of its configuration, its number format, the largest rank of adapters
        that it takes, and whether it tells experts.
        """
        config, lora = self.model_config, self.vllm_config.lora_config  # type: ignore[attr-defined]
        takes = lora is not None and envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
        rank = lora.max_lora_rank if takes else 0
        tells = self.vllm_config.aux_output_config.enable_return_routed_experts  # type: ignore[attr-defined]
        text, dtype = config.hf_text_config, str(config.dtype).removeprefix("torch.")
        told = {name: size for name in sizes if isinstance(size := getattr(text, name, None), int)}
        return {"model_type": text.model_type, "vocabulary": config.get_vocab_size(), "sizes": told, "dtype": dtype,
                "rank": rank, "experts": tells}  # fmt: skip

    def workers(self) -> dict[str, object]:
        """The number of workers, the GPUs that this one sees, and its own."""
        config, seen = self.vllm_config.parallel_config, gpus()  # type: ignore[attr-defined]
        own = seen[torch.cuda.current_device()] if seen and not current_platform.is_cpu() else None
        return {"count": config.world_size * config.data_parallel_size, "gpus": seen, "own": own}

    @torch.no_grad()
    def give_up_update(self) -> None:
        """See `give_up_update`; vLLM begins no update while another one is open, as a run that was killed leaves it."""
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            give_up_update(self.model_runner.model, self.model_config)  # type: ignore[attr-defined]
        self._weight_update_active = False

    def pack_head(self) -> None:
        """See `pack_tied_head`."""
        pack_tied_head(self.model_runner.model)  # type: ignore[attr-defined]


def draw_for_whole_prompts_only(runner: type[GPUModelRunner]) -> None:
    """Let a seeded request draw nothing while its prompt is computed in parts: vLLM 0.32 draws and then turns the
    generator back, which one of a CPU refuses ("CPU Generator does not use offset"), and the whole server ends.
    """
    sample = runner.sample_tokens

    def sample_tokens(self: GPUModelRunner, *given: object, **named: object) -> object:
        batch = self.input_batch
        partly = map(int, np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0])
        kept = {row: batch.generators.pop(row) for row in partly if row in batch.generators}
        try:
            return sample(self, *given, **named)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_tokens


if current_platform.is_cpu():
    draw_for_whole_prompts_only(GPUModelRunner)
if "tether" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("tether", Engine)
