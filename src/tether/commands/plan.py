"""`tether plan`: estimates what a run needs before it is started."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tether.config import LoadedConfig, Problem, RunConfig
from tether.integrations import integration
from tether.plan.assumptions import DEFAULT_ASSUMPTIONS, Assumptions, training_row_count
from tether.plan.changes import largest_micro_batch, more_devices, plans_by_length, smallest_changes, what_if
from tether.plan.comparison import (
    TIMING,
    compare,
    corrections_file,
    load_corrections,
    load_run_config,
    phase_medians,
    save_corrections,
)
from tether.plan.devices import gib, host_memory, measured, read_device
from tether.plan.planning import Plan, Planner
from tether.plan.report import (
    Row,
    as_data,
    case_table,
    change_lines,
    length_table,
    memory_table,
    short,
    span,
    summary,
    time_table,
)
from tether.runtime.core_clock import BUSY
from tether.runtime.terminal import Screen

Check = Callable[[RunConfig], Sequence[Problem]]
LoadConfig = Callable[[Sequence[str], Check], LoadedConfig]
"""Loads the configuration from the arguments, and applies an additional check."""
DOES_NOT_FIT = 1
HERE = (None, "this")
"""Values of --device and --nodes that stand for this machine."""
WIDTH, GAP = 120, 2
"""Width of the output, and the gap between two columns of a table."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of `tether plan`."""

    device: str | None = None
    nodes: int | None = None
    price: str | None = None
    as_json: bool = False
    brief: bool = False
    host_memory: float | None = None
    """GiB of host memory per machine; None: measured if the plan is for this machine, else unknown."""
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS


def read_price(text: str | None) -> tuple[float, str] | None:
    """Return the price of a device per hour and its currency.

    Raises:
        ValueError: the number or the currency is missing.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]{3}|[€$£¥])|([€$£¥])\s*(\d+(?:\.\d+)?)", text.strip())
    if match is None:
        why = "names no currency" if re.fullmatch(r"[\d.]+(/h)?", text.strip()) else "is no price"
        raise ValueError(f"--price {text}: {why}. Write the price of a device for an hour, for example 2.5EUR")
    return float(match[1] or match[4]), (match[2] or match[3]).upper()


def load_for(arguments: Sequence[str], options: PlanOptions, load: LoadConfig) -> LoadedConfig:
    """Load a configuration, verl's script or RLinf's file, for the devices of the options.

    Raises:
        ValueError: the configuration or the device is invalid, or a run in a simulator is planned for another machine.
    """
    more = [] if options.nodes is None else [f"trainer.nnodes={options.nodes}"]
    if options.device not in HERE:
        device, count = read_device(options.device)
        more.append(f"trainer.device={'cpu' if device.is_cpu else 'cuda'}")
        more += [] if count is None else [f"trainer.n_gpus_per_node={count}"]

    def check(config: RunConfig) -> list[Problem]:
        for option, value in (("--device", options.device), ("--nodes", options.nodes)):
            if config.env.train.id is not None and value not in HERE:
                raise ValueError(
                    f"{option} {value}: a run in a simulator (env.train.id={config.env.train.id}) is planned for this "
                    f"machine alone, where the simulator is measured. Leave {option} out"
                )
        return []

    if arguments and arguments[0].endswith(".sh"):
        script, *script_arguments = arguments
        yaml, _ = integration("verl", "command").translate(Path(script), script_arguments)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{Path(script).stem}.yaml"
            file.write_text(yaml, encoding="utf-8")
            return load([str(file), *more], check)
    return load([*arguments, *more], check)


def show_plan(arguments: Sequence[str], options: PlanOptions, load: LoadConfig) -> int:
    """Print the plan of a run, and return the exit code: 1 if it does not fit."""
    price = read_price(options.price)
    first, *others = arguments or [""]
    if first and Path(first).is_dir():
        if others:
            raise ValueError(f"{others[0]}: {first} is compared with the plan of its own settings. Leave this out")
        return show_comparison(Path(first), options)
    if "/" in first and "=" not in first and not Path(first).exists():
        raise ValueError(f"{first}: no such file or folder. Name a configuration, a recipe or the folder of a run")
    loaded = load_for(arguments, options, load)
    if loaded.config.env.train.id is not None:
        return show_control_plan(loaded, options)
    device = read_device(options.device)[0] if options.device else measured()
    is_here = options.device in HERE
    host = options.host_memory or (host_memory() if is_here else None)
    planner = Planner(loaded.config, device, options.assumptions, load_corrections(device), host)
    plan = planner.plan()
    changes = [] if plan.verdict == "fits" else smallest_changes(planner)
    fits = plan.verdict != "does not fit" and plan.share <= 1
    largest = largest_micro_batch(planner) if fits else None
    if options.as_json:
        typer.echo(json.dumps(as_data(plan, changes, largest), indent=1))
    else:
        screen = Screen()
        for line in summary(plan, price, _source_of_steps(loaded, options.assumptions)):
            screen.print(line, soft_wrap=True)
        if is_here and plan.cluster.count > 1:
            screen.print(_division(plan), soft_wrap=True)
        if changes:
            screen.print("\nit fits with one of these, by the time that a step then takes:")
            for line in change_lines(changes):
                screen.print(line, soft_wrap=True)
        elif plan.verdict != "fits":
            screen.print("\nno setting makes it fit: take more devices, larger ones, or a smaller model")
            if not is_here and (more := more_devices(planner)):
                count, needed = more
                screen.print(f"it fits on {count} of them{' with' if needed else ''}")
                for line in change_lines(needed):
                    screen.print(line, soft_wrap=True)
        if largest:
            screen.print(f"largest micro-batch that fits for the update: {largest[0]}={largest[1]}", soft_wrap=True)
        if not options.brief:
            _print_tables(screen, planner, plan)
    return 0 if fits else DOES_NOT_FIT


def show_control_plan(loaded: LoadedConfig, options: PlanOptions) -> int:
    """Print the plan of a run in a simulator, and return the exit code: 1 if it does not fit.

    Raises:
        ValueError: this kind of run cannot be planned.
    """
    screen = Screen(stderr=options.as_json)
    screen.print(f"{loaded.config.env.train.id}: measuring the simulator and the policy, which takes some seconds")
    from tether.control.plan import plan_control  # imports torch

    plan = plan_control(loaded)
    if options.as_json:
        typer.echo(json.dumps(plan.as_data(), indent=1))
    else:
        for line in plan.summary():
            screen.print(line, soft_wrap=True)
        if not options.brief:
            screen.print("\ntime", style="bold")
            spans = [(phase, span(interval)) for phase, interval in plan.phases.items()]
            _print_table(screen, (("phase", "seconds of a training step"), spans))
    return 0 if plan.fits else DOES_NOT_FIT


def _source_of_steps(loaded: LoadedConfig, assumptions: Assumptions) -> str:
    """Return how the number of steps was determined."""
    trainer, rows = loaded.config.trainer, training_row_count(loaded.config, assumptions)
    if trainer.total_training_steps is not None or rows is None:
        return "trainer.total_training_steps"
    s = "" if trainer.total_epochs == 1 else "s"
    default = ", the default" if loaded.sources["trainer.total_epochs"] == "default" else ""
    return f"{rows.count:,} rows, {rows.source}; {trainer.total_epochs} epoch{s}{default}"


def _division(plan: Plan) -> str:
    """Return a sentence about the meaning of several ranks without `--device`."""
    count, here = plan.cluster.count, plan.cluster.per_node
    if plan.cluster.device.is_cpu:
        return f"this one machine is divided: each of its {here} processes has 1/{here} of the memory and the rates"
    return f"each of the {count} devices is taken to be like the one that `tether doctor` measured here"


def show_comparison(run: Path, options: PlanOptions) -> int:
    """Print a run's measurements next to its plan, save the corrections for its device, and return the exit code 0."""
    loaded = load_run_config(run)
    if loaded.config.env.train.id is not None:
        return _show_control_comparison(run, loaded, options)
    device = read_device(options.device)[0] if options.device else measured()
    results = compare(run, device, load_corrections(device))
    message = f"later plans for {device.name} are corrected by these times ({corrections_file()})"
    if results.busy > BUSY:
        message = f"other programs had the cores for {results.busy:.0%} of the time, so later plans are not corrected"
    else:
        try:
            save_corrections(device, results.corrections)
        except ValueError as error:  # a read-only home directory
            message = f"later plans are not corrected: {error}"
    rows = [
        (phase, span(planned), f"{seconds:.2f} s", f"{seconds / planned.middle:.2f}")
        for phase, (planned, seconds) in results.seconds.items()
        if planned.middle
    ]
    if results.peak:
        planned_peak, peak = results.peak
        rows.append(("memory", gib(planned_peak), gib(peak), f"{peak / planned_peak:.2f}"))
    _print_comparison(rows, options)
    if not options.as_json:
        Screen().print(message, soft_wrap=True)
    return 0


def _show_control_comparison(run: Path, loaded: LoadedConfig, options: PlanOptions) -> int:
    """Print the measurements of a run in a simulator next to its plan, which is measured now."""
    from tether.control.plan import plan_control  # imports torch

    medians, plan = phase_medians(run), plan_control(loaded)
    rows = [
        (phase, span(planned), f"{short(seconds)} s", f"{seconds / planned.middle:.2f}")
        for phase, planned in plan.phases.items()
        if (seconds := medians.get(f"{TIMING}{phase}")) and planned.middle
    ]
    _print_comparison(rows, options)
    if plan.busy_note and not options.as_json:
        Screen().print(f"planned from a measurement of {plan.measured:.1f} s{plan.busy_note}", soft_wrap=True)
    return 0


def _print_comparison(rows: Sequence[Row], options: PlanOptions) -> None:
    if options.as_json:
        columns = ("phase", "planned", "measured", "measured / planned")
        typer.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
    else:
        _print_table(Screen(), (("phase", "planned", "measured", "/ planned"), rows))


def _print_tables(screen: Screen, planner: Planner, plan: Plan) -> None:
    for title, table in (
        ("memory", memory_table(plan)),
        ("time", time_table(plan)),
        ("what depends on the lengths (--response-mean, --response-tail)", length_table(plans_by_length(planner))),
        *((f"what if: {name}", case_table(cases)) for name, cases in what_if(planner).items()),
    ):
        screen.print(f"\n{title}", style="bold")
        _print_table(screen, table)


def _print_table(screen: Screen, table: tuple[Row, Sequence[Row]]) -> None:
    from rich.table import Table  # slow to import

    columns, rows = table
    widths = [max(map(len, cells)) + GAP for cells in zip(columns, *rows, strict=True)]
    widest = widths.index(max(widths))
    shown = Table(box=None, padding=(0, GAP, 0, 0))
    for index, column in enumerate(columns):
        limit = max(20, WIDTH - sum(widths) + widths[widest]) if index == widest else None
        shown.add_column(column, overflow="fold", max_width=limit)
    for row in rows:
        shown.add_row(*row)
    screen.print(shown)
