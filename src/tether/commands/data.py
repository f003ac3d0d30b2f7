"""`tether data`: rows of hubs as files. Heavy modules are imported inside, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(name="data", help="Datasets of hubs as files.", no_args_is_help=True)


@data_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="See `tether data list`.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the files; default: ~/data/NAME.", show_default=False)
    ] = None,
    repository: Annotated[
        str | None,
        typer.Option(
            help="OWNER/NAME that the hub has it under; modelscope:OWNER/NAME on ModelScope.", show_default=False
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of the hub; default: the newest.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="The dataset's file, or folder of files, where it is here already; no hub is asked.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a published dataset in the layout that a run reads; goes on where it was stopped.

    For example: tether data pull gsm8k --out data/gsm8k
    """
    from tether.data.published import DATASETS, local_dataset, pull_dataset
    from tether.runtime.cache import cache_dir
    from tether.runtime.hubs import uses_modelscope
    from tether.spelling import did_you_mean

    if name not in DATASETS:
        raise ValueError(f"{name}: no such dataset; there are {', '.join(DATASETS)}.{did_you_mean(name, DATASETS)}")
    folder = (out or Path("~/data") / name).expanduser()
    dataset = DATASETS[name]
    if source is not None:
        if repository or revision:
            raise ValueError("--from reads files here: leave out --repository and --revision")
        dataset, repository, revision = local_dataset(dataset, source.expanduser())
    usual = (uses_modelscope() and dataset.modelscope) or dataset.repository
    pull_dataset(dataset, repository or usual, folder, cache_dir(), revision, typer.echo)


@data_app.command(name="list")
def list_datasets() -> None:
    """List the datasets that `tether data pull` knows, and the files that it makes of them."""
    from tether.data.published import DATASETS

    for name, dataset in DATASETS.items():
        typer.echo(f"{name:14} {dataset.repository:36} {', '.join(dataset.files)}")
