"""`tether recipe`: the recipes that come with tether, and editable copies of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tether.spelling import did_you_mean

_IN_A_CLONE = Path(__file__).parents[3] / "recipes"
FOLDER = _IN_A_CLONE if _IN_A_CLONE.is_dir() else Path(__file__).parents[1] / "recipes"
"""Folder of the recipes: the clone's for an editable install, else the copy in the package."""


def recipe_names() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/README.md"))


def recipe_file(name: str) -> Path | None:
    """Return the file of `tether train NAME`: from a copy in the working directory, or else from the recipe itself.

    Raises:
        ValueError: the recipe uses further files, with paths relative to the working directory, that are missing.
    """
    copy, shipped = Path("recipes", name, "run.yaml"), FOLDER / name / "run.yaml"
    if copy.is_file():
        return copy
    if name not in recipe_names() or not shipped.is_file():
        return None
    settings = re.sub(r"#.*", "", shipped.read_text(encoding="utf-8"))
    if used := [file for file in re.findall(r"recipes/[\w./-]+", settings) if not Path(file).exists()]:
        raise ValueError(f"{name}: this recipe needs {used[0]}. Copy it here first: tether recipe {name}")
    return shipped


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe, and the recipes whose files it uses, to ``folder/recipes``, and return the new folders.

    Raises:
        ValueError: there is no such recipe, or a copy already exists.
    """
    names = recipe_names()
    if name not in names:
        raise ValueError(f"{name}: no such recipe.{did_you_mean(name, names)} Recipes: {', '.join(names)}")
    selected = [name]
    for recipe_name in selected:  # grows during the iteration
        files = (path for path in (FOLDER / recipe_name).glob("*.*") if path.suffix != ".md")
        texts = [path.read_text(encoding="utf-8") for path in files]
        selected += [other for other in names if other not in selected and any(f"recipes/{other}/" in t for t in texts)]
    copies = [folder / "recipes" / recipe_name for recipe_name in selected]
    if copies[0].exists():
        raise ValueError(f"{copies[0]}: exists already. Move it away, or give another folder: --to FOLDER")
    for recipe_name, copy in zip(selected, copies, strict=True):
        if not copy.exists():
            shutil.copytree(FOLDER / recipe_name, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copies


def recipe(
    name: Annotated[str | None, typer.Argument(help="Recipe to copy; without it, all are listed.")] = None,
    to: Annotated[Path, typer.Option(help="Folder in which recipes/NAME is created.")] = Path(),
) -> None:
    """List the recipes, or copy one to edit and run: its README with results, configuration and other files."""
    if name is None:
        for listed in recipe_names():
            title = (FOLDER / listed / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            typer.echo(f"{listed:18} {title}")
        typer.echo("copy one: tether recipe NAME")
        return
    for copy in copy_recipe(name, to):
        typer.echo(f"copied to {copy}")
    if (to / "recipes" / name / "run.yaml").is_file():
        typer.echo(f"run it, in {to.absolute()}: tether train recipes/{name}/run.yaml")
