"""What would make a run fit, what it costs in time, and what other devices or sizes would give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tether.config import RunConfig, with_values
from tether.plan.devices import GIB, Cluster
from tether.plan.memory import total
from tether.plan.planning import NEAR, DeviceGroup, Interval, Plan, Planner, step_of
from tether.text.sampling.config import SERVERS

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
LORA_RANK = 32
MOST_MOVES = 6
OFFLOADED, LORA = 0.02, 0.1
"""What a change has to take away more than another one, as a share of what is too much, because it costs more."""
Values = Mapping[str, object]


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits."""

    values: Values
    plan: Plan
    note: str = ""

    @property
    def text(self) -> str:
        """The settings as they are given on the command line."""
        return " ".join(f"{key}={_shown(value)}" for key, value in self.values.items())


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _excess(groups: tuple[DeviceGroup, ...], memory: float) -> float:
    """Return the bytes by which the phases together need more than 90 % of the devices."""
    limit = (1 - NEAR) * memory * GIB
    return sum(max(0.0, total(components) - limit) for group in groups for components in group.phases.values())


def _moves(config: RunConfig) -> Iterator[tuple[Values, str]]:
    """Yield settings that lower the need for memory and leave the result as it is, and LoRA, which does not."""
    settings, critic = config.actor_rollout_ref, config.critic
    actor, rollout = settings.actor, settings.rollout
    for section, role in ((ACTOR, actor), *((("critic", critic),) if critic.enable else ())):
        if role.use_dynamic_bsz:
            key, size, least = f"{section}.ppo_max_token_len_per_gpu", role.ppo_max_token_len_per_gpu, 2048
        else:
            key, size, least = f"{section}.ppo_micro_batch_size_per_gpu", role.ppo_micro_batch_size_per_gpu, 1
        while size > least:
            size //= 2
            yield {key: size}, ""
    if rollout.name not in SERVERS:
        size = rollout.log_prob_micro_batch_size_per_gpu
        while size > 1 and not rollout.log_prob_use_dynamic_bsz:
            size //= 2
            yield {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": size}, ""
        slots = rollout.max_num_seqs
        while slots > 16:
            slots //= 2
            yield {f"{ROLLOUT}.max_num_seqs": slots}, ""
    else:
        for share in (0.4, 0.3, 0.2):
            if share < rollout.gpu_memory_utilization:
                yield {f"{ROLLOUT}.gpu_memory_utilization": share}, ""
    if rollout.name not in SERVERS and config.trainer.device != "cpu" and config.trainer.async_mode == "off":
        for ranks in (1, 2, 4, 8):
            if config.trainer.n_gpus_per_node % ranks == 0:
                values = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": ranks}
                yield values | {f"{ROLLOUT}.gpu_memory_utilization": 0.8}, "vLLM gives its memory back between rollouts"
    if not settings.model.enable_gradient_checkpointing:
        yield {"actor_rollout_ref.model.enable_gradient_checkpointing": True}, ""
    if critic.enable and not critic.model.enable_gradient_checkpointing:
        yield {"critic.model.enable_gradient_checkpointing": True}, ""
    yield from _offloading(config)
    if not settings.model.lora_rank and actor.strategy != "megatron":
        yield {"actor_rollout_ref.model.lora_rank": LORA_RANK}, "trains adapters alone: another result"


def _offloading(config: RunConfig) -> Iterator[tuple[Values, str]]:
    if config.trainer.device == "cpu":
        return
    actor, critic = config.actor_rollout_ref.actor, config.critic
    engine = "megatron" if actor.strategy == "megatron" else "fsdp_config"
    sections = {f"{ACTOR}.{engine}": getattr(actor, engine)}
    if critic.enable:
        where = critic if engine == "megatron" else critic.model
        sections[f"critic.{engine}" if engine == "megatron" else f"critic.model.{engine}"] = getattr(where, engine)
    for name in ("optimizer_offload", "param_offload"):
        values = {f"{section}.{name}": True for section, now in sections.items() if not getattr(now, name)}
        if name == "param_offload" and not getattr(config.actor_rollout_ref.ref, engine).param_offload:
            values[f"{REF}.{engine}.{name}"] = True
        if values:
            yield values, "moves over the bus in each step"
    if engine == "fsdp_config":
        yield (
            {f"{section}.offload_policy": True for section in sections},
            "the optimizer runs on the host: slow, and takes its memory",
        )


def smallest_changes(planner: Planner, limit: int = 5) -> list[Change]:
    """Return the settings that make a run fit, in the order of the time that a step then takes.

    Each is a single change if one suffices, else a combination in which each part is needed.
    """
    config, memory = planner.config, planner.cluster.device.memory
    fitting: dict[frozenset[str], Change] = {}
    for values, note in _moves(config):
        keys = frozenset(values)
        if keys in fitting:  # a larger value of the same key suffices
            continue
        changed = replace(planner, config=with_values(config, values))
        if not _excess(changed.groups(), memory):
            fitting[keys] = Change(values, changed.plan(), note)
    if not fitting and (results := _combined(planner)):
        fitting[frozenset(results.values)] = results
    return sorted(fitting.values(), key=lambda change: change.plan.step.middle)[:limit]


def _combined(planner: Planner) -> Change | None:
    """Return a combination of changes: each time that which takes most of what is too much away."""
    memory, values, notes = planner.cluster.device.memory, dict[str, object](), list[str]()
    excess = first = _excess(planner.groups(), memory)
    for _ in range(MOST_MOVES):
        current = with_values(planner.config, values)
        candidates: list[tuple[float, float, int, Values, str]] = []
        for move, note in _moves(current):
            remaining = _excess(replace(planner, config=with_values(current, move)).groups(), memory)
            cost = LORA if "lora" in str(move) else OFFLOADED if note else 0.0  # what costs no time comes first
            candidates.append((remaining + cost * first, remaining, len(candidates), move, note))
        if not candidates or min(candidates)[1] >= excess:
            return None
        _, excess, _, move, note = min(candidates)
        values |= move
        notes += [note] if note and note not in notes else []
        if not excess:
            needed = _needed(planner, values)
            changed = replace(planner, config=with_values(planner.config, needed))
            return Change(needed, changed.plan(), "; ".join(notes))
    return None


def _needed(planner: Planner, values: dict[str, object]) -> dict[str, object]:
    """Leave out what is not needed for the others to suffice."""
    memory = planner.cluster.device.memory
    for key in list(values):
        others = {name: value for name, value in values.items() if name != key}
        if not _excess(replace(planner, config=with_values(planner.config, others)).groups(), memory):
            values = others
    return values


def largest_micro_batch(planner: Planner) -> tuple[str, int] | None:
    """Return the key of the actor's micro-batch, and its largest value that fits; None if not even the least does."""
    actor = planner.config.actor_rollout_ref.actor
    dynamic = actor.use_dynamic_bsz
    key = f"{ACTOR}.ppo_max_token_len_per_gpu" if dynamic else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    limit = actor.ppo_mini_batch_size * planner.config.actor_rollout_ref.rollout.n

    def fits(size: int) -> bool:
        changed = replace(planner, config=with_values(planner.config, {key: size}))
        limit = (1 - NEAR) * changed.cluster.device.memory * GIB
        return all(total(g.phases["update_actor"]) <= limit for g in changed.groups() if "update_actor" in g.phases)

    low, high = (1024, 1 << 20) if dynamic else (1, limit)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return key, low


@dataclass(frozen=True)
class Case:
    """A line of a what-if table."""

    what: str
    plan: Plan
    step: Interval
    best: bool = False
    """Whether no other line has less device time and is as fast."""

    @property
    def device_seconds(self) -> float:
        """Seconds of a step x devices."""
        return self.step.middle * self.plan.cluster.count


def _on(planner: Planner, per_node: int, nodes: int) -> Planner:
    values = {"trainer.n_gpus_per_node": per_node, "trainer.nnodes": nodes}
    return replace(planner, config=with_values(planner.config, values))


def what_if(planner: Planner) -> dict[str, list[Case]]:
    """Return tables of other numbers of devices, micro-batches and responses, and of samplers beside the trainers."""
    config, cluster = planner.config, planner.cluster
    tables: dict[str, list[Case]] = {"devices": [], "micro-batch": [], "responses of a prompt": []}
    if not config.cluster.component_placement and not config.actor_rollout_ref.rollout.nnodes:
        for count in _counts(cluster):
            nodes = max(1, count // 8) if count > cluster.per_node else 1
            tables["devices"] += _case(_on(planner, count // nodes, nodes), f"{count}")
        tables["samplers"] = _split(planner)
    actor = config.actor_rollout_ref.actor
    key = "ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    size: int = getattr(actor, key)
    for other in sorted({max(1, size // 4), max(1, size // 2), size, size * 2, size * 4}):
        altered = with_values(config, {f"{ACTOR}.{key}": other})
        tables["micro-batch"] += _case(replace(planner, config=altered), f"{key}={other}")
    n = config.actor_rollout_ref.rollout.n
    for other in sorted({max(1, n // 2), n, n * 2}):
        altered = with_values(config, {f"{ROLLOUT}.n": other})
        tables["responses of a prompt"] += _case(replace(planner, config=altered), f"rollout.n={other}")
    return {name: _pareto(cases) for name, cases in tables.items() if len(cases) > 1}


def _counts(cluster: Cluster) -> list[int]:
    count = cluster.count
    return sorted({max(1, count // 4), max(1, count // 2), count, count * 2, count * 4})


def _case(planner: Planner, what: str) -> list[Case]:
    try:
        plan = planner.plan()
    except ValueError:  # a layout that this number of devices cannot have
        return []
    return [Case(what, plan, plan.step)]


def _split(planner: Planner) -> list[Case]:
    """Return the same devices with samplers on all of them, and on half of them: in turn, ahead, and far ahead."""
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
    used = 1 - plan.idle  # samplers that never wait for the longest response
    flowing["gen"] = Interval(gen.low * used, gen.middle * used, gen.high * used)
    steps = {
        "in turn": step_of(plan.times, "off"),
        "one step ahead": step_of(plan.times, "one_step_off"),
        "fully asynchronous": step_of(flowing, "fully_async"),
    }
    return [*cases, *(Case(f"{count} sample, {count} learn, {how}", plan, step) for how, step in steps.items())]


def _pareto(cases: list[Case]) -> list[Case]:
    def beaten(case: Case) -> bool:
        return any(
            other.step.middle <= case.step.middle
            and other.device_seconds <= case.device_seconds
            and (other.step.middle, other.device_seconds) != (case.step.middle, case.device_seconds)
            for other in cases
            if other.plan.verdict != "does not fit"
        )

    return [replace(case, best=case.plan.verdict != "does not fit" and not beaten(case)) for case in cases]


def by_lengths(planner: Planner) -> list[tuple[str, Plan]]:
    """Return the plan for other lengths of responses, which nobody knows before a run."""
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
