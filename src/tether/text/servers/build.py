"""Builds the engine that samples with servers, and its parity probe."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from tether.runtime.hugging_face import hugging_face_errors
from tether.runtime.machine import cuda_names
from tether.runtime.objects import is_object
from tether.runtime.ranks import SERVERS_STATUS
from tether.runtime.threads import OMP_NUM_THREADS
from tether.text.input_checks import server_address, server_python
from tether.text.loading import DTYPES
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
from tether.text.servers.kind import ServerKind, ServerStart
from tether.text.servers.vllm_kind import KIND as VLLM
from tether.text.sources import ModelSpecs

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class PolicyInfo:
    """Facts about a policy that servers need; the policy itself may be sharded over other processes."""

    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    eos_token_ids: frozenset[int]
    tied_names: frozenset[str]
    """Names of tied weights, which share memory with an earlier one."""

    @classmethod
    def of(cls, policy: PreTrainedModel) -> PolicyInfo:
        """Return the facts about a model, with or without weights."""
        seen: set[int] = set()
        names = set()
        for name, value in policy.state_dict(keep_vars=True).items():
            place = id(value) if value.is_meta else value.data_ptr()
            if place in seen:
                names.add(name)
            seen.add(place)
        ends = eos_token_ids(policy)
        return cls(policy.config, policy.generation_config, ends, frozenset(names))

    def read(self) -> PolicyInfo:
        """Return this object, for a call from another process."""
        return self

    @property
    def context(self) -> int | None:
        """Return the maximum number of tokens of prompt and response; None if the model sets no limit."""
        return context_length(self.config)


@dataclass(frozen=True)
class SamplingRanks:
    """The ranks on whose devices servers sample; each server is on one node."""

    group: AllRanks
    ranks: range
    train: bool
    """Whether the devices are also used for training, so that servers have to release their memory."""


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
    policy: PolicyInfo,
    model_specs: ModelSpecs,
    sampling: SamplingParams,
    logs: Path,
    resources: ExitStack,
    hosts: SamplingRanks | None,
) -> ParityProbe:
    """Build an engine that samples with servers, which start at the first request.

    Args:
        settings: section of the policy.
        trainer: section of the trainer.
        actor: the learner whose weights the servers receive, and with which they are compared.
        policy: facts about its model.
        model_specs: location of its files, and the training device.
        sampling: sampling parameters of training responses.
        logs: folder for the output of servers.
        resources: closes the servers.
        hosts: ranks on whose nodes the servers start; None: they start on this machine.

    Raises:
        ValueError: the server is not installed, an address is invalid, or weight files are not available.
    """
    rollout, model, in_turns = settings.rollout, settings.model, trainer.async_mode == "off"
    theirs = [server_address(url) for url in rollout.server_urls]
    api = _server_api(settings, policy.config)
    servers: Sequence[SamplingServer]
    if hosts is None:
        where = theirs or _launches(settings, trainer.n_gpus_per_node, policy, model_specs, logs / rollout.name)
        servers = [InferenceServer(api, one, rollout.server_timeout) for one in where]
    else:
        servers = _hosted_servers(settings, hosts, api, policy, model_specs, logs / rollout.name)
    traffic = Traffic(
        dtype=DTYPES[rollout.dtype],
        bucket=rollout.update_weights_bucket_megabytes << 20,
        skipped=policy.tied_names,
        max_num_seqs=rollout.max_num_seqs,
        sleeps=rollout.free_cache_engine and in_turns and (hosts is None or hosts.train),
        lora_scale=model.lora_alpha / max(model.lora_rank, 1),
        adapters=kind_of(rollout.name).sends_adapters(settings),
        has_base_layers=not theirs and _load_format(rollout) != "dummy",
        restores_last_weights=not in_turns,
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
    every = rollout.parity_freq if in_turns else 0  # otherwise the trainer has newer weights by then
    tolerance = mismatch_tolerance(*(DTYPES[name] for name in formats))
    return ParityProbe(engine, log_probs, every=every, tolerance=tolerance, sampling=sampling)


def check_external_servers(settings: ActorRolloutRefConfig, model: Path | str, device: torch.device) -> None:
    """Check external servers that already run, before anything is loaded; the run waits for the others later.

    Raises:
        ValueError: a server cannot be used, weights cannot be transferred from the training device, or the policy has
            no files for servers that tether starts.
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


def _server_api(settings: ActorRolloutRefConfig, policy: PreTrainedConfig) -> ServerApi:
    rollout, model = settings.rollout, policy.get_text_config()
    sizes = {name: size for name in _SIZES if isinstance(size := getattr(model, name, None), int)}
    wanted = ServedPolicy(model.model_type, model.vocab_size, rollout.dtype, _longest(rollout, policy), sizes)
    return kind_of(rollout.name).api(settings, policy, wanted)


def _longest(rollout: RolloutConfig, policy: PreTrainedConfig) -> int:
    """Return the maximum number of tokens of prompt and response together."""
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
    """Link the policy's weight files into the folder of the servers' config, which may have overridden entries."""
    if isinstance(model, str):
        with hugging_face_errors(f"{model}: its weights", "set actor_rollout_ref.rollout.load_format=dummy."):
            model = Path(snapshot_download(model, allow_patterns=[*WEIGHT_FILES]))
    for link in filter(Path.is_symlink, folder.iterdir()):  # left by a run with a different model
        link.unlink()
    for file in weight_files(model):
        (folder / file.name).symlink_to(file.absolute())


def kind_of(name: str) -> ServerKind:
    """Return the kind of server for a name in `actor_rollout_ref.rollout.name`: vLLM's, or that of an integration."""
    kind: ServerKind = VLLM if name == "vllm" else integration(name, "kind").KIND
    return kind


def _launches(
    settings: ActorRolloutRefConfig, ranks: int, policy: PolicyInfo, model_specs: ModelSpecs, logs: Path
) -> list[Launch]:
    """Return the commands of the servers on this machine: one on a CPU, or as many as fit on its first GPUs.

    Raises:
        ValueError: the server is not installed, there are too few devices, or a hub refuses files.
    """
    rollout = settings.rollout
    split = rollout.tensor_model_parallel_size
    slots = [_Slot(rollout.name, _on_cores(rollout.name, split))]
    if model_specs.device.type == "cuda":
        _check_split(split, ranks)
        names = cuda_names(ranks)
        slots = [
            _Slot(f"{rollout.name}-{first}", {"CUDA_VISIBLE_DEVICES": ",".join(devices)})
            for first in range(0, ranks, split)
            if (devices := names[first : first + split])
        ]
    return [launch for _, launch in _launched(settings, slots, policy, model_specs, logs)]


def _hosted_servers(
    settings: ActorRolloutRefConfig,
    hosts: SamplingRanks,
    api: ServerApi,
    policy: PolicyInfo,
    model_specs: ModelSpecs,
    logs: Path,
) -> list[HostedServer]:
    """Return servers next to ranks: one on each node with a CPU, or as many as fit on the ranks' GPUs.

    Raises:
        ValueError: the server is not installed on this machine, a node has too few devices, or a hub refuses files.
    """
    rollout, processes = settings.rollout, hosts.group.processes
    if not hosts.train:
        hosts.group.do_without(hosts.ranks)
    split, timeout = rollout.tensor_model_parallel_size, rollout.server_timeout
    ranks_by_node: dict[str, list[int]] = {}
    for rank in hosts.ranks:
        ranks_by_node.setdefault(processes[rank].node, []).append(rank)
    slots = []
    for ranks in ranks_by_node.values():
        if model_specs.device.type != "cuda":
            slots.append(_Slot(f"{rollout.name}-{ranks[0]}", _on_cores(rollout.name, split), ranks[0]))
            continue
        _check_split(split, len(ranks))
        for first in range(0, len(ranks), split):
            devices = ",".join(processes[rank].devices for rank in ranks[first : first + split])
            slots.append(_Slot(f"{rollout.name}-{ranks[first]}", {"CUDA_VISIBLE_DEVICES": devices}, ranks[first]))
    servers = []
    for slot, launch in _launched(settings, slots, policy, model_specs, logs):
        arguments = (api, launch, timeout, processes[slot.rank].host)
        companion = hosts.group.companion(slot.rank, rollout.max_num_seqs, host_server, *arguments)
        servers.append(HostedServer(api, companion, slot.name, timeout))
    return servers


def _check_split(split: int, devices: int) -> None:
    """Check that servers of this size can use all devices of a node."""
    if devices % split:
        key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={split}"
        raise ValueError(f"{key}: does not divide the {devices} devices of a machine that sample")


def _launched(
    settings: ActorRolloutRefConfig, slots: Sequence[_Slot], policy: PolicyInfo, model_specs: ModelSpecs, logs: Path
) -> list[tuple[_Slot, Launch]]:
    """Return the command of the server of each slot, and write the files that the servers read.

    Raises:
        ValueError: the server is not installed, or a hub refuses files.
    """
    rollout, described = settings.rollout, logs / "model"
    python, kind = server_python(rollout.name), kind_of(rollout.name)
    policy.config.save_pretrained(described)
    add_older_names(described)
    if policy.generation_config is not None:
        policy.generation_config.save_pretrained(described)
    if _load_format(rollout) != "dummy":
        _link_files(model_specs.model_path, described)
    on_gpu = model_specs.device.type == "cuda"
    longest = _longest(rollout, policy.config)
    start = ServerStart(str(described.absolute()), _load_format(rollout), longest, on_gpu=on_gpu)
    options = kind.options(settings, start)
    options |= {name: _word(value) for name, value in rollout.own_options.items() if name != "load_format"}

    def launch(slot: _Slot) -> Launch:
        return kind.launch_of(python, logs.absolute() / f"{slot.name}.log", options, slot.environment)

    return [(slot, launch(slot)) for slot in slots]


def _word(value: object) -> object:
    """Return an option's value for the command line."""
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


def _on_cores(name: str, tensor_parallel: int) -> dict[str, str]:
    """Return the environment of a server on a CPU; it has as many threads as the trainer, which waits meanwhile."""
    threads = max(torch.get_num_threads() // tensor_parallel, 1)
    return {OMP_NUM_THREADS: str(threads), **kind_of(name).cpu_environment(tensor_parallel)}
