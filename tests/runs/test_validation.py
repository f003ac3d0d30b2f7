"""Validation in a real run: every row exactly once, and the same result however it is cut into batches."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs.steps import built
from tests.runs.tiny_run import GAE, GRPO, LIGHT, measured, train
from tether.commands.evaluate import evaluate
from tether.loop.protocol import EvaluationResult
from tether.text.sampling.protocol import NoiseKey

SAMPLED = [f"actor_rollout_ref.rollout.val_kwargs.{option}" for option in ("do_sample=True", "temperature=1.0", "n=2")]
ROWS = 7
CORE = {"val-core/tiny/sums/reward/mean@{n}", "val-core/tiny/other/reward/mean@{n}"}


def validate(overrides: list[str], batch_sizes: list[int | None]) -> tuple[list[EvaluationResult], list[list[int]]]:
    """Return the results, and the numbers of responses that were shown meanwhile."""
    shown: list[list[int]] = [[] for _ in batch_sizes]
    with built(overrides) as run:
        rollouts = run.trainer.rollouts
        evaluation = rollouts.evaluation
        assert evaluation
        results = [
            replace(evaluation, batch_size=size).run(
                rollouts.collector, NoiseKey(1, 0), lambda done, total, seen=seen: seen.append(done)
            )
            for size, seen in zip(batch_sizes, shown, strict=True)
        ]
    return results, shown


@pytest.mark.parametrize(("sampling", "n"), [([], 1), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_every_row_once_whatever_the_batch(base: list[str], sampling: list[str], n: int):
    """And the means are those of the samples."""
    (whole, *others), shown = validate([*base, *GRPO, *LIGHT, *sampling], [None, 1, 3, 100])
    for numbers in shown:
        assert numbers == sorted(numbers)
        assert numbers[-1] == ROWS * n
    assert len(shown[0]) > ROWS * n  # told while none has ended, too: all may end together
    for source in ("tiny/sums", "tiny/other"):
        rewards = [sample.reward for sample in whole.samples if sample.data_source == source]
        assert whole.metrics[f"val-core/{source}/reward/mean@{n}"] == pytest.approx(sum(rewards) / len(rewards))
    assert Counter(sample.index for sample in whole.samples) == dict.fromkeys(range(ROWS), n)
    core = {key for key in whole.metrics if key.startswith("val-core/")}
    assert {key.format(n=n) for key in CORE} <= core
    assert len({sample.response for sample in whole.samples}) > 1
    for other in others:
        assert other.samples == whole.samples
        assert other.metrics == pytest.approx(whole.metrics)


def test_evaluating_a_checkpoint_gives_what_training_measured(base: list[str], capsys):
    one_step = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=1"]
    directory = train([*base, *GAE, *LIGHT, *SAMPLED, *one_step])
    evaluate(str(directory), None, [])
    said = json.loads((directory / "eval_global_step_1.json").read_text())
    tested = {key: value for key, value in measured(directory)[1].items() if key.startswith("val-")}
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
