"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.yaml] [KEY=VALUE]...",
        help="A YAML file, overrides in Hydra's grammar (a.b=c, +a.b=c, ~a), or both; the last override of a key wins.",
    ),
]
ConfigPath = Annotated[
    Path | None, typer.Option("--config-path", "-cp", help="Folder of the configuration, as in Hydra.")
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "--config-name",
        "-cn",
        help="File in that folder, as in Hydra; names of verl's files, such as ppo_trainer, select verl's defaults.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads; default: trainer.num_threads of the run, else OMP_NUM_THREADS, else one per usable core.",
    ),
]
