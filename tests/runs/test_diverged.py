"""Weights that diverged are never saved, whoever saves them, and what is said names the checkpoint that is good."""

import re
from pathlib import Path

import pytest
import torch

from tests.runs.loops import Loop, Text
from tests.runs.tiny_run import LIGHT
from tether.loop.checkpoint import WeightsLost


def poison(run, value: float) -> None:
    engine = run.trainer.actor.engine
    parameters = list((engine.policy if hasattr(engine, "policy") else engine.model).parameters())
    with torch.no_grad():
        parameters[-1].view(-1)[-1] = value


NAN, INF, SLOW = float("nan"), float("-inf"), pytest.mark.slow


@pytest.mark.parametrize(
    ("loop", "value"),
    [("text", NAN), ("control", INF), pytest.param("text", INF, marks=SLOW), pytest.param("control", NAN, marks=SLOW)],
    indirect=["loop"],
)
def test_weights_that_diverged_are_not_saved(loop: Loop, tmp_path: Path, value: float) -> None:
    run = loop.build(loop.overrides(tmp_path, "trainer.preflight=False"))
    trainer, said = run.trainer, list[str]()
    trainer.loggers.warn = said.append
    try:
        trainer.rollouts.begin(0)
        poison(run, value)
        trainer.step_number = 1
        says = r"the actor diverged: after step 1 its weights hold NaN.* \(first .*\), so they are not saved, and no "
        with pytest.raises(WeightsLost, match=says + "checkpoint was saved before"):
            trainer.save()
        assert list(tmp_path.glob("*global_step*")) == []

        poison(run, 0.5)
        trainer.save()
        good = re.escape(str(tmp_path / "global_step_1"))
        poison(run, value)
        trainer.step_number = 2
        with pytest.raises(KeyError), trainer._saving_on_error():
            raise KeyError("what the next step meets")
        (line,) = said
        assert re.match(
            r"stopping \(KeyError\), and no checkpoint could be saved: .* after step 2 .* The last good checkpoint is "
            rf"{good}; the same command resumes from it\. Lower actor_rollout_ref\.actor\.optim\.lr",
            line,
        )
        assert [path.name for path in tmp_path.glob("*global_step*")] == ["global_step_1"]
    finally:
        run.close()
    loop.build(loop.overrides(tmp_path)).close()  # it resumes


@pytest.mark.parametrize("rate", [pytest.param("1e37", marks=SLOW), "1e30"])
def test_a_run_that_diverges_saves_nothing(inputs: Path, tmp_path: Path, rate: str) -> None:
    """It ends at its first save, or before it where the sampler meets the weights."""
    rates = [f"{model}.optim.lr={rate}" for model in ("actor_rollout_ref.actor", "critic")]
    loop = Text(inputs, *LIGHT)
    with pytest.raises(ValueError, match=r"no checkpoint was saved before|logits are NaN"):
        loop.train(loop.overrides(tmp_path, *rates, "trainer.preflight=False", "trainer.test_freq=-1"))
    assert list(tmp_path.glob("*global_step*")) == []
