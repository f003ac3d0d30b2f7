"""`tether status`: the last logged step of a run, and the state of its ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tether.runtime.disk import read_json, reading
from tether.runtime.ranks import STATUS
from tether.runtime.run_lock import owner_of
from tether.runtime.terminal import Screen
from tether.types import JsonObject

DELETE = "Delete it; an active run writes it again"


def status(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Show the last step of a run, the activity of its ranks, and the last error."""
    show_status(run)


def show_status(folder: Path) -> None:
    """Print the state of the run in a folder.

    Raises:
        ValueError: there is no run in the folder.
    """
    from tether.metrics.loggers import METRICS_FILE, read_metrics

    screen, metrics = Screen(), folder / METRICS_FILE
    owner = owner_of(folder)
    if owner is None and not metrics.exists():
        raise ValueError(f"{folder}: no run here; name the folder of a run (trainer.default_local_dir)")
    steps = read_metrics(folder) if metrics.exists() else {}
    logged = f"step {max(steps)}, logged {_ago(metrics.stat().st_mtime)}" if steps else "no step logged yet"
    screen.print(f"{folder}: {f'runs as {owner}' if owner else 'not running'}; {logged}", soft_wrap=True)
    file = folder / STATUS
    if not file.exists():
        return
    with reading(file, DELETE):
        _show_ranks(read_json(file, dict, DELETE), screen)


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


def _ago(when: float) -> str:
    return f"{max(0.0, time.time() - when):.0f} s ago"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count else "-"
