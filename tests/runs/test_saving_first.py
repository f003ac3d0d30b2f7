"""What cannot be saved is refused before the first step, of every engine; nothing of the attempt is left."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs.steps import built
from tests.tiny import tiny_model
from tether.text.learning.engines import local
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.packing import MicroBatching
from tether.text.models.save import write_model


def test_of_a_large_model_a_share_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    engine = LocalEngine(model, MicroBatching(max_rows=1), save=write_model, compute_dtype=torch.bfloat16)
    engine.save(tmp_path / "all")
    engine.check_saving(tmp_path / "small")
    monkeypatch.setattr(local, "CHECKED_BYTES", 20_000)
    engine.check_saving(tmp_path / "large")
    saved = {name: load_file(tmp_path / name / "model.safetensors") for name in ("all", "small", "large")}
    assert saved["small"].keys() == saved["all"].keys() > saved["large"].keys() > set()
    for name in ("small", "large"):
        assert all(torch.equal(value, saved["all"][key]) for key, value in saved[name].items())


def test_a_run_whose_policy_cannot_be_saved_does_not_begin(
    base: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    options = [*base, f"trainer.default_local_dir={folder}", "trainer.save_freq=1", "trainer.total_training_steps=1"]
    with built(options) as run:
        generation = run.trainer.actor.engine.model.generation_config
        generation.do_sample, generation.temperature = False, 0.5  # which transformers does not write
        with pytest.raises(
            ValueError,
            match=r"the actor cannot be saved, which a check before the first step showed \((?s:.*)temperature",
        ):
            run.trainer.fit()
        assert run.trainer.step_number == 0
        assert [path.name for path in folder.glob(".*") if path.is_dir()] == []
        run.trainer.schedule = replace(run.trainer.schedule, save_freq=0)
        run.trainer.fit()
        assert run.trainer.step_number == run.trainer.schedule.total_steps
    assert "the actor cannot be saved" in caplog.text
