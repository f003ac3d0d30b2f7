"""`tether view`, `tether runs` and `tether compare`: what runs did, in a browser, in a file, or as JSON and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.runtime.install import pip_install
from tether.runtime.terminal import Screen
from tether.types import JsonObject

if TYPE_CHECKING:
    from tether.view.run import RunFolder

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain runs.")]
DEFAULT_LIMIT = 20
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
    token: Annotated[
        int | None,
        typer.Option(min=0, help="With --json and --sample: what a checkpoint finds likely at this token; loads it."),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="With --json: only samples for which this is true: 'reward==0 and length>200'.")
    ] = None,
    search: Annotated[str | None, typer.Option(help="With --json: only samples that contain this text.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="With --json: sort by a column; -COLUMN in descending order.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --json: maximum number of samples or prompts; default 20, without an upper limit."
        ),
    ] = None,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="With --json: the training prompts, those that were never solved first.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="With --json: the success of each task in a simulator, the worst first.")
    ] = False,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="With --json: the values of a metric by step.")
    ] = None,
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="With --json: score the samples again, in another process, and compare."),
    ] = False,
    reward: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="A reward function that --rescore and the page take, too."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
) -> None:
    """Show what runs did: curves, samples, tokens, episodes, and advice.

    For example: tether view RUN --step 40 --sort -reward --limit 5 --json
    """
    from tether.view.run import RunFolder, find_runs

    query = Query(step, sample, token, where, search, sort, limit)
    chosen = {"--prompts": prompts, "--tasks": tasks, "--key": key, "--rescore": rescore}
    given = [*query.given, *(name for name, value in chosen.items() if value)]
    if given and not as_json:
        raise ValueError(f"{given[0]}: is for --json, which prints the answer; the page has it as a filter or a link")
    folders = find_runs(runs)
    if given and len(folders) > 1:
        raise ValueError(f"{given[0]}: is asked of one run, and there are {len(folders)}; name one of them")
    _check_reward(reward, is_used=rescore or not (as_json or export))
    if as_json:
        opened = [RunFolder(folder) for folder in folders]
        if len(opened) > 1:
            answer = _comparison(opened)
        elif key:
            answer = _curves(opened[0], key, [one for one in given if one != "--key"])
        elif tasks:
            answer = _tasks(opened[0], [one for one in given if one != "--tasks"])
        elif rescore:
            answer = _rescored(opened[0], query, reward)
        elif prompts:
            answer = _prompts(opened[0], limit, [one for one in given if one not in ("--prompts", "--limit")])
        else:
            answer = _answer(opened[0], query)
        typer.echo(json.dumps(answer, ensure_ascii=False, default=str).encode(errors="backslashreplace"))
    elif export:
        from tether.view.export import write_page

        typer.echo(write_page([RunFolder(folder) for folder in folders], export))
    else:
        for package in ("starlette", "uvicorn"):  # checked before an address is printed that would not work
            if find_spec(package) is None:
                raise ValueError(
                    f"tether view needs {package}: {pip_install('view')}; --export FILE.html and --json need nothing"
                )
        from tether.view.server import serve

        serve(folders, port, typer.echo, reward)


@dataclass(frozen=True)
class Query:
    """Options that select and sort samples of a run."""

    step: int | None
    sample: int | None
    token: int | None
    where: str | None
    search: str | None
    sort: str | None
    limit: int | None

    @property
    def given(self) -> list[str]:
        """The options that were given, as written on the command line."""
        return [f"--{name}" for name, value in asdict(self).items() if value is not None]


def _curves(run: RunFolder, keys: list[str], others: list[str]) -> object:
    from tether.view.queries import curves

    if others:
        raise ValueError(f"{others[0]}: does not apply to --key, which prints all steps of a metric; leave it out")
    return curves(run, keys)


def _prompts(run: RunFolder, limit: int | None, others: list[str]) -> object:
    from tether.view.queries import prompts

    if others:
        raise ValueError(f"{others[0]}: does not apply to --prompts, which is about all steps; leave it out")
    if run.kind != "text":
        raise ValueError(f"--prompts: {run.folder} is a run in a simulator, which has no prompts")
    answer = prompts(run, limit or DEFAULT_LIMIT)
    _say_what_is_missing(len(answer["rows"]), answer["total"], "prompts")
    return answer


def _tasks(run: RunFolder, others: list[str]) -> object:
    from tether.view.queries import tasks

    if others:
        raise ValueError(f"{others[0]}: does not apply to --tasks, which is about all steps; leave it out")
    if run.kind != "control":
        raise ValueError(f"--tasks: {run.folder} is a run of a language model; --prompts lists what it was asked")
    return tasks(run)


def _token(run: RunFolder, step: int, sample: int, token: int) -> object:
    from tether.view.alternatives import compute_alternatives, request_of

    request = request_of(run, step, sample)
    if token >= (length := len(request["response_ids"])):
        raise ValueError(f"--token {token}: the response has the tokens 0 to {length - 1}")
    answer = compute_alternatives(request, step)
    return {"source": answer["source"], "token": token, "id": request["response_ids"][token], **answer["tokens"][token]}


def _check_reward(reward: str | None, *, is_used: bool) -> None:
    if reward is None:
        return
    if not is_used:
        raise ValueError("--reward: is for --rescore and for the page; leave it out")
    if re.fullmatch(r".+\.py:\w+", reward) is None:
        raise ValueError(f"--reward {reward}: name a function of a file: FILE.py:NAME")


def _rescored(run: RunFolder, query: Query, reward: str | None) -> object:
    from tether.view import queries
    from tether.view.rescoring import prepare

    if query.sample is None and query.token is None:
        rows = _samples(run, query)["rows"]
    else:
        step, sample = _one_sample(query)
        if query.token is not None:
            raise ValueError("--token: does not apply to --rescore, which scores complete responses; leave it out")
        rows = [queries.sample(run, step, sample)]
    prepared = prepare(run, rows, reward)
    return prepared.compare(prepared.score())


def _one_sample(query: Query) -> tuple[int, int]:
    """Return the step and the row of the sample that a query selects."""
    if query.sample is None:
        raise ValueError("--token: name its step and sample, too: --step N --sample ROW --token INDEX")
    if query.step is None:
        raise ValueError("--sample: name its step, too: --step N --sample ROW")
    others = [one for one in query.given if one not in ("--step", "--sample", "--token")]
    if others:
        raise ValueError(f"{others[0]}: does not apply to --sample, which is one row; leave it out")
    return query.step, query.sample


def _samples(run: RunFolder, query: Query) -> JsonObject:
    from tether.view import queries

    answer = queries.samples(
        run, step=query.step, where=query.where, text=query.search, sort=query.sort, limit=query.limit or DEFAULT_LIMIT
    )
    _say_what_is_missing(answer["shown"], answer["total"], "samples" if run.kind == "text" else "episodes")
    return answer


def _answer(run: RunFolder, query: Query) -> object:
    from tether.view import queries
    from tether.view.advice import advise

    if not query.given:
        return queries.overview(run) | {"advice": advise(run)}
    if query.sample is None and query.token is None:
        return _samples(run, query)
    step, sample = _one_sample(query)
    if query.token is not None:
        return _token(run, step, sample, query.token)
    return (queries.sample if run.kind == "text" else queries.episode)(run, step, sample)


def _say_what_is_missing(shown: int, total: int, what: str) -> None:
    if shown < total:
        typer.echo(f"{shown} of {total} {what}; --limit {total} prints all of them", err=True)


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
    table = Table("differs in", *(one["label"] for one in compared["experiments"]))
    for row in compared["differences"]:
        table.add_row(row["key"], *row["by_experiment"])
    screen.print(table)
    results = Table("experiment", "run", "seed", "steps", str(compared["key"]), "seconds of steps")
    for one in sorted(compared["results"], key=lambda one: one["experiment"]):
        values = ("-" if value is None else f"{value:.4g}" for value in (one["result"], one["seconds"]))
        results.add_row(one["experiment"], one["name"], str(one["seed"]), str(one["steps"]), *values)
    screen.print(results)
    for warning in compared["warnings"]:
        screen.print(f"warning: {warning}", soft_wrap=True)
    for verdict in compared["verdicts"]:
        screen.print(verdict["text"], soft_wrap=True)
