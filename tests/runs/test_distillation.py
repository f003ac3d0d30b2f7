"""On-policy distillation in whole runs: the teacher takes the place of the reference; the policy approaches it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.device import DEVICE
from tests.made_once import made_once
from tests.runs.forked_group import ForkedGroup
from tests.runs.resume import assert_resume_is_exact
from tests.runs.steps import built, stepped
from tests.runs.tiny_run import LIGHT, base_overrides, measured, rows, train, write_jsonl
from tests.text.learning.batches import gradients
from tests.text.rewards.model_server import served
from tests.tiny import save_tiny, tiny_tokenizer
from tether.algorithms import count_valid
from tether.batch import TrainBatch, filled
from tether.config import load_config
from tether.distributed import groups
from tether.loop.engine import LossSizes
from tether.metrics.keys import describe
from tether.text.build import build_run
from tether.text.input_checks import missing_inputs

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


@pytest.fixture(scope="session")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once("other_teacher", lambda folder: save_tiny(folder, "qwen3", seed=9), tmp_path_factory)


def of_two_sources(folder: Path) -> Path:
    """Write rows of two sources in turn, whose prompts begin with other words, and return the file."""
    sums = rows("tiny/sums")
    for row in sums[1::2]:
        row |= {"data_source": "tiny/words", "prompt": [{"role": "user", "content": f"word {row['extra_info']}"}]}
    return write_jsonl(folder / "two_sources.jsonl", sums)


def of_two_teachers(folder: Path, sums: Path, words: Path) -> list[str]:
    """Return the overrides of a run in which each of two sources has a teacher; the names are not in their order."""
    named = (("words", "tiny/words", words), ("sums", "tiny/sums", sums))
    teachers = ", ".join(f"{name}: {{key: {key}, model_path: {path}}}" for name, key, path in named)
    return [
        "distillation.enabled=True",
        f"distillation.teacher_models={{{teachers}}}",
        f"data.train_files={of_two_sources(folder)}",
        *("data.val_files=[]", "data.max_prompt_length=80"),
    ]


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


def test_each_row_learns_from_the_teacher_of_its_source(
    inputs: Path, teacher: Path, other_teacher: Path, tmp_path: Path
) -> None:
    """Its log-probs are that teacher's, and the gradient is the sum of those of each source with its teacher alone."""
    taught = of_two_teachers(tmp_path, teacher, other_teacher)
    done = stepped([*base_overrides(inputs, tmp_path / "run"), *SAMPLED, *taught, f"{LOSS}.loss_mode=k3", ALONE])
    (batch,), (metrics,) = done.batches, done.metrics
    prompts = [done.trainer.source.dataset[row] for row in range(10)]
    source = {tuple(prompt.token_ids.tolist()): prompt.data_source for prompt in prompts}
    ids = [tuple(row[:length].tolist()) for row, length in zip(batch.prompt_ids, batch.prompt_length, strict=True)]
    sums = torch.tensor([source[row] == "tiny/sums" for row in ids])
    assert 0 < sums.sum() < len(sums)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE) for path in (teacher, other_teacher)
    ]
    expected = torch.where(sums[:, None], *(log_probs_of(batch, model) for model in models))
    mask = batch.response_mask
    torch.testing.assert_close(filled(batch.ref_log_probs)[mask], expected.float()[mask], rtol=1e-4, atol=1e-4)

    engine, loss = done.trainer.actor.engine, done.trainer.actor.loss
    valid = count_valid(mask)
    sizes = LossSizes(int(valid.num_tokens), int(valid.num_sequences))
    engine.accumulate_gradients(batch, loss, sizes)
    both = gradients(engine.model)
    function = loss.function
    alone = replace(loss, function=replace(function, distillation=replace(function.distillation, teachers=())))
    parts = []
    for rows_of_one, model in zip((sums, ~sums), models, strict=True):
        subset = batch[rows_of_one]
        subset.teacher, subset.ref_log_probs = None, log_probs_of(subset, model).float()
        engine.accumulate_gradients(subset, alone, sizes)
        parts.append(gradients(engine.model))
    for name, gradient in both.items():
        summed = parts[0][name] + parts[1][name]
        assert float((gradient - summed).norm() / gradient.norm()) < 1e-3, name
        assert float((gradient - parts[0][name]).norm() / gradient.norm()) > 1e-2, name
    counts = [int(mask[rows_of_one].sum()) for rows_of_one in (sums, ~sums)]
    means = [metrics[f"distillation/kl/{name}"] for name in ("sums", "words")]
    mean = sum(count * mean for count, mean in zip(counts, means, strict=True)) / sum(counts)
    assert metrics["distillation/kl"] == pytest.approx(mean)
    assert [key for key in metrics if describe(key) is None] == []


def test_a_served_teacher_gives_what_the_same_one_gives_here(
    inputs: Path, teacher: Path, other_teacher: Path, tmp_path: Path
) -> None:
    """Beside a teacher of the run; without one the run has no reference of its own."""
    model = AutoModelForCausalLM.from_pretrained(other_teacher, dtype=torch.float32)
    taught = [*SAMPLED, *of_two_teachers(tmp_path, teacher, other_teacher), f"{LOSS}.loss_mode=k3"]
    here = stepped([*base_overrides(inputs, tmp_path / "here"), *taught])
    with served() as server:

        def log_probs(ids: list[int]) -> list[float]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            return [float(logits[position, id_]) for position, id_ in enumerate(ids[1:])]

        server.log_probs = log_probs
        at_server = f"distillation.teacher_models.words.server_url={server.url}"
        there = stepped([*base_overrides(inputs, tmp_path / "there"), *taught, at_server])
        alone = ["distillation.enabled=True", f"{TEACHER}={other_teacher}"]
        alone += [f"distillation.teacher_models.teacher_model.server_url={server.url}"]
        single = stepped([*base_overrides(inputs, tmp_path / "single"), *SAMPLED, *alone, f"{LOSS}.loss_mode=k3"])
    for one, other in zip(here.batches, there.batches, strict=True):
        torch.testing.assert_close(filled(other.ref_log_probs), filled(one.ref_log_probs), rtol=1e-4, atol=1e-4)
    assert there.metrics[0]["distillation/kl/words"] == pytest.approx(
        here.metrics[0]["distillation/kl/words"], rel=1e-3
    )
    expected = log_probs_of(single.batches[0], model.to(DEVICE))
    mask = single.batches[0].response_mask
    torch.testing.assert_close(
        filled(single.batches[0].ref_log_probs)[mask], expected.float()[mask], rtol=1e-4, atol=1e-4
    )


def test_resume_asks_for_the_same_teachers(inputs: Path, teacher: Path, other_teacher: Path, tmp_path: Path) -> None:
    taught = [*SAMPLED, *of_two_teachers(tmp_path, teacher, other_teacher), *POLICY_GRADIENT]
    assert_resume_is_exact(inputs, tmp_path, taught, must_change=["distillation/kl"])
    key = "distillation.teacher_models"
    for change, named in (
        (f"{key}.words.model_path={teacher}", f"{key}.words.model_path"),
        (f"{key}={{words: {{key: tiny/sums}}, sums: {{key: tiny/words}}}}", key),
    ):
        again = [*base_overrides(inputs, tmp_path / "whole"), *taught, change, "trainer.total_training_steps=4"]
        with pytest.raises(ValueError, match=rf"^{named}: not what .* was trained with"):
            build_run(load_config(None, again))


def test_a_row_without_a_teacher_is_refused_and_a_teacher_without_rows(
    inputs: Path, teacher: Path, other_teacher: Path, tmp_path: Path
) -> None:
    """Before the models load, and the rows by the checks of files; validation needs no teacher."""
    taught = of_two_teachers(tmp_path, teacher, other_teacher)
    write_jsonl(tmp_path / "two_sources.jsonl", [*rows("tiny/sums", 3), *rows("tiny/word", 1)])
    config = load_config(None, [*base_overrides(inputs, tmp_path / "run"), *SAMPLED, *taught])
    message = (
        r"two_sources.jsonl.*: `data_source` is 'tiny/word', which no teacher scores: distillation.teacher_models has "
        r"teachers of 'tiny/sums', 'tiny/words'. Set the key of one to it, add a teacher, or leave such rows out. "
        r"Did you mean tiny/words\?"
    )
    with pytest.raises(ValueError, match=message):
        build_run(config)
    (problem,) = missing_inputs(config.config)
    assert re.search(message, f"{problem.path}: {problem.what} {problem.fix}")
    held_out = write_jsonl(tmp_path / "held_out.jsonl", rows("tiny/else", 12)[10:])
    write_jsonl(tmp_path / "two_sources.jsonl", rows("tiny/sums", 3))
    with pytest.raises(ValueError, match=r"teacher_models\.words\.key: no training row has 'tiny/words' as its"):
        build_run(config)
    with built([*base_overrides(inputs, tmp_path / "run"), *SAMPLED, *taught, "data.train_max_samples=2"]):
        pass  # other rows may have it
    write_jsonl(tmp_path / "two_sources.jsonl", [*rows("tiny/sums", 3), *rows("tiny/words", 1)])
    validated = [*base_overrides(inputs, tmp_path / "run"), *SAMPLED, *taught, f"data.val_files={held_out}"]
    with built(validated):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mode", [POLICY_GRADIENT, [f"{LOSS}.loss_mode=full", ALONE]], ids=["k1", "full"])
def test_the_policy_approaches_each_teacher_on_its_source(
    mode: list[str], inputs: Path, teacher: Path, other_teacher: Path, tmp_path: Path
) -> None:
    """On the rows of a source it comes nearer to the teacher of that source than to the other one."""
    options = [*mode, "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.rollout.n=16"]
    several = [*options, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64", "data.train_batch_size=10"]
    taught = of_two_teachers(tmp_path, teacher, other_teacher)
    done = stepped([*base_overrides(inputs, tmp_path / "run"), *SAMPLED, *taught, *several], count=40)
    for name in ("sums", "words"):
        kl = [metrics[f"distillation/kl/{name}"] for metrics in done.metrics]
        assert sum(kl[-3:]) < 0.7 * sum(kl[:3]), (name, kl)
    batch = done.batches[-1]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE) for path in (teacher, other_teacher)
    ]
    ahead = [batch.rollout_log_probs - log_probs_of(batch, model) for model in models]
    for index in range(2):
        mask = batch.response_mask & (filled(batch.teacher) == index)[:, None]
        kl = [float(difference[mask].mean()) for difference in ahead]
        assert kl[index] < 0.8 * kl[1 - index], (index, kl)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "offloaded"), [("k3", False), ("k3", True), ("forward_kl_topk", False)])
def test_two_devices_score_by_several_teachers_as_one(
    mode: str,
    offloaded: bool,
    inputs: Path,
    teacher: Path,
    other_teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    taught = [*SAMPLED, *of_two_teachers(tmp_path, teacher, other_teacher), f"{LOSS}.loss_mode={mode}"]
    taught += ["trainer.device=cpu", "actor_rollout_ref.actor.optim.lr=1e-3"]
    taught += [f"actor_rollout_ref.ref.fsdp_config.param_offload={offloaded}"]
    one, two = (
        measured(train([*base_overrides(inputs, tmp_path / devices), *taught, f"trainer.n_gpus_per_node={devices}"]))
        for devices in ("1", "2")
    )
    compared = ("distillation/loss", "distillation/kl/sums", "distillation/kl/words", "actor/grad_norm")
    for step in (1, 2, 3):  # not every step has rows of both
        expected, found = ({name: run[step][name] for name in compared if name in run[step]} for run in (one, two))
        assert found == pytest.approx(expected, rel=1e-3), step


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
