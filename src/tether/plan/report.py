"""A plan as text and as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tether.plan.changes import Case, Change
from tether.plan.devices import GIB, gib
from tether.plan.memory import Parts, total
from tether.plan.planning import NEAR, Interval, Plan

LISTED = 5
"""Maximum number of components listed per phase; further ones are summed."""
SHOWN = 0.05 * GIB
"""Size in bytes below which a component is not listed, since it would be shown as 0.0 GiB."""
Row = Sequence[str]


def span(interval: Interval, unit: str = "s") -> str:
    """Format an interval."""
    return f"{short(interval.low)} to {short(interval.high)} {unit}"


def short(value: float) -> str:
    """Format a number with two significant digits, or as an integer from 10 on."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def cause(plan: Plan) -> str:
    """Return a sentence with the phase of the peak and its largest components."""
    group = plan.fullest_group
    components = group.phases[group.peak_phase]
    first, *others = sorted(components, key=lambda name: -components[name])[:3]
    largest = f"{first} ({gib(components[first])})"
    remainder = " and ".join(f"{name} ({gib(components[name])})" for name in others)
    where = "" if len(plan.groups) == 1 else f" on devices {group.devices[0]} to {group.devices[-1]}"
    return f"The peak is in {group.peak_phase}{where}: most of it is {largest}, then {remainder}."


def memory_table(plan: Plan) -> tuple[Row, list[Row]]:
    """Return the table of phases and their memory components."""
    rows: list[Row] = []
    for group in plan.groups:
        for phase, components in group.phases.items():
            sizes = sorted(((size, name) for name, size in components.items()), reverse=True)
            listed = [*sizes[:LISTED], (sum(size for size, _ in sizes[LISTED:]), "other")]
            text = ", ".join(f"{name} {size / GIB:.1f}" for size, name in listed if size >= SHOWN)
            devices = f"{group.devices[0]}-{group.devices[-1]} " if len(plan.groups) > 1 else ""
            rows.append((f"{devices}{phase}", gib(total(components)), text))
    return ("phase", "a device", "of which, GiB"), rows


def time_table(plan: Plan) -> tuple[Row, list[Row]]:
    """Return the table of seconds per phase."""
    rows: list[Row] = [(phase, span(interval)) for phase, interval in plan.times.items()]
    return ("phase", "seconds of a step"), [*rows, ("step", span(plan.step))]


def verdict(plan: Plan) -> str:
    """Return the sentence of the verdict, with its reason."""
    if plan.problem:
        return f"does not fit: {plan.problem}"
    need = f"{gib(plan.peak)} of {plan.cluster.device.memory:.1f} GiB, {plan.share:.0%}. {cause(plan)}"
    if plan.verdict != "try":
        return f"{plan.verdict}: {need}"
    distance = f"fits by {1 - plan.share:.0%}" if plan.share <= 1 else f"does not fit by {plan.share - 1:.0%}"
    return f"{distance}, within the error of this estimate ({NEAR:.0%}), so try it: {need}"


def summary(plan: Plan, price: tuple[float, str] | None, where_from: str = "") -> list[str]:
    """Return the lines in front of the tables.

    Args:
        plan: the plan.
        price: price of a device per hour, and its currency.
        where_from: how the number of steps was determined.
    """
    cluster = plan.cluster
    device = cluster.device
    lines = [
        f"{plan.actor.named} ({plan.actor.source}): {plan.actor.parameters / 1e9:.2f}B weights; {cluster.count} x "
        f"{device.name} ({device.memory:.1f} GiB each)",
        verdict(plan),
    ]
    disk = "unknown number of" if plan.retained is None else str(plan.retained)
    host = f"host memory of a machine {gib(total(plan.host))}; " if plan.host else ""
    lines.append(f"{host}a checkpoint takes {gib(plan.checkpoint)} of disk, {disk} kept at the end")
    rate = Interval(*(plan.tokens / s for s in (plan.step.high, plan.step.middle, plan.step.low)))
    lines.append(f"a step of {plan.tokens:,.0f} tokens takes {span(plan.step)}: {span(rate, 'tokens/s')}")
    if plan.hours is None:
        lines.append("the number of steps is not known: give --rows, the rows of data.train_files")
    else:
        energy = device.watts * cluster.count / 1000
        run = f"{plan.steps:,} steps{f' ({where_from})' if where_from else ''}: {span(plan.hours, 'hours')}"
        if energy:
            used = Interval(*(energy * h for h in (plan.hours.low, plan.hours.middle, plan.hours.high)))
            run += f", {span(used, 'kWh')}"
        if price:
            each, currency = price
            paid = [each * cluster.count * h for h in (plan.hours.low, plan.hours.middle, plan.hours.high)]
            run += f", {span(Interval(*paid), currency)}"
        lines.append(run)
    return lines


def change_lines(changes: Iterable[Change]) -> list[str]:
    """Return two lines for each change that makes the run fit: its settings, and its time and memory."""
    lines = []
    for change in changes:
        plan = change.plan
        host = f", {gib(total(plan.host))} of host memory" if plan.host else ""
        note = f"; {change.note}" if change.note else ""
        lines += [change.text, f"    {gib(plan.peak)} of a device{host}, a step takes {span(plan.step)}{note}"]
    return lines


def case_table(cases: Iterable[Case]) -> tuple[Row, list[Row]]:
    """Return a what-if table; * marks Pareto-optimal lines."""
    rows: list[Row] = [
        (c.what, gib(c.plan.peak), c.plan.verdict, span(c.step), f"{c.device_seconds:,.0f}", "*" if c.best else "")
        for c in cases
    ]
    return ("", "peak", "verdict", "step", "device x s", "best"), rows


def length_table(plans: Sequence[tuple[str, Plan]]) -> tuple[Row, list[Row]]:
    """Return a table of plans for different lengths of responses."""
    if any(plan.idle is None for _, plan in plans):
        return ("tokens: mean, tail", "step"), [(what, span(plan.step)) for what, plan in plans]
    rows: list[Row] = [(what, span(plan.step), f"{plan.idle:.0%}") for what, plan in plans]
    return ("responses: mean, tail", "step", "samplers idle"), rows


def _data(components: Parts) -> dict[str, float]:
    return {name: round(size) for name, size in components.items()}


def as_data(plan: Plan, changes: Iterable[Change], largest: tuple[str, int] | None) -> dict[str, object]:
    """Return the plan as plain data; sizes are in bytes, times are [low, middle, high] in seconds."""
    cluster = plan.cluster
    return {
        "verdict": plan.verdict,
        "problem": plan.problem,
        "peak_bytes": round(plan.peak),
        "device_bytes": round(cluster.device.memory * GIB),
        "cause": cause(plan),
        "device": cluster.device.name,
        "devices": cluster.count,
        "parameters": plan.actor.parameters,
        "memory": [
            {
                "devices": [group.devices[0], group.devices[-1]],
                "models": list(group.models),
                "phases": {phase: _data(components) for phase, components in group.phases.items()},
            }
            for group in plan.groups
        ],
        "host_bytes": _data(plan.host),
        "checkpoint_bytes": round(plan.checkpoint),
        "checkpoints_kept": plan.retained,
        "seconds": {phase: list(_triple(interval)) for phase, interval in (*plan.times.items(), ("step", plan.step))},
        "tokens_per_step": plan.tokens,
        "steps": plan.steps,
        "hours": list(_triple(plan.hours)) if plan.hours else None,
        "samplers_idle": plan.idle,
        "changes": [{"values": dict(c.values), "peak_bytes": round(c.plan.peak),
                     "host_bytes": round(total(c.plan.host)), "seconds": list(_triple(c.plan.step)),
                     "note": c.note} for c in changes],
        "largest_micro_batch": dict([largest]) if largest else None,
    }  # fmt: skip


def _triple(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.middle, interval.high
