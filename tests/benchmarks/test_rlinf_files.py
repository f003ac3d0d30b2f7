"""The count of RLinf's files: each run has one outcome, presets are no runs, and keys are counted by file."""

from pathlib import Path

import pytest

from benchmarks.rlinf_files import counts, import_all, reasons
from tests.integrations.rlinf.recipes import write_recipe


def test_each_file_of_a_run_has_one_outcome(tmp_path: Path) -> None:
    for name in ("maniskill_ppo_mlp", "frankasim_ppo_mlp"):
        write_recipe(tmp_path, name)
    good = (tmp_path / "maniskill_ppo_mlp.yaml").read_text()
    (tmp_path / "a.yaml").write_text(good.replace("  update_epoch: 8", "  update_epoch: 8\n  nonsense: 1"))
    (tmp_path / "b.yaml").write_text(good.replace("task_type: embodied", "task_type: sft"))
    (tmp_path / "c.yaml").write_text(good.replace("env/maniskill_pick_cube@env.train", "env/nowhere@env.train"))
    (tmp_path / "d.yaml").write_text("not: {a: run\n")
    files = import_all(tmp_path)
    assert {file.path.name: file.outcome for file in files} == {
        "maniskill_ppo_mlp.yaml": "whole",
        "frankasim_ppo_mlp.yaml": "refused by name",
        "a.yaml": "unknown keys",
        "b.yaml": "another kind of run",
        "c.yaml": "contradictory or incomplete",
    }
    assert counts(files)[2:] == [
        "| whole | 1 | 1 |", "| refused by name | 1 | 1 |", "| another kind of run | 1 | 1 |",
        "| contradictory or incomplete | 1 | 1 |", "| unknown keys | 1 | 1 |", "| all | 5 | 5 |",
    ]  # fmt: skip
    (simulator,) = (row for row in reasons(files) if row.startswith("| `env.train.env_type`"))
    assert simulator.startswith("| `env.train.env_type` | 1 | 1 |")  # of training and of tests
    assert any(row.startswith("| `algorithm.nonsense` | 1 | 1 | unknown key of RLinf") for row in reasons(files))


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file of RLinf's"):
        import_all(tmp_path)
