"""What `train` says before a run begins."""

from pathlib import Path

import pytest

from tether.commands.train import train
from tether.config import load_config


def test_notes_are_shown_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = "algorithm.kl_ctrl.kl_coef=0.5"
    named = [f"actor_rollout_ref.model.path={tmp_path}", f"data.train_files={tmp_path / 'missing.jsonl'}"]
    loaded = load_config(None, [*named, idle, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert [idle in note for note in loaded.notes] == [True]
    with pytest.raises(ValueError, match=r"missing\.jsonl|config\.json"):
        train(loaded)
    assert f"note: no effect: {idle}" in capsys.readouterr().out
