"""The alarm that sampler and trainer disagree: when it rings, what it says, and in a whole run."""

import math

import numpy as np
import pytest
import torch

from tests.runs.steps import built, first_step
from tests.runs.tiny_run import GAE, GRPO, LIGHT, measured, train
from tether.loop.alarms import ALARM, MISMATCH, MismatchAlarm, mismatch_tolerance
from tether.metrics.records import unpack
from tether.view.run import RunFolder

CUT = ["actor_rollout_ref.rollout.top_p=0.8", "actor_rollout_ref.rollout.top_k=40"]
OTHER_FORMATS = ["actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"]


def test_the_coarsest_format_sets_the_tolerance() -> None:
    assert mismatch_tolerance(torch.float32, torch.bfloat16) == mismatch_tolerance(torch.bfloat16)
    assert mismatch_tolerance(torch.float64) < mismatch_tolerance(torch.float32) < mismatch_tolerance(torch.bfloat16)


def test_it_speaks_once_and_is_measured_at_every_step() -> None:
    alarm, said = MismatchAlarm(tolerance=0.1), []
    values = [0.05, 0.1, 0.3, 0.2, math.nan, 0.0]
    rung = [alarm.check({MISMATCH: value}, said.append)[ALARM] for value in values]
    assert rung == [0, 0, 1, 1, 1, 0]
    assert len(said) == 1
    assert "rollout_corr/k3_kl is 0.3 nats per token; rounding explains at most 0.1" in said[0]
    assert alarm.check({}, said.append) == {}


def moved(overrides: list[str], perturb: float) -> dict[str, float]:
    """Train for a step; the policy moves by this share of its weights after the sampler has copied them."""
    with built(overrides) as run:
        with torch.no_grad():
            for weight in run.trainer.actor.engine.model.parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
                weight.mul_(1 + perturb * noise.to(weight.device))
        return run.trainer.advance()


@pytest.mark.parametrize("packed", [True, False])
def test_a_run_with_truncated_sampling_is_on_policy(base: list[str], packed: bool) -> None:
    metrics = first_step([*base, *GAE, *LIGHT, *CUT, f"actor_rollout_ref.model.use_remove_padding={packed}"])
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics[ALARM] == 0
    assert 1 <= metrics["training/rollout_kept_tokens/min"] < metrics["training/rollout_kept_tokens/max"] <= 40
    for extreme in ("mean", "max", "min"):
        assert metrics[f"actor/first_update/ratio_{extreme}"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/first_update/pg_clipfrac"] == metrics["actor/first_update/pg_clipfrac_lower"] == 0
    assert metrics["actor/ratio_max"] > 1 + 1e-4  # the later updates of the step
    assert abs(metrics["actor/reward_kl_penalty"]) < 1e-6  # the reference replays the cut as well


def test_truncated_sampling_records_how_many_tokens_it_chose_from(base: list[str]) -> None:
    run = RunFolder(train([*base, *GRPO, *LIGHT, *CUT, "trainer.total_training_steps=1"]))
    counts = np.concatenate([unpack(row["values"]["kept_count"]) for row in run.record("tokens", 1)["rows"]])
    metrics = measured(run.folder)[1]
    kept = "training/rollout_kept_tokens"
    assert metrics[f"{kept}/min"] <= counts.min() < counts.max() <= metrics[f"{kept}/max"]


def test_a_sampler_with_stale_weights_rings(base: list[str], capsys: pytest.CaptureFixture) -> None:
    overrides = [*base, *GRPO, *LIGHT, *OTHER_FORMATS, "trainer.logger=console"]
    assert first_step(overrides)[ALARM] == 0
    assert "warning" not in capsys.readouterr().out
    assert moved(overrides, 0.1)[ALARM] == 1
    assert "warning: sampler and trainer disagree: rollout_corr/k3_kl is" in capsys.readouterr().out


def test_a_resumed_run_does_not_say_it_again(base: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The tolerance is below every rounding, so that it rings in all steps; there is no screen, so it is logged."""
    for step in (1, 2):
        with built([*base, *GRPO, *LIGHT, "trainer.total_training_steps=2", "trainer.save_freq=1"]) as run:
            run.trainer.mismatch.tolerance = -1.0
            run.trainer.fit(lambda step=step, loop=run.trainer: loop.step_number >= step)
    assert [metrics[ALARM] for metrics in measured(run.directory).values()] == [1, 1]
    assert caplog.text.count("sampler and trainer disagree") == 1
