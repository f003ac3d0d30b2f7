"""Promise 2 for each option that keeps state: stopped and gone on is never stopped. tests/trainer/test_resume.py kills.

For an option that is new: a row in OPTIONS, or a call of `tests.trainer.resume.assert_resume_is_exact`.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.resume import assert_resume_is_exact
from tests.trainer.tiny_run import GAE, GRPO, write_inputs
from tether.data.sampler import PromptSampler
from tether.trainer.parts.reward_shaping import KLReward
from tether.training.engines.local import LocalEngine

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
COEFFICIENT = "actor/reward_kl_penalty_coeff"
pytestmark = pytest.mark.usefixtures("compiled_kernels")
NO_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA needs peft")
SAMPLED_VALIDATION = [
    f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1", f"{ROLLOUT}.val_kwargs.n=2",
    "trainer.test_freq=1",
]  # fmt: skip

OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "adaptive KL, warm-up, cosine": (GAE, {"must_change": [COEFFICIENT, "actor/lr", "critic/lr"]}),
    "several epochs, sampled validation, shuffled mini-batches, drawn tokens": (  # three steps an epoch
        [*GRPO, f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=0", *SAMPLED_VALIDATION],
        {"must_change": ["actor/kl_loss"], "stop_after": 4, "total": 5},
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
        [*GAE, f"{MODEL}.lora_rank=2", f"{MODEL}.override_config={{rms_norm_eps: 0.1}}"],
        {},
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=NO_PEFT if n.startswith("adapters") else ()) for n in OPTIONS])
def test_going_on_is_exact(name: str, inputs: Path, tmp_path: Path) -> None:
    overrides, settings = OPTIONS[name]
    assert_resume_is_exact(inputs, tmp_path, overrides, **{"total": 2, **settings})


@pytest.mark.parametrize(
    ("owner", "options"),
    [
        pytest.param(LocalEngine, GRPO, id="a fresh optimizer (NeMo-RL 3171)"),
        pytest.param(PromptSampler, GRPO, id="another order of the data (verl 3457)"),
        pytest.param(KLReward, GAE, id="a controller that begins again"),
    ],
)
def test_a_state_that_is_lost_would_show(
    owner: type, options: list[str], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls."""
    forget: Callable[..., None] = lambda self, state: None  # noqa: E731
    monkeypatch.setattr(owner, "load_state_dict", forget)
    with pytest.raises(AssertionError):
        assert_resume_is_exact(inputs, tmp_path, options, total=2)
