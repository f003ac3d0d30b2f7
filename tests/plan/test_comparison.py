"""A run beside its plan, the correction that it leaves, and the warning of `tether train`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tether.commands.plan import Check, PlanOptions, show_plan
from tether.commands.train import memory_warning, train
from tether.config import LoadedConfig, load_config
from tether.plan.comparison import compare, corrections_file, load_corrections, save_corrections
from tether.plan.devices import Device, save_measurement
from tether.plan.planning import Planner

SETTINGS = (
    "data.train_files=[gsm8k.parquet]",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "trainer.device=cpu",
)
HERE = Device("a machine", 16, 0.4, 50, 12, is_cpu=True)


def load(words: Sequence[str], check: Check = lambda config: []) -> LoadedConfig:
    return load_config(None, list(words), check)


def test_a_run_beside_its_plan_corrects_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    loaded = load_config(None, [*SETTINGS, "actor_rollout_ref.model.path=smollm2-135m"])
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_3/run.yaml").write_text(loaded.to_yaml())
    lengths = {"response_length/mean": 100.0, "response_length/max": 200.0, "prompt_length/mean": 60.0}
    lines = [
        {
            "step": step,
            "timing_s/gen": seconds,
            "timing_s/update_actor": 50.0,
            "perf/cpu_memory_peak_gb": 3.0,
            **lengths,
        }
        for step, seconds in ((1, 99.0), (2, 10.0), (3, 12.0), (4, 14.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    results = compare(tmp_path, HERE, {})
    planned, measured = results.seconds["gen"]
    assert measured == 12.0, "the median without the first step"
    assert results.corrections["gen"] == pytest.approx(12.0 / planned.middle)
    assert results.peak
    assert results.peak[1] == 3.0 * 2**30
    save_corrections(HERE, results.corrections)
    again = compare(tmp_path, HERE, load_corrections(HERE))
    assert again.seconds["gen"][0].middle == pytest.approx(12.0)
    assert again.corrections == pytest.approx(results.corrections), "a correction is of the plan without corrections"
    assert load_corrections(Device("another", 1, 1, 1, 1)) == {}


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timing_s/gen": 1.0}\n')
    with pytest.raises(ValueError, match=r"has no global_step_N/run\.yaml; a run is compared once it has saved"):
        compare(tmp_path, HERE, {})


def test_training_warns_or_refuses_before_a_model_that_does_not_fit_is_loaded() -> None:
    words = [*SETTINGS, "actor_rollout_ref.model.path=qwen2.5-72b"]
    config = load_config(None, words).config
    warning = memory_warning(config)
    assert warning
    assert warning.startswith("this run does not fit: ")
    assert Planner(config, HERE).plan().verdict == "does not fit"
    with pytest.raises(ValueError, match=r"^this run does not fit: "):
        train(load_config(None, [*words, "trainer.check_memory=refuse"]))
    assert memory_warning(load_config(None, [*words, "trainer.check_memory=off"]).config) is None
    sizes = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    short = (*sizes, "data.max_prompt_length=16", "data.max_response_length=16")
    small = [*SETTINGS, "actor_rollout_ref.model.path=smollm2-135m", *short]
    assert memory_warning(load_config(None, small).config) is None


def test_a_busy_machine_corrects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps in which other programs had the cores are left out; of a run that has no others nothing is kept."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    loaded = load_config(None, [*SETTINGS, "actor_rollout_ref.model.path=smollm2-135m"])
    (tmp_path / "run.yaml").write_text(loaded.to_yaml())

    def write(*steps: tuple[float, float]) -> None:
        lines = [
            {"step": i, "timing_s/gen": seconds, "perf/cpu_wait_fraction": share}
            for i, (seconds, share) in enumerate(steps)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    save_measurement(HERE)
    write((90, 0.0), (30, 0.6), (40, 0.5))
    assert show_plan([str(tmp_path)], PlanOptions(), load) == 0
    assert (
        "other programs had the cores for 55% of the time, so later plans are not corrected" in capsys.readouterr().out
    )
    assert load_corrections(HERE) == {}
    write((90, 0.0), (30, 0.6), (10, 0.02))
    assert show_plan([str(tmp_path)], PlanOptions(), load) == 0
    planned = Planner(loaded.config, HERE).plan().times["gen"].middle
    assert load_corrections(HERE) == {"gen": pytest.approx(10 / planned)}
    assert load_corrections(replace(HERE, bandwidth=1.05 * HERE.bandwidth)), "measured again, with about the same rates"
    assert load_corrections(replace(HERE, teraflops=HERE.teraflops / 3)) == {}
    corrections_file().unlink()
    corrections_file().mkdir()
    capsys.readouterr()
    assert show_plan([str(tmp_path)], PlanOptions(), load) == 0
    assert "later plans are not corrected: " in capsys.readouterr().out


def test_a_run_that_is_missing_or_changed_is_one_line(tmp_path: Path) -> None:
    missing = f"{tmp_path}/my_run"
    with pytest.raises(ValueError, match=rf"^{missing}: no such file or folder\. Name a configuration, a recipe or"):
        show_plan([missing], PlanOptions(), load)
    with pytest.raises(ValueError, match=r"^trainer\.seed=2: .* is compared with the plan of its own settings\. Leave"):
        show_plan([str(tmp_path), "trainer.seed=2"], PlanOptions(), load)
