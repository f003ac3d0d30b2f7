"""`tether status`: the last logged step of a run, and the state of its ranks and servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tether.runtime.disk import read_json, reading
from tether.runtime.ranks import SERVERS_STATUS, STATUS
from tether.runtime.run_lock import LOCK, owner_of
from tether.runtime.terminal import Screen, clock
from tether.types import JsonObject

DELETE = "Delete it; an active run writes it again"


RUNS = Path("checkpoints")
"""Default folder of runs, in the working folder (`trainer.default_local_dir`)."""


def status(
    run: Annotated[
        Path | None, typer.Argument(help="The folder of a run; without it, all runs below checkpoints/ are listed.")
    ] = None,
) -> None:
    """Show the last step of a run, the activity of its ranks and servers, and the last error."""
    if run is None:
        show_runs(RUNS)
    else:
        show_status(run)


def show_runs(folder: Path) -> None:
    """Print a line for each run below a folder (`PROJECT/EXPERIMENT`), the latest last.

    Raises:
        ValueError: there is no run below the folder.
    """
    from tether.metrics.loggers import METRICS_FILE

    runs = {file.parent: file.stat().st_mtime for name in (LOCK, METRICS_FILE) for file in folder.glob(f"*/*/{name}")}
    if not runs:
        raise ValueError(f"{folder}: no run below it; name the folder of a run (trainer.default_local_dir)")
    screen = Screen()
    for run in sorted(runs, key=lambda run: runs[run]):
        try:
            line = _last_step(run)
        except ValueError as error:  # a broken file of one run must not hide other runs
            line = str(error)
        screen.print(line, soft_wrap=True)


def show_status(folder: Path) -> None:
    """Print the state of the run in a folder.

    Raises:
        ValueError: there is no run in the folder.
    """
    from tether.metrics.loggers import METRICS_FILE

    if owner_of(folder) is None and not (folder / METRICS_FILE).exists():
        raise ValueError(f"{folder}: no run here; name the folder of a run (trainer.default_local_dir)")
    screen = Screen()
    screen.print(_last_step(folder), soft_wrap=True)
    for name, show in ((STATUS, _show_ranks), (SERVERS_STATUS, _show_servers)):
        file = folder / name
        if file.exists():
            with reading(file, DELETE):
                show(read_json(file, dict, DELETE), screen)


def _last_step(folder: Path) -> str:
    from tether.metrics.loggers import METRICS_FILE, read_metrics

    owner, metrics = owner_of(folder), folder / METRICS_FILE
    steps = read_metrics(folder) if metrics.exists() else {}
    logged = f"step {max(steps)}, logged {_ago(metrics.stat().st_mtime)}" if steps else "no step logged yet"
    return f"{folder}: {f'runs as {owner}' if owner else 'not running'}; {logged}"


def _show_ranks(status: JsonObject, screen: Screen) -> None:
    from rich.table import Table  # slow to import

    table = Table(
        "rank", "process", "does", "since", "memory (peak)", "on its device", "seconds without a sign of life"
    )
    for rank in status["ranks"]:
        doing = (str(rank["doing"]), _ago(rank["since"]), _size(rank["host"]), _size(rank["device"]))
        table.add_row(str(rank["rank"]), str(rank["process"]), *doing, str(rank["silent"]))
    screen.print(f"ranks, seen {_ago(status['time'])}:")
    screen.print(table)
    if status["failure"]:
        screen.print(f"last error, {_ago(status['failed'])}: {status['failure']}", soft_wrap=True)


def _show_servers(status: JsonObject, screen: Screen) -> None:
    from rich.table import Table  # slow to import

    table = Table("server", "state", "since", "failures", "last failure")
    for server in status["servers"]:
        failures = (str(server["failures"]), str(server["last_failure"]))
        table.add_row(str(server["server"]), str(server["state"]), _ago(server["since"]), *failures)
    screen.print(f"servers, written {_ago(status['time'])}:")
    screen.print(table)


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{clock(seconds)} ago"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count else "-"
