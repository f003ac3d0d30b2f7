"""Whole runs: what they measure, what they save, and that plain transformers reads it."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.trainer.tiny_run import GAE, GRPO, base_overrides, measured, rows, weights, write_jsonl
from tether.assembly.run import build_run
from tether.batch import TrainBatch
from tether.checkpoints.store import CheckpointStore
from tether.config import load_config
from tether.metrics.keys import describe
from tether.metrics.loggers.jsonl import read_metrics, read_samples
from tether.rollout.protocol import NoiseKey
from tether.trainer.loop import Trainer

STEPS = [1, 2, 3]
SAVING = [
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=True",
]
OVERRIDDEN = [
    "actor_rollout_ref.model.override_config={rms_norm_eps: 0.1}",
    "critic.model.override_config={rms_norm_eps: 0.2}",
]
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]


@dataclass(frozen=True)
class Finished:
    trainer: Trainer
    directory: Path

    @property
    def last(self) -> Path:
        return self.directory / "global_step_3"

    def rollout(self) -> TrainBatch:
        prompts = [self.trainer.source.dataset[row] for row in range(3)]
        rollouts = self.trainer.rollouts
        rollout = rollouts.collector.engine.generate([p.token_ids for p in prompts], rollouts.sampling, NoiseKey(7, 7))
        return TrainBatch.assemble(rollout, torch.ones(len(rollout)))


def run_to_the_end(overrides: list[str]) -> Finished:
    run = build_run(load_config(None, overrides))
    try:
        run.trainer.fit()
    finally:
        run.close()
    return Finished(run.trainer, run.directory)


@pytest.fixture(scope="module", params=["gae", "grpo", "lora", "override"])
def finished(request, inputs: Path, tmp_path_factory) -> Finished:
    algorithms = {"gae": GAE, "grpo": GRPO, "lora": [*GAE, *LORA], "override": [*GAE, *OVERRIDDEN]}
    algorithm = algorithms[request.param]
    base = base_overrides(inputs, tmp_path_factory.mktemp(request.param))
    return run_to_the_end([*base, *algorithm, *SAVING])


def test_every_step_is_measured_and_every_key_is_described(finished: Finished):
    metrics = read_metrics(finished.directory)
    assert list(metrics) == [0, *STEPS]
    assert [metrics[step]["training/global_step"] for step in STEPS] == STEPS
    assert [metrics[step]["training/epoch"] for step in STEPS] == [0, 0, 0]
    assert not {key for values in metrics.values() for key in values if describe(key) is None}
    expected = {"critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "reward/extra/digits/mean"}
    expected |= {"timing_s/step", "perf/throughput", "training/rollout_probs_diff_mean"}
    expected |= {"critic/vf_loss", "actor/reward_kl_penalty"} if finished.trainer.critic else {"actor/kl_loss"}
    assert all(expected <= metrics[step].keys() for step in STEPS)
    assert all(metrics[step]["training/rollout_probs_diff_max"] < 1e-5 for step in STEPS)


def test_samples_of_each_validation(finished: Finished):
    samples = read_samples(finished.directory)
    assert list(samples) == [0, 2, 3]
    for found in samples.values():
        assert [sample["index"] for sample in found] == list(range(7))
        assert "<|im_start|>user" in found[0]["prompt"]
        assert all(isinstance(sample["reward"], float) for sample in found)


def test_the_newest_checkpoints_are_kept(finished: Finished):
    assert sorted(p.name for p in finished.directory.glob("*global_step*")) == ["global_step_2", "global_step_3"]
    assert CheckpointStore(finished.directory).latest() == finished.last


def test_the_saved_policy_is_the_trained_one_in_plain_transformers(finished: Finished):
    batch = finished.rollout()
    expected = finished.trainer.actor.infer(batch).log_probs
    model = AutoModelForCausalLM.from_pretrained(finished.last / "actor", dtype=torch.float32).eval()
    for row in range(len(batch)):
        ids, start = sequence(batch, row)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
        found = log_probs.gather(1, ids[start:, None])[:, 0]
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(finished.last / "actor")
    assert tokenizer.chat_template == finished.trainer.rollouts.collector.tokenizer.chat_template
    assert model.generation_config.eos_token_id == sorted(finished.trainer.rollouts.collector.engine.eos_token_ids)


def test_the_saved_critic_is_the_trained_one_in_plain_transformers(finished: Finished):
    if finished.trainer.critic is None:
        assert not (finished.last / "critic").exists()
        return
    batch = finished.rollout()
    expected = finished.trainer.critic.infer(batch).values
    assert expected.any()
    model = AutoModelForTokenClassification.from_pretrained(finished.last / "critic", dtype=torch.float32).eval()
    for row in range(len(batch)):
        ids, start = sequence(batch, row)
        with torch.no_grad():
            found = model(ids[None]).logits[0, start - 1 : -1, 0]
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-4, rtol=1e-4)


def sequence(batch: TrainBatch, row: int) -> tuple[torch.Tensor, int]:
    """Prompt and response ids, and where the response begins."""
    start, length = int(batch.prompt_length[row]), int(batch.response_length[row])
    return torch.cat([batch.prompt_ids[row, :start], batch.response_ids[row, :length]]), start


def test_training_starts_at_the_reference(finished: Finished):
    first = read_metrics(finished.directory)[1]
    if "actor/reward_kl_penalty" in first:
        assert abs(first["actor/reward_kl_penalty"]) < 1e-6
    assert abs(read_metrics(finished.directory)[3].get("actor/reward_kl_penalty", 1.0)) > 1e-4


def test_the_adapter_alone_moves_and_its_absence_is_the_reference(finished: Finished, inputs: Path):
    if not (finished.last / "adapter").exists():
        pytest.skip("a run without LoRA")
    start = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    trained = finished.trainer.actor.engine.model.state_dict()
    for name, weight in start.state_dict().items():
        frozen = trained.get(name, trained.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(weight, frozen), name
    assert any(not torch.equal(w, start.state_dict()[name]) for name, w in weights(finished.last).items())
    batch = finished.rollout()
    assert finished.trainer.reference is not None
    reference = finished.trainer.reference(batch).log_probs
    assert not torch.allclose(reference, finished.trainer.actor.infer(batch).log_probs, atol=1e-3)
    ids, begin = sequence(batch, 0)
    with torch.no_grad():
        log_probs = start.eval()(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1).gather(1, ids[begin:, None])[:, 0]
    torch.testing.assert_close(reference[0, : len(log_probs)], log_probs, atol=1e-4, rtol=1e-4)


def test_the_learning_rate_schedule_reaches_the_optimizer(finished: Finished):
    rates = [read_metrics(finished.directory)[step]["actor/lr"] for step in STEPS]
    if finished.trainer.critic is None:
        assert rates == [1e-2] * 3
        return
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.25e-2])  # cosine over 3 steps
    assert [read_metrics(finished.directory)[step]["critic/lr"] for step in STEPS] == [0, 5e-3, 1e-2]


def test_rows_without_a_score_teach_nothing(base: list[str], inputs: Path, tmp_path: Path):
    reward = tmp_path / "abstains.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return None\n")
    finished = run_to_the_end(
        [*base, *GAE, f"custom_reward_function.path={reward}", "trainer.save_freq=1", "trainer.total_training_steps=2"]
    )
    metrics = read_metrics(finished.directory)
    assert metrics[2]["reward/abstain_rate"] == 1
    assert metrics[2]["reward/excluded_rows"] == 8
    assert metrics[2]["actor/reward_kl_penalty_coeff"] == metrics[1]["actor/reward_kl_penalty_coeff"] == 0.1
    before = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32).state_dict()
    after = weights(finished.directory / "global_step_2")
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_two_equal_runs_are_equal(base: list[str], tmp_path: Path):
    first = run_to_the_end([*base, *GAE])
    second = run_to_the_end([*base, *GAE, f"trainer.default_local_dir={tmp_path / 'again'}"])
    assert measured(first.directory) == measured(second.directory)
    other = run_to_the_end([*base, *GAE, f"trainer.default_local_dir={tmp_path / 'other'}", "trainer.seed=5"])
    assert measured(first.directory) != measured(other.directory)


def test_the_data_of_a_run_may_be_smaller_than_its_batch(base: list[str], tmp_path: Path):
    data = write_jsonl(tmp_path / "two.jsonl", rows(count=2))
    finished = run_to_the_end([*base, *GRPO, f"data.train_files={data}", "trainer.total_training_steps=2"])
    metrics = read_metrics(finished.directory)
    assert [metrics[step]["training/epoch"] for step in (1, 2)] == [0, 1]
    assert json.loads((finished.directory / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
