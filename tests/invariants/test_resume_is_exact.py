"""Promise 2 for each option that keeps state: stopped and gone on is never stopped. tests/runs/test_resume.py kills.

For an option that is new: a row in OPTIONS, or a call of `tests.runs.resume.assert_resume_is_exact`.
"""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.resume import assert_resume_is_exact, assert_same_end
from tests.runs.tiny_run import GAE, GRPO, LIGHT, base_overrides, train, write_inputs
from tether.config import load_config
from tether.text.build import build_run
from tether.text.data.prompts import PromptSampler
from tether.text.learning.advantages import KLReward
from tether.text.learning.engines.local import LocalEngine

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
COEFFICIENT = "actor/reward_kl_penalty_coeff"
pytestmark = pytest.mark.usefixtures("compiled_kernels")
NO_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA needs peft")
SAMPLED_VALIDATION = [
    f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1", f"{ROLLOUT}.val_kwargs.n=2",
    "trainer.test_freq=2",
]  # fmt: skip

OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "adaptive KL, warm-up, cosine": (GAE, {"must_change": [COEFFICIENT, "actor/lr", "critic/lr"]}),
    "several epochs, sampled validation, shuffled mini-batches, drawn tokens": (  # three steps an epoch
        [*GRPO, f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=0", *SAMPLED_VALIDATION],
        {"must_change": ["actor/kl_loss"], "stop_after": 3, "total": 4},
    ),
    "running reward statistics, master weights": (
        [
            *("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.normalize_rewards=running", f"{ROLLOUT}.n=4"),
            *(f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ROLLOUT}.dtype=bfloat16"),
        ],
        {"must_change": ["reward/running_mean"]},
    ),
    "greedy baseline": (["algorithm.adv_estimator=remax"], {}),
    "adapters on a changed model": (
        [
            *(*GAE, f"{MODEL}.lora_rank=2", f"{MODEL}.override_config={{rms_norm_eps: 0.1}}"),
            *("critic.model.lora_rank=2", "critic.optim.lr_warmup_steps=0", f"{MODEL}.exclude_modules=[k_proj,v_proj]"),
            *("critic.model.fsdp_config.dtype=bfloat16", r"critic.model.target_modules='.*\.[qv]_proj'"),
        ],
        {"must_change": ["critic/vf_loss"], "total": 3},
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


MARKS = {"adapters on a changed model": NO_PEFT, "greedy baseline": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in OPTIONS])
def test_going_on_is_exact(name: str, inputs: Path, tmp_path: Path) -> None:
    overrides, settings = OPTIONS[name]
    assert_resume_is_exact(inputs, tmp_path, [*overrides, *LIGHT], **{"total": 2, **settings})


TWO_STEPS = [*GAE, *LIGHT, "trainer.total_training_steps=2", "trainer.save_freq=2"]


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps, and one that was stopped after the first of them."""
    folder = tmp_path_factory.mktemp("runs")
    run = build_run(load_config(None, [*base_overrides(inputs, folder / "stopped"), *TWO_STEPS]))
    try:
        run.trainer.fit(interrupted=lambda: run.trainer.step_number == 1)
    finally:
        run.close()
    return train([*base_overrides(inputs, folder / "whole"), *TWO_STEPS]), folder / "stopped"


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(LocalEngine, id="a fresh optimizer (NeMo-RL 3171)"),
        pytest.param(PromptSampler, id="another order of the data (verl 3457)"),
        pytest.param(KLReward, id="a controller that begins again"),
    ],
)
def test_a_state_that_is_lost_would_show(
    owner: type, runs: tuple[Path, Path], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls."""
    whole, stopped = runs
    shutil.copytree(stopped, tmp_path / "run")
    forget: Callable[..., None] = lambda self, state: None  # noqa: E731
    monkeypatch.setattr(owner, "load_state_dict", forget)
    resumed = train([*base_overrides(inputs, tmp_path / "run"), *TWO_STEPS])
    with pytest.raises(AssertionError):
        assert_same_end(whole / "global_step_2", resumed / "global_step_2")
