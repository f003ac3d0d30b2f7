"""What a run needs to start vLLM's servers and to send them requests."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tether.config import ActorRolloutRefConfig
from tether.text.servers import ServedPolicy
from tether.text.servers.kind import ServerKind, ServerStart
from tether.text.servers.vllm_api import Adapters, Vllm, launch_of


def _sends_adapters(settings: ActorRolloutRefConfig) -> bool:
    model, in_files = settings.model, settings.rollout.weight_transfer not in ("distributed", "nccl")
    return model.lora_rank > 0 and not model.lora.merge and in_files


def _adapters(settings: ActorRolloutRefConfig) -> Adapters | None:
    model = settings.model
    return Adapters(model.lora_rank, model.lora_alpha) if _sends_adapters(settings) else None


def _api(settings: ActorRolloutRefConfig, policy: PreTrainedConfig, served: ServedPolicy) -> Vllm:
    rollout = settings.rollout
    return Vllm(served, _adapters(settings), rollout.enable_rollout_routing_replay, rollout.weight_transfer)


def _options(settings: ActorRolloutRefConfig, start: ServerStart) -> dict[str, object]:
    rollout, adapters = settings.rollout, _adapters(settings)
    return {
        "model": start.folder,
        "dtype": rollout.dtype,
        "max_model_len": start.max_length,
        "max_logprobs": max(rollout.top_k, 1),
        "max_num_seqs": rollout.max_num_seqs,
        "seed": 0,  # each request has its own seed
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "load_format": start.load_format,
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay or None,
        "enable_sleep_mode": (rollout.free_cache_engine and start.on_gpu) or None,
        **(adapters.options() if adapters else {}),
    }


def _cpu_environment(tensor_parallel: int) -> dict[str, str]:
    one_core_per_rank = "|".join(map(str, range(tensor_parallel)))
    bind = "nobind" if tensor_parallel == 1 else one_core_per_rank
    return {"VLLM_CPU_OMP_THREADS_BIND": bind, "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


KIND = ServerKind(_api, launch_of, _options, _cpu_environment, _sends_adapters)
