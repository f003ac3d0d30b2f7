"""A run that names no `trainer.save_freq` leaves a model behind."""

import pytest

import tether
from tests.runs.tiny_run import GRPO, LIGHT
from tether.loop.loop import Schedule


def test_the_last_step_is_saved_unless_nothing_is():
    saved = {freq: [step for step in range(1, 6) if Schedule(5, freq).saves_at(step)] for freq in (-1, 0, 2)}
    assert saved == {-1: [5], 0: [], 2: [2, 4, 5]}


def test_a_finished_run_has_a_model(base, tmp_path, capsys):
    one_step = [*GRPO, *LIGHT, "trainer.total_training_steps=1", "trainer.preflight=False"]
    defaults = [setting for setting in base if not setting.startswith("trainer.save_freq")]
    run = tether.train(overrides=[*defaults, *one_step])
    assert run.checkpoint == run.folder / "global_step_1"
    assert "checkpoints: about 0.0 GB, after the last step; " in capsys.readouterr().out
    assert len(run.model.generate(["2+2?"], max_new_tokens=2)) == 1
    none = tether.train(overrides=[*base, *one_step, f"trainer.default_local_dir={tmp_path / 'none'}"])
    with pytest.raises(ValueError, match="no checkpoint was saved"):
        none.model  # noqa: B018
