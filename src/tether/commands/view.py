"""`tether view`, `tether runs` and `tether compare`: what runs did, in a browser, in a file, or as JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.runtime.install import pip_install
from tether.runtime.terminal import Screen

if TYPE_CHECKING:
    from tether.view.run import RunFolder

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def view(
    runs: Folders,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write one HTML file that needs no server and no network.")
    ] = None,
    as_json: AsJson = False,
    step: Annotated[int | None, typer.Option(help="With --json: the training step; default: all.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="With --json: this sample or episode of the step, in full.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="With --json: only samples for which this is true: 'reward==0 and length>200'.")
    ] = None,
    search: Annotated[str | None, typer.Option(help="With --json: only samples that contain this text.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="With --json: sort by a column; -COLUMN in descending order.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="With --json: at most this many samples.")] = 20,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="With --json: the values of a metric by step.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
) -> None:
    """Show what runs did: curves, samples, tokens, episodes, and advice.

    For example: tether view checkpoints/tether/gsm8k; or tether view RUN --step 40 --sort -reward --json
    """
    from tether.view.run import RunFolder, find_runs

    folders = find_runs(runs)
    if as_json:
        opened = [RunFolder(folder) for folder in folders]
        if len(opened) > 1:
            answer = _comparison(opened)
        elif key:
            from tether.view.queries import curves

            answer = curves(opened[0], key)
        else:
            answer = _answer(opened[0], step, sample, where, search, sort, limit)
        typer.echo(json.dumps(answer, ensure_ascii=False, default=str).encode(errors="backslashreplace"))
    elif export:
        from tether.view.export import write_page

        typer.echo(write_page([RunFolder(folder) for folder in folders], export))
    else:
        try:
            import starlette  # noqa: F401  # before an address is printed that would lead nowhere
            import uvicorn  # noqa: F401
        except ModuleNotFoundError as error:
            raise ValueError(
                f"tether view needs {error.name}: {pip_install('view')}; --export FILE.html and --json need nothing"
            ) from error
        from tether.view.server import serve

        serve(folders, port, typer.echo)


def _answer(
    run: RunFolder,
    step: int | None,
    sample: int | None,
    where: str | None,
    search: str | None,
    sort: str | None,
    limit: int,
) -> object:
    from tether.view import queries
    from tether.view.advice import advise

    if sample is not None:
        if step is None:
            raise ValueError("--sample: name its step, too: --step N --sample ROW")
        return (queries.sample if run.kind == "text" else queries.episode)(run, step, sample)
    if step is None and where is None and search is None and sort is None:
        return queries.overview(run) | {"advice": advise(run)}
    return queries.samples(run, step=step, where=where, text=search, sort=sort, limit=limit)


def _comparison(runs: Sequence[RunFolder]) -> object:
    from tether.view.compare import comparison

    return comparison(runs)


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders that contain runs; default: checkpoints.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder: kind, model, task, steps, best score, last activity, state."""
    from rich.table import Table

    from tether.view.compare import run_table
    from tether.view.run import find_runs

    listed = run_table(find_runs(folders or [Path("checkpoints")]))
    if as_json:
        typer.echo(json.dumps(listed, ensure_ascii=False, default=str))
        return
    table = Table("name", "kind", "model", "task", "steps", "best score", "last activity", "state")
    for run in listed:
        task = run["task"] if isinstance(run["task"], str | None) else ", ".join(Path(one).name for one in run["task"])
        table.add_row(
            run["name"],
            run["kind"],
            Path(run["model"]).name if run["model"] else "-",
            task or "-",
            f"{run['steps']}/{run['total_steps']}" if run["total_steps"] else str(run["steps"]),
            "-" if run["best"] is None else f"{run['best']:.4g} ({run['score']})",
            f"{datetime.fromtimestamp(run['last_activity']):%Y-%m-%d %H:%M}",
            run["state"],
        )
    Screen().print(table)


def compare(runs: Folders, as_json: AsJson = False) -> None:
    """Compare runs: what differs in configuration and code, their results, and whether the seeds tell them apart."""
    from rich.table import Table

    from tether.view.compare import comparison
    from tether.view.run import RunFolder, find_runs

    folders = find_runs(runs)
    if len(folders) < 2:
        raise ValueError(f"{folders[0]}: one run is compared with nothing; name two or more")
    compared, screen = comparison([RunFolder(folder) for folder in folders]), Screen()
    if as_json:
        typer.echo(json.dumps(compared, ensure_ascii=False, default=str))
        return
    table = Table("differs in", *compared["names"])
    for row in compared["differences"]:
        table.add_row(row["key"], *map(str, row["values"]))
    screen.print(table)
    results = Table("run", "steps", str(compared["key"]), "seconds of steps")
    for one in compared["results"]:
        values = ("-" if value is None else f"{value:.4g}" for value in (one["result"], one["seconds"]))
        results.add_row(one["name"], str(one["steps"]), *values)
    screen.print(results)
    for verdict in compared["verdicts"]:
        screen.print(verdict["text"], soft_wrap=True)
