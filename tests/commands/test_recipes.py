"""Recipes by name: listed, copied with what they use, and run without a clone."""

from pathlib import Path

import pytest

from tether.commands.cli import _split
from tether.commands.recipes import FOLDER, copy_recipe, recipe_file, recipe_names
from tether.config import load_config


def test_every_recipe_is_listed_and_those_of_one_file_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_names() == sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert _split(["quickstart", "trainer.seed=2"]) == (FOLDER / "quickstart/run.yaml", ["trainer.seed=2"])
    assert load_config(recipe_file("quickstart"), []).config.critic.enable
    assert recipe_file("no-such-recipe") is None
    assert _split(["trainer.seed", "data.seed=2"]) == (None, ["trainer.seed", "data.seed=2"])  # refused as an override
    with pytest.raises(ValueError, match=r"quickstrat: no such recipe. Did you mean quickstart\? .*KEY=VALUE"):
        _split(["quickstrat"])
    with pytest.raises(ValueError, match=r"needs recipes/vla-reach/reach\.py.*tether recipe flow-reach"):
        recipe_file("flow-reach")


def test_a_copy_has_the_files_that_the_recipe_uses_and_is_what_its_name_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert copy_recipe("flow-reach", Path()) == [Path("recipes/flow-reach"), Path("recipes/vla-reach")]
    assert recipe_file("flow-reach") == Path("recipes/flow-reach/run.yaml")
    Path("recipes/flow-reach/run.yaml").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        copy_recipe("flow-reach", Path())
    assert Path("recipes/flow-reach/run.yaml").read_text() == "mine"
    with pytest.raises(ValueError, match="Did you mean quickstart"):
        copy_recipe("quickstrat", Path())


def test_copied_recipes_find_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = []
    for name in recipe_names():
        monkeypatch.chdir(FOLDER.parent)
        copy_recipe(name, tmp_path / name)
        monkeypatch.chdir(tmp_path / name)
        for file in Path("recipes", name).glob("*.yaml"):
            settings = "\n".join(line.partition("#")[0] for line in file.read_text().splitlines())
            paths = [word.partition(":")[0].strip("{},'\"") for word in settings.split()]
            missing += [(str(file), path) for path in paths if path.startswith("recipes/") and not Path(path).exists()]
    assert missing == []
