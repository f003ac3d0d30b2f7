"""Runs inside a vLLM server's processes: loads the trainer's weights and works around failures on CPUs.

It may import the standard library, vLLM and vLLM's dependencies only.

Passing `Extension` as ``--worker-extension-cls`` imports this module in every worker, which registers the backend
``tether`` of vLLM's weight transfer. Each call of ``/update_weights`` describes the location of some tensors under
their names in transformers; every tensor-parallel worker reads the full tensors and selects its shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tether_buffers import Buffer, Placements, gpus
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
    """A process group to join with `Buffer.join`."""

    address: str
    port: int
    ranks: int
    group: str
    backend: str
    timeout: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """The location of some tensors: a buffer, a broadcast, or a file."""

    tensors: Placements = field(default_factory=list)
    """Placements of tensors in a buffer."""
    last: bool = True
    """Whether the bytes stay unchanged until the end of the update."""
    buffer: dict[str, Any] | None = None
    """Handle of a buffer of the trainer, for `Buffer.open`."""
    size: int | None = None
    """Number of broadcast bytes."""
    path: str | None = None
    """Path of a safetensors file, which needs no placements."""


class TetherTransferEngine(WeightTransferEngine[Init, Update]):
    """Loads updates and requires that each of them has every parameter of the model."""

    init_info_cls, update_info_cls = Init, Update

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received = Buffer()

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join the process group of an update."""
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        info = init_info
        self.received.join(info.address, info.port, rank, info.ranks, info.group, info.backend, info.timeout)

    def start_weight_update(self) -> None:
        """Start an update: the layers collect their weights."""
        self.expected = {unwrapped(name) for name, _ in self.model.named_parameters()}
        self.loaded: set[str] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors; the base class would synchronize an accelerator, which a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Load some tensors.

        Raises:
            ValueError: the model lacks one of them, or they cannot be read.
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
            self.copy_pending_weights()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors into the layers."""
        self.loaded |= {unwrapped(name) for name in self.model.load_weights(tensors)}

    def copy_pending_weights(self) -> None:
        """Copy the weights of incomplete layers, because the next bytes will overwrite the buffer."""
        for layer in self.model.modules():
            for _, pending in get_layerwise_info(layer).loaded_weights:
                for name, value in pending.arguments.items():
                    if self.received.holds(value):
                        pending.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        """Finish an update: process the remaining layers, and pack a tied output head.

        Raises:
            ValueError: a parameter of the model was not sent.
        """
        self.received.leave()
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)
        if missing := sorted(self.expected - self.loaded):
            raise ValueError(f"tether sent no weights for {len(missing)} parameters: {', '.join(missing[:4])}")

    def shutdown(self) -> None:
        """Leave the process group."""
        self.received.leave()


def unwrapped(name: str) -> str:
    """Return the name of a weight in a checkpoint, also for a layer that supports adapters (``--enable-lora``)."""
    return name.replace(".base_layer.", ".")


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack an output head that shares the weight of the embeddings.

    On a CPU vLLM 0.32 has a packed copy of its initial weights, which reloading does not update.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def give_up_update(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Abandon an unfinished update: each layer has its previous weights, or the new ones if it received all of them."""
    infos = [info for info in map(get_layerwise_info, model.modules()) if info.can_load()]
    for info in infos:
        info.load_numel = 0
        info.loaded_weights.clear()
    if infos:
        finalize_layerwise_reload(model, model_config)


class Extension:
    """Methods that are added to vLLM's workers for ``/collective_rpc``."""

    def about(self, sizes: Sequence[str] = ()) -> dict[str, object]:
        """Return the type of the served model, these sizes of its configuration, its dtype, the maximum rank of
        adapters, and whether it returns experts.
        """
        config, lora = self.model_config, self.vllm_config.lora_config  # type: ignore[attr-defined]
        supports_lora = lora is not None and envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING
        rank = lora.max_lora_rank if supports_lora else 0
        returns_experts = self.vllm_config.aux_output_config.enable_return_routed_experts  # type: ignore[attr-defined]
        text, dtype = config.hf_text_config, str(config.dtype).removeprefix("torch.")
        known_sizes = {name: size for name in sizes if isinstance(size := getattr(text, name, None), int)}
        return {
            "model_type": text.model_type,
            "vocabulary": config.get_vocab_size(),
            "sizes": known_sizes,
            "dtype": dtype,
            "rank": rank,
            "experts": returns_experts,
        }

    def workers(self) -> dict[str, object]:
        """Return the number of workers, the GPUs that this worker sees, and its own GPU."""
        config, seen = self.vllm_config.parallel_config, gpus()  # type: ignore[attr-defined]
        own_gpu = seen[torch.cuda.current_device()] if seen and not current_platform.is_cpu() else None
        return {"count": config.world_size * config.data_parallel_size, "gpus": seen, "own": own_gpu}

    @torch.no_grad()
    def give_up_update(self) -> None:
        """Abandon an update that a killed run left open: vLLM starts no update while another one is open."""
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            give_up_update(self.model_runner.model, self.model_config)  # type: ignore[attr-defined]
        self._weight_update_active = False

    def pack_head(self) -> None:
        """Pack the output head as `pack_tied_head` does."""
        pack_tied_head(self.model_runner.model)  # type: ignore[attr-defined]


def sample_after_complete_prompts_only(runner: type[GPUModelRunner]) -> None:
    """Prevent a seeded request from sampling while its prompt is computed in chunks.

    vLLM 0.32 samples and then restores the generator, which is not supported on a CPU ("CPU Generator does not use
    offset") and ends the server.
    """
    sample = runner.sample_tokens

    def sample_tokens(self: GPUModelRunner, *args: object, **kwargs: object) -> object:
        batch = self.input_batch
        incomplete = map(int, np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0])
        removed = {row: batch.generators.pop(row) for row in incomplete if row in batch.generators}
        try:
            return sample(self, *args, **kwargs)
        finally:
            batch.generators.update(removed)

    runner.sample_tokens = sample_tokens


if current_platform.is_cpu():
    sample_after_complete_prompts_only(GPUModelRunner)
if "tether" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("tether", TetherTransferEngine)
