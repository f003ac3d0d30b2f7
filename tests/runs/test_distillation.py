"""On-policy distillation in whole runs: the teacher takes the place of the reference; the policy approaches it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.device import DEVICE
from tests.made_once import made_once
from tests.runs.forked_group import ForkedGroup
from tests.runs.resume import assert_resume_is_exact
from tests.runs.steps import stepped
from tests.runs.tiny_run import LIGHT, base_overrides, measured, train
from tests.tiny import save_tiny, tiny_tokenizer
from tether.batch import TrainBatch, filled
from tether.config import load_config
from tether.distributed import groups
from tether.metrics.keys import describe
from tether.text.build import build_run

LOSS, TEACHER = "distillation.distillation_loss", "distillation.teacher_models.teacher_model.model_path"
SAMPLED = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *LIGHT]
ALONE = f"{LOSS}.use_task_rewards=False"
POLICY_GRADIENT = [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", ALONE]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of another class and another width than the policy's."""
    return made_once(
        "tiny_teacher", lambda folder: save_tiny(folder, "qwen3", seed=7, hidden_size=40), tmp_path_factory
    )


def overrides(inputs: Path, folder: Path, teacher: Path, *more: str) -> list[str]:
    taught = ["distillation.enabled=True", f"{TEACHER}={teacher}"]
    return [*base_overrides(inputs, folder), *SAMPLED, *taught, *more]


def log_probs_of(batch: TrainBatch, model: torch.nn.Module) -> torch.Tensor:
    """Return the log-prob of each response token, by whole logits of one row at a time."""
    found = torch.zeros(batch.response_mask.shape)
    for row, (p, r) in enumerate(zip(batch.prompt_length.tolist(), batch.response_length.tolist(), strict=True)):
        ids = torch.cat([batch.prompt_ids[row, :p], batch.response_ids[row, :r]])[None].to(DEVICE)
        with torch.no_grad():
            log_probs = model(ids).logits[0, p - 1 : -1].double().log_softmax(-1)
        found[row, :r] = log_probs.gather(-1, ids[0, p:, None])[:, 0].cpu()
    return found


def test_the_teacher_scores_the_policys_samples(inputs: Path, teacher: Path, tmp_path: Path) -> None:
    """Also beside adapters, where the reference would be the policy without them."""
    done = stepped(overrides(inputs, tmp_path, teacher, *POLICY_GRADIENT))
    (batch,), (metrics,) = done.batches, done.metrics
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).to(DEVICE)
    mask = batch.response_mask
    expected = log_probs_of(batch, model)[mask]
    torch.testing.assert_close(filled(batch.ref_log_probs)[mask], expected.float(), rtol=1e-4, atol=1e-4)
    assert metrics["distillation/pg_clipfrac"] > 0  # two optimizer steps
    assert metrics["distillation/kl"] > 1
    assert metrics["distillation/first_update/pg_clipfrac"] == 0
    assert [key for key in metrics if describe(key) is None] == []
    assert done.trainer.actor.engine.reference is None


@pytest.mark.parametrize(
    ("options", "share"),
    [(POLICY_GRADIENT, 0.8), ([f"{LOSS}.loss_mode=full", ALONE], 0.5)],
    ids=["policy gradient", "supervised"],
)
def test_the_policy_approaches_the_teacher(
    options: list[str], share: float, inputs: Path, teacher: Path, tmp_path: Path
) -> None:
    """From the first three steps to the last three: k1 is the KL of a sampled token, and noisy."""
    steady = ["trainer.total_training_steps=15", "actor_rollout_ref.actor.optim.lr=3e-3", "data.val_files=[]"]
    many = ["actor_rollout_ref.rollout.n=16", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64"]
    run = train(overrides(inputs, tmp_path, teacher, *options, *steady, *many))
    kl = [metrics["distillation/kl"] for step, metrics in measured(run).items() if step > 0]
    assert len(kl) == 15
    assert sum(kl[-3:]) < share * sum(kl[:3]), kl


def test_resume_is_exact_and_asks_for_the_same_teacher(inputs: Path, teacher: Path, tmp_path: Path) -> None:
    """With rewards and adapters beside it, and the KL over the teacher's most probable tokens."""
    pytest.importorskip("peft")
    mixed = [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=16", f"{LOSS}.distillation_loss_coef=0.5"]
    options = overrides(inputs, tmp_path, teacher, *mixed, "actor_rollout_ref.model.lora_rank=2")
    taught = options[len(base_overrides(inputs, tmp_path)) :]
    assert_resume_is_exact(inputs, tmp_path, taught, must_change=["distillation/loss"])
    other = save_tiny(tmp_path / "other", "qwen3", seed=8)
    ended = [*base_overrides(inputs, tmp_path / "whole"), *taught, f"{TEACHER}={other}"]
    with pytest.raises(ValueError, match=rf"{TEACHER}: not what .* was trained with"):
        build_run(load_config(None, [*ended, "trainer.total_training_steps=4"]))


def test_a_teacher_of_other_tokens_is_refused(inputs: Path, tmp_path: Path) -> None:
    larger = tiny_tokenizer()
    larger.add_tokens(["<think>"])
    other = save_tiny(tmp_path / "other", vocab_size=261)
    larger.save_pretrained(other)
    smaller = save_tiny(tmp_path / "smaller", vocab_size=259)
    wider = save_tiny(tmp_path / "wider", vocab_size=264)
    for path, mode, message in (
        (other, "k3", r"its tokenizer differs from the policy's in 1 tokens, such as '<think>'"),
        (smaller, "k3", r"its vocabulary has 259 entries, and .*k3 needs at least as many as the policy's 260"),
        (wider, "full", r"its vocabulary has 264 entries, and .*full needs as many as the policy's 260"),
        (tmp_path / "nowhere", "k3", "nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            build_run(load_config(None, overrides(inputs, tmp_path / "run", path, f"{LOSS}.loss_mode={mode}")))
    stepped(overrides(inputs, tmp_path / "run", wider, f"{LOSS}.loss_mode=k3"))  # ids are padded to a round number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "places"),
    [("k3", []), ("forward_kl_topk", []), ("k3", ["cluster.component_placement={actor: 0, rollout: 0, inference: 1}"])],
    ids=["sharded", "beside the policy", "on a device of its own"],
)
def test_two_devices_distil_as_one(
    mode: str, places: list[str], inputs: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if places:
        pytest.importorskip("ray")
    else:
        monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    options = [f"{LOSS}.loss_mode={mode}", "trainer.device=cpu", "actor_rollout_ref.actor.optim.lr=1e-3"]
    both = ([], ["trainer.n_gpus_per_node=2", *places])
    one, two = (
        measured(train(overrides(inputs, tmp_path / str(len(more)), teacher, *options, *more))) for more in both
    )
    for step in (1, 2, 3):
        for name in ("distillation/loss", "distillation/kl", "actor/grad_norm"):
            assert two[step][name] == pytest.approx(one[step][name], rel=1e-3), (step, name)
