"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.yaml] [KEY=VALUE]...",
        help="A YAML file, overrides in Hydra's grammar (a.b=c, +a.b=c, ~a), or both; later ones win.",
        show_default=False,
    ),
]
ConfigPath = Annotated[
    Path | None,
    typer.Option("--config-path", "-cp", help="Hydra's: folder of the configuration.", show_default=False),
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "--config-name",
        "-cn",
        help="Hydra's: file in that folder; ppo_trainer and the like stand for verl's defaults.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads; default: trainer.num_threads of the run, else OMP_NUM_THREADS, else one per usable core.",
        show_default=False,
    ),
]
