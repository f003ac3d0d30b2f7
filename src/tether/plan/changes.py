"""Changes that make a run fit, their cost in time, and the effect of other numbers of devices or sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from tether.config import with_values
from tether.plan.devices import GIB, Cluster
from tether.plan.memory import total
from tether.plan.planning import NEAR, Interval, Plan, Planner, step_seconds
from tether.text.sampling.config import SERVERS

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
LORA, CRITIC_LORA, LORA_RANK = "actor_rollout_ref.model.lora_rank", "critic.model.lora_rank", 32
UTILIZATION = f"{ROLLOUT}.gpu_memory_utilization"
MOVED = {"weights": "param_offload", "the optimizer": "optimizer_offload"}
"""State that can be moved to the host -> the last component of its key."""
MOST_DEVICES = 64
MAX_SLOWDOWN = 1.02
"""Two changes whose times differ by at most this factor count as equally fast."""
Values = Mapping[str, object]
Options = list[dict[str, object]]
"""Alternative settings, from the fastest to the one that needs the least memory; {} changes nothing."""


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits."""

    values: Values
    plan: Plan
    note: str = ""

    @property
    def text(self) -> str:
        """The settings in the form of command-line overrides."""
        return " ".join(f"{key}={_shown(value)}" for key, value in self.values.items())


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed(planner: Planner, values: Values) -> Planner:
    return replace(planner, config=with_values(planner.config, values))


def _fits(planner: Planner) -> bool:
    """Whether all phases need at most 90 % of device memory, and servers and hosts have enough memory."""
    limit = (1 - NEAR) * planner.cluster.device.memory * GIB
    groups = planner.groups()
    if any(total(components) > limit for group in groups for components in group.phases.values()):
        return False
    starts = not planner.server or not planner.server.missing_memory
    return starts and (planner.host_memory is None or total(planner.host()) <= planner.host_memory * GIB)


def _halvings(key: str, size: int, least: int) -> Options:
    options: Options = [{}]
    while size > least:
        size //= 2
        options.append({key: size})
    return options


def _sizes(planner: Planner) -> list[Options]:
    """Return alternatives that reduce memory without changing the results, one list for each key."""
    settings, critic, has_critic = planner.config.actor_rollout_ref, planner.config.critic, "critic" in planner.models
    actor, rollout = settings.actor, settings.rollout
    results: list[Options] = []
    if not settings.model.enable_gradient_checkpointing:
        results.append([{}, {"actor_rollout_ref.model.enable_gradient_checkpointing": True}])
    if has_critic and not critic.model.enable_gradient_checkpointing:
        results.append([{}, {"critic.model.enable_gradient_checkpointing": True}])
    for section, role in ((ACTOR, actor), *((("critic", critic),) if has_critic else ())):
        if role.use_dynamic_bsz:
            results.append(_halvings(f"{section}.ppo_max_token_len_per_gpu", role.ppo_max_token_len_per_gpu, 2048))
        else:
            results.append(_halvings(f"{section}.ppo_micro_batch_size_per_gpu", role.ppo_micro_batch_size_per_gpu, 1))
    if planner.fine_tunes:
        return results
    if not rollout.log_prob_use_dynamic_bsz:
        key = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
        results.append(_halvings(key, rollout.log_prob_micro_batch_size_per_gpu, 1))
    if rollout.name not in SERVERS:
        results.append(_halvings(f"{ROLLOUT}.max_num_seqs", rollout.max_num_seqs, 16))
    return results


def _samplers(planner: Planner) -> list[Options]:
    """Return alternatives for the configured server, or for vLLM, whose share of memory may be too small or large."""
    config, rollout = planner.config, planner.config.actor_rollout_ref.rollout
    served = rollout.name in SERVERS
    if planner.fine_tunes or (not served and (planner.device.is_cpu or config.trainer.async_mode != "off")):
        return [[{}]]
    results: list[Options] = [[{}]]
    for split in (1, 2, 4, 8):
        if config.trainer.n_gpus_per_node % split or (served and split < rollout.tensor_model_parallel_size):
            continue
        values: dict[str, object] = {} if served else {f"{ROLLOUT}.name": "vllm"}
        if split != rollout.tensor_model_parallel_size:
            values[f"{ROLLOUT}.tensor_model_parallel_size"] = split
        shares = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
        results.append([values | ({UTILIZATION: s} if s != rollout.gpu_memory_utilization else {}) for s in shares])
    return results


def _note(values: Values) -> str:
    """Return a note on the other costs of the settings, or on why they take time."""
    names = {key.rpartition(".")[2] for key in values}
    notes = []
    if "offload_policy" in names:
        notes.append("weights and gradients over the bus in each micro-batch, the optimizer runs on the host")
    if moved := [what for what, name in MOVED.items() if name in names]:
        notes.append(f"{' and '.join(moved)} over the bus in each step")
    if trains_adapters(values):
        notes.append("trains adapters alone: another result")
    return "; ".join(notes)


def trains_adapters(values: Values) -> bool:
    """Whether the settings train adapters instead of all weights."""
    return LORA in values or CRITIC_LORA in values


def _offloading(planner: Planner) -> Iterator[Values]:
    """Yield settings that move resident state of models to the host."""
    yield {}
    config = planner.config
    if planner.device.is_cpu:
        return
    actor, critic = config.actor_rollout_ref.actor, config.critic
    engine = "megatron" if actor.strategy == "megatron" else "fsdp_config"
    sections = {f"{ACTOR}.{engine}": getattr(actor, engine)}
    if "critic" in planner.models:
        where = critic if engine == "megatron" else critic.model
        sections[f"critic.{engine}" if engine == "megatron" else f"critic.model.{engine}"] = getattr(where, engine)
    choices = [tuple(sections)] if len(sections) == 1 else [(section,) for section in sections] + [tuple(sections)]
    for chosen in choices:
        moved = {f"{section}.optimizer_offload": True for section in chosen if not sections[section].optimizer_offload}
        if moved:
            yield moved
        weights = {f"{section}.param_offload": True for section in chosen if not sections[section].param_offload}
        if planner.references and not getattr(config.actor_rollout_ref.ref, engine).param_offload:
            weights[f"{REF}.{engine}.param_offload"] = True
        yield moved | weights
        if engine == "fsdp_config":
            yield {f"{section}.offload_policy": True for section in chosen}


def smallest_changes(planner: Planner, limit: int = 5) -> list[Change]:
    """Return settings that make a run fit, ordered by the resulting time of a step.

    It combines each way of offloading, LoRA on no model, the policy or both models, and the native sampler or vLLM. For
    each combination it chooses the largest micro-batches and numbers of sequences that fit, and drops settings that are
    not needed.
    """
    config = planner.config
    adapters: list[Values] = [{}]
    by_megatron, sizes = config.actor_rollout_ref.actor.strategy == "megatron", planner.policy
    adapts = not (by_megatron and (sizes.experts or sizes.latent))  # Megatron only supports adapters on dense models
    if not config.actor_rollout_ref.model.lora_rank and adapts:
        adapters.append({LORA: LORA_RANK})
        if "critic" in planner.models and not config.critic.model.lora_rank:
            adapters.append({LORA: LORA_RANK, CRITIC_LORA: LORA_RANK})
    fitting: dict[frozenset[tuple[str, object]], Values] = {}
    for moved, adapter, sampler in product(_offloading(planner), adapters, _samplers(planner)):
        results = _settings_that_fit(planner, {**moved, **adapter}, sampler)
        if results is not None:
            fitting.setdefault(frozenset(results.items()), results)
    smallest = [fitting[key] for key in fitting if not any(other < key for other in fitting)]
    changes = [Change(values, _changed(planner, values).plan(), _note(values)) for values in smallest]
    best: dict[frozenset[str], Change] = {}  # by the set of changed keys, the fastest values
    for change in sorted(changes, key=lambda change: (change.plan.step.middle, len(change.values))):
        if not any(_is_better(other, change) for other in changes if other is not change):
            best.setdefault(frozenset(change.values), change)
    return list(best.values())[:limit]


def _is_better(one: Change, other: Change) -> bool:
    """Whether a change is about as fast as another one of the same kind, with fewer settings or less host memory."""
    if one.plan.step.middle > MAX_SLOWDOWN * other.plan.step.middle or (
        trains_adapters(one.values) and not trains_adapters(other.values)
    ):
        return False
    first, second = ((len(change.values), total(change.plan.host)) for change in (one, other))
    return first != second and first[0] <= second[0] and first[1] <= second[1]


def _settings_that_fit(planner: Planner, base: Values, sampler: Options) -> dict[str, object] | None:
    """Return the settings to add to `base` so that the run fits, with those of `base` that it needs; None without."""
    for served in sampler:
        values = {**base, **served}
        sizes = _sizes(_changed(planner, values))
        chosen = {key: value for options in sizes for key, value in options[-1].items()}
        if not _fits(_changed(planner, values | chosen)):
            continue
        for options in sizes:  # the sizes of different phases are independent, so the order does not matter
            for option in options:
                tried = {key: value for key, value in chosen.items() if key not in options[-1]} | option
                if _fits(_changed(planner, values | tried)):
                    chosen = tried
                    break
        return _drop_unneeded(planner, values | chosen)
    return None


def _drop_unneeded(planner: Planner, values: dict[str, object]) -> dict[str, object]:
    """Drop settings without which the run still fits."""
    for key in list(values):
        others = {name: value for name, value in values.items() if name != key}
        if _fits(_changed(planner, others)) and not (key == UTILIZATION and _is_slower(planner, others, values)):
            values = others
    return values


def _is_slower(planner: Planner, values: Values, others: Values) -> bool:
    first, second = (_changed(planner, settings).plan().step.middle for settings in (values, others))
    return first > MAX_SLOWDOWN * second


def largest_micro_batch(planner: Planner) -> tuple[str, int] | None:
    """Return the key of the actor's micro-batch, and the largest value with which its update fits; None if none does.

    The value is at most a device's share of a mini-batch.
    """
    actor = planner.config.actor_rollout_ref.actor
    dynamic = actor.use_dynamic_bsz
    key = f"{ACTOR}.ppo_max_token_len_per_gpu" if dynamic else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    rows = planner.rows_of_mini_batch(planner.models["actor"], planner.mini_batch(actor))
    low, high = (1024, max(1024, rows * sum(planner.longest))) if dynamic else (1, rows)

    def fits(size: int) -> bool:
        changed = _changed(planner, {key: size})
        limit = (1 - NEAR) * changed.cluster.device.memory * GIB
        return all(total(g.phases["update_actor"]) <= limit for g in changed.groups() if "update_actor" in g.phases)

    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return key, low


def more_devices(planner: Planner) -> tuple[int, list[Change]] | None:
    """Return a larger number of devices on which a run fits, and the settings needed there; None if there is none.

    The number is doubled up to `MOST_DEVICES`, with at most eight per machine.
    """
    count = planner.cluster.count
    while 2 * count <= MOST_DEVICES:
        count *= 2
        larger = _with_devices(planner, min(count, 8), max(1, count // 8))
        if _fits(larger):
            return count, []
        if changes := smallest_changes(larger, limit=1):
            return count, changes
    return None


@dataclass(frozen=True)
class Case:
    """A line of a what-if table."""

    what: str
    plan: Plan
    step: Interval
    best: bool = False
    """Whether no other line is at least as fast with less device time."""

    @property
    def device_seconds(self) -> float:
        """Seconds of a step times the number of devices."""
        return self.step.middle * self.plan.cluster.count


def _with_devices(planner: Planner, per_node: int, nodes: int) -> Planner:
    values = {"trainer.n_gpus_per_node": per_node, "trainer.nnodes": nodes}
    return replace(planner, config=with_values(planner.config, values))


def what_if(planner: Planner) -> dict[str, list[Case]]:
    """Return tables for other numbers of devices, micro-batch sizes, numbers of responses, and separate samplers."""
    config, cluster = planner.config, planner.cluster
    tables: dict[str, list[Case]] = {"devices": [], "micro-batch": [], "responses of a prompt": []}
    if not config.cluster.component_placement and not config.actor_rollout_ref.rollout.nnodes:
        for count in _counts(cluster):
            nodes = max(1, count // 8) if count > cluster.per_node else 1
            tables["devices"] += _case(_with_devices(planner, count // nodes, nodes), f"{count}")
        if not planner.fine_tunes:
            tables["samplers"] = _sampler_placement_cases(planner)
    actor = config.actor_rollout_ref.actor
    key = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    size: int = getattr(actor, key)
    for other in sorted({max(1, size // 4), max(1, size // 2), size, size * 2, size * 4}):
        altered = with_values(config, {f"{ACTOR}.{key}": other})
        tables["micro-batch"] += _case(replace(planner, config=altered), f"{key}={other}")
    n = planner.group
    for other in () if planner.fine_tunes else sorted({max(1, n // 2), n, n * 2}):
        altered = with_values(config, {f"{ROLLOUT}.n": other})
        tables["responses of a prompt"] += _case(replace(planner, config=altered), f"rollout.n={other}")
    return {name: _mark_pareto_optimal(cases) for name, cases in tables.items() if len(cases) > 1}


def _counts(cluster: Cluster) -> list[int]:
    count = cluster.count
    return sorted({max(1, count // 4), max(1, count // 2), count, count * 2, count * 4})


def _case(planner: Planner, what: str) -> list[Case]:
    try:
        plan = planner.plan()
    except ValueError:  # the layout is impossible with this number of devices
        return []
    return [Case(what, plan, plan.step)]


def _sampler_placement_cases(planner: Planner) -> list[Case]:
    """Return plans for sampling on all devices, or on half of them: in turn, one step ahead, fully asynchronous."""
    together, config = planner.plan(), planner.config
    cases = [Case("together", together, together.step)]
    per_node, nodes = planner.cluster.per_node, planner.cluster.nodes
    if per_node * nodes == 1 or planner.device.is_cpu or config.actor_rollout_ref.rollout.name in SERVERS:
        return cases
    in_node, machines = (per_node // 2, nodes) if nodes == 1 else (per_node, nodes // 2)
    half = {"trainer.n_gpus_per_node": in_node, "trainer.nnodes": machines}
    half |= {f"{ROLLOUT}.n_gpus_per_node": in_node, f"{ROLLOUT}.nnodes": machines}
    count = per_node * nodes // 2
    try:
        plan = replace(planner, config=with_values(config, half)).plan()
    except ValueError:
        return cases
    plan = replace(plan, cluster=together.cluster)
    flowing, gen = dict(plan.times), plan.times["gen"]
    used = 1 - (plan.idle or 0.0)  # asynchronous samplers do not wait for the longest response
    flowing["gen"] = Interval(gen.low * used, gen.middle * used, gen.high * used)
    steps = {
        "in turn": step_seconds(plan.times, "off"),
        "one step ahead": step_seconds(plan.times, "one_step_off"),
        "fully asynchronous": step_seconds(flowing, "fully_async"),
    }
    return [*cases, *(Case(f"{count} sample, {count} learn, {how}", plan, step) for how, step in steps.items())]


def _mark_pareto_optimal(cases: list[Case]) -> list[Case]:
    def is_dominated(case: Case) -> bool:
        return any(
            other.step.middle <= case.step.middle
            and other.device_seconds <= case.device_seconds
            and (other.step.middle, other.device_seconds) != (case.step.middle, case.device_seconds)
            for other in cases
            if other.plan.verdict != "does not fit"
        )

    return [replace(case, best=case.plan.verdict != "does not fit" and not is_dominated(case)) for case in cases]


def plans_by_length(planner: Planner) -> list[tuple[str, Plan]]:
    """Return plans for other lengths of responses, because the actual lengths are unknown before a run."""
    lengths, assumptions = planner.lengths, planner.assumptions
    results = []
    for what, mean, tail in (
        ("a quarter of the mean", lengths.mean / 4, lengths.tail / 2),
        ("half of the mean", lengths.mean / 2, lengths.tail),
        ("as assumed", lengths.mean, lengths.tail),
        ("no longer tail than the mean", lengths.mean, lengths.mean),
        ("twice the mean", min(lengths.limit, lengths.mean * 2), float(lengths.limit)),
    ):
        changed = replace(planner, assumptions=replace(assumptions, mean=max(1.0, mean), tail=max(1.0, mean, tail)))
        results.append((f"{what} ({changed.lengths.mean:.0f}, 99 % below {changed.lengths.tail:.0f})", changed.plan()))
    return results
