"""`trainer.profile_steps`: a trace of some steps, of each process."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.runs.tiny_run import GRPO, LIGHT, train
from tether.config import ConfigError, load_config
from tether.loop.parts import StepProfiler
from tether.text.build import build_run

SMALL = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "data.max_response_length=3"]


def traced(file: Path) -> set[str]:
    """Names of what a trace shows."""
    with gzip.open(file, "rt") as opened:
        return {event.get("name", "") for event in json.load(opened)["traceEvents"]}


@pytest.mark.slow
def test_the_named_steps_are_traced(base: list[str]) -> None:
    run = train([*base, *GRPO, *LIGHT, *SMALL, "trainer.total_training_steps=2", "trainer.profile_steps=[2]"])
    trace = run / "profile/step_2/loop.json.gz"
    assert [*run.rglob("*.gz")] == [trace]
    shown = traced(trace)
    assert {"step 2", "gen", "old_log_prob", "update_actor", "aten::mm", "Optimizer.step#AdamW.step"} <= shown
    assert "step 1" not in shown


def test_a_step_that_fails_leaves_no_trace_and_ends_the_recording(tmp_path: Path) -> None:
    profiler = StepProfiler([1, 2], tmp_path)
    with pytest.raises(RuntimeError, match="cannot"), profiler.recording(1):
        raise RuntimeError("cannot")
    with profiler.recording(2):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_trace_that_does_not_fit_on_the_disk_is_a_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with StepProfiler([1], small_disk).recording(1):
        pass
    trace = small_disk / "step_1" / "loop.json.gz"
    assert f"{trace}: the trace cannot be written (No space left on device); the run continues" in caplog.text
    assert not trace.exists()


def test_steps_that_there_are_not_are_refused(base: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^trainer.profile_steps: there is no step 4, the run has 3"):
        build_run(load_config(None, [*base, "trainer.profile_steps=[2,4]"]))
    with pytest.raises(ConfigError, match=r"trainer.profile_steps: \[0\] is not a list of whole numbers above 0"):
        load_config(None, [*base, "trainer.profile_steps=[0]"])
