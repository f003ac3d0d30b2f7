"""`tether data`: download of published datasets. Heavy modules are imported inside, so that help is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(name="data", help="Download published datasets.", no_args_is_help=True)


@data_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Name of a dataset; `tether data list` shows them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the files; default: ~/data/NAME.")] = None,
    repository: Annotated[
        str | None, typer.Option(help="OWNER/NAME on the hub; modelscope:OWNER/NAME on ModelScope.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag of the hub; default: the newest.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Local file or folder of the dataset; nothing is downloaded.")
    ] = None,
) -> None:
    """Download a published dataset and convert it to the layout of training data; an interrupted download resumes.

    For example: tether data pull gsm8k --out data/gsm8k
    """
    from tether.integrations.hubs.catalogue import DATASETS
    from tether.integrations.hubs.local import local_dataset
    from tether.integrations.hubs.pull import pull_dataset
    from tether.runtime.cache import cache_dir
    from tether.runtime.hubs import uses_modelscope
    from tether.spelling import did_you_mean

    if name not in DATASETS:
        raise ValueError(f"{name}: no such dataset; there are {', '.join(DATASETS)}.{did_you_mean(name, DATASETS)}")
    folder = (out or Path("~/data") / name).expanduser()
    dataset = DATASETS[name]
    if source is not None:
        if repository or revision:
            raise ValueError("--from reads local files: leave out --repository and --revision")
        dataset, repository, revision = local_dataset(dataset, source.expanduser())
    default = (uses_modelscope() and dataset.modelscope) or dataset.repository
    pull_dataset(dataset, repository or default, folder, cache_dir(), revision, typer.echo)


@data_app.command(name="list")
def list_datasets() -> None:
    """List the datasets of `tether data pull` and the files that it writes."""
    from tether.integrations.hubs.catalogue import DATASETS

    for name, dataset in DATASETS.items():
        typer.echo(f"{name:14} {dataset.repository:36} {', '.join(dataset.files)}")
