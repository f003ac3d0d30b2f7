"""Whole runs: what they measure, what they save, and that plain transformers reads it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

import tether
from tests.runs.golden import Golden
from tests.runs.loops import results
from tests.runs.steps import built, first_step, stepped
from tests.runs.tiny_run import (
    GAE,
    GRPO,
    LIGHT,
    base_overrides,
    rows,
    same,
    weights,
    without_clocks,
    write_jsonl,
)
from tests.tiny import CHATML, EOS_ID, VOCAB_SIZE
from tether.batch import TrainBatch
from tether.checkpoints.store import CheckpointStore
from tether.loop.loop import Trainer
from tether.metrics.keys import describe
from tether.metrics.loggers.jsonl import read_metrics, read_samples
from tether.runtime.objects import register_objects
from tether.text.sampling.protocol import NoiseKey

OVERRIDDEN = [
    "actor_rollout_ref.model.override_config={rms_norm_eps: 0.1}",
    "critic.model.override_config={rms_norm_eps: 0.2}",
]
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8", "critic.model.lora_rank=2"]
NO_WARMUP = "critic.optim.lr_warmup_steps=0"
ALGORITHMS = {
    "gae": [*GAE, NO_WARMUP],
    "grpo": GRPO,
    "lora": [*GAE, NO_WARMUP, *LORA],
    "override": [*GAE, NO_WARMUP, *OVERRIDDEN],
}
only_text = pytest.mark.parametrize("loop", ["text"], indirect=True)


@only_text
def test_every_step_is_measured_and_every_key_is_described(golden: Golden):
    metrics, steps = read_metrics(golden.folder), [1, 2, 3, 4]
    assert list(metrics) == [0, *steps]
    assert [metrics[step]["training/global_step"] for step in steps] == steps
    assert [metrics[step]["training/epoch"] for step in steps] == [0, 0, 0, 1]
    assert not {key for values in metrics.values() for key in values if describe(key) is None}
    expected = {"critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "reward/extra/digits/mean"}
    expected |= {"timing_s/step", "perf/throughput", "training/rollout_probs_diff_mean"}
    expected |= {"critic/vf_loss", "actor/reward_kl_penalty"}
    assert all(expected <= metrics[step].keys() for step in steps)
    assert all(metrics[step]["training/rollout_probs_diff_max"] < 1e-5 for step in steps)
    assert abs(metrics[1]["actor/reward_kl_penalty"]) < 1e-6  # training starts at the reference
    assert abs(metrics[3]["actor/reward_kl_penalty"]) > 1e-4


@only_text
def test_the_learning_rate_schedule_reaches_the_optimizer(golden: Golden):
    metrics = read_metrics(golden.folder)
    cosine = [1e-2, 0.8535534e-2, 0.5e-2, 0.1464466e-2]
    assert [metrics[step]["actor/lr"] for step in (1, 2, 3, 4)] == pytest.approx(cosine)
    assert [metrics[step]["critic/lr"] for step in (1, 2, 3, 4)] == [0, 5e-3, 1e-2, 1e-2]


@only_text
def test_samples_of_each_validation(golden: Golden):
    samples = read_samples(golden.folder)
    assert list(samples) == [0, 1, 2, 3, 4]
    for found in samples.values():
        assert [sample["index"] for sample in found] == list(range(7))
        assert "<|im_start|>user" in found[0]["prompt"]
        assert all(isinstance(sample["reward"], float) for sample in found)


@only_text
def test_another_seed_is_another_run(golden: Golden, tmp_path: Path):
    """That two equal runs are equal is what every test demands that compares one with the golden run."""
    first = results(golden.folder)[1]
    steps = [without_clocks(first_step(golden.overrides(tmp_path, *seed))) for seed in ([], ["trainer.seed=5"])]
    assert [all(same(value, first[key]) for key, value in found.items()) for found in steps] == [True, False]


@dataclass(frozen=True)
class Finished:
    trainer: Trainer
    directory: Path

    @property
    def last(self) -> Path:
        return self.directory / "global_step_2"

    def rollout(self) -> TrainBatch:
        prompts = [self.trainer.source.dataset[row] for row in range(3)]
        rollouts = self.trainer.rollouts
        rollout = rollouts.collector.engine.generate([p.token_ids for p in prompts], rollouts.sampling, NoiseKey(7, 7))
        return TrainBatch.assemble(rollout, torch.ones(len(rollout)))


# "override" has all that "gae" has
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name == "gae" else ()) for name in ALGORITHMS],
)
def finished(request, inputs: Path, tmp_path_factory) -> Finished:
    saving = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    base = base_overrides(inputs, tmp_path_factory.mktemp(request.param))
    with built([*base, *LIGHT, *ALGORITHMS[request.param], *saving]) as run:
        run.trainer.fit()
        return Finished(run.trainer, run.directory)


def test_plain_transformers_reads_what_was_saved(finished: Finished):
    """Policy, tokenizer and critic are those that were trained; the newest checkpoints are kept."""
    assert [path.name for path in finished.directory.glob("*global_step*")] == ["global_step_2"]
    assert CheckpointStore(finished.directory).latest() == finished.last
    trainer, batch = finished.trainer, finished.rollout()
    expected = trainer.actor.infer(batch).log_probs
    model = AutoModelForCausalLM.from_pretrained(finished.last / "actor", dtype=torch.float32).eval()
    for row in range(len(batch)):
        found = log_probs_of(model, batch, row)
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(finished.last / "actor")
    assert tokenizer.chat_template == trainer.rollouts.collector.tokenizer.chat_template
    assert model.generation_config.eos_token_id == sorted(trainer.rollouts.collector.engine.eos_token_ids)
    if trainer.critic is None:
        assert not (finished.last / "critic").exists()
        return
    expected = trainer.critic.infer(batch).values
    assert expected.any()
    critic = AutoModelForTokenClassification.from_pretrained(finished.last / "critic", dtype=torch.float32).eval()
    for row in range(len(batch)):
        ids, start = sequence(batch, row)
        with torch.no_grad():
            found = critic(ids[None]).logits[0, start - 1 : -1, 0]
        torch.testing.assert_close(found, expected[row, : len(found)], atol=1e-4, rtol=1e-4)


def test_what_a_run_sets_goes_along_with_its_policy(base: list[str], tmp_path: Path):
    """Its template with the values of its variables, and the distribution that it samples from."""
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{{ 'think' if thinking else 'no ' ~ mode }}:"
    kwargs = "{thinking: false, mode: 'a\\'b'}"
    settings = [f"data.chat_template={template!r}", f"data.apply_chat_template_kwargs={kwargs}"]
    sampling = ["actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.top_p=0.9"]
    with built([*base, *GRPO, *settings, *sampling]) as run:
        run.trainer.actor.engine.save(tmp_path / "actor")
        unchanged = run.trainer.rollouts.collector.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    messages = [{"role": "user", "content": "2+2?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<2+2?>no a'b:"
    assert tokenizer.apply_chat_template(messages, tokenize=False, thinking=True) == "<2+2?>think:"
    assert unchanged.chat_template == CHATML
    policy = tether.load(tmp_path / "actor")
    assert policy.generate("2+2?", max_new_tokens=1)
    saved = GenerationConfig.from_pretrained(tmp_path / "actor")
    assert (saved.do_sample, saved.temperature, saved.top_p, saved.top_k) == (True, 0.7, 0.9, VOCAB_SIZE)
    assert saved.eos_token_id == [EOS_ID, *range(4, 90)]


def sequence(batch: TrainBatch, row: int) -> tuple[torch.Tensor, int]:
    """Return prompt and response ids, and where the response begins."""
    start, length = int(batch.prompt_length[row]), int(batch.response_length[row])
    return torch.cat([batch.prompt_ids[row, :start], batch.response_ids[row, :length]]), start


def log_probs_of(model: torch.nn.Module, batch: TrainBatch, row: int) -> torch.Tensor:
    """Return the log-probs of a response by a model of transformers."""
    ids, start = sequence(batch, row)
    with torch.no_grad():
        return model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])[:, 0]


@pytest.mark.parametrize("finished", ["lora"], indirect=True)
def test_the_adapters_alone_move_and_their_absence_is_the_reference(finished: Finished, inputs: Path):
    start = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    assert finished.trainer.critic is not None
    for role, learner in (("actor", finished.trainer.actor), ("critic", finished.trainer.critic)):
        trained, merged = learner.engine.model.state_dict(), weights(finished.last, role)
        for name, weight in start.base_model.state_dict(prefix="model.").items():
            frozen = trained.get(name, trained.get(name.replace(".weight", ".base_layer.weight")))
            assert torch.equal(weight, frozen), name
        assert any(not torch.equal(merged[name], w) for name, w in start.base_model.state_dict(prefix="model.").items())
    assert (finished.last / "adapter").exists()
    assert (finished.last / "critic_adapter").exists()
    batch = finished.rollout()
    assert finished.trainer.reference is not None
    reference = finished.trainer.reference(batch).log_probs
    assert not torch.allclose(reference, finished.trainer.actor.infer(batch).log_probs, atol=1e-3)
    log_probs = log_probs_of(start.eval(), batch, 0)
    torch.testing.assert_close(reference[0, : len(log_probs)], log_probs, atol=1e-4, rtol=1e-4)


def test_rows_without_a_score_teach_nothing(base: list[str], inputs: Path):
    with register_objects({"letters": lambda **_: None}):
        found = stepped([*base, *GAE, *LIGHT], 2)
    first, second = found.metrics
    assert second["reward/abstain_rate"] == 1
    assert second["reward/excluded_rows"] == 8
    assert second["actor/reward_kl_penalty_coeff"] == first["actor/reward_kl_penalty_coeff"] == 0.1
    before = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32).state_dict()
    after = found.trainer.actor.engine.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_the_data_of_a_run_may_be_smaller_than_its_batch(base: list[str], tmp_path: Path):
    data = write_jsonl(tmp_path / "two.jsonl", rows(count=2))
    found = stepped([*base, *GRPO, *LIGHT, f"data.train_files={data}"], 2)
    assert [metrics["training/epoch"] for metrics in found.metrics] == [0, 1]
