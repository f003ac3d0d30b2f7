"""The `ServerKind` of SGLang: starts its servers, and creates their clients."""

from __future__ import annotations

from transformers import PreTrainedConfig

from tether.config import ActorRolloutRefConfig
from tether.integrations.sglang.api import SGLang, launch_of
from tether.text.models.expert_choice import experts_per_token
from tether.text.servers import ServedPolicy
from tether.text.servers.kind import ServerKind, ServerStart


def _api(settings: ActorRolloutRefConfig, policy: PreTrainedConfig, served: ServedPolicy) -> SGLang:
    rollout, each = settings.rollout, experts_per_token(policy)
    experts = (policy.get_text_config().num_hidden_layers, each) if each else None
    return SGLang(served, rollout.weight_transfer, experts, rollout.enable_rollout_routing_replay)


def _options(settings: ActorRolloutRefConfig, start: ServerStart) -> dict[str, object]:
    rollout = settings.rollout
    sleeps = rollout.free_cache_engine and start.on_gpu
    return {
        "model_path": start.folder,
        "dtype": rollout.dtype,
        "device": "cuda" if start.on_gpu else "cpu",
        "context_length": start.max_length,
        "max_running_requests": rollout.max_num_seqs,
        "tp_size": rollout.tensor_model_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "disable_cuda_graph": rollout.enforce_eager,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "load_format": start.load_format,
        "sampling_mask_max_tokens": max(2 * rollout.top_k, 4096),  # room for ties at the threshold
        "enable_memory_saver": sleeps,
        "enable_weights_cpu_backup": sleeps,
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay,
    }


def _cpu_environment(tensor_parallel: int) -> dict[str, str]:
    return {"SGLANG_USE_CPU_ENGINE": "1"}


def _sends_adapters(settings: ActorRolloutRefConfig) -> bool:
    return False


KIND = ServerKind(_api, launch_of, _options, _cpu_environment, _sends_adapters)
