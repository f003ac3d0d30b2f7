"""Builds the engine that samples with servers, and its parity probe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from tether.batch import RolloutBatch, TrainBatch
from tether.config import ActorRolloutRefConfig
from tether.distributed import AllRanks
from tether.integrations import integration
from tether.loop.alarms import mismatch_tolerance
from tether.loop.config import TrainerConfig
from tether.loop.engine import AnyLearner
from tether.runtime.hugging_face import asking_hugging_face
from tether.runtime.machine import cuda_names
from tether.runtime.objects import is_object
from tether.runtime.ranks import SERVERS_STATUS
from tether.runtime.threads import OMP_NUM_THREADS
from tether.text.input_checks import server_address, server_python
from tether.text.loading import DTYPES
from tether.text.models.expert_choice import experts_per_token
from tether.text.models.layers import context_length
from tether.text.models.load import load_config
from tether.text.models.model_path import WEIGHT_FILES, weight_files
from tether.text.models.save import add_older_names
from tether.text.sampling.config import SERVERS, RolloutConfig
from tether.text.sampling.engine import eos_token_ids
from tether.text.sampling.parity import ParityProbe
from tether.text.sampling.protocol import SamplingParams
from tether.text.servers import InferenceServer, Launch, SamplingServer, ServedEngine, ServedPolicy, ServerApi, Traffic
from tether.text.servers.hosted import HostedServer, host_server
from tether.text.servers.vllm_api import Adapters, Vllm
from tether.text.servers.vllm_api import launch_of as launch_vllm
from tether.text.sources import Sources

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class PolicyCard:
    """Facts about a policy for servers, if the policy itself is sharded over other processes."""

    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    eos_token_ids: frozenset[int]
    second_names: frozenset[str]
    """Names of tied weights, which share memory with an earlier one."""

    @classmethod
    def of(cls, policy: PreTrainedModel) -> PolicyCard:
        """Return the card of a model, with or without weights."""
        seen: set[int] = set()
        names = set()
        for name, value in policy.state_dict(keep_vars=True).items():
            place = id(value) if value.is_meta else value.data_ptr()
            if place in seen:
                names.add(name)
            seen.add(place)
        ends = eos_token_ids(policy)
        return cls(policy.config, policy.generation_config, ends, frozenset(names))

    def read(self) -> PolicyCard:
        """Return the card itself, for a call from another process."""
        return self

    @property
    def context(self) -> int | None:
        """Return the maximum tokens of prompt and response."""
        return context_length(self.config)


@dataclass(frozen=True)
class SamplingRanks:
    """The ranks on whose devices servers sample, each server on one node."""

    group: AllRanks
    ranks: range
    train: bool
    """Whether the devices also train, for which servers release their memory."""


@dataclass(frozen=True)
class _Slot:
    """The devices of one server."""

    name: str
    """Name of its log."""
    environment: dict[str, str]
    """Variables that select the devices."""
    rank: int = 0
    """The first rank of the devices."""


def build_servers(
    settings: ActorRolloutRefConfig,
    trainer: TrainerConfig,
    actor: AnyLearner,
    policy: PolicyCard,
    sources: Sources,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
    hosts: SamplingRanks | None,
) -> ParityProbe:
    """Build an engine that samples with servers, which start at the first request.

    Args:
        settings: section of the policy.
        trainer: section of the trainer.
        actor: the engine whose weights they receive, and with which they are compared.
        policy: card of its model.
        sources: location of its files, and the training device.
        sampling: sampling parameters of training responses.
        logs: folder for the output of servers.
        resources: closes the servers.
        hosts: ranks on whose nodes the servers start; None: they start on this machine.

    Raises:
        ValueError: the server is not installed, an address is invalid, or weight files are not available.
    """
    rollout, model, in_turns = settings.rollout, settings.model, trainer.async_mode == "off"
    theirs = [server_address(url) for url in rollout.server_urls]
    api, adapters = _server_api(settings, policy.config), _adapters(settings)
    servers: Sequence[SamplingServer]
    if hosts is None:
        where = theirs or _launches(settings, trainer.n_gpus_per_node, policy, sources, logs / rollout.name)
        servers = [InferenceServer(api, one, rollout.server_timeout) for one in where]
    else:
        servers = _hosted_servers(settings, hosts, api, policy, sources, logs / rollout.name)
    traffic = Traffic(
        dtype=DTYPES[rollout.dtype],
        bucket=rollout.update_weights_bucket_megabytes << 20,
        skipped=policy.second_names,
        max_num_seqs=rollout.max_num_seqs,
        sleeps=rollout.free_cache_engine and in_turns and (hosts is None or hosts.train),
        lora_scale=model.lora_alpha / max(model.lora_rank, 1),
        adapters=adapters is not None,
        layers_are_there=not theirs and _load_format(rollout) != "dummy",
        holds_weights=not in_turns,
    )
    engine = ServedEngine(
        servers,
        actor.engine.export,
        eos_token_ids=policy.eos_token_ids,
        vocabulary=policy.config.get_text_config().vocab_size,
        context=policy.context,
        traffic=traffic,
        status=logs / SERVERS_STATUS,
    )
    resources.callback(engine.close)

    def log_probs(rows: RolloutBatch) -> torch.Tensor:
        log_probs: torch.Tensor = actor.infer(TrainBatch.assemble(rows, torch.zeros(len(rows)))).log_probs
        return log_probs

    formats = (rollout.dtype, settings.actor.fsdp_config.dtype)
    every = rollout.parity_freq if in_turns else 0  # the trainer has newer weights by then
    tolerance = mismatch_tolerance(*(DTYPES[name] for name in formats))
    return ParityProbe(engine, log_probs, every=every, tolerance=tolerance, sampling=sampling)


def look_at_servers(settings: ActorRolloutRefConfig, model: Path | str, device: torch.device) -> None:
    """Check external servers that are already running, before anything is loaded; others are awaited later.

    Raises:
        ValueError: a server is not usable, weights cannot be transferred from the training device, or the policy has no
            files for servers that tether starts.
    """
    if settings.rollout.name in SERVERS and not settings.rollout.server_urls:
        _check_files(settings.rollout, model)
    if settings.rollout.name in SERVERS and settings.rollout.weight_transfer == "nccl" and device.type != "cuda":
        raise ValueError(
            "actor_rollout_ref.rollout.weight_transfer=nccl: broadcasts from a GPU, and this run trains on "
            f"{device.type}. Set it to auto"
        )
    if settings.rollout.name not in SERVERS or not settings.rollout.server_urls:
        return
    policy = load_config(
        model, trust_remote_code=settings.model.trust_remote_code, override_config=settings.model.override_config
    )
    api = _server_api(settings, policy)
    for url in settings.rollout.server_urls:
        server = InferenceServer(api, server_address(url), settings.rollout.server_timeout, token_timeout=2.0)
        if server.is_healthy():
            try:
                server.wait_ready()
            finally:
                server.stop()


def _adapters(settings: ActorRolloutRefConfig) -> Adapters | None:
    """Return the transfer of LoRA adapters by files; None if merged weights are sent."""
    model, rollout = settings.model, settings.rollout
    in_files = rollout.name == "vllm" and rollout.weight_transfer not in ("distributed", "nccl")
    if model.lora_rank == 0 or model.lora.merge or not in_files:
        return None
    return Adapters(model.lora_rank, model.lora_alpha)


def _server_api(settings: ActorRolloutRefConfig, policy: PreTrainedConfig) -> ServerApi:
    rollout, model = settings.rollout, policy.get_text_config()
    sizes = {name: size for name in _SIZES if isinstance(size := getattr(model, name, None), int)}
    wanted = ServedPolicy(model.model_type, model.vocab_size, rollout.dtype, _longest(rollout, policy), sizes)
    tells = rollout.enable_rollout_routing_replay
    if rollout.name == "vllm":
        return Vllm(wanted, _adapters(settings), tells, rollout.weight_transfer)
    each = experts_per_token(policy)
    experts = (model.num_hidden_layers, each) if each else None
    sglang: ServerApi = integration("sglang", "api").SGLang(wanted, rollout.weight_transfer, experts, tells)
    return sglang


def _longest(rollout: RolloutConfig, policy: PreTrainedConfig) -> int:
    """Return the maximum tokens of prompt and response together."""
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    return min(longest, context_length(policy) or longest)


def _load_format(rollout: RolloutConfig) -> str:
    """Return the load format for servers that tether starts; dummy: random weights."""
    name = str(rollout.own_options.get("load_format", rollout.load_format))
    if name.startswith("dummy"):  # verl also has dummy_hf, dummy_megatron and dummy_dtensor
        return "dummy"
    return "auto" if name == "hf" else name


def _check_files(rollout: RolloutConfig, model: Path | str) -> None:
    """Refuse missing weight files; those of a hub are checked when they are loaded."""
    name = _load_format(rollout)
    if name == "dummy":
        return
    if is_object(model):
        reason = "is not a directory of weights"
    elif name == "safetensors" and isinstance(model, Path) and not _has_safetensors(model):
        reason = "has no *.safetensors files"
    else:
        return
    raise ValueError(
        f"actor_rollout_ref.rollout.load_format={name}: {model} {reason}, so {rollout.name} could not load it. "
        "Set it to dummy: servers get the policy's weights before they sample"
    )


def _has_safetensors(model: Path) -> bool:
    return any(file.suffix == ".safetensors" for file in weight_files(model))


def _link_files(model: Path | str, folder: Path) -> None:
    """Link the policy's weights into the folder of the servers' config, whose entries may be overridden."""
    if isinstance(model, str):
        with asking_hugging_face(f"{model}: its weights", "set actor_rollout_ref.rollout.load_format=dummy."):
            model = Path(snapshot_download(model, allow_patterns=[*WEIGHT_FILES]))
    for link in filter(Path.is_symlink, folder.iterdir()):  # left by a run with a different model
        link.unlink()
    for file in weight_files(model):
        (folder / file.name).symlink_to(file.absolute())


def launcher(name: str) -> Callable[[Path, Path, Mapping[str, object], Mapping[str, str]], Launch]:
    """Return what makes a `Launch` of this kind of server."""
    launch: Callable[[Path, Path, Mapping[str, object], Mapping[str, str]], Launch] = (
        launch_vllm if name == "vllm" else integration("sglang", "api").launch_of
    )
    return launch


def _launches(
    settings: ActorRolloutRefConfig, ranks: int, policy: PolicyCard, sources: Sources, logs: Path
) -> list[Launch]:
    """Return the commands of the servers on this machine: one on a CPU, or as many as fit on its first GPUs.

    Raises:
        ValueError: the server is not installed, there are too few devices, or a hub refuses files.
    """
    rollout = settings.rollout
    split = rollout.tensor_model_parallel_size
    slots = [_Slot(rollout.name, _on_cores(rollout.name, split))]
    if sources.device.type == "cuda":
        _check_split(split, ranks)
        names = cuda_names(ranks)
        slots = [
            _Slot(f"{rollout.name}-{first}", {"CUDA_VISIBLE_DEVICES": ",".join(devices)})
            for first in range(0, ranks, split)
            if (devices := names[first : first + split])
        ]
    return [launch for _, launch in _launched(settings, slots, policy, sources, logs)]


def _hosted_servers(
    settings: ActorRolloutRefConfig,
    hosts: SamplingRanks,
    api: ServerApi,
    policy: PolicyCard,
    sources: Sources,
    logs: Path,
) -> list[HostedServer]:
    """Return servers beside ranks: one on each node with a CPU, or as many as fit on the ranks' GPUs.

    Raises:
        ValueError: the server is not installed on this machine, a node has too few devices, or a hub refuses files.
    """
    rollout, processes = settings.rollout, hosts.group.processes
    split, timeout = rollout.tensor_model_parallel_size, rollout.server_timeout
    ranks_by_node: dict[str, list[int]] = {}
    for rank in hosts.ranks:
        ranks_by_node.setdefault(processes[rank].node, []).append(rank)
    slots = []
    for ranks in ranks_by_node.values():
        if sources.device.type != "cuda":
            slots.append(_Slot(f"{rollout.name}-{ranks[0]}", _on_cores(rollout.name, split), ranks[0]))
            continue
        _check_split(split, len(ranks))
        for first in range(0, len(ranks), split):
            devices = ",".join(processes[rank].devices for rank in ranks[first : first + split])
            slots.append(_Slot(f"{rollout.name}-{ranks[first]}", {"CUDA_VISIBLE_DEVICES": devices}, ranks[first]))
    servers = []
    for slot, launch in _launched(settings, slots, policy, sources, logs):
        arguments = (api, launch, timeout, processes[slot.rank].host)
        companion = hosts.group.companion(slot.rank, rollout.max_num_seqs, host_server, *arguments)
        servers.append(HostedServer(api, companion, slot.name, timeout))
    return servers


def _check_split(split: int, devices: int) -> None:
    """Check that the devices of a node can be divided among servers."""
    if devices % split:
        key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={split}"
        raise ValueError(f"{key}: does not divide the {devices} devices of a machine that sample")


def _launched(
    settings: ActorRolloutRefConfig, slots: Sequence[_Slot], policy: PolicyCard, sources: Sources, logs: Path
) -> list[tuple[_Slot, Launch]]:
    """Return the command of the server of each slot, and write the files that they read.

    Raises:
        ValueError: the server is not installed, or a hub refuses files.
    """
    rollout, described = settings.rollout, logs / "model"
    name = rollout.name
    python, launch_of = server_python(name), launcher(name)
    policy.config.save_pretrained(described)
    add_older_names(described)
    if policy.generation_config is not None:
        policy.generation_config.save_pretrained(described)
    if _load_format(rollout) != "dummy":
        _link_files(sources.model_path, described)
    longest, folder = _longest(rollout, policy.config), str(described.absolute())
    on_gpu = sources.device.type == "cuda"
    if name == "vllm":
        adapters = _adapters(settings)
        options = _vllm_options(rollout, folder, longest, on_gpu=on_gpu) | (adapters.options() if adapters else {})
    else:
        options = _sglang_options(rollout, folder, longest, on_gpu=on_gpu)
    options |= {name: _word(value) for name, value in rollout.own_options.items() if name != "load_format"}
    files = [logs.absolute() / f"{slot.name}.log" for slot in slots]
    return [(slot, launch_of(python, file, options, slot.environment)) for slot, file in zip(slots, files, strict=True)]


def _vllm_options(rollout: RolloutConfig, folder: str, longest: int, *, on_gpu: bool) -> dict[str, object]:
    """Return options of vLLM's command line."""
    return {
        "model": folder,
        "dtype": rollout.dtype,
        "max_model_len": longest,
        "max_logprobs": max(rollout.top_k, 1),
        "max_num_seqs": rollout.max_num_seqs,
        "seed": 0,  # each request has its own seed
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "load_format": _load_format(rollout),
        **_routing_options(rollout),
        **({"enable_sleep_mode": True} if rollout.free_cache_engine and on_gpu else {}),
    }


def _sglang_options(rollout: RolloutConfig, folder: str, longest: int, *, on_gpu: bool) -> dict[str, object]:
    """Return options of SGLang's command line."""
    chunks = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1
    sleeps = rollout.free_cache_engine and on_gpu
    return {
        "model_path": folder,
        "dtype": rollout.dtype,
        "device": "cuda" if on_gpu else "cpu",
        "context_length": longest,
        "max_running_requests": rollout.max_num_seqs,
        "tp_size": rollout.tensor_model_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": chunks,
        "disable_cuda_graph": rollout.enforce_eager,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "load_format": _load_format(rollout),
        "sampling_mask_max_tokens": max(2 * rollout.top_k, 4096),  # room for ties at the threshold
        "enable_memory_saver": sleeps,
        "enable_weights_cpu_backup": sleeps,
        **_routing_options(rollout),
    }


def _routing_options(rollout: RolloutConfig) -> dict[str, object]:
    """Return the options that make vLLM or SGLang return the experts of each token."""
    return {"enable_return_routed_experts": True} if rollout.enable_rollout_routing_replay else {}


def _word(value: object) -> object:
    """Return an option's value for the command line."""
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def _on_cores(name: str, tensor_parallel: int) -> dict[str, str]:
    """Return the environment of a server on a CPU, with as many threads as the trainer, which waits meanwhile."""
    threads = {OMP_NUM_THREADS: str(max(torch.get_num_threads() // tensor_parallel, 1))}
    if name == "sglang":
        return threads | {"SGLANG_USE_CPU_ENGINE": "1"}
    bind = (
        "nobind" if tensor_parallel == 1 else "|".join(map(str, range(tensor_parallel)))
    )  # one core per tensor-parallel rank
    return threads | {"VLLM_CPU_OMP_THREADS_BIND": bind, "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
