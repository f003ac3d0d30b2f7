"""Validation in a real run: every row exactly once, and the same result however it is cut into batches."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.tiny_run import GAE, measured, train
from tether.assembly.run import build_run
from tether.commands.evaluate import evaluate
from tether.config import load_config
from tether.rollout.protocol import NoiseKey
from tether.trainer.protocol import EvaluationResult

SAMPLED = [f"actor_rollout_ref.rollout.val_kwargs.{option}" for option in ("do_sample=True", "temperature=1.0", "n=2")]
ROWS = 7
CORE = {"val-core/tiny/sums/reward/mean@{n}", "val-core/tiny/other/reward/mean@{n}"}


def validate(overrides: list[str], batch_sizes: list[int | None]) -> list[EvaluationResult]:
    run = build_run(load_config(None, overrides))
    try:
        rollouts = run.trainer.rollouts
        evaluation = rollouts.evaluation
        assert evaluation
        return [replace(evaluation, batch_size=size).run(rollouts.collector, NoiseKey(1, 0)) for size in batch_sizes]
    finally:
        run.close()


@pytest.mark.parametrize(("sampling", "n"), [([], 1), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_every_row_once_whatever_the_batch(base: list[str], sampling: list[str], n: int):
    whole, *others = validate([*base, *GAE, *sampling], [None, 1, 3, ROWS, 100])
    assert Counter(sample.index for sample in whole.samples) == dict.fromkeys(range(ROWS), n)
    core = {key for key in whole.metrics if key.startswith("val-core/")}
    assert {key.format(n=n) for key in CORE} <= core
    assert len({sample.response for sample in whole.samples}) > 1
    for other in others:
        assert other.samples == whole.samples
        assert other.metrics == pytest.approx(whole.metrics)


def test_validation_means_are_those_of_the_samples(base: list[str]):
    (result,) = validate([*base, *GAE], [3])
    for source in ("tiny/sums", "tiny/other"):
        rewards = [sample.reward for sample in result.samples if sample.data_source == source]
        assert result.metrics[f"val-core/{source}/reward/mean@1"] == pytest.approx(sum(rewards) / len(rewards))


def test_evaluating_a_checkpoint_gives_what_training_measured(base: list[str], capsys):
    directory = train([*base, *GAE, *SAMPLED, "trainer.save_freq=3", "trainer.test_freq=3"])
    evaluate(str(directory), None, [])
    said = json.loads((directory / "eval_global_step_3.json").read_text())
    tested = {key: value for key, value in measured(directory)[3].items() if key.startswith("val-")}
    assert tested
    assert said["metrics"] == pytest.approx(tested)
    assert len(said["samples"]) == 2 * ROWS
    assert "val-core/tiny/sums/reward/mean@2" in capsys.readouterr().out


def test_evaluating_what_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="nothing: no such file or directory"):
        evaluate(str(tmp_path / "nothing"), None, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no checkpoint here"):
        evaluate(str(tmp_path / "empty"), None, [])
