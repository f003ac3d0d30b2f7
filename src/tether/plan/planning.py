"""The plan of a text run: the devices of each model, the memory of each phase there, and the time of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from types import SimpleNamespace

from tether.config import (
    RunConfig,
    asks_reference,
    device_count,
    full_kl_in_reward,
    local_references,
    models_of,
    placed,
    reference_is_policy,
    reference_models,
    reference_runs_with_actor,
    uses_megatron,
)
from tether.config.schema import ActorConfig, CriticConfig, RefConfig, TrainedFsdpConfig
from tether.integrations import integration
from tether.plan import memory
from tether.plan.architecture import Architecture, architecture_of
from tether.plan.assumptions import (
    DEFAULT_ASSUMPTIONS,
    Assumptions,
    assumed_lengths,
    training_row_count,
    validation_rows,
)
from tether.plan.devices import GIB, Cluster, Device, gib
from tether.plan.memory import Model, Parts, total
from tether.plan.timing import (
    CALIBRATED,
    CPU,
    DRAWN,
    GPU,
    SERVER,
    SPREAD,
    Lengths,
    bus_seconds,
    decode_step,
    forward_seconds,
    gather_seconds,
    move_seconds,
    optimizer_seconds,
    overlapped,
    simulate,
)
from tether.text.rewards.config import ScoringModelConfig
from tether.text.sampling.config import SERVERS

OVERHEAD = {"cpu": 1.2 * GIB, "gpu": 0.6 * GIB}
"""Memory of the process itself. On a CPU: libraries, compiled kernels, rows and Python objects (measured). On a GPU:
CUDA's context."""
COMMUNICATION = 0.6 * GIB
"""NCCL's buffers, if several GPUs work together."""
SLACK = {"cpu": 0.25, "gpu": 0.05}
"""Share of a phase's additional memory that the allocator cannot reuse (on a CPU measured between two returns)."""
HOST_PROCESS = 2.5 * GIB
"""Host memory of a process that drives a GPU: torch's libraries, CUDA's context, rows."""
SERVER_ACTIVATIONS = 1.5 * GIB
"""Memory of a server in addition to its weights and its cache."""
NEAR = 0.1
"""Margin around a device's memory: between 90 and 110 % the verdict is "try"."""
SLICE = 512 * 2**20


@dataclass(frozen=True)
class Interval:
    """Seconds, with a lower and an upper bound."""

    low: float
    middle: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that hold the same models."""

    devices: range
    models: tuple[str, ...]
    phases: Mapping[str, Parts]
    """Phase -> component -> bytes on one device."""

    @property
    def peak_phase(self) -> str:
        """Return the phase that needs the most memory."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))


@dataclass(frozen=True)
class ServerMemory:
    """Memory of a sampling server, in bytes on each of its devices."""

    share: float
    """Memory that it may use (gpu_memory_utilization)."""
    weights: float
    per_token: float
    """Size of the keys and values of one token."""
    longest: int
    """Length of the longest sequence in tokens."""

    @property
    def missing_memory(self) -> float:
        """Return the bytes that the server's share lacks for its weights and a single sequence."""
        return max(0.0, self.weights + SERVER_ACTIVATIONS + self.longest * self.per_token - self.share)

    @property
    def tokens(self) -> float:
        """Return the number of tokens whose keys and values fit."""
        return max(0.0, self.share - self.weights - SERVER_ACTIVATIONS) / self.per_token

    @property
    def problem(self) -> str | None:
        """Return a sentence why the server cannot start, or None if it can."""
        if not self.missing_memory:
            return None
        share = f"the server's {gib(self.share)} are less than its weights ({gib(self.weights)}"
        if self.share >= self.weights:
            share += f") and the keys and values of a sequence of {self.longest:,} tokens "
            share += f"({gib(self.missing_memory)} are missing"
        return (
            f"{share}). Raise actor_rollout_ref.rollout.gpu_memory_utilization, or split its weights by "
            "actor_rollout_ref.rollout.tensor_model_parallel_size."
        )


@dataclass(frozen=True)
class Plan:
    """The estimated needs of a run."""

    cluster: Cluster
    groups: tuple[DeviceGroup, ...]
    host: Parts
    """Host memory of a machine by component, in bytes."""
    checkpoint: float
    """Size of a checkpoint on disk in bytes."""
    retained: int | None
    """Number of checkpoints on disk at the end; None if unknown."""
    times: Mapping[str, Interval]
    """Phase -> seconds per step."""
    step: Interval
    idle: float | None
    """Share of the samplers' time spent waiting for the longest responses; None if nothing is sampled."""
    tokens: float
    """Tokens of a step, including prompts and responses."""
    steps: int | None
    lengths: Lengths
    actor: Architecture
    server: ServerMemory | None = None
    """The server that samples, if there is one."""
    host_memory: float | None = None
    """Host memory of a machine in GiB; None if unknown."""

    @property
    def problem(self) -> str | None:
        """Return a sentence why the run cannot start whatever the device memory, or None if it can."""
        if self.server and self.server.problem:
            return self.server.problem
        if self.host_memory is not None and total(self.host) > self.host_memory * GIB:
            largest = max(self.host, key=lambda name: self.host[name])
            return (
                f"a machine needs {gib(total(self.host))} of host memory and has {self.host_memory:.1f} GiB; most of "
                f"it is {largest} ({gib(self.host[largest])})."
            )
        return None

    @cached_property
    def fullest_group(self) -> DeviceGroup:
        """Return the devices that need the most memory."""
        return max(self.groups, key=lambda group: total(group.phases[group.peak_phase]))

    @property
    def peak(self) -> float:
        """Return the peak memory of the fullest device in bytes."""
        return total(self.fullest_group.phases[self.fullest_group.peak_phase])

    @property
    def share(self) -> float:
        """Return the peak memory as a share of a device's memory."""
        return self.peak / (self.cluster.device.memory * GIB)

    @property
    def verdict(self) -> str:
        """Return whether the run fits into memory: "fits", "try" or "does not fit"."""
        if self.problem:
            return "does not fit"
        if self.share <= 1 - NEAR:
            return "fits"
        return "try" if self.share <= 1 + NEAR else "does not fit"

    @property
    def hours(self) -> Interval | None:
        """Return the hours of all steps; None if the number of steps is unknown."""
        if self.steps is None:
            return None
        low, middle, high = (self.steps * s / 3600 for s in (self.step.low, self.step.middle, self.step.high))
        return Interval(low, middle, high)


Role = ActorConfig | CriticConfig | RefConfig | ScoringModelConfig


@dataclass(frozen=True)
class MicroLimits:
    """The division of rows into mini-batches and micro-batches."""

    dynamic: bool
    """Whether a micro-batch is limited by tokens instead of rows."""
    rows: int
    tokens: int
    packed: bool
    mini: int
    """Number of prompts in a mini-batch."""


@dataclass(frozen=True)
class Planner:
    """Applies the formulas to a configuration.

    Args:
        config: a checked configuration.
        device: the type of device.
        assumptions: values that the configuration does not contain, such as response lengths.
        corrections: phase -> measured / planned seconds of earlier runs on this device.
        host_memory: GiB of the host memory of a machine; None if unknown.
    """

    config: RunConfig
    device: Device
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS
    corrections: Mapping[str, float] | None = None
    host_memory: float | None = None

    @cached_property
    def cluster(self) -> Cluster:
        """The devices; CPU processes share the memory and the rates of one machine."""
        config, device = self.config, self.device
        per_node = config.trainer.n_gpus_per_node
        if device.is_cpu:
            processes = per_node
            device = replace(
                device,
                memory=device.memory / processes,
                teraflops=device.teraflops / processes,
                bandwidth=device.bandwidth / processes,
            )
        return Cluster(device, per_node, max(1, ceil(device_count(config) / per_node)))

    @cached_property
    def policy(self) -> Architecture:
        """Sizes of the policy."""
        model = self.config.actor_rollout_ref.model
        return self._sizes(model.path, "actor_rollout_ref.model.path", model.override_config)

    def _sizes(self, path: str, key: str, changed: Mapping[str, object] | None = None) -> Architecture:
        sizes, layers = architecture_of(path, key), (changed or {}).get("num_hidden_layers")
        return replace(sizes, layers=layers) if isinstance(layers, int) else sizes

    @cached_property
    def models(self) -> dict[str, Model]:
        """The models that learn or compute outputs, by role."""
        config, settings = self.config, self.config.actor_rollout_ref
        results = {"actor": self._model("actor", self.policy, settings.actor)}
        used = models_of(config)
        if "critic" in used:
            critic = config.critic.model
            sizes = self._sizes(critic.path, "critic.model.path", critic.override_config)
            results["critic"] = self._model("critic", sizes, config.critic)
        if ("reference" in used or reference_runs_with_actor(config)) and not reference_is_policy(config):
            for name in local_references(config):
                key, model = reference_models(config)[name]
                sizes = self._sizes(model, key) if config.distillation.enabled else self.policy
                results[name] = self._model(name, sizes, settings.ref)
        path = config.reward_model.model.path
        if "reward_model" in used and path:
            sizes = self._sizes(path, "reward_model.model.path")
            results["reward_model"] = self._model("reward_model", sizes, config.reward_model.model)
        return results

    @property
    def references(self) -> list[str]:
        """Names of the models that compute log-probs for a KL; several are the teachers of a distillation."""
        return [name for name in reference_models(self.config) if name in self.models]

    def _model(self, name: str, sizes: Architecture, role: Role) -> Model:
        config, devices_by_model = self.config, placed(self.config)
        placement = "reference" if isinstance(role, RefConfig) else name
        devices = len(devices_by_model.get(placement, devices_by_model["actor"]))
        trained = isinstance(role, ActorConfig | CriticConfig)
        fsdp = role.model.fsdp_config if isinstance(role, CriticConfig) else role.fsdp_config
        section = config.critic.model if isinstance(role, CriticConfig) else config.actor_rollout_ref.model
        kind = config.actor_rollout_ref.actor.fsdp_config.dtype if isinstance(role, RefConfig) else fsdp.dtype
        number = {"auto": 2 if self.device.bfloat16 else 4, "bfloat16": 2, "float32": 4}[kind]
        model = Model(
            name.replace("_", " "),
            sizes,
            ranks=devices,
            trained=trained,
            has_head=isinstance(role, ActorConfig | RefConfig),
            number=number,
            adapter=sizes.adapter(section.lora_rank) if trained and section.lora_rank else 0,
            recompute=section.enable_gradient_checkpointing,
            fused=self.device.is_cpu and number == 2,
            on_cpu=self.device.is_cpu,
        )
        if uses_megatron(config) and not isinstance(role, ScoringModelConfig):
            return self._megatron_model(model, name, role)
        moved = fsdp.param_offload or fsdp.offload_policy or getattr(fsdp, "optimizer_offload", False)
        unsharded = isinstance(role, RefConfig) and reference_runs_with_actor(config)
        if unsharded or (devices == 1 and not moved):
            return model
        shards, on_gpu = devices if fsdp.fsdp_size < 0 else min(fsdp.fsdp_size, devices), not self.device.is_cpu
        return replace(
            model,
            sharded=True,
            shards=shards,
            sequence=getattr(role, "ulysses_sequence_parallel_size", 1),
            reshard=fsdp.reshard_after_forward,
            offload_weights=fsdp.param_offload and on_gpu,
            on_host=fsdp.offload_policy and on_gpu,
            offload_optimizer=isinstance(fsdp, TrainedFsdpConfig) and fsdp.optimizer_offload and on_gpu,
        )

    def _megatron_model(self, model: Model, name: str, role: ActorConfig | CriticConfig | RefConfig) -> Model:
        sizes, arch = role.megatron, model.sizes
        section = {"actor": "actor_rollout_ref.actor", "reference": "actor_rollout_ref.ref", "critic": "critic"}[name]
        layouts = integration("megatron", "layout")
        layout = layouts.layout_of(sizes, section)
        named = {
            "num_attention_heads": arch.heads,
            "num_key_value_heads": arch.kv_heads,
            "vocab_size": arch.vocabulary,
            "hidden_size": arch.hidden,
            "intermediate_size": arch.intermediate,
            "num_hidden_layers": arch.layers,
        }
        if arch.latent:
            named["kv_lora_rank"] = arch.latent.kv_rank
        if arch.experts:
            named |= {"num_experts": arch.experts, "moe_intermediate_size": arch.expert_width}
            named |= {"shared_expert_intermediate_size": arch.shared_width}
        layouts.check(layout, SimpleNamespace(**named), model.ranks, f"{section}.megatron.")
        if model.adapter:
            key = "critic.model" if name == "critic" else "actor_rollout_ref.model"
            layouts.check_adapters(model.adapter // arch.adapter(1), SimpleNamespace(**named), key)
        trained = not isinstance(role, RefConfig)
        return replace(
            model,
            layout=layout,
            sequence=layout.context,
            offload_weights=sizes.param_offload,
            gradients_are_freed=trained and bool(getattr(sizes, "grad_offload", True)),
            offload_optimizer=trained and bool(getattr(sizes, "optimizer_offload", False)),
            shares_optimizer=bool(getattr(sizes, "use_distributed_optimizer", True)),
        )

    @cached_property
    def lengths(self) -> Lengths:
        """Tokens of prompts and responses."""
        return assumed_lengths(self.config, self.assumptions)

    @property
    def fine_tunes(self) -> bool:
        """Whether the run is supervised fine-tuning, whose rows are conversations: nothing is sampled or scored."""
        return self.config.sft.enable

    @property
    def group(self) -> int:
        """Number of rows with the same prompt."""
        return 1 if self.fine_tunes else self.config.actor_rollout_ref.rollout.n

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum tokens of a prompt and of a response."""
        data = self.config.data
        if self.fine_tunes:
            return 0, data.max_length
        return data.max_prompt_length, self.config.actor_rollout_ref.rollout.response_length

    @property
    def rows(self) -> int:
        """Rows per step: responses, or conversations."""
        return self.config.data.train_batch_size * self.group

    def epochs(self, role: ActorConfig | CriticConfig) -> int:
        """Return the number of passes of an update over the rows of a step."""
        return 1 if self.fine_tunes else role.ppo_epochs

    def mini_batch(self, role: ActorConfig | CriticConfig) -> int:
        """Return the number of prompts or conversations per optimizer step."""
        return self.config.data.train_batch_size if self.fine_tunes else role.ppo_mini_batch_size

    def replicas(self, model: Model) -> int:
        """Return the number of data-parallel groups of devices, each of which has its own rows."""
        split = model.layout.tensor * model.layout.pipeline if model.layout else 1
        return max(1, model.ranks // (split * model.sequence))

    def rows_of_mini_batch(self, model: Model, mini: int) -> int:
        """Return each device group's rows in a mini-batch of `mini` prompts."""
        return max(1, ceil(mini * self.group / self.replicas(model)))

    def _micro_tokens(self, model: Model, limits: MicroLimits) -> float:
        """Return the maximum tokens of a micro-batch, with rows of maximum length that share their prompts."""
        prompt, response = self.longest
        rows = self.rows_of_mini_batch(model, min(limits.mini, self.config.data.train_batch_size))
        if not limits.dynamic:
            rows = max(1, min(limits.rows, rows))
        prompts = ceil(rows / self.group) if limits.packed else rows
        tokens = float(prompts * prompt + rows * response)
        return min(tokens, max(limits.tokens * model.sequence, prompt + response)) if limits.dynamic else tokens

    def _micro_batches(self, model: Model, limits: MicroLimits) -> int:
        """Return the number of micro-batches per device and epoch, for rows of mean length."""
        lengths, batch = self.lengths, self.config.data.train_batch_size
        rows = self.rows_of_mini_batch(model, min(limits.mini, batch))
        if limits.dynamic:
            tokens = rows * (lengths.mean + lengths.prompt / (self.group if limits.packed else 1))
            count = ceil(tokens / (limits.tokens * model.sequence))
        else:
            count = ceil(rows / max(1, min(limits.rows, rows)))
        return ceil(batch / limits.mini) * max(1, count)

    def _update_limits(self, model: Model, role: ActorConfig | CriticConfig) -> MicroLimits:
        section = self.config.critic.model if isinstance(role, CriticConfig) else self.config.actor_rollout_ref.model
        return MicroLimits(
            role.use_dynamic_bsz,
            role.ppo_micro_batch_size_per_gpu,
            role.ppo_max_token_len_per_gpu,
            packed=section.use_remove_padding or bool(model.layout),
            mini=self.mini_batch(role),
        )

    def _update_tokens(self, model: Model, role: ActorConfig | CriticConfig) -> float:
        return self._micro_tokens(model, self._update_limits(model, role))

    def _inference_tokens(self, name: str) -> float:
        return self._micro_tokens(self.models[name], self._inference_limits(name))

    def _inference_limits(self, name: str) -> MicroLimits:
        config, settings, model = self.config, self.config.actor_rollout_ref, self.models[name]
        packed = settings.model.use_remove_padding or bool(model.layout)
        if name == "actor" or name in self.references:
            section = settings.rollout if name == "actor" else settings.ref
            limits = (
                section.log_prob_use_dynamic_bsz,
                section.log_prob_micro_batch_size_per_gpu,
                section.log_prob_max_token_len_per_gpu,
            )
        elif name == "critic":
            critic, packed = config.critic, config.critic.model.use_remove_padding or bool(model.layout)
            limits = (
                critic.use_dynamic_bsz,
                critic.forward_micro_batch_size_per_gpu,
                critic.forward_max_token_len_per_gpu,
            )
        else:
            reward = config.reward_model
            limits = (reward.use_dynamic_bsz, reward.micro_batch_size_per_gpu, reward.forward_max_token_len_per_gpu)
        return MicroLimits(*limits, packed=packed, mini=config.data.train_batch_size)

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether old log-probs are a separate phase, because neither the sampler nor a single update provides them."""
        config, actor = self.config, self.config.actor_rollout_ref.actor
        correction = config.algorithm.rollout_correction
        if self.fine_tunes or correction.bypass_mode:
            return False
        once = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
        corrected = correction.rollout_is or correction.rollout_rs or correction.rollout_token_veto_threshold
        read = config.algorithm.use_kl_in_reward or config.algorithm.use_pf_ppo or corrected
        waits = config.trainer.critic_warmup > 1 or config.trainer.critic_warmup_until_explained_variance is not None
        return not once or bool(read) or waits

    def groups(self) -> tuple[DeviceGroup, ...]:
        """Return the device groups of the run, with the memory of each phase."""
        by_devices: dict[range, list[str]] = {}
        for name, devices in placed(self.config).items():
            by_devices.setdefault(devices, []).append(name)
        return tuple(
            DeviceGroup(devices, tuple(names), self._phases(names))
            for devices, names in sorted(by_devices.items(), key=str)
        )

    def _phases(self, names: list[str]) -> dict[str, Parts]:
        kind = "cpu" if self.device.is_cpu else "gpu"
        scores = "reference" in names or ("actor" in names and reference_runs_with_actor(self.config))
        local_names = {*names, *(self.references if scores else ())}
        local = {name: model for name, model in self.models.items() if name in local_names}
        base: Parts = {"process": OVERHEAD[kind]}
        if kind == "gpu" and self.cluster.count > 1:
            base["communication"] = COMMUNICATION
        resting, on_host = Parts(base), Parts()
        for model in local.values():
            device, host = memory.idle_memory(model)
            resting |= device
            on_host |= host
        if self.device.is_cpu:
            resting |= on_host
        if "sampler" in names and not self.uses_servers:
            if self._has_copy:
                resting["sampler weights"] = float(self.sampler.number * self.policy.parameters)
            resting |= self._sampler_copies()
        if self.device.is_cpu and self.config.trainer.async_save and self.config.trainer.save_freq > 0:
            resting["copy of a checkpoint"] = self.checkpoint() / self.cluster.count
        added: dict[str, Parts] = {"load": self._loading(local)}
        if "sampler" in names or (self.uses_servers and "actor" in names and "sampler" not in placed(self.config)):
            added["sampling"] = self._sampling(self.config.data.train_batch_size, self.group)
            if prompts := self._validation_prompts():
                added["validation"] = self._sampling(prompts, self.config.actor_rollout_ref.rollout.val_kwargs.n)
        if "actor" in local:
            actor = local["actor"]
            if self.fine_tunes and self.config.data.val_files:
                added["validation"] = memory.inference(actor, self._inference_tokens("actor"))
            if self.recomputes_log_probs:
                added["log_probs"] = memory.inference(actor, self._inference_tokens("actor"))
            added["update_actor"] = memory.update(
                actor,
                self._update_tokens(actor, self.config.actor_rollout_ref.actor),
                actor.layout.pipeline if actor.layout else 1,
            )
            if not self.fine_tunes:
                added["transfer"] = self._transfer(actor)
            added["checkpoint"] = self._saving(actor)
        for name, phase in (("critic", "values"), ("reward_model", "reward")):
            if name in local:
                added[phase] = memory.inference(local[name], self._inference_tokens(name))
        scoring = [name for name in self.references if name in local]
        passes = [memory.inference(local[name], self._inference_tokens(name)) for name in scoring]
        if passes:
            added["reference"] = max(passes, key=total)
        if "critic" in local:
            critic = local["critic"]
            added["update_critic"] = memory.update(critic, self._update_tokens(critic, self.config.critic))
        first_step = {"load"}
        return {
            phase: _with_slack(
                {
                    component: size
                    for component, size in resting.items()
                    if not (phase in first_step and component.endswith("optimizer"))
                },
                components,
                SLACK[kind],
            )
            for phase, components in added.items()
        }

    def _saving(self, actor: Model) -> Parts:
        """Return the additional memory for writing a checkpoint: the largest weight, or float32 copies of frozen
        weights and of layers whose adapters are merged
        (`tether.text.learning.engines.master_weights.MasterWeights.installed`)."""
        if actor.sharded:
            return {"gathered weights": float(memory.MASTER * self.policy.embedding)}
        if actor.adapter and not actor.layout:
            frozen = {"frozen weights in float32": float(memory.MASTER * actor.parameters)} if actor.number == 2 else {}
            return frozen | {"layers with merged adapters in float32": float(memory.MASTER * self.policy.in_layers)}
        return {}

    def _loading(self, local: Mapping[str, Model]) -> Parts:
        """Return the additional memory for loading models: the largest layer in float32."""
        if self.device.is_cpu or not local:
            return {}
        return {"a layer in float32": float(max(memory.MASTER * m.sizes.largest_layer for m in local.values()))}

    @property
    def uses_servers(self) -> bool:
        """Whether servers sample."""
        return not self.fine_tunes and self.config.actor_rollout_ref.rollout.name in SERVERS

    @property
    def _has_copy(self) -> bool:
        """Whether the native sampler has its own copy of the weights."""
        actor, config = self.models["actor"], self.config
        separate = placed(config).get("sampler") != placed(config)["actor"]
        return separate or actor.sharded or bool(actor.layout) or config.trainer.async_mode != "off"

    @cached_property
    def sampler(self) -> Model:
        """The policy in the form in which it samples."""
        kind = self.config.actor_rollout_ref.rollout.dtype
        number = {"auto": self.models["actor"].number, "bfloat16": 2, "float32": 4}[kind]
        return replace(self.models["actor"], sharded=False, layout=None, number=number, trained=False, adapter=0)

    @cached_property
    def samplers(self) -> int:
        """Number of copies of the policy that sample."""
        devices = placed(self.config).get("sampler", placed(self.config)["actor"])
        if not self.uses_servers:
            return len(devices)
        return max(1, len(devices) // self.config.actor_rollout_ref.rollout.tensor_model_parallel_size)

    @cached_property
    def server(self) -> ServerMemory | None:
        """The server that samples on devices of the run, if there is one."""
        rollout, sizes, model = self.config.actor_rollout_ref.rollout, self.policy, self.sampler
        if not self.uses_servers or rollout.server_urls:
            return None
        split = rollout.tensor_model_parallel_size
        kept = sizes.kv_per_token / split
        if sizes.latent:  # servers store compressed keys and values, complete on each device
            kept = sizes.layers * (sizes.latent.kv_rank + sizes.latent.rope)
        return ServerMemory(
            rollout.gpu_memory_utilization * self.device.memory * GIB,
            model.number * sizes.parameters / split,
            model.number * kept,
            self.config.data.max_prompt_length + rollout.response_length,
        )

    def _sampler_copies(self) -> Parts:
        """Return the copies of layers that the native sampler makes of the policy's weights."""
        sizes, copies = self.policy, Parts()
        if self.config.actor_rollout_ref.model.lora_rank:
            copies["layers with merged adapters"] = float(self.sampler.number * sizes.in_layers)
        if self.device.is_cpu and self.sampler.number == 2:
            copies["weights in the order of the kernels"] = 2.0 * (sizes.in_layers + sizes.embedding)
        return copies

    def _validation_prompts(self) -> int:
        """Return the number of prompts sampled together in a validation, or enough for all slots if it is unknown."""
        config = self.config
        if not config.data.val_files or (config.trainer.test_freq <= 0 and not config.trainer.val_before_train):
            return 0
        rows = validation_rows(config)
        prompts = config.actor_rollout_ref.rollout.max_num_seqs * self.samplers if rows is None else rows.count
        return min(prompts, config.data.val_batch_size or prompts)

    def _sampling(self, prompts: int, n: int) -> Parts:
        """Return the memory for sampling `n` responses to each of `prompts` prompts."""
        config, rollout, sizes = self.config, self.config.actor_rollout_ref.rollout, self.policy
        if self.server:
            return {"server (gpu_memory_utilization)": self.server.share}
        if self.uses_servers:
            return {}
        length = config.data.max_prompt_length + rollout.response_length
        slots = max(1, min(rollout.max_num_seqs, ceil(prompts * n / self.samplers)))
        longest_prompt = config.data.max_prompt_length
        prefilled = min(ceil(slots / n) * longest_prompt, max(memory.PREFILLED, longest_prompt))
        forward = memory.inference(self.sampler, prefilled)
        return {
            "KV cache": memory.kv_cache(sizes, slots, length, self.sampler.number),
            "sampler activations": forward["actor activations"],
            "sampler logits": 10.0 * slots * sizes.vocabulary,
        }

    def _transfer(self, actor: Model) -> Parts:
        """Return the memory for gathering the largest weight and sending slices of weights to servers."""
        components = Parts()
        if actor.sharded or actor.layout:
            components["gathered weights"] = float(actor.number * self.policy.embedding)
        if self.uses_servers:
            components["weights on their way"] = 2.0 * SLICE
        return components

    def host(self) -> Parts:
        """Return the host memory of a machine by component, without that of its devices."""
        components, per_node = Parts(), self.cluster.per_node
        if self.device.is_cpu:
            return components
        components["processes"] = HOST_PROCESS * per_node
        for model in self.models.values():
            for name, size in memory.idle_memory(model)[1].items():
                components[name] = size * min(per_node, model.ranks)
        gradients = [
            memory.SUM * model.trained_weights / model.shards * min(per_node, model.ranks)
            for model in self.models.values()
            if model.on_host and model.trained
        ]
        if gradients:
            components["gradients of the model that is updated"] = max(gradients)
        unsharded = [model for model in self.models.values() if not model.sharded and not model.layout]
        if unsharded:
            components["a model on its way to the device"] = max(
                memory.MASTER * float(model.total_weights) for model in unsharded
            )
        if self.config.trainer.async_save and self.config.trainer.save_freq > 0:
            components["copy of a checkpoint"] = self.checkpoint() * per_node / self.cluster.count
        return components

    def checkpoint(self) -> float:
        """Return the bytes of a checkpoint: float32 weights, and AdamW's moments of trained weights."""
        trained = [model for model in self.models.values() if model.trained]
        return float(
            sum(memory.MASTER * model.total_weights + memory.MOMENTS * model.trained_weights for model in trained)
        )

    def steps(self) -> int | None:
        """Return the number of steps of the run; None if the rows of its data are unknown."""
        trainer, rows = self.config.trainer, training_row_count(self.config, self.assumptions)
        if trainer.total_training_steps is not None:
            return trainer.total_training_steps
        if rows is None:
            return None
        return trainer.total_epochs * ceil(rows.count / self.config.data.train_batch_size)

    def plan(self) -> Plan:
        """Compute the plan."""
        times, idle = self._times()
        steps, trainer = self.steps(), self.config.trainer
        retained: int | None = 1
        if trainer.save_freq > 0:
            saved = None if steps is None else steps // trainer.save_freq + bool(steps % trainer.save_freq)
            retained = trainer.max_actor_ckpt_to_keep or saved
        elif trainer.save_freq == 0:
            retained = 0
        return Plan(
            self.cluster,
            self.groups(),
            self.host(),
            self.checkpoint(),
            retained,
            times,
            step_seconds(times, self.config.trainer.async_mode),
            idle,
            self.rows * (self.lengths.prompt + self.lengths.mean),
            steps,
            self.lengths,
            self.policy,
            self.server,
            self.host_memory,
        )

    def _times(self) -> tuple[dict[str, Interval], float | None]:
        config, models = self.config, self.models
        if self.fine_tunes:
            update = self._update("actor", config.actor_rollout_ref.actor)
            return {"update_actor": self._interval("update_actor", update)}, None
        seconds: dict[str, float] = {}
        seconds["gen"], idle = self._generation()
        if self.assumptions.reward:
            seconds["reward"] = self.assumptions.reward
        if self.recomputes_log_probs:
            seconds["old_log_prob"] = self._forward("actor")
        if self.references:  # each of several teachers processes a share of the rows
            seconds["ref"] = sum(self._forward(name) for name in self.references) / len(self.references)
        for name, phase in (("critic", "values"), ("reward_model", "reward_model")):
            if name in models:
                seconds[phase] = self._forward(name)
        if reference_is_policy(config) and asks_reference(config):
            seconds["ref"] = self._forward("actor")
        if "critic" in models:
            seconds["update_critic"] = self._update("critic", config.critic)
        seconds["update_actor"] = self._update("actor", config.actor_rollout_ref.actor)
        if full_kl_in_reward(config) and "old_log_prob" in seconds:
            seconds["old_log_prob"] *= 2
        seconds["update_weights"] = self._weights_transfer()
        return {phase: self._interval(phase, value) for phase, value in seconds.items()}, idle

    def _interval(self, phase: str, seconds: float) -> Interval:
        factor = (self.corrections or {}).get(phase)
        low, high = SPREAD if factor is None else CALIBRATED
        middle = seconds * (factor or 1.0)
        return Interval(low * middle, middle, high * middle)

    def _generation(self) -> tuple[float, float]:
        """Return the seconds of sampling, and the samplers' idle share."""
        rollout, lengths = self.config.actor_rollout_ref.rollout, self.lengths
        rows = max(1, ceil(self.rows / self.samplers))
        efficiency = CPU if self.device.is_cpu else SERVER if self.uses_servers else GPU
        shards = rollout.tensor_model_parallel_size if self.uses_servers else 1
        step = decode_step(self.sampler, self.cluster.device, efficiency, shards)
        drawn = lengths.draw(min(rows, DRAWN))
        slots = rollout.max_num_seqs
        if self.server and not self.server.missing_memory:
            slots = max(1, min(slots, int(self.server.tokens / (lengths.prompt + lengths.mean))))
        sampled = simulate(drawn, slots, step, lengths.prompt)
        prompts = rows / rollout.n * lengths.prompt
        pairs = prompts * lengths.prompt / 2
        prefill = forward_seconds(self.policy, prompts, pairs, 0, self.cluster.device, efficiency) / shards
        return sampled.seconds * rows / len(drawn) + prefill, sampled.idle

    def _pass(self, name: str, packed: bool, share: int) -> float:
        """Return the seconds of a forward pass over all rows; groups of `share` rows compute their prompt once."""
        lengths, rows, model = self.lengths, self.rows, self.models[name]
        response = lengths.mean if packed else (lengths.mean + lengths.tail) / 2  # padded to the longest of a few
        prompts = rows / (share if packed else 1)
        tokens = prompts * lengths.prompt + rows * response
        pairs = rows * (lengths.prompt + response) ** 2 / 2
        targets = rows * response if model.has_head else 0.0
        efficiency = CPU if self.device.is_cpu else GPU
        seconds = forward_seconds(model.sizes, tokens, pairs, targets, self.cluster.device, efficiency) / model.ranks
        if model.layout and model.layout.pipeline > 1:  # stages idle at the start and the end
            actor = self.config.actor_rollout_ref.actor
            micro_batches = self._micro_batches(model, self._update_limits(model, actor))
            minis = ceil(self.config.data.train_batch_size / self.mini_batch(actor))
            seconds *= 1 + (model.layout.pipeline - 1) * minis / micro_batches
        return seconds * (1.0 if model.ranks == 1 else 1.05 if self.config.trainer.balance_batch else 1.15)

    def _sharing(self, rows: int, *, dynamic: bool) -> int:
        return self.group if dynamic else max(1, min(self.group, rows))

    def _forward(self, name: str) -> float:
        model, settings = self.models[name], self.config.actor_rollout_ref
        packed = self.config.critic.model.use_remove_padding if name == "critic" else settings.model.use_remove_padding
        share = self._sharing(
            settings.rollout.log_prob_micro_batch_size_per_gpu, dynamic=settings.rollout.log_prob_use_dynamic_bsz
        )
        products = self._pass(name, packed or bool(model.layout), share)
        device, passes = self.cluster.device, self._micro_batches(model, self._inference_limits(name))
        sent = gather_seconds(model, self.cluster, passes, 0) + bus_seconds(model, device, passes, 0)
        return overlapped(products, sent) + move_seconds(model, device, update=False)

    def _update(self, name: str, role: ActorConfig | CriticConfig) -> float:
        model, config = self.models[name], self.config
        section = config.critic.model if isinstance(role, CriticConfig) else config.actor_rollout_ref.model
        packed = section.use_remove_padding or bool(model.layout)
        share = self._sharing(role.ppo_micro_batch_size_per_gpu, dynamic=role.use_dynamic_bsz)
        passes = (2 if model.adapter else 3) + (1 if model.recompute else 0)
        products = passes * self._pass(name, packed, share)
        device, micro = self.cluster.device, self._micro_batches(model, self._update_limits(model, role))
        gathers = micro * (2 if model.reshard else 1)
        # Gradients are summed over the devices in each micro-batch, not once per mini-batch.
        sent = gather_seconds(model, self.cluster, gathers, micro) + bus_seconds(model, device, gathers, micro)
        minis = ceil(config.data.train_batch_size / self.mini_batch(role))
        shards = model.shards if model.sharded else max(1, self.replicas(model) if model.layout else 1)
        optimizer = minis * optimizer_seconds(model, device, shards)
        moved = move_seconds(model, device, update=True)
        return self.epochs(role) * (overlapped(products, sent) + optimizer) + moved

    def _weights_transfer(self) -> float:
        actor, device = self.models["actor"], self.cluster.device
        size = float(actor.number * self.policy.parameters)
        if not self._has_copy and not self.uses_servers:
            return 0.0
        rate = device.bandwidth / 4 if device.is_cpu else device.link if self.cluster.nodes == 1 else device.network
        return size / (min(rate, 20.0 if self.uses_servers else rate) * 1e9)


def step_seconds(times: Mapping[str, Interval], mode: str) -> Interval:
    """Return the seconds of a step; in asynchronous runs, sampling and learning overlap."""
    sampling = [interval for phase, interval in times.items() if phase in ("gen", "reward")]
    learning = [interval for phase, interval in times.items() if phase not in ("gen", "reward")]
    zero = Interval(0.0, 0.0, 0.0)
    first, second = sum(sampling, zero), sum(learning, zero)
    if mode == "off":
        return first + second
    return Interval(max(first.low, second.low), max(first.middle, second.middle), max(first.high, second.high))


def _with_slack(resting: Parts, added: Parts, slack: float) -> Parts:
    components = resting | added
    lost = slack * (total(added) - added.get("server (gpu_memory_utilization)", 0.0))
    return components | ({"allocator": lost} if lost else {})
