"""Settings that changed since a checkpoint was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.loading import load
from tether.config import DRAW, NO_DRAW, changes_since, check_resumable

ACTOR = "actor_rollout_ref.actor"
DEVICES = "trainer.n_gpus_per_node"


def saved(folder: Path, *settings: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(load(*settings).to_yaml())
    return file


def test_keys_that_inherit_a_change_are_not_listed_beside_it(tmp_path: Path):
    before = saved(tmp_path)
    assert changes_since(before, load(f"{DEVICES}=2")) == [f"{DEVICES}: 1 -> 2"]
    epochs = f"{ACTOR}.ppo_epochs"
    assert changes_since(before, load(f"{epochs}=3")) == [f"{epochs}: 1 -> 3"]
    own = changes_since(before, load(f"{epochs}=3", "critic.ppo_epochs=2"))
    assert own == [f"{epochs}: 1 -> 3", "critic.ppo_epochs: 1 -> 2"]


def test_the_number_of_devices_draws_no_other_batch(tmp_path: Path):
    now = load(f"{DEVICES}=2", "data.seed=5")
    assert changes_since(saved(tmp_path), now, among=DRAW, without=NO_DRAW) == ["data.seed: 1 -> 5"]


def test_what_acts_when_models_are_built_is_not_changed_on_resume(tmp_path: Path):
    """A changed rank would be announced, written into the next checkpoint, and not trained."""
    lora, grpo = "actor_rollout_ref.model.lora_rank", "algorithm.adv_estimator=grpo"
    before = saved(tmp_path, f"{lora}=4", grpo)
    check_resumable(
        before, load(f"{lora}=4", grpo, "actor_rollout_ref.actor.optim.lr=1", "policy.model_type=cnn_policy")
    )
    critic = ("critic.model.lora_rank=2", "critic.model.exclude_modules=[k_proj]", "algorithm.adv_estimator=gae")
    changed = r"critic\.model\.lora_rank: 0 -> 2; critic\.model\.exclude_modules: .* -> .*k_proj"
    with pytest.raises(ValueError, match=changed):
        check_resumable(saved(tmp_path, "algorithm.adv_estimator=gae"), load(*critic))
    before = saved(tmp_path, f"{lora}=4", grpo)
    with pytest.raises(ValueError, match=rf"^{lora}: 4 -> 8; policy\.hidden_dim: 256 -> 32\. .* cannot change"):
        check_resumable(before, load(f"{lora}=8", grpo, "policy.hidden_dim=32"))
    with pytest.raises(ValueError, match=r"adv_estimator: grpo -> gae, which needs a critic"):
        check_resumable(before, load(f"{lora}=4", "algorithm.adv_estimator=gae"))
